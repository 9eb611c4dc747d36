"""The JSON object that a model's text presents, in a fenced block or at its end.

Accepts any string and takes linear time.
"""

import contextlib
import json
import re
from collections import deque
from typing import Any

import numpy as np

from spell_jax.selfplay.braces import brace_steps, check_depth, code_points, first_balance

MOST_BLOCKS = 100  # only the last fenced blocks are tried: 100 KB may hold 10,000 invalid ones
# The shortest match, as in the paper's public code.
_FENCED = re.compile(r"```json(.*?)```", re.DOTALL)
# A fenced block up to the first backticks outside of strings.
_FENCED_STRINGS = re.compile(r'```json((?:[^"`]++|"(?:[^"\\]++|\\.)*+"|`(?!``))*+)```', re.DOTALL)
_ROOM = 4  # multiple of the text's length that may be searched for these backticks


def find_record(text: str) -> dict[str, Any] | None:
    """Return the JSON object that the text presents, or None.

    The last valid JSON among the last MOST_BLOCKS fenced blocks decides, even if it is not an
    object. Without a valid block, an object at the end of the text is used if it starts the text or
    follows white space. Raises RecursionError if the JSON is nested too deep.
    """
    # Backticks within a string of the JSON close and open no block.
    value, at = _last_block(text)
    closing = _closing_object(text)
    if at is None or at >= len(text) - len(closing):  # or the block is part of a string
        with contextlib.suppress(ValueError):
            value = _load_object(closing)
    if isinstance(value, RecursionError):
        raise value
    return value


def _last_block(text: str) -> tuple[dict[str, Any] | RecursionError | None, int | None]:
    """Return value and start of the last valid fenced block; (None, None) without a valid block.

    The value of a block that is nested too deep is the RecursionError.
    """
    value, place, end = None, None, 0
    room = _ROOM * len(text)  # the blocks around strings may overlap, and take quadratic time
    for short_block in deque(_FENCED.finditer(text), MOST_BLOCKS):
        if short_block.start() < end:  # in a string of the block before
            continue
        long_block = _FENCED_STRINGS.match(text, short_block.start()) if room > 0 else None
        room -= (long_block.end() if long_block else len(text)) - short_block.start()
        for block in (
            (long_block, short_block)
            if long_block and long_block.end() != short_block.end()
            else (short_block,)
        ):
            with contextlib.suppress(ValueError):
                try:
                    value = _load_object(block[1])
                except RecursionError as error:
                    value = error
                place, end = block.start(), block.end()
                break
    return value, place


def _load_object(text: str) -> dict[str, Any] | None:
    """Parse strict JSON with optional trailing commas; None if it is not an object."""
    # Before parsing, because Python's own limit of depth differs between versions.
    check_depth(_without_escapes(text))
    try:
        value = json.loads(text)
    except ValueError:
        # The output example of the paper's general template has a trailing comma (spec 2.3).
        value = json.loads(_without_trailing_commas(text))
    return value if isinstance(value, dict) else None


def _without_trailing_commas(text: str) -> str:
    """Remove commas before a closing bracket, except inside strings."""
    points = code_points(_without_escapes(text))
    inside = np.logical_xor.accumulate(points == ord('"'))
    marks = np.flatnonzero(~inside & (points > ord(" ")))
    current, following = points[marks[:-1]], points[marks[1:]]
    commas = (current == ord(",")) & ((following == ord("]")) | (following == ord("}")))
    # Deleted from the text itself, at the places found in the text with masked escapes.
    remaining = np.delete(code_points(text), marks[:-1][commas])
    return remaining.tobytes().decode("utf-32-le", "surrogatepass")


def _closing_object(text: str) -> str:
    """Return the brace-balanced suffix of a text that ends in a brace; otherwise an empty text."""
    if not text.endswith("}"):
        return ""
    # Scanned from the end, because the last brace is known to lie outside any string.
    points = code_points(_without_escapes(text)[::-1])
    inside = np.logical_xor.accumulate(points == ord('"'))
    end = first_balance(brace_steps(points) * ~inside)
    if end is None:
        return ""
    start = len(text) - 1 - end
    return text[start:] if start == 0 or text[start - 1].isspace() else ""


def _without_escapes(text: str) -> str:
    """Mask escapes without changing the length, so that every remaining quote delimits a string."""
    return text.replace("\\\\", "__").replace('\\"', "__")
