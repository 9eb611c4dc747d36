"""SPELL: one policy questions, answers and judges itself (the paper on one page).

One question goes through these parts, each a method below, in this order:

1. propose   The questioner reads m documents (and its earlier questions about the cluster) and
             writes a question with a reference answer.
2. filter    A question that is answered right without documents is ungrounded.
3. reference (option) A frozen reader, a copy of the first policy, reads the same m documents. Its
             answer replaces the reference if its samples agree.
4. answer    The responder reads all n documents and answers G times.
5. verify    The verifier compares each answer with the reference, G_v times; the majority decides.
6. reward    Responder: max(rule, majority). Verifier: agreement with the majority. Questioner: a
             Gaussian of the share of solved answers around one half.
7. select    Groups that are trained on, with their advantages: one GRPO update for all roles.

Parts 1 to 5 are coroutines that run concurrently for all questions of a round. A question goes on
to its next part as soon as its own samples are there. Rounds of parts 1 to 6 are repeated until
enough questions have answers of mixed reward. Numbers in parentheses are equations of the paper;
"spec" is docs/algorithm.md.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import (
    AlgorithmContext,
    Annotation,
    Answered,
    Ask,
    Key,
    Models,
    Reply,
    ask_judge,
    choose_judge,
)
from spell_jax.algorithms.spell import episode as spell_episode
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import Episode, TrainedReply, documents_of
from spell_jax.data.clusters import LETTERS, Cluster
from spell_jax.learner.advantages import group_advantages, questioner_advantages
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime import fault_injection
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import parsing, rewards, rules, selection
from spell_jax.selfplay.memory import Entry, QuestionMemory


class Spell:
    """The algorithm; see base.Algorithm."""

    trained = ()

    def __init__(self, config: SpellConfig, context: AlgorithmContext):
        self.config = config
        self.prompts = context.prompts
        self.stream = context.deal(context.clusters())
        self.memory = QuestionMemory(config.memory, config.memory_low, config.memory_high)
        self.models = ("reference_reader",) if config.reference_source == "frozen_reader" else ()
        self._count = context.count_tokens
        self._cap = context.prompt_cap
        self._judge = choose_judge(config.rule, context)

    def rollout(self, models: Models, key: Key, step: int) -> list[Episode]:
        """Rounds of self-play until enough questions have mixed rewards, or the cap is reached."""
        rng = np.random.default_rng([*key])
        episodes: list[Episode] = []
        for _ in range(self.config.max_generations):
            batch = models.run_all(self.rollout_one, self.start_episodes(rng))
            episodes += self.reward(self.ask_judge(batch), rng)
            if sum(e.mixed for e in episodes) >= self.config.questions:
                break
        self.remember(episodes)
        return episodes

    async def rollout_one(self, ask: Ask, episode: Episode) -> Episode:
        """Parts 1 to 5 of one question."""
        return await self.solve(ask, await self.write(ask, episode))

    async def write(self, ask: Ask, episode: Episode) -> Episode:
        """Parts 1 to 3: a question with a reference that passes all filters, or why not."""
        episode = await self.propose(ask, episode)
        fault_injection.point("proposed")
        episode = await self.filter(ask, episode)
        return await self.read_reference(ask, episode)

    async def solve(self, ask: Ask, episode: Episode) -> Episode:
        """Parts 4 and 5: answers and verdicts."""
        episode = await self.answer(ask, episode)
        fault_injection.point("answered")
        episode = await self.verify(ask, episode)
        fault_injection.point("verified")
        return episode

    # 1. The questioner writes a question.

    def start_episodes(self, rng: np.random.Generator) -> list[Episode]:
        """Makes a round's episodes with the questioner's prompts."""
        dealt = self.stream.next(self.config.generation_batch)
        return [self._start_episode(task, cluster, rng) for task, cluster in dealt]

    def _start_episode(self, task: str, cluster: Cluster, rng: np.random.Generator) -> Episode:
        """An episode with its prompt; over the cap, new documents go, then the oldest history."""
        history = self.memory.get(task, cluster.id)
        seen = documents_of(history)
        unseen = [i for i in range(len(cluster.documents)) if i not in seen]
        wanted = min(int(rng.choice(self.config.documents)), len(unseen))
        new = [int(i) for i in rng.permutation(unseen)[:wanted]]
        letter = LETTERS[rng.integers(4)] if task == "multiple_choice" else None
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
                if not history:  # the questioner needs at least one document
                    new = [int(rng.integers(len(cluster.documents)))]

    async def propose(self, ask: Ask, episode: Episode) -> Episode:
        """Asks for a question with its reference, and parses it."""
        c = self.config
        (reply,) = await ask("questioner", [episode.questioner_prompt])
        if reply is None:
            return dataclasses.replace(episode, status="overlong", reason="questioner_prompt")
        parsed = parsing.parse_question(
            reply.texts[0], episode.task, self._count, c.max_answer_tokens, c.distinct_options
        )
        declined = parsed.status == "declined" and parsed.reason != parsing.NOTHING_TO_ASK
        is_bad = parsed.status == "bad_format"
        is_punished = (is_bad and c.format_penalty) or (declined and c.decline_penalty)
        return dataclasses.replace(
            episode,
            proposal=reply,
            status=parsed.status,
            reason=parsed.reason,
            question=parsed.question,
            reference=parsed.answer,
            own_reference=parsed.answer,
            reward=rewards.BAD_FORMAT if is_punished else None,
        )

    # 2. Questions that need no documents are ungrounded.

    async def filter(self, ask: Ask, episode: Episode) -> Episode:
        """Rejects an accepted question that is answered right without documents."""
        if episode.status != "accepted" or not self.config.grounding_samples:
            return episode
        text = self.prompts.responder(episode.task, (), episode.question)
        (reply,) = await ask("responder", [text], self.config.grounding_samples)
        texts = () if reply is None else reply.texts
        blind = tuple(rules.extract_answer(text, episode.task) for text in texts)
        episode = dataclasses.replace(episode, blind=blind)
        right = [rules.score(text, episode.reference, episode.task) for text in texts]
        if sum(right) >= self.config.grounding_threshold:
            return _reject(episode, "known_without_documents")
        return episode

    # 3. (Option) A frozen copy of the first policy states the reference.

    async def read_reference(self, ask: Ask, episode: Episode) -> Episode:
        """Replaces the reference by the frozen reader's answer, or rejects the question."""
        if episode.status != "accepted" or self.config.reference_source != "frozen_reader":
            return episode
        documents = [episode.cluster.documents[i] for i in episode.shown]
        text = self.prompts.responder(episode.task, documents, episode.question)
        samples = self.config.reader_samples
        (reply,) = await ask("responder", [text], samples, model="reference_reader")
        if reply is None:
            return dataclasses.replace(episode, status="overlong", reason="reader_prompt")
        found = [rules.extract_answer(text, episode.task) for text in reply.texts]
        answer, count = most_frequent(found, episode.task)
        if answer is None or count < 2 or 2 * count <= samples:
            return _reject(episode, "reader_disagrees")
        episode = dataclasses.replace(episode, reference=answer)
        same = [b is not None and rules.same_answer(answer, b, episode.task) for b in episode.blind]
        if sum(same) >= self.config.grounding_threshold:
            return _reject(episode, "known_without_documents")
        return episode

    # 4. The responder answers from all documents.

    async def answer(self, ask: Ask, episode: Episode) -> Episode:
        """Asks for G answers to an accepted question; a prompt over the cap ends the episode."""
        if episode.status != "accepted":
            return episode
        e = episode
        text = self.prompts.responder(e.task, e.cluster.documents, e.question)
        (reply,) = await ask("responder", [text], self.config.group_size)
        if reply is None:
            return dataclasses.replace(e, status="overlong", reason="responder_prompt")
        return dataclasses.replace(
            e,
            response=reply,
            predictions=tuple(rules.extract_answer(text, e.task) for text in reply.texts),
            rule=tuple(rules.score(text, e.reference, e.task) for text in reply.texts),
        )

    # 5. The verifier compares answers with the reference.

    async def verify(self, ask: Ask, episode: Episode) -> Episode:
        """Asks for G_v votes on each answer that states a prediction (4)."""
        e = episode
        judged: list[Reply | None] = [None] * len(e.predictions)
        votes: list[tuple[int, ...]] = [()] * len(e.predictions)
        unjudged = 0
        if self.config.responder_reward not in ("rule", "random"):
            stated = [(i, p) for i, p in enumerate(e.predictions) if p is not None]
            texts = [self.prompts.verifier(e.question, p, e.reference) for _, p in stated]
            replies = await ask("verifier", texts, self.config.verifier_group_size)
            for (i, _), reply in zip(stated, replies, strict=True):
                if reply is None:
                    unjudged += 1
                else:
                    judged[i] = reply
                    votes[i] = tuple(parsing.parse_verdict(text) for text in reply.texts)
        return dataclasses.replace(e, judged=tuple(judged), votes=tuple(votes), unjudged=unjudged)

    def ask_judge(self, episodes: Sequence[Episode]) -> list[Episode]:
        """(Option) Replaces the rule's scores by an external judge's verdicts."""
        answered = [Answered(e.question, e.reference, e.predictions, e.rule) for e in episodes]
        return [
            dataclasses.replace(e, rule=judged.outcomes, judge=judged.verdicts)
            for e, judged in zip(episodes, ask_judge(self._judge, answered), strict=True)
        ]

    # 6. Rewards.

    def reward(self, episodes: Sequence[Episode], rng: np.random.Generator) -> list[Episode]:
        """Rewards of the answers (6), and from their mean the questioner's (7)."""
        return [e if e.response is None else self._reward(e, rng) for e in episodes]

    def _reward(self, episode: Episode, rng: np.random.Generator) -> Episode:
        scores = tuple(
            self._responder_reward(rule, rewards.majority(votes), rng)
            for rule, votes in zip(episode.rule, episode.votes, strict=True)
        )
        c, e = self.config, dataclasses.replace(episode, scores=scores, reward=0.0)
        if not e.mixed:
            return e
        reward = rewards.questioner_reward(e.mean_score, c.mapping, c.mu, c.sigma)
        return dataclasses.replace(e, reward=reward)

    def _responder_reward(self, rule: float, vote: int, rng: np.random.Generator) -> float:
        how = self.config.responder_reward
        if how == "random":
            return float(rng.integers(2))
        if vote == -1 or how == "rule":
            return rule
        combined = {
            "max": rewards.combine(rule, vote),
            "verifier": float(vote),
            "mean": (rule + vote) / 2,
            "min": min(rule, float(vote)),
        }
        return combined[how]

    def _verifier_rewards(self, votes: Sequence[int]) -> list[float]:
        """Reward of each vote on one answer (5)."""
        return rewards.verifier_rewards(votes, -1.0 if self.config.malformed_penalty else 0.0)

    def remember(self, episodes: Sequence[Episode]) -> None:
        """Writes a step's questions to the memory, after the step's last read of it."""
        for e in episodes:
            if e.response is not None:
                read = e.new if self.config.memory_documents == "new" else e.shown
                entry = Entry(read, e.question, e.reference)
                self.memory.push(e.task, e.cluster.id, entry, e.mean_score)

    # 7. What is trained on.

    def groups(
        self, episodes: Sequence[Episode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """Training groups of all three roles with their advantages (8, 9)."""
        answered = [i for i, e in enumerate(episodes) if e.response is not None]
        scores = [episodes[i].scores for i in answered]
        kept, surplus = selection.split_groups(scores, self.config.questions)
        good = [answered[i] for i in (kept + surplus if self.config.keep_surplus else kept)]
        trained = [
            *self._responder_replies(episodes, good),
            *self._questioner_replies(episodes, good, key),
            *self._verifier_replies(episodes, good, key),
        ]
        groups = [one.reply.group(one.advantages, one.role) for one in trained]
        return groups, spell_episode.annotate(episodes, trained, self.config)

    def _responder_replies(
        self, episodes: Sequence[Episode], good: Sequence[int]
    ) -> list[TrainedReply]:
        """The answers to the kept questions."""
        pairs = [(i, episodes[i].response) for i in good]
        return [
            TrainedReply(i, "responder", reply, self._group_advantages(episodes[i].scores))
            for i, reply in pairs
            if reply is not None
        ]

    def _questioner_replies(
        self, episodes: Sequence[Episode], good: Sequence[int], key: Key
    ) -> list[TrainedReply]:
        """The kept questions and as many bad ones (reward 0 or below), normalized per task."""
        if not self.config.train_questioner:
            return []
        pool = [
            i
            for i, e in enumerate(episodes)
            if e.reward is not None and e.reward <= 0 and not e.mixed
        ]
        tasks = [e.task for e in episodes]
        # A generator of its own: a switch of one role does not change the samples of another.
        rng = np.random.default_rng([*key, 1])
        chosen = selection.questioner_negatives(
            [tasks[i] for i in good], [tasks[i] for i in pool], self.config.negatives, rng
        )
        both = [*good, *(pool[i] for i in chosen)]
        advantages = questioner_advantages(
            [episodes[i].reward or 0.0 for i in both], [tasks[i] for i in both]
        )
        pairs = [(i, episodes[i].proposal) for i in both]
        return [
            TrainedReply(i, "questioner", reply, [advantage])
            for (i, reply), advantage in zip(pairs, advantages.tolist(), strict=True)
            if reply is not None
        ]

    def _verifier_replies(
        self, episodes: Sequence[Episode], good: Sequence[int], key: Key
    ) -> list[TrainedReply]:
        """A sample of the judged answers on which votes differ, of all answered questions."""
        c = self.config
        if not c.train_verifier:
            return []
        eligible = [
            (n, i, reply)
            for n, e in enumerate(episodes)
            for i, reply in enumerate(e.judged)
            if reply is not None and spell_episode.is_eligible_verdict(e, i, c)
        ]
        chosen = selection.verifier_groups(
            [rewards.majority(episodes[n].votes[i]) for n, i, _ in eligible],
            len(good) * c.group_size,
            c.verifier_group_size,
            c.verifier_share,
            np.random.default_rng([*key, 2]),
            balance=c.balance_verdicts,
        )
        found = []
        for n, i, reply in (eligible[at] for at in chosen):
            advantages = self._group_advantages(self._verifier_rewards(episodes[n].votes[i]))
            found.append(TrainedReply(n, "verifier", reply, advantages, i))
        return found

    def _group_advantages(self, scores: Sequence[float]) -> list[float]:
        """Group-normalized advantages of one responder or verifier group (8)."""
        divide = self.config.divide_by_deviation
        return group_advantages(scores, divide_by_deviation=divide).tolist()

    # Metrics, records and state.

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """Shares and means over all episodes and per task (spec section 10)."""
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

    def record(self, episode: Episode, annotation: Annotation) -> dict[str, Any]:
        """See spell_episode.record."""
        return spell_episode.record(episode, annotation, self.prompts)

    def cluster(self, episode: Episode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        """Data position and question memory."""
        return {"stream": self.stream.state_dict(), "memory": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.memory.load_state_dict(state["memory"])


def _reject(episode: Episode, reason: str) -> Episode:
    """The episode as ungrounded, with its penalty."""
    return dataclasses.replace(
        episode, status="ungrounded", reason=reason, reward=rewards.UNGROUNDED
    )


def most_frequent(answers: Sequence[str | None], task: str) -> tuple[str | None, int]:
    """(answer that equals most of the answers, their number); the first one wins a tie."""
    best: tuple[str | None, int] = (None, 0)
    for answer in answers:
        if answer is not None:
            count = sum(o is not None and rules.same_answer(answer, o, task) for o in answers)
            if count > best[1]:
                best = (answer, count)
    return best
