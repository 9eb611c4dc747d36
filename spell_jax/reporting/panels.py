"""Panels of the report page: groups of metrics in one plot, for any algorithm."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.selfplay.prompts import ROLES

# Phases after the waiting times of the agents; "rollout" is the rest of the rollout's time.
_PHASES = ("rollout", "update", "validate", "write", "save")
_STATUSES = ("accepted", "bad_format", "declined", "no_puzzle", "ungrounded", "overlong")
_STATUSES += ("too_small",)
_AGENTS = (*ROLES, "reference_reader")


# These metrics are plotted even if they are 0 at every step: that is a result.
_KEPT_ZEROS = re.compile(r"eval/(?!truncated/).*|rollout/(solve_rate|\w+_reward)")
_ACCURACIES = ("all", "responder", "verifier", *PAPER_TASKS)
# Measures of held-out answers besides accuracy.
_MEASURES = ("exact match", "F1", "well_formed", "verbatim", "permutation")
_MEASURES += ("dense_reward", "sparse_reward", "evidence_precision", "evidence_recall")
# Pattern of a metric's name -> its unit, the first one that matches.
_UNITS = {
    r"time/tokens_per_second": "tokens per second",
    r"time/.*(seconds|idle)": "seconds",
    r"process/.*mib": "MiB",
    r".*tokens(/|$)": "tokens",
    r"train/entropy|train/.*kl|train/mean_logprob": "nats per token",
    r"eval/": "share of questions",
}


@dataclass(frozen=True)
class Panel:
    """A plot of one or more curves."""

    section: str  # of the page: "Held out", "Learning" or "Time"
    title: str  # the part before a colon is the name
    unit: str  # label of the y axis
    # Label -> metric, measured or not. Colors follow this order, so equal first labels have equal
    # colors in all panels.
    metrics: dict[str, str]
    stacked: bool = False  # whether the values are parts of a sum, plotted as stacked areas


def is_plotted(name: str, values: Collection[float]) -> bool:
    """Return whether a metric with these values has a curve: most zeros tell nothing."""
    return any(values) or _KEPT_ZEROS.fullmatch(name) is not None


def choose_panels(names: Collection[str]) -> list[Panel]:
    """Choose the panels with any of the measured metrics `names`, by name or by pattern."""
    measured_names = set(names)
    # Panels are fixed and in this order: the page of any algorithm shows the same plot at the same
    # place. Metrics without a panel are not lost, see other_panels.
    panels = [*_held_out(measured_names), *_learning(measured_names), *_time(measured_names)]
    return [
        _with_label(panel, measured_names)
        for panel in panels
        if measured_names & set(panel.metrics.values())
    ]


def _with_label(panel: Panel, names: Collection[str]) -> Panel:
    """Extend the title of a panel with one curve by the curve's label, unless it is "all"."""
    labels = [label for label, name in panel.metrics.items() if name in names]
    if len(labels) != 1 or labels == ["all"]:
        return panel
    return replace(panel, title=f"{panel.title}: {labels[0].replace('_', ' ')}")


def other_panels(names: Collection[str]) -> list[dict[str, Any]]:
    """Group remaining metrics in panels: "a/b/c" and "a/b/d" are two curves of the panel "a/b"."""
    panels: dict[str, dict[str, str]] = {}
    # Metrics with the same beginning mostly share a unit, and thus an axis.
    for name in sorted(names):
        beginning, _, last = name.rpartition("/")
        panels.setdefault(beginning if "/" in beginning else name, {})[last] = name
    return [
        {"title": title, "unit": _unit_of(title), "metrics": metrics}
        for title, metrics in panels.items()
    ]


def _unit_of(name: str) -> str:
    """Return the label of a metric's axis: its unit where the name tells it, else the name."""
    units = (unit for pattern, unit in _UNITS.items() if re.match(pattern, name))
    return next(units, name.partition("/")[2] or name)


def _held_out(names: Collection[str]) -> Iterator[Panel]:
    measured = _matching(names, r"eval/([\w ]+)")
    accuracies = dict.fromkeys((*_ACCURACIES, *measured))
    accuracy = {label: f"eval/{label}" for label in accuracies if label not in _MEASURES}
    yield Panel("Held out", "Held-out accuracy", "share of questions", accuracy)
    measures = {label: f"eval/{label}" for label in _MEASURES}
    yield Panel("Held out", "Other held-out measures", "mean over questions", measures)


def _learning(names: Collection[str]) -> Iterator[Panel]:
    def panel(title: str, unit: str, metrics: dict[str, str], stacked: bool = False) -> Panel:
        return Panel("Learning", title, unit, metrics, stacked)

    def divided(name: str) -> dict[str, str]:
        return {"all": name} | _parts(names, name, PAPER_TASKS)

    answers, questions = "share of answers", "share of questions"
    yield panel("Solve rate", answers, divided("rollout/solve_rate"))
    yield panel(
        "Groups of answers",
        questions,
        {name: f"rollout/{name}" for name in ("mixed", "unsolved", "fully_solved")},
    )
    # Stacked: every proposal has one status, so the shares add up to 1.
    yield panel(
        "What became of questions",
        "share of proposals",
        {s: f"rollout/{s}" for s in _STATUSES},
        True,
    )
    yield panel(
        "Task mix",
        "share of questions with mixed rewards",
        _parts(names, "episodes/mixed", PAPER_TASKS),
        True,
    )
    # The questioner's reward has a panel of its own.
    rewards = r"rollout/(?!questioner_)(\w+_(?:reward|by_chance))"
    yield panel("Rewards", "mean reward", _matching(names, rewards))
    yield panel(
        "Form of answers",
        answers,
        {n: f"rollout/{n}" for n in ("well_formed", "permutation", "verbatim", "no_answer")},
    )
    forms = _matching(names, r"rollout/form/(\w+)")
    yield panel("Forms in which answers are stated", answers, forms, True)
    unparsed = _parts(names, "rollout/unparsed", _AGENTS)
    yield panel("Outputs that could not be parsed", "share of outputs", unparsed)
    scores = _matching(names, r"rollout/(evidence_score\w*)")
    yield panel("Scores of evidence", "mean score", scores)
    scorings = _matching(names, r"rollout/scoring_(\w+)")
    yield panel("Scorings", "share of scorings", scorings)
    yield panel(
        "Verifier's majority against the rule",
        "share that disagrees",
        divided("rollout/verdict_differs_from_rule"),
    )
    yield panel(
        "Verdicts",
        "share of verdicts",
        {n: f"rollout/{n}" for n in ("verdict_yes", "malformed_votes", "verdict_ignored")},
    )
    yield panel("Entropy of the policy", "nats per token", {"all": "train/entropy"})
    lengths = _parts(names, "rollout/answer_tokens", _AGENTS)
    yield panel("Answer length", "tokens", lengths)
    yield panel(
        "Answers truncated at the cap", answers, _parts(names, "rollout/truncated", _AGENTS)
    )
    yield panel("Questioner's reward", "mean reward", divided("rollout/questioner_reward"))


def _time(names: Collection[str]) -> Iterator[Panel]:
    phases = *_parts(names, "rollout/answer_tokens", _AGENTS), *_PHASES
    seconds = {phase: f"time/seconds/{phase}" for phase in phases}
    yield Panel("Time", "Seconds a step, by phase", "seconds per step", seconds, True)
    yield Panel(
        "Time",
        "Speed of the rollout",
        "tokens per second",
        {name: f"time/tokens_per_second/{name}" for name in ("sampled", "prefilled")},
    )
    yield Panel(
        "Time",
        "Tokens sampled in a step",
        "answers × mean tokens",
        {role: f"episodes/tokens/{role}" for role in ROLES},
        True,
    )
    yield Panel(
        "Time",
        "Sampler",
        "share of slots or prompt tokens",
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
