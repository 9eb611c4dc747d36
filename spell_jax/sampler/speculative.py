"""Prompt-lookup (n-gram) speculative decoding.

If the last tokens of a prompt and its answer occur earlier in that text, the tokens that followed
there (at the last such place) are proposed, because answers quote their documents. A proposal is
accepted only while it equals the token sampled from the policy (programs.py). Answers therefore
equal the answers of plain decoding. Sources: Saxena, Prompt Lookup Decoding (2023); Leviathan et
al. 2023 (arXiv 2211.17192) for checking several tokens in one pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes

NO_TOKEN = -1  # no proposal: equals no sampled token


def propose(
    prompts: Int32[Array, "M P"],
    row: Int32[Array, " N"],
    length: Int32[Array, " N"],
    answers: Int32[Array, "N S"],
    count: Int32[Array, " N"],
    match: int,
    tokens: int,
) -> Int32[Array, "N {tokens}"]:
    """Propose the next tokens of each slot; NO_TOKEN without a proposal.

    Args:
      prompts: prompt tokens of each row, right-aligned.
      row: row of each slot on its device.
      length: length of each slot's prompt.
      answers: tokens sampled by each slot; the first `count` are valid.
      match: number of trailing tokens that must match.
      tokens: number of tokens to propose.
    """

    def on_device(prompts, row, length, answers, count):
        return _propose(prompts[row], length, answers, count, match, tokens)

    if collectives.current_mesh() is None:
        return on_device(prompts, row, length, answers, count)
    # Each device searches the texts of its own slots, so no prompt moves between devices.
    rows = PartitionSpec(meshes.ROWS)
    return jax.shard_map(on_device, in_specs=rows, out_specs=rows, check_vma=False)(
        prompts, row, length, answers, count
    )


def _propose(
    prompt: Int32[Array, "N P"],
    length: Int32[Array, " N"],
    answers: Int32[Array, "N S"],
    count: Int32[Array, " N"],
    match: int,
    tokens: int,
) -> Int32[Array, "N {tokens}"]:
    """Propose tokens as `propose` on one device, given the prompt of each slot."""
    padded = prompt.shape[1]
    text = jnp.concatenate([prompt, answers], axis=1)
    index = jnp.arange(text.shape[1])
    last = padded + count - 1  # index of the last sampled token
    inside = (index >= padded - length[:, None]) & (index <= last[:, None])
    text = jnp.where(inside, text, NO_TOKEN)
    # Not the last token itself: it would match its own place, where nothing follows.
    matches = inside & (index < last[:, None])
    for back in range(match):
        target = jnp.take_along_axis(text, (last - back)[:, None], axis=1)
        before = jnp.pad(text, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, : text.shape[1]]
        matches &= (before == target) & (target != NO_TOKEN)
    end = jnp.max(jnp.where(matches, index, -1), axis=1)  # of the last match
    following = end[:, None] + 1 + jnp.arange(tokens)
    proposed = jnp.take_along_axis(text, following, axis=1, mode="fill", fill_value=NO_TOKEN)
    # Nothing after a gap: a proposal counts only if all proposals before it are accepted.
    is_valid = jnp.cumprod(proposed != NO_TOKEN, axis=1, dtype=jnp.int32) > 0
    return jnp.where(is_valid & (end >= 0)[:, None], proposed, NO_TOKEN)
