"""HTTP routes of the server: OpenAI's protocol over the service, with Starlette.

1. A body is bounded, parsed and tokenized in a pool of threads, so that neither the event loop nor
   the device waits for a long document.
2. Prompts as tokens become a job of the service. A request waits for its job's events, and cancels
   the job if the client goes away.
3. Every error is in the protocol's form. Prompts, answers and keys are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import ipaddress
import json
import logging
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.rollout.replies import Prompt
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.keys import fold_keys, seed_key
from spell_jax.sampler.requests import Options, SampleRequest
from spell_jax.serving.metrics import CONTENT_TYPE, ServerMetrics
from spell_jax.serving.protocol import Call, ProtocolError, parse_json, read_call
from spell_jax.serving.responses import Responses
from spell_jax.serving.scoring import Scorer
from spell_jax.serving.service import (
    RETRY_S,
    Failure,
    Job,
    NewTokens,
    PromptAnswers,
    ScoreRequest,
    Service,
)

log = logging.getLogger(__name__)

BODY_S = 60.0  # seconds in which a client must send a body
CLIENT_LEFT = 499  # status of a request without a client, for metrics alone
STOPPING = ProtocolError("the server stops; ask again later", 503, retry_s=10)
_THREADS = 4  # that read and write requests
_MOST_READ = 1024  # requests whose bodies are read at once: slow clients must not keep others out
_MOST_LOGPROBS = 2_000_000  # in a reply, which then has up to 60 MB


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
      max_body: bytes of a body.
      max_prompts: prompts of a request.
    """

    max_body: int = 16 << 20
    max_prompts: int = 1024


class App:
    """Routes of one policy.

    `asgi` is the application. `stop` refuses new requests and ends the open ones.
    """

    def __init__(
        self,
        name: str,
        policy: PolicyConfig,
        tokenizer: Tokenizer,
        config: SamplerConfig,
        service: Service,
        scorer: Scorer,
        key: str | None = None,
        limits: Limits = Limits(),
    ):
        """Make the routes of the model `name`, which `service` and `scorer` run.

        With a `key`, requests need it as their bearer token, except for /health. Without one,
        requests must name this machine as their host.
        """
        self._name, self._policy, self._tokenizer, self._config = name, policy, tokenizer, config
        self._service, self._scorer, self._key, self._limits = service, scorer, key, limits
        self.metrics = ServerMetrics(lambda: service.state)
        self._has_token = np.ones(policy.vocab_size, bool)
        for low, high in policy.unused_ids:
            self._has_token[low:high] = False
        self._threads = ThreadPoolExecutor(_THREADS, "requests")
        self._created = int(time.time())
        self._is_stopping = False
        self._reading = self._open = 0  # requests that are being read, and answered
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        routes = [
            Route("/health", self._guarded(self._health, needs_key=False)),
            Route("/metrics", self._guarded(self._show_metrics)),
            Route("/v1/models", self._guarded(self._list_models)),
            Route("/v1/models/{name:path}", self._guarded(self._show_model)),
        ]
        for path, is_chat in (("/v1/chat/completions", True), ("/v1/completions", False)):
            answer = functools.partial(self._answer, is_chat)
            routes.append(Route(path, self._guarded(answer), methods=["POST"]))
        handlers: Any = {HTTPException: _show_http_error}
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)
        # A redirect would name the host that the request names.
        self.asgi.router.redirect_slashes = False

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, and end the open requests with an error after `grace_s` seconds."""
        self._is_stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_answered.wait(), grace_s)
        self._service.end_all(STOPPING)
        with contextlib.suppress(TimeoutError):  # a client that reads nothing
            await asyncio.wait_for(self._all_answered.wait(), 2.0)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --------------------------------------------------------------------------------------- Guards

    def _guarded(
        self, handle: Callable[[Request], Awaitable[Response]], needs_key: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: check the key, count the request, and show every error as JSON."""

        async def guarded(request: Request) -> Response:
            try:
                self._authorize(request, needs_key)
                response = await handle(request)
            except ProtocolError as error:
                response = _show_error(error)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except Exception:
                log.exception("%s", request.url.path)
                response = _show_error(ProtocolError("the server failed; its log has more", 500))
            route = request.scope.get("route")
            self.metrics.requests.labels(getattr(route, "path", ""), response.status_code).inc()
            return response

        return guarded

    def _authorize(self, request: Request, needs_key: bool) -> None:
        if self._key is None:
            # A page in a browser could reach this machine under a name of its own (DNS rebinding).
            if not is_loopback(_host_name(request)):
                message = "the request names another host than localhost, which needs --api_key"
                raise ProtocolError(message, 403)
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # In constant time, so that the time of a refusal tells nothing of the key.
        is_right = hmac.compare_digest(token.strip().encode(), self._key.encode())
        if needs_key and not (is_right and scheme.lower() == "bearer"):
            raise ProtocolError(
                "the key is missing or wrong: the header Authorization must be 'Bearer KEY'",
                401,
                code="invalid_api_key",
            )

    # --------------------------------------------------------------------------------- Small routes

    async def _health(self, request: Request) -> Response:
        if self._is_stopping or not self._service.is_alive:
            status = "stopping" if self._is_stopping else "failed"
            return JSONResponse({"status": status}, 503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def _show_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        context = self._policy.max_positions
        fields = {"id": self._name, "object": "model", "created": self._created}
        return fields | {"owned_by": "spell_jax", "max_model_len": context}

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise ProtocolError(
                f"model = {name[:100]!r}: not served here, must be {self._name!r}",
                404,
                "model",
                "model_not_found",
            )

    # -------------------------------------------------------------------------------------- Answers

    async def _answer(self, is_chat: bool, request: Request) -> Response:
        start = time.monotonic()
        if self._is_stopping:
            raise STOPPING
        self._service.check_capacity(1)  # before a body is read in vain
        if self._reading >= _MOST_READ:
            message = f"{self._reading} requests are being read already; ask again later"
            raise ProtocolError(message, 429, code="rate_limit_exceeded", retry_s=RETRY_S)
        self._reading += 1
        try:
            call, prompts = await self._read(request, is_chat)
        finally:
            self._reading -= 1
        job = self._make_job(call, prompts)
        responses = Responses(call, prompts, self._tokenizer)
        self._service.submit(job)
        self._open += 1
        self._all_answered.clear()
        if call.stream:
            events = self._stream(job, call, responses, start)
            return _EventStream(events, functools.partial(self._close, job))
        try:
            answers = await _wait(job, request)
        finally:
            self._close(job)
        if answers is None:
            return Response(status_code=CLIENT_LEFT)
        self._count(responses.usage(answers), start)
        run = asyncio.get_running_loop().run_in_executor
        # In another thread: a long reply with alternatives takes seconds.
        body = await run(self._threads, lambda: _dump(responses.body(answers)))
        return Response(body, media_type="application/json")

    async def _read(self, request: Request, is_chat: bool) -> tuple[Call, list[Prompt]]:
        """Read a request: its body, and its prompts as tokens."""
        body = await self._read_body(request)
        run = asyncio.get_running_loop().run_in_executor
        call, prompts = await run(self._threads, self._read_call, body, is_chat)
        if call.needs_scores:
            lengths = [len(prompt.ids) for prompt in prompts]
            longest = max(lengths) + (call.max_tokens or 0)
            await run(self._threads, self._scorer.prepare, min(lengths), longest)
        return call, prompts

    async def _read_body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A page in a browser may send other types to any address without being asked.
            raise ProtocolError(f"Content-Type = {kind[:100]!r}: must be application/json", 415)
        limit, body = self._limits.max_body, bytearray()
        too_long = ProtocolError(f"the body is longer than {limit} bytes")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_long
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_long
        except TimeoutError:
            raise ProtocolError(f"the body did not arrive within {BODY_S:g} s", 408) from None
        return bytes(body)

    def _read_call(self, body: bytes, is_chat: bool) -> tuple[Call, list[Prompt]]:
        """Parse a body and tokenize its prompts; ProtocolError for every mistake in them."""
        content = parse_json(body)
        if content.get("model") is None:
            raise ProtocolError(f"model: is missing, must be {self._name!r}", field="model")
        call = read_call(content, is_chat)
        self._check_model(call.model)
        if len(call.prompts) > self._limits.max_prompts:
            raise ProtocolError(
                f"prompt: {len(call.prompts)} prompts in a request, at most "
                f"{self._limits.max_prompts} may be",
                field="prompt",
            )
        # A limit above the server's is no mistake: clients send one for all servers, and
        # finish_reason tells which answers were cut off.
        cap = self._config.max_tokens
        max_tokens = cap if call.max_tokens is None else min(call.max_tokens, cap)
        call = dataclasses.replace(call, max_tokens=max_tokens)
        field = "messages" if is_chat else "prompt"
        try:
            prompts = [self._encode(call, source) for source in call.prompts]
        except ValueError as error:  # a layout that refuses the messages
            text = str(error).removeprefix(f"{field}: ")
            raise ProtocolError(f"{field}: {text}", field=field) from error
        for prompt in prompts:
            self._check_prompt(prompt, field)
        self._check_logprobs(call, prompts)
        return call, prompts

    def _check_logprobs(self, call: Call, prompts: list[Prompt]) -> None:
        """Refuse a call with more logprobs than a reply may have."""
        tokens = sum((call.max_tokens or 0) + len(p.ids) * call.echo for p in prompts) * call.n
        count = tokens * (1 + call.alternatives) * call.logprobs
        if count > _MOST_LOGPROBS:
            raise ProtocolError(
                f"logprobs: the reply could have {count} of them, at most {_MOST_LOGPROBS} may be; "
                "ask for fewer prompts, answers, tokens or alternatives",
                field="logprobs",
            )

    def _encode(self, call: Call, source: Any) -> Prompt:
        tokenizer = self._tokenizer
        if call.is_chat:
            return Prompt(tokenizer.chat(source), tokenizer.open_thought(source))
        if isinstance(source, list):
            return Prompt(source)
        # As other servers, and as lm-evaluation-harness: the text of a token stands for the token,
        # and a text that begins with the first token already gets no other.
        bos = None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
        return Prompt(tokenizer.encode_rendered(source, not (bos and source.startswith(bos))))

    def _check_prompt(self, prompt: Prompt, field: str) -> None:
        longest, size = self._config.max_prompt, self._policy.vocab_size
        if not prompt.ids:
            raise ProtocolError(f"{field}: a prompt has no tokens", field=field)
        if len(prompt.ids) > longest:
            raise ProtocolError(
                f"{field}: a prompt of {len(prompt.ids)} tokens is over this server's limit of "
                f"{longest} tokens (--max_prompt)",
                field=field,
                code="context_length_exceeded",
            )
        in_range = all(0 <= token < size for token in prompt.ids)
        if not in_range or not self._has_token[np.asarray(prompt.ids)].all():
            raise ProtocolError(
                f"{field}: token ids must be from 0 to {size - 1}, and stand for a token",
                field=field,
            )

    def _make_job(self, call: Call, prompts: list[Prompt]) -> Job:
        seed = secrets.randbits(32) if call.seed is None else call.seed
        # As request_keys of a key with this seed, without a program of JAX.
        keys = fold_keys(seed_key(seed), [(i,) for i in range(len(prompts))])
        options = Options(**call.sampling, max_tokens=max(1, call.max_tokens or 0))
        requests = [
            SampleRequest(prompt.ids, call.n, key, options)
            for prompt, key in zip(prompts, keys, strict=True)
        ]
        scoring = ScoreRequest(options.temperature, call.echo) if call.needs_scores else None
        return Job(requests, call.stream, scoring, samples=call.max_tokens != 0)

    async def _stream(
        self, job: Job, call: Call, responses: Responses, start: float
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        answers: dict[int, PromptAnswers] = {}
        is_first = True
        for chunk in responses.opening():
            yield _event(chunk)
        while job.unanswered:
            event = await job.next_event()
            if isinstance(event, Failure):
                yield _event(event.error.body())
                return
            if is_first:
                self.metrics.first_token_s.observe(time.monotonic() - start)
                is_first = False
            if isinstance(event, NewTokens):
                if chunk := responses.chunk(event):
                    yield _event(chunk)
                continue
            answers[event.prompt] = event
            for chunk in responses.closing(event):
                yield _event(chunk)
        ordered = [answers[prompt] for prompt in range(len(answers))]
        self._count(responses.usage(ordered), start)
        if call.include_usage:
            yield _event(responses.usage_chunk(ordered))
        yield b"data: [DONE]\n\n"

    def _close(self, job: Job) -> None:
        """Note the end of a request; cancel its job if the client went away."""
        if job.unanswered:
            self.metrics.canceled.inc()
            self._service.cancel(job)
        self._open -= 1
        if not self._open:
            self._all_answered.set()

    def _count(self, usage: Mapping[str, Any], start: float) -> None:
        self.metrics.prompt_tokens.inc(usage["prompt_tokens"])
        self.metrics.cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self.metrics.sampled_tokens.inc(usage["completion_tokens"])
        self.metrics.request_s.observe(time.monotonic() - start)


class _EventStream(StreamingResponse):
    """Server-sent events; `close` is called at the end, also of a stream that never began."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]):
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _wait(job: Job, request: Request) -> list[PromptAnswers] | None:
    """Wait for the answers of a job; return None if the client goes away first."""
    answered = asyncio.ensure_future(job.wait())
    left = asyncio.ensure_future(_wait_for_end(request))
    try:
        await asyncio.wait((answered, left), return_when=asyncio.FIRST_COMPLETED)
        return answered.result() if answered.done() else None
    finally:
        answered.cancel()
        left.cancel()


async def _wait_for_end(request: Request) -> None:
    """Return when the client of a request with a body that was read goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _host_name(request: Request) -> str:
    """Return the host that a request names, without its port."""
    try:
        return urllib.parse.urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _show_error(error: ProtocolError) -> Response:
    headers = {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


async def _show_http_error(request: Request, error: HTTPException) -> Response:
    """Show an error of the routes: an unknown path, or a wrong method."""
    message = (
        f"{request.method} {request.url.path[:200]}: {str(error.detail).lower()}; must be "
        "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, /health or /metrics"
    )
    body = ProtocolError(message, error.status_code).body()
    return JSONResponse(body, error.status_code, error.headers)


def _dump(content: dict[str, Any]) -> str:
    """Convert a reply to JSON, choice by choice, between which other threads run."""
    choices = ",".join(map(json.dumps, content["choices"]))
    head = json.dumps({name: value for name, value in content.items() if name != "choices"})
    return f'{head[:-1]},"choices":[{choices}]}}'


def _event(content: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()
