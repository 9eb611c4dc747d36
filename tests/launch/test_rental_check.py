"""Tests of launch/rental_check.py: a command is checked without the files that it names."""

from __future__ import annotations

import json
import pathlib

import pytest

from spell_jax.launch import rental_check
from spell_jax.policy.model import known_shape
from spell_jax.runtime.files import remote

SLICE = "v5e-16"
PAPER = ("--config=configs/paper.py:qwen2.5-7b-instruct", "--workdir=gs://b/run")
# Nothing of this is on the machine of the tests.
FILES = (
    "--config.data.source=gs://b/clusters",
    "--config.data.validation=/mnt/questions.jsonl",
    "--config.init_from=gs://b/other_run",
    "--config.policy.folder=gs://b/Qwen2.5-7B-Instruct",
)
FITTING = ("--config.mesh.fsdp=4", "--config.mesh.context=4")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(path: str) -> pathlib.Path:
        if "://" in path:
            raise remote.FetchError(f"{path}: access is refused")
        return pathlib.Path(path)

    monkeypatch.setattr(remote, "fetch", fetch)


def find_mistakes(*train_flags: str, shape: str = "") -> list[str]:
    return rental_check.find_mistakes([*rental_check.TRAINING, *train_flags], SLICE, shape)


def test_run_that_fits_has_no_mistakes_without_its_files() -> None:
    assert find_mistakes(*PAPER, *FILES, *FITTING) == []


def test_run_that_does_not_fit_is_one_line_with_the_remedy() -> None:
    (mistake,) = find_mistakes(*PAPER, *FILES)
    assert mistake.startswith("packing.token_budget = 51200: accumulate takes 30.21 GiB of a chip")
    assert "but v5e-16 has 15.75; must be less, or mesh.context more" in mistake


@pytest.mark.parametrize(
    ("train_flags", "message"),
    [
        ((*FITTING, "--config.steps=0"), "steps = 0: must be at least 1"),
        ((*FITTING, "--config.stepz=3"), '--config.stepz: no such field. Did you mean "steps"'),
        (("--config.mesh.fsdp=3",), "mesh = {"),
        ((*FITTING, "--config.data.source="), "data.source = '': must be 'tiny'"),
    ],
)
def test_mistakes_of_the_config_are_named(train_flags: tuple[str, ...], message: str) -> None:
    (mistake,) = find_mistakes(*PAPER, *FILES, *train_flags)
    assert mistake.startswith(message), mistake


def test_command_without_a_config_is_a_mistake() -> None:
    assert find_mistakes("--workdir=x") == ["--config: must be given"]
    (mistake,) = find_mistakes("--config", "no.py")
    assert mistake.startswith("--config = 'no.py': no such file")


@pytest.mark.parametrize("folder", ["/mnt/my_model", "gs://b/my_model"])
def test_unknown_model_needs_its_shape(folder: str, tmp_path: pathlib.Path) -> None:
    train_flags = (*PAPER, *FILES, *FITTING, f"--config.policy.folder={folder}")
    (mistake,) = find_mistakes(*train_flags)
    assert mistake.startswith(f"policy.folder = '{folder}': ") and "by --policy" in mistake
    policy = known_shape("Qwen2.5-7B-Instruct")
    assert policy
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(policy.to_hf()))
    assert find_mistakes(*train_flags, shape=str(shape)) == []


@pytest.mark.parametrize("command", [["-m", "trainer"], ["-m", "spell_jax.sft"], ["x.py"], []])
def test_other_commands_are_not_checked(command: list[str]) -> None:
    assert rental_check.find_mistakes([*command, "--config=no.py"], SLICE) == []


def test_pinned_version_of_a_known_model_is_known() -> None:
    folder = "--config.policy.folder=hf://Qwen/Qwen2.5-7B-Instruct@main"
    assert find_mistakes(*PAPER, *FILES, *FITTING, folder) == []
