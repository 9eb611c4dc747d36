"""Rows of supervised tuning from a file or a generated world, and rows as training groups."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.learner.packing import TrainGroup
from spell_jax.policy import chat as chats
from spell_jax.policy.chat import THOUGHT_BEGIN, THOUGHT_END
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.question_sets import tiny_world_rows
from spell_jax.question_sets.rows import Row
from spell_jax.runtime import hooks
from spell_jax.runtime.files import remote
from spell_jax.runtime.files.jsonl import require_records
from spell_jax.selfplay import prompts

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ChatRow(Row):
    """A demonstration in a chat; `prompt` is the user's last message.

    Attributes:
      earlier: messages before the prompt, as in tokenizer.chat.
    """

    earlier: tuple[Mapping[str, str], ...] = ()


class MakeRows(Protocol):
    """A function that makes rows without a file; config.source may name the user's own."""

    def __call__(self, prompts: prompts.Prompts, /, *, seed: int, start: int) -> Iterator[Row]:
        """Yield endless rows from number `start` on; row i depends on (seed, i) alone.

        `prompts` and `seed` are the config's. A resumed run starts after the rows of its steps.
        """
        ...


# Keys of a line; the first layout counts whose keys the line has.
LAYOUTS = (("prompt", "completion"), ("prompt", "solution"), ("messages",), ("text",))
# Rows that config.source names with one word.
GENERATED: Mapping[str, MakeRows] = {
    "tiny": tiny_world_rows.world_demonstrations,
    "tiny_stories": tiny_world_rows.story_demonstrations,
}


def read_rows(path: str | pathlib.Path) -> tuple[list[Row], int]:
    """Read rows of a JSONL file; each line has the keys of one of LAYOUTS.

    1. "prompt" and "completion" (or "solution") are texts, or lists of messages: {"role",
       "content"}, and of the assistant also "reasoning_content".
    2. "messages" are a chat, which ends with a message of the assistant.
    3. "text" becomes the completion of an empty prompt.
    Each message of the assistant, but for those of a prompt, becomes a row of its own. Its prompt
    has all messages before it, as when a policy is sampled. A line may also have a "role" (the name
    of its rows in metrics) and a "task", but no "tools", which no prompt would show.

    Returns (rows, number of skipped lines, each logged with file and line). FileNotFoundError
    without the file, ValueError if no line of it has rows.
    """
    # Bad lines are skipped and logged; require_records raises only if no line is a row.
    file = remote.fetch(path)
    if not file.is_file():
        names = ", ".join(map(repr, GENERATED))
        raise FileNotFoundError(
            f"source = {str(path)!r}: no such file; must be {names}, {hooks.FORM} or a .jsonl of "
            "rows"
        )
    parsed, skipped = require_records(file, parse_line, f"source = {path}", "a row")
    rows = [row for line_rows in parsed for row in line_rows]
    if skipped:
        log.warning("%s: %d rows, %d lines skipped", path, len(rows), skipped)
    return rows, skipped


def parse_line(record: Any) -> list[Row]:
    """Make the rows of a line (see `read_rows`); ValueError or TypeError for a malformed line."""
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, is {type(record).__name__}")
    keys = next((keys for keys in LAYOUTS if set(keys) <= record.keys()), ())
    # A "text" beside half of another layout would be learned without its prompt.
    if not keys or (keys == ("text",) and {"prompt", "completion", "solution"} & record.keys()):
        layouts = ", or ".join(" and ".join(layout) for layout in LAYOUTS)
        raise ValueError(f"must have {layouts}; has {', '.join(record) or 'no keys'}")
    if record.get("tools"):
        raise ValueError(
            "tools: no prompt shows them; remove them, or render them into a system message"
        )
    task = str(record.get("task", ""))
    if keys == ("text",):
        return [Row("", _read_text("text", record["text"]), str(record.get("role", "text")), task)]
    begin = [] if keys == ("messages",) else _read_turns("prompt", record["prompt"], "user")
    turns = begin + _read_turns(keys[-1], record[keys[-1]], "assistant")
    role, rows = str(record.get("role", "row")), []
    for i in range(len(begin), len(turns)):
        if turns[i]["role"] != "assistant":
            continue
        if i == 0 or turns[i - 1]["role"] != "user":
            raise ValueError(f"{keys[-1]}: each message of the assistant must follow the user's")
        fields = turns[i - 1]["content"], _as_completion(turns[i]), role, task
        earlier = tuple(turns[: i - 1])
        rows.append(ChatRow(*fields, earlier) if earlier else Row(*fields))
    if turns[-1]["role"] != "assistant":
        raise ValueError(f"{keys[-1]}: must end with a message of the assistant")
    return rows


def _read_text(key: str, text: Any) -> str:
    # An empty text is a mistake in the file.
    if not isinstance(text, str) or not text:
        raise ValueError(f"{key} = {text!r:.50}: must be a text")
    text.encode()  # raises for lone surrogates, which no tokenizer encodes
    return text


def _read_turns(key: str, value: Any, role: str) -> list[dict[str, str]]:
    """Read the messages of a key; a text becomes one message of `role`, except for "messages"."""
    if isinstance(value, str) and key != "messages":
        return [{"role": role, "content": _read_text(key, value)}]
    if not isinstance(value, list):
        kinds = "a list of messages" if key == "messages" else "a text or a list of messages"
        raise ValueError(f"{key} = {value!r:.50}: must be {kinds}")
    turns = chats.read_messages(value)
    for turn in turns:
        for name, text in turn.items():
            _read_text(name, text)
    return turns


def _as_completion(turn: dict[str, str]) -> str:
    """Return the text that the policy shall write, its reasoning between the marks of a thought."""
    if "reasoning_content" not in turn:
        return turn["content"]
    thought = f"{THOUGHT_BEGIN}\n{turn['reasoning_content'].strip()}\n{THOUGHT_END}"
    return f"{thought}\n\n{turn['content']}"


@dataclasses.dataclass(frozen=True)
class RowStream:
    """Endless rows of supervised tuning, the same whether or not a run was resumed.

    Attributes:
      start: function that yields the rows from a number on.
      file_rows: rows of the file, each of which comes once in an epoch; none for generated rows.
      skipped: number of the file's lines that are no rows.
    """

    start: Callable[[int], Iterator[Row]]
    file_rows: Sequence[Row] = ()
    skipped: int = 0


def open_rows(source: str, prompt_set: str, seed: int) -> RowStream:
    """Open the rows of a config; the file or the prompt templates are read at once.

    Errors name the field.
    """
    if source in GENERATED or hooks.is_hook(source):
        make_rows = GENERATED.get(source) or hooks.load("source", source)
        templates = prompts.load(prompt_set)
        return RowStream(lambda start: make_rows(templates, seed=seed, start=start))
    rows, skipped = read_rows(source)
    return RowStream(functools.partial(_shuffled, rows, seed), rows, skipped)


def check_chats(rows: Sequence[Row], tokenizer: Tokenizer) -> None:
    """Raise ValueError if the chat layout refuses rows; one row of each order of roles is tried."""
    tried: set[tuple[str, ...]] = set()
    for row in rows:
        roles = tuple(turn["role"] for turn in row.earlier) if isinstance(row, ChatRow) else ()
        if row.prompt and roles not in tried:
            tried.add(roles)
            try:
                tokenizer.chat(_messages(row))
            except ValueError as error:
                order = ", ".join((*roles, "user"))
                raise ValueError(f"source: a prompt with messages of {order}: {error}") from error


def _messages(row: Row) -> chats.Messages:
    if not isinstance(row, ChatRow):
        return row.prompt
    return [*row.earlier, {"role": "user", "content": row.prompt}]


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
    completion, messages = row.completion, _messages(row)
    if thought := tokenizer.open_thought(messages):
        completion = continue_thought(thought, completion)
    answer = [*tokenizer.encode_answer(completion), tokenizer.turn_end_id]
    sample = Sample(np.array(answer, np.int32))
    return TrainGroup(tokenizer.chat(messages), [sample], [1.0], row.role)


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
