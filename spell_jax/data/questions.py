"""Questions with known answers about given documents, read from a JSONL file.

Each line is {"task", "documents", "question", "answer"}. Optional lists are "evidence" (sentences
of the documents that support the answer), "answers" (all right ones), "wrong" (wrong ones) and
"shown" (numbers from 0 of the documents that the question was written from).

The functions of published layouts take parsed JSON; of another layout they raise jsonl.MALFORMED.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from spell_jax.data.clusters import TASKS, Cluster, ClusterSource, in_memory
from spell_jax.runtime.files import remote
from spell_jax.runtime.files.jsonl import require_records

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its documents and its answer.

    Attributes:
      task: one of TASKS.
      documents: texts that the question is about.
      question: text of the question.
      answer: reference answer.
      evidence: supporting sentences, quoted from the documents.
      answers: all right answers, `answer` among them; (): only `answer`.
      wrong: wrong answers of the same kind.
      shown: indices of the documents that the question was written from.
    """

    task: str
    documents: tuple[str, ...]
    question: str
    answer: str
    evidence: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    shown: tuple[int, ...] = ()

    @property
    def right(self) -> tuple[str, ...]:
        """All right answers."""
        return self.answers or (self.answer,)


def in_blocks(
    items: Sequence[T], key: Callable[[T], Hashable], size: int, rng: np.random.Generator
) -> list[T]:
    """Order items at random, in blocks of `size` items with the same key.

    A key's last items may be a smaller block. Smaller blocks come last.
    """
    by_key: dict[Hashable, list[T]] = {}
    for item in items:
        by_key.setdefault(key(item), []).append(item)
    blocks = []
    for same in by_key.values():
        order = rng.permutation(len(same)).tolist()
        blocks += [[same[i] for i in order[at : at + size]] for at in range(0, len(same), size)]
    # Smaller blocks last: a batch of whole blocks has few keys, so an update reads few documents.
    shuffled = [blocks[i] for i in rng.permutation(len(blocks))]
    return [item for block in sorted(shuffled, key=len, reverse=True) for item in block]


def read_questions(
    path: str | pathlib.Path, field: str, check: Callable[[Question], None] = lambda _: None
) -> tuple[Question, ...]:
    """Read the questions of a JSONL file or its URL; log and skip bad lines.

    A line is also bad if `check` raises ValueError for its question (selfplay.given_questions).
    Errors name the config field `field`: FileNotFoundError, or ValueError if no line is valid.
    """

    def parse(record: Any) -> Question:
        question = _parse_question(record)
        check(question)
        return question

    where, what = f"{field} = {path}", "a valid question"
    questions, skipped = require_records(remote.fetch(path), parse, where, what)
    if skipped:
        log.warning("%s = %s: %d questions, %d lines skipped", field, path, len(questions), skipped)
    return tuple(questions)


_LISTS = ("evidence", "answers", "wrong")


def _parse_question(record: Any) -> Question:
    lists = {name: record.get(name, []) for name in _LISTS}
    if not all(isinstance(value, list) for value in (record["documents"], *lists.values())):
        raise ValueError(f"documents, {', '.join(_LISTS)} must be lists of strings")
    documents, stated = tuple(record["documents"]), (record["question"], record["answer"])
    list_fields = {name: tuple(value) for name, value in lists.items()}
    shown = tuple(record.get("shown", ()))
    # type(), because True is an int for isinstance.
    if not all(type(index) is int and 0 <= index < len(documents) for index in shown):
        raise ValueError(f"shown must be indices of the {len(documents)} documents")
    question = Question(record["task"], documents, *stated, **list_fields, shown=shown)
    texts = (*documents, *stated, *(text for value in lists.values() for text in value))
    if question.task not in TASKS or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"task must be one of {TASKS}, the other fields strings")
    "".join(texts).encode()  # raises on lone surrogates, which no tokenizer takes
    return question


def musique_documents(row: Mapping[str, Any]) -> list[str]:
    """Return the documents of MuSiQue's {"paragraphs": [{"title", "paragraph_text"}]}, titled."""
    paragraphs = row["paragraphs"]
    return [f"{require_text(p['title'])}\n{require_text(p['paragraph_text'])}" for p in paragraphs]


def hotpot_paragraphs(row: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return (title, sentences) of each paragraph of a row of HotpotQA or 2WikiMultihopQA.

    Layout: {"context": [[title, [sentence, ...]], ...]} or, as on the hub, {"context": {"title":
    [...], "sentences": [[...], ...]}}.
    """
    context = pairs(row["context"], "title", "sentences")
    return [(require_text(title), [*map(require_text, texts)]) for title, texts in context]


def squad_questions(article: Mapping[str, Any]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (index of the paragraph, question, answers of all annotators) of an article of SQuAD.

    Layout: {"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}]}]}]}, and in
    SQuAD 2.0 "is_impossible" for questions without an answer.
    """
    for index, paragraph in enumerate(article["paragraphs"]):
        for qa in paragraph["qas"]:
            answers = () if qa.get("is_impossible") else qa["answers"]
            yield index, require_text(qa["question"]), [require_text(a["text"]) for a in answers]


def pairs(value: Any, first: str, second: str) -> list[tuple[Any, Any]]:
    """Return a list of pairs; some files store them as two parallel lists."""
    if isinstance(value, dict):
        return list(zip(value[first], value[second], strict=True))
    return [(left, right) for left, right, *_ in value]


def require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100}: must be a text")
    value.encode()  # raises on lone surrogates, which UTF-8 cannot encode
    return value


def as_clusters(questions: Sequence[Question]) -> tuple[ClusterSource, Mapping[str, Question]]:
    """Wrap each question in a cluster of its task; returns (source, cluster id -> question)."""
    by_id = {f"question {index}": question for index, question in enumerate(questions)}
    clusters = [Cluster(name, q.documents, (q.task,)) for name, q in by_id.items()]
    return in_memory(clusters), by_id


def with_short_contexts(questions: Sequence[Question]) -> tuple[Question, ...]:
    """Return the questions that have a short context, in `shown`.

    The short context is `shown`, or else the documents that contain a sentence of the evidence.
    ValueError if there are questions, but none has a short context.
    """
    complete = [dataclasses.replace(q, shown=q.shown or _evidence_documents(q)) for q in questions]
    usable = tuple(question for question in complete if question.shown)
    if complete and not usable:
        raise ValueError(
            f"data.questions: none of its {len(complete)} questions has a short context; one must "
            'have "shown", or "evidence" that its documents contain'
        )
    # Some questions may lack a short context, but the log says how many.
    if missing := len(complete) - len(usable):
        log.warning("%d of %d questions have no short context", missing, len(complete))
    return usable


def _evidence_documents(question: Question) -> tuple[int, ...]:
    return tuple(
        number
        for number, document in enumerate(question.documents)
        if any(sentence in document for sentence in question.evidence)
    )
