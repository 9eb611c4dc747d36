"""Corpus of configs/smollm2.py: filings, books, speeches, and paragraphs of articles.

    python -m data_pipeline.build --config=configs/data/smollm2.py:PATH --out=runs/smollm2/clusters

PATH has the folders edgar, books and gov_speeches. runs/smollm2/articles.jsonl has the paragraphs,
without their questions (configs/smollm2.py). The tokenizer is that of the cold start. Documents and
clusters are small, because a CPU reads some 300 tokens a second.
"""

from typing import Any

from spell_jax.configs.data import base, mixed
from spell_jax.data.clusters import TASKS


def get_config(path: str = "") -> Any:
    config = base.get_config()
    mixed.add_documents(config.sources, path)
    config.sources.articles = base.source(
        "runs/smollm2/articles.jsonl", TASKS, layout="json", text="documents"
    )
    config.cut.tokenizer = "runs/smollm2/cold_start/policy"
    config.cut.max_document_tokens = 160
    config.cluster.documents_per_cluster = 4
    config.cluster.min_documents = 3
    config.cluster.max_cluster_tokens = 640
    config.tasks.clusters_per_task = 120
    return config
