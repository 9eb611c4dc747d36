"""Attention of rows whose tokens are sharded over the mesh's `context` axis.

Every device keeps its queries. Inside shard_map, a wrapper extends a kernel to the keys of the
other devices:

1. `gathered` all-gathers the keys and values of the row.
2. `ring` passes keys and values from neighbor to neighbor while the kernel works on the current
   shard, so that no device ever holds more than two shards.
3. `rounds`, for policies with windows, all-gathers only those blocks of keys that a query of
   another device sees. In a layer with a window these are the ends of the chunks of a prompt, the
   end of the prompt, and the last tokens before a cut through an answer. The window is an array, so
   the program of all layers is the same; each layer finds its blocks from indices and positions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spell_jax.attention import blocks, masks
from spell_jax.attention.kernel import Inputs, Kernel
from spell_jax.attention.masks import MASKED
from spell_jax.runtime.bits import as_bits, from_bits
from spell_jax.runtime.mesh import CONTEXT

# Keys of a block, the unit in which `rounds` chooses keys. Smaller blocks would send fewer keys
# that no query sees, but cost more tests.
BLOCK = 128
_INVISIBLE = jnp.iinfo(jnp.int32).min  # the last_query of a key that no query sees
_LEAST_ROUNDS = 8  # of a shard whose keys all travel


@functools.cache  # one object per kernel, so that jit finds its compiled program again
def gathered(kernel: Kernel) -> Kernel:
    """Wrap a kernel to attend to all keys of the row, all-gathered over `context`."""

    def gather(inputs: Inputs) -> Inputs:
        def of_row(x: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)

        return _with_keys(inputs, jax.tree.map(of_row, _keys(inputs)))

    def forward(inputs: Inputs):
        return kernel.forward(gather(inputs))

    def backward(inputs: Inputs, lse, delta, d_out):
        # Keys and values are gathered again: storing the whole row in every layer would take the
        # memory that sharding saves.
        dq, dk, dv = kernel.backward(gather(inputs), lse, delta, d_out)
        return dq, _sum_scatter(dk).astype(dk.dtype), _sum_scatter(dv).astype(dv.dtype)

    return Kernel(forward, backward)


@functools.cache
def ring(kernel: Kernel) -> Kernel:
    """Wrap a kernel to attend to the keys of one device after the other, passed around a ring.

    Partial outputs are merged by log-sum-exp; the float32 gradients of a shard travel with it.
    """

    def forward(inputs: Inputs):
        def attend(keys, merged):
            return _merge(merged, kernel.forward(_with_keys(inputs, keys)))

        def hop(state, _):
            keys, merged = state
            return (_pass_on(keys), attend(keys, merged)), None

        # The last shard is used outside the loop, which would otherwise send it on for nothing.
        hops = jax.lax.axis_size(CONTEXT) - 1
        (keys, merged), _ = jax.lax.scan(hop, (_keys(inputs), _empty(inputs.q)), length=hops)
        return _finish(attend(keys, merged), inputs.q)

    def backward(inputs: Inputs, lse, delta, d_out):
        def add_part(keys, dq, gradients):
            part = kernel.backward(_with_keys(inputs, keys), lse, delta, d_out)
            return jax.tree.map(lambda total, gradient: total + gradient, (dq, *gradients), part)

        def hop(state, _):
            keys, dq, gradients = state
            # The sums of earlier devices travel while this device computes its contribution.
            dq, *gradients = add_part(keys, dq, _pass_on(gradients))
            return (_pass_on(keys), dq, tuple(gradients)), None

        # float32: a gradient is the sum of contributions from all devices of the axis.
        dq, *gradients = [jnp.zeros(x.shape) for x in inputs[:3]]
        state = _keys(inputs), dq, tuple(gradients)
        state, _ = jax.lax.scan(hop, state, length=jax.lax.axis_size(CONTEXT) - 1)
        keys, dq, gradients = state
        dq, *gradients = add_part(keys, dq, _pass_on(gradients))
        dk, dv = _pass_on(gradients)  # back to the owner of the keys
        q, k, v, *_ = inputs
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    return Kernel(forward, backward)


@functools.cache
def rounds(kernel: Kernel) -> Kernel:
    """Wrap a kernel to attend to the keys of other devices that some query sees, round by round.

    A round all-gathers an equal number of blocks of keys from every device, at most one shard in
    all. Rounds end when no device needs more. Partial outputs are merged by log-sum-exp.
    """

    def forward(inputs: Inputs):
        traveling = _Traveling.choose(inputs)

        def attend(n, merged):
            return _merge(merged, kernel.forward(traveling.gather(n, inputs)))

        merged = _merge(_empty(inputs.q), kernel.forward(inputs))
        return _finish(jax.lax.fori_loop(0, traveling.rounds, attend, merged), inputs.q)

    def backward(inputs: Inputs, lse, delta, d_out):
        traveling = _Traveling.choose(inputs)

        def add_part(n, totals):
            dq, *gradients = totals
            part = kernel.backward(traveling.gather(n, inputs), lse, delta, d_out)
            # A block of keys travels once: the sum over devices is rounded once.
            pairs = zip(gradients, part[1:], strict=True)
            return dq + part[0], *(traveling.return_home(n, total, x) for total, x in pairs)

        dq, *gradients = (x.astype(jnp.float32) for x in kernel.backward(inputs, lse, delta, d_out))
        totals = dq, *(traveling.in_blocks(x) for x in gradients)
        dq, *gradients = jax.lax.fori_loop(0, traveling.rounds, add_part, totals)
        dk, dv = (_joined(x)[:, : inputs.k.shape[1]] for x in gradients)
        return dq.astype(inputs.q.dtype), dk.astype(inputs.k.dtype), dv.astype(inputs.v.dtype)

    return Kernel(forward, backward)


class _Traveling(NamedTuple):
    """Order in which a device sends blocks of its keys: those that other devices see come first."""

    keys: dict[str, Any]  # as in `_keys`, [B, blocks, keys, ...]
    order: jax.Array  # block numbers, int32 [B, blocks]
    rounds: jax.Array  # rounds until no query needs more keys, int32 scalar

    @classmethod
    def choose(cls, inputs: Inputs) -> _Traveling:
        """Find the blocks of keys that a query of another device may see."""
        devices, length = jax.lax.axis_size(CONTEXT), inputs.k.shape[1]
        parts = max(devices, _LEAST_ROUNDS)
        block = min(BLOCK, -(-length // parts))
        padded = jax.vmap(lambda x: blocks.pad_inputs(x, 1, parts * block))(inputs)
        keys = jax.tree.map(lambda x: _split(x, block), _keys(padded))
        # Every query is tested against the limits of a block. The limits of a block of queries
        # would not do: where the early and the late chunk of a device meet, they span most keys.
        q_index, *positions = (jax.lax.all_gather(x, CONTEXT, axis=1) for x in inputs.of_queries)
        # No key is before this index, so a device's own queries see none.
        q_index = jnp.where(_is_own(devices)[:, None], _INVISIBLE, q_index)
        of_queries = [x.reshape(len(x), -1, 1) for x in (q_index, *positions)]
        of_keys = [_split(x, block) for x in padded.of_keys]
        live, _ = jax.vmap(masks.live_and_full_blocks)(of_queries, of_keys)
        is_seen = jnp.any(live, axis=1)
        order = jnp.argsort(~is_seen, axis=1, stable=True).astype(jnp.int32)
        most_blocks = jnp.max(jnp.sum(is_seen, axis=1, dtype=jnp.int32))
        # The devices of all axes run the same number of rounds: a collective of some platforms
        # waits for every device of the program.
        most_blocks = jax.lax.pmax(most_blocks, jax.sharding.get_abstract_mesh().axis_names)
        return cls(keys, order, -(-most_blocks // (order.shape[1] // parts)))

    def gather(self, n: jax.Array, inputs: Inputs) -> Inputs:
        """Return Inputs with the keys of round n from all devices."""
        devices, places = jax.lax.axis_size(CONTEXT), self._places(n)

        def of_round(x: jax.Array) -> jax.Array:
            sent = jax.vmap(lambda row, i: row[i])(as_bits(x), places)
            return from_bits(jax.lax.all_gather(_joined(sent), CONTEXT, axis=1, tiled=True))

        keys = jax.tree.map(of_round, self.keys)
        last_query = keys["last_query"].reshape(len(places), devices, -1)
        # The kernel has already attended to the device's own keys.
        last_query = jnp.where(_is_own(devices)[:, None], _INVISIBLE, last_query)
        return _with_keys(inputs, keys | {"last_query": _joined(last_query)})

    def return_home(self, n: jax.Array, total: jax.Array, gradient: jax.Array) -> jax.Array:
        """Add the gradient of round n's keys to `total` on the devices that own the keys.

        `total` is float32 [B, blocks, keys, K, H], `gradient` is like the keys of `gather`.
        """
        returned = _split(_sum_scatter(gradient), total.shape[2])
        add = jax.vmap(lambda row, i, x: row.at[i].add(x, unique_indices=True))
        return add(total, self._places(n), returned)

    def in_blocks(self, x: jax.Array) -> jax.Array:
        """Pad and split an array of the device's keys [B, T, ...] to [B, blocks, keys, ...]."""
        _, number, size, *_ = self.keys["k"].shape
        return _split(blocks.pad(x, 1, number * size), size)

    def _places(self, n: jax.Array) -> jax.Array:
        """Return the numbers of the blocks of round n, int32 [B, blocks of a round]."""
        size = self.order.shape[1] // max(jax.lax.axis_size(CONTEXT), _LEAST_ROUNDS)
        return jax.lax.dynamic_slice_in_dim(self.order, n * size, size, axis=1)


def _is_own(devices: int) -> jax.Array:
    """Return whether each device of the axis is this one, bool [devices]."""
    return jnp.arange(devices) == jax.lax.axis_index(CONTEXT)


def _split(x: jax.Array, block: int) -> jax.Array:
    """Reshape [B, T, ...] to [B, blocks, block, ...]."""
    return x.reshape(len(x), -1, block, *x.shape[2:])


def _joined(x: jax.Array) -> jax.Array:
    """Reshape [B, blocks, block, ...] to [B, T, ...]."""
    return x.reshape(len(x), -1, *x.shape[3:])


def _keys(inputs: Inputs) -> dict[str, Any]:
    """Return the fields of Inputs that have an axis of keys."""
    names = ("k", "v", "k_index", "last_query", "last_position")
    return {name: getattr(inputs, name) for name in names}


def _with_keys(inputs: Inputs, keys: dict[str, Any]) -> Inputs:
    return inputs._replace(**keys)


def _sum_scatter(x: jax.Array) -> jax.Array:
    """Sum [B, T, K, H] over devices, to float32; each device keeps the sum of its part of T."""
    # Not a reduce-scatter: in float32 it moves twice as many bytes, and libtpu 0.0.42.1 compiles
    # some to an all-reduce (v5e) or aborts on them (v5p-32).
    rows, _, *head = x.shape
    parts = x.reshape(rows, jax.lax.axis_size(CONTEXT), -1, *head)
    parts = jax.lax.all_to_all(parts, CONTEXT, split_axis=1, concat_axis=1, tiled=True)
    return jnp.sum(parts.astype(jnp.float32), axis=1)


def _pass_on(shard: Any) -> Any:
    """Send each device's arrays to the next device of the axis."""
    size = jax.lax.axis_size(CONTEXT)
    to_next = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, to_next), shard)


def _empty(q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the attention of queries [B, Tq, K, R, H] over no keys, in the format of `_merge`."""
    # Outputs are merged in float32. The first log-sum-exp is finite, because the difference of two
    # infinities in `_merge` would be NaN.
    return jnp.zeros(q.shape), jnp.full((q.shape[0], *q.shape[2:4], q.shape[1]), MASKED)


def _finish(merged: tuple[jax.Array, jax.Array], q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Convert the result of `_merge` to the format of Kernel.forward."""
    out, lse = merged
    return out.astype(q.dtype), jnp.where(lse > MASKED / 2, lse, -MASKED)


def _merge(
    merged: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merge the attention over two disjoint sets of keys, in the format of `merged`.

    `merged` is float32 out [B, Tq, K, R, H] and lse [B, K, R, Tq] so far. An lse of -1e30 marks
    queries that have seen no key; in the `part` of a kernel, 1e30 does.
    """
    (out, lse), (part_out, part_lse) = merged, part
    # Kernels mark a query without visible keys by 1e30, for their backward pass. In a merge its
    # weight must be 0.
    part_lse = jnp.where(part_lse > -MASKED / 2, MASKED, part_lse)
    merged_lse = jnp.logaddexp(lse, part_lse)
    share, part_share = (
        jnp.exp(x - merged_lse).transpose(0, 3, 1, 2)[..., None] for x in (lse, part_lse)
    )
    return out * share + part_out * part_share, merged_lse
