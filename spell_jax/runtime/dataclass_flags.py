"""Flags of a command from a dataclass: names, types, defaults, and help from its `Attributes:`.

`define(Config)` in `if __name__ == "__main__"` declares the flags, and `read(Config, FLAGS)` makes
the dataclass from them. docs/tools/commands.py reads the same flags from the source.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any, TypeVar

from absl import flags

# Flags belong to the module that calls `define`, so that its --help shows them.
flags.disclaim_key_flags()

T = TypeVar("T")
_DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
}
_ENTRY = re.compile(r"^  (\w+): (.+(?:\n {4}.+)*)", re.M)


def attribute_texts(*docstrings: str) -> dict[str, str]:
    """Return the text of each entry of `Attributes:`, in one line that begins with a capital."""
    parts = [inspect.cleandoc(text).partition("Attributes:")[2] for text in docstrings]
    entries = [entry for part in parts for entry in _ENTRY.findall(part)]
    texts = {name: " ".join(text.split()) for name, text in entries}
    return {name: text[:1].upper() + text[1:] for name, text in texts.items()}


def field_texts(cls: type) -> dict[str, str]:
    """Return the text of each field of a dataclass, also of inherited fields; see above."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return attribute_texts(*(base.__doc__ or "" for base in bases))


def define(cls: type, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Define a flag for each field of a dataclass.

    Fields are texts, numbers, truth values or tuples; a tuple's flag is a comma-separated list. A
    field without any default is a required flag.
    """
    texts = field_texts(cls)
    for field in dataclasses.fields(cls):
        default: Any = field.default
        required = default is dataclasses.MISSING
        kind, is_tuple = _kind(cls, field.name)
        value = None if required else list(map(str, default)) if is_tuple else default
        define_flag: Any = flags.DEFINE_list if is_tuple else _DEFINE[kind]
        define_flag(
            field.name, value, texts[field.name], flag_values=flag_values, required=required
        )


def read(cls: type[T], flag_values: Any) -> T:
    """Make the dataclass from its flags; ValueError names a flag with a part of another type."""
    values = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        value, (kind, is_tuple) = getattr(flag_values, field.name), _kind(cls, field.name)
        try:
            values[field.name] = tuple(map(kind, value)) if is_tuple else value
        except ValueError as error:
            raise ValueError(f"--{field.name} = {','.join(value)}: {error}") from error
    return cls(**values)


def _kind(cls: type, name: str) -> tuple[type, bool]:
    """Return (type of a field or of a tuple's elements, whether it is a tuple)."""
    hint = typing.get_type_hints(cls)[name]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False
