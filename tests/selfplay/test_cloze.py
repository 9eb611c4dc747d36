"""Tests of cloze questions: which spans are asked for, and that their answers can be found."""

from __future__ import annotations

import pytest

from spell_jax.selfplay import cloze

DOCUMENTS = (
    "The Saturn V rocket carried Apollo crews to the Moon. It was built by Boeing in 1969.",
    "Boeing built the first stage of the rocket for NASA. Crews trained in Houston before launch.",
    "In 1969 a rocket of NASA launched from Florida. The rain fell. It was cold and it was dark.",
)


def found(documents=DOCUMENTS, shared_words: int = 1) -> dict[str, cloze.Cloze]:
    return {f"{c.span} in {c.document}": c for c in cloze.find_clozes(documents, shared_words)}


def test_span_of_a_gap_stands_in_another_sentence() -> None:
    clozes = found()
    assert "Boeing in 0" in clozes and "NASA in 1" in clozes
    for one in clozes.values():
        assert cloze.GAP in one.question and one.span.lower() not in one.question.lower()
        assert one.question.replace(cloze.GAP, one.span) == one.sentence
        for number, sentence in one.elsewhere:
            assert one.span.lower() in sentence.lower() and sentence in DOCUMENTS[number]
            assert sentence != one.sentence


def test_sentences_must_share_other_words() -> None:
    """ "1969" stands in two sentences that have no other word in common."""
    assert not any(name.startswith("1969") for name in found())
    assert any(name.startswith("1969") for name in found(shared_words=0))
    assert found(shared_words=99) == {}


def test_every_occurrence_in_the_sentence_is_a_gap() -> None:
    documents = ("Oslo is north of Rome, and Oslo has many bridges.", "Oslo has bridges and boats.")
    (one,) = [c for c in cloze.find_clozes(documents, 1) if c.span == "Oslo" and c.document == 0]
    assert one.question == "____ is north of Rome, and ____ has many bridges."


@pytest.mark.parametrize(
    ("first", "second", "spans"),
    [
        # The longest span that recurs, not a part of it.
        (
            "A treaty with the Dutch Republic was signed that year.",
            "The Dutch Republic signed a treaty.",
            ["Dutch Republic"],
        ),
        # "Saturn" of "Saturn V" would cut a name.
        ("The launch of Saturn V was seen by many.", "Many a launch of Saturn was seen.", []),
        # A single word of lower case is no answer; two are.
        ("They measured the reduction gear of the ship.", "A gear of a ship was measured.", []),
        (
            "They measured the reduction gear of the ship.",
            "A reduction gear of a ship was measured.",
            ["reduction gear"],
        ),
        # A capital at the start of a sentence makes no name.
        ("Rain wetted many roofs of the town.", "Roofs of a town keep out the rain.", []),
    ],
)
def test_spans_that_are_asked_for(first: str, second: str, spans: list[str]) -> None:
    assert [c.span for c in cloze.find_clozes((first, second), 1) if c.document == 0] == spans


def test_hidden_sentences_are_gone() -> None:
    sentence = "It was built by Boeing in 1969."
    hidden = cloze.hide(DOCUMENTS, [sentence, "The rain fell."])
    assert hidden[0] == "The Saturn V rocket carried Apollo crews to the Moon."
    assert hidden[1] == DOCUMENTS[1] and "rain" not in hidden[2] and "  " not in hidden[2]


@pytest.mark.parametrize("documents", [(), ("",), ("a b c",), ("....", "\n\n", "____ ____")])
def test_texts_without_sentences_have_no_questions(documents: tuple[str, ...]) -> None:
    assert list(cloze.find_clozes(documents)) == []
