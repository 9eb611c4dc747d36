"""Largest errors of the attention kernels on this device, and the bound that each must keep.

1. Training kernels: output and gradients against dense attention in float32, on a row of packed
   trees and padding, with a length that is no multiple of a block, and on a causal row.
2. The same for keys that are gathered or travel around a ring. The shards of a row are the
   entries of a vmapped axis, so that one device plays all shards.
3. Paged kernels: decode, several samples of a prompt, and prefill, against the loop over pages.

An error is the largest difference over the largest entry of the reference, which is computed from
the same rounded inputs with float32 products at full precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator import rows
from benchmarks.accelerator.section import FAULT, Case, Numbers, Setting
from spell_jax.attention import attend, context, paged, paged_tpu, paged_triton
from spell_jax.attention import kernel as kernels
from spell_jax.attention.pages import Pages, quantize
from spell_jax.runtime import mesh as meshes

# The bound of the interpreted kernels (docs/long_context.md), doubled for another order of sums.
# bfloat16 keeps 8 bits: weights and gradients of scores are rounded before products.
_BOUNDS = {jnp.float32: 1e-4, jnp.bfloat16: 2e-2}
_SHARDS = 4  # of a row over the context axis
KERNELS = {"gpu": "triton", "tpu": "splash", "cpu": "triton"}  # interpreted on CPUs
_PAGED = {"gpu": paged_triton, "tpu": paged_tpu, "cpu": paged_triton}


def cases(setting: Setting) -> Sequence[Case]:
    name = KERNELS[setting.platform]
    return [
        *_training_cases(name, setting.tiny),
        *_context_cases(name, setting.tiny),
        *_paged_cases(setting),
    ]


def _case(name: str, program: Callable[[], Any], compare: Callable[[Any], Numbers]) -> Case:
    """Make a case that compiles `program` beside other cases and then compares what it compiled."""
    compiled: list[Any] = []
    return Case(
        name,
        run=lambda: compare(compiled[0]),
        prepare=lambda: compiled.append(program()),
    )


def _exactly(function: Callable[..., Any], abstract: Sequence[Any]) -> Any:
    """Compile a reference, with float32 products at full precision.

    XLA is not to search for the fastest product: on an H200 the search took 100 s for all cases.
    """
    options: Any = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    with jax.default_matmul_precision("highest"):
        return jax.jit(function).lower(*abstract).compile(compiler_options=options)


def _with_gradients(kernel: kernels.Kernel, indices, q, k, v, d_out):
    """Compute output, dq, dk and dv of a kernel."""
    out, pullback = jax.vjp(lambda *qkv: kernels.attend(kernel, *qkv, *indices), q, k, v)
    return out, *pullback(d_out)


# ------------------------------------------------------------------------------- Training kernels


def _training_cases(kernel: str, tiny: bool) -> Sequence[Case]:
    time = 150 if tiny else 2085  # no multiple of a block
    masks = {
        "tree": rows.tree(time - 11, time // 3, 7).tolist() + [-1] * 11,
        "causal": rows.causal(time),
    }
    shapes = [(2, 1, 64)] if tiny else [(14, 2, 64), (28, 4, 128), (4, 4, 128), (8, 2, 256)]
    cases = []
    for dtype in _BOUNDS:
        # Heads of Qwen2.5-0.5B and 7B, one query head for each key head, and a head size of 256.
        for heads, kv_heads, size in shapes:
            for mask, last_query in masks.items():
                if mask == "causal" and (tiny or size != 128):
                    continue
                name = f"{kernel}_{jnp.dtype(dtype).name}_{heads}x{kv_heads}x{size}_{mask}"
                shape = (2, time, heads, kv_heads, size)
                batch = np.array([last_query, rows.causal(time)], np.int32)
                cases.append(_training_case(name, kernel, shape, batch, dtype))
    return cases


def _training_case(name: str, kernel: str, shape, last_query: np.ndarray, dtype) -> Case:
    index = np.broadcast_to(np.arange(last_query.shape[1], dtype=np.int32), last_query.shape)
    indices = index, index, last_query

    def compute(kernel: str, *arrays):
        return _with_gradients(attend.KERNELS[kernel], indices, *arrays)

    ours, dense = (functools.partial(compute, name) for name in (kernel, "dense"))
    return _row_case(name, shape, dtype, ours, dense)


def _row_case(name: str, shape, dtype, ours: Callable[..., Any], dense: Callable[..., Any]) -> Case:
    """Make a case of two functions of q, k, v and d_out that compute output and gradients."""

    def program():
        abstract: Any = jax.eval_shape(lambda: rows.tensors(shape, dtype))
        # Nothing runs eagerly here, because other cases compile at the same time.
        float32 = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in abstract]
        return jax.jit(ours).lower(*abstract).compile(), _exactly(dense, float32)

    def compare(programs) -> Numbers:
        arrays = rows.tensors(shape, dtype)
        results = programs[0](*arrays)
        references = programs[1](*(x.astype(jnp.float32) for x in arrays))
        return _errors(results, references, ("out", "dq", "dk", "dv"), _BOUNDS[dtype])

    return _case(name, program, compare)


# -------------------------------------------------------------------- Rows sharded over an axis


def _context_cases(kernel: str, tiny: bool) -> Sequence[Case]:
    time = 64 if tiny else 4096
    last_query = rows.tree(time, time // 2, 5)
    # Zig-zag: shard i holds the chunks i and 2 n - 1 - i.
    chunks = np.split(np.arange(time, dtype=np.int32), 2 * _SHARDS)
    index = np.stack([np.r_[chunks[i], chunks[-1 - i]] for i in range(_SHARDS)])
    size, heads, kv_heads = (16, 2, 1) if tiny else (128, 8, 2)
    cases = []
    for way, wrap in (("gathered", context.gathered), ("ring", context.ring)):
        for dtype in [jnp.float32] if tiny else _BOUNDS:
            name = f"{way}_{jnp.dtype(dtype).name}"
            shape = (1, time, heads, kv_heads, size)
            cases.append(_context_case(name, kernel, wrap, shape, index, last_query, dtype))
    return cases


def _context_case(name, kernel: str, wrap, shape, index, last_query, dtype) -> Case:
    pair = wrap(attend.KERNELS[kernel])
    row = np.arange(shape[1], dtype=np.int32)[None]

    def sharded(q, k, v, d_out):
        """Compute output and gradients of the shards, in the row's order."""

        def one_shard(index, q, k, v, d_out):
            indices = index, index, jnp.asarray(last_query)[index]
            return _with_gradients(pair, indices, q, k, v, d_out)

        arrays = [x[:, index].swapaxes(0, 1) for x in (q, k, v, d_out)]  # [shards, B, T', ...]
        by_shard: Any = jax.vmap(one_shard, axis_name=meshes.CONTEXT)
        results = by_shard(index[:, None], *arrays)
        order = np.argsort(index.reshape(-1))
        return [x.swapaxes(0, 1).reshape(1, shape[1], *x.shape[3:])[:, order] for x in results]

    def dense(*arrays):
        return _with_gradients(attend.KERNELS["dense"], (row, row, last_query[None]), *arrays)

    return _row_case(name, shape, dtype, sharded, dense)


# ---------------------------------------------------------------------------------- Paged kernels


def _paged_cases(setting: Setting) -> Sequence[Case]:
    # Name -> rows M, queries of a row T.
    calls = {"decode": (8, 1), "samples": (4, 8), "prefill": (4, 32 if setting.tiny else 128)}
    cases = []
    for pool in (jnp.float32, jnp.bfloat16, jnp.int8):
        for call, (count, time) in calls.items():
            if setting.tiny and (pool, call) != (jnp.int8, "samples"):
                continue
            name = f"paged_{call}_{jnp.dtype(pool).name}"
            cases.append(_paged_case(name, setting, count, time, pool))
    return cases


def _paged_case(name: str, setting: Setting, count: int, time: int, pool_dtype) -> Case:
    heads, kv_heads, size = (4, 2, 16) if setting.tiny else (12, 2, 128)
    page_size, pages = (16, 9) if setting.tiny else (128, 65)
    dtype = jnp.float32 if pool_dtype == jnp.float32 else jnp.bfloat16

    def inputs():
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (2, pages, kv_heads, page_size, size)
        pool = Pages(*(jax.random.normal(key, shape, dtype) for key in keys[:2]))
        if pool_dtype == jnp.int8:
            (k, k_scales), (v, v_scales) = quantize(pool.keys), quantize(pool.values)
            pool = Pages(k, v, k_scales, v_scales)
        rng = np.random.default_rng(0)
        table = np.stack([rng.permutation(pages - 1)[: pages // 2] + 1 for _ in range(count)])
        longest = table.shape[1] * page_size
        visible = rng.integers(1, longest + 1, (count, time))
        visible[0], visible[-1, -1] = 0, longest  # a row that sees nothing, a query that sees all
        q = jax.random.normal(keys[2], (count, time, heads, size), dtype)
        return q, pool, jnp.int32(1), jnp.int32(table), jnp.int32(visible)

    def reference(q, pool, layer, table, visible):
        full = [pool.keys.astype(jnp.float32), pool.values.astype(jnp.float32)]
        if pool.key_scales is not None:
            full = [full[0] * pool.key_scales[..., None], full[1] * pool.value_scales[..., None]]
        return paged.attend(
            q.astype(jnp.float32), Pages(*full), layer, table, visible, kernel="xla"
        )

    def program():
        abstract = jax.eval_shape(inputs)
        ours = jax.jit(_PAGED[setting.platform].attend).lower(*abstract).compile()
        return ours, _exactly(reference, abstract)

    def compare(programs) -> Numbers:
        arrays = inputs()
        bound = _BOUNDS[jnp.float32 if dtype == jnp.float32 else jnp.bfloat16]
        results, references = (list(f(*arrays)) for f in programs)
        # Row 0 sees nothing, so its log-sum-exp is an arbitrary number of each kernel.
        results[1], references[1] = (x[1:] for x in (results[1], references[1]))
        return _errors(results, references, ("out", "log_sum_exp"), bound)

    return _case(name, program, compare)


def _errors(results, references, names: Sequence[str], bound: float) -> Numbers:
    """Return the largest error of each array, the bound, and a fault if one is above it."""
    errors: dict[str, float] = {}
    for name, result, reference in zip(names, results, references, strict=True):
        result, reference = (np.asarray(x, np.float32) for x in (result, reference))
        largest = np.max(np.abs(result - reference)) / np.max(np.abs(reference))
        errors[f"{name}_error"] = float(largest)
    numbers: Numbers = {"bound": bound, **errors}
    wrong = [name for name, error in errors.items() if not error <= bound]  # NaN is wrong, too
    if wrong:
        texts = [f"{name} {errors[name]:.2g}" for name in wrong]
        numbers[FAULT] = f"{', '.join(texts)}: must be at most {bound:g}"
    return numbers
