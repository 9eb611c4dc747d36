"""The version of this code: the installed release, and the commit of a checkout."""

from __future__ import annotations

import importlib.metadata
import pathlib
import subprocess

UNKNOWN = "unknown"
_PACKAGE = "spell_jax"
_CHECKOUT = pathlib.Path(__file__).parents[2]  # the folder of the package


def release() -> str:
    """Return the version of the installed package; UNKNOWN if it is not installed."""
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def head_commit() -> str:
    """Return the commit of the checkout, with "-dirty" after a change; UNKNOWN outside of git."""
    # An installed package may lie inside the checkout of another project, whose commit says nothing
    # about this code.
    if not (_CHECKOUT / ".git").exists():
        return UNKNOWN
    command = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return git.stdout.strip()
