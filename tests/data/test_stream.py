"""Tests of the task stream: counts per task, decks, repeats, exact resumption."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from spell_jax.data.clusters import PAPER_TASKS, Cluster, ClusterSource, in_memory
from spell_jax.data.stream import TaskStream, batch_counts
from tests.paths import REFERENCE_CASES

CASES = REFERENCE_CASES / "domain_sampler_counts.json"


def make_clusters(count: int, tasks: tuple[str, ...] | None = None) -> list[Cluster]:
    name = "-".join(tasks) if tasks else "any"
    return [Cluster(f"{name}{i}", (f"document {i}",), tasks) for i in range(count)]


def make_stream(count: int, seed: int = 0) -> TaskStream:
    return TaskStream(in_memory(make_clusters(count)), PAPER_TASKS, [1, 1, 1], seed)


@pytest.mark.parametrize(
    "case",
    json.loads(CASES.read_text(encoding="utf-8"))["cases"],
    ids=lambda case: str(case["in"]["weights"]),
)
def test_batch_counts_match_the_reference(case: dict) -> None:
    tasks, weights = case["in"]["tasks"], case["in"]["weights"]
    sizes = dict(zip(tasks, case["in"]["sizes"], strict=True))
    counts = batch_counts(case["in"]["batch"], dict(zip(tasks, weights, strict=True)), sizes)
    assert counts == case["out"]["counts"]
    names = dict(zip(tasks, PAPER_TASKS, strict=True))
    clusters = [c for task in tasks for c in make_clusters(sizes[task], (names[task],))]
    stream = TaskStream(in_memory(clusters), PAPER_TASKS, weights, seed=1)
    for batch in case["out"]["first_batches"]:
        dealt = Counter(task for task, _ in stream.next(case["in"]["batch"]))
        assert dealt == {names[task]: count for task, count in batch.items()}


def test_clusters_keep_one_task_and_tasks_have_equal_shares() -> None:
    stream = make_stream(31)
    tasks_of: dict[str, set[str]] = {}
    for _ in range(60):
        for task, cluster in stream.next(9):
            tasks_of.setdefault(cluster.id, set()).add(task)
    assert len(tasks_of) == 31
    assert all(len(tasks) == 1 for tasks in tasks_of.values())
    sizes = Counter(next(iter(tasks)) for tasks in tasks_of.values())
    assert sorted(sizes.values()) == [10, 10, 11]


def random_stream(count: int, weights: Sequence[float] = (1, 1, 1)) -> TaskStream:
    source = in_memory(make_clusters(count))
    return TaskStream(source, PAPER_TASKS, weights, seed=0, random_tasks=True)


def test_random_tasks_are_sampled_by_weight_and_resume() -> None:
    stream = random_stream(90, (1, 1, 2))
    counts = [Counter(task for task, _ in stream.next(8)) for _ in range(500)]
    assert {sum(count.values()) for count in counts} == {8}
    totals = [sum(count[task] for count in counts) / 4000 for task in PAPER_TASKS]
    assert totals == pytest.approx([0.25, 0.25, 0.5], abs=0.03)
    # Binomial: of 8 clusters, 2 are of the first task in 31 % of the batches.
    assert sum(count[PAPER_TASKS[0]] == 2 for count in counts) / 500 == pytest.approx(
        0.31, abs=0.07
    )
    resumed = random_stream(90, (1, 1, 2))
    resumed.load_state_dict(stream.state_dict())
    assert [resumed.next(8) for _ in range(5)] == [stream.next(8) for _ in range(5)]


def test_random_tasks_repeat_no_cluster_of_small_data() -> None:
    stream = random_stream(9)
    for _ in range(50):
        ids = [cluster.id for _, cluster in stream.next(8)]
        assert len(set(ids)) == 8
    assert stream.repeats == 0


def test_clusters_serve_only_their_tasks(caplog: pytest.LogCaptureFixture) -> None:
    clusters = make_clusters(6, ("financial_math",)) + make_clusters(6)
    clusters += make_clusters(2, ("multiple_choice",))
    stream = TaskStream(in_memory(clusters), ("financial_math", "general_qa"), [1, 1], seed=3)
    assert "2 clusters serve none of the tasks" in caplog.text
    dealt = {(task, cluster.id) for task, cluster in stream.next(12)}
    assert {name for task, name in dealt if task == "general_qa"} == {f"any{i}" for i in range(6)}


def test_batches_of_a_deck_do_not_repeat_clusters() -> None:
    stream = TaskStream(in_memory(make_clusters(10)), ["general_qa"], [1], seed=0)
    batches = [[cluster.id for _, cluster in stream.next(4)] for _ in range(6)]
    assert all(len(set(batch)) == 4 for batch in batches)
    # A deck gives two batches; its two leftover clusters are discarded.
    assert all(not set(batches[i]) & set(batches[i + 1]) for i in (0, 2, 4))
    assert stream.repeats == 0


def test_repeats_are_counted_if_a_batch_exceeds_the_data() -> None:
    stream = make_stream(6)
    batch = stream.next(15)
    assert len(batch) == 15
    assert Counter(task for task, _ in batch) == dict.fromkeys(PAPER_TASKS, 5)
    assert max(Counter(cluster.id for _, cluster in batch).values()) <= 3
    assert stream.repeats == 9
    stream.next(15)
    assert stream.repeats == 18


def test_a_task_without_clusters_is_never_used(caplog: pytest.LogCaptureFixture) -> None:
    stream = make_stream(2)
    assert "has no cluster" in caplog.text
    assert len(stream.next(2)) == 2


def test_batch_order_is_shuffled_and_seeded() -> None:
    stream = make_stream(60)
    first = stream.next(30)
    assert first == make_stream(60).next(30)
    assert first != make_stream(60, seed=1).next(30)
    tasks = [task for task, _ in first]
    assert tasks != sorted(tasks, key=PAPER_TASKS.index)
    assert tasks != [task for task, _ in stream.next(30)]  # every batch has its own order


def test_unshuffled_stream_deals_in_the_order_of_the_source() -> None:
    clusters = make_clusters(12)
    stream = TaskStream(in_memory(clusters), ["general_qa"], [1], seed=0, shuffle=False)
    dealt = [cluster for _ in range(3) for _, cluster in stream.next(5)]
    # The third batch does not fit into the first epoch: its last two clusters are discarded.
    assert dealt == [*clusters[:10], *clusters[:5]]


def test_resumed_stream_continues_identically() -> None:
    stream = make_stream(31)
    for _ in range(5):
        stream.next(40)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = make_stream(31)
    resumed.next(7)  # loading a state discards this position
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert resumed.repeats == stream.repeats > 0
    for _ in range(7):
        assert resumed.next(7) == stream.next(7)
    assert resumed.state_dict() == stream.state_dict() != state


def test_stream_resumes_at_any_position_of_a_deck() -> None:
    """Resumes after every batch, both within decks and at their ends."""
    stream = TaskStream(in_memory(make_clusters(10)), ["general_qa"], [1], seed=2)
    batches, states = [], [stream.state_dict()]
    for _ in range(7):
        batches.append(stream.next(3))
        states.append(stream.state_dict())
    for start, state in enumerate(states):
        resumed = TaskStream(in_memory(make_clusters(10)), ["general_qa"], [1], seed=2)
        resumed.load_state_dict(state)
        assert [resumed.next(3) for _ in batches[start:]] == batches[start:]


def test_order_is_a_function_of_seed_and_ids() -> None:
    """The source's order of clusters has no effect, and every epoch has another order."""
    clusters = make_clusters(20)
    task_stream = TaskStream(in_memory(clusters), PAPER_TASKS[:1], [1], seed=5)
    reversed_stream = TaskStream(in_memory(clusters[::-1]), PAPER_TASKS[:1], [1], seed=5)
    epochs = [task_stream.next(20) for _ in range(4)]
    assert epochs == [reversed_stream.next(20) for _ in range(4)]
    orders = [[cluster.id for _, cluster in epoch] for epoch in epochs]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    # The deck differs too, not only the order in a batch: halves of an epoch are other sets.
    halves = TaskStream(in_memory(clusters), PAPER_TASKS[:1], [1], seed=5)
    sets = [frozenset(c.id for _, c in halves.next(10)) for _ in range(8)]
    assert len(set(sets)) == 8


def test_tasks_are_shuffled_independently() -> None:
    """With one order for all tasks, every epoch would pair the same two clusters."""
    clusters = make_clusters(12, PAPER_TASKS[:1]) + make_clusters(12, PAPER_TASKS[1:2])
    stream = TaskStream(in_memory(clusters), PAPER_TASKS[:2], [1, 1], seed=0)
    epochs = [{frozenset(c.id for _, c in stream.next(2)) for _ in range(12)} for _ in range(2)]
    assert frozenset.union(*epochs[0]) == frozenset.union(*epochs[1])
    assert len(epochs[0] & epochs[1]) < 6


def test_state_size_does_not_depend_on_the_data() -> None:
    sizes = []
    for count in (9, 9000):
        stream = TaskStream(
            ClusterSource({str(i): None for i in range(count)}, _unread), PAPER_TASKS, [1] * 3, 0
        )
        sizes.append(len(json.dumps(stream.state_dict())))
    assert abs(sizes[1] - sizes[0]) < 10 and sizes[1] < 400


def _unread(ids: Sequence[str]) -> list[Cluster]:
    return [Cluster(name, ("text",)) for name in ids]


def test_only_the_clusters_of_a_batch_are_read() -> None:
    read_ids: list[list[str]] = []

    def read(ids: Sequence[str]) -> list[Cluster]:
        read_ids.append(list(ids))
        return _unread(ids)

    stream = TaskStream(
        ClusterSource({str(i): None for i in range(90)}, read), PAPER_TASKS, [1] * 3, 0
    )
    assert read_ids == []
    batches = [[cluster.id for _, cluster in stream.next(6)] for _ in range(2)]
    assert read_ids == batches


def test_state_of_other_data_or_seed_is_rejected() -> None:
    state = make_stream(9).state_dict()
    with pytest.raises(ValueError, match="for 9 other clusters than these 8"):
        make_stream(8).load_state_dict(state)
    renamed = [replace(c, id=f"{c.id}b") if c.id == "any8" else c for c in make_clusters(9)]
    with pytest.raises(ValueError, match="resume with the data"):
        TaskStream(in_memory(renamed), PAPER_TASKS, [1, 1, 1], 0).load_state_dict(state)
    for count in (1, 9):
        with pytest.raises(ValueError, match="for another seed"):
            make_stream(count, seed=1).load_state_dict(make_stream(count).state_dict())
    with pytest.raises(ValueError, match="but the run has"):
        TaskStream(in_memory(make_clusters(9)), PAPER_TASKS[:2], [1, 1], 0).load_state_dict(state)


def test_state_of_another_version_is_rejected() -> None:
    old = {"assigned": {}, "decks": {}, "random": {}, "repeats": 0}
    with pytest.raises(ValueError, match=r"\['batches', .*another version"):
        make_stream(9).load_state_dict(old)


@pytest.mark.parametrize(
    ("clusters", "tasks", "weights", "message"),
    [
        (make_clusters(3), (), (), "tasks = "),
        (make_clusters(3), PAPER_TASKS[:1] * 2, (1, 1), "tasks = "),
        (make_clusters(3), PAPER_TASKS, (1, 1), "weights = "),
        (make_clusters(3), PAPER_TASKS, (1, 0, 1), "weights = "),
        (make_clusters(3), PAPER_TASKS, (1, float("nan"), 1), "weights = "),
        ([], PAPER_TASKS, (1, 1, 1), "none of 0"),
        (make_clusters(3, PAPER_TASKS[:1]), PAPER_TASKS[1:], (1, 1), "none of 3"),
    ],
)
def test_error_names_invalid_setting(
    clusters: list, tasks: tuple, weights: tuple, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TaskStream(in_memory(clusters), tasks, weights, seed=0)


def test_remainder_goes_to_the_heaviest_task_first() -> None:
    sizes: dict[str, int] = dict.fromkeys(PAPER_TASKS, 50)
    counts = batch_counts(7, dict(zip(PAPER_TASKS, (2, 3, 5), strict=True)), sizes)
    assert list(counts.values()) == [1, 2, 4]
    counts = batch_counts(8, dict(zip(PAPER_TASKS, (1, 1, 1), strict=True)), sizes)
    assert list(counts.values()) == [3, 3, 2]


def test_invalid_batch_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="batch = 0"):
        make_stream(3).next(0)
    with pytest.raises(ValueError, match="batch = 4: must be between 0 and 3"):
        batch_counts(4, {"general_qa": 1.0}, {"general_qa": 3})
