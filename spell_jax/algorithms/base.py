"""The interface between an algorithm and the trainer.

1. `rollout` samples the episodes of a step. It reaches the models through `Models`.
2. `groups` turns episodes into training groups, and says for every episode what it was used for.
3. `metrics` and `record` summarize a step and an episode for the run's files.

An episode is a frozen dataclass of the algorithm's own. Nothing changes it after `rollout` returned
it: `groups`, `metrics` and `record` are functions of their arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from spell_jax.data.clusters import Cluster, Source
from spell_jax.data.questions import Question
from spell_jax.data.stream import TaskStream
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime import distributed
from spell_jax.runtime.config import check_choice
from spell_jax.runtime.metrics import Metrics
from spell_jax.sampler.requests import Sample
from spell_jax.selfplay import prompts
from spell_jax.selfplay.prompts import Prompts

Item = TypeVar("Item")
Result = TypeVar("Result")
Episode = Any  # a frozen dataclass of the algorithm
# (seed, step): the entropy of all numpy generators of a step, default_rng([*key]),
# default_rng([*key, 1]), ... A resumed run therefore repeats its random numbers.
Key = tuple[int, int]
# (question, prediction, reference) triples -> 1 (right), 0 (wrong) or -1 (no verdict).
JudgeFunction = Callable[[Sequence[tuple[str, str, str]]], Sequence[int]]
RULES = ("match", "judge")  # compare texts, or ask an external judge


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Fields of config.algorithm that every algorithm has; a subclass adds its own.

    Attributes:
      name: name of the algorithm in the registry.
      prompts: set of prompt templates, a name or a folder (selfplay/prompts.py).
      judge_url: address of an OpenAI-compatible endpoint, for rule = "judge".
      judge_model: name of the judge's model at that endpoint.
      rule: how answers are scored: "match" compares texts, numbers and letters; "judge" asks the
        external judge.
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
        """Checks that a judge is configured if the rule needs one.

        Raises:
          ValueError: if it is not, naming the field and the remedy.
        """
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
    """Inputs of an algorithm besides its config.

    Attributes:
      prompts: the set of prompt templates.
      count_tokens: function that returns the number of tokens of a text.
      prompt_cap: largest number of tokens that the text of a prompt may have.
      seed: seed of the run.
      steps: number of updates of the run.
      clusters: opens the training clusters.
      held_out: opens the clusters that training never reads.
      deal: makes a stream of clusters by the run's tasks, weights and seed.
      questions: reads the given questions (config.data.questions).
      judge: external judge, or None if none is configured.
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


# ------------------------------------------------------------------------------ Asking the models


@dataclasses.dataclass(frozen=True)
class Reply:
    """A model's answers to one prompt.

    Attributes:
      prompt: token ids of the prompt [P].
      samples: G answers as tokens with logprobs.
      texts: the same answers as text, without stop tokens.
    """

    prompt: Sequence[int]
    samples: Sequence[Sample]
    texts: Sequence[str]

    def group(self, advantages: Iterable[float], role: str, model: str = "policy") -> TrainGroup:
        """Makes a training group of this prompt and its answers.

        Args:
          advantages: one per answer [G].
          role: role that answered; metrics are counted by it.
          model: model that is trained on the group.
        """
        return TrainGroup(
            self.prompt,
            [sample.tokens for sample in self.samples],
            [float(a) for a in advantages],
            role,
            [sample.logprobs for sample in self.samples],
            model=model,
        )


class Ask(Protocol):
    """Coroutine function that samples from a model: `replies = await ask(role, prompts, group)`.

    The request goes to the RolloutWorker (algorithms/rollout.py). At the await, the coroutine
    yields a PendingCall. The worker tokenizes the prompts and submits one request per prompt to the
    sampler's session (sampler/session.py, Session.submit), where it joins the requests of all other
    coroutines. The worker resumes the coroutine when all replies to this call are there.

    Args:
      role: role that answers: "questioner", "responder", "verifier" or a name of the algorithm's.
        The role "verifier" has a cap of answer tokens of its own (sampler.max_verdict_tokens).
      prompts: texts of the prompts.
      group: G, number of samples per prompt.
      model: "policy" or one of Algorithm.models.
      temperature: sampling temperature; None: sampler.temperature.

    Returns:
      One reply per prompt, in order; None for a prompt over the sampler's cap.
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
    """The models of an algorithm.

    Called like an Ask, it blocks until all replies are there; no await is needed.
    """

    def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]: ...

    def run_all(
        self, function: Callable[[Ask, Item], Coroutine[Any, Any, Result]], items: Sequence[Item]
    ) -> list[Result]:
        """Runs the coroutines function(ask, item) of all items concurrently.

        A coroutine resumes as soon as its own call is answered; it does not wait for the slowest
        answer of the others. Its replies do not depend on the other coroutines.

        Returns:
          The results of the coroutines, in the order of the items.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RolloutBudget:
    """Upper bound of one kind of samples in a step.

    Attributes:
      what: name of the samples, such as "answers".
      role: role that gives them.
      prompts: number of prompts.
      replies: samples per prompt.
      learned: number of groups, each a prompt and its samples, that are trained on.
      model: model that is trained on them.
    """

    what: str
    role: str
    prompts: int
    replies: int
    learned: int = 0
    model: str = "policy"


# ------------------------------------------------------------------------------- The algorithm


@dataclasses.dataclass(frozen=True)
class Annotation:
    """Use of one episode in the update.

    Attributes:
      advantages: role -> advantages of its samples, for roles that are trained on. A role with
        several replies per episode (SPELL's verifier) has a list per reply, empty if not used.
      used: role -> "used", or a word for why it is not trained on; a list of words for a role with
        several replies.
    """

    advantages: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    used: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)


USED = "used"  # the word in Annotation.used for what is trained on


class Algorithm(Protocol):
    """A self-play or RL algorithm; the trainer is the same for all of them.

    The trainer calls in each step, with key = (seed, step):

        episodes = algorithm.rollout(models, key, step)
        groups, annotations = algorithm.groups(episodes, key)
        metrics = algorithm.metrics(episodes)
        lines = [algorithm.record(e, a) for e, a in zip(episodes, annotations)]
    """

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the algorithm uses besides "policy".

        A model with a section of the config has a folder of its own. The others start as frozen
        copies of the policy.
        """
        ...

    @property
    def trained(self) -> tuple[str, ...]:
        """Those of `models` that are trained, on the groups that name them."""
        ...

    def rollout(self, models: Models, key: Key, step: int) -> Sequence[Episode]:
        """Samples the episodes of a step (from 1) and advances the state of `state_dict`."""
        ...

    def groups(
        self, episodes: Sequence[Episode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """Selects what is trained on.

        Returns:
          The training groups of all trained models, possibly none, and one annotation per episode
          in order.
        """
        ...

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """Metrics of a step, over all episodes, whether or not they are trained on."""
        ...

    def record(self, episode: Episode, annotation: Annotation) -> dict[str, Any]:
        """An episode and its use as a JSON-able dict for the run's files."""
        ...

    def cluster(self, episode: Episode) -> Cluster:
        """The documents of an episode."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything besides weights, seed and step that the next rollout depends on, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        ...


def records(
    algorithm: Algorithm, episodes: Iterable[Episode], annotations: Iterable[Annotation]
) -> Iterator[dict[str, Any]]:
    """Records with the texts of their clusters, as EpisodeWriter takes them."""
    for episode, annotation in zip(episodes, annotations, strict=True):
        documents = list(algorithm.cluster(episode).documents)
        yield algorithm.record(episode, annotation) | {"documents": documents}


# ---------------------------------------------------------------------------- The external judge


def choose_judge(rule: str, context: AlgorithmContext) -> JudgeFunction | None:
    """The external judge if the rule is "judge", else None.

    Raises:
      ValueError: if the rule is "judge" and none is configured.
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
    """A question with its answers, as an external judge reads them.

    Attributes:
      question: text of the question.
      reference: reference answer.
      predictions: extracted answers; None if there is nothing to judge.
      outcomes: score of each answer by the algorithm's rule.
    """

    question: str
    reference: str
    predictions: Sequence[str | None]
    outcomes: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Judged:
    """Scores of a question's answers after the judge was asked.

    Attributes:
      outcomes: score of each answer: the judge's verdict, or the rule's where it gave none.
      verdicts: the judge's verdicts on the predictions that are not None (negative: no verdict);
        empty without a judge.
    """

    outcomes: tuple[float, ...]
    verdicts: tuple[int, ...] = ()


def ask_judge(judge: JudgeFunction | None, answered: Sequence[Answered]) -> list[Judged]:
    """(Option) Replaces the rule's outcomes by an external judge's verdicts.

    One host asks the judge and broadcasts the verdicts: two calls might not agree.
    """
    if judge is None:
        return [Judged(tuple(a.outcomes)) for a in answered]
    places = [(n, i) for n, a in enumerate(answered) for i in range(len(a.predictions))]
    places = [(n, i) for n, i in places if answered[n].predictions[i] is not None]
    items = [
        (answered[n].question, answered[n].predictions[i] or "", answered[n].reference)
        for n, i in places
    ]
    outcomes = [list(a.outcomes) for a in answered]
    verdicts: list[list[int]] = [[] for _ in answered]
    for (n, i), verdict in zip(
        places, distributed.broadcast(lambda: list(judge(items))), strict=True
    ):
        verdicts[n].append(verdict)
        if verdict >= 0:
            outcomes[n][i] = float(verdict)
    return [Judged(tuple(o), tuple(v)) for o, v in zip(outcomes, verdicts, strict=True)]
