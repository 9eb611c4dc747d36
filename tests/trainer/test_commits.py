"""Tests of the commits of the Hub's models in a run's config."""

from __future__ import annotations

import dataclasses
import json

import pytest
from etils import epath

from spell_jax.config import ExtraModelConfig, default_supervised_config, read, read_supervised
from spell_jax.policy.model import TINY_POLICY
from spell_jax.trainer import commits
from tests import noise
from tests.runtime.files import fake_hub

URL = "hf://own/tiny"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    with fake_hub.serving(monkeypatch, tmp_path / "cache") as server:
        server.commit_folder("own/tiny", TINY_POLICY)
        yield server


def test_all_models_get_the_commit_of_the_run_or_the_newest(fake, tmp_path):
    workdir = epath.Path(tmp_path)
    config = read(noise.small_config(URL))
    config = dataclasses.replace(config, models={"judge": ExtraModelConfig(folder=f"{URL}@main")})
    first = fake.branches["own/tiny"]["main"]
    pinned = commits.pin(config, workdir)
    assert pinned.policy == dataclasses.replace(config.policy, folder=f"{URL}@{first}")
    assert pinned.models["judge"].folder == f"{URL}@{first}"
    assert "own/tiny/model.safetensors" not in fake.reads

    second = fake.commit("own/tiny", {"config.json": b"{}"})
    saved = {"policy": {"folder": pinned.policy.folder}, "judge": "damaged"}
    (workdir / "config.json").write_text(json.dumps(saved))
    resumed = commits.pin(config, workdir)
    assert resumed.policy.folder == f"{URL}@{first}"
    assert resumed.models["judge"].folder == f"{URL}@{second}"
    assert commits.keep(config, saved).models["judge"].folder == f"{URL}@main"
    assert commits.pin(resumed, workdir) == resumed


def test_tokenizer_of_supervised_tuning_is_pinned(fake, tmp_path):
    config = default_supervised_config()
    config.policy.tokenizer = URL
    pinned = commits.pin(read_supervised(config), epath.Path(tmp_path))
    assert pinned.policy.tokenizer == f"{URL}@{fake.branches['own/tiny']['main']}"
    assert pinned.policy.folder == ""


def test_local_folders_ask_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr(commits.distributed, "broadcast", lambda make: pytest.fail("asked"))
    config = read(noise.small_config("tiny"))
    assert commits.pin(config, epath.Path(tmp_path)) is config
