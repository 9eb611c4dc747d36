"""Metrics of questions and their answers."""

from __future__ import annotations

from collections.abc import Sequence

from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.episode import count_fields, count_reasons
from spell_jax.algorithms.spell.episode import STATUSES, SpellEpisode
from spell_jax.algorithms.spell.sections import VerifierConfig
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.selfplay import rewards

# Fields of an episode, and the metrics that count them.
_REWARDS = {"reward": "questioner_reward", "scores": "responder_reward"}
_OF_PROMPT = {"reduced": "reduced_m", "dropped": "dropped_from_prompt"}
_OF_ANSWERED = {"leaked": "leaked", "named": "named_document", "rule": "rule_reward"}


def count_questions(
    episodes: Sequence[SpellEpisode],
    config: AlgorithmConfig,
    verifier: VerifierConfig | None = None,
) -> Metrics:
    """Compute shares and means over all episodes and per task (spec section 10)."""
    metrics = Metrics()
    for e in episodes:
        e.count_unparsed(metrics)
        for reply in e.replies:
            config.count_forms(metrics, reply.scored_texts, e.task)
        for suffix in ("", f"/{e.task}"):
            _count(metrics, e, suffix)
            if verifier is not None:
                for reward in (r for votes in e.votes for r in verifier.reward_votes(votes)):
                    metrics.add(f"verifier_reward{suffix}", reward)
    tasks = sorted({e.task for e in episodes})
    for e in (e for e in episodes if e.mixed):
        # Figure 8(a): the tasks of solvable questions, r_que > 0 in Algorithm 1.
        for task in tasks:
            metrics.add(f"solvable_share/{task}", e.task == task)
    count_reasons(metrics, episodes)
    return metrics


def _count(metrics: Metrics, e: SpellEpisode, suffix: str) -> None:
    """Add an episode to the metrics, whether or not it is trained on; names end in `suffix`."""
    for status in STATUSES:
        metrics.add(f"{status}{suffix}", e.status == status)
    # No prompt was made for a cluster that is too small: zeros would lower the means.
    if e.status != "too_small":
        metrics.add(f"documents_shown{suffix}", len(e.shown))
        count_fields(metrics, e, _OF_PROMPT, suffix)
        metrics.add(f"history{suffix}", len(e.history))
    count_fields(metrics, e, _REWARDS, suffix)
    if not e.scores:
        return
    metrics.add(f"solve_rate{suffix}", e.mean_score)
    metrics.add(f"mixed{suffix}", e.mixed)
    metrics.add(f"unsolved{suffix}", max(e.scores) <= 0)
    metrics.add(f"fully_solved{suffix}", min(e.scores) >= 1)
    metrics.add(f"reference_replaced{suffix}", e.own_reference != e.reference)
    count_fields(metrics, e, _OF_ANSWERED, suffix)
    metrics.add_sum(f"unjudged{suffix}", e.unjudged, len(e.scores))
    e.count_failed_verdicts(metrics, suffix)
    for rule, votes, prediction in zip(e.rule, e.votes, e.predictions, strict=True):
        metrics.add(f"no_answer{suffix}", prediction is None)
        if votes:
            verdict = rewards.majority(votes)
            metrics.add(f"malformed_votes{suffix}", votes.count(-1) / len(votes))
            metrics.add(f"verdict_ignored{suffix}", verdict == -1)
            # The third argument leaves void verdicts out of the mean: they decide nothing (spec
            # 14).
            metrics.add(f"verdict_differs_from_rule{suffix}", verdict != rule, verdict != -1)
            metrics.add(f"verdict_yes{suffix}", verdict == 1)
