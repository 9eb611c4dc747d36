"""SPELL: one policy questions, answers and judges itself (the paper on one page).

1. propose: the questioner reads m documents (and its earlier questions about the cluster) and
   writes a question with a reference answer.
2. filter: a question that is answered right without documents is ungrounded.
3. reference (option): a frozen reader, a copy of the first policy, reads the same m documents. Its
   answer replaces the reference if its samples agree.
4. answer: the responder reads all n documents and answers G times.
5. verify: the verifier compares each answer with the reference, G_v times; the majority decides.
6. reward: max(rule, majority) for the responder, agreement with the majority for the verifier, a
   Gaussian of the share of solved answers around one half for the questioner.
7. groups: groups that are trained on, with their advantages: one GRPO update for all roles.

Parts 1 to 5 are coroutines that run concurrently for all questions of a round. An external judge
scores the answers of parts 2 and 4. With a judge, or several questions about a cluster, part 4
begins when part 3 has ended for all. Rounds of parts 1 to 6 are repeated until enough questions
have answers of mixed reward. Numbers in parentheses are equations of the paper; "spec" is
docs/algorithm.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext, Annotation, Key
from spell_jax.algorithms.spell.answering import VerifiedAnswering
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.algorithms.spell.groups import role_groups
from spell_jax.algorithms.spell.metrics import count_questions
from spell_jax.algorithms.spell.progress import ProbeProgress
from spell_jax.algorithms.spell.questioner import Questioner
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import Ask, AskModels
from spell_jax.runtime.log.metrics import Metrics


class Spell:
    """The algorithm; see base.Algorithm."""

    trained = ()

    def __init__(self, config: SpellConfig, context: AlgorithmContext):
        self.config = config
        self.questioner = Questioner(config, context)
        self.answering = VerifiedAnswering(config, context)
        self.progress = ProbeProgress(config, context.prompts, self.questioner.stream)
        self.model_names = self.questioner.model_names

    def rollout(self, ask: AskModels, key: Key, step: int) -> list[SpellEpisode]:
        """Run rounds of self-play, up to the cap, until enough questions have mixed rewards."""
        rng = np.random.default_rng([*key])
        self.progress.measure(ask)
        rounds = (self._round(ask, rng) for _ in itertools.count())
        episodes = [self.reward(e) for e in self.answering.reward_rounds(rounds, rng)]
        # Memory is read as of the start of a step and written at its end (spec 12).
        self.questioner.remember(episodes)
        self.progress.push(episodes, rng)
        return episodes

    def _round(self, ask: AskModels, rng: np.random.Generator) -> list[SpellEpisode]:
        started = self.questioner.start_episodes(rng)
        if self.questioner.compares_proposals:
            written = self.questioner.write_all(ask, started)
            return ask.run_all(self.answering.answer_and_verify, written)
        # Each question runs through all parts by itself: no slot waits for the slowest proposal.
        return ask.run_all(self.rollout_one, started)

    async def rollout_one(self, ask: Ask, episode: SpellEpisode) -> SpellEpisode:
        """Run parts 1 to 5 of one episode."""
        written = await self.questioner.write(ask, episode)
        return await self.answering.answer_and_verify(ask, written)

    def reward(self, episode: SpellEpisode) -> SpellEpisode:
        """Set the questioner's reward of an answered question (7)."""
        if episode.response is None:
            return episode
        if self.progress.is_rewarded and episode.mixed:
            return replace(episode, reward=self.progress.reward(episode))
        return replace(episode, reward=self.questioner.reward(episode))

    def groups(
        self, episodes: Sequence[SpellEpisode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """Return the training groups of all three roles with their advantages (8, 9)."""
        return role_groups(episodes, key, self.config, self.answering, self.config.questioner)

    def metrics(self, episodes: Sequence[SpellEpisode]) -> Metrics:
        metrics = count_questions(episodes, self.config, self.config.verifier)
        metrics.add("memory_entries", len(self.questioner.memory))
        metrics.add("stream_repeats", self.questioner.stream.repeats)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return self.questioner.state_dict() | self.progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.questioner.load_state_dict(state)
        self.progress.load_state_dict(state)
