"""Panels of the report page: groups of metrics in one plot, for any algorithm."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.selfplay.prompts import ROLES

# Phases after the waiting times of the agents; "rollout" is the rest of the rollout's time.
_PHASES = ("rollout", "update", "validate", "write", "save")
_STATUSES = ("accepted", "bad_format", "declined", "no_puzzle", "ungrounded", "overlong")
_STATUSES += ("too_small",)
_AGENTS = (*ROLES, "reference_reader")


@dataclass(frozen=True)
class Panel:
    """A plot of one or more curves."""

    section: str  # of the page: "Learning" or "Time"
    title: str  # the part before a colon is the name
    # Label -> metric, measured or not. Colors follow this order, so equal first labels have equal
    # colors in all panels.
    metrics: dict[str, str]
    stacked: bool = False  # whether the values are parts of a sum, plotted as stacked areas


def choose_panels(names: Collection[str]) -> list[Panel]:
    """Choose the panels with any of the measured metrics `names`, by name or by pattern."""
    measured_names = set(names)
    # Panels are fixed and in this order: the page of any algorithm shows the same plot at the same
    # place. Metrics without a panel are not lost, see other_panels.
    panels = [*_learning(measured_names), *_time(measured_names)]
    return [panel for panel in panels if measured_names & set(panel.metrics.values())]


def other_panels(names: Collection[str]) -> list[dict[str, Any]]:
    """Group remaining metrics in panels: "a/b/c" and "a/b/d" are two curves of the panel "a/b"."""
    panels: dict[str, dict[str, str]] = {}
    # Metrics with the same beginning mostly share a unit, and thus an axis.
    for name in sorted(names):
        beginning, _, last = name.rpartition("/")
        panels.setdefault(beginning if "/" in beginning else name, {})[last] = name
    return [{"title": title, "metrics": metrics} for title, metrics in panels.items()]


def panels_by_prefix(names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Map each prefix to panels of all its metrics; names without a prefix belong to "other"."""
    prefixes: dict[str, list[dict[str, Any]]] = {}
    for panel in other_panels(names):
        prefix, _, suffix = panel["title"].partition("/")
        name, title = (prefix, suffix) if suffix else ("other", prefix)
        prefixes.setdefault(name, []).append(panel | {"title": title})
    return prefixes


def _learning(names: Collection[str]) -> Iterator[Panel]:
    def panel(title: str, metrics: dict[str, str], stacked: bool = False) -> Panel:
        return Panel("Learning", title, metrics, stacked)

    def divided(name: str) -> dict[str, str]:
        return {"all": name} | _parts(names, name, PAPER_TASKS)

    yield panel("Solve rate: how difficult questions are", divided("rollout/solve_rate"))
    yield panel(
        "Groups of answers: mixed rewards, or all alike",
        {name: f"rollout/{name}" for name in ("mixed", "unsolved", "fully_solved")},
    )
    # Stacked: every proposal has one status, so the shares add up to 1.
    yield panel("What became of questions", {s: f"rollout/{s}" for s in _STATUSES}, True)
    yield panel(
        "Task mix: questions with mixed rewards",
        _parts(names, "episodes/mixed", PAPER_TASKS),
        True,
    )
    # The questioner's reward has a panel of its own.
    rewards = r"rollout/(?!questioner_)(\w+_(?:reward|by_chance))"
    yield panel("Rewards: means, and what a guess earns", _matching(names, rewards))
    yield panel(
        "Form of answers: well-formed, permutations, quoted word for word, none found",
        {n: f"rollout/{n}" for n in ("well_formed", "permutation", "verbatim", "no_answer")},
    )
    yield panel("Forms in which answers are stated", _matching(names, r"rollout/form/(\w+)"), True)
    yield panel("Outputs that could not be parsed", _parts(names, "rollout/unparsed", _AGENTS))
    yield panel("Scores of evidence", _matching(names, r"rollout/(evidence_score\w*)"))
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
    yield panel("Answer length, tokens", _parts(names, "rollout/answer_tokens", _AGENTS))
    yield panel("Answers truncated at the cap", _parts(names, "rollout/truncated", _AGENTS))
    yield panel("Questioner's reward", divided("rollout/questioner_reward"))
    yield panel("Held out, by validation", _matching(names, r"eval/(\w+)"))


def _time(names: Collection[str]) -> Iterator[Panel]:
    phases = *_parts(names, "rollout/answer_tokens", _AGENTS), *_PHASES
    seconds = {phase: f"time/seconds/{phase}" for phase in phases}
    yield Panel("Time", "Seconds a step, by phase", seconds, True)
    yield Panel(
        "Time",
        "Tokens per second of rollout",
        {name: f"time/tokens_per_second/{name}" for name in ("sampled", "prefilled")},
    )
    yield Panel(
        "Time",
        "Tokens sampled in a step: answers × their mean length",
        {role: f"episodes/tokens/{role}" for role in ROLES},
        True,
    )
    yield Panel(
        "Time",
        "Sampler: starved slots, padded group slots, reused prompt tokens",
        {
            name.replace("_", " "): f"rollout/sampler/{name}"
            for name in ("starved_slots", "padded_group_slots", "reused_prompt_tokens")
        },
    )


def _parts(names: Collection[str], name: str, first: tuple[str, ...]) -> dict[str, str]:
    """Map labels to name/LABEL: `first`, then the other measured labels, numbers by size."""
    other_labels = _matching(names, rf"{re.escape(name)}/(\w+)")
    # By length before the letters: as texts, 16 would come before 4.
    labels = dict.fromkeys((*first, *sorted(other_labels, key=lambda label: (len(label), label))))
    return {label: f"{name}/{label}" for label in labels}


def _matching(names: Collection[str], pattern: str) -> dict[str, str]:
    """Map labels to the names that match a pattern; the pattern's first group is the label."""
    matches = ((re.fullmatch(pattern, name), name) for name in sorted(names))
    return {match[1]: name for match, name in matches if match}
