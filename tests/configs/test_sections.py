"""Tests of the sections of config.algorithm, and of their fields' old names."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest
from absl import flags
from ml_collections import config_flags

from spell_jax.algorithms import registry
from spell_jax.config import check_resumed, collect_mistakes, read, to_dict
from spell_jax.configs import tiny, tiny_reconstruction
from spell_jax.runtime import entry
from spell_jax.runtime.config import MOVED_FIELDS, changes, flat
from tests import noise


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_every_algorithm_has_a_config_to_take(name: str) -> None:
    file, _, argument = registry.ALGORITHMS[name].example.partition(":")
    module = importlib.import_module("spell_jax." + file.removesuffix(".py").replace("/", "."))
    config = module.get_config(*[argument] * bool(argument))
    # Nothing is wrong but the files that a command before makes.
    assert set(collect_mistakes(config)[1]) <= {"data.questions", "data.validation"}
    assert config.algorithm.name == name


def test_config_of_another_algorithm_is_named_in_one_line() -> None:
    config = tiny.get_config()
    config.algorithm.name = "rlvr"
    line = r"^algorithm\.name = 'rlvr': must be 'spell', .* such as configs/tiny\.py:rlvr$"
    with pytest.raises(ValueError, match=line):
        read(config)
    # The fields of LongPO are fields of RLVR, too; no other algorithm has as few.
    config = tiny.get_config("longpo")
    config.algorithm.name = "spell"
    with pytest.raises(ValueError, match=r"^algorithm\.name = 'spell': must be 'longpo', whose "):
        read(config)
    # Fields that both have keep the demo's values.
    demo, rlvr = (tiny.get_config(name).algorithm.to_dict() for name in ("spell", "rlvr"))
    assert changes(rlvr, demo) == ["name = 'rlvr': was 'spell'"]


def test_fields_that_do_nothing_are_absent() -> None:
    assert {"verifier", "responder", "questions", "group_size"}.isdisjoint(
        tiny.get_config("longpo").algorithm
    )
    assert {"memory", "sigma", "train"}.isdisjoint(tiny.get_config("rlvr").algorithm.questioner)


@pytest.mark.parametrize(("old", "new"), MOVED_FIELDS.items())
def test_old_names_of_fields_lead_to_the_new_ones(old: str, new: str) -> None:
    assert new in dict(flat(tiny.get_config().to_dict()))
    config = noise.with_fields(tiny.get_config(), {old: 1})
    with pytest.raises(ValueError, match=rf"^{re.escape(old)}: now {re.escape(new)}$"):
        read(config)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("algorithm.sigma = 0.2", "algorithm.sigma: now algorithm.questioner.sigma"),
        ("algorithm.sigma += 0.2", "algorithm.sigma: now algorithm.questioner.sigma"),
        ("algorithm.update(train_verifier=False)", "train_verifier: now algorithm.verifier.train"),
        ("update(algorithm={'sigma': 0.2})", "algorithm.sigma: now algorithm.questioner.sigma"),
        ("algorithm.questioner.sgima = 0.2", "sgima: no such field, did you mean sigma?"),
        # The section has no field like the old one, which stood in another section.
        ("sampler.memory = 1", "memory: no such field, must be one of ['attention', "),
        ("algorithm.questioner.sigma = 'a'", "config.py: Could not override field 'sigma'"),
    ],
)
def test_config_file_with_a_wrong_field_ends_in_one_line(
    change: str, line: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "config.py"
    body = f"    config = tiny.get_config()\n    config.{change}\n    return config\n"
    file.write_text(f"from spell_jax.configs import tiny\n\ndef get_config():\n{body}")
    arguments, values = ["test", f"--config={file}", "--config.seed=1"], flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", values, sys_argv=arguments)
    with pytest.raises(ValueError) as error:
        entry.parse_flags(arguments, values, values)
    assert line in str(error.value) and "\n" not in str(error.value)
    assert "Could not" in line or str(error.value).endswith(f" ({file}, line 5)")


def test_old_name_of_a_field_that_the_algorithm_lacks_has_no_new_name() -> None:
    config = noise.with_fields(tiny.get_config("rlvr"), {"algorithm.sigma": 1})
    with pytest.raises(ValueError, match=r"^algorithm\.sigma: no such field of this algorithm$"):
        read(config)


def test_run_with_old_names_is_not_resumed() -> None:
    config = read(tiny.get_config())
    check_resumed(config, 1, to_dict(config))
    saved = {"seed": 0, "algorithm": {"name": "spell", "sigma": 0.2}}
    with pytest.raises(ValueError, match=r"^algorithm\.sigma: now algorithm\.questioner\.sigma; "):
        check_resumed(config, 1, saved)
    # The puzzles' algorithm has a field of that name.
    puzzles = read(tiny_reconstruction.get_config())
    check_resumed(puzzles, 1, {"algorithm": {"documents": 16}})


def test_run_of_another_algorithm_is_not_resumed() -> None:
    config = read(tiny.get_config("rlvr"))
    saved = to_dict(read(tiny.get_config()))
    line = r"^algorithm\.name = 'rlvr': must be 'spell' in this workdir, or take another workdir$"
    with pytest.raises(ValueError, match=line):
        check_resumed(config, 1, saved)
