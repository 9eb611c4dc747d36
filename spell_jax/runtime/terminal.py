"""Output to a terminal: control characters of names, texts and servers are shown, not obeyed.

A file's name, a model's text or a server's answer can hold sequences that a terminal obeys. Such a
sequence moves the cursor, changes the title or the clipboard, or turns the direction of writing: a
line then shows what was never written. `guard` puts an escaping stream in the place of standard
output and standard error: prints, log lines, warnings and tracebacks of a command all pass it.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

from absl import logging as absl_logging

# C0 without tab and line feed, DEL, C1, marks of direction, separators of lines, lone surrogates.
_CONTROL = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Write control characters as their Python escapes, such as \\x1b; tabs and line ends stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode-escape").decode(), text)


class Guarded:
    """A text stream that writes `printable` text to `raw`."""

    def __init__(self, raw: Any):
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(printable(text))
        # The caller's length: callers of a stream compare it with what they gave.
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def guard() -> None:
    """Guard standard output and standard error, and the log handlers that write to them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, Guarded):
            continue
        guarded: Any = Guarded(stream)
        setattr(sys, name, guarded)
        # A handler holds the stream itself, and would pass the guard.
        for handler in (*logging.getLogger().handlers, _absl_handler()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.setStream(guarded)


def raw(stream: Any) -> Any:
    """Return the stream below a guarded one, for a program's own control sequences."""
    return stream.raw if isinstance(stream, Guarded) else stream


def _absl_handler() -> logging.Handler:
    return absl_logging.get_absl_handler().python_handler
