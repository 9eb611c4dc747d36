"""Sizes and counts of the house: python -m tests.house --measure."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from tests import house_rules as house
from tests.house_rules import PACKAGE, Source
from tests.paths import ROOT

TRAINING = ("trainer", "algorithms", "selfplay", "sampler", "learner")
BESIDE = ("launch", "benchmarks", "configs")
GENERIC_VERBS = ("run", "read", "make", "write", "check", "describe")


def reading_path() -> list[Path]:
    """List the files of the section "Reading path" of CONTRIBUTING.md, in the same order."""
    text = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("## Reading path")[2].partition("\n## ")[0]
    )
    names = re.findall(r"`([\w/]+\.py)`", text)
    return [ROOT / PACKAGE / name for name in names if not name.startswith("examples/")]


def measure(sources: Sequence[Source], pages: Mapping[str, str]) -> dict[str, int | float]:
    """Return the rows of the house's table that a program can count, {name: count}."""
    path = reading_path()
    package = [source for source in sources if source.path.startswith(f"{PACKAGE}/")]
    top = {s.module: _top(s.module) for s in package}
    edges: dict[str, set[str]] = {name: set() for name in top.values() if name != PACKAGE}
    for module, module_imports in house._graph(tuple(package)).items():
        for _, target in module_imports:
            if top[module] != top[target] and PACKAGE not in (top[module], top[target]):
                edges[top[module]].add(top[target])
    text = "\n".join(source.text for source in sources).lower()
    outside = [source for source in sources if not source.path.startswith("tests/")]
    counts = ("behind", "so many", "drawn", "rollout", "kv cache", "logprob")
    return {
        "rooms": len(edges),
        "floors": _floors(edges),
        "arrows": sum(map(len, edges.values())),
        "circles between rooms": len(house.circles(edges)),
        "circles between modules": len(list(house.circular(sources))),
        **{f"{word!r} in .py": len(re.findall(rf"\b{word}", text)) for word in counts},
        "files of the reading path": len(path),
        "lines of the reading path": sum(len(file.read_text().splitlines()) for file in path),
        **_lines(sources),
        **_diction(outside, pages),
    }


def _lines(sources: Sequence[Source]) -> dict[str, int]:
    """Count lines by folder."""
    lines: Counter[str] = Counter()
    for source in sources:
        parts = source.path.split("/")
        lines[parts[0]] += source.text.count("\n")
        lines[parts[1]] += source.text.count("\n") * (parts[0] == PACKAGE)
    outside = sum(lines[folder] for folder in house.FOLDERS if folder != "tests")
    return {
        "lines outside tests": outside,
        "lines of tests": lines["tests"],
        f"lines of {PACKAGE}": lines[PACKAGE],
        "lines of rooms that train": sum(lines[name] for name in TRAINING),
        "lines of launch, benchmarks and configs": sum(lines[name] for name in BESIDE),
    }


def _diction(sources: Sequence[Source], pages: Mapping[str, str]) -> dict[str, int | float]:
    """Count names, words and comments outside the tests."""
    nodes = [node for source in sources for node in source.nodes]
    bindings = sum(
        isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        for node in nodes
    )
    pronouns = sum(1 for source in sources for _ in house.pronouns(source))
    functions = Counter(
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lines = sum(source.text.count("\n") for source in sources)
    comment_lines = sum(
        bool(re.match(r"\s*#", line)) for source in sources for line in source.text.split("\n")
    )
    documentation = {path: text for path, text in pages.items() if path.startswith("docs/")}
    groups = house.texts(sources, documentation)
    return {
        "pronouns among 1,000 names": round(1000 * pronouns / max(1, bindings), 2),
        "class names of two modules": sum(1 for _ in house.unique_classes(sources)),
        "docstrings in another mood": sum(1 for source in sources for _ in house.moods(source)),
        **{f"functions called {name}": functions[name] for name in GENERIC_VERBS},
        "comments, percent of lines": round(100 * comment_lines / max(1, lines), 1),
        **{
            f"anaphors in 1,000 words of {kind}": house.anaphor_rate(
                [
                    block
                    for name, blocks in groups.items()
                    if name.startswith(kind)
                    for block in blocks
                ]
            )
            for kind in ("docs", "docstrings", "comments")
        },
        "words of docs": sum(len(text.split()) for text in documentation.values()),
    }


def _top(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _floors(edges: Mapping[str, Set[str]]) -> int:
    """Count the nodes on the longest path; the nodes of a circle count as one."""
    shared = {name: min(circle) for circle in house.circles(edges) for name in circle}
    merged: dict[str, set[str]] = {}
    for name, successors in edges.items():
        below = {shared.get(successor, successor) for successor in successors} - {
            shared.get(name, name)
        }
        merged.setdefault(shared.get(name, name), set()).update(below)
    depths: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in depths:
            depths[name] = 1 + max(map(depth, merged[name]), default=0)
        return depths[name]

    return max(map(depth, merged), default=0)
