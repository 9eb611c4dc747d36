"""Replies in OpenAI's protocol: whole bodies, and the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.policy.formats.token_bytes import token_bytes
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.rollout.replies import Prompt
from spell_jax.serving.protocol import Call
from spell_jax.serving.scoring import AnswerScores
from spell_jax.serving.service import NewTokens, PromptAnswers


class PartialText:
    """Text of an answer that grows, without what may be the beginning of a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        thought: str = "",
        stop_strings: Sequence[str] = (),
        stop_ids: Iterable[int] = (),
    ):
        """Begin a text with `thought` (replies.Prompt); stop strings and ids end the answer."""
        self._stream, self._decode = tokenizer.stream(), tokenizer.decode
        self._thought, self._text, self._sent = thought, "", 0
        self._stop_strings, self._stop_ids = stop_strings, {*stop_ids}

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; return the further text that no later token can change."""
        for token in ids:
            if token not in self._stop_ids:
                self._text += self._stream.push(token)
        certain = len(self._text) - max(map(self._overlap, self._stop_strings), default=0)
        positions = (self._text.find(string) for string in self._stop_strings)
        certain = min([certain, *(at for at in positions if at >= 0)])
        return self._take(self._thought + self._text[:certain])

    def finish(self, sample: Sample) -> str:
        """Return the rest of the text of the whole answer."""
        return self._take(self._thought + sample.text(self._decode))

    def _take(self, text: str) -> str:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return new

    def _overlap(self, string: str) -> int:
        """Count the characters at the text's end with which a stop string begins."""
        longest = min(len(string) - 1, len(self._text))
        return next((n for n in range(longest, 0, -1) if self._text.endswith(string[:n])), 0)


class _Offsets:
    """Places of tokens in a text that grows, in characters."""

    def __init__(self, tokenizer: Tokenizer):
        self._stream, self._offset = tokenizer.stream(), 0

    def push(self, ids: Sequence[int]) -> list[int]:
        """Add tokens; return the place of each."""
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token))
        return offsets


class Responses:
    """Replies to one call: bodies and chunks share its id, time and model."""

    def __init__(self, call: Call, prompts: Sequence[Prompt], tokenizer: Tokenizer):
        """Begin the reply to a call with prompts as tokens."""
        self._call, self._prompts, self._tokenizer = call, prompts, tokenizer
        self._id = f"{'chatcmpl' if call.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        stop_ids = (*tokenizer.stop_ids, *call.sampling["stop_ids"])
        self._texts = [
            PartialText(tokenizer, prompt.thought, call.sampling["stop_strings"], stop_ids)
            for prompt in prompts
            for _ in range(call.n)
        ]

        self._offsets = [_Offsets(tokenizer) for _ in self._texts]

    # ----------------------------------------------------------------------------------- Whole body

    def body(self, answers: Sequence[PromptAnswers]) -> dict[str, Any]:
        """Return the body of the reply with the answers to all prompts, in their order."""
        choices = [choice for prompt in answers for choice in self._choices(prompt)]
        kind = "chat.completion" if self._call.is_chat else "text_completion"
        return self._envelope(kind, choices) | {"usage": self.usage(answers)}

    def usage(self, answers: Sequence[PromptAnswers]) -> dict[str, Any]:
        """Return the counts of tokens; a stop token counts as a token of its answer."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self._prompts)
        tokens = sum(len(sample.tokens) for prompt in answers for sample in prompt.samples)
        cached_tokens = sum(prompt.reused_tokens for prompt in answers)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _choices(self, answers: PromptAnswers) -> Iterator[dict[str, Any]]:
        call, prompt = self._call, self._prompts[answers.prompt]
        samples = answers.samples or [_NOTHING] * call.n
        scores: list[AnswerScores | None] = [*answers.scores] or [None]
        if len(scores) == 1:  # none, or the scores of a prompt without answers
            scores *= len(samples)
        for number, sample in enumerate(samples):
            text = prompt.thought + sample.text(self._tokenizer.decode)
            choice: dict[str, Any] = {"index": answers.prompt * call.n + number, "logprobs": None}
            choice["finish_reason"] = _finish_reason(sample)
            if call.is_chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = (self._prompt_text(answers.prompt) if call.echo else "") + text
            if call.logprobs:
                choice["logprobs"] = self._logprobs(prompt, sample, scores[number])
            yield choice

    def _prompt_text(self, index: int) -> str:
        source = self._call.prompts[index]
        return source if isinstance(source, str) else self._tokenizer.decode(source)

    def _logprobs(
        self, prompt: Prompt, sample: Sample, scores: AnswerScores | None
    ) -> dict[str, Any]:
        """Return the logprobs of an answer's tokens, and with echo of the prompt's before them."""
        sampled = sample.logprobs if sample.logprobs is not None else np.zeros(0, np.float32)
        values, ids = [*map(float, sampled)], sample.tokens.tolist()
        if self._call.echo:
            ids = [*map(int, prompt.ids), *ids]
            # The first token is not predicted by anything.
            scored = [] if scores is None else scores.logprobs[: len(prompt.ids) - 1]
            values = [None, *map(float, scored), *values]
        first = len(ids) - (0 if scores is None else len(scores.logprobs))
        rows = [
            self._likeliest(scores, i - first, ids[i], values[i])
            if scores is not None and i >= first
            else []
            for i in range(len(ids))
        ]
        if self._call.is_chat:
            return {"content": self._entries(ids, values, rows), "refusal": None}
        return self._columns(ids, values, rows, _Offsets(self._tokenizer))

    def _likeliest(
        self, scores: AnswerScores, place: int, target: int, value: float | None
    ) -> list[tuple[int, float]]:
        """List (id, logprob) of the likeliest tokens of a place, in descending order."""
        count = self._call.alternatives
        ids, logprobs = scores.top_ids[place, :count], scores.top_logprobs[place, :count]
        # The number of the chosen token is the sampler's; both agree to rounding.
        return [
            (token, value if token == target and value is not None else logprob)
            for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]

    def _entries(
        self,
        ids: Sequence[int],
        values: Sequence[float | None],
        rows: Sequence[Sequence[tuple[int, float]]],
    ) -> list[dict[str, Any]]:
        """Return an entry of a chat's logprobs for each token; `rows` are its alternatives."""
        entries = []
        for token, value, row in zip(ids, values, rows, strict=True):
            alternatives = [self._entry(i, logprob) for i, logprob in row]
            entries.append(self._entry(token, value) | {"top_logprobs": alternatives})
        return entries

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        values = [*token_bytes(self._tokenizer, token)]
        return {"token": self._token_text(token), "logprob": logprob, "bytes": values}

    def _columns(
        self,
        ids: Sequence[int],
        values: Sequence[float | None],
        rows: Sequence[Sequence[tuple[int, float]]],
        offsets: _Offsets,
    ) -> dict[str, Any]:
        """Return the logprobs of a completion: one list for each kind of value."""
        top: list[dict[str, float] | None] = []
        for token, value, row in zip(ids, values, rows, strict=True):
            if not row:
                top.append(None)
                continue
            # Tokens may have equal texts; the likelier one stands for both.
            pairs = [*row, *([(token, value)] if value is not None else [])]
            texts: dict[str, float] = {}
            for i, logprob in pairs:
                texts.setdefault(self._token_text(i), logprob)
            top.append(texts)
        return {
            "tokens": [self._token_text(token) for token in ids],
            "token_logprobs": list(values),
            "top_logprobs": top if self._call.alternatives else None,
            "text_offset": offsets.push(ids),
        }

    def _token_text(self, token: int) -> str:
        """Return the text of a token; of a token without one, such as a stop token, its name."""
        text = self._tokenizer.decode([token])
        return text if text and "\ufffd" not in text else self._tokenizer.token_text(token)

    # --------------------------------------------------------------------------------------- Stream

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks before the first token: the role of each message of a chat."""
        if not self._call.is_chat:
            return []
        delta = {"role": "assistant", "content": "", "refusal": None}
        count = range(len(self._texts))
        return [self._chunk({"index": index, "delta": delta}) for index in count]

    def chunk(self, event: NewTokens) -> dict[str, Any] | None:
        """Return the chunk of new tokens; None if they add nothing that is certain."""
        index = event.prompt * self._call.n + event.sample
        text = self._texts[index].push(event.ids.tolist())
        if not text and not self._call.logprobs:
            return None
        choice = self._piece(index, text)
        if self._call.logprobs:
            ids, values = event.ids.tolist(), event.logprobs.tolist()
            rows = [()] * len(ids)
            choice["logprobs"] = (
                {"content": self._entries(ids, values, rows), "refusal": None}
                if self._call.is_chat
                else self._columns(ids, values, rows, self._offsets[index])
            )
        return self._chunk(choice)

    def closing(self, answers: PromptAnswers) -> list[dict[str, Any]]:
        """Return the last chunks of the answers to a prompt."""
        chunks = []
        for number, sample in enumerate(answers.samples):
            index = answers.prompt * self._call.n + number
            if text := self._texts[index].finish(sample):
                chunks.append(self._chunk(self._piece(index, text)))
            last = self._piece(index, "")
            if self._call.is_chat:
                last["delta"] = {}
            chunks.append(self._chunk(last | {"finish_reason": _finish_reason(sample)}))
        return chunks

    def usage_chunk(self, answers: Sequence[PromptAnswers]) -> dict[str, Any]:
        """Return the chunk with the counts of tokens, the last of a stream that asks for them."""
        chunk = self._envelope(self._chunk_kind, [])
        return chunk | {"usage": self.usage(answers)}

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        content = {"delta": {"content": text}} if self._call.is_chat else {"text": text}
        return {"index": index, **content}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._call.is_chat else "text_completion"

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        choice = {"logprobs": None, "finish_reason": None} | choice
        chunk = self._envelope(self._chunk_kind, [choice])
        return chunk | ({"usage": None} if self._call.include_usage else {})

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._call.model,
            "choices": choices,
        }


# The answer to a prompt that is only scored.
_NOTHING = Sample(np.zeros(0, np.int32), np.zeros(0, np.float32), stopped=False)


def _finish_reason(sample: Sample) -> str:
    return "stop" if sample.stopped else "length"
