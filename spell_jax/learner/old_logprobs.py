"""Logprobs of answers from a forward pass before an update: by the policy or the reference model.

Micro-batches have the numbers of their answers, by which logprobs return to their samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.learner.packing import MicroBatch, TrainGroup

# A token that the teacher all but rules out has a log-ratio of -20 and more, which would outweigh
# the rest of its batch: typical gaps are below 1 nat.
LARGEST_GAP = 5.0


def with_logprobs(
    groups: Sequence[TrainGroup], batches: Sequence[MicroBatch], logprobs: Sequence[np.ndarray]
) -> list[TrainGroup]:
    """Return the groups with these logprobs of their samples; NaN for answers in no micro-batch.

    `batches` are micro-batches of groups with the same answers, `logprobs` float32 [B, A] of each.
    """
    # NaN marks answers that fit no row. They are in no later micro-batch either, so that no loss
    # reads them.
    samples = [sample for group in groups for sample in group.samples]
    old = [np.full(len(sample.tokens), np.nan, np.float32) for sample in samples]
    for batch, values in zip(batches, logprobs, strict=True):
        for row, row_values in zip(batch.answer_id, np.asarray(values), strict=True):
            for number in np.unique(row[row >= 0]):
                old[number] = row_values[row == number]
    logprob_rows = iter(old)
    return [group.with_logprobs([next(logprob_rows) for _ in group.samples]) for group in groups]


def on_sampled_support(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Return the groups with logprobs under the distribution that the filters left.

    Raises ValueError if a sample does not say what the filters kept.
    """
    return [group.with_logprobs([*map(_renormalize, group.samples)]) for group in groups]


def _renormalize(sample: Sample) -> np.ndarray:
    masses = sample.kept_log_masses
    if sample.logprobs is None or masses is None or sample.cutoffs is None:
        raise ValueError(
            "loss.support = 'sampled': needs logprobs, kept_log_masses and cutoffs of every sample"
        )
    # log(p / mass of the kept tokens): the probability under the filtered distribution.
    return sample.logprobs - masses


def as_reference_reads(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Return the segments of all groups, each after the prompt that the reference model reads.

    The reference model chooses its own experts: the samples lose the sampler's record.
    """
    return [
        dataclasses.replace(
            part,
            samples=[sample.as_written() for sample in part.samples],
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
    gaps = []
    for student, teacher in zip(group.samples, scored.samples, strict=True):
        assert student.logprobs is not None and teacher.logprobs is not None
        # A gap of 0 leaves the advantage of an answer without teacher logprobs as it is.
        gap = np.nan_to_num(teacher.logprobs - student.logprobs)
        gaps.append(np.float32(weight) * np.clip(gap, -LARGEST_GAP, LARGEST_GAP))
    return gaps
