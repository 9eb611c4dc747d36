"""A benchmark's answers, from tokens to rows: cut and sampled, found again on disk, scored, judged.

A row is one sample: {"max_input", "benchmark", "id", "sample", "text", "tokens_in", "truncated",
"tokens_out", "stopped"} as it is sampled; "prediction", "rule", "judge" and "final" are added in
the end, also to rows from an earlier start, so that a corrected rule counts. So is "by" where a
benchmark tells its questions apart: {field: value}.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from spell_jax.algorithms.rollout import fold_keys
from spell_jax.evaluation import protocol
from spell_jax.evaluation.benchmarks.base import Benchmark, Item
from spell_jax.evaluation.policy_sampler import Policy
from spell_jax.runtime.config import check_least
from spell_jax.runtime.jsonl import read_records, write_records
from spell_jax.sampler.requests import Options, Sample
from spell_jax.selfplay.judge import MALFORMED, UNANSWERED, Judge

log = logging.getLogger(__name__)

Row = dict[str, Any]
Place = tuple[int, str, str]  # limit, benchmark, question


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How answers are sampled. Mistakes raise ValueError.

    Attributes:
      samples: answers to each question [G].
      temperature, top_p: see Options.
      max_tokens: cap of an answer; 0: each benchmark's own.
      seed: of draws and of intervals.
    """

    samples: int = 8
    temperature: float = 0.7
    top_p: float = 0.95
    max_tokens: int = 0
    seed: int = 0

    def __post_init__(self):
        check_least(self, "", samples=1, max_tokens=0, seed=0)
        Options(self.temperature, self.top_p)

    def options(self, benchmark: Benchmark) -> Options:
        """Of a benchmark's questions."""
        cap = self.max_tokens or benchmark.max_tokens
        return Options(self.temperature, self.top_p, max_tokens=cap)


@dataclasses.dataclass(frozen=True)
class Question:
    """A benchmark's question as tokens.

    Attributes:
      benchmark, item: whose it is.
      ids: int32, its prompt in the chat layout, cut to the largest limit.
      length: tokens that it had before.
    """

    benchmark: Benchmark
    item: Item
    ids: np.ndarray
    length: int

    @property
    def judged(self) -> bool:
        """Whether a judge is asked about answers that the rule gives less than 1."""
        return self.benchmark.judged and self.item.judged


def tokenize(policy: Policy, benchmarks: Sequence[Benchmark], longest: int) -> list[Question]:
    """All questions, cut to the largest limit: uncut, some documents have millions of tokens.

    Raises:
      ValueError: the policy's chat layout does not take a prompt; names benchmark and question.
    """
    questions = []
    for benchmark in benchmarks:
        for item in benchmark.items:
            try:
                ids = np.array(policy.tokenizer.chat(item.prompt), np.int32)
            except ValueError as error:
                raise ValueError(f"{benchmark.name}: {item.id}: {error}") from error
            kept = protocol.truncate(ids, longest)
            questions.append(Question(benchmark, item, kept, len(ids)))
    return questions


def check_context(sampling: Sampling, policy: Policy, questions: Sequence[Question]) -> None:
    """Raises ValueError if the longest prompt and answer exceed the policy's context: at the start,
    not when hours later that limit has its turn."""
    longest = max(len(one.ids) for one in questions)
    cap = max(sampling.options(one.benchmark).max_tokens for one in questions)
    policy.config.check_length(longest + cap)


def fingerprint(benchmark: Benchmark) -> str:
    """Tells a benchmark's prompts from others: a hash of them in their order."""
    made = hashlib.blake2b(digest_size=16)
    for item in benchmark.items:
        made.update(json.dumps([item.id, item.prompt]).encode())
    return made.hexdigest()


def draw(
    sampling: Sampling,
    policy: Policy,
    questions: Sequence[Question],
    limit: int,
    done: set[tuple[Any, ...]],
) -> Iterator[tuple[Place, list[Row]]]:
    """The samples of each question that is not done, as they come, without scores.

    A question's key is folded from the seed by limit, benchmark and id; sibling and token are the
    sampler's. (The paper's code gives all samples of a question one seed; spec section 11.)
    """
    places = [(limit, one.benchmark.name, one.item.id) for one in questions]
    wanted = [i for i, place in enumerate(places) if place not in done]
    log.info("max_input %d: %d of %d questions to answer", limit, len(wanted), len(places))
    key = np.asarray(jax.random.key_data(jax.random.key(sampling.seed)))
    keys = fold_keys(key, [(place[0], *map(_number, place[1:])) for place in places])
    options = [sampling.options(one.benchmark) for one in questions]
    prompts = [protocol.truncate(one.ids, limit) for one in questions]
    sampled = policy.draw(prompts, sampling.samples, keys, options, wanted)
    for count, (i, samples) in enumerate(sampled, 1):
        row = dict(zip(("max_input", "benchmark", "id"), places[i], strict=True))
        row |= {"tokens_in": len(prompts[i]), "truncated": questions[i].length > limit}
        texts = [policy.tokenizer.decode(sample.content) for sample in samples]
        both = enumerate(zip(texts, samples, strict=True))
        yield places[i], [row | _describe(j, text, sample) for j, (text, sample) in both]
        if count % 100 == 0:
            log.info("max_input %d: %d of %d questions answered", limit, count, len(wanted))


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def _describe(number: int, text: str, sample: Sample) -> Row:
    counts = {"tokens_out": len(sample.tokens), "stopped": bool(sample.stopped)}
    return {"sample": number, "text": text} | counts


def read_finished(path: pathlib.Path, samples: int) -> dict[Place, list[Row]]:
    """Rows of the questions all of whose samples are in a file; others are dropped from it."""
    if not path.exists():
        return {}
    fields = ("max_input", "benchmark", "id")
    found: dict[Place, list[Row]] = {}
    lines, torn = read_records(path, lambda row: (tuple(row[name] for name in fields), row))
    for place, row in lines:
        found.setdefault(place, []).append(row)
    wanted = list(range(samples))
    whole = {k: rows for k, rows in found.items() if [row["sample"] for row in rows] == wanted}
    if torn or len(whole) < len(found):
        write_records(path, (row for rows in whole.values() for row in rows))
    log.info("%s: %d questions are answered already", path, len(whole))
    return whole


def score(question: Question, row: Row) -> None:
    """Adds what the rule says."""
    row["prediction"] = question.benchmark.extract(row["text"], question.item)
    row["rule"] = row["final"] = float(question.benchmark.score(row["text"], question.item))
    row["judge"] = None
    if question.benchmark.by:
        row["by"] = {name: question.item.fields[name] for name in question.benchmark.by}


def ask_judge(ordered: Sequence[tuple[Question, Row]], judge: Judge | None) -> None:
    """Verdicts on answers that the rule did not give 1; all processes come here, the rows are those
    of process 0. The judge is shown the first reference, as the paper's is."""
    if judge is None:
        if any(question.judged for question, _ in ordered):
            log.warning("no judge is given: free text is scored by the rule alone")
        return
    asked = [
        (question.item, row)
        for question, row in ordered
        if question.judged and row["rule"] < 1 and row["prediction"]
    ]
    verdicts = judge.judge(
        [(item.question, row["prediction"], item.references[0]) for item, row in asked]
    )
    for (_, row), verdict in zip(asked, verdicts, strict=True):
        row["judge"] = {MALFORMED: "malformed", UNANSWERED: "unanswered"}.get(verdict, verdict)
        row["final"] = max(row["rule"], float(max(verdict, 0)))
