"""Tests of recorded experts: what the sampler routes is what the learner trains.

Pairs of experts have the same router weights but for 1e-6, so that the sampler's router and the
learner's choose differently although all their numbers agree to 1e-4.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from spell_jax.data.samples import Sample
from spell_jax.learner import update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.policy import moe, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.rollout.replies import Reply
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests import tiny

pytestmark = pytest.mark.slow

POLICY = dataclasses.replace(
    tiny.POLICY, qkv_bias=False, qk_norm=True, experts=8, experts_per_token=3, feed_forward=24
)
WINDOWS = dataclasses.replace(POLICY, window=6, window_layers=(0, 1))
CONFIG = SamplerConfig(
    temperature=1.0,
    top_p=0.9,
    max_tokens=10,
    max_prompt=32,
    page_size=4,
    kv_cache_tokens=2048,
    slots=8,
    samples_per_prompt_batch=3,
    prefill_tokens=32,
    decode_tokens=4,
)
RNG = np.random.default_rng(3)
BEGINNING = RNG.integers(3, 64, size=18).tolist()
PROMPTS = [BEGINNING + RNG.integers(3, 64, size=n).tolist() for n in (2, 5, 11)] + [[5, 6, 7]]
SIBLINGS = 3
MESH = (("data", 2), ("context", 2), ("expert", 2))


def _mesh(mesh: tuple[tuple[str, int], ...] = ()) -> jax.sharding.Mesh:
    return meshes.make_mesh(dict(mesh) or {"fsdp": 1}, None if mesh else jax.devices()[:1])


def _weights(nudge: float, mesh: jax.sharding.Mesh) -> transformer.Params:
    """Make weights: the router column of expert 2i + 1 is column 2i, scaled by 1 + nudge."""
    params = jax.tree.map(np.copy, tiny.weights(POLICY))
    router = params["layers"]["moe"]["router_kernel"]
    router[..., 1::2] = router[..., ::2] * np.float32(1 + nudge)
    shapes, axes = transformer.abstract_params(POLICY)
    return jax.device_put(params, meshes.shardings(mesh, axes, shapes))


@functools.cache
def _sampled(
    config: SamplerConfig = CONFIG,
    mesh: tuple[tuple[str, int], ...] = (),
    policy: PolicyConfig = POLICY,
) -> list[list[Sample]]:
    device_mesh = _mesh(mesh)
    sampler = Sampler(policy, config, (), device_mesh, record_experts=True)
    session = sampler.start_session(_weights(0.0, device_mesh))
    groups = session.sample(PROMPTS, SIBLINGS, jax.random.key(1), config.options(10))
    assert mesh or session.reused_tokens > 0
    if config.speculative_tokens:
        assert session.counts.busy_slot_steps < session.counts.tokens, "no proposal was accepted"
    return [samples for samples in groups if samples is not None]


def _groups(answers: list[list[Sample]]) -> list[TrainGroup]:
    return [
        Reply(prompt, samples, ()).group([1.0, -1.0, 0.5], "responder")
        for prompt, samples in zip(PROMPTS, answers, strict=True)
    ]


def _learner(
    routing: str, mesh: tuple[tuple[str, int], ...] = (), policy: PolicyConfig = POLICY, **loss
) -> Learner:
    layout = PackingConfig((Bucket(160, 120),), 320)
    optimizer = OptimizerConfig(learning_rate=0.01, epsilon=1e-3)
    return Learner(policy, optimizer, LossConfig(routing=routing, **loss), layout, _mesh(mesh))


def _differences(
    routing: str, groups: list[TrainGroup], mesh: tuple[tuple[str, int], ...] = ()
) -> np.ndarray:
    """Return learner minus sampler logprobs of all answer tokens; nudge the learner's router."""
    learner = _learner(routing, mesh)
    params, parts = _weights(1e-6, learner.mesh), []
    for batch in learner.pack(groups, learner.weigh(groups))[0]:
        assert (batch.experts is None) == (routing == "own")
        with learner.on_mesh():
            logprobs = learner.fns.logprobs(params, {}, learner.place(batch))
        parts.append((np.asarray(logprobs) - batch.old_logprob)[batch.answer >= 0])
    return np.concatenate(parts)


@pytest.mark.parametrize("mesh", [(), MESH], ids=str)
def test_replayed_logprobs_equal_the_samplers(mesh) -> None:
    groups = _groups(_sampled())
    assert np.abs(_differences("own", groups, mesh)).max() > 1e-2
    np.testing.assert_allclose(_differences("sampled", groups, mesh), 0.0, atol=1e-4)


def test_logprobs_of_a_bfloat16_sampler_are_nearer_with_its_experts() -> None:
    mesh = _mesh()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _weights(0.0, mesh))
    prompt_samples = Sampler(POLICY, CONFIG, (), mesh, record_experts=True).sample(
        params, PROMPTS, SIBLINGS, jax.random.key(1)
    )
    groups = _groups([samples for samples in prompt_samples if samples is not None])
    own_differences, replayed_differences = (
        np.abs(_differences(name, groups)) for name in ("own", "sampled")
    )
    assert replayed_differences.mean() < own_differences.mean() / 2


def test_update_reports_differing_experts_and_needs_a_record() -> None:
    groups = _groups(_sampled())
    learner = _learner("sampled")
    state, numbers = learner.update(learner.init(_weights(0.0, learner.mesh)), groups)
    assert numbers["router_difference"] == 0.0
    assert numbers["sampler_difference"] < 1e-5
    nudged = learner.init(_weights(1e-6, learner.mesh))
    _, numbers = learner.update(nudged, groups)
    assert 0.5 < numbers["router_difference"] < 1.0
    assert numbers["sampler_difference"] < 1e-5
    unknown = tiny.change_samples(groups[0], prompt_experts=[None] * 3)
    with pytest.raises(ValueError, match=r"loss\.routing = 'sampled': needs the experts of every"):
        learner.update(state, [*groups, unknown])


def test_update_on_a_mesh_with_remat_equals_one_device() -> None:
    groups, params, metrics = _groups(_sampled()), [], []
    remat = dataclasses.replace(POLICY, remat="block")
    for learner in (_learner("sampled"), _learner("sampled", MESH, remat)):
        state, numbers = learner.update(learner.init(_weights(1e-3, learner.mesh)), groups)
        params.append(jax.device_get(state.params))
        metrics.append([numbers[name] for name in ("gradient_norm", "router_difference")])
    np.testing.assert_allclose(*metrics, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *params)


def test_reference_model_chooses_its_own_experts() -> None:
    groups = [
        tiny.change_samples(group, experts=[(s.experts + 1) % 8 for s in group.samples])
        for group in _groups(_sampled())
    ]
    learner = _learner("sampled", kl_weight=0.1)
    params = _weights(0.0, learner.mesh)
    reference = jax.tree.map(jnp.copy, params)
    _, numbers = learner.update(learner.init(params), groups, reference)
    assert numbers["kl"] > 1e-3, "the same weights, but with other experts"


@pytest.mark.parametrize("policy", [POLICY, WINDOWS], ids=["full", "windows"])
def test_experts_are_those_that_the_policy_chooses(policy: PolicyConfig) -> None:
    """A plain pass over each whole sequence chooses the same for every token."""
    params = _weights(0.0, _mesh())
    for prompt, samples in zip(PROMPTS, _sampled(policy=policy), strict=True):
        for sample in samples:
            assert sample.experts is not None and sample.prompt_experts is not None
            assert sample.experts.dtype == np.int8 and len(sample.experts) == len(sample.tokens)
            assert sample.prompt_experts is samples[0].prompt_experts
            experts = np.concatenate([sample.prompt_experts, sample.experts])
            tokens = np.array([[*prompt, *sample.tokens]], np.int32)
            expected_experts = _plain_pass(
                policy, params, jnp.asarray(np.pad(tokens, ((0, 0), (0, 48)))[:, :48])
            )
            np.testing.assert_array_equal(experts, expected_experts[: tokens.shape[1]])


@functools.partial(jax.jit, static_argnums=0)
def _plain_pass(policy, params, tokens):
    positions = jnp.arange(tokens.shape[1])[None]
    attend = update.attend.packed()
    context = {"last_query": jnp.full_like(tokens, tokens.shape[1] - 1)}
    *_, routing = transformer.hidden_states(
        policy, params, tokens, positions, attend, None, context, record_experts=True
    )
    experts = moe.by_token(routing)
    assert experts is not None
    return experts[0]


def _assert_same(groups: list[list[Sample]], expected_groups: list[list[Sample]]) -> None:
    for samples, expected_samples in zip(groups, expected_groups, strict=True):
        for a, b in zip(samples, expected_samples, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.experts, b.experts)
            np.testing.assert_array_equal(a.prompt_experts, b.prompt_experts)


def test_experts_of_accepted_proposals_are_recorded() -> None:
    greedy = dataclasses.replace(CONFIG, temperature=0.0)
    speculation = dataclasses.replace(greedy, speculative_tokens=3, speculative_ngram=1)
    _assert_same(_sampled(speculation), _sampled(greedy))


def test_experts_are_recorded_on_a_mesh() -> None:
    _assert_same(_sampled(dataclasses.replace(CONFIG, kv_cache_tokens=8192), MESH), _sampled())


def test_pages_keep_their_experts_for_later_requests() -> None:
    """A pool of one request: pages are reused, idle prefixes shared, and others evicted."""
    small = dataclasses.replace(CONFIG, kv_cache_tokens=48, slots=2)
    _assert_same(_sampled(small), _sampled())


def test_nothing_is_recorded_without_the_switch() -> None:
    mesh = _mesh()
    sampler = Sampler(POLICY, CONFIG, (), mesh)
    (samples,) = sampler.sample(_weights(0.0, mesh), PROMPTS[:1], 1, jax.random.key(1))
    assert samples is not None
    assert samples[0].experts is None and samples[0].prompt_experts is None
    learner = _learner("own")
    with nn.logical_axis_rules(meshes.RULES):
        assert learner.empty_batch(learner.packing.buckets[0]).experts is None
