"""An external judge in the place of the rule (paper section 4.6, spec section 11).

1. Each (question, prediction, reference) becomes one prompt, through the caller's own template.
2. Prompts not seen before go to an OpenAI-compatible chat endpoint, a few at a time.
3. A reply is read as 1 or 0; one that cannot be read, or that never came, is -1.
4. Failures are counted and logged, never raised: a step is not lost because a server was.
"""

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from spell_jax.selfplay.rules import visible_text

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 8 * 2**20
Item = tuple[str, str, str]


@dataclass(frozen=True)
class JudgeConfig:
    """Where the judge is and how patiently it is asked. Mistakes raise ValueError.

    `url`: the chat-completions address, http or https. `timeout_s`: of one attempt.
    `attempts`: requests for one prompt, at least 1. `backoff_s`: pause after the first failed
    attempt, doubled after each further one. `workers`: requests under way at once.
    `cache_size`: verdicts remembered, the least recently used go first.
    """

    url: str
    model: str
    api_key: str | None = None
    temperature: float = 0.0
    max_tokens: int = 8192
    timeout_s: float = 120.0
    attempts: int = 4
    backoff_s: float = 1.0
    workers: int = 8
    cache_size: int = 100_000

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r}; it must begin with http:// or https://")
        for name in ("timeout_s", "attempts", "workers", "max_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)}; it must be above 0")
        for name in ("backoff_s", "cache_size", "temperature"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)}; it must not be negative")


class Judge:
    """Asks the endpoint of `config`; `write_prompt(question, prediction, reference)` -> prompt.

    `counts` sums up since the start: asked (prompts sent), cached (answered from memory),
    failed (no usable reply after all attempts), malformed (a reply without a verdict).
    """

    def __init__(
        self,
        config: JudgeConfig,
        write_prompt: Callable[[str, str, str], str],
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.config = config
        self.counts = {"asked": 0, "cached": 0, "failed": 0, "malformed": 0}
        self._write_prompt = write_prompt
        self._sleep = sleep
        self._cache: OrderedDict[str, int] = OrderedDict()

    def judge(self, items: Sequence[Item]) -> list[int]:
        """One verdict for each (question, prediction, reference), in order: 1, 0, -1 for none."""
        prompts = [self._write_prompt(*item) for item in items]
        verdicts: dict[str, int] = {}
        for prompt in dict.fromkeys(prompts):
            if prompt in self._cache:
                self._cache.move_to_end(prompt)
                verdicts[prompt] = self._cache[prompt]
        unknown = [prompt for prompt in dict.fromkeys(prompts) if prompt not in verdicts]
        self.counts["cached"] += len(prompts) - len(unknown)
        self.counts["asked"] += len(unknown)
        with ThreadPoolExecutor(self.config.workers) as pool:
            replies = list(pool.map(self._ask, unknown))
        for prompt, reply in zip(unknown, replies, strict=True):
            verdicts[prompt] = self._read(prompt, reply)
        if failed := replies.count(None):
            log.warning("%s: no reply to %d of %d prompts", self.config.url, failed, len(unknown))
        return [verdicts[prompt] for prompt in prompts]

    def _read(self, prompt: str, reply: str | None) -> int:
        if reply is None:
            self.counts["failed"] += 1
            return -1  # not remembered: the next step asks again
        verdict = parse_judgement(reply)
        self.counts["malformed"] += verdict == -1
        self._cache[prompt] = verdict
        while len(self._cache) > self.config.cache_size:
            self._cache.popitem(last=False)
        return verdict

    def _ask(self, prompt: str) -> str | None:
        """The reply to one prompt; None after the last attempt failed or the server refused it."""
        for attempt in range(self.config.attempts):
            if attempt:
                self._sleep(self.config.backoff_s * 2 ** (attempt - 1))
            try:
                return self._request(prompt)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500 and error.code not in (408, 429):
                    return None  # asking again would be refused again
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

    def _request(self, prompt: str) -> str:
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        if self.config.api_key:
            headers["Authorization"] = f"Bearer {self.config.api_key}"
        request = urllib.request.Request(self.config.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.config.timeout_s) as response:
            reply: Any = json.loads(response.read(MAX_REPLY_BYTES))
        content = reply["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError("the reply's content is no text")
        return content


def parse_judgement(text: str) -> int:
    """1 if the visible text says YES and nowhere NO, 0 if it says NO, else -1 (spec section 11)."""
    visible = visible_text(text) or ""
    if "NO" in visible:
        return 0
    return 1 if "YES" in visible else -1
