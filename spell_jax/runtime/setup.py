"""Setup of an entry point that computes.

It silences libraries, enables the cache of compiled programs, writes the config to the workdir, and
traces chosen steps with the profiler.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging as absl_logging
from etils import epath

from spell_jax.runtime import distributed
from spell_jax.runtime.jsonl import write_json

CONFIG_FILE = "config.json"


def setup() -> None:
    """Called once, before any device is touched. One of several hosts waits for the others here.

    Compiled programs are kept in $JAX_COMPILATION_CACHE_DIR, by default ~/.cache/spell_jax: a
    second start then takes seconds instead of a minute. Of the libraries only warnings are shown
    (Orbax alone logs some fifty lines a checkpoint).
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = pathlib.Path.home() / ".cache" / "spell_jax"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    absl_logging.set_verbosity(absl_logging.WARNING)
    for name in ("jax", "orbax"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("spell_jax").setLevel(logging.INFO)
    distributed.join()


def write_config(config: Mapping[str, Any], workdir: epath.Path) -> None:
    """Writes the run's config, nested dicts of JSON values, to WORKDIR/config.json."""
    (workdir / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def check_same(path: pathlib.Path, wanted: Mapping[str, Any], what: str) -> None:
    """Writes down what is made in a folder, so that it can be gone on with.

    Args:
      path: of the file; its folder is there.
      wanted: field -> value, JSON-able.
      what: is made, with its article.

    Raises:
      ValueError: something else was begun there; names the first field that differs.
    """
    wanted = json.loads(json.dumps(wanted))
    if not path.exists():
        write_json(path, wanted)
        return
    found = json.loads(path.read_text())
    for field, value in wanted.items():
        if found.get(field) != value:
            raise ValueError(
                f"{field} = {value!r}: was {found.get(field)!r} when {path} was written; {what} "
                "is gone on with as it was begun, another one needs another out"
            )


def profiled(wanted: bool, workdir: epath.Path) -> contextlib.AbstractContextManager[None]:
    """Writes a profiler trace of what happens inside to WORKDIR/profile, if it is wanted."""
    if not wanted:
        return contextlib.nullcontext()
    return jax.profiler.trace(str(workdir / "profile"))
