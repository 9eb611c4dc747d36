"""Rent a TPU slice on Google Cloud, run a command on it, and restart it when the slice is lost.

    python -m launch.tpu_vm watch --name=spell --zone=us-west4-a --topology=v5e-16 --spot \\
        -- -m spell_jax.train --config=configs/paper.py:qwen2.5-7b-instruct \\
        --config.mesh.fsdp=4 --config.mesh.context=4 --workdir=gs://BUCKET/run \\
        --config.policy.folder=gs://BUCKET/Qwen2.5-7B-Instruct \\
        --config.data.source=gs://BUCKET/clusters

`create` queues a request for the slice. `copy` packs the committed files and installs them on all
workers. `run` starts Python there with the arguments after `--`, detached; a worker refuses a
second command. `status` and `logs` inspect it. `delete` deletes the slice. `watch` does all of
this: it polls every --poll_seconds; if the slice or a worker is lost, or the command was preempted
(exit status 75 or 143), it deletes the slice and starts over. It ends with the command's exit
status, at once for a mistake of the user (2).

Before anything is rented, `watch` checks a command `-m spell_jax.train`: its config, and whether
the run fits into the slice's memory (rental_check.py). For a model that is neither on this machine
nor well-known, --policy names its config.json; --skip_check rents without the check.

Every call is printed before it is made, ready to paste into a shell. With --dry_run none is made.
The required setup (gcloud, permissions, buckets) is in docs/launching.md.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from spell_jax.launch import topologies
from spell_jax.runtime import entry, terminal
from spell_jax.runtime.hosts import sigterm

COMMANDS = ("create", "copy", "run", "logs", "status", "watch", "delete")
# Google's JAX image for each generation (cloud.google.com/tpu/docs/runtimes).
RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
# States of a request or a node in which it never becomes usable. Unlisted states are temporary.
LOST = ("FAILED", "SUSPENDED", "PREEMPTED", "TERMINATED", "STOPPED")
SCRIPT = pathlib.Path(__file__).with_name("tpu_worker.sh")
ON_WORKER = f"--command={SCRIPT.read_text().rstrip()}; "  # a function of SCRIPT follows
PATIENCE = 3  # consecutive failures after which they no longer count as transient
# Exit statuses after which a command is started again: 75 for an end by SIGTERM, and 128 + 15, a
# shell's status if SIGTERM came before the first line of the program.
PREEMPTED = (sigterm.EXIT_CODE, 128 + signal.SIGTERM)
# Seconds before a lost slice is requested again: FIRST_WAIT, doubled for every slice in a row that
# was lost within QUICK seconds, at most LONGEST_WAIT.
FIRST_WAIT, LONGEST_WAIT, QUICK = 30, 1800, 600


class CallError(RuntimeError):
    """A called program failed or took too long; the message has the command and its output."""


class Lost(Exception):
    """The slice must be deleted and requested again; the message says why."""


def say(text: str) -> None:
    """Print text as shell comments, so that the whole output can be pasted into a shell."""
    lines = text.rstrip("\n").split("\n")
    print("\n".join(f"# {time.strftime('%T')} {line}" for line in lines), flush=True)


def printable(words: Sequence[str]) -> str:
    """Quote a command for a shell, with `$(cat SCRIPT)` instead of the text of SCRIPT."""
    short = f'--command="$(cat {shlex.quote(str(SCRIPT))})"\'; '
    return shlex.join(words).replace(shlex.quote(ON_WORKER)[:-1], short)


def call(words: Sequence[str], dry_run: bool = False, limit: float | None = 1800) -> str:
    """Print a command, run it unless `dry_run`, and return its stdout.

    After `limit` seconds it is killed. None means no limit, and that the output is not captured.
    """
    # Printed before the call: a log then ends with the call that hangs.
    print(shown := printable(words), flush=True)
    if dry_run:
        return ""
    pipe = subprocess.PIPE if limit else None
    # In a process group of its own: Ctrl-C reaches this program alone, which then kills gcloud.
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace", process_group=0
    ) as process:
        try:
            out, error = process.communicate(timeout=limit)
        except BaseException as why:
            os.killpg(process.pid, signal.SIGKILL)  # the whole group, because gcloud starts ssh
            if isinstance(why, subprocess.TimeoutExpired):
                raise CallError(f"took longer than {limit:g} s: {shown}") from why
            raise
    if process.returncode:
        output = f"{out or ''}{error or ''}".rstrip()
        raise CallError(f"exit status {process.returncode}: {shown}\n{output}".rstrip())
    return out


# -------------------------------------------------------------------------------------- The slice


def gcloud(options: Namespace, *words: str, limit: float | None = 1800) -> str:
    command = ["gcloud", "compute", "tpus", *words, *options.place, "--quiet"]
    return call(command, options.dry_run, limit)


def query_resource(options: Namespace, kind: str) -> dict[str, Any]:
    """Query the request ("queued-resources") or the node ("tpu-vm"); {} if there is none."""
    try:
        return json.loads(gcloud(options, kind, "describe", options.name, "--format=json") or "{}")
    except CallError as error:
        # gcloud's manual defines no exit status for a missing resource; the API's error says this.
        if "NOT_FOUND" in str(error):
            return {}
        raise


def query_slice(options: Namespace) -> tuple[str, str, int]:
    """Query the slice's state, with a description, and its number of workers.

    States: "absent" (or deleted), "waiting" (queued, or unusable now), "deleting", "lost", "ready".
    """
    request, node = query_resource(options, "queued-resources"), query_resource(options, "tpu-vm")
    queued, state = request.get("state", {}).get("state"), node.get("state", "absent")
    text = f"request {json.dumps(request.get('state', 'absent'))}, node {state}"
    if options.dry_run or (queued == "ACTIVE" and state == "READY"):
        return "ready", text, len(node.get("networkEndpoints", ()))
    # An ACTIVE request has had its node, so a node that is absent now was taken away.
    if queued in LOST or (queued == "ACTIVE" and state in ("absent", *LOST)):
        return "lost", text, 0
    return {None: "absent", "DELETING": "deleting"}.get(queued, "waiting"), text, 0


def create(options: Namespace) -> None:
    runtime = options.runtime_version or RUNTIMES[options.topology.partition("-")[0]]
    accelerator = topologies.find(options.topology).accelerator
    flags = [f"--accelerator-type={accelerator}", f"--runtime-version={runtime}"]
    flags += options.capacity
    if options.valid_until_duration:
        flags.append(f"--valid-until-duration={options.valid_until_duration}")
    gcloud(options, "queued-resources", "create", options.name, f"--node-id={options.name}", *flags)


def delete(options: Namespace) -> None:
    # --force deletes the node too; without it, the node must be deleted first.
    gcloud(options, "queued-resources", "delete", options.name, "--force")


def pack(options: Namespace) -> None:
    """Pack the committed files; uncommitted changes would make the running code unidentifiable."""
    changed = call(["git", "status", "--porcelain", "--untracked-files=no"], options.dry_run)
    if changed:
        raise RuntimeError(f"the code has uncommitted changes; commit them:\n{changed.rstrip()}")
    if not options.dry_run:
        os.makedirs(os.path.dirname(options.archive), exist_ok=True)
    output = f"--output={options.archive}"
    call(["git", "archive", "--format=tar.gz", output, "HEAD"], options.dry_run)


def copy(options: Namespace, workers: int) -> None:
    """Copy the packed code to all workers and install it there."""
    target = f"{options.name}:spell_jax.tar.gz"
    gcloud(options, "tpu-vm", "scp", options.archive, target, "--worker=all")
    on_all(options, "install", workers)


def run(options: Namespace, workers: int) -> None:
    """Start the command on all workers, detached from the connection."""
    on_all(options, f"start {shlex.quote(options.command)}", workers)


def query_workers(options: Namespace, workers: int) -> list[list[str]]:
    """Query host name, state ("idle", "running" or "exited:STATUS") and command of each worker."""
    return [[*words, ""][:3] for words in on_all(options, "report", workers)]


def on_all(options: Namespace, function: str, workers: int) -> list[list[str]]:
    """Call a function of SCRIPT on all workers; return the words of each success line."""
    out = gcloud(options, "tpu-vm", "ssh", options.name, "--worker=all", f"{ON_WORKER}{function}")
    lines = [line.rstrip().split(maxsplit=3) for line in out.split("\n")]
    successes = [words[1:] for words in lines if words[:1] == ["spell_jax_worker"]]
    # gcloud's exit status is not enough: its manual does not define it.
    if len(successes) != workers and not options.dry_run:
        raise CallError(f"{function}: succeeded on {len(successes)} of {workers} workers\n{out}")
    return sorted(successes, key=lambda words: (len(words[0]), words))  # worker 10 after worker 9


# ------------------------------------------------------------------------------------------ Watch


def watch(options: Namespace) -> int:
    """Keep the command running until it has exited on all workers; return its exit status."""
    pack(options)
    if options.dry_run:
        say("each call once; if the slice is lost, it is deleted and all starts over")
        for step in (create, start, poll, delete):
            step(options)
        return 0
    restarts, wait = 0, FIRST_WAIT
    while True:
        since = time.monotonic()
        try:
            return use_slice(options)
        except Lost as why:
            if restarts == options.max_restarts:
                problem = f"gave up after {restarts} restarts (--max_restarts)"
                raise RuntimeError(f"{options.name}: {problem}; the last time: {why}") from why
            say(f"lost: {why}")
        try:
            delete(options)
        except CallError as error:  # the slice may be usable; otherwise it is lost again
            say(str(error))
        # A slice lost soon after each start means no capacity: asking more often does not help.
        wait = min(2 * wait, LONGEST_WAIT) if time.monotonic() - since < QUICK else FIRST_WAIT
        restarts += 1
        say(f"restart {restarts} of {options.max_restarts} in {wait} s")
        time.sleep(wait)


def use_slice(options: Namespace) -> int:
    """Request the slice unless it exists, start the command unless it runs, and poll both.

    Raises Lost if the slice, a worker or the command was preempted; CallError if 3 polls in a row
    failed for another reason.
    """
    requested = started = False
    failures = 0
    while True:
        state = "unknown"
        try:
            state, text, workers = query_slice(options)
            if state == "absent" and requested:  # a preempted slice stays queued as SUSPENDED
                raise RuntimeError(f"{options.name}: someone else deleted the slice")
            if state == "absent":
                create(options)
            elif state == "lost":
                raise Lost(text)
            elif state == "ready" and not started:
                start(options, workers)
                started = True
            elif state == "ready":
                if (status := poll(options, workers)) is not None:
                    return status
            else:
                say(f"waiting: {text}")
            requested |= state != "deleting"
            failures = 0
        except CallError as error:
            # A single call may fail in the network, while the started command runs on.
            failures += 1
            say(f"{error}\n(failure {failures} in a row)")
            # The API calls the node usable, but no worker answers: a new slice is the remedy. If
            # the API itself fails, a new slice would not help.
            if failures == PATIENCE and started and state == "ready":
                raise Lost("the workers do not answer") from error
            if failures == PATIENCE:
                raise
        time.sleep(options.poll_seconds)


def start(options: Namespace, workers: int = 0) -> None:
    """Copy the code and start the command, unless the workers run it already."""
    running = [words for words in query_workers(options, workers) if words[1] == "running"]
    # After an interruption, the same `watch` finds the command running and only polls.
    for host, _, command in running:
        if command.split() != options.command.split():
            raise RuntimeError(f"{host} runs another command; watch that, or delete the slice")
    if running:
        return say("the command is running already")
    copy(options, workers)
    run(options, workers)


def poll(options: Namespace, workers: int = 0) -> int | None:
    """Return the first nonzero exit status or 0 if all workers have one, None if one has none."""
    states = {host: state for host, state, _ in query_workers(options, workers)}
    say(", ".join(f"{host} {state}" for host, state in states.items()))
    if idle := [host for host, state in states.items() if state == "idle"]:
        raise Lost(f"on {', '.join(idle)} the command ended without an exit status")
    if "running" in states.values():
        return None
    statuses = [int(state.removeprefix("exited:")) for state in states.values()]
    if entry.EXIT_CODE in statuses:  # a mistake, which another start would repeat
        return entry.EXIT_CODE
    for status in PREEMPTED:  # other workers may have failed because they lost this peer
        if status in statuses:
            raise Lost(f"the command was preempted (exit status {status})")
    return next(filter(None, statuses), 0)


# ----------------------------------------------------------------------------------- Command line


class _Parser(argparse.ArgumentParser):
    """A parser that ends a mistake with one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(entry.EXIT_CODE, f"error: {message}\n")


def parse(words: Sequence[str]) -> Namespace:
    """Parse the options, and what follows `--` as `command`, quoted for a shell."""
    parser = _Parser(prog="python -m launch.tpu_vm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("action", choices=COMMANDS)
    add("--name", required=True, help="name of the slice")
    add("--zone", required=True, help="Google Cloud zone, such as us-west4-a")
    add("--project", default="", help="Google Cloud project (default: gcloud's)")
    add("--topology", default="v5e-16", help="slice; default: v5e-16")
    add("--runtime_version", default="", help="image of the machines (default: the generation's)")
    capacity = parser.add_mutually_exclusive_group()
    kind: dict[str, Any] = {"dest": "capacity", "action": "append_const", "default": []}
    capacity.add_argument("--spot", const="--spot", help="may be preempted, and is cheaper", **kind)
    capacity.add_argument("--reserved", const="--reserved", help="of a reservation", **kind)
    add("--valid_until_duration", default="", help="time limit in the queue, such as 6h")
    add("--worker", type=int, default=0, help="worker whose log is shown")
    add("--max_restarts", type=int, default=50, help="times that a lost slice is requested again")
    add("--poll_seconds", type=float, default=60, help="seconds between two polls")
    add("--policy", default="", help="the policy's config.json, for the check of memory")
    add("--skip_check", action="store_true", help="rent without a check of the run")
    add("--dry_run", action="store_true", help="print the calls without making them")
    end = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:end])
    options.command = shlex.join(words[end + 1 :])
    needs_command = options.action in ("run", "watch")
    if needs_command and not options.command:
        example = "-- -m spell_jax.train --config=FILE --workdir=gs://BUCKET/run"
        parser.error(f"{options.action}: Python's arguments must follow --, such as {example}")
    if options.command and not needs_command:
        parser.error(f"{options.action}: must have nothing after --; run and watch take a command")
    if unknown:
        parser.error(f"{' '.join(unknown)}: unknown to {options.action}; --help names the flags")
    for flag in ("policy", "skip_check"):
        if getattr(options, flag) and options.action != "watch":
            parser.error(f"--{flag}: must be given to watch alone, which checks the run")
    try:
        if not topologies.find(options.topology).accelerator:
            parser.error(f"--topology={options.topology}: must be a TPU slice, such as v5e-16")
    except ValueError as error:
        parser.error(str(error))
    if options.max_restarts < 0 or not options.poll_seconds > 0:
        parser.error("--max_restarts must be at least 0 and --poll_seconds above 0")
    options.place = [
        f"--zone={options.zone}",
        *[f"--project={options.project}"] * bool(options.project),
    ]
    # By slice, so that two launchers on this machine do not overwrite each other's archive.
    options.archive = f"runs/launch/{options.name}.tar.gz"
    return options


def act(options: Namespace) -> int:
    """Perform the action; return the exit status."""
    if options.action == "watch" and not options.skip_check:
        from spell_jax.launch import rental_check  # with jax: other actions do without

        command = shlex.split(options.command)
        if tuple(command[:2]) != rental_check.TRAINING:
            say(f"not checked: {options.command}; only {shlex.join(rental_check.TRAINING)} is")
        elif mistakes := rental_check.find_mistakes(command, options.topology, options.policy):
            print("\n".join(f"error: {mistake}" for mistake in mistakes), file=sys.stderr)
            return entry.EXIT_CODE
        else:
            say(f"checked: the config has no mistakes, and the run fits {options.topology}")
    if options.action == "watch":
        try:
            return watch(options)
        finally:
            say("the slice is paid for until it is deleted:")
            place = [f"--name={options.name}", *options.place]
            print(shlex.join(["python", "-m", "launch.tpu_vm", "delete", *place]))
    if options.action == "logs":
        tail = "--command=tail -n 100 -F spell_jax_run/log"
        gcloud(
            options, "tpu-vm", "ssh", options.name, f"--worker={options.worker}", tail, limit=None
        )
        return 0
    if options.action in ("create", "delete"):
        (create if options.action == "create" else delete)(options)
        return 0
    state, text, workers = query_slice(options)
    say(text)
    if options.action == "status":
        for words in query_workers(options, workers) if state == "ready" else ():
            say(" ".join(words))
    elif state != "ready":
        raise RuntimeError(f"{options.name}: must be ready, but is {state}")
    elif options.action == "copy":
        pack(options)
        copy(options, workers)
    else:
        run(options, workers)
    return 0


def main(words: Sequence[str]) -> int:
    """Run the command line; return the exit status (130 if interrupted)."""
    terminal.guard()
    try:
        entry.check_secrets(words)  # words are printed, and stay in the logs of the workers
    except ValueError as error:
        print(error, file=sys.stderr)
        return entry.EXIT_CODE
    options = parse(words)
    try:
        with sigterm.ending():  # the slice, which is paid for, is named at the end
            return act(options)
    except FileNotFoundError as error:
        print(f"{error} (is {error.filename} installed and on PATH?)", file=sys.stderr)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; what was started on Google Cloud continues", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
