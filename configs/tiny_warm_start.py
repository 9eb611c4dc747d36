"""Makes the tiny policy that ships with the package: supervised tuning on generated demonstrations.

    python -m spell_jax.sft --config=configs/tiny_warm_start.py --workdir=runs/warm_start

What is left to learn comes from the demonstrations (warm_start/demonstrations.py, Mixture): few
documents, and for the verifier a strict teacher, who answers no to .42 of the equal pairs in other
words. Hardware: 2 CPU cores. Time, seed and resulting accuracies: README, section "Results".
The result (runs/warm_start/policy) is a Hugging Face folder; the one that ships is a copy of it.
"""

from typing import Any

from ml_collections import ConfigDict


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config: Any = ConfigDict()
    config.seed = 3
    config.steps = 6000
    config.rows_per_step = 48
    config.log_every = 50
    config.checkpoint_every = 250
    config.preemption_limit_s = 25.0  # as in base.py
    config.wandb = ""  # as in base.py
    config.source = "tiny"  # or a .jsonl of {"prompt", "completion"}
    config.prompts = "compact"

    config.policy = ConfigDict()
    # A Hugging Face folder to start from, which brings its sizes and its tokenizer; empty: random
    # weights of the sizes below.
    config.policy.folder = ""
    config.policy.tokenizer = ""  # a folder with tokenizer.model; empty: trained on the rows
    config.policy.compute_dtype = "float32"
    config.policy.remat = "none"  # policy/config.py lists the names
    config.policy.vocab_size = 896
    config.policy.width = 128
    config.policy.layers = 3
    config.policy.heads = 4
    config.policy.kv_heads = 2
    config.policy.head_size = 32
    config.policy.feed_forward = 384
    # Rows are short: more of the angles turn within one.
    config.policy.rope = ConfigDict({"theta": 100.0})
    config.policy.max_positions = 1024

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 50
    config.optimizer.final_fraction = 0.05
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0

    config.packing = ConfigDict()
    config.packing.buckets = ((160, 96),)
    config.packing.token_budget = 4096

    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "context": 1, "tensor": 1, "expert": 1})
    return config
