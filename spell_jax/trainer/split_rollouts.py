"""Rollouts on devices of their own (mesh.rollout_devices), in a thread beside the updates.

1. The main thread trains. `look_ahead` copies weights to the sampling devices and queues the
   rollouts that may use them; the thread makes the queued rollouts in order.
2. The main thread dispatches programs to the training devices, the thread to the sampling devices,
   each in an order that depends only on results. So all processes dispatch alike. The thread's
   exchanges between processes run on the sampling devices.
3. The main thread samples, too, for validations, while the thread is idle (`sampling_devices`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from spell_jax.runtime.hosts import distributed
from spell_jax.trainer.build import Run
from spell_jax.trainer.rollouts import Rollout, Rollouts, make_rollout
from spell_jax.trainer.split_params import SplitParams
from spell_jax.trainer.state import Params, States

log = logging.getLogger(__name__)

MOST_IDLE = 0.3  # share of the time above which a mesh's idleness is a warning
_WATCHED_STEPS = 5  # steps over which the share is a mean
_PATIENCE_S = 30.0  # limit of the wait for the thread at the end of a run


@dataclasses.dataclass
class _Job:
    """A queued rollout, and its result."""

    step: int
    staleness: int
    params: Params
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    rollout: Rollout | None = None
    error: BaseException | None = None
    state_before: dict[str, Any] | None = None  # of the algorithm; None before the job starts


class SplitRollouts(Rollouts):
    """Rollouts in a thread, at most config.staleness steps ahead of the loop."""

    def __init__(self, run: Run, should_stop: Callable[[], bool]):
        super().__init__(run, should_stop)
        self._copies = SplitParams(run)
        self._pending: deque[_Job] = deque()  # not taken yet
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closing = False
        self._start_lock = threading.Lock()  # held while a job starts
        self._idle = _IdleWatch()
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)

    def __enter__(self) -> SplitRollouts:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closing = True
        self._queue.put(None)
        # The thread may wait for an external judge; as a daemon it does not keep the process alive.
        self._thread.join(_PATIENCE_S)

    def params(self, states: States) -> Params:
        return self._copies(states)

    @property
    def has_next(self) -> bool:
        return bool(self._pending)

    def take(self, states: States, step: int) -> Rollout | None:
        if not self._pending:
            self._begin(states, step, 0)
        job = self._pending.popleft()
        assert job.step == step
        job.ended.wait()
        if job.error is not None:
            raise job.error
        if job.rollout is not None:
            for phase, seconds in job.rollout.phases.items():
                job.rollout.metrics.add(f"time/sampling_seconds/{phase}", seconds)
        return job.rollout

    def look_ahead(self, states: States, step: int, advance_update: Callable[[], None]) -> None:
        last = self._pending[-1].step if self._pending else step
        for later_step in self.later_steps(step):
            if later_step > last:
                self._begin(states, later_step, later_step - step)

    def next_state(self) -> dict[str, Any]:
        # With the lock no job starts meanwhile, so the algorithm's state does not change.
        with self._start_lock:
            state = self._pending[0].state_before if self._pending else None
            return self._run.algorithm.state_dict() if state is None else state

    def announce(self, states: States) -> None:
        # Over the old weights the new ones can only go once no rollout runs: in `_begin`.
        if self._run.config.mesh.transfer == "overlapped":
            self._copy(states)

    @contextlib.contextmanager
    def sampling_devices(self) -> Iterator[None]:
        for job in self._pending:
            job.ended.wait()
        with self._idle.busy():
            yield

    def idle_metrics(self, update_seconds: float) -> dict[str, float]:
        return self._idle.shares(update_seconds)

    def _begin(self, states: States, step: int, staleness: int) -> None:
        """Queue a step's rollout with the weights of `states`."""
        job = _Job(step, staleness, self._copy(states))
        self._pending.append(job)
        self._queue.put(job)

    def _copy(self, states: States) -> Params:
        """Return the weights on the sampling devices; the copy counts as a phase of its own."""
        clock = time.monotonic()
        params = self.params(states)
        self._run.timer.reassign({"transfer": time.monotonic() - clock})
        return params

    def _work(self) -> None:
        """Make the queued rollouts; after a failed or abandoned rollout, none."""
        devices = self._run.worker.sampler.mesh.devices.flatten().tolist()
        with distributed.exchanging_on(devices):
            while (job := self._queue.get()) is not None:
                try:
                    if not self._is_closing:
                        with self._idle.busy():
                            self._make(job)
                except BaseException as error:  # also SystemExit: the main thread raises it
                    job.error = error
                if job.rollout is None:
                    self._is_closing = True
                job.params = {}  # the weights are released
                job.ended.set()

    def _make(self, job: _Job) -> None:
        with self._start_lock:
            job.state_before = self._run.algorithm.state_dict()
        options = (self._run, job.params, job.step, job.staleness)
        job.rollout = make_rollout(*options, lambda: None, self._must_end)

    def _must_end(self) -> bool:
        """Return whether a machine is taken away, or the loop of any process has ended."""
        closing = distributed.gather_text("closing" if self._is_closing else "")
        return self._should_stop() or any(closing)


class _IdleWatch:
    """Idle shares of both meshes, with a warning for each mesh that is idle too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sampled = 0.0  # seconds of finished sampling since the last call of `shares`
        self._since: float | None = None  # beginning of the sampling in progress
        self._last: float | None = None  # time of the last call of `shares`
        self._history: list[dict[str, float]] = []
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count the seconds of the block as sampling."""
        with self._lock:
            self._since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                assert self._since is not None
                self._sampled += time.monotonic() - self._since
                self._since = None

    def shares(self, update_seconds: float) -> dict[str, float]:
        """Return the idle shares since the last call; {} at the first call."""
        now = time.monotonic()
        with self._lock:
            sampled, self._sampled = self._sampled, 0.0
            if self._since is not None:
                sampled, self._since = sampled + now - self._since, now
        last, self._last = self._last, now
        # The first step compiles, and its devices idle meanwhile.
        if last is None:
            return {}
        seconds = {"training": update_seconds, "sampling": sampled}
        shares = {mesh: max(0.0, 1 - busy / (now - last)) for mesh, busy in seconds.items()}
        self._history = [*self._history, shares][-_WATCHED_STEPS:]
        if len(self._history) == _WATCHED_STEPS:
            self._warn()
        return {f"time/idle/{mesh}": share for mesh, share in shares.items()}

    def _warn(self) -> None:
        remedies = {
            "training": "more mesh.rollout_devices, or a larger staleness, let rollouts catch up",
            "sampling": "fewer mesh.rollout_devices leave more devices to the update",
        }
        for mesh, remedy in remedies.items():
            share = sum(shares[mesh] for shares in self._history) / _WATCHED_STEPS
            if share > MOST_IDLE and mesh not in self._warned:
                self._warned.add(mesh)
                log.warning(
                    "the %s devices were idle for %.0f %% of the last %d steps: %s",
                    *(mesh, 100 * share, _WATCHED_STEPS, remedy),
                )
