"""EasyDeL's side: GRPOTrainer on one device, with the compiled loop of the model's `generate`.

1. eSurge, the trainer's default sampler, is left out.
2. Two steps come before the timed steps.
3. A step has one micro-batch.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from typing import Any

from benchmarks.sides import contract

_UNTIMED = 2  # the second step compiles generation again
_AGAIN = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",  # or, with a cache, the seconds to load from it
)


def train(options: contract.SideOptions) -> contract.Numbers:
    """Time the steps of EasyDeL."""
    import datasets
    import jax

    easydel: Any = importlib.import_module("easydel")

    clock = contract.Clock()
    reference_s: list[float] = []
    compile_s = [0.0]  # of each step

    def add(event: str, duration_secs: float, **_) -> None:
        if event in _AGAIN:
            compile_s[-1] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)

    class Trainer(easydel.GRPOTrainer):
        """A trainer that notes when its steps end, and the seconds of the reference policy."""

        def configure_functions(self):
            functions = super().configure_functions()
            evaluate = self.compute_refmodel_logps

            def timed(*arrays):
                began = time.perf_counter()
                logprobs = jax.block_until_ready(evaluate(*arrays))
                reference_s.append(time.perf_counter() - began)
                return logprobs

            self.compute_refmodel_logps = timed
            return functions

        def on_step_end(self, state, metrics, step):
            jax.block_until_ready(state.graphstate)
            clock.update_ends()
            compile_s.append(0.0)
            return super().on_step_end(state, metrics, step)

    def reward(completions, **_) -> list[float]:
        clock.generate_ends()
        return contract.random_rewards(completions, options.response)

    rows = {"prompt": contract.texts(options.prompts(_UNTIMED))}
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            arguments=easydel.GRPOConfig(**_settings(options, out)),
            model=make_model(options),
            reward_funcs=[reward],
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=contract.make_tokenizer(options.vocab),
        )
        weights = jax.tree_util.tree_leaves_with_path(trainer.model_state.graphstate)
        clock.steps_begin()
        trainer.train()
    unused = [leaf.size for path, leaf in weights if "lm_head" in jax.tree_util.keystr(path)]
    parameters = sum(leaf.size for _, leaf in weights)
    differences = [
        f"generation, reference and update repeat each prompt {options.group} times",
        "evaluates a frozen copy of the policy although beta = 0: "
        f"{statistics.median(reference_s[_UNTIMED:]):.2f} s of a step, counted as generation",
        "traces generation again in each step and loads its program from a cache: at least "
        f"{statistics.median(compile_s[_UNTIMED:-1]):.2f} s of a step",
        "has one micro-batch for all prompts",
        "prefill, reference and update ask for logits of prompt tokens too",
    ]
    if options.shape()["tie_word_embeddings"]:
        # Tied embeddings need no head; without this, the sides' weights would differ in number.
        parameters -= sum(unused)
        differences.append(f"keeps {sum(unused):,} weights of a head that is not used")
    return contract.Numbers(
        **{name: values[_UNTIMED - 1 :] for name, values in clock.seconds().items()},
        peak_bytes=contract.peak_bytes(),
        parameters=parameters,
        versions=contract.versions("easydel", "jax", "flax", "optax", "ejkernel"),
        differences=differences,
    )


def make_model(options: contract.SideOptions) -> Any:
    """Make EasyDeL's Qwen2 of a config.json with random weights."""
    import jax.numpy as jnp
    import transformers
    from flax import nnx

    easydel: Any = importlib.import_module("easydel")

    dtype = jnp.dtype(options.dtype)
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta"),
        "tie_word_embeddings",
    )
    shape = options.shape()
    config = easydel.Qwen2Config(
        **{name: shape[name] for name in names},
        max_position_embeddings=shape["max_position_embeddings"],
        sliding_window=None,
        gradient_checkpointing=easydel.EasyDeLGradientCheckPointers.NONE,
        attn_mechanism="vanilla",  # what "auto" takes on CPUs, but in bfloat16
        attn_dtype=dtype,
        kvdtype=dtype,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = easydel.Qwen2ForCausalLM(
        config=config, dtype=dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    tokens = {"pad_token_id": options.vocab + 1, "eos_token_id": options.vocab + 2}
    model.generation_config = transformers.GenerationConfig(do_sample=True, **tokens)
    return model


def _settings(options: contract.SideOptions, out: str) -> dict[str, Any]:
    """Return the fields of GRPOConfig."""
    return {
        "save_directory": out,
        "total_batch_size": options.groups,
        # Two micro-batches would pair answers with other prompts than their own, because EasyDeL
        # splits the answers and not the prompts.
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "max_training_steps": _UNTIMED + options.steps,
        "max_prompt_length": options.prompt,
        "max_completion_length": options.response,
        "num_return_sequences": options.group,
        "generation_num_return_sequences": options.group,
        "temperature": 1.0,
        "generation_do_sample": True,
        "generation_max_new_tokens": options.response,
        "generation_top_p": 1.0,
        "generation_top_k": -1,
        "beta": 0.0,
        "loss_type": "grpo",
        "learning_rate": 2e-6,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "do_last_save": False,
        "save_steps": None,
        "resume_if_possible": False,
        "use_wandb": False,
        "report_metrics": False,
        "shuffle_train_dataset": False,
        "progress_bar_type": "json",
        # On a CPU eSurge allocates 4 GB of pages again in each step, whatever share of memory it is
        # allowed. Measured once with this side on 2 cores (2 layers of width 64, 2 prompts of 32
        # tokens, 2 answers of 8): 12.5 s a step and a peak of 19 GB, the loop .85 s and 1.8 GB.
        "use_esurge_generation": False,
        "esurge_use_tqdm": False,
        "skip_apply_chat_template": True,
    }


if __name__ == "__main__":
    contract.main(train)
