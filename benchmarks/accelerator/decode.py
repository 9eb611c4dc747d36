"""Prefill and decode of the sampler: tokens/s, share of the bandwidth, and gaps on the device.

1. The shape of Qwen2.5-1.5B with random weights in bfloat16; prompts of 16K tokens, 8 answers of
   256 tokens to each, without stop tokens: 1 prompt (8 samples) and 8 prompts (64 samples).
2. Prefill is timed with answers of one token; decoding is the rest of the time. A decode pass must
   read the weights once, and the keys and values of each prompt and each answer once. These bytes
   per second, over the bandwidth of a copy, are "bandwidth_share".
3. "scheduler_s" is the time between calls of the device, in which the host plans the next one, and
   "scheduler_ms" that time per call. Within a call the device waits too: on GPUs the host runs the
   loop over tokens, because the device decides when it ends. A profiler's trace of half as many
   tokens (trace.py) has the "idle_share", the share of the time without a kernel.
4. "..._graphs" compiles the decode program with its loops as CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.accelerator import shapes, trace
from benchmarks.accelerator.section import Case, Numbers, Setting
from benchmarks.base import SAMPLING, random_params, sample_answers
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.counts import Counts
from spell_jax.sampler.engine import Sampler

# XLA records what kinds of operations it names here as CUDA graphs; by default no loops.
_GRAPH_KINDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
_GRAPHS = {"xla_gpu_enable_command_buffer": _GRAPH_KINDS}


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """Prompts of P tokens with G answers of S tokens, and the sampler's page and call sizes."""

    prompts: int
    prompt: int = 16_384
    group: int = 8
    response: int = 256
    page: int = 128
    prefill: int = 8192
    decode: int = 64

    @property
    def samples(self) -> int:
        return self.prompts * self.group


def cases(setting: Setting) -> Sequence[Case]:
    if setting.tiny:
        policy, sizes = shapes.TINY, [DecodeSizes(2, 32, 2, 4, 16, 32, 2)]
    else:
        policy, sizes = shapes.QWEN_15B, [DecodeSizes(1), DecodeSizes(8)]
    # One copy for all cases, made when the first case needs it.
    params = functools.cache(lambda: random_params(policy, "bfloat16", _one_device()))
    decode_cases = [
        _case(setting, policy, params, size, dtype)
        for size in sizes
        for dtype in (["int8"] if setting.tiny else ["compute", "int8"])
    ]
    if setting.platform == "gpu":
        decode_cases += [_case(setting, policy, params, size, "compute", True) for size in sizes]
    return decode_cases


def _case(
    setting: Setting,
    policy: PolicyConfig,
    params: Callable[[], Any],
    sizes: DecodeSizes,
    dtype: str,
    graphs: bool = False,
) -> Case:
    """Make the case of a size and a cache dtype; with `graphs`, loops run as CUDA graphs."""
    name = f"{sizes.samples}_samples" + ("_int8_cache" if dtype == "int8" else "")
    name += "_graphs" * graphs
    tokens = np.random.default_rng(0).integers(
        policy.vocab_size, size=(sizes.prompts, sizes.prompt)
    )
    sampler = _sampler(policy, sizes, dtype)
    # Only the decode program: prefill calls are few and long, so launches do not bound them.
    if graphs:
        sampler.decode = _with_options(sampler.decode, _GRAPHS)
    in_calls = _Stopwatch()
    sampler.prefill, sampler.decode = map(in_calls.timed, (sampler.prefill, sampler.decode))

    def ask(response: int, prompt: int) -> _Asked:
        """Sample answers to cut prompts."""
        session = sampler.start_session(params())
        jax.block_until_ready(session._state)  # allocation of the pool is not sampling
        in_calls.seconds, clock = 0.0, time.perf_counter()
        sample_answers(session, tokens[:, :prompt].tolist(), sizes.group, response)
        seconds = time.perf_counter() - clock
        waited = sum(session.counts.device_wait_seconds.values())
        return _Asked(seconds, seconds - waited - in_calls.seconds, session.counts)

    def prepare() -> None:  # compiles
        ask(sizes.decode + 1, 2 * sizes.page)

    def run() -> Numbers:
        read = _bytes_read(params(), policy, sizes, 1 if dtype == "int8" else 2)
        return _measure(setting, sizes, ask, read)

    return Case(name, run, prepare=prepare)


def _sampler(policy: PolicyConfig, sizes: DecodeSizes, cache_dtype: str) -> Sampler:
    """Make a sampler in which no slot ever waits for a page; no token ends an answer."""
    # Waiting would show the scheduler's speed, not the kernels'.
    pages = sizes.prompts * -(-sizes.prompt // sizes.page)
    pages += sizes.samples * -(-sizes.response // sizes.page)
    config = SamplerConfig(
        **SAMPLING,
        max_tokens=sizes.response,
        max_prompt=sizes.prompt,
        page_size=sizes.page,
        kv_cache_tokens=pages * sizes.page,
        prefill_tokens=sizes.prefill,
        slots=sizes.samples,
        samples_per_prompt_batch=sizes.group,
        decode_tokens=sizes.decode,
        cache_dtype=cache_dtype,
    )
    return Sampler(policy, config, (), _one_device())


def _one_device() -> jax.sharding.Mesh:
    return meshes.make_mesh(devices=jax.devices()[:1])


class _Asked(NamedTuple):
    """Seconds of sampled answers, the seconds between calls of the device, and counts."""

    seconds: float
    scheduler_s: float
    counts: Counts


class _Stopwatch:
    """Time that is spent in calls of programs, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, program: Any) -> Any:
        """Wrap a program: the time of each call is added to `seconds`."""

        def call(*arguments, **options):
            clock = time.perf_counter()
            result = program(*arguments, **options)
            self.seconds += time.perf_counter() - clock
            return result

        return call


def _with_options(program: Any, options: dict[str, Any]) -> Any:
    """Wrap the decode program: it is compiled with XLA options, once for each lane."""
    compiled: dict[int, Any] = {}

    def decode(params, state, slots, *, lane: int):
        if lane not in compiled:
            lowered = program.lower(params, state, slots, lane=lane)
            compiled[lane] = lowered.compile(compiler_options=options)
        return compiled[lane](params, state, slots)

    return decode


def _measure(
    setting: Setting, sizes: DecodeSizes, ask: Callable[[int, int], _Asked], read: float
) -> Numbers:
    """Time whole prompts and answers; the decode passes must read `read` bytes in all."""
    ask(1, sizes.prompt)  # not timed: the first call after compilation allocates
    prefill_s = ask(1, sizes.prompt).seconds
    whole_s, scheduler_s, counts = ask(sizes.response, sizes.prompt)
    decode_s, passes = whole_s - prefill_s, sizes.response - 1
    rate = read / decode_s / 1e9
    calls = counts.decode_calls + counts.prefill_calls
    numbers = {
        "prefill_tokens_per_s": sizes.prompts * sizes.prompt / prefill_s,
        "decode_tokens_per_s": sizes.samples * passes / decode_s,
        "pass_ms": 1e3 * decode_s / passes,
        "read_gb_per_s": rate,
        "bandwidth_share": setting.share(rate, "copy_gb_per_s"),
        "scheduler_s": scheduler_s,
        "scheduler_ms": 1e3 * scheduler_s / calls,
        "whole_s": whole_s,
        "calls": calls,
        "decode_calls": counts.decode_calls,
        "decode_passes": counts.decode_steps,
    }
    return numbers | trace.profile(lambda: ask(2 * sizes.decode, sizes.prompt), setting.out)


def _bytes_read(params: Any, policy: PolicyConfig, sizes: DecodeSizes, itemsize: int) -> float:
    """Count the bytes all decode passes must read: weights, and K and V of prompts and answers."""
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    # A pass looks up a few rows of the embedding; only a tied embedding is read whole, as the head.
    if not policy.tied_embeddings:
        weights -= params["embedding"].nbytes
    of_token = 2 * policy.layers * policy.kv_heads * policy.head_size * itemsize
    # A prompt's keys once for its G samples, and half an answer's keys on average.
    keys = sizes.prompts * sizes.prompt + sizes.samples * sizes.response / 2
    return (sizes.response - 1) * (weights + keys * of_token)
