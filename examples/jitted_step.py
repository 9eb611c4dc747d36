"""SPELL as one jitted program: a policy asks, answers, judges, and learns from all three roles.

    python examples/jitted_step.py

1. Text: the questioner reads m of a cluster's n documents and writes a question with its answer.
   The responder reads all n and answers G times. The verifier compares each answer with the
   questioner's, V times. Their texts decide all rewards; there are no other labels.
2. Loss: one policy gradient over the tokens of all roles, with advantages relative to groups.
3. Step: parts 1 and 2 and AdamW are one program over a device mesh, with a donated state. XLA has
   no strings: between roles the program calls Python (`jax.pure_callback`). Shapes are fixed.
4. Exam: held-out questions with true answers show whether the responder has become better.

Shapes: B clusters, G answers, V votes; R prompts of P tokens with K replies of S tokens. Numbers in
parentheses: the paper's equations. The trainer (spell_jax/train.py) is made of the same parts, and
adds a memory, filters, prompts of any length, packing, refilled slots and checkpoints.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.evaluation import TinyEvaluation, is_true
from spell_jax.data import tiny_world
from spell_jax.data.clusters import LETTERS, PAPER_TASKS
from spell_jax.learner import update
from spell_jax.learner.advantages import group_advantages
from spell_jax.learner.in_jit import masked_advantages, score_replies
from spell_jax.learner.loss import policy_loss
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime import entry, setup
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.in_jit import PaddedPrompts, PaddedReplies, sample
from spell_jax.selfplay import parsing, prompts, rewards, selection

# Role -> P and S: room for 2 documents, for 8 and a question, for a question and two answers.
SIZES = {"questioner": (48, 48), "responder": (96, 32), "verifier": (48, 4)}
TEXTS = prompts.load("compact")
# With a share of 1 and G = V, as many groups of the verifier are trained on as of the responder.
ALGORITHM = SpellConfig(documents=(2,), memory=0, grounding_samples=0, verifier_share=1.0)


class Config(NamedTuple):
    policy: PolicyConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    clusters: int = 48  # B, a multiple of the number of devices
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-4, b2=0.95)
    algorithm: SpellConfig = ALGORITHM

    @property
    def spec(self) -> update.UpdateSpec:
        return update.UpdateSpec(self.policy, self.optimizer, LossConfig())


# 1. Text, on the host ----------------------------------------------------------------------------
class Scores(NamedTuple):
    """Rewards of the three roles, and the groups that the update trains on."""

    questioner: Any  # float32 [B]
    responder: Any  # float32 [B, G]
    verifier: Any  # float32 [B, V], of the groups in `judged`
    proposed: Any  # bool [B], trained rows of the questioner
    mixed: Any  # bool [B], trained groups of the responder
    judged: Any  # int32 [B], trained groups of the verifier, as answers among the B G; -1: none


class Host(NamedTuple):
    """Functions of text. The clusters of a step are those from number `first` on."""

    c: Config
    clusters: Sequence[Sequence[str]]  # documents of each

    def dealt(self, first: int) -> list[tuple[str, Sequence[str]]]:
        """Return (task, documents) of the step's clusters; the tasks take turns."""
        numbers = range(int(first), int(first) + self.c.clusters)
        return [(PAPER_TASKS[n % len(PAPER_TASKS)], self.clusters[n]) for n in numbers]

    def questioner_prompts(self, first) -> PaddedPrompts:
        shown = slice(self.c.algorithm.documents[0])  # the first m
        # A prompt for a choice of four states the letter of the right option.
        pairs = zip(itertools.cycle(LETTERS), self.dealt(first))
        texts = [TEXTS.questioner(task, x[shown], (), letter) for letter, (task, x) in pairs]
        return self.write("questioner", texts)

    def responder_prompts(self, first, proposals) -> PaddedPrompts:
        pairs = zip(self.dealt(first), self.questions(first, proposals), strict=True)
        texts = [q.answer and TEXTS.responder(task, x, q.question) for (task, x), q in pairs]
        return self.write("responder", texts)

    def verifier_prompts(self, first, proposals, answers) -> PaddedPrompts:
        """Write a prompt for each of the B G replies that states an answer."""
        pairs = zip(self.questions(first, proposals), self.answers(first, answers), strict=True)
        texts = [a and TEXTS.verifier(q.question, a, q.answer) for q, group in pairs for a in group]
        return self.write("verifier", texts)

    def score(self, first, key, proposals, sent, answers, compared, votes) -> Scores:
        """Compute all rewards; `sent` and `compared` are the lengths of prompts."""
        a, scores = self.c.algorithm, no_scores(self.c)
        G, V = a.group_size, a.verifier_group_size
        votes = [parsing.parse_verdict(text) for text in self.read(votes)]
        questions, predictions = self.questions(first, proposals), self.answers(first, answers)
        tasks, bad, ballots = [task for task, _ in self.dealt(first)], [], {}
        for b, question in enumerate(questions):
            rule = a.score_answers(predictions[b], question.answer, tasks[b])
            for g, n in enumerate(range(b * G, b * G + G)):
                ballot = votes[n * V : n * V + V] if compared[n] else []
                scores.responder[b, g] = rewards.combine(rule[g], rewards.majority(ballot))  # (6)
                conflict = a.verifier_conflict
                if ballot and selection.eligible_verifier_group(ballot, rule[g], conflict=conflict):
                    ballots[n] = ballot
            scores.mixed[b] = len(set(scores.responder[b])) > 1  # otherwise advantages are 0
            if scores.mixed[b]:
                solved = scores.responder[b].mean().item()
                scores.questioner[b] = rewards.questioner_reward(solved)  # (7)
            elif sent[b] or question.status == "bad_format":
                scores.questioner[b] = 0.0 if sent[b] else rewards.BAD_FORMAT
                bad.append(b)
        # As many bad questions as good ones (section 3.3).
        good, rng = np.flatnonzero(scores.mixed).tolist(), np.random.default_rng([*key, 1])
        names = [tasks[b] for b in good], [tasks[b] for b in bad]
        picked = selection.questioner_negatives(*names, a.negatives, rng)
        scores.proposed[[*good, *(bad[i] for i in picked)]] = True
        sides, rng = [*map(rewards.majority, ballots.values())], np.random.default_rng([*key, 2])
        picked = selection.verifier_groups(sides, len(good) * G, V, a.verifier_share, rng)
        for row, n in enumerate([*ballots][i] for i in picked):
            scores.judged[row] = n
            scores.verifier[row] = rewards.verifier_rewards(ballots[n])  # (5)
        return scores

    def questions(self, first, proposals: PaddedReplies) -> list[parsing.Parsed]:
        a, count = self.c.algorithm, self.c.tokenizer.count
        texts = zip(self.dealt(first), self.read(proposals), strict=True)
        return [a.parse_question(text, task, count) for (task, _), text in texts]

    def answers(self, first, replies: PaddedReplies) -> list[tuple[str | None, ...]]:
        """Extract the answers that replies state, [B][G]."""
        a, groups = self.c.algorithm, np.reshape(self.read(replies), (self.c.clusters, -1)).tolist()
        return [a.read_answers(g, x[0]) for x, g in zip(self.dealt(first), groups, strict=True)]

    def read(self, replies: PaddedReplies) -> list[str]:
        """Decode replies. A reply that the cap cut off counts as empty."""
        decode = self.c.tokenizer.decode
        rows = zip(replies.tokens, replies.length, replies.stopped, strict=True)
        return [decode(ids[:n].tolist()) if stopped else "" for ids, n, stopped in rows]

    def write(self, role: str, texts: Sequence[str | None]) -> PaddedPrompts:
        """Tokenize prompts. No text is not sent, nor is a text of more than P tokens."""
        sent = no_prompts(len(texts), role)
        for row, ids in enumerate(self.c.tokenizer.chat(text) if text else [] for text in texts):
            if len(ids) <= sent.tokens.shape[1]:
                sent.tokens[row, : len(ids)], sent.length[row] = ids, len(ids)
        return sent


def no_prompts(R: int, role: str) -> PaddedPrompts:
    return PaddedPrompts(np.zeros((R, SIZES[role][0]), np.int32), np.zeros(R, np.int32))


def no_scores(c: Config) -> Scores:
    B, G, V = c.clusters, c.algorithm.group_size, c.algorithm.verifier_group_size
    x, y, z = (np.zeros(shape, np.float32) for shape in ((B,), (B, G), (B, V)))
    return Scores(x, y, z, np.zeros(B, bool), np.zeros(B, bool), np.full(B, -1, np.int32))


# 2. Loss -----------------------------------------------------------------------------------------
class Group(NamedTuple):
    """R groups of one role: prompts with K replies each."""

    prompts: PaddedPrompts
    replies: PaddedReplies
    advantages: Any  # float32 [R, K]
    trained: Any  # bool [R]; others have no weight in the loss


def loss(params, c: Config, groups: Sequence[Group]):
    """Compute the policy-gradient loss, a mean over the trained tokens of all roles."""
    logprobs, advantages, counts = [], [], []
    for group in groups:
        (prompts, length), replies = group.prompts, group.replies
        rows = prompts, length, replies.tokens, replies.length
        scored, real = score_replies(c.policy, params, *rows)  # [R K, S]
        trained = group.trained.repeat(group.advantages.shape[1])  # [R K]
        logprobs.append(scored.ravel())
        advantages.append(group.advantages.ravel().repeat(scored.shape[1]))
        counts.append(jnp.ravel(real & trained[:, None]))
    logprobs, advantages, counts = map(jnp.concatenate, (logprobs, advantages, counts))
    old = jax.lax.stop_gradient(logprobs)  # on-policy: the ratio is 1, its gradient is not 0
    return policy_loss(logprobs, old, advantages, counts / counts.sum().clip(1), LossConfig())[0]


# 3. Step -----------------------------------------------------------------------------------------
def ask(c: Config, params, sent: PaddedPrompts, role: str, replies: int, key, temperature=1.0):
    sizes = {"replies": replies, "max_tokens": SIZES[role][1], "stop_ids": c.tokenizer.stop_ids}
    return sample(c.policy, params, c.mesh, sent, key, temperature=temperature, **sizes)


def call(function: Callable, like: Any, *arrays):
    """Call a function of NumPy arrays from the program; its result has the shapes of `like`."""
    on_numpy = lambda *arrays: function(*jax.tree.map(np.asarray, arrays))  # noqa: E731
    return jax.pure_callback(on_numpy, like, *arrays)


def make_step(c: Config, host: Host):
    """Return a jitted (state, [seed, step]) -> (state, metrics, rollout); TrainState is donated."""
    # Without fixed output shardings, the compiler may choose others for the new state, and the next
    # call would compile the program again.
    places = jax.tree.map(
        lambda x: x.sharding, update.make_update_fns(c.spec, c.mesh).abstract_state
    )
    everywhere = meshes.replicated(c.mesh)
    B, G, V = c.clusters, c.algorithm.group_size, c.algorithm.verifier_group_size

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, everywhere, everywhere))
    def step(state: update.TrainState, key: jax.Array):
        params, first = state.params, key[1] * B
        keys = jax.random.split(jax.random.fold_in(jax.random.key(key[0]), key[1]), 3)
        shown = call(host.questioner_prompts, no_prompts(B, "questioner"), first)
        proposals = ask(c, params, shown, "questioner", 1, keys[0])
        sent = call(host.responder_prompts, no_prompts(B, "responder"), first, proposals)
        answers = ask(c, params, sent, "responder", G, keys[1])
        like = no_prompts(B * G, "verifier")
        compared = call(host.verifier_prompts, like, first, proposals, answers)
        votes = ask(c, params, compared, "verifier", V, keys[2])
        inputs = key, proposals, sent.length, answers, compared.length, votes
        scores = call(host.score, no_scores(c), first, *inputs)
        # An update trains on at most B of the verifier's B G groups.
        judged = jax.tree.map(lambda x: x[scores.judged], compared)
        vote = scores.judged[:, None] * V + jnp.arange(V)
        ballots = jax.tree.map(lambda x: x[vote.ravel()], votes)
        by_batch = masked_advantages(scores.questioner, scores.proposed)[:, None]  # (9)
        groups = (
            Group(shown, proposals, by_batch, scores.proposed),
            Group(sent, answers, group_advantages(scores.responder), scores.mixed),  # (3)
            Group(judged, ballots, group_advantages(scores.verifier), scores.judged >= 0),  # (8)
        )
        rollout = (shown, proposals), (sent, answers), (compared, votes)
        value, gradient = jax.value_and_grad(loss)(params, c, groups)
        state, numbers = update.apply(c.spec, state, gradient, value)  # clip, AdamW
        solved = scores.responder.sum() / jnp.sum(G * (sent.length > 0)).clip(1)
        metrics = {"solved": solved, "loss": value, "norm": numbers["gradient_norm"]}
        return state, metrics, rollout

    return step


def abstract_program(mesh: jax.sharding.Mesh):
    """Return the step and the shapes of its arguments, for `launch.aot --program`."""
    c = Config(*weights.read_config_and_tokenizer(TINY_POLICY), mesh)
    state = update.make_update_fns(c.spec, mesh).abstract_state
    return make_step(c, Host(c, ())), (state, jax.ShapeDtypeStruct((2,), np.int32))


# 4. Exam -----------------------------------------------------------------------------------------
def exam(c: Config, host: Host, params: transformer.Params) -> float:
    """Return the accuracy of greedy answers to 128 held-out questions about 8 documents."""
    make = TinyEvaluation(TEXTS, c.algorithm, c.tokenizer.count).make_items
    items = [(tiny_world.TASK_OF_KIND[k], x) for k in tiny_world.KINDS for x in make(8, k, 32)]
    texts = [TEXTS.responder(task, x.documents, x.question) for task, x in items]
    sent, greedy = host.write("responder", texts), jax.jit(ask, static_argnums=(0, 3, 4))
    replies = greedy(c, params, sent, "responder", 1, jax.random.key(0), temperature=0.0)
    pairs = zip(items, host.read(jax.device_get(replies)), strict=True)
    answers = [(x, c.algorithm.read_answers([text], task)[0]) for (task, x), text in pairs]
    return float(np.mean([is_true(answer, x.truth, x.kind) for x, answer in answers]))


def main(_) -> None:
    setup.setup()
    seed, steps, mesh = flags.FLAGS.seed, flags.FLAGS.steps, meshes.make_mesh()
    c = Config(*weights.read_config_and_tokenizer(TINY_POLICY), mesh)
    clusters = tiny_world.make_clusters(seed, steps * c.clusters, (8,))
    host = Host(c, [cluster.documents for cluster in clusters])
    state = update.make_update_fns(c.spec, mesh).init(weights.load(TINY_POLICY, mesh)[1])
    step = make_step(c, host)
    with jax.set_mesh(mesh):
        print(f"accuracy {exam(c, host, state.params):.3f}", flush=True)
        for i in range(steps):  # the first step includes compilation
            start = time.monotonic()
            state, metrics, _ = step(state, np.array([seed, i]))
            numbers = jax.device_get(metrics) | {"seconds": time.monotonic() - start}
            print(f"step {i}", *(f"{k} {x:.3f}" for k, x in numbers.items()), sep="  ", flush=True)
        print(f"accuracy {exam(c, host, state.params):.3f}", flush=True)


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 20, "Updates of the policy.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of clusters and samples.")
    entry.run_main(main)
