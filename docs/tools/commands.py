"""Command lines of the repository, read from source without importing it.

`find` lists every module that `python -m` runs, with its flags. The site's reference page shows the
flags, and the test of the documentation's shell blocks looks them up.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from spell_jax.runtime import dataclass_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
_FOLDERS = ("spell_jax", "data_pipeline", "launch", "benchmarks", "docs/tools")


class Flag(NamedTuple):
    """A flag `--name`, its default as source text ("" if there is none), and its help.

    `module` defines the flag; the default may use its names.
    """

    name: str
    default: str
    help: str
    module: str


class Command(NamedTuple):
    """A module with `if __name__ == "__main__"`, its docstring and its flags."""

    module: str
    text: str
    flags: tuple[Flag, ...]


def find(root: pathlib.Path = ROOT) -> dict[str, Command]:
    """Find all commands, by module name ("spell_jax.train"; of a __main__, the package's name)."""
    commands = {}
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if '\nif __name__ == "__main__":\n' not in source:
                continue
            tree = ast.parse(source)
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            flags = {
                flag.name: flag
                for module, part in [(name, tree), *_shared_flags(tree, source, root)]
                for flag in _flags(part, module, root)
            }
            name, text = name.removesuffix(".__main__"), ast.get_docstring(tree) or ""
            commands[name] = Command(name, text, tuple(flags.values()))
    return commands


def _shared_flags(tree: ast.AST, source: str, root: pathlib.Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield each `define_flags` of another module that the source calls, and the module's name.

    A `define_flags` may call another module's.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if re.search(rf"\b{alias.asname or alias.name}\.define_flags\(", source):
                module = f"{node.module}.{alias.name}"
                shared = _parse(module, root)
                for part in ast.walk(shared):
                    if isinstance(part, ast.FunctionDef) and part.name == "define_flags":
                        yield module, part
                        yield from _shared_flags(shared, ast.unparse(part), root)


def _flags(tree: ast.AST, module: str, root: pathlib.Path) -> Iterator[Flag]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) == "dataclass_flags.define":
            fields = _fields(ast.unparse(node.args[0]), tree, root)
            yield from (Flag(name, *texts, module) for name, texts in fields.items())
            continue
        function = ast.unparse(node.func).rpartition(".")[2]
        name = node.args[0] if node.args else None
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            continue
        keywords = {word.arg: word.value for word in node.keywords}
        if function in ("add_argument", "add") and name.value.startswith("--"):
            default = keywords.get("default")
            yield Flag(name.value[2:], _source(default), _text(keywords.get("help")), module)
        elif function.startswith("DEFINE_") and len(node.args) >= 2:
            text = keywords.get("help", node.args[-1])
            yield Flag(name.value, _source(node.args[1]), _text(text), module)


def _fields(name: str, tree: ast.AST, root: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Return {field: (default, help)} of a dataclass that a module defines or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _fields(name, _parse(node.module or "", root), root)
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = (_fields(ast.unparse(base), tree, root) for base in node.bases)
            fields = {key: texts for base in bases for key, texts in base.items()}
            helps = dataclass_flags.attribute_texts(ast.get_docstring(node) or "")
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    key = ast.unparse(field.target)
                    text = helps[key] if key in helps else fields[key][1]
                    fields[key] = (_source(field.value), text)
            return fields
    raise ValueError(f"{name}: no class of the module")


def _parse(module: str, root: pathlib.Path) -> ast.Module:
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _source(node: ast.expr | None) -> str:
    text = "" if node is None else ast.unparse(node)
    return "" if text in ("None", "''") else text


def _text(node: ast.expr | None) -> str:
    """Return a help text; computed parts stay as they are in the source."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return ast.unparse(node).strip("f'\"")
