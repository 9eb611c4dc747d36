"""Tests of saving: shards, configs, and folders that are complete or absent."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
import safetensors.numpy

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.formats import safetensors as files
from tests import tiny
from tests.paths import ROOT
from tests.policy.test_weights import POLICIES, SHARD, assert_same_bits


def _saved(tmp_path: pathlib.Path, shard_bytes: int = 1 << 30) -> pathlib.Path:
    folder = tmp_path / "policy"
    weights.save(folder, tiny.POLICY, tiny.weights(), shard_bytes=shard_bytes)
    return folder


def test_saving_replaces_a_folder_without_leftovers(tmp_path) -> None:
    folder = _saved(tmp_path)
    (folder / "old.txt").write_text("old")
    weights.save(folder, tiny.POLICY, tiny.weights(seed=1))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    assert_same_bits(weights.load(folder)[1], tiny.weights(seed=1))


def test_saved_files_are_readable_by_other_users(tmp_path) -> None:
    folder = _saved(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_unsupported_policy_leaves_the_old_folder_unchanged(tmp_path) -> None:
    folder = _saved(tmp_path)
    policy = dataclasses.replace(tiny.POLICY, qk_norm=True)
    with pytest.raises(ValueError, match=r"policy\.qk_norm = True"):
        weights.save(folder, policy, tiny.weights(policy))
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    weights.load(folder)


def test_tokenizer_is_saved_with_the_weights(tmp_path) -> None:
    tokenizer = tokenizers.train(["the cat sat on the mat"] * 5, 300)
    weights.save(tmp_path / "policy", tiny.POLICY, tiny.weights(), tokenizer)
    assert tokenizers.load(tmp_path / "policy").model == tokenizer.model
    generation = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}


def test_parameters_of_another_policy_are_rejected(tmp_path) -> None:
    untied = POLICIES["qwen2 untied"]
    for policy, params, message in (
        (tiny.POLICY, tiny.weights(untied), "parameter unembedding is unknown"),
        (untied, tiny.weights(), "parameter unembedding is missing"),
        (
            dataclasses.replace(tiny.POLICY, layers=3),
            tiny.weights(),
            r"parameter layers/attention/k_bias has shape \(2, 2, 8\), needs \(3, 2, 8\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            weights.save(tmp_path / "policy", policy, params)
    assert not list(tmp_path.iterdir())


def test_shards_respect_the_size_limit_and_match_the_index(tmp_path) -> None:
    folder = _saved(tmp_path, SHARD)
    index = json.loads((folder / files.INDEX).read_text())
    sizes = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = safetensors.numpy.load_file(path)
        assert {name for name, place in index["weight_map"].items() if place == path.name} == set(
            tensors
        )
        sizes[path.name] = sum(tensor.nbytes for tensor in tensors.values())
    assert all(0 < size <= SHARD for size in sizes.values())
    count = len(sizes)
    assert list(sizes) == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert index["metadata"] == {"total_size": sum(sizes.values())}


def test_tensor_larger_than_a_shard_gets_its_own_file(tmp_path) -> None:
    weights.save(tmp_path / "policy", tiny.POLICY, tiny.weights(), shard_bytes=1)
    assert len(list((tmp_path / "policy").glob("*.safetensors"))) == 2 + 2 * 12
    assert_same_bits(weights.load(tmp_path / "policy")[1], tiny.weights())


class _Tokenizer:
    """The parts of a tokenizer that `save` needs: ids, and perhaps a generation config."""

    eos_id, pad_id, stop_ids = 7, 3, (7, 9)

    def __init__(self, generation: str | None = None):
        self.generation = generation

    def save(self, folder: pathlib.Path) -> None:
        if self.generation:
            (folder / "generation_config.json").write_text(self.generation)


def test_end_and_padding_ids_are_written_to_both_configs(tmp_path) -> None:
    tokenizer: Any = _Tokenizer()
    weights.save(tmp_path / "policy", tiny.POLICY, tiny.weights(), tokenizer)
    generation = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [7, 9], "pad_token_id": 3}
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (7, 3)
    assert config["torch_dtype"] == "float32"


def test_generation_config_of_the_tokenizer_is_kept_and_lists_the_ends(tmp_path) -> None:
    tokenizer: Any = _Tokenizer('{"temperature": 0.6}')
    weights.save(tmp_path / "policy", tiny.POLICY, tiny.weights(), tokenizer)
    written = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert written == {"temperature": 0.6, "eos_token_id": [7, 9]}
    tokenizer = _Tokenizer('{"eos_token_id":[9, 7]}')
    weights.save(tmp_path / "kept", tiny.POLICY, tiny.weights(), tokenizer)
    written = (tmp_path / "kept" / "generation_config.json").read_text()
    assert written == '{"eos_token_id":[9, 7]}'


def test_files_are_flushed_before_the_folder_is_renamed(tmp_path, monkeypatch) -> None:
    flushed = []
    fsync = os.fsync

    def watching(descriptor):
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path.name, (tmp_path / "policy").exists()))
        fsync(descriptor)

    if not pathlib.Path("/proc/self/fd").exists():
        pytest.skip("reads /proc")
    monkeypatch.setattr(os, "fsync", watching)
    folder = _saved(tmp_path, SHARD)
    *inside, scratch, parent = flushed
    assert {name for name, _ in inside} >= {path.name for path in folder.iterdir()}
    assert scratch[0].startswith(".policy-") and parent == (tmp_path.name, True)
    assert not any(there for _, there in (*inside, scratch))


def test_saving_to_a_symlink_replaces_its_target(tmp_path) -> None:
    folder = _saved(tmp_path)
    link = tmp_path / "latest"
    link.symlink_to("policy")
    weights.save(link, tiny.POLICY, tiny.weights(seed=1))
    assert link.is_symlink() and sorted(p.name for p in tmp_path.iterdir()) == ["latest", "policy"]
    assert_same_bits(weights.load(folder)[1], tiny.weights(seed=1))


# ------------------------------------------------------------------------------------ Interruption


@pytest.mark.parametrize("before", [True, False], ids=["replacing", "new"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_error_while_writing_changes_nothing(error, before, tmp_path, monkeypatch) -> None:
    folder = _saved(tmp_path) if before else tmp_path / "policy"
    write, calls = safetensors.numpy.save_file, []

    def fail_later(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise error("disk full")
        write(*args, **kwargs)

    monkeypatch.setattr(safetensors.numpy, "save_file", fail_later)
    with pytest.raises(error, match="disk full"):
        weights.save(folder, tiny.POLICY, tiny.weights(seed=1), shard_bytes=SHARD)
    assert len(calls) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["policy"] * before
    if before:
        assert_same_bits(weights.load(folder)[1], tiny.weights())


def test_error_between_the_renames_restores_the_old_folder(tmp_path, monkeypatch) -> None:
    folder = _saved(tmp_path)
    rename = pathlib.Path.rename

    def fail_at_the_end(path, target):
        if target == folder and not path.name.endswith("-old"):
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", fail_at_the_end)
    with pytest.raises(OSError, match="no"):
        weights.save(folder, tiny.POLICY, tiny.weights(seed=1))
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    assert_same_bits(weights.load(folder)[1], tiny.weights())


# Saves weights of seed 1, but is killed after two shards or after the old folder is moved away.
DYING = """
import os, pathlib, signal, sys
import safetensors.numpy
from spell_jax.policy import weights
from tests import tiny
owner, name, left = {"write": (safetensors.numpy, "save_file", 2),
                     "rename": (pathlib.Path, "rename", 1)}[sys.argv[2]]
whole = getattr(owner, name)
def dying(*args, **kwargs):
    global left
    done = whole(*args, **kwargs)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return done
setattr(owner, name, dying)
weights.save(sys.argv[1], tiny.POLICY, tiny.weights(seed=1), shard_bytes=10_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["write", "rename"])
def test_killed_save_is_not_loaded_and_the_next_save_cleans_up(where, tmp_path) -> None:
    folder = _saved(tmp_path)
    (tmp_path / ".policy-12345678-abcdefgh").mkdir()  # of a folder policy-12345678
    command = [sys.executable, "-c", DYING, str(folder), where]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    if where == "write":
        assert len(list(tmp_path.iterdir())) == 3
        assert_same_bits(weights.load(folder)[1], tiny.weights())
    else:  # between moving the old folder away and the new one in
        assert len(list(tmp_path.iterdir())) == 3
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            weights.load(folder)
        with files.replacing(folder):
            assert_same_bits(weights.load(folder)[1], tiny.weights())
    weights.save(folder, tiny.POLICY, tiny.weights(seed=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".policy-12345678-abcdefgh", "policy"]
    assert_same_bits(weights.load(folder)[1], tiny.weights(seed=2))
