"""Tests of cloze questions: which spans are asked for, and that their answers can be found."""

from __future__ import annotations

import pytest

from spell_jax.selfplay import cloze

DOCUMENTS = (
    "The Saturn V rocket carried Apollo crews to the Moon. It was built by Boeing in 1969.",
    "Boeing built the first stage of the rocket for NASA. Crews trained in Houston before launch.",
    "In 1969 a rocket of NASA launched from Florida. The rain fell. It was cold and it was dark.",
)


def clozes_by_name(documents=DOCUMENTS, shared_words: int = 1) -> dict[str, cloze.Cloze]:
    return {f"{c.span} in {c.document}": c for c in cloze.find_clozes(documents, shared_words)}


def test_span_of_a_gap_stands_in_another_sentence() -> None:
    clozes = clozes_by_name()
    assert "Boeing in 0" in clozes and "NASA in 1" in clozes
    for gap in clozes.values():
        assert cloze.GAP in gap.question and gap.span.lower() not in gap.question.lower()
        assert gap.question.replace(cloze.GAP, gap.span) == gap.sentence
        for number, sentence in gap.elsewhere:
            assert gap.span.lower() in sentence.lower() and sentence in DOCUMENTS[number]
            assert sentence != gap.sentence


def test_sentences_must_share_other_words() -> None:
    """ "1969" stands in two sentences that have no other word in common."""
    assert not any(name.startswith("1969") for name in clozes_by_name())
    assert any(name.startswith("1969") for name in clozes_by_name(shared_words=0))
    assert clozes_by_name(shared_words=99) == {}


def test_every_occurrence_in_the_sentence_is_a_gap() -> None:
    documents = ("Oslo is north of Rome, and Oslo has many bridges.", "Oslo has bridges and boats.")
    (gap,) = [c for c in cloze.find_clozes(documents, 1) if c.span == "Oslo" and c.document == 0]
    assert gap.question == "____ is north of Rome, and ____ has many bridges."


@pytest.mark.parametrize(
    ("first", "second", "spans"),
    [
        # The longest span that recurs, not a part.
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


def test_underscores_end_words_everywhere() -> None:
    documents = ("They sold 11_000 pots of the red clay.", "In 11 pots of red clay was gold.")
    (gap,) = [c for c in cloze.find_clozes(documents, 1) if c.span == "11" and c.document == 0]
    assert gap.question == "They sold _____000 pots of the red clay."


def test_hidden_sentences_are_gone() -> None:
    sentence = "It was built by Boeing in 1969."
    hidden = cloze.hide(DOCUMENTS, [sentence, "The rain fell."])
    assert hidden[0] == "The Saturn V rocket carried Apollo crews to the Moon."
    assert hidden[1] == DOCUMENTS[1] and "rain" not in hidden[2] and "  " not in hidden[2]


@pytest.mark.parametrize("documents", [(), ("",), ("a b c",), ("....", "\n\n", "____ ____")])
def test_texts_without_sentences_have_no_questions(documents: tuple[str, ...]) -> None:
    assert list(cloze.find_clozes(documents)) == []


BUILT = "It was built by Boeing in 1969."


@pytest.mark.parametrize(
    ("sentence", "span", "question", "reason"),
    [
        (f" {BUILT} ", "Boeing", "It was built by ____ in 1969.", ""),
        (BUILT, "boeing", "It was built by ____ in 1969.", ""),
        ("It was built by Boeing.", "Boeing", "", "not_a_sentence"),
        ("It was built by Boeing in 1970.", "Boeing", "", "not_a_sentence"),
        ("The rain fell.", "rain", "", "not_a_sentence"),  # of a document that is not shown
        (BUILT, "built by Boeing", "", "not_elsewhere"),
        (BUILT, "Boe", "", "not_in_sentence"),  # no whole word
        (BUILT, "Saturn", "", "not_in_sentence"),
        (BUILT, " ", "", "not_in_sentence"),
        (BUILT, "built", "It was ____ by Boeing in 1969.", ""),
        (BUILT, "It", "____ was built by Boeing in 1969.", ""),
        (BUILT, "by", "", "not_elsewhere"),
        ("Crews trained in Houston before launch.", "Houston", "", "not_elsewhere"),
    ],
)
def test_questioners_sentence_and_span_are_searched(
    sentence: str, span: str, question: str, reason: str
) -> None:
    assert cloze.check_span(sentence, span, DOCUMENTS[:2], DOCUMENTS) == (question, reason)


def test_long_spans_are_refused() -> None:
    sentence = "One of the many old ships that sailed to the south was lost."
    documents = (sentence, "They saw one of the many old ships.")
    reason = cloze.check_span(sentence, "One of the many old ships", documents, documents)[1]
    assert reason == "long_span"
    assert not cloze.check_span(sentence, "the many old ships", documents, documents)[1]


def test_questions_by_rule_pass_the_check_of_questions_by_the_policy() -> None:
    for gap in clozes_by_name().values():
        assert cloze.check_span(gap.sentence, gap.span, DOCUMENTS, DOCUMENTS) == (gap.question, "")


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("The Treaty of Rome was signed on 25 March 1957.", ["Treaty of Rome", "25 March 1957"]),
        ("Rain fell. Snow White slept in Oslo.", ["Snow White", "Oslo"]),
        ("It has 3.5 million people and a bank of the city.", ["3.5"]),
        ("Of the Dutch Republic, little is left.", ["Dutch Republic"]),
        ("Duke John Jack James Joe Jim of York and Anna.", ["Anna"]),  # too long
        ("He met Anna, Berta and Anna.", ["Anna", "Berta"]),
        ("nothing here.", []),
        ("", []),
    ],
)
def test_names_and_numbers_may_be_answers(text: str, spans: list[str]) -> None:
    assert cloze.answer_spans(text) == spans


def test_short_sentences_say_too_little() -> None:
    documents = ("Rain fell on Rome.", "It was dark in Rome.")
    assert cloze.check_span(documents[0], "Rome", documents, documents) == ("", "short_sentence")
