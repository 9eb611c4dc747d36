"""Text files: from bytes to text, the same for the trainer and for data_pipeline."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path

SUFFIXES = (".txt", ".md")
# Types of a folder's files that only data_pipeline.build reads.
BUILD_SUFFIXES = (".html", ".htm", ".pdf", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


class Unusable(Exception):
    """Error: a file cannot be read at all, or not any further.

    `reason` is the category that the file is counted under, such as "binary", "damaged" or "breaks
    off" (the rows before that are valid); `because` has the details.
    """

    def __init__(self, reason: str, because: str):
        super().__init__(reason, because)
        self.reason, self.because = reason, because

    def __str__(self) -> str:
        return f"{self.reason}, {self.because}"


def decode(data: bytes) -> str:
    """Decode UTF-8 (byte order mark optional) or UTF-16 (mark required); line ends become LF.

    Raises Unusable: "binary" if the text has NUL characters, or if bytes that are not UTF-8 include
    NUL bytes; "not UTF-8" for other bytes.
    """
    # Without a mark, UTF-16 cannot be told from binary data.
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in data and not utf16:
            raise Unusable("binary", "it has NUL bytes") from error
        raise Unusable("not UTF-8", f"{type(error).__name__}: {error}") from error
    if "\0" in text:
        raise Unusable("binary", "it has NUL bytes")
    # One kind of line end, because the borders of paragraphs and lines look for LF.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_file(source: object, path: Path) -> None:
    """Raise ValueError, with what to do instead, if a file has a text and not clusters."""
    name = path.name.lower()
    if path.suffix.lower() in SUFFIXES:
        folder = str(source)[: -len(path.name)] or "."
        raise ValueError(
            f"source = {str(source)!r}: must be the folder of the texts, such as {folder!r}, "
            "not one text"
        )
    if name.endswith(BUILD_SUFFIXES) and ".jsonl" not in name:
        raise ValueError(f"source = {str(source)!r}: must be built: {build_command(source)}")


def build_command(source: object) -> str:
    """Return what to type for a file or folder that only data_pipeline reads."""
    config = shlex.quote(f"--config=configs/data/folder.py:{source}:512")
    return (
        f"python -m data_pipeline.build {config} "
        "--out=runs/clusters (512: sampler.max_prompt of the run), then "
        "--config.data.source=runs/clusters"
    )
