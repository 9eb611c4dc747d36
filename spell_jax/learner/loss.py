"""Log-probs chunk by chunk, and the clipped policy-gradient loss.

The vocabulary head is written out for a mesh: hidden states of answer tokens move to the device
that scores them (over `context`), the vocabulary stays split over `tensor`, and the head's weights
are gathered over the axes of their width alone, whose transpose is a reduce-scatter of their
gradient (which XLA for TPUs still writes as a sum of the whole; docs/long_context.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spell_jax.learner import packing
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes

BEHAVIOURS = ("current", "sampler")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Hyper-parameters of the loss (paper section E.3; spec section 9).

    Attributes:
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
      dual_clip: with a negative advantage the loss is at most dual_clip * |advantage|.
      kl_weight: weight of the k3 estimate of KL(policy || reference); 0 needs no reference model.
      entropy_weight: weight of the entropy bonus.
      behaviour: whose log-probs the ratio is taken against: "current" (on-policy: the ratio is
        exactly 1 and no pass is run) or "sampler" (the log-probs recorded while sampling).
      aggregation: see packing.weigh.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_weight: float = 0.0
    entropy_weight: float = 0.0
    behaviour: str = "current"
    aggregation: str = "token_mean"

    def __post_init__(self):
        for field in ("clip_low", "clip_high", "kl_weight", "entropy_weight"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"loss.{field} = {getattr(self, field)}: must be 0 or more")
        if not self.dual_clip > 1:
            raise ValueError(f"loss.dual_clip = {self.dual_clip}: must be above 1")
        if self.behaviour not in BEHAVIOURS:
            raise ValueError(f"loss.behaviour = {self.behaviour!r}: must be one of {BEHAVIOURS}")
        packing.check_aggregation(self.aggregation)


def score_tokens(
    config: PolicyConfig,
    params: transformer.Params,
    hidden: jax.Array,
    source: jax.Array,
    target: jax.Array,
    temperature: float,
    chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of answer tokens; [A, V] logits exist only a chunk at a time.

    Args:
      config: the architecture.
      params: parameters in the compute dtype.
      hidden: [B, T, D].
      source: int32 [B, A], which hidden state on axis T predicts each answer token.
      target: int32 [B, A].
      temperature: sampling temperature; 0 (greedy) scores at 1.
      chunk: answer tokens projected at once, a row.

    Returns:
      float32 log-probs [B, A] under the full vocabulary at that temperature (no top-p
      renormalisation, spec section 9), and float32 entropies [B, A] in nats.
    """
    temperature = temperature or 1.0
    table = params["embedding" if config.tied_embeddings else "unembedding"]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        picked = jnp.take_along_axis(hidden, source[..., None], axis=1)
        return _score(picked, table, target, temperature, chunk, None)
    vocab, width = (
        axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()
        for axes, size in zip(((meshes.TENSOR,), meshes.EMBED), table.shape, strict=True)
    )
    by_time = PartitionSpec(meshes.ROWS, meshes.CONTEXT)
    run = functools.partial(
        _score_on_device, width=width, vocab=vocab, temperature=temperature, chunk=chunk
    )
    return jax.shard_map(
        run,
        in_specs=(by_time, PartitionSpec(vocab or None, width or None), *[by_time] * 2),
        out_specs=(by_time, by_time),
        check_vma=False,
    )(hidden, table, source, target)


def _score_on_device(hidden, table, source, target, *, width, vocab, temperature, chunk):
    """One device's answer tokens; arguments are its shards."""
    source = jax.lax.all_gather(source, meshes.CONTEXT, axis=1, tiled=True)
    slot = source - jax.lax.axis_index(meshes.CONTEXT) * hidden.shape[1]
    here = (slot >= 0) & (slot < hidden.shape[1])
    picked = jnp.take_along_axis(hidden, jnp.where(here, slot, 0)[..., None], axis=1)
    picked = jnp.where(here[..., None], picked, 0)
    picked = jax.lax.psum_scatter(picked, meshes.CONTEXT, scatter_dimension=1, tiled=True)
    if width:
        table = jax.lax.all_gather(table, width, axis=1, tiled=True)
    return _score(picked, table, target, temperature, chunk, vocab or None)


def _score(picked, table, target, temperature: float, chunk: int, split: Any):
    """Log-probs and entropies [B, A] of targets [B, A] from hidden states [B, A, D], chunk by
    chunk; the rows of the table [V, D] may be split over a mesh axis."""
    rows, answers = target.shape
    size = min(chunk, answers)
    steps = -(-answers // size)

    def chunks(x):
        x = jnp.pad(x, ((0, 0), (0, steps * size - answers)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(rows, steps, size, *x.shape[2:]).swapaxes(0, 1)

    first = jax.lax.axis_index(split) * len(table) if split else 0

    def total(x):
        return jax.lax.psum(x, split) if split else x

    @jax.checkpoint
    def one_chunk(_, inputs):
        states, wanted = inputs
        logits = jnp.einsum("bad,vd->bav", states, table, preferred_element_type=jnp.float32)
        logits = logits / temperature
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
        top = jax.lax.pmax(top, split) if split else top
        weights = jnp.exp(logits - top[..., None])
        mass = total(jnp.sum(weights, axis=-1))
        entropy = jnp.log(mass) + top - total(jnp.sum(weights * logits, axis=-1)) / mass
        column = wanted - first
        here = (column >= 0) & (column < len(table))
        column = jnp.where(here, column, 0)[..., None]
        chosen = jnp.take_along_axis(logits, column, axis=-1)[..., 0]
        chosen = total(jnp.where(here, chosen, 0.0))
        return None, (chosen - top - jnp.log(mass), entropy)

    _, scores = jax.lax.scan(one_chunk, None, (chunks(picked), chunks(target)))
    log_probs, entropy = (x.swapaxes(0, 1).reshape(rows, -1)[:, :answers] for x in scores)
    return log_probs, entropy


def policy_loss(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    config: LossConfig = LossConfig(),
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped surrogate, summed with token weights (paper Eq. 2 without KL; spec section 9).

    Args:
      log_probs: float32, any shape, of the policy that is trained.
      old_log_probs: float32, same shape, of the policy that sampled.
      advantages: float32, same shape.
      weights: float32, same shape; sums to 1 over a batch for a token mean, 0 masks a token.
      config: clipping constants.

    Returns:
      The scalar loss, and weighted sums: clipped share, dual-clipped share, approximate KL.
    """
    log_ratio = jnp.clip(log_probs - old_log_probs, -20.0, 20.0)
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    pessimistic = jnp.maximum(plain, clipped)
    ceiling = -advantages * config.dual_clip
    negative = advantages < 0
    losses = jnp.where(negative, jnp.minimum(pessimistic, ceiling), pessimistic)
    sums = {
        "clip_share": jnp.sum(weights * (clipped > plain)),
        "dual_clip_share": jnp.sum(weights * (negative & (pessimistic > ceiling))),
        "approx_kl": -jnp.sum(weights * log_ratio),
    }
    return jnp.sum(weights * losses), sums


def kl_estimate(log_probs: jax.Array, reference_log_probs: jax.Array) -> jax.Array:
    """The k3 estimate of KL(policy || reference) per token: exp(d) - d - 1, d = ref - policy."""
    difference = jnp.clip(reference_log_probs - log_probs, -20.0, 20.0)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -10.0, 10.0)
