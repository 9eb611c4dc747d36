"""A small run of the trainer on one of several hosts, which a test disturbs at a chosen moment.

python -m tests.slow.cut_off POLICY WORKDIR SETTINGS FOLDER POINT:COUNT

SETTINGS are config fields by dotted name, in JSON. FOLDER is empty except on the host that is
disturbed. Its process waits when it passes a point of
runtime/fault_injection.py for the COUNT-th time (or "joined:1", when all hosts have met): it makes
FOLDER/reached and goes on when there is FOLDER/go.
"""

from __future__ import annotations

import collections
import json
import pathlib
import sys
import time

import jax
import pytest

from spell_jax.runtime import fault_injection
from spell_jax.runtime import setup as start
from spell_jax.runtime.hosts import peers
from spell_jax.trainer import loop
from tests import noise

STEPS = 3


def make_config(policy: pathlib.Path, **settings):
    fields = {"steps": STEPS, "checkpoint_every": 1, "validate_every": 0}
    return noise.small_config(policy, **(fields | settings))


def wait_at(point: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, count = point.partition(":")
    passed: collections.Counter[str] = collections.Counter()

    def wait_or_pass(passing: str) -> None:
        passed[passing] += 1
        if passing == name and passed[passing] == int(count):
            (folder / "reached").touch()
            while not (folder / "go").exists():
                time.sleep(0.02)

    meet = peers.wait_for_all

    def wait_after_meeting(*arguments) -> peers.Meeting:
        meeting = meet(*arguments)
        wait_or_pass("joined")
        return meeting

    monkeypatch.setattr(fault_injection, "point", wait_or_pass)
    monkeypatch.setattr(peers, "wait_for_all", wait_after_meeting)


def main() -> None:
    policy, workdir, settings, folder, point = sys.argv[1:]
    config = make_config(pathlib.Path(policy), **json.loads(settings))
    jax.config.update("jax_disable_most_optimizations", True)  # less to compile
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        if folder:
            wait_at(point, pathlib.Path(folder), monkeypatch)
        start.setup()
        loop.train(config, pathlib.Path(workdir))


if __name__ == "__main__":
    main()
