"""Tests of a policy's replies to user turns: cut-off replies, prompts that do not fit."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from spell_jax.data.samples import Sample
from spell_jax.rollout.repliers import PolicyReplier
from spell_jax.rollout.text_model import TextModel
from tests import noise


@pytest.fixture
def policy(tmp_path, monkeypatch):
    noise_policy = TextModel(noise.save_policy(tmp_path / "policy"))
    noise_policy.tokenizer.open_thought = lambda messages: "<think>"

    def sample(prompts, n, keys, options, prompt_indices):
        for place in reversed(range(len(prompts))):
            tokens = np.array(
                [*noise_policy.tokenizer.encode("city"), noise_policy.tokenizer.eos_id], np.int32
            )
            stopped = place > 0
            tokens = tokens if stopped else tokens[:-1]
            yield place, [Sample(tokens, np.zeros(len(tokens), np.float32), stopped)]

    monkeypatch.setattr(noise_policy, "sample", sample)
    return noise_policy


def test_cut_off_reply_states_nothing(policy, caplog):
    prompts = ["Oslo", "city " * 300, "Arvo"]
    replies = list(PolicyReplier(policy, 9)(prompts))
    assert replies == [(1, None), (2, "<think>city"), (0, "")]
    assert "1 of 2 replies were cut off at 9 tokens" in caplog.text


@pytest.mark.parametrize("fault", ["missing", "pipe", "cut off", "another shape"])
def test_damaged_weights_are_a_mistake_of_the_user_before_the_work(tmp_path, fault):
    """`generate` found them after its checks: a traceback instead of one line."""
    folder = pathlib.Path(noise.save_policy(tmp_path / "policy"))
    file, config = folder / "model.safetensors", folder / "config.json"
    content = file.read_bytes()
    if fault == "another shape":
        text = config.read_text()
        config.write_text(text.replace('"intermediate_size": ', '"intermediate_size": 1'))
    else:
        file.unlink()
    if fault == "pipe":
        os.mkfifo(file)
    if fault == "cut off":
        file.write_bytes(content[:-1])
    with pytest.raises((FileNotFoundError, ValueError), match=r"model\.safetensors"):
        TextModel(folder)
