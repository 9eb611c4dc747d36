"""Result of a decode call, to which every pass of its loop appends tokens."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from spell_jax.policy import moe
from spell_jax.policy.config import PolicyConfig
from spell_jax.sampler.sampling import SampledToken


@flax.struct.dataclass
class Sampled:
    """Result of a `decode` call.

    Attributes:
      tokens: arrays [N, steps]; the first `new` of each slot are valid.
      new: number of sampled tokens, int32 [N].
      stopped: whether the last token is a stop token, bool [N].
      busy: number of loop passes that sampled for the slot, int32 [N].
      steps: number of loop passes, int32 scalar.
      experts: experts of the tokens, [N, steps, L, k] (moe.no_experts); None if not recorded.
    """

    tokens: SampledToken
    new: jax.Array
    stopped: jax.Array
    busy: jax.Array
    steps: jax.Array
    experts: jax.Array | None = None


def no_samples(config: PolicyConfig, slots: int, steps: int, record_experts: bool) -> Sampled:
    """Return an empty result for N slots, before the first pass."""
    numbers, experts = jnp.zeros((slots, steps), jnp.float32), None
    if record_experts:
        unknown = moe.no_experts(config)
        experts = jnp.zeros((slots, steps, *unknown.shape), unknown.dtype)
    return Sampled(
        tokens=SampledToken(jnp.zeros((slots, steps), jnp.int32), numbers, numbers, numbers),
        new=jnp.zeros(slots, jnp.int32),
        stopped=jnp.zeros(slots, bool),
        busy=jnp.zeros(slots, jnp.int32),
        steps=jnp.int32(0),
        experts=experts,
    )


@flax.struct.dataclass
class JoinedResult:
    """The arrays of Sampled, joined into one; answers.SlotTokens reads them on the host."""

    # One array, because the host reads 8 arrays in 0.05 ms and one in 0.01 (one CPU). For each slot
    # the ids, logprobs, kept masses and cut-offs of its tokens, floats as their bits; then new,
    # stopped, whether all its logprobs are finite, busy and steps: int32 [N, 4 steps + 5].
    numbers: jax.Array
    experts: jax.Array | None


def join(sampled: Sampled) -> JoinedResult:
    """Join the arrays of a result, inside a jitted program."""
    tokens, steps = sampled.tokens, sampled.tokens.id.shape[1]
    unused = jnp.arange(steps) >= sampled.new[:, None]
    # Entries after `new` are undefined, so only the valid logprobs decide.
    finite = jnp.all(unused | jnp.isfinite(tokens.logprob), axis=1)
    passes = jnp.broadcast_to(sampled.steps, sampled.new.shape)
    counts = sampled.new, sampled.stopped, finite, sampled.busy, passes
    floats = tokens.logprob, tokens.kept_log_mass, tokens.cutoff
    bits = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in floats)
    columns = jnp.stack(counts, axis=1, dtype=jnp.int32)
    return JoinedResult(jnp.concatenate([tokens.id, *bits, columns], axis=1), sampled.experts)


def accept(
    inputs: Int32[Array, "N T"],
    tokens: Int32[Array, "N T"],
    left: Int32[Array, " N"],
    stop_ids: tuple[int, ...],
) -> Bool[Array, "N T"]:
    """Return the mask of sampled tokens to accept, at most `left` per slot.

    A token is accepted if the policy was fed this token and all tokens before it, and no token
    before it is a stop token.
    """
    # The first token was sampled before it was fed, so each pass accepts one token at least.
    right = tokens == inputs
    right &= jnp.pad(~_stops(tokens, stop_ids)[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    right = jnp.cumprod(right, axis=1, dtype=jnp.int32) > 0
    return right & (jnp.arange(tokens.shape[1]) < left[:, None])


def append(
    sampled: Sampled,
    tokens: SampledToken,
    experts: Int[Array, "N T L k"] | None,
    accepted: Bool[Array, "N T"],
    stop_ids: tuple[int, ...],
) -> Sampled:
    """Append the accepted tokens among `tokens` [N, T], and their experts, to the result."""
    rows, steps = sampled.tokens.id.shape
    index = sampled.new[:, None] + jnp.arange(accepted.shape[1])
    index = jnp.where(accepted, index, steps)  # out of bounds: dropped
    at = jnp.arange(rows)[:, None], index
    all_tokens, all_experts = jax.tree.map(
        lambda x, new: x.at[at].set(new, mode="drop"),
        (sampled.tokens, sampled.experts),
        (tokens, experts),
    )
    return Sampled(
        tokens=all_tokens,
        new=sampled.new + jnp.sum(accepted, axis=1),
        stopped=sampled.stopped | jnp.any(accepted & _stops(tokens.id, stop_ids), axis=1),
        busy=sampled.busy + accepted[:, 0],
        steps=sampled.steps + 1,
        experts=all_experts,
    )


def _stops(tokens: jax.Array, stop_ids: tuple[int, ...]) -> jax.Array:
    return jnp.isin(tokens, jnp.asarray(stop_ids, jnp.int32))
