"""EAPO: answers in sections, rewarded for their evidence as well as for their outcome.

What becomes of one question, each part a method below, in this order:

1. answer   the policy reads all n documents and writes G answers: analysis, evidence, reasoning,
            answer. What is not of this format earns nothing (Eq. 2).
2. score    the reward model reads the evidence of all well-formed siblings together and gives each
            set 1 to 5, without the documents. What it says is retried once if it is malformed; then
            all evidence counts as neutral.
3. reward   .1 format + .3 evidence, its score in relation to the siblings' + .6 outcome, by the
            task's rule or an external judge.
4. collect  (co-evolving) scorings that the outcomes bear out are kept: no score of 4 or more for an
            answer that is wrong, none of 2 or less for one that is right. Every so many steps the
            reward model is tuned on them, with advantage 1.

All questions of a step are played at the same time. Source: EAPO, section 3; its Eq. 3 has one
evidence set o and one target y an example, while a reply scores all siblings, so what is kept or
dropped here is a whole reply, as it was sampled (rejection fine-tuning): the target is the model's
own words, the contrast between siblings stays in its prompt, and nothing that the outcomes
contradict is learned. Scores of 3 say nothing; `agreeing_share` limits how many of them a kept
reply may have, or the model would learn to commit itself to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import (
    AlgorithmContext,
    Answered,
    Ask,
    Models,
    Reply,
    ask_judge,
    choose_judge,
)
from spell_jax.algorithms.eapo import episode as eapo_episode
from spell_jax.algorithms.eapo.config import REWARD_MODEL, EapoConfig
from spell_jax.algorithms.eapo.episode import Episode
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import as_clusters
from spell_jax.learner.advantages import group_advantages
from spell_jax.learner.packing import Group
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import evidence, rules

HIGH, LOW = 4, 2  # scores that say that an answer will be right, or wrong (section 3.3)
RETRY_TEMPERATURE = 1.0  # where the first reply was greedy, and would be the same again


class Eapo:
    """The algorithm; `play` makes a step's episodes and `rows` its training groups."""

    def __init__(self, config: EapoConfig, context: AlgorithmContext):
        self.config = config
        has, learns = config.reward_model != "none", config.reward_model == "co_evolving"
        self.models: tuple[str, ...] = (REWARD_MODEL,) if has else ()
        self.trained: tuple[str, ...] = (REWARD_MODEL,) if learns else ()
        self._prompts = context.prompts
        self._judge = choose_judge(config.rule, context)
        clusters, self._questions = as_clusters(context.questions())
        self._stream = context.deal(clusters)
        self._kept: list[dict[str, Any]] = []  # since the last refresh, oldest first
        self._refresh: list[dict[str, Any]] = []  # of this step, if it has one

    def play(self, models: Models, step: int) -> list[Episode]:
        """One step's questions, answered, scored and rewarded."""
        dealt = self._stream.next(self.config.questions)
        episodes = [Episode(task, c, self._questions[c.id]) for task, c in dealt]
        models.together(self.play_one, episodes)
        self.ask_judge(episodes)
        for episode in episodes:
            self.reward(episode)
        self.collect(episodes, step)
        return episodes

    async def play_one(self, ask: Ask, episode: Episode) -> None:
        """All that a question goes through before it is rewarded."""
        await self.answer(ask, episode)
        await self.score(ask, episode)

    # 1. The policy answers.

    async def answer(self, ask: Ask, episode: Episode) -> None:
        """G answers; a prompt over the cap ends the episode."""
        e = episode
        text = self._prompts.evidence(e.cluster.documents, e.question.question)
        (reply,) = await ask("responder", [text], self.config.group_size)
        if reply is None:
            return
        e.status, e.response = "accepted", reply
        e.answers = [evidence.parse_answer(text) for text in reply.texts]
        said = [a and evidence.as_sentence(a.answer, e.task) for a in e.answers]
        e.predictions = [s and rules.extract_answer(s, e.task) for s in said]
        e.outcomes = [rules.score(s or "", e.question.answer, e.task) for s in said]
        documents = evidence.searchable(e.cluster.documents)
        e.verbatim = [a and evidence.verbatim_share(a.evidence, documents) for a in e.answers]
        known = e.question.evidence
        e.supported = [
            evidence.precision_and_recall(a.evidence, known) if a and known else None
            for a in e.answers
        ]

    # 2. The reward model compares.

    async def score(self, ask: Ask, episode: Episode) -> None:
        """A score for each well-formed sibling; where there is only one, there is nothing to
        compare."""
        e, c = episode, self.config
        sets = [answer.evidence for answer in e.answers if answer is not None]
        if not self.models or len(sets) < 2:
            return
        text = self._prompts.evidence_scores(e.question.question, sets)
        temperature = c.scoring_temperature
        for _ in range(1 + c.retries):
            (reply,) = await ask(REWARD_MODEL, [text], 1, REWARD_MODEL, temperature)
            e.asked += 1
            e.scoring = reply
            e.scores = reply and evidence.parse_scores(reply.texts[0], len(sets))
            if reply is None or e.scores is not None:
                return
            temperature = c.scoring_temperature or RETRY_TEMPERATURE

    # 3. Rewards.

    def ask_judge(self, episodes: Sequence[Episode]) -> None:
        """(Option) an external judge's verdicts in the place of the rule's."""
        answered = [
            Answered(e.question.question, e.question.answer, e.predictions, e.outcomes, e.judge)
            for e in episodes
        ]
        ask_judge(self._judge, answered)

    def reward(self, episode: Episode) -> None:
        """Evidence in relation to the siblings', and the total (Eq. 2)."""
        e = episode
        well_formed = [answer is not None for answer in e.answers]
        shares = iter(evidence.normalize(e.scores, sum(well_formed)))
        e.evidence = [next(shares) if formed else None for formed in well_formed]
        parts = zip(well_formed, e.evidence, e.outcomes, strict=True)
        weights = self.config.weights
        e.totals = [evidence.total_reward(f, r or 0.0, o, weights) for f, r, o in parts]

    # 4. What the reward model learns from.

    def collect(self, episodes: Sequence[Episode], step: int) -> None:
        """Marks consistent scorings, and keeps them for a reward model that learns; at a refresh
        all that are kept become this step's rows."""
        for e in episodes:
            e.consistent = is_consistent(e.scored(), self.config.agreeing_share)
        if not self.trained:
            return
        self._kept += [_plain(e.scoring) for e in episodes if e.consistent and e.scoring]
        self._kept = self._kept[-self.config.most_rollouts :]
        self._refresh = []
        if step % self.config.refresh_every == 0:
            self._refresh, self._kept = self._kept, []

    def rows(self, episodes: Sequence[Episode]) -> list[Group]:
        """The policy's groups of mixed total reward, and a refresh's of the reward model."""
        groups = []
        for e in episodes:
            e.advantages = []
            if e.response is not None and e.mixed:
                divide = self.config.divide_by_deviation
                e.advantages = group_advantages(e.totals, divide_by_deviation=divide).tolist()
                groups.append(e.response.group(e.advantages, "responder"))
        return groups + [_group(kept) for kept in self._refresh]

    # What is kept of a step.

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """Shares and means before filtering, over all and per task."""
        metrics = Metrics()
        for e in episodes:
            for suffix in ("", f"/{e.task}"):
                eapo_episode.count(metrics, e, suffix)
        metrics.add("stream_repeats", self._stream.repeats)
        if self.trained:
            metrics.add("kept_scorings", len(self._kept))
            metrics.add("refreshed_scorings", len(self._refresh))
        return metrics

    def record(self, episode: Episode) -> dict[str, Any]:
        return eapo_episode.record(episode, self._prompts)

    def cluster(self, episode: Episode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        """Data position, and the scorings that the next refresh learns from."""
        return {"stream": self._stream.state_dict(), "kept": list(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self._kept = list(state["kept"])


def is_consistent(scored: Sequence[tuple[int, float]], least: float) -> bool:
    """Whether the outcomes bear a scoring out, (score, outcome) pairs of its siblings: none
    contradicts, and at least the share `least` of them agrees (section 3.3).

    A score of 4 or 5 says that the answer is right, outcome 1, one of 1 or 2 that it is wrong.
    """
    agreeing = sum((s >= HIGH and o == 1) or (s <= LOW and o == 0) for s, o in scored)
    neutral = sum(LOW < s < HIGH for s, _ in scored)
    is_whole = agreeing + neutral == len(scored)
    return bool(scored) and is_whole and agreeing >= least * len(scored)


def _plain(scoring: Reply) -> dict[str, Any]:
    """A scoring as state_dict keeps it."""
    (sample,) = scoring.samples
    return {
        "prompt": [int(token) for token in scoring.prompt],
        "answer": [int(token) for token in sample.tokens],
    }


def _group(kept: dict[str, Any]) -> Group:
    return Group(kept["prompt"], [kept["answer"]], [1.0], REWARD_MODEL, model=REWARD_MODEL)
