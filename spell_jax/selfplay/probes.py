"""Probes: questions that are asked again after each update, to measure progress on similar ones."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

NEIGHBORS = 4  # probes that the progress on a question is averaged over
LIFETIME = 4  # steps that a probe stays


@dataclass(frozen=True)
class Probe:
    """A question of an earlier step.

    Attributes:
      task: task of the question.
      cluster: id of the question's cluster.
      question: text of the question.
      reference: reference answer.
      first: solve rate when the question became a probe, in [0, 1].
      now: solve rate when the question was last asked, in [0, 1].
      hidden: sentence that responders do not read (SpellEpisode.hidden).
    """

    task: str
    cluster: str
    question: str
    reference: str
    first: float
    now: float
    hidden: str = ""


class ProbeSet:
    """At most `capacity` probes, oldest first. Each step replaces 1 / LIFETIME of the probes."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.probes: list[Probe] = []

    def measure(self, rates: Sequence[float]) -> None:
        """Set the present solve rates, one for each probe."""
        pairs = zip(self.probes, rates, strict=True)
        self.probes = [replace(probe, now=rate) for probe, rate in pairs]

    def push(self, new_probes: Sequence[Probe], rng: np.random.Generator) -> None:
        """Add a random choice of the questions of a step in place of the oldest probes."""
        # Rounded up, so that a small set is replaced, too.
        count = -(-self.capacity // LIFETIME)
        positions = rng.permutation(len(new_probes))[:count]
        self.probes = [*self.probes, *(new_probes[i] for i in sorted(positions))][-self.capacity :]

    def progress(self, task: str, question: str) -> float:
        """Return the solve rate's rise, at least 0, over the task's probes most like the question.

        Likeness is the share of common words, each counted as often as it occurs.
        """
        words = Counter(question.split())
        likeness = [
            (_likeness(words, Counter(probe.question.split())), probe.now - probe.first)
            for probe in self.probes
            if probe.task == task
        ]
        # The mean of several probes: the solve rate of one question is noisy.
        nearest = sorted(likeness, key=lambda pair: -pair[0])[:NEIGHBORS]
        # At least 0: negative rewards are for ungrounded and badly formed questions.
        return max(0.0, float(np.mean([rise for _, rise in nearest]))) if nearest else 0.0

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the probes as plain JSON data."""
        return [asdict(probe) for probe in self.probes]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.probes = [Probe(**probe) for probe in state]


def _likeness(first: Counter[str], second: Counter[str]) -> float:
    return (first & second).total() / max(1, (first | second).total())
