"""Lock of a workdir: at most one run at a time writes to it.

1. Process 0 of a run writes WORKDIR/lock.json: host, pid, start, a random token, and the time of
   the last heartbeat, which a thread renews every HEARTBEAT_S seconds. At the end it is removed.
2. A lock of this machine is stale if its process is gone. A lock of another machine is stale if its
   heartbeat is older than STALE_S seconds. Until then, and for at least WATCHED_S seconds, a new
   run waits for the next heartbeat, which shows that the holder lives: one of the two clocks may
   have been set.
3. Every write is conditional on the content that was read before (TensorStore: file locks on disks,
   generations in buckets). So one of several runs that find the same stale lock gets it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import tensorstore

from spell_jax.runtime.config import build
from spell_jax.runtime.files import durable, paths
from spell_jax.runtime.hosts import distributed

FILE = "lock.json"
HEARTBEAT_S = 30.0
# Longer than the migration of a machine, which may take 100 s, and six heartbeats.
STALE_S = 180.0
# A living holder writes at least once in this time: two heartbeats, and 5 s to write one of them.
WATCHED_S = 65.0
_POLL_S = 5.0  # pause between looks at the lock of another machine

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that holds a lock.

    Attributes:
      host: name of its machine, for people.
      machine: boot of the machine and its pid namespace; "" if unknown.
      pid: process id on that machine.
      process_start: start of the process in clock ticks since the boot; "" if unknown.
      token: random, different for every lock.
      since: time at which it took the lock, in seconds since 1970.
      seen: time of its last heartbeat, in seconds since 1970.
    """

    host: str
    machine: str
    pid: int
    process_start: str
    token: str
    since: float
    seen: float

    @classmethod
    def parse(cls, content: bytes) -> Holder | None:
        """Parse the holder in the content of a lock file; None if the content has another form."""
        try:
            holder = build(cls, dict(json.loads(content)), FILE)
            # OverflowError or OSError for an impossible year, which no message could show.
            time.gmtime(holder.since)
        except (ValueError, TypeError, RecursionError, OverflowError, OSError):
            return None
        return holder

    @property
    def is_local(self) -> bool:
        return self.machine != "" and self.machine == _machine()

    @property
    def is_alive(self) -> bool:
        """Whether a local holder still runs; another process may have its pid by now."""
        return _process_start(self.pid) == self.process_start


@contextlib.contextmanager
def locked(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a workdir, so that only this run writes there; all its processes enter the context.

    ValueError on all processes if another run holds the lock, or it cannot be written. GoneError
    if the workdir is removed or renamed inside, also in place of an error that follows from it.
    """
    lock = WorkdirLock(workdir)
    try:
        if refusal := distributed.broadcast(lock.take):
            raise ValueError(refusal)
        watch = durable.FolderWatch(workdir)
        try:
            yield
        except Exception as error:
            try:
                watch.check_folder()
            except durable.GoneError as gone:
                # Only the message of a SaveError says where the step was saved instead.
                is_complete = isinstance(error, durable.SaveError)
                raise durable.GoneError(str(error if is_complete else gone)) from error
            raise
        with distributed.fail_together():
            watch.check_folder()
    finally:
        lock.release()


class WorkdirLock:
    """The lock of one workdir.

    Args:
      sleep: called with the seconds between two looks at the lock of another machine.
      end: called with an exit code when another run has taken over this lock.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        sleep: Callable[[float], None] = time.sleep,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._workdir, self._sleep, self._end = os.fspath(workdir), sleep, end
        self._generation = b""  # of our file; b"" while the lock is not held
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="workdir lock", daemon=True)
        pid, now = os.getpid(), time.time()
        start, token = _process_start(pid), secrets.token_hex(8)
        self._holder = Holder(socket.gethostname(), _machine(), pid, start, token, now, now)
        self._watch: durable.FolderWatch | None = None

    def take(self) -> str:
        """Take the lock; return "" on success, or a message that names the run that holds the lock.

        Waits up to STALE_S seconds for a heartbeat of a holder on another machine. The message may
        also be that the file cannot be read or written.
        """
        try:
            return self._take()
        except ValueError as error:  # TensorStore's type for every failure of a disk or bucket
            return self._about(f"{FILE} could not be read or written ({error})")

    def _take(self) -> str:
        waited_for, waited, limit = None, 0.0, 0.0
        while True:
            stored = self._read_lock()
            holder = Holder.parse(stored.value) if stored.state == "value" else None
            if holder is None:
                if stored.state == "value":
                    return self._about(f"its {FILE} is damaged; remove the file")
            elif holder.is_local:
                if holder.is_alive:
                    return self._in_use(holder)
            elif waited_for is not None and holder != waited_for:
                # The holder has a new heartbeat, or another run was faster.
                return self._in_use(holder)
            elif waited_for is None or waited < limit:
                if waited_for is None:
                    # The seconds of the wait count, not the holder's clock, which may be wrong: a
                    # clock ahead of ours prolongs no wait, and a late clock still gets WATCHED_S.
                    limit = min(max(STALE_S - (time.time() - holder.seen), WATCHED_S), STALE_S)
                    text = "%s. It may be dead: waits up to %.0f s for its next heartbeat"
                    log.warning(text, self._in_use(holder), limit)
                waited_for, waited = holder, waited + _POLL_S
                self._sleep(_POLL_S)
                continue
            now = time.time()
            self._holder = dataclasses.replace(self._holder, since=now, seen=now)
            # Conditional on the generation that was read: of several runs that see the same stale
            # lock, one gets it.
            self._generation = self._write_lock(self._holder, stored.stamp.generation)
            if self._generation:
                self._watch = durable.FolderWatch(self._workdir)
                self._thread.start()
                return ""

    def release(self) -> None:
        """Remove the lock if it is held."""
        if not self._generation:
            return
        self._is_over.set()
        self._thread.join()
        try:
            self._write_lock(None, self._generation)
        except durable.GoneError:  # `locked` raises it
            pass
        except Exception as error:  # must not replace the error that ends the run
            log.warning("%s", self._about(f"{FILE} could not be removed ({error})"))
        self._generation = b""

    def renew(self) -> None:
        """Write a heartbeat; end the process if another run has taken over the lock."""
        seen_now = dataclasses.replace(self._holder, seen=time.time())
        generation = self._write_lock(seen_now, self._generation)
        if not generation:
            lock_file = self._read_lock()
            holder = Holder.parse(lock_file.value) if lock_file.state == "value" else None
            if holder is not None and holder.token != self._holder.token:
                log.error("%s. It took over from this run, which ends", self._in_use(holder))
                self._generation = b""
                self._is_over.set()
                return self._end(1)
            # The file was removed by hand. The next heartbeat writes it again.
            generation = lock_file.stamp.generation
        self._generation = generation

    def _beat(self) -> None:
        while not self._is_over.wait(HEARTBEAT_S):
            try:
                self.renew()
            except Exception as error:  # of the disk or the network; the next heartbeat may succeed
                log.warning("%s", self._about(f"{FILE} could not be renewed ({error})"))

    def _store(self) -> tensorstore.KvStore:
        if paths.is_remote(self._workdir):
            bucket, _, folder = self._workdir.removeprefix("gs://").partition("/")
            place = {"driver": "gcs", "bucket": bucket, "path": f"{folder}/"}
        else:
            place = {"driver": "file", "path": f"{pathlib.Path(self._workdir).absolute()}/"}
        return tensorstore.KvStore.open(place).result()

    def _read_lock(self) -> tensorstore.KvStore.ReadResult:
        return self._store().read(FILE).result()

    def _write_lock(self, holder: Holder | None, generation: bytes) -> bytes:
        """Replace the file (None: remove it) if its generation is `generation`.

        Returns the new generation, or b"" if the file has another. GoneError if the folder was
        removed or renamed: the write would make a new folder.
        """
        if self._watch is not None:
            self._watch.check_folder()
        content = None if holder is None else json.dumps(dataclasses.asdict(holder)).encode()
        # TensorStore compares and writes in one operation: by file locks on a disk, by generations
        # in a bucket.
        return self._store().write(FILE, content, if_equal=generation).result().generation

    def _about(self, text: str) -> str:
        return f"workdir = {self._workdir}: {text}"

    def _in_use(self, holder: Holder) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since))
        return self._about(
            f"is in use by pid {holder.pid} on host {holder.host}, since {since}, last seen "
            f"{max(0, time.time() - holder.seen):.0f} seconds ago; end that process or give "
            "another workdir"
        )


def _machine() -> str:
    """Return this process's boot id and pid namespace, where a pid is unique; "" without /proc."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """Return a process's start in clock ticks since the boot; "" if ended or without /proc."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name of the program, in parentheses before the state, may contain anything.
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
