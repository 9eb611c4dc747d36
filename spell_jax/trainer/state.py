"""What a run is made of: its parts by its config, and its models fresh, restored, played and saved.

Models are a dict by name. What is trained ("policy", and what the algorithm says) is a training
state, weights and optimizer; all others are weights. Of these some have a section of the config and
a folder of their own, the rest begin as copies of the policy (the algorithm's "reference_reader",
the loss's "reference").
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from spell_jax.algorithms import held_out
from spell_jax.algorithms.base import Algorithm
from spell_jax.algorithms.rollout import RolloutWorker, TextSampler
from spell_jax.learner import loss, non_finite, packing, statistics, update
from spell_jax.policy import lora, safetensors, transformer, weights
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.checkpoint import CHECKPOINTS_FOLDER, Checkpoints
from spell_jax.runtime.config import Config, build, changes, plain
from spell_jax.runtime.timers import Stopwatch
from spell_jax.sampler.engine import Sampler, SamplerConfig
from spell_jax.trainer import build as catalogue

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with weights of its own.

    Attributes:
      policy, tokenizer: its architecture (as the config changes it) and its tokenizer.
      folder: where its first weights are.
      learner: its jitted updates.
    """

    policy: PolicyConfig
    tokenizer: tokenizers.Tokenizer
    folder: pathlib.Path
    learner: update.Learner


@dataclasses.dataclass
class Run:
    """Everything that a run is made of, from its config (no device work but the mesh's).

    Attributes:
      own: the models with weights of their own by name, "policy" first.
      players: the models as an algorithm asks them.
      algorithm: what is played.
      evaluation: held-out evaluation, or None where the data has no held-out questions.
      watch: where the time of its main thread goes.
    """

    config: Config
    own: dict[str, Model]
    players: RolloutWorker
    algorithm: Algorithm
    evaluation: held_out.Evaluation | None
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)

    @property
    def policy(self) -> PolicyConfig:
        return self.own["policy"].policy

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        return self.own["policy"].tokenizer

    @property
    def learner(self) -> update.Learner:
        return self.own["policy"].learner

    @property
    def trained(self) -> dict[str, Model]:
        """Those that learn, the policy first."""
        return {name: self.own[name] for name in ("policy", *self.algorithm.trained)}

    @property
    def copies(self) -> tuple[str, ...]:
        """Names of those that begin as copies of the policy and are not trained."""
        names = (*self.algorithm.models, *(["reference"] if self.learner.loss.kl_weight else []))
        return tuple(name for name in names if name not in self.own)


def make_run(config: Config) -> Run:
    """Checks the whole config and builds the run's parts.

    Raises:
      ValueError, FileNotFoundError: naming the field, its value and what would be right.
    """
    sampling = build(SamplerConfig, config.sampler, "sampler")
    loss_config = build(loss.LossConfig, config.loss, "loss")
    steps = {"total_steps": config.steps}
    updates = {"total_steps": config.steps * config.minibatches}
    optimizer = build(update.OptimizerConfig, config.optimizer, "optimizer", **updates)
    build(update.PackingConfig, config.packing, "packing")
    catalogue.check(config)
    mesh = meshes.make_mesh(config.mesh)
    policy = _make_model(config, "policy", sampling, optimizer, loss_config, mesh)
    algorithm, evaluation = catalogue.make(config, policy.tokenizer, sampling.max_prompt)
    own = {"policy": policy}
    for name in algorithm.models:
        if name in config:
            fields = config[name].optimizer
            optimizer = build(update.OptimizerConfig, fields, f"{name}.optimizer", **steps)
            # What it is trained on is shown to it, with advantage 1.
            own[name] = _make_model(config, name, sampling, optimizer, loss.LossConfig(), mesh)
    text_samplers = {name: _make_text_sampler(model, sampling, mesh) for name, model in own.items()}
    players = RolloutWorker(text_samplers.pop("policy"), jax.random.key(config.seed), text_samplers)
    return Run(config, own, players, algorithm, evaluation)


def _make_model(
    config: Config,
    name: str,
    sampling: SamplerConfig,
    optimizer: update.OptimizerConfig,
    loss_config: loss.LossConfig,
    mesh: jax.sharding.Mesh,
) -> Model:
    """The model that a section of the config describes."""
    folder = catalogue.find_policy(config, name)
    policy, tokenizer = catalogue.read_policy(config, folder, name)
    policy.check_length(sampling.longest)
    learner = update.Learner(
        policy,
        optimizer,
        loss_config,
        build(update.PackingConfig, config.packing, "packing"),
        mesh,
        sampling.temperature,
        config[name].compute_dtype,
    )
    return Model(policy, tokenizer, folder, learner)


def _make_text_sampler(
    model: Model, sampling: SamplerConfig, mesh: jax.sharding.Mesh
) -> TextSampler:
    tokenizer = model.tokenizer
    sampler = Sampler(model.policy, sampling, tokenizer.stop_ids, mesh, tokenizer.stream)
    return TextSampler(sampler, tokenizer)


def host_state(
    run: Run, algorithm: dict[str, Any], best: float | None, metrics: list[str]
) -> dict[str, Any]:
    """What a checkpoint holds besides arrays; all keys and draws follow from seed and step.

    Args:
      run: of which the config is kept.
      algorithm: its state_dict.
      best: the best score by validation so far.
      metrics: the last lines of metrics.jsonl.
    """
    return {"config": plain(run.config), "algorithm": algorithm, "best": best, "metrics": metrics}


# ------------------------------------------------------------------------------------------- Start


def begin(
    run: Run, checkpoints: Checkpoints
) -> tuple[dict[str, Any], int, float | None, list[str]]:
    """The state by model name, the steps done, the best score and the last lines of metrics: of the
    newest intact checkpoint; if there is none, a fresh state of `first_state`. The log says which.

    Raises:
      ValueError: the checkpoint is of another seed or shape, or of a later step than the last.
      DamagedError, FileNotFoundError: as Checkpoints.newest_intact and `first_state`.
    """
    step = checkpoints.newest_intact()
    if step is None:
        return first_models(run), 0, None, []
    target: dict[str, Any] = {}
    for name, model in run.own.items():
        if model.policy.lora:  # the checkpoint has the adapters only
            model.learner.freeze(load_weights(model))
        state = model.learner.abstract_state()
        target[name] = state if name in run.trained else state.params
    target |= dict.fromkeys(run.copies, target["policy"].params)
    models, saved = checkpoints.restore(step, target)
    check_resumed(run.config, step, saved["config"])
    run.algorithm.load_state_dict(saved["algorithm"])
    log.info("resumed at step %d", step)
    for change in changes(run.config, saved["config"]):
        log.info("%s when it was saved", change)
    return models, step, saved["best"], saved["metrics"]


def check_resumed(config: Config, step: int, saved: Mapping[str, Any]) -> None:
    """Whether a run that has done so many steps may go on with a config.

    Args:
      saved: the config that it had, as settings.plain.

    Raises:
      ValueError: it has more steps than the config, or another seed.
    """
    if step > config.steps:
        raise ValueError(f"steps = {config.steps}: must be at least {step}, which are done")
    if saved.get("seed", config.seed) != config.seed:
        raise ValueError(
            f"seed = {config.seed}: must be {saved['seed']}, with which this run began"
        )


def first_models(run: Run) -> dict[str, Any]:
    """All models as they begin (`first_state`)."""
    models: dict[str, Any] = {}
    for name, model in run.own.items():
        state = first_state(run.config, name, model)
        models[name] = state if name in run.trained else state.params
    return models | {name: copy(models["policy"].params) for name in run.copies}


def first_state(config: Config, name: str, model: Model) -> update.TrainState:
    """A new optimizer and, in this order: for the policy, the weights of config.init_from, another
    run; those of the model's folder; random ones by the seed, where that holds a config and a
    tokenizer alone.

    Raises:
      FileNotFoundError, ValueError: there is no such run, it is damaged or of another shape.
    """
    learner = model.learner
    if config.init_from and name == "policy":
        if model.policy.lora:
            learner.freeze(load_weights(model))
        workdir, step = catalogue.find_checkpoint(config.init_from)
        step, params = read_weights(workdir, model.policy, learner.mesh, step)
        log.info("begins with the weights of %s, step %d (init_from)", workdir, step)
        return learner.start(params)
    if safetensors.has_weights(model.folder):
        log.info("begins with the weights of %s", model.folder)
        return learner.init(load_weights(model))
    log.warning("%s holds no weights: begins with random ones", model.folder)
    return learner.init(jax.random.key(config.seed))


def load_weights(model: Model) -> transformer.Params:
    """The weights of the model's folder, on the mesh; what is not trained needs no masters."""
    dtype = model.learner.compute_dtype.name if model.policy.lora else "float32"
    return weights.load(model.folder, model.learner.mesh, dtype)[1]


def read_weights(
    workdir: epath.Path, policy: PolicyConfig, mesh: jax.sharding.Mesh, step: int | None = None
) -> tuple[int, transformer.Params]:
    """What a run has trained: (step, float32 weights on the mesh); of a policy with adapters those
    alone.

    Args:
      workdir: of the run.
      policy: its architecture.
      step: one of its checkpoints; None: the newest that is intact.

    Raises:
      FileNotFoundError: the run has no checkpoint (of that step).
      ValueError: it is of another shape.
      DamagedError: none is intact.
    """
    if not (workdir / CHECKPOINTS_FOLDER).is_dir():
        raise FileNotFoundError(f"{workdir / CHECKPOINTS_FOLDER}: not there")
    shapes, axes = transformer.abstract_params(policy)
    wanted, _ = lora.split(
        policy, meshes.with_sharding(shapes, meshes.shardings(mesh, axes, shapes))
    )
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.newest_intact() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{workdir / CHECKPOINTS_FOLDER}: no complete checkpoint")
        found = checkpoints.restore_part(step, {"policy": {"params": wanted}})
    return step, found["policy"]["params"]


# --------------------------------------------------------------------------------- During the run


def save_model(run: Run, models: dict[str, Any], name: str, folder: epath.Path) -> None:
    """A trained model as a Hugging Face folder in the dtype that it is played with."""
    model = run.own[name]
    policy, params = model.learner.export(models[name].params)
    weights.save(folder, policy, params, model.tokenizer, model.learner.compute_dtype.name)


def copy(params: transformer.Params) -> transformer.Params:
    """Buffers of its own: those of the training state are donated at every update."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), params)


class RolloutParams(Mapping[str, transformer.Params]):
    """Weights in the compute dtype by model name. They are made when they are looked up: who lets
    go of one model's before another's has the memory of one."""

    def __init__(self, run: Run, models: Mapping[str, Any]):
        self._run, self._models = run, dict(models)

    def __getitem__(self, name: str) -> transformer.Params:
        learner = self._run.own.get(name, self._run.own["policy"]).learner
        model = self._models[name]
        return learner.cast(model.params if name in self._run.trained else model)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


class StepUpdate:
    """What a step's rows teach: the policy, in config.minibatches parts one after the other, then
    the other models that learn.

    Attributes:
      difference: (sum, weight) by name of how far the sampler's logprobs are from recomputed ones;
        an update that uses the sampler's own reports it by itself.
    """

    def __init__(self, run: Run, models: dict[str, Any], rows: Sequence[packing.Group]):
        """Begins the first part. `models` is changed by `finish`."""
        self._run, self._models = run, models
        of_model = {name: [group for group in rows if group.model == name] for name in run.trained}
        own = of_model.pop("policy")
        self.difference: Mapping[str, tuple[float, float]] = {}
        if run.learner.loss.old_logprobs == "recompute":
            sampled, own = own, run.learner.recompute(models["policy"], own)
            self.difference = statistics.sampler_difference(sampled, own)
        self._parts = {"policy": packing.in_parts(own, run.config.minibatches) or [[]]}
        self._parts |= {name: packing.in_parts(groups, 1) for name, groups in of_model.items()}
        self._begun: update.Update | None = self._begin("policy", self._parts["policy"][0])

    def _begin(self, name: str, part: Sequence[packing.Group]) -> update.Update:
        reference = self._models.get("reference") if name == "policy" else None
        return self._run.own[name].learner.begin(self._models[name], part, reference)

    def go_on(self) -> None:
        """Gives the device a micro-batch of the first part, if one is left (Update.go_on)."""
        if self._begun:
            self._begun.go_on()

    def finish(self, workdir: epath.Path, step: int) -> dict[str, list[dict[str, float]]]:
        """All updates to their end; by model the numbers of each of its updates.

        A model that nothing is learned from has none, the policy those of an empty update.

        Raises:
          NonFinite: see Update.finish; the rows are below the workdir, under the step.
        """
        found: dict[str, list[dict[str, float]]] = {}
        for name, parts in self._parts.items():
            decode = self._run.own[name].tokenizer.decode
            with non_finite.rows_written(workdir, step, decode):
                for part in parts:
                    begun, self._begun = self._begun or self._begin(name, part), None
                    self._models[name], numbers = begun.finish()
                    found.setdefault(name, []).append(numbers)
        return found


def refresh_reference_reader(config: Config, models: dict[str, Any], step: int) -> None:
    """Renews the frozen copy every config.algorithm.reader_refresh steps (0 or none: never)."""
    every = config.algorithm.get("reader_refresh", 0)
    if "reference_reader" in models and every and step % every == 0:
        models["reference_reader"] = copy(models["policy"].params)
