"""Clusters from a folder of your own .txt, .md, .html, .pdf, .jsonl and .parquet files.

Build the clusters, then train on them:

    python -m data_pipeline.build --config=configs/data/folder.py:PATH --out=runs/clusters
    python -m spell_jax.train --config=... --config.data.source=runs/clusters
"""

from typing import Any

from spell_jax.configs.data import base


def get_config(path: str = "") -> Any:
    config = base.get_config()
    config.sources.folder = base.source(path, ("general_qa", "multiple_choice"))
    config.filter.languages = ()
    # Long files are cut into documents, not rejected by the filter.
    config.sources.folder.max_characters = 100_000_000
    return config
