"""The sampler's two programs: a page of each of some prompts is read; all slots draw some tokens.

1. `prefill` takes B pages of prompts, each behind pages that are in the pool (or in the same call),
   writes their keys and values, and keeps the last token's hidden state of prompts that end.
2. `decode` takes N slots, each a sibling behind a prompt. All siblings of a prompt meet its pages
   in one matrix product, each its own suffix's pages; the two parts are merged by log-sum-exp.
3. It goes on until so many tokens are drawn, or enough slots are free to be filled again.
4. What is where (tables of pages, slots, limits) is decided between calls by the host, and comes in
   as arrays: shapes never change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spell_jax.attention import paged
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.sampler import cache, head, nucleus

# What is on the host numpy's is on a device JAX's; of placements and of shapes there are trees too.
Array = Any


@flax.struct.dataclass
class State:
    """What stays on the device between calls.

    Attributes:
      pages: the pool; page 0 belongs to nobody, and rows without a task write there.
      prompt_hidden: [R, D], the last token's hidden state of resident prompts.
      hidden: for each lane [N, D], that of each slot's last token.
    """

    pages: paged.Pages
    prompt_hidden: Array
    hidden: tuple[Array, ...]


@flax.struct.dataclass
class PromptPages:
    """B pages of prompts to read.

    Attributes:
      tokens: int32 [B, C], padded behind the prompt's end.
      start: int32 [B], the position of the page's first token.
      length: int32 [B], tokens of the prompt in the page; 0: no task.
      page: int32 [B], where keys and values go.
      table: int32 [B, J], the prompt's pages in order, this one included.
      resident: int32 [B], whose prompt ends here; R: it goes on.
    """

    tokens: Array
    start: Array
    length: Array
    page: Array
    table: Array
    resident: Array


@flax.struct.dataclass
class Slots:
    """N slots and their M rows of G cells, each row a prompt's siblings.

    Attributes:
      resident: int32 [N], the prompt whose hidden state a new sibling begins from; -1: it goes on.
      prompt_length: int32 [N].
      count, limit: int32 [N], tokens drawn so far, and the number at which to stop; alike: the slot
        rests.
      key: uint32 [N, 2], of the request; sibling: int32 [N], folded into it.
      row, cell: int32 [N], the slot's place among rows.
      slot: int32 [M, G], its inverse; N: an empty cell.
      prompt_table, prompt_visible: int32 [M, J] and [M, G], pages of the row's prompt and how many
        of its keys a cell sees (its length, 0 for an empty cell).
      suffix_table: int32 [N, I], pages of the slot's own tokens.
      sampling: arrays [N].
      enough: int32, how many slots must have ended for the call to return.
    """

    resident: Array
    prompt_length: Array
    count: Array
    limit: Array
    key: Array
    sibling: Array
    row: Array
    cell: Array
    slot: Array
    prompt_table: Array
    prompt_visible: Array
    suffix_table: Array
    sampling: nucleus.Sampling
    enough: Array


@flax.struct.dataclass
class Drawn:
    """What a call of `decode` drew.

    Attributes:
      tokens: int32 [N, steps], of each slot the first `new`.
      log_probs: float32 [N, steps].
      new: int32 [N], tokens drawn.
      stopped: bool [N], whether the last one is a stop token.
      steps: int32, passes of the loop.
    """

    tokens: jax.Array
    log_probs: jax.Array
    new: jax.Array
    stopped: jax.Array
    steps: jax.Array


def prefill(
    config: PolicyConfig, params: transformer.Params, state: State, batch: PromptPages
) -> State:
    """Reads pages of prompts.

    Args:
      config, params: the policy, in the compute dtype.
      state: is updated.
      batch: in whose order pages of one prompt may be in any.
    """
    offsets = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    positions = batch.start[:, None] + offsets
    seen = jnp.where(batch.length[:, None] > 0, positions + 1, 0)
    context = {"page": batch.page, "table": batch.table, "visible": seen}
    hidden, pages, _ = transformer.hidden_states(
        config, params, batch.tokens, positions, cache.attend_prompts, state.pages, context
    )
    last = jnp.maximum(batch.length - 1, 0)
    last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    prompt_hidden = state.prompt_hidden.at[batch.resident].set(last, mode="drop")
    return dataclasses.replace(state, pages=pages, prompt_hidden=prompt_hidden)


def decode(
    config: PolicyConfig,
    params: transformer.Params,
    state: State,
    slots: Slots,
    *,
    lane: int,
    block: int,
    steps: int,
    stop_ids: tuple[int, ...],
) -> tuple[State, Drawn]:
    """Draws up to `steps` tokens in every slot that is not at its limit.

    Args:
      config, params: the policy, in the compute dtype.
      state: is updated.
      slots: what each slot does.
      lane: whose slots they are.
      block: C, tokens of a page.
      steps: most tokens of a slot.
      stop_ids: tokens that end an answer.
    """
    fresh = (slots.resident >= 0)[:, None]
    hidden = jnp.where(fresh, state.prompt_hidden[slots.resident], state.hidden[lane])
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(slots.key), slots.sibling)
    drawn = Drawn(
        tokens=jnp.zeros((len(hidden), steps), jnp.int32),
        log_probs=jnp.zeros((len(hidden), steps), jnp.float32),
        new=jnp.zeros(len(hidden), jnp.int32),
        stopped=jnp.zeros(len(hidden), bool),
        steps=jnp.int32(0),
    )

    def active(drawn):
        return ~drawn.stopped & (slots.count + drawn.new < slots.limit)

    def going_on(carry):
        *_, drawn = carry
        ended = (slots.count < slots.limit) & ~active(drawn)
        enough = jnp.sum(ended) >= slots.enough
        return (drawn.steps < steps) & ~enough & jnp.any(active(drawn))

    def one_token(carry):
        hidden, pages, drawn = carry
        drawing, count = active(drawn), slots.count + drawn.new
        uniform = jax.vmap(lambda key, n: jax.random.uniform(jax.random.fold_in(key, n)))(
            keys, count
        )
        logits = head.logits(config, params, hidden)
        token, log_prob = nucleus.draw(logits, uniform, slots.sampling)
        new, pages = _forward(config, params, pages, slots, block, token, count, drawing)
        hidden = jnp.where(drawing[:, None], new, hidden)
        return hidden, pages, _append(drawn, token, log_prob, drawing, stop_ids)

    hidden, pages, drawn = jax.lax.while_loop(going_on, one_token, (hidden, state.pages, drawn))
    lanes = (*state.hidden[:lane], hidden, *state.hidden[lane + 1 :])
    return dataclasses.replace(state, pages=pages, hidden=lanes), drawn


_PLACES = ("row", "cell", "slot", "prompt_table", "prompt_visible", "suffix_table")


def _forward(config, params, pages, slots: Slots, block: int, token, count, active):
    """Hidden states [N, D] of one new token of each slot, whose number is `count`; and the pool."""
    place = jnp.take_along_axis(slots.suffix_table, count[:, None] // block, axis=1)[:, 0]
    context = {
        "page": jnp.where(active, place, 0),
        "offset": count % block,
        "visible": jnp.where(active, count + 1, 0),
        **{name: getattr(slots, name) for name in _PLACES},
    }
    positions = (slots.prompt_length + count)[:, None]
    hidden, pages, _ = transformer.hidden_states(
        config, params, token[:, None], positions, cache.attend_slots, pages, context
    )
    return hidden[:, 0], pages


def _append(drawn: Drawn, token, log_prob, drawing, stop_ids: tuple[int, ...]) -> Drawn:
    def put(buffer, value):
        value = jnp.where(drawing, value, 0).astype(buffer.dtype)
        return jax.lax.dynamic_update_slice_in_dim(buffer, value[:, None], drawn.steps, axis=1)

    ended = jnp.isin(token, jnp.asarray(stop_ids, jnp.int32))
    return Drawn(
        tokens=put(drawn.tokens, token),
        log_probs=put(drawn.log_probs, log_prob),
        new=drawn.new + drawing,
        stopped=drawn.stopped | (drawing & ended),
        steps=drawn.steps + 1,
    )
