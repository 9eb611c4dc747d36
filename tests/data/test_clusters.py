"""Tests of clusters: reading, skipping, lossless cutting in linear time, grouping, splitting."""

import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.data.clusters import (
    Cluster,
    ClusterSource,
    count_words,
    cut_document,
    in_memory,
    read_clusters,
    select,
    split_held_out,
)

TASKS_OF = {"a": None, "b": ("general_qa",), "c": ("general_qa", "financial_math")}


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_jsonl_keeps_good_lines_and_counts_bad_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(
        tmp_path / "clusters.jsonl",
        {"id": "a", "documents": ["one two", "three"], "tasks": ["financial_math"]},
        "not json",
        "",
        {"id": "a", "documents": ["again"]},
        {"id": "b", "documents": []},
        {"id": "c", "documents": ["x", 3]},
        {"id": "d", "documents": ["x"], "tasks": ["essay"]},
        {"id": "", "documents": ["x"]},
        {"id": "lone surrogate", "documents": ["\ud800"]},
        [1],
        "[" * 100_000,
        {"id": "e", "documents": ["four"]},
    )
    clusters, report = read_clusters(path)
    assert clusters == [
        Cluster("a", ("one two", "three"), ("financial_math",)),
        Cluster("e", ("four",), None),
    ]
    assert (report.read, dict(report.skipped)) == (2, {"bad lines": 9})
    assert f"{path}:2: skipped" in caplog.text
    assert f"{path}:4: skipped (id = 'a': must be unique)" in caplog.text
    assert report.lengths == [2, 1, 1]
    assert "3 documents of 1 to 2 tokens (mean 1.3) in 2 clusters" in report.summary()


def test_folder_is_read_in_order_and_bad_files_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_bytes("\ufeffone".encode())
    (tmp_path / "c.TXT").write_text("three")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "table.csv").write_text("1,2")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    clusters, report = read_clusters(tmp_path, documents_per_cluster=2)
    assert [cluster.documents for cluster in clusters] == [("one", "two"), ("three",)]
    assert report.read == 3
    assert report.skipped == {"not UTF-8": 1, "unreadable": 2, "empty": 1, "of another type": 1}
    assert f"{tmp_path / 'bad.txt'}: skipped (not UTF-8: UnicodeDecodeError" in caplog.text
    assert f"{tmp_path / 'gone.txt'}: skipped (unreadable: [Errno 2]" in caplog.text
    assert f"{tmp_path / 'pipe.txt'}: skipped (unreadable: a pipe, a socket" in caplog.text
    assert "empty.txt" in caplog.text
    assert len({cluster.id for cluster in clusters}) == 2
    assert read_clusters(tmp_path, documents_per_cluster=2)[0] == clusters


def test_unreadable_folders_are_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "locked/b.txt", "c/locked/d.txt", "c/e.txt", ".locked/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    scandir = os.scandir

    def refuse(folder: str) -> Any:
        if str(folder).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    clusters, report = read_clusters(tmp_path)
    assert clusters[0].documents == ("a.txt", "c/e.txt")
    assert (report.read, dict(report.skipped)) == (2, {"unreadable": 2})
    assert "skipped 2 (2 unreadable)" in report.summary()
    for name in ("locked", "c/locked"):
        assert f"{tmp_path / name}: skipped (unreadable: [Errno 13] Permission" in caplog.text


def test_documents_of_a_cluster_are_cut_in_place(tmp_path: Path) -> None:
    long = "\n\n".join(f"paragraph {i} " + "word " * 8 for i in range(4))
    path = write_lines(tmp_path / "c.jsonl", {"id": "a", "documents": ["short", long]})
    clusters, report = read_clusters(path, max_document_tokens=20)
    assert len(clusters[0].documents) == 3
    assert (report.cut, len(report.lengths), report.clusters) == (1, 3, 1)
    assert clusters[0].documents[1].startswith("paragraph 0")
    assert clusters[0].documents[2].startswith("paragraph 2")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a b c", ["abc"]),
        # Paragraphs are packed up to the limit, and never cut if they fit alone.
        ("a " * 10 + "\n\n" + "b " * 10 + "\n \n" + "c " * 3, ["a" * 10, "b" * 10 + "c" * 3]),
        # A paragraph over the limit is cut at lines, then sentences, then words.
        ("a " * 10 + "\n" + "b " * 10, ["a" * 10, "b" * 10]),
        ("a " * 9 + "a. " + "b " * 10, ["a" * 10 + ".", "b" * 10]),
        ("a " * 20, ["a" * 16, "a" * 4]),
    ],
)
def test_documents_are_cut_at_the_coarsest_boundary(text: str, pieces: list[str]) -> None:
    cut = cut_document(text, count_words, 16)
    assert [squeezed(piece) for piece, _ in cut] == pieces
    assert all(count == count_words(piece) <= 16 for piece, count in cut)


@given(st.text(alphabet="ab .\n。é漢\t", max_size=400), st.integers(16, 40))
def test_cutting_keeps_all_text_and_respects_the_limit(text: str, limit: int) -> None:
    cut = cut_document(text, lambda piece: len(piece.encode()), limit)
    assert squeezed("".join(piece for piece, _ in cut)) == squeezed(text)
    assert all(len(piece.encode()) == count <= limit for piece, count in cut)


def test_cutting_handles_superadditive_token_counts() -> None:
    def superadditive(text: str) -> int:
        words = len(text.split())
        return words + (words > 6)  # a joined text costs one token more than its parts

    text = "\n\n".join(["a b c d"] * 8)
    cut = cut_document(text, superadditive, 16)
    assert all(count <= 16 for _, count in cut)
    assert squeezed("".join(piece for piece, _ in cut)) == squeezed(text)


@pytest.mark.parametrize("unit", ["word ", "word word.\n", "x", "para graph\n\n"])
def test_cutting_counts_tokens_in_linear_time(unit: str) -> None:
    counted = 0

    def count(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return (len(text) + 3) // 4

    text = unit * (600_000 // len(unit))
    cut_document(text, count, 200)
    assert counted <= 7 * len(text)


@pytest.mark.slow
def test_similarity_grouping_clusters_similar_documents(tmp_path: Path) -> None:
    topics = {"sea": "ship sail harbour anchor", "law": "court judge trial verdict"}
    for index in range(6):
        topic = ("sea", "law")[index % 2]
        (tmp_path / f"{index}.txt").write_text(f"{topics[topic]} note{index}")
    clusters, _ = read_clusters(tmp_path, documents_per_cluster=3, grouping="similarity")
    assert [len(cluster.documents) for cluster in clusters] == [3, 3]
    assert all("ship" in document for document in clusters[0].documents)
    assert clusters[0].documents[0].endswith("note0")
    assert clusters == read_clusters(tmp_path, documents_per_cluster=3, grouping="similarity")[0]
    mixed, _ = read_clusters(tmp_path, documents_per_cluster=3)
    assert any("court" in document for document in mixed[0].documents)


def test_held_out_split_depends_only_on_ids() -> None:
    ids = [f"c{i}" for i in range(40)]
    train, held_out = split_held_out(ids, 0.1)
    assert len(held_out) == 4
    assert sorted([*train, *held_out], key=lambda name: int(name[1:])) == ids
    assert set(split_held_out(ids[::-1], 0.1)[1]) == set(held_out)
    assert split_held_out(ids, 0.0) == (ids, [])
    assert len(split_held_out(ids[:2], 0.01)[1]) == 1
    assert len(split_held_out(ids[:2], 0.99)[0]) == 1


def test_in_memory_source_reads_clusters_by_id() -> None:
    clusters = [Cluster(name, (name * 3,), tasks) for name, tasks in TASKS_OF.items()]
    source = in_memory(clusters)
    assert source.tasks == TASKS_OF
    assert source.read(["c", "a", "c"]) == [clusters[2], clusters[0], clusters[2]]
    part = source.only(["b", "a"])
    assert list(part.tasks) == ["b", "a"]
    assert part.read(["b"]) == [clusters[1]]
    with pytest.raises(ValueError, match="ids must be unique"):
        in_memory([*clusters, clusters[0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_document_tokens": 15}, "max_document_tokens = 15"),
        ({"documents_per_cluster": 0}, "documents_per_cluster = 0"),
        ({"grouping": "topic"}, "grouping = 'topic'"),
    ],
)
def test_error_names_invalid_setting(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_clusters(tmp_path, **settings)


def test_empty_sources_and_impossible_splits_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_clusters(tmp_path / "none")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"no usable text; read 0, skipped 1 \(1 empty\)"):
        read_clusters(tmp_path)
    with pytest.raises(ValueError, match="one cluster cannot be split"):
        split_held_out(["a"], 0.5)
    with pytest.raises(ValueError, match=r"held_out = 1\.0"):
        split_held_out([], 1.0)


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        (["a/one.txt"], "a/one.txt", r"must be the folder of the texts, such as 'a/', not one"),
        (["one.MD"], "one.MD", r"must be the folder of the texts, such as '\.', not one text$"),
        (
            ["one.pdf"],
            "one.pdf",
            r"must be built: python -m .*folder\.py:one\.pdf:512 --out=runs/c",
        ),
        (
            ["a.html"],
            "a.html",
            r"must be built: python -m data_pipeline.build .* --config\.data\.so",
        ),
        (["t.parquet"], "t.parquet", r"must be built: python -m data_pipeline.build --config="),
        (
            ["a/1.pdf", "a/2.PDF", "a/b/3.htm", "a/4.jsonl.gz", "a/5.csv"],
            "a",
            r"no usable text; read 0, skipped 5 .*; 1 \.htm, 1 \.jsonl\.gz, 2 \.pdf files: "
            r"python -m data_pipeline\.build --config=configs/data/folder\.py:a:512 --out=runs/clu",
        ),
    ],
)
def test_source_that_must_be_built_first_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("A text.")
    with pytest.raises(ValueError, match=rf"^source = '{source}': .*{message}") as error:
        read_clusters(source)
    assert "\n" not in str(error.value)


def test_files_beside_the_texts_that_only_a_build_reads_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.txt", "photo.jpg"):
        (tmp_path / name).write_text("A text.")
    assert read_clusters(tmp_path)[1].read == 1
    assert "data_pipeline" not in caplog.text
    (tmp_path / "b.pdf").write_text("%PDF")
    assert read_clusters(tmp_path)[1].read == 1
    assert f"{tmp_path}: skipped 1 .pdf files: python -m data_pipeline.build" in caplog.text


def test_real_filings_are_cut_within_the_limit(spell_data: Path) -> None:
    clusters, report = read_clusters(spell_data / "edgar" / "dev", max_document_tokens=256)
    assert report.read == 10
    assert report.cut == 10
    assert max(report.lengths) <= 256
    originals = [p.read_text() for p in sorted((spell_data / "edgar" / "dev").glob("*.txt"))]
    pieces = [document for cluster in clusters for document in cluster.documents]
    assert squeezed("".join(pieces)) == squeezed("".join(originals))


# ---------------------------------------------------------------------------------------- Selection


SIZES = {"a": 30, "b": 10, "c": 20, "d": 20, "e": 50}


def by_size(reads: list[int]) -> ClusterSource:
    every = [Cluster(name, ("x" * (size - 5), "y" * 5)) for name, size in SIZES.items()]
    source = in_memory(every)

    def read(ids: Sequence[str]) -> list[Cluster]:
        reads.append(len(ids))
        return source.read(ids)

    return replace(source, read=read)


@pytest.mark.parametrize(
    ("selection", "count", "expected_ids"),
    [("longest", 2, "ae"), ("longest", 3, "ace"), ("shortest", 2, "bc"), ("shortest", 4, "abcd")],
)
def test_select_keeps_longest_or_shortest_clusters(
    selection: str, count: int, expected_ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spell_jax.data.clusters._READ_AT_ONCE", 2)
    reads: list[int] = []
    source = select(by_size(reads), selection, count, 0)
    assert sorted(source.tasks) == list(expected_ids) and reads == [2, 2, 1]
    assert source.read(["a"])[0].id == "a"


def test_random_selection_is_a_function_of_the_seed() -> None:
    reads: list[int] = []
    selections = [tuple(sorted(select(by_size(reads), "random", 2, s).tasks)) for s in range(40)]
    repeated_selections = [
        tuple(sorted(select(by_size(reads), "random", 2, s).tasks)) for s in range(40)
    ]
    assert selections == repeated_selections and len({*selections}) == 10 and not reads


@pytest.mark.parametrize("count", [0, 5, 9])
def test_selecting_all_clusters_reads_none(count: int) -> None:
    reads: list[int] = []
    assert [*select(by_size(reads), "longest", count, 0).tasks] == [*SIZES] and not reads
