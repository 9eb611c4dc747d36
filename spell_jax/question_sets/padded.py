"""Pads published questions with distractors to long ones (EAPO, section 4 "Training Dataset").

    python -m spell_jax.question_sets.padded --layout=musique --rows=DIR/musique*.jsonl
        --tokenizer=FOLDER --out=FILE.jsonl [--min_tokens=32768 --max_tokens=131072 --seed=0]

1. The documents of all rows (published.py) form a pool, each text once. Bad rows and unusable
   questions are logged or counted, and skipped.
2. A target length is sampled uniformly from --min_tokens to --max_tokens for each question.
   Distractors are added to its own documents in random order until the target is reached, but never
   over the maximum. A distractor that contains the answer (or an alias) as words is skipped and
   counted; numbers, yes and no may occur anywhere. With --min_tokens=0 no distractors are added.
3. The documents are shuffled. Questions are written in the layout of spell_jax/data/questions.py.
   The last line printed, also in FILE.summary.json, has all counts.

Random choices for a question depend only on the seed and its number. Only documents are counted:
leave room for the rest of the prompt and the answer. Use rows of training splits: nothing here
checks for benchmark data. The paper does not state its distractors; these are the other rows'
documents. The other half of its data, questions that a model writes about tables and prose of
Wikipedia pages, is made by `python -m spell_jax.question_sets.teacher`.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from spell_jax.data.questions import Question
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import find_folder
from spell_jax.question_sets.published import LAYOUTS, giveaways, read_row
from spell_jax.runtime import dataclass_flags, entry
from spell_jax.runtime.config import check_least
from spell_jax.runtime.files.jsonl import read_records, write_json, write_records
from spell_jax.selfplay.rules import normalize_answer


@dataclasses.dataclass(frozen=True)
class LongConfig:
    """Lengths of the padded questions.

    Attributes:
      min_tokens: Least number of tokens of a question's documents together [paper: 32K]. The target
        is sampled from `min_tokens` to `max_tokens`, both included. 0: no distractors are added.
      max_tokens: Largest number of tokens of a question's documents together [paper: 128K].
      seed: Seed of targets, distractors and document order.
    """

    min_tokens: int = 32_768
    max_tokens: int = 131_072
    seed: int = 0

    def __post_init__(self):
        check_least(self, "", min_tokens=0, max_tokens=max(1, self.min_tokens), seed=0)


class DocumentPool:
    """Documents of all rows; texts that differ only in case and white space are stored once."""

    def __init__(self, count_tokens: Callable[[str], int]):
        self.texts: list[str] = []
        self.tokens: list[int] = []  # of each text, including the line break after it
        self.repeated = 0  # added documents that were already present
        self._words: list[str] = []
        self._indices: dict[str, int] = {}
        self._count = count_tokens

    def add(self, text: str) -> int:
        """Add a document if it is new, and return its index in `texts`."""
        # Rows share paragraphs; a shared text is stored and counted once.
        index = self._indices.setdefault(" ".join(text.lower().split()), len(self.texts))
        if index < len(self.texts):
            self.repeated += 1
        else:
            self.texts.append(text)
            self.tokens.append(self._count(text + "\n"))
            # Normalized once, as each text is searched for many questions. Blanks at both ends make
            # a substring a match of whole words.
            self._words.append(f" {normalize_answer(text)} ")
        return index

    def contains(self, index: int, phrases: Sequence[str]) -> bool:
        """Return whether a document contains a normalized phrase of `phrases` as whole words."""
        return any(f" {phrase} " in self._words[index] for phrase in phrases)


class Builder:
    """Builder of long questions: call `read_rows`, then `questions`, then `summary`."""

    def __init__(self, config: LongConfig, count_tokens: Callable[[str], int]):
        self.config = config
        self.pool = DocumentPool(count_tokens)
        self.counts: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()  # reason -> number of unusable questions
        self._tasks: Counter[str] = Counter()
        self._lengths: list[int] = []
        # Questions without their documents, and the indices of these in the pool.
        self._drafts: list[tuple[Question, tuple[int, ...]]] = []

    def read_rows(self, path: str | os.PathLike[str], layout: str) -> None:
        """Read a .json list or JSON lines of rows in a layout of published.LAYOUTS."""
        rows, bad = read_records(path, functools.partial(read_row, LAYOUTS[layout]))
        self.counts["rows"] += len(rows) + bad
        self.counts["bad_rows"] += bad
        for draft in itertools.chain(*rows):
            self.counts["questions"] += 1
            if isinstance(draft, str):
                self.left_out[draft] += 1
                continue
            # Evidence is compared literally later (EAPO), so a passage that no document contains is
            # dropped.
            quoted = tuple(q for q in draft.evidence if any(q in text for text in draft.documents))
            self.counts["unquoted_evidence"] += len(draft.evidence) - len(quoted)
            self.counts["without_evidence"] += not quoted
            own_indices = tuple(dict.fromkeys(map(self.pool.add, draft.documents)))
            self._drafts.append(
                # Only indices: a text of several questions is in memory once.
                (dataclasses.replace(draft, documents=(), evidence=quoted), own_indices)
            )

    def questions(self) -> Iterator[Question]:
        """Yield the long questions in the order of the rows."""
        for number, (draft, own_indices) in enumerate(self._drafts):
            # A generator of its own, so that a question does not change with the questions before
            # it.
            rng = np.random.default_rng([self.config.seed, number])
            indices, total, reason = self._pad(draft, own_indices, rng)
            if reason:
                self.left_out[reason] += 1
                continue
            self._tasks[draft.task] += 1
            self._lengths.append(total)
            self.counts["distractors"] += len(indices) - len(own_indices)
            documents = tuple(self.pool.texts[index] for index in rng.permutation(indices))
            yield dataclasses.replace(draft, documents=documents)

    def _pad(
        self, draft: Question, own_indices: Sequence[int], rng: np.random.Generator
    ) -> tuple[list[int], int, str]:
        """Add distractors: pool indices, their tokens, and "" or why the question is left out."""
        config, pool = self.config, self.pool
        target = int(rng.integers(config.min_tokens, config.max_tokens + 1))
        target = target if config.min_tokens else 0
        indices, total = list(own_indices), sum(pool.tokens[index] for index in own_indices)
        phrases = giveaways(draft)
        if total > config.max_tokens:
            return indices, total, "longer than max_tokens"
        for index in rng.permutation(len(pool.texts)).tolist():
            if total >= target:
                break
            # Documents that do not fit are passed over: a shorter one may still reach the target.
            if index in own_indices or total + pool.tokens[index] > config.max_tokens:
                continue
            # It might support the answer a second time. Reports are full of numbers, and any text
            # of "no", so such answers have no giveaways.
            if pool.contains(index, phrases):
                self.counts["with_answer"] += 1  # skipped distractors
                continue
            indices.append(index)
            total += pool.tokens[index]
        if total < config.min_tokens:
            return indices, total, "too few distractors"
        # The pool was too small or its documents too long. The question still has min_tokens.
        self.counts["short_of_target"] += total < target
        return indices, total, ""

    def summary(self) -> dict[str, Any]:
        """Return all counts, JSON-serializable; call it after `questions` is exhausted."""
        lengths = self._lengths or [0]
        names = ("rows", "bad_rows", "questions", "distractors", "with_answer", "short_of_target")
        return {
            **{name: self.counts[name] for name in names},
            **{name: self.counts[name] for name in ("without_evidence", "unquoted_evidence")},
            "left_out": dict(sorted(self.left_out.items())),
            "written": dict(sorted(self._tasks.items())),
            "tokens": {
                "min": min(lengths),
                "mean": round(sum(lengths) / len(lengths), 1),
                "max": max(lengths),
            },
            "pool": {"documents": len(self.pool.texts), "repeated": self.pool.repeated},
            **dataclasses.asdict(self.config),
        }


def build(
    patterns: Sequence[str],
    layout: str,
    out: str | os.PathLike[str],
    config: LongConfig,
    count_tokens: Callable[[str], int],
) -> dict[str, Any]:
    """Read rows, pad their questions, write them to `out`, and return the summary.

    Each file of `patterns`, files or globs, is read once, in the order of the names. A copy of the
    summary is `out`.summary.json. Raises FileNotFoundError if a pattern matches no file;
    ValueError if no question can be made, or if a .json list is damaged.
    """
    builder = Builder(config, count_tokens)
    for path in _files(patterns):
        builder.read_rows(path, layout)
    write_records(out, map(dataclasses.asdict, builder.questions()))
    summary = builder.summary()
    write_json(f"{out}.summary.json", summary)
    if not summary["written"]:
        raise ValueError(f"rows = {','.join(patterns)}: no question was made; {summary}")
    return summary


def _files(patterns: Sequence[str]) -> list[str]:
    paths: set[str] = set()
    for pattern in patterns:
        matched = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        if not matched:
            raise FileNotFoundError(f"rows = {pattern!r}: there is no such file")
        paths.update(matched)
    return sorted(paths)


def main(_) -> None:
    values = flags.FLAGS
    config = dataclass_flags.read(LongConfig, values)
    folder = find_folder(values.tokenizer, "--tokenizer", with_weights=False)
    count = tokenizers.load(folder).count
    print(json.dumps(build(values.rows, values.layout, values.out, config, count)))


if __name__ == "__main__":
    flags.DEFINE_list("rows", None, "Files or glob patterns, comma-separated.", required=True)
    flags.DEFINE_enum("layout", None, list(LAYOUTS), "Layout of the rows.", required=True)
    flags.DEFINE_string("tokenizer", None, "Policy folder; its tokenizer counts.", required=True)
    flags.DEFINE_string("out", None, "JSONL file to write.", required=True)
    dataclass_flags.define(LongConfig)
    entry.run_main(main)
