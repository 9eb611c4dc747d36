"""Tests of the lengths of the benchmarks' prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from absl import app

from spell_jax.evaluation import lengths
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import TINY_POLICY
from tests import evaluating


def make_flags(**changes: Any) -> SimpleNamespace:
    fields = {"policy": str(TINY_POLICY), "workdir": None, "data": "", "prose": "", "limit": 0}
    fields |= {"benchmarks": ["text", "number"], "answer_format": "plain", "thinking": ""}
    return SimpleNamespace(**fields | changes)


def test_prompts_are_measured_whole_and_without_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths.runner.registry, "load", evaluating.load)
    result = lengths.measure(make_flags(), tmp_path)
    assert json.loads((tmp_path / lengths.RESULT).read_text()) == result
    chat = tokenizers.load(TINY_POLICY).chat
    tokens = [len(chat(item.prompt)) for item in evaluating.load("text", "").items]
    assert tokens[0] < tokens[1] < tokens[2]
    assert result["text"] == {
        **{"questions": 3, "mean": pytest.approx(sum(tokens) / 3), "median": tokens[1]},
        **{"shortest": tokens[0], "longest": tokens[2]},
    }
    assert (tmp_path / lengths.PLOT).read_bytes().startswith(b"\x89PNG")
    assert lengths.describe({"text": result["text"]}) == (
        f"text: 3 prompts, median {tokens[1]} tokens ({tokens[0]} to {tokens[2]})"
    )


def test_all_flags_that_change_no_length_are_refused():
    lengths.check_flags(evaluating.parse_flags(*(f"--{name}=1" for name in lengths.USEFUL_FLAGS)))
    useless_flags = set(evaluating.FLAGS) - set(lengths.USEFUL_FLAGS)
    assert {"samples", "endpoint", "judge_url", "temperature", "compare"} <= useless_flags
    for name in useless_flags:
        values = evaluating.parse_flags("--benchmarks=a", f"--{name}=1")
        with pytest.raises(app.UsageError, match=f"--{name}: has no effect with --lengths"):
            lengths.check_flags(values)
    with pytest.raises(app.UsageError, match="--benchmarks: must be given with --lengths"):
        lengths.check_flags(evaluating.parse_flags())


def test_answer_format_and_thinking_count(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths.runner.registry, "load", evaluating.load)
    read = lengths.weights.read_config_and_tokenizer
    switches = []
    monkeypatch.setattr(
        lengths.weights,
        "read_config_and_tokenizer",
        lambda folder, thinking=None: switches.append(thinking) or read(folder),
    )
    plain = lengths.measure(make_flags(), tmp_path)["text"]
    sections = lengths.measure(make_flags(answer_format="sections", thinking="on"), tmp_path)
    assert sections["text"]["shortest"] > plain["shortest"] and switches == [None, True]
