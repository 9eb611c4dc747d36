"""Hooks of mkdocs for the documentation's site (mkdocs.yml, `make docs`).

1. README.md is the site's first page; CONTRIBUTING.md and the notebooks of studies are pages too.
   They stay where readers of the repository look for them; links to and from them are rewritten.
2. The pages of reference/ are made from source (docs/tools/reference.py). reference/api/ has a page
   for each room of the package. experiments.md ends with the lists of `python -m
   launch.experiments`.
"""

from __future__ import annotations

import os.path
import re
from typing import Any

from mkdocs.structure.files import File, Files

from docs.tools import reference
from docs.tools.measurements import ROOT
from launch.experiments import printer

# File outside docs/ -> page of the site.
_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "launch/experiments/notebooks/eapo_tiny.md": "notebooks/eapo_tiny.md",
    "launch/experiments/ladder/notebook.md": "notebooks/ladder.md",
    "launch/experiments/notebooks/two_updates.md": "notebooks/two_updates.md",
    "launch/experiments/notebooks/without_labels.md": "notebooks/without_labels.md",
}
_SOURCES = {page: name for name, page in _OUTSIDE.items()}
# Shown as text, as files of launch/ and examples/ are.
_FILES = ("LICENSE", "CITATION.cff", "CHANGELOG.md")
_LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    """Add the pages of the rooms to the navigation, as the last entry of its last section."""
    section = next(iter(config.nav[-1].values()))
    section.append({"API": [f"reference/api/{room}.md" for room in reference.room_pages()]})


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    pages = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in _OUTSIDE.items()}
    pages["reference/config.md"] = reference.config_page()
    pages["reference/commands.md"] = reference.commands_page()
    for room, text in reference.room_pages().items():
        pages[f"reference/api/{room}.md"] = text
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page that leave docs/ or come from a file outside docs/.

    The page experiments.md also ends with the papers' tables.
    """
    name = page.file.src_uri
    if name == "experiments.md":
        markdown = f"{markdown}\n{printer.overviews()}\n"

    def rewrite(link: re.Match[str]) -> str:
        folder = os.path.dirname(_SOURCES.get(name, f"docs/{name}"))
        target = os.path.normpath(os.path.join(folder, link["path"]))
        if target in _FILES:
            return f"`{target}`"
        if target.startswith(("launch/", "examples/")) and target not in _OUTSIDE:
            return link["text"]
        target = _OUTSIDE.get(target, target.removeprefix("docs/"))
        path = os.path.relpath(target, os.path.dirname(name))
        return f"[{link['text']}]({path}{link['anchor'] or ''})"

    return _LINK.sub(rewrite, markdown)
