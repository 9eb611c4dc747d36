"""A small file system in memory, for tests of full disks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def mounted(folder: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
    """Mount a tmpfs of a size such as "64m" at a new folder; skip the test without root."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
