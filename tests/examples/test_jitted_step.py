"""Tests of the example's jitted step against the trainer's update, on the same answers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from examples import jitted_step
from examples.jitted_step import Config, QuestionBatch
from spell_jax.data.samples import Sample
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.policy import weights
from spell_jax.policy.model import TINY_POLICY
from spell_jax.runtime import mesh as meshes
from spell_jax.selfplay import rules
from tests import tiny  # noqa: F401 (its import makes compilation quick)

# With this epsilon the first update is nearly the gradient, not nearly its sign.
OPTIMIZER = OptimizerConfig(learning_rate=1.0, epsilon=1.0, weight_decay=0.0)
STEPS = 2  # the second one shows that the optimizer's moments are carried
WEIGHTS = 1e-5  # largest difference of a weight; one update changes some by more than 1e-2
RELATIVE = 1e-4  # largest difference of a moment, as a share of its tensor's largest


class Step(NamedTuple):
    """One step of the example.

    Attributes:
      groups: the answers as the trainer takes them, with advantages computed here.
      params: weights after the step.
      mu: first moments of AdamW after the step.
      metrics: what the step returned.
    """

    groups: list[TrainGroup]
    params: Any
    mu: Any
    metrics: dict[str, float]


@functools.cache
def run_example(**sizes: int) -> tuple[Config, list[Step]]:
    """Run steps of the example from the shipped policy, on one device or on a mesh."""
    mesh = meshes.make_mesh(sizes or {"fsdp": 1}, None if sizes else jax.devices()[:1])
    policy, params = weights.load(TINY_POLICY, mesh)
    _, tokenizer = weights.read_config_and_tokenizer(TINY_POLICY)
    c = Config(policy, tokenizer, mesh, OPTIMIZER, groups=8, group_size=4)
    questions, truths = jitted_step.make_questions(c, STEPS * c.groups, seed=1)
    state, step = jitted_step.make_step(c, truths, params)
    steps = []
    for i in range(STEPS):
        batch = QuestionBatch(*(x[i * c.groups : (i + 1) * c.groups] for x in questions))
        placed, before = jax.device_put(batch, meshes.by_rows(mesh)), state
        with jax.set_mesh(mesh):
            state, metrics, answers = step(before, placed, jax.random.key(i))
        assert all(x.is_deleted() for x in jax.tree.leaves(before)), "donated"
        params, mu = _copied((state[0], optax.tree.get(state[1], "mu")))
        groups = _groups(c, batch, truths, _copied(answers))
        steps.append(Step(groups, params, mu, {name: float(x) for name, x in metrics.items()}))
    assert step._cache_size() == 1
    return c, steps


def _copied(tree: Any) -> Any:
    """Copy to NumPy. device_get shares memory on CPUs, and such arrays cannot be donated."""
    return jax.tree.map(np.array, tree)


def _groups(
    c: Config, batch: QuestionBatch, truths: list[tuple[str, str]], answers
) -> list[TrainGroup]:
    groups = []
    for row, (prompt, length, index) in enumerate(zip(*batch, strict=True)):
        slots = range(row * c.group_size, (row + 1) * c.group_size)
        tokens = [answers.tokens.id[n, : answers.new[n]] for n in slots]
        texts = [
            c.tokenizer.decode(ids.tolist()) if answers.stopped[n] else ""
            for n, ids in zip(slots, tokens, strict=True)
        ]
        rewards = np.array([rules.score(text, *truths[index]) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        sampled = [answers.tokens.logprob[n, : answers.new[n]] for n in slots]
        samples = [Sample(*pair) for pair in zip(tokens, sampled, strict=True)]
        groups.append(TrainGroup(prompt[:length], samples, list(advantages)))
    return groups


@functools.cache
def _learner(c: Config) -> Learner:
    answers = c.group_size * c.answer_tokens
    bucket = Bucket(c.prompt_tokens + answers, answers)
    packing = PackingConfig((bucket,), token_budget=c.groups * bucket.length)
    return Learner(c.policy, OPTIMIZER, LossConfig(), packing, c.mesh)


def compare(c: Config, steps: list[Step]) -> tuple[float, float, dict[str, float]]:
    """Return (largest weight error, largest relative moment error, metrics) vs. the trainer."""
    learner = _learner(c)
    state = learner.init(weights.load(TINY_POLICY)[1])
    absolute, relative, numbers = 0.0, 0.0, {}
    for step in steps:
        before = _copied(state.params)
        state, numbers = learner.update(state, step.groups)
        learner_params, mu = _copied((state.params, optax.tree.get(state.opt_state, "mu")))
        assert max(_differences(learner_params, before)) > 1e-2
        absolute = max(absolute, *_differences(step.params, learner_params))
        largest = [np.abs(x).max() for x in jax.tree.leaves(mu)]
        relative = max(relative, *np.divide(_differences(step.mu, mu), largest))
        assert numbers["gradient_norm"] < OPTIMIZER.clip_norm  # else clipping would hide its size
    return absolute, relative, numbers


def _differences(a: Any, b: Any) -> list[float]:
    """Return the largest difference of each tensor."""
    return jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b))


def check(**sizes: int) -> None:
    c, steps = run_example(**sizes)
    assert 0.2 < steps[0].metrics["reward"] < 0.9  # advantages are not 0
    absolute, relative, numbers = compare(c, steps)
    assert absolute < WEIGHTS
    assert relative < RELATIVE
    assert numbers["sampler_difference"] < 1e-4  # rollout and loss agree on logprobs
    for name in ("loss", "gradient_norm"):
        assert steps[-1].metrics[name] == pytest.approx(numbers[name], rel=1e-4, abs=1e-6)


def test_jitted_step_equals_the_trainers_update():
    check()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda group: [a - 0.1 for a in group.advantages],
        lambda group: [a / 2 for a in group.advantages],
        # As if each answer had the same weight, whatever its length.
        lambda group: [
            a * group.answer_tokens / len(group.samples) / len(sample.tokens)
            for a, sample in zip(group.advantages, group.samples, strict=True)
        ],
    ],
    ids=["no mean", "no deviation", "mean over answers"],
)
def test_comparison_detects_wrong_advantages(wrong: Callable[[TrainGroup], list[float]]):
    c, steps = run_example()
    groups = [dataclasses.replace(g, advantages=wrong(g)) for g in steps[0].groups]
    absolute, relative, _ = compare(c, [steps[0]._replace(groups=groups)])
    assert absolute > 10 * WEIGHTS
    assert relative > 10 * RELATIVE


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "context": 2}],
    ids=lambda sizes: " ".join(f"{axis}={size}" for axis, size in sizes.items()),
)
def test_jitted_step_equals_the_trainers_update_on_a_mesh(sizes: dict[str, int]):
    check(**sizes)
