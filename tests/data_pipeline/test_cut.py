"""Tests of cutting: limits, order, ids, and an account of every piece."""

from __future__ import annotations

import tempfile

import apache_beam as beam
import pytest

from data_pipeline import cut as cut_module
from data_pipeline.cut import MAX_PIECES, CutConfig, make_cut
from data_pipeline.records import digest, make_document, order
from data_pipeline.stages import Stages
from spell_jax.policy import tokenizer as tokenizers

CONFIG = CutConfig(max_document_tokens=16, min_tokens=2)
TWO_WORKERS = ("--direct_num_workers=2", "--direct_running_mode=multi_threading")


def paragraphs(name, count, words=10):
    return "\n\n".join(" ".join(f"{name}{i}w{j}" for j in range(words)) for i in range(count))


def cut(documents, config=CONFIG, options=(), reports=None):
    """Return the tables and counts of make_cut."""

    def make(pipeline):
        return make_cut(pipeline | beam.Create(list(documents)), config, reports)

    with tempfile.TemporaryDirectory() as folder:
        stages = Stages(folder, options)
        stage = stages.run_stage("cut", {}, make)
        documents = sorted(stages.read_records("cut/documents"), key=order)
        removed = sorted(stages.read_records("cut/removed"), key=lambda r: (r["place"], r["part"]))
    counts = {(c["what"], c["source"]): c["number"] for c in stage.plain_counts}
    lengths = stage.histogram("tokens")
    return {"documents": documents, "removed": removed, "counts": counts, "lengths": lengths}


def losses(tables):
    return [(r["reason"], r["place"], r["part"], r["because"]) for r in tables["removed"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "/no/such"}, "cut.tokenizer = '/no/such': must be a folder, or empty"),
        ({"max_document_tokens": 15}, "cut.max_document_tokens = 15: must be at least 16"),
        ({"min_tokens": 0}, "cut.min_tokens = 0: must be from 1 to max_document_tokens = 3200"),
        ({"min_tokens": 9999}, "cut.min_tokens = 9999: must be from 1 to"),
    ],
)
def test_error_names_invalid_setting(change, message):
    with pytest.raises(ValueError, match=message):
        CutConfig(**change)


@pytest.mark.slow
def test_long_documents_are_cut_and_short_ones_kept_whole():
    long = make_document(paragraphs("a", 3), "books", "a.txt", quality=0.5)
    short = make_document("only four words here", "books", "b.txt")
    tables = cut([short, long])
    documents = tables["documents"]
    assert [d["text"] for d in documents] == [*long["text"].split("\n\n"), short["text"]]
    assert [(d["place"], d["part"], d["tokens"], d["quality"]) for d in documents] == [
        ("a.txt", 0, 10, 0.5),
        ("a.txt", 1, 10, 0.5),
        ("a.txt", 2, 10, 0.5),
        ("b.txt", 0, 4, None),
    ]
    assert all(d["id"] == digest(d["text"]) for d in documents)
    assert documents[3]["id"] == short["id"]
    assert tables["removed"] == []
    assert tables["counts"] == {
        ("documents read", "books"): 2,
        ("documents cut", "books"): 1,
        ("pieces made", "books"): 4,
        ("pieces", "books"): 4,
    }
    assert tables["lengths"] == {4: 1, 10: 3}


def test_pieces_of_chapters_keep_their_order():
    """The parts of a book are its chapters: pieces of part 0 come before pieces of part 1."""
    chapters = [make_document(paragraphs(f"c{i}", 12), "books", "a.txt", part=i) for i in range(2)]
    documents = cut(reversed(chapters))["documents"]
    text = "\n\n".join(chapter["text"] for chapter in chapters)
    assert "\n\n".join(d["text"] for d in documents) == text
    parts = [d["part"] for d in documents]
    assert parts == [*range(12), *range(MAX_PIECES, MAX_PIECES + 12)]


@pytest.mark.slow
def test_first_of_equal_pieces_is_kept():
    imprint = "printed in the year that it was printed in by a printer of this town"
    books = [
        make_document(f"{paragraphs(name, 1)}\n\n{imprint}", "books", f"{name}.txt")
        for name in "cab"
    ]
    for some_order in (books, books[::-1]):
        tables = cut(some_order)
        assert [d["place"] for d in tables["documents"] if d["text"] == imprint] == ["a.txt"]
        assert sorted(
            (r["reason"], r["place"], r["part"], r["because"]) for r in tables["removed"]
        ) == [
            ("repeated piece", "b.txt", 1, "books:a.txt"),
            ("repeated piece", "c.txt", 1, "books:a.txt"),
        ]
        assert tables["counts"] == {
            ("documents read", "books"): 3,
            ("documents cut", "books"): 3,
            ("pieces made", "books"): 6,
            ("pieces", "books"): 4,
            ("documents removed: repeated piece", "books"): 2,
        }


def test_repeated_document_is_kept_once():
    twice = make_document("the very same words", "s", "a")
    tables = cut([twice, twice])
    assert [d["place"] for d in tables["documents"]] == ["a"]
    assert [r["reason"] for r in tables["removed"]] == ["repeated piece"]


def test_paragraphs_of_a_report_are_its_documents():
    """Short, shared and repeated paragraphs stay; a report over the limit goes as a whole."""
    shared = "in thousands\n\nOne"
    a, b = f"{shared}\n\n{paragraphs('a', 2)}\n\nOne", f"{paragraphs('b', 1, 20)}\n\n{shared}"
    short_reports = [make_document(text, "reports", f"{i}") for i, text in enumerate((a, b))]
    long = make_document(paragraphs("c", 4), "reports", "2")
    tables = cut([*short_reports, long], reports={"reports": 30})
    paragraphs_by_place = {place: [] for place in "012"}
    for document in tables["documents"]:
        paragraphs_by_place[document["place"]].append((document["text"], document["tokens"]))
    assert [text for text, _ in paragraphs_by_place["0"]] == a.split("\n\n")
    # The paragraph of 20 tokens is over the limit of a piece.
    assert [tokens for _, tokens in paragraphs_by_place["1"]] == [16, 4, 2, 1]
    assert [d["part"] for d in tables["documents"]] == [*range(5), *range(4)]
    assert len({d["id"] for d in tables["documents"]}) == 9
    assert losses(tables) == [("report of too many tokens", "2", 0, "40 tokens")]
    assert tables["counts"]["documents removed: report of too many tokens", "reports"] == 1
    assert tables["counts"]["documents cut", "reports"] == 1


@pytest.mark.slow
def test_pieces_with_too_few_tokens_are_removed():
    text = f"{paragraphs('a', 1, 16)}\n\nEnd\n\n{paragraphs('b', 1, 16)}"
    tables = cut([make_document(text, "s", "a"), make_document("Word", "t", "b")])
    assert [d["part"] for d in tables["documents"]] == [0, 2]
    assert sorted(
        (r["reason"], r["place"], r["part"], r["because"]) for r in tables["removed"]
    ) == [
        ("too few tokens", "a", 1, "1 tokens"),
        ("too few tokens", "b", 0, "1 tokens"),
    ]
    assert tables["counts"]["documents removed: too few tokens", "t"] == 1


def test_empty_document_is_listed_as_removed():
    tables = cut([make_document("", "s", "a")], CutConfig(min_tokens=1))
    assert tables["documents"] == []
    assert [(r["reason"], r["because"]) for r in tables["removed"]] == [
        ("too few tokens", "0 tokens")
    ]


@pytest.mark.slow
def test_pieces_beyond_the_maximum_are_removed_and_counted(monkeypatch):
    monkeypatch.setattr(cut_module, "MAX_PIECES", 4)
    tables = cut([make_document(paragraphs("a", 7), "s", "a", part=2)])
    assert [d["part"] for d in tables["documents"]] == [8, 9, 10, 11]
    assert [(r["reason"], r["part"], r["because"]) for r in tables["removed"]] == [
        ("over 10000 pieces", 8, "3 more pieces")
    ]


def test_tokens_are_counted_with_the_policy_tokenizer(tmp_path):
    texts = [paragraphs(name, 40) for name in "abc"]
    model = tokenizers.train(texts, 300)
    model.save(tmp_path)
    config = CutConfig(tokenizer=str(tmp_path), max_document_tokens=100, min_tokens=2)
    documents = cut([make_document(texts[0], "s", "a")], config)["documents"]
    assert len(documents) > 5
    assert [d["tokens"] for d in documents] == [model.count(d["text"]) for d in documents]
    assert 50 < max(d["tokens"] for d in documents) <= 100


@pytest.mark.slow
def test_result_does_not_depend_on_workers_or_order():
    documents = [make_document(paragraphs(f"x{i % 7}", 3), "s", f"{i}") for i in range(20)]
    tables = cut(documents)
    reversed_tables = cut(documents[::-1], options=TWO_WORKERS)
    assert tables == reversed_tables
    assert tables["counts"]["pieces", "s"] == 21
