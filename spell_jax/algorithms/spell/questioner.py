"""Questions that a model writes about clusters, with their references: parts 1 to 3 of SPELL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.episode import judge_answers
from spell_jax.algorithms.spell import frozen_reader
from spell_jax.algorithms.spell.config import QuestionsConfig, SpellConfig
from spell_jax.algorithms.spell.episode import SpellEpisode, documents_of, reject
from spell_jax.algorithms.spell.sections import QuestionerConfig
from spell_jax.data.clusters import CLOZE, LETTERS, Cluster
from spell_jax.rollout.replies import Ask, AskModels
from spell_jax.runtime import fault_injection
from spell_jax.selfplay import cloze, parsing, rewards, rules, selection
from spell_jax.selfplay.given_questions import scores_itself
from spell_jax.selfplay.memory import Entry, QuestionMemory


class QuestionWriter:
    """A writer of questions about the clusters of a stream.

    Attributes:
      stream: tasks and clusters to write about.
      memory: questions of earlier steps; none, unless a subclass remembers some.
      model_names: models besides the policy: the frozen reader, if there is one.
      temperature: temperature of all samples that questions are made from; None:
        sampler.temperature, at which the questioner is trained.
    """

    def __init__(
        self,
        config: QuestionsConfig,
        context: AlgorithmContext,
        temperature: float | None = None,
        memory: int = 0,
    ):
        self.config, self.section = config, config.questioner
        self.prompts = context.prompts
        self.stream = context.deal(context.clusters())
        self.memory = QuestionMemory(memory)
        self.model_names = config.frozen_copies
        self.temperature = temperature
        self._count = context.count_tokens
        self._cap = context.prompt_cap
        self._judge = context.judge

    @property
    def compares_proposals(self) -> bool:
        """Whether judge or duplicate search need all proposals of a round."""
        return self._judge is not None or self.section.questions_per_cluster > 1

    def write_all(self, ask: AskModels, episodes: Sequence[SpellEpisode]) -> list[SpellEpisode]:
        """Run parts 1 to 3 of all episodes; drop duplicates and judge answers without documents."""
        proposed = self.drop_duplicates(ask.run_all(self.propose, episodes))
        written = ask.run_all(self.check, proposed)
        if self._judge is None:
            return written
        places = [n for n, e in enumerate(written) if e.status == "accepted"]
        blind = [(e, e.blind_stated, e.blind_scores) for e in (written[n] for n in places)]
        judged = judge_answers(self._judge, self.config.rule, blind)
        for n, (scores, _) in zip(places, judged, strict=True):
            written[n] = self._reject_known(replace(written[n], blind_scores=scores))
        return written

    async def check(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Run parts 2 and 3: settle the reference and apply all filters, or record why not.

        With a judge, answers without documents are not compared yet (`write_all`).
        """
        fault_injection.point("proposed")
        return await self.read_reference(ask, await self.filter(ask, episode))

    async def write(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Run parts 1 to 3 of one episode."""
        return await self.check(ask, await self.propose(ask, episode))

    # 1. The questioner writes a question.

    def start_episodes(self, rng: np.random.Generator) -> list[SpellEpisode]:
        """Start K episodes of each cluster, which sample from the same questioner prompt.

        With answer_first each episode has its own document and answer.
        """
        count = self.section.questions_per_cluster
        dealt = self.stream.next(self.config.generation_batch // count)
        starts = count if self.section.answer_first else 1
        pairs = [pair for pair in dealt for _ in range(starts)]
        started = [self._start_episode(task, cluster, rng) for task, cluster in pairs]
        return [episode for episode in started for _ in range(count // starts)]

    def _start_episode(self, task: str, cluster: Cluster, rng: np.random.Generator) -> SpellEpisode:
        """Sample what the questioner of an episode reads, and how it is asked."""
        history = self.memory.get(task, cluster.id)
        seen_documents = documents_of(history)
        unseen = [i for i in range(len(cluster.documents)) if i not in seen_documents]
        m = int(rng.choice(self.section.documents))
        room = len(cluster.documents) - self.section.unread_documents
        if room < 1:
            return SpellEpisode(
                task, cluster, (), (), status="too_small", reason="too_few_documents"
            )
        # A first question leaves `unread_documents` unread: the paper demands m < n (spec 2.1).
        new_count = min(m, room, len(unseen))
        new = [int(i) for i in rng.permutation(unseen)[:new_count]]
        # The prompt states the right option's letter, sampled uniformly (spec 2.2).
        letter = LETTERS[rng.integers(4)] if task == "multiple_choice" else None
        cues = self.section.cues
        cue, span = cues[rng.integers(len(cues))] if cues else "", ""
        if self.section.answer_first and new:
            spans = cloze.answer_spans(cluster.documents[new[0]])
            spans = [text for text in spans if scores_itself(text, task)]
            if not spans:
                return SpellEpisode(task, cluster, (), (), status="too_small", reason="no_span")
            span = spans[rng.integers(len(spans))]
            cue = self.prompts.answer_first(span)
        leak = self.config.reader.gate_leak
        leaks = leak > 0 and rng.random() < leak
        dropped = 0
        # Over the prompt cap, new documents go first, then the oldest question (spec 2.2).
        while True:
            shown = tuple(sorted(documents_of(history) | set(new)))
            documents = [cluster.documents[i] for i in shown]
            text = self.prompts.questioner(task, documents, history, letter, cue)
            smallest = not history and len(new) <= 1
            if smallest or self._count(text) <= self._cap:
                break
            dropped += 1
            if new and (history or len(new) > 1):
                new.pop()
            else:
                history = history[1:]
                if not history:  # the questioner needs at least one document
                    new = [int(rng.integers(len(cluster.documents)))]
        names = [f"{{documents[{i}]}}" for i in shown]
        return SpellEpisode(
            task,
            cluster,
            shown,
            history,
            dropped=dropped,
            reduced=m > room,
            questioner_prompt=text,
            span=span,
            leaks=leaks,
            template=self.prompts.questioner(task, names, history, letter, cue),
        )

    async def propose(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Ask for a question and its reference, and parse the reply."""
        if not episode.questioner_prompt:
            return episode
        (reply,) = replies = await ask(
            "questioner",
            [episode.questioner_prompt],
            temperature=self.temperature,
            **self.section.options,
        )
        if reply is None:
            return episode.without_reply("questioner", replies)
        (text,) = reply.texts
        parsed, hidden = self.config.parse_question(text, episode.task, self._count), ""
        # truncated = "zero": a proposal that the token cap cut off counts for nothing, even if its
        # text parses.
        if parsed.status == "accepted" and not reply.scored_texts[0]:
            parsed = parsing.Parsed("bad_format", reason="truncated")
        if episode.task == CLOZE:
            documents = episode.cluster.documents
            shown = [documents[i] for i in episode.shown]
            parsed, hidden = cloze.make_gap(parsed, shown, documents)
        # With answer_first a rule has chosen the answer. A questioner that states another answer
        # evades the rule.
        is_asked = not episode.span or rules.same_answer(parsed.answer, episode.span, episode.task)
        if parsed.status == "accepted" and not is_asked:
            parsed = parsing.Parsed("bad_format", reason="another_answer")
        return replace(
            episode,
            proposal=reply,
            status=parsed.status,
            reason=parsed.reason,
            question=parsed.question,
            hidden=hidden,
            reference=parsed.answer,
            own_reference=parsed.answer,
            reward=rewards.BAD_FORMAT if self.is_punished(parsed) else None,
        )

    def is_punished(self, parsed: parsing.Parsed) -> bool:
        """Return whether a proposal that is not accepted earns a negative reward."""
        return False

    def drop_duplicates(self, episodes: Sequence[SpellEpisode]) -> list[SpellEpisode]:
        """End each episode that repeats an earlier question of the same task and cluster."""
        accepted = [n for n, e in enumerate(episodes) if e.status == "accepted"]
        pairs = [(f"{e.task}/{e.cluster.id}", e.question) for e in (episodes[n] for n in accepted)]
        twins = {accepted[i] for i in selection.duplicates(pairs)}
        return [replace(e, status="duplicate") if n in twins else e for n, e in enumerate(episodes)]

    # 2. Questions that need no documents are ungrounded.

    async def filter(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Reject an accepted question that is answered right without documents, by the rule."""
        e, samples = episode, self.section.grounding_samples
        if e.status != "accepted" or not samples:
            return e
        # Instead of documents the prompt has the word `Empty` (spec 2.5).
        prompt = self.prompts.responder(e.task, (), e.question)
        (reply,) = await ask("responder", [prompt], samples, temperature=self.temperature)
        # Without a reply the question passes: no answer shows that it needs no documents.
        texts = () if reply is None else reply.scored_texts
        blind = self.config.read_answers(texts, e.task)
        scores = self.config.score_answers(blind, e.reference, e.task)
        stated = self.config.state_answers(texts, e.task)
        e = replace(e, blind=blind, blind_stated=stated, blind_scores=scores)
        return self._reject_known(e) if self._judge is None else e

    def _reject_known(self, e: SpellEpisode) -> SpellEpisode:
        is_known = sum(e.blind_scores) >= self.section.grounding_threshold
        return reject(e, "known_without_documents") if is_known else e

    # 3. (Option) A frozen copy of the first policy states the reference.

    async def read_reference(self, ask: Ask, e: SpellEpisode) -> SpellEpisode:
        """Replace the reference by the frozen reader's answer, or reject the question."""
        if e.status != "accepted" or not self.config.has_reader:
            return e
        e = await frozen_reader.read_reference(self.config, self.prompts, ask, e, self.temperature)
        # The reader's answer is a new reference, to which the answers without documents are
        # compared again.
        return self._reject_known(e) if e.status == "accepted" and self._judge is None else e

    def state_dict(self) -> dict[str, Any]:
        # The public code saves no memory: its resumed run starts with an empty one.
        return {"stream": self.stream.state_dict(), "memory": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.memory.load_state_dict(state["memory"])


class Questioner(QuestionWriter):
    """The writer that SPELL trains: it is rewarded, and remembers its solvable questions."""

    def __init__(self, config: SpellConfig, context: AlgorithmContext):
        super().__init__(config, context, memory=config.questioner.memory)
        self.section: QuestionerConfig = config.questioner

    def is_punished(self, parsed: parsing.Parsed) -> bool:
        is_bad = parsed.status == "bad_format"
        # Over-long and non-numeric references are declined. The paper's text punishes all errors
        # of format (7), its code does not punish these.
        declined = parsed.status == "declined" and parsed.reason != parsing.NOTHING_TO_ASK
        c = self.section
        return (is_bad and c.format_penalty) or (declined and c.decline_penalty)

    # After the answers.

    def reward(self, e: SpellEpisode) -> float | None:
        """Return the reward of a question for its answers' rewards, by the mapping (7).

        None if one answer is left, which truncated = "drop" leaves: it does not tell how hard the
        question is.
        """
        if not e.scores[1:]:
            return None
        c = self.section
        # The questioner earns 0 where all answers are right or all are wrong (spec 2.6).
        return rewards.questioner_reward(e.mean_score, c.mapping, c.mu, c.sigma) if e.mixed else 0.0

    def remember(self, episodes: Sequence[SpellEpisode]) -> None:
        """Write a step's solvable questions to the memory."""
        for e in episodes:
            if e.response is None:
                continue
            # Algorithm 1 (line 19) stores questions with r_que > 0, the public code also questions
            # that every answer solves.
            measure = e.mean_score if self.section.memory_solved else (e.reward or 0.0)
            if measure > 0:
                read = e.new if self.section.memory_documents == "new" else e.shown
                self.memory.push(e.task, e.cluster.id, Entry(read, e.question, e.reference))
