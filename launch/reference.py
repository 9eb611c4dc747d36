"""Reference pages of the documentation's site, made from source.

The config's page has every field of the dataclasses, the commands' page every flag and docstring
(launch/commands.py).
"""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from launch import commands
from spell_jax import config as configs
from spell_jax.algorithms import registry
from spell_jax.algorithms.config import AlgorithmConfig


def config_page() -> str:
    """Format a page with every config field, from the dataclasses: type, default, meaning."""
    parts = [
        "# Config reference",
        "Every field is a flag: `--config.sampler.page_size=256`. Defaults are the paper's. A "
        "config file (`configs/`) changes some. This page is made from the dataclasses.",
        _table("config", configs.RunConfig),
    ]
    for field in dataclasses.fields(configs.RunConfig):
        if dataclasses.is_dataclass(field.default) and not isinstance(
            field.default, AlgorithmConfig
        ):
            parts.append(_table(f"config.{field.name}", type(field.default)))
    for name, spec in registry.ALGORITHMS.items():
        parts.append(_table(f'config.algorithm, name = "{name}"', spec.config))
    parts.append(_table("config.MODEL, a model besides the policy", configs.ExtraModelConfig))
    parts.append(_table("config of spell_jax.sft", configs.SupervisedConfig))
    return "\n\n".join(parts) + "\n"


def _table(title: str, section: type) -> str:
    """Format a dataclass's fields as a section of a page; ValueError if one is not explained."""
    about = attributes(section)
    text = inspect.cleandoc(section.__doc__ or "").split("\n\nAttributes:")[0]
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(section):
        if field.metadata.get("derived"):
            continue
        if field.name not in about:
            raise ValueError(
                f"{section.__name__}.{field.name}: its docstring has no such attribute"
            )
        default = field.default
        if dataclasses.is_dataclass(default) or default is dataclasses.MISSING:
            shown = ""
        else:
            shown = f"`{json.dumps(default) if isinstance(default, str) else repr(default)}`"
        kind = str(field.type).replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{kind}` | {shown} | {_cell(about[field.name])} |")
    return f"## {title}\n\n{_plain(text)}\n\n" + "\n".join(rows)


def attributes(section: type) -> Mapping[str, str]:
    """Return the `Attributes:` texts of a dataclass and of the base classes, by name."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if "__doc__" in vars(base) and base.__doc__ and "Attributes:" in base.__doc__:
            texts |= dict(_entries(inspect.cleandoc(base.__doc__).split("Attributes:")[1]))
    return texts


def _entries(text: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n  (?=\w)", text):
        names, _, meaning = " ".join(entry.split()).partition(": ")
        for name in names.split(", "):
            yield name, meaning


def commands_page() -> str:
    """Format a page with every command: docstring and flags."""
    parts = [
        "# Commands",
        "`python -m MODULE --help` prints the same.",
    ]
    for command in commands.find().values():
        if f"python -m {command.module}" not in command.text:
            continue
        parts.append(f"## {command.module}\n\n```text\n{command.text}\n```")
        if command.flags:
            rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
            for flag in command.flags:
                default = f"`{_cell(_default(flag))}`" if flag.default else ""
                rows.append(f"| `--{flag.name}` | {default} | {_cell(flag.help)} |")
            parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _default(flag: commands.Flag) -> str:
    """Return a flag's default as a user types it, or the source of a computed default."""
    node = ast.parse(flag.default, mode="eval").body
    while isinstance(node, ast.Call) and node.args:  # list(TASKS), ",".join(map(str, SEEDS))
        node = node.args[-1]
    try:
        value = _look_up(node, flag.module)
    except (AttributeError, ValueError):
        return flag.default
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _look_up(node: ast.expr, module: str) -> Any:
    """Evaluate a constant, NAME, NAME.field or NAME["key"], with the names of a module."""
    match node:
        case ast.Name(name):
            return getattr(importlib.import_module(module), name)
        case ast.Attribute(value, name):
            return getattr(_look_up(value, module), name)
        case ast.Subscript(value, key):
            return _look_up(value, module)[_look_up(key, module)]
    return ast.literal_eval(node)


def _plain(text: str) -> str:
    return html.escape(text, quote=False)


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|")
