"""Benchmark answers as result rows, one per sample: sampling, resuming, scoring and judging.

Sampling writes {"max_input", "benchmark", "id", "sample", "text", "tokens_in", "truncated",
"tokens_out", "stopped"}. Scoring adds "prediction", "rule", "judge", "final", "unjudged" (whether a
judge's verdict is missing) and, for benchmarks with a breakdown, "by": {field: value}. Scoring runs
at the end, on the rows of earlier starts too, so a corrected rule applies to all rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Protocol

import numpy as np

from spell_jax.evaluation import protocol
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.rollout.judge import Item, Judge
from spell_jax.rollout.replies import Prompt
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import entry
from spell_jax.runtime.config import check_least
from spell_jax.runtime.files.jsonl import read_records, write_records
from spell_jax.sampler.keys import fold_keys, seed_key
from spell_jax.sampler.requests import Options
from spell_jax.selfplay.verdicts import MISSING

log = logging.getLogger(__name__)

Row = dict[str, Any]
KEY_FIELDS = ("max_input", "benchmark", "id")
QuestionKey = tuple[int, str, str]  # values of KEY_FIELDS


@dataclasses.dataclass(frozen=True)
class EvaluationSampling:
    """Sampling options of an evaluation; raises ValueError if a value is out of range."""

    # The paper's values (Appendix E.2).
    samples: int = 8  # answers per question, G
    temperature: float = 0.7
    top_p: float = 0.95
    max_tokens: int = 0  # maximum answer length; 0 uses the maximum of each benchmark
    seed: int = 0  # of the sampling keys and of the bootstrap intervals

    def __post_init__(self):
        check_least(self, "", samples=1, max_tokens=0, seed=0)
        Options(self.temperature, self.top_p)

    def options(self, benchmark: Benchmark) -> Options:
        cap = self.max_tokens or benchmark.max_tokens
        return Options(self.temperature, self.top_p, max_tokens=cap)


@dataclasses.dataclass(frozen=True)
class TokenizedQuestion:
    """A benchmark question as tokens."""

    benchmark: Benchmark
    item: BenchmarkItem
    prompt: Prompt  # in the chat layout, truncated to the largest limit
    length: int  # prompt tokens before truncation

    @property
    def judged(self) -> bool:
        """Whether a judge may be asked about the answers."""
        return self.benchmark.judged and self.item.judged

    def state(self, text: str) -> str | None:
        """Return what a judge reads of a sample; None if there is nothing to judge."""
        return (self.benchmark.state or self.benchmark.extract)(text, self.item)

    def judge_item(self, text: str) -> Item:
        """Return the question, the words of a sample and the reference, as a judge reads them."""
        # The first reference alone, as in the paper's code. It shows only the first paragraph of a
        # question; here the judge reads all paragraphs.
        return self.item.question, self.state(text) or "", self.item.references[0]

    def key(self, limit: int) -> QuestionKey:
        return limit, self.benchmark.name, self.item.id


class Respondent(Protocol):
    """A model that answers benchmark questions: a policy, or a model at an endpoint."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def fingerprint(self) -> str:
        """Return a hash of the weights, "" if they are unknown."""
        ...

    def read_questions(
        self, benchmarks: Sequence[Benchmark], limits: Sequence[int]
    ) -> list[TokenizedQuestion]:
        """Tokenize all questions; ValueError if a prompt and its answer do not fit."""
        ...

    def answer(
        self, questions: Sequence[TokenizedQuestion], limit: int, answered_keys: Set[QuestionKey]
    ) -> Iterator[tuple[QuestionKey, list[Row]]]:
        """Yield the key and the G unscored rows of each question not in `answered_keys`."""
        ...

    def release(self) -> None:
        """Free the memory of the weights."""
        ...


@dataclasses.dataclass(frozen=True)
class PolicyRespondent:
    """A policy as respondent; all processes call it together."""

    model: TextModel
    sampling: EvaluationSampling

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def fingerprint(self) -> str:
        return self.model.fingerprint()

    def read_questions(
        self, benchmarks: Sequence[Benchmark], limits: Sequence[int]
    ) -> list[TokenizedQuestion]:
        questions = tokenize(self.model.encode, benchmarks, max(limits))
        check_context(self.sampling, self.model, questions)
        entry.setup_done()
        return questions

    def answer(
        self, questions: Sequence[TokenizedQuestion], limit: int, answered_keys: Set[QuestionKey]
    ) -> Iterator[tuple[QuestionKey, list[Row]]]:
        return sample_answers(self.sampling, self.model, questions, limit, answered_keys)

    def release(self) -> None:
        self.model.release()


def tokenize(
    encode: Callable[[str], Prompt], benchmarks: Sequence[Benchmark], longest: int, layout: int = 0
) -> list[TokenizedQuestion]:
    """Tokenize all questions; truncate each prompt to `longest` tokens, as some have millions.

    `layout` is the number of tokens that `encode` leaves to a server. A prompt that `encode`
    rejects is a ValueError that names the benchmark and the question.
    """
    questions = []
    for benchmark in benchmarks:
        for item in benchmark.items:
            try:
                prompt = encode(item.prompt)
            except ValueError as error:
                raise ValueError(f"{benchmark.name}: {item.id}: {error}") from error
            # Prompts of all limits are cut from this one: cutting twice equals cutting to the
            # smaller limit.
            shortened = truncate_prompt(prompt, longest - layout)
            length = len(prompt.ids) + layout
            questions.append(TokenizedQuestion(benchmark, item, shortened, length))
    return questions


def truncate_prompt(prompt: Prompt, limit: int) -> Prompt:
    """Cut the middle out of a prompt of more than `limit` tokens."""
    ids = protocol.truncate(np.array(prompt.ids, np.int32), limit)
    return dataclasses.replace(prompt, ids=ids)


def check_context(
    sampling: EvaluationSampling, model: TextModel, questions: Sequence[TokenizedQuestion]
) -> None:
    """Raise ValueError, before any sampling, if a prompt and answer may exceed the context."""
    # The largest prompt and the largest answer need not belong to one question, but one program is
    # compiled for both.
    longest = max(len(question.prompt.ids) for question in questions)
    cap = max(sampling.options(question.benchmark).max_tokens for question in questions)
    model.config.check_length(longest + cap)


def fingerprint(benchmark: Benchmark) -> str:
    """Return a hash of a benchmark's question ids and prompts: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for item in benchmark.items:
        # JSON has its own borders, so no two lists of questions have the same bytes.
        digest.update(json.dumps([item.id, item.prompt]).encode())
    return digest.hexdigest()


def sample_answers(
    sampling: EvaluationSampling,
    model: TextModel,
    questions: Sequence[TokenizedQuestion],
    limit: int,
    answered_keys: Set[QuestionKey],
) -> Iterator[tuple[QuestionKey, list[Row]]]:
    """Sample answers to every question that is not in `answered_keys`.

    Yields the key and the G unscored rows of a question, in order of completion. `questions` are
    all questions, answered ones included, because all prompts determine the compiled shapes.
    """
    names = [question.key(limit) for question in questions]
    unanswered = [i for i, name in enumerate(names) if name not in answered_keys]
    log.info("max_input %d: %d of %d questions to answer", limit, len(unanswered), len(names))
    seed = seed_key(sampling.seed)
    # A question's key depends on nothing but the seed, the limit and its names, so a restart gives
    # the same answers. The sampler folds in the sample: the paper's code seeds all 8 samples alike,
    # which makes them nearly equal. crc32, because Python's hash() of texts differs between
    # processes.
    keys = fold_keys(seed, [(limit, *(zlib.crc32(n.encode()) for n in name[1:])) for name in names])
    options = [sampling.options(question.benchmark) for question in questions]
    prompts = [truncate_prompt(question.prompt, limit) for question in questions]
    replies = model.ask(prompts, sampling.samples, options, keys, prompt_indices=unanswered)
    for count, (i, reply) in enumerate(replies, 1):
        assert reply is not None  # check_context
        row = dict(zip(KEY_FIELDS, names[i], strict=True))
        row |= {"tokens_in": len(prompts[i].ids), "truncated": questions[i].length > limit}
        rows = [
            row
            | {
                "sample": number,
                "text": text,
                "tokens_out": len(sample.tokens),
                "stopped": bool(sample.stopped),
            }
            for number, (sample, text) in enumerate(zip(reply.samples, reply.texts, strict=True))
        ]
        yield names[i], rows
        if count % 100 == 0:
            log.info("max_input %d: %d of %d questions answered", limit, count, len(unanswered))


def read_finished(path: pathlib.Path, samples: int) -> dict[QuestionKey, list[Row]]:
    """Read the rows of completely sampled questions, in sample order; remove all other lines."""
    if not path.exists():
        return {}
    rows_by_key: dict[QuestionKey, list[Row]] = {}
    lines, torn = read_records(path, parse_row)
    for key, row in lines:
        rows_by_key.setdefault(key, []).append(row)
    sample_numbers = list(range(samples))
    complete = {
        k: rows
        for k, rows in rows_by_key.items()
        if [row["sample"] for row in rows] == sample_numbers
    }
    # The samples of a question are appended together, so a kill can cut only the last question. It
    # is answered again as a whole, and its part is removed from the file.
    if torn or len(complete) < len(rows_by_key):
        write_records(path, (row for rows in complete.values() for row in rows))
    log.info("%s: %d questions are answered already", path, len(complete))
    return complete


_KINDS = {"max_input": int, "benchmark": str, "id": str, "sample": int, "text": str}


def parse_row(row: Any) -> tuple[QuestionKey, Row]:
    """Return the question and the row of a line of samples.jsonl; ValueError names a bad field."""
    for field, kind in _KINDS.items():
        # Not isinstance: True is an int.
        if type(row[field]) is not kind:
            raise ValueError(f"{field} = {row[field]!r:.80}: must be of type {kind.__name__}")
    return (row["max_input"], row["benchmark"], row["id"]), row


def score(answered: Sequence[tuple[TokenizedQuestion, Row]], rule: str = "match_or_judge") -> None:
    """Add the extracted prediction, the rule score and the breakdown fields to the rows.

    `rule`, one of JUDGE_RULES, says which answers a judge is asked about.
    """
    for question, row in answered:
        benchmark, item = question.benchmark, question.item
        row["prediction"] = benchmark.extract(row["text"], item)
        # Without a verdict the rule's score is final; `ask_judge` may change it.
        row["rule"] = row["final"] = float(benchmark.score(row["text"], item))
        row["judge"] = None
        # An answer that states nothing is wrong; a judge need not read it.
        is_open = question.judged and (rule == "judge" or row["rule"] < 1)
        row["unjudged"] = is_open and bool(question.state(row["text"]))
        if benchmark.by:
            row["by"] = {name: item.fields[name] for name in benchmark.by}


def ask_judge(
    answered: Sequence[tuple[TokenizedQuestion, Row]],
    judge: Judge | None,
    rule: str = "match_or_judge",
) -> None:
    """Ask the judge about the unjudged answers, and add its verdicts to their rows.

    With the rule "judge" a verdict is the score, with "match_or_judge" the larger of the verdict
    and the rule's score. All processes must call this function; only process 0 has rows.
    """
    if judge is None:
        if any(question.judged for question, _ in answered):
            log.warning("no judge is given: free text is scored by the rule alone")
        return
    requests = [
        (row, question.judge_item(row["text"])) for question, row in answered if row["unjudged"]
    ]
    verdicts = judge.judge([item for _, item in requests])
    for (row, _), verdict in zip(requests, verdicts, strict=True):
        row["judge"] = MISSING.get(verdict, verdict)
        # Verdicts below 0 are malformed or missing.
        row["unjudged"] = verdict < 0
        # EAPO's section 4 has the judge's score alone, SPELL's Appendix E.2 the maximum of both.
        if verdict >= 0:
            row["final"] = float(verdict) if rule == "judge" else max(row["rule"], float(verdict))
