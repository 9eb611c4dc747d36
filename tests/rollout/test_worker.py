"""Tests of the rollout worker: chat layout, caps, keys, weights, and order of coroutines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from spell_jax.data.samples import Sample
from spell_jax.rollout.text_model import TextSampler
from spell_jax.rollout.worker import RolloutWorker
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.counts import Counts
from spell_jax.sampler.requests import SampleRequest

WORDS = ("zero", "one", "two", "end")


class FakeSession:
    """Session that answers a request after as many advances as its prompt has tokens."""

    reused_tokens = 0

    def __init__(self, params: Any, sampler: FakeSampler):
        self.params, self.asked, self.sampler = params, sampler.asked, sampler
        self.counts = Counts(
            prompt_tokens=4,
            slot_steps=10,
            starved_slot_steps=1,
            group_slot_steps=5,
            padded_group_slots=2,
        )
        self.counts.tokens, self.counts.prefilled_tokens = 7, 3
        self.counts.device_wait_seconds = {"responder": 0.5, str(params): 0.25}
        self.waiting: dict[int, tuple[int, SampleRequest]] = {}

    def submit(self, request: SampleRequest) -> int:
        self.asked.append((self.params, request))
        ticket = len(self.asked)
        self.waiting[ticket] = len(request.prompt), request
        return ticket

    def advance(self) -> list[tuple[int, list[Sample]]]:
        stopped = Sample(np.array([1, 2, 3]), np.zeros(3, np.float32), True)
        capped = Sample(np.array([1, 2, 1]), np.zeros(3, np.float32), False)
        self.waiting = {ticket: (n - 1, r) for ticket, (n, r) in self.waiting.items()}
        finished_requests = [(ticket, r) for ticket, (n, r) in self.waiting.items() if n == 0]
        for ticket, _ in finished_requests:
            del self.waiting[ticket]
        pair = [capped, capped] if self.sampler.never_stops else [stopped, capped]
        return [(ticket, pair[: request.group]) for ticket, request in finished_requests]


class FakeSampler:
    """Sampler that records its requests; prompts of more than five tokens are over its cap."""

    config = SamplerConfig(max_tokens=9)
    never_stops = False  # whether the cap cuts every answer off

    def __init__(self):
        self.asked: list[tuple[Any, SampleRequest]] = []
        self.begun: list[Any] = []

    def start_session(self, params: Any) -> FakeSession:
        self.begun.append(params)
        return FakeSession(params, self)

    def prompt_fits(self, prompt: list[int]) -> bool:
        return len(prompt) <= 5


TOKENIZER: Any = SimpleNamespace(
    chat=lambda text: [7, *range(len(text)), 8],
    decode=lambda ids: " ".join(WORDS[i] for i in ids),
    open_thought=lambda text: "<think>" if "?" in text else "",
)


@pytest.fixture
def worker():
    sampler: Any = FakeSampler()
    rollout_worker = RolloutWorker(TextSampler(sampler, TOKENIZER), jax.random.key(0))
    rollout_worker.start_step(1, {"policy": "weights", "reference_reader": "frozen"})
    return rollout_worker, sampler


def test_rollout_metrics_are_counted_per_agent(worker):
    ask, _ = worker
    ask("responder", ["ab", "abcdef"], group=2)  # the second prompt is over the cap
    ask("responder", ["a"])
    ask("responder", ["abc"], model="reference_reader")
    ask("verifier", [])
    ask("verifier", ["abcdef"])
    ask.end_step()
    assert ask.metrics.means() == {
        "prompt_tokens/responder": 7 / 2,
        "answer_tokens/responder": 9 / 3,
        "truncated/responder": 1 / 3,
        "truncated_scored": 1 / 4,
        "refused/responder": 1 / 3,
        "prompt_tokens/reference_reader": 5,
        "answer_tokens/reference_reader": 3,
        "truncated/reference_reader": 0,
        "refused/reference_reader": 0,
        "refused/verifier": 1,
        "sampler/starved_slots": 0.1,
        "sampler/padded_group_slots": 0.4,
        "sampler/reused_prompt_tokens": 0,
    }
    # Three sessions: with the policy, with the frozen reader, and with the policy again.
    assert (ask.sampled_tokens, ask.prefilled_tokens) == (21, 9)
    assert ask.waited == {"responder": 1.5, "weights": 0.5, "frozen": 0.25}
    ask.start_step(2, {})
    assert (
        ask.metrics.means() == {}
        and not ask.waited
        and ask.sampled_tokens == ask.prefilled_tokens == 0
    )


def test_requests_carry_their_agent(worker):
    ask, sampler = worker
    ask("responder", ["a"])
    ask("responder", ["a"], model="reference_reader")
    assert [request.agent for _, request in sampler.asked] == ["responder", "reference_reader"]


def test_reply_texts_omit_the_stop_token(worker):
    ask, sampler = worker
    first, over = ask("responder", ["ab", "abcdef"], group=2)
    assert first.prompt == [7, 0, 1, 8]
    assert first.texts == ["one two", "one two one"]
    assert over is None
    ((params, request),) = sampler.asked
    assert params == "weights" and request.options.max_tokens == 9
    group = first.group([0.5, -0.5], "responder")
    # the stop token is trained on
    assert [sample.tokens.tolist() for sample in group.samples] == [[1, 2, 3], [1, 2, 1]]
    assert list(group.advantages) == [0.5, -0.5] and group.name == "responder"
    assert group.samples == first.samples


def test_replies_keep_the_order_of_prompts(worker):
    ask, _ = worker
    replies = ask("responder", ["abc", "abcdef", "a", "ab", ""])
    assert [reply and len(reply.prompt) for reply in replies] == [5, None, 3, 4, 2]


def test_calls_have_options_of_their_own(worker):
    ask, sampler = worker
    ask("verifier", ["a"], max_tokens=2)
    ask("responder", ["a"], model="reference_reader", temperature=0.0)
    (_, verdict), (params, answer) = sampler.asked
    assert verdict.options.max_tokens == 2 and verdict.options.temperature == 0.7
    assert params == "frozen" and answer.options.temperature == 0.0


def test_coroutine_resumes_as_soon_as_its_own_call_finishes(worker):
    models, _ = worker
    order = []

    async def run(ask, item):
        for text in item:
            await ask("responder", [text])
            order.append(text)
        return len(item)

    results = models.run_all(run, [("abc", "x"), ("", "z", "yy"), ()])
    assert results == [2, 3, 0]  # in the order of the items
    assert order == ["", "abc", "z", "x", "yy"]  # after 2, 5, 2 + 3, 5 + 3, 2 + 3 + 4 advances


def test_call_with_only_overlong_prompts_returns_none_replies(worker):
    models, sampler = worker
    replies = []

    async def run(ask, texts):
        replies.append(await ask("responder", texts))
        replies.append(await ask("responder", []))

    models.run_all(run, [["abcdef"] * 2])
    assert replies == [[None, None], []] and not sampler.asked


def test_error_in_a_coroutine_is_raised(worker):
    models, _ = worker

    async def run(ask, item):
        await ask("responder", [item])
        raise ValueError(f"at {item}")

    with pytest.raises(ValueError, match="at a"):
        models.run_all(run, ["a", "ab"])


def test_worker_stays_usable_after_a_coroutine_error(worker):
    models, _ = worker

    async def run(ask, item):
        await ask("responder", ["", item])
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        models.run_all(run, ["a", "abc"])
    (reply,) = models("responder", ["abc"])
    assert len(reply.prompt) == 5


def test_coroutines_must_use_their_own_ask(worker):
    models, _ = worker

    async def nested(ask, item):
        models("responder", [item])

    async def await_sleep(ask, item):
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="must call its own ask"):
        models.run_all(nested, ["a"])
    with pytest.raises(TypeError, match="must await its ask, not None"):
        models.run_all(await_sleep, ["a"])
    assert models("responder", ["a"])[0].texts == ["one two"]


def test_session_starts_when_the_model_or_step_changes(worker):
    ask, sampler = worker
    for model in ("policy", "policy", "reference_reader", "policy"):
        ask("responder", ["a"], model=model)
    assert sampler.begun == ["weights", "frozen", "weights"]
    ask.start_step(2, {"policy": "new weights"})
    ask("responder", ["a"])
    assert sampler.begun[3:] == ["new weights"]
    ask.end_step()
    with pytest.raises(KeyError, match="policy"):
        ask("responder", ["a"])


def test_model_keeps_its_session_until_no_call_is_pending(worker):
    models, sampler = worker

    async def run(ask, item):
        await ask("questioner", [item])
        await ask("responder", [item], model="reference_reader")
        await ask("responder", [item])

    models.run_all(run, ["a", "abc", ""])
    assert sampler.begun == ["weights", "frozen", "weights"]


def _keys(worker, step: int, items: list[tuple[str, ...]]) -> dict[str, list[tuple[int, ...]]]:
    """Return the keys of each item's requests, in the order of the requests."""
    models, sampler = worker
    sampler.asked.clear()
    models.start_step(step, {"policy": "weights"})

    async def run(ask, item):
        for text in item:
            await ask("responder", [text, text])

    models.run_all(run, items)
    keys_by_prompt: dict[str, list[tuple[int, ...]]] = {}
    for _, request in sampler.asked:
        keys_by_prompt.setdefault(str(request.prompt), []).append(tuple(request.key.tolist()))
    return keys_by_prompt


def test_sampling_keys_are_independent_of_other_coroutines(worker):
    slow, fast = ("a", "ab", "abc"), ("",)
    alone = _keys(worker, 1, [(), slow])
    beside = _keys(worker, 1, [fast * 5, slow, fast])
    assert {prompt: beside[prompt] for prompt in alone} == alone
    assert _keys(worker, 1, [(), slow]) == alone
    every = [
        key for keys in [*beside.values(), *_keys(worker, 2, [(), slow]).values()] for key in keys
    ]
    assert len(set(every)) == len(every) == 2 * 9 + 2 * 3


def test_sampling_keys_are_folded_by_coroutine_call_and_prompt(worker):
    ask, sampler = worker
    ask("questioner", [""])
    ask("responder", ["a", "b", "c"])
    key = jax.random.fold_in(jax.random.key(0), 1)
    for number in (2, 1, 2):  # the second coroutine, its first call, prompt 2
        key = jax.random.fold_in(key, number)
    np.testing.assert_array_equal(sampler.asked[-1][1].key, jax.random.key_data(key))


def test_unknown_model_raises_key_error(worker):
    ask, _ = worker
    with pytest.raises(KeyError, match="reward_model"):
        ask("responder", ["a"], model="reward_model")


def test_texts_begin_with_the_thought_that_the_layout_opens(worker):
    ask, _ = worker
    opened, plain = ask("responder", ["a?", "ab"])
    assert opened.texts == ["<think>one two"] and plain.texts == ["one two"]


@pytest.mark.parametrize(
    "truncated, texts, scored, dropped, share",
    [
        ("score", ["one two", "one two one"], ["one two", "one two one"], [], 1 / 2),
        ("zero", ["one two", "one two one"], ["one two", ""], [], 0),
        ("drop", ["one two"], ["one two"], ["one two one"], 0),
    ],
)
def test_truncated_answers_count_as_the_config_says(
    worker, truncated, texts, scored, dropped, share
):
    ask, _ = worker
    ask.start_step(1, {"policy": "weights"}, truncated=truncated)
    (reply,) = ask("responder", ["ab"], group=2)
    assert (reply.texts, reply.scored_texts, reply.dropped) == (texts, scored, dropped)
    assert len(reply.group([0.0] * len(texts), "responder").samples) == len(texts)
    ask.end_step()
    means = ask.metrics.means()
    assert means["truncated/responder"] == 1 / 2 and means["truncated_scored"] == share
    assert means["answer_tokens/responder"] == 3 and means["refused/responder"] == 0


def test_prompt_without_a_finished_answer_has_no_reply_but_is_not_refused(worker):
    ask, sampler = worker
    ask.start_step(1, {"policy": "weights"}, truncated="drop")
    replies = ask("responder", ["ab", "abcdef"], group=2)
    assert replies[1] is None and replies.dropped == [(), ()]
    sampler.never_stops = True
    replies = ask("responder", ["abcdef", "ab"], group=2)
    assert replies == [None, None] and [len(texts) for texts in replies.dropped] == [0, 2]
    ask.end_step()
    assert ask.metrics.means()["refused/responder"] == 2 / 4
    assert ask.metrics.means()["truncated/responder"] == 3 / 4
