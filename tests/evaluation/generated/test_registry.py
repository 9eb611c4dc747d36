"""Tests of generated benchmarks: lengths with the chat template, texts from a folder, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spell_jax.evaluation.benchmarks import registry as benchmarks
from spell_jax.evaluation.generated import haystack, ruler, sources
from spell_jax.evaluation.generated.sources import read_prose
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import TINY_POLICY
from spell_jax.policy.tokenizer_base import Tokenizer
from tests.policy import hf_folders

# ChatML with a system turn, like Qwen2.5's: the template has 60 tokens of this tokenizer.
LAYOUT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + hf_folders.CHATML


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    texts_folder = tmp_path_factory.mktemp("texts")
    (texts_folder / "b.txt").write_text("Rain fell on the town. Nobody went out.\n" * 40)
    (texts_folder / "a.txt").write_text("A sailor came home. The dog knew him at once.\n" * 40)
    documents = [f"Town {i}. Its mayor is Mayor {i}." for i in range(99)]
    rows = [
        {"question": f"Who is mayor {i}?", "answer": f"Mayor {i}", "documents": documents[i::3]}
        for i in range(3)
    ]
    (texts_folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return texts_folder


@pytest.fixture(scope="module")
def chatml(tmp_path_factory) -> Tokenizer:
    tokenizer_folder = tmp_path_factory.mktemp("tokenizer")
    config = hf_folders.CONFIG | {"chat_template": LAYOUT}
    return tokenizers.load(hf_folders.write(tokenizer_folder, hf_folders.byte_level(), config))


@pytest.mark.parametrize("task", ruler.TASKS)
def test_length_includes_the_chat_template(task: str, folder: Path, chatml: Tokenizer):
    length = 16_384 if task == "cwe" else 2048
    benchmark = benchmarks.load(f"ruler_{task}_{length}", folder, 2, chatml)
    assert benchmark.name == f"ruler_{task}_{length}" and len(benchmark.items) == 2
    assert len(chatml.chat("")) > 40
    for item in benchmark.items:
        tokens = len(chatml.chat(item.prompt))
        room = length - benchmark.max_tokens
        assert 0.95 * room <= tokens <= room and item.fields["tokens"] == tokens


def test_needle_grid_is_loaded_by_name(folder: Path, chatml: Tokenizer):
    benchmark = benchmarks.load("needle_2048_1024", folder, None, chatml)
    assert (benchmark.name, benchmark.by) == ("needle_2048_1024", ("length", "depth"))
    cells = [(item.fields["length"], item.fields["depth"]) for item in benchmark.items]
    assert cells == [(length, depth) for length in (1024, 2048) for depth in ruler.GRID_DEPTHS]
    for item in benchmark.items:
        room = item.fields["length"] - benchmark.max_tokens
        assert 0.95 * room <= len(chatml.chat(item.prompt)) <= room
    larger_benchmark = benchmarks.load("needle_1024_2048", folder, 23, chatml)
    assert larger_benchmark.items[:22] == benchmark.items and len(larger_benchmark.items) == 23
    assert (
        larger_benchmark.items[22].id == "needle-1024-0.0-1"
        and benchmark.items[0].id == "needle-1024-0.0-0"
    )
    default_benchmark = benchmarks.load("needle", folder, 1, chatml)
    assert (
        default_benchmark.name == "needle" and default_benchmark.items[0].fields["length"] == 4096
    )


def test_prose_is_all_texts_of_the_folder(folder: Path, monkeypatch):
    assert read_prose(folder).startswith("A sailor")
    assert read_prose(folder).endswith("Nobody went out.\n")
    words = tokenizers.load(TINY_POLICY)
    (item,) = benchmarks.load("ruler_niah_single_2_4096", folder, 1, words).items
    assert "sailor" in item.prompt and "Rain" in item.prompt
    calls = []
    monkeypatch.setattr(ruler, "ITEMS", 9)
    monkeypatch.setattr(ruler, "ruler", lambda *arguments: calls.append(arguments))
    benchmarks.load("ruler_vt_1024", folder, None, words)
    benchmarks.load("ruler_qa_1024", folder, 7, words)
    (task, source, _, count), (_, _, rows, qa_count) = calls
    assert (task, source.length, source.text, count) == ("vt", 1024, "", 9)
    assert qa_count == 7 and len(rows) == 3


def test_needles_are_hidden_in_a_novel_by_default(folder: Path, tmp_path: Path, caplog):
    caplog.set_level("INFO")
    words = tokenizers.load(TINY_POLICY)
    names = "ruler_niah_single_2_4096", "needle_4096"
    for name in names:
        (item,) = benchmarks.load(name, "", 1, words).items
        assert (item,) == benchmarks.load(name, tmp_path, 1, words).items
    assert sum("Moby-Dick" in record.message for record in caplog.records) == 4
    sentences = haystack.split_sentences(sources.default_prose())
    assert sum(sentence in item.prompt for sentence in sentences) > 30
    (item,) = benchmarks.load("needle_4096", "", 1, words, prose=folder).items
    assert "sailor" in item.prompt


def test_length_is_that_of_a_policy_without_room_to_spare(chatml: Tokenizer):
    benchmark = benchmarks.load("needle_8192", "", 3, chatml)
    tokens = max(len(chatml.chat(item.prompt)) for item in benchmark.items)
    assert 0.95 * 8192 < tokens + benchmark.max_tokens <= 8192


def test_folders_are_found_by_name_or_family(tmp_path: Path):
    def find(name: str, data: Path) -> Path:
        return Path(benchmarks.find_folder(name, data))

    assert find("ruler_vt_1024", tmp_path) == find("frames", tmp_path) == tmp_path
    (tmp_path / "ruler").mkdir()
    (tmp_path / "frames").mkdir()
    assert find("ruler_vt_1024", tmp_path) == tmp_path / "ruler"
    assert find("frames", tmp_path) == tmp_path / "frames"
    assert find("needle", tmp_path) == find("needle_1024", tmp_path) == tmp_path
    (tmp_path / "ruler_vt_1024").mkdir()
    assert find("ruler_vt_1024", tmp_path) == tmp_path / "ruler_vt_1024"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ruler_vat_1024",
            r"'ruler_vat_1024': must be ruler_TASK_LENGTH, .* niah_single",
        ),
        ("ruler_vt", "must be ruler_TASK_LENGTH"),
        ("ruler", "must be ruler_TASK_LENGTH"),
        ("ruler_vt_16K", "length '16K': must be a number of tokens, such as 16384"),
        ("ruler_vt_", "length '': must be a number"),
        ("ruler_vt_²", "length '²': must be a number"),
        ("ruler_vt_99", r"length = 99: must be at least \d+, for the prompt"),
        ("needle_", "length '': must be a number"),
        ("needle_1024_deep", "length 'deep'"),
        ("needle_1024_1024", "must have each length once"),
        ("rulers_vt_1024", r"'rulers_vt_1024': no such .*ruler_TASK_LENGTH, needle_LENGTH_"),
    ],
)
def test_invalid_benchmark_names_are_rejected(
    name: str, message: str, folder: Path, chatml: Tokenizer
):
    with pytest.raises(ValueError, match=message):
        benchmarks.load(name, folder, 1, chatml)


def test_missing_or_invalid_inputs_raise(folder: Path, chatml: Tokenizer, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"prose = .*: must have \*\.txt files, or"):
        benchmarks.load("needle_1024", folder, 1, chatml, prose=tmp_path)
    with pytest.raises(ValueError, match="'ruler_qa_1024': data = '': must be a folder with quest"):
        benchmarks.load("ruler_qa_1024", "", 1, chatml)
    with pytest.raises(ValueError, match="data = '': must be the folder of the files of 'frames'"):
        benchmarks.load("frames", "")
    with pytest.raises(FileNotFoundError, match=r"no \*\.jsonl or \*\.json there"):
        benchmarks.load("ruler_qa_1024", tmp_path, 1, chatml)
    assert benchmarks.load("ruler_vt_2048", tmp_path / "none", 1, chatml).items  # needs no text
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="benchmark 'needle_1024': text: has no words"):
        benchmarks.load("needle_1024", tmp_path, 1, chatml)
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 text"):
        benchmarks.load("needle_1024", tmp_path, 1, chatml)
    with pytest.raises(ValueError, match="need a tokenizer"):
        benchmarks.load("ruler_vt_1024", folder)
    with pytest.raises(ValueError, match="limit = 0"):
        benchmarks.load("ruler_vt_1024", folder, 0, chatml)
