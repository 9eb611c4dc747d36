"""Rendering of chat templates in a child process: a template is a program by any author.

Jinja's sandbox keeps a template from Python, but not from time and memory: two nested loops, forty
doublings of a text or `center(10 ** 9)` are a few dozen characters. No count of loops and sizes
covers all filters, so the limits are on a process:

1. The child has no environment variables (an API key is none of a template's business), may write
   no file and start no process, and has MEMORY bytes of address space and SECONDS of CPU time for
   each text. The kernel kills an endless loop, and the next request starts another child. If a
   child ends for another reason, a new child renders the text again, once.
2. Requests and replies are lists of texts after their lengths, through two pipes. A request carries
   the template's source, so that a child needs no state; the child keeps compiled templates.

One child serves all templates of a process. Its start takes 0.1 s. A chat of 16,000 words takes
0.3 ms, and rendering alone 0.02 ms; the tokenization of the chat takes 50 ms (measured on one core
with Qwen2.5's template).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 5  # CPU time of a rendering; a chat of a million words needs 0.02 s
MEMORY = 1 << 30  # bytes of the child's address space; Jinja itself takes 5 %
# Most characters of a rendered text: these, and GROWTH for each character of a content. Templates
# copy each content once, or twice as JSON, and add a few thousand characters of instructions.
SHORT, GROWTH = 1 << 20, 4
# A prompt must not depend on the day. Templates that ask whether strftime_now is defined have a
# date of their own (Llama 3.1). All others get this date, shortly after the June 2025 that
# SmolLM3's template states as the end of its knowledge.
TODAY = datetime.date(2025, 7, 1)
_ASKS_FOR_DATE = r"strftime_now\s+is\b"
_COMPILED = 32  # templates that a child keeps compiled
_MESSAGE = 1000  # most characters of an error's message

Messages = Sequence[Mapping[str, str]]


class RenderError(ValueError):
    """A template that is no Jinja program, refuses the messages, fails, or exceeds a limit.

    `kind` is "syntax", "refused" (any error of the template on these messages) or "limit".
    """

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def render(source: str, messages: Messages, variables: Mapping[str, Any]) -> str:
    """Render Jinja `source` with `messages` and more variables, which are JSON values.

    Raises RenderError if the template fails or exceeds a limit.
    """
    # Contents are long. As JSON they would take four times as long as the rendering itself.
    places = json.dumps([list(message) for message in messages])
    contents = [text for message in messages for text in message.values()]
    request = (source, json.dumps(variables), places, str(SECONDS), *contents)
    with _lock:
        try:
            kind, text = _ask(request)
        except _EndedError:
            # A machine without memory kills any process, so the template gets a second try.
            try:
                kind, text = _ask(request)
            except _EndedError as error:
                raise RenderError("limit", str(error)) from error
    if kind:
        raise RenderError(kind, text)
    return text


class _EndedError(Exception):
    """An end of the child without a reply, for which the template is not to blame."""


def _ask(request: Sequence[str]) -> list[str]:
    """Ask the child, or a new one; return what `_Child.ask` returns."""
    global _child
    if _child is None:
        _child = _Child()
    try:
        return _child.ask(request)
    except BaseException:  # also after Ctrl-C: the next reply would answer this request
        _child.stop()
        _child = None
        raise


class _Child:
    """A process that renders, until `stop` or the end of this process, which ends its input."""

    def __init__(self) -> None:
        # -I: neither the environment nor the working folder decides what the child imports.
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,  # Ctrl-C is for this process only
        )
        _send(self._process.stdin, [path for path in sys.path if path])

    def ask(self, request: Sequence[str]) -> list[str]:
        """Send a request; return ["", rendered text] or [kind of the error, its message].

        Raises RenderError if the child used up its time, _EndedError if it ended otherwise.
        """
        try:
            _send(self._process.stdin, request)
            reply = _receive(self._process.stdout)
        except BrokenPipeError:
            reply = None
        if reply is not None:
            return reply
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            raise RenderError("limit", f"takes more than {SECONDS} s of CPU time")
        raise _EndedError(f"ends its process with status {status}")

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


_child: _Child | None = None
_lock = threading.Lock()


def _forget() -> None:
    """Leave the child to the process that started it; a forked copy starts its own."""
    global _child, _lock
    _child, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _send(stream: Any, texts: Sequence[str]) -> None:
    # Contents may have lone surrogates.
    parts = [text.encode(errors="surrogatepass") for text in texts]
    sizes = [len(parts), *map(len, parts)]
    stream.write(b"".join([size.to_bytes(8, "little") for size in sizes] + parts))
    stream.flush()


def _receive(stream: Any) -> list[str] | None:
    """Receive texts; None at the end of the stream."""
    if len(head := stream.read(8)) < 8:
        return None
    sizes = stream.read(8 * int.from_bytes(head, "little"))
    ends = range(0, len(sizes), 8)
    parts = [stream.read(int.from_bytes(sizes[end : end + 8], "little")) for end in ends]
    return [part.decode(errors="surrogatepass") for part in parts]


# --------------------------------------------------------------------------- In the child process


def _serve() -> None:
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:] = _receive(incoming) or sys.path
    # A template that escapes the sandbox can write no file and start no process.
    for name, amount in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_AS", MEMORY),
    ):
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of the address space
            resource.setrlimit(getattr(resource, name), (amount, amount))
    while request := _receive(incoming):
        source, variables, places, seconds, *contents = request
        # RLIMIT_CPU counts from the start of the process, so each request moves it on.
        end = math.ceil(time.process_time()) + int(seconds)
        # The hard limit stays, because only root may raise it again.
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = end if hard == resource.RLIM_INFINITY else min(end, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        following = iter(contents)
        messages = [{name: next(following) for name in names} for names in json.loads(places)]
        try:
            reply = ["", _render(source, messages, json.loads(variables))]
        except RenderError as error:
            reply = [error.kind, str(error)]
        except MemoryError:
            reply = ["limit", f"takes more than {MEMORY >> 20} MiB of memory"]
        except Exception as error:  # a template is a program and can raise anything
            reply = ["refused", str(error)[:_MESSAGE] or type(error).__name__]
        _send(outgoing, reply)


def _render(source: str, messages: Messages, variables: Mapping[str, Any]) -> str:
    try:
        template = _compile(source)
    except MemoryError:
        raise
    except Exception as error:  # syntax errors, and any Python error of odd templates
        raise RenderError("syntax", str(error)[:_MESSAGE]) from error
    text = template.render(messages=messages, **variables)
    longest = SHORT + GROWTH * sum(len(text) for message in messages for text in message.values())
    if len(text) > longest:
        raise RenderError("limit", f"writes {len(text)} characters, more than {longest}")
    return text


@functools.lru_cache(_COMPILED)
def _compile(source: str) -> Any:
    has_date = re.search(_ASKS_FOR_DATE, source)
    return _environment().from_string(source, {} if has_date else {"strftime_now": TODAY.strftime})


@functools.cache
def _environment() -> Any:
    """Make the Jinja environment of chat templates, without random functions."""
    # Only the child needs Jinja.
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Tag `{% generation %}`, which marks assistant text for training tools."""

        tags = {"generation"}  # noqa: RUF012 (declared like this by Jinja)

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The options of transformers: published templates rely on its treatment of white space.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    # A prompt must not depend on chance.
    del environment.globals["lipsum"], environment.filters["random"]
    return environment


def _to_json(value: Any, **options: Any) -> str:
    """Serialize a value to plain JSON, with non-ASCII characters as they are."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


if __name__ == "__main__":
    _serve()
