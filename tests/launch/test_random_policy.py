"""Tests of launch/random_policy.py: loadable policy folders, the same for the same seed."""

import json
import subprocess
import sys

import numpy as np
import pytest

from spell_jax.launch import random_policy
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from tests import tiny


@pytest.fixture
def shape_and_tokenizer(tmp_path):
    """Write a config.json and a tokenizer; return (file, folder)."""
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(tiny.POLICY.to_hf() | {"vocab_size": 400}))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizers.train(["the cat sat on the mat"] * 5, 300).save(folder)
    return shape, folder


@pytest.mark.slow
def test_random_policy_folder_loads_and_depends_on_seed(shape_and_tokenizer, tmp_path) -> None:
    shape, tokenizer = shape_and_tokenizer
    command = [sys.executable, "-m", "launch.random_policy", f"--shape={shape}"]
    command += [f"--tokenizer={tokenizer}", f"--out={tmp_path / 'a'}", "--dtype=float32"]
    process = subprocess.run(
        [*command, "--set", "hidden_size=64", "tie_word_embeddings=false"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    config, words = weights.read_config_and_tokenizer(tmp_path / "a")
    assert (config.width, config.tied_embeddings, config.layers) == (64, False, 2)
    assert words.count("the cat") == tokenizers.load(tokenizer).count("the cat")
    changes = ["hidden_size=64", "tie_word_embeddings=false"]
    count = random_policy.make(shape, tokenizer, tmp_path / "b", changes, "float32")
    assert f"{count:,} random parameters" in process.stdout
    (_, first), (_, second) = (weights.load(tmp_path / name) for name in "ab")
    # Equal up to rounding: tests compile without optimizations.
    np.testing.assert_allclose(first["embedding"], second["embedding"], rtol=1e-5, atol=1e-8)
    random_policy.make(shape, tokenizer, tmp_path / "c", changes, "float32", seed=1)
    assert not np.array_equal(first["embedding"], weights.load(tmp_path / "c")[1]["embedding"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hidden=64", "set = 'hidden=64': must be FIELD=VALUE with one of"),
        ("hidden_size", "not JSON"),
        ("hidden_size=big", "set = 'hidden_size=big': its value is not JSON"),
        ("model_type=3", "model_type = 3: must be one of"),
    ],
)
def test_invalid_changes_and_existing_folders_are_rejected(
    shape_and_tokenizer, tmp_path, change: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        random_policy.make(*shape_and_tokenizer, tmp_path / "out", [change])
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="exists already"):
        random_policy.make(*shape_and_tokenizer, tmp_path)
