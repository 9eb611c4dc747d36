"""Benchmarks generated from any text for the policy's own tokenizer: RULER and the needle grid.

    ruler_TASK_LENGTH       one of RULER's tasks at one length, such as ruler_vt_16384
    needle_LENGTH_...       the needle grid at these lengths, such as needle_4096_16384_65536
    needle                  the needle grid at lengths from 4K to 128K

1. A length counts tokens of the policy, with its chat layout: --max_input=16384 does not truncate a
   prompt of ruler_vt_16384.
2. The needle grid has depths at every tenth of the text.
3. All *.txt files of the folder are the prose that hides needles. All *.jsonl files are the
   questions of ruler_qa_LENGTH (see ruler.read_rows). The other tasks need no files.
4. Each length and item has its own seed, the same in every run.
"""

from __future__ import annotations

import pathlib

from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.generated import ruler
from spell_jax.evaluation.generated.haystack import Source
from spell_jax.policy.tokenizer_base import Tokenizer

FORMS = ("ruler_TASK_LENGTH", "needle_LENGTH_...")
FAMILIES = tuple(form.partition("_")[0] for form in FORMS)


def family(name: str) -> str | None:
    """Family of a benchmark's name, or None if the benchmark is not generated."""
    first = name.partition("_")[0]
    return first if first in FAMILIES else None


def load(
    name: str, folder: str | pathlib.Path, limit: int | None, tokenizer: Tokenizer | None
) -> Benchmark:
    """Generate a benchmark by its name.

    Args:
      name: name in one of `FORMS`; see the module docstring.
      folder: folder of the texts that the benchmark needs, if any.
      limit: number of questions; None makes 500, or one per cell of the grid.
      tokenizer: tokenizer of the policy.

    Raises:
      ValueError: if the name has another form, an unknown task, or a length that is not a number or
        too short; if there is no tokenizer; if a text is empty, not UTF-8 or too short.
      FileNotFoundError: if the folder has none of the files that the benchmark needs.
    """
    if tokenizer is None:
        raise ValueError(f"benchmark {name!r}: its lengths are in tokens, it needs a tokenizer")
    make = _make_ruler if family(name) == "ruler" else _make_needle
    try:
        return make(name, folder, limit, tokenizer)
    except ValueError as error:
        raise ValueError(f"benchmark {name!r}: {error}") from error


def _make_ruler(
    name: str, folder: str | pathlib.Path, limit: int | None, tokenizer: Tokenizer
) -> Benchmark:
    task, _, length = name.removeprefix("ruler").removeprefix("_").rpartition("_")
    if task not in ruler.TASKS:
        tasks = ", ".join(ruler.TASKS)
        raise ValueError(f"must be ruler_TASK_LENGTH, such as ruler_vt_16384; TASK is {tasks}")
    source = _source(_number(length), tokenizer, folder, task in ruler.PROSE_TASKS)
    rows = ruler.read_rows(folder) if task == "qa" else ()
    return ruler.ruler(task, source, rows, limit or ruler.ITEMS)


def _make_needle(
    name: str, folder: str | pathlib.Path, limit: int | None, tokenizer: Tokenizer
) -> Benchmark:
    lengths = sorted(map(_number, name.split("_")[1:])) or ruler.GRID_LENGTHS
    if len(set(lengths)) < len(lengths):
        raise ValueError("must have each length once")
    return ruler.needle(name, _source(0, tokenizer, folder, True), lengths, limit)


def _source(
    length: int, tokenizer: Tokenizer, folder: str | pathlib.Path, with_prose: bool
) -> Source:
    text = _read_prose(folder) if with_prose else ""
    return Source.of(length, tokenizer.count, lambda prompt: len(tokenizer.chat(prompt)), text)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"length {text!r}: must be a number of tokens, such as 16384")
    return int(text)


def _read_prose(folder: str | pathlib.Path) -> str:
    """Read and join all *.txt files of a folder, in the order of their names."""
    paths = sorted(pathlib.Path(folder).glob("*.txt"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no *.txt there, the prose in which needles are hidden")
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    return "\n".join(texts)
