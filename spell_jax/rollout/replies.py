"""Replies of models, and the interface through which coroutines ask for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from spell_jax.data.samples import Sample
from spell_jax.learner.packing import TrainGroup

Item = TypeVar("Item")
Result = TypeVar("Result")
Answer = TypeVar("Answer", covariant=True)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as tokens.

    Attributes:
      ids: token ids [P].
      thought: start of a thought that the chat layout writes at the end of the prompt. Parsers look
        for the whole thought, so texts of answers begin with it (Tokenizer.open_thought).
    """

    ids: Sequence[int]
    thought: str = ""


@dataclasses.dataclass(frozen=True)
class Reply:
    """A model's answers to one prompt.

    Attributes:
      prompt: token ids [P].
      samples: G answers as tokens with logprobs.
      texts: the same answers as text [G], without stop tokens. A text begins with the start of a
        thought if the chat layout wrote one into the prompt.
      scored_truncated: whether answers that the token cap cut off are scored by their text.
      dropped: texts of answers that are left out because the token cap cut them off.
      decode: the model's function from token ids to text; None in replies without a tokenizer.
    """

    prompt: Sequence[int]
    samples: Sequence[Sample]
    texts: Sequence[str]
    scored_truncated: bool = True
    dropped: Sequence[str] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    @property
    def scored_texts(self) -> Sequence[str]:
        """The texts that are parsed and scored [G]: "" for a cut answer that counts for nothing."""
        if self.scored_truncated:
            return self.texts
        pairs = zip(self.texts, self.samples, strict=True)
        return [text if sample.stopped else "" for text, sample in pairs]

    def group(self, advantages: Iterable[float], name: str, model: str = "policy") -> TrainGroup:
        """Return a training group for `model`: one advantage per answer [G], counted by name."""
        return TrainGroup(self.prompt, self.samples, [float(a) for a in advantages], name, model)


def make_reply(
    prompt: Prompt,
    samples: Sequence[Sample],
    decode: Callable[[Sequence[int]], str],
    truncated: str = "score",
) -> Reply:
    """Decode the samples of a prompt, and treat those that the token cap cut off as `truncated`.

    `truncated` is as AlgorithmConfig.truncated; "drop" may leave no sample in the reply.
    """
    texts = [prompt.thought + decode(sample.content) for sample in samples]
    kept_indices = [i for i, sample in enumerate(samples) if sample.stopped or truncated != "drop"]
    return Reply(
        prompt.ids,
        [samples[i] for i in kept_indices],
        [texts[i] for i in kept_indices],
        scored_truncated=truncated == "score",
        dropped=[text for i, text in enumerate(texts) if i not in kept_indices],
        decode=decode,
    )


class _ModelCall(Protocol[Answer]):
    def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
        **options: Any,
    ) -> Answer:
        """Sample `group` replies per prompt from "policy" or another model of the run.

        The role is a name for counts. A temperature of None is sampler.temperature. `options`,
        fields of Options such as max_tokens, replace the sampler config's.
        """
        ...


class Replies(list[Reply | None]):
    """One reply per prompt, in order; None for a prompt over the cap, or without a sample left.

    `dropped` has each prompt's texts if no sample is left, else ().
    """

    def __init__(self, prompts: int = 0):
        super().__init__([None] * prompts)
        self.dropped: list[tuple[str, ...]] = [()] * prompts


# `replies = await ask(role, prompts, group)` in a coroutine. The await yields a PendingCall to the
# RolloutWorker (worker.py), which submits one request per prompt to the sampler's
# session (sampler/session.py, Session.submit), together with the requests of all other coroutines.
Ask = _ModelCall[Awaitable[Replies]]


class AskModels(_ModelCall[Replies], Protocol):
    """The interface to all models of a step: a call like an Ask, without await, blocks."""

    def run_all(
        self, function: Callable[[Ask, Item], Coroutine[Any, Any, Result]], items: Sequence[Item]
    ) -> list[Result]:
        """Run the coroutine function(ask, item) of each item concurrently; return results in order.

        A coroutine resumes as soon as its own call is answered. Its replies do not depend on the
        other coroutines.
        """
        ...
