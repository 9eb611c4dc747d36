"""Short questions without documents: the benchmarks of the paper's Table 7.

    name       rows  metric
    aime24       30  mathematical equality
    aime25       30  mathematical equality
    amc23        40  mathematical equality
    math500     500  mathematical equality
    gsm8k     1,319  mathematical equality
    mmlu_pro 12,032  the letter, A to J

A mathematical answer is the content of the last box after the thinking, else the text after "the
answer is", compared by `math_equal`. A letter is parsed as in training (spec section 5.2), but with
ten letters. No judge is asked, because both metrics are exact. Prompts have no examples.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

from spell_jax.evaluation import math_equal
from spell_jax.evaluation.benchmarks import published
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.evaluation.benchmarks.published import Folder, Layouts, Loader, PublishedRow
from spell_jax.selfplay.braces import brace_steps, code_points, first_balance
from spell_jax.selfplay.numbers import number_text
from spell_jax.selfplay.rules import find_answer, visible_text

OPTIONS = "ABCDEFGHIJ"

_MATH_PROMPT = "{question}\n\nWork step by step, and give the final answer inside \\boxed{{}}."
_CHOICE_PROMPT = (
    "{question}\nChoices:\n{choices}\nWork step by step, and end your reply with a sentence "
    'of this form, with the letter you choose: "The correct answer is (insert answer here)."'
)
_BOX = r"\boxed{"
# "answer is A" but not "answer is Amazing"; combining accents continue a word.
_NO_WORD = r"(?![\w\u0300-\u036f])"
# From the most to the least explicit statement. As in training, the last match of the first pattern
# that matches counts.
_LETTER_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\\(?i:boxed)\{(?:\\text\{)?\(?([A-J])\)?\}",
        r"(?i:correct answer is:? )\(([A-J])\)",
        rf"(?i:correct answer is:? )([A-J]){_NO_WORD}",
        r"(?i:answer is:? )\(([A-J])\)",
        rf"(?i:answer is:? )([A-J]){_NO_WORD}",
    )
)


@dataclasses.dataclass(frozen=True)
class MathSet:
    """A set of mathematical problems."""

    title: str  # of its table column
    rows: int  # as published
    layouts: Layouts


_TEST = published.hub("test")
_AIME24 = [*published.hub("train"), ["aime_2024_problems"]]  # HuggingFaceH4, Maxwell-Jia
_AIME25 = [*_TEST, ["aime2025-I", "aime2025-II"]]  # math-ai, opencompass
_GSM8K = [*_TEST, ["grade_school_math/data/test"]]  # the hub, openai's repository
MATH_SETS = {
    "aime24": MathSet("AIME24", 30, _AIME24),
    "aime25": MathSet("AIME25", 30, _AIME25),
    "amc23": MathSet("AMC23", 40, _TEST),
    "math500": MathSet("MATH500", 500, _TEST),
    "gsm8k": MathSet("GSM8K", 1319, _GSM8K),
}


def load_math(name: str, folder: Folder, limit: int | None = None) -> Benchmark:
    """Load one of `MATH_SETS`; raise ImportError without Math-Verify (extra "eval")."""
    math_equal.check_installed()
    kind = MATH_SETS[name]
    rows = published.read_rows(folder, kind.layouts, kind.rows, limit)
    items = tuple(_math_item(name, str(number), row) for number, row in enumerate(rows))
    return Benchmark(name, kind.title, items, extract_math, score_math)


def _math_item(name: str, id: str, row: PublishedRow) -> BenchmarkItem:
    question = row.text(row.column("problem", "Problem", "question")).strip()
    answer_field = row.column("answer", "Answer")
    reference = row.get(answer_field, (str, int, float), "a number or LaTeX")
    if not isinstance(reference, str):
        if not math.isfinite(reference):
            raise row.wrong(answer_field, "a finite number")
        reference = number_text(int(reference) if reference == int(reference) else reference)
    if name == "gsm8k":
        # GSM8K's answers are solutions that end with "#### NUMBER".
        _, mark, reference = reference.rpartition("####")
        if not mark:
            raise row.wrong(answer_field, 'a solution that ends with "#### NUMBER"')
    if not reference.strip():
        raise row.wrong(answer_field, "an answer that is not empty")
    fields = {field: row.values[field] for field in ("level", "subject") if field in row.values}
    prompt = _MATH_PROMPT.format(question=question)
    return BenchmarkItem(id, prompt, question, (reference.strip(),), fields)


def extract_math(text: str, item: BenchmarkItem) -> str | None:
    """Find the last box's text after the thinking, else the text after "answer is", else None."""
    visible = visible_text(text)
    if not visible:
        return None
    if _BOX not in visible:
        return (find_answer(visible, "general_qa") or "").strip(": ") or None
    # The last box: a solution may box intermediate results.
    boxed = visible[visible.rindex(_BOX) + len(_BOX) - 1 :]
    end = first_balance(brace_steps(code_points(boxed)))
    return None if end is None else boxed[1:end].strip() or None


def score_math(text: str, item: BenchmarkItem) -> float:
    """Return 1.0 if the stated answer equals the reference mathematically, else 0.0."""
    answer = extract_math(text, item)
    return float(answer is not None and math_equal.equal(answer, item.references[0]))


def load_mmlu_pro(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load MMLU-Pro's test set, from `data/test-00000-of-00001.parquet`."""
    rows = published.read_rows(folder, _TEST, 12_032, limit)
    items = tuple(map(_choice_item, rows))
    return Benchmark("mmlu_pro", "MMLU-Pro", items, extract_letter, score_letter)


def _choice_item(row: PublishedRow) -> BenchmarkItem:
    options = row.texts("options")
    letters = OPTIONS[: len(options)]
    letter = row.text("answer")
    if len(options) > len(OPTIONS):
        raise row.wrong("options", f"a list of at most {len(OPTIONS)} texts")
    if letter not in tuple(letters):
        raise row.wrong("answer", f"one of {', '.join(letters)}")
    question = row.text("question").strip()
    pairs = zip(letters, options, strict=True)
    choices = "".join(f"({name}) {option.strip()}\n" for name, option in pairs)
    prompt = _CHOICE_PROMPT.format(question=question, choices=choices)
    fields = {"options": len(options), "category": row.text("category")}
    return BenchmarkItem(
        str(row.get("question_id", int, "a number")), prompt, question, (letter,), fields
    )


def extract_letter(text: str, item: BenchmarkItem) -> str | None:
    """Return the letter that a full response states, or None if the question lacks this option."""
    # Markdown's bold type would hide the letter: "the answer is **(B)**".
    visible = (visible_text(text) or "").replace("*", "")
    for pattern in _LETTER_PATTERNS:
        if letters := pattern.findall(visible):
            return letters[-1] if letters[-1] in OPTIONS[: item.fields["options"]] else None
    return None


def score_letter(text: str, item: BenchmarkItem) -> float:
    """Return 1.0 for the correct letter, else 0.0."""
    return float(extract_letter(text, item) == item.references[0])


LOADERS: dict[str, Loader] = {name: functools.partial(load_math, name) for name in MATH_SETS}
LOADERS["mmlu_pro"] = load_mmlu_pro
