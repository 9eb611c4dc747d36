"""Tests of config sections as dataclasses: valid fields are read, invalid ones are named."""

import copy
import dataclasses
from typing import Any

import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig
from spell_jax.runtime.config import build, check_choice, check_least, collect
from spell_jax.sampler.config import SamplerConfig


@dataclasses.dataclass(frozen=True)
class Example:
    count: int
    share: float = 0.5
    name: str = "x"
    on: bool = False
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    maybe: float | None = None
    inner: Bucket = dataclasses.field(default_factory=lambda: Bucket(8, 4))
    anything: Any = None
    seed: int = 0


def test_build_sets_given_fields_and_keeps_defaults() -> None:
    section = ConfigDict({"count": 3, "sizes": [1, 2], "on": True})
    assert build(Example, section, "example") == Example(3, 0.5, "x", True, (1, 2))
    assert build(Example, FrozenConfigDict({"count": 1}), "example") == Example(1)
    assert build(Example, {"maybe": 1}, "example", count=7) == Example(7, maybe=1.0)
    assert build(Example, {"count": 1, "maybe": None, "anything": []}, "e").anything == []


@pytest.mark.parametrize("inner", [(6, 3), {"length": 6, "answers": 3}])
@pytest.mark.parametrize("kind", [dict, ConfigDict])
def test_nested_dataclass_is_built_from_tuple_or_section(kind, inner) -> None:
    bucket = build(Example, kind({"count": 1, "inner": inner}), "example").inner
    assert bucket == Bucket(6, 3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 2**31, "must be a whole number from -2147483647 to 2147483647"),
        ("count", -(2**70), "must be a whole number from"),
        ("sizes", (1, 2**63), "must be a whole number from"),
        ("seed", 2**32, "must be a whole number from 0 to 4294967295"),
        ("seed", 2**63, "must be a whole number from 0 to 4294967295"),
        ("seed", -1, "must be a whole number from 0 to 4294967295"),
        ("share", 10**400, "must be a finite number"),
    ],
)
def test_numbers_that_jax_cannot_hold_are_refused(name, value, message) -> None:
    with pytest.raises(ValueError, match=rf"^example\.{name}(\[1\])? = -?\d+: {message}"):
        build(Example, {"count": 1} | {name: value}, "example")
    assert build(Example, {"count": 2**31 - 1, "seed": 2**32 - 1}, "example").seed == 2**32 - 1


def test_integer_is_accepted_for_a_float_field() -> None:
    share = build(Example, {"count": 1, "share": 2}, "example").share
    assert isinstance(share, float) and share == 2.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"count": 1, "cuont": 2}, r"example\.cuont: no such field, must be one of .*'count'"),
        ({}, r"example\.count: is missing, must be int"),
        ({"count": "3"}, r"example\.count = '3': must be int"),
        ({"count": 1.5}, r"example\.count = 1\.5: must be int"),
        ({"count": True}, r"example\.count = True: must be int"),
        ({"count": 1, "share": True}, r"example\.share = True: must be float"),
        ({"count": 1, "share": "half"}, r"example\.share = 'half': must be float"),
        ({"count": 1, "on": 1}, r"example\.on = 1: must be bool"),
        ({"count": 1, "sizes": 3}, r"example\.sizes = 3: must be tuple\[int, \.\.\.\]"),
        ({"count": 1, "sizes": (1, "b")}, r"example\.sizes\[1\] = 'b': must be int"),
        ({"count": 1, "pair": (1, "b", 2)}, r"example\.pair = \(1, 'b', 2\): must be tuple"),
        ({"count": 1, "inner": {"size": 3}}, r"example\.inner\.size: no such field"),
        ({"count": 1, "maybe": "no"}, r"example\.maybe = 'no': must be float \| None"),
        (
            {"count": 1, "inner": None},
            r"^example\.inner = None: must be a section, or a tuple \(len",
        ),
        (None, r"^example = None: must be a section, or a tuple \(count, share, "),
    ],
)
def test_errors_name_field_value_and_expected_type(section: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Example, section, "example")


def test_field_passed_as_argument_is_rejected_in_the_section() -> None:
    with pytest.raises(ValueError, match=r"example\.count: no such field"):
        build(Example, {"count": 1}, "example", count=2)


def test_packing_buckets_are_built_from_tuples() -> None:
    section = ConfigDict({"buckets": ((8, 4), (16, 8)), "token_budget": 32})
    built = build(PackingConfig, section, "packing")
    assert built == PackingConfig((Bucket(8, 4), Bucket(16, 8)), 32)
    with pytest.raises(ValueError, match=r"packing\.buckets\[0\] = \(8,\): must be a tuple of"):
        build(PackingConfig, {"buckets": ((8,),), "token_budget": 32}, "packing")


@pytest.mark.parametrize(
    ("cls", "section", "message"),
    [
        (OptimizerConfig, {"schedule": "cubic"}, r"optimizer\.schedule = 'cubic': must be one of"),
        (OptimizerConfig, {"schedule": "cosine"}, r"optimizer\.warmup_steps = 0: must be below"),
        (OptimizerConfig, {"learning_rate": -1.0}, r"optimizer\.learning_rate = -1\.0: must be"),
        (OptimizerConfig, {"clip_norm": 0}, r"optimizer\.clip_norm = 0\.0: must be above 0"),
        (OptimizerConfig, {"b2": 1.0}, r"optimizer\.b2 = 1\.0: must be in \[0, 1\)"),
        (SamplerConfig, {"temperature": -0.1}, r"sampler\.temperature = -0\.1: must be at least 0"),
        (SamplerConfig, {"top_p": 0.0}, r"sampler\.top_p = 0\.0: must be in \(0, 1\]"),
        (SamplerConfig, {"top_k": -1}, r"sampler\.top_k = -1: must be at least 0"),
        (SamplerConfig, {"min_p": 1.5}, r"sampler\.min_p = 1\.5: must be in \[0, 1\]"),
        (SamplerConfig, {"slots": 0}, r"sampler\.slots = 0: must be at least 1"),
    ],
)
def test_config_sections_reject_values_out_of_range(cls: type, section: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(cls, section, cls.__name__.removesuffix("Config").lower())


def test_check_least_and_check_choice_reject_invalid_fields() -> None:
    fields = Example(1, share=0.0, name="b")
    check_least(fields, "example.", count=1, share=0)
    check_choice(fields, "example.", name=("a", "b"))
    with pytest.raises(ValueError, match=r"^example\.count = 1: must be at least 2$"):
        check_least(fields, "example.", share=0, count=2)
    with pytest.raises(ValueError, match=r"^share = nan: must be at least 0$"):
        check_least(Example(1, share=float("nan")), "", share=0)
    with pytest.raises(ValueError, match=r"^name = 'b': must be one of \('a', 'c'\)$"):
        check_choice(fields, "", on=(False,), name=("a", "c"))


def test_a_single_tuple_in_place_of_several_is_explained():
    section = {"buckets": (320, 224)}
    with pytest.raises(ValueError, match=r"must be tuples \(length, answers\); one is written"):
        build(PackingConfig, section, "packing")
    with pytest.raises(ValueError, match=r"one is written \(\(3,\),\)$"):
        build(PackingConfig, {"buckets": (3,)}, "packing")


@dataclasses.dataclass(frozen=True)
class Pair:
    low: int = 1
    high: int = 9

    def __post_init__(self):
        check_least(self, "pair.", low=1)
        if self.high < self.low:
            raise ValueError(f"pair.high = {self.high}: must be at least pair.low")


def _collect(**fields: Any) -> tuple[Any, dict[str, str]]:
    def make(values: dict[str, Any]) -> tuple[Pair, int]:
        if values["count"] < 0:
            raise FileNotFoundError("count = -1: no such file")
        if values["count"] == 3:
            raise ValueError("nothing works")
        if values["count"] == 5:
            raise ValueError("count[0] = 5: no list")
        if values["count"] == 4:
            raise ValueError("lora.rank = 0: of no section")
        return build(Pair, values["pair"], "pair"), values["count"]

    def find_conflicts(pair_and_count: tuple[Pair, int]) -> list[str]:
        pair, _ = pair_and_count
        fields = [f"pair.high = {pair.high}", f"pair.low = {pair.low}"]
        return [f"{field}: must be below count" for field in fields if pair.high == 9]

    stand_ins = {"pair": {"low": 1, "high": 9}, "count": 0}
    fields = {"pair": {}, "count": 0} | fields
    before = copy.deepcopy((fields, stand_ins))
    result = collect(make, fields, stand_ins, find_conflicts)
    assert (fields, stand_ins) == before
    return result


def test_collect_goes_on_with_a_stand_in_after_each_mistake() -> None:
    assert _collect(pair={"low": 2, "high": 3}, count=1) == ((Pair(2, 3), 1), {})
    built, mistakes = _collect(pair={"low": 0, "high": "x", "noSuch": 1}, count=-1)
    assert built == (Pair(), 0)  # its `high` is the stand-in, so that its conflict is no mistake
    assert mistakes.keys() == {"count", "pair.noSuch", "pair.high", "pair.low"}
    assert mistakes["count"] == "count = -1: no such file"
    assert mistakes["pair.high"] == "pair.high = 'x': must be int"
    assert mistakes["pair.low"] == "pair.low = 0: must be at least 1"


def test_conflicts_are_mistakes_of_fields_without_stand_ins() -> None:
    built, mistakes = _collect(pair={"low": 0, "high": 9})
    assert built == (Pair(), 0)
    assert [*mistakes] == ["pair.low", "pair.high"]


def test_section_is_replaced_if_no_stand_in_fits_its_other_fields() -> None:
    built, mistakes = _collect(pair={"low": 20, "high": 10})
    assert built == (Pair(), 0) and [*mistakes] == ["pair.high"]


def test_error_that_names_no_field_ends_the_search() -> None:
    assert _collect(count=3) == (None, {"": "nothing works"})
    assert _collect(count=4) == (None, {"lora.rank": "lora.rank = 0: of no section"})


def test_mistake_of_a_part_is_a_mistake_of_its_field() -> None:
    built, mistakes = _collect(pair={"low": 2, "high": 3}, count=5)
    assert (built, mistakes) == ((Pair(2, 3), 0), {"count": "count[0] = 5: no list"})


def test_stand_ins_stay_as_they_are() -> None:
    """Even if the stand-in of a whole section is refused, too."""
    messages = iter(["pair.low: first", "pair.low: second", "pair.high: third"])

    def make(_: dict[str, Any]) -> Pair:
        raise ValueError(next(messages, "nothing works"))

    stand_ins = {"pair": {"low": 1, "high": 9}}
    assert collect(make, {"pair": {}}, stand_ins)[0] is None
    assert stand_ins == {"pair": {"low": 1, "high": 9}}
