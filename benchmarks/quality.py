"""Benchmark of the quality loss of int8 sampling, with the policy that ships."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import BenchmarkCommand
from spell_jax.configs import tiny
from spell_jax.data import tiny_world as world
from spell_jax.policy import transformer
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Sample
from spell_jax.trainer import build, state

_ROWS = 64  # rows scored at once


@dataclasses.dataclass
class Quality(BenchmarkCommand):
    """Compares int8 sampling with float32 on held-out questions of the generated world.

    "kl" estimates the KL divergence KL(int8 || full) of the next token, in nats. It is the mean of
    exp(d) - d - 1 over tokens sampled with int8 at temperature 1, where d is the token's logprob
    under the float32 policy minus its logprob under int8. "equal_answers" and "equal_tokens"
    compare greedy answers: the share of answers that are equal to the end, and the share of tokens
    before the first difference. "tokens_per_pass" is the number of tokens per forward pass and slot
    with speculative decoding, for the answers at temperature 1; "greedy_tokens_per_pass" is the
    same for greedy answers.
    """

    documents: Annotated[int, "documents of a question"] = 3
    items: Annotated[int, "questions of each kind"] = 64
    cache: Annotated[str, 'dtype of the pool: "int8" or "compute" (float32)'] = "int8"
    weights: Annotated[str, 'dtype of the kernels: "int8" or "compute" (float32)'] = "int8"
    speculative_tokens: Annotated[int, "tokens proposed per pass by prompt lookup"] = 0

    def run(self) -> dict[str, Any]:
        config = tiny.get_config()
        config.policy.compute_dtype = "float32"  # so that every difference is int8's
        run = build.make_run(config)
        folder = run.own_models["policy"].folder
        params = run.learner.cast(state.load_weights(folder, run.learner))
        prompts = self._prompts(run)
        full = dataclasses.replace(run.worker.sampler.config, top_p=1.0)
        small = dataclasses.replace(
            full,
            cache_dtype=self.cache,
            weights_dtype=self.weights,
            speculative_tokens=self.speculative_tokens,
        )
        sampled, sampled_rate = _answers(run, small, params, prompts, 1.0)
        greedy, greedy_rate = _answers(run, small, params, prompts, 0.0)
        unquantized, _ = _answers(run, full, params, prompts, 0.0)
        scored = _score(run, params, prompts, sampled)
        pairs = zip(sampled, scored, strict=True)
        differences = np.concatenate([logprobs - sample.logprobs for sample, logprobs in pairs])
        pairs = [(a.tokens, b.tokens) for a, b in zip(greedy, unquantized, strict=True)]
        matches = (map(operator.eq, a.tolist(), b.tolist()) for a, b in pairs)
        equal = [sum(itertools.takewhile(bool, match)) for match in matches]
        return {
            "answers": len(prompts),
            "tokens": sum(len(sample.tokens) for sample in sampled),
            "kl": float(np.mean(np.exp(differences) - differences - 1)),
            "largest_difference": float(np.max(np.abs(differences))),
            "equal_answers": float(np.mean([np.array_equal(a, b) for a, b in pairs])),
            "equal_tokens": sum(equal) / sum(len(b) for _, b in pairs),
            "tokens_per_pass": sampled_rate,
            "greedy_tokens_per_pass": greedy_rate,
        }

    def _prompts(self, run: build.Run) -> list[list[int]]:
        evaluation: Any = run.evaluation
        prompts = []
        for kind in world.KINDS:
            for item in evaluation.make_items(self.documents, kind, self.items):
                task = world.TASK_OF_KIND[item.kind]
                text = evaluation.prompts.responder(task, item.documents, item.question)
                prompts.append(run.tokenizer.chat(text))
        return prompts


def _answers(
    run: build.Run, config: SamplerConfig, params, prompts: list[list[int]], temperature: float
) -> tuple[list[Sample], float]:
    """Sample an answer to each prompt; return answers, and tokens per pass and busy slot."""
    sampler = Sampler(run.policy, config, run.tokenizer.stop_ids, run.learner.mesh)
    session = sampler.start_session(params)
    how = config.options(config.max_tokens, temperature=temperature)
    samples_by_prompt = session.sample(prompts, 1, jax.random.key(0), how)
    answers = [samples[0] for samples in samples_by_prompt if samples is not None]
    return answers, session.counts.tokens / session.counts.busy_slot_steps


def _score(
    run: build.Run, params, prompts: list[list[int]], samples: list[Sample]
) -> list[np.ndarray]:
    """Compute logprobs [S] of each answer under the float32 policy, at temperature 1."""

    @jax.jit
    def logprobs(params, tokens):
        logits = jax.nn.log_softmax(transformer.logits(run.policy, params, tokens))
        return jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]

    rows = [[*p, *s.tokens.tolist()] for p, s in zip(prompts, samples, strict=True)]
    tokens = np.zeros((-(-len(rows) // _ROWS) * _ROWS, max(map(len, rows))), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    parts = [logprobs(params, tokens[i : i + _ROWS]) for i in range(0, len(tokens), _ROWS)]
    scored = np.concatenate(jax.device_get(parts))
    spans = [(len(p) - 1, len(ids) - 1) for p, ids in zip(prompts, rows, strict=True)]
    return [row[first:last] for row, (first, last) in zip(scored, spans, strict=False)]
