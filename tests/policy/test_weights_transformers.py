"""Tests of weight folders that transformers writes and reads, for every family."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spell_jax.policy import weights
from spell_jax.policy.formats import safetensors as files
from tests.policy import families
from tests.policy.test_weights import assert_same_bits, read_tensors

transformers = pytest.importorskip("transformers", reason=families.REASON)
every_family = pytest.mark.parametrize("family", families.FAMILIES)


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("shard_size", ["5KB", "1GB"])
def test_transformers_folder_round_trip_is_bit_identical(family, shard_size, tmp_path) -> None:
    model = families.make(family)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    assert (tmp_path / "theirs" / files.INDEX).exists() == (shard_size == "5KB")
    config, params = weights.load(tmp_path / "theirs")
    weights.save(tmp_path / "ours", config, params, shard_bytes=20_000)
    expected_tensors, tensors = (read_tensors(tmp_path / name) for name in ("theirs", "ours"))
    assert tensors.keys() == expected_tensors.keys()
    assert_same_bits(tensors, expected_tensors)
    assert_same_bits(weights.load(tmp_path / "ours")[1], params)


@every_family
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_saved_folders(family, dtype, tmp_path) -> None:
    torch = pytest.importorskip("torch", reason=families.REASON)
    model = families.save(family, tmp_path / "theirs")
    config, params = weights.load(tmp_path / "theirs")
    weights.save(tmp_path / "ours", config, params, dtype=dtype, shard_bytes=20_000)
    reloaded_model, report = type(model).from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not report[kind], report
    tensors, expected_tensors = reloaded_model.state_dict(), model.state_dict()
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected_tensors[name].to(tensor.dtype)), name


def test_bfloat16_transformers_folder_round_trip(tmp_path) -> None:
    model = families.make("qwen3_moe").bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    config, params = weights.load(tmp_path, dtype="bfloat16")
    weights.save(tmp_path / "ours", config, params, dtype="bfloat16")
    assert_same_bits(read_tensors(tmp_path / "ours"), read_tensors(tmp_path))
    header = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert header["torch_dtype"] == "bfloat16"
    assert np.isfinite(params["embedding"].astype(np.float32)).all()
