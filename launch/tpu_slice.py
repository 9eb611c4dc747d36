"""gcloud calls for one named TPU slice on Google Cloud, used by tpu_vm.py.

1. A call is an argument list. It is printed before it is made; in a dry run it is only printed.
   The error of a failed call has its purpose, the whole command and its output.
2. The slice is a queued resource with one node of the same name.
3. Work on the workers is a shell script run on all of them. It prints one line when it succeeds.
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

# Google's JAX image for each generation (cloud.google.com/tpu/docs/runtimes).
_RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
# States from which a request or a node never becomes usable. All other states are temporary.
_QUEUE_KINDS = {"FAILED": "lost", "SUSPENDED": "lost", "DELETING": "deleting"}
_LOST_NODE = ("PREEMPTED", "TERMINATED", "STOPPED")

# Time limits of a call, in seconds. gcloud itself tries ten times to reach a worker.
_SHORT, _LONG = 300, 1800

# ---------------------------------------------------------------------------- Scripts for workers
# Shell scripts that run in a worker's home folder. spell_jax/ has the code and spell_jax_venv/ its
# Python. spell_jax_run/ has the command's files: lock, command, pid, log and, after the command has
# exited, status. The lock is held while the command runs; unlike a pid file it cannot go stale.
# Each script ends by printing a line that marks success.

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

# At shutdown every process gets a SIGTERM. This shell must outlive the trainer to write its exit
# status. The trap is `:` because the trainer would inherit an empty one.
_INNER = """trap : TERM
echo $$ >../spell_jax_run/pid
PYTHONUNBUFFERED=1 ../spell_jax_venv/bin/python %s
echo $? >../spell_jax_run/status.new
mv ../spell_jax_run/status.new ../spell_jax_run/status
"""

# The lock is tested before status is read, because status is written before the lock is released.
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
    """Error of a called program that failed or timed out; the message says what it was for."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """Runner of programs given as argument lists; prints each one first as a shell command.

    Attributes:
      dry_run: whether calls are only printed.
    """

    dry_run: bool = False

    def call(self, doing: str, arguments: Sequence[str], timeout: float) -> str:
        """Run a program to its end.

        Args:
          doing: purpose of the call, for messages.
          arguments: program and its arguments.
          timeout: time limit in seconds; the program and its children are then killed.

        Returns:
          The program's stdout; "" in a dry run.

        Raises:
          CallError: if the program failed (the message has its output) or exceeded the limit.
          RuntimeError: if the program could not be started.
        """
        print(shlex.join(arguments), flush=True)
        if self.dry_run:
            return ""
        with _started(doing, arguments, subprocess.PIPE) as process:
            try:
                out, error = process.communicate(timeout=timeout)
            except BaseException as why:
                # Kill the whole group: otherwise the ssh process started by gcloud would survive.
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(why, subprocess.TimeoutExpired):
                    raise _error(doing, f"took longer than {timeout:g} s", arguments) from why
                raise
        if process.returncode:
            status = f"failed with exit status {process.returncode}"
            raise _error(doing, status, arguments, out + error)
        return out

    def stream(self, doing: str, arguments: Sequence[str]) -> int:
        """Run a program with its output on the terminal, without a time limit.

        Returns:
          The program's exit status; 0 in a dry run.

        Raises:
          RuntimeError: if the program could not be started.
        """
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
    """Parameters of a slice request to Google Cloud.

    Attributes:
      name: name of the slice, used for both the queued resource and its node.
      zone: Google Cloud zone, such as us-west4-a.
      project: Google Cloud project; "" means gcloud's configured one.
      topology: name of a slice in launch/topologies.py.
      runtime_version: image of the machines; "" means the generation's default.
      capacity: "spot" (cheap, can be preempted), "reserved", or "" for on demand.
      valid_until_duration: time limit of the request in the queue, such as "6h"; "" means none.

    Raises:
      ValueError: if a field is malformed or the topology is unknown.
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
        """Flags of `queued-resources create`, apart from name, zone and project."""
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
    """State of a slice.

    Attributes:
      kind: "absent" (never requested, or deleted), "waiting" (in the queue, or in a temporary
        state), "deleting", "ready" or "lost" (for good).
      text: Google Cloud's description of the state.
      workers: number of machines of a ready slice.
    """

    kind: str
    text: str
    workers: int = 0


@dataclasses.dataclass(frozen=True)
class Report:
    """State of the command on one worker.

    Attributes:
      host: host name of the worker.
      state: "idle" (never started, or gone without an exit status), "running" or "exited".
      status: exit status of a command that has exited, else 0.
      digest: digest() of the command that was started last.
    """

    host: str
    state: str
    status: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Slice:
    """A named slice. All methods raise CallError if a call fails.

    Attributes:
      request: parameters of the slice.
      caller: runner of the gcloud calls.
    """

    request: Request
    caller: Caller

    @property
    def archive(self) -> pathlib.Path:
        """Path of the packed code, relative to the checkout."""
        return pathlib.Path("runs", "launch", f"{self.request.name}.tar.gz")

    def create(self) -> None:
        """Request the slice as a queued resource."""
        self._gcloud("queueing the slice", "queued-resources", "create", *self.request.flags())

    def delete(self) -> None:
        """Delete the slice with its machines, or its request if that is still queued."""
        self._gcloud("deleting the slice", "queued-resources", "delete", "--force", timeout=_LONG)

    def look(self) -> Seen:
        """Query the state of the slice."""
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
        """Pack the files of the last commit.

        Raises:
          ValueError: if there are uncommitted changes, because the running code could then not be
            identified later.
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
        """Copy the packed code to all workers and install it there.

        Args:
          workers: number of workers of the slice.
        """
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
        """Start Python on all workers, detached from the connection.

        Args:
          command: arguments of Python.
          workers: number of workers of the slice.
        """
        arguments = shlex.join(command)
        values = f"command={shlex.quote(arguments)}\ninner={shlex.quote(_INNER % arguments)}\n"
        self._on_all("starting the command", values + _START, workers, _SHORT)

    def reports(self, workers: int) -> list[Report]:
        """Query the state of the command on all workers.

        Args:
          workers: number of workers of the slice.

        Returns:
          One report per worker, in order of host name (shorter names first).
        """
        reports = []
        for host, state, told in self._on_all("asking the workers", _REPORT, workers, _SHORT):
            name, _, status = state.partition(":")
            reports.append(Report(host, name, int(status or 0), told))
        return reports

    def logs(self, worker: int) -> int:
        """Follow a worker's log until interrupted; return the exit status of gcloud."""
        arguments = self._arguments(
            "tpu-vm", "ssh", f"--worker={worker}", f"--command={_TAIL}", positional=()
        )
        return self.caller.stream("reading the log", arguments)

    def _on_all(
        self, doing: str, script: str, workers: int, timeout: float
    ) -> list[tuple[str, ...]]:
        """Run a script on all workers.

        Returns:
          The words of each worker's success line, sorted by host name (shorter names first).

        Raises:
          CallError: if the call failed or a worker did not print its success line.
        """
        out = self._gcloud(
            doing, "tpu-vm", "ssh", "--worker=all", f"--command={script}", timeout=timeout
        )
        found = (line.split() for line in out.splitlines())
        lines = [tuple(words[1:]) for words in found if words[:1] == [_MARK]]
        # gcloud's exit status is not enough: its manual does not define it.
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
    """Short SHA-256 of a command, by which a worker reports what it runs (12 hex digits)."""
    return hashlib.sha256(shlex.join(command).encode()).hexdigest()[:12]
