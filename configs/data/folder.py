"""Clusters from a folder of your own .txt, .md, .html, .pdf, .jsonl and .parquet files.

Build the clusters, then train on them, after a warm start on the same texts (configs/folder.py):

    python -m data_pipeline.build --config=configs/data/folder.py:PATH --out=runs/clusters
    python -m spell_jax.train --config=configs/folder.py --config.data.source=runs/clusters \
        --workdir=runs/folder

The clusters fit prompts of 512 tokens, as that config has them. For another length of prompts
append it, `configs/data/folder.py:PATH:16384`; it is sampler.max_prompt of the run.
"""

from typing import Any

from spell_jax.configs.data import base

MAX_PROMPT = 512  # tokens, as sampler.max_prompt of configs/folder.py
MAX_DOCUMENT = 3200  # words: the default of cut.max_document_tokens, and not from the paper


def get_config(argument: str = "") -> Any:
    path, _, length = argument.rpartition(":")
    if not path or not length.isdecimal():
        path, length = argument, str(MAX_PROMPT)
    config = base.get_config()
    config.sources.folder = base.source(path, ("general_qa", "multiple_choice"))
    config.filter.languages = ()
    # Long files are cut into documents, not rejected by the filter.
    config.sources.folder.max_characters = 100_000_000
    # Words are counted, without a tokenizer; small ones make two tokens of a word, and a prompt has
    # more than documents.
    words = int(length) * 5 // 16
    config.cut.max_document_tokens = min(MAX_DOCUMENT, words // 4)
    config.cluster.max_cluster_tokens = words
    config.cluster.documents_per_cluster = 20 if words > MAX_DOCUMENT else 4
    config.cluster.min_documents = 2
    return config
