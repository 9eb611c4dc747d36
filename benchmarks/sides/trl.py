"""TRL's side: GRPOTrainer and transformers' `generate`, without JAX; on a CPU or on one GPU.

1. There is no vLLM and no reference model.
2. Weights and optimizer state are float32. With the dtype bfloat16, Trainer's automatic mixed
   precision (bf16=True) casts the weights in every forward pass, in generation too.
3. Attention is torch's scaled_dot_product_attention. All prompts have the same length, so nothing
   is padded, the mask is dropped, and on a GPU the flash kernel runs.
"""

from __future__ import annotations

import importlib
import pathlib
import tempfile
import time
from typing import Any

from benchmarks.sides import contract


def make_model(policy: str, dtype: str, gpu: bool) -> Any:
    """Make the model of a config.json with random weights."""
    import torch
    import transformers

    kinds: Any = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    with torch.device("cuda" if gpu else "cpu"):
        config = transformers.AutoConfig.from_pretrained(pathlib.Path(policy).parent)
        return transformers.AutoModelForCausalLM.from_config(config, **kinds)


def train(options: contract.SideOptions) -> contract.Numbers:
    """Time the steps of TRL."""
    import datasets
    import pyarrow
    import torch
    import transformers
    from datasets.table import InMemoryTable

    trl: Any = importlib.import_module("trl")  # type checkers do not know its exports

    table = pyarrow.table({"prompt": contract.texts(options.prompts())})
    # Without a fingerprint the rows would be pickled for it, which fails with pyarrow before 25.
    data = datasets.Dataset(InMemoryTable(table), fingerprint="prompts")
    clock = contract.Clock()

    def reward(completion_ids, **_) -> list[float]:
        clock.generate_ends()
        return contract.random_rewards(completion_ids, options.response)

    class Ends(transformers.TrainerCallback):
        first_ended = 0.0

        def on_step_end(self, args, state, control, **kwargs):
            if options.gpu:  # kernels run after the call that launches them
                torch.cuda.synchronize()
            clock.update_ends()
            self.first_ended = self.first_ended or time.perf_counter()
            if options.seconds and time.perf_counter() - self.first_ended > options.seconds:
                control.should_training_stop = True

    with tempfile.TemporaryDirectory() as out:
        trainer = trl.GRPOTrainer(
            make_model(options.policy, "float32", options.gpu),
            reward,
            args=trl.GRPOConfig(**_settings(options, out)),
            train_dataset=data,
            processing_class=contract.make_tokenizer(options.vocab),
            callbacks=[Ends()],
        )
        parameters = sum(p.numel() for p in trainer.model.parameters())
        clock.steps_begin()
        trainer.train()
    return contract.Numbers(
        **clock.seconds(),
        peak_bytes=torch.cuda.max_memory_allocated() if options.gpu else contract.peak_bytes(),
        parameters=parameters,
        versions=contract.versions("trl", "transformers", "torch", "accelerate"),
        differences=[
            f"generation and update repeat each prompt {options.group} times",
            "the update computes the entropy of each answer token's distribution too",
        ],
    )


def _settings(options: contract.SideOptions, out: str) -> dict[str, Any]:
    """Return the fields of GRPOConfig."""
    batch = options.batch or options.micro * options.group
    return {
        "output_dir": out,
        "use_cpu": not options.gpu,
        "bf16": options.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "num_generations": options.group,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": options.groups * options.group // batch,
        "max_completion_length": options.response,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "learning_rate": 2e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "max_steps": 1 + options.steps,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


if __name__ == "__main__":
    contract.main(train)
