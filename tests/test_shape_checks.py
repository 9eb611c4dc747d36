"""Tests of the checks of annotated shapes, and of the annotations that the checks can read."""

import ast

import jax.numpy as jnp
import jaxtyping
import pytest

from spell_jax.learner.loss import log_ratio
from tests.paths import ROOT

ROOMS = ("attention", "learner", "policy", "sampler")


def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="log_ratio"):
        log_ratio(jnp.zeros((2, 3)), jnp.zeros((2, 1)))


def test_a_wrong_dtype_is_an_error() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="log_ratio"):
        log_ratio(jnp.zeros((2, 3)), jnp.zeros((2, 3), jnp.bfloat16))


@pytest.mark.parametrize("room", ROOMS)
def test_shapes_are_strings(room: str) -> None:
    """jaxtyping checks nothing of a function with an annotation such as Float32[Array, 2]."""
    wrong = []
    for path in sorted((ROOT / "spell_jax" / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        dtypes = {
            alias.name
            for node in imports
            if node.module == "jaxtyping"
            for alias in node.names
            if not alias.name.startswith("Array")
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id in dtypes:
                shape = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
                if not isinstance(getattr(shape, "value", None), str):
                    wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []
