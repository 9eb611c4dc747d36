"""Flags of the commands that run a config, spell_jax.train and spell_jax.sft."""

from __future__ import annotations

from absl import flags
from ml_collections import config_flags

from spell_jax.runtime.config import Config

flags.disclaim_key_flags()  # of the command that calls `define_flags`: its --help shows them


def define_flags() -> None:
    """Define --config, --workdir and --help_config."""
    config_flags.DEFINE_config_file("config", None, "File, or name, of the run's config.")
    flags.DEFINE_string("workdir", None, "Folder of the run.")
    flags.DEFINE_string(
        "help_config",
        None,
        "Print the config's fields with values, defaults and meanings; --help_config=SECTION: "
        "those below one section. Without --config, of the default config.",
    )
    flags.mark_flags_as_required(["config", "workdir"])


def describe_config(config: Config | None, name: str, *, is_run: bool = True) -> str:
    """Return the text of --help_config; `name` is a section, "" for all.

    Without a config, the default one is described: of a run, or of supervised tuning.
    """
    from spell_jax.trainer import (
        config_help,  # with jax, which other mistakes in flags do not wait for
    )

    return config_help.describe(config or config_help.default(is_run), name)
