"""Tests of the benchmarks: one JSON line each, with numbers that follow from the shapes."""

import functools
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import plan, rollout
from benchmarks.__main__ import parse, run
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes

TINY = ["--group=3", "--layers=1", "--width=64", "--vocab=96"]
PAGES = ["--page_size=8", "--prefill=32"]
UPDATE = ["update", "--prompt=24", "--response=4", "--groups=2", "--repeats=1", *TINY]


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = functools.partial(meshes.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(meshes, "make_mesh", alone)


@pytest.mark.slow
def test_command_prints_options_and_measurements_as_one_json_line() -> None:
    command = [sys.executable, "-m", "benchmarks", *UPDATE, "--group=2"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    line = json.loads(process.stdout)
    assert (line["bench"], line["group"], line["device"]) == ("update", 2, "cpu")
    assert line["shared_s"] > 0 and line["processors"] > 0 and line["commit"]


def test_help_lists_benchmarks_and_their_options(capsys: pytest.CaptureFixture) -> None:
    for arguments, listed_name in ((["--help"], "refill"), (["refill", "--help"], "page_size")):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert listed_name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_update_benchmark_measures_shared_and_repeated_prompts() -> None:
    line = run(UPDATE)
    assert line["token_ratio"] == pytest.approx(3 * 28 / 36)
    assert 1 < line["flop_ratio"] < line["token_ratio"]
    assert line["ratio"] == pytest.approx(line["repeated_s"] / line["shared_s"])
    # At least 59,392 float32 weights and their gradient; activations of 36 and of 84 tokens.
    assert 8 * 59_392 < line["shared_peak_bytes"] < line["repeated_peak_bytes"]
    assert line["gradient_norm_difference"] < 1e-5 and line["device"] == "cpu"
    assert line["tokens_per_s"] == pytest.approx(2 * 36 / line["shared_s"])
    assert line["model_flops_per_s"] > 0 and line["mfu"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_update_benchmark_measures_trees() -> None:
    """Documents of 20 tokens, which two questions of 4 tokens share."""
    line = run([*UPDATE, "--groups=4", "--questions=2", "--question=4"])
    assert line["token_ratio"] == pytest.approx(6 * 28 / (20 + 2 * (4 + 12)))
    assert 1 < line["flop_ratio"] < line["token_ratio"]
    assert line["gradient_norm_difference"] < 1e-5
    assert line["tokens_per_s"] == pytest.approx(2 * 52 / line["shared_s"])
    with pytest.raises(ValueError, match="groups = 3: must be a multiple of 2"):
        run([*UPDATE, "--groups=3", "--questions=2"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("one_device")
def test_update_benchmark_with_a_window_counts_the_pairs_in_it() -> None:
    full_line, window_line = (run([*UPDATE, f"--window={window}"]) for window in (0, 8))
    operations = [line["model_flops_per_s"] * line["shared_s"] for line in (full_line, window_line)]
    # Prompt tokens 0 to 23 and three times answer tokens 24 to 27; 12 operations for each number
    # of the one head of 64.
    full = sum(p + 0.5 for p in range(24)) + 3 * sum(p + 0.5 for p in range(24, 28))
    window = sum(min(p + 1, 8) - 0.5 for p in range(24)) + 12 * 7.5
    assert operations[0] - operations[1] == pytest.approx(2 * 12 * 64 * (full - window))
    assert window_line["gradient_norm_difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("one_device")
def test_update_benchmark_of_a_config_json_with_lora(tmp_path) -> None:
    policy = PolicyConfig(96, 32, 2, 2, 1, 16, 48, qkv_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(policy.to_hf()))
    flags = [f"--policy={tmp_path / 'config.json'}", "--layers=1", "--lora=2", "--dtype=bfloat16"]
    line = run([*UPDATE, *flags, "--remat=block"])
    assert (line["layers"], line["width"], line["lora"], line["dtype"]) == (1, 32, 2, "bfloat16")
    assert line["gradient_norm_difference"] < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_sample_benchmark_measures_all_variants() -> None:
    flags = ["--questions=2", "--prompt=40", "--response=6", "--page_size=16", "--prefill=32"]
    line = run(["sample", *TINY, *flags, "--repeats=1", "--alone=1", "--transformers=1"])
    page = 16 * 2 * 1 * 1 * 64 * 4  # tokens, keys and values, layers, key heads, size, bytes
    assert line["shared_kv_bytes"] == (2 * 3 + 6 * 1) * page
    assert line["repeated_kv_bytes"] == (6 * 3 + 6 * 1) * page
    assert line["alone_kv_bytes"] == (3 + 1) * page
    for kind in ("shared", "repeated", "alone", "transformers"):
        assert line[f"{kind}_tokens_per_s"] == pytest.approx(36 / line[f"{kind}_s"])
        assert line[f"{kind}_samples_per_s"] == pytest.approx(6 / line[f"{kind}_s"])
        assert line[f"{kind}_prefill_s"] > 0
        if kind != "shared":
            expected_ratio = line[f"{kind}_s"] / line["shared_s"]
            assert line[f"{kind}_ratio"] == pytest.approx(expected_ratio)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_sample_benchmark_shares_the_documents_of_several_questions() -> None:
    flags = ["--questions=4", "--about=2", "--question=8", "--prompt=40", "--response=6"]
    line = run(["sample", *TINY, *flags, "--page_size=16", "--prefill=32", "--repeats=1"])
    page = 16 * 2 * 1 * 1 * 64 * 4
    answers = 4 * line["group"]
    # Two of the three pages of a prompt have documents alone, which two prompts share.
    assert line["shared_kv_bytes"] == (2 * 2 + 4 * 1 + answers) * page
    assert line["repeated_kv_bytes"] == (answers * 3 + answers) * page
    # By tokens alone: 40 of each answer, against 32 + 2 * 8 of each pair of questions.
    tokens = answers * 40 / (2 * (32 + 2 * 8))
    assert line["repeated_prefill_work_ratio"] == pytest.approx(tokens, rel=0.1)
    assert 1 < line["repeated_decode_work_ratio"] < line["repeated_prefill_work_ratio"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("one_device")
def test_plan_benchmark_compares_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [plan.ProgramShape(phase, 64, 1, 128, 2, 8) for phase in plan.CALIBRATION]
    monkeypatch.setattr(plan, "SHAPES", small)
    monkeypatch.setattr(plan, "CALIBRATION", {shape.phase: shape for shape in small})
    shapes = run(["plan", "--repeats=1", "--vocab=96"])["shapes"]
    assert [line["phase"] for line in shapes] == ["prefill", "decode", "update"]
    for line in shapes:
        assert line["ratio"] == pytest.approx(line["predicted_s"] / line["measured_s"])
        assert 0 < line["attention_operations"] < line["operations"]
        # Of a product so narrow, a copy that stays in the cache can have the higher figure.
        assert all(1e9 < line[rate] < 1e16 for rate in ("gemm_flops_per_s", "copy_bytes_per_s"))
        rate = line["operations"] / line["measured_s"]
        assert line["gemm_share"] == pytest.approx(rate / line["gemm_flops_per_s"])


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_refill_benchmark_samples_the_forced_lengths() -> None:
    flags = ["--requests=7", "--prompt=9", "--mean=12", "--cap=40", "--slots=6", "--decode=4"]
    line = run(["refill", *TINY, *PAGES, *flags])
    lengths = np.random.default_rng(0).geometric(1 / 12, size=(7, 3)).clip(max=40)
    assert lengths.max() == 40 and line["tokens"] == lengths.sum()
    longest = [lengths[i : i + 2].max() for i in range(0, 7, 2)]
    assert line["fixed_steps"] == sum(longest)
    for kind in ("refill", "fixed"):
        assert line[f"{kind}_tokens_per_s"] == pytest.approx(lengths.sum() / line[f"{kind}_s"])
    assert line["ratio"] == pytest.approx(line["fixed_s"] / line["refill_s"])
    assert 1 < line["step_ratio"] == line["fixed_steps"] / line["refill_steps"]
    assert 0 < line["starved_slot_steps"] < 0.1  # at most half a pass of all slots in each call
    assert 0 < line["padded_group_slots"] < 1


def test_refill_benchmark_needs_slots_for_a_group() -> None:
    with pytest.raises(ValueError, match="slots = 8: must be at least group = 9"):
        run(["refill", *TINY, *PAGES, "--group=9", "--slots=8"])


VERDICTS = ["--votes=2", "--template=20", "--question=15", "--answer=9", "--questions=2"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_spell_benchmark_measures_each_phase() -> None:
    flags = [*TINY, *PAGES, *VERDICTS, "--prompt=60", "--shown=30", "--about=2", "--response=6"]
    line = run(["spell", *flags, "--verdict=4", "--slots=4", "--apart=1"])
    phase_tokens = {
        phase: tuple(line[f"{phase}_{kind}_tokens"] for kind in ("prompt", "reused", "answer"))
        for phase in ("questioner", "grounding", "responder", "verifier", "apart")
    }
    # The documents of both questions are the same 45 tokens, which fill five pages. Of verifier
    # prompts, two pages of the template are shared, and two more of a question's 35 tokens.
    assert phase_tokens == {
        "questioner": (30, 0, 2 * 6),
        "grounding": (2 * 15, 0, 2 * 6),
        "responder": (2 * 60, 40, 2 * 3 * 6),
        "verifier": (6 * 44, 8 * (2 * 2 * 4 + 1 * 2), 6 * 2 * 4),
        "apart": (6 * 44, 0, 6 * 2 * 4),
    }
    assert line["apart_prompts_per_s"] == pytest.approx(6 / line["apart_s"])
    del phase_tokens["apart"]  # not a part of the step
    # Both responder groups, the questioner's with both questions, and one verifier group.
    assert line["update_tokens"] == 2 * (60 + 18) + (30 + 2 * 6) + (44 + 8)
    assert 0 < line["sampler_difference"] < 1e-4
    phases = [line[f"{phase}_s"] for phase in (*phase_tokens, "update")]
    assert min(phases) > 0
    assert line["step_s"] == pytest.approx(line["begin_s"] + sum(phases))
    assert line["update_s_per_question"] == line["update_s"] / 2
    assert line["extrapolated_questions"] == 128
    assert line["extrapolated_s"] == pytest.approx(line["begin_s"] + 64 * sum(phases))


def test_spell_benchmark_has_the_papers_share_of_verifier_groups() -> None:
    flags = [*TINY[1:], *VERDICTS[1:], "--votes=8", "--questions=128", "--prompt=60"]
    _, spell = parse(["spell", *flags])
    assert isinstance(spell, rollout.SpellBenchmark)
    rng = np.random.default_rng(0)
    prompts = spell.prompts(rng)
    sample = rollout.Sample(np.zeros(2, np.int32), np.zeros(2, np.float32), False)
    sampled = {
        phase: [[sample, sample]] * len(phase_prompts) for phase, phase_prompts in prompts.items()
    }
    groups = spell.train_groups(rng, prompts, sampled)
    assert len(prompts["verifier"]) == 1024
    assert [sum(g.name == role for g in groups) for role in ("responder", "verifier")] == [128, 16]


@pytest.mark.slow
def test_curve_of_a_run_is_plotted_beside_kept_ones(tmp_path: pathlib.Path) -> None:
    folder, curves_folder = tmp_path / "smollm2", tmp_path / "kept"
    folder.mkdir()
    curves_folder.mkdir()
    lines = [{"step": step, "eval/all": step / 100} for step in (10, 20)] + [{"step": 21}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reports = {
        moment: {
            "responder accuracy (rule)": {"all": {"": [accuracy, accuracy - 0.01, accuracy + 0.03]}}
        }
        for moment, accuracy in (("before", 0.05), ("after", 0.3))
    }
    (folder / "evaluation.json").write_text(json.dumps(reports))
    values = {"label": "demo", "steps": [0, 9], "accuracy": [0.1, 0.2]}
    (curves_folder / "curve_demo.json").write_text(json.dumps({"values": values}))
    flags = [f"--folder={curves_folder}", f"--out={tmp_path / 'figure.svg'}"]
    curve = run(["curve", f"--workdir={folder}", *flags])
    assert (curve["steps"], curve["accuracy"]) == ((0, 10, 20, 21), (0.05, 0.1, 0.2, 0.3))
    assert (curve["label"], curve["half"]) == ("smollm2", pytest.approx(0.02))
    picture = (tmp_path / "figure.svg").read_text()
    assert "smollm2" in picture and "demo" in picture
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run(["curve", f"--workdir={folder}", *flags])["accuracy"] == (0.05, 0.3)
    (folder / "metrics.jsonl").write_text("")  # a run that is still before its first update
    (folder / "evaluation.json").write_text(json.dumps({"before": reports["before"]}))
    assert run(["curve", f"--workdir={folder}", *flags])["steps"] == (0,)
    (folder / "evaluation.json").unlink()
    with pytest.raises(ValueError, match="no step has eval/responder or eval/all"):
        run(["curve", f"--workdir={folder}", *flags])
