"""Client of an OpenAI-compatible chat-completions API: a judge, a teacher, or an evaluated model.

Failures are counted and logged, never raised: a server that is down does not cost a step. The first
failure of each kind is a warning in the log, with the server's own words and the remedy.
"""

from __future__ import annotations

import email.utils
import functools
import json
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tenacity

from spell_jax.runtime import terminal, urls
from spell_jax.runtime.config import check_least

log = logging.getLogger(__name__)

# A server may send without end. 8,192 tokens, the default limit, have far fewer bytes.
MAX_REPLY_BYTES = 8 * 2**20
# Limits for the body of an HTTP error: bytes and seconds of reading, characters shown.
ERROR_BYTES, ERROR_SECONDS, ERROR_SHOWN = 4096, 2.0, 300


@dataclass(frozen=True)
class EndpointConfig:
    """Address, sampling parameters and retry policy of a model with an OpenAI-compatible API.

    A field out of range is a ValueError that names it.

    Attributes:
      url: http(s) address of the API (http://host/v1), with or without /chat/completions.
      model: name of the model at that address.
      api_key: bearer token of visible ASCII characters; None or "" sends no Authorization header.
      temperature: sampling temperature, >= 0.
      max_tokens: limit of a reply, >= 1.
      timeout_s: limit of one attempt, from the first byte sent to the last one read; >= 0.001.
      attempts: requests per prompt, >= 1.
      patience_s: no attempt starts later than this after a prompt's first one; 0 for no limit.
      backoff_s: pause after the first failed attempt, doubled after each further one.
      longest_wait_s: limit of such a pause, and of a server's Retry-After.
      workers: limit of concurrent requests, >= 1.
      requests_per_s: rate limit of all workers together; 0 for none.
      top_p: nucleus of the sampling, in (0, 1]; 1 is not sent.
      key_name: environment variable of the key, for messages.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.0
    max_tokens: int = 8192
    timeout_s: float = 120.0
    attempts: int = 4
    patience_s: float = 0.0
    backoff_s: float = 1.0
    longest_wait_s: float = 120.0
    workers: int = 8
    requests_per_s: float = 0.0
    top_p: float = 1.0
    key_name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        urls.check_secret("url", self.url)
        if not re.fullmatch(r"[!-~]*", self.api_key or ""):  # errors of HTTP would repeat the key
            raise ValueError(
                f"the key of {self.url}: has a space, a line break or another character that no "
                f"key has; set the environment variable {self.key_name} to the key alone"
            )
        if not self.url.startswith(("http://", "https://")) or "?" in self.url:
            raise ValueError(f"url = {self.url!r}: must start with http:// or https://, without ?")
        check_least(self, "", attempts=1, workers=1, max_tokens=1, timeout_s=0.001)
        check_least(self, "", temperature=0, backoff_s=0, longest_wait_s=0, requests_per_s=0)
        check_least(self, "", patience_s=0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1")


class ChatRequest(NamedTuple):
    """A user turn with sampling options of its own.

    Attributes:
      prompt: text of the turn.
      max_tokens: limit of the reply; 0 is the endpoint's.
      seed: seed of the sampling; None sends none.
    """

    prompt: str
    max_tokens: int = 0
    seed: int | None = None


class ChatReply(NamedTuple):
    """A reply with the server's counts.

    Attributes:
      text: text of the reply.
      is_cut_off: whether the token limit ended it.
      prompt_tokens: tokens of the prompt; None if the server does not tell.
      tokens: tokens of the reply, thoughts included; None if the server does not tell.
    """

    text: str
    is_cut_off: bool = False
    prompt_tokens: int | None = None
    tokens: int | None = None


class FilteredError(Exception):
    """A reply that the server's content filter withheld: another attempt would not pass either."""


class StatusError(Exception):
    """An HTTP status that is no success; `message` has the server's words."""

    def __init__(self, status: int, message: str):
        super().__init__(f"{status} {message}".strip())
        self.status, self.message = status, message


class Endpoint:
    """Client of an OpenAI-compatible chat-completions API, with retries and a rate limit.

    `failures` counts prompts without a reply by cause, such as "HTTP 401", and replies that ended
    at the token limit as "cut off"; `last_failure` has the words of the last one.
    """

    def __init__(
        self,
        config: EndpointConfig,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        try:
            import openai  # takes 0.65 s, which runs without a judge need not pay
        except ImportError as error:
            raise ImportError(
                f"{config.url}: models at endpoints need openai; pip install 'spell_jax[judge]'"
            ) from error

        self.config = config
        self.failures: Counter[str] = Counter()
        self.last_failure = ""
        self._sleep, self._clock = sleep, clock
        # Becomes _NEWER_FIELD as soon as the endpoint asks for that field.
        self._limit_field = "max_tokens"
        self._sends_seed = True  # until the endpoint refuses the field
        self._next_request_time = clock()
        self._lock = threading.Lock()
        self._retrying = tenacity.Retrying(
            sleep=sleep,
            stop=tenacity.stop_after_attempt(config.attempts)
            | tenacity.stop_after_delay(config.patience_s or math.inf),
            wait=tenacity.wait_exponential(config.backoff_s, max=config.longest_wait_s),
            retry=tenacity.retry_if_exception(_is_transient),
            reraise=True,
        )
        hooks: Any = {"response": [self._check_status]}
        client = openai.OpenAI(
            base_url=config.url.removesuffix("/").removesuffix("/chat/completions"),
            # None would make openai send $OPENAI_API_KEY, to a server that may be anybody's.
            api_key=config.api_key or "none",
            timeout=config.timeout_s,
            # Retries are tenacity's: they obey the rate limit, which openai's own would not.
            max_retries=0,
            # No redirects: prompts would go to a server that the config does not name.
            http_client=openai.DefaultHttpxClient(follow_redirects=False, event_hooks=hooks),
        )
        self._create = functools.partial(
            client.chat.completions.with_streaming_response.create,
            model=config.model,
            temperature=config.temperature,
            top_p=config.top_p if config.top_p < 1 else openai.omit,
            extra_headers={} if config.api_key else {"Authorization": openai.omit},
        )

    def __call__(self, prompts: Sequence[str]) -> Iterator[tuple[int, str | None]]:
        """Yield (index of the prompt, reply) in order of arrival.

        The reply is None if the server refused or all attempts failed. A reply that the token limit
        cut off is "": it may end inside a thought, which only considers a verdict.
        """
        for index, reply in self.chat([ChatRequest(prompt) for prompt in prompts]):
            if reply is not None and reply.is_cut_off:
                self._note_cut_off()
                yield index, ""
            else:
                yield index, reply and reply.text

    def chat(self, requests: Sequence[ChatRequest]) -> Iterator[tuple[int, ChatReply | None]]:
        """Yield (index of the request, reply) in order of arrival; None as in __call__."""
        pool = ThreadPoolExecutor(self.config.workers)
        try:
            # Threads, because a worker only waits for the server.
            futures = {
                pool.submit(self._ask, request): index for index, request in enumerate(requests)
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # if the caller stops early, the remaining requests are not sent
            pool.shutdown(cancel_futures=True)

    def _ask(self, request: ChatRequest) -> ChatReply | None:
        try:
            return self._retrying(self._request, request)
        except Exception as error:  # network, server and reply can cause many kinds
            self._note(error)
            return None

    def _note(self, error: Exception) -> None:
        """Count a failure; log the first failure of its kind as a warning."""
        is_status = isinstance(error, StatusError)
        kind = f"HTTP {error.status}" if is_status else type(error).__name__
        with self._lock:
            self.failures[kind] += 1
            is_first = self.failures[kind] == 1
        text = " ".join(str(error.__cause__ or error).split()) or repr(error)
        text = terminal.printable(text)
        if self.config.api_key:  # a server may repeat the key
            text = _hide_key(text, self.config.api_key)
        text = text[:ERROR_SHOWN]  # last: a part of the key would not be recognized
        words, fields = (text if is_status else f"{kind}: {text}"), self.config
        remedy = _REMEDIES.get(error.status, "") if is_status else ""
        remedy = remedy.format(key=fields.key_name, model=fields.model, url=fields.url)
        self.last_failure = f"({words})" + (remedy and f"; {remedy}")
        level = logging.WARNING if is_first else logging.DEBUG
        log.log(level, "%s: no reply of %s %s", fields.url, fields.model, self.last_failure)

    def _note_cut_off(self) -> None:
        """Count a reply that ends at the token limit; log the first such reply as a warning."""
        with self._lock:
            self.failures["cut off"] += 1
            is_first = self.failures["cut off"] == 1
        level = logging.WARNING if is_first else logging.DEBUG
        limit = self.config.max_tokens
        log.log(level, "%s: a reply was cut off at %d tokens: not read", self.config.url, limit)

    def _request(self, request: ChatRequest) -> ChatReply:
        while True:
            limit_field, sends_seed = self._limit_field, self._sends_seed
            try:
                return _read_completion(self._post(request, limit_field, sends_seed))
            except StatusError as error:
                has_seed = sends_seed and request.seed is not None
                # At most twice: a field that was changed is not changed again.
                if error.status != 400 or not self._adapt(error.message, limit_field, has_seed):
                    raise

    def _adapt(self, message: str, limit_field: str, has_seed: bool) -> bool:
        """Change a field that an endpoint refuses, for all further requests; return whether."""
        with self._lock:
            if _NEWER_FIELD in message and limit_field != _NEWER_FIELD:
                if self._limit_field != _NEWER_FIELD:
                    log.info("%s: asks for %s", self.config.url, _NEWER_FIELD)
                self._limit_field = _NEWER_FIELD
                return True
            if has_seed and re.search(r"\bseed\b", message):
                if self._sends_seed:
                    log.warning("%s: takes no seed, so replies cannot repeat", self.config.url)
                self._sends_seed = False
                return True
        return False

    def _post(self, request: ChatRequest, limit_field: str, sends_seed: bool) -> bytes:
        """Send a request with its token limit in `limit_field`; return the reply's body.

        Raises StatusError for an HTTP error, and the errors of the network.
        """
        self._wait_for_turn()
        # From here on, because waiting for a turn is not the server's fault.
        deadline = time.monotonic() + self.config.timeout_s
        options: Any = {limit_field: request.max_tokens or self.config.max_tokens}
        if sends_seed and request.seed is not None:
            options["seed"] = request.seed
        # Lone surrogates, which JSON escapes in a model's answer can produce, have no UTF-8 form.
        content = request.prompt.encode(errors="replace").decode()
        messages: Any = [{"role": "user", "content": content}]
        try:
            with self._create(messages=messages, **options) as response:
                return _read_reply(response.iter_bytes(), deadline)
        except Exception as error:  # openai wraps what its hooks raise
            if isinstance(error.__cause__, StatusError):
                raise error.__cause__ from None
            raise

    def _wait_for_turn(self) -> None:
        """Sleep until the rate limit and the last Retry-After allow the next request."""
        rate = self.config.requests_per_s
        with self._lock:
            now = self._clock()
            turn = max(now, self._next_request_time)
            self._next_request_time = turn + (1 / rate if rate else 0.0)
        if turn > now:
            self._sleep(turn - now)

    def _check_status(self, response: Any) -> None:
        """Raise StatusError for an HTTP error, and delay all workers by its Retry-After."""
        if response.is_success:
            return
        wait = read_retry_after(response.headers.get("Retry-After"))
        with self._lock:  # of all workers, because a server limits all requests together
            until = self._clock() + min(wait, self.config.longest_wait_s)
            self._next_request_time = max(self._next_request_time, until)
        raise StatusError(response.status_code, _read_error(response))


_NEWER_FIELD = "max_completion_tokens"
# Status -> remedy.
_REMEDIES = {
    401: "its key, the environment variable {key}, is missing or wrong",
    403: "the key in the environment variable {key} may not use this model",
    404: "check the model's name, {model!r}, and the path of {url!r}, which usually ends in /v1",
    405: "check the path of {url!r}, which usually ends in /v1",
}
_REMEDIES |= dict.fromkeys((301, 302, 307, 308), "give the address that it redirects to")


def _hide_key(text: str, key: str) -> str:
    """Replace a key in a text, and the beginning of the key at the text's end, by "[key]"."""
    text = text.replace(key, "[key]")
    for length in range(len(key) - 1, 3, -1):  # ERROR_BYTES may have cut the key
        if text.endswith(key[:length]):
            return text[:-length] + "[key]"
    return text


def _is_transient(error: BaseException) -> bool:
    """Return whether another attempt may succeed, by the HTTP status if the error has one."""
    if isinstance(error, FilteredError):
        return False
    # 408 is a timeout, 429 a rate limit. Other statuses below 500 blame the request itself.
    status = error.status if isinstance(error, StatusError) else 500
    return isinstance(error, Exception) and (status >= 500 or status in (408, 429))


def _read_completion(body: bytes) -> ChatReply:
    """Read the reply in the body of a completion; any exception if the body has none."""
    completion: Any = json.loads(body)
    choice = completion["choices"][0]
    end, text = choice.get("finish_reason"), choice["message"].get("content")
    if end == "content_filter":
        raise FilteredError("the server's content filter withheld the reply")
    is_cut_off = end == "length"
    # A limit that ends the thoughts leaves no content.
    if text is None and is_cut_off:
        text = ""
    if not isinstance(text, str):
        raise TypeError(f"the content of the reply is {type(text).__name__}, not text")
    usage = completion.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    prompt_tokens, tokens = (
        count if type(count) is int and count >= 0 else None
        for count in map(counts.get, ("prompt_tokens", "completion_tokens"))
    )
    return ChatReply(text, is_cut_off, prompt_tokens, tokens)


def _read_error(response: Any) -> str:
    """Return the message of an HTTP error, from its JSON, or else the beginning of its body."""
    # Bounded in bytes and seconds, because a broken server may send its error without end.
    body, deadline = bytearray(), time.monotonic() + ERROR_SECONDS
    try:
        for part in response.iter_bytes():
            body += part
            if len(body) > ERROR_BYTES or time.monotonic() > deadline:
                break
    except Exception:  # the status alone says enough
        pass
    response.close()  # openai would read the rest without a deadline
    text = bytes(body[:ERROR_BYTES]).decode(errors="replace")
    try:
        parsed = json.loads(text)
        inner = parsed.get("error", parsed)
        message = inner.get("message") if isinstance(inner, dict) else inner
        text = message if isinstance(message, str) else text
    except (ValueError, AttributeError, RecursionError):
        pass
    return text.strip()


def _read_reply(parts: Iterable[bytes], deadline: float) -> bytes:
    """Read the body of a reply; TimeoutError after `deadline`, ValueError if it is too large."""
    # The timeouts of openai and httpx limit single reads only: a byte now and then would pass.
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > MAX_REPLY_BYTES:
            raise ValueError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the reply takes too long")
    return bytes(body)


def read_retry_after(value: str | None) -> float:
    """Return the seconds of a Retry-After header (a number or a date); 0 if it is not valid."""
    text = (value or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, when - time.time())
