"""Tests of prompts: exact compact texts, the paper's requirements on full ones, loading."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from spell_jax.data.clusters import PAPER_TASKS, TASKS
from spell_jax.selfplay import prompts
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.parsing import parse_question, parse_verdict
from spell_jax.selfplay.puzzles import HAS_GAPS, make_puzzle
from spell_jax.selfplay.rules import extract_answer
from tests.paths import REFERENCE_CASES

CASES = REFERENCE_CASES / "questioner_prompt_docs.json"


HISTORY = (Entry((), "q1?", "a1"), Entry((), "q2?", "a2"))

COMPACT = {
    "questioner_general_qa": "{documents}\nask general",
    "questioner_financial_math": "{documents}\nask math",
    "questioner_multiple_choice": "{documents}\nask choice ({letter})",
    "questioner_general_qa_history": "{documents}\n{examples}\nask harder general",
    "questioner_financial_math_history": "{documents}\n{examples}\nask harder math",
    "questioner_multiple_choice_history": "{documents}\n{examples}\nask harder choice ({letter})",
    "example": "known: {question} answer: {answer}",
    "questioner_cloze": "{documents}\nask cloze",
    "questioner_cloze_history": "{documents}\n{examples}\nask harder cloze",
    "responder_general_qa": "{documents}\n{question}",
    "responder_cloze": "{documents}\nFill the gap: {question}",
    "responder_financial_math": "{documents}\n{question}",
    "responder_multiple_choice": "{documents}\n{question}",
    "verifier": "{question}\none: {answer}\ntwo: {reference}\nsame?",
    "reconstruction": "{document}\n{options}\norder",
    "gap": "<gap {number}>",
}

GENERAL, MATH, CHOICE = (f"questioner_{task}" for task in PAPER_TASKS)
ALL_QUESTIONERS = (GENERAL, MATH, CHOICE)

# (files, requirement of Appendix G or of the spec, words of the template that meet it). A
# questioner requirement holds for the file with history as well.
REQUIREMENTS = [
    (ALL_QUESTIONERS, "written as for a benchmark of language models", "exam shows how well"),
    (ALL_QUESTIONERS, "documents stand between text tags", "<text>\n{documents}\n</text>"),
    (ALL_QUESTIONERS, "comprehension of the documents", "reading of|understanding of"),
    (ALL_QUESTIONERS, "everything in English", r"in English\."),
    (ALL_QUESTIONERS, "stands alone, cites no 'document 1'", 'never point to "document 1"'),
    (ALL_QUESTIONERS, "derivation step by step", "in small steps|chain of small steps"),
    (
        ALL_QUESTIONERS,
        "derivation cites source and place",
        r"quote.*which table(,| and) row.*paragraph",
    ),
    ((GENERAL,), "answer of at most 20 tokens", "at most 20 tokens. Anything longer is rejected"),
    (ALL_QUESTIONERS, "reasons first, ends with the object", "Think first.*Then end your reply"),
    (ALL_QUESTIONERS, "fenced json block, not a bare object", "```json\n{"),
    ((GENERAL, CHOICE), "multi-hop reasoning", r"several reasoning steps \(multi-hop\)"),
    ((GENERAL, CHOICE), "retrieval, several constraints, synthesis", "constraints at the same"),
    ((GENERAL, MATH), "opens with a question word", "Open with a question word: what, how"),
    ((MATH, CHOICE), "no simple counting", "Plain counting"),
    ((MATH, CHOICE), "no direct retrieval", "read off|one obvious place"),
    ((MATH, CHOICE), "no outside knowledge but common sense", "Common sense and elementary"),
    ((MATH, CHOICE), "nothing invented", r"(?i)no (invented )?scenario, figure or assumption"),
    ((GENERAL,), "one clear and factual answer", r"Exactly one answer is right\. It is a fact"),
    ((GENERAL,), "needs every document", "EVERY document.*\n?.*No document alone"),
    ((GENERAL,), "linked by connectors", "under the condition that"),
    ((GENERAL,), "answer is a short phrase or sentence", "short phrase or sentence"),
    ((MATH,), "text and tables mixed", "text and tables are mixed"),
    ((MATH,), "more than look-up or a few steps", "Looking something up.*must not be enough"),
    ((MATH,), "two or more calculation steps", "At least two separate calculation steps"),
    ((MATH,), "figures from different places", "a table and a paragraph, or several rows"),
    ((MATH,), "condensing or extraction may take part", "Condensing a passage"),
    ((MATH,), "counts up to ten as a step", "ten or fewer"),
    ((MATH,), "figures are not given away", "Do not give away or paraphrase the figures"),
    ((MATH,), "asks by relation", "relation and meaning"),
    ((MATH,), "all information is in the documents", "stated in the documents or follows"),
    ((MATH,), "a single number, not zero", "Exactly one number, not zero"),
    ((MATH,), "several numbers are rejected", "Two or more numbers.*rejected"),
    ((MATH,), "unit belongs into the question", "Put the unit into the question"),
    ((MATH,), "every operation written out", "Write out every operation"),
    ((CHOICE,), "one correct and three distinct wrong options", "three wrong ones.*different from"),
    ((CHOICE,), "more than look-up or a few steps", "Looking something up.*must not be enough"),
    ((CHOICE,), "three or more steps", "At least three separate steps"),
    ((CHOICE,), "three or more data points", "At least three separate pieces"),
    ((CHOICE,), "figures joined with statements", "Figures and statements in words"),
    ((CHOICE,), "room for misreading", "easy to misread"),
    ((CHOICE,), "decided by the documents alone", "decided by the documents alone"),
    ((CHOICE,), "regulation, compliance, significant results", "regulation and compliance"),
    ((CHOICE,), "figures need interpretation", "interpreted in its context"),
    ((CHOICE,), "no trivia", "No trivia"),
    ((CHOICE,), "wrong options plausible yet wrong", "sounds right and is shown to be wrong"),
    ((CHOICE,), "wrong options from different errors", "a different mistake"),
    ((CHOICE,), "one common misunderstanding", "At least one rests on a common misunder"),
    ((CHOICE,), "counts up to five as a step", "five or fewer"),
    ((CHOICE,), "no special knowledge", "special knowledge not given"),
    ((CHOICE,), "not ambiguous", "exactly one option is right"),
    ((CHOICE,), "options precise", "Vague options"),
    ((CHOICE,), "requested letter (spec 2.2)", r"The correct option must be \{letter\}"),
    ((CHOICE,), "wrong options explained", "For each wrong option say"),
    ((CHOICE,), "question without options and answer", "without the options and without the"),
    (("responder_general_qa",), "closing phrase", r"The correct answer is \(insert answer here\)"),
    (("responder_multiple_choice",), "closing phrase", r"The correct answer is \(insert answer he"),
    (("responder_financial_math",), "closing phrase", r"Therefore, the answer is \(insert answer"),
    (("responder_financial_math",), "step by step", "(?s)step by step.*Work step by step"),
    (("responder_financial_math",), "a numeric result", "which is a number"),
    (("verifier",), "does not solve the problem", "Do not solve the problem"),
    (("verifier",), "same meaning in other form", "even when form, wording or notation differ"),
    (("verifier",), "numbers within 0.15 percent", "0.15 percent"),
    (("verifier", "judge"), "double-bracket verdicts", r"\[\[YES\]\] or \[\[NO\]\]"),
    (("verifier", "judge"), "explanation before decision", "(?s)Explanation:.*Decision:"),
    (("judge",), "substance over wording", "Judge the substance"),
    (("judge",), "vital facts present", "essential facts of the true answer are present"),
    (
        ("judge_grades",),
        "three grades",
        r"A \(correct\).*\n*B \(incorrect\).*\n*C \(not attempted\)",
    ),
    (("judge_grades",), "correct: all that matters, no contradiction", "nothing in it contradicts"),
    (("judge_grades",), "hedging is allowed", "Doubt is allowed as long as the whole true answer"),
    (("judge_grades",), "a wrong statement with reservations", "even if it is stated with reserv"),
    (("judge_grades",), "not attempted: no contradiction", "is missing, and nothing contradicts"),
    (("judge_grades",), "only the meaning matters", "punctuation, grammar and order do not matter"),
    (("judge_grades",), "last significant digit", "last significant digit of the true answer"),
    (("judge_grades",), "more than the question asks for", "Only what the question asks for"),
    (("judge_grades",), "inferable from the question", "clear from the question may be left out"),
    (("judge_grades",), "misspelled names", "misspelled name is right"),
    (("judge_grades",), "examples of each grade", r'" is A\.(.|\n)*" is B\.(.|\n)*" is C\.'),
    (("judge_grades",), "one letter", "The letter of the grade alone"),
    (
        ("reconstruction",),
        "marks what is missing (section 3.1; the printed prompt shortens the tag to C)",
        "<CHUNK_1>MISSING</CHUNK_1>.*<CHUNK_2>MISSING</CHUNK_2>",
    ),
    (
        ("evidence_scores",),
        "sets are compared with each other",
        "how a set stands among the others",
    ),
    (("reasoning_scores",), "a correction is better than a blind step", "corrects this is better"),
    (("reasoning_scores",), "no invented facts, but common knowledge", "is common knowledge"),
    (("reasoning_scores",), "no repetition and no circle", "going in a circle is no step"),
    (
        ("evidence_scores", "reasoning_scores"),
        "one JSON object of three keys, best choice counted from 0",
        r'one JSON object.*\n- "reason".*\n- "scores".*\n- "best_choice".*counted from 0',
    ),
    (("reconstruction",), "reasons about story and logic", "what happens next.*how the argument"),
    (("reconstruction",), "one gap after the other", "gap by gap"),
    (
        ("reconstruction",),
        "letters in order, with commas, boxed",
        r"order of the gaps, with commas.*\\boxed\{",
    ),
]

HARDER = [
    ("one new question", "Write ONE new"),
    ("other in kind and harder", "clearly harder than all of these and differs from them in kind"),
    ("finds the simple patterns first", "name the simple pattern behind each"),
    ("does not repeat", "must not repeat or reword"),
    ("earlier examples at the end", r"Questions asked so far\n\{examples\}$"),
]
MOVES = {
    GENERAL: ("Calculation:", "Comparison:", "Condition or cause:", "Mixed evidence:"),
    MATH: ("Change over time:", "Derived measure:", "Filter, then total:", "Consequence:"),
    CHOICE: ("Calculation:", "Comparison:", "Condition or cause:", "Mixed evidence:"),
}


@pytest.mark.parametrize(("files", "requirement", "words"), REQUIREMENTS)
def test_full_prompts_meet_each_requirement(
    files: tuple[str, ...], requirement: str, words: str
) -> None:
    texts = prompts.load("full").texts
    names = [
        name + end for name in files for end in ("", "_history") if f"{name}{end}.txt" in texts
    ]
    missing = [name for name in names if not re.search(words, texts[f"{name}.txt"])]
    assert not missing, requirement


def test_only_general_questions_have_a_limit_of_20_tokens() -> None:
    """Appendix G forbids longer answers in these two templates alone."""
    texts = prompts.load("full").texts
    limited = {name for name, text in texts.items() if re.search(r"\b20\b|twenty", text)}
    assert limited == {f"{GENERAL}.txt", f"{GENERAL}_history.txt"}


def test_gaps_are_marked_as_the_prompt_says() -> None:
    for name in ("full", "compact"):
        prompt_set = prompts.load(name)
        document = "\n\n".join(f"Paragraph {letter}." for letter in "abcd")
        puzzle, _ = make_puzzle(np.random.default_rng(0), document, 2, 1, 99, gap=prompt_set.gap)
        assert puzzle and all(prompt_set.gap(number) in puzzle.document for number in (1, 2))
        marked = document + prompt_set.gap(8)
        assert make_puzzle(np.random.default_rng(0), marked, 2, 1, 99, gap=prompt_set.gap) == (
            None,
            HAS_GAPS,
        )
    full = prompts.load("full")
    assert full.gap(1) == "<CHUNK_1>MISSING</CHUNK_1>"
    assert all(full.gap(number) in full.texts["reconstruction.txt"] for number in (1, 2))


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_history_templates_ask_for_harder_questions(task: str) -> None:
    texts = prompts.load("full").texts
    text = texts[f"questioner_{task}_history.txt"]
    for requirement, words in HARDER:
        assert re.search(words, text), requirement
        assert not re.search(words, texts[f"questioner_{task}.txt"]), requirement
    for move in MOVES[f"questioner_{task}"]:
        assert move in text


def test_compact_templates_are_exact() -> None:
    texts = prompts.load("compact").texts
    assert {name: texts[f"{name}.txt"] for name in COMPACT} == COMPACT


def test_compact_prompts_are_filled_in() -> None:
    compact = prompts.load("compact")
    assert (
        compact.questioner("multiple_choice", ["d1", "d2"], HISTORY, letter="C")
        == "d1\nd2\nknown: q1? answer: a1\nknown: q2? answer: a2\nask harder choice (C)"
    )
    assert compact.questioner("general_qa", ["d1"]) == "d1\nask general"
    assert compact.questioner("general_qa", ["d1"], cue="city") == "d1\nask general city"
    assert compact.responder("general_qa", [], "q?") == "Empty\nq?"
    assert compact.verifier("q?", "x", "y") == "q?\none: x\ntwo: y\nsame?"
    assert compact.reconstruction("<gap 1> d", {"A": "x", "B": "y {document}"}) == (
        "<gap 1> d\n(A) x\n(B) y {document}\norder"
    )


def test_layout_after_the_instructions_matches_the_reference() -> None:
    full = prompts.load("full")
    names = dict(zip(("doc_general_qa", "docmath_qa", "doc_mc"), PAPER_TASKS, strict=True))
    checked = 0
    for case in json.loads(CASES.read_text(encoding="utf-8"))["cases"]:
        history = [Entry((), question, answer) for _, question, answer in case["in"]["history"]]
        documents = [f"<<doc{index}>>" for index in case["out"]["docs_in_prompt_order"]]
        prompt = full.questioner(names[case["in"]["task"]], documents, history, letter="B")
        tail = prompt.rpartition("<text>\n")[2]
        expected_tail = case["out"]["tail_after_text_tag"]
        expected_tail = expected_tail.replace("## Previous Examples", "## Questions asked so far")
        assert tail.rstrip() == expected_tail.rstrip()
        checked += bool(history)
    assert checked


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("history", [(), HISTORY])
def test_output_example_in_prompt_passes_the_parser(task: str, history: tuple[Entry, ...]) -> None:
    prompt = prompts.load("full").questioner(task, ["document"], history, letter="D")
    example = prompt.replace("<one number other than zero>", "12")
    block = example[example.index("```json") : example.rindex("```") + 3]
    parsed = parse_question(block, task, lambda text: len(text.split()))
    assert parsed.status == "accepted"
    if task == "multiple_choice":
        assert parsed.answer == "D"


def test_closing_phrases_and_verdicts_match_the_parsers() -> None:
    full = prompts.load("full")
    for task, answer in zip(TASKS, ("blue", "12", "B", "blue"), strict=True):
        prompt = full.responder(task, ["document"], "q?")
        sentence = re.findall(r'"([^"]*insert answer here[^"]*)"', prompt)[-1]
        reply = f"Steps.\n{sentence.replace('insert answer here', answer)}"
        assert (extract_answer(reply, task) or "").strip("().") == answer
    ending = full.verifier("q", "a", "b").rpartition("\n")[2]
    assert parse_verdict(ending.replace(" or [[NO]]", "")) == 1
    assert parse_verdict(ending.replace("[[YES]] or ", "")) == 0


def test_text_cannot_inject_placeholders() -> None:
    hostile = "{question} {examples} {reference} {letter} {documents} {unknown}"
    compact = prompts.load("compact")
    assert (
        compact.responder("general_qa", [hostile], "q {documents}") == f"{hostile}\nq {{documents}}"
    )
    prompt = compact.questioner("general_qa", [hostile], [Entry((), hostile, hostile)])
    assert prompt == f"{hostile}\nknown: {hostile} answer: {hostile}\nask harder general"


def test_missing_letter_and_unknown_task_are_rejected() -> None:
    full = prompts.load("full")
    prompt = full.questioner("multiple_choice", ["d"], letter="B")
    assert "must be B." in prompt
    assert '"answer": "B"' in prompt
    with pytest.raises(ValueError, match="letter=None"):
        full.questioner("multiple_choice", ["d"])
    with pytest.raises(ValueError, match="task: 'essay'"):
        full.questioner("essay", ["d"])
    with pytest.raises(ValueError, match="task: 'essay'"):
        full.responder("essay", ["d"], "q")


def test_custom_folder_overrides_templates_by_file_name(tmp_path: Path) -> None:
    (tmp_path / "verifier.txt").write_text('{question}|{answer}|{reference} {"a": {}}\n\n')
    custom_prompts = prompts.load(tmp_path)
    assert custom_prompts.verifier("q", "x", "y") == 'q|x|y {"a": {}}\n'
    assert custom_prompts.judge("q", "x", "y") == prompts.load("full").judge("q", "x", "y")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("verifyer.txt", "x", "unknown template"),
        (
            "verifier.txt",
            "{question} {answer}",
            r"verifier.txt: missing placeholder \{reference\}",
        ),
        (
            "verifier.txt",
            "{question} {answer} {reference} {letter}",
            r"verifier.txt: unknown placeholder \{letter\}",
        ),
        (
            "responder_general_qa.txt",
            "{documents} {question} {qestion}",
            r"responder_general_qa.txt: unknown placeholder \{qestion\}",
        ),
        ("verifier.txt", b"\xff", "not UTF-8"),
        (".hidden", "x", "contains no template"),
    ],
)
def test_invalid_folders_raise(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=message):
        prompts.load(tmp_path)


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must be 'full', 'compact' or a folder"):
        prompts.load(tmp_path / "none")
