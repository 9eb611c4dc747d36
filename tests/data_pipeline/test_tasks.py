"""Tests of task assignment: equal numbers per task, as large as possible, for any order."""

from __future__ import annotations

import itertools
from collections import Counter

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.records import ClusterRecord, make_document
from data_pipeline.tasks import TasksConfig, assign_tasks, make_tasks
from spell_jax.data.clusters import PAPER_TASKS

QA, MATH, CHOICE = PAPER_TASKS
ALL = "+".join(sorted(PAPER_TASKS))


def clusters_of(sizes):
    names = [(f"{pool}-{i}", pool) for pool, number in sizes.items() for i in range(number)]
    return dict(names)


def used_of(assignment):
    """Return pool -> number of the pool's clusters that have a task."""
    return Counter(name.rpartition("-")[0] for name in assignment)


def best_count(sizes, tasks):
    """Find the best count by trying all ways to give each cluster to one of its tasks."""
    choices = [
        [None, *(task for task in pool.split("+") if task in tasks)]
        for pool, number in sizes.items()
        for _ in range(number)
    ]
    best = 0
    for given_to in itertools.product(*choices):
        numbers = Counter(given_to)
        best = max(best, min(numbers[task] for task in tasks))
    return best


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clusters_per_task": -1}, "tasks.clusters_per_task = -1: must be at least 0"),
        ({"tasks": ("poems",)}, r"tasks.tasks = \('poems',\): must be some of"),
        ({"tasks": (QA, QA)}, "each once"),
    ],
)
def test_error_names_invalid_setting(change, message):
    with pytest.raises(ValueError, match=message):
        TasksConfig(**change)


POOLS = [QA, MATH, CHOICE, f"{MATH}+{QA}", f"{CHOICE}+{QA}", ALL]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.sampled_from(POOLS), max_size=6))
def test_assignment_matches_brute_force_optimum(pools):
    sizes = Counter(pools)
    possible = [task for task in PAPER_TASKS if any(task in pool.split("+") for pool in sizes)]
    best = best_count(sizes, possible) if possible else 0
    clusters = clusters_of(sizes)
    if not best:
        with pytest.raises(ValueError, match="too few clusters"):
            assign_tasks(clusters, TasksConfig(tasks=PAPER_TASKS))
        return
    assignment = assign_tasks(clusters, TasksConfig(tasks=PAPER_TASKS))
    assert Counter(assignment.values()) == dict.fromkeys(possible, best)
    assert all(task in clusters[name].split("+") for name, task in assignment.items())


def test_shared_pool_fills_up_scarce_tasks():
    sizes = {QA: 50, MATH: 4, ALL: 20}
    assignment = assign_tasks(clusters_of(sizes), TasksConfig(tasks=PAPER_TASKS))
    assert Counter(assignment.values()) == {QA: 12, MATH: 12, CHOICE: 12}
    assert used_of(assignment) == {QA: 12, MATH: 4, ALL: 20}


def test_assignment_depends_only_on_seed_and_ids():
    clusters = clusters_of({QA: 60, MATH: 20, ALL: 30})
    first = assign_tasks(clusters, TasksConfig(tasks=PAPER_TASKS, seed=1))
    backwards = assign_tasks(
        dict(reversed(clusters.items())), TasksConfig(tasks=PAPER_TASKS, seed=1)
    )
    other_assignment = assign_tasks(clusters, TasksConfig(tasks=PAPER_TASKS, seed=2))
    assert first == backwards and first != other_assignment
    used_numbers = sorted(int(name.rpartition("-")[2]) for name in first if name.startswith(QA))
    assert used_numbers != list(range(len(used_numbers)))  # not simply the first clusters


def test_clusters_per_task_is_an_upper_limit(caplog):
    clusters = clusters_of({QA: 9, MATH: 5, CHOICE: 7})
    for limit, number in ((3, 3), (8, 5)):
        assignment = assign_tasks(clusters, TasksConfig(tasks=PAPER_TASKS, clusters_per_task=limit))
        assert Counter(assignment.values()) == dict.fromkeys(PAPER_TASKS, number)
        assert ("5 clusters a task, not 8" in caplog.text) == (limit == 8)


def test_task_without_clusters_is_left_out(caplog):
    assignment = assign_tasks(clusters_of({QA: 3, MATH: 2}), TasksConfig(tasks=PAPER_TASKS))
    assert Counter(assignment.values()) == {QA: 2, MATH: 2}
    assert f"no cluster can serve {CHOICE}" in caplog.text
    assignment = assign_tasks(clusters_of({QA: 3, MATH: 2}), TasksConfig(tasks=(QA,)))
    assert used_of(assignment) == {QA: 3}


def test_task_names_match_only_whole_parts_of_a_pool():
    """Pools are split at "+"; a task's name inside another name does not count."""
    assignment = assign_tasks({"a": QA, "b": f"{MATH}_2"}, TasksConfig(tasks=PAPER_TASKS))
    assert assignment == {"a": QA}


def test_empty_input_raises():
    with pytest.raises(ValueError, match="tasks: too few clusters to give one to each of"):
        assign_tasks({}, TasksConfig(tasks=PAPER_TASKS))


@pytest.mark.slow
def test_used_clusters_get_a_task_and_the_others_are_counted():
    def make(name, pool, texts):
        documents = [make_document(text, f"of {pool}", text) for text in texts]
        return ClusterRecord(id=name, pool=pool, documents=documents, tokens=9, vector=b"1234")

    clusters = [make("a", QA, ["one", "two"]), make("b", MATH, ["three", "four"])]

    def check_tasks(task_clusters):
        assert task_clusters == [clusters[0] | {"task": QA}]

    def check_removed(removals):
        assert sorted((r["reason"], r["source"], r["place"], r["because"]) for r in removals) == [
            ("left over", f"of {MATH}", "four", MATH),
            ("left over", f"of {MATH}", "three", MATH),
        ]

    def check_counts(events):
        assert Counter(events) == {
            ("clusters", QA): 1,
            ("documents", f"of {QA}"): 2,
            ("clusters left over", MATH): 1,
            ("documents removed: left over", f"of {MATH}"): 2,
        }

    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        tables = make_tasks(pipeline | beam.Create(clusters), {"a": QA})
        assert_that(tables["tasks"], check_tasks, label="tasks")
        assert_that(tables["removed"], check_removed, label="removed")
        assert_that(tables["counts"], check_counts, label="counts")
