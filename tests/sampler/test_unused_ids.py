"""Tests that ids without a token have probability exactly 0, in sampling and in training.

The policy has a gap of ids and rows of padding. Its weights are random, so that without a mask
every fourth token would have such an id.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from spell_jax.evaluation import loglikelihood
from spell_jax.learner import update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, MicroBatch, PackingConfig, TrainGroup
from spell_jax.policy import embedding, transformer, weights
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.config import PolicyConfig
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options
from spell_jax.sampler.sampling import sample
from tests import tiny
from tests.policy import hf_folders

UNUSED = ((20, 23), (51, 64))
POLICY = dataclasses.replace(tiny.POLICY, unused_ids=UNUSED, tied_embeddings=False)
ABSENT = np.isin(np.arange(64), [*range(20, 23), *range(51, 64)])
PLAIN = SamplerConfig(
    temperature=1.0,
    max_tokens=100,
    max_prompt=24,
    page_size=8,
    kv_cache_tokens=8 * 2048,
    slots=16,
    samples_per_prompt_batch=8,
    prefill_tokens=64,
    decode_tokens=8,
)
PROMPTS = [np.random.default_rng(i).integers(20, size=9).tolist() for i in range(5)]
MESH = {"fsdp": 2, "context": 2, "tensor": 2}


def _sampled(
    policy: PolicyConfig = POLICY, mesh: dict[str, int] | None = None, **changes
) -> np.ndarray:
    """Sample 4,000 ids."""
    devices = None if mesh else jax.devices()[:1]
    config = dataclasses.replace(PLAIN, **changes)
    sampler = Sampler(policy, config, (), meshes.make_mesh(mesh or {"fsdp": 1}, devices))
    answers = sampler.sample(tiny.weights(policy), PROMPTS, 8, jax.random.key(0))
    samples = [answer for group in answers for answer in group or ()]
    assert all(np.isfinite(answer.logprobs).all() for answer in samples)
    ids = np.concatenate([answer.tokens for answer in samples])
    assert len(ids) == 4000
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "mesh"),
    [
        ({}, None),
        ({"temperature": 0.0}, None),
        ({"temperature": 20.0}, None),
        ({"temperature": 3.0, "top_p": 0.99, "top_k": 60}, None),
        ({"speculative_tokens": 3, "speculative_ngram": 1}, None),
        ({"weights_dtype": "int8", "cache_dtype": "int8"}, None),
        ({}, MESH),
    ],
    ids=str,
)
def test_no_id_without_a_token_is_sampled(changes: dict, mesh: dict | None) -> None:
    assert not ABSENT[_sampled(mesh=mesh, **changes)].any()


def test_low_temperature_keeps_the_likeliest_token_in_the_nucleus() -> None:
    """Rounding of large scaled logits kept none; the first id, here an unused one, was sampled."""
    policy = dataclasses.replace(POLICY, unused_ids=((0, 3), (51, 64)))
    assert _sampled(policy, temperature=1e-3, top_p=0.95).min() >= 3


@pytest.mark.slow
def test_ids_would_be_sampled_without_the_mask() -> None:
    policy = dataclasses.replace(POLICY, unused_ids=())
    assert ABSENT[_sampled(policy, temperature=20.0)].mean() > 0.2


def test_every_bound_of_a_range_is_respected() -> None:
    actual = embedding.has_token(jnp.arange(64), UNUSED)
    assert actual.tolist() == (~ABSENT).tolist()
    adjacent = embedding.has_token(jnp.arange(8), ((2, 4), (4, 5), (7, 8)))
    assert adjacent.tolist() == [True, True, False, False, False, True, True, False]


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_sampled_token_equals_one_of_the_smaller_vocabulary(filters: dict, dropout: bool) -> None:
    """Ids, logprobs, kept mass and cut-offs equal a sample from logits without the absent ids."""
    rng = np.random.default_rng(3)
    logits = rng.normal(scale=2.0, size=(200, 64)).astype(np.float32)
    uniform, options = rng.uniform(size=200).astype(np.float32), tiny.sampling(200, 0.7, **filters)
    penalty = 3.0 * rng.integers(2, size=logits.shape) if dropout else None
    small = None if penalty is None else penalty[:, ~ABSENT]
    actual = jax.jit(sample)(jnp.where(ABSENT, -jnp.inf, logits), uniform, options, penalty)
    expected = jax.jit(sample)(logits[:, ~ABSENT], uniform, options, small)
    np.testing.assert_array_equal(actual.id, np.flatnonzero(~ABSENT)[np.asarray(expected.id)])
    for name in ("logprob", "kept_log_mass", "cutoff"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), atol=2e-5)
    if not filters:
        assert not np.asarray(actual.kept_log_mass).any() and np.isneginf(actual.cutoff).all()


# ---------------------------------------------------------------------------------- Learner

BUCKET = Bucket(64, 32)


@functools.cache
def _learner(policy: PolicyConfig = POLICY, **loss) -> Learner:
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    layout = PackingConfig((BUCKET,), BUCKET.length)
    return Learner(policy, OptimizerConfig(), LossConfig(**loss), layout, mesh, 0.7)


def _groups() -> list[TrainGroup]:
    rng = np.random.default_rng(5)
    tokens = np.flatnonzero(~ABSENT)
    answers = [rng.choice(tokens, size=6) for _ in range(4)]
    return [tiny.group(rng.choice(tokens, size=8), answers, [1.0, -0.5, 0.3, 1.0])]


def _batch(learner: Learner) -> MicroBatch:
    groups = _groups()
    (batch,), refused = learner.pack(groups, learner.weigh(groups))
    assert not refused
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_loss_gives_no_gradient_to_rows_without_a_token(tied: bool) -> None:
    """Also with an entropy bonus: its gradient reaches every token of the vocabulary."""
    learner = _learner(dataclasses.replace(POLICY, tied_embeddings=tied), entropy_weight=0.1)
    params, batch = tiny.weights(learner.policy), _batch(learner)

    def value(params):
        return update.micro_batch_loss(learner.spec, params, {}, batch, None)[0]

    with jax.set_mesh(learner.mesh), nn.logical_axis_rules(meshes.RULES):
        gradient = jax.jit(jax.grad(value))(params)
    rows = np.asarray(gradient["embedding" if tied else "unembedding"])
    assert not rows[ABSENT].any()
    assert np.abs(rows[~ABSENT]).max(axis=1).all()


@pytest.mark.slow
def test_update_moves_no_row_without_a_token() -> None:
    learner = _learner(POLICY)
    state = learner.init(tiny.weights(POLICY))
    before = np.array(state.params["unembedding"])
    state, numbers = learner.update(state, _groups())
    assert np.isfinite(numbers["loss"]) and 0 < numbers["entropy"] < np.log(48)
    moved = np.abs(np.asarray(state.params["unembedding"]) - before)
    # Weight decay may shrink every row; a gradient moves each weight by the rate.
    assert moved[ABSENT].max() < 0.01 * moved[~ABSENT].max()


# -------------------------------------------------------------------------------- Evaluation


class _Folder:
    """A policy as loglikelihood.score needs it."""

    config = POLICY
    sizes = PLAIN

    def load(self, mesh: jax.sharding.Mesh) -> transformer.Params:
        shapes, axes = transformer.abstract_params(POLICY)
        return jax.device_put(tiny.weights(POLICY), meshes.shardings(mesh, axes, shapes))


@pytest.mark.slow
def test_loglikelihoods_leave_out_ids_without_a_token() -> None:
    prompt, answers = (3, 4, 5), [(i,) for i in np.flatnonzero(~ABSENT).tolist()]
    actual = loglikelihood.score(_Folder(), [(prompt, answer) for answer in answers])  # type: ignore[arg-type]
    assert np.exp([total for total, _ in actual]).sum() == pytest.approx(1.0, abs=1e-5)
    assert sum(likeliest for _, likeliest in actual) == 1


@pytest.mark.slow
def test_policy_of_a_folder_samples_only_tokens_of_its_tokenizer(tmp_path) -> None:
    """The folder's tokenizer has 264 tokens, its tables 320 rows."""
    words = tokenizers.load(hf_folders.write(tmp_path / "words", hf_folders.byte_level()))
    shape = dataclasses.replace(tiny.POLICY, vocab_size=320)
    weights.save(tmp_path / "policy", shape, tiny.weights(shape), words)
    policy = TextModel(tmp_path / "policy")
    assert policy.config.unused_ids == ((264, 320),)
    prompts = [np.array(words.chat(text), np.int32) for text in "abcd"]
    options = [Options(temperature=20.0, max_tokens=100)] * len(prompts)
    keys = request_keys(jax.random.key(1), len(prompts))
    sampled = dict(policy.sample(prompts, 20, keys, options, None))
    ids = np.concatenate([answer.tokens for group in sampled.values() for answer in group])
    assert len(ids) > 4000 and ids.max() == 263
