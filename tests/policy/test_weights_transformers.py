"""Tests of weight folders that transformers writes and reads, for every family."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from spell_jax.policy import transformer, weights
from spell_jax.policy.formats import safetensors as files
from tests.policy import families
from tests.policy.test_weights import assert_same_bits, read_tensors, write_tensors

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
    reloaded_model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not report[kind], report
    tensors, expected_tensors = reloaded_model.state_dict(), model.state_dict()
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected_tensors[name].to(tensor.dtype)), name
    if dtype == "float32":
        # config.json gives the same function, although some families are written as another.
        ids = torch.arange(2 * 60).reshape(2, 60) % families.VOCAB
        with torch.no_grad():
            assert torch.equal(reloaded_model.eval()(ids).logits, model(ids).logits)


NEW_PREFIXES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


@pytest.mark.slow
@pytest.mark.parametrize("naming", ["old", "new"])
def test_text_part_of_a_multimodal_folder_is_read(naming: str, tmp_path, caplog) -> None:
    """Gemma 3 of 4B and more: old files and new ones name the same tensors differently."""
    torch = pytest.importorskip("torch", reason=families.REASON)
    model = families.with_images(families.make("gemma3"))
    model.save_pretrained(tmp_path)
    tensors = read_tensors(tmp_path)
    assert any(name.startswith("language_model.model.") for name in tensors)
    if naming == "new":
        for old, new in NEW_PREFIXES.items():
            tensors = {
                new + name.removeprefix(old) if name.startswith(old) else name: tensor
                for name, tensor in tensors.items()
            }
        write_tensors(tmp_path, tensors)
    with caplog.at_level("INFO", "spell_jax.policy.weights"):
        policy, params = weights.load(tmp_path)
    images = [name for name in tensors if "language_model" not in name and "lm_head" not in name]
    assert f"left out {len(images)} tensors of the model of images" in caplog.text
    tokens = np.arange(4, 64, dtype=np.int32)[None]
    with torch.no_grad():
        expected_logits = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    logits = jax.jit(transformer.logits, static_argnums=0)(policy, params, tokens)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-4)
    weights.save(tmp_path / "text", policy, params)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert type(ours).__name__ == "Gemma3ForCausalLM"
    with torch.no_grad():
        logits = ours.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits, expected_logits, atol=1e-5)


def test_tensor_of_a_multimodal_folder_is_not_there_twice(tmp_path) -> None:
    families.save("gemma3", tmp_path)
    tensors = read_tensors(tmp_path)
    name = "embed_tokens.weight"
    write_tensors(
        tmp_path, tensors | {f"language_model.model.{name}": tensors[f"model.{name}"].copy()}
    )
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is also there as .*embed_tokens"):
        weights.load(tmp_path)


def test_bfloat16_transformers_folder_round_trip(tmp_path) -> None:
    model = families.make("qwen3_moe").bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    config, params = weights.load(tmp_path, dtype="bfloat16")
    weights.save(tmp_path / "ours", config, params, dtype="bfloat16")
    assert_same_bits(read_tensors(tmp_path / "ours"), read_tensors(tmp_path))
    header = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert header["torch_dtype"] == "bfloat16"
    assert np.isfinite(params["embedding"].astype(np.float32)).all()
