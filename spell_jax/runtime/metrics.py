"""Metrics on disk.

1. Whatever measures something adds a (sum, weight) pair to a `Metrics`; pairs from micro-batches,
   algorithms and validation merge by addition, so no average is ever averaged.
2. Once a step the trainer turns them into means and `MetricsWriter` writes one line, to disk by a
   thread of its own (recorder.py).
3. Only one process writes; on the others the writer does nothing.
4. A run resumed at step s first drops everything written after s, so its files equal those of a run
   that was never stopped (design.md section 3.11).
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from spell_jax.runtime.jsonl import write_lines
from spell_jax.runtime.loggers import Board, TensorBoard

METRICS_FILE = "metrics.jsonl"
TAIL = 1000  # lines of metrics.jsonl that a checkpoint keeps


class Metrics:
    """Named (sum, weight) pairs, float on the host; a pair becomes a mean only when it is printed.

    Source: design.md section 2. Adding a device scalar waits for the device.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: Any, weight: Any = 1.0) -> None:
        """Adds a mean `value` (scalar) over `weight` (scalar >= 0) things.

        Nothing is said about zero things: with weight 0 the value, even NaN, does not count.

        Raises:
          ValueError: the weight is negative or not finite.
        """
        weight = float(weight)
        self.add_sum(name, float(value) * weight if weight else 0.0, weight)

    def add_sum(self, name: str, total: Any, weight: Any) -> None:
        """Adds a `total` (scalar) over `weight` (scalar >= 0) things; ValueError as in `add`."""
        total, weight = float(total), float(weight)
        if not 0 <= weight < math.inf:
            raise ValueError(f"metric {name!r}: weight is {weight}, want a finite number >= 0")
        old_total, old_weight = self._pairs.get(name, (0.0, 0.0))
        self._pairs[name] = (old_total + total, old_weight + weight)

    def merge(self, pairs: "Metrics | Mapping[str, Sequence[Any]]", prefix: str = "") -> None:
        """Adds another `Metrics`, or a mapping name -> (sum, weight), its names after `prefix`."""
        items = pairs._pairs if isinstance(pairs, Metrics) else pairs
        for name, (total, weight) in list(items.items()):
            self.add_sum(prefix + name, total, weight)

    def means(self) -> dict[str, float]:
        """Name -> sum / weight. Names without weight are left out: there is no mean of nothing."""
        return {name: total / weight for name, (total, weight) in self._pairs.items() if weight}


def finite_or_none(value: Any) -> tuple[Any, int]:
    """`value` as plain JSON, and how many numbers in it were not finite (they become None).

    Takes dataclasses, mappings, sequences, and numpy or jax numbers and arrays.

    Raises:
      TypeError: something in it has no JSON form; the message names its type.
    """
    if value is None or isinstance(value, str | bool | int):
        return value, 0
    if isinstance(value, float):
        return (value, 0) if math.isfinite(value) else (None, 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return finite_or_none({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        cleaned = {str(key): finite_or_none(item) for key, item in value.items()}
        return {key: item for key, (item, _) in cleaned.items()}, sum(
            n for _, n in cleaned.values()
        )
    if isinstance(value, list | tuple):
        pairs = [finite_or_none(item) for item in value]
        return [item for item, _ in pairs], sum(n for _, n in pairs)
    to_python = getattr(value, "tolist", None)
    if callable(to_python):
        return finite_or_none(to_python())
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of WORKDIR/metrics.jsonl as dicts, in file order.

    A last line without its line break, as a copy that was cut off has it, is dropped.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a whole line is not a JSON object with an integer "step"; names file and line.
    """
    path = epath.Path(workdir) / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path}: no metrics there; is this the folder of a training run?")
    return [record for record, _ in _parse(path, _read_lines(path))]


def _read_lines(path: epath.Path) -> list[str]:
    *lines, _torn = path.read_bytes().decode().split("\n")
    return lines


def _parse(place: Any, lines: Iterable[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """(record, line) of each line; the ValueError of `read_metrics` names the place."""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}:{number}: not JSON ({error.msg}): {line[:80]!r}") from error
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ValueError(
                f'{place}:{number}: want an object with an integer "step": {line[:80]!r}'
            )
        yield record, line


def at_once(work: Callable[..., Any], *given: Any) -> None:
    """Does work(*given) here and now, where Background.submit does it later."""
    work(*given)


class MetricsWriter:
    """Writes WORKDIR/metrics.jsonl, one line {"step": int, name: number, ...} a step, and the same
    numbers to boards: TensorBoard's files beside it, and others.

    Buckets have no appending, so the lines are held, and every write puts the whole file there.

    Args:
      workdir: the run's folder; made if it is missing.
      resume_step: the last step that counts. Later lines are dropped, in TensorBoard too. None
        starts the file anew.
      is_writer: whether this process writes (process 0 only); elsewhere all methods do nothing.
      tail: lines that the checkpoint of resume_step kept (see the method). Those of steps that the
        file does not have (it is lost, older, or of another folder) are put in.
      submit: takes what is to be done on disk, as Background.submit.
      boards: others than TensorBoard.

    Raises:
      ValueError: the file to resume, or the tail, is damaged (see `read_metrics`).
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        resume_step: int | None = None,
        is_writer: bool = True,
        tail: Sequence[str] = (),
        submit: Callable[..., None] = at_once,
        boards: Sequence[Board] = (),
    ) -> None:
        self._is_writer = is_writer
        self._submit = submit
        self._lines: dict[int, str] = {}  # by step, in order of steps
        if not is_writer:
            return
        folder = epath.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        if resume_step is not None:
            there = _read_lines(self._path) if self._path.exists() else []
            found = (*_parse("tail of the checkpoint", tail), *_parse(self._path, there))
            lines = {record["step"]: line for record, line in found}  # the file's before the tail's
            self._lines = {step: lines[step] for step in sorted(lines) if step <= resume_step}
        self._put(list(self._lines.values()))
        self._boards = [TensorBoard(folder, resume_step), *boards]

    def write(self, step: int, metrics: Metrics | Mapping[str, Any]) -> None:
        """Writes the step's line, which `tail` has when this returns, also if the disk is full.

        Numbers that are not finite become null, are counted in the line's "non_finite", and are
        logged by name.

        Raises:
          ValueError: the step is not later than the last one written, or a name is taken.
          OSError: it cannot be written, or one before it could not (as `submit` has it).
        """
        if not self._is_writer:
            return
        last = next(reversed(self._lines), None)
        if last is not None and step <= last:
            raise ValueError(f"step is {step}, want more than {last}, the last one written")
        means = metrics.means() if isinstance(metrics, Metrics) else metrics
        numbers = {name: float(value) for name, value in means.items()}
        taken = {"step", "non_finite"} & numbers.keys()
        if taken:
            raise ValueError(f"metric name {taken.pop()!r} is taken by the line itself")
        record, non_finite = finite_or_none(numbers)
        if non_finite:
            names = [name for name, value in record.items() if value is None]
            logging.warning("step %d: not finite: %s", step, ", ".join(names))
            record["non_finite"] = non_finite
        self._lines[step] = json.dumps({"step": step, **record})
        shown = {name: value for name, value in record.items() if value is not None}
        # The lines as they are now: more may have come when it is their turn.
        self._submit(self._put_step, list(self._lines.values()), step, shown)

    def _put_step(self, lines: Sequence[str], step: int, numbers: Mapping[str, float]) -> None:
        self._put(lines)
        for board in self._boards:
            board.write(step, numbers)

    def _put(self, lines: Sequence[str]) -> None:
        write_lines(self._path, (line + "\n" for line in lines))

    def tail(self) -> list[str]:
        """The last TAIL lines, without line breaks, for a checkpoint to keep; on other processes
        none."""
        return list(self._lines.values())[-TAIL:]

    def close(self) -> None:
        """Closes the boards, when all that was submitted is done."""
        if self._is_writer:
            for board in self._boards:
                board.close()
