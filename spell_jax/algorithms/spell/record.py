"""Record of a question of SPELL and its metrics, as a run writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spell_jax.algorithms.base import USED, Annotation
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import STATUSES, SpellEpisode, is_eligible_verdict
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import rewards
from spell_jax.selfplay.prompts import Prompts


def annotate(
    episodes: Sequence[SpellEpisode],
    advantages: Mapping[tuple[int, str, int], list[float]],
    config: SpellConfig,
) -> list[Annotation]:
    """Return each episode's advantages by role, and the use of each role's replies or why not."""
    annotations = []
    for n, e in enumerate(episodes):
        roles = [role for role in ("responder", "questioner") if (n, role, 0) in advantages]
        # The verifier has a group per answer, the other roles one per question.
        votes = [advantages.get((n, "verifier", i), []) for i in range(len(e.judged))]
        used = {
            "questioner": USED if "questioner" in roles else _why_no_question(e, config),
            "responder": USED if "responder" in roles else _why_no_answers(e),
            "verifier": [
                USED if values else _why_no_votes(e, i, config) for i, values in enumerate(votes)
            ],
        }
        by_role = {role: advantages[n, role, 0] for role in roles}
        annotations.append(Annotation(by_role | {"verifier": votes}, used))
    return annotations


def _why_no_question(e: SpellEpisode, config: SpellConfig) -> str:
    if e.proposal is None:
        return "no_proposal"
    if not config.train_questioner:
        return "not_trained"
    if e.reward is None:
        return "no_reward"
    return "surplus" if e.mixed else "not_sampled"


def _why_no_answers(e: SpellEpisode) -> str:
    if e.response is None:
        return e.status
    return "surplus" if e.mixed else "equal_rewards"


def _why_no_votes(e: SpellEpisode, i: int, config: SpellConfig) -> str:
    if e.judged[i] is None:
        return "not_judged"
    if not config.train_verifier:
        return "not_trained"
    return "not_sampled" if is_eligible_verdict(e, i, config) else "nothing_to_learn"


def make_record(e: SpellEpisode, annotation: Annotation, prompts: Prompts) -> dict[str, Any]:
    """Return an episode as a line of the run's files.

    "prompt" is the questioner's prompt, in which {documents[i]} stands for a text of the cluster.
    The prompts of the other roles follow from the same documents and the other fields. "used" says
    for each role (for the verifier, for each answer) whether it is trained on, or why not.
    """
    # Documents of up to 16K tokens would repeat in every line: placeholders stand for the texts,
    # which the writer stores once.
    texts = [f"{{documents[{i}]}}" for i in e.shown]
    prompt = e.questioner_prompt and prompts.questioner(e.task, texts, e.history, e.letter, e.cue)
    return {
        "task": e.task,
        "cluster": e.cluster.id,
        "shown": list(e.shown),
        "known": [entry.question for entry in e.history],
        "prompt": prompt,
        "status": e.status,
        "reason": e.reason,
        "proposal": e.proposal.texts[0] if e.proposal else None,
        "question": e.question,
        **({"hidden": e.hidden} if e.hidden else {}),
        "reference": e.reference,
        "own_reference": e.own_reference,
        "blind": list(e.blind),
        "answers": list(e.response.texts) if e.response else [],
        "predictions": list(e.predictions),
        **e.truncation(),
        "rule": list(e.rule),
        **({"named": list(e.named)} if e.named else {}),
        "judge": list(e.judge),
        "votes": [list(votes) for votes in e.votes],
        "scores": list(e.scores),
        "reward": e.reward,
        "advantages": dict(annotation.advantages),
        "used": dict(annotation.used),
    }


def add_metrics(metrics: Metrics, e: SpellEpisode, suffix: str) -> None:
    """Add an episode to the metrics, whether or not it is trained on; names end in `suffix`."""
    for status in STATUSES:
        metrics.add(f"{status}{suffix}", e.status == status)
    # No prompt was made for a cluster that is too small: zeros would lower the means.
    if e.status != "too_small":
        metrics.add(f"documents_shown{suffix}", len(e.shown))
        metrics.add(f"reduced_m{suffix}", e.reduced)
        metrics.add(f"dropped_from_prompt{suffix}", e.dropped)
        metrics.add(f"history{suffix}", len(e.history))
    if e.reward is not None:
        metrics.add(f"questioner_reward{suffix}", e.reward)
    for score in e.scores:
        metrics.add(f"responder_reward{suffix}", score)
    if not e.scores:
        return
    metrics.add(f"solve_rate{suffix}", e.mean_score)
    metrics.add(f"mixed{suffix}", e.mixed)
    metrics.add(f"unsolved{suffix}", max(e.scores) <= 0)
    metrics.add(f"fully_solved{suffix}", min(e.scores) >= 1)
    metrics.add(f"reference_replaced{suffix}", e.own_reference != e.reference)
    metrics.add(f"leaked{suffix}", e.leaked)
    for is_named in e.named:
        metrics.add(f"named_document{suffix}", is_named)
    metrics.add_sum(f"unjudged{suffix}", e.unjudged, len(e.scores))
    e.count_failed_verdicts(metrics, suffix)
    for rule, votes, prediction in zip(e.rule, e.votes, e.predictions, strict=True):
        metrics.add(f"rule_reward{suffix}", rule)
        metrics.add(f"no_answer{suffix}", prediction is None)
        if votes:
            verdict = rewards.majority(votes)
            metrics.add(f"malformed_votes{suffix}", votes.count(-1) / len(votes))
            metrics.add(f"verdict_ignored{suffix}", verdict == -1)
            # The third argument leaves void verdicts out of the mean: they decide nothing (spec
            # 14).
            metrics.add(f"verdict_differs_from_rule{suffix}", verdict != rule, verdict != -1)
            metrics.add(f"verdict_yes{suffix}", verdict == 1)
