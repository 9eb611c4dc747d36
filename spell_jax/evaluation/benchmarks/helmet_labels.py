"""The five labeled datasets of HELMET's in-context learning, read from their authors' files.

    task          files                                        train   test  labels
    trec_coarse   train_5500.label, TREC_10.label               5452    500       6
    trec_fine     the same                                      5452    500      50
    banking77     train.csv, test.csv                          10003   3080      77
    clinic150     data_oos_plus.json                           15250   3100     151
    nlu           NLU-Data-Home-Domain-Annotated-All.csv       23143   2572      68

1. As in HELMET, CLINC is tested on its validation set, out-of-scope texts included.
2. As in HELMET, a tenth of the NLU data is held out for the test. The random split is our own; it
   leaves every label at least one example.
3. Examples are balanced over labels: they come in rounds that have every label once.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spell_jax.evaluation.benchmarks import published
from spell_jax.evaluation.benchmarks.published import HELP, Folder, Row

QUESTIONS = 500  # per dataset
Pairs = list[tuple[str, str]]  # (text, label)

_ANNOTATION = re.compile(r"\[[^\[\]:]*:+([^\[\]]*)\]")


@dataclasses.dataclass(frozen=True)
class Labeled:
    """Labeled texts of a dataset.

    Attributes:
      train: (text, label) pairs for the examples in prompts.
      test: (text, label) pairs for the questions.
    """

    train: Sequence[tuple[str, str]]
    test: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Task:
    """Reader and published sizes of a dataset.

    Attributes:
      reader: folder -> labeled texts.
      train: number of training texts.
      test: number of test texts.
      labels: number of labels.
      shots: number of examples in a prompt for each of `retrieval.LENGTHS`; from HELMET's
        configs/icl_short.yaml and icl.yaml.
    """

    reader: Callable[[Folder], Labeled]
    train: int
    test: int
    labels: int
    shots: tuple[int, int, int, int, int]


def read(task: str, folder: Folder, whole: bool) -> Labeled:
    """Read the labeled texts of a dataset.

    Args:
      task: key of `TASKS`.
      folder: folder of the published files.
      whole: whether to require the published numbers of texts and labels.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published.
    """
    kind = TASKS[task]
    data = kind.reader(folder)
    labels = {label for _, label in data.train}
    if strange := {label for _, label in data.test} - labels:
        raise ValueError(f"{folder}, {task}: no example has the label {min(strange)!r}. {HELP}")
    if whole:
        published.check_count(f"{folder}, {task}, examples", len(data.train), kind.train, None)
        published.check_count(f"{folder}, {task}, test", len(data.test), kind.test, None)
        published.check_count(f"{folder}, {task}, labels", len(labels), kind.labels, None)
    return data


def by_label(pairs: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Map each label to its texts, with labels in alphabetical order."""
    texts: dict[str, list[str]] = {label: [] for label in sorted({label for _, label in pairs})}
    for text, label in pairs:
        texts[label].append(text)
    return texts


def balanced(by_label: Mapping[str, Sequence[str]], count: int, rng: random.Random) -> Pairs:
    """Choose `count` examples in rounds, each with every label once, in random order.

    The texts of a label repeat only after all of them were used.
    """
    rounds = -(-count // len(by_label))
    columns = []
    for label, texts in by_label.items():
        chosen: list[str] = []
        while len(chosen) < rounds:
            chosen += rng.sample(texts, min(rounds - len(chosen), len(texts)))
        columns.append([(text, label) for text in chosen])
    examples: Pairs = []
    for column in zip(*columns, strict=True):
        mixed = list(column)
        rng.shuffle(mixed)
        examples += mixed
    return examples[:count]


def _trec(fine: bool, folder: Folder) -> Labeled:
    """Read lines such as "DESC:manner How did ...", in Latin-1."""
    names = ["train_5500.label", "TREC_10.label"]
    train, test = (_trec_file(path, fine) for path in published.locate(folder, [names]))
    return Labeled(train, test)


def _trec_file(path: Path, fine: bool) -> Pairs:
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


def _banking77(folder: Folder) -> Labeled:
    paths = published.locate(folder, [["train.csv", "test.csv"]])
    train, test = (
        [(row.text("text"), row.text("category")) for row in published.rows_of(path)]
        for path in paths
    )
    return Labeled(train, test)


def _clinic150(folder: Folder) -> Labeled:
    """Read {"train": [[text, label], ...], "oos_train": ..., "val": ..., "oos_val": ..., ...}."""
    name = "data_oos_plus.json"
    (path,) = published.locate(folder, [[name], [f"data/{name}"]])
    whole = Row(str(path), published.json_value(path, dict))
    parts = {}
    for part in ("train", "oos_train", "val", "oos_val"):
        pairs = whole.get(part, list, "a list of [text, label]")
        if not all(isinstance(p, list) and list(map(type, p)) == [str, str] for p in pairs):
            raise whole.wrong(part, "a list of [text, label]")
        parts[part] = [(text, label) for text, label in pairs]
    return Labeled(parts["train"] + parts["oos_train"], parts["val"] + parts["oos_val"])


def _nlu(folder: Folder) -> Labeled:
    """Read semicolon-separated rows. Scenario and intent form the label; "null" means no text.

    As in Hugging Face's nlu_evaluation_data, which HELMET reads, the text is answer_annotation
    without its annotations: "at [time : five am]" becomes "at five am".
    """
    name = "NLU-Data-Home-Domain-Annotated-All.csv"
    (path,) = published.locate(folder, [[name], [f"AnnotatedData/{name}"]])
    pairs = []
    for row in published.rows_of(path, delimiter=";"):
        text = row.text("answer_annotation")
        if text != "null":
            text = _ANNOTATION.sub(lambda found: found[1].strip(), text)
            pairs.append((text, f"{row.text('scenario')}_{row.text('intent')}"))
    random.Random(42).shuffle(pairs)
    first: Pairs = []  # the first text of each label, kept for training
    rest: Pairs = []
    seen: set[str] = set()
    for text, label in pairs:
        (rest if label in seen else first).append((text, label))
        seen.add(label)
    held_out = -(-len(pairs) // 10)
    return Labeled(first + rest[held_out:], rest[:held_out])


def _coarse(folder: Folder) -> Labeled:
    return _trec(False, folder)


def _fine(folder: Folder) -> Labeled:
    return _trec(True, folder)


TASKS = {
    "trec_coarse": Task(_coarse, 5452, 500, 6, (400, 800, 1600, 3300, 6600)),
    "trec_fine": Task(_fine, 5452, 500, 50, (400, 800, 1600, 3200, 6400)),
    "banking77": Task(_banking77, 10_003, 3080, 77, (360, 720, 1450, 2900, 5900)),
    "clinic150": Task(_clinic150, 15_250, 3100, 151, (440, 880, 1750, 3525, 7050)),
    "nlu": Task(_nlu, 23_143, 2572, 68, (510, 1020, 2040, 4080, 8296)),
}
