"""Tests of --help_config: every field of every shipped config has its value and meaning."""

from __future__ import annotations

import functools
import re

import pytest

import spell_jax
from examples import counting
from spell_jax.algorithms import registry
from spell_jax.config import default_config, default_supervised_config
from spell_jax.runtime import entry
from spell_jax.runtime.config import flat
from spell_jax.runtime.files import paths
from spell_jax.trainer import config_help
from spell_jax.trainer import flags as train_flags

NAMES = [name for name in paths.shipped_configs() if "/" not in name]


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_listed_once_with_its_value_and_meaning(name):
    config = spell_jax.get_config(name)
    fields = dict(flat(config.to_dict()))
    # A field is a line; its meaning is in the lines below, which are indented.
    listed = re.findall(
        r"^([\w.]+) = (.*?)(?: \(default .*\))?\n    \S.*",
        config_help.describe(config),
        re.M,
    )
    assert dict(listed) == {field: repr(value) for field, value in fields.items()}
    assert len(listed) == len(fields)


def test_a_changed_field_shows_its_default():
    lines = config_help.describe(spell_jax.get_config("tiny")).splitlines()
    assert "steps = 120 (default 70)" in lines and "seed = 0" in lines
    assert "algorithm.questioner.documents = (2,) (default (5,))" in lines
    place = lines.index("steps = 120 (default 70)")
    assert lines[place + 1].startswith("    Steps of the run, each a rollout and its update")
    assert max(len(line) for line in lines if line.startswith(("#", "    "))) <= 100


@pytest.mark.parametrize(
    ("config", "section", "fields"),
    [
        ("tiny", "mesh.rollout", ["data", "fsdp", "context", "tensor", "expert"]),
        ("tiny", "steps", ["steps"]),
        ("tiny_eapo", "reward_model.optimizer", ["learning_rate"]),
        ("tiny_warm_start", "packing", ["buckets"]),
    ],
)
def test_a_section_or_a_field_is_listed_alone(config, section, fields):
    text = config_help.describe(spell_jax.get_config(config), section)
    listed = re.findall(r"^([\w.]+) = ", text, re.M)
    assert listed and all(f"{name}.".startswith(f"{section}.") for name in listed)
    assert {name.rpartition(".")[2] for name in listed} >= set(fields)


def test_an_algorithm_without_meanings_lists_its_fields(monkeypatch):
    """The example of a user's algorithm has a docstring without `Attributes:`."""
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.ALGORITHMS))
    registry.register(registry.AlgorithmSpec(counting.CountingConfig, counting.Counting))
    text = config_help.describe(default_config("counting"), "algorithm")
    assert "# algorithm: Sizes of a step" in text and "\nalgorithm.clusters = 32\n" in text


def test_a_wrong_section_is_named_with_the_sections():
    message = (
        "^--help_config = 'samplers': must be a field, or a section: policy, data, .*sampler, "
    )
    with pytest.raises(ValueError, match=message):
        config_help.describe(spell_jax.get_config("tiny"), "samplers")


@pytest.mark.parametrize(
    "arguments",
    [["--help_config"], ["--help_config=data"], ["--help_config", "data"], ["-help_config=data"]],
)
def test_the_flag_needs_no_other_flag_and_shows_overrides(arguments, capsys):
    argv = ["x", "--config=tiny", *arguments, "--config.data.source=docs", "--config.steps", "7"]
    argv += ["--noconfig.evaluate"]
    with pytest.raises(SystemExit) as end:
        entry.print_config_help(argv, config_help.describe)
    out = capsys.readouterr().out
    assert not end.value.code and "\ndata.source = 'docs' (default '')\n" in out
    assert ("\nevaluate = False" in out) == (arguments == ["--help_config"])
    assert ("\nsteps = 7 (default 70)\n" in out) == (arguments == ["--help_config"])
    entry.print_config_help(["x", "--config=tiny"], config_help.describe)  # goes on


@pytest.mark.parametrize("is_run", [True, False])
def test_without_a_config_the_default_one_is_described(is_run, capsys):
    describe = functools.partial(train_flags.describe_config, is_run=is_run)
    with pytest.raises(SystemExit) as end:
        entry.print_config_help(["x", "--workdir=run", "--help_config"], describe)
    fields = default_config() if is_run else default_supervised_config()
    assert not end.value.code
    assert capsys.readouterr().out == config_help.describe(fields) + "\n"
