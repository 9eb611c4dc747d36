"""Tests of answering, from prompts to scored rows, with a scripted sampler."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from spell_jax.evaluation import answering
from spell_jax.evaluation.answering import EvaluationSampling, TokenizedQuestion
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.rollout.judge import Judge
from spell_jax.rollout.replies import Prompt
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.selfplay.verdicts import parse_grade
from tests import evaluating

WORDS = tokenizers.load(TINY_POLICY)


class Parrot(TextModel):
    """Policy that answers G times with the first token of a prompt, and records its requests."""

    def __init__(self):
        self.tokenizer = WORDS
        self.config = PolicyConfig(WORDS.vocab_size, 8, 1, 1, 1, 8, 8, max_positions=64)
        self.requests: list[tuple] = []

    def sample(self, prompts, group, keys, options, prompt_indices):
        for place in prompt_indices:
            self.requests.append(
                (tuple(prompts[place]), tuple(keys[place].tolist()), options[place])
            )
            tokens = [int(prompts[place][0])]
            sample = SimpleNamespace(tokens=tokens, content=tokens, stopped=True)
            yield place, [sample] * group


def load(name: str) -> Benchmark:
    """Load a synthetic benchmark; question ids are the same in all benchmarks."""
    benchmark = evaluating.load(name, "")
    items = [dataclasses.replace(item, id=str(i)) for i, item in enumerate(benchmark.items)]
    return dataclasses.replace(benchmark, items=tuple(items))


def run_parrot(
    names=("text", "number"), limits=(24, 40), sampling=None, finished_keys=()
) -> Parrot:
    policy = Parrot()
    questions = answering.tokenize(policy.encode, list(map(load, names)), max(limits))
    for limit in limits:
        arguments = sampling or EvaluationSampling(2), policy, questions, limit, set(finished_keys)
        policy.rows = [row for _, rows in answering.sample_answers(*arguments) for row in rows]
    return policy


def keys_of(policy: Parrot) -> list[tuple[int, ...]]:
    return [key for _, key, _ in policy.requests]


def test_keys_depend_on_seed_limit_benchmark_and_question():
    all_keys = keys_of(run_parrot())
    assert len(set(all_keys)) == 12  # two limits, two benchmarks, three questions
    assert not set(keys_of(run_parrot(sampling=EvaluationSampling(2, seed=1)))) & set(all_keys)
    assert keys_of(run_parrot(sampling=EvaluationSampling(5))) == all_keys
    # Samples of a question do not depend on the other questions, nor on their order.
    assert keys_of(run_parrot(("number",), (40,))) == all_keys[9:]
    turned = keys_of(run_parrot(("number", "text"), (40, 24)))
    assert turned == [*all_keys[9:], *all_keys[6:9], *all_keys[3:6], *all_keys[:3]]
    finished_keys = [(24, "text", "0"), (40, "number", "2")]
    assert keys_of(run_parrot(finished_keys=finished_keys)) == all_keys[1:11]


def test_rows_record_token_counts_and_truncation():
    policy = run_parrot(("text",), (30,), EvaluationSampling(2, max_tokens=3))
    lengths = [len(WORDS.chat(item.prompt)) for item in evaluating.load("text", "").items]
    assert lengths[0] < 30 < lengths[1]
    assert [row["tokens_in"] for row in policy.rows] == [lengths[0]] * 2 + [30] * 4
    assert [row["truncated"] for row in policy.rows] == [False] * 2 + [True] * 4
    assert {(row["tokens_out"], row["stopped"]) for row in policy.rows} == {(1, True)}
    assert [row["sample"] for row in policy.rows] == [0, 1] * 3
    assert {options.max_tokens for _, _, options in policy.requests} == {3}
    assert {options.max_tokens for _, _, options in run_parrot(("text",)).requests} == {5}
    exact = run_parrot(("text",), (lengths[0],)).rows[0]
    assert exact["tokens_in"] == lengths[0] and not exact["truncated"]


def test_context_is_checked_before_sampling():
    policy = Parrot()
    questions = answering.tokenize(policy.encode, [evaluating.load("text", "")], 59)
    answering.check_context(EvaluationSampling(), policy, questions)  # 59 + 5 = 64 tokens fit
    with pytest.raises(ValueError, match=r"have 65 tokens together.* = 64"):
        answering.check_context(EvaluationSampling(max_tokens=6), policy, questions)


def test_error_names_prompt_rejected_by_the_chat_template():
    def chat(prompt: str) -> list[int]:
        if prompt == benchmark.items[1].prompt:
            raise ValueError("no such turn")
        return [1]

    benchmark, policy = evaluating.load("text", ""), Parrot()
    policy.tokenizer = SimpleNamespace(chat=chat, open_thought=lambda prompt: "")
    with pytest.raises(ValueError, match="text: text-1: no such turn"):
        answering.tokenize(policy.encode, [benchmark], 9)


def test_rows_begin_with_the_thought_that_the_layout_opens():
    policy = Parrot()
    policy.tokenizer = SimpleNamespace(
        chat=lambda prompt: [1], decode=str, open_thought=lambda prompt: "<think>"
    )
    questions = answering.tokenize(policy.encode, [load("text")], 9)
    ((_, (row, *_)), *_) = answering.sample_answers(
        EvaluationSampling(2), policy, questions, 9, set()
    )
    assert row["text"] == "<think>[1]"


def row(name: str, sample: int, limit: int = 24) -> dict:
    return {"max_input": limit, "benchmark": "text", "id": name, "sample": sample, "text": "x"}


def test_only_complete_questions_count_as_finished(tmp_path: Path, caplog):
    path = tmp_path / "samples.jsonl"
    assert answering.read_finished(path, 2) == {}
    rows = [row("a", 0), row("a", 1), row("a", 0, 40), row("b", 1), row("b", 0)]
    rows += [row("c", 0), row("c", 1), row("c", 2), row("d", 0), row("d", 0), row("e", 0)]
    complete_rows = [row("f", 0), row("f", 1)]
    lines = [json.dumps(record) + "\n" for record in (*rows, *complete_rows)]
    path.write_text("".join(lines))
    finished_rows = answering.read_finished(path, 2)
    assert finished_rows == {(24, "text", "a"): rows[:2], (24, "text", "f"): complete_rows}
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:2] + complete_rows
    before = path.stat().st_mtime_ns
    assert answering.read_finished(path, 2) == finished_rows
    assert path.stat().st_mtime_ns == before  # there was nothing to drop
    path.write_text("".join(lines[:2]) + '{"max_input": 24, "ben\n')  # an incomplete line
    assert list(answering.read_finished(path, 2)) == [(24, "text", "a")]
    assert path.read_text() == "".join(lines[:2])


def scored(
    judged: bool,
    by_item: bool = True,
    texts=("yes", "no", ""),
    state=None,
    rule: str = "match_or_judge",
) -> list[tuple]:
    item = BenchmarkItem("i", "p", "which?", ("first", "second"), {"step": 3}, judged=by_item)
    benchmark = Benchmark(
        "b",
        "B",
        (item,),
        extract=lambda text, item: text or None,
        score=lambda text, item: {"yes": 1.0, "no": 0.25}.get(text, 0.0),
        judged=judged,
        state=state,
        max_tokens=5,
        by=("step",),
    )
    question = TokenizedQuestion(benchmark, item, Prompt((0,)), 1)
    ordered = [(question, {"text": text, "rule": 9.0, "final": 9.0}) for text in texts]
    answering.score(ordered, rule)
    return ordered


@pytest.mark.parametrize(
    ("reply", "verdict", "final"),
    [
        ("[[YES]]", 1, 1.0),
        ("[[NO]]", 0, 0.25),
        ("who knows", "malformed", 0.25),
        (None, "unanswered", 0.25),
    ],
)
def test_final_score_is_the_better_of_rule_and_judge(reply, verdict, final):
    judge_prompts = []

    def ask(prompts):
        judge_prompts.extend(prompts)
        return [(index, reply) for index in range(len(prompts))]

    ordered = scored(judged=True)
    judge = Judge(evaluating.ScriptedReplier(ask), lambda *item: "|".join(item))
    answering.ask_judge(ordered, judge)
    assert judge_prompts == ["which?|no|first"]  # correct and empty answers are not judged
    assert [row["judge"] for _, row in ordered] == [None, verdict, None]
    assert [row["unjudged"] for _, row in ordered] == [False, verdict not in (0, 1), False]
    assert [row["final"] for _, row in ordered] == [1.0, final, 0.0]
    assert [row["rule"] for _, row in ordered] == [1.0, 0.25, 0.0]
    assert all(row["by"] == {"step": 3} for _, row in ordered)


@pytest.mark.parametrize(
    ("replies", "finals", "missing"),
    [
        (("C", "A"), [0.0, 1.0, 0.0], [False, False, False]),
        (("A", "B"), [1.0, 0.0, 0.0], [False, False, False]),
        ((None, "who knows"), [1.0, 0.25, 0.0], [True, True, False]),
    ],
)
def test_judge_alone_decides_on_all_stated_answers(replies, finals, missing):
    """The rule accepts "yes" (1.0) and half accepts "no"; the empty answer is not judged."""
    by_answer = dict(zip(("which?|yes|first", "which?|no|first"), replies, strict=True))
    ordered = scored(judged=True, rule="judge")
    judge = Judge(
        evaluating.ScriptedReplier(
            lambda prompts: [(index, by_answer[prompt]) for index, prompt in enumerate(prompts)]
        ),
        lambda *item: "|".join(item),
        parse=parse_grade,
    )
    answering.ask_judge(ordered, judge, "judge")
    assert [row["final"] for _, row in ordered] == finals
    assert [row["unjudged"] for _, row in ordered] == missing
    assert [row["rule"] for _, row in ordered] == [1.0, 0.25, 0.0]


def test_judge_reads_the_words_of_a_benchmark_with_words_of_its_own():
    judge_prompts = []

    def ask(prompts):
        judge_prompts.extend(prompts)
        return [(index, "[[YES]]") for index in range(len(prompts))]

    ordered = scored(judged=True, texts=("no", "$5", ""), state=lambda text, _: f"~{text}" * 2)
    assert [row["unjudged"] for _, row in ordered] == [True] * 3
    assert [row["prediction"] for _, row in ordered] == ["no", "$5", None]
    answering.ask_judge(ordered, Judge(ask, lambda *item: "|".join(item)))
    assert judge_prompts == ["which?|~no~no|first", "which?|~$5~$5|first", "which?|~~|first"]
    silent = scored(judged=True, texts=("no",), state=lambda *_: None)
    assert [row["unjudged"] for _, row in silent] == [False]


def test_judge_is_asked_only_about_judged_questions(caplog):
    def refuse(prompts):
        assert not prompts
        return []

    caplog.set_level(logging.WARNING)
    for judged, by_item in itertools.product((True, False), repeat=2):
        ordered = scored(judged, by_item)
        if not (judged and by_item):
            answering.ask_judge(ordered, Judge(refuse, lambda *item: ""))
        caplog.clear()
        answering.ask_judge(ordered, None)
        assert ("by the rule alone" in caplog.text) == (judged and by_item)
        assert [row["unjudged"] for _, row in ordered] == [False, judged and by_item, False]


def test_fingerprint_covers_prompts_and_ids_but_not_references():
    benchmark = evaluating.load("text", "")
    fingerprints = {answering.fingerprint(benchmark)}
    assert answering.fingerprint(evaluating.load("text", "")) in fingerprints
    first, *other_items = benchmark.items
    for changed in (
        dataclasses.replace(first, prompt="other"),
        dataclasses.replace(first, id="other"),
    ):
        fingerprints.add(
            answering.fingerprint(dataclasses.replace(benchmark, items=(changed, *other_items)))
        )
    fingerprints.add(
        answering.fingerprint(dataclasses.replace(benchmark, items=tuple(other_items)))
    )
    assert len(fingerprints) == 4
    corrected = dataclasses.replace(first, references=("4",))  # its answers stay valid
    same = dataclasses.replace(benchmark, items=(corrected, *other_items))
    assert answering.fingerprint(same) == answering.fingerprint(benchmark)


@pytest.mark.parametrize("field", ["max_input", "benchmark", "id", "sample", "text"])
def test_a_finished_row_with_another_type_is_dropped(tmp_path, caplog, field):
    row = {"max_input": 24, "benchmark": "text", "id": "a", "sample": 0, "text": "x"}
    path = tmp_path / "answers.jsonl"
    odd = [{**row, "id": "b", field: ["a"]}, {k: v for k, v in row.items() if k != field}]
    write_records(path, [row, *odd, 5])
    assert answering.read_finished(path, 1) == {(24, "text", "a"): [row]}
    assert f"{path}:2: skipped ({field} = ['a']" in caplog.text
    assert path.read_text() == json.dumps(row) + "\n"
