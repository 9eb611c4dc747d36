"""Size of one SPELL step: the files that it runs, and the classes that hold one of its answers.

    python -m tests.house --measure-step [--files]

A tiny policy of random weights trains for four steps, in which checksums of random text pass for
questions, answers and verdicts (tests/noise.py); the real parsers and rules run beside them. The
third step is measured: every program is compiled by then, and nothing is traced. It ends before the
fourth rollout begins. It has no validation and no checkpoint.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from etils import epath

from spell_jax.data.samples import Sample
from spell_jax.learner.packing import TrainGroup
from spell_jax.trainer import loop
from spell_jax.trainer.rollouts import SharedRollouts
from tests import noise
from tests.house_rules import PACKAGE
from tests.paths import ROOT

MEASURED_STEP = 3
KERNELS = f"{PACKAGE}/attention/"
# Modules of runtime/ that only write or show what happened, and the thread that writes it.
LOG_THREAD = "background"
LOGS = ("episodes", "loggers", "metrics", "progress", "run_logger", "terminal")


@dataclasses.dataclass
class StepRecord:
    """Files and instances of the measured step.

    Attributes:
      is_open: whether the step runs now.
      files: files of the repository with a function that ran.
      instances: instances of the package's dataclasses that the step made.
    """

    is_open: bool = False
    files: set[str] = dataclasses.field(default_factory=set)
    instances: list[Any] = dataclasses.field(default_factory=list)

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a frame and its caller, which runs too; a function for sys.setprofile."""
        if not self.is_open or threading.current_thread().name == LOG_THREAD:
            return
        for running in (frame, frame.f_back):
            # A module that is imported late is no function.
            if running is not None and running.f_code.co_name != "<module>":
                self.files.add(running.f_code.co_filename)
        if event == "return" and frame.f_code.co_name == "__init__":
            instance = frame.f_locals.get("self")
            if dataclasses.is_dataclass(instance) and type(instance).__module__.startswith(PACKAGE):
                self.instances.append(instance)

    def crossed_files(self) -> dict[str, int]:
        """Return the lines of each file that ran, {path: lines}, the longest file first.

        A file counts if a function of it, or a lambda or comprehension, ran in any thread but the
        logger's (`LOG_THREAD`). Kernels (`KERNELS`), logs (`LOGS`) and tests are left out.
        """
        lines = {}
        for name in self.files:
            path = Path(name)
            if not path.is_relative_to(ROOT / PACKAGE) or not path.is_file():
                continue
            relative = path.relative_to(ROOT).as_posix()
            is_log = relative.startswith(f"{PACKAGE}/runtime/") and path.stem in LOGS
            if not relative.startswith(KERNELS) and not is_log:
                lines[relative] = path.read_text().count("\n")
        return dict(sorted(lines.items(), key=lambda item: (-item[1], item[0])))

    def classes_of_an_answer(self) -> list[str]:
        """Return the names of the dataclasses that hold the longest trained answer of a responder.

        An instance made in the step holds the answer if a field has its Sample, its text or its
        token ids (as a part of a list or array of numbers), in lists, tuples, dicts and other
        dataclasses at any depth. Classes that only hold the prompt, such as requests, do not count.
        """
        groups = [item for item in self.instances if isinstance(item, TrainGroup)]
        samples = [s for group in groups if group.name == "responder" for s in group.samples]
        answer = max(samples, key=lambda sample: len(sample.tokens))
        return sorted({type(item).__name__ for item in self.instances if _holds(item, answer)})


def _holds(value: Any, answer: Sample, depth: int = 8) -> bool:
    """Return whether a value is the answer or its tokens, or holds them."""
    if value is answer:
        return True
    if depth == 0:
        return False
    tokens = answer.tokens.tolist()
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer):
        return _contains(value.flatten().tolist(), tokens)
    if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
        return _contains(value, tokens)
    return any(_holds(part, answer, depth - 1) for part in _parts(value))


def _contains(numbers: Sequence[int], part: Sequence[int]) -> bool:
    starts = range(len(numbers) - len(part) + 1)
    return any(list(numbers[start : start + len(part)]) == list(part) for start in starts)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith(PACKAGE):
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))


def record_step() -> StepRecord:
    """Train four steps on one CPU device, and return the record of the third."""
    record, take = StepRecord(), SharedRollouts.take

    def take_and_watch(self: SharedRollouts, states: Any, step: int) -> Any:
        record.is_open = step == MEASURED_STEP
        sys.setprofile(record.watch if record.is_open else None)
        return take(self, states, step)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.give_meaning(RealBesideFake(monkeypatch))
        noise.skip_plots(monkeypatch)
        monkeypatch.setattr(SharedRollouts, "take", take_and_watch)
        policy = noise.save_policy(Path(folder) / "policy")
        fields = {"validate_every": 0, "checkpoint_every": 100}
        config = noise.small_config(policy, steps=MEASURED_STEP + 1, **fields)
        threading.setprofile(record.watch)  # for the threads that the run starts
        try:
            loop.train(config, epath.Path(folder) / "run")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return record


class RealBesideFake:
    """A monkeypatch for noise.give_meaning: the replaced parsers and rules still run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch

    def setattr(self, user: Any, name: str, fakes: SimpleNamespace) -> None:
        """Replace a module's imported module `name`; each fake calls the real function first."""
        real = vars(getattr(user, name))
        functions = {
            function: _call_real_first(real[function], fake)
            for function, fake in vars(fakes).items()
            if inspect.isfunction(fake) and fake is not real[function]
        }
        self._monkeypatch.setattr(user, name, SimpleNamespace(**vars(fakes) | functions))


def _call_real_first(real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        return fake(*arguments, **options)

    return call


def measure(record: StepRecord, with_files: bool = False) -> Iterator[str]:
    """Yield a line for each measure; `with_files` adds a line for each file and class."""
    files, classes = record.crossed_files(), record.classes_of_an_answer()
    yield f"{len(files):>8,}  files that one SPELL step crosses"
    yield f"{sum(files.values()):>8,}  lines of these files"
    yield f"{len(classes):>8,}  classes that one answer passes through"
    if with_files:
        yield from (f"{lines:>8,}  {path}" for path, lines in files.items())
        yield f"classes: {', '.join(classes)}"
