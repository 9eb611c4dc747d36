"""Reference pages of the documentation's site, made from source.

The pages of the config and of the rooms name dataclasses, functions and classes; mkdocstrings
renders their docstrings. The commands' page has every flag and docstring (launch/commands.py).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from launch import commands
from launch.measurements import ROOT
from spell_jax import config
from spell_jax.algorithms import registry
from spell_jax.algorithms.config import AlgorithmConfig

_PACKAGES = ("spell_jax", "launch", "benchmarks", "data_pipeline", "configs", "examples")


def config_page() -> str:
    """Format a page with every config field, from the dataclasses: type, default, meaning."""
    parts = [
        "# Config reference",
        "Every field is a flag: `--config.sampler.page_size=256`. Defaults are the paper's. A "
        "config file (`configs/`) changes some. This page is made from the dataclasses.",
    ]
    for title, section in config_sections().items():
        path = f"{section.__module__}.{section.__qualname__}"
        parts.append(
            f"## {title}\n\n::: {path}\n    options: {{show_root_toc_entry: false, members: false}}"
        )
    return "\n\n".join(parts) + "\n"


def config_sections() -> dict[str, type]:
    """Return the dataclass of each section of a config, by title."""
    sections: dict[str, type] = {"config": config.RunConfig}
    for field in dataclasses.fields(config.RunConfig):
        section = type(field.default)
        if dataclasses.is_dataclass(section) and not issubclass(section, AlgorithmConfig):
            sections[f"config.{field.name}"] = section
    for name, spec in registry.ALGORITHMS.items():
        sections[f'config.algorithm, name = "{name}"'] = spec.config
    sections["config.MODEL, a model besides the policy"] = config.ExtraModelConfig
    sections["config of spell_jax.sft"] = config.SupervisedConfig
    return sections


@functools.cache
def room_pages() -> dict[str, str]:
    """Format a page for each room: the functions and classes that modules outside of it use."""
    on_config_page = {(cls.__module__, cls.__name__) for cls in config_sections().values()}
    pages = {}
    for room, modules in sorted(public_names().items()):
        parts = [f"# {room}", _room_docstring(room)]
        for module, names in sorted(modules.items()):
            members = [name for name in names if (module, name) not in on_config_page]
            if members:
                options = f"options: {{show_root_heading: true, members: [{', '.join(members)}]}}"
                parts.append(f"::: {module}\n    {options}")
        pages[room] = "\n\n".join(filter(None, parts)) + "\n"
    return pages


def _room_docstring(room: str) -> str:
    """Return the docstring of a room's `__init__.py`, its indented names as a list of Markdown."""
    path = ROOT / "spell_jax" / room / "__init__.py"
    if not path.exists():  # a module, not a folder
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = re.sub(r"^  (\w.*?): ", r"- `\1`: ", text, flags=re.M)
    return re.sub(r":\n- ", r":\n\n- ", text)


def public_names() -> dict[str, dict[str, list[str]]]:
    """Find the functions and classes of each room that a module outside of it uses.

    Returns:
      {room: {module: names in alphabetical order}}. A room is a folder of spell_jax, or config.py.
    """
    trees = dict(_trees())
    definitions = {module: set(_definitions(tree)) for module, tree in trees.items()}
    rooms: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for user, tree in trees.items():
        for module, name in _uses(tree, definitions):
            room = _room(module)
            if room and room != _room(user) and name in definitions[module]:
                rooms[room][module].add(name)
    return {
        room: {module: sorted(names) for module, names in modules.items()}
        for room, modules in rooms.items()
    }


def _trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield the syntax tree of each module outside the tests, with its dotted name."""
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))


def _definitions(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's functions and classes that have a docstring."""
    for node in tree.body:
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and ast.get_docstring(node) is not None:
            yield node.name


def _room(module: str) -> str:
    """Return the room of a module, "" outside the rooms (entry points, other packages)."""
    package, room = [*module.split("."), ""][:2]
    return room if package == "spell_jax" and room in _rooms() else ""


@functools.cache
def _rooms() -> frozenset[str]:
    folders = {path.parent.name for path in (ROOT / "spell_jax").glob("*/__init__.py")}
    return frozenset(folders - {"configs"} | {"config"})


def _uses(tree: ast.Module, modules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a module imports by name, or reads from an imported module."""
    imported: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (path := f"{node.module}.{alias.name}") in modules:
                    imported[alias.asname or alias.name] = path
                elif node.module in modules:
                    yield node.module, alias.name
    for node in nodes:
        match node:
            case ast.Attribute(ast.Name(name), attribute) if name in imported:
                yield imported[name], attribute


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


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
