"""Tests of episodes on disk: one file per step, size limits, resumed runs."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os

import numpy as np
import pytest

from spell_jax.runtime.files import episodes
from spell_jax.runtime.files.episodes import EpisodeWriter, read_episodes
from spell_jax.runtime.files.jsonl import write_records

MUCH = 100_000


def record(cluster: str, *documents: str, **fields) -> dict:
    return {"cluster": cluster, "documents": list(documents)} | fields


def test_each_step_is_written_to_one_gzip_file(tmp_path):
    writer = EpisodeWriter(tmp_path, MUCH)
    first = {"question": "wie viele?\n€", "rewards": np.array([0.5, np.nan]), "votes": (1, -1)}
    path = writer.write(12, [first, {"score": np.int64(3), "half": "\ud83d"}])
    assert path is not None and path == tmp_path / "episodes" / "step_000012.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "number": 1,
            "of": 2,
            "question": "wie viele?\n€",
            "rewards": [0.5, None],
            "votes": [1, -1],
        },
        {"number": 2, "of": 2, "score": 3, "half": "\ud83d"},
    ]
    assert [p.name for p in path.parent.iterdir()] == ["step_000012.jsonl.gz"]
    assert list(read_episodes(tmp_path)) == [(12, json.loads(line)) for line in lines]


def test_equal_episodes_give_identical_bytes(tmp_path, monkeypatch):
    clock = itertools.count(1_000_000_000, 1_000_000)
    monkeypatch.setattr("time.time", lambda: next(clock))
    paths = [
        EpisodeWriter(tmp_path / name, MUCH).write(step, [record("a", "x"), record("b", "y")])
        for name, step in (("one", 1), ("two", 2))
    ]
    first_bytes, second_bytes = (path.read_bytes() for path in paths if path)
    assert first_bytes == second_bytes


def test_documents_of_a_cluster_are_written_once_if_they_fit(tmp_path):
    size = len(json.dumps(record("a") | {"number": 1, "of": 4})) - len(', "documents": []') + 1
    texts = {"a": ["€" * 30], "b": ["x" * 50, "y"], "c": ["z"]}
    records = [record(name, *texts[name]) for name in "abac"]
    room = 4 * size + sum(len(json.dumps({"documents": texts[n]})) + 1 for n in "bc")

    def kept_documents(characters: int) -> list:
        EpisodeWriter(tmp_path, characters).write(1, records)
        return [episode.get("documents") for _, episode in read_episodes(tmp_path)]

    assert kept_documents(MUCH) == [texts["a"], texts["b"], None, texts["c"]]
    # The documents of a are written first, and leave no room for the documents of b.
    assert kept_documents(room - 1) == [texts["a"], None, None, texts["c"]]
    assert kept_documents(4 * size) == [None] * 4


def test_records_over_the_size_limit_are_omitted_and_logged(tmp_path, caplog):
    records = [record("a", answers=["x" * length]) for length in (10, 900, 10)]
    with caplog.at_level(logging.WARNING):
        path = EpisodeWriter(tmp_path, 500).write(7, records)
    assert path and len(gzip.decompress(path.read_bytes())) <= 500
    numbers = [(episode["number"], episode["of"]) for _, episode in read_episodes(tmp_path)]
    assert numbers == [(1, 3), (3, 3)]
    assert "step 7: 1 of 3 episodes left out" in caplog.text
    caplog.clear()
    EpisodeWriter(tmp_path, MUCH).write(8, records)
    assert not caplog.text


def test_documents_are_omitted_before_records(tmp_path):
    records = [record("a", "x" * 300), record("b", "y" * 10), record("c", "z" * 10)]
    EpisodeWriter(tmp_path, 250).write(1, records)
    assert [e.get("documents") for _, e in read_episodes(tmp_path)] == [
        None,
        ["y" * 10],
        ["z" * 10],
    ]


def test_size_limit_zero_or_other_processes_write_nothing(tmp_path):
    assert EpisodeWriter(tmp_path / "run", 0).write(1, [{}]) is None
    assert EpisodeWriter(tmp_path / "run", MUCH, is_writer=False).write(1, [{}]) is None
    assert not (tmp_path / "run").exists()
    assert list(read_episodes(tmp_path / "run")) == []


def test_resume_removes_only_later_episodes(tmp_path):
    writer = EpisodeWriter(tmp_path, MUCH)
    for step in (1, 2, 3, 1_000_000):
        writer.write(step, [{}])
    (tmp_path / "episodes" / "step_notes.jsonl.gz").write_text("mine")
    EpisodeWriter(tmp_path, MUCH, resume_step=2, is_writer=False)
    assert [step for step, _ in read_episodes(tmp_path)] == [1, 2, 3, 1_000_000]
    EpisodeWriter(tmp_path, MUCH, resume_step=2)
    names = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert names == ["step_000001.jsonl.gz", "step_000002.jsonl.gz", "step_notes.jsonl.gz"]
    EpisodeWriter(tmp_path, MUCH)
    assert list(episodes.episode_files(tmp_path)) == []


def test_invalid_lines_and_rest_of_truncated_files_are_skipped(tmp_path, caplog):
    writer = EpisodeWriter(tmp_path, 10 * MUCH)
    noise = np.random.default_rng(0).integers(10, size=(100, 1000)).astype(str)
    torn = writer.write(1, [{"text": "".join(row)} for row in noise])
    bad = writer.write(2, [])
    writer.write(3, [{"text": "c"}])
    assert torn and bad
    torn.write_bytes(torn.read_bytes()[: torn.stat().length // 2])
    write_records(bad, [{"text": "a"}, "no episode", {"text": "b"}])
    with caplog.at_level(logging.WARNING):
        step_texts = list(
            read_episodes(tmp_path, lambda line: episodes.require_object(line)["text"])
        )
    assert [text for step, text in step_texts if step > 1] == ["a", "b", "c"]
    intact_texts = [text for step, text in step_texts if step == 1]
    assert 30 < len(intact_texts) < 60 and intact_texts == [
        "".join(row) for row in noise[: len(intact_texts)]
    ]
    assert f"{bad}:2: skipped (an episode is an object, not str)" in caplog.text
    assert f"{torn}:{len(intact_texts) + 1}: skipped from here on" in caplog.text


@pytest.mark.parametrize("content", [b"", b"no gzip at all", b"\x1f\x8b\x08"])
def test_file_without_gzip_format_is_skipped_with_a_warning(tmp_path, caplog, content):
    path = EpisodeWriter(tmp_path, MUCH).write(1, [])
    assert path
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert list(read_episodes(tmp_path)) == []
    assert bool(content) == (f"{path}:1: skipped from here on" in caplog.text)


def test_pipes_and_folders_in_place_of_files_are_left_out_and_removed(tmp_path, caplog):
    writer = EpisodeWriter(tmp_path, MUCH)
    for step in (1, 2):
        writer.write(step, [record("a")])
    os.mkfifo(tmp_path / "episodes" / "step_000003.jsonl.gz")
    (tmp_path / "episodes" / "step_000004.jsonl.gz" / "x").mkdir(parents=True)
    assert [step for step, _ in read_episodes(tmp_path)] == [1, 2]
    assert "step_000003.jsonl.gz: skipped (a pipe, a socket or a device)" in caplog.text
    EpisodeWriter(tmp_path, MUCH, resume_step=2)
    assert len(list((tmp_path / "episodes").iterdir())) == 2
