"""Metric names that docs/metrics.md explains, as patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.paths import ROOT

PAGE = ROOT / "docs" / "metrics.md"
PLACES = {
    "[/TASK]": "(/(general_qa|financial_math|multiple_choice|cloze))?",
    "TASK": "(general_qa|financial_math|multiple_choice|cloze)",
    "[/K]": "(/[2-8])?",
    "AGENT": "(questioner|responder|verifier|reference_reader|reward_model)",
    "ROLE": "(questioner|responder|verifier)",
    "FORM": "(phrase|colon|boxed|bare|unparsed)",
    "MODEL": "reward_model",
    "NUMBER": r"\w+",
    "REASON": r"\w+",
    "KIND": r"\w+",
    "DOCUMENTS": r"\d+",
}

# Names on the page that SPELL does not have, but another algorithm has (test_metric_names.py).
OF_OTHER_ALGORITHMS = {
    *("rollout/dense_reward[/K]", "rollout/sparse_reward[/K]", "rollout/permutation[/K]"),
    *("rollout/dense_by_chance[/K]", "rollout/sparse_by_chance[/K]", "rollout/options"),
    *("rollout/solve_rate[/K]", "rollout/mixed[/K]", "rollout/cut_documents"),
    "rollout/no_puzzle",
    *("rollout/well_formed[/TASK]", "rollout/verbatim[/TASK]", "rollout/evidence_reward[/TASK]"),
    *(
        "rollout/outcome_reward[/TASK]",
        "rollout/total_reward[/TASK]",
        "rollout/evidence_score[/TASK]",
    ),
    *("rollout/evidence_score_right[/TASK]", "rollout/evidence_score_wrong[/TASK]"),
    *(
        "rollout/evidence_precision[/TASK]",
        "rollout/evidence_recall[/TASK]",
        "rollout/scoring_order[/TASK]",
        "rollout/scoring_accuracy[/TASK]",
        "rollout/scoring_best[/TASK]",
        "rollout/evidence_rouge_l[/TASK]",
    ),
    *("rollout/scoring_failed[/TASK]", "rollout/scoring_retried[/TASK]"),
    *("rollout/scoring_consistent[/TASK]", "rollout/kept_scorings", "rollout/refreshed_scorings"),
    *("eval/dense_reward[/K]", "eval/sparse_reward[/K]", "eval/permutation[/K]"),
    *("eval/well_formed", "eval/verbatim"),
    *("eval/evidence_precision", "eval/evidence_recall"),
    *("rollout/phase", "rollout/retrospective"),
    *("rollout/preference_pairs[/TASK]", "rollout/short_solve_rate[/TASK]"),
    *("train/preference_loss", "train/preference_accuracy"),
    *("train/chosen_reward", "train/rejected_reward", "train/chosen_nll"),
    "train/alignment",
    *("rollout/static_questions", "rollout/judge_failed[/TASK]", "eval/all", "eval/TASK"),
}
# Names for the updates of another model.
OF_OTHER_MODELS = {
    *("train/rows/MODEL", "train/advantage/MODEL", "train/advantage_size/MODEL"),
    "train/MODEL/NUMBER",
}


def explained() -> dict[str, re.Pattern[str]]:
    """Map each name on the page to the pattern that the name stands for."""
    first = "".join(re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.M))
    patterns = {}
    for name in re.findall(r"`([\w/\[\]]+)`", first):
        pattern = re.escape(name)
        for place, place_pattern in PLACES.items():
            pattern = pattern.replace(re.escape(place), place_pattern)
        patterns[name] = re.compile(pattern)
    return patterns


def compare(written: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return (written names that the page does not explain, names of the page never written)."""
    written, patterns = set(written), explained()
    unknown = {n for n in written if not any(p.fullmatch(n) for p in patterns.values())}
    return unknown, {name for name, p in patterns.items() if not any(map(p.fullmatch, written))}
