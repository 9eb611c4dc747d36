"""Benchmark of scoring speed: seconds to score 100,000 samples by the benchmarks' rules.

1. Samples are divided among the benchmarks as in a run that answers every question equally often.
   Lengths of retrieval benchmarks other than the paper's are left out because they have the same
   rules. RULER has 13 tasks of 500 questions.
2. Replies are synthetic: text of 500 to 20,000 characters (log-uniform), followed by an answer. In
   half of them the text is inside <think> tags, and in half of them the answer is right. Letters
   have the frequencies of English, because the time of difflib depends on them.
3. `Benchmark.score` is timed in one process as evaluate calls it, one reply after another. Nothing
   is scored before, so the time includes the start of Math-Verify's worker processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import random
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

from spell_jax.evaluation import math_equal
from spell_jax.evaluation.benchmarks import long_documents, retrieval, short
from spell_jax.evaluation.benchmarks.base import Item
from spell_jax.evaluation.generated import haystack

LIMIT_S = 60.0

_BOOK = 2_000_000  # characters of the text that all replies are cut from
_WORDS = 20_000
# Letters -> frequency of each in English text, per 1,000; letters of similar frequency are grouped.
_SHARES = {"e": 127, "t": 91, "a": 82, "oin": 71, "shr": 62, "dl": 42, "cumwfgypb": 23}
_SHARES |= {"vk": 9, "jxqz": 1.5}
_LETTERS = {letter: share for letters, share in _SHARES.items() for letter in letters}


class Writer:
    """Generator of random texts, deterministic given the seed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        lengths = (2, 3, 3, 4, 5, 6, 8, 11)
        words = [
            "".join(self._sample_words(_LETTERS, self.rng.choice(lengths))) for _ in range(_WORDS)
        ]
        zipf = {word: 1 / rank for rank, word in enumerate(words, 1)}
        self.words = self._sample_words(zipf, _BOOK // 4)
        sentences = [
            " ".join(self.words[at : at + 15]).capitalize() + self.rng.choice((".", "?", ", 1,204"))
            for at in range(0, len(self.words), 15)
        ]
        self.book = "\n".join(sentences)[:_BOOK]

    def _sample_words(self, shares: Mapping[str, float], count: int) -> list[str]:
        return self.rng.choices(list(shares), list(shares.values()), k=count)

    def phrase(self) -> str:
        """Return one to five words in title case."""
        at = self.rng.randrange(len(self.words) - 5)
        return " ".join(self.words[at : at + self.rng.randint(1, 5)]).title()

    def text(self, least: int, most: int) -> str:
        """Cut a text of log-uniform length, from `least` to `most` characters."""
        size = round(math.exp(self.rng.uniform(math.log(least), math.log(most))))
        at = self.rng.randrange(len(self.book) - size)
        return self.book[at : at + size]

    def reply(self, answer: str) -> str:
        """Make a reply that ends with the answer; in half of them, thoughts precede it."""
        text = self.text(500, 20_000)
        return f"<think>{text}</think>{answer}" if self.rng.random() < 0.5 else f"{text}\n{answer}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """Benchmarks that share a scoring rule.

    Attributes:
      questions: benchmark -> number of its questions.
      item: function that makes a question.
      sample: function (writer, question, whether the reply is right) -> reply.
      score: the rule, a function (reply, question) -> score.
    """

    questions: Mapping[str, int]
    item: Callable[[Writer], Item]
    sample: Callable[[Writer, Item, bool], str]
    score: Callable[[str, Item], float]


def _item(reference: str, **fields: Any) -> Item:
    return Item("", "", "", (reference,), fields)


def _phrase(writer: Writer) -> Item:
    return _item(writer.phrase())


def _said(writer: Writer, item: Item, right: bool) -> str:
    stated = item.references[0] if right else writer.phrase()
    return writer.reply(f"The correct answer is {stated}.")


def _amount(writer: Writer) -> Item:
    return _item(f"{writer.rng.uniform(0, 10_000):.2f}")


def _amount_said(writer: Writer, item: Item, right: bool) -> str:
    stated = float(item.references[0]) * (1.0001 if right else 1.1)
    return writer.reply(f"Therefore, the answer is ${stated:,.3f}")


def _letter(options: int, writer: Writer) -> Item:
    return _item(writer.rng.choice(short.OPTIONS[:options]), options=options)


def _letter_said(writer: Writer, item: Item, right: bool) -> str:
    others = short.OPTIONS[: item.fields["options"]]
    stated = item.references[0] if right else writer.rng.choice(others)
    return writer.reply(f"The correct answer is ({stated}).")


def _whole(writer: Writer) -> Item:
    return _item(str(writer.rng.randrange(1000)))


def _formula(writer: Writer) -> Item:
    n, m = writer.rng.sample(range(2, 100), 2)
    shapes = ("{n}", r"\frac{{{n}}}{{{m}}}", r"{n}\sqrt{{{m}}}", "({n},{m})", "x^{n}-{m}x")
    return _item(writer.rng.choice(shapes).format(n=n, m=m))


def _boxed(make: Callable[[Writer], Item], writer: Writer, item: Item, right: bool) -> str:
    (stated,) = (item if right else make(writer)).references
    return writer.reply(rf"So it is \boxed{{{stated.replace('frac', 'dfrac')}}}.")


def _message(writer: Writer) -> Item:
    prefix = "".join(writer.rng.choices("abcdefghijABCDEFGHIJ0123456789", k=10))
    return _item(prefix + writer.text(500, 6000).strip(), prefix=prefix)


def _message_said(writer: Writer, item: Item, right: bool) -> str:
    """Right reply, or one of three wrong ones: another text, changed words, or the first half."""
    prefix, (answer,) = item.fields["prefix"], item.references
    if right:
        return answer
    parts = (
        prefix + writer.text(500, 6000),
        " ".join(w if writer.rng.random() < 0.9 else writer.text(3, 9) for w in answer.split(" ")),
        answer[: len(answer) // 2],
    )
    return writer.rng.choice(parts)


def _found(writer: Writer, item: Item, right: bool) -> str:
    return writer.reply(f"Answer: {item.references[0] if right else writer.phrase()}")


def _label_said(writer: Writer, item: Item, right: bool) -> str:
    return f"label: {item.references[0] if right else writer.rng.randrange(151)}"


def _summary(writer: Writer) -> Item:
    return _item(writer.text(1000, 8000))


def _summary_said(writer: Writer, item: Item, right: bool) -> str:
    return writer.reply(f"Summary: {writer.text(1000, 8000)}")


def _kinds() -> dict[str, Kind]:
    """All kinds, by the name of their rule."""
    rule = functools.partial
    whole, formula = rule(_boxed, _whole), rule(_boxed, _formula)
    phrases = {"frames": 824, **dict.fromkeys(long_documents.LONGBENCH_TITLES, 200)}
    rag = {"helmet_nq": 600, "helmet_trivia": 600, "helmet_pop": 600, "helmet_hotpot": 300}
    icl = {f"helmet_{task}": 500 for task in retrieval.helmet_labels.TASKS}
    mathematics = {name: kind.rows for name, kind in short.MATH_SETS.items() if name != "math500"}
    mrcr = {f"mrcr_{needles}needle": retrieval.MRCR_ROWS for needles in (2, 4, 8)}
    summaries = {"helmet_infbench_sum": 100, "helmet_multi_lexsum": 100}
    score_rule = long_documents.score_rule
    return {
        "phrase": Kind(phrases, _phrase, _said, rule(score_rule, "general_qa")),
        "number": Kind({"docmath": 800}, _amount, _amount_said, rule(score_rule, "financial_math")),
        "choice": Kind(
            {"longbench_v2": 503},
            rule(_letter, 4),
            _letter_said,
            rule(score_rule, "multiple_choice"),
        ),
        "letter": Kind({"mmlu_pro": 12_032}, rule(_letter, 10), _letter_said, short.score_letter),
        "whole number": Kind(mathematics, _whole, whole, short.score_math),
        "formula": Kind({"math500": 500}, _formula, formula, short.score_math),
        "message": Kind(mrcr, _message, _message_said, retrieval.score_mrcr),
        "part": Kind(rag, _phrase, _found, retrieval.score_rag),
        "label": Kind(icl, _whole, _label_said, retrieval.score_icl),
        "summary": Kind(summaries, _summary, _summary_said, retrieval.score_summary),
        "needle": Kind({"ruler": 13 * 500, "needle": 66}, _phrase, _found, haystack.match_all),
    }


KINDS = _kinds()


def bench_scoring(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds to score options.samples replies, in total and by benchmark.

    "benchmarks" has the number of samples, mean characters, mean score and seconds of each. Seconds
    are wall-clock time and include waiting for Math-Verify's workers. "processor_s" is the CPU time
    of scoring, workers included, which does not depend on other load of the machine.

    Args:
      options: parsed options of "scoring".

    Returns:
      The measurements, JSON-able.
    """
    writer = Writer(options.seed)
    total = sum(sum(kind.questions.values()) for kind in KINDS.values())
    by_name: dict[str, dict[str, float]] = {}
    for kind in KINDS.values():
        for name, questions in kind.questions.items():
            count = max(1, round(options.samples * questions / total))
            by_name[name] = _measure(writer, kind, questions, count)
    before = _of_children()
    math_equal.end_workers()
    processor_s = sum(one.pop("processor_s") for one in by_name.values())
    seconds = sum(one["seconds"] for one in by_name.values())
    samples = sum(one["samples"] for one in by_name.values())
    return {
        "bench": "scoring",
        "samples": samples,
        "seconds": seconds,
        "processor_s": processor_s + _of_children() - before,
        "limit_s": LIMIT_S,
        "samples_per_s": samples / seconds,
        "benchmarks": by_name,
        "processors": os.cpu_count(),
    }


def _measure(writer: Writer, kind: Kind, questions: int, count: int) -> dict[str, float]:
    items = [kind.item(writer) for _ in range(min(questions, count))]
    asked = [items[number % len(items)] for number in range(count)]
    replies = [kind.sample(writer, item, writer.rng.random() < 0.5) for item in asked]
    began, used = time.perf_counter(), time.process_time()
    scores = [kind.score(reply, item) for reply, item in zip(replies, asked, strict=True)]
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return {
        "samples": count,
        "characters": sum(map(len, replies)) / count,
        "score": sum(scores) / count,
        "seconds": seconds,
        "processor_s": used,
    }


def _of_children() -> float:
    """CPU seconds of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
