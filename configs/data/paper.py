"""Corpus of the paper: Ultra-FineWeb and DocMath, 2,150 clusters per task (Appendix E.1).

    python -m data_pipeline.build --config=configs/data/paper.py --out=gs://BUCKET/clusters \
        --config.sources.web.path=gs://BUCKET/Ultra-FineWeb/data/ultrafineweb_en \
        --config.sources.reports.path=gs://BUCKET/DocMath-Eval \
        --config.decontaminate.benchmarks.longbench_v2.path=gs://BUCKET/LongBench-v2/data.json ... \
        --config.cut.tokenizer=Qwen2.5-7B-Instruct --config.embed.folder=Qwen3-Embedding-8B \
        --runner=DataflowRunner ...

All paths are your own copies. From Hugging Face: openbmb/Ultra-FineWeb, yale-nlp/DocMath-Eval and
Qwen/Qwen3-Embedding-8B. Benchmarks of Appendix E.2, in the files that spell_jax.evaluate reads:
LongBench-v2, LongBench's hotpotqa, 2wikimqa and musique, Frames with the texts of its pages
(ModelScope iic/frames; Google's files have links only), and DocMath-Eval's testmini. The documents
and questions of every benchmark are searched for. Every path is required. This config was never run
at full size, and nothing about it was measured.

Each value below names its place in Appendix E.1 (paragraph 1: tasks and DocMath; paragraph 2:
Ultra-FineWeb), or says that it is ours. The paper reports these sizes: 1.16 billion English texts,
4 million after the filter, 1.1 million after deduplication and decontamination, 50,000 clusters of
20 texts on average (1.1 million / 50,000 is 22). Here the number of clusters follows from the size
of a cluster.

**Long clusters.** The paper limits a text to 32,768 characters, and gives no limit in tokens, of a
text or of a cluster of Ultra-FineWeb. Only DocMath's reports have a total below 16K tokens.
Training reads at most 16K tokens (section 4.1), and the responder reads all documents of a cluster.
So 20 texts fit 16,384 tokens only if their mean is at most 819. The paper does not say what happens
to longer clusters, or how many there are. Its public code drops the questions of a responder's
prompt over 18,000 tokens without training on them, and cuts nothing. `sampler.max_prompt` of
configs/paper.py (16,384) does the same here, and `rollout/overlong` counts these questions.
`spell_jax.train` warns at its start if some sampled clusters do not fit. The config's
`data.max_document_tokens` (131,072) cuts none of these texts: the tokens of a byte-level tokenizer
are at most the bytes, four for a character. Other configs cut documents at 3,200 tokens.

    python -m spell_jax.train --config=configs/paper.py:qwen2.5-7b-instruct --workdir=DIR \
        --config.data.source=gs://BUCKET/clusters

With `--config.cut.max_document_tokens=3200 --config.cluster.max_cluster_tokens=14000`, the values
of base.py, every cluster fits, but long texts are cut, and their clusters have fewer than 20
documents.
"""

from typing import Any

from spell_jax.configs.data import base

NO_LIMIT = 100_000_000  # tokens, or characters; more than any document or cluster has


def get_config() -> Any:
    config = base.get_config()
    config.sources.update(_sources())
    _set_general_corpus(config)
    config.decontaminate.benchmarks.update(_benchmarks())
    # Paragraph 2, at its end: as many clusters for each of the three tasks, 6,450 in all.
    config.tasks.clusters_per_task = 2150
    return config


def _sources() -> dict[str, Any]:
    # Paragraph 2: general QA and multiple choice are asked about Ultra-FineWeb.
    web = base.source("", ("general_qa", "multiple_choice"), layout="ultra_fineweb")
    # Paragraph 1: financial math is asked about DocMath, which has no filter of characters.
    reports = base.source("", ("financial_math",), layout="docmath", max_characters=NO_LIMIT)
    # Paragraph 1: a total below 16K tokens. Ours: a report's paragraphs are the documents of its
    # cluster, because a row of DocMath-Eval is a list of paragraphs.
    reports.max_report_tokens = 16_384
    return {"web": web, "reports": reports}


def _set_general_corpus(config: Any) -> None:
    """Set filter, deduplication, embedding and clustering, in the order of paragraph 2."""
    config.filter.languages = ("en",)  # English texts; ours: DocMath's reports are tested, too
    config.filter.min_quality = 1.0
    config.filter.min_characters = 100
    config.filter.max_characters = 32_768  # characters, not tokens
    # MinHash LSH, for duplicates and for documents of the benchmarks. Ours: the number of bands and
    # the words of a shingle (configs/data/base.py).
    config.dedup.threshold = 0.8
    config.dedup.permutations = 128
    # Ours: questions of the benchmarks are searched for. The paper names their documents only.
    config.decontaminate.question_threshold = 0.8
    # The paper cuts no text, and removes no text because of its tokens.
    config.cut.max_document_tokens = NO_LIMIT
    config.cut.min_tokens = 1
    config.embed.method = "policy"  # Qwen3-Embedding-8B, 4096 dimensions
    config.cluster.documents_per_cluster = 20
    config.cluster.max_cluster_tokens = NO_LIMIT  # the paper gives none
    # Ours: as many documents as the questioner reads (m = 5, section 4.1). Smaller clusters are
    # merged; the paper gives no smallest size. Ours, too: at most 40 documents (kmeans.py).
    config.cluster.min_documents = 5


def _benchmarks() -> dict[str, Any]:
    """Return the benchmarks of Appendix E.2, which paragraph 2 keeps out of the corpus."""
    return {
        "longbench_v2": base.benchmark("", ("context",), ("question",)),
        "longbench": base.benchmark("", ("context",), ("input",)),
        "frames": base.benchmark("", ("text",), ("Prompt",)),
        "docmath": base.benchmark("", ("paragraphs",), ("question",)),
    }
