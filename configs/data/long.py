"""Long documents for document reconstruction: books, papers and code, each a cluster of its own.

    python -m data_pipeline.build --config=configs/data/long.py:PATH --out=runs/long
    python -m spell_jax.train --config=configs/reconstruction.py --workdir=DIR \
        --config.data.source=runs/long

PATH has the folders books (.txt files), papers and code (.json or .jsonl files). A paper's text is
in the field "text", as in RedPajama's arXiv, and a code file's in "content", as in The Stack. The
authors keep the longest 8,000 books, 3,000 papers and 3,000 code files. Provide as many, or set
algorithm.most_documents.
"""

from typing import Any

from spell_jax.configs.data import base

ANY = ("general_qa",)  # any task works, because reconstruction asks no questions
LONG = 100_000_000  # characters or tokens; more than any document has


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
