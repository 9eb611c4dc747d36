"""The policy against another implementation, and its variants."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import dense
from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from tests import tiny

REASON = "the comparison needs torch and transformers (extra 'test'; torch is installed apart)"
TOKENS = np.random.default_rng(0).integers(0, 64, size=(2, 20)).astype(np.int32)


def logits(policy: PolicyConfig, params, tokens=TOKENS) -> np.ndarray:
    run = jax.jit(transformer.logits, static_argnums=0)
    return np.asarray(run(policy, params, jnp.asarray(tokens)))


@pytest.mark.parametrize("tied", [True, False])
def test_equals_transformers(tied: bool, tmp_path) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        wanted = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    model.save_pretrained(tmp_path)
    policy, params = weights.load(tmp_path)
    assert policy.rope_theta == 50_000.0 and policy.tied_embeddings == tied
    assert np.abs(wanted).max() > 1.0
    np.testing.assert_allclose(logits(policy, params), wanted, atol=2e-4)

    # And back: what we save is read by transformers as the same model.
    weights.save(tmp_path / "ours", policy, params)
    again, report = transformers.Qwen2ForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        found = again(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-6)


VARIANTS = [
    {"qk_norm": True, "kv_heads": 4},
    {"qkv_bias": False, "tied_embeddings": False, "kv_heads": 1},
]


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_variants_run_and_every_parameter_matters(change: dict) -> None:
    policy = dataclasses.replace(tiny.POLICY, **change)
    params = tiny.weights(policy)

    def loss(params):
        every = jax.nn.log_softmax(transformer.logits(policy, params, jnp.asarray(TOKENS)))
        return -jnp.mean(every[:, :-1, 3])

    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 1e-7, path


def test_logits_are_causal() -> None:
    changed = TOKENS.copy()
    changed[:, 12] = (changed[:, 12] + 1) % 64
    before, after = (logits(tiny.POLICY, tiny.weights(), t) for t in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert np.abs(before[:, 12:] - after[:, 12:]).max(axis=-1).min() > 1e-4


def test_an_answer_behind_its_prompt_in_a_packed_row() -> None:
    """Two answers behind one prompt score as each would alone."""
    prompt, first, second = TOKENS[0, :6], TOKENS[0, 6:10], TOKENS[1, :5]
    packed = np.concatenate([prompt, first, second])[None]
    positions = jnp.array([[*range(10), *range(6, 11)]])
    context = {"last_reader": jnp.array([[14] * 6 + [9] * 4 + [14] * 5])}

    @jax.jit
    def score(params, tokens):
        hidden, _ = transformer.hidden_states(
            tiny.POLICY, params, tokens, positions, dense.attend_packed, context=context
        )
        return transformer.unembed(tiny.POLICY, params, hidden)

    found = np.asarray(score(tiny.weights(), jnp.asarray(packed)))[0]
    alone = logits(tiny.POLICY, tiny.weights(), np.concatenate([prompt, second])[None])[0]
    np.testing.assert_allclose(found[10:], alone[6:], atol=1e-5)
    np.testing.assert_allclose(found[:6], alone[:6], atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "block"])
def test_remat_is_where_it_is_asked_for(remat: str) -> None:
    """That it changes no gradient is shown in learner/test_update.py."""
    policy = dataclasses.replace(tiny.POLICY, remat=remat)
    program = jax.make_jaxpr(functools.partial(transformer.logits, policy))(tiny.weights(), TOKENS)
    assert ("remat" in str(program)) == (remat == "block")


def test_init_is_plain_finite_and_depends_on_the_key_only() -> None:
    run = jax.jit(transformer.init, static_argnums=0)
    params, again = run(tiny.POLICY, jax.random.key(3)), run(tiny.POLICY, jax.random.key(3))
    other = run(tiny.POLICY, jax.random.key(4))
    shapes, _ = transformer.abstract_params(tiny.POLICY)
    jax.tree.map(lambda x, s: np.testing.assert_equal(x.shape, s.shape), params, shapes)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    kernel = params["layers"]["attention"]["q_kernel"]
    assert np.std(kernel) == pytest.approx(tiny.POLICY.width**-0.5, rel=0.1)
    assert not np.array_equal(kernel[0], kernel[1])  # layers differ
    assert not np.array_equal(kernel, other["layers"]["attention"]["q_kernel"])
