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

from typing import Any

from spell_jax.config import default_config


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = default_config()
    config.steps = 30
    config.evaluate = True
    config.validate_every = 10
    config.checkpoint_every = 10

    config.policy.folder = "runs/folder_warm_start/policy"
    config.policy.compute_dtype = "float32"
    config.policy.remat = "none"

    # As in folder_rows, which prepares the warm start: the same clusters, the same ones held out.
    config.data.max_document_tokens = 64
    config.data.documents_per_cluster = 4
    config.data.grouping = "order"

    config.algorithm.prompts = "compact"
    config.algorithm.questions = 24
    config.algorithm.generation_batch = 48
    config.algorithm.max_generations = 2
    config.algorithm.documents = (2,)

    config.sampler.max_prompt = 512
    config.sampler.page_size = 64
    config.sampler.kv_cache_tokens = 131_072
    config.sampler.prefill_tokens = 4096
    config.sampler.decode_tokens = 32
    config.sampler.max_tokens = 128
    config.sampler.max_verdict_tokens = 4

    config.optimizer.learning_rate = 1e-4
    config.optimizer.b2 = 0.95
    config.packing.buckets = ((768, 512),)
    config.packing.token_budget = 6144
    return config
