"""Tests of launch/check.py: messages name field, value and remedy, and no device is used."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from spell_jax.algorithms import registry as registry
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.config import change_algorithm, model_sections
from spell_jax.configs import paper
from spell_jax.data.config import is_generated
from spell_jax.launch import aot, check, memory_plan
from spell_jax.learner import aggregation, packing
from spell_jax.learner.packing import PackingConfig
from spell_jax.policy import products, transformer, weights
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import TINY_POLICY, known_shape, missing_folder_hint
from spell_jax.runtime import setup as start
from spell_jax.runtime.config import plain
from spell_jax.runtime.files import remote
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.sampler.config import SamplerConfig
from tests import noise, tiny
from tests.algorithms.scripted import make_config
from tests.configs.test_configs import NAMES, has_algorithm, load
from tests.paths import ROOT
from tests.policy import hf_folders
from tests.policy.test_weights import read_tensors, write_tensors
from tests.runtime.files import fake_hub

# Start of every line: a field, usually with its value.
LINE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*(\[\d+\])?( = .*)?: .*")


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("a device was asked for")

    for name in ("devices", "local_devices", "device_count", "local_device_count", "make_mesh"):
        monkeypatch.setattr(jax, name, refuse)
    for name in ("process_index", "process_count"):
        monkeypatch.setattr(jax, name, refuse)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Create folders for configs: policies, documents, and a run with checkpoints.

    The policies, dense and with experts, have few weights and room for long prompts. Checkpoints of
    steps 2 and 4 are finished; checkpoints of steps 6 and 8 are not.
    """
    root = tmp_path_factory.mktemp("check")
    tokenizer = tokenizers.load(TINY_POLICY)
    dense = PolicyConfig(tokenizer.vocab_size, 32, 1, 4, 2, 8, 48, max_positions=131_072)
    experts = dataclasses.replace(
        dense, qkv_bias=False, qk_norm=True, experts=8, experts_per_token=2
    )
    for name, policy in (("dense", dense), ("experts", experts)):
        params = transformer.init(policy, jax.random.key(0))
        weights.save(root / name, policy, params, tokenizer)
    (root / "documents").mkdir()
    for letter in "abc":
        (root / "documents" / f"{letter}.txt").write_text(f"The text {letter}.\n")
    workdir = root / "run"
    workdir.mkdir()
    checkpoints = Checkpoints(workdir)
    for step in (2, 4):
        checkpoints.save(step, {"x": np.zeros(1)}, {"seed": 0})
    checkpoints.close()
    (workdir / "checkpoints" / "6" / "arrays").mkdir(parents=True)
    unnamed = workdir / "checkpoints" / "8.orbax-checkpoint-tmp"
    shutil.copytree(workdir / "checkpoints" / "4", unnamed)
    # A run saves what "auto" stands for.
    saved = noise.small_config(TINY_POLICY, steps=4, **{"loss.old_logprobs": "on_policy"})
    start.write_config(plain(saved), workdir)
    return {path.name: path for path in root.iterdir()}


def small(**fields: Any) -> Any:
    """Return a valid config with these fields set, by dotted name."""
    return noise.small_config(TINY_POLICY, **fields)


def fields_of(checked: check.Checked) -> list[str]:
    assert all(LINE.fullmatch(line) for line in checked.mistakes), checked.mistakes
    return [re.split(r" = |: ", line)[0] for line in checked.mistakes]


# ----------------------------------------------------------------------------------------- Configs

RUNS = [name for name in NAMES if has_algorithm(name)]


@pytest.mark.parametrize("name", RUNS)
def test_shipped_config_reports_exactly_its_missing_inputs(name: str) -> None:
    config = load(name)[1]
    mistakes, missing = set(), set()
    for model in model_sections(config):
        folder = config[model].folder
        if folder != "tiny" and not (folder and pathlib.Path(folder).is_dir()):
            (missing if known_shape(folder) else mistakes).add(f"{model}.folder")
    data, kind = config.data, registry.ALGORITHMS[config.algorithm.name]
    named = [field for field in ("questions", "validation") if data[field]]
    absent = [field for field in named if not pathlib.Path(data[field]).is_file()]
    mistakes |= {f"data.{field}" for field in absent}
    if "clusters" not in kind.inputs:
        missing |= {"data.questions"} - {f"data.{field}" for field in named}
    elif not noise.has_source(data) and (data.source or not data.questions):
        (mistakes if data.source else missing).add("data.source")
    checked = check.check(config)
    assert set(fields_of(checked)) == mistakes
    assert {line.split(" = ")[0] for line in checked.missing} == missing


def test_a_model_of_the_paper_is_described_without_a_folder() -> None:
    checked = check.check(paper.get_config("qwen2.5-7b"))
    assert checked.mistakes == [] and len(checked.missing) == 2
    text = check.describe(checked)
    assert "7,615,616,512 parameters" in text and "missing  policy.folder = " in text


@pytest.mark.parametrize(
    ("instructions", "dtype", "topology", "line"),
    [
        (["amx_bf16"], "auto", "", "bfloat16, which this CPU multiplies faster"),
        (
            ["amx_bf16"],
            "float32",
            "cpu:2",
            "float32; with policy.compute_dtype=auto, bfloat16, fas",
        ),
        ([], "auto", "", "float32; this CPU has no fast products"),
        ([], "bfloat16", "", "bfloat16; this CPU has no fast products"),
        (["amx_bf16"], "float32", "gpu:2", None),
        (["amx_bf16"], "float32", "v5e-4", None),
    ],
)
def test_check_says_when_this_machine_gains_from_bfloat16(
    monkeypatch, instructions: list[str], dtype: str, topology: str, line: str | None
) -> None:
    monkeypatch.setattr(products, "bfloat16_instructions", lambda: instructions)
    config = load("tiny")[1]
    config.policy.compute_dtype = dtype
    lines = check.describe(check.check(config, topology=topology)).splitlines()
    dtypes = [text.removeprefix("dtype").strip() for text in lines if text.startswith("dtype")]
    assert [text.startswith(line or "") for text in dtypes] == [True] * (line is not None)


def test_adapters_over_an_int8_base_are_described_and_planned_on_a_gpu() -> None:
    config = paper.get_config("qwen2.5-7b")
    fields = {"policy.lora_rank": 16, "policy.base_dtype": "int8", "mesh.fsdp": 1}
    sizes = {"packing.token_budget": 20_480, "sampler.kv_cache_tokens": 114_688}
    config.update_from_flattened_dict(fields | sizes)
    checked = check.check(config, topology="l4:1")
    assert checked.mistakes == []
    text = check.describe(checked)
    adapters = 16 * 28 * (4 * (3584 + 3584) - 2 * (3584 - 512) + 3 * (3584 + 18_944))
    total = 7_615_616_512 + adapters
    assert f"{total:,} parameters, of which {adapters:,} in adapters are trained over an i" in text
    assert (
        "devices  l4:1: 1 device, 20.27 GiB each with XLA_PYTHON_CLIENT_MEM_FRACTION=0.92" in text
    )
    config.policy.base_dtype = "compute"
    (mistake,) = check.check(config, topology="l4:1").mistakes
    assert "must be more, or mesh.context or mesh.tensor, or policy.base_dtype 'int8'" in mistake


def split_7b(**fields: Any) -> Any:
    config = paper.get_config("qwen2.5-7b")
    axes = {"mesh.tensor": 4, "mesh.rollout.tensor": 4, "mesh.rollout_devices": 2, "staleness": 2}
    config.update_from_flattened_dict(axes | fields)
    return config


def test_both_meshes_of_a_split_run_are_described() -> None:
    text = check.describe(check.check(split_7b(), topology="v5p-32"))
    devices = "v5p-32: 16 devices, 95.74 GiB each; 8 train, mesh fsdp=2 tensor=4; 8 sample, mesh "
    assert f"devices  {devices}fsdp=2 tensor=4\n" in text and "transfer" in text
    # Without a topology: the fewest devices, which are 4 training and 4 sampling ones on two hosts.
    config = split_7b(**{"mesh.rollout.fsdp": 1, "policy.compute_dtype": "bfloat16"})
    text = check.describe(check.check(config))
    assert "8 devices, unknown memory; 4 train, mesh tensor=4; 4 sample, mesh tensor=4" in text


@pytest.mark.parametrize(
    ("fields", "mistake"),
    [
        ({"sampler.kv_cache_tokens": 2**25}, "sampler.kv_cache_tokens = 33554432: decode takes"),
        ({"staleness": 60}, r"mesh.rollout.fsdp = -1: decode .*must be more, with more mesh.rollo"),
        ({"sampler.slots": 2**19}, r"sampler.slots = 524288: decode .*, or mesh.rollout.tensor mo"),
        ({"packing.token_budget": 2**22}, r"packing.token_budget = 4194304: accumulate takes"),
        (
            {"mesh.tensor": 1, "mesh.rollout_devices": 1},
            r"optimizer.offload = False: .*; mesh.fsdp = 12: times mesh.context = 1 does not div",
        ),
    ],
)
def test_memory_of_a_split_run_has_a_remedy_of_its_mesh(
    fields: dict[str, Any], mistake: str
) -> None:
    (line,) = check.check(split_7b(**fields), topology="v5p-32").mistakes
    assert re.match(mistake, line), line


def test_weights_that_a_mesh_cannot_split_are_a_remark() -> None:
    config = split_7b(**{"mesh.tensor": 2, "mesh.rollout_devices": 1})
    (remark,) = check.check(config, topology="v5p-32").remarks
    assert remark.startswith("mesh.fsdp = 6: times mesh.context = 1 does not divide the policy's")


@pytest.mark.parametrize("name", paper.MODELS)
def test_shapes_of_the_papers_models_have_their_numbers_of_parameters(name: str) -> None:
    policy = known_shape(f"models/{paper.MODELS[name].folder}")
    assert policy
    shapes, _ = transformer.abstract_params(policy)
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert count / 1e9 == pytest.approx(paper.MODELS[name].parameters, abs=0.06)


def test_a_misspelled_model_is_a_mistake() -> None:
    config = paper.get_config("qwen2.5-7b")
    config.policy.folder = "models/Qwen2.5-7b"
    checked = check.check(config)
    assert fields_of(checked) == ["policy.folder"] and len(checked.missing) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_shipped_config_passes_once_inputs_are_given(
    name: str, folders: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    config = load(name)[1]
    for model in model_sections(config):
        if config[model].folder != "tiny":
            kind = "experts" if config.mesh.expert > 1 else "dense"
            config[model].folder = str(folders[kind])
            config[model].thinking = ""  # the folder has no chat layout
            config[model].rope_scaling = ""  # they are of a short context by themselves
    if not is_generated(config.data.source):
        noise.give_data(config, tmp_path)
        config.data.documents_per_cluster = 1
    checked = check.check(config)
    assert checked.mistakes == []
    assert checked.topology and checked.topology.chips == config.mesh.expert * config.mesh.context
    assert check.describe(checked)


def test_warm_start_config_is_rejected() -> None:
    config = importlib.import_module("spell_jax.configs.tiny_warm_start").get_config()
    checked = check.check(config)
    assert fields_of(checked) == ["algorithm"] and "spell_jax.sft" in checked.mistakes[0]


# ---------------------------------------------------------------------------------------- Mistakes

CONTEXT = {"mesh.fsdp": 1, "mesh.context": 4}
SPLIT = {"mesh.rollout_devices": 2, "staleness": 1}
MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"steps": 0}, "", r"steps = 0: must be at least 1"),
    (
        {"staleness": 1, "loss.old_logprobs": "on_policy"},
        "",
        r'loss.old_logprobs = "on_policy": must be "rollout"',
    ),
    ({"profile_steps": ("a",)}, "", r"profile_steps\[0\] = 'a': must be int"),
    ({"policy.remat": "all"}, "", r"policy.remat = 'all': must be one of"),
    (
        {"policy.lora_rank": 2, "policy.lora_pattern": "none"},
        "",
        r"policy.lora_pattern = 'none': is in none of",
    ),
    ({"policy.folder": ""}, "", r"policy.folder = '': must be a Hugging Face folder"),
    ({"policy.folder": "no/such"}, "", r"policy.folder = 'no/such': no such folder; must be"),
    ({"policy.thinking": "on"}, "", r"policy.folder = .*: thinking = True: .* must be None"),
    ({"algorithm.group_size": 1}, "", r"algorithm.group_size = 1: must be at least 2"),
    ({"algorithm.prompts": "no/such"}, "", r"algorithm.prompts = 'no/such': .*"),
    (
        {"data.source": "no/such"},
        "",
        r"data.source = 'no/such': no such file or folder; must be 'tiny', 'tin",
    ),
    ({"data.tasks": ()}, "", r"data.tasks = \(\): must be one or more of"),
    ({"data.tiny.evaluation.per_cell": 0}, "", r"data.tiny.evaluation.per_cell = 0: must be"),
    ({"loss.clip_low": -1.0}, "", r"loss.clip_low = -1.0: must be at least 0"),
    (
        {"optimizer.schedule": "linear", "optimizer.warmup_steps": 3},
        "",
        r"optimizer.warmup_steps = 3: must be below the run's 3 updates",
    ),
    ({"sampler.top_p": 1.5}, "", r"sampler.top_p = 1.5: must be in \(0, 1\]"),
    ({"sampler.no_such": 1}, "", r"sampler.no_such: no such field, must be one of"),
    ({"steps": None}, "", r"steps = None: must be int"),
    ({"minibatches": None}, "", r"minibatches = None: must be int"),
    ({"policy.folder": None}, "", r"policy.folder = None: must be str"),
    ({"policy": None}, "", r"policy = None: must be a section, or a tuple \(folder, "),
    ({"optimizer": None}, "", r"optimizer = None: must be a section, or a tuple \(learning_rate, "),
    ({"mesh": None}, "", r"mesh = None: must be a section, or a tuple \(data, "),
    ({"algorithm": None}, "", r"algorithm: is missing, or no section; a config of spell_jax.train"),
    (
        {
            "sampler.max_tokens": 1000,
            "packing.buckets": ((1128, 1000),),
            "packing.token_budget": 1128,
        },
        "",
        r"sampler: the longest prompt and answer have 1128 tokens together, must be at most",
    ),
    (
        {"sampler.kv_cache_tokens": 128},
        "",
        r"sampler.kv_cache_tokens = 128: a prompt of 128 tokens and an answer of 6 must fit",
    ),
    (
        {"sampler.page_size": 30} | CONTEXT,
        "cpu:4",
        r"sampler.page_size = 30: must be a multiple of mesh",
    ),
    (
        {"packing.token_budget": 100},
        "",
        r"packing.token_budget = 100: must be at least the length of the largest bucket, 160",
    ),
    (
        {"packing.buckets": ((162, 24),)} | CONTEXT,
        "cpu:4",
        r"packing.buckets: \(162, 24\) must be multiples of mesh.context = 4",
    ),
    (
        {"packing.buckets": ((133, 24),)},
        "",
        r"packing.buckets: the largest, \(133, 24\), must be at least \(134, 6\), sampler",
    ),
    (
        {"packing.buckets": ((160, 5),)},
        "",
        r"packing.buckets: the largest, \(160, 5\), must be at least \(134, 6\), sampler",
    ),
    (
        {"packing.buckets": "auto", "packing.token_budget": 133},
        "",
        r"packing.token_budget = 133: must be at least 144, sampler.max_prompt .* \(134\) rounded",
    ),
    ({"packing.buckets": "best"}, "", r"packing.buckets = 'best': must be 'auto', or tuples"),
    ({"mesh.fsdp": 3}, "cpu:8", r"mesh = .*: cannot be laid out on 8 devices"),
    ({"mesh.fsdp": 4}, "gpu:8", r"mesh = .*: makes 4 devices, but there are 8"),
    ({"mesh.rows": "all"}, "", r"mesh.rows: no such field, must be one of"),
    ({}, "v5e-12", r"topology = 'v5e-12': did you mean .* one of .*, l4:N, .*, cpu:N"),
    ({}, "cpu:0", r"topology = 'cpu:0': .*must be a slice"),
    (
        {"policy.base_dtype": "int8"},
        "",
        r"policy.base_dtype = 'int8': must be 'compute', or policy.lora_rank above 0",
    ),
    ({"mesh.tensor": 8}, "v5e-8", r"mesh.tensor = 8: must divide the policy's 4 heads"),
    ({"mesh.expert": 2}, "cpu:8", r"mesh.expert = 2: must be 1, the policy has no experts"),
    (SPLIT | {"mesh.rollout_devices": 8}, "cpu:8", r"mesh.rollout_devices = 8: must leave dev"),
    (SPLIT | {"staleness": 0}, "cpu:8", r"staleness = 0: must be at least 1 for mesh.rollout_dev"),
    (SPLIT | {"mesh.fsdp": 3}, "cpu:8", r"mesh = .*: makes 3 devices, but there are 6"),
    (SPLIT | {"mesh.rollout.fsdp": 4}, "cpu:8", r"mesh.rollout = .*: cannot be laid out on 2"),
    (SPLIT | {"mesh.rollout.expert": 2}, "cpu:8", r"mesh.rollout.expert = 2: must be 1, the pol"),
    (SPLIT, "v5e-16", r"mesh.rollout_devices = 2: must be 0 on 4 hosts of TPU v5 lite; libtpu"),
    (SPLIT, "v6e-8", r"mesh.rollout_devices = 2: must be 4 on a host of 8 TPU v6 lite; libtpu"),
    (
        {"loss.routing": "sampled"},
        "",
        r"loss.routing = 'sampled': must be 'own', the policy has no",
    ),
]


@pytest.mark.parametrize(("fields", "topology", "line"), MISTAKES)
def test_single_mistake_gives_exactly_one_message(
    fields: dict[str, Any], topology: str, line: str
) -> None:
    checked = check.check(small(**fields), topology)
    assert len(checked.mistakes) == 1 and re.match(line, checked.mistakes[0]), checked.mistakes
    assert fields_of(checked)


def test_valid_configs_pass() -> None:
    assert check.check(small()).mistakes == []
    assert check.check(small(**CONTEXT), "cpu:4").mistakes == []
    assert check.check(small(**{"mesh.tensor": 4}), "v5e-8").mistakes == []
    longest = {"packing.buckets": ((134, 6),)}
    assert check.check(small(**longest)).mistakes == []
    auto_buckets = {"packing.buckets": "auto", "packing.token_budget": 144}
    assert check.check(small(**auto_buckets)).mistakes == []
    assert check.check(small(**auto_buckets | CONTEXT), "cpu:4").mistakes == []


def test_mistakes_of_all_sections_are_reported_at_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    mistakes = {
        "steps": 0,
        "policy.compute_dtype": "float16",
        "algorithm.group_size": 1,
        "data.tasks": (),
        "sampler.top_p": 1.5,
        "packing.token_budget": 100,
        "loss.clip_low": -1.0,
        "optimizer.b1": 2.0,
        "mesh.fsdp": 3,
    }
    checked = check.check(small(**mistakes), "cpu:8", str(tmp_path / "file"))
    fields = fields_of(checked)
    assert sorted(fields) == sorted({*mistakes, "workdir", "mesh"} - {"mesh.fsdp"})
    for mistake in ({"data.source": "no/such"}, {"sampler.kv_cache_tokens": 128}):
        two_mistakes = check.check(small(**{"loss.clip_low": -1.0} | mistake))
        assert fields_of(two_mistakes) == ["loss.clip_low", *mistake]


def test_all_mistakes_of_a_section_are_reported() -> None:
    named = {"policy.rope_scaling": "policy.rope_factor"}
    for fields in (
        {"sampler.page_size": 0, "sampler.cache_dtype": "x", "sampler.top_p": 3.0},
        {"sampler.no_such": 1, "sampler.slots": 0},
        {"algorithm.group_size": 1, "algorithm.questioner.sigma": -1.0, "algorithm.no_such": 2},
        {"data.source": "no/such", "data.held_out": 2.0, "data.tasks": ()},
        {"steps": 0, "staleness": -1, "checkpoint_every": 0},
        {"packing.token_budget": 1, "packing.shared_prefix": "x"},
        {"optimizer.b1": 2.0, "optimizer.schedule": "x", "optimizer.no_such": 1},
        {"policy.remat": "x", "policy.attention": "x", "policy.compute_dtype": "x"},
        {"mesh.fsdp": 0, "mesh.tensor": 0, "mesh.rows": 2},
        # The default of rope_factor does not fit the other field.
        {"policy.rope_scaling": "yarn", "data.tasks": ()},
        {"loss.old_logprobs": "x", "loss.clip_low": -1.0, "data.tasks": ()},
        {"algorithm.prompts": "no/such", "algorithm.group_size": 1, "seed": -1},
        {"init_from": "no/such", "profile_steps": (0,)},
    ):
        expected_fields = {named.get(name, name) for name in fields}
        assert {*fields_of(check.check(small(**fields)))} == expected_fields


def test_expert_axis_must_divide_experts_and_int8_is_rejected(
    folders: dict[str, pathlib.Path],
) -> None:
    experts = {"policy.folder": str(folders["experts"])}
    checked = check.check(small(**experts, **{"mesh.expert": 3}), "cpu:3")
    assert checked.mistakes == ["mesh.expert = 3: must divide the policy's 8 experts"]
    fields = {"sampler.weights_dtype": "int8", "loss.clip_low": -1.0}
    checked = check.check(small(**experts, **fields))
    assert sorted(fields_of(checked)) == sorted(fields)
    assert check.check(small(**experts, **{"mesh.expert": 4}), "cpu:8").mistakes == []


def test_weights_are_checked_in_the_folder_the_run_starts_from(
    folders: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(TINY_POLICY, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")  # not read
    fields = {"policy.folder": str(folder), "steps": 4}
    (line,) = check.check(small(**fields)).mistakes
    assert line.startswith(f"policy.folder = '{folder}': {folder}/model.safetensors: not there")
    assert check.check(small(**fields), workdir=str(folders["run"])).mistakes == []
    from_run = fields | {"init_from": str(folders["run"])}
    checked = check.check(small(**from_run))
    assert checked.mistakes == []
    assert f"from the weights of {folders['run']}, its newest step" in check.describe(checked)
    (line,) = check.check(small(**fields | {"init_from": str(tmp_path)})).mistakes
    assert line.startswith(f"init_from = '{tmp_path}': must be a run's folder, or RUN/checkpoints/")
    (folder / "pytorch_model.bin").unlink()
    checked = check.check(small(**fields))
    assert checked.mistakes == []
    assert f"from random weights, because {folder} has none" in check.describe(checked)


def test_weights_that_contradict_the_config_are_reported(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(TINY_POLICY, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"intermediate_size": 100}))
    (line,) = check.check(small(**{"policy.folder": str(folder)})).mistakes
    assert re.match(rf"policy.folder = '{folder}': .*mlp.* has shape .*, needs \(100, 128\)", line)


def test_weights_of_a_text_model_beside_a_model_of_images_pass(tmp_path: pathlib.Path) -> None:
    """The check reads the tensor names of Gemma 3 with images as a run reads them."""
    folder = tmp_path / "policy"
    shutil.copytree(TINY_POLICY, folder)
    tensors = {f"language_model.{name}": tensor for name, tensor in read_tensors(folder).items()}
    write_tensors(folder, tensors | {"vision_tower.head.probe": np.zeros(1, np.float32)})
    assert check.check(small(**{"policy.folder": str(folder)})).mistakes == []


def test_folder_without_a_chat_template_is_a_mistake_of_the_folder(tmp_path: pathlib.Path) -> None:
    policy, folder = PolicyConfig.from_hf(TINY_POLICY / "config.json"), tmp_path / "policy"
    hf_folders.write(folder, hf_folders.byte_level(), {"eos_token": "<|im_end|>"})
    (folder / "config.json").write_text(json.dumps(policy.to_hf()))
    (line,) = check.check(small(**{"policy.folder": str(folder)})).mistakes
    assert line.startswith(f"policy.folder = '{folder}': {folder}: no chat template, in chat_tem")


@pytest.mark.slow
def test_memory_mistake_names_the_field_with_the_largest_share() -> None:
    cases = {
        "sampler.kv_cache_tokens": {"sampler.kv_cache_tokens": 2**26},
        "packing.token_budget": {"packing.token_budget": 2**21},
    }
    for field, fields in cases.items():
        checked = check.check(small(**fields), "v5e-4")
        (line,) = checked.mistakes
        assert re.match(rf"{field} = \d+: (prefill|accumulate) takes [\d.]+ GiB of a chip", line)
        assert "v5e-4 has 15.75; must be less" in line
        assert check.check(small(**fields), "cpu:4").mistakes == []  # unknown


def test_memory_is_planned_for_the_rows_the_run_packs() -> None:
    fields = {"packing.buckets": ((160, 24), (256, 32)), "packing.token_budget": 2048}
    checked = check.check(small(**fields), "cpu:4")
    assert checked.plan and checked.plan.programs.bucket == packing.Bucket(256, 32)
    # Eight long rows on four devices; the 12 short rows of a micro-batch have fewer tokens.
    assert _trained(checked) == (8, 256)
    assert "rows of 256 tokens" in check.describe(checked)
    # A prompt with all of its answers, 512 tokens, is trained on in parts.
    checked = check.check(small(**{"algorithm.group_size": 64, "packing.token_budget": 160}))
    assert _trained(checked) == (1, 160)


def test_row_must_hold_both_longest_answers_of_a_pair() -> None:
    """Answers have up to 6 tokens after up to 128 of the prompt; a row of 134 holds one of them."""
    config = small(**{"packing.buckets": ((134, 6), (140, 12))})
    change_algorithm(config, "longpo")
    config.loss.update(objective="dpo", old_logprobs="reference", aggregation="sequence_mean")
    checked = check.check(config)
    assert checked.mistakes == []
    assert re.search(r" rows of 140 tokens .*micro-batches", check.describe(checked))
    config.packing.buckets = ((134, 6),)
    (mistake,) = check.check(config).mistakes
    assert re.search(r"at least \(140, 12\), sampler.max_prompt \+ 2 x sampler.max_tokens", mistake)


def test_memory_of_chosen_shapes_is_planned_for_the_whole_budget(monkeypatch) -> None:
    fields = {"packing.buckets": "auto", "packing.token_budget": 2050}
    checked = check.check(small(**fields), "cpu:4")
    assert checked.plan and checked.plan.programs.bucket.length == 2048
    # Each of the four devices may have a row of 2,048 tokens. A step has 180 of answers at most.
    assert checked.run and _trained(checked) == (4, 2048)
    groups = check.longest_groups(checked.run.algorithm, checked.run.sampler)
    assert sum(group.answer_tokens for group in groups) == 180
    assert checked.plan.programs.bucket.answers == 256
    described = check.describe(checked)
    assert "rows of 2,048 tokens" in described
    assert re.search(r" 4 rows of \d+ tokens .*: 1 micro-batches of 4", described)
    # Rows without end fit into a device of unknown memory: 4,096 of them are 2,048 plans, 116 s.
    monkeypatch.setattr(memory_plan, "_MOST_ROWS", 8)
    assert checked.plan.largest()["packing.token_budget"] == 8 * 2048


def _trained(checked: check.Checked) -> tuple[int, ...]:
    """Return (rows, tokens per row) of the micro-batch in the memory plan."""
    assert checked.plan
    (tokens,) = (p.tokens for p in checked.plan.programs.select("update") if p.name == "accumulate")
    return tokens


# --------------------------------------------------------------------------------- Data and workdir


def test_incomplete_data_build_is_reported(tmp_path: pathlib.Path) -> None:
    (tmp_path / "clusters-train.array_record-00000-of-00002").write_text("")
    source = {"data.source": str(tmp_path)}
    expected_line = f"data.source = '{tmp_path}': {tmp_path}/manifest.json: missing"
    (line,) = check.check(small(**source)).mistakes
    assert line.startswith(expected_line)
    for mistake in ({"policy.folder": ""}, {"algorithm.group_size": 1}):
        checked = check.check(small(**source, **mistake))
        assert fields_of(checked) == [*mistake, "data.source"]
        assert checked.mistakes[1].startswith(expected_line)


def test_unusable_document_folders_are_reported(tmp_path: pathlib.Path) -> None:
    source = {"data.source": str(tmp_path)}
    (line,) = check.check(small(**source)).mistakes
    assert line.startswith("data.source = ") and "no usable text" in line
    (tmp_path / "a.txt").write_text("One text.")
    (line,) = check.check(small(**source, **{"data.held_out": 0.05})).mistakes
    assert "one cluster cannot be split" in line
    assert check.check(small(**source)).mistakes == []
    checked = check.check(small(**source, **{"data.validation": "no/such"}))
    assert checked.mistakes == [
        "data.validation = 'no/such': no such file; must be a .jsonl of questions"
    ]


def test_answers_that_can_never_score_are_named(tmp_path: pathlib.Path) -> None:
    bad = (ROOT / "tests" / "cases" / "references.jsonl").read_text()
    good = {"question": "Who?", "answer": "Ann", "task": "general_qa", "documents": ["Ann."]}
    path = tmp_path / "questions.jsonl"
    (tmp_path / "a.txt").write_text("One text.")
    fields = {"data.source": str(tmp_path), "data.validation": str(path)}
    path.write_text(bad + "\n" + json.dumps(good))
    checked = check.check(small(**fields))
    assert checked.mistakes == []
    description = check.describe(checked)
    assert all(f"{path}:{line}: skipped (answer = " in description for line in range(1, 7))
    assert (
        description.count("can never score") == 6 and "1 questions, 6 lines skipped" in description
    )
    path.write_text(bad)
    checked = check.check(small(**fields))
    (line,) = checked.mistakes
    assert line.startswith(f"data.validation = {path}: none of its 6 lines")
    assert sum("can never score" in remark for remark in checked.remarks) == 6


@pytest.mark.parametrize("place", ["file", "file/run", "/proc/run"])
def test_unwritable_workdir_is_reported(tmp_path: pathlib.Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    workdir = str(tmp_path / place)
    (line,) = check.check(small(), workdir=workdir).mistakes
    assert line.startswith(f"workdir = '{workdir}': must be a writable folder")


def test_check_does_not_create_the_workdir(tmp_path: pathlib.Path) -> None:
    checked = check.check(small(), workdir=str(tmp_path / "new" / "run"))
    assert checked.mistakes == [] and checked.step is None
    assert not list(tmp_path.iterdir())
    assert f"from the weights of {TINY_POLICY}, 3 steps" in check.describe(checked)


def test_existing_run_is_resumed_only_with_a_compatible_config(
    folders: dict[str, pathlib.Path],
) -> None:
    workdir = str(folders["run"])
    checked = check.check(small(steps=8), workdir=workdir)
    assert checked.mistakes == [] and checked.step == 4
    assert f"resumes step 4 of {workdir}/checkpoints, up to 8" in check.describe(checked)
    assert "steps = 8: was 4 when last started" in checked.remarks
    assert len(checked.remarks) == 1
    resumed = small(steps=8, **{"policy.compute_dtype": "auto"})  # keeps the dtype of the run
    assert check.check(resumed, workdir=workdir).remarks == checked.remarks
    checked = check.check(small(steps=3, seed=2), workdir=workdir)
    assert checked.mistakes == ["steps = 3: must be at least 4, which are done"]
    checked = check.check(small(steps=4, seed=2), workdir=workdir)
    assert checked.mistakes == ["seed = 2: must be 0 in this workdir, or take another workdir"]


# -------------------------------------------------------------------------------------- Description


def test_answer_counts_of_one_step_of_the_default_config() -> None:
    """128 questions x 8 answers for the responder; 256 questioner rows; 128 verifier rows."""
    groups = check.longest_groups(SpellConfig(), SamplerConfig())
    counts = packing.count_answers(groups)
    assert counts == {"responder": 1024, "questioner": 256, "verifier": 128}
    assert {group.tokens for group in groups} == {18_000 + 8 * 4096, 18_000 + 4096}
    frozen = make_config(
        SpellConfig, verifier__train=False, questioner__train=False, questioner__grounding_samples=0
    )
    groups = check.longest_groups(frozen, SamplerConfig())
    assert packing.count_answers(groups) == {"responder": 1024}


@pytest.mark.parametrize("shared", ["group", "none"])
def test_row_counts_match_actual_packing(shared: str) -> None:
    buckets = (packing.Bucket(37, 30), packing.Bucket(40, 30))
    layout = PackingConfig(buckets, 80, shared)
    groups = tiny.groups(40)
    alone = groups if shared == "group" else packing.separate_answers(groups)
    parts, _ = packing.split_groups(alone, buckets[-1])
    packed: dict[int, int] = {}
    weights = aggregation.weigh(groups)
    for batch in packing.pack(parts, weights, buckets, layout.token_budget, with_trees=False):
        rows = int(np.sum(np.any(batch.last_query >= 0, axis=1)))
        packed[batch.tokens.shape[1]] = packed.get(batch.tokens.shape[1], 0) + rows
    described: dict[int, int] = {}
    for bucket, _, rows in check.lay_out(groups, layout):
        described[bucket.length] = described.get(bucket.length, 0) + len(rows)
    assert described == packed
    assert len(packed) == 2


def test_suboptimal_sampler_settings_are_remarks_not_mistakes() -> None:
    checked = check.check(
        small(**{"sampler.slots": 14, "sampler.samples_per_prompt_batch": 2}), "cpu:4"
    )
    assert checked.mistakes == []
    first, second = checked.remarks
    assert first.startswith("sampler.slots = 14: becomes 16")
    assert second.startswith(
        "sampler.samples_per_prompt_batch = 2: a prompt is read once for every 2 answers"
    )
    checked = check.check(small(**{"sampler.samples_per_prompt_batch": 6}))
    assert ["2 of 6 slots" in line for line in checked.remarks] == [True]
    assert "remark   sampler.samples_per_prompt_batch = 6" in check.describe(checked)


def test_description_covers_rollouts_rows_and_outputs_of_a_step() -> None:
    text = check.describe(check.check(small(), "v5e-4"))
    for part in (
        "v5e-4: 4 devices, 15.75 GiB each; mesh fsdp=4",
        "up to 2 rounds of 9 proposals, until 3 questions have mixed rewards",
        "a round asks for, at most, with prompts of up to 128 tokens",
        "36 answers: 9 prompts x 4",
        "108 verdicts: 36 prompts x 3",
        "rows of 160 tokens (24 of answers)",
        "micro-batches of 4",
        "config.json, run.json, metrics.jsonl",
    ):
        assert part in text, text
    static = check.describe(check.check(small(**{"algorithm.name": "rlvr"})))
    assert "rounds of 9 of 960 questions, written once" in static and "proposals" not in static


# ------------------------------------------------------------------------------------------ Command


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.check", "--config=configs/tiny.py", *arguments]
    # The platform does not exist, so any request for its devices is an error.
    env = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)


@pytest.mark.slow
def test_exit_status_says_whether_there_are_mistakes(tmp_path: pathlib.Path) -> None:
    process = _run("--topology=v5e-4", f"--workdir={tmp_path}")
    assert process.returncode == 0, process.stderr
    assert "706,176 parameters, 3 layers" in process.stdout
    assert str(tmp_path) in process.stdout and not list(tmp_path.iterdir())
    process = _run("--config.steps=0", "--config.mesh.tensor=3", "--topology=cpu:8")
    assert process.returncode == 2
    lines = process.stdout.splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["steps", "mesh"]


def test_a_check_imports_no_library_that_it_does_not_use() -> None:
    """Import neither Orbax, a tenth of a check's time, nor libraries of data, plots and models."""
    unused = {"orbax", "tensorflow_datasets", "apache_beam", "datasets", "pandas", "pyarrow"}
    unused |= {"tensorboardX", "wandb", "matplotlib", "scipy.stats", "sklearn", "torch"}
    code = (
        "import sys; from spell_jax.launch import check; from spell_jax.configs import tiny; "
        "print(check.describe(check.check(tiny.get_config()))); "
        f"print(sorted({unused} & sys.modules.keys()))"
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert "706,176 parameters, 3 layers" in process.stdout
    assert process.stdout.splitlines()[-1] == "[]"


def test_truncated_saved_config_is_ignored(tmp_path: pathlib.Path) -> None:
    """A workdir with a truncated config.json does not count as another run's."""
    config = small()
    start.write_config(plain(config), tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text)["seed"] == dict(start.saved_config(check.epath.Path(tmp_path)))["seed"]
    (tmp_path / "config.json").write_text(text[:40])
    assert dict(start.saved_config(check.epath.Path(tmp_path))) == {}


def test_missing_warm_start_names_the_command_that_makes_it() -> None:
    checked = check.check(load("tiny_reconstruction")[1])
    (line,) = [line for line in checked.mistakes if line.startswith("policy.folder")]
    name = "tiny_reconstruction_warm_start"
    assert f"spell_jax.sft --config=configs/{name}.py --workdir=runs/{name} makes this one" in line


def test_model_of_the_hub_is_checked_without_its_weights(monkeypatch, tmp_path) -> None:
    with fake_hub.serving(monkeypatch, tmp_path / "cache") as hub:
        hub.commit_folder("own/tiny", TINY_POLICY)
        checked = check.check(small(**{"policy.folder": "hf://own/tiny"}))
        assert checked.mistakes == [] and checked.missing == []
        assert "from the weights of hf://own/tiny, 3 steps" in check.describe(checked)
        assert hub.reads and "own/tiny/model.safetensors" not in hub.reads
        hub.reads.clear()
        config = small(**{"policy.folder": "hf://own/tiny@main"})
        remote.cached_copy.cache_clear()
        shutil.rmtree(tmp_path / "cache")
        assert aot.read_policy(config).layers == checked.policy.layers
        assert set(hub.reads) == {"own/tiny/config.json"}
        checked = check.check(small(**{"policy.folder": "hf://own/none"}))
    assert checked.mistakes == [
        "policy.folder = 'hf://own/none': hf://own/none: there is no such repository, or it is "
        "private; check the name, or log in (hf auth login, or HF_TOKEN)"
    ]


@pytest.mark.parametrize("name", ["own/none", "Qwen/Qwen2.5-7B-Instruct"])
def test_name_of_a_model_of_the_hub_gets_a_hint(name: str) -> None:
    checked = check.check(small(**{"policy.folder": name}))
    (line,) = checked.mistakes + checked.missing
    assert line.endswith(f"; the Hub's model is 'hf://{name}'")


def test_hint_at_a_well_known_model_has_the_owner_on_the_hub() -> None:
    hint = missing_folder_hint("models/Qwen2.5-7B-Instruct")
    assert hint == "; the Hub's model is 'hf://Qwen/Qwen2.5-7B-Instruct'"
    assert missing_folder_hint("/x/gemma-3-1b-it").endswith("'hf://google/gemma-3-1b-it'")
    assert missing_folder_hint("models/own") == ""
    # Every well-known model has an owner.
    shapes = json.loads((ROOT / "spell_jax" / "policy" / "shapes.json").read_text())
    assert all("hf://" in missing_folder_hint(name) for name in shapes)
