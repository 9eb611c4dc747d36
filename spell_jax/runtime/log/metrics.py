"""Metrics on disk: (sum, weight) pairs that merge by addition, written once a step as means.

A run resumed at step s first drops everything written after s, so its files equal the files of an
uninterrupted run.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from spell_jax.runtime.files.durable import run_now
from spell_jax.runtime.files.jsonl import read_records, write_lines
from spell_jax.runtime.finite import finite_or_none
from spell_jax.runtime.log.loggers import MetricLogger, TensorBoard

METRICS_FILE = "metrics.jsonl"
LARGEST_STEP = 2**63 - 1  # of int64, in which TensorBoard stores steps
# Lines of metrics.jsonl kept in a checkpoint. Crashes damage the end of a file, and every
# checkpoint carries these lines.
TAIL = 1000


class Metrics:
    """Named (sum, weight) pairs of host floats; adding a device scalar waits for the device."""

    # Sums, not means: a mean of the means of unequal micro-batches or hosts would be wrong.
    def __init__(self) -> None:
        self._pairs: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: Any, weight: Any = 1.0) -> None:
        """Add a mean `value` over `weight` >= 0 items; ignore it, even NaN, if the weight is 0."""
        weight = float(weight)
        # 0 * NaN is NaN, and the mean of no items, such as of an empty group, is often NaN.
        self.add_sum(name, float(value) * weight if weight else 0.0, weight)

    def add_sum(self, name: str, total: Any, weight: Any) -> None:
        """Add a `total` over `weight` items; ValueError if the weight is negative or not finite."""
        total, weight = float(total), float(weight)
        if not 0 <= weight < math.inf:
            raise ValueError(f"metric {name!r}: weight = {weight}: must be finite and >= 0")
        old_total, old_weight = self._pairs.get(name, (0.0, 0.0))
        self._pairs[name] = (old_total + total, old_weight + weight)

    def merge(self, pairs: "Metrics | Mapping[str, Sequence[Any]]", prefix: str = "") -> None:
        """Add another `Metrics` or a mapping name -> (sum, weight), with `prefix` before names."""
        items = pairs.pairs() if isinstance(pairs, Metrics) else pairs
        for name, (total, weight) in list(items.items()):
            self.add_sum(prefix + name, total, weight)

    def pairs(self) -> Mapping[str, tuple[float, float]]:
        """Return name -> (sum, weight)."""
        return self._pairs

    def means(self) -> dict[str, float]:
        """Return name -> sum / weight, without the names of weight 0."""
        return {name: total / weight for name, (total, weight) in self._pairs.items() if weight}


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the lines of WORKDIR/metrics.jsonl as dicts; log, count and skip damaged lines.

    A line is damaged if it is not a JSON object with an integer "step" of at least 1. A resumed run
    restores damaged lines from its checkpoint. FileNotFoundError if there is no such file;
    OSError if it is a folder, a pipe or a device.
    """
    path = epath.Path(workdir) / METRICS_FILE
    try:
        records, skipped = read_records(path, _require_step)
    except OSError as error:
        # Only a missing file suggests that the folder is no run.
        if isinstance(error, PermissionError) or path.exists():
            raise
        message = f"{path}: no metrics there; is this the folder of a training run?"
        raise FileNotFoundError(message) from error
    if skipped:
        logging.warning("%s: %d of %d lines skipped", path, skipped, len(records) + skipped)
    return records


def _require_step(record: Any) -> dict[str, Any]:
    step = record.get("step") if isinstance(record, dict) else None
    # Exactly int: True is an int, too.
    if type(step) is not int or not 1 <= step <= LARGEST_STEP:
        raise ValueError(f'want an object with an integer "step" from 1 to {LARGEST_STEP}')
    return record


def _parse_tail(lines: Sequence[str]) -> dict[int, str]:
    """Map steps to lines of a checkpoint; ValueError if a line is malformed."""
    saved = {}
    for number, line in enumerate(lines, 1):
        try:
            saved[_require_step(json.loads(line))["step"]] = line
        except ValueError as error:
            raise ValueError(f"tail of the checkpoint:{number}: not JSON ({error})") from error
    return saved


class MetricsWriter:
    """Writes metrics.jsonl, a line {"step": int, name: number, ...} per step, and other loggers.

    Steps up to resume_step are kept, in TensorBoard too; `tail` has lines of its checkpoint, for
    steps that the file lacks or where it is damaged. A resume_step of None starts a new file.
    `is_writer` on process 0 only; elsewhere all methods do nothing. `submit` runs disk work, as
    Background.submit. ValueError if a line of the tail is malformed.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        resume_step: int | None = None,
        is_writer: bool = True,
        tail: Sequence[str] = (),
        submit: Callable[..., None] = run_now,
        loggers: Sequence[MetricLogger] = (),
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
            records = read_metrics(folder) if self._path.exists() else []
            lines = {record["step"]: json.dumps(record) for record in records}
            saved = _parse_tail(tail)
            if restored := sum(lines.get(step) != line for step, line in saved.items()):
                logging.warning("%s: %d lines restored from the checkpoint", self._path, restored)
            # The tail overrides the file, because a flipped bit may leave valid JSON there, and the
            # hashes of the checkpoint protect the tail.
            lines |= saved
            self._lines = {step: lines[step] for step in sorted(lines) if step <= resume_step}
        # At once, and not with the first step: later steps of an interrupted run must be gone
        # before new ones count.
        self._put(list(self._lines.values()))
        self._loggers = [TensorBoard(folder, resume_step), *loggers]

    def write(self, step: int, metrics: Metrics | Mapping[str, Any]) -> None:
        """Write the line of a step; on return, `tail` includes it, even if the disk is full.

        Non-finite numbers become null, are counted in the line's "non_finite", and are logged.
        ValueError if the step is not later than the last one, or if a name is reserved; OSError if
        this or an earlier line could not be written (as reported by `submit`).
        """
        if not self._is_writer:
            return
        last = next(reversed(self._lines), None)
        if last is not None and step <= last:
            raise ValueError(f"step = {step}: must be above {last}, the last one written")
        means = metrics.means() if isinstance(metrics, Metrics) else metrics
        numbers = {name: float(value) for name, value in means.items()}
        reserved_names = {"step", "non_finite"} & numbers.keys()
        if reserved_names:
            raise ValueError(f"metric name {reserved_names.pop()!r}: reserved for the line itself")
        record, non_finite = finite_or_none(numbers)
        if non_finite:
            names = [name for name, value in record.items() if value is None]
            logging.warning("step %d: not finite: %s", step, ", ".join(names))
            record["non_finite"] = non_finite
        # Before the disk is asked: `tail` has the line even if the write fails.
        self._lines[step] = json.dumps({"step": step, **record})
        shown = {name: value for name, value in record.items() if value is not None}
        # A copy: more lines may be added before the work runs.
        self._submit(self._put_step, list(self._lines.values()), step, shown)

    def _put_step(self, lines: Sequence[str], step: int, numbers: Mapping[str, float]) -> None:
        self._put(lines)
        for logger in self._loggers:
            logger.write(step, numbers)

    def _put(self, lines: Sequence[str]) -> None:
        # The whole file, because objects in a bucket cannot be appended to.
        write_lines(self._path, (line + "\n" for line in lines))

    def tail(self) -> list[str]:
        """Return the last TAIL lines for a checkpoint; none on processes that do not write."""
        return list(self._lines.values())[-TAIL:]

    def close(self) -> None:
        """Close the loggers; call this after all submitted work is done."""
        if self._is_writer:
            for logger in self._loggers:
                logger.close()
