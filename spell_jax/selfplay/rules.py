"""Rule reward: extract the stated answer of a response and compare it with the reference.

Spec section 5 (paper section 3.2, the rule in Eq. 6). Total and linear-time for any string.
"""

import math
import re
import string
from collections.abc import Sequence

import numpy as np

from spell_jax.data.clusters import LETTERS, TASKS
from spell_jax.selfplay.numbers import Number, parse_number, same_number

# Without the phrase "answer is", only the last characters of a response are searched.
_TAIL_CHARACTERS = {"general_qa": 1000, "financial_math": 300, "multiple_choice": 300}
_BOX = r"\boxed{"

# How the stated answer of a response is read: by the rules of SPELL's paper, or in more forms.
EXTRACTS = ("paper", "lenient")

_CHAT_MARKERS = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")

# Possessive quantifiers prevent backtracking. They change no match, because no part of the pattern
# can use a character that the part before it consumed.
_FIGURE = r"([=≈`%$°£€¥]*+-?+[0-9.,]++(?:[eE][+-]?[0-9]++)?+)"
_FIGURE_PATTERNS = tuple(
    re.compile(lead + figure, re.IGNORECASE)
    for lead in ("the answer is ", "answer is ")
    for figure in (rf"\({_FIGURE}\)", _FIGURE)
)

# The letter is upper case and must not start a word, in any script, with or without accents.
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


def visible_text(text: str, in_thought: bool = False) -> str | None:
    """Return the stripped text after the last "</think>"; None if a thought is unfinished.

    `in_thought` says that the prompt ended inside a thought: some chat templates write "<think>",
    so that the sampled text never contains it.
    """
    if (in_thought or "<think>" in text) and "</think>" not in text:
        return None
    return text.rpartition("</think>")[2].strip()


def extract_answer(
    text: str, task: str, extract: str = "paper", in_thought: bool = False
) -> str | None:
    """Return the answer stated in a whole response: "... answer is X", or a boxed one; or None.

    An empty string means that the phrase occurs with nothing after it. Spec sections 5.1 to 5.3,
    "visible text" and "extraction". `extract` is one of EXTRACTS; `in_thought` as in
    `visible_text`. Raises ValueError if `task` or `extract` is unknown.
    """
    check_task(task)
    check_extract(extract)
    visible = visible_text(text, in_thought)
    if not visible:
        return None
    announced = "answer is" in visible or (task == "financial_math" and r"\boxed" in visible)
    if not announced and "</think>" not in text:
        visible = visible[-_TAIL_CHARACTERS[task] :]
    return find_answer(visible, task)


def find_answer(text: str, task: str) -> str | None:
    """Return the answer stated in `text`, which contains no thoughts; None if there is none."""
    check_task(task)
    if task == "general_qa":
        return _find_phrase(text)
    return _find_figure(text) if task == "financial_math" else _find_last(_LETTER_PATTERNS, text)


def normalize_answer(text: str) -> str:
    """Lower the case; remove ASCII punctuation, articles and extra spaces (spec section 5.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def is_correct(prediction: str, reference: str, task: str, rule: str = "match") -> bool:
    """Return whether an extracted `prediction` agrees with an extracted `reference`.

    general_qa: the normalized prediction contains the normalized reference, or equals it ("exact").
    financial_math: the numbers agree (`same_number`); text that is not a number is wrong.
    multiple_choice: the letters are equal. An empty prediction or reference is wrong.
    """
    check_task(task)
    if task == "general_qa":
        wanted, found = normalize_answer(reference), normalize_answer(prediction)
        return bool(wanted) and (wanted == found if rule == "exact" else wanted in found)
    if task == "financial_math":
        values = _both_numbers(prediction, reference)
        return values is not None and same_number(*values)
    return prediction in LETTERS and prediction == reference


def score(
    text: str,
    reference: str,
    task: str,
    rule: str = "match",
    extract: str = "paper",
    in_thought: bool = False,
) -> float:
    """Return the rule reward of a whole response against a reference answer: 0.0 or 1.0.

    `reference` is the bare answer, or "The correct answer is X"; `rule` as in AlgorithmConfig;
    `extract` and `in_thought` as in `extract_answer`.
    """
    prediction = extract_answer(text, task, extract, in_thought)
    wanted = find_answer(reference, task) or _first_line(reference)
    return float(prediction is not None and is_correct(prediction, wanted, task, rule))


def same_answer(first: str, second: str, task: str) -> bool:
    """Return whether two extracted answers are the same, for majority counts over several answers.

    Symmetric and, unlike `is_correct`, without containment and scale factors: normalized texts or
    letters must be equal, numbers must agree to 1e-9 (so that the order of a summation does not
    matter). An empty or unreadable answer equals nothing, not even itself.
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
    if task not in TASKS:
        raise ValueError(f"task: {task!r} is unknown; it must be one of {', '.join(TASKS)}")


def check_extract(extract: str) -> None:
    if extract not in EXTRACTS:
        raise ValueError(f"extract: {extract!r} is unknown; must be one of {', '.join(EXTRACTS)}")


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}; None if there is no box or it is not closed."""
    _, box, rest = text.rpartition(_BOX)
    if not box:
        return None
    rest = "{" + rest
    end = first_balance(brace_steps(code_points(rest)))
    return None if end is None else rest[1:end].strip().strip("*")


def code_points(text: str) -> np.ndarray:
    """Return the code points of a text, lone surrogates included: uint32 [characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def brace_steps(points: np.ndarray) -> np.ndarray:
    """Return 1 for each opening brace among code points, -1 for each closing one, else 0: int8."""
    return (points == ord("{")).astype(np.int8) - (points == ord("}"))


def first_balance(steps: np.ndarray) -> int | None:
    """Return the first index at which the cumulative sum of steps is 0; None if there is none."""
    # A Python loop over a hundred thousand braces takes more than 10 ms.
    balanced = np.flatnonzero(np.cumsum(steps, dtype=np.int64) == 0)
    return int(balanced[0]) if len(balanced) else None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip().strip(".").strip()


def _find_phrase(text: str) -> str | None:
    for removed in ("*", *_CHAT_MARKERS):
        text = text.replace(removed, "")
    for phrase in ("the answer is", "correct answer is", "answer is"):
        _, found, rest = text.rpartition(phrase)
        if found:
            answer = _first_line(rest)
            return None if "insert answer here" in answer else answer  # the prompt's words
    return None


def _find_figure(text: str) -> str | None:
    if _BOX in text:
        boxed = last_box(text)
        return None if boxed is None else boxed.replace(",", "").rstrip(".")
    figure = _find_last(_FIGURE_PATTERNS, text)
    return None if figure is None else figure.replace(",", "").rstrip(".")


def _find_last(patterns: Sequence[re.Pattern[str]], text: str) -> str | None:
    """Return the last match of the first pattern that matches the text without asterisks."""
    text = text.replace("*", "")
    found = (pattern.findall(text) for pattern in patterns)
    return next((matches[-1] for matches in found if matches), None)


def _both_numbers(first: str, second: str) -> tuple[Number, Number] | None:
    values = parse_number(first), parse_number(second)
    return None if values[0] is None or values[1] is None else (values[0], values[1])
