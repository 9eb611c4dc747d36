"""Fault injection: SPELL_FAULT="saving:2" ends a process at a named `point`, for tests.

NAME:COUNT kills the process (SIGKILL) when it passes that point for the COUNT-th time.
NAME:COUNT:term sends SIGTERM instead, and NAME:COUNT:raise raises Fault.
"""

from __future__ import annotations

import collections
import os
import re
import signal

VARIABLE = "SPELL_FAULT"
TRAINING_POINTS = (
    "proposed",  # a question was written (passed once per question)
    "answered",  # a question was answered
    "verified",  # the answers to a question were verified
    "rolled_out",  # the rollouts of a step are done, the update has not begun
    "updated",  # the weights are updated, nothing is written yet
    "saving",  # a checkpoint is being written, in the background
    "written",  # its files are written, its hashes are not
    "saved",  # it is complete, older ones are not deleted yet
)
POINTS = (
    *TRAINING_POINTS,
    "sampled",  # a benchmark question was answered, its samples are on disk
    "taught",  # a teacher has replied, its reply is on disk
    "judged",  # a judge has replied, its reply is on disk if replies are kept
)
_PATTERN = re.compile(rf"({'|'.join(POINTS)}):([1-9][0-9]*)(:term|:raise)?", re.ASCII)
_passed: collections.Counter[str] = collections.Counter()


class Fault(RuntimeError):
    """Exception raised by NAME:COUNT:raise."""


def point(name: str) -> None:
    """Pass one of POINTS and trigger its fault, if any; ValueError if SPELL_FAULT is malformed."""
    # The variable is read at every point: tests set it after the import.
    if not (fault := os.environ.get(VARIABLE)):
        return
    if not (match := _PATTERN.fullmatch(fault)):
        raise ValueError(
            f"{VARIABLE} = {fault!r}: must be NAME:COUNT, NAME:COUNT:term or NAME:COUNT:raise, "
            f"NAME one of {POINTS} and COUNT at least 1"
        )
    fault_point, count, action = match.groups()
    # Counted after the variable is set: COUNT is the number of passes since then.
    _passed[name] += 1
    if name != fault_point or _passed[name] != int(count):
        return
    if action == ":raise":
        raise Fault(fault)
    # SIGKILL runs no handler and flushes nothing, as if the machine were lost.
    os.kill(os.getpid(), signal.SIGTERM if action else signal.SIGKILL)
