"""The sampler's two device programs: prefill of prompt pages, and decoding of all slots.

The host decides all placement (page tables, slots, limits) between calls and passes it in as
arrays, so shapes never change.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spell_jax.attention.pages import Pages
from spell_jax.policy import moe, products, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.sampler import kv_cache, lm_head, page_groups, speculative
from spell_jax.sampler.sampled import Sampled, accept, append, no_samples
from spell_jax.sampler.sampling import SampledToken, Sampling, penalties, sample

# NumPy on the host, JAX on a device; the same trees also hold shardings or abstract shapes.
Array = Any


@flax.struct.dataclass
class State:
    """Device state that persists between calls.

    Attributes:
      pages: page pool. Page 0 is scratch: rows without a task write there.
      prompt_hidden: hidden state of the last token of each prefilled prompt, [R, D].
      hidden: for each lane, the hidden state of each slot's last token, [N, D].
      answers: for each lane, the tokens that each slot has sampled, int32 [N, S]; entries after the
        slot's count are undefined. Empty without speculation.
    """

    pages: Pages
    prompt_hidden: Array
    hidden: tuple[Array, ...]
    answers: tuple[Array, ...]


@flax.struct.dataclass
class PromptPages:
    """Batch of B prompt pages to prefill.

    Attributes:
      tokens: token ids, int32 [B, C], padded after the end of the prompt.
      start: position of the page's first token, int32 [B].
      length: number of prompt tokens in the page, int32 [B]; 0 for a row without a task.
      page: pool page that keys and values are written to in each page group (page_groups.py), int32
        [B, groups].
      table: pages of the prompt in order, including `page`, int32 [B, groups, J].
      prefilled: index into prompt_hidden if the prompt ends in this page, int32 [B]; else R.
    """

    tokens: Array
    start: Array
    length: Array
    page: Array
    table: Array
    prefilled: Array


@flax.struct.dataclass
class Slots:
    """N decode slots, arranged in M rows of G cells; a row holds samples of one prompt.

    Attributes:
      prefilled: index in prompt_hidden of the state that a new sample starts from, int32 [N]; -1
        for a slot that continues.
      prompt_length: tokens of the slot's prompt, int32 [N].
      count: tokens sampled so far, int32 [N].
      limit: token count at which the slot must stop, int32 [N]. At `count` the slot is idle.
      key: PRNG key data of the request, uint32 [N, 2].
      sample_index: index of the sample in its request, int32 [N]; folded into the key.
      row: row of the slot, int32 [N].
      cell: cell of the slot within its row, int32 [N].
      slot: slot of each cell (the inverse of row and cell), int32 [M, G]; N for an empty cell.
      prompt_table: pages of the row's prompt in each page group, int32 [M, groups, J].
      prompt_visible: number of prompt keys that a cell attends to, int32 [M, G]: the prompt's
        length, or 0 for an empty cell.
      suffix_table: pages of the slot's own tokens in each page group, int32 [N, groups, I].
      sampling: sampling parameters, arrays [N].
      most_idle: number of passes that the slots may lose together before the call returns, int32
        [shards], all equal.
      prompt_tokens: token ids of the row's prompt, right-aligned, int32 [M, P]; None without
        speculation.
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
    sampling: Sampling
    most_idle: Array
    prompt_tokens: Array | None = None


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Parameters of prompt lookup, see speculative.propose; 0 tokens disable it."""

    tokens: int = 0
    match: int = 2


def prefill(
    config: PolicyConfig,
    params: transformer.Params,
    state: State,
    batch: PromptPages,
    *,
    kernel: str = "auto",
    record_experts: bool = False,
) -> tuple[State, jax.Array | None]:
    """Read B pages of prompts into the KV cache, and keep the hidden state of each prompt's end.

    Earlier pages of a prompt are in the pool or in the same call. Returns the new state and the
    experts of the tokens, [B, C, L, k] (None if not recorded).
    """
    params = products.kernels_as_bits(params)
    positions = batch.start[:, None] + jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    visible = jnp.where(batch.length[:, None] > 0, positions + 1, 0)
    context = {"page": batch.page, "table": batch.table, "visible": visible}
    groups = page_groups.page_groups(config)
    attend = functools.partial(kv_cache.attend_prompts, groups=groups, kernel=kernel)
    inputs = batch.tokens, positions, attend, state.pages, context
    hidden, pages, routing = transformer.hidden_states(
        config, params, *inputs, record_experts=record_experts
    )
    last = jnp.maximum(batch.length - 1, 0)
    last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    prompt_hidden = state.prompt_hidden.at[batch.prefilled].set(last, mode="drop")
    state = dataclasses.replace(state, pages=pages, prompt_hidden=prompt_hidden)
    return state, moe.by_token(routing)


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
    record_experts: bool = False,
) -> tuple[State, Sampled]:
    """Sample up to `steps` tokens in every slot that is not at its limit.

    The samples of a prompt attend to its pages in one matrix product, and each slot to its own
    suffix. With speculation, a pass also feeds proposed tokens, and accepts a proposal that equals
    the sampled token. `params` are in the compute dtype, `state` is donated, `page_size` is C.
    """
    # As bits, a bfloat16 pass on CPUs takes 14 ms instead of 25 (8 layers, width 512, 16 rows).
    params = products.kernels_as_bits(params)
    fresh = (slots.prefilled >= 0)[:, None]
    hidden = jnp.where(fresh, state.prompt_hidden[slots.prefilled], state.hidden[lane])
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(slots.key), slots.sample_index)
    penalty = penalties(keys, config.vocab_size, slots.sampling)
    sample_next = functools.partial(_sample, config, params, keys, slots.sampling, penalty)
    forward = functools.partial(_forward, config, params, slots, page_size, kernel, record_experts)
    most_idle = jnp.max(slots.most_idle)

    def tokens_left(sampled):
        left = jnp.minimum(slots.limit - slots.count, steps) - sampled.new
        return jnp.where(sampled.stopped, 0, left)

    def should_continue(carry):
        *_, sampled = carry
        active = tokens_left(sampled) > 0
        # Idle slots cost as much as busy ones, so the call returns once a refill costs less.
        # Passes without a token so far, and in the next pass, of slots that were active at first.
        idle = jnp.where(slots.count < slots.limit, sampled.steps - sampled.busy + ~active, 0)
        return (sampled.steps < steps) & (jnp.sum(idle) < most_idle) & jnp.any(active)

    def decode_step(carry):
        hidden, pages, answers, sampled = carry
        left, count = tokens_left(sampled), slots.count + sampled.new
        tokens = sample_next(hidden[:, None], count)
        inputs = tokens.id
        if speculation.tokens:
            answers = _write_own(answers, inputs, count)
            proposals = _propose(slots, answers, count + 1, speculation)
            inputs = jnp.concatenate([inputs, proposals], axis=1)
        new, pages, experts = forward(pages, inputs, count, left)
        if speculation.tokens:
            # Keys belong to token indices, so plain decoding would sample the same tokens.
            tail = sample_next(new[:, :-1], count + 1)
            answers = _write_own(answers, tail.id, count + 1)
            tokens = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), tokens, tail)
        accepted = accept(inputs, tokens.id, left, stop_ids)
        last = jnp.maximum(jnp.sum(accepted, axis=1) - 1, 0)
        new = jnp.take_along_axis(new, last[:, None, None], axis=1)[:, 0]
        hidden = jnp.where(accepted[:, :1], new, hidden)
        return hidden, pages, answers, append(sampled, tokens, experts, accepted, stop_ids)

    answers = state.answers[lane] if speculation.tokens else None
    carry = hidden, state.pages, answers, no_samples(config, len(hidden), steps, record_experts)
    hidden, pages, answers, sampled = jax.lax.while_loop(should_continue, decode_step, carry)
    state = dataclasses.replace(
        state,
        pages=pages,
        hidden=_replaced(state.hidden, lane, hidden),
        answers=_replaced(state.answers, lane, answers) if speculation.tokens else (),
    )
    return state, sampled


def _replaced(items: tuple, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def _sample(config, params, keys, sampling: Sampling, penalty, hidden, count) -> SampledToken:
    """Sample tokens [N, T] from hidden states [N, T, D], with indices from `count` on."""
    slots, time, width = hidden.shape
    number = count[:, None] + jnp.arange(time)
    uniform = jax.vmap(
        lambda key, row: jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n)))(row)
    )(keys, number)
    logits = lm_head.logits(config, params, hidden.reshape(-1, width))
    sampling, penalty = jax.tree.map(lambda x: jnp.repeat(x, time, axis=0), (sampling, penalty))
    sampled = sample(logits, uniform.reshape(-1), sampling, penalty)
    return jax.tree.map(lambda x: x.reshape(slots, time), sampled)


def _propose(slots: Slots, answers, count, speculation: Speculation) -> jax.Array:
    """Propose tokens that may follow the first `count` tokens of each slot's answer [N, S]."""
    prompts: Any = slots.prompt_tokens  # not None: speculation is on
    text = prompts, slots.row, slots.prompt_length, answers, count
    return speculative.propose(*text, speculation.match, speculation.tokens)


def _write_own(answers: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """Write tokens [N, T] into each slot's answer [N, S], starting at index `count`."""
    index = count[:, None] + jnp.arange(tokens.shape[1])
    return answers.at[jnp.arange(len(answers))[:, None], index].set(tokens, mode="drop")


def _forward(
    config, params, slots: Slots, page_size, kernel, record_experts, pages, tokens, count, left
):
    """Feed T tokens per slot; return hidden states [N, T, D], the updated pool and the experts.

    The first token of each slot has index `count` in its answer. Keys and values of the first
    `left` tokens are written. Experts are [N, T, L, k], or None if they are not recorded.
    """
    time = jnp.arange(tokens.shape[1])
    number = count[:, None] + time
    inside = time < left[:, None]
    groups, block = page_groups.page_groups(config), number // page_size
    page = jnp.take_along_axis(slots.suffix_table, block[:, None], axis=2, mode="clip")
    page = jnp.where(inside[:, None], page, 0)  # [N, groups, T]
    # The policy sees each token as a row of its own, so sharding is the same with speculation.
    context = {
        "page": page.swapaxes(1, 2).reshape(-1, groups.count),
        "offset": (number % page_size).reshape(-1),
        "visible": jnp.where(inside, number + 1, 0).reshape(-1),
        **{name: getattr(slots, name) for name in kv_cache.LAYOUT},
    }
    positions = (slots.prompt_length[:, None] + number).reshape(-1, 1)
    inputs = jnp.maximum(tokens, 0).reshape(-1, 1)
    attend = functools.partial(kv_cache.attend_slots, groups=groups, kernel=kernel)
    hidden, pages, routing = transformer.hidden_states(
        config, params, inputs, positions, attend, pages, context, record_experts=record_experts
    )
    experts = moe.by_token(routing)
    if experts is not None:
        experts = experts.reshape(*tokens.shape, *experts.shape[2:])
    return hidden.reshape(*tokens.shape, -1), pages, experts
