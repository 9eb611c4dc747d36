"""Benchmarks print one JSON line; the operations they state are those of the shape."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from launch import bench
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.lora import LoraConfig

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
    # At least 59,392 float32 weights and their gradient; activations of 36 and of 84 tokens.
    assert 8 * 59_392 < line["shared_peak_bytes"] < line["repeated_peak_bytes"]
    assert line["gradient_norm_difference"] < 1e-5 and line["device"] == "cpu"
    assert line["tokens_per_s"] == pytest.approx(2 * 36 / line["shared_s"])
    assert line["model_flops_per_s"] > 0 and line["mfu"] is None


def test_sampling_prints_a_line_with_all_kinds() -> None:
    flags = ["--prompt=40", "--response=6", "--group=3", "--layers=1", "--width=64", "--vocab=96"]
    flags += ["--block=16", "--prefill=32", "--repeats=1", "--transformers=1"]
    line = bench.run(bench.parse(["sample", *flags]))
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


def test_the_shape_of_a_config_json(tmp_path) -> None:
    policy = PolicyConfig(96, 32, 2, 2, 1, 16, 48, qkv_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(policy.to_hf()))
    flags = [f"--policy={tmp_path / 'config.json'}", "--layers=1", "--lora=2", "--dtype=bfloat16"]
    options = bench.parse(["update", *SMALL[:4], *flags, "--repeats=1", "--remat=block"])
    line = bench.bench_update(options)
    assert (line["layers"], line["width"], line["lora"], line["dtype"]) == (1, 32, 2, "bfloat16")
    assert line["gradient_norm_difference"] < 0.02


def test_operations_by_hand() -> None:
    policy = PolicyConfig(10, 4, 3, 2, 1, 8, 6)
    weights = 3 * (4 * 2 * 8 + 2 * 4 * 8 + 2 * 8 * 4 + 3 * 4 * 6)  # q, k and v, o, mlp
    head = 6 * 10 * 4 * 6  # 6 answer tokens
    shared_pairs = 5 * 5 / 2 + 6 * 5 + 3 * 2 * 2 / 2
    wanted = 6 * weights * 11 + 12 * 3 * 2 * 8 * shared_pairs + head
    found = bench.count_flops(policy, prompt=5, response=2, group=3)
    assert found["shared"] == pytest.approx(wanted)
    wanted = 6 * weights * 21 + 12 * 3 * 2 * 8 * 3 * 7 * 7 / 2 + head
    assert found["repeated"] == pytest.approx(wanted)
    experts = dataclasses.replace(policy, experts=4, experts_per_token=2)
    more = bench.count_flops(experts, prompt=5, response=2, group=3)["shared"]
    assert more - bench.count_flops(policy, 5, 2, 3)["shared"] == 6 * 11 * 3 * (3 * 4 * 6 + 4 * 4)
    adapted = dataclasses.replace(policy, lora=LoraConfig(2), qkv_bias=True)
    less = bench.count_flops(adapted, 5, 2, 3)["shared"]
    assert bench.count_flops(policy, 5, 2, 3)["shared"] - less == 2 * (weights * 11 + 10 * 4 * 6)
    one = bench.count_flops(policy, prompt=5, response=2, group=1)
    assert one["shared"] == pytest.approx(one["repeated"])
