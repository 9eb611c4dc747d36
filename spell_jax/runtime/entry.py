"""The frame of every command: parse flags, run `main`, and end a user's mistake with one line.

A mistake of the user ends with `error: MESSAGE` on stderr and exit status 2 (of a config, each
mistake with such a line); every other exception is a crash, with its traceback and exit status 1.
Mistakes are the errors of type USER_ERRORS before a command calls `setup_done`, after its last
check, unless the message has no place (JSON and Unicode errors, empty ones). Ctrl-C ends with one
line too, and so do SIGTERM, with exit status 75 (runtime/hosts/sigterm.py), a disk that stays full
or an EndedError (status 1) and a workdir that was removed (status EXIT_CODE). Every command takes
--debug, which prints the traceback of a mistake before its line, and --version.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from spell_jax.runtime import terminal, urls
from spell_jax.runtime.config import (
    MOVED_FIELDS,
    Config,
    ConfigError,
    check_width,
    describe_move,
    flat,
)
from spell_jax.runtime.files import durable, paths
from spell_jax.runtime.hosts import sigterm
from spell_jax.runtime.urls import FetchError
from spell_jax.runtime.version import VERSION

EXIT_CODE = 2
INTERRUPTED = 130  # of Ctrl-C, as shells have it
DEBUG, VERSION_FLAG, HELP_CONFIG = "--debug", "--version", "--help_config"
USER_ERRORS = (
    ValueError,
    FetchError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ImportError,
    flags.Error,
    app.UsageError,
)
# Package that an extra of spell_jax installs -> the extra.
_EXTRAS = {
    **dict.fromkeys(("apache_beam", "datasketch", "py3langid", "pyarrow", "sklearn"), "data"),
    **dict.fromkeys(("array_record", "tensorflow_datasets"), "tfds"),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client"), "serve"),
}
# Subclasses of ValueError with messages that say what is wrong but not where.
_PLACELESS = (json.JSONDecodeError, UnicodeError)
_IN_CONFIG_FILE = " Error whilst parsing config file:"  # ml_collections, before a traceback as text
_WRONG_TYPE = "Could not override field"  # ml_collections, of a value that a field does not take
_FOLDER_FLAGS = ("workdir", "out")
_UNSET = "must have a value other than None"  # absl, of a required flag
# What Python says of a text that is no number -> what the flag must be.
_NO_NUMBER = {
    "could not convert string to float": "must be a number",
    "invalid literal for int() with base 10": "must be a whole number",
}

_is_set_up = False  # whether the work of the current command has started
_signal_status: int | None = None  # exit status of a command that Ctrl-C or SIGTERM has ended


class EndedError(Exception):
    """The end of a run that could not go on; the message, one line, says why and what is saved."""


def run_main(
    main: Callable[[Any], object],
    flags_parser: Callable[[Sequence[str]], Any] = flags.FLAGS,
    describe_config: Callable[[Config | None, str], str] | None = None,
) -> None:
    """Run a command with absl flags, as app.run; does not return.

    `describe_config` returns the text of --help_config from the config (None without --config) and
    the name of a section.
    """
    texts = {DEBUG: "Show a mistake's traceback.", VERSION_FLAG: "Print the version."}
    for name, text in texts.items():
        if name[2:] not in flags.FLAGS:
            flags.DEFINE_bool(name[2:], False, text, flag_values=flags.FLAGS)

    def parse(argv: Sequence[str]) -> Any:
        with user_errors():
            # In place, because ml_collections reads sys.argv itself.
            sys.argv[:] = _config_first(sys.argv)
            if describe_config:
                print_config_help(argv, describe_config)
            try:
                positional = parse_flags(argv, flags_parser)
            except sigterm.Terminated:
                raise
            except SystemExit:
                sys.exit(0)  # --help, which absl ends with 1
            if flags_parser is flags.FLAGS and len(positional) > 1:
                raise app.UsageError(f"{positional[1]}: not a flag; must be --NAME=VALUE")
            _check_numbers()
            return positional

    def run(arguments: Any) -> object:
        with user_errors():
            return main(arguments)

    with sigterm.ending():
        app.run(run, flags_parser=parse)


def print_config_help(
    argv: Sequence[str], describe_config: Callable[[Config | None, str], str]
) -> None:
    """Print the text of --help_config and exit, if argv has the flag; other flags may be missing.

    The section follows as --help_config=SECTION or --help_config SECTION; without it, all are told.
    """
    for place, argument in enumerate(argv):
        flag, _, name = argument.partition("=")
        if flag in (HELP_CONFIG, HELP_CONFIG[1:]):  # absl takes one dash as well
            following = [text for text in argv[place + 1 : place + 2] if not text.startswith("-")]
            has_config = any(re.match(r"--?(no)?config\b", text) for text in argv)
            config = load_config(argv) if has_config else None
            print(describe_config(config, name or "".join(following)))
            sys.exit(0)


def _check_numbers() -> None:
    for name, flag in flags.FLAGS.flag_values_dict().items():
        if type(flag) is int:
            check_width(flag, f"--{name}")


def setup_done() -> None:
    """Mark the end of a command's checks: errors from here on are crashes."""
    global _is_set_up
    _is_set_up = True


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """End the process with one line and EXIT_CODE for an error of USER_ERRORS before `setup_done`.

    Commands with argparse use it directly, around their `main`. A process that ends here ends
    all other processes too (`distributed.leave`).
    """
    global _is_set_up
    _is_set_up = False
    if VERSION_FLAG in sys.argv[1:]:  # before a parser misses its required flags
        print(f"spell_jax {VERSION}")
        sys.exit(0)
    sys.argv[:] = [argument for argument in sys.argv if argument != DEBUG]  # unknown to argparse
    terminal.guard()
    try:
        with sigterm.ending():
            check_secrets(sys.argv[1:])
            _check_folders(sys.argv[1:])
            yield
    except USER_ERRORS as error:
        text = " ".join(line.strip() for line in str(error).splitlines()).strip()
        text = _name_file(error) or text
        if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
            text = f"{text}; pip install 'spell_jax[{_EXTRAS[error.name]}]'"
        if _is_set_up or not text or isinstance(error, _PLACELESS):
            raise
        if DEBUG in sys.orig_argv:
            traceback.print_exc()
        sys.stdout.flush()
        messages = error.mistakes if isinstance(error, ConfigError) else [text]
        _leave("\n".join(f"error: {message}" for message in messages), EXIT_CODE, error)
    except (durable.DiskError, durable.SaveError, EndedError) as error:
        if DEBUG in sys.orig_argv:
            traceback.print_exc()
        text = " ".join(str(error).split())
        _leave(f"error: {text}", EXIT_CODE if isinstance(error, durable.GoneError) else 1, error)
    except (AssertionError, RuntimeError) as error:
        if not (line := _missing_backend(error)):
            raise
        _leave(f"error: {line}", EXIT_CODE, error)
    except KeyboardInterrupt as error:
        _leave("interrupted; a training run goes on with the same command", INTERRUPTED, error)
    except sigterm.Terminated as error:
        _announce("ended by SIGTERM; start the same command again", sigterm.EXIT_CODE, error)
        raise


def check_secrets(arguments: Sequence[str]) -> None:
    """Raise ValueError for a flag with a password or a key in its URL."""
    # A URL may follow its flag as an argument of its own: `flag` remembers the argument before.
    flag = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument.startswith("-") and equals:
            urls.check_secret(name, value)
        else:
            urls.check_secret(flag or "an argument", argument)
        flag = argument if argument.startswith("-") else ""


def _check_folders(arguments: Sequence[str]) -> None:
    """Raise ValueError for a flag of _FOLDER_FLAGS with an empty value."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, equals, value = argument.partition("=")
        value = value if equals else following
        if name.lstrip("-") in _FOLDER_FLAGS and value is not None:
            check_folder(name, value)


def check_folder(name: str, folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if a flag or an argument `name` names no folder, or no place of a run."""
    is_path = isinstance(folder, str | os.PathLike)
    text = os.fspath(folder) if is_path else ""
    # "" would be the current folder, and a run's files would lie among the user's own.
    if not text.strip() or "\0" in text:
        raise ValueError(f"{name} = {text if is_path else folder!r}: must name a folder")
    # A path after the comma of --workdir=A,B is not looked at.
    if name.lstrip("-") == "workdir" and re.match(r"(?!gs:)\w+://", text):
        raise ValueError(f"{name} = {text!r}: must be a local folder, or gs://BUCKET/PATH")


def _missing_backend(error: BaseException) -> str:
    """Return the line for a backend of $JAX_PLATFORMS that this machine lacks; else ""."""
    frames = traceback.extract_tb(error.__traceback__)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if not platforms or not frames or not frames[-1].filename.endswith("xla_bridge.py"):
        return ""
    # A platform without its plugin is an assertion without words.
    reason = " ".join(str(error).partition("(set JAX_PLATFORMS")[0].split()) or "no such plugin"
    return (
        f"JAX_PLATFORMS = {platforms!r}: jax finds no such device ({reason}); unset it, set it to "
        "cpu, or install jax for the device (pip install 'jax[cuda12]' or 'jax[tpu]')"
    )


def _name_file(error: BaseException) -> str:
    """Return the message of an error of a file, with the flag that names the file; else ""."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str | os.PathLike):
        return ""
    name, reason = os.fspath(error.filename), (error.strerror or "unreadable").lower()
    for flag, _, value in (argument.partition("=") for argument in sys.argv[1:]):
        if value == name:
            return f"{flag} = {value!r}: {reason}"
    return f"{name}: {reason}"


def _leave(line: str, code: int, error: BaseException) -> NoReturn:
    _announce(line, code, error)
    sys.exit(code)


def _announce(line: str, code: int, error: BaseException) -> None:
    """Print the line; with several processes, tell every other process and end here."""
    global _signal_status
    if isinstance(error, KeyboardInterrupt | sigterm.Terminated):
        _signal_status = code
    print(line, file=sys.stderr, flush=True)
    if "jax" in sys.modules:  # not imported for its sake: the data pipeline runs without it
        from spell_jax.runtime.hosts import distributed

        distributed.leave(code, error)


def _skip_destructors() -> None:
    """End a command that a signal ended, after Python's exit functions and before C++'s.

    XLA may still run a program in a thread of its own. Without this function 3 of 6 signals during
    rollouts and `generate` ended in a segmentation fault, with its exit status.
    """
    if _signal_status is not None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        os._exit(_signal_status)


atexit.register(_skip_destructors)  # before imports of jax, so that Python calls it last


def parse_flags(
    argv: Sequence[str],
    flags_parser: Callable[[Sequence[str]], Any] = flags.FLAGS,
    values: flags.FlagValues = flags.FLAGS,
) -> Any:
    """Parse flags; give mistakes in --config and --config.FIELD the types of USER_ERRORS.

    `flags_parser` makes the arguments of `main` from argv and must parse `values`. --config may
    also name a config that ships with the package (--config=tiny). ValueError if a config file
    cannot be opened, or if it or a flag names a field that the config lacks; flags.Error if a flag
    is unknown, missing or invalid. Other exceptions from the Python code of a config file are bugs
    there and pass, except for the ValueError that get_config raises for a bad argument
    (--config=FILE:ARGUMENT).
    """
    argv = _find_config(argv)
    _check_dashes(argv)
    try:
        main_arguments = flags_parser(argv)
        for name in values:  # ml_collections raises for a missing file when it is first used
            getattr(values[name].value, "is_locked", None)
        return main_arguments
    except flags.Error as error:
        if line := _describe_flag_error(error, argv, values):
            raise app.UsageError(line) from error
        head, is_in_file, trace = str(error).partition(_IN_CONFIG_FILE)
        if not is_in_file:
            raise
        kind, _, text = trace.strip().splitlines()[-1].partition(": ")
        if argument := re.match(r"get_config\(\) (takes|missing) \w+ .*positional argument", text):
            remedy = (
                "no argument after the file"
                if argument[1] == "takes"
                else "an argument, as FILE:ARGUMENT"
            )
            raise ValueError(f"{head.removeprefix('flag ')} must have {remedy}") from error
        if kind == "TypeError" and text.startswith(_WRONG_TYPE):
            raise ValueError(f"{head.removeprefix('flag ')} {text}") from error
        if kind != "ValueError":
            setup_done()
            raise
        # A get_config may name its file and argument, which the flag shows already.
        flag, (place, _, remedy) = head.removeprefix("flag ").rstrip(":"), text.partition(": ")
        raise ValueError(f"{flag}: {remedy if flag.endswith(place) else text}") from error
    except SyntaxError as error:
        # Also of a module that the config imports: place and message fit one line.
        raise ValueError(
            f"--config: {error.filename}, line {error.lineno}: {error.msg}: "
            f"{(error.text or '').strip()}"
        ) from error
    # ml_collections raises the error of a missing file from another error; the cause names the
    # file.
    except OSError as error:
        text = str(error.__cause__ or error).splitlines()[-1].strip()
        if isinstance(error, FileNotFoundError) or "No such file" in text:
            text = _no_such_config(argv)
        if "Is a directory" in text:
            text = f"--config = {_config_value(argv)!r}: is a folder; must be a file"
        raise ValueError(text) from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        # A frame of the config file itself means that its code raised the error, not a flag.
        names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        if names & {"get_config", "<module>"}:
            if line := _missing_field(error):
                raise ValueError(line) from error
            raise
        if "no attribute 'get_config" in str(error):
            text = f"--config = {_config_value(argv)!r}: has no function get_config; must have one"
            raise ValueError(text) from error
        raise ValueError(_no_such_field(error, argv)) from error


def _describe_flag_error(error: flags.Error, argv: Sequence[str], values: flags.FlagValues) -> str:
    """Return the line for a flag that is missing, unknown or no number; else ""."""
    if _UNSET in str(error):
        names = re.findall(r"flag (--\w+)=None", str(error))
        example = ", such as --workdir=runs/NAME" if "--workdir" in names else ""
        return f"{' and '.join(names)}: must be given{example}"
    if isinstance(error, flags.UnrecognizedFlagError):
        name, fields = error.flagname, []
        if "." in name:
            return f"--{name}: no such flag; a field is written --config.FIELD=VALUE"
        if "config" in values and _config_value(argv):
            fields = [field for field in _load_fields(argv) if f".{field}".endswith(f".{name}")]
        return f"--{name}: no such flag. {_nearest_field(name, fields)}" if fields else ""
    for reason, remedy in _NO_NUMBER.items():
        flag, is_number, value = str(error).removeprefix("flag ").partition(f": {reason}: ")
        if is_number:
            return f"{flag.partition('=')[0]} = {value}: {remedy}"
    return ""


def load_config(argv: Sequence[str]) -> Config:
    """Load the config of --config, changed by --config.FIELD; other flags do not count.

    Raises the errors of `parse_flags`.
    """
    arguments = [""]
    for text in _find_config(argv):
        # A value may follow its flag as an argument of its own.
        is_value = not text.startswith("-") and re.fullmatch(r"--?config\.[^=]+", arguments[-1])
        if is_value or re.match("--?(no)?config[.=]", text):
            arguments.append(text)
    arguments = _config_first(arguments)
    values = flags.FlagValues()  # of the config alone
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    flags.mark_flag_as_required("config", values)
    parse_flags(arguments, values, values)
    return values["config"].value


def _config_first(argv: Sequence[str]) -> list[str]:
    """Return argv with --config=NAME, or --config NAME, before all other flags.

    ml_collections refuses a --config.FIELD before --config.
    """
    for place, argument in enumerate(argv):
        if place and re.match("--?config(=|$)", argument):
            end = place + (1 if "=" in argument else 2)
            return [argv[0], *argv[place:end], *argv[1:place], *argv[end:]]
    return list(argv)


def _find_config(argv: Sequence[str]) -> list[str]:
    """Replace NAME of `--config=NAME[:ARGUMENT]` by a shipped config's path if it is no file.

    ValueError if NAME is empty.
    """
    arguments = list(argv)
    # One spelling, --config=NAME, so that the loop and later messages know only one.
    if "--config" in arguments[:-1]:  # --config NAME
        place = arguments.index("--config")
        arguments[place : place + 2] = ["=".join(arguments[place : place + 2])]
    for place, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        name, colon, suffix = value.partition(":")
        if flag not in ("--config", "-config") or "=" not in argument:
            continue
        if not name.strip():
            raise ValueError(_no_such_config(arguments))
        if not os.path.exists(name):
            path = paths.shipped_configs().get(_config_name(name)) or paths.expand_home(name)
            arguments[place] = f"{flag}={path}{colon}{suffix}"
    return arguments


def _check_dashes(argv: Sequence[str]) -> None:
    """Raise ValueError for --config.FIELD with a dash in the field's name."""
    for argument in argv:
        flag = argument.partition("=")[0]
        _, prefix, field = flag.partition("--config.")
        if prefix and "-" in field:
            remedy = f"{prefix}{field.replace('-', '_')}"
            raise ValueError(f"{flag}: no such field. Did you mean {remedy}?")


def _config_name(path: str) -> str:
    return path.removeprefix("spell_jax/").removeprefix("configs/").removesuffix(".py")


def _config_value(argv: Sequence[str]) -> str:
    return next((a.partition("=")[2] for a in argv if a.startswith("--config=")), "")


def _no_such_config(argv: Sequence[str]) -> str:
    value = _config_value(argv)
    names = [name for name in paths.shipped_configs() if "/" not in name]
    close_names = difflib.get_close_matches(_config_name(value.partition(":")[0]), names, 1)
    hint = f"did you mean {close_names[0]}? It " if close_names else ""
    return f"--config = {value!r}: no such file; {hint}must be a file or one of {', '.join(names)}"


def _missing_field(error: Exception) -> str:
    """Return the line for a field that a config file names and the config lacks; else ""."""
    frames = list(traceback.walk_tb(error.__traceback__))
    owners = [frame.f_locals.get("self") for frame, _ in frames]
    section = owners[-1]
    key = re.match(r"\W*(?:Key \W*(\w+)\W* does not exist|(\w+)\W*$)", str(error))
    if not key or not isinstance(section, ConfigDict):
        return ""
    is_inside = [isinstance(owner, ConfigDict) for owner in owners]
    caller, line = frames[is_inside.index(True) - 1]
    file = caller.f_code.co_filename
    return f"{_remedy(key[1] or key[2], section)} ({file}, line {line})"


def _remedy(name: str, section: ConfigDict) -> str:
    """Return the new place of a field that a section lacks, or the section's fields."""
    fields = [field for field, _ in flat(section.to_dict())]
    for old, new in MOVED_FIELDS.items():
        place, _, last = old.rpartition(".")
        # Sections do not know their names: an old name is this section's if it has the new field.
        if last == name and new.removeprefix(f"{place}.") in fields:
            return f"{old}: now {new}"
    close_names = difflib.get_close_matches(name, list(section), 1)
    remedy = f"did you mean {close_names[0]}?" if close_names else f"must be one of {list(section)}"
    return f"{name}: no such field, {remedy}"


def _no_such_field(error: Exception, argv: Sequence[str]) -> str:
    """Return a misspelled field's flag, with ml_collections' "did you mean" if there is one."""
    inner: Any = error
    while inner.args and isinstance(inner.args[0], Exception):
        inner = inner.args[0]
    key, _, hint = str(inner.args[0] if inner.args else inner).partition("\n")
    key = key.strip("'")
    for argument in argv:
        flag = argument.partition("=")[0]
        field = flag.removeprefix("--config.")
        # ml_collections names the field alone, or the whole path below a number.
        if key in flag.split(".")[1:] or key.endswith(f": {field}"):
            fields = _load_fields(argv)
            if moved := describe_move(field, fields):
                return f"{flag}: {moved}"
            hint = hint or _nearest_field(field, fields)
            return f"{flag}: no such field" + (f". {hint}" if hint else "")
    return f"--config: {key} {hint}".strip()


def _load_fields(argv: Sequence[str]) -> list[str]:
    """Return the dotted names of the fields of the config that argv names."""
    # The config without its overrides, which hold the mistake.
    config = load_config([argument for argument in argv if argument.startswith("--config=")])
    return [field for field, _ in flat(config.to_dict())]


def _nearest_field(name: str, fields: Sequence[str]) -> str:
    """Suggest the fields with the last part of `name`, else a field like `name`.

    A section without a like field is listed.
    """
    section, _, last = name.rpartition(".")
    matches = [field for field in fields if field.endswith(f".{last}")]
    siblings = [
        field.removeprefix(f"{section}.") for field in fields if field.startswith(f"{section}.")
    ]
    if not matches and section and siblings:
        # Only the last parts are compared: with the section in them, all fields would be alike.
        close_names = difflib.get_close_matches(last, siblings, 1)
        if not close_names:
            return f"Must be one of {', '.join(siblings)}"
        matches = [f"{section}.{close_names[0]}"]
    matches = matches or difflib.get_close_matches(name, fields, 1)
    return (
        f"Did you mean {' or '.join(f'--config.{field}' for field in matches)}?" if matches else ""
    )
