"""Hugging Face folders: the same bits out and in, and damage that is named."""

import dataclasses
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from tests import tiny


def _saved(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "policy"
    weights.save(folder, tiny.POLICY, tiny.weights())
    return folder


def _change(folder: pathlib.Path, change) -> None:
    path = folder / weights.WEIGHTS_FILE
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_bit_identical(tied: bool, tmp_path) -> None:
    policy = dataclasses.replace(tiny.POLICY, tied_embeddings=tied)
    weights.save(tmp_path / "a", policy, tiny.weights(policy))
    read, params = weights.load(tmp_path / "a")
    assert read == policy
    jax.tree.map(np.testing.assert_array_equal, params, tiny.weights(policy))
    weights.save(tmp_path / "b", read, params)
    files = [(tmp_path / name / weights.WEIGHTS_FILE).read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_names_and_layout_of_the_file(tmp_path) -> None:
    tensors = safetensors.numpy.load_file(_saved(tmp_path) / weights.WEIGHTS_FILE)
    assert len(tensors) == 2 + 2 * 12
    attention = tiny.weights()["layers"]["attention"]
    query = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(query, attention["q_kernel"][1].reshape(32, 32).T)
    out = tensors["model.layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(out, attention["o_kernel"][0].reshape(32, 32).T)


def test_bfloat16_files_are_read(tmp_path) -> None:
    folder = _saved(tmp_path)
    _change(folder, lambda t: t.update({k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()}))
    _, params = weights.load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2), params, tiny.weights())


def test_saving_replaces_a_folder_and_leaves_nothing_behind(tmp_path) -> None:
    folder = _saved(tmp_path)
    (folder / "old.txt").write_text("old")
    weights.save(folder, tiny.POLICY, tiny.weights(seed=1))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    _, params = weights.load(folder)
    np.testing.assert_array_equal(params["embedding"], tiny.weights(seed=1)["embedding"])


def test_what_cannot_be_saved_leaves_everything_as_it_was(tmp_path) -> None:
    folder = _saved(tmp_path)
    policy = dataclasses.replace(tiny.POLICY, qk_norm=True)
    with pytest.raises(ValueError, match=r"policy\.qk_norm = True"):
        weights.save(folder, policy, tiny.weights(policy))
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    weights.load(folder)


def test_the_tokenizer_travels_along(tmp_path) -> None:
    tokenizer = tokenizers.train(["the cat sat on the mat"] * 5, 300)
    weights.save(tmp_path / "policy", tiny.POLICY, tiny.weights(), tokenizer)
    assert tokenizers.load(tmp_path / "policy").model == tokenizer.model
    generation = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), rf"model\.safetensors: tensor {UP} is missing"),
        (lambda t: t.update(extra=t[NORM]), r"model\.safetensors: unknown tensor extra"),
        (lambda t: t.update({UP: t[UP].T}), rf"{UP} has shape \(32, 48\), needs \(48, 32\)"),
        (lambda t: t.update({NORM: t[NORM][:5]}), rf"{NORM} has shape \(5,\), needs \(32,\)"),
    ],
    ids=["missing", "extra", "transposed", "short"],
)
def test_wrong_tensors_are_named(change, message: str, tmp_path) -> None:
    folder = _saved(tmp_path)
    _change(folder, change)
    with pytest.raises(ValueError, match=message):
        weights.load(folder)


def test_more_layers_than_the_config_says_are_named(tmp_path) -> None:
    folder = _saved(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"unknown tensor model\.layers\.1\."):
        weights.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -10])
def test_a_truncated_file_is_named(keep: int, tmp_path) -> None:
    folder = _saved(tmp_path)
    path = folder / weights.WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a complete safetensors file"):
        weights.load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path) -> None:
    folder = _saved(tmp_path)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        weights.load(folder)


def test_an_unsupported_config_is_named(tmp_path) -> None:
    folder = _saved(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"rope_scaling = .*yarn"):
        weights.load(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    tokenizer = tokenizers.train(["the cat sat on the mat"] * 5, 300)
    weights.save(tmp_path / "policy", tiny.POLICY, tiny.weights(), tokenizer)
    with pytest.raises(
        ValueError, match=r"policy: the tokenizer has \d{3} tokens.*vocab_size = 64"
    ):
        weights.load_policy(tmp_path / "policy")
