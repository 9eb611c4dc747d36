"""SPELL on a folder of your own .txt and .md files, with a small policy warm-started on them.

    DOCUMENTS=PATH
    python -m spell_jax.question_sets.facts --source=$DOCUMENTS --out=runs/folder_rows
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
    # Activations of a small policy fit into memory, so recomputing them would only cost time.
    config.policy.update(compute_dtype="float32", remat="none")
    config.policy.folder = "runs/folder_warm_start/policy"

    # Defaults of question_sets.facts, so that warm start and self-play hold out the same clusters.
    config.data.update(max_document_tokens=64, documents_per_cluster=4, grouping="order")
    config.data.held_out = 0.05

    # Compact prompts leave most of the 512 tokens to documents. A cluster has 4 documents, so the
    # questioner reads 2, not the paper's 5.
    config.algorithm.update(prompts="compact", questions=24, generation_batch=48)
    config.algorithm.max_generations = 2
    config.algorithm.questioner.documents = (2,)

    config.sampler.update(max_prompt=512, max_tokens=128)
    config.algorithm.verifier.max_tokens = 4
    config.sampler.update(page_size=64, kv_cache_tokens=131_072)
    config.sampler.update(prefill_tokens=4096, decode_tokens=32)
    # The paper's rate of 2e-6 is for models of 4B parameters and more. With 30 updates, the second
    # moment must not average over 1,000 (b2 of .999), but over 20.
    config.optimizer.update(learning_rate=1e-4, b2=0.95)
    config.packing.token_budget = 6144
    return config
