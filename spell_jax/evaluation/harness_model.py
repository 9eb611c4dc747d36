"""A policy as a model of lm-evaluation-harness; needs its package lm_eval.

Encoding, truncation and generation options mean the same as in the harness's model for transformers
(lm_eval.models.huggingface), so that scores compare. All processes must make the same calls; the
requests of process 0 count.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from spell_jax.evaluation import loglikelihood
from spell_jax.policy.chat import THOUGHT_BEGIN, THOUGHT_END
from spell_jax.rollout.replies import Prompt
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime.hosts import distributed
from spell_jax.sampler.keys import fold_keys, seed_key
from spell_jax.sampler.requests import Options
from spell_jax.selfplay.rules import visible_text

log = logging.getLogger(__name__)

# Tokens where a task gives no maximum, as in the harness.
_GENERATED = 256
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_OPTIONS = ("do_sample", *_SAMPLING, "until", "max_gen_toks")
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0}  # options with values that change nothing


def read_options(kwargs: Mapping[str, Any], eos: str = "") -> Options:
    """Read sampling options from a task's generation_kwargs; greedy unless the task samples.

    `eos` also ends an answer. Raises ValueError if the sampler does not have an option, or an
    option is out of range.
    """
    values: dict[str, Any] = {**normalize_gen_kwargs(dict(kwargs), _GENERATED)}
    for name, value in values.items():
        if name not in _OPTIONS and _NEUTRAL.get(name) != value:
            raise ValueError(f"generation_kwargs.{name} = {value!r}: must be one of {_OPTIONS}")
    # Tasks often give a temperature beside do_sample=False; transformers ignores it then.
    sampling: dict[str, Any] = {"temperature": 0.0}
    if values["do_sample"]:
        sampling |= {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    stops = tuple(dict.fromkeys(text for text in (*values["until"], eos) if text))
    return Options(**sampling, max_tokens=values["max_gen_toks"], stop_strings=stops)


def _opens_thought(context: str) -> bool:
    return context.rstrip().endswith(THOUGHT_BEGIN)


class PolicyLM(TemplateLM):
    """A policy with the three kinds of requests: text, log-likelihoods of answers and of texts."""

    def __init__(self, model: TextModel, seed: int = 0, thinking: bool = False):
        """Wrap a policy; `seed` is the seed of sampling.

        With `thinking`, or after a prompt that ends with `<think>`, the policy thinks first: a
        task's stop strings do not end the thought. The answer is the text after the last
        `</think>`, or "" if the thought is unfinished.
        """
        super().__init__()
        self._model, self._words = model, model.tokenizer
        self._seed, self._thinking = seed, thinking
        self._eos = self._words.token_text(self._words.eos_id)

    # ------------------------------------------------------------------------------------ Tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._words.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: the start token, else the end token."""
        return self._words.eos_id if self._words.bos_id is None else self._words.bos_id

    @property
    def max_length(self) -> int:
        return self._model.config.max_positions

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        del kwargs
        if add_special_tokens is None:  # a chat template may have written the first token
            first = self._words.token_text(self.prefix_token_id)
            add_special_tokens = not has_bos_prefix(string, first)
        return self._words.encode_rendered(string, start=add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        return str(self._model.folder).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._words.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        try:
            return self._words.render(chat_history, add_generation_prompt)
        except ValueError as error:
            other_messages = [message for message in chat_history if message["role"] != "system"]
            if len(other_messages) == len(chat_history):
                raise
            log.warning("the chat is written without its system message: %s", error)
            return self._words.render(other_messages, add_generation_prompt)

    # ------------------------------------------------------------------------------------- Requests

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of texts, in context windows, each token after at least one."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text)
            prefix, length = self.prefix_token_id, self.max_length
            # Windows do not overlap: only the token before a window is its context, as in the
            # harness.
            for window in utils.get_rolling_token_windows(ids, prefix, length, context_len=1):
                windows.append((("", ""), *utils.make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[index] += value
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        room, cut, pairs = self.max_length + 1, 0, []  # the last token predicts nothing
        for (context, answer), prompt, ids in requests:
            if not 1 <= len(ids) < room:
                raise ValueError(
                    f"answer {answer!r} after {context[-40:]!r}: has {len(ids)} tokens, must have "
                    f"from 1 to the policy's context of {self.max_length}"
                )
            cut += len(prompt) + len(ids) > room
            # The beginning is cut, not the middle: the question is at the end, after the examples.
            pairs.append((prompt[max(len(prompt) + len(ids) - room, 0) :], ids))
        self._log_cut(cut, len(pairs))
        pairs = distributed.broadcast(lambda: pairs)
        return loglikelihood.score(
            self._model, [(tuple(prompt), tuple(ids)) for prompt, ids in pairs]
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        del disable_tqdm
        arguments = distributed.broadcast(lambda: [list(request.args) for request in requests])
        options = [read_options(kwargs, self._eos) for _, kwargs in arguments]
        # Programs are compiled for the longest prompt and answer, so one class per answer length.
        by_length: dict[int, list[int]] = {}
        for index, option in enumerate(options):
            by_length.setdefault(option.max_tokens, []).append(index)
        answers, keys = [""] * len(arguments), self._keys([context for context, _ in arguments])
        for max_tokens, indices in by_length.items():
            room = self.max_length - max_tokens
            encoded = [self.tok_encode(arguments[i][0]) or [self.prefix_token_id] for i in indices]
            self._log_cut(sum(len(ids) > room for ids in encoded), len(encoded))
            prompts = [Prompt(ids[-room:]) for ids in encoded]
            prompt_options = [options[i] for i in indices]
            prompt_options = [
                # A thought often contains a task's stop string, such as a blank line; it is cut
                # after the thought.
                dataclasses.replace(option, stop_strings=())
                if self._thinks(arguments[i][0])
                else option
                for i, option in zip(indices, prompt_options, strict=True)
            ]
            replies = self._model.ask(prompts, 1, prompt_options, keys[indices])
            for count, (place, reply) in enumerate(replies, 1):
                assert reply is not None  # cut to its room
                index, (sample,) = indices[place], reply.samples
                text, stops = sample.text(self._words.decode), options[index].stop_strings
                answers[index] = self._read_answer(arguments[index][0], text, stops)
                if count % 100 == 0 or count == len(prompts):
                    log.info("answers: %d of %d", count, len(prompts))
        return answers

    def _read_answer(self, context: str, text: str, stops: Sequence[str]) -> str:
        """Cut an answer at its stop strings, and its thoughts if the policy thinks.

        The answer is "" if a thought is unfinished.
        """
        opens = text.lstrip().startswith(THOUGHT_BEGIN)  # unasked
        if not (opens or self._thinks(context)):
            return postprocess_generated_text(text, list(stops), None)
        if visible_text(text, _opens_thought(context)) is None:
            return ""
        return postprocess_generated_text(text, list(stops), THOUGHT_END)

    def _thinks(self, context: str) -> bool:
        """Return whether an answer has thoughts: some templates open one and have no switch."""
        return self._thinking or _opens_thought(context)

    def _keys(self, contexts: Sequence[str]) -> np.ndarray:
        """Fold keys from seed, context and repetition, uint32 [n, 2]."""
        # Not from the position: a question keeps its answer under another --limit. The repetition
        # tells apart equal requests, of which a task may want several samples.
        repetitions, numbers = collections.Counter(), []
        for context in contexts:
            numbers.append((zlib.crc32(context.encode(errors="replace")), repetitions[context]))
            repetitions[context] += 1
        return fold_keys(seed_key(self._seed), numbers)

    def _log_cut(self, cut: int, count: int) -> None:
        if cut:
            log.warning(
                "%d of %d prompts are over the context of %d tokens and lost their beginning",
                cut,
                count,
                self.max_length,
            )
