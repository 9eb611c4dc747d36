"""Tests of a policy's replies to user turns: cut-off replies, prompts that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from spell_jax.evaluation.policy_sampler import Policy
from spell_jax.sampler.requests import Options, Sample
from tests import noise


@pytest.fixture
def policy(tmp_path, monkeypatch):
    noise_policy = Policy(noise.save_policy(tmp_path / "policy"))
    noise_policy.tokenizer.open_thought = lambda messages: "<think>"

    def sample(prompts, group, keys, options):
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
    keys = np.zeros((3, 2), np.uint32)
    asked = ["Oslo", "city " * 300, "Arvo"]
    replies = list(policy.reply(asked, keys, Options(max_tokens=9)))
    assert replies == [(1, None), (2, "<think>city"), (0, "")]
    assert "1 of 2 replies were cut off at 9 tokens" in caplog.text
