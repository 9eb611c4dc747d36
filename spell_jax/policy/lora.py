"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): x W + x A B * alpha / rank.

Next to NAME_kernel [*into, *out] of an adapted layer, transformer.py declares NAME_lora_a
[*into, R], random, and NAME_lora_b [R, *out], zero, so that the policy starts as its base model.
Only adapters have gradients and optimizer state, and only they are in checkpoints.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import safetensors as files
from spell_jax.runtime.files.jsonl import write_json
from spell_jax.runtime.hosts import distributed


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

    Returns a config without `lora`, and parameters without adapters.
    """
    if config.lora is None:
        return config, params
    adapters, merged = split(config, params)
    for module, name in (path.split("/") for path in config.lora_targets):
        a, b = (adapters["layers"][module][f"{name}_lora_{x}"] for x in "ab")
        kernels = merged["layers"][module]
        kernels[f"{name}_kernel"] = _add_product(kernels[f"{name}_kernel"], a, b, config.lora.scale)
    return dataclasses.replace(config, lora=None), merged


@jax.jit
def _add_product(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Add A [L, *into, R] B [L, R, *out] * scale to a kernel [L, *into, *out], in float32."""
    # Layer by layer, in float32: a bfloat16 kernel would round most of a small update away.
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, axes=1))
    update = product(a.astype(jnp.float32), b.astype(jnp.float32))
    return kernel.astype(jnp.float32) + update * scale


def save(folder: str | os.PathLike[str], config: PolicyConfig, params: Any, base: str = "") -> None:
    """Write the adapters as PEFT's adapter_model.safetensors and adapter_config.json.

    With several hosts, every process must call this; process 0 writes. An existing folder is
    replaced, see safetensors.replacing. Other parameters are ignored. `base` names the base model
    for users of the adapters.
    """
    assert config.lora is not None
    adapters, _ = split(config, params)
    tensors = {}
    for path, name in config.lora_targets.items():
        module, ours = path.split("/")
        for x, letter in (("a", "A"), ("b", "B")):
            value = distributed.fetch_global(adapters["layers"][module][f"{ours}_lora_{x}"])
            for layer, part in enumerate(value.astype(np.float32)):
                # PEFT stores A [R, in] and B [out, R], the layout of torch linear layers.
                flat = part.reshape(-1, part.shape[-1]) if x == "a" else part.reshape(len(part), -1)
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{letter}.weight"
                tensors[key] = np.ascontiguousarray(flat.T)
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        # PEFT matches the ends of module names, so layer numbers and `self_attn` are left out.
        "target_modules": sorted({name.split(".")[-1] for name in config.lora_targets.values()}),
        "inference_mode": True,
    }
    with distributed.fail_together():
        if jax.process_index() == 0:
            with files.replacing(folder) as scratch:
                write_json(scratch / "adapter_config.json", description, indent=2)
                files.save_file(tensors, scratch / "adapter_model.safetensors")
