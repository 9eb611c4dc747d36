"""Tests of configs/one_gpu.py: every run fits every GPU of its class."""

from __future__ import annotations

import re

import jax
import pytest

from spell_jax.configs import one_gpu
from spell_jax.launch import rental_check, topologies
from spell_jax.policy import transformer
from spell_jax.policy.model import known_shape
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "howto" / "one_gpu.md").read_text()
SMALLEST = {"24gb": ("l4:1", "rtx3090:1", "rtx4090:1"), "80gb": ("h100:1", "a100-80:1")}


def _check(name: str, topology: str):
    config = one_gpu.get_config(name)
    config.data.source = "tiny"
    return rental_check.check_fields(config, topology)


@pytest.mark.parametrize("name", one_gpu.RUNS)
def test_run_fits_every_gpu_of_its_class(name: str) -> None:
    gpus = SMALLEST["24gb" if "-24gb" in name else "80gb"]
    checked = _check(name, gpus[0])
    assert checked.mistakes == [] and checked.plan
    assert checked.topology and all(
        topologies.find(gpu).hbm >= checked.topology.hbm * 0.999 for gpu in gpus
    )
    assert bool(checked.policy and checked.policy.lora) == name.endswith("-lora")
    # The page has the planned memory.
    (row,) = (line for line in PAGE.splitlines() if f"`{name}`" in line and line.startswith("|"))
    assert row.split("|")[2].strip() == f"{checked.plan.worst.total / topologies.GIB:.1f}"


@pytest.mark.parametrize("name", one_gpu.RUNS)
def test_run_holds_a_group_in_a_row_and_many_groups_in_the_pool(name: str) -> None:
    config = one_gpu.get_config(name)
    group = config.sampler.max_prompt + 8 * config.sampler.max_tokens
    assert config.packing.token_budget >= group
    assert config.sampler.kv_cache_tokens >= 8 * group
    documents = config.data.documents_per_cluster * config.data.max_document_tokens
    assert documents < config.sampler.max_prompt


def test_a_larger_pool_does_not_fit() -> None:
    """The check is of the GPU's memory: the runs of 80 GB do not fit 24 GB."""
    for name in one_gpu.RUNS:
        if name.endswith("-80gb"):
            (mistake,) = _check(name, "l4:1").mistakes
            assert re.search(r"takes \d+\.\d\d GiB of a chip, .* but l4:1 has 20.27", mistake)


# Parameters as the models' cards count them.
COUNTS = {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688}


@pytest.mark.parametrize("size", COUNTS)
def test_shapes_have_their_numbers_of_parameters(size: str) -> None:
    policy = known_shape(f"models/Qwen2.5-{size}-Instruct")
    assert policy
    params, _ = transformer.abstract_params(policy)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == COUNTS[size]


def test_unknown_run_lists_all() -> None:
    with pytest.raises(ValueError, match=r"^configs/one_gpu.py:x: must be one of qwen2.5-0.5b-"):
        one_gpu.get_config("x")
