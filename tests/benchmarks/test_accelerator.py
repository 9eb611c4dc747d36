"""Tests of the accelerator benchmark: crashes, hangs, the end of its minutes, a second run."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.accelerator import command, kernels_right, rows, trace
from benchmarks.accelerator.command import Accelerator, Section
from benchmarks.accelerator.results import NOT_RUN, Results
from benchmarks.accelerator.section import FAULT, seconds_of
from docs.tools import measurements

MACHINE = {"device": "A GPU", "devices": 1, "python": "3.12.3", "jax": "0.11.2", "commit": "abc"}


def _line(case: str, section: str = "peaks", commit: str = "abc", **content) -> dict:
    machine = MACHINE | {"commit": commit}
    return {"section": section, "case": case, "seconds": 1.0, "machine": machine, **content}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"broken": Section("tests.benchmarks.broken_section", 60)}
    monkeypatch.setattr(command, "SECTIONS", sections)


# ---------------------------------------------------------------------------------------- Results


def test_results_keep_the_last_line_of_a_case_and_drop_a_torn_one(tmp_path: pathlib.Path) -> None:
    results = Results(tmp_path)
    results.add(_line("a", error="out of memory"))
    results.add(_line("a", numbers={"tflops": 1.5}))
    results.add(_line("b", numbers={"tflops": 2.0, FAULT: "too slow"}))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"section": "peaks", "case": "c", "numb')
    reopened_results = Results(tmp_path)
    assert reopened_results.numbers() == {
        "peaks": {"a": {"tflops": 1.5}, "b": {"tflops": 2.0, FAULT: "too slow"}}
    }
    assert reopened_results.finished("peaks") == ["a"]
    assert reopened_results.failures(["peaks"]) == ["peaks b: too slow"]
    assert reopened_results.failures(["update"]) == ["update: not run"]
    table = list(reopened_results.table(["peaks"]))
    assert len(table) == 2 and "tflops 1.5" in table[0] and "FAULT: too slow" in table[1]


def test_damaged_lines_are_left_out_and_cost_no_later_line(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.jsonl"
    damaged = [b"[1]", b"3", b"null", b"{}", b"\0\0", b"\xff", b'{"section": [], "case": "a"}']
    damaged += [json.dumps(_line("a", numbers=None)).encode()]
    damaged += [json.dumps(_line("a", numbers={}) | {"seconds": "x"}).encode()]
    file.write_bytes(b"\n".join([*damaged, json.dumps(_line("b", error="e")).encode()[:-5]]))
    results = Results(tmp_path)
    assert list(results.table(["peaks"])) == []
    results.add(_line("c", numbers={"x": 1.0}))
    assert Results(tmp_path).finished("peaks") == ["c"]


def test_a_section_that_did_not_start_is_forgotten_once_it_has(tmp_path: pathlib.Path) -> None:
    results = Results(tmp_path)
    results.add(_line("start", error=NOT_RUN))
    assert results.failures(["peaks"]) == [f"peaks start: {NOT_RUN}"]
    results.add(_line("a", numbers={}))
    assert Results(tmp_path).failures(["peaks"]) == []


def test_an_error_that_is_not_a_number_is_a_fault() -> None:
    ones = np.ones(3, np.float32)
    for place in range(2):
        results = [ones, ones]
        results[place] = np.array([1, np.nan, 1], np.float32)
        numbers = kernels_right._errors(results, [ones, ones], ("a", "b"), 1e-4)
        assert "ab"[place] + "_error nan" in numbers[FAULT]
    numbers = kernels_right._errors([ones, ones + 1e-3], [ones, ones], ("a", "b"), 1e-4)
    assert numbers[FAULT] == "b_error 0.001: must be at most 0.0001" and numbers["a_error"] == 0
    assert FAULT not in kernels_right._errors([ones], [ones], ("a",), 1e-4)


def test_measurement_is_a_file_of_the_documentation(tmp_path: pathlib.Path) -> None:
    results = Results(tmp_path)
    results.add(_line("gemm", numbers={"tflops": 1.5}))
    results.add(_line("0.5b shared", "update", "def", numbers={"mfu": 0.25}))
    results.add(_line("7b", "update", "def", error="out of memory"))
    folder = tmp_path / "measurements"
    folder.mkdir()
    (folder / "gpu.json").write_text(json.dumps(results.measurement("python -m benchmarks")))
    files = measurements.read(folder)
    assert files["gpu"]["commit"] == "abc, def" and "1 x A GPU" in files["gpu"]["machine"]
    assert files["gpu"]["values"]["failed"] == {"update 7b": "out of memory"}
    templates = ["It is {gpu.update.0_5b_shared.mfu}."]
    assert measurements.refresh("It is .1.", templates, files) == "It is .2."


def test_seconds_are_a_median_over_batches_and_a_slow_call_is_timed_once() -> None:
    timed = seconds_of(lambda: time.sleep(0.002), batches=3, batch_seconds=0.005)
    assert 0.002 <= timed["fastest_s"] <= timed["seconds"] <= timed["slowest_s"]
    assert timed["timed_calls"] >= 3
    calls: list[int] = []
    slow = seconds_of(lambda: (calls.append(1), time.sleep(0.05)), max_seconds=0.05)
    assert len(calls) == 2 and slow["timed_calls"] == 1 and slow["seconds"] >= 0.05


def test_a_trace_has_idle_time_gaps_and_the_longest_kinds_of_kernels() -> None:
    spans = [
        (0, 100_000, "gemm_1"),
        (50_000, 120_000, "copy"),  # on another stream
        (60_000, 70_000, "copy"),  # ends before an earlier copy
        (130_000, 150_000, "gemm.2"),
        (250_000, 300_000, "add"),
    ]
    numbers = trace._summary(spans)
    assert numbers["idle_share"] == pytest.approx(110 / 300)
    assert numbers["gaps"] == 1 and numbers["gap_share"] == pytest.approx(1 / 3)
    assert numbers["median_gap_us"] == pytest.approx(100)
    assert list(numbers["kernels"]) == ["gemm", "copy", "add"]
    assert numbers["kernels"]["gemm"] == pytest.approx(120 / 300)


def test_trees_and_visible_pairs() -> None:
    row = rows.tree(23, documents=5, question=2, questions=2, group=3)
    # Answers of (23 - 9) // 6 = 2 tokens: 5 documents, then twice 2 + 3 * 2 tokens, then padding.
    assert row.tolist() == [20] * 5 + [12] * 2 + [8] * 2 + [10] * 2 + [12] * 2 + [20] * 2 + [
        *[16] * 2,
        *[18] * 2,
        *[20] * 2,
        *[-1] * 2,
    ]
    index = np.arange(23)
    pairs = (index[None, :] <= index[:, None]) & (index[:, None] <= row[None, :])
    assert rows.visible_pairs(row) == pairs.sum()
    assert rows.visible_pairs(rows.causal(7)) == 28


# ---------------------------------------------------------------------------------------- Command


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_a_case_that_fails_hangs_or_crashes_costs_no_other(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture
) -> None:
    arguments = ["accelerator", f"--out={tmp_path}", "--tiny"]
    assert main(arguments) == 1
    results = Results(tmp_path)
    assert results.finished("broken") == ["good", "exact", "last"]
    failures = dict(text.split(": ", 1) for text in results.failures(["broken"]))
    assert failures == {
        "broken raises": "ValueError: a shape that no kernel has",
        "broken unprepared": "ZeroDivisionError: division by zero",
        "broken faulty": "error 2, must be at most 1",
        "broken unwritable": "TypeError: Object of type PosixPath is not JSON serializable",
        "broken exits": "SystemExit: 3",
        "broken crashes": "its process ended with -11: about to crash",
        "broken crashes_early": "its process ended with -11: about to crash",
        "broken hangs": "ended after 0.5 s",
    }
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(failures)
    assert results.numbers()["broken"]["exact"] == {"numbers": ["nan", "inf", 0.5]}
    # A new process plays no case again. A second run plays the cases without numbers.
    assert len((tmp_path / "played").read_text()) == 3
    assert main(arguments) == 1
    assert len((tmp_path / "played").read_text()) == 4
    assert main([*arguments, "--again"]) == 1
    assert len((tmp_path / "played").read_text()) == 7
    saved = tmp_path / "saved.json"
    assert main([*arguments, "--minutes=0", f"--save={saved}"]) == 1
    assert json.loads(saved.read_text())["values"]["broken"]["good"] == {"sum": 3.0}
    with pytest.raises(
        ValueError, match="has results of cpu, --tiny; another device or size needs"
    ):
        machine = Results(tmp_path)._lines["broken", "good"]["machine"]
        results.add(_line("good", "broken", numbers={}) | {"machine": machine | {"devices": 77}})
        main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_command_ends_its_processes(tmp_path: pathlib.Path, end: int) -> None:
    flags = [f"--out={tmp_path}", "--tiny", "--sections=bits,train"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "accelerator", *flags], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while len(_processes(tmp_path)) < 2:  # the command itself and spell_jax.train
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(end)
    process.wait(30)
    while _processes(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _processes(folder: pathlib.Path) -> list[str]:
    """Return the command lines of the processes that name a folder."""
    commands = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # of a process that has just ended
            commands.append(path.read_bytes().decode(errors="replace"))
    return [command for command in commands if str(folder) in command]


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_what_the_minutes_do_not_suffice_for_is_not_run(tmp_path: pathlib.Path) -> None:
    assert main(["accelerator", f"--out={tmp_path}", "--tiny", "--minutes=0.001"]) == 1
    assert Results(tmp_path).failures(["broken"]) == [f"broken start: {NOT_RUN}"]


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_without_an_accelerator_every_section_says_so(tmp_path: pathlib.Path) -> None:
    assert main(["accelerator", f"--out={tmp_path}"]) == 1
    (failure,) = Results(tmp_path).failures(["broken"])
    assert "no accelerator: jax finds only the CPU" in failure


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--sections=fast", "sections: 'fast' must be one of peaks, kernels_right"),
        ("--sections=train", "train = '': the section train needs a folder"),
        ("--train=/no/such", "train = '/no/such': must be a folder"),
        ("--minutes=-1", r"minutes = -1.0: must be at least 0"),
        ("--minutes=nan", r"minutes = nan: must be at least 0"),
        ("--minutes=inf", r"minutes = inf: must be at least 0"),
        ("--minutes=0", "has no results.jsonl"),
    ],
)
def test_bad_options_name_the_option(flag: str, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(["accelerator", f"--out={tmp_path}", flag])


def test_sections_are_chosen_once_and_train_only_with_a_folder() -> None:
    assert Accelerator(sections="bits, peaks,bits").names() == ["bits", "peaks"]
    assert "train" not in Accelerator().names() and "train" in Accelerator(tiny=True).names()
    assert Accelerator().out != Accelerator(tiny=True).out


def test_a_full_disk_and_a_second_run_end_in_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "logs").mkdir()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another run uses it"):
            main(["accelerator", f"--out={tmp_path}"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    assert main(["accelerator", f"--out={tmp_path}", "--sections=peaks,bits"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "1 MiB free, must be 1024 or more" in lines[0]
    assert lines[1:] == ["error: peaks: not run", "error: bits: not run"]


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_a_disk_that_becomes_full_keeps_what_was_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    add = Results.add

    def full(results: Results, line: dict) -> None:
        if line["case"] != "good":
            raise OSError(errno.ENOSPC, "No space left on device")
        add(results, line)

    monkeypatch.setattr(Results, "add", full)
    assert main(["accelerator", f"--out={tmp_path}", "--tiny"]) == 1
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err
    assert Results(tmp_path).finished("broken") == ["good"]


@pytest.mark.long
def test_every_section_plays_on_a_cpu(tmp_path: pathlib.Path) -> None:
    """In less than three minutes on two idle cores, which no assertion can hold."""
    flags = [f"--out={tmp_path}", "--tiny", "--commit=abc", "--minutes=40"]
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks", "accelerator", *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": ""},  # one device, not the tests' eight
    )
    assert process.returncode == 0, process.stderr
    numbers = Results(tmp_path).numbers()
    assert list(numbers) == list(command.SECTIONS)
    for case, errors in numbers["kernels_right"].items():
        measured = [value for name, value in errors.items() if name.endswith("_error")]
        assert measured and max(measured) <= errors["bound"], case
    assert numbers["update"]["tiny_repeated"]["times_as_long_as_shared"] > 0
    assert numbers["decode"]["4_samples_int8_cache"]["decode_passes"] == 4
    assert numbers["step"]["tiny_ratios"]["trl_ratio"] > 0
    assert numbers["bits"]["resume"]["same"] is True
    assert numbers["train"]["arm"]["updates"] >= 1
