"""TRL's side of `python -m benchmarks trl`: GRPOTrainer in its own process, without JAX.

    python -m benchmarks.trl_side JSON

1. JSON has the options of the benchmark. The weights are beside the config.json `policy`. The last
   line of output is JSON too: seconds, parameters and peak memory.
2. No network is needed: the tokenizer has one word for each number below V, prompts consist of
   such words, and rewards are random.
3. There is no gradient checkpointing, no vLLM and no reference model. All answers have S tokens.
   Each generated batch gets one optimizer step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import Any


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes (getrusage would include its parent's)."""
    status = pathlib.Path("/proc/self/status").read_text()
    field = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(field.split()[1]) * 1024


def share_documents(prompts: Any, about: int, question: int) -> Any:
    """Prompts [N, P] in which each `about` begin alike, up to their last `question` tokens."""
    prompts = prompts.copy()
    for first in range(0, len(prompts), about):
        prompts[first : first + about, :-question] = prompts[first, :-question]
    return prompts


def _make_tokenizer(vocab: int) -> Any:
    """Make a tokenizer with the words "0" to "V - 1"; the last three are special tokens."""
    import tokenizers
    import transformers

    words = {str(i): i for i in range(vocab)}
    unknown, pad, end = (str(vocab - i) for i in (3, 2, 1))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=unknown, pad_token=pad, eos_token=end
    )


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Time `steps` GRPO steps of TRL; returns what Trl.train does, and TRL's version."""
    import datasets
    import numpy as np
    import transformers

    trl: Any = importlib.import_module("trl")  # type checkers do not know its exports

    rng = np.random.default_rng(0)
    words = rng.integers(options.vocab - 3, size=(options.groups * options.steps, options.prompt))
    words = share_documents(words, options.about, options.question)
    data = datasets.Dataset.from_dict({"prompt": [" ".join(map(str, row)) for row in words]})
    generated, ended = [], []

    def reward(completion_ids, **_) -> list[float]:
        assert {len(ids) for ids in completion_ids} == {options.response}
        generated.append(time.perf_counter())
        return [random.random() for _ in completion_ids]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        trainer = trl.GRPOTrainer(
            str(pathlib.Path(options.policy).parent),
            reward,
            args=trl.GRPOConfig(**_settings(options, out)),
            train_dataset=data,
            processing_class=_make_tokenizer(options.vocab),
            callbacks=[Clock()],
        )
        parameters = sum(p.numel() for p in trainer.model.parameters())
        began = time.perf_counter()
        trainer.train()
    starts = [began, *ended[:-1]]
    return {
        "parameters": parameters,
        "generate_s": [b - a for a, b in zip(starts, generated, strict=True)],
        "update_s": [b - a for a, b in zip(generated, ended, strict=True)],
        "peak_bytes": peak_bytes(),
        "trl": trl.__version__,
    }


def _settings(options: argparse.Namespace, out: str) -> dict[str, Any]:
    """Fields of GRPOConfig."""
    return {
        "output_dir": out,
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "num_generations": options.group,
        "per_device_train_batch_size": options.micro * options.group,
        "gradient_accumulation_steps": options.groups // options.micro,
        "max_completion_length": options.response,
        "generation_kwargs": {"min_new_tokens": options.response},
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "learning_rate": 2e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "max_steps": options.steps,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


if __name__ == "__main__":
    print(json.dumps(train(argparse.Namespace(**json.loads(sys.argv[1])))))
