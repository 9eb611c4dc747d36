"""What a run is made of: its parts by its config, and its models fresh, restored, played and saved.

Models are a dict by name: "policy" is the training state (weights and optimiser), all others (the
game's own, and the loss's "reference") are weights that are not trained.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from spell_jax import catalogue
from spell_jax.evaluation import held_out
from spell_jax.games.game import Game
from spell_jax.games.players import Players
from spell_jax.learner import loss, update
from spell_jax.policy import lora, safetensors_folder, transformer, weights
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.checkpoint import CHECKPOINTS_FOLDER, Checkpoints
from spell_jax.runtime.settings import Config, build, changes, plain
from spell_jax.runtime.stopwatch import Stopwatch
from spell_jax.sampler.engine import Sampler, SamplerConfig

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Run:
    """Everything that a run is made of, from its config (no device work but the mesh's).

    Attributes:
      policy, tokenizer: architecture (as the config changes it) and tokenizer of the policy.
      folder: where its first weights are.
      learner: jitted updates.
      players: the models as a game asks them, behind one sampler.
      game: what is played.
      evaluation: held-out evaluation, or None where the data has no held-out questions.
      watch: where the time of its main thread goes.
    """

    config: Config
    policy: PolicyConfig
    tokenizer: tokenizers.Tokenizer
    learner: update.Learner
    players: Players
    game: Game
    evaluation: held_out.Evaluation | None
    folder: pathlib.Path
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)


def make_run(config: Config) -> Run:
    """Checks the whole config and builds the run's parts.

    Raises:
      ValueError, FileNotFoundError: naming the field, its value and what would be right.
    """
    sampling = build(SamplerConfig, config.sampler, "sampler")
    packing_config = build(update.PackingConfig, config.packing, "packing")
    loss_config = build(loss.LossConfig, config.loss, "loss")
    optimiser = build(
        update.OptimiserConfig, config.optimiser, "optimiser", total_steps=config.steps
    )
    catalogue.check(config)
    folder = catalogue.find_policy(config)
    policy, tokenizer = catalogue.read_policy(config, folder)
    policy.check_length(sampling.longest)
    mesh = meshes.make_mesh(config.mesh)
    learner = update.Learner(
        policy,
        optimiser,
        loss_config,
        packing_config,
        mesh,
        sampling.temperature,
        config.policy.compute_dtype,
    )
    sampler = Sampler(policy, sampling, tokenizer.stop_ids, mesh, tokenizer.stream)
    players = Players(sampler, tokenizer, jax.random.key(config.seed))
    game, evaluation = catalogue.make(config, tokenizer, sampling.max_prompt)
    return Run(config, policy, tokenizer, learner, players, game, evaluation, folder)


def host_state(
    run: Run, game: dict[str, Any], best: float | None, metrics: list[str]
) -> dict[str, Any]:
    """What a checkpoint holds besides arrays; all keys and draws follow from seed and step.

    Args:
      run: of which the config is kept.
      game: its state_dict.
      best: the best score by validation so far.
      metrics: the last lines of metrics.jsonl.
    """
    return {"config": plain(run.config), "game": game, "best": best, "metrics": metrics}


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
    names = [*run.game.models, *(["reference"] if run.learner.loss.kl_weight else [])]
    step = checkpoints.newest_intact()
    if step is None:
        state = first_state(run)
        return {"policy": state} | {name: copy(state.params) for name in names}, 0, None, []
    if run.policy.lora:  # the checkpoint has the adapters only
        run.learner.freeze(load_weights(run))
    abstract = run.learner.abstract_state()
    target = {"policy": abstract} | dict.fromkeys(names, abstract.params)
    models, saved = checkpoints.restore(step, target)
    check_resumed(run.config, step, saved["config"])
    run.game.load_state_dict(saved["game"])
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


def first_state(run: Run) -> update.TrainState:
    """A new optimiser and, in this order: the weights of config.init_from, another run; those of
    the policy's folder; random ones by the seed, where that holds a config and a tokenizer alone.

    Raises:
      FileNotFoundError, ValueError: there is no such run, it is damaged or of another shape.
    """
    if run.config.init_from:
        if run.policy.lora:
            run.learner.freeze(load_weights(run))
        workdir, step = catalogue.find_checkpoint(run.config.init_from)
        step, params = read_weights(workdir, run.policy, run.learner.mesh, step)
        log.info("begins with the weights of %s, step %d (init_from)", workdir, step)
        return run.learner.start(params)
    if safetensors_folder.has_weights(run.folder):
        log.info("begins with the weights of %s", run.folder)
        return run.learner.init(load_weights(run))
    log.warning("%s holds no weights: begins with random ones", run.folder)
    return run.learner.init(jax.random.key(run.config.seed))


def load_weights(run: Run) -> transformer.Params:
    """The weights of the policy's folder, on the mesh; what is not trained needs no masters."""
    dtype = run.config.policy.compute_dtype if run.policy.lora else "float32"
    return weights.load(run.folder, run.learner.mesh, dtype)[1]


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
    wanted, _ = lora.split(policy, meshes.placed(shapes, meshes.shardings(mesh, axes, shapes)))
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.newest_intact() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{workdir / CHECKPOINTS_FOLDER}: no complete checkpoint")
        found = checkpoints.restore_part(step, {"policy": {"params": wanted}})
    return step, found["policy"]["params"]


# --------------------------------------------------------------------------------- During the run


def save_policy(run: Run, models: dict[str, Any], folder: epath.Path) -> None:
    """The policy as a Hugging Face folder in the dtype that it is played with."""
    policy, params = run.learner.export(models["policy"].params)
    weights.save(folder, policy, params, run.tokenizer, run.config.policy.compute_dtype)


def copy(params: transformer.Params) -> transformer.Params:
    """Buffers of its own: those of the training state are donated at every update."""
    return jax.tree.map(jnp.copy, params)


def as_played(learner: update.Learner, models: dict[str, Any]) -> dict[str, transformer.Params]:
    """Weights in the compute dtype by model name."""
    return {
        name: learner.cast(model.params if name == "policy" else model)
        for name, model in models.items()
    }


def refresh_anchor(config: Config, models: dict[str, Any], step: int) -> None:
    """Renews the frozen copy every config.game.anchor_refresh steps (0: never)."""
    every = config.game.get("anchor_refresh", 0)
    if "anchor" in models and every and step % every == 0:
        models["anchor"] = copy(models["policy"].params)
