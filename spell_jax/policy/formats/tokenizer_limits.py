"""Limits of the steps of a tokenizer.json: how long a text may become, and how long a match takes.

The `tokenizers` package runs the steps in native code, which nothing can interrupt. So they are
checked when a tokenizer is loaded:

1. The `Replace` steps of a normalizer or decoder may make a text at most GROWTH times as long, and
   all steps together may add at most ADDED characters. Forty steps "a" -> "aa" would make one
   letter a terabyte.
   A table of SentencePiece replaces characters by at most REPLACED bytes.
2. A normalizer, splitter or decoder has at most STEPS steps. A frame of special tokens has the text
   once, and at most STEPS tokens. What a model adds to each piece of a word has at most REPLACED
   characters, and a word that WordPiece tries to cut, in quadratic time, at most WORD.
3. In a pattern, nothing that can match one text in several ways is repeated without bound in front
   of something that can fail, as in `(a+)+$`, and at most RUNS unbounded repetitions stand in front
   of something that can fail. Oniguruma itself gives up after ten million retries of one match,
   0.1 s, which would end a run in its middle. With both limits the time grows with the square of a
   text's length: 1 s for `a+[^a]` and 20,000 times "a", a minute for 100,000, where `a*a*[^a]`
   takes hours. Published splitters have such repetitions too (`\\s*[\\r\\n]+`).
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

FIELDS = ("normalizer", "pre_tokenizer", "decoder")
GROWTH = 16  # published normalizers: 1, or 2 if they add spaces
ADDED = 1 << 12
REPLACED = 64  # bytes; NFKC writes U+FDFA in 33
STEPS = 64  # published tokenizers: up to 12
WORD = 10_000  # characters; published: 100
RUNS = 1  # published patterns: 1
_DEPTH = 32  # of nested steps and of groups in a pattern
_PATTERN = 1 << 14  # most characters of a pattern; published patterns: up to 1,200
_MANY = 8  # repetitions that count as without bound; published bounds: 3


def check_steps(description: Mapping[str, Any]) -> None:
    """Check the content of a tokenizer.json; ValueError names the field and what it exceeds."""
    _check_model(description.get("model"))
    for place, step in _steps(description.get("post_processor"), "post_processor", 0):
        if step.get("type") == "TemplateProcessing":
            _check_frame(step, place)
    for field in FIELDS:
        growth, added_length = 1.0, 0
        for number, (place, step) in enumerate(_steps(description.get(field), field, 0)):
            if number >= STEPS:
                raise ValueError(f"{field}: has more than {STEPS} steps")
            if pattern := _regex(step):
                _check_pattern(pattern, f"{place}.pattern.Regex")
            if step.get("type") == "Prepend":
                added_length += len(str(step.get("prepend", "")))
            if step.get("type") == "Replace":
                growth *= _growth(step)
            if step.get("type") == "Precompiled":
                _check_charsmap(step.get("precompiled_charsmap"), place)
            # An added character may itself be replaced by a later step, hence the product.
            if growth > GROWTH or added_length * growth > ADDED:
                raise ValueError(
                    f"{place}: the steps up to here make a text up to {growth:.0f} times as long "
                    f"and {added_length} characters longer; must be at most {GROWTH} and {ADDED}"
                )


def _check_model(model: Any) -> None:
    fields = model if isinstance(model, Mapping) else {}
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if (length := len(str(fields.get(name) or ""))) > REPLACED:
            raise ValueError(f"model.{name}: has {length} characters; must have at most {REPLACED}")
    longest = fields.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > WORD:
        raise ValueError(f"model.max_input_chars_per_word = {longest}: must be at most {WORD}")


def _check_frame(step: Mapping[str, Any], place: str) -> None:
    """Check the special tokens around a text, which may not be in the frame a second time."""
    single, tokens = step.get("single"), step.get("special_tokens")
    if not isinstance(single, list) or not isinstance(tokens, Mapping):
        return  # the package refuses it
    texts = sum(isinstance(part, Mapping) and "Sequence" in part for part in single)
    ids = sum(len(token.get("ids", ())) for token in tokens.values() if isinstance(token, Mapping))
    if texts > 1 or len(single) > STEPS or ids > STEPS:
        raise ValueError(
            f"{place}.single: has the text {texts} times and {len(single)} parts, of {ids} special "
            f"tokens; must have it once and at most {STEPS}"
        )


def _steps(part: Any, place: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every step below `part`, in order, with its place."""
    if depth > _DEPTH:
        raise ValueError(f"{place}: is nested more than {_DEPTH} deep")
    if isinstance(part, list):
        for number, inner in enumerate(part):
            yield from _steps(inner, f"{place}[{number}]", depth + 1)
    elif isinstance(part, Mapping):
        if part.get("type") != "Sequence":
            yield place, part
        for name, inner in part.items():
            if isinstance(inner, list):
                yield from _steps(inner, f"{place}.{name}", depth + 1)


def _regex(step: Mapping[str, Any]) -> str:
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    return regex if isinstance(regex, str) else ""


def _growth(step: Mapping[str, Any]) -> float:
    """Return how many times as long a Replace can make a text; a pattern may match one character.

    An empty pattern matches between characters.
    """
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if text == "":
        return 1.0 + len(content)
    return max(1.0, len(content) / (len(text) if isinstance(text, str) else 1))


def _check_charsmap(charsmap: Any, place: str) -> None:
    """Check the longest text that SentencePiece's table puts in the place of a few characters."""
    try:
        # SentencePiece's table: the size of a trie, the trie, then texts that end with a zero byte.
        data = base64.b64decode(charsmap, validate=True) if isinstance(charsmap, str) else b""
    except ValueError:
        return  # the package refuses such a table
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    if (longest := max(map(len, texts))) > REPLACED:
        raise ValueError(
            f"{place}.precompiled_charsmap: replaces characters by {longest} bytes; must be at "
            f"most {REPLACED}"
        )


# --------------------------------------------------------------------------------------- Patterns


@dataclasses.dataclass(frozen=True)
class _Atom:
    """A character, class or group of a pattern, and how often it is repeated.

    Attributes:
      branches: alternatives of a group; none for a character or a class.
      minimum: smallest number of repetitions.
      maximum: largest number of repetitions; None without bound.
      keeps: whether matching never returns for another number of repetitions (`++`, `(?>...)`).
      letter: the character, if it is a letter, a digit or a line break.
    """

    branches: tuple[tuple[_Atom, ...], ...] = ()
    minimum: int = 1
    maximum: int | None = 1
    keeps: bool = False
    letter: str = ""

    @property
    def is_open(self) -> bool:
        return not self.keeps and (self.maximum is None or self.maximum > _MANY)

    def can_fail(self) -> bool:
        inside = [any(atom.can_fail() for atom in branch) for branch in self.branches]
        return self.minimum > 0 and all(inside)

    def varies(self) -> bool:
        """Return whether the atom can match one text in several ways."""
        return not self.keeps and (self.minimum != self.maximum or self.varies_inside())

    def varies_inside(self) -> bool:
        # Alternatives that begin with different letters exclude each other.
        starts = [branch[0].letter if branch else "" for branch in self.branches]
        is_exclusive = all(starts) and len(set(starts)) == len(starts)
        return (len(starts) > 1 and not is_exclusive) or any(
            atom.varies() for branch in self.branches for atom in branch
        )


def _check_pattern(text: str, place: str) -> None:
    shown = text if len(text) <= 80 else text[:77] + "..."
    try:
        if len(text) > _PATTERN:
            raise ValueError(f"has {len(text)} characters; must have at most {_PATTERN}")
        reader = _Reader(text)
        while not reader.is_done():  # again after an unopened ")", which the package refuses
            _check_branches(reader.branches(0), is_followed=False)
    except ValueError as error:
        raise ValueError(f"{place} = {shown!r}: {error}") from error


def _check_branches(branches: tuple[tuple[_Atom, ...], ...], is_followed: bool) -> int:
    """Check repetitions; return how many unbounded repetitions stand before what can fail.

    `is_followed` says whether something that can fail follows the branches.
    """
    return max((_check_branch(branch, is_followed) for branch in branches), default=0)


def _check_branch(branch: tuple[_Atom, ...], is_followed: bool) -> int:
    runs = 0
    # From the end, because what matters is whether something that can fail follows.
    for atom in reversed(branch):
        if atom.is_open and is_followed:
            runs += 1
            if atom.varies_inside():
                raise ValueError(
                    "repeats without bound what can match one text in several ways, before "
                    "something that can fail; matching may take exponential time"
                )
        # In a repeated group, the next round follows every atom of the group.
        repeats = atom.maximum is None or atom.maximum > 1
        runs += _check_branches(atom.branches, (is_followed or repeats) and not atom.keeps)
        if runs > RUNS:
            raise ValueError(
                f"has more than {RUNS} repetition without a bound of {_MANY} before something that "
                "can fail; matching may take hours"
            )
        is_followed = is_followed or atom.can_fail()
    return runs


class _Reader:
    """Reader of a pattern in Oniguruma's syntax, as far as its repetitions go."""

    def __init__(self, text: str):
        self._text, self._at = text, 0

    def is_done(self) -> bool:
        return self._at >= len(self._text)

    def branches(self, depth: int) -> tuple[tuple[_Atom, ...], ...]:
        """Read alternatives, and the ")" after them."""
        if depth > _DEPTH:
            raise ValueError(f"has groups nested more than {_DEPTH} deep")
        branches, atoms = [], []
        while not self.is_done():
            sign = self._text[self._at]
            if sign in "|)":
                self._at += 1
                branches.append(tuple(atoms))
                atoms = []
                if sign == ")":
                    return tuple(branches)
            else:
                atoms.append(self._repeated(self._atom(depth)))
        return (*branches, tuple(atoms))

    def _take(self, pattern: str) -> str | None:
        """Go past a regular expression's match and return it; None without a match."""
        match = re.compile(pattern, re.DOTALL).match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match[0] if match else None

    def _atom(self, depth: int) -> _Atom:
        if self._text[self._at] == "[":
            self._pass_class()
            return _Atom()
        if self._take(r"\(\?#[^)]*\)"):  # a comment
            return _Atom(minimum=0, maximum=0)
        if self._take(r"\((?!\?)|\(\?(?::|=|!|<=|<!|<\w+>|[imxWDSP-]+:)"):
            return _Atom(self.branches(depth + 1))
        if self._take(r"\(\?>"):
            return _Atom(self.branches(depth + 1), keeps=True)
        if self._take(r"\(\?[imxWDSP-]+\)"):  # options of what follows
            return _Atom(minimum=0, maximum=0)
        if self._text[self._at] == "(":
            raise ValueError("has a group that is recursive, conditional or absent")
        if self._take(r"\\(?:[gk]|[1-9])"):
            raise ValueError("refers to one of its groups")
        if self._take(r"\\(?:[pPx]\{[^}]*\}|.)?"):
            last = self._text[self._at - 2 : self._at]
            return _Atom(letter=last if last in ("\\r", "\\n", "\\t") else "")
        self._at += 1
        sign = self._text[self._at - 1]
        return _Atom(letter=sign if sign.isalnum() else "")

    def _pass_class(self) -> None:
        """Go past a class, which may have classes within it."""
        depth = 0
        while not self.is_done():
            if self._take(r"\[\^?\]?"):  # a "]" in the first place is a character
                depth += 1
            elif not self._take(r"\\."):
                depth -= self._text[self._at] == "]"
                self._at += 1
            if not depth:
                return

    def _repeated(self, atom: _Atom) -> _Atom:
        while sign := self._take(r"[*+?]|\{\d*,?\d*\}"):
            minimum, maximum = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (0, 0))
            if sign[0] == "{":
                low, comma, high = sign[1:-1].partition(",")
                if not low + high:
                    return atom  # braces of their own
                minimum, maximum = (
                    int(low or 0),
                    (int(high) if high else None) if comma else int(low),
                )
            # After braces, a "+" repeats once more: `a{1,3}+` is `(?:a{1,3})+`.
            mode = self._take(r"\??" if sign[0] == "{" else r"[?+]?")
            is_plain = (atom.minimum, atom.maximum, atom.keeps) == (1, 1, False)
            inner = atom if is_plain else _Atom(((atom,),))
            atom = dataclasses.replace(
                inner,
                minimum=minimum,
                maximum=maximum,
                keeps=mode == "+",
                letter=inner.letter * (minimum > 0),
            )
        return atom
