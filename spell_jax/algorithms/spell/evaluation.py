"""Held-out evaluation of SPELL in the tiny world, against the oracle's true answers.

1. Responder: greedy answers to generated questions of each kind, after n documents.
2. Verifier: greedy verdicts on labeled pairs of answers, by what makes a pair hard.
3. Questioner: sampled questions about held-out clusters, after as many documents as in training,
   without and with a remembered question. Measured are the shares that are accepted, that the
   documents answer, and whose reference is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from spell_jax.algorithms.base import Models
from spell_jax.algorithms.held_out import Report, share
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
    """A generated question.

    Attributes:
      documents: texts to answer from.
      question: the question.
      kind: kind of the question, one of world.KINDS.
      truth: true answer: canonical text, number or letter.
    """

    documents: tuple[str, ...]
    question: str
    kind: str
    truth: str


@dataclasses.dataclass(frozen=True)
class TinyEvaluation:
    """Held-out evaluation of one policy.

    Attributes:
      prompts: the prompt set.
      algorithm: config with the number of the questioner's documents and the rules by which its
        questions are accepted.
      count_tokens: function that returns the number of tokens of a text, for the limit of
        references.
      sizes: numbers of questions per kind, and numbers of documents.
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
        """Number of documents where only one is evaluated: the second, as in training."""
        return self.sizes.documents[min(1, len(self.sizes.documents) - 1)]

    def full(self, models: Models) -> Report:
        """Evaluates all three roles."""
        report: Report = {"responder accuracy, by documents": {}}
        rows = report["responder accuracy, by documents"]
        by_count = {
            n: self._responder(models, n, self.sizes.per_cell) for n in self.sizes.documents
        }
        for kind in world.KINDS:
            rows[kind] = {str(n): share(cells[kind]) for n, cells in by_count.items()}
        rows["all"] = {
            str(n): share([right for cell in cells.values() for right in cell])
            for n, cells in by_count.items()
        }
        report["multiple choice, share of each letter among answers"] = self._letters(models)
        report["verifier accuracy, by pair"] = {"": self._verifier(models)}
        report["questioner"] = self._questioner(models)
        return report

    def quick(self, models: Models) -> tuple[float, dict[str, float]]:
        """(mean responder accuracy; accuracies by kind and number of documents)."""
        numbers = {}
        for count in self.sizes.quick_documents:
            cells = self._responder(models, count, self.sizes.quick_per_cell)
            for kind, outcomes in cells.items():
                numbers[f"{kind}/{count}"] = share(outcomes)[0]
        score = sum(numbers.values()) / len(numbers)
        return score, numbers | {"responder": score}

    def make_items(self, documents: int, kind: str, count: int) -> list[Item]:
        """Generates `count` questions of one kind, each about documents of its own."""
        items = []
        for index in range(count):
            cell = [self.sizes.seed, documents, world.KINDS.index(kind), index]
            rng = np.random.default_rng(cell)
            texts = world.make_documents(rng, documents)
            question, made, answer = demonstrations.responder_question(rng, texts, kind)
            while made.kind != kind:  # few documents may allow no two-hop question: make others
                texts = world.make_documents(rng, documents)
                question, made, answer = demonstrations.responder_question(rng, texts, kind)
            truth = answer if kind == "choice" else world.canonical(answer)
            items.append(Item(texts, question, kind, truth))
        return items

    def _responder(self, models: Models, documents: int, count: int) -> dict[str, list[bool]]:
        items = [item for kind in world.KINDS for item in self.make_items(documents, kind, count)]
        cells: dict[str, list[bool]] = {kind: [] for kind in world.KINDS}
        for item, found in zip(items, self._answers(models, items), strict=True):
            cells[item.kind].append(is_true(found, item.truth, item.kind))
        return cells

    def _answers(self, models: Models, items: Sequence[Item]) -> list[str | None]:
        tasks = [world.TASK_OF_KIND[item.kind] for item in items]
        texts = [
            self.prompts.responder(task, item.documents, item.question)
            for task, item in zip(tasks, items, strict=True)
        ]
        replies = models("responder", texts, temperature=0.0)
        return [
            None if reply is None else rules.extract_answer(reply.texts[0], task)
            for reply, task in zip(replies, tasks, strict=True)
        ]

    def _letters(self, models: Models) -> dict[str, dict[str, tuple[float, float]]]:
        count = self._usual_documents
        found = self._answers(models, self.make_items(count, "choice", self.sizes.per_cell))
        columns = {letter: share([f == letter for f in found]) for letter in LETTERS}
        return {f"{count} documents": columns}

    def _verifier(self, models: Models) -> dict[str, tuple[float, float]]:
        rng = np.random.default_rng([self.sizes.seed, 1])
        rows = [
            demonstrations.verifier_row(self.prompts, rng, len(world.CITIES))
            for _ in range(2 * self.sizes.per_cell)
        ]
        replies = models("verifier", [row.prompt for row, _ in rows], temperature=0.0)
        outcomes: dict[str, list[bool]] = {"all": []}
        for (row, pair), reply in zip(rows, replies, strict=True):
            vote = -1 if reply is None else parsing.parse_verdict(reply.texts[0])
            right = vote == parsing.parse_verdict(row.completion)
            outcomes["all"].append(right)
            outcomes.setdefault(pair, []).append(right)
        return {pair: share(cells) for pair, cells in outcomes.items()}

    def _questioner(self, models: Models) -> dict[str, dict[str, tuple[float, float]]]:
        tasks = tuple(dict.fromkeys(world.TASK_OF_KIND.values()))
        rng = np.random.default_rng([self.sizes.seed, 2])
        asked, texts = [], []
        for known in (0, 1) if self.algorithm.memory else (0,):
            for task in tasks:
                row = f"{task}, one known" if known else task
                for _ in range(self.sizes.per_cell):
                    documents, text = self._questioner_prompt(rng, task, known)
                    asked.append((row, task, documents))
                    texts.append(text)
        outcomes: dict[str, tuple[list[bool], ...]] = {row: ([], [], []) for row, *_ in asked}
        for (row, task, documents), reply in zip(asked, models("questioner", texts), strict=True):
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

    def _questioner_prompt(
        self, rng: np.random.Generator, task: str, known: int
    ) -> tuple[tuple[str, ...], str]:
        """(documents, prompt) for the questioner: m new documents and m per known question."""
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
    """The kind of question whose comparison rules a task uses."""
    return {"financial_math": "math", "multiple_choice": "choice"}.get(task, "lookup")


def true_answer(question: str, task: str, documents: Sequence[str]) -> str | None:
    """The oracle's answer to a question that a model wrote; None if there is none."""
    if task == "multiple_choice":
        return world.oracle_choice(question, documents)
    return world.oracle(question, documents)


def is_true(found: str | None, truth: str, kind: str) -> bool:
    """Whether an extracted answer equals the true one, in any surface form."""
    if found is None:
        return False
    if kind == "math":
        return rules.same_answer(found, truth, "financial_math")
    if kind == "choice":
        return found == truth
    return world.canonical(found) == truth
