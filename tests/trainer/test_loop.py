"""Tests of the trainer on a tiny policy: files of a run, and equality of resumed runs."""

from __future__ import annotations

import functools
import gc
import json
import math
import pathlib

import jax
import numpy as np
import pytest
from absl import logging as absl_logging

from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.learner import packing
from spell_jax.learner.non_finite import NonFinite
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.rollout import repliers
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.entry import EndedError
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.files.paths import CHECKPOINTS_FOLDER
from spell_jax.runtime.files.workdir_lock import FILE, locked
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.selfplay.verdicts import UNANSWERED
from spell_jax.trainer import build, loop
from tests import metric_names, noise

absl_logging.set_verbosity(absl_logging.WARNING)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


class Finished:
    """A finished run: its folder, its parts, and the number of traces of each program by step.

    By default it uses one of the fake devices, which is faster than all, reads the random texts by
    their checksums (noise.give_meaning), and shares compiled programs with other runs. With `alone`
    it compiles its own programs and draws plots.
    """

    def __init__(
        self,
        config,
        workdir: pathlib.Path,
        devices: int = 1,
        meaning: bool = True,
        alone: bool = False,
    ):
        self.workdir = workdir
        self.traces: list[dict[str, int]] = []
        self.spared: list[int] = []  # objects exempt from garbage collection, by step
        with pytest.MonkeyPatch.context() as monkeypatch:
            if devices == 1:
                noise.use_one_device(monkeypatch)
            if meaning:
                noise.give_meaning(monkeypatch)
            if not alone:
                noise.skip_plots(monkeypatch)
                noise.share_programs(monkeypatch)
            make_run = loop.make_run
            monkeypatch.setattr(loop, "make_run", lambda c: self._keep(make_run(c)))
            monkeypatch.setattr(packing, "count_answers", self._count)
            loop.train(config, workdir)

    def _keep(self, run: loop.Run) -> loop.Run:
        self.run, begin = run, run.worker.start_step
        self.begun: list[int] = []
        run.worker.start_step = lambda *args: (self.begun.append(args[0]), begin(*args))[1]
        return run

    def _count(self, rows):
        """Record cache sizes and the freeze count, once per step, after the step's update."""
        assert not self.run.worker._params, "the copy of the rollout takes memory"
        sampler, learner = self.run.worker.sampler, self.run.learner
        programs = {
            "prefill": sampler.prefill,
            "decode": sampler.decode,
            "accumulate": learner.fns.accumulate,
            "apply": learner.fns.apply,
        }
        self.traces.append({name: f._cache_size() for name, f in programs.items()})
        self.spared.append(gc.get_freeze_count())
        return COUNT_ANSWERS(rows)

    def metrics(self) -> list[dict]:
        return list(map(noise.steady, read_metrics(self.workdir)))

    def checkpoint(self, *copies: str) -> tuple[dict, dict]:
        """Return (arrays, host state) of the last checkpoint."""
        checkpoints = Checkpoints(self.workdir)
        names = (*self.run.algorithm.model_names, *copies)
        abstract = self.run.learner.fns.abstract_state
        target = {"policy": abstract} | dict.fromkeys(names, abstract.params)
        step = checkpoints.latest_step()
        assert step is not None
        arrays, host_state = checkpoints.restore(step, target)
        checkpoints.close()
        return arrays, host_state


COUNT_ANSWERS = packing.count_answers


@pytest.fixture(scope="module")
def uninterrupted_run(policy, tmp_path_factory) -> Finished:
    """Run four steps without interruption; evaluate the run and profile the last step."""
    config = noise.small_config(policy, steps=4, evaluate=True, profile_steps=(4,))
    return Finished(config, tmp_path_factory.mktemp("whole"), alone=True)


@pytest.fixture(scope="module")
def resumed(policy, tmp_path_factory) -> Finished:
    """Run two steps, and two more steps from the checkpoint of the first two."""
    workdir = tmp_path_factory.mktemp("resumed")
    Finished(noise.small_config(policy, steps=2), workdir)
    return Finished(noise.small_config(policy, steps=4), workdir)


def test_run_writes_all_its_files(uninterrupted_run):
    folder = uninterrupted_run.workdir
    assert [line["step"] for line in uninterrupted_run.metrics()] == [1, 2, 3, 4]
    assert sorted(p.name for p in (folder / "episodes").iterdir()) == [
        f"step_00000{step}.jsonl.gz" for step in range(1, 5)
    ]
    episodes = [episode for step, episode in read_episodes(folder) if step == 2]
    assert len(episodes) in (9, 18)
    assert {"task", "question", "scores", "documents"} <= episodes[0].keys()
    assert list((folder / "tensorboard").glob("events*"))
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [2, 4]
    assert (folder / "best" / "model.safetensors").is_file()
    assert {
        "held_out_accuracy.png",
        "evaluation_responder_accuracy_by_documents.png",
        "solve_rate.png",
        "seconds_a_step_by_phase.png",
    } <= {p.name for p in (folder / "plots").iterdir()}
    (start,) = json.loads((folder / "run.json").read_text())["starts"]
    assert start["step"] == 0
    results = json.loads((folder / "evaluation.json").read_text())
    assert results.keys() == {"before", "after", "validation"}
    accuracy, questions = results["validation"]["eval/responder"]
    assert 0 <= accuracy <= 1 and questions == 4  # one of each kind
    assert results["validation"].keys() == {
        name
        for line in read_metrics(folder)
        for name in line
        if name.startswith("eval/") and not name.startswith("eval/truncated")
    }
    assert "verifier accuracy, by pair" in results["after"]
    cut = results["after"]["replies truncated at their cap"]["share"]
    assert cut.keys() == {"questioner", "responder", "verifier"}
    assert cut["responder"][0] > 0.5  # random text seldom ends
    assert json.loads((folder / "config.json").read_text())["algorithm"]["group_size"] == 4


def test_policy_folder_holds_the_last_weights(uninterrupted_run, policy):
    shape, saved = weights.load(uninterrupted_run.workdir / "policy")
    arrays, _ = uninterrupted_run.checkpoint()
    jax.tree.map(np.testing.assert_array_equal, saved, arrays["policy"].params)
    first_shape, first = weights.load(policy)
    assert shape == first_shape
    assert (saved["embedding"] != first["embedding"]).any()
    before, after = tokenizers.load(policy), tokenizers.load(uninterrupted_run.workdir / "policy")
    assert before.encode("- Arvo city Oslo") == after.encode("- Arvo city Oslo")


def test_metrics_report_rollouts_and_updates(uninterrupted_run):
    lines = uninterrupted_run.metrics()
    updates = [line for line in lines if not line["train/empty_update"]]
    assert len(updates) >= 3
    roles = {f"train/rows/{role}" for role in ("responder", "questioner", "verifier")}
    assert roles <= {name for line in updates for name in line}
    for line in updates:
        assert line["train/gradient_norm"] > 0 and line["train/skipped_update"] == 0
        # Sampler and learner agree on the logprob of sampled tokens.
        assert line["train/sampler_difference"] < 1e-4
    assert all(line["rollout/accepted"] + line["rollout/bad_format"] <= 1 for line in lines)
    assert ["eval/responder" in line for line in lines] == [False, True, False, True]


def test_every_metric_is_documented(uninterrupted_run):
    """Every metric is in the docs; the run has every documented metric of a used feature."""
    written = {name for line in read_metrics(uninterrupted_run.workdir) for name in line} - {"step"}
    unknown, unused = metric_names.compare(written)
    assert not unknown
    expected_unused = {
        "train/kl",
        "train/teacher_kl",
        "rollout/named_document[/TASK]",
        "eval/F1",
        "train/router_max_load",
        "train/router_idle",
        "train/router_difference",
        "time/mfu",
        "time/seconds/tune",
        "process/device_mib",
        "process/device_peak_mib",
        "non_finite",
    }
    # Of mesh.rollout_devices; tests/trainer/test_split_rollouts.py reads them.
    expected_unused |= {f"time/idle/{mesh}" for mesh in ("training", "sampling")}
    expected_unused |= {"time/seconds/transfer", "time/sampling_seconds/AGENT"}
    expected_unused |= {"time/sampling_seconds/rollout"}
    other_metrics = metric_names.OF_OTHER_ALGORITHMS | metric_names.OF_OTHER_MODELS
    assert unused - other_metrics == expected_unused and unused >= metric_names.OF_OTHER_MODELS


def test_phase_times_sum_to_the_step_time(uninterrupted_run):
    for line in read_metrics(uninterrupted_run.workdir):
        parts = {n: v for n, v in line.items() if n.startswith("time/seconds/")}
        assert sum(parts.values()) == pytest.approx(line["time/step_seconds"])
        assert all(seconds >= 0 for seconds in parts.values())
        assert parts["time/seconds/questioner"] > 0 and parts["time/seconds/rollout"] > 0
        assert line["time/tokens_per_second/sampled"] > 0 < line["time/tokens_per_second/prefilled"]


def test_every_step_has_its_own_random_key(uninterrupted_run):
    """Every evaluation uses the keys of step 0, so that it never disturbs the steps."""
    assert uninterrupted_run.begun == [0, 0, 1, 2, 0, 3, 4, 0, 0]


def test_nothing_compiles_after_the_first_full_step(uninterrupted_run):
    updates = [
        i for i, line in enumerate(uninterrupted_run.metrics()) if not line["train/empty_update"]
    ]
    first = uninterrupted_run.traces[updates[0]]
    assert first["prefill"] == first["accumulate"] == first["apply"] == 1
    assert first["decode"] == 2  # for questions, and for answers to a prompt, however many
    assert len(uninterrupted_run.traces) == 4 and updates[0] < 3
    assert all(traces == first for traces in uninterrupted_run.traces[updates[0] :])


def test_long_lived_objects_are_spared_by_the_garbage_collector_until_the_run_ends(
    uninterrupted_run,
):
    assert min(uninterrupted_run.spared) > 100_000, "modules and traced programs"
    assert gc.get_freeze_count() == 0


def test_resumed_run_is_bit_identical(uninterrupted_run, resumed):
    assert resumed.metrics() == uninterrupted_run.metrics()
    for step in range(1, 5):
        name = f"episodes/step_00000{step}.jsonl.gz"
        assert (resumed.workdir / name).read_bytes() == (
            uninterrupted_run.workdir / name
        ).read_bytes()
    model, saved = "policy/model.safetensors", (resumed.workdir, uninterrupted_run.workdir)
    assert len({(folder / model).read_bytes() for folder in saved}) == 1
    (arrays, state), (other_arrays, other_state) = (
        uninterrupted_run.checkpoint(),
        resumed.checkpoint(),
    )
    jax.tree.map(np.testing.assert_array_equal, arrays, other_arrays)
    for name in ("algorithm", "best"):
        assert state[name] == other_state[name]
    assert state["algorithm"]["memory"]["clusters"], (
        "a memory that holds nothing is easily the same"
    )


def test_checkpoint_holds_the_frozen_reader(uninterrupted_run, policy):
    arrays, _ = uninterrupted_run.checkpoint()
    _, first = weights.load(policy)
    jax.tree.map(np.testing.assert_array_equal, arrays["reference_reader"], first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("seed", 1, r"seed = 1: must be 0"), ("steps", 3, r"steps = 3: must be at least 4")],
)
def test_resume_with_a_changed_seed_or_fewer_steps_is_rejected(
    field, value, message, resumed, policy
):
    with pytest.raises(ValueError, match=message):
        Finished(noise.small_config(policy, **({"steps": 4} | {field: value})), resumed.workdir)


def test_best_policy_by_validation_is_kept(uninterrupted_run, policy):
    """The best policy is kept even if a later one is worse."""
    scores = [
        line["eval/responder"] for line in uninterrupted_run.metrics() if "eval/responder" in line
    ]
    _, state = uninterrupted_run.checkpoint()
    assert state["best"] == max(scores)
    _, best_params = weights.load(uninterrupted_run.workdir / "best")
    _, last = weights.load(uninterrupted_run.workdir / "policy")
    is_last = scores[1] > scores[0]
    assert (best_params["embedding"] == last["embedding"]).all() == is_last


def test_finished_run_is_not_changed_by_a_restart(resumed, policy):
    before = resumed.metrics()
    restarted_run = Finished(noise.small_config(policy, steps=4), resumed.workdir)
    assert restarted_run.traces == [] and restarted_run.metrics() == before


@pytest.mark.slow
def test_untrained_policy_makes_empty_updates_until_time_is_up(policy, tmp_path):
    """The policy is untrained, so no question is accepted, and the run continues."""
    config = noise.small_config(policy, steps=100_000, max_minutes=0.02, validate_every=0)
    run = Finished(config, tmp_path, meaning=False, alone=True)
    lines = run.metrics()
    assert 1 <= len(lines) < 100_000
    assert all(line["train/empty_update"] == 1 for line in lines)
    assert all(line["rollout/bad_format"] + line["rollout/declined"] == 1 for line in lines)
    arrays, _ = run.checkpoint()
    _, first = weights.load(policy)
    jax.tree.map(np.testing.assert_array_equal, arrays["policy"].params, first)
    assert int(arrays["policy"].step) == 0
    assert Checkpoints(tmp_path).latest_step() == len(lines)
    assert (tmp_path / "policy" / "model.safetensors").is_file()
    assert (tmp_path / "plots" / "seconds_a_step_by_phase.png").is_file()


@pytest.mark.slow
def test_kl_reference_and_refreshed_reader_resume_from_checkpoint(policy, tmp_path):
    options = {"loss.kl_weight": 0.5, "algorithm.reader.refresh": 2, "validate_every": 0}
    first = Finished(noise.small_config(policy, steps=2, **options), tmp_path)
    run = Finished(noise.small_config(policy, steps=4, **options), tmp_path)
    _, initial_params = weights.load(policy)
    updates = [line for line in run.metrics() if not line["train/empty_update"]]
    # Against itself a policy has no divergence; later it has.
    assert updates[0]["train/kl"] == pytest.approx(0, abs=1e-7)
    assert updates[-1]["train/kl"] > 1e-6
    assert first.traces[-1]["accumulate"] == run.traces[-1]["accumulate"] == 1
    arrays, _ = run.checkpoint("reference")
    jax.tree.map(np.testing.assert_array_equal, arrays["reference"], initial_params)
    # Refreshed after step 4, so that it is the policy of that step.
    jax.tree.map(np.testing.assert_array_equal, arrays["reference_reader"], arrays["policy"].params)
    assert (arrays["reference_reader"]["embedding"] != initial_params["embedding"]).any()


@pytest.mark.slow
def test_step_on_eight_devices_equals_one_device(policy, tmp_path):
    """Parameters and the frozen reader are sharded four ways over fsdp and two over tensor."""
    options = {"mesh.fsdp": 4, "mesh.tensor": 2, "validate_every": 0, "steps": 1}
    run = Finished(noise.small_config(policy, **options), tmp_path / "8", devices=8)
    assert run.run.learner.mesh.shape["fsdp"] == 4
    one_device_run = Finished(noise.small_config(policy, validate_every=0, steps=1), tmp_path / "1")
    assert list(read_episodes(tmp_path / "8")) == list(read_episodes(tmp_path / "1"))
    line, expected_line = (
        {name: value for name, value in line.items() if "/sampler/" not in name}  # its fill level
        for line in (*run.metrics(), *one_device_run.metrics())
    )
    assert not line["train/empty_update"]
    assert line == pytest.approx(expected_line, abs=1e-4)
    (arrays, _), (expected_arrays, _) = run.checkpoint(), one_device_run.checkpoint()
    moved = expected_arrays["policy"].params["embedding"] - weights.load(policy)[1]["embedding"]
    assert abs(moved).max() > 1e-4
    equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    jax.tree.map(equal, arrays["policy"].params, expected_arrays["policy"].params)
    places = [
        model["layers"]["mlp"]["up_kernel"].sharding
        for model in (arrays["reference_reader"], arrays["policy"].params)
    ]
    assert (
        places[0] == places[1] == run.run.learner.fns.param_shardings["layers"]["mlp"]["up_kernel"]
    )
    assert run.traces[-1]["accumulate"] == run.traces[-1]["apply"] == 1
    placed = run.run.learner.fns.param_shardings["layers"]["mlp"]["up_kernel"]
    assert set(placed.spec) >= {meshes.EMBED, "tensor"}
    assert (weights.load(tmp_path / "8" / "policy")[1]["embedding"]).shape[1] == 32


@pytest.mark.slow
def test_rollout_may_overlap_previous_update(policy, tmp_path):
    options = {"staleness": 1, "loss.tis_cap": 2.0, "checkpoint_every": 3}
    run = Finished(noise.small_config(policy, steps=5, **options), tmp_path / "whole")
    assert [step for step in run.begun if step] == [1, 2, 3, 4, 5]
    lines = run.metrics()
    updated = [not line["train/empty_update"] for line in lines]
    assert all(updated[:2]) and updated[3]
    differences = [line.get("train/sampler_difference", 0.0) for line in lines]
    # Rollouts of steps 2, 3 and 5 use the weights before the update of the step before. The first,
    # and those after a checkpoint, use the newest weights.
    assert differences[0] < 1e-4 and differences[3] < 1e-4
    assert differences[1] > 1e-3 and (differences[4] > 1e-3 or not updated[4])
    Finished(noise.small_config(policy, steps=3, **options), tmp_path / "resumed")
    resumed = Finished(noise.small_config(policy, steps=5, **options), tmp_path / "resumed")
    assert resumed.metrics() == lines
    (arrays, state), (expected_arrays, expected_state) = resumed.checkpoint(), run.checkpoint()
    jax.tree.map(np.testing.assert_array_equal, arrays, expected_arrays)
    for name in ("algorithm", "best"):
        assert state[name] == expected_state[name]


@pytest.mark.slow
def test_rows_of_non_finite_updates_are_written(policy, tmp_path, monkeypatch):
    noise.lose_numbers(monkeypatch)
    config = noise.small_config(policy, validate_every=0, **{"optimizer.max_skipped": 2})
    with pytest.raises(NonFinite, match="2 updates in a row") as error:
        Finished(config, tmp_path, alone=True)
    path = tmp_path / "non_finite" / "2.jsonl"
    assert str(path) in error.value.__notes__[0]
    roles = {json.loads(line)["role"] for line in path.read_text().splitlines()}
    assert roles == {"responder", "questioner", "verifier"}
    (line,) = read_metrics(tmp_path)
    assert line["train/skipped_update"] == 1 and line["train/skipped_in_a_row"] == 1


def test_chosen_step_is_profiled(uninterrupted_run):
    """The chosen step is profiled although it is the last one."""
    assert len(list((uninterrupted_run.workdir / "profile").rglob("*.xplane.pb"))) == 1


BAD = [
    ("staleness", -1),
    ("staleness", 2),  # without mesh.rollout_devices
    ("loss.tis_cap", 0.5),
    ("seed", -1),
    ("steps", 0),
    ("validate_every", -1),
    ("checkpoint_every", 0),
    ("keep_checkpoints", 0),
    ("episode_characters", -1),
    ("max_minutes", -1.0),
    ("max_minutes", math.nan),
    ("profile_steps", (0,)),
    ("profile_steps", ("a",)),
    ("policy.folder", "no/such/folder"),
    ("policy.folder", ""),
    ("policy.compute_dtype", "float99"),
    ("policy.remat", "some"),
    ("data.source", "no/such/folder"),
    ("data.tasks", ("poetry",)),
    ("data.task_weights", (1.0,)),
    ("data.task_weights", ("a", 1.0, 1.0)),
    ("data.validation", "questions.jsonl"),
    ("data.held_out", 1.5),
    ("data.grouping", "magic"),
    ("data.documents_per_cluster", 0),
    ("data.max_document_tokens", 0),
    ("data.tiny.clusters", 0),
    ("data.tiny.documents", (0,)),
    ("data.tiny.documents", (2.5,)),
    ("data.tiny.evaluation.per_cell", 0),
    ("data.tiny.evaluation.documents", (1,)),
    ("algorithm.name", "chess"),
    ("algorithm.prompts", "no/such/folder"),
    ("algorithm.group_size", 1),
    ("algorithm.questioner.mapping", "linear"),
    ("algorithm.questioner.sigma", math.nan),
    ("algorithm.questioner.negatives", math.inf),
    ("algorithm.questioner.memory_documents", "all"),
    ("sampler.top_p", 0.0),
    ("sampler.kv_cache_tokens", 64),
    ("optimizer.learning_rate", -1.0),
    ("optimizer.schedule", "zigzag"),
    ("loss.aggregation", "median"),
    ("loss.kl_weight", -1.0),
    ("packing.buckets", ((64,),)),
    ("packing.buckets", ((10, 20),)),
    ("packing.token_budget", 1),
    ("mesh.tensor", 3),
]


@pytest.fixture(scope="module")
def shapes(policy) -> None:
    """Build a run once: the policy's shapes are found with a key and then kept."""
    loop.make_run(noise.small_config(policy))


@pytest.mark.usefixtures("shapes")
@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda x: str(x))
def test_invalid_value_is_named_before_any_device_work(field, value, policy, monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError("a device was touched")

    monkeypatch.setattr(jax, "device_put", touched)
    monkeypatch.setattr(jax.random, "key", touched)
    monkeypatch.setattr("spell_jax.learner.learner.Learner.init", touched)
    config = noise.small_config(policy, **{field: value})
    section = field.partition(".")[0] if field.startswith("mesh") else field
    with pytest.raises((ValueError, FileNotFoundError)) as failure:
        loop.make_run(config)
    message = str(failure.value)
    assert section in message
    assert str(value[0] if isinstance(value, tuple) else value) in message


@pytest.mark.parametrize("rule", ["judge", "match_or_judge"])
def test_judge_needs_a_url_and_a_model(rule, policy, monkeypatch):
    judge = {"algorithm.rule": rule}
    with pytest.raises(ValueError, match=rf"algorithm\.judge_url = '': .* = '{rule}'"):
        loop.make_run(noise.small_config(policy, **judge))
    judge["algorithm.judge_url"] = "http://localhost:1/v1"
    with pytest.raises(ValueError, match=r"algorithm\.judge_model = ''"):
        loop.make_run(noise.small_config(policy, **judge))
    monkeypatch.setenv("SPELL_JUDGE_KEY", "secret")
    endpoints = []
    monkeypatch.setattr(repliers, "Endpoint", lambda config: endpoints.append(config))
    run = loop.make_run(noise.small_config(policy, **judge, **{"algorithm.judge_model": "m"}))
    (config,) = endpoints
    assert (config.api_key, config.model) == ("secret", "m")
    assert "secret" not in str(run.config)


@pytest.mark.parametrize("field", ["judge_url", "judge_model"])
def test_judge_without_a_rule_that_asks_it_is_refused(field, policy):
    config = noise.small_config(policy, **{f"algorithm.{field}": "http://localhost:1/v1"})
    with pytest.raises(
        ValueError, match=rf"algorithm\.{field} = 'http.*: must be '' for .*'match'"
    ):
        loop.make_run(config)


@pytest.mark.slow
def test_run_without_any_verdict_is_saved_and_ends(policy, tmp_path, monkeypatch):
    judge = {"rule": "judge", "judge_url": "http://localhost:1/v1", "judge_model": "m"}
    config = noise.small_config(policy, **{f"algorithm.{k}": v for k, v in judge.items()})
    monkeypatch.setattr(build, "_make_judge", lambda *_: lambda items: [UNANSWERED] * len(items))
    message = r"^step 1: the judge gave no verdict on any of \d+ answers.*judge_template.*Step 0 is"
    with pytest.raises(EndedError, match=message):
        Finished(config, tmp_path)
    assert (tmp_path / CHECKPOINTS_FOLDER / "0").is_dir()


def test_policy_that_is_too_short_names_the_fields(policy):
    config = noise.small_config(policy, **{"sampler.max_prompt": 250, "sampler.max_tokens": 24})
    message = (
        r"^sampler\.max_prompt = 250, sampler\.max_tokens = 24: .* 274 tokens together, must be at "
        r"most the policy's max_position_embeddings = 256 "
    )
    with pytest.raises(ValueError, match=message):
        loop.make_run(config)


def test_prompt_cap_leaves_room_for_the_chat_layout(policy):
    run = loop.make_run(noise.small_config(policy))
    assert isinstance(run.algorithm, Spell)
    assert run.learner.spec.group_names == ("questioner", "responder", "verifier")
    # Two tokens of a prompt's room are the chat layout's.
    assert run.algorithm.questioner._cap == 128 - len(run.tokenizer.chat("")) == 126
    assert len(run.tokenizer.chat("x" * 5)) == len(run.tokenizer.encode("x" * 5)) + 2


def test_workdir_in_use_is_refused_and_not_touched(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_run", lambda config: None)
    with (
        locked(tmp_path),
        pytest.raises(ValueError, match=r"^workdir = .*: is in use by pid"),
    ):
        loop.train(noise.small_config(policy), tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_run_holds_the_lock_until_it_ends(policy, tmp_path, monkeypatch):
    held: list[bool] = []

    class Restored(Exception):
        pass

    def restore(*_):
        held.append((tmp_path / FILE).exists())
        raise Restored

    monkeypatch.setattr(loop.state, "restore_or_init", restore)
    with pytest.raises(Restored):
        loop.train(noise.small_config(policy), tmp_path)
    assert held == [True] and not (tmp_path / FILE).exists()
