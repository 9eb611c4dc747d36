"""Prefill and decode as two pure functions: a prompt is read once, its G answers grow behind it."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from flax.linen import spmd

from spell_jax.attention import attend
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.sampler import cache as caches
from spell_jax.sampler import nucleus


@flax.struct.dataclass
class Answers:
    """What decoding returns.

    Attributes:
      tokens: int32 [B, G, S], 0 behind the end.
      log_probs: float32 [B, G, S], 0 behind the end.
      lengths: int32 [B, G], tokens of each answer, its stop token included.
      stopped: bool [B, G], whether the answer ended with a stop token.
    """

    tokens: jax.Array
    log_probs: jax.Array
    lengths: jax.Array
    stopped: jax.Array


def prefill(
    config: PolicyConfig, params: transformer.Params, tokens: jax.Array, lengths: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Reads prompts.

    Args:
      config: the architecture.
      params: parameters in the compute dtype.
      tokens: int32 [B, P], padded behind `lengths`.
      lengths: int32 [B], at least 1.

    Returns:
      (keys, values) [L, B, P, K, H] each, and float32 logits [B, V] of the first answer token.
    """
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    # Padding stands behind the prompt and is never read: decoding masks it by length.
    last_reader = jnp.broadcast_to(lengths[:, None] - 1, (rows, width))
    hidden, prompt, _ = transformer.hidden_states(
        config,
        params,
        tokens,
        positions,
        attend.prefill(config.attention, config.ring),
        context={"last_reader": last_reader},
    )
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    return prompt, transformer.unembed(config, params, last)


def sibling_keys(key: jax.Array, requests: jax.Array, group: int) -> jax.Array:
    """Keys [B, G] by (request, sibling), whatever the batch that a request falls into."""
    siblings = jnp.arange(group)
    by_request = jax.vmap(functools.partial(jax.random.fold_in, key))(requests)
    return jax.vmap(lambda k: jax.vmap(functools.partial(jax.random.fold_in, k))(siblings))(
        by_request
    )


def decode(
    config: PolicyConfig,
    params: transformer.Params,
    prompt: tuple[jax.Array, jax.Array],
    first_logits: jax.Array,
    lengths: jax.Array,
    requests: jax.Array,
    key: jax.Array,
    *,
    group: int,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float,
    top_p: float,
) -> Answers:
    """Grows `group` answers behind every prompt until all have stopped or are full.

    Args:
      config, params: the policy.
      prompt: keys and values from prefill [L, B, P, K, H]; shared by the siblings.
      first_logits: float32 [B, V].
      lengths: int32 [B], prompt lengths; 0 marks an empty row, which is not decoded.
      requests: int32 [B], a number a request, folded into its keys.
      key: PRNG key of this call.
      group: G.
      max_tokens: S.
      stop_ids: tokens that end an answer.
      temperature, top_p: see nucleus.draw.
    """
    rows, vocab = first_logits.shape
    keys = sibling_keys(key, requests, group)
    empty = jnp.broadcast_to(lengths[:, None] == 0, (rows, group))
    answers = Answers(
        tokens=jnp.zeros((rows, group, max_tokens), jnp.int32),
        log_probs=jnp.zeros((rows, group, max_tokens), jnp.float32),
        lengths=jnp.zeros((rows, group), jnp.int32),
        stopped=empty,
    )
    logits = jnp.broadcast_to(first_logits[:, None], (rows, group, vocab))
    state = (jnp.int32(0), caches.from_prefill(prompt, group, max_tokens), logits, answers)

    def going_on(state):
        step, _, _, answers = state
        return (step < max_tokens) & ~jnp.all(answers.stopped)

    def one_token(state):
        step, cache, logits, answers = state
        uniform = jax.vmap(jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, step))))(
            keys
        )
        token, log_prob = nucleus.draw(logits, uniform, temperature, top_p)
        answers = _append(answers, token, log_prob, step, stop_ids)
        positions = jnp.broadcast_to(lengths[:, None] + step, (rows, group))
        hidden, new, _ = transformer.hidden_states(
            config,
            params,
            token,
            positions,
            caches.attend_decode,
            cache,
            {"prompt_length": lengths, "step": step},
        )
        logits = transformer.unembed(config, params, hidden)
        logits = spmd.with_logical_constraint(logits, ("rows", None, None))
        return step + 1, caches.write(cache, new, step), logits, answers

    *_, answers = jax.lax.while_loop(going_on, one_token, state)
    return dataclasses.replace(answers, stopped=answers.stopped & ~empty)


def _append(
    answers: Answers,
    token: jax.Array,
    log_prob: jax.Array,
    step: jax.Array,
    stop_ids: tuple[int, ...],
) -> Answers:
    live = ~answers.stopped

    def put(buffer, value):
        value = jnp.where(live, value, 0).astype(buffer.dtype)
        return jax.lax.dynamic_update_slice_in_dim(buffer, value[..., None], step, axis=2)

    ended = jnp.isin(token, jnp.asarray(stop_ids, jnp.int32))
    return Answers(
        tokens=put(answers.tokens, token),
        log_probs=put(answers.log_probs, log_prob),
        lengths=answers.lengths + live,
        stopped=answers.stopped | ended,
    )
