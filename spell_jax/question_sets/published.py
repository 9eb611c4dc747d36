"""Parsers of published question sets: multi-hop questions, and questions over tables and prose.

"What were sales in 2019?" is ambiguous among fifty reports. So a report's first line is its name,
and the question begins with that name. Numeric answers get the task financial_math, others
general_qa. Questions that the reward's rule could never score are left out with a reason.

Sources: MuSiQue (Trivedi et al. 2022), HotpotQA (Yang et al. 2018), 2WikiMultihopQA (Ho et al.
2020), TAT-QA (Zhu et al. 2021), ConvFinQA (Chen et al. 2022).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spell_jax.data import questions
from spell_jax.data.clusters import is_text
from spell_jax.data.questions import Question, require_text
from spell_jax.selfplay import given_questions, rules
from spell_jax.selfplay.numbers import number_text

# Answers that any text may contain by chance.
_COMMON = ("yes", "no")
_FIGURE = re.compile(r"[0-9][0-9,]*(?:\.[0-9]+)?")
_NO_PAGE = re.compile(r"\A(?:Single|Double)_|-[0-9]+\Z")  # prefix and suffix of a ConvFinQA id
_SENTENCE_END = re.compile(r"(?<= \.) ")
_UNITS = {name: f" State it in {name}s." for name in ("thousand", "million", "billion")}
_UNITS |= {"": "", "percent": " State it in percent."}


# Parser of a row: yields each question, or the reason why it is unusable. Raises
# KeyError, TypeError, AttributeError or ValueError if the row does not match the layout.
Reader = Callable[[Mapping[str, Any]], Iterator[Question | str]]


def read_row(reader: Reader, row: Any) -> list[Question | str]:
    """Parse a row: each question, or the reason why it is unusable.

    Raises ValueError, KeyError, TypeError or AttributeError if the row has another layout.
    """
    if not isinstance(row, dict):
        raise TypeError(f"must be an object, is {type(row).__name__}")
    return [_checked(question) for question in reader(row)]


def _checked(question: Question | str) -> Question | str:
    if isinstance(question, str):
        return question
    texts = (question.question, *question.right, *question.documents, *question.evidence)
    if not all(map(is_text, texts)):
        raise ValueError("question, answer, documents and evidence must be texts, not blank")
    scorable = given_questions.scores_itself(question.answer, question.task)
    return question if scorable else "rule cannot score the answer"


def musique(row: Mapping[str, Any]) -> Iterator[Question | str]:
    """Parse a MuSiQue row.

    Layout: {"paragraphs": [{"title", "paragraph_text", "is_supporting"}], "question", "answer",
    "answer_aliases", "answerable"}.
    """
    # MuSiQue-Full has an unanswerable copy of each question.
    if row.get("answerable", True) is not True:
        yield "unanswerable"
        return
    documents = questions.musique_documents(row)
    evidence = [p["paragraph_text"] for p in row["paragraphs"] if p["is_supporting"] is True]
    yield _multi_hop(row, documents, evidence, row.get("answer_aliases", []))


def hotpotqa(row: Mapping[str, Any]) -> Iterator[Question | str]:
    """Parse a row of HotpotQA (facts without a sentence are skipped) or 2WikiMultihopQA.

    Layout: {"context", "supporting_facts", "question", "answer"}. data/questions.py has the
    layout of "context". "supporting_facts" is [[title, number], ...] or {"title": [...], "sent_id":
    [...]}.
    """
    paragraphs = questions.hotpot_paragraphs(row)
    sentences = {title: [t.strip() for t in texts] for title, texts in paragraphs}
    # Some rows of HotpotQA cite a sentence number beyond the paragraph.
    facts = questions.pairs(row["supporting_facts"], "title", "sent_id")
    evidence = [
        sentences[title][at] for title, at in facts if 0 <= at < len(sentences.get(title, ()))
    ]
    documents = [f"{title}\n{' '.join(paragraph)}" for title, paragraph in sentences.items()]
    yield _multi_hop(row, documents, evidence)


def _multi_hop(
    row: Mapping[str, Any],
    documents: Sequence[str],
    evidence: Sequence[str],
    aliases: Sequence[str] = (),
) -> Question:
    if not evidence:
        raise ValueError("no supporting paragraph or sentence")
    question, answer = require_text(row["question"]), require_text(row["answer"])
    answers = (answer, *(alias for alias in map(require_text, aliases) if alias.strip()))
    return Question(
        "general_qa",
        tuple(documents),
        question,
        answer,
        tuple(dict.fromkeys(evidence)),
        tuple(dict.fromkeys(answers)) if aliases else (),
    )


def tatqa(row: Mapping[str, Any]) -> Iterator[Question | str]:
    """Parse a TAT-QA row.

    Layout: {"table": {"uid", "table": [[cell, ...], ...]}, "paragraphs": [{"order", "text"}],
    "questions": [{"question", "answer", "answer_type", "answer_from", "rel_paragraphs", "scale",
    "derivation"}]}.
    """
    # Eight hexadecimal digits of the table's id name the report: enough for a few thousand reports.
    name = require_text(row["table"]["uid"])[:8]
    paragraphs = {str(p["order"]): require_text(p["text"]).strip() for p in row["paragraphs"]}
    cells = [[require_text(cell).strip() for cell in line] for line in row["table"]["table"]]
    # A dict, because two equal lines are one piece of evidence.
    table = {" | ".join(line): line for line in cells if any(line)}
    document = "\n".join([f"Report {name}", *paragraphs.values(), *table])
    for qa in row["questions"]:
        kind, answer = qa["answer_type"], qa["answer"]
        pieces = answer if isinstance(answer, list) else [answer]
        if kind == "span" and len(pieces) == 1:
            task, reference = "general_qa", require_text(pieces[0])
        elif kind in ("arithmetic", "count"):
            task, reference = "financial_math", _number(answer)
        else:
            yield f"answer is {require_text(kind)}"
            continue
        evidence: list[str] = []
        if "text" in qa["answer_from"]:
            evidence += [paragraphs[place] for place in qa["rel_paragraphs"]]
        if "table" in qa["answer_from"]:
            evidence += _rows_of(table, [require_text(qa["derivation"]), *map(str, pieces)])
        unit = _UNITS[qa["scale"]]
        # TAT-QA keeps the scale beside the answer; without it "5.2" and "5,200" would both be
        # right.
        question = f"Report {name}: {require_text(qa['question'])}{unit}"
        yield Question(task, (document,), question, reference, tuple(evidence))


def _rows_of(table: Mapping[str, Sequence[str]], clues: Sequence[str]) -> list[str]:
    """Return the table lines with a figure of the clues or a cell equal to a clue, else all."""
    figures = {figure for clue in clues for figure in _figures(clue)}
    names = {name.strip().lower() for clue in clues for name in clue.split("##")} - {""}
    matching_lines = [
        line
        for line, cells in table.items()
        if any(cell.lower() in names or not figures.isdisjoint(_figures(cell)) for cell in cells)
    ]
    return matching_lines or list(table)


def _figures(text: str) -> list[str]:
    return [figure.replace(",", "") for figure in _FIGURE.findall(text)]


def convfinqa(row: Mapping[str, Any]) -> Iterator[Question | str]:
    """Parse a ConvFinQA row in the layout of Program of Thoughts; tables are lines of "a | b".

    Layout: {"id", "questions": [...], "answer", "text", "table", "golden_text", "golden_table"}.
    """
    name = _NO_PAGE.sub("", require_text(row["id"]))
    text, table = require_text(row["text"]).strip(), require_text(row["table"]).strip()
    document = f"Report {name}\n{text}\n{table}"
    *before, last = [require_text(question).strip() for question in row["questions"]]
    question = f"Report {name}: {last}"
    if before:
        turns = " ".join(before)
        question = f"Report {name}, a conversation: {turns} Answer its last question: {last}"
    golden = require_text(row["golden_text"]).strip()
    # The field joins sentences that may be apart in the report.
    quotes = [golden] if golden in text else _SENTENCE_END.split(golden)
    evidence = [*require_text(row["golden_table"]).strip().split("\n"), *quotes]
    answer = row["answer"]
    task = "general_qa" if isinstance(answer, str) else "financial_math"
    reference = answer if isinstance(answer, str) else _number(answer)
    stripped_evidence = tuple(quote.strip() for quote in evidence if quote.strip())
    yield Question(task, (document,), question, reference, stripped_evidence)


LAYOUTS: dict[str, Reader] = {
    "musique": musique,
    "hotpotqa": hotpotqa,
    "tatqa": tatqa,
    "convfinqa": convfinqa,
}


def giveaways(question: Question) -> tuple[str, ...]:
    """Return the normalized right answers that no added document may contain.

    Years and other numbers, yes and no occur in any text by chance, and may occur.
    """
    if question.task != "general_qa":
        return ()
    answers = map(rules.normalize_answer, question.right)
    return tuple(
        dict.fromkeys(a for a in answers if re.search(r"[^\W\d_]", a) and a not in _COMMON)
    )


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.100}: must be a number")
    return number_text(value)
