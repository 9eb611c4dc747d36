"""SPELL: one policy questions, answers and judges itself (the paper on one page).

What becomes of one question, each part a method below, in this order:

1. propose   the questioner reads m documents (and what it asked before) and writes a question with
             a reference answer.
2. filter    a question that is answered right without documents is ungrounded.
3. anchor    (option) the reference is replaced by what a frozen copy of the first policy reads in
             the same m documents, if its answers agree.
4. answer    the responder reads all n documents and answers G times.
5. verify    the verifier compares each answer with the reference, G_v times; the majority decides.
6. reward    responder: max(rule, majority); verifier: agreement with the majority; questioner:
             a Gaussian around half solved.
7. select    which groups are trained on, with their advantages: one GRPO update for all roles.

All questions of a round are played at the same time: parts 1-5 are coroutines, and each question
goes on when what it asked is answered, whatever the others wait for. Rounds of 1-6 are repeated
until enough questions have answers of mixed reward. Numbers in parentheses are equations of the
paper; "spec" is docs/algorithm.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import (
    AlgorithmContext,
    Answered,
    Ask,
    Models,
    Reply,
    ask_judge,
    choose_judge,
)
from spell_jax.algorithms.spell import episode as spell_episode
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import Episode, documents_of
from spell_jax.data.clusters import LETTERS, Cluster
from spell_jax.learner.advantages import group_advantages, questioner_advantages
from spell_jax.learner.packing import Group
from spell_jax.runtime import fault_injection
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import parsing, rewards, rules, selection
from spell_jax.selfplay.memory import Entry, QuestionMemory


class Spell:
    """The algorithm; `play` makes a step's episodes and `rows` its training groups."""

    trained = ()

    def __init__(self, config: SpellConfig, context: AlgorithmContext):
        self.config = config
        self.prompts = context.prompts
        self.stream = context.deal(context.clusters())
        self.memory = QuestionMemory(config.memory, config.memory_low, config.memory_high)
        self.models = ("reference_reader",) if config.reference_source == "frozen_reader" else ()
        self._count = context.count_tokens
        self._cap = context.prompt_cap
        self.seed = context.seed
        self._judge = choose_judge(config.rule, context)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Every draw of a step depends on (seed, step) alone: a resumed run repeats it."""
        self._step = step
        self._rng = np.random.default_rng([self.seed, step])

    def play(self, models: Models, step: int) -> list[Episode]:
        """Rounds of self-play until enough questions have mixed rewards, or the cap is reached."""
        self.begin(step)
        episodes: list[Episode] = []
        for _ in range(self.config.max_generations):
            batch = self.invite()
            models.together(self.play_one, batch)
            self.ask_judge(batch)
            self.reward(batch)
            episodes += batch
            if sum(e.mixed for e in episodes) >= self.config.questions:
                break
        self.remember(episodes)
        return episodes

    async def play_one(self, ask: Ask, episode: Episode) -> None:
        """All that a question goes through before it is rewarded."""
        await self.write(ask, episode)
        await self.solve(ask, episode)

    async def write(self, ask: Ask, episode: Episode) -> None:
        """A question with a reference that passes all filters, or the reason why not."""
        await self.propose(ask, episode)
        fault_injection.point("proposed")
        await self.filter(ask, episode)
        await self.read_reference(ask, episode)

    async def solve(self, ask: Ask, episode: Episode) -> None:
        """Answers and verdicts."""
        await self.answer(ask, episode)
        fault_injection.point("answered")
        await self.verify(ask, episode)
        fault_injection.point("verified")

    # 1. The questioner writes.

    def invite(self) -> list[Episode]:
        """A round's episodes with their questioner's prompts."""
        return [self._invite(*item) for item in self.stream.next(self.config.generation_batch)]

    def _invite(self, task: str, cluster: Cluster) -> Episode:
        """An episode with its prompt; over the cap, new documents go, then the oldest history."""
        history = self.memory.get(task, cluster.id)
        seen = documents_of(history)
        unseen = [i for i in range(len(cluster.documents)) if i not in seen]
        wanted = min(int(self._rng.choice(self.config.documents)), len(unseen))
        new = [int(i) for i in self._rng.permutation(unseen)[:wanted]]
        letter = LETTERS[self._rng.integers(4)] if task == "multiple_choice" else None
        dropped = 0
        while True:
            shown = tuple(sorted(documents_of(history) | set(new)))
            documents = [cluster.documents[i] for i in shown]
            text = self.prompts.questioner(task, documents, history, letter)
            smallest = not history and len(new) <= 1
            if smallest or self._count(text) <= self._cap:
                return Episode(task, cluster, shown, history, dropped, letter, text)
            dropped += 1
            if new and (history or len(new) > 1):
                new.pop()
            else:
                history = history[1:]
                if not history:  # a questioner without any document is of no use
                    new = [int(self._rng.integers(len(cluster.documents)))]

    async def propose(self, ask: Ask, episode: Episode) -> None:
        """A question with its reference from m new documents and what was asked before."""
        c = self.config
        (reply,) = await ask("questioner", [episode.questioner_prompt])
        if reply is None:
            episode.reason = "questioner_prompt"
            return
        parsed = parsing.parse_question(
            reply.texts[0], episode.task, self._count, c.max_answer_tokens, c.distinct_options
        )
        episode.proposal, episode.status, episode.reason = reply, parsed.status, parsed.reason
        episode.question, episode.reference = parsed.question, parsed.answer
        episode.own_reference = parsed.answer
        skipped = parsed.status == "skipped" and parsed.reason != parsing.DECLINED
        if (parsed.status == "bad_format" and c.format_penalty) or (skipped and c.skip_penalty):
            episode.reward = rewards.BAD_FORMAT

    # 2. Questions that need no documents are ungrounded.

    async def filter(self, ask: Ask, episode: Episode) -> None:
        """Marks an accepted question as ungrounded that is answered right without documents."""
        if episode.status != "accepted" or not self.config.grounding_samples:
            return
        text = self.prompts.responder(episode.task, (), episode.question)
        (reply,) = await ask("responder", [text], self.config.grounding_samples)
        episode.blind = [rules.extract_answer(text, episode.task) for text in _texts(reply)]
        right = [rules.score(t, episode.reference, episode.task) for t in _texts(reply)]
        if sum(right) >= self.config.grounding_threshold:
            self._reject(episode, "known_without_documents")

    def _reject(self, episode: Episode, reason: str) -> None:
        episode.status, episode.reason = "ungrounded", reason
        episode.reward = rewards.UNGROUNDED

    # 3. (Option) a frozen copy of the first policy reads the reference.

    async def read_reference(self, ask: Ask, episode: Episode) -> None:
        """Replaces the reference by the frozen copy's, where it agrees with itself."""
        if episode.status != "accepted" or self.config.reference_source != "frozen_reader":
            return
        documents = [episode.cluster.documents[i] for i in episode.shown]
        text = self.prompts.responder(episode.task, documents, episode.question)
        samples = self.config.reader_samples
        (reply,) = await ask("responder", [text], samples, model="reference_reader")
        if reply is None:
            episode.status, episode.reason = "overlong", "reader_prompt"
            return
        found = [rules.extract_answer(text, episode.task) for text in reply.texts]
        answer, count = most_frequent(found, episode.task)
        if answer is None or count < 2 or 2 * count <= samples:
            self._reject(episode, "reader_disagrees")
            return
        episode.reference = answer
        same = [b is not None and rules.same_answer(answer, b, episode.task) for b in episode.blind]
        if sum(same) >= self.config.grounding_threshold:
            self._reject(episode, "known_without_documents")

    # 4. The responder answers from all documents.

    async def answer(self, ask: Ask, episode: Episode) -> None:
        """G answers to an accepted question; a prompt over the cap ends the episode."""
        if episode.status != "accepted":
            return
        e = episode
        text = self.prompts.responder(e.task, e.cluster.documents, e.question)
        (reply,) = await ask("responder", [text], self.config.group_size)
        if reply is None:
            e.status, e.reason = "overlong", "responder_prompt"
            return
        e.response = reply
        e.predictions = [rules.extract_answer(text, e.task) for text in reply.texts]
        e.rule = [rules.score(text, e.reference, e.task) for text in reply.texts]

    # 5. The verifier compares.

    async def verify(self, ask: Ask, episode: Episode) -> None:
        """G_v votes on each answer that has something to compare (4)."""
        e = episode
        e.judged = [None] * len(e.predictions)
        e.votes = [[] for _ in e.predictions]
        e.verdict_advantages = [[] for _ in e.predictions]
        if self.config.responder_reward in ("rule", "random"):
            return
        compared = [i for i, prediction in enumerate(e.predictions) if prediction is not None]
        texts = [
            self.prompts.verifier(e.question, e.predictions[i] or "", e.reference) for i in compared
        ]
        replies = await ask("verifier", texts, self.config.verifier_group_size)
        for i, reply in zip(compared, replies, strict=True):
            e.judged[i] = reply
            e.unjudged += reply is None
            e.votes[i] = [parsing.parse_verdict(text) for text in _texts(reply)]

    def ask_judge(self, episodes: Sequence[Episode]) -> None:
        """(Option) an external judge's verdicts in the place of the rule's."""
        answered = [
            Answered(e.question, e.reference, e.predictions, e.rule, e.judge) for e in episodes
        ]
        ask_judge(self._judge, answered)

    # 6. Rewards.

    def reward(self, episodes: Sequence[Episode]) -> None:
        """Responder rewards (6), then the questioner's (7) from their mean."""
        for episode in episodes:
            if episode.response is None:
                continue
            episode.scores = [
                self._responder_reward(rule, rewards.majority(votes))
                for rule, votes in zip(episode.rule, episode.votes, strict=True)
            ]
            c = self.config
            episode.reward = 0.0
            if episode.mixed:
                mean = episode.mean_score
                episode.reward = rewards.questioner_reward(mean, c.mapping, c.mu, c.sigma)

    def _responder_reward(self, rule: float, vote: int) -> float:
        how = self.config.responder_reward
        if how == "random":
            return float(self._rng.integers(2))
        if vote == -1 or how == "rule":
            return rule
        combined = {
            "max": rewards.combine(rule, vote),
            "verifier": float(vote),
            "mean": (rule + vote) / 2,
            "min": min(rule, float(vote)),
        }
        return combined[how]

    def remember(self, episodes: Sequence[Episode]) -> None:
        """Writes the step's questions to memory; it was read as of the start of the step."""
        for e in episodes:
            if e.response is not None:
                read = e.new if self.config.memory_documents == "new" else e.shown
                entry = Entry(read, e.question, e.reference)
                self.memory.push(e.task, e.cluster.id, entry, e.mean_score)

    # 7. What is trained on.

    def rows(self, episodes: Sequence[Episode]) -> list[Group]:
        """Training groups of all three roles with their advantages (8, 9), which episodes keep."""
        for e in episodes:
            e.advantages, e.verdict_advantages = {}, [[] for _ in e.judged]
        answered = [e for e in episodes if e.response is not None]
        kept, surplus = selection.split_groups([e.scores for e in answered], self.config.questions)
        if self.config.keep_surplus:
            kept = [*kept, *surplus]
        good = [answered[i] for i in kept]
        responder = []
        for e in good:
            if e.response is not None:
                e.advantages["responder"] = self._group_advantages(e.scores)
                responder.append(e.response.group(e.advantages["responder"], "responder"))
        return (
            responder + self._questioner_rows(good, episodes) + self._verifier_rows(good, answered)
        )

    def _questioner_rows(self, good: Sequence[Episode], episodes: Sequence[Episode]) -> list[Group]:
        """The kept questions and as many bad ones (reward 0 or below), normalized per task."""
        if not self.config.train_questioner:
            return []
        pool = [e for e in episodes if e.reward is not None and e.reward <= 0 and not e.mixed]
        # Drawn apart from the verifier's rows: a switch of one role leaves the other's as they are.
        rng = np.random.default_rng([self.seed, self._step, 1])
        chosen = selection.questioner_negatives(
            [e.task for e in good], [e.task for e in pool], self.config.negatives, rng
        )
        both = [*good, *(pool[i] for i in chosen)]
        advantages = questioner_advantages([e.reward or 0.0 for e in both], [e.task for e in both])
        groups = []
        for e, advantage in zip(both, advantages.tolist(), strict=True):
            if e.proposal is not None:
                e.advantages["questioner"] = [advantage]
                groups.append(e.proposal.group([advantage], "questioner"))
        return groups

    def _verifier_rows(self, good: Sequence[Episode], answered: Sequence[Episode]) -> list[Group]:
        """A few judged answers on which verdicts differ, of all answered questions."""
        c = self.config
        if not c.train_verifier:
            return []
        eligible = [
            (e, i, reply)
            for e in answered
            for i, reply in enumerate(e.judged)
            if reply is not None and spell_episode.may_teach(e, i, c)
        ]
        chosen = selection.verifier_groups(
            [rewards.majority(e.votes[i]) for e, i, _ in eligible],
            len(good) * c.group_size,
            c.verifier_group_size,
            c.verifier_share,
            np.random.default_rng([self.seed, self._step, 2]),
            balance=c.balance_verdicts,
        )
        groups = []
        for e, i, reply in (eligible[at] for at in chosen):
            advantages = self._group_advantages(self._verifier_rewards(e.votes[i]))
            e.verdict_advantages[i] = advantages
            groups.append(reply.group(advantages, "verifier"))
        return groups

    def _group_advantages(self, scores: Sequence[float]) -> list[float]:
        """Of one group, of responder or verifier (8)."""
        divide = self.config.divide_by_deviation
        return group_advantages(scores, divide_by_deviation=divide).tolist()

    def _verifier_rewards(self, votes: Sequence[int]) -> list[float]:
        """Of each vote on an answer (5)."""
        return rewards.verifier_rewards(votes, -1.0 if self.config.malformed_penalty else 0.0)

    # What is kept of a step.

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """Shares and means before filtering, over all and per task (spec section 10)."""
        metrics = Metrics()
        for e in episodes:
            for suffix in ("", f"/{e.task}"):
                spell_episode.count(metrics, e, suffix)
                for vote_rewards in map(self._verifier_rewards, e.votes):
                    for reward in vote_rewards:
                        metrics.add(f"verifier_reward{suffix}", reward)
        for reason, count in Counter(e.reason for e in episodes if e.reason).items():
            metrics.add_sum(f"reason/{reason}", count, len(episodes))
        metrics.add("memory_entries", len(self.memory))
        metrics.add("stream_repeats", self.stream.repeats)
        return metrics

    def record(self, episode: Episode) -> dict[str, Any]:
        """See spell_episode.record; behind `rows`."""
        return spell_episode.record(episode, self.config, self.prompts)

    def cluster(self, episode: Episode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        """Data position and question memory."""
        return {"stream": self.stream.state_dict(), "memory": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.memory.load_state_dict(state["memory"])


def most_frequent(answers: Sequence[str | None], task: str) -> tuple[str | None, int]:
    """The answer that most others equal, and how many do; the first of equals wins."""
    best: tuple[str | None, int] = (None, 0)
    for answer in answers:
        if answer is not None:
            count = sum(o is not None and rules.same_answer(answer, o, task) for o in answers)
            if count > best[1]:
                best = (answer, count)
    return best


def _texts(reply: Reply | None) -> Sequence[str]:
    return () if reply is None else reply.texts
