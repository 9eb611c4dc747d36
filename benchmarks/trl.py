"""Benchmark of a GRPO step against TRL, with the same policy and token counts, in float32 on CPUs.

1. A Qwen2-shaped policy of random weights is written as a Hugging Face folder. Both sides load it.
   (On accelerators, benchmarks/accelerator/step.py times the same two sides in bfloat16.)
2. Each side runs in its own process (trl_side.py is TRL's), one after the other, to separate peak
   memory. That is the process's high-water mark, libraries and compilation included.
3. A step is G answers of S tokens to each prompt, random rewards, and one AdamW step. Neither side
   recomputes activations or shards anything. Micro-batches have the same groups on both sides,
   unless several prompts are about the same documents: here they are then a tree, and a micro-batch
   has whole trees.
4. Seconds are the median over all steps but the first, which compiles here and warms up in TRL.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks.base import (
    Prompts,
    SamplerBenchmark,
    make_learner,
    random_group,
    random_params,
    sample_answers,
)
from benchmarks.trl_side import peak_bytes, share_documents
from spell_jax.learner import packing
from spell_jax.policy import weights
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import setup as start


@dataclasses.dataclass
class Trl(SamplerBenchmark):
    """Times GRPO steps here and in TRL, each in its own process.

    "..._s" is the seconds of a step, "..._generate_s" and "..._update_s" those of its two parts.
    "..._peak_bytes" is the process's peak memory. "ratio" and "peak_ratio" are TRL's over ours.

    Raises:
      ModuleNotFoundError: if TRL is not installed.
      ValueError: if there are fewer than two steps, `micro` or `about` does not divide `groups`, or
        the dtype is not float32.
    """

    layers: Annotated[int, "layers L; 0: 3, or as many as the config.json has"] = 8
    groups: Annotated[int, "prompts of a step"] = 2
    about: Annotated[int, "prompts K about the same documents"] = 1
    question: Annotated[int, "last tokens of a prompt, in which the K prompts differ"] = 1
    micro: Annotated[int, "prompts of a micro-batch; here at least K"] = 1
    prompt: Annotated[int, "prompt tokens P"] = 2048
    response: Annotated[int, "tokens of an answer S"] = 128
    steps: Annotated[int, "steps, the first of which is not timed"] = 3
    seconds: Annotated[float, "seconds of timed steps after which none starts; 0: no limit"] = 0.0

    def run(self) -> dict[str, Any]:
        if importlib.util.find_spec("trl") is None:
            raise ModuleNotFoundError("benchmark trl needs TRL: pip install -e '.[test]'")
        if self.steps < 2:
            raise ValueError(f"steps = {self.steps}: must be at least 2, the first is not timed")
        for name in ("micro", "about"):
            if self.groups % (value := getattr(self, name)):
                raise ValueError(f"{name} = {value}: must divide groups = {self.groups}")
        if self.dtype != "float32":
            raise ValueError(f"dtype = {self.dtype!r}: must be 'float32' on both sides")
        with tempfile.TemporaryDirectory() as folder:
            weights.save(folder, self.model, random_params(self.model, self.dtype))
            options = dataclasses.asdict(self) | {"policy": f"{folder}/config.json"}
            theirs = {"batch": self.micro * self.group, "gpu": False}
            sides = {
                "ours": _run("benchmarks.trl", options),
                "trl": _run("benchmarks.trl_side", options | theirs),
            }
        assert sides["ours"]["parameters"] == sides["trl"]["parameters"]
        line = {}
        for side, numbers in sides.items():
            line |= {f"{side}_{name}": value for name, value in medians(numbers).items()}
            line[f"{side}_peak_bytes"] = numbers["peak_bytes"]
        return line | {
            "gradient_checkpointing": False,
            "ratio": line["trl_s"] / line["ours_s"],
            "peak_ratio": line["trl_peak_bytes"] / line["ours_peak_bytes"],
            "trl": sides["trl"]["trl"],
            **{name: sides["ours"][name] for name in ("parameters", "devices", "device")},
        }

    def train(self) -> dict[str, Any]:
        """Time the steps on our side, with the weights beside the config.json `policy`.

        Without such weights, they are random. Weights and optimizer state are float32, activations
        and the sampler's weights have the dtype `dtype`.

        Returns:
          "generate_s" and "update_s" of each step, "prefill_s" of one more set of prompts, number
          of parameters, peak memory (the device's, on a CPU the process's) and devices.
        """
        folder, policy = pathlib.Path(self.policy).parent, self.model
        params: Any = jax.random.key(0)
        if any(folder.glob("*.safetensors")):
            policy, params = weights.load(folder, meshes.make_mesh())
        answers = self.about * self.group * self.response
        documents = self.prompt - self.question
        tree = packing.Bucket(documents + self.about * self.question + answers, answers)
        trees = -(-self.micro // self.about)
        learner = make_learner(policy, tree, trees * tree.length, self.dtype)
        pages = self.groups * -(-self.prompt // self.page_size)
        pages += self.groups * self.group * -(-self.response // self.page_size)
        sampler = self.make_sampler(
            self.prompt,
            self.response,
            self.groups * self.group,
            pages,
            samples_per_prompt_batch=self.group,
            decode_tokens=self.response,
        )
        state = learner.init(params)
        del params  # init donated them
        rng = np.random.default_rng(0)
        seconds: dict[str, list[float]] = {"generate_s": [], "update_s": []}
        timed_since = 0.0
        for step in range(self.steps):
            began = time.perf_counter()
            if step == 1:
                timed_since = began
            if self.seconds and step > 1 and began - timed_since > self.seconds:
                break
            prompts = self._prompts(rng)
            session = sampler.start_session(learner.cast(state.params))
            replies = sample_answers(session, prompts, self.group, self.response, step, top_p=1.0)
            pairs = zip(prompts, replies, strict=True)
            groups = [random_group(rng, prompt, reply, "responder") for prompt, reply in pairs]
            del session  # its pages and weights, before the update needs the memory
            generated = time.perf_counter()
            state, _ = learner.update(state, groups)
            jax.block_until_ready(state)
            seconds["generate_s"].append(generated - began)
            seconds["update_s"].append(time.perf_counter() - generated)
        began = time.perf_counter()
        session = sampler.start_session(learner.cast(state.params))
        sample_answers(session, self._prompts(rng), self.group, 1, top_p=1.0)
        prefill = time.perf_counter() - began
        stats = jax.devices()[0].memory_stats() or {}
        return seconds | {
            "prefill_s": prefill,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            "peak_bytes": stats.get("peak_bytes_in_use") or peak_bytes(),
            "devices": jax.device_count(),
            "device": jax.devices()[0].device_kind,
        }

    def _prompts(self, rng: np.random.Generator) -> Prompts:
        """Make the random prompts of a step."""
        tokens = rng.integers(self.vocab, size=(self.groups, self.prompt))
        return share_documents(tokens, self.about, self.question).tolist()


def medians(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Take the medians of a side's steps but the first: "s", "generate_s" and "update_s"."""
    parts = numbers["generate_s"], numbers["update_s"]
    steps = [generate + update for generate, update in zip(*parts, strict=True)]
    names = ("s", "generate_s", "update_s")
    return {
        name: statistics.median(values[1:])
        for name, values in zip(names, (steps, *parts), strict=True)
    }


def _run(module: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run one side in its own process without accelerators; return its last line of output.

    Raises:
      RuntimeError: if the process failed; the message has its stderr.
    """
    command = [sys.executable, "-m", module, json.dumps(options)]
    # TRL runs on the CPU, so our side may not use an accelerator either. USE_JAX=0 keeps TRL's
    # libraries from importing JAX.
    place = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "CUDA_VISIBLE_DEVICES": "", "USE_JAX": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | place)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    start.setup()
    print(json.dumps(Trl(**json.loads(sys.argv[1])).train()))
