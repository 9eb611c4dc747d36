"""The same bits: runs of the tiny config that are repeated, or killed and resumed.

1. `repeat`: two runs of the same command, one after the other.
2. `resume`: a run that is killed once its second checkpoint is complete (--tiny: its first, and no
   `repeat`) and started again, beside the first run of `repeat`.
3. `deterministic_repeat`, on GPUs: two runs with XLA's deterministic operations.

Every case compares the last checkpoints (weights, optimizer), the sampled episodes and the metrics
without times. All runs of the same flags use the same compiled programs, from OUT/cache: the cases
show what the device does, not whether XLA compiles the same program twice.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.accelerator.processes import RunningCommand, make_folder
from benchmarks.accelerator.section import Case, Numbers, Setting
from spell_jax.runtime.files.paths import CHECKPOINTS_FOLDER
from spell_jax.runtime.log.metrics import read_metrics

SECTION = "bits"
ONLY_COMMANDS = True  # child.py
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_RUN_SECONDS = 100.0  # of one process; the first compiles
_CHANGING = ("time/", "process/")  # metrics that no two runs share


def cases(setting: Setting) -> Sequence[Case]:
    # Other work on a CPU may take any time.
    seconds = setting.seconds if setting.tiny else _RUN_SECONDS
    runs = _Runs(setting, seconds)
    repeat = Case("repeat", lambda: runs.repeat("first", "second"), 2 * seconds)
    resume = Case("resume", runs.resume, 3 * seconds)
    if setting.tiny:  # `resume` plays the run `first` too; a fourth process would take 15 s
        return [resume]
    if setting.platform != "gpu":
        return [repeat, resume]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_DETERMINISTIC}".strip()
    names = "deterministic_first", "deterministic_second"
    deterministic_repeat = Case(
        "deterministic_repeat",
        lambda: runs.repeat(*names, {"XLA_FLAGS": flags}),
        2 * seconds,
    )
    return [repeat, resume, deterministic_repeat]


class _Runs:
    """The section's runs; a finished run is kept in OUT/bits and used by several cases."""

    def __init__(self, setting: Setting, seconds: float):
        """Take the setting, and the seconds after which a process is killed."""
        self._setting, self._seconds = setting, seconds
        self._updates, self._killed_after = (2, 1) if setting.tiny else (5, 2)
        self._flags = _flags(self._updates, setting.tiny)

    def repeat(
        self, name: str, second_name: str, variables: Mapping[str, str] | None = None
    ) -> Numbers:
        """Play two runs with the same flags and variables; return their differences."""
        seconds = [self._play(run, variables=variables) for run in (name, second_name)]
        differences = compare(self._folder(name), self._folder(second_name), self._updates)
        return differences | {"first_s": seconds[0], "second_s": seconds[1]}

    def resume(self) -> Numbers:
        """Play a run that is killed and one that resumes it; compare with the run `first`."""
        if not (self._folder("first") / CHECKPOINTS_FOLDER / str(self._updates)).is_dir():
            self._play("first")
        # Killed from inside, at a known point. A signal from here would hit a random moment.
        fault = {"SPELL_FAULT": f"saved:{self._killed_after}"}
        # SIGKILL, because a run that is asked to end would save first.
        killed = self._play("resumed", expected=-signal.SIGKILL, variables=fault)
        resumed = self._play("resumed", anew=False)
        text = (self._setting.out / "logs" / f"{SECTION}_resumed.log").read_text(errors="replace")
        step = re.search(r"resumed at step (\d+)", text)
        # Two runs from the start may be equal too, but they say nothing about resuming.
        if step is None:
            raise RuntimeError("resumed: the second process began anew")
        differences = compare(self._folder("first"), self._folder("resumed"), self._updates)
        return differences | {"killed_s": killed, "resumed_s": resumed, "resumed_at": int(step[1])}

    def _folder(self, name: str) -> pathlib.Path:
        return make_folder(self._setting, SECTION) / name

    def _play(
        self,
        name: str,
        expected: int = 0,
        anew: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> float:
        """Run a process to its expected end; return its seconds."""
        folder = self._folder(name)
        if anew:
            shutil.rmtree(folder, ignore_errors=True)
        flags = {"workdir": folder, **self._flags}
        command = RunningCommand(self._setting, SECTION, name, "spell_jax.train", flags, variables)
        return command.wait(self._seconds, expected)


def _flags(updates: int, tiny: bool) -> dict[str, Any]:
    """Make the flags of a run that saves every step and validates after the last."""
    flags = {
        "steps": updates,
        "evaluate": False,
        "checkpoint_every": 1,  # so that the kill can come after any update
        "keep_checkpoints": 1,
        "validate_every": updates,  # a resumed run must also validate with equal results
        "data.tiny.evaluation.quick_per_cell": 4,
        "data.tiny.evaluation.quick_documents": (8,),
    }
    if tiny:
        flags |= {
            "validate_every": 0,
            "data.tiny.clusters": 16,
            "algorithm.questions": 2,
            "algorithm.generation_batch": 4,
            "sampler.slots": 16,
            "packing.token_budget": 1280,
        }
    return {"config": "tiny", **{f"config.{name}": value for name, value in flags.items()}}


# --------------------------------------------------------------------------------------- Comparison


def compare(run: pathlib.Path, second_run: pathlib.Path, step: int) -> Numbers:
    """Compare the checkpoints of a step, the episodes and the metrics of two runs.

    Returns:
      "same": whether everything is equal to the bit; the same of its parts, "same_weights",
      "same_optimizer", "same_state" (memory and data position), "same_episodes", "same_metrics".
      "different_bytes": share of the bytes of weights and optimizer that differ.
      "largest_difference", "largest_relative_difference": of a weight; relative to the largest
      weight of its tensor.
      "first_different_update": first update with different metrics, if there is one.
    """
    folders = [path / CHECKPOINTS_FOLDER / str(step) for path in (run, second_run)]
    arrays, other_arrays = map(_arrays, folders)
    # Bytes, not values: -0 equals 0 and NaN differs from itself, but resumed bits must be equal.
    if arrays.keys() != other_arrays.keys():
        raise ValueError(f"{second_run}: its checkpoint has other tensors than that of {run}")
    weights = [name for name in arrays if "['params']" in name]
    assert weights
    same = {name: arrays[name].tobytes() == other_arrays[name].tobytes() for name in arrays}
    pairs = [(_bytes(arrays[name]), _bytes(other_arrays[name])) for name in arrays]
    different = sum(int(np.count_nonzero(a != b)) for a, b in pairs)
    gaps = [_gap(arrays[name], other_arrays[name]) for name in weights]
    update = _first_different_update(run, second_run)
    parts = {
        "same_weights": all(same[name] for name in weights),
        "same_optimizer": all(same[name] for name in arrays if name not in weights),
        "same_state": _host_state(folders[0]) == _host_state(folders[1]),
        "same_episodes": _files(run / "episodes") == _files(second_run / "episodes"),
        "same_metrics": update is None,
    }
    numbers: Numbers = {
        "same": all(parts.values()),
        "different_bytes": different / sum(len(a) for a, _ in pairs),
        "largest_difference": max(gap for gap, _ in gaps),
        "largest_relative_difference": max(relative for _, relative in gaps),
    }
    if update is not None:
        numbers["first_different_update"] = update
    return numbers | parts


def _arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Read all arrays of a checkpoint by path, into host memory."""
    path = (folder / "arrays").resolve()
    with ocp.PyTreeCheckpointer() as reader:
        metadata: Any = reader.metadata(path)
        tree = metadata.item_metadata.tree
        # Without types, the reader would restore to the devices that wrote. This process has none.
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arrays = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=on_host))
    leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
    return {jax.tree_util.keystr(place): np.asarray(leaf) for place, leaf in leaves}


def _host_state(folder: pathlib.Path) -> Any:
    """Read the algorithm's state in a checkpoint."""
    (file,) = (path for path in (folder / "host").iterdir() if path.name == "metadata")
    return json.loads(file.read_text())["algorithm"]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)


def _gap(array: np.ndarray, second_array: np.ndarray) -> tuple[float, float]:
    """Return (largest absolute difference, its share of the tensor's largest absolute value)."""
    a, b = array.astype(np.float64), second_array.astype(np.float64)
    gap = float(np.max(np.abs(a - b), initial=0.0))
    return gap, gap / max(float(np.max(np.abs(a), initial=0.0)), 1e-30)


def _files(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _first_different_update(run: pathlib.Path, second_run: pathlib.Path) -> int | None:
    """Find the first update with different metrics, apart from times and the process; or None."""
    lines, other_lines = (
        [{k: v for k, v in line.items() if not k.startswith(_CHANGING)} for line in records]
        for records in (read_metrics(run), read_metrics(second_run))
    )
    for line, other_line in zip(lines, other_lines, strict=True):
        if line != other_line:
            return line["step"]
    return None
