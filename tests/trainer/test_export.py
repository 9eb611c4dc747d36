"""Tests of exporting a checkpoint's policy: merged weights of its step, or only adapters."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from etils import epath

from spell_jax import export as export_command
from spell_jax.policy import int8, lora, transformer, weights
from spell_jax.policy.config import LoraConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.runtime import setup as start
from spell_jax.runtime.files.checkpoint import DamagedError
from spell_jax.trainer import export as export_body
from spell_jax.trainer import loop
from spell_jax.trainer.export import export
from tests import noise
from tests.runtime.files import fake_hub

LORA = {
    "policy.lora_rank": 2,
    "policy.lora_pattern": "q_proj|down_proj",
    "policy.rope_scaling": "yarn",
    "policy.rope_factor": 2.0,
    "optimizer.learning_rate": 1e-2,
}
SHORT = {"steps": 2, "checkpoint_every": 1, "validate_every": 0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


def run_to_end(config, workdir: pathlib.Path) -> pathlib.Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        return loop.train(config, workdir)


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory) -> pathlib.Path:
    """Run two updates of every weight; return the workdir."""
    return run_to_end(noise.small_config(policy, **SHORT), tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def adapted(policy, tmp_path_factory) -> pathlib.Path:
    """Run two updates of adapters, with a scaled context; return the workdir."""
    workdir = tmp_path_factory.mktemp("adapted")
    return run_to_end(noise.small_config(policy, **SHORT, **LORA), workdir)


def load(folder: pathlib.Path):
    return weights.load(folder)[1]


def assert_same(first, second) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.slow
def test_export_of_the_last_checkpoint_equals_the_policy_folder(run, tmp_path) -> None:
    assert export(run, tmp_path / "out", dtype="float32") == 2
    assert_same(load(tmp_path / "out"), load(run / "policy"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (run / "policy").iterdir()}


def put_folder(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


def put_link(file: pathlib.Path) -> None:
    file.unlink()
    file.symlink_to(file)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [put_folder, put_link, pathlib.Path.unlink])
def test_older_checkpoint_is_exported_if_the_newest_is_unreadable(run, tmp_path, caplog, damage):
    workdir = tmp_path / "run"
    shutil.copytree(run, workdir)
    damage(workdir / "checkpoints" / "2" / "arrays" / "_METADATA")
    assert export(workdir, tmp_path / "out", dtype="float32") == 1
    assert "checkpoints/2 is skipped: arrays/_METADATA: " in caplog.text
    export(run, tmp_path / "first", step=1, dtype="float32")
    assert_same(load(tmp_path / "out"), load(tmp_path / "first"))
    with pytest.raises(DamagedError, match=r"checkpoints/2: cannot be used: arrays/_METADATA: "):
        export(workdir, tmp_path / "second", step=2)
    assert not (tmp_path / "second").exists()


def test_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(bytes(40))  # as a loss of power may leave it
    with pytest.raises(ValueError, match=r"config\.json: damaged"):
        export(tmp_path, tmp_path / "out")


@pytest.mark.slow
def test_command_exports_a_chosen_step_in_bfloat16(run, tmp_path) -> None:
    flags = [f"--workdir={run}", f"--out={tmp_path / 'out'}", "--step=1"]
    process = subprocess.run(
        [sys.executable, "-m", "spell_jax.export", *flags],
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "the policy after step 1" in process.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    export(run, tmp_path / "first", step=1, dtype="float32")
    first, last = load(tmp_path / "first"), load(run / "policy")
    assert not np.array_equal(first["embedding"], last["embedding"])
    rounded = jax.tree.map(lambda x: np.asarray(x, "bfloat16").astype(np.float32), first)
    assert_same(load(tmp_path / "out"), rounded)


@pytest.mark.slow
def test_only_adapters_are_trained_saved_and_exported(policy, adapted, tmp_path) -> None:
    """Check that a resumed run equals an uninterrupted one and only adapted kernels change."""
    resumed = tmp_path / "resumed"
    run_to_end(noise.small_config(policy, **SHORT | {"steps": 1}, **LORA), resumed)
    run_to_end(noise.small_config(policy, **SHORT, **LORA), resumed)
    config, policy_params = weights.load(adapted / "policy")
    assert_same(load(resumed / "policy"), policy_params)
    assert config == weights.load(policy)[0].with_rope_scaling("yarn", 2.0)
    old = dict(jax.tree_util.tree_leaves_with_path(load(policy)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(policy_params):
        name = "/".join(key.key for key in path)
        trained = name in ("layers/attention/q_kernel", "layers/mlp/down_kernel")
        assert np.array_equal(leaf, old[path]) != trained, name

    export(adapted, tmp_path / "merged", dtype="float32")
    assert_same(load(tmp_path / "merged"), policy_params)
    export(adapted, tmp_path / "adapters", adapters=True)
    written = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors"}
    description = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert description["base_model_name_or_path"] == str(policy)


@pytest.mark.parametrize(
    ("folder", "name", "revision"),
    [
        ("hf://own/tiny@COMMIT", "own/tiny", "COMMIT"),
        ("hf://own/tiny", "own/tiny", None),
        ("hf://own/tiny@COMMIT/small", "hf://own/tiny@COMMIT/small", None),
        ("tiny", str(TINY_POLICY), None),
    ],
)
def test_adapters_name_their_base_as_peft_reads_it(folder, name, revision, monkeypatch, tmp_path):
    def read_weights(workdir, policy, mesh, step):
        shapes, _ = transformer.abstract_params(policy)
        return 1, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    monkeypatch.setattr(export_body, "read_weights", read_weights)
    with fake_hub.serving(monkeypatch, tmp_path / "cache") as hub:
        files = {path.name: path.read_bytes() for path in TINY_POLICY.iterdir()}
        small = {f"small/{path}": content for path, content in files.items()}
        commit = hub.commit("own/tiny", files | small)
        folder, name = folder.replace("COMMIT", commit), name.replace("COMMIT", commit)
        config = noise.small_config(folder, **{"policy.lora_rank": 2})
        (tmp_path / "config.json").write_text(config.to_json_best_effort())
        assert export(epath.Path(tmp_path), epath.Path(tmp_path / "out"), adapters=True) == 1
    description = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert description["base_model_name_or_path"] == name
    assert description["revision"] == (revision and commit)


@pytest.mark.slow
def test_run_over_an_int8_base_resumes_to_the_same_bits_and_is_exported(policy, tmp_path) -> None:
    """A resumed run quantizes the base again; its reference is the base."""
    fields = SHORT | LORA | {"policy.base_dtype": "int8", "loss.kl_weight": 0.1}
    uncut, resumed = tmp_path / "uncut", tmp_path / "resumed"
    run_to_end(noise.small_config(policy, **fields), uncut)
    run_to_end(noise.small_config(policy, **fields | {"steps": 1}), resumed)
    run_to_end(noise.small_config(policy, **fields), resumed)
    merged = load(uncut / "policy")
    assert_same(load(resumed / "policy"), merged)
    export(uncut, tmp_path / "merged", dtype="float32")
    assert_same(load(tmp_path / "merged"), merged)
    base = int8.quantize_base(load(policy))
    adapted = LoraConfig(2, base_dtype="int8")
    shape = dataclasses.replace(weights.load(policy)[0], lora=adapted)
    _, dequantized = lora.merge(shape, base)
    mlp, expected_mlp = merged["layers"]["mlp"], dequantized["layers"]["mlp"]
    assert_same(mlp["up_kernel"], expected_mlp["up_kernel"])
    moved = np.abs(mlp["down_kernel"] - expected_mlp["down_kernel"]).max()
    assert 1e-5 < moved < 0.1, "adapters are trained and merged"


@pytest.mark.slow
def test_adapter_checkpoint_holds_only_adapters(adapted, run) -> None:
    def size(folder: pathlib.Path) -> int:
        return sum(p.stat().st_size for p in (folder / "checkpoints").rglob("*") if p.is_file())

    assert size(adapted) < size(run) / 5


@pytest.mark.slow
def test_invalid_export_arguments_are_rejected(run, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=r"config\.json: not there"):
        export(tmp_path, out)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 9"):
        export(run, out, step=9)
    with pytest.raises(ValueError, match=r"lora_rank = 0: the run of .* has no adapters"):
        export(run, out, adapters=True)
    (tmp_path / "config.json").write_text('{"policy": "tiny"}')
    with pytest.raises(ValueError, match=r"not the config of train\.py or sft\.py"):
        export(tmp_path, out)
    for text in ("[]", "null", "{", "", '{"algorithm": 3}', '{"rows_per_step": "x"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: "):
            export(tmp_path, out)
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="checkpoints: not there"):
        export(tmp_path, out)
    with pytest.raises(ValueError, match=r"out = .*: is there already"):
        export(run, tmp_path)
    assert not out.exists()


def export_flags(**values):
    fields = dict.fromkeys(("workdir", "gguf", "out", "push", "step", "dtype"))
    return SimpleNamespace(
        FLAGS=SimpleNamespace(**fields | {"adapters": False} | values),
        ValidationError=flags.ValidationError,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workdir": "run"}, "must give --out or --push"),
        ({"out": "out"}, "must give either --workdir or --gguf"),
        ({"workdir": "run", "out": "gs://b/out", "push": "hf://a/b"}, "--out must be a local fold"),
        ({"workdir": "run", "push": "a/b"}, "--push = 'a/b': must be hf://OWNER/NAME"),
    ],
)
def test_wrong_flags_are_refused_before_the_work(monkeypatch, values, message) -> None:
    monkeypatch.setattr(start, "setup", lambda: None)
    monkeypatch.setattr(export_command, "flags", export_flags(**values))
    monkeypatch.setattr(export_command, "_write", lambda *_: pytest.fail("too late"))
    with pytest.raises((flags.ValidationError, ValueError), match=message):
        export_command.main(None)


def test_export_is_pushed_with_and_without_a_folder(monkeypatch, tmp_path, capsys) -> None:
    def write(_, out) -> str:
        shutil.copytree(TINY_POLICY, out)
        return "the policy after step 2"

    monkeypatch.setattr(start, "setup", lambda: None)
    monkeypatch.setattr(export_command, "_write", write)
    names = {path.name for path in TINY_POLICY.iterdir()}
    with fake_hub.serving(monkeypatch, tmp_path / "cache") as hub:
        monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
        for out in (None, str(tmp_path / "out")):
            values = export_flags(workdir="run", push="hf://own/new", out=out)
            monkeypatch.setattr(export_command, "flags", values)
            export_command.main(None)
            assert {*hub.head("own/new")} == names | {".gitattributes"}
            *_, last = capsys.readouterr().out.splitlines()
            assert last.endswith("the policy after step 2")
    assert hub.private == {"own/new": True}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
