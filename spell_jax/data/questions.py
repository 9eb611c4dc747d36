"""Questions with known answers about given documents, from a JSONL file.

A line is {"task", "documents", "question", "answer"}, and may have "evidence": the sentences of the
documents that the answer rests on.
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
    """A question with its answer, and the documents that it is about.

    Attributes:
      task: one of TASKS.
      evidence: what the answer rests on, quoted from the documents; may be empty.
    """

    task: str
    documents: tuple[str, ...]
    question: str
    answer: str
    evidence: tuple[str, ...] = ()


def read_questions(path: str | pathlib.Path, field: str) -> tuple[Question, ...]:
    """The questions of a file; bad lines are logged and skipped.

    Args:
      path: of the file.
      field: of the config that names it.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: no line of it is a question.
    """
    questions, skipped = read_records(path, _parse_question)
    if not questions:
        raise ValueError(f"{field} = {path}: none of its {skipped} lines is a question")
    return tuple(questions)


def _parse_question(record: Any) -> Question:
    evidence = record.get("evidence", [])
    if not isinstance(record["documents"], list) or not isinstance(evidence, list):
        raise ValueError("documents, and evidence if there is any, must be lists of texts")
    question = Question(
        record["task"],
        tuple(record["documents"]),
        record["question"],
        record["answer"],
        tuple(evidence),
    )
    texts = (*question.documents, *question.evidence, question.question, question.answer)
    if question.task not in TASKS or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"task must be one of {TASKS}, the rest texts")
    "".join(texts).encode()  # lone surrogates cannot be asked
    return question


def as_record(question: Question) -> dict[str, Any]:
    """A question as its line of a file has it."""
    return dataclasses.asdict(question)


def as_clusters(questions: Sequence[Question]) -> tuple[Source, Mapping[str, Question]]:
    """Questions as what a TaskStream deals: each a cluster of its documents, that serves its task
    alone; and the question of each cluster by its id."""
    by_id = {f"question {index}": question for index, question in enumerate(questions)}
    made = [Cluster(name, q.documents, (q.task,)) for name, q in by_id.items()]
    return in_memory(made), by_id
