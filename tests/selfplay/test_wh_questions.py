"""Tests of questions that rules make from sentences."""

from __future__ import annotations

import pytest

from spell_jax.selfplay.wh_questions import ask_sentence


@pytest.mark.parametrize(
    ("sentence", "pairs"),
    [
        (
            "The old bridge of the town was built in 1804.",
            [("The old bridge of the town was built in which year?", "1804")],
        ),
        (
            "Most of the workers there were hired by NASA.",
            [("Most of the workers there were hired by whom or what?", "NASA")],
        ),
        (
            "George Low decided the order of the next flights.",
            [("Who or what decided the order of the next flights?", "George Low")],
        ),
        (
            "The crew of the ship came home on April 17, with 400 sick sailors on board.",
            [
                (
                    "The crew of the ship came home on what date, with 400 sick sailors on board?",
                    "April 17",
                ),
                (
                    "The crew of the ship came home on April 17, with how many sick sailors on "
                    "board?",
                    "400",
                ),
            ],
        ),
        (  # "Belgium the Court" are two names
            "In the old case of Reyners v Belgium the Court held that this was wrong.",
            [("In the old case of what v Belgium the Court held that this was wrong?", "Reyners")],
        ),
        (  # only the clause around the answer
            "The ship was slow; its owner sold the old vessel to Peru for a small sum.",
            [("Its owner sold the old vessel to which place or thing for a small sum?", "Peru")],
        ),
        (  # the word that joins the clause is left out
            "The ship was slow, but the owner sold the old vessel to Peru for little.",
            [("The owner sold the old vessel to which place or thing for little?", "Peru")],
        ),
    ],
)
def test_question_words_follow_the_answer_and_its_neighbors(
    sentence: str, pairs: list[tuple[str, str]]
) -> None:
    assert list(ask_sentence(sentence)) == pairs


@pytest.mark.parametrize(
    "sentence",
    [
        "The Roman bridge of this town is the oldest Roman bridge.",  # the answer stands twice
        "The bridges (also the old bridge of Peru in the list) are all of wood.",  # in brackets
        'The old song "when we were in Peru together" is still sung here.',  # in quotes
        "The boats sail each night to the ports of Peru, Chile and Cuba.",  # lists
        "The height of the old bridge is just 3.5/2.5 meters or so.",  # parts of a longer word
        f"The old bridge of Peru is very long and wide; {'it is long ' * 100}.",  # a table
        "The old bridge of the town was built[3] in 1804.",  # a footnote
        "The bridge is in Peru.",  # too short to tell what is asked
    ],
)
def test_names_and_numbers_that_no_question_can_ask_for(sentence: str) -> None:
    assert list(ask_sentence(sentence)) == []
