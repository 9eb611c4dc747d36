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

The paragraphs of a DocMath report are the documents of its cluster; a report of more than 16K
tokens is removed.
"""

from typing import Any

from spell_jax.configs.data import base


def get_config() -> Any:
    config = base.get_config()
    web = base.source("", ("general_qa", "multiple_choice"), layout="ultra_fineweb")
    reports = base.source("", ("financial_math",), layout="docmath", max_characters=100_000_000)
    reports.max_report_tokens = 16_384  # "16K"
    config.sources.update({"web": web, "reports": reports})
    config.decontaminate.benchmarks.update(
        {
            "longbench_v2": base.benchmark("", ("context",), ("question",)),
            "longbench": base.benchmark("", ("context",), ("input",)),
            "frames": base.benchmark("", ("text",), ("Prompt",)),
            "docmath": base.benchmark("", ("paragraphs",), ("question",)),
        }
    )
    config.embed.method = "policy"
    config.tasks.clusters_per_task = 2150
    return config
