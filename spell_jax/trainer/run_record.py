"""Record of what a run was, in run.json: code, devices, policy, and the defaults that it changed.

run.json holds {"starts", "policy", "defaults"}. A run has a start for each process that began or
resumed it: the steps done before, the code's version and commit, and the devices. "policy" has the
sizes of the policy, "defaults" the default of each field of the config that has another value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from spell_jax.config import (
    RunConfig,
    SupervisedConfig,
    default_config,
    default_supervised_config,
    extra_model,
)
from spell_jax.policy import lora, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import code_version
from spell_jax.runtime.config import flat, plain
from spell_jax.runtime.files.jsonl import read_json, write_json
from spell_jax.runtime.files.paths import RUN_FILE
from spell_jax.runtime.version import VERSION


def write(
    workdir: epath.Path,
    step: int,
    config: RunConfig | SupervisedConfig,
    fields: Mapping[str, Any],
    policy: PolicyConfig,
) -> None:
    """Write or extend WORKDIR/run.json at a start of the run, after `step` steps.

    `fields` is the config as nested dicts of JSON values.
    """
    # Starts at or after this step trained weights that are lost, as their lines of metrics are.
    earlier = [start for start in _read_starts(workdir) if start["step"] < step]
    record = {
        "starts": [*earlier, {"step": step, **_describe_process()}],
        "policy": _describe_policy(policy),
        "defaults": _changed_defaults(config, fields),
    }
    write_json(workdir / RUN_FILE, record)


def _read_starts(workdir: epath.Path) -> list[dict[str, Any]]:
    try:
        starts = read_json(workdir / RUN_FILE)["starts"]
        return [start for start in starts if isinstance(start["step"], int)]
    # Without the file, or with a damaged one, the run goes on.
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _describe_process() -> dict[str, Any]:
    return {
        "version": VERSION,
        "commit": code_version.head_commit(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "hosts": jax.process_count(),
    }


def _describe_policy(policy: PolicyConfig) -> dict[str, int]:
    shapes, _ = transformer.abstract_params(policy)
    trained, frozen = (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part))
        for part in lora.split(policy, shapes)
    )
    sizes = {"parameters": trained + frozen, "trained_parameters": trained}
    return sizes | {name: getattr(policy, name) for name in ("layers", "width", "vocab_size")}


def _changed_defaults(
    config: RunConfig | SupervisedConfig, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the default of each changed field by dotted name; None where it has none."""
    if isinstance(config, RunConfig):
        defaults = plain(default_config(config.algorithm.name))
        defaults |= {name: plain(extra_model()) for name in config.models}
    else:
        defaults = plain(default_supervised_config())
    before, now = dict(flat(defaults)), dict(flat(fields))
    names = (name for name in now if now[name] != before.get(name))
    return {name: before.get(name) for name in names if name != "algorithm.name"}
