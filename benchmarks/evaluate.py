"""Benchmark of evaluation sampling: all questions in one session, and one request at a time.

1. Both variants sample the same number of tokens: G answers to every question, each of which ends
   only at its cap.
2. "together" is what spell_jax.evaluate does: a question's prompt is prefilled once for its G
   answers, and freed slots take the next sequences. "alone" is the plain loop: one prompt and one
   answer at a time, by a sampler with a single slot.
3. Times are the best of `repeats` runs of each variant, after one run that compiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.sample import HOW, devices, make_sampler, random_params
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.requests import Options, SampleRequest


def bench_evaluate(policy: PolicyConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; "ratio" is the samples/s of "together" over that of "alone".

    Args:
      policy: architecture of the policy; its weights are random.
      options: parsed options of "evaluate".

    Returns:
      The measurements, JSON-able.
    """
    policy = dataclasses.replace(policy, max_positions=options.prompt + options.response)
    mesh = meshes.make_mesh()
    params = random_params(policy, mesh, options.dtype)
    rng = np.random.default_rng(0)
    prompts = rng.integers(policy.vocab_size, size=(options.questions, options.prompt)).tolist()
    how = Options(**HOW, max_tokens=options.response)
    prompt_pages, pages = (-(-n // options.page_size) for n in (options.prompt, options.response))
    shapes = {"together": (options.slots, options.group), "alone": (1, 1)}
    samplers = {
        kind: make_sampler(
            policy,
            mesh,
            options,
            slots * (prompt_pages + pages),
            max_tokens=options.response,
            max_verdict_tokens=1,
            max_prompt=options.prompt,
            slots=slots,
            samples_per_prompt_batch=siblings,
        )
        for kind, (slots, siblings) in shapes.items()
    }

    def together() -> int:
        session = samplers["together"].start_session(params)
        for number, prompt in enumerate(prompts):
            session.submit(SampleRequest(prompt, options.group, _key(number, 0), how))
        return sum(len(one.tokens) for _, some in session.results() for one in some)

    def alone() -> int:
        tokens = 0
        for number, prompt in enumerate(prompts):
            for sample in range(options.group):
                session = samplers["alone"].start_session(params)
                session.submit(SampleRequest(prompt, 1, _key(number, sample), how))
                tokens += sum(len(one.tokens) for _, some in session.results() for one in some)
        return tokens

    samples = options.questions * options.group
    line: dict[str, Any] = {"bench": "evaluate", "samples": samples}
    line |= {name: getattr(options, name) for name in ("questions", "group", "slots", "dtype")}
    line |= {"prompt": options.prompt, "response": options.response}
    line |= {"layers": policy.layers, "width": policy.width}
    for kind, ask in (("together", together), ("alone", alone)):
        seconds = _seconds(ask, samples * options.response, options.repeats)
        line |= {f"{kind}_s": seconds, f"{kind}_samples_per_s": samples / seconds}
    line["ratio"] = line["alone_s"] / line["together_s"]
    return line | devices()


def _key(question: int, sample: int) -> np.ndarray:
    return np.array([question, sample], np.uint32)


def _seconds(ask: Callable[[], int], tokens: int, repeats: int) -> float:
    ask()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        assert ask() == tokens
        times.append(time.perf_counter() - began)
    return min(times)
