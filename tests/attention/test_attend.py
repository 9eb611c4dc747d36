"""Tests of every kernel against dense float32, forward and backward, on a device and a mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spell_jax.attention import attend, chunked, context, masks
from spell_jax.attention import kernel as kernels
from spell_jax.learner import context_layout
from spell_jax.policy.config import UNLIMITED
from spell_jax.runtime import mesh as meshes
from tests import programs
from tests.attention import packed_rows

HEADS, KV_HEADS, SIZE = 4, 2, 8
# (prompt, answers) of the groups of a row; the rest is padding.
ROWS = {
    "one long group": [(70, [20, 13, 40])],
    "short groups": [(9, [3, 4]), (30, [11]), (5, [2, 2, 2, 2]), (40, [25, 20])],
    "a prompt alone": [(160, [])],
    "all padding": [],
}
TIME = 171


def _last_query(groups: list[tuple[int, list[int]]]) -> np.ndarray:
    last_query = np.full(TIME, -1, np.int32)
    start = 0
    for prompt, answers in groups:
        end = start + prompt + sum(answers)
        last_query[start : start + prompt] = end - 1
        start += prompt
        for answer in answers:
            last_query[start : start + answer] = start + answer - 1
            start += answer
    return last_query


LAST_QUERY = jnp.asarray(np.stack([_last_query(groups) for groups in ROWS.values()]))
INDEX = (masks.row_index(LAST_QUERY),) * 2
REAL = np.asarray(LAST_QUERY >= 0)[..., None, None]
POSITIONS = jnp.asarray(np.stack([packed_rows.positions(np.asarray(x)) for x in LAST_QUERY]))
# One token, a part of a chunk or block, more than most prompts, longer than a row, no window.
WINDOWS = (1, 7, 40, 500, UNLIMITED)


@functools.cache
def _inputs(kv_heads: int = KV_HEADS) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(len(ROWS), TIME, heads, SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return q, k, v


def _out_and_gradients(run, q, k, v) -> tuple[jax.Array, ...]:
    """Return (output of real queries, gradients of sum(sin(output)) by q, k and v)."""
    return _program(run)(q, k, v)


def _program(run):
    """Return the jitted function of q, k, v and arrays of a window, see _out_and_gradients."""

    def value(q, k, v, *window):
        out = jnp.where(REAL, run(q, k, v, *INDEX, LAST_QUERY, *window), 0.0)
        return jnp.sum(jnp.sin(out)), out

    @jax.jit
    def out_and_gradients(*arrays):
        (_, out), gradients = jax.value_and_grad(value, (0, 1, 2), has_aux=True)(*arrays)
        return out, *gradients

    return out_and_gradients


def _assert_close(arrays, expected_arrays, bound: float = 1e-5) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), arrays, expected_arrays, strict=True):
        assert np.isfinite(a).all(), name
        # Gradients of queries and keys are 0 in a window of one token.
        assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), 0.1), name


def _last_position(window: int) -> jax.Array:
    return POSITIONS + (window - 1)


@functools.cache
def _expected_with_windows() -> list[tuple[jax.Array, ...]]:
    program = _program(_reference)
    return [program(*_inputs(), POSITIONS, _last_position(window)) for window in WINDOWS]


def _reference(q, k, v, *indices) -> jax.Array:
    """Attend by the full softmax, differentiated by JAX and not by a custom rule."""
    groups = q.reshape(*k.shape[:3], -1, SIZE)
    scores = jnp.einsum("bqkrh,bskh->bkrqs", groups, k) * SIZE**-0.5
    q_index, k_index, last_query, *window = indices
    of_queries, of_keys = [q_index, *window[:1]], [k_index, last_query, *window[1:]]
    visible = masks.visible(of_queries, of_keys)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bkrqs,bskh->bqkrh", weights, v).reshape(q.shape)


def _kernel(name: str, block: int | None = None):
    """Return a function: attention on one device by the named kernel."""
    kernel = attend.KERNELS[name]
    if block is not None:
        parts = (
            functools.partial(part, block=block) for part in (chunked.forward, chunked.backward)
        )
        kernel = kernels.Kernel(*map(kernels.over_rows, parts))
    return functools.partial(kernels.attend, kernel)


BOUNDS = {"dense": 1e-5, "chunked": 1e-5, "splash": 5e-5, "triton": 5e-5}


@pytest.mark.parametrize("name", list(BOUNDS))
def test_every_kernel_equals_the_reference(name: str) -> None:
    assert set(BOUNDS) == set(attend.KERNELS)
    _assert_close(
        _out_and_gradients(_kernel(name), *_inputs()),
        _out_and_gradients(_reference, *_inputs()),
        BOUNDS[name],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BOUNDS))
def test_every_kernel_with_windows_equals_the_reference(name: str) -> None:
    program = _program(_kernel(name))
    for window, expected_arrays in zip(WINDOWS, _expected_with_windows(), strict=True):
        arrays = program(*_inputs(), POSITIONS, _last_position(window))
        _assert_close(arrays, expected_arrays, BOUNDS[name])
    outs = [np.asarray(arrays[0]) for arrays in _expected_with_windows()]
    assert all(np.abs(a - b).max() > 0.1 for a, b in itertools.pairwise(outs[:4]))
    np.testing.assert_array_equal(outs[3], outs[4])


@pytest.mark.slow
@pytest.mark.parametrize("block", [16, 64, 171, 512])
def test_chunked_kernel_with_any_block_size_equals_the_reference(block: int) -> None:
    kernel = _kernel("chunked", block)
    _assert_close(
        _out_and_gradients(kernel, *_inputs()), _out_and_gradients(_reference, *_inputs())
    )
    arrays = _program(kernel)(*_inputs(), POSITIONS, _last_position(WINDOWS[1]))
    _assert_close(arrays, _expected_with_windows()[1])


@pytest.mark.slow
def test_chunked_kernel_accepts_any_last_query() -> None:
    """Any array works, not only masks of packed groups."""
    rng = np.random.default_rng(1)
    last_query = jnp.asarray(rng.integers(-1, TIME, size=(2, TIME)), jnp.int32)
    index = (masks.row_index(last_query),) * 2
    mask = masks.visible([index[0]], [index[1], last_query])
    reads = np.asarray(mask).any(axis=-1)[..., None, None]
    q, k, v = (x[:2] for x in _inputs())
    out = _kernel("chunked", 32)(q, k, v, *index, last_query)
    expected_out = _reference(q, k, v, *index, last_query)
    np.testing.assert_allclose(np.where(reads, out - expected_out, 0), 0, atol=1e-5)
    assert not np.where(reads, 0, out).any(), "zeros where nothing is seen"


def test_live_and_full_blocks_of_a_small_example() -> None:
    last_query = jnp.array([5, 5, 3, 3, 5, 5, -1, -1])
    index, last_query = jnp.arange(8).reshape(4, 2), last_query.reshape(4, 2)
    live, full = masks.live_and_full_blocks([index], [index, last_query])
    assert live.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert full.astype(int).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.slow
def test_dead_blocks_are_not_read() -> None:
    """The first answer's block is dead for the second one's queries."""
    last_query = jnp.array([[11] * 4 + [7] * 4 + [11] * 4])
    q, k, v = (x[:1, :12] for x in _inputs())
    index = (masks.row_index(last_query),) * 2
    run = _kernel("chunked", 4)
    clean_out = run(q, k, v, *index, last_query)
    poisoned = k.at[:, 4:8].set(jnp.nan), v.at[:, 4:8].set(jnp.nan)
    poisoned_out = run(q, *poisoned, *index, last_query)
    np.testing.assert_array_equal(poisoned_out[:, 8:], clean_out[:, 8:])
    assert np.isnan(poisoned_out[:, 4:8]).all()


@pytest.mark.slow
def test_blocks_outside_the_window_are_not_read() -> None:
    """A window of 5 tokens and blocks of 4: queries from 8 on see keys from 4 on."""
    last_query = jnp.full((1, 12), 11)
    q, k, v = (x[:1, :12] for x in _inputs())
    index = masks.row_index(last_query)
    numbers = index, index, last_query, index, index + 4
    run = _kernel("chunked", 4)
    clean_out = run(q, k, v, *numbers)
    poisoned_out = run(q, *(x.at[:, :4].set(jnp.nan) for x in (k, v)), *numbers)
    np.testing.assert_array_equal(poisoned_out[:, 8:], clean_out[:, 8:])
    assert np.isnan(poisoned_out[:, :8]).all()


@pytest.mark.slow
def test_chunked_memory_grows_linearly_with_length() -> None:
    def bytes_of(kernel, time: int) -> int:
        q = jax.ShapeDtypeStruct((1, time, HEADS, SIZE), jnp.float32)
        kv = jax.ShapeDtypeStruct((1, time, KV_HEADS, SIZE), jnp.float32)
        last_query = jax.ShapeDtypeStruct((1, time), jnp.int32)
        gradient = jax.jit(jax.grad(lambda *x: jnp.sum(kernel(*x)), (0, 1, 2)))
        memory = gradient.lower(q, kv, kv, *[last_query] * 3).compile().memory_analysis()
        return memory.temp_size_in_bytes

    short, long = (bytes_of(_kernel("chunked"), time) for time in (2048, 4096))
    assert long < 2.5 * short
    assert bytes_of(_kernel("dense"), 2048) > 3.5 * bytes_of(_kernel("dense"), 1024)
    assert long < bytes_of(_kernel("dense"), 4096) / 20


@pytest.mark.slow
def test_chunked_kernel_in_bfloat16_is_close_to_float32() -> None:
    low = [x.astype(jnp.bfloat16) for x in _inputs()]
    arrays = _out_and_gradients(_kernel("chunked", 64), *low)
    assert {x.dtype for x in arrays[1:]} == {jnp.dtype(jnp.bfloat16)}
    expected_arrays = _out_and_gradients(_reference, *_inputs())
    _assert_close([np.asarray(x, np.float32) for x in arrays], expected_arrays, 5e-2)


MESHES = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 4},  # more devices than key heads
    {"expert": 4, "tensor": 2},
]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_sharded_attention_equals_one_device(shape: dict[str, int]) -> None:
    def run(q, k, v, index, _, last_query):
        return attend.attend(q, k, v, last_query, index, "chunked")

    expected_arrays = _out_and_gradients(_reference, *_inputs())
    mesh = meshes.make_mesh(shape)
    with jax.set_mesh(mesh):
        _assert_close(_out_and_gradients(run, *_inputs()), expected_arrays)
        program = jax.jit(run).lower(*_inputs(), *INDEX, LAST_QUERY).as_text()
    assert "all_gather" not in program and "all_to_all" not in program


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_sharded_attention_with_windows_equals_one_device(shape: dict[str, int]) -> None:
    def run(q, k, v, index, _, last_query, window):
        return attend.attend(q, k, v, last_query, index, "chunked", False, POSITIONS, window)

    with jax.set_mesh(meshes.make_mesh(shape)):
        program = _program(run)
        for window, expected_arrays in zip(WINDOWS, _expected_with_windows(), strict=True):
            _assert_close(program(*_inputs(), jnp.int32(window)), expected_arrays)


DEVICES = 4
DEALT_TIME = 172  # a multiple of DEVICES


def _dealt(x, order):
    """Pad x [B, 171, ...] by one slot, and reorder each row by its own order."""
    x = jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2), constant_values=-1)
    return jnp.stack([row[o] for row, o in zip(x, order, strict=True)])


@functools.cache
def _orders() -> list[np.ndarray]:
    """Return packing's order of the tokens of each row."""
    orders = []
    for groups in ROWS.values():
        is_answer, start = np.zeros(DEALT_TIME, bool), 0
        for prompt, answers in groups:
            is_answer[start + prompt : start + prompt + sum(answers)] = True
            start += prompt + sum(answers)
        orders.append(context_layout.order(is_answer, start, DEVICES))
    return orders


def _run_dealt(name: str, ring: bool = False):
    """Return attention of rows whose tokens are in packing's order, as a function for _program."""
    orders = _orders()
    index, last_query = jnp.asarray(np.stack(orders)), _dealt(LAST_QUERY, orders)
    back = [np.argsort(o)[:TIME] for o in orders]

    def run(q, k, v, *numbers):
        window = (_dealt(POSITIONS, orders), numbers[3]) if len(numbers) > 3 else ()
        dealt = (_dealt(x, orders) for x in (q, k, v))
        out = attend.attend(*dealt, last_query, index, name, ring, *window)
        return jnp.stack([row[b] for row, b in zip(out, back, strict=True)])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", list(attend.KERNELS))
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("shape", [{"context": DEVICES, "fsdp": 2}, {"context": 4, "tensor": 2}])
def test_context_parallel_attention_equals_one_device(
    name: str, ring: bool, shape: dict[str, int]
) -> None:
    """Shard tokens in packing's order; keys and values are gathered or sent around a ring."""
    with jax.set_mesh(meshes.make_mesh(shape)):
        arrays = _out_and_gradients(_run_dealt(name, ring), *_inputs())
    _assert_close(arrays, _out_and_gradients(_reference, *_inputs()), BOUNDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(attend.KERNELS))
@pytest.mark.parametrize("shape", [{"context": DEVICES, "fsdp": 2}, {"context": 4, "tensor": 2}])
def test_context_parallel_windows_equal_one_device(name: str, shape: dict[str, int]) -> None:
    """One program for all windows, as for layers; only keys that other devices see travel."""
    with jax.set_mesh(meshes.make_mesh(shape)):
        program = _program(_run_dealt(name))
        for window, expected_arrays in zip(WINDOWS, _expected_with_windows(), strict=True):
            _assert_close(program(*_inputs(), jnp.int32(window)), expected_arrays, BOUNDS[name])


def _rounds(time: int, devices: int, answers: list[int], window: int) -> int:
    """Count the rounds of keys that travel in a layer, for one group of `time` tokens."""
    prompt, places = time - sum(answers), np.arange(time)
    last_query, start = np.full(time, time - 1, np.int32), prompt
    for length in answers:
        last_query[start : start + length] = start + length - 1
        start += length
    index = context_layout.order(places >= prompt, time, devices)
    numbers = index, last_query[index], packed_rows.positions(last_query)[index]
    one_key = jnp.zeros((1, time, 1, 1))

    def count(x, index, last_query, position):
        indices = index, index, last_query, position, position + (window - 1)
        traveling = context._Traveling.choose(kernels.Inputs(x[..., None], x, x, *indices))
        return traveling.rounds[None]

    with jax.set_mesh(meshes.make_mesh({"context": devices, "fsdp": -1})):
        by_time, by_device = PartitionSpec(None, "context"), PartitionSpec("context")
        run = jax.shard_map(count, in_specs=by_time, out_specs=by_device, check_vma=False)
        counts = jax.jit(run)(one_key, *(jnp.asarray(x[None]) for x in numbers))
    assert len(set(np.asarray(counts).tolist())) == 1
    return int(counts[0])


@pytest.mark.slow
def test_keys_travel_only_as_far_as_windows_reach() -> None:
    """A round takes 64 keys from each of 8 devices with 512 tokens."""
    assert _rounds(4096, 8, [], 1) == 0
    # The end of the early and of the late chunk.
    assert _rounds(4096, 8, [], 32) == 2
    assert _rounds(4096, 8, [], 64) == 2
    assert _rounds(4096, 8, [], 128) == 4
    # The last device's late chunk comes first, and no query is after the first device's.
    assert _rounds(4096, 8, [], UNLIMITED) == 8
    # Answers see the end of the prompt, and a cut answer its own last tokens.
    assert _rounds(4096, 8, [300] * 8, 32) <= 5
    # A tree's answers in the order of shards: none but a cut answer's own keys and the prompt's.
    assert _rounds(4096, 8, [300] * 8, UNLIMITED) < 8


def _collectives(ring: bool, windows: bool = False) -> list[dict[str, int]]:
    """Count each collective in the programs of the forward pass and of both passes."""

    def total(q, k, v, last_query):
        window = (last_query, jnp.int32(5)) if windows else ()
        return jnp.sum(attend.attend(q, k, v, last_query, None, "chunked", ring, *window))

    shapes = [jax.ShapeDtypeStruct((2, 64, heads, SIZE), jnp.float32) for heads in (4, 2, 2)]
    last_query = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    kinds = ("all_gather", "reduce_scatter", "collective_permute", "all_reduce", "all_to_all")
    with jax.set_mesh(meshes.make_mesh({"context": 8})):
        gradient = jax.grad(total, (0, 1, 2))
        texts = [jax.jit(f).lower(*shapes, last_query).as_text() for f in (total, gradient)]
    program_counts = [{kind: text.count(f"stablehlo.{kind}") for kind in kinds} for text in texts]
    return [{kind: count for kind, count in counts.items() if count} for counts in program_counts]


def test_collectives_of_a_context_mesh() -> None:
    """Forward gathers k, v and their two indices, backward gathers them again.

    Backward also sends the gradients of k and v to the devices that own them.
    """
    assert _collectives(ring=False) == [{"all_gather": 4}, {"all_gather": 8, "all_to_all": 2}]


def test_collectives_of_ring_attention() -> None:
    """Collectives in the loops of ring attention.

    Forward's loop passes on k, v and their two indices. Backward's loop passes on these and two
    gradients, which travel the last two hops after it.
    """
    assert _collectives(ring=True) == [
        {"collective_permute": 4},
        {"collective_permute": 4 + 6 + 4},
    ]


@pytest.mark.parametrize("ring", [False, True])
def test_collectives_of_windows_on_a_context_mesh(ring: bool) -> None:
    """Collectives of both passes: a pass gathers two numbers of queries to choose keys.

    Devices agree on the rounds (all_reduce). Rounds gather k, v and three numbers of each key.
    """
    forward = {"all_gather": 2 + 5, "all_reduce": 1}
    with_backward = {"all_gather": 2 * 7, "all_reduce": 2, "all_to_all": 2}
    assert _collectives(ring, windows=True) == [forward, with_backward]


@pytest.mark.slow
@pytest.mark.parametrize("made_of", [context.ring, context.gathered, context.rounds])
def test_context_parallel_kernels_keep_the_kernel_contract(made_of) -> None:
    """Queries that see none of a device's keys get zeros and 1e30 from it."""
    kernel = attend.KERNELS["dense"]
    pad = ((0, 0), (0, 1))
    q, k, v = (jnp.pad(x, (*pad, (0, 0), (0, 0))) for x in _inputs())
    index, last_query = (jnp.pad(x, pad, constant_values=-1) for x in (INDEX[0], LAST_QUERY))
    inputs = kernels.Inputs(q.reshape(*k.shape[:3], -1, SIZE), k, v, index, index, last_query)
    by_time = PartitionSpec(None, "context")
    with jax.set_mesh(meshes.make_mesh({"context": 4, "fsdp": 2})):
        run = jax.shard_map(
            made_of(kernel).forward,
            in_specs=by_time,
            out_specs=(by_time, PartitionSpec(None, None, None, "context")),
            check_vma=False,
        )
        out, lse = jax.jit(run)(inputs)
    expected_out, expected_lse = kernel.forward(inputs)
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    assert (np.asarray(lse) == 1e30).any() and not (np.asarray(lse) == 1e30).all()


def test_key_gradients_are_summed_in_float32_after_all_to_all() -> None:
    q = jnp.zeros((1, 64, 2, SIZE), jnp.bfloat16)
    last_query = jnp.zeros((1, 64), jnp.int32)
    with jax.set_mesh(meshes.make_mesh({"context": 8})):
        gradient = jax.grad(lambda k: attend.attend(q, k, k, last_query).sum())
        equations = list(programs.equations(jax.make_jaxpr(gradient)(q).jaxpr))
    arrived = [x.outvars[0].aval for x in equations if x.primitive.name == "all_to_all"]
    assert [(x.shape, x.dtype) for x in arrived] == [((1, 8, 8, 2, SIZE), jnp.bfloat16)] * 2
    sums = [x.invars[0].aval for x in equations if x.primitive.name == "reduce_sum"]
    assert [x.dtype for x in sums if x.shape == arrived[0].shape] == [jnp.float32] * 2


@pytest.mark.slow
def test_ring_attention_memory_per_device_is_constant() -> None:
    """Double devices and row length, so that each device keeps its number of tokens."""

    def bytes_of(devices: int, ring: bool) -> int:
        def total(q, k, v, last_query):
            return jnp.sum(attend.attend(q, k, v, last_query, name="chunked", ring=ring))

        q = jax.ShapeDtypeStruct((8 // devices, 2048 * devices, 2, 64), jnp.float32)
        last_query = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
        with jax.set_mesh(meshes.make_mesh({"context": devices, "fsdp": -1})):
            program = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, q, q, last_query).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert bytes_of(8, ring=False) > 1.3 * bytes_of(4, ring=False)
    assert bytes_of(8, ring=True) < 1.05 * bytes_of(4, ring=True)


def test_auto_selects_the_kernel_by_length_and_platform() -> None:
    def program(time: int, platform: str) -> str:
        q = jax.ShapeDtypeStruct((1, time, 2, 64), jnp.float32)
        last_query = jax.ShapeDtypeStruct((1, time), jnp.int32)
        traced = jax.jit(attend.attend).trace(q, q, q, last_query)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    short, long = attend.SHORT, attend.SHORT + 1
    scores = f"x{short}x{short}xf32"
    for platform in ("cpu", "tpu"):
        assert scores in program(short, platform)
        assert f"x{long}x{long}xf32" not in program(long, platform)
        assert ("tpu_custom_call" in program(long, platform)) == (platform == "tpu")
    q = jax.ShapeDtypeStruct((1, long, 2, 64), jnp.bfloat16)
    text = programs.lowered_for_gpu(attend.attend, q, q, q, jnp.zeros((1, long), jnp.int32))
    assert "gpu.triton" in text and f"x{long}x{long}xf32" not in text


@pytest.mark.slow
def test_packed_training_rows_use_the_named_kernel() -> None:
    q, k, v, *_ = _inputs()
    arrays = {"last_query": LAST_QUERY, "positions": POSITIONS}
    packed, nothing = attend.packed("chunked")(q, k, v, None, arrays)
    assert nothing is None
    np.testing.assert_array_equal(packed, attend.attend(q, k, v, LAST_QUERY, name="chunked"))
    assert attend.packed("chunked") is attend.packed("chunked")


def test_unknown_attention_kernel_of_a_policy_is_rejected() -> None:
    from tests import tiny

    with pytest.raises(ValueError, match=r"policy\.attention = 'flash': must be one of \('auto',"):
        dataclasses.replace(tiny.POLICY, attention="flash")
