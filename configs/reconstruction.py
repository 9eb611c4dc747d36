"""Document reconstruction from Qwen2.5-7B-Instruct-1M: the paper's hyper-parameters.

    python -m spell_jax.train --config=configs/reconstruction.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

FOLDER is a local copy of Qwen/Qwen2.5-7B-Instruct-1M (Hugging Face), by default
models/Qwen2.5-7B-Instruct-1M; DOCUMENTS are long ones, a folder of texts or what data_pipeline has
built from books, papers and code (README, "Your own documents"). The paper takes the 8,000 longest
books and 3,000 papers and pieces of code each, 49,000 tokens on average, and 500 for validation.
Hardware: weights, gradient, optimizer and the rollout copy take 18 bytes for each of the 7.6e9
parameters, 137 GB (estimated), split over all devices.
Expected, as the paper reports (Table 1; nothing of it was run with this code): RULER's four tasks
68.9 before and 72.2 after, and 69.8 with puzzles in mixed order (curriculum=False).
"""

from spell_jax.config import default_config
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = default_config("reconstruction")
    config.steps = 109  # of 128: 14,000 documents once
    config.policy.folder = "models/Qwen2.5-7B-Instruct-1M"

    config.data.update(grouping="order", documents_per_cluster=1, held_out=0.035)
    config.data.max_document_tokens = 1_000_000  # the algorithm takes a window that fits
    config.data.update(tasks=("general_qa",), task_weights=(1.0,))

    # 64K together. The paper names no temperature; sampling from the full distribution is verl's
    # default.
    config.sampler.update(temperature=1.0, top_p=1.0, max_prompt=61_440)
    config.sampler.update(prefill_tokens=16_384, kv_cache_tokens=4_194_304)
    config.optimizer.update(learning_rate=1e-6, warmup_steps=5)
    config.packing.buckets = ((16_384, 8192), (32_768, 16_384), (65_536, 32_768))
    config.packing.token_budget = 65_536
    return config
