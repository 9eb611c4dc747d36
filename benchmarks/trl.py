"""Benchmark of a GRPO step against TRL, with the same policy and token counts, in float32 on CPUs.

1. A Qwen2-shaped policy of random weights is written as a Hugging Face folder. Both sides load it.
2. Each side runs in its own process (trl_side.py is TRL's), one after the other, to separate peak
   memory. That is the process's high-water mark, libraries and compilation included.
3. A step is G answers of S tokens to each prompt, random rewards, and one AdamW step. Neither side
   recomputes activations or shards anything. Micro-batches have the same groups on both sides.
4. Seconds are the median over all steps but the first, which compiles here and warms up in TRL.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks.sample import devices, make_sampler, random_params
from benchmarks.trl_side import peak_bytes
from spell_jax.algorithms.base import Reply
from spell_jax.learner import advantages, loss, packing
from spell_jax.learner.learner import Learner
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import setup as start
from spell_jax.sampler.requests import Options

_SIDES = {"ours": "benchmarks.trl", "trl": "benchmarks.trl_side"}
_SIZES = ("prompt", "response", "group", "groups", "micro", "steps", "page_size", "prefill")


def bench_trl(policy: PolicyConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides and compare them.

    "..._s" is the seconds of a step, "..._generate_s" and "..._update_s" those of its two parts.
    "..._peak_bytes" is the process's peak memory. "ratio" and "peak_ratio" are TRL's over ours.

    Args:
      policy: architecture of the policy; its weights are random.
      options: parsed options of "trl".

    Returns:
      The measurements, JSON-able.

    Raises:
      ModuleNotFoundError: if TRL is not installed.
      ValueError: if there are fewer than two steps, or `micro` does not divide `groups`.
    """
    if importlib.util.find_spec("trl") is None:
        raise ModuleNotFoundError("bench trl needs TRL: pip install -e '.[test]'")
    if options.steps < 2:
        raise ValueError(f"steps = {options.steps}: must be at least 2, the first is not timed")
    if options.groups % options.micro:
        raise ValueError(f"micro = {options.micro}: must divide groups = {options.groups}")
    line = {"bench": "trl", **{name: getattr(options, name) for name in _SIZES}}
    line |= {"layers": policy.layers, "width": policy.width, "vocab": policy.vocab_size}
    line |= {"dtype": "float32", "gradient_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        params = random_params(policy, meshes.make_mesh(), "float32")
        weights.save(f"{folder}/policy", policy, params)
        given = {name: getattr(options, name) for name in _SIZES}
        given |= {"folder": f"{folder}/policy", "vocab": policy.vocab_size}
        found = {side: _run(module, given) for side, module in _SIDES.items()}
    assert found["ours"]["parameters"] == found["trl"]["parameters"]
    for side, numbers in found.items():
        parts = numbers["generate_s"], numbers["update_s"]
        steps = [generate + rest for generate, rest in zip(*parts, strict=True)]
        for name, values in zip(("s", "generate_s", "update_s"), (steps, *parts), strict=True):
            line[f"{side}_{name}"] = statistics.median(values[1:])
        line[f"{side}_peak_bytes"] = numbers["peak_bytes"]
    line |= {
        "parameters": found["ours"]["parameters"],
        "ratio": line["trl_s"] / line["ours_s"],
        "peak_ratio": line["trl_peak_bytes"] / line["ours_peak_bytes"],
        "trl": found["trl"]["trl"],
    }
    return line | {name: found["ours"][name] for name in ("devices", "device")}


def _run(module: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run one side in its own process without accelerators; return its last line of output.

    Raises:
      RuntimeError: if the process failed; the message has its stderr.
    """
    command = [sys.executable, "-m", module, json.dumps(given)]
    # TRL runs on the CPU, so our side may not use an accelerator either. USE_JAX=0 keeps TRL's
    # libraries from importing JAX.
    place = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "CUDA_VISIBLE_DEVICES": "", "USE_JAX": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | place)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Time `steps` GRPO steps on our side.

    Args:
      options: sizes of the benchmark, and `folder` of the policy.

    Returns:
      "generate_s" and "update_s" of each step, number of parameters, peak memory and devices.
    """
    mesh = meshes.make_mesh()
    policy, params = weights.load(options.folder, mesh)
    answers = options.group * options.response
    bucket = packing.Bucket(options.prompt + answers, answers)
    layout = packing.PackingConfig((bucket,), options.micro * bucket.length)
    learner = Learner(policy, OptimizerConfig(), loss.LossConfig(), layout, mesh, temperature=1.0)
    pages = options.groups * -(-options.prompt // options.page_size)
    pages += options.groups * options.group * -(-options.response // options.page_size)
    sampler = make_sampler(
        policy,
        mesh,
        options,
        pages,
        max_tokens=options.response,
        max_verdict_tokens=1,
        max_prompt=options.prompt,
        slots=options.groups * options.group,
        samples_per_prompt_batch=options.group,
        decode_tokens=options.response,
    )
    state = learner.init(params)
    del params  # init donated them
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"generate_s": [], "update_s": []}
    for step in range(options.steps):
        began = time.perf_counter()
        groups = _generate(learner, sampler, state, rng, options, step)
        generated = time.perf_counter()
        state, _ = learner.update(state, groups)
        jax.block_until_ready(state)
        seconds["generate_s"].append(generated - began)
        seconds["update_s"].append(time.perf_counter() - generated)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return {**seconds, "parameters": parameters, "peak_bytes": peak_bytes(), **devices()}


def _generate(learner, sampler, state, rng, options, step: int) -> list[packing.TrainGroup]:
    """Sample answers to random prompts and give them random rewards."""
    shape = (options.groups, options.prompt)
    prompts = rng.integers(sampler.policy.vocab_size, size=shape).tolist()
    session = sampler.start_session(learner.cast(state.params))
    how = Options(temperature=1.0, max_tokens=options.response)
    found = session.sample(prompts, options.group, jax.random.key(step), how)
    groups = []
    for prompt, samples in zip(prompts, found, strict=True):
        assert {len(sample.tokens) for sample in samples} == {options.response}
        rewards = advantages.group_advantages(rng.random(options.group))
        groups.append(Reply(prompt, samples, ()).group(rewards, "responder"))
    return groups


if __name__ == "__main__":
    start.setup()
    print(json.dumps(train(argparse.Namespace(**json.loads(sys.argv[1])))))
