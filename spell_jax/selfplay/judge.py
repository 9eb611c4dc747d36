"""An external judge in the place of the rule, or beside it (paper section 4.6, spec section 11).

1. Each (question, prediction, reference) becomes one prompt, through the caller's own template.
2. Prompts not seen before are asked: `Endpoint` sends them to an OpenAI-compatible chat endpoint, a
   few at a time; a policy of our own may answer in its place.
3. A reply is read as 1 or 0, or as MALFORMED; where none came, the verdict is UNANSWERED.
4. Replies may be kept in a file, each as it comes: a judge started again asks only for the others.
5. Failures are counted and logged, never raised: a step is not lost because a server was.
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import json
import logging
import os
import pathlib
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from spell_jax.runtime import fault_injection
from spell_jax.runtime.jsonl import append_records, read_records
from spell_jax.selfplay.rules import visible_text

log = logging.getLogger(__name__)

# The environment variable with the endpoint's key: configs are written to disk, keys are not.
JUDGE_KEY = "SPELL_JUDGE_KEY"
MAX_REPLY_BYTES = 8 * 2**20
_CHUNK = 1 << 16  # bytes of a reply that are read before its time is looked at
MALFORMED, UNANSWERED = -1, -2

Item = tuple[str, str, str]
# Distinct prompts -> (prompt, reply) of each as it comes, in any order; None: there will be none.
Ask = Callable[[Sequence[str]], Iterable[tuple[str, str | None]]]


@dataclass(frozen=True)
class JudgeConfig:
    """Where the judge (or another model) is and how patiently it is asked. Mistakes raise
    ValueError.

    `url`: the chat-completions address, http or https. `timeout_s`: of one attempt, from the first
    byte sent to the last one read. `attempts`: requests for one prompt, at least 1. `backoff_s`:
    pause after the first failed attempt, doubled after each further one. `longest_wait_s`: limit
    of such a pause, and of what a server may ask for by Retry-After. `workers`: requests under way
    at once. `requests_per_s`: limit of all of them together; 0: none. `top_p`: 1 is not sent.
    """

    url: str
    model: str
    api_key: str | None = None
    temperature: float = 0.0
    max_tokens: int = 8192
    timeout_s: float = 120.0
    attempts: int = 4
    backoff_s: float = 1.0
    longest_wait_s: float = 120.0
    workers: int = 8
    requests_per_s: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r}; it must begin with http:// or https://")
        for name in ("timeout_s", "attempts", "workers", "max_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)}; it must be above 0")
        for name in ("backoff_s", "longest_wait_s", "requests_per_s", "temperature"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)}; it must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p}; it must be above 0, at most 1")


class Judge:
    """Verdicts on answers; `write_prompt(question, prediction, reference)` -> prompt.

    `counts` sums up since the start: asked (prompts sent), cached (answered from memory),
    failed (no usable reply), malformed (a reply without a verdict).
    """

    def __init__(
        self,
        ask: Ask,
        write_prompt: Callable[[str, str, str], str],
        model: str = "",
        cache_size: int = 100_000,
        cache_file: str | os.PathLike[str] | None = None,
    ):
        """Args: `ask` replies, in the name of `model`; `cache_size` verdicts are remembered, the
        least recently used go first; `cache_file` keeps the replies, those of other models too.

        Raises:
          ValueError: cache_size is below 1.
        """
        if cache_size < 1:
            raise ValueError(f"cache_size: {cache_size}; it must be above 0")
        self.counts = {"asked": 0, "cached": 0, "failed": 0, "malformed": 0}
        self._ask = ask
        self._write_prompt = write_prompt
        self.model = model
        self._cache_size = cache_size
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._file = pathlib.Path(cache_file) if cache_file else None
        if self._file and self._file.exists():
            self._cache.update(read_records(self._file, _read_kept)[0])

    def judge(self, items: Sequence[Item]) -> list[int]:
        """One verdict for each (question, prediction, reference), in order: 1 or 0, or MALFORMED
        or UNANSWERED, which are negative."""
        prompts = [self._write_prompt(*item) for item in items]
        keys = [self._key(prompt) for prompt in prompts]
        prompt_of = dict(zip(keys, prompts, strict=True))
        verdicts = {key: self._cache[key] for key in prompt_of if key in self._cache}
        unknown = [prompt for key, prompt in prompt_of.items() if key not in verdicts]
        self.counts["cached"] += len(prompts) - len(unknown)
        self.counts["asked"] += len(unknown)
        failed = self.counts["failed"]
        for prompt, reply in self._ask(unknown):
            verdicts[self._key(prompt)] = self._take(prompt, reply)
        if failed := self.counts["failed"] - failed:
            log.warning("%s: no reply to %d of %d prompts", self.model, failed, len(unknown))
        for key in prompt_of:  # in their order, whichever came first
            if key in self._cache:
                self._cache.move_to_end(key)
        self._forget()
        return [verdicts[key] for key in keys]

    def _key(self, prompt: str) -> str:
        content = json.dumps([self.model, prompt]).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def _take(self, prompt: str, reply: str | None) -> int:
        """The verdict of a reply, which is kept; a missing one is asked for again another time."""
        if reply is None:
            self.counts["failed"] += 1
            return UNANSWERED
        verdict, key = parse_judgement(reply), self._key(prompt)
        self.counts["malformed"] += verdict == MALFORMED
        self._cache[key] = verdict
        if self._file:
            append_records(self._file, [{"key": key, "model": self.model, "reply": reply}])
        fault_injection.point("judged")
        return verdict

    def _forget(self) -> None:
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


class Endpoint:
    """An OpenAI-compatible chat endpoint, as `Judge` asks it."""

    def __init__(
        self,
        config: JudgeConfig,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self._sleep = sleep
        self._clock = clock
        self._next = clock()  # when the next request may be sent
        self._lock = threading.Lock()

    def __call__(self, prompts: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """(prompt, reply) of each as it comes; None: every attempt failed or it was refused."""
        for place, reply in self.reply(prompts):
            yield prompts[place], reply

    def reply(self, prompts: Sequence[str]) -> Iterator[tuple[int, str | None]]:
        """(place, reply) of prompts, the same one more than once if wanted; see __call__."""
        pool = ThreadPoolExecutor(self.config.workers)
        try:
            asked = {pool.submit(self._ask, prompt): place for place, prompt in enumerate(prompts)}
            for future in as_completed(asked):
                yield asked[future], future.result()
        finally:  # also where nobody wants the rest: it is not asked for
            pool.shutdown(cancel_futures=True)

    def _ask(self, prompt: str) -> str | None:
        config = self.config
        for attempt in range(config.attempts):
            if attempt:
                pause = config.backoff_s * 2.0 ** min(attempt - 1, 64)
                self._sleep(min(pause, config.longest_wait_s))
            self._wait_in_line()
            try:
                return self._request(prompt)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500 and error.code not in (408, 429):
                    return None  # asking again would be refused again
                self._hold(read_retry_after(error.headers.get("Retry-After")))
            except (
                OSError,
                http.client.HTTPException,
                ValueError,
                LookupError,
                TypeError,
                RecursionError,
            ):
                continue  # no connection, time-out, or a reply that is no chat completion
        return None

    def _wait_in_line(self) -> None:
        """Sleeps until this request may be sent: in turn, and after what the server asked for."""
        rate = self.config.requests_per_s
        with self._lock:
            now = self._clock()
            turn = max(now, self._next)
            self._next = turn + (1 / rate if rate else 0.0)
        if turn > now:
            self._sleep(turn - now)

    def _hold(self, seconds: float) -> None:
        """No request is sent for so long: a server's limit is for all of them."""
        until = self._clock() + min(seconds, self.config.longest_wait_s)
        with self._lock:
            self._next = max(self._next, until)

    def _request(self, prompt: str) -> str:
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }
        if self.config.top_p < 1:
            body["top_p"] = self.config.top_p
        headers = {"Content-Type": "application/json"}
        if self.config.api_key:
            headers["Authorization"] = f"Bearer {self.config.api_key}"
        request = urllib.request.Request(self.config.url, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + self.config.timeout_s
        with urllib.request.urlopen(request, timeout=self.config.timeout_s) as response:
            reply: Any = json.loads(_read(response, deadline))
        content = reply["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError("the reply's content is no text")
        return content


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """A reply's body. The socket's own time-out begins anew with each byte: a server that sends
    them one by one would never meet it."""
    parts, size = [], 0
    while part := response.read1(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise ValueError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the reply takes too long")
    return b"".join(parts)


def _read_kept(line: Any) -> tuple[str, int]:
    """(key, verdict) of a line of the cache's file."""
    return str(line["key"]), parse_judgement(line["reply"])


def read_retry_after(value: str | None) -> float:
    """Seconds that a Retry-After header asks for (a number, or a date); 0 where it says nothing."""
    if not value:
        return 0.0
    if value.strip().isdecimal():
        return float(value.strip())
    try:
        when = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, when - time.time())


def parse_judgement(text: str) -> int:
    """1 if the visible text says YES and nowhere NO, 0 if it says NO, else MALFORMED (spec 11)."""
    visible = visible_text(text) or ""
    if "NO" in visible:
        return 0
    return 1 if "YES" in visible else MALFORMED
