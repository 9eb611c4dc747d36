"""Tests that docs/metrics.md explains the metrics of all algorithms other than SPELL."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from spell_jax.algorithms.eapo.evaluation import held_out_evidence
from spell_jax.algorithms.reconstruction.evaluation import held_out_puzzles
from spell_jax.data.clusters import Cluster
from spell_jax.learner import preference
from tests import metric_names
from tests.algorithms import posing, scripted
from tests.algorithms.eapo import test_evaluation as structured
from tests.algorithms.eapo.test_algorithm import run_question
from tests.algorithms.preference import test_longpo as longpo
from tests.algorithms.rlvr import test_algorithm as rlvr
from tests.algorithms.rlvr import test_qwenlong as qwenlong
from tests.algorithms.scripted import PROMPTS, ScriptedModels, roll_out
from tests.algorithms.test_held_out import make as make_held_out


def in_run(measured: Iterable[str], held_out: Iterable[str]) -> set[str]:
    return {f"rollout/{name}" for name in measured} | {f"eval/{name}" for name in held_out}


def of_reconstruction() -> set[str]:
    """Return the metrics of puzzles with 2 to 8 options, and of documents that give no puzzle."""
    short = [Cluster(f"short {i}", ("a line\nand another",)) for i in range(9)]
    algorithm = posing.make_algorithm([*posing.STORIES, *short], documents=24, steps=1)
    models = ScriptedModels(posing.improving)
    context = posing.context(held_out=posing.STORIES)
    config = posing.config(evaluation_puzzles=2, validation_puzzles=2)
    _, held_out = held_out_puzzles(config, context).quick(models)
    return in_run(algorithm.metrics(roll_out(algorithm, models, 1)).means(), held_out)


def of_eapo() -> set[str]:
    """Return metrics of valid and malformed scorings, judge, overlong prompt and known evidence."""
    measured = set()
    for options in (
        {"rule": "judge", "judge": lambda items: [1, -1, 0][: len(items)]},
        {"scorings": ("no",), "reward_model": "static"},
        {"over": ("responder",)},
        {"supporting": ("set 0",)},
    ):
        algorithm, _, episode = run_question(**options)
        measured |= algorithm.metrics([episode]).means().keys()
    evaluation = held_out_evidence(PROMPTS, structured.QUESTIONS)
    return in_run(measured, evaluation.quick(ScriptedModels(structured.write))[1])


def of_rlvr() -> set[str]:
    """Return the metrics with questions that the first step writes."""
    algorithm = rlvr.new_algorithm(rule="judge", judge=lambda items: [1] * len(items))
    script = scripted.Script(scripted.ROWS)
    evaluation = make_held_out(structured.QUESTIONS)
    held_out = evaluation.quick(ScriptedModels(structured.write))[1]
    return in_run(
        algorithm.metrics(roll_out(algorithm, ScriptedModels(script), 1)).means(), held_out
    )


def of_longpo() -> set[str]:
    """Return the metrics of pairs and of an update on the pairs; SoLoPO has the same metrics."""
    algorithm = longpo.given_algorithm()
    episodes = roll_out(algorithm, ScriptedModels(longpo.by_context), 1)
    evaluation = make_held_out(structured.QUESTIONS)
    held_out = evaluation.quick(ScriptedModels(structured.write))[1]
    names = in_run(algorithm.metrics(episodes).means(), held_out)
    return names | {f"train/{name}" for name in (*preference.SUMS, "alignment")}


def of_qwenlong() -> set[str]:
    """Return the metrics of a step of the second phase."""
    algorithm = qwenlong.new_algorithm()
    models = ScriptedModels(qwenlong.write)
    episodes = [roll_out(algorithm, models, step) for step in (1, 3)][-1]
    evaluation = make_held_out(structured.QUESTIONS)
    held_out = evaluation.quick(ScriptedModels(structured.write))[1]
    return in_run(algorithm.metrics(episodes).means(), held_out)


ALGORITHMS = {
    "reconstruction": of_reconstruction,
    "eapo": of_eapo,
    "rlvr": of_rlvr,
    "longpo": of_longpo,
    "qwenlong_l1": of_qwenlong,
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_metric_of_an_algorithm_is_documented(name):
    written = ALGORITHMS[name]()
    assert len(written) > 20 and any(name.startswith("eval/") for name in written)
    unknown, _ = metric_names.compare(written)
    assert not unknown


def test_every_documented_metric_is_written_by_an_algorithm():
    written = set(itertools.chain.from_iterable(names() for names in ALGORITHMS.values()))
    _, unused = metric_names.compare(written)
    assert not unused & metric_names.OF_OTHER_ALGORITHMS


def test_update_metrics_of_other_models_are_documented():
    names = ("rows/reward_model", "advantage/reward_model", "reward_model/gradient_norm")
    unknown, unused = metric_names.compare(f"train/{name}" for name in (*names, "rows/else"))
    assert unknown == {"train/rows/else"}
    assert unused & metric_names.OF_OTHER_MODELS == {"train/advantage_size/MODEL"}
