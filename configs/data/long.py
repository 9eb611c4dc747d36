"""Long documents, each a cluster of its own: books, papers and code for document reconstruction.

    python -m data_pipeline.build --config=configs/data/long.py:PATH --out=runs/long
    python -m spell_jax.train --config=configs/reconstruction.py --workdir=DIR \
        --config.data.source=runs/long

PATH has the folders books (.txt files), papers and code (.jsonl or .parquet; "text" and "content"
are the fields that hold a document, as in RedPajama's arXiv and in The Stack). The paper keeps the
longest 8,000, 3,000 and 3,000 of them: give as many, or say algorithm.most_documents.
"""

from typing import Any

from configs.data import base

ANY = ("general_qa",)  # reconstruction asks no questions
LONG = 100_000_000  # characters, and tokens of a document, that are above any


def get_config(path: str = "") -> Any:
    config = base.get_config()
    sources = config.sources
    sources.books = base.source(f"{path}/books/*.txt", ANY, max_characters=LONG)
    sources.papers = base.source(
        f"{path}/papers/*", ANY, layout="json", text="text", max_characters=LONG
    )
    sources.code = base.source(
        f"{path}/code/*", ANY, layout="json", text="content", max_characters=LONG
    )
    config.filter.languages = ()
    config.filter.min_characters = 16_000
    config.cut.max_document_tokens = LONG
    config.cluster.documents_per_cluster = 1
    config.cluster.min_documents = 1
    config.cluster.max_cluster_tokens = LONG
    return config
