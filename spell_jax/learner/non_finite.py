"""Diagnosis of non-finite updates: the rows and tensors that cause them.

Groups are bisected down to single answers; one bad row among n costs about two updates and 2 log n
micro-batches. Weights are tested in the compute dtype, as the policy reads them: a float32 weight
may be finite where its bfloat16 copy is not.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from spell_jax.learner import packing
from spell_jax.runtime.files.jsonl import write_records

FOLDER = "non_finite"
MOST_ROWS = 16  # with damaged weights every row is bad; a few are enough
WeighedGroup = tuple[packing.TrainGroup, Sequence[float]]  # with its answers' loss weights


class NonFinite(RuntimeError):
    """Too many updates in a row had a non-finite loss or gradient and were skipped.

    `rows` are groups with their loss weights. If `alone`, they are the cause: at most MOST_ROWS
    groups (or single answers) of the last update that are not finite by themselves. Otherwise they
    are all groups of that update, which was finite when run again. `tensors` are paths of weights
    that are not finite in the compute dtype.
    """

    def __init__(
        self, skipped: int, rows: Sequence[WeighedGroup], tensors: Sequence[str], alone: bool
    ):
        self.skipped, self.rows, self.tensors, self.alone = skipped, rows, tensors, alone
        cause = (
            f"the last by {len(rows)} of its rows"
            if alone
            else "the last was finite when it was run again, which speaks for a broken device"
        )
        damaged = f"; weights that are not finite: {', '.join(tensors)}" if tensors else ""
        super().__init__(
            f"{skipped} updates in a row (optimizer.max_skipped) had a loss or gradient that is "
            f"not finite and were skipped, {cause}{damaged}"
        )


def find_rows(
    rows: Sequence[WeighedGroup], is_finite: Callable[[Sequence[WeighedGroup]], bool]
) -> list[WeighedGroup]:
    """Find the smallest non-finite sets of groups or single answers, at most MOST_ROWS groups."""
    # The search is lazy: islice ends it, and with it the updates that it runs.
    return list(itertools.islice(_search(rows, is_finite), MOST_ROWS))


def _search(rows: Sequence[WeighedGroup], is_finite) -> Iterator[WeighedGroup]:
    if is_finite(rows):
        return
    # Both halves are searched: several rows may be bad, and each is reported.
    half = len(rows) // 2
    parts = [rows[:half], rows[half:]]
    if len(rows) == 1:
        answers = _separate(rows[0])
        parts = [[answer] for answer in answers] if len(answers) > 1 else []
    is_in_part = False
    for part in parts:
        for row in _search(part, is_finite):
            is_in_part = True
            yield row
    if not is_in_part:  # each part is finite, only their sum is not
        yield from rows


def _separate(row: WeighedGroup) -> list[WeighedGroup]:
    """Make one row per answer."""
    group, weights = row
    singles = packing.separate_answers([group])
    return [(single, [weight]) for single, weight in zip(singles, weights, strict=True)]


def find_tensors(tree: Any, replicated: jax.sharding.Sharding) -> list[str]:
    """Return the paths of a tree's arrays that hold a non-finite number."""

    # Under jit with a replicated result: shards of other hosts cannot be read from here.
    @jax.jit
    def test(leaf):
        return jax.lax.with_sharding_constraint(jnp.isfinite(leaf).all(), replicated)

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if not test(leaf)
    ]


@contextlib.contextmanager
def rows_written(
    workdir: epath.Path, step: int, decode: Callable[[Sequence[int]], str]
) -> Iterator[None]:
    """Let process 0 write the rows (`write_rows`) if the block raises NonFinite."""
    try:
        yield
    except NonFinite as error:
        if jax.process_index() == 0:
            write_rows(error, workdir, step, decode)
        raise


def write_rows(
    error: NonFinite,
    workdir: epath.Path,
    step: int,
    decode: Callable[[Sequence[int]], str],
) -> epath.Path:
    """Write WORKDIR/non_finite/STEP.jsonl, one answer per line, and add a note to the error.

    A line has "role", "prompt" and "answer" (texts), "prompt_tokens" and "answer_tokens" (ids),
    "advantage", "weight" (of each token in the loss) and "old_logprobs" (or null). Numbers that
    JSON cannot represent are written as "nan", "inf" and "-inf".
    """
    path = workdir / FOLDER / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    # One line per answer, although a cause may be a whole group with answers that are finite alone.
    singles = [answer for row in error.rows for answer in _separate(row)]
    write_records(path, (_record(row, decode) for row in singles))
    error.add_note(f"{len(singles)} rows: {path}")
    return path


def _record(row: WeighedGroup, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    group, (weight,) = row
    (sample,) = group.samples
    prompt, answer = ([int(token) for token in ids] for ids in (group.prompt, sample.tokens))
    return {
        "role": group.name,
        "prompt": decode(prompt),
        "answer": decode(answer),
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "advantage": _number(group.advantages[0]),
        "weight": _number(weight),
        "old_logprobs": None if sample.logprobs is None else [*map(_number, sample.logprobs)],
    }


def _number(value: Any) -> float | str:
    # JSON has no NaN or infinity. As null, the three could not be told apart.
    value = float(value)
    return value if math.isfinite(value) else str(value)
