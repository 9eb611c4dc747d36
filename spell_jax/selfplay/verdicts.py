"""Verdicts of an external judge as text: prompts by template, and parsers of replies (spec 11)."""

from __future__ import annotations

from collections.abc import Callable

from spell_jax.selfplay.prompts import Prompts
from spell_jax.selfplay.rules import visible_text

MALFORMED, UNANSWERED = -1, -2
MISSING = {MALFORMED: "malformed", UNANSWERED: "unanswered"}  # names of missing verdicts

_MARKS = " \t\n*`'\"()[]."  # around a grade's letter

Parse = Callable[[str], int]  # reply -> verdict (such as 1 or 0), or MALFORMED


def parse_judgement(text: str) -> int:
    """Return 0 if the visible text contains NO, else 1 if it contains YES, else MALFORMED."""
    visible = visible_text(text) or ""
    # NO first: "YES" counts only without "NO" (spec 11).
    if "NO" in visible:
        return 0
    return 1 if "YES" in visible else MALFORMED


def parse_grade(text: str) -> int:
    """Return 1 for the grade A, 0 for B and C, else MALFORMED; see `parse_letter`."""
    place = parse_letter(text, "ABC")
    return place if place == MALFORMED else int(place == 0)


def parse_letter(text: str, letters: str) -> int:
    """Return the place in `letters` of the letter that a reply consists of, else MALFORMED.

    The visible text is the letter, perhaps with its name ("A: correct") and marks around it.
    """
    letter = (visible_text(text) or "").partition(":")[0].strip(_MARKS)
    return letters.index(letter) if len(letter) == 1 and letter in letters else MALFORMED


# Values of algorithm.rule, and of --rule of evaluations, that ask a judge.
JUDGE_RULES = ("judge", "match_or_judge")
# Prompt of fields such as question, prediction and reference; verdict of a reply.
Template = tuple[Callable[..., str], Parse]
# Values of algorithm.judge_template.
JUDGE_TEMPLATES: dict[str, Template] = {
    "yes_no": (Prompts.judge, parse_judgement),
    "grades": (Prompts.judge_grades, parse_grade),
}
