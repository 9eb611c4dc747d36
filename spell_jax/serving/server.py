"""The HTTP server of a policy folder: the body of spell_jax/serve.py.

1. Flags are checked, the address is bound, and the weights are loaded (with adapters merged).
2. All programs that sample are compiled before the first request.
3. The event loop serves in the main thread, the device in another (service.py). SIGTERM and Ctrl-C
   end both: requests that run get --grace_s seconds, then streams end with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import uvicorn
from absl import app as absl_app

from spell_jax.policy import lora
from spell_jax.policy.choices import THINKING
from spell_jax.policy.model import find_folder
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import entry
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, SampleRequest
from spell_jax.serving.app import App, Limits, is_loopback
from spell_jax.serving.scoring import Scorer
from spell_jax.serving.service import Service

log = logging.getLogger(__name__)

# Passes between two deliveries of tokens. Of 64, the default of rollouts, a new request would wait
# for 32 on average.
DECODE_TOKENS = 16
LONGEST_ANSWER = 4096  # default of --max_tokens, if half of the context has as many


def serve(flag_values: Any) -> None:
    """Answer requests until SIGTERM or Ctrl-C.

    Raises UsageError if flags contradict each other or the address cannot be bound,
    FileNotFoundError or ValueError if a file is missing or damaged or a flag is out of range.
    """
    if jax.process_count() > 1:
        count = jax.process_count()
        raise absl_app.UsageError(f"{count} JAX processes: a policy is served by one, on one host")
    key = read_key(flag_values.api_key, flag_values["api_key"].present, flag_values.host)
    model = TextModel(flag_values.policy, flag_values.dtype, THINKING[flag_values.thinking])
    config = sampler_config(flag_values, model)
    adapters = None
    if flag_values.adapters:
        adapters = lora.load(find_folder(flag_values.adapters, "--adapters"), model.config)
    with listen(flag_values.host, flag_values.port) as listener:
        mesh, tokenizer = meshes.make_mesh(), model.tokenizer
        sampler = Sampler(model.config, config, tokenizer.stop_ids, mesh, tokenizer.stream)
        params = model.load(mesh)
        entry.setup_done()
        if adapters is not None:
            params = lora.add(adapters[0], params, adapters[1])
        # Once for all sessions; and scores are of the policy that samples.
        params = sampler.quantized(params)
        model.release()
        warm_up(sampler, params)
        scorer = Scorer(model.config, params, mesh, config.longest)
        start_session = functools.partial(sampler.start_session, params)
        service = Service(start_session, scorer, flag_values.max_queued)
        name = flag_values.name or model.name
        limits = Limits(flag_values.max_body_mb << 20, flag_values.max_queued)
        app = App(name, model.config, tokenizer, config, service, scorer, key, limits)
        host, port = listener.getsockname()[:2]
        print(
            f"http://{f'[{host}]' if ':' in host else host}:{port}/v1 serves {name}: "
            f"prompts of up to {config.max_prompt} tokens, answers of up to {config.max_tokens}, "
            f"{config.slots} slots, pool of {config.kv_cache_tokens} tokens",
            file=sys.stderr,
            flush=True,
        )
        asyncio.run(run_until_signal(app, service, listener, flag_values.grace_s))


def sampler_config(flag_values: Any, model: TextModel) -> SamplerConfig:
    """Return the sizes and dtypes of the sampler; ValueError if they do not fit the policy."""
    context = model.config.max_positions
    max_tokens = flag_values.max_tokens or min(LONGEST_ANSWER, context // 2)
    max_prompt = flag_values.max_prompt or context - max_tokens
    if max_tokens >= context:
        raise ValueError(
            f"--max_tokens = {max_tokens}: must leave room for a prompt in the policy's context of "
            f"{context} tokens"
        )
    if max_prompt + max_tokens > context:
        raise ValueError(
            f"--max_prompt = {max_prompt} and --max_tokens = {max_tokens}: together they must be "
            f"at most the policy's context of {context} tokens"
        )
    config = SamplerConfig(
        max_tokens=max_tokens,
        max_prompt=max_prompt,
        slots=flag_values.slots,
        samples_per_prompt_batch=min(8, flag_values.slots),
        prefill_tokens=flag_values.prefill_tokens,
        decode_tokens=DECODE_TOKENS,
        cache_dtype=flag_values.cache_dtype,
        weights_dtype=flag_values.weights_dtype,
    )
    # At least one prompt and one answer fit, and each may end inside a page.
    room = config.longest + 2 * config.page_size
    tokens = jax.device_count() * (flag_values.kv_cache_tokens + room)
    return dataclasses.replace(config, kv_cache_tokens=tokens)


def read_key(name: str, is_named: bool, host: str) -> str | None:
    """Return the key in the environment variable `name`; None if there is none and none is needed.

    `is_named` says whether the command line names the variable. ValueError if it has no key, or a
    key that no header can carry, or if `host` is not loopback and there is no key.
    """
    # Messages do not repeat a name from the command line: it may be the key itself.
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            "--api_key: must be the name of an environment variable that holds the key, in capital "
            "letters, not the key"
        )
    key = os.environ.get(name)
    if key is None and not is_named:
        if not is_loopback(host):
            raise ValueError(
                f"--host = {host!r}: other machines can reach it, which needs a key in the "
                f"environment variable {name}"
            )
        return None
    if not re.fullmatch(r"[!-~]{8,}", key or ""):
        raise ValueError(
            "--api_key: the environment variable with this name must hold a key of at least 8 "
            "visible ASCII characters"
        )
    return key


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket at an address; UsageError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # asyncio's and Python's words repeat the address.
        reason = (error.strerror or str(error)).partition(" (while")[0].lower()
        raise absl_app.UsageError(f"--host = {host!r}, --port = {port}: {reason}") from error
    with listener:
        yield listener


def warm_up(sampler: Sampler, params: Any) -> None:
    """Compile all programs that sample, so that the first request need not wait."""
    session = sampler.start_session(params)
    groups = sorted({1, *(cells for cells, _ in sampler.shape.lanes)})
    for group in groups:
        key, options = np.zeros(2, np.uint32), Options(max_tokens=1)
        session.submit(SampleRequest([0], group, key, options))
        list(session.results())


async def run_until_signal(
    app: App, service: Service, listener: socket.socket, grace_s: float
) -> None:
    """Answer requests that arrive at a socket, until SIGTERM or Ctrl-C."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    with _signals_call(lambda: loop.call_soon_threadsafe(stopping.set)):
        await run(app, service, listener, grace_s, stopping)


async def run(
    app: App, service: Service, listener: socket.socket, grace_s: float, stopping: asyncio.Event
) -> None:
    """Answer requests that arrive at a socket, until `stopping` is set."""
    # Starlette has the routes and the errors, uvicorn the protocol HTTP. Neither logs a request.
    config = uvicorn.Config(
        app.asgi,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
    )
    server = _Server(config)

    async def end() -> None:
        await stopping.wait()
        log.info("the server stops; requests that run have %g s", grace_s)
        await app.stop(grace_s)
        server.should_exit = True

    service.start(asyncio.get_running_loop())
    ending = asyncio.ensure_future(end())
    try:
        await server.serve(sockets=[listener])
    finally:
        ending.cancel()
        await asyncio.to_thread(service.stop)


class _Server(uvicorn.Server):
    """uvicorn's server without its handling of signals, which would end streams at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals_call(stop: Callable[[], object]) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C call `stop` inside the context, which must be of the main thread.

    The time limit of sigterm.SigtermWatch, which begins with the signal, still holds.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
