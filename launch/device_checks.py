"""Checks of a run's devices for launch.check: meshes that fit, and programs that fit memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spell_jax.launch import topologies
from spell_jax.launch.memory_plan import SAMPLING, MemoryPlan
from spell_jax.launch.topologies import GIB
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config
from spell_jax.sampler import kv_cache

NO_TOPOLOGY = "no topology given"  # name of the fewest devices that a mesh can use


def find_topology(name: str, memory_gib: float, mesh: Mapping[str, Any]) -> topologies.Topology:
    """Find devices as topologies.find; "" means the fewest devices that the mesh can use."""
    if name:
        return topologies.find(name, memory_gib)
    if memory_gib:
        raise ValueError(
            f"memory_gib = {memory_gib:g}: must not be given without topology = 'gpu:N' or 'cpu:N'"
        )
    count, hosts = _fewest_devices(mesh)
    memory = topologies.ANY_MEMORY
    return topologies.Topology(NO_TOPOLOGY, "", count, (count,), memory, "", count // hosts)


def _fewest_devices(mesh: Mapping[str, Any]) -> tuple[int, int]:
    """Return the fewest devices that a section of meshes can use, and their hosts."""
    training, rollout_devices = _product(mesh), mesh.get("rollout_devices", 0)
    if not (isinstance(rollout_devices, int) and rollout_devices > 0):
        return training, 1
    hosts = -(-_product(mesh.get("rollout", {})) // rollout_devices)
    return hosts * (rollout_devices + -(-training // hosts)), hosts


def _product(axes: Mapping[str, Any]) -> int:
    sizes = [axes.get(axis, 1) for axis in meshes.AXES]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def check_heads(policy: PolicyConfig, mesh: Any, field: str) -> None:
    """Raise ValueError if a mesh cannot split the policy's heads; `field` is the mesh's section."""
    count = mesh.shape[meshes.TENSOR]
    if count > 1 and kv_cache.head_split(mesh, policy.heads, policy.kv_heads)[0] is None:
        raise ValueError(
            f"{field}.tensor = {count}: must divide the policy's {policy.heads} heads, and divide "
            f"or be a multiple of its {policy.kv_heads} key heads; else each device attends with "
            "all"
        )


def check_experts(policy: PolicyConfig, mesh: Any, field: str) -> None:
    """Raise ValueError if a mesh cannot split the policy's experts; as check_heads."""
    count, field = mesh.shape[meshes.EXPERT], f"{field}.expert"
    if count > 1 and not policy.experts:
        problem = "must be 1, the policy has no experts (fsdp splits rows and weights)"
        raise ValueError(f"{field} = {count}: {problem}")
    if policy.experts % count:
        raise ValueError(f"{field} = {count}: must divide the policy's {policy.experts} experts")


def replicated_weights(policy: PolicyConfig, run_meshes: topologies.Meshes) -> list[str]:
    """Return a remark for each mesh with axes that cannot split the width of the weights."""
    remarks = []
    for field, mesh in run_meshes.by_field().items():
        fsdp, context = (mesh.shape[axis] for axis in meshes.EMBED)
        if policy.width % (fsdp * context):
            remarks.append(
                f"{field}.fsdp = {fsdp}: times {field}.context = {context} does not divide the "
                f"policy's width, {policy.width}, so each device holds whole weights; "
                f"{field}.data splits rows without this"
            )
    return remarks


# Part of memory (memory_plan.PARTS) -> field, and the change of the field that saves memory. Used
# for the largest part of the program that takes the most memory.
_SMALLER = {
    "weights": ("mesh.fsdp", "more, or mesh.context or mesh.tensor, or policy.base_dtype 'int8'"),
    "masters": ("mesh.fsdp", "more, or mesh.context, or policy.lora_rank above 0"),
    "optimizer": ("optimizer.offload", "True"),
    "gradients": ("mesh.fsdp", "more, or mesh.context, or policy.lora_rank above 0"),
    "activations": ("packing.token_budget", "less, or mesh.context more, or policy.remat more"),
    "KV cache": ("sampler.kv_cache_tokens", "less, or sampler.cache_dtype 'int8'"),
    "logits": ("mesh.tensor", "more, or mesh.context"),
}
# The same for programs of sampling devices of their own.
_SMALLER_SAMPLING = {
    "weights": ("mesh.rollout.fsdp", "more, with more mesh.rollout_devices, or less staleness"),
    "activations": ("sampler.prefill_tokens", "less, or mesh.rollout.context more"),
    "KV cache": _SMALLER["KV cache"],
    "logits": ("sampler.slots", "less, or mesh.rollout.tensor more"),
}


def check_memory(memory: MemoryPlan) -> None:
    """Raise ValueError with a remedy if a program takes more memory than a device has."""
    if memory.fits:
        return
    worst, topology = memory.worst, memory.topology
    part = max(worst.parts, key=lambda name: worst.parts[name])
    is_sampling = memory.programs.meshes.are_split and worst.program in SAMPLING
    field, change = (_SMALLER_SAMPLING if is_sampling else _SMALLER)[part]
    remarks = replicated_weights(memory.policy, memory.programs.meshes)
    whole_weights = [f"; {remark}" for remark in remarks]
    total, largest, limit = (n / GIB for n in (worst.total, worst.parts[part], topology.hbm))
    raise ValueError(
        f"{with_value(memory.config, field)}: {worst.program} takes {total:.2f} GiB of a chip, "
        f"{largest:.2f} of them {part}, but {topology.name} has {limit:.2f}; must be {change}, or "
        "a larger slice (python -m launch.plan tries such changes)" + "".join(whole_weights)
    )


def with_value(config: Config, field: str) -> str:
    """Format a field as "dotted.name = value", and a section as its name alone."""
    value = config
    for name in field.split("."):
        value = value.get(name, {})
    return field if hasattr(value, "items") else f"{field} = {value!r}"
