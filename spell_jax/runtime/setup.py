"""Setup of an entry point that computes, and the config file in its folder."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from absl import logging as absl_logging
from etils import epath

from spell_jax.runtime.files import paths
from spell_jax.runtime.files.jsonl import read_json, write_json, write_lines
from spell_jax.runtime.files.paths import CONFIG_FILE
from spell_jax.runtime.hosts import distributed


def setup() -> None:
    """Set up logs and hosts, once and before any device is touched; wait for all hosts.

    Compiled programs are kept in $JAX_COMPILATION_CACHE_DIR, by default in paths.cache_folder().
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(paths.cache_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # Of the libraries only warnings are shown: Orbax alone logs some fifty lines a checkpoint.
    absl_logging.set_verbosity(absl_logging.WARNING)
    for name in ("jax", "orbax"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("spell_jax").setLevel(logging.INFO)
    # Nothing of Orbax and asyncio: runtime/files/checkpoint.py gets the errors of their threads.
    # A full disk would show 136 tracebacks around the line that says where the step is saved.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    absl_logging.get_absl_logger().addFilter(_is_not_of_orbax)
    sys.unraisablehook = functools.partial(_report_lost, sys.unraisablehook)
    distributed.join()


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether a record does not come from Orbax, which logs as absl."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _report_lost(report: Callable[[Any], object], lost: Any) -> None:
    """Report an error that no code could catch, except TensorStore's after a failed save."""
    # TensorStore's threads call an event loop of Orbax that has ended, and print each failure.
    if lost.exc_type is not RuntimeError or str(lost.exc_value) != "Event loop is closed":
        report(lost)


def write_config(config: Mapping[str, Any], workdir: epath.Path) -> None:
    """Write the run's config, nested dicts of JSON values, to WORKDIR/config.json."""
    write_lines(workdir / CONFIG_FILE, [json.dumps(config, indent=2) + "\n"])


def saved_config(workdir: epath.Path) -> dict[str, Any]:
    """Return the config that `write_config` wrote; {} if there is none or it is damaged."""
    try:
        return read_json(workdir / CONFIG_FILE)
    except (OSError, ValueError):
        return {}


def check_same(path: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Write a JSON-able config, or raise ValueError for the first field that differs there."""
    config = json.loads(json.dumps(config))
    if not path.exists():
        write_json(path, config)
        return
    before = read_json(path)
    for field, value in config.items():
        if before.get(field) != value:
            raise ValueError(
                f"{field} = {value!r}: was {before.get(field)!r} when {path} was written; use "
                "the same value or another --out"
            )


@contextlib.contextmanager
def sparing_garbage_collector() -> Iterator[Callable[[], None]]:
    """Yield a function that exempts all objects alive at its first call from garbage collection.

    The exemption ends with the block. So does any other exemption in the process.
    """
    # After its first step a run has 410,000 objects that stay (modules, traced programs), and each
    # pass of the collector over them takes 0.26 s. The collector took 1.5 to 1.9 s of 20 steps of
    # the demo, about 27 s. With the exemption it takes 0.3 s, and 0.3 s more once, in the call (one
    # CPU).

    @functools.cache
    def spare() -> None:
        # Otherwise garbage of the first step would be exempted, and stay until the end.
        gc.collect()
        gc.freeze()

    try:
        yield spare
    finally:
        gc.unfreeze()


def profiled(enabled: bool, workdir: epath.Path) -> contextlib.AbstractContextManager[None]:
    """Write a profiler trace of the block to WORKDIR/profile, if enabled."""
    return jax.profiler.trace(str(workdir / "profile")) if enabled else contextlib.nullcontext()
