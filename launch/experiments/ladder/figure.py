"""Numbers and figure of the ladder's runs (launch/experiments/ladder), from their folders alone.

1. A run's area is its held-out accuracy, averaged over depths and over the sampled tokens of all
   roles, up to the smallest total of the full arm and its rivals. A run that ends earlier keeps its
   last accuracy. Intervals resample the seeds of an arm (bootstrap, 95 %); differences between arms
   are taken seed by seed.
2. Self-play wins if the interval of the full arm's area lies above the intervals of the frozen and
   the static arm: the threshold that docs/ladder.md stated before any result. If one of these arms
   has fewer than LEAST_SEEDS seeds nothing is decided, a check that was added later.
3. Depths and right references come from the oracle, which reads the episodes of finished runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spell_jax.evaluation.runner import SUMMARY
from spell_jax.launch.experiments.ladder import world
from spell_jax.runtime import intervals
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.log.metrics import read_metrics

FULL, RIVALS = "full", ("frozen", "static")
# Compared seed by seed besides the full arm with each other one: the rest of the 2 x 2 of training
# the questioner and of memory, and what the order of the full arm's questions is worth.
PAIRS = (
    ("no_memory", "frozen_no_memory"),
    ("frozen", "frozen_no_memory"),
    ("yoked", "static"),
    ("yoked", "yoked_shuffled"),
)
LEAST_SEEDS = 5  # the interval of one seed is a point, above any that is lower by chance
OWN_QUESTIONS = "own_questions"
PER = 48  # proposals that mixed questions are counted per
WINDOW = 10  # steps that a point of the curves of questions averages
MIDDLE = (3, 4, 5)  # depths that the warm start answers in part
_TOKENS, _DEPTH = "rollout/sampled_tokens", "eval/depth/"
_SEED = (0, zlib.crc32(b"seeds"))  # of the bootstrap, as for a benchmark of this name


@dataclasses.dataclass(frozen=True)
class Curves:
    """Curves of one run.

    Attributes:
      tokens: sampled tokens of all roles until each validation [P].
      depths: depths of the validations, ascending [D].
      accuracy: held-out accuracy of each validation by depth [P, D].
      verifier: held-out accuracy of the verifier [P].
      entropy: the responder's entropy per token in the steps of the validations, nats [P].
      asked_tokens: sampled tokens until the end of each window of steps [W].
      mixed: questions of mixed rewards per PER proposals [W].
      depth: mean depth of the answered questions in the grammar [W]; NaN if there are none.
      references: depth -> whether each reference is right, of answered questions in the grammar
        about people of the documents.
      unanswerable: share of the answered questions in the grammar that are about other people.
      misread: share of the wrong answers to questions of MIDDLE depths that walk the chain rightly.
      lucky: share of the right answers to such questions that do not.
      chains: for the first and the last 2 * WINDOW steps, the most frequent chain of relations
        after the first one in questions of MIDDLE depths, its share of them all and its solve rate.
    """

    tokens: np.ndarray
    depths: Sequence[int]
    accuracy: np.ndarray
    verifier: np.ndarray
    entropy: np.ndarray
    asked_tokens: np.ndarray
    mixed: np.ndarray
    depth: np.ndarray
    references: Mapping[int, Sequence[bool]]
    unanswerable: float
    misread: float
    lucky: float
    chains: Sequence[Mapping[str, Any]]

    @property
    def crossing(self) -> np.ndarray:
        """Depth at which the accuracy crosses one half, interpolated [P]."""
        return np.array([_crossing(row) for row in self.accuracy])

    def area(self, budget: float) -> float:
        """Compute the mean accuracy over all depths and over the tokens from 0 to `budget`."""
        # Arms sample different numbers of tokens in a step, so a mean over steps would favor arms
        # with long answers.
        return float(self._accuracy_at(np.linspace(0, budget, 1001)).mean())

    def final(self, budget: float) -> float:
        """Compute the mean accuracy over all depths after `budget` tokens."""
        return float(self._accuracy_at(np.array([budget]))[0])

    def _accuracy_at(self, tokens: np.ndarray) -> np.ndarray:
        """Interpolate accuracy at numbers of tokens; constant before and after all validations."""
        return np.interp(tokens, self.tokens, self.accuracy.mean(axis=1))


def _crossing(accuracy: np.ndarray) -> float:
    """Interpolate the depth at which accuracy first falls below 1/2; depth 0 counts as 1."""
    accuracies = [1.0, *accuracy]
    for depth, value in enumerate(accuracies):
        if value < 0.5:
            return depth - 1 + (accuracies[depth - 1] - 0.5) / (accuracies[depth - 1] - value)
    return float(len(accuracy))


def read_run(folder: pathlib.Path) -> Curves:
    """Read the curves of a run; ValueError if it has no validation."""
    records = read_metrics(folder)
    totals = np.cumsum([record.get(_TOKENS, 0.0) for record in records])
    until = {record["step"]: total for record, total in zip(records, totals, strict=True)}
    points = [record for record in records if any(name.startswith(_DEPTH) for name in record)]
    if not points:
        raise ValueError(f"{folder}: has no validation in its metrics; must set validate_every")
    depths = sorted(int(name.removeprefix(_DEPTH)) for name in points[0] if _DEPTH in name)
    entropy, last = {}, np.nan
    for record in records:  # a step without an update keeps the last entropy
        last = record.get("train/entropy/responder", last)
        entropy[record["step"]] = last
    windows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for step, episode in read_episodes(folder):
        windows[(step - 1) // WINDOW].append(episode)
    references: dict[int, list[bool | None]] = defaultdict(list)
    parts = [windows[window] for window in sorted(windows)]
    question_measures = [_measure_questions(part, references) for part in parts]
    ends = [min((window + 1) * WINDOW, max(until)) for window in sorted(windows)]
    misread, lucky = _measure_walks([*itertools.chain(*parts)])
    all_rights = [right for rights in references.values() for right in rights]
    return Curves(
        tokens=np.array([until[record["step"]] for record in points]),
        depths=depths,
        accuracy=np.array([[record[f"{_DEPTH}{d}"] for d in depths] for record in points]),
        verifier=np.array([record["eval/verifier"] for record in points]),
        entropy=np.array([entropy[record["step"]] for record in points]),
        asked_tokens=np.array([until[step] for step in ends]),
        mixed=np.array([mixed for mixed, _ in question_measures]),
        depth=np.array([depth for _, depth in question_measures]),
        references={
            depth: [right for right in rights if right is not None]
            for depth, rights in sorted(references.items())
        },
        unanswerable=float(np.mean([right is None for right in all_rights])) if all_rights else 0.0,
        misread=misread,
        lucky=lucky,
        chains=[_find_chain([*itertools.chain(*window)]) for window in (parts[:2], parts[-2:])],
    )


def _measure_questions(
    episodes: Sequence[Mapping[str, Any]], references: dict[int, list[bool | None]]
) -> tuple[float, float]:
    """Return (mixed questions per PER proposals, mean depth); add correctness to `references`.

    None stands for a question that the documents do not answer.
    """
    documents = {e["cluster"]: e["documents"] for e in episodes if e.get("documents")}
    depths, mixed = [], 0
    for episode in episodes:
        mixed += len(set(episode["scores"])) > 1
        depth = world.depth_of(episode["question"])
        if episode["answers"] and depth:
            depths.append(depth)
            truth = world.oracle(episode["question"], documents[episode["cluster"]])
            references[depth].append(None if truth is None else episode["reference"] == truth)
    return PER * mixed / len(episodes), float(np.mean(depths)) if depths else np.nan


def _measure_walks(episodes: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return (share of wrong answers with right walks, share of right answers with wrong walks)."""
    documents = {e["cluster"]: e["documents"] for e in episodes if e.get("documents")}
    kinds: dict[bool, list[bool]] = {True: [], False: []}
    for episode in episodes:
        if episode["answers"] and world.depth_of(episode["question"]) in MIDDLE:
            walked = world.walk(episode["question"], documents[episode["cluster"]])
            for answer, score in zip(episode["answers"], episode["scores"], strict=True):
                if walked is not None:
                    is_right = f"> {' '.join(walked.evidence)}<" in answer
                    kinds[score > 0].append(is_right != (score > 0))
    lucky, misread = (
        float(np.mean(mismatches)) if mismatches else 0.0 for mismatches in kinds.values()
    )
    return misread, lucky


def _find_chain(episodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Find the most frequent relations after the first relation in questions of MIDDLE depths."""
    rates: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode["answers"] and world.depth_of(episode["question"]) in MIDDLE:
            _, *relations, _ = episode["question"].split(" of ")
            rates[" ".join(relations)].append(float(np.mean(episode["scores"])))
    if not rates:
        return {}
    chain = max(rates, key=lambda chain: len(rates[chain]))
    share = len(rates[chain]) / sum(map(len, rates.values()))
    return {"relations": chain, "share": share, "rate": float(np.mean(rates[chain]))}


def measure_arms(arms: Mapping[str, Mapping[int, Curves]]) -> dict[str, Any]:
    """Compute the numbers of all arms (seed -> run) as JSON values."""
    # Areas end where the shortest of the compared runs ends, so that none is extrapolated. Other
    # arms do not shorten them.
    rivals = [arm for arm in (FULL, *RIVALS) if arm in arms] or [*arms]
    budget = min(float(run.tokens[-1]) for arm in rivals for run in arms[arm].values())
    areas = {arm: {seed: run.area(budget) for seed, run in of.items()} for arm, of in arms.items()}
    finals = {arm: [run.final(budget) for run in of.values()] for arm, of in arms.items()}

    def compare(first_arm: str, second_arm: str) -> list[float]:
        first_areas = areas.get(first_arm, {})
        # Equal seeds have equal clusters and starting policies, so their difference has less noise.
        return [
            first_areas[seed] - area
            for seed, area in areas.get(second_arm, {}).items()
            if seed in first_areas
        ]

    differences = {arm: compare(FULL, arm) for arm in areas if arm != FULL}
    pairs = {
        f"{first_arm}_minus_{second_arm}": compare(first_arm, second_arm)
        for first_arm, second_arm in PAIRS
    }
    numbers: dict[str, Any] = {
        "tokens": budget,
        "areas": {arm: _interval([*of.values()]) for arm, of in areas.items()},
        "finals": {arm: _interval(values) for arm, values in finals.items()},
        "full_minus": {arm: _interval(values) for arm, values in differences.items() if values},
        "pairs": {name: _interval(values) for name, values in pairs.items() if values},
        "arms": {arm: _measure_arm([*of.values()]) for arm, of in arms.items()},
    }
    runs = {arm: len(of) for arm, of in arms.items()}
    return numbers | {"verdict": verdict(numbers["areas"], runs)}


def _measure_arm(runs: Sequence[Curves]) -> dict[str, Any]:
    """Compute values at the end of the runs; for mixed questions and chains also at the start."""
    right: dict[int, list[bool]] = defaultdict(list)
    for run in runs:
        for depth, values in run.references.items():
            right[depth] += values
    return {
        "runs": len(runs),
        "accuracy_by_depth": {
            str(depth): float(np.mean(values))
            for depth, *values in zip(
                runs[0].depths, *(run.accuracy[-1] for run in runs), strict=True
            )
        },
        "depth_at_half": _interval([run.crossing[-1] for run in runs]),
        "mixed_first": _interval([run.mixed[0] for run in runs]),
        "mixed_last": _interval([run.mixed[-1] for run in runs]),
        "verifier": _interval([run.verifier[-1] for run in runs]),
        "entropy": _interval([run.entropy[-1] for run in runs]),
        "unanswerable": _interval([run.unanswerable for run in runs]),
        "misread": _interval([run.misread for run in runs]),
        "lucky": _interval([run.lucky for run in runs]),
        "chain_share_first": _interval([run.chains[0].get("share", 0.0) for run in runs]),
        "chain_share_last": _interval([run.chains[-1].get("share", 0.0) for run in runs]),
        "chains": [list(run.chains) for run in runs],
        "references_right": {
            str(depth): {"share": float(np.mean(values)), "questions": len(values)}
            for depth, values in sorted(right.items())
            if values
        },
    }


def _interval(values: Sequence[float]) -> dict[str, float]:
    return intervals.resample(values, _SEED)._asdict()


def verdict(areas: Mapping[str, Mapping[str, float]], runs: Mapping[str, int]) -> str:
    """Return the verdict of the threshold, with the intervals; `runs` counts the seeds by arm."""
    missing = [arm for arm in (FULL, *RIVALS) if arm not in areas]
    if missing:
        return f"Not decided: no run of {', '.join(missing)}."
    texts = ", ".join(
        f"{arm} {areas[arm]['mean']:.3f} [{areas[arm]['low']:.3f}, {areas[arm]['high']:.3f}]"
        for arm in (FULL, *RIVALS)
    )
    few_seeds = {arm: runs[arm] for arm in (FULL, *RIVALS) if runs[arm] < LEAST_SEEDS}
    if few_seeds:
        counts = ", ".join(f"{arm} {seeds}" for arm, seeds in few_seeds.items())
        return f"Not decided: fewer than {LEAST_SEEDS} seeds ({counts}): {texts}."
    # Stricter than an interval of differences above 0: the two intervals must not overlap.
    wins = all(areas[FULL]["low"] > areas[arm]["high"] for arm in RIVALS)
    return f"Self-play {'wins' if wins else 'does not win'}: {texts}."


def read_crossplay(run: pathlib.Path) -> dict[str, dict[str, float]]:
    """Read responder step -> last step of a questioner window -> share of right answers."""
    shares = {}
    for path in sorted(run.glob(f"crossplay/*/answers/{SUMMARY}"), key=lambda p: int(p.parts[-3])):
        (row,) = json.loads(path.read_text())["rows"]
        right: dict[int, float] = defaultdict(float)
        question_counts: dict[int, int] = defaultdict(int)
        for part in row["benchmarks"][OWN_QUESTIONS]["by"]:
            end = (1 + (part["step"] - 1) // WINDOW) * WINDOW
            right[end] += part["pass@1"]["mean"] * part["questions"]
            question_counts[end] += part["questions"]
        shares[path.parts[-3]] = {
            str(end): right[end] / question_counts[end] for end in sorted(question_counts)
        }
    return shares


def draw_figure(
    arms: Mapping[str, Mapping[int, Curves]], numbers: Mapping[str, Any], path: epath.Path
) -> None:
    """Draw the figure as a PNG file: a panel for each measure, a line for each arm."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    for arm, seeds in arms.items():
        runs = seeds.values()
        _curve(panels[0], arm, [(run.tokens, run.accuracy.mean(axis=1)) for run in runs])
        _curve(panels[1], arm, [(run.tokens, run.crossing) for run in runs])
        _curve(panels[2], arm, [(run.asked_tokens, run.mixed) for run in runs])
        _curve(panels[3], arm, [(run.asked_tokens, run.depth) for run in runs])
        rights = numbers["arms"][arm]["references_right"]
        panels[4].plot(
            [*map(int, rights)], [depth_numbers["share"] for depth_numbers in rights.values()], "o-"
        )
        _curve(panels[5], arm, [(run.tokens, run.entropy) for run in runs])
    panels[4].set_ylim(0, 1.05)
    titles = (
        "Held-out accuracy, mean over depths",
        "Depth at which accuracy crosses .5",
        f"Mixed questions per {PER} proposals",
        "Mean depth of answered questions",
        "Right references, by depth",
        "Responder's entropy per token (nats)",
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("depth" if "by depth" in title else "sampled tokens of all roles")
    panels[0].legend(fontsize=8)
    with path.open("wb") as file:
        figure.savefig(file, format="png", dpi=75)


def _curve(panel: Axes, arm: str, runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Plot the mean over the runs of an arm, up to the end of the shortest run."""
    places = np.linspace(0, min(x[-1] for x, _ in runs), 101)
    panel.plot(places, np.mean([np.interp(places, *run) for run in runs], axis=0), label=arm)
