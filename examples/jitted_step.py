"""A whole step of reinforcement learning in one jitted function, on one device or a device mesh.

    python examples/jitted_step.py --steps=20

1. Questions about generated documents, with their true answers, are made on the host.
2. Rollout: each prompt is read once, and G answers to it are sampled from the same KV cache.
3. Reward: text rules compare answers with the true ones. The program calls Python for this.
4. Loss: the policy gradient of the answers' tokens, with advantages relative to their group.
5. Step: parts 2 to 4, the gradient and AdamW are one program, and its state is donated.

Shapes: B prompts, P prompt tokens, G answers per prompt, S answer tokens, A = G S, D width.
N = B G decode slots. The trainer (spell_jax/train.py) is made of the same parts. It adds the other
roles of self-play, prompts of any length, packing of rows, refilled slots and checkpoints.
"""

import functools
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from spell_jax.attention import attend, pages
from spell_jax.data import tiny_world
from spell_jax.learner import lm_head
from spell_jax.learner.advantages import group_advantages
from spell_jax.learner.loss import policy_loss
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime import entry, setup
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import kv_cache, programs, sampling
from spell_jax.sampler.sampled import Sampled
from spell_jax.selfplay import prompts, rules


class Config(NamedTuple):
    policy: PolicyConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-4, b2=0.95)
    groups: int = 32  # B, a multiple of the number of devices
    group_size: int = 8  # G
    prompt_tokens: int = 64  # P
    answer_tokens: int = 32  # S, at most P


# 1. Questions ------------------------------------------------------------------------------------
class QuestionBatch(NamedTuple):
    tokens: Any  # prompts, int32 [B, P], padded at the end
    length: Any  # int32 [B]
    index: Any  # int32 [B], in the list of (true answer, task)


def make_questions(c: Config, count: int, seed: int) -> tuple[QuestionBatch, list[tuple[str, str]]]:
    """Make look-ups, two-hop questions and sums on 4 to 7 documents; true answers and tasks."""
    rng, texts, truths = np.random.default_rng(seed), prompts.load("compact"), []
    tokens, length = np.zeros((count, c.prompt_tokens), np.int32), np.zeros(count, np.int32)
    for i in range(count):
        documents = tiny_world.make_documents(rng, int(rng.integers(4, 8)))
        question = tiny_world.sample_question(rng, documents, tiny_world.KINDS[i % 3])
        task = tiny_world.TASK_OF_KIND[question.kind]
        prompt = c.tokenizer.chat(texts.responder(task, documents, question.text))
        tokens[i, : len(prompt)], length[i] = prompt, len(prompt)
        truths.append((question.answer, task))
    return QuestionBatch(tokens, length, np.arange(count, dtype=np.int32)), truths


# 2. Rollout --------------------------------------------------------------------------------------
def sample(c: Config, params: transformer.Params, questions: QuestionBatch, key) -> Sampled:
    """Sample G answers per prompt. The KV cache has one page for each prompt and each answer."""
    B, G, P, D = c.groups, c.group_size, c.prompt_tokens, c.policy.width
    N, shards = B * G, meshes.row_shards(c.mesh)  # a shard counts prompts, slots, pages from 0
    prompt, slot = jnp.arange(B) % (B // shards), jnp.arange(N) % (N // shards)  # [B], [N]
    prompt_page, slot_page = 1 + prompt, 1 + B // shards + slot  # page 0 is scratch
    _, kv_heads = kv_cache.head_split(c.mesh, c.policy.heads, c.policy.kv_heads)
    # A page has P tokens, so an answer (S at most P) fits into one page, and G answers share their
    # prompt's page. Each shard has a scratch page, for writes of idle slots.
    pool = c.policy.layers, shards + B + N, kv_heads, P, c.policy.head_size, jnp.float32
    state = programs.State(pages.empty_pages(*pool), jnp.zeros((B, D)), (jnp.zeros((N, D)),), ())
    prompt_pages = programs.PromptPages(
        tokens=questions.tokens,  # [B, P]
        start=jnp.zeros(B, jnp.int32),
        length=questions.length,
        page=prompt_page,
        table=prompt_page[:, None],
        prefilled=jnp.arange(B),
    )
    slots = programs.Slots(
        prefilled=jnp.arange(B).repeat(G),  # [N]
        prompt_length=questions.length.repeat(G),
        count=jnp.zeros(N, jnp.int32),
        limit=jnp.full(N, c.answer_tokens),
        key=jax.random.key_data(jax.random.split(key, B)).repeat(G, axis=0),  # [N, 2]
        sample_index=jnp.arange(N) % G,
        row=prompt.repeat(G),
        cell=jnp.arange(N) % G,
        slot=slot.reshape(B, G),
        prompt_table=prompt_page[:, None],
        prompt_visible=questions.length[:, None].repeat(G, axis=1),  # [B, G]
        suffix_table=slot_page[:, None],
        sampling=sampling.Sampling(*(jnp.full(N, x) for x in (1.0, 0, 1.0, 0.0))),  # plain softmax
        most_idle=jnp.full(1, N * c.answer_tokens),  # go on until every answer has ended
    )
    with nn.logical_axis_rules(meshes.RULES):  # many tokens at once: weights move to them
        state, _ = programs.prefill(c.policy, params, state, prompt_pages)
    with nn.logical_axis_rules(meshes.DECODE_RULES):  # few tokens: they move to the weights
        decode = functools.partial(programs.decode, lane=0, page_size=P, steps=c.answer_tokens)
        return decode(c.policy, params, state, slots, stop_ids=c.tokenizer.stop_ids)[1]


# 3. Reward ---------------------------------------------------------------------------------------
def score(c: Config, truths: list[tuple[str, str]], index, tokens, length) -> np.ndarray:
    """Compute rewards [B, G] of answers [N, S] to questions [B], 0 or 1, on the host."""
    index, tokens, length = (np.asarray(x) for x in (index, tokens, length))
    texts = [c.tokenizer.decode(row[:n].tolist()) for row, n in zip(tokens, length, strict=True)]
    question_indices = index.repeat(c.group_size)
    # The rules parse text, and XLA has no strings: only this part leaves the program.
    rewards = [
        rules.score(text, *truths[i]) for text, i in zip(texts, question_indices, strict=True)
    ]
    return np.array(rewards, np.float32).reshape(c.groups, c.group_size)


# 4. Loss -----------------------------------------------------------------------------------------
def loss(params, c: Config, questions: QuestionBatch, answers: Sampled, advantages):
    """Compute the policy-gradient loss for advantages [B, G], a mean over the answers' tokens.

    A row is [prompt | answer 1 | ... | answer G].
    """
    # The prompt is read once for its G answers: P + G S tokens instead of G (P + S). The mask is a
    # number per key, the last query that sees the key. With the causal order, an answer then sees
    # the prompt and itself, and no token sees padding (-1).
    B, P, G, S = c.groups, c.prompt_tokens, c.group_size, c.answer_tokens
    p, a = jnp.split(jnp.tile(jnp.arange(P + G * S), (B, 1)), [P], axis=1)  # columns [B, P], [B, A]
    s = (a - P) % S  # number of the token in its answer
    length = questions.length[:, None]  # [B, 1]
    real = s < answers.new.reshape(B, G).repeat(S, axis=1)
    row = functools.partial(jnp.concatenate, axis=1)
    tokens = row([questions.tokens, answers.tokens.id.reshape(B, G * S)])
    positions = row([p, length + s])
    last_query = row([jnp.where(p < length, P + G * S - 1, -1), jnp.where(real, a - s + S - 1, -1)])
    source = jnp.where(s == 0, length - 1, a - 1)  # the prompt's end predicts each first token
    with nn.logical_axis_rules(meshes.RULES):
        attention = attend.packed(c.policy.attention)
        hidden, *_ = transformer.hidden_states(
            c.policy, params, tokens, positions, attention, context={"last_query": last_query}
        )
        logprobs, _ = lm_head.score_tokens(c.policy, params, hidden, source, tokens[:, P:], 1.0)
    old = jax.lax.stop_gradient(logprobs)  # on-policy: the ratio is 1, its gradient is not 0
    # A mean over all answer tokens of the batch, so a long answer weighs more than a short answer.
    repeated, weights = advantages.repeat(S, axis=1), real / real.sum()
    return policy_loss(logprobs, old, repeated, weights, LossConfig())[0]


# 5. Step -----------------------------------------------------------------------------------------
def make_step(c: Config, truths: list[tuple[str, str]], params: transformer.Params):
    """Return the first state and a jitted (state, questions, key) -> (state, metrics, answers)."""
    optimizer, everywhere = c.optimizer.make(), meshes.replicated(c.mesh)
    state = params, optimizer.init(params)
    # Without fixed output shardings, the compiler may choose others for the new state, and the next
    # call would compile the program again.
    places = jax.tree.map(lambda x: x.sharding if x.ndim else everywhere, state)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, everywhere, everywhere))
    def step(state, questions: QuestionBatch, key: jax.Array):
        params, moments = state
        answers = sample(c, params, questions, key)
        like = jax.ShapeDtypeStruct((c.groups, c.group_size), jnp.float32)
        host = functools.partial(score, c, truths)
        # A cut-off answer counts as empty, and the rules give an empty answer the reward 0.
        length = jnp.where(answers.stopped, answers.new, 0)
        rewards = jax.pure_callback(host, like, questions.index, answers.tokens.id, length)
        advantages = group_advantages(rewards)  # [B, G]
        value, grads = jax.value_and_grad(loss)(params, c, questions, answers, advantages)
        updates, moments = optimizer.update(grads, moments, params)
        metrics = {"reward": rewards.mean(), "loss": value, "gradient_norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), moments), metrics, answers

    return jax.device_put(state, places), step


def main(_) -> None:
    setup.setup()
    flag_values, mesh = flags.FLAGS, meshes.make_mesh()
    policy, tokenizer = weights.read_config_and_tokenizer(TINY_POLICY)
    _, params = weights.load(TINY_POLICY, mesh)
    c = Config(
        policy, tokenizer, mesh, groups=flag_values.groups, group_size=flag_values.group_size
    )
    questions, truths = make_questions(c, flag_values.steps * c.groups, flag_values.seed)
    state, step = make_step(c, truths, params)
    for i in range(flag_values.steps):  # the first step includes compilation
        start, key = time.monotonic(), jax.random.fold_in(jax.random.key(flag_values.seed), i)
        batch = QuestionBatch(*(x[i * c.groups : (i + 1) * c.groups] for x in questions))
        with jax.set_mesh(mesh):
            state, metrics, _ = step(state, jax.device_put(batch, meshes.by_rows(mesh)), key)
        numbers = jax.device_get(metrics) | {"seconds": time.monotonic() - start}
        print(
            f"step {i}", *(f"{name} {x:.4f}" for name, x in numbers.items()), sep="  ", flush=True
        )


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 20, "Updates of the policy.", lower_bound=1)
    flags.DEFINE_integer("groups", 32, "Questions of a step, B.", lower_bound=1)
    flags.DEFINE_integer("group_size", 8, "Answers to each question, G.", lower_bound=2)
    flags.DEFINE_integer("seed", 0, "Seed of questions and answers.")
    entry.run_main(main)
