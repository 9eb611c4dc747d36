"""Small files that unpack to large ones, or lead a reader in circles."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

MIB = 1 << 20
CATALOG = b"<</Type/Catalog/Pages 2 0 R>>"
FONT = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
WORDS = b"BT /F1 12 Tf (aaa) Tj ET\n"


def write_long_line(path: Path, mebibytes: int, before: bytes, after: bytes) -> None:
    """Write a .gz file with a line of `mebibytes` between other lines."""
    with gzip.open(path, "wb", 9) as file:
        file.write(before + b'{"text": "')
        for _ in range(mebibytes):
            file.write(b"a" * MIB)
        file.write(b'"}\n' + after)


def make_pdf(objects: list[bytes]) -> bytes:
    """Make a PDF of objects, numbered from 1."""
    data, starts = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        starts.append(len(data))
        data += b"%d 0 obj" % number + content + b"endobj\n"
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    size = len(objects) + 1
    head = b"xref\n0 %d\n0000000000 65535 f \n" % size
    return (
        data
        + head
        + table
        + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
        % (
            size,
            len(data),
        )
    )


def pages(kids: bytes) -> bytes:
    return b"<</Type/Pages/Count 1/Kids[" + kids + b"]>>"


def page(contents: bytes, entries: bytes = b"") -> bytes:
    resources = b"/Resources<</Font<</F1 3 0 R>>" + entries + b">>/MediaBox[0 0 300 100]"
    return b"<</Type/Page/Parent 2 0 R" + resources + b"/Contents " + contents + b">>"


def packed(raw: bytes, levels: int = 1) -> bytes:
    """Make a stream of zlib within zlib."""
    for _ in range(levels):
        raw = zlib.compress(raw, 9)
    filters = b"[" + b"/FlateDecode" * levels + b"]"
    return b"<</Length %d/Filter%s>>stream\n" % (len(raw), filters) + raw + b"\nendstream"


def one_page(stream: bytes) -> bytes:
    return make_pdf([CATALOG, pages(b"4 0 R"), FONT, page(b"5 0 R"), stream])


def _doubled_pages() -> bytes:
    halves = [pages(b"%d 0 R %d 0 R" % (number, number)) for number in range(3, 40)]
    return make_pdf([CATALOG, *halves, page(b"99 0 R")])


def _many_parts() -> bytes:
    contents = page(b"[" + b"5 0 R " * 100_000 + b"]")
    return make_pdf([CATALOG, pages(b"4 0 R"), FONT, contents, packed(WORDS * 2000)])


# PDFs of less than 2 MB that must not be read to their end.
PDFS = {
    "a stream of 100 MB": lambda: one_page(packed(bytes(100 * MIB))),
    "streams within streams": lambda: one_page(packed(bytes(100 * MIB), 3)),
    "pages that hold themselves": lambda: make_pdf([CATALOG, pages(b"2 0 R")]),
    "pages that double": _doubled_pages,
    "a page of 100,000 parts": _many_parts,
    "nested lists": lambda: make_pdf([CATALOG, pages(b"[" * 100_000 + b"]" * 100_000)]),
    "a table of 3,000,000,000 objects": lambda: make_pdf([CATALOG, pages(b"")]).replace(
        b"/Size 3", b"/Size 3000000000"
    ),
}


def run_limited(program: str, mebibytes: int, *arguments: str) -> str:
    """Run Python code in a process with `mebibytes` beyond what it has after its first line.

    The first line imports; the other lines may take that much more address space. Returns the
    output.
    """
    imports, _, work = textwrap.dedent(program).strip().partition("\n")
    limit = (
        f"{imports}\nimport resource\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {mebibytes << 20},) * 2)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", limit + work, *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (120, 120)),
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout
