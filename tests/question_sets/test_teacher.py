"""Tests of question sets from a teacher: a scripted local server, and the tiny policy."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from spell_jax.algorithms.rlvr.algorithm import make_rlvr
from spell_jax.algorithms.rlvr.config import RlvrConfig
from spell_jax.configs import tiny
from spell_jax.data import tfds_sets
from spell_jax.data.clusters import PAPER_TASKS, Cluster, in_memory
from spell_jax.data.questions import read_questions
from spell_jax.data.stream import TaskStream
from spell_jax.policy.model import TINY_POLICY
from spell_jax.question_sets import teacher as rlvr_questions
from spell_jax.question_sets.teacher import Settings, Teacher
from spell_jax.rollout.judge import Judge
from spell_jax.rollout.repliers import PolicyReplier
from spell_jax.rollout.text_model import SIZES, TextModel
from spell_jax.runtime import fault_injection
from spell_jax.runtime.endpoint import Endpoint, EndpointConfig
from spell_jax.sampler.config import SamplerConfig
from spell_jax.selfplay import prompts as prompt_sets
from tests import noise
from tests.algorithms.scripted import ScriptedModels, make_config, make_context
from tests.rollout.test_judge import Answer, Server, completion, server

__all__ = ["server"]  # the fixture
COMPACT = prompt_sets.load("compact")
QA, MATH, CHOICE = PAPER_TASKS
REFUSED: Answer = (400, "")

# Cluster -> its task and the outcome of its one attempt.
ENDS = {
    0: (QA, "kept"),
    1: (QA, "no_json"),
    2: (QA, "nothing_to_ask"),
    3: (QA, "no_answer_stated"),
    4: (QA, "disagreed"),
    5: (QA, "judge_malformed"),
    6: (QA, "judge_unanswered"),
    7: (QA, "no_reply_of_questioner"),
    8: (QA, "no_reply_of_responder"),
    9: (QA, "kept"),  # worded differently: the rule alone would say no
    10: (CHOICE, "kept"),
    11: (CHOICE, "disagreed"),
    12: (MATH, "kept"),
    13: (MATH, "zero_answer"),
    14: (CHOICE, "same_options"),
}
KEPT = [at for at, (_, end) in ENDS.items() if end == "kept"]


def reference(at: int) -> str:
    return {QA: f"alpha{at}", MATH: str(10 * (at != 13)), CHOICE: "B"}[ENDS[at][0]]


def stated(at: int) -> str:
    return {3: "", 4: "beta", 9: "the first letter", 11: "C"}.get(at) or reference(at)


def respond(prompt: str, times: int) -> Answer:
    """Reply as the teacher in both turns, and as the judge."""
    if "Q" not in prompt.partition("alpha")[0] and "ask" in prompt:
        return propose(int(re.findall(r"d(\d+)\.", prompt)[0]))
    at = int(re.findall(r"Q(\d+)", prompt)[0])
    if f"d{at}.0 text" in prompt:
        if at == 8:
            return REFUSED
        return completion("no idea" if at == 3 else f"<think>hm</think>The answer is {stated(at)}")
    if at == 6:
        return REFUSED
    return completion({4: "[[NO]]", 5: "perhaps"}.get(at, "[[YES]]"))


def propose(at: int) -> Answer:
    if at == 7:
        return REFUSED
    if at == 2:
        return completion('{"Empty": "there is nothing"}')
    record = {"question": f"Q{at} what?", "answer": reference(at)}
    if at == 0:
        record["answer"] = f" {reference(at)} "
    if ENDS[at][0] == CHOICE:
        record["options"] = {x: "same" if at == 14 else f"option {x}" for x in "ABCD"}
    return completion("no" if at == 1 else f"```json\n{json.dumps(record)}\n```")


def clusters(ends=ENDS) -> list[Cluster]:
    return [
        Cluster(f"c{at}", tuple(f"d{at}.{i} text" for i in range(4)), (task,))
        for at, (task, _) in ends.items()
    ]


def stream(ends=ENDS) -> TaskStream:
    return TaskStream(in_memory(clusters(ends)), PAPER_TASKS, (1.0,) * 3, seed=0)


def build(
    out: pathlib.Path, server: Server, ends=ENDS, agreement: str = "judge", name="t", **changes
):
    """Run a build with a server, as from the command line."""

    def endpoint(model: str) -> Endpoint:
        limits = {"attempts": 1, "workers": 1, "timeout_s": 60.0}
        return Endpoint(EndpointConfig(server.url, model, **limits, key_name="A_KEY"))

    defaults = {"attempts": len(ENDS), "batch": len(ENDS), "documents": 2, "prompt_set": "compact"}
    settings = Settings(**(defaults | {"agreement": agreement} | changes))
    ask = endpoint("teacher")
    teacher = Teacher(lambda prompts, numbers: ask(prompts), name, out / "teacher.jsonl")
    judge = None
    if agreement == "judge":
        words = prompt_sets.load("full").judge
        judge = Judge(endpoint("judge"), words, "judge", cache_file=out / "judge.jsonl")
    count = lambda text: len(text.split())  # noqa: E731
    return rlvr_questions.build_questions(settings, stream(ends), count, teacher, judge, out)


def asked_of(server: Server, model: str) -> list[str]:
    sent = [body for body, _ in server.requests if body["model"] == model]
    return [body["messages"][0]["content"] for body in sent]


def files(out: pathlib.Path) -> list[bytes]:
    return [(out / name).read_bytes() for name in ("questions.jsonl", "summary.json")]


@pytest.fixture(autouse=True)
def _script(server, monkeypatch):
    server.respond = respond
    monkeypatch.setattr(fault_injection, "_passed", collections.Counter())
    monkeypatch.delenv(fault_injection.VARIABLE, raising=False)


def test_agreed_questions_are_kept_and_others_counted_by_reason(server, tmp_path):
    summary = build(tmp_path, server)
    assert summary["attempts"] == len(ENDS) and summary["kept"] == len(KEPT) == 4
    counted = collections.Counter(end for _, end in ENDS.values())
    del counted["kept"]
    assert summary["left_out"] == counted
    assert summary["tasks"] == {
        QA: {"attempts": 10, "kept": 2},
        MATH: {"attempts": 2, "kept": 1},
        CHOICE: {"attempts": 3, "kept": 1},
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    questions = read_questions(tmp_path / "questions.jsonl", "x")
    by_document = {q.documents[0]: q for q in questions}
    assert sorted(by_document) == sorted(f"d{at}.0 text" for at in KEPT)
    for at in KEPT:
        question = by_document[f"d{at}.0 text"]
        assert question.documents == clusters()[at].documents
        assert (question.task, question.answer) == (ENDS[at][0], reference(at))
        assert f"Q{at} what?" in question.question and question.evidence == ()
    assert "(B) option B" in by_document["d10.0 text"].question
    assert not list(tmp_path.glob("*.part"))


def test_teacher_and_judge_get_the_expected_prompts(server, tmp_path):
    build(tmp_path, server)
    taught, judged = asked_of(server, "teacher"), asked_of(server, "judge")
    answered = [at for at, (_, end) in ENDS.items() if end in {*ends_after_writing()}]
    written = [prompt for prompt in taught if "ask" in prompt]
    assert len(written) == len(ENDS) and len(taught) == len(ENDS) + len(answered)
    shown = [sorted({*re.findall(r"d\d+\.(\d)", prompt)}) for prompt in written]
    assert all(len(numbers) == 2 for numbers in shown) and len({*map(tuple, shown)}) > 2
    assert {p for p in taught if "ask" not in p} == {
        COMPACT.responder(c.tasks[0], c.documents, question_of(at))
        for at, c in enumerate(clusters())
        if at in answered
    }
    # Letters need no judge; missing answers are not judged.
    assert sorted(int(re.findall(r"Q(\d+)", p)[0]) for p in judged) == [0, 4, 5, 6, 9, 12]


def ends_after_writing() -> set[str]:
    """Return the outcomes of attempts that put a question to the teacher."""
    before = {"no_json", "nothing_to_ask", "no_reply_of_questioner", "zero_answer", "same_options"}
    return {end for _, end in ENDS.values()} - before


def question_of(at: int) -> str:
    if ENDS[at][0] != CHOICE:
        return f"Q{at} what?"
    options = "".join(f"({x}) option {x}\n" for x in "ABCD")
    return f"What is the correct answer to this question: Q{at} what?\nChoices:\n{options}"


def test_rule_can_decide_agreement_instead_of_the_judge(server, tmp_path):
    summary = build(tmp_path, server, agreement="rule")
    assert asked_of(server, "judge") == []
    # 5 and 6 agree, and 9 is worded differently.
    assert summary["kept"] == 5 and summary["left_out"]["disagreed"] == 3
    documents = {q.documents[0] for q in read_questions(tmp_path / "questions.jsonl", "x")}
    assert documents == {f"d{at}.0 text" for at in (0, 5, 6, 10, 12)}


def test_repeated_question_is_kept_once(server, tmp_path):
    summary = build(tmp_path, server, attempts=3 * len(ENDS))
    assert summary["kept"] == len(KEPT)
    repeated_count = 2 * sum(end in ends_after_writing() for _, end in ENDS.values())
    assert summary["left_out"]["asked_before"] == repeated_count
    assert summary["left_out"]["no_json"] == 3
    assert len(read_questions(tmp_path / "questions.jsonl", "x")) == len(KEPT)


@pytest.mark.parametrize("fault", ["taught:1", "taught:9", "taught:18", "judged:2"])
@pytest.mark.parametrize("batch", [4, 100])
def test_interrupted_build_resumes_without_repeating_requests(
    server, tmp_path, monkeypatch, fault, batch
):
    build(tmp_path / "whole", server, batch=batch)
    expected_requests = list(map(json.dumps, server.requests))
    server.requests.clear()
    monkeypatch.setenv(fault_injection.VARIABLE, f"{fault}:raise")
    out = tmp_path / "out"
    with pytest.raises(fault_injection.Fault):
        build(out, server, batch=batch)
    assert not (out / "questions.jsonl").exists()
    replies = sum(file.read_text().count("\n") for file in out.glob("*.jsonl"))
    interrupted = len(server.requests)
    monkeypatch.delenv(fault_injection.VARIABLE)
    build(out, server, batch=batch)
    assert files(out) == files(tmp_path / "whole")
    assert set(map(json.dumps, server.requests)) == set(expected_requests)
    # Rejected requests, and replies that had come but were not yet saved, are asked for again.
    assert replies > 0 and len(server.requests) - interrupted == len(expected_requests) - replies


def test_second_build_repeats_only_unanswered_requests(server, tmp_path):
    build(tmp_path, server)
    before = files(tmp_path)
    server.requests.clear()
    assert build(tmp_path, server)["kept"] == len(KEPT)
    assert len(asked_of(server, "teacher")) == 2 and len(asked_of(server, "judge")) == 1
    assert files(tmp_path) == before
    server.requests.clear()
    server.respond = lambda prompt, _: (
        completion("[[YES]]") if "Q6" in prompt else respond(prompt, 1)
    )
    assert build(tmp_path, server)["kept"] == len(KEPT) + 1  # the judge answers now


def test_more_attempts_extend_a_finished_build(server, tmp_path):
    build(tmp_path, server, attempts=7, batch=4)
    first = (tmp_path / "questions.jsonl").read_text()
    count = len(server.requests)
    summary = build(tmp_path, server, attempts=30, batch=4)
    assert summary["attempts"] == 30
    assert (tmp_path / "questions.jsonl").read_text().startswith(first) and first
    build(tmp_path / "at once", server, attempts=30, batch=4)
    assert files(tmp_path) == files(tmp_path / "at once")
    assert count < len(server.requests)


def test_more_attempts_do_not_change_earlier_ones(tmp_path):
    def dealt(attempts: int) -> list[tuple]:
        settings = Settings(attempts, batch=4, agreement="rule")
        teacher = Teacher(lambda *_: (), "t", tmp_path / "t")
        build, pairs = rlvr_questions.Build(settings, COMPACT, len, teacher, None), stream()
        built_attempts = [
            a for first in range(0, attempts, 4) for a in build.next_batch(pairs, first)
        ]
        assert [a.number for a in built_attempts] == list(range(attempts))
        return [(a.cluster.id, a.shown, a.letter) for a in built_attempts]

    all_attempts = dealt(30)
    assert all(dealt(attempts) == all_attempts[:attempts] for attempts in range(1, 30))
    letters = {letter for _, _, letter in all_attempts}
    assert letters == {None, "A", "B", "C", "D"}


def test_replies_are_cached_per_attempt_not_per_prompt(server, tmp_path):
    """A cluster that is shown completely gives the same prompt in each attempt."""

    def vary(prompt: str, times: int) -> Answer:
        status, text, *_ = respond(prompt, times)
        return status, text.replace("what?", "what?" if times == 1 else f"who {times}?")

    server.respond = vary
    only = {0: ENDS[0]}
    summary = build(tmp_path, server, only, attempts=3, batch=3, documents=9)
    assert summary["kept"] == 3
    questions = {q.question for q in read_questions(tmp_path / "questions.jsonl", "x")}
    assert questions == {"Q0 what?", "Q0 who 2?", "Q0 who 3?"}
    before = files(tmp_path)
    build(tmp_path, server, only, attempts=3, batch=3, documents=9)
    assert files(tmp_path) == before


@pytest.mark.slow
def test_cached_replies_about_changed_documents_are_not_used(server, tmp_path, monkeypatch):
    build(tmp_path, server)
    server.requests.clear()
    newer = [
        dataclasses.replace(cluster, documents=tuple(f"{text} anew" for text in cluster.documents))
        for cluster in clusters()
    ]
    monkeypatch.setitem(globals(), "clusters", lambda ends: newer)
    assert build(tmp_path, server)["kept"] == len(KEPT)
    assert len(asked_of(server, "teacher")) > len(ENDS)
    questions = read_questions(tmp_path / "questions.jsonl", "x")
    assert all(text.endswith("anew") for q in questions for text in q.documents)


def test_build_with_other_settings_needs_another_folder(server, tmp_path):
    build(tmp_path, server)
    count = len(server.requests)
    for changes in ({"documents": 3}, {"seed": 1}, {"agreement": "rule"}, {"name": "other"}):
        with pytest.raises(ValueError, match=r"use the same value or another --out"):
            build(tmp_path, server, **changes)
    fewer = {at: end for at, end in ENDS.items() if at}
    with pytest.raises(ValueError, match=r"^data = "):
        build(tmp_path, server, fewer)
    assert len(server.requests) == count


def test_damaged_cached_replies_are_requested_again(server, tmp_path, caplog):
    build(tmp_path, server)
    before = files(tmp_path)
    path = tmp_path / "teacher.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b'{"key": 1, "reply": "x"}\n', *lines[1:-1], lines[-1][:20]]))
    server.requests.clear()
    build(tmp_path, server)
    assert files(tmp_path) == before
    assert len(asked_of(server, "teacher")) == 2 + 2
    assert caplog.text.count("skipped") == 2


def test_built_question_set_can_be_trained_on(server, tmp_path):
    build(tmp_path, server)
    questions = read_questions(tmp_path / "questions.jsonl", "x")
    config = make_config(RlvrConfig, responder__reward="rule", generation_batch=4, group_size=2)
    algorithm = make_rlvr(config, make_context(prompts=COMPACT, questions=lambda: questions))

    def write(role, prompt, sibling, model):
        at = int(re.findall(r"Q(\d+)", prompt)[0])
        return f"The answer is {reference(at)}" if sibling else "no idea"

    episodes = algorithm.rollout(ScriptedModels(write), (0, 1), 1)
    assert [e.scores for e in episodes] == [(0.0, 1.0)] * 4
    assert len(algorithm.groups(episodes, (0, 1))[0]) == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attempts": 0}, "attempts = 0: must be at least 1"),
        ({"batch": 0}, "batch = 0"),
        ({"documents": 0}, "documents = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"agreement": "both"}, "agreement = 'both'"),
    ],
)
def test_invalid_setting_is_named_in_the_error(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**({"attempts": 1} | changes))


def test_judge_must_match_the_agreement_setting(tmp_path):
    for agreement, judge in (("judge", None), ("rule", Judge(lambda prompts: (), str))):
        settings = Settings(1, agreement=agreement)
        teacher = Teacher(lambda *_: (), "t", tmp_path / "t")
        with pytest.raises(ValueError, match=f"agreement = '{agreement}'"):
            rlvr_questions.build_questions(
                settings, stream(), len, teacher, judge, tmp_path / "out"
            )
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------- A policy as teacher


@pytest.mark.slow
def test_policy_teacher_replies_depend_only_on_attempt_and_turn(tmp_path, monkeypatch):
    noise.use_one_device(monkeypatch)
    noise.finish_replies(monkeypatch)
    sizes = SamplerConfig(kv_cache_tokens=512, slots=8, prefill_tokens=128, page_size=16)
    policy = TextModel(noise.save_policy(tmp_path / "noise"), sizes=sizes)
    ask = PolicyReplier(policy, 6, 1.0, name="teacher")
    prompts = ["- Arvo Oslo 34 12 Bela\nask general"] * 4
    numbers = [(0, 0), (1, 0), (0, 1), (2, 0)]
    replies = dict(ask(prompts, numbers))
    assert len({*replies.values()}) == 4
    assert policy._params is None  # the weights are freed, so that a judge has the memory
    other_seed_teacher = dataclasses.replace(ask, seed=1)
    assert {*dict(other_seed_teacher(prompts, numbers)).values()}.isdisjoint(replies.values())
    other_replies = dict(ask([prompts[0] * 200, *prompts[1:3]], [(7, 0), *numbers[1:3]]))
    assert other_replies == {0: None, 1: replies[1], 2: replies[2]}  # the first is over the context
    with pytest.raises(ValueError, match=r"teacher_max_tokens = 256: .* = 256"):
        PolicyReplier(policy, 256, 1.0, name="teacher")


# ------------------------------------------------------------------------------------------ Program


ONE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "spell_jax.question_sets.teacher", *arguments]
    process_environment = os.environ | ONE | environment
    return subprocess.run(
        command, capture_output=True, text=True, env=process_environment, check=False
    )


@pytest.mark.slow
def test_command_line_with_an_endpoint_as_teacher(server, tmp_path):
    lines = [
        json.dumps({"id": c.id, "documents": c.documents, "tasks": c.tasks}) + "\n"
        for c in clusters()
    ]
    (tmp_path / "clusters.jsonl").write_text("".join(lines))
    arguments = [f"--source={tmp_path}/clusters.jsonl", f"--out={tmp_path}/out", "--held_out=0"]
    arguments += [f"--attempts={len(ENDS)}", "--prompt_set=compact", "--documents=2", "--top_p=0.9"]
    arguments += [f"--batch={len(ENDS)}", f"--tokenizer={TINY_POLICY}", "--temperature=0.6"]
    arguments += [f"--teacher_url={server.url}", "--teacher_model=teacher"]
    arguments += [f"--judge_url={server.url}", "--judge_model=judge", "--teacher_max_tokens=77"]
    keys = {"SPELL_TEACHER_KEY": "secret-t", "SPELL_JUDGE_KEY": "secret-j", "no_proxy": "127.0.0.1"}
    killed = program(*arguments, **keys, SPELL_FAULT="taught:5")
    assert killed.returncode == -signal.SIGKILL
    process = program(*arguments, **keys)
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout)["kept"] == len(KEPT)
    body, _ = next(sent for sent in server.requests if sent[0]["model"] == "teacher")
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.6, 0.9, 77)
    heard = {(body["model"], key) for body, key in server.requests}
    assert heard == {("teacher", "Bearer secret-t"), ("judge", "Bearer secret-j")}
    for path in (tmp_path / "out").iterdir():
        assert "secret" not in path.read_text()
    assert "secret" not in process.stderr + process.stdout


TINY = [f"--teacher_policy={TINY_POLICY}", "--source=tiny", "--tiny_clusters=24", "--attempts=24"]
TINY += ["--batch=24", "--documents=2", "--prompt_set=compact", "--teacher_max_tokens=48"]
TINY += ["--kv_cache_tokens=8192", "--slots=24", "--prefill_tokens=1536"]


@pytest.mark.slow
def test_command_line_with_the_tiny_policy_as_teacher(tmp_path):
    process = program(*TINY, f"--out={tmp_path}", "--agreement=rule")
    assert process.returncode == 0, process.stderr[-3000:]
    summary = json.loads(process.stdout)
    assert {task: n["attempts"] for task, n in summary["tasks"].items()} == dict.fromkeys(
        PAPER_TASKS, 8
    )
    questions = read_questions(tmp_path / "questions.jsonl", "x")
    assert len(questions) == summary["kept"] == 24 - sum(summary["left_out"].values()) > 0
    assert all(8 <= len(q.documents) <= 12 for q in questions)


@pytest.mark.long
def test_command_line_with_the_tiny_policy_as_teacher_and_judge(tmp_path):
    """The tiny policy was not trained to judge: none of its replies is a verdict."""
    judge = [f"--judge_policy={TINY_POLICY}", "--judge_max_tokens=4", f"--out={tmp_path}"]
    process = program(*TINY, *judge)
    assert process.returncode == 0, process.stderr[-3000:]
    summary = json.loads(process.stdout)
    assert summary["attempts"] == summary["kept"] + sum(summary["left_out"].values()) == 24
    assert {"judge_malformed", "judge_unanswered"} & {*summary["left_out"]}


def test_clusters_can_come_from_a_config(tmp_path):
    config = tiny.get_config()
    config.data.tasks, config.data.task_weights = (QA, MATH), (3.0, 1.0)
    folder, config.data.tiny.clusters = config.policy.folder, 9
    for changes in ({}, {"tokenizer": ""}):  # tokens are counted by the config's policy
        flag_values = flags_given(tmp_path, source="", config=config, **changes)
        dealt, count = rlvr_questions.open_clusters(flag_values)
        tasks = [task for task, _ in dealt.next(4)]
        assert sorted(tasks) == [MATH, QA, QA, QA] and len(dealt) == 9
        assert count("- Arvo Oslo 34 12 Bela") > 5 and folder == "tiny"


def flags_given(tmp_path: pathlib.Path, **changes):
    """Return the flags of a good command line, with changes."""
    flags = {
        **{
            "source": "tiny",
            "config": None,
            "tasks": list(PAPER_TASKS),
            "tokenizer": str(TINY_POLICY),
        },
        **{"teacher_url": "", "teacher_model": "", "teacher_policy": "", "tiny_clusters": 9},
        **{"teacher_max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "thinking": "", "seed": 0},
        **{"teacher_workers": 1, "teacher_rate": 0.0, "dtype": "float32", "grouping": "order"},
        **{"documents_per_cluster": 4, "max_document_tokens": 64, "held_out": 0.0},
        **dict.fromkeys(tfds_sets.FLAGS, ""),
    }
    return type("Flags", (), flags | changes)


@pytest.mark.parametrize(
    "changes, error",
    [
        ({}, "the teacher: --teacher_url and --teacher_model, or --teacher_policy, must be given"),
        ({"teacher_url": "http://x"}, "go together, without --teacher_policy"),
        ({"teacher_model": "m"}, "go together, without --teacher_policy"),
        (
            {"teacher_url": "http://x", "teacher_model": "m", "teacher_policy": "p"},
            "go together, without --teacher_policy",
        ),
        ({"teacher_url": "x", "teacher_model": "m"}, "teacher's url = 'x'"),
        ({"teacher_url": "http://x", "teacher_model": "m", "top_p": 0.0}, "top_p"),
        ({"teacher_url": "http://x", "teacher_model": "m", "temperature": -1.0}, "temperature"),
        ({"teacher_policy": "nowhere"}, "nowhere"),
    ],
)
def test_invalid_teacher_flags_are_named_in_the_error(tmp_path, changes, error):
    with pytest.raises(Exception, match=error):
        rlvr_questions.make_teacher(flags_given(tmp_path, **changes), tmp_path, SIZES)


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"source": ""}, "--source or --config"),
        ({"config": {"data": {}}}, "--source or --config"),
        ({"tasks": ["poetry"]}, "--tasks = poetry: must be some of"),
        ({"tasks": []}, "one or more different tasks"),
        ({"tokenizer": ""}, "--tokenizer"),
        ({"source": "nowhere"}, "nowhere"),
    ],
)
def test_invalid_source_flags_are_named_in_the_error(tmp_path, changes, error):
    with pytest.raises(Exception, match=error):
        rlvr_questions.open_clusters(flags_given(tmp_path, **changes))
