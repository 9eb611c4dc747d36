"""Tests of control characters: shown on a terminal, never obeyed."""

import io
import logging
import subprocess
import sys
import unicodedata

import pytest

from spell_jax.runtime import entry, terminal
from spell_jax.runtime.log.progress import Progress

HOSTILE = {
    "color": "\x1b[31mred",
    "title": "\x1b]0;title\x07",
    "clipboard": "\x1b]52;c;aGk=\x07",
    "CSI of one character": "\x9b2J",
    "OSC of one character": "\x9d0;a\x9c",
    "line overwritten": "wrong\rright",
    "backspaces": "no\b\byes",
    "bidi override": "\u202egpj.exe",
    "bidi isolate": "\u2066a\u2069",
    "NUL": "a\x00b",
    "separator of lines": "a\u2028b",
    "half of a pair": "a\udc80",
}


def raw_controls(text: str) -> list[str]:
    return [
        c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"
    ]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_control_characters_are_written_as_escapes(text: str) -> None:
    shown = terminal.printable(text)
    assert not raw_controls(shown) and not set(shown) & set("\u202e\u2066\u2069")
    assert shown.encode().decode("unicode-escape") == text


def test_other_texts_stay() -> None:
    text = "línea\tuna\nzwei\r\n日本語 עברית 👩‍👩‍👧 �"
    assert terminal.printable(text) == text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_all_output_of_a_command_is_escaped(text: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["command"])
    with pytest.raises(SystemExit) as ended, entry.user_errors():
        handler = logging.StreamHandler()
        log = logging.Logger("log")
        log.addHandler(handler)
        print("printed", text)
        log.warning("logged %s", text)
        try:
            raise OSError(text)
        except OSError:
            log.exception("failed")
        raise ValueError(text)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert "printed" in out and "logged" in err and "error: " in err
    for written in (out, err):
        assert not raw_controls(written) and not set(written) & set("\u202e\u2066\u2069")


@pytest.mark.slow
def test_traceback_of_a_crash_is_escaped() -> None:
    program = (
        "from spell_jax.runtime import entry\n"
        "def main(_):\n"
        "    entry.setup_done()\n"
        "    raise ValueError('\\x1b[2Jgone')\n"
        "entry.run_main(main)\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert process.returncode == 1
    assert b"ValueError: \\x1b[2Jgone" in process.stderr and b"\x1b" not in process.stderr


def test_existing_log_handler_is_guarded(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        terminal.guard()
        terminal.guard()  # once is enough
        logging.getLogger().warning("a \x1b[2J")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == "a \\x1b[2J\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_output_above_the_progress_line_is_escaped(monkeypatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    terminal.guard()
    progress = Progress(total=2)
    progress.update(1, "update")
    print("a \x1b]0;title\x07", file=sys.stderr)
    progress.close()
    written = stream.getvalue()
    assert "a \\x1b]0;title\\x07" in written
    assert "\x1b]0;" not in written and "\x1b[" in written  # its own sequences are
