"""Scores of sampled replies inside a caller's jitted program: fixed shapes, no packing.

packing.py packs prompts and replies of any length into rows, and update.py trains on the rows.
These functions are for programs that sample and train in one call, such as examples/jitted_step.py.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from spell_jax.attention import attend
from spell_jax.learner import lm_head
from spell_jax.learner.advantages import EPSILON
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes


def score_replies(
    policy: PolicyConfig,
    params: transformer.Params,
    prompts: Int32[Array, "R P"],
    prompt_length: Int32[Array, " R"],
    replies: Int32[Array, "RK S"],
    reply_length: Int32[Array, " RK"],
    *,
    temperature: float = 1.0,
) -> tuple[Float32[Array, "RK S"], Bool[Array, "RK S"]]:
    """Return logprobs of the replies' tokens, and which entries are tokens; K replies a prompt.

    Entries after the end of a reply, and replies to a prompt of length 0, have logprobs that mean
    nothing but are finite. `params` are in the compute dtype.
    """
    # A row is [prompt | reply 1 | ... | reply K]: the prompt is read once for its K replies, P + K
    # S tokens instead of K (P + S). The mask is a number per key, the last query that sees the key.
    # With the causal order, a reply then sees the prompt and itself, and no token sees padding
    # (-1).
    (R, P), S = prompts.shape, replies.shape[1]
    A = replies.size // R  # K S
    row = functools.partial(jnp.concatenate, axis=1)
    p, a = jnp.split(jnp.tile(jnp.arange(P + A), (R, 1)), [P], axis=1)  # columns [R, P], [R, A]
    s = (a - P) % S  # number of the token in its reply
    length = jnp.maximum(prompt_length, 1)[:, None]  # a softmax over no key is not finite
    real = s < reply_length.reshape(R, -1).repeat(S, axis=1)
    tokens = row([prompts, replies.reshape(R, A)])
    positions = row([p, length + s])
    last_query = row([jnp.where(p < length, P + A - 1, -1), jnp.where(real, a - s + S - 1, -1)])
    source = jnp.where(s == 0, length - 1, a - 1)  # the prompt's end predicts each first token
    with nn.logical_axis_rules(meshes.RULES):
        attention = attend.packed(policy.attention)
        hidden, *_ = transformer.hidden_states(
            policy, params, tokens, positions, attention, context={"last_query": last_query}
        )
        target = tokens[:, P:]
        logprobs, _ = lm_head.score_tokens(policy, params, hidden, source, target, temperature)
    return logprobs.reshape(replies.shape), real.reshape(replies.shape)


def masked_advantages(
    rewards: Float32[Array, " B"], included: Bool[Array, " B"], *, ddof: int = 1
) -> Float32[Array, " B"]:
    """Normalize rewards over the rows that `included` marks; other rows get 0.

    The values equal `advantages.questioner_advantages` of the marked rows alone (paper Eq. 9).
    `ddof` is as in `advantages.group_advantages`.
    """
    count = jnp.sum(included)
    # The subtraction makes equal rewards 0, although their mean may be rounded.
    largest = jnp.max(jnp.where(included, rewards, -jnp.inf))
    values = jnp.where(included, rewards - largest, 0)
    centered = jnp.where(included, values - jnp.sum(values) / jnp.maximum(count, 1), 0)
    variance = jnp.sum(centered**2) / jnp.maximum(count - ddof, 1)
    return (centered / (jnp.sqrt(variance) + EPSILON)).astype(jnp.float32)
