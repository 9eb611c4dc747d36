"""A whole reinforcement-learning step in one jitted function, on one device or a mesh.

    python examples/jitted_step.py --steps=20

1. Questions about generated documents, with their answers, are made on the host.
2. Rollout: each prompt is read once, and G answers to it are sampled from the same KV cache.
3. Reward: text rules compare the answers with the true ones. The program calls Python for it.
4. Loss: the policy gradient of the answers' tokens, with advantages relative to their group.
5. Step: parts 2 to 4, the gradient and AdamW, compiled as one program with donated state.

Shapes: B prompts, P prompt tokens, G answers per prompt, S answer tokens, N = B G decode slots,
T = P + G S tokens of a training row. The trainer (python -m spell_jax.train) uses the same parts
for three roles, and adds prompts of any length, packing, refilled slots and checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from spell_jax.attention import attend, paged
from spell_jax.data import tiny_world
from spell_jax.learner import lm_head
from spell_jax.learner.advantages import group_advantages
from spell_jax.learner.loss import policy_loss
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import kv_cache, programs
from spell_jax.sampler.sampling import Sampling
from spell_jax.selfplay import prompts, rules


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the step is compiled for."""

    policy: PolicyConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-4, b2=0.95)
    groups: int = 32  # B, a multiple of the number of devices
    group_size: int = 8  # G
    prompt_tokens: int = 64  # P
    answer_tokens: int = 32  # S, at most P


# ------------------------------------------------------------------------------ 1. Questions


class Question(NamedTuple):
    prompt: list[int]
    task: str
    answer: str


class Batch(NamedTuple):
    tokens: Any  # prompts, int32 [B, P], padded at the end
    length: Any  # int32 [B]
    question: Any  # int32 [B], index into the list of questions


def draw_question(tokenizer: Tokenizer, seed: tuple[int, ...]) -> Question:
    """A question of one of three kinds about 4 to 7 documents, as the policy reads it."""
    rng = np.random.default_rng(seed)
    documents = tiny_world.make_documents(rng, int(rng.integers(4, 8)))
    kind = ("lookup", "two_hop", "math")[rng.integers(3)]
    question = tiny_world.draw_question(rng, documents, kind)
    task = tiny_world.TASK_OF_KIND[question.kind]
    text = prompts.load("compact").responder(task, documents, question.text)
    return Question(tokenizer.chat(text), task, question.answer)


def make_batch(c: Setup, questions: Sequence[Question], first: int) -> Batch:
    """The next B questions."""
    chosen = questions[first : first + c.groups]
    tokens = [q.prompt + [0] * (c.prompt_tokens - len(q.prompt)) for q in chosen]
    length = [len(q.prompt) for q in chosen]
    index = range(first, first + c.groups)
    return Batch(*(np.array(x, np.int32) for x in (tokens, length, index)))


# ------------------------------------------------------------------------------ 2. Rollout


def sample(c: Setup, params: transformer.Params, batch: Batch, key: jax.Array) -> programs.Sampled:
    """G answers to each prompt, tokens [N, S], by one prefill and one decode call.

    The KV cache is a pool of pages, here of P tokens: one for each prompt, one for each answer.
    """
    B, G, P, N = c.groups, c.group_size, c.prompt_tokens, c.groups * c.group_size
    shards = meshes.row_shards(c.mesh)  # each counts its own prompts, slots and pages from 0
    prompt, slot = jnp.arange(B) % (B // shards), jnp.arange(N) % (N // shards)  # [B], [N]
    prompt_page, slot_page = 1 + prompt, 1 + B // shards + slot  # page 0 is scratch
    _, kv_heads = kv_cache.head_split(c.mesh, c.policy.heads, c.policy.kv_heads)
    size = c.policy.layers, shards + B + N, kv_heads, P, c.policy.head_size
    state = programs.State(
        pages=paged.empty(*size, jnp.float32),
        prompt_hidden=jnp.zeros((B, c.policy.width)),
        hidden=(jnp.zeros((N, c.policy.width)),),
        own=(),
    )
    pages = programs.PromptPages(
        tokens=batch.tokens,  # [B, P]
        start=jnp.zeros(B, jnp.int32),
        length=batch.length,
        page=prompt_page,
        table=prompt_page[:, None],
        prefilled=jnp.arange(B),
    )
    slots = programs.Slots(
        prefilled=jnp.arange(B).repeat(G),  # [N]
        prompt_length=batch.length.repeat(G),
        count=jnp.zeros(N, jnp.int32),
        limit=jnp.full(N, c.answer_tokens),
        key=jax.random.key_data(jax.random.split(key, B)).repeat(G, axis=0),  # [N, 2]
        sample_index=jnp.arange(N) % G,
        row=prompt.repeat(G),
        cell=jnp.arange(N) % G,
        slot=slot.reshape(B, G),
        prompt_table=prompt_page[:, None],
        prompt_visible=batch.length[:, None].repeat(G, axis=1),  # [B, G]
        suffix_table=slot_page[:, None],
        sampling=Sampling(*(jnp.full(N, x) for x in (1.0, 0, 1.0, 0.0))),  # temperature 1
        enough=jnp.int32(N),  # go on until all answers have ended
    )
    with nn.logical_axis_rules(meshes.RULES):  # weights are gathered for many tokens,
        state = programs.prefill(c.policy, params, state, pages)
    with nn.logical_axis_rules(meshes.DECODE_RULES):  # but stay in place for few
        call = functools.partial(programs.decode, lane=0, page_size=P, steps=c.answer_tokens)
        return call(c.policy, params, state, slots, stop_ids=c.tokenizer.stop_ids)[1]


# ------------------------------------------------------------------------------ 3. Reward


def score(c: Setup, questions: Sequence[Question], index, tokens, length) -> np.ndarray:
    """Rewards [B, G] of the answers [N, S] to questions [B], 0 or 1 by the text rules."""
    asked = [questions[i] for i in np.asarray(index) for _ in range(c.group_size)]
    answers = [row[:n].tolist() for row, n in zip(np.asarray(tokens), np.asarray(length))]
    texts = map(c.tokenizer.decode, answers)
    rewards = [rules.score(text, q.answer, q.task) for text, q in zip(texts, asked, strict=True)]
    return np.array(rewards, np.float32).reshape(c.groups, c.group_size)


# ------------------------------------------------------------------------------ 4. Loss


def loss(c: Setup, params: transformer.Params, batch: Batch, answers, advantages) -> jax.Array:
    """Mean over answer tokens of -advantage * logprob, on rows [prompt | answer 1 | ... | answer G].

    Every answer attends to the prompt and to itself: a key is seen up to its `last_query`.
    """
    P, G, S = c.prompt_tokens, c.group_size, c.answer_tokens
    past, step = jnp.arange(P), jnp.arange(S)
    length = batch.length[:, None]  # [B, 1]
    start = P + S * jnp.arange(G)[:, None]  # [G, 1], columns of the row
    real = step < answers.new.reshape(-1, G, 1)  # [B, G, S]

    def row(prompt: jax.Array, answer: jax.Array) -> jax.Array:
        """[B, P] and [B, G, S] to [B, T]."""
        answer = jnp.broadcast_to(answer, real.shape).reshape(-1, G * S)
        return jnp.concatenate([jnp.broadcast_to(prompt, batch.tokens.shape), answer], axis=1)

    target = answers.tokens.reshape(real.shape)
    tokens = row(batch.tokens, target)  # [B, T]
    positions = row(past, length[..., None] + step)
    last_query = row(
        jnp.where(past < length, P + G * S - 1, -1), jnp.where(real, start + S - 1, -1)
    )
    # The prompt's last token predicts the first token of every answer.
    source = jnp.where(step == 0, length[..., None] - 1, start + step - 1)  # [B, G, S]
    with nn.logical_axis_rules(meshes.RULES):
        kernel, context = attend.packed(c.policy.attention), {"last_query": last_query}
        hidden, *_ = transformer.hidden_states(
            c.policy, params, tokens, positions, kernel, context=context
        )
    flat = (x.reshape(-1, G * S) for x in (source, target))
    logprobs, _ = lm_head.score_tokens(c.policy, params, hidden, *flat, temperature=1.0)
    old = jax.lax.stop_gradient(logprobs)  # on-policy: the ratio is 1, its gradient is not
    each = jnp.broadcast_to(advantages[..., None], real.shape).reshape(logprobs.shape)
    value, _ = policy_loss(logprobs, old, each, (real / real.sum()).reshape(logprobs.shape))
    return value


# ------------------------------------------------------------------------------ 5. Step


class State(NamedTuple):
    params: transformer.Params
    moments: optax.OptState


def make_state(c: Setup, params: transformer.Params) -> State:
    """The state on the mesh: moments lie where their weights do."""
    state = State(params, c.optimizer.make().init(params))
    everywhere = meshes.replicated(c.mesh)
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding if x.ndim else everywhere, state))


def make_step(c: Setup, questions: Sequence[Question], state: State) -> Callable[..., Any]:
    """Compiles (state, batch, key) -> (state, metrics, answers)."""
    def step(state: State, batch: Batch, key: jax.Array):
        answers = sample(c, state.params, batch, key)
        shape = jax.ShapeDtypeStruct((c.groups, c.group_size), jnp.float32)
        host = functools.partial(score, c, questions)
        rewards = jax.pure_callback(host, shape, batch.question, answers.tokens, answers.new)
        advantages = group_advantages(rewards)
        objective = functools.partial(loss, c)
        value, gradient = jax.value_and_grad(objective)(state.params, batch, answers, advantages)
        updates, moments = c.optimizer.make().update(gradient, state.moments, state.params)
        metrics = {"reward": rewards.mean(), "loss": value, "gradient_norm": optax.tree.norm(gradient)}
        return State(optax.apply_updates(state.params, updates), moments), metrics, answers

    out = jax.tree.map(lambda x: x.sharding, state), meshes.replicated(c.mesh), meshes.replicated(c.mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=out)


def main(_) -> None:
    given, mesh = flags.FLAGS, meshes.make_mesh()
    policy, params = weights.load(TINY_POLICY, mesh)
    _, tokenizer = weights.identify(TINY_POLICY)
    c = Setup(policy, tokenizer, mesh, groups=given.groups, group_size=given.group_size)
    questions = [draw_question(tokenizer, (given.seed, i)) for i in range(c.groups * given.steps)]
    state = make_state(c, params)
    step = make_step(c, questions, state)
    for number in range(given.steps):
        start, key = time.monotonic(), jax.random.fold_in(jax.random.key(given.seed), number)
        batch = jax.device_put(make_batch(c, questions, number * c.groups), meshes.by_rows(mesh))
        with jax.set_mesh(mesh):
            state, metrics, answers = step(state, batch, key)
        found = {name: float(value) for name, value in metrics.items()}
        text = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"step {number}  {text}  seconds {time.monotonic() - start:.1f}", flush=True)


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 20, "Number of updates.", lower_bound=1)
    flags.DEFINE_integer("groups", 32, "Questions of a step, B.", lower_bound=1)
    flags.DEFINE_integer("group_size", 8, "Answers to a question, G.", lower_bound=2)
    flags.DEFINE_integer("seed", 0, "Seed of questions and answers.")
    app.run(main)
