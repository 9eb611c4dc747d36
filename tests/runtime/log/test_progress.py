import io
import logging
import re
import sys
import time

import pytest
from absl import logging as absl_logging

from spell_jax.runtime.log.progress import Progress, format_seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_are_printed_at_start_at_intervals_and_at_end():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(total=40, stream=stream, plain_every=30, clock=clock)
    for step in range(41):
        clock.now = 100.0 + 2 * step
        progress.update(step, "rollout", {"solved": step / 40})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "rollout  step  0/40  solved 0  0:00 gone",
        "rollout  step 15/40  solved 0.375  0:30 gone  0:50 left",
        "rollout  step 30/40  solved 0.75  1:00 gone  0:20 left",
        "rollout  step 40/40  solved 1  1:20 gone  0:00 left",
    ]


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def lines_seen(stream: io.StringIO) -> list[str]:
    """Return the lines that a terminal shows at the end, without cleared lines."""
    lines = [line.rsplit("\x1b[2K", 1)[-1] for line in stream.getvalue().split("\n")]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line).rstrip() for line in lines]


def test_terminal_line_is_rewritten_in_place(terminal):
    progress = Progress(total=9, stream=terminal, clock=Clock())
    progress.update(1, "update", {"solved": 0.25})
    progress.update(3, "rollout", {"solved": 0.43211, "tokens/s": 1834.3})
    progress.close()
    progress.close()
    text = terminal.getvalue()
    assert "step 1/9" in text and "solved 0.25" in text
    line, after = lines_seen(terminal)
    assert re.fullmatch(
        r"\S  rollout  step 3/9  [━╸╺]+  solved 0.432  tokens/s 1,834  0:00 gone  0:00 left", line
    )
    assert after == "" and text.count("\x1b[?25h") == text.count("\x1b[?25l") == 1  # the cursor


@pytest.mark.parametrize("columns", [10, 30, 60])
def test_terminal_line_never_wraps(columns, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(total=9, stream=terminal, clock=Clock())
    progress.update(1, "learn", {"state": "x" * 50})
    progress.close()
    (line, _) = lines_seen(terminal)
    assert 5 < len(line) <= columns


def test_elapsed_time_advances_between_updates(terminal):
    clock = Clock()
    progress = Progress(total=9, stream=terminal, clock=clock)
    progress.update(1, "rollout")
    clock.now += 65
    deadline = time.monotonic() + 20
    while "1:05 gone" not in terminal.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    progress.close()


def test_bar_shows_the_larger_share_of_steps_and_time_limit(terminal):
    clock = Clock()
    progress = Progress(total=10, stream=terminal, clock=clock)
    assert progress._share(clock.now) == 0
    progress.update(2, "rollout")
    assert progress._share(clock.now) == 0.2
    clock.now += 5
    progress.limit(60)
    clock.now += 30
    assert progress._share(clock.now) == 0.5
    progress.update(8, "rollout")
    assert progress._share(clock.now) == 0.8
    clock.now += 60
    assert progress._share(clock.now) == 1.0
    progress.close()


def test_log_records_appear_above_the_progress_line(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    logger, handler = logging.getLogger(), logging.StreamHandler(terminal)
    python_handler = absl_logging.get_absl_handler().python_handler
    before = python_handler.stream
    python_handler.setStream(terminal)
    logger.addHandler(handler)
    try:
        progress = Progress(total=9, stream=terminal, clock=Clock())
        progress.update(1, "rollout")
        logger.warning("the first")
        python_handler.handle(
            logging.makeLogRecord({"msg": "the second", "levelno": logging.WARNING})
        )
        progress.update(2, "rollout")
        print("the third", file=sys.stderr)
        progress.close()
        assert handler.stream is python_handler.stream is sys.stderr is terminal
        logger.warning("the last")
    finally:
        logger.removeHandler(handler)
        python_handler.setStream(before)
    first, *_, second, third, line, last, _ = lines_seen(terminal)  # absl greets
    assert (first, third, last) == ("the first", "the third", "the last")
    assert second.endswith("the second") and "step 2/9" in line


def test_other_streams_are_not_redirected(terminal, monkeypatch):
    """Standard output and a log handler write to files."""
    file, log = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    try:
        progress = Progress(total=9, clock=Clock())
        progress.update(1, "rollout")
        print("a result")
        logging.getLogger().warning("a warning")
        assert handler.stream is log
        progress.close()
    finally:
        logging.getLogger().removeHandler(handler)
    assert file.getvalue() == "a result\n" and log.getvalue() == "a warning\n"
    monkeypatch.setattr(sys, "stderr", file)
    progress = Progress(total=9, stream=terminal, clock=Clock())
    progress.update(1, "rollout")
    print("an error", file=sys.stderr)
    progress.close()
    assert file.getvalue() == "a result\nan error\n"


def test_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress(total=9, stream=terminal, clock=Clock())
    progress.update(1, "rollout")
    progress.close()
    assert terminal.getvalue() == "rollout  step 1/9  0:00 gone  0:00 left\n"


def test_time_left_uses_a_moving_average_and_counts_down():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(total=14, start=4, stream=stream, plain_every=0, clock=clock)
    clock.now += 40
    progress.update(5, "rollout")  # 40 s per step, compilation included
    clock.now += 10
    progress.update(6, "rollout")  # the second step replaces this estimate: 10 s per step, 8 to go
    clock.now += 20
    progress.update(7, "rollout")  # 10 + (20 - 10) / 5 = 12 s per step, 7 to go
    clock.now += 6
    progress.update(7, "learn")
    assert times_left(stream) == ["6:00 left", "1:20 left", "1:24 left", "1:18 left"]


def test_time_left_is_capped_by_the_time_limit(caplog):
    caplog.set_level("INFO")
    stream, clock = io.StringIO(), Clock()
    progress = Progress(total=100, stream=stream, plain_every=0, clock=clock)
    assert not progress.is_over()
    progress.limit(60)
    clock.now += 10
    progress.update(1, "rollout")  # 990 s of steps, of which 50 are allowed
    assert not progress.is_over()
    clock.now += 55
    progress.update(2, "rollout")
    assert not caplog.messages
    assert progress.is_over() and progress.is_over()
    assert caplog.messages == ["max_minutes = 1: time is up, no further rollout starts"]
    assert times_left(stream) == ["0:50 left", "0:00 left"]


def times_left(stream: io.StringIO) -> list[str]:
    return [line.split("  ")[-1] for line in stream.getvalue().splitlines()]


def test_resumed_run_has_no_estimate_before_its_first_step():
    stream = io.StringIO()
    Progress(total=14, start=4, stream=stream, clock=Clock()).update(4, "compile")
    assert stream.getvalue() == "compile  step  4/14  0:00 gone\n"


def test_disabled_progress_prints_nothing(terminal):
    for stream in (terminal, io.StringIO()):
        progress = Progress(total=2, stream=stream, enabled=False)
        progress.update(1, "rollout")
        progress.close()
        assert stream.getvalue() == ""


@pytest.mark.parametrize(
    "total, start, field", [(0, 0, "total"), (3, 4, "start"), (3, -1, "start")]
)
def test_invalid_total_or_start_is_rejected(total, start, field):
    with pytest.raises(ValueError, match=f"{field} ="):
        Progress(total, start)


def test_seconds_are_formatted_as_on_a_clock():
    assert [format_seconds(s) for s in (0, 65.4, 3599.6, 7200)] == [
        "0:00",
        "1:05",
        "1:00:00",
        "2:00:00",
    ]
