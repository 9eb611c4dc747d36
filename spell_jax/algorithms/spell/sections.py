"""Sections of config.algorithm by SPELL's roles; algorithms on static questions have them too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spell_jax.runtime.config import MOVED_FIELDS, check_choice, check_least
from spell_jax.selfplay import evidence, rewards, selection

CONFIRMED = "confirmed"
REFERENCE_SOURCES = ("questioner", "frozen_reader", CONFIRMED)
READER = "reference_reader"  # name of the frozen reader among the models
RESPONDER_REWARDS = ("max", "rule", "verifier", "mean", "min", "random")
PROGRESS = "progress"
MAPPINGS = (*rewards.MAPPINGS, PROGRESS)
REMEMBERED = ("new", "shown")
NORMALIZATIONS = ("batch", "task", "cluster", "batch+cluster")


@dataclasses.dataclass(frozen=True)
class WriterConfig:
    """Section `questioner` of a policy that writes questions, and need not be trained on them.

    Attributes:
      questions_per_cluster: K, samples of one questioner prompt about a cluster, which share its
        documents [paper: 1]. A round has generation_batch / K clusters; repetitions are dropped.
      documents: m, number of new documents for the questioner, sampled from these numbers.
      unread_documents: documents that a first question leaves unread at least (the paper's m < n);
        a cluster without more is refused ("too_small"). 0: it may read all (the paper's code).
      cues: words; each question samples a word, which ends its questioner prompt; (): none.
      answer_first: whether a rule chooses the answer, a name or number of the first new document,
        and the questioner writes its question (2103.07449); another answer has a bad format. Only
        for tasks with texts as answers. The K questions about a cluster then have documents and
        answers of their own.
      max_answer_tokens: most tokens of a general question's reference; others are declined.
      distinct_options: whether multiple-choice questions with two equal options have a bad format.
      vocabulary_dropout: tempered vocabulary dropout of questions (arXiv 2604.03472; there the mask
        is hard): probability, in [0, 1), that a token is disfavored in a whole question. Logprobs
        are computed without dropout.
      dropout_penalty: nats that the logit of such a token loses. Tokens of the format, which are
        all but certain, stay.
      grounding_samples: answers without documents per question, scored like all; 0: no filter.
      grounding_threshold: number of right ones among them that makes a question ungrounded.
    """

    questions_per_cluster: int = 1
    documents: tuple[int, ...] = (5,)
    unread_documents: int = 1
    cues: tuple[str, ...] = ()
    answer_first: bool = False
    # The public code's limit. The prompt asks for 20 tokens (Appendix G).
    max_answer_tokens: int = 40
    distinct_options: bool = False
    vocabulary_dropout: float = 0.0
    dropout_penalty: float = 2.0
    # With one sample, a choice of four is rejected by luck in about a quarter of the cases.
    grounding_samples: int = 1
    grounding_threshold: int = 1

    def __post_init__(self):
        where = "algorithm.questioner."
        check_least(self, where, questions_per_cluster=1, unread_documents=0, max_answer_tokens=1)
        check_least(self, where, grounding_samples=0, grounding_threshold=1, dropout_penalty=0)
        if not 0 <= self.vocabulary_dropout < 1:
            raise ValueError(
                f"{where}vocabulary_dropout = {self.vocabulary_dropout}: must be in [0, 1)"
            )
        if not self.documents or min(self.documents) < 1:
            raise ValueError(f"{where}documents = {self.documents}: must be numbers of at least 1")
        if 0 < self.grounding_samples < self.grounding_threshold:
            raise ValueError(
                f"{where}grounding_threshold = {self.grounding_threshold}: must not be above "
                f"{where}grounding_samples = {self.grounding_samples}"
            )

    @property
    def options(self) -> dict[str, Any]:
        """Fields of Options of the questioner's calls that differ from the sampler's config."""
        if not self.vocabulary_dropout:
            return {}
        return {"dropout": self.vocabulary_dropout, "dropout_penalty": self.dropout_penalty}


@dataclasses.dataclass(frozen=True)
class QuestionerConfig(WriterConfig):
    """Section `questioner` of SPELL, which rewards the questioner and remembers its questions.

    Attributes:
      memory: L, questions remembered per task and cluster; 0: no memory.
      memory_documents: documents stored with a remembered question. "new" (Algorithm 1): the new
        ones, so a prompt has at most m (L + 1). "shown" (the paper's code): all that were shown.
      memory_solved: whether questions that all answers solve are remembered too (the paper's code).
      mapping: the questioner's reward (7): "gaussian", "azr" or "r_zero"; or "progress": the rise
        of the responder's solve rate on the probes most like the question (selfplay/probes.py).
      probes: questions of earlier steps that are answered again in each step, for "progress".
      mu: mean of the Gaussian (7).
      sigma: standard deviation of the Gaussian (7).
      format_penalty: whether questions of bad format get a penalty; else they are dropped.
      decline_penalty: whether declined ones too, unless the questioner says nothing can be asked.
      train: whether the update has groups of the questioner.
      negatives: bad questioner groups per good one.
      negatives_by_task: whether each task gets its own negatives (the paper's code), or all tasks
        together get as many as they have good questions (section 3.3).
      normalization: rows that normalize a questioner's advantage: the "batch" (9), its "task" (the
        paper's code; a hard task is not punished), or its "cluster". The batch also normalizes a
        row that is alone there. "batch+cluster": the mean of both advantages.
    """

    memory: int = 3
    # As in the paper's Algorithm 1, line 20; its code has "shown".
    memory_documents: str = "new"
    memory_solved: bool = False
    mapping: str = "gaussian"
    probes: int = 32
    mu: float = 0.5
    # Three deviations reach from a solve rate of one half to 0 and to 1.
    sigma: float = 0.5 / 3
    format_penalty: bool = True
    decline_penalty: bool = False
    train: bool = True
    negatives: float = 1.0
    negatives_by_task: bool = True
    # Eq. 9 normalizes over the batch, the public code over the task.
    normalization: str = "batch"

    def __post_init__(self):
        super().__post_init__()
        where = "algorithm.questioner."
        check_choice(self, where, mapping=MAPPINGS, memory_documents=REMEMBERED)
        check_choice(self, where, normalization=NORMALIZATIONS)
        check_least(self, where, memory=0, probes=1, sigma=1e-6, negatives=0)


@dataclasses.dataclass(frozen=True)
class ReaderConfig:
    """Section `reader`: references of written questions, and the frozen reader that gives them.

    Attributes:
      source: author of the reference. "questioner"; or "frozen_reader": the most frequent of
        `samples` answers of a frozen copy of the starting policy, which reads the questioner's
        documents. A question is ungrounded if no answer is given at least twice and by more than
        half of the samples, or if that answer is also given without documents. "confirmed": the
        questioner, where the frozen reader's answer equals it (a round trip, arXiv 1906.05416);
        other questions are ungrounded too.
      samples: K, answers of the frozen reader per question.
      unanimous: whether all K answers must agree.
      by_hop: whether the reader answers a chain one hop after another (selfplay/hops.py).
      gate_leak: share of questions that pass although the reader's answers differ (2605.22217).
    """

    source: str = "questioner"
    samples: int = 4
    unanimous: bool = False
    by_hop: bool = False
    gate_leak: float = 0.0

    def __post_init__(self):
        check_choice(self, "algorithm.reader.", source=REFERENCE_SOURCES)
        check_least(self, "algorithm.reader.", samples=2)
        _check_share(self.gate_leak, "algorithm.reader.gate_leak")


@dataclasses.dataclass(frozen=True)
class RenewedReaderConfig(ReaderConfig):
    """Section `reader` of SPELL, which writes questions in every step.

    Attributes:
      refresh: steps after which the policy's weights replace the frozen reader's; 0: never.
    """

    refresh: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.reader.", refresh=0)


@dataclasses.dataclass(frozen=True)
class ResponderConfig:
    """Section `responder`: rewards of the answers.

    Attributes:
      reward: how rule and majority are combined: "max" (6), "verifier", "mean", "min"; "rule" uses
        no verifier; "random" is a control that must destroy the policy.
      document_share: share of the reward for beginning with "[k]", the number of a document that
        the questioner read (2603.02146). Above 0, documents have numbers, and given questions need
        "shown" or "evidence".
    """

    reward: str = "max"
    document_share: float = 0.0

    def __post_init__(self):
        check_choice(self, "algorithm.responder.", reward=RESPONDER_REWARDS)
        _check_share(self.document_share, "algorithm.responder.document_share")

    @property
    def has_verifier(self) -> bool:
        """Whether a verifier votes on the answers."""
        return self.reward not in ("rule", "random")

    @property
    def names_documents(self) -> bool:
        """Whether an answer shall name a document that the questioner read."""
        return self.document_share > 0

    def as_read(self, documents: Sequence[str]) -> Sequence[str]:
        """Return the documents for prompts of answers, numbered if an answer shall name one."""
        return evidence.number_documents(documents) if self.names_documents else documents

    def reward_conflicts(self, field: str) -> Iterator[str]:
        """Yield a message for each field that the user's function, named by `field`, replaces."""
        if self.reward not in ("max", "rule"):
            yield (
                f"algorithm.responder.reward = {self.reward!r}: must be 'max' (a verifier votes) "
                f"or 'rule' (none votes) with {field}, which combines rule and votes itself"
            )
        if self.document_share:
            yield (
                f"algorithm.responder.document_share = {self.document_share}: must be 0 with "
                f"{field}, which rewards the whole answer"
            )


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
    """Section `verifier`: votes on answers, and which of them are trained on.

    Attributes:
      group_size: G_v, votes on an answer.
      max_tokens: most tokens of a vote; 0: sampler.max_tokens.
      train: whether the update has groups of the verifier.
      malformed_penalty: whether a malformed vote earns -1 (the paper's code) or 0 (its text).
      share: verifier rows per responder row.
      conflict: votes on an answer that the verifier is trained on. "any" (section 3.3): votes that
        differ, malformed ones included. "well_formed" (the paper's code): the verdict has 51 to
        99 % of the well-formed votes, so 7 to 1 malformed are left out, and ties.
      consistency_gate: whether the verifier is trained only where its majority equals the rule.
      balance: whether as many yes as no groups of the verifier are trained on.
    """

    group_size: int = 8
    max_tokens: int = 0
    train: bool = True
    malformed_penalty: bool = True
    # As many verifier rows as questions (section 3.3): with G = G_v = 8, 128 rows in 16 groups, for
    # 1,024 responder rows. As many groups as questions would be 1,024 rows, and the update a
    # quarter of all samples instead of the section's "roughly 1/G".
    share: float = 0.125
    # Section 3.3 names conflicting votes, the public code a share of the well-formed votes.
    conflict: str = selection.ANY
    consistency_gate: bool = True
    balance: bool = False

    def __post_init__(self):
        check_choice(self, "algorithm.verifier.", conflict=selection.CONFLICTS)
        check_least(self, "algorithm.verifier.", group_size=1, max_tokens=0, share=0)

    @property
    def options(self) -> dict[str, Any]:
        """Fields of Options of the verifier's calls that differ from the sampler's config."""
        return {"max_tokens": self.max_tokens} if self.max_tokens else {}

    def count_groups(self, answers: int) -> int:
        """Return the most groups of an update with `answers` responder rows."""
        # `selection.verifier_groups` rounds down, too; balanced groups come in pairs of yes and no.
        groups = int(answers * self.share / self.group_size)
        return groups - groups % 2 if self.balance else groups

    def is_eligible(self, votes: Sequence[int], rule: float) -> bool:
        """Return whether votes on an answer of this score by the rule may be trained on."""
        return selection.eligible_verifier_group(
            votes, rule, consistency=self.consistency_gate, conflict=self.conflict
        )

    def reward_votes(self, votes: Sequence[int]) -> list[float]:
        """Return the reward of each vote on an answer (5)."""
        # A malformed vote earns -1, as in the public code (spec 6): the penalty preserves the
        # format.
        return rewards.verifier_rewards(votes, -1.0 if self.malformed_penalty else 0.0)


def _check_share(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} = {value}: must be in [0, 1]")


# Names of fields before they had sections -> the sections' names.
_MOVED: Mapping[str, str] = {
    "reference_source": "reader.source",
    "reader_samples": "reader.samples",
    "reader_unanimous": "reader.unanimous",
    "reader_by_hop": "reader.by_hop",
    "gate_leak": "reader.gate_leak",
    "reader_refresh": "reader.refresh",
    "responder_reward": "responder.reward",
    "document_share": "responder.document_share",
    "verifier_group_size": "verifier.group_size",
    "max_verdict_tokens": "verifier.max_tokens",
    "train_verifier": "verifier.train",
    "malformed_penalty": "verifier.malformed_penalty",
    "verifier_share": "verifier.share",
    "verifier_conflict": "verifier.conflict",
    "consistency_gate": "verifier.consistency_gate",
    "balance_verdicts": "verifier.balance",
    "train_questioner": "questioner.train",
    "questioner_normalization": "questioner.normalization",
} | {
    field.name: f"questioner.{field.name}"
    for field in dataclasses.fields(QuestionerConfig)
    if field.name not in ("train", "normalization")
}
MOVED_FIELDS.update({f"algorithm.{old}": f"algorithm.{new}" for old, new in _MOVED.items()})
