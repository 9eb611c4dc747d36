"""Description of what was run: facts and config fields, from config.json and run.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from spell_jax.runtime.code_version import UNKNOWN
from spell_jax.runtime.config import flat
from spell_jax.runtime.files.jsonl import read_json
from spell_jax.runtime.files.paths import CONFIG_FILE, RUN_FILE
from spell_jax.runtime.finite import LARGEST_FLOAT32, is_finite

log = logging.getLogger(__name__)

SECONDS = "time/step_seconds"
# Fields of "starts" in run.json besides the step, with their types.
_TEXTS, _COUNTS = ("version", "commit", "jax", "device"), ("devices", "hosts")
_SIZES = ("parameters", "trained_parameters", "layers", "width", "vocab_size")


def read_config(workdir: epath.Path) -> dict[str, Any] | None:
    """Read the config of a run; None without it, or if it is damaged, which is logged."""
    return _read(workdir / CONFIG_FILE)


def read_record(workdir: epath.Path) -> dict[str, Any] | None:
    """Read run.json (trainer/run_record.py); None without it, or if it is damaged."""
    record = _read(workdir / RUN_FILE)
    if record is None or _is_record(record):
        return record
    log.warning("left out: %s is no record of a run", workdir / RUN_FILE)
    return None


def _read(path: epath.Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        log.warning("left out: %s", error)
        return None


def _is_record(record: Mapping[str, Any]) -> bool:
    starts, policy = record.get("starts"), record.get("policy")
    return (
        isinstance(starts, list)
        and len(starts) > 0
        and all(
            isinstance(start, dict)
            and all(isinstance(start.get(name), str) for name in _TEXTS)
            and all(type(start.get(name)) is int for name in ("step", *_COUNTS))
            for start in starts
        )
        and isinstance(policy, dict)
        and all(type(policy.get(name)) is int for name in _SIZES)
        and isinstance(record.get("defaults"), dict)
    )


def describe(
    groups: Sequence[Sequence[int]],
    workdirs: Sequence[epath.Path],
    configs: Sequence[Mapping[str, Any] | None],
    metrics: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """Describe groups of runs, which are indices into the other arguments.

    Args:
      groups: runs that differ only in the seed.
      workdirs: folders of the runs.
      configs: configs of the runs, None where there is none.
      metrics: lines of metrics of the runs.

    Returns:
      {"facts": [[name, texts]], "differing": [[field, texts]], "defaults": [[field, text of the
      default, texts]]}, where `texts` has a text, or None, for each group. "differing" are fields
      with different values in the groups, "defaults" fields that are not at their default.
    """
    run_records = [read_record(workdir) for workdir in workdirs]
    facts: dict[str, list[str | None]] = {}
    for members in groups:
        first = members[0]
        by_name = {
            **_describe_config(configs[first] or {}, run_records[first]),
            "seed": _join_texts((configs[i] or {}).get("seed") for i in members),
            "steps": _join_texts(_describe_steps(configs[i], metrics[i]) for i in members),
            "time": _describe_time([metrics[i] for i in members]),
            "code": _join_texts(_describe_starts(run_records[i], _code_of) for i in members),
            "device": _join_texts(_describe_starts(run_records[i], _device_of) for i in members),
            "folder": _join_texts(workdirs[i] for i in members),
        }
        for name, text in by_name.items():
            facts.setdefault(name, []).append(text)
    fields = [dict(flat(configs[members[0]] or {})) for members in groups]
    defaults: dict[str, Any] = {}
    for members in groups:
        defaults |= (run_records[members[0]] or {}).get("defaults", {})
    return {
        "facts": [[name, texts] for name, texts in facts.items() if any(texts)],
        "differing": [
            [name, [_field_text(of_group.get(name)) for of_group in fields]]
            for name in differing_fields(fields)
        ],
        "defaults": [
            [name, _field_text(default), [_field_text(of_group.get(name)) for of_group in fields]]
            for name, default in defaults.items()
        ],
    }


def differing_fields(fields: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of fields, other than the seed, that differ between flat configs."""
    names = dict.fromkeys(name for of_run in fields for name in of_run if name != "seed")
    return [n for n in names if len({json.dumps(of_run.get(n)) for of_run in fields}) > 1]


def _describe_config(
    config: Mapping[str, Any], record: Mapping[str, Any] | None
) -> dict[str, str | None]:
    algorithm, policy, data = (
        section if isinstance(section := config.get(name), dict) else {}
        for name in ("algorithm", "policy", "data")
    )
    is_supervised = "rows_per_step" in config
    source = config.get("source") if is_supervised else data.get("questions") or data.get("source")
    return {
        "algorithm": "supervised tuning" if is_supervised else _text(algorithm.get("name")),
        "policy": _describe_policy(policy.get("folder"), record),
        "data": _text(source),
        "held out": _text(data.get("validation")),
    }


def _describe_policy(folder: Any, record: Mapping[str, Any] | None) -> str | None:
    parts = [_text(folder)]
    if record:
        sizes = record["policy"]
        parts.append(f"{sizes['layers']} layers, width {sizes['width']}")
        parts.append(f"{sizes['parameters']:,} parameters")
        if sizes["trained_parameters"] != sizes["parameters"]:
            parts.append(f"{sizes['trained_parameters']:,} of them trained")
    return "; ".join(filter(None, parts)) or None


def _describe_steps(
    config: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, Any]]
) -> str | None:
    if not metrics:
        return None
    planned = (config or {}).get("steps")
    return f"{metrics[-1]['step']}" + (f" of {planned}" if planned is not None else "")


def _describe_time(runs: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
    """Return the mean time of runs from the start of the process on, over all resumed parts."""
    seconds = [
        sum(line[SECONDS] for line in lines if is_finite(line.get(SECONDS), LARGEST_FLOAT32))
        for lines in runs
    ]
    mean = sum(seconds) / len(seconds)
    for unit, size in (("hours", 3600), ("minutes", 60), ("seconds", 1)):
        if mean >= 2 * size:
            return f"{mean / size:.3g} {unit}" + (" each" if len(seconds) > 1 else "")
    return None


def _code_of(start: Mapping[str, Any]) -> str:
    commit = f", commit {start['commit']}" if start["commit"] != UNKNOWN else ""
    return f"spell_jax {start['version']}{commit}"


def _device_of(start: Mapping[str, Any]) -> str:
    hosts = f" on {start['hosts']} hosts" if start["hosts"] > 1 else ""
    return f"{start['devices']} × {start['device']}{hosts}, jax {start['jax']}"


def _describe_starts(
    record: Mapping[str, Any] | None, describe_start: Callable[[Mapping[str, Any]], str]
) -> str | None:
    """Return the description of the starts, a change with the first step that it holds for."""
    text, last = "", None
    for start in record["starts"] if record else []:
        new = describe_start(start)
        if new != last:
            text += f"; from step {start['step'] + 1} on {new}" if last else new
        last = new
    return text or None


def _join_texts(values: Iterable[Any]) -> str | None:
    texts = [text for value in values if (text := _text(value))]
    return ", ".join(dict.fromkeys(texts)) or None


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _field_text(value: Any) -> str | None:
    """Return the value of a field as text; None for a field that is not there."""
    if isinstance(value, list):
        return f"({', '.join(map(str, value))})"
    if value is None or (isinstance(value, str) and value):
        return value
    return json.dumps(value)
