"""Tests of the benchmarks: one JSON line each, and operation counts that follow from the shapes."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import browser, commands, rollout, trl
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.runtime import mesh as meshes

SMALL = ["--prompt=24", "--response=4", "--group=3", "--groups=2", "--layers=1", "--width=64"]


@pytest.mark.slow
def test_update_prints_a_line_with_both_layouts() -> None:
    command = [sys.executable, "-m", "benchmarks", "update", *SMALL, "--vocab=96", "--repeats=1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": ""}
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["token_ratio"] == pytest.approx(3 * 28 / 36)
    assert 1 < line["flop_ratio"] < line["token_ratio"]
    assert line["ratio"] == pytest.approx(line["repeated_s"] / line["shared_s"])
    # At least 59,392 float32 weights and their gradient; activations of 36 and of 84 tokens.
    assert 8 * 59_392 < line["shared_peak_bytes"] < line["repeated_peak_bytes"]
    assert line["gradient_norm_difference"] < 1e-5 and line["device"] == "cpu"
    assert line["tokens_per_s"] == pytest.approx(2 * 36 / line["shared_s"])
    assert line["model_flops_per_s"] > 0 and line["mfu"] is None


@pytest.mark.slow
def test_sampling_prints_a_line_with_all_kinds() -> None:
    flags = ["--prompt=40", "--response=6", "--group=3", "--layers=1", "--width=64", "--vocab=96"]
    flags += ["--page_size=16", "--prefill=32", "--repeats=1", "--transformers=1"]
    line = commands.run(commands.parse(["sample", *flags]))
    page = 16 * 2 * 1 * 1 * 64 * 4  # tokens, keys and values, layers, key heads, size, bytes
    assert line["shared_kv_bytes"] == (3 + 3 * 1) * page
    assert line["repeated_kv_bytes"] == (3 * 3 + 3 * 1) * page
    for kind in ("shared", "repeated", "transformers"):
        assert line[f"{kind}_tokens_per_s"] == pytest.approx(18 / line[f"{kind}_s"])
        assert line[f"{kind}_prefill_s"] > 0
    assert line["ratio"] == pytest.approx(line["repeated_s"] / line["shared_s"])
    wanted = line["transformers_s"] / line["shared_s"]
    assert line["transformers_ratio"] == pytest.approx(wanted)
    assert line["bench"] == "sample" and line["device"] == "cpu"


@pytest.mark.skipif(browser.PROGRAM is None, reason=browser.MISSING)
def test_a_report_of_a_long_run_is_bounded_and_opens() -> None:
    """A run whose documents alone are more than the page may hold."""
    flags = ["--steps=10", "--episodes=55", "--clusters=1000", "--document=12000", "--repeats=1"]
    line = commands.run(commands.parse(["report", *flags]))
    assert line["episodes_on_disk"] == line["episodes"] == 550
    assert 45 < line["page_mb"] <= 50 and 300 < line["episodes_with_documents"] < 550
    assert line["open_s"] > 0 and line["write_s"] > 0 and line["problems"] == 0


@pytest.mark.slow
def test_evaluating_draws_the_same_together_and_alone() -> None:
    flags = ["--questions=2", "--prompt=24", "--response=4", "--group=3", "--slots=6", "--layers=1"]
    flags += ["--width=64", "--vocab=96", "--page_size=8", "--prefill=32"]
    line = commands.run(commands.parse(["evaluate", *flags]))
    assert line["bench"] == "evaluate" and line["samples"] == 6
    for kind in ("together", "alone"):
        assert line[f"{kind}_samples_per_s"] == pytest.approx(6 / line[f"{kind}_s"])
    assert line["ratio"] == pytest.approx(line["alone_s"] / line["together_s"])


TINY = ["--group=3", "--layers=1", "--width=64", "--vocab=96", "--page_size=8", "--prefill=32"]


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = functools.partial(meshes.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(meshes, "make_mesh", alone)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_refill_draws_the_lengths_that_it_forces() -> None:
    flags = ["--requests=7", "--prompt=9", "--mean=12", "--cap=40", "--slots=6", "--decode=4"]
    line = commands.run(commands.parse(["refill", *TINY, *flags]))
    lengths = np.random.default_rng(0).geometric(1 / 12, size=(7, 3)).clip(max=40)
    assert lengths.max() == 40 and line["tokens"] == lengths.sum()
    longest = [lengths[i : i + 2].max() for i in range(0, 7, 2)]
    assert line["fixed_steps"] == sum(longest)
    assert line["ideal_ratio"] == sum(longest) / np.ceil(lengths.sum() / 6)
    for kind in ("refill", "fixed"):
        assert line[f"{kind}_tokens_per_s"] == pytest.approx(lengths.sum() / line[f"{kind}_s"])
        assert line[f"{kind}_filled"] == pytest.approx(lengths.sum() / (6 * line[f"{kind}_steps"]))
    assert line["ratio"] == pytest.approx(line["fixed_s"] / line["refill_s"])
    assert 1 < line["step_ratio"] == line["fixed_steps"] / line["refill_steps"]
    assert (
        line["idle"] == 0 and 0 < line["padded_group_slots"] < 1
    )  # as many rows as slots: no slot is free


def test_refill_wants_slots_for_a_group() -> None:
    with pytest.raises(ValueError, match="slots = 8: must be at least group = 9"):
        commands.run(commands.parse(["refill", *TINY[1:], "--group=9", "--slots=8"]))


VERDICTS = ["--votes=2", "--template=20", "--question=15", "--answer=9", "--questions=2"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_verify_counts_what_is_read_once() -> None:
    flags = [*TINY, *VERDICTS, "--verdict=4", "--slots=4", "--repeats=1"]
    line = commands.run(commands.parse(["verify", *flags]))
    assert (line["prompts"], line["prompt_tokens"]) == (6, 6 * 44)
    # In pages of 8: two of the template, two more of a question's 35 tokens.
    assert line["shared_reused_tokens"] == 8 * (2 * 2 * 4 + 1 * 2)
    assert line["apart_reused_tokens"] == 0
    for kind in ("shared", "apart"):
        assert line[f"{kind}_prompts_per_s"] == pytest.approx(6 / line[f"{kind}_s"])
    assert line["ratio"] == pytest.approx(line["apart_s"] / line["shared_s"])


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_quality_of_small_numbers() -> None:
    sizes = ["quality", "--items=2", "--documents=3"]
    plain = commands.run(
        commands.parse([*sizes, "--cache=compute", "--weights=compute", "--guessed=3"])
    )
    assert plain["equal_answers"] == plain["equal_tokens"] == 1
    assert plain["largest_difference"] < 1e-4 and plain["tokens_per_pass"] > 1
    small = commands.run(commands.parse(sizes))
    assert small["tokens_per_pass"] == 1 and small["answers"] == plain["answers"]
    assert small["largest_difference"] > 1e-3 and 0 < small["kl"] < 0.05
    assert 0.5 < small["equal_tokens"] <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_step_of_spell_by_phase() -> None:
    flags = [*TINY, *VERDICTS, "--prompt=60", "--shown=30", "--about=2", "--response=6"]
    line = commands.run(commands.parse(["spell", *flags, "--verdict=4", "--slots=4"]))
    found = {
        phase: tuple(line[f"{phase}_{kind}_tokens"] for kind in ("prompt", "reused", "answer"))
        for phase in ("questioner", "grounding", "responder", "verifier")
    }
    # The documents of both questions are the same 45 tokens, which fill five pages.
    assert found == {
        "questioner": (2 * 30, 0, 2 * 6),
        "grounding": (2 * 15, 0, 2 * 6),
        "responder": (2 * 60, 40, 2 * 3 * 6),
        "verifier": (6 * 44, 144, 6 * 2 * 4),
    }
    # Both responder and both questioner groups, and one verifier group.
    assert line["update_tokens"] == 2 * (60 + 18) + 2 * (30 + 6) + (44 + 8)
    assert 0 < line["sampler_difference"] < 1e-4
    phases = [line[f"{phase}_s"] for phase in (*found, "update")]
    assert min(phases) > 0
    assert line["step_s"] == pytest.approx(line["begin_s"] + sum(phases))
    assert line["update_s_per_question"] == line["update_s"] / 2
    assert line["extrapolated_questions"] == 128
    assert line["extrapolated_s"] == pytest.approx(line["begin_s"] + 64 * sum(phases))


def test_verifier_rows_have_the_papers_share() -> None:
    options = commands.parse(
        ["spell", *VERDICTS[1:], "--votes=8", "--questions=128", "--prompt=60"]
    )
    rng = np.random.default_rng(0)
    prompts = rollout._spell_prompts(rng, 96, options)
    sample = rollout.Sample(np.zeros(2, np.int32), np.zeros(2, np.float32), False)
    said = {phase: [[sample, sample]] * len(some) for phase, some in prompts.items()}
    groups = rollout._spell_groups(rng, prompts, said, options)
    assert len(prompts["verifier"]) == 1024
    assert [sum(g.role == role for g in groups) for role in ("responder", "verifier")] == [128, 16]


SIDES = ["--group=2", "--groups=2", "--prompt=24", "--response=4", "--layers=1", "--width=64"]
SIDES += ["--vocab=96", "--page_size=16", "--prefill=32", "--steps=2"]


@pytest.mark.slow
def test_a_step_beside_trl() -> None:
    line = commands.run(commands.parse(["trl", *SIDES]))
    assert line["trl_s"] == pytest.approx(line["trl_generate_s"] + line["trl_update_s"])
    assert line["ours_s"] == pytest.approx(line["ours_generate_s"] + line["ours_update_s"])
    assert line["ratio"] == pytest.approx(line["trl_s"] / line["ours_s"])
    assert line["peak_ratio"] == line["trl_peak_bytes"] / line["ours_peak_bytes"]
    # With gradient and moments four times the weights, and at least the libraries.
    assert min(line["ours_peak_bytes"], line["trl_peak_bytes"]) > 2**27
    # Embedding, q, k, v with biases, o, mlp, norms.
    assert line["parameters"] == 96 * 64 + 3 * 64 * 65 + 64 * 64 + 3 * 64 * 192 + 3 * 64
    assert (line["devices"], line["device"]) == (1, "cpu")


@pytest.mark.slow
def test_our_side_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TRL: its results are copies of ours with other times."""
    monkeypatch.setattr(trl.importlib.util, "find_spec", lambda name: name)
    run_side, found = trl._run, {}
    times = {"generate_s": [9.0, 4.0], "update_s": [9.0, 2.0], "peak_bytes": 2**40, "trl": "0"}

    def run(module, given):
        if module == "benchmarks.trl":
            found.update(run_side(module, given))
            return found
        return found | times

    monkeypatch.setattr(trl, "_run", run)
    line = commands.run(commands.parse(["trl", *SIDES]))
    assert (line["trl_s"], line["trl_generate_s"], line["trl_update_s"]) == (6.0, 4.0, 2.0)
    assert line["ratio"] == pytest.approx(6 / line["ours_s"]) and line["trl"] == "0"
    assert 2**27 < line["ours_peak_bytes"] < 2**40


def test_what_trl_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="steps = 1: must be at least 2"):
        monkeypatch.setattr(trl.importlib.util, "find_spec", lambda name: name)
        commands.run(commands.parse(["trl", "--steps=1"]))
    with pytest.raises(ValueError, match="micro = 3: must divide groups = 2"):
        commands.run(commands.parse(["trl", "--micro=3"]))
    monkeypatch.setattr(trl.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[test\]'"):
        commands.run(commands.parse(["trl"]))


@pytest.mark.slow
def test_the_shape_of_a_config_json(tmp_path) -> None:
    policy = PolicyConfig(96, 32, 2, 2, 1, 16, 48, qkv_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(policy.to_hf()))
    flags = [f"--policy={tmp_path / 'config.json'}", "--layers=1", "--lora=2", "--dtype=bfloat16"]
    options = commands.parse(["update", *SMALL[:4], *flags, "--repeats=1", "--remat=block"])
    line = commands.bench_update(options)
    assert (line["layers"], line["width"], line["lora"], line["dtype"]) == (1, 32, 2, "bfloat16")
    assert line["gradient_norm_difference"] < 0.02


def test_operations_by_hand() -> None:
    policy = PolicyConfig(10, 4, 3, 2, 1, 8, 6)
    weights = 3 * (4 * 2 * 8 + 2 * 4 * 8 + 2 * 8 * 4 + 3 * 4 * 6)  # q, k and v, o, mlp
    head = 6 * 10 * 4 * 6  # 6 answer tokens
    shared_pairs = 5 * 5 / 2 + 6 * 5 + 3 * 2 * 2 / 2
    wanted = 6 * weights * 11 + 12 * 3 * 2 * 8 * shared_pairs + head
    found = commands.count_flops(policy, prompt=5, response=2, group=3)
    assert found["shared"] == pytest.approx(wanted)
    wanted = 6 * weights * 21 + 12 * 3 * 2 * 8 * 3 * 7 * 7 / 2 + head
    assert found["repeated"] == pytest.approx(wanted)
    experts = dataclasses.replace(policy, experts=4, experts_per_token=2)
    more = commands.count_flops(experts, prompt=5, response=2, group=3)["shared"]
    assert more - commands.count_flops(policy, 5, 2, 3)["shared"] == 6 * 11 * 3 * (
        3 * 4 * 6 + 4 * 4
    )
    adapted = dataclasses.replace(policy, lora=LoraConfig(2), qkv_bias=True)
    less = commands.count_flops(adapted, 5, 2, 3)["shared"]
    assert commands.count_flops(policy, 5, 2, 3)["shared"] - less == 2 * (weights * 11 + 10 * 4 * 6)
    one = commands.count_flops(policy, prompt=5, response=2, group=1)
    assert one["shared"] == pytest.approx(one["repeated"])
