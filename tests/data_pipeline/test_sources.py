import codecs
import errno
import gzip
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from hypothesis import given
from hypothesis import strategies as st
from pypdf import PdfReader, PdfWriter

from data_pipeline import layouts, sources
from data_pipeline.filter import FilterConfig
from data_pipeline.layouts import SourceRow
from data_pipeline.sources import Listed, SourceConfig, list_files
from data_pipeline.stages import Stages
from spell_jax.data.clusters import read_clusters
from spell_jax.data.row_files import KINDS
from spell_jax.data.text_files import Unusable
from spell_jax.runtime import config as settings
from spell_jax.runtime.files.jsonl import uncompressed
from tests import bombs

ANY = FilterConfig(min_quality=0.5, min_characters=1, languages=())
TASKS = ("general_qa",)
ENGLISH = "The ship left the harbour at dawn, and nobody on the quay knew where it was bound. " * 2
CHINESE = "黎明时分，船离开了港口，码头上没有人知道它要去哪里。" * 6


def pdf(*pages: str) -> bytes:
    """Write a PDF with a line of text on each page."""
    streams = [f"BT /F1 12 Tf 20 50 Td ({text}) Tj ET" for text in pages]
    numbers = [4 + 2 * i for i in range(len(pages))]
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{' '.join(f'{n} 0 R' for n in numbers)}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, stream in zip(numbers, streams, strict=True):
        resources = "/Resources<</Font<</F1 3 0 R>>>>/MediaBox[0 0 300 100]"
        objects.append(f"<</Type/Page/Parent 2 0 R{resources}/Contents {number + 1} 0 R>>")
        objects.append(f"<</Length {len(stream)}>>stream\n{stream}\nendstream")
    data, starts = "%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        starts.append(len(data))
        data += f"{number} 0 obj{text}endobj\n"
    table = "".join(f"{start:010d} 00000 n \n" for start in starts)
    trailer = f"trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n{len(data)}\n%%EOF"
    return f"{data}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode()


def encrypted_pdf(password: str) -> bytes:
    writer = PdfWriter()
    writer.append(PdfReader(io.BytesIO(pdf("Nobody reads this."))))
    writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
    data = io.BytesIO()
    writer.write(data)
    return data.getvalue()


def parquet(rows_a_group: int = 100, **columns: list) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table(columns), data, row_group_size=rows_a_group)
    return data.getvalue()


def write(folder: Path, files: Mapping[str, bytes | str]) -> str:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(folder)


def read(
    out: Path,
    configs: Mapping[str, SourceConfig],
    base: FilterConfig = ANY,
    options: Sequence[str] = (),
) -> dict[str, list[Any]]:
    """Return the sorted output of the stage: "documents", "files", "removed", "counts"."""
    tables: dict[str, list[Any]] = {}
    with beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([*options])) as pipeline:
        stage_tables = sources.make_read(pipeline | beam.Create(listed(configs)), configs, base)
        for name, records in stage_tables.items():
            tables[name] = []
            _ = records | f"keep {name}" >> beam.Map(_keep, str(out) + name)
    for name, records in tables.items():
        path = Path(str(out) + name)
        records += map(json.loads, path.read_text().splitlines() if path.exists() else ())
        records.sort(key=_order)
    return tables


def _keep(record: Any, path: str) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(record, default=repr) + "\n")


def _order(record: Any) -> Any:
    if isinstance(record, list):
        return record
    return record["source"], record["place"], record.get("part", 0)


def listed(configs: Mapping[str, SourceConfig]) -> list[Listed]:
    return [file for name, source in configs.items() for file in list_files(name, source)]


def counts(tables: Mapping[str, list[Any]], source: str) -> dict[str, int]:
    """Return the counts of a source, without the histograms of lengths."""
    return dict(
        Counter(what for what, of in tables["counts"] if of == source and " = " not in what)
    )


def folder(path: str, **fields: Any) -> SourceConfig:
    return SourceConfig(path, **{"layout": "folder", "tasks": TASKS, **fields})


# -------------------------------------------------------------------------------------------- Stage


def test_folder_layout_reads_every_file_format(tmp_path: Path):
    files = {
        "a.txt": "\ufeff  first\r\nsecond\x0cthird\n",
        "b/c.MD": codecs.BOM_UTF16_LE + "# Größe\n".encode("utf-16-le"),
        "d.html": "<p>One</p><p>two</p>",
        "d.pdf": pdf("Page one.", "Page two."),
        "e.jsonl": '{"content": "row 0", "score": 1}\n\n"row 2"\n',
        "e.jsonl.gz": gzip.compress(b'"zipped"\n') + gzip.compress(b'"twice"\n'),
        "e.jsonl.zst": zstandard.compress(b'"zst"\n') + zstandard.compress(b'"twice"\n'),
        "f.parquet": parquet(2, text=["p0", "p1", "p2"], score=[0.7, 0.1, None], more=[1, 2, 3]),
        "g::h#1?.txt": "odd name",
    }
    configs = {"mine": folder(write(tmp_path / "in", files))}
    tables = read(tmp_path / "out", configs)
    assert {d["place"]: d["text"] for d in tables["documents"]} == {
        "a.txt": "first\nsecond\nthird",
        "b/c.MD": "# Größe",
        "d.html": "One\n\ntwo",
        "d.pdf": "Page one.\n\nPage two.",
        "e.jsonl#000000000": "row 0",
        "e.jsonl#000000002": "row 2",
        "e.jsonl.gz#000000000": "zipped",
        "e.jsonl.gz#000000001": "twice",
        "e.jsonl.zst#000000000": "zst",
        "e.jsonl.zst#000000001": "twice",
        "f.parquet#000000000": "p0",
        "f.parquet#000000002": "p2",
        "g::h#1?.txt": "odd name",
    }
    assert {d["place"]: d["quality"] for d in tables["documents"] if d["quality"] is not None} == {
        "e.jsonl#000000000": 1.0,
        "f.parquet#000000000": 0.7,
    }
    assert tables["removed"] == []
    assert counts(tables, "mine") == {
        "files read": 9,
        "documents read": 14,
        "documents kept": 13,
        "documents removed: low quality": 1,
    }
    data = {name: (tmp_path / "in" / name).read_bytes() for name in files}
    assert [(f["place"], f["size"], f["hash"]) for f in tables["files"]] == [
        (name, len(data[name]), hashlib.blake2b(data[name], digest_size=16).hexdigest())
        for name in sorted(files)
    ]


def test_unusable_files_are_listed_and_counted(tmp_path: Path):
    parquet_data = parquet(text=["x" * 50] * 9)
    files = {
        "good.txt": "good",
        "empty.txt": codecs.BOM_UTF8 + b" \n",
        "latin.txt": "Größe".encode("latin-1"),
        "binary.txt": b"\x89PNG\0\0",
        "nul.md": b"text\0text",
        "big.txt": "x" * 5001,
        "bad.pdf": b"%PDF-1.4 broken",
        "locked.pdf": encrypted_pdf("secret"),
        "open.pdf": encrypted_pdf(""),
        "bad.parquet": parquet_data[:-20],
        "columns.parquet": parquet(body=["x"], score=[1.0]),
        "wide.jsonl": "x".encode("utf-16"),
        "broken.jsonl.gz": gzip.compress(b'"row"\n')[:-9],
        "table.csv": "a,b",
        "README": "text",
        # Archives are not opened, so that nothing in them leads out of the folder.
        **dict.fromkeys(("a.zip", "a.tar", "a.tar.gz", "a.xml"), "text"),
        ".hidden.txt": "text",
        ".git/config.txt": "text",
    }
    path = write(tmp_path / "in", files)
    (tmp_path / "in" / "gone.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    # Opening the first would block, reading the second would never end.
    (tmp_path / "in" / "to_pipe.txt").symlink_to("pipe.txt")
    (tmp_path / "in" / "zeros.txt").symlink_to("/dev/zero")
    (tmp_path / "in" / "circle.txt").symlink_to("circle.txt")
    tables = read(tmp_path / "out", {"mine": folder(path, max_file_bytes=5000)})
    reasons = {r["place"]: r["reason"] for r in tables["removed"]}
    assert reasons == {
        "README": "of another type",
        **dict.fromkeys(("a.zip", "a.tar", "a.tar.gz", "a.xml"), "of another type"),
        **dict.fromkeys(("circle.txt", "pipe.txt", "to_pipe.txt", "zeros.txt"), "unreadable"),
        "bad.parquet": "damaged",
        "bad.pdf": "damaged",
        "big.txt": "oversize",
        "binary.txt": "binary",
        "broken.jsonl.gz": "breaks off",
        "columns.parquet": "another layout",
        "empty.txt": "empty",
        "gone.txt": "unreadable",
        "latin.txt": "not UTF-8",
        "locked.pdf": "encrypted",
        "nul.md": "binary",
        "table.csv": "of another type",
        "wide.jsonl": "not UTF-8",
    }
    skipped = {f"files skipped: {reason}": 0 for reason in reasons.values()}
    for reason in reasons.values():
        skipped[f"files skipped: {reason}"] += 1
    assert counts(tables, "mine") == {
        **skipped,
        "files read": 2,
        # The two, and the row of broken.jsonl.gz before its break.
        "documents read": 3,
        "documents kept": 3,
    }
    because = {r["place"]: r["because"] for r in tables["removed"]}
    assert because["columns.parquet"] == "must have 'text', has ['body', 'score']"
    assert because["table.csv"] == ".csv"
    assert because["big.txt"] == "has 5001 bytes, more than 5000"
    assert [f["place"] for f in tables["files"]] == ["good.txt", "open.pdf"]


def test_at_most_100_bad_rows_are_listed(tmp_path: Path):
    lines = [b'"good"', b"not json", b'{"other": 1}', b'{"content": 3}', b'"\xff"', b"[1]", b'" "']
    lines += [b"{"] * 200 + [b"[" * 100_000, b'"' + b"x" * 200_000 + b'"', b'"last"']
    path = write(tmp_path / "in", {"a.jsonl": b"\n".join(lines)})
    tables = read(tmp_path / "out", {"mine": folder(path, max_file_bytes=150_000)})
    assert [d["place"] for d in tables["documents"]] == ["a.jsonl#000000000", "a.jsonl#000000209"]
    assert counts(tables, "mine")["rows skipped: bad row"] == 207
    assert counts(tables, "mine")["rows skipped: empty"] == 1
    assert counts(tables, "mine")["files read"] == 1
    assert [r["place"] for r in tables["removed"]] == [f"a.jsonl#{n:09d}" for n in range(1, 101)]
    assert [r["because"] for r in tables["removed"]][1:3] == [
        "a.jsonl:3: its 'text' must be a string, is NoneType",
        "a.jsonl:4: its 'content' must be a string, is int",
    ]
    assert tables["removed"][0]["because"].startswith("a.jsonl:2: Expecting value")


def test_ultra_fineweb_requires_both_columns(tmp_path: Path):
    files = {
        "a.parquet": parquet(
            3, content=["a", "b", None, "d", "e"], score=[0.9, 0.2, 0.9, None, float("nan")]
        ),
        "b.parquet": parquet(content=["text"]),
        "c.parquet": parquet(text=["text"], score=[0.9]),
        "d.txt": "text",
    }
    source = SourceConfig(write(tmp_path / "in", files), "ultra_fineweb", TASKS)
    tables = read(tmp_path / "out", {"fine": source})
    assert [(d["place"], d["quality"]) for d in tables["documents"]] == [
        ("a.parquet#000000000", 0.9)
    ]
    assert counts(tables, "fine") == {
        "documents kept": 1,
        "documents read": 4,
        "documents removed: bad score": 2,
        "documents removed: low quality": 1,
        "files read": 1,
        "files skipped: another layout": 2,
        "files skipped: of another type": 1,
        "rows skipped: bad row": 1,
    }
    removed = {r["place"]: r["because"] for r in tables["removed"]}
    assert removed["a.parquet#000000002"] == "its 'content' must be a string, is NoneType"
    assert removed["b.parquet"] == "must have 'content' and 'score', has ['content']"
    assert removed["c.parquet"] == "must have 'content' and 'score', has ['text', 'score']"


def test_docmath_keeps_paragraphs_only(tmp_path: Path):
    paragraphs = ["One.\n \nTwo.", " ", "| a | b |"]
    row = {"question_id": "q", "question": "How much?", "paragraphs": paragraphs}
    files = {
        "a.json": json.dumps([row, {**row, "paragraphs": "One."}, {**row, "ground_truth": 3}]),
        "b.json": json.dumps({"version": 1}),
        "c.json": json.dumps([{"question": "How much?"}]),
        "d.json": "[" * 100_000,
        "e.json": "[",
    }
    source = SourceConfig(write(tmp_path / "in", files), "docmath", ("financial_math",))
    tables = read(tmp_path / "out", {"doc": source})
    assert [(d["place"], d["text"]) for d in tables["documents"]] == [
        ("a.json#000000000", "One.\nTwo.\n\n| a | b |"),
        ("a.json#000000002", "One.\nTwo.\n\n| a | b |"),
    ]
    assert {r["place"]: r["reason"] for r in tables["removed"]} == {
        "a.json#000000001": "bad row",
        "b.json": "another layout",
        "c.json": "another layout",
        "d.json": "damaged",
        "e.json": "damaged",
    }
    assert counts(tables, "doc")["files read"] == 1


def test_docmath_is_the_same_in_parquet(tmp_path: Path):
    row = {"question_id": "q", "question": "How much?", "ground_truth": 3.5}
    rows = [{**row, "paragraphs": [f"Sales {n}.", "| a |"]} for n in range(3)]
    texts = []
    for suffix in ("json", "parquet"):
        path = tmp_path / suffix / f"a.{suffix}"
        path.parent.mkdir()
        if suffix == "json":
            path.write_text(json.dumps(rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        source = SourceConfig(str(path.parent), "docmath", ("financial_math",))
        tables = read(tmp_path / f"{suffix}_out", {"doc": source})
        texts.append([d["text"] for d in tables["documents"]])
        assert not tables["removed"] and counts(tables, "doc")["files read"] == 1
    assert texts[0] == texts[1] == [f"Sales {n}.\n\n| a |" for n in range(3)]


def test_damaged_docmath_parquet_is_skipped(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").write_bytes(b"PAR1 and no more")
    source = SourceConfig(str(tmp_path / "in"), "docmath", ("financial_math",))
    tables = read(tmp_path / "out", {"doc": source})
    assert [r["reason"] for r in tables["removed"]] == ["damaged"]


def test_json_layout_reads_any_nesting(tmp_path: Path):
    squad = {"data": [{"paragraphs": [{"context": "One.", "qas": [{"question": "What?"}]}]}]}
    lines = [
        {"context": [["Title", ["Two.", "Three."]], ["Other", ["Four."]]]},
        {"context": "Five."},
    ]
    path = write(
        tmp_path,
        {
            "a.json": json.dumps(squad),
            "b.jsonl": "\n".join(map(json.dumps, lines)),
            "c.json": '{"question": "What?"}',
            "d.json": "{",
            "e.txt": "Six.",
        },
    )
    tables = read(tmp_path / "out", {"mine": folder(path, layout="json", text="context")})
    assert [(d["place"], d["text"]) for d in tables["documents"]] == [
        ("a.json#000000000", "One."),
        ("b.jsonl#000000000", "Two. Three."),
        ("b.jsonl#000000001", "Four."),
        ("b.jsonl#000000002", "Five."),
    ]
    assert [(r["place"], r["reason"]) for r in tables["removed"]] == [
        ("c.json", "another layout"),
        ("d.json", "damaged"),
        ("e.txt", "of another type"),
    ]


@pytest.mark.slow
def test_source_may_have_its_own_limits(tmp_path: Path):
    files = {
        "long.txt": ENGLISH * 3,
        "zh.txt": CHINESE,
        "scored.jsonl": json.dumps({"content": ENGLISH, "score": 0.3}),
    }
    path = write(tmp_path / "in", files)
    configs = {
        "as the filter says": folder(path),
        "other": folder(path, max_characters=1000, min_quality=0.3, languages=("zh", "en")),
    }
    base = FilterConfig(min_quality=0.5, max_characters=300)
    tables = read(tmp_path / "out", configs, base)
    kept_places = [(d["source"], d["place"]) for d in tables["documents"]]
    assert kept_places == [
        ("other", "long.txt"),
        ("other", "scored.jsonl#000000000"),
        ("other", "zh.txt"),
    ]


def test_chapters_become_documents_with_part_numbers(tmp_path: Path):
    book = "# Title\n\nCHAPTER I\n\nIt began.\n\nChapter 2. Later\n\nIt ended."
    files = {"book.txt": book, "rows.jsonl": json.dumps(book), "whole.txt": "No heading."}
    path = write(tmp_path / "in", files)
    configs = {"mine": folder(path, split="chapters"), "whole": folder(path)}
    tables = read(tmp_path / "out", configs)
    assert [d["text"] for d in tables["documents"][5:]] == [book, book, "No heading."]
    assert [(d["place"], d["part"], d["text"]) for d in tables["documents"][:5]] == [
        (place, part, text)
        for place in ("book.txt", "rows.jsonl#000000000")
        for part, text in enumerate(
            ["# Title\n\nCHAPTER I\n\nIt began.", "Chapter 2. Later\n\nIt ended."]
        )
    ] + [("whole.txt", 0, "No heading.")]


@pytest.mark.slow
def test_results_do_not_depend_on_workers(tmp_path: Path):
    rows = [f"{ENGLISH} {i}" for i in range(40)]
    files = {
        "a.parquet": parquet(7, content=rows, score=[i / 40 for i in range(40)]),
        "b.jsonl": "".join(json.dumps(row) + "\n{\n" for row in rows),
        **{f"c{i}.txt": row for i, row in enumerate(rows[:5])},
        "d.csv": "",
    }
    configs = {"mine": folder(write(tmp_path / "in", files))}
    base = FilterConfig(min_quality=0.5)
    tables = read(tmp_path / "one", configs, base)
    flags = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
    assert read(tmp_path / "two", configs, base, flags) == tables
    assert {name: len(records) for name, records in tables.items()} == {
        "documents": 20 + 40 + 5,
        "files": 7,
        "removed": 1 + 40,
        "counts": 2 * 85 + 7 + 1 + 40 + 85 + 65,  # lengths of documents read and kept
    }


@pytest.mark.slow
def test_tables_match_their_schemas(tmp_path: Path):
    files = {"a.txt": "good", "b.jsonl": '"x"\n{"text": "y", "score": 0.1}\n{', "c.csv": ""}
    configs = {"mine": folder(write(tmp_path / "in", files))}
    make = partial(sources.make_read, sources=configs, filter=ANY)
    stages = Stages(str(tmp_path / "out"))
    list_stage = stages.store("list", "listed", listed(configs))
    read_stage = stages.run_stage(
        "read", {}, make, [list_stage], sources.BALANCES, listed="list/listed"
    )
    assert read_stage.count("files read", "mine") == 2
    for name, places in {
        "documents": ["a.txt", "b.jsonl#000000000"],
        "files": ["a.txt", "b.jsonl"],
        "removed": ["b.jsonl#000000002", "c.csv"],
    }.items():
        assert sorted(record["place"] for record in stages.read_records(f"read/{name}")) == places


def test_damaged_row_group_loses_only_its_own_rows(tmp_path: Path):
    data = parquet(10, content=[f"{i:03d}" * 40 for i in range(30)])
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(0)
    start = group.dictionary_page_offset or group.data_page_offset
    data = (
        data[:start]
        + b"\xff" * group.total_compressed_size
        + data[start + group.total_compressed_size :]
    )
    configs = {"mine": folder(write(tmp_path / "in", {"a.parquet": data}))}
    tables = read(tmp_path / "out", configs)
    expected_places = [f"a.parquet#{n:09d}" for n in (*range(10), *range(20, 30))]
    assert [d["place"] for d in tables["documents"]] == expected_places
    assert counts(tables, "mine")["row groups skipped: breaks off"] == 1
    assert tables["removed"][0]["because"].startswith("row group 1, row 10: ")


# ------------------------------------------------------------------------------------------ Listing


def test_path_may_be_folder_file_or_pattern(tmp_path: Path):
    path = write(tmp_path / "in", {"b/2.txt": "22", "a.txt": "1", "b/x.md": "", "b/.h/3.txt": ""})

    def places(end: str) -> list[str]:
        return sorted(file["place"] for file in list_files("mine", folder(path + end)))

    assert places("") == places("/") == ["a.txt", "b/2.txt", "b/x.md"]
    assert places("/b/2.txt") == ["2.txt"]
    assert places("/*.txt") == ["a.txt"]
    assert places("/**/*.txt") == ["a.txt", "b/2.txt"]
    assert places("/b/[2x]*") == ["2.txt", "x.md"]
    assert places("/b/2*") == ["2.txt"]
    [file] = list_files("mine", folder(path + "/b/2.txt"))
    assert (file["source"], file["size"]) == ("mine", 2)
    assert file["url"] == f"file://{path}/b/2.txt"
    os.utime(f"{path}/b/2.txt", (1, 1))
    [changed] = list_files("mine", folder(path + "/b/2.txt"))
    assert file["version"] != changed["version"] == "1.0"


def test_sources_may_be_on_another_file_system(tmp_path: Path):
    memory = fsspec.filesystem("memory")
    memory.pipe({"/books/a.txt": b"first", "/books/b/c.jsonl.gz": gzip.compress(b'"second"')})
    try:
        configs = {"all": folder("memory://books"), "some": folder("memory://books/b/*.gz")}
        tables = read(tmp_path / "out", configs)
        assert [(d["source"], d["place"], d["text"]) for d in tables["documents"]] == [
            ("all", "a.txt", "first"),
            ("all", "b/c.jsonl.gz#000000000", "second"),
            ("some", "c.jsonl.gz#000000000", "second"),
        ]
    finally:
        memory.rm("/books", recursive=True)


def test_paths_without_readable_files_raise(tmp_path: Path):
    path = write(tmp_path / "in", {"a.csv": "", "b.json": "", ".c.txt": ""})
    with pytest.raises(FileNotFoundError, match=r"sources\.mine\.path = '.*/none': no such file"):
        list(list_files("mine", folder(path + "/none")))
    with pytest.raises(FileNotFoundError, match=r"sources\.mine\.path = '.*txt': no such file"):
        list(list_files("mine", folder(path + "/*.txt")))
    with pytest.raises(ValueError, match=r"sources\.mine\.path = .*none of its 2 files is of the"):
        list(list_files("mine", folder(path)))
    with pytest.raises(ValueError, match=r"sources\.mine\.path = .*cannot be opened.*not known"):
        list(list_files("mine", folder("nowhere://bucket/a")))


@pytest.fixture
def _locked_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to read folders with names that end in "locked" (the tests may run as root)."""
    scandir = os.scandir

    def refuse(folder: str) -> Any:
        if str(folder).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)


@pytest.mark.usefixtures("_locked_folders")
def test_source_without_read_permission_raises(tmp_path: Path):
    path = write(tmp_path / "locked", {"a.txt": ""})
    with pytest.raises(
        ValueError, match=r"sources\.mine\.path = .*opened, PermissionError: .*locked"
    ):
        list(list_files("mine", folder(path)))


@pytest.mark.usefixtures("_locked_folders")
def test_unreadable_folders_are_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    files = ("a.txt", "b.locked/b.txt", "c/locked/d.txt", "c/e.txt", ".locked/f.txt")
    configs = {"mine": folder(write(tmp_path / "in", {name: name for name in files}))}
    tables = read(tmp_path / "out", configs)
    assert [d["text"] for d in tables["documents"]] == ["a.txt", "c/e.txt"]
    assert [(r["place"], r["reason"]) for r in tables["removed"]] == [
        ("b.locked/", "unreadable"),
        ("c/locked/", "unreadable"),
    ]
    assert tables["removed"][0]["because"].startswith("PermissionError: [Errno 13]")
    assert counts(tables, "mine")["files skipped: unreadable"] == 2
    for name in ("b.locked", "c/locked"):
        assert f"{tmp_path / 'in' / name}: skipped (unreadable: [Errno 13]" in caplog.text


@pytest.mark.usefixtures("_locked_folders")
def test_trainer_and_pipeline_use_and_skip_the_same_files(tmp_path: Path):
    files = {
        "a.txt": "good\r\ntext",
        "b.txt": codecs.BOM_UTF8 + b"one mark",
        "c.md": codecs.BOM_UTF16_BE + "two bytes".encode("utf-16-be"),
        "nul.txt": b"text\0text",
        "nuls.txt": bytes(1000),
        "nul_latin.txt": b"\0Gr\xf6\xdfe",
        "nul_utf16.txt": codecs.BOM_UTF16_LE + "a\0b".encode("utf-16-le"),
        "no_mark.txt": "UTF-16".encode("utf-16-le"),
        "latin.txt": b"Gr\xf6\xdfe",
        "half.txt": codecs.BOM_UTF16_LE + b"a\0b",
        "empty.txt": " ",
        "other.csv": "a",
        "locked/f.txt": "text",
    }
    path = write(tmp_path / "in", files)
    clusters, report = read_clusters(path)
    tables = read(tmp_path / "out", {"mine": folder(path)})
    assert [*clusters[0].documents] == [d["text"] for d in tables["documents"]]
    assert [*clusters[0].documents] == ["good\ntext", "one mark", "two bytes"]
    assert report.skipped == Counter(r["reason"] for r in tables["removed"])
    assert report.skipped == {
        "binary": 5,
        "not UTF-8": 2,
        "unreadable": 1,
        "empty": 1,
        "of another type": 1,
    }


def test_file_name_that_is_not_utf8_is_listed(tmp_path: Path):
    path = write(tmp_path / "in", {"a.txt": "good"})
    with open(os.fsencode(path) + b"/\xff.txt", "w") as file:
        file.write("text")
    tables = read(tmp_path / "out", {"mine": folder(path)})
    assert [(r["place"], r["reason"]) for r in tables["removed"]] == [("?.txt", "unreadable")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": ""}, "source.path = '': must be a file"),
        ({"layout": "csv"}, r"source.layout = 'csv': must be one of \('folder', 'ultra_fine"),
        ({"tasks": ()}, r"source.tasks = \(\): must be one or more of \('general_qa'"),
        ({"tasks": ("chess",)}, r"source.tasks = \('chess',\): must be one or more of"),
        ({"split": "pages"}, r"source.split = 'pages': must be one of \('', 'chapters'\)"),
        ({"text": ""}, "source.text = '': must be the name of a field"),
        ({"quality": ""}, "source.quality = '': must be the name of a field"),
        ({"max_file_bytes": 0}, "source.max_file_bytes = 0: must be at least 1"),
        ({"max_characters": -1}, "source.max_characters = -1: must be at least 1, or 0"),
        ({"languages": ("en", "xx")}, r"source.languages = \('en', 'xx'\): 'xx' must be one of"),
    ],
)
def test_error_names_invalid_config_field(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SourceConfig(**{"path": "in", "layout": "folder", "tasks": TASKS, **fields})


def test_contradictory_length_limits_are_rejected():
    with pytest.raises(ValueError, match="max_characters = 50: must be at least min_characters"):
        folder("in", max_characters=50).filter(FilterConfig(min_characters=100))


def test_source_config_is_built_from_a_section():
    section = {"path": "in", "layout": "folder", "tasks": ["general_qa"], "languages": None}
    assert settings.build(SourceConfig, section, "sources.mine") == folder("in")
    section["languages"] = ["zh"]
    assert settings.build(SourceConfig, section, "s") == folder("in", languages=("zh",))


# ------------------------------------------------------------------------------------------ Formats


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<html><head><title>T</title><body>No end<br>of head", "No end\nof head"),
        ("a<script>x</script><style>y</style><nav>z</nav><!-- c -->b", "ab"),
        ("<div style='display: none'>x<div>y</div>z</div><img hidden><b hidden>y</b>seen", "seen"),
        ("<ix:header><p>fact</p></ix:header>a<nav>never ends", "anever ends"),
        ("<h1>Head</h1>\n<p>one\n  two <b>th</b>ree</p><ul><li>a</li> <li>b</li></ul>end",
         "Head\n\none two three\n\na\nb\n\nend"),
        ("<table>\n<tr><th>Year</th> <th>Sales</th></tr>\n<tr><td> </td><td></td></tr>"
         "<tr><td>20<b>24</b></td><td><p>5</p><p>USD</p></td></tr></table>",
         "| Year | Sales |\n| 2024 | 5 USD |"),
        ("<table><tr><td>Menu</td><td><p>Text.</p><table><tr><td>1</td><td>2</td></tr></table>"
         "</td></tr></table>", "Menu\n\nText.\n\n| 1 | 2 |"),
        ("one<br> <br>two<br>three &amp; &#x4e2d;", "one\n\ntwo\nthree & 中"),
        ("<pre>a\n b</pre>", "a\nb"),
        ("<table><tr><td>a<td>b<tr><th>c<th>d</table>e</table></tr>", "| a | b |\n| c | d |\n\ne"),
        ("<table><tr><td>alone</td></tr>loose<td>x", "alone\nloose\nx"),
        ("<div>" * 100_000 + "deep", "deep"),
        ("<p>a<td>" * 50_000, "a" + "\n\na" * 49_999),
    ],
)  # fmt: skip
def test_html_is_converted_to_text(html: str, text: str):
    assert layouts.read_html(html.encode()) == [SourceRow(None, text)]


def test_clean_normalizes_line_breaks_and_control_characters():
    assert layouts.clean(" a\r\nb\rc\x0bd\x85e\x07f\x9fg\th\ud800 ") == "a\nb\nc\nd\ne f g\th\ufffd"


@pytest.mark.parametrize(
    ("value", "quality"),
    [(None, None), (1, 1.0), (0.5, 0.5), ("5", "nan"), (True, "nan"), (10**400, "nan")],
)
def test_quality_is_none_finite_or_nan(value: Any, quality: Any):
    assert str(layouts.as_quality(value)) == str(quality)


@pytest.mark.slow
def test_json_rows_before_a_truncation_are_read():
    data = gzip.compress(b"".join(b'"row %d"\n' % i for i in range(100_000)))[:-2000]
    stream = uncompressed(io.BytesIO(data), ".gz")
    rows = []
    with pytest.raises(Unusable, match="breaks off"):
        for row in layouts.json_rows(stream, "text", "score", 100):
            rows.append(row)
    assert 50_000 < len(rows) < 100_000
    assert rows == [SourceRow(n, f"row {n}") for n in range(len(rows))]


def test_json_lines_over_the_limit_are_reported():
    data = codecs.BOM_UTF8 + b'"12345678"\n"123456789"\r\n"' + b"x" * 35 + b'"\n"end"'
    rows = list(layouts.json_rows(uncompressed(io.BytesIO(data), ""), "text", "score", 14))
    assert [row.text for row in rows] == ["12345678", "123456789", "", "end"]
    assert [row.number for row in rows] == [0, 1, 2, 3]
    assert rows[2].problem == "longer than 14 bytes"


@pytest.mark.parametrize(
    "heading",
    ["CHAPTER IV", "Chapter 12. Title", "chapter one: The Sea", "CHAPTER TWENTY-ONE", "## Two",
     "Chapter 3 The End", "  CHAPTER X.  "],
)  # fmt: skip
def test_chapter_headings_split_the_text(heading: str):
    text = f"Before it.\n\n{heading}\n\nBehind it."
    assert layouts.chapters(text) == ["Before it.", f"{heading}\n\nBehind it.".strip()]


@pytest.mark.parametrize(
    "line", ["Chapter 3 tells how it ended.", "The chapter 4", "### Three", "#hash", "Chapterhouse"]
)
def test_lines_that_are_not_headings_do_not_split(line: str):
    assert len(layouts.chapters(f"Before it.\n\n{line}\n\nBehind it.")) == 1
    assert (
        len(layouts.chapters("We saw in\nChapter 4. Nothing more\nwas seen.")) == 1
    )  # within a paragraph


def test_headings_without_text_are_not_chapters():
    text = "# T\n## A\n---\nCHAPTER I\nCHAPTER II\n\nText.\n\nCHAPTER III\n\nMore.\n\n## Index"
    first = "# T\n## A\n---\nCHAPTER I\nCHAPTER II\n\nText."
    assert layouts.chapters(text) == [first, "CHAPTER III\n\nMore.\n\n## Index"]
    contents = "CHAPTER I\nCHAPTER II\n\nCHAPTER I\n\nText."
    assert layouts.chapters(contents) == [contents]
    assert layouts.chapters("Text.\n----\nCHAPTER I\nMore.") == ["Text.\n----", "CHAPTER I\nMore."]
    assert layouts.chapters("# Only") == ["# Only"]


@given(st.lists(st.sampled_from(["# A", "", "CHAPTER I", "word", "--", " Chapter 2", "x y"])))
def test_chapters_keep_all_text(lines: list[str]):
    text = "\n".join(lines).strip()
    pieces = layouts.chapters(text)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(pieces) or not text


# -------------------------------------------------------------------------------------------- Bombs


@pytest.mark.parametrize("name", bombs.PDFS)
def test_pdf_bomb_is_refused(name: str):
    data = bombs.PDFS[name]()
    assert len(data) < 1 << 21
    try:
        rows = layouts.read_pdf(data)
    except Unusable as error:
        assert error.reason == "damaged"
    else:
        assert rows == [SourceRow(None)]


def test_text_of_all_pages_of_a_pdf_is_bounded(monkeypatch: pytest.MonkeyPatch):
    data = pdf(*["word" * 5] * 50)
    monkeypatch.setattr(layouts, "PDF_CHARACTERS", 500)
    with pytest.raises(Unusable, match="oversize, more than 500 characters on 25 pages"):
        layouts.read_pdf(data)
    monkeypatch.setattr(layouts, "PDF_CHARACTERS", 10**6)
    assert len(layouts.read_pdf(data)[0].text) == 50 * 20 + 49 * 2
    monkeypatch.setattr(layouts, "PDF_SECONDS", 0)
    with pytest.raises(Unusable, match="oversize, more than 0 s for 0 pages"):
        layouts.read_pdf(data)


@pytest.mark.slow
def test_long_line_of_a_compressed_file_takes_little_memory(tmp_path: Path):
    path = tmp_path / "bomb.jsonl.gz"
    bombs.write_long_line(path, 1024, b'"first"\n', b'"last"\n')
    program = """
        import sys; from data_pipeline import layouts, sources
        lines = sources.uncompressed(open(sys.argv[1], "rb"), ".gz")
        for row in layouts.json_rows(lines, "text", "score", sources.LONGEST_LINE):
            print(row.number, row.text, row.problem)
    """
    assert bombs.run_limited(program, 400, str(path)).splitlines() == [
        "0 first ",
        "1  longer than 67108864 bytes",
        "2 last ",
    ]


@pytest.mark.slow
def test_long_value_of_a_dictionary_is_read_a_few_rows_at_a_time(tmp_path: Path):
    """2,000 rows of 20 MB, in a file of a few KB, are read in 1 GiB."""
    path = tmp_path / "bomb.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2000), pa.array(["a" * 20_000_000]))
    options: Any = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(pa.table({"text": texts}), path, store_schema=False, **options)
    assert path.stat().st_size < 100_000
    program = """
        import sys; from data_pipeline import layouts; import pyarrow.parquet
        with open(sys.argv[1], "rb") as file:
            rows = layouts.parquet_rows(file, ["text"], 0, 0, False)
            print([len(next(rows).text) for _ in range(30)])
    """
    assert bombs.run_limited(program, 1024, str(path)) == f"{[20_000_000] * 30}\n"


@pytest.mark.parametrize("kind", [".jsonl.gz", ".json.gz"])
def test_docmath_file_that_unpacks_to_too_much_is_damaged(kind: str):
    row = {"question_id": "a", "question": "b", "paragraphs": ["c" * 100]}
    lines = "\n".join([json.dumps(row)] * 1000)
    data = gzip.compress(lines.encode())
    assert len(layouts.read_docmath(data, KINDS[kind], 10**6)) == 1000
    with pytest.raises(Unusable, match=r"damaged, .*more than 10000"):
        layouts.read_docmath(data, KINDS[kind], 10_000)
