"""A run's config: one dataclass for each section, and the checks between sections.

`default_config` makes a locked ConfigDict of default values from the dataclasses. A config file
(configs/) changes a few fields, flags (--config.sampler.page_size=256) a few more; until then no
file is read. `read` makes a RunConfig from the ConfigDict and reports all mistakes that can be
found without a device and without reading a file.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
from etils import epath

from spell_jax.algorithms import registry
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.config import DataConfig
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import PackingConfig
from spell_jax.policy.choices import DTYPES
from spell_jax.policy.config import PolicyConfig, RopeConfig
from spell_jax.policy.model import ModelConfig
from spell_jax.policy.products import resolve_dtype
from spell_jax.runtime import hooks, setup
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import (
    MOVED_FIELDS,
    Config,
    ConfigError,
    build,
    check_choice,
    check_least,
    collect,
    describe_move,
    flat,
    naming,
    plain,
    section,
)
from spell_jax.runtime.files import paths
from spell_jax.runtime.files.paths import CHECKPOINTS_FOLDER
from spell_jax.runtime.hosts import distributed
from spell_jax.runtime.log import loggers
from spell_jax.sampler.config import SamplerConfig

T = TypeVar("T")
C = TypeVar("C", "RunConfig", "SupervisedConfig")
M = TypeVar("M", bound=ModelConfig)
log = logging.getLogger(__name__)

TRANSFERS = ("overlapped", "in_place")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 (on one axis) takes all devices that are left.

    Attributes:
      data: data parallelism; weights are replicated over it.
      fsdp: data parallelism with sharded weights and optimizer state.
      context: shards of the tokens of a row (ring or all-gather attention).
      tensor: shards of heads and feed-forward width.
      expert: shards of the experts of a mixture.
    """

    SECTION: ClassVar[str] = "mesh"

    data: int = 1
    fsdp: int = -1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self):
        meshes.check_sizes(self.axes)

    @property
    def axes(self) -> dict[str, int]:
        """Number of devices along each of mesh.AXES."""
        return {axis: getattr(self, axis) for axis in meshes.AXES}

    def make(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """Make the mesh of training; ValueError if it cannot be laid out on the devices.

        `devices` (jax.Device) are by default all devices.
        """
        return meshes.make_mesh(self.axes, devices)


@dataclasses.dataclass(frozen=True)
class RunMeshConfig(MeshConfig):
    """Devices along each axis of the training mesh, and the devices that only sample.

    Attributes:
      rollout_devices: devices of each host that sample while its other devices train; 0: all
        devices do both, in turn. Above 0, `staleness` must be at least 1, and the axes above are of
        the training devices.
      rollout: devices along each axis of the sampling mesh, if rollout_devices is above 0.
      transfer: way of new weights to the sampling devices. "overlapped": into new buffers, while
        the old weights still sample. "in_place": over the old weights, in pieces, between two
        rollouts; the sampling devices then hold the policy once. Needs staleness = 1.
    """

    rollout_devices: int = 0
    rollout: MeshConfig = MeshConfig()
    transfer: str = "overlapped"

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "mesh.", rollout_devices=0)
        check_choice(self, "mesh.", transfer=TRANSFERS)

    def make(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        if not self.rollout_devices:
            return super().make(devices)
        training, _ = meshes.split_devices(self.rollout_devices, devices)
        return meshes.make_part_mesh(self.axes, training)

    def make_sampling(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """Make the mesh of sampling, which is the mesh of training without rollout_devices."""
        if not self.rollout_devices:
            return self.make(devices)
        _, sampling = meshes.split_devices(self.rollout_devices, devices)
        return meshes.make_part_mesh(self.rollout.axes, sampling, "mesh.rollout")


@dataclasses.dataclass(frozen=True)
class ExtraModelConfig(ModelConfig):
    """A model of an algorithm besides the policy, which may be trained with its own optimizer.

    Attributes:
      epochs: passes over the training groups that a step has for this model.
      groups_per_update: most groups of one optimizer update; 0: all groups of a pass. Updates of a
        pass differ in size by at most one group, and every pass has another order.
      optimizer: optimizer and its schedule, which must be "constant" with several updates per step,
        because their number is not known before the run.
    """

    epochs: int = 1
    groups_per_update: int = 0
    optimizer: OptimizerConfig = OptimizerConfig()

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "policy.", epochs=1, groups_per_update=0)
        # A decaying schedule needs the number of updates, which here depends on the groups of a
        # step.
        several = self.epochs > 1 or self.groups_per_update
        if several and self.optimizer.schedule != "constant":
            raise ValueError(
                f"policy.optimizer.schedule = {self.optimizer.schedule!r}: must be 'constant' if "
                "policy.epochs is above 1 or policy.groups_per_update is not 0"
            )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run (spell_jax.train). configs/paper.py has the paper's values.

    Attributes:
      seed: seed of all random numbers, at least 0.
      steps: steps of the run, each a rollout and its update; the paper's runs have about 70.
      validate_every: steps between held-out validations; 0: never.
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: newest checkpoints that are kept, besides the best.
      profile_steps: steps of which a profiler trace is written, for example (3, 4).
      wandb: Weights & Biases project that also gets the metrics (extra "wandb"); "": none.
      episode_characters: most characters of a step's episode file before compression; prompts and
        answers come first, then documents. 0: no files.
      evaluate: whether a full held-out evaluation runs before and after the run.
      max_minutes: minutes of rollouts and updates after which the run ends; 0: no limit. The only
        field that depends on the clock: a resumed run gets as many minutes again.
      preemption_limit_s: seconds after the first SIGTERM for a run to finish its phase and save.
      staleness: number K of updates that a rollout's weights lack: step t is sampled from the
        weights after step t - 1 - K, or after the last checkpoint if that is later. 0: each rollout
        waits for the update before it. 1: a rollout runs during the update of the step before.
        Above 1 it needs mesh.rollout_devices. Above 0, loss.old_logprobs must be "auto" or
        "rollout", or loss.tis_cap above 0.
      minibatches: optimizer updates that a step's groups are split into. Above 1 it needs
        loss.old_logprobs = "recompute" or "rollout" (or "reference", for preferences), or
        loss.tis_cap above 0.
      init_from: folder of another run, or RUN/checkpoints/STEP, to take the first weights from;
        ignored where there is a checkpoint to resume.
      policy: the policy's folder, dtype, kernels, adapters.
      data: documents or questions.
      algorithm: the algorithm's hyper-parameters.
      sampler: sampling parameters and compiled shapes.
      optimizer: optimizer and its schedule.
      loss: the policy-gradient loss.
      packing: shapes of micro-batches.
      mesh: devices along each mesh axis.
      models: models besides the policy, by name: every other section with a `folder`.
    """

    seed: int = 0
    steps: int = 70
    validate_every: int = 10
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    profile_steps: tuple[int, ...] = ()
    wandb: str = ""
    episode_characters: int = 20_000_000
    evaluate: bool = False
    max_minutes: float = 0.0
    preemption_limit_s: float = 25.0
    staleness: int = 0
    minibatches: int = 1
    init_from: str = ""
    policy: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = SpellConfig()
    sampler: SamplerConfig = SamplerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    packing: PackingConfig = PackingConfig()
    mesh: RunMeshConfig = RunMeshConfig()
    models: Mapping[str, ExtraModelConfig] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_least(self, "", seed=0, steps=1, validate_every=0, checkpoint_every=1)
        check_least(self, "", keep_checkpoints=1, minibatches=1, episode_characters=0)
        check_least(self, "", max_minutes=0, staleness=0)
        # Steps count from 1: step 0 is the state before the first update.
        if not all(step >= 1 for step in self.profile_steps):
            raise ValueError(f"profile_steps = {self.profile_steps}: must be steps from 1 on")

    def check_sources(self) -> None:
        """Raise an error of the field if a package, a run or data that it names is not there."""
        loggers.check_wandb(self.wandb)
        if self.init_from:
            find_checkpoint(self.init_from)
        registry.check_inputs(self.algorithm, self.data)
        self.data.check()

    def conflicts(self) -> Iterator[str]:
        """Yield a message for each field that does not fit another field."""
        loss = self.loss
        if self.staleness and not loss.uses_rollout_logprobs:
            yield (
                f'loss.old_logprobs = "{loss.old_logprobs}": must be "rollout", or loss.tis_cap '
                f"above 0, for staleness = {self.staleness}: answers are sampled from older weights"
            )
        elif self.minibatches > 1 and loss.is_on_policy and not loss.tis_cap:
            yield (
                'loss.old_logprobs = "on_policy": must be "recompute" or "rollout", or '
                f"loss.tis_cap above 0, for minibatches = {self.minibatches}: only the first is "
                "on-policy"
            )
        yield from self._staleness_conflicts()
        yield from self.algorithm.conflicts(self.sampler, loss)
        yield from registry.objective_conflicts(self.algorithm, loss)
        if loss.is_paired and self.packing.shared_prefix == "none":
            yield (
                "packing.shared_prefix = 'none': must be another for loss.objective = 'dpo', which "
                "compares the two answers of a row"
            )

    def _staleness_conflicts(self) -> Iterator[str]:
        mesh, staleness = self.mesh, self.staleness
        if mesh.rollout_devices and not staleness:
            yield (
                f"staleness = 0: must be at least 1 for mesh.rollout_devices = "
                f"{mesh.rollout_devices}, or one mesh would always wait for the other"
            )
        if not mesh.rollout_devices and staleness > 1:
            yield (
                f"staleness = {staleness}: must be 0 or 1 without mesh.rollout_devices: devices "
                "that also train make one rollout during an update"
            )
        if not mesh.rollout_devices and staleness and self.minibatches > 1:
            yield (
                f"staleness = {staleness}: must be 0 for minibatches = {self.minibatches} without "
                "mesh.rollout_devices"
            )
        if not mesh.rollout_devices and mesh != dataclasses.replace(RunMeshConfig(), **mesh.axes):
            yield "mesh.rollout_devices = 0: must be above 0 for mesh.rollout and mesh.transfer"
        if mesh.transfer == "in_place" and staleness > 1:
            yield (
                f"staleness = {staleness}: must be 1 for mesh.transfer = 'in_place', with which "
                "the sampling devices hold one set of weights"
            )


@dataclasses.dataclass(frozen=True)
class InitialPolicyConfig(ModelConfig):
    """The policy that supervised tuning starts from: a folder's policy, or random weights.

    Without a folder, the sizes below describe a policy with random weights.

    Attributes:
      tokenizer: folder with tokenizer.model, or its URL, for random weights; "": it is trained on
        the rows.
      vocab_size: size of the trained tokenizer's vocabulary V.
      width: model width D, as all that follow of random weights (see PolicyConfig).
      layers: number of blocks L.
      heads: query heads N.
      kv_heads: key/value heads K.
      head_size: size of one head H.
      feed_forward: hidden width F.
      rope: rotary position embedding; in short rows a small theta turns more of the angles.
      max_positions: longest context in tokens.
    """

    compute_dtype: str = "float32"
    remat: str = "none"
    tokenizer: str = ""
    vocab_size: int = 896
    width: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    feed_forward: int = 384
    rope: RopeConfig = RopeConfig(theta=100.0)
    max_positions: int = 1024

    def __post_init__(self):
        super().__post_init__()
        if self.lora_rank and not self.folder:
            raise ValueError(
                f"policy.lora_rank = {self.lora_rank}: needs policy.folder, the weights to adapt"
            )

    def architecture(self, vocab_size: int) -> PolicyConfig:
        heads = (self.heads, self.kv_heads, self.head_size)
        sizes = (vocab_size, self.width, self.layers, *heads, self.feed_forward)
        return PolicyConfig(*sizes, self.rope, self.max_positions)


@dataclasses.dataclass(frozen=True)
class SupervisedConfig:
    """Everything that determines supervised tuning (spell_jax.sft).

    Attributes:
      seed: seed of rows and random weights, at least 0.
      steps: updates of the run.
      epochs: passes over the rows of a file, from which `steps` follows; 0: `steps` says.
      rows_per_step: rows that an update is trained on.
      log_every: steps between lines of metrics.
      checkpoint_every: steps between checkpoints.
      preemption_limit_s: as in RunConfig, like `wandb`.
      wandb: Weights & Biases project that also gets the metrics; "": none.
      source: .jsonl (or its URL) of rows, in a layout of spell_jax.sft; generated rows ("tiny",
        "tiny_stories"); or `MODULE:FUNCTION`, your own (MakeRows in question_sets/tuning_rows.py).
      prompts: set of prompt templates of generated demonstrations.
      policy: the policy to start from.
      optimizer: optimizer and its schedule.
      packing: shapes of micro-batches.
      mesh: devices along each mesh axis.
    """

    seed: int = 0
    steps: int = 1000
    epochs: float = 0.0
    rows_per_step: int = 48
    log_every: int = 50
    checkpoint_every: int = 250
    preemption_limit_s: float = 25.0
    wandb: str = ""
    source: str = "tiny"
    prompts: str = "compact"
    policy: InitialPolicyConfig = InitialPolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    packing: PackingConfig = PackingConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        minima = dict.fromkeys(("steps", "rows_per_step", "log_every", "checkpoint_every"), 1)
        check_least(self, "", seed=0, epochs=0, **minima)

    def check_sources(self) -> None:
        """Raise ValueError if `source` names a function that cannot be imported."""
        if hooks.is_hook(self.source):
            hooks.load("source", self.source)


def default_config(algorithm: str = "spell") -> Config:
    """Return the defaults as a ConfigDict, with the fields of a registered algorithm."""
    # Sections of extra models stand beside the other sections, under the model's name, so that
    # flags reach their fields.
    config = section(RunConfig)
    del config.models
    config.algorithm = section(registry.ALGORITHMS[algorithm].config)
    return config.lock()


def change_algorithm(config: Config, algorithm: str) -> None:
    """Give a config another algorithm; fields that both algorithms have keep their values.

    ValueError if there is no such algorithm.
    """
    if algorithm not in registry.ALGORITHMS:
        raise ValueError(f"{algorithm}: must be one of {', '.join(registry.ALGORITHMS)}")
    values = dict(flat(config.algorithm.to_dict())) | {"name": algorithm}
    config.algorithm = default_config(algorithm).algorithm
    present = dict(flat(config.algorithm.to_dict()))
    config.algorithm.update_from_flattened_dict(
        {field: value for field, value in values.items() if field in present}
    )


def default_supervised_config() -> Config:
    """Return the defaults of supervised tuning as a ConfigDict, for configs and flags to change."""
    return section(SupervisedConfig).lock()


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Convert the config to nested dicts of JSON values, with its models as separate sections."""
    sections = section(config)
    del sections.models
    sections.update({name: section(model) for name, model in config.models.items()})
    return plain(sections)


def extra_model() -> Config:
    """Return the section of an extra model; a config file adds it under the model's name."""
    return section(ExtraModelConfig)


def read(config: Config) -> RunConfig:
    """Build the RunConfig of a ConfigDict; ConfigError lists all its mistakes.

    A RunConfig is returned unchanged.
    """
    return config if isinstance(config, RunConfig) else _complete(*collect_mistakes(config))


def collect_mistakes(config: Config) -> tuple[RunConfig | None, dict[str, str]]:
    """Build the RunConfig of a ConfigDict with stand-ins for wrong fields; see runtime.config.

    Returns the RunConfig (None if not even stand-ins help), and the message of each mistake by the
    dotted name of its field.
    """
    if not hasattr(config.get("algorithm"), "items"):
        message = (
            "algorithm: is missing, or no section; a config of spell_jax.train must have it "
            "(spell_jax.sft reads the config of a warm start)"
        )
        return None, {"algorithm": message}
    fields = config.to_dict()
    return collect(_build_run, fields, _stand_ins(fields), RunConfig.conflicts)


def read_supervised(config: Config) -> SupervisedConfig:
    """Build the SupervisedConfig of a ConfigDict; errors as in `read`."""
    if "rows_per_step" not in config:
        raise ValueError(
            "rows_per_step: is missing; a config of spell_jax.sft must have it (spell_jax.train "
            "reads the config of a run with an algorithm)"
        )
    stand_ins = default_supervised_config().to_dict()
    return _complete(*collect(_build_supervised, config.to_dict(), stand_ins))


def _complete(config: T | None, mistakes: Mapping[str, str]) -> T:
    if config is None or mistakes:
        raise ConfigError(mistakes.values())
    return config


def _stand_ins(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return valid values for all fields of a run's config."""
    name = fields["algorithm"].get("name")
    name = name if name in registry.ALGORITHMS else "spell"
    # An unknown algorithm is a mistake of its own. The defaults of SPELL let the checks go on.
    stand_ins = default_config(name).to_dict()
    stand_ins |= {model: extra_model().to_dict() for model in _extra_models(fields)}
    # Any folder and any file: the defaults name no data.
    stand_ins["data"]["source"] = "."
    if "clusters" not in registry.ALGORITHMS[name].inputs:
        stand_ins["data"]["questions"] = __file__
    return stand_ins


def _build_run(fields: Mapping[str, Any]) -> RunConfig:
    steps, extra_models = _product(fields, "steps"), _extra_models(fields)
    models = {name: _build(ExtraModelConfig, fields[name], name, steps) for name in extra_models}
    parts = {"algorithm": registry.read_algorithm(fields["algorithm"]), "models": models}
    sections = {
        name: value
        for name, value in fields.items()
        if name != "algorithm" and name not in extra_models
    }
    # Schedules count optimizer updates: each step has `minibatches` of them.
    updates = _product(fields, "steps", "minibatches")
    config = _build(RunConfig, sections, "", updates, **parts)
    config.check_sources()
    return dataclasses.replace(config, loss=config.loss.settled(bool(config.staleness)))


def _build_supervised(fields: Mapping[str, Any]) -> SupervisedConfig:
    config = _build(SupervisedConfig, fields, "", _product(fields, "steps"))
    config.check_sources()
    return config


def _product(fields: Mapping[str, Any], *names: str) -> int:
    """Multiply these fields, 1 where missing; ValueError for a field that is no whole number."""
    # `build` would say the same, but it checks the optimizer first, which needs the product.
    values = {name: fields.get(name, 1) for name in names}
    for name, value in values.items():
        if not isinstance(value, int):
            raise ValueError(f"{name} = {value!r}: must be int")
    return math.prod(values.values())


def _build(cls: type[T], fields: Mapping[str, Any], where: str, updates: int, **parts: Any) -> T:
    """Make a dataclass of a section with an optimizer, which takes `updates` updates."""
    sections, name = dict(fields), f"{where}.optimizer".lstrip(".")
    optimizer = build(OptimizerConfig, sections.pop("optimizer", {}), name, total_steps=updates)
    return build(cls, sections, where, optimizer=optimizer, **parts)


def settle_dtypes(config: C, workdir: epath.Path) -> C:
    """Replace each compute_dtype "auto" by the dtype of the workdir's run, or else of the mesh.

    A resumed run keeps the dtype with which it began, also on a machine with another "auto".
    """
    # Process 0 reads the saved config for all: hosts with different dtypes would compile different
    # programs, and wait for each other forever.
    mesh = config.mesh.make()
    saved = distributed.broadcast(functools.partial(setup.saved_config, workdir))
    return keep_dtypes(config, saved, functools.partial(resolve_dtype, "auto", mesh))


def keep_dtypes(
    config: C, saved: Mapping[str, Any], default: Callable[[], str] = lambda: "auto"
) -> C:
    """Replace each compute_dtype "auto" by the dtype in the saved config, else by `default`()."""

    def settle(name: str, model: M) -> M:
        if model.compute_dtype != "auto":
            return model
        fields = saved.get(name)
        dtype = fields.get("compute_dtype") if isinstance(fields, dict) else None
        # An older or damaged config must not end the run: the mesh decides then.
        if dtype not in DTYPES:
            return dataclasses.replace(model, compute_dtype=default())
        log.info("%s.compute_dtype = 'auto': %s, with which the run began", name, dtype)
        return dataclasses.replace(model, compute_dtype=dtype)

    config = dataclasses.replace(config, policy=settle("policy", config.policy))
    if not isinstance(config, RunConfig):
        return config
    models = {name: settle(name, model) for name, model in config.models.items()}
    return dataclasses.replace(config, models=models)


def check_resumed(config: RunConfig | Config, step: int, saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint has more steps, or another seed, algorithm or version."""
    if step > config.steps:
        raise ValueError(f"steps = {config.steps}: must be at least {step}, which are done")
    fields = to_dict(config) if isinstance(config, RunConfig) else config.to_dict()
    present, before = dict(flat(fields)), dict(flat(saved))
    # Another seed would mix two orders of documents. Another algorithm cannot read the state.
    for name in ("seed", "algorithm.name"):
        if name in present and before.get(name, present[name]) != present[name]:
            raise ValueError(
                f"{name} = {present[name]!r}: must be {before[name]!r} in this workdir, or take "
                "another workdir"
            )
    for name in before:
        if name in MOVED_FIELDS and (moved := describe_move(name, present)):
            raise ValueError(
                f"{name}: {moved}; the run began with an older version, which can go on with it"
            )


def find_checkpoint(init_from: str) -> tuple[epath.Path, int | None]:
    """Return the workdir and step (or None) of init_from; ValueError if it is no run."""
    with naming("init_from", init_from):
        path, step = paths.open_folder(init_from), None
    # A number below checkpoints/ is a step; any other path is the folder of a run.
    if path.parent.name == CHECKPOINTS_FOLDER and path.name.isdecimal():
        path, step = path.parent.parent, int(path.name)
    checkpoint_folder = path / CHECKPOINTS_FOLDER / ("" if step is None else str(step))
    if not checkpoint_folder.is_dir():
        raise ValueError(
            f"init_from = {init_from!r}: must be a run's folder, or RUN/{CHECKPOINTS_FOLDER}/STEP"
        )
    return path, step


def model_sections(config: Config) -> list[str]:
    """Return names of the sections of a ConfigDict that describe models, "policy" among them."""
    # Every ModelConfig has compute_dtype, and no other section has a field of that name.
    sections = ((name, value) for name, value in config.items() if hasattr(value, "items"))
    return [name for name, fields in sections if "compute_dtype" in fields]


def _extra_models(fields: Mapping[str, Any]) -> list[str]:
    return [name for name in model_sections(fields) if name != "policy"]
