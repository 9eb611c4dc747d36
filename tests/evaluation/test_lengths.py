"""Tests of the lengths of the benchmarks' prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from absl import app, flags

from spell_jax.evaluation import lengths
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import TINY_POLICY
from tests import evaluating


def test_prompts_are_measured_whole_and_without_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths.registry, "load", evaluating.load)
    fields = {"policy": str(TINY_POLICY), "workdir": None, "data": "", "prose": "", "limit": 0}
    flag_values = SimpleNamespace(**fields, benchmarks=["text", "number"])
    result = lengths.measure(flag_values, tmp_path)
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


def test_flags_that_sample_are_refused():
    for argument, message in (
        ("--samples=8", "--samples: has no effect with --lengths"),
        ("", "--benchmarks: must be given with --lengths"),
    ):
        values = flags.FlagValues()
        for name in ("benchmarks", *lengths.USELESS_FLAGS):
            flags.DEFINE_string(name, "", "", flag_values=values)
        values(["evaluate", *filter(None, [argument])])
        with pytest.raises(app.UsageError, match=message):
            lengths.check_flags(values)
