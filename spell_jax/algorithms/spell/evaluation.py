"""Held-out evaluation in the tiny world, against the oracle's true answers.

1. Responder: greedy answers to generated questions of each kind behind n documents.
2. Verifier: greedy verdicts on labeled pairs of answers, by what makes the pair hard.
3. Questioner: sampled questions about held-out clusters, behind as many documents as in the
   algorithm,
   without and with a known question: are they accepted, do the documents answer them, and is the
   reference right?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from spell_jax.algorithms.base import Models
from spell_jax.algorithms.scoring import Report, share
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data import tiny_world as world
from spell_jax.data.clusters import LETTERS
from spell_jax.data.config import TinyEvaluationConfig
from spell_jax.selfplay import parsing, rules
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts
from spell_jax.warm_start import demonstrations


@dataclasses.dataclass(frozen=True)
class Item:
    """A question with its true answer: canonical text, number or letter."""

    documents: tuple[str, ...]
    question: str
    kind: str
    truth: str


@dataclasses.dataclass(frozen=True)
class TinyEvaluation:
    """Held-out evaluation of one policy.

    Attributes:
      prompts: the prompt set.
      algorithm: says how many documents the questioner reads and which of its questions are
        accepted.
      count_tokens: tokens of a text, for the algorithm's limit on references.
      sizes: questions of each kind and numbers of documents.
    """

    prompts: Prompts
    algorithm: SpellConfig
    count_tokens: Callable[[str], int]
    sizes: TinyEvaluationConfig = TinyEvaluationConfig()

    def __post_init__(self):
        most = len(world.NAMES)
        if 2 * max(self.algorithm.documents) > most:
            raise ValueError(
                f"algorithm.documents = {self.algorithm.documents}: the tiny world has {most} "
                "documents, of which a questioner with a known question reads twice as many"
            )

    @property
    def _usual_documents(self) -> int:
        """The size of a cluster where only one is looked at: the second, as in training."""
        return self.sizes.documents[min(1, len(self.sizes.documents) - 1)]

    def full(self, ask: Models) -> Report:
        """All three roles."""
        report: Report = {"responder accuracy, by documents": {}}
        rows = report["responder accuracy, by documents"]
        by_count = {n: self._responder(ask, n, self.sizes.per_cell) for n in self.sizes.documents}
        for kind in world.KINDS:
            rows[kind] = {str(n): share(cells[kind]) for n, cells in by_count.items()}
        rows["all"] = {
            str(n): share([right for cell in cells.values() for right in cell])
            for n, cells in by_count.items()
        }
        report["multiple choice, share of each letter among answers"] = self._letters(ask)
        report["verifier accuracy, by pair"] = {"": self._verifier(ask)}
        report["questioner"] = self._questioner(ask)
        return report

    def quick(self, ask: Models) -> tuple[float, dict[str, float]]:
        """(mean responder accuracy, the accuracies by kind and documents)."""
        numbers = {}
        for count in self.sizes.quick_documents:
            cells = self._responder(ask, count, self.sizes.quick_per_cell)
            for kind, outcomes in cells.items():
                numbers[f"{kind}/{count}"] = share(outcomes)[0]
        score = sum(numbers.values()) / len(numbers)
        return score, numbers | {"responder": score}

    def make_items(self, documents: int, kind: str, count: int) -> list[Item]:
        """Generated questions of one kind, each behind a cluster of its own."""
        items = []
        for index in range(count):
            cell = [self.sizes.seed, documents, world.KINDS.index(kind), index]
            rng = np.random.default_rng(cell)
            texts = world.make_documents(rng, documents)
            question, drawn, answer = demonstrations.responder_question(rng, texts, kind)
            while drawn.kind != kind:  # a two-hop question of few documents may need new friends
                texts = world.make_documents(rng, documents)
                question, drawn, answer = demonstrations.responder_question(rng, texts, kind)
            truth = answer if kind == "choice" else world.canonical(answer)
            items.append(Item(texts, question, kind, truth))
        return items

    def _responder(self, ask: Models, documents: int, count: int) -> dict[str, list[bool]]:
        items = [item for kind in world.KINDS for item in self.make_items(documents, kind, count)]
        cells: dict[str, list[bool]] = {kind: [] for kind in world.KINDS}
        for item, found in zip(items, self._answers(ask, items), strict=True):
            cells[item.kind].append(is_true(found, item.truth, item.kind))
        return cells

    def _answers(self, ask: Models, items: Sequence[Item]) -> list[str | None]:
        tasks = [world.TASK_OF_KIND[item.kind] for item in items]
        texts = [
            self.prompts.responder(task, item.documents, item.question)
            for task, item in zip(tasks, items, strict=True)
        ]
        replies = ask("responder", texts, temperature=0.0)
        return [
            None if reply is None else rules.extract_answer(reply.texts[0], task)
            for reply, task in zip(replies, tasks, strict=True)
        ]

    def _letters(self, ask: Models) -> dict[str, dict[str, tuple[float, float]]]:
        count = self._usual_documents
        found = self._answers(ask, self.make_items(count, "choice", self.sizes.per_cell))
        columns = {letter: share([f == letter for f in found]) for letter in LETTERS}
        return {f"{count} documents": columns}

    def _verifier(self, ask: Models) -> dict[str, tuple[float, float]]:
        rng = np.random.default_rng([self.sizes.seed, 1])
        rows = [
            demonstrations.verifier_row(self.prompts, rng, len(world.CITIES))
            for _ in range(2 * self.sizes.per_cell)
        ]
        replies = ask("verifier", [row.prompt for row, *_ in rows], temperature=0.0)
        outcomes: dict[str, list[bool]] = {"all": []}
        for (_, pair, verdict), reply in zip(rows, replies, strict=True):
            vote = -1 if reply is None else parsing.parse_verdict(reply.texts[0])
            right = vote == parsing.parse_verdict(verdict)
            outcomes["all"].append(right)
            outcomes.setdefault(pair, []).append(right)
        return {pair: share(cells) for pair, cells in outcomes.items()}

    def _questioner(self, ask: Models) -> dict[str, dict[str, tuple[float, float]]]:
        tasks = tuple(dict.fromkeys(world.TASK_OF_KIND.values()))
        rng = np.random.default_rng([self.sizes.seed, 2])
        asked, texts = [], []
        for known in (0, 1) if self.algorithm.memory else (0,):
            for task in tasks:
                row = f"{task}, one known" if known else task
                for _ in range(self.sizes.per_cell):
                    documents, text = self._invitation(rng, task, known)
                    asked.append((row, task, documents))
                    texts.append(text)
        outcomes: dict[str, tuple[list[bool], ...]] = {row: ([], [], []) for row, *_ in asked}
        for (row, task, documents), reply in zip(asked, ask("questioner", texts), strict=True):
            accepted, answerable, right = outcomes[row]
            parsed = parsing.parse_question(
                "" if reply is None else reply.texts[0],
                task,
                self.count_tokens,
                self.algorithm.max_answer_tokens,
                self.algorithm.distinct_options,
            )
            accepted.append(parsed.status == "accepted")
            if accepted[-1]:
                truth = true_answer(parsed.question, task, documents)
                answerable.append(truth is not None)
                if truth is not None:
                    right.append(is_true(parsed.answer, truth, task_kind(task)))
        names = ("accepted", "answerable, of accepted", "reference right, of answerable")
        return {
            row: {name: share(cell) for name, cell in zip(names, cells, strict=True) if cell}
            for row, cells in outcomes.items()
        }

    def _invitation(
        self, rng: np.random.Generator, task: str, known: int
    ) -> tuple[tuple[str, ...], str]:
        """The questioner's documents, m new ones and m of each known question, and its prompt."""
        shown = max(self.algorithm.documents)
        count = shown * (known + 1)
        documents = world.make_documents(rng, max(count, self._usual_documents))[:count]
        history = []
        for _ in range(known):
            kind = next(kind for kind, t in world.TASK_OF_KIND.items() if t == task)
            text, _, answer = demonstrations.responder_question(rng, documents[:shown], kind)
            history.append(Entry((), text, answer))
        letter = LETTERS[rng.integers(4)] if task == "multiple_choice" else None
        return documents, self.prompts.questioner(task, documents, history, letter)


def task_kind(task: str) -> str:
    """The kind by whose rules an answer of a task is compared."""
    return {"financial_math": "math", "multiple_choice": "choice"}.get(task, "lookup")


def true_answer(question: str, task: str, documents: Sequence[str]) -> str | None:
    """The oracle's answer of a question that a model wrote; None where there is none."""
    if task == "multiple_choice":
        return world.oracle_choice(question, documents)
    return world.oracle(question, documents)


def is_true(found: str | None, truth: str, kind: str) -> bool:
    """Whether an extracted answer is the true one, whatever its surface form."""
    if found is None:
        return False
    if kind == "math":
        return rules.same_answer(found, truth, "financial_math")
    if kind == "choice":
        return found == truth
    return world.canonical(found) == truth
