"""Tests of the commands of docs/howto/evaluate.md: 32,768 positions, 100K tokens, YaRN."""

from __future__ import annotations

import json
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from absl import flags

from spell_jax.configs import paper
from spell_jax.evaluation import answering, runner
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.rope import RopeConfig
from spell_jax.rollout import judge as judging
from spell_jax.runtime import entry
from tests import noise
from tests.evaluation.benchmarks import test_long_documents as rows
from tests.paths import ROOT

ROPE = ("--rope_scaling=yarn", "--rope_factor=4")
LONG = "Rome has hills. " * 18_000  # 108,000 tokens
POSITIONS = 32_768  # of Qwen2.5-7B-Instruct


def commands() -> list[list[str]]:
    """Read the flags of the page's `python -m spell_jax.evaluate` commands for a policy's weights.

    The page has the flags of both commands in the variable SAME.
    """
    text = (ROOT / "docs" / "howto" / "evaluate.md").read_text().replace("\\\n", " ")
    (same,) = re.findall(r'SAME="([^"]*)"', text)
    lines = re.findall(r"python -m spell_jax\.evaluate (.*) \$SAME", text)
    return [shlex.split(f"{line} {same}") for line in lines]


def with_folders(arguments: list[str], policy: pathlib.Path, data: pathlib.Path) -> list[str]:
    """Replace the folders of a command by folders that exist; the output goes beside the data."""
    places = {"--policy": policy, "--data": data, "--workdir": policy.parent}
    places |= {name: data.parent / "out" / name[2:] for name in ("--out", "--compare")}
    flag_pairs = [argument.split("=", 1) for argument in arguments]
    return [f"{name}={places.get(name, value)}" for name, value in flag_pairs]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    """Save a policy as a run's last policy."""
    folder = tmp_path_factory.mktemp("run") / "policy"
    return noise.save_policy(folder, max_positions=POSITIONS)


def write_benchmarks(data: pathlib.Path, row_limit: int = 1000) -> pathlib.Path:
    """Write files in their published layouts, with at most `row_limit` rows; one row is long."""
    choices = [rows.choice_row(i) for i in range(1, min(row_limit, 503))]
    choices.insert(0, rows.choice_row(0, context=LONG))
    rows.write(data / "longbench_v2" / "data.json", choices)
    for task in ("hotpotqa", "2wikimqa", "musique"):
        hops = [rows.hop_row(i) for i in range(min(row_limit, 200))]
        rows.write(data / task / "data" / f"{task}.jsonl", hops)
    frames = [rows.frames_row(i) for i in range(min(row_limit, 824))]
    rows.write(data / "frames" / "test.jsonl", frames)
    rows.write_docmath(data / "docmath")
    return data


@pytest.fixture
def evaluate(policy, monkeypatch):
    """Run a command up to its first sample; return the longest prompt and answer."""
    monkeypatch.setattr(entry, "run_main", lambda main: None)
    noise.use_one_device(monkeypatch)
    before = set(flags.FLAGS)
    runpy.run_module("spell_jax.evaluate", run_name="__main__")
    flag_names = set(flags.FLAGS) - before
    longest = []

    def sample(sampling, policy, questions, limit, finished_keys):
        longest.append(max(min(len(question.prompt.ids), limit) for question in questions))
        raise InterruptedError

    monkeypatch.setattr(answering, "sample_answers", sample)

    def run(arguments: list[str], data: pathlib.Path, out: pathlib.Path) -> int:
        for name in flag_names:
            flags.FLAGS[name].unparse()
        flags.FLAGS(["evaluate", *with_folders(arguments, policy, data), f"--out={out}"])
        flag_values = SimpleNamespace(**{name: flags.FLAGS[name].value for name in flag_names})
        with pytest.raises(InterruptedError):
            runner.evaluate(
                runner.from_flags(flag_values), out, "", None, judging.read_sizes(flag_values)
            )
        return longest.pop()

    yield run
    for name in flag_names:
        delattr(flags.FLAGS, name)


def test_command_at_100k_tokens_fits_the_context_with_yarn(evaluate, tmp_path):
    """Without the flags of RoPE the context is too short. The output folder records them."""
    data = write_benchmarks(tmp_path / "data", 1)
    before, _ = commands()
    command = [flag for flag in before if not flag.startswith("--max_input")]
    command += [*ROPE, "--limit=1"]
    config = tmp_path / "yarn" / "config.json"
    assert evaluate(command, data, config.parent) == 16_384  # of the first limit
    recorded = json.loads(config.read_text())
    assert (recorded["rope_scaling"], recorded["rope_factor"]) == ("yarn", 4.0)
    assert recorded["max_input"] == [16_384, 100_000]
    plain = [argument for argument in command if argument not in ROPE]
    with pytest.raises(ValueError, match=r"have 104096 tokens .* = 32768 .*--rope_scaling"):
        evaluate(plain, data, tmp_path / "plain")
    with pytest.raises(ValueError, match=r"rope_factor = 5\.0: was 4\.0"):
        evaluate([*command, "--rope_factor=5"], data, config.parent)


@pytest.mark.slow
def test_unchanged_commands_pass_the_checks(evaluate, tmp_path):
    """The page's flags as they are, on files with all rows, up to the first sample."""
    data = write_benchmarks(tmp_path / "data")
    first, second = commands()
    assert evaluate(first, data, tmp_path / "first") == 16_384
    (tmp_path / "out" / "compare").mkdir(parents=True)
    (tmp_path / "out" / "compare" / runner.SUMMARY).write_text("{}")
    assert 16_000 < evaluate(second, data, tmp_path / "second") <= 16_384


def test_factor_of_each_paper_model_fits_100k_tokens():
    """Qwen2.5's instruct models have 32,768 positions; all others have room without YaRN."""
    for name, model in paper.MODELS.items():
        short = name.startswith("qwen2.5") and name.endswith("instruct")
        assert model.yarn == (4.0 if short else 1.0), name
    policy = PolicyConfig(96, 8, 1, 1, 1, 8, 8, max_positions=POSITIONS)
    longer = policy.with_rope_scaling("yarn", paper.MODELS["qwen2.5-7b-instruct"].yarn)
    longer.check_length(100_000 + 4096)
    assert longer.rope == RopeConfig(1e4, "yarn", 4.0, POSITIONS)


@pytest.mark.parametrize(
    ("rope_fields", "message"),
    [
        ({"rope_scaling": "yarn"}, r"rope_factor = 1\.0: must be above 1"),
        ({"rope_scaling": "ntk", "rope_factor": 4.0}, "rope_scaling = 'ntk': must be one of"),
    ],
)
def test_error_names_invalid_rope_scaling(rope_fields, message):
    with pytest.raises(ValueError, match=message):
        runner.EvaluationConfig("p", ("docmath",), "data", **rope_fields)


@pytest.mark.slow
def test_commands_run(policy, tmp_path):
    """The page's commands in their order, with few questions, short answers and small sizes."""
    data = write_benchmarks(tmp_path / "data", 1)
    small = ["--limit=1", "--max_tokens=4", "--samples=2", "--dtype=bfloat16"]
    small += ["--slots=4", "--kv_cache_tokens=4096", "--prefill_tokens=4096"]
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    first, second = commands()
    out = tmp_path / "out"
    shorter = ["--max_input=256,4096", f"--out={out / 'compare'}"]  # read by the second command
    for command, extra_arguments in ((first, shorter), (second, [])):
        without_judge = [flag for flag in command if not flag.startswith("--judge")]
        arguments = [*with_folders(without_judge, policy, data), *small, *extra_arguments]
        full_command = [sys.executable, "-m", "spell_jax.evaluate", *arguments]
        process = subprocess.run(
            full_command, capture_output=True, text=True, env=os.environ | environment, cwd=ROOT
        )
        assert process.returncode == 0, process.stderr[-3000:]
    before, after = (
        json.loads((out / name / runner.SUMMARY).read_text())["rows"] for name in ("compare", "out")
    )
    assert [row["max_input"] for row in (*before, *after)] == [256, 4096, 16_384]
    assert after[0]["benchmarks"]["longbench_v2"]["tokens_in"] > 15_000
    assert "| policy |" in process.stdout  # the rows of the first command
