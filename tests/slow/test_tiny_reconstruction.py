"""Tests of the demo of document reconstruction: two small steps, the report, the warm start."""

from __future__ import annotations

import itertools
import json
import pathlib
import zlib

import pytest
from etils import epath

from spell_jax.configs import tiny_reconstruction, tiny_reconstruction_warm_start
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import TINY_POLICY, find_folder
from spell_jax.question_sets import tiny_world_rows, tuning_rows
from spell_jax.reporting.episodes import choose_episodes
from spell_jax.reporting.page import PAGE, RunData, write_page
from spell_jax.reporting.run_report import PLOTS_FOLDER
from spell_jax.reporting.tables import EVALUATION_FILE, read_evaluation
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.selfplay import prompts, puzzles
from spell_jax.trainer import loop
from tests import noise

SMALL = {
    "algorithm.truncated": "score",  # random text seldom ends
    "steps": 2,
    "validate_every": 2,
    "data.tiny.clusters": 8,
    "algorithm.evaluation_puzzles": 2,
    "algorithm.validation_puzzles": 1,
    "algorithm.documents": 4,
    "algorithm.group_size": 4,
    "sampler.kv_cache_tokens": 4096,
    "sampler.slots": 16,
    "sampler.samples_per_prompt_batch": 4,
    "sampler.prefill_tokens": 384,
    "sampler.decode_tokens": 4,
    "sampler.max_tokens": 6,
    "packing.buckets": ((128, 32),),
    "packing.token_budget": 512,
}


def read_noise(text: str, options: int) -> puzzles.Order:
    """Derive an order from the text's checksum, because random text states no order.

    Two letters may be swapped, and one in three texts states nothing.
    """
    number = zlib.crc32(text.encode(errors="replace")) % 3
    letters = puzzles.LABELS[:options]
    turned = letters[number:2] + letters[:number] + letters[2:] if number < 2 else ()
    return puzzles.Order(turned, bool(turned))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> epath.Path:
    """Run two steps with random weights and orders from checksums; return the workdir."""
    policy = noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")
    config = tiny_reconstruction.get_config()
    noise.with_fields(config, SMALL | {"policy.folder": str(policy)})
    folder = epath.Path(tmp_path_factory.mktemp("run"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        monkeypatch.setattr(puzzles, "parse_order", read_noise)
        loop.train(config, folder)
    return folder


def test_both_steps_train_on_puzzles(workdir):
    lines = read_metrics(workdir)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["rollout/accepted"] == 1
        assert line["train/empty_update"] == 0 and line["train/rows/responder"] > 0
        assert line["train/sampler_difference"] < 1e-4
        assert 0 <= line["rollout/sparse_reward"] <= line["rollout/dense_reward"] < 1
        assert line["rollout/mixed"] > 0
    (first, second) = lines
    assert 2 <= first["rollout/options"] < second["rollout/options"] <= 4, "a curriculum"
    assert "eval/dense_reward/4" in second and "eval/dense_reward/4" not in first


def test_episode_files_hold_the_puzzles_of_each_step(workdir):
    episodes = read_episodes(workdir)
    numbers = [(step, episode["options"]) for step, episode in episodes]
    assert sorted(numbers) == [(1, 2)] * 2 + [(1, 3)] * 2 + [(2, 4)] * 4, "3:3:5 of 8"
    assert all(len(episode["answers"]) == 4 for _, episode in episodes)


def test_run_is_evaluated_before_and_after_training(workdir):
    tables = json.loads((workdir / EVALUATION_FILE).read_text())
    mean, questions = tables.pop("validation")["eval/permutation"]
    assert 0 <= mean <= 1 and questions == 3  # one of each K
    assert tables.keys() == {"before", "after"}
    for sections in tables.values():
        table, cut = sections.values()
        assert 0 <= cut["share"]["responder"][0] <= 1
        assert table["dense reward"].keys() == {"2", "3", "4", "all"}
        assert table["sparse reward of a guess"]["3"] == [pytest.approx(1 / 6)] * 3


def test_report_shows_puzzles_and_plots(workdir):
    measured = RunData(workdir, read_metrics(workdir), read_evaluation(workdir))
    overview = write_page([measured], workdir / PAGE)
    assert (workdir / PAGE).stat().length > 0
    assert "sparse reward of a guess" in json.dumps(overview)
    shown = {episode["question"] for episode in choose_episodes(workdir, 100).chosen_episodes}
    assert shown == {f"order of {k} paragraphs" for k in (2, 3, 4)}
    saved = {path.name for path in (workdir / PLOTS_FOLDER).iterdir()}
    assert {"other_held_out_measures.png", "seconds_a_step_by_phase.png"} <= saved


def test_demo_caps_fit_the_warm_start_rows():
    """Warm-start prompts and answers fit the demo's token caps, and the rows fit the bucket."""
    config = tiny_reconstruction.get_config()
    bucket, _ = tiny_reconstruction_warm_start.get_config().packing.buckets[-1]
    tokenizer = tokenizers.load(TINY_POLICY)
    rows = tiny_world_rows.story_demonstrations(
        prompts.load("compact"), tiny_world_rows.StoryMixture(), seed=5
    )
    for row in itertools.islice(rows, 600):
        group = tuning_rows.to_group(row, tokenizer)
        assert len(group.prompt) <= config.sampler.max_prompt, row
        assert len(group.samples[0].tokens) <= config.sampler.max_tokens, row
        assert len(group.prompt) + len(group.samples[0].tokens) <= bucket


def test_demo_starts_from_its_warm_start():
    tuned = tiny_reconstruction_warm_start.get_config()
    folder = pathlib.Path(tiny_reconstruction.get_config().policy.folder)
    assert f"--workdir={folder.parent}\n" in (tiny_reconstruction_warm_start.__doc__ or "")
    assert find_folder(tuned.policy.folder, "policy.folder") == TINY_POLICY
    assert tuned.source == tiny_reconstruction.get_config().data.source
