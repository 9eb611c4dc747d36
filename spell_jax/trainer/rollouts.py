"""The rollout of each step, made in turn with the updates or during them (config.staleness)."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spell_jax.algorithms.base import Annotation, records
from spell_jax.learner import packing
from spell_jax.runtime.finite import check_finite, is_finite
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.trainer.build import Run
from spell_jax.trainer.state import Params, SharedParams, States

_SHOWN = 200  # characters of a question or of its scores in a message


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One step's samples."""

    episodes: Sequence[Any]
    groups: list[packing.TrainGroup]  # training groups made of the episodes
    annotations: Sequence[Annotation]  # use of each episode in these groups
    metrics: Metrics
    state_before: dict[str, Any]  # of the algorithm, to repeat the step from
    phases: Mapping[str, float]  # seconds by phase: waiting for each agent, and "rollout", the rest

    def progress(self) -> dict[str, float]:
        means = self.metrics.means()
        names = {"solved": "rollout/solve_rate", "tokens/s": "time/tokens_per_second/sampled"}
        return {shown: means.get(name, 0.0) for shown, name in names.items()}

    def records(self) -> Iterator[dict[str, Any]]:
        return records(self.episodes, self.annotations)


class _Interrupted(Exception):
    """A rollout that is abandoned because the machine is taken away."""


def make_rollout(
    run: Run,
    params: Params,
    step: int,
    staleness: int,
    between_calls: Callable[[], None],
    should_stop: Callable[[], bool],
) -> Rollout | None:
    """Make a step's rollout; if abandoned, restore the algorithm's state and return None.

    Args:
      run: the run.
      params: weights of its models by name.
      step: the step, counted from 1.
      staleness: number of updates that the weights will lack when the step is trained on.
      between_calls: function that is called whenever the device has been given its next sampler
        calls.
      should_stop: function that tells, after `between_calls`, whether to abandon the rollout.
    """
    worker = run.worker

    def advance() -> None:
        between_calls()
        if should_stop():
            raise _Interrupted

    clock, before = time.monotonic(), run.algorithm.state_dict()
    worker.start_step(step, params, advance, run.config.algorithm.truncated)
    key = run.config.seed, step
    try:
        episodes = run.algorithm.rollout(worker, key, step)
    except _Interrupted:
        # The resumed run repeats this rollout, so the algorithm must forget its beginning.
        worker.end_step()
        run.algorithm.load_state_dict(before)
        return None
    with named_rewards(run, step, episodes):
        groups, annotations = run.algorithm.groups(episodes, key)
        for group in groups:
            check_finite(group.advantages, "group.advantages")  # NaN would reach every weight
        check_scores([episode.record() for episode in episodes])
    worker.end_step()
    metrics, seconds = Metrics(), time.monotonic() - clock
    metrics.merge(run.algorithm.metrics(episodes), "rollout/")
    metrics.merge(worker.metrics, "rollout/")
    metrics.add("rollout/staleness", staleness)
    rates = {"sampled": worker.sampled_tokens, "prefilled": worker.prefilled_tokens}
    for name, tokens in rates.items():
        metrics.add_sum(f"time/tokens_per_second/{name}", tokens, seconds)
        metrics.add(f"rollout/{name}_tokens", tokens)
    waited = dict(worker.waited)
    phases = waited | {"rollout": seconds - sum(waited.values())}
    return Rollout(episodes, groups, annotations, metrics, before, phases)


class Rollouts(contextlib.AbstractContextManager, abc.ABC):
    """Source of rollouts, and of the weights that they sample from; a context of the loop.

    Rollouts of later steps may be made ahead of the loop: `look_ahead` says when.
    """

    def __init__(self, run: Run, should_stop: Callable[[], bool]):
        self._run, self._should_stop = run, should_stop

    @abc.abstractmethod
    def params(self, states: States) -> Params:
        """Return the weights that the worker samples from, by model name."""

    @property
    @abc.abstractmethod
    def has_next(self) -> bool:
        """Whether a rollout is made, or begun, ahead of the loop."""

    @abc.abstractmethod
    def take(self, states: States, step: int) -> Rollout | None:
        """Return the step's rollout, made ahead or now; None if the rollout was abandoned."""

    @abc.abstractmethod
    def look_ahead(self, states: States, step: int, advance_update: Callable[[], None]) -> None:
        """Make or begin rollouts of later steps during a step's update, from its first states."""

    @abc.abstractmethod
    def next_state(self) -> dict[str, Any]:
        """Return the algorithm's state before the next rollout that the loop takes."""

    def announce(self, states: States) -> None:
        """Prepare rollouts for the weights after an update."""
        return

    @contextlib.contextmanager
    def sampling_devices(self) -> Iterator[None]:
        """Wait until no rollout samples; the block may sample then."""
        yield

    @property
    def slows_update(self) -> bool:
        """Whether a rollout ran on the devices of the last update, during the update."""
        return False

    def idle_metrics(self, update_seconds: float) -> dict[str, float]:
        """Return the idle shares of the meshes since the last call; {} if there is one mesh.

        `update_seconds` is the time since then in which the update ran.
        """
        return {}

    def later_steps(self, step: int) -> range:
        """Return the steps whose rollouts may use the weights before this step's update.

        None is beyond a checkpoint, which holds no older weights: a resumed run must repeat this
        run.
        """
        config = self._run.config
        last = min(step + config.staleness, config.steps)
        next_checkpoint = -(-step // config.checkpoint_every) * config.checkpoint_every
        return range(step + 1, min(last, next_checkpoint) + 1)


class SharedRollouts(Rollouts):
    """Rollouts on the devices that also train; with config.staleness = 1 during updates."""

    _ahead: Rollout | None = None

    def params(self, states: States) -> Params:
        return SharedParams(self._run, states)

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def has_next(self) -> bool:
        return self._ahead is not None

    def take(self, states: States, step: int) -> Rollout | None:
        rollout, self._ahead = self._ahead, None
        return rollout or self._make(states, step, 0, lambda: None)

    def look_ahead(self, states: States, step: int, advance_update: Callable[[], None]) -> None:
        for later_step in self.later_steps(step):
            self._ahead = self._make(states, later_step, later_step - step, advance_update)

    def next_state(self) -> dict[str, Any]:
        return self._ahead.state_before if self._ahead else self._run.algorithm.state_dict()

    @property
    def slows_update(self) -> bool:
        return self.has_next

    def _make(
        self, states: States, step: int, staleness: int, advance_update: Callable[[], None]
    ) -> Rollout | None:
        params = self.params(states)
        stop = self._should_stop
        rollout = make_rollout(self._run, params, step, staleness, advance_update, stop)
        if rollout is not None:
            # Seconds that the worker waited for each agent count as phases of their own.
            self._run.timer.reassign(rollout.phases)
        return rollout


@contextlib.contextmanager
def named_rewards(run: Run, step: int, episodes: Sequence[Any]) -> Iterator[None]:
    """Name algorithm, step and a question with an invalid score in a ValueError raised inside.

    NumPy arrays and lists as scores are TypeErrors of algorithms that put scores into a set.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        place = f"algorithm {run.config.algorithm.name}, step {step}"
        # The first question with a fault is named; the error itself may come from any code.
        for episode in episodes:
            if fault := _fault(episode.record()):
                place = f"{place}, {fault}"
                break
        raise ValueError(f"{place}: {error}") from error


def check_scores(records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a score of an episode's record is no finite number.

    Advantages do not show all of them: answers that all score NaN are no training group.
    """
    for record in records:
        for index, score in enumerate(_list(record, "scores")):
            if not is_finite(score):
                raise ValueError(f"scores[{index}] = {score!r:.80}: must be a finite number")


def _fault(record: Mapping[str, Any]) -> str:
    """Return the question of a record with a wrong number of scores or an invalid score, or ""."""
    # Records without scores pass: not every algorithm's records have the field.
    scores, answers = _list(record, "scores"), _list(record, "answers")
    if all(map(is_finite, scores)) and (not scores or len(scores) == len(answers)):
        return ""
    question = str(record.get("question"))[:_SHOWN]
    return f"question {question!r} with the scores {str([*scores])[:_SHOWN]}"


def _list(record: Mapping[str, Any], field: str) -> Sequence[Any]:
    """Return a list of a record; empty if the algorithm's records have none in this field."""
    return value if isinstance(value := record.get(field), list | tuple) else ()
