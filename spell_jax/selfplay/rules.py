"""Rule reward: extract the stated answer of a response and compare it with the reference.

Spec section 5 (paper section 3.2, the rule in Eq. 6). Total and linear-time for any string.
"""

import math
import re
import string
from collections.abc import Sequence

from spell_jax.data.clusters import LETTERS, TASKS, TEXT_TASKS
from spell_jax.selfplay.numbers import SCALES, Number, parse_number, same_number
from spell_jax.selfplay.rouge import word_f1
from spell_jax.selfplay.statements import (
    NO_STATEMENT,
    Statement,
    first_line,
    number_sentence,
    read_alone,
    read_leniently,
    read_strictly,
    tail_of,
    unify,
)

# How the stated answer of a response is read: by the rules of SPELL's paper, or in more forms.
EXTRACTS = ("paper", "lenient")
# Forms in which an answer is stated: "the answer is X", "Answer: X", \boxed{X}, or the whole text.
FORMS = ("phrase", "colon", "boxed", "bare", "unparsed")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def visible_text(text: str, in_thought: bool = False) -> str | None:
    """Return the stripped text after the last "</think>"; None if a thought is unfinished.

    `in_thought` says that the prompt ended inside a thought, because some chat templates end with
    "<think>".
    """
    # A second thought counts only in texts that begin with a thought. Elsewhere "<think>" after a
    # thought is text, as in the paper's code.
    _, closed, visible = text.rpartition("</think>")
    begins = in_thought or text.lstrip().startswith("<think>")
    is_open = "<think>" in visible and (begins or not closed)
    return None if is_open or (in_thought and not closed) else visible.strip()


def extract_answer(
    text: str, task: str, extract: str = "paper", in_thought: bool = False
) -> str | None:
    """Return the answer stated in a whole response: "... answer is X", or a boxed one; or None.

    An empty string means that the phrase occurs with nothing after it. Spec sections 5.1 to 5.3,
    "visible text" and "extraction". `extract` is one of EXTRACTS; `in_thought` as in
    `visible_text`. Raises ValueError if `task` or `extract` is unknown.
    """
    return _find_statement(text, task, extract, in_thought).answer


def stated_answer(
    text: str, task: str, extract: str = "paper", in_thought: bool = False
) -> str | None:
    """Return what an external judge reads of a whole response; None if the response states nothing.

    A number answer is the words that state it (`statements.number_sentence`). Any other answer is
    the extracted one. Arguments and errors as in `extract_answer`.
    """
    if task != "financial_math":
        return extract_answer(text, task, extract, in_thought)
    check_extract(extract)
    # Extraction drops currencies and scale words ("$3.5 million"), and in the paper's rules finds
    # no number in "-$5" or "five million".
    visible = visible_text(text, in_thought) or ""
    return number_sentence(visible, box_decides=extract == "paper") or None


def answer_form(text: str, task: str, extract: str = "paper", in_thought: bool = False) -> str:
    """Return the form, one of FORMS, in which `extract_answer` reads the answer of a response."""
    return _find_statement(text, task, extract, in_thought).form


def _find_statement(text: str, task: str, extract: str, in_thought: bool) -> Statement:
    check_task(task)
    check_extract(extract)
    visible = visible_text(text, in_thought)
    if not visible:
        return NO_STATEMENT
    if extract == "lenient":
        return read_leniently(visible, task)
    return read_strictly(visible if "</think>" in text else tail_of(visible, task), task)


def find_answer(text: str, task: str, extract: str = "paper") -> str | None:
    """Return the answer stated in `text`, which contains no thoughts; None if there is none."""
    check_task(task)
    check_extract(extract)
    read = read_leniently if extract == "lenient" else read_strictly
    return read(text, task).answer


def normalize_answer(text: str, extract: str = "paper") -> str:
    """Lower the case; remove ASCII punctuation, articles and extra spaces (spec section 5.1).

    "lenient" also joins equal forms of Unicode (composed or not, full width, ligatures) and removes
    punctuation of any script and characters without width.
    """
    if extract == "lenient":
        text = unify(text)
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def is_correct(
    prediction: str, reference: str, task: str, rule: str = "match", extract: str = "paper"
) -> bool:
    """Return whether an extracted `prediction` agrees with an extracted `reference`.

    general_qa, cloze: the normalized prediction contains the normalized reference, or equals it
    ("exact").
    financial_math: the numbers agree (`same_number`); text that is not a number is wrong.
    multiple_choice: the letters are equal. An empty prediction or reference is wrong.
    """
    check_task(task)
    check_extract(extract)
    if task in TEXT_TASKS:
        right, stated = (normalize_answer(text, extract) for text in (reference, prediction))
        # One way only: fragments of a reference would hack a two-way rule (paper, section F.6).
        return bool(right) and (right == stated if rule == "exact" else right in stated)
    if extract == "lenient":
        prediction, reference = (read_alone(text, task) or "" for text in (prediction, reference))
    if task == "financial_math":
        values = _both_numbers(prediction, reference)
        if values is None:
            return False
        return same_number(*values, scales=_scales(prediction, reference, extract))
    return prediction in LETTERS and prediction == reference


def _scales(prediction: str, reference: str, extract: str) -> Sequence[float]:
    """Return the factors that one of two figures may omit."""
    # "1.234" may be 1234 with a foreign separator, but a point is read as a decimal separator. The
    # factor 1000 would undo that.
    figures = (prediction, reference) if extract == "lenient" else ()
    if any(re.fullmatch(r"-?[0-9]{1,3}\.[0-9]{3}", figure) for figure in figures):
        return tuple(scale for scale in SCALES if scale != 1e3)
    return SCALES


def score(
    text: str,
    reference: str,
    task: str,
    rule: str = "match",
    extract: str = "paper",
    in_thought: bool = False,
) -> float:
    """Return the rule reward of a whole response against a reference answer, in [0, 1].

    `reference` is the bare answer, or "The correct answer is X"; `rule` as in AlgorithmConfig;
    `extract` and `in_thought` as in `extract_answer`.
    """
    answer = extract_answer(text, task, extract, in_thought)
    return score_answer(answer, reference, task, rule, extract)


def score_answer(
    answer: str | None, reference: str, task: str, rule: str = "match", extract: str = "paper"
) -> float:
    """Return the rule reward of an extracted answer, in [0, 1]; arguments as in `score`.

    It is 0.0 or 1.0, unless the rule is "f1" or "brief" and the task has texts as answers.
    """
    right = read_reference(reference, task, extract)
    if answer is None:
        return 0.0
    is_right = is_correct(answer, right, task, rule, extract)
    if task in TEXT_TASKS and rule in ("f1", "brief"):
        words, right_words = (normalize_answer(text, extract).split() for text in (answer, right))
        if rule == "f1":
            return word_f1(words, right_words)
        return is_right * min(1.0, len(right_words) / max(len(words), 1))
    return float(is_right)


def read_reference(reference: str, task: str, extract: str = "paper") -> str:
    """Return the answer in a reference, which is bare, or stated as in a response."""
    return find_answer(reference, task, extract) or first_line(reference)


def same_answer(first: str, second: str, task: str, extract: str = "paper") -> bool:
    """Return whether two extracted answers are the same, for majority counts over several answers.

    Symmetric and, unlike `is_correct`, without containment and scale factors: normalized texts or
    letters must be equal, numbers must agree to 1e-9. An empty or unreadable answer equals nothing,
    not even itself.
    """
    check_task(task)
    check_extract(extract)
    if task in TEXT_TASKS:
        normal = normalize_answer(first, extract)
        return bool(normal) and normal == normalize_answer(second, extract)
    if extract == "lenient":
        first, second = (read_alone(text, task) or "" for text in (first, second))
    if task == "financial_math":
        values = _both_numbers(first, second)
        if values is None or isinstance(values[0], bool) != isinstance(values[1], bool):
            return False
        # Not exactly, so that the order of a summation does not matter.
        return math.isclose(values[0], values[1], rel_tol=1e-9)
    return first in LETTERS and first == second


def check_task(task: str) -> None:
    if task not in TASKS:
        raise ValueError(f"task: {task!r} is unknown; it must be one of {', '.join(TASKS)}")


def check_extract(extract: str) -> None:
    if extract not in EXTRACTS:
        raise ValueError(f"extract: {extract!r} is unknown; must be one of {', '.join(EXTRACTS)}")


def _both_numbers(first: str, second: str) -> tuple[Number, Number] | None:
    values = parse_number(first), parse_number(second)
    return None if values[0] is None or values[1] is None else (values[0], values[1])
