"""Benchmark of experts that the sampler and the learner choose differently."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import (
    SamplerBenchmark,
    make_learner,
    random_group,
    random_params,
    sample_answers,
)
from spell_jax.attention import attend
from spell_jax.learner import update
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.packing import Bucket, MicroBatch
from spell_jax.policy import moe, transformer
from spell_jax.sampler.engine import Sampler


@dataclasses.dataclass
class RoutingBenchmark(SamplerBenchmark):
    """Samples answers with a mixture of experts and reads them again in the learner.

    Once in --dtype and once in float32, both with the same dtype in sampler and learner. "pairs" is
    the share of (token, layer) pairs whose set of experts differs, over prompts and answers;
    "tokens" the share of tokens that have such a layer. "difference" is the mean of |learner's
    logprob - sampler's logprob| over answer tokens: of all, of those whose predicting token has the
    same experts in all layers ("equal"), of the others ("differing"), and of all with the sampler's
    experts ("replayed"); "largest" and "largest_replayed" are the largest of all.
    """

    width: Annotated[int, "model width D"] = 256
    dtype: Annotated[str, "dtype of weights and activations"] = "bfloat16"
    layers: Annotated[int, "layers L; 0: 3, or as many as the config.json has"] = 4
    experts: Annotated[int, "experts E, without --policy"] = 32
    experts_per_token: Annotated[int, "experts of a token k, without --policy"] = 4
    prompts: Annotated[int, "prompts"] = 4
    prompt: Annotated[int, "tokens of a prompt"] = 256
    response: Annotated[int, "tokens of an answer"] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policy:
            sizes = {"experts": self.experts, "experts_per_token": self.experts_per_token}
            self.model = dataclasses.replace(
                self.model, qkv_bias=False, qk_norm=True, feed_forward=self.width // 2, **sizes
            )
        LossConfig(routing="sampled").check_policy(self.model)
        self.experts, self.experts_per_token = self.model.experts, self.model.experts_per_token

    def run(self) -> dict[str, Any]:
        return {dtype: self._measure(dtype) for dtype in dict.fromkeys((self.dtype, "float32"))}

    def _measure(self, dtype: str) -> dict[str, float | None]:
        rng, answers = np.random.default_rng(0), self.group * self.response
        prompts = rng.integers(self.vocab, size=(self.prompts, self.prompt)).tolist()
        params = random_params(self.model, dtype)
        slots = self.prompts * self.group
        plain_sampler = self.make_sampler(self.prompt, self.response, slots)
        sampler = Sampler(
            self.model, plain_sampler.config, (), plain_sampler.mesh, record_experts=True
        )
        session = sampler.start_session(params)
        samples = sample_answers(session, prompts, self.group, self.response)
        groups = [
            random_group(rng, *pair, "responder") for pair in zip(prompts, samples, strict=True)
        ]
        bucket = Bucket(self.prompt + answers, answers)
        learner = make_learner(self.model, bucket, bucket.length, dtype, routing="sampled")
        read = jax.jit(lambda params, batch: _read(learner.spec, params, batch))
        parts = []
        with learner.on_mesh():
            for batch in learner.pack(learner.weigh(groups))[0]:
                arrays = jax.device_get(read(params, learner.place(batch)))
                parts.append(_select(batch, *arrays))
        differing, at_answers, own_difference, replayed_difference = (
            np.concatenate(part) for part in zip(*parts, strict=True)
        )
        return {
            "pairs": float(np.mean(differing)),
            "tokens": float(np.mean(differing.any(axis=1))),
            "answer_tokens": len(own_difference),
            "difference": float(np.mean(own_difference)),
            "equal": float(np.mean(own_difference[~at_answers])) if not at_answers.all() else None,
            "differing": float(np.mean(own_difference[at_answers])) if at_answers.any() else None,
            "replayed": float(np.mean(replayed_difference)),
            "largest": float(np.max(own_difference)),
            "largest_replayed": float(np.max(replayed_difference)),
        }


def _read(spec: update.UpdateSpec, params: Any, batch: MicroBatch) -> tuple[jax.Array, ...]:
    """Return whether own and recorded experts differ, bool [B, T, L]; logprobs [B, A] with each."""
    unrouted_batch = dataclasses.replace(batch, experts=None)
    *_, routing = transformer.hidden_states(
        spec.policy,
        params,
        batch.tokens,
        batch.positions,
        attend.packed(spec.policy.attention, spec.policy.ring),
        context={"index": batch.index, "last_query": batch.last_query},
        record_experts=True,
    )
    own_experts, recorded_experts = moe.by_token(routing), batch.experts
    assert own_experts is not None and recorded_experts is not None
    differing = jnp.any(
        jnp.sort(own_experts, axis=-1) != jnp.sort(recorded_experts, axis=-1), axis=-1
    )
    return (
        differing,
        update.score(spec, params, unrouted_batch)[0],
        update.score(spec, params, batch)[0],
    )


def _select(batch: MicroBatch, differing, own_logprob, replayed_logprob) -> tuple[np.ndarray, ...]:
    """Select the real tokens [N, L] and the answer tokens [M] of three arrays.

    For answer tokens these are: whether the predicting token's experts differ in any layer, and the
    absolute differences of logprobs with own and with recorded experts.
    """
    is_answer = batch.answer >= 0
    at_source = np.take_along_axis(differing.any(axis=-1), batch.source, axis=1)
    distances = (np.abs(x - batch.old_logprob)[is_answer] for x in (own_logprob, replayed_logprob))
    return differing[batch.last_query >= 0], at_source[is_answer], *distances
