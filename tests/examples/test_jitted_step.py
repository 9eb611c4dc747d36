"""Tests of the example's jitted step against the trainer's rewards and update, on its samples."""

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from examples import jitted_step
from examples.jitted_step import Config, Host
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.data import tiny_world
from spell_jax.data.clusters import Cluster
from spell_jax.data.samples import Sample
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.policy import weights
from spell_jax.policy.model import TINY_POLICY
from spell_jax.rollout.replies import Prompt, Replies, Reply, make_reply
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.in_jit import PaddedPrompts, PaddedReplies
from tests.algorithms.scripted import PROMPTS, make_context

# With this epsilon the first update is nearly the gradient, not nearly its sign.
OPTIMIZER = OptimizerConfig(learning_rate=1.0, epsilon=1.0, weight_decay=0.0, clip_norm=10.0)
# With this seed both steps have trained groups of all roles.
SEED, STEPS = 0, 2  # the second step shows that the optimizer's moments are carried
WEIGHTS = 1e-5  # largest difference of a weight; one update changes some by more than 1e-2
RELATIVE = 1e-4  # largest difference of a moment, as a share of its tensor's largest


class Step(NamedTuple):
    """One step of the example.

    Attributes:
      groups: groups that the trainer's algorithm makes of the step's replies.
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
    policy_and_tokenizer = weights.read_config_and_tokenizer(TINY_POLICY)
    algorithm = jitted_step.ALGORITHM
    verifier = replace(algorithm.verifier, group_size=4)
    algorithm = replace(algorithm, group_size=4, verifier=verifier)
    c = Config(*policy_and_tokenizer, mesh, 16, OPTIMIZER, algorithm)
    clusters = tiny_world.make_clusters(SEED, STEPS * c.clusters, (8,))
    host = Host(c, [cluster.documents for cluster in clusters])
    (fns, step), steps = jitted_step.make_step(c, host), []
    state = fns.init(weights.load(TINY_POLICY, mesh)[1])
    for i in range(STEPS):
        before = state
        with jax.set_mesh(mesh):
            state, metrics, rollout = step(before, np.array([SEED, i]))
        assert all(x.is_deleted() for x in jax.tree.leaves(before)), "donated"
        params, mu = _copied((state.params, optax.tree.get(state.opt_state, "mu")))
        groups = _groups(c, host, i, _copied(rollout))
        steps.append(Step(groups, params, mu, {name: float(x) for name, x in metrics.items()}))
    assert step._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
    return c, steps


def _copied(tree: Any) -> Any:
    """Copy to NumPy. device_get shares memory on CPUs, and such arrays cannot be donated."""
    return jax.tree.map(np.array, tree)


def _groups(c: Config, host: Host, step: int, rollout) -> list[TrainGroup]:
    """Let the trainer's algorithm read the replies and make the groups of its update."""
    models = SampledModels(c, dict(zip(jitted_step.SIZES, rollout, strict=True)))
    context = make_context(count_tokens=c.tokenizer.count, deal=lambda _: None)
    algorithm = Spell(c.algorithm, context)
    episodes, rng = [], np.random.default_rng(0)
    for b, (task, documents) in enumerate(host.clusters_of(step * c.clusters)):
        letter = "ABCD"[b % 4] if task == "multiple_choice" else None
        text = PROMPTS.questioner(task, documents[:2], (), letter)
        cluster = Cluster(str(b), tuple(documents))
        episode = SpellEpisode(task, cluster, (0, 1), (), questioner_prompt=text)
        answered = _result(algorithm.rollout_one(models.ask, episode))
        episodes.append(algorithm.reward(algorithm.answering.reward(answered, rng)))
    assert not any(models.replies.values()), "every reply has been read"
    return algorithm.groups(episodes, (SEED, step))[0]


def _result(coroutine: Coroutine) -> Any:
    """Run a coroutine whose calls are answered at once."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


class SampledModels:
    """Models that answer with the replies of a rollout, by role and prompt."""

    def __init__(self, c: Config, rollout: dict[str, tuple[PaddedPrompts, PaddedReplies]]):
        self._c = c
        # Equal prompts, such as two equal answers to be judged, are answered in their order.
        self.replies: dict[tuple[str, bytes], deque[Reply]] = defaultdict(deque)
        for role, (prompts, replies) in rollout.items():
            per_prompt = len(replies.tokens) // len(prompts.tokens)
            for row, (ids, length) in enumerate(zip(*prompts, strict=True)):
                if length:
                    places = range(row * per_prompt, (row + 1) * per_prompt)
                    reply = self._reply(ids[:length], replies, places)
                    self.replies[role, ids[:length].tobytes()].append(reply)

    def _reply(self, prompt: np.ndarray, replies: PaddedReplies, places: Sequence[int]) -> Reply:
        lengths = [replies.length[n] for n in places]
        samples = [
            Sample(replies.tokens[n, :size], replies.logprobs[n, :size], bool(replies.stopped[n]))
            for n, size in zip(places, lengths, strict=True)
        ]
        decode, truncated = self._c.tokenizer.decode, self._c.algorithm.truncated
        return make_reply(Prompt(prompt.tolist()), samples, decode, truncated)

    async def ask(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
        **options: Any,
    ) -> Replies:
        del model, temperature, options  # the rollout has samples of one policy at temperature 1
        replies = Replies(len(prompts))
        for place, text in enumerate(prompts):
            ids = np.array(self._c.tokenizer.chat(text), np.int32)
            if len(ids) <= jitted_step.SIZES[role][0]:
                reply = replies[place] = self.replies[role, ids.tobytes()].popleft()
                assert len(reply.samples) == group
        return replies


@functools.cache
def _learner(c: Config) -> Learner:
    P, S = jitted_step.SIZES["responder"]
    answers = c.algorithm.group_size * S
    packing = PackingConfig((Bucket(P + answers, answers),), token_budget=8 * (P + answers))
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
    for step in steps:
        assert set(Counter(group.name for group in step.groups)) == set(jitted_step.SIZES)
    assert 0.2 < steps[0].metrics["solved"] < 0.9
    absolute, relative, numbers = compare(c, steps)
    assert absolute < WEIGHTS
    assert relative < RELATIVE
    assert numbers["sampler_difference"] < 1e-4  # rollout and loss agree on logprobs
    for name, trainers_name in (("loss", "loss"), ("norm", "gradient_norm")):
        expected = pytest.approx(numbers[trainers_name], rel=1e-4, abs=1e-6)
        assert steps[-1].metrics[name] == expected


@pytest.mark.slow
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
    groups = [replace(group, advantages=wrong(group)) for group in steps[0].groups]
    _expect_difference(c, steps[0]._replace(groups=groups))


@pytest.mark.parametrize("role", jitted_step.SIZES)
def test_comparison_detects_a_missing_role(role: str):
    c, steps = run_example()
    groups = [group for group in steps[0].groups if group.name != role]
    _expect_difference(c, steps[0]._replace(groups=groups))


def _expect_difference(c: Config, step: Step) -> None:
    absolute, relative, _ = compare(c, [step])
    assert absolute > 10 * WEIGHTS
    assert relative > 10 * RELATIVE


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "context": 2}],
    ids=lambda sizes: " ".join(f"{axis}={size}" for axis, size in sizes.items()),
)
def test_jitted_step_equals_the_trainers_update_on_a_mesh(sizes: dict[str, int]):
    check(**sizes)
