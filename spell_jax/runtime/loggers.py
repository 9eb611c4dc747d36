"""Where metrics are looked at besides metrics.jsonl: TensorBoard's files, and Weights & Biases."""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from etils import epath
from tensorboardX.event_file_writer import EventsWriter

# Made when they are imported: pyright does not see them.
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore
from tensorboardX.record_writer import directory_check

from spell_jax.runtime import paths

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FILE = "wandb_id"  # of a run's folder: which of wandb's runs it is
log = logging.getLogger(__name__)


class Board(Protocol):
    """Somewhere that takes a step's numbers."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Events in WORKDIR/tensorboard, a file a process, up to date behind each write.

    Not by tensorboardX's SummaryWriter: an error ends the thread that it writes with, unseen, and
    what writes on then waits for ever.

    Args:
      workdir: the run's folder.
      resume_step: the last step that counts: TensorBoard is told to forget what an earlier process
        wrote behind it. None: all of it.
    """

    def __init__(self, workdir: epath.Path, resume_step: int | None = None) -> None:
        folder = workdir / TENSORBOARD_FOLDER
        directory_check(str(folder))
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        first_step = 0 if resume_step is None else resume_step + 1
        self._file.write_event(
            Event(step=first_step, session_log=SessionLog(status=SessionLog.START))
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._file.write_event(Event(step=step, summary=Summary(value=values)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Wandb:
    """A run of Weights & Biases, the same one when the run of a folder goes on.

    wandb reads its own environment variables (WANDB_API_KEY, WANDB_MODE=offline, ...). Steps that
    are played again behind a checkpoint are there twice, with the same numbers, at the same place
    of the axis "step". If it fails in mid-run, that is logged and nothing more goes there: the run
    does not end for it.

    Args:
      project: of wandb.
      workdir: the run's folder, by whose name the run goes.
      resume_step: None begins a new run of wandb.
      config: what the run was started with.

    Raises:
      ImportError: as `check_wandb`.
      wandb.Error: there is no key, no such project, or no network.
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
        if resume_step is None or not path.exists():
            path.write_text(uuid.uuid4().hex + "\n")
        self._run = wandb.init(
            project=project,
            name=workdir.name,
            id=path.read_text().strip(),
            resume="allow",
            config=dict(config or {}),
            dir=None if paths.is_remote(workdir) else os.fspath(workdir),
            # What the terminal shows is ours, and rewritten several times a second.
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._run is None:
            return
        try:
            self._run.log({"step": step, **numbers})
        except Exception as error:  # of its own kinds, or of the network's
            log.warning("wandb: %s; from step %d on nothing is written there", error, step)
            self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def check_wandb(project: str) -> None:
    """Whether a project ("": none) can be written to.

    Raises:
      ImportError: wandb (extra "wandb") is not installed.
    """
    if project and importlib.util.find_spec("wandb") is None:
        raise ImportError(
            f"wandb = {project!r}: needs wandb; pip install 'spell_jax[wandb]', or leave it empty"
        )
