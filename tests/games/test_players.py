"""A game's models: chat layout, caps, keys and weights by step and call."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from spell_jax.games.players import Players
from spell_jax.sampler.engine import SamplerConfig
from spell_jax.sampler.requests import Sample

WORDS = ("zero", "one", "two", "end")


class FakeSampler:
    """Records what it is asked for; prompts of more than five tokens are over its cap."""

    config = SamplerConfig(max_tokens=9, max_verdict_tokens=2)

    def __init__(self):
        self.calls: list[dict[str, Any]] = []
        self.begun: list[Any] = []

    def begin(self, params):
        self.begun.append(params)
        return SimpleNamespace(sample=functools.partial(self._sample, params))

    def _sample(self, params, prompts, group, key, options):
        words = {"params": params, "prompts": prompts, "group": group, "key": key}
        self.calls.append(words | {"options": options})
        stopped = Sample(np.array([1, 2, 3]), np.zeros(3, np.float32), True)
        capped = Sample(np.array([1, 2, 1]), np.zeros(3, np.float32), False)
        return [None if len(p) > 5 else [stopped, capped][:group] for p in prompts]


TOKENIZER: Any = SimpleNamespace(
    chat=lambda text: [7, *range(len(text)), 8],
    decode=lambda ids: " ".join(WORDS[i] for i in ids),
)


@pytest.fixture
def players():
    sampler: Any = FakeSampler()
    made = Players(sampler, TOKENIZER, jax.random.key(0))
    made.begin(1, {"policy": "weights", "anchor": "frozen"})
    return made, sampler


def bits(key) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_lengths_and_cut_off_answers_are_counted_by_speaker(players):
    ask, _ = players
    ask("responder", ["ab", "abcdef"], group=2)  # the second prompt is over the cap
    ask("responder", ["a"])
    ask("responder", ["abc"], model="anchor")
    ask("verifier", [])
    assert ask.metrics._pairs == {
        "prompt_tokens/responder": (7, 2),
        "answer_tokens/responder": (9, 3),
        "cut_off/responder": (1, 3),
        "prompt_tokens/anchor": (5, 1),
        "answer_tokens/anchor": (3, 1),
        "cut_off/anchor": (0, 1),
    }
    ask.begin(2, {})
    assert ask.metrics._pairs == {}


def test_replies_are_texts_without_the_stop_token(players):
    ask, sampler = players
    first, over = ask("responder", ["ab", "abcdef"], group=2)
    assert first.prompt == [7, 0, 1, 8]
    assert first.texts == ["one two", "one two one"]
    assert over is None
    assert sampler.calls[0]["params"] == "weights"
    assert sampler.calls[0]["options"].max_tokens == 9
    group = first.group([0.5, -0.5], "responder")
    assert [list(a) for a in group.answers] == [[1, 2, 3], [1, 2, 1]]  # the stop token is learned
    assert list(group.advantages) == [0.5, -0.5] and group.role == "responder"
    assert [len(row) for row in group.old_log_probs] == [3, 3]


def test_verdicts_have_a_cap_of_their_own(players):
    ask, sampler = players
    ask("verifier", ["a"])
    ask("responder", ["a"], model="anchor", temperature=0.0)
    verdict, answer = (call["options"] for call in sampler.calls)
    assert verdict.max_tokens == 2 and verdict.temperature == 0.7
    assert sampler.calls[1]["params"] == "frozen" and answer.temperature == 0.0


def test_one_session_a_model_and_step(players):
    ask, sampler = players
    for model in ("policy", "policy", "anchor", "policy"):
        ask("responder", ["a"], model=model)
    assert sampler.begun == ["weights", "frozen", "weights"]
    ask.begin(2, {"policy": "new weights"})
    ask("responder", ["a"])
    assert sampler.begun[3:] == ["new weights"]
    ask.end()
    with pytest.raises(KeyError, match="policy"):
        ask("responder", ["a"])


def test_keys_are_by_step_and_call(players):
    ask, sampler = players

    def keys(step: int) -> list[tuple[int, ...]]:
        sampler.calls.clear()
        ask.begin(step, {"policy": "weights"})
        ask("questioner", ["a"])
        assert ask("responder", []) == []  # counts as a call, and samples nothing
        ask("responder", ["a"])
        return [bits(call["key"]) for call in sampler.calls]

    one, two = keys(1), keys(2)
    assert len(one) == 2
    assert len({*one, *two}) == 4
    assert keys(1) == one
    third = Players(sampler, TOKENIZER, jax.random.key(1))
    third.begin(1, {"policy": "weights"})
    third("questioner", ["a"])
    assert bits(sampler.calls[-1]["key"]) != one[0]


def test_an_unknown_model_is_an_error(players):
    ask, _ = players
    with pytest.raises(KeyError, match="reward_model"):
        ask("responder", ["a"], model="reward_model")
