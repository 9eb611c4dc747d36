"""Content of a TOML file as dataclasses; an error is one line with key, value and remedy."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import tomllib
import typing
from collections.abc import Mapping
from typing import Any

_LONGEST_VALUE = 100  # characters of a value in an error
_NAMES = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}


def read(kind: Any, path: pathlib.Path) -> Any:
    """Read a TOML file as a type of `convert`; every ValueError begins with the path."""
    try:
        return convert(kind, tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def convert(kind: Any, value: Any, place: str = "") -> Any:
    """Convert a value of a TOML file to a type; ValueError if it has another type.

    Args:
      kind: dataclass, dict[str, X], tuple[X, ...], str, int, float, bool, or a union of scalars.
      value: value that tomllib read.
      place: keys that lead to the value, for errors.
    """
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _convert_table(kind, value, place)
    if typing.get_origin(kind) is dict:
        _check_type(value, dict, "a table", place)
        return {key: convert(arguments[1], item, join(place, key)) for key, item in value.items()}
    if typing.get_origin(kind) is tuple:
        _check_type(value, list, "an array", place)
        return tuple(convert(arguments[0], x, f"{place}[{n}]") for n, x in enumerate(value))
    # type(), not isinstance: True is an int to Python, and "steps = true" must be an error.
    kinds = arguments or (kind,)
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    if type(value) not in kinds:
        raise error(place, value, f"must be {' or '.join(_NAMES[kind] for kind in kinds)}")
    return value


def _convert_table(kind: Any, value: Any, place: str) -> Any:
    _check_type(value, dict, "a table", place)
    types = _field_types(kind)
    for key, item in value.items():
        if key not in types:
            raise error(join(place, key), item, f"no such key, must be one of {', '.join(types)}")
    for field in dataclasses.fields(kind):
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if field.name not in value and not has_default:
            raise ValueError(f"{join(place, field.name)}: is missing")
    items = {key: convert(types[key], item, join(place, key)) for key, item in value.items()}
    return kind(**items)


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _check_type(value: Any, kind: type, name: str, place: str) -> None:
    if not isinstance(value, kind):
        raise error(place, value, f"must be {name}")


def look_up(table: Mapping[str, Any], key: str, place: str) -> Any:
    """Return the entry of a table; ValueError with the known keys if `place` names another one."""
    if key not in table:
        raise error(place, key, f"must be one of {', '.join(table)}")
    return table[key]


def join(place: str, key: str) -> str:
    """Append a key to a place, in quotes where TOML needs them."""
    key = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
    return f"{place}.{key}" if place else key


def error(place: str, value: Any, remedy: str) -> ValueError:
    """Make the error of a value; the message has the value's first 100 characters."""
    text = repr(value)
    text = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
    return ValueError(f"{place} = {text}: {remedy}")
