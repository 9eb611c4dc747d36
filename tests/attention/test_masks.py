"""Tests of the mask of packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import masks
from tests.attention import packed_rows

pytestmark = pytest.mark.slow


def _visible(last_query: jax.Array) -> jax.Array:
    index = masks.row_index(last_query)
    return masks.visible([index], [index, last_query])


def test_mask_of_the_example_in_the_module_docstring() -> None:
    last_query = jnp.array([[4, 4, 3, 3, 4, -1]], jnp.int32)
    expected_mask = [
        [1, 0, 0, 0, 0, 0],  # the prompt sees itself
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],  # the first answer sees prompt and itself
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],  # the second does not see the first
        [0, 0, 0, 0, 0, 0],  # padding sees nothing, and no token sees it
    ]
    np.testing.assert_array_equal(_visible(last_query)[0], np.array(expected_mask, bool))


def test_rows_are_masked_independently() -> None:
    mask = _visible(jnp.array([[1, 1], [0, 1]], jnp.int32))
    np.testing.assert_array_equal(mask, [[[1, 0], [1, 1]], [[1, 0], [0, 1]]])


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100, 2**30])
def test_window_counts_positions_and_not_row_indices(window: int) -> None:
    """Compare with the definition, pair by pair, in a tree whose tokens are in any order."""
    # Prompt of 5 tokens; answers of 3 and 4; padding; a second prompt of 3 with an answer of 2.
    paths = [range(5), [*range(5), 5, 6, 7], [*range(5), 8, 9, 10, 11], [13, 14, 15, 16, 17]]
    last_query = np.repeat([11, 7, 11, -1, 17], [5, 3, 4, 1, 5]).astype(np.int32)
    expected_mask = np.zeros((18, 18), bool)
    for path in paths:  # the tokens of a prompt and one answer: a query's window is at its end
        for place, query in enumerate(path):
            for key in list(path)[max(0, place + 1 - window) : place + 1]:
                expected_mask[query, key] = True
    position = packed_rows.positions(last_query)
    assert position.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 0, 0, 1, 2, 3, 4]
    order = np.random.default_rng(0).permutation(18)
    index, position = order.astype(np.int32), position[order]
    of_queries = jnp.stack([index, position])
    of_keys = jnp.stack([index, last_query[order], position + (window - 1)])
    mask = masks.visible(list(of_queries), list(of_keys))
    np.testing.assert_array_equal(mask, expected_mask[order][:, order])


@pytest.mark.parametrize(
    ("window", "expected_live", "expected_full"),
    [
        # A block of 256 queries sees its own keys and those of the two blocks before it. Only in
        # pairs of adjacent blocks is every key within 512 positions of every query.
        (512, 64 * 3 - 3, 64 - 1),
        (1, 64, 0),
        (2**30, 64 * 65 // 2, 64 * 63 // 2),
    ],
)
def test_window_leaves_few_live_block_pairs(
    window: int, expected_live: int, expected_full: int
) -> None:
    index = jnp.arange(16384).reshape(64, 256)
    of_keys = [index, jnp.full_like(index, 16383), index + (window - 1)]
    live, full = masks.live_and_full_blocks([index, index], of_keys)
    assert int(live.sum()) == expected_live and int(full.sum()) == expected_full
