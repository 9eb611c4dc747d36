"""The switches of SPELL: the paper's recipe, its ablations, and the departures that are named."""

from __future__ import annotations

import dataclasses

import numpy as np

from spell_jax.algorithms.base import AlgorithmConfig, RolloutBudget
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.selfplay import rewards, selection

REFERENCE_SOURCES = ("questioner", "frozen_reader")
RESPONDER_REWARDS = ("max", "rule", "verifier", "mean", "min", "random")
REMEMBERED = ("shown", "new")


@dataclasses.dataclass(frozen=True)
class SpellConfig(AlgorithmConfig):
    """Every switch of the algorithm; the defaults are the paper's (its ablations are the others).

    Attributes:
      questions: questions with mixed rewards that an update wants [paper: batch size].
      generation_batch: questions proposed in one round.
      max_generations: rounds a step; then the update takes what there is.
      group_size: G, answers to a question.
      verifier_group_size: G_v, verdicts on an answer; 1 is the single-verdict ablation.
      documents: m, the questioner's new documents, drawn from these numbers.
      memory: L, questions remembered for each task and cluster; 0: no memory.
      memory_documents: what is kept with a remembered question: all documents that the questioner
        was "shown", so that its context grows until it holds the cluster, or the "new" ones among
        them (Algorithm 1), so that it holds at most m (L + 1).
      memory_low, memory_high: mean rewards between which a question is remembered.
      mapping, mu, sigma: the questioner's reward (7): "gaussian", "azr" or "r_zero".
      max_answer_tokens: longer references are skipped (general questions; the others are short).
      distinct_options: whether choices of which two are the same text are of bad format.
      format_penalty: whether questions of bad format are punished; else they are dropped.
      skip_penalty: whether skipped questions are punished like them, but for declined ones (the
        paper's text; its code leaves them out).
      grounding_samples: answers without documents to a question; 0: no grounding filter.
      grounding_threshold: right ones among them that make a question ungrounded.
      reference_source: "questioner", or "frozen_reader": the most frequent of `reader_samples`
        answers of a frozen copy of the starting policy to the question behind the questioner's
        documents. A question without an answer given at least twice and by more than half is
        ungrounded, and so is one whose answer is given without documents as well, be it only
        "unknown".
      reader_samples: K.
      reader_refresh: the frozen copy is renewed every so many steps; 0: never.
      responder_reward: how rule and majority combine: "max" (6); "rule" asks no verifier; "random"
        is a control that must destroy the policy.
      train_questioner, train_verifier: False leaves their rows out of the update.
      negatives: bad questioner rows for each good one.
      malformed_penalty: whether a malformed verdict earns -1 (the paper's code) or 0 (its text).
      verifier_share: verifier rows for each responder row.
      consistency_gate: the verifier learns only where its majority agrees with the rule.
      balance_verdicts: as many yes as no groups for the verifier.
      divide_by_deviation: whether advantages of responder and verifier are divided by their group's
        deviation (8); Dr. GRPO (arXiv 2503.20783) leaves it out.
      keep_surplus: train on all questions with mixed rewards, also those over `questions`.
    """

    name: str = "spell"
    questions: int = 128
    generation_batch: int = 480
    max_generations: int = 10
    group_size: int = 8
    verifier_group_size: int = 8
    documents: tuple[int, ...] = (5,)
    memory: int = 3
    memory_documents: str = "shown"
    memory_low: float = 0.01
    memory_high: float = 1.0
    mapping: str = "gaussian"
    mu: float = 0.5
    sigma: float = 0.5 / 3
    max_answer_tokens: int = 40
    distinct_options: bool = False
    format_penalty: bool = True
    skip_penalty: bool = False
    grounding_samples: int = 1
    grounding_threshold: int = 1
    reference_source: str = "questioner"
    reader_samples: int = 4
    reader_refresh: int = 0
    responder_reward: str = "max"
    train_questioner: bool = True
    negatives: float = 1.0
    train_verifier: bool = True
    malformed_penalty: bool = True
    verifier_share: float = 0.125
    consistency_gate: bool = True
    balance_verdicts: bool = False
    divide_by_deviation: bool = True
    keep_surplus: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_choice(self, "algorithm.", mapping=rewards.MAPPINGS, memory_documents=REMEMBERED)
        check_choice(
            self,
            "algorithm.",
            reference_source=REFERENCE_SOURCES,
            responder_reward=RESPONDER_REWARDS,
        )
        check_least(self, "algorithm.", questions=1, generation_batch=1, max_generations=1)
        check_least(self, "algorithm.", group_size=2, verifier_group_size=1, verifier_share=0)
        check_least(self, "algorithm.", grounding_samples=0, grounding_threshold=1)
        check_least(self, "algorithm.", reader_samples=2, reader_refresh=0)
        check_least(self, "algorithm.", memory=0, max_answer_tokens=1, sigma=1e-6, negatives=0)
        if not 0 <= self.memory_low <= self.memory_high:
            raise ValueError(
                f"algorithm.memory_low = {self.memory_low}: must be from 0 to "
                f"algorithm.memory_high = {self.memory_high}"
            )
        if not self.documents or min(self.documents) < 1:
            raise ValueError(
                f"algorithm.documents = {self.documents}: must be numbers of at least 1"
            )
        if 0 < self.grounding_samples < self.grounding_threshold:
            raise ValueError(
                f"algorithm.grounding_threshold = {self.grounding_threshold}: must not be above "
                f"algorithm.grounding_samples = {self.grounding_samples}"
            )

    def budgets(self) -> list[RolloutBudget]:
        return self.round_budgets()

    def budget_summary(self) -> str:
        return (
            f"up to {self.max_generations} rounds of {self.generation_batch} proposals, until "
            f"{self.questions} questions have mixed rewards; a round asks for"
        )

    def round_budgets(self, writes: bool = True) -> list[RolloutBudget]:
        """Of a round, which is learned from with all others of its step.

        Args:
          writes: whether its questions are written in it, in up to max_generations rounds.
        """
        batch, rng = self.generation_batch, np.random.default_rng(0)
        played = batch * self.max_generations if writes else batch
        good = played if self.keep_surplus else min(self.questions, played)
        found = []
        if writes:
            tasks = ["any"] * played
            bad = selection.questioner_negatives(tasks[:good], tasks[good:], self.negatives, rng)
            learned = (good + len(bad)) * self.train_questioner
            blind = self.grounding_samples
            found = [
                RolloutBudget("questions", "questioner", batch, 1, learned),
                RolloutBudget("answers without documents", "responder", batch, blind),
            ]
            if self.reference_source == "frozen_reader":
                found.append(
                    RolloutBudget(
                        "answers of the anchor", "reference_reader", batch, self.reader_samples
                    )
                )
        found.append(RolloutBudget("answers", "responder", batch, self.group_size, good))
        if self.responder_reward not in ("rule", "random"):
            size, answers = self.verifier_group_size, self.group_size
            chosen = selection.verifier_groups(
                [0, 1] * (played * answers),
                good * answers,
                size,
                self.verifier_share,
                rng,
                balance=self.balance_verdicts,
            )
            learned = len(chosen) * self.train_verifier
            found.append(RolloutBudget("verdicts", "verifier", batch * answers, size, learned))
        return found
