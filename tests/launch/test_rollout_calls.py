"""Tests of launch/rollout_calls.py: its counts are those of a session of the sampler."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from launch import rollout_calls
from launch.rollout_calls import BLIND, READER, Workload
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import SampleRequest
from tests import tiny

SAMPLING = SamplerConfig(
    max_tokens=12,
    max_verdict_tokens=4,
    max_prompt=256,
    page_size=16,
    kv_cache_tokens=16 * 64,
    slots=8,
    samples_per_prompt_batch=4,
    prefill_tokens=64,
    decode_tokens=4,
)
SPELL = SpellConfig(generation_batch=8, group_size=4, verifier_group_size=4)
WORK = Workload(prompt=160, tokens=12, verdict_tokens=4, answered=1.0)  # all answers at their caps


def _count(config: SpellConfig = SPELL, work: Workload = WORK, sampling=SAMPLING, **mesh: int):
    device_mesh = meshes.make_mesh(mesh or {"fsdp": 1}, jax.devices()[: math.prod(mesh.values())])
    shards = meshes.row_shards(device_mesh)
    return rollout_calls.count_calls(config, sampling, sampling.shape(device_mesh), shards, work)


def test_one_round_asks_as_the_algorithm_does() -> None:
    counts = _count(dataclasses.replace(SPELL, reference_source="frozen_reader"))
    requests = {"questioner": 8, BLIND: 8, READER: 8, "responder": 8, "verifier": 32}
    assert {name: agent.requests for name, agent in counts.items()} == requests
    tokens = {"questioner": 96, BLIND: 96, READER: 4 * 96, "responder": 4 * 96, "verifier": 512}
    assert {name: agent.tokens for name, agent in counts.items()} == tokens
    half = _count(work=dataclasses.replace(WORK, answered=0.5))
    assert half["responder"].requests == 4 and half["verifier"].requests == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "cap", "group"), [(64, 12, 4), (40, 12, 4), (64, 12, 3), (40, 12, 3), (40, 5, 3)]
)
def test_counts_equal_those_of_a_session(pages: int, cap: int, group: int) -> None:
    """With 40 pages, prompts fill the pool and sequences pause for want of pages.

    Groups of 3 do not fill the 8 slots. Answers of 5 tokens end within calls of 4, and their slots
    are idle until the call returns: 33 passes, 35 if calls returned a pass later.
    """
    sampling = dataclasses.replace(SAMPLING, kv_cache_tokens=16 * pages, max_tokens=cap)
    work = dataclasses.replace(WORK, tokens=cap)
    fields = {"grounding_samples": 0, "responder_reward": "rule", "group_size": group}
    config = dataclasses.replace(SPELL, **fields)
    counted = _count(config, work, sampling=sampling)
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    session = Sampler(tiny.POLICY, sampling, (), mesh).start_session(tiny.weights())
    questions, waiting = rollout_calls.QuestionCoroutines(config, work), {}

    def submit(prompt: np.ndarray, group: int, item: int | None) -> None:
        options = sampling.options(sampling.max_tokens)
        key = np.zeros(2, np.uint32)
        ids = (prompt % tiny.POLICY.vocab_size).tolist()
        waiting[session.submit(SampleRequest(ids, group, key, options))] = item

    for item in range(SPELL.generation_batch):
        submit(questions.questioner(item), 1, item)
    for ticket, _ in session.results():
        if (item := waiting[ticket]) is not None:
            submit(questions.responder(item), config.group_size, None)
    counts = session.counts
    assert sum(agent.calls for agent in counted.values()) == pytest.approx(counts.prefill_calls)
    assert sum(agent.prompt_tokens for agent in counted.values()) == counts.prefilled_tokens
    assert sum(agent.passes for agent in counted.values()) == pytest.approx(counts.decode_steps)
    assert sum(agent.tokens for agent in counted.values()) == counts.tokens


def test_questions_about_a_cluster_read_its_documents_once() -> None:
    """K = 4: of P tokens, three of four prompts read the pages from the question on."""
    one_question, four_questions = (
        _count(dataclasses.replace(SPELL, questions_per_cluster=k))["responder"] for k in (1, 4)
    )
    assert one_question.prompt_tokens == 8 * 160
    # Whole pages of 16 before the 64 tokens of the question are shared: 96 tokens.
    assert four_questions.prompt_tokens == 2 * (160 + 3 * 64)
    long = dataclasses.replace(WORK, prompt=10_240)
    sampling = dataclasses.replace(SAMPLING, max_prompt=10_240, kv_cache_tokens=100_000)
    one_question, four_questions = (
        _count(dataclasses.replace(SPELL, questions_per_cluster=k), long, sampling)["responder"]
        for k in (1, 4)
    )
    assert one_question.prompt_tokens / four_questions.prompt_tokens == pytest.approx(4, rel=0.02)
    assert one_question.prompt_pairs / four_questions.prompt_pairs == pytest.approx(4, rel=0.1)


def test_pairs_and_keys_of_prompts_and_answers() -> None:
    config = dataclasses.replace(SPELL, generation_batch=1, responder_reward="rule")
    responder = _count(config)["responder"]
    assert responder.prompt_tokens == 160 and responder.prompt_pairs == 160 * 161 // 2
    assert responder.prompt_keys == 16 * sum(range(1, 11))
    assert responder.pairs == 4 * (12 * 160 + 12 * 13 // 2)
    assert responder.keys == 12 * 160 + 4 * 12 * 13 // 2  # the prompt's once for its four samples
    assert responder.passes == 12


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("answered", 0.0, "answered = 0.0: must be above 0, at most 1"),
        ("shown", 1.5, "shown = 1.5: must be above 0, at most 1"),
        ("rounds", 0, "rounds = 0: must be at least 1"),
        ("prompt", 64, "prompt = 64: must be at least 128"),
    ],
)
def test_workload_out_of_range_is_rejected(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(WORK, **{field: value})
