"""The trainer: one loop for every game.

    python -m spell_jax.train --config=configs/tiny.py --workdir=DIR [--config.steps=9 ...]

    episodes = game.play(ask, step)          # models question, answer and judge
    rows = game.rows(episodes)               # what is learned from it
    state = learner.update(state, rows)      # one step of the optimiser

around which it validates, checkpoints and reports. Started again on the same workdir, it goes on
where the last checkpoint stands.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from ml_collections import config_flags

from spell_jax import catalogue, report
from spell_jax.evaluation import held_out
from spell_jax.games.game import Game
from spell_jax.games.players import Players
from spell_jax.learner import loss, packing, update
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import start
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.runtime.jsonl import write_json
from spell_jax.runtime.metrics import EpisodeWriter, Metrics, MetricsWriter
from spell_jax.runtime.progress import Progress
from spell_jax.runtime.settings import Config, build
from spell_jax.sampler.engine import Sampler, SamplerConfig

log = logging.getLogger("spell_jax.train")  # __name__ is __main__ when this is the entry


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
    """

    config: Config
    policy: PolicyConfig
    tokenizer: tokenizers.Tokenizer
    learner: update.Learner
    players: Players
    game: Game
    evaluation: held_out.Evaluation | None
    folder: pathlib.Path


# ------------------------------------------------------------------------------------------ Set-up


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


# -------------------------------------------------------------------------------------------- Loop


def train(config: Config, workdir: pathlib.Path) -> pathlib.Path:
    """Plays and learns for config.steps updates; returns the workdir.

    Written there: metrics.jsonl and TensorBoard events, episodes/, checkpoints/, policy/ and best/
    (the last weights and the best by validation, as Hugging Face folders), evaluation.json, plots/.
    """
    run = make_run(config)
    is_writer = jax.process_index() == 0
    workdir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(workdir, config.keep_checkpoints, config.checkpoint_every)
    models, step, best = restore(run, checkpoints)
    if is_writer:
        start.write_config(config, workdir)
    learner, game = run.learner, run.game
    learner.compile(models["policy"], models.get("reference"))
    metrics_writer = MetricsWriter(workdir, step or None, is_writer)
    episode_writer = EpisodeWriter(workdir, step or None, is_writer and config.write_episodes)
    progress = Progress(config.steps, start=step, enabled=is_writer)
    if step == 0 and config.evaluate:
        progress.update(0, "evaluate")
        evaluate(run, models, workdir, "before")
    progress.limit(60 * config.max_minutes or None)

    while step < config.steps and not progress.is_over():
        step += 1
        clock = time.monotonic()
        progress.update(step - 1, "play", {})
        run.players.begin(step, as_played(learner, models))
        with start.profiled(step in config.profile_steps, workdir):
            episodes = game.play(run.players, step)
            rows = game.rows(episodes)
            run.players.end()
            played = time.monotonic()
            metrics = game.metrics(episodes)
            solve_rate = metrics.means().get("solve_rate", 0.0)
            progress.update(step - 1, "learn", {"solved": solve_rate})
            models["policy"], numbers = learner.update(
                models["policy"], rows, models.get("reference")
            )
        refresh_anchor(config, models, step)

        numbers |= {"play_seconds": played - clock, "update_seconds": time.monotonic() - played}
        numbers |= {f"rows/{role}": count for role, count in packing.count_answers(rows).items()}
        written = Metrics()
        written.merge(metrics, "play/")
        written.merge(run.players.metrics, "play/")
        for name, value in numbers.items():
            written.add(f"train/{name}", value)
        if config.validate_every and step % config.validate_every == 0:
            progress.update(step, "validate", {"solved": solve_rate})
            best = validate(run, models, best, workdir, written)
        metrics_writer.write(step, written)
        metrics_writer.flush()
        episode_writer.write(step, map(game.record, episodes))
        checkpoints.save(step, models, host_state(run, best))
        progress.update(step, "done", {"solved": solve_rate})

    checkpoints.save(step, models, host_state(run, best), force=True)
    progress.close()
    metrics_writer.close()
    checkpoints.close()
    finish(run, models, workdir, is_writer)
    return workdir


def host_state(run: Run, best: float | None) -> dict[str, Any]:
    """What a checkpoint holds besides arrays; all keys and draws follow from seed and step."""
    return {"seed": run.config.seed, "game": run.game.state_dict(), "best": best}


def restore(run: Run, checkpoints: Checkpoints) -> tuple[dict[str, Any], int, float | None]:
    """The state by model name, the steps done, the best score: from the last checkpoint, or fresh.

    Raises:
      ValueError: the checkpoint is of another seed or shape, or of a later step than the last.
    """
    names = [*run.game.models, *(["reference"] if run.learner.loss.kl_weight else [])]
    step = checkpoints.latest_step()
    if step is None:
        state = run.learner.init(load_weights(run))
        return {"policy": state} | {name: copy(state.params) for name in names}, 0, None
    if step > run.config.steps:
        raise ValueError(f"steps = {run.config.steps}: must be at least {step}, which are done")
    if run.policy.lora:  # the checkpoint has the adapters only
        run.learner.freeze(load_weights(run))
    abstract = run.learner.abstract_state()
    target = {"policy": abstract} | dict.fromkeys(names, abstract.params)
    models, saved = checkpoints.restore(step, target)
    if saved["seed"] != run.config.seed:
        raise ValueError(
            f"seed = {run.config.seed}: must be {saved['seed']}, with which this run began"
        )
    run.game.load_state_dict(saved["game"])
    log.info("resumed at step %d", step)
    return models, step, saved["best"]


def load_weights(run: Run) -> transformer.Params:
    """The weights that the run starts from, on its mesh; what is not trained needs no masters."""
    dtype = run.config.policy.compute_dtype if run.policy.lora else "float32"
    return weights.load(run.folder, run.learner.mesh, dtype)[1]


def save_policy(run: Run, models: dict[str, Any], folder: pathlib.Path) -> None:
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


# ------------------------------------------------------------------------- Validation and the end


def validate(
    run: Run, models: dict[str, Any], best: float | None, workdir: pathlib.Path, written: Metrics
) -> float | None:
    """Held-out accuracies into the step's metrics; the best policy is kept, its score returned."""
    if run.evaluation is None:
        return None
    # Validation has step 0's random numbers, so that its questions are answered alike every time.
    run.players.begin(0, as_played(run.learner, models))
    score, numbers = run.evaluation.quick(run.players)
    for name, value in numbers.items():
        written.add(f"eval/{name}", value)
    if best is not None and not score > best:
        return best
    if jax.process_index() == 0:
        save_policy(run, models, workdir / "best")
    return score


def evaluate(run: Run, models: dict[str, Any], workdir: pathlib.Path, when: str) -> None:
    """Adds a full held-out evaluation to evaluation.json under "before" or "after"."""
    if run.evaluation is None:
        return
    run.players.begin(0, as_played(run.learner, models))
    result = run.evaluation.full(run.players)
    path = workdir / report.EVALUATION_FILE
    if jax.process_index() == 0:
        results = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, results | {when: result})


def finish(run: Run, models: dict[str, Any], workdir: pathlib.Path, is_writer: bool) -> None:
    """Last evaluation, the policy as a folder, plots, and the table of before and after."""
    if run.config.evaluate:
        evaluate(run, models, workdir, "after")
    if not is_writer:
        return
    save_policy(run, models, workdir / "policy")
    plots = report.plot_run(workdir)
    if tables := report.read_evaluation(workdir):
        print(report.before_after_table(*tables))
    print(f"\nmetrics   {workdir / 'metrics.jsonl'}\nepisodes  {workdir / 'episodes'}")
    print(f"policy    {workdir / 'policy'}\nplots     " + "\n          ".join(map(str, plots)))


def main(_) -> None:
    start.setup()
    train(flags.FLAGS.config, pathlib.Path(flags.FLAGS.workdir))


if __name__ == "__main__":
    # Defined here, so that one process may import several entries.
    config_flags.DEFINE_config_file("config", None, "The run's configuration.")
    flags.DEFINE_string("workdir", None, "The run's folder.")
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
