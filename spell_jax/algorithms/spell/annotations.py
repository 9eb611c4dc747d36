"""Use of each role's replies in an update, or why a reply is in no group."""

from __future__ import annotations

from collections.abc import Sequence

from spell_jax.algorithms.base import USED, Annotation
from spell_jax.algorithms.spell.config import VerifiedConfig
from spell_jax.algorithms.spell.episode import Advantages, SpellEpisode
from spell_jax.algorithms.spell.sections import QuestionerConfig, VerifierConfig


def annotate(
    episodes: Sequence[SpellEpisode],
    advantages: Advantages,
    config: VerifiedConfig,
    questioner: QuestionerConfig | None,
) -> list[Annotation]:
    """Return each episode's advantages by role, and the use of each role's replies or why not.

    `questioner` is None for a step without a questioner.
    """
    annotations = []
    for n, e in enumerate(episodes):
        by_role = {
            role: advantages[n, role, 0]
            for role in ("responder", "questioner")
            if (n, role, 0) in advantages
        }
        # The verifier has a group per answer, the other roles one per question.
        votes = [advantages.get((n, "verifier", i), []) for i in range(len(e.judged))]
        used: dict[str, str | list[str]] = {
            "responder": USED if "responder" in by_role else _why_no_answers(e),
            "verifier": [
                USED if values else _why_no_votes(e, i, config.verifier)
                for i, values in enumerate(votes)
            ],
        }
        if questioner:
            why = _why_no_question(e, questioner)
            used["questioner"] = USED if "questioner" in by_role else why
        annotations.append(Annotation(by_role | {"verifier": votes}, used))
    return annotations


def _why_no_question(e: SpellEpisode, questioner: QuestionerConfig) -> str:
    if e.proposal is None:
        return "no_proposal"
    if not questioner.train:
        return "not_trained"
    if e.reward is None:
        return "no_reward"
    return "surplus" if e.mixed else "not_sampled"


def _why_no_answers(e: SpellEpisode) -> str:
    if e.response is None:
        return e.status
    return "surplus" if e.mixed else "equal_rewards"


def _why_no_votes(e: SpellEpisode, i: int, verifier: VerifierConfig) -> str:
    if e.judged[i] is None:
        return "not_judged"
    if not verifier.train:
        return "not_trained"
    is_eligible = verifier.is_eligible(e.votes[i], e.rule[i])
    return "not_sampled" if is_eligible else "nothing_to_learn"
