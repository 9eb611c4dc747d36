"""SPELL on a folder of your own .txt and .md files, with a small policy warm-started on them.

    DOCUMENTS=PATH
    python -m spell_jax.warm_start.folder_rows --source=$DOCUMENTS --out=runs/folder_rows
    python -m spell_jax.sft --config=configs/folder_warm_start.py --workdir=runs/folder_warm_start
    python -m spell_jax.train --config=configs/folder.py --workdir=runs/folder \
        --config.data.source=$DOCUMENTS

With --config.data.validation=runs/folder_rows/questions.jsonl the run is also measured before and
after, on questions about clusters that neither the warm start nor self-play has seen. Another
policy is named by --config.policy.folder; for a real model use the sizes of configs/paper.py.
"""

from spell_jax.config import default_config
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = default_config()
    config.update(steps=30, evaluate=True, validate_every=10, checkpoint_every=10)
    config.policy.update(compute_dtype="float32", remat="none")
    config.policy.folder = "runs/folder_warm_start/policy"

    # As in folder_rows, which prepares the warm start: the same clusters, the same ones held out.
    config.data.update(max_document_tokens=64, documents_per_cluster=4, grouping="order")
    config.data.held_out = 0.05

    config.algorithm.update(prompts="compact", questions=24, generation_batch=48)
    config.algorithm.update(max_generations=2, documents=(2,))

    config.sampler.update(max_prompt=512, max_tokens=128, max_verdict_tokens=4)
    config.sampler.update(page_size=64, kv_cache_tokens=131_072)
    config.sampler.update(prefill_tokens=4096, decode_tokens=32)
    config.optimizer.update(learning_rate=1e-4, b2=0.95)
    config.packing.token_budget = 6144
    return config
