"""Checkpoints: everything needed to resume, complete and verified by hashes.

Orbax writes a pytree of arrays and a JSON-able dict to WORKDIR/checkpoints/STEP in the background.
All files and folders are then fsynced. hashes.txt, with the size and hash of every file, is written
last: a step without it is unfinished. Only when it is on disk are older steps deleted. Process 0
fsyncs, hashes, deletes and decides, and broadcasts the results. (With several hosts the workdir is
on a network file system, where each host's files are stored when it closes them.)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from spell_jax.runtime import fault_injection
from spell_jax.runtime.files import durable, hashes, paths
from spell_jax.runtime.files.durable import SaveError
from spell_jax.runtime.files.episodes import EPISODES_FOLDER, episode_files, spans
from spell_jax.runtime.files.paths import CHECKPOINTS_FOLDER
from spell_jax.runtime.hosts import distributed, peers

log = logging.getLogger(__name__)

# A checkpoint of another model differs in nearly every tensor: ten lines show the pattern.
_MOST_NAMED = 10
# Pause between two looks at the failures of other hosts: short beside a save of seconds.
_POLL_S = 0.5


class DamagedError(ValueError):
    """Checkpoints exist, but none can be used."""


class MisfitError(ValueError):
    """A checkpoint has other tensors than those to be read.

    Attributes:
      first: first tensor that differs, and how.
    """

    def __init__(self, message: str, first: str):
        super().__init__(message)
        self.first = first


@dataclasses.dataclass(frozen=True)
class _Pending:
    step: int
    score: float | None
    surplus: list[int]  # older steps to delete when this one is complete
    job: concurrent.futures.Future[None]  # finishes the step in the background


class Checkpoints:
    """Checkpoints of one run, in `workdir`. Every process makes one, with equal arguments.

    `save` writes at steps that are multiples of `every`; the latest `keep` and the best stay. A
    failed save is retried `retries` times with the arrays at hand, first after `backoff_s` seconds,
    doubled each time. At last the step is saved to NAME_stepSTEP in `fallback`, with copies of
    paths.RUN_FILES as far as they can be read. `fallback` is by default the system's temporary
    folder, with several hosts none. ValueError if keep or every is below 1, or retries
    or backoff_s below 0; OSError (RuntimeError with several hosts) if the folder cannot be made or
    read.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        keep: int = 2,
        every: int = 1,
        *,
        retries: int = durable.RETRIES,
        backoff_s: float = durable.BACKOFF_S,
        fallback: str | os.PathLike[str] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        counts = (("keep", keep, 1), ("every", every, 1), ("retries", retries, 0))
        for name, value, least in (*counts, ("backoff_s", backoff_s, 0)):
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        # Hosts share no temporary folder, and the part of one host is no checkpoint.
        if fallback is None and jax.process_count() == 1:
            fallback = tempfile.gettempdir()
        self._keep, self._every = keep, every
        self._retries, self._backoff_s, self._sleep = retries, backoff_s, sleep
        self._fallback = fallback
        self.workdir = epath.Path(paths.absolute(workdir))  # as Orbax requires
        self._directory = self.workdir / CHECKPOINTS_FOLDER
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None
        self._manager = self._open()
        self._watch = durable.FolderWatch(self.workdir)
        # Process 0 alone lists the folder. On a network file system hosts may see different states,
        # but must agree on the latest step.
        steps = distributed.broadcast(
            lambda: [(step, *hashes.score(self._folder(step))) for step in self._on_disk()]
        )
        # Scores of finished steps, and steps with an unusable folder.
        self._scores: dict[int, float | None] = {
            s: score for s, is_finished, score in steps if is_finished
        }
        self._unusable = {step for step, is_finished, _ in steps if not is_finished}

    def save(
        self,
        step: int,
        arrays: Any,
        host_state: dict[str, Any],
        force: bool = False,
        score: float | None = None,
    ) -> bool:
        """Save if `every` divides the step or `force` is set; return whether it saved.

        A saved step is not written again. The arrays, of any shapes, dtypes and shardings, are
        written in the background but may be donated or deleted right after. The step of the highest
        `score` is never deleted. A failure shows at the next saved step, which is then written with
        retries before this returns. With `force` this waits until the step is complete.

        Raises:
          TypeError, ValueError: if host_state has anything but dicts with string keys, lists,
            strings, finite numbers, booleans and None, which JSON returns unchanged; names its
            path.
          ValueError: if the score is not finite, or if there is a later checkpoint.
          SaveError: if all tries failed; names the fallback folder, which now holds the step.
        """
        latest = self.latest_step()
        # A resume takes the latest step, so an earlier step written now would never be read.
        if latest is not None and step < latest:
            raise ValueError(
                f"step is {step}, but {self._directory} already holds step {latest}; "
                "resume from there or give another workdir"
            )
        if not force and (step == latest or step % self._every):
            return False
        _check_json(host_state, "host_state")
        _check_json(score, "score")
        # The save before was written in the background: its failure shows only here.
        earlier = self._settle()
        if step == self.latest_step():
            return False
        if earlier is not None:
            log.warning("%s; step %d is saved instead", earlier, step)
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host_state)
        )
        waits = force or earlier is not None
        # A manager remembers the error of a failed save and its initial list of steps: replace it.
        renews = earlier is not None or step in self._unusable
        failure = self._write_step(step, args, score, waits, renews)
        # The arrays are still at hand, so a retry costs no computation. The default pauses are 2, 4
        # and 8 s (durable.py): enough for a disk that is full for seconds.
        for attempt in range(self._retries):
            if failure is not None:
                seconds = self._backoff_s * 2**attempt
                log.warning("%s; next try in %g s", failure, seconds)
                self._sleep(seconds)
                failure = self._write_step(step, args, score, waits=True, renews=True)
        if failure is None:
            return True
        raise SaveError(
            f"{failure}, {self._retries + 1} tries; {self._save_elsewhere(step, args, score)}"
        ) from failure

    def wait(self) -> None:
        """Wait until the last save is complete on all hosts; SaveError names a failed step."""
        failure = self._settle()
        if failure is not None:
            raise SaveError(str(failure)) from failure

    def latest_step(self) -> int | None:
        """Return the latest step that is finished or being written, or None."""
        steps = [*self._scores, *([self._pending.step] if self._pending else [])]
        return max(steps, default=None)

    def score(self, step: int) -> float | None:
        """Return the score of a finished step, or None."""
        return self._scores.get(step)

    def newest_intact(self) -> int | None:
        """Return the newest step with all files matching their hashes; None without a checkpoint.

        This reads whole checkpoints. Newer steps are logged with their damage, left on disk and
        ignored from now on. If no step is intact, DamagedError names each with its damage, except
        for a single unfinished step, the first save of a run that was killed: that gives None.
        SaveError as `wait`.
        """
        self.wait()
        intact, damages = distributed.broadcast(self._inspect)
        peers.note(saved=intact)
        for step, damage in damages:
            self._scores.pop(step, None)
            self._unusable.add(step)
            log.warning("%s is skipped: %s", self._folder(step), damage)
        # An unfinished step alone is the first save of a run that was killed: no training was saved
        # yet. Any other damage had been a checkpoint, and a silent new start would hide its loss.
        if intact is None and damages:
            [*newer_damages, (_, oldest)] = damages
            if newer_damages or oldest != hashes.UNFINISHED:
                listed = "".join(f"\n  step {step}: {damage}" for step, damage in damages)
                raise DamagedError(
                    f"{self._directory}: no step can be used:{listed}\n"
                    "Put a copy back, or remove the folder to begin anew."
                )
        return intact

    def check_intact(self, step: int) -> None:
        """Read a whole checkpoint.

        Raises DamagedError with the damage, FileNotFoundError if there is no such step, SaveError
        as `wait`.
        """
        self.wait()
        self._require(step)
        if damage := distributed.broadcast(lambda: hashes.damage(self._folder(step))):
            raise DamagedError(f"{self._folder(step)}: cannot be used: {damage}")

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """Read the arrays and the host_state of a saved step.

        `abstract` is the saved tree with jax.ShapeDtypeStruct (or arrays) as leaves. Each leaf's
        `sharding` is its destination, on the mesh it was saved from or any other. MisfitError names
        the tensors that are missing, superfluous, of another shape or dtype, or without a sharding.
        FileNotFoundError if there is no complete checkpoint of that step; SaveError as `wait`.
        """
        self._check_fits(step, abstract, is_part=False)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(abstract_arrays(abstract)),
                host=ocp.args.JsonRestore(),
            ),
        )
        return restored["arrays"], restored["host"]

    def restore_part(self, step: int, abstract: Any) -> Any:
        """Read some arrays of a checkpoint, such as the weights without the optimizer.

        `abstract` has dicts with a part of the saved tree's paths (a dataclass is saved as a dict
        of its fields). Its leaves and the errors are as for `restore`.
        """
        self._check_fits(step, abstract, is_part=True)
        part = abstract_arrays(abstract)
        restore_args = ocp.checkpoint_utils.construct_restore_args(part)
        # Orbax's StandardRestore, which `restore` uses, wants the whole tree.
        with ocp.PyTreeCheckpointer() as reader:
            return reader.restore(
                self._folder(step) / "arrays",
                args=ocp.args.PyTreeRestore(part, restore_args=restore_args, partial_restore=True),
            )

    def _check_fits(self, step: int, abstract: Any, is_part: bool) -> None:
        self.wait()
        self._require(step)
        differences = _differences(self._manager.item_metadata(step)["arrays"], abstract, is_part)
        if differences:
            named = "\n  ".join(differences[:_MOST_NAMED])
            num_unnamed = len(differences) - _MOST_NAMED
            raise MisfitError(
                f"{self._directory}, step {step}: the checkpoint does not fit:\n  {named}"
                + (f"\n  and {num_unnamed} more" if num_unnamed > 0 else ""),
                differences[0],
            )

    def _require(self, step: int) -> None:
        if step not in self._scores:
            raise FileNotFoundError(
                f"{self._directory}: no complete checkpoint of step {step}; "
                f"there are {sorted(self._scores)}"
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_) -> None:
        if kind is None:
            return self.close()
        # This host does not synchronize with other hosts, which may be elsewhere in the program.
        if self._pending is not None:
            concurrent.futures.wait([self._pending.job])
        self._background.shutdown()
        _end(self._manager)

    def close(self) -> None:
        """Wait for the last save and end the background work; raises as `wait`."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            _end(self._manager)

    def _open(self) -> ocp.CheckpointManager:
        # The manager keeps all steps: Orbax's own policies would delete an old step before the
        # hashes of the new step are written.
        # A single host creates folders synchronously: a failure in the background would leave
        # threads that wait minutes for the folder. Several hosts create folders in the background,
        # because otherwise all hosts would wait for a host that failed.
        several = jax.process_count() > 1
        self._barriers = distributed.Barriers()
        async_options = ocp.options.AsyncOptions(
            create_directories_asynchronously=several,
            barrier_sync_fn=self._barriers if several else None,
        )
        return ocp.CheckpointManager(
            self._directory,
            # Lightweight: a step with damaged metadata must not prevent reading other steps.
            options=ocp.CheckpointManagerOptions(
                enable_async_checkpointing=True,
                lightweight_initialize=True,
                async_options=async_options,
            ),
            item_handlers={
                "arrays": ocp.StandardCheckpointHandler(),
                "host": ocp.JsonCheckpointHandler(),
            },
        )

    def _write_step(
        self, step: int, args: Any, score: float | None, waits: bool, renews: bool = False
    ) -> Exception | None:
        """Start writing a step, without retries; return the failure of any host, or None."""
        failure = _together(lambda: self._clear(step)) if renews else None
        failure = failure or _together(lambda: self._begin(step, args, score, renews))
        if failure is not None:
            # Some host failed. This host's own job may still write into the folder, which the next
            # try removes.
            if self._pending is not None:
                concurrent.futures.wait([self._pending.job])
            self._pending = None
            self._unusable.add(step)
            return SaveError(f"{self._folder(step)} could not be saved: {failure}")
        return self._settle() if waits else None

    def _clear(self, step: int) -> None:
        _end(self._manager)
        self._watch.check_folder()
        # One process removes: several would fail on files that another process has just removed.
        if jax.process_index() == 0:
            durable.remove(self._folder(step))

    def _begin(self, step: int, args: Any, score: float | None, renews: bool) -> None:
        self._watch.check_folder()  # Orbax would make the folder again
        if renews:
            self._manager = self._open()
        scores = {**self._scores, step: score}
        # The surplus is only listed here. `_commit` deletes it, after the new step has its hashes:
        # until then an old step may be the only complete one.
        kept_steps = {*sorted(scores)[-self._keep :], _best(scores)}
        surplus = [old for old in scores if old not in kept_steps]
        with self._barriers.announced():
            self._manager.save(step, args=args, force=True)
        job = self._background.submit(self._commit, step, score, surplus)
        self._pending = _Pending(step, score, surplus, job)

    def _commit(self, step: int, score: float | None, surplus: list[int]) -> None:
        """Wait for Orbax (on every host), then finish the step, as a background job."""
        fault_injection.point("saving")
        with self._barriers.announced():
            self._manager.wait_until_finished()
        fault_injection.point("written")
        if jax.process_index() != 0:
            return
        hashes.write_hashes(self._folder(step), score)
        # Each of these folders may be new. A file is lost with a loss of power if the name of any
        # folder above the file is not on disk.
        for folder in (self._directory, self.workdir, self.workdir.parent):
            durable.sync(folder)
        peers.note(saved=step)
        fault_injection.point("saved")
        for old in surplus:
            # Hashes first: a half-deleted folder must not look like a finished step.
            try:
                (self._folder(old) / hashes.FILE).unlink(missing_ok=True)
                self._folder(old).rmtree(missing_ok=True)
            except OSError as error:
                log.warning("%s could not be deleted: %s", self._folder(old), error)

    def _settle(self) -> Exception | None:
        """Wait for the step being written; return the failure of any host, or None."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        failure = _together(lambda: self._finish(pending))
        if failure is not None:
            self._unusable.add(pending.step)
            return SaveError(f"{self._folder(pending.step)} could not be saved: {failure}")
        self._unusable.discard(pending.step)
        self._scores[pending.step] = pending.score
        for old in pending.surplus:
            del self._scores[old]
        return None

    def _finish(self, pending: _Pending) -> None:
        """Wait for a job; end the run if the job outlives a failure elsewhere by lost_seconds."""
        # Orbax waits 5 minutes for a folder that another host could not make. The run ends earlier,
        # within the time that any other lost process gets (distributed.lost_seconds).
        deadline = math.inf
        while not concurrent.futures.wait([pending.job], _POLL_S).done:
            failure = self._barriers.failure()
            if failure and deadline == math.inf:
                deadline = time.monotonic() + distributed.lost_seconds()
            if time.monotonic() > deadline:
                folder = self._folder(pending.step)
                error = SaveError(f"{folder} could not be saved: {failure}")
                log.error("%s", error)
                distributed.leave(1, error)
        pending.job.result()

    def _save_elsewhere(self, step: int, args: Any, score: float | None) -> str:
        """Save a step to a new fallback folder; return a text with its place or the failure."""
        if self._fallback is None:
            return f"no fallback folder is given, the last step saved is {self.latest_step()}"
        name = epath.Path(paths.absolute(self._fallback)) / f"{self.workdir.name}_step{step}"
        try:
            # A new name: an earlier fallback folder may be the only copy of another step.
            workdir = distributed.broadcast(lambda: str(_unused(name)))
            fallback = Checkpoints(workdir)
            failure = fallback._write_step(step, args, score, waits=True)
            fallback.close()
        except (OSError, RuntimeError) as error:
            workdir, failure = str(name), error
        if failure is not None:
            return f"nor to {workdir}: {failure}; the last step saved is {self.latest_step()}"
        missing = distributed.broadcast(lambda: self._copy_run(epath.Path(workdir)))
        return f"{missing}it was saved to {workdir}: go on from there with --workdir={workdir}"

    def _copy_run(self, folder: epath.Path) -> str:
        """Copy RUN_FILES to a fallback folder; return a text that names the missing files."""
        missing = []
        for name in paths.RUN_FILES:
            try:
                durable.copy(self.workdir / name, folder / name)
            except OSError as error:
                with contextlib.suppress(OSError):
                    durable.remove(folder / name)
                missing.append(f"{name} could not be copied ({error}); ")
        with contextlib.suppress(OSError):
            # Episodes grow with every step, so the fallback folder gets only a note on their place.
            if steps := spans(episode_files(self.workdir)):
                place = self.workdir / EPISODES_FOLDER
                missing.append(f"episodes of steps {steps} stay in {place}; ")
        return "".join(missing)

    def _folder(self, step: int) -> epath.Path:
        return self._directory / str(step)

    def _on_disk(self) -> list[int]:
        """Return the steps that have a folder, whatever it contains, newest first."""
        # Other names belong to steps that Orbax has not finished.
        names = [path.name for path in paths.entries(self._directory)]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _inspect(self) -> tuple[int | None, list[tuple[int, str]]]:
        # Newest first, and no further than the first intact step: a check reads the whole
        # checkpoint.
        damages: list[tuple[int, str]] = []
        for step in self._on_disk():
            damage = hashes.damage(self._folder(step))
            if not damage:
                return step, damages
            damages.append((step, damage))
        return None, damages


def abstract_arrays(arrays: Any) -> Any:
    """Replace each array of a tree by its jax.ShapeDtypeStruct, including the sharding."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def _unused(folder: epath.Path) -> epath.Path:
    names = (f"{folder.name}_{number}" for number in itertools.count(2))
    candidates = itertools.chain([folder], (folder.parent / name for name in names))
    return next(path for path in candidates if not path.exists())


def _best(scores: dict[int, float | None]) -> int | None:
    """Return the step of the highest score (the first of equal scores), or None."""
    scored = [(score, -step) for step, score in scores.items() if score is not None]
    return -max(scored)[1] if scored else None


def _end(manager: ocp.CheckpointManager) -> None:
    """Close a manager; suppress its errors, which `_settle` has already reported."""
    with contextlib.suppress(Exception):
        manager.wait_until_finished()
    with contextlib.suppress(Exception):
        manager.close()


def _together(do: Callable[[], None]) -> Exception | None:
    """Run `do` on all hosts; return the failure of any host on all hosts, or None."""
    try:
        distributed.make_together(lambda: do() or [])
    except RuntimeError as error:
        return error
    return None


def _check_json(value: Any, path: str) -> None:
    """Raise TypeError or ValueError, with its path, for a value that JSON would change or drop."""
    # JSON turns tuples into lists and integer keys into strings. A resumed run would then go on
    # with other values than an uninterrupted run.
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path}: key {key!r} is {type(key).__name__}, want str")
            _check_json(item, f"{path}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    # Exact types: numpy.float64 is a float, too, but would come back as another type.
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(
            f"{path} is {type(value).__name__}, want dict, list, str, int, float, bool or None"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} is {value}, want a finite number or None")


def _differences(saved: Any, abstract: Any, is_part: bool) -> list[str]:
    """Return one line for each tensor with different saved and requested forms."""
    # A part may leave tensors out, such as the optimizer's. A whole restore may not: a tensor that
    # nobody wants belongs to another model or optimizer.
    has, wants = _by_path(saved), _by_path(abstract)
    surplus = [] if is_part else [path for path in has if path not in wants]
    lines = [f"{path}: in the checkpoint, not wanted" for path in surplus]
    for path, want in wants.items():
        if path not in has:
            lines.append(f"{path}: wanted, not in the checkpoint")
        elif _form(has[path]) != _form(want):
            lines.append(f"{path}: saved as {_form(has[path])}, wanted as {_form(want)}")
        elif getattr(want, "sharding", None) is None:
            lines.append(f"{path}: no sharding given; each leaf needs its destination")
    return lines


def _by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _form(leaf: Any) -> str:
    """Format dtype and shape as stored (float32[3,4]); a typed PRNG key counts as raw words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
