import json
import math
import os

import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.runtime.files import paths
from spell_jax.runtime.files.jsonl import read_json
from spell_jax.runtime.finite import finite_or_none
from spell_jax.runtime.log import metrics as runtime_metrics
from spell_jax.runtime.log.metrics import (
    Metrics,
    MetricsWriter,
    read_metrics,
)


def test_means_are_weighted():
    metrics = Metrics()
    metrics.add("rollout/reward", 1.0, weight=1)
    metrics.add("rollout/reward", 0.0, weight=3)
    metrics.add_sum("train/loss", 6.0, 4)
    metrics.add("eval/none", float("nan"), weight=0)
    metrics.add("eval/some", float("nan"), weight=0)
    metrics.add("eval/some", 2.0)
    assert metrics.means() == {"rollout/reward": 0.25, "train/loss": 1.5, "eval/some": 2.0}


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)), max_size=12), st.integers(0, 12)
)
def test_merging_parts_equals_one_pass(pairs, cut):
    total_metrics, first, second = Metrics(), Metrics(), Metrics()
    for index, (value, weight) in enumerate(pairs):
        total_metrics.add("x", value, weight)
        (first if index < cut else second).add("x", value, weight)
    first.merge(json.loads(json.dumps(second._pairs)))
    assert first.means() == total_metrics.means()


def test_merge_adds_a_prefix_to_device_metrics():
    metrics = Metrics()
    metrics.merge({"loss": (np.float32(3), np.int32(2))}, prefix="train/")
    metrics.merge(metrics)
    assert metrics._pairs == {"train/loss": (6.0, 4.0)}


@pytest.mark.parametrize("weight", [-1, math.inf, math.nan])
def test_invalid_weights_are_rejected(weight):
    with pytest.raises(ValueError, match="metric 'x': weight ="):
        Metrics().add("x", 1.0, weight)


def run(workdir, steps, resume_step=None):
    writer = MetricsWriter(workdir, resume_step)
    for step in steps:
        writer.write(step, {"train/loss": 1 / (step + 3), "eval/accuracy": np.float32(0.1) * step})
    writer.close()


def test_resumed_metrics_file_equals_an_uninterrupted_one(tmp_path):
    run(tmp_path / "whole", range(1, 7))
    run(tmp_path / "stopped", range(1, 5))
    path = tmp_path / "stopped" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "train/lo')  # killed in the middle of a line
    run(tmp_path / "stopped", range(4, 7), resume_step=3)
    assert path.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert [record["step"] for record in read_metrics(tmp_path / "stopped")] == list(range(1, 7))


def lines_of(steps):
    return [json.dumps({"step": step, "from": "tail"}) for step in steps]


@pytest.mark.parametrize(
    "there, tail, expected_steps",
    [
        ([], [3, 4, 5], [3, 4, 5]),  # the file is lost; a checkpoint keeps the last lines only
        ([1, 2, 3], [2, 3, 4, 5], [1, 2, 3, 4, 5]),  # the file is older than the checkpoint
        ([1, 3, 5], [2, 4, 5], [1, 2, 3, 4, 5]),
        ([1, 2, 6, 7], [4, 6], [1, 2, 4]),  # steps after the checkpoint are repeated
        ([4, 5, 6], [], [4, 5]),
    ],
)
def test_tail_from_a_checkpoint_fills_missing_lines(tmp_path, there, tail, expected_steps):
    if there:
        run(tmp_path, there)
    writer = MetricsWriter(tmp_path, resume_step=5, tail=lines_of(tail))
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == expected_steps
    assert all(("train/loss" in record) == (record["step"] not in tail) for record in records)
    assert [json.loads(line) for line in writer.tail()] == records
    writer.write(6, {"a": 1.0})
    assert read_metrics(tmp_path) == [*records, {"step": 6, "a": 1.0}]
    writer.close()


def test_tail_equals_the_last_lines_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime_metrics, "TAIL", 3)
    run(tmp_path, range(1, 6))
    writer = MetricsWriter(tmp_path, resume_step=4)
    writer.write(8, {"a": math.nan})
    assert writer.tail() == (tmp_path / "metrics.jsonl").read_text().splitlines()[-3:]
    assert [json.loads(line)["step"] for line in writer.tail()] == [3, 4, 8]
    writer.close()


def test_invalid_tail_line_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="tail of the checkpoint:2: not JSON"):
        MetricsWriter(tmp_path, resume_step=5, tail=[*lines_of([4]), "{"])


def test_failed_write_keeps_the_metrics_file(tmp_path, monkeypatch):
    """A write is atomic: all lines go to a file with another name first."""
    run(tmp_path, range(1, 3))
    writer = MetricsWriter(tmp_path, resume_step=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def full(file, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="no space"):
        writer.write(3, {"a": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    writer.close()


def test_metrics_file_is_replaced_without_a_resume_step(tmp_path):
    run(tmp_path, range(1, 5))
    run(tmp_path, range(1, 2))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


def test_non_finite_numbers_are_null_and_counted(tmp_path, caplog):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"a": math.nan, "b": 2.0, "c": -math.inf})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 1, "a": None, "b": 2.0, "c": None, "non_finite": 2}]
    assert "step 1: not finite: a, c" in caplog.text


def test_steps_must_increase(tmp_path):
    run(tmp_path, range(1, 4))
    writer = MetricsWriter(tmp_path, resume_step=2)
    with pytest.raises(ValueError, match="step = 2: must be above 2"):
        writer.write(2, {})
    writer.write(3, Metrics())
    with pytest.raises(ValueError, match="step = 3: must be above 3"):
        writer.write(3, {})
    writer.close()


@pytest.mark.parametrize("name", ["step", "non_finite"])
def test_reserved_metric_names_are_rejected(tmp_path, name):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match=f"metric name '{name}': reserved"):
        writer.write(1, {name: 5.0})
    writer.close()


def test_tensorboard_gets_all_metrics(tmp_path):
    run(tmp_path, range(1, 4))
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert content.count(b"train/loss") == 3 and content.count(b"eval/accuracy") == 3


def test_other_processes_write_no_metrics(tmp_path):
    metrics = MetricsWriter(tmp_path / "run", is_writer=False)
    metrics.write(1, {"a": 1.0})
    metrics.close()
    assert metrics.tail() == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "line",
    [
        *(b"not json", b"[1]", b'{"loss": 1}', b'{"step": 1.5}', b'{"step": true}', bytes(20)),
        *(b"\xff", b'{"step": 0}', b'{"step": -2}', b'{"step": 9223372036854775808}'),
    ],
)
def test_damaged_metrics_line_is_named_counted_and_skipped(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 3}]
    skipped, count = (record.getMessage() for record in caplog.records)
    assert skipped.startswith(f"{path}:2: skipped (") and count == f"{path}: 1 of 3 lines skipped"


def test_every_flipped_bit_is_restored_from_the_checkpoint(tmp_path, caplog):
    """A flipped bit may also make another number, or another step; the tail has all lines."""
    run(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    intact_bytes = path.read_bytes()
    tail = intact_bytes.decode().splitlines()
    for place in range(0, 8 * len(intact_bytes) - 8, 53):  # without the last line feed
        damaged = bytearray(intact_bytes)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        caplog.clear()
        MetricsWriter(tmp_path, resume_step=3, tail=tail).close()
        assert path.read_bytes() == intact_bytes, place
        assert "lines restored from the checkpoint" in caplog.text, place


@pytest.mark.parametrize(
    "damage",
    [bytes(40), b"\xff\xfe{", b'{"step": 2, "a": ', b""],
    ids=["NULs", "no UTF-8", "truncated", "missing"],
)
def test_damaged_lines_are_restored_or_named(tmp_path, caplog, damage):
    run(tmp_path, range(1, 6))
    path = tmp_path / "metrics.jsonl"
    intact_bytes = path.read_bytes()
    lines = intact_bytes.split(b"\n")
    for number in (2, 4):
        lines[number - 1] = damage
    path.write_bytes(b"\n".join(lines))
    MetricsWriter(tmp_path, resume_step=5, tail=intact_bytes.decode().splitlines()[2:]).close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3, 4, 5]  # the tail begins at 3
    assert path.read_bytes() == b"".join(
        intact_bytes.splitlines(True)[:1] + intact_bytes.splitlines(True)[2:]
    )
    assert not damage or f"{path}:2: skipped" in caplog.text
    assert f"{path}: 1 lines restored from the checkpoint" in caplog.text


def test_a_line_below_step_1_does_not_outlive_a_resume(tmp_path):
    run(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    valid_lines = path.read_text()
    path.write_text('{"step": 0, "a": 1}\n{"step": -3, "a": 1}\n' + valid_lines)
    MetricsWriter(tmp_path, resume_step=3).close()
    assert path.read_text() == valid_lines


def test_reading_missing_metrics_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics there"):
        read_metrics(tmp_path)


def test_value_without_json_form_raises_type_error():
    with pytest.raises(TypeError, match="set has no JSON form"):
        finite_or_none({"a": [{1}]})


def test_a_pipe_in_place_of_a_file_is_an_error_and_not_a_wait_without_end(tmp_path):
    for name in ("metrics.jsonl", "config.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=r"a pipe, a socket or a device.*metrics\.jsonl"):
        read_metrics(tmp_path)
    with pytest.raises(OSError, match=r"a pipe, a socket or a device.*config\.json"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("name", "make", "present"),
    [
        ("metrics.jsonl", os.mkfifo, "pipe, a socket or a device, must be a file"),
        ("lock.json", os.mkdir, "folder, must be a file"),
        ("evaluation.json", lambda path: os.symlink(path.name, path), "link to itself"),
        ("best", os.mkfifo, "pipe, a socket or a device, must be a folder"),
        ("episodes", lambda path: path.write_text(""), "file, must be a folder"),
    ],
)
def test_a_run_names_what_is_in_place_of_its_files(name, make, present, tmp_path):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: is a {present}"):
        paths.make_workdir(epath.Path(tmp_path))
