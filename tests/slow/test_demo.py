"""Tests of the demo's results in docs/results.md: three seeds, a control run, 300 updates.

`make test-long` takes an hour. Bounds are goals of the demo; docs/results.md has its results.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.reporting import tables as evaluation
from spell_jax.runtime.log.metrics import read_metrics

pytestmark = pytest.mark.long

SEEDS = (0, 1, 2)
RESPONDER = ("responder accuracy, by documents", "all")
VERIFIER = ("verifier accuracy, by pair", "")


def play(workdir: pathlib.Path, *flags: str) -> pathlib.Path:
    """Run the demo's command, without its time limit: the results are for a number of updates."""
    command = [sys.executable, "-m", "spell_jax.train", "--config=configs/tiny.py"]
    environment = os.environ | {"XLA_FLAGS": ""}
    flags = (f"--workdir={workdir}", "--config.max_minutes=0.", *flags)
    subprocess.run([*command, *flags], env=environment, check=True)
    return workdir


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> list[tuple[evaluation.Table, evaluation.Table]]:
    """Return the evaluation tables (before, after) of each seed."""
    seed_tables = []
    for seed in SEEDS:
        flags = (f"--config.seed={seed}", "--config.data.tiny.evaluation.per_cell=256")
        workdir = play(tmp_path_factory.mktemp("demo") / str(seed), *flags)
        table = evaluation.read_evaluation(workdir)
        assert table is not None
        seed_tables.append(table)
    return seed_tables


def mean_gain(tables, section: str, row: str, column: str) -> float:
    gains = [after[section][row][column][0] - b[section][row][column][0] for b, after in tables]
    return sum(gains) / len(gains)


@pytest.mark.parametrize("documents, gain", [(3, -0.03), (8, 0.15), (12, 0.25), (16, 0.0)])
def test_responder_gains_on_many_documents_without_loss_on_few(tables, documents, gain):
    assert mean_gain(tables, *RESPONDER, str(documents)) > gain


def test_verifier_accuracy_improves(tables):
    assert mean_gain(tables, *VERIFIER, "all") > 0


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_questioner_keeps_its_share_of_correct_references(tables, task):
    # The interval of one share of .9 among 256 is .04; a mean of three gains has a wider interval.
    assert mean_gain(tables, "questioner", task, "reference right, of answerable") > -0.05


def test_random_rewards_give_no_gain(tmp_path):
    """The control run has random rewards, so the gains are due to the rewards."""
    workdir = play(tmp_path / "random", "--config.algorithm.responder.reward=random")
    tables = [evaluation.read_evaluation(workdir)]
    assert mean_gain(tables, *RESPONDER, "8") < 0.05
    assert mean_gain(tables, *RESPONDER, "12") < 0.05


def test_accuracy_does_not_regress_over_300_updates(tmp_path):
    per_cell = 64
    flags = ("--config.steps=300", f"--config.data.tiny.evaluation.quick_per_cell={per_cell}")
    lines = read_metrics(play(tmp_path / "long", *flags))
    accuracies = [line["eval/responder"] for line in lines if "eval/responder" in line]
    assert len(accuracies) == 15
    # Two shares of .75 among 8 cells of 64 questions differ by .053 in one case of twenty.
    assert accuracies[-1] > max(accuracies) - 0.053
