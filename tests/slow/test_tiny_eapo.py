"""Tests of configs/tiny_eapo.py with two noise models: a refresh, a resumed run, the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from spell_jax.policy import weights
from spell_jax.reporting.episodes import choose_episodes
from spell_jax.reporting.page import RunData, write_page
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.trainer import loop
from spell_jax.trainer import state as runs
from spell_jax.trainer.build import make_run
from tests import noise

STEPS, REFRESH = 2, 2


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Iterator[Any]:
    """Yield a config with few questions per step and a reward model larger than the policy."""
    fields = {"steps": STEPS, "algorithm.refresh_every": REFRESH}
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.give_evidence_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        noise.share_programs(monkeypatch)
        yield noise.small_eapo_config(tmp_path_factory.mktemp("given"), **fields)


@pytest.fixture(scope="module")
def uninterrupted_run(config, tmp_path_factory) -> epath.Path:
    """Run from the first step to the last; return the workdir."""
    return loop.train(config, epath.Path(tmp_path_factory.mktemp("whole") / "run"))


def lines_of(workdir: epath.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def end_of(config: Any, workdir: epath.Path) -> dict[str, Any]:
    run = make_run(config)
    with Checkpoints(workdir) as checkpoints:
        return runs.restore_or_init(run, checkpoints)[0].tree()


def test_refresh_trains_on_scorings_kept_since_the_last_refresh(uninterrupted_run):
    first, second = lines_of(uninterrupted_run)
    assert all(line["train/rows/responder"] > 0 for line in (first, second))
    assert first["rollout/kept_scorings"] > 0 and first["rollout/refreshed_scorings"] == 0
    assert second["rollout/refreshed_scorings"] >= first["rollout/kept_scorings"]
    assert second["rollout/kept_scorings"] == 0
    assert "train/reward_model/loss" not in first
    assert second["train/rows/reward_model"] == second["rollout/refreshed_scorings"]
    assert second["rollout/prompt_tokens/reward_model"] > 0


def test_refresh_changes_the_reward_models_weights(config, uninterrupted_run):
    assert moved(config.reward_model.folder, uninterrupted_run / "reward_model") > 1e-5
    assert moved(config.policy.folder, uninterrupted_run / "policy") > 1e-5


def moved(before: str, after: epath.Path) -> float:
    """Return the largest change of a weight."""
    pair = [weights.load(epath.Path(folder), meshes.make_mesh())[1] for folder in (before, after)]
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *pair)))


def test_run_resumes_bit_identically_across_a_refresh(config, uninterrupted_run, tmp_path):
    halved = noise.end_earlier(uninterrupted_run, epath.Path(tmp_path / "halved"), 1)
    loop.train(config, halved)
    assert [*map(noise.steady, lines_of(uninterrupted_run))] == [
        *map(noise.steady, lines_of(halved))
    ]
    ends = [end_of(config, workdir) for workdir in (uninterrupted_run, halved)]
    assert ends[0].keys() == {"policy", "reward_model"}
    assert int(ends[0]["reward_model"].step) == 1
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_report_shows_questions_and_evaluation(uninterrupted_run):
    episodes = choose_episodes(uninterrupted_run, 100).chosen_episodes
    assert len(episodes) == 8 * STEPS
    assert all(len(e["answers"]) == 3 and " of " in e["question"] for e in episodes)
    tables = json.loads((uninterrupted_run / "evaluation.json").read_text())
    for when in ("before", "after"):
        names = tables[when]["structured answers"]["all"]
        assert {"accuracy", "well_formed", "evidence_recall"} <= set(names)
    write_page(
        [RunData(uninterrupted_run, lines_of(uninterrupted_run), None)],
        uninterrupted_run / "report.html",
    )
