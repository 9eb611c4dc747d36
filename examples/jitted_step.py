"""SPELL as one jitted program: a policy asks, answers, judges, and learns from all three roles.

    python examples/jitted_step.py

1. Text: the questioner reads m of a cluster's n documents and writes a question with its answer.
   The responder reads all n and answers G times. The verifier compares each answer with the
   questioner's, V times. Their texts decide all rewards; there are no other labels.
2. Loss: one policy gradient over the tokens of all roles, with advantages relative to groups.
3. Step: parts 1 and 2 and AdamW are one program over a device mesh, with a donated state. XLA has
   no strings: after each role the program calls Python (`jax.pure_callback`). Shapes are fixed.
4. Exam: held-out questions with true answers show whether the responder has become better.

Shapes: B clusters, G answers, V votes; R prompts of P tokens, K replies each of S tokens. (N) is an
equation of the paper. The trainer (spell_jax/train.py) has the same parts, and a memory, filters,
prompts of any length, packing, refilled slots and checkpoints.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.evaluation import is_true, make_questions
from spell_jax.algorithms.spell.sections import QuestionerConfig, VerifierConfig
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
# The step reads m, G, V, numbers of trained groups, how texts are parsed and scored; nothing else.
ALGORITHM = SpellConfig(
    questioner=QuestionerConfig(documents=(2,), memory=0, grounding_samples=0),
    verifier=VerifierConfig(share=1.0),
)


class Config(NamedTuple):
    policy: PolicyConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    clusters: int = 48  # B, a multiple of the number of devices
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-4, b2=0.95)
    algorithm: SpellConfig = ALGORITHM


# 1. Text, on the host ----------------------------------------------------------------------------
class Scores(NamedTuple):  # rewards of the three roles, and the groups that are trained on
    questioner: Any  # float32 [B]
    responder: Any  # float32 [B, G]
    verifier: Any  # float32 [B G, V]
    is_asked: Any  # bool [B], trained rows of the questioner
    is_mixed: Any  # bool [B], trained groups of the responder
    is_judged: Any  # bool [B G], trained groups of the verifier


class Host(NamedTuple):
    """Functions of text. `first` is the number of a step's first cluster."""

    config: Config
    clusters: Sequence[Sequence[str]]  # documents of each

    def clusters_of(self, first: int) -> list[tuple[str, Sequence[str]]]:
        """Return (task, documents) of the step's B clusters; the tasks take turns."""
        numbers = range(int(first), int(first) + self.config.clusters)
        return [(PAPER_TASKS[n % len(PAPER_TASKS)], self.clusters[n]) for n in numbers]

    def question_prompts(self, first) -> PaddedPrompts:
        m, texts = self.config.algorithm.questioner.documents[0], []
        for b, (task, documents) in enumerate(self.clusters_of(first)):
            letter = LETTERS[b % len(LETTERS)]  # of the right option, if the task has options
            texts.append(TEXTS.questioner(task, documents[:m], (), letter))
        return self.write("questioner", texts)

    def answer_prompts(self, first, proposals) -> PaddedPrompts:
        texts: list[str | None] = [None] * self.config.clusters  # no question, no prompt
        pairs = zip(self.clusters_of(first), self.questions(first, proposals), strict=True)
        for b, ((task, documents), question) in enumerate(pairs):
            if question.status == "accepted":
                texts[b] = TEXTS.responder(task, documents, question.question)
        return self.write("responder", texts)

    def vote_prompts(self, first, proposals, answers) -> PaddedPrompts:
        pairs = zip(self.questions(first, proposals), self.answers(first, answers), strict=True)
        texts = [
            None if answer is None else TEXTS.verifier(question.question, answer, question.answer)
            for question, group in pairs
            for answer in group
        ]
        return self.write("verifier", texts)

    def score(self, first, key, proposals, answers, votes, answer_lengths, vote_lengths) -> Scores:
        """Compute all rewards. The lengths of prompts tell which answers and votes were sampled."""
        algorithm, scores = self.config.algorithm, empty_scores(self.config)
        G, V, conflict = algorithm.group_size, scores.verifier.shape[1], algorithm.verifier.conflict
        is_eligible = functools.partial(selection.eligible_verifier_group, conflict=conflict)
        tasks, negatives, ballots = [task for task, _ in self.clusters_of(first)], [], {}
        verdicts = [parsing.parse_verdict(text) for text in self.read(votes)]
        pairs = zip(self.questions(first, proposals), self.answers(first, answers), strict=True)
        for b, (question, predictions) in enumerate(pairs):
            rule = algorithm.score_answers(predictions, question.answer, tasks[b])
            for n, rule_score in enumerate(rule, b * G):  # n: an answer among the B G
                ballot = verdicts[n * V : n * V + V] if vote_lengths[n] else []
                scores.responder[b, n % G] = rewards.combine(rule_score, rewards.majority(ballot))
                if ballot and is_eligible(ballot, rule_score):
                    ballots[n], scores.verifier[n] = ballot, rewards.verifier_rewards(ballot)  # (5)
            scores.is_mixed[b] = len(set(scores.responder[b])) > 1  # otherwise advantages are 0
            if scores.is_mixed[b]:
                solve_rate = scores.responder[b].mean().item()
                scores.questioner[b] = rewards.questioner_reward(solve_rate)  # (7)
            elif answer_lengths[b] or question.status == "bad_format":
                scores.questioner[b] = 0.0 if answer_lengths[b] else rewards.BAD_FORMAT
                negatives.append(b)
        self.choose_groups(scores, tasks, negatives, ballots, key)
        return scores

    def choose_groups(self, scores: Scores, tasks, negatives, ballots, key) -> None:
        """Choose as many bad questions as good ones, and answers with conflicting votes (3.3)."""
        algorithm, positives = self.config.algorithm, np.flatnonzero(scores.is_mixed).tolist()
        rngs = [np.random.default_rng([*key, role]) for role in (1, 2)]
        names = [tasks[b] for b in positives], [tasks[b] for b in negatives]
        places = selection.questioner_negatives(*names, algorithm.questioner.negatives, rngs[0])
        scores.is_asked[[*positives, *(negatives[i] for i in places)]] = True
        majorities = [rewards.majority(ballot) for ballot in ballots.values()]
        sizes = len(positives) * algorithm.group_size, algorithm.verifier.group_size
        places = selection.verifier_groups(majorities, *sizes, algorithm.verifier.share, rngs[1])
        scores.is_judged[[[*ballots][i] for i in places]] = True

    def questions(self, first, proposals: PaddedReplies) -> list[parsing.Parsed]:
        parse, count = self.config.algorithm.parse_question, self.config.tokenizer.count
        pairs = zip(self.clusters_of(first), self.read(proposals), strict=True)
        return [parse(text, task, count) for (task, _), text in pairs]

    def answers(self, first, replies: PaddedReplies) -> list[tuple[str | None, ...]]:
        """Extract the answer that each reply states, [B][G]."""
        groups = np.reshape(self.read(replies), (self.config.clusters, -1)).tolist()
        pairs = zip(self.clusters_of(first), groups, strict=True)
        return [self.config.algorithm.read_answers(group, task) for (task, _), group in pairs]

    def read(self, replies: PaddedReplies) -> list[str]:
        """Decode replies. A reply that the cap cut off counts as empty."""
        decode = self.config.tokenizer.decode
        rows = zip(replies.tokens, replies.length, replies.stopped, strict=True)
        return [decode(ids[:n].tolist()) if stopped else "" for ids, n, stopped in rows]

    def write(self, role: str, texts: Sequence[str | None]) -> PaddedPrompts:
        """Tokenize prompts. None has length 0, as has a text of more than P tokens."""
        prompts = empty_prompts(len(texts), role)
        for row, text in enumerate(texts):
            ids = [] if text is None else self.config.tokenizer.chat(text)
            if len(ids) <= prompts.tokens.shape[1]:
                prompts.tokens[row, : len(ids)], prompts.length[row] = ids, len(ids)
        return prompts


def empty_prompts(R: int, role: str) -> PaddedPrompts:
    return PaddedPrompts(np.zeros((R, SIZES[role][0]), np.int32), np.zeros(R, np.int32))


def empty_scores(c: Config) -> Scores:
    B, G, V = c.clusters, c.algorithm.group_size, c.algorithm.verifier.group_size
    floats = [np.zeros(shape, np.float32) for shape in ((B,), (B, G), (B * G, V))]
    return Scores(*floats, *(np.zeros(size, bool) for size in (B, B, B * G)))


# 2. Loss -----------------------------------------------------------------------------------------
class Group(NamedTuple):  # R groups of one role
    prompts: PaddedPrompts
    replies: PaddedReplies
    advantages: Any  # float32 [R, K]
    is_trained: Any  # bool [R]; other groups have no weight in the loss


def loss(params, c: Config, groups: Sequence[Group]):
    """Compute the policy-gradient loss, a mean over the trained tokens of all roles."""
    parts = []
    for prompts_of_role, (reply, _, length, _), advantages, is_trained in groups:
        logprobs, real = score_replies(
            c.policy, params, *prompts_of_role, reply, length
        )  # [R K, S]
        counts = real & is_trained.repeat(advantages.shape[1])[:, None]
        parts.append((logprobs, advantages.reshape(-1, 1).repeat(real.shape[1], axis=1), counts))
    arrays = zip(*parts, strict=True)
    logprobs, advantages, counts = (jnp.concatenate([x.ravel() for x in xs]) for xs in arrays)
    old = jax.lax.stop_gradient(logprobs)  # on-policy: the ratio is 1, its gradient is not 0
    return policy_loss(logprobs, old, advantages, counts / counts.sum().clip(1), LossConfig())[0]


# 3. Step -----------------------------------------------------------------------------------------
def ask(c: Config, params, prompts: PaddedPrompts, role: str, count: int, key, temperature=1.0):
    """Sample `count` replies of a role to each prompt."""
    sizes = {"replies": count, "max_tokens": SIZES[role][1], "stop_ids": c.tokenizer.stop_ids}
    return sample(c.policy, params, c.mesh, prompts, key, temperature=temperature, **sizes)


def call(function: Callable, result: Any, *arrays):
    """Call a function of NumPy arrays from the program, with a result of the shapes of `result`."""
    on_numpy = lambda *arrays: function(*jax.tree.map(np.asarray, arrays))  # noqa: E731
    return jax.pure_callback(on_numpy, result, *arrays)


def make_step(c: Config, host: Host) -> tuple[update.UpdateFns, Any]:
    """Return functions of the state, and a jitted (state, [seed, step]) -> (state, metrics, ..)."""
    spec = update.UpdateSpec(c.policy, c.optimizer, LossConfig())
    fns, everywhere = update.make_update_fns(spec, c.mesh), meshes.replicated(c.mesh)
    # Else the compiler may choose others for the new state, and the next call compiles again.
    shardings = jax.tree.map(lambda x: x.sharding, fns.abstract_state)
    B, G, V = c.clusters, c.algorithm.group_size, c.algorithm.verifier.group_size

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, everywhere, everywhere))
    def step(state: update.TrainState, key: jax.Array):
        params, first = state.params, key[1] * B
        keys = iter(jax.random.split(jax.random.fold_in(jax.random.key(key[0]), key[1]), 3))

        def play(role: str, write: Callable, R: int, K: int, *texts):
            """Write R prompts of a role on the host, and sample K replies to each."""
            prompts = call(write, empty_prompts(R, role), first, *texts)
            return prompts, ask(c, params, prompts, role, K, next(keys))

        question_prompts, proposals = play("questioner", host.question_prompts, B, 1)
        answer_prompts, answers = play("responder", host.answer_prompts, B, G, proposals)
        vote_prompts, votes = play("verifier", host.vote_prompts, B * G, V, proposals, answers)
        inputs = key, proposals, answers, votes, answer_prompts.length, vote_prompts.length
        scores = call(host.score, empty_scores(c), first, *inputs)
        by_batch = masked_advantages(scores.questioner, scores.is_asked)[:, None]  # (9)
        groups = (
            Group(question_prompts, proposals, by_batch, scores.is_asked),
            Group(
                answer_prompts, answers, group_advantages(scores.responder), scores.is_mixed
            ),  # (3)
            Group(vote_prompts, votes, group_advantages(scores.verifier), scores.is_judged),  # (8)
        )
        value, gradient = jax.value_and_grad(loss)(params, c, groups)
        state, numbers = update.apply(spec, state, gradient, value)  # clip, AdamW
        solved = scores.responder.sum() / jnp.sum(G * (answer_prompts.length > 0)).clip(1)
        metrics = {"solved": solved, "loss": value, "norm": numbers["gradient_norm"]}
        return state, metrics, [(group.prompts, group.replies) for group in groups]

    return fns, step


def abstract_program(mesh: jax.sharding.Mesh):
    """Return the step and the shapes of its arguments, for `launch.aot --program`."""
    c = Config(*weights.read_config_and_tokenizer(TINY_POLICY), mesh)
    fns, step = make_step(c, Host(c, ()))
    return step, (fns.abstract_state, jax.ShapeDtypeStruct((2,), np.int32))


# 4. Exam -----------------------------------------------------------------------------------------
def exam(c: Config, host: Host, params: transformer.Params) -> float:
    """Return the accuracy of greedy answers to 128 held-out questions about 8 documents."""
    questions = [q for kind in tiny_world.KINDS for q in make_questions(8, kind, 32)]
    texts = [TEXTS.responder(q.task, q.documents, q.question) for q in questions]
    prompts, greedy = host.write("responder", texts), jax.jit(ask, static_argnums=(0, 3, 4))
    replies = greedy(c, params, prompts, "responder", 1, jax.random.key(0), temperature=0.0)
    pairs = zip(questions, host.read(jax.device_get(replies)), strict=True)
    answers = [(q, c.algorithm.read_answers([text], q.task)[0]) for q, text in pairs]
    return float(np.mean([is_true(answer, q.answer, q.task) for q, answer in answers]))


def main(_) -> None:
    setup.setup()
    seed, steps, mesh = flags.FLAGS.seed, flags.FLAGS.steps, meshes.make_mesh()
    c = Config(*weights.read_config_and_tokenizer(TINY_POLICY), mesh)
    clusters = tiny_world.make_clusters(seed, steps * c.clusters, (8,))
    host = Host(c, [cluster.documents for cluster in clusters])
    fns, step = make_step(c, host)
    state = fns.init(weights.load(TINY_POLICY, mesh)[1])
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
