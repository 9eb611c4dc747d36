"""TRL's side of `python -m benchmarks trl`: GRPOTrainer in its own process, without JAX.

    python -m benchmarks.trl_side JSON

1. JSON has the options of the benchmark, "batch" (answers of a micro-batch) and "gpu". The weights
   are beside the config.json `policy`; without a file of weights there, they are random. The last
   line of output is JSON too: seconds, parameters and peak memory.
2. No network is needed: the tokenizer has one word for each number below V, prompts consist of
   such words, and rewards are random.
3. There is no gradient checkpointing, no vLLM and no reference model. All answers have S tokens.
   Each generated batch gets one optimizer step.
4. Weights and optimizer state are float32. With the dtype bfloat16, Trainer's automatic mixed
   precision (bf16=True) casts the weights in every forward pass, in generation too.
5. Attention is torch's scaled_dot_product_attention. All prompts have the same length, so nothing
   is padded, the mask is dropped, and on a GPU the flash kernel runs. Each of the G answers to a
   prompt repeats the prompt, in generation and in the update.
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


def make_model(policy: str, dtype: str, gpu: bool) -> Any:
    """Make the model of a config.json; random, if no file of weights is beside it."""
    import torch
    import transformers

    folder = pathlib.Path(policy).parent
    kinds: Any = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    with torch.device("cuda" if gpu else "cpu"):
        if any(folder.glob("*.safetensors")):
            return transformers.AutoModelForCausalLM.from_pretrained(folder, **kinds)
        config = transformers.AutoConfig.from_pretrained(folder)
        return transformers.AutoModelForCausalLM.from_config(config, **kinds)


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
    import pyarrow
    import torch
    import transformers
    from datasets.table import InMemoryTable

    trl: Any = importlib.import_module("trl")  # type checkers do not know its exports

    rng = np.random.default_rng(0)
    words = rng.integers(options.vocab - 3, size=(options.groups * options.steps, options.prompt))
    words = share_documents(words, options.about, options.question)
    table = pyarrow.table({"prompt": [" ".join(map(str, row)) for row in words]})
    # Without a fingerprint the rows would be pickled for it, which fails with pyarrow before 25.
    data = datasets.Dataset(InMemoryTable(table), fingerprint="prompts")
    generated, ended = [], []

    def reward(completion_ids, **_) -> list[float]:
        assert {len(ids) for ids in completion_ids} == {options.response}
        generated.append(time.perf_counter())
        return [random.random() for _ in completion_ids]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if options.gpu:
                torch.cuda.synchronize()
            ended.append(time.perf_counter())
            if options.seconds and ended[-1] - ended[0] > options.seconds:
                control.should_training_stop = True

    with tempfile.TemporaryDirectory() as out:
        trainer = trl.GRPOTrainer(
            make_model(options.policy, "float32", options.gpu),
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
        "peak_bytes": torch.cuda.max_memory_allocated() if options.gpu else peak_bytes(),
        "trl": trl.__version__,
    }


def _settings(options: argparse.Namespace, out: str) -> dict[str, Any]:
    """Fields of GRPOConfig."""
    return {
        "output_dir": out,
        "use_cpu": not options.gpu,
        "bf16": options.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "num_generations": options.group,
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": options.groups * options.group // options.batch,
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
