"""Tests of the mask of packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import masks

pytestmark = pytest.mark.slow


def _visible(last_query: jax.Array) -> jax.Array:
    index = masks.row_index(last_query)
    return masks.visible(index, index, last_query)


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
