"""Tests of a run's initial weights: own checkpoint, another run's, a folder's, or random."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shutil

import jax
import numpy as np
import pytest
from etils import epath

from spell_jax.config import ExtraModelConfig, read, settle_dtypes
from spell_jax.policy import lora, products, transformer, weights
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import TINY_POLICY
from spell_jax.rollout import repliers
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.selfplay import prompts
from spell_jax.trainer import build, loop
from spell_jax.trainer import state as runs
from spell_jax.trainer.build import make_run
from tests import noise
from tests.paths import ROOT

STEPS = 2


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def other_run(policy, tmp_path_factory) -> epath.Path:
    """Return the folder of another run, with a checkpoint of each of its steps."""
    workdir = epath.Path(tmp_path_factory.mktemp("other"))
    run_to_end(
        noise.small_config(policy, steps=STEPS, checkpoint_every=1, validate_every=0), workdir
    )
    return workdir


def run_to_end(config, workdir) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        loop.train(config, workdir)


def begin(config, workdir) -> tuple[runs.States, int]:
    """Return (states, steps done) at the start of a run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        run = make_run(config)
        checkpoints = Checkpoints(workdir)
        states, step, *_ = runs.restore_or_init(run, checkpoints)
        checkpoints.close()
    return states, step


def test_host_state_is_read_from_the_json_of_this_version_and_earlier_ones() -> None:
    logs = {"metrics": ["{}"], "episodes": {"3": []}, "workdirs": ["/run"]}
    state = runs.HostState({"seed": 0}, {"memory": {}}, 0.5, **logs)
    assert runs.HostState.from_json(json.loads(json.dumps(state.to_json())), "here") == state
    # Of supervised tuning, which had no config, and from before the logs were saved.
    assert runs.HostState.from_json(logs, "here") == runs.HostState(**logs)
    earlier = {"config": {}, "algorithm": {}, "best": None}
    assert runs.HostState.from_json(earlier, "here", "algorithm") == runs.HostState(algorithm={})


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"algorithm": {}, "clock": 1}, r"here: host state has \['clock'\]: is of a later version"),
        ({"config": {}}, r"here: host state lacks \['algorithm'\]: must be a run of train\.py"),
        ({"algorithm": None}, r"here: host state lacks \['algorithm'\]: must be"),
    ],
)
def test_unknown_and_missing_fields_of_a_host_state_are_named(saved, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        runs.HostState.from_json(saved, "here", "algorithm")


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (None, "bfloat16"),
        ({"policy": {"compute_dtype": "float32"}}, "float32"),
        ({"policy": {"compute_dtype": "auto"}}, "bfloat16"),  # before dtypes were kept
        ({"policy": "?"}, "bfloat16"),
        ("{", "bfloat16"),
    ],
)
def test_auto_becomes_the_dtype_of_the_run_or_of_the_machine(
    before, expected: str, policy, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(products, "_multiplies_bfloat16", lambda: True)
    if before is not None:
        text = before if isinstance(before, str) else json.dumps(before)
        (tmp_path / "config.json").write_text(text)
    fields = {"policy.compute_dtype": "auto", "packing.buckets": "auto"}
    config = read(noise.small_config(policy, **fields))
    with caplog.at_level(logging.INFO, "spell_jax.config"):
        settled = settle_dtypes(config, epath.Path(tmp_path))
    assert settled.policy.compute_dtype == expected
    assert settled == dataclasses.replace(config, policy=settled.policy)
    message = "policy.compute_dtype = 'auto': float32, with which the run began"
    assert (message in caplog.text) == (expected == "float32")


def test_a_dtype_that_the_config_names_is_not_replaced(policy, tmp_path) -> None:
    """The run's dtype replaces "auto" alone, in the section of each model."""
    extra = ExtraModelConfig(folder="tiny", compute_dtype="auto")
    config = read(noise.small_config(policy, **{"policy.compute_dtype": "float32"}))
    config = dataclasses.replace(config, models={"reward_model": extra})
    names = ("policy", "reward_model")
    before = {name: {"compute_dtype": "bfloat16"} for name in names}
    (tmp_path / "config.json").write_text(json.dumps(before))
    settled = settle_dtypes(config, epath.Path(tmp_path))
    assert settled.policy.compute_dtype == "float32"
    assert settled.models["reward_model"].compute_dtype == "bfloat16"


@pytest.mark.parametrize(("template", "verdicts"), [("yes_no", [1, -1]), ("grades", [-1, 1])])
def test_judge_template_selects_prompt_and_parser(template, verdicts, monkeypatch) -> None:
    """The judge replies to both kinds of prompt, once in the words of each."""
    judge_prompts = []

    def endpoint(config):
        def ask(prompts):
            judge_prompts.extend(prompts)
            yield from enumerate(("[[YES]]", "A"))

        return ask

    monkeypatch.setattr(repliers, "Endpoint", endpoint)
    fields = {"rule": "judge", "judge_url": "http://x", "judge_model": "m"}
    config = noise.small_config(
        TINY_POLICY,
        **{f"algorithm.{name}": value for name, value in fields.items()},
        **{"algorithm.judge_template": template, "algorithm.prompts": "full"},
    )
    context = build.make_context(read(config), tokenizers.load(TINY_POLICY))
    items = [("q?", "said", "true"), ("q?", "other", "true")]
    assert context.judge is not None and context.judge(items) == verdicts
    write = {"yes_no": prompts.Prompts.judge, "grades": prompts.Prompts.judge_grades}[template]
    assert judge_prompts == [write(context.prompts, *item) for item in items]


def assert_equal(params, expected_params) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


@pytest.mark.slow
def test_initial_weights_follow_the_order_of_precedence(policy, other_run, tmp_path, caplog):
    """Sources of weights in order of precedence: each is present with all later ones."""
    caplog.set_level(logging.INFO, "spell_jax")
    folder, empty = tmp_path / "policy", tmp_path / "empty"
    shutil.copytree(policy, folder)
    config = noise.small_config(folder, init_from=str(other_run), steps=4)

    states, step = begin(config, other_run)
    assert step == STEPS and f"resumed at step {STEPS}" in caplog.text
    assert "steps = 4: was 2 when it was saved" in caplog.text
    assert f"init_from = '{other_run}': was '' when it was saved" in caplog.text
    last = states.params("policy")

    caplog.clear()
    states, step = begin(config, empty)
    assert step == 0 and f"the weights of {other_run}, step {STEPS} (init_from)" in caplog.text
    assert_equal(states.params("policy"), last)
    assert_equal(states.frozen["reference_reader"], last)
    assert not any(np.any(x) for x in jax.tree.leaves(states.trained["policy"].opt_state))

    caplog.clear()
    config.init_from = ""
    states, step = begin(config, empty)
    assert step == 0 and f"begins with the weights of {folder}" in caplog.text
    first = weights.load(folder)[1]
    assert_equal(states.params("policy"), first)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True))

    caplog.clear()
    (folder / "model.safetensors").unlink()
    states, step = begin(config, empty)
    assert step == 0 and f"{folder} holds no weights: begins with random ones" in caplog.text
    shape = weights.read_config_and_tokenizer(folder)[0]
    initial = jax.jit(lambda: transformer.init(shape, jax.random.key(config.seed)))()
    assert_equal(states.params("policy"), initial)


def test_init_from_can_name_a_step_of_another_run(policy, other_run, tmp_path):
    step = other_run / "checkpoints" / "1"
    states, _ = begin(noise.small_config(policy, init_from=str(step)), tmp_path)
    one_device = meshes.make_mesh(None, jax.devices()[:1])
    _, expected_params = runs.read_weights(
        other_run, weights.read_config_and_tokenizer(policy)[0], one_device, step=1
    )
    assert_equal(states.params("policy"), expected_params)


@pytest.mark.parametrize("name", ["nowhere", "other/checkpoints/7", ""])
def test_init_from_without_a_run_is_rejected(name, policy, other_run, tmp_path):
    path = str(tmp_path / name).replace(str(tmp_path / "other"), str(other_run))
    with pytest.raises(ValueError, match=r"init_from = .*: must be a run's folder"):
        make_run(noise.small_config(policy, init_from=path))


def test_init_from_a_run_of_another_shape_is_rejected(policy, other_run, tmp_path):
    config = noise.small_config(pathlib.Path("tiny"), init_from=str(other_run))
    message = r"^policy\.folder = 'tiny': was '.*/noise' in the run of .* do not fit; must be"
    with pytest.raises(ValueError, match=message):
        begin(config, tmp_path)


@pytest.mark.slow
def test_init_from_also_loads_adapters(policy, tmp_path):
    adapters = {"policy.lora_rank": 2, "checkpoint_every": 1, "validate_every": 0, "steps": 1}
    run_to_end(noise.small_config(policy, **adapters), tmp_path / "first")
    config = noise.small_config(policy, init_from=str(tmp_path / "first"), **adapters)
    states, _ = begin(config, tmp_path / "second")
    first_states, _ = begin(config, tmp_path / "first")
    assert_equal(states.params("policy"), first_states.params("policy"))
    b = lora.split(make_run(config).policy, states.params("policy"))[0]["layers"]["attention"]
    assert np.any(b["q_lora_b"]), "adapters that do nothing are easily the same"


@pytest.mark.parametrize("field", ["questions", "validation"])
def test_answers_that_can_never_score_are_named_at_start(field, tmp_path, caplog):
    path = tmp_path / "questions.jsonl"
    good = '{"question": "Who?", "answer": "Ann", "task": "general_qa", "documents": ["Ann."]}\n'
    path.write_text(good + (ROOT / "tests" / "cases" / "references.jsonl").read_text())
    (tmp_path / "a.txt").write_text("One text.")
    config = read(noise.small_config(TINY_POLICY, **{"data.source": str(tmp_path)}))
    data = dataclasses.replace(config.data, **{field: str(path)})
    config = dataclasses.replace(config, data=data)
    context = build.make_context(config, tokenizers.load(TINY_POLICY))
    if field == "questions":
        assert [question.answer for question in context.questions()] == ["Ann"]
    else:
        build.make_algorithm(config, context)
    for line in range(2, 8):
        assert f"{path}:{line}: skipped (answer = " in caplog.text
    assert f"data.{field} = {path}: 1 questions, 6 lines skipped" in caplog.text
