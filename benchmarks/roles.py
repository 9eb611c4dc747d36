"""Benchmark of the roles' shares of the gradient under each loss aggregation, on the demo."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import optax

from benchmarks.base import BenchmarkCommand
from spell_jax.configs import tiny
from spell_jax.data.clusters import ROLES
from spell_jax.learner import packing
from spell_jax.learner.learner import Learner
from spell_jax.learner.update import TrainState
from spell_jax.trainer import build, state
from spell_jax.trainer.rollouts import Rollouts


@dataclasses.dataclass
class Roles(BenchmarkCommand):
    """Rolls out the first update of the demo and differentiates the loss of each role alone.

    "groups" and "tokens" are those of each role, tokens of answers. For each aggregation, "share"
    is the norm of each role's gradient over the sum of the three norms, and "norm" that of the
    whole gradient before clipping.
    """

    seed: Annotated[int, "seed of the run"] = 0
    questions: Annotated[int, "questions proposed"] = tiny.get_config().algorithm.questions

    def run(self) -> dict[str, Any]:
        config = tiny.get_config()
        config.policy.compute_dtype = "float32"  # so that the roles' gradients add up to the whole
        config.seed = self.seed
        config.algorithm.questions = config.algorithm.generation_batch = self.questions
        run = build.make_run(config)
        models = state.first_models(run)
        rollout = Rollouts(run, models, lambda: False).take(1)
        assert rollout is not None
        return {
            "groups": {role: len(_of_role(rollout.groups, role)) for role in ROLES},
            "tokens": {
                role: sum(group.answer_tokens for group in _of_role(rollout.groups, role))
                for role in ROLES
            },
            "aggregations": {
                name: _shares(
                    run.learner,
                    models["policy"],
                    packing.weigh(rollout.groups, name, config.sampler.max_tokens),
                )
                for name in packing.AGGREGATIONS
            },
        }


def _of_role(groups: Sequence[packing.TrainGroup], role: str) -> list[packing.TrainGroup]:
    return [group for group in groups if group.role == role]


def _shares(
    learner: Learner, policy: TrainState, weighed: Sequence[packing.TrainGroup]
) -> dict[str, Any]:
    parts = {role: _gradient(learner, policy, _of_role(weighed, role)) for role in ROLES}
    norms = {role: float(optax.tree.norm(part)) for role, part in parts.items()}
    total_norm = float(optax.tree.norm(jax.tree.map(lambda *leaves: sum(leaves), *parts.values())))
    return {
        "share": {role: norm / sum(norms.values()) for role, norm in norms.items()},
        "norm": total_norm,
    }


def _gradient(learner: Learner, policy: TrainState, groups: Sequence[packing.TrainGroup]) -> Any:
    with learner.on_mesh():
        params, carry = learner.fns.cast(policy.params), learner.fns.empty_carry()
        for batch in learner.pack(groups)[0]:
            placed = learner.place(batch)
            carry = learner.fns.accumulate(params, learner.frozen, carry, placed, None)
    return carry[0]
