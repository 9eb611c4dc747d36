"""Load test of `python -m spell_jax.serve`, against `ask`, by which spell_jax.generate answers.

1. A policy folder with random weights and the demo's tokenizer is written; the server is a process.
2. N clients send requests of mixed lengths, each the next when the last is answered. `ask` answers
   the same prompts with the same keys and slots before the server starts.
3. One document is asked many questions at once, and as many other documents one question each.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import httpx
import numpy as np

from benchmarks.base import SAMPLING, BenchmarkCommand, random_params
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.rollout.replies import Prompt
from spell_jax.rollout.text_model import TextModel
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.keys import fold_keys, seed_key
from spell_jax.sampler.requests import Options

Bodies = list[dict[str, Any]]  # of requests
_STREAMED = 4  # one request in as many is a stream, in which the first token is timed


@dataclasses.dataclass
class ServeLoad(BenchmarkCommand):
    """Requests of many clients to a server, in order of arrival.

    Prompts have 16 to `prompt` tokens and answers up to 8 to `response`, both spread evenly in the
    logarithm. "serve_tokens_per_s" counts answer tokens; "generate_tokens_per_s" is by `ask` with
    as many slots, and "ratio" the first over the second. "equal" is the share of answers with the
    text of `ask`'s. "lost" counts requests without an answer. "first_token_s" and
    "longest_first_token_s" are the median and the longest time from a request to the first token,
    of one request in 4. "memory_mb" is the server's resident memory after each fifth of the
    requests. "document_s" is the time of all questions about one document, "documents_s" of one
    question about each of as many documents, "document_ratio" the second over the first.
    """

    clients: Annotated[int, "clients that ask at the same time"] = 64
    requests: Annotated[int, "requests of all clients"] = 2000
    slots: Annotated[int, "slots of the sampler"] = 32
    prompt: Annotated[int, "tokens of the longest prompt"] = 256
    response: Annotated[int, "tokens of the longest answer"] = 192
    layers: Annotated[int, "layers L"] = 3
    width: Annotated[int, "model width D"] = 512
    document: Annotated[int, "tokens of a document"] = 4096
    questions: Annotated[int, "questions about the document"] = 50
    question: Annotated[int, "tokens of a question"] = 32
    answer: Annotated[int, "tokens of an answer about a document"] = 8

    def run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            policy = self._save_policy(pathlib.Path(folder) / "policy")
            bodies = self._bodies()
            line, texts = self._generate(policy, bodies)
            with _server(policy, self.slots) as (process, url):
                line |= asyncio.run(self._load(url, process.pid, bodies, texts))
                line |= asyncio.run(self._ask_documents(url))
        line["ratio"] = line["serve_tokens_per_s"] / line["generate_tokens_per_s"]
        return line

    def _save_policy(self, folder: pathlib.Path) -> pathlib.Path:
        tokenizer = tokenizers.load(TINY_POLICY)
        context = max(self.prompt + self.response, self.document + self.question + self.answer)
        config = PolicyConfig(
            vocab_size=tokenizer.vocab_size,
            width=self.width,
            layers=self.layers,
            heads=max(1, self.width // 64),
            kv_heads=max(1, self.width // 128),
            head_size=64,
            feed_forward=3 * self.width,
            max_positions=2 * context,
        )
        weights.save(folder, config, random_params(config, "float32"), tokenizer)
        return folder

    def _bodies(self) -> Bodies:
        """Make the bodies of all requests."""
        rng, bodies = np.random.default_rng(0), []
        lengths = np.exp(rng.uniform(np.log(16), np.log(self.prompt), self.requests)).astype(int)
        caps = np.exp(rng.uniform(np.log(8), np.log(self.response), self.requests)).astype(int)
        for number, (length, cap) in enumerate(zip(lengths.tolist(), caps.tolist(), strict=True)):
            prompt = rng.integers(10, 800, size=length).tolist()
            fields = {"prompt": prompt, "max_tokens": cap, "seed": number}
            bodies.append({"model": "policy", **SAMPLING, **fields})
        return bodies

    def _generate(self, policy: pathlib.Path, bodies: Bodies) -> tuple[dict[str, Any], list[str]]:
        """Measure the throughput of `ask`; return also the text of each answer."""
        model = TextModel(policy, sizes=SamplerConfig(slots=self.slots, kv_cache_tokens=65_536))
        prompts = [Prompt(body["prompt"]) for body in bodies]
        options = [Options(**SAMPLING, max_tokens=body["max_tokens"]) for body in bodies]
        keys = np.concatenate([fold_keys(seed_key(body["seed"]), [(0,)]) for body in bodies])
        list(
            model.ask(prompts, 1, options, keys, prompt_indices=[0])
        )  # fills the cache of programs
        clock = time.perf_counter()
        replies = [reply for _, reply in sorted(model.ask(prompts, 1, options, keys)) if reply]
        seconds = time.perf_counter() - clock
        tokens = sum(len(reply.samples[0].tokens) for reply in replies)
        line = {"generate_s": seconds, "generate_tokens_per_s": tokens / seconds}
        return line, [reply.texts[0] for reply in replies]

    async def _load(
        self, url: str, pid: int, bodies: Bodies, texts: Sequence[str]
    ) -> dict[str, Any]:
        """Send all requests, from as many clients as the options say."""
        memory: list[float] = [_memory_mb(pid)]
        replies: list[_Reply | None] = [None] * len(bodies)
        places = iter(range(len(bodies)))
        answered = 0

        async def ask_next(client: httpx.AsyncClient) -> None:
            nonlocal answered
            for place in places:
                body = bodies[place] | {"stream": place % _STREAMED == 0}
                replies[place] = await _ask(client, url, body)
                answered += 1
                if answered * 5 % len(bodies) < 5:
                    memory.append(_memory_mb(pid))

        clock = time.perf_counter()
        async with _client(self.clients) as client:
            await asyncio.gather(*(ask_next(client) for _ in range(self.clients)))
        seconds = time.perf_counter() - clock
        arrived = [reply for reply in replies if reply is not None]
        firsts = [reply.first_s for reply in arrived if reply.first_s is not None]
        pairs = zip(replies, texts, strict=True)
        equal = sum(reply is not None and reply.text == text for reply, text in pairs)
        return {
            "serve_s": seconds,
            "serve_tokens_per_s": sum(reply.tokens for reply in arrived) / seconds,
            "lost": len(bodies) - len(arrived),
            "equal": equal / len(bodies),
            "first_token_s": float(np.median(firsts)),
            "longest_first_token_s": max(firsts),
            "longest_s": max(reply.seconds for reply in arrived),
            "memory_mb": memory,
        }

    async def _ask_documents(self, url: str) -> dict[str, Any]:
        """Time questions about one document, and about as many documents."""
        rng = np.random.default_rng(1)
        line = {}
        for name, count in (("document_s", 1), ("documents_s", self.questions)):
            documents = rng.integers(10, 800, size=(count, self.document)).tolist()
            questions = rng.integers(10, 800, size=(self.questions, self.question)).tolist()
            bodies = [
                {
                    "model": "policy",
                    "prompt": documents[number % count] + question,
                    "max_tokens": self.answer,
                    "seed": number,
                }
                for number, question in enumerate(questions)
            ]
            clock = time.perf_counter()
            async with _client(self.questions) as client:
                await asyncio.gather(*(_ask(client, url, body) for body in bodies))
            line[name] = time.perf_counter() - clock
        return line | {"document_ratio": line["documents_s"] / line["document_s"]}


@dataclasses.dataclass(frozen=True)
class _Reply:
    """An answer, its number of tokens, and the seconds to its first token and to its end."""

    text: str
    tokens: int
    first_s: float | None
    seconds: float


async def _ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> _Reply | None:
    """Send a request, again after a 429; None if it fails."""
    clock = time.perf_counter()
    while True:
        if not body.get("stream"):
            reply = await client.post(f"{url}/completions", json=body)
            if reply.is_success:
                content = reply.json()
                tokens = content["usage"]["completion_tokens"]
                seconds = time.perf_counter() - clock
                return _Reply(content["choices"][0]["text"], tokens, None, seconds)
            status, headers = reply.status_code, reply.headers
        else:
            options = {"stream_options": {"include_usage": True}}
            async with client.stream("POST", f"{url}/completions", json=body | options) as reply:
                if reply.is_success:
                    return await _read_stream(reply, clock)
                status, headers = reply.status_code, reply.headers
        if status != 429:
            return None
        await asyncio.sleep(float(headers["Retry-After"]))


async def _read_stream(reply: httpx.Response, clock: float) -> _Reply:
    text, tokens, first_s = "", 0, None
    async for line in reply.aiter_lines():
        if not line.startswith("data: {"):
            continue
        first_s = first_s or time.perf_counter() - clock
        chunk = json.loads(line.removeprefix("data: "))
        text += "".join(choice["text"] for choice in chunk["choices"])
        tokens = (chunk["usage"] or {}).get("completion_tokens", tokens)
    return _Reply(text, tokens, first_s, time.perf_counter() - clock)


def _client(connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(limits=limits, timeout=None)


@contextlib.contextmanager
def _server(policy: pathlib.Path, slots: int) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a server of a policy folder in a process; yield the process and its address."""
    command = [sys.executable, "-m", "spell_jax.serve", f"--policy={policy}", "--port=0"]
    with subprocess.Popen(
        [*command, f"--slots={slots}"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if match := re.match(r"(http://\S+) serves", line):
                    yield process, match[1]
                    return
                print(line, end="", file=sys.stderr)
            raise RuntimeError("the server did not start")
        finally:
            process.terminate()


def _memory_mb(pid: int) -> float:
    """Return a process' resident memory; Linux alone tells it."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found_kib = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found_kib
    return int(found_kib[1]) * 1024 / 1e6
