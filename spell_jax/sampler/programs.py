"""The sampler's two programs: a page of each of some prompts is read; all slots draw some tokens.

1. `prefill` takes B pages of prompts, each behind pages that are in the pool (or in the same call),
   writes their keys and values, and keeps the last token's hidden state of prompts that end.
2. `decode` takes N slots, each a sample_index behind a prompt. All siblings of a prompt meet its
   pages in one matrix product, each its own suffix's pages; the two parts are merged by
   log-sum-exp.
3. It goes on until so many tokens are sampled, or enough slots are free to be filled again.
4. A pass may also take tokens that are guessed to come next (lookup.py): as many as equal what is
   then sampled are kept.
5. What is where (tables of pages, slots, limits) is decided between calls by the host, and comes in
   as arrays: shapes never change.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spell_jax.attention import paged
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.sampler import kv_cache, lm_head, speculative
from spell_jax.sampler import sampling as nucleus

# What is on the host numpy's is on a device JAX's; of placements and of shapes there are trees too.
Array = Any


@flax.struct.dataclass
class State:
    """What stays on the device between calls.

    Attributes:
      pages: the pool; page 0 belongs to nobody, and rows without a task write there.
      prompt_hidden: [R, D], the last token's hidden state of prefilled prompts.
      hidden: for each lane [N, D], that of each slot's last token.
      own: for each lane int32 [N, S], tokens that each slot has sampled, as many as its count (what
        is behind means nothing); () where nothing is guessed.
    """

    pages: paged.Pages
    prompt_hidden: Array
    hidden: tuple[Array, ...]
    own: tuple[Array, ...]


@flax.struct.dataclass
class PromptPages:
    """B pages of prompts to read.

    Attributes:
      tokens: int32 [B, C], padded behind the prompt's end.
      start: int32 [B], the position of the page's first token.
      length: int32 [B], tokens of the prompt in the page; 0: no task.
      page: int32 [B], where keys and values go.
      table: int32 [B, J], the prompt's pages in order, this one included.
      prefilled: int32 [B], whose prompt ends here; R: it goes on.
    """

    tokens: Array
    start: Array
    length: Array
    page: Array
    table: Array
    prefilled: Array


@flax.struct.dataclass
class Slots:
    """N slots and their M rows of G cells, each row a prompt's siblings.

    Attributes:
      prefilled: int32 [N], the prompt whose hidden state a new sample_index begins from; -1: it
        goes on.
      prompt_length: int32 [N].
      count, limit: int32 [N], tokens sampled so far, and the number at which to stop; alike: the
        slot rests.
      key: uint32 [N, 2], of the request; sample_index: int32 [N], folded into it.
      row, cell: int32 [N], the slot's place among rows.
      slot: int32 [M, G], its inverse; N: an empty cell.
      prompt_table, prompt_visible: int32 [M, J] and [M, G], pages of the row's prompt and how many
        of its keys a cell sees (its length, 0 for an empty cell).
      suffix_table: int32 [N, I], pages of the slot's own tokens.
      sampling: arrays [N].
      enough: int32, how many slots must have ended for the call to return.
      prompt_tokens: int32 [M, P], of the row's prompt, at the row's end; None where nothing is
        guessed.
    """

    prefilled: Array
    prompt_length: Array
    count: Array
    limit: Array
    key: Array
    sample_index: Array
    row: Array
    cell: Array
    slot: Array
    prompt_table: Array
    prompt_visible: Array
    suffix_table: Array
    sampling: nucleus.Sampling
    enough: Array
    prompt_tokens: Array | None = None


@flax.struct.dataclass
class Sampled:
    """What a call of `decode` drew.

    Attributes:
      tokens: int32 [N, steps], of each slot the first `new`.
      logprobs: float32 [N, steps].
      new: int32 [N], tokens sampled.
      stopped: bool [N], whether the last one is a stop token.
      busy: int32 [N], passes of the loop that drew for the slot.
      steps: int32, passes of the loop.
    """

    tokens: jax.Array
    logprobs: jax.Array
    new: jax.Array
    stopped: jax.Array
    busy: jax.Array
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How tokens are guessed, for lookup.guess.

    Attributes:
      tokens: guessed in a pass; 0: none.
      match: last tokens that must stand before a guess.
    """

    tokens: int = 0
    match: int = 2


def prefill(
    config: PolicyConfig,
    params: transformer.Params,
    state: State,
    batch: PromptPages,
    *,
    kernel: str = "auto",
) -> State:
    """Reads pages of prompts.

    Args:
      config, params: the policy, in the compute dtype.
      state: is updated.
      batch: in whose order pages of one prompt may be in any.
      kernel: see paged.attend.
    """
    offsets = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    positions = batch.start[:, None] + offsets
    seen = jnp.where(batch.length[:, None] > 0, positions + 1, 0)
    context = {"page": batch.page, "table": batch.table, "visible": seen}
    attend = functools.partial(kv_cache.attend_prompts, kernel=kernel)
    hidden, pages, _ = transformer.hidden_states(
        config, params, batch.tokens, positions, attend, state.pages, context
    )
    last = jnp.maximum(batch.length - 1, 0)
    last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    prompt_hidden = state.prompt_hidden.at[batch.prefilled].set(last, mode="drop")
    return dataclasses.replace(state, pages=pages, prompt_hidden=prompt_hidden)


def decode(
    config: PolicyConfig,
    params: transformer.Params,
    state: State,
    slots: Slots,
    *,
    lane: int,
    page_size: int,
    steps: int,
    stop_ids: tuple[int, ...],
    speculation: Speculation = Speculation(),
    kernel: str = "auto",
) -> tuple[State, Sampled]:
    """Draws up to `steps` tokens in every slot that is not at its limit.

    Args:
      config, params: the policy, in the compute dtype.
      state: is updated.
      slots: what each slot does.
      lane: whose slots they are.
      page_size: C, tokens of a page.
      steps: most tokens of a slot.
      stop_ids: tokens that end an answer.
      speculation: how tokens are guessed; it changes none that is sampled.
      kernel: see paged.attend.
    """
    fresh = (slots.prefilled >= 0)[:, None]
    hidden = jnp.where(fresh, state.prompt_hidden[slots.prefilled], state.hidden[lane])
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(slots.key), slots.sample_index)
    draw = functools.partial(_draw, config, params, keys, slots.sampling)
    forward = functools.partial(_forward, config, params, slots, page_size, kernel)

    def room(sampled):
        """Tokens that each slot may still draw."""
        left = jnp.minimum(slots.limit - slots.count, steps) - sampled.new
        return jnp.where(sampled.stopped, 0, left)

    def going_on(carry):
        *_, sampled = carry
        active = room(sampled) > 0
        enough = jnp.sum((slots.count < slots.limit) & ~active) >= slots.enough
        return (sampled.steps < steps) & ~enough & jnp.any(active)

    def one_pass(carry):
        hidden, pages, own, sampled = carry
        left, count = room(sampled), slots.count + sampled.new
        given, logprobs = draw(hidden[:, None], count)
        found = given
        if speculation.tokens:
            own = _note(own, given, count)
            given = jnp.concatenate([given, _guess(slots, own, count + 1, speculation)], axis=1)
        new, pages = forward(pages, given, count, left)
        if speculation.tokens:
            more = draw(new[:, :-1], count + 1)
            own = _note(own, more[0], count + 1)
            found = jnp.concatenate([found, more[0]], axis=1)
            logprobs = jnp.concatenate([logprobs, more[1]], axis=1)
        kept = _kept(given, found, left, stop_ids)
        last = jnp.maximum(jnp.sum(kept, axis=1) - 1, 0)
        new = jnp.take_along_axis(new, last[:, None, None], axis=1)[:, 0]
        hidden = jnp.where(kept[:, :1], new, hidden)
        return hidden, pages, own, _append(sampled, found, logprobs, kept, stop_ids)

    own = state.own[lane] if speculation.tokens else None
    carry = hidden, state.pages, own, _nothing_drawn(len(hidden), steps)
    hidden, pages, own, sampled = jax.lax.while_loop(going_on, one_pass, carry)
    state = dataclasses.replace(
        state,
        pages=pages,
        hidden=_with(state.hidden, lane, hidden),
        own=_with(state.own, lane, own) if speculation.tokens else (),
    )
    return state, sampled


def _nothing_drawn(slots: int, steps: int) -> Sampled:
    return Sampled(
        tokens=jnp.zeros((slots, steps), jnp.int32),
        logprobs=jnp.zeros((slots, steps), jnp.float32),
        new=jnp.zeros(slots, jnp.int32),
        stopped=jnp.zeros(slots, bool),
        busy=jnp.zeros(slots, jnp.int32),
        steps=jnp.int32(0),
    )


def _with(some: tuple, place: int, one: Any) -> tuple:
    return (*some[:place], one, *some[place + 1 :])


def _draw(config, params, keys, sampling: nucleus.Sampling, hidden, count):
    """Tokens and logprobs [N, T] behind hidden states [N, T, D]; the first has the number `count`
    [N] in its slot."""
    slots, time, width = hidden.shape
    number = count[:, None] + jnp.arange(time)
    uniform = jax.vmap(
        lambda key, some: jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n)))(some)
    )(keys, number)
    logits = lm_head.logits(config, params, hidden.reshape(-1, width))
    sampling = jax.tree.map(lambda x: jnp.repeat(x, time), sampling)
    token, logprob = nucleus.draw(logits, uniform.reshape(-1), sampling)
    return token.reshape(slots, time), logprob.reshape(slots, time)


def _guess(slots: Slots, own, count, speculation: Speculation) -> jax.Array:
    """What may follow `count` tokens of a slot's own [N, S]."""
    prompts: Any = slots.prompt_tokens  # which are there, as something is guessed
    given = prompts, slots.row, slots.prompt_length, own, count
    return speculative.guess(*given, speculation.match, speculation.tokens)


def _note(own: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """Tokens [N, T] written behind `count` of a slot's own [N, S]."""
    place = count[:, None] + jnp.arange(tokens.shape[1])
    return own.at[jnp.arange(len(own))[:, None], place].set(tokens, mode="drop")


def _kept(given, found, room, stop_ids: tuple[int, ...]) -> jax.Array:
    """Which of the tokens [N, T] that were found stand, as all before them were given so to the
    policy, none of them a stop token; at most `room` [N]."""
    right = found == given
    right &= jnp.pad(~_stops(found, stop_ids)[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    right = jnp.cumprod(right, axis=1, dtype=jnp.int32) > 0
    return right & (jnp.arange(found.shape[1]) < room[:, None])


def _stops(tokens: jax.Array, stop_ids: tuple[int, ...]) -> jax.Array:
    return jnp.isin(tokens, jnp.asarray(stop_ids, jnp.int32))


def _forward(config, params, slots: Slots, page_size: int, kernel: str, pages, tokens, count, room):
    """Hidden states [N, T, D] of the next T tokens of each slot, the first of which has the number
    `count`; and the pool, in which `room` of them are written."""
    time = jnp.arange(tokens.shape[1])
    number = count[:, None] + time
    inside = time < room[:, None]
    table = slots.suffix_table
    page = jnp.take_along_axis(table, number // page_size, axis=1, mode="clip")
    # To the policy each token is a row of its own: its weights and rows are split as for one.
    context = {
        "page": jnp.where(inside, page, 0).reshape(-1),
        "offset": (number % page_size).reshape(-1),
        "visible": jnp.where(inside, number + 1, 0).reshape(-1),
        **{name: getattr(slots, name) for name in kv_cache.PLACES},
    }
    positions = (slots.prompt_length[:, None] + number).reshape(-1, 1)
    given = jnp.maximum(tokens, 0).reshape(-1, 1)
    attend = functools.partial(kv_cache.attend_slots, kernel=kernel)
    hidden, pages, _ = transformer.hidden_states(
        config, params, given, positions, attend, pages, context
    )
    return hidden.reshape(*tokens.shape, -1), pages


def _append(sampled: Sampled, tokens, logprobs, kept, stop_ids: tuple[int, ...]) -> Sampled:
    """Takes in what was kept of tokens [N, T]."""
    rows, steps = sampled.tokens.shape
    place = sampled.new[:, None] + jnp.arange(tokens.shape[1])
    place = jnp.where(kept, place, steps)  # outside: not written
    at = jnp.arange(rows)[:, None], place
    return Sampled(
        tokens=sampled.tokens.at[at].set(tokens, mode="drop"),
        logprobs=sampled.logprobs.at[at].set(logprobs, mode="drop"),
        new=sampled.new + jnp.sum(kept, axis=1),
        stopped=sampled.stopped | jnp.any(kept & _stops(tokens, stop_ids), axis=1),
        busy=sampled.busy + kept[:, 0],
        steps=sampled.steps + 1,
    )
