"""Tests of rollouts on devices of their own: the order of steps, equality, resumes, idle meshes."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from spell_jax.policy import weights
from spell_jax.runtime import fault_injection
from spell_jax.runtime.config import ConfigError
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.hosts import distributed
from spell_jax.runtime.hosts.preemption import Preempted
from spell_jax.runtime.log.metrics import Metrics, read_metrics
from spell_jax.runtime.log.run_logger import PhaseTimer
from spell_jax.trainer import loop, split_rollouts
from spell_jax.trainer.rollouts import Rollout
from spell_jax.trainer.split_rollouts import SplitRollouts
from tests import noise

LIMIT_S = 60  # of a wait for the thread

# ------------------------------------------------------------------------- Order, without devices


class CountingAlgorithm:
    """An algorithm whose state is the number of rollouts so far."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


class FakeRun:
    """The parts of a run that SplitRollouts uses; `rolled_out` lists (step, weights, staleness)."""

    def __init__(self, **fields: Any):
        mesh = SimpleNamespace(rollout_devices=4, transfer="overlapped")
        self.config = SimpleNamespace(
            **({"mesh": mesh, "steps": 9, "checkpoint_every": 9} | fields)
        )
        self.timer, self.algorithm = PhaseTimer(), CountingAlgorithm()
        sampling_mesh = SimpleNamespace(devices=np.array(jax.devices()[4:]))
        self.worker = SimpleNamespace(sampler=SimpleNamespace(mesh=sampling_mesh))
        self.rolled_out: list[tuple[int, str, int]] = []
        self.threads: set[str] = set()

    def make_rollout(self, run, params, step, staleness, between_calls, should_stop):
        state = self.algorithm.state_dict()
        self.algorithm.count += 1
        self.threads.add(threading.current_thread().name)
        self.rolled_out.append((step, params["policy"], staleness))
        if should_stop():
            self.algorithm.count -= 1
            return None
        return Rollout([], [], [], Metrics(), state, {"rollout": 0.5})


@pytest.fixture
def make_rollouts(monkeypatch) -> Callable[..., Any]:
    """Return a function that makes SplitRollouts of a FakeRun; states are names of weights."""

    def make(run: FakeRun, should_stop: Callable[[], bool] = lambda: False) -> SplitRollouts:
        monkeypatch.setattr(split_rollouts, "make_rollout", run.make_rollout)
        return SplitRollouts(run, should_stop)

    monkeypatch.setattr(split_rollouts, "SplitParams", lambda run: lambda name: {"policy": name})
    return make


def play(run: FakeRun, source: SplitRollouts) -> list[dict[str, int]]:
    """Play the loop's steps; return the algorithm's state before the rollout after each step."""
    states = []
    for step in range(1, run.config.steps + 1):
        weights_before = f"weights {step - 1}"
        assert source.take(weights_before, step) is not None
        source.look_ahead(weights_before, step, lambda: None)
        states.append(source.next_state())
    assert not source.has_next
    return states


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("checkpoint_every", [1, 2, 4, 9])
def test_each_rollout_uses_the_weights_that_the_config_says(
    staleness, checkpoint_every, make_rollouts
):
    run = FakeRun(staleness=staleness, checkpoint_every=checkpoint_every)
    with make_rollouts(run) as source:
        states = play(run, source)
    expected = []
    for step in range(1, 10):
        last_checkpoint = (step - 1) // checkpoint_every * checkpoint_every
        version = max(last_checkpoint, step - 1 - staleness)
        expected.append((step, f"weights {version}", step - 1 - version))
    assert run.rolled_out == expected
    assert run.threads == {"rollouts"}
    # A checkpoint after step n holds the state before rollout n + 1, however far the thread is.
    assert [state["count"] for state in states] == [*range(1, 10)]


def test_an_error_of_the_thread_ends_the_loop(make_rollouts):
    run = FakeRun(staleness=2)
    make = run.make_rollout

    def fail(run, params, step, *options):
        if step == 2:
            raise FloatingPointError("the policy's logits are not finite")
        return make(run, params, step, *options)

    run.make_rollout = fail
    with make_rollouts(run) as source, pytest.raises(FloatingPointError, match="not finite"):
        play(run, source)
    assert [step for step, *_ in run.rolled_out] == [1]  # not step 3, which was queued


def test_an_abandoned_rollout_ends_the_later_ones(make_rollouts):
    run = FakeRun(staleness=2)
    with make_rollouts(run, lambda: len(run.rolled_out) == 2) as source:
        assert source.take("weights 0", 1) is not None
        source.look_ahead("weights 0", 1, lambda: None)
        assert source.take("weights 1", 2) is None
        assert source.next_state() == {"count": 1}
    assert [step for step, *_ in run.rolled_out] == [1, 2]


def test_the_end_of_the_loop_ends_a_rollout_in_progress(make_rollouts, monkeypatch):
    run, entered = FakeRun(staleness=1), threading.Event()

    def wait_for_end(run, params, step, staleness, between_calls, should_stop):
        entered.set()
        while not should_stop():
            pass

    run.make_rollout = wait_for_end
    with pytest.raises(KeyboardInterrupt), make_rollouts(run) as source:
        source.look_ahead("weights 0", 1, lambda: None)
        assert entered.wait(LIMIT_S)
        raise KeyboardInterrupt
    assert not source._thread.is_alive()


def test_validation_waits_for_the_thread(make_rollouts):
    run, may_end = FakeRun(staleness=1), threading.Event()
    make = run.make_rollout

    def wait_and_make(*arguments):
        assert may_end.wait(LIMIT_S)
        return make(*arguments)

    run.make_rollout = wait_and_make
    with make_rollouts(run) as source:
        source.look_ahead("weights 0", 1, lambda: None)
        threading.Timer(0.2, may_end.set).start()
        with source.sampling_devices():
            assert [step for step, *_ in run.rolled_out] == [2]


def test_idle_meshes_are_measured_and_warned_about_once(monkeypatch, caplog):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(split_rollouts.time, "monotonic", lambda: clock.now)
    watch, shares = split_rollouts._IdleWatch(), []
    for _ in range(8):
        with watch.busy():
            clock.now += 6
        clock.now += 4
        shares.append(watch.shares(update_seconds=8.0))
    assert shares[0] == {}
    for step_shares in shares[1:]:
        assert step_shares == pytest.approx({"time/idle/training": 0.2, "time/idle/sampling": 0.4})
    (message,) = caplog.messages
    assert message.startswith("the sampling devices were idle for 40 % of the last 5 steps: fewer ")


def test_sampling_that_spans_two_steps_counts_in_both(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(split_rollouts.time, "monotonic", lambda: clock.now)
    watch = split_rollouts._IdleWatch()
    watch.shares(0.0)
    with watch.busy():
        clock.now += 10
        assert watch.shares(5.0)["time/idle/sampling"] == 0
        clock.now += 5
    clock.now += 5
    assert watch.shares(5.0)["time/idle/sampling"] == 0.5


def test_exchanges_run_on_the_devices_of_their_thread(monkeypatch):
    first, last = jax.devices()[0], jax.devices()[-1]
    assert distributed._exchange_devices() == (first,)
    used = []
    with distributed.exchanging_on([last]):
        assert distributed._exchange_devices() == (last,)
        row = np.arange(5, dtype=np.uint8)
        np.testing.assert_array_equal(distributed._gather(row), row[None])
        thread = threading.Thread(target=lambda: used.append(distributed._exchange_devices()))
        thread.start()
        thread.join()
    assert used == [(first,)] and distributed._exchange_devices() == (first,)


# ----------------------------------------------------------------------------------------- Config


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"staleness": 0}, "staleness = 0: must be at least 1 for mesh.rollout_devices = 4, or"),
        ({"mesh.rollout_devices": 0, "staleness": 2}, "staleness = 2: must be 0 or 1 without"),
        ({"staleness": 2, "mesh.transfer": "in_place"}, "staleness = 2: must be 1 for mesh.trans"),
        (
            {"mesh.rollout_devices": 0, "mesh.rollout.tensor": 2},
            "mesh.rollout_devices = 0: must be",
        ),
        ({"mesh.rollout_devices": 0, "mesh.transfer": "in_place"}, "mesh.rollout_devices = 0: mu"),
        ({"mesh.transfer": "fast"}, "mesh.transfer = 'fast': must be one of ('overlapped', "),
        ({"mesh.rollout.fsdp": 0}, "mesh.rollout.fsdp = 0: must be at least 1, or -1"),
        ({"loss.old_logprobs": "on_policy"}, 'loss.old_logprobs = "on_policy": must be "rollout"'),
        # Devices are counted when the run is made.
        ({"mesh.rollout_devices": 8}, "mesh.rollout_devices = 8: must leave devices for training"),
        ({"mesh.context": 8}, "mesh = {'data': 1, 'fsdp': -1, 'context': 8, "),
        ({"mesh.rollout.tensor": 3}, "mesh.rollout = {'data': 1, 'fsdp': -1, 'context': 1, "),
    ],
)
def test_a_split_that_cannot_be_is_refused_in_one_line(fields, line, policy):
    split = {"mesh.rollout_devices": 4, "staleness": 1}
    with pytest.raises((ConfigError, ValueError)) as error:
        loop.make_run(noise.small_config(policy, **(split | fields)))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields, old_logprobs",
    [
        ({}, "on_policy"),
        ({"staleness": 1}, "rollout"),
        ({"staleness": 1, "loss.tis_cap": 2.0}, "on_policy"),
        ({"staleness": 2, "mesh.rollout_devices": 4}, "rollout"),
    ],
)
def test_old_logprobs_follow_from_the_staleness(fields, old_logprobs, policy):
    config = loop.read(noise.small_config(policy, **fields))
    assert config.loss.old_logprobs == old_logprobs


# ------------------------------------------------------------------------------------------- Runs

SPLIT = {"mesh.rollout_devices": 4, "staleness": 1}
# With this epsilon, gradients that two meshes round differently move weights by nearly the same. A
# small one makes steps of the sign, and a weight off by 2e-4 may change a sampled token.
SMOOTH = {"optimizer.learning_rate": 0.01, "optimizer.epsilon": 0.1}


def train(folder: pathlib.Path, workdir: pathlib.Path, fault: str = "", **fields: Any) -> loop.Run:
    """Train a folder's policy, as `train_config` does."""
    return train_config(noise.small_config(folder, **fields), workdir, fault)


def train_config(
    config: Any, workdir: pathlib.Path, fault: str = "", give_meaning: Any = noise.give_meaning
) -> loop.Run:
    """Train on all fake devices; return the run's parts. `fault` is as in fault_injection."""
    runs: list[loop.Run] = []
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.ExitStack() as stack:
        give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        make_run = loop.make_run
        monkeypatch.setattr(loop, "make_run", lambda c: runs.append(make_run(c)) or runs[0])
        if fault:
            monkeypatch.setattr(fault_injection, "_passed", type(fault_injection._passed)())
            monkeypatch.setenv(fault_injection.VARIABLE, fault)
            stack.enter_context(pytest.raises(Preempted))
        loop.train(config, workdir)
    return runs[0]


def assert_same_learning(
    workdir: pathlib.Path, other_workdir: pathlib.Path, model: str = "policy", atol: float = 1e-5
) -> None:
    """Assert equal episodes, and weights of a model that are equal to `atol`."""
    assert list(read_episodes(workdir)) == list(read_episodes(other_workdir))
    equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
    params, expected = (weights.load(run / model)[1] for run in (workdir, other_workdir))
    jax.tree.map(equal, params, expected)


def assert_moved(folder: pathlib.Path, first: pathlib.Path) -> None:
    """Assert that training has changed the weights of a folder."""
    params, first_params = (weights.load(path)[1] for path in (folder, first))
    changes = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, first_params)
    assert max(jax.tree.leaves(changes)) > 1e-4


@pytest.mark.slow
def test_split_devices_train_like_shared_devices(policy, tmp_path):
    fields = SMOOTH | {"steps": 5, "checkpoint_every": 4}
    shared = train(policy, tmp_path / "shared", **fields, staleness=1)
    assert shared.learner.mesh is shared.worker.sampler.mesh
    for transfer in ("overlapped", "in_place"):
        workdir = tmp_path / transfer
        split = train(policy, workdir, **fields, **SPLIT, **{"mesh.transfer": transfer})
        training, sampling = split.learner.mesh, split.worker.sampler.mesh
        assert training.size == sampling.size == 4
        assert not {*training.devices.flat} & {*sampling.devices.flat}
        assert_same_learning(workdir, tmp_path / "shared")
        assert_moved(workdir / "policy", policy)
        lines = read_metrics(workdir)
        assert [line["rollout/staleness"] for line in lines] == [0, 1, 1, 1, 0]
        # In place, the weights of step 4 wait for the end of its rollout: they go over in step 5.
        copied = ["time/seconds/transfer" in line for line in lines]
        assert copied == [True, True, True, transfer == "overlapped", True]
        idle_shares = [line.get("time/idle/sampling") for line in lines]
        assert idle_shares[0] is None and all(0 <= share <= 1 for share in idle_shares[1:])


@pytest.mark.slow
def test_killed_split_run_resumes_to_the_bit(policy, tmp_path):
    """Kill a run with weights up to two updates old after the checkpoint of step 3."""
    fields = SPLIT | {"staleness": 2, "steps": 6, "checkpoint_every": 3}
    train(policy, tmp_path / "whole", **fields)
    lines = list(map(noise.steady, read_metrics(tmp_path / "whole")))
    assert [line["rollout/staleness"] for line in lines] == [0, 1, 2, 0, 1, 2]
    resumed = noise.end_earlier(tmp_path / "whole", tmp_path / "resumed", 3)
    train(policy, resumed, **fields)
    assert list(map(noise.steady, read_metrics(resumed))) == lines
    assert_same_learning(resumed, tmp_path / "whole", atol=0)


@pytest.mark.long
def test_preempted_split_run_repeats_the_rollout_in_progress(policy, tmp_path):
    """A notice to stop comes in the thread, in the rollout of step 3, during step 2's update."""
    fields = SPLIT | {"checkpoint_every": 100, "validate_every": 0}
    train(policy, tmp_path / "two", **fields, steps=2)
    questions = len(list(read_episodes(tmp_path / "two")))
    train(policy, tmp_path / "stopped", f"verified:{questions + 2}:term", **fields, steps=4)
    train(policy, tmp_path / "stopped", **fields, steps=4)
    train(policy, tmp_path / "two", **fields, steps=4)
    assert_same_learning(tmp_path / "stopped", tmp_path / "two", atol=0)


EXPERTS = {"qkv_bias": False, "qk_norm": True, "experts": 4, "experts_per_token": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    "parts, fields",
    [
        pytest.param({}, {"policy.lora_rank": 2, "algorithm.reader.refresh": 2}, id="lora"),
        pytest.param(
            EXPERTS,
            {"mesh.fsdp": 2, "mesh.expert": 2, "loss.routing": "sampled", "loss.tis_cap": 2.0},
            id="experts",
        ),
    ],
)
def test_parts_of_a_policy_train_like_on_shared_devices(parts, fields, tmp_path):
    folder = noise.save_policy(tmp_path / "first", **parts)
    common = {"steps": 3, "checkpoint_every": 3, "validate_every": 0, "staleness": 1}
    common |= SMOOTH | fields
    train(folder, tmp_path / "split", **common, **{"mesh.rollout_devices": 4})
    shared = {"mesh.fsdp": 4} if "mesh.fsdp" in fields else {}
    train(folder, tmp_path / "shared", **(common | shared))
    assert_same_learning(tmp_path / "split", tmp_path / "shared")
    assert_moved(tmp_path / "split" / "policy", folder)


@pytest.mark.long
def test_second_model_trains_like_on_shared_devices(tmp_path):
    """The reward model of EAPO samples on the sampling devices and trains after step 2."""
    common = {"steps": 3, "checkpoint_every": 3, "staleness": 1, "minibatches": 1}
    common |= {"loss.old_logprobs": "rollout", "algorithm.refresh_every": 2}
    for name, devices in (("split", 4), ("shared", 0)):
        fields = common | {"evaluate": False, "validate_every": 0, "mesh.rollout_devices": devices}
        config = noise.small_eapo_config(tmp_path, **fields)
        meaning = noise.give_evidence_meaning
        run = train_config(config, tmp_path / name, give_meaning=meaning)
        assert run.own_models["reward_model"].learner.mesh is run.learner.mesh
    for model in ("policy", "reward_model"):
        assert_same_learning(tmp_path / "split", tmp_path / "shared", model)
        assert_moved(tmp_path / "split" / model, tmp_path / model)
