"""The mask of packed rows, on the example of its module."""

import jax.numpy as jnp
import numpy as np

from spell_jax.attention.masks import visible


def test_example_of_the_module() -> None:
    last_reader = jnp.array([[4, 4, 3, 3, 4, -1]], jnp.int32)
    wanted = [
        [1, 0, 0, 0, 0, 0],  # the prompt sees itself
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],  # the first answer sees prompt and itself
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],  # the second does not see the first
        [0, 0, 0, 0, 0, 0],  # padding sees nothing, and nobody sees it
    ]
    np.testing.assert_array_equal(visible(last_reader)[0], np.array(wanted, bool))


def test_rows_are_masked_one_by_one() -> None:
    seen = visible(jnp.array([[1, 1], [0, 1]], jnp.int32))
    np.testing.assert_array_equal(seen, [[[1, 0], [1, 1]], [[1, 0], [0, 1]]])
