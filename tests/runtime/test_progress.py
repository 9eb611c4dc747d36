import io
import os

import pytest

from spell_jax.runtime.progress import Progress, format_seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_come_at_first_then_when_due_then_at_the_end():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(total=40, stream=stream, plain_every=30, clock=clock)
    for step in range(41):
        clock.now = 100.0 + 2 * step
        progress.update(step, "play", {"solved": step / 40})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "play     step  0/40  solved 0  0:00 gone",
        "play     step 15/40  solved 0.375  0:30 gone  0:50 left",
        "play     step 30/40  solved 0.75  1:00 gone  0:20 left",
        "play     step 40/40  solved 1  1:20 gone  0:00 left",
    ]


def test_a_terminal_line_is_rewritten_in_place_and_never_wraps(monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((30, 24)))
    stream = Terminal()
    progress = Progress(total=9, stream=stream, clock=Clock())
    progress.update(1, "learn", {"state": "x" * 50})
    progress.update(2, "play")
    progress.close()
    progress.close()
    first, second = stream.getvalue().split("\r")[1:]
    assert first == ("learn    step 1/9  state " + "x" * 50)[:29] + "\x1b[K"
    assert second.endswith("\x1b[K\n") and "\n" not in first


def test_time_left_follows_a_moving_average_and_counts_down_within_a_step():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(total=14, start=4, stream=stream, plain_every=0, clock=clock)
    clock.now += 40
    progress.update(5, "play")  # 40 s a step, compilation included
    clock.now += 10
    progress.update(6, "play")  # which the second step takes back: 10 s a step, 8 to go
    clock.now += 20
    progress.update(7, "play")  # 10 + (20 - 10) / 5 = 12 s a step, 7 to go
    clock.now += 6
    progress.update(7, "learn")
    assert times_left(stream) == ["6:00 left", "1:20 left", "1:24 left", "1:18 left"]


def test_time_left_ends_at_the_deadline():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(total=100, stream=stream, plain_every=0, clock=clock)
    assert not progress.is_over()
    progress.limit(60)
    clock.now += 10
    progress.update(1, "play")  # 990 s of steps, of which 50 are allowed
    assert not progress.is_over()
    clock.now += 55
    progress.update(2, "play")
    assert progress.is_over()
    assert times_left(stream) == ["0:50 left", "0:00 left"]


def times_left(stream: io.StringIO) -> list[str]:
    return [line.split("  ")[-1] for line in stream.getvalue().splitlines()]


def test_a_resumed_run_has_no_estimate_before_its_first_step():
    stream = io.StringIO()
    Progress(total=14, start=4, stream=stream, clock=Clock()).update(4, "compile")
    assert stream.getvalue() == "compile  step  4/14  0:00 gone\n"


def test_disabled_prints_nothing():
    stream = Terminal()
    progress = Progress(total=2, stream=stream, enabled=False)
    progress.update(1, "play")
    progress.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    "total, start, field", [(0, 0, "total"), (3, 4, "start"), (3, -1, "start")]
)
def test_bad_ranges_are_named(total, start, field):
    with pytest.raises(ValueError, match=f"{field} is"):
        Progress(total, start)


def test_seconds_are_written_as_clocks_do():
    assert [format_seconds(s) for s in (0, 65.4, 3599.6, 7200)] == [
        "0:00",
        "1:05",
        "1:00:00",
        "2:00:00",
    ]
