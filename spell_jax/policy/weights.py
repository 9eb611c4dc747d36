"""Hugging Face folders in and out: one table, read in both directions."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig

WEIGHTS_FILE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter: its Hugging Face name, and its shape there for one layer.

    HF linear layers are stored [out, in], ours are `transposed` and unflattened. `layered`
    parameters have one HF tensor a layer ("{}" in the name) and a leading layer axis here.
    """

    name: str
    theirs: Callable[[PolicyConfig], tuple[int, ...]]
    transposed: bool = False

    @property
    def layered(self) -> bool:
        return "{}" in self.name


def _linear(name: str, out: Callable[[PolicyConfig], int], into: Callable[[PolicyConfig], int]):
    return Entry(name, lambda c: (out(c), into(c)), transposed=True)


def _vector(name: str, size: Callable[[PolicyConfig], int]):
    return Entry(name, lambda c: (size(c),))


def _queries(c: PolicyConfig) -> int:
    return c.heads * c.head_size


def _keys(c: PolicyConfig) -> int:
    return c.kv_heads * c.head_size


# Our parameter path -> Hugging Face tensor (Qwen2).
TABLE: dict[str, Entry] = {
    "embedding": Entry("model.embed_tokens.weight", lambda c: (c.vocab_size, c.width)),
    "unembedding": Entry("lm_head.weight", lambda c: (c.vocab_size, c.width)),
    "final_norm/scale": _vector("model.norm.weight", lambda c: c.width),
    **{
        f"layers/{ours}": dataclasses.replace(entry, name="model.layers.{}." + entry.name)
        for ours, entry in {
            "attention_norm/scale": _vector("input_layernorm.weight", lambda c: c.width),
            "mlp_norm/scale": _vector("post_attention_layernorm.weight", lambda c: c.width),
            "attention/q_kernel": _linear("self_attn.q_proj.weight", _queries, lambda c: c.width),
            "attention/k_kernel": _linear("self_attn.k_proj.weight", _keys, lambda c: c.width),
            "attention/v_kernel": _linear("self_attn.v_proj.weight", _keys, lambda c: c.width),
            "attention/o_kernel": _linear("self_attn.o_proj.weight", lambda c: c.width, _queries),
            "attention/q_bias": _vector("self_attn.q_proj.bias", _queries),
            "attention/k_bias": _vector("self_attn.k_proj.bias", _keys),
            "attention/v_bias": _vector("self_attn.v_proj.bias", _keys),
            "mlp/gate_kernel": _linear(
                "mlp.gate_proj.weight", lambda c: c.feed_forward, lambda c: c.width
            ),
            "mlp/up_kernel": _linear(
                "mlp.up_proj.weight", lambda c: c.feed_forward, lambda c: c.width
            ),
            "mlp/down_kernel": _linear(
                "mlp.down_proj.weight", lambda c: c.width, lambda c: c.feed_forward
            ),
        }.items()
    },
}


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "/".join(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def load(folder: str | pathlib.Path) -> tuple[PolicyConfig, transformer.Params]:
    """Reads config.json and model.safetensors of a Hugging Face folder.

    Returns:
      The architecture and float32 numpy parameters.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a tensor is unknown, missing or wrongly shaped, or the file is damaged; the
        message names tensor and file.
    """
    folder = pathlib.Path(folder)
    for name in ("config.json", WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not there")
    config = PolicyConfig.from_hf(folder / "config.json")
    path = folder / WEIGHTS_FILE
    try:
        tensors = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from error
    shapes = _flatten(transformer.abstract_params(config)[0])
    flat = {}
    for ours, shape in shapes.items():
        flat[ours] = _read(TABLE[ours], shape.shape, config, tensors, path)
    if tensors:
        raise ValueError(f"{path}: unknown tensor {min(tensors)}")
    return config, _unflatten(flat)


def load_policy(
    folder: str | pathlib.Path,
) -> tuple[PolicyConfig, transformer.Params, tokenizers.Tokenizer]:
    """Architecture, float32 numpy parameters and tokenizer of a Hugging Face folder.

    Raises:
      FileNotFoundError, ValueError: as `load` and `tokenizer.load`; or the tokenizer has more
        tokens than the embedding has rows.
    """
    config, params = load(folder)
    tokenizer = tokenizers.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but config.json says "
            f"vocab_size = {config.vocab_size}"
        )
    return config, params, tokenizer


def _read(entry: Entry, shape, config: PolicyConfig, tensors: dict, path) -> np.ndarray:
    layers = []
    for layer in range(config.layers if entry.layered else 1):
        name = entry.name.format(layer)
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name} is missing")
        tensor = tensors.pop(name).astype(np.float32)
        if tensor.shape != entry.theirs(config):
            raise ValueError(
                f"{path}: tensor {name} has shape {tensor.shape}, needs {entry.theirs(config)}"
            )
        layers.append(tensor.T if entry.transposed else tensor)
    value = np.stack(layers) if entry.layered else layers[0]
    return np.ascontiguousarray(value.reshape(shape))


def save(
    folder: str | pathlib.Path,
    config: PolicyConfig,
    params: transformer.Params,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> None:
    """Writes a Hugging Face folder: config.json, model.safetensors (float32), tokenizer files.

    The folder appears whole or not at all; one that is there is replaced.

    Raises:
      ValueError: the architecture has no Hugging Face form; nothing is written.
    """
    description = json.dumps(config.to_hf(), indent=2) + "\n"
    folder = pathlib.Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for ours, value in _flatten(jax.device_get(params)).items():
        entry = TABLE[ours]
        value = np.asarray(value, np.float32)
        for layer, part in enumerate(value if entry.layered else [value]):
            shape = entry.theirs(config)
            part = part.reshape(shape[::-1]).T if entry.transposed else part.reshape(shape)
            tensors[entry.name.format(layer)] = np.ascontiguousarray(part)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    scratch.chmod(0o755)
    safetensors.numpy.save_file(tensors, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
    (scratch / "config.json").write_text(description)
    if tokenizer is not None:
        tokenizer.save(scratch)
        generation = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        (scratch / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    old = scratch.with_name(scratch.name + "-old")
    if folder.exists():
        folder.rename(old)
    scratch.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
