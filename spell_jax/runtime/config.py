"""Config sections: a dataclass declares a section, a locked ConfigDict carries it.

`section` makes the ConfigDict, config files and flags change it, and `build` makes the dataclass
from it again. A mistake names the field, its value and the remedy; `collect` finds all mistakes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict, FieldReference

from spell_jax.runtime import urls

T = TypeVar("T")
Config = Any  # an ml_collections.ConfigDict: its fields have no static types
_UNIONS = (typing.Union, types.UnionType)
# Old name of a field -> its name, both dotted; the module that declares the field adds its names.
MOVED_FIELDS: dict[str, str] = {}
DERIVED = {"derived": True}  # metadata of a field that is computed, not configured
# jax holds whole numbers in 32 bits and drops higher bits of a seed without a word: seeds 0 and
# 2**32 would give equal runs.
LARGEST, LARGEST_SEED = 2**31 - 1, 2**32 - 1


class ConfigError(ValueError):
    """Mistakes of a config: `mistakes` has a line for each, with field, value and remedy."""

    def __init__(self, mistakes: Iterable[str]):
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


def collect(
    make: Callable[[dict[str, Any]], T],
    fields: Mapping[str, Any],
    stand_ins: Mapping[str, Any],
    find_conflicts: Callable[[T], Iterable[str]] = lambda _: (),
) -> tuple[T | None, dict[str, str]]:
    """Build a config, and go on after each mistake, so that it does not hide the next one.

    A wrong field gets its stand-in, or is removed if it has none, and `make` is tried again. If
    `make` refuses the stand-in too, because it does not fit other fields of its section, the whole
    section gets its stand-ins.

    Args:
      make: function that builds the config from nested dicts, and raises a mistake as an error
        with a message that begins with the dotted name of the field.
      fields: nested dicts of the config's values, which stay as they are.
      stand_ins: valid values by the same names.
      find_conflicts: function that lists, as such messages, fields that do not fit together.

    Returns:
      The result of `make`, with stand-ins in place of wrong fields; None if an error names no field
      that can be replaced. The message of each mistake by dotted name of its field.
    """
    # A copy, because stand-ins are written into it; the caller's fields keep the mistakes.
    values: dict[str, Any] = copy.deepcopy(dict(fields))
    mistakes: dict[str, str] = {}
    replaced: set[str] = set()

    def record(message: str) -> str:
        match = re.match(r"\w+(\.\w+)*(?= = |: |\[)", message)
        field = match[0] if match else ""
        if not {field, _root(field)} & replaced:  # else it may follow from a stand-in
            mistakes[field] = message
        return field

    # Ends: each turn replaces a field or section that was not replaced before, or returns.
    while True:
        try:
            built = make(values)
        except (ValueError, OSError, ImportError) as error:
            field = record(str(error))
            # An error of the stand-in itself leads to the section, and then to the end.
            for name in (field, _root(field)):
                if name not in replaced and _replace(values, stand_ins, name):
                    replaced.add(name)
                    break
            else:
                return None, mistakes
        else:
            for message in find_conflicts(built):
                record(message)
            return built, mistakes


def _root(field: str) -> str:
    return field.partition(".")[0]


def _replace(values: Any, stand_ins: Any, field: str) -> bool:
    """Set a field to its stand-in, or remove it; return whether the field or stand-in is there."""
    *sections, last = field.split(".")
    for name in sections:
        values, stand_ins = values.get(name), stand_ins.get(name, {})
        if not isinstance(values, dict):
            return False
    is_there = last in values or last in stand_ins
    values.pop(last, None)
    if last in stand_ins:
        values[last] = copy.deepcopy(stand_ins[last])
    return is_there


@contextlib.contextmanager
def naming(field: str, value: Any) -> Iterator[None]:
    """Give errors of files and packages in the context the field that names them."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise ValueError(f"{field} = {value!r}: {error}") from error


def section(fields: Any) -> Config:
    """Make the ConfigDict of a section: a dataclass with defaults for all fields, or an instance.

    Fields with the metadata DERIVED are left out. A dataclass inside becomes a section of its own;
    inside a tuple it becomes a tuple of its values.
    """
    result: Config = ConfigDict()
    instance = fields() if isinstance(fields, type) else fields
    # With postponed annotations a field's type is a string; get_type_hints evaluates it.
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        if field.metadata.get("derived"):
            continue
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            value = section(value)
        elif isinstance(value, tuple):
            value = tuple(
                dataclasses.astuple(part) if _is_instance(part) else part for part in value
            )
        if value is not None and typing.get_origin(hints[field.name]) in _UNIONS:
            # Any type, which `build` checks: a ConfigDict would only take the default's.
            value = FieldReference(value, field_type=object)
        if value is not None:
            result[field.name] = value
    return result


def _is_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def build(cls: type[T], section: Mapping[str, Any], where: str, **extra: Any) -> T:
    """Make a dataclass from a config section.

    Lists become tuples; a tuple or a mapping stands for a dataclass inside them. `where` is the
    section's name in messages ("optimizer"); it replaces the usual name, the class attribute
    SECTION, in messages of __post_init__. `extra` holds fields that do not come from the config.
    ValueError if a field is unknown, missing, of the wrong type, not finite, out of range, or a URL
    with a password or a key.
    """
    if not hasattr(section, "items"):
        raise ValueError(f"{where} = {section!r}: must be {_name(cls)}")
    before = f"{where}." if where else ""
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.name not in extra}
    hints = typing.get_type_hints(cls)
    # Unknown names first: a misspelled field would otherwise read as a missing one.
    values = dict(section.items())
    for name in values:
        if name not in fields:
            # Only fields of config.algorithm have moved. Their dataclasses have defaults.
            defaults: Any = cls(**extra) if f"{before}{name}" in MOVED_FIELDS else None
            present = dict(flat(dataclasses.asdict(defaults), before)) if defaults else {}
            hint = describe_move(f"{before}{name}", present)
            hint = hint or f"no such field, must be one of {sorted(fields)}"
            raise ValueError(f"{before}{name}: {hint}")
    for name, value in values.items():
        values[name] = coerce(value, hints[name], f"{before}{name}")
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in values:
            raise ValueError(f"{before}{name}: is missing, must be {_name(hints[name])}")
    try:
        return cls(**values, **extra)
    except ValueError as error:
        # One class may serve several sections: the policy's optimizer and a reward model's.
        usual = getattr(cls, "SECTION", where)
        if usual == where:
            raise
        raise ValueError(str(error).replace(f"{usual}.", f"{where}.")) from error


def describe_move(name: str, present: Collection[str]) -> str:
    """Return where a field is now, by its old dotted name; "" if it did not move.

    `present` are dotted names of the config's fields.
    """
    moved = MOVED_FIELDS.get(name)
    # Another algorithm may have the field, by its new name too.
    if name in present or not (moved or name in MOVED_FIELDS.values()):
        return ""
    return f"now {moved}" if moved in present else "no such field of this algorithm"


def check_least(fields: Any, where: str, **least: float) -> None:
    """Raise ValueError for a field below its least value, or NaN; `where` is like "optimizer."."""
    for name, bound in least.items():
        # `not >=` instead of `<`, which is false for NaN.
        if not getattr(fields, name) >= bound:
            raise ValueError(f"{where}{name} = {getattr(fields, name)}: must be at least {bound}")


def check_width(value: int, where: str) -> None:
    """Raise ValueError for a whole number that jax cannot hold; `where` is its field."""
    smallest, largest = (0, LARGEST_SEED) if where.endswith("seed") else (-LARGEST, LARGEST)
    if not smallest <= value <= largest:
        raise ValueError(f"{where} = {value}: must be a whole number from {smallest} to {largest}")


def check_text(value: Any, where: str) -> None:
    """Raise ValueError for a value that is no text in UTF-8; `where` is its field."""
    try:
        value.encode()  # fails for lone surrogates, as which Python reads other bytes than UTF-8
    except (AttributeError, UnicodeError):
        raise ValueError(f"{where} = {value!r:.80}: must be UTF-8 text") from None


def check_choice(fields: Any, where: str, **choices: Collection[Any]) -> None:
    """Raise ValueError for a field that is none of its choices; see check_least."""
    for name, allowed in choices.items():
        if getattr(fields, name) not in allowed:
            value = getattr(fields, name)
            raise ValueError(f"{where}{name} = {value!r}: must be one of {allowed}")


def flat(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def changes(config: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return a line for each field that an earlier config has with another value."""
    then = dict(flat(before))
    return [
        f"{name} = {value!r}: was {then[name]!r}"
        for name, value in flat(config)
        if name in then and then[name] != value
    ]


def plain(config: Config) -> dict[str, Any]:
    """Convert a config to nested dicts of JSON values."""
    return json.loads(config.to_json_best_effort())


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Return a value as its type hint says; errors as in `build`. `where` is its field."""
    urls.check_secret(where, value)  # first: other messages repeat the value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        if isinstance(value, list | tuple):  # the tuple's own message says which part is wrong
            inner = [option for option in inner if typing.get_origin(option) is tuple] or inner
        if len(inner) == 1:
            return coerce(value, inner[0], where)
        # The first type that takes the value wins, in the order of the annotation.
        for option in inner:
            with contextlib.suppress(ValueError):
                return coerce(value, option, where)
        raise ValueError(f"{where} = {value!r}: must be {_name(hint)}")
    if hasattr(value, "items") and dataclasses.is_dataclass(hint):  # a dict or a ConfigDict
        return build(typing.cast(type, hint), value, where)
    sequence = isinstance(value, list | tuple)
    if origin is tuple and sequence:
        if inner[-1] is Ellipsis:
            if dataclasses.is_dataclass(inner[0]) and value and not hasattr(value[0], "__len__"):
                text = f"must be tuples ({_fields(inner[0])}); one is written ({tuple(value)!r},)"
                raise ValueError(f"{where} = {value!r}: {text}")
            inner = inner[:1] * len(value)
        if len(inner) != len(value):
            raise ValueError(f"{where} = {value!r}: must be {_name(hint)}")
        parts = enumerate(zip(value, inner, strict=True))
        return tuple(coerce(part, kind, f"{where}[{i}]") for i, (part, kind) in parts)
    if sequence and dataclasses.is_dataclass(hint):
        names = [field.name for field in dataclasses.fields(hint)]
        if len(names) != len(value):
            raise ValueError(f"{where} = {value!r}: must be a tuple of {', '.join(names)}")
        return build(typing.cast(type, hint), dict(zip(names, value, strict=True)), where)
    plain = origin or hint
    # A flag such as --config.x=1 gives an int, which stands for a float. bool is an int in Python,
    # but True is no number here.
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
        raise ValueError(f"{where} = {value}: must be a finite number")
    if not isinstance(plain, type) or hint is Any:
        return value
    if not isinstance(value, plain) or (plain is int and isinstance(value, bool)):
        raise ValueError(f"{where} = {value!r}: must be {_name(hint)}")
    if isinstance(value, int) and plain is int:
        check_width(value, where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} = {value!r}: must be a finite number")
    return value


def _fields(cls: Any) -> str:
    return ", ".join(field.name for field in dataclasses.fields(cls))


def _name(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return f"a section, or a tuple ({_fields(hint)})"
    return hint.__name__ if isinstance(hint, type) else str(hint)
