"""Which metrics of a run the report's page draws together, whatever was played.

1. A panel lists its metrics by name, or takes all that an algorithm has of a kind: by task or
   another division, by who speaks, rewards, held-out measures.
2. A panel of which nothing was measured is not there.
3. What is in no panel is among the page's other metrics.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from spell_jax.data.clusters import ROLES, TASKS

# Behind the time in which the host waits for answers; "play" is the rest of playing.
_PHASES = ("play", "update", "validate", "write", "save")
_STATUSES = ("accepted", "bad_format", "skipped", "ungrounded", "overlong")
_SPEAKERS = (*ROLES, "reference_reader")


@dataclass(frozen=True)
class Panel:
    """A picture of curves.

    Attributes:
      section: "Learning" or "Time".
      title: what is before a colon is its name.
      metrics: label -> metric; those that come first have the same colors in all panels. What the
        run has not measured may be among them.
      stacked: whether the values add up to something.
    """

    section: str
    title: str
    metrics: dict[str, str]
    stacked: bool = False


def choose_panels(names: Collection[str]) -> list[Panel]:
    """The panels of a run that has measured these."""
    known = set(names)
    panels = [*_learning(known), *_time(known)]
    return [panel for panel in panels if known & set(panel.metrics.values())]


def _learning(names: Collection[str]) -> Iterator[Panel]:
    def panel(title: str, metrics: dict[str, str], stacked: bool = False) -> Panel:
        return Panel("Learning", title, metrics, stacked)

    def divided(name: str) -> dict[str, str]:
        return {"all": name} | _parts(names, name, TASKS)

    yield panel("Solve rate: how difficult questions are", divided("rollout/solve_rate"))
    yield panel(
        "Groups of answers: mixed rewards, or all alike",
        {name: f"rollout/{name}" for name in ("mixed", "unsolved", "fully_solved")},
    )
    yield panel("What became of questions", {s: f"rollout/{s}" for s in _STATUSES}, True)
    yield panel(
        "Task mix: questions with mixed rewards",
        {task: f"episodes/mixed/{task}" for task in TASKS},
        True,
    )
    # The questioner's has a panel of its own.
    rewards = r"play/(?!questioner_)(\w+_(?:reward|by_chance))"
    yield panel("Rewards: means, and what a guess earns", _matching(names, rewards))
    yield panel(
        "Form of answers: well-formed, permutations, quoted word for word, none found",
        {n: f"rollout/{n}" for n in ("well_formed", "permutation", "verbatim", "no_answer")},
    )
    yield panel("Scores of evidence", _matching(names, r"play/(evidence_score\w*)"))
    yield panel("Scorings: failed, retried, consistent", _matching(names, r"rollout/scoring_(\w+)"))
    yield panel(
        "Verifier's majority against the rule: disagreement",
        divided("rollout/verdict_differs_from_rule"),
    )
    yield panel(
        "Verdicts: yes, malformed, ignored",
        {n: f"rollout/{n}" for n in ("verdict_yes", "malformed_votes", "verdict_ignored")},
    )
    yield panel("Entropy of the policy", {"entropy": "train/entropy"})
    for title, name in (
        ("Answer length, tokens", "rollout/answer_tokens"),
        ("Answers cut off at the cap", "rollout/truncated"),
    ):
        yield panel(title, _parts(names, name, _SPEAKERS))
    yield panel("Questioner's reward", divided("rollout/questioner_reward"))
    yield panel("Held out, by validation", _matching(names, r"eval/(\w+)"))


def _time(names: Collection[str]) -> Iterator[Panel]:
    phases = *_parts(names, "rollout/answer_tokens", _SPEAKERS), *_PHASES
    seconds = {phase: f"time/seconds/{phase}" for phase in phases}
    yield Panel("Time", "Seconds a step, by phase", seconds, True)
    yield Panel(
        "Time",
        "Tokens a second of play",
        {name: f"time/tokens_per_second/{name}" for name in ("drawn", "read")},
    )
    yield Panel(
        "Time",
        "Tokens drawn a step: answers × their mean length",
        {role: f"episodes/tokens/{role}" for role in ROLES},
        True,
    )
    yield Panel(
        "Time",
        "Sampler: idle slots, empty cells, reused prompt tokens",
        {
            name.replace("_", " "): f"rollout/sampler/{name}"
            for name in ("idle_slots", "padded_group_slots", "reused_prompt_tokens")
        },
    )


def _parts(names: Collection[str], name: str, first: tuple[str, ...]) -> dict[str, str]:
    """Label -> name/LABEL: of `first`, and of whatever else was measured, numbers by size."""
    others = _matching(names, rf"{re.escape(name)}/(\w+)")
    labels = dict.fromkeys((*first, *sorted(others, key=lambda label: (len(label), label))))
    return {label: f"{name}/{label}" for label in labels}


def _matching(names: Collection[str], pattern: str) -> dict[str, str]:
    """Label -> name, of the names that are of a form; its group is the label."""
    found = ((re.fullmatch(pattern, name), name) for name in sorted(names))
    return {match[1]: name for match, name in found if match}
