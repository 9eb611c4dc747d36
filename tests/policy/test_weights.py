"""Tests of Hugging Face folders: bit-identical round trips, and errors that name the damage."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict

from spell_jax.policy import lora, tensor_table, transformer, weights
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.policy.formats import safetensors as files
from spell_jax.policy.rope import RopeConfig
from tests import tiny

QWEN3 = dataclasses.replace(tiny.POLICY, qkv_bias=False, qk_norm=True, head_size=16)
POLICIES = {
    "qwen2": tiny.POLICY,
    "qwen3": QWEN3,
    "qwen3_moe": dataclasses.replace(QWEN3, experts=4, experts_per_token=2, feed_forward=24),
    "llama": dataclasses.replace(tiny.POLICY, qkv_bias=False),
    "olmo2": dataclasses.replace(QWEN3, joint_qk_norm=True, norms="after"),
    "gemma3_text": dataclasses.replace(
        QWEN3,
        norms="both",
        centered_norms=True,
        activation="gelu",
        scaled_embedding=True,
        window=16,
        window_layers=(0,),
        window_rope=RopeConfig(500.0),
    ),
}
POLICIES |= {
    f"{name} untied": dataclasses.replace(policy, tied_embeddings=False)
    for name, policy in POLICIES.items()
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
SHARD = 10_000  # bytes: enough for the embedding, not for all weights


def write_tensors(folder: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(tensors, folder / files.SINGLE)


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Read all tensors of a folder with the safetensors library alone."""
    tensors: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_bits(arrays: Any, expected_arrays: Any) -> None:
    def check(a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()

    jax.tree.map(check, arrays, expected_arrays)


def _saved(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "policy"
    weights.save(folder, tiny.POLICY, tiny.weights())
    return folder


def _sharded(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "policy"
    weights.save(folder, tiny.POLICY, tiny.weights(), shard_bytes=SHARD)
    return folder


def _change(folder: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = read_tensors(folder)
    change(tensors)
    write_tensors(folder, tensors)


def _change_json(path: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------- Table


@every_policy
def test_weight_table_has_all_parameters_of_the_model(policy: PolicyConfig) -> None:
    shapes = flatten_dict(transformer.abstract_params(policy)[0], sep="/")
    sizes = tensor_table.sizes_of(policy)
    table_shapes = {
        path: entry.our_shape(sizes) for path, entry in tensor_table.table(policy).items()
    }
    assert table_shapes == {path: leaf.shape for path, leaf in shapes.items()}


@every_policy
@pytest.mark.parametrize("shard_bytes", [SHARD, 1 << 30], ids=["shards", "one file"])
def test_round_trip_is_bit_identical(policy: PolicyConfig, shard_bytes: int, tmp_path) -> None:
    weights.save(tmp_path / "a", policy, tiny.weights(policy), shard_bytes=shard_bytes)
    config, params = weights.load(tmp_path / "a")
    assert config == policy
    assert_same_bits(params, tiny.weights(policy))
    weights.save(tmp_path / "b", config, params, shard_bytes=shard_bytes)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (tmp_path / "a" / files.INDEX).exists() == (shard_bytes == SHARD)


@every_policy
def test_bfloat16_round_trip_is_bit_identical(policy: PolicyConfig, tmp_path) -> None:
    cast = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), tiny.weights(policy))
    weights.save(tmp_path / "a", policy, cast, dtype="bfloat16", shard_bytes=SHARD)
    config, params = weights.load(tmp_path / "a", dtype="bfloat16")
    assert config == policy
    assert_same_bits(params, cast)
    # jax arrays are written alike, and float32 parameters are rounded alike.
    weights.save(tmp_path / "b", policy, jax.tree.map(jnp.asarray, cast), None, "bfloat16", SHARD)
    weights.save(tmp_path / "c", policy, tiny.weights(policy), None, "bfloat16", SHARD)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("block", [1, 200, 1_000])
def test_small_read_blocks_give_identical_weights(block: int, tmp_path, monkeypatch) -> None:
    policy = POLICIES["qwen3_moe untied"]
    monkeypatch.setattr(weights, "BLOCK_BYTES", block)
    monkeypatch.setattr(weights, "STRIP_ROWS", 3)
    weights.save(tmp_path / "a", policy, tiny.weights(policy))
    assert_same_bits(weights.load(tmp_path / "a")[1], tiny.weights(policy))


def test_tensor_names_and_layout_of_a_file(tmp_path) -> None:
    tensors = read_tensors(_saved(tmp_path))
    assert len(tensors) == 2 + 2 * 12
    attention = tiny.weights()["layers"]["attention"]
    query = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(query, attention["q_kernel"][1].reshape(32, 32).T)
    out = tensors["model.layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(out, attention["o_kernel"][0].reshape(32, 32).T)


def test_tensor_names_and_layout_of_experts(tmp_path) -> None:
    policy = POLICIES["qwen3_moe"]
    weights.save(tmp_path / "policy", policy, tiny.weights(policy))
    tensors = read_tensors(tmp_path / "policy")
    assert len(tensors) == 2 + 2 * (9 + 3 * 4)
    moe = tiny.weights(policy)["layers"]["moe"]
    prefix = "model.layers.1.mlp."
    np.testing.assert_array_equal(tensors[prefix + "gate.weight"], moe["router_kernel"][1].T)
    for name in ("gate", "up", "down"):
        tensor = tensors[f"{prefix}experts.3.{name}_proj.weight"]
        np.testing.assert_array_equal(tensor, moe[f"{name}_kernel"][1, 3].T)


# --------------------------------------------------------------------------------- Accepted folders


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_are_read(dtype, tmp_path) -> None:
    folder = _saved(tmp_path)
    _change(folder, lambda t: t.update({k: v.astype(dtype) for k, v in t.items()}))
    _, params = weights.load(folder)
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), tiny.weights())
    assert_same_bits(params, rounded)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe untied"])
def test_tensor_names_may_lack_the_model_prefix(name: str, tmp_path) -> None:
    policy = POLICIES[name]
    weights.save(tmp_path, policy, tiny.weights(policy))
    write_tensors(
        tmp_path, {k.removeprefix("model."): v for k, v in read_tensors(tmp_path).items()}
    )
    assert_same_bits(weights.load(tmp_path)[1], tiny.weights(policy))


def test_embedding_model_may_lack_its_output_projection(tmp_path) -> None:
    """Like Qwen3-Embedding: names without "model.", and no lm_head despite the config."""
    policy = POLICIES["qwen3"]
    untied = dataclasses.replace(policy, tied_embeddings=False)
    params = tiny.weights(untied)
    weights.save(tmp_path, untied, params)
    tensors = read_tensors(tmp_path)
    del tensors["lm_head.weight"]
    write_tensors(tmp_path, {k.removeprefix("model."): v for k, v in tensors.items()})
    config, loaded_params = weights.load(tmp_path)
    assert config == dataclasses.replace(untied, tied_embeddings=True)
    assert_same_bits(loaded_params, {k: v for k, v in params.items() if k != "unembedding"})
    write_tensors(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight is missing"):
        weights.load(tmp_path)


def test_mixed_tensor_name_prefixes_are_rejected(tmp_path) -> None:
    folder = _saved(tmp_path)
    _change(folder, lambda t: t.update({"norm.weight": t.pop(NORM)}))
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {NORM} is missing"):
        weights.load(folder)


def test_rotary_frequencies_of_old_files_are_ignored(tmp_path) -> None:
    folder = _saved(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _change(folder, lambda t: t.update({name: np.ones(4, np.float32)}))
    assert_same_bits(weights.load(folder)[1], tiny.weights())


def test_tied_policy_accepts_only_an_identical_lm_head(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(weights, "BLOCK_BYTES", 1_000)  # several blocks
    folder = _saved(tmp_path)
    table = tiny.weights()["embedding"]
    _change(folder, lambda t: t.update({HEAD: table}))
    assert_same_bits(weights.load(folder)[1], tiny.weights())
    changed_table = table.copy()
    changed_table[-1, -1] += 1e-3
    for wrong, message in (
        (changed_table, "differs from model.embed_tokens.weight"),
        (table.astype(np.float16), "differs from model.embed_tokens.weight"),
        (table[:-1], r"has shape \(63, 32\), needs \(64, 32\)"),
    ):
        _change(folder, lambda t, wrong=wrong: t.update({HEAD: wrong}))
        with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {HEAD} {message}"):
            weights.load(folder)
    half = table.astype(np.float16)  # the same bytes mean something else in another type
    same = {"model.embed_tokens.weight": half, HEAD: half.view(ml_dtypes.bfloat16)}
    _change(folder, lambda t: t.update(same))
    with pytest.raises(ValueError, match=rf"tensor {HEAD} differs from"):
        weights.load(folder)


def test_unsupported_dtype_is_rejected(tmp_path) -> None:
    folder = _saved(tmp_path)
    with pytest.raises(ValueError, match=r"dtype = 'float16': must be one of \('float32', 'bf"):
        weights.load(folder, dtype="float16")
    with pytest.raises(ValueError, match="dtype = 'float16'"):
        weights.save(folder, tiny.POLICY, tiny.weights(), dtype="float16")


# --------------------------------------------------------------------------------- Rejected folders


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), rf"model\.safetensors: tensor {UP} is missing"),
        (lambda t: t.update(extra=t[NORM]), r"model\.safetensors: unknown tensor extra"),
        (lambda t: t.update({UP: t[UP].T.copy()}), rf"{UP} has shape \(32, 48\), needs \(48, 32\)"),
        (lambda t: t.update({NORM: t[NORM][:5]}), rf"{NORM} has shape \(5,\), needs \(32,\)"),
        (lambda t: t.update({NORM: t[NORM][None]}), rf"{NORM} has shape \(1, 32\), needs \(32,\)"),
        (lambda t: t.update({NORM: t[NORM].astype(np.int64)}), rf"{NORM} has type I64, needs one"),
        (lambda t: t.update({NORM: t[NORM].astype(np.float64)}), rf"{NORM} has type F64, needs"),
        (
            lambda t: t.update({NORM: t[NORM].astype(ml_dtypes.float8_e4m3fn)}),
            rf"model\.safetensors: tensor {NORM} has type F8_E4M3, needs",
        ),
        (lambda t: t.clear(), r"model\.safetensors: tensor \S+ is missing"),
    ],
    ids=["missing", "extra", "transposed", "short", "axis", "int", "double", "float8", "empty"],
)
def test_wrong_tensors_are_reported_before_any_read(
    change, message: str, tmp_path, monkeypatch
) -> None:
    folder = _saved(tmp_path)
    _change(folder, change)
    monkeypatch.setattr(files.Tensor, "read", lambda *_: pytest.fail("read before all was checked"))
    with pytest.raises(ValueError, match=message):
        weights.load(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_non_finite_values_are_reported(value: float, kind, tmp_path) -> None:
    folder = _saved(tmp_path)
    _change(folder, lambda t: t.update({k: v.astype(kind) for k, v in t.items()}))
    _change(folder, lambda t: t[UP].__setitem__((47, 31), value))
    for dtype in weights.DTYPES:
        with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {UP} has values that"):
            weights.load(folder, dtype=dtype)


def test_values_that_overflow_bfloat16_are_reported(tmp_path) -> None:
    folder = _saved(tmp_path)
    _change(folder, lambda t: t[UP].__setitem__((0, 0), 3.4e38))
    weights.load(folder)
    with pytest.raises(ValueError, match=rf"{UP} has values that are not finite in bfloat16"):
        weights.load(folder, dtype="bfloat16")


def test_layers_that_are_not_in_the_config_are_reported(tmp_path) -> None:
    folder = _saved(tmp_path)
    _change_json(folder / "config.json", lambda c: c.update(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"unknown tensor model\.layers\.1\."):
        weights.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -10])
def test_truncated_file_is_reported(keep: int, tmp_path) -> None:
    folder = _saved(tmp_path)
    path = folder / files.SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a complete safetensors file"):
        weights.load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_reported(name: str, tmp_path) -> None:
    folder = _saved(tmp_path)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        weights.load(folder)


def test_unsupported_config_is_reported(tmp_path) -> None:
    folder = _saved(tmp_path)
    _change_json(folder / "config.json", lambda c: c.update(hidden_act="gelu"))
    with pytest.raises(ValueError, match=r"config\.json: hidden_act = 'gelu'"):
        weights.load(folder)


def test_duplicate_tensor_in_a_header_is_reported(tmp_path) -> None:
    folder = _saved(tmp_path)
    path = folder / files.SINGLE
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    entry = json.dumps({NORM: json.loads(header)[NORM]}).encode()[1:-1]
    header = header[:-1] + b"," + entry + b"}"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    safetensors.numpy.load_file(path)  # the library reports nothing
    with pytest.raises(ValueError, match=rf"model\.safetensors: damaged \({NORM} is there twice"):
        weights.load(folder)


def _shard_of(folder: pathlib.Path, name: str) -> str:
    return json.loads((folder / files.INDEX).read_text())["weight_map"][name]


def _edit_map(folder: pathlib.Path, name: str, value: Any) -> None:
    _change_json(folder / files.INDEX, lambda c: c["weight_map"].update({name: value}))


def _copy_to_other_shard(folder: pathlib.Path) -> None:
    path = folder / _shard_of(folder, "model.embed_tokens.weight")
    tensors = safetensors.numpy.load_file(path)
    tensors[UP] = read_tensors(folder)[UP]
    safetensors.numpy.save_file(tensors, path)


def _twice_in_the_map(folder: pathlib.Path) -> None:
    path = folder / files.INDEX
    twin = f'"weight_map": {{"{GAIN}": "model-00001-of-00005.safetensors",'
    path.write_text(path.read_text().replace('"weight_map": {', twin))


GAIN = "model.layers.0.input_layernorm.weight"  # not alone in its shard
INDEX = r"model\.safetensors\.index\.json"
SHARD_NAME = r"model-\d{5}-of-\d{5}\.safetensors"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            lambda f: (f / _shard_of(f, GAIN)).unlink(),
            FileNotFoundError,
            rf"{SHARD_NAME}: not there",
        ),
        (
            lambda f: _edit_map(f, GAIN, _shard_of(f, UP)),
            ValueError,
            rf"{GAIN} is in this file, but",
        ),
        (_copy_to_other_shard, ValueError, rf"{SHARD_NAME}: tensor {UP} is in this file, but"),
        (lambda f: _edit_map(f, "x", _shard_of(f, NORM)), ValueError, r"tensor x is missing, but"),
        (
            lambda f: _change_json(f / files.INDEX, lambda c: c["weight_map"].pop(GAIN)),
            ValueError,
            rf"{SHARD_NAME}: tensor {GAIN} is in this file, but {INDEX} says None",
        ),
        (_twice_in_the_map, ValueError, rf"{INDEX}: damaged \({GAIN} is there twice"),
        (
            lambda f: _edit_map(f, GAIN, "../policy/" + _shard_of(f, GAIN)),
            ValueError,
            rf"{INDEX}: tensor {GAIN} is in '../policy/model-",
        ),
        (
            lambda f: _edit_map(f, GAIN, "/etc/passwd"),
            ValueError,
            rf"{INDEX}: tensor {GAIN} is in '/e",
        ),
        (lambda f: _edit_map(f, GAIN, 3), ValueError, rf"{INDEX}: tensor {GAIN} is in 3: must be"),
        (
            lambda f: _change_json(f / files.INDEX, lambda c: c.update(weight_map={})),
            ValueError,
            rf"{INDEX}: weight_map must be",
        ),
        (lambda f: (f / files.INDEX).write_text("[1]"), ValueError, rf"{INDEX}: weight_map must"),
        (lambda f: (f / files.INDEX).write_text("{"), ValueError, rf"{INDEX}: damaged"),
        (lambda f: (f / files.INDEX).write_text("[" * 99_999), ValueError, rf"{INDEX}: damaged"),
        (
            lambda f: write_tensors(f, {"x": np.ones(1)}),
            ValueError,
            rf"{INDEX}: must not be there beside model\.safetensors",
        ),
        (
            lambda f: safetensors.numpy.save_file({"x": np.ones(1)}, f / "more.safetensors"),
            ValueError,
            r"more\.safetensors: holds weights that",
        ),
        (
            lambda f: (f / files.INDEX).unlink(),
            FileNotFoundError,
            r"safetensors: not there, and no",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inconsistent_shards_are_reported_before_any_read(
    damage, error, message: str, tmp_path, monkeypatch
) -> None:
    folder = _sharded(tmp_path)
    damage(folder)
    monkeypatch.setattr(files.Tensor, "read", lambda *_: pytest.fail("read before all was checked"))
    with pytest.raises(error, match=message):
        weights.load(folder)


def test_shards_may_be_symlinks_as_in_the_hub_cache(tmp_path) -> None:
    folder = _sharded(tmp_path)
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(f"../blobs/{number}")
    assert_same_bits(weights.load(folder)[1], tiny.weights())


# -------------------------------------------------------------------------------------- Tokenizer


def test_tokenizer_larger_than_the_embedding_is_rejected(tmp_path) -> None:
    tokenizer = tokenizers.train(["the cat sat on the mat"] * 5, 300)
    weights.save(tmp_path / "policy", tiny.POLICY, tiny.weights(), tokenizer)
    with pytest.raises(
        ValueError, match=r"policy: the tokenizer has \d{3} tokens.*vocab_size = 64"
    ):
        weights.read_config_and_tokenizer(tmp_path / "policy")


def test_config_and_tokenizer_are_read_without_weights(tmp_path) -> None:
    tokenizer = tokenizers.train(["the cat sat on the mat"] * 5, 300)
    policy = dataclasses.replace(tiny.POLICY, vocab_size=tokenizer.vocab_size)
    weights.save(tmp_path, policy, tiny.weights(policy), tokenizer)
    (tmp_path / files.SINGLE).unlink()
    config, loaded_tokenizer = weights.read_config_and_tokenizer(tmp_path)
    assert config == policy and loaded_tokenizer.vocab_size == tokenizer.vocab_size
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json: not there$"):
        weights.read_config_and_tokenizer(tmp_path)


def test_folder_of_adapters_or_of_pickled_weights_has_a_remedy(tmp_path) -> None:
    weights.save(tmp_path / "policy", tiny.POLICY, tiny.weights())
    (tmp_path / "policy" / files.SINGLE).rename(tmp_path / "policy" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"must be converted from pytorch_model\.bin"):
        weights.load(tmp_path / "policy")
    adapted = dataclasses.replace(tiny.POLICY, lora=LoraConfig(2))
    lora.save(tmp_path / "adapters", adapted, tiny.weights(adapted))
    with pytest.raises(FileNotFoundError, match=r"has adapters alone, and must be their base"):
        weights.load(tmp_path / "adapters")
