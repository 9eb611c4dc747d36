"""External LLM judge: verdicts in place of the rule or beside it (paper section 4.6, spec 11).

1. A template turns each (question, prediction, reference) into one prompt: a question of yes or no,
   or one of three grades (EAPO). `Endpoint`, or a local policy (see Ask), replies to new prompts.
2. A reply is parsed as 1, 0 or MALFORMED. Without a reply, the verdict is UNANSWERED.
3. Replies may be appended to a file as they arrive: a restarted judge sends only the other prompts.
4. Failures are counted and logged, never raised: a server that is down does not cost a step. The
   first failure of each kind is a warning in the log, with the server's own words and the remedy.
"""

from __future__ import annotations

import email.utils
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import tenacity

from spell_jax.runtime import fault_injection, terminal, urls
from spell_jax.runtime.config import check_least
from spell_jax.runtime.jsonl import append_records, read_records
from spell_jax.selfplay.prompts import Prompts
from spell_jax.selfplay.rules import visible_text

log = logging.getLogger(__name__)

# Environment variable of the API key. Configs are written to disk, keys are not.
JUDGE_KEY = "SPELL_JUDGE_KEY"
# A server may send without end. 8,192 tokens, the default limit, have far fewer bytes.
MAX_REPLY_BYTES = 8 * 2**20
# Limits for the body of an HTTP error: bytes and seconds of reading, characters shown.
ERROR_BYTES, ERROR_SECONDS, ERROR_SHOWN = 4096, 2.0, 300
MALFORMED, UNANSWERED = -1, -2

_MARKS = " \t\n*`'\"()[]."  # around a grade's letter

Item = tuple[Any, ...]  # fields of a prompt, such as question, prediction and reference
Parse = Callable[[str], int]  # reply -> verdict (such as 1 or 0), or MALFORMED
# Distinct prompts -> (prompt, reply) pairs in order of arrival; a reply of None is a failure.
Ask = Callable[[Sequence[str]], Iterable[tuple[str, str | None]]]


@dataclass(frozen=True)
class JudgeConfig:
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
      backoff_s: pause after the first failed attempt, doubled after each further one.
      longest_wait_s: limit of such a pause, and of a server's Retry-After.
      workers: limit of concurrent requests, >= 1.
      requests_per_s: rate limit of all workers together; 0 for none.
      top_p: nucleus of the sampling, in (0, 1]; 1 is not sent.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
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
        urls.check_secret("url", self.url)
        if not re.fullmatch(r"[!-~]*", self.api_key or ""):  # errors of HTTP would repeat the key
            raise ValueError(
                f"the key of {self.url}: has a space, a line break or another character that no "
                f"key has; set its environment variable, such as {JUDGE_KEY}, to the key alone"
            )
        if not self.url.startswith(("http://", "https://")) or "?" in self.url:
            raise ValueError(f"url = {self.url!r}: must start with http:// or https://, without ?")
        check_least(self, "", attempts=1, workers=1, max_tokens=1, timeout_s=0.001)
        check_least(self, "", temperature=0, backoff_s=0, longest_wait_s=0, requests_per_s=0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1")


def parse_judgement(text: str) -> int:
    """Return 0 if the visible text contains NO, else 1 if it contains YES, else MALFORMED."""
    visible = visible_text(text) or ""
    # NO first: "YES" counts only without "NO" (spec 11).
    if "NO" in visible:
        return 0
    return 1 if "YES" in visible else MALFORMED


def parse_grade(text: str) -> int:
    """Return 1 for the grade A, 0 for B and C, else MALFORMED; see `parse_letter`."""
    place = parse_letter(text, "ABC")
    return place if place == MALFORMED else int(place == 0)


def parse_letter(text: str, letters: str) -> int:
    """Return the place in `letters` of the letter that a reply consists of, else MALFORMED.

    The visible text is the letter, perhaps with its name ("A: correct") and marks around it.
    """
    letter = (visible_text(text) or "").partition(":")[0].strip(_MARKS)
    return letters.index(letter) if len(letter) == 1 and letter in letters else MALFORMED


# Values of algorithm.rule, and of --rule of evaluations, that ask a judge.
JUDGE_RULES = ("judge", "match_or_judge")
# Prompt of an Item, verdict of a reply.
Template = tuple[Callable[..., str], Parse]
# Values of algorithm.judge_template.
JUDGE_TEMPLATES: dict[str, Template] = {
    "yes_no": (Prompts.judge, parse_judgement),
    "grades": (Prompts.judge_grades, parse_grade),
}


class Judge:
    """Cached verdicts on answers.

    `counts` are totals since the start: "asked" (prompts sent), "cached" (items answered from the
    cache), "failed" (prompts without a reply), "malformed" (replies without a verdict).
    """

    def __init__(
        self,
        ask: Ask,
        write_prompt: Callable[..., str],
        model: str = "",
        parse: Parse = parse_judgement,
        cache_size: int = 100_000,
        cache_file: str | os.PathLike[str] | None = None,
    ):
        """Load the cache file if there is one.

        `write_prompt` makes the prompt of an Item, `parse` the verdict of a reply. `model`, the
        name of the model that replies, is part of the cache key. The `cache_size` >= 1 most
        recently used verdicts stay in memory. `cache_file` is a JSONL file of all replies, which
        several models may share.
        """
        if cache_size < 1:
            raise ValueError(f"cache_size = {cache_size}: must be at least 1")
        self.counts = {"asked": 0, "cached": 0, "failed": 0, "malformed": 0}
        self.model = model
        self._ask = ask
        self._write_prompt = write_prompt
        self._parse = parse
        self._cache_size = cache_size
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._file = pathlib.Path(cache_file) if cache_file else None
        if self._file and self._file.exists():
            # Replies are stored, not verdicts, so a changed parser reads old files anew.
            verdicts, _ = read_records(
                self._file, lambda line: (str(line["key"]), parse(line["reply"]))
            )
            self._cache.update(verdicts)

    def judge(self, items: Sequence[Item]) -> list[int]:
        """Return one verdict per item, in order; MALFORMED and UNANSWERED are negative."""
        prompts = [self._write_prompt(*item) for item in items]
        keys = [self._key(prompt) for prompt in prompts]
        # Equal items, such as equal answers of a group, are asked once.
        prompt_of = dict(zip(keys, prompts, strict=True))
        verdicts = {key: self._cache[key] for key in prompt_of if key in self._cache}
        unknown = [prompt for key, prompt in prompt_of.items() if key not in verdicts]
        self.counts["cached"] += len(prompts) - len(unknown)
        self.counts["asked"] += len(unknown)
        for prompt, reply in self._ask(unknown):
            verdicts[self._key(prompt)] = self._record(prompt, reply)
        if failed := [*verdicts.values()].count(UNANSWERED):
            self.counts["failed"] += failed
            log.warning(
                "%s: no reply to %d of %d prompts; the rule's scores stand where there is a rule",
                *(self.model, failed, len(unknown)),
            )
        for key in prompt_of:  # the order of use must not depend on the order of arrival
            if key in self._cache:
                self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return [verdicts[key] for key in keys]

    def _key(self, prompt: str) -> str:
        # A digest, because prompts are long. JSON keeps model and prompt apart.
        content = json.dumps([self.model, prompt]).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def _record(self, prompt: str, reply: str | None) -> int:
        """Return the verdict of a reply and cache it; a missing reply is not cached."""
        if reply is None:
            return UNANSWERED
        verdict, key = self._parse(reply), self._key(prompt)
        self.counts["malformed"] += verdict == MALFORMED
        self._cache[key] = verdict
        # An empty reply was cut off. It is not stored, so a restart asks again, maybe with more
        # tokens.
        if self._file and reply:
            append_records(self._file, [{"key": key, "model": self.model, "reply": reply}])
        fault_injection.point("judged")
        return verdict


class StatusError(Exception):
    """An HTTP status that is no success; `message` has the server's words."""

    def __init__(self, status: int, message: str):
        super().__init__(f"{status} {message}".strip())
        self.status, self.message = status, message


class Endpoint:
    """Client of an OpenAI-compatible chat-completions API, with retries and a rate limit.

    `failures` counts prompts without a reply by cause, such as "HTTP 401", and replies that ended
    at the token limit as "cut off".
    """

    def __init__(
        self,
        config: JudgeConfig,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        import openai  # takes 0.65 s, which runs without a judge need not pay

        self.config = config
        self.failures: Counter[str] = Counter()
        self._sleep, self._clock = sleep, clock
        # Becomes _NEWER_FIELD as soon as the endpoint asks for that field.
        self._limit_field = "max_tokens"
        self._next_request_time = clock()
        self._lock = threading.Lock()
        self._retrying = tenacity.Retrying(
            sleep=sleep,
            stop=tenacity.stop_after_attempt(config.attempts),
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

    def __call__(self, prompts: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """Yield (prompt, reply) in order of arrival; None if refused or all attempts failed.

        A reply that the token limit cut off is "": it may end inside a thought, which only
        considers a verdict.
        """
        for index, reply in self.reply(prompts):
            yield prompts[index], reply

    def reply(self, prompts: Sequence[str]) -> Iterator[tuple[int, str | None]]:
        """Yield (index of the prompt, reply) like __call__; a prompt may occur more than once."""
        pool = ThreadPoolExecutor(self.config.workers)
        try:
            # Threads, because a worker only waits for the server.
            futures = {
                pool.submit(self._ask, prompt): index for index, prompt in enumerate(prompts)
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # if the caller stops early, the remaining prompts are not sent
            pool.shutdown(cancel_futures=True)

    def _ask(self, prompt: str) -> str | None:
        try:
            return self._retrying(self._request, prompt)
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
        text = " ".join(str(error.__cause__ or error).split())[:ERROR_SHOWN] or repr(error)
        text = terminal.printable(text)
        if self.config.api_key:  # a server may repeat the key
            text = text.replace(self.config.api_key, "[key]")
        remedy = _REMEDIES.get(error.status, "") if is_status else ""
        remedy = remedy.format(key=JUDGE_KEY, model=self.config.model, url=self.config.url)
        log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "%s: no reply of %s (%s)%s",
            *(self.config.url, self.config.model, text if is_status else f"{kind}: {text}"),
            remedy and f"; {remedy}",
        )

    def _note_cut_off(self) -> None:
        """Count a reply that ends at the token limit; log the first such reply as a warning."""
        with self._lock:
            self.failures["cut off"] += 1
            is_first = self.failures["cut off"] == 1
        level = logging.WARNING if is_first else logging.DEBUG
        limit = self.config.max_tokens
        log.log(level, "%s: a reply was cut off at %d tokens: not read", self.config.url, limit)

    def _request(self, prompt: str) -> str:
        # Lone surrogates, which JSON escapes in a model's answer can produce, have no UTF-8 form.
        content = prompt.encode(errors="replace").decode()
        name = self._limit_field
        try:
            body = self._post(content, name)
        except StatusError as error:
            if error.status != 400 or _NEWER_FIELD not in error.message or name == _NEWER_FIELD:
                raise
            with self._lock:
                if self._limit_field != _NEWER_FIELD:
                    log.info("%s: asks for %s", self.config.url, _NEWER_FIELD)
                self._limit_field = _NEWER_FIELD
            body = self._post(content, _NEWER_FIELD)
        choice: Any = json.loads(body)["choices"][0]
        if choice.get("finish_reason") == "length":
            self._note_cut_off()
            return ""
        reply: Any = choice["message"]["content"]
        if not isinstance(reply, str):
            raise TypeError(f"the content of the reply is {type(reply).__name__}, not text")
        return reply

    def _post(self, content: str, limit_field: str) -> bytes:
        """Send a prompt with its token limit in `limit_field`; return the reply's body.

        Raises StatusError for an HTTP error, and the errors of the network.
        """
        self._wait_for_turn()
        # From here on, because waiting for a turn is not the server's fault.
        deadline = time.monotonic() + self.config.timeout_s
        limit: Any = {limit_field: self.config.max_tokens}
        try:
            with self._create(messages=[{"role": "user", "content": content}], **limit) as response:
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


def _is_transient(error: BaseException) -> bool:
    """Return whether another attempt may succeed, by the HTTP status if the error has one."""
    # 408 is a timeout, 429 a rate limit. Other statuses below 500 blame the request itself.
    status = error.status if isinstance(error, StatusError) else 500
    return isinstance(error, Exception) and (status >= 500 or status in (408, 429))


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
