"""Parsers of model text without its thoughts: the questioner's JSON and the verifier's verdict.

Spec sections 2.3, 2.4, 6 and 14. They accept any string and run in linear time.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spell_jax.data.clusters import CLOZE, LETTERS, SURROGATE
from spell_jax.selfplay.json_records import find_record
from spell_jax.selfplay.numbers import number_text, parse_number
from spell_jax.selfplay.rules import (
    check_extract,
    check_task,
    find_answer,
    normalize_answer,
    visible_text,
)

NOTHING_TO_ASK = "nothing_to_ask"  # reason: the questioner states it
MAX_ANSWER_TOKENS = 40  # limit of the public code for a general_qa reference

Status = Literal["accepted", "bad_format", "declined"]

_CONTROL_CHARACTERS = dict.fromkeys(set(range(32)) - {ord(c) for c in "\n\r\t"})


@dataclass(frozen=True)
class Parsed:
    """A parsed questioner output with its status.

    Attributes:
      status: "accepted", "bad_format" (earns the format penalty and may serve as a negative) or
        "declined" (earns nothing and is not trained on).
      question: question as the responder sees it, with the choices for multiple_choice. A cloze
        question is the whole sentence here, and gets its gap in selfplay/cloze.py.
      answer: reference answer, a letter for multiple_choice.
      reason: one word for counting: unfinished_thought, nothing_to_ask, no_json, no_question,
        no_answer, bad_options, same_options, bad_letter, invalid_unicode, too_deep, not_a_number,
        zero_answer or long_answer.
      options: stripped texts of the choices A to D.
    """

    status: Status
    question: str = ""
    answer: str = ""
    reason: str = ""
    options: tuple[str, ...] = ()


def parse_question(
    text: str,
    task: str,
    count_tokens: Callable[[str], int],
    max_answer_tokens: int = MAX_ANSWER_TOKENS,
    distinct_options: bool = False,
    in_thought: bool = False,
    extract: str = "paper",
) -> Parsed:
    """Parse and validate one questioner output (spec sections 2.3 and 2.4).

    The JSON object is the last valid fenced block, otherwise an object at the end of the text. An
    answer in words of more than `max_answer_tokens` is declined. With `distinct_options`, two
    equal options make a multiple-choice question badly formatted, because it has no single correct
    letter (not in the paper). `in_thought` says that the prompt ended inside a thought. `extract`,
    one of EXTRACTS, says how the answer is read. Only an unknown task or `extract` is an error.
    """
    check_task(task)
    check_extract(extract)
    visible = visible_text(text, in_thought)
    # Declined, not punished: a thought that the token cap cut off is no parse error (spec 2.3).
    if visible is None:
        return _declined("unfinished_thought")
    try:
        record = find_record(visible.translate(_CONTROL_CHARACTERS))
        parsed = _validate(
            record, task, extract, lambda answer: count_tokens(answer) > max_answer_tokens
        )
    except RecursionError:  # raised by check_depth
        return _bad("too_deep")
    if distinct_options and len({text.casefold() for text in parsed.options}) < len(parsed.options):
        return _bad("same_options")
    return parsed


def parse_verdict(text: str, in_thought: bool = False) -> int:
    """Parse one verifier output into a vote: 1 (yes), 0 (no) or -1 (malformed). Spec section 6.

    A verdict in double brackets counts if the opposite verdict is absent. Otherwise the bare words
    YES and NO count in this way. `in_thought` says that the prompt ended inside a thought.
    """
    visible = visible_text(text, in_thought) or ""
    for yes, no in (("[[YES]]", "[[NO]]"), ("YES", "NO")):
        if (yes in visible) != (no in visible):
            return int(yes in visible)
    return -1


def format_choices(question: str, options: Sequence[str]) -> str:
    """Format a multiple_choice question and its options for the responder and the verifier."""
    choices = "".join(f"({letter}) {text}\n" for letter, text in zip(LETTERS, options, strict=True))
    return f"What is the correct answer to this question: {question}\nChoices:\n{choices}"


def _bad(reason: str) -> Parsed:
    return Parsed("bad_format", reason=reason)


def _declined(reason: str) -> Parsed:
    return Parsed("declined", reason=reason)


def _validate(
    record: dict[str, Any] | None, task: str, extract: str, too_long: Callable[[str], bool]
) -> Parsed:
    if not record:
        return _bad("no_json")
    if "Empty" in record:
        return _declined(NOTHING_TO_ASK)
    question = record.get("sentence" if task == CLOZE else "question")
    if not isinstance(question, str) or (extract == "lenient" and not question.strip()):
        return _bad("no_question")
    if task == "multiple_choice":
        parsed = _validate_choice(question, record, extract)
    elif task == "financial_math":
        parsed = _validate_number(question, record.get("answer"), extract)
    else:
        parsed = _validate_text(question, record.get("answer"), extract, too_long)
    if SURROGATE.search(parsed.question + parsed.answer):
        return _bad("invalid_unicode")
    return parsed


def _validate_text(
    question: str, answer: Any, extract: str, too_long: Callable[[str], bool]
) -> Parsed:
    if not isinstance(answer, str) or not answer:
        return _bad("no_answer")
    answer = find_answer(answer, "general_qa", extract) or answer
    if extract == "lenient" and not normalize_answer(answer, extract):
        return _bad("no_answer")  # such as "The The": no reply could score
    if SURROGATE.search(answer):
        return _bad("invalid_unicode")  # JSON escapes can produce it; a tokenizer would reject it
    if too_long(answer):
        return _declined("long_answer")
    return Parsed("accepted", question, answer)


def _validate_number(question: str, answer: Any, extract: str) -> Parsed:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return _bad("no_answer")
    text = str(answer)
    answer_text = find_answer(text, "financial_math", extract)
    # Lenient reading accepts a single number only: "10-12" is not computed.
    value = parse_number(answer_text or (text if extract == "paper" else ""))
    if value is None or isinstance(value, bool):
        return _declined("not_a_number")
    # The tolerance is relative, so for this reference it would be 0 (spec 2.4).
    if value == 0:
        return _declined("zero_answer")
    return Parsed("accepted", question, number_text(value))


def _validate_choice(question: str, record: dict[str, Any], extract: str) -> Parsed:
    answer, options = record.get("answer"), record.get("options")
    if not isinstance(answer, str):
        return _bad("no_answer")
    if not isinstance(options, dict) or any(letter not in options for letter in LETTERS):
        return _bad("bad_options")
    letter = answer if answer in LETTERS else find_answer(answer, "multiple_choice", extract)
    if letter is None:
        return _bad("bad_letter")
    texts = tuple(
        text.strip() if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        for text in map(options.get, LETTERS)
    )
    return Parsed("accepted", format_choices(question, texts), letter, options=texts)
