"""Tests of the selection of training documents by domain and length."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from spell_jax.data.clusters import count_words, read_clusters
from spell_jax.question_sets import tuning_rows
from spell_jax.question_sets.long_documents import (
    Domain,
    SelectionConfig,
    build,
    parse_domains,
    read_texts,
)

LIMIT = 50


def words(count: int, word: str) -> str:
    return " ".join([word] * count)


@pytest.fixture
def domains(tmp_path) -> list[Domain]:
    """Write books of 1 to 60 words in a folder, and papers of 1 to 20 words in a .jsonl."""
    books, papers = tmp_path / "books", tmp_path / "arxiv.jsonl"
    books.mkdir()
    for size in range(1, 61):
        (books / f"{size:02d}.txt").write_text(words(size, "book"))
    lines = [json.dumps({"text": words(size, "paper")}) for size in range(1, 21)]
    papers.write_text("\n".join([*lines, '{"text": " "}', "no json"]))
    return [Domain(books, 8), Domain(papers, 3)]


def sizes(out: pathlib.Path) -> dict[str, list[int]]:
    """Count the words of each document in a file of clusters, by domain."""
    clusters, _ = read_clusters(out)
    word_counts: dict[str, list[int]] = {}
    for cluster in clusters:
        (text,) = cluster.documents
        word_counts.setdefault(cluster.id.rpartition("-")[0], []).append(count_words(text))
    return word_counts


def select(domains, out: pathlib.Path, **options):
    return build(domains, out, SelectionConfig(LIMIT, **options), count_words)


def test_longest_documents_of_each_domain_under_the_limit(domains, tmp_path):
    out = tmp_path / "out.jsonl"
    summary = select(domains, out)
    assert sizes(out) == {"books": [50, 49, 48, 47, 46, 45, 44, 43], "arxiv": [20, 19, 18]}
    books = {"read": 60, "skipped": 0, "over_limit": 10, "written": 8, "tokens": 372}
    papers = {"read": 20, "skipped": 2, "over_limit": 0, "written": 3, "tokens": 57}
    assert {name: summary[name] for name in ("books", "arxiv")} == {"books": books, "arxiv": papers}
    assert json.loads((tmp_path / "out.jsonl.summary.json").read_text()) == summary


def test_controls_keep_the_quotas(domains, tmp_path):
    out = tmp_path / "out.jsonl"
    select(domains, out, selection="shortest")
    assert sizes(out) == {"books": [*range(1, 9)], "arxiv": [1, 2, 3]}
    sampled = []
    for seed in (0, 0, 1):
        select(domains, out, selection="random", seed=seed)
        sampled.append(sizes(out))
    assert sampled[0] == sampled[1] != sampled[2]
    assert all(len(s["books"]) == 8 and max(s["books"]) <= LIMIT for s in sampled)


def test_missing_documents_are_logged(domains, tmp_path, caplog):
    summary = select([Domain(domains[1].path, 100)], tmp_path / "out.jsonl")
    assert summary["arxiv"]["written"] == 20 and "20 of 100 documents" in caplog.text
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": words(LIMIT + 1, "x")}))
    with pytest.raises(ValueError, match=r"no document was written; .*'over_limit': 1"):
        select([Domain(tmp_path / "long.jsonl", 1)], tmp_path / "out.jsonl")


def test_texts_are_rows_of_supervised_tuning(domains, tmp_path):
    out = tmp_path / "texts.jsonl"
    build(domains, out, SelectionConfig(LIMIT), count_words, as_texts=True)
    texts, skipped = read_texts(out)
    assert len(texts) == 11 and skipped == 0
    assert [row.completion for row in tuning_rows.read_rows(out)[0]] == texts


def test_domains_are_paths_with_quotas(domains):
    paths = [str(domain.path) for domain in domains]
    assert parse_domains([f"{paths[0]}:8", f"{paths[1]}:3"]) == domains
    for value in (paths[0], f"{paths[0]}:0", f"{paths[0]}:many", ":3"):
        with pytest.raises(ValueError, match=rf"domain = '{re.escape(value)}': must be PATH:QUOTA"):
            parse_domains([value])
    with pytest.raises(FileNotFoundError, match="domain = 'nowhere:3': no such file"):
        parse_domains(["nowhere:3"])
    with pytest.raises(ValueError, match="must have different names"):
        parse_domains([f"{paths[0]}:8", f"{paths[0]}:3"])
    for bad, error in (({"max_tokens": 0}, "max_tokens = 0"), ({"selection": "x"}, "selection =")):
        with pytest.raises(ValueError, match=error):
            SelectionConfig(**bad)
