"""Tests of the policy's variants; test_families.py compares with another implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import attend
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.rope import RopeConfig
from tests import programs, tiny

TOKENS = np.random.default_rng(0).integers(0, 64, size=(2, 20)).astype(np.int32)


def logits(policy: PolicyConfig, params, tokens=TOKENS) -> np.ndarray:
    run = jax.jit(transformer.logits, static_argnums=0)
    return np.asarray(run(policy, params, jnp.asarray(tokens)))


VARIANTS = [
    {"qk_norm": True, "kv_heads": 4},
    {"experts": 4, "experts_per_token": 2, "qk_norm": True},
    {"qkv_bias": False, "tied_embeddings": False, "kv_heads": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_every_parameter_of_each_variant_has_a_gradient(change: dict) -> None:
    policy = dataclasses.replace(tiny.POLICY, **change)
    params = tiny.weights(policy)

    def loss(params):
        logprobs = jax.nn.log_softmax(transformer.logits(policy, params, jnp.asarray(TOKENS)))
        return -jnp.mean(logprobs[:, :-1, 3])

    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 1e-7, path


def test_logits_are_causal() -> None:
    changed_tokens = TOKENS.copy()
    changed_tokens[:, 12] = (changed_tokens[:, 12] + 1) % 64
    before, after = (logits(tiny.POLICY, tiny.weights(), t) for t in (TOKENS, changed_tokens))
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert np.abs(before[:, 12:] - after[:, 12:]).max(axis=-1).min() > 1e-4


# Windows that begin in the prompt, in an answer or before the row, and a layer without a window.
WINDOWS = dataclasses.replace(
    tiny.POLICY, layers=3, window=4, window_layers=(0, 2), window_rope=RopeConfig(theta=100.0)
)


@pytest.mark.parametrize(
    ("policy", "kernel"), [(tiny.POLICY, "auto"), (WINDOWS, "dense"), (WINDOWS, "chunked")]
)
def test_packed_answers_score_as_if_each_were_alone(policy: PolicyConfig, kernel: str) -> None:
    """Two answers after one prompt score as each would alone."""
    prompt, first, second = TOKENS[0, :6], TOKENS[0, 6:10], TOKENS[1, :5]
    packed = np.concatenate([prompt, first, second])[None]
    positions = jnp.array([[*range(10), *range(6, 11)]])
    context = {"last_query": jnp.array([[14] * 6 + [9] * 4 + [14] * 5])}

    @jax.jit
    def score(params, tokens):
        hidden, *_ = transformer.hidden_states(
            policy, params, tokens, positions, attend.packed(kernel), context=context
        )
        return transformer.unembed(policy, params, hidden)

    params = tiny.weights(policy)
    packed_logits = np.asarray(score(params, jnp.asarray(packed)))[0]
    for answer, place in ((first, slice(6, 10)), (second, slice(10, 15))):
        single_logits = logits(policy, params, np.concatenate([prompt, answer])[None])[0]
        np.testing.assert_allclose(packed_logits[place], single_logits[6:], atol=1e-5)
        np.testing.assert_allclose(packed_logits[:6], single_logits[:6], atol=1e-5)


def test_only_layers_with_a_window_forget_early_tokens() -> None:
    """Two layers with a window of 4 reach 2 * 3 tokens back; a full layer sees all."""
    changed_tokens = TOKENS.copy()
    changed_tokens[:, 2] = (changed_tokens[:, 2] + 1) % 64
    for layers, first_equal in (((0, 1), 9), ((0,), 20), ((1,), 20)):
        policy = dataclasses.replace(tiny.POLICY, window=4, window_layers=layers)
        before, after = (logits(policy, tiny.weights(policy), t) for t in (TOKENS, changed_tokens))
        differs = np.abs(before - after).max(axis=(0, 2)) > 1e-4
        assert np.flatnonzero(differs).tolist() == list(range(2, first_equal)), layers


@pytest.mark.slow
def test_remat_policies_keep_the_expected_activations() -> None:
    """Count the numbers kept for the backward pass; learner/test_update.py tests gradients."""

    def count_kept_numbers(remat: str) -> int:
        policy = dataclasses.replace(tiny.POLICY, remat=remat)
        run = functools.partial(transformer.logits, policy)
        _, backward = jax.eval_shape(lambda p: jax.vjp(run, p, TOKENS), tiny.weights())
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    block, attention, dots, none = map(count_kept_numbers, ("block", "attention", "dots", "none"))
    layers, tokens, c = tiny.POLICY.layers, TOKENS.size, tiny.POLICY
    # The output, and one log-sum-exp per head.
    assert attention - block == layers * tokens * c.heads * (c.head_size + 1)
    assert attention < dots < none


def test_offload_remat_puts_block_inputs_on_the_host() -> None:
    """Only the program for TPUs shows it, since the memory of a CPU is the host's."""

    def text(remat: str) -> str:
        policy = dataclasses.replace(tiny.POLICY, remat=remat)
        gradient = jax.jit(jax.grad(lambda p: transformer.logits(policy, p, TOKENS).sum()))
        return gradient.trace(tiny.weights()).lower(lowering_platforms=("tpu",)).as_text()

    assert "pinned_host" in text("offload") and "pinned_host" not in text("block")


def test_kernel_and_bias_gradients_are_summed_in_float32() -> None:
    """A kernel's gradient is the float32 result of one product of bfloat16 numbers.

    On CPUs a bias's gradient is a product with ones.
    """
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tiny.weights())
    gradient = jax.grad(lambda p: transformer.logits(tiny.POLICY, p, TOKENS).sum())
    equations = list(programs.equations(jax.make_jaxpr(gradient)(low).jaxpr))
    products = [x for x in equations if x.primitive.name == "dot_general"]
    product_shapes = [
        x.outvars[0].aval.shape
        for x in products
        if x.outvars[0].aval.dtype == jnp.float32
        and {v.aval.dtype for v in x.invars} == {jnp.dtype(jnp.bfloat16)}
    ]
    layers = low["layers"]
    for part, names in (("attention", "qkvo"), ("mlp", ("gate", "up", "down"))):
        for name in names:
            kernel = layers[part][f"{name}_kernel"][0]
            inputs = kernel.shape[0] * (kernel.shape[1] if name == "o" else 1)
            assert (inputs, kernel.size // inputs) in product_shapes, name
    for name in "qkv":
        shape = layers["attention"][f"{name}_bias"].shape[1:]
        sums = [x for x in products if x.outvars[0].aval.shape == shape]
        dtypes = {v.aval.dtype for x in sums for v in x.invars}
        assert dtypes == {jnp.dtype(jnp.float32)}, name


def test_init_has_the_expected_scale_and_depends_only_on_the_key() -> None:
    run = jax.jit(transformer.init, static_argnums=0)
    params, same_params = run(tiny.POLICY, jax.random.key(3)), run(tiny.POLICY, jax.random.key(3))
    other_params = run(tiny.POLICY, jax.random.key(4))
    shapes, _ = transformer.abstract_params(tiny.POLICY)
    jax.tree.map(lambda x, s: np.testing.assert_equal(x.shape, s.shape), params, shapes)
    jax.tree.map(np.testing.assert_array_equal, params, same_params)
    kernel = params["layers"]["attention"]["q_kernel"]
    assert np.std(kernel) == pytest.approx(tiny.POLICY.width**-0.5, rel=0.1)
    assert not np.array_equal(kernel[0], kernel[1])  # layers differ
    assert not np.array_equal(kernel, other_params["layers"]["attention"]["q_kernel"])
