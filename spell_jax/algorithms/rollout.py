"""The models of an algorithm, asked in words: chat layout, sampler, text.

Many coroutines of an algorithm play at the same time (`together`). What they ask goes into one
session of the sampler. While the device draws, those whose answers have come read them and ask what
follows, which joins what is still being sampled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spell_jax.algorithms.base import Ask, Item, Reply
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.policy.transformer import Params
from spell_jax.runtime.metrics import Metrics
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Request, Sample
from spell_jax.sampler.session import Session


@dataclasses.dataclass(eq=False)
class _Asked:
    """What a coroutine asked and waits for; awaited, it gives the replies.

    Attributes:
      name: number of the coroutine in the step, and of the call in the coroutine.
      role, prompts, group, model, temperature: see algorithm.Ask.
      ids: prompts as tokens.
      replies: in the order of prompts, so far.
      missing: how many are still to come.
      coroutine: who waits.
    """

    name: tuple[int, int]
    role: str
    prompts: Sequence[str]
    group: int
    model: str
    temperature: float | None
    ids: list[list[int]] = dataclasses.field(default_factory=list)
    replies: list[Reply | None] = dataclasses.field(default_factory=list)
    missing: int = 0
    coroutine: Coroutine[Any, Any, None] | None = None

    @property
    def agent(self) -> str:
        return self.role if self.model == "policy" else self.model

    def __await__(self) -> Generator[_Asked, None, list[Reply | None]]:
        yield self
        return self.replies


class _Ask:
    """How one coroutine asks; its calls are counted."""

    def __init__(self, coroutine: int):
        self._coroutine = coroutine
        self._calls = 0

    async def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]:
        self._calls += 1
        if not prompts:
            return []
        name = self._coroutine, self._calls
        return await _Asked(name, role, prompts, group, model, temperature)


@dataclasses.dataclass(frozen=True)
class TextSampler:
    """How a model speaks: its sampler and its tokenizer."""

    sampler: Sampler
    tokenizer: Tokenizer


class RolloutWorker:
    """An algorithm's `Models`: the policy, its copies, which speak as it does, and models of their
    own.

    The key of a request is fold_in of the key by step, coroutine, call and prompt (siblings and
    tokens are the sampler's): what one coroutine is told depends neither on the others nor on when
    they ask, and a resumed run repeats it.

    `metrics` holds, for what was said since `begin`, tokens of prompts and answers, the share of
    answers cut off at the cap and of prompts refused as over theirs, by role (or by model, where it
    is another one than the policy); and what the sampler's slots did (Session.counts). So do
    `sampled` and `read`, tokens of answers and of prompts, and `waited`, seconds by role or model
    in which the host waited for the device (Counts.waited).
    """

    def __init__(
        self,
        text_sampler: TextSampler,
        key: jax.Array,
        others: Mapping[str, TextSampler] | None = None,
    ):
        """Args: others are the text_samplers of models that are no copies of the policy, by
        name."""
        self.sampler = text_sampler.sampler
        self._text_sampler, self._others = text_sampler, others or {}
        self._key = np.asarray(jax.random.key_data(key))
        self._step = 0
        self._coroutines = 0
        self._models: Mapping[str, Params] = {}
        self._meanwhile: Callable[[], None] = lambda: None
        self._is_playing = False
        self._session: tuple[str, Session] | None = None
        self._reset()

    def _reset(self) -> None:
        """Nothing has been said."""
        self.metrics = Metrics()
        self.sampled = self.read = 0
        self.waited: defaultdict[str, float] = defaultdict(float)

    def begin(
        self,
        step: int,
        models: Mapping[str, Params],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts a step with these weights (compute dtype) by model name, each looked up when the
        model is asked and another was before.

        `meanwhile` is called whenever the device has been given its next calls, and may give it
        more to do; where that is in the order of calls depends on what was sampled alone.
        """
        self._step = step
        self._coroutines = 0
        self._models, self._session = models, None
        self._meanwhile = meanwhile
        self._reset()

    def end(self) -> None:
        """Lets go of weights and pool: while the policy is updated they would only take memory."""
        self._close()
        self._models, self._meanwhile = {}, lambda: None

    def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]:
        """See algorithms.algorithm.Models; verdicts have a cap of their own."""
        replies: list[Reply | None] = []

        async def ask_all(ask: Ask, prompts: Sequence[str]) -> None:
            replies.extend(await ask(role, prompts, group, model, temperature))

        self.together(ask_all, [prompts])
        return replies

    def together(
        self, play: Callable[[Ask, Item], Coroutine[Any, Any, None]], items: Sequence[Item]
    ) -> None:
        """See algorithms.algorithm.Models.

        One model is asked until nobody waits for it, then the next: each has a pool of its own, and
        one at a time is held.

        Raises:
          RuntimeError: called by a coroutine, which has an ask of its own.
          TypeError: a coroutine awaits something else than its ask.
        """
        if self._is_playing:
            raise RuntimeError("a coroutine of an algorithm may ask by its own ask alone")
        self._is_playing = True
        try:
            self._play_all(play, items)
        except BaseException:
            self._session = None  # with requests that nobody waits for any more
            raise
        finally:
            self._is_playing = False

    def _play_all(
        self, play: Callable[[Ask, Item], Coroutine[Any, Any, None]], items: Sequence[Item]
    ) -> None:
        waiting: dict[str, deque[_Asked]] = defaultdict(deque)

        def go_on(coroutine: Coroutine[Any, Any, None]) -> None:
            try:
                asked = coroutine.send(None)
            except StopIteration:
                return
            if not isinstance(asked, _Asked):
                raise TypeError(
                    f"a coroutine of an algorithm may await its ask alone, not {asked!r}"
                )
            asked.coroutine = coroutine
            waiting[asked.model].append(asked)

        for item in items:
            self._coroutines += 1
            go_on(play(_Ask(self._coroutines), item))
        while model := next((name for name, some in waiting.items() if some), None):
            for asked in self._answer(model, waiting[model]):
                assert asked.coroutine is not None
                go_on(asked.coroutine)

    def _answer(self, model: str, waiting: deque[_Asked]) -> Iterator[_Asked]:
        """Gives replies to those who wait for a model, and to who joins them meanwhile; each when
        all of its replies are there."""
        session = self._open(model)
        tickets: dict[int, tuple[_Asked, int]] = {}
        while waiting or tickets:
            new = [waiting.popleft() for _ in range(len(waiting))]
            tickets |= self._submit(session, new)
            answered = [asked for asked in new if not asked.missing]  # no prompt under the cap
            finished = session.advance()
            self._meanwhile()
            for ticket, samples in finished:
                asked, place = tickets.pop(ticket)
                asked.replies[place] = self._reply(asked.model, asked.ids[place], samples)
                asked.missing -= 1
                if not asked.missing:
                    answered.append(asked)
            for asked in answered:
                self._count(asked)
                yield asked

    def _submit(self, session: Session, new: Sequence[_Asked]) -> dict[int, tuple[_Asked, int]]:
        """Hands prompts in that are not over the cap; (whose, which of them) by ticket."""
        config, tickets = self.sampler.config, {}
        for asked in new:
            tokenizer = self._text_sampler_of(asked.model).tokenizer
            asked.ids = [tokenizer.chat(prompt) for prompt in asked.prompts]
            asked.replies = [None] * len(asked.ids)
        places = [(asked, place) for asked in new for place in range(len(asked.ids))]
        keys = fold_keys(self._key, [(self._step, *asked.name, place) for asked, place in places])
        for (asked, place), key in zip(places, keys, strict=True):
            if not self.sampler.fits(asked.ids[place]):
                continue
            is_verdict = asked.role == "verifier"
            cap = config.max_verdict_tokens if is_verdict else config.max_tokens
            others = {} if asked.temperature is None else {"temperature": asked.temperature}
            options = config.options(cap, **others)
            request = Request(asked.ids[place], asked.group, key, options, asked.agent)
            tickets[session.submit(request)] = asked, place
            asked.missing += 1
        return tickets

    def _reply(self, model: str, prompt: list[int], samples: Sequence[Sample]) -> Reply:
        decode = self._text_sampler_of(model).tokenizer.decode
        return Reply(prompt, samples, [decode(sample.content) for sample in samples])

    def _text_sampler_of(self, model: str) -> TextSampler:
        return self._others.get(model, self._text_sampler)

    def _open(self, model: str) -> Session:
        """The session with a model, in which prompts of this step share what they begin with."""
        if self._session is None or self._session[0] != model:
            self._close()
            self._session = model, self._text_sampler_of(model).sampler.begin(self._models[model])
        return self._session[1]

    def _close(self) -> None:
        """Lets go of the pool."""
        if self._session is None:
            return
        session, self._session = self._session[1], None
        counts = session.counts
        self.metrics.add_sum("sampler/starved_slots", counts.starved_slot_steps, counts.slot_steps)
        self.metrics.add_sum(
            "sampler/padded_group_slots", counts.padded_group_slots, counts.group_slot_steps
        )
        reused, all_tokens = session.reused_tokens, counts.prompt_tokens
        self.metrics.add_sum("sampler/reused_prompt_tokens", reused, all_tokens)
        self.sampled += counts.tokens
        self.read += counts.prefilled_tokens
        for agent, seconds in counts.waited.items():
            self.waited[agent] += seconds

    def _count(self, asked: _Asked) -> None:
        agent = asked.agent
        replies = [reply for reply in asked.replies if reply is not None]
        samples = [sample for reply in replies for sample in reply.samples]
        tokens = sum(len(sample.tokens) for sample in samples)
        truncated = sum(not sample.stopped for sample in samples)
        prompt_tokens = sum(len(reply.prompt) for reply in replies)
        refused = len(asked.replies) - len(replies)
        self.metrics.add_sum(f"prompt_tokens/{agent}", prompt_tokens, len(replies))
        self.metrics.add_sum(f"answer_tokens/{agent}", tokens, len(samples))
        self.metrics.add_sum(f"truncated/{agent}", truncated, len(samples))
        self.metrics.add_sum(f"refused/{agent}", refused, len(asked.replies))


_FOLDED = 256  # keys that are made in one call: of one shape, so that nothing compiles in mid-run


def fold_keys(key: np.ndarray, numbers: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Key data uint32 [n, 2] of a key into which each of n tuples is folded, number by number."""
    if not numbers:
        return np.zeros((0, 2), np.uint32)
    pieces = -(-len(numbers) // _FOLDED)
    padded = np.zeros((pieces, _FOLDED, len(numbers[0])), np.uint32)
    padded.reshape(-1, len(numbers[0]))[: len(numbers)] = numbers
    # On the host: on an accelerator it would wait for what is being sampled.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        folded = [np.asarray(_fold_all(key, piece)) for piece in padded]
    return np.concatenate(folded)[: len(numbers)]


@jax.jit
def _fold_all(key: jax.Array, numbers: jax.Array) -> jax.Array:
    first = jax.random.wrap_key_data(key)
    keys = jax.vmap(lambda some: functools.reduce(jax.random.fold_in, some, first))(numbers)
    return jax.random.key_data(keys)
