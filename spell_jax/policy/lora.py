"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): x W + x A B * alpha / rank.

Next to NAME_kernel [*into, *out] of an adapted layer, transformer.py declares NAME_lora_a
[*into, R], random, and NAME_lora_b [R, *out], zero, so that the policy starts as its base model.
Only adapters have gradients and optimizer state, and only they are in checkpoints. `save` and
`load` write and read them in PEFT's format.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spell_jax.policy import int8, transformer
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.policy.families import MULTIMODAL
from spell_jax.policy.formats import safetensors as files
from spell_jax.runtime.files.jsonl import read_json, write_json
from spell_jax.runtime.hosts import distributed

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
# Fields of PEFT's config that change what adapters compute, and that `load` refuses unless they are
# empty, false or "none".
_UNSUPPORTED = (
    *("alpha_pattern", "bias", "corda_config", "eva_config", "fan_in_fan_out", "layers_pattern"),
    *("layers_to_transform", "lora_bias", "modules_to_save", "rank_pattern", "target_parameters"),
    *("trainable_token_indices", "use_dora", "use_rslora"),
)
_NUMBERED = re.compile(r"base_model\.model\.(?:[\w.]+\.)?layers\.(\d+)\.(.+)\.lora_([AB])\.weight")


def split(config: PolicyConfig, params: Any) -> tuple[Any, Any]:
    """Separate the trained from the frozen leaves of a tree of parameters, shapes or shardings.

    Returns (adapters, all other leaves); without `config.lora`, (the whole tree, {}).
    """
    if config.lora is None:
        return params, {}
    trained, frozen = {}, {}
    for path, value in flatten_dict(params).items():
        (trained if path[-1].endswith(("_lora_a", "_lora_b")) else frozen)[path] = value
    return unflatten_dict(trained), unflatten_dict(frozen)


def join(trained: Any, frozen: Any) -> Any:
    """Join the two trees from `split`."""
    return unflatten_dict(flatten_dict(frozen) | flatten_dict(trained))


def merge(config: PolicyConfig, params: Any) -> tuple[PolicyConfig, Any]:
    """Add the adapters to their kernels, in float32: the same function without adapters.

    An int8 base is dequantized to float32. Returns a config without `lora`, and parameters without
    adapters and scales.
    """
    plain = dataclasses.replace(config, lora=None)
    flat = flatten_dict(params, sep="/")
    left = [path for path in flat if not path.endswith(("_lora_a", "_lora_b", "_scale"))]
    merged = {path: merged_part(config, flat, path) for path in left}
    return plain, unflatten_dict(merged, sep="/")


def merged_part(config: PolicyConfig, flat: Mapping[str, Any], path: str, layer: Any = None) -> Any:
    """Return the parameter at `path` of the result of `merge`, or one layer of it.

    `flat` has the parameters before the merge, by path.
    """
    stem = path.removesuffix("_kernel")
    changes = [flat.get(f"{stem}_{name}") for name in ("scale", "lora_a", "lora_b")]
    if config.lora is None or not any(change is not None for change in changes):
        return flat[path] if layer is None else flat[path][layer]
    # With an axis of layers, of length 1 for one layer.
    part = slice(None) if layer is None else slice(layer, layer + 1)
    kernel, *changes = (None if x is None else x[part] for x in (flat[path], *changes))
    result = _merge(path, config.lora.scale, kernel, *changes)
    return result if layer is None else result[0]


@functools.partial(jax.jit, static_argnums=0)
def _merge(path: str, factor: float, kernel: Any, scale: Any, a: Any, b: Any) -> jax.Array:
    """Return kernel [L, *into, *out] * scale + A [L, *into, R] B [L, R, *out] * factor, in float32.

    Without a scale, or without A and B, that part is left out.
    """
    # In float32: a bfloat16 kernel would round most of a small update away.
    wide = kernel.astype(jnp.float32) if scale is None else int8.dequantize(path, kernel, scale)
    if a is None:
        return wide
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, axes=1))
    return wide + product(a.astype(jnp.float32), b.astype(jnp.float32)) * factor


def save(
    folder: str | os.PathLike[str],
    config: PolicyConfig,
    params: Any,
    base: str = "",
    base_type: str = "",
    revision: str = "",
) -> None:
    """Write the adapters as PEFT's adapter_model.safetensors and adapter_config.json.

    With several hosts, every process must call this; process 0 writes. An existing folder is
    replaced, see safetensors.replacing. Other parameters are ignored. `base` names the base model
    for users of the adapters: a folder, or OWNER/NAME of the Hub at `revision` ("": its main
    branch). `base_type` is the model type in its config.json.
    """
    assert config.lora is not None
    adapters, _ = split(config, params)
    # PEFT matches the ends of module names, so layer numbers and `self_attn` are left out.
    targets = sorted({name.split(".")[-1] for name in config.lora_targets.values()})
    layers = "model.layers"
    if base_type == MULTIMODAL:
        # Whole names, because the model of images has modules with the same ends.
        layers = "model.language_model.layers"
        targets = rf"{re.escape(layers)}\..*\.({'|'.join(targets)})"
    tensors = {}
    for path, name in config.lora_targets.items():
        module, ours = path.split("/")
        for x, letter in (("a", "A"), ("b", "B")):
            value = distributed.fetch_global(adapters["layers"][module][f"{ours}_lora_{x}"])
            for layer, part in enumerate(value.astype(np.float32)):
                # PEFT stores A [R, in] and B [out, R], the layout of torch linear layers.
                flat = part.reshape(-1, part.shape[-1]) if x == "a" else part.reshape(len(part), -1)
                key = f"base_model.model.{layers}.{layer}.{name}.lora_{letter}.weight"
                tensors[key] = np.ascontiguousarray(flat.T)
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    with distributed.fail_together():
        if jax.process_index() == 0:
            with files.replacing(folder) as scratch:
                write_json(scratch / CONFIG_FILE, description, indent=2)
                files.save_file(tensors, scratch / WEIGHTS_FILE)


def load(folder: str | os.PathLike[str], config: PolicyConfig) -> tuple[PolicyConfig, Any]:
    """Read adapters in PEFT's format for a policy without adapters.

    Returns `config` with the rank and alpha of the adapters, and the adapters as float32 numpy
    arrays, by path as in flatten_dict(params, sep="/"); linear layers without adapters are absent.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is damaged, the adapters are of another kind than LoRA of linear layers,
        or they do not fit the policy.
    """
    folder = pathlib.Path(folder)
    place = folder / CONFIG_FILE
    if not place.is_file():
        raise FileNotFoundError(
            f"{place}: not there; must be a folder of adapters in PEFT's format"
        )
    fields: Any = read_json(place)
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise ValueError(f"{place}: peft_type must be LORA")
    for name in _UNSUPPORTED:
        if fields.get(name) and fields[name] != "none":
            raise ValueError(f"{place}: {name} = {fields[name]!r}: not supported, must be absent")
    rank: Any = fields.get("r")
    alpha: Any = fields.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not alpha > 0:
        raise ValueError(f"{place}: r = {rank!r} and lora_alpha = {alpha!r}: must be above 0")
    adapted = dataclasses.replace(config, lora=LoraConfig(rank, float(alpha)))
    shapes: dict[str, Any] = flatten_dict(transformer.abstract_params(adapted)[0], sep="/")
    paths = {hf: f"layers/{path}" for path, hf in adapted.lora_targets.items()}
    return adapted, _read_adapters(folder / WEIGHTS_FILE, paths, shapes)


def _read_adapters(
    file: pathlib.Path, paths: Mapping[str, str], shapes: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Read a file of adapters.

    `paths` maps the names of linear layers to their paths, `shapes` the paths of parameters to
    their shapes.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not there")
    arrays: dict[str, np.ndarray] = {}
    layers: dict[str, set[int]] = {}
    for tensor in files.read_header(file):
        match = _NUMBERED.fullmatch(tensor.name)
        if not match or match[2] not in paths:
            raise ValueError(f"{tensor}: the policy has no such layer with adapters")
        path = f"{paths[match[2]]}_lora_{match[3].lower()}"
        shape, layer = shapes[path].shape, int(match[1])
        # PEFT stores A [R, in] and B [out, R]; in and out may have two axes here.
        ours = (*shape[1:-1], shape[-1]) if match[3] == "A" else shape[1:]
        inner = (-1, shape[-1]) if match[3] == "A" else (shape[1], -1)
        expected = np.empty(ours, np.bool).reshape(inner).T.shape
        if layer >= shape[0] or tensor.shape != expected:
            raise ValueError(
                f"{tensor} has shape {tensor.shape}, needs {expected}, in a layer below {shape[0]}"
            )
        value = tensor.read(tuple(slice(0, size) for size in tensor.shape)).astype(np.float32)
        if not np.isfinite(value).all():
            raise ValueError(f"{tensor} has values that are not finite")
        arrays.setdefault(path, np.zeros(shape, np.float32))[layer] = value.T.reshape(ours)
        layers.setdefault(path, set()).add(layer)
    for path, array in arrays.items():
        partner = path[:-1] + ("b" if path.endswith("a") else "a")
        if layers.get(partner) != layers[path] or len(layers[path]) != len(array):
            raise ValueError(f"{file}: {path}: must be there in all layers, A and B")
    if not arrays:
        raise ValueError(f"{file}: has no adapters")
    return arrays


def add(config: PolicyConfig, params: Any, adapters: Mapping[str, np.ndarray]) -> Any:
    """Add adapters from `load`, and their config, to the kernels of a policy without adapters.

    The sum is computed in float32, one kernel at a time, and rounded to the kernel's dtype.
    """
    assert config.lora is not None
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    for path in [path for path in adapters if path.endswith("_lora_a")]:
        stem = path.removesuffix("_lora_a")
        kernel, factors = flat[f"{stem}_kernel"], (adapters[path], adapters[f"{stem}_lora_b"])
        wide = _merge(f"{stem}_kernel", config.lora.scale, kernel, None, *factors)
        flat[f"{stem}_kernel"] = jax.device_put(wide.astype(kernel.dtype), kernel.sharding)
    return unflatten_dict(flat, sep="/")
