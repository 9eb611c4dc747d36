"""Rows of supervised tuning from a file or a generated world, and rows as training groups."""

from __future__ import annotations

import itertools
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.learner.packing import TrainGroup
from spell_jax.policy.chat import THOUGHT_BEGIN, THOUGHT_END
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.question_sets import tiny_world_rows
from spell_jax.question_sets.rows import Row
from spell_jax.runtime import hooks
from spell_jax.runtime.files import remote
from spell_jax.runtime.files.jsonl import require_records
from spell_jax.selfplay import prompts

log = logging.getLogger(__name__)


class MakeRows(Protocol):
    """A function that makes rows without a file; config.source may name the user's own."""

    def __call__(self, prompts: prompts.Prompts, /, *, seed: int, start: int) -> Iterator[Row]:
        """Yield endless rows from number `start` on; row i depends on (seed, i) alone.

        `prompts` and `seed` are the config's. A resumed run starts after the rows of its steps.
        """
        ...


# Rows that config.source names with one word.
GENERATED: Mapping[str, MakeRows] = {
    "tiny": tiny_world_rows.world_demonstrations,
    "tiny_stories": tiny_world_rows.story_demonstrations,
}


def read_rows(path: str | pathlib.Path) -> tuple[list[Row], int]:
    """Read rows of a JSONL file: "prompt", "completion" and, optionally, "role" and "task".

    A row may also have only a "text". The text becomes the completion of an empty prompt.
    Returns (rows, number of skipped lines, each logged with file and line). FileNotFoundError
    without the file, ValueError if no line of it is a row.
    """
    # Bad lines are skipped and logged; require_records raises only if no line is a row.
    file = remote.fetch(path)
    if not file.is_file():
        names = ", ".join(map(repr, GENERATED))
        raise FileNotFoundError(
            f"source = {str(path)!r}: must be {names}, {hooks.FORM} or a .jsonl of rows"
        )
    rows, skipped = require_records(file, _parse_row, f"source = {path}", "a row")
    if skipped:
        log.warning("%s: %d rows, %d lines skipped", path, len(rows), skipped)
    return rows, skipped


def _parse_row(record: Any) -> Row:
    is_text = "text" in record and not {"prompt", "completion"} & record.keys()
    completion = record["text" if is_text else "completion"]
    # An empty prompt or completion is a mistake in the file, except for rows of texts.
    for text in (completion,) if is_text else (record["prompt"], completion):
        if not isinstance(text, str) or not text:
            raise ValueError("prompt and completion, or text, must be texts")
        text.encode()  # raises for lone surrogates, which no tokenizer encodes
    role, task = record.get("role", "text" if is_text else "row"), record.get("task", "")
    return Row("" if is_text else record["prompt"], completion, str(role), str(task))


def row_stream(source: str, prompt_set: str, seed: int, start: int = 0) -> Iterator[Row]:
    """Iterate over rows from number `start` on, the same whether or not a run was resumed.

    The prompt templates or the file of rows are read at once; errors name the field.
    """
    if source in GENERATED or hooks.is_hook(source):
        make_rows = GENERATED.get(source) or hooks.load("source", source)
        return make_rows(prompts.load(prompt_set), seed=seed, start=start)
    return _shuffled(read_rows(source)[0], seed, start)


def _shuffled(rows: Sequence[Row], seed: int, start: int) -> Iterator[Row]:
    """Yield rows in another order in every epoch, from number `start` on."""
    # The order of an epoch is a function of seed and epoch: a resumed run jumps to any row.
    epoch, order = -1, np.arange(0)
    for index in itertools.count(start):
        if index // len(rows) != epoch:
            epoch = index // len(rows)
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        yield rows[order[index % len(rows)]]


def to_group(row: Row, tokenizer: Tokenizer) -> TrainGroup:
    """Turn a row into a training group of one answer with advantage 1.

    A text without a prompt gets no chat layout and no stop token: each token follows from earlier
    tokens. The first token is only context, unless the tokenizer begins texts with a token.
    """
    if not row.prompt:
        tokens = [*tokenizer.start_ids, *tokenizer.encode(row.completion)]
        if len(tokens) < 2:
            raise ValueError(f"source: text {row.completion!r}: must have at least 2 tokens")
        continuation = Sample(np.array(tokens[1:], np.int32), stopped=False)
        return TrainGroup(tokens[:1], [continuation], [1.0], row.role)
    completion = row.completion
    if thought := tokenizer.open_thought(row.prompt):
        completion = continue_thought(thought, completion)
    answer = [*tokenizer.encode_answer(completion), tokenizer.turn_end_id]
    sample = Sample(np.array(answer, np.int32))
    return TrainGroup(tokenizer.chat(row.prompt), [sample], [1.0], row.role)


def continue_thought(thought: str, completion: str) -> str:
    """Return what follows `thought`, the start of a thought that the prompt already holds.

    A completion that thinks loses its own start of the thought. Any other completion closes the
    thought before it answers: otherwise the policy would learn to answer inside the thought.
    """
    # The chat template of a reasoning model may end a prompt with the start of a thought.
    begun = completion.lstrip()
    if not begun.startswith(THOUGHT_BEGIN):
        return completion if THOUGHT_END in completion else f"{THOUGHT_END}\n\n{completion}"
    thinking = begun.removeprefix(THOUGHT_BEGIN)
    space = thought.removeprefix(THOUGHT_BEGIN)
    return thinking.removeprefix(space) if space else thinking
