"""EAPO: answers in sections, rewarded for their evidence as well as for their outcome (section 3).

1. answer: the policy reads all n documents and writes G answers of four sections: analysis,
   evidence, reasoning, answer. An answer without this format earns nothing (Eq. 2).
2. score: the reward model reads the evidence of all well-formed answers together, without the
   documents, and gives each a score from 1 to 5. If a retry is malformed too, all evidence counts
   as neutral.
3. reward: .1 format + .3 evidence (its score relative to the group's) + .6 outcome, by the task's
   rule or an external judge.
4. collect (co-evolving): every `refresh_every` steps the reward model is trained, with advantage 1,
   on the scores that the outcomes confirm: 4 or 5 for a right answer, 1 or 2 for a wrong one.

Parts 1 and 2 are coroutines that run concurrently for all questions of a step.

Section 3.3 keeps trajectories: an example of Eq. 3 is one evidence set o with one target y. The
reward model reads o among the sets of its group, and one reply scores them all. A training row is
therefore a reply as it was sampled, which needs one confirmed score or more. The loss is over the
tokens of the confirmed scores alone, given the prompt, the thoughts and the scores before. Scores
that an outcome contradicts, neutral scores of 3, and thoughts, which are about all sets together,
stay as context. In an update every kept trajectory has the same weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import AlgorithmContext, Annotation, Key
from spell_jax.algorithms.eapo import episode as eapo_episode
from spell_jax.algorithms.eapo.config import REWARD_MODEL, EapoConfig
from spell_jax.algorithms.eapo.episode import EapoEpisode, Scoring
from spell_jax.algorithms.episode import ask_judge, responder_groups
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import as_clusters
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import Ask, AskModels
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.selfplay import evidence
from spell_jax.selfplay.rouge import rouge_l_recall

# Scores from HIGH on predict a right answer, scores up to LOW a wrong one. Section 3.3 says "high"
# and "low" without numbers; 3 is the middle of the rubric (Appendix E) and predicts neither.
HIGH, LOW = 4, 2
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
        names = [f"{{documents[{i}]}}" for i in range(len(cluster.documents))]
        return EapoEpisode(
            task,
            cluster,
            q.evidence,
            template=self._prompts.evidence(names, q.question),
            question=q.question,
            reference=q.answer,
        )

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
        # counts .5 (docs/algorithms.md, "A malformed scoring").
        shares = iter(evidence.normalize_scores(e.evidence_scores, sum(well_formed)))
        rewards = [next(shares) if formed else None for formed in well_formed]
        parts, weights = zip(well_formed, rewards, e.rule, strict=True), self.config.weights
        return dataclasses.replace(
            e,
            evidence=tuple(rewards),
            scores=tuple(evidence.total_reward(f, r or 0.0, o, weights) for f, r, o in parts),
            consistent=tuple(is_consistent(score, outcome) for score, outcome in e.scored()),
        )

    # 4. Trajectories to train the reward model on.

    def collect(self, episodes: Sequence[EapoEpisode], step: int) -> list[EapoEpisode]:
        """Keep replies with consistent scores; at a refresh, move them all to the last episode."""
        if not self.trained:
            return list(episodes)
        for e in episodes:
            if e.scoring and e.evidence_scores and any(e.consistent):
                places = evidence.find_scores(e.scoring.texts[0], e.evidence_scores)
                scoring = Scoring.of(e.scoring, places, e.consistent)
                self._scorings += [scoring] if scoring.confirmed else []
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
        groups, annotations = responder_groups(episodes, c.to_advantages, c.keep_equal)
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

    def state_dict(self) -> dict[str, Any]:
        scorings = [
            {name: [*ids] for name, ids in dataclasses.asdict(scoring).items()}
            for scoring in self._scorings
        ]
        return {"stream": self._stream.state_dict(), "kept": scorings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        fields = {field.name for field in dataclasses.fields(Scoring)}
        if missing := sorted(set().union(*(fields - scoring.keys() for scoring in state["kept"]))):
            raise ValueError(
                f"EAPO state: {missing} missing in kept scorings, so another version of this "
                "program wrote it; start a new run"
            )
        self._stream.load_state_dict(state["stream"])
        self._scorings = [
            Scoring(**{name: tuple(scoring[name]) for name in fields}) for scoring in state["kept"]
        ]


def is_consistent(score: int, outcome: float) -> bool:
    """Return whether the outcome of an answer, 0 to 1, confirms its score (section 3.3)."""
    return (score >= HIGH and outcome == 1) or (score <= LOW and outcome == 0)
