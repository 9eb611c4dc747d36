"""Groups of an update, and their advantages: part 7 of SPELL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spell_jax.algorithms.base import Annotation, Key
from spell_jax.algorithms.spell.annotations import annotate
from spell_jax.algorithms.spell.answering import Answering
from spell_jax.algorithms.spell.config import VerifiedConfig
from spell_jax.algorithms.spell.episode import Advantages, SpellEpisode
from spell_jax.algorithms.spell.sections import QuestionerConfig
from spell_jax.learner.advantages import questioner_advantages as normalize
from spell_jax.learner.packing import TrainGroup
from spell_jax.selfplay import rewards, selection


def role_groups(
    episodes: Sequence[SpellEpisode],
    key: Key,
    config: VerifiedConfig,
    answering: Answering,
    questioner: QuestionerConfig | None = None,
) -> tuple[list[TrainGroup], list[Annotation]]:
    """Return the groups of the trained roles, in the order of the episodes, and annotations.

    `questioner` is None for a step without a questioner.
    """
    good = choose_questions(episodes, config)
    advantages = responder_advantages(episodes, good, config)
    # Generators of their own: a switch of one role does not change the samples of another.
    if questioner and questioner.train:
        rng = np.random.default_rng([*key, 1])
        advantages |= questioner_advantages(episodes, good, questioner, config.ddof, rng)
    if config.verifier.train:
        rng = np.random.default_rng([*key, 2])
        advantages |= verifier_advantages(episodes, len(good), config, rng)
    groups = [
        answering.responder_group(episodes[n], values)
        if role == "responder"
        else episodes[n].reply(role, i).group(values, role)
        for (n, role, i), values in advantages.items()
    ]
    return groups, annotate(episodes, advantages, config, questioner)


def choose_questions(episodes: Sequence[SpellEpisode], config: VerifiedConfig) -> list[int]:
    """Return the indices of the questions that the responder is trained on."""
    answered = [n for n, e in enumerate(episodes) if e.response is not None]
    scores = [episodes[n].scores for n in answered]
    # The first usable groups in request order (spec 7.2): the order in which answers end depends on
    # timing, and the choice must not.
    batch, surplus = selection.split_groups(scores, config.questions)
    return [answered[i] for i in (batch + surplus if config.keep_surplus else batch)]


def responder_advantages(
    episodes: Sequence[SpellEpisode], good: Sequence[int], config: VerifiedConfig
) -> Advantages:
    """Normalize the rewards of each question's answers (3)."""
    return {(n, "responder", 0): config.to_advantages(episodes[n].scores) for n in good}


def questioner_advantages(
    episodes: Sequence[SpellEpisode],
    good: Sequence[int],
    questioner: QuestionerConfig,
    ddof: int,
    rng: np.random.Generator,
) -> Advantages:
    """Normalize rewards of the kept and of sampled bad questions (reward 0 or below) (9)."""
    bad = [
        n
        for n, e in enumerate(episodes)
        # A declined or overlong question has no reward and is no negative (spec 7.4).
        if e.reward is not None and e.reward <= 0 and not e.mixed
    ]
    tasks = [e.task for e in episodes]
    negatives = selection.questioner_negatives(
        [tasks[n] for n in good],
        [tasks[n] for n in bad],
        questioner.negatives,
        rng,
        by_task=questioner.negatives_by_task,
    )
    rows = [*good, *(bad[i] for i in negatives)]
    names = {
        "task": [tasks[n] for n in rows],
        "cluster": [f"{tasks[n]}/{episodes[n].cluster.id}" for n in rows],
    }
    values = [episodes[n].reward or 0.0 for n in rows]
    advantages = np.mean(
        [
            normalize(values, names.get(kind), ddof=ddof)
            for kind in questioner.normalization.split("+")
        ],
        axis=0,
    )
    return {
        (n, "questioner", 0): [advantage]
        for n, advantage in zip(rows, advantages.tolist(), strict=True)
    }


def verifier_advantages(
    episodes: Sequence[SpellEpisode],
    questions: int,
    config: VerifiedConfig,
    rng: np.random.Generator,
) -> Advantages:
    """Sample answers with differing votes from all questions; return their advantages (8).

    `questions` is the number that the responder is trained on.
    """
    verifier = config.verifier
    # Answers of all rounds are candidates, also to questions that the update leaves out.
    eligible = [
        (n, i, e.votes[i])
        for n, e in enumerate(episodes)
        for i, reply in enumerate(e.judged)
        if reply is not None and verifier.is_eligible(e.votes[i], e.rule[i])
    ]
    positions = selection.verifier_groups(
        [rewards.majority(votes) for _, _, votes in eligible],
        questions * config.group_size,
        verifier.group_size,
        verifier.share,
        rng,
        balance=verifier.balance,
    )
    return {
        (n, "verifier", i): config.to_advantages(verifier.reward_votes(votes))
        for n, i, votes in (eligible[at] for at in positions)
    }
