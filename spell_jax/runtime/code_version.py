"""The commit of a checkout of this code."""

from __future__ import annotations

import pathlib
import subprocess

UNKNOWN = "unknown"
_CHECKOUT = pathlib.Path(__file__).parents[2]


def head_commit() -> str:
    """Return the commit of the checkout, with "-dirty" after a change; UNKNOWN outside of git."""
    # An installed package may lie inside the checkout of another project, whose commit says nothing
    # about this code.
    if not (_CHECKOUT / ".git").exists():
        return UNKNOWN
    # Without tags: a tag's name would take the place of the commit.
    command = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return git.stdout.strip()
