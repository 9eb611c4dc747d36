"""Sampler calls of a SPELL step's rollout, counted without a device.

1. Every question is a coroutine that asks as algorithms/spell/algorithm.py does: a question, an
   answer without documents, the frozen reader's answers, G answers, their verdicts.
2. The sampler's own scheduler plans the calls. Shared prefixes, pages, slots and refills equal a
   run's (sampler/session.py), and so do the numbers of prefill calls and decode passes.
3. Answers have random lengths, geometric up to the cap. Tokens are dummies that are equal only
   where prompts share a prefix.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.runtime.config import check_least
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.requests import SampleRequest
from spell_jax.sampler.scheduler import DecodeSequence, Scheduler, ShardShape, Tasks
from spell_jax.sampler.session import NO_LIMIT, most_idle_passes

# Tokens of the short texts, as in benchmarks/rollout.py: the template that all verifier prompts
# begin with, a question, and the end of an answer that a verifier reads.
TEMPLATE, QUESTION, ANSWER = 192, 64, 64
BLIND, READER = "no documents", "reader"  # agents besides the three roles
_SEED = 0  # of the answers' lengths


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of a step that no config fixes. All are assumptions, and flags of launch.plan --time.

    Attributes:
      prompt: tokens of a responder's prompt.
      tokens: mean tokens of a question or an answer; the lengths are geometric up to the cap.
      verdict_tokens: mean tokens of a verdict, likewise.
      shown: share of the responder's prompt that the questioner reads.
      answered: share of the proposals that pass the filters and are answered.
      rounds: rounds of proposals until enough questions have mixed rewards.
    """

    prompt: int
    tokens: int
    verdict_tokens: int
    shown: float = 0.5
    answered: float = 0.5
    rounds: int = 1

    def __post_init__(self):
        # A responder's prompt ends with the question, and its documents are at least as long.
        check_least(self, "", prompt=2 * QUESTION, tokens=1, verdict_tokens=1, rounds=1)
        for name in ("shown", "answered"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0, at most 1")


@dataclasses.dataclass
class AgentCounts:
    """Counts of one agent: what calls read and sample for it. A call for several is divided."""

    requests: int = 0
    calls: float = 0.0  # prefill calls
    prompt_tokens: int = 0  # read by prefill; tokens of shared pages are not read again
    # Pairs of a prompt token and a key that it attends to. Row shards wait for the busiest shard: a
    # call counts as if all had as many.
    prompt_pairs: float = 0.0
    prompt_keys: int = 0  # keys that prefill reads: those before the end of a page, once a page
    passes: float = 0.0  # decode passes
    tokens: int = 0  # sampled
    pairs: int = 0  # pairs of a sampled token and a key that it attends to
    keys: int = 0  # keys that decode reads: a prompt's once for its samples, and their own


Call = list[tuple[str, Any, int]]  # agent, prompt and group of the requests of one `ask`


class QuestionCoroutines:
    """The coroutines of a round's questions; like RolloutWorker's, each yields what it asks for."""

    def __init__(self, config: SpellConfig, work: Workload):
        self.config, self.work = config, work
        self._numbers: dict[tuple[object, ...], int] = {}

    def _text(self, tokens: int, *name: object) -> np.ndarray:
        """Return dummy tokens: equal for equal names, and different for different names."""
        # The scheduler compares token ids to find shared prefixes, and reads nothing else of them.
        number = self._numbers.setdefault(name, len(self._numbers))
        return np.full(tokens, number, np.int32)

    def questioner(self, item: int) -> np.ndarray:
        cluster = item // self.config.questions_per_cluster
        return self._text(max(1, int(self.work.shown * self.work.prompt)), "shown", cluster)

    def responder(self, item: int) -> np.ndarray:
        documents = "documents", item // self.config.questions_per_cluster
        question = self._text(QUESTION, "question", item)
        return np.concatenate([self._text(self.work.prompt - QUESTION, *documents), question])

    def verifier(self, item: int, answer: int) -> np.ndarray:
        shared = self._text(TEMPLATE, "template"), self._text(QUESTION, "question", item)
        return np.concatenate([*shared, self._text(ANSWER, "answer", item, answer)])

    def is_answered(self, item: int) -> bool:
        """Return whether a question passes the filters: a share `answered` does, evenly spread."""
        share = self.work.answered
        # In float64, .29 * 100 is below 29: 1e-9 lifts such products to their integer.
        return int((item + 1) * share + 1e-9) > int(item * share + 1e-9)

    def propose(self, item: int) -> Generator[Call]:
        yield [("questioner", self.questioner(item), 1)]

    def check(self, item: int) -> Generator[Call]:
        c = self.config
        if c.grounding_samples:
            yield [(BLIND, self._text(QUESTION, "question", item), c.grounding_samples)]
        if c.has_reader:
            yield [(READER, self.questioner(item), c.reader_samples)]

    def solve(self, item: int) -> Generator[Call]:
        c = self.config
        if not self.is_answered(item):
            return
        yield [("responder", self.responder(item), c.group_size)]
        if c.has_verifier:
            answers = range(c.group_size)
            size = c.verifier_group_size
            yield [("verifier", self.verifier(item, answer), size) for answer in answers]

    def stages(self) -> list[Callable[[int], Generator[Call]]]:
        """Return coroutines of an item by stage; a stage starts after all items ended the last."""
        if self.config.questions_per_cluster > 1:  # duplicates are dropped after all proposals
            return [self.propose, self.check, self.solve]

        def all_parts(item: int) -> Generator[Call]:
            yield from self.propose(item)
            yield from self.check(item)
            yield from self.solve(item)

        return [all_parts]


def count_calls(
    config: SpellConfig, sampling: SamplerConfig, shape: ShardShape, shards: int, work: Workload
) -> dict[str, AgentCounts]:
    """Count the calls of one round, by agent.

    `shape` and `shards` are the sampler's. ValueError if a request can never fit into the pool.
    """
    questions, rng = QuestionCoroutines(config, work), np.random.default_rng(_SEED)
    counts_by_agent: dict[str, AgentCounts] = defaultdict(AgentCounts)
    for stage in questions.stages():
        waiting = deque(
            (coroutine, next(coroutine, []))
            for coroutine in map(stage, range(config.generation_batch))
        )
        while any(call for _, call in waiting):
            # One model at a time, as RolloutWorker serves them: the frozen reader has weights and
            # keys of its own.
            first = next(call for _, call in waiting if call)[0][0] == READER
            session = _Session(sampling, shape, shards, work, rng, counts_by_agent)
            later = deque(pair for pair in waiting if pair[1] and is_reader(pair[1]) != first)
            mine = deque(pair for pair in waiting if pair[1] and is_reader(pair[1]) == first)
            while mine or session.unfinished:
                while mine:
                    session.submit(*mine.popleft())
                for coroutine in session.advance():
                    call = next(coroutine, [])
                    if call:
                        (mine if is_reader(call) == first else later).append((coroutine, call))
            waiting = later
    return dict(counts_by_agent)


def is_reader(call: Call) -> bool:
    return call[0][0] == READER


class _Session:
    """sampler.session.Session, with lengths in place of sampled tokens."""

    def __init__(
        self,
        sampling: SamplerConfig,
        shape: ShardShape,
        shards: int,
        work: Workload,
        rng: np.random.Generator,
        counts_by_agent: dict[str, AgentCounts],
    ):
        self._sampling, self._work, self._rng = sampling, work, rng
        self._counts_by_agent = counts_by_agent
        self._scheduler = Scheduler(shape, shards)
        self._lengths: list[np.ndarray] = []  # of the answers of each ticket
        self._coroutines: list[Generator[Call]] = []  # that asked for each ticket
        self._missing: Counter[Generator[Call]] = Counter()  # requests without answers
        self._running: list[tuple[int, list[tuple[int, DecodeSequence, int]]]] = []

    @property
    def unfinished(self) -> bool:
        return self._scheduler.unfinished

    def submit(self, coroutine: Generator[Call], call: Call) -> None:
        for agent, prompt, group in call:
            cap, mean = self._sampling.max_tokens, self._work.tokens
            if agent == "verifier":
                cap, mean = self._sampling.max_verdict_tokens, self._work.verdict_tokens
            # A stop token of constant probability gives geometric lengths, with a long tail that
            # keeps slots busy.
            lengths = self._rng.geometric(1 / mean, group) if mean < cap else np.full(group, cap)
            options = self._sampling.options(cap)
            key = np.zeros(2, np.uint32)
            request = SampleRequest(prompt, group, key, options, agent)
            self._scheduler.submit(len(self._lengths), request)
            self._lengths.append(np.minimum(lengths, cap))
            self._coroutines.append(coroutine)
            self._missing[coroutine] += 1
            self._counts_by_agent[agent].requests += 1

    def advance(self) -> list[Generator[Call]]:
        """Advance like Session.advance; return the coroutines with all requests answered."""
        ended = []
        for lane, sampled in self._running:
            for number, sequence, new in sampled:
                sequence.count += new
                ticket, shard = sequence.prefilled.ticket, self._scheduler.shards[number]
                if sequence.count < self._lengths[ticket][sequence.number]:
                    continue
                if shard.finish(shard.lanes[lane], sequence):
                    coroutine = self._coroutines[ticket]
                    self._missing[coroutine] -= 1
                    ended += [coroutine] * (not self._missing[coroutine])
        self._running = []
        self._scheduler.dispatch(self._prefill, self._decode)
        return ended

    def _prefill(self, tasks: Tasks) -> None:
        size, pairs = self._scheduler.shape.page_size, [Counter() for _ in tasks]
        count = sum(map(len, tasks))
        for shard, shard_tasks in enumerate(tasks):
            for prefilled, number in shard_tasks:
                agent, before = prefilled.request.agent, number * size
                tokens = min(len(prefilled.tokens) - before, size)
                agent_counts = self._counts_by_agent[agent]
                agent_counts.calls += 1 / count
                agent_counts.prompt_tokens += tokens
                agent_counts.prompt_keys += before + tokens
                pairs[shard][agent] += tokens * before + tokens * (tokens + 1) // 2
        totals = [shard_pairs.total() for shard_pairs in pairs]
        for agent, agent_pairs in sum(pairs, Counter()).items():
            self._counts_by_agent[agent].prompt_pairs += (
                agent_pairs * max(totals) * len(totals) / sum(totals)
            )

    def _decode(self, lane: int) -> None:
        scheduler, decode_tokens = self._scheduler, self._sampling.decode_tokens
        limits = [
            shard.allocate_pages(shard.lanes[lane], decode_tokens) for shard in scheduler.shards
        ]
        left = []  # tokens until each active sequence ends or pauses
        for number, shard_limits in enumerate(limits):
            for sequence, limit in shard_limits.items():
                length = self._lengths[sequence.prefilled.ticket][sequence.number]
                if sequence.count < limit:
                    left.append((number, sequence, min(limit, int(length)) - sequence.count))
        if not left:  # all wait for pages
            return
        most_idle = most_idle_passes(len(left)) if scheduler.has_queued(lane) else NO_LIMIT
        # The device ends a call when idle slots have lost half a pass of all slots, so that they
        # are refilled (docs/sampler.md). Here the passes until then follow from the lengths.
        tokens_left = np.array([tokens for *_, tokens in left])
        steps = min(decode_tokens, tokens_left.max())
        # Slot passes lost after each number of passes, the next pass included.
        passes = np.arange(1, steps + 1)[:, None]
        idle = np.maximum(passes + 1 - tokens_left, 0).sum(axis=1)
        steps = int(min(steps, 1 + np.searchsorted(idle, most_idle)))
        sampled = [(number, sequence, min(tokens, steps)) for number, sequence, tokens in left]
        self._running.append((lane, sampled))
        total = sum(new for *_, new in sampled)
        # A pass reads a prompt's keys once for all its samples.
        longest: Counter = Counter()  # prompt -> steps in which one of its samples is decoded
        for _, sequence, new in sampled:
            agent_counts = self._counts_by_agent[sequence.prefilled.request.agent]
            answer_keys = new * (new + 1) // 2 + new * sequence.count
            agent_counts.passes += steps * new / total
            agent_counts.tokens += new
            agent_counts.pairs += answer_keys + new * len(sequence.prefilled.tokens)
            agent_counts.keys += answer_keys
            longest[sequence.prefilled] = max(longest[sequence.prefilled], new)
        for prefilled, new in longest.items():
            self._counts_by_agent[prefilled.request.agent].keys += new * len(prefilled.tokens)
