"""Checkpoints: everything needed to go on, whole or not at all.

1. A checkpoint is a pytree of arrays (weights and optimiser state by model name) and a JSON-able
   dict (seed of all keys, data position, question memory, best score).
2. `save` writes both under WORKDIR/checkpoints/STEP; Orbax marks the folder as complete last, so a
   save that was killed in the middle is never taken for a checkpoint.
3. `restore` takes the shapes, dtypes and shardings that the program wants now. They are compared
   with what was saved before anything is read; the mesh may be another one.
"""

import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

CHECKPOINTS_FOLDER = "checkpoints"
_MOST_NAMED = 10


class Checkpoints:
    """The checkpoints of one run; every process of it makes and calls one, with equal arguments.

    Saving waits until the files are whole, so the arrays may be donated right after.

    Args:
      workdir: the run's folder.
      keep: how many checkpoints stay, the latest ones; >= 1.
      every: `save` writes at the steps that this divides; >= 1.

    Raises:
      ValueError: keep or every is below 1.

    Source: design.md section 3.11.
    """

    def __init__(self, workdir: str | os.PathLike[str], keep: int = 2, every: int = 1) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value < 1:
                raise ValueError(f"{name} is {value}, want at least 1")
        self._every = every
        self._manager = ocp.CheckpointManager(
            Path(workdir).absolute() / CHECKPOINTS_FOLDER,
            # Synchronous: a background copy of donated buffers would have to be waited for anyway,
            # and a step that is reported as saved is saved.
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=False
            ),
            item_handlers={
                "arrays": ocp.StandardCheckpointHandler(),
                "host": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, arrays: Any, host_state: dict[str, Any], force: bool = False) -> bool:
        """Saves if `every` divides the step or `force` is set, and the step is not there yet.

        Args:
          step: updates done, >= 0.
          arrays: pytree of jax arrays, any shapes, dtypes and shardings.
          host_state: what JSON gives back unchanged: dicts with string keys, lists, strings, finite
            numbers, booleans, None.
          force: save whatever the step, as at the end of a run.

        Returns:
          Whether a checkpoint was written.

        Raises:
          TypeError, ValueError: something in host_state would not come back; names its path.
          ValueError: there is a later checkpoint, which the next resume would prefer.
        """
        latest = self.latest_step()
        if latest is not None and step < latest:
            raise ValueError(
                f"step is {step}, but {self._manager.directory} already holds step {latest}; "
                "resume from there or give another workdir"
            )
        if step == latest or (step % self._every and not force):
            return False
        _check_json(host_state, "host_state")
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host_state)
        )
        return self._manager.save(step, args=args, force=True)

    def latest_step(self) -> int | None:
        """The step of the latest complete checkpoint, or None."""
        return self._manager.latest_step()

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """Reads the checkpoint of a step.

        Args:
          step: one that was saved, such as `latest_step()`.
          abstract: the saved tree with jax.ShapeDtypeStruct (or arrays) as leaves; each
            leaf's `sharding` says where it goes, on the mesh it was saved from or any other.

        Returns:
          (arrays, host_state).

        Raises:
          FileNotFoundError: there is no complete checkpoint of that step.
          ValueError: tensors are missing, left over, of another shape or dtype, or want a sharding;
            names their paths.
        """
        self._check(step, abstract, whole=True)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(abstract_arrays(abstract)),
                host=ocp.args.JsonRestore(),
            ),
        )
        return restored["arrays"], restored["host"]

    def restore_part(self, step: int, abstract: Any) -> Any:
        """Reads some of a checkpoint's arrays, such as the weights without the optimiser.

        Args:
          step: one that was saved.
          abstract: dicts with a part of the saved tree's paths, as for `restore`; a dataclass was
            saved as a dict of its fields.

        Returns:
          That part.

        Raises:
          FileNotFoundError, ValueError: as `restore`, for the part that is asked for.
        """
        self._check(step, abstract, whole=False)
        part = abstract_arrays(abstract)
        restore_args = ocp.checkpoint_utils.construct_restore_args(part)
        with ocp.PyTreeCheckpointer() as reader:
            return reader.restore(
                self._manager.directory / str(step) / "arrays",
                args=ocp.args.PyTreeRestore(part, restore_args=restore_args, partial_restore=True),
            )

    def _check(self, step: int, abstract: Any, whole: bool) -> None:
        """Raises the errors of `restore`; arrays that are not wanted are one if `whole`."""
        if step not in self._manager.all_steps():
            raise FileNotFoundError(
                f"{self._manager.directory}: no complete checkpoint of step {step}; "
                f"there are {sorted(self._manager.all_steps())}"
            )
        differences = _differences(self._manager.item_metadata(step)["arrays"], abstract, whole)
        if differences:
            named = "\n  ".join(differences[:_MOST_NAMED])
            more = len(differences) - _MOST_NAMED
            raise ValueError(
                f"{self._manager.directory}, step {step}: the checkpoint does not fit:\n  {named}"
                + (f"\n  and {more} more" if more > 0 else "")
            )

    def close(self) -> None:
        """Ends the manager's background work."""
        self._manager.close()


def abstract_arrays(arrays: Any) -> Any:
    """The tree with each array replaced by its jax.ShapeDtypeStruct, sharding included."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def _check_json(value: Any, path: str) -> None:
    """Refuses what JSON would change or drop: a resumed run has to see the very same values."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path}: key {key!r} is {type(key).__name__}, want str")
            _check_json(item, f"{path}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(
            f"{path} is {type(value).__name__}, want dict, list, str, int, float, bool or None"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} is {value}, want a finite number or None")


def _differences(saved: Any, abstract: Any, whole: bool) -> list[str]:
    """One line for each tensor of which saved and wanted form differ."""
    has, wants = _by_path(saved), _by_path(abstract)
    left = [path for path in has if path not in wants] if whole else []
    lines = [f"{path}: in the checkpoint, not wanted" for path in left]
    for path, want in wants.items():
        if path not in has:
            lines.append(f"{path}: wanted, not in the checkpoint")
        elif _form(has[path]) != _form(want):
            lines.append(f"{path}: saved as {_form(has[path])}, wanted as {_form(want)}")
        elif getattr(want, "sharding", None) is None:
            lines.append(f"{path}: no sharding given, want one that says where it goes")
    return lines


def _by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _form(leaf: Any) -> str:
    """Dtype and shape as stored, such as float32[3,4]; a typed random key is its raw words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
