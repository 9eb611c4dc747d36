"""Continual pretraining on long documents: a baseline of document reconstruction (appendix A.1).

    python -m spell_jax.question_sets.long_documents --domain=BOOKS:8000 --domain=ARXIV:3000 \\
        --domain=CODE:3000 --tokenizer=FOLDER --texts --out=runs/long_texts.jsonl
    python -m spell_jax.sft --config=configs/reconstruction_pretraining.py --workdir=DIR \\
        --config.policy.folder=FOLDER

Each document is a row: the next-token loss on all its tokens, without a chat layout. Hardware:
configs/reconstruction.py, without the rollout copy. Expected, as the paper reports (this code has
not run it): lower scores than the starting policy's.
"""

from spell_jax.config import default_supervised_config
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = default_supervised_config()
    # The paper states one epoch (14,000 documents in batches of 128) and no other setting. The
    # learning rate, its warm-up and the batch are taken from its RL.
    config.update(steps=109, rows_per_step=128, log_every=1, checkpoint_every=20)
    config.source = "runs/long_texts.jsonl"
    config.policy.update(folder="models/Qwen2.5-7B-Instruct-1M", max_positions=65_536)
    config.policy.update(compute_dtype="bfloat16", remat="block")
    config.optimizer.update(learning_rate=1e-6, warmup_steps=5)
    config.packing.token_budget = 65_536
    return config
