"""What every entry does first: quiet libraries, and a cache of compiled programs."""

from __future__ import annotations

import logging
import os
import pathlib

import jax
from absl import logging as absl_logging


def setup() -> None:
    """Called once by every entry, before any device is touched.

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
