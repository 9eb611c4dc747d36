"""Tests of TensorBoard files, and of Weights & Biases with a fake package."""

from __future__ import annotations

import io
import sys
import textwrap

import pytest
from etils import epath
from tensorboardX.proto.event_pb2 import Event, SessionLog

from spell_jax.runtime.log import loggers
from spell_jax.runtime.log.loggers import TensorBoard, Wandb
from spell_jax.runtime.log.metrics import MetricsWriter


def events(workdir) -> list[Event]:
    """Read events as TensorBoard does: length, its checksum, the event, its checksum."""
    (path,) = (workdir / "tensorboard").iterdir()
    file, loaded_events = io.BytesIO(path.read_bytes()), []
    while header := file.read(8):
        file.read(4)
        loaded_events.append(Event.FromString(file.read(int.from_bytes(header, "little"))))
        file.read(4)
    return loaded_events


def test_tensorboard_events_are_readable_after_each_step(tmp_path):
    logger = TensorBoard(tmp_path)
    logger.write(3, {"train/loss": 0.5, "rollout/solve_rate": 0.25})
    version, start, step = events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == SessionLog.START and start.step == 0
    assert step.step == 3
    values = {value.tag: value.simple_value for value in step.summary.value}
    assert values == {"train/loss": 0.5, "rollout/solve_rate": 0.25}
    logger.close()


def test_resumed_tensorboard_discards_later_steps(tmp_path):
    TensorBoard(tmp_path, resume_step=7).close()
    assert [event.step for event in events(tmp_path)] == [0, 8]


FAKE = """
    calls = []
    class Settings:
        def __init__(self, **fields):
            self.fields = fields
    class Run:
        def define_metric(self, name, step_metric=None):
            calls.append(("define_metric", name, step_metric))
        def log(self, numbers):
            if numbers["step"] == 5:
                raise ConnectionError("no network")
            calls.append(("log", numbers))
        def finish(self):
            calls.append(("finish",))
    def init(**options):
        calls.append(("init", options))
        return Run()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Yield a stand-in for the wandb package; `calls` records the calls of the package."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "wandb.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb
    del sys.modules["wandb"]


def test_wandb_gets_run_options_and_metrics_by_step(wandb, tmp_path):
    workdir = epath.Path(tmp_path / "mine")
    logger = Wandb("reading", workdir, None, {"seed": 3})
    writer = MetricsWriter(workdir, loggers=[logger])
    writer.write(1, {"a": 1.0, "b": float("nan")})
    writer.close()
    (_, options), *calls = wandb.calls
    settings = options.pop("settings").fields
    identity = options.pop("id")
    assert options == {
        "project": "reading",
        "name": "mine",
        "resume": "allow",
        "config": {"seed": 3},
        "dir": str(workdir),
    }
    assert settings == {"console": "off"} and len(identity) == 32
    assert calls == [
        ("define_metric", "step", None),
        ("define_metric", "*", "step"),
        ("log", {"step": 1, "a": 1.0, "non_finite": 1}),
        ("finish",),
    ]


def test_resumed_run_keeps_its_wandb_id(wandb, tmp_path):
    def identity(resume_step: int | None) -> str:
        Wandb("reading", epath.Path(tmp_path), resume_step)
        return next(c[1]["id"] for c in reversed(wandb.calls) if c[0] == "init")

    first = identity(None)
    assert identity(4) == first
    anew = identity(None)
    assert anew != first and identity(2) == anew
    (tmp_path / "wandb_id").unlink()
    assert identity(2) not in (first, anew)


def test_wandb_failure_does_not_stop_the_run(wandb, tmp_path, caplog):
    logger = Wandb("reading", epath.Path(tmp_path))
    for step in (4, 5, 6):
        logger.write(step, {"a": 1.0})
    logger.close()
    assert [call[1]["step"] for call in wandb.calls if call[0] == "log"] == [4]
    assert wandb.calls[-1][0] == "log"
    assert "wandb: no network; from step 5 on nothing is written there" in caplog.text


def test_missing_wandb_package_raises_if_configured(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"wandb = 'reading': needs wandb; pip install"):
        Wandb("reading", epath.Path(tmp_path))
    loggers.check_wandb("")
    assert not list(tmp_path.iterdir())
