"""Judgments of answers that are on disk already, for spell_jax.evaluate --judgment.

1. "outcome": a judge grades each stated answer of a tree of evidence (spell_jax.generate
   --mode=evidence_tree) against the known answer (EAPO's Figure 3). Without a verdict the rule's
   score stands.
2. "diversity": a judge says whether the reasonings of a question, in such a file, differ in
   substance (EAPO's Table 2). Questions with fewer than two well-formed reasonings do not count.
3. "errors": a judge says whether a wrong answer of an evaluation lacks evidence or draws a wrong
   conclusion (EAPO's Figure 9). It reads question, true answer and response, not the documents.

OUT/judgments.json has the share of each verdict and counts of missing ones, OUT/judged.jsonl a line
for each answer, OUT/judge.jsonl the replies: a restart asks only the remaining prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

from spell_jax.evaluation import runner
from spell_jax.evaluation.benchmarks import registry
from spell_jax.rollout import flags as policy_flags
from spell_jax.rollout.judge import Item, judge_of_flags
from spell_jax.runtime import entry
from spell_jax.runtime.files import paths
from spell_jax.runtime.files.jsonl import read_json, require_records, write_json, write_records
from spell_jax.runtime.hosts import distributed
from spell_jax.sampler.config import SamplerConfig
from spell_jax.selfplay import evidence
from spell_jax.selfplay.prompts import Prompts
from spell_jax.selfplay.rules import visible_text
from spell_jax.selfplay.verdicts import MISSING, UNANSWERED, Template, parse_letter

RESULT, JUDGED = "judgments.json", "judged.jsonl"
LEAST_REASONINGS = 2  # that can be compared
# Names of the verdicts, by the number that the judge's reply is parsed into.
VERDICTS = {
    "outcome": ("wrong", "right"),
    "diversity": ("consistent", "diverse"),
    "errors": ("evidence", "reasoning", "other"),
}
# Prompts and parsers; the outcome has the template of --judge_template.
TEMPLATES: dict[str, Template] = {
    "diversity": (Prompts.reasoning_diversity, functools.partial(parse_letter, letters="AB")),
    "errors": (Prompts.error_kind, functools.partial(parse_letter, letters="ABC")),
}
# Flags of every judgment, and of one.
COMMON_FLAGS = (
    *("judgment", "answers", "out", "judge_url", "judge_model", "judge_policy"),
    *("judge_max_tokens", "judge_workers", "judge_rate", "dtype", *policy_flags.SIZES),
)
OWN_FLAGS = {
    "outcome": ("judge_template",),
    "diversity": (),
    "errors": ("data", "benchmarks", "max_input"),
}

Record = dict[str, Any]


@dataclasses.dataclass
class AnswerOnDisk:
    """An answer, or the answers to one question.

    Attributes:
      record: fields of its line in judged.jsonl.
      item: fields of the judge's prompt; None if the judge is not asked.
      verdict: name of the verdict; where the judge is asked, "" or what holds without its verdict.
      missing: "malformed" or "unanswered" if the judge gave no verdict.
    """

    record: Record
    item: Item | None
    verdict: str = ""
    missing: str = ""


def check_flags(flag_values: flags.FlagValues) -> None:
    """Raise UsageError if a flag has no effect with --judgment, or one that it needs is missing."""
    judgment = flag_values.judgment
    useful = (*COMMON_FLAGS, *OWN_FLAGS[judgment])
    policy_flags.refuse_others(flag_values, useful, f"with --judgment={judgment}")
    needed_flags = ("answers", "benchmarks", "data") if judgment == "errors" else ("answers",)
    for name in needed_flags:
        if not flag_values[name].value:
            raise app.UsageError(f"--{name}: must be given with --judgment={judgment}")


def judge_answers(flag_values: Any, out: pathlib.Path, sizes: SamplerConfig) -> Record:
    """Return judgments.json of the answers of --answers; write it and the other files of `out`.

    All processes call this together; only process 0 reads and writes. Raises UsageError without a
    judge, FileNotFoundError or ValueError if a file is missing or damaged.
    """
    judgment = flag_values.judgment
    policy_flags.check_model(flag_values, "judge", needed_for=f"--judgment={judgment}")
    judge = judge_of_flags(flag_values, out, sizes, TEMPLATES.get(judgment))
    assert judge is not None
    answers: list[AnswerOnDisk] = []

    def read() -> None:
        answers.extend(READERS[judgment](flag_values))
        out.mkdir(parents=True, exist_ok=True)

    distributed.broadcast(read)
    asked_answers = [answer for answer in answers if answer.item is not None]
    verdicts = judge.judge([answer.item for answer in asked_answers if answer.item is not None])
    if verdicts and set(verdicts) == {UNANSWERED}:
        raise ValueError(
            f"judge: no reply to any of {len(verdicts)} prompts, as the warnings say; check "
            "--judge_url, --judge_model and the key in SPELL_JUDGE_KEY, and start again"
        )
    entry.setup_done()
    for answer, verdict in zip(asked_answers, verdicts, strict=True):
        if verdict < 0:
            answer.missing = MISSING[verdict]
        else:
            answer.verdict = VERDICTS[judgment][verdict]

    def finish() -> Record:
        result = {"judgment": judgment, "judge": judge.model}
        result |= count_verdicts(answers, VERDICTS[judgment])
        lines = (a.record | {"verdict": a.verdict, "missing": a.missing} for a in answers)
        write_records(out / JUDGED, lines)
        write_json(out / RESULT, result)
        return result

    return distributed.broadcast(finish)


def count_verdicts(answers: Sequence[AnswerOnDisk], names: Sequence[str]) -> Record:
    """Return {"answers", "asked", "malformed", "unanswered": counts, "shares": {name: share}}.

    Shares are over all answers. An answer without a verdict of the judge counts as what holds
    without it ("outcome": the rule's score), or else in the proportions of the judge's verdicts;
    "shares" is empty if no asked answer has a verdict.
    """
    asked_answers = [answer for answer in answers if answer.item is not None]
    settled = Counter(answer.verdict for answer in answers if answer.item is None)
    judged = Counter(answer.verdict for answer in asked_answers if answer.verdict)
    missing = Counter(answer.missing for answer in asked_answers)
    shares: dict[str, float] = {}
    if answers and (judged or not asked_answers):
        # Leaving unjudged answers out would count fewer errors: right answers need no verdict.
        weight = len(asked_answers) / judged.total() if asked_answers else 0.0
        shares = {name: (settled[name] + weight * judged[name]) / len(answers) for name in names}
    counts = {name: missing[name] for name in MISSING.values()}
    return {"answers": len(answers), "asked": len(asked_answers)} | counts | {"shares": shares}


def describe(result: Record) -> str:
    """Format judgments.json as one line, and a second one if verdicts are missing."""
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in result["shares"].items())
    lines = [f"{result['judgment']} of {result['answers']}: {shares or 'no verdicts'}"]
    if missing := result["malformed"] + result["unanswered"]:
        lines.append(
            f"no verdict on {missing} of {result['asked']} that were asked: {result['malformed']} "
            f"malformed, {result['unanswered']} unanswered"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ Readers


def _read_outcomes(flag_values: Any) -> list[AnswerOnDisk]:
    return _read_tree(flag_values.answers, _outcome, 'a line of a tree with a known "answer"')


def _outcome(line: Any) -> AnswerOnDisk:
    question, answer = _text(line, "question"), _text(line, "answer")
    is_right, stated = line["right"], line["stated"]
    if type(is_right) is not bool or not isinstance(stated, str | None):
        raise ValueError(f"right = {is_right!r}, stated = {stated!r:.80}: wrong types")
    record = {"question": question, "stated": stated, "right": is_right}
    # A question without an answer is wrong; a judge need not read it.
    item = (question, stated, answer) if stated else None
    return AnswerOnDisk(record, item, "right" if is_right and stated else "wrong")


def _read_reasonings(flag_values: Any) -> list[AnswerOnDisk]:
    answers = _read_tree(flag_values.answers, _reasonings, "a line of a tree")
    comparable_answers = [answer for answer in answers if answer.item is not None]
    if not comparable_answers:
        raise ValueError(
            f"answers = {flag_values.answers}: no question has {LEAST_REASONINGS} well-formed "
            "reasonings; sample them with --reasoning_by=judge or --every_branch"
        )
    return comparable_answers


def _reasonings(line: Any) -> AnswerOnDisk:
    question, texts = _text(line, "question"), []
    # With --every_branch there is a path for each set of evidence.
    for path in line.get("paths") or line["reasonings"]:
        if sections := evidence.parse_sections(_text(path, "text"), len(evidence.SECTIONS)):
            texts.append(f"{sections[2]}\n{sections[3]}")
    record = {"question": question, "reasonings": len(texts)}
    return AnswerOnDisk(record, (question, texts) if len(texts) >= LEAST_REASONINGS else None)


def _read_tree(path: str, parse: Any, what: str) -> list[AnswerOnDisk]:
    answers, _ = require_records(path, parse, f"answers = {path}", what)
    return answers


def _text(line: Any, name: str) -> str:
    if not isinstance(line[name], str):
        raise ValueError(f"{name} = {line[name]!r:.80}: must be a text")
    return line[name]


def _read_errors(flag_values: Any) -> list[AnswerOnDisk]:
    folder = paths.open_folder(flag_values.answers)
    # Rows are scored when an evaluation ends.
    if not (folder / runner.SUMMARY).exists():
        raise FileNotFoundError(f"answers = {folder}: must be the folder of a finished evaluation")
    read_json(folder / runner.SUMMARY)
    items = {
        (name, item.id): (item.question, item.references[0])
        for name in flag_values.benchmarks
        for item in registry.load(name, registry.find_folder(name, flag_values.data)).items
    }
    path = folder / runner.SAMPLES
    rows, _ = require_records(path, _scored_row, f"answers = {path}", "a scored answer")
    rows = [row for row in rows if row["benchmark"] in flag_values.benchmarks]
    if limits := flag_values.max_input:
        rows = [row for row in rows if str(row["max_input"]) in limits]
    if not rows:
        at = f" at --max_input={','.join(limits)}" if limits else ""
        raise ValueError(f"{path}: has no answers of {', '.join(flag_values.benchmarks)}{at}")
    # Shares over two limits would compare with no figure.
    if len(present_limits := sorted({row["max_input"] for row in rows})) > 1:
        raise ValueError(
            f"{path}: has answers at the limits {', '.join(map(str, present_limits))}; "
            "--max_input must name one"
        )
    return list(_errors(rows, items, str(path)))


def _scored_row(row: Any) -> Record:
    if type(row["final"]) is not float:
        raise ValueError(f"final = {row['final']!r:.80}: must be a number")
    texts = {name: _text(row, name) for name in ("benchmark", "id", "text")}
    return texts | {"sample": row["sample"], "max_input": row["max_input"], "final": row["final"]}


def _errors(
    rows: Sequence[Record], items: dict[tuple[str, str], tuple[str, str]], where: str
) -> Iterator[AnswerOnDisk]:
    for row in rows:
        text = visible_text(row.pop("text")) or ""
        key = row["benchmark"], row["id"]
        if key not in items:
            raise ValueError(f"{where}: {key[0]}: no question {key[1]!r} in --data")
        question, reference = items[key]
        if row["final"] == 1:
            yield AnswerOnDisk(row, None, "right")
        elif not text:  # a thought that its cap cut off: there is nothing to read
            yield AnswerOnDisk(row, None, "other")
        else:
            yield AnswerOnDisk(row, (question, text, reference))


READERS = {"outcome": _read_outcomes, "diversity": _read_reasonings, "errors": _read_errors}
