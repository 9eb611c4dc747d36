"""Test of commands of the documentation that name a slice or GPUs: the run fits there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from docs.tools import commands, measurements
from spell_jax.launch import aot, rental_check, topologies
from spell_jax.launch.memory_plan import MemoryPlan
from spell_jax.policy.model import known_shape
from spell_jax.runtime import entry
from spell_jax.runtime.config import Config
from tests import doc_commands
from tests.paths import ROOT

# The page asks what helps if a run does not fit.
TOO_LARGE = [("docs/faq.md", "launch.plan")]


def _texts() -> Iterator[tuple[str, str]]:
    """Yield each page and each docstring of a command or a config, with its path."""
    for page in (*measurements.pages(), ROOT / "CONTRIBUTING.md"):
        yield str(page.relative_to(ROOT)), page.read_text()
    for command in commands.find().values():
        yield command.module, command.text
    for path in (ROOT / "configs").glob("*.py"):
        yield f"configs/{path.name}", ast.get_docstring(ast.parse(path.read_text())) or ""


def _commands() -> list[tuple[str, tuple[str, ...]]]:
    """List (page, words after `python -m`) of commands with devices and a config."""
    named = []
    for page, text in _texts():
        if "--topology=" not in text:
            continue
        for command in doc_commands.find_in(f"{text}\n", page):
            words = tuple(word for word in command.words if not word.startswith("["))  # optional
            names_devices = any(word.startswith("--topology=") for word in words)
            # configs/NAME.py stands for any config.
            if names_devices and re.search(r" --config=\S*/[a-z]", " ".join(words)):
                named.append((page, words[words.index("-m") + 1 :]))
    return named


COMMANDS = _commands()


def _value(words: tuple[str, ...], name: str, default: str = "") -> str:
    values = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return values[-1] if values else default


def _read_config(words: tuple[str, ...]) -> Config:
    """Read the config; a folder that stands for any model becomes the config's own model."""
    config = entry.load_config(words)
    if not known_shape(config.policy.folder):
        (file,) = (word for word in words if word.startswith("--config="))
        config.policy.folder = entry.load_config([file]).policy.folder
    return config


@functools.cache
def _plan(words: tuple[str, ...]) -> MemoryPlan:
    """Plan the memory of a command."""
    config = _read_config(words)
    name, memory_gib = _value(words, "topology"), float(_value(words, "memory_gib", "0"))
    if words[0] in ("launch.check", "launch.tpu_vm"):
        checked = rental_check.check_fields(config, name)
        assert not [line for line in checked.mistakes if not line.startswith("data.source = ''")]
        assert checked.plan
        return checked.plan
    length = int(_value(words, "length", str(config.sampler.max_prompt)))
    policy = aot.read_policy(config, "", int(_value(words, "layers", "0")))
    return MemoryPlan(config, policy, topologies.find(name, memory_gib), length)


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda part: str(part)[:60])
def test_documented_run_fits_its_devices(page: str, words: tuple[str, ...]) -> None:
    memory_plan = _plan(words)
    if (page, words[0]) in TOO_LARGE:
        assert not memory_plan.fits
        assert any(tried.fits for _, tried in memory_plan.helpful())
        return
    worst, hbm = memory_plan.worst, memory_plan.topology.hbm
    assert hbm < topologies.ANY_MEMORY
    assert worst.total <= hbm, f"{worst.program} takes {worst.total / topologies.GIB:.2f} GiB"


def test_pages_that_name_devices_are_covered() -> None:
    assert {page for page, _ in COMMANDS} >= {
        "docs/howto/tpu_slice.md",
        "docs/howto/one_gpu.md",
        "docs/howto/long_prompts.md",
        "docs/long_context.md",
        "docs/models.md",
        "docs/faq.md",
        "launch.tpu_vm",
        "launch.plan",
        "launch.aot",
    }


def test_run_that_does_not_fit_is_found() -> None:
    """The slice that the pages once named for this config is too small for its default mesh."""
    flags = ("--config=configs/paper.py:qwen2.5-7b-instruct", "--topology=v5e-16")
    for command in ("launch.plan", "launch.aot"):
        assert not _plan((command, *flags)).fits
    checked = rental_check.check_fields(_read_config(flags), "v5e-16")
    assert [line.split(":")[0] for line in checked.mistakes] == [
        "packing.token_budget = 51200",
        "data.source = ''",
    ]
