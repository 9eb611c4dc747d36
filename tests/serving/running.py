"""A server in a thread of the test process, with the demo's policy."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import jax

from spell_jax.policy.model import TINY_POLICY
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.serving import server
from spell_jax.serving.app import App, Limits
from spell_jax.serving.scoring import Scorer
from spell_jax.serving.service import Service

NAME = "demo"
CONFIG = SamplerConfig(
    max_tokens=256,
    max_prompt=640,
    page_size=32,
    kv_cache_tokens=4096,
    slots=16,
    samples_per_prompt_batch=4,
    prefill_tokens=256,
    decode_tokens=8,
)
MAX_QUEUED = 64
# Greedy answers to this prompt are long.
CHAT = [{"role": "user", "content": "city of Bela"}]


class RunningServer(NamedTuple):
    """A server and its parts."""

    url: str
    app: App
    service: Service
    model: TextModel

    def post(self, path: str, content: Any, **options: Any) -> httpx.Response:
        """Send a JSON body; bytes are sent as they are."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        return httpx.post(f"{self.url}{path}", content=body, headers=headers, timeout=60, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        """Ask for a completion."""
        return self.post("/v1/completions", {"model": NAME, "prompt": "city of Bela"} | fields)

    def chat(self, **fields: Any) -> httpx.Response:
        """Ask for an answer to a chat."""
        return self.post("/v1/chat/completions", {"model": NAME, "messages": CHAT} | fields)


@functools.cache
def one_device() -> jax.sharding.Mesh:
    return meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])


@functools.cache
def demo_model() -> TextModel:
    return TextModel(TINY_POLICY)


@functools.cache
def demo_sampler(config: SamplerConfig = CONFIG) -> Sampler:
    """Make the sampler once, so that its programs are compiled once."""
    model = demo_model()
    tokenizer = model.tokenizer
    return Sampler(model.config, config, tokenizer.stop_ids, one_device(), tokenizer.stream)


@functools.cache
def demo_scorer() -> Scorer:
    model = demo_model()
    return Scorer(model.config, model.load(one_device()), one_device(), CONFIG.longest)


@contextlib.contextmanager
def running(
    key: str | None = None,
    max_queued: int = MAX_QUEUED,
    grace_s: float = 5.0,
) -> Iterator[RunningServer]:
    """Run a server of the demo's policy inside the context."""
    model, sampler, scorer = demo_model(), demo_sampler(), demo_scorer()
    params = model.load(one_device())
    service = Service(functools.partial(sampler.start_session, params), scorer, max_queued)
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()
    with server.listen("127.0.0.1", 0) as listener:
        tokenizer = model.tokenizer
        app = App(NAME, model.config, tokenizer, CONFIG, service, scorer, key, Limits())
        run = server.run(app, service, listener, grace_s, stopping)
        thread = threading.Thread(target=loop.run_until_complete, args=(run,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield RunningServer(url, app, service, model)
        finally:
            loop.call_soon_threadsafe(stopping.set)
            thread.join()
            loop.close()
