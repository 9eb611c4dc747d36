"""Packing of groups into micro-batches: one prompt followed by its G answers.

1. A prompt and its answers become [prompt | answer_1 | ... | answer_G]; rotary
   positions restart at P for every answer.
2. Groups whose prompts begin alike become a tree, which has their first tokens once (trees.py):
   [documents | question_1 | its G answers | question_2 | its G answers | ...].
3. Trees go first-fit-decreasing into rows [T]; a group too long for the longest row is split by
   answers, repeating its prompt.
4. Rows are stacked into micro-batches [rows, T] with rows * T a token budget (shapes.py).
5. Every answer token knows which position predicts it (`source`): the first token of each answer is
   predicted by the last prompt position, so no other prompt position enters the head.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spell_jax.data.clusters import ROLES
from spell_jax.learner import context_layout, shapes, trees
from spell_jax.learner.shapes import AUTO, Bucket, MicroRows
from spell_jax.learner.trees import GroupTree, TokenCounts
from spell_jax.runtime.config import check_choice, check_least

Tokens = Sequence[int] | np.ndarray
Array = Any  # numpy on the host, jax on the devices


# Fields of a group with an entry for each token of each answer, and for each answer.
_PER_TOKEN = ("token_advantages", "old_logprobs", "kept_log_masses", "cutoffs", "experts")
_PER_ANSWER = ("answers", "advantages", *_PER_TOKEN, "weights", "ids")


@dataclasses.dataclass(frozen=True)
class TrainGroup:
    """One prompt and its answers; the sequences have one entry per answer."""

    prompt: Tokens  # token ids [P], P >= 1
    answers: Sequence[Tokens]  # token ids [S_i] with the stop token, S_i >= 1
    advantages: Sequence[float]
    role: str = "responder"  # for counts, and for weights that are summed over roles
    old_logprobs: Sequence[np.ndarray] | None = None  # of the policy that sampled, float32 [S_i]
    # Added to the advantage of the answer at each of its tokens, float32 [S_i].
    token_advantages: Sequence[np.ndarray] | None = None
    # What the sampler's filters kept at each token: the log of its probability mass, and the
    # cut-off of the logits (lm_head.score_tokens), float32 [S_i]. For loss.support = "sampled".
    kept_log_masses: Sequence[np.ndarray] | None = None
    cutoffs: Sequence[np.ndarray] | None = None
    # Experts that processed the tokens of the answers and of the prompt while sampling, [S_i, L, k]
    # and [P, L, k] (moe.no_experts). For loss.routing = "sampled".
    experts: Sequence[np.ndarray] | None = None
    prompt_experts: np.ndarray | None = None
    weights: Sequence[float] | None = None  # loss weight of each of the answer's tokens (weigh)
    ids: Sequence[int] | None = None  # by which answers are found again in micro-batches
    model: str = "policy"  # the trained model that the group is for
    # Prompt [<= P] after which the reference model scores the answers; None: `prompt`. Only for
    # loss.old_logprobs = "reference" and loss.distillation_weight.
    reference_prompt: Tokens | None = None
    # The first answer after another prompt, in the same row: a group of one answer of advantage and
    # weight 0, whose reward loss.align_weight compares.
    aligned: TrainGroup | None = None

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError("group.prompt: is empty, must have at least 1 token")
        context = self.prompt if self.reference_prompt is None else self.reference_prompt
        if not 1 <= len(context) <= len(self.prompt):  # so its answers fit where the group fits
            raise ValueError(
                f"group.reference_prompt: of {len(context)} tokens, must have from 1 to "
                f"{len(self.prompt)}, those of the prompt"
            )
        if not self.answers or not all(len(answer) for answer in self.answers):
            raise ValueError("group.answers: must be one or more, each of at least 1 token")
        lengths = [len(answer) for answer in self.answers]
        if len(self.advantages) != len(lengths):
            raise ValueError(
                f"group.advantages: {len(self.advantages)} of them, but {len(lengths)} answers"
            )
        for name in _PER_TOKEN:
            rows = getattr(self, name)
            if rows is not None and [len(row) for row in rows] != lengths:
                raise ValueError(
                    f"group.{name}: of lengths {[len(row) for row in rows]}, "
                    f"but the answers have {lengths}"
                )
        if self.prompt_experts is not None and len(self.prompt_experts) != len(self.prompt):
            raise ValueError(
                f"group.prompt_experts: of {len(self.prompt_experts)} tokens, but the prompt has "
                f"{len(self.prompt)}"
            )

    @property
    def answer_tokens(self) -> int:
        count = sum(len(answer) for answer in self.answers)
        return count + (self.aligned.answer_tokens if self.aligned else 0)

    @property
    def tokens(self) -> int:
        return sum(len(part.prompt) for part in self.segments) + self.answer_tokens

    @property
    def size(self) -> TokenCounts:
        return TokenCounts(self.tokens, self.answer_tokens)

    @property
    def segments(self) -> list[TrainGroup]:
        """The group and its aligned one: prompts with their answers, in the order of the row."""
        return [self] if self.aligned is None else [self, self.aligned]


@flax.struct.dataclass
class MicroBatch:
    """Packed rows with A answer tokens per row, int32 unless noted."""

    tokens: Array  # [B, T], 0 where padded
    positions: Array  # [B, T], rotary positions
    index: Array  # [B, T], row indices; in order, unless context_layout.py moves tokens
    last_query: Array  # [B, T], the mask (attention/masks.py), in row indices
    source: Array  # [B, A], slot on axis T of the hidden state that predicts the answer token
    target: Array  # [B, A], the answer token
    advantage: Array  # float32 [B, A]
    weight: Array  # float32 [B, A], the token's share in the loss; 0 where padded
    old_logprob: Array  # float32 [B, A], of the policy that sampled; 0 where none was given
    cutoff: Array  # float32 [B, A], of the logits (lm_head.score_tokens); -inf where none was given
    role: Array  # [B, A], number of the answer's role in ROLES, or len(ROLES) for another role
    answer: Array  # [B, A], number of the answer in its (one) row, -1 where padded
    group: Array  # [B, A], number of the answer's group in its row, -1 where padded
    answer_id: Array  # [B, A], the answer's id in its TrainGroup, -1 where padded or not given
    # Recorded experts of the tokens, [B, T, L, k], -1 where none were given (moe.no_experts); None
    # unless loss.routing = "sampled".
    experts: Array | None = None


SHARED_PREFIXES = ("tree", "group", "none")


@dataclasses.dataclass(frozen=True)
class PackingConfig:
    """Shapes of micro-batches.

    Attributes:
      buckets: "auto": each step chooses its shapes, so that less than 15 % is padding where its
        groups allow (shapes.py); or compiled row shapes (tokens T, of which answer tokens A),
        lengths ascending. With "auto" a row has at most `token_budget` tokens.
      token_budget: tokens of a micro-batch, rows * T.
      shared_prefix: what is laid out once: "tree", the tokens with which prompts begin alike;
        "group", the prompt of a group's answers; "none", nothing, for comparisons.
    """

    buckets: tuple[Bucket, ...] | str = AUTO
    token_budget: int = 51_200
    shared_prefix: str = "tree"

    def __post_init__(self):
        check_choice(self, "packing.", shared_prefix=SHARED_PREFIXES)
        check_least(self, "packing.", token_budget=1)
        if isinstance(self.buckets, str):
            if self.buckets != AUTO:
                raise ValueError(
                    f"packing.buckets = {self.buckets!r}: must be {AUTO!r}, or tuples (length, "
                    "answers)"
                )
            return
        pairs = list(zip(self.buckets, self.buckets[1:], strict=False))
        if not self.buckets or any(
            low.length >= high.length or low.answers > high.answers for low, high in pairs
        ):
            raise ValueError(
                f"packing.buckets = {self.buckets}: must be one or more, lengths ascending and "
                f"answers not falling, or {AUTO!r}"
            )
        if self.token_budget < self.buckets[-1].length:
            raise ValueError(
                f"packing.token_budget = {self.token_budget}: must be at least the length of the "
                f"largest bucket, {self.buckets[-1].length}"
            )

    @property
    def listed(self) -> tuple[Bucket, ...]:
        """The buckets of the config; () if shapes are chosen step by step."""
        return () if isinstance(self.buckets, str) else self.buckets

    def check_splits(self, devices: int) -> None:
        """Raise ValueError if a row cannot be split equally over the context axis."""
        if self.buckets == AUTO and self.token_budget < devices:
            raise ValueError(
                f"packing.token_budget = {self.token_budget}: must be at least mesh.context = "
                f"{devices}"
            )
        for bucket in self.listed:
            if bucket.length % devices or bucket.answers % devices:
                raise ValueError(
                    f"packing.buckets: ({bucket.length}, {bucket.answers}) must be multiples of "
                    f"mesh.context = {devices}"
                )

    def largest(self, devices: int = 1) -> Bucket:
        """Return the row that holds the most tokens, split over the context axis."""
        if self.listed:
            return self.listed[-1]
        longest = shapes.longest_row(self.token_budget, devices) or devices
        return Bucket(longest, longest)


def count_answers(groups: Sequence[TrainGroup]) -> dict[str, int]:
    counts = collections.Counter()
    for group in groups:
        counts[group.role] += len(group.answers)
    return dict(counts)


def sum_by_role(values: Array, role: Array) -> jax.Array:
    """Sum values [B, A] by role [B, A] (see MicroBatch), float32 [len(ROLES) + 1]."""
    of_role = role[..., None] == jnp.arange(len(ROLES) + 1)
    return jnp.sum(jnp.where(of_role, values[..., None], 0.0), axis=(0, 1))


def sum_by_answer(values: Array, answer: Array) -> jax.Array:
    """Sum values over each token's answer, 0 where padded; values and sums are float32 [B, A].

    With MicroBatch.group as `answer`, sum over each token's group.
    """
    size = answer.shape[1]
    slot = jnp.where(answer >= 0, answer, size)  # out of range, so that nothing is added
    rows = jnp.arange(len(answer))[:, None]
    sums = jnp.zeros_like(values).at[rows, slot].add(values, mode="drop")
    return jnp.take_along_axis(sums, slot, axis=1, mode="fill", fill_value=0)


def whole_groups(
    groups: Sequence[TrainGroup], largest: Bucket
) -> tuple[list[TrainGroup], list[TrainGroup]]:
    """Return the groups that fit without a split, and the single answers of the others.

    A loss that compares the answers of a group needs all of them in one row.
    """
    fits = [g.tokens <= largest.length and g.answer_tokens <= largest.answers for g in groups]
    refused = [group for group, ok in zip(groups, fits, strict=True) if not ok]
    fitting = [group for group, ok in zip(groups, fits, strict=True) if ok]
    return fitting, separate_answers(refused)


def split_groups(
    groups: Sequence[TrainGroup], largest: Bucket
) -> tuple[list[TrainGroup], list[TrainGroup]]:
    """Split groups by answers to fit; return (fitting groups, single answers that cannot fit)."""
    fitting, refused = [], []
    for group in groups:
        part: list[int] = []
        used = 0
        for index, answer in enumerate(group.answers):
            size = len(answer)
            if len(group.prompt) + size > largest.length or size > largest.answers:
                refused.append(_take(group, [index]))
                continue
            if used + size > min(largest.answers, largest.length - len(group.prompt)):
                fitting.append(_take(group, part))
                part, used = [], 0
            part.append(index)
            used += size
        if part:
            fitting.append(_take(group, part))
    return fitting, refused


def _take(group: TrainGroup, indices: Sequence[int]) -> TrainGroup:
    if len(indices) == len(group.answers):
        return group

    def pick(rows):
        return None if rows is None else [rows[i] for i in indices]

    return dataclasses.replace(group, **{name: pick(getattr(group, name)) for name in _PER_ANSWER})


def separate_answers(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Make one group per answer, prompts repeated: the same gradient without shared prefixes."""
    return [_take(group, [i]) for group in groups for i in range(len(group.answers))]


def in_parts(groups: Sequence[TrainGroup], count: int) -> list[list[TrainGroup]]:
    """Split groups into `count` parts, one per optimizer step; no part is empty.

    Part i gets every count-th group from i on, so each part has the roles of the whole in the same
    order, and sizes differ by at most one. Fewer groups than `count` make fewer parts.
    """
    if count < 1:
        raise ValueError(f"count = {count}: must be at least 1")
    return [list(groups[first::count]) for first in range(min(count, len(groups)))]


AGGREGATIONS = (
    *("token_mean", "group_mean", "role_mean", "role_group_mean"),
    *("sequence_mean", "sequence_sum"),
)


def check_aggregation(aggregation: str, sequence_tokens: int) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"loss.aggregation = {aggregation!r}: must be one of {AGGREGATIONS}")
    least = int(aggregation == "sequence_sum")
    if sequence_tokens < least:
        raise ValueError(
            f"loss.sequence_tokens = {sequence_tokens}: must be at least {least} for "
            f"loss.aggregation = {aggregation!r}"
        )


def weigh(
    groups: Sequence[TrainGroup], aggregation: str = "token_mean", sequence_tokens: int = 0
) -> list[TrainGroup]:
    """Give every answer the loss weight of its tokens, so that a loss is the plain weighted sum.

    Groups are weighed before they are split or packed, so neither changes the loss.

    "token_mean": 1 / all answer tokens (our default, invariant to packing). "group_mean": the token
    mean of each group, averaged over groups (paper Eq. 12; a questioner row is a group of one).
    "role_mean": one token mean per role, summed over roles. "role_group_mean": the token mean of
    each group, averaged over the groups of its role, then summed over roles (paper Eq. 10 with
    Eq. 12). "sequence_mean": the token mean of each answer, averaged within groups, then over
    groups (paper Eq. 2). "sequence_sum": the sum over each answer's tokens divided by the constant
    `sequence_tokens`, averaged over answers, so that a token weighs the same in a long answer as in
    a short one (Dr. GRPO, arXiv 2503.20783).

    Raises ValueError for an unknown aggregation, or "sequence_sum" without its constant.
    """
    check_aggregation(aggregation, sequence_tokens)
    total = sum(group.answer_tokens for group in groups)
    answers = sum(len(group.answers) for group in groups)
    tokens_of_role, groups_of_role = collections.Counter(), collections.Counter()
    for group in groups:
        tokens_of_role[group.role] += group.answer_tokens
        groups_of_role[group.role] += 1
    weighed = []
    for group in groups:
        denominators = {  # tokens among which the loss is divided
            "token_mean": total,
            "group_mean": group.answer_tokens * len(groups),
            "role_mean": tokens_of_role[group.role],
            "role_group_mean": group.answer_tokens * groups_of_role[group.role],
            "sequence_sum": sequence_tokens * answers,
        }
        weights = [
            1.0 / denominators.get(aggregation, len(answer) * len(group.answers) * len(groups))
            for answer in group.answers
        ]
        weighed.append(dataclasses.replace(group, weights=weights))
    return weighed


def pack(
    groups: Sequence[TrainGroup],
    buckets: Sequence[Bucket] | str,
    token_budget: int,
    row_multiple: int = 1,
    devices: int = 1,
    with_trees: bool = True,
    no_experts: np.ndarray | None = None,
) -> list[MicroBatch]:
    """Pack groups that fit the largest row into micro-batches of numpy arrays.

    Groups are weighed and split (weigh, split_groups). Buckets ascend in length, or are AUTO. The
    rows of a micro-batch are a multiple of `row_multiple` (devices along the row axis). Tokens of a
    row are laid out over `devices` devices (of the context axis). The same order of groups gives
    the same result. Without `with_trees`, groups share nothing. `no_experts` (moe.no_experts) asks
    for the recorded experts; tokens that prompts of a tree share have those of the first.
    """
    laid_out = lay_out(groups, buckets, token_budget, row_multiple, devices, with_trees)
    return [
        _stack(groups, rows, empty_micro_batch(bucket, count, no_experts), devices)
        for bucket, count, rows in laid_out
    ]


def lay_out(
    groups: Sequence[TrainGroup],
    buckets: Sequence[Bucket] | str,
    token_budget: int,
    row_multiple: int = 1,
    devices: int = 1,
    with_trees: bool = True,
) -> list[MicroRows]:
    """Put the trees of groups into the rows of micro-batches; see `pack`."""
    sizes = [group.size for group in groups]
    forest = trees.single(sizes)
    if with_trees:  # a group with an aligned one has two prompts: it stays alone
        prompts = [None if group.aligned else np.asarray(group.prompt) for group in groups]
        longest = shapes.longest_row(token_budget, devices)
        room = TokenCounts(longest, longest) if isinstance(buckets, str) else buckets[-1].size
        forest = trees.grow(prompts, sizes, room)
    if isinstance(buckets, str):
        return shapes.choose(forest, token_budget, row_multiple, devices)
    return shapes.in_buckets(forest, buckets, token_budget, row_multiple)


def _stack(
    groups: Sequence[TrainGroup],
    rows: Sequence[Sequence[GroupTree]],
    batch: MicroBatch,
    devices: int,
) -> MicroBatch:
    """Write rows of trees into a micro-batch of padding, and return it."""
    for row, members in enumerate(rows):
        writer = _RowWriter(batch, row)
        for tree in members:
            writer.write(groups, tree)
        if devices > 1:
            order = context_layout.order(writer.is_answer, writer.end, devices)
            by_token = batch.tokens, batch.positions, batch.index, batch.last_query, batch.experts
            for array in by_token:
                if array is not None:
                    array[row] = array[row, order]
            batch.source[row] = np.argsort(order)[batch.source[row]]
    return batch


def empty_micro_batch(
    bucket: Bucket, rows: int, no_experts: np.ndarray | None = None
) -> MicroBatch:
    """Make padding in the shape with which a bucket is compiled; `no_experts` is as in `pack`."""
    long, short = (rows, bucket.length), (rows, bucket.answers)
    experts = None
    if no_experts is not None:
        experts = np.broadcast_to(no_experts, (*long, *no_experts.shape)).copy()
    return MicroBatch(
        tokens=np.zeros(long, np.int32),
        positions=np.zeros(long, np.int32),
        index=np.tile(np.arange(bucket.length, dtype=np.int32), (rows, 1)),
        last_query=np.full(long, -1, np.int32),
        source=np.zeros(short, np.int32),
        target=np.zeros(short, np.int32),
        advantage=np.zeros(short, np.float32),
        weight=np.zeros(short, np.float32),
        old_logprob=np.zeros(short, np.float32),
        cutoff=np.full(short, -np.inf, np.float32),
        role=np.zeros(short, np.int32),
        answer=np.full(short, -1, np.int32),
        group=np.full(short, -1, np.int32),
        answer_id=np.full(short, -1, np.int32),
        experts=experts,
    )


class _RowWriter:
    """Writer of one row of a micro-batch, from its first column and its first answer slot on."""

    def __init__(self, batch: MicroBatch, row: int):
        self._row = jax.tree.map(lambda array: array[row], batch)  # views
        self.is_answer = np.zeros(len(self._row.tokens), bool)
        self.end = 0  # columns written
        self._filled = self._answers = self._groups = 0

    def write(self, groups: Sequence[TrainGroup], tree: GroupTree) -> None:
        path = np.zeros(0, np.int64)  # columns of the tokens of the last prompt
        for index, shared in zip(tree.members, tree.shared, strict=True):
            for part, common in zip(groups[index].segments, (shared, 0), strict=False):
                path = self._write_prompt(path[:common], part)
                self._write_answers(part, int(path[-1]))
                self._row.last_query[path] = self.end - 1
            self._groups += 1

    def _write_prompt(self, path: np.ndarray, group: TrainGroup) -> np.ndarray:
        """Write the prompt after the tokens at columns `path`; return all of its columns."""
        new = slice(self.end, self.end + len(group.prompt) - len(path))
        self._row.tokens[new] = group.prompt[len(path) :]
        self._row.positions[new] = np.arange(len(path), len(group.prompt))
        if self._row.experts is not None and group.prompt_experts is not None:
            self._row.experts[new] = group.prompt_experts[len(path) :]
        self.end = new.stop
        return np.concatenate([path, np.arange(new.start, new.stop)])

    def _write_answers(self, group: TrainGroup, last: int) -> None:
        """Write answers to the prompt that ends at column `last`."""
        if group.weights is None:
            raise ValueError("groups are weighed before they are packed")
        row, role = self._row, ROLES.index(group.role) if group.role in ROLES else len(ROLES)
        for i, answer in enumerate(group.answers):
            columns = slice(self.end, self.end + len(answer))
            slots = slice(self._filled, self._filled + len(answer))
            row.tokens[columns] = answer
            row.positions[columns] = len(group.prompt) + np.arange(len(answer))
            row.last_query[columns] = columns.stop - 1
            self.is_answer[columns] = True
            row.source[slots] = np.arange(columns.start - 1, columns.stop - 1)
            row.source[slots.start] = last
            row.target[slots] = answer
            row.advantage[slots] = group.advantages[i]
            if group.token_advantages is not None:
                row.advantage[slots] += group.token_advantages[i]
            row.weight[slots] = group.weights[i]
            row.role[slots] = role
            row.answer[slots] = self._answers
            row.group[slots] = self._groups
            if group.ids is not None:
                row.answer_id[slots] = group.ids[i]
            if group.old_logprobs is not None:
                row.old_logprob[slots] = group.old_logprobs[i]
            if group.cutoffs is not None:
                row.cutoff[slots] = group.cutoffs[i]
            if row.experts is not None and group.experts is not None:
                row.experts[columns] = group.experts[i]
            self.end, self._filled = columns.stop, slots.stop
            self._answers += 1
