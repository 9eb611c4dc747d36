"""Assigns the same number of clusters to every task.

That number is the largest that every task can get at once, over all ways to divide the pools. A
maximum flow from pools to tasks divides them, and a hash of seed and id selects the clusters, so
their order does not matter. All other clusters are counted and removed.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from data_pipeline.records import ClusterRecord, digest, event, remove
from spell_jax.data.clusters import TASKS
from spell_jax.runtime.config import check_least

# Every cluster is assigned or left over, and every document of a left-over cluster is listed.
BALANCES = (
    "in:clusters = out:tasks + clusters left over",
    "clusters = out:tasks",
    "documents removed: * = out:removed",
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TasksConfig:
    """Settings of the tasks stage.

    Attributes:
      clusters_per_task: Largest number of clusters for each task; 0 for as many as possible.
      seed: Seed of the selection of clusters.
      tasks: Tasks to assign, some of TASKS; () for the tasks that the sources may serve.
    """

    clusters_per_task: int = 0
    seed: int = 0
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_least(self, "tasks.", clusters_per_task=0)
        are_known = set(self.tasks) <= set(TASKS)
        if not are_known or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks.tasks = {self.tasks}: must be some of {TASKS}, each once")


def assign_tasks(clusters: Mapping[str, str], config: TasksConfig) -> dict[str, str]:
    """Assign clusters (id -> pool, task names joined by "+") to tasks; return id -> task.

    Each task that any pool can serve gets the same number. Raises ValueError if no cluster serves
    any task, or if there are too few to give each task one.
    """
    sizes = Counter(clusters.values())
    pools = sorted(sizes)
    tasks = [task for task in config.tasks if any(task in pool.split("+") for pool in pools)]
    for task in sorted(set(config.tasks) - set(tasks)):
        log.warning("no cluster can serve %s: it gets none", task)
    pool_sizes = [sizes[pool] for pool in pools]
    limit = sum(pool_sizes) // max(1, len(tasks))
    # The flow fills every task up to some number of clusters, and not beyond it.
    each = bisect.bisect_left(
        range(1, limit + 1),
        True,
        key=lambda number: _shares(pool_sizes, pools, tasks, number).sum() < number * len(tasks),
    )
    if not each or not tasks:
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
    shares = _shares(pool_sizes, pools, tasks, each)
    assignment: dict[str, str] = {}
    for pool, row in zip(pools, shares, strict=True):
        ids = [name for name, its_pool in clusters.items() if its_pool == pool]
        # A hash instead of a shuffle: which clusters come first does not depend on their order or
        # number.
        ids.sort(key=lambda name: (digest(str(config.seed), name), name))
        repeated = np.repeat(tasks, row).tolist()  # each task as often as the pool gives to it
        assignment |= zip(ids, repeated, strict=False)
    return assignment


def make_tasks(
    clusters: beam.PCollection, assignment: Mapping[str, str]
) -> dict[str, beam.PCollection]:
    """Add the task to assigned clusters, and remove the documents of left-over clusters.

    Events: ("clusters", task) and ("documents", source) of assigned clusters; ("clusters left
    over", pool) and ("documents removed: left over", source) of left-over clusters.
    """
    assigned: Any = clusters | "add tasks" >> beam.FlatMap(
        _add_task, dict(assignment)
    ).with_outputs("removed", "counts", main="tasks")
    return {name: assigned[name] for name in ("tasks", "removed", "counts")}


def _shares(
    sizes: Sequence[int], pools: Sequence[str], tasks: Sequence[str], each: int
) -> np.ndarray:
    """Solve a maximum flow: clusters from pool to task, at most `each` a task; [pools, tasks]."""
    first_task = 1 + len(pools)
    sink = first_task + len(tasks)
    room = np.zeros((sink + 1, sink + 1), np.int32)
    room[0, 1:first_task] = sizes
    room[first_task:sink, sink] = each
    for row, pool in enumerate(pools):
        for column, task in enumerate(tasks):
            if task in pool.split("+"):
                # `each` as the capacity of an edge is no limit: the edge from the task to the sink
                # has the same capacity.
                room[1 + row, first_task + column] = each
    flow = maximum_flow(csr_array(room), 0, sink).flow.toarray()
    return flow[1:first_task, first_task:sink]


def _add_task(cluster: ClusterRecord, assignment: Mapping[str, str]) -> Iterator[Any]:
    task = assignment.get(cluster["id"])
    if task:
        yield cluster | {"task": task}
        yield event("clusters", task)
        for document in cluster["documents"]:
            yield event("documents", document["source"])
    else:
        yield event("clusters left over", cluster["pool"])
        for document in cluster["documents"]:
            yield from remove(document, "left over", cluster["pool"])
