"""Tests of the lenient reading of answers: forms, refusals, the last statement, equal Unicode."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.selfplay import rules, statements
from spell_jax.selfplay.given_questions import scores_itself, unscorable
from spell_jax.selfplay.rules import (
    EXTRACTS,
    answer_form,
    extract_answer,
    is_correct,
    same_answer,
    score,
    stated_answer,
)
from tests.paths import ROOT

CASES = json.loads((ROOT / "tests" / "cases" / "scoring.json").read_text())["cases"]


def read(text, task):
    return extract_answer(text, task, "lenient")


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"]))
def test_cases_are_read_and_scored(case):
    assert read(case["text"], case["task"]) == case["lenient_reads"]
    for rule in ("match", "exact"):
        arguments = case["text"], case["reference"], case["task"], rule, "lenient"
        assert score(*arguments) == case["lenient_score"], rule


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"]))
def test_what_is_read_is_read_again_as_the_same(case):
    answer, task = read(case["text"], case["task"]), case["task"]
    if answer is not None:
        assert same_answer(answer, answer, task, "lenient")
        assert score(f"The answer is {answer}", answer, task, "exact", "lenient") == 1.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B)", "B"),
        ("answer: B.", "B"),
        ("Choice: B", "B"),
        ("the correct option is **(D)** text", "D"),
        ("### Final Answer\n\n(B) Paris", "B"),
        (r"\boxed{\textbf{(B) } 5}", "B"),
        ("The answer is $B$.", "B"),
        ("The answer is 'b'.", "B"),
        (r"The answer is \(B\)", "B"),
        ("The answer is B.Paris", "B"),
        ("The answer is the option (b)", "B"),
        ("The answer is Ｂ", "B"),
        ("The answer is most likely B", "B"),
        ("The answer is definitely <B>", "B"),
        ("The answer is most of them", None),
        ("The answer is B, because A is wrong", "B"),
        ("The answer is A. No wait, the answer is C.", "C"),
        ("The answer is C. This answer is A good one", "C"),
        ("The answer is A or B? The answer is B", "B"),
        ("(c)", "C"),
        ("B) the second", "B"),
        ("The answer is B or C", None),
        ("The answer is B, C", None),
        ("The answer is A. Or: the answer is both A and C", None),
        ("The answer is A? The answer is not A", None),
        ("The answer is a dog", None),
        ("The answer is Apple", None),
        ("The answer is B-52", None),
        ("The answer is D.C.", None),
        ("The answer isn't B", None),
        (r"\boxed{A, B}", None),
        ("The answer is E", None),
        ("A dog", None),
        ("So, option B is right", None),
        ("The answer is _B_", "B"),
        ("__B__", "B"),
        ("- B", "B"),
        ("(D) Option A and option B", "D"),
        ("Option A: wrong. Option B: right.", None),
        ("A) Paris B) Lyon", None),
        ("The answer is B or maybe C", None),
        ("The answer is A. Wait, no, B.", None),
        ("The answer is A. Wait, let me check: yes, A", "A"),
        ("The answer is B. Actually, it is (C)", None),
    ],
)
def test_letters(text, letter):
    assert read(text, "multiple_choice") == letter


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Final answer: Paris", "Paris"),
        ("Answer:\n- Paris", "Paris"),
        (r"The answer is \boxed{\text{Paris}}.", "Paris"),
        ("The answer to the question is Paris", "Paris"),
        ("“Answer”: “Paris”", "“Paris”"),
        ("Answer：Paris", "Paris"),
        ("The\N{NO-BREAK SPACE}answer\N{NO-BREAK SPACE}is Paris", "Paris"),
        ("The answer is \u202aParis\u202c", "Paris"),
        ("The answer is as follows:\nParis", "Paris"),
        ("The answer is Lyon. Correction: the answer is Paris", "Paris"),
        ("The answer is Paris.\nI hope this answer is helpful", "Paris"),
        ("The answer is not given", "not given"),  # may be the reference
        ("Paris", None),  # nothing tells an answer from other prose
        ("Let us see what the answer is.\n\nFirst", None),
        ("The answer isn't Paris", None),
        ("The answer is (insert answer here)", None),
        ("The answer is.", None),
    ],
)
def test_texts(text, answer):
    assert read(text, "general_qa") == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12. This answer is in millions", "12"),
        (r"\boxed{12}. The answer is in millions.", "12"),
        (r"\boxed{5}. Wait, the answer is 7", "7"),
        ("Therefore, the answer is $12.5 million, up from 10", "12500000"),
        ("The answer is 7 because 5 + 2 = 7", "7"),
        (r"\boxed{\$1{,}000\text{ million}}", "1000000000"),
        (r"the final answer is: \(\frac{3}{4}\)", "0.75"),
        ("Answer: -5", "-5"),
        ("Answer:\n- 5", "5"),
        ("The answer is 12<｜end▁of▁sentence｜>", "12"),
        ("$3.5 million", "3500000"),
        ("The answer is No, sales fell by 5", "no"),
        ("The answer is no. 5", None),
        ("I get 12", None),
        ("The answer is 5. No, the answer is unknown", None),
        ("The answer is 5. No, the answer is between 10 and 12", None),
        (r"The answer is 7. \boxed{10-12}", None),
        (r"\boxed{12", None),
    ],
)
def test_numbers(text, number):
    assert read(text, "financial_math") == number


@pytest.mark.parametrize(
    ("text", "task", "paper", "lenient"),
    [
        ("The answer is 5", "financial_math", "phrase", "phrase"),
        (r"\boxed{5}", "financial_math", "boxed", "boxed"),
        ("Answer: 5", "financial_math", "unparsed", "colon"),
        ("5", "financial_math", "unparsed", "bare"),
        ("Hm.", "financial_math", "unparsed", "unparsed"),
        (r"\boxed{B}", "multiple_choice", "boxed", "boxed"),
        ("The answer is B", "multiple_choice", "phrase", "phrase"),
        ("The answer is", "general_qa", "unparsed", "unparsed"),
        ("The answer is Paris", "general_qa", "phrase", "phrase"),
    ],
)
def test_form_of_an_answer_is_named(text, task, paper, lenient):
    assert answer_form(text, task) == paper
    assert answer_form(text, task, "lenient") == lenient
    assert answer_form(text, task, "lenient", in_thought=True) == "unparsed"
    assert {paper, lenient} <= {*rules.FORMS}


@given(st.text() | st.sampled_from([case["text"] for case in CASES]), st.sampled_from(rules.TASKS))
def test_form_and_answer_come_from_one_reading(text, task):
    for extract in rules.EXTRACTS:
        has_answer = bool(extract_answer(text, task, extract))
        assert has_answer == (answer_form(text, task, extract) != "unparsed")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("“Paris”", '"Paris"'),
        (unicodedata.normalize("NFD", "café"), "café"),
        ("Par\N{ZERO WIDTH SPACE}is", "PARIS"),
        ("ﬁne", "fine"),
        ("Ｐａｒｉｓ", "Paris"),
        ("2019–2020", "2019-2020"),
        ("straße", "STRASSE"),
        ("Paris。", "Paris"),
    ],
)
def test_equal_texts_in_other_characters_agree(first, second):
    for rule in ("match", "exact"):
        assert is_correct(first, second, "general_qa", rule, "lenient")
        assert is_correct(second, first, "general_qa", rule, "lenient")
    assert same_answer(first, second, "general_qa", "lenient")
    assert not same_answer(first, "Parma", "general_qa", "lenient")


def test_bare_references_are_read_as_answers_are():
    for reference in ("-2790", "(2,790)", "−2,790", "The correct answer is (2,790)"):
        assert score("The answer is $(2,790)", reference, "financial_math", "exact", "lenient") == 1
    for reference in ("B", "(b)", "B. the second", "The correct answer is B"):
        assert score("Answer: B", reference, "multiple_choice", "match", "lenient") == 1


def test_point_is_never_a_separator_of_thousands_by_the_scale_rule():
    agree = {"task": "financial_math", "extract": "lenient"}
    assert not is_correct("1.234", "1234", **agree)
    assert not is_correct("1234", "1.234", **agree)
    assert is_correct("1.2", "1200", **agree)  # "in thousands"
    assert is_correct("1.234", "1234000", **agree)  # "in millions"


@pytest.mark.parametrize("extract", rules.EXTRACTS)
def test_references_that_can_never_score_have_a_reason(extract):
    path = ROOT / "tests" / "cases" / "references.jsonl"
    for row in map(json.loads, path.read_text().splitlines()):
        assert unscorable(row["answer"], row["task"], extract), row
    for reference in ("0", "no", "-12.5%", "1e5"):
        assert not unscorable(reference, "financial_math", extract)
    assert not unscorable("A", "multiple_choice", extract)
    assert not unscorable("N/A", "general_qa", extract)
    assert unscorable("<think>", "general_qa", extract)  # would open a thought
    assert not unscorable("five million", "financial_math", "lenient")
    assert unscorable("five million", "financial_math") == "is no single number"
    assert unscorable("the", "general_qa", extract) == "has no words but articles"
    hidden = unscorable("<think>Ann", "general_qa", extract)
    assert hidden == "cannot be read where a response has it"


def test_made_row_must_score_by_every_way_of_extraction():
    assert scores_itself("12.5", "financial_math")
    assert scores_itself("Paris", "general_qa")
    assert not scores_itself("five", "financial_math")  # only leniently
    assert not scores_itself("10-12", "financial_math")  # only by the paper's rules


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize(
    "piece",
    ["The answer is ", "answer:", "answer\n", "answer ", "Answer: 5\n", r"\boxed{", "(", "a", " ",
     "choice: ", r"\text{", "1,", "1 ", "five ", "\u0300\u0315", "\u200b", "=", "- ", "5 or ",
     "B, "],
)  # fmt: skip
def test_lenient_reading_is_linear_on_long_inputs(piece):
    text = piece * (200_000 // len(piece))
    for task in rules.TASKS:
        for response in (text, "The answer is " + text, text + "The answer is 5"):
            score(response, text, task, extract="lenient")
        same_answer(text, text, task, "lenient")


STATED = {
    "The answer is $3.5 million": "$3.5 million",
    "The answer is -$5": "-$5",
    "The answer is five million dollars.": "five million dollars",
    "The answer is **(2,790) thousand**.": "(2,790) thousand",
    "The answer is:\n\n3.5 million, or 3.2 without tax.": "3.5 million, or 3.2 without tax",
    "The answer is 5. Wait, no: the answer is $7.": "$7",
    "The answer is 5 million. The answer is final.": "5 million. The answer is final",
    "**Answer:** about 12 %": "about 12 %",
    "So it is \\boxed{3.5} million dollars.\nDone.": "So it is \\boxed{3.5} million dollars",
    "Costs fell. Profit was five million dollars.\n---\n": "Profit was five million dollars",
    "5 million": "5 million",
    "The answer is .5 million dollars.": ".5 million dollars",
    "**Answer: .75**": ".75",
    "Let me see.</think>The answer is $5": "$5",
}


@pytest.mark.parametrize("extract", EXTRACTS)
@pytest.mark.parametrize(("text", "words"), STATED.items())
def test_judges_read_the_words_that_state_a_number(text, words, extract):
    assert stated_answer(text, "financial_math", extract) == words


@pytest.mark.parametrize("extract", EXTRACTS)
def test_judges_read_nothing_of_empty_or_unfinished_texts(extract):
    for text in ("", " \n", "...", "</think>", "<think>The answer is $5"):
        assert stated_answer(text, "financial_math", extract) is None
    assert stated_answer("The answer is $5", "financial_math", extract, in_thought=True) is None
    with pytest.raises(ValueError, match="extract"):
        stated_answer("The answer is 5", "financial_math", "loose")


@pytest.mark.parametrize("extract", EXTRACTS)
def test_judges_read_a_bounded_part_of_a_long_line(extract):
    line = "x" * 10_000
    for text, part in (
        (f"The answer is $5 {line}", "$5 x"),
        (line + " the answer is $5", "$5"),
        (f"{line} \\boxed{{5}} million {line}", "\\boxed{5} million x"),
        (line + " about $5", "x about $5"),
    ):
        words = stated_answer(text, "financial_math", extract)
        assert part in words and len(words) <= statements.LONGEST_SENTENCE


def test_paper_and_lenient_reading_choose_between_a_box_and_a_later_sentence():
    text = "It is \\boxed{5} million.\nThe answer is $7."
    assert extract_answer(text, "financial_math") == "5"
    assert stated_answer(text, "financial_math") == "It is \\boxed{5} million"
    assert read(text, "financial_math") == "7"
    assert stated_answer(text, "financial_math", "lenient") == "$7"


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"]))
def test_judges_read_extracted_texts_and_letters(case):
    task = case["task"]
    for extract in EXTRACTS:
        words = stated_answer(case["text"], task, extract)
        if task != "financial_math":
            assert words == extract_answer(case["text"], task, extract)
        else:  # whatever the rule reads or refuses
            assert words and words in case["text"]


def test_stacks_of_accents_are_cut():
    stack = "e" + "\u0315\u0300" * 20_000
    assert len(statements.unify(stack)) <= 32
