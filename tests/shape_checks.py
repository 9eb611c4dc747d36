"""Checks of annotated shapes and dtypes that tests/conftest.py puts around functions."""

from typing import Any, get_type_hints

from beartype import beartype


def check(function: Any) -> Any:
    """Check a function's annotations of arrays with shapes, such as Float[Array, "B T"].

    Other annotations are pyright's: tests call functions with stand-ins of configs and states.
    """
    hints = get_type_hints(function) if callable(function) else {}
    function.__annotations__ = {n: hint for n, hint in hints.items() if "jaxtyping." in repr(hint)}
    return beartype(function)
