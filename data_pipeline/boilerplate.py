"""Boilerplate: lines of a page, a print or a web site that are no content of the document.

A line of at most LONGEST_LINE characters is boilerplate if it has a phrase of PHRASES, or if it
occurs again in the text with another page number at most, as running headers do. Rows of tables, "|
a | b |", often repeat and are content. The measure only has to rank nearly equal texts: what all of
them have does not count.
"""

from __future__ import annotations

import re
from collections import Counter

# Part of the fingerprint of deduplication: to be raised with every change of `worth`.
VERSION = 1
# Characters. A longer line is a paragraph, which may well be about cookies.
LONGEST_LINE = 160
PHRASES = re.compile(
    r"©|https?://|\bwww\.|\b(?:all rights reserved|back to top|click here|cookies?|copyright"
    r"|downloaded from|log ?in|newsletters?|page \d+|print(?:able|er)? (?:page|version)"
    r"|printed (?:at|from|on)|privacy policy|read more|share (?:on|this)|sign (?:in|up)|skip to"
    r"|subscribe|terms of (?:service|use))\b",
    re.IGNORECASE,
)
_PAGE_NUMBER = re.compile(r"^\d+\W+|\W+\d+$")  # or a year
_LETTER = re.compile(r"[^\W\d_]")


def boilerplate_length(text: str) -> int:
    """Return the number of characters in the lines of a text that are boilerplate."""
    lines = [line for line in map(str.strip, text.split("\n")) if 0 < len(line) <= LONGEST_LINE]
    forms = [_PAGE_NUMBER.sub("", line) for line in lines]
    counts = Counter(forms)
    return sum(
        len(line)
        for line, form in zip(lines, forms, strict=True)
        if (counts[form] > 1 and "|" not in line and _LETTER.search(line)) or PHRASES.search(line)
    )


def worth(text: str) -> int:
    """Return the number of characters of content minus the number of characters of boilerplate.

    Of two near duplicates, the one with more worth has less boilerplate, if it has the same
    content. A copy that lacks the end of the text gains no worth with the footer that is missing.
    """
    return len(text) - 2 * boilerplate_length(text)
