"""Tests of bfloat16 as bits: what becomes bits, on which platform, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.launch import topologies
from spell_jax.runtime.bits import as_bits, from_bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int32"])
def test_only_bfloat16_becomes_bits_and_comes_back(dtype: str) -> None:
    x = jnp.asarray([-3, 0, 1, 100], dtype)
    bits = jax.jit(as_bits)(x)
    assert bits.dtype == ("uint16" if dtype == "bfloat16" else dtype)
    back = jax.jit(from_bits)(bits)
    assert back.dtype == dtype
    np.testing.assert_array_equal(np.asarray(back, np.float32), np.asarray(x, np.float32))


def test_programs_for_accelerators_have_no_bits() -> None:
    plan = topologies.abstract_mesh(topologies.find("v5e-8"), {"fsdp": -1})
    x = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(plan):
        assert jax.eval_shape(as_bits, x).dtype == jnp.bfloat16
