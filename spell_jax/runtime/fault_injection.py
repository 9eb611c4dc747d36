"""Named places at which a test ends the process.

    SPELL_FAULT="saving:2" python -m spell_jax.train ...

1. `point(name)` stands where a run may be killed; without SPELL_FAULT it does nothing.
2. NAME:COUNT kills the process (SIGKILL) at the COUNT-th passing of that point, counted from 1.
3. NAME:COUNT:term sends it SIGTERM instead, and NAME:COUNT:raise raises Fault.
"""

from __future__ import annotations

import collections
import os
import re
import signal

VARIABLE = "SPELL_FAULT"
TRAINING_POINTS = (
    "proposed",  # a question was written (one passing a question)
    "answered",  # a question was answered
    "verified",  # the answers to a question were judged
    "played",  # the step was played, nothing is learned from it yet
    "updated",  # the weights are new, nothing is written yet
    "saving",  # a checkpoint is being written, in the background
    "written",  # it is there but for what makes it complete
    "saved",  # a checkpoint is complete, older ones are not deleted yet
)
POINTS = (
    *TRAINING_POINTS,
    "sampled",  # a benchmark's question was answered, its samples are on disk
    "taught",  # a teacher has replied, and what it said is on disk
    "judged",  # a judge has replied, and what it said is on disk if it is kept there
)
_FORM = re.compile(rf"({'|'.join(POINTS)}):([1-9][0-9]*)(:term|:raise)?", re.ASCII)
_passed: collections.Counter[str] = collections.Counter()


class Fault(RuntimeError):
    """What NAME:COUNT:raise raises."""


def point(name: str) -> None:
    """Passes one of POINTS; ends the process there if SPELL_FAULT says so.

    Raises:
      ValueError: SPELL_FAULT is of another form.
      Fault: it says raise.
    """
    if not (wanted := os.environ.get(VARIABLE)):
        return
    if not (found := _FORM.fullmatch(wanted)):
        raise ValueError(
            f"{VARIABLE} = {wanted!r}: must be NAME:COUNT, NAME:COUNT:term or NAME:COUNT:raise, "
            f"NAME one of {POINTS} and COUNT at least 1"
        )
    place, count, how = found.groups()
    _passed[name] += 1
    if name != place or _passed[name] != int(count):
        return
    if how == ":raise":
        raise Fault(wanted)
    os.kill(os.getpid(), signal.SIGTERM if how else signal.SIGKILL)
