"""Tests of flags from dataclasses: types, defaults, help, and errors."""

from __future__ import annotations

import dataclasses

import pytest
from absl import flags

from spell_jax.runtime import dataclass_flags


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Fields of each kind.

    Attributes:
      count: number of rows, on
        two lines.
      name: name of the rows.
      share: share of rows.
      is_sorted: whether rows are sorted.
      shares: shares of roles.
      tasks: tasks.
    """

    count: int
    name: str = "rows"
    share: float = 0.5
    is_sorted: bool = True
    shares: tuple[float, ...] = (0.5, 0.25)
    tasks: tuple[str, ...] = ("a", "b")


@pytest.fixture
def flag_values() -> flags.FlagValues:
    values = flags.FlagValues()
    dataclass_flags.define(Kinds, values)
    return values


def test_flags_have_types_defaults_and_help_of_the_fields(flag_values):
    flag_values(["command", "--count=3"])
    assert dataclass_flags.read(Kinds, flag_values) == Kinds(3)
    assert flag_values["count"].help == "Number of rows, on two lines."
    arguments = ["--count=1", "--share=1", "--nois_sorted", "--shares=1,2", "--tasks=c", "--name="]
    flag_values(["command", *arguments])
    assert dataclass_flags.read(Kinds, flag_values) == Kinds(1, "", 1.0, False, (1, 2), ("c",))


def test_a_missing_flag_and_a_wrong_part_are_named(flag_values):
    with pytest.raises(flags.IllegalFlagValueError, match="--count"):
        flag_values(["command"])
    flag_values(["command", "--count=1", "--shares=1,x"])
    with pytest.raises(ValueError, match=r"^--shares = 1,x: could not convert"):
        dataclass_flags.read(Kinds, flag_values)
