"""What the files of a source say: bytes in, rows out.

1. A format that is read whole (.txt, .md, .html, .pdf, .json) is a function from bytes to rows; one
   that holds millions of rows (.jsonl, .parquet) is read from an open file, row by row.
2. A row has a text and perhaps a score, or it says why it is of no use.
3. A file of no use at all raises Unusable, with the reason that it is counted under.
4. Line ends become newlines. Other control characters but the tab become a space each, so that
   no two words are joined; lone surrogates, which UTF-8 cannot write, become U+FFFD. The rest of a
   text is left as it was.
5. A text may be cut at its chapter headings. All of it is kept.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from data_pipeline.filter import describe

BATCH_ROWS = 256  # of a row group that are in memory at a time

_CONTROLS = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), " ")
# Vertical tab, form feed and next line end a line.
_CONTROLS |= {0x09: "\t", 0x0A: "\n", 0x0B: "\n", 0x0C: "\n", 0x85: "\n"}
_SURROGATE = re.compile(r"[\ud800-\udfff]")

# "head" is not among them: its end may be left out, and the page would be taken for a part of it.
_UNSEEN = (
    *("title", "script", "style", "noscript", "template", "nav", "svg", "iframe", "object"),
    "ix:header",  # of inline XBRL: facts for machines
)
_ENDLESS = (
    *("body", "br", "col", "dd", "dt", "embed", "head", "hr", "html", "img", "input", "li", "link"),
    *("meta", "option", "p", "source", "tbody", "td", "tfoot", "th", "thead", "tr", "wbr"),
)
_PARAGRAPHS = (
    *("blockquote", "dl", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "ol", "p", "pre"),
    *("table", "ul"),
)
_LINES = (
    *("address", "article", "aside", "body", "caption", "center", "dd", "details", "div", "dt"),
    *("fieldset", "figcaption", "footer", "form", "header", "li", "main", "option", "section"),
    *("summary", "td", "th", "tr"),
)
_SPACES = re.compile(r"\s+")
_TWO_BREAKS = re.compile(r"\v\s*\v")  # "\v" stands for <br>, "\f" for the border of a paragraph

_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_ONES = "one|two|three|four|five|six|seven|eight|nine"
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_NUMBER = rf"(?:\d{{1,4}}|[ivxlcdm]{{1,9}}|(?:{_TENS})(?:[- ](?:{_ONES}))?|{_TEENS}|{_ONES})"
# A number stands alone, or a sign or a capital follows: "Chapter 3 tells how" is no heading.
_TITLE = r"(?:[ \t]*[.:–—-].{0,100}|[ \t]+[\"“'‘]?[A-Z].{0,100})?"
_CHAPTER = re.compile(rf"[ \t]*(?i:chapter[ \t]+{_NUMBER}){_TITLE}[ \t]*")
_MARKDOWN = re.compile(r"#{1,2}[ \t]+\S.*")
_LETTER = re.compile(r"[^\W_]")


class Unusable(Exception):
    """Nothing of a file, or nothing further, can be read.

    Attributes:
      reason: a few words, to be counted.
      because: what was met.
    """

    def __init__(self, reason: str, because: str):
        super().__init__(reason, because)
        self.reason, self.because = reason, because


@dataclass(frozen=True)
class Row:
    """One of a file's rows, or all of a file.

    Attributes:
      number: 0, 1, ... in the file; None: the file has no rows.
      text: clean and stripped; may be empty.
      quality: None: no score; NaN: one that is not a number.
      problem: why it has no text; "": it has one.
    """

    number: int | None
    text: str = ""
    quality: float | None = None
    problem: str = ""


def clean(text: str) -> str:
    """A text with newlines as its line ends, without control characters, stripped."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROLS)
    return _SURROGATE.sub("\ufffd", text).strip()


# ------------------------------------------------------------------------------ files read whole


def read_text(data: bytes) -> list[Row]:
    """The text of a .txt or .md file.

    Raises:
      Unusable: "binary", "not UTF-8".
    """
    return [Row(None, clean(_decode(data)))]


def read_html(data: bytes) -> list[Row]:
    """What a browser would show, in lines; a table's rows as "| a | b |".

    Raises:
      Unusable: "binary", "not UTF-8", "damaged".
    """
    text = _decode(data)
    try:
        page = _Page()
        page.feed(text)
        page.close()
    except AssertionError as error:  # how the parser says that it gives up
        raise Unusable("damaged", describe(error)) from error
    return [Row(None, clean(_in_paragraphs("".join(page.parts))))]


def read_pdf(data: bytes) -> list[Row]:
    """The text of a PDF's pages, blank lines between them.

    Raises:
      Unusable: "encrypted", "damaged".
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    try:
        reader = PdfReader(io.BytesIO(data))
        # Many are encrypted against printing only: an empty password opens them.
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unusable("encrypted", "it needs a password")
        pages = [page.extract_text().strip() for page in reader.pages]
    except Unusable:
        raise
    except DependencyError as error:
        raise Unusable("encrypted", describe(error)) from error
    except Exception as error:  # a damaged file may raise anything
        raise Unusable("damaged", describe(error)) from error
    return [Row(None, clean("\n\n".join(page for page in pages if page)))]


def read_docmath(data: bytes) -> list[Row]:
    """The documents of DocMath-Eval's JSON, a row a question; questions and answers are dropped.

    Raises:
      Unusable: "binary", "not UTF-8", "damaged", "another layout".
    """
    try:
        rows = json.loads(_decode(data))
    except (ValueError, RecursionError) as error:
        raise Unusable("damaged", describe(error)) from error
    if not isinstance(rows, list) or not rows:
        raise Unusable("another layout", f"must be a list of questions, is {type(rows).__name__}")
    needed = {"question_id", "question", "paragraphs"}
    if not any(isinstance(row, dict) and needed <= row.keys() for row in rows):
        first = f"has {sorted(rows[0])}" if isinstance(rows[0], dict) else type(rows[0]).__name__
        because = f"rows must have {sorted(needed)}, the first {first}"
        raise Unusable("another layout", because[:500])
    return [_docmath_row(number, row) for number, row in enumerate(rows)]


def read_fields(data: bytes, field: str) -> list[Row]:
    """The texts under a field, wherever it lies in a JSON value or in the values of JSON's lines.

    Raises:
      Unusable: "binary", "not UTF-8", "damaged", "another layout".
    """
    try:
        values = json_values(_decode(data))
        parts = [parts for value in values for _, parts in field_texts(value, (field,))]
    except (ValueError, RecursionError) as error:
        raise Unusable("damaged", describe(error)) from error
    if not parts:
        raise Unusable("another layout", f"it has no text in a field {field!r}")
    return [Row(number, clean(" ".join(some))) for number, some in enumerate(parts)]


def json_values(content: str) -> list[Any]:
    """The JSON value that a text is, or else those of its lines.

    Raises:
      ValueError: it is neither; names the first line that is none.
    """
    try:
        return [json.loads(content)]
    except json.JSONDecodeError:
        values = []
        for number, line in enumerate(content.split("\n"), 1):
            try:
                values += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        return values


def field_texts(value: Any, fields: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(field, the strings of a text) of what lies under the fields, anywhere in a JSON value.

    Under a field a string is a text; so is a list of strings as a whole; lists and objects around
    them are walked through. A string that has lists beside it, as a title in HotpotQA's "context",
    is none.
    """
    if isinstance(value, list):
        for part in value:
            yield from field_texts(part, fields)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name in fields:
                yield from ((name, strings) for strings in _strings(part))
            else:
                yield from field_texts(part, fields)


def _strings(value: Any) -> Iterator[list[str]]:
    if isinstance(value, str):
        yield [value]
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list) and all(isinstance(part, str) for part in value):
        yield value
    elif isinstance(value, list):
        for part in value:
            if not isinstance(part, str):
                yield from _strings(part)


def _docmath_row(number: int, row: Any) -> Row:
    paragraphs = row.get("paragraphs") if isinstance(row, dict) else None
    if not isinstance(paragraphs, list) or not all(isinstance(p, str) for p in paragraphs):
        return Row(number, problem="paragraphs must be a list of strings")
    return Row(number, clean("\n\n".join(paragraphs)))


def _decode(data: bytes) -> str:
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in data and not utf16:
            raise Unusable("binary", "it has NUL bytes") from error
        raise Unusable("not UTF-8", describe(error)) from error
    if "\0" in text:
        raise Unusable("binary", "it has NUL bytes")
    return text


class _Page(HTMLParser):
    """Hears tags and texts one after the other, which is linear in the page however deep it nests.

    `parts` is the text so far. What turns out to be unseen, or a row of a table, is known by where
    in `parts` it began, and taken out or put in order when it ends.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._preformatted = 0
        self._unseen = ("", 0, 0)  # tag, how many of it are open, where it began
        # Of each open table where its row's cells began; None: a row that has a table in it, which
        # gives order to a page and not to numbers.
        self._tables: list[list[int] | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        name, depth, start = self._unseen
        if depth:
            self._unseen = (name, depth + (tag == name), start)
        elif _is_unseen(tag, dict(attrs)):
            self._unseen = (tag, 1, len(self.parts))
        if tag == "br":
            self.parts.append("\v")
        elif tag == "pre":
            self._preformatted += 1
        elif tag == "tr":
            self._end_row()
        elif tag == "table":
            if self._tables:
                self._tables[-1] = None
            self._tables.append([])
        elif tag in ("td", "th") and self._tables:
            cells = self._tables[-1]
            if cells is not None:
                cells.append(len(self.parts))
        self._border(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._preformatted = max(0, self._preformatted - 1)
        elif tag in ("tr", "table"):
            self._end_row()
        if tag == "table" and self._tables:
            self._tables.pop()
        name, depth, start = self._unseen
        if depth and tag == name:
            self._unseen = (name, depth - 1, start)
            if depth == 1:
                del self.parts[start:]
        self._border(tag)

    def handle_data(self, data: str) -> None:
        self.parts.append(data if self._preformatted else _SPACES.sub(" ", data))

    def _border(self, tag: str) -> None:
        if tag in _PARAGRAPHS:
            self.parts.append("\f")
        elif tag in _LINES:
            self.parts.append("\n")

    def _end_row(self) -> None:
        if not self._tables:
            return
        cells, self._tables[-1] = self._tables[-1], []
        if cells is None or len(cells) < 2:
            return
        ends = [*cells[1:], len(self.parts)]
        spans = zip(cells, ends, strict=True)
        texts = [" ".join("".join(self.parts[start:end]).split()) for start, end in spans]
        del self.parts[cells[0] :]
        if any(texts):
            self.parts.append(f"\n| {' | '.join(texts)} |\n")


def _is_unseen(tag: str, attributes: Mapping[str, str | None]) -> bool:
    if tag in _UNSEEN:
        return True
    # The end of these may be left out, so where they stop being hidden is not known.
    if tag in _ENDLESS:
        return False
    style = (attributes.get("style") or "").replace(" ", "").lower()
    return "hidden" in attributes or "display:none" in style


def _in_paragraphs(text: str) -> str:
    """Lines of one paragraph follow each other, a blank line is between two."""
    paragraphs = []
    for paragraph in _TWO_BREAKS.sub("\f", text).replace("\v", "\n").split("\f"):
        lines = [line.strip() for line in paragraph.split("\n")]
        paragraphs.append("\n".join(line for line in lines if line))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


# --------------------------------------------------------------------------- files with many rows


def json_rows(stream: BinaryIO, text: str, quality: str, limit: int) -> Iterator[Row]:
    """The rows of a .jsonl file: strings, or objects with a text; blank lines are passed over.

    Args:
      stream: buffered; the file's bytes, not compressed.
      text, quality: names of an object's fields; "text" is used where `text` is missing.
      limit: bytes of a line, which is held in memory; a longer one is a row without a text.

    Raises:
      Unusable: "not UTF-8" (UTF-16), "breaks off": the rows before were good.
    """
    number = -1
    while line := _line(stream, limit + 1, number):
        number += 1
        if number == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise Unusable("not UTF-8", "JSON lines must be UTF-8, it begins as UTF-16 does")
        if number == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) > limit:
            while line and not line.endswith(b"\n"):
                line = _line(stream, limit, number)
            yield Row(number, problem=f"its line is longer than {limit} bytes")
        elif line.strip():
            try:
                fields = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                yield Row(number, problem=describe(error))
                continue
            yield _json_row(number, fields, text, quality)


def _json_row(number: int, fields: Any, text: str, quality: str) -> Row:
    if isinstance(fields, str):
        return Row(number, clean(fields))
    if not isinstance(fields, dict):
        return Row(number, problem=f"must be a string or an object, is {type(fields).__name__}")
    name = text if text in fields else "text"
    found = fields.get(name)
    if not isinstance(found, str):
        return Row(number, problem=f"its {name!r} must be a string, is {type(found).__name__}")
    return Row(number, clean(found), as_quality(fields.get(quality)))


def _line(stream: BinaryIO, limit: int, last: int) -> bytes:
    try:
        return stream.readline(limit)
    except Exception as error:
        raise Unusable("breaks off", f"behind line {last + 1}: {describe(error)}") from error


def as_quality(value: Any) -> float | None:
    """A score as float; None: there is none; NaN: it is not a number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def parquet_groups(
    file: BinaryIO, text: str, quality: str, strict: bool
) -> tuple[list[str], list[int]]:
    """Which columns of a Parquet file to read, and how many rows its row groups have.

    Args:
      text, quality: names of columns; "text" is used where `text` is missing.
      strict: both must be there by these names.

    Returns:
      [text column], or [text column, quality column]; and the rows of each group.

    Raises:
      Unusable: "damaged"; "another layout".
    """
    try:
        parquet = pq.ParquetFile(file)
        there = parquet.schema_arrow.names
        rows = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    except Exception as error:
        raise Unusable("damaged", describe(error)) from error
    if text not in there and not strict:
        text = "text"
    if text not in there or (strict and quality not in there):
        wanted = f"{text!r} and {quality!r}" if strict else f"{text!r}"
        raise Unusable("another layout", f"must have {wanted}, has {there}"[:500])
    return [text, quality] if quality in there else [text], rows


def parquet_rows(
    file: BinaryIO, columns: Sequence[str], group: int, first: int, strict: bool
) -> Iterator[Row]:
    """The rows of one row group, a few hundred in memory at a time.

    Args:
      columns: as `parquet_groups` gives them.
      first: number of the group's first row in the file.
      strict: a row without a score has one that is not a number.

    Raises:
      Unusable: "breaks off": the rows before were good.
    """
    number = first
    try:
        batches = pq.ParquetFile(file).iter_batches(BATCH_ROWS, [group], list(columns))
    except Exception as error:
        raise Unusable("breaks off", describe(error)) from error
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            values = [batch.column(name).to_pylist() for name in columns]
        except Exception as error:
            because = f"row group {group}, row {number}: {describe(error)}"
            raise Unusable("breaks off", because) from error
        for text, *scores in zip(*values, strict=True):
            quality = as_quality(scores[0]) if scores else None
            if strict and quality is None:
                quality = float("nan")
            if isinstance(text, str):
                yield Row(number, clean(text), quality)
            else:
                problem = f"its {columns[0]!r} must be a string, is {type(text).__name__}"
                yield Row(number, problem=problem)
            number += 1


# -------------------------------------------------------------------------------------- chapters


def chapters(text: str) -> list[str]:
    """A text in order, cut in front of its chapter headings; whole where it has none.

    Headings are Markdown's "# ..." and "## ...", and lines such as "CHAPTER IV" or "Chapter 12.
    Title" that do not follow a line of words. Headings with no words between them, such as a title,
    an author and "CHAPTER I", open one chapter together. Nothing but white space at the cuts is
    lost.
    """
    pieces: list[str] = []
    start = position = 0
    apart, worded = True, False
    for line in text.split("\n"):
        heading = _MARKDOWN.fullmatch(line) or (apart and _CHAPTER.fullmatch(line))
        if heading and worded:
            pieces.append(text[start:position])
            start, worded = position, False
        apart = bool(heading) or not _LETTER.search(line)
        worded = worded or not apart
        position += len(line) + 1
    pieces.append(text[start:])
    if not worded and len(pieces) > 1:
        last = pieces.pop()
        pieces[-1] += last
    return [piece.strip() for piece in pieces]
