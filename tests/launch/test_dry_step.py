"""Tests of launch/dry_step.py: every algorithm's step runs without models."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from spell_jax.algorithms import registry
from spell_jax.config import default_config
from spell_jax.launch import dry_step, topologies
from spell_jax.launch.dry_step import DryStep, DryTokenizer, Workload
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests import noise, tiny

SAMPLING = SamplerConfig(max_tokens=256, max_prompt=2048, kv_cache_tokens=2**16, slots=32)
WORK = Workload(prompt=2048, tokens=32, verdict_tokens=4)
FIELDS: dict[str, dict[str, Any]] = {name: {} for name in registry.ALGORITHMS}
FIELDS["reconstruction"] = {"algorithm.documents": 8}
FIELDS["eapo"] = {"algorithm.questions": 8}
FIELDS["self_distillation"] = {"loss.distillation_weight": 1.0}


@dataclasses.dataclass
class SamplerSizes:
    """The part of a Sampler that a dry step reads."""

    config: SamplerConfig
    shape: Any
    shards: int
    policy: PolicyConfig


def _step(name: str, work: Workload = WORK, **fields: Any) -> DryStep:
    config = default_config(name)
    rounds = {"algorithm.generation_batch": 16} if "questioner" in config.algorithm else {}
    rounds |= {"algorithm.questions": 8} if "responder" in config.algorithm else {}
    noise.with_fields(config, rounds | FIELDS[name] | fields)
    mesh: Any = topologies.abstract_mesh(topologies.find("v5e-4"), {"fsdp": 4})
    sizes = SAMPLING, SAMPLING.shape(mesh), meshes.row_shards(mesh)
    sampler = SamplerSizes(*sizes, tiny.POLICY)
    return dry_step.run_step(config, cast(Sampler, sampler), work)


def _groups(step: DryStep) -> dict[tuple[str, int], int]:
    """Count groups by name and number of answers."""
    return dict(Counter((group.name, len(group.samples)) for group in step.groups))


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_every_algorithm_samples_and_trains(name: str) -> None:
    step = _step(name)
    counts = step.counts_by_agent["responder"]
    assert counts.requests >= 8 and counts.calls > 0 and counts.passes > 0
    prompts = [len(group.prompt) for group in step.groups if group.name == "responder"]
    assert len(prompts) >= 8
    longest = [len(g.aligned.prompt) if g.aligned else len(g.prompt) for g in step.groups]
    assert 0.75 * WORK.prompt < max(longest) <= WORK.prompt


def test_spell_asks_all_of_its_roles() -> None:
    step = _step("spell", **{"algorithm.reader.source": "frozen_reader"})
    requests = {name: counts.requests for name, counts in step.counts_by_agent.items()}
    # 16 proposals with an answer without documents each; half of the questions are answered.
    expected = {"questioner": 16, "responder": 24, "reference_reader": 8, "verifier": 64}
    assert requests == expected
    # 8 good questions and as many bad ones, and an eighth of the answers' rows in verdicts.
    assert _groups(step) == {("responder", 8): 8, ("questioner", 1): 16, ("verifier", 8): 1}


def test_rounds_follow_from_the_mixed_share() -> None:
    step = _step("spell", dataclasses.replace(WORK, mixed=0.5))
    assert step.counts_by_agent["questioner"].requests == 32  # 4 of 8 answered ones a round
    assert _groups(step)["responder", 8] == 8


def test_pairs_have_their_prompts() -> None:
    (group, *_) = _step("longpo").groups
    assert len(group.samples) == 2 and group.reference_prompt is not None
    assert len(group.reference_prompt) < len(group.prompt)
    (group, *_) = _step("solopo").groups
    assert group.aligned is not None and len(group.aligned.prompt) > len(group.prompt)


def test_reward_model_has_counts_of_its_own() -> None:
    assert _step("eapo").counts_by_agent["reward_model"].requests == 8
    assert "reward_model" not in _step("eapo", **{"algorithm.reward_model": "none"}).counts_by_agent


def test_longer_replies_take_more_passes() -> None:
    short, long = _step("rlvr"), _step("rlvr", dataclasses.replace(WORK, tokens=256))
    passes = [step.counts_by_agent["responder"].passes for step in (short, long)]
    assert passes[0] < passes[1] / 2
    assert long.counts_by_agent["responder"].tokens == 16 * 8 * 256  # the cap


def test_tokenizer_is_exact_and_shares_beginnings() -> None:
    tokenizer = DryTokenizer()
    for text in ("", "abcd", "abcde", "Zürich"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.count(text) == len(ids)
        assert tokenizer.decode([*ids.tolist(), 0, 0]) == text
    np.testing.assert_array_equal(tokenizer.chat("abcdefgh")[:1], tokenizer.chat("abcd"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("answered", 0.0, "answered = 0.0: must be above 0, at most 1"),
        ("mixed", 1.5, "mixed = 1.5: must be above 0, at most 1"),
        ("documents", 0, "documents = 0: must be at least 1"),
    ],
)
def test_workload_out_of_range_is_rejected(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(WORK, **{field: value})


def test_short_prompts_and_unknown_algorithms_are_rejected(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"length = 512: must be at least 6\d\d, for 10 documents"):
        _step("rlvr", dataclasses.replace(WORK, prompt=512))
    spec = dataclasses.replace(registry.ALGORITHMS["rlvr"], write_replies=None)
    monkeypatch.setitem(registry.ALGORITHMS, "rlvr", spec)
    with pytest.raises(ValueError, match=r"^algorithm.name = 'rlvr': must have .* reply, for"):
        _step("rlvr")
