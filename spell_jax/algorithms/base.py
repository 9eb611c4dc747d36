"""What an algorithm and the trainer know of each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from spell_jax.data.clusters import Cluster, Source
from spell_jax.data.questions import Question
from spell_jax.data.stream import TaskStream
from spell_jax.learner.packing import Group
from spell_jax.runtime import distributed
from spell_jax.runtime.config import check_choice
from spell_jax.runtime.metrics import Metrics
from spell_jax.sampler.requests import Sample
from spell_jax.selfplay import prompts
from spell_jax.selfplay.prompts import Prompts

Item = TypeVar("Item")
# (question, prediction, reference) triples -> 1, 0 or -1 (no verdict).
JudgeFunction = Callable[[Sequence[tuple[str, str, str]]], Sequence[int]]
RULES = ("match", "judge")  # texts are compared, or an external judge is asked


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Fields of config.algorithm that every algorithm has; a subclass adds its own.

    Attributes:
      name: name of the algorithm in the registry.
      prompts: set of prompt templates, a name or a folder (selfplay/prompts.py).
      judge_url: address of an OpenAI-compatible endpoint, for rule = "judge".
      judge_model: name of the judge's model there.
      rule: "match" compares texts, numbers and letters; "judge" asks the external judge.
    """

    name: str = ""
    prompts: str = "full"
    judge_url: str = ""
    judge_model: str = ""
    rule: str = "match"

    def __post_init__(self):
        check_choice(self, "algorithm.", rule=RULES)
        try:
            prompts.load(self.prompts)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"algorithm.prompts = {self.prompts!r}: {error}") from error

    def check_judge(self) -> None:
        """Raises ValueError if the rule needs an external judge and none is named."""
        if self.rule == "judge" and not self.judge_url.startswith(("http://", "https://")):
            raise ValueError(
                f"algorithm.judge_url = {self.judge_url!r}: must be the http(s) address of a "
                "chat-completions endpoint, for algorithm.rule = 'judge'"
            )
        if self.rule == "judge" and not self.judge_model:
            raise ValueError(
                "algorithm.judge_model = '': must name a model, for algorithm.rule = 'judge'"
            )

    def budgets(self) -> Sequence[RolloutBudget]:
        """Upper bounds of what a step, or a round of it, samples; launch.check prints them."""
        return ()

    def budget_summary(self) -> str:
        """Words that introduce the budgets."""
        return "a step asks for"


@dataclasses.dataclass(frozen=True)
class AlgorithmContext:
    """What an algorithm is made from, besides its own fields.

    Attributes:
      prompts: the set of prompts.
      count_tokens: tokens of a text.
      prompt_cap: tokens that the text of a prompt may have.
      seed, steps: of the run.
      clusters: opens the training clusters.
      held_out: opens those that training never sees.
      deal: clusters -> the stream of them by the run's tasks, weights and seed.
      questions: reads the given questions (config.data.questions).
      judge: an external judge, or None where none is configured.
    """

    prompts: Prompts
    count_tokens: Callable[[str], int]
    prompt_cap: int
    seed: int
    steps: int
    clusters: Callable[[], Source]
    held_out: Callable[[], Source]
    deal: Callable[[Source], TaskStream]
    questions: Callable[[], tuple[Question, ...]]
    judge: JudgeFunction | None = None


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a model said to one prompt.

    Attributes:
      prompt: token ids of the prompt [P].
      samples: G answers as tokens with logprobs.
      texts: the same answers as text, without stop tokens.
    """

    prompt: Sequence[int]
    samples: Sequence[Sample]
    texts: Sequence[str]

    def group(self, advantages: Iterable[float], role: str, model: str = "policy") -> Group:
        """This prompt and its answers as a training group, from which a model learns."""
        return Group(
            self.prompt,
            [sample.tokens for sample in self.samples],
            [float(a) for a in advantages],
            role,
            [sample.logprobs for sample in self.samples],
            model=model,
        )


class Ask(Protocol):
    """How a coroutine of an algorithm reaches a model: each prompt is answered `group` times, in
    order.

    None stands where a prompt is over the sampler's cap. `temperature` replaces the configured one.
    """

    async def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]: ...


class Models(Protocol):
    """The models of an algorithm. Called like an Ask, they answer at once."""

    def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]: ...

    def together(
        self, play: Callable[[Ask, Item], Coroutine[Any, Any, None]], items: Sequence[Item]
    ) -> None:
        """Runs play(ask, item) for all items at the same time.

        Each goes on as soon as what it asked is answered: none waits for the slowest answer of the
        others. What it is told does not depend on them.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RolloutBudget:
    """What a step of an algorithm asks for at most, before it starts.

    Attributes:
      what: the replies in words, "answers".
      role: of whom they are.
      prompts, replies: prompts, and replies to each.
      learned: groups of them, each of a prompt and its replies, that are learned from...
      model: ...by this one.
    """

    what: str
    role: str
    prompts: int
    replies: int
    learned: int = 0
    model: str = "policy"


class Algorithm(Protocol):
    """What is played; the trainer is the same for all algorithms."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the algorithm asks besides "policy". Those with a section of the
        config have a folder of their own; the others begin as copies of the policy."""
        ...

    @property
    def trained(self) -> tuple[str, ...]:
        """Of these, the ones with a section that learn too, from groups that name them."""
        ...

    def play(self, models: Models, step: int) -> Sequence[Any]:
        """One step's episodes, dataclasses with JSON-able fields apart from replies."""
        ...

    def rows(self, episodes: Sequence[Any]) -> list[Group]:
        """The training groups of a step, of all models that learn; empty when nothing can be
        learned from it."""
        ...

    def metrics(self, episodes: Sequence[Any]) -> Metrics:
        """What happened in a step, before anything was filtered out."""
        ...

    def record(self, episode: Any) -> dict[str, Any]:
        """An episode as a JSON-able dict for the run's files."""
        ...

    def cluster(self, episode: Any) -> Cluster:
        """The documents that an episode is about."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything besides weights that the next step depends on, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def choose_judge(rule: str, context: AlgorithmContext) -> JudgeFunction | None:
    """The external judge, where the algorithm's rule (of RULES) asks it.

    Raises:
      ValueError: it does, and none is configured.
    """
    if rule != "judge":
        return None
    if context.judge is None:
        raise ValueError(
            'algorithm.rule = "judge": needs algorithm.judge_url and algorithm.judge_model'
        )
    return context.judge


@dataclasses.dataclass(frozen=True)
class Answered:
    """A question and its answers, as an external judge is asked about them.

    Attributes:
      question, reference: what it reads with each of the answers.
      predictions: of the answers; None: there is nothing to judge.
      outcomes: by the algorithm's rule.
      verdicts: as it gives them, of predictions that are not None (negative: none).
    """

    question: str
    reference: str
    predictions: Sequence[str | None]
    outcomes: list[float]
    verdicts: list[int]


def ask_judge(judge: JudgeFunction | None, answered: Sequence[Answered]) -> None:
    """(Option) puts an external judge's verdicts in the place of `outcomes`; none leaves those.

    Of several hosts one asks it, and all are told: two calls need not agree.
    """
    if judge is None:
        return
    asked = [(a, i) for a in answered for i, p in enumerate(a.predictions) if p is not None]
    items = [(a.question, a.predictions[i] or "", a.reference) for a, i in asked]
    verdicts = distributed.broadcast(lambda: list(judge(items)))
    for (one, i), verdict in zip(asked, verdicts, strict=True):
        one.verdicts.append(verdict)
        if verdict >= 0:
            one.outcomes[i] = float(verdict)


def records(algorithm: Algorithm, episodes: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Episodes as EpisodeWriter takes them: with the texts of their clusters."""
    for episode in episodes:
        yield algorithm.record(episode) | {"documents": list(algorithm.cluster(episode).documents)}
