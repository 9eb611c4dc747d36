"""Bodies of requests in OpenAI's protocol, checked field by field; imports no jax.

1. Every mistake is a ProtocolError, which has the HTTP status and the protocol's form of an error.
2. A field that is null counts as absent. A field without effect here is accepted with the value
   that changes nothing, and refused with any other. A field that is not known is refused by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

from spell_jax.policy.chat import FIELDS, ROLES
from spell_jax.sampler.requests import LEAST_TEMPERATURE

# Most answers to a prompt, alternatives to a token, stop strings or ids, characters of a string.
MOST_ANSWERS, MOST_ALTERNATIVES, MOST_STOPS, LONGEST_STOP = 128, 20, 16, 1000
_INT64 = 2**63

# Field -> values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
}
# Fields that only label a request.
_LABELS = frozenset(
    [
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    ]
)
Message = dict[str, str]


class ProtocolError(Exception):
    """A refused request.

    Attributes:
      message: what is wrong: field, value and remedy.
      status: HTTP status.
      field: name of the field that is wrong; None if there is none.
      code: the protocol's code of the error; None for most errors.
      retry_s: seconds after which another attempt may succeed; None if it would not.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        field: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.field, self.code = message, status, field, code
        self.retry_s = retry_s

    def body(self) -> dict[str, Any]:
        """Return the protocol's form of the error."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": fields}


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked request for answers.

    Attributes:
      is_chat: whether the prompt is a chat; else the prompts are texts or token ids.
      model: name of the model.
      prompts: the chat, a list of messages; or the prompts, each a text or a list of token ids.
      n: number of answers to each prompt.
      sampling: the fields of sampler.Options that are given, apart from max_tokens.
      max_tokens: most tokens of an answer; 0 scores the prompt alone; None leaves it to the server.
      seed: seed of the keys; None leaves it to the server.
      stream: whether the answers are sent as they are sampled.
      include_usage: whether a stream ends with the counts of tokens.
      logprobs: whether the reply has logprobs.
      alternatives: number of likeliest tokens to name at each place.
      echo: whether the reply begins with the prompt.
    """

    is_chat: bool
    model: str
    prompts: tuple[Any, ...]
    n: int = 1
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    alternatives: int = 0
    echo: bool = False

    @property
    def needs_scores(self) -> bool:
        """Whether the reply has numbers that only a pass over the finished sequence gives."""
        return bool(self.alternatives) or (self.echo and self.logprobs)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a body; ProtocolError if it is no JSON object."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProtocolError(f"the body is not JSON: {text}") from error
    if not isinstance(content, dict):
        raise ProtocolError(f"the body is a {type(content).__name__}, must be a JSON object")
    return content


def read_call(content: Mapping[str, Any], is_chat: bool) -> Call:
    """Read the body of a chat or completions request; ProtocolError names the first mistake."""
    fields = _Fields(content)
    prompts = (_read_messages(fields),) if is_chat else _read_prompts(fields)
    n = fields.integer("n", 1, 1, MOST_ANSWERS)
    best_of = fields.integer("best_of", n, 1, MOST_ANSWERS)
    if best_of != n:
        raise _refusal("best_of", best_of, f"must be n = {n}: all answers are returned")
    call = Call(
        is_chat,
        fields.text("model"),
        prompts,
        n,
        _read_sampling(fields),
        _read_max_tokens(fields, is_chat),
        fields.integer("seed", None, -_INT64, _INT64 - 1),
        fields.flag("stream"),
        **_read_reports(fields, is_chat),
    )
    include_usage = _read_stream_options(fields, call.stream)
    fields.finish()
    _check_combinations(call)
    return dataclasses.replace(call, include_usage=include_usage)


def _read_sampling(fields: _Fields) -> dict[str, Any]:
    sampling = {
        # OpenAI's default, not the sampler's.
        "temperature": fields.number("temperature", 1.0, 0.0, math.inf),
        "top_p": fields.number("top_p", 1.0, 0.0, 1.0),
        "top_k": max(0, fields.integer("top_k", 0, -1, 2**31 - 1)),  # clients send -1 for none
        "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
        "stop_strings": fields.stop_strings("stop"),
        "stop_ids": fields.stop_ids("stop_token_ids"),
    }
    if 0 < sampling["temperature"] < LEAST_TEMPERATURE:
        remedy = f"must be 0, or at least {LEAST_TEMPERATURE}"
        raise _refusal("temperature", sampling["temperature"], remedy)
    if not sampling["top_p"]:
        raise _refusal("top_p", 0, "must be above 0 and at most 1")
    return sampling


def _read_max_tokens(fields: _Fields, is_chat: bool) -> int | None:
    if not is_chat:
        return fields.integer("max_tokens", 16, 0, 2**31 - 1)  # 16 is the protocol's default
    limits = {
        name: fields.integer(name, None, 1, 2**31 - 1)
        for name in ("max_tokens", "max_completion_tokens")
    }
    values = {value for value in limits.values() if value is not None}
    if len(values) > 1:
        raise ProtocolError(
            f"max_tokens = {limits['max_tokens']} and max_completion_tokens = "
            f"{limits['max_completion_tokens']}: must be equal, or one of them",
            field="max_tokens",
        )
    return next(iter(values), None)


def _read_reports(fields: _Fields, is_chat: bool) -> dict[str, Any]:
    """Read what a reply tells beside its texts."""
    if not is_chat:
        count = fields.integer("logprobs", None, 0, MOST_ALTERNATIVES)
        return {
            "logprobs": count is not None,
            "alternatives": count or 0,
            "echo": fields.flag("echo"),
        }
    logprobs = fields.flag("logprobs")
    count = fields.integer("top_logprobs", 0, 0, MOST_ALTERNATIVES)
    if count and not logprobs:
        raise _refusal("top_logprobs", count, "needs logprobs = true")
    return {"logprobs": logprobs, "alternatives": count}


def _read_stream_options(fields: _Fields, stream: bool) -> bool:
    """Return include_usage."""
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _refusal("stream_options", options, "must be an object")
    if not stream:
        raise ProtocolError("stream_options: needs stream = true", field="stream_options")
    inner = _Fields(options, "stream_options.")
    include_usage = inner.flag("include_usage")
    inner.flag("include_obfuscation")  # a padding of the events, which has no effect on a client
    inner.finish()
    return include_usage


def _check_combinations(call: Call) -> None:
    if call.max_tokens == 0 and not call.echo:
        raise _refusal("max_tokens", 0, "must be at least 1 without echo = true")
    if not call.stream:
        return
    if call.echo:
        raise ProtocolError("stream and echo: must not both be true", field="stream")
    if call.alternatives:
        name = "top_logprobs" if call.is_chat else "logprobs"
        raise ProtocolError(
            f"stream and {name} = {call.alternatives}: alternatives are computed when an answer is "
            f"complete; {name} must be 0 in a stream",
            field="stream",
        )


def _read_messages(fields: _Fields) -> list[Message]:
    """Read the messages of a chat; parts of a content are joined by line breaks."""
    messages = fields.take("messages")
    if messages is None and fields.take("prompt") is not None:
        raise ProtocolError(
            "messages: is missing; a prompt without turns goes to /v1/completions", field="messages"
        )
    if not isinstance(messages, list) or not messages:
        raise _refusal("messages", messages, "must be a list of one message or more")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise _refusal(where, message, "must be an object with role and content")
    present = {name: value for name, value in message.items() if value not in (None, [])}
    for name in present.keys() - {*FIELDS}:
        place = f"{where}.{_shown(name)}"
        message = f"{place}: not supported, must be one of {', '.join(FIELDS)}"
        raise ProtocolError(message, field=place)
    if present.get("role") not in ROLES:
        raise _refusal(f"{where}.role", present.get("role"), f"must be one of {', '.join(ROLES)}")
    content = present.get("content")
    if isinstance(content, list):
        content = "\n".join(
            _read_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    present["content"] = content
    for name, text in present.items():
        _check_text(text, f"{where}.{name}")
    return present


def _read_part(part: Any, where: str) -> str:
    is_text = isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
    if is_text and isinstance(part["text"], str):
        return part["text"]
    raise _refusal(where, part, 'must be {"type": "text", "text": ...}: the model reads text alone')


def _read_prompts(fields: _Fields) -> tuple[Any, ...]:
    prompt = fields.take("prompt")
    if prompt is None and fields.take("messages") is not None:
        raise ProtocolError(
            "prompt: is missing; messages go to /v1/chat/completions", field="prompt"
        )
    prompts = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if prompts and all(isinstance(item, str) or _is_ids(item) for item in prompts):
        for item in prompts:
            if isinstance(item, str):
                _check_text(item, "prompt")
        return tuple(prompts)
    raise _refusal("prompt", prompt, "must be a text, a list of token ids, or a list of these")


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _refusal(where, value, "must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can escape a half of a character
        raise ProtocolError(
            f"{where}: has a lone surrogate, which no text has", field=where
        ) from None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


class _Fields:
    """Fields of an object, which are taken one by one; `finish` checks those that nobody took."""

    def __init__(self, content: Mapping[str, Any], where: str = ""):
        self._left = {name: value for name, value in content.items() if value is not None}
        self._where = where
        self._names: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        """Remove and return a field, or the default if it is absent or null."""
        self._names.append(name)
        return self._left.pop(name, default)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise self._refusal(name, value, "must be a text")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise self._refusal(name, value, "must be true or false")
        return value

    def integer(self, name: str, default: Any, least: int, largest: int) -> Any:
        """Take an integer from `least` to `largest`."""
        value = self.take(name, default)
        if value is default:
            return default
        # Clients of languages with one type of number send 16.0 for 16.
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= largest:
            raise self._refusal(name, value, f"must be an integer from {least} to {largest}")
        return value

    def number(self, name: str, default: float, least: float, largest: float) -> float:
        """Take a finite number from `least` to `largest`."""
        value = self.take(name, default)
        # A comparison, because a float of a large integer overflows. NaN compares as false.
        if type(value) not in (int, float) or not least <= value <= min(largest, 1e30):
            upper = f" to {largest:g}" if largest < math.inf else ", finite"
            raise self._refusal(name, value, f"must be a number from {least:g}{upper}")
        return float(value)

    def stop_strings(self, name: str) -> tuple[str, ...]:
        value = self.take(name, [])
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or len(strings) > MOST_STOPS:
            raise self._refusal(name, value, f"must be a text, or at most {MOST_STOPS} texts")
        for string in strings:
            if not isinstance(string, str) or not 1 <= len(string) <= LONGEST_STOP:
                remedy = f"must be texts of 1 to {LONGEST_STOP} characters"
                raise self._refusal(name, string, remedy)
            _check_text(string, self._where + name)
        return tuple(dict.fromkeys(strings))

    def stop_ids(self, name: str) -> tuple[int, ...]:
        value = self.take(name, [])
        is_right = value == [] or (_is_ids(value) and len(value) <= MOST_STOPS)
        if not is_right or not all(0 <= i < 2**31 for i in value):
            raise self._refusal(name, value, f"must be at most {MOST_STOPS} token ids")
        return tuple(value)

    def finish(self) -> None:
        """Raise ProtocolError for a field that is unknown, or has an effect that we lack."""
        for name, value in self._left.items():
            if name in _LABELS and not self._where:
                continue
            if name in _NEUTRAL and not self._where:
                # A bool is no number here, though Python has False == 0.
                if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
                    accepted = " or ".join(json.dumps(v) for v in _NEUTRAL[name])
                    raise self._refusal(name, value, f"not supported, must be {accepted}")
                continue
            close_names = difflib.get_close_matches(name, self._names, 1)
            hint = f"did you mean {close_names[0]}?" if close_names else "must not be given"
            where = self._where + _shown(name)
            raise ProtocolError(f"{where}: unknown field, {hint}", field=where)

    def _refusal(self, name: str, value: Any, remedy: str) -> ProtocolError:
        return _refusal(self._where + name, value, remedy)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(field: str, value: Any, remedy: str) -> ProtocolError:
    """Return the error of a field, with the beginning of its value."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return ProtocolError(f"{field} = {_shown(text)}: {remedy}", field=field)


def _shown(text: str) -> str:
    """Return the beginning of a text from a request, for a message."""
    text = text if len(text) <= 100 else f"{text[:100]}..."
    # A text with lone surrogates has no UTF-8 form.
    return text.encode(errors="replace").decode()
