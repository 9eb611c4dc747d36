"""Metric loggers besides metrics.jsonl: TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from etils import epath

from spell_jax.runtime.files import durable, paths

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FILE = "wandb_id"  # file in a run's folder with the id of its wandb run
log = logging.getLogger(__name__)


class MetricLogger(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Hide a package in the context, as if not installed, unless it is already imported."""
    sys.modules.setdefault(package, None)  # pyright: ignore - a value that importlib knows
    try:
        yield
    finally:
        if sys.modules[package] is None:
            del sys.modules[package]


class TensorBoard:
    """Event files in WORKDIR/tensorboard, each event on disk when `write` returns.

    TensorBoard is told to discard steps of an earlier process after resume_step (None: all).
    """

    def __init__(self, workdir: epath.Path, resume_step: int | None = None) -> None:
        # tensorboardX imports torch if it is installed, which takes 2 s and more. EventsWriter,
        # because an error silently ends the thread of tensorboardX's SummaryWriter, on which
        # metrax 0.2.4 builds. clu 0.0.12 writes with tensorflow or torch. The writer of tensorboard
        # 2.21.0 calls no fsync.
        with _hidden("torch"):
            from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore - generated

        self._make_writer = EventsWriter
        self._folder, self._writer = workdir / TENSORBOARD_FOLDER, None
        self._number = itertools.count(1)  # of the event files of this process
        durable.make_folder(self._folder)
        first_step = 0 if resume_step is None else resume_step + 1
        start = Event(step=first_step, session_log=SessionLog(status=SessionLog.START))
        durable.retried(self._folder, self._write, start)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore - generated
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore - generated

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        event = Event(step=step, summary=Summary(value=values))
        durable.retried(self._folder, self._write, event)

    def _write(self, event: Any) -> None:
        try:
            if self._writer is None:
                suffix = f".{os.getpid()}.{next(self._number)}"
                self._writer = self._make_writer(str(self._folder / "events"), suffix)
                durable.sync(self._folder)
            self._writer.write_event(event)
            self._writer.flush()  # with an fsync
        except OSError:
            # The file may end with a part of an event, after which TensorBoard reads no further:
            # the next try begins another file.
            self._writer = None
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases, named like `workdir`; a resume_step of None starts a new one.

    wandb reads its own environment variables (WANDB_API_KEY, WANDB_MODE=offline, ...). Steps
    repeated after a checkpoint appear twice, with the same numbers and the same "step". If wandb
    fails in mid-run, the failure is logged, nothing more is sent, and the run continues.
    ImportError as `check_wandb`; wandb.Error if there is no key, no such project, or no network.
    """

    def __init__(
        self,
        project: str,
        workdir: epath.Path,
        resume_step: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_wandb(project)
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / WANDB_FILE
        # The id is on disk, so that a resumed run continues its curves instead of starting new
        # ones.
        if resume_step is None or not path.exists():
            durable.write_file(path, f"{uuid.uuid4().hex}\n".encode())
        self._run = wandb.init(
            project=project,
            name=workdir.name,
            id=path.read_text().strip(),
            resume="allow",
            config=dict(config or {}),
            # wandb opens its files itself, and cannot open a bucket.
            dir=None if paths.is_remote(workdir) else os.fspath(workdir),
            # The terminal shows our progress line, which is redrawn several times a second.
            settings=wandb.Settings(console="off"),
        )
        # wandb's own step must grow, but a resumed run repeats the steps after its checkpoint. So
        # the x axis is a metric of ours.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._run is None:
            return
        try:
            self._run.log({"step": step, **numbers})
        except Exception as error:  # wandb's own errors, or network errors
            # metrics.jsonl has all numbers, so a run of days goes on without wandb.
            log.warning("wandb: %s; from step %d on nothing is written there", error, step)
            self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def check_wandb(project: str) -> None:
    """Raise ImportError if a project is given ("": none) and wandb is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ImportError(
            f"wandb = {project!r}: needs wandb; pip install 'spell_jax[wandb]', or leave it empty"
        )
