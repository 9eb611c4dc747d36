"""Mixed corpus: filings, books by chapter, speeches, encyclopedia articles, multi-hop contexts.

    python -m data_pipeline.build --config=configs/data/mixed.py:PATH --out=runs/mixed

PATH has the folders edgar, books, gov_speeches, xquad and multihop (rows of HotpotQA,
2WikiMultihopQA and MuSiQue). HotpotQA represents the benchmarks that are kept out of training.
"""

from typing import Any

from spell_jax.configs.data import base

GENERAL = ("general_qa", "multiple_choice")
LONG = 100_000_000  # characters; longer texts than the filter's limit are cut into documents


def get_config(path: str = "") -> Any:
    config = base.get_config()
    sources = config.sources
    add_documents(sources, path)
    sources.articles = base.source(
        f"{path}/xquad/xquad.en.json", GENERAL, layout="json", text="context"
    )
    sources.wikis = base.source(
        f"{path}/multihop/2wiki*.jsonl", GENERAL, layout="json", text="context"
    )
    sources.hops = base.source(
        f"{path}/multihop/musique*.jsonl", GENERAL, layout="json", text="paragraph_text"
    )
    config.decontaminate.benchmarks.hotpotqa = base.benchmark(
        f"{path}/multihop/hotpotqa*.jsonl", ("context",), ("question",)
    )
    return config


def add_documents(sources: Any, path: str) -> None:
    """Add the filings, books and speeches of PATH to the sources of a config."""
    sources.filings = base.source(f"{path}/edgar/*/*.txt", ("financial_math",), max_characters=LONG)
    sources.books = base.source(
        f"{path}/books/*/*.txt", GENERAL, split="chapters", max_characters=LONG
    )
    sources.speeches = base.source(f"{path}/gov_speeches/*/*.txt", GENERAL, max_characters=LONG)
