"""Benchmark of the self-play parsers and rules on adversarial texts.

1. `PARSERS` has every function that reads a model's text, as a function of one text. A function of
   two texts has one entry for each argument, and one that gives half of the text to each.
2. `FAMILIES` has families of texts, of any length, that are hard for some way of parsing: repeated
   openings, nesting, escapes, endless numbers, and well-formed answers blown up.
3. `bench_parsers` times each parser on each family at four lengths up to 100 KB and fits the
   exponent with which time grows. Linear time has exponent 1; constant costs make it smaller below
   100 KB.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.eapo.evaluation import measure_answer
from spell_jax.algorithms.spell import evaluation as tiny_world
from spell_jax.data.clusters import LETTERS, TASKS, count_words
from spell_jax.data.questions import Question
from spell_jax.evaluation.benchmarks import long_documents, retrieval, short
from spell_jax.evaluation.benchmarks.base import Item
from spell_jax.evaluation.generated import haystack
from spell_jax.selfplay import evidence, judge, memory, numbers, parsing, prompts, puzzles, rules
from spell_jax.warm_start import folder_rows

SIZES = (12_500, 25_000, 50_000, 100_000)  # bytes of UTF-8
LIMIT_S = 0.010  # seconds for one text of SIZES[-1] bytes
# Exempt from the limit: these read a user's documents, in linear time of about 2 us per word.
UNLIMITED = (
    "folder_rows.find_facts",
    "puzzles.split_paragraphs",
    "puzzles.make_puzzle",
    "puzzles.cut_window",
)

Parser = Callable[[str], Any]


def _push(text: str) -> bool:
    """Push a question into a memory that has one, which compares the two."""
    known = memory.QuestionMemory(2)
    half = len(text) // 2
    known.push("general_qa", "a", memory.Entry((0,), text[:half], "1"), 0.5)
    return known.push("general_qa", "a", memory.Entry((0,), text[half:], "1"), 0.5)


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def _in_halves(compare: Callable[[str, str], Any]) -> Parser:
    return lambda text: compare(text[: len(text) // 2], text[len(text) // 2 :])


def _by_task() -> dict[str, Parser]:
    short = dict(zip(TASKS, ("Paris", "12", "B"), strict=True))
    parsers: dict[str, Parser] = {}
    for task in TASKS:
        answer = short[task]
        said = f"The answer is {answer}"
        two = {
            "rules.score": functools.partial(rules.score, task=task),
            "rules.is_correct": functools.partial(rules.is_correct, task=task),
            "rules.same_answer": functools.partial(rules.same_answer, task=task),
        }
        for name, compare in two.items():
            parsers[f"{name} {task} halves"] = _in_halves(compare)
            parsers[f"{name} {task} first"] = lambda text, f=compare, o=answer: f(text, o)
            parsers[f"{name} {task} second"] = lambda text, f=compare, o=said: f(o, text)
        parsers[f"rules.extract_answer {task}"] = functools.partial(rules.extract_answer, task=task)
        parsers[f"rules.find_answer {task}"] = functools.partial(rules.find_answer, task=task)
        parsers[f"parsing.parse_question {task}"] = functools.partial(
            parsing.parse_question, task=task, count_tokens=count_words, distinct_options=True
        )
        parsers[f"spell_evaluation.true_answer {task}"] = lambda text, t=task: (
            tiny_world.true_answer(text, t, ("- Arvo Oslo 34 12 Bela", "- Bela Rome 10 11 Arvo"))
        )
        kind = tiny_world.task_kind(task)
        parsers[f"spell_evaluation.is_true {task}"] = lambda text, k=kind, o=answer: (
            tiny_world.is_true(text, o, k)
        )
    return parsers


@functools.cache
def _full_prompts() -> prompts.Prompts:
    return prompts.load("full")


def _find_record(text: str) -> dict[str, Any] | None:
    try:
        return parsing.find_record(text)
    except RecursionError:  # documented behavior for deep nesting
        return None


def _by_section() -> dict[str, Parser]:
    """Parsers of structured answers and of their scores."""
    documents = evidence.searchable(["Arvo lives in Oslo. " * 100])
    parsers: dict[str, Parser] = {
        "evidence.parse_answer": evidence.parse_answer,
        "evidence.parse_sections": lambda text: evidence.parse_sections(text, 2),
        "evidence.write_answer": lambda text: evidence.write_answer(
            evidence.StructuredAnswer(text, text, text, text)
        ),
        "evidence.parse_scores": lambda text: evidence.parse_scores(text, 3),
        "evidence.find_quotes": evidence.find_quotes,
        "evidence.searchable": lambda text: evidence.searchable([text]),
        "evidence.verbatim_share": lambda text: evidence.verbatim_share(text, documents),
        "evidence.verbatim_share halves": _in_halves(evidence.verbatim_share),
        "evidence.precision_and_recall": lambda text: evidence.precision_and_recall(
            text, ("Arvo lives in Oslo.", "Oslo has a harbour.")
        ),
    }
    for task in TASKS:
        question = Question(task, ("Arvo lives in Oslo. " * 100,), "Where?", "Oslo", ("Arvo",))
        parsers[f"eapo_evaluation.measure_answer {task}"] = functools.partial(
            measure_answer, question=question
        )
        parsers[f"evidence.with_answer_phrase {task}"] = functools.partial(
            evidence.with_answer_phrase, task=task
        )
    return parsers


def _by_prompt() -> dict[str, Parser]:
    """Prompt builders, with the text in all fields at once."""
    parsers: dict[str, Parser] = {
        "prompts.Prompts.verifier": lambda text: _full_prompts().verifier(text, text, text),
        "prompts.Prompts.judge": lambda text: _full_prompts().judge(text, text, text),
        "prompts.Prompts.reconstruction": lambda text: _full_prompts().reconstruction(
            text, dict.fromkeys("AB", text)
        ),
        "prompts.Prompts.evidence": lambda text: _full_prompts().evidence([text], text),
        "prompts.Prompts.evidence_scores": lambda text: _full_prompts().evidence_scores(
            text, [text, text]
        ),
        "prompts.Prompts.reasoning_scores": lambda text: _full_prompts().reasoning_scores(
            text, text, [text, text]
        ),
    }
    for task in TASKS:
        parsers[f"prompts.Prompts.questioner {task}"] = lambda text, t=task: (
            _full_prompts().questioner(t, [text], [memory.Entry((0,), text, text)], "B")
        )
        parsers[f"prompts.Prompts.responder {task}"] = lambda text, t=task: (
            _full_prompts().responder(t, [text], text)
        )
    return parsers


def _by_benchmark() -> dict[str, Parser]:
    """Scoring rules of benchmarks, without short.score_math, which scores in a worker process."""
    item = Item("0", "", "", ("Paris", "B"), {"options": 10, "prefix": ""})
    readers = {
        "haystack.extract": haystack.extract,
        "haystack.match_all": haystack.match_all,
        "haystack.match_part": haystack.match_part,
        "retrieval.score_mrcr": retrieval.score_mrcr,
        "retrieval.score_rag": retrieval.score_rag,
        "retrieval.score_icl": retrieval.score_icl,
        "retrieval.score_summary": retrieval.score_summary,
        "short.extract_letter": short.extract_letter,
        "short.score_letter": short.score_letter,
        "short.extract_math": short.extract_math,
    }
    parsers: dict[str, Parser] = {
        name: functools.partial(read, item=item) for name, read in readers.items()
    }
    for task in TASKS:
        parsers[f"long_documents.score_rule {task}"] = functools.partial(
            long_documents.score_rule, task, item=item
        )
    return parsers | {"retrieval.rouge_l halves": _in_halves(retrieval.rouge_l)}


# Keys: "module.function", then after a blank the variant of the call.
PARSERS: dict[str, Parser] = {
    **_by_task(),
    **_by_section(),
    **_by_prompt(),
    **_by_benchmark(),
    "parsing.find_record": _find_record,
    "parsing.parse_verdict": parsing.parse_verdict,
    "puzzles.parse_order": lambda text: puzzles.parse_order(text, 4),
    "puzzles.split_paragraphs": puzzles.split_paragraphs,
    "puzzles.make_puzzle": lambda text: puzzles.make_puzzle(_random(), text, 2, 1, 4000),
    "puzzles.cut_window": lambda text: puzzles.cut_window(_random(), text, len, len(text) // 2),
    "rules.last_box": rules.last_box,
    "parsing.format_choices": lambda text: parsing.format_choices(text, [text] * len(LETTERS)),
    "rules.visible_text": rules.visible_text,
    "rules.normalize_answer": rules.normalize_answer,
    "numbers.parse_number": numbers.parse_number,
    "judge.parse_judgement": judge.parse_judgement,
    "judge.read_retry_after": judge.read_retry_after,
    "folder_rows.find_facts": lambda text: folder_rows.find_facts([text]),
    "folder_rows.means_the_same halves": _in_halves(folder_rows.means_the_same),
    "folder_rows.other_forms": folder_rows.other_forms,
    "memory.QuestionMemory.push": _push,
}


def _fill(piece: str, size: int) -> str:
    return piece * (size // len(piece.encode("utf-8", "surrogatepass")))


def _around(before: str, piece: str, after: str, size: int) -> str:
    rest = size - len((before + after).encode("utf-8", "surrogatepass"))
    return before + _fill(piece, max(rest, 0)) + after


# Values: (prefix, repeated piece, suffix).
_SHAPES: dict[str, tuple[str, str, str]] = {
    "letters": ("", "a", "!"),
    "capitals": ("", "A", ""),
    "letters after a name": ("sales of ", "a", ""),
    "words": ("", "a ", ""),
    "articles": ("The answer is ", "the an a ", ""),
    "names": ("city of ", "friend of ", "!"),
    "sums": ("", "sales of Arvo plus ", ""),
    "blanks": ("", " ", "x"),
    "blanks after a comma": ('{"a": 1,', " ", "x}"),
    "line feeds": ("", "\n", "."),
    "full stops": ("answer is .", ".", "x"),
    "stars": ("answer is ", "*", "B"),
    "NULs": ("answer is ", "\0", "}"),
    "digits": ("The answer is ", "9", ""),
    "digits in JSON": ('{"question": "q", "answer": ', "9", "}"),
    "digits in brackets": ("The answer is (", "9", ""),
    "figures": ("", "the answer is (=1.,", ""),
    "signs": ("the answer is ", "=", ""),
    "exponents": ("the answer is ", "1e", ""),
    "operators": ("answer is ", "1+", "1"),
    "brackets": ("answer is ", "(", ""),
    "thoughts": ("", "<think>", ""),
    "ends of thoughts": ("", "</think>", ""),
    "fewer than": ("", "<", ""),
    "phrases": ("", "the answer is ", ""),
    "correct phrases": ("", "The correct answer is ", ""),
    "almost phrases": ("", "the answer i ", ""),
    "almost correct": ("", "correct answer is (", ""),
    "boxes": ("", "\\boxed{", ""),
    "boxes of nothing": ("", "\\boxed{}", ""),
    "open braces": ("", "{", ""),
    "closing braces": ("", "}", ""),
    "a box of pairs": ("\\boxed{", "{}", "}"),
    "a box of braces": ("\\boxed{", "{", ""),
    "pairs of braces": ('{"question": [', "{}", "]}"),
    "pairs of braces alone": ("", "{}", ""),
    "fractions": ("\\boxed{", "\\frac{1}{", "}"),
    "quotes": ('{"', '"', "}"),
    "empty strings": ('{"a": [', '"",', '""]}'),
    "escaped quotes": ('{"', '\\"', '"}'),
    "backslashes": ('{"', "\\", '"}'),
    "commas": ("{", ",", "}"),
    "trailing commas": ("{", ",}", "}"),
    "trailing commas in lists": ('{"a": [', "[1,],", "[]]}"),
    "lists": ('{"a": ', "[", "}"),
    "deep lists": ("```json\n", "[", "```"),
    "deep objects": ("", '{"a":', "}"),
    "numbers in JSON": ('{"a": [', "1,", "1]}"),
    "large exponents in JSON": ('{"a": [', "1e999999,", "1]}"),
    "keys": ("{", '"a":1,', '"question":"q"}'),
    "fences": ("", "```json", ""),
    "fenced objects": ("", "```json{}```", ""),
    "fenced wrong objects": ("", "```json{```", ""),
    "fenced strings": ('```json"', "x\\", '"```'),
    "escapes of surrogates": ('{"question": "', "\\ud800", '", "answer": "a"}'),
    "lone surrogates": ('{"question": "', "\ud800", '", "answer": "a"}'),
    "verdicts": ("", "[[YES]]", ""),
    "evidence": ("<analysis>a</analysis><evidence>", "- a b\n", "</evidence>"),
    "sections": ("<analysis>", "<evidence>", "</analysis>"),
    "ends of sections": ("<analysis>a</analysis><evidence>", "</evidence>", ""),
    "ellipses": ("<analysis>a</analysis><evidence>", "a ... ", "</evidence>"),
    "scores": ("1 5\n", "2 4\n", ""),
    "scores in JSON": ('{"scores": [', "1,", "1]}"),
    "options": ("friend of Arvo", "\n(A) Bela", ""),
    "long s": ("the anſwer iſ ", "ſ", ""),
    "umlauts": ('{"question": "q", "answer": "', "ä", '"}'),
    "emoji": ('{"question": "q", "answer": "', "\U0001f642", '"}'),
    "right to left": ("answer is \u202e", "\u202e\u2066", ""),
    "accents": ("answer is A", "\u0301", ""),
    "wide digits": ("answer is ", "９", ""),
    "a long question": ('{"question": "', "what is ", '", "answer": "a"}'),
    "a long answer": ('{"question": "q", "answer": "', "the answer is ", '"}'),
    "a long option": ('{"question": "q", "answer": "A", "options": {"A": "', "x", '"}}'),
    "lines": ("", "sold on day 7 some 3,000 Goods\n", ""),
    "names in capitals": ("said by ", "Anna ", ""),
    "dashes": ("said by A", "-a", "!"),
    "thousands": ("sold in the end ", "1,000", "!"),
}


def _family(shape: tuple[str, str, str], size: int) -> str:
    before, piece, after = shape
    return _around(before, piece, after, size)


def _choice(size: int) -> str:
    """A valid multiple-choice question whose options fill the text."""
    options = {letter: letter + "y " * (size // 8 - 12) for letter in LETTERS}
    return json.dumps({"question": "Which?", "options": options, "answer": "B"})


def _nested(size: int) -> str:
    """As many objects as fit, each nested 400 deep, which the JSON module can still read."""
    deep = '{"a":' * 400 + "1" + "}" * 400
    return _around('{"question": [', deep + ",", "1]}", size)


FAMILIES: dict[str, Callable[[int], str]] = {
    **{name: functools.partial(_family, shape) for name, shape in _SHAPES.items()},
    "a choice": _choice,
    "nested objects": _nested,
}


def bench_parsers(options: argparse.Namespace) -> dict[str, Any]:
    """Time every parser on every family at SIZES bytes, as the best of `options.repeats`.

    Seconds are CPU time of this thread, so other work on the machine does not count. "parsers" has
    the worst family of each parser, with its seconds by size and its exponent (the slope of log
    seconds over log bytes). "worst" is the slowest pair of parser and family at the largest size,
    and "over" lists all pairs above LIMIT_S there; both leave the UNLIMITED parsers out. "steepest"
    has the largest exponent among pairs above 1 ms; below that, constant cost and noise dominate.

    Args:
      options: parsed options of "parsers".

    Returns:
      The measurements, JSON-able.
    """
    rows = [
        {"parser": name, "family": family, **_measure(parse, make, options.repeats)}
        for name, parse in PARSERS.items()
        for family, make in FAMILIES.items()
    ]
    by_parser: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=_last):
        by_parser[row["parser"]] = {key: row[key] for key in ("family", "seconds", "exponent")}
    slow = [row for row in rows if _last(row) > 0.001] or rows
    limited = [row for row in rows if row["parser"] not in UNLIMITED]
    return {
        "bench": "parsers",
        "bytes": SIZES,
        "families": len(FAMILIES),
        "limit_s": LIMIT_S,
        "worst": max(limited, key=_last),
        "steepest": max(slow, key=lambda row: row["exponent"]),
        "over": [row for row in limited if _last(row) > LIMIT_S],
        "parsers": by_parser,
        "processors": os.cpu_count(),
    }


def _last(row: dict[str, Any]) -> float:
    return row["seconds"][-1]


def _measure(parse: Parser, make: Callable[[int], str], repeats: int) -> dict[str, Any]:
    seconds = [_time(parse, make(size), repeats) for size in SIZES]
    return {"seconds": seconds, "exponent": exponent(SIZES, seconds)}


def _time(parse: Parser, text: str, repeats: int) -> float:
    best = math.inf
    for _ in range(repeats):
        clock = time.thread_time()
        parse(text)
        best = min(best, time.thread_time() - clock)
    return best


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Least-squares slope of log seconds over log sizes."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
