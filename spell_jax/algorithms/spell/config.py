"""Config of SPELL: the paper's recipe, its ablations, and named departures from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spell_jax.algorithms.config import AlgorithmConfig, RolloutBudget
from spell_jax.learner.loss_config import LossConfig
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.sampler.config import SamplerConfig
from spell_jax.selfplay import evidence, parsing, prompts, rewards, selection

CONFIRMED = "confirmed"
REFERENCE_SOURCES = ("questioner", "frozen_reader", CONFIRMED)
READER = "reference_reader"  # name of the frozen reader among the models
RESPONDER_REWARDS = ("max", "rule", "verifier", "mean", "min", "random")
PROGRESS = "progress"
MAPPINGS = (*rewards.MAPPINGS, PROGRESS)
REMEMBERED = ("new", "shown")
NORMALIZATIONS = ("batch", "task", "cluster", "batch+cluster")


@dataclasses.dataclass(frozen=True)
class SpellConfig(AlgorithmConfig):
    """Fields of config.algorithm for SPELL.

    Where the paper's text and its public code differ, configs/paper.py has the text's values and
    configs/paper_code.py the code's. docs/algorithm.md lists both beside these defaults.

    Attributes:
      questions: number of questions with mixed rewards in an update [paper: batch size].
      generation_batch: questions proposed in one round.
      questions_per_cluster: K, samples of one questioner prompt about a cluster, which share its
        documents [paper: 1]. A round has generation_batch / K clusters; repetitions are dropped.
      max_generations: most rounds of a step. After them the update uses the questions there are.
      group_size: G, answers to a question.
      verifier_group_size: G_v, votes on an answer.
      max_verdict_tokens: most tokens of a vote; 0: sampler.max_tokens.
      vocabulary_dropout: tempered vocabulary dropout of questions (arXiv 2604.03472; there the mask
        is hard): probability, in [0, 1), that a token is disfavored in a whole question. Logprobs
        are computed without dropout.
      dropout_penalty: nats that the logit of such a token loses. Tokens of the format, which are
        all but certain, stay.
      documents: m, number of new documents for the questioner, sampled from these numbers.
      unread_documents: documents that a first question leaves unread at least (the paper's m < n);
        a cluster without more is refused ("too_small"). 0: it may read all (the paper's code).
      memory: L, questions remembered per task and cluster; 0: no memory.
      memory_documents: documents stored with a remembered question. "new" (Algorithm 1): the new
        ones, so a prompt has at most m (L + 1). "shown" (the paper's code): all that were shown.
      memory_solved: whether questions that all answers solve are remembered too (the paper's code).
      mapping: the questioner's reward (7): "gaussian", "azr" or "r_zero"; or "progress": the rise
        of the responder's solve rate on the probes most like the question (selfplay/probes.py).
      probes: questions of earlier steps that are answered again in each step, for "progress".
      mu: mean of the Gaussian (7).
      sigma: standard deviation of the Gaussian (7).
      cues: words of which one, sampled for each question, ends its questioner prompt; (): none.
      answer_first: whether a rule chooses the answer, a name or number of the first new document,
        and the questioner writes its question (2103.07449); another answer has a bad format. Only
        for tasks with texts as answers. The K questions about a cluster then have documents and
        answers of their own.
      max_answer_tokens: most tokens of a general question's reference; others are declined.
      distinct_options: whether multiple-choice questions with two equal options have a bad format.
      format_penalty: whether questions of bad format get a penalty; else they are dropped.
      decline_penalty: whether declined ones too, unless the questioner says nothing can be asked.
      grounding_samples: answers without documents per question, scored like all; 0: no filter.
      grounding_threshold: number of right ones among them that makes a question ungrounded.
      reference_source: author of the reference. "questioner"; or "frozen_reader": the most frequent
        of `reader_samples` answers of a frozen copy of the starting policy, which reads the
        questioner's documents. A question is ungrounded if no answer is given at least twice and
        by more than half of the samples, or if that answer is also given without documents.
        "confirmed": the questioner, where the frozen reader's answer equals it (a round trip, arXiv
        1906.05416); other questions are ungrounded too.
      reader_samples: K, answers of the frozen reader per question.
      reader_unanimous: whether all K answers must agree.
      reader_by_hop: whether the reader answers a chain one hop after another (selfplay/hops.py).
      gate_leak: share of questions that pass although the reader's answers differ (2605.22217).
      reader_refresh: the frozen reader is renewed every N steps; 0: never.
      responder_reward: how rule and majority are combined: "max" (6), "verifier", "mean", "min";
        "rule" uses no verifier; "random" is a control that must destroy the policy.
      document_share: share of the responder's reward for beginning with "[k]", the number of a
        document that the questioner read (2603.02146). Above 0, documents have numbers, and given
        questions need "shown" or "evidence".
      negatives: bad questioner groups per good one.
      negatives_by_task: whether each task gets its own negatives (the paper's code), or all tasks
        together get as many as they have good questions (section 3.3).
      questioner_normalization: rows that normalize a questioner's advantage: the "batch" (9), its
        "task" (the paper's code; a hard task is not punished), or its "cluster". The batch also
        normalizes a row that is alone there. "batch+cluster": the mean of both advantages.
      train_questioner: whether the update has groups of the questioner.
      train_verifier: whether the update has groups of the verifier.
      malformed_penalty: whether a malformed vote earns -1 (the paper's code) or 0 (its text).
      verifier_share: verifier rows per responder row.
      verifier_conflict: votes on an answer that the verifier is trained on. "any" (section 3.3):
        votes that differ, malformed ones included. "well_formed" (the paper's code): the verdict
        has 51 to 99 % of the well-formed votes, so 7 to 1 malformed are left out, and ties.
      consistency_gate: whether the verifier is trained only where its majority equals the rule.
      balance_verdicts: whether as many yes as no groups of the verifier are trained on.
      keep_surplus: whether all questions with mixed rewards are trained on, beyond `questions`.
    """

    name: str = "spell"
    # The first numbers are the public 7B script's: 128 questions of mixed reward from rounds of 480
    # proposals, at most 10 rounds.
    questions: int = 128
    generation_batch: int = 480
    questions_per_cluster: int = 1
    max_generations: int = 10
    group_size: int = 8
    verifier_group_size: int = 8
    max_verdict_tokens: int = 0
    vocabulary_dropout: float = 0.0
    dropout_penalty: float = 2.0
    documents: tuple[int, ...] = (5,)
    unread_documents: int = 1
    memory: int = 3
    # As in the paper's Algorithm 1, line 20; its code has "shown".
    memory_documents: str = "new"
    memory_solved: bool = False
    mapping: str = "gaussian"
    probes: int = 32
    mu: float = 0.5
    # Three deviations reach from a solve rate of one half to 0 and to 1.
    sigma: float = 0.5 / 3
    cues: tuple[str, ...] = ()
    answer_first: bool = False
    # The public code's limit. The prompt asks for 20 tokens (Appendix G).
    max_answer_tokens: int = 40
    distinct_options: bool = False
    format_penalty: bool = True
    decline_penalty: bool = False
    # With one sample, a choice of four is rejected by luck in about a quarter of the cases.
    grounding_samples: int = 1
    grounding_threshold: int = 1
    reference_source: str = "questioner"
    reader_samples: int = 4
    reader_unanimous: bool = False
    reader_by_hop: bool = False
    gate_leak: float = 0.0
    reader_refresh: int = 0
    responder_reward: str = "max"
    document_share: float = 0.0
    train_questioner: bool = True
    negatives: float = 1.0
    negatives_by_task: bool = True
    # Eq. 9 normalizes over the batch, the public code over the task.
    questioner_normalization: str = "batch"
    train_verifier: bool = True
    malformed_penalty: bool = True
    # As many verifier rows as questions (section 3.3): with G = G_v = 8, 128 rows in 16 groups, for
    # 1,024 responder rows. As many groups as questions would be 1,024 rows, and the update a
    # quarter of all samples instead of the section's "roughly 1/G".
    verifier_share: float = 0.125
    # Section 3.3 names conflicting votes, the public code a share of the well-formed votes.
    verifier_conflict: str = selection.ANY
    consistency_gate: bool = True
    balance_verdicts: bool = False
    keep_surplus: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_choice(self, "algorithm.", mapping=MAPPINGS, memory_documents=REMEMBERED)
        check_choice(self, "algorithm.", reference_source=REFERENCE_SOURCES)
        check_choice(self, "algorithm.", responder_reward=RESPONDER_REWARDS)
        check_choice(self, "algorithm.", questioner_normalization=NORMALIZATIONS)
        check_choice(self, "algorithm.", verifier_conflict=selection.CONFLICTS)
        check_least(self, "algorithm.", questions=1, generation_batch=1, max_generations=1)
        check_least(self, "algorithm.", questions_per_cluster=1, probes=1)
        # A group of one has no deviation; a single vote is a majority.
        check_least(self, "algorithm.", group_size=2, verifier_group_size=1, verifier_share=0)
        check_least(self, "algorithm.", grounding_samples=0, grounding_threshold=1)
        check_least(self, "algorithm.", reader_samples=2, reader_refresh=0, unread_documents=0)
        check_least(self, "algorithm.", memory=0, max_answer_tokens=1, sigma=1e-6, negatives=0)
        check_least(self, "algorithm.", max_verdict_tokens=0, dropout_penalty=0)
        if not 0 <= self.vocabulary_dropout < 1:
            raise ValueError(
                f"algorithm.vocabulary_dropout = {self.vocabulary_dropout}: must be in [0, 1)"
            )
        if self.generation_batch % self.questions_per_cluster:
            raise ValueError(
                f"algorithm.generation_batch = {self.generation_batch}: must be a multiple of "
                f"algorithm.questions_per_cluster = {self.questions_per_cluster}"
            )
        for name in ("gate_leak", "document_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"algorithm.{name} = {getattr(self, name)}: must be in [0, 1]")
        if not self.documents or min(self.documents) < 1:
            raise ValueError(
                f"algorithm.documents = {self.documents}: must be numbers of at least 1"
            )
        if 0 < self.grounding_samples < self.grounding_threshold:
            raise ValueError(
                f"algorithm.grounding_threshold = {self.grounding_threshold}: must not be above "
                f"algorithm.grounding_samples = {self.grounding_samples}"
            )

    @property
    def group_names(self) -> tuple[str, ...]:
        return prompts.ROLES

    @property
    def hints(self) -> dict[str, str]:
        causes = {
            "bad_format": "the policy does not write the questioner's format; warm-start it",
            "declined": "references are over algorithm.max_answer_tokens, or nothing is asked",
            "ungrounded": "questions are answered without documents (algorithm.grounding_samples)",
            "too_small": "clusters have too few documents (algorithm.unread_documents)",
        }
        return {f"rollout/{status}": cause for status, cause in causes.items()} | super().hints

    @property
    def question_options(self) -> dict[str, Any]:
        """Fields of Options of the questioner's calls that differ from the sampler's config."""
        if not self.has_dropout:
            return {}
        return {"dropout": self.vocabulary_dropout, "dropout_penalty": self.dropout_penalty}

    @property
    def verdict_options(self) -> dict[str, Any]:
        """Fields of Options of the verifier's calls that differ from the sampler's config."""
        return {"max_tokens": self.max_verdict_tokens} if self.max_verdict_tokens else {}

    @property
    def has_dropout(self) -> bool:
        return self.vocabulary_dropout > 0

    def conflicts(self, sampler: SamplerConfig, loss: LossConfig) -> Iterator[str]:
        if self.max_verdict_tokens > sampler.max_tokens:
            yield (
                f"algorithm.max_verdict_tokens = {self.max_verdict_tokens}: must not be above "
                f"sampler.max_tokens = {sampler.max_tokens}"
            )
        if self.has_dropout and loss.support == "sampled":
            yield (
                f"algorithm.vocabulary_dropout = {self.vocabulary_dropout}: must be 0 for "
                "loss.support = 'sampled', because what the filters kept is not known without it"
            )

    def as_read(self, documents: Sequence[str]) -> Sequence[str]:
        """Return the documents for prompts of answers, numbered if an answer shall name one."""
        return evidence.number_documents(documents) if self.document_share else documents

    @property
    def has_verifier(self) -> bool:
        """Whether a verifier votes on the answers."""
        return self.responder_reward not in ("rule", "random")

    @property
    def has_reader(self) -> bool:
        """Whether a frozen copy of the starting policy answers every accepted question."""
        return self.reference_source != "questioner"

    @property
    def frozen_copies(self) -> tuple[str, ...]:
        return (READER,) if self.has_reader else ()

    def renewed_copies(self, step: int) -> Sequence[str]:
        is_due = self.reader_refresh and step % self.reader_refresh == 0
        return (READER,) if is_due else ()

    def parse_question(
        self, text: str, task: str, count_tokens: Callable[[str], int]
    ) -> parsing.Parsed:
        """Parse a questioner's output with the limits of this config."""
        return parsing.parse_question(
            text,
            task,
            count_tokens,
            self.max_answer_tokens,
            self.distinct_options,
            extract=self.extract,
        )

    def budgets(self) -> list[RolloutBudget]:
        return self.round_budgets()

    def budget_summary(self) -> str:
        return (
            f"up to {self.max_generations} rounds of {self.generation_batch} proposals, until "
            f"{self.questions} questions have mixed rewards; a round asks for"
        )

    def round_budgets(self, writes: bool = True) -> list[RolloutBudget]:
        """Return upper bounds per round, with or without proposals; a step trains on all rounds."""
        batch = self.generation_batch
        max_questions = batch * self.max_generations
        # Upper bounds: every proposal may be accepted, and every question mixed.
        good = max_questions if self.keep_surplus else min(self.questions, max_questions)
        budgets = []
        if writes:
            bad = min(int(self.negatives * good), max_questions - good)
            trained = (good + bad) * self.train_questioner
            budgets.append(RolloutBudget("questions", "questioner", batch, 1, trained))
            if self.grounding_samples:
                name, blind = "answers without documents", self.grounding_samples
                budgets.append(RolloutBudget(name, "responder", batch, blind))
            if self.has_reader:
                name = "answers of the frozen reader"
                budgets.append(RolloutBudget(name, READER, batch, self.reader_samples))
            if self.mapping == PROGRESS:
                name, role = "answers to probes", "responder"
                budgets.append(RolloutBudget(name, role, self.probes, self.group_size))
        budgets.append(RolloutBudget("answers", "responder", batch, self.group_size, good))
        if self.has_verifier:
            size, answers = self.verifier_group_size, self.group_size
            # `selection.verifier_groups` rounds down, too; balanced groups come in pairs of yes and
            # no.
            verdict_groups = int(good * answers * self.verifier_share / size)
            if self.balance_verdicts:
                verdict_groups -= verdict_groups % 2
            trained = min(verdict_groups, 2 * max_questions * answers) * self.train_verifier
            budgets.append(
                RolloutBudget(
                    *("verdicts", "verifier", batch * answers, size, trained),
                    max_tokens=self.max_verdict_tokens,
                )
            )
        return budgets
