"""One TPU slice of Google Cloud by its name: the calls of gcloud that tpu_vm.py is made of.

1. A call is an argument list, printed before it is made; in a dry run it is only printed. One that
   fails is shown whole, with what was being done.
2. The slice is a queued resource with one node of the same name.
3. What is done on the workers is a shell script to all of them, which tells its success in a line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from launch import topologies

# Google's images for JAX by generation (cloud.google.com/tpu/docs/runtimes).
_RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
# States after which a request or a node never works again. Those not named pass by themselves.
_QUEUE_KINDS = {"FAILED": "lost", "SUSPENDED": "lost", "DELETING": "deleting"}
_LOST_NODE = ("PREEMPTED", "TERMINATED", "STOPPED")

# Seconds that a call may take. gcloud itself tries ten times to reach a worker.
_SHORT, _LONG = 300, 1800

# ------------------------------------------------------------------------------ On every worker
# Shell scripts, run in the home folder. spell_jax/ is the code, spell_jax_venv/ its Python,
# spell_jax_run/ the command's files: lock (held as long as it runs, whoever started it: it cannot
# be forgotten, as a pid file can), command, pid, log and, once it has exited, status. Each script
# ends with a line by which its success is known.

_MARK = "spell_jax_worker"

_UNPACK = """set -eu
cd
mkdir -p spell_jax_run
exec 9>>spell_jax_run/lock
flock -w 1 9 || { echo "$(hostname): a command is running, its code stays" >&2; exit 1; }
rm -rf spell_jax.new
mkdir spell_jax.new
tar -xzf spell_jax.tar.gz -C spell_jax.new
rm -rf spell_jax
mv spell_jax.new spell_jax
python3 -m pip install --quiet --user uv
[ -x spell_jax_venv/bin/python ] || python3 -m uv venv --quiet --python=3.11 spell_jax_venv
python3 -m uv pip install --quiet --python=spell_jax_venv/bin/python -e './spell_jax[tpu,gcs]'
echo "spell_jax_worker $(hostname) copied"
"""

_START = """set -eu
cd
[ -x spell_jax_venv/bin/python ] || { echo "$(hostname): no code here, copy it" >&2; exit 1; }
mkdir -p spell_jax_run
exec 9>>spell_jax_run/lock
flock -w 1 9 || { echo "$(hostname): runs already: $(cat spell_jax_run/command)" >&2; exit 1; }
rm -f spell_jax_run/status
printf %s "$command" >spell_jax_run/command
cd spell_jax
setsid nohup bash -c "$inner" >>../spell_jax_run/log 2>&1 </dev/null &
echo "spell_jax_worker $(hostname) started"
"""

# A SIGTERM to all processes, as at shutdown, must not end this shell before the trainer, whose
# status it writes; `:` and not '', which the trainer would inherit.
_INNER = """trap : TERM
echo $$ >../spell_jax_run/pid
PYTHONUNBUFFERED=1 ../spell_jax_venv/bin/python %s
echo $? >../spell_jax_run/status.new
mv ../spell_jax_run/status.new ../spell_jax_run/status
"""

# The lock is tried before status is read: who let go of it has written his status.
_REPORT = """cd
mkdir -p spell_jax_run
cd spell_jax_run
if flock -n -s lock true; then state=idle; else state=running; fi
[ ! -e status ] || state=exited:$(cat status)
echo "spell_jax_worker $(hostname) $state $(cat command 2>/dev/null | sha256sum | cut -c1-12)"
"""

_TAIL = "tail -n 100 -F spell_jax_run/log"


# ---------------------------------------------------------------------------------------- Calls


class CallError(RuntimeError):
    """A program that was called failed or took too long; says what for."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """Calls programs by argument lists, each printed first as a line for a shell.

    Attributes:
      dry_run: only print.
    """

    dry_run: bool = False

    def call(self, doing: str, arguments: Sequence[str], timeout: float) -> str:
        """What the program wrote to stdout ("" in a dry run).

        Args:
          doing: what for, in messages.
          arguments: the program and its arguments.
          timeout: seconds; the program and all that it started are then killed.

        Raises:
          CallError: it failed or took longer; with all that it wrote.
          RuntimeError: there is no such program.
        """
        print(shlex.join(arguments), flush=True)
        if self.dry_run:
            return ""
        with _started(doing, arguments, subprocess.PIPE) as process:
            try:
                out, error = process.communicate(timeout=timeout)
            except BaseException as why:
                # The whole group: ssh, which gcloud has started, would go on alone.
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(why, subprocess.TimeoutExpired):
                    raise _error(doing, f"took longer than {timeout:g} s", arguments) from why
                raise
        if process.returncode:
            status = f"failed with exit status {process.returncode}"
            raise _error(doing, status, arguments, out + error)
        return out

    def stream(self, doing: str, arguments: Sequence[str]) -> int:
        """The program's exit status; what it writes is seen as it comes, for as long as it runs."""
        print(shlex.join(arguments), flush=True)
        if self.dry_run:
            return 0
        with _started(doing, arguments, None) as process:
            return process.wait()


def _started(doing: str, arguments: Sequence[str], pipe: int | None) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            process_group=None if pipe is None else 0,
        )
    except OSError as why:
        hint = f"{why} (is {arguments[0]} installed and on PATH?)"
        raise RuntimeError(str(_error(doing, "could not be started", arguments, hint))) from why


def _error(doing: str, what: str, arguments: Sequence[str], wrote: str = "") -> CallError:
    return CallError(f"{doing}: {arguments[0]} {what}\n{shlex.join(arguments)}\n{wrote}".rstrip())


# ------------------------------------------------------------------------------------ The slice


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of Google Cloud.

    Attributes:
      name: of the slice: its request and its node have the same.
      zone, project: where; without a project that of gcloud's configuration.
      topology: a name of launch/topologies.py.
      runtime_version: the image of the machines; "" is the generation's own.
      capacity: "spot" (cheap, may be taken away), "reserved", or "" for on demand.
      valid_until_duration: how long the request may wait, such as "6h"; "" is without limit.
    """

    name: str
    zone: str
    project: str = ""
    topology: str = "v5e-16"
    runtime_version: str = ""
    capacity: str = ""
    valid_until_duration: str = ""

    def __post_init__(self):
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", self.name):
            raise ValueError(
                f"name = {self.name!r}: must be lower-case letters, digits and hyphens, beginning "
                "with a letter, 63 at most"
            )
        if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z]", self.zone):
            raise ValueError(f"zone = {self.zone!r}: must be a zone, such as us-west4-a")
        if not re.fullmatch(r"|[0-9]+[smhd]", self.valid_until_duration):
            raise ValueError(
                f"valid_until_duration = {self.valid_until_duration!r}: must be a number with s, "
                "m, h or d, such as 6h"
            )
        topologies.find(self.topology)

    def flags(self) -> list[str]:
        """What `queued-resources create` is told besides name and place."""
        topology = topologies.find(self.topology)
        runtime = self.runtime_version or _RUNTIMES[self.topology.partition("-")[0]]
        flags = [f"--node-id={self.name}", f"--accelerator-type={topology.accelerator}"]
        flags.append(f"--runtime-version={runtime}")
        if self.capacity:
            flags.append(f"--{self.capacity}")
        if self.valid_until_duration:
            flags.append(f"--valid-until-duration={self.valid_until_duration}")
        return flags


@dataclasses.dataclass(frozen=True)
class Seen:
    """How a slice stands.

    Attributes:
      kind: "absent" (never asked for, or deleted), "waiting" (for a machine, or for a change that
        comes by itself), "deleting", "ready" or "lost" (it never works again).
      text: Google Cloud's words for it.
      workers: machines of a ready slice.
    """

    kind: str
    text: str
    workers: int = 0


@dataclasses.dataclass(frozen=True)
class Report:
    """What one worker says of the command.

    Attributes:
      host: its name.
      state: "idle" (none was started, or it is gone without a status), "running", "exited".
      status: exit status, if it has exited.
      digest: of the command that was started last.
    """

    host: str
    state: str
    status: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice under its name. All methods raise CallError where a call fails."""

    request: Request
    caller: Caller

    @property
    def archive(self) -> pathlib.Path:
        """The packed code, in the checkout."""
        return pathlib.Path("runs", "launch", f"{self.request.name}.tar.gz")

    def create(self) -> None:
        """Puts a request for the slice into the queue."""
        self._gcloud("queueing the slice", "queued-resources", "create", *self.request.flags())

    def delete(self) -> None:
        """Deletes the slice with its machines, or its request if it still waits."""
        self._gcloud("deleting the slice", "queued-resources", "delete", "--force", timeout=_LONG)

    def look(self) -> Seen:
        """How the slice stands."""
        queued = self._describe("asking for the request's state", "queued-resources")
        state = queued.get("state", {}).get("state", "absent")
        node: dict[str, Any] = {}
        if self.caller.dry_run or state == "ACTIVE":
            node = self._describe("asking for the node's state", "tpu-vm")
        if not queued:
            return Seen("absent", "absent")
        text = f"request {json.dumps(queued['state'])}"
        if state != "ACTIVE":
            return Seen(_QUEUE_KINDS.get(state, "waiting"), text)
        text = f"request ACTIVE, node {node.get('state', 'absent')}"
        if not node or node["state"] in _LOST_NODE:
            return Seen("lost", text)
        if node["state"] != "READY":
            return Seen("waiting", text)
        return Seen("ready", text, len(node["networkEndpoints"]))

    def pack(self) -> None:
        """Packs the files of the last commit.

        Raises:
          ValueError: there are changes that are not committed: what runs could not be told later.
        """
        changed = self.caller.call(
            "looking for changes that are not committed",
            ["git", "status", "--porcelain", "--untracked-files=no"],
            _SHORT,
        )
        if changed:
            raise ValueError(f"code: has changes that are not committed:\n{changed.rstrip()}")
        if not self.caller.dry_run:
            self.archive.parent.mkdir(parents=True, exist_ok=True)
        path = f"--output={self.archive}"
        command = ["git", "archive", "--format=tar.gz", path, "HEAD"]
        self.caller.call("packing the code", command, _SHORT)

    def copy(self, workers: int) -> None:
        """Sends what pack() packed to so many workers, all, unpacks and installs it there."""
        there = f"{self.request.name}:spell_jax.tar.gz"
        self._gcloud(
            "copying the code",
            "tpu-vm",
            "scp",
            "--worker=all",
            positional=(str(self.archive), there),
            timeout=_LONG,
        )
        self._on_all("installing the code", _UNPACK, workers, _LONG)

    def run(self, command: Sequence[str], workers: int) -> None:
        """Starts Python with these arguments on so many workers, all, and leaves it there."""
        arguments = shlex.join(command)
        values = f"command={shlex.quote(arguments)}\ninner={shlex.quote(_INNER % arguments)}\n"
        self._on_all("starting the command", values + _START, workers, _SHORT)

    def reports(self, workers: int) -> list[Report]:
        """What each of so many workers, all, says."""
        reports = []
        for host, state, told in self._on_all("asking the workers", _REPORT, workers, _SHORT):
            name, _, status = state.partition(":")
            reports.append(Report(host, name, int(status or 0), told))
        return reports

    def logs(self, worker: int) -> int:
        """Shows the last lines of a worker's log and all that come, until it is interrupted."""
        arguments = self._arguments(
            "tpu-vm", "ssh", f"--worker={worker}", f"--command={_TAIL}", positional=()
        )
        return self.caller.stream("reading the log", arguments)

    def _on_all(
        self, doing: str, script: str, workers: int, timeout: float
    ) -> list[tuple[str, ...]]:
        """The words of each worker's last line, in the order of the workers."""
        out = self._gcloud(
            doing, "tpu-vm", "ssh", "--worker=all", f"--command={script}", timeout=timeout
        )
        found = (line.split() for line in out.splitlines())
        lines = [tuple(words[1:]) for words in found if words[:1] == [_MARK]]
        # Not left to gcloud's exit status alone, which its manual says nothing of.
        if len(lines) != workers and not self.caller.dry_run:
            raise CallError(f"{doing}: {len(lines)} of {workers} workers have done it\n{out}")
        return sorted(lines, key=lambda line: (len(line[0]), line))

    def _describe(self, doing: str, kind: str) -> dict[str, Any]:
        try:
            out = self._gcloud(doing, kind, "describe", "--format=json")
        except CallError as error:
            if "NOT_FOUND" in str(error):
                return {}
            raise
        return json.loads(out or "{}")

    def _gcloud(
        self,
        doing: str,
        kind: str,
        verb: str,
        *flags: str,
        positional: Sequence[str] = (),
        timeout: float = _SHORT,
    ) -> str:
        arguments = self._arguments(kind, verb, *flags, positional=positional)
        return self.caller.call(doing, arguments, timeout)

    def _arguments(self, kind: str, verb: str, *flags: str, positional: Sequence[str]) -> list[str]:
        place = [f"--zone={self.request.zone}"]
        if self.request.project:
            place.append(f"--project={self.request.project}")
        subject = positional or (self.request.name,)
        return ["gcloud", "compute", "tpus", kind, verb, *subject, *place, "--quiet", *flags]


def digest(command: Sequence[str]) -> str:
    """By which a worker says what it runs."""
    return hashlib.sha256(shlex.join(command).encode()).hexdigest()[:12]
