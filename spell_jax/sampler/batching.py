"""Conversion of the scheduler's plan to the input arrays of programs.py.

The arrays hold the rows of all shards of the mesh's row axes, one shard after the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import programs, sampling
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.scheduler import DecodeSequence, Scheduler, Shard, Tasks

Limits = list[dict[DecodeSequence, int]]  # for each shard the result of Shard.allocate_pages


def prompt_pages(scheduler: Scheduler, tasks: Tasks, max_prompt: int) -> programs.PromptPages:
    """Input arrays of a prefill call, for tasks planned by a scheduler."""
    shape, rows = scheduler.shape, (len(tasks), scheduler.shape.tasks)
    batch = programs.PromptPages(
        tokens=np.zeros((*rows, shape.page_size), np.int32),
        start=np.zeros(rows, np.int32),
        length=np.zeros(rows, np.int32),
        page=np.zeros(rows, np.int32),
        table=np.zeros((*rows, shape.pages_of(max_prompt)), np.int32),
        prefilled=np.full(rows, len(tasks) * shape.prompts, np.int32),
    )
    for shard, some in enumerate(tasks):
        for row, (prefilled, number) in enumerate(some):
            at, start, prompt = (shard, row), number * shape.page_size, prefilled.request.prompt
            tokens = prompt[start : start + shape.page_size]
            batch.tokens[at][: len(tokens)] = tokens
            batch.start[at], batch.length[at] = start, len(tokens)
            batch.page[at] = prefilled.pages[number]
            batch.table[at][: len(prefilled.pages)] = prefilled.pages
            if start + shape.page_size >= len(prompt):
                batch.prefilled[at] = shard * shape.prompts + prefilled.index
    return _flat(batch)


def slots(
    scheduler: Scheduler, lane: int, limits: Limits, enough: int, config: SamplerConfig
) -> programs.Slots:
    """Input arrays of a decode call of one lane; `enough` ended slots make it return."""
    shape, shards = scheduler.shape, len(scheduler.shards)
    cells, rows = shape.lanes[lane]
    one, many = (shards, shape.slots), (shards, rows, cells)
    prompt_pages = shape.pages_of(config.max_prompt)
    suffix_pages = shape.pages_of(config.longest_answer)
    arrays = programs.Slots(
        prefilled=np.full(one, -1, np.int32),
        prompt_length=np.zeros(one, np.int32),
        count=np.zeros(one, np.int32),
        limit=np.zeros(one, np.int32),
        key=np.zeros((*one, 2), np.uint32),
        sample_index=np.zeros(one, np.int32),
        row=np.zeros(one, np.int32),
        cell=np.zeros(one, np.int32),
        slot=np.full(many, shape.slots, np.int32),
        prompt_table=np.zeros((*many[:2], prompt_pages), np.int32),
        prompt_visible=np.zeros(many, np.int32),
        suffix_table=np.zeros((*one, suffix_pages), np.int32),
        sampling=sampling.Sampling(
            temperature=np.zeros(one, np.float32),
            top_k=np.zeros(one, np.int32),
            top_p=np.ones(one, np.float32),
            min_p=np.zeros(one, np.float32),
        ),
        enough=np.int32(enough),
    )
    if config.vocabulary_dropout:
        shares, nats = np.zeros(one, np.float32), np.zeros(one, np.float32)
        dropped = dataclasses.replace(arrays.sampling, dropout=shares, dropout_penalty=nats)
        arrays = dataclasses.replace(arrays, sampling=dropped)
    if config.speculative_tokens:
        tokens = np.zeros((*many[:2], config.max_prompt), np.int32)
        arrays = dataclasses.replace(arrays, prompt_tokens=tokens)
    for number, shard in enumerate(scheduler.shards):
        for sequence, limit in limits[number].items():
            _fill_slot(arrays, (number, sequence.slot), sequence, limit, number * shape.prompts)
        _fill_rows(arrays, number, shard, lane)
    return _flat(arrays)


def shardings(mesh: Any, batch: Any) -> Any:
    """Shardings of a call's arrays: rows over the row axes, scalars replicated."""
    by_rows, everywhere = meshes.by_rows(mesh), meshes.replicated(mesh)
    return jax.tree.map(lambda x: by_rows if x.ndim else everywhere, batch)


def _flat(batch: Any) -> Any:
    """Merges the leading axes: [shards, rows, ...] to [shards * rows, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim else x, batch)


def _fill_slot(
    arrays: programs.Slots, at: tuple[int, int], sequence: DecodeSequence, limit: int, first: int
) -> None:
    """Fills in one slot; `first` is the index of the shard's first prompt in prompt_hidden."""
    prefilled, options = sequence.prefilled, sequence.prefilled.request.options
    if sequence.fresh:
        arrays.prefilled[at] = first + prefilled.index
    arrays.prompt_length[at] = len(prefilled.request.prompt)
    arrays.count[at], arrays.limit[at] = sequence.count, limit
    arrays.key[at], arrays.sample_index[at] = prefilled.request.key, sequence.number
    arrays.suffix_table[at][: len(sequence.pages)] = sequence.pages
    for name, values in vars(arrays.sampling).items():
        if values is not None:
            values[at] = getattr(options, name)


def _fill_rows(arrays: programs.Slots, number: int, shard: Shard, lane: int) -> None:
    for row, (prefilled, some) in enumerate(shard.lanes[lane].groups()):
        arrays.row[number, some], arrays.cell[number, some] = row, range(len(some))
        arrays.slot[number, row, : len(some)] = some
        arrays.prompt_visible[number, row, : len(some)] = len(prefilled.request.prompt)
        arrays.prompt_table[number, row, : len(prefilled.pages)] = prefilled.pages
        if arrays.prompt_tokens is not None:
            arrays.prompt_tokens[number, row, -len(prefilled.tokens) :] = prefilled.tokens
