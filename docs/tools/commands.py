"""Command lines of the repository, read from source without importing it.

`find` lists every module that `python -m` runs, with its flags. The site's reference page shows the
flags, and the test of the documentation's shell blocks looks them up.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

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
            if "__main__" not in source:
                continue
            tree = ast.parse(source)
            if any(isinstance(node, ast.If) and "__main__" in ast.dump(node) for node in tree.body):
                name = ".".join(path.relative_to(root).with_suffix("").parts)
                flags = {
                    flag.name: flag
                    for module, part in _parts(name, tree, root)
                    for flag in _flags(part, module)
                }
                name, text = name.removesuffix(".__main__"), ast.get_docstring(tree) or ""
                commands[name] = Command(name, text, tuple(flags.values()))
    return commands


def _parts(name: str, tree: ast.Module, root: pathlib.Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield the module `name`, and each `define_flags` of another module that the module calls."""
    yield name, tree
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {
        node.value.id
        for node in calls
        if node.attr == "define_flags" and isinstance(node.value, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) in used:
                module = f"{node.module}.{alias.name}"
                path = root.joinpath(*module.split(".")).with_suffix(".py")
                module_tree = ast.parse(path.read_text(encoding="utf-8"))
                for part in ast.walk(module_tree):
                    if isinstance(part, ast.FunctionDef) and part.name == "define_flags":
                        yield module, part


def _flags(tree: ast.AST, module: str) -> Iterator[Flag]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
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
