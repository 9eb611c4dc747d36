"""Held-out evaluation of SPELL's roles on given questions, such as human ones.

1. Responder: greedy answers, scored by the rule; where all right answers are known, by the best
   match, and by exact match too.
2. Verifier: greedy verdicts on pairs of the reference with another right answer ("same") and with a
   wrong one ("different"), where the questions have such answers.
3. Questioner: one sampled question per task after the first documents of each question; questions
   with the same documents count once. The share that passes the parser.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from spell_jax.algorithms.held_out import Evaluated, HeldOutQuestions, by_row, share
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.clusters import LETTERS
from spell_jax.rollout.replies import AskModels
from spell_jax.selfplay import parsing

_SEED = 0  # of the letters that multiple-choice questions shall have


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionEvaluation(HeldOutQuestions):
    """Held-out evaluation of the roles that a run has.

    Attributes:
      algorithm: config with the limits of the questioner. The verifier is evaluated if it has one.
      tasks: tasks of the run, for the questioner.
      count_tokens: number of tokens of a text.
      has_questioner: whether the questioner is evaluated.
    """

    algorithm: SpellConfig
    tasks: tuple[str, ...]
    count_tokens: Callable[[str], int]
    has_questioner: bool = True

    def full(self, ask: AskModels) -> Evaluated:
        report, answers = super().full(ask)
        if self.algorithm.has_verifier and (pairs := self._verifier(ask)):
            report["verifier accuracy, by pair"] = {"": pairs}
        if self.has_questioner:
            report["questioner"] = self._questioner(ask)
        return Evaluated(report, answers)

    def _verifier(self, ask: AskModels) -> dict[str, tuple[float, float]]:
        # No model writes these pairs: their labels are as right as the questions' answers.
        pairs = [
            (kind, question.question, answer, question.answer)
            for question in self.questions
            for kind, answers in (("same", question.right[1:]), ("different", question.wrong))
            for answer in answers[:1]
        ]
        prompts = [self.prompts.verifier(*texts) for _, *texts in pairs]
        replies = ask("verifier", prompts, temperature=0.0, **self.algorithm.verdict_options)
        cells = []
        for (kind, *_), reply in zip(pairs, replies, strict=True):
            vote = -1 if reply is None else parsing.parse_verdict(reply.texts[0])
            cells.append((kind, {"": vote == (kind == "same")}))
        return {kind: share(values[""]) for kind, values in by_row(cells).items() if values}

    def _questioner(self, ask: AskModels) -> dict[str, dict[str, tuple[float, float]]]:
        c, rng = self.algorithm, np.random.default_rng(_SEED)
        # Several questions may have the same documents, after which the prompts would be equal.
        clusters = dict.fromkeys(question.documents for question in self.questions)
        cases = [(task, documents) for task in self.tasks for documents in clusters]
        prompts = []
        for task, documents in cases:
            letter = LETTERS[rng.integers(4)] if task == "multiple_choice" else None
            # The largest m of training, and the first documents: every evaluation shows the same
            # text.
            shown = documents[: max(c.documents)]
            prompts.append(self.prompts.questioner(task, shown, (), letter))
        cells = []
        replies = ask("questioner", prompts, **c.question_options)
        for (task, _), reply in zip(cases, replies, strict=True):
            text = "" if reply is None else reply.texts[0]
            parsed = c.parse_question(text, task, self.count_tokens)
            cells.append((task, {"accepted": parsed.status == "accepted"}))
        rows = by_row(cells)
        return {task: {"accepted": share(values["accepted"])} for task, values in rows.items()}
