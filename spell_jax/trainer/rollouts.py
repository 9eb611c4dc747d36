"""The rollout of each step; with config.staleness = 1 the next one runs during the update."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spell_jax.algorithms.base import Annotation, records
from spell_jax.learner import packing
from spell_jax.runtime import fault_injection
from spell_jax.runtime.finite import check_finite, is_finite
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.trainer.build import Run
from spell_jax.trainer.state import RolloutParams, States

_SHOWN = 200  # characters of a question or of its scores in a message


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One step's samples."""

    episodes: Sequence[Any]
    groups: list[packing.TrainGroup]  # training groups made of the episodes
    annotations: Sequence[Annotation]  # use of each episode in these groups
    metrics: Metrics
    state_before: dict[str, Any]  # of the algorithm, to repeat the step from

    def progress(self) -> dict[str, float]:
        means = self.metrics.means()
        names = {"solved": "rollout/solve_rate", "tokens/s": "time/tokens_per_second/sampled"}
        return {shown: means.get(name, 0.0) for shown, name in names.items()}

    def records(self) -> Iterator[dict[str, Any]]:
        return records(self.episodes, self.annotations)


class _Interrupted(Exception):
    """A rollout that is abandoned because the machine is taken away."""


class Rollouts:
    """Source of rollouts; at most one is kept ahead of the loop.

    Attributes:
      ahead: rollout of the next step, if it was made during the update of the current step.
    """

    def __init__(self, run: Run, should_stop: Callable[[], bool]):
        self._run, self._should_stop = run, should_stop
        self.ahead: Rollout | None = None

    def take(self, states: States, step: int) -> Rollout | None:
        """Return the step's rollout, made ahead or now; None if the rollout was abandoned."""
        rollout, self.ahead = self.ahead, None
        rollout = rollout or self._roll_out(states, step, lambda: None)
        fault_injection.point("rolled_out")
        return rollout

    def may_look_ahead(self, step: int) -> bool:
        """Return whether the next step's rollout may run during this step's update.

        False at a checkpoint, which holds no older weights: a resumed run must repeat this run.
        """
        config = self._run.config
        is_last = step == config.steps
        return bool(config.staleness) and not is_last and step % config.checkpoint_every != 0

    def look_ahead(self, states: States, step: int, advance_update: Callable[[], None]) -> None:
        """Make a step's rollout, with an update's micro-batches between the sampler's calls."""
        self.ahead = self._roll_out(states, step, advance_update)

    def state_before(self, rollout: Rollout | None) -> dict[str, Any]:
        """Return the algorithm's state before a rollout (None: abandoned, or not started)."""
        return rollout.state_before if rollout else self._run.algorithm.state_dict()

    def _roll_out(
        self, states: States, step: int, advance_update: Callable[[], None]
    ) -> Rollout | None:
        """Make a step's rollout; if abandoned, restore the algorithm's state and return None.

        `advance_update` is called whenever the device has been given its next sampler calls.
        """
        run, worker = self._run, self._run.worker

        def between_calls() -> None:
            advance_update()
            if self._should_stop():
                raise _Interrupted

        clock, before = time.monotonic(), run.algorithm.state_dict()
        truncated = run.config.algorithm.truncated
        worker.start_step(step, RolloutParams(run, states), between_calls, truncated)
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
        metrics = Metrics()
        metrics.merge(run.algorithm.metrics(episodes), "rollout/")
        metrics.merge(worker.metrics, "rollout/")
        # Seconds that the worker waited count as phases of their own.
        seconds, waited = time.monotonic() - clock, worker.waited
        run.timer.reassign(waited | {"rollout": seconds - sum(waited.values())})
        rates = {"sampled": worker.sampled_tokens, "prefilled": worker.prefilled_tokens}
        for name, tokens in rates.items():
            metrics.add_sum(f"time/tokens_per_second/{name}", tokens, seconds)
            metrics.add(f"rollout/{name}_tokens", tokens)
        return Rollout(episodes, groups, annotations, metrics, before)


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
