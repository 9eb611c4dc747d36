"""Every kernel against dense float32, forward and backward, alone and on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import attend, chunked, dense, masks
from spell_jax.runtime import mesh as meshes

HEADS, KV_HEADS, SIZE = 4, 2, 8
# (prompt, answers) of the groups of a row; what is left is padding.
ROWS = {
    "one long group": [(70, [20, 13, 40])],
    "short groups": [(9, [3, 4]), (30, [11]), (5, [2, 2, 2, 2]), (40, [25, 20])],
    "a prompt alone": [(160, [])],
    "all padding": [],
}
TIME = 171


def _last_reader(groups: list[tuple[int, list[int]]]) -> np.ndarray:
    made = np.full(TIME, -1, np.int32)
    start = 0
    for prompt, answers in groups:
        end = start + prompt + sum(answers)
        made[start : start + prompt] = end - 1
        start += prompt
        for answer in answers:
            made[start : start + answer] = start + answer - 1
            start += answer
    return made


LAST_READER = jnp.asarray(np.stack([_last_reader(groups) for groups in ROWS.values()]))
REAL = np.asarray(LAST_READER >= 0)[..., None, None]


@functools.cache
def _inputs(kv_heads: int = KV_HEADS) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(len(ROWS), TIME, heads, SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return q, k, v


def _both(run, q, k, v) -> tuple[jax.Array, ...]:
    """(output of real queries, gradients of q, k, v of a function of it)."""

    def value(q, k, v):
        out = jnp.where(REAL, run(q, k, v, LAST_READER), 0.0)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


def _assert_close(found, wanted, bound: float = 1e-5) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert np.isfinite(a).all(), name
        assert np.abs(a - b).max() <= bound * np.abs(b).max(), name


@pytest.mark.parametrize("block", [16, 64, 171, 512])
def test_chunked_equals_dense(block: int) -> None:
    run = functools.partial(chunked.attend, block=block)
    _assert_close(_both(run, *_inputs()), _both(dense.attend, *_inputs()))


def test_chunked_with_any_last_reader() -> None:
    """Not only packed groups: whatever the array says."""
    rng = np.random.default_rng(1)
    last_reader = jnp.asarray(rng.integers(-1, TIME, size=(2, TIME)), jnp.int32)
    reads = np.asarray(masks.visible(last_reader)).any(axis=-1)[..., None, None]
    q, k, v = (x[:2] for x in _inputs())
    found = chunked.attend(q, k, v, last_reader, 32)
    wanted = dense.attend(q, k, v, last_reader)
    np.testing.assert_allclose(np.where(reads, found - wanted, 0), 0, atol=1e-5)
    assert not np.where(reads, 0, found).any(), "zeros where nothing is seen"


def test_live_blocks_by_hand() -> None:
    last_reader = jnp.array([5, 5, 3, 3, 5, 5, -1, -1])
    assert masks.live_blocks(last_reader, 2).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [0, 0, 0, 0],
    ]


def test_dead_blocks_are_not_touched() -> None:
    """The first answer's block is dead for the second one's queries."""
    last_reader = jnp.array([[11] * 4 + [7] * 4 + [11] * 4])
    q, k, v = (x[:1, :12] for x in _inputs())
    wanted = chunked.attend(q, k, v, last_reader, 4)
    poisoned = k.at[:, 4:8].set(jnp.nan), v.at[:, 4:8].set(jnp.nan)
    found = chunked.attend(q, *poisoned, last_reader, 4)
    np.testing.assert_array_equal(found[:, 8:], wanted[:, 8:])
    assert np.isnan(found[:, 4:8]).all()


def test_memory_grows_with_the_length_not_its_square() -> None:
    def bytes_of(kernel, time: int) -> int:
        q = jax.ShapeDtypeStruct((1, time, HEADS, SIZE), jnp.float32)
        kv = jax.ShapeDtypeStruct((1, time, KV_HEADS, SIZE), jnp.float32)
        last_reader = jax.ShapeDtypeStruct((1, time), jnp.int32)
        gradient = jax.jit(jax.grad(lambda *x: jnp.sum(kernel(*x)), (0, 1, 2)))
        memory = gradient.lower(q, kv, kv, last_reader).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert bytes_of(chunked.attend, 4096) < 2.5 * bytes_of(chunked.attend, 2048)
    assert bytes_of(dense.attend, 2048) > 3.5 * bytes_of(dense.attend, 1024)
    assert bytes_of(chunked.attend, 4096) < bytes_of(dense.attend, 4096) / 20


def test_chunked_in_bfloat16() -> None:
    low = [x.astype(jnp.bfloat16) for x in _inputs()]
    found = _both(functools.partial(chunked.attend, block=64), *low)
    assert {x.dtype for x in found[1:]} == {jnp.dtype(jnp.bfloat16)}
    wanted = _both(dense.attend, *_inputs())
    _assert_close([np.asarray(x, np.float32) for x in found], wanted, 5e-2)


MESHES = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 4},  # more devices than key heads
    {"expert": 4, "tensor": 2},
]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_mesh_equals_one_device(shape: dict[str, int]) -> None:
    run = functools.partial(attend.attend, kernel="chunked")
    wanted = _both(dense.attend, *_inputs())
    mesh = meshes.make_mesh(shape)
    with jax.set_mesh(mesh):
        _assert_close(_both(run, *_inputs()), wanted)
        program = jax.jit(run).lower(*_inputs(), LAST_READER).as_text()
    assert "all_gather" not in program and "all_to_all" not in program


def test_auto_takes_the_kernel_by_length(monkeypatch) -> None:
    taken = []
    for name in attend.KERNELS:
        monkeypatch.setitem(attend.KERNELS, name, lambda q, *_, name=name: taken.append(name) or q)
    for time in (attend.SHORT, attend.SHORT + 1):
        q = jnp.zeros((1, time, 2, 2))
        attend.attend(q, q, q, jnp.zeros((1, time), jnp.int32))
    assert taken == ["dense", "chunked"]


def test_prefill_keeps_keys_and_values_and_training_does_not() -> None:
    q, k, v = _inputs()
    context = {"last_reader": LAST_READER}
    packed, nothing = attend.packed("chunked")(q, k, v, None, context)
    prefilled, kept = attend.prefill("chunked")(q, k, v, None, context)
    assert nothing is None
    np.testing.assert_array_equal(packed, prefilled)
    np.testing.assert_array_equal(kept[0], k)
    np.testing.assert_array_equal(kept[1], v)
    assert attend.packed("chunked") is attend.packed("chunked")


def test_a_policy_names_its_kernel() -> None:
    from tests import tiny

    with pytest.raises(ValueError, match=r"policy\.attention = 'flash': must be one of \('auto',"):
        dataclasses.replace(tiny.POLICY, attention="flash")
