"""Benchmark of a GRPO step against TRL, with the same policy and token counts, in float32 on CPUs.

1. A Qwen2-shaped policy of random weights is written as a Hugging Face folder. Both sides load it.
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
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks.base import (
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

_SIDES = {"ours": "benchmarks.trl", "trl": "benchmarks.trl_side"}


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
            given = dataclasses.asdict(self) | {"policy": f"{folder}/config.json"}
            found = {side: _run(module, given) for side, module in _SIDES.items()}
        assert found["ours"]["parameters"] == found["trl"]["parameters"]
        line = {}
        for side, numbers in found.items():
            parts = numbers["generate_s"], numbers["update_s"]
            steps = [generate + update for generate, update in zip(*parts, strict=True)]
            for name, values in zip(("s", "generate_s", "update_s"), (steps, *parts), strict=True):
                line[f"{side}_{name}"] = statistics.median(values[1:])
            line[f"{side}_peak_bytes"] = numbers["peak_bytes"]
        return line | {
            "gradient_checkpointing": False,
            "ratio": line["trl_s"] / line["ours_s"],
            "peak_ratio": line["trl_peak_bytes"] / line["ours_peak_bytes"],
            "trl": found["trl"]["trl"],
            **{name: found["ours"][name] for name in ("parameters", "devices", "device")},
        }

    def train(self) -> dict[str, Any]:
        """Time the steps on our side, from the weights beside the config.json `policy`.

        Returns:
          "generate_s" and "update_s" of each step, number of parameters, peak memory and devices.
        """
        policy, params = weights.load(pathlib.Path(self.policy).parent, meshes.make_mesh())
        answers = self.about * self.group * self.response
        documents = self.prompt - self.question
        tree = packing.Bucket(documents + self.about * self.question + answers, answers)
        trees = -(-self.micro // self.about)
        learner = make_learner(policy, tree, trees * tree.length)
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
        for step in range(self.steps):
            began = time.perf_counter()
            tokens = rng.integers(self.vocab, size=(self.groups, self.prompt))
            prompts = share_documents(tokens, self.about, self.question).tolist()
            session = sampler.start_session(learner.cast(state.params))
            found = sample_answers(session, prompts, self.group, self.response, step, top_p=1.0)
            pairs = zip(prompts, found, strict=True)
            groups = [random_group(rng, prompt, some, "responder") for prompt, some in pairs]
            generated = time.perf_counter()
            state, _ = learner.update(state, groups)
            jax.block_until_ready(state)
            seconds["generate_s"].append(generated - began)
            seconds["update_s"].append(time.perf_counter() - generated)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        machine = {"devices": jax.device_count(), "device": jax.devices()[0].device_kind}
        return seconds | machine | {"parameters": parameters, "peak_bytes": peak_bytes()}


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


if __name__ == "__main__":
    start.setup()
    print(json.dumps(Trl(**json.loads(sys.argv[1])).train()))
