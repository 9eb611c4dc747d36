"""Guesses of what comes next, looked up in the prompt: answers quote documents.

1. A slot's text is its prompt and what it has sampled. Where its last tokens stand earlier in it,
   what followed there is the guess; of several places the last.
2. Guesses are checked, never believed: each token is sampled from the policy as always, and a guess
   counts as long as it equals what was sampled (steps.py). So answers are those of plain decoding.

Source: Saxena, Prompt Lookup Decoding (2023); Leviathan et al. 2023 (arXiv 2211.17192) for checking
several tokens in one pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes

NOTHING = -1  # no token: a guess that is never sampled


def guess(
    prompts: jax.Array,
    row: jax.Array,
    length: jax.Array,
    own: jax.Array,
    count: jax.Array,
    match: int,
    tokens: int,
) -> jax.Array:
    """The tokens that may come next in each slot, int32 [N, tokens]; NOTHING where none is known.

    Args:
      prompts: int32 [M, P], of rows, each at the end of its row.
      row: int32 [N], the slot's among those on the same device.
      length: int32 [N], of the slot's prompt.
      own: int32 [N, S], what the slot has sampled.
      count: int32 [N], how many tokens that is.
      match: last tokens that must stand at the place of a guess.
      tokens: to guess.
    """
    given = (prompts, row, length, own, count)

    def on_device(prompts, row, length, own, count):
        return _guess(prompts[row], length, own, count, match, tokens)

    if collectives.current_mesh() is None:
        return on_device(*given)
    rows = PartitionSpec(meshes.ROWS)
    return jax.shard_map(on_device, in_specs=rows, out_specs=rows, check_vma=False)(*given)


def _guess(prompt, length, own, count, match: int, tokens: int) -> jax.Array:
    """`guess` with each slot's own prompt [N, P]."""
    padded = prompt.shape[1]
    text = jnp.concatenate([prompt, own], axis=1)
    place = jnp.arange(text.shape[1])
    last = padded + count - 1  # the place of what the slot drew last
    inside = (place >= padded - length[:, None]) & (place <= last[:, None])
    text = jnp.where(inside, text, NOTHING)
    found = inside & (place < last[:, None])
    for back in range(match):
        wanted = jnp.take_along_axis(text, (last - back)[:, None], axis=1)
        before = jnp.pad(text, ((0, 0), (back, 0)), constant_values=NOTHING)[:, : text.shape[1]]
        found &= (before == wanted) & (wanted != NOTHING)
    where = jnp.max(jnp.where(found, place, -1), axis=1)
    following = where[:, None] + 1 + jnp.arange(tokens)
    guessed = jnp.take_along_axis(text, following, axis=1, mode="fill", fill_value=NOTHING)
    # A guess goes on until the text does not: what is behind its end is none.
    known = jnp.cumprod(guessed != NOTHING, axis=1, dtype=jnp.int32) > 0
    return jnp.where(known & (where >= 0)[:, None], guessed, NOTHING)
