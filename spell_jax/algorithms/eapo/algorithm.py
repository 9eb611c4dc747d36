"""EAPO: answers in sections, rewarded for their evidence as well as for their outcome (section 3).

1. answer: the policy reads all n documents and writes G answers of four sections: analysis,
   evidence, reasoning, answer. An answer without this format earns nothing (Eq. 2).
2. score: the reward model reads the evidence of all well-formed answers together, without the
   documents, and gives each a score from 1 to 5. If a retry is malformed too, all evidence counts
   as neutral.
3. reward: .1 format + .3 evidence (its score relative to the group's) + .6 outcome, by the task's
   rule or an external judge.
4. collect (co-evolving): every `refresh_every` steps the reward model is trained, with advantage 1,
   on the scorings that the outcomes confirm: no score of 4 or more for a wrong answer, none of 2 or
   less for a right one.

Parts 1 and 2 are coroutines that run concurrently for all questions of a step. Eq. 3 has one
evidence set o and one target y per example, but a reply scores all answers of a group. Kept or
dropped is therefore a whole reply as it was sampled (rejection fine-tuning): the target is the
model's own text, and the contrast between answers stays in its prompt. `agreeing_share` limits the
neutral scores of 3 in a kept reply; otherwise the model would learn to give only those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import AlgorithmContext, Annotation, Ask, AskModels, Key
from spell_jax.algorithms.eapo import episode as eapo_episode
from spell_jax.algorithms.eapo.config import REWARD_MODEL, EapoConfig
from spell_jax.algorithms.eapo.episode import EapoEpisode, Scoring
from spell_jax.algorithms.episode import ask_judge, responder_groups
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import as_clusters
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import evidence
from spell_jax.selfplay.rouge import rouge_l_recall

HIGH, LOW = 4, 2  # scores that predict a right, or a wrong, answer (section 3.3)
RETRY_TEMPERATURE = 1.0  # after a greedy reply, which would be the same again


class Eapo:
    """The algorithm; see base.Algorithm."""

    def __init__(self, config: EapoConfig, context: AlgorithmContext):
        self.config = config
        has, learns = config.reward_model != "none", config.reward_model == "co_evolving"
        self.model_names: tuple[str, ...] = (REWARD_MODEL,) if has else ()
        self.trained: tuple[str, ...] = (REWARD_MODEL,) if learns else ()
        self._prompts = context.prompts
        self._judge = context.judge
        clusters, self._questions = as_clusters(context.questions())
        self._stream = context.deal(clusters)
        self._scorings: list[Scoring] = []  # since the last refresh, oldest first

    def rollout(self, ask: AskModels, key: Key, step: int) -> list[EapoEpisode]:
        dealt = self._stream.next(self.config.questions)
        started = [self._start_episode(task, cluster) for task, cluster in dealt]
        answered = ask.run_all(self.rollout_one, started)
        episodes = ask_judge(self._judge, self.config.rule, answered)
        return self.collect([self.reward(e) for e in episodes], step)

    def _start_episode(self, task: str, cluster: Cluster) -> EapoEpisode:
        q = self._questions[cluster.id]
        return EapoEpisode(task, cluster, q.evidence, question=q.question, reference=q.answer)

    async def rollout_one(self, ask: Ask, episode: EapoEpisode) -> EapoEpisode:
        return await self.score(ask, await self.answer(ask, episode))

    # 1. The policy answers.

    async def answer(self, ask: Ask, episode: EapoEpisode) -> EapoEpisode:
        """Ask for G answers and parse them; a prompt over the cap ends the episode."""
        e = episode
        text = self._prompts.evidence(e.cluster.documents, e.question)
        (reply,) = replies = await ask("responder", [text], self.config.group_size)
        if reply is None:
            return e.without_reply("responder", replies)
        answers = [evidence.parse_answer(text) for text in reply.scored_texts]
        answer_texts = [
            evidence.with_answer_phrase(a.answer, e.task, self.config.extract) if a else ""
            for a in answers
        ]
        predictions = self.config.read_answers(answer_texts, e.task)
        documents, passages = evidence.searchable(e.cluster.documents), e.known_evidence
        return dataclasses.replace(
            e,
            status="accepted",
            response=reply,
            answers=tuple(answers),
            predictions=predictions,
            stated=self.config.state_answers(answer_texts, e.task),
            rule=self.config.score_answers(predictions, e.reference, e.task),
            verbatim=tuple(a and evidence.verbatim_share(a.evidence, documents) for a in answers),
            supported=tuple(
                evidence.precision_and_recall(a.evidence, passages) if a and passages else None
                for a in answers
            ),
            rouge_l=tuple(
                rouge_l_recall(a.evidence, "\n".join(passages)) if a and passages else None
                for a in answers
            ),
        )

    # 2. The reward model compares.

    async def score(self, ask: Ask, episode: EapoEpisode) -> EapoEpisode:
        """Ask for a score of each well-formed answer, unless fewer than two can be compared."""
        e, c = episode, self.config
        # Malformed answers are not shown: they earn nothing, whatever their evidence is (Eq. 2).
        sets = [answer.evidence for answer in e.answers if answer is not None]
        # Scores count relative to the group, so a single set has nothing to be compared with.
        if not self.model_names or len(sets) < 2:
            return e
        text = self._prompts.evidence_scores(e.question, sets)
        temperature = c.scoring_temperature
        for attempt in range(1, 2 + c.retries):
            (reply,) = replies = await ask(REWARD_MODEL, [text], 1, REWARD_MODEL, temperature)
            scores = reply and evidence.parse_scores(reply.scored_texts[0], len(sets))
            e = dataclasses.replace(e, scoring_calls=attempt, scoring=reply, evidence_scores=scores)
            # Without a reply, the prompt is over the cap, unless a scoring at the cap was dropped.
            if scores is not None or (reply is None and not replies.dropped[0]):
                break
            temperature = c.scoring_temperature or RETRY_TEMPERATURE
        return e

    # 3. Rewards.

    def reward(self, episode: EapoEpisode) -> EapoEpisode:
        """Set evidence rewards relative to the group, total rewards (Eq. 2), and consistency."""
        e = episode
        well_formed = [answer is not None for answer in e.answers]
        # Where the paper is silent (equal scores, no scores, one well-formed answer), evidence
        # counts .5 (docs/algorithms.md, "A malformed reply").
        shares = iter(evidence.normalize_scores(e.evidence_scores, sum(well_formed)))
        rewards = [next(shares) if formed else None for formed in well_formed]
        parts, weights = zip(well_formed, rewards, e.rule, strict=True), self.config.weights
        return dataclasses.replace(
            e,
            evidence=tuple(rewards),
            scores=tuple(evidence.total_reward(f, r or 0.0, o, weights) for f, r, o in parts),
            consistent=is_consistent(
                e.scored(), self.config.agreeing_share, self.config.contrast_only
            ),
        )

    # 4. Scorings to train the reward model on.

    def collect(self, episodes: Sequence[EapoEpisode], step: int) -> list[EapoEpisode]:
        """Keep the consistent scorings; at a refresh, move them all to the last episode."""
        if not self.trained:
            return list(episodes)
        self._scorings += [Scoring.of(e.scoring) for e in episodes if e.consistent and e.scoring]
        # The oldest scorings judge answers of the oldest policy. A bound is needed, because
        # checkpoints contain the scorings: tens of MB at real lengths (estimated).
        self._scorings = self._scorings[-self.config.most_rollouts :]
        if step % self.config.refresh_every:
            return list(episodes)
        refresh, self._scorings = tuple(self._scorings), []
        # `groups` is a function of the episodes alone (base.py), so an episode carries the
        # scorings.
        *earlier_episodes, last = episodes
        return [*earlier_episodes, dataclasses.replace(last, refresh=refresh)]

    def groups(
        self, episodes: Sequence[EapoEpisode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """Return the policy's groups, and at a refresh the reward model's, with annotations."""
        c = self.config
        groups, annotations = responder_groups(episodes, c.divide_by_deviation, c.keep_equal)
        return groups + [scoring.group() for e in episodes for scoring in e.refresh], annotations

    def metrics(self, episodes: Sequence[EapoEpisode]) -> Metrics:
        metrics = Metrics()
        for e in episodes:
            e.count_unparsed(metrics)
            for suffix in ("", f"/{e.task}"):
                eapo_episode.count_episode(metrics, e, suffix)
        metrics.add("stream_repeats", self._stream.repeats)
        if self.trained:
            metrics.add("kept_scorings", len(self._scorings))
            metrics.add("refreshed_scorings", sum(len(e.refresh) for e in episodes))
        return metrics

    def record(self, episode: EapoEpisode, annotation: Annotation) -> dict[str, Any]:
        return eapo_episode.make_record(episode, annotation, self._prompts)

    def cluster(self, episode: EapoEpisode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        scorings = [
            {"prompt": [*scoring.prompt], "answer": [*scoring.answer]} for scoring in self._scorings
        ]
        return {"stream": self._stream.state_dict(), "kept": scorings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self._scorings = [
            Scoring(tuple(scoring["prompt"]), tuple(scoring["answer"])) for scoring in state["kept"]
        ]


def is_consistent(
    scored: Sequence[tuple[int, float]], least: float, contrast_only: bool = False
) -> bool:
    """Return whether the outcomes confirm a scoring (section 3.3).

    A score of 4 or 5 predicts a right answer (outcome 1), a score of 1 or 2 a wrong one. No outcome
    may contradict its score, and at least the share `least` of the scores must be confirmed. With
    `contrast_only`, the outcomes must differ.
    """
    if contrast_only and len({o == 1 for _, o in scored}) < 2:
        return False
    # Eq. 3 is about one evidence set, a reply about a whole group. Our choice: the reply is kept or
    # dropped whole (docs/algorithms.md, "Training rows of the reward model").
    agreeing = sum((s >= HIGH and o == 1) or (s <= LOW and o == 0) for s, o in scored)
    neutral = sum(LOW < s < HIGH for s, _ in scored)
    is_whole = agreeing + neutral == len(scored)
    return bool(scored) and is_whole and agreeing >= least * len(scored)
