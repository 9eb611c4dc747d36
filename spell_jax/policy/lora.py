"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): x W + x A B * alpha / rank.

1. PolicyConfig.lora says which linear layers have adapters; transformer.py then declares, beside
   NAME_kernel [*into, *out], NAME_lora_a [*into, R] and NAME_lora_b [R, *out]. A begins random, B
   zero, so that the policy begins as its base model.
2. `split` takes a tree of parameters apart into what is trained and what stays as it is. Only the
   trained part has gradients and optimizer state, and is in checkpoints.
3. `merge` adds the adapters to the kernels; `save` writes them alone, as PEFT does.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from spell_jax.policy import safetensors as files
from spell_jax.runtime import distributed
from spell_jax.runtime.jsonl import write_json

if TYPE_CHECKING:
    from spell_jax.policy.config import PolicyConfig

# Our linear layers by the room they are in, with the Hugging Face names that patterns match.
_ROOMS = {
    "attention": {name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    "mlp": {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NAMES = {name: hf for room in _ROOMS.values() for name, hf in room.items()}
_ADAPTER = re.compile(r".*_lora_[ab]")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which linear layers are adapted, and how.

    Attributes:
      rank: R, columns of A and rows of B.
      alpha: A B is scaled by alpha / rank.
      pattern: a regular expression that is searched for in names such as self_attn.q_proj and
        mlp.gate_proj; the layers that it is found in have adapters. Experts have none.
    """

    rank: int = 16
    alpha: float = 32.0
    pattern: str = "_proj"

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora.rank = {self.rank}: must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha = {self.alpha}: must be above 0")
        try:
            re.compile(self.pattern)
        except re.error as error:
            message = f"lora.pattern = {self.pattern!r}: not a regular expression ({error})"
            raise ValueError(message) from error

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the linear layer "q", "k", "v", "o", "gate", "up" or "down" has adapters."""
        return re.search(self.pattern, _NAMES[name]) is not None


def targets(config: PolicyConfig) -> dict[str, str]:
    """Path of each adapted kernel, such as attention/q -> its Hugging Face name.

    Raises:
      ValueError: the pattern is in none of the names.
    """
    rooms = {"attention": _ROOMS["attention"]} if config.experts else _ROOMS
    assert config.lora is not None
    names = [(room, name) for room, layers in rooms.items() for name in layers]
    found = {f"{room}/{name}": _NAMES[name] for room, name in names if config.lora.adapts(name)}
    if not found:
        known = sorted(_NAMES[name] for _, name in names)
        raise ValueError(f"lora.pattern = {config.lora.pattern!r}: is in none of {known}")
    return found


def split(config: PolicyConfig, params: Any) -> tuple[Any, Any]:
    """(what is trained, what stays): everything and nothing, or the adapters and the rest.

    Args:
      config: its `lora` decides.
      params: tree of dicts with parameters, or anything in their places, as leaves.
    """
    if config.lora is None:
        return params, {}
    trained, frozen = {}, {}
    for name, value in params.items():
        if isinstance(value, dict):
            below = split(config, value)
            for tree, part in zip((trained, frozen), below, strict=True):
                if part:
                    tree[name] = part
        else:
            (trained if _ADAPTER.fullmatch(name) else frozen)[name] = value
    return trained, frozen


def join(first: Any, second: Any) -> Any:
    """The tree that `split` took apart."""
    joined = dict(first)
    for name, value in second.items():
        joined[name] = join(joined[name], value) if name in joined else value
    return joined


def merge(config: PolicyConfig, params: Any) -> tuple[PolicyConfig, Any]:
    """The same function without adapters: (config, float32 parameters); as given without any."""
    if config.lora is None:
        return config, params
    adapters, merged = split(config, params)
    for path in targets(config):
        room, name = path.split("/")
        pair = (adapters["layers"][room][f"{name}_lora_{x}"] for x in "ab")
        kernel = merged["layers"][room][f"{name}_kernel"]
        merged["layers"][room][f"{name}_kernel"] = _add(kernel, *pair, config.lora.scale)
    return dataclasses.replace(config, lora=None), merged


@jax.jit
def _add(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Kernel [L, *into, *out] plus A [L, *into, R] B [L, R, *out], float32."""
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, axes=1))
    update = product(a.astype(jnp.float32), b.astype(jnp.float32))
    return kernel.astype(jnp.float32) + update * scale


def save(folder: str | os.PathLike[str], config: PolicyConfig, params: Any, base: str = "") -> None:
    """Writes the adapters alone: adapter_model.safetensors and adapter_config.json of PEFT. Of
    several hosts process 0 writes, but every one calls this.

    Args:
      folder: appears whole or not at all; one that is there is replaced.
      config: has `lora`.
      params: tree with the adapters; other parameters are left out.
      base: the folder or name of the base model, for those who load the adapters.
    """
    assert config.lora is not None
    adapters, _ = split(config, params)
    tensors = {}
    for path, name in targets(config).items():
        room, ours = path.split("/")
        for x, letter in (("a", "A"), ("b", "B")):
            value = distributed.whole(adapters["layers"][room][f"{ours}_lora_{x}"]).astype(
                np.float32
            )
            for layer, part in enumerate(value):
                # PEFT: A [R, in] and B [out, R], as torch's linear layers.
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
        "target_modules": sorted({name.split(".")[-1] for name in targets(config).values()}),
        "inference_mode": True,
    }
    with distributed.fail_together():
        if jax.process_index() == 0:
            with files.replacing(folder) as scratch:
                write_json(scratch / "adapter_config.json", description, indent=2)
                files.save_file(tensors, scratch / "adapter_model.safetensors")
