"""Equations of the documentation's site: TeX in the pages, MathML in the browser (mkdocs.yml).

A page has a displayed equation as a fenced block of the language `math`, and a symbol in a line as
code between dollar signs, the two forms that GitHub and GitLab draw. Every browser draws MathML by
itself, so the site has no script for equations, no fonts, and no address of another server.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml import converter
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

_NAMESPACE = "{http://www.w3.org/1998/Math/MathML}"
# Elements with a fixed number of children: latex2mathml drops what an unclosed brace leaves out.
_CHILDREN = {"mfrac": 2, "msub": 2, "msup": 2, "mover": 2, "munder": 2, "msubsup": 3}
_BAR = "<mo>&#x0007C;</mo>"
_CLOSE_BAR = '<mo stretchy="false" lspace="0" rspace="0">&#x0007C;</mo>'
# Above the priority of code spans, 190.
_PRIORITY = 195


def to_mathml(tex: str, display: str = "inline") -> str:
    """Convert an equation of TeX to a `<math>` element.

    Args:
      tex: the equation, without dollar signs.
      display: "inline" or "block".

    Raises:
      ValueError: the equation has an unknown command, or a command without its arguments.
    """
    # Bars of an absolute value come as operators between two terms: spaced, of unequal height.
    text = converter.convert(tex.strip(), display=display).replace(_BAR, _CLOSE_BAR)
    for element in ElementTree.fromstring(text).iter():
        count = _CHILDREN.get(element.tag.removeprefix(_NAMESPACE), len(element))
        if len(element) != count or "\\" in (element.text or ""):
            raise ValueError(f"equation {tex.strip()!r}: an unknown command or a missing argument")
    return text


def format_block(source: str, *_: Any, **__: Any) -> str:
    """Format a fenced block of the language `math`, as a function of pymdownx.superfences."""
    return f'<div class="equation" data-search-exclude>{to_mathml(source, "block")}</div>'


class Equations(Extension):
    """Markdown extension for equations in a line, code between dollar signs."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the pattern of equations in a line."""
        processor = _InlineEquation(r"\$`([^`\n]+)`\$", md)
        md.inlinePatterns.register(processor, "equation", _PRIORITY)


class _InlineEquation(InlineProcessor):
    """Processor of equations in a line."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        """Keep the MathML from being read as Markdown."""
        return self.md.htmlStash.store(to_mathml(m[1])), m.start(0), m.end(0)
