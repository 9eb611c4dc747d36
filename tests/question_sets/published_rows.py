"""Made-up rows of the layouts that spell_jax.question_sets.published reads."""

from __future__ import annotations

from typing import Any


def musique(number: int, **changes: Any) -> dict[str, Any]:
    """Make a row with two supporting paragraphs of four; the second of the two has the answer."""
    texts = (
        (f"Town {number}", f"Town {number} lies in county {number}.", True),
        (f"Hill {number}", f"Hill {number} is of no use here.", False),
        (f"County {number}", f"The seat of county {number} is Castle{number} Rock.", True),
        ("Everywhere", "This paragraph is in every row.", False),
    )
    paragraphs = [
        {"idx": i, "title": title, "paragraph_text": text, "is_supporting": supports}
        for i, (title, text, supports) in enumerate(texts)
    ]
    row = {
        "id": f"2hop__{number}",
        "paragraphs": paragraphs,
        "question": f"What is the seat of the county of Town {number}?",
        "answer": f"Castle{number} Rock",
        "answer_aliases": [f"CR{number}"],
        "answerable": True,
    }
    return row | changes


def hotpotqa(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "_id": str(number),
        "question": f"Which band of Town {number} plays drums?",
        "answer": f"Band {number}",
        "supporting_facts": [[f"Town {number}", 1], [f"Drums {number}", 0]],
        "context": [
            [f"Town {number}", [f"Town {number} is old.", f" Band {number} is from it."]],
            [f"Drums {number}", [f"Band {number} plays drums.", " Others sing."]],
            [f"Rain {number}", ["It rains."]],
        ],
        "type": "bridge",
    }
    return row | changes


def tatqa(number: int, **changes: Any) -> dict[str, Any]:
    def make_question(
        question: str, kind: str, answer: Any, source: str, **extra_fields: Any
    ) -> dict[str, Any]:
        common = {"derivation": "", "rel_paragraphs": [], "scale": ""}
        fields = {"answer_type": kind, "answer": answer, "answer_from": source}
        return {"question": question, **fields, **common, **extra_fields}

    row = {
        "table": {
            "uid": f"{number:08d}-table",
            "table": [
                ["", "2019", "2018"],
                ["Sensors", "$1,452.4", "900"],
                ["Others", "44.1", "56.7"],
                ["", "", ""],
            ],
        },
        "paragraphs": [
            {"uid": "a", "order": 1, "text": f"Contracts of firm {number} are fixed{number}."},
            {"uid": "b", "order": 2, "text": "The table is in millions."},
        ],
        "questions": [
            make_question(
                "How are contracts?", "span", [f"fixed{number}"], "text", rel_paragraphs=["1"]
            ),
            make_question(
                "What is the change in Others?",
                "arithmetic",
                -12.6,
                "table-text",
                derivation="44.1-56.7",
                rel_paragraphs=["2"],
                scale="million",
            ),
            make_question("Which lines are there?", "multi-span", ["Sensors", "Others"], "table"),
            make_question("How many lines?", "count", "2", "table", derivation="Sensors##Others"),
            make_question(
                "What were Sensors in 2019?", "span", ["$1,452.4"], "table", scale="million"
            ),
            make_question(
                "By how much?", "arithmetic", 5, "table", derivation="(7.7-2.7)", scale="percent"
            ),
        ],
    }
    return row | changes


def convfinqa(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"Single_ABC/20{number:02d}/page_7.pdf-2",
        "questions": ["what was it in 2007?", "and in 2005?", "what is the change?"],
        "answer": 35.8,
        "text": f"firm {number} grants options . they vest in three years . all is well .",
        "table": f"- | 2007 | 2005\nprice {number} | $ 60.94 | $ 25.14\nlife | 5.0 | 3.8\n",
        "golden_text": "",
        "golden_table": f"- | 2007 | 2005\nprice {number} | $ 60.94 | $ 25.14\n",
        "programs": ["ans = 60.94 - 25.14"],
    }
    return row | changes
