"""Tiny-world questions with supporting lines, and warm-start rows for policy and reward model.

1. `make_questions` samples look-ups and two-hop questions. Their evidence is the lines that support
   the answer.
2. `policy_rows` demonstrates structured answers, many with imperfect evidence.
3. `reward_rows` demonstrates scores of several evidence sets for one question: `true_score` plus
   noise.

    python -m spell_jax.question_sets.evidence_rows --out=DIR

writes DIR/policy.jsonl and DIR/reward.jsonl, one {"prompt", "completion", "role", "task"} per line
for supervised fine-tuning, and DIR/train.jsonl and DIR/held_out.jsonl, questions in the format of
data/questions.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from spell_jax.data import tiny_world as world
from spell_jax.data.questions import Question
from spell_jax.question_sets.rows import Row, seeded_rows
from spell_jax.runtime import entry
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.evidence import HIGHEST, LOWEST, StructuredAnswer, write_answer
from spell_jax.selfplay.prompts import Prompts

TASK = "general_qa"
# Last entry of a random seed, after seed and index: one random stream per kind of output.
_QUESTIONS, _POLICY, _REWARD = 5, 6, 7
# Added to the seed. Runs have small seeds, so no training seed gives the held-out questions.
HELD_OUT_SEED = 10_000


@dataclasses.dataclass(frozen=True)
class EvidenceMixture:
    """Composition of the rows; every share is a probability."""

    documents: tuple[int, ...] = (3, 4, 5, 6)  # possible numbers of documents of a question
    two_hop: float = 0.5  # two-hop questions; all other questions are look-ups
    # Two-hop answers and sets that omit the second line. Rows teach the format and leave evidence
    # to reinforcement learning: the tuned policy has a recall of .67 (docs/algorithms.md, EAPO).
    hasty: float = 0.65
    slips: float = 0.2  # other answers with evidence that is not exactly the true lines
    lucky: float = 0.9  # answers with incomplete evidence that are right nevertheless
    sets: tuple[int, ...] = (1, 2, 3, 4)  # possible numbers of evidence sets of a reward row
    set_slips: float = 0.5  # other sets that are not exactly the true lines
    # Scores that are off by one: the reward model is useful from the start and can still improve.
    noise: float = 0.05


def make_questions(
    seed: int, count: int, documents: Sequence[int], two_hop: float = 0.5
) -> tuple[Question, ...]:
    """Generate seeded questions; their numbers of documents (2 to 24) cycle through `documents`."""
    # Sizes in turn, not sampled: accuracies by number of documents rest on equally many questions.
    generators = (np.random.default_rng([seed, index, _QUESTIONS]) for index in range(count))
    sizes = itertools.cycle(documents)
    return tuple(sample_question(rng, next(sizes), two_hop) for rng in generators)


def sample_question(rng: np.random.Generator, documents: int, two_hop: float) -> Question:
    texts = world.make_documents(rng, documents)
    kind = "two_hop" if rng.random() < two_hop else "lookup"
    question = world.sample_question(rng, texts, kind)
    return Question(TASK, texts, question.text, question.answer, question.evidence)


def policy_rows(prompts: Prompts, mixture: EvidenceMixture, seed: int, count: int) -> Iterator[Row]:
    """Yield structured answers; row i depends on (seed, i) alone."""

    def make_row(rng: np.random.Generator) -> Row:
        question = sample_question(rng, int(rng.choice(mixture.documents)), mixture.two_hop)
        lines = sample_evidence(rng, question, mixture.slips, mixture.hasty)
        right = set(question.evidence) <= set(lines) or rng.random() < mixture.lucky
        # A wrong answer is what the last quoted line says: answers always follow from a line.
        source = question.evidence[-1] if right else lines[-1]
        name, *values = source.split()
        attribute = question.question.split()[0]
        answer = values[world.ATTRIBUTES.index(attribute)]
        reasoning = f"{attribute} of {name} is {answer}"
        sections = question.question, _bulleted(lines), reasoning, f" {answer}"
        prompt = prompts.evidence(question.documents, question.question)
        return Row(prompt, write_answer(StructuredAnswer(*sections)), "responder", TASK)

    return itertools.islice(seeded_rows(make_row, seed, 0, _POLICY), count)


def reward_rows(prompts: Prompts, mixture: EvidenceMixture, seed: int, count: int) -> Iterator[Row]:
    """Yield scores of several evidence sets; row i depends on (seed, i) alone."""

    def make_row(rng: np.random.Generator) -> Row:
        question = sample_question(rng, int(rng.choice(mixture.documents)), mixture.two_hop)
        sets = [
            sample_evidence(rng, question, mixture.set_slips, mixture.hasty)
            for _ in range(rng.choice(mixture.sets))
        ]
        scores = [_add_noise(rng, true_score(lines, question), mixture.noise) for lines in sets]
        numbered = list(zip(itertools.count(1), sets, scores))
        thoughts = "\n".join(f"{i}{write_comparison(lines, question)}" for i, lines, _ in numbered)
        verdict = "\n".join(f"{i} {score}" for i, _, score in numbered)
        texts = [_bulleted(lines).strip() for lines in sets]
        prompt = prompts.evidence_scores(question.question, texts)
        return Row(prompt, f"<think>{thoughts}</think>{verdict}", "reward_model", TASK)

    return itertools.islice(seeded_rows(make_row, seed, 0, _REWARD), count)


def sample_evidence(
    rng: np.random.Generator, question: Question, slips: float, hasty: float
) -> list[str]:
    """Sample the lines that an answer quotes: the true lines, or an imperfect variant.

    With probability `hasty`, a two-hop question gets only its first line. Otherwise, with
    probability `slips`, one line is missing, one is replaced by another document, all are replaced,
    or there is one too many.
    """
    true = list(question.evidence)
    if rng.random() < hasty and len(true) > 1:
        return true[:1]
    if rng.random() >= slips:
        return true
    other_lines = [
        line for text in question.documents if (line := text.removeprefix("- ")) not in true
    ]
    if not other_lines:  # every document is a true line
        return true[:1]
    spare = [other_lines[i] for i in rng.permutation(len(other_lines))]
    kind = rng.choice(("missing", "replaced", "others", "superfluous"))
    if kind == "superfluous":
        return [*true, spare[0]]
    if kind == "missing" and len(true) > 1:
        return true[:-1]
    if kind == "others":
        return spare[: len(true)]
    return [*true[:-1], spare[0]]


def write_comparison(lines: Sequence[str], question: Question) -> str:
    """Write the thought on an evidence set: per line, wanted name, the line's name, verdict.

    After a match, the wanted name is the friend named in that line; after the last match it is "-".
    """
    # The two names are adjacent, because a small model compares names that are next to each other.
    thought, hops = "", len(question.evidence)
    wanted_name = question.question.split()[-1]
    for line in lines:
        name, *_, friend = line.split()
        equal = hops > 0 and name == wanted_name
        thought += f" {wanted_name if hops else '-'} {name}{'[[YES]]' if equal else '[[NO]]'}"
        hops -= equal
        wanted_name = friend if equal else wanted_name
    return thought


def true_score(lines: Sequence[str], question: Question) -> int:
    """Return the score of a perfect reward model for quoted lines.

    The score is 5 for exactly the true lines and 1 without any; superfluous lines cost one point.
    """
    num_true = len(set(lines) & set(question.evidence))
    share = num_true / len(question.evidence)
    superfluous = num_true > 0 and len(set(lines)) > num_true
    return max(LOWEST, round(LOWEST + (HIGHEST - LOWEST) * share) - superfluous)


def _bulleted(lines: Sequence[str]) -> str:
    """Format an evidence section. After a bullet, a name has the same token as in a document."""
    return "".join(f"\n- {line}" for line in lines) + "\n"


def _add_noise(rng: np.random.Generator, score: int, noise: float) -> int:
    """Return a score that is off by one with probability `noise`."""
    if rng.random() >= noise:
        return score
    # At the ends of the scale there is one neighbor only.
    step = 1 if score == LOWEST else -1 if score == HIGHEST else int(rng.choice((-1, 1)))
    return score + step


def main(arguments: Sequence[str] | None = None) -> None:
    """Write rows and questions to a folder (command-line entry)."""
    parser = argparse.ArgumentParser(
        "python -m spell_jax.question_sets.evidence_rows",
        description="Rows and questions with evidence.",
    )
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument("--prompts", default="compact", help="compact, full or a folder")
    parser.add_argument("--rows", type=int, default=20_000, help="rows per file")
    parser.add_argument("--questions", type=int, default=2000, help="training questions")
    parser.add_argument("--held_out", type=int, default=256, help="held-out questions")
    parser.add_argument(
        "--documents", type=int, nargs="+", default=[5], help="documents per question"
    )
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    prompts, out = prompt_sets.load(flags.prompts), Path(flags.out)
    held_out = flags.seed + HELD_OUT_SEED, flags.held_out
    files = {
        "policy": policy_rows(prompts, EvidenceMixture(), flags.seed, flags.rows),
        "reward": reward_rows(prompts, EvidenceMixture(), flags.seed, flags.rows),
        "train": make_questions(flags.seed, flags.questions, flags.documents),
        "held_out": make_questions(*held_out, flags.documents),
    }
    for name, records in files.items():
        write_records(out / f"{name}.jsonl", map(dataclasses.asdict, records))


if __name__ == "__main__":
    with entry.user_errors():
        main()
