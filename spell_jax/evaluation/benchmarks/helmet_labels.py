"""The five labeled datasets of HELMET's in-context learning, read from their authors' files.

    task          files                                        train   test  labels
    trec_coarse   train_5500.label, TREC_10.label               5452    500       6
    trec_fine     the same                                      5452    500      50
    banking77     train.csv, test.csv                          10003   3080      77
    clinic150     data_oos_plus.json                           15250   3100     151
    nlu           NLU-Data-Home-Domain-Annotated-All.csv       23143   2572      68

As in HELMET, CLINC is tested on its validation set, out-of-scope texts included, and a tenth of the
NLU data is held out for the test. That random split is our own; it leaves every label at least one
example. Examples come in rounds that have every label once.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spell_jax.evaluation.benchmarks import published
from spell_jax.evaluation.benchmarks.published import HELP, Folder, PublishedRow

# Per dataset, as in HELMET; TREC's test set has 500.
QUESTIONS = 500
Pairs = list[tuple[str, str]]  # (text, label)

_ANNOTATION = re.compile(r"\[[^\[\]:]*:+([^\[\]]*)\]")


@dataclasses.dataclass(frozen=True)
class Task:
    """Reader and published sizes of a dataset."""

    reader: Callable[[Folder], tuple[Pairs, Pairs]]  # pairs for examples, pairs for questions
    train: int
    test: int
    labels: int
    # Examples in a prompt, by `retrieval.LENGTHS`: HELMET's configs/icl_short.yaml and icl.yaml.
    shots: tuple[int, int, int, int, int]


def read_pairs(task: str, folder: Folder, complete: bool) -> tuple[Pairs, Pairs]:
    """Read the pairs for examples and for questions of a dataset, a key of `TASKS`.

    `complete` requires the published numbers of texts and labels. Raises the errors of a Loader.
    """
    kind = TASKS[task]
    # Line breaks around a text, as in ten of BANKING77's, would split the examples of a prompt.
    train, test = ([(text.strip(), label) for text, label in p] for p in kind.reader(folder))
    labels = {label for _, label in train}
    # Such a question could not be answered: the prompt would not show its label.
    if strange := {label for _, label in test} - labels:
        raise ValueError(f"{folder}, {task}: no example has the label {min(strange)!r}. {HELP}")
    if complete:
        published.check_count(f"{folder}, {task}, examples", len(train), kind.train, None)
        published.check_count(f"{folder}, {task}, test", len(test), kind.test, None)
        published.check_count(f"{folder}, {task}, labels", len(labels), kind.labels, None)
    return train, test


def by_label(pairs: Pairs) -> dict[str, list[str]]:
    """Map each label to its texts, with labels in alphabetical order."""
    texts: dict[str, list[str]] = {label: [] for label in sorted({label for _, label in pairs})}
    for text, label in pairs:
        texts[label].append(text)
    return texts


def balanced(by_label: Mapping[str, Sequence[str]], count: int, rng: random.Random) -> Pairs:
    """Choose examples in shuffled rounds of all labels; texts repeat only after all were used."""
    # Balanced, as in HELMET: a label must not be likelier because the prompt shows it more often.
    rounds = -(-count // len(by_label))
    columns = []
    for label, texts in by_label.items():
        sampled_texts: list[str] = []
        # Labels are unequal in size, so a small label repeats texts, but only after all were used.
        while len(sampled_texts) < rounds:
            sampled_texts += rng.sample(texts, min(rounds - len(sampled_texts), len(texts)))
        columns.append([(text, label) for text in sampled_texts])
    examples: Pairs = []
    for column in zip(*columns, strict=True):
        # Shuffled within a round, so that the order of labels tells nothing.
        mixed = list(column)
        rng.shuffle(mixed)
        examples += mixed
    return examples[:count]


def _trec(fine: bool, folder: Folder) -> tuple[Pairs, Pairs]:
    published_files = ["train_5500.label", "TREC_10.label"]
    train, test = published.locate(folder, [published_files, *published.hub("train", "test")])
    if train.suffix != ".label":
        label = "fine_label" if fine else "coarse_label"
        return _labeled(train, label), _labeled(test, label)
    return _trec_file(train, fine), _trec_file(test, fine)


def _labeled(path: Path, *labels: str) -> Pairs:
    """Read rows with a text and a label; `labels` are the possible names of the label's column."""
    rows = published.rows_of(path)
    return [(row.text("text"), row.text(row.column(*labels))) for row in rows]


def _trec_file(path: Path, fine: bool) -> Pairs:
    """Read lines such as "DESC:manner How did ...", in Latin-1."""
    pairs = []
    lines = path.read_text(encoding="latin-1").rstrip("\n").split("\n")
    for number, line in enumerate(lines):
        # The file has a stray byte; its usual reader, which HELMET calls, does the same.
        label, _, text = line.replace("\xf0", " ").strip().partition(" ")
        coarse, colon, _ = label.partition(":")
        if not colon or not text:
            raise ValueError(f"{path}, row {number}: must be COARSE:fine and a question. {HELP}")
        pairs.append((text, label if fine else coarse))
    return pairs


def _banking77(folder: Folder) -> tuple[Pairs, Pairs]:
    names = "train", "test"
    layouts = [*published.hub(*names), [f"banking_data/{name}" for name in names]]
    train, test = published.locate(folder, layouts)
    return _labeled(train, "category", "label"), _labeled(test, "category", "label")


def _clinic150(folder: Folder) -> tuple[Pairs, Pairs]:
    """Read {"train": [[text, label], ...], "oos_train": ..., "val": ..., "oos_val": ..., ...}.

    On the hub, the rows of "plus" have the same texts.
    """
    name, splits = "data_oos_plus.json", ("train", "validation")
    hub = [[f"plus/{split}" for split in splits], *published.hub(*splits)]
    path, *other_paths = published.locate(folder, [[name], [f"data/{name}"], *hub])
    if other_paths:
        return _labeled(path, "intent"), _labeled(other_paths[0], "intent")
    file = PublishedRow(str(path), published.json_value(path, dict))
    train, test = (
        [pair for part in (name, f"oos_{name}") for pair in _clinic_part(file, part)]
        for name in ("train", "val")
    )
    return train, test


def _clinic_part(file: PublishedRow, part: str) -> Pairs:
    pairs = file.get(part, list, "a list of [text, label]")
    if not all(isinstance(p, list) and list(map(type, p)) == [str, str] for p in pairs):
        raise file.wrong(part, "a list of [text, label]")
    return [(text, label) for text, label in pairs]


def _nlu(folder: Folder) -> tuple[Pairs, Pairs]:
    """Read the authors' file, or the rows of nlu_evaluation_data on the hub, which HELMET reads.

    There scenario and intent form the label, and the text is answer_annotation without its
    annotations. A text "null" is none.
    """
    name = "NLU-Data-Home-Domain-Annotated-All.csv"
    layouts = [[name], [f"AnnotatedData/{name}"], *published.hub("train")]
    (path,) = published.locate(folder, layouts)
    pairs = _labeled(path, "label") if path.name != name else _nlu_pairs(path)
    # A fixed seed: the split is a part of the benchmark.
    random.Random(42).shuffle(pairs)
    first: Pairs = []  # the first text of each label, kept for training
    other_pairs: Pairs = []
    seen_labels: set[str] = set()
    for text, label in pairs:
        (other_pairs if label in seen_labels else first).append((text, label))
        seen_labels.add(label)
    held_out = -(-len(pairs) // 10)
    return first + other_pairs[held_out:], other_pairs[:held_out]


def _nlu_pairs(path: Path) -> Pairs:
    """Read semicolon-separated rows, in the way of nlu_evaluation_data."""
    pairs = []
    for row in published.rows_of(path, delimiter=";"):
        text = row.text("answer_annotation")
        if text != "null":
            label = f"{row.text('scenario')}_{row.text('intent')}"
            pairs.append((without_annotations(text), label))
    return pairs


def without_annotations(text: str) -> str:
    """Remove the annotations of the NLU data: "at [time : five am]" becomes "at five am"."""
    return _ANNOTATION.sub(lambda match: match[1].strip(), text)


TASKS = {
    "trec_coarse": Task(lambda dir: _trec(False, dir), 5452, 500, 6, (400, 800, 1600, 3300, 6600)),
    "trec_fine": Task(lambda dir: _trec(True, dir), 5452, 500, 50, (400, 800, 1600, 3200, 6400)),
    "banking77": Task(_banking77, 10_003, 3080, 77, (360, 720, 1450, 2900, 5900)),
    "clinic150": Task(_clinic150, 15_250, 3100, 151, (440, 880, 1750, 3525, 7050)),
    "nlu": Task(_nlu, 23_143, 2572, 68, (510, 1020, 2040, 4080, 8296)),
}
