"""Tests of launch/work.py: operations and bytes equal XLA's cost analysis of the programs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import pytest

from spell_jax.launch import aot
from spell_jax.launch.work import ProgramCounts, Work
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.runtime import mesh as meshes
from tests.launch.test_aot import small_config

DENSE = PolicyConfig(512, 128, 3, 8, 4, 32, 384, tied_embeddings=False, max_positions=4096)
EXPERTS = dataclasses.replace(DENSE, feed_forward=96, experts=8, experts_per_token=2)
SIZES = {
    **{"sampler.slots": 32, "sampler.samples_per_prompt_batch": 4},
    **{"sampler.max_tokens": 16, "sampler.page_size": 32},
    **{"sampler.kv_cache_tokens": 32 * 64, "sampler.prefill_tokens": 32 * 8},
    **{"packing.token_budget": 512, "packing.buckets": ((128, 64),)},
}
# Of a micro-batch: rows of 32 prompt tokens and 4 answers of 16, with dense attention.
ROWS, LENGTH, ANSWERS = 5, 96, 64
# XLA also counts norms, softmax and RoPE. It computes logits once where the vocabulary is a single
# slice, twice in the backward pass of a large one.
TOLERANCE = 0.07


def _xla(policy: PolicyConfig, name: str, compile: bool = True) -> dict[str, float]:
    """Return XLA's cost analysis of a program on one device; XLA counts a loop's body once."""
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    programs = aot.RunPrograms(small_config(**SIZES), policy, mesh, 32)
    program = next(program for program in programs.select("all") if program.name == name)
    lowered = program.lower()
    analysis: Any = (lowered.compile() if compile else lowered).cost_analysis()
    return analysis


def _counts(policy: PolicyConfig, mesh: Any = None, **fields: Any) -> ProgramCounts:
    """Count a policy of one layer, on one device or on a mesh."""
    mesh = mesh or meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    policy = dataclasses.replace(policy, layers=1)
    return ProgramCounts(aot.RunPrograms(small_config(**SIZES | fields), policy, mesh, 32))


def _operations(work: Work) -> float:
    return work.products + work.attention


def _update(policy: PolicyConfig) -> Work:
    return _counts(policy).micro_batch(ROWS * LENGTH, ROWS * ANSWERS, ROWS * LENGTH**2)


def test_operations_of_logprobs_equal_those_of_xla() -> None:
    work = _counts(DENSE).forward(ROWS * LENGTH, ROWS * ANSWERS, ROWS * LENGTH**2)
    xla_flops = _xla(DENSE, "logprob", compile=False)["flops"]
    assert _operations(work) == pytest.approx(xla_flops, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "block", "dots", "attention"])
def test_operations_of_an_update_equal_those_of_xla(remat: str) -> None:
    policy = dataclasses.replace(DENSE, remat=remat)
    xla_flops = _xla(policy, "accumulate")["flops"]
    assert _operations(_update(policy)) == pytest.approx(xla_flops, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "block"])
def test_operations_of_an_update_of_experts_equal_those_of_xla(remat: str) -> None:
    policy = dataclasses.replace(EXPERTS, remat=remat)
    # On a CPU, XLA multiplies every row by the matrices of all E experts.
    row = 2 * 3 * policy.width * policy.feed_forward * policy.experts_per_token
    other_experts = row * (policy.experts - 1) * ROWS * LENGTH
    operations = _operations(_update(policy)) + other_experts * (1 + 8 / 3)
    assert operations == pytest.approx(_xla(policy, "accumulate")["flops"], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_operations_of_sampling_equal_those_of_xla(policy: PolicyConfig) -> None:
    row = 2 * 3 * policy.width * policy.feed_forward * policy.experts_per_token
    other_experts = row * max(0, policy.experts - 1)  # as above
    prefill = _operations(_counts(policy).prefill(8 * 32, 8 * 32**2, 8 * 32)) + 256 * other_experts
    assert prefill == pytest.approx(_xla(policy, "prefill")["flops"], rel=TOLERANCE)
    decode = _operations(_counts(policy).decode_pass(32)) + 32 * other_experts
    xla = _xla(policy, "decode")["flops"]
    # XLA has the attention of a step of its loops over pages and a bisection of top-p too.
    assert 0.7 * xla < decode < xla


@pytest.mark.slow
def test_memory_of_decoding_a_wide_policy_is_that_of_its_weights() -> None:
    """On a CPU, XLA first copies a layer's weights out of the stack: two reads and a write."""
    policy = dataclasses.replace(DENSE, width=1024, feed_forward=4096, vocab_size=64, layers=2)
    xla = _xla(policy, "decode")["bytes accessed"]
    assert 3 * _counts(policy).decode_pass(32).memory == pytest.approx(xla, rel=0.2)


def _received(program: aot.Program, devices: int) -> float:
    """Count the bytes that a device receives in compiled collectives, with a loop's body once."""
    collectives = aot.collectives(program.lower().compile().as_text() or "")
    # The results of a reduce-scatter are a part of what is summed, all others are whole.
    results = {"all-gather": 1, "all-reduce": 2, "all-to-all": 1, "reduce-scatter": devices}
    total = sum(collectives.get(kind, {"bytes": 0})["bytes"] * n for kind, n in results.items())
    return total * (devices - 1) / devices


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "context"])
def test_bytes_between_chips_are_those_of_compiled_collectives(axis: str) -> None:
    policy = dataclasses.replace(DENSE, vocab_size=2048, width=64, feed_forward=1024)
    mesh = meshes.make_mesh({axis: 8})
    programs = aot.RunPrograms(small_config(**{"sampler.slots": 64}), policy, mesh, 16)
    counts = _counts(policy, mesh, **{"sampler.slots": 64})
    for program in programs.select("all")[:2]:
        tokens = math.prod(program.tokens)
        work = counts.prefill(tokens, 0, 0) if program.name == "prefill" else None
        link_bytes = (work or counts.decode_pass(tokens)).link
        assert link_bytes == pytest.approx(_received(program, 8), rel=0.1), program.name


@pytest.mark.slow
def test_work_of_a_chip_falls_with_chips() -> None:
    policy = dataclasses.replace(DENSE, heads=16, kv_heads=8)
    works = []
    for chips in (1, 2, 4, 8):
        counts = _counts(policy, meshes.make_mesh({"fsdp": chips}, jax.devices()[:chips]))
        works.append(counts.micro_batch(8 * 1024, 8 * 128, 1e6) + counts.decode_pass(64))
    for previous_work, work in itertools.pairwise(works):
        assert work.products == pytest.approx(previous_work.products / 2)
        assert work.attention == pytest.approx(previous_work.attention / 2)
        assert work.memory < previous_work.memory and work.link > previous_work.link
    assert works[0].link == works[0].hops == 0


def test_int8_weights_are_one_byte_of_traffic_and_only_adapters_are_optimized() -> None:
    wide = dataclasses.replace(DENSE, width=512, feed_forward=2048, vocab_size=64)
    lora = dataclasses.replace(wide, lora=LoraConfig(4))
    int8_base = dataclasses.replace(wide, lora=LoraConfig(4, base_dtype="int8"))
    counts, int8_counts = _counts(lora), _counts(int8_base)
    float_bytes, int8_bytes = (c.decode_pass(1).memory for c in (counts, int8_counts))
    assert int8_bytes == pytest.approx(float_bytes / counts.itemsize, rel=0.1)
    float_bytes, int8_bytes = (c.forward(1, 0, 0).memory for c in (counts, int8_counts))
    assert int8_bytes == pytest.approx(float_bytes / counts.itemsize, rel=0.1)
    assert counts.apply().memory < _counts(wide).apply().memory / 20
    cached = _counts(wide, **{"sampler.cache_dtype": "int8"}).decode_keys(0, 1).memory
    assert cached == counts.decode_keys(0, 1).memory / counts.itemsize * (1 + 4 / wide.head_size)


def test_keys_in_a_window_travel_from_the_ends_of_chunks_alone() -> None:
    mesh = meshes.make_mesh({"context": 4}, jax.devices()[:4])
    windows = dataclasses.replace(DENSE, window=64, window_layers=(0,))
    full_counts, window_counts = (
        ProgramCounts(aot.RunPrograms(small_config(**SIZES), policy, mesh, 1984))
        for policy in (DENSE, windows)
    )
    row = full_counts.programs.bucket.length
    keys = 2 * DENSE.kv_heads * DENSE.head_size * full_counts.itemsize
    full_link, window_link = (c.forward(row, 0, 0).link for c in (full_counts, window_counts))
    assert full_link - window_link == pytest.approx(keys * (row - 8 * 64) * 3 / 4)
