"""Tests of every parser and rule with hostile texts: always a result, in time, and nothing runs.

parsers.py has the parsers and families of adversarial texts. A public function that is neither
listed there nor here is an error. No test here measures times: inputs are long enough that
superlinear code needs hours, and `linear` interrupts it.
"""

import argparse
import ast
import builtins
import dataclasses
import importlib
import inspect
import itertools
import json
import logging
import os
import pickle
import pkgutil
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from spell_jax import algorithms, evaluation, question_sets, rollout, selfplay
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.data.clusters import Cluster, read_clusters
from spell_jax.data.questions import read_questions
from spell_jax.question_sets import tuning_rows, values
from spell_jax.rollout.judge import Judge
from spell_jax.rollout.replies import Reply
from spell_jax.runtime.endpoint import Endpoint, EndpointConfig
from spell_jax.runtime.files.jsonl import read_records, write_records
from spell_jax.selfplay import cloze, json_records, numbers, rules, statements
from spell_jax.selfplay.memory import Entry, QuestionMemory
from spell_jax.selfplay.parsing import Parsed
from spell_jax.selfplay.verdicts import MALFORMED, UNANSWERED
from tests.selfplay.hostile import INJECTIONS, good_texts, json_value, texts
from tests.selfplay.parsers import FAMILIES, PARSERS

CHUNK = 5000
LIMIT_S = 60  # of processor time; a megabyte needs about 4
SHORT, LONG = range(1), range(1, 40)  # seeds: 10,000 texts, and with the other parsers 200,000
LARGEST = 1_000_000

# Modules in which no function reads model output, and functions of others that do not read it.
NO_READERS = {
    *(
        "algorithms.reconstruction_evaluation",
        "puzzles.pose",
    ),
    *("prompts.Prompts.gap", "puzzles.gap_marker"),
    *("puzzles.chance_rewards", "puzzles.options_of"),
    *("puzzles.dense_reward", "puzzles.sparse_reward"),  # reads the result of parse_order
    *(
        "question_sets.articles",
        "question_sets.cloze",
        "question_sets.evidence_rows",
        "question_sets.long_documents",
        "question_sets.padded",
        "question_sets.published",
        "question_sets.reconstruction_rows",
        "question_sets.rows",
        "question_sets.teacher",
        "question_sets.tiny_world_rows",
        "question_sets.tuning_rows",
        "selfplay.rewards",
        "selfplay.selection",
    ),
    # Functions of benchmarks that read files, make questions, ask and average.
    *("evaluation.answering", "evaluation.generation", "evaluation.runner"),
    "evaluation.endpoint_respondent",
    *("evaluation.harness", "evaluation.harness_model", "evaluation.loglikelihood"),
    *("rollout.judge", "rollout.replies", "rollout.text_model", "rollout.worker", "rollout.flags"),
    *("algorithms.base", "algorithms.registry", "algorithms.algorithm"),
    *("algorithms.dry", "rollout.repliers"),  # they write texts, and ask models
    *("held_out.mean_outcome", "held_out.estimate_outcome", "held_out.to_report"),
    "held_out.accuracy_by_row",
    *(
        "algorithms.annotations",
        "algorithms.answering",
        "algorithms.config",
        "algorithms.episode",
        "algorithms.groups",
        "algorithms.metrics",
        "algorithms.own_reward",
        "algorithms.own_rewards",
        "algorithms.pairs",
        "algorithms.question_sets",
        "algorithms.questioner",
        "algorithms.sections",
        "algorithms.static_algorithm",
    ),
    *(
        "algorithms.evidence_tree",
        "algorithms.longpo",
        "algorithms.qwenlong",
        "algorithms.self_distillation",
        "algorithms.solopo",
    ),
    *("evaluation.registry", "evaluation.base", "evaluation.generated"),
    *("evaluation.own_questions", "evaluation.figures", "evaluation.ruler", "evaluation.sources"),
    *("evaluation.protocol", "evaluation.published"),
    *("evaluation.helmet_labels", "haystack.Names.sample", "haystack.letters"),
    # The judgments are read by functions that are listed.
    *("evaluation.judgments", "evaluation.lengths"),
    *("haystack.Pile.take", "haystack.HaystackSource.noise", "haystack.HaystackSource.pile"),
    *("haystack.HaystackSource.prose", "haystack.fit", "haystack.insert_needles"),
    *("haystack.split_sentences", "math_equal.check_installed", "math_equal.end_workers"),
    *(f"long_documents.load_{name}" for name in ("docmath", "frames", "longbench", "seal")),
    *("long_documents.load_longbench_v2", "long_documents.load_longbench_v2_kind"),
    *("short.load_math", "short.load_mmlu_pro"),
    *(f"retrieval.load_{name}" for name in ("icl", "infbench_sum", "mrcr", "multi_lexsum", "rag")),
    *("given_questions.read_scorable", "given_questions.check_answer"),
    "cloze.make_gap",  # reads by cloze.check_span
    "cloze.occurrences",
    *("rules.check_task", "rules.check_extract", "braces.code_points", "braces.brace_steps"),
    "braces.first_balance",
    "braces.check_depth",  # raises, for the parsers that are listed
    *("numbers.same_number", "numbers.number_text", "prompts.load"),
    *("evidence.normalize_scores", "evidence.total_reward"),
    *("evidence.pairs_in_order", "evidence.best_chosen"),
    # These read answers by functions that are listed.
    *("eapo_evaluation.held_out_evidence", "algorithms.frozen_reader", "algorithms.progress"),
    *("facts.make_fact_rows", "facts.make_questions", "facts.main", "facts.write_files"),
    *("facts.define_flags", "facts.asked_questions", "values.read_number"),
    *("memory.QuestionMemory.get", "memory.QuestionMemory.state_dict", "hops.join_hop"),
    *(f"probes.ProbeSet.{name}" for name in ("measure", "push", "state_dict", "load_state_dict")),
    *("held_out.Evaluation.full", "held_out.Evaluation.quick"),
    # These read answers by functions that are listed.
    *(f"held_out.HeldOut.{name}" for name in ("full", "quick", "report", "summarize")),
    *("held_out.on_questions", "held_out.score_answer"),
    *("spell_evaluation.evaluate_questions", "spell_evaluation.evaluate_tiny_world"),
    *("spell_evaluation.make_questions", "spell_evaluation.mean_of_rows"),
    *(
        f"spell_evaluation.RoleExams.{name}"
        for name in ("make_prompt", "responder", "verifier", "questioner")
    ),
}
# Readers of files and replies, with a test of their own below.
ELSEWHERE = {
    "endpoint.Endpoint.chat",
    "short.score_math",  # in test_short.py: a process for each text is too slow here
    "memory.QuestionMemory.load_state_dict",
}


@pytest.fixture
def linear() -> Iterator[None]:
    """Interrupt code that would take hours.

    The limit is processor time, so that a busy machine changes nothing.
    """

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {LIMIT_S} s: not linear in the length of its text")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_truth(value: object) -> bool:
    return value is True or value is False


def _is_share(value: float) -> bool:
    return 0.0 <= value <= 1.0


def _is_parsed(parsed: Parsed) -> bool:
    (parsed.question + parsed.answer).encode()
    accepted = parsed.status == "accepted"
    return (accepted or parsed.status in ("bad_format", "declined")) and accepted != bool(
        parsed.reason
    )


def _is_number(value: Any) -> bool:
    return value is None or abs(value) <= numbers.LARGEST


def _are_scores(scores: Any) -> bool:
    return scores is None or (len(scores) == 3 and all(1 <= score <= 5 for score in scores))


def _are_texts(parts: Any) -> bool:
    return parts is None or (all(map(_is_text, parts)) and all(parts))


def _is_statement(read: Any) -> bool:
    return bool(read.answer) == (read.form != "unparsed")


EXPECTED: dict[str, Callable[[Any], bool]] = {
    "parsing.parse_question": _is_parsed,
    "json_records.find_record": lambda record: record is None or isinstance(record, dict),
    "evidence.parse_answer": lambda answer: answer is None or all(dataclasses.astuple(answer)),
    "evidence.parse_sections": _are_texts,
    "evidence.named_document": lambda index: index is None or -1 <= index < 9999,
    "evidence.number_documents": lambda texts: len(texts) == 2 and all(map(_is_text, texts)),
    "evidence.write_answer": _is_text,
    "evidence.with_answer_phrase": _is_text,
    "evidence.parse_scores": _are_scores,
    "evidence.parse_best_choice": lambda index: index in (None, 0, 1, 2),
    "evidence.find_scores": lambda places: sorted(places) == list(places),
    "evidence.answer_section": _is_text_or_none,
    "evidence.find_quotes": _are_texts,
    "eapo_evaluation.measure_answer": lambda numbers: all(map(_is_share, numbers.values())),
    "evidence.searchable": _is_text,
    "evidence.verbatim_share": _is_share,
    "evidence.precision_and_recall": lambda pair: all(map(_is_share, pair)),
    "parsing.parse_verdict": (-1, 0, 1).__contains__,
    "parsing.format_choices": _is_text,
    "puzzles.parse_order": lambda order: order.is_permutation <= (len(order.letters) == 4),
    "puzzles.split_paragraphs": lambda spans: all(first < last for first, last in spans),
    "puzzles.make_puzzle": lambda pair: (pair[0] is None) == bool(pair[1]),
    "puzzles.cut_window": lambda window: 0 <= window[0] <= window[1],
    "verdicts.parse_judgement": (-1, 0, 1).__contains__,
    "verdicts.parse_grade": (-1, 0, 1).__contains__,
    "verdicts.parse_letter": (-1, 0, 1, 2).__contains__,
    "endpoint.read_retry_after": lambda seconds: seconds >= 0,
    "haystack.extract": _is_text_or_none,
    "haystack.match_all": _is_share,
    "haystack.match_part": (0.0, 1.0).__contains__,
    "long_documents.score_rule": (0.0, 1.0).__contains__,
    "long_documents.state_section": _is_text,
    "retrieval.score_mrcr": _is_share,
    "retrieval.score_rag": (0.0, 1.0).__contains__,
    "retrieval.score_icl": (0.0, 1.0).__contains__,
    "retrieval.score_summary": _is_share,
    "rouge.rouge_l": _is_share,
    "rouge.rouge_l_recall": _is_share,
    "short.extract_letter": _is_text_or_none,
    "short.score_letter": (0.0, 1.0).__contains__,
    "short.extract_math": _is_text_or_none,
    "rules.visible_text": _is_text_or_none,
    "braces.last_box": _is_text_or_none,
    "rules.extract_answer": _is_text_or_none,
    "rules.find_answer": _is_text_or_none,
    "rules.stated_answer": _is_text_or_none,
    "rules.answer_form": rules.FORMS.__contains__,
    "rules.read_reference": _is_text,
    "given_questions.unscorable": _is_text,
    "given_questions.scores_itself": _is_truth,
    "rules.normalize_answer": _is_text,
    "rules.score": (0.0, 1.0).__contains__,
    "rules.score_answer": (0.0, 1.0).__contains__,
    "rules.is_correct": _is_truth,
    "rules.same_answer": _is_truth,
    "numbers.parse_number": _is_number,
    "numbers.calculate": _is_number,
    "written_numbers.read_number": _is_text_or_none,
    "written_numbers.without_commands": _is_text,
    "written_numbers.with_plain_characters": _is_text,
    "statements.read_leniently": _is_statement,
    "statements.read_strictly": _is_statement,
    "statements.tail_of": _is_text,
    "statements.read_alone": _is_text_or_none,
    "statements.first_line": _is_text,
    "statements.number_sentence": lambda text: len(text) <= statements.LONGEST_SENTENCE,
    "statements.unify": _is_text,
    "cloze.check_span": lambda texts: (
        all(map(_is_text, texts)) and (texts[0] == "") == (texts[1] != "")
    ),
    "cloze.find_clozes": lambda clozes: all(cloze.GAP in gap.question for gap in clozes),
    "wh_questions.ask_sentence": lambda pairs: all(
        question.endswith("?") and _is_text(answer) for question, answer in pairs
    ),
    "cloze.answer_spans": lambda spans: all(map(_is_text, spans)) and all(spans),
    "cloze.hide": lambda texts: all(map(_is_text, texts)),
    "cloze.split_sentences": lambda texts: all(map(_is_text, texts)),
    "rouge.word_f1": _is_share,
    "facts.find_facts": lambda facts: all(fact.cue and fact.value for fact in facts),
    "values.means_the_same": _is_truth,
    "values.other_forms": lambda forms: all(map(_is_text, forms)),
    "hops.split_hops": lambda hops: _is_text(hops[0]) and all(map(_is_text, hops[1])),
    "memory.QuestionMemory.push": _is_truth,
    "probes.ProbeSet.progress": _is_share,
    "spell_evaluation.true_answer": _is_text_or_none,
    "spell_evaluation.is_true": _is_truth,
    "prompts.Prompts.questioner": _is_text,
    "prompts.Prompts.responder": _is_text,
    "prompts.Prompts.verifier": _is_text,
    "prompts.Prompts.answer_first": _is_text,
    "prompts.Prompts.judge": _is_text,
    "prompts.Prompts.judge_grades": _is_text,
    "prompts.Prompts.reasoning_diversity": _is_text,
    "prompts.Prompts.error_kind": _is_text,
    "prompts.Prompts.reconstruction": _is_text,
    "prompts.Prompts.evidence": _is_text,
    "prompts.Prompts.evidence_scores": _is_text,
    "prompts.Prompts.reasoning_scores": _is_text,
    "prompts.Prompts.reranker": _is_text,
}


def feed(text: str) -> None:
    """Pass one text through every parser."""
    for name, parse in PARSERS.items():
        try:
            result = parse(text)
        except TimeoutError:
            raise
        except BaseException as error:
            raise AssertionError(f"{name} raises on {text[:200]!r} ({len(text)})") from error
        assert EXPECTED[name.partition(" ")[0]](result), (name, text[:200], result)


def short_name(module: str) -> str:
    """Return the last part of a module name; "spell_evaluation" for algorithms.spell.evaluation."""
    *_, folder, name = module.split(".")
    return f"{folder}_{name}" if name == "evaluation" else name


def public_functions() -> Iterator[str]:
    """Yield the names of public functions and methods, without the modules in NO_READERS.

    They are "module.function" and "module.Class.method".
    """
    packages = (selfplay, rollout, question_sets, evaluation, algorithms)
    infos = [i for p in packages for i in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")]
    # The only module of its room that reads what a server writes.
    for module_name in [*(i.name for i in infos if not i.ispkg), "spell_jax.runtime.endpoint"]:
        label = short_name(module_name)
        if f"{module_name.split('.')[1]}.{label}" in NO_READERS:
            continue
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.isfunction(value):
                yield f"{label}.{name}"
            elif inspect.isclass(value):
                methods = (key for key, f in vars(value).items() if inspect.isfunction(f))
                yield from (f"{label}.{name}.{m}" for m in methods if m[0] != "_")


def test_every_public_reader_is_covered() -> None:
    covered_names = {name.partition(" ")[0] for name in PARSERS}
    assert covered_names == set(EXPECTED)
    missing = {*public_functions()} - covered_names - ELSEWHERE - NO_READERS
    assert not missing, f"in neither parsers.PARSERS nor NO_READERS: {sorted(missing)}"
    assert {*public_functions()} >= covered_names | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*SHORT, *(pytest.param(seed, marks=pytest.mark.long) for seed in LONG)]
)
def test_parsers_handle_hostile_texts(seed: int) -> None:
    for text in texts(seed, CHUNK):
        feed(text)


def test_fuzz_inputs_reach_all_parser_results() -> None:
    """Mutated texts test little unless the original texts are valid inputs of the parsers."""
    accepted = {
        task
        for text in good_texts()
        for task in ("general_qa", "financial_math", "multiple_choice")
        if PARSERS[f"parsing.parse_question {task}"](text).status == "accepted"
    }
    assert accepted == {"general_qa", "financial_math", "multiple_choice"}
    assert {PARSERS["parsing.parse_verdict"](text) for text in good_texts()} == {-1, 0, 1}
    mutated_texts = [*texts(0, 2000)]
    parse = PARSERS["parsing.parse_question general_qa"]
    assert {parse(text).status for text in mutated_texts} == {"accepted", "bad_format", "declined"}
    assert len({*mutated_texts}) > 1800


@pytest.mark.parametrize("text", ["9" * 5000, "$" + "9" * 5000 + ".5%", "1" + ",000" * 2000])
def test_figures_too_long_for_python_have_other_forms(text: str) -> None:
    assert f"{text}." in values.other_forms(text)


def test_only_the_last_json_blocks_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block that is not JSON costs two errors: the 9,000 that fit into 100 KB took 70 ms."""
    tried = []

    def loads(text: str) -> Any:
        tried.append(text)
        return json.JSONDecoder().decode(text)

    monkeypatch.setattr(json_records, "json", argparse.Namespace(loads=loads))
    good = '```json{"question": "q", "answer": "a"}```'
    wrong = "```json{```"
    parse = PARSERS["parsing.parse_question general_qa"]
    assert parse(good + wrong * 9000).reason == "no_json"
    assert len(tried) == 2 * json_records.MOST_BLOCKS + 2  # and the end of the text: nothing
    assert parse(good + wrong * (json_records.MOST_BLOCKS - 1)).status == "accepted"


@pytest.mark.slow
@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("family", FAMILIES)
def test_parsers_are_linear_on_100_kb_texts(family: str) -> None:
    feed(FAMILIES[family](100_000))


@pytest.mark.slow
@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize(
    "family", ["open braces", "closing braces", "pairs of braces", "deep lists", "deep objects"]
)
def test_parsers_are_linear_on_1_mb_of_braces(family: str) -> None:
    feed(FAMILIES[family](LARGEST))


@pytest.mark.long
@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("family", FAMILIES)
def test_parsers_are_linear_on_1_mb_texts(family: str) -> None:
    feed(FAMILIES[family](LARGEST))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_families_have_the_requested_size(family: str) -> None:
    for size in (5_000, 100_000):
        text = FAMILIES[family](size)
        assert 0.7 * size < len(text.encode("utf-8", "surrogatepass")) <= 1.01 * size


# ----------------------------------------------------------------------------- Nothing is evaluated


class Evaluated(BaseException):
    """Raised if something was run; a BaseException, so that no handler hides it."""


WATCHED = ("exec", "compile", "import", "os.", "subprocess.", "pickle.", "socket.", "open")
_watched: int | None = None  # a thread; threads that earlier tests left may do as they like


def _hook(event: str, _: object) -> None:
    if _watched == threading.get_ident() and event.startswith(WATCHED):
        raise Evaluated(event)


@contextmanager
def nothing_may_run() -> Iterator[None]:
    """Fail on audit events of Python that run code, and on calls of the evaluators."""
    global _watched

    def guarded(evaluator: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            # From Python 3.12 on, json imports its own error class whenever it raises it.
            is_own_error = arguments[:1] == ("json.decoder",)
            if _watched == threading.get_ident() and not is_own_error:
                raise Evaluated("an evaluator was called")
            return evaluator(*arguments, **named)

        return call

    # Patched by hand: pytest's own patching imports while the first patches are in place.
    original_evaluators = [(module, name, getattr(module, name)) for module, name in evaluators()]
    sys.addaudithook(_hook)  # stays forever, inactive
    try:
        for module, name, evaluator in original_evaluators:
            setattr(module, name, guarded(evaluator))
        _watched = threading.get_ident()
        yield
    finally:
        _watched = None
        for module, name, evaluator in original_evaluators:
            setattr(module, name, evaluator)


def evaluators() -> Iterator[tuple[Any, str]]:
    """Yield (module, name) of functions that evaluate text, also in other imported packages."""
    yield from ((builtins, name) for name in ("eval", "exec", "compile", "__import__"))
    yield from ((ast, "literal_eval"), (os, "system"), (os, "popen"))
    yield from ((pickle, "loads"), (subprocess, "Popen"))
    for module, name in (("yaml", "load"), ("sympy", "sympify"), ("numexpr", "evaluate")):
        if module in sys.modules:
            yield sys.modules[module], name


PLACES = (
    "{}",
    "The answer is {}",
    "\\boxed{{{}}}",
    '{{"question": "{}", "answer": "{}"}}',
    '```json\n{{"question": {}, "answer": {}}}\n```',
    '{{"question": "q", "options": {{"A": {}, "B": 1, "C": 2, "D": 3}}, "answer": "A"}}',
    "[[YES]] {}",
    "city of {}",
    "sold in the end {} times\n",
)


def test_parsers_evaluate_no_text() -> None:
    written = [place.format(*(text,) * 2) for place in PLACES for text in INJECTIONS]
    feed(written[0])  # imports of the codecs, reading of the templates
    with nothing_may_run():
        for text in written:
            feed(text)


@pytest.mark.parametrize(
    "run",
    [
        lambda: eval("1"),
        lambda: exec("1"),
        lambda: compile("1", "", "eval"),
        lambda: importlib.import_module("this"),
        lambda: pickle.loads(b"N."),
        lambda: subprocess.run(["true"]),
        lambda: Path("LICENSE").read_text(),
    ],
)
def test_guard_detects_running_code(run: Callable[[], Any]) -> None:
    with pytest.raises(Evaluated), nothing_may_run():
        run()


# ---------------------------------------------------------------------------- Files, replies, state


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def json_lines(seed: int, count: int) -> Iterator[str]:
    """Yield JSON values, records of the readers below with odd fields, and hostile texts."""
    rng = random.Random(seed)
    fields = ("id", "documents", "tasks", "task", "question", "answer", "prompt", "completion")
    for text in texts(seed, count):
        record = {field: rng.choice((json_value(rng, 2), ["a"], text)) for field in fields}
        record |= rng.choice(({}, {"task": "general_qa", "tasks": ["general_qa"]}))
        line = rng.choice((text, json.dumps(record), json.dumps(json_value(rng, 3))))
        yield line.replace("\n", " ")


@pytest.mark.usefixtures("quiet")
def test_line_readers_skip_invalid_lines(tmp_path: Path) -> None:
    lines = [line for line in json_lines(0, 3000) if line.strip(" \t\r\f\v")]
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"\n".join(line.encode("utf-8", "surrogatepass") for line in lines))
    records, skipped = read_records(path, lambda value: value)
    assert len(records) + skipped == len(lines)
    assert len(records) > 500 and skipped > 500
    questions = read_questions(path, "data.validation")
    "".join(q.question + q.answer + "".join(q.documents) for q in questions).encode()
    rows, skipped = tuning_rows.read_rows(str(path))
    assert len(rows) + skipped == len(lines)
    "".join(row.prompt + row.completion for row in rows).encode()
    clusters, report = read_clusters(path)
    assert report.read == len(clusters) and report.skipped.total() + report.read == len(lines)


@pytest.mark.usefixtures("quiet")
def test_judge_handles_arbitrary_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    reply_texts = [*texts(0, 300), "[" * 100_000, '{"choices":' * 100_000, "", "\ufeff{}"]
    bodies = [text.encode("utf-8", "surrogatepass") for text in reply_texts]
    for text in reply_texts[:300]:
        message = rng.choice((text, None, {"content": text}, {"content": json_value(rng, 2)}))
        choices = rng.choice((text, [], [message], [{"message": message}], {"0": message}))
        bodies.append(json.dumps({"choices": choices}).encode())
    bodies.append(b'{"choices": [{"message": {"content": "[[YES]]"}}]}')
    replies = (httpx2.Response(200, content=body) for body in bodies)
    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", lambda *_: next(replies))
    config = EndpointConfig("http://127.0.0.1/", "m", attempts=1, workers=1, key_name="A_KEY")
    judge = Judge(Endpoint(config), lambda question, *_: question)
    verdicts = judge.judge([(str(i), "", "") for i in range(len(bodies))])
    assert {*verdicts} == {UNANSWERED, MALFORMED, 0, 1}
    assert judge.counts["failed"] > 300


@pytest.mark.usefixtures("quiet")
def test_question_memory_restores_its_state_and_rejects_others() -> None:
    rng = random.Random(0)
    full = QuestionMemory(3)
    for text in itertools.islice(texts(0, 200), 50):
        full.push("general_qa", text[:3], Entry((0,), text, text))
    saved = full.state_dict()
    restored_memory = QuestionMemory(3)
    restored_memory.load_state_dict(json.loads(json.dumps(saved)))
    assert restored_memory.state_dict() == saved
    refused = 0
    for _ in range(500):
        state = json_value(rng, 3)
        try:
            restored_memory.load_state_dict(
                {"clusters": rng.choice((state, [state], [{"task": state}]))}
            )
        except ValueError as error:
            refused += 1
            assert "question memory" in str(error)
            assert restored_memory.state_dict() == saved
        else:
            restored_memory.load_state_dict(saved)
    assert refused > 300


def episode(source_texts: Sequence[str]) -> SpellEpisode:
    """Make an episode with all of its texts taken from `source_texts`."""
    reply = Reply([], [], list(source_texts))
    base_episode = SpellEpisode(
        "general_qa",
        Cluster(source_texts[0], tuple(source_texts)),
        (0,),
        (Entry((0,), *source_texts[:2]),),
    )
    written = {
        "reason": source_texts[1],
        "question": source_texts[2],
        "reference": source_texts[3],
        "proposal": reply,
    }
    return dataclasses.replace(
        base_episode, **written, response=reply, predictions=tuple(source_texts)
    )


def test_episode_records_survive_a_json_round_trip(tmp_path: Path) -> None:
    """Written as the trainer does; a lone surrogate is restored too."""
    source_texts = list(texts(1, 2000))
    fuzzed_episodes = (episode(source_texts[i : i + 5]) for i in range(0, len(source_texts), 5))
    records = [fuzzed_episode.record() for fuzzed_episode in fuzzed_episodes]
    write_records(tmp_path / "episodes.jsonl", records)
    back, skipped = read_records(tmp_path / "episodes.jsonl", lambda record: record)
    assert skipped == 0
    # Two adjacent halves are read as the character that they make up.
    assert [_joined(record) for record in back] == [_joined(record) for record in records]


def _joined(record: dict[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
