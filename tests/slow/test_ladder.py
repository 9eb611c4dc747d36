"""The ladder in short: a warm start of a few steps, two updates, the questions and the figure."""

from __future__ import annotations

import json
import pathlib

import pytest
from etils import epath

from spell_jax.data.questions import read_questions
from spell_jax.launch.experiments.ladder import __main__ as experiment
from spell_jax.launch.experiments.ladder import config as ladder
from spell_jax.launch.experiments.ladder import warm_start_config, world
from spell_jax.policy.model import TINY_POLICY
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.trainer import loop, supervised
from tests import noise

pytestmark = [pytest.mark.slow, pytest.mark.long]

TUNING = {"steps": 60, "rows_per_step": 24, "optimizer.warmup_steps": 5}
SMALL = {
    "steps": 2,
    "validate_every": 1,
    "data.tiny.clusters": 6,
    "data.tiny.evaluation.quick_per_cell": 2,
    "algorithm.generation_batch": 12,
    "sampler.slots": 64,
    "sampler.kv_cache_tokens": 12_288,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> pathlib.Path:
    """Run the full arm once, after a warm start; return the folder of both."""
    runs = tmp_path_factory.mktemp("ladder")
    tuning = noise.with_fields(warm_start_config.get_config(), TUNING)
    tuning.policy.folder = str(TINY_POLICY)
    config = noise.with_fields(ladder.get_config(), SMALL)
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        config.policy.folder = str(supervised.fine_tune(tuning, epath.Path(runs / "warm_start")))
        loop.train(config, epath.Path(runs / "full" / "0"))
    return runs


def test_both_steps_train_on_chained_questions(runs):
    lines = read_metrics(runs / "full" / "0")
    assert [line["step"] for line in lines] == [1, 2]
    assert all({f"eval/depth/{d}" for d in world.DEPTHS} <= line.keys() for line in lines)
    assert sum(line["rollout/accepted"] for line in lines) > 0
    assert lines[-1]["rollout/history"] > 0, "the second step remembers the first one's questions"
    questions = [e["question"] for _, e in read_episodes(runs / "full" / "0") if e["answers"]]
    assert any(map(world.depth_of, questions))


def test_questions_of_the_run_are_those_of_the_yoked_arm(runs, tmp_path):
    out = tmp_path / "questions.jsonl"
    experiment.main(["questions", f"--out={out}", f"--run={runs}/full/0"])
    questions = [e["question"] for _, e in read_episodes(runs / "full" / "0") if e["answers"]]
    assert [question.question for question in read_questions(out, "data.questions")] == questions


def test_figure_of_the_run(runs, tmp_path):
    experiment.main(["figure", f"--runs={runs}", f"--out={tmp_path}"])
    assert (tmp_path / "ladder.png").stat().st_size > 0
    numbers = json.loads((tmp_path / "ladder.json").read_text())
    assert len(numbers["arms"]["full"]["accuracy_by_depth"]) == len(world.DEPTHS)
    assert numbers["verdict"] == "Not decided: no run of frozen, static."
