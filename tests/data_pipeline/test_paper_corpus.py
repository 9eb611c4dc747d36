"""Tests of configs/data/paper.py: the values of Appendix E.1, and a simulated corpus."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline import build
from spell_jax.configs import paper as spell_paper
from spell_jax.configs.data import base, paper
from spell_jax.data import built

TOPICS, TEXTS = 3, 20
LIMIT = 32_768  # characters of a text


def local(folder: str) -> Any:
    """Return the paper's config with sources below a folder, without models and benchmarks."""
    config = paper.get_config()
    config.sources.web.path, config.sources.reports.path = f"{folder}/web", f"{folder}/reports"
    config.decontaminate.benchmarks = type(config)()
    config.embed.update({"method": "tfidf", "dimensions": 8})
    return config


def topic_text(topic: int, number: int, characters: int) -> str:
    """Make a text of English words, so that the filter takes it for English."""
    rng = np.random.default_rng([topic, number])
    subject = ("rivers", "engines", "parliaments")[topic]
    words = [f"The {subject} of region {rng.integers(10**6)} were there in {subject} again."]
    while sum(map(len, words)) + len(words) < characters:
        words.append(f"They say that {subject} have {rng.integers(10**6)} parts of {subject}.")
    return " ".join(words)[:characters].strip()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Write texts of up to 32,768 characters, one longer, one with a low score, and two reports."""
    root = tmp_path_factory.mktemp("corpus")
    for name in ("web", "reports"):
        (root / name).mkdir()
    rows = [
        {"content": topic_text(topic, number, LIMIT - 500 * number), "score": 1.0}
        for topic in range(TOPICS)
        for number in range(TEXTS)
    ]
    rows.append({"content": topic_text(0, 100, LIMIT + 100), "score": 1.0})
    rows.append({"content": topic_text(0, 101, LIMIT), "score": 0.99})
    pq.write_table(pa.Table.from_pylist(rows), root / "web" / "part.parquet")
    long_paragraph = "Sales of the year were high. " * 1000
    reports = (["Costs fell in the year.", long_paragraph], ["The costs. " * 9_000])
    for number, paragraphs in enumerate(reports):
        row = {"question_id": f"q{number}", "question": "How much?", "paragraphs": paragraphs}
        (root / "reports" / f"{number}.json").write_text(json.dumps([row]))
    return str(root)


def test_values_are_the_papers() -> None:
    config = paper.get_config()
    web, reports = config.sources.web, config.sources.reports
    assert (config.filter.min_characters, config.filter.max_characters) == (100, LIMIT)
    assert web.max_characters == 0  # as the filter's
    assert (config.filter.min_quality, config.filter.languages) == (1.0, ("en",))
    assert (config.dedup.threshold, config.dedup.permutations) == (0.8, 128)
    assert config.cluster.documents_per_cluster == 20
    assert (config.tasks.clusters_per_task, reports.max_report_tokens) == (2150, 16_384)
    assert (web.tasks, reports.tasks) == (("general_qa", "multiple_choice"), ("financial_math",))
    benchmarks = {"longbench_v2", "longbench", "frames", "docmath"}
    assert set(config.decontaminate.benchmarks) == benchmarks


def test_no_text_is_cut_and_no_cluster_is_capped() -> None:
    """A character has at most 4 tokens, and a cluster at most 40 documents."""
    config = paper.get_config()
    assert config.cut.max_document_tokens > 4 * LIMIT and config.cut.min_tokens == 1
    assert config.cluster.max_cluster_tokens > 40 * 4 * LIMIT
    assert spell_paper.get_config().data.max_document_tokens >= 4 * LIMIT


def web_sizes(manifest: dict[str, Any]) -> dict[str, int]:
    """Return event -> number of clusters, for each size of a cluster of web texts."""
    return {
        count["what"]: count["number"]
        for count in manifest["counts"]["cluster"]
        if count["what"].startswith("cluster size = ") and count["source"] != "financial_math"
    }


@pytest.mark.slow
def test_long_texts_make_clusters_of_twenty(corpus, tmp_path) -> None:
    """With the limits of base.py the same texts are cut, and clusters have fewer documents."""
    config = local(corpus)
    manifest = build.build(config, str(tmp_path / "paper"))
    assert web_sizes(manifest) == {"cluster size = 20": TOPICS}
    clusters = built.BuiltClusters(tmp_path / "paper")
    tasks_of = {tasks: clusters.read([name])[0] for name, tasks in clusters.tasks.items()}
    lengths = sorted(len(text) for text in tasks_of[("general_qa",)].documents)
    assert len(lengths) == 20 and lengths[-1] > LIMIT - 100
    costs, sales = tasks_of[("financial_math",)].documents
    assert costs.startswith("Costs") and len(sales) > 28_000

    config.cut.update(base.get_config().cut)
    config.cluster.update(base.get_config().cluster)
    sizes = web_sizes(build.build(config, str(tmp_path / "base")))
    assert max(int(what.split()[-1]) for what in sizes) < 20
