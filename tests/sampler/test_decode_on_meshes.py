"""Tests of decoding on meshes: only activations are communicated, never weights."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.linen import logical_axis_rules

from spell_jax.launch import aot
from spell_jax.policy import transformer
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import lm_head
from tests import tiny
from tests.launch.test_aot import small_config

pytestmark = pytest.mark.slow

DENSE = dataclasses.replace(
    tiny.POLICY, vocab_size=2048, width=64, feed_forward=1024, tied_embeddings=False
)
EXPERTS = dataclasses.replace(DENSE, feed_forward=256, experts=4, experts_per_token=2)
MESHES = [
    {"fsdp": 8},
    {"context": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "context": 2, "expert": 2},
]
on_meshes = pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda mesh: " ".join(f"{axis}={size}" for axis, size in mesh.items())
)


@on_meshes
@pytest.mark.parametrize("policy", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_decode_step_communicates_no_weights(policy, mesh) -> None:
    sizes = {"sampler.slots": 8, "sampler.samples_per_prompt_batch": 4, "sampler.max_tokens": 8}
    programs = aot.RunPrograms(small_config(**sizes), policy, meshes.make_mesh(mesh), 16)
    (program,) = programs.select("decode")
    collectives = aot.collectives(program.lower().compile().as_text() or "")
    smallest = min(  # kernels of a layer that are split over devices; k and v are small
        leaf.size // leaf.shape[0] * 4
        for path, leaf in jax.tree_util.tree_leaves_with_path(programs.rollout_params["layers"])
        if any(name in jax.tree_util.keystr(path) for name in ("gate", "up", "down"))
    )
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert collectives.get(kind, {"bytes": 0})["bytes"] < smallest / 4, (kind, collectives)


@on_meshes
@pytest.mark.parametrize("vocab", [64, 63], ids=["split", "whole"])
def test_logits_on_a_mesh_equal_a_plain_matmul(vocab: int, mesh) -> None:
    policy = dataclasses.replace(DENSE, vocab_size=vocab)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(vocab, policy.width)).astype(np.float32)
    hidden = rng.normal(size=(16, policy.width)).astype(np.float32)
    placed = meshes.make_mesh(mesh)
    shapes, axes = transformer.abstract_params(policy)
    where = meshes.shardings(placed, axes, shapes)["unembedding"]
    params = {"unembedding": jax.device_put(table, where)}
    rows = jax.device_put(hidden, meshes.by_rows(placed))
    with jax.set_mesh(placed), logical_axis_rules(meshes.DECODE_RULES):
        logits = jax.jit(lambda p, h: lm_head.logits(policy, p, h))(params, rows)
    np.testing.assert_allclose(logits, hidden @ table.T, atol=1e-4)
    assert logits.sharding.shard_shape(logits.shape) == (2, vocab)
