"""Benchmark of the quality loss of int8 sampling, with the policy that ships.

1. Prompts are held-out questions of the generated world, of every kind.
2. "kl" estimates the KL divergence KL(int8 || full) of the next token, in nats. It is the mean of
   exp(d) - d - 1 over tokens sampled with int8 at temperature 1, where d is the token's logprob
   under the full-precision policy minus its logprob under int8.
3. "equal_answers" and "equal_tokens" compare greedy answers: the share of answers that are equal to
   the end, and the share of tokens before the first difference.
4. "tokens_per_pass" is the number of tokens per forward pass and slot with speculative decoding,
   for the answers of (2); "greedy_tokens_per_pass" is the same for greedy answers.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sample import devices
from configs import tiny
from spell_jax.data import tiny_world as world
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Sample, SampleRequest
from spell_jax.trainer import build as runs
from spell_jax.trainer import state

_ROWS = 64  # rows scored at once


def bench_quality(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark with the policy of the demo's config.

    Args:
      options: parsed options of "quality".

    Returns:
      The measurements, JSON-able.
    """
    run = runs.make_run(tiny.get_config())
    params = run.learner.cast(state.load_weights(run.own["policy"]))
    prompts = _prompts(run, options)
    whole = dataclasses.replace(run.worker.sampler.config, top_p=1.0)
    small = dataclasses.replace(
        whole,
        cache_dtype=options.cache,
        weights_dtype=options.weights,
        speculative_tokens=options.guessed,
    )
    sampled, sampled_rate = _answers(run, small, params, prompts, 1.0)
    found, greedy_rate = _answers(run, small, params, prompts, 0.0)
    wanted, _ = _answers(run, whole, params, prompts, 0.0)
    scored = _score(run.policy, params, prompts, sampled)
    pairs = zip(sampled, scored, strict=True)
    differences = np.concatenate([whole - small.logprobs for small, whole in pairs])
    pairs = list(zip(found, wanted, strict=True))
    before = [_before_difference(a.tokens, b.tokens) for a, b in pairs]
    return {
        "bench": "quality",
        "cache": options.cache,
        "weights": options.weights,
        "guessed": options.guessed,
        "documents": options.documents,
        "answers": len(prompts),
        "tokens": sum(len(sample.tokens) for sample in sampled),
        "kl": float(np.mean(np.exp(differences) - differences - 1)),
        "largest_difference": float(np.max(np.abs(differences))),
        "equal_answers": float(np.mean([np.array_equal(a.tokens, b.tokens) for a, b in pairs])),
        "equal_tokens": sum(before) / sum(len(b.tokens) for _, b in pairs),
        "tokens_per_pass": sampled_rate,
        "greedy_tokens_per_pass": greedy_rate,
        **devices(),
    }


def _prompts(run: runs.Run, options: argparse.Namespace) -> list[list[int]]:
    evaluation: Any = run.evaluation
    items = [
        item
        for kind in world.KINDS
        for item in evaluation.make_items(options.documents, kind, options.items)
    ]
    texts = [
        evaluation.prompts.responder(world.TASK_OF_KIND[i.kind], i.documents, i.question)
        for i in items
    ]
    return [run.tokenizer.chat(text) for text in texts]


def _answers(
    run: runs.Run, config: SamplerConfig, params, prompts: Sequence[list[int]], temperature: float
) -> tuple[list[Sample], float]:
    """Sample an answer to each prompt; also return the tokens per pass and busy slot."""
    sampler = Sampler(run.policy, config, run.tokenizer.stop_ids, run.learner.mesh)
    session = sampler.start_session(params)
    how = config.options(config.max_tokens, temperature=temperature)
    for prompt, key in zip(prompts, request_keys(jax.random.key(0), len(prompts)), strict=True):
        session.submit(SampleRequest(prompt, 1, key, how))
    answers = dict(session.results())
    samples = [answers[ticket][0] for ticket in range(len(prompts))]
    return samples, session.counts.tokens / session.counts.busy_slot_steps


def _score(
    policy: PolicyConfig, params, prompts: Sequence[list[int]], samples: Sequence[Sample]
) -> list[np.ndarray]:
    """Logprobs [S] of each answer under the full-precision policy, at temperature 1."""

    @jax.jit
    def logprobs(params, tokens):
        logits = jax.nn.log_softmax(transformer.logits(policy, params, tokens))
        return jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]

    rows = [[*p, *s.tokens.tolist()] for p, s in zip(prompts, samples, strict=True)]
    tokens = np.zeros((-(-len(rows) // _ROWS) * _ROWS, max(map(len, rows))), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    parts = [logprobs(params, tokens[i : i + _ROWS]) for i in range(0, len(tokens), _ROWS)]
    scored = np.concatenate(jax.device_get(parts))
    return [
        scored[row, len(prompt) - 1 : len(ids) - 1]
        for row, (prompt, ids) in enumerate(zip(prompts, rows, strict=True))
    ]


def _before_difference(found: np.ndarray, wanted: np.ndarray) -> int:
    """Number of equal tokens before the first difference."""
    shorter = min(len(found), len(wanted))
    differing = np.flatnonzero(found[:shorter] != wanted[:shorter])
    return int(differing[0]) if len(differing) else shorter
