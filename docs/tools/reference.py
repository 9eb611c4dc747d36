"""Reference pages of the documentation's site, made from source.

The pages of the config and of the rooms name dataclasses, functions and classes; mkdocstrings
renders their docstrings. The commands' page has every flag and docstring (docs/tools/commands.py).
"""

from __future__ import annotations

import ast
import html
import importlib
import re
from typing import Any

from markdown.extensions.toc import slugify

from docs.tools import commands
from docs.tools.measurements import ROOT
from spell_jax import config
from spell_jax.algorithms import registry
from spell_jax.trainer import config_help

# An entry of "Public names:" in the docstring of a room: `module.name, module.name: meaning`.
_PUBLIC_NAMES = re.compile(r"^  (\w+[\w., \n]*?): ", re.MULTILINE)


def config_page() -> str:
    """Format a page with every config field, from the dataclasses: type, default, meaning."""
    parts = [
        "# Config reference",
        "Every field is a flag: `--config.sampler.page_size=256`. A "
        "config file (`configs/`) changes some. This page is made from the dataclasses.",
    ]
    for title, section in config_sections().items():
        path = f"{section.__module__}.{section.__qualname__}"
        parts.append(
            f"## {title}\n\n::: {path}\n    options: {{show_root_toc_entry: false, members: false}}"
        )
    parts.append("## Reading a config")
    for function in (config.default_config, config.read, config.read_supervised):
        path = f"{function.__module__}.{function.__qualname__}"
        parts.append(f"::: {path}\n    options: {{show_root_heading: true}}")
    return "\n\n".join(parts) + "\n"


def config_sections() -> dict[str, type]:
    """Return the dataclass of each section of a config, by title."""
    sections: dict[str, type] = {"config": config.RunConfig}
    sections |= {f"config.{name}": cls for name, cls in config_help.run_sections().items()}
    parts: dict[type, tuple[str, list[str]]] = {}
    for name, spec in registry.ALGORITHMS.items():
        sections[f'config.algorithm, name = "{name}"'] = spec.config
        for field_name, cls in config_help.subsections(spec.config).items():
            parts.setdefault(cls, (field_name, []))[1].append(f'"{name}"')
    for part, (field_name, names) in parts.items():
        sections[f"config.algorithm.{field_name}, name = {', '.join(names)}"] = part
    sections["config.MODEL, a model besides the policy"] = config.ExtraModelConfig
    sections["config of spell_jax.sft"] = config.SupervisedConfig
    return sections


def source_links() -> dict[str, str]:
    """Return {file of the repository: link to its section of a reference page}.

    The files define the dataclass of a config's section, or are commands.
    """
    links = {"spell_jax/config.py": "reference/config.md"}
    for title, section in config_sections().items():
        path = f"{section.__module__.replace('.', '/')}.py"
        links.setdefault(path, f"reference/config.md#{slugify(title, '-')}")
    for command in _listed_commands():
        path = command.module.replace(".", "/")
        path = f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"
        links.setdefault(path, f"reference/commands.md#{slugify(command.module, '-')}")
    return links


def room_pages() -> dict[str, str]:
    """Format a page for each room: its docstring, and the public names that the docstring lists.

    Dataclasses of the config are left out; they are on the page of the config.
    """
    on_config_page = {f"{cls.__module__}.{cls.__name__}" for cls in config_sections().values()}
    pages = {}
    for path in sorted((ROOT / "spell_jax").glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        entries = _PUBLIC_NAMES.findall(text)
        if not entries:  # a package of config files
            continue
        room = path.parent.name
        parts = [f"# {room}", _PUBLIC_NAMES.sub(r"- `\1`: ", text).replace(":\n- ", ":\n\n- ")]
        names = [
            f"spell_jax.{room}.{name}" for entry in entries for name in re.split(r",\s+", entry)
        ]
        options = "options: {show_root_heading: true}"
        parts += [f"::: {name}\n    {options}" for name in names if name not in on_config_page]
        pages[room] = "\n\n".join(parts) + "\n"
    return pages


def commands_page() -> str:
    """Format a page with every command: docstring and flags."""
    parts = [
        "# Commands",
        "`python -m MODULE --help` prints the same.",
    ]
    for command in _listed_commands():
        parts.append(f"## {command.module}\n\n```text\n{command.text}\n```")
        if command.flags:
            rows = ["| flag | default | meaning |", "|---|---|---|"]
            for flag in command.flags:
                default = f"`{_cell(_default(flag))}`" if flag.default else ""
                rows.append(f"| `--{flag.name}` | {default} | {_cell(flag.help)} |")
            parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _listed_commands() -> list[commands.Command]:
    """List the commands that users call: their docstrings show the call."""
    return [c for c in commands.find().values() if f"python -m {c.module}" in c.text]


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
