"""Brackets in model text: boxed answers, the steps of a brace-balanced part, the depth of JSON.

Linear-time for any string.
"""

import numpy as np

BOX = r"\boxed{"
# Levels of JSON. Python's own limit depends on its version and on the stack: 994 levels on 3.11,
# 10,000 on 3.13.
DEEPEST = 100
_OPENING, _CLOSING = [ord("["), ord("{")], [ord("]"), ord("}")]


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}; None if there is no box or it is not closed."""
    _, box, braced = text.rpartition(BOX)
    if not box:
        return None
    # With the brace of the box itself, so that the first balance ends the box.
    braced = "{" + braced
    end = first_balance(brace_steps(code_points(braced)))
    return None if end is None else braced[1:end].strip().strip("*")


def code_points(text: str) -> np.ndarray:
    """Return the code points of a text, lone surrogates included: uint32 [characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def brace_steps(points: np.ndarray) -> np.ndarray:
    """Return the step of each code point: 1 for an opening, -1 for a closing brace, else 0."""
    # int8 for the whole text. first_balance sums in int64.
    return (points == ord("{")).astype(np.int8) - (points == ord("}"))


def first_balance(steps: np.ndarray) -> int | None:
    """Return the first index at which the cumulative sum of steps is 0; None if there is none."""
    # numpy, because a Python loop over a hundred thousand braces takes more than 10 ms.
    balanced = np.flatnonzero(np.cumsum(steps, dtype=np.int64) == 0)
    return int(balanced[0]) if len(balanced) else None


def check_depth(text: str) -> None:
    """Raise RecursionError if more than DEEPEST brackets outside of strings are open at once.

    `text` has no escaped quotes (json_records._without_escapes).
    """
    # An odd number of quotes before a character puts it inside a string.
    points = code_points(text)
    inside = np.logical_xor.accumulate(points == ord('"'))
    opened, closed = np.isin(points, _OPENING), np.isin(points, _CLOSING)
    steps = (opened.astype(np.int64) - closed) * ~inside
    if np.cumsum(steps).max(initial=0) > DEEPEST:
        raise RecursionError(f"JSON of more than {DEEPEST} levels")
