"""Tests of launch/tpu_vm.py against a fake local gcloud (fake_gcloud.py)."""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from spell_jax.launch import tpu_vm
from tests.paths import ROOT

PLACE = ["--name=night", "--zone=us-west4-a"]
SSH = ["compute", "tpus", "tpu-vm", "ssh", "night", "--zone=us-west4-a", "--quiet"]

# The trainer records its start in the bucket and exits with the status that plan.json has for this
# start of the worker. If the status is null, it waits until it is killed.
TRAINER = """
import json, pathlib, sys, time
bucket, worker = pathlib.Path(sys.argv[1]), pathlib.Path.home().name
starts = bucket / f"{worker}.jsonl"
with starts.open("a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\\n")
plan = json.loads((bucket / "plan.json").read_text())[worker]
status = plan[len(starts.read_text().splitlines()) - 1]
print("I am", worker, flush=True)
if status is None:
    (pathlib.Path.home() / "waits").touch()
    time.sleep(300)
sys.exit(status)
"""


class Cloud:
    """Fake cloud and its clock, which replaces the module `time`."""

    strftime = staticmethod(time.strftime)

    def __init__(self, root: pathlib.Path):
        self.root, self.bucket = root / "cloud", root / "bucket"
        self.bucket.mkdir()
        self.now, self.slept = 0.0, []
        self.plan([0], [0])

    def plan(self, *statuses: list[int | None]) -> None:
        """Set the exit statuses of the trainer's starts, for each worker."""
        plan = {f"worker-{i}": ends for i, ends in enumerate(statuses)}
        (self.bucket / "plan.json").write_text(json.dumps(plan))

    def sleep(self, seconds: float) -> None:
        """Advance the clock, then wait until every trainer has exited or is waiting."""
        self.now += seconds
        self.slept.append(seconds)
        assert len(self.slept) < 50, "nothing is waited for"
        self.settle()

    def settle(self) -> None:
        limit = time.monotonic() + 60
        while any(not self.is_settled(home) for home in self.root.glob("night-*/worker-*")):
            assert time.monotonic() < limit, "a trainer neither ends nor waits"
            time.sleep(0.01)

    def is_settled(self, home: pathlib.Path) -> bool:
        run = home / "spell_jax_run"
        return (
            not (run / "command").exists() or (run / "status").exists() or (home / "waits").exists()
        )

    def monotonic(self) -> float:
        return self.now

    def main(self, action: str, *arguments: str) -> int:
        return tpu_vm.main([action, *PLACE, *arguments])

    def prepare(self) -> None:
        assert self.main("create") == self.main("copy") == 0

    def train(self, *arguments: str) -> list[str]:
        """Return the trainer's command as `run` and `watch` expect it."""
        return ["--", "-m", "trainer", str(self.bucket), *arguments]

    def calls(self) -> list[list[str]]:
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """Return short names of the calls.

        Descriptions of a request and of its node count as one call. The name of an ssh call is the
        function that it runs on the workers.
        """
        words = []
        for _, _, kind, verb, *arguments in self.calls():
            if verb == "ssh":
                script = next(word for word in arguments if word.startswith("--command="))
                verb = script.removeprefix(tpu_vm.ON_WORKER).split()[0]
            if (kind, verb) != ("tpu-vm", "describe"):
                words.append(verb)
        return words

    def starts(self, worker: int) -> list[list[str]]:
        path = self.bucket / f"worker-{worker}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def home(self, worker: int, number: int = 1) -> pathlib.Path:
        return self.root / f"night-{number}" / f"worker-{worker}"


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    tools, checkout = tmp_path / "tools", tmp_path / "checkout"
    tools.mkdir()
    fake = shlex.join([sys.executable, "-S", str(ROOT / "tests" / "launch" / "fake_gcloud.py")])
    (tools / "gcloud").write_text(f'#!/bin/sh\nexec {fake} "$@"\n')
    (tools / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_GCLOUD", str(tmp_path / "cloud"))
    checkout.mkdir()
    (checkout / "trainer.py").write_text(TRAINER)
    (checkout / ".gitignore").write_text("runs/\n")
    (checkout / "untracked.txt").touch()
    monkeypatch.chdir(checkout)
    git("init", "--quiet")
    git("add", "trainer.py", ".gitignore")
    commit()
    fake_cloud = Cloud(tmp_path)
    monkeypatch.setattr(tpu_vm, "time", fake_cloud)
    path = os.environ["PATH"]
    yield fake_cloud
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("FAKE_FAIL", raising=False)
    fake_cloud.main("delete")  # ends the trainers that wait


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True)


def commit() -> None:
    who = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    git(*who, "commit", "--quiet", "--all", "--message=x")


# ------------------------------------------------------------------------------------ Commands


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ([], ["--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite"]),
        (
            ["--topology=v5p-32", "--spot", "--valid_until_duration=6h", "--project=mine"],
            [
                *("--accelerator-type=v5p-32", "--runtime-version=v2-alpha-tpuv5", "--spot"),
                *("--valid-until-duration=6h", "--project=mine"),
            ],
        ),
        (
            ["--topology=v4-8", "--runtime_version=mine", "--reserved"],
            ["--accelerator-type=v4-8", "--runtime-version=mine", "--reserved"],
        ),
    ],
)
def test_create_requests_the_slice_and_delete_deletes_it(cloud, options, flags):
    assert cloud.main("create", *options) == cloud.main("delete", *options) == 0
    created, deleted = cloud.calls()
    kind, place = ["compute", "tpus", "queued-resources"], ["--zone=us-west4-a", "--quiet"]
    assert created[:5] == [*kind, "create", "night"]
    assert set(created[5:]) == {"--node-id=night", *place, *flags}
    assert deleted[:5] == [*kind, "delete", "night"]
    assert set(deleted[5:]) == {"--force", *place, *(f for f in flags if "project" in f)}


def test_copy_puts_the_committed_files_on_every_worker(cloud):
    cloud.prepare()
    scp = next(call for call in cloud.calls() if "scp" in call)
    assert scp[2:] == [
        *("tpu-vm", "scp", "runs/launch/night.tar.gz", "night:spell_jax.tar.gz", "--worker=all"),
        *("--zone=us-west4-a", "--quiet"),
    ]
    for worker in range(2):
        code = cloud.home(worker) / "spell_jax"
        assert sorted(path.name for path in code.iterdir()) == [".gitignore", "trainer.py"]
    installed = (cloud.root / "python3.txt").read_text().splitlines()
    assert installed[:3] == [
        "t1v-n-fake-w-0 -m pip install --quiet --user uv",
        "t1v-n-fake-w-0 -m uv venv --quiet --python=3.11 spell_jax_venv",
        "t1v-n-fake-w-0 -m uv pip install --quiet --python=spell_jax_venv/bin/python "
        "-e ./spell_jax[tpu,gcs,judge,tfds]",
    ]
    assert installed[3:] == [line.replace("w-0", "w-1") for line in installed[:3]]


@pytest.mark.slow
def test_second_copy_replaces_the_code_and_keeps_the_environment(cloud):
    cloud.prepare()
    git("mv", "trainer.py", "renamed.py")
    commit()
    assert cloud.main("copy") == 0
    code = cloud.home(1) / "spell_jax"
    assert sorted(path.name for path in code.iterdir()) == [".gitignore", "renamed.py"]
    assert (cloud.root / "python3.txt").read_text().count("uv venv") == 2  # one per worker


def test_copy_rejects_uncommitted_changes(cloud, capsys):
    cloud.main("create")
    pathlib.Path("trainer.py").write_text("other")
    assert cloud.main("copy") == 1
    assert "uncommitted changes; commit them:\n M trainer.py" in capsys.readouterr().err
    assert "scp" not in cloud.verbs()


@pytest.mark.slow
def test_worker_runs_one_command_at_a_time(cloud, capsys):
    cloud.plan([0, None], [5, None])
    cloud.prepare()
    for state_0, state_1 in (("exited:0", "exited:5"), ("running", "running")):
        assert cloud.main("run", *cloud.train("first")) == 0
        cloud.settle()
        capsys.readouterr()
        assert cloud.main("status") == 0
        shown = capsys.readouterr().out
        assert f"t1v-n-fake-w-0 {state_0} -m trainer {cloud.bucket} first\n" in shown
        assert f"t1v-n-fake-w-1 {state_1} -m trainer" in shown
    assert cloud.main("run", *cloud.train("second")) == 1
    refusal = f"t1v-n-fake-w-0: a command is running already: -m trainer {cloud.bucket} first"
    assert refusal in capsys.readouterr().err
    assert cloud.main("copy") == 1
    assert "cannot install: a command is running" in capsys.readouterr().err
    assert [cloud.starts(worker) for worker in range(2)] == [[["first"]] * 2] * 2


def test_sigterm_to_the_process_group_keeps_trainer_exit_status(cloud, capsys):
    """As in a shutdown, the shell around the trainer gets the signal too and must survive it."""
    source = "import signal,sys,time,pathlib;signal.signal(15,lambda *_:sys.exit(75));"
    source += "(pathlib.Path.home()/'waits').touch();time.sleep(300)"
    cloud.prepare()
    cloud.main("run", "--", "-c", source)
    cloud.settle()
    for worker in range(2):
        run = cloud.home(worker) / "spell_jax_run"
        os.killpg(int((run / "pid").read_text()), signal.SIGTERM)
        (cloud.home(worker) / "waits").unlink()
    cloud.settle()
    capsys.readouterr()
    cloud.main("status")
    assert capsys.readouterr().out.count("exited:75") == 2


def test_run_without_slice_or_installed_code_fails(cloud, capsys):
    assert cloud.main("run", *cloud.train()) == 1
    assert "night: must be ready, but is absent" in capsys.readouterr().err
    cloud.main("create")
    assert cloud.main("run", *cloud.train()) == 1
    assert "t1v-n-fake-w-1: no code is installed; run copy first" in capsys.readouterr().err


@pytest.mark.slow
def test_logs_follow_one_worker(cloud):
    cloud.plan([None], [None])
    cloud.prepare()
    cloud.main("run", *cloud.train())
    cloud.settle()
    command = [sys.executable, "-m", "launch.tpu_vm", "logs", *PLACE, "--worker=1"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Interrupts are ignored if the tests run in the background of a shell.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline().startswith("gcloud compute tpus tpu-vm ssh night")
        assert process.stdout.readline() == "I am worker-1\n"
        with (cloud.home(1) / "spell_jax_run" / "log").open("a") as log:
            log.write("later\n")
        assert process.stdout.readline() == "later\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert "continues" in process.stderr.read()


# ------------------------------------------------------------------------------------ Printing only


TOO_LARGE = ["--", "-m", "spell_jax.train", "--config=configs/paper.py:qwen2.5-7b-instruct"]
TOO_LARGE += ["--workdir=gs://b/run", "--config.data.source=gs://b/clusters"]
FITTING = [*TOO_LARGE, "--config.mesh.fsdp=4", "--config.mesh.context=4"]


@pytest.mark.parametrize("options", [[], ["--dry_run"]])
def test_watch_refuses_a_run_that_does_not_fit_before_any_call(cloud, capsys, options):
    assert cloud.main("watch", *options, *TOO_LARGE) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: packing.token_budget = 51200: accumulate takes 30.21 GiB of a")
    assert err.count("\n") == 1 and out == "" and cloud.calls() == []


@pytest.mark.parametrize(
    "words", [FITTING, ["--topology=v5p-32", *TOO_LARGE], ["--skip_check", *TOO_LARGE]]
)
def test_watch_rents_for_a_run_that_fits_or_unchecked(cloud, capsys, words):
    assert cloud.main("watch", "--dry_run", *words) == 0
    assert "queued-resources create" in capsys.readouterr().out


def test_watch_says_that_another_command_is_not_checked(cloud, capsys):
    tuning = ["--", "-m", "spell_jax.sft", "--config=configs/tiny_warm_start.py"]
    assert cloud.main("watch", "--dry_run", *tuning) == 0
    assert "not checked: -m spell_jax.sft" in capsys.readouterr().out.partition("gcloud")[0]


@pytest.mark.parametrize("option", ["--skip_check", "--policy=config.json"])
def test_options_of_the_check_are_refused_without_a_check(cloud, capsys, option):
    with pytest.raises(SystemExit):
        cloud.main("run", option, *FITTING)
    assert f"{option.partition('=')[0]}: must be given to watch alone" in capsys.readouterr().err


@pytest.mark.parametrize("action", tpu_vm.COMMANDS)
def test_dry_run_prints_calls_without_making_them(cloud, monkeypatch, capsys, action):
    monkeypatch.setenv("PATH", str(cloud.root / "nothing"))  # any call would fail
    command = cloud.train() if action in ("run", "watch") else []
    assert cloud.main(action, "--dry_run", *command) == 0
    assert capsys.readouterr().out.count("gcloud compute tpus") >= 1
    assert not cloud.root.exists() and not pathlib.Path("runs").exists()


ODD = ["a b", "it's", '"x"', "$HOME `id` $(id)", "*", "tab\tnew\nline", "%s", "--c=('x',)", ""]


def test_printed_calls_are_pasteable_and_keep_special_characters(cloud, capsys):
    cloud.prepare()
    before = len(cloud.calls())
    capsys.readouterr()
    cloud.main("run", "--dry_run", *cloud.train(*ODD))
    subprocess.run(["bash", "-c", capsys.readouterr().out], check=True)
    cloud.settle()
    pasted = cloud.calls()[before:]
    assert [cloud.starts(worker) for worker in range(2)] == [[ODD], [ODD]]
    cloud.main("run", *cloud.train(*ODD))
    assert cloud.calls()[before + len(pasted) :] == pasted


# ----------------------------------------------------------------------------------------- Watching

FIRST = ["create", "describe", "report", "scp", "install", "start"]
AGAIN = ["delete", "describe", *FIRST]


@pytest.mark.slow
def test_watch_creates_slice_copies_code_and_runs_to_the_end(cloud, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_WAITS", "3")
    assert cloud.main("watch", "--poll_seconds=20", *cloud.train("x")) == 0
    waiting = ["create", *["describe"] * 3]
    assert cloud.verbs() == ["describe", *waiting, *FIRST[1:], "describe", "report"]
    assert cloud.slept == [20] * 5
    assert [cloud.starts(worker) for worker in range(2)] == [[["x"]], [["x"]]]
    assert "launch.tpu_vm delete --name=night --zone=us-west4-a" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["PREEMPTED", "SUSPENDED", "1", "REBOOT"])
def test_watch_recreates_a_lost_slice_with_the_original_code(cloud, monkeypatch, loss):
    """The restart uses the code of the first start, whatever has changed since."""
    monkeypatch.setenv("FAKE_LOSSES", "1")
    monkeypatch.setenv("FAKE_LOST_AT", "3")
    monkeypatch.setenv("FAKE_LOSS", loss)
    cloud.plan([None, 0], [None, 0])
    sleep = cloud.sleep

    def change(seconds: float) -> None:
        pathlib.Path("trainer.py").write_text("raise SystemExit(9)")
        sleep(seconds)

    cloud.sleep = change
    assert cloud.main("watch", *cloud.train("--workdir=gs://b/run")) == 0
    verbs = cloud.verbs()
    at = verbs.index("delete")
    assert verbs[: at - 1][:9] == ["describe", *FIRST, "describe", "report"]
    assert verbs[at:] == [*AGAIN, "describe", "report"]
    # A worker that does not answer is asked three times: the connection may be the cause.
    assert verbs[:at].count("report") == {"1": 5, "REBOOT": 3, "SUSPENDED": 3}.get(loss, 2)
    assert [cloud.starts(worker) for worker in range(2)] == [[["--workdir=gs://b/run"]] * 2] * 2
    assert (cloud.home(1, 2) / "spell_jax" / "trainer.py").read_text() == TRAINER


@pytest.mark.slow
@pytest.mark.parametrize("statuses", [(1, 75), (75, 0), (143, 69)])
def test_watch_restarts_a_preempted_trainer(cloud, statuses):
    cloud.plan([statuses[0], 0], [statuses[1], 0])
    assert cloud.main("watch", *cloud.train()) == 0
    assert cloud.verbs().count("create") == 2
    assert [len(cloud.starts(worker)) for worker in range(2)] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("statuses", "exit_status"), [((0, 4), 4), ((1, 137), 1), ((75, 2), 2)])
def test_watch_exits_with_the_trainer_status(cloud, statuses, exit_status):
    cloud.plan([statuses[0]], [statuses[1]])
    assert cloud.main("watch", *cloud.train()) == exit_status
    assert "delete" not in cloud.verbs()


@pytest.mark.slow
def test_watch_waits_for_all_workers_after_one_fails(cloud, monkeypatch):
    """One worker fails while the other still runs (its later loss ends the test)."""
    monkeypatch.setenv("FAKE_LOSSES", "1")
    monkeypatch.setenv("FAKE_LOST_AT", "6")
    cloud.plan([2, 0], [None, 0])
    assert cloud.main("watch", *cloud.train()) == 0
    verbs = cloud.verbs()
    assert verbs[: verbs.index("delete")].count("report") == 5


@pytest.mark.slow
@pytest.mark.parametrize(("poll", "waits"), [(50, [60, 120]), (700, [30, 30])])
def test_watch_gives_up_after_max_restarts_with_backoff(cloud, monkeypatch, capsys, poll, waits):
    """The wait doubles after slices that are lost quickly, not after long-lived ones."""
    monkeypatch.setenv("FAKE_LOSSES", "99")
    monkeypatch.setenv("FAKE_WORKERS", "1")
    monkeypatch.setenv("FAKE_LOST_AT", "2")
    cloud.plan([None] * 9, [None] * 9)
    options = ["--max_restarts=2", f"--poll_seconds={poll}"]
    assert cloud.main("watch", *options, *cloud.train()) == 1
    error = capsys.readouterr().err
    assert "gave up after 2 restarts (--max_restarts); the last time: request" in error
    assert cloud.verbs().count("create") == 3 and cloud.verbs().count("delete") == 2
    assert [seconds for seconds in cloud.slept if seconds != poll] == waits


@pytest.mark.slow
def test_watch_attaches_to_the_running_command(cloud, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_LOSSES", "1")
    monkeypatch.setenv("FAKE_LOST_AT", "6")
    cloud.plan([None, 0], [None, 0])
    cloud.prepare()
    cloud.main("run", *cloud.train("x"))
    cloud.settle()
    before = len(cloud.verbs())
    assert cloud.main("watch", *cloud.train("y")) == 1
    assert "t1v-n-fake-w-0 runs another command" in capsys.readouterr().err
    poll = ["describe", "report"]
    assert cloud.verbs()[before:] == poll
    assert cloud.main("watch", *cloud.train("x")) == 0
    assert cloud.verbs()[before:] == [*poll * 3, "describe", *AGAIN, *poll]


@pytest.mark.slow
def test_watch_ends_when_someone_else_deletes_the_slice(cloud, capsys):
    cloud.plan([None], [None])
    sleep = cloud.sleep

    def delete(seconds: float) -> None:
        if len(cloud.slept) == 3:
            cloud.main("delete")
        sleep(seconds)

    cloud.sleep = delete
    assert cloud.main("watch", *cloud.train()) == 1
    shown = capsys.readouterr()
    assert "night: someone else deleted the slice" in shown.err
    assert shown.out.endswith("launch.tpu_vm delete --name=night --zone=us-west4-a\n")
    assert cloud.verbs().count("create") == 1


# ------------------------------------------------------------------------------------------- Errors


@pytest.mark.parametrize("action", ["create", "watch", "logs"])
def test_missing_gcloud_is_reported_without_retries(cloud, monkeypatch, capsys, tmp_path, action):
    only_git = tmp_path / "only_git"
    only_git.mkdir()
    (only_git / "git").symlink_to(shutil.which("git") or "")
    monkeypatch.setenv("PATH", str(only_git))
    assert cloud.main(action, *(cloud.train() if action == "watch" else [])) == 1
    assert "(is gcloud installed and on PATH?)" in capsys.readouterr().err
    assert cloud.slept == []


def test_failed_call_is_shown_with_its_command_and_output(cloud, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAIL", "create")
    assert cloud.main("create") == 1
    first, *later_lines = capsys.readouterr().err.splitlines()
    assert first.startswith("exit status 7: gcloud compute tpus queued-resources create night ")
    assert later_lines == [
        "half of the work is done",
        "ERROR: (create) PERMISSION_DENIED: of course",
        "second line",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("passes", [True, False])
def test_watch_tolerates_two_failed_calls_but_not_three(cloud, monkeypatch, capsys, passes):
    """After a failed call the state of the slice is unknown, so nothing is deleted."""
    sleep = cloud.sleep

    def fail(seconds: float) -> None:
        verb = {1: "describe", 3: "" if passes else "describe"}.get(len(cloud.slept))
        if verb is not None:
            monkeypatch.setenv("FAKE_FAIL", verb)
        sleep(seconds)

    cloud.sleep = fail
    assert cloud.main("watch", *cloud.train()) == (0 if passes else 1)
    shown = capsys.readouterr()
    assert "exit status 7: gcloud compute tpus queued-resources describe" in shown.out
    assert "failure 2 in a row" in shown.out
    assert ("PERMISSION_DENIED" in shown.err) != passes
    assert "delete" not in cloud.verbs()


def test_missing_success_line_of_a_worker_is_an_error(cloud):
    """The result does not depend on gcloud's exit status."""
    cloud.main("create")
    with pytest.raises(tpu_vm.CallError, match="report: succeeded on 2 of 3 workers"):
        tpu_vm.query_workers(tpu_vm.parse(["status", *PLACE]), workers=3)


def test_hanging_call_is_killed_with_its_child_processes(tmp_path):
    """The processes that the call started are killed too, as gcloud starts ssh."""
    child = tmp_path / "child"
    call = ["bash", "-c", 'sleep 300 & echo $! >"$0"; wait', str(child)]
    for limit in (0.2, 1, 5, 25):  # on a busy machine the start may take a while
        with pytest.raises(tpu_vm.CallError, match=r"^took longer than .* s: bash"):
            tpu_vm.call(call, limit=limit)
        if child.exists() and child.read_text().strip():
            break
    stat = pathlib.Path("/proc", child.read_text().strip(), "stat")
    end = time.monotonic() + 60
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the child still runs"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "--topology=v5e-12"], "topology = 'v5e-12': did you mean v5e-128 or "),
        (["create", "--topology=l4:1"], "--topology=l4:1: must be a TPU slice, such as v5e-16"),
        (["create", "--spot", "--reserved"], "not allowed with argument --spot"),
        (["run"], "error: run: Python's arguments must follow --, such as -- -m spell_jax.train"),
        (["watch", "-m", "spell_jax.train", "--config=tiny"], "error: watch: Python's arguments"),
        (["wach", "--", "-m", "x"], "error: argument action: invalid choice: 'wach'"),
        (["delete", "--", "-m", "x"], "error: delete: must have nothing after --"),
        (["delete", "--nmae=x"], "error: --nmae=x: unknown to delete"),
        (["watch", "--max_restarts=-1", "--", "x"], "--max_restarts must be at least 0"),
        (["watch", "--poll_seconds=0", "--", "x"], "--poll_seconds above 0"),
    ],
)
def test_invalid_options_are_rejected_before_any_call(cloud, capsys, arguments, message):
    action, *options = arguments
    with pytest.raises(SystemExit, match="2"):
        cloud.main(action, *options)
    assert message in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert cloud.calls() == [] and not pathlib.Path("runs").exists()


def test_secret_in_a_command_is_refused_without_being_repeated(capsys):
    url = "--config.algorithm.judge_url=http://user:hunter2@host/v1"
    place = ["--name=n", "--zone=z", "--topology=v6e-8", "--dry_run"]
    assert tpu_vm.main(["run", *place, "--", "python", "-m", "spell_jax.train", url]) == 2
    out, err = capsys.readouterr()
    assert "--config.algorithm.judge_url = 'http://...@host/v1'" in err
    assert "hunter2" not in out + err
