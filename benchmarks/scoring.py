"""Benchmark of scoring speed: seconds to score 100,000 synthetic replies by the benchmarks' rules.

1. Lengths of retrieval benchmarks other than the paper's are left out because they have the same
   rules. RULER has 13 tasks of 500 questions.
2. A reply is text of 500 to 20,000 characters (log-uniform), followed by an answer. In half of them
   the text is inside <think> tags, and in half of them the answer is right. Letters have the
   frequencies of English, because the time of difflib depends on them.
3. With --data, the published solutions of GSM8K and MATH-500 are scored too, and replies with
   changed answers (`solutions`, `changed_solutions`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
import resource
import string
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from benchmarks.base import BenchmarkCommand
from spell_jax.data import clusters
from spell_jax.evaluation import math_equal
from spell_jax.evaluation.benchmarks import (
    long_documents,
    published,
    registry,
    retrieval,
    short,
)
from spell_jax.evaluation.benchmarks.base import BenchmarkItem
from spell_jax.evaluation.generated import haystack

LIMIT_S = 60.0
PREFIX = "aC3fB7Ejd0"  # of MRCR's answers
CHANGED = 200  # published solutions whose answers are changed

_STATED = re.compile(r"#### (.*)")
_BOOK = 2_000_000  # characters of the text that all replies are cut from
_WORDS = 20_000
# Letters -> frequency of each in English text, per 1,000; letters of similar frequency are grouped.
_SHARES = {"e": 127, "t": 91, "a": 82, "oin": 71, "shr": 62, "dl": 42, "cumwfgypb": 23}
_SHARES |= {"vk": 9, "jxqz": 1.5}
_LETTERS = {letter: share for letters, share in _SHARES.items() for letter in letters}


class TextWriter:
    """Generator of random texts, deterministic given the seed."""

    def __init__(self, seed: int):
        rng = self.rng = random.Random(seed)
        letters, shares = list(_LETTERS), list(_LETTERS.values())
        lengths = (2, 3, 3, 4, 5, 6, 8, 11)
        words = [
            "".join(rng.choices(letters, shares, k=rng.choice(lengths))) for _ in range(_WORDS)
        ]
        zipf = [1 / rank for rank in range(1, _WORDS + 1)]
        self.words = rng.choices(words, zipf, k=_BOOK // 4)
        sentences = [
            " ".join(self.words[at : at + 15]).capitalize() + rng.choice((".", "?", ", 1,204"))
            for at in range(0, len(self.words), 15)
        ]
        self.book = "\n".join(sentences)[:_BOOK]

    def phrase(self) -> str:
        """Return one to five words in title case."""
        at = self.rng.randrange(len(self.words) - 5)
        return " ".join(self.words[at : at + self.rng.randint(1, 5)]).title()

    def text(self, shortest: int, longest: int) -> str:
        """Cut a text of log-uniform length, from `shortest` to `longest` characters."""
        size = round(math.exp(self.rng.uniform(math.log(shortest), math.log(longest))))
        at = self.rng.randrange(len(self.book) - size)
        return self.book[at : at + size]

    def reply(self, answer: str) -> str:
        """Make a reply that ends with the answer; in half of them, thoughts precede it."""
        text = self.text(500, 20_000)
        return f"<think>{text}</think>{answer}" if self.rng.random() < 0.5 else f"{text}\n{answer}"


Answers = tuple[str, str, str]  # reference, right answer, wrong answer


@dataclasses.dataclass(frozen=True)
class BenchmarkFamily:
    """Benchmarks that share a scoring rule."""

    questions: Mapping[str, int]  # number of questions by benchmark
    answers: Callable[[TextWriter], Answers]
    stated: str  # format in which a reply states its answer
    score: Callable[[str, BenchmarkItem], float]  # the rule, for a reply and a question
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # others of a question
    bare: bool = False  # whether a reply is only the statement, without other text

    def make(self, writer: TextWriter, right: bool) -> tuple[str, BenchmarkItem]:
        """Make a question and a right or wrong reply to it."""
        reference, *answers = self.answers(writer)
        reply = self.stated.format(answers[not right])
        item = BenchmarkItem("", "", "", (reference,), self.fields)
        return (reply if self.bare else writer.reply(reply)), item


def _phrases(writer: TextWriter) -> Answers:
    right = writer.phrase()
    return right, right, writer.phrase()


def _amounts(writer: TextWriter) -> Answers:
    amount = round(writer.rng.uniform(0, 10_000), 2)
    return f"{amount:.2f}", f"{amount * 1.0001:,.3f}", f"{amount * 1.1:,.3f}"


def _letters(options: int, writer: TextWriter) -> Answers:
    right, wrong = writer.rng.sample(short.OPTIONS[:options], 2)
    return right, right, wrong


def _numbers(limit: int, writer: TextWriter) -> Answers:
    right, wrong = map(str, writer.rng.sample(range(limit), 2))
    return right, right, wrong


def _formulas(writer: TextWriter) -> Answers:
    def formula() -> str:
        n, m = writer.rng.sample(range(2, 100), 2)
        shapes = ("{n}", r"\frac{{{n}}}{{{m}}}", r"{n}\sqrt{{{m}}}", "({n},{m})", "x^{n}-{m}x")
        return writer.rng.choice(shapes).format(n=n, m=m)

    right, wrong = formula(), formula()
    return right, right.replace("frac", "dfrac"), wrong.replace("frac", "dfrac")


def _messages(writer: TextWriter) -> Answers:
    """Make a message after PREFIX; wrong is another text, changed words or the first half."""
    answer = PREFIX + writer.text(500, 6000).strip()
    words = (w if writer.rng.random() < 0.9 else writer.text(3, 9) for w in answer.split(" "))
    wrong = (PREFIX + writer.text(500, 6000), " ".join(words), answer[: len(answer) // 2])
    return answer, answer, writer.rng.choice(wrong)


def _summaries(writer: TextWriter) -> Answers:
    reference, first, second = (writer.text(1000, 8000) for _ in range(3))
    return reference, first, second


def _kinds() -> dict[str, BenchmarkFamily]:
    """Return all families of benchmarks, by the name of their scoring rule."""
    part = functools.partial
    phrases = {"frames": 824, **dict.fromkeys(long_documents.LONGBENCH_TITLES, 200)}
    phrases |= {name: count for name, (_, _, count) in long_documents.SEAL_SETS.items()}
    kinds_v2 = long_documents.LONGBENCH_V2_KINDS.items()
    choices = {f"longbench_v2_{kind}": count for kind, (_, _, count) in kinds_v2}
    rag = {"helmet_nq": 600, "helmet_trivia": 600, "helmet_pop": 600, "helmet_hotpot": 300}
    icl = {f"helmet_{task}": 500 for task in retrieval.helmet_labels.TASKS}
    mathematics = {name: kind.rows for name, kind in short.MATH_SETS.items() if name != "math500"}
    mrcr = {f"mrcr_{needles}needle": retrieval.MRCR_ROWS for needles in (2, 4, 8)}
    summaries = {"helmet_infbench_sum": 100, "helmet_multi_lexsum": 100}
    generated = {"ruler": 13 * 500, "needle": 66}
    sentence, letter, boxed = (
        "The correct answer is {}.",
        "The answer is ({}).",
        r"It is \boxed{{{}}}.",
    )
    phrase, amount, choice = (
        part(long_documents.score_rule, task) for task in clusters.PAPER_TASKS
    )
    four_options, ten_options = ({"options": options} for options in (4, 10))
    math_score, prefix = short.score_math, {"prefix": PREFIX}
    return {
        "phrase": BenchmarkFamily(phrases, _phrases, sentence, phrase),
        "number": BenchmarkFamily(
            {"docmath": 800}, _amounts, "Therefore, the answer is ${}", amount
        ),
        "choice": BenchmarkFamily(
            {"longbench_v2": 503} | choices, part(_letters, 4), letter, choice, four_options
        ),
        "letter": BenchmarkFamily(
            {"mmlu_pro": 12_032}, part(_letters, 10), letter, short.score_letter, ten_options
        ),
        "whole number": BenchmarkFamily(mathematics, part(_numbers, 1000), boxed, math_score),
        "formula": BenchmarkFamily({"math500": 500}, _formulas, boxed, math_score),
        "message": BenchmarkFamily(mrcr, _messages, "{}", retrieval.score_mrcr, prefix, bare=True),
        "part": BenchmarkFamily(rag, _phrases, "Answer: {}", retrieval.score_rag),
        "label": BenchmarkFamily(
            icl, part(_numbers, 151), "label: {}", retrieval.score_icl, bare=True
        ),
        "summary": BenchmarkFamily(summaries, _summaries, "Summary: {}", retrieval.score_summary),
        "needle": BenchmarkFamily(generated, _phrases, "Answer: {}", haystack.match_all),
    }


KINDS = _kinds()


def solutions(data: str) -> dict[str, list[tuple[str, BenchmarkItem]]]:
    """Load published solutions of GSM8K and MATH-500 as replies, each with its question.

    `data` has the folders gsm8k and math500. A solution of GSM8K ends with "#### NUMBER", which a
    reply states as a box; solutions of MATH-500 have a box.
    """
    replies_by_set = {}
    for name, column in (("gsm8k", "answer"), ("math500", "solution")):
        items = registry.load(name, f"{data}/{name}").items
        kind = short.MATH_SETS[name]
        rows = published.read(f"{data}/{name}", kind.layouts, kind.rows, None)
        texts = [_STATED.sub(r"\\boxed{\1}", row.text(column)) for row in rows]
        replies_by_set[name] = list(zip(texts, items, strict=True))
    return replies_by_set


def changed_solutions(
    pairs: Sequence[tuple[str, BenchmarkItem]], count: int, seed: int
) -> list[tuple[str, BenchmarkItem]]:
    """Choose `count` solutions and change their answers: a digit, or another question's answer."""
    rng = random.Random(seed)
    changed_replies = []
    for _, item in rng.sample(pairs, count):
        right = item.references[0]
        wrong = right
        digits = [at for at, letter in enumerate(right) if letter in string.digits]
        while wrong == right:
            if digits:
                at = rng.choice(digits)
                wrong = right[:at] + rng.choice(string.digits) + right[at + 1 :]
            else:
                wrong = rng.choice(pairs)[1].references[0]
        changed_replies.append((rf"It is \boxed{{{wrong}}}.", item))
    return changed_replies


@dataclasses.dataclass
class ScoringBenchmark(BenchmarkCommand):
    """Measures the seconds to score synthetic replies, in total and by benchmark.

    Samples are divided among the benchmarks as in a run that answers every question equally often.
    `Benchmark.score` is timed in one process as evaluate calls it, one reply after another. Nothing
    is scored before, so the time includes the start of Math-Verify's worker processes. "published"
    has the same numbers for --data: all published solutions, and 200 with a changed answer.
    "benchmarks" has the number of samples, mean characters, mean score and seconds of each. Seconds
    are wall-clock time and include waiting for Math-Verify's workers. "processor_s" is the CPU time
    of scoring, workers included, which does not depend on other load of the machine.
    """

    samples: Annotated[int, "replies, over all benchmarks"] = 100_000
    seed: Annotated[int, "seed of the replies"] = 0
    data: Annotated[str, "folder with the published gsm8k and math500; empty: neither"] = ""

    def run(self) -> dict[str, Any]:
        numbers = self.synthetic()
        return numbers | {"published": self.published()} if self.data else numbers

    def published(self) -> dict[str, dict[str, float]]:
        sets = solutions(self.data)
        pairs = [pair for replies in sets.values() for pair in replies]
        sets["changed"] = changed_solutions(pairs, CHANGED, self.seed)
        return {name: _measure(replies, short.score_math) for name, replies in sets.items()}

    def synthetic(self) -> dict[str, Any]:
        writer = TextWriter(self.seed)
        total = sum(sum(kind.questions.values()) for kind in KINDS.values())
        by_name: dict[str, dict[str, float]] = {}
        for kind in KINDS.values():
            for name, questions in kind.questions.items():
                count = max(1, round(self.samples * questions / total))
                pairs = [kind.make(writer, writer.rng.random() < 0.5) for _ in range(count)]
                by_name[name] = _measure(pairs, kind.score)
        before = _children_seconds()
        math_equal.end_workers()
        processor_s = sum(numbers.pop("processor_s") for numbers in by_name.values())
        seconds = sum(numbers["seconds"] for numbers in by_name.values())
        samples = sum(numbers["samples"] for numbers in by_name.values())
        return {
            "samples": samples,
            "seconds": seconds,
            "processor_s": processor_s + _children_seconds() - before,
            "limit_s": LIMIT_S,
            "samples_per_s": samples / seconds,
            "benchmarks": by_name,
        }


def _measure(
    pairs: Sequence[tuple[str, BenchmarkItem]], score: Callable[[str, BenchmarkItem], float]
) -> dict[str, float]:
    count = len(pairs)
    began, used = time.perf_counter(), time.process_time()
    scores = [score(reply, item) for reply, item in pairs]
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return {
        "samples": count,
        "characters": sum(len(reply) for reply, _ in pairs) / count,
        "score": sum(scores) / count,
        "seconds": seconds,
        "processor_s": used,
    }


def _children_seconds() -> float:
    """Return the CPU seconds of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
