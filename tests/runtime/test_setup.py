"""Tests of the setup of a command: what a user sees of a disk that is full."""

import pathlib
import subprocess
import sys

import pytest

_SAVING = """
import resource, sys
import jax.numpy as jnp
from absl import app
from spell_jax.runtime import setup
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.files.durable import SaveError

def main(_):
    setup.setup()
    with Checkpoints(sys.argv[1], backoff_s=0.01, fallback=f"{sys.argv[1]}_other") as store:
        arrays = {"a": jnp.ones(9)}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        try:
            store.save(1, arrays, {}, force=True)
        except SaveError as error:
            print(error, file=sys.stderr)

app.run(main, argv=["saving"])
"""


@pytest.mark.slow
def test_full_disk_shows_lines_and_no_tracebacks_of_libraries(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _SAVING, str(tmp_path / "run")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert [line.rpartition(";")[2] for line in shown[:3]] == [
        f" next try in {seconds} s" for seconds in ("0.01", "0.02", "0.04")
    ]
    [last] = shown[3:]
    assert "could not be saved: host 0: OSError: [Errno 27] File too large, 4 tries; nor to" in last
