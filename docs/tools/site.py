"""Hooks of mkdocs for the documentation's site (mkdocs.yml, `make docs`).

1. README.md is the site's first page; CONTRIBUTING.md, notebooks of studies and examples are pages
   too. They stay where readers of the repository look for them; links to and from them are
   rewritten.
2. The pages of reference/ are made from source (docs/tools/reference.py). reference/api/ has a page
   for each room of the package. A page links to the source file, which a reader of the repository
   can open; on the site the link leads to the reference. experiments.md ends with the lists of
   `python -m launch.experiments`.
3. If the repository has a public address (docs/tools/repository.py), the site links to it, pages
   have a link to edit them, and the notebook for Colab installs from it.
"""

from __future__ import annotations

import functools
import os.path
import re
from typing import Any

from mkdocs.structure.files import File, Files

from docs.tools import reference, repository
from docs.tools.measurements import ROOT
from spell_jax.launch.experiments import printer

# File outside docs/ -> page of the site.
_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/counting.py": "examples/counting.md",
    "examples/jitted_step.py": "examples/jitted_step.md",
    "launch/experiments/notebooks/eapo_tiny.md": "notebooks/eapo_tiny.md",
    "launch/experiments/ladder/notebook.md": "notebooks/ladder.md",
    "launch/experiments/notebooks/h200.md": "notebooks/h200.md",
    "launch/experiments/notebooks/small_runs.md": "notebooks/small_runs.md",
    "launch/experiments/notebooks/two_updates.md": "notebooks/two_updates.md",
    "launch/experiments/notebooks/without_labels.md": "notebooks/without_labels.md",
}
_SOURCES = {page: name for name, page in _OUTSIDE.items()}
_NOTEBOOK = "colab.ipynb"
_LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    """Add the pages of the rooms to the navigation, and the repository's address if it is known.

    The rooms are the last entry of the last section.
    """
    section = next(iter(config.nav[-1].values()))
    section.append({"API": [f"reference/api/{room}.md" for room in reference.room_pages()]})
    address = repository.find_address()
    if address:
        config.repo_url, config.repo_name = address, address.split("/", 3)[3]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/, and write the address into the notebook."""
    pages = {page: _page_text(name) for name, page in _OUTSIDE.items()}
    pages["reference/config.md"] = reference.config_page()
    pages["reference/commands.md"] = reference.commands_page()
    for room, text in reference.room_pages().items():
        pages[f"reference/api/{room}.md"] = text
    if config.repo_url:
        notebook = files.src_uris[_NOTEBOOK]
        files.remove(notebook)
        pages[_NOTEBOOK] = repository.fill_source(notebook.content_string, config.repo_url)
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page that leave docs/ or come from a file outside docs/.

    The page experiments.md also ends with the papers' tables.
    """
    name = page.file.src_uri
    source = _SOURCES.get(name, f"docs/{name}")
    if config.repo_url and (ROOT / source).is_file():
        page.edit_url = f"{config.repo_url}/edit/{repository.BRANCH}/{source}"
    if name == "experiments.md":
        markdown = f"{markdown}\n{printer.overviews()}\n"

    def rewrite(link: re.Match[str]) -> str:
        file = os.path.normpath(os.path.join(os.path.dirname(source), link["path"]))
        target = _page_of(file)
        if target:
            path = os.path.relpath(target, os.path.dirname(name))
            return f"[{link['text']}]({path}{link['anchor'] or ''})"
        if config.repo_url:
            return f"[{link['text']}]({config.repo_url}/blob/{repository.BRANCH}/{file})"
        return link["text"]

    return _LINK.sub(rewrite, markdown)


def _page_text(name: str) -> str:
    """Return a page of a file outside docs/: its Markdown, or the source of an example."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return text if name.endswith(".md") else f"# {name}\n\n```python\n{text}```\n"


@functools.cache
def _page_of(file: str) -> str:
    """Return the page or file of the site for a file of the repository, "" if there is none.

    A source file has a section of a reference page, with its anchor.
    """
    if file in _OUTSIDE:
        return _OUTSIDE[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return reference.source_links().get(file, "")
