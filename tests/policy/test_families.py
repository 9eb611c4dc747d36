"""Tests of every family against transformers: logits, greedy text, gradients, embeddings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.policy import int8, transformer, weights
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests.policy import families

LENGTH = 120  # the scaled ropes of families.py start from a context of 32
TOKENS = np.random.default_rng(0).integers(0, families.VOCAB, size=(2, LENGTH)).astype(np.int32)
every_family = pytest.mark.parametrize("family", families.FAMILIES)
# Every model type and kind of rope; all further logits are compared, too.
SOME = ["qwen2", "qwen3 untied, linear", "qwen3_moe, plain router, yarn", "llama, llama3"]
SOME += ["smollm3", "olmo2"]
SOME += ["qwen3, windows", "mistral", "smollm3, windows", "olmo3, yarn", "gemma3"]
some_families = pytest.mark.parametrize("family", SOME)


@pytest.fixture(scope="module")
def load_family(tmp_path_factory):
    """Return a cached function from a family to (transformers' model, our config, our weights)."""

    @functools.cache
    def make(family: str):
        folder = tmp_path_factory.mktemp("family")
        model = families.save(family, folder)
        return model, *weights.load(folder)

    return make


def their_logits(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@functools.partial(jax.jit, static_argnums=0)
def our_logits(config, params, tokens):
    return transformer.logits(config, params, tokens)


@pytest.mark.slow
@every_family
def test_logits_equal_transformers(family: str, load_family) -> None:
    model, config, params = load_family(family)
    expected_logits = their_logits(model, TOKENS)
    logits = np.asarray(our_logits(config, params, TOKENS))
    assert np.abs(expected_logits).max() > 1.0
    np.testing.assert_allclose(logits, expected_logits, atol=1e-4)


@pytest.mark.slow
@some_families
def test_sixty_four_greedy_tokens_equal_transformers(family: str, load_family) -> None:
    """Through prefill, cache and decode loop, with prompts of two lengths in one padded batch."""
    model, config, params = load_family(family)
    import torch

    prompts = [TOKENS[0, :30], TOKENS[1, :21]]
    settings = SamplerConfig(
        0.0,
        max_tokens=64,
        max_prompt=32,
        page_size=16,
        kv_cache_tokens=512,
    )
    sampler = Sampler(config, settings, (), meshes.make_mesh(devices=jax.devices()[:1]))
    answers = sampler.sample(params, prompts, 1, jax.random.key(0))
    for prompt, samples in zip(prompts, answers, strict=True):
        ids = torch.tensor(prompt[None], dtype=torch.long)
        expected_tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert samples is not None
        assert samples[0].tokens.tolist() == expected_tokens.tolist()


our_embeddings = jax.jit(transformer.embed, static_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])  # dense, and a mixture of experts
def test_embedding_of_a_padded_row_equals_that_of_the_row_alone(family: str, load_family) -> None:
    _, config, params = load_family(family)
    length = 50
    row_embedding = our_embeddings(config, params, TOKENS[:1, :length], jnp.array([length]))
    padded_embeddings = our_embeddings(config, params, TOKENS, jnp.array([length, LENGTH]))
    np.testing.assert_allclose(padded_embeddings[0], row_embedding[0], atol=1e-5)
    assert np.abs(padded_embeddings[0] - padded_embeddings[1]).max() > 1e-2


@pytest.mark.slow
@some_families
def test_gradients_equal_torch_autograd(family: str, load_family, tmp_path) -> None:
    """Gradients of the summed logprob of a short text, relative to each tensor's largest entry."""
    model, config, params = load_family(family)
    import torch

    text = TOKENS[:, :16]

    def logprob(params):
        logprobs = jax.nn.log_softmax(transformer.logits(config, params, text))[:, :-1]
        return jnp.sum(jnp.take_along_axis(logprobs, text[:, 1:, None], axis=-1))

    gradients = jax.jit(jax.grad(logprob))(params)
    model.zero_grad()
    ids = torch.tensor(text, dtype=torch.long)
    logprobs = model(ids).logits.log_softmax(-1)[:, :-1]
    logprobs.gather(-1, ids[:, 1:, None]).sum().backward()
    # Gradients are converted like weights: saved as a model, read by our table.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.grad, parameter.data
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.grad, None
    _, expected_gradients = weights.load(tmp_path)
    for (path, gradient), expected_gradient in zip(
        jax.tree_util.tree_leaves_with_path(gradients),
        jax.tree.leaves(expected_gradients),
        strict=True,
    ):
        size = np.abs(expected_gradient).max()
        assert size > 1e-4, path
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-3 * size, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo2", "gemma3"])
def test_int8_weights_are_the_rounded_kernels(family: str, load_family) -> None:
    _, config, params = load_family(family)
    kernels = int8.kernels(params)
    quantized = int8.quantize(kernels)
    rounded = {
        path: int8.dequantize(path, quantized[path], quantized[int8.scale_path(path)])
        for path in kernels
    }
    logits = our_logits(config, int8.with_int8(params, quantized), TOKENS)
    expected_logits = our_logits(config, int8.with_int8(params, rounded), TOKENS)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-3)
    assert np.abs(logits - our_logits(config, params, TOKENS)).max() > 1e-3


def test_embeddings_equal_the_last_hidden_state_of_transformers(load_family) -> None:
    model, config, params = load_family("qwen3")
    import torch

    lengths = np.array([LENGTH, 33], np.int32)
    embeddings = our_embeddings(config, params, TOKENS, jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        with torch.no_grad():
            ids = torch.tensor(TOKENS[row : row + 1, :length], dtype=torch.long)
            last = model.model(ids).last_hidden_state[0, -1]
        expected_embedding = torch.nn.functional.normalize(last, dim=0).numpy()
        np.testing.assert_allclose(embeddings[row], expected_embedding, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=-1), 1.0, rtol=1e-6)
