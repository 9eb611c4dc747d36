"""Models that reply to single prompts: chat endpoints and policies of our own.

Judges and teachers (judge.py, question_sets/teacher.py) are such models. Their flags are
--NAME_url and --NAME_model, or --NAME_policy; the key of an endpoint is read from $SPELL_NAME_KEY.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from spell_jax.rollout.text_model import SIZES, TextModel
from spell_jax.runtime.endpoint import Endpoint, EndpointConfig
from spell_jax.runtime.hosts import distributed
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.keys import fold_keys, seed_key
from spell_jax.sampler.requests import Options

log = logging.getLogger(__name__)

Numbers = Sequence[tuple[int, ...]]  # numbers from which the random key of each prompt is folded


class Replier(Protocol):
    """A model that replies to single prompts."""

    @property
    def last_failure(self) -> str:
        """Words of the last failure, with its remedy if there is one; "" without a failure."""
        ...

    def __call__(
        self, prompts: Sequence[str], numbers: Numbers = ()
    ) -> Iterable[tuple[int, str | None]]:
        """Yield (index of a prompt, reply) in order of arrival; a reply of None is a failure."""
        ...


@dataclasses.dataclass(frozen=True)
class PolicyReplier:
    """A policy of our own that replies to single prompts; see Replier.

    All processes must call it together. The prompts of process 0 count, and all processes get the
    replies. The weights are released after each call, so that another model has the memory.

    Attributes:
      model: the policy.
      max_tokens: maximum length of a reply, in tokens.
      temperature: softmax temperature; 0 is greedy, and needs no numbers.
      top_p: mass of the nucleus.
      seed: seed of sampling.
      name: name in messages, such as "judge".
    """

    model: TextModel
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    name: str = "judge"

    def __post_init__(self):
        positions = self.model.config.max_positions
        if not 0 < self.max_tokens < positions:
            raise ValueError(
                f"{self.name}_max_tokens = {self.max_tokens}: must leave room for a prompt in the "
                f"{self.name}'s max_position_embeddings = {positions}"
            )

    def __call__(
        self, prompts: Sequence[str], numbers: Numbers = ()
    ) -> Iterator[tuple[int, str | None]]:
        # Only process 0 has prompts, but all devices take part in sampling.
        prompts, numbers = distributed.broadcast(lambda: [list(prompts), list(numbers)])
        # Greedy replies without numbers use no keys.
        keys = fold_keys(seed_key(self.seed), [tuple(n) for n in numbers or [(0,)] * len(prompts)])
        options = Options(self.temperature, self.top_p, max_tokens=self.max_tokens)
        cut = replied = 0
        for index, reply in self.model.ask(prompts, 1, options, keys, truncated="zero"):
            if reply is None:
                yield index, None
                continue
            replied, cut = replied + 1, cut + (not reply.samples[0].stopped)
            # An interrupted judge or teacher states nothing: its "yes" may have been half of a
            # thought.
            yield index, reply.scored_texts[0]
        if cut:
            log.warning(
                "%d of %d replies were cut off at %d tokens: not read",
                *(cut, replied, self.max_tokens),
            )
        self.model.release()

    @property
    def last_failure(self) -> str:
        return ""  # only prompts over the policy's context get no reply


@dataclasses.dataclass(frozen=True)
class EndpointReplier:
    """A chat endpoint that replies to single prompts; see Replier. It takes no random keys."""

    endpoint: Endpoint

    def __call__(
        self, prompts: Sequence[str], numbers: Numbers = ()
    ) -> Iterable[tuple[int, str | None]]:
        return self.endpoint(prompts)

    @property
    def last_failure(self) -> str:
        return self.endpoint.last_failure


def make_replier(
    name: str,
    *,
    url: str = "",
    model: str = "",
    policy: str = "",
    sampling: dict[str, Any] | None = None,
    dtype: str = "float32",
    thinking: bool | None = None,
    sizes: SamplerConfig = SIZES,
    seed: int = 0,
    **endpoint: Any,
) -> tuple[Replier, str]:
    """Make the model that replies as `name`; return it with its model's name.

    Args:
      name: name in messages, such as "judge"; $SPELL_NAME_KEY has the key of an endpoint.
      url: address of a chat endpoint, with `model`, the model's name there.
      model: see `url`.
      policy: folder of a policy of our own, instead of an endpoint.
      sampling: max_tokens, temperature and top_p; greedy replies without the last two.
      dtype: dtype of the policy's weights.
      thinking: thinking mode of the policy's chat template, as in tokenizer.load.
      sizes: sampler sizes of the policy.
      seed: seed of the policy's sampling. An endpoint takes no random key.
      endpoint: other fields of EndpointConfig.

    Raises the errors of EndpointConfig and TextModel, and ValueError if max_tokens is out of range.
    """
    sampling = sampling or {}
    if policy:
        text_model = TextModel(policy, dtype, thinking, sizes)
        replier = PolicyReplier(text_model, **sampling, seed=seed, name=name)
        # The caches of replies are keyed by this name: other weights must not reuse replies.
        return replier, f"{text_model.name} {text_model.fingerprint()}"
    key_name = f"SPELL_{name.upper()}_KEY"
    try:
        config = EndpointConfig(
            url, model, os.environ.get(key_name), key_name=key_name, **sampling, **endpoint
        )
    except ValueError as error:
        raise ValueError(f"{name}'s {error}") from error
    return EndpointReplier(Endpoint(config)), model
