"""Tests of resumption on other devices, with a rollout ahead of its update, or without a disk."""

from __future__ import annotations

import collections
import errno
import functools
import json
import os
import pathlib
import re
import time

import pytest
from absl import logging as absl_logging
from etils import epath

from spell_jax.config import to_dict
from spell_jax.policy import weights
from spell_jax.runtime import fault_injection, setup
from spell_jax.runtime.files import jsonl
from spell_jax.runtime.files.checkpoint import Checkpoints, MisfitError, SaveError
from spell_jax.runtime.files.episodes import episode_files, read_episodes
from spell_jax.runtime.hosts.preemption import Preempted
from spell_jax.runtime.log import metrics as runtime_metrics
from spell_jax.runtime.log.metrics import MetricsWriter, read_metrics
from spell_jax.trainer import loop, misfit, rollouts, run_files, state
from spell_jax.trainer.build import make_run
from spell_jax.trainer.rollouts import SharedRollouts
from spell_jax.trainer.state import States, copy
from tests import noise
from tests.slow import killed

absl_logging.set_verbosity(absl_logging.WARNING)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


def run_to_end(config, workdir: pathlib.Path, one_device: bool = True) -> list[dict]:
    """Run in this process; return the lines of metrics without times and memory."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if one_device:
            noise.use_one_device(monkeypatch)
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        noise.share_programs(monkeypatch)
        loop.train(config, workdir)
    return list(map(noise.steady, read_metrics(workdir)))


def episodes(workdir: pathlib.Path) -> dict[str, bytes]:
    return killed.files(workdir / "episodes")


def test_fields_that_change_the_checkpoints_are_named(policy, tmp_path, monkeypatch) -> None:
    noise.use_one_device(monkeypatch)
    run = make_run(noise.small_config(policy))
    fields = to_dict(run.config)
    with Checkpoints(tmp_path / "run") as checkpoints:
        host_state = state.HostState(fields, run.algorithm.state_dict(), None, [], {}, [])
        checkpoints.save(1, state.first_states(run).tree(), host_state.to_json(), force=True)
    setup.write_config(fields, epath.Path(tmp_path / "run"))
    wide = str(noise.save_policy(tmp_path / "wide", width=48))

    def restore(**overrides):
        resumed_run = make_run(noise.small_config(policy, **overrides))
        with Checkpoints(tmp_path / "run") as checkpoints:
            return state.restore_or_init(resumed_run, checkpoints)[1]

    assert restore(**{"optimizer.learning_rate": 1e-5, "sampler.max_tokens": 5}) == 1
    changed = {
        "policy.lora_rank": (2, "= 2: was 0"),
        "policy.folder": (wide, f"= '{wide}': was '{policy}'"),
        "optimizer.name": ("rmsprop", "= 'rmsprop': was 'adamw'"),
        "loss.kl_weight": (0.1, "= 0.1: was 0.0"),
    }
    for field, (value, words) in changed.items():
        message = f"^{re.escape(f'{field} {words} in the run of ')}.*; must be the same, or begin"
        message += r".* \(.*: .*\)$"  # the first tensor that differs
        with pytest.raises(MisfitError, match=message):
            restore(**{field: value})
    begins = {"init_from": str(tmp_path / "run"), "policy.lora_rank": 2}
    with pytest.raises(MisfitError, match=r"^policy\.lora_rank = 2: was 0 in the run of "):
        state.first_states(make_run(noise.small_config(policy, **begins)))


TENSOR = "policy/params/a: wanted, not in the checkpoint"


@pytest.mark.parametrize(
    ("changed", "resumes", "named"),
    [
        (["data.source", "policy.lora_rank", "policy.folder"], True, [1, 2]),
        (["data.source", "policy.lora_rank", "policy.folder"], False, [1]),
        (["loss.kl_weight", "judge.folder", "policy.folder"], False, [2]),
        (["loss.kl_weight", "judge.folder", "judge.optimizer.name"], True, [0, 1, 2]),
        (["algorithm.reader.source", "algorithm.verifier.source"], True, [0]),
        (["source", "policy.tokenizer", "policy.layers"], True, [1, 2]),
        (["source", "seed", "data.source"], True, [0, 1]),
        (["data.source", "judge.name"], True, []),
    ],
)
def test_only_fields_that_shape_the_tensors_are_named(changed, resumes, named, tmp_path) -> None:
    def fields(value: str) -> dict:
        sections: dict = {"policy": {"compute_dtype": "auto"}, "judge": {"compute_dtype": "auto"}}
        for name in changed:
            *parents, last = name.split(".")
            place = sections
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        return sections

    workdir = epath.Path(tmp_path)
    setup.write_config(fields("old"), workdir)
    with (
        pytest.raises(MisfitError) as raised,
        misfit.naming_changes(fields("new"), workdir, resumes),
    ):
        raise MisfitError("does not fit", TENSOR)
    begin, _, _ = str(raised.value).partition(" in the run of ")
    lines = {f"{changed[i]} = 'new': was 'old'" for i in named}
    assert set(begin.split("; ")) == (lines or {"does not fit"})
    assert not named or str(raised.value).endswith(f"without init_from ({TENSOR})")


# ------------------------------------------------------------------------------------------ Devices


@pytest.mark.slow
def test_run_resumed_on_other_meshes_has_the_same_losses(policy, tmp_path) -> None:
    """Use one device, then eight, then two times four, also for the loss's reference.

    Sampled answers are equal on all meshes, so that every metric of a step can be compared.
    """
    fields = {"loss.kl_weight": 0.5, "loss.entropy_weight": 0.1, "validate_every": 0}
    make = functools.partial(killed.make_config, policy, **fields)
    expected_lines = run_to_end(make(), tmp_path / "one")
    workdir = tmp_path / "moved"
    run_to_end(make(steps=2), workdir)
    run_to_end(make(steps=4), workdir, one_device=False)
    lines = run_to_end(make(steps=6, **{"mesh.data": 2, "mesh.fsdp": 4}), workdir, one_device=False)

    assert episodes(workdir) == episodes(tmp_path / "one")
    assert all(abs(line["train/loss"]) > 1e-2 for line in expected_lines), (
        "nothing is easily the same"
    )
    assert all(line["train/kl"] > 1e-5 for line in expected_lines[1:])
    bounds = {"loss": 1e-5, "entropy": 1e-5, "kl": 1e-6, "gradient_norm": 1e-5}
    for line, expected_line in zip(lines, expected_lines, strict=True):
        for name, bound in bounds.items():
            assert abs(line[f"train/{name}"] - expected_line[f"train/{name}"]) < bound, (
                line["step"],
                name,
            )


# ------------------------------------------------------------------------ Rollouts ahead of updates


@pytest.mark.slow
def test_rollout_ahead_of_update_is_repeated_after_preemption(
    policy, tmp_path, monkeypatch
) -> None:
    """A notice to stop during the rollout of step 4, ahead of step 3's update.

    The run leaves the files of a run of three steps, without a rollout ahead of the last.
    """
    fields = {"staleness": 1, "loss.tis_cap": 2.0, "checkpoint_every": 100}
    make = functools.partial(killed.make_config, policy, **fields)
    run_to_end(make(steps=3), tmp_path / "three")
    questions = len(list(read_episodes(tmp_path / "three")))
    workdir = tmp_path / "stopped"
    begun = count_begun(monkeypatch)
    with monkeypatch.context() as patches, pytest.raises(Preempted):
        patches.setattr(fault_injection, "_passed", collections.Counter())
        patches.setenv(fault_injection.VARIABLE, f"verified:{questions + 5}:term")
        run_to_end(make(), workdir)
    assert begun == [1, 2, 3, 4]
    assert episodes(workdir) == episodes(tmp_path / "three")
    killed.assert_same_state(make(), workdir, tmp_path / "three")
    assert run_to_end(make(), workdir) == run_to_end(make(), tmp_path / "three")
    assert begun[4:] == [4, 5, 6] * 2
    killed.assert_same_run(make(), workdir, tmp_path / "three")


def test_interrupted_rollout_is_repeated_identically(policy, monkeypatch) -> None:
    """A notice to stop between two calls of the sampler discards the whole step."""
    noise.use_one_device(monkeypatch)
    noise.give_meaning(monkeypatch)
    run = make_run(killed.make_config(policy))
    state = run.learner.init(weights.load(policy)[1])
    states = States({"policy": state}, {"reference_reader": copy(state.params)})
    calls: list[None] = []

    def record(step: int, stop_at: int = -1):
        def should_stop() -> bool:
            calls.append(None)
            return len(calls) == stop_at

        calls.clear()
        rollout = SharedRollouts(run, should_stop).take(states, step)
        return rollout and [json.dumps(line) for line in rollout.records()]

    record(1)
    before = json.dumps(run.algorithm.state_dict())
    records, after, call_count = record(2), json.dumps(run.algorithm.state_dict()), len(calls)
    assert records and after != before and call_count > 4
    run.algorithm.load_state_dict(json.loads(before))
    assert record(2, stop_at=call_count // 2) is None and len(calls) == call_count // 2
    assert json.dumps(run.algorithm.state_dict()) == before
    assert record(2) == records and json.dumps(run.algorithm.state_dict()) == after


def count_begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the steps of rollouts from now on."""
    begun, make_rollout = [], rollouts.make_rollout

    def make_and_count(run, params, step, *options):
        begun.append(step)
        return make_rollout(run, params, step, *options)

    monkeypatch.setattr(rollouts, "make_rollout", make_and_count)
    return begun


# --------------------------------------------------------------------------------------------- Disk


@pytest.fixture(scope="module")
def uninterrupted_run(policy, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("whole")
    run_to_end(killed.make_config(policy), workdir)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, written", [(errno.EROFS, True), (errno.ENOSPC, False)], ids=["read-only", "full"]
)
def test_run_resumes_from_the_fallback_folder_after_disk_loss(
    number, written, policy, uninterrupted_run, tmp_path, monkeypatch
) -> None:
    """No folder can be created from step 3 on, and no metrics written unless `written`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    patient = functools.partial(Checkpoints, sleep=lambda _: None)
    monkeypatch.setattr(run_files, "Checkpoints", patient)
    config, workdir = killed.make_config(policy), tmp_path / "run"
    with monkeypatch.context() as patches, pytest.raises(SaveError) as error:
        killed.wait_for_saves(patches)
        lose_disk(patches, workdir, 3, number, written)
        run_to_end(config, workdir)
    message = str(error.value)
    assert os.strerror(number) in message
    fallback = pathlib.Path(message.partition("go on from there with --workdir=")[2])
    assert fallback == tmp_path / "temporary" / "run_step3"
    assert f"episodes of steps 1-3 stay in {workdir}/episodes" in message
    lines = run_to_end(config, fallback)
    # Of the first steps too.
    assert lines == list(map(noise.steady, read_metrics(uninterrupted_run)))
    assert (
        episodes(fallback).items() <= episodes(uninterrupted_run).items()
        and len(episodes(fallback)) == 3
    )
    killed.assert_same_state(config, fallback, uninterrupted_run)
    assert killed.files(fallback / "best") == killed.files(uninterrupted_run / "best")
    for run in (workdir, fallback):
        assert Checkpoints(run).newest_intact() == (2 if run == workdir else killed.STEPS)


def lose_disk(
    monkeypatch: pytest.MonkeyPatch, workdir: pathlib.Path, step: int, number: int, written: bool
) -> None:
    """Let every write of new files to the workdir fail from the beginning of a step on."""
    make_rollout, mkdir, put = rollouts.make_rollout, os.mkdir, MetricsWriter._put

    def fail(path, *arguments, **options):
        if os.fspath(path).startswith(f"{workdir}/"):
            raise OSError(number, os.strerror(number), path)
        mkdir(path, *arguments, **options)

    def fail_to_put(self, lines):
        time.sleep(0.5)  # known only when the checkpoint waits for it
        raise OSError(number, os.strerror(number))

    def make_and_fail(run, params, rollout_step, *options):
        if rollout_step == step:
            monkeypatch.setattr(os, "mkdir", fail)
            monkeypatch.setattr(MetricsWriter, "_put", put if written else fail_to_put)
        return make_rollout(run, params, rollout_step, *options)

    monkeypatch.setattr(rollouts, "make_rollout", make_and_fail)


@pytest.mark.slow
def test_only_checkpoints_wait_for_pending_writes(policy, tmp_path, monkeypatch) -> None:
    """Run three steps on a disk that takes 0.5 s per file; every second step is saved."""
    write_lines, save, there = runtime_metrics.write_lines, Checkpoints.save, {}

    def slow(path, lines):
        if "resumed" not in str(path):
            time.sleep(0.5)
        write_lines(path, lines)

    def look_and_save(self, step, *arguments, **options):
        written = [line["step"] for line in read_metrics(tmp_path)]
        there.setdefault(step, (written, len(episode_files(tmp_path))))
        return save(self, step, *arguments, **options)

    monkeypatch.setattr(runtime_metrics, "write_lines", slow)
    monkeypatch.setattr(jsonl, "write_lines", slow)  # episodes
    monkeypatch.setattr(Checkpoints, "save", look_and_save)
    run_to_end(killed.make_config(policy, steps=3, checkpoint_every=2, validate_every=0), tmp_path)
    assert there[2] == ([1, 2], 2) and there[3][1] < 3
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    assert len(episodes(tmp_path)) == 3


@pytest.mark.slow
def test_full_disk_between_checkpoints_ends_the_run_with_all_saved(
    policy, uninterrupted_run, tmp_path, monkeypatch
) -> None:
    """The metrics of step 2 cannot be written.

    The error is known at that step or the next one, which is saved, and the checkpoint has the
    lines that are missing on disk.
    """
    put = MetricsWriter._put

    def fill(self, lines):
        if len(lines) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, lines)

    make = functools.partial(killed.make_config, policy, checkpoint_every=100)
    with monkeypatch.context() as patches, pytest.raises(OSError, match="No space"):
        patches.setattr(MetricsWriter, "_put", fill)
        run_to_end(make(), tmp_path)
    step = Checkpoints(tmp_path).newest_intact()
    assert step in (2, 3) and [line["step"] for line in read_metrics(tmp_path)] == [1]
    assert run_to_end(make(), tmp_path) == list(map(noise.steady, read_metrics(uninterrupted_run)))
    killed.assert_same_state(make(), tmp_path, uninterrupted_run)
