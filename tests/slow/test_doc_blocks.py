"""Runs the shell blocks of README.md and docs/ that need nothing but seconds.

Blocks run in one folder outside the checkout, those that train first: others use what they have
written. `python` is a script that makes training runs tiny. A block that needs
more says so (`doc_commands.marked_blocks`), and tests/test_docs.py parses it.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from docs.tools import measurements
from tests import doc_commands
from tests.paths import ROOT

pytestmark = pytest.mark.slow

BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in measurements.pages()
    for number, (block, needs) in enumerate(doc_commands.marked_blocks(page.read_text()))
    if not needs
]
BLOCKS.sort(key=lambda block: "spell_jax.train" not in block.values[0])
TINY = (
    "--config.steps=1 --config.evaluate=False --config.validate_every=0 "
    "--config.algorithm.questions=4 --config.algorithm.generation_batch=8 "
    "--config.algorithm.max_generations=1 --config.data.tiny.clusters=16"
)
PYTHON = f"""#!/bin/sh
case "$2" in
  spell_jax.train) exec {sys.executable} "$@" {TINY} ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Make a folder with the parts of a checkout that commands name, and the script `python`."""
    path = tmp_path_factory.mktemp("pages")
    (path / "spell_jax").mkdir()
    for room in ["data", "selfplay"]:
        (path / "spell_jax" / room).symlink_to(ROOT / "spell_jax" / room)
    (path / "bin").mkdir()
    (path / "bin" / "python").write_text(PYTHON)
    (path / "bin" / "python").chmod(0o755)
    return path


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, folder: pathlib.Path):
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    env["PYTHONPATH"] = str(ROOT)
    process = subprocess.run(
        ["bash", "-euc", block], cwd=folder, env=env, capture_output=True, text=True
    )
    is_too_large = "It does not fit." in process.stdout  # launch.plan's answer, with status 1
    assert process.returncode == 0 or is_too_large, (
        f"{block}\n{process.stdout[-2000:]}\n{process.stderr[-3000:]}"
    )
