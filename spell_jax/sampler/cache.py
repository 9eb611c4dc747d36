"""Keys and values of the sampler: the prompt's once a group, the suffix's once a sibling."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spell_jax.attention.dense import MASKED


@flax.struct.dataclass
class Cache:
    """One array a kind, with a leading layer axis.

    Attributes:
      prompt_keys, prompt_values: [L, B, P, K, H], written by prefill.
      suffix_keys, suffix_values: [L, B, G, S, K, H], written token by token.
    """

    prompt_keys: jax.Array
    prompt_values: jax.Array
    suffix_keys: jax.Array
    suffix_values: jax.Array


def from_prefill(prompt: tuple[jax.Array, jax.Array], group: int, max_tokens: int) -> Cache:
    """A cache behind prefilled prompts ([L, B, P, K, H] each) with empty suffixes."""
    keys, values = prompt
    layers, rows, _, kv_heads, size = keys.shape
    empty = jnp.zeros((layers, rows, group, max_tokens, kv_heads, size), keys.dtype)
    return Cache(keys, values, empty, empty)


def write(cache: Cache, new: tuple[jax.Array, jax.Array], step: jax.Array) -> Cache:
    """Puts this token's keys and values ([L, B, G, K, H] each) at suffix position `step`."""
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, token[:, :, :, None], step, axis=3)
        for old, token in zip((cache.suffix_keys, cache.suffix_values), new, strict=True)
    )
    return dataclasses.replace(cache, suffix_keys=keys, suffix_values=values)


def attend_decode(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache, context: dict[str, Any]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The policy's `Attend` for one new token of each sibling.

    All siblings meet their prompt in one matrix product; the prompt, the sibling's own suffix and
    the new token itself share one softmax over their joined scores.

    Args:
      q: [B, G, N, H], the siblings on the time axis.
      k, v: [B, G, K, H] of the new token.
      cache: this layer's slices, without the layer axis; holds tokens before `step`.
      context: "prompt_length" int32 [B] and "step" int32 scalar.

    Returns:
      [B, G, N, H], and (k, v) for write(), so that the scan over layers copies no cache.
    """
    rows, group, heads, size = q.shape
    q = q.reshape(rows, group, k.shape[2], -1, size)
    joined = [
        jnp.einsum("bgkrh,bpkh->bgkrp", q, cache.prompt_keys, preferred_element_type=jnp.float32),
        jnp.einsum("bgkrh,bgskh->bgkrs", q, cache.suffix_keys, preferred_element_type=jnp.float32),
        jnp.einsum("bgkrh,bgkh->bgkr", q, k, preferred_element_type=jnp.float32)[..., None],
    ]
    in_prompt = jnp.arange(joined[0].shape[-1]) < context["prompt_length"][:, None]
    in_suffix = jnp.arange(joined[1].shape[-1]) < context["step"]
    scale = size**-0.5
    joined = [
        jnp.where(in_prompt[:, None, None, None], joined[0] * scale, MASKED),
        jnp.where(in_suffix, joined[1] * scale, MASKED),
        joined[2] * scale,
    ]
    weights = jax.nn.softmax(jnp.concatenate(joined, axis=-1), axis=-1).astype(v.dtype)
    split = (joined[0].shape[-1], joined[0].shape[-1] + joined[1].shape[-1])
    on_prompt, on_suffix, on_self = jnp.split(weights, split, axis=-1)
    out = (
        jnp.einsum("bgkrp,bpkh->bgkrh", on_prompt, cache.prompt_values)
        + jnp.einsum("bgkrs,bgskh->bgkrh", on_suffix, cache.suffix_values)
        + on_self * v[:, :, :, None]
    )
    return out.reshape(rows, group, heads, size), (k, v)
