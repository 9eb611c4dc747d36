"""Benchmarks print one JSON line; the operations they state are those of the shape."""

import json
import os
import subprocess
import sys

import pytest

from launch import bench
from spell_jax.policy.config import PolicyConfig

SMALL = ["--prompt=24", "--response=4", "--group=3", "--groups=2", "--layers=1", "--width=64"]


def test_update_prints_a_line_with_both_layouts() -> None:
    command = [sys.executable, "-m", "launch.bench", "update", *SMALL, "--vocab=96", "--repeats=1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": ""}
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["token_ratio"] == pytest.approx(3 * 28 / 36)
    assert 1 < line["flop_ratio"] < line["token_ratio"]
    assert line["ratio"] == pytest.approx(line["repeated_s"] / line["shared_s"])
    assert 0 < line["shared_peak_bytes"] < line["repeated_peak_bytes"]
    assert line["gradient_norm_difference"] < 1e-5 and line["device"] == "cpu"


def test_operations_by_hand() -> None:
    policy = PolicyConfig(10, 4, 3, 2, 1, 8, 6)
    weights = 3 * (4 * 2 * 8 + 2 * 4 * 8 + 2 * 8 * 4 + 3 * 4 * 6)  # q, k and v, o, mlp
    head = 6 * 10 * 4 * 6  # 6 answer tokens
    shared_pairs = 5 * 5 / 2 + 6 * 5 + 3 * 2 * 2 / 2
    wanted = 6 * weights * 11 + 14 * 3 * 2 * 8 * shared_pairs + head
    found = bench.count_flops(policy, prompt=5, response=2, group=3)
    assert found["shared"] == pytest.approx(wanted)
    wanted = 6 * weights * 21 + 14 * 3 * 2 * 8 * 3 * 7 * 7 / 2 + head
    assert found["repeated"] == pytest.approx(wanted)
    one = bench.count_flops(policy, prompt=5, response=2, group=1)
    assert one["shared"] == pytest.approx(one["repeated"])
