"""Tests of the accelerator's sections `bits` and `train` without their runs."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks.accelerator import bits, train
from benchmarks.accelerator.section import FAULT, Setting
from spell_jax.runtime.files.checkpoint import Checkpoints

# --------------------------------------------------------------------------------------------- Bits


def write_run(workdir: pathlib.Path, weight: float = 2.0, reward: float = 0.5) -> pathlib.Path:
    """Write a run of two updates with one weight tensor; the second update has `reward`."""
    params = {"kernel": jnp.array([1.0, weight, -4.0, 0.0])}
    policy = {"params": params, "opt_state": {"mu": jnp.zeros(4)}}
    with Checkpoints(workdir) as checkpoints:
        checkpoints.save(2, {"policy": policy}, {"algorithm": {"memory": {}}}, force=True)
    lines = [
        {"step": 1, "rollout/solve_rate": 0.5, "time/step_seconds": weight},
        {"step": 2, "rollout/solve_rate": reward},
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "episodes").mkdir()
    (workdir / "episodes" / "1").write_bytes(b"episode")
    return workdir


def test_equal_runs_are_the_same(tmp_path) -> None:
    numbers = bits.compare(write_run(tmp_path / "a"), write_run(tmp_path / "b"), 2)
    assert numbers["same"] and numbers["same_weights"] and numbers["same_episodes"]
    assert numbers["different_bytes"] == numbers["largest_difference"] == 0.0
    assert "first_different_update" not in numbers


def test_differences_of_weights_and_metrics_are_measured(tmp_path) -> None:
    """The other run has one other weight, and another reward in its second update."""
    changed_run = write_run(tmp_path / "b", weight=2.5, reward=0.25)
    numbers = bits.compare(write_run(tmp_path / "a"), changed_run, 2)
    assert not numbers["same"] and not numbers["same_weights"] and not numbers["same_metrics"]
    assert numbers["same_optimizer"] and numbers["same_state"] and numbers["same_episodes"]
    assert numbers["largest_difference"] == 0.5
    assert numbers["largest_relative_difference"] == 0.125
    assert numbers["different_bytes"] == 1 / 32
    assert numbers["first_different_update"] == 2


# -------------------------------------------------------------------------------------------- Train


def write_folder(path: pathlib.Path, *names: str) -> pathlib.Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}\n")
    return path


def setting(out: pathlib.Path, **fields: Any) -> Setting:
    return Setting("gpu", tiny=False, out=out, seconds=300.0, **fields)


def test_a_folder_with_pieces_and_rows_has_a_format_stage(tmp_path) -> None:
    names = "p.gguf.01", "p.gguf.00", "clusters.jsonl", "held_out.jsonl", "rows.jsonl"
    folder = train.Folder(write_folder(tmp_path / "folder", *names))
    assert [piece.name for piece in folder.pieces] == ["p.gguf.00", "p.gguf.01"]
    assert folder.rows == tmp_path / "folder" / "rows.jsonl"
    cases = train.cases(setting(tmp_path / "out", train=str(tmp_path / "folder")))
    assert [case.name for case in cases] == ["format_stage", "arm"]


@pytest.mark.parametrize(
    "names, message",
    [
        (("clusters.jsonl", "held_out.jsonl"), "has no folder policy"),
        (("p.gguf.01", "clusters.jsonl", "held_out.jsonl"), "there are 01; must be all"),
        (("p.gguf", "clusters.jsonl"), "held_out.jsonl"),
        (("p.gguf", "held_out.jsonl"), "clusters.jsonl"),
    ],
)
def test_a_folder_without_a_file_is_refused(names, message, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        train.Folder(write_folder(tmp_path / "folder", *names))


def test_a_later_run_plays_another_stretch(tmp_path) -> None:
    folder = write_folder(tmp_path / "folder", "p.gguf", "clusters.jsonl", "held_out.jsonl")
    played = {"train": {"arm": {"updates": 9}, "arm_2": {FAULT: "no update ended in time"}}}
    (case,) = train.cases(setting(tmp_path / "out", train=str(folder), before=played))
    assert case.name == "arm_2"


def test_a_wrong_folder_is_the_error_of_a_case(tmp_path) -> None:
    (case,) = train.cases(setting(tmp_path / "out", train=str(tmp_path / "nowhere")))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        case.run()


def test_without_a_folder_there_are_no_cases(tmp_path) -> None:
    assert not train.cases(setting(tmp_path))


def test_the_summary_leaves_out_what_compiles_and_validates(tmp_path) -> None:
    line = {"time/step_seconds": 5.0, "time/seconds/validate": 1.0, "rollout/sampled_tokens": 7}
    lines = [
        {"step": 1, **line, "time/step_seconds": 90.0, "time/seconds/start": 60.0},
        {"step": 2, **line, "eval/all": 0.25, "time/mfu": 0.5},
        {"step": 3, **line, "eval/all": 0.5},
    ]
    report = {"before": {"responder accuracy (rule)": {"all": {"": [0.125, 0.11, 0.14]}}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(report))
    numbers = train.summary(lines, 0, train.held_out(tmp_path, lines))
    assert numbers["updates"] == 3 and numbers["seconds_per_update"] == 4.0
    assert numbers["first_update_s"] == 90.0 and numbers["mfu"] == 0.5
    assert numbers["held_out_before"] == 0.125 and numbers["held_out"] == 0.5
    assert numbers["validations"] == [(2, {"all": 0.25}), (3, {"all": 0.5})]
    assert numbers["sampled_tokens"] == 21
    of_second_stretch = train.summary(lines, 2, {})
    assert of_second_stretch["updates_of_this_stretch"] == 1


def test_a_run_without_updates_has_no_speeds(tmp_path) -> None:
    assert train.summary([], 0, train.held_out(tmp_path, []))["updates"] == 0
