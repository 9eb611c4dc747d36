"""Options that a side is given, the numbers that it prints, and what all sides do alike."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class SideOptions:
    """Options of a side.

    Attributes:
      policy: Hugging Face config.json of the policy.
      vocab: vocabulary V.
      dtype: dtype of products, "float32" or "bfloat16". Weights and optimizer are float32.
      groups: prompts of a step.
      about: prompts K about the same documents.
      question: last tokens of a prompt, in which the K prompts differ.
      group: answers to a prompt G.
      prompt: tokens of a prompt P.
      response: tokens of an answer S.
      micro: prompts of a micro-batch.
      batch: answers of a micro-batch, if it has less than `micro` prompts; 0: micro * group.
      steps: steps that are timed, after a first one.
      seconds: seconds of timed steps after which none starts; 0: no limit. For TRL alone.
      gpu: whether the side runs on a GPU. For TRL alone.
    """

    policy: str
    vocab: int
    dtype: str
    groups: int
    about: int
    question: int
    group: int
    prompt: int
    response: int
    micro: int
    steps: int
    batch: int = 0
    seconds: float = 0.0
    gpu: bool = False

    def shape(self) -> dict[str, Any]:
        """Return the fields of the config.json; ValueError if the policy is not Qwen2."""
        fields = json.loads(pathlib.Path(self.policy).read_text(encoding="utf-8"))
        if fields["model_type"] != "qwen2":
            raise ValueError(f"policy: model_type = {fields['model_type']!r}: must be 'qwen2' here")
        return fields

    def prompts(self, untimed: int = 1) -> Any:
        """Make the random prompts of all steps: an array [(untimed + steps) * groups, P]."""
        import numpy as np

        # Equal seeds give every side the same token ids.
        size = ((untimed + self.steps) * self.groups, self.prompt)
        tokens = np.random.default_rng(0).integers(self.vocab, size=size)
        return share_documents(tokens, self.about, self.question)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers that a side prints.

    Attributes:
      generate_s, update_s: seconds of the two parts of each step, the first step included.
      peak_bytes: peak memory: resident, of the process; with `gpu`, the device's.
      parameters: number of weights.
      versions: versions of the packages that decide the numbers.
      differences: sentences about what the step does and ours does not.
    """

    generate_s: list[float]
    update_s: list[float]
    peak_bytes: int
    parameters: int
    versions: dict[str, str]
    differences: list[str]


class Clock:
    """Seconds of the two parts of each step."""

    def __init__(self):
        self._began = 0.0
        self._generated: list[float] = []
        self._ended: list[float] = []

    def steps_begin(self) -> None:
        """Note that the first step begins."""
        self._began = time.perf_counter()

    def generate_ends(self) -> None:
        """Note that the answers of a step are there and rewards are asked for."""
        self._generated.append(time.perf_counter())

    def update_ends(self) -> None:
        """Record the time at which a step's weights are ready; the last call of a step counts."""
        # A side may call this for each micro-batch. A call replaces the step's earlier calls.
        del self._ended[len(self._generated) - 1 :]
        self._ended.append(time.perf_counter())

    def seconds(self) -> dict[str, list[float]]:
        """Return the fields `generate_s` and `update_s` of Numbers."""
        starts = [self._began, *self._ended[:-1]]
        return {
            "generate_s": [b - a for a, b in zip(starts, self._generated, strict=True)],
            "update_s": [b - a for a, b in zip(self._generated, self._ended, strict=True)],
        }


def share_documents(prompts: Any, about: int, question: int) -> Any:
    """Return prompts [N, P] in which each `about` rows share all but the last `question` tokens."""
    prompts = prompts.copy()
    for first in range(0, len(prompts), about):
        prompts[first : first + about, :-question] = prompts[first, :-question]
    return prompts


def peak_bytes() -> int:
    """Read the peak resident memory of this process in bytes."""
    # getrusage's maximum includes the parent's; VmHWM is this process's own.
    status = pathlib.Path("/proc/self/status").read_text()
    field = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(field.split()[1]) * 1024


def make_tokenizer(vocab: int) -> Any:
    """Make a tokenizer with the words "0" to "V - 1".

    Its special tokens are outside the policy's vocabulary, so that no sampled token ends an answer.
    """
    import tokenizers
    import transformers

    unknown, pad, end = (f"<{name}>" for name in ("unknown", "pad", "end"))
    words = {str(i): i for i in range(vocab)} | {unknown: vocab, pad: vocab + 1, end: vocab + 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unknown,
        pad_token=pad,
        eos_token=end,
        padding_side="left",
    )


def texts(prompts: Any) -> list[str]:
    """Write prompts of token ids as words."""
    return [" ".join(map(str, row)) for row in prompts]


def random_rewards(answers: list[Any], tokens: int) -> list[float]:
    """Sample a reward for each answer; AssertionError if an answer has not `tokens` tokens."""
    # An answer that ends early would make its side look fast.
    lengths = {len(answer.split() if isinstance(answer, str) else answer) for answer in answers}
    assert lengths == {tokens}, f"answers of {lengths} tokens"
    return [random.random() for _ in answers]


def versions(*packages: str) -> dict[str, str]:
    """Read the versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in packages}


def main(train: Callable[[SideOptions], Numbers]) -> None:
    """Play a side with the options of the command line and print its numbers."""
    numbers = train(SideOptions(**json.loads(sys.argv[1])))
    print(json.dumps(dataclasses.asdict(numbers)))
