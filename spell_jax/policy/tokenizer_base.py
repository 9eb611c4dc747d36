"""What every tokenizer is, and how ids that come one by one become text.

1. A text is data: `encode` makes no special token and no other added token, whatever it says.
2. Turns are made by `chat` alone, from the markers of the layout and the contents' encodings.
3. `decode` is total: special tokens and ids without a token are left out.
"""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Sequence

from spell_jax.policy import chat as chats


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Attributes:
      vocab_size: the highest id + 1.
      eos_id: the token that ends a turn.
      pad_id: the token that fills rows up.
      stop_ids: tokens that end an answer, eos_id first, each once.
    """

    vocab_size: int
    eos_id: int
    pad_id: int
    stop_ids: tuple[int, ...]

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text; none of them is a special or other added token.

        Raises:
          ValueError: the text has lone surrogates.
        """

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; ids that have no token are left out."""

    @abc.abstractmethod
    def chat(self, messages: chats.Messages) -> list[int]:
        """Ids of a chat, ready for the assistant's answer.

        Args:
          messages: one turn of the user, or a list of {"role", "content"}.

        Raises:
          ValueError: the layout does not take these messages.
        """

    @abc.abstractmethod
    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the tokenizer's files into a folder that exists."""

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode(text))

    def stream(self) -> Stream:
        """A decoder of ids that come one by one."""
        return Stream(self)

    def shows(self, token_id: int) -> bool:
        """False: decode leaves this id out before it looks at anything else."""
        return 0 <= token_id < self.vocab_size

    def waits(self, token_id: int) -> bool:
        """True: what this id and those before it say may depend on all of the ids behind it."""
        return False


class Stream:
    """Decodes ids one by one, and gives out only what later ids cannot change.

    What comes out, with finish() at the end, is together what decode says of all the ids.

    Decoded is a window of the last ids, never all: the cost is linear. The window's older part is
    there for decoders that treat the beginning of a text differently.
    """

    _LONGEST, _KEPT = 16, 8  # ids in a window, before and after it is cut
    _OPEN = 3  # bytes of a character that a later id may complete; each may decode to U+FFFD

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        """The text that has become certain with this id."""
        token_id = int(token_id)
        if not self._tokenizer.shows(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.waits(token_id):
            return ""
        text = self._tokenizer.decode(self._window)
        open_end = min(len(text) - len(text.rstrip("\ufffd")), self._OPEN)
        certain = max(len(text) - open_end, self._given)
        new, self._given = text[self._given : certain], certain
        if len(self._window) > self._LONGEST:
            self._cut(len(text) - certain)
        return new

    def finish(self) -> str:
        """What is left; the stream starts anew."""
        text = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return text

    def _cut(self, held: int) -> None:
        tail = self._window[-self._KEPT :]
        length = len(self._tokenizer.decode(tail))
        # If nothing of the tail is seen but what is held back, the start of the text is near.
        if length > held:
            self._window, self._given = tail, length - held
