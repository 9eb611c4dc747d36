"""References from a frozen reader: answers of a copy of the first policy, where they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spell_jax.algorithms.spell.config import QuestionsConfig
from spell_jax.algorithms.spell.episode import SpellEpisode, reject
from spell_jax.algorithms.spell.sections import CONFIRMED, READER
from spell_jax.rollout.replies import Ask
from spell_jax.selfplay import rules
from spell_jax.selfplay.hops import join_hop, split_hops
from spell_jax.selfplay.prompts import Prompts


async def read_reference(
    config: QuestionsConfig, prompts: Prompts, ask: Ask, e: SpellEpisode, temperature: float | None
) -> SpellEpisode:
    """Replace a question's reference by the reader's answer; reject the question without one.

    With the source "confirmed" the old reference stays, and must equal the reader's answer.
    The reader sees the questioner's documents. With by_hop the reader answers hop by hop.
    """
    reader = config.reader
    documents = [config.as_read(e.documents)[i] for i in e.shown]
    hop, links = split_hops(e.question, e.history) if reader.by_hop else (e.question, [])
    reference, leaked = "", False
    # By hops, each answer is put into the next link (docs/algorithm.md, "References by hop"). The
    # last round, without a link, states the reference.
    for link in (*links, None):
        text = prompts.responder(e.task, documents, hop)
        (reply,) = replies = await ask("responder", [text], reader.samples, READER, temperature)
        if reply is None:
            return e.without_reply("reader", replies)
        answers = config.read_answers(reply.scored_texts, e.task)
        answer, count = most_frequent(answers, e.task, config.extract)
        # More than half of all samples: answers that state nothing count against an agreement.
        agrees = count >= 2 and 2 * count > reader.samples
        if reader.unanimous:
            agrees = count == reader.samples
        # gate_leak is an experiment with a leaky filter (arXiv 2605.22217): the question passes
        # with the reader's most frequent answer.
        if answer is None or not (agrees or e.leaks):
            return reject(e, "reader_disagrees")
        reference, leaked = answer, leaked or not agrees
        hop = join_hop(link, answer) if link else ""
    # A round trip (arXiv 1906.05416): the questioner's own reference stays, as it was written.
    if reader.source == CONFIRMED:
        if not rules.same_answer(reference, e.reference, e.task, config.extract):
            return reject(e, "reader_disagrees")
        reference = e.reference
    # The answers without documents exist already: comparing them to the new reference costs no
    # samples.
    is_equal = [rules.same_answer(reference, b or "", e.task, config.extract) for b in e.blind]
    scores = tuple(map(float, is_equal))
    return replace(e, reference=reference, leaked=leaked, blind_scores=scores)


def most_frequent(
    answers: Sequence[str | None], task: str, extract: str = "paper"
) -> tuple[str | None, int]:
    """Return (the answer that agrees with most answers, how many agree); the first wins a tie.

    The result is (None, 0) if all answers are None.
    """
    texts = [answer for answer in answers if answer is not None]
    # Equality by the rule is not transitive (numbers within 0.15 %), so there are no classes to
    # count: each answer counts the answers equal to it.
    counts = [sum(rules.same_answer(a, b, task, extract) for b in texts) for a in texts]
    largest = max(counts, default=0)
    return (texts[counts.index(largest)], largest) if largest else (None, 0)
