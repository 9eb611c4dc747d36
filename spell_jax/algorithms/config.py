"""Fields of config.algorithm that all algorithms share, and bounds of what a step samples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from spell_jax.algorithms.own_reward import OwnReward
from spell_jax.data.questions import Question
from spell_jax.learner.advantages import group_advantages
from spell_jax.learner.loss_config import LossConfig
from spell_jax.runtime.config import check_choice, naming
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.sampler.config import SamplerConfig
from spell_jax.selfplay import prompts, rules
from spell_jax.selfplay.given_questions import read_scorable
from spell_jax.selfplay.verdicts import JUDGE_RULES, JUDGE_TEMPLATES

# Comparisons of texts, or questions to an external judge.
RULES = ("match", "exact", "f1", "brief", *JUDGE_RULES)
# Delta degrees of freedom: the sum of squares is divided by the number of rewards minus this.
DDOF = {"sample": 1, "population": 0}
TRUNCATED = ("zero", "score", "drop")  # what happens to an answer that its token cap cut off


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Fields of config.algorithm that every algorithm has; a subclass adds its own.

    Attributes:
      name: name of the algorithm in the registry.
      prompts: set of prompt templates, a name or a folder (selfplay/prompts.py).
      judge_url: address of an OpenAI-compatible endpoint, for a rule with a judge.
      judge_model: name of the judge's model at that endpoint.
      judge_template: question to that judge. "yes_no": whether an answer agrees with the reference
        (Table 5). "grades": EAPO's three grades (its Appendix E); only "correct" scores.
      rule: how answers are scored. "match": numbers and letters are compared, and a text is right
        if it contains the reference (cover exact match), which rewards copied passages. "exact": a
        text must equal the reference. "f1": a text scores its words' F1. "brief": a right text
        scores the share of its words that the reference has, at most 1 (selfplay/rules.py).
        "judge": the external judge decides. "match_or_judge": the larger of both scores; the judge
        is asked only about answers that "match" scores below 1 (QwenLong-L1, arXiv 2505.17667).
      extract: how an answer is read from a text: "paper" reads the forms of SPELL's code, "lenient"
        more forms, and numbers in more notations (selfplay/rules.py).
      truncated: treatment of a reply, of any role, that its token cap cut off. "zero": nothing in
        it is read, so an answer scores 0, a proposal is of bad format, a vote malformed. "score":
        its text is read like a finished one. "drop": it is left out of rewards and update. Held-out
        evaluation always reads the text.
      divide_by_deviation: whether advantages are divided by their group's deviation.
      deviation: deviation of rewards: "population", the plain deviation of the papers' equations
        (SPELL's 3, 8 and 9, EAPO's 1), or "sample" (ddof 1, SPELL's public code).
      evaluation: held-out evaluation of your own, `MODULE:FUNCTION` (a MakeEvaluation of
        algorithms/held_out.py); "": the algorithm's.
    """

    name: str = ""
    prompts: str = "full"
    judge_url: str = ""
    judge_model: str = ""
    judge_template: str = "yes_no"
    rule: str = "match"
    # "paper" leaves "Answer: X" unread, and replies that are only a number (docs/algorithm.md,
    # 5.4).
    extract: str = "lenient"
    # As in SPELL's public code, where an answer without its end scores 0 and is trained on.
    truncated: str = "zero"
    divide_by_deviation: bool = True
    deviation: str = "sample"
    evaluation: str = ""

    def __post_init__(self):
        check_choice(self, "algorithm.", rule=RULES, judge_template=tuple(JUDGE_TEMPLATES))
        check_choice(self, "algorithm.", extract=rules.EXTRACTS, truncated=TRUNCATED)
        check_choice(self, "algorithm.", deviation=tuple(DDOF))

    @property
    def ddof(self) -> int:
        """Delta degrees of freedom of `deviation`."""
        return DDOF[self.deviation]

    def to_advantages(self, scores: Sequence[float]) -> list[float]:
        """Return the advantages of a group's scores [G]."""
        divide = self.divide_by_deviation
        return group_advantages(scores, divide_by_deviation=divide, ddof=self.ddof).tolist()

    def load_prompts(self) -> prompts.Prompts:
        """Read the prompt templates; ValueError if they are not there or damaged."""
        with naming("algorithm.prompts", self.prompts):
            return prompts.load(self.prompts)

    def load_reward(self) -> OwnReward | None:
        """Import the user's reward function; None without one, ValueError if it is not there."""
        return None

    def read_questions(self, path: str) -> tuple[Question, ...]:
        """Read data.questions; log and skip questions that no answer can solve."""
        return read_scorable(path, "data.questions", self.extract, self.rule)

    def read_answers(self, texts: Sequence[str], task: str) -> tuple[str | None, ...]:
        """Extract the answer that each text states; None where there is none."""
        return tuple(rules.extract_answer(text, task, self.extract) for text in texts)

    def state_answers(self, texts: Sequence[str], task: str) -> tuple[str | None, ...]:
        """Return the words of each text that an external judge reads; None where there are none."""
        return tuple(rules.stated_answer(text, task, self.extract) for text in texts)

    def count_forms(self, metrics: Metrics, texts: Sequence[str], task: str) -> None:
        """Count the forms in which the texts state their answers, as form/FORM."""
        forms = Counter(rules.answer_form(text, task, self.extract) for text in texts)
        for form in rules.FORMS:
            metrics.add_sum(f"form/{form}", forms[form], len(texts))

    def score_answers(
        self, answers: Sequence[str | None], reference: str, task: str
    ) -> tuple[float, ...]:
        """Score each answer of `read_answers` by the rule against a reference, in [0, 1]."""
        return tuple(
            rules.score_answer(answer, reference, task, self.rule, self.extract)
            for answer in answers
        )

    @property
    def has_judge(self) -> bool:
        """Whether the rule asks the external judge."""
        return "judge" in self.rule  # every rule that asks a judge has the word in its name

    def check_judge(self) -> None:
        """Raise ValueError if the rule needs a judge and none is configured, or the reverse."""
        if not self.has_judge:
            if self.judge_url or self.judge_model:
                raise ValueError(
                    f"algorithm.judge_url = {self.judge_url!r}, algorithm.judge_model = "
                    f"{self.judge_model!r}: must be '' for algorithm.rule = {self.rule!r}, which "
                    "asks no judge; algorithm.rule = 'judge' or 'match_or_judge' asks it"
                )
            return
        if not self.judge_url.startswith(("http://", "https://")):
            raise ValueError(
                f"algorithm.judge_url = {self.judge_url!r}: must be the http(s) address of a "
                f"chat-completions endpoint, for algorithm.rule = {self.rule!r}"
            )
        if not self.judge_model:
            raise ValueError(
                f"algorithm.judge_model = '': must name a model, for algorithm.rule = {self.rule!r}"
            )

    @property
    def frozen_copies(self) -> tuple[str, ...]:
        """Names of the frozen copies of the first policy that the algorithm asks."""
        return ()

    def renewed_copies(self, step: int) -> Sequence[str]:
        """Return names of frozen copies that the policy's weights of this step replace.

        The trainer asks after each step, and renews the names in Algorithm.model_names.
        """
        return ()

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the policy's training groups, each with its metric train/entropy/NAME."""
        return ("responder",)

    @property
    def hints(self) -> dict[str, str]:
        """Metric -> why updates are empty if it is the largest of these metrics, and the remedy."""
        return {
            "rollout/overlong": "documents do not fit; lower data.documents_per_cluster or "
            "data.max_document_tokens, or raise sampler.max_prompt",
            "rollout/accepted": "the rewards of each question's answers are all equal",
        }

    @property
    def has_dropout(self) -> bool:
        """Whether the algorithm asks for samples with vocabulary dropout (Options.dropout)."""
        return False

    def conflicts(self, sampler: SamplerConfig, loss: LossConfig) -> Iterator[str]:
        """Yield a message for each field that does not fit the sampler or the loss."""
        yield from ()

    def budgets(self) -> Sequence[RolloutBudget]:
        """Return upper bounds on the samples of a step, or of a round; launch.check prints them."""
        return ()

    def budget_summary(self) -> str:
        return "a step asks for"


@dataclasses.dataclass(frozen=True)
class RolloutBudget:
    """Upper bound of one kind of samples in a step."""

    what: str  # such as "answers"
    role: str
    prompts: int
    replies: int  # samples per prompt
    trained: int = 0  # groups, each a prompt and its samples, that are trained on
    model: str = "policy"  # the model that is trained on them
    max_tokens: int = 0  # cap of a sample, in tokens; 0: sampler.max_tokens
