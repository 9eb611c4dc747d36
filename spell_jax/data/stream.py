"""The endless stream of (task, cluster) pairs, one batch after the other (spec section 1).

1. Once, every cluster is assigned to exactly one task that it may serve: in shuffled order, those
   with the fewest choices first, each to the task that has the fewest so far. One source of
   clusters is thus split into equal parts.
2. A batch is shared out by weight: the floor of each task's share, clipped to the clusters it has,
   then the remainder one by one, heaviest task first.
3. Each task deals from its own shuffled deck. When fewer cards are left than needed, they are
   thrown away and a fresh shuffle is dealt from, so no cluster repeats within a batch, unless the
   batch has more items than there are
   clusters: then whole decks are dealt, and the repeats counted.
4. The batch is shuffled. All of this is a function of the seed, and the state says exactly where it
   stands.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.data.clusters import Cluster

log = logging.getLogger(__name__)


def batch_counts(
    batch: int, weights: Mapping[str, float], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Items per task in a batch: floors of the shares, then the remainder heaviest task first.

    Args:
        batch: items wanted, at most the sum of sizes.
        weights: task -> positive weight; they need not sum to 1. Ties go to the task listed first.
        sizes: task -> items at hand.

    Raises:
        ValueError: batch is below 0 or above the sum of sizes.
    """
    if not 0 <= batch <= sum(sizes.values()):
        raise ValueError(f"batch={batch}: must be between 0 and {sum(sizes.values())}")
    total = sum(weights.values())
    counts = {task: min(int(batch * weights[task] / total), sizes[task]) for task in weights}
    heaviest_first = sorted(weights, key=lambda task: -weights[task])
    remainder = batch - sum(counts.values())
    while remainder:
        for task in heaviest_first:
            if remainder and counts[task] < sizes[task]:
                counts[task] += 1
                remainder -= 1
    return counts


class TaskStream:
    """Deals batches of (task, cluster) for ever.

    Attributes:
        repeats: how often a cluster was dealt again within a batch, because the batch was larger
            than the data.
    """

    def __init__(
        self,
        clusters: Sequence[Cluster],
        tasks: Sequence[str],
        weights: Sequence[float],
        seed: int,
    ):
        """Assigns the clusters to the tasks.

        Args:
            clusters: with unique ids. Those that may serve none of the tasks are left out, with a
                warning.
            tasks: the tasks of the run.
            weights: one positive number a task.
            seed: of the assignment and of all shuffles.

        Raises:
            ValueError: no task, a task named twice, weights that do not match or are not positive,
                an id used twice, or no cluster for any task.
        """
        if not tasks or len(set(tasks)) != len(tasks):
            raise ValueError(f"tasks={tuple(tasks)}: must be one or more different tasks")
        if len(weights) != len(tasks) or not all(math.isfinite(w) and w > 0 for w in weights):
            raise ValueError(
                f"weights={tuple(weights)}: must be a positive number for each of {tuple(tasks)}; "
                "leave a task out instead of weighing it 0"
            )
        self.repeats = 0
        self._clusters = {cluster.id: cluster for cluster in clusters}
        if len(self._clusters) != len(clusters):
            raise ValueError("clusters: ids must be unique")
        self._weights = dict(zip(tasks, weights, strict=True))
        self._random = np.random.default_rng(seed)
        self._assigned = self._assign(clusters)
        self._decks: dict[str, list[str]] = {task: [] for task in tasks}

    def next(self, batch: int) -> list[tuple[str, Cluster]]:
        """The next `batch` (task, cluster) pairs, in shuffled order.

        Raises:
            ValueError: batch is below 1.
        """
        if batch < 1:
            raise ValueError(f"batch={batch}: must be at least 1")
        sizes = {task: len(ids) for task, ids in self._assigned.items()}
        copies = -(-batch // sum(sizes.values()))  # above 1 only if the batch exceeds the data
        room = {task: size * copies for task, size in sizes.items()}
        counts = batch_counts(batch, self._weights, room)
        pairs = [(task, name) for task, count in counts.items() for name in self._deal(task, count)]
        self.repeats += sum(max(0, counts[task] - sizes[task]) for task in counts)
        order = self._random.permutation(len(pairs))
        return [(pairs[i][0], self._clusters[pairs[i][1]]) for i in order]

    def cluster(self, name: str) -> Cluster:
        """The cluster with this id; KeyError if the stream has none."""
        return self._clusters[name]

    def state_dict(self) -> dict[str, Any]:
        """Assignment, decks, random state and count of repeats, as plain JSON values."""
        return {
            "assigned": {task: list(ids) for task, ids in self._assigned.items()},
            "decks": {task: list(ids) for task, ids in self._decks.items()},
            "random": self._random.bit_generator.state,
            "repeats": self.repeats,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly where the stream that gave the state stood, with its assignment.

        Raises:
            ValueError: the state is of other tasks, or names clusters that this stream does not
                have.
        """
        for field in ("assigned", "decks"):
            if set(state[field]) != set(self._weights):
                raise ValueError(
                    f"stream state: {field} is of tasks {sorted(state[field])}, the run plays "
                    f"{sorted(self._weights)}"
                )
            for task, ids in state[field].items():
                unknown = [name for name in ids if name not in self._clusters]
                if unknown:
                    raise ValueError(
                        f"stream state: {field} of {task} names {len(unknown)} unknown clusters, "
                        f"first {unknown[0]!r}; resume with the data that the run began with"
                    )
        self._assigned = {task: list(state["assigned"][task]) for task in self._weights}
        self._decks = {task: list(state["decks"][task]) for task in self._weights}
        self._random.bit_generator.state = state["random"]
        self.repeats = int(state["repeats"])

    def _assign(self, clusters: Sequence[Cluster]) -> dict[str, list[str]]:
        assigned: dict[str, list[str]] = {task: [] for task in self._weights}
        choices = []
        for index in self._random.permutation(len(clusters)):
            allowed = clusters[index].tasks
            choices.append(
                (clusters[index].id, [t for t in assigned if allowed is None or t in allowed])
            )
        for name, options in sorted(choices, key=lambda choice: len(choice[1])):
            if options:
                assigned[min(options, key=lambda task: len(assigned[task]))].append(name)
        unused = len(clusters) - sum(map(len, assigned.values()))
        if unused:
            log.warning("%d clusters serve none of the tasks %s: left out", unused, tuple(assigned))
        if unused == len(clusters):
            raise ValueError(f"clusters: none of {len(clusters)} serves any of {tuple(assigned)}")
        for task, ids in assigned.items():
            if not ids:
                log.warning("task %s has no cluster and is never played", task)
        return assigned

    def _deal(self, task: str, count: int) -> list[str]:
        ids, dealt = self._assigned[task], []
        while len(dealt) < count:
            wanted = min(count - len(dealt), len(ids))
            if len(self._decks[task]) < wanted:
                self._decks[task] = [ids[i] for i in self._random.permutation(len(ids))]
            dealt += self._decks[task][:wanted]
            self._decks[task] = self._decks[task][wanted:]
        return dealt
