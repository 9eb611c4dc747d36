"""The models of a game, asked in words: chat layout, sampler, text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from spell_jax.games.game import Reply
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.policy.transformer import Params
from spell_jax.runtime.metrics import Metrics
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.session import Session


class Players:
    """A game's `Ask`: answers prompts with one of several models behind one sampler.

    Keys are fold_in(fold_in(key, step), call), then request, sibling and token (sampler): the same
    step asks the same questions with the same random numbers, resumed or not.

    `metrics` holds, for what was said since `begin`, tokens of prompts and answers and the share of
    answers cut off at the cap, by role (or by model, where it is another one than the policy).
    """

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer, key: jax.Array):
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._key = key
        self._step_key = key
        self._call = 0
        self._models: Mapping[str, Params] = {}
        self._session: tuple[str, Session] | None = None
        self.metrics = Metrics()

    def begin(self, step: int, models: Mapping[str, Params]) -> None:
        """Starts a step with these weights (compute dtype) by model name."""
        self._step_key = jax.random.fold_in(self._key, step)
        self._call = 0
        self._models, self._session = models, None
        self.metrics = Metrics()

    def end(self) -> None:
        """Lets go of weights and pool: while the policy is updated they would only take memory."""
        self._models, self._session = {}, None

    def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]:
        """See games.game.Ask; verdicts have a cap of their own."""
        self._call += 1
        if not prompts:
            return []
        config = self._sampler.config
        ids = [self._tokenizer.chat(prompt) for prompt in prompts]
        cap = config.max_verdict_tokens if role == "verifier" else config.max_tokens
        others = {} if temperature is None else {"temperature": temperature}
        key = jax.random.fold_in(self._step_key, self._call)
        answers = self._open(model).sample(ids, group, key, config.options(cap, **others))
        replies = [
            None
            if samples is None
            else Reply(prompt, samples, [self._tokenizer.decode(s.content) for s in samples])
            for prompt, samples in zip(ids, answers, strict=True)
        ]
        self._count(role if model == "policy" else model, [r for r in replies if r is not None])
        return replies

    def _open(self, model: str) -> Session:
        """The session with a model, in which prompts of this step's calls share what they begin
        with; one at a time, as each has a pool."""
        if self._session is None or self._session[0] != model:
            params, self._session = self._models[model], None
            self._session = model, self._sampler.begin(params)
        return self._session[1]

    def _count(self, speaker: str, replies: Sequence[Reply]) -> None:
        samples = [sample for reply in replies for sample in reply.samples]
        tokens = sum(len(sample.tokens) for sample in samples)
        cut_off = sum(not sample.stopped for sample in samples)
        prompt_tokens = sum(len(reply.prompt) for reply in replies)
        self.metrics.add_sum(f"prompt_tokens/{speaker}", prompt_tokens, len(replies))
        self.metrics.add_sum(f"answer_tokens/{speaker}", tokens, len(samples))
        self.metrics.add_sum(f"cut_off/{speaker}", cut_off, len(samples))
