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

import dataclasses
import pathlib
from collections.abc import Callable

from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.generated import ruler
from spell_jax.policy.tokenizer_base import Tokenizer

FAMILIES = ("ruler", "needle")
FORMS = ("ruler_TASK_LENGTH", "needle_LENGTH_...")
SEED = 0


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
      limit: number of questions, at least 1; None makes 500, or one per cell of the grid.
      tokenizer: tokenizer of the policy.

    Raises:
      ValueError: if the name has another form, an unknown task, or a length that is not a number or
        too short; if there is no tokenizer; if a text is empty, not UTF-8 or too short.
      FileNotFoundError: if the folder has none of the files that the benchmark needs.
    """
    if tokenizer is None:
        raise ValueError(f"benchmark {name!r}: its lengths are in tokens, it needs a tokenizer")
    try:
        if family(name) == "ruler":
            return _load_ruler(name, folder, limit, tokenizer)
        return _load_needle(name, folder, limit, tokenizer)
    except ValueError as error:
        raise ValueError(f"benchmark {name!r}: {error}") from error


def _load_ruler(
    name: str, folder: str | pathlib.Path, limit: int | None, tokenizer: Tokenizer
) -> Benchmark:
    task, _, length = name.removeprefix("ruler").removeprefix("_").rpartition("_")
    if task not in ruler.TASKS:
        tasks = ", ".join(ruler.TASKS)
        raise ValueError(f"must be ruler_TASK_LENGTH, such as ruler_vt_16384; TASK is {tasks}")
    return ruler.ruler(
        task,
        SEED,
        _number(length),
        tokenizer.count,
        count_prompt=_count_chat(tokenizer),
        text=_read_prose(folder) if task in ruler.PROSE_TASKS else "",
        rows=ruler.read_rows(folder) if task == "qa" else (),
        items=limit or ruler.ITEMS,
    )


def _load_needle(
    name: str, folder: str | pathlib.Path, limit: int | None, tokenizer: Tokenizer
) -> Benchmark:
    lengths = [_number(text) for text in name.split("_")[1:]]
    if len(set(lengths)) < len(lengths):
        raise ValueError("must have each length once")
    made = ruler.needle(
        SEED,
        tokenizer.count,
        _read_prose(folder),
        count_prompt=_count_chat(tokenizer),
        lengths=sorted(lengths) or ruler.GRID_LENGTHS,
        items=limit,
    )
    return dataclasses.replace(made, name=name)


def _count_chat(tokenizer: Tokenizer) -> Callable[[str], int]:
    return lambda prompt: len(tokenizer.chat(prompt))


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
