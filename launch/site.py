"""Hooks of mkdocs for the documentation's site (mkdocs.yml, `make docs`).

1. README.md is the site's first page, and CONTRIBUTING.md is a page; links between them and docs/
   are rewritten. Both stay where readers of the repository look for them.
2. The pages of reference/ are made from source (launch/reference.py). experiments.md ends with the
   lists of `python -m launch.experiments`.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File, Files

from launch import reference
from launch.experiments import printer
from launch.measurements import ROOT

_OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_FILES = ("LICENSE", "CITATION.cff", "CHANGELOG.md")  # shown as text, as files of launch/ are


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    pages = {
        page: (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for name, page in _OUTSIDE.items()
    }
    pages["reference/config.md"] = reference.config_page()
    pages["reference/commands.md"] = reference.commands_page()
    for page, text in pages.items():
        files.append(File.generated(config, page, content=_relink(text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to files above docs/, and append the papers' tables to their page."""
    if page.file.src_uri == "experiments.md":
        markdown = f"{markdown}\n{printer.overviews()}\n"
    return _relink(markdown)


def _relink(text: str) -> str:
    for name, page in _OUTSIDE.items():
        text = re.sub(rf"\]\(((?:\.\./)*){name}", lambda link, to=page: _up(link[1], to), text)
    for name in _FILES:
        text = re.sub(rf"\[[^]]*\]\((?:\.\./)*{name}\)", f"`{name}`", text)
    return re.sub(r"\[([^]]*)\]\((?:\.\./)+launch/[^)]*\)", r"\1", text)


def _up(dots: str, page: str) -> str:
    return f"]({dots.removeprefix('../')}{page}"
