"""Hooks: functions of the user's that a config names as MODULE:FUNCTION.

Importing a module runs its code. So a hook's name comes from a config or a flag alone, never from a
document or from text that a model wrote.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from spell_jax.runtime.config import naming
from spell_jax.runtime.hosts import sigterm

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
        with naming(field, value), no_exit(f"{field} = {value!r}: "):
            return hook(*arguments, **keywords)

    return call


def find(field: str, value: str) -> Callable[..., Any]:
    """Import the function that a field names; ValueError with field, value and remedy.

    RuntimeError, with the traceback, if the module is found and its own code fails.
    """
    if not is_hook(value):
        raise ValueError(f"{field} = {value!r}: must be {FORM}")
    module_name, _, name = value.partition(":")
    try:
        with no_exit():
            module = importlib.import_module(module_name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module_name}.".startswith(f"{absent}."):
            remedy = "must be a module on Python's path ($PYTHONPATH)"
            raise ValueError(f"{field} = {value!r}: {error}; {remedy}") from error
        # A RuntimeError is never taken for a mistake in the config, whose traceback is not shown.
        text = f"{field} = {value!r}: importing {module_name}: {type(error).__name__}: {error}"
        raise RuntimeError(text) from error
    if not hasattr(module, name):
        raise ValueError(f"{field} = {value!r}: {module_name} has no {name}; must name a function")
    hook = getattr(module, name)
    if not callable(hook):
        raise ValueError(f"{field} = {value!r}: is {type(hook).__name__}; must name a function")
    return hook


@contextlib.contextmanager
def no_exit(place: str = "") -> Iterator[None]:
    """Raise RuntimeError if the user's code in the block ends the process, as by sys.exit().

    `place` begins the error's message.
    """
    # Otherwise the run would end with the status of success, and other hosts would wait.
    try:
        yield
    except sigterm.Terminated:
        raise
    except SystemExit as error:
        text = f"{place}sys.exit({error}) would end the run; must return or raise an error"
        raise RuntimeError(text) from error
