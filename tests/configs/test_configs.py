"""Tests that every config loads and builds, and that every ablation runs a step."""

from __future__ import annotations

import builtins
import importlib
import io
import itertools
import json
import pathlib
import re
import sys
from typing import Any

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from spell_jax.algorithms import registry
from spell_jax.algorithms.base import make_record
from spell_jax.algorithms.reconstruction.algorithm import ReconstructionConfig
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.config import collect_mistakes, default_config, read, read_supervised
from spell_jax.configs import documents, eapo, folder, paper, real, reconstruction, rlvr, tiny
from spell_jax.evaluation.answering import EvaluationSampling
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.learner.packing import PackingConfig
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import TINY_POLICY
from spell_jax.question_sets import facts, tiny_world_rows
from spell_jax.runtime.config import ConfigError, build, flat, plain
from spell_jax.selfplay import prompts
from spell_jax.trainer import supervised
from spell_jax.trainer.build import make_algorithm, make_context, make_run
from tests import doc_commands, noise
from tests.algorithms.scripted import ScriptedModels
from tests.evaluation.oracle import perfect
from tests.paths import ROOT

FOLDER = ROOT / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def load(name: str) -> tuple[Any, ConfigDict]:
    module = importlib.import_module(f"spell_jax.configs.{name}")
    return module, module.get_config()


def has_algorithm(name: str) -> bool:
    return "algorithm" in load(name)[1]


PAPERS = {"paper", "paper_code", "eapo", "eapo_code", "reconstruction", "qwenlong", "longpo"}
PAPERS |= {"solopo", "rlvr"}


@pytest.mark.parametrize("name", [name for name in NAMES if has_algorithm(name)])
def test_answers_are_read_leniently_unless_a_config_claims_to_be_a_papers(name):
    assert load(name)[1].algorithm.extract == ("paper" if name in PAPERS else "lenient")


@pytest.mark.parametrize("name", [name for name in NAMES if has_algorithm(name)])
def test_run_config_loads_and_builds(name, tmp_path, monkeypatch):
    noise.use_one_device(monkeypatch)
    _, config = load(name)
    noise.give_data(config, tmp_path)
    read(config)
    folder = config.policy.folder
    if folder == "tiny" or pathlib.Path(folder, "config.json").exists():
        make_run(config)
    else:  # everything but the policy was checked before
        with pytest.raises((ValueError, FileNotFoundError), match=r"policy\.folder = "):
            make_run(config)


@pytest.mark.parametrize("name", [name for name in NAMES if not has_algorithm(name)])
def test_warm_start_config_loads_and_builds(name, monkeypatch):
    noise.use_one_device(monkeypatch)
    _, config = load(name)
    settings = read_supervised(config)
    policy = settings.policy.architecture(settings.policy.vocab_size)
    learner = supervised.make_learner(settings, policy)
    for bucket in learner.packing.listed:
        assert bucket.length <= policy.max_positions
    prompts.load(config.prompts)


def test_no_file_is_opened_until_a_run_is_made(read_flags, monkeypatch):
    read_flags("--config=configs/tiny.py")  # imports what config files import

    def refuse(path, *_, **__):
        assert str(path).endswith((".py", ".pyc")), f"{path} was opened"
        return opening(path, *_, **__)

    opening = io.open
    for module in (builtins, io):
        monkeypatch.setattr(module, "open", refuse)
    with pytest.raises(AssertionError, match="was opened"):
        prompts.load("full")
    for algorithm in registry.ALGORITHMS.values():
        default_config(algorithm.config().name)
    for name in NAMES:
        load(name)
    config = read_flags("--config=configs/tiny.py", "--config.algorithm.prompts=no/such")
    run = read(config)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^algorithm\.prompts = 'no/such': .* or a folder$"):
        make_context(run, tokenizers.load(TINY_POLICY))


def test_all_mistakes_are_raised_at_once():
    run, warm_start = load("tiny")[1], load("tiny_warm_start")[1]
    mistakes = {"checkpoint_every": 0, "optimizer.b1": 2.0, "packing.token_budget": 1}
    for config, read_config in ((run, read), (warm_start, read_supervised)):
        with pytest.raises(ConfigError) as raised:
            read_config(noise.with_fields(config, mistakes))
        lines = raised.value.mistakes
        assert sorted(line.split(" = ")[0] for line in lines) == sorted(mistakes)
        assert str(raised.value) == "\n".join(lines)


def test_missing_questions_do_not_end_the_search():
    fields = {"data.questions": "", "staleness": 1, "loss.old_logprobs": "on_policy"}
    run, mistakes = collect_mistakes(noise.with_fields(load("eapo")[1], fields))
    assert run and {"data.questions", "loss.old_logprobs"} <= mistakes.keys()


def test_unknown_algorithm_does_not_end_the_search():
    fields = {"algorithm.name": "no_such", "steps": 0, "sampler.top_p": 3.0}
    run, mistakes = collect_mistakes(noise.with_fields(load("tiny")[1], fields))
    assert run and mistakes.keys() == fields.keys()


def test_mistakes_of_the_rotary_embedding_hide_no_others():
    config = noise.with_fields(
        load("tiny_warm_start")[1], {"policy.rope.theta": -1.0, "steps": None, "log_every": 0}
    )
    with pytest.raises(ConfigError) as raised:
        read_supervised(config)
    assert sorted(line.split(" = ")[0] for line in raised.value.mistakes) == [
        "log_every",
        "policy.rope.theta",
        "steps",
    ]


def test_mistakes_of_an_extra_model_are_named_by_its_section():
    config = load("tiny_eapo")[1]
    values = {"remat": "x", "groups_per_update": -1, "optimizer.b1": 2.0, "no_such": 1}
    values["compute_dtype"] = "x"  # without this field the section is no model
    noise.with_fields(config, {f"reward_model.{name}": value for name, value in values.items()})
    mistakes = collect_mistakes(config)[1]
    assert {*mistakes} - {"data.questions", "data.validation"} == {
        f"reward_model.{name}" for name in values
    }


@pytest.mark.parametrize("name", NAMES)
def test_config_docstring_gives_the_command(name):
    module, config = load(name)
    entry = "train" if "algorithm" in config else "sft"
    assert f"python -m spell_jax.{entry} --config=configs/{name}.py" in module.__doc__
    assert "--workdir=" in module.__doc__


@pytest.fixture
def read_flags(monkeypatch):
    """Return a function that parses a config from a command line as an entry point does."""

    def parse(*arguments: str) -> ConfigDict:
        monkeypatch.setattr(sys, "argv", ["entry", *arguments])
        values = flags.FlagValues()
        config_flags.DEFINE_config_file("config", flag_values=values)
        values(sys.argv)
        return values["config"].value

    return parse


def test_flags_override_any_field_of_a_locked_config(read_flags):
    tiny_file = "--config=configs/tiny.py"
    config = read_flags(
        tiny_file,
        "--config.algorithm.group_size=4",
        "--config.algorithm.questioner.documents=(2,3)",
        "--config.policy.folder=runs/x",
    )
    assert (config.algorithm.group_size, config.algorithm.questioner.documents) == (4, (2, 3))
    assert config.policy.folder == "runs/x" and config.is_locked
    with pytest.raises(AttributeError, match="group_sice"):
        read_flags(tiny_file, "--config.algorithm.group_sice=4")
    with pytest.raises(flags.IllegalFlagValueError, match=r"config\.steps=many"):
        read_flags(tiny_file, "--config.steps=many")


@pytest.mark.parametrize("config", [paper.get_config("qwen2.5-7b-instruct"), rlvr.get_config()])
def test_paper_configs_hold_out_no_clusters(config):
    assert config.data.held_out == 0.0


def test_folder_config_has_the_clusters_of_its_warm_start_rows():
    flag_values = flags.FlagValues()
    facts.define_flags(flag_values)
    flag_values(["facts", "--source=texts", "--out=rows"])
    data = folder.get_config().data
    for name in ("max_document_tokens", "documents_per_cluster", "grouping", "held_out"):
        assert data[name] == getattr(flag_values, name)
    assert data.held_out == 0.05


def test_documents_config_has_the_clusters_and_sizes_that_its_page_makes():
    """The page's commands hold out the same clusters, and make them for the run's prompts."""
    page = ROOT / "docs" / "howto" / "real_model.md"
    commands = {c.words[2]: c.words[3:] for c in doc_commands.find(page) if c.words[1] == "-m"}
    config, flag_values = documents.get_config(), flags.FlagValues()
    facts.define_flags(flag_values)
    flag_values(["facts", *commands["spell_jax.question_sets.facts"]])
    for name in ("max_document_tokens", "held_out", "source"):
        assert config.data[name] == getattr(flag_values, name)
    assert config.data.validation == f"{flag_values.out}/{facts.QUESTIONS_FILE}"
    assert config.data.questions == f"{flag_values.out}/{facts.TRAINING_QUESTIONS_FILE}"
    assert flag_values.training_questions >= config.steps * config.algorithm.questions
    assert tuple(flag_values.tasks) == config.data.tasks == ("general_qa",)
    build_words = commands["data_pipeline.build"]
    assert f"--out={config.data.source}" in build_words
    assert f"folder.py:path/to/folder:{config.sampler.max_prompt}" in build_words[0]
    assert config.policy.folder == f"{commands['spell_jax.sft'][1].split('=')[1]}/policy"
    assert f"--config.source={flag_values.out}/{facts.ROWS_FILE}" in commands["spell_jax.sft"]


@pytest.mark.parametrize("name", paper.MODELS)
def test_paper_model_sets_folder_token_cap_and_mesh(name, read_flags):
    config = read_flags(f"--config=configs/paper.py:{name}")
    assert config.policy.folder == f"models/{paper.MODELS[name].folder}"
    assert config.sampler.max_tokens == (20_480 if "distill" in name or "think" in name else 4096)
    assert config.mesh.expert == (8 if "a3b" in name else 1)


@pytest.mark.parametrize("name", paper.MODELS)
def test_evaluation_of_a_paper_model_has_its_answer_length(name):
    """The flag that the config's page names for reasoning models is needed for those alone."""
    (flag,) = set(re.findall(r"--max_tokens=(\d+)", paper.__doc__))
    benchmark = Benchmark("frames", "Frames", (), extract=lambda *_: None, score=lambda *_: 0.0)
    lengths = {
        EvaluationSampling(max_tokens=n).options(benchmark).max_tokens for n in (0, int(flag))
    }
    assert lengths == {4096, 20_480}
    is_reasoning = "distill" in name or "think" in name
    assert paper.MODELS[name].max_tokens == (int(flag) if is_reasoning else 4096)


def test_static_questions_are_answered_by_any_model_of_the_paper(read_flags):
    config = read_flags("--config=configs/rlvr.py:qwen3-4b-thinking")
    assert (config.algorithm.name, config.sampler.max_tokens) == ("rlvr", 20_480)
    assert config.policy.folder == "models/Qwen3-4B-Thinking-2507"


@pytest.mark.parametrize("arm", real.ARMS)
def test_arms_of_the_real_policy_differ_in_their_fields_alone(arm, tmp_path):
    config, changes = real.get_config(arm), json.loads(json.dumps(real.ARMS[arm]))
    values = dict(flat(plain(config)))
    assert {name: values[name] for name in changes} == changes
    spell = dict(flat(plain(real.get_config("spell"))))
    common = (spell.keys() & values.keys()) - real.ARMS["spell"].keys() - changes.keys()
    assert {name: values[name] for name in common} == {name: spell[name] for name in common}
    fields_of_rlvr = {"algorithm.static_questions", "algorithm.static_temperature"}
    name = changes.get("algorithm.name", "spell")
    assert name == "reconstruction" or values.keys() - spell.keys() <= fields_of_rlvr
    noise.give_data(config, tmp_path)
    assert read(config).algorithm.name == name


def test_unknown_arm_of_the_real_policy_is_rejected(read_flags):
    with pytest.raises(flags.Error, match=r"configs/real\.py:x: must be one of labelled, ran"):
        read_flags("--config=configs/real.py:x")


def test_unknown_paper_model_is_rejected(read_flags):
    with pytest.raises(flags.Error, match=r"configs/paper\.py:gpt: must be one of qwen2\.5-7b,"):
        read_flags("--config=configs/paper.py:gpt")


@pytest.mark.parametrize("name", reconstruction.MODELS)
def test_reconstruction_models_have_the_caps_and_updates_of_the_paper(name, read_flags, tmp_path):
    config = read_flags(f"--config=configs/reconstruction.py:{name}")
    row = reconstruction.MODELS[name]
    assert config.policy.folder == f"models/{row.folder}"
    assert (config.sampler.max_prompt, config.sampler.max_tokens) == (65_536, 4096)
    packing = build(PackingConfig, config.packing, "packing")
    assert packing.largest(8).length == 65_536 + 4096
    assert packing.largest(8).answers >= 4096 * config.algorithm.group_size
    algorithm = build(ReconstructionConfig, config.algorithm, "algorithm")
    assert algorithm == ReconstructionConfig(extract="paper")
    noise.give_data(config, tmp_path)
    assert read(config).minibatches == {"qwen": 1, "llama": 2}[name]


def test_unknown_reconstruction_model_is_rejected(read_flags):
    with pytest.raises(flags.Error, match=r"configs/reconstruction\.py:gpt: must be one of qwen, "):
        read_flags("--config=configs/reconstruction.py:gpt")


@pytest.mark.parametrize("name", eapo.MODELS)
def test_eapo_policies_have_the_papers_lengths(name, read_flags, tmp_path):
    config = read_flags(f"--config=configs/eapo.py:{name}")
    assert config.policy.folder == f"models/{eapo.MODELS[name].folder}"
    sampler, algorithm = config.sampler, config.algorithm
    assert (sampler.max_prompt, sampler.max_tokens) == (120 * 1024, 8192)
    assert algorithm.keep_equal and algorithm.group_size == 6  # Eq. 1 leaves no group out
    positions = {"qwen3-14b": 40_960}.get(name, 262_144)
    is_short = positions < sampler.max_prompt + sampler.max_tokens
    expected_scaling = ("yarn", 4.0) if is_short else ("", 1.0)
    assert (config.policy.rope_scaling, config.policy.rope_factor) == expected_scaling
    assert config.reward_model.rope_scaling == ""
    noise.give_data(config, tmp_path)
    read(config)


def test_eapo_has_the_printed_loss_and_eapo_code_the_frameworks():
    printed, framework = load("eapo")[1], load("eapo_code")[1]
    for config, fields, deviation in (
        (printed, ("sequence", "sequence_mean", 0.0), "population"),
        # The tiny world's numbers were measured with the default.
        (load("tiny_eapo")[1], ("sequence", "sequence_mean", 0.0), "sample"),
        (framework, ("token", "token_mean", 3.0), "sample"),
    ):
        loss = config.loss
        assert (loss.ratio, loss.aggregation, loss.dual_clip) == fields
        assert (loss.clip_low, loss.clip_high, loss.old_logprobs) == (0.2, 0.28, "recompute")
        assert config.algorithm.deviation == deviation
    framework.loss, framework.algorithm.deviation = printed.loss, "population"
    assert framework.to_dict() == printed.to_dict()


def test_unknown_eapo_policy_is_rejected(read_flags):
    with pytest.raises(flags.Error, match=r"configs/eapo\.py:gpt: must be one of qwen3-14b, "):
        read_flags("--config=configs/eapo.py:gpt")


def test_demonstrations_fit_the_demos_token_caps():
    """Answers that the tiny policy was trained to write are not truncated in rollouts."""
    config = tiny.get_config()
    tokenizer = tokenizers.load(TINY_POLICY)
    stream = tiny_world_rows.world_demonstrations(
        prompts.load("compact"), tiny_world_rows.DemonstrationMixture(), seed=5
    )
    for row in itertools.islice(stream, 600):
        cap = config.sampler.max_tokens
        if row.role == "reciter":
            continue  # no role of the algorithm
        if row.role == "verifier":
            cap = config.algorithm.verifier.max_tokens
        assert tokenizer.count(row.completion) + 1 <= cap, row
        assert len(tokenizer.chat(row.prompt)) <= config.sampler.max_prompt


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "longpo",
            {"loss.objective": "clip", "loss.old_logprobs": "on_policy", "loss.nll_weight": 0.0},
            r"loss\.objective = 'clip': must be 'dpo' for algorithm\.name = 'longpo'",
        ),
        (
            "rlvr",
            {
                "loss.objective": "dpo",
                "loss.old_logprobs": "reference",
                "loss.aggregation": "sequence_mean",
            },
            r"loss\.objective = 'dpo': must not be 'dpo' for algorithm\.name = 'rlvr'",
        ),
        (
            "tiny",
            {"algorithm.questioner.vocabulary_dropout": 0.1, "loss.support": "sampled"},
            r"\.vocabulary_dropout = 0\.1: must be 0 for loss\.support = 'sampled'",
        ),
        (
            "tiny",
            {"algorithm.verifier.max_tokens": 49},
            r"algorithm\.verifier\.max_tokens = 49: must not be above sampler\.max_tokens = 48",
        ),
        (
            "longpo",
            {"packing.shared_prefix": "none"},
            r"packing\.shared_prefix = 'none': must be another for loss\.objective = 'dpo'",
        ),
    ],
)
def test_loss_must_fit_algorithm_and_sampler(name, fields, message):
    config = noise.with_fields(load(name)[1], {"data.source": "tiny"} | fields)
    with pytest.raises(ValueError, match=message):
        read(config)


# ---------------------------------------------------------------------------------------- Ablations

PAPER = {"algorithm.reader.source": "questioner"}
STATIC = {"algorithm.name": "rlvr", "algorithm.static_questions": 12}
ABLATIONS = {
    "the demo": {},
    "the paper's recipe": PAPER,
    "no memory": PAPER | {"algorithm.questioner.memory": 0},
    "frozen questioner": PAPER | {"algorithm.questioner.train": False},
    "frozen questioner, frozen reader": {"algorithm.questioner.train": False},
    "no format penalty": PAPER | {"algorithm.questioner.format_penalty": False},
    "no grounding filter": PAPER | {"algorithm.questioner.grounding_samples": 0},
    "no verifier": PAPER | {"algorithm.responder.reward": "rule"},
    "frozen verifier": PAPER | {"algorithm.verifier.train": False},
    "single verdict": PAPER | {"algorithm.verifier.group_size": 1},
    "no consistency gate": PAPER | {"algorithm.verifier.consistency_gate": False},
    "azr": PAPER | {"algorithm.questioner.mapping": "azr"},
    "r_zero": PAPER | {"algorithm.questioner.mapping": "r_zero"},
    "progress on probes": PAPER | {"algorithm.questioner.mapping": "progress"},
    "narrow": PAPER | {"algorithm.questioner.sigma": 0.5 / 6},
    "wide": PAPER | {"algorithm.questioner.sigma": 0.5 / 2},
    "G = 4": PAPER | {"algorithm.group_size": 4, "algorithm.verifier.group_size": 4},
    "G = 16": PAPER | {"algorithm.group_size": 16, "algorithm.verifier.group_size": 16},
    "memory of the public code": PAPER
    | {
        "algorithm.questioner.memory_documents": "shown",
        "algorithm.questioner.memory_solved": True,
    },
    "normalized over the batch": PAPER | {"algorithm.questioner.normalization": "batch"},
    "random rewards": PAPER | {"algorithm.responder.reward": "random"},
    "an external judge": PAPER
    | {
        "algorithm.rule": "judge",
        "algorithm.judge_url": "http://localhost:1/v1",
        "algorithm.judge_model": "m",
    },
    "static questions": PAPER | STATIC | {"algorithm.responder.reward": "rule"},
    "static questions, frozen reader": STATIC,
}


def wavering(role: str, prompt: str, sibling: int, model: str) -> str:
    """Answer mostly right: wrong in every third answer, and never right without documents."""
    if role == "responder" and model == "policy" and (sibling % 3 == 1 or "- " not in prompt):
        return "answer is unknown"
    return perfect(role, prompt, sibling, model)


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_runs_a_step(name, monkeypatch):
    overrides = {
        "algorithm.questions": 6,
        "algorithm.generation_batch": 9,
        "data.tiny.clusters": 12,
    } | ABLATIONS[name]
    config = noise.small_config(TINY_POLICY, **overrides)
    config.algorithm.group_size = overrides.get("algorithm.group_size", 8)
    monkeypatch.setattr(
        "spell_jax.rollout.judge.Judge.judge",
        lambda self, items: [int(prediction == reference) for _, prediction, reference in items],
    )
    config.sampler.max_prompt = 384
    run_config = read(config)
    context = make_context(run_config, tokenizers.load(TINY_POLICY))
    algorithm, evaluation = make_algorithm(run_config, context)
    kind = StaticAlgorithm if config.algorithm.name == "rlvr" else Spell
    assert isinstance(algorithm, kind) and evaluation
    assert algorithm.model_names == (
        ("reference_reader",) if config.algorithm.reader.source == "frozen_reader" else ()
    )
    ask = ScriptedModels(wavering)
    episodes = algorithm.rollout(ask, (0, 1), 1)
    groups, annotations = algorithm.groups(episodes, (0, 1))
    roles = {group.name for group in groups}
    assert "responder" in roles
    assert all(
        len(g.samples) == config.algorithm.group_size for g in groups if g.name == "responder"
    )
    assert ("questioner" in roles) == (
        config.algorithm.name == "spell" and config.algorithm.questioner.train
    )
    called_roles = {call.role for call in ask.calls}
    assert ("verifier" in called_roles) == (
        config.algorithm.responder.reward not in ("rule", "random")
    )
    assert any(call.model == "reference_reader" for call in ask.calls) == bool(
        algorithm.model_names
    )
    assert 0 < algorithm.metrics(episodes).means()["solve_rate"] <= 1
    assert all(map(make_record, episodes, annotations))
    algorithm.rollout(ask, (0, 2), 2)
