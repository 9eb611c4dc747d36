"""Held-out evaluation of SPELL in the tiny world, against the oracle's true answers.

1. Responder: greedy answers to generated questions of each kind, after n documents.
2. Verifier: greedy verdicts on labeled pairs of answers, by what makes a pair hard.
3. Questioner: sampled questions about held-out clusters, after as many documents as in training,
   without and with a remembered question: the shares that are accepted, that the documents answer,
   and that have a right reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from spell_jax.algorithms.held_out import Evaluated, by_row, share
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data import tiny_world as world
from spell_jax.data.clusters import LETTERS
from spell_jax.data.config import TinyEvaluationConfig
from spell_jax.question_sets import tiny_world_rows
from spell_jax.rollout.replies import AskModels
from spell_jax.selfplay import parsing, rules
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts


@dataclasses.dataclass(frozen=True)
class GeneratedQuestion:
    """A generated question of one of world.KINDS; `truth` is canonical text, number or letter."""

    documents: tuple[str, ...]
    question: str
    kind: str
    truth: str


@dataclasses.dataclass(frozen=True)
class TinyEvaluation:
    """Held-out evaluation of one policy; `algorithm` has the limits of the questioner."""

    prompts: Prompts
    algorithm: SpellConfig
    count_tokens: Callable[[str], int]
    sizes: TinyEvaluationConfig = TinyEvaluationConfig()

    def __post_init__(self):
        world_documents = len(world.NAMES)
        # One known question has m documents, and the questioner reads m new documents too.
        if 2 * max(self.algorithm.documents) > world_documents:
            raise ValueError(
                f"algorithm.documents = {self.algorithm.documents}: the tiny world has "
                f"{world_documents} documents, of which a questioner with a known question reads "
                "twice as many"
            )

    @property
    def _usual_documents(self) -> int:
        """Number of documents where only one is evaluated: the second, as in training."""
        return self.sizes.documents[min(1, len(self.sizes.documents) - 1)]

    def full(self, ask: AskModels) -> Evaluated:
        sizes = self.sizes
        by_count = {n: self._responder(ask, n, sizes.per_cell) for n in sizes.documents}
        accuracy = {
            row: {str(n): share(cells[row]) for n, cells in by_count.items()}
            for row in (*world.KINDS, "all")
        }
        report = {
            "responder accuracy, by documents": accuracy,
            "multiple choice, share of each letter among answers": self._letters(ask),
            "verifier accuracy, by pair": {"": self._verifier(ask)},
            "questioner": self._questioner(ask),
        }
        return Evaluated(report)

    def quick(self, ask: AskModels) -> tuple[float, dict[str, float]]:
        """Return (mean responder accuracy, accuracies by kind and number of documents)."""
        numbers = {}
        for count in self.sizes.quick_documents:
            cells = self._responder(ask, count, self.sizes.quick_per_cell)
            numbers |= {f"{kind}/{count}": share(cells[kind])[0] for kind in world.KINDS}
        score = sum(numbers.values()) / len(numbers)
        return score, numbers | {"responder": score}

    def make_items(self, documents: int, kind: str, count: int) -> list[GeneratedQuestion]:
        """Generate `count` questions of one kind, each about its own documents."""
        items = []
        for index in range(count):
            # A seed per question: `quick` asks the first questions of `full`, whatever the sizes
            # are.
            cell = [self.sizes.seed, documents, world.KINDS.index(kind), index]
            rng = np.random.default_rng(cell)
            world_question = None
            # Few documents may allow no two-hop question.
            while world_question is None or world_question.kind != kind:
                texts = world.make_documents(rng, documents)
                question, world_question, answer = tiny_world_rows.responder_question(
                    rng, texts, kind
                )
            truth = answer if kind == "choice" else world.canonical(answer)
            items.append(GeneratedQuestion(texts, question, kind, truth))
        return items

    def _responder(self, ask: AskModels, documents: int, count: int) -> dict[str, list[float]]:
        """Return whether each answer is right, by kind and under "all"."""
        items = [item for kind in world.KINDS for item in self.make_items(documents, kind, count)]
        answers = self._answers(ask, items)
        outcomes = by_row(
            (item.kind, {"": is_true(answer, item.truth, item.kind)})
            for item, answer in zip(items, answers, strict=True)
        )
        return {row: cells[""] for row, cells in outcomes.items()}

    def _answers(self, ask: AskModels, items: Sequence[GeneratedQuestion]) -> list[str | None]:
        tasks = [world.TASK_OF_KIND[item.kind] for item in items]
        texts = [
            self.prompts.responder(task, self.algorithm.as_read(item.documents), item.question)
            for task, item in zip(tasks, items, strict=True)
        ]
        # Greedy: the numbers before and after a run differ by the weights alone.
        replies = ask("responder", texts, temperature=0.0)
        extract = self.algorithm.extract
        return [
            None if reply is None else rules.extract_answer(reply.texts[0], task, extract)
            for reply, task in zip(replies, tasks, strict=True)
        ]

    def _letters(self, ask: AskModels) -> dict[str, dict[str, tuple[float, float]]]:
        count = self._usual_documents
        answers = self._answers(ask, self.make_items(count, "choice", self.sizes.per_cell))
        columns = {letter: share([answer == letter for answer in answers]) for letter in LETTERS}
        return {f"{count} documents": columns}

    def _verifier(self, ask: AskModels) -> dict[str, tuple[float, float]]:
        # Streams of their own for verifier (1) and questioner (2): sizes of one part leave the
        # other part's questions alone.
        rng = np.random.default_rng([self.sizes.seed, 1])
        rows = [
            tiny_world_rows.verifier_row(self.prompts, rng, len(world.CITIES))
            for _ in range(2 * self.sizes.per_cell)
        ]
        prompts, options = [row.prompt for row, _ in rows], self.algorithm.verdict_options
        replies = ask("verifier", prompts, temperature=0.0, **options)
        cells = []
        for (row, pair), reply in zip(rows, replies, strict=True):
            vote = -1 if reply is None else parsing.parse_verdict(reply.texts[0])
            cells.append((pair, {"": vote == parsing.parse_verdict(row.completion)}))
        return {pair: share(measures[""]) for pair, measures in by_row(cells).items()}

    def _questioner(self, ask: AskModels) -> dict[str, dict[str, tuple[float, float]]]:
        tasks = tuple(dict.fromkeys(world.TASK_OF_KIND.values()))
        rng = np.random.default_rng([self.sizes.seed, 2])
        cases, texts = [], []
        for known_count in (0, 1) if self.algorithm.memory else (0,):
            for task in tasks:
                row = f"{task}, one known" if known_count else task
                for _ in range(self.sizes.per_cell):
                    documents, text = self._questioner_prompt(rng, task, known_count)
                    cases.append((row, task, documents))
                    texts.append(text)
        # Sampled at sampler.temperature, as training samples questions.
        replies = ask("questioner", texts, **self.algorithm.question_options)
        outcomes = by_row(
            (row, self._measure_question("" if reply is None else reply.texts[0], task, documents))
            for (row, task, documents), reply in zip(cases, replies, strict=True)
        )
        # A mean over tasks with and without a known question has no meaning.
        del outcomes["all"]
        return {
            row: {n: share(cell) for n, cell in cells.items()} for row, cells in outcomes.items()
        }

    def _measure_question(self, text: str, task: str, documents: Sequence[str]) -> dict[str, bool]:
        """Return whether a question is accepted, if so answerable, if so with a right reference."""
        parsed = self.algorithm.parse_question(text, task, self.count_tokens)
        measures = {"accepted": parsed.status == "accepted"}
        if measures["accepted"]:
            truth = true_answer(parsed.question, task, documents)
            measures["answerable, of accepted"] = truth is not None
            if truth is not None:
                right = is_true(parsed.answer, truth, task_kind(task))
                measures["reference right, of answerable"] = right
        return measures

    def _questioner_prompt(
        self, rng: np.random.Generator, task: str, known_count: int
    ) -> tuple[tuple[str, ...], str]:
        """Return (documents, prompt) for the questioner: m new documents, m per known question."""
        shown = max(self.algorithm.documents)
        count = shown * (known_count + 1)
        # Generated with the usual number and cut: in training the questioner reads a part of a
        # cluster.
        documents = world.make_documents(rng, max(count, self._usual_documents))[:count]
        history = []
        kind = next(kind for kind, t in world.TASK_OF_KIND.items() if t == task)
        for _ in range(known_count):
            text, _, answer = tiny_world_rows.responder_question(rng, documents[:shown], kind)
            history.append(Entry((), text, answer))
        letter = LETTERS[rng.integers(4)] if task == "multiple_choice" else None
        return documents, self.prompts.questioner(task, documents, history, letter)


def task_kind(task: str) -> str:
    """Return the kind of question with the comparison rules of a task."""
    return {"financial_math": "math", "multiple_choice": "choice"}.get(task, "lookup")


def true_answer(question: str, task: str, documents: Sequence[str]) -> str | None:
    """Return the oracle's answer to a question that a model wrote; None if there is none."""
    if task == "multiple_choice":
        return world.oracle_choice(question, documents)
    return world.oracle(question, documents)


def is_true(answer: str | None, truth: str, kind: str) -> bool:
    """Return whether an extracted answer equals the true answer, in any surface form."""
    if answer is None:
        return False
    if kind == "math":
        return rules.same_answer(answer, truth, "financial_math")
    if kind == "choice":
        return answer == truth
    return world.canonical(answer) == truth
