"""Questions of the tiny world with their supporting lines, and rows for two warm starts on them.

1. `make_questions` draws look-ups and two-hop questions behind n documents; their evidence is the
   lines that the answer rests on.
2. `policy_rows` demonstrates structured answers. Half of those to two-hop questions leave the
   second line out, and some others slip: a line is missing, replaced or superfluous. The answer is
   then what the quoted lines say, or the right one all the same. So format is learned, and evidence
   and outcome are left to reinforcement.
3. `reward_rows` demonstrates scores of several sets of evidence on one question, which follow
   `true_score` but for noise: the reward model is of use from the start, and has room to improve.

    python -m spell_jax.warm_start.evidence_rows --out=DIR

writes DIR/policy.jsonl and DIR/reward.jsonl, one {"prompt", "completion", "role", "task"} a line
for supervised tuning, and DIR/train.jsonl and DIR/held_out.jsonl, questions as
data/questions.py reads them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from spell_jax.data import tiny_world as world
from spell_jax.data.questions import Question
from spell_jax.runtime.jsonl import write_records
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.evidence import HIGHEST, LOWEST, Structured, write_answer
from spell_jax.selfplay.prompts import Prompts
from spell_jax.warm_start.demonstrations import Row

TASK = "general_qa"
# Numbers that draws of this module begin with, besides seed and index.
_QUESTIONS, _POLICY, _REWARD = 5, 6, 7
HELD_OUT_SEED = 10_000  # added to the seed


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What the rows hold; every share is a probability.

    Attributes:
      documents: a row's question stands behind one of these numbers of documents.
      two_hop: share of two-hop questions, the rest being look-ups.
      hasty: share of two-hop answers and sets that leave the second line out.
      slips: share of the other answers with evidence that is not the true lines.
      lucky: share of them, where the answer is wrong by the evidence, that is right nevertheless.
      sets: a reward row has one of these numbers of sets.
      set_slips: share of the other sets that are not the true lines.
      noise: share of scores that are one off.
    """

    documents: tuple[int, ...] = (3, 4, 5, 6)
    two_hop: float = 0.5
    hasty: float = 0.65
    slips: float = 0.2
    lucky: float = 0.9
    sets: tuple[int, ...] = (1, 2, 3, 4)
    set_slips: float = 0.5
    noise: float = 0.05


def make_questions(
    seed: int, count: int, documents: Sequence[int], two_hop: float = 0.5
) -> tuple[Question, ...]:
    """Seeded questions with their supporting lines; document numbers cycle through `documents`.

    Args:
      seed: held-out questions have another one than those that are trained on.
      count: of questions.
      documents: each from 2 to 24.
      two_hop: share of two-hop questions.
    """
    made = []
    for index in range(count):
        rng = np.random.default_rng([seed, index, _QUESTIONS])
        made.append(draw_question(rng, documents[index % len(documents)], two_hop))
    return tuple(made)


def draw_question(rng: np.random.Generator, documents: int, two_hop: float) -> Question:
    """A question about so many new documents."""
    texts = world.make_documents(rng, documents)
    kind = "two_hop" if rng.random() < two_hop else "lookup"
    drawn = world.draw_question(rng, texts, kind)
    return Question(TASK, texts, drawn.text, drawn.answer, drawn.evidence)


def policy_rows(prompts: Prompts, mixture: Mixture, seed: int, count: int) -> Iterator[Row]:
    """Structured answers; row i depends on (seed, i) alone."""
    for index in range(count):
        rng = np.random.default_rng([seed, index, _POLICY])
        question = draw_question(rng, int(rng.choice(mixture.documents)), mixture.two_hop)
        lines = draw_evidence(rng, question, mixture.slips, mixture.hasty)
        right = set(question.evidence) <= set(lines) or rng.random() < mixture.lucky
        source = question.evidence[-1] if right else lines[-1]
        answer = _value(question, source)
        reasoning = f"{_attribute(question)} of {source.split()[0]} is {answer}"
        answer, quoted = f" {answer}", _quoted(lines)
        text = write_answer(Structured(question.question, quoted, reasoning, answer))
        yield Row(prompts.evidence(question.documents, question.question), text, "responder", TASK)


def reward_rows(prompts: Prompts, mixture: Mixture, seed: int, count: int) -> Iterator[Row]:
    """Scores of several sets of evidence; row i depends on (seed, i) alone."""
    for index in range(count):
        rng = np.random.default_rng([seed, index, _REWARD])
        question = draw_question(rng, int(rng.choice(mixture.documents)), mixture.two_hop)
        count = rng.choice(mixture.sets)
        sets = [
            draw_evidence(rng, question, mixture.set_slips, mixture.hasty) for _ in range(count)
        ]
        scores = [_noisy(rng, true_score(lines, question), mixture.noise) for lines in sets]
        thoughts = "\n".join(f"{i}{think(lines, question)}" for i, lines in enumerate(sets, 1))
        verdict = "\n".join(f"{i} {score}" for i, score in enumerate(scores, 1))
        completion = f"<think>{thoughts}</think>{verdict}"
        texts = [_quoted(lines).strip() for lines in sets]
        prompt = prompts.evidence_scores(question.question, texts)
        yield Row(prompt, completion, "reward_model", TASK)


def draw_evidence(
    rng: np.random.Generator, question: Question, slips: float, hasty: float
) -> list[str]:
    """The true lines of a question; of two, in the share `hasty` of draws, the first alone; and in
    the share `slips` of the other draws one missing, one replaced by another document, all
    replaced, or one superfluous."""
    true = list(question.evidence)
    if rng.random() < hasty and len(true) > 1:
        return true[:1]
    if rng.random() >= slips:
        return true
    others = [line for text in question.documents if (line := text.removeprefix("- ")) not in true]
    if not others:  # there are as many documents as true lines
        return true[:1]
    spare = [others[i] for i in rng.permutation(len(others))]
    kind = rng.choice(("missing", "replaced", "others", "superfluous"))
    if kind == "superfluous":
        return [*true, spare[0]]
    if kind == "missing" and len(true) > 1:
        return true[:-1]
    if kind == "others":
        return spare[: len(true)]
    return [*true[:-1], spare[0]]


def think(lines: Sequence[str], question: Question) -> str:
    """Reads a set line by line: the name that is looked for, the line's, whether they are equal.

    Behind a line that was looked for it is the friend whom that line names, or nobody. A small
    model compares two names where they stand next to each other.
    """
    said, hops = "", len(question.evidence)
    name = question.question.split()[-1]
    for line in lines:
        found, *_, friend = line.split()
        equal = hops > 0 and found == name
        said += f" {name if hops else '-'} {found}{'[[YES]]' if equal else '[[NO]]'}"
        hops -= equal
        name = friend if equal else name
    return said


def true_score(lines: Sequence[str], question: Question) -> int:
    """What a perfect reward model says of quoted lines: 5 for all true lines and no other, 1 for
    none; a superfluous line takes one off."""
    found = len(set(lines) & set(question.evidence))
    share = found / len(question.evidence)
    superfluous = found > 0 and len(set(lines)) > found
    return max(LOWEST, round(LOWEST + (HIGHEST - LOWEST) * share) - superfluous)


def _quoted(lines: Sequence[str]) -> str:
    """Lines as an evidence section has them: with bullets, behind which a name has the same token
    as in a document."""
    return "".join(f"\n- {line}" for line in lines) + "\n"


def _noisy(rng: np.random.Generator, score: int, noise: float) -> int:
    if rng.random() >= noise:
        return score
    step = 1 if score == LOWEST else -1 if score == HIGHEST else int(rng.choice((-1, 1)))
    return score + step


def _attribute(question: Question) -> str:
    return question.question.split()[0]


def _value(question: Question, line: str) -> str:
    """What a line says of the attribute that is asked for."""
    return line.split()[1 + world.ATTRIBUTES.index(_attribute(question))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: rows and questions into a folder."""
    parser = argparse.ArgumentParser(description="Rows and questions with evidence.")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument("--prompts", default="compact", help="compact, full or a folder")
    parser.add_argument("--rows", type=int, default=20_000, help="of each kind")
    parser.add_argument("--questions", type=int, default=2000, help="to train on")
    parser.add_argument("--held_out", type=int, default=256, help="questions")
    parser.add_argument("--documents", type=int, nargs="+", default=[5], help="of a question")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    words, mixture, out = prompt_sets.load(flags.prompts), Mixture(), Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, make in (("policy", policy_rows), ("reward", reward_rows)):
        rows = make(words, mixture, flags.seed, flags.rows)
        write_records(out / f"{name}.jsonl", map(dataclasses.asdict, rows))
    for name, seed, count in (
        ("train", flags.seed, flags.questions),
        ("held_out", flags.seed + HELD_OUT_SEED, flags.held_out),
    ):
        questions = make_questions(seed, count, flags.documents)
        write_records(out / f"{name}.jsonl", map(dataclasses.asdict, questions))


if __name__ == "__main__":
    main()
