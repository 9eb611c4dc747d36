"""Rollout worker: runs an algorithm's coroutines and turns their requests into sampler calls.

1. `run_all` starts one coroutine per item and runs each up to its first `await ask(...)`, which
   yields a PendingCall. The worker submits one request per prompt to the session of its model.
2. While the device samples, the worker collects finished answers, resumes the coroutines with
   complete calls, and submits their next requests to the same session.
3. One model is served until no call to it is pending, then the next: every session has its own KV
   cache, and only one is held at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.policy.transformer import Params
from spell_jax.rollout.replies import Ask, Item, Prompt, Replies, Result, make_reply
from spell_jax.rollout.text_model import TextSampler, encode
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.sampler.keys import fold_keys
from spell_jax.sampler.requests import SampleRequest
from spell_jax.sampler.session import Session


@dataclasses.dataclass(eq=False)
class PendingCall:
    """A call of replies.Ask. Awaiting it yields it to the worker and returns the replies."""

    number: tuple[int, int]  # (coroutine in the step, call in the coroutine), from 1
    role: str
    prompts: Sequence[str]
    group: int = 1
    model: str = "policy"
    # Fields of Options that differ from the sampler's config.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    item: int = 0  # index of the coroutine in `run_all`
    encoded: list[Prompt] = dataclasses.field(default_factory=list)  # the prompts as tokens
    replies: Replies = dataclasses.field(default_factory=Replies)
    missing: int = 0  # submitted prompts without a reply
    # Index of an answered prompt -> all its samples, also samples that `replies` leave out.
    samples: dict[int, Sequence[Sample]] = dataclasses.field(default_factory=dict)

    @property
    def agent(self) -> str:
        """Name under which the call is counted: the role, or a model other than the policy."""
        return self.role if self.model == "policy" else self.model

    def __await__(self) -> Generator[PendingCall, None, Replies]:
        yield self
        return self.replies


def _make_ask(coroutine: int) -> Ask:
    calls = itertools.count(1)

    async def ask(
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
        **options: Any,
    ) -> Replies:
        if temperature is not None:
            options["temperature"] = temperature
        number = coroutine, next(calls)
        pending = PendingCall(number, role, prompts, group, model, options)
        return await pending if prompts else Replies()

    return ask


class RolloutWorker:
    """An algorithm's `AskModels`: the policy, its copies, and models with their own weights.

    The key of a request is the worker's key folded with step, coroutine, call and prompt; the
    sampler folds in the sample and the position. Replies to a coroutine therefore depend neither on
    the other coroutines nor on timing, and a resumed run repeats them.

    Attributes:
      metrics: counts since `start_step`. By role (by model, for others than the policy): tokens of
        prompts and of answers, share of answers truncated at the cap, share of prompts refused. By
        session: use of the slots (Session.counts).
      waited: seconds in which the host waited for the device, by role or model.
      sampled_tokens: tokens of answers since `start_step`.
      prefilled_tokens: prompt tokens that were read since `start_step`.
    """

    def __init__(
        self,
        text_sampler: TextSampler,
        key: jax.Array,
        other_samplers: Mapping[str, TextSampler] | None = None,
    ):
        """Create a worker; `other_samplers` serve models that are not copies of the policy."""
        self.sampler = text_sampler.sampler
        self._text_sampler, self._other_samplers = text_sampler, other_samplers or {}
        self._key = np.asarray(jax.random.key_data(key))
        self._is_running = False
        self.start_step(0, {})

    def start_step(
        self,
        step: int,
        params: Mapping[str, Params],
        between_calls: Callable[[], None] = lambda: None,
        truncated: str = "score",
    ) -> None:
        """Start a step with new weights and counts.

        `params` has weights in the compute dtype by name, looked up when a session opens.
        `between_calls` is called after each dispatch of sampler calls to the device and may
        dispatch more work. Its place in the order of calls depends only on the sampled tokens.
        `truncated` is AlgorithmConfig.truncated, the treatment of replies that the cap cut off.
        """
        self._step, self._params, self._between_calls = step, params, between_calls
        self._truncated = truncated
        self._coroutines = 0
        self._session: tuple[str, Session] | None = None
        self.metrics = Metrics()
        self.sampled_tokens = self.prefilled_tokens = 0
        self.waited: defaultdict[str, float] = defaultdict(float)

    def end_step(self) -> None:
        """Release weights and KV cache, which would only take memory during the update."""
        self._close()
        self._params, self._between_calls = {}, lambda: None

    def __call__(self, *call: Any, **options: Any) -> Replies:
        async def ask_all(ask: Ask, _: None) -> Replies:
            return await ask(*call, **options)

        (replies,) = self.run_all(ask_all, [None])
        return replies

    def run_all(
        self, function: Callable[[Ask, Item], Coroutine[Any, Any, Result]], items: Sequence[Item]
    ) -> list[Result]:
        if self._is_running:
            raise RuntimeError("a coroutine of an algorithm must call its own ask, not the worker")
        self._is_running = True
        try:
            return self._run_all(function, items)
        except BaseException:
            self._session = None  # it holds requests that no coroutine will collect
            raise
        finally:
            self._is_running = False

    def _run_all(
        self, function: Callable[[Ask, Item], Coroutine[Any, Any, Result]], items: Sequence[Item]
    ) -> list[Result]:
        coroutines: list[Coroutine[Any, Any, Result]] = []
        results: dict[int, Result] = {}
        pending: dict[str, deque[PendingCall]] = defaultdict(deque)

        def resume(item: int) -> None:
            try:
                call = coroutines[item].send(None)
            except StopIteration as end:
                results[item] = end.value
                return
            if not isinstance(call, PendingCall):
                raise TypeError(f"a coroutine of an algorithm must await its ask, not {call!r}")
            call.item = item
            pending[call.model].append(call)

        for number, item in enumerate(items):
            # Counted over the step: two calls of run_all in a step must not share random keys.
            self._coroutines += 1
            coroutines.append(function(_make_ask(self._coroutines), item))
            resume(number)
        # All calls to a model before the next model: a change of models closes the session, and its
        # cached prefixes are lost.
        while model := next((name for name, calls in pending.items() if calls), None):
            for call in self._answer(model, pending[model]):
                # `_answer` pauses here, between two device calls: new requests join the open
                # session.
                resume(call.item)
        return [results[number] for number in range(len(items))]

    def _answer(self, model: str, pending: deque[PendingCall]) -> Iterator[PendingCall]:
        """Answer a model's pending calls and calls added meanwhile; yield each when complete."""
        session, tokenizer = self._open(model), self._text_sampler_of(model).tokenizer
        tickets: dict[int, tuple[PendingCall, int]] = {}
        while pending or tickets:
            new = [pending.popleft() for _ in range(len(pending))]
            tickets |= self._submit(session, tokenizer, new)
            answered = [call for call in new if not call.missing]  # all prompts are over the cap
            finished = session.advance()
            self._between_calls()
            for ticket, samples in finished:
                call, place = tickets.pop(ticket)
                call.samples[place] = samples
                prompt = call.encoded[place]
                reply = make_reply(prompt, samples, tokenizer.decode, self._truncated)
                if reply.samples:
                    call.replies[place] = reply
                else:
                    call.replies.dropped[place] = tuple(reply.dropped)
                call.missing -= 1
                if not call.missing:
                    answered.append(call)
            for call in answered:
                self._count(call)
                yield call

    def _submit(
        self, session: Session, tokenizer: Tokenizer, new: Sequence[PendingCall]
    ) -> dict[int, tuple[PendingCall, int]]:
        """Submit the prompts under the cap; return ticket -> (call, index of the prompt in it)."""
        config, tickets = self.sampler.config, {}
        for call in new:
            call.encoded = [encode(tokenizer, prompt) for prompt in call.prompts]
            call.replies = Replies(len(call.prompts))
        places = [(call, place) for call in new for place in range(len(call.prompts))]
        keys = fold_keys(self._key, [(self._step, *call.number, place) for call, place in places])
        for (call, place), key in zip(places, keys, strict=True):
            prompt = call.encoded[place]
            if not self.sampler.prompt_fits(prompt.ids):
                continue
            options = config.options(**call.options)
            request = SampleRequest(prompt.ids, call.group, key, options, call.agent)
            tickets[session.submit(request)] = call, place
            call.missing += 1
        return tickets

    def _text_sampler_of(self, model: str) -> TextSampler:
        return self._other_samplers.get(model, self._text_sampler)

    def _open(self, model: str) -> Session:
        """Return the session of a model, in which prompts of a step share common prefixes."""
        if self._session is None or self._session[0] != model:
            self._close()
            sampler = self._text_sampler_of(model).sampler
            self._session = model, sampler.start_session(self._params[model])
        return self._session[1]

    def _close(self) -> None:
        if self._session is None:
            return
        session, self._session = self._session[1], None
        counts = session.counts
        self.metrics.add_sum("sampler/starved_slots", counts.starved_slot_steps, counts.slot_steps)
        self.metrics.add_sum(
            "sampler/padded_group_slots", counts.padded_group_slots, counts.group_slot_steps
        )
        self.metrics.add_sum(
            "sampler/reused_prompt_tokens", session.reused_tokens, counts.prompt_tokens
        )
        self.sampled_tokens += counts.tokens
        self.prefilled_tokens += counts.prefilled_tokens
        for agent, seconds in counts.device_wait_seconds.items():
            self.waited[agent] += seconds

    def _count(self, call: PendingCall) -> None:
        agent = call.agent
        samples = [sample for group in call.samples.values() for sample in group]
        prompt_tokens = sum(len(call.encoded[place].ids) for place in call.samples)
        tokens = sum(len(sample.tokens) for sample in samples)
        truncated = sum(not sample.stopped for sample in samples)
        scored = truncated if self._truncated == "score" else 0
        refused = len(call.prompts) - len(call.samples)
        self.metrics.add_sum(f"prompt_tokens/{agent}", prompt_tokens, len(call.samples))
        self.metrics.add_sum(f"answer_tokens/{agent}", tokens, len(samples))
        self.metrics.add_sum(f"truncated/{agent}", truncated, len(samples))
        self.metrics.add_sum("truncated_scored", scored, len(samples))
        self.metrics.add_sum(f"refused/{agent}", refused, len(call.prompts))
