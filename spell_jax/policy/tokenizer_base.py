"""Tokenizer interface, and incremental decoding.

Text is data: `encode` never produces special or other added tokens. Only `chat` creates turns, from
the markers of the layout and the encoded contents. `render` and `encode_rendered` are for programs
that keep a chat as one text (lm-evaluation-harness); there the text of a token is that token.
"""

from __future__ import annotations

import abc
import itertools
import pathlib
import re
import types
from collections.abc import Collection, Mapping, Sequence

from spell_jax.policy import chat as chats


class Tokenizer(abc.ABC):
    """Conversion of text to ids and back.

    Attributes:
      vocab_size: highest id + 1.
      eos_id: token that ends a text.
      pad_id: token that fills a batch.
      stop_ids: tokens that end an answer, eos_id first, without duplicates.
      turn_end_id: token that the chat layout writes after an assistant's content, one of stop_ids;
        eos_id if the layout writes none. Supervised rows end with it.
      gaps: half-open ranges of ids below vocab_size without a token (PolicyConfig.unused_ids).
      start_ids: tokens before a text outside a chat; not part of `encode`.
      bos_id: token that begins a text, if there is one.
      thought_ids: mark of a thought -> id, for the marks that are added tokens.
      chat_template: source of the chat template; "" for a fixed layout, or none.
    """

    vocab_size: int
    eos_id: int
    pad_id: int
    stop_ids: tuple[int, ...]
    turn_end_id: int
    gaps: tuple[tuple[int, int], ...] = ()
    start_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    thought_ids: Mapping[str, int] = types.MappingProxyType({})
    chat_template: str = ""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Tokenize a text without added tokens; ValueError if it has lone surrogates."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Convert ids to text; special tokens and ids without a token are skipped."""

    @abc.abstractmethod
    def chat(self, messages: chats.Messages) -> list[int]:
        """Tokenize a chat up to the start of the assistant's answer.

        `messages` are one user message, or a list of {"role", "content"}. Raises ValueError if the
        layout does not support them.
        """

    def open_thought(self, messages: chats.Messages) -> str:
        """Return the start of a thought with which the layout begins the assistant's answer.

        The whole answer is the returned start and the decoded tokens. Returns "" if the layout
        opens no thought. Raises ValueError as `chat`.
        """
        # Some templates (Qwen3-Thinking-2507, R1-Distill) write "<think>" after the last message:
        # sampled tokens begin inside a thought, and their text lacks its start.
        return ""

    @abc.abstractmethod
    def render(self, messages: chats.Messages, open_turn: bool = True) -> str:
        """Write a chat as text, its tokens as their texts, up to the start of the answer.

        Contents are written as they are. Without `open_turn` the text ends with the last message's
        content, which the answer continues. Raises ValueError as `chat`.
        """

    @abc.abstractmethod
    def encode_rendered(self, text: str, start: bool) -> list[int]:
        """Tokenize a text in which a token's text stands for the token, as transformers does.

        `start` adds the tokens that frame a text outside a chat, `start_ids` among them.
        """

    @abc.abstractmethod
    def token_text(self, token_id: int) -> str:
        """Return the text that stands for a token in a rendered text."""

    @abc.abstractmethod
    def piece(self, token_id: int) -> str:
        """Return a token's name in the vocabulary."""

    @abc.abstractmethod
    def save(self, folder: str | pathlib.Path) -> None:
        """Write the tokenizer's files to an existing folder."""

    def unused_ids(self, rows: int) -> tuple[tuple[int, int], ...]:
        """Return half-open ranges of the ids without a token, below `rows` (V >= vocab_size)."""
        # Qwen2.5's tables have 152,064 rows for 151,665 tokens. Rows of padding were never trained,
        # and a sampled id of padding decodes to no text.
        return self.gaps + (((self.vocab_size, rows),) if rows > self.vocab_size else ())

    def encode_answer(self, text: str) -> list[int]:
        """Tokenize an assistant's answer; each mark of a thought becomes its added token."""
        if not self.thought_ids:
            return self.encode(text)
        marks = "|".join(map(re.escape, self.thought_ids))
        parts = [part for part in re.split(f"({marks})", text) if part]
        ids = ([i] if (i := self.thought_ids.get(p)) is not None else self.encode(p) for p in parts)
        return [i for part_ids in ids for i in part_ids]

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self.encode(text))

    def stream(self) -> Stream:
        """Make an incremental decoder."""
        return Stream(self)

    def shows(self, token_id: int) -> bool:
        """Return whether `decode` uses this id; `decode` first skips all other ids."""
        return 0 <= token_id < self.vocab_size

    def waits(self, token_id: int) -> bool:
        """Return whether the text up to and including this id may depend on later ids."""
        return False


def find_gaps(ids: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Return the numbers from 0 to max(ids) that `ids` lacks, as half-open ranges in order."""
    ordered = [-1, *sorted(ids)]
    pairs = itertools.pairwise(ordered)
    return tuple((low + 1, high) for low, high in pairs if high > low + 1)


class Stream:
    """Incremental decoder that emits only text that later ids cannot change.

    The texts of push() and finish() together are `decode` of all ids.
    """

    # Window size in ids, before and after a cut. Only a window of the last ids is decoded, so the
    # cost is linear. The older half serves decoders that treat the beginning of a text differently.
    _LONGEST, _AFTER_CUT = 16, 8
    _OPEN = 3  # bytes of an incomplete character, each of which may decode to U+FFFD

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0  # number of emitted characters of the window's text

    def push(self, token_id: int) -> str:
        """Add an id; return the new part of the text that no later id can change."""
        token_id = int(token_id)
        if not self._tokenizer.shows(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.waits(token_id):
            return ""
        text = self._tokenizer.decode(self._window)
        # A U+FFFD at the end may be a character that still lacks bytes.
        open_end = min(len(text) - len(text.rstrip("\ufffd")), self._OPEN)
        certain = max(len(text) - open_end, self._emitted)
        new, self._emitted = text[self._emitted : certain], certain
        if len(self._window) > self._LONGEST:
            self._cut(len(text) - certain)
        return new

    def finish(self) -> str:
        """Return the remaining text and reset the stream."""
        text = self._tokenizer.decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return text

    def _cut(self, held: int) -> None:
        tail = self._window[-self._AFTER_CUT :]
        length = len(self._tokenizer.decode(tail))
        # Keep the window if the tail decodes to nothing but the characters held back.
        if length > held:
            self._window, self._emitted = tail, length - held
