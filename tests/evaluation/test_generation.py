"""Tests of sampling from a policy in every role: input lines, prompts, output lines."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl import app

from spell_jax import generate
from spell_jax.data.samples import Sample
from spell_jax.evaluation import generation
from spell_jax.policy import tokenizer, transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.rollout.replies import Prompt, make_reply
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import setup
from spell_jax.selfplay import prompts

COMPACT = prompts.load("compact")
DOCUMENTS = ["Rome has 3 hills.", "Bath has 9 wells."]
REQUESTS = [
    {"role": "questioner", "task": "general_qa", "documents": DOCUMENTS},
    {
        "role": "questioner",
        "task": "multiple_choice",
        "documents": DOCUMENTS,
        "history": [{"question": "How many hills has Rome?", "answer": "3"}],
        "letter": "C",
    },
    {"role": "responder", "task": "financial_math", "documents": DOCUMENTS, "question": "hills?"},
    {"role": "verifier", "question": "How many?", "answer": "three", "reference": "3"},
    {"prompt": "Rome has", "note": "kept"},
]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the folder of a run with a random policy."""
    folder = tmp_path_factory.mktemp("run")
    words = tokenizer.train([" ".join(DOCUMENTS)] * 20, 400)
    config = PolicyConfig(words.vocab_size, 16, 1, 2, 1, 8, 16)
    params = transformer.init(config, jax.random.key(0))
    weights.save(folder / "policy", config, params, words)
    (folder / "config.json").write_text(json.dumps({"algorithm": {"prompts": "compact"}}))
    return folder


def write(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prompts_equal_those_of_self_play() -> None:
    role_prompts = [generation.make_prompt(request, COMPACT) for request in REQUESTS]
    assert role_prompts[0] == COMPACT.questioner("general_qa", DOCUMENTS)
    assert role_prompts[1].endswith(
        "known: How many hills has Rome? answer: 3\nask harder choice (C)"
    )
    assert role_prompts[2] == COMPACT.responder("financial_math", DOCUMENTS, "hills?")
    assert role_prompts[3] == COMPACT.verifier("How many?", "three", "3")
    assert role_prompts[4] == "Rome has"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "judge"}, "role = 'judge'"),
        ({"task": None}, "^task = None: must be one of general_qa, "),
        ({"task": ["general_qa"]}, r"^task = \['general_qa'\]: must be one of "),
        ({"task": "essay"}, "^task = 'essay': must be one of general_qa, "),
        (
            {"document": ["a"]},
            r"^document: unknown field; did you mean documents\? It must be one ",
        ),
        ({"n": 4}, "^n: unknown field; must be one of prompt, role, .*; options of sampling are "),
        ({"prompt": "a", "temperature": 0}, "^temperature: unknown field"),
        ({"documents": "Rome"}, "documents = 'Rome'"),
        ({"documents": [3]}, "documents ="),
        ({"history": ["x"]}, "history ="),
        ({"history": [{"question": "a?"}]}, "answer = None"),
        ({"task": "multiple_choice", "letter": "E"}, "letter='E'"),
        ({"prompt": 3}, "prompt = 3"),
        ({"role": "responder"}, "question = None"),
    ],
)
def test_error_names_field_of_bad_request(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generation.make_prompt(REQUESTS[0] | change, COMPACT)


def test_bad_lines_are_logged_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "in.jsonl"
    lines = ['{"prompt": "one"}', "{", "", "[1]", '{"prompt": "\\ud800"}', "[" * 5000, "\xff"]
    path.write_bytes("\n".join(lines).encode("latin-1") + b'\n{"prompt": "two"}\n')
    with caplog.at_level(logging.INFO, "spell_jax"):
        records, texts = generation.read_requests(path, COMPACT)
    assert texts == ["one", "two"]
    assert records == [{"prompt": "one"}, {"prompt": "two"}]
    for number in (2, 4, 5, 6, 7):
        assert f"{path}:{number}: skipped" in caplog.text
    assert "2 requests, 5 lines skipped" in caplog.text
    with pytest.raises(ValueError, match="none of its 1 lines"):
        generation.read_requests(write(path, [{"role": "nobody"}]), COMPACT)


def test_fields_of_the_run_have_defaults(tmp_path: Path, workdir: Path) -> None:
    assert generation.find_field(workdir, "prompts", "full") == "compact"
    assert generation.find_field(workdir, "extract", "lenient") == "lenient"
    assert generation.find_field(tmp_path, "prompts", "full") == "full"
    assert generation.find_field(None, "prompts", "full") == "full"
    for text in ("[]", "{", "null", '{"algorithm": 3}', '{"algorithm": {"prompts": 3}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: "):
            generation.find_field(tmp_path, "prompts", "full")


def test_answers_are_read_as_the_extract_says(workdir: Path) -> None:
    words = tokenizer.train(["The answer: (2,790) in all. " + '{"question": "?"}'] * 20, 400)
    ids = np.array(words.encode("Answer: (2,790)"))
    sample = Sample(ids, np.zeros(len(ids)), stopped=False)
    reply = make_reply(Prompt(()), [sample], words.decode)
    for extract, prediction in (("lenient", "-2790"), ("paper", None)):
        result = generation.describe_answers(REQUESTS[2], reply, words.count, extract)
        assert result["predictions"] == [prediction]


@pytest.mark.slow
def test_every_role_is_sampled_and_parsed(workdir: Path) -> None:
    texts = [generation.make_prompt(request, COMPACT) for request in REQUESTS]

    def ask(temperature: float, seed: int) -> list:
        sampling = {"temperature": temperature, "top_p": 1.0, "max_tokens": 5}
        return generation.answer(TextModel(workdir / "policy"), REQUESTS, texts, 3, sampling, seed)

    results = ask(1.0, 0)
    assert len(results) == len(REQUESTS)
    for request, result in zip(REQUESTS, results, strict=True):
        assert {name: result[name] for name in request} == request
        assert all(len(result[name]) == 3 for name in ("answers", "tokens", "stopped"))
        assert all(value < 0 for value in result["logprobs"])
        assert all(1 <= count <= 5 for count in result["tokens"])
    assert [parsed_answer["status"] for parsed_answer in results[0]["parsed"]] == ["bad_format"] * 3
    assert results[2]["predictions"] == [None] * 3
    assert results[3]["verdicts"] == [-1] * 3
    assert not {"parsed", "verdicts", "predictions"} & set(results[4])
    assert ask(1.0, 0) == results
    assert ask(1.0, 1) != results
    greedy = ask(0.0, 0)
    assert all(len(set(result["answers"])) == 1 for result in greedy)


@pytest.mark.slow
def test_overlong_prompt_does_not_change_other_answers(
    workdir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A request's randomness depends on its position among all requests."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 5}
    policy, _ = weights.read_config_and_tokenizer(workdir / "policy")
    long = "0 " * policy.max_positions

    def ask(first: str) -> list:
        records = [{"prompt": first}, {"prompt": "city of Bela"}]
        texts = [record["prompt"] for record in records]
        return generation.answer(TextModel(workdir / "policy"), records, texts, 3, sampling, seed=0)

    with caplog.at_level(logging.WARNING, "spell_jax"):
        refused, other_result = ask(long)
    assert (refused["answers"], refused["tokens"]) == ([], [])
    assert "1 prompts are longer than" in caplog.text
    assert other_result["answers"] == ask("city of Arvo")[1]["answers"]
    with pytest.raises(ValueError, match="max_position_embeddings"):
        generation.answer(TextModel(workdir / "policy"), [{}], [long], 1, sampling, seed=0)


@pytest.mark.slow
def test_command_line_writes_answers_to_valid_requests(tmp_path: Path, workdir: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [*REQUESTS, {"role": "x"}]), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "spell_jax.generate", f"--prompts={source}", f"--out={out}"]
    arguments = [f"--workdir={workdir}", "--samples=2", "--greedy", "--max_tokens=4"]
    environment = os.environ | {"XLA_FLAGS": ""}
    process = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert f"{source}:6: skipped" in process.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("role") for line in lines] == [r.get("role") for r in REQUESTS]
    assert all(len(line["answers"]) == 2 for line in lines)
    prompt = [*command[:3], "--prompt=Rome has", *arguments]
    process = subprocess.run(prompt, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "".join(f"{text}\n" for text in lines[-1]["answers"])
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --workdir or --policy"), refused.stderr


@pytest.mark.slow
def test_folder_as_out_is_refused_before_the_policy_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r": is a folder, must be a file; move or remove it$"):
        generation.answer_requests(SimpleNamespace(out=str(tmp_path)))


def test_command_line_searches_an_evidence_tree(tmp_path: Path, workdir: Path) -> None:
    records = [{"documents": DOCUMENTS, "question": "hills?", "answer": "3"}, {"role": "responder"}]
    source, out = write(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "spell_jax.generate", f"--prompts={source}", f"--out={out}"]
    command += [f"--workdir={workdir}", "--mode=evidence_tree", "--max_tokens=4", "--width=2"]
    command += ["--evidence_by=similarity", "--reasoning_by=judge", "--judge_max_tokens=4"]
    command += [f"--embedder={workdir / 'policy'}", "--embed_max_tokens=64"]
    environment = os.environ | {"XLA_FLAGS": ""}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert f"{source}:2: skipped" in process.stderr
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert line["question"] == "hills?" and len(line["branches"]) == 2
    assert line["prediction"] is None and line["right"] is False


FLAGS = {"prompt": None, "prompts": None, "out": None, "mode": "roles"}


@pytest.mark.parametrize(
    ("flag_values", "message"),
    [
        ({}, "--prompt, or both --prompts and --out: must be given"),
        ({"prompts": "in.jsonl"}, "--prompt, or both --prompts and --out: must be given"),
        ({"prompt": ""}, "--prompt = '': must be a text"),
        ({"prompt": "a", "prompts": "in.jsonl"}, "--prompts: has no effect with --prompt"),
        ({"prompt": "a", "out": "out.jsonl"}, "--out: has no effect with --prompt"),
        ({"prompt": "a", "mode": "evidence_tree"}, "--mode = 'evidence_tree': needs --prompts"),
    ],
)
def test_flags_name_a_prompt_or_a_file_of_prompts(flag_values: dict, message: str) -> None:
    with pytest.raises(app.UsageError, match=message):
        generation.check_flags(SimpleNamespace(**FLAGS | flag_values))
    with pytest.raises(ValueError, match=r"^--prompt = '\\udcff': must be UTF-8 text$"):
        generation.check_flags(SimpleNamespace(**FLAGS | {"prompt": "\udcff"}))
    generation.check_flags(SimpleNamespace(**FLAGS | {"prompt": "a"}))
    generation.check_flags(SimpleNamespace(**FLAGS | {"prompts": "in.jsonl", "out": "out.jsonl"}))


def test_single_answer_is_printed_alone_and_several_get_numbers(capsys) -> None:
    generation.print_answers({"answers": ["Rome"], "stopped": [True]})
    assert capsys.readouterr() == ("Rome\n", "")
    generation.print_answers({"answers": ["Rome", "Bath"], "stopped": [True, False]})
    out, err = capsys.readouterr()
    assert out == "Rome\nBath\n"
    assert err == "answer 1 of 2:\nanswer 2 of 2, cut off at --max_tokens:\n"


def test_prompt_of_the_command_line_is_asked_alone(monkeypatch, capsys) -> None:
    calls = []

    def answer(*arguments):
        calls.append(arguments)
        return [{"answers": ["Rome", "Bath"], "stopped": [True, True]}]

    monkeypatch.setattr(generation, "load", lambda flag_values: ("model", COMPACT, {"top_p": 1.0}))
    monkeypatch.setattr(generation, "answer", answer)
    flag_values = SimpleNamespace(prompt="Rome has", mode="roles", samples=2, seed=3)
    monkeypatch.setattr(setup, "setup", lambda: None)
    monkeypatch.setattr(generation, "check_flags", lambda flag_values: None)
    monkeypatch.setattr(generate, "flags", SimpleNamespace(FLAGS=flag_values))
    generate.main(None)
    assert calls == [("model", [{"prompt": "Rome has"}], ["Rome has"], 2, {"top_p": 1.0}, 3)]
    assert capsys.readouterr().out == "Rome\nBath\n"
