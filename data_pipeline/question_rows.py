"""What published rows ask: layouts of multi-hop questions, and of questions over tables and prose.

1. A row of a layout becomes drafts: a question, its answer, the row's own documents, and what the
   layout says that the answer rests on. MuSiQue and HotpotQA (2WikiMultihopQA has its layout) are
   one question a row; a TAT-QA row is a report with several, a ConvFinQA row a conversation of
   which the last question is asked.
2. Evidence is quoted from the documents: MuSiQue's supporting paragraphs, HotpotQA's supporting
   sentences, the paragraphs that TAT-QA names, ConvFinQA's gold rows and sentences. TAT-QA names no
   rows: those that have a figure or a name of the derivation or the answer are taken, or else the
   whole table.
3. "What were sales in 2019?" means nothing among fifty reports: a report's first line is its name,
   and the question begins with that.
4. Numbers are asked as financial_math, texts as general_qa. What the reward's rule could never
   score, such as a list of several spans, is left out with a reason.

Sources: MuSiQue (Trivedi et al. 2022), HotpotQA (Yang et al. 2018), 2WikiMultihopQA (Ho et al.
2020), TAT-QA (Zhu et al. 2021), ConvFinQA (Chen et al. 2022).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spell_jax.selfplay import rules
from spell_jax.selfplay.numbers import number_text

# Words of an answer that any text may hold.
_COMMON = ("yes", "no")
_FIGURE = re.compile(r"[0-9][0-9,]*(?:\.[0-9]+)?")
_NO_PAGE = re.compile(r"\A(?:Single|Double)_|-[0-9]+\Z")  # of an id of ConvFinQA
_SENTENCE_END = re.compile(r"(?<= \.) ")
_UNITS = {name: f" State it in {name}s." for name in ("thousand", "million", "billion")}
_UNITS |= {"": "", "percent": " State it in percent."}


@dataclass(frozen=True)
class Draft:
    """A question as its row has it.

    Attributes:
      task, question, answer: see data/questions.py.
      documents: of the row; some may be distractors already.
      evidence: what the answer rests on; not yet checked to be quoted.
      giveaways: normalized words that no added document may hold: the answer and its other names.
        None for numbers and "yes", which may stand anywhere.
    """

    task: str
    question: str
    answer: str
    documents: tuple[str, ...]
    evidence: tuple[str, ...]
    giveaways: tuple[str, ...] = ()


# A row -> its drafts; in the place of a question that is of no use, the reason. What is not as the
# layout says raises KeyError, TypeError, AttributeError or ValueError.
Reader = Callable[[Mapping[str, Any]], Iterator[Draft | str]]


def read_row(reader: Reader, row: Any) -> list[Draft | str]:
    """All drafts of a row, or why there is none; what has an answer is known to be scorable.

    Raises:
      ValueError, KeyError, TypeError, AttributeError: the row is not as its layout says.
    """
    if not isinstance(row, dict):
        raise TypeError(f"must be an object, is {type(row).__name__}")
    return [_checked(found) for found in reader(row)]


def _checked(draft: Draft | str) -> Draft | str:
    if isinstance(draft, str):
        return draft
    texts = (draft.question, draft.answer, *draft.documents, *draft.evidence)
    "".join(texts).encode()  # lone surrogates cannot be asked
    if not all(text.strip() for text in texts):
        raise ValueError("question, answer, documents and evidence must not be blank")
    said = f"The correct answer is {draft.answer}"
    return draft if rules.score(said, draft.answer, draft.task) else "rule cannot score the answer"


def musique(row: Mapping[str, Any]) -> Iterator[Draft | str]:
    """MuSiQue: {"paragraphs": [{"title", "paragraph_text", "is_supporting"}], "question", "answer",
    "answer_aliases", "answerable"}."""
    if row.get("answerable", True) is not True:
        yield "unanswerable"
        return
    paragraphs = [(_text(p["title"]), _text(p["paragraph_text"])) for p in row["paragraphs"]]
    rests_on = [p["is_supporting"] is True for p in row["paragraphs"]]
    evidence = [text for (_, text), is_it in zip(paragraphs, rests_on, strict=True) if is_it]
    documents = [f"{title}\n{text}" for title, text in paragraphs]
    yield _multi_hop(row, documents, evidence, row.get("answer_aliases", []))


def hotpotqa(row: Mapping[str, Any]) -> Iterator[Draft | str]:
    """HotpotQA and 2WikiMultihopQA: {"context", "supporting_facts", "question", "answer"}.

    "context" is [[title, [sentence, ...]], ...] or {"title": [...], "sentences": [[...], ...]}, and
    "supporting_facts" [[title, number], ...] or {"title": [...], "sent_id": [...]}. A fact whose
    sentence is not there, of which HotpotQA has some, is passed over.
    """
    context = _pairs(row["context"], "title", "sentences")
    sentences = {_text(title): [_text(s).strip() for s in some] for title, some in context}
    facts = _pairs(row["supporting_facts"], "title", "sent_id")
    evidence = [
        sentences[title][at] for title, at in facts if 0 <= at < len(sentences.get(title, ()))
    ]
    documents = [f"{title}\n{' '.join(some)}" for title, some in sentences.items()]
    yield _multi_hop(row, documents, evidence)


def _multi_hop(
    row: Mapping[str, Any],
    documents: Sequence[str],
    evidence: Sequence[str],
    other_names: Sequence[str] = (),
) -> Draft:
    if not evidence:
        raise ValueError("no supporting paragraph or sentence")
    answer = _text(row["answer"])
    giveaways = _giveaways(answer, *other_names)
    question = _text(row["question"])
    made = tuple(documents), tuple(dict.fromkeys(evidence))
    return Draft("general_qa", question, answer, *made, giveaways)


def tatqa(row: Mapping[str, Any]) -> Iterator[Draft | str]:
    """TAT-QA: {"table": {"uid", "table": [[cell, ...], ...]}, "paragraphs": [{"order", "text"}],
    "questions": [{"question", "answer", "answer_type", "answer_from", "rel_paragraphs", "scale",
    "derivation"}]}."""
    name = _text(row["table"]["uid"])[:8]
    paragraphs = {str(p["order"]): _text(p["text"]).strip() for p in row["paragraphs"]}
    cells = [[_text(cell).strip() for cell in line] for line in row["table"]["table"]]
    table = {" | ".join(line): line for line in cells if any(line)}
    document = "\n".join([f"Report {name}", *paragraphs.values(), *table])
    for asked in row["questions"]:
        kind, answer = asked["answer_type"], asked["answer"]
        pieces = answer if isinstance(answer, list) else [answer]
        if kind == "span" and len(pieces) == 1:
            task, reference = "general_qa", _text(pieces[0])
        elif kind in ("arithmetic", "count"):
            task, reference = "financial_math", _number(answer)
        else:
            yield f"answer is {_text(kind)}"
            continue
        evidence: list[str] = []
        if "text" in asked["answer_from"]:
            evidence += [paragraphs[place] for place in asked["rel_paragraphs"]]
        if "table" in asked["answer_from"]:
            evidence += _rows_of(table, [_text(asked["derivation"]), *map(str, pieces)])
        unit = _UNITS[asked["scale"]]
        question = f"Report {name}: {_text(asked['question'])}{unit}"
        giveaways = _giveaways(reference) if task == "general_qa" else ()
        yield Draft(task, question, reference, (document,), tuple(evidence), giveaways)


def _rows_of(table: Mapping[str, Sequence[str]], clues: Sequence[str]) -> list[str]:
    """Lines of a table that have a figure of the clues, or a cell that is one; else all."""
    figures = {figure for clue in clues for figure in _figures(clue)}
    names = {name.strip().lower() for clue in clues for name in clue.split("##")} - {""}
    found = [
        line
        for line, cells in table.items()
        if any(cell.lower() in names or not figures.isdisjoint(_figures(cell)) for cell in cells)
    ]
    return found or list(table)


def _figures(text: str) -> list[str]:
    return [figure.replace(",", "") for figure in _FIGURE.findall(text)]


def convfinqa(row: Mapping[str, Any]) -> Iterator[Draft | str]:
    """ConvFinQA as Program of Thoughts has it: {"id", "questions": [...], "answer", "text",
    "table", "golden_text", "golden_table"}; tables are lines of "a | b"."""
    name = _NO_PAGE.sub("", _text(row["id"]))
    text, table = _text(row["text"]).strip(), _text(row["table"]).strip()
    document = f"Report {name}\n{text}\n{table}"
    *before, last = [_text(question).strip() for question in row["questions"]]
    asked = f"Report {name}: {last}"
    if before:
        asked = (
            f"Report {name}, a conversation: {' '.join(before)} Answer its last question: {last}"
        )
    said = _text(row["golden_text"]).strip()
    quotes = [said] if said in text else _SENTENCE_END.split(said)
    evidence = [*_text(row["golden_table"]).strip().split("\n"), *quotes]
    answer = row["answer"]
    task = "general_qa" if isinstance(answer, str) else "financial_math"
    reference = answer if isinstance(answer, str) else _number(answer)
    kept = tuple(quote.strip() for quote in evidence if quote.strip())
    yield Draft(task, asked, reference, (document,), kept)


LAYOUTS: dict[str, Reader] = {
    "musique": musique,
    "hotpotqa": hotpotqa,
    "tatqa": tatqa,
    "convfinqa": convfinqa,
}


def _giveaways(*answers: str) -> tuple[str, ...]:
    """Of answers with letters; the others, such as a year, stand in every other document."""
    normal = (rules.normalize_answer(_text(answer)) for answer in answers)
    kept = [text for text in normal if re.search(r"[^\W\d_]", text) and text not in _COMMON]
    return tuple(dict.fromkeys(kept))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100}: must be a text")
    return value


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.100}: must be a number")
    return number_text(value)


def _pairs(value: Any, first: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs, which some files have as two lists."""
    if isinstance(value, dict):
        return list(zip(value[first], value[second], strict=True))
    return [(one, other) for one, other, *_ in value]
