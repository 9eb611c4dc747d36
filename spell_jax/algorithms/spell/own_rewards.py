"""Rewards of SPELL's answers by a function of the user's (algorithm.reward)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

from spell_jax.algorithms.own_reward import RewardFunction, RewardInput
from spell_jax.algorithms.spell.episode import SpellEpisode

AnsweredEpisode = TypeVar("AnsweredEpisode", bound=SpellEpisode)


def reward_all(
    reward: RewardFunction, episodes: Sequence[AnsweredEpisode]
) -> list[AnsweredEpisode]:
    """Set the rewards of all answers of a round."""
    inputs = [reward_inputs(e) for e in episodes]
    # One call for the round: an endpoint gets its requests at once.
    rewards = iter(reward([*itertools.chain(*inputs)]))
    return [
        dataclasses.replace(e, scores=tuple(itertools.islice(rewards, len(answers))))
        for e, answers in zip(episodes, inputs, strict=True)
    ]


def reward_inputs(e: SpellEpisode) -> list[RewardInput]:
    """Return a question's answers [G] as a reward function reads them; [] if there are none."""
    if e.response is None:
        return []
    parts = (e.response.texts, e.response.samples, e.predictions, e.rule, e.votes)
    return [
        RewardInput(
            question=e.question,
            task=e.task,
            documents=e.documents,
            reference=e.reference,
            references=e.references or (e.reference,),
            text=text,
            prediction=prediction,
            rule_score=rule,
            votes=votes,
            truncated=not sample.stopped,
            tokens=len(sample.tokens),
            prompt_tokens=len(e.response.prompt),
        )
        for text, sample, prediction, rule, votes in zip(*parts, strict=True)
    ]
