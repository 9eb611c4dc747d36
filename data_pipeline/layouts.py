"""File formats: parsers from the bytes of a source's file to rows.

Small formats are parsed by a function from bytes to rows. Formats with millions of rows (.jsonl,
.parquet) are streamed from an open file. An unusable row has a `problem`. Rows of JSON and Parquet
are read by spell_jax/data/row_files.py and spell_jax/runtime/files/jsonl.py.
"""

from __future__ import annotations

import codecs
import io
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from data_pipeline.filter import describe_error
from spell_jax.data import row_files
from spell_jax.data.text_files import Unusable, decode
from spell_jax.runtime.files.jsonl import json_lines

# Limits of a PDF. A page takes 0.01 to 0.2 s.
PDF_CHARACTERS, PDF_SECONDS = 1 << 28, 600

# Replaced by spaces, so that no two words are joined.
_CONTROLS = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), " ")
# Vertical tab, form feed and "next line" (U+0085) end a line too.
_CONTROLS |= {0x09: "\t", 0x0A: "\n", 0x0B: "\n", 0x0C: "\n", 0x85: "\n"}
_SURROGATE = re.compile(r"[\ud800-\udfff]")

# Without "head": its end tag is optional, and without one the whole page would be hidden.
# "ix:header" has the machine-readable facts of inline XBRL.
_HIDDEN = (
    *("title", "script", "style", "noscript", "template", "nav", "svg", "iframe", "object"),
    "ix:header",
)
# Elements that HTML lets end without a tag, or that have no content.
_NO_END_TAG = (
    *("body", "br", "col", "dd", "dt", "embed", "head", "hr", "html", "img", "input", "li", "link"),
    *("meta", "option", "p", "source", "tbody", "td", "tfoot", "th", "thead", "tr", "wbr"),
)
# Elements that a browser sets apart by an empty line, and elements that begin a line.
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
_BLANK_LINES = re.compile(r"\n\s*\n")
_TWO_BREAKS = re.compile(r"\v\s*\v")  # "\v" encodes <br>, "\f" a paragraph border

_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_ONES = "one|two|three|four|five|six|seven|eight|nine"
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_NUMBER = rf"(?:\d{{1,4}}|[ivxlcdm]{{1,9}}|(?:{_TENS})(?:[- ](?:{_ONES}))?|{_TEENS}|{_ONES})"
# After the number the line ends, or punctuation or a capital follows. So "Chapter 3 tells how" is
# not a heading.
_TITLE = r"(?:[ \t]*[.:–—-].{0,100}|[ \t]+[\"“'‘]?[A-Z].{0,100})?"
_CHAPTER = re.compile(rf"[ \t]*(?i:chapter[ \t]+{_NUMBER}){_TITLE}[ \t]*")
_MARKDOWN = re.compile(r"#{1,2}[ \t]+\S.*")
_LETTER = re.compile(r"[^\W_]")


@dataclass(frozen=True)
class SourceRow:
    """Row of a file, or a whole file."""

    number: int | None  # from 0; None if the row is the whole file
    text: str = ""  # after `clean`; may be empty
    quality: float | None = None  # NaN if the score is not a number
    problem: str = ""  # reason why the row has no text


def clean(text: str) -> str:
    """Strip a text; line ends become newlines, controls spaces, and lone surrogates U+FFFD."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROLS)
    return _SURROGATE.sub("\ufffd", text).strip()


def read_text(data: bytes) -> list[SourceRow]:
    """Parse a .txt or .md file."""
    return [SourceRow(None, clean(decode(data)))]


def text_row(number: int, data: bytes) -> SourceRow:
    """Parse the text of a record."""
    try:
        return SourceRow(number, clean(decode(data)))
    except Unusable as error:
        return SourceRow(number, problem=str(error))


def read_html(data: bytes) -> list[SourceRow]:
    """Extract the text that a browser would show, in lines; table rows become "| a | b |"."""
    page = _Page()
    try:
        page.feed(decode(data))
        page.close()
    except AssertionError as error:  # raised by HTMLParser when it cannot parse a page
        raise Unusable("damaged", describe_error(error)) from error
    return [SourceRow(None, clean(_in_paragraphs("".join(page.parts))))]


def read_pdf(data: bytes) -> list[SourceRow]:
    """Extract the text of a PDF's pages, separated by blank lines."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    try:
        reader = PdfReader(io.BytesIO(data))
        # Many PDFs are encrypted only to forbid printing. An empty password opens them.
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unusable("encrypted", "it needs a password")
        pages = list(_page_texts(reader))
    except Unusable:
        raise
    except DependencyError as error:
        raise Unusable("encrypted", describe_error(error)) from error
    except Exception as error:  # a damaged file may raise anything
        raise Unusable("damaged", describe_error(error)) from error
    return [SourceRow(None, clean("\n\n".join(page for page in pages if page)))]


def _page_texts(reader: Any) -> Iterator[str]:
    """Yield the texts of a PDF's pages.

    Raises Unusable if the texts together have more than PDF_CHARACTERS characters or take more than
    PDF_SECONDS seconds.
    """
    # pypdf limits the size of a stream and the number of pages, but not their product: a file of a
    # megabyte can repeat a large stream on 100,000 pages.
    # Time of this thread: the same file must pass on a busy machine, too.
    characters, end = 0, time.thread_time() + PDF_SECONDS
    for number, page in enumerate(reader.pages):
        text = page.extract_text().strip()
        yield text
        characters += len(text)
        if characters > PDF_CHARACTERS:
            raise Unusable("oversize", f"more than {PDF_CHARACTERS} characters on {number} pages")
        if time.thread_time() > end:
            raise Unusable("oversize", f"more than {PDF_SECONDS} s for {number} pages")


def read_docmath(data: bytes, kind: row_files.FileKind, largest: int) -> list[SourceRow]:
    """Parse a file of DocMath-Eval: a row per question, with the paragraphs of its report.

    Blank lines separate paragraphs, and no paragraph contains one. Raises Unusable if the file is
    damaged, has another layout, or unpacks to more than `largest` bytes.
    """
    try:
        rows = list(row_files.read(io.BytesIO(data), kind, largest=largest))
    except Exception as error:  # a damaged file may raise anything
        raise Unusable("damaged", describe_error(error)) from error
    # One such row is enough: a file of another layout has none, and single bad rows are counted.
    required_fields = {"question_id", "question", "paragraphs"}
    if not any(isinstance(row, dict) and required_fields <= row.keys() for row in rows):
        first = rows[0] if rows else None
        contents = f"has {sorted(first)}" if isinstance(first, dict) else type(first).__name__
        because = f"rows must have {sorted(required_fields)}, the first {contents}"
        raise Unusable("another layout", because[:500])
    return [_docmath_row(number, row) for number, row in enumerate(rows)]


def _docmath_row(number: int, row: Any) -> SourceRow:
    paragraphs = row.get("paragraphs") if isinstance(row, dict) else None
    if not isinstance(paragraphs, list) or not all(isinstance(p, str) for p in paragraphs):
        return SourceRow(number, problem="paragraphs must be a list of strings")
    # The cut stage splits the report at blank lines again.
    texts = (_BLANK_LINES.sub("\n", clean(paragraph)) for paragraph in paragraphs)
    return SourceRow(number, "\n\n".join(text for text in texts if text))


def read_fields(data: bytes, field: str) -> list[SourceRow]:
    """Parse the texts of a field, at any depth, in a JSON value or in JSON lines."""
    try:
        texts = list(field_texts(row_files.json_values(decode(data)), (field,)))
    except (ValueError, RecursionError) as error:
        raise Unusable("damaged", describe_error(error)) from error
    if not texts:
        raise Unusable("another layout", f"it has no text in a field {field!r}")
    return [
        SourceRow(number, clean(" ".join(strings))) for number, (_, strings) in enumerate(texts)
    ]


def field_texts(value: Any, fields: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (field, strings of one text) for the named fields, at any depth of a JSON value.

    Within a field, a string or a list of strings is one text; other lists and objects are searched.
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
    elif isinstance(value, list) and all(isinstance(part, str) for part in value):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            # A string in a mixed list is no text: HotpotQA's "context" is a list of [title,
            # sentences].
            if isinstance(value, dict) or not isinstance(part, str):
                yield from _strings(part)


# No library for this: trafilatura drops most rows of a filing's tables, html2text and inscriptis
# half of them. A tree loses deeply nested pages (lxml), needs minutes for one (selectolax), or is
# slow to change into rows "| a | b |" (resiliparse).
class _Page(HTMLParser):
    """HTML parser that collects the visible text, in linear time at any nesting depth.

    At the end of a hidden element or a table row, `parts` is cut or joined from where it began.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._preformatted = 0
        self._hidden = ("", 0, 0)  # tag, number of open elements of this tag, start in `parts`
        # For each open table, the starts of the cells in the current row. None: the row contains
        # another table, so the table serves page layout and holds no data.
        self._tables: list[list[int] | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        name, depth, start = self._hidden
        if depth:
            # Only the tag that opened the hidden part is counted: other tags inside may lack an
            # end.
            self._hidden = (name, depth + (tag == name), start)
        elif _is_hidden(tag, dict(attrs)):
            self._hidden = (tag, 1, len(self.parts))
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
        name, depth, start = self._hidden
        if depth and tag == name:
            self._hidden = (name, depth - 1, start)
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
        # One cell is layout, not data: its text stays as it is.
        if cells is None or len(cells) < 2:
            return
        ends = [*cells[1:], len(self.parts)]
        spans = zip(cells, ends, strict=True)
        texts = [" ".join("".join(self.parts[start:end]).split()) for start, end in spans]
        del self.parts[cells[0] :]
        if any(texts):
            self.parts.append(f"\n| {' | '.join(texts)} |\n")


def _is_hidden(tag: str, attributes: Mapping[str, str | None]) -> bool:
    if tag in _HIDDEN:
        return True
    # The end tags of such elements are optional, so the end of the hidden part is unknown.
    if tag in _NO_END_TAG:
        return False
    style = (attributes.get("style") or "").replace(" ", "").lower()
    return "hidden" in attributes or "display:none" in style


def _in_paragraphs(text: str) -> str:
    """Format the text as paragraphs: no blank lines within, one blank line between."""
    paragraphs = []
    for paragraph in _TWO_BREAKS.sub("\f", text).replace("\v", "\n").split("\f"):
        lines = [line.strip() for line in paragraph.split("\n")]
        paragraphs.append("\n".join(line for line in lines if line))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def json_rows(
    stream: io.BufferedReader, text: str, quality: str, limit: int
) -> Iterator[SourceRow]:
    """Stream the rows of a .jsonl file: strings, or objects with a text. Blank lines are skipped.

    `stream` has uncompressed bytes. `text` and `quality` name an object's fields; without `text`,
    its field "text" is used. A line over `limit` bytes gives a row without text.
    """
    number = 0
    try:
        if stream.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise Unusable("not UTF-8", "JSON lines must be UTF-8, it begins as UTF-16 does")
        for number, value, problem in json_lines(stream, limit):
            if problem:
                yield SourceRow(number - 1, problem=problem)
            else:
                yield _json_row(number - 1, value, text, quality)
    except Unusable:
        raise
    except Exception as error:  # each file system raises its own exceptions
        raise Unusable("breaks off", f"after line {number}: {describe_error(error)}") from error


def _json_row(number: int, fields: Any, text: str, quality: str) -> SourceRow:
    if isinstance(fields, str):
        return SourceRow(number, clean(fields))
    if not isinstance(fields, dict):
        return SourceRow(
            number, problem=f"must be a string or an object, is {type(fields).__name__}"
        )
    name = text if text in fields else "text"
    field_text = fields.get(name)
    if not isinstance(field_text, str):
        return SourceRow(
            number, problem=f"its {name!r} must be a string, is {type(field_text).__name__}"
        )
    return SourceRow(number, clean(field_text), as_quality(fields.get(quality)))


def as_quality(value: Any) -> float | None:
    """Convert a score to float: None if there is none, NaN if it is not a number."""
    if value is None:
        return None
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    try:
        return float(value) if is_number else math.nan
    except OverflowError:
        return math.nan


def parquet_groups(
    file: BinaryIO, text: str, quality: str, strict: bool
) -> tuple[list[str], list[int]]:
    """Return the columns to read, [text] or [text, quality], and the row counts of row groups.

    If `strict`, both columns must exist; else a missing column `text` is replaced by "text".
    """
    try:
        parquet = pq.ParquetFile(file)
        there = parquet.schema_arrow.names
        rows = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    except Exception as error:
        raise Unusable("damaged", describe_error(error)) from error
    if text not in there and not strict:
        text = "text"
    if text not in there or (strict and quality not in there):
        required_columns = f"{text!r} and {quality!r}" if strict else f"{text!r}"
        raise Unusable("another layout", f"must have {required_columns}, has {there}"[:500])
    return [text, quality] if quality in there else [text], rows


def parquet_rows(
    file: BinaryIO, columns: Sequence[str], group: int, first: int, strict: bool
) -> Iterator[SourceRow]:
    """Stream the rows of one row group, a few at a time.

    `columns` come from `parquet_groups`; `first` is the number of the group's first row in the
    file. If `strict`, a row without a score gets the score NaN.
    """
    number = first
    try:
        for row in row_files.parquet_rows(file, columns, [group]):
            text, *scores = (row[name] for name in columns)
            quality = as_quality(scores[0]) if scores else None
            if strict and quality is None:
                quality = math.nan
            if isinstance(text, str):
                yield SourceRow(number, clean(text), quality)
            else:
                problem = f"its {columns[0]!r} must be a string, is {type(text).__name__}"
                yield SourceRow(number, problem=problem)
            number += 1
    except Exception as error:  # a damaged file may raise anything
        because = f"row group {group}, row {number}: {describe_error(error)}"
        raise Unusable("breaks off", because) from error


def chapters(text: str) -> list[str]:
    """Cut a text before its chapter headings; a text without headings stays whole.

    Headings are Markdown's "# ..." and "## ...", and lines such as "CHAPTER IV" or "Chapter 12.
    Title" that do not directly follow a line of words. Headings with no words between them open one
    chapter together. Only white space at the cuts is lost.
    """
    pieces: list[str] = []
    start = position = 0
    may_be_heading, has_words = True, False
    for line in text.split("\n"):
        heading = _MARKDOWN.fullmatch(line) or (may_be_heading and _CHAPTER.fullmatch(line))
        if heading and has_words:
            pieces.append(text[start:position])
            start, has_words = position, False
        may_be_heading = bool(heading) or not _LETTER.search(line)
        has_words = has_words or not may_be_heading
        position += len(line) + 1
    pieces.append(text[start:])
    if not has_words and len(pieces) > 1:
        last = pieces.pop()
        pieces[-1] += last
    return [piece.strip() for piece in pieces]
