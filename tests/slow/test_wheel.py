"""Tests of the wheel: what it installs, and that its commands and configs need no checkout."""

from __future__ import annotations

import configparser
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.paths import ROOT

# Load each config by its name, and find the policy that it starts from if that ships, too.
CONFIGS = """
import pathlib, spell_jax
from spell_jax import config
from spell_jax.policy.model import find_folder
from spell_jax.runtime.files import paths
from spell_jax.trainer import config_help

assert pathlib.Path(spell_jax.__file__).parents[1] == pathlib.Path.cwd().parent / "site"
for name in paths.shipped_configs():
    if "/" in name:
        continue
    fields = spell_jax.get_config(name)
    assert config_help.describe(fields)
    if "algorithm" in fields:  # all that may be wrong is the user's data, which is not there
        mistakes = config.collect_mistakes(fields)[1]
        assert all("data" in field for field in mistakes), mistakes
    else:
        config.read_supervised(fields)
    # Made by an earlier command, or brought by the user; other names are of the package.
    if not fields.policy.folder.startswith(("runs/", "models/")) and fields.policy.folder:
        find_folder(fields.policy.folder)
    print(name)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """Build the wheel from a copy of the tracked files, and unpack it."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and not name.startswith((".venv", "docs/", "tests/")):
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, f"--wheel-dir={folder}", str(folder / "source")], check=True)
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run_outside(site: pathlib.Path, *arguments: str) -> str:
    """Run Python in an empty folder beside the unpacked wheel; return the output."""
    folder = site.parent / "elsewhere"
    folder.mkdir(exist_ok=True)
    process = subprocess.run(
        [sys.executable, "-P", *arguments],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_wheel_installs_one_package_beside_the_pipeline(site):
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert names == {"spell_jax", "data_pipeline"}
    for name in ("configs/tiny.py", "launch/check.py", "launch/experiments/papers/spell.toml"):
        assert (site / "spell_jax" / name).is_file(), name


def test_every_config_loads_outside_the_checkout(site):
    loaded = run_outside(site, "-c", CONFIGS).split()
    shipped = {path.stem for path in (ROOT / "configs").glob("[a-z]*.py")}
    assert set(loaded) == shipped and len(loaded) == len(shipped)


def test_console_scripts_run_outside_the_checkout(site):
    """Each is a function of spell_jax.console, for a module that answers --version."""
    scripts = configparser.ConfigParser()
    [entry_points] = site.glob("*.dist-info/entry_points.txt")
    scripts.read(entry_points)
    targets = dict(scripts["console_scripts"])
    assert {"spell-train", "spell-check", "spell-plan"} <= targets.keys()
    for name, target in targets.items():
        function = target.removeprefix("spell_jax.console:")
        program = f"import sys; from spell_jax import console; sys.argv = [{name!r}, '--version']"
        assert run_outside(site, "-c", f"{program}; console.{function}()").startswith("spell_jax ")


def test_check_runs_outside_the_checkout(site):
    assert "706,176 parameters" in run_outside(
        site, "-m", "spell_jax.launch.check", "--config=tiny", "--topology=cpu:1"
    )
