"""End-to-end test with a folder of texts: rows, warm start, self-play, resume."""

from __future__ import annotations

import json
import pathlib

import pytest

from spell_jax.configs import folder, folder_warm_start
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.trainer import loop, supervised
from tests import noise
from tests.question_sets.test_facts import write_files

PLACES = ("Avalon", "Brobdingnag", "Camelot", "Dunsinane", "Elsinore", "Florin", "Gondor", "Hyrule")
SIZES = ["--documents_per_cluster=4", "--max_document_tokens=48", "--held_out=0.3"]
STATUSES = ("accepted", "bad_format", "declined", "ungrounded", "overlong", "too_small")


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> pathlib.Path:
    source = tmp_path_factory.mktemp("documents")
    for chapter in range(4):
        paragraphs = [
            f"In that time the harbour number {chapter * 100 + i} was built near {place}. The "
            f"yearly trade of port {place.lower()} came to ${(chapter * 9 + i + 1) * 1111:,}."
            for i, place in enumerate(PLACES)
        ]
        (source / f"chapter{chapter}.txt").write_text("\n\n".join(paragraphs))
    (source / "empty.md").write_text(" \n")
    return source


@pytest.fixture(scope="module")
def warm(documents, tmp_path_factory) -> pathlib.Path:
    """Make rows from a folder of texts and warm-start a policy; return the folder with both."""
    out = tmp_path_factory.mktemp("warm")
    arguments = [f"--source={documents}", f"--out={out}", "--vocab_size=400", "--rows=60"]
    write_files(*arguments, *SIZES)
    config = folder_warm_start.get_config()
    config.source, config.policy.tokenizer = str(out / "rows.jsonl"), str(out)
    config.steps, config.rows_per_step = 3, 8
    config.optimizer.warmup_steps = 1
    config.policy.width, config.policy.layers, config.policy.head_size = 32, 1, 8
    config.policy.feed_forward = 48
    config.packing.buckets, config.packing.token_budget = ((320, 160),), 640
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        supervised.fine_tune(config, out)
    return out


def folder_config(documents: pathlib.Path, warm: pathlib.Path, steps: int):
    config = folder.get_config()
    config.steps, config.validate_every, config.checkpoint_every = steps, 1, 1
    config.policy.folder = str(warm / "policy")
    config.data.source, config.data.validation = str(documents), str(warm / "questions.jsonl")
    config.data.max_document_tokens, config.data.held_out = 48, 0.3
    (
        config.algorithm.questions,
        config.algorithm.generation_batch,
        config.algorithm.max_generations,
    ) = 3, 6, 1
    config.algorithm.truncated = "score"  # random text seldom ends
    config.algorithm.group_size = config.algorithm.verifier.group_size = 4
    config.sampler.max_prompt, config.sampler.prefill_tokens = 320, 1280
    config.sampler.slots, config.sampler.max_tokens = 16, 6
    config.packing.buckets, config.packing.token_budget = ((384, 32),), 768
    return config


@pytest.mark.parametrize("meaning", [False, True], ids=["noise", "noise with a meaning"])
def test_run_on_a_folder_of_texts_trains_and_resumes(
    documents, warm, meaning, tmp_path, monkeypatch
):
    noise.use_one_device(monkeypatch)
    noise.skip_plots(monkeypatch)
    noise.share_programs(monkeypatch)
    if meaning:
        noise.give_meaning(monkeypatch)
    loop.train(folder_config(documents, warm, steps=2), tmp_path)
    loop.train(folder_config(documents, warm, steps=3), tmp_path)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert sum(line[f"rollout/{status}"] for status in STATUSES) == pytest.approx(1)
        assert 0 <= line["eval/all"] <= 1
    updated = [line for line in lines if not line["train/empty_update"]]
    assert bool(updated) == meaning
    assert all(line["train/sampler_difference"] < 1e-4 for line in updated)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest_step() == 3
    checkpoints.close()
    results = json.loads((tmp_path / "evaluation.json").read_text())
    assert results["after"]["responder accuracy (rule)"]["all"].keys() == {""}
    assert [step for step, _ in read_episodes(tmp_path)] == [1] * 6 + [2] * 6 + [3] * 6
