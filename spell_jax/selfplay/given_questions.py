"""The check that a response can match a reference answer, and the questions of a file."""

import pathlib
import re

from spell_jax.data.clusters import TEXT_TASKS
from spell_jax.data.questions import Question, read_questions
from spell_jax.selfplay import rules

_OPTION = re.compile(r"(?:^|[\s(\[])([A-D])[).:\]]")


def read_scorable(
    path: str | pathlib.Path, field: str, extract: str = "lenient", rule: str = "match"
) -> tuple[Question, ...]:
    """Read the questions of a JSONL file or its URL that have an answer that can score.

    Logs other lines with file, line and reason, and skips them. `extract` is one of EXTRACTS,
    `rule` as in AlgorithmConfig. Raises the errors of data.questions.read_questions.
    """
    return read_questions(path, field, lambda question: check_answer(question, extract, rule))


def check_answer(question: Question, extract: str = "lenient", rule: str = "match") -> None:
    """Raise ValueError with the reason if no response can score with the question's answer.

    Where a multiple_choice question shows options, the answer must be an option. An external
    judge may accept what the rule cannot read, but is not asked about letters.
    """
    # At the start of a run: a question that no answer can solve would cost G answers in each epoch.
    answer, task = question.answer, question.task
    if "judge" in rule and task != "multiple_choice" and answer.strip():
        return
    reason = unscorable(answer, task, extract)
    if not reason and task == "multiple_choice":
        options = {*_OPTION.findall(question.question)}
        letter = rules.read_reference(answer, task, extract)
        # A single "(A)" in a text is no list of options.
        if len(options) > 1 and letter not in options:
            reason = f"is none of the options {', '.join(sorted(options))}"
    if reason:
        raise ValueError(f"answer = {answer!r:.100} can never score: it {reason}")


def unscorable(reference: str, task: str, extract: str = "paper") -> str:
    """Return why no response can score with a reference answer; "" if some response can."""
    # The rule itself decides, on the replies that the prompts ask for, so this check cannot differ
    # from the reward.
    answer = rules.read_reference(reference, task, extract)
    forms = ("The answer is {}", "The correct answer is {}", r"\boxed{{{}}}")
    replies = (form.format(answer) for form in forms)
    if any(rules.score(reply, reference, task, extract=extract) for reply in replies):
        return ""
    if not reference.strip():
        return "is blank"
    if task in TEXT_TASKS:
        is_empty = not rules.normalize_answer(answer, extract)
        return "has no words but articles" if is_empty else "cannot be read where a response has it"
    return f"is no {'single number' if task == 'financial_math' else 'letter from A to D'}"


def scores_itself(answer: str, task: str) -> bool:
    """Return whether "The answer is ANSWER" scores 1, however a run extracts answers."""
    reply = f"The answer is {answer}"
    return all(
        rules.score(reply, answer, task, extract=extract) == 1.0 for extract in rules.EXTRACTS
    )
