"""Small runs of preference algorithms in the tiny world."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import pytest

from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.trainer import loop
from tests import noise
from tests.slow import killed

PREFERENCES = {
    "loss.objective": "dpo",
    "loss.old_logprobs": "reference",
    "loss.aggregation": "sequence_mean",
}


def run_to_end(config: Any, workdir: pathlib.Path) -> list[dict]:
    """Return the metrics of a run in this process, in which random text has a meaning."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        noise.share_programs(monkeypatch)
        loop.train(config, workdir)
    return list(map(noise.steady, read_metrics(workdir)))


def check_resumed(folder: pathlib.Path, tmp_path: pathlib.Path, **fields: Any) -> list[dict]:
    """Check that a two-step run resumes after the first step to the bit; return the metrics."""
    small = {"checkpoint_every": 1, "validate_every": 0, "optimizer.learning_rate": 0.01} | fields
    uninterrupted_run, parts = tmp_path / "whole", tmp_path / "parts"
    lines = run_to_end(noise.small_config(folder, steps=2, **small), uninterrupted_run)
    run_to_end(noise.small_config(folder, steps=1, **small), parts)
    resumed = noise.small_config(folder, steps=2, **small)
    assert run_to_end(resumed, parts) == lines
    assert list(read_episodes(parts)) == list(read_episodes(uninterrupted_run))
    (arrays, state), (expected_arrays, expected_state) = (
        killed.newest_checkpoint(resumed, run) for run in (parts, uninterrupted_run)
    )
    assert state == expected_state
    for array, expected_array in zip(
        jax.tree.leaves(arrays), jax.tree.leaves(expected_arrays), strict=True
    ):
        assert array.tobytes() == expected_array.tobytes()
    return lines
