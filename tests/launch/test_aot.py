"""Tests of launch/aot.py: it compiles the programs of a run and parses compiled programs.

No test needs a TPU. Programs are lowered for TPU from fake CPU devices, and compiled for TPU where
libtpu is installed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absl import app, flags
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spell_jax.configs import paper
from spell_jax.launch import aot, topologies
from spell_jax.policy import lora
from spell_jax.policy.config import LoraConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files import paths
from tests import tiny
from tests.paths import ROOT

P = PartitionSpec
LENGTH, GROUP, ANSWER = 12, 4, 6
MESHES = ({"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 4})


def small_config(**overrides: Any) -> Any:
    config = paper.get_config()
    config.policy.compute_dtype = "float32"
    config.algorithm.group_size = GROUP
    config.sampler.max_tokens = ANSWER
    config.sampler.page_size = 8
    config.sampler.kv_cache_tokens = 8 * 64
    config.sampler.slots = 8 * GROUP
    config.sampler.samples_per_prompt_batch = GROUP
    config.sampler.prefill_tokens = 8 * 16
    config.packing.token_budget = 8 * (LENGTH + GROUP * ANSWER)
    config.packing.buckets = ((LENGTH + GROUP * ANSWER, GROUP * ANSWER),)
    config.update_from_flattened_dict(overrides)
    return config


def make(policy=tiny.POLICY, mesh=MESHES[0], **overrides: Any) -> aot.RunPrograms:
    return aot.RunPrograms(small_config(**overrides), policy, meshes.make_mesh(mesh), LENGTH)


# -------------------------------------------------------------------------------- Compiled programs


def test_each_phase_selects_its_programs():
    programs = make()
    names = {phase: [program.name for program in programs.select(phase)] for phase in aot.PHASES}
    assert names == {
        "prefill": ["prefill"],
        "decode": ["decode"],
        "logprob": ["logprob"],
        "update": ["accumulate", "apply"],
    }
    assert [program.name for program in programs.select("all")] == [
        name for phase in aot.PHASES for name in names[phase]
    ]
    shapes = {program.name: program.tokens for program in programs.select("all")}
    assert shapes["prefill"] == (16, 8) and shapes["decode"] == (8 * GROUP, 1)
    assert shapes["logprob"] == shapes["accumulate"] == (8, LENGTH + GROUP * ANSWER)


KINDS = {
    "plain": (tiny.POLICY, {}),
    "remat": (
        dataclasses.replace(tiny.POLICY, remat="block"),
        {"policy.compute_dtype": "bfloat16"},
    ),
    "experts": (dataclasses.replace(tiny.POLICY, experts=4, experts_per_token=2), {}),
    "adapters": (dataclasses.replace(tiny.POLICY, lora=LoraConfig(2)), {}),
    "reference": (tiny.POLICY, {"loss.kl_weight": 0.1}),
    "separate": (tiny.POLICY, {"packing.shared_prefix": "none"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh"), [*((kind, MESHES[1]) for kind in KINDS), ("plain", MESHES[2])]
)
def test_every_phase_lowers_for_tpu_without_libtpu(kind, mesh):
    policy, overrides = KINDS[kind]
    for program in make(policy, mesh, **overrides).select("all"):
        text = program.lower(platforms=("tpu",)).as_text()
        assert "stablehlo" in text and "num_partitions = 8" in text, program.name


@pytest.mark.slow
def test_programs_have_records_of_experts_only_with_the_switch():
    for routing in ("own", "sampled"):
        programs = make(KINDS["experts"][0], **{"loss.routing": routing})
        has_records = {
            program.name: "xi8>" in program.lower().as_text() for program in programs.select("all")
        }
        assert has_records == dict.fromkeys(aot.PROGRAMS, routing == "sampled") | {"apply": False}


def same(abstract: Any, concrete: Any, where: str) -> None:
    """Check that two trees have the same structure, shapes, dtypes and shardings."""
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete), where
    for abstract_leaf, leaf in zip(
        jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True
    ):
        assert (abstract_leaf.shape, abstract_leaf.dtype) == (leaf.shape, leaf.dtype), where
        if isinstance(leaf.sharding, NamedSharding):  # the key is on the device that made it
            assert abstract_leaf.sharding.is_equivalent_to(leaf.sharding, len(leaf.shape)), where


def record(calls: dict[str, tuple], owner: Any, name: str) -> None:
    """Record the arguments with which owner.name is called."""
    function = getattr(owner, name)

    def called(*arguments, **options):
        described = jax.tree.map(
            # Donated arrays keep only their description.
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            arguments,
        )
        calls[name] = described, options
        return function(*arguments, **options)

    setattr(owner, name, called)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_real_run_calls_programs_with_aot_shapes_and_shardings(mesh):
    programs = make(mesh=mesh, policy=dataclasses.replace(tiny.POLICY, tied_embeddings=False))
    programs_by_name = {program.name: program for program in programs.select("all")}
    learner, sampler, calls = programs.learner, programs.sampler, {}
    fns: Any = SimpleNamespace(**learner.fns._asdict())  # unlike the tuple, it can be changed
    learner.fns = fns
    for owner, name in (
        (fns, "accumulate"),
        (fns, "apply"),
        (sampler, "prefill"),
        (sampler, "decode"),
    ):
        record(calls, owner, name)
    state = learner.init(tiny.weights(programs.policy))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert programs_by_name["prefill"].resident == held
    sampler.sample(learner.cast(state.params), [[5] * LENGTH] * 3, GROUP, jax.random.key(0))
    learner.update(state, tiny.groups(3))
    assert set(calls) == {"accumulate", "apply", "prefill", "decode"}
    for name, (arguments, options) in calls.items():
        same(programs_by_name[name].arguments, arguments, name)
        assert programs_by_name[name].options == options


def test_resident_memory_excludes_program_arguments():
    """Masters and optimizer take 12 bytes per weight, a second model 4.

    A rollout uses one model at a time.
    """
    weights = make().trained
    copy = aot.bytes_per_chip(weights)
    by_name = {program.name: program.resident for program in make().select("all")}
    counts = 4 * 4  # counters: the state's, skipped updates, the optimizer's, the schedule's
    assert by_name["prefill"] == by_name["decode"] == 3 * copy + counts
    assert by_name["logprob"] == by_name["accumulate"] == 3 * copy + counts
    assert by_name["apply"] == 0
    with_reader = {
        program.name: program.resident
        for program in make(**{"algorithm.reader.source": "frozen_reader"}).select("all")
    }
    extra_copies = {name: (with_reader[name] - by_name[name]) // copy for name in by_name}
    assert extra_copies == dict.fromkeys(by_name, 1)
    programs = make()
    with programs.config.unlocked():  # an algorithm with given references
        del programs.config.algorithm.reader.source
    assert {program.name: program.resident for program in programs.select("all")} == by_name
    adapted = make(dataclasses.replace(tiny.POLICY, lora=LoraConfig(2)))
    trained, frozen = lora.split(adapted.policy, adapted.rollout_params)
    assert aot.bytes_per_chip(trained) < aot.bytes_per_chip(frozen)
    assert adapted.select("prefill")[0].resident == 3 * aot.bytes_per_chip(trained) + counts


def make_split(policy=tiny.POLICY, **overrides: Any) -> aot.RunPrograms:
    """Make the programs of a run with 6 training and 2 sampling devices."""
    config = small_config(**{"mesh.rollout_devices": 2, "staleness": 1} | overrides)
    section = aot.read_mesh(config)
    run_meshes = section.make(), section.make_sampling()
    return aot.RunPrograms(config, policy, run_meshes[0], LENGTH, rollout_mesh=run_meshes[1])


def test_programs_of_a_split_run_are_on_their_devices():
    programs = make_split(**{"mesh.fsdp": 6, "mesh.rollout.tensor": 2, "mesh.rollout.fsdp": 1})
    devices = {name: set(programs.program(name).mesh.devices.flat) for name in aot.PROGRAMS}
    sampling = set(jax.devices()[6:])
    assert devices["prefill"] == devices["decode"] == sampling
    training = [devices[name] for name in ("logprob", "accumulate", "apply")]
    assert training == [set(jax.devices()[:6])] * 3
    for program in programs.select("all"):
        leaves = jax.tree.leaves(program.arguments)
        assert {leaf.sharding.mesh for leaf in leaves} == {program.mesh}, program.name
    assert programs.program("decode").lower().compile()


def test_resident_memory_of_sampling_devices_is_sets_of_weights():
    """Each set takes 4 bytes per weight in float32; the frozen reader's copy stays as well."""

    def residents(**overrides: Any) -> dict[str, int]:
        programs = make_split(**{"mesh.data": 3, "mesh.fsdp": 2} | overrides).select("all")
        return {program.name: program.resident for program in programs}

    rollout_set = aot.bytes_per_chip(make_split(**{"mesh.data": 3, "mesh.fsdp": 2}).rollout_params)
    for sets, overrides in (
        (1, {}),
        (2, {"staleness": 2}),
        (0, {"mesh.transfer": "in_place"}),
        (2, {"algorithm.reader.source": "frozen_reader"}),
        (4, {"algorithm.reader.source": "frozen_reader", "staleness": 3}),
        # A renewed reader has two copies while a rollout uses the older one.
        (
            5,
            {
                "algorithm.reader.source": "frozen_reader",
                "staleness": 3,
                "algorithm.reader.refresh": 3,
            },
        ),
    ):
        by_name = residents(**overrides)
        assert by_name["prefill"] == by_name["decode"] == sets * rollout_set, overrides
    shared = {
        program.name: program.resident
        for program in make(mesh={"fsdp": 2, "data": 4}).select("all")
    }
    training = ("logprob", "accumulate", "apply")
    assert {name: residents()[name] for name in training} == {n: shared[n] for n in training}
    # The base below the adapters is the same in all sets.
    policy = dataclasses.replace(tiny.POLICY, lora=LoraConfig(2))
    adapted = make_split(policy, **{"staleness": 2})
    trained, _ = lora.split(policy, adapted.rollout_params)
    assert adapted.program("decode").resident == 2 * aot.bytes_per_chip(trained)


def test_interleaved_rollout_and_update_hold_the_arrays_of_each_other():
    alone, interleaved = make(), make(staleness=1)
    extra = {
        name: interleaved.program(name).resident - alone.program(name).resident
        for name in aot.PROGRAMS
    }
    weights, carry = map(aot.bytes_per_chip, (alone.trained, alone.carry()))
    pages = aot.bytes_per_chip(alone.program("prefill").arguments[1])
    sampling = dict.fromkeys(("prefill", "decode"), weights + carry)
    update = {"logprob": 0, "accumulate": weights + pages, "apply": 0}
    assert extra == sampling | update


# --------------------------------------------------------------------- Parsing of compiled programs


def test_collectives_of_a_compiled_program_are_counted():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def body(a):  # [4, 32] float32 on each device
        full_array = jax.lax.all_gather(a, "x", tiled=True)  # [32, 32]
        part = jax.lax.psum_scatter(full_array * full_array, "x", tiled=True)  # [4, 32]
        turned = jax.lax.all_to_all(jnp.sin(part).reshape(8, 16), "x", 0, 0, tiled=True)

        def turn(x, _):
            return jnp.cos(jax.lax.ppermute(x, "x", ring)), None

        moved, _ = jax.lax.scan(turn, turned, None, length=5)  # [8, 16]
        return jax.lax.psum(jnp.tan(moved), "x")

    function = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    )
    argument = jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    counts = aot.collectives(function.lower(argument).compile().as_text() or "")
    once = {"count": 1, "bytes": 4 * 4 * 32, "in_loops": 0}
    assert counts == {
        "all-gather": once | {"bytes": 4 * 32 * 32},
        "all-reduce": once,
        "all-to-all": once,
        "collective-permute": once | {"in_loops": 1},
        "reduce-scatter": once,
    }


# Text as XLA:TPU writes it (libtpu 0.0.42), attributes left out; the all-reduce-scatter as in other
# versions.
TPU_TEXT = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0:T(8)})->f32[8]{0:T(8)}}

%fused_computation.3 (p.0: bf16[1,8]) -> (bf16[1,8], bf16[2,8], u32[]) {
  %p.0 = bf16[1,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[2,8]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=1, dimensions={0}
  ROOT %c = (bf16[1,8]{1,0}, /*index=1*/u32[]) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.7 (p.1: bf16[1,8]) -> bf16[2,8] {
  ROOT %all-gather.2 = bf16[2,8]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=1, dimensions={0}
}

%fused_computation.4 (p.2: bf16[1,8]) -> bf16[2,8] {
  %all-gather.3 = bf16[2,8]{1,0:T(8,128)(2,1)} all-gather(%p.2), channel_id=1, dimensions={0}
  ROOT %d = bf16[2,8]{1,0} custom-call(%p.2, %all-gather.3), \
custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.5 (p.3: f32[16,4]) -> f32[2,4] {
  %all-reduce.6 = f32[16,4]{1,0:T(8,128)} all-reduce(%p.3), channel_id=1, to_apply=%add
  ROOT %dynamic-slice.1 = f32[2,4]{1,0:T(8,128)} dynamic-slice(%all-reduce.6, %i, %z)
}

%body.8 (p.4: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = (bf16[1,8]{1,0}, bf16[1,8]{1,0}, u32[]{:S(2)}) fusion(%p.4), calls=%fused_computation.3
  %collective-permute-start.2 = (f32[3,5]{1,0:T(8,128)S(1)}, f32[3,5]{1,0:T(8,128)}, u32[]{:S(2)}, \
u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %collective-permute-done.2 = f32[3,5]{1,0} collective-permute-done(%collective-permute-start.2)
}

ENTRY %main.9_spmd (p.5: f32[8]) -> f32[8] {
  %all-gather-start.4 = ((f32[2]{0}, s8[4]{0}), (f32[4]{0}, s8[8]{0})) all-gather-start(%a, %b)
  %all-reduce-start.1 = (f32[6]{0}, pred[3]{0}) all-reduce-start(%a, %b), to_apply=%add
  %all-reduce-done.1 = (f32[6]{0}, pred[3]{0}) all-reduce-done(%all-reduce-start.1)
  %while.1 = (s32[], f32[8]{0}) while(%t), condition=%condition.1, body=%body.8
  %f = f32[2,4]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.5
  ROOT %u = f32[8]{0} copy(%f), metadata={op_name="jit(f)/all_gather"}
}
"""


def test_asynchronous_tpu_collectives_are_counted_once():
    assert aot.collectives(TPU_TEXT) == {
        "all-gather": {"count": 2, "bytes": 32 + 16 + 8, "in_loops": 1},
        "all-reduce": {"count": 1, "bytes": 24 + 3, "in_loops": 0},
        "collective-permute": {"count": 1, "bytes": 60, "in_loops": 1},
        "reduce-scatter": {"count": 1, "bytes": 32, "in_loops": 0},
    }
    assert aot.collectives("") == {}


@pytest.mark.slow
def test_report_continues_after_a_program_fails_to_compile(capsys):
    programs = make()
    apply = programs.select("update")[1]
    broken = dataclasses.replace(apply, function=jax.jit(lambda *_: 1 / 0))
    assert not aot.report_programs([broken, apply], 2**30, {"topology": "none"})
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert not first["fits"] and "ZeroDivisionError: division by zero" in first["error"]
    assert second["fits"] and second["topology"] == "none" and second["program"] == "apply"
    stats = second["bytes"]
    assert stats["arguments"] == aot.bytes_per_chip(apply.arguments)
    assert stats["peak"] <= stats["arguments"] + stats["temporaries"] + stats["outputs"]
    assert second["collectives"]["all-reduce"]["count"] >= 1  # the gradient's norm
    least = stats["peak"] + second["resident"]
    assert (
        aot.measure_program(apply, least)["fits"]
        and not aot.measure_program(apply, least - 1)["fits"]
    )


# ----------------------------------------------------------------------------------------- Mistakes


def test_invalid_length_or_missing_policy_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="length = 0: must be 1 or more"):
        aot.RunPrograms(small_config(), tiny.POLICY, meshes.make_mesh(), 0)
    with pytest.raises(ValueError, match="max_position_embeddings = 256"):
        aot.RunPrograms(small_config(), tiny.POLICY, meshes.make_mesh(), 251)
    with pytest.raises(FileNotFoundError, match=r"must be a Hugging Face config\.json"):
        aot.read_policy(small_config(), str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"policy\.folder = ''"):
        aot.read_policy(small_config())
    with pytest.raises(FileNotFoundError, match=r"'no/folder': .* config\.json by --policy"):
        aot.read_policy(small_config(**{"policy.folder": "no/folder"}))


def test_policy_combines_config_fields_with_the_given_shape(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny.POLICY.to_hf()))
    config = small_config(**{"policy.lora_rank": 2, "policy.remat": "dots"})
    policy = aot.read_policy(config, str(path), layers=3)
    assert (policy.layers, policy.remat, policy.width) == (3, "dots", tiny.POLICY.width)
    assert policy.lora == LoraConfig(2, config.policy.lora_alpha, config.policy.lora_pattern)
    config = small_config(**{"policy.rope_scaling": "linear", "policy.rope_factor": 2.0})
    assert aot.read_policy(config, str(path)).max_positions == 512
    config.policy.folder = "tiny"
    assert aot.read_policy(config).layers > 0
    config.policy.folder = f"file://{tmp_path}"  # has no weights; only the file is fetched
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    assert aot.read_policy(config).max_positions == 512


def test_mesh_impossible_on_the_slice_is_rejected(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2")

    monkeypatch.setattr(topologies, "devices", lambda _: jax.devices())
    monkeypatch.setattr(meshes, "make_mesh", refuse)
    with pytest.raises(ValueError, match=r"mesh = .*'fsdp': -1.*of v5p-128, which are \(4, 4, 4\)"):
        topologies.make_meshes(topologies.find("v5p-128"), aot.read_mesh(small_config()))


# ------------------------------------------------------------------ With compilers of accelerators


def compiled_programs(folder: Path, topology: str, *options: str) -> list[dict[str, Any]]:
    """Compile a small policy for a slice or GPU, and return launch.aot's lines."""
    shape = dataclasses.replace(
        tiny.POLICY, width=256, heads=2, kv_heads=1, head_size=128, feed_forward=512
    )
    file = folder / "config.json"
    file.write_text(json.dumps(shape.to_hf() | {"max_position_embeddings": 4096}))
    command = [sys.executable, "-m", "launch.aot", "--config=configs/paper.py", "--length=256"]
    command += [f"--topology={topology}", f"--policy={file}"]
    command += ["--config.sampler.max_tokens=32", *options]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert [line["program"] for line in lines] == list(aot.PROGRAMS)
    for line in lines:
        assert line["fits"] and 0 < line["bytes"]["arguments"] < line["hbm"]
    return lines


@pytest.mark.gpu
@pytest.mark.slow
def test_every_phase_compiles_for_a_gpu(tmp_path):
    pytest.importorskip(
        "jax_cuda13_plugin", reason="compiling for NVIDIA GPUs needs jax-cuda13-plugin"
    )
    (_, _, _, accumulate, _) = compiled_programs(tmp_path, "h100:1")
    assert accumulate["bytes"]["peak"] > accumulate["bytes"]["arguments"]


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("flags", "scattered"),
    [
        ([], 0),
        (["--config.mesh.fsdp=2", "--config.mesh.context=8"], 2),
        (["--config.mesh.fsdp=2", "--config.mesh.context=8", "--config.policy.ring=True"], 0),
    ],
    ids=["fsdp", "context", "ring"],
)
def test_every_phase_compiles_for_a_tpu_slice(tmp_path, flags: list[str], scattered: int):
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu (extra 'tpu')")
    lines = compiled_programs(tmp_path, "v5e-16", *flags)
    assert all(line["collectives"] for line in lines)
    assert lines[0]["mesh"]["fsdp"] == (2 if flags else 16)
    # With gathered keys and values, a layer returns the gradients of each to their devices by one
    # collective. With ring attention, they travel around the ring with the keys and values.
    assert lines[3]["collectives"]["all-to-all"]["in_loops"] == scattered


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("topology", "rollout_devices", "training", "sampling"),
    [("v5p-32", 2, 8, 8), ("v5p-32", 1, 12, 4), ("v6e-8", 4, 4, 4), ("v5e-4", 1, 3, 1)],
)
def test_split_run_compiles_for_a_tpu_slice(
    tmp_path, topology: str, rollout_devices: int, training: int, sampling: int
):
    """Also where jax.make_mesh has no layout: 12 chips of v5p-32, 3 of v5e-4."""
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu (extra 'tpu')")
    split = f"--config.mesh.rollout_devices={rollout_devices}"
    axes = [f"--config.mesh.data={training}", "--config.mesh.fsdp=1"]
    if training % 4 == 0:
        axes = [f"--config.mesh.data={training // 4}", "--config.mesh.fsdp=4"]
    lines = compiled_programs(tmp_path, topology, split, "--config.staleness=1", *axes)
    sizes = [math.prod(line["mesh"].values()) for line in lines]
    assert sizes == [sampling] * 2 + [training] * 3


@pytest.mark.tpu
def test_the_examples_step_compiles_for_a_tpu_slice():
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu (extra 'tpu')")
    command = [sys.executable, "-m", "launch.aot", "--program=examples/jitted_step.py"]
    result = subprocess.run(
        [*command, "--topology=v5e-4"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout)
    assert line["program"] == "jitted_step" and line["fits"]


@pytest.mark.parametrize("flag", ["--length=8", "--policy=a", "--layers=1", "--phase=update"])
def test_flags_of_a_run_are_refused_with_a_program_of_a_file(flag):
    values = flags.FlagValues()
    for name in ("config", "program", "length", "policy", "layers", "phase"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    values(["aot", "--program=a.py", flag])
    name = flag.partition("=")[0]
    with pytest.raises(app.UsageError, match=f"{name}: has no effect with --program"):
        aot.check_flags(values)
    values.config = "a.py"
    with pytest.raises(app.UsageError, match="one of --config and --program must be given"):
        aot.check_flags(values)
    values.program = ""
    aot.check_flags(values)


def test_a_program_of_a_file_is_read(tmp_path):
    mesh, file = meshes.make_mesh({"fsdp": 8}), tmp_path / "double.py"
    file.write_text(
        "import jax\n"
        "def abstract_program(mesh):\n"
        "    return jax.jit(lambda x: 2 * x), (jax.ShapeDtypeStruct((8,), float),)\n"
    )
    line = aot.measure_program(aot.read_program(str(file), mesh), hbm=2**30)
    assert (line["program"], line["phase"], line["fits"]) == ("double", "program", True)
    for code, message in (
        ("def abstract_program(mesh: return", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def abstract_program(mesh):\n    return 1\n", "TypeError: cannot unpack"),
    ):
        file.write_text(code)
        with pytest.raises(ValueError, match=rf"program = '.*double\.py': {message}"):
            aot.read_program(str(file), mesh)
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match="must define abstract_program"):
        aot.read_program(str(file), mesh)
    with pytest.raises(FileNotFoundError, match="must be a Python file"):
        aot.read_program(str(tmp_path / "none.py"), mesh)
