"""Questions with known answers about given documents, read from a JSONL file.

Each line is {"task", "documents", "question", "answer"}, with an optional "evidence": the sentences
of the documents that support the answer.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from spell_jax.data.clusters import TASKS, Cluster, Source, in_memory
from spell_jax.runtime.jsonl import read_records


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its documents and its answer."""

    task: str  # one of TASKS
    documents: tuple[str, ...]  # texts that the question is about
    question: str
    answer: str  # the reference answer
    evidence: tuple[str, ...] = ()  # supporting sentences, quoted from the documents


def read_questions(path: str | pathlib.Path, field: str) -> tuple[Question, ...]:
    """Read the questions of a JSONL file; bad lines are logged and skipped.

    Errors name the config field `field`: FileNotFoundError, or ValueError if no line is valid.
    """
    questions, skipped = read_records(path, _parse_question)
    if not questions:
        raise ValueError(f"{field} = {path}: none of its {skipped} lines is a valid question")
    return tuple(questions)


def _parse_question(record: Any) -> Question:
    evidence = record.get("evidence", [])
    if not isinstance(record["documents"], list) or not isinstance(evidence, list):
        raise ValueError("documents and evidence must be lists of strings")
    documents, stated = tuple(record["documents"]), (record["question"], record["answer"])
    question = Question(record["task"], documents, *stated, tuple(evidence))
    texts = (*question.documents, *question.evidence, question.question, question.answer)
    if question.task not in TASKS or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"task must be one of {TASKS}, the other fields strings")
    "".join(texts).encode()  # raises on lone surrogates, which no tokenizer takes
    return question


def as_clusters(questions: Sequence[Question]) -> tuple[Source, Mapping[str, Question]]:
    """Wrap each question in a cluster of its task; returns (source, cluster id -> question)."""
    by_id = {f"question {index}": question for index, question in enumerate(questions)}
    made = [Cluster(name, q.documents, (q.task,)) for name, q in by_id.items()]
    return in_memory(made), by_id
