"""Conversion of the scheduler's plan to the input arrays of programs.py.

1. The arrays hold the rows of all shards of the mesh's row axes, one shard after another.
2. The arrays of a call are joined into one array before they go to the device. The result of a
   decode call comes back as one array, too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import numpy as np
from jax.sharding import PartitionSpec

from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.transformer import Params
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import programs, sampling
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.programs import State
from spell_jax.sampler.sampled import JoinedResult, join
from spell_jax.sampler.scheduler import Scheduler
from spell_jax.sampler.shard import AdmittedPrompt, DecodeSequence, Tasks

Limits = list[dict[DecodeSequence, int]]  # for each shard the result of Shard.allocate_pages


def prompt_pages(scheduler: Scheduler, tasks: Tasks, max_prompt: int) -> programs.PromptPages:
    """Convert the planned tasks of a prefill call to its input arrays, numpy [shards * rows, ...].

    A prompt table has room for `max_prompt` tokens.
    """
    shape, rows = scheduler.shape, (len(tasks), scheduler.shape.tasks)
    batch = programs.PromptPages(
        tokens=np.zeros((*rows, shape.page_size), np.int32),
        start=np.zeros(rows, np.int32),
        length=np.zeros(rows, np.int32),
        page=np.zeros((*rows, shape.groups), np.int32),
        table=np.zeros((*rows, shape.groups, shape.pages_of(max_prompt)), np.int32),
        # An index out of bounds, so programs.prefill drops hidden states within a prompt.
        prefilled=np.full(rows, len(tasks) * shape.prompts, np.int32),
    )
    for shard, shard_tasks in enumerate(tasks):
        rows, first = slice(len(shard_tasks)), shard * shape.prompts
        starts = np.array([number * shape.page_size for _, number in shard_tasks], np.int32)
        lengths = np.array([len(admitted.tokens) for admitted, _ in shard_tasks], np.int32)
        batch.start[shard, rows] = starts
        batch.length[shard, rows] = np.minimum(lengths - starts, shape.page_size)
        for row, (admitted, number) in enumerate(shard_tasks):
            blocks, start = admitted.table.shape[1], number * shape.page_size
            tokens = admitted.tokens[start : start + shape.page_size]
            batch.tokens[shard, row, : len(tokens)] = tokens
            batch.page[shard, row] = admitted.table[:, number]
            batch.table[shard, row, :, :blocks] = admitted.table
            if number + 1 == blocks:
                batch.prefilled[shard, row] = first + admitted.index
    return _merge_shards(batch)


def slots(
    scheduler: Scheduler,
    lane: int,
    limits: Limits,
    most_idle: int,
    config: SamplerConfig,
    has_dropout: bool = False,
) -> programs.Slots:
    """Convert the state of one lane to the input arrays of a decode call.

    `limits` are the token counts at which sequences must stop. `most_idle` is the number of idle
    slot passes at which the call returns. `has_dropout` is as Sampler.has_dropout.
    """
    shape, shards = scheduler.shape, len(scheduler.shards)
    cells, rows = shape.lanes[lane]
    slot_shape, cell_shape = (shards, shape.slots), (shards, rows, cells)
    prompt_pages = shape.pages_of(config.max_prompt)
    suffix_pages = shape.pages_of(config.max_tokens)
    arrays = programs.Slots(
        # Zeros in count and limit make a slot idle, so only slots with a sequence are filled below.
        prefilled=np.full(slot_shape, -1, np.int32),
        prompt_length=np.zeros(slot_shape, np.int32),
        count=np.zeros(slot_shape, np.int32),
        limit=np.zeros(slot_shape, np.int32),
        key=np.zeros((*slot_shape, 2), np.uint32),
        sample_index=np.zeros(slot_shape, np.int32),
        row=np.zeros(slot_shape, np.int32),
        cell=np.zeros(slot_shape, np.int32),
        slot=np.full(cell_shape, shape.slots, np.int32),
        prompt_table=np.zeros((*cell_shape[:2], shape.groups, prompt_pages), np.int32),
        prompt_visible=np.zeros(cell_shape, np.int32),
        suffix_table=np.zeros((*slot_shape, shape.groups, suffix_pages), np.int32),
        sampling=sampling.Sampling(
            temperature=np.zeros(slot_shape, np.float32),
            top_k=np.zeros(slot_shape, np.int32),
            top_p=np.ones(slot_shape, np.float32),
            min_p=np.zeros(slot_shape, np.float32),
        ),
        most_idle=np.full((shards, 1), most_idle, np.int32),
    )
    # Options that are off have no arrays, so that their work is not even compiled.
    if has_dropout:
        shares, nats = np.zeros(slot_shape, np.float32), np.zeros(slot_shape, np.float32)
        dropped = dataclasses.replace(arrays.sampling, dropout=shares, dropout_penalty=nats)
        arrays = dataclasses.replace(arrays, sampling=dropped)
    if config.speculative_tokens:
        tokens = np.zeros((*cell_shape[:2], config.max_prompt), np.int32)
        arrays = dataclasses.replace(arrays, prompt_tokens=tokens)
    for number, shard in enumerate(scheduler.shards):
        _fill_slots(arrays, number, limits[number], number * shape.prompts)
        _fill_rows(arrays, number, shard.lanes[lane].groups())
    return _merge_shards(arrays)


@flax.struct.dataclass
class PackedArrays:
    """Arrays of a call, joined into one array."""

    # Placing 17 arrays takes 0.31 ms of the host's time, placing one takes 0.03 (one CPU).
    rows: Any  # bits of all arrays, one after another, int32 [shards, K]
    tree: Any = flax.struct.field(pytree_node=False)
    # Shape in one shard and dtype of each array, in the order of the tree.
    layout: tuple[tuple[tuple[int, ...], str], ...] = flax.struct.field(pytree_node=False)


def pack(batch: Any, shards: int) -> PackedArrays:
    """Join a tree of arrays with `shards` equal parts, from prompt_pages or slots."""
    leaves, tree = jax.tree.flatten(batch)
    layout = tuple(((len(x) // shards, *x.shape[1:]), x.dtype.name) for x in leaves)
    # All dtypes here have 32 bits, so a view converts them without a copy.
    rows = [x.view(np.int32).reshape(shards, -1) for x in leaves]
    return PackedArrays(np.concatenate(rows, axis=1), tree, layout)


def place(mesh: jax.sharding.Mesh, batch: Any) -> PackedArrays:
    """Join the arrays of a call and put them onto the devices of a mesh."""
    packed = pack(batch, meshes.row_shards(mesh))
    return dataclasses.replace(packed, rows=meshes.device_put(packed.rows, meshes.by_rows(mesh)))


def prefill(
    config: PolicyConfig, params: Params, state: State, packed: PackedArrays, **options: Any
) -> tuple[State, jax.Array | None]:
    """Run programs.prefill on the arrays of a PromptPages."""
    return programs.prefill(config, params, state, unpack(packed), **options)


def decode(
    config: PolicyConfig, params: Params, state: State, packed: PackedArrays, **options: Any
) -> tuple[State, JoinedResult]:
    """Run programs.decode on the arrays of a Slots; return the new state and the joined result."""
    state, sampled = programs.decode(config, params, state, unpack(packed), **options)
    # Tokens are on every device. Without this constraint on the counts, XLA would split the joined
    # array by rows and gather it again.
    sampled = jax.lax.with_sharding_constraint(sampled, PartitionSpec())
    return state, join(sampled)


def unpack(packed: PackedArrays) -> Any:
    """Split joined arrays into their tree, inside a jitted program."""
    leaves, begin = [], 0
    for shape, dtype in packed.layout:
        end = begin + math.prod(shape)
        part = packed.rows[:, begin:end].reshape(-1, *shape[1:])
        leaves.append(jax.lax.bitcast_convert_type(part, dtype))
        begin = end
    return jax.tree.unflatten(packed.tree, leaves)


def _merge_shards(batch: Any) -> Any:
    """Merge the leading axes: [shards, rows, ...] to [shards * rows, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def _fill_slots(
    arrays: programs.Slots, number: int, limits: dict[DecodeSequence, int], first: int
) -> None:
    """Fill a shard's slots; `first` is the index in prompt_hidden of the shard's first prompt."""
    if not limits:
        return
    at = number, [sequence.slot for sequence in limits]
    prompts = [sequence.admitted for sequence in limits]
    requests = [admitted.request for admitted in prompts]
    arrays.prefilled[at] = [
        -1 if sequence.count else first + sequence.admitted.index for sequence in limits
    ]
    arrays.prompt_length[at] = [len(admitted.tokens) for admitted in prompts]
    arrays.count[at] = [sequence.count for sequence in limits]
    arrays.limit[at] = [*limits.values()]
    arrays.key[at] = [request.key for request in requests]
    arrays.sample_index[at] = [sequence.number for sequence in limits]
    for sequence in limits:
        blocks = sequence.table.shape[1]
        arrays.suffix_table[number, sequence.slot, :, :blocks] = sequence.table
    # Sampling and Options name these parameters alike.
    for name, values in vars(arrays.sampling).items():
        if values is not None:
            values[at] = [getattr(request.options, name) for request in requests]


def _fill_rows(
    arrays: programs.Slots, number: int, groups: list[tuple[AdmittedPrompt, list[int]]]
) -> None:
    """Fill the rows of a shard: the slots that share a prompt, and the pages of the prompt."""
    slots = [slot for _, row_slots in groups for slot in row_slots]
    if not slots:
        return
    sizes = [len(row_slots) for _, row_slots in groups]
    rows = np.repeat(np.arange(len(groups)), sizes)
    cells = [cell for size in sizes for cell in range(size)]
    arrays.row[number, slots], arrays.cell[number, slots] = rows, cells
    arrays.slot[number, rows, cells] = slots
    arrays.prompt_visible[number, rows, cells] = arrays.prompt_length[number, slots]
    for row, (admitted, _) in enumerate(groups):
        arrays.prompt_table[number, row, :, : admitted.table.shape[1]] = admitted.table
        if arrays.prompt_tokens is not None:
            # Right-aligned, so that the answer follows without a gap (speculative.py).
            arrays.prompt_tokens[number, row, -len(admitted.tokens) :] = admitted.tokens
