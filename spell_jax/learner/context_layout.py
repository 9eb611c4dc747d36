"""Layout of a packed row's tokens over the devices of the `context` axis.

1. The prompt tokens of a row are cut into 2n chunks for n devices. Device i gets chunks i and
   2n-1-i (zig-zag): late tokens attend to more keys, so each device has some of both.
2. Answer tokens all attend to a whole prompt. They are split into equal shares with padding.

Every token carries its original row index (attention/masks.py), so the mask does not change.
"""

from __future__ import annotations

import numpy as np


def order(is_answer: np.ndarray, used: int, devices: int) -> np.ndarray:
    """Return the token at each place of a row, int32 [T]: equal shares in device order.

    `is_answer` is bool [T]; T is a multiple of `devices` (n). Tokens after `used` are padding.
    """
    # Shares are equal because shard_map splits an axis evenly. Equal work comes from the choice of
    # the tokens in a share.
    share = len(is_answer) // devices
    prompt = np.flatnonzero(~is_answer[:used])
    answers, padding = np.flatnonzero(is_answer[:used]), np.arange(used, len(is_answer))
    chunks = np.array_split(prompt, 2 * devices)
    dealt = [[*chunks[i], *chunks[2 * devices - 1 - i]] for i in range(devices)]
    # Every answer token reads the whole prompt, so any answer token costs about the same: a share
    # may be cut anywhere, also inside an answer.
    for i, device_tokens in enumerate(dealt):
        # Rounded up over the devices that are left, so that no answer token is left over.
        fair = -(-len(answers) // (devices - i))
        count = min(share - len(device_tokens), fair)
        device_tokens += [*answers[:count]]
        answers = answers[count:]
    # No token reads padding, so padding fills whatever places are free.
    remaining_tokens = [*answers, *padding]
    for device_tokens in dealt:
        room = share - len(device_tokens)
        device_tokens += remaining_tokens[:room]
        remaining_tokens = remaining_tokens[room:]
    return np.concatenate(dealt).astype(np.int32)
