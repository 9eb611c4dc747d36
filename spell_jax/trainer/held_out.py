"""Held-out evaluation of a run, and its last files."""

from __future__ import annotations

import logging
from typing import Any

import jax
from etils import epath

from spell_jax.algorithms.held_out import Share
from spell_jax.reporting import paired, run_report, tables
from spell_jax.runtime import intervals
from spell_jax.runtime.files.jsonl import read_json, write_json
from spell_jax.runtime.log.metrics import Metrics, read_metrics
from spell_jax.runtime.log.run_logger import explain_all_empty
from spell_jax.trainer.build import Run
from spell_jax.trainer.state import Params, States, save_model

log = logging.getLogger(__name__)

# Evaluations use step 0's random numbers, so that questions are answered alike every time.
_STEP = 0


def is_due(run: Run, step: int) -> bool:
    """Return whether a step is validated."""
    # Without an evaluation there is no score, so no best/ and no best checkpoint either.
    every = run.config.validate_every
    return run.evaluation is not None and bool(every) and step % every == 0


def validate_first(run: Run, params: Params, workdir: epath.Path) -> None:
    """Add the validation before training, as curves begin with it, to evaluation.json."""
    _, numbers = _quick(run, params)
    shares = {name: n.questions for name, n in numbers.items() if isinstance(n, Share)}
    # The second number counts the questions; 0: the first is no share.
    cells = {f"eval/{name}": [float(n), shares.get(name, 0)] for name, n in numbers.items()}
    _extend_evaluation(workdir, {tables.VALIDATION: cells})


def validate(run: Run, params: Params, metrics: Metrics) -> float:
    """Add accuracies to the metrics; return the score."""
    score, numbers = _quick(run, params)
    for name, value in numbers.items():
        metrics.add(f"eval/{name}", value)
    metrics.merge(_truncated(run), "eval/truncated/")
    return score


def _quick(run: Run, params: Params) -> tuple[float, dict[str, float]]:
    assert run.evaluation is not None
    run.worker.start_step(_STEP, params)
    score, numbers = run.evaluation.quick(run.worker)
    run.worker.end_step()
    return float(score), numbers  # a Share is no JSON number for a checkpoint


def _truncated(run: Run) -> dict[str, tuple[float, float]]:
    """Return agent -> (replies that the token cap cut off, all replies)."""
    counts, prefix = run.worker.metrics.pairs(), "truncated/"
    names = [name for name in counts if name.startswith(prefix)]
    return {name.removeprefix(prefix): counts[name] for name in names}


def evaluate(run: Run, params: Params, workdir: epath.Path, when: str) -> None:
    """Add a full evaluation to evaluation.json under "before" or "after"; if data is held out."""
    if run.evaluation is None:
        return
    run.worker.start_step(_STEP, params)
    result, answers = run.evaluation.full(run.worker)
    run.worker.end_step()
    # Agents without replies have no share.
    counts = {agent: pair for agent, pair in _truncated(run).items() if pair[1]}
    shares = {
        agent: intervals.wilson(cut / replies, int(replies))
        for agent, (cut, replies) in counts.items()
    }
    result = result | {"replies truncated at their cap": {"share": shares}}
    _extend_evaluation(workdir, {when: result})
    if answers and jax.process_index() == 0:
        paired.write_answers(workdir, when, answers)


def _extend_evaluation(workdir: epath.Path, part: dict[str, Any]) -> None:
    """Write a part of evaluation.json; parts of earlier calls stay, also after a resume."""
    path = workdir / tables.EVALUATION_FILE
    if jax.process_index() == 0:
        write_json(path, _read_earlier(path) | part)


def finish(run: Run, states: States, params: Params, workdir: epath.Path) -> None:
    """Evaluate a last time, save the trained models, plot, and print before and after."""
    if run.config.evaluate:
        evaluate(run, params, workdir, "after")
    for name in run.trained:
        save_model(run, name, states, workdir / name)
    # Saving weights needs all hosts, plots and tables only one.
    if jax.process_index() != 0:
        return
    plots = run_report.plot_run(workdir)
    if evaluation := tables.read_evaluation(workdir):
        print(tables.before_after_table(*evaluation))
        if table := paired.table([workdir]):
            print(f"\n{table}")
    print(f"\nmetrics   {workdir / 'metrics.jsonl'}\nepisodes  {workdir / 'episodes'}")
    print(f"policy    {workdir / 'policy'}\nplots     " + "\n          ".join(map(str, plots)))
    if cause := explain_all_empty(read_metrics(workdir), run.config.algorithm.hints):
        print(f"\n{cause}")


def _read_earlier(path: epath.Path) -> dict[str, Any]:
    """Read the evaluations of earlier calls; log a damaged file, which must not end the run."""
    try:
        return read_json(path) if path.exists() else {}
    except ValueError as error:
        log.warning("%s; it is replaced", error)
        return {}
