"""Tests of launch/memory_plan.py and plan.py: exact resident memory, peaks near the compiler's."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from spell_jax.configs import paper
from spell_jax.launch import aot, plan, topologies
from spell_jax.launch.memory_plan import PARTS, SAMPLING, MemoryPlan, arguments_and_resident
from spell_jax.launch.topologies import GIB
from spell_jax.learner import packing
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import flat
from tests import noise
from tests.paths import ROOT

DOCS = ROOT / "docs" / "long_context.md"
QWEN = PolicyConfig(152_064, 3584, 28, 28, 4, 128, 18_944, tied_embeddings=False)
EXPERTS: dict[str, Any] = {"experts": 128, "experts_per_token": 8, "qkv_bias": False}
POLICIES = {
    "Qwen2.5-7B": ("qwen2.5-7b-instruct", QWEN),
    "Qwen2.5-32B": (
        "qwen2.5-32b-instruct",
        dataclasses.replace(QWEN, width=5120, layers=64, heads=40, kv_heads=8, feed_forward=27_648),
    ),
    "Qwen3-30B-A3B": (
        "qwen3-30b-a3b-instruct",
        PolicyConfig(
            151_936, 2048, 48, 32, 4, 128, 768, qk_norm=True, tied_embeddings=False, **EXPERTS
        ),
    ),
}
LENGTHS = {"16K": 16_384, "128K": 131_072, "1M": 1_048_576}
PROGRAMS = ("prefill", "decode", "logprob", "accumulate", "apply")


def _rows() -> list[list[str]]:
    """Read the rows of the documented table of compiled programs."""
    text = re.sub(r"<!--.*?-->", "", DOCS.read_text())  # names of measured numbers
    lines = [line for line in text.splitlines() if re.match(r"\| Qwen.*\| v\d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _plan(name: str, prompt: str, topology: str, changes: str, **fields: Any) -> MemoryPlan:
    """Plan the memory of a table row; `changes` are like "mesh.context=16 policy.ring=True"."""
    model, policy = POLICIES[name]
    config = paper.get_config(model)
    options = dict(change.split("=") for change in changes.split())
    ring = options.pop("policy.ring", "") == "True"
    sizes = {field: int(value) for field, value in options.items()}
    noise.with_fields(config, {"mesh.fsdp": 1, **sizes, "policy.ring": ring, **fields})
    policy = dataclasses.replace(
        policy,
        max_positions=2**21,
        ring=ring,
        remat=config.policy.remat,
    )
    return MemoryPlan(config, policy, topologies.find(topology), LENGTHS[prompt])


@pytest.mark.parametrize("row", _rows(), ids=lambda row: " ".join(row[:3]))
def test_planned_peak_memory_is_within_25_percent_of_compiled(row: list[str]) -> None:
    name, prompt, topology, changes, *cells = row
    memory_plan = _plan(name, prompt, topology, changes.strip("`"))
    assert [need.program for need in memory_plan.needs] == list(PROGRAMS)
    for need, cell in zip(memory_plan.needs, cells, strict=True):
        peak, resident = (float(number) for number in cell.split(" + "))
        assert need.resident / GIB == pytest.approx(resident, abs=0.006), need.program
        planned_peak = (need.total - need.resident) / GIB
        assert planned_peak == pytest.approx(peak, rel=0.25), need.program
    assert memory_plan.fits


def test_documented_table_covers_required_policies_and_slices() -> None:
    assert {tuple(row[:3]) for row in _rows()} >= {
        ("Qwen2.5-7B", "16K", "v5e-16"),
        ("Qwen2.5-7B", "128K", "v5e-16"),
        ("Qwen2.5-7B", "128K", "v5p-32"),
        ("Qwen2.5-32B", "128K", "v5p-64"),
        ("Qwen3-30B-A3B", "128K", "v5e-64"),
        ("Qwen3-30B-A3B", "128K", "v5p-32"),
        ("Qwen2.5-7B", "1M", "v5p-128"),
    }


SPLIT = {"mesh.rollout_devices": 2, "mesh.rollout.tensor": 4, "staleness": 2, "mesh.fsdp": -1}


@pytest.mark.parametrize("fields", [{"mesh.context": 4, "staleness": 1}, SPLIT])
def test_parts_count_arguments_and_resident_memory_once(fields: dict[str, Any]) -> None:
    memory_plan = _plan("Qwen2.5-7B", "16K", "v5p-32", "", **{"mesh.fsdp": -1} | fields)
    for program in memory_plan.programs.select("all"):
        program_parts = arguments_and_resident(memory_plan.programs, program)
        arguments = aot.bytes_per_chip(program.arguments)
        assert sum(program_parts.values()) == arguments + program.resident, program.name


def test_chips_of_a_split_run_hold_their_own_part() -> None:
    memory_plan = _plan("Qwen2.5-7B", "16K", "v5p-32", "", **SPLIT)
    needs = {need.program: need for need in memory_plan.needs}
    assert list(needs) == [*PROGRAMS, "transfer"]
    for name in SAMPLING:
        assert not any(needs[name].parts[part] for part in ("masters", "optimizer", "gradients"))
    # Three sets of weights, and one if they are overwritten.
    three_sets = needs["decode"].parts["weights"]
    in_place = memory_plan.changed({"mesh.transfer": "in_place", "staleness": 1})
    assert three_sets == 3 * in_place.needs[1].parts["weights"] > 0
    assert not needs["accumulate"].parts["KV cache"]
    # Copies over the old weights happen when the update has its weights and gradients.
    in_place_need, transfer = in_place.needs[-1], needs["transfer"]
    cast = aot.bytes_per_chip(memory_plan.programs.trained)
    assert transfer.parts["weights"] == cast and in_place_need.parts["weights"] == 2 * cast
    assert in_place_need.parts["gradients"] > 0 == transfer.parts["gradients"]
    assert 0 < transfer.parts["activations"] <= 2 * 256 * 2**20
    rows = [line.split()[0] for line in plan.table(memory_plan).splitlines()[1:]]
    assert rows == [*PROGRAMS, "transfer"]


def test_batches_and_changes_of_a_split_run_are_of_its_meshes() -> None:
    pool = {"sampler.kv_cache_tokens": 2**25}
    memory_plan = _plan("Qwen2.5-7B", "16K", "v5p-32", "", **SPLIT | pool)
    assert not memory_plan.fits and memory_plan.worst.program in SAMPLING
    helpful = dict(memory_plan.helpful())
    for flags in (
        "--config.staleness=1",
        "--config.mesh.transfer=in_place --config.staleness=1",
        "--config.sampler.kv_cache_tokens=98304",
    ):
        assert helpful[flags].worst.total < memory_plan.worst.total, flags
    assert not any("--config.mesh.context" in flags for flags in helpful)  # of the training mesh


@pytest.mark.slow
def test_largest_batches_of_a_split_run_divide_over_their_own_meshes() -> None:
    """A prompt with its answers on each of two parts of the sampling mesh; eight training rows."""
    row = 16_384 + 8 * 4096
    largest = _plan("Qwen2.5-7B", "16K", "v5p-32", "", **SPLIT).largest()
    assert largest["sampler.kv_cache_tokens"] % (2 * row) == 0
    assert largest["packing.token_budget"] % (8 * row) == 0


@pytest.mark.slow
def test_arguments_and_resident_memory_are_exact() -> None:
    """The parts count every argument of every program exactly once."""
    memory_plan = _plan("Qwen2.5-7B", "16K", "v5e-16", "mesh.context=8 mesh.fsdp=2")
    for program in memory_plan.programs.select("all"):
        program_parts = arguments_and_resident(memory_plan.programs, program)
        arguments = aot.bytes_per_chip(program.arguments)
        assert sum(program_parts.values()) == arguments + program.resident, program.name
    state = memory_plan.programs.state
    parts = {need.program: need.parts for need in memory_plan.needs}
    assert parts["prefill"]["masters"] == aot.bytes_per_chip(state.params)
    masters = aot.bytes_per_chip(state.params)
    assert parts["accumulate"]["gradients"] == pytest.approx(1.5 * masters, rel=1e-6)
    assert parts["apply"]["gradients"] == aot.bytes_per_chip(state.params)


def test_oversized_plan_suggests_config_changes() -> None:
    pool = {"sampler.kv_cache_tokens": 2**21}
    memory_plan = _plan("Qwen2.5-7B", "128K", "v5e-16", "mesh.fsdp=8 mesh.context=2", **pool)
    assert not memory_plan.fits
    before = memory_plan.config.to_dict()
    helpful = dict(memory_plan.helpful())
    assert memory_plan.config.to_dict() == before, "one change at a time"
    moved = helpful["--config.mesh.fsdp=1 --config.mesh.context=16"]
    assert moved.fits and dict(moved.programs.mesh.shape)["context"] == 16
    offloaded = helpful["--config.optimizer.offload=True"]
    masters = memory_plan.needs[3].parts["masters"]
    saved = memory_plan.needs[3].parts["optimizer"] - offloaded.needs[3].parts["optimizer"]
    assert saved == 2 * masters
    # During the weight update the old and the new moments are both in memory.
    assert offloaded.needs[4].total - memory_plan.needs[4].total == pytest.approx(
        2 * masters, rel=1e-6
    )
    assert "too much" in plan.describe_plan(memory_plan) and "fits" in plan.describe_plan(
        memory_plan
    )


def test_changes_that_fit_only_together_are_combined(monkeypatch) -> None:
    small = dataclasses.replace(QWEN, layers=4)
    monkeypatch.setitem(POLICIES, "small", ("qwen2.5-7b-instruct", small))
    pool = {"sampler.kv_cache_tokens": 2**23}
    memory_plan = _plan("small", "16K", "v5e-4", "mesh.fsdp=4", **pool)
    assert not any(tried.fits for _, tried in memory_plan.helpful())
    flags, together = memory_plan.combined()
    assert together.fits and together.config.sampler.kv_cache_tokens < 2**23
    fields = dict(flag.removeprefix("--config.").split("=") for flag in flags.split())
    assert {*fields} >= {"optimizer.offload", "mesh.context"}
    combined = dict(flat(together.config.to_dict()))
    assert {field: str(combined[field]) for field in fields} == fields
    text = plan.describe_plan(memory_plan)
    total = f"{together.worst.total / GIB:.2f}"
    assert text.endswith(f"\n  together ({total}, fits):\n    {flags}\n  or a larger slice")
    on_gpu = plan.describe_plan(_plan("Qwen2.5-7B", "16K", "h100:1", ""))
    assert "is still too much" in on_gpu and on_gpu.endswith("\n  or more devices")


@pytest.mark.slow
def test_largest_batches_fit_and_one_more_row_does_not() -> None:
    memory_plan = _plan("Qwen2.5-7B", "16K", "v5e-16", "mesh.context=8 mesh.fsdp=2")
    assert memory_plan.fits
    largest = memory_plan.largest()
    # A row, or a prompt with its eight answers, on each of two parts of the mesh.
    row = 16_384 + 8 * 4096
    rows = {"packing.token_budget": 2 * row, "sampler.kv_cache_tokens": 2 * row}
    assert set(largest) == set(rows)
    for field, tokens in largest.items():
        assert tokens > 0 and tokens % rows[field] == 0
        bucket = {"packing.buckets": ((49_152, 32_768),)}
        assert memory_plan.changed({field: tokens} | bucket).fits
        assert not memory_plan.changed({field: tokens + rows[field]} | bucket).fits
    assert f"--config.packing.token_budget={largest['packing.token_budget']}" in plan.describe_plan(
        memory_plan
    )


def test_unknown_memory_is_said_and_nothing_is_compared() -> None:
    memory_plan = _plan("Qwen2.5-7B", "16K", "gpu:8", "mesh.fsdp=8")
    text = plan.describe_plan(memory_plan)
    assert memory_plan.fits and "unknown memory" in text
    assert text.endswith("\nHow much memory gpu:8 has is unknown; give --memory_gib=GIB.")


def test_rows_longer_than_the_configured_budget_are_planned() -> None:
    memory_plan = _plan(
        "Qwen2.5-7B", "128K", "v5e-16", "mesh.context=16", **{"packing.token_budget": 51_200}
    )
    assert memory_plan.largest()["packing.token_budget"] % (131_072 + 8 * 4096) == 0


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"policy.remat": "offload"}, "activations"),
        ({"optimizer.offload": True}, "optimizer"),
        ({"policy.ring": True}, "activations"),
    ],
)
def test_memory_saving_fields_reduce_planned_memory(fields: dict[str, Any], part: str) -> None:
    memory_plan = _plan(
        "Qwen2.5-7B", "128K", "v5e-16", "mesh.context=16", **{"policy.remat": "none"}
    )
    changed = memory_plan.changed(fields)
    assert changed.needs[3].parts[part] < memory_plan.needs[3].parts[part]


def test_remat_policies_are_ordered_by_saved_activation_memory() -> None:
    names = ("offload", "block", "attention", "dots", "none")
    memory_plan = _plan("Qwen2.5-7B", "128K", "v5e-16", "mesh.context=16")
    saved_bytes = [
        memory_plan.changed({"policy.remat": name}).needs[3].parts["activations"] for name in names
    ]
    assert saved_bytes == sorted(set(saved_bytes))
    inputs = 28 * 163_840 // 16 * 3584 * 2  # layers, a chip's tokens, their width in bfloat16
    assert saved_bytes[1] - saved_bytes[0] == inputs


def test_adapters_shrink_masters_optimizer_and_gradients() -> None:
    full_plan = _plan("Qwen2.5-7B", "16K", "v5e-16", "mesh.context=16")
    policy = dataclasses.replace(full_plan.policy, lora=LoraConfig(16))
    adapter_plan = MemoryPlan(full_plan.config, policy, full_plan.topology, full_plan.length)
    parts, all_parts = adapter_plan.needs[3].parts, full_plan.needs[3].parts
    for part in ("masters", "optimizer", "gradients"):
        assert 0 < parts[part] < all_parts[part] / 10
    assert parts["weights"] > all_parts["weights"]


def _adapted(topology: str, **fields: Any) -> MemoryPlan:
    """Plan Qwen2.5-7B with adapters over an int8 base, prompts of 16K tokens, on one GPU."""
    config = paper.get_config("qwen2.5-7b-instruct")
    changes = {"mesh.fsdp": 1, "policy.lora_rank": 16, "policy.base_dtype": "int8"}
    noise.with_fields(config, changes | fields)
    policy = dataclasses.replace(QWEN, lora=LoraConfig(16, base_dtype="int8"), remat="block")
    place = topologies.find(topology)
    bucket = packing.Bucket(20_480, 4096)  # a prompt with one answer; other answers get more rows
    return MemoryPlan(config, policy, place, 16_384, bucket)


def test_int8_base_of_a_7b_takes_less_than_8_2_gb() -> None:
    programs = _adapted("l4:1").programs
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18_944
    kernels, outputs = 28 * layer, 28 * (3 * 3584 + 2 * 512 + 2 * 18_944)
    norms, biases = 57 * 3584, 28 * (3584 + 2 * 512)
    tables = 152_064 * (3584 + 4 + 2 * 3584)  # int8 and a scale per token; bfloat16
    expected = kernels + 4 * outputs + 2 * (norms + biases) + tables
    assert aot.bytes_per_chip(programs.frozen) == expected < 8.2e9
    in_bfloat16 = dataclasses.replace(programs.policy, lora=LoraConfig(16))
    plain = aot.RunPrograms(programs.config, in_bfloat16, programs.mesh, 16_384)
    assert aot.bytes_per_chip(plain.frozen) > 15e9
    # Sampler and trainer read the same copy, and a reference adds its adapters alone.
    for name in ("prefill", "decode"):
        weights, *_ = programs.program(name).arguments
        assert aot.bytes_per_chip(weights) == expected + aot.bytes_per_chip(programs.trained)
    with_kl = _adapted("l4:1", **{"loss.kl_weight": 0.1})
    weights = {need.program: need.parts["weights"] for need in with_kl.needs}
    copy = aot.bytes_per_chip(programs.state.params)
    adapters = aot.bytes_per_chip(programs.trained)
    assert weights["accumulate"] == expected + 2 * adapters + copy


@pytest.mark.parametrize(
    ("topology", "fields"),
    [
        ("l4:1", {"packing.token_budget": 20_480, "sampler.kv_cache_tokens": 114_688}),
        ("h100:1", {}),
    ],
)
def test_adapters_of_a_7b_at_16k_tokens_fit_one_gpu(topology: str, fields: dict[str, Any]) -> None:
    memory_plan = _adapted(topology, **fields)
    assert memory_plan.fits
    policy = dataclasses.replace(memory_plan.policy, lora=LoraConfig(16))
    arguments = memory_plan.topology, memory_plan.length, memory_plan.bucket
    plain = MemoryPlan(memory_plan.config, policy, *arguments)
    assert plain.fits == (topology == "h100:1")
    assert plain.worst.total - memory_plan.worst.total > 6 * GIB
    assert "--config.policy.base_dtype=int8" in dict(plain.helpful())


@pytest.mark.slow
def test_command_prints_table_and_sets_exit_status(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN.to_hf()))
    command = [sys.executable, "-m", "launch.plan", "--config=configs/paper.py:qwen2.5-7b-instruct"]
    command += ["--topology=v5e-16", f"--policy={path}"]
    env = os.environ | {"XLA_FLAGS": ""}
    root = ROOT
    processes = [
        subprocess.run([*command, *overrides], capture_output=True, text=True, env=env, cwd=root)
        for overrides in ([], ["--config.mesh.fsdp=1", "--config.mesh.context=16"])
    ]
    assert [process.returncode for process in processes] == [1, 0], processes[0].stderr
    assert "prompts of 16384 tokens" in processes[0].stdout  # the config's cap
    for word in (*PARTS, *PROGRAMS):
        assert word in processes[1].stdout


def test_mesh_that_does_not_match_the_slice_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"mesh = .*: makes 8 devices, but there are 16"):
        _plan("Qwen2.5-7B", "16K", "v5e-16", "mesh.context=8")
    assert meshes.axis_sizes({"fsdp": -1, "context": 2}, 8) == (1, 4, 2, 1, 1)
