"""The rule reward: the answer that a response states, and whether it agrees with the reference.

1. `visible_text` keeps what follows the last thought; an unfinished thought leaves nothing.
2. `extract_answer` finds the stated answer: "... answer is X", or a boxed one.
3. `normalize_answer`, `parse_number` or the bare letter make answers comparable.
4. `score` is 1.0 when the prediction covers, equals or names the reference, else 0.0.

Spec section 5 (paper section 3.2, the rule in Eq. 6). Total and linear-time for any string.
"""

import math
import re
import string

import numpy as np

from spell_jax.data.clusters import LETTERS, TASKS
from spell_jax.selfplay.numbers import Number, parse_number, same_number

# A response that never says "answer is" is searched in its last characters only.
_TAIL_CHARACTERS = {"general_qa": 1000, "financial_math": 300, "multiple_choice": 300}
_BOX = r"\boxed{"

_CHAT_MARKERS = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
_PHRASES = ("the answer is", "correct answer is", "answer is")
_TEMPLATE_ECHO = "insert answer here"

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")

# Nothing that one part takes is of use to the next: what is possessive is never tried again.
_FIGURE = r"([=≈`%$°£€¥]*+-?+[0-9.,]++(?:[eE][+-]?[0-9]++)?+)"
_FIGURE_PATTERNS = tuple(
    re.compile(lead + figure, re.IGNORECASE)
    for lead in ("the answer is ", "answer is ")
    for figure in (rf"\({_FIGURE}\)", _FIGURE)
)

# The letter is upper case and no word begins with it, in any script, with or without accents.
_NO_WORD = r"(?![\w\u0300-\u036f])"
_LETTER_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\\(?i:boxed)\{([A-D])\}",
        r"(?i:correct answer is )\(([A-D])\)",
        rf"(?i:correct answer is )([A-D]){_NO_WORD}",
        r"(?i:answer is )\(([A-D])\)",
        rf"(?i:answer is )([A-D]){_NO_WORD}",
    )
)


def visible_text(text: str) -> str | None:
    """What follows the last "</think>", stripped; None when a thought was begun and not ended."""
    if "<think>" in text and "</think>" not in text:
        return None
    return text.rpartition("</think>")[2].strip()


def extract_answer(text: str, task: str) -> str | None:
    """The answer that a whole response states, or None.

    `task` is one of `TASKS`; another raises ValueError. An empty string means that the phrase was
    there and nothing behind it. Spec sections 5.1 to 5.3, "visible text" and "extraction".
    """
    check_task(task)
    visible = visible_text(text)
    if not visible:
        return None
    announced = "answer is" in visible or (task == "financial_math" and r"\boxed" in visible)
    if not announced and "</think>" not in text:
        visible = visible[-_TAIL_CHARACTERS[task] :]
    return find_answer(visible, task)


def find_answer(text: str, task: str) -> str | None:
    """The answer stated in `text`, which holds no thoughts; None where nothing is stated."""
    check_task(task)
    if task == "general_qa":
        return _find_phrase(text)
    return _find_figure(text) if task == "financial_math" else _find_letter(text)


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces (spec section 5.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def is_correct(prediction: str, reference: str, task: str) -> bool:
    """Whether an extracted `prediction` agrees with an extracted `reference`.

    general_qa: the normalized reference is a part of the normalized prediction (cover exact match);
    financial_math: the numbers agree (`same_number`), and what is no number is wrong;
    multiple_choice: the letters are equal. An empty side is wrong.
    """
    check_task(task)
    if task == "general_qa":
        wanted = normalize_answer(reference)
        return bool(wanted) and wanted in normalize_answer(prediction)
    if task == "financial_math":
        values = _both_numbers(prediction, reference)
        return values is not None and same_number(*values)
    return prediction in LETTERS and prediction == reference


def score(response_text: str, reference: str, task: str) -> float:
    """The rule reward of a whole response against a reference answer: 0.0 or 1.0.

    `reference` is the bare answer, or a sentence that states it ("The correct answer is X").
    """
    prediction = extract_answer(response_text, task)
    wanted = find_answer(reference, task) or _first_line(reference)
    return float(prediction is not None and is_correct(prediction, wanted, task))


def same_answer(first: str, second: str, task: str) -> bool:
    """Whether two extracted answers are one answer, to count the most frequent of several.

    Symmetric and, unlike `is_correct`, without cover or scale: equal normalized texts, equal
    letters, equal numbers (to 1e-9, so that sums in another order agree). What is empty or cannot
    be read is the same as nothing, not even as itself.
    """
    check_task(task)
    if task == "general_qa":
        normal = normalize_answer(first)
        return bool(normal) and normal == normalize_answer(second)
    if task == "financial_math":
        values = _both_numbers(first, second)
        if values is None or isinstance(values[0], bool) != isinstance(values[1], bool):
            return False
        return math.isclose(values[0], values[1], rel_tol=1e-9)
    return first in LETTERS and first == second


def check_task(task: str) -> None:
    """Raises ValueError for a task that is none of `TASKS`."""
    if task not in TASKS:
        raise ValueError(f"task: {task!r} is unknown; it must be one of {', '.join(TASKS)}")


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} up to its own closing brace; None without either."""
    _, box, rest = text.rpartition(_BOX)
    if not box:
        return None
    rest = "{" + rest
    end = first_balance(brace_steps(code_points(rest)))
    return None if end is None else rest[1:end].strip().strip("*")


def code_points(text: str) -> np.ndarray:
    """The characters of a text as numbers, lone surrogates too: uint32 [characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def brace_steps(points: np.ndarray) -> np.ndarray:
    """1 for an opening brace among code points, -1 for a closing one, else 0: int8."""
    return (points == ord("{")).astype(np.int8) - (points == ord("}"))


def first_balance(steps: np.ndarray) -> int | None:
    """The first place at which the steps so far sum to 0, None if they never do.

    Sums of arrays: a hundred thousand braces, one by one, take Python longer than 10 ms.
    """
    balanced = np.flatnonzero(np.cumsum(steps, dtype=np.int64) == 0)
    return int(balanced[0]) if len(balanced) else None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip().strip(".").strip()


def _find_phrase(text: str) -> str | None:
    text = text.replace("*", "")
    for marker in _CHAT_MARKERS:
        text = text.replace(marker, "")
    for phrase in _PHRASES:
        _, found, rest = text.rpartition(phrase)
        if found:
            answer = _first_line(rest)
            return None if _TEMPLATE_ECHO in answer else answer
    return None


def _find_figure(text: str) -> str | None:
    if _BOX in text:
        boxed = last_box(text)
        return None if boxed is None else boxed.replace(",", "").rstrip(".")
    text = text.replace("*", "")
    for pattern in _FIGURE_PATTERNS:
        if figures := pattern.findall(text):
            return figures[-1].replace(",", "").rstrip(".")
    return None


def _find_letter(text: str) -> str | None:
    text = text.replace("*", "")
    for pattern in _LETTER_PATTERNS:
        if letters := pattern.findall(text):
            return letters[-1]
    return None


def _both_numbers(first: str, second: str) -> tuple[Number, Number] | None:
    values = parse_number(first), parse_number(second)
    return None if values[0] is None or values[1] is None else (values[0], values[1])
