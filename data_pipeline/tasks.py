"""Gives every task the same number of clusters.

1. A cluster may serve the tasks of its pool. `assign_tasks` finds the largest number that all tasks
   can have at once, over all ways to share the pools out.
2. How many clusters each pool gives to each task is a maximum flow from pools to tasks.
3. Which clusters these are is decided by a hash of seed and id, whatever their order.
4. All other clusters are left over: counted and removed.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import TaggedOutput
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from data_pipeline.records import Cluster, digest, make_removed
from spell_jax.data.clusters import TASKS

LEFT_OVER = "left over"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TasksConfig:
    """How clusters are shared out.

    Attributes:
      clusters_per_task: at most so many for each task; 0: as many as there are.
      seed: of the choice of clusters.
      tasks: that are wanted.
    """

    clusters_per_task: int = 0
    seed: int = 0
    tasks: tuple[str, ...] = TASKS

    def __post_init__(self) -> None:
        if self.clusters_per_task < 0:
            raise ValueError(
                f"tasks.clusters_per_task = {self.clusters_per_task}: must be at least 0"
            )
        known = set(self.tasks) <= set(TASKS)
        if not self.tasks or not known or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks.tasks = {self.tasks}: must be some of {TASKS}, each once")


def assign_tasks(
    clusters: Mapping[str, str], config: TasksConfig
) -> tuple[dict[str, str], dict[str, int]]:
    """Shares clusters out to tasks.

    Args:
      clusters: id -> pool, which is names of tasks joined by "+".

    Returns:
      id -> task, the same number for each task that has any cluster; and pool -> number of clusters
      that are left over.

    Raises:
      ValueError: there are no clusters for any task, or too few for each task to have one.
    """
    sizes = Counter(clusters.values())
    pools = sorted(sizes)
    tasks = [task for task in config.tasks if any(task in pool.split("+") for pool in pools)]
    for task in sorted(set(config.tasks) - set(tasks)):
        log.warning("no cluster can serve %s: it gets none", task)
    each = _most(sizes, tasks)
    if not each:
        raise ValueError(
            f"tasks: too few clusters to give one to each of {tasks or list(config.tasks)}; "
            f"there are {dict(sorted(sizes.items()))}"
        )
    if config.clusters_per_task:
        if each < config.clusters_per_task:
            log.warning(
                "%d clusters a task, not %d: there are no more", each, config.clusters_per_task
            )
        each = min(each, config.clusters_per_task)
    shares = _shares([sizes[pool] for pool in pools], pools, tasks, each)
    assignment: dict[str, str] = {}
    left_over: dict[str, int] = {}
    for pool, row in zip(pools, shares, strict=True):
        ids = sorted(
            (digest(str(config.seed), name), name)
            for name, its_pool in clusters.items()
            if its_pool == pool
        )
        chosen = np.repeat(tasks, row).tolist()  # the names, each as often as its share says
        assignment |= {name: task for (_, name), task in zip(ids, chosen, strict=False)}
        left_over[pool] = len(ids) - len(chosen)
    return assignment, left_over


def make_tasks(
    clusters: beam.PCollection, assignment: Mapping[str, str]
) -> dict[str, beam.PCollection]:
    """Clusters that are used, with their task.

    Events of "counts": ("clusters", task), ("documents", source) of these; ("clusters left over",
    pool), ("documents removed: left over", source).

    Args:
      clusters: Cluster.
      assignment: id -> task, of `assign_tasks`.

    Returns:
      PCollections by table: "tasks", which is Cluster with "task"; "removed", one for each document
      of the others; "counts".
    """
    named: Any = clusters | "name tasks" >> beam.FlatMap(_name, dict(assignment)).with_outputs(
        "removed", "counts", main="tasks"
    )
    return {name: named[name] for name in ("tasks", "removed", "counts")}


def _most(sizes: Mapping[str, int], tasks: Sequence[str]) -> int:
    """The largest number that all tasks can have at once.

    By Hall's theorem it is limited by some set of tasks: by the clusters that can serve any of the
    set, divided by the number of tasks in it.
    """
    limits = [
        sum(number for pool, number in sizes.items() if set(some) & set(pool.split("+")))
        // len(some)
        for count in range(1, len(tasks) + 1)
        for some in itertools.combinations(tasks, count)
    ]
    return min(limits, default=0)


def _shares(
    sizes: Sequence[int], pools: Sequence[str], tasks: Sequence[str], each: int
) -> np.ndarray:
    """[pools, tasks]: how many clusters a pool gives to a task; columns sum to `each`.

    A flow from node 0 through pools, then tasks, to the last node.
    """
    first_task = 1 + len(pools)
    sink = first_task + len(tasks)
    room = np.zeros((sink + 1, sink + 1), np.int32)
    room[0, 1:first_task] = sizes
    room[first_task:sink, sink] = each
    for row, pool in enumerate(pools):
        for column, task in enumerate(tasks):
            if task in pool.split("+"):
                room[1 + row, first_task + column] = each
    flow = maximum_flow(csr_array(room), 0, sink).flow.toarray()
    return flow[1:first_task, first_task:sink]


def _name(cluster: Cluster, assignment: Mapping[str, str]) -> Iterator[Any]:
    task = assignment.get(cluster["id"])
    if task:
        yield cluster | {"task": task}
        yield TaggedOutput("counts", ("clusters", task))
    else:
        yield TaggedOutput("counts", ("clusters left over", cluster["pool"]))
    for document in cluster["documents"]:
        if task:
            yield TaggedOutput("counts", ("documents", document["source"]))
            continue
        reason = ("documents removed: left over", document["source"])
        yield TaggedOutput("counts", reason)
        removed = make_removed(document, LEFT_OVER, cluster["pool"])
        yield TaggedOutput("removed", removed)
