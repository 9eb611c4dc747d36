"""Tests of token embedding on meshes against jnp.take, with float32 sums of gradients."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spell_jax.policy import embedding
from spell_jax.runtime import mesh as meshes

VOCAB, WIDTH, ROWS, TIME = 40, 32, 8, 8
MESHES = [
    {"fsdp": 8},
    {"context": 8},
    {"fsdp": 2, "context": 4},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"context": 2, "tensor": 2, "expert": 2},
    {"data": 8},
]
on_meshes = pytest.mark.parametrize("shape", MESHES, ids=str)


def _inputs(vocab: int = VOCAB, width: int = WIDTH, time: int = TIME):
    """Create a table, tokens (some are frequent, some absent), and weights of a sum."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(vocab, width)), jnp.float32)
    tokens = rng.integers(0, vocab // 2, size=(ROWS, time)) * 2
    tokens[:, ::3] = vocab - 1
    weights = jnp.asarray(rng.normal(size=(ROWS, time, width)), jnp.float32)
    return table, jnp.asarray(tokens, jnp.int32), weights


def _total(find):
    return lambda table, tokens, weights: jnp.sum(jnp.sin(find(table, tokens)) * weights)


def _take(table, tokens):
    return jnp.take(table, tokens, axis=0)


def _place(mesh, table):
    axes = PartitionSpec("vocab", "embed")
    return jax.device_put(table, meshes.shardings(mesh, axes, table))


def _check(shape: dict[str, int], inputs) -> None:
    table, tokens, weights = inputs
    expected_gradient = jax.grad(_total(_take))(*inputs)
    mesh = meshes.make_mesh(shape)
    with jax.set_mesh(mesh):
        placed = _place(mesh, table)
        embeddings = jax.jit(embedding.lookup)(placed, tokens)
        gradient = jax.jit(jax.grad(_total(embedding.lookup)))(placed, tokens, weights)
    np.testing.assert_array_equal(embeddings, _take(table, tokens))
    assert np.abs(gradient - expected_gradient).max() <= 1e-6 * np.abs(expected_gradient).max()


@pytest.mark.slow
def test_lookup_on_one_device_equals_take() -> None:
    inputs = _inputs()
    np.testing.assert_array_equal(embedding.lookup(*inputs[:2]), _take(*inputs[:2]))
    gradient = jax.grad(_total(embedding.lookup))(*inputs)
    expected_gradient = jax.grad(_total(_take))(*inputs)
    assert np.abs(gradient - expected_gradient).max() <= 1e-6 * np.abs(expected_gradient).max()


@pytest.mark.slow
@on_meshes
def test_lookup_on_a_mesh_equals_take(shape: dict[str, int]) -> None:
    _check(shape, _inputs())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [m for m in MESHES if "context" in m], ids=str)
def test_tokens_replicated_over_context_count_once(shape: dict[str, int]) -> None:
    """Three tokens per row are on all devices of `context` and must count once."""
    _check(shape, _inputs(time=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "time"), [(MESHES[2], TIME), (MESHES[2], 3), (MESHES[4], TIME)], ids=str
)
def test_lookup_in_a_table_that_the_mesh_does_not_divide(shape: dict[str, int], time: int) -> None:
    _check(shape, _inputs(vocab=41, width=31, time=time))


REPEATS = 4096


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [{}, {"fsdp": 2, "context": 4}, {"expert": 4, "context": 2}], ids=str
)
def test_gradient_of_a_frequent_token_is_summed_in_float32(shape: dict[str, int]) -> None:
    """It is within a rounding of the float64 sum of 4,096 gradients; jnp.take's gradient is not."""
    rng = np.random.default_rng(0)
    out_gradients = jnp.asarray(1 + rng.uniform(size=(ROWS, REPEATS // ROWS, WIDTH)), jnp.bfloat16)
    tokens = jnp.full(out_gradients.shape[:2], 7, jnp.int32)
    table = jnp.zeros((VOCAB, WIDTH), jnp.bfloat16)
    expected_sum = np.asarray(out_gradients, np.float64).sum(axis=(0, 1))

    def error(find) -> float:
        total = jax.jit(
            jax.grad(lambda table: jnp.sum((find(table, tokens) * out_gradients), dtype="f4"))
        )
        table_gradient = total(table)
        assert table_gradient.dtype == jnp.bfloat16
        return np.abs(np.asarray(table_gradient[7], np.float64) / expected_sum - 1).max()

    with jax.set_mesh(meshes.make_mesh(shape or {"fsdp": 1}, None if shape else jax.devices()[:1])):
        assert error(embedding.lookup) <= 2**-8
    assert error(_take) > 0.1


def _programs(shape: dict[str, int], time: int):
    """Lower forward, and backward alone, with shardings, for a mesh and a table [512, 64]."""
    mesh = meshes.make_mesh(shape)
    table, tokens, out_gradient = _inputs(512, 64, time)

    def backward(table, tokens, out_gradient):
        return jax.vjp(lambda table: embedding.lookup(table, tokens), table)[1](out_gradient)[0]

    by_time = meshes.by_rows_and_time(mesh)
    with jax.set_mesh(mesh):
        table = _place(mesh, table)
        tokens, out_gradient = jax.device_put((tokens, out_gradient), by_time)
        forward = jax.jit(embedding.lookup, out_shardings=by_time)
        back = jax.jit(backward, out_shardings=table.sharding)
        return forward.lower(table, tokens), back.lower(table, tokens, out_gradient)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES[2:], ids=str)
def test_no_device_materializes_the_whole_table(shape: dict[str, int]) -> None:
    """No array of a program for 64 tokens is a whole [V, D], if the mesh splits an axis."""
    split = {"fsdp", "context", "tensor"} & set(shape)
    for lowered in _programs(shape, time=TIME):
        shapes = re.findall(r"\[(\d[\d,]*)\]", lowered.compile().as_text())
        largest = max(
            math.prod(int(size) for size in dimensions.split(",")) for dimensions in shapes
        )
        assert (largest >= 512 * 64) == (not split)


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ({"fsdp": 2, "context": 4}, {"all_gather": 1, "all_to_all": 1}, {}),
        ({"fsdp": 2, "expert": 4}, {"all_gather": 1, "all_to_all": 1}, {"all_reduce": 1}),
        ({"data": 8}, {}, {"all_reduce": 1}),
        ({"tensor": 8}, {"all_reduce": 1}, {}),
    ],
    ids=str,
)
def test_collectives_of_the_lookup(shape, forward, backward) -> None:
    """Count the collectives of the embedding.

    Forward gathers tokens, exchanges their rows and sums them over the vocabulary's parts. Backward
    has the same exchange, and a sum over the axes that split the tokens and not the table.
    """
    names = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "collective_permute")
    back = {name: count for name, count in forward.items() if name != "all_reduce"} | backward
    for lowered, expected_counts in zip(_programs(shape, time=64), (forward, back), strict=True):
        program = lowered.as_text()
        counts = {name: program.count(f"stablehlo.{name}") for name in names}
        assert {name: count for name, count in counts.items() if count} == expected_counts
