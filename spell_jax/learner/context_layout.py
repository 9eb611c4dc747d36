"""How the tokens of a packed row are dealt out over the devices of the `context` axis.

1. Of n devices, number i gets chunks i and 2n-1-i of the row's prompt tokens, cut into 2n chunks
   (zig-zag): late tokens read more than early ones, so each device has some of both.
2. The answers' tokens, each of which reads a whole prompt, are dealt out in equal shares, cut
   anywhere; padding fills up.
3. Every slot carries the row index that its token had (masks.py), so the mask does not change.
"""

from __future__ import annotations

import numpy as np


def order(is_answer: np.ndarray, used: int, devices: int) -> np.ndarray:
    """Which token stands at each slot of a row, the devices' equal shares one after the other.

    Args:
      is_answer: bool [T], T a multiple of `devices`.
      used: tokens of the row that are no padding; the rest is.
      devices: n.

    Returns:
      int [T], a permutation.
    """
    share = len(is_answer) // devices
    prompt = np.flatnonzero(~is_answer[:used])
    answers, padding = np.flatnonzero(is_answer[:used]), np.arange(used, len(is_answer))
    chunks = np.array_split(prompt, 2 * devices)
    dealt = [[*chunks[i], *chunks[2 * devices - 1 - i]] for i in range(devices)]
    for i, mine in enumerate(dealt):
        fair = -(-len(answers) // (devices - i))
        count = min(share - len(mine), fair)
        mine += [*answers[:count]]
        answers = answers[count:]
    rest = [*answers, *padding]
    for mine in dealt:
        room = share - len(mine)
        mine += rest[:room]
        rest = rest[room:]
    return np.concatenate(dealt).astype(np.int32)
