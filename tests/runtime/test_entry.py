"""Tests of failing commands: one line and exit code 2 for user errors, a traceback for crashes.

A crash exits with 1.
"""

from __future__ import annotations

import json
import os
import pathlib
import pwd
import re
import subprocess
import sys

import jax
import pytest
from absl import app, flags
from ml_collections import config_flags

from docs.tools import commands
from spell_jax.runtime import entry, setup, version
from spell_jax.runtime.config import ConfigError
from spell_jax.runtime.files import durable, paths
from spell_jax.runtime.files.checkpoint import DamagedError
from spell_jax.runtime.hosts import distributed
from spell_jax.runtime.hosts.preemption import EXIT_CODE, Preempted
from tests.paths import ROOT

CONFIG = """
from ml_collections import ConfigDict


def get_config(name=""):
    config = ConfigDict({"steps": 3, "algorithm": {"sigma": 1.0}})
    if name == "unknown":
        raise ValueError("unknown: must be one of ('known',)")
    if name == "type":
        raise TypeError("a bug of the config file")
    return config
"""


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return path


def ended(error: BaseException, capsys: pytest.CaptureFixture) -> str:
    """Return the line that a command prints when the command exits with this error."""
    with pytest.raises(SystemExit) as end, entry.user_errors():
        raise error
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1
    return err.removesuffix("\n")


def crashes(error: BaseException, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(type(error)) as crash, entry.user_errors():
        raise error
    assert crash.value is error
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "kind",
    [
        ValueError,
        FileNotFoundError,
        FileExistsError,
        NotADirectoryError,
        IsADirectoryError,
        PermissionError,
        ImportError,
        ModuleNotFoundError,
        DamagedError,
        flags.ValidationError,
        app.UsageError,
    ],
)
def test_user_errors_are_printed_on_one_line(kind, capsys):
    line = ended(kind("policy = 'x': must be\n    a folder"), capsys)
    assert line == "error: policy = 'x': must be a folder"


def test_every_mistake_of_a_config_gets_a_line(capsys):
    lines = ["steps = 0: must be at least 1", "staleness = -1: must be at least 0"]
    with pytest.raises(SystemExit), entry.user_errors():
        raise ConfigError(lines)
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in lines]


def test_an_unknown_home_folder_is_named_with_its_remedy(monkeypatch, capsys):
    """As of a container that runs with any uid."""

    def fail(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "SPELL_CACHE", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", fail)
    for find in (paths.cache_folder, setup.setup):
        with pytest.raises(ValueError, match="HOME: is not set, and user") as error:
            find()
        line = ended(error.value, capsys)
        assert line.endswith("SPELL_CACHE, to a folder that this user may write to")
    monkeypatch.setenv("SPELL_CACHE", "elsewhere")
    assert str(paths.cache_folder()) == "elsewhere"


def test_missing_package_is_named_with_its_extra(capsys):
    error = ModuleNotFoundError("No module named 'apache_beam'", name="apache_beam")
    line = "error: No module named 'apache_beam'; pip install 'spell_jax[data]'"
    assert ended(error, capsys) == line


def test_error_for_a_missing_file_names_the_file_and_its_flag(tmp_path, monkeypatch, capsys):
    missing = tmp_path / "missing"
    for argv in (["command"], ["command", "--x=1", f"--prompts={missing}"]):
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit), entry.user_errors():
            missing.read_text()
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and str(missing) in line
    assert line == f"error: --prompts = '{missing}': no such file or directory"


@pytest.mark.parametrize(
    "error",
    [
        TypeError("steps"),
        KeyError("steps"),
        AttributeError("steps"),
        RuntimeError("XLA"),
        OSError(28, "No space left on device"),
        TimeoutError("host 1"),
        AssertionError("x"),
        ValueError(),
        json.JSONDecodeError("Expecting value", "", 0),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
    ids=repr,
)
def test_other_errors_propagate_unchanged(error, capsys):
    crashes(error, capsys)


def test_all_errors_propagate_after_setup_done(capsys):
    def step(x):
        raise ValueError("x = 3: must be 4")

    with pytest.raises(ValueError, match="must be 4"), entry.user_errors():
        entry.setup_done()
        jax.jit(step)(1.0)
    assert capsys.readouterr() == ("", "")
    # The next command in the same process starts with its own setup.
    assert ended(ValueError("steps = 0"), capsys) == "error: steps = 0"


@pytest.mark.parametrize(
    "kind, code",
    [(durable.DiskError, 1), (durable.SaveError, 1), (entry.EndedError, 1), (durable.GoneError, 2)],
)
def test_lost_disk_ends_a_command_with_one_line_at_any_time(kind, code, capsys):
    with pytest.raises(SystemExit) as end, entry.user_errors():
        entry.setup_done()
        raise kind("step 3 could not be saved:\n  no space")
    assert end.value.code == code
    assert capsys.readouterr().err == "error: step 3 could not be saved: no space\n"


def test_preempted_run_keeps_its_exit_code(capsys):
    with pytest.raises(Preempted) as end, entry.user_errors():
        raise Preempted("SIGTERM")
    assert end.value.code == EXIT_CODE == 75 and capsys.readouterr() == ("", "")


def test_interrupted_command_says_how_to_go_on(capsys):
    with pytest.raises(SystemExit) as end, entry.user_errors():
        raise KeyboardInterrupt
    err = capsys.readouterr().err
    assert (
        end.value.code == 130
        and err == "interrupted; a training run goes on with the same command\n"
    )


@pytest.mark.parametrize("name, status", [("SIGINT", 130), ("SIGTERM", 75)])
def test_a_signal_skips_the_destructors_of_libraries_but_no_exit_function(name, status):
    """A destructor of XLA may end the process with a segmentation fault."""
    code = (
        "import atexit, signal\n"
        "from spell_jax.runtime import entry\n"
        "atexit.register(print, 'exit function')\n"
        "class Destructor:\n"
        "    def __del__(self): print('destructor')\n"
        "held = Destructor()\n"
        "with entry.user_errors():\n"
        f"    signal.raise_signal(signal.{name})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (status, "exit function\n"), ended.stderr


def test_debug_flag_shows_the_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "command", "--x=1", "--debug"])
    monkeypatch.setattr(sys, "argv", ["command", "--x=1", "--debug"])
    with pytest.raises(SystemExit), entry.user_errors():
        assert sys.argv == ["command", "--x=1"]  # for argparse, which does not know the flag
        raise ValueError("steps = 0")
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("\nerror: steps = 0\n")


@pytest.mark.parametrize(
    "arguments", [["--workdir="], ["--out", " "], ["--out=a", "--workdir", ""]]
)
def test_empty_folder_is_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as end, entry.user_errors():
        raise AssertionError("the command began")
    flag = arguments[-1] if "=" in arguments[-1] else arguments[-2]
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {flag.rstrip('=')} = ")


@pytest.mark.parametrize("url", ["s3://x/y", "hf://a/b", "https://x/y", "gs://x/y", "a,gs://x/y"])
def test_workdir_at_another_url_than_gs_is_refused(url, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", f"--workdir={url}"])
    if "gs://" in url:
        with entry.user_errors():
            return
    with pytest.raises(SystemExit) as end, entry.user_errors():
        raise AssertionError("the command began")
    line = f"error: --workdir = '{url}': must be a local folder, or gs://BUCKET/PATH\n"
    assert (end.value.code, capsys.readouterr().err) == (2, line)


@pytest.mark.parametrize("flag", ["--config=", "--config=:spell", "-config="])
def test_empty_config_is_named(flag):
    with pytest.raises(
        ValueError, match=r"^--config = '.*': no such file; must be .* one of .*tiny"
    ):
        entry.load_config(["x", flag])


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_backend_that_is_not_there_is_named(platform):
    code = (
        "import jax\nfrom spell_jax.runtime import entry\n"
        "with entry.user_errors():\n    jax.devices()"
    )
    environment = os.environ | {"JAX_PLATFORMS": platform}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    if platform == "cuda" and process.returncode == 0:
        pytest.skip("this machine has a GPU")
    line = process.stderr.splitlines()[-1]
    # jax itself logs a traceback of a plugin that is installed without its libraries.
    assert process.returncode == 2 and "entry.py" not in process.stderr
    assert line.startswith(f"error: JAX_PLATFORMS = '{platform}': jax finds no such device (")


def test_errors_elsewhere_are_no_missing_backend(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    crashes(RuntimeError("out of memory"), capsys)
    crashes(AssertionError(), capsys)


def test_failed_process_of_several_exits_without_waiting(monkeypatch, capsys):
    left, failures = [], []
    monkeypatch.setattr(distributed.os, "_exit", left.append)
    monkeypatch.setattr(distributed.peers, "fail", lambda error: failures.append(str(error)))
    ended(ValueError("steps = 0"), capsys)
    assert not left
    monkeypatch.setattr(distributed.peers, "is_running", lambda: True)
    ended(ValueError("steps = 0"), capsys)
    assert (left, failures) == ([2], ["steps = 0"])


# ------------------------------------------------------------------------------------------- Flags


def parse(*arguments: object):
    """Return (remaining arguments, parsed flags) of a command line."""
    argv = ["program", *map(str, arguments)]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", values, sys_argv=argv)
    flags.DEFINE_integer("count", 1, "", flag_values=values)
    flags.mark_flag_as_required("config", values)
    return entry.parse_flags(argv, values, values), values


def test_valid_flags_are_parsed(config):
    arguments, values = parse(f"--config={config}", "--config.steps=4", "--count=2", "x")
    assert arguments == ["program", "x"]
    assert (values.config.steps, values.count) == (4, 2)


@pytest.mark.parametrize("name", ["tiny", "configs/tiny.py", "spell_jax/configs/tiny.py"])
def test_shipped_configs_have_names(name, tmp_path, monkeypatch):
    """Also outside a checkout."""
    monkeypatch.chdir(tmp_path)
    _, values = parse(f"--config={name}", "--config.steps=4")
    assert values.config.steps == 4 and values.config.data.source == "tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config={config}", "--config.algorithm.sigmx=2"],
            '--config.algorithm.sigmx: no such field. Did you mean "sigma" instead of "sigmx"\\?$',
        ),
        (["--config={config}", "--config.zzz=2"], "--config.zzz: no such field$"),
        (
            ["--config=tiny", "--config.algorithm.sigma=2"],
            r"^--config\.algorithm\.sigma: now algorithm\.questioner\.sigma$",
        ),
        (
            ["--config=tiny:longpo", "--config.algorithm.train_verifier=False"],
            r"^--config\.algorithm\.train_verifier: no such field of this algorithm$",
        ),
        (
            ["--config=tiny:rlvr", "--config.algorithm.questioner.train=False"],
            r"^--config\.algorithm\.questioner\.train: no such field of this algorithm$",
        ),
        (["--config=qwenlong:x"], r"^--config=.*qwenlong\.py:x: must have no argument after"),
        (
            ["--config={config}", "--config.steps.x=2"],
            r"^--config\.steps\.x: no such field. Did you mean --config\.steps\?$",
        ),
        (
            ["--config={config}", "--config.algorithm.lr=2"],
            r"^--config\.algorithm\.lr: no such field. Must be one of .*sigma",
        ),
        (
            ["--config={config}", "--config.algorithm.group-size=4"],
            r"^--config\.algorithm\.group-size: no such field. Did you mean "
            r"--config\.algorithm\.group_size\?$",
        ),
        (
            ["--config={config}", "--conifg.steps=4"],
            r"^--conifg\.steps: no such flag; a field is written --config\.FIELD=VALUE$",
        ),
        (["--config=~/none.py"], r"^--config = '/.*/none\.py': no such file"),
        (
            ["--config={config}", "--config.steps=many"],
            "^--config.steps = 'many': must be a whole number$",
        ),
        (
            ["--config={config}", "--config.algorithm.sigma=1e-5x"],
            "^--config.algorithm.sigma = '1e-5x': must be a number$",
        ),
        (["--config={config}:unknown"], "--config=.*config.py:unknown: must be one of"),
        (["--config={config}.missing"], "--config = '.*config.py.missing': no such file"),
        (
            ["--config={config}.missing", "--config.steps=2"],
            "no such file; must be a file or one of .*tiny",
        ),
        (["--config=tinny"], "no such file; did you mean tiny\\?"),
        (["--config", "tinny"], "no such file; did you mean tiny\\?"),
        (["--config={config}", "--config.sigma=2"], "mean --config.algorithm.sigma\\?$"),
        (["--config=tiny", "--config.group_size=2"], "mean --config.algorithm.group_size or "),
        (["--config=/"], r"^--config = '/': is a folder; must be a file$"),
        (["--config={config}", "--cuont=2"], "Unknown command line flag 'cuont'. Did you mean"),
        (["--config={config}", "--count=many"], "--count = 'many': must be a whole"),
        (
            ["--config={config}", "--steps=7"],
            r"^--steps: no such flag. Did you mean --config.steps\?$",
        ),
        (["--config={config}", "--sigma=7"], r"Did you mean --config.algorithm.sigma\?$"),
        (["--count=2"], "^--config: must be given$"),
    ],
)
def test_invalid_flags_are_user_errors(arguments, message, config, capsys):
    with pytest.raises(entry.USER_ERRORS, match=message) as error:
        parse(*(argument.format(config=config) for argument in arguments))
    ended(error.value, capsys)


def test_missing_workdir_has_an_example():
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=values, required=True)
    with pytest.raises(app.UsageError, match=r"^--workdir: must be given, .* --workdir=runs/NAME$"):
        entry.parse_flags(["program"], values, values)


@pytest.mark.parametrize("last", [["--config=tiny"], ["--config", "tiny"]])
def test_config_may_follow_its_fields(last, monkeypatch):
    parsers = {}
    monkeypatch.setattr(app, "run", lambda main, flags_parser: parsers.update(f=flags_parser))
    monkeypatch.setattr(entry.flags, "FLAGS", values := flags.FlagValues())
    config_flags.DEFINE_config_file("config", None, "", values)
    monkeypatch.setattr(sys, "argv", argv := ["program", "--config.steps=4", *last])
    assert entry.load_config(argv).steps == 4
    entry.run_main(print, values)
    assert parsers["f"](argv) == ["program"] and values.config.steps == 4


@pytest.mark.parametrize(
    ("flag", "largest"), [("--seed=4294967296", 4294967295), ("--samples=-2147483648", 2147483647)]
)
def test_flags_that_jax_cannot_hold_are_refused(flag, largest, monkeypatch, capsys):
    parsers = {}
    monkeypatch.setattr(app, "run", lambda main, flags_parser: parsers.update(f=flags_parser))
    monkeypatch.setattr(entry.flags, "FLAGS", values := flags.FlagValues())
    for name in ("seed", "samples"):
        flags.DEFINE_integer(name, 0, "", flag_values=values)
    entry.run_main(print, values)
    with pytest.raises(SystemExit) as ended:
        parsers["f"](["program", flag])
    assert ended.value.code == 2
    name, _, value = flag.partition("=")
    line = f"error: {name} = {value}: must be a whole number from "
    assert (error := capsys.readouterr().err).startswith(line) and error.endswith(
        f" to {largest}\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n\ndef get_config(:\n", r"line 3: invalid syntax: def get_config\(:$"),
        ("x = 1\n", r"^--config = '.*config\.py': has no function get_config; must have one$"),
    ],
)
def test_config_file_without_a_config_is_refused(text, message, config, monkeypatch, capsys):
    # ml_collections loads every config file into one module, which keeps earlier functions.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    config.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        parse(f"--config={config}")
    ended(error.value, capsys)


def test_errors_in_a_config_file_propagate_with_details(config, capsys):
    with pytest.raises(flags.Error, match="in get_config"), entry.user_errors():
        parse(f"--config={config}:type")
    assert capsys.readouterr() == ("", "")


def test_run_main_handles_user_errors_of_flags_and_main(monkeypatch, capsys):
    run_arguments = {}
    monkeypatch.setattr(
        app, "run", lambda main, flags_parser: run_arguments.update(m=main, f=flags_parser)
    )

    def fail(value):
        raise app.UsageError(f"--{value[0]}: must be set")

    entry.run_main(lambda arguments: len(arguments), lambda argv: argv[1:])
    monkeypatch.setattr(entry.flags, "FLAGS", flags.FlagValues())
    assert run_arguments["m"](["a", "b"]) == 2
    monkeypatch.setattr(entry, "parse_flags", lambda argv, parser: argv)
    entry.run_main(fail, entry.flags.FLAGS)
    with pytest.raises(SystemExit):
        run_arguments["f"](["program", "word"])
    assert capsys.readouterr().err == "error: word: not a flag; must be --NAME=VALUE\n"
    monkeypatch.undo()
    monkeypatch.setattr(
        app, "run", lambda main, flags_parser: run_arguments.update(m=main, f=flags_parser)
    )
    monkeypatch.setattr(entry.flags, "FLAGS", flags.FlagValues())
    entry.run_main(fail, lambda argv: sys.exit(1))  # as absl does for --help
    with pytest.raises(SystemExit) as end:
        run_arguments["f"](["program", "--help"])
    assert end.value.code == 0
    monkeypatch.setattr(entry.flags, "FLAGS", flags.FlagValues())
    entry.run_main(fail, fail)
    for name in "mf":
        with pytest.raises(SystemExit) as end:
            run_arguments[name](["x"])
        assert end.value.code == 2 and capsys.readouterr().err == "error: --x: must be set\n"


# ---------------------------------------------------------------------------------------- Programs


def imported(names: list[str]) -> set[str]:
    """Import these modules in a process; return all packages that the process has imported."""
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in process.stdout.split()}


HEAVY = {"tensorboardX", "torch", "transformers"}


def test_entry_points_answer_before_heavy_imports():
    """--help and a wrong flag must not wait for jax or matplotlib."""
    names = [name for name in commands.find() if re.fullmatch(r"spell_jax\.\w+", name)]
    assert len(names) == 7
    assert not imported(names) & (HEAVY | {"jax", "flax", "matplotlib", "orbax"})


@pytest.mark.slow
def test_other_commands_import_no_more_than_they_use():
    names = set(commands.find()) - {"data_pipeline.build"}
    assert not imported(sorted(names)) & HEAVY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            ["spell_jax.train", "--config=tiny", "--config.algorithm.questioner.sigma=-1"],
            "error: algorithm.questioner.sigma = -1.0: must be at least 1e-06",
        ),
        (
            ["spell_jax.train", "--config=tiny", "--config.algorithm.questioner.sigmx=1"],
            "error: --config.algorithm.questioner.sigmx: no such field. Did you mean "
            '"sigma" instead of "sigmx"?',
        ),
        (
            ["launch.plan", "--config=configs/tiny.py", "--topology=v5e-16", "--policy=missing"],
            "error: policy = 'missing': must be a Hugging Face config.json",
        ),
    ],
)
def test_commands_print_user_errors_on_one_line(command, line, tmp_path):
    if command[0] == "spell_jax.train":
        command = [*command, f"--workdir={tmp_path / 'run'}"]
    process = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (2, "", line + "\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_crash_after_setup_prints_its_traceback(tmp_path, config):
    program = tmp_path / "program.py"
    program.write_text(
        "from spell_jax.runtime import entry\n"
        "def main(_):\n"
        "    entry.setup_done()\n"
        "    raise ValueError('deep in a step')\n"
        "entry.run_main(main)\n"
    )
    process = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert process.returncode == 1 and "Traceback" in process.stderr
    assert (
        process.stderr.endswith("ValueError: deep in a step\n") and "error: " not in process.stderr
    )


@pytest.mark.slow
def test_every_command_prints_the_version():
    """Before its required flags are missed, and before anything heavy is imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for module in ("spell_jax.train", "spell_jax.report"):  # with absl, and with argparse
        command = [sys.executable, "-m", module, "--version"]
        shown = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (shown.returncode, shown.stdout) == (0, f"spell_jax {version.VERSION}\n"), shown


def test_version_ends_a_command_before_its_work(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", "--x=1", "--version"])
    with pytest.raises(SystemExit) as end, entry.user_errors():
        raise AssertionError
    assert not end.value.code and capsys.readouterr().out == f"spell_jax {version.VERSION}\n"
