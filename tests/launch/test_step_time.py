"""Tests of launch/step_time.py: the table of every paper config, and how its numbers move."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from spell_jax.configs import paper
from spell_jax.launch import aot, dry_step, step_time, topologies
from spell_jax.launch.step_time import Machine, Phase, Seconds, Shares
from spell_jax.launch.topologies import Peaks
from spell_jax.launch.work import Products, ProgramCounts, Work
from spell_jax.learner.packing import PackingConfig
from spell_jax.runtime.config import build
from tests import noise
from tests.launch.test_experiments import SHAPES
from tests.paths import ROOT

DOCS = ROOT / "docs" / "long_context.md"
SMALL = {"algorithm.generation_batch": 16, "algorithm.questions": 8, "mesh.fsdp": -1}
SMALL |= {"sampler.decode_tokens": 1024}  # few calls


_TRACED: dict[tuple[str, str], Products] = {}


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace each program of a policy once: operations per token do not depend on the mesh."""
    trace = ProgramCounts.products

    def products(counts: ProgramCounts, name: str) -> Products:
        key = repr(counts.policy), name
        if key not in _TRACED:
            _TRACED[key] = trace(counts, name)
        return _TRACED[key]

    monkeypatch.setattr(ProgramCounts, "products", products)


def _programs(
    topology: str, model: str = "qwen2.5-7b-instruct", length: int = 4096, **fields: Any
) -> aot.RunPrograms:
    config = paper.get_config(model)
    noise.with_fields(config, SMALL | fields)
    folder = config.policy.folder
    policy = next(shape for name, shape in SHAPES.items() if name in folder)
    policy = dataclasses.replace(policy, remat=config.policy.remat)
    place = topologies.find(topology)
    mesh, rollout_mesh = topologies.abstract_meshes(place, aot.read_mesh(config))
    return aot.RunPrograms(config, policy, mesh, length, rollout_mesh=rollout_mesh)


def _phases(topology: str, length: int = 4096, **fields: Any) -> dict[str, Phase]:
    programs = _programs(topology, length=length, **fields)
    work = step_time.workload(programs.config, length)
    place = topologies.find(topology)
    counts = step_time.count_programs(programs, place)
    step = step_time.phases(counts, place, work)
    return {phase.name: phase for phase in step.rollout + step.update}


def _total(topology: str, **fields: Any) -> float:
    return sum(phase.seconds.total for phase in _phases(topology, **fields).values())


# Each model's programs are traced: 15 s.
STOREYS = {"qwen2.5-7b-instruct": (), "qwen3-30b-a3b-instruct": pytest.mark.slow}


@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=STOREYS.get(model, pytest.mark.long)) for model in paper.MODELS],
)
def test_every_paper_config_has_a_table(model: str) -> None:
    topology = topologies.find("v5p-64")
    programs = _programs(topology.name, model)
    text = step_time.describe_step(programs, topology, step_time.workload(programs.config, 4096))
    for role in ("questioner", "responder", "verifier"):
        assert f"{role}: prefill" in text and f"{role}: decode" in text
    for word in ("update", "optimizer, cast", "whole step", "their caps", "--answered=0.5"):
        assert word in text
    assert "logprobs" not in text


@pytest.mark.slow
def test_more_chips_take_fewer_seconds_and_faster_ones_too() -> None:
    """With one part of rows: more parts of few rows would only be padded."""
    fields = {"mesh.fsdp": 1, "mesh.context": -1}
    seconds = [_total(f"v5e-{chips}", **fields) for chips in (16, 32, 64)]
    assert seconds[0] > seconds[1] > seconds[2]
    for faster in ("v6e-16", "v5p-32"):
        assert _total(faster, **fields) < seconds[0]


def test_questions_about_a_cluster_share_prefill_and_update() -> None:
    """A pool that holds all prompts; each four questions have the same documents."""
    fields = {"sampler.kv_cache_tokens": 2**20, "mesh.fsdp": 1, "mesh.context": -1}
    sharing = {"algorithm.questioner.questions_per_cluster": 4}
    one_question, four_questions = (
        _phases("v5e-16", **fields),
        _phases("v5e-16", **fields, **sharing),
    )
    for name in ("questioner: prefill", "responder: prefill", "update"):
        assert four_questions[name].seconds.compute < one_question[name].seconds.compute
    prefill = "questioner: prefill"
    assert four_questions[prefill].calls < one_question[prefill].calls


def test_split_run_has_a_table_for_each_mesh() -> None:
    fields = {"mesh.rollout_devices": 2, "staleness": 1, "mesh.rollout.tensor": 4}
    programs = _programs("v5p-32", **fields)
    topology = topologies.find("v5p-32")
    text = step_time.describe_step(programs, topology, step_time.workload(programs.config, 4096))
    rollout, update = text.index("whole rollout"), text.index("whole update")
    assert text.index("verifier: decode") < rollout < text.index("\nupdate") < update
    assert "whole step" not in text and "8 sample, mesh fsdp=2 tensor=4" in text
    assert "their caps: rollout" in text
    # Half of the chips hold all optimizer state.
    weights = "optimizer, cast"
    split, shared = (_phases("v5p-32", **f)[weights].seconds for f in (fields, {}))
    assert split.memory == pytest.approx(2 * shared.memory)


def test_extra_passes_are_rows_of_the_table() -> None:
    phases = _phases("v5e-16", **{"loss.old_logprobs": "recompute", "loss.kl_weight": 0.1})
    passes = phases["old logprobs"].seconds, phases["reference logprobs"].seconds
    assert passes[0] == passes[1] and passes[0].total < phases["update"].seconds.total / 2
    reader = _phases("v5e-16", **{"algorithm.reader.source": "frozen_reader"})
    assert reader["reference_reader: prefill"].seconds.total > 0


def test_seconds_follow_from_peaks_and_shares() -> None:
    shares = Shares(0.5, 0.25, 0.1, 0.5, 0.8, 0.5, 0.5, 1e-3)
    chip = Machine(Peaks(100.0, 10.0, 2.0), shares)
    work = Work(products=100, attention=50, memory=24, link=3, hops=1000)
    prefill = chip.seconds("prefill", work._replace(hops=0))
    assert prefill == Seconds(3.0, 3.0, 3.0) and prefill.total == 3
    experts = chip.seconds("prefill", work._replace(hops=0), has_experts=True)
    assert (experts.compute, experts.bound, experts.total) == (5.0, "compute", 5.0)
    decode = chip.seconds("decode", work)
    assert (decode.compute, decode.link, decode.total) == (11.0, 4.0, 15.0)
    assert chip.seconds("update", work).compute == 5.0


def test_update_is_packed_as_by_the_learner() -> None:
    programs = _programs("v5e-16")
    work = step_time.workload(programs.config, 4096)
    groups = dry_step.run_step(programs.config, programs.sampler, work).groups
    batches = step_time.micro_batches(programs, groups)
    weights = programs.learner.weigh(groups)
    layout = build(PackingConfig, programs.config.packing, "packing")
    packed, refused = programs.learner.pack(groups, weights, layout)
    assert not refused
    shapes = Counter((batch.tokens.size, batch.target.size) for batch in packed)
    assert {size[:2]: count for size, count in batches.items()} == shapes


def test_answers_too_long_for_the_rows_get_the_plan_own_rows() -> None:
    programs = _programs("v5e-16", **{"packing.token_budget": 2048})
    work = step_time.workload(programs.config, 4096)
    groups = dry_step.run_step(programs.config, programs.sampler, work).groups
    lengths = {tokens for tokens, *_ in step_time.micro_batches(programs, groups)}
    assert min(lengths) >= programs.bucket.length


def _rows() -> list[list[str]]:
    """Read the rows of the documented table of the config that is estimated fastest."""
    lines = re.sub(r"<!--.*?-->", "", DOCS.read_text()).splitlines()  # names of numbers
    rows = [line for line in lines if re.match(r"\| `qwen2.5-7b-instruct` \| v", line)]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in rows]


@pytest.mark.long
@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[1])
def test_documented_seconds_are_within_15_percent_of_the_model(row: list[str]) -> None:
    model, topology, changes, pool, *cells = row
    options = dict(change.split("=") for change in changes.split())
    fields: dict[str, Any] = {name: int(value) for name, value in options.items()}
    fields |= {"sampler.kv_cache_tokens": int(pool.strip("M")) * 2**20}
    fields |= {"algorithm.generation_batch": 480, "algorithm.questions": 128}
    fields |= {"sampler.decode_tokens": 64}
    for questions, cell in zip((1, 4), cells, strict=False):
        phases = _phases(
            topology, 16_384, **fields, **{"algorithm.questioner.questions_per_cluster": questions}
        )
        total = sum(phase.seconds.total for phase in phases.values())
        # The page has the seconds of an earlier commit, whose schedule was written by hand.
        assert total == pytest.approx(int(cell.split("=")[1]), rel=0.15), model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--answered=2"], "error: answered = 2.0: must be above 0, at most 1"),
        (["--documents=0"], "error: documents = 0: must be at least 1"),
        (["--documents=99"], "error: length = 1024: must be at least "),
        (["--topology=a100:8"], "error: topology = 'a100:8': did you mean "),
        (["--topology=gpu:8"], "error: topology = 'gpu:8': no speed of such devices is known, mu"),
        ([], ""),
    ],
)
def test_command_prints_a_table_or_one_line(tmp_path, flags: list[str], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["7B"].to_hf()))
    command = [sys.executable, "-m", "launch.plan", "--time", "--topology=a100-80:8"]
    command += ["--config=configs/paper.py:qwen2.5-7b-instruct", f"--policy={path}"]
    command += ["--length=1024", "--config.algorithm.generation_batch=8", *flags]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert process.returncode == (2 if message else 0), process.stderr
    if message:
        assert len(lines) == 1 and lines[0].startswith(message)
    else:
        assert "whole step" in process.stdout and "Memory: all programs fit" in process.stdout
