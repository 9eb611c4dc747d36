"""Tests of the prose and the questions that generated benchmarks are made of."""

import json
from pathlib import Path

import pytest

from spell_jax.data.questions import Question
from spell_jax.evaluation.generated.sources import read_prose, read_questions


def make_question(documents: tuple[str, ...], question: str, *answers: str) -> Question:
    return Question("general_qa", documents, question, answers[0], answers=answers)


def test_rows_are_read_in_three_layouts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lines = [
        {"question": "q1", "answer": "a1", "context": [["T", ["One.", " Two."]], ["U", ["x"]]]},
        {
            "question": "q2",
            "answer": "a2",
            "answer_aliases": ["b2", "a2"],
            "paragraphs": [{"title": "T", "paragraph_text": "Three."}],
        },
        {"question": "q3", "answers": ["a3", "b3"], "documents": ["Four."]},
        {"question": "q4", "answer": "", "documents": ["Five."]},
        {"question": "q5", "answer": "a5", "documents": []},
        {"question": "q6", "documents": ["Six."]},
        {"question": "q7\ud800", "answer": "a7", "documents": ["Seven."]},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "a.jsonl").write_text(json.dumps(lines[2]) + "\n")
    (tmp_path / "a.txt").write_text("none")
    assert read_questions(tmp_path) == (
        make_question(("Four.",), "q3", "a3", "b3"),
        make_question(("T\nOne. Two.", "U\nx"), "q1", "a1"),
        make_question(("T\nThree.",), "q2", "a2", "b2"),
        make_question(("Four.",), "q3", "a3", "b3"),
    )
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        f"{tmp_path / 'b.jsonl'}:{number}:" for number in (4, 5, 6, 7)
    ]
    with pytest.raises(FileNotFoundError, match=r"no \*\.jsonl or \*\.json there"):
        read_questions(tmp_path / "none")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="no question in its"):
        read_questions(tmp_path / "c")


def test_published_json_files_are_read_as_they_are(tmp_path: Path, caplog):
    """SQuAD's file, HotpotQA's list, its form on the hub, and essays, all in one folder."""
    qas = [
        {"id": "a", "question": "q1", "answers": [{"text": "x"}, {"text": "y"}, {"text": "x"}]},
        {"id": "b", "question": "q2", "answers": [], "is_impossible": True},
        {"id": "c", "question": "q3", "answers": []},
    ]
    squad = {"version": "v2.0", "data": [{"title": "T", "paragraphs": [{"context": "One."}]}]}
    squad["data"][0]["paragraphs"][0]["qas"] = qas
    hotpot = {"_id": "d", "question": "q4", "answer": "z", "context": [["T", ["Two.", " 3."]]]}
    hub = hotpot | {"question": "q5", "context": {"title": ["T"], "sentences": [["Two."]]}}
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(squad))
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text(json.dumps([hotpot, hub, {}]))
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "An essay."}))
    (tmp_path / "z.txt").write_text("More.")
    assert read_questions(tmp_path) == (
        make_question(("One.",), "q1", "x", "y"),
        make_question(("T\nTwo. 3.",), "q4", "z"),
        make_question(("T\nTwo.",), "q5", "z"),
    )
    skipped = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (warning,) = skipped
    assert "hotpot_dev_distractor_v1.json, row 2: skipped" in warning
    assert read_prose(tmp_path) == "An essay.\nMore."


def test_missing_and_damaged_prose_is_named(tmp_path: Path):
    assert read_prose(tmp_path) == ""
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8"):
        read_prose(tmp_path)
