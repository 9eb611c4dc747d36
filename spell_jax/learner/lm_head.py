"""Logprobs and entropies in slices of the vocabulary, with a hand-written backward pass.

1. On a mesh, hidden states of answer tokens move to the device that scores them (over `context`).
   The vocabulary stays sharded over `tensor`.
2. A loop over slices of a device's share of the vocabulary gathers a slice's weights over the axes
   that shard their width, and computes logits of all tokens for that slice only. Neither the logits
   [A, V] nor the whole table [V, D] ever exist.
3. The backward pass is the same loop. One product over all tokens of a device gives a slice's
   gradient in float32. It is summed over devices in float32 and rounded to the table's dtype once.
   Gradients of hidden states are summed in float32 too.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from spell_jax.policy import embedding, products, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes

_LANES = 128  # TPUs store the last axis of an array in tiles of 128
_LOWEST = -1e20  # logit without weight; finite, so that 0 * _LOWEST is 0


def score_tokens(
    config: PolicyConfig,
    params: transformer.Params,
    hidden: Float[Array, "B T D"],
    source: Int32[Array, "B A"],
    target: Int32[Array, "B A"],
    temperature: float,
    numbers_at_once: int | None = None,
    cutoff: Float32[Array, "B A"] | None = None,
) -> tuple[Float32[Array, "B A"], Float32[Array, "B A"]]:
    """Return logprobs and entropies in nats of answer tokens.

    Ids without a token (config.unused_ids) have probability 0, and no gradient.

    Args:
      hidden: hidden states in the compute dtype, like `params`.
      source: index on axis T of the hidden state that predicts each answer token.
      target: answer tokens.
      temperature: sampling temperature of the logprobs; 0 (greedy) is scored at 1.
      numbers_at_once: most float32 logits of a vocabulary slice on a device, and most of its
        weights and of their gradient. A slice has at least 128 rows of the table. None: a default
        for the platform.
      cutoff: lower bound for the tokens over which logprobs and entropies are normalized: the
        answer token, and all tokens with (logit - mean logit) / temperature above the bound. None:
        the full vocabulary (spec section 9).
    """
    table = params["embedding" if config.tied_embeddings else "unembedding"]
    # 2**26 float32 are 256 MiB. On a CPU slices of 2**20 stay in its cache (1,024 answers, V =
    # 8,192, D = 512, forward and backward, 2 cores: 210 ms instead of 428 ms).
    numbers = numbers_at_once or (2**20 if collectives.is_for_cpu() else 2**26)
    layout = _lay_out(table.shape, target.shape, temperature or 1.0, numbers)
    layout = dataclasses.replace(layout, unused_ids=config.unused_ids)
    picked = _pick(hidden, source, layout)
    return _head(picked, table, target, _floor(picked, table, cutoff, layout), layout)


# ------------------------------------------------------------------------------- Vocabulary head


@dataclasses.dataclass(frozen=True)
class _Layout(collectives.Split):
    """Split of the head over devices (the leading axis is V) and over time."""

    size: int = 0  # rows of a slice of a device's share of the table
    temperature: float = 1.0  # above 0
    unused_ids: tuple[tuple[int, int], ...] = ()  # PolicyConfig.unused_ids

    def shard(self, function, specs_in, specs_out):
        return collectives.on_shards(self.mesh, function, specs_in, specs_out)

    @property
    def dealt(self) -> int:
        return self.count(self.time)


def _lay_out(
    table: tuple[int, int], tokens: tuple[int, ...], temperature: float, numbers_at_once: int
) -> _Layout:
    # A slice has three arrays that count: logits [tokens, slice], weights and gradient [slice, D].
    # The wider of both shapes bounds the slice.
    rows, width = table
    layout = _Layout.of(tokens, rows, width, over=meshes.TENSOR, temperature=temperature)
    widest = max(math.prod(tokens) // layout.count(layout.rows + layout.time), width)
    size = _slice_size(rows // layout.count(layout.leading), widest, numbers_at_once)
    return dataclasses.replace(layout, size=size)


def _slice_size(rows: int, widest: int, numbers_at_once: int) -> int:
    """Return rows per slice: all, or a multiple of 128; fewest equal slices within the bound."""
    max_rows = max(numbers_at_once // widest // _LANES, 1) * _LANES
    if rows <= max_rows:
        return rows
    # Equal slices: every step of the loop runs one compiled body.
    return -(-rows // -(-rows // max_rows) // _LANES) * _LANES


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pick(hidden: jax.Array, source: jax.Array, layout: _Layout) -> jax.Array:
    """Pick hidden states [B, A, D] of answer tokens from [B, T, D], on their scoring device."""
    return _pick_forward(hidden, source, layout)[0]


def _pick_forward(hidden, source, layout: _Layout):
    spec = layout.tokens_spec
    run = functools.partial(_pick_on_device, layout=layout)
    # The backward pass needs T, but not the values: an empty array keeps the shape alone.
    saved = source, jnp.zeros((0, hidden.shape[1]))
    return layout.shard(run, (spec, spec), spec)(hidden, source), saved


def _pick_backward(layout: _Layout, saved, gradient):
    (source, like), spec = saved, layout.tokens_spec
    time = like.shape[1] // layout.dealt
    run = functools.partial(_put_back_on_device, time=time, layout=layout)
    return layout.shard(run, (spec, spec), spec)(gradient, source), None


_pick.defvjp(_pick_forward, _pick_backward)


def _slots(source, time: int, layout: _Layout):
    """Return local indices of answer tokens' hidden states, int32 [B, A]; `time` if not local.

    Answer tokens that other `context` devices score are included.
    """
    if layout.dealt == 1:
        return source
    # Indices are gathered (4 bytes a token) instead of hidden states (D numbers a token).
    source = jax.lax.all_gather(source, meshes.CONTEXT, axis=1, tiled=True)
    slot = source - jax.lax.axis_index(meshes.CONTEXT) * time
    return jnp.where((slot >= 0) & (slot < time), slot, time)


def _pick_on_device(hidden, source, *, layout: _Layout):
    """Pick one device's hidden states: sum all devices' states, or zeros, and scatter the sum."""
    rows, time, width = hidden.shape
    # Each answer's state is on exactly one device. All other devices add zeros, so the sum is
    # exact.
    slots = _slots(source, time, layout)[..., None]
    picked = jnp.take_along_axis(hidden, slots, axis=1, mode="fill", fill_value=0)
    if layout.dealt == 1:
        return picked
    # In two dimensions: otherwise XLA for TPUs compiles this to an all-reduce of the whole array.
    picked = picked.swapaxes(0, 1).reshape(-1, rows * width)
    return (
        collectives.sum_scatter(picked, (meshes.CONTEXT,)).reshape(-1, rows, width).swapaxes(0, 1)
    )


def _put_back_on_device(gradient, source, *, time: int, layout: _Layout):
    """Return one device's gradient [B, T, D] from the gradient of the picked states [B, A, D].

    Gradients are summed in float32: the first tokens of G answers share a hidden state.
    """
    slots = _slots(source, time, layout)
    if layout.dealt > 1:
        gradient = jax.lax.all_gather(gradient, meshes.CONTEXT, axis=1, tiled=True)
    rows, answers, width = gradient.shape
    # A sixteenth of the answers at a time: float32 copies of all gradients (0.5 GB at A = 32,768
    # and D = 3,584) would take more memory than the head.
    pieces = math.gcd(answers, 16)
    size, row = answers // pieces, jnp.arange(rows)[:, None]

    def one_piece(index, total):
        where, what = (
            jax.lax.dynamic_slice_in_dim(x, index * size, size, 1) for x in (slots, gradient)
        )
        return total.at[row, where].add(what.astype(jnp.float32), mode="drop")

    total = jnp.zeros((rows, time, width), jnp.float32)
    return collectives.rounded(jax.lax.fori_loop(0, pieces, one_piece, total), gradient.dtype)


def _floor(picked, table, cutoff, layout: _Layout) -> jax.Array | None:
    """Return the least kept logit / temperature, a constant, float32 [B, A]; None if all are kept.

    The mean logit of a token is the product of its hidden state and the mean row of the table.
    """
    if cutoff is None:
        return None
    has_token = None
    if layout.unused_ids:
        ids = jnp.arange(len(table), dtype=jnp.int32)
        has_token = embedding.has_token(ids, layout.unused_ids)[:, None]
    # The mean of V products is the product with the mean row: one product per token instead of V.
    mean = jnp.mean(table, axis=0, dtype=jnp.float32, where=has_token)
    logit = jnp.sum(picked.astype(jnp.float32) * mean, axis=-1)
    return jax.lax.stop_gradient(cutoff + logit / layout.temperature)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _head(
    picked: jax.Array,
    table: jax.Array,
    target: jax.Array,
    floor: jax.Array | None,
    layout: _Layout,
):
    """Return logprobs, entropies [B, A] from hidden states [B, A, D], table [V, D], targets [B, A].

    Tokens with a logit below `floor` [B, A], except the target, have no weight.
    """
    return _head_forward(picked, table, target, floor, layout)[0]


def _head_forward(picked, table, target, floor, layout: _Layout):
    run = functools.partial(_scores_on_device, layout=layout)
    tokens = layout.tokens_spec
    specs = (tokens, layout.table_spec, tokens, tokens)
    inputs = picked, table, target, floor
    logprob, entropy, log_mass = layout.shard(run, specs, (tokens,) * 3)(*inputs)
    return (logprob, entropy), (*inputs, log_mass, entropy)


def _head_backward(layout: _Layout, saved, gradients):
    run = functools.partial(_gradients_on_device, layout=layout)
    tokens, table = layout.tokens_spec, layout.table_spec
    specs = (tokens, table, *[tokens] * 6)
    return *layout.shard(run, specs, (tokens, table))(*saved, *gradients), None, None


_head.defvjp(_head_forward, _head_backward)


def _read_slice(step, picked, table, target, floor, layout: _Layout):
    """Return a slice's first row, weights and logits, and which columns are the targets.

    Weights are [slice, D], logits float32 [B, A, slice], targets bool [B, A, slice]. The last slice
    is shifted back to fit, so nothing is padded. Columns that belong to an earlier slice get the
    lowest logit, like tokens below `floor` and ids without a token.
    """
    size = layout.size
    # Shifted back by `size - remainder` rows at the last step; `new` marks rows not seen before.
    first = jnp.minimum(step * size, len(table) - size)
    weights = jax.lax.dynamic_slice_in_dim(table, first, size)
    if layout.width:
        weights = jax.lax.all_gather(weights, layout.width, axis=1, tiled=True)
    logits = jnp.einsum("bad,vd->bav", picked, weights, preferred_element_type=jnp.float32)
    # `row` counts in the device's share of the table, `token` in the whole vocabulary.
    row = first + jnp.arange(size, dtype=jnp.int32)
    new = row >= step * size
    token = row + jax.lax.axis_index(layout.leading) * len(table) if layout.leading else row
    logits = logits / layout.temperature
    if layout.unused_ids:
        new &= embedding.has_token(token, layout.unused_ids)
    is_target = new & (token == target[..., None])
    if floor is not None:
        # The target always has weight: rounding may put its logit below the floor.
        new &= is_target | (logits > floor[..., None])
    return first, weights, jnp.where(new, logits, _LOWEST), is_target


def _scores_on_device(picked, table, target, floor, *, layout: _Layout):
    """Compute one device's logprobs, entropies and log masses [B, A], from its shards."""

    def one_slice(carry, step):
        top, mass, moment, target_logit = carry
        _, _, logits, is_target = _read_slice(step, picked, table, target, floor, layout)
        # Online softmax: mass and moment are relative to the highest logit so far, so that exp
        # cannot overflow, and are rescaled when a slice has a higher logit.
        target_logit += jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        higher = jnp.maximum(top, jnp.max(logits, axis=-1))
        mass, moment = _lower(mass, moment, top - higher)
        below = logits - higher[..., None]
        weights = jnp.exp(below)
        mass += jnp.sum(weights, axis=-1)
        moment += jnp.sum(weights * below, axis=-1)
        return (higher, mass, moment, target_logit), None

    zero, lowest = (jnp.full(target.shape, value, jnp.float32) for value in (0.0, _LOWEST))
    target_logit = zero
    if layout.unused_ids:  # no slice adds the logit of a target without a token
        target_logit = jnp.where(embedding.has_token(target, layout.unused_ids), zero, lowest)
    start = (lowest, zero, zero, target_logit)
    steps = jnp.arange(-(-len(table) // layout.size))
    (top, mass, moment, target_logit), _ = jax.lax.scan(one_slice, start, steps)
    if layout.leading:
        # Devices join their shares of V by the rule that joins slices.
        highest = jax.lax.pmax(top, layout.leading)
        sums = (*_lower(mass, moment, top - highest), target_logit)
        top, (mass, moment, target_logit) = highest, jax.lax.psum(sums, layout.leading)
    # Entropy = log Z - E[logit], both relative to `top`: no difference of large numbers.
    log_mass = jnp.log(mass)
    return target_logit - top - log_mass, log_mass - moment / mass, top + log_mass


def _lower(mass, moment, by):
    # Logits relative to a top that is higher by -by: sum of e^(x + by), and of (x + by) e^(x + by).
    scale = jnp.exp(by)
    return scale * mass, scale * (moment + by * mass)


def _gradients_on_device(
    picked, table, target, floor, log_mass, entropy, to_logprob, to_entropy, *, layout: _Layout
):
    """Compute the gradients of one device's hidden states [B, A, D] and share of the table."""

    def one_slice(carry, step):
        of_picked, of_table = carry
        read = _read_slice(step, picked, table, target, floor, layout)
        first, weights, logits, is_target = read
        # d logprob = onehot - p and d entropy = -p (log p + entropy), from saved log_mass and
        # entropy: the loop reads every slice once.
        logprobs = logits - log_mass[..., None]
        down = to_logprob[..., None] + to_entropy[..., None] * (logprobs + entropy[..., None])
        up = jnp.where(is_target, to_logprob[..., None], 0.0)
        of_logits = (up - jnp.exp(logprobs) * down) / layout.temperature
        # Products take inputs in the compute dtype and sum in float32, as in the forward pass.
        of_logits = of_logits.astype(picked.dtype)
        of_picked += jnp.einsum(
            "bav,vd->bad", of_logits, weights, preferred_element_type=jnp.float32
        )
        # Transposed, [D, slice]: over rows XLA for TPUs compiles a reduce-scatter. Over columns,
        # 224 per device, it would compile an all-reduce of the whole array.
        part = products.sum_of_outer_products(picked, of_logits, 2)
        part = collectives.sum_scatter(part, layout.width)
        if layout.summed:
            part = jax.lax.psum(part, layout.summed)
        # Rows of an earlier slice get zeros here, so every row is rounded once.
        part = collectives.rounded(part, table.dtype).T
        part += jax.lax.dynamic_slice_in_dim(of_table, first, layout.size)
        return (of_picked, jax.lax.dynamic_update_slice_in_dim(of_table, part, first, 0)), None

    start = (jnp.zeros(picked.shape, jnp.float32), jnp.zeros_like(table))
    steps = jnp.arange(-(-len(table) // layout.size))
    (of_picked, of_table), _ = jax.lax.scan(one_slice, start, steps)
    if layout.leading:
        of_picked = jax.lax.psum(of_picked, layout.leading)
    return collectives.rounded(of_picked, picked.dtype), of_table
