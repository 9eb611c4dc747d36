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


@pytest.mark.parametrize(
    "workdir", [(), ("--workdir=",), ("--workdir=runs/a",), ("--workdir=~/a",)]
)
def test_workdir_that_is_lost_with_the_slice_is_refused(workdir: tuple[str, ...]) -> None:
    (mistake,) = find_mistakes(PAPER[0], *FILES, *FITTING, *workdir)
    value = workdir[0].partition("=")[2] if workdir else None
    assert mistake.startswith(f"--workdir = {value!r}: must be in a bucket (gs://BUCKET/RUN) or on")
    assert find_mistakes(PAPER[0], *FILES, *FITTING, "--workdir", "/mnt/disk/run") == []


def test_unknown_flags_are_refused() -> None:
    valid_flags = ["--verbosity=1", "--debug", "--noconfig.evaluate"]
    mistakes = find_mistakes(*PAPER, *FILES, *FITTING, *valid_flags, "--wrkdir=3", "--confg.x=3")
    assert mistakes == [
        "--wrkdir: no such flag of spell_jax.train",
        "--confg.x: no such flag of spell_jax.train",
    ]


def test_code_of_the_users_that_is_not_committed_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice gets a copy of HEAD, so it would lack the module and the config's file."""
    (tmp_path / "uncommitted_rewards.py").write_text("def ok(answers): return [1.0] * len(answers)")
    config_file = tmp_path / "mine.py"
    config_file.write_text(
        "from spell_jax.configs import paper\n"
        "def get_config(): return paper.get_config('qwen2.5-7b-instruct')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = "--config.algorithm.reward=uncommitted_rewards:ok"
    module, file = (
        find_mistakes(*flags, PAPER[1], *FILES, *FITTING)
        for flags in ((PAPER[0], reward), (f"--config={config_file}",))
    )
    assert len(module) == len(file) == 1
    assert module[0].startswith("algorithm.reward = 'uncommitted_rewards:ok': ")
    assert file[0].startswith(f"--config = '{config_file}': ")
    assert "must be committed" in module[0] and "must be committed" in file[0]


def test_command_without_a_config_is_a_mistake() -> None:
    assert find_mistakes("--workdir=gs://b/x") == ["--config: must be given"]
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
