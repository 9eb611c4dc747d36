"""Tests of rollouts on devices of their own: equality with shared devices, resumes, idle meshes."""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np
import pytest

from spell_jax.policy import weights
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.trainer import loop
from tests import noise

SPLIT = {"mesh.rollout_devices": 4, "staleness": 1}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


def run(folder: pathlib.Path, workdir: pathlib.Path, **fields) -> loop.Run:
    """Train on all fake devices; return the run's parts."""
    runs = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        make_run = loop.make_run
        monkeypatch.setattr(loop, "make_run", lambda c: runs.append(make_run(c)) or runs[0])
        loop.train(noise.small_config(folder, **fields), workdir)
    return runs[0]


def assert_same_learning(workdir: pathlib.Path, other_workdir: pathlib.Path) -> None:
    """Assert equal episodes, and weights equal to 1e-5."""
    assert list(read_episodes(workdir)) == list(read_episodes(other_workdir))
    equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    params, expected = (weights.load(run / "policy")[1] for run in (workdir, other_workdir))
    jax.tree.map(equal, params, expected)


@pytest.mark.parametrize("transfer", ["overlapped", "in_place"])
def test_split_devices_train_like_shared_devices(transfer, policy, tmp_path):
    fields = {"steps": 5, "checkpoint_every": 4, "loss.old_logprobs": "rollout"}
    split = run(policy, tmp_path / "split", **fields, **SPLIT, **{"mesh.transfer": transfer})
    training, sampling = split.learner.mesh, split.worker.sampler.mesh
    assert training.size == sampling.size == 4
    assert not set(training.devices.flat) & set(sampling.devices.flat)
    shared = run(policy, tmp_path / "shared", **fields, staleness=1)
    assert shared.learner.mesh is shared.worker.sampler.mesh
    assert_same_learning(tmp_path / "split", tmp_path / "shared")
    for workdir in (tmp_path / "split", tmp_path / "shared"):
        lines = read_metrics(workdir)
        assert [line["rollout/staleness"] for line in lines] == [0, 1, 1, 1, 0]
        assert not all(line["train/empty_update"] for line in lines)
