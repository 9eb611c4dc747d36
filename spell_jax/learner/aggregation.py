"""Loss weights of answers: what a loss is averaged over (loss.aggregation)."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from spell_jax.learner.packing import TrainGroup

AGGREGATIONS = (
    *("token_mean", "group_mean", "role_mean", "role_group_mean"),
    *("sequence_mean", "sequence_sum"),
)


def check_aggregation(aggregation: str, sequence_tokens: int) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"loss.aggregation = {aggregation!r}: must be one of {AGGREGATIONS}")
    # 0 means "not set": the other aggregations ignore the constant.
    minimum = int(aggregation == "sequence_sum")
    if sequence_tokens < minimum:
        raise ValueError(
            f"loss.sequence_tokens = {sequence_tokens}: must be at least {minimum} for "
            f"loss.aggregation = {aggregation!r}"
        )


def equal_weights(groups: Sequence[TrainGroup]) -> list[list[float]]:
    """Return weight 1 for every answer of the groups, for programs that score and have no loss."""
    return [[1.0] * len(group.samples) for group in groups]


def weigh(
    groups: Sequence[TrainGroup], aggregation: str = "token_mean", sequence_tokens: int = 0
) -> list[list[float]]:
    """Return each group's loss weights, one per answer, so that a loss is the plain weighted sum.

    Each token of an answer has the answer's weight. Groups are weighed before they are split or
    packed, so neither changes the loss.

    "token_mean": 1 / all answer tokens (our default, invariant to packing). "group_mean": the token
    mean of each group, averaged over groups (paper Eq. 12; a questioner row is a group of one).
    "role_mean": one token mean per group name, summed over names. "role_group_mean": the token mean
    of each group, averaged over the groups of its name, then summed over names (paper Eq. 10 with
    Eq. 12). "sequence_mean": the token mean of each answer, averaged within groups, then over
    groups (paper Eq. 2). "sequence_sum": the sum over each answer's tokens divided by the constant
    `sequence_tokens`, averaged over answers, so that a token weighs the same in a long answer as in
    a short one (Dr. GRPO, arXiv 2503.20783).

    Raises ValueError for an unknown aggregation, or "sequence_sum" without its constant.
    """
    check_aggregation(aggregation, sequence_tokens)
    # Counts are over all micro-batches of the update: a weight needs no later division.
    total = sum(group.answer_tokens for group in groups)
    answers = sum(len(group.samples) for group in groups)
    tokens_of_name, groups_of_name = collections.Counter(), collections.Counter()
    for group in groups:
        tokens_of_name[group.name] += group.answer_tokens
        groups_of_name[group.name] += 1
    weights = []
    for group in groups:
        denominators = {  # tokens among which the loss is divided
            "token_mean": total,
            "group_mean": group.answer_tokens * len(groups),
            "role_mean": tokens_of_name[group.name],
            "role_group_mean": group.answer_tokens * groups_of_name[group.name],
            "sequence_sum": sequence_tokens * answers,
        }
        # "sequence_mean" alone has a denominator that differs between the answers of a group.
        sequences = len(group.samples) * len(groups)
        lengths = [len(sample.tokens) for sample in group.samples]
        weights.append([1 / denominators.get(aggregation, n * sequences) for n in lengths])
    return weights
