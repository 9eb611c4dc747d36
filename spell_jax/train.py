"""The trainer: one loop for every algorithm.

    python -m spell_jax.train --config=configs/tiny.py --workdir=DIR [--config.steps=9 ...]

    episodes = algorithm.play(ask, step)          # models question, answer and judge
    rows = algorithm.rows(episodes)               # what is learned from it
    state = learner.update(state, rows)      # one step of the optimizer

around which it validates, checkpoints and reports. With config.staleness = 1 the next step is
played between the update's micro-batches, with the weights before it. Started again on the same
workdir, it goes on where the last checkpoint stands, to the bit.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app, flags
from etils import epath
from ml_collections import config_flags

from spell_jax import report
from spell_jax.algorithms.base import records
from spell_jax.config import RunConfig, to_dict
from spell_jax.learner import packing, statistics
from spell_jax.runtime import distributed, fault_injection, paths
from spell_jax.runtime import setup as start
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.runtime.config import Config
from spell_jax.runtime.jsonl import write_json
from spell_jax.runtime.metrics import Metrics
from spell_jax.runtime.preemption import Preempted, Preemption
from spell_jax.runtime.run_logger import Recorder
from spell_jax.trainer.build import Run, make_run
from spell_jax.trainer.state import (
    RolloutParams,
    StepUpdate,
    begin,
    host_state,
    refresh_reference_reader,
    save_model,
)


@dataclasses.dataclass
class Played:
    """A step of the algorithm: episodes, what is learned from them, metrics, and the algorithm's
    state before it, with which it can be played again."""

    episodes: Sequence[Any]
    rows: list[packing.Group]
    metrics: Metrics
    before: dict[str, Any]


# -------------------------------------------------------------------------------------------- Loop


def train(config: Config | RunConfig, workdir: epath.Path) -> epath.Path:
    """Plays and learns for config.steps updates; returns the workdir.

    Written there: metrics.jsonl and TensorBoard events, episodes/, checkpoints/, policy/ and best/
    (the last weights and the best by validation, as Hugging Face folders), evaluation.json, plots/.

    Raises:
      Preempted: the machine is taken away; everything is saved, and another call goes on.
      NonFinite: the numbers of too many updates were; the rows are in non_finite/.
    """
    run = make_run(config)
    config = run.config
    workdir.mkdir(parents=True, exist_ok=True)
    with (
        Preemption(config.preemption_limit_s) as preemption,
        Checkpoints(workdir, config.keep_checkpoints, config.checkpoint_every) as checkpoints,
    ):
        return _train(run, workdir, checkpoints, preemption)


def _train(
    run: Run, workdir: epath.Path, checkpoints: Checkpoints, preemption: Preemption
) -> epath.Path:
    config, algorithm = run.config, run.algorithm
    is_writer = jax.process_index() == 0
    models, step, best, tail = begin(run, checkpoints)
    if is_writer:
        start.write_config(to_dict(config), workdir)
    for name, model in run.trained.items():
        model.learner.compile(models[name], models.get("reference") if name == "policy" else None)
    recorder = Recorder(workdir, config.steps, step, tail, watch=run.watch, **recorded(config))

    def save(step: int, algorithm: dict[str, Any], force: bool = False, score: float | None = None):
        """What is written goes first. If it fails, that is raised when all is saved: elsewhere, if
        the disk is full."""
        recorder.enter("save", step)
        try:
            if force or step % config.checkpoint_every == 0:
                with distributed.fail_together():
                    recorder.flush()
        finally:
            state = host_state(run, algorithm, best, recorder.tail())
            checkpoints.save(step, models, state, force, score)

    def stop_if_preempted(step: int, algorithm: dict[str, Any]) -> None:
        if preemption.should_stop():
            save(step, algorithm, force=True)
            raise Preempted(preemption.why)

    with recorder:
        if step == 0 and config.evaluate:
            recorder.enter("evaluate", 0)
            evaluate(run, models, workdir, "before")
        recorder.progress.limit(60 * config.max_minutes or None)
        ahead: Played | None = None
        while ahead or (step < config.steps and not recorder.progress.is_over()):
            step += 1
            recorder.enter("rollout", step - 1)
            with start.profiled(is_writer and step in config.profile_steps, workdir):
                played = ahead or play(run, models, step, preemption.should_stop)
                ahead = None
                fault_injection.point("played")
                # This step is played again.
                stop_if_preempted(step - 1, played.before if played else algorithm.state_dict())
                assert played
                recorder.enter("update", step - 1, newest(played))
                update = StepUpdate(run, models, played.rows)
                if plays_ahead(config, step) and not recorder.progress.is_over():
                    ahead = play(run, models, step + 1, preemption.should_stop, update.go_on)
                numbers = update.finish(workdir, step)
                fault_injection.point("updated")
            refresh_reference_reader(config, models, step)

            recorder.enter("validate", step)
            written = step_metrics(run, played, numbers, is_alone=not ahead)
            written.merge(update.difference, "train/")
            score = validate(run, models, step, written)
            recorder.enter("write", step)
            state = ahead.before if ahead else algorithm.state_dict()
            try:
                with distributed.fail_together():
                    if score is not None and (best is None or score > best):
                        save_model(run, models, "policy", workdir / "best")
                        best = score
                    recorder.write(step, written, records(algorithm, played.episodes))
            except (OSError, RuntimeError):
                save(step, state, force=True, score=score)
                raise
            save(step, state, score=score)
            stop_if_preempted(step, state)
        save(step, algorithm.state_dict(), force=True)
    finish(run, models, workdir, is_writer)
    return workdir


def recorded(config: RunConfig) -> dict[str, Any]:
    """What the recorder is told of a config."""
    fields = {"episodes": config.episode_characters, "wandb": config.wandb}
    return fields | {"config": to_dict(config)}


class Stopped(Exception):
    """A step is not played to its end."""


def play(
    run: Run,
    models: dict[str, Any],
    step: int,
    should_stop: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Played | None:
    """One step of the algorithm. While the device samples (RolloutWorker.begin), `meanwhile` is
    called and it is asked whether to stop; then None, with the algorithm as it was before."""

    def ask_and_go_on() -> None:
        meanwhile()
        if should_stop():
            raise Stopped

    clock, before = time.monotonic(), run.algorithm.state_dict()
    run.players.begin(step, RolloutParams(run, models), ask_and_go_on)
    try:
        episodes = run.algorithm.play(run.players, step)
    except Stopped:
        run.players.end()
        run.algorithm.load_state_dict(before)
        return None
    rows = run.algorithm.rows(episodes)
    run.players.end()
    metrics = Metrics()
    metrics.merge(run.algorithm.metrics(episodes), "rollout/")
    metrics.merge(run.players.metrics, "rollout/")
    seconds = time.monotonic() - clock
    waited = run.players.waited
    run.watch.spend(waited | {"rollout": seconds - sum(waited.values())})
    for what, tokens in {"sampled": run.players.sampled, "prefilled": run.players.read}.items():
        metrics.add_sum(f"time/tokens_per_second/{what}", tokens, seconds)
    return Played(episodes, rows, metrics, before)


def newest(played: Played) -> dict[str, float]:
    """What the progress line says of a step."""
    means = played.metrics.means()
    names = {"solved": "rollout/solve_rate", "tokens/s": "time/tokens_per_second/sampled"}
    return {shown: means.get(name, 0.0) for shown, name in names.items()}


def step_metrics(
    run: Run, played: Played, numbers: dict[str, list[dict[str, float]]], is_alone: bool
) -> Metrics:
    """A step's metrics: of the algorithm, of the updates, their means by model, and how fast these
    were, if nothing was played meanwhile (`is_alone`)."""
    metrics = played.metrics
    for role, count in packing.count_answers(played.rows).items():
        metrics.add(f"train/rows/{role}", count)
    for model, updates in numbers.items():
        where = "train/" if model == "policy" else f"train/{model}/"
        for update in updates:
            metrics.merge({name: (value, 1.0) for name, value in update.items()}, where)
    metrics.merge(statistics.advantages(played.rows), "train/")
    made = [update for updates in numbers.values() for update in updates]
    made = [update for update in made if not update["empty_update"]]
    if is_alone and made:
        devices = run.learner.mesh.devices.flatten().tolist()
        metrics.merge(statistics.speed(made, run.watch.spent("update"), devices), "time/")
    return metrics


def plays_ahead(config: RunConfig, step: int) -> bool:
    """Whether the step behind this one is played while this one is learned from.

    Not behind a checkpoint, which has no older weights: a resumed run plays as this one does (one
    that ended between two, by the clock or at its last step, goes on with the newest weights).
    """
    is_last = step == config.steps
    return bool(config.staleness) and not is_last and step % config.checkpoint_every != 0


# ------------------------------------------------------------------------- Validation and the end


def validate(run: Run, models: dict[str, Any], step: int, written: Metrics) -> float | None:
    """Every so many steps held-out accuracies go into the step's metrics; returns the policy's
    score by them."""
    every = run.config.validate_every
    if run.evaluation is None or not every or step % every:
        return None
    # Validation has step 0's random numbers, so that its questions are answered alike every time.
    run.players.begin(0, RolloutParams(run, models))
    score, numbers = run.evaluation.quick(run.players)
    run.players.end()
    for name, value in numbers.items():
        written.add(f"eval/{name}", value)
    return score


def evaluate(run: Run, models: dict[str, Any], workdir: epath.Path, when: str) -> None:
    """Adds a full held-out evaluation to evaluation.json under "before" or "after"."""
    if run.evaluation is None:
        return
    run.players.begin(0, RolloutParams(run, models))
    result = run.evaluation.full(run.players)
    run.players.end()
    path = workdir / report.EVALUATION_FILE
    if jax.process_index() == 0:
        results = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, results | {when: result})


def finish(run: Run, models: dict[str, Any], workdir: epath.Path, is_writer: bool) -> None:
    """Last evaluation, trained models as folders, plots, and the table of before and after."""
    if run.config.evaluate:
        evaluate(run, models, workdir, "after")
    for name in run.trained:
        save_model(run, models, name, workdir / name)
    if not is_writer:
        return
    plots = report.plot_run(workdir)
    if tables := report.read_evaluation(workdir):
        print(report.before_after_table(*tables))
    print(f"\nmetrics   {workdir / 'metrics.jsonl'}\nepisodes  {workdir / 'episodes'}")
    print(f"policy    {workdir / 'policy'}\nplots     " + "\n          ".join(map(str, plots)))


def main(_) -> None:
    start.setup()
    train(flags.FLAGS.config, paths.open_folder(flags.FLAGS.workdir))


if __name__ == "__main__":
    # Defined here, so that one process may import several entries.
    config_flags.DEFINE_config_file("config", None, "The run's configuration.")
    flags.DEFINE_string("workdir", None, "The run's folder.")
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
