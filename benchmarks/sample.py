"""Benchmark of sampling speed: G answers to one prompt, and one answer to each of G prompts.

1. "shared" is one request for G answers. "repeated" is G requests for one answer, with different
   prompts of the same length. The samplers of both have equal slots, pages and program sizes.
2. No answer ends before its cap, so all answers have S tokens.
3. Prefill is timed with answers of one token, the whole with answers of S tokens; decoding is the
   difference. Each time is the best of `repeats`, after a short call that compiles.
4. With --transformers=1 (the test extra), its `generate` also samples G answers to the same prompt,
   with the same weights in the same process.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options, SampleRequest


def bench_sample(policy: PolicyConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark.

    "..._tokens_per_s" is answer tokens over the whole time, "..._decode_tokens_per_s" excludes
    prefill. "ratio" and "decode_ratio" are shared over repeated. "..._kv_bytes" is the size of the
    KV cache pages of prompts and answers.

    Args:
      policy: architecture of the policy; its weights are random.
      options: parsed options of "sample".

    Returns:
      The measurements, JSON-able.
    """
    policy = dataclasses.replace(policy, max_positions=options.prompt + options.response)
    mesh = meshes.make_mesh()
    params = random_params(policy, mesh, options.dtype)
    rng = np.random.default_rng(0)
    prompts = rng.integers(policy.vocab_size, size=(options.group, options.prompt)).tolist()
    kinds = {"shared": (prompts[:1], options.group), "repeated": (prompts, 1)}
    line: dict[str, Any] = {name: getattr(options, name) for name in _SHAPE}
    line |= {"bench": "sample", "layers": policy.layers, "width": policy.width}
    for kind, (asked, group) in kinds.items():
        sampler = _sampler(policy, options, mesh, group)
        line |= _measure(kind, sampler, params, asked, group, options)
    if options.transformers:
        line |= _measure_transformers(policy, params, prompts[0], options)
        line["transformers_ratio"] = line["shared_tokens_per_s"] / line["transformers_tokens_per_s"]
        line["transformers_decode_ratio"] = (
            line["shared_decode_tokens_per_s"] / line["transformers_decode_tokens_per_s"]
        )
    for name in ("ratio", "decode_ratio"):
        field = name.replace("ratio", "tokens_per_s")
        line[name] = line[f"shared_{field}"] / line[f"repeated_{field}"]
    return line | devices()


_SHAPE = ("prompt", "response", "group", "dtype", "page_size", "prefill")
# Sampling parameters of all benchmarks that measure speed alone.
HOW: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}


def devices() -> dict[str, Any]:
    """Fields of the output line for the machine: number and kind of devices."""
    return {"devices": jax.device_count(), "device": jax.devices()[0].device_kind}


def random_params(policy: PolicyConfig, mesh, dtype: str) -> transformer.Params:
    """Random weights of a policy in `dtype`, sharded over the mesh."""
    shapes, axes = transformer.abstract_params(policy)

    def make(key):
        made = transformer.init(policy, key)
        return jax.tree.map(lambda x: x.astype(dtype), made)

    where = meshes.shardings(mesh, axes, shapes)
    return jax.jit(make, out_shardings=where)(jax.random.key(0))


def make_sampler(policy: PolicyConfig, mesh, options, pages: int, **sizes: Any) -> Sampler:
    """Make a sampler without stop tokens, so that answers end only at their caps.

    Args:
      policy: architecture of the policy.
      mesh: mesh to sample on.
      options: parsed options with `page_size` and `prefill`.
      pages: pages of the pool on each row shard of the mesh.
      **sizes: other fields of SamplerConfig.
    """
    config = SamplerConfig(
        **HOW,
        page_size=options.page_size,
        kv_cache_tokens=meshes.row_shards(mesh) * pages * options.page_size,
        prefill_tokens=options.prefill,
        **sizes,
    )
    return Sampler(policy, config, (), mesh)


def _sampler(policy: PolicyConfig, options, mesh, group: int) -> Sampler:
    """Make a sampler with slots and pages for `options.group` answers to separate prompts."""
    pages = sum(-(-tokens // options.page_size) for tokens in (options.prompt, options.response))
    return make_sampler(
        policy,
        mesh,
        options,
        options.group * pages,
        max_tokens=options.response,
        max_verdict_tokens=1,
        max_prompt=options.prompt,
        slots=options.group,
        samples_per_prompt_batch=group,
        decode_tokens=options.response,
    )


def _measure(kind, sampler: Sampler, params, prompts, group: int, options) -> dict[str, Any]:
    """Measure the seconds, tokens/s and KV cache bytes of one kind of request."""

    def ask(tokens: int, length: int) -> None:
        session = sampler.start_session(params)
        keys = request_keys(jax.random.key(1), len(prompts))
        how = Options(**HOW, max_tokens=tokens)
        for prompt, key in zip(prompts, keys, strict=True):
            session.submit(SampleRequest(prompt[:length], group, key, how))
        answers = dict(session.results())
        assert sum(len(s.tokens) for some in answers.values() for s in some) == (
            options.group * tokens
        )

    read, whole = _seconds(ask, options)
    shape, config = sampler.shape, sampler.policy
    pages = len(prompts) * shape.pages_of(options.prompt)
    pages += options.group * shape.pages_of(options.response)
    size = np.dtype(params["final_norm"]["scale"].dtype).itemsize
    token = 2 * config.layers * config.kv_heads * config.head_size * size
    return _rates(kind, read, whole, options) | {
        f"{kind}_kv_bytes": pages * shape.page_size * token
    }


def _measure_transformers(policy, params, prompt: list[int], options) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        weights.save(f"{folder}/policy", policy, params)
        kind = getattr(torch, options.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/policy", dtype=kind)
    ids = torch.tensor([prompt])
    how = {"do_sample": True, **HOW, "eos_token_id": None}

    def ask(tokens: int, length: int) -> None:
        found = model.generate(
            ids[:, :length],
            attention_mask=torch.ones_like(ids[:, :length]),
            num_return_sequences=options.group,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            **how,
        )
        assert found.shape == (options.group, length + tokens)

    read, whole = _seconds(ask, options)
    return _rates("transformers", read, whole, options)


def _seconds(ask: Callable[[int, int], None], options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the fastest call with one-token answers and of the fastest with full answers.

    A short call before them compiles.
    """
    ask(1, 1)
    seconds = []
    for tokens in (1, options.response):
        clocks = [time.perf_counter()]
        for _ in range(options.repeats):
            ask(tokens, options.prompt)
            clocks.append(time.perf_counter())
        seconds.append(min(np.diff(clocks)))
    return seconds[0], seconds[1]


def _rates(kind: str, read: float, whole: float, options) -> dict[str, Any]:
    decoded = options.group * (options.response - 1)
    return {
        f"{kind}_s": whole,
        f"{kind}_prefill_s": read,
        f"{kind}_tokens_per_s": options.group * options.response / whole,
        f"{kind}_decode_tokens_per_s": decoded / (whole - read),
    }
