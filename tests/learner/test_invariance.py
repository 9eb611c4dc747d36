"""Tests that an update does not depend on how its tokens are packed, computed and placed.

Every test is one combination of the policy's kind, the packing, the mesh, the attention kernel, and
the recomputation in the backward pass. A set with every pair of two choices always runs. With `make
test-long` all policies, packings and meshes run, each with the next kernel and remat in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import jax
import numpy as np
import optax
import pytest

from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.policy import lora
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.runtime import mesh as meshes
from tests import tiny

EXPERTS: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "feed_forward": 24}
POLICIES = {
    "dense": tiny.POLICY,
    "experts": dataclasses.replace(tiny.POLICY, qkv_bias=False, qk_norm=True, **EXPERTS),
    "adapters": dataclasses.replace(tiny.POLICY, lora=LoraConfig(rank=4, alpha=4.0)),
    "untied": dataclasses.replace(tiny.POLICY, tied_embeddings=False),
    "windows": dataclasses.replace(tiny.POLICY, window=5, window_layers=(1,)),
}
PACKINGS = {
    "one micro-batch": PackingConfig((Bucket(48, 32),), 384),
    "packed wide": PackingConfig((Bucket(160, 96),), 160),
    "many micro-batches": PackingConfig((Bucket(24, 16), Bucket(32, 24)), 64),
    "split groups": PackingConfig((Bucket(24, 8),), 48),
    "chosen": PackingConfig("auto", 160),
    "groups": PackingConfig((Bucket(48, 32),), 384, shared_prefix="group"),
    "repeated prompts": PackingConfig((Bucket(48, 32),), 192, shared_prefix="none"),
}
# A mesh, and whether keys travel around a ring.
PLACES: dict[str, tuple[dict[str, int], bool]] = {
    "one device": ({"fsdp": 1}, False),
    "fsdp": ({"fsdp": 8}, False),
    "rows and heads": ({"data": 2, "fsdp": 2, "tensor": 2}, False),
    "context gathered": ({"context": 8}, False),
    "context ring": ({"context": 8}, True),
    "context and heads, ring": ({"context": 4, "tensor": 2}, True),
    "all axes": ({"fsdp": 2, "context": 2, "expert": 2}, False),
    "all axes, ring": ({"fsdp": 2, "context": 2, "expert": 2}, True),
}
KERNELS = ("dense", "chunked", "splash", "triton")
REMAT = ("none", "block", "attention", "dots", "offload")
CHOICES = (tuple(POLICIES), tuple(PACKINGS), tuple(PLACES), KERNELS, REMAT)


def _alike(groups: list[TrainGroup]) -> list[TrainGroup]:
    """Change the prompts: prompts 1 and 2 begin with prompt 0, and prompt 4 equals prompt 3."""
    prompts = [np.asarray(group.prompt) for group in groups]
    prompts[1] = np.concatenate([prompts[0], prompts[1][:3]])
    prompts[2] = np.concatenate([prompts[0], prompts[2][:2]])
    prompts[4] = prompts[3]
    return [dataclasses.replace(g, prompt=p) for g, p in zip(groups, prompts, strict=True)]


GROUPS = _alike(tiny.groups(7, seed=1))
# With this epsilon a step is a smooth function of the gradient, not nearly its sign.
SMOOTH = OptimizerConfig(learning_rate=0.01, epsilon=0.1, weight_decay=0.1)
# A loss with every term: a ratio that is not 1, clipping, the entropy's gradient.
LOSS = LossConfig(old_logprobs="rollout", entropy_weight=0.1)
BOUNDS = {"dense": 1e-5, "chunked": 1e-5, "splash": 5e-5, "triton": 5e-5}


def covering() -> list[tuple[str, ...]]:
    """Cover every pair of choices by few combinations, greedily: each is the best of 50 samples."""
    draw = random.Random(0)
    open_pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(CHOICES)), 2)
        for a, b in itertools.product(CHOICES[i], CHOICES[j])
    }
    combinations = []

    def pairs(combination: tuple[str, ...]):
        return set(itertools.combinations(enumerate(combination), 2)) & open_pairs

    while open_pairs:
        (i, a), (j, b) = min(open_pairs)
        candidates = [[draw.choice(choices) for choices in CHOICES] for _ in range(50)]
        for candidate in candidates:
            candidate[i], candidate[j] = a, b
        combinations.append(max(map(tuple, candidates), key=lambda c: len(pairs(c))))
        open_pairs -= pairs(combinations[-1])
    return combinations


@functools.cache
def _trained(name: str) -> Any:
    """Return random trained weights and adapters. At the start, adapters are otherwise zero."""
    return lora.split(POLICIES[name], tiny.weights(POLICIES[name]))[0]


def _step(policy: PolicyConfig, layout: PackingConfig, mesh: jax.sharding.Mesh, name: str):
    """Return (weights and Adam's first moments after an update, metrics).

    The moments show the gradients.
    """
    learner = Learner(policy, SMOOTH, LOSS, layout, mesh, 0.7)
    base = dataclasses.replace(policy, lora=None)
    state = learner.init(tiny.weights(base))
    params = jax.device_put(_trained(name), learner.fns.param_shardings)
    state, numbers = learner.update(state.replace(params=params), GROUPS)
    return jax.device_get((state.params, optax.tree.get(state.opt_state, "mu"))), numbers


@functools.cache
def _expected_step(name: str):
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    policy = dataclasses.replace(POLICIES[name], attention="dense")
    return _step(policy, PACKINGS["repeated prompts"], mesh, name)


def _check(combination: tuple[str, ...]) -> None:
    name, layout, place, kernel, remat = combination
    shape, ring = PLACES[place]
    mesh = meshes.make_mesh(shape, jax.devices()[:1] if place == "one device" else None)
    policy = POLICIES[name]
    ring = ring and not policy.window  # keys of policies with windows travel in rounds
    policy = dataclasses.replace(policy, attention=kernel, ring=ring, remat=remat)
    (state, numbers), (expected_state, expected_numbers) = (
        _step(policy, PACKINGS[layout], mesh, name),
        _expected_step(name),
    )

    def compare(path, array, expected):
        error = np.max(np.abs(array - expected)) / max(np.max(np.abs(expected)), 1e-30)
        assert error < BOUNDS[kernel], f"{jax.tree_util.keystr(path)}: {error}"

    jax.tree_util.tree_map_with_path(compare, state, expected_state)
    for key in ("loss", "gradient_norm", "entropy", "clip_share", "approx_kl", "answer_tokens"):
        assert numbers[key] == pytest.approx(expected_numbers[key], rel=1e-4, abs=1e-6), key
    assert numbers["refused_answers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("combination", covering(), ids=", ".join)
def test_update_is_invariant_for_every_pair_of_choices(combination: tuple[str, ...]) -> None:
    _check(combination)


def every_placing() -> list[tuple[str, ...]]:
    """Combine every policy, packing and place, in turn with one of 4 kernels and 5 remat kinds."""
    turns = zip(itertools.cycle(KERNELS), itertools.cycle(REMAT), strict=False)
    placings = itertools.product(*CHOICES[:3])
    return [(*placing, *turn) for placing, turn in zip(placings, turns, strict=False)]


@pytest.mark.long
@pytest.mark.parametrize("combination", every_placing(), ids=", ".join)
def test_update_is_invariant_for_every_policy_packing_and_mesh(
    combination: tuple[str, ...],
) -> None:
    _check(combination)


def test_covering_set_has_every_pair_of_choices() -> None:
    combinations = covering()
    for i, j in itertools.combinations(range(len(CHOICES)), 2):
        held = {(c[i], c[j]) for c in combinations}
        assert held == set(itertools.product(CHOICES[i], CHOICES[j]))
    assert len(combinations) < 80
