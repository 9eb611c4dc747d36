"""Tests that a command that is killed or told to stop at random moments can be started again.

The moments are file operations in the folder that the command writes (ended_commands.py). Each
command is ended a few times in one folder; the last start ends as an undisturbed one does, to the
byte, and leaves nothing else. Kills within a training run are in test_killed.py.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from spell_jax.runtime.hosts import sigterm
from spell_jax.runtime.log.metrics import METRICS_FILE, MetricsWriter, read_metrics
from tests import noise
from tests.question_sets.test_articles import CITIES, paragraph
from tests.slow.ended_commands import OPERATIONS

CONFIG = """
from tests import noise
from tests.trainer import test_supervised


def get_config():
    if {is_training}:
        return noise.small_config("{policy}", steps=3, evaluate=True)
    return test_supervised.small_config("{policy}", "{rows}", steps=6, checkpoint_every=2)
"""
# Times and starts of a run, and files of binary formats with times inside.
UNSTEADY = ("checkpoints", "tensorboard", "run.json", "plots/seconds", "plots/speed")
CODES = {"SIGKILL": -9, "SIGTERM": sigterm.EXIT_CODE}


class Command(NamedTuple):
    """A command that writes into a folder.

    Attributes:
      module: name for python -m.
      arguments: made from the folder.
      first: share of an undisturbed start's operations after which the first signal may come.
    """

    module: str
    arguments: Callable[[pathlib.Path], list[str]]
    first: float = 0.0


class Inputs(NamedTuple):
    """Files that the commands read."""

    policy: pathlib.Path
    rows: pathlib.Path
    articles: pathlib.Path
    folder: pathlib.Path  # of everything else


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    policy, rows = noise.save_policy(folder / "noise"), folder / "rows.jsonl"
    row = {"prompt": "- Arvo city Oslo\ncity of Arvo", "completion": "answer is Oslo"}
    rows.write_text(json.dumps(row) + "\n")
    requests = [json.dumps({"prompt": f"city {name}"}) + "\n" for name in "abc"]
    (folder / "requests.jsonl").write_text("".join(requests))
    for name in ("sft", "train"):
        text = CONFIG.format(is_training=name == "train", policy=policy, rows=rows)
        (folder / f"{name}.py").write_text(text)
    articles = folder / "articles.json"
    paragraphs = [paragraph(city, number) for number, city in enumerate(CITIES)]
    data = [{"title": "Cities", "paragraphs": paragraphs}]
    articles.write_text(json.dumps({"version": "1.1", "data": data}))
    return Inputs(policy, rows, articles, folder)


def command(name: str, inputs: Inputs) -> Command:
    folder, policy = inputs.folder, inputs.policy

    def run_of(name: str, out: pathlib.Path) -> list[str]:
        return [f"--config={folder / name}.py", f"--workdir={out}"]

    def generate(out: pathlib.Path) -> list[str]:
        texts = [f"--prompts={folder / 'requests.jsonl'}", f"--out={out / 'answers.jsonl'}"]
        return [f"--policy={policy}", *texts, "--max_tokens=4"]

    def ask(out: pathlib.Path) -> list[str]:
        files = [f"--out={out / 'questions.jsonl'}", f"--clusters={out / 'clusters.jsonl'}"]
        return [f"--rows={inputs.articles}", "--paragraphs=2", *files]

    def make_policy(out: pathlib.Path) -> list[str]:
        return [f"--shape={policy / 'config.json'}", f"--tokenizer={policy}", f"--out={out / 'p'}"]

    commands = {
        # Checkpoints come after steps 2, 4 and 6: the first signal after the first of them.
        "sft": Command("spell_jax.sft", functools.partial(run_of, "sft"), 0.4),
        "train": Command("spell_jax.train", functools.partial(run_of, "train")),
        "generate": Command("spell_jax.generate", generate),
        "evaluate": Command("tests.evaluating", lambda out: [str(policy), str(out)]),
        "report": Command("spell_jax.report", lambda out: [f"--workdir={out}"]),
        "articles": Command("spell_jax.question_sets.articles", ask),
        "random_policy": Command("launch.random_policy", make_policy),
    }
    return commands[name]


def start(command: Command, out: pathlib.Path, count: int = 0, name: str = "SIGKILL"):
    """Run a command that gets the signal if `count` > 0; return (exit status, standard error)."""
    arguments = [str(out), str(count), name, command.module, *command.arguments(out)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.slow.ended_commands", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    return ended.returncode, ended.stderr


def files(out: pathlib.Path) -> dict[str, object]:
    """Return the content of each file by the file's path; of metrics, all but times."""
    contents: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_file() and not name.startswith(UNSTEADY):
            if path.name == METRICS_FILE:
                contents[name] = list(map(noise.steady, read_metrics(path.parent)))
            else:
                contents[name] = path.read_bytes()
    return contents


def prepare(name: str, out: pathlib.Path) -> None:
    """Make the folder as it is before the first start."""
    out.mkdir()
    if name == "report":
        writer = MetricsWriter(out)
        for step in (1, 2, 3):
            writer.write(step, {"rollout/solve_rate": step / 10, "train/grad_norm": 1.0})
        writer.close()


@pytest.mark.parametrize(
    ("name", "signals"),
    [
        pytest.param("sft", ("SIGKILL", "SIGKILL", "SIGTERM"), marks=pytest.mark.long),
        pytest.param("train", ("SIGTERM", "SIGKILL", "SIGTERM"), marks=pytest.mark.long),
        ("generate", ("SIGKILL", "SIGTERM")),
        pytest.param("evaluate", ("SIGKILL", "SIGKILL", "SIGKILL"), marks=pytest.mark.long),
        ("report", ("SIGKILL", "SIGTERM")),
        ("articles", ("SIGKILL", "SIGTERM", "SIGKILL")),
        ("random_policy", ("SIGKILL", "SIGTERM", "SIGKILL")),
    ],
)
def test_a_command_ended_at_random_moments_ends_as_an_undisturbed_one(
    name: str, signals: tuple[str, ...], inputs: Inputs, tmp_path: pathlib.Path
) -> None:
    tested_command, rng = command(name, inputs), random.Random(name)
    out = tmp_path / "out"  # of all starts: its name is in what they write
    prepare(name, out)
    code, error = start(tested_command, out)
    assert code == 0, error[-3000:]
    expected_files = files(out)
    shutil.rmtree(out)
    operations = int(error.rpartition(OPERATIONS)[2])
    assert operations >= 2, "the signals come in file operations"
    prepare(name, out)
    first = 1 + int(tested_command.first * operations)
    for number, kind in enumerate(signals):
        count = rng.randint(first if number == 0 else 1, operations)
        code, error = start(tested_command, out, count, kind)
        # A start after the first may have less to do than `count` operations.
        assert code in (CODES[kind], 0) if number else code == CODES[kind], error[-3000:]
    code, error = start(tested_command, out)
    assert code == 0, error[-3000:]
    assert files(out) == expected_files
