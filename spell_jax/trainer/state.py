"""The states of a run: first, restored and saved ones, and the weights that a rollout uses.

The names of a run's models: "policy", the algorithm's `model_names`, and the loss's "reference". A
model with a section of the config starts from its own folder. All others start as frozen copies of
the policy.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from spell_jax.config import RunConfig, check_resumed, find_checkpoint, to_dict
from spell_jax.learner import update
from spell_jax.learner.learner import Learner
from spell_jax.policy import lora, transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import safetensors
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import changes
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.files.paths import CHECKPOINTS_FOLDER
from spell_jax.trainer.build import Model, Run
from spell_jax.trainer.misfit import naming_changes

log = logging.getLogger(__name__)

# Weights in the compute dtype by model name, as a rollout looks them up (RolloutWorker.start_step).
Params = Mapping[str, transformer.Params]


@dataclasses.dataclass(frozen=True)
class States:
    """Weights of a run's models after a step, by name, with the optimizers of the trained models.

    An update donates the buffers of the training states and returns new States. Reading `trained`
    of the earlier States is then a RuntimeError, on every device and also after an empty update.

    Attributes:
      frozen: weights of the models that are not trained.
    """

    _trained: dict[str, update.TrainState]
    frozen: Mapping[str, transformer.Params]

    @property
    def trained(self) -> Mapping[str, update.TrainState]:
        """The training states of the trained models, "policy" among them."""
        if not self._trained:
            raise RuntimeError("an update has donated these states; use the States it returned")
        return self._trained

    def donate(self) -> dict[str, update.TrainState]:
        """Take the training states out, for an update that overwrites their buffers."""
        states = dict(self.trained)
        self._trained.clear()
        return states

    def params(self, name: str) -> transformer.Params:
        """Return a model's weights; of a trained model with LoRA, the adapters."""
        return self.frozen[name] if name in self.frozen else self.trained[name].params

    def tree(self) -> dict[str, Any]:
        """Return the tree of a checkpoint: training states and weights, by name."""
        return {**self.trained, **self.frozen}


@dataclasses.dataclass(frozen=True)
class HostState:
    """State of a run besides its States; a checkpoint holds it as JSON.

    Attributes:
      config: fields of the run's config.
      algorithm: Algorithm.state_dict() after the step; None in supervised tuning.
      best: highest score of a validation so far, with weights in best/; None without one.
      metrics: last lines of metrics.jsonl, in case the disk loses them.
      episodes: episodes by step that are not on disk yet.
      workdirs: folders of the run, the newest last.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    algorithm: dict[str, Any] | None = None
    best: float | None = None
    metrics: Sequence[str] = ()
    episodes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workdirs: Sequence[str] = ()

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], place: str, *required: str) -> HostState:
        """Read what `to_json` returned; fields that older versions did not save have defaults.

        ValueError that begins with `place` for an unknown field, or a missing one of `required`.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(saved.keys() - names):
            raise ValueError(f"{place}: host state has {unknown}: is of a later version")
        if missing := [name for name in required if saved.get(name) is None]:
            raise ValueError(f"{place}: host state lacks {missing}: must be a run of train.py")
        return cls(**saved)

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def restore_or_init(run: Run, checkpoints: Checkpoints) -> tuple[States, int, HostState]:
    """Restore the states of the newest intact checkpoint, or make first states; log which.

    Returns (states, steps done, the checkpoint's host state). ValueError if the checkpoint has
    another seed or shape, or a later step than config.steps; other errors as in
    Checkpoints.newest_intact and first_state.
    """
    step = checkpoints.newest_intact()
    if step is None:
        return first_states(run), 0, HostState()
    # The target has shapes and shardings of this mesh, which may differ from the saved run's mesh.
    target: dict[str, Any] = {}
    for name, model in run.own_models.items():
        freeze_base(model.learner, model.folder)
        state = model.learner.fns.abstract_state
        target[name] = state if name in run.trained else state.params
    # Copies of the policy have its shape, but weights of an earlier step: they are saved as well.
    target |= dict.fromkeys(run.copies, target["policy"].params)
    with naming_changes(to_dict(run.config), checkpoints.workdir):
        arrays, saved = checkpoints.restore(step, target)
    host_state = HostState.from_json(saved, f"checkpoint of step {step}", "config", "algorithm")
    check_resumed(run.config, step, host_state.config)
    assert host_state.algorithm is not None
    run.algorithm.load_state_dict(host_state.algorithm)
    log.info("resumed at step %d", step)
    # Fields other than the seed may change between parts of a run. The log keeps a trace.
    for change in changes(to_dict(run.config), host_state.config):
        log.info("%s when it was saved", change)
    return _from_tree(run, arrays), step, host_state


def _from_tree(run: Run, tree: Mapping[str, Any]) -> States:
    trained = {name: tree[name] for name in run.trained}
    return States(trained, {name: tree[name] for name in tree if name not in trained})


def first_states(run: Run) -> States:
    """Make the states before the first step; log how the run can be stopped."""
    c = run.config
    log.info(
        "%d updates of %s%s. Ctrl-C stops the run, and the same command goes on",
        *(c.steps, c.algorithm.name, ", after a held-out evaluation" if c.evaluate else ""),
    )
    tree: dict[str, Any] = {}
    # Only trained models need an optimizer's moments. Of all others the weights alone are kept.
    for name, model in run.own_models.items():
        state = first_state(c, name, model)
        tree[name] = state if name in run.trained else state.params
    copies = {name: copy(tree["policy"].params) for name in run.copies}
    return _from_tree(run, tree | copies)


def first_state(config: RunConfig, name: str, model: Model) -> update.TrainState:
    """Make the state before the first step, with a new optimizer.

    The policy's weights come from config.init_from, if set. All other weights come from the model's
    folder, or are random if it holds only a config and a tokenizer. FileNotFoundError or ValueError
    if the run of init_from does not exist, is damaged, or has another shape.
    """
    learner = model.learner
    # init_from is a run of the policy alone. Other models start from the folder of their section.
    if config.init_from and name == "policy":
        freeze_base(learner, model.folder)
        workdir, step = find_checkpoint(config.init_from)
        with naming_changes(to_dict(config), workdir, resumes=False):
            step, params = read_weights(workdir, model.policy, learner.mesh, step)
        log.info("begins with the weights of %s, step %d (init_from)", workdir, step)
        return learner.fns.init(params)
    if safetensors.has_weights(model.folder):
        log.info("begins with the weights of %s", model.folder)
        return learner.init(load_weights(model.folder, learner))
    log.warning("%s holds no weights: begins with random ones", model.folder)
    return learner.init(jax.random.key(config.seed))


def freeze_base(learner: Learner, folder: pathlib.Path) -> None:
    """Load the weights that LoRA does not train: checkpoints have the adapters only."""
    if learner.policy.lora:
        learner.freeze(load_weights(folder, learner))


def load_weights(folder: pathlib.Path, learner: Learner) -> transformer.Params:
    """Load a policy folder's weights onto the mesh: float32, or as `Learner.frozen` if frozen."""
    # Trained weights need float32: an update of 2e-6 rounds to nothing in bfloat16 (8 bits).
    dtype = learner.compute_dtype.name if learner.policy.lora else "float32"
    return weights.load(folder, learner.mesh, dtype, learner.policy.has_int8_base)[1]


def read_weights(
    workdir: epath.Path, policy: PolicyConfig, mesh: jax.sharding.Mesh, step: int | None = None
) -> tuple[int, transformer.Params]:
    """Read a run's policy: (step, trained float32 weights on the mesh); with LoRA, only adapters.

    The default is the newest intact checkpoint. FileNotFoundError without a checkpoint (of that
    step), ValueError if it has another shape, DamagedError if it (or every checkpoint) is damaged.
    """
    if not (workdir / CHECKPOINTS_FOLDER).is_dir():
        raise FileNotFoundError(f"{workdir / CHECKPOINTS_FOLDER}: not there")
    # Only the weights are restored: the optimizer's moments are twice their size.
    shapes, axes = transformer.abstract_params(policy)
    shape, _ = lora.split(
        policy, meshes.with_sharding(shapes, meshes.shardings(mesh, axes, shapes))
    )
    with Checkpoints(workdir) as checkpoints:
        if step is not None:
            checkpoints.check_intact(step)
        step = checkpoints.newest_intact() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{workdir / CHECKPOINTS_FOLDER}: no complete checkpoint")
        restored = checkpoints.restore_part(step, {"policy": {"params": shape}})
    return step, restored["policy"]["params"]


def save_model(run: Run, name: str, states: States, folder: epath.Path) -> None:
    """Save a trained model as a Hugging Face folder, in the model's compute dtype."""
    model = run.own_models[name]
    policy, params = model.learner.export(states.params(name))
    weights.save(folder, policy, params, model.tokenizer, model.learner.compute_dtype.name)


def copy(params: transformer.Params) -> transformer.Params:
    """Copy weights into new buffers: every update donates the buffers of a training state."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), params)


def renew_copies(run: Run, states: States, step: int) -> States:
    """Replace the frozen copies that the algorithm renews after a step by copies of the policy."""
    due = run.config.algorithm.renewed_copies(step)
    renewed = {name: copy(states.params("policy")) for name in run.copies if name in due}
    return dataclasses.replace(states, frozen={**states.frozen, **renewed})


class SharedParams(Params):
    """Weights in the compute dtype by model name, for a rollout that ends before its update does.

    Each lookup casts anew, so a caller that drops one model's weights before it looks up another's
    needs the memory of one.
    """

    def __init__(self, run: Run, states: States):
        self._run, self._states = run, states

    def __getitem__(self, name: str) -> transformer.Params:
        return self._run.model(name).learner.cast(self._states.params(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._states.tree())

    def __len__(self) -> int:
        return len(self._states.tree())
