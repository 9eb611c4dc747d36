"""Parsers and rules that read a model's text, and families of adversarial texts for them.

1. `PARSERS` has every function that reads a model's text, as a function of one text. A function of
   two texts has one entry for each argument, and one that gives half of the text to each.
2. `FAMILIES` has families of texts, of any length, that are hard for some way of parsing: repeated
   openings, nesting, escapes, endless numbers, and well-formed answers blown up.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spell_jax.algorithms.eapo.evaluation import measure_answer
from spell_jax.algorithms.spell import evaluation as tiny_world
from spell_jax.data.clusters import LETTERS, TASKS, count_words
from spell_jax.data.questions import Question
from spell_jax.evaluation.benchmarks import long_documents, retrieval, short
from spell_jax.evaluation.benchmarks.base import BenchmarkItem
from spell_jax.evaluation.generated import haystack
from spell_jax.question_sets import facts, values
from spell_jax.runtime import endpoint
from spell_jax.selfplay import (
    braces,
    cloze,
    evidence,
    given_questions,
    hops,
    json_records,
    memory,
    numbers,
    parsing,
    probes,
    prompts,
    puzzles,
    rouge,
    rules,
    statements,
    verdicts,
    wh_questions,
    written_numbers,
)

Parser = Callable[[str], Any]


# ---------------------------------------------------------------------------------------- Parsers


def _name(function: Callable[..., Any]) -> str:
    """Return "MODULE.QUALNAME" of a function; module `evaluation` becomes FOLDER_evaluation."""
    *_, folder, module = function.__module__.split(".")
    module = f"{folder}_{module}" if module == "evaluation" else module
    return f"{module}.{function.__qualname__}"


def _halves(compare: Callable[..., Any]) -> Parser:
    return lambda text: compare(text[: len(text) // 2], text[len(text) // 2 :])


def _push(text: str) -> bool:
    """Push a question into a memory that has one question; the memory compares the two."""
    question_memory, half = memory.QuestionMemory(2), len(text) // 2
    for part in (text[:half], text[half:]):
        pushed = question_memory.push("general_qa", "a", memory.Entry((0,), part, "1"))
    return pushed


def _find_record(text: str) -> dict[str, Any] | None:
    try:
        return json_records.find_record(text)
    except RecursionError:  # documented behavior for deep nesting
        return None


def _task_parsers(task: str, answer: str) -> Iterator[tuple[Callable[..., Any], str, Parser]]:
    """Yield (function, variant, call) of the functions that depend on the task."""
    part = functools.partial
    sentence = f"The answer is {answer}"
    for extract, compare in itertools.product(
        rules.EXTRACTS, (rules.score, rules.score_answer, rules.is_correct, rules.same_answer)
    ):
        bound, variant = part(compare, task=task, extract=extract), f"{task} {extract}"
        yield compare, f"{variant} halves", _halves(bound)
        yield compare, f"{variant} first", lambda text, f=bound: f(text, answer)
        yield compare, f"{variant} second", lambda text, f=bound: f(sentence, text)
    for extract, read in itertools.product(
        rules.EXTRACTS,
        (
            *(rules.extract_answer, rules.find_answer, rules.answer_form, rules.stated_answer),
            *(rules.read_reference, given_questions.unscorable),
        ),
    ):
        yield read, f"{task} {extract}", part(read, task=task, extract=extract)
        yield (
            given_questions.unscorable,
            f"{task} {extract}",
            part(given_questions.unscorable, task=task, extract=extract),
        )
    question = Question(task, ("Arvo lives in Oslo. " * 100,), "Where?", "Oslo", ("Arvo",))
    lines = ("- Arvo Oslo 34 12 Bela", "- Bela Rome 10 11 Arvo")
    full = prompts.load("full")
    questioner, responder = prompts.Prompts.questioner, prompts.Prompts.responder
    calls: dict[Callable[..., Any], Parser] = {
        given_questions.scores_itself: part(given_questions.scores_itself, task=task),
        statements.read_leniently: part(statements.read_leniently, task=task),
        statements.read_strictly: part(statements.read_strictly, task=task),
        statements.tail_of: part(statements.tail_of, task=task),
        statements.read_alone: part(statements.read_alone, task=task),
        parsing.parse_question: part(
            parsing.parse_question, task=task, count_tokens=count_words, distinct_options=True
        ),
        tiny_world.true_answer: lambda text: tiny_world.true_answer(text, task, lines),
        tiny_world.is_true: lambda text: tiny_world.is_true(text, answer, task),
        measure_answer: part(measure_answer, question=question, extract="lenient"),
        evidence.with_answer_phrase: part(evidence.with_answer_phrase, task=task),
        questioner: lambda text: full.questioner(
            task, [text], [memory.Entry((0,), text, text)], "B"
        ),
        responder: lambda text: full.responder(task, [text], text),
        long_documents.state_section: part(long_documents.state_section, task),
        long_documents.score_rule: part(long_documents.score_rule, task, item=ITEM),
    }
    for function, call in calls.items():
        yield function, task, call


ITEM = BenchmarkItem("0", "", "", ("Paris", "B"), {"options": 10, "prefix": ""})
# Read one text.
_ONE = (
    *(evidence.parse_answer, evidence.find_quotes, evidence.named_document),
    *(parsing.parse_verdict, braces.last_box),
    *(rules.visible_text, rules.normalize_answer, numbers.parse_number, verdicts.parse_judgement),
    *(
        verdicts.parse_grade,
        evidence.answer_section,
        numbers.calculate,
        written_numbers.read_number,
    ),
    *(written_numbers.without_commands, written_numbers.with_plain_characters),
    *(statements.first_line, statements.unify, statements.number_sentence),
    *(
        cloze.answer_spans,
        cloze.split_sentences,
        endpoint.read_retry_after,
        puzzles.split_paragraphs,
        values.other_forms,
    ),
)
# Read a text and an item of a benchmark. short.score_math is missing: it scores in a process.
_OF_ITEM = (
    *(haystack.extract, haystack.match_all, haystack.match_part, retrieval.score_mrcr),
    *(retrieval.score_rag, retrieval.score_icl, retrieval.score_summary, short.extract_letter),
    *(short.score_letter, short.extract_math),
)
_COMPARE = (evidence.verbatim_share, rouge.rouge_l, rouge.rouge_l_recall, rouge.word_f1)
_COMPARE += (values.means_the_same,)


def _progress(text: str) -> float:
    probe_set = probes.ProbeSet(1)
    probe_set.push(
        [probes.Probe("general_qa", "0", text, text, 0.0, 1.0)], np.random.default_rng(0)
    )
    return probe_set.progress("general_qa", text)


def _other_parsers() -> dict[Callable[..., Any], Parser]:
    """Map functions with other arguments to calls; prompt builders get the text in all fields."""
    documents, full = evidence.searchable(["Arvo lives in Oslo. " * 100]), prompts.load("full")
    documents, rng = ("Arvo lives in Oslo.", "Oslo has a harbour."), np.random.default_rng
    kind = prompts.Prompts
    return {
        memory.QuestionMemory.push: _push,
        hops.split_hops: lambda t: hops.split_hops(t, [memory.Entry((0,), t[-len(t) // 2 :], t)]),
        probes.ProbeSet.progress: _progress,
        json_records.find_record: _find_record,
        parsing.format_choices: lambda t: parsing.format_choices(t, [t] * len(LETTERS)),
        evidence.parse_sections: lambda t: evidence.parse_sections(t, 2),
        evidence.number_documents: lambda t: evidence.number_documents([t, t]),
        evidence.write_answer: lambda t: evidence.write_answer(
            evidence.StructuredAnswer(t, t, t, t)
        ),
        evidence.parse_scores: lambda t: evidence.parse_scores(t, 3),
        evidence.parse_best_choice: lambda t: evidence.parse_best_choice(t, 3),
        evidence.find_scores: lambda t: evidence.find_scores(t, (4, 2, 5)),
        evidence.searchable: lambda t: evidence.searchable([t]),
        evidence.verbatim_share: lambda t: evidence.verbatim_share(t, documents),
        evidence.precision_and_recall: lambda t: evidence.precision_and_recall(t, documents),
        puzzles.parse_order: lambda t: puzzles.parse_order(t, 4),
        puzzles.make_puzzle: lambda t: puzzles.make_puzzle(rng(0), t, 2, 1, 4000),
        puzzles.cut_window: lambda t: puzzles.cut_window(rng(0), t, len, len(t) // 2),
        cloze.find_clozes: lambda t: list(cloze.find_clozes([t])),
        wh_questions.ask_sentence: lambda t: list(wh_questions.ask_sentence(t)),
        kind.answer_first: lambda t: full.answer_first(t),
        cloze.hide: lambda t: cloze.hide(documents, [t or "."]),
        cloze.check_span: lambda t: cloze.check_span(t, t[: len(t) // 2], [t], documents),
        facts.find_facts: lambda t: facts.find_facts([t]),
        kind.verifier: lambda t: full.verifier(t, t, t),
        kind.judge: lambda t: full.judge(t, t, t),
        kind.judge_grades: lambda t: full.judge_grades(t, t, t),
        kind.reasoning_diversity: lambda t: full.reasoning_diversity(t, [t, t]),
        kind.error_kind: lambda t: full.error_kind(t, t, t),
        verdicts.parse_letter: lambda t: verdicts.parse_letter(t, "ABC"),
        kind.reconstruction: lambda t: full.reconstruction(t, dict.fromkeys("AB", t)),
        kind.evidence: lambda t: full.evidence([t], t),
        kind.evidence_scores: lambda t: full.evidence_scores(t, [t, t]),
        kind.reranker: lambda t: full.reranker(t, t),
        kind.reasoning_scores: lambda t: full.reasoning_scores(t, t, [t, t]),
    }


# Keys: "module.function", then after a blank the variant of the call.
PARSERS: dict[str, Parser] = {
    **{
        f"{_name(function)} {variant}": call
        for task, answer in zip(TASKS, ("Paris", "12", "B", "Paris"), strict=True)
        for function, variant, call in _task_parsers(task, answer)
    },
    **{_name(read): read for read in _ONE},
    **{_name(read): functools.partial(read, item=ITEM) for read in _OF_ITEM},
    **{f"{_name(compare)} halves": _halves(compare) for compare in _COMPARE},
    **{_name(function): call for function, call in _other_parsers().items()},
}


# --------------------------------------------------------------------------------------- Families


def _around(before: str, piece: str, after: str, size: int) -> str:
    """Return a text of at most about `size` bytes: before, as many pieces as fit, after."""
    frame_size, length = (len(s.encode("utf-8", "surrogatepass")) for s in (before + after, piece))
    return before + piece * (max(size - frame_size, 0) // length) + after


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


def _choice(size: int) -> str:
    """Make a valid multiple-choice question with options that fill about `size` bytes."""
    options = {letter: letter + "y " * (size // 8 - 12) for letter in LETTERS}
    return json.dumps({"question": "Which?", "options": options, "answer": "B"})


# Objects nested 400 deep can still be read by the JSON module.
_SHAPES["nested objects"] = ('{"question": [', '{"a":' * 400 + "1" + "}" * 400 + ",", "1]}")
FAMILIES: dict[str, Callable[[int], str]] = {
    **{name: functools.partial(_around, *shape) for name, shape in _SHAPES.items()},
    "a choice": _choice,
}
