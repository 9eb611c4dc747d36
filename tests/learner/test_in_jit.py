"""Tests of scores of replies: one pass of the model for each reply, advantages on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.learner.advantages import questioner_advantages
from spell_jax.learner.in_jit import masked_advantages, score_replies
from spell_jax.policy import transformer
from spell_jax.runtime import mesh as meshes
from tests import tiny

R, K, P, S = 3, 2, 8, 5
TEMPERATURE = 0.7


@pytest.mark.slow
def test_logprobs_equal_those_of_separate_rows():
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 64, size=(R, P)).astype(np.int32)
    replies = rng.integers(3, 64, size=(R * K, S)).astype(np.int32)
    prompt_length, reply_length = np.array([8, 3, 0]), np.array([5, 1, 3, 4, 0, 0])
    score = jax.jit(functools.partial(score_replies, tiny.POLICY, temperature=TEMPERATURE))
    with jax.set_mesh(meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])):
        logprobs, real = score(tiny.weights(), prompts, prompt_length, replies, reply_length)
    assert np.isfinite(logprobs).all()
    np.testing.assert_array_equal(real, np.arange(S) < reply_length[:, None])
    for n in range(2 * K):
        prompt = prompts[n // K, : prompt_length[n // K]]
        tokens = np.concatenate([prompt, replies[n, : reply_length[n]]])
        logits = transformer.logits(tiny.POLICY, tiny.weights(), jnp.asarray(tokens)[None])[0]
        expected = jax.nn.log_softmax(logits / TEMPERATURE)[
            np.arange(len(prompt) - 1, len(tokens) - 1), tokens[len(prompt) :]
        ]
        np.testing.assert_allclose(logprobs[n, : reply_length[n]], expected, atol=1e-4)


def test_masked_advantages_are_those_of_the_marked_rows():
    rewards = np.array([0.3, -1.0, 0.75, 9.0, 0.0, 0.3], np.float32)
    included = np.array([1, 1, 1, 0, 1, 0], bool)
    for ddof in (0, 1):
        masked = np.asarray(
            masked_advantages(jnp.asarray(rewards), jnp.asarray(included), ddof=ddof)
        )
        expected = questioner_advantages(rewards[included], ddof=ddof)
        np.testing.assert_allclose(masked[included], expected, atol=1e-6)
        assert not masked[~included].any()
    equal = np.full(7, 0.1, np.float32)  # their mean is rounded
    for values, marks in ((rewards, [0, 1, 0, 0, 0, 0]), (rewards, [0] * 6), (equal, [1] * 7)):
        zeros = masked_advantages(jnp.asarray(values), jnp.array(marks, bool))
        assert not np.asarray(zeros).any()
