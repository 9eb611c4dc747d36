"""A GRPO step beside TRL's, and its generation beside transformers' `generate`, in bfloat16.

1. All sides have the same architecture and token counts. Each has random weights of its own, which
   it makes on the device: speed does not depend on their values, and nothing has to be written.
2. Ours and TRL's: weights, gradient and AdamW's moments are float32, products bfloat16. Ours casts
   the weights once a step. TRL has bf16=True, so torch's autocast casts them in every forward
   pass, once for each generated token too. `generate` has bfloat16 weights.
3. No side recomputes activations. Ours lays a prompt out once with its G answers (a tree), TRL
   repeats it for each answer. A micro-batch has `micro` prompts here and `batch` answers there.
   No side pads: prompts have one length, and no token ends an answer. transformers' attention is
   torch's SDPA, which runs its flash kernel for such rows.
4. A step is G answers to each prompt, random rewards, and one AdamW step. The first step, in which
   programs are compiled, is "first_s" and not timed. Seconds are the median of the other steps.
5. Each side runs in a process of its own (step_side.py): "peak_gib" is what its allocator had in
   use at most, compilation included; on a CPU, the process's memory. On a TPU, which one process
   holds, our side runs in the section's process, and there are no others.

Needs torch and transformers; TRL's cases need trl and datasets.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.accelerator import shapes
from benchmarks.accelerator.section import FAULT, Case, Numbers, Setting
from benchmarks.environments import SIDE_VARIABLES
from benchmarks.peers import middle_step, play_ours
from spell_jax.policy.config import PolicyConfig

_VARIABLES = SIDE_VARIABLES | {
    "TORCHDYNAMO_DISABLE": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
}
_PACKAGES = {
    "ours": (),
    "trl": ("torch", "transformers", "accelerate", "datasets", "trl"),
    "generate": ("torch", "transformers"),
}
# Seconds of a side: imports, compilation (of ours, some 20 programs), four steps.
_LIMITS = {"ours": 140.0, "trl": 110.0, "generate": 90.0}
_KILL_SECONDS = 5.0  # before the limit of the case, which would end the section's process
_TIMED_SECONDS = 20.0  # after which no further step starts


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a step.

    Attributes:
      name: prefix of its cases.
      policy: architecture.
      groups: prompts of a step.
      prompt: tokens of a prompt.
      response: tokens of an answer.
      micro: prompts of a micro-batch of ours, each with all its answers.
      batch: answers of a micro-batch of TRL.
      group: answers to a prompt G.
      prefill: prompt tokens of one call of our sampler.
      steps: steps, the first of which is not timed.
    """

    name: str
    policy: PolicyConfig
    groups: int
    prompt: int
    response: int
    micro: int
    batch: int
    group: int = 8
    prefill: int = 8192
    steps: int = 4

    def options(self, side: str, folder: str, gpu: bool) -> dict[str, Any]:
        """Return the options of a side; write the policy's config.json into `folder`."""
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(self.policy.to_hf()))
        options = {
            "policy": str(path),
            "dtype": "bfloat16",
            "groups": self.groups,
            "group": self.group,
            "prompt": self.prompt,
            "response": self.response,
            "micro": self.micro,
            "steps": self.steps - 1,
            "seconds": _TIMED_SECONDS,
        }
        # The architecture is the config.json's; our options would cut it to 8 layers.
        if side == "ours":
            return options | {"layers": self.policy.layers, "prefill": self.prefill}
        theirs = {"vocab": self.policy.vocab_size, "about": 1, "question": 1}
        return options | theirs | {"batch": self.batch, "gpu": gpu}


# In order of worth. TRL keeps about 4 MB of activations for a token of the 1.5B shape.
_SIZES = (
    Size("smollm2_8x2k", shapes.SMOLLM2, groups=8, prompt=2048, response=128, micro=4, batch=8),
    Size("qwen1.5b_2x4k", shapes.QWEN_15B, groups=2, prompt=4096, response=256, micro=1, batch=2),
    Size("smollm2_2x2k", shapes.SMOLLM2, groups=2, prompt=2048, response=128, micro=2, batch=8),
)
_TINY_SIZES = (
    Size(
        "tiny",
        shapes.TINY,
        2,
        prompt=120,
        response=8,
        micro=1,
        batch=2,
        group=4,
        prefill=256,
        steps=2,
    ),
)


def cases(setting: Setting) -> Sequence[Case]:
    """List the cases of every size: our side, TRL, `generate`, and their ratios to ours."""
    sizes = _TINY_SIZES if setting.tiny else _SIZES
    sides = ("ours",) if setting.platform == "tpu" else ("ours", "trl", "generate")
    section = _Section(setting, [(size, side) for size in sizes for side in sides])
    listed: list[Case] = []
    for size in sizes:
        for side in sides:
            run = section.measurement(size, side)
            listed.append(Case(f"{size.name}_{side}", run, limit=_LIMITS[side]))
        if len(sides) > 1:
            listed.append(Case(f"{size.name}_ratios", section.ratios(size)))
    return listed


class _Section:
    """Processes of the sides and the numbers that they returned."""

    def __init__(self, setting: Setting, plan: Sequence[tuple[Size, str]]):
        self._setting, self._plan = setting, plan
        self._numbers = dict(setting.before.get("step", {}))
        self._waiting: tuple[str, subprocess.Popen[str]] | None = None

    def measurement(self, size: Size, side: str) -> Callable[[], Numbers]:
        """Return a function that measures a side."""

        def run() -> Numbers:
            if missing := _missing_packages(side):
                raise ModuleNotFoundError(f"{', '.join(missing)}: not installed")
            with tempfile.TemporaryDirectory() as folder:
                options = size.options(side, folder, self._setting.platform == "gpu")
                if self._setting.platform == "tpu":
                    raw = play_ours(options)
                else:
                    raw = self._measure(size, side, options)
            numbers = _summarize(size, side, raw)
            self._numbers[f"{size.name}_{side}"] = numbers
            return numbers

        return run

    def _measure(self, size: Size, side: str, options: dict[str, Any]) -> dict[str, Any]:
        """Let a side's process measure; meanwhile the next side's process imports libraries."""
        waiting, self._waiting = self._waiting, None
        # A case was skipped or failed early: the waiting process has other libraries.
        if waiting and waiting[0] != side:
            waiting[1].kill()
            waiting = None
        process = waiting[1] if waiting else self._start(side)
        following = self._following(size, side)
        if following and not _missing_packages(following):
            self._waiting = following, self._start(following)
        seconds = _LIMITS[side] - _KILL_SECONDS
        try:
            text, _ = process.communicate(json.dumps(options) + "\n", seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise TimeoutError(f"ended after {seconds:.0f} s") from None
        if not text:
            raise RuntimeError(f"its process ended with {process.returncode}: see the log")
        numbers = json.loads(text)
        if "error" in numbers:
            raise RuntimeError(numbers["error"])
        return numbers

    def _following(self, size: Size, side: str) -> str:
        """Return the side of the next case that has no numbers; "" if there is none."""
        later = self._plan[self._plan.index((size, side)) + 1 :]
        for next_size, next_side in later:
            if f"{next_size.name}_{next_side}" not in self._numbers:
                return next_side
        return ""

    def _start(self, side: str) -> subprocess.Popen[str]:
        place = {"JAX_COMPILATION_CACHE_DIR": str(self._setting.out / "cache")}
        if self._setting.tiny:  # compilation takes most of the time
            place["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.accelerator.step_side", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _VARIABLES | place,
            text=True,
        )

    def ratios(self, size: Size) -> Callable[[], Numbers]:
        """Return a function that divides the other sides' seconds and memory by ours."""

        def run() -> Numbers:
            ours = self._numbers.get(f"{size.name}_ours")
            if ours is None:
                raise RuntimeError(f"{size.name}_ours has no numbers")
            numbers: Numbers = {}
            missing = [name for name in ("trl", "generate") if not self._of(size, name)]
            if trl := self._of(size, "trl"):
                numbers |= {
                    "trl_ratio": trl["s"] / ours["s"],
                    "trl_generate_ratio": trl["generate_s"] / ours["generate_s"],
                    "trl_update_ratio": trl["update_s"] / ours["update_s"],
                    "trl_peak_ratio": trl["peak_gib"] / ours["peak_gib"],
                }
            if generate_numbers := self._of(size, "generate"):
                decode = ours["decode_tokens_per_s"] / generate_numbers["decode_tokens_per_s"]
                numbers |= {
                    "generate_ratio": generate_numbers["generate_s"] / ours["generate_s"],
                    "generate_prefill_ratio": generate_numbers["prefill_s"] / ours["prefill_s"],
                    "generate_decode_ratio": decode,
                }
            if missing:
                numbers[FAULT] = f"no numbers of {' and '.join(missing)}"
            return numbers

        return run

    def _of(self, size: Size, side: str) -> Numbers:
        return self._numbers.get(f"{size.name}_{side}", {})


def _missing_packages(side: str) -> list[str]:
    return [name for name in _PACKAGES[side] if importlib.util.find_spec(name) is None]


def _summarize(size: Size, side: str, raw: Mapping[str, Any]) -> Numbers:
    """Make a case's numbers: medians of seconds, tokens/s, memory and sizes.

    Prompt tokens count once for all G answers, whatever a side computes. The tokens/s of decoding
    are without the first token of an answer, which prefill samples.
    """
    # `generate` times its first call apart; the other sides' lists begin with the first step.
    generate = raw["generate_s"]
    if side == "generate":
        numbers: Numbers = {"generate_s": statistics.median(generate), "first_s": raw["first_s"]}
        timed = len(generate)
    else:
        numbers = {**middle_step(raw), "first_s": generate[0] + raw["update_s"][0]}
        timed = len(generate) - 1
    answers = size.groups * size.group
    numbers["peak_gib"] = raw["peak_bytes"] / 2**30
    numbers["tokens_per_s"] = answers * size.response / numbers["generate_s"]
    if prefill := raw.get("prefill_s"):
        numbers["prefill_s"] = prefill
        numbers["prefill_tokens_per_s"] = size.groups * size.prompt / prefill
        # Tiny shapes may take longer for prefill alone than for both: 1e-9 keeps the sign.
        decode = max(numbers["generate_s"] - prefill, 1e-9)
        numbers["decode_tokens_per_s"] = answers * (size.response - 1) / decode
    numbers |= {"timed_steps": timed, "parameters": raw["parameters"]}
    numbers |= {name: getattr(size, name) for name in ("groups", "group", "prompt", "response")}
    if side == "ours":
        numbers["micro"] = size.micro
    if side == "trl":
        numbers |= {"batch": size.batch, "trl": raw["versions"]["trl"]}
    return numbers
