"""Commits of the Hugging Face Hub's models: all hosts of a run read the same, now and on resuming.

A config names a model by a branch or a tag (hf://OWNER/NAME is its main branch), which may move.
The run's config.json names the commit instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from etils import epath

from spell_jax.config import RunConfig, SupervisedConfig
from spell_jax.policy.model import ModelConfig
from spell_jax.runtime import setup
from spell_jax.runtime.files import hub
from spell_jax.runtime.hosts import distributed

C = TypeVar("C", RunConfig, SupervisedConfig)
M = TypeVar("M", bound=ModelConfig)

_FIELDS = ("folder", "tokenizer")  # fields of a model's section that may hold a URL


def pin(config: C, workdir: epath.Path) -> C:
    """Replace the revision of each Hub model by its commit in the workdir's run, else the newest.

    A URL that names a commit stays. All processes call this together; errors as in hub.fetch.
    """
    if not _hub_urls(config):
        return config

    def find_commits() -> dict[str, str]:
        urls = _hub_urls(keep(config, setup.saved_config(workdir)))
        return {field: hub.pin(url) for field, url in urls.items()}

    # Process 0 asks for all: a branch could move between two hosts' questions.
    return _replace(config, distributed.broadcast(find_commits))


def keep(config: C, saved: Mapping[str, Any]) -> C:
    """Replace the revision of each Hub model by its commit in a saved config, if it is there."""
    urls = {}
    for field, url in _hub_urls(config).items():
        name, _, key = field.partition(".")
        section = saved.get(name)
        before = section.get(key) if isinstance(section, dict) else None
        urls[field] = hub.keep_commit(url, before) if isinstance(before, str) else url
    return _replace(config, urls)


def _models(config: RunConfig | SupervisedConfig) -> dict[str, ModelConfig]:
    extra_models = config.models if isinstance(config, RunConfig) else {}
    return {"policy": config.policy, **extra_models}


def _hub_urls(config: RunConfig | SupervisedConfig) -> dict[str, str]:
    """Return the URLs of models of the Hub by field, such as "policy.folder"."""
    values = {
        f"{name}.{field}": getattr(model, field, "")
        for name, model in _models(config).items()
        for field in _FIELDS
    }
    return {field: value for field, value in values.items() if hub.is_model(value)}


def _replace(config: C, urls: Mapping[str, str]) -> C:
    def change(name: str, model: M) -> M:
        keys = [key for key in _FIELDS if f"{name}.{key}" in urls]
        return dataclasses.replace(model, **{key: urls[f"{name}.{key}"] for key in keys})

    config = dataclasses.replace(config, policy=change("policy", config.policy))
    if not isinstance(config, RunConfig):
        return config
    models = {name: change(name, model) for name, model in config.models.items()}
    return dataclasses.replace(config, models=models)
