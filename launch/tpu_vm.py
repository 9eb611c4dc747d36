"""Rent a TPU slice on Google Cloud, run a command on it, and restart it when the slice is lost.

    python -m launch.tpu_vm watch --name=spell --zone=us-west4-a --topology=v5e-16 --spot \
        -- -m spell_jax.train --config=configs/paper.py:qwen2.5-7b-instruct
        --workdir=gs://BUCKET/run

1. `create` queues a request for the slice at Google Cloud.
2. `copy` packs the committed files, copies them to all workers and installs them there.
3. `run` starts Python with the arguments after `--` on all workers, detached from the connection. A
   worker refuses to start a second command. `logs` and `status` inspect it. `delete` deletes the
   slice.
4. `watch` does 1 to 3 and then polls the workers every --poll_seconds. If the slice or a worker is
   lost, or the command exits with 75 (a preempted trainer), it deletes the slice and starts over.
   The trainer resumes from its workdir.
5. `watch` ends with the command's exit status when the command has exited on all workers. If it is
   started again, it continues to watch the running command.

Every call is printed before it is made, ready to paste into a shell. With --dry_run none is made.
The required setup (gcloud, permissions, buckets) is in docs/launching.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Sequence

from launch.tpu_slice import Caller, CallError, Report, Request, Slice, digest
from spell_jax.runtime.preemption import EXIT_CODE

COMMANDS = ("create", "copy", "run", "logs", "status", "watch", "delete")

_PATIENCE = 3  # consecutive failures after which they no longer count as transient
# Back-off in seconds before a lost slice is requested again. It starts at _FIRST_WAIT, doubles for
# every consecutive slice that was lost within _QUICK seconds, and stops at _LONGEST_WAIT.
_FIRST_WAIT, _LONGEST_WAIT, _QUICK = 30, 1800, 600


# ---------------------------------------------------------------------------------------- Watch


@dataclasses.dataclass
class Watch:
    """Loop that keeps a command running on a slice until the command has exited.

    Attributes:
      slice: slice to use; its pack() must have been called.
      command: arguments of Python.
      max_restarts: number of times that a lost slice is requested again.
      poll_seconds: seconds between two polls.
      sleep: time.sleep or a replacement.
      clock: time.monotonic or a replacement.
    """

    slice: Slice
    command: Sequence[str]
    max_restarts: int
    poll_seconds: float
    sleep: Callable[[float], object]
    clock: Callable[[], float]

    def __post_init__(self):
        self._restarts = self._quick = self._silent = 0
        self._requested = self._started = False
        self._since = self.clock()

    def run(self) -> int:
        """Watch until the command has exited on all workers.

        Returns:
          The first nonzero exit status among the workers, or 0.

        Raises:
          CallError: if 3 polls in a row failed.
          RuntimeError: if max_restarts is exceeded, a worker runs another command, or the slice was
            deleted by someone else.
        """
        failures = 0
        while True:
            try:
                status = self._turn()
                failures = 0
            except CallError as error:
                failures += 1
                if failures == _PATIENCE:
                    raise
                _say(f"{error}\n(failure {failures} in a row, tried again)")
                status = None
            if status is not None:
                return status
            self.sleep(self.poll_seconds)

    def rehearse(self) -> None:
        """Make the calls of a run whose slice is lost once; for a dry run."""
        self.slice.look()
        self.slice.create()
        _say("once it is ready, if the command does not run yet:")
        self.slice.reports(0)
        self.slice.copy(0)
        self.slice.run(self.command, 0)
        _say(f"every {self.poll_seconds:g} s:")
        self.slice.look()
        self.slice.reports(0)
        _say(f"when it is lost, at most {self.max_restarts} times, and then from the top:")
        self.slice.delete()

    def _turn(self) -> int | None:
        """Act on the slice's state; return the exit status at the end, else None."""
        seen = self.slice.look()
        if seen.kind == "absent":
            if self._requested:  # not a preemption: a preempted slice stays queued as SUSPENDED
                raise RuntimeError(f"{self.slice.request.name}: somebody has deleted it")
            self.slice.create()
            self._requested = True
            return None
        self._requested |= seen.kind != "deleting"
        if seen.kind in ("waiting", "deleting"):
            _say(f"waiting: {seen.text}")
        elif seen.kind == "lost":
            self._restart(seen.text)
        elif not self._started:
            self._start(seen.workers)
        else:
            return self._ask(seen.workers)
        return None

    def _start(self, workers: int) -> None:
        running = [r for r in self.slice.reports(workers) if r.state == "running"]
        if any(report.digest != digest(self.command) for report in running):
            raise RuntimeError(
                f"{running[0].host} runs another command: watch that one, or delete the slice"
            )
        if running:
            _say("the command runs already")
        else:
            self.slice.copy(workers)
            self.slice.run(self.command, workers)
        self._started = True

    def _ask(self, workers: int) -> int | None:
        try:
            reports = self.slice.reports(workers)
            self._silent = 0
        except CallError as error:
            self._silent += 1
            _say(f"{error}\n(silence {self._silent} of {_PATIENCE})")
            if self._silent >= _PATIENCE:
                self._restart("the workers do not answer")
            return None
        _say(", ".join(f"{report.host} {_state(report)}" for report in reports))
        if idle := [report.host for report in reports if report.state == "idle"]:
            self._restart(f"on {', '.join(idle)} the command is gone without an exit status")
            return None
        if any(report.state == "running" for report in reports):
            return None
        statuses = [report.status for report in reports]
        if EXIT_CODE in statuses:
            # Other workers may have failed with other statuses because they lost this peer.
            self._restart(f"the command was preempted (exit status {EXIT_CODE})")
            return None
        return next((status for status in statuses if status), 0)

    def _restart(self, why: str) -> None:
        """Delete the slice and wait, so that the next turn requests it again."""
        if self._restarts == self.max_restarts:
            raise RuntimeError(
                f"{self.slice.request.name}: given up after {self._restarts} restarts "
                f"(max_restarts); the last time: {why}"
            )
        _say(f"lost: {why}")
        self.slice.delete()
        self._restarts += 1
        now = self.clock()
        self._quick = self._quick + 1 if now - self._since < _QUICK else 0
        wait = min(_FIRST_WAIT * 2**self._quick, _LONGEST_WAIT)
        _say(f"restart {self._restarts} of {self.max_restarts} in {wait} s")
        self.sleep(wait)
        self._since = self.clock()
        self._requested = self._started = False
        self._silent = 0


def _state(report: Report) -> str:
    return f"exited with {report.status}" if report.state == "exited" else report.state


def _say(text: str) -> None:
    """Print text as shell comments, so that the whole output can be pasted into a shell."""
    stamp = time.strftime("%H:%M:%S")
    print("\n".join(f"# {stamp} {line}" for line in text.splitlines()), flush=True)


# --------------------------------------------------------------------------------- Command line


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into options and the command after `--`.

    Raises:
      ValueError: if the action needs a command and has none or the reverse, or an option is out of
        range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m launch.tpu_vm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=COMMANDS)
    parser.add_argument("--name", required=True, help="of the slice")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", default="", help="by default gcloud's")
    parser.add_argument("--topology", default="v5e-16", help="a name of launch/topologies.py")
    parser.add_argument("--runtime_version", default="", help="by default the generation's image")
    capacity = parser.add_mutually_exclusive_group()
    for kind in ("spot", "reserved"):
        capacity.add_argument(f"--{kind}", dest="capacity", action="store_const", const=kind)
    parser.add_argument("--valid_until_duration", default="", help="limit of waiting, such as 6h")
    parser.add_argument("--worker", type=int, default=0, help="whose log is shown")
    parser.add_argument("--max_restarts", type=int, default=50)
    parser.add_argument("--poll_seconds", type=float, default=60)
    parser.add_argument("--dry_run", action="store_true", help="print the calls, make none")
    before, command = list(arguments), []
    if "--" in before:
        at = before.index("--")
        before, command = before[:at], before[at + 1 :]
    given = parser.parse_args(before)
    needed = given.action in ("run", "watch")
    if needed != bool(command):
        right = "must be Python's arguments, behind --" if needed else "must be empty"
        raise ValueError(f"command = {shlex.join(command)!r}: {right} with {given.action}")
    if given.max_restarts < 0:
        raise ValueError(f"max_restarts = {given.max_restarts}: must be at least 0")
    if not given.poll_seconds > 0:
        raise ValueError(f"poll_seconds = {given.poll_seconds}: must be more than 0")
    return given, command


def act(
    given: argparse.Namespace,
    command: Sequence[str],
    sleep: Callable[[float], object],
    clock: Callable[[], float],
) -> int:
    """Perform the action of the parsed options.

    Args:
      given: parsed options.
      command: arguments of Python, for "run" and "watch".
      sleep: time.sleep or a replacement.
      clock: time.monotonic or a replacement.

    Returns:
      The exit status.
    """
    fields = [field.name for field in dataclasses.fields(Request)]
    request = Request(**{name: getattr(given, name) or "" for name in fields})
    tpu = Slice(request, Caller(given.dry_run))
    if given.action == "create":
        tpu.create()
    elif given.action == "delete":
        tpu.delete()
    elif given.action == "logs":
        return tpu.logs(given.worker)
    elif given.action == "watch":
        tpu.pack()
        watch = Watch(tpu, command, given.max_restarts, given.poll_seconds, sleep, clock)
        if given.dry_run:
            watch.rehearse()
            return 0
        try:
            status = watch.run()
            _say(f"the command has exited with {status}")
        finally:
            _say("the slice is paid for until it is deleted, if it is still there:")
            print(shlex.join(["python", "-m", "launch.tpu_vm", "delete", *_place(request)]))
        return status
    else:
        _act_on_workers(given.action, tpu, command)
    return 0


def _act_on_workers(action: str, tpu: Slice, command: Sequence[str]) -> None:
    seen = tpu.look()
    ready = tpu.caller.dry_run or seen.kind == "ready"
    if action == "status":
        _say(seen.text)
        for report in tpu.reports(seen.workers) if ready else ():
            _say(f"{report.host} {_state(report)}")
        return
    if not ready:
        raise RuntimeError(f"{tpu.request.name}: is not ready ({seen.text})")
    if action == "copy":
        tpu.pack()
        tpu.copy(seen.workers)
    else:
        tpu.run(command, seen.workers)


def _place(request: Request) -> list[str]:
    place = [f"--name={request.name}", f"--zone={request.zone}"]
    return [*place, f"--project={request.project}"] if request.project else place


def main(
    arguments: Sequence[str] | None = None,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the command line.

    Returns:
      2 for invalid options, 1 for a failure, 130 if interrupted (the slice keeps running); else 0,
      or for `watch` the exit status of the command and for `logs` that of gcloud.
    """
    try:
        return act(*parse(sys.argv[1:] if arguments is None else arguments), sleep, clock)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was started on Google Cloud goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
