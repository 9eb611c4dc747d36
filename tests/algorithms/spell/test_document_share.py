"""Tests of the reward for naming the document that a question is about (document_share)."""

from __future__ import annotations

import dataclasses

import pytest

from spell_jax.algorithms.registry import ALGORITHMS
from spell_jax.algorithms.rlvr.algorithm import make_rlvr
from spell_jax.algorithms.rlvr.config import RlvrConfig
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.config import DataConfig
from spell_jax.data.questions import Question
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.selfplay import evidence
from tests.algorithms.scripted import (
    QA,
    SMALL,
    Row,
    Script,
    ScriptedModels,
    make_algorithm,
    make_config,
    make_context,
    roll_out,
    to_records,
)

ROWS = (Row(QA, "ok", 0, 2, 0, 0),)  # the first two of four answers are right
SHARE = {
    "responder__reward": "rule",
    "responder__document_share": 0.5,
    "questioner__documents": (1,),
}


class Naming(Script):
    """A script whose answers begin with the numbers 1, 2, 3 and none."""

    def __call__(self, role: str, prompt: str, sibling: int, model: str) -> str | None:
        text = super().__call__(role, prompt, sibling, model)
        is_answer = role == "responder" and not prompt.startswith("Empty")
        return f"[{sibling + 1}] {text}" if is_answer and sibling < 3 else text


def test_naming_the_document_earns_its_share() -> None:
    algorithm, ask = make_algorithm(ROWS, **SHARE), ScriptedModels(Naming(ROWS))
    (episode,) = roll_out(algorithm, ask, 1)
    (shown,) = episode.shown
    named = tuple(number == shown for number in (0, 1, 2, None))
    assert episode.named == named and sum(named) == 1
    assert episode.rule == (1.0, 1.0, 0.0, 0.0)
    assert episode.scores == tuple(
        0.5 * right + 0.5 * hit for right, hit in zip(episode.rule, named, strict=True)
    )
    (prompt,) = [p for c in ask.calls if c.role == "responder" for p in c.prompts][-1:]
    assert prompt.startswith("[1] d0.0 text\n[2] d0.1 text\n[3] d0.2 text\n")
    (questioner,) = [p for c in ask.calls if c.role == "questioner" for p in c.prompts]
    assert not questioner.startswith("[")
    assert to_records(algorithm, [episode])[0]["named"] == list(named)
    assert algorithm.metrics([episode]).means()["named_document"] == 0.25


def test_frozen_reader_and_teacher_read_the_same_numbers() -> None:
    options = {**SHARE, "reader__source": "frozen_reader"}
    algorithm, ask = make_algorithm(ROWS, **options), ScriptedModels(Naming(ROWS))
    (episode,) = roll_out(algorithm, ask, 1)
    (reader,) = [p for c in ask.calls if c.model == "reference_reader" for p in c.prompts]
    (shown,) = episode.shown
    assert reader.startswith(f"[{shown + 1}] d0.{shown} text\n")


def test_held_out_documents_are_numbered_too(tmp_path) -> None:
    question = Question(QA, ("Oslo is a town.", "Lima too."), "Which town?", "Oslo")
    write_records(tmp_path / "held_out.jsonl", [dataclasses.asdict(question)])
    data = DataConfig(source="x", validation=str(tmp_path / "held_out.jsonl"), tasks=(QA,))
    for share, first in ((0.5, "[1] Oslo is a town.\n[2] Lima too."), (0.0, "Oslo is a town.\nL")):
        config = make_config(SpellConfig, responder__document_share=share)
        evaluation = ALGORITHMS["spell"].evaluate(config, make_context(), data)
        ask = ScriptedModels(lambda *_: "The answer is Oslo")
        assert evaluation is not None and evaluation.quick(ask)[0] == 1.0
        assert ask.calls[0].prompts[0].startswith(first)


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("[3] The answer is x", 2),
        (" [12]: x", 11),
        ("<think>[1]</think>[2] x", 1),
        ("The answer is [3]", None),
        ("[x] [3]", None),
        ("[12345]", None),
        ("", None),
    ],
)
def test_named_document_is_read_from_the_start(text: str, index: int | None) -> None:
    assert evidence.named_document(text) == index


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_share_is_from_0_to_1(share: float) -> None:
    with pytest.raises(ValueError, match="document_share"):
        make_config(SpellConfig, responder__document_share=share)


def test_given_questions_tell_which_document_is_right() -> None:
    questions = (
        Question(QA, ("first", "second fact", "third"), "Q?", "right", ("second",)),
        Question(QA, ("a", "b", "c"), "R?", "right", shown=(0, 2)),
        Question(QA, ("a", "b", "c"), "without both, left out", "right"),
    )
    context = make_context(questions=lambda: questions)
    fields = SMALL | SHARE | {"generation_batch": 3}
    algorithm = make_rlvr(make_config(RlvrConfig, **fields), context)
    ask = ScriptedModels(lambda role, prompt, sibling, model: f"[{sibling + 1}] The answer is no")
    named = {e.question: e.named for e in roll_out(algorithm, ask, 1)}
    assert named == {"Q?": (False, True, False, False), "R?": (True, False, True, False)}
