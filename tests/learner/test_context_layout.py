"""Tests of the layout of tokens over devices: prompts in zig-zag, answers in equal shares."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.learner import context_layout


def _row(prompt: int, answers: int, padding: int) -> tuple[np.ndarray, int]:
    is_answer = np.zeros(prompt + answers + padding, bool)
    is_answer[prompt : prompt + answers] = True
    return is_answer, prompt + answers


def test_order_of_a_row_by_hand() -> None:
    is_answer, used = _row(8, 6, 2)
    assert context_layout.order(is_answer, used, 2).reshape(2, 8).tolist() == [
        [0, 1, 6, 7, 8, 9, 10, 14],
        [2, 3, 4, 5, 11, 12, 13, 15],
    ]


def test_one_device_keeps_the_token_order() -> None:
    is_answer, used = _row(5, 4, 3)
    assert context_layout.order(is_answer, used, 1).tolist() == list(range(12))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20), st.integers(1, 8), st.booleans())
def test_every_token_is_placed_once_in_balanced_shares(
    prompt, answers, padding, devices, mixed
) -> None:
    padding += -(prompt + answers + padding) % devices
    is_answer, used = _row(prompt, answers, padding)
    if mixed:  # several groups
        is_answer[:used] = np.random.default_rng(0).permutation(is_answer[:used])
    if not len(is_answer):
        return
    order = context_layout.order(is_answer, used, devices)
    assert sorted(order) == list(range(len(is_answer)))
    shares = order.reshape(devices, -1)
    prompts = [int((~is_answer[mine] & (mine < used)).sum()) for mine in shares]
    assert max(prompts) - min(prompts) <= 2
    counts = [int(is_answer[mine].sum()) for mine in shares]
    assert max(counts) - min(counts) <= 4
    # The work of prompt tokens is shared out evenly too, up to a chunk.
    work = [int(mine[~is_answer[mine] & (mine < used)].sum()) for mine in shares]
    assert max(work) - min(work) <= 3 * len(is_answer)
