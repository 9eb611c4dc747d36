"""Endless stream of batches of (task, cluster) pairs (spec section 1).

1. At the start, every cluster is assigned to exactly one task that it may serve. Clusters are
   shuffled, clusters with the fewest allowed tasks go first, and each cluster goes to the task with
   the fewest clusters so far. Clusters that may serve any task are thus split into equal parts.
2. A batch is divided among tasks by weight (`batch_counts`), or with `random_tasks` the task of
   each pair is sampled by weight. Each task deals from its own shuffled deck. If fewer clusters are
   left than needed, they are discarded and the deck of the next epoch is used, so no cluster
   repeats within a batch. A batch larger than the data deals whole decks.
3. The batch is shuffled. Only then are the texts of its clusters read.

Without shuffling, assignment, decks and batches keep the order of the source.

The assignment depends only on the seed and the ids, a deck on the seed, its task and its epoch, and
a batch's order and random tasks on the seed and its number. A few numbers are therefore the whole
state.
"""

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.data.clusters import Cluster, ClusterSource

log = logging.getLogger(__name__)


def batch_counts(
    batch: int, weights: Mapping[str, float], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Divide a batch among tasks; ValueError if it is below 0 or above the sum of sizes.

    Each task gets the floor of its share, at most its size. The remainder is assigned one by one,
    heaviest task first; ties go to the task listed first. Weights are at least 0, of any
    positive sum.
    """
    if not 0 <= batch <= sum(sizes.values()):
        raise ValueError(f"batch = {batch}: must be between 0 and {sum(sizes.values())}")
    total = sum(weights.values())
    counts = {task: min(int(batch * weights[task] / total), sizes[task]) for task in weights}
    heaviest_first = sorted(weights, key=lambda task: -weights[task])
    # Several rounds, because a task may be at its size before the remainder is used up.
    remainder = batch - sum(counts.values())
    while remainder:
        for task in heaviest_first:
            if remainder and counts[task] < sizes[task]:
                counts[task] += 1
                remainder -= 1
    return counts


class TaskStream:
    """Endless stream of batches of pairs (task, cluster).

    `repeats` counts clusters dealt again within a batch, if it is larger than the data.
    """

    def __init__(
        self,
        source: ClusterSource,
        tasks: Sequence[str],
        weights: Sequence[float],
        seed: int,
        shuffle: bool = True,
        random_tasks: bool = False,
    ) -> None:
        """Assign the clusters to the tasks.

        Clusters that serve none of the tasks are left out, with a warning. ValueError if there is
        no task, a task is named twice, no task has a cluster, or the weights are not one positive
        number per task. `seed`, at least 0, determines the assignment and all shuffles.
        """
        if not tasks or len(set(tasks)) != len(tasks):
            raise ValueError(f"tasks = {tuple(tasks)}: must be one or more different tasks")
        if len(weights) != len(tasks) or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(
                f"weights = {tuple(weights)}: must be a positive number for each of {tuple(tasks)}"
            )
        self.repeats = 0
        self.read = source.read
        self._weights = dict(zip(tasks, weights, strict=True))
        self._seed, self._shuffle, self._random_tasks = seed, shuffle, random_tasks
        self._assigned = self._assign(source.tasks)
        self._batches = 0
        self._epochs = dict.fromkeys(tasks, 0)
        self._positions = dict.fromkeys(tasks, 0)
        self._decks = {task: self._deck(task) for task in tasks}

    def __len__(self) -> int:
        return sum(map(len, self._assigned.values()))

    def next(self, batch: int) -> list[tuple[str, Cluster]]:
        """Return the next `batch` >= 1 pairs (task, cluster), in shuffled order."""
        if batch < 1:
            raise ValueError(f"batch = {batch}: must be at least 1")
        sizes = {task: len(ids) for task, ids in self._assigned.items()}
        # A batch larger than the data may deal every deck this many times.
        copies = math.ceil(batch / len(self))
        available = {task: size * copies for task, size in sizes.items()}
        counts = batch_counts(batch, self._batch_weights(batch), available)
        pairs = [(task, name) for task, count in counts.items() for name in self._deal(task, count)]
        self.repeats += sum(max(0, counts[task] - sizes[task]) for task in counts)
        order = self._order("batch", self._batches, len(pairs))
        self._batches += 1
        # One read for the whole batch, so that several hosts can share the reading.
        clusters = self.read([pairs[i][1] for i in order])
        return [(pairs[i][0], cluster) for i, cluster in zip(order, clusters, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position as a few JSON values.

        "data" is a digest of clusters, tasks and seed. A state is valid only for the same digest.
        """
        return {
            "epochs": dict(self._epochs),
            "positions": dict(self._positions),
            "batches": self._batches,
            "repeats": self.repeats,
            "clusters": len(self),
            "data": self._digest(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume exactly at the position of the stream that returned the state.

        ValueError if the state is malformed or belongs to other tasks, clusters or another seed.
        """
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ValueError(
                f"stream state: {missing} missing, so another version of this program wrote it; "
                "start a new run"
            )
        tasks, saved_tasks = sorted(self._weights), sorted(state["epochs"])
        if saved_tasks != tasks:
            raise ValueError(f"stream state: for tasks {saved_tasks}, but the run has {tasks}")
        if state["data"] != self._digest():
            raise ValueError(
                f"stream state: for {state['clusters']} other clusters than these {len(self)}, or "
                "for another seed; resume with the data and seed of the original run"
            )
        self._epochs = {task: int(state["epochs"][task]) for task in self._weights}
        self._positions = {task: int(state["positions"][task]) for task in self._weights}
        self._batches, self.repeats = int(state["batches"]), int(state["repeats"])
        # Decks are functions of seed, task and epoch, so the state need not hold them.
        self._decks = {task: self._deck(task) for task in self._weights}

    def _assign(self, tasks: Mapping[str, tuple[str, ...] | None]) -> dict[str, list[str]]:
        assigned: dict[str, list[str]] = {task: [] for task in self._weights}
        # Shuffled, the assignment does not depend on the source's order.
        names = sorted(tasks) if self._shuffle else list(tasks)
        choices = []
        for index in self._order("assignment", 0, len(names)):
            allowed = tasks[names[index]]
            choices.append((names[index], [t for t in assigned if allowed is None or t in allowed]))
        # Fewest options first: a cluster that serves one task only could not balance a task later.
        for name, options in sorted(choices, key=lambda choice: len(choice[1])):
            if options:
                assigned[min(options, key=lambda task: len(assigned[task]))].append(name)
        unused = len(names) - sum(map(len, assigned.values()))
        if unused == len(names):
            raise ValueError(f"clusters: none of {len(names)} serves any of {tuple(assigned)}")
        if unused:
            log.warning("%d clusters serve none of the tasks %s: left out", unused, tuple(assigned))
        for task, ids in assigned.items():
            if not ids:
                log.warning("task %s has no cluster and is never used", task)
        return assigned

    def _batch_weights(self, batch: int) -> Mapping[str, float]:
        """Return the tasks' weights in the next batch: their random counts with `random_tasks`."""
        if not self._random_tasks:
            return self._weights
        shares = np.array([*self._weights.values()]) / sum(self._weights.values())
        counts = self._rng("tasks", self._batches).multinomial(batch, shares)
        return dict(zip(self._weights, counts.tolist(), strict=True))

    def _deal(self, task: str, count: int) -> list[str]:
        size, dealt = len(self._assigned[task]), []
        while len(dealt) < count:
            num_ids = min(count - len(dealt), size)
            # What is left of a deck is discarded (spec 1), so no cluster repeats within a batch.
            if size - self._positions[task] < num_ids:
                self._epochs[task] += 1
                self._positions[task] = 0
                self._decks[task] = self._deck(task)
            start = self._positions[task]
            self._positions[task] += num_ids
            dealt += self._decks[task][start : start + num_ids]
        return dealt

    def _deck(self, task: str) -> list[str]:
        ids = self._assigned[task]
        return [ids[i] for i in self._order(f"task {task}", self._epochs[task], len(ids))]

    def _order(self, purpose: str, number: int, count: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(count)
        return self._rng(purpose, number).permutation(count)

    def _rng(self, purpose: str, number: int) -> np.random.Generator:
        # crc32, because Python's own hash of a text differs in every process.
        return np.random.default_rng([self._seed, zlib.crc32(purpose.encode()), number])

    def _digest(self) -> str:
        dealt_from = json.dumps([self._seed, self._assigned], sort_keys=True)
        return hashlib.sha256(dealt_from.encode()).hexdigest()
