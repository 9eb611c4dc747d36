"""Commands of the documentation: shell blocks and inline code of README.md and docs/.

Inline code before "of that commit" or "of commit HASH" is a command of an earlier version, not of
this one.
"""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from docs.tools import measurements

_SHELL = re.compile(
    r"(\.venv/bin/)?(python3?|pip|make|spell-\w+|for |zcat|mkdir|echo)\b|[A-Z_]+=[\w\"]"
)
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[\w ,]+) -->\n\n?)?"
    r"(?:^```(?:bash|sh)?\n(?P<fenced>.*?)^```|^```.*?^```"
    r"|(?:(?<=\n\n)|\A)(?P<indented>(?:    [^\n]*\n|\n(?=    ))+))",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"`(python -m [^`]+)`(?!\s+of\s+(?:that\s+commit|commit\s+[0-9a-f]{7}))")
# Blocks of README.md, which has no comments, by their first words: what each needs to be run.
README_NEEDS = {
    "make demo": "minutes",
    "python -m pip install gguf": "installation",
    "python -m launch.check --config=configs/paper.py:qwen2.5-7b-instruct": "a model and documents",
}
_ASSIGNMENT = re.compile(r"([A-Za-z_]+)=(.*)", re.DOTALL)


class Found(NamedTuple):
    """A command: its page, its words, and whether it is of a block (else inline code)."""

    page: str
    words: tuple[str, ...]
    in_block: bool


def find(path: pathlib.Path) -> Iterator[Found]:
    """Yield commands of a page, with variables that the page sets replaced by their values."""
    yield from find_in(path.read_text(encoding="utf-8"), str(path.relative_to(measurements.ROOT)))


def find_in(text: str, page: str) -> Iterator[Found]:
    """Yield commands of the text of a page, or of a docstring."""
    variables: dict[str, str] = {}
    for block in blocks(text):
        for line in _lines(block):
            for words in _commands(line, variables):
                yield Found(page, words, True)
    for span in INLINE.findall(text):
        for words in _commands(" ".join(span.split()), variables):
            yield Found(page, words, False)


def blocks(text: str) -> Iterator[str]:
    """Yield shell blocks of a page: indented or fenced, if the first line is a command."""
    for block, _ in marked_blocks(text):
        yield block


def marked_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield shell blocks in page order, each with what the block needs to be run ("" if nothing).

    `<!-- needs: WHAT -->` is the paragraph before a block that no test runs. README_NEEDS
    lists the blocks of README.md.
    """
    for match in _BLOCK.finditer(text):
        block = re.sub(r"^    ", "", match["fenced"] or match["indented"] or "", flags=re.M)
        if _SHELL.match(block.strip()):
            readme_needs = [need for words, need in README_NEEDS.items() if block.startswith(words)]
            yield block, match["needs"] or "".join(readme_needs)


def _lines(block: str) -> Iterator[str]:
    """Yield logical lines: join continued lines and keep lines of one quoted text together."""
    pending = ""
    for line in block.replace("\\\n", " ").split("\n"):
        pending = f"{pending} {line}".strip()
        if pending.count('"') % 2 == 0:
            yield pending
            pending = ""
    if pending:
        yield pending


def _commands(line: str, variables: dict[str, str]) -> Iterator[tuple[str, ...]]:
    line = re.sub(r"^for (\w+) in (\S+).*?; do", r"\1=\2;", line)  # the loop's first value
    line = re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], m[0]), line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|"):
            while words and (match := _ASSIGNMENT.fullmatch(words[0])):
                variables[match[1]] = match[2]
                words = words[1:]
            if words and words != ["done"]:
                yield tuple(words)
            words = []
        else:
            words.append(re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], m[0]), word))
