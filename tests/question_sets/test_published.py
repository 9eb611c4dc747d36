"""Tests of rows of published layouts: drafts, named reasons for unusable rows, errors."""

from __future__ import annotations

import json

import pytest

from spell_jax.data.questions import Question
from spell_jax.question_sets.published import LAYOUTS, giveaways, read_row
from tests.question_sets import published_rows as rows


def drafts(layout: str, row: dict) -> list[Question]:
    outcomes = read_row(LAYOUTS[layout], row)
    assert all(isinstance(draft, Question) for draft in outcomes)
    return [draft for draft in outcomes if isinstance(draft, Question)]


def test_musique_evidence_is_its_supporting_paragraphs():
    (draft,) = drafts("musique", rows.musique(3))
    assert draft == Question(
        "general_qa",
        (
            "Town 3\nTown 3 lies in county 3.",
            "Hill 3\nHill 3 is of no use here.",
            "County 3\nThe seat of county 3 is Castle3 Rock.",
            "Everywhere\nThis paragraph is in every row.",
        ),
        "What is the seat of the county of Town 3?",
        "Castle3 Rock",
        ("Town 3 lies in county 3.", "The seat of county 3 is Castle3 Rock."),
        ("Castle3 Rock", "CR3"),
    )
    assert giveaways(draft) == ("castle3 rock", "cr3")


def test_unanswerable_musique_rows_are_left_out():
    assert read_row(LAYOUTS["musique"], rows.musique(1, answerable=False)) == ["unanswerable"]


def test_hotpotqa_evidence_is_its_supporting_sentences():
    (draft,) = drafts("hotpotqa", rows.hotpotqa(5))
    assert draft.documents[0] == "Town 5\nTown 5 is old. Band 5 is from it."
    assert draft.evidence == ("Band 5 is from it.", "Band 5 plays drums.")
    assert all(any(quote in text for text in draft.documents) for quote in draft.evidence)
    assert (draft.task, giveaways(draft)) == ("general_qa", ("band 5",))


def test_hotpotqa_rows_may_have_lists_of_columns():
    row = rows.hotpotqa(5)
    titles, sentences = map(list, zip(*row["context"], strict=True))
    names, numbers = map(list, zip(*row["supporting_facts"], strict=True))
    columns = {
        "context": {"title": titles, "sentences": sentences},
        "supporting_facts": {"title": names, "sent_id": numbers},
    }
    assert drafts("hotpotqa", row | columns) == drafts("hotpotqa", row)


def test_missing_supporting_facts_are_ignored():
    facts = [["Town 5", 1], ["Town 5", 2], ["Nowhere", 0], ["Rain 5", -1]]
    (draft,) = drafts("hotpotqa", rows.hotpotqa(5, supporting_facts=facts))
    assert draft.evidence == ("Band 5 is from it.",)


@pytest.mark.parametrize("answer", ["yes", "No", "1974", "1.5"])
def test_common_answers_have_no_giveaways(answer):
    (draft,) = drafts("hotpotqa", rows.hotpotqa(5, answer=answer))
    assert giveaways(draft) == ()


def test_tatqa_row_gives_several_questions_about_one_report():
    outcomes = read_row(LAYOUTS["tatqa"], rows.tatqa(7))
    document = (
        "Report 00000007\nContracts of firm 7 are fixed7.\nThe table is in millions.\n"
        " | 2019 | 2018\nSensors | $1,452.4 | 900\nOthers | 44.1 | 56.7"
    )
    span, change, several, count, figure, percent = outcomes
    assert several == "answer is multi-span"
    assert span == Question(
        "general_qa",
        (document,),
        "Report 00000007: How are contracts?",
        "fixed7",
        ("Contracts of firm 7 are fixed7.",),
    )
    assert isinstance(change, Question) and isinstance(count, Question)
    assert (change.task, change.answer, giveaways(change)) == ("financial_math", "-12.6", ())
    assert change.question.endswith("What is the change in Others? State it in millions.")
    assert change.evidence == ("The table is in millions.", "Others | 44.1 | 56.7")
    assert (count.task, count.answer) == ("financial_math", "2")
    assert count.evidence == ("Sensors | $1,452.4 | 900", "Others | 44.1 | 56.7")
    assert isinstance(figure, Question) and isinstance(percent, Question)
    assert (figure.task, figure.answer) == ("general_qa", "$1,452.4")
    assert figure.evidence == ("Sensors | $1,452.4 | 900",) and giveaways(figure) == ()
    # No row has the figures of the derivation: the whole table is the evidence.
    assert len(percent.evidence) == 3 and percent.question.endswith("State it in percent.")


def test_derivation_figures_match_with_and_without_commas():
    row = rows.tatqa(7)
    question = row["questions"][1] | {"derivation": "1452.4 - 5", "rel_paragraphs": []}
    (draft,) = drafts("tatqa", row | {"questions": [question]})
    assert draft.evidence == ("Sensors | $1,452.4 | 900",)


def test_convfinqa_asks_the_last_question_of_a_conversation():
    (draft,) = drafts("convfinqa", rows.convfinqa(9))
    assert draft.question == (
        "Report ABC/2009/page_7.pdf, a conversation: what was it in 2007? and in 2005? "
        "Answer its last question: what is the change?"
    )
    assert (draft.task, draft.answer) == ("financial_math", "35.8")
    (document,) = draft.documents
    assert document.startswith("Report ABC/2009/page_7.pdf\nfirm 9 grants options .")
    assert document.endswith("life | 5.0 | 3.8")
    assert draft.evidence == ("- | 2007 | 2005", "price 9 | $ 60.94 | $ 25.14")
    (alone,) = drafts("convfinqa", rows.convfinqa(9, questions=["how much?"], answer="no"))
    assert alone.question == "Report ABC/2009/page_7.pdf: how much?"
    assert (alone.task, alone.answer) == ("general_qa", "no")


def test_scattered_gold_text_is_quoted_by_sentence():
    text = "firm 9 grants options . all is well ."
    (draft,) = drafts("convfinqa", rows.convfinqa(9, golden_text=text, golden_table=""))
    assert draft.evidence == ("firm 9 grants options .", "all is well .")
    gold_text = "they vest in three years . all is well ."
    (draft,) = drafts("convfinqa", rows.convfinqa(9, golden_text=gold_text, golden_table=""))
    assert draft.evidence == (gold_text,)


@pytest.mark.parametrize("answer", ["the", "...", "A"])
def test_answers_that_the_rule_cannot_score_are_left_out(answer):
    outcomes = read_row(LAYOUTS["musique"], rows.musique(1, answer=answer))
    assert outcomes == ["rule cannot score the answer"]


PARAGRAPH = {"title": "a", "paragraph_text": "b"}
BAD = [
    ("musique", []),
    ("musique", {}),
    ("musique", "text"),
    ("musique", rows.musique(1, answer=None)),
    ("musique", rows.musique(1, answer=" ")),
    ("musique", rows.musique(1, question="\ud800")),
    ("musique", rows.musique(1, paragraphs=[PARAGRAPH])),
    ("musique", rows.musique(1, paragraphs=[PARAGRAPH | {"is_supporting": False}])),
    ("musique", rows.musique(1, paragraphs=[PARAGRAPH | {"is_supporting": True, "title": 1}])),
    ("musique", rows.musique(1, answer_aliases=[1])),
    ("hotpotqa", rows.hotpotqa(1, supporting_facts=[])),
    ("hotpotqa", rows.hotpotqa(1, supporting_facts=[["Town 1", "1"]])),
    ("hotpotqa", rows.hotpotqa(1, context=[["Town 1"]])),
    ("hotpotqa", rows.hotpotqa(1, context={"title": ["a"], "sentences": []})),
    ("tatqa", rows.tatqa(1, table={"uid": "a", "table": [["a"], [1]]})),
    ("tatqa", rows.tatqa(1, paragraphs=[])),  # the questions refer to some
    ("tatqa", rows.tatqa(1, questions=[{"answer_type": "arithmetic", "answer": True}])),
    ("tatqa", rows.tatqa(1, questions=None)),
    ("convfinqa", rows.convfinqa(1, questions=[])),
    ("convfinqa", rows.convfinqa(1, answer=True)),
    ("convfinqa", rows.convfinqa(1, answer=None)),
    ("convfinqa", rows.convfinqa(1, id=1)),
]


@pytest.mark.parametrize("layout, row", BAD)
def test_rows_of_another_layout_raise(layout, row):
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        read_row(LAYOUTS[layout], row)


def test_odd_field_values_raise_only_expected_errors():
    """Each field of each layout gets each kind of value."""
    values = (None, True, 0, -1, 1e308, "", "x", [], {}, [[]], [{}], [None], {"x": []}, "\ud800")
    layout_rows = {name: getattr(rows, name)(1) for name in LAYOUTS}
    for layout, row in layout_rows.items():
        for field in row:
            for value in values:
                try:
                    read_row(LAYOUTS[layout], json.loads(json.dumps(row)) | {field: value})
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue
