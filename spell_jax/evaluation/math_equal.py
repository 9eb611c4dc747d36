"""Mathematical equality of two answers, decided by the library Math-Verify under a time limit.

1. Equal texts and whole numbers are compared in this process. Other pairs go to a worker process
   (`python -m spell_jax.evaluation.math_equal`), which answers each JSON line with one JSON line.
2. SymPy may run forever or exhaust memory, so the worker sets a timer before each pair. When it
   runs out, the kernel kills the worker, and the pair counts as not equal.
3. Any number of threads may call `equal`. Each takes an idle worker or starts one, up to `WORKERS`.
   If all are busy, the thread blocks until one is returned.
4. Model text is never evaluated. Math-Verify's parser of plain expressions calls Python's eval
   (through sympy.parse_expr), so only its LaTeX parser, a grammar, is used.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading

MODULE = "spell_jax.evaluation.math_equal"
# Time limit of a worker for one pair.
SECONDS = 5.0
# Longer texts are never equal: no answer needs more, and the time of a parser grows with its text.
MAX_CHARACTERS = 1000
# Bytes; limit of a worker's address space, so that a power tower ends one worker and not the host.
MEMORY = 4 * 2**30
WORKERS = min(4, os.cpu_count() or 1)

log = logging.getLogger(__name__)

# Whole numbers with or without commas: the answers of GSM8K and AIME need no worker.
_WHOLE = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.0*)?")
_BASED = re.compile(r"[0-9A-Z]+_(?=[0-9]|\{[0-9]+\}$)\{?([0-9]+)\}?")
# LaTeX that changes the look and not the value.
_IGNORED = re.compile(r"\s+|\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\$")
_idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
_slots = threading.Semaphore(WORKERS)


def check_installed() -> None:
    """Raise ImportError, with the install command, if Math-Verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("mathematical benchmarks need Math-Verify: pip install 'spell_jax[eval]'")


@functools.lru_cache(maxsize=100_000)
def equal(prediction: str, reference: str) -> bool:
    """Return whether two answers are equal; False if either cannot be parsed in time.

    Answers are LaTeX without dollar signs, or plain numbers; any string is accepted. Results are
    cached, because samples often repeat an answer. Raises ImportError without Math-Verify, and
    RuntimeError if a worker exits before it is ready.
    """
    if max(len(prediction), len(reference)) > MAX_CHARACTERS:
        return False
    ours, theirs = _plain(prediction), _plain(reference)
    if not ours or not theirs:
        return False
    # Equal texts are equal, also if neither can be parsed.
    if ours == theirs:
        return True
    if _WHOLE.fullmatch(ours) and _WHOLE.fullmatch(theirs):
        first, second = (int(text.partition(".")[0].replace(",", "")) for text in (ours, theirs))
        return first == second
    # Math-Verify ignores the base of a number: 52_7 would equal 52_8.
    bases = [match[1] for text in (ours, theirs) if (match := _BASED.fullmatch(text))]
    if len(bases) == 2 and bases[0] != bases[1]:
        return False
    return _ask(prediction, reference)


def _plain(text: str) -> str:
    return _IGNORED.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))


class _Worker:
    """A worker process. `ask` returns True or False, or None if the worker died on the pair."""

    def __init__(self) -> None:
        check_installed()
        # Not multiprocessing: a fork would copy JAX's threads, a spawn would run the main script.
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        if not self.stdout.readline():
            self.end()
            raise RuntimeError(f"{sys.executable} -m {MODULE} ended; run it to see why")

    def ask(self, prediction: str, reference: str) -> bool | None:
        try:
            self.stdin.write(json.dumps([prediction, reference, SECONDS]).encode() + b"\n")
            self.stdin.flush()
            answer = self.stdout.readline()
        except BrokenPipeError:
            answer = b""
        return json.loads(answer) if answer.endswith(b"\n") else None

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def _ask(prediction: str, reference: str) -> bool:
    with _slots:
        worker, answer = _take(), None
        try:
            answer = worker.ask(prediction, reference)
        finally:
            if answer is None:
                log.warning("not equal, because the worker died: %r, %r", prediction, reference)
                worker.end()
            else:
                _idle.put(worker)
    return bool(answer)


def _take() -> _Worker:
    """Take an idle worker that is still alive, else start a new one."""
    while True:
        try:
            worker = _idle.get_nowait()
        except queue.Empty:
            return _Worker()
        # An idle worker may have been killed for lack of memory meanwhile.
        if worker.process.poll() is None:
            return worker


@atexit.register
def end_workers() -> None:
    """Kill the idle workers; the next pair starts a new worker."""
    while not _idle.empty():
        _idle.get().end()


def _work() -> None:
    """Run a worker's main loop: print a line when ready, then true or false per line of input."""
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries out of the answers
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()
    targets = [LatexExtractionConfig()]

    @functools.lru_cache(maxsize=1000)  # a reference is compared with many answers
    def parse_answer(text: str) -> list:
        # Their own time limit is off: it needs the main thread's signals.
        return parse(f"\\boxed{{{text}}}", targets, parsing_timeout=None)  # type: ignore[arg-type]

    # The default action ends the process in the kernel: a Python handler would wait while SymPy
    # runs in C code.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    parse_answer("\\frac{1}{2}")  # warm-up: the first call builds tables, which takes long
    print("true", file=answers, flush=True)
    for line in sys.stdin:
        prediction, reference, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            is_equal = verify(
                parse_answer(reference), parse_answer(prediction), timeout_seconds=None
            )
        except Exception:  # SymPy may raise anything; the text could not be parsed
            is_equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(bool(is_equal)), file=answers, flush=True)


if __name__ == "__main__":
    _work()
