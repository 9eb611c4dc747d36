"""Configs of SPELL and of algorithms that answer questions with its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spell_jax.algorithms import own_reward
from spell_jax.algorithms.config import AlgorithmConfig, RolloutBudget
from spell_jax.algorithms.spell.sections import (
    PROGRESS,
    READER,
    QuestionerConfig,
    ReaderConfig,
    RenewedReaderConfig,
    ResponderConfig,
    VerifierConfig,
    WriterConfig,
)
from spell_jax.data.questions import Question, read_questions
from spell_jax.learner.loss_config import LossConfig
from spell_jax.runtime.config import check_least
from spell_jax.sampler.config import SamplerConfig
from spell_jax.selfplay import parsing, prompts


@dataclasses.dataclass(frozen=True)
class QuestionsConfig(AlgorithmConfig):
    """Fields of an algorithm that answers questions, given or written by the policy.

    Attributes:
      generation_batch: questions proposed, or taken from a static set, in one round.
      questioner: questions that the policy writes.
      reader: references of those questions.
    """

    # The numbers are the public 7B script's: 128 questions of mixed reward from rounds of 480
    # proposals, at most 10 rounds.
    generation_batch: int = 480
    questioner: WriterConfig = WriterConfig()
    reader: ReaderConfig = ReaderConfig()

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.", generation_batch=1)
        if self.generation_batch % self.questioner.questions_per_cluster:
            raise ValueError(
                f"algorithm.generation_batch = {self.generation_batch}: must be a multiple of "
                "algorithm.questioner.questions_per_cluster = "
                f"{self.questioner.questions_per_cluster}"
            )

    @property
    def group_names(self) -> tuple[str, ...]:
        return prompts.ROLES

    @property
    def hints(self) -> dict[str, str]:
        section = "algorithm.questioner"
        causes = {
            "bad_format": "the policy does not write the questioner's format; warm-start it "
            "(docs/howto/your_documents.md)",
            "declined": f"references are over {section}.max_answer_tokens, or nothing is asked",
            "ungrounded": f"questions are answered without documents ({section}.grounding_samples)",
            "too_small": f"clusters have too few documents ({section}.unread_documents)",
        }
        return {f"rollout/{status}": cause for status, cause in causes.items()} | super().hints

    @property
    def has_dropout(self) -> bool:
        return self.questioner.vocabulary_dropout > 0

    def conflicts(self, sampler: SamplerConfig, loss: LossConfig) -> Iterator[str]:
        if self.has_dropout and loss.support == "sampled":
            yield (
                "algorithm.questioner.vocabulary_dropout = "
                f"{self.questioner.vocabulary_dropout}: must be 0 for loss.support = 'sampled', "
                "because what the filters kept is not known without it"
            )

    @property
    def has_reader(self) -> bool:
        """Whether a frozen copy of the starting policy answers every accepted question."""
        return self.reader.source != "questioner"

    @property
    def frozen_copies(self) -> tuple[str, ...]:
        return (READER,) if self.has_reader else ()

    @property
    def has_verifier(self) -> bool:
        """Whether a verifier votes on the answers."""
        return False

    @property
    def verdict_options(self) -> dict[str, Any]:
        """Fields of Options of the verifier's calls that differ from the sampler's config."""
        return {}

    @property
    def examines_known(self) -> bool:
        """Whether held-out evaluation also shows the questioner a known question."""
        # Static sets are written without a memory. Their reports have the rows of SPELL's reports,
        # so that both can be compared.
        return True

    def as_read(self, documents: Sequence[str]) -> Sequence[str]:
        """Return the documents for prompts of answers."""
        return documents

    def parse_question(
        self, text: str, task: str, count_tokens: Callable[[str], int]
    ) -> parsing.Parsed:
        """Parse a questioner's output with the limits of this config."""
        return parsing.parse_question(
            text,
            task,
            count_tokens,
            self.questioner.max_answer_tokens,
            self.questioner.distinct_options,
            extract=self.extract,
        )


@dataclasses.dataclass(frozen=True)
class VerifiedConfig(QuestionsConfig):
    """Fields of an algorithm with a verifier, which trains on questions with mixed rewards.

    Attributes:
      questions: number of questions with mixed rewards in an update [paper: batch size].
      max_generations: most rounds of a step. After them the update uses the questions there are.
      group_size: G, answers to a question.
      keep_surplus: whether all questions with mixed rewards are trained on, beyond `questions`.
      reward: rewards of the answers by a function of your own, `MODULE:FUNCTION` (a RewardFunction
        of algorithms/own_reward.py); "": by `responder`. With a function, `rule` and verifier
        decide no reward: the function reads their scores. `responder.reward` then says only whether
        a verifier votes ("max") or not ("rule").
      responder: rewards of the answers.
      verifier: votes on the answers.
    """

    questions: int = 128
    max_generations: int = 10
    group_size: int = 8
    keep_surplus: bool = False
    reward: str = ""
    responder: ResponderConfig = ResponderConfig()
    verifier: VerifierConfig = VerifierConfig()

    def __post_init__(self):
        super().__post_init__()
        # A group of one has no deviation.
        check_least(self, "algorithm.", questions=1, max_generations=1, group_size=2)

    def conflicts(self, sampler: SamplerConfig, loss: LossConfig) -> Iterator[str]:
        if self.verifier.max_tokens > sampler.max_tokens:
            yield (
                f"algorithm.verifier.max_tokens = {self.verifier.max_tokens}: must not be above "
                f"sampler.max_tokens = {sampler.max_tokens}"
            )
        if self.reward:
            yield from self.responder.reward_conflicts(own_reward.FIELD)
        yield from super().conflicts(sampler, loss)

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """Least and largest reward that a function of the user's may return."""
        # Groups compare rewards with their mean, so negative rewards will do.
        return own_reward.WIDEST

    def load_reward(self) -> own_reward.OwnReward | None:
        if not self.reward:
            return None
        return own_reward.OwnReward.load(self.reward, self.reward_bounds)

    def read_questions(self, path: str) -> tuple[Question, ...]:
        # The function may reward answers where the rule cannot read the question's answer.
        if self.reward:
            return read_questions(path, "data.questions")
        return super().read_questions(path)

    @property
    def has_verifier(self) -> bool:
        return self.responder.has_verifier

    @property
    def verdict_options(self) -> dict[str, Any]:
        return self.verifier.options

    def as_read(self, documents: Sequence[str]) -> Sequence[str]:
        return self.responder.as_read(documents)

    @property
    def most_questions(self) -> int:
        """Most questions of a step."""
        return self.generation_batch * self.max_generations

    @property
    def most_mixed(self) -> int:
        """Most questions of an update: every proposal may be accepted, and every question mixed."""
        return (
            self.most_questions if self.keep_surplus else min(self.questions, self.most_questions)
        )

    def budgets(self) -> list[RolloutBudget]:
        """Return upper bounds of a round's answers and verdicts; a step trains on all rounds."""
        batch, size, good = self.generation_batch, self.group_size, self.most_mixed
        budgets = [RolloutBudget("answers", "responder", batch, size, good)]
        if self.has_verifier:
            votes, cap = self.verifier.group_size, self.verifier.max_tokens
            groups = self.verifier.count_groups(good * size)
            trained = min(groups, self.most_questions * size) * self.verifier.train
            verdicts = RolloutBudget(
                "verdicts", "verifier", batch * size, votes, trained, max_tokens=cap
            )
            budgets.append(verdicts)
        return budgets


@dataclasses.dataclass(frozen=True)
class SpellConfig(VerifiedConfig):
    """Fields of config.algorithm for SPELL.

    Where the paper's text and its public code differ, configs/paper.py has the text's values and
    configs/paper_code.py the code's. docs/algorithm.md lists both beside these defaults.

    Attributes:
      questioner: questions that the policy writes, their rewards and memory.
      reader: references of those questions.
    """

    name: str = "spell"
    questioner: QuestionerConfig = QuestionerConfig()
    reader: RenewedReaderConfig = RenewedReaderConfig()

    @property
    def examines_known(self) -> bool:
        return self.questioner.memory > 0

    @property
    def reward_bounds(self) -> tuple[float, float]:
        # The questioner is rewarded for the mean, as a share of right answers (7).
        return 0.0, 1.0

    def renewed_copies(self, step: int) -> Sequence[str]:
        is_due = self.reader.refresh and step % self.reader.refresh == 0
        return (READER,) if is_due else ()

    def budget_summary(self) -> str:
        return (
            f"up to {self.max_generations} rounds of {self.generation_batch} proposals, until "
            f"{self.questions} questions have mixed rewards; a round asks for"
        )

    def budgets(self) -> list[RolloutBudget]:
        """Return upper bounds of a round; a step trains on all rounds."""
        batch, good = self.generation_batch, self.most_mixed
        bad = min(int(self.questioner.negatives * good), self.most_questions - good)
        trained = (good + bad) * self.questioner.train
        budgets = [RolloutBudget("questions", "questioner", batch, 1, trained)]
        if blind := self.questioner.grounding_samples:
            budgets.append(RolloutBudget("answers without documents", "responder", batch, blind))
        if self.has_reader:
            name = "answers of the frozen reader"
            budgets.append(RolloutBudget(name, READER, batch, self.reader.samples))
        if self.questioner.mapping == PROGRESS:
            name, probes = "answers to probes", self.questioner.probes
            budgets.append(RolloutBudget(name, "responder", probes, self.group_size))
        return budgets + super().budgets()
