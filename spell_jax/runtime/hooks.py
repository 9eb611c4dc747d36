"""Hooks: functions of the user's that a config names as MODULE:FUNCTION.

Importing a module runs its code. So a hook's name comes from a config or a flag alone, never from a
document or from text that a model wrote.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

from spell_jax.runtime.config import naming

FORM = "MODULE:FUNCTION"
# Identifiers of Python, so that no URL (a slash follows its colon) and no file name with a slash or
# a dash is a hook.
_HOOK = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_hook(value: str) -> bool:
    """Return whether a value has the form of a hook, such as "my_package.world:make_clusters"."""
    return _HOOK.fullmatch(value) is not None


def load(field: str, value: str) -> Callable[..., Any]:
    """Import the function as `find`; its errors also get field and value.

    The errors are ValueError, OSError and ImportError. Any other error of the function is a bug
    there and passes with its traceback.
    """
    hook = find(field, value)

    @functools.wraps(hook)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with naming(field, value):
            return hook(*arguments, **keywords)

    return call


def find(field: str, value: str) -> Callable[..., Any]:
    """Import the function that a field names; ValueError with field, value and remedy.

    Any other error of the module than ImportError is a bug there and passes with its traceback.
    """
    if not is_hook(value):
        raise ValueError(f"{field} = {value!r}: must be {FORM}")
    module_name, _, name = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{field} = {value!r}: {error}; must be a module on Python's path ($PYTHONPATH)"
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{field} = {value!r}: {module_name} has no {name}; must name a function")
    hook = getattr(module, name)
    if not callable(hook):
        raise ValueError(f"{field} = {value!r}: is {type(hook).__name__}; must name a function")
    return hook
