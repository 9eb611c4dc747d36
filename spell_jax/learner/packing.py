"""Packing of groups into micro-batches: one prompt followed by its G answers.

1. A prompt and its answers become [prompt | answer_1 | ... | answer_G]; rotary positions restart at
   P for every answer.
2. Groups with prompts that begin alike become a tree, which has their first tokens once (trees.py):
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
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.learner import context_layout, shapes, trees
from spell_jax.learner.shapes import AUTO, Bucket, MicroRows
from spell_jax.learner.trees import GroupTree, TokenCounts
from spell_jax.runtime.config import check_choice, check_least

Tokens = Sequence[int] | np.ndarray
Array = Any  # numpy on the host, jax on the devices


@dataclasses.dataclass(frozen=True)
class TrainGroup:
    """One prompt and the answers to it that a model is trained on.

    Attributes:
      prompt: token ids [P], P >= 1.
      samples: answers [G], G >= 1, each of at least one token.
      advantages: advantage of each answer [G].
      name: name of the group, such as a role; counts and aggregations are by name.
      model: name of the trained model, "policy" or one of Algorithm.trained.
      reference_prompt: token ids [<= P] after which the reference model scores the answers; None:
        `prompt`. Only for loss.old_logprobs = "reference" and loss.distillation_weight.
      aligned: group of the first answer after another prompt, in the same row, with advantage 0 and
        loss weight 0. loss.align_weight compares the rewards of both copies of the answer.
      token_advantages: terms added to an answer's advantage at its tokens, float32 [S] for each of
        the G answers (old_logprobs.with_teacher); None adds nothing.
    """

    prompt: Tokens
    samples: Sequence[Sample]
    advantages: Sequence[float]
    name: str
    model: str = "policy"
    reference_prompt: Tokens | None = None
    aligned: TrainGroup | None = None
    token_advantages: Sequence[np.ndarray] | None = None

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError("group.prompt: is empty, must have at least 1 token")
        context = self.prompt if self.reference_prompt is None else self.reference_prompt
        if not 1 <= len(context) <= len(self.prompt):  # so its answers fit where the group fits
            raise ValueError(
                f"group.reference_prompt: of {len(context)} tokens, must have from 1 to "
                f"{len(self.prompt)}, the tokens of the prompt"
            )
        lengths = [len(sample.tokens) for sample in self.samples]
        if not lengths or not all(lengths):
            raise ValueError("group.samples: must be one or more, each of at least 1 token")
        if len(self.advantages) != len(lengths):
            raise ValueError(
                f"group.advantages: {len(self.advantages)} of them, but {len(lengths)} samples"
            )
        terms = self.token_advantages
        # numpy would repeat an array of length 1 over all tokens without an error.
        if terms is not None and [len(row) for row in terms] != lengths:
            counts = [len(row) for row in terms]
            raise ValueError(f"group.token_advantages: of {counts} tokens, must be {lengths}")
        for experts in (sample.prompt_experts for sample in self.samples):
            if experts is not None and len(experts) != len(self.prompt):
                raise ValueError(
                    f"group.samples: prompt_experts of {len(experts)} tokens, but the prompt has "
                    f"{len(self.prompt)}"
                )
        if copy := self.aligned:
            is_first = np.array_equal(copy.samples[0].tokens, self.samples[0].tokens)
            if not is_first or len(copy.samples) > 1 or copy.advantages[0]:
                raise ValueError("group.aligned: must have the first sample alone, advantage 0")

    @property
    def answer_tokens(self) -> int:
        count = sum(len(sample.tokens) for sample in self.samples)
        return count + (self.aligned.answer_tokens if self.aligned else 0)

    @property
    def tokens(self) -> int:
        return sum(len(part.prompt) for part in self.segments) + self.answer_tokens

    @property
    def size(self) -> TokenCounts:
        return TokenCounts(self.tokens, self.answer_tokens)

    @property
    def segments(self) -> list[TrainGroup]:
        """The group and its aligned group: prompts with their answers, in the order of the row."""
        return [self] if self.aligned is None else [self, self.aligned]

    def select(self, indices: Sequence[int]) -> TrainGroup:
        """Return the group with the answers at `indices` only; `aligned` stays with the first."""
        if len(indices) == len(self.samples):
            return self
        terms = self.token_advantages
        return dataclasses.replace(
            self,
            aligned=self.aligned if 0 in indices else None,
            samples=[self.samples[i] for i in indices],
            advantages=[self.advantages[i] for i in indices],
            token_advantages=None if terms is None else [terms[i] for i in indices],
        )

    def with_logprobs(self, logprobs: Sequence[np.ndarray]) -> TrainGroup:
        """Return the group with other logprobs of its samples, float32 [S] each."""
        pairs = zip(self.samples, logprobs, strict=True)
        samples = [dataclasses.replace(sample, logprobs=rows) for sample, rows in pairs]
        return dataclasses.replace(self, samples=samples)


class GroupPart(NamedTuple):
    """Answers of a group that go into one row."""

    group: TrainGroup  # with these answers only
    answers: Sequence[int]  # their numbers, counted over all groups before they were split


@flax.struct.dataclass
class MicroBatch:
    """B packed rows of T tokens, with A slots for answer tokens in each row.

    Attributes:
      tokens: token ids, int32 [B, T]; 0 where padded.
      positions: rotary positions, int32 [B, T].
      index: row index of the token, its column before context_layout.py moves tokens, int32
        [B, T].
      last_query: mask (attention/masks.py), the row index of the last query that reads the token,
        int32 [B, T]; -1 where padded.
      source: place on axis T of the hidden state that predicts the answer token, int32 [B, A].
      target: id of the answer token, int32 [B, A].
      advantage: advantage of the answer at the token, float32 [B, A].
      weight: weight of the token in the loss, float32 [B, A]; 0 where padded.
      old_logprob: logprob under an earlier policy (LossConfig.old_logprobs), float32 [B, A]; 0
        where the sample has none.
      cutoff: cut-off of the sampler's filters (Sample.cutoffs), float32 [B, A]; -inf where the
        sample has none.
      group_name: index of the group's name in the learner's N group names, or N for any other
        name, int32 [B, A].
      answer: number of the answer in its row, int32 [B, A]; -1 where padded.
      group: number of the group in its row, int32 [B, A]; -1 where padded.
      answer_id: number of the answer over all groups (GroupPart), int32 [B, A]; -1 where padded,
        and in an aligned group.
      experts: recorded experts of the tokens [B, T, L, k], no expert where the sample has none
        (moe.no_experts); None unless loss.routing = "sampled".
    """

    tokens: Array
    positions: Array
    index: Array
    last_query: Array
    source: Array
    target: Array
    advantage: Array
    weight: Array
    old_logprob: Array
    cutoff: Array
    group_name: Array
    answer: Array
    group: Array
    answer_id: Array
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
        counts[group.name] += len(group.samples)
    return dict(counts)


def fit_rows(
    groups: Sequence[TrainGroup], layout: PackingConfig, devices: int = 1, is_paired: bool = False
) -> tuple[list[GroupPart], list[int]]:
    """Divide groups into parts that each fit a row, which may be split over `devices`.

    With `is_paired`, the loss compares the answers of a group, so no group is divided. Returns
    (parts, numbers of the answers that fit no row).
    """
    if layout.shared_prefix == "none":
        groups = separate_answers(groups)
    split = whole_groups if is_paired else split_groups
    return split(groups, layout.largest(devices))


def whole_groups(
    groups: Sequence[TrainGroup], largest: Bucket
) -> tuple[list[GroupPart], list[int]]:
    """Return the groups that fit a row without a split, and the numbers of all other answers.

    A loss that compares the answers of a group needs every answer in one row.
    """
    parts, refused = [], []
    for group, numbers in zip(groups, _number_answers(groups), strict=True):
        if group.tokens <= largest.length and group.answer_tokens <= largest.answers:
            parts.append(GroupPart(group, numbers))
        else:
            refused += numbers
    return parts, refused


def split_groups(
    groups: Sequence[TrainGroup], largest: Bucket
) -> tuple[list[GroupPart], list[int]]:
    """Split groups by answers so that each part fits a row.

    Returns (parts, numbers of the answers that fit no row with their prompt).
    """
    parts, refused = [], []
    for group, numbers in zip(groups, _number_answers(groups), strict=True):
        room = min(largest.answers, largest.length - len(group.prompt))
        selections: list[list[int]] = []  # indices of the answers of each part
        free = 0  # answer tokens that the last part can still take
        for index, sample in enumerate(group.samples):
            size = len(sample.tokens)
            if size > room:
                refused.append(numbers[index])
                continue
            if size > free:
                selections.append([])
                free = room
            selections[-1].append(index)
            free -= size
        parts += [
            GroupPart(group.select(indices), [numbers[i] for i in indices])
            for indices in selections
        ]
    return parts, refused


def _number_answers(groups: Sequence[TrainGroup]) -> list[range]:
    """Return the numbers of the answers of each group, counted over all groups."""
    # Numbers survive splitting and packing, so that logprobs find their samples again.
    counts = [len(group.samples) for group in groups]
    ends = itertools.accumulate(counts)
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def separate_answers(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Make one group per answer, prompts repeated: the same gradient without shared prefixes."""
    return [group.select([i]) for group in groups for i in range(len(group.samples))]


def in_parts(groups: Sequence[TrainGroup], count: int) -> list[list[TrainGroup]]:
    """Split groups into `count` parts, one per optimizer step; no part is empty.

    Part i gets every count-th group from i on, so each part has the names of the whole in the same
    order, and sizes differ by at most one. Fewer groups than `count` make fewer parts.
    """
    if count < 1:
        raise ValueError(f"count = {count}: must be at least 1")
    return [list(groups[first::count]) for first in range(min(count, len(groups)))]


def pack(
    parts: Sequence[GroupPart],
    weights: Sequence[Sequence[float]],
    buckets: Sequence[Bucket] | str,
    token_budget: int,
    row_multiple: int = 1,
    devices: int = 1,
    with_trees: bool = True,
    no_experts: np.ndarray | None = None,
    group_names: Sequence[str] = (),
) -> list[MicroBatch]:
    """Pack parts that fit the largest row (split_groups) into micro-batches of numpy arrays.

    `weights` are loss weights of the answers of each group before it was split (aggregation.weigh).
    Buckets ascend in length, or are AUTO. The rows of a micro-batch are a multiple of
    `row_multiple` (devices along the row axis). Tokens of a row are laid out over `devices` devices
    (of the context axis). The same order of parts gives the same result. Without `with_trees`,
    groups share nothing. `no_experts` (moe.no_experts) asks for the recorded experts; tokens that
    prompts of a tree share have the experts of the first prompt. `group_names` are the names that
    MicroBatch.group_name numbers.
    """
    groups, by_number = [part.group for part in parts], [*itertools.chain.from_iterable(weights)]
    laid_out = lay_out(groups, buckets, token_budget, row_multiple, devices, with_trees)
    batches = []
    for bucket, count, rows in laid_out:
        batch = empty_micro_batch(bucket, count, no_experts)
        batches.append(_stack(parts, by_number, rows, batch, devices, group_names))
    return batches


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
    if with_trees:  # a group with an aligned group has two prompts: it stays alone
        prompts = [None if group.aligned else np.asarray(group.prompt) for group in groups]
        longest = shapes.longest_row(token_budget, devices)
        room = TokenCounts(longest, longest) if isinstance(buckets, str) else buckets[-1].size
        forest = trees.grow(prompts, sizes, room)
    if isinstance(buckets, str):
        return shapes.choose(forest, token_budget, row_multiple, devices)
    return shapes.in_buckets(forest, buckets, token_budget, row_multiple)


def _stack(
    parts: Sequence[GroupPart],
    weights: Sequence[float],
    rows: Sequence[Sequence[GroupTree]],
    batch: MicroBatch,
    devices: int,
    group_names: Sequence[str],
) -> MicroBatch:
    """Write rows of trees into a micro-batch of padding, and return it."""
    for row, members in enumerate(rows):
        writer = _RowWriter(batch, row, group_names)
        for tree in members:
            writer.write(parts, weights, tree)
        if devices > 1:
            order = context_layout.order(writer.is_answer, writer.end, devices)
            by_token = batch.tokens, batch.positions, batch.index, batch.last_query, batch.experts
            for array in by_token:
                if array is not None:
                    array[row] = array[row, order]
            # `source` is a slot of the row, so it follows the tokens: argsort inverts the order.
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
        group_name=np.zeros(short, np.int32),
        answer=np.full(short, -1, np.int32),
        group=np.full(short, -1, np.int32),
        answer_id=np.full(short, -1, np.int32),
        experts=experts,
    )


class _RowWriter:
    """Writer of one row of a micro-batch, from its first column and its first answer slot on."""

    def __init__(self, batch: MicroBatch, row: int, group_names: Sequence[str]):
        self._row = jax.tree.map(lambda array: array[row], batch)  # views
        self._index_of = {name: index for index, name in enumerate(group_names)}
        self.is_answer = np.zeros(len(self._row.tokens), bool)
        self.end = 0  # columns written
        self._filled = self._answers = self._groups = 0

    def write(self, parts: Sequence[GroupPart], weights: Sequence[float], tree: GroupTree) -> None:
        """Write a tree of parts; `weights` are loss weights by number of the answer."""
        path = np.zeros(0, np.int64)  # columns of the tokens of the last prompt
        for index, shared in zip(tree.members, tree.shared, strict=True):
            group, numbers = parts[index]
            path = self._write_prompt(path[:shared], group)
            self._write_answers(group, path, [weights[n] for n in numbers], numbers)
            if group.aligned is not None:
                path = self._write_prompt(path[:0], group.aligned)
                self._write_answers(group.aligned, path, [0.0], [-1])
            self._groups += 1

    def _write_prompt(self, path: np.ndarray, group: TrainGroup) -> np.ndarray:
        """Write the prompt after the tokens at columns `path`; return all of its columns."""
        new = slice(self.end, self.end + len(group.prompt) - len(path))
        self._row.tokens[new] = group.prompt[len(path) :]
        self._row.positions[new] = np.arange(len(path), len(group.prompt))
        prompt_experts = group.samples[0].prompt_experts
        if self._row.experts is not None and prompt_experts is not None:
            self._row.experts[new] = prompt_experts[len(path) :]
        self.end = new.stop
        return np.concatenate([path, np.arange(new.start, new.stop)])

    def _write_answers(
        self,
        group: TrainGroup,
        path: np.ndarray,
        weights: Sequence[float],
        numbers: Sequence[int],
    ) -> None:
        """Write answers with these weights and numbers to the prompt at columns `path`."""
        row, name = self._row, self._index_of.get(group.name, len(self._index_of))
        for i, sample in enumerate(group.samples):
            columns = slice(self.end, self.end + len(sample.tokens))
            slots = slice(self._filled, self._filled + len(sample.tokens))
            row.tokens[columns] = sample.tokens
            row.positions[columns] = len(group.prompt) + np.arange(len(sample.tokens))
            row.last_query[columns] = columns.stop - 1
            self.is_answer[columns] = True
            row.source[slots] = np.arange(columns.start - 1, columns.stop - 1)
            # The column before an answer's first token may belong to another answer.
            row.source[slots.start] = path[-1]
            row.target[slots] = sample.tokens
            row.advantage[slots] = group.advantages[i]
            if group.token_advantages is not None:
                row.advantage[slots] += group.token_advantages[i]
            row.weight[slots] = weights[i]
            row.group_name[slots] = name
            row.answer[slots] = self._answers
            row.group[slots] = self._groups
            row.answer_id[slots] = numbers[i]
            if sample.logprobs is not None:
                row.old_logprob[slots] = sample.logprobs
            if sample.cutoffs is not None:
                row.cutoff[slots] = sample.cutoffs
            if row.experts is not None and sample.experts is not None:
                row.experts[columns] = sample.experts
            self.end, self._filled = columns.stop, slots.stop
            self._answers += 1
        row.last_query[path] = self.end - 1
