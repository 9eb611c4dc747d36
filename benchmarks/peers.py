"""Benchmark of a GRPO step beside other libraries, with the same policy and token counts, on CPUs.

1. Both sides have a Qwen2-shaped policy with random weights, equally many. (On accelerators,
   benchmarks/accelerator/step.py times ours and TRL's in bfloat16.)
2. The peer runs in an environment of its own (environments.py); sides/ has what it plays.
3. Sides run one after the other, each in its own process: ours, the peer's, ours again, so that a
   machine that slows down shows. Peak memory is the process's, libraries and compilation included.
4. A step is G answers of S tokens to each prompt, random rewards, and one AdamW step. Neither side
   recomputes activations or shards anything. Micro-batches have the same groups on both sides,
   unless several prompts are about the same documents: here they are then a tree, and a micro-batch
   has whole trees. Where a peer's step differs in more than speed, its "differences" say how.
5. The middle step is reported: the median by seconds, without the first step of a process, in which
   programs are compiled. Our two processes count together.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks import environments
from benchmarks.base import (
    Prompts,
    SamplerBenchmark,
    make_learner,
    random_group,
    sample_answers,
)
from benchmarks.sides.contract import Numbers, SideOptions, peak_bytes, share_documents
from spell_jax.learner import packing
from spell_jax.runtime import setup as start
from spell_jax.runtime.files import paths

_OURS = (
    "generation and update lay a prompt out once for all its answers",
    "the update computes logits of answer tokens alone",
)


@dataclasses.dataclass
class PeersBenchmark(SamplerBenchmark):
    """Seconds and memory of GRPO steps here and in another library, each in its own process.

    "ours_s" and "peer_s" are the seconds of a step, "..._generate_s" and "..._update_s" the seconds
    of its two parts, "..._steps_s" the seconds of all timed steps. "..._peak_gb" is peak memory.
    "ratio" and "peak_ratio" are the peer's over ours; "ratio_least" divides the peer's fastest step
    by our slowest, "ratio_greatest" its slowest by our fastest. "differences" lists what each side
    pads, repeats or evaluates besides. "environment_s" is the time that the peer's environment took
    to make, 0 if it was there.

    Raises:
      FileNotFoundError: if no Python is on PATH for the peer's environment.
      PeerError: if the environment cannot be made, a side fails, or the sides differ in weights.
      ValueError: if an option has a value that it may not have.
    """

    layers: Annotated[int, "layers L; 0: 3, or as many as the config.json has"] = 8
    peer: Annotated[str, "library beside ours: easydel, trl or tunix"] = "trl"
    groups: Annotated[int, "prompts of a step"] = 2
    about: Annotated[int, "prompts K about the same documents"] = 1
    question: Annotated[int, "last tokens of a prompt, in which the K prompts differ"] = 1
    micro: Annotated[int, "prompts of a micro-batch; here at least K"] = 1
    prompt: Annotated[int, "prompt tokens P"] = 1024
    response: Annotated[int, "tokens of an answer S"] = 128
    steps: Annotated[int, "timed steps, at least 3; one that is not timed comes before them"] = 3
    environments: Annotated[str, "folder of the environments; empty: one of the user's cache"] = ""

    def run(self) -> dict[str, Any]:
        self._check()
        folder = pathlib.Path(self.environments or paths.cache_folder() / "peers").absolute()
        environment = environments.ensure(self.peer, folder)
        here = environments.Environment(sys.executable, environment.log)
        with tempfile.TemporaryDirectory() as scratch:
            config = pathlib.Path(scratch) / "config.json"
            config.write_text(json.dumps(self.model.to_hf()))
            options = dataclasses.asdict(self) | {"policy": str(config)}
            names = {field.name for field in dataclasses.fields(SideOptions)} & set(options)
            peer_options = {name: options[name] for name in names}
            # Ours before and after the peer: if the machine slows down, our two processes differ.
            first = _play(here, "benchmarks.peers", options)
            peer = _play(environment, f"benchmarks.sides.{self.peer}", peer_options)
            last = _play(here, "benchmarks.peers", options)
        return compare(first, peer, last) | {"environment_s": environment.seconds}

    def _check(self) -> None:
        if self.peer not in environments.PEERS:
            raise ValueError(
                f"peer = {self.peer!r}: must be one of {', '.join(environments.PEERS)}"
            )
        if self.steps < 3:
            raise ValueError(f"steps = {self.steps}: must be at least 3, or a ratio says little")
        for name in ("micro", "about"):
            if self.groups % (value := getattr(self, name)):
                raise ValueError(f"{name} = {value}: must divide groups = {self.groups}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype = {self.dtype!r}: must be 'float32' or 'bfloat16'")
        kind = self.model.to_hf()["model_type"]
        if self.peer != "trl" and kind != "qwen2":
            raise ValueError(f"policy: model_type = {kind!r}: must be 'qwen2' beside {self.peer}")

    def train(self, seconds: float = 0.0) -> dict[str, Any]:
        """Time the steps on our side, with random weights.

        Weights and optimizer state are float32. Activations and the sampler's weights have the
        dtype `dtype`.

        Args:
          seconds: seconds of timed steps after which none starts; 0: no limit.

        Returns:
          Fields of Numbers, "prefill_s" of one more set of prompts, and devices. Peak memory is the
          device's, on a CPU the process's.
        """
        # One bucket that fits a tree exactly, and a pool that fits all prompts and answers: padding
        # and waiting would be ours alone, since the peers' shapes fit too.
        answers = self.about * self.group * self.response
        documents = self.prompt - self.question
        tree = packing.Bucket(documents + self.about * self.question + answers, answers)
        trees = -(-self.micro // self.about)
        learner = make_learner(self.model, tree, trees * tree.length, self.dtype)
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
        state = learner.init(jax.random.key(0))
        rng = np.random.default_rng(0)
        generate_s: list[float] = []
        update_s: list[float] = []
        timed_since = 0.0
        for step in range(1 + self.steps):
            began = time.perf_counter()
            if step == 1:
                timed_since = began
            if seconds and step > 1 and began - timed_since > seconds:
                break
            # New prompts in each step, so that no step can use cached keys.
            prompts = self._prompts(rng)
            session = sampler.start_session(learner.cast(state.params))
            # The peers sample from the full softmax, so top_p is 1 here too.
            replies = sample_answers(session, prompts, self.group, self.response, step, top_p=1.0)
            pairs = zip(prompts, replies, strict=True)
            groups = [random_group(rng, prompt, reply, "responder") for prompt, reply in pairs]
            del session  # its pages and weights, before the update needs the memory
            generated = time.perf_counter()
            state, _ = learner.update(state, groups)
            jax.block_until_ready(state)
            generate_s.append(generated - began)
            update_s.append(time.perf_counter() - generated)
        began = time.perf_counter()
        session = sampler.start_session(learner.cast(state.params))
        sample_answers(session, self._prompts(rng), self.group, 1, top_p=1.0)
        prefill = time.perf_counter() - began
        stats = jax.devices()[0].memory_stats() or {}
        numbers = Numbers(
            generate_s=generate_s,
            update_s=update_s,
            peak_bytes=stats.get("peak_bytes_in_use") or peak_bytes(),
            parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            versions={name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
            differences=list(_OURS),
        )
        devices = {"devices": jax.device_count(), "device": jax.devices()[0].device_kind}
        return dataclasses.asdict(numbers) | {"prefill_s": prefill} | devices

    def _prompts(self, rng: np.random.Generator) -> Prompts:
        """Make the random prompts of a step."""
        tokens = rng.integers(self.vocab, size=(self.groups, self.prompt))
        return share_documents(tokens, self.about, self.question).tolist()


def play_ours(options: Mapping[str, Any]) -> dict[str, Any]:
    """Time our side with the options of PeersBenchmark and of `PeersBenchmark.train`."""
    seconds = options.get("seconds", 0.0)
    return PeersBenchmark(**{name: options[name] for name in options if name != "seconds"}).train(
        seconds
    )


def middle_step(*sides: Mapping[str, Any]) -> dict[str, float]:
    """Select the step with the median seconds; the first step of each process does not count.

    Returns:
      The step's seconds "s", and "generate_s" and "update_s" of its parts. An even number of steps
      gives the means of the two middle steps.
    """
    # A step's parts stay together: medians of the parts need not add up to the median of the whole.
    steps = sorted(_timed(*sides), key=sum)
    middle = steps[(len(steps) - 1) // 2 : len(steps) // 2 + 1]
    generate, update = (statistics.mean(part) for part in zip(*middle, strict=True))
    return {"s": generate + update, "generate_s": generate, "update_s": update}


def compare(
    first: Mapping[str, Any], peer: Mapping[str, Any], last: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare the peer's numbers with the numbers of our first and last process, in one line."""
    # The cheapest sign that both sides play the same architecture.
    if first["parameters"] != peer["parameters"]:
        counts = f"{peer['parameters']:,} weights in the peer, {first['parameters']:,} here"
        raise environments.PeerError(f"{counts}: the policies differ")
    line: dict[str, Any] = {}
    for name, sides in (("ours", (first, last)), ("peer", (peer,))):
        line |= {f"{name}_{key}": value for key, value in middle_step(*sides).items()}
        line[f"{name}_steps_s"] = [sum(step) for step in _timed(*sides)]
        line[f"{name}_peak_gb"] = max(side["peak_bytes"] for side in sides) / 1e9
    return line | {
        "ratio": line["peer_s"] / line["ours_s"],
        "ratio_least": min(line["peer_steps_s"]) / max(line["ours_steps_s"]),
        "ratio_greatest": max(line["peer_steps_s"]) / min(line["ours_steps_s"]),
        "peak_ratio": line["peer_peak_gb"] / line["ours_peak_gb"],
        **{name: {"ours": first[name], "peer": peer[name]} for name in ("versions", "differences")},
        **{name: first[name] for name in ("parameters", "devices", "device")},
    }


def _timed(*sides: Mapping[str, Any]) -> list[tuple[float, float]]:
    """List the seconds of the two parts of each timed step."""
    pairs = (zip(side["generate_s"], side["update_s"], strict=True) for side in sides)
    return [step for steps in pairs for step in list(steps)[1:]]


def _play(
    environment: environments.Environment, module: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    print(f"{module}: started", file=sys.stderr)
    return json.loads(environment.run_module(module, json.dumps(options)))


if __name__ == "__main__":
    start.setup()
    print(json.dumps(play_ours(json.loads(sys.argv[1]))))
