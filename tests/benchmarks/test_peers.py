"""Tests of `python -m benchmarks peers`: its line, its errors, its environments, and TRL's side."""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import environments, peers
from benchmarks.__main__ import run
from benchmarks.sides import contract

TINY = ["--group=2", "--layers=1", "--width=64", "--vocab=96", "--page_size=16", "--prefill=32"]


def numbers(steps: Sequence[tuple[float, float]], **changes: Any) -> dict[str, Any]:
    """Make what a side prints, with the seconds of a slow first step and of `steps`."""
    generate, update = zip((50.0, 50.0), *steps, strict=True)
    side = contract.Numbers(list(generate), list(update), 100, 7, {"jax": "1"}, ["repeats prompts"])
    return dataclasses.asdict(side) | {"devices": 1, "device": "cpu"} | changes


OURS = numbers([(1.0, 1.0), (1.0, 3.0), (1.0, 2.0)])
LAST = numbers([(2.0, 4.0), (1.5, 3.0), (1.0, 1.5)], peak_bytes=200)
PEER = numbers([(10.0, 20.0), (10.0, 30.0), (11.0, 20.0)], peak_bytes=500)


def test_line_has_the_middle_steps_and_their_ratios() -> None:
    line = peers.compare(OURS, PEER, LAST)
    # Ours take 2, 2.5, 3, 4, 4.5 and 6 s: 3 s and 4 s are in the middle.
    assert (line["ours_s"], line["ours_generate_s"], line["ours_update_s"]) == (3.5, 1.0, 2.5)
    assert (line["peer_s"], line["peer_generate_s"], line["peer_update_s"]) == (31.0, 11.0, 20.0)
    assert line["ours_steps_s"] == [2.0, 4.0, 3.0, 6.0, 4.5, 2.5]
    assert line["peer_steps_s"] == [30.0, 40.0, 31.0]
    assert line["ratio"] == 31.0 / 3.5
    assert (line["ratio_least"], line["ratio_greatest"]) == (30.0 / 6.0, 40.0 / 2.0)
    assert (line["ours_peak_gb"], line["peer_peak_gb"], line["peak_ratio"]) == (2e-7, 5e-7, 2.5)
    differences = {"ours": ["repeats prompts"], "peer": ["repeats prompts"]}
    assert line["differences"] == differences and line["versions"]["peer"] == {"jax": "1"}
    assert (line["parameters"], line["devices"], line["device"]) == (7, 1, "cpu")


def test_policies_of_other_sizes_are_not_compared() -> None:
    with pytest.raises(environments.PeerError, match="8 weights in the peer, 7 here: the policies"):
        peers.compare(OURS, PEER | {"parameters": 8}, LAST)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--steps=2"], "steps = 2: must be at least 3"),
        (["--micro=3"], "micro = 3: must divide groups = 2"),
        (["--about=3"], "about = 3: must divide groups = 2"),
        (["--dtype=float16"], "dtype = 'float16': must be 'float32' or 'bfloat16'"),
        (["--peer=verl"], "peer = 'verl': must be one of easydel, trl, tunix"),
    ],
)
def test_bad_options_end_in_a_line(flags: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        run(["peers", *flags])


def test_only_trl_has_other_policies_than_qwen2(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    shape = peers.PeersBenchmark(width=64, layers=1).model
    path.write_text(json.dumps(dataclasses.replace(shape, qkv_bias=False).to_hf()))
    with pytest.raises(ValueError, match="policy: model_type = 'llama': must be 'qwen2' beside tu"):
        run(["peers", "--peer=tunix", f"--policy={path}"])
    options = contract.SideOptions(str(path), 96, "float32", 2, 1, 1, 2, 8, 4, 1, 3)
    with pytest.raises(ValueError, match="policy: model_type = 'llama': must be 'qwen2' here"):
        options.shape()


def test_clock_lists_the_parts_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 12.0, 14.0, 17.0, 18.0])
    monkeypatch.setattr(contract.time, "perf_counter", lambda: next(times))
    clock = contract.Clock()
    clock.steps_begin()
    clock.generate_ends()
    clock.update_ends()
    clock.update_ends()  # the second micro-batch
    clock.generate_ends()
    clock.update_ends()
    assert clock.seconds() == {"generate_s": [1.0, 3.0], "update_s": [3.0, 1.0]}


def test_prompts_about_the_same_documents_begin_alike() -> None:
    options = contract.SideOptions("", 96, "float32", 4, 2, 3, 2, 8, 4, 1, 1)
    prompts = options.prompts()
    assert prompts.shape == (2 * 4, 8)
    assert (prompts[0, :5] == prompts[1, :5]).all() and (prompts[0, 5:] != prompts[1, 5:]).any()
    assert (prompts[1, :5] != prompts[2, :5]).any()


def test_rewards_need_answers_of_all_tokens() -> None:
    assert all(0 <= reward < 1 for reward in contract.random_rewards(["3 5", [3, 5]], 2))
    with pytest.raises(AssertionError, match=r"answers of \{1\} tokens"):
        contract.random_rewards(["3"], 2)


@pytest.fixture
def requirements(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Let the repository be a folder in which a peer needs nothing."""
    folder = tmp_path / "root" / "requirements"
    folder.mkdir(parents=True)
    path = folder / "peer_trl.txt"
    path.write_text("# nothing\n")
    monkeypatch.setattr(environments, "ROOT", tmp_path / "root")
    return path


def place_command(folder: pathlib.Path, name: str, script: str) -> None:
    """Write an executable shell script."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make_fake_python(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, pip: str) -> None:
    """Place a Python 3.13 on PATH whose venv copies it and whose `pip` is a shell command."""
    script = (
        f'case "$2" in *ensurepip*) echo 3.13; exit;; venv) mkdir -p "$4/bin"; cp "$0" "$4/bin/'
        f'python"; exit;; pip) {pip}; exit $?;; esac; echo "{{\\"answer\\": \\"$3\\"}}"'
    )
    place_command(tmp_path / "bin", "python3.13", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_environment_is_made_once_and_again_for_other_versions(
    tmp_path: pathlib.Path, requirements: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake_python(tmp_path, monkeypatch, f"echo x >> {tmp_path / 'installed'}")
    environment = environments.ensure("trl", tmp_path / "peers")
    reused_environment = environments.ensure("trl", tmp_path / "peers")
    python = tmp_path / "peers" / "trl" / "venv" / "bin" / "python"
    assert environment.python == reused_environment.python == str(python)
    assert environment.seconds > 0 == reused_environment.seconds
    assert (tmp_path / "installed").read_text().count("x") == 1
    requirements.write_text("other==1\n")
    assert environments.ensure("trl", tmp_path / "peers").seconds > 0
    assert (tmp_path / "installed").read_text().count("x") == 2
    assert json.loads(environment.run_module("side", "options")) == {"answer": "options"}


def test_interrupted_installation_is_made_again(
    tmp_path: pathlib.Path, requirements: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake_python(tmp_path, monkeypatch, "echo no such version >&2; false")
    folder = tmp_path / "peers" / "trl"
    folder.mkdir(parents=True)
    shutil.copy(requirements, folder / "installed.txt")  # of an environment that was deleted
    log = folder / "log.txt"
    for _ in range(2):
        with pytest.raises(environments.PeerError) as caught:
            environments.ensure("trl", tmp_path / "peers")
        line = f"the installation of trl ended with status 1: no such version; {log} has the rest"
        assert str(caught.value) == line
    assert f"-m pip install -r {requirements}" in log.read_text()


def test_missing_interpreter_ends_in_a_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that only tells how to install Python (a shim) is none."""
    place_command(tmp_path / "bin", "python3.13", "echo install it first >&2; exit 127")
    place_command(tmp_path / "bin", "python3.12", "echo 3.10")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3.13"))
    with pytest.raises(FileNotFoundError, match=r"no python3\.13, python3\.12, python3\.11 w"):
        environments.find_interpreter()


def test_failed_side_ends_in_a_line(tmp_path: pathlib.Path) -> None:
    place_command(tmp_path, "python", "echo half; echo out of memory >&2; exit 9")
    log = tmp_path / "log.txt"
    side = environments.Environment(str(tmp_path / "python"), log)
    with pytest.raises(environments.PeerError) as caught:
        side.run_module("benchmarks.sides.tunix", "{}")
    problem = f"ended with status 9: out of memory; {log} has the rest"
    assert str(caught.value) == f"benchmarks.sides.tunix {problem}"
    assert log.read_text().splitlines()[1:] == ["half", "out of memory"]


def test_sides_get_the_cpu_no_hub_and_a_home_of_their_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/packages/of/another/python")
    place_command(tmp_path, "python", 'echo "$JAX_PLATFORMS $HF_HUB_OFFLINE $HOME $PYTHONPATH."')
    home = tmp_path / "home"
    side = environments.Environment(str(tmp_path / "python"), tmp_path / "log.txt", home)
    assert side.run_module("side", "{}") == f"cpu 1 {home} ."


def test_every_peer_has_a_side_and_pinned_versions() -> None:
    """A side imports nothing of spell_jax and nothing but the contract of this repository."""
    for peer in environments.PEERS:
        lines = (environments.ROOT / "requirements" / f"peer_{peer}.txt").read_text().splitlines()
        packages = [line for line in lines if not line.startswith("#")]
        assert packages and all("==" in package for package in packages)
        source = (environments.ROOT / "benchmarks" / "sides" / f"{peer}.py").read_text()
        assert "spell_jax" not in source and source.count("from benchmarks") == 1


@pytest.mark.slow
def test_step_of_trl_is_measured_beside_ours(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's side runs in this environment, which has TRL too."""
    pytest.importorskip("trl", reason="extra 'test'")
    here = environments.Environment(sys.executable, tmp_path / "log.txt")
    monkeypatch.setattr(environments, "ensure", lambda peer, folder: here)
    sizes = ["--groups=2", "--about=2", "--question=8", "--prompt=24", "--response=4", "--steps=3"]
    line = run(["peers", *TINY, *sizes, "--peer=trl"])
    assert line["peer_s"] == pytest.approx(line["peer_generate_s"] + line["peer_update_s"])
    assert line["ours_s"] == pytest.approx(line["ours_generate_s"] + line["ours_update_s"])
    assert line["ratio"] == pytest.approx(line["peer_s"] / line["ours_s"])
    assert line["peak_ratio"] == line["peer_peak_gb"] / line["ours_peak_gb"]
    assert (len(line["ours_steps_s"]), len(line["peer_steps_s"])) == (6, 3)
    # With gradient and moments four times the weights, and at least the libraries.
    assert min(line["ours_peak_gb"], line["peer_peak_gb"]) > 2**27 / 1e9
    # Embedding, q, k, v with biases, o, mlp, norms.
    assert line["parameters"] == 96 * 64 + 3 * 64 * 65 + 64 * 64 + 3 * 64 * 192 + 3 * 64
    assert (line["devices"], line["device"]) == (1, "cpu")
    assert line["versions"]["peer"]["trl"].startswith("1.16.")
    assert "repeat each prompt 2 times" in line["differences"]["peer"][0]
