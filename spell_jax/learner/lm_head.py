"""Logprobs by slices of the vocabulary: its head is written out, forward and backward.

1. On a mesh hidden states of answer tokens move to the device that scores them (over `context`);
   the vocabulary stays split over `tensor`.
2. A loop over slices of a device's share of the vocabulary gathers the slice's weights over the
   axes of their width, and has logits of all tokens for that slice alone. Neither logits [A, V]
   nor the whole table [V, D] exist anywhere.
3. The backward pass is the same loop. A slice's gradient is complete after one product over all
   tokens of a device, in float32; it is summed over devices in float32, at once, and rounded to the
   table's dtype once. Gradients of hidden states are summed in float32 too.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes

_LANES = 128  # of a TPU's registers: an array's last axis is stored in such pieces
_LOWEST = -1e20  # a logit of no weight; finite, so that 0 times it is 0


def score_tokens(
    config: PolicyConfig,
    params: transformer.Params,
    hidden: jax.Array,
    source: jax.Array,
    target: jax.Array,
    temperature: float,
    numbers_at_once: int = 2**26,
) -> tuple[jax.Array, jax.Array]:
    """Logprob and entropy of answer tokens; logits exist only for a slice of the vocabulary.

    Args:
      config: the architecture.
      params: parameters in the compute dtype.
      hidden: [B, T, D].
      source: int32 [B, A], which hidden state on axis T predicts each answer token.
      target: int32 [B, A].
      temperature: sampling temperature; 0 (greedy) scores at 1.
      numbers_at_once: bounds a slice of the vocabulary: a device holds at most so many float32
        logits of it, and so many of its weights and their gradient; 2**26 are 256 MiB. A slice
        has at least 128 rows of the table, whatever the bound.

    Returns:
      float32 logprobs [B, A] under the full vocabulary at that temperature (no top-p
      renormalization, spec section 9), and float32 entropies [B, A] in nats.
    """
    table = params["embedding" if config.tied_embeddings else "unembedding"]
    layout = _lay_out(table.shape, target.shape, temperature or 1.0, numbers_at_once)
    return _head(_pick(hidden, source, layout), table, target, layout)


# ------------------------------------------------------------------------- The vocabulary head


@dataclasses.dataclass(frozen=True)
class _Layout(collectives.Split):
    """How the head is split, over devices (its leading axis is V) and in time.

    Attributes:
      size: rows of a slice, of a device's share of the table.
      temperature: above 0.
    """

    size: int = 0
    temperature: float = 1.0

    def shard(self, function, specs_in, specs_out):
        """The function of shards, as a function of whole arrays."""
        return collectives.on_shards(self.mesh, function, specs_in, specs_out)

    @property
    def dealt(self) -> int:
        """Devices over which the tokens of a row are dealt out."""
        return self.count(self.time)


def _lay_out(
    table: tuple[int, int], tokens: tuple[int, ...], temperature: float, numbers_at_once: int
) -> _Layout:
    """The layout of a table [V, D] and tokens [B, A] on the mesh that is set."""
    rows, width = table
    layout = _Layout.of(tokens, rows, width, over=meshes.TENSOR, temperature=temperature)
    widest = max(math.prod(tokens) // layout.count(layout.rows + layout.time), width)
    size = _slice_size(rows // layout.count(layout.leading), widest, numbers_at_once)
    return dataclasses.replace(layout, size=size)


def _slice_size(rows: int, widest: int, numbers_at_once: int) -> int:
    """Rows of a slice: as few slices as the bound allows, alike, of a multiple of 128 rows or
    all."""
    most = max(numbers_at_once // widest // _LANES, 1) * _LANES
    if rows <= most:
        return rows
    return -(-rows // -(-rows // most) // _LANES) * _LANES


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pick(hidden: jax.Array, source: jax.Array, layout: _Layout) -> jax.Array:
    """Hidden states [B, A, D] of answer tokens, out of [B, T, D]: on a mesh each goes to the device
    that scores it."""
    return _pick_forward(hidden, source, layout)[0]


def _pick_forward(hidden, source, layout: _Layout):
    spec = layout.tokens_spec
    run = functools.partial(_pick_on_device, layout=layout)
    saved = source, jnp.zeros((0, hidden.shape[1]))  # nothing, which keeps T
    return layout.shard(run, (spec, spec), spec)(hidden, source), saved


def _pick_backward(layout: _Layout, saved, gradient):
    (source, like), spec = saved, layout.tokens_spec
    time = like.shape[1] // layout.dealt
    run = functools.partial(_put_back_on_device, time=time, layout=layout)
    return layout.shard(run, (spec, spec), spec)(gradient, source), None


_pick.defvjp(_pick_forward, _pick_backward)


def _slots(source, time: int, layout: _Layout):
    """Where a device has the hidden states that answers of its rows need, those of other devices
    included: int32 [B, A], and `time`, one too many, where it has not."""
    if layout.dealt == 1:
        return source
    source = jax.lax.all_gather(source, meshes.CONTEXT, axis=1, tiled=True)
    slot = source - jax.lax.axis_index(meshes.CONTEXT) * time
    return jnp.where((slot >= 0) & (slot < time), slot, time)


def _pick_on_device(hidden, source, *, layout: _Layout):
    """One device's hidden states: each device lays out those that it has, for all answers of its
    rows, with zeros elsewhere, and the sum is scattered."""
    rows, time, width = hidden.shape
    slots = _slots(source, time, layout)[..., None]
    picked = jnp.take_along_axis(hidden, slots, axis=1, mode="fill", fill_value=0)
    if layout.dealt == 1:
        return picked
    # In two dimensions, or XLA for TPUs writes an all-reduce of the whole.
    picked = picked.swapaxes(0, 1).reshape(-1, rows * width)
    return (
        collectives.sum_scatter(picked, (meshes.CONTEXT,)).reshape(-1, rows, width).swapaxes(0, 1)
    )


def _put_back_on_device(gradient, source, *, time: int, layout: _Layout):
    """One device's gradient [B, T, D], of that of picked states [B, A, D].

    The first tokens of G answers share a hidden state: its gradients are summed in float32, a
    sixteenth of the answers at a time, as float32 copies of all (0.5 GB at A = 32,768 and
    D = 3,584) would take more memory than the head.
    """
    slots = _slots(source, time, layout)
    if layout.dealt > 1:
        gradient = jax.lax.all_gather(gradient, meshes.CONTEXT, axis=1, tiled=True)
    rows, answers, width = gradient.shape
    pieces = math.gcd(answers, 16)
    size, row = answers // pieces, jnp.arange(rows)[:, None]

    def one_piece(index, total):
        where, what = (
            jax.lax.dynamic_slice_in_dim(x, index * size, size, 1) for x in (slots, gradient)
        )
        return total.at[row, where].add(what.astype(jnp.float32), mode="drop")

    total = jnp.zeros((rows, time, width), jnp.float32)
    return collectives.rounded(jax.lax.fori_loop(0, pieces, one_piece, total), gradient.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _head(picked: jax.Array, table: jax.Array, target: jax.Array, layout: _Layout):
    """Logprobs and entropies [B, A] of targets [B, A] from hidden states [B, A, D] and the table
    [V, D]."""
    return _head_forward(picked, table, target, layout)[0]


def _head_forward(picked, table, target, layout: _Layout):
    run = functools.partial(_scores_on_device, layout=layout)
    tokens = layout.tokens_spec
    specs = (tokens, layout.table_spec, tokens)
    logprob, entropy, log_mass = layout.shard(run, specs, (tokens,) * 3)(picked, table, target)
    return (logprob, entropy), (picked, table, target, log_mass, entropy)


def _head_backward(layout: _Layout, saved, gradients):
    run = functools.partial(_gradients_on_device, layout=layout)
    tokens, table = layout.tokens_spec, layout.table_spec
    specs = (tokens, table, *[tokens] * 5)
    return *layout.shard(run, specs, (tokens, table))(*saved, *gradients), None


_head.defvjp(_head_forward, _head_backward)


def _read_slice(step, picked, table, layout: _Layout):
    """The step's slice of a device's share [V', D'] of the table.

    The last slice begins where it still fits, so that nothing is padded. Columns that an earlier
    slice had weigh nothing, and are no token's.

    Returns:
      Its first row; its weights [slice, D], gathered; logits [B, A, slice] in float32; the token of
      each column, int32 [slice].
    """
    size = layout.size
    first = jnp.minimum(step * size, len(table) - size)
    weights = jax.lax.dynamic_slice_in_dim(table, first, size)
    if layout.width:
        weights = jax.lax.all_gather(weights, layout.width, axis=1, tiled=True)
    logits = jnp.einsum("bad,vd->bav", picked, weights, preferred_element_type=jnp.float32)
    row = first + jnp.arange(size, dtype=jnp.int32)
    new = row >= step * size
    token = row + jax.lax.axis_index(layout.leading) * len(table) if layout.leading else row
    logits = jnp.where(new, logits / layout.temperature, _LOWEST)
    return first, weights, logits, jnp.where(new, token, -1)


def _scores_on_device(picked, table, target, *, layout: _Layout):
    """One device's logprobs, entropies and log masses [B, A], of its shards."""

    def one_slice(carry, step):
        top, mass, moment, chosen = carry
        _, _, logits, token = _read_slice(step, picked, table, layout)
        is_target = token == target[..., None]
        chosen += jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        higher = jnp.maximum(top, jnp.max(logits, axis=-1))
        mass, moment = _lower(mass, moment, top - higher)
        below = logits - higher[..., None]
        weights = jnp.exp(below)
        mass += jnp.sum(weights, axis=-1)
        moment += jnp.sum(weights * below, axis=-1)
        return (higher, mass, moment, chosen), None

    zero = jnp.zeros(target.shape, jnp.float32)
    start = (jnp.full(target.shape, _LOWEST, jnp.float32), zero, zero, zero)
    steps = jnp.arange(-(-len(table) // layout.size))
    (top, mass, moment, chosen), _ = jax.lax.scan(one_slice, start, steps)
    if layout.leading:
        highest = jax.lax.pmax(top, layout.leading)
        sums = (*_lower(mass, moment, top - highest), chosen)
        top, (mass, moment, chosen) = highest, jax.lax.psum(sums, layout.leading)
    log_mass = jnp.log(mass)
    return chosen - top - log_mass, log_mass - moment / mass, top + log_mass


def _lower(mass, moment, by):
    """sum(exp(x)) and sum(exp(x) x) as they are for x + by."""
    scale = jnp.exp(by)
    return scale * mass, scale * (moment + by * mass)


def _gradients_on_device(
    picked, table, target, log_mass, entropy, to_logprob, to_entropy, *, layout: _Layout
):
    """One device's gradients, of its hidden states [B, A, D] and its share of the table."""

    def one_slice(carry, step):
        of_picked, of_table = carry
        first, weights, logits, token = _read_slice(step, picked, table, layout)
        logprobs = logits - log_mass[..., None]
        down = to_logprob[..., None] + to_entropy[..., None] * (logprobs + entropy[..., None])
        up = jnp.where(token == target[..., None], to_logprob[..., None], 0.0)
        of_logits = (up - jnp.exp(logprobs) * down) / layout.temperature
        # Products read the compute dtype, as in the forward pass, and sum in float32.
        of_logits = of_logits.astype(picked.dtype)
        of_picked += jnp.einsum(
            "bav,vd->bad", of_logits, weights, preferred_element_type=jnp.float32
        )
        # Turned, [D, slice]: scattered over columns, 224 of them a device, XLA for TPUs would write
        # an all-reduce of the whole where it writes a reduce-scatter over rows.
        part = jnp.einsum("bav,bad->dv", of_logits, picked, preferred_element_type=jnp.float32)
        part = collectives.sum_scatter(part, layout.width)
        if layout.summed:
            part = jax.lax.psum(part, layout.summed)
        # Rows that an earlier slice had get zeros here: every row is rounded once.
        part = collectives.rounded(part, table.dtype).T
        part += jax.lax.dynamic_slice_in_dim(of_table, first, layout.size)
        return (of_picked, jax.lax.dynamic_update_slice_in_dim(of_table, part, first, 0)), None

    start = (jnp.zeros(picked.shape, jnp.float32), jnp.zeros_like(table))
    steps = jnp.arange(-(-len(table) // layout.size))
    (of_picked, of_table), _ = jax.lax.scan(one_slice, start, steps)
    if layout.leading:
        of_picked = jax.lax.psum(of_picked, layout.leading)
    return collectives.rounded(of_picked, picked.dtype), of_table
