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

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spell_jax.data.clusters import LETTERS, Cluster
from spell_jax.data.stream import TaskStream
from spell_jax.games.game import Ask, Models, Reply
from spell_jax.games.spell_config import SpellConfig
from spell_jax.learner.advantages import group_advantages, questioner_advantages
from spell_jax.learner.packing import Group
from spell_jax.runtime import faults, hosts
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import parsing, rewards, rules, selection
from spell_jax.selfplay.memory import Entry, QuestionMemory
from spell_jax.selfplay.prompts import Prompts

# (question, prediction, reference) triples -> 1, 0 or -1 (no verdict).
JudgeFunction = Callable[[Sequence[tuple[str, str, str]]], Sequence[int]]


@dataclasses.dataclass
class Episode:
    """One proposed question and all that became of it.

    Attributes:
      task, cluster: what was asked about.
      shown: indices of the documents that the questioner read.
      history: remembered questions that it was shown.
      dropped: documents and remembered questions left out of its prompt to keep it under the cap.
      invitation: its prompt.
      proposal: the questioner's reply.
      status: "accepted", or where it ended: "overlong" (a prompt over the cap), "bad_format",
        "skipped", "ungrounded".
      reason: a word that says why, for counting.
      blind: extracted answers to the question without documents.
      question, reference: as parsed; `own_reference` is the questioner's where it was replaced.
      response: the responder's reply, G answers.
      predictions: extracted answers, None where there is none.
      rule: rule scores of the answers.
      judge: the external judge's verdicts on them (-1: none), where it is asked.
      judged: for each answer the verifier's reply, None where there was nothing to judge.
      unjudged: answers that were not judged because the verifier's prompt was over the cap.
      votes: for each answer its G_v votes.
      scores: the responder's rewards.
      reward: the questioner's reward; None when it earns none and is not trained on.
    """

    task: str
    cluster: Cluster
    shown: tuple[int, ...]
    history: tuple[Entry, ...]
    dropped: int = 0
    invitation: str = ""
    proposal: Reply | None = None
    status: str = "overlong"
    reason: str = ""
    question: str = ""
    reference: str = ""
    own_reference: str = ""
    blind: list[str | None] = dataclasses.field(default_factory=list)
    response: Reply | None = None
    predictions: list[str | None] = dataclasses.field(default_factory=list)
    rule: list[float] = dataclasses.field(default_factory=list)
    judge: list[int] = dataclasses.field(default_factory=list)
    judged: list[Reply | None] = dataclasses.field(default_factory=list)
    unjudged: int = 0
    votes: list[list[int]] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    reward: float | None = None

    @property
    def new(self) -> tuple[int, ...]:
        """Documents among the shown that no remembered question brought."""
        seen = _documents_of(self.history)
        return tuple(index for index in self.shown if index not in seen)

    @property
    def mean_score(self) -> float:
        return sum(self.scores) / len(self.scores) if self.scores else 0.0

    @property
    def mixed(self) -> bool:
        """Whether the group has reward spread, so that something can be learned from it."""
        return len(set(self.scores)) > 1


class Spell:
    """The game; `play` makes a step's episodes and `rows` its training groups."""

    def __init__(
        self,
        config: SpellConfig,
        prompts: Prompts,
        stream: TaskStream,
        count_tokens: Callable[[str], int],
        prompt_cap: int,
        seed: int,
        judge: JudgeFunction | None = None,
    ):
        """Args: prompt_cap is in tokens; `judge` is needed for rule = "judge" only."""
        if config.rule == "judge" and judge is None:
            raise ValueError('game.rule = "judge": needs game.judge_url and game.judge_model')
        self.config = config
        self.prompts = prompts
        self.stream = stream
        self.memory = QuestionMemory(config.memory, config.memory_low, config.memory_high)
        self.models = ("anchor",) if config.reference == "anchored" else ()
        self._count = count_tokens
        self._cap = prompt_cap
        self.seed = seed
        self._judge = judge
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
        faults.point("proposed")
        await self.filter(ask, episode)
        await self.anchor(ask, episode)

    async def solve(self, ask: Ask, episode: Episode) -> None:
        """Answers and verdicts."""
        await self.answer(ask, episode)
        faults.point("answered")
        await self.verify(ask, episode)
        faults.point("verified")

    # 1. The questioner writes.

    def invite(self) -> list[Episode]:
        """A round's episodes with their questioner's prompts."""
        return [self._invite(*item) for item in self.stream.next(self.config.generation_batch)]

    def _invite(self, task: str, cluster: Cluster) -> Episode:
        """An episode with its prompt; over the cap, new documents go, then the oldest history."""
        history = self.memory.get(task, cluster.id)
        seen = _documents_of(history)
        unseen = [i for i in range(len(cluster.documents)) if i not in seen]
        wanted = min(int(self._rng.choice(self.config.documents)), len(unseen))
        new = [int(i) for i in self._rng.permutation(unseen)[:wanted]]
        letter = LETTERS[self._rng.integers(4)] if task == "multiple_choice" else None
        dropped = 0
        while True:
            shown = tuple(sorted(_documents_of(history) | set(new)))
            documents = [cluster.documents[i] for i in shown]
            text = self.prompts.questioner(task, documents, history, letter)
            smallest = not history and len(new) <= 1
            if smallest or self._count(text) <= self._cap:
                return Episode(task, cluster, shown, history, dropped, text)
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
        (reply,) = await ask("questioner", [episode.invitation])
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

    async def anchor(self, ask: Ask, episode: Episode) -> None:
        """Replaces the reference by the frozen copy's, where it agrees with itself."""
        if episode.status != "accepted" or self.config.reference != "anchored":
            return
        documents = [episode.cluster.documents[i] for i in episode.shown]
        text = self.prompts.responder(episode.task, documents, episode.question)
        samples = self.config.anchor_samples
        (reply,) = await ask("responder", [text], samples, model="anchor")
        if reply is None:
            episode.status, episode.reason = "overlong", "anchor_prompt"
            return
        found = [rules.extract_answer(text, episode.task) for text in reply.texts]
        answer, count = most_frequent(found, episode.task)
        if answer is None or count < 2 or 2 * count <= samples:
            self._reject(episode, "anchor_disagrees")
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
        """(Option) an external judge's verdicts in the place of the rule's; none leaves that.

        Of several hosts one asks it, and all are told: two calls need not agree.
        """
        judge = self._judge
        if judge is None:
            return
        asked = [(e, i) for e in episodes for i, p in enumerate(e.predictions) if p is not None]
        items = [(e.question, e.predictions[i] or "", e.reference) for e, i in asked]
        verdicts = hosts.broadcast(lambda: list(judge(items)))
        for (episode, i), verdict in zip(asked, verdicts, strict=True):
            episode.judge.append(verdict)
            if verdict >= 0:
                episode.rule[i] = float(verdict)

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
        """Training groups of all three roles with their advantages (8, 9)."""
        answered = [e for e in episodes if e.response is not None]
        kept, surplus = selection.split_groups([e.scores for e in answered], self.config.questions)
        if self.config.keep_surplus:
            kept = [*kept, *surplus]
        good = [answered[i] for i in kept]
        responder = [
            e.response.group(group_advantages(e.scores), "responder")
            for e in good
            if e.response is not None
        ]
        return (
            responder + self._questioner_rows(good, episodes) + self._verifier_rows(good, answered)
        )

    def _questioner_rows(self, good: Sequence[Episode], episodes: Sequence[Episode]) -> list[Group]:
        """The kept questions and as many bad ones (reward 0 or below), normalised per task."""
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
        return [
            e.proposal.group([advantage], "questioner")
            for e, advantage in zip(both, advantages, strict=True)
            if e.proposal is not None
        ]

    def _verifier_rows(self, good: Sequence[Episode], answered: Sequence[Episode]) -> list[Group]:
        """A few judged answers on which verdicts differ, of all answered questions."""
        c = self.config
        if not c.train_verifier:
            return []
        eligible = [
            (reply, votes)
            for e in answered
            for reply, votes, rule in zip(e.judged, e.votes, e.rule, strict=True)
            if reply is not None
            and selection.eligible_verifier_group(votes, rule, consistency=c.consistency_gate)
        ]
        chosen = selection.verifier_groups(
            [rewards.majority(votes) for _, votes in eligible],
            len(good) * c.group_size,
            c.verifier_group_size,
            c.verifier_share,
            np.random.default_rng([self.seed, self._step, 2]),
            balance=c.balance_verdicts,
        )
        groups = []
        malformed = -1.0 if c.malformed_penalty else 0.0
        for reply, votes in (eligible[i] for i in chosen):
            advantages = group_advantages(rewards.verifier_rewards(votes, malformed))
            groups.append(reply.group(advantages, "verifier"))
        return groups

    # What is kept of a step.

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """Shares and means before filtering, over all and per task (spec section 10)."""
        metrics = Metrics()
        for e in episodes:
            for suffix in ("", f"/{e.task}"):
                _count_episode(metrics, e, suffix)
        for reason, count in Counter(e.reason for e in episodes if e.reason).items():
            metrics.add_sum(f"reason/{reason}", count, len(episodes))
        metrics.add("memory_entries", len(self.memory))
        metrics.add("stream_repeats", self.stream.repeats)
        return metrics

    def record(self, episode: Episode) -> dict[str, Any]:
        """What an episode's line in the run's files holds."""
        e = episode
        return {
            "task": e.task,
            "cluster": e.cluster.id,
            "shown": list(e.shown),
            "known": [entry.question for entry in e.history],
            "status": e.status,
            "reason": e.reason,
            "proposal": e.proposal.texts[0] if e.proposal else None,
            "question": e.question,
            "reference": e.reference,
            "own_reference": e.own_reference,
            "blind": e.blind,
            "answers": list(e.response.texts) if e.response else [],
            "predictions": e.predictions,
            "rule": e.rule,
            "judge": e.judge,
            "votes": e.votes,
            "scores": e.scores,
            "reward": e.reward,
        }

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


def _documents_of(history: Sequence[Entry]) -> set[int]:
    return {index for entry in history for index in entry.documents}


def _texts(reply: Reply | None) -> Sequence[str]:
    return () if reply is None else reply.texts


def _count_episode(metrics: Metrics, e: Episode, suffix: str) -> None:
    for status in ("accepted", "bad_format", "skipped", "ungrounded", "overlong"):
        metrics.add(f"{status}{suffix}", e.status == status)
    metrics.add(f"documents_shown{suffix}", len(e.shown))
    metrics.add(f"dropped_from_prompt{suffix}", e.dropped)
    metrics.add(f"history{suffix}", len(e.history))
    if e.reward is not None:
        metrics.add(f"questioner_reward{suffix}", e.reward)
    if not e.scores:
        return
    metrics.add(f"solve_rate{suffix}", e.mean_score)
    metrics.add(f"mixed{suffix}", e.mixed)
    metrics.add(f"unsolved{suffix}", max(e.scores) <= 0)
    metrics.add(f"fully_solved{suffix}", min(e.scores) >= 1)
    metrics.add(f"reference_replaced{suffix}", e.own_reference != e.reference)
    metrics.add_sum(f"unjudged{suffix}", e.unjudged, len(e.scores))
    if e.judge:
        metrics.add_sum(f"judge_failed{suffix}", e.judge.count(-1), len(e.judge))
    for rule, votes, prediction in zip(e.rule, e.votes, e.predictions, strict=True):
        metrics.add(f"rule_reward{suffix}", rule)
        metrics.add(f"no_answer{suffix}", prediction is None)
        if votes:
            verdict = rewards.majority(votes)
            metrics.add(f"malformed_votes{suffix}", votes.count(-1) / len(votes))
            metrics.add(f"verdict_ignored{suffix}", verdict == -1)
            metrics.add(f"verdict_differs_from_rule{suffix}", verdict != rule, verdict != -1)
            metrics.add(f"verdict_yes{suffix}", verdict == 1)
