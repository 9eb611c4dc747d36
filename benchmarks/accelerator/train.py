"""Training without labels from a folder of weights and clusters, for the time that is left.

--train=FOLDER names a folder with

    policy/                a Hugging Face folder, or
    NAME.gguf              a GGUF file, or its pieces NAME.gguf.00, NAME.gguf.01, ... in order
    clusters.jsonl         documents to train on (or clusters/, a folder that data_pipeline built)
    held_out.jsonl         questions with answers for the validation
    rows.jsonl             rows for a format stage, if the policy needs one

which the commands of docs/without_labels.md make: articles8.jsonl there is clusters.jsonl here,
format_rows.jsonl is rows.jsonl.

1. `format_stage` tunes the policy on the rows, as configs/format_stage.py does.
2. `arm` trains with the arm "distillation" of configs/real.py and larger batches, in bfloat16.
   Before the section's time is over the run is asked to save, as by a machine that is taken away.
3. A second run of the command with the same OUT goes on from there, in a case `arm_2`.

Everything lies in OUT/train, and a second run needs it. A checkpoint has weights and two moments in
float32, 1.6 GB for a policy of 135M parameters.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.accelerator.processes import MEMORY_SHARE, PREALLOCATE, RunningCommand, make_folder
from benchmarks.accelerator.section import FAULT, Case, Numbers, Setting
from spell_jax.reporting.tables import EVALUATION_FILE
from spell_jax.runtime.hosts import preemption
from spell_jax.runtime.log.metrics import METRICS_FILE, read_metrics

SECTION = "train"
ONLY_COMMANDS = True  # child.py
_SAVE_SECONDS = 30.0  # from the request to stop until the run is saved
# Before the end of the section, at which a run that has not saved is killed. The section's clock
# starts before jax has opened the device, and its process sees the time only afterwards.
_END_SECONDS = 15.0
# The section's own process holds little device memory, so the run may take nearly all.
_ALL_MEMORY = {PREALLOCATE: "true", MEMORY_SHARE: ".85"}
# Changes to configs/format_stage.py: the same rows in each update, fewer and longer rows of a
# micro-batch, one compiled shape, and no checkpoint but the last.
_FORMAT_STAGE = {
    "policy.compute_dtype": "bfloat16",
    "packing.buckets": ((1024, 256),),
    "packing.token_budget": 8192,
    "checkpoint_every": 1000,
}
# Changes to configs/real.py, which has sizes for two CPU cores.
_ARM = {
    "steps": 1000,
    "validate_every": 25,
    "checkpoint_every": 25,
    "keep_checkpoints": 1,
    "preemption_limit_s": 120.0,
    "policy.compute_dtype": "bfloat16",
    "algorithm.generation_batch": 64,
    "sampler.slots": 256,
    "sampler.kv_cache_tokens": 393_216,
    "sampler.prefill_tokens": 8192,
    "packing.buckets": ((4096, 2048),),
    "packing.token_budget": 16_384,
}
_NOT_TRAINING = ("start", "evaluate", "validate")  # phases of an update's line of metrics
_TINY_ROWS = {
    "config": "tiny_warm_start",
    "config.policy.folder": "tiny",
    "config.steps": 2,
    "config.rows_per_step": 4,
    "config.log_every": 1,
    "config.optimizer.warmup_steps": 1,
    "config.packing.token_budget": 640,
    "config.packing.buckets": ((320, 96),),
}
_TINY_ARM = {
    "config": "tiny",
    "config.max_minutes": 0.0,
    "config.evaluate": True,
    "config.validate_every": 1,
    "config.data.tiny.clusters": 16,
    "config.data.tiny.evaluation.per_cell": 1,
    "config.data.tiny.evaluation.documents": (3,),
    "config.data.tiny.evaluation.quick_per_cell": 1,
    "config.data.tiny.evaluation.quick_documents": (3,),
    "config.algorithm.questions": 2,
    "config.algorithm.generation_batch": 4,
    "config.sampler.slots": 16,
    "config.packing.token_budget": 1280,
}


def cases(setting: Setting) -> Sequence[Case]:
    if not setting.train and not setting.tiny:
        return []
    stretch = 1 if setting.tiny else 1 + _stretches(setting)
    name = "arm" if stretch == 1 else f"arm_{stretch}"
    try:
        folder = None if setting.tiny else Folder(pathlib.Path(setting.train))
    except (OSError, ValueError) as error:
        return [Case(name, functools.partial(_refuse, error))]
    training = _Training(setting, folder)
    arm = Case(name, training.train_arm, setting.seconds)
    if training.stage is None:
        return [arm]
    return [Case("format_stage", training.format_stage, setting.seconds), arm]


def _refuse(error: Exception) -> Numbers:
    """Raise the folder's error inside a case; a later run with a valid folder replaces the case."""
    raise error


def _stretches(setting: Setting) -> int:
    """Count the stretches of the arm that ended well."""
    played = setting.before.get(SECTION, {})
    return sum(
        re.fullmatch(r"arm(_\d+)?", case) is not None and FAULT not in played[case]
        for case in played
    )


class Folder:
    """The folder of --train.

    Attributes:
      policy: its Hugging Face folder, or None if it has a GGUF file.
      pieces: the GGUF file, or its pieces in order.
      clusters, validation: sources of the run's data.
      rows: file of rows of the format stage, or None.
    """

    def __init__(self, path: pathlib.Path):
        """Look up the files of the folder; FileNotFoundError names a missing file."""
        path = path.resolve()
        self.policy = path / "policy" if (path / "policy").is_dir() else None
        self.pieces = sorted(path.glob("*.gguf")) or sorted(path.glob("*.gguf.[0-9][0-9]"))
        if self.policy is None and not self.pieces:
            raise FileNotFoundError(f"train = {str(path)!r}: has no folder policy, and no .gguf")
        # A file of several gigabytes may arrive in pieces, so pieces are counted from 00 on.
        if len({piece.name.partition(".gguf")[0] for piece in self.pieces}) > 1:
            raise ValueError(f"train = {str(path)!r}: has several .gguf, must have one")
        numbers = [piece.suffix[1:] for piece in self.pieces if piece.suffix != ".gguf"]
        if numbers != [f"{n:02}" for n in range(len(numbers))]:
            raise FileNotFoundError(
                f"train = {str(path)!r}: of the .gguf's pieces there are {', '.join(numbers)}; "
                "must be all from 00 on"
            )
        self.clusters = next(
            (path / name for name in ("clusters.jsonl", "clusters") if (path / name).exists()), None
        )
        self.validation = path / "held_out.jsonl"
        if self.clusters is None or not self.validation.is_file():
            raise FileNotFoundError(
                f"train = {str(path)!r}: must have clusters.jsonl, or clusters, and held_out.jsonl"
            )
        rows = path / "rows.jsonl"
        self.rows = rows if rows.is_file() else None


class _Training:
    """The format stage and the arm in OUT/train; a call does what is not done yet.

    Attributes:
      stage: flags of the format stage; None: the policy needs none.
    """

    def __init__(self, setting: Setting, folder: Folder | None):
        """Set up the training; without a folder, with the policy and the world of the tests."""
        self._setting, self._source = setting, folder
        self._end = time.monotonic() + setting.seconds
        self._out = make_folder(setting, SECTION)
        self.stage: Mapping[str, Any] | None = _TINY_ROWS
        if folder is not None:
            changes = {f"config.{name}": value for name, value in _FORMAT_STAGE.items()}
            stage = {"config": "format_stage", "config.source": folder.rows, **changes}
            self.stage = stage if folder.rows else None

    def format_stage(self) -> Numbers:
        """Tune the policy on the rows; return the seconds and the losses."""
        folder = self._tune()
        lines = read_metrics(folder)
        losses = [-line["train/mean_logprob"] for line in lines]
        return {
            "s": float((folder / "seconds.txt").read_text()),
            "updates": lines[-1]["step"],
            "first_loss": losses[0],
            "loss": losses[-1],
        }

    def train_arm(self) -> Numbers:
        """Train the arm until the section's time is nearly over; return all numbers so far."""
        flags: dict[str, Any] = {"workdir": self._out / "arm"}
        policy = self._first_policy() if self.stage is None else self._tune() / "policy"
        if self._source is None:
            flags |= _TINY_ARM
        else:
            changes = {f"config.{name}": value for name, value in _ARM.items()}
            flags |= {"config": "real:distillation", **changes}
            flags["config.data.source"] = self._source.clusters
            flags["config.data.validation"] = self._source.validation
        flags["config.policy.folder"] = policy
        # An earlier command with the same OUT may have trained already; its updates are not timed.
        before = len(self._lines())
        command = RunningCommand(
            self._setting, SECTION, "arm", "spell_jax.train", flags, _ALL_MEMORY
        )
        status = command.wait_or_stop(
            self._end - _SAVE_SECONDS - _END_SECONDS,
            self._end - _END_SECONDS,
            enough=lambda: self._setting.tiny and len(self._lines()) > before,
        )
        lines = self._lines()
        numbers = summary(lines, before, held_out(self._out / "arm", lines))
        if status not in (0, preemption.EXIT_CODE):
            numbers[FAULT] = f"arm: ended with {status}: {command.last_line()}"
        elif len(lines) == before:
            numbers[FAULT] = "arm: no update ended in time"
        return numbers

    def _lines(self) -> list[dict[str, Any]]:
        has_lines = (self._out / "arm" / METRICS_FILE).exists()
        return read_metrics(self._out / "arm") if has_lines else []

    def _tune(self) -> pathlib.Path:
        """Run the format stage unless it is done; return its workdir."""
        folder = self._out / "format_stage"
        if not (folder / "seconds.txt").exists():
            flags = {"workdir": folder, "config.policy.folder": self._first_policy()}
            flags |= self.stage or {}
            seconds = self._run("format_stage", "spell_jax.sft", flags, _ALL_MEMORY)
            # Written last: an interrupted format stage is run again.
            (folder / "seconds.txt").write_text(f"{seconds:.3f}")
            # 1.6 GB each; the arm needs the exported policy alone.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return folder

    def _first_policy(self) -> pathlib.Path | str:
        """Return the Hugging Face folder of the first policy; convert a GGUF file if needed."""
        if self._source is None:
            return "tiny"
        if self._source.policy:
            return self._source.policy
        policy = self._out / "first_policy"
        if not policy.is_dir():
            file = self._out / "first_policy.gguf"
            with file.open("wb") as gguf_file:
                for piece in self._source.pieces:
                    gguf_file.write(piece.read_bytes())
            flags = {"gguf": file, "out": policy}
            # On the CPU: the conversion computes nothing that a device would make faster.
            self._run("export", "spell_jax.export", flags, {"JAX_PLATFORMS": "cpu"})
            file.unlink()
        return policy

    def _run(
        self, name: str, module: str, flags: Mapping[str, Any], variables: Mapping[str, str]
    ) -> float:
        command = RunningCommand(self._setting, SECTION, name, module, flags, variables)
        return command.wait(self._end - _END_SECONDS - time.monotonic())


# ------------------------------------------------------------------------------------------ Numbers


def summary(lines: Sequence[Mapping[str, Any]], before: int, accuracies: Numbers) -> Numbers:
    """Summarize speeds and rewards of a run's updates, and its accuracies.

    Args:
      lines: the run's metrics.
      before: number of lines that an earlier process wrote. Speeds are means over this process
        without its first update, which compiles, unless there is no other.
      accuracies: of `held_out`.
    """
    # The first update of a process compiles.
    timed = lines[before + 1 :] or lines[before:]

    def mean(name: str) -> float | None:
        values = [line[name] for line in timed if line.get(name) is not None]
        return statistics.fmean(values) if values else None

    names = {name for line in timed for name in line}
    phases = sorted(name for name in names if name.startswith("time/seconds/"))
    speeds = sorted(name for name in names if name.startswith("time/tokens_per_second/"))
    numbers: Numbers = {
        "updates": lines[-1]["step"] if lines else 0,
        "seconds_per_update": statistics.fmean(map(_training_seconds, timed)) if timed else None,
        **accuracies,
        "mfu": mean("time/mfu"),
        **{f"{name.rpartition('/')[2]}_tokens_per_s": mean(name) for name in speeds},
        "device_peak_mib": mean("process/device_peak_mib"),
        "first_update_s": lines[before]["time/step_seconds"] if len(lines) > before else None,
        "updates_of_this_stretch": len(lines) - before,
        "seconds_by_phase": {name.rpartition("/")[2]: mean(name) for name in phases},
        "sampled_tokens": sum(line.get("rollout/sampled_tokens") or 0 for line in lines),
        "solve_rate": _curve(lines, "rollout/solve_rate"),
        "gradient_norm": _curve(lines, "train/gradient_norm"),
        "sampler_difference": mean("train/sampler_difference"),
    }
    return {name: value for name, value in numbers.items() if value is not None}


def _curve(lines: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Return a metric of each update, with four decimals."""
    return [None if line.get(name) is None else round(line[name], 4) for line in lines]


def _training_seconds(line: Mapping[str, Any]) -> float:
    """Return the seconds of an update, without process start and held-out questions."""
    excluded = (line.get(f"time/seconds/{phase}") or 0.0 for phase in _NOT_TRAINING)
    return line["time/step_seconds"] - sum(excluded)


def held_out(workdir: pathlib.Path, lines: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return held-out accuracies of a run: in full before the first update, then every few updates.

    Returns:
      "held_out_before" and "held_out": accuracy before the run, and of the last validation.
      "before": the full evaluation. "validations": (update, numbers) of each validation.
    """
    numbers: Numbers = {}
    file = workdir / EVALUATION_FILE
    # Without evaluations before and after, the file has the first validation alone.
    report = json.loads(file.read_text()).get("before") if file.exists() else None
    if report:
        rows = next(iter(report.values()))
        if cells := rows.get("all"):
            numbers["held_out_before"] = next(iter(cells.values()))[0]
        numbers["before"] = report
    validations = [
        (line["step"], accuracies)
        for line in lines
        if (accuracies := {k[5:]: v for k, v in line.items() if k.startswith("eval/")})
    ]
    if validations:
        _, last = validations[-1]
        numbers["held_out"] = last.get("all", last.get("responder"))
    return numbers | {"validations": validations}
