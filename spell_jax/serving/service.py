"""The thread that owns the device: one session that stays open answers all requests.

1. A job, all prompts of one HTTP request, enters through a queue that any thread may fill. Its
   prompts join the running session before the next calls are dispatched.
2. After each `advance` of the session, new tokens and finished answers go to the event loop, in the
   order in which they were sampled. Scores of finished sequences are computed between two calls.
3. A canceled job leaves its slots and pages. An idle thread waits for the queue.
4. Logits that are not finite fail one job. The page pool may hold such keys and values, so a new
   session answers the other jobs from their beginning: the same tokens, since answers depend on a
   request alone. After any other error all jobs fail, and a new session serves the next ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.sampler.requests import SampleRequest
from spell_jax.sampler.session import NonFiniteError, PendingAnswers, Session
from spell_jax.serving.protocol import ProtocolError
from spell_jax.serving.scoring import AnswerScores, Scorer

log = logging.getLogger(__name__)

RETRY_S = 1  # seconds until a client over capacity should ask again
# Tokens of sequences that are scored between two calls of the sampler, at least one sequence.
_SCORED_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """Tokens that were sampled for an answer since its last event.

    Attributes:
      prompt: index of the prompt in its job.
      sample: index of the answer.
      ids: token ids, int32 [n].
      logprobs: logprobs of the tokens, float32 [n].
    """

    prompt: int
    sample: int
    ids: np.ndarray
    logprobs: np.ndarray


@dataclasses.dataclass(frozen=True)
class PromptAnswers:
    """All answers to a prompt.

    Attributes:
      prompt: index of the prompt in its job.
      samples: the answers [G]; empty if none was asked for.
      reused_tokens: number of prompt tokens taken from a shared prefix.
      scores: scores of each answer, or with `echo` of the sequence from its second token on [G];
        empty if not asked for.
    """

    prompt: int
    samples: Sequence[Sample]
    reused_tokens: int = 0
    scores: Sequence[AnswerScores] = ()


@dataclasses.dataclass(frozen=True)
class Failure:
    """The end of a job by an error."""

    error: ProtocolError


Event = NewTokens | PromptAnswers | Failure


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """Scores of the finished sequences of a job: temperature, and whether prompts are scored."""

    temperature: float
    echo: bool


class Job:
    """The prompts of one HTTP request.

    Attributes:
      requests: requests to the sampler, one for each prompt.
      streams: whether tokens are delivered as they are sampled.
      scoring: scores to compute; None for none.
      samples: whether answers are sampled; else prompts are only scored.
      events: what happened, on the event loop. A job ends with a Failure, or with one PromptAnswers
        for each prompt.
      unanswered: number of prompts without a last event that was read.
    """

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        streams: bool = False,
        scoring: ScoreRequest | None = None,
        samples: bool = True,
    ):
        self.requests, self.streams = requests, streams
        self.scoring, self.samples = scoring, samples
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.unanswered = len(requests)

    async def next_event(self) -> Event:
        """Wait for the next event."""
        event = await self.events.get()
        if isinstance(event, PromptAnswers):
            self.unanswered -= 1
        elif isinstance(event, Failure):
            self.unanswered = 0
        return event

    async def wait(self) -> list[PromptAnswers]:
        """Wait for the answers to all prompts, in their order; raise ProtocolError at a failure."""
        answers: dict[int, PromptAnswers] = {}
        while self.unanswered:
            event = await self.next_event()
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, PromptAnswers):
                answers[event.prompt] = event
        return [answers[prompt] for prompt in range(len(self.requests))]


@dataclasses.dataclass
class _Place:
    """A prompt of a job in the session.

    `delivered` counts the tokens of each answer that went to the event loop.
    """

    job: Job
    prompt: int
    pending: PendingAnswers
    delivered: list[int]


@dataclasses.dataclass
class _Scoring:
    """A prompt with answers whose sequences are being scored."""

    job: Job
    answers: PromptAnswers
    scores: list[AnswerScores] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def sequences(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """The prompt, and the sequences to score after the prompt, int32 [S] each."""
        assert self.job.scoring is not None
        prompt = np.asarray(self.job.requests[self.answers.prompt].prompt, np.int32)
        sequences = [sample.tokens for sample in self.answers.samples]
        if not self.job.scoring.echo:
            return prompt, sequences
        joined = [np.concatenate([prompt, ids]) for ids in sequences] or [prompt]
        return prompt[:1], [ids[1:] for ids in joined]


@dataclasses.dataclass(frozen=True)
class ServiceState:
    """Numbers of a service.

    Attributes:
      waiting: prompts that wait for the sampler, or for their scores.
      running: prompts that are read or answered.
      pages: pages of the pool that they use.
      all_pages: pages of the pool.
      restarts: number of sessions that were given up.
    """

    waiting: int = 0
    running: int = 0
    pages: int = 0
    all_pages: int = 0
    restarts: int = 0


class Service:
    """Jobs in, events out. `submit`, `cancel` and `end_all` are called on the event loop."""

    def __init__(self, start_session: Callable[[], Session], scorer: Scorer, max_queued: int):
        """Prepare; `start` begins.

        Args:
          start_session: function that opens a session of the policy.
          scorer: scorer of the same policy.
          max_queued: number of prompts that may wait.
        """
        self._start_session, self._scorer, self._max_queued = start_session, scorer, max_queued
        self._session: Session = start_session()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._arriving = 0  # prompts in the inbox
        self._restarts = 0
        self._state = ServiceState()
        self._places: dict[int, _Place] = {}  # by ticket
        self._to_score: deque[_Scoring] = deque()
        self._posts: list[tuple[Job, Event]] = []
        self._open: set[Job] = set()  # jobs without a last event; of this thread alone
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events go to `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current call, and wait for its end."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def state(self) -> ServiceState:
        """The numbers after the last call of the sampler."""
        # Not read from the session, which another thread changes.
        return self._state

    def check_capacity(self, prompts: int) -> None:
        """Raise ProtocolError with status 429 if as many more prompts may not wait.

        The status is 503 if the thread has ended.
        """
        if not self._thread.is_alive():
            raise ProtocolError("the server failed; it must be started again", 503)
        waiting = self._arriving + self._state.waiting
        if waiting + prompts > self._max_queued:
            raise ProtocolError(
                f"{waiting} prompts wait already, at most {self._max_queued} may; ask again later",
                429,
                code="rate_limit_exceeded",
                retry_s=RETRY_S,
            )

    def submit(self, job: Job) -> None:
        """Start a job; ProtocolError as `check_capacity`."""
        self.check_capacity(len(job.requests))
        with self._lock:
            self._arriving += len(job.requests)
        self._inbox.put(functools.partial(self._admit, job))

    def cancel(self, job: Job) -> None:
        """End a job without further events; a finished job is left alone."""
        self._inbox.put(functools.partial(self._drop, job))

    def end_all(self, error: ProtocolError) -> None:
        """End all jobs with an error."""
        self._inbox.put(functools.partial(self._fail_all, error))

    # --------------------------------------------------------------------------- The service thread

    def _run(self) -> None:
        try:
            self._run_until_stopped()
        finally:  # a session that cannot be opened ends the thread, and no client may wait for ever
            self._fail_all(ProtocolError("the server failed; it must be started again", 503))
            self._flush()

    def _run_until_stopped(self) -> None:
        while True:
            try:
                if not self._take():
                    return
                self._step()
            except NonFiniteError as error:
                self._restart(error.ticket)
            except Exception as error:  # of the device or the compiler; the service goes on
                log.exception("all jobs fail, a new session serves the next ones")
                self._fail_all(ProtocolError(f"the server failed: {type(error).__name__}", 500))
                self._renew()
            self._note()
            self._flush()

    def _take(self) -> bool:
        """Do what the queue asks for, and wait if there is no other work; False at the end."""
        while True:
            is_idle = not self._session.unfinished and not self._to_score
            try:
                command = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            self._note()
            self._flush()

    def _note(self) -> None:
        """Note the numbers of the session for other threads."""
        queued, pages = self._session.queued, self._session.pages
        waiting, running = queued + len(self._to_score), len(self._places) - queued
        self._state = ServiceState(waiting, running, *pages, self._restarts)

    def _step(self) -> None:
        if self._session.unfinished:
            finished = self._session.advance()
            for ticket, samples in finished:
                if place := self._places.get(ticket):
                    self._deliver(place)
                    del self._places[ticket]
                    reused = place.pending.reused_tokens or 0
                    self._complete(place.job, PromptAnswers(place.prompt, samples, reused))
            for place in self._places.values():
                self._deliver(place)
        if self._to_score:
            self._score(self._to_score[0])

    def _admit(self, job: Job) -> None:
        self._open.add(job)
        try:
            self._submit_all(job)
        except ValueError as error:
            self._fail(job, ProtocolError(str(error)))
        self._note()  # before they leave the count of arrivals, so that none is missed
        with self._lock:
            self._arriving -= len(job.requests)

    def _submit_all(self, job: Job) -> None:
        for prompt, request in enumerate(job.requests):
            if not job.samples:
                self._complete(job, PromptAnswers(prompt, []))
            else:
                self._submit(job, prompt, [0] * request.group)

    def _submit(self, job: Job, prompt: int, delivered: list[int]) -> None:
        ticket = self._session.submit(job.requests[prompt])
        pending = self._session.progress(ticket)
        self._places[ticket] = _Place(job, prompt, pending, delivered)

    def _deliver(self, place: _Place) -> None:
        """Send the new tokens of a prompt's answers, if its job streams."""
        if not place.job.streams:
            return
        for number, answer in enumerate(place.pending.answers):
            ids, logprobs = answer.tokens_from(place.delivered[number])
            if len(ids):
                place.delivered[number] += len(ids)
                event = NewTokens(place.prompt, number, ids, logprobs)
                self._posts.append((place.job, event))

    def _complete(self, job: Job, answers: PromptAnswers) -> None:
        """Send the answers to a prompt, after their scores if the job needs them."""
        if job.scoring is not None:
            self._to_score.append(_Scoring(job, answers))
        else:
            self._post_last(job, answers)

    def _score(self, scoring: _Scoring) -> None:
        """Score the next sequences of a prompt, and send its last event after the last ones."""
        job, request = scoring.job, scoring.job.scoring
        assert request is not None
        prompt, sequences = scoring.sequences
        if not all(len(ids) for ids in sequences):
            sequences = []
        # A few, so that the next call of the sampler is not late.
        longest = len(prompt) + max(map(len, sequences), default=0)
        begin, count = len(scoring.scores), max(1, _SCORED_TOKENS // longest)
        if part := sequences[begin : begin + count]:
            try:
                # At temperature 0, logprobs are those at 1, as the sampler's.
                temperature = request.temperature or 1.0
                scoring.scores += self._scorer.score(prompt.tolist(), part, temperature)
            except FloatingPointError as error:
                self._fail(job, ProtocolError(f"the server failed: {error}", 500))
                return
        if len(scoring.scores) == len(sequences):
            self._to_score.popleft()
            self._post_last(job, dataclasses.replace(scoring.answers, scores=scoring.scores))

    def _post_last(self, job: Job, answers: PromptAnswers) -> None:
        """Send the last event of a prompt."""
        self._posts.append((job, answers))
        is_unfinished = any(place.job is job for place in self._places.values())
        if not is_unfinished and all(scoring.job is not job for scoring in self._to_score):
            self._open.discard(job)

    def _fail(self, job: Job, error: ProtocolError) -> None:
        self._drop(job)
        self._posts.append((job, Failure(error)))

    def _fail_all(self, error: ProtocolError) -> None:
        for job in list(self._open):
            self._fail(job, error)

    def _drop(self, job: Job) -> None:
        """Remove a job: free its slots and pages."""
        self._open.discard(job)
        for ticket, place in list(self._places.items()):
            if place.job is job:
                del self._places[ticket]
                self._session.cancel(ticket)
        self._to_score = deque(scoring for scoring in self._to_score if scoring.job is not job)

    def _restart(self, failed_ticket: int) -> None:
        """Fail the job of a ticket, and continue all other jobs in a new session."""
        log.error("logits of a request are not finite: it fails, a new session answers the others")
        if place := self._places.get(failed_ticket):
            error = "the server failed: the policy's logits are not finite"
            self._fail(place.job, ProtocolError(error, 500))
        places = [*self._places.values()]
        self._renew()
        for place in places:
            self._submit(place.job, place.prompt, place.delivered)

    def _renew(self) -> None:
        # The old pool is freed first: a device may not hold two.
        self._places, self._session = {}, None  # type: ignore[assignment]
        self._session = self._start_session()
        self._restarts += 1

    def _flush(self) -> None:
        """Hand all posts to the event loop, in one call."""
        posts, self._posts = self._posts, []
        if posts:
            try:
                self._loop.call_soon_threadsafe(_put, posts)
            except RuntimeError:  # the loop is closed: the server ends
                log.debug("%d events came after the end of the server", len(posts))


def _put(posts: Sequence[tuple[Job, Any]]) -> None:
    for job, event in posts:
        job.events.put_nowait(event)
