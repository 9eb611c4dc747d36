"""Test that two hosts get the same replies, in order, as one host with as many devices."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from tests.rollout import hosts

pytestmark = pytest.mark.slow


def test_two_hosts_get_the_same_replies_as_one() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.rollout.hosts", port]
    running = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in (0, 1)
    ]
    first, second = (json.loads(p.communicate(timeout=300)[0].splitlines()[-1]) for p in running)
    assert [process.returncode for process in running] == [0, 0]
    assert first == second == hosts.run()
    # only the prompt of its first three letters is under the cap
    assert len(first) == 9 and first[0][0] == "y" * 17
