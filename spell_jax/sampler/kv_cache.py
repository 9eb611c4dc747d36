"""Attention of prompts and decode slots to the page pool, on one device or a mesh.

Each layer is one shard_map: no part of the pool ever moves between devices. Each shard of the
mesh's row axes has its own slots and pool, which its tables index. The `context` axis splits every
page by tokens: all queries of a shard attend to each part, and the results are merged by
log-sum-exp. The `tensor` axis splits heads. If there are fewer key heads than devices, each device
has a copy of the key head that its query heads read.

A layer finds its keys in the pages of its group, at its place of the pool's first axis
(page_groups.py). With a window it reads from the first page on that a query of the row sees.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spell_jax.attention import paged
from spell_jax.attention.pages import Pages, write_pages, write_tokens
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.page_groups import PageGroups

# Fields of programs.Slots that arrange slots in rows and list their pages.
LAYOUT = ("row", "cell", "slot", "prompt_table", "prompt_visible", "suffix_table")


def head_split(mesh: Any, heads: int, kv_heads: int) -> tuple[str | None, int]:
    """Return (mesh axis that splits heads, or None; number of key heads in the pool)."""
    count = 1 if mesh is None else mesh.shape[meshes.TENSOR]
    # Heads are split only if devices get equally many query heads, and whole key heads for them.
    if count == 1 or heads % count or (kv_heads % count and count % kv_heads):
        return None, kv_heads
    return meshes.TENSOR, max(kv_heads, count)


def pages_sharding(mesh: Mesh, config: PolicyConfig) -> NamedSharding:
    """Return the sharding of the pool's keys and values [S, Z, K, C, H], and of their scales."""
    axis, _ = head_split(mesh, config.heads, config.kv_heads)
    return NamedSharding(mesh, _pages_spec(axis))


def _pages_spec(axis: str | None) -> PartitionSpec:
    return PartitionSpec(None, meshes.ROWS, axis, meshes.CONTEXT)


def attend_prompts(
    q, k, v, cache: Pages, context: dict[str, Any], groups: PageGroups, kernel: str = "auto"
) -> tuple[jax.Array, Pages]:
    """Write keys and values to the pool, then attend to it: the policy's `Attend` for prefill.

    Queries are [B, C, N, H], keys and values [B, C, K, H]. `context` has "page", the page to write
    to, int32 [B, groups]; "table", pages of the prompt, int32 [B, groups, J]; and "visible", the
    position of each token plus 1, int32 [B, C]; 0: the token sees nothing. For `kernel` see
    paged.attend.
    """
    arrays = {name: context[name] for name in ("page", "table", "visible")}
    function = functools.partial(_prompts_on_device, kernel)
    layer = _layer(groups, context)
    return _map_devices(function, meshes.CONTEXT, q, k, v, cache, layer, arrays)


def attend_slots(
    q, k, v, cache: Pages, context: dict[str, Any], groups: PageGroups, kernel: str = "auto"
) -> tuple[jax.Array, Pages]:
    """Attend from T new tokens of each of N slots to the pool: the policy's `Attend` for decoding.

    Writes their keys and values [N * T, 1, K, H] first; then queries [N * T, 1, heads, H] attend to
    the prompt and the slot's own tokens. `context` has "page", int32 [N * T, groups], and "offset",
    the place to write to; "visible", the number of the slot's own tokens so far, including this
    one, 0 for a token that is not kept; both int32 [N * T]; and the arrays named in LAYOUT. For
    `kernel` see paged.attend.
    """
    arrays = {name: context[name] for name in ("page", "offset", "visible", *LAYOUT)}
    function = functools.partial(_slots_on_device, kernel)
    return _map_devices(function, None, q, k, v, cache, _layer(groups, context), arrays)


class _Layer(NamedTuple):
    """Place of a layer's keys, and its window, int32 scalars on a device."""

    group: Any
    place: Any
    window: Any  # tokens that a query sees, itself included; None: all

    def pages(self, x: jax.Array) -> jax.Array:
        """Return the layer's pages from an array of pages of all groups, [rows, groups, ...]."""
        # One group is no lookup.
        return x[:, 0 if x.shape[1] == 1 else self.group]

    def first_visible(self, count: jax.Array) -> jax.Array | None:
        """Return the first token that a query sees, from the number of tokens up to the query."""
        return None if self.window is None else jnp.maximum(count - self.window, 0)


def _layer(groups: PageGroups, context: dict[str, Any]) -> _Layer:
    layer, window = context["layer"], context.get("window")
    if groups.count == 1:
        return _Layer(0, layer, window)
    group, place = (jnp.array(x, jnp.int32)[layer] for x in (groups.group, groups.place))
    return _Layer(group, place, window)


def _map_devices(function, time: str | None, q, k, v, pages: Pages, layer: _Layer, arrays):
    """Run function(q, k, v, pages, layer, arrays, share) on each device's shards.

    `time` is the mesh axis that splits the tokens of q, k and v, or None. `share` is (index, size)
    of the device on the `context` axis.
    """
    mesh = collectives.current_mesh()
    axis, pool_heads = head_split(mesh, q.shape[2], k.shape[2])
    if mesh is None:
        return function(q, k, v, pages, layer, arrays, (0, 1))
    # Each device needs a key head of its own, so key heads repeat if devices are more numerous.
    k, v = (jnp.repeat(x, pool_heads // k.shape[2], axis=2) for x in (k, v))
    parts = mesh.shape[meshes.CONTEXT]

    def on_device(q, k, v, pages, layer, arrays):
        share = (jax.lax.axis_index(meshes.CONTEXT), parts)
        return function(q, k, v, pages, layer, arrays, share)

    tokens = PartitionSpec(meshes.ROWS, time, axis)
    specs = _pages_spec(axis), PartitionSpec(), PartitionSpec(meshes.ROWS)
    return jax.shard_map(
        on_device,
        in_specs=(tokens, tokens, tokens, *specs),
        out_specs=(tokens, specs[0]),
        check_vma=False,
    )(q, k, v, pages, layer, arrays)


def _prompts_on_device(kernel: str, q, k, v, pages: Pages, layer: _Layer, arrays, share):
    pages = write_pages(pages, layer.place, layer.pages(arrays["page"]), k, v)
    queries, visible = q, arrays["visible"]
    # A device has a part of every page, so it needs the queries of the whole page.
    if share[1] > 1:
        queries = jax.lax.all_gather(q, meshes.CONTEXT, axis=1, tiled=True)
    table, first = layer.pages(arrays["table"]), layer.first_visible(visible)
    parts = paged.attend(queries, pages, layer.place, table, visible, share, kernel, first)
    if share[1] == 1:
        return parts[0].astype(q.dtype), pages
    out = jax.lax.psum_scatter(_weighted(*parts), meshes.CONTEXT, scatter_dimension=1, tiled=True)
    return out.astype(q.dtype), pages


def _slots_on_device(kernel: str, q, k, v, pages: Pages, layer: _Layer, arrays, share):
    part, parts = share
    owner, offset = arrays["offset"] // pages.page_size, arrays["offset"] % pages.page_size
    # The devices that do not hold a token's part of its page write to page 0, which is scratch.
    page = layer.pages(arrays["page"])
    page = page if parts == 1 else jnp.where(owner == part, page, 0)
    pages = write_tokens(pages, layer.place, page, offset, k[:, 0], v[:, 0])
    place = {"pages": pages, "layer": layer.place, "share": share}
    read = functools.partial(paged.attend, **place, kernel=kernel)
    suffix_table, prompt_table = map(layer.pages, (arrays["suffix_table"], arrays["prompt_table"]))
    slots, (rows, cells) = len(suffix_table), arrays["slot"].shape
    q = q.reshape(slots, -1, *q.shape[2:])  # [N, T, heads, H]
    time = q.shape[1]
    suffix_visible = arrays["visible"].reshape(slots, time)
    first = layer.first_visible(suffix_visible)
    suffix = read(q, table=suffix_table, num_visible=suffix_visible, first_visible=first)

    def of_cells(x: jax.Array) -> jax.Array:
        """Arrange an array of slots [N, T, ...] in rows [M, G * T, ...]."""
        x = jnp.take(x, arrays["slot"], axis=0, mode="fill", fill_value=0)
        return x.reshape(rows, cells * time, *x.shape[3:])

    prompt = jnp.repeat(arrays["prompt_visible"], time, axis=1)
    if layer.window is not None:
        # A token that is not kept sees no prompt. Otherwise idle cells would lengthen their row.
        sampled = of_cells(suffix_visible)
        prompt = jnp.where(sampled > 0, prompt, 0)
        first = layer.first_visible(prompt + sampled)
    # The queries of all samples of a prompt in one row: one product reads the prompt's keys once.
    prompt_part = read(of_cells(q), table=prompt_table, num_visible=prompt, first_visible=first)
    at = arrays["row"], arrays["cell"]
    out, lse = (x.reshape(rows, cells, time, *x.shape[2:])[at] for x in prompt_part)
    merged = paged.merge((out, lse), suffix)
    out = merged[0] if parts == 1 else jax.lax.psum(_weighted(*merged), meshes.CONTEXT)
    return out.reshape(slots * time, 1, *q.shape[2:]).astype(q.dtype), pages


def _weighted(out: jax.Array, lse: jax.Array) -> jax.Array:
    """Weight a device's part of attention; the sum over `context` is attention to all keys."""
    # Relative to the largest log-sum-exp, so that no exponential overflows.
    weight = jnp.exp(lse - jax.lax.pmax(lse, meshes.CONTEXT))
    return out * (weight / jax.lax.psum(weight, meshes.CONTEXT))[..., None]
