"""A model at an OpenAI-compatible endpoint that answers benchmark questions, without local weights.

1. A question is one user message, in the words that a local policy gets. With a tokenizer, a prompt
   over the limit loses its middle; the tokenizer's chat layout counts, as for a policy.
2. Each sample is a request with its own seed. OUT/replies.jsonl keeps each reply on arrival, so a
   restart sends only the requests without a reply.
3. A question with a missing reply has no rows: it is left out of the means, and asked again by a
   restart. If no reply at all comes to the first requests, or none in the first ten minutes, the
   evaluation ends with the reason.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import time
import zlib
from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax
import numpy as np

from spell_jax.evaluation.answering import (
    KEY_FIELDS,
    EvaluationSampling,
    QuestionKey,
    Row,
    TokenizedQuestion,
    parse_row,
    tokenize,
    truncate_prompt,
)
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.rollout.replies import Prompt
from spell_jax.runtime import entry
from spell_jax.runtime.endpoint import ChatReply, ChatRequest, Endpoint, EndpointConfig
from spell_jax.runtime.files.jsonl import append_records, read_records

log = logging.getLogger(__name__)

ENDPOINT_KEY = "SPELL_ENDPOINT_KEY"  # an environment variable: configs are written to disk
REPLIES = "replies.jsonl"
# Failures without any reply that end an evaluation: a wrong key or name would fail them all.
_FIRST_FAILURES = 16
# Seconds for the first reply. A server that hangs would take 4 hours: 8 attempts of 1,800 s. In 600
# s a server writes 20,480 tokens, the paper's limit for reasoning models, at 34 tokens/s.
_FIRST_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Limits of the requests to an endpoint; they change no reply.

    Attributes:
      workers: limit of concurrent requests, >= 1.
      requests_per_s: rate limit of all workers together; 0 for none.
      attempts: requests per sample, >= 1, with a back-off of two minutes by default.
    """

    workers: int = 16
    requests_per_s: float = 0.0
    attempts: int = 8


TRAFFIC = Traffic()


class EndpointRespondent:
    """A respondent (answering.Respondent) at an endpoint; only one process may use it."""

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: str,
        sampling: EvaluationSampling,
        out: pathlib.Path,
        traffic: Traffic,
    ):
        """Read the tokenizer of the folder `tokenizer`; "" has none. Nothing is sent yet.

        Raises the errors of EndpointConfig and tokenizer.load, and ValueError with several
        processes.
        """
        if jax.process_count() > 1:
            raise ValueError(f"endpoint = {url!r}: must be asked by one process, without --hosts")
        self.name = model
        self.tokenizer = tokenizers.load(tokenizer) if tokenizer else None
        self._layout = _count_layout(self.tokenizer) if self.tokenizer else 0
        try:
            self._config = EndpointConfig(
                url,
                model,
                os.environ.get(ENDPOINT_KEY),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                timeout_s=1800.0,  # long documents, and thoughts of tens of thousands of tokens
                attempts=traffic.attempts,
                workers=traffic.workers,
                requests_per_s=traffic.requests_per_s,
                key_name=ENDPOINT_KEY,
            )
        except ValueError as error:
            raise ValueError(f"endpoint's {error}") from error
        self._sampling = sampling
        self._file = out / REPLIES
        self._has_reply = False

    def fingerprint(self) -> str:
        return ""  # nobody outside can know the weights

    def read_questions(
        self, benchmarks: Sequence[Benchmark], limits: Sequence[int]
    ) -> list[TokenizedQuestion]:
        """Tokenize all messages if there is a tokenizer; ValueError if the layout fills a limit."""
        if self.tokenizer and min(limits) <= self._layout:
            raise ValueError(
                f"max_input = {min(limits)}: must leave room for a question beside the "
                f"{self._layout} tokens of the chat layout"
            )
        return tokenize(self._encode, benchmarks, max(limits), self._layout)

    def _encode(self, text: str) -> Prompt:
        return Prompt(self.tokenizer.encode(text) if self.tokenizer else ())

    def answer(
        self, questions: Sequence[TokenizedQuestion], limit: int, answered_keys: Set[QuestionKey]
    ) -> Iterator[tuple[QuestionKey, list[Row]]]:
        """Ask for the missing samples of each question that is not in `answered_keys`.

        Yields like answering.sample_answers, without questions that lack a reply. Raises ValueError
        if the first requests of this object get no reply.
        """
        unanswered = [q for q in questions if q.key(limit) not in answered_keys]
        rows = self._read_replies()
        count = range(self._sampling.samples)
        places = [(q, n) for q in unanswered for n in count if (*q.key(limit), n) not in rows]
        log.info("max_input %d: %d requests to send", limit, len(places))
        for question in unanswered:
            yield from self._finish(question, limit, rows)
        prompts = {id(question): self._prompt(question, limit) for question in unanswered}
        requests = [
            ChatRequest(
                prompts[id(question)],
                self._sampling.options(question.benchmark).max_tokens,
                self._seed(question.key(limit), number),
            )
            for question, number in places
        ]
        for index, reply in self._ask(requests):
            question, number = places[index]
            row = self._make_row(question, limit, number, reply)
            append_records(self._file, [row])
            rows[*question.key(limit), number] = row
            yield from self._finish(question, limit, rows)

    def _ask(self, requests: Sequence[ChatRequest]) -> Iterator[tuple[int, ChatReply]]:
        """Yield (index of the request, reply) in order of arrival, without requests that failed."""
        unanswered = dict(enumerate(requests))
        if requests and not self._has_reply:
            for index, reply in self._ask_first(requests):
                del unanswered[index]
                yield index, reply
        indices = list(unanswered)
        for place, reply in Endpoint(self._config).chat(list(unanswered.values())):
            if reply is not None:
                yield indices[place], reply

    def _ask_first(self, requests: Sequence[ChatRequest]) -> Iterator[tuple[int, ChatReply]]:
        """Yield the replies to the first requests, until there is one; ValueError without any.

        At most `workers` requests wait at a time: a request that waits for a free worker would
        begin, and hang, after the first failures.
        """
        fields = {"timeout_s": _FIRST_SECONDS, "patience_s": _FIRST_SECONDS}
        endpoint = Endpoint(dataclasses.replace(self._config, **fields))
        start, failed, count = time.monotonic(), 0, min(_FIRST_FAILURES, len(requests))
        while failed < count and (not failed or time.monotonic() - start < _FIRST_SECONDS):
            first, last = failed, min(failed + self._config.workers, count)
            for place, reply in endpoint.chat(requests[first:last]):
                if reply is None:
                    failed += 1
                    continue
                if not self._has_reply:
                    self._has_reply = True
                    entry.setup_done()  # from here on the address, the key and the name are right
                yield first + place, reply
            if self._has_reply:
                return
        raise ValueError(
            f"endpoint = {self._config.url!r}: no reply of {self._config.model!r} to the first "
            f"{failed} requests {endpoint.last_failure}"
        )

    def _read_replies(self) -> dict[tuple[Any, ...], Row]:
        """Read the rows of replies that earlier starts got: {(*QuestionKey, sample): row}."""
        if not self._file.exists():
            return {}
        lines, _ = read_records(self._file, parse_row)
        return {(*key, row["sample"]): row for key, row in lines}

    def _finish(
        self, question: TokenizedQuestion, limit: int, rows: dict[tuple[Any, ...], Row]
    ) -> Iterator[tuple[QuestionKey, list[Row]]]:
        """Yield the rows of a question once it has all its replies."""
        key = question.key(limit)
        samples = [rows.get((*key, number)) for number in range(self._sampling.samples)]
        complete = [row for row in samples if row is not None]
        if len(complete) == len(samples):
            yield key, complete

    def _prompt(self, question: TokenizedQuestion, limit: int) -> str:
        """Return the message of a question, cut to a limit."""
        if self.tokenizer is None or question.length <= limit:
            return question.item.prompt
        shortened = truncate_prompt(question.prompt, limit - self._layout)
        return self.tokenizer.decode(np.asarray(shortened.ids).tolist())

    def _seed(self, key: QuestionKey, number: int) -> int:
        """Return the seed of a sample: different for all samples of a question."""
        limit, *names = key
        text = "/".join(map(str, (self._sampling.seed, limit, *names)))
        # 31 bits, because some servers read signed 32-bit numbers.
        return (zlib.crc32(text.encode()) + number) % 2**31

    def _make_row(
        self, question: TokenizedQuestion, limit: int, number: int, reply: ChatReply
    ) -> Row:
        tokens_in, tokens_out = reply.prompt_tokens, reply.tokens
        if self.tokenizer:  # counts of servers that tell none
            if tokens_in is None:
                tokens_in = min(question.length, limit)
            if tokens_out is None:
                tokens_out = self.tokenizer.count(reply.text)
        return dict(zip(KEY_FIELDS, question.key(limit), strict=True)) | {
            "tokens_in": tokens_in,
            "truncated": self.tokenizer is not None and question.length > limit,
            "sample": number,
            "text": reply.text,
            "tokens_out": tokens_out,
            "stopped": not reply.is_cut_off,
        }

    def release(self) -> None:
        """Do nothing: there are no weights."""


def _count_layout(tokenizer: Tokenizer) -> int:
    """Count the tokens that the chat layout adds to a message; 0 without a layout."""
    try:
        return len(tokenizer.chat("a")) - len(tokenizer.encode("a"))
    except ValueError:
        return 0
