"""The fields of a config in words: value, default, and meaning by the section's dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from spell_jax.algorithms import registry
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.config import (
    ExtraModelConfig,
    RunConfig,
    SupervisedConfig,
    default_config,
    default_supervised_config,
    extra_model,
    model_sections,
)
from spell_jax.runtime import dataclass_flags
from spell_jax.runtime.config import Config, flat

_WIDTH, _INDENT = 100, "    "  # columns of a line


def describe(config: Config, name: str = "") -> str:
    """List the fields of a config, by section: value, default if it is another, meaning.

    `name` is a section ("sampler", "algorithm.questioner"), or a field of one; "" lists everything.
    ValueError if the config has no such section or field.
    """
    defaults, classes = _defaults(config), dict(_sections(config))
    parts = []
    for section, cls in classes.items():
        texts, values = dataclass_flags.field_texts(cls), _get(config, section)
        lines = []
        for field in (field.name for field in dataclasses.fields(cls)):
            path = f"{section}.{field}".lstrip(".")
            is_chosen = not name or f"{path}.".startswith(f"{name}.")
            if is_chosen and field in values and path not in classes:
                lines += _field_lines(path, values[field], defaults, texts.get(field, ""))
        if lines:
            title, _, _ = (inspect.getdoc(cls) or cls.__name__).partition("\n")
            title = textwrap.fill(
                f"# {section or 'config'}: {title}", _WIDTH, subsequent_indent="# "
            )
            parts.append("\n".join([title, *lines]))
    if not parts:
        sections = ", ".join(filter(None, classes))
        raise ValueError(f"--help_config = {name!r}: must be a field, or a section: {sections}")
    return "\n\n".join(parts)


def default(is_run: bool) -> Config:
    """Return the default config of a run, or of supervised tuning."""
    return default_config() if is_run else default_supervised_config()


def _field_lines(path: str, value: Any, defaults: Mapping[str, Any], text: str) -> list[str]:
    default = defaults.get(path, value)
    changed_from = f" (default {default!r})" if default != value else ""
    meaning = textwrap.indent(textwrap.fill(text, _WIDTH - len(_INDENT)), _INDENT)
    return [f"{path} = {value!r}{changed_from}", *([meaning] if text else [])]


def subsections(cls: type) -> dict[str, type]:
    """Return the dataclass of each field of a section that is a section itself."""
    fields = dataclasses.fields(cls)
    return {f.name: type(f.default) for f in fields if dataclasses.is_dataclass(f.default)}


def run_sections() -> dict[str, type]:
    """Return the dataclass of each section of a run but the algorithm's, by name."""
    sections = subsections(RunConfig).items()
    return {name: cls for name, cls in sections if not issubclass(cls, AlgorithmConfig)}


def _is_run(config: Config) -> bool:
    return "algorithm" in config


def _sections(config: Config) -> Iterator[tuple[str, type]]:
    """Yield the dotted name ("" for the config itself) and the dataclass of each section."""
    top = RunConfig if _is_run(config) else SupervisedConfig
    classes = {"": top} | (run_sections() if _is_run(config) else subsections(top))
    if _is_run(config):
        classes["algorithm"] = registry.ALGORITHMS[config.algorithm.name].config
        extra = set(model_sections(config)) - {"policy"}
        classes |= dict.fromkeys(sorted(extra), ExtraModelConfig)
    for name, cls in classes.items():
        yield name, cls
        if name:
            yield from _below(name, cls)


def _below(name: str, cls: type) -> Iterator[tuple[str, type]]:
    for field, part in subsections(cls).items():
        yield f"{name}.{field}", part
        yield from _below(f"{name}.{field}", part)


def _defaults(config: Config) -> dict[str, Any]:
    """Return the default value of each field, by dotted name."""
    if not _is_run(config):
        return dict(flat(default_supervised_config().to_dict()))
    fields = default_config(config.algorithm.name).to_dict()
    fields |= {name: extra_model().to_dict() for name in model_sections(config) if name != "policy"}
    return dict(flat(fields))


def _get(config: Config, path: str) -> Config:
    return functools.reduce(operator.getitem, filter(None, path.split(".")), config)
