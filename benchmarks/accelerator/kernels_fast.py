"""Speed of the attention kernels on this device, beside other kernels, and a sweep over tiles.

1. Rows of 4K to 128K tokens with the heads of Qwen2.5-7B (28 of 4 key heads, H = 128) in bfloat16:
   causal, and as a tree of 4 questions with 8 answers each. "forward_ms" is timed alone;
   "backward_ms" is the time of forward and backward less the time of forward.
2. Operations are 4 N H for each visible pair of a query and a key forward, and 2.5 times as many
   backward (five products instead of two). The shares are of the measured bfloat16 product.
3. Other kernels run the same causal rows: chunked (XLA), cuDNN's through jax.nn, and PyTorch's
   flash kernel. cuDNN and PyTorch have no mask for trees.
4. "tiles_..." times each kernel at 16K for a dozen tiles (Triton only). "paged_..." reads the
   sampler's pages for 8 prompts of 16K tokens.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator import rows
from benchmarks.accelerator.kernels_right import KERNELS
from benchmarks.accelerator.section import FAULT, Case, Numbers, Setting, seconds_of
from spell_jax.attention import attend, paged, triton
from spell_jax.attention import kernel as kernels
from spell_jax.attention.kernel import Inputs
from spell_jax.attention.pages import Pages, quantize
from spell_jax.attention.triton import Tile, Tiles

# From SPELL's inputs of 16K tokens (section 4.1) a factor 4 down and 8 up.
LENGTHS = (4096, 16384, 65536, 131072)
_CHUNKED_LENGTHS = LENGTHS[:3]  # 128K takes minutes
_MASKS = {"causal": rows.causal, "tree": rows.half_documents}
# Operations of the backward pass over the forward pass's: five products instead of two.
_BACKWARD_PRODUCTS = 2.5
_WORTH = 1.5  # times as fast as chunked; below, a kernel of our own is not worth its code


class Heads(NamedTuple):
    """Numbers of query heads N and key heads K, and the head size H."""

    heads: int
    kv_heads: int
    size: int


QWEN_7B = Heads(28, 4, 128)
QWEN_05B = Heads(14, 2, 64)


def cases(setting: Setting) -> Sequence[Case]:
    kernel = KERNELS[setting.platform]
    lengths = (128,) if setting.tiny else LENGTHS
    heads = Heads(2, 1, 64) if setting.tiny else QWEN_7B
    numbers: dict[str, Numbers] = dict(setting.before.get("kernels_fast", {}))

    def timed(name: str, program: Callable[[], tuple[Any, Any]], row, heads: Heads) -> Case:
        return _timed_case(setting, name, program, row, heads, numbers)

    kernel_cases = []
    for time in lengths:
        for mask, row_of in _MASKS.items():
            row = row_of(time)
            program = functools.partial(_row_programs, kernel, time, heads, row)
            kernel_cases.append(timed(f"{kernel}_{mask}_{time}", program, row, heads))
    for time in lengths:
        row = rows.causal(time)
        if setting.platform == "gpu":
            cudnn = functools.partial(_cudnn_programs, time, heads)
            kernel_cases.append(timed(f"cudnn_causal_{time}", cudnn, row, heads))
            kernel_cases.append(_torch_case(setting, time, heads, row, numbers))
        if setting.tiny or time in _CHUNKED_LENGTHS:
            chunked = functools.partial(_row_programs, "chunked", time, heads, row)
            kernel_cases.append(timed(f"chunked_causal_{time}", chunked, row, heads))
    if not setting.tiny:
        row = rows.causal(16384)
        small = functools.partial(_row_programs, kernel, 16384, QWEN_05B, row)
        kernel_cases.append(timed(f"{kernel}_causal_16384_size_64", small, row, QWEN_05B))
    kernel_cases += _paged_cases(setting)
    if kernel == "triton":
        kernel_cases += _tile_cases(setting)
    names = [case.name for case in kernel_cases if "_causal_" in case.name]
    compared = functools.partial(_compare, kernel, lengths, numbers, names)
    return [*kernel_cases, Case("compared", compared)]


# --------------------------------------------------------------------------------- Timed programs


def _timed_case(
    setting: Setting,
    name: str,
    programs: Callable[[], tuple[Any, Any]],
    row: np.ndarray,
    heads: Heads,
    numbers: dict[str, Numbers],
) -> Case:
    """Make a case that times forward, and forward plus backward; add the results to `numbers`.

    `programs` compiles both programs. Forward takes q, k and v; the other takes d_out last.
    """
    compiled: list[tuple[Any, Any]] = []

    def run() -> Numbers:
        forward, forward_backward = compiled[0]
        *qkv, d_out = rows.tensors((1, len(row), *heads), jnp.bfloat16)
        forward_s = seconds_of(lambda: forward(*qkv))["seconds"]
        # Backward alone would need the forward pass's residuals as arguments: take the difference.
        total_s = seconds_of(lambda: forward_backward(*qkv, d_out))["seconds"]
        numbers[name] = _speeds(setting, row, heads, forward_s, total_s)
        return numbers[name]

    return Case(name, run, prepare=lambda: compiled.append(programs()))


def _speeds(
    setting: Setting, row: np.ndarray, heads: Heads, forward_s: float, total_s: float
) -> Numbers:
    """Return ms, TFLOP/s and shares of peak of the forward and the backward pass of a row."""
    operations = 4 * heads.heads * heads.size * rows.visible_pairs(row)
    backward_s = total_s - forward_s
    forward = operations / forward_s / 1e12
    backward = _BACKWARD_PRODUCTS * operations / backward_s / 1e12
    return {
        "forward_ms": 1e3 * forward_s,
        "backward_ms": 1e3 * backward_s,
        "forward_tflops": forward,
        "backward_tflops": backward,
        "forward_share": setting.share(forward, "bfloat16_tflops"),
        "backward_share": setting.share(backward, "bfloat16_tflops"),
    }


def _compile(attention: Callable[..., Any], time: int, heads: Heads) -> tuple[Any, Any]:
    """Compile attention(q, k, v), and its vector-Jacobian product with d_out."""

    def forward_backward(q, k, v, d_out):
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(d_out)

    abstract = jax.eval_shape(lambda: rows.tensors((1, time, *heads), jnp.bfloat16))
    forward = jax.jit(attention).lower(*abstract[:3]).compile()
    return forward, jax.jit(forward_backward).lower(*abstract).compile()


def _row_programs(kernel: str, time: int, heads: Heads, last_query) -> tuple[Any, Any]:
    index = np.arange(time, dtype=np.int32)[None]
    pair = attend.KERNELS[kernel]
    return _compile(
        lambda *qkv: kernels.attend(pair, *qkv, index, index, last_query[None]), time, heads
    )


def _cudnn_programs(time: int, heads: Heads) -> tuple[Any, Any]:
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    )
    return _compile(attention, time, heads)


def _torch_case(
    setting: Setting, time: int, heads: Heads, row: np.ndarray, numbers: dict[str, Numbers]
) -> Case:
    """Time PyTorch's flash kernel on the causal row, with as many key heads as query heads."""
    name = f"torch_causal_{time}"

    def run() -> Numbers:
        import torch
        from torch.nn import attention as torch_attention

        # As many key heads as query heads: the operations are equal to the grouped kernel's.
        shape = (1, heads.heads, time, heads.size)
        options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        q, k, v = (torch.randn(shape, **options) for _ in range(3))
        d_out = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        attention = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True
        )

        def wait(call: Callable[[], Any]) -> Callable[[], Any]:
            def waiting() -> None:
                call()
                torch.cuda.synchronize()

            return waiting

        # Pinned, so that a case cannot fall back to another kernel without notice.
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
            forward_s = seconds_of(wait(attention))["seconds"]
            total_s = seconds_of(wait(lambda: torch.autograd.grad(attention(), (q, k, v), d_out)))
        numbers[name] = _speeds(setting, row, heads, forward_s, total_s["seconds"])
        return numbers[name] | {"torch": torch.__version__}

    if importlib.util.find_spec("torch") is None:

        def run() -> Numbers:
            raise ModuleNotFoundError("PyTorch is not installed")

    return Case(name, run)


def _compare(
    kernel: str, lengths: Sequence[int], numbers: dict[str, Numbers], names: Sequence[str]
) -> Numbers:
    """Divide the forward plus backward time of each other kernel by ours, on causal rows.

    If a case of `names` has no numbers, the result is a fault, and a later run compares again.
    """
    ratios: Numbers = {}
    for time in lengths:
        ours = numbers.get(f"{kernel}_causal_{time}")
        for peer_kernel in ("chunked", "cudnn", "torch"):
            theirs = numbers.get(f"{peer_kernel}_causal_{time}")
            if ours and theirs:
                seconds = [x["forward_ms"] + x["backward_ms"] for x in (theirs, ours)]
                ratios[f"times_as_fast_as_{peer_kernel}_{time}"] = seconds[0] / seconds[1]
    # If XLA's loop were as fast, a kernel of our own would be code without a use.
    chunked = [ratio for name, ratio in ratios.items() if "chunked" in name]
    if chunked:
        ratios["worth_its_code"] = float(max(chunked) >= _WORTH)
    missing = [name for name in names if name not in numbers]
    if missing:
        ratios[FAULT] = f"no numbers of {', '.join(missing)}"
    return ratios


# ------------------------------------------------------------------------------------------ Tiles


def _wide(*sides: tuple[int, int, int, int]) -> list[Tile]:
    return [Tile(*side) for side in sides]


_QUERY_TILES = _wide(  # of the forward and the dq kernel: queries, keys, warps, stages
    *[(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 2)],
    *[(128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 4, 4), (64, 64, 4, 3), (64, 64, 4, 4)],
    *[(64, 128, 4, 2), (64, 128, 4, 3), (64, 32, 4, 4), (128, 32, 8, 4)],
)
_KEY_TILES = _wide(  # of the kernel of dk and dv
    *[(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4)],
    *[(64, 64, 8, 2), (64, 64, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (32, 128, 8, 4)],
    *[(32, 64, 4, 3), (32, 64, 4, 4), (32, 64, 8, 3)],
)


def _tile_cases(setting: Setting) -> Sequence[Case]:
    cases = []
    shapes = [Heads(2, 1, 64)] if setting.tiny else [QWEN_7B, QWEN_05B]
    time = 128 if setting.tiny else 16384
    for heads in shapes:
        for kernel in Tiles._fields:
            tiles = _KEY_TILES if kernel == "dkv" else _QUERY_TILES
            tiles = tiles[: 1 if setting.tiny else None]
            cases.append(_tile_case(kernel, heads, time, tiles))
    return cases


def _tile_case(kernel: str, heads: Heads, time: int, tiles: Sequence[Tile]) -> Case:
    """Time a kernel with each tile size; return milliseconds by tile, and the fastest tile."""
    programs: dict[str, Any] = {}
    # The sweep shows whether the default is still the fastest, on this device and jax version.
    default = getattr(triton.DEFAULT_TILES[2, max(64, heads.size)], kernel)
    failures: dict[str, str] = {}

    def arguments():
        q, k, v, d_out = (x[0] for x in rows.tensors((1, time, *heads), jnp.bfloat16))
        q, d_out = (x.reshape(time, heads.kv_heads, -1, heads.size) for x in (q, d_out))
        index = jnp.arange(time, dtype=jnp.int32)
        inputs = Inputs(q, k, v, index, index, jnp.asarray(rows.causal(time)))
        statistics = jnp.ones((heads.kv_heads, heads.heads // heads.kv_heads, time), jnp.float32)
        return inputs, statistics, statistics, d_out

    def program(tile: Tile) -> Any:
        sizes = triton.DEFAULT_TILES[2, max(64, heads.size)]._replace(**{kernel: tile})

        def run(inputs, lse, delta, d_out):
            if kernel == "forward":
                return triton.forward(inputs, tiles=sizes)
            dq, dk, dv = triton.backward(inputs, lse, delta, d_out, tiles=sizes)
            return dq if kernel == "dq" else (dk, dv)  # XLA drops the other kernel

        return jax.jit(run).lower(*jax.eval_shape(arguments)).compile()

    def prepare() -> None:
        for tile in dict.fromkeys([default, *tiles]):
            name = "x".join(map(str, tile))
            try:
                programs[name] = program(tile)
            except Exception as error:  # too much shared memory, say; other tiles are still timed
                failures[name] = " ".join(str(error).split())[:120]

    def run() -> Numbers:
        inputs = jax.block_until_ready(jax.jit(arguments)())
        timed = {
            name: 1e3 * seconds_of(lambda f=f: f(*inputs), batches=3)["seconds"]
            for name, f in programs.items()
        }
        fastest = min(timed, key=timed.__getitem__)
        return {
            "default_ms": timed["x".join(map(str, default))],
            "fastest_ms": timed[fastest],
            "fastest": fastest,
            "ms": timed,
            "not_compiled": failures,
        }

    return Case(f"tiles_{kernel}_size_{heads.size}", run, limit=90, prepare=prepare)


# ------------------------------------------------------------------------------------ Paged decode


def _paged_cases(setting: Setting) -> Sequence[Case]:
    names = [("bfloat16", "auto", 8), ("bfloat16", "xla", 8), ("int8", "auto", 8)]
    names += [("bfloat16", "auto", 1)]
    return [
        Case(
            f"paged_{dtype}_{kernel}_{group}_answers",
            functools.partial(_time_pages, setting, dtype, kernel, group),
        )
        for dtype, kernel, group in names[: 1 if setting.tiny else None]
    ]


def _time_pages(setting: Setting, dtype: str, kernel: str, group: int) -> Numbers:
    """Time one layer's attention for `group` answers to each of 8 prompts, with heads of 1.5B."""
    prompts, heads, kv_heads, size, page_size = 8, 12, 2, 128, 128
    pages = 2 if setting.tiny else 128  # of a prompt: 16K tokens

    def inputs():
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (1, prompts * pages + 1, kv_heads, page_size, size)
        pool = Pages(*(jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2]))
        if dtype == "int8":
            (k, k_scales), (v, v_scales) = quantize(pool.keys), quantize(pool.values)
            pool = Pages(k, v, k_scales, v_scales)
        table = 1 + jnp.arange(prompts * pages, dtype=jnp.int32).reshape(prompts, pages)
        q = jax.random.normal(keys[2], (prompts, group, heads, size), jnp.bfloat16)
        return q, pool, jnp.int32(0), table, jnp.full((prompts, group), pages * page_size)

    arrays = jax.jit(inputs)()
    read = sum(x.nbytes for x in jax.tree.leaves(arrays[1]))
    function = jax.jit(functools.partial(paged.attend, kernel=kernel))
    timed = seconds_of(lambda: function(*arrays))
    rate = read / timed["seconds"] / 1e9
    shares = {"gb_per_s": rate, "copy_share": setting.share(rate, "copy_gb_per_s")}
    return {"ms": 1e3 * timed["seconds"], **shares}
