"""Logprobs of answers from a forward pass before an update: by the policy or the reference model.

Answers get ids, by which their logprobs are found again in the packed micro-batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from spell_jax.learner.packing import MicroBatch, TrainGroup

# A token that the teacher all but rules out has a log-ratio of -20 and more, which would outweigh
# the rest of its batch: typical gaps are below 1 nat.
LARGEST_GAP = 5.0


def with_ids(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Return the groups with answer ids 0, 1, 2, ... and weights of 1, ready to be packed."""
    counter = itertools.count()
    numbered_groups = []
    for group in groups:
        ids = [next(counter) for _ in group.answers]
        numbered_groups.append(dataclasses.replace(group, ids=ids, weights=[1.0] * len(ids)))
    return numbered_groups


def with_logprobs(
    groups: Sequence[TrainGroup], batches: Sequence[MicroBatch], logprobs: Sequence[np.ndarray]
) -> list[TrainGroup]:
    """Return the groups with `old_logprobs` of their answers; NaN for answers in no micro-batch.

    `batches` are micro-batches of with_ids(groups), `logprobs` float32 [B, A] of each.
    """
    answers = [answer for group in groups for answer in group.answers]
    old = [np.full(len(answer), np.nan, np.float32) for answer in answers]
    for batch, values in zip(batches, logprobs, strict=True):
        for row, row_values in zip(batch.answer_id, np.asarray(values), strict=True):
            for index in np.unique(row[row >= 0]):
                old[index] = row_values[row == index]
    logprob_rows = iter(old)
    return [
        dataclasses.replace(group, old_logprobs=[next(logprob_rows) for _ in group.answers])
        for group in groups
    ]


def on_sampled_support(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Return the groups with `old_logprobs` under the distribution that the filters left.

    Raises ValueError if a group does not say what the filters kept.
    """
    renormalized_groups = []
    for group in groups:
        old, log_masses = group.old_logprobs, group.kept_log_masses
        if old is None or log_masses is None or group.cutoffs is None:
            raise ValueError(
                "loss.support = 'sampled': needs old_logprobs, kept_log_masses and cutoffs of "
                "every group"
            )
        renormalized = [row - mass for row, mass in zip(old, log_masses, strict=True)]
        renormalized_groups.append(
            dataclasses.replace(group, old_logprobs=renormalized, kept_log_masses=None)
        )
    return renormalized_groups


def as_reference_reads(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Return the segments of all groups, each after the prompt that the reference model reads."""
    return [
        dataclasses.replace(
            part,
            prompt=part.prompt if part.reference_prompt is None else part.reference_prompt,
            reference_prompt=None,
            aligned=None,
        )
        for group in groups
        for part in group.segments
    ]


def join_segments(groups: Sequence[TrainGroup], segments: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Join segments, in the order of `as_reference_reads`, into the groups again."""
    segment_iterator = iter(segments)
    return [
        dataclasses.replace(
            next(segment_iterator), aligned=next(segment_iterator) if group.aligned else None
        )
        for group in groups
    ]


def taught(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Return the groups that have a teacher, which reads their reference_prompt."""
    return [group for group in groups if group.reference_prompt is not None]


def with_teacher(
    groups: Sequence[TrainGroup], scored: Sequence[TrainGroup], weight: float
) -> list[TrainGroup]:
    """Return the groups with token_advantages = `weight` * (teacher's logprob - own logprob).

    `scored` are the groups of `taught`, with the teacher's logprobs. Differences are clipped to
    +-LARGEST_GAP nats, and 0 for answers that fit no row. Groups without a teacher stay as they
    are.
    """
    teachers = iter(scored)
    return [
        group
        if group.reference_prompt is None
        else dataclasses.replace(
            group, token_advantages=_clipped_gaps(group, next(teachers), weight)
        )
        for group in groups
    ]


def _clipped_gaps(group: TrainGroup, scored: TrainGroup, weight: float) -> list[np.ndarray]:
    assert group.old_logprobs is not None and scored.old_logprobs is not None
    return [
        np.float32(weight) * np.clip(np.nan_to_num(teacher - student), -LARGEST_GAP, LARGEST_GAP)
        for teacher, student in zip(scored.old_logprobs, group.old_logprobs, strict=True)
    ]
