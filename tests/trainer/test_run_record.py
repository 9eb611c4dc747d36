"""Tests of the record of what a run was."""

import json
import subprocess

import jax
import pytest
from etils import epath

from spell_jax.config import default_supervised_config, read, read_supervised, to_dict
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.runtime import code_version
from spell_jax.runtime.config import plain
from spell_jax.runtime.version import VERSION
from spell_jax.trainer import run_record
from tests import noise
from tests.paths import ROOT

SIZES = {"vocab_size": 50, "width": 8, "layers": 2, "heads": 2, "kv_heads": 1, "head_size": 4}
POLICY = PolicyConfig(**SIZES, feed_forward=16)


def write(workdir, step: int, **fields) -> dict:
    config = read(noise.small_config("tiny", **fields))
    run_record.write(epath.Path(workdir), step, config, to_dict(config), POLICY)
    return json.loads((workdir / "run.json").read_text())


def test_record_has_code_devices_sizes_and_changed_defaults(tmp_path):
    record = write(tmp_path, 0, **{"algorithm.group_size": 5})
    (start,) = record["starts"]
    assert start["version"] == VERSION and start["commit"]
    assert (start["jax"], start["devices"]) == (jax.__version__, jax.device_count())
    # Per layer: q, o [8, 8], k, v [8, 4], their 16 biases, three of [8, 16], two norms; then the
    # embedding and the last norm.
    parameters = 2 * (2 * 64 + 2 * 32 + 16 + 3 * 128 + 16) + 50 * 8 + 8
    assert record["policy"]["trained_parameters"] == parameters
    assert record["defaults"]["algorithm.group_size"] == 8
    assert record["defaults"]["policy.folder"] == ""
    assert not record["defaults"].keys() & {
        "seed",
        "algorithm.name",
        "algorithm.divide_by_deviation",
    }


def test_adapters_are_the_trained_parameters(tmp_path):
    config = read(noise.small_config("tiny"))
    policy = PolicyConfig(**SIZES, feed_forward=16, lora=LoraConfig(rank=1, pattern="q_proj"))
    run_record.write(epath.Path(tmp_path), 0, config, to_dict(config), policy)
    sizes = json.loads((tmp_path / "run.json").read_text())["policy"]
    assert sizes["trained_parameters"] == 2 * (8 + 8)
    plain_sizes = write(tmp_path, 0)["policy"]
    assert sizes["parameters"] == plain_sizes["parameters"] + 2 * (8 + 8)


def test_starts_of_lost_steps_are_forgotten(tmp_path):
    for step in (0, 4, 6, 4):
        record = write(tmp_path, step)
    assert [start["step"] for start in record["starts"]] == [0, 4]


@pytest.mark.parametrize("damaged", ["", "[]", '{"starts": 3}', '{"starts": [{}]}'])
def test_a_damaged_record_does_not_end_the_run(tmp_path, damaged):
    (tmp_path / "run.json").write_text(damaged)
    assert [start["step"] for start in write(tmp_path, 2)["starts"]] == [2]


def test_record_of_supervised_tuning(tmp_path):
    fields = default_supervised_config()
    fields.rows_per_step = 3
    config = read_supervised(fields)
    run_record.write(epath.Path(tmp_path), 0, config, plain(fields), POLICY)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["defaults"] == {"rows_per_step": 48}


def test_commit_is_of_this_checkout_and_unknown_elsewhere(tmp_path, monkeypatch):
    # A release without a repository has tests, too.
    is_checkout = (ROOT / ".git").exists()
    assert (code_version.head_commit() != code_version.UNKNOWN) == is_checkout
    monkeypatch.setattr(code_version, "_CHECKOUT", tmp_path)
    assert code_version.head_commit() == code_version.UNKNOWN
    (tmp_path / ".git").mkdir()  # damaged
    assert code_version.head_commit() == code_version.UNKNOWN


def test_commit_is_none_of_its_tags_and_says_that_files_were_changed(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        user = "-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "tag.gpgsign=false"
        command = ["git", "-C", str(tmp_path), *user, "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "--quiet", "--message=one")
    git("tag", "--annotate", "--message=release", "v1.0")
    monkeypatch.setattr(code_version, "_CHECKOUT", tmp_path)
    commit = code_version.head_commit()
    assert len(commit) >= 7 and git("rev-parse", "HEAD").startswith(commit)
    (tmp_path / "code.py").write_text("2\n")
    assert code_version.head_commit() == f"{commit}-dirty"
