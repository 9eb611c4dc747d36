"""Held-out evaluation of SPELL in the ladder world (algorithm.evaluation), against the oracle.

1. Responder: greedy answers to generated questions of each depth, by number of documents.
2. Verifier: greedy verdicts on pairs of answers, of which half are equal.
3. Questioner: sampled questions without and with a known question: the shares that are accepted,
   that the documents answer, that are deeper than the known one, and their mean depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from launch.experiments.ladder import world
from launch.experiments.ladder.rows import TASK, verifier_row
from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.held_out import Evaluated, by_row, share
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.config import DataConfig, TinyEvaluationConfig
from spell_jax.rollout.replies import AskModels
from spell_jax.selfplay import parsing
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts


@dataclasses.dataclass(frozen=True)
class LadderEvaluation:
    """Held-out evaluation of one policy; `algorithm` has the limits of the questioner."""

    prompts: Prompts
    algorithm: SpellConfig
    count_tokens: Callable[[str], int]
    sizes: TinyEvaluationConfig
    depths: tuple[int, ...] = world.DEPTHS

    def __post_init__(self):
        for field in ("documents", "quick_documents"):
            counts = getattr(self.sizes, field)
            if max(counts) > world.MOST_DOCUMENTS:
                raise ValueError(
                    f"data.tiny.evaluation.{field} = {counts}: each must be 2 to "
                    f"{world.MOST_DOCUMENTS} in the ladder world"
                )

    def full(self, ask: AskModels) -> Evaluated:
        sizes = self.sizes
        cells = {
            (depth, n): self._responder(ask, n, depth, sizes.per_cell)
            for depth in self.depths
            for n in sizes.documents
        }
        accuracy = {
            f"depth {depth}": {str(n): share(cells[depth, n]) for n in sizes.documents}
            for depth in self.depths
        }
        accuracy["all"] = {
            str(n): share([right for depth in self.depths for right in cells[depth, n]])
            for n in sizes.documents
        }
        report = {
            "responder accuracy, by documents": accuracy,
            "verifier accuracy": {"": {"all": share(self._verifier(ask, 2 * sizes.per_cell))}},
            "questioner": self._questioner(ask),
        }
        return Evaluated(report)

    def quick(self, ask: AskModels) -> tuple[float, dict[str, float]]:
        """Return (mean responder accuracy, numbers): accuracies by depth and of the verifier."""
        sizes = self.sizes
        numbers = {}
        for depth in self.depths:
            rights = [
                right
                for n in sizes.quick_documents
                for right in self._responder(ask, n, depth, sizes.quick_per_cell)
            ]
            numbers[f"depth/{depth}"] = share(rights)[0]
        score = sum(numbers.values()) / len(numbers)
        verifier = share(self._verifier(ask, 2 * sizes.quick_per_cell))[0]
        return score, numbers | {"responder": score, "verifier": verifier}

    def _responder(self, ask: AskModels, documents: int, depth: int, count: int) -> list[bool]:
        """Return whether each answer is right, for `count` questions on their own documents."""
        questions, texts = [], []
        for index in range(count):
            # A seed per question: `quick` asks the first questions of `full`.
            rng = np.random.default_rng([self.sizes.seed, documents, depth, index])
            cluster = world.make_documents(rng, documents)
            questions.append(world.sample_question(rng, cluster, depth))
            read = self.algorithm.as_read(cluster)
            texts.append(self.prompts.responder(TASK, read, questions[-1].text))
        replies = ask("responder", texts, temperature=0.0)
        texts = ["" if reply is None else reply.texts[0] for reply in replies]
        predictions = self.algorithm.read_answers(texts, TASK)
        return [answer == q.answer for answer, q in zip(predictions, questions, strict=True)]

    def _verifier(self, ask: AskModels, count: int) -> list[bool]:
        rng = np.random.default_rng([self.sizes.seed, 1])
        rows = []
        for index in range(count):
            documents = world.make_documents(rng, max(self.sizes.documents))
            # Depths in turn: each has an equal share of the pairs.
            depth = self.depths[index % len(self.depths)]
            rows.append(
                verifier_row(self.prompts, rng, world.sample_question(rng, documents, depth))
            )
        replies = ask(
            "verifier",
            [row.prompt for row in rows],
            temperature=0.0,
            **self.algorithm.verdict_options,
        )
        votes = [-1 if r is None else parsing.parse_verdict(r.texts[0]) for r in replies]
        return [
            vote == parsing.parse_verdict(row.completion)
            for vote, row in zip(votes, rows, strict=True)
        ]

    def _questioner(self, ask: AskModels) -> dict[str, dict[str, tuple[float, float]]]:
        rng = np.random.default_rng([self.sizes.seed, 2])
        cases, texts = [], []
        for known_depth in (0, *self.depths) if self.algorithm.memory else (0,):
            row = f"one known, of depth {known_depth}" if known_depth else "none known"
            for _ in range(self.sizes.per_cell):
                documents = world.make_documents(rng, max(self.sizes.documents))
                history = []
                if known_depth:
                    question = world.sample_question(rng, documents, known_depth)
                    history.append(Entry((), question.text, question.answer))
                cases.append((row, known_depth, documents))
                # As in training, where the prompt ends with a sampled relation (config.cues).
                cue = world.CUES[rng.integers(len(world.CUES))]
                texts.append(self.prompts.questioner(TASK, documents, history, cue=cue))
        cells = []
        for (row, known_depth, documents), reply in zip(
            cases, ask("questioner", texts, **self.algorithm.question_options), strict=True
        ):
            text = "" if reply is None else reply.texts[0]
            parsed = self.algorithm.parse_question(text, TASK, self.count_tokens)
            measures: dict[str, float] = {"accepted": parsed.status == "accepted"}
            if measures["accepted"]:
                truth = world.oracle(parsed.question, documents)
                measures["answerable, of accepted"] = truth is not None
                if truth is not None:
                    depth = world.depth_of(parsed.question)
                    measures |= {"depth": depth, "deeper than the known one": depth > known_depth}
            cells.append((row, measures))
        rows = by_row(cells)
        # A mean over rows would mix known depths, to which "deeper" refers.
        del rows["all"]
        return {
            row: {name: share(values) for name, values in measures.items()}
            for row, measures in rows.items()
        }


def held_out(config: SpellConfig, context: AlgorithmContext, data: DataConfig) -> LadderEvaluation:
    """Make the evaluation, also of algorithms that train on given questions of the ladder world."""
    if data.validation:
        raise ValueError(f"data.validation = {data.validation!r}: must be '' in the ladder world")
    sizes = data.tiny.evaluation
    return LadderEvaluation(context.prompts, config, context.count_tokens, sizes)
