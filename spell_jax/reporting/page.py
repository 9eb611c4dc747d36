"""One HTML page about one or more runs, without network access: curves, evaluation, episodes.

1. Runs with configs that differ only in the seed form a group, with a curve of its means and a band
   from the smallest to the largest value.
2. If the page gets full, half of the page is reserved for documents. Omitted episodes and documents
   are spread evenly, and the page states their number. A shared text is stored once.
3. Data is embedded in report.html as lines of base64 (JSON, compressed by gzip), which cannot end a
   script; text enters its elements as textContent only. Line 0 is the overview and the last line
   the index of episodes. The lines between them are unpacked when they are viewed.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import gzip
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from spell_jax.reporting.description import describe, differing_fields, read_config
from spell_jax.reporting.episodes import Episodes, choose_episodes, shares_of, spread_with_ends
from spell_jax.reporting.panels import choose_panels, is_plotted, other_panels
from spell_jax.reporting.tables import Table, compare_tables, six_digits
from spell_jax.runtime import intervals
from spell_jax.runtime.config import flat
from spell_jax.runtime.files.jsonl import write_lines
from spell_jax.runtime.finite import LARGEST_FLOAT32, is_finite
from spell_jax.selfplay import rewards
from spell_jax.selfplay.prompts import ROLES

PAGE = "report.html"
COMPARISON = "comparison.html"  # page of several runs, in the folder of the first
# Maximum episodes and bytes of a page, over all runs. Chromium opened a page of 48.5 MB with 2,000
# episodes in about half a second.
EPISODES = 2000
PAGE_BYTES = 50_000_000
POINTS = 1000  # maximum number of steps in a curve, evenly spaced; a plot has fewer pixels

_TEMPLATE = pathlib.Path(__file__).with_name(PAGE)
STYLE = pathlib.Path(__file__).with_name("style.css")
_DATA = "@DATA@"
_PLACE_BYTES = 24  # maximum size of a document's entry in the index
# Consecutive values that do not fit before the page counts as full: one may be too long where a
# shorter one still fits, but packing thousands in vain takes time.
_MISSES = 20
_TITLE_CHARACTERS = 100  # maximum length of a question in the index
_LABEL_FIELDS = 3  # if groups differ in more fields, their labels are folders
# The first n multiples of the golden ratio, modulo 1, are spread evenly over [0, 1) for every n.
_GOLDEN = (5**0.5 - 1) / 2
X_AXES = ("step", "sampled_tokens")
TOKENS = "rollout/sampled_tokens"
QUESTIONER = "rollout/questioner_reward"  # only in runs with a questioner


@dataclass(frozen=True)
class RunData:
    """Measurements of a run, the input of the page."""

    workdir: epath.Path
    records: Sequence[Mapping[str, Any]]  # lines of its metrics
    evaluation: tuple[Table, Table] | None  # before and after training, see tables.py
    # Metric -> (mean, questions) of the validation before training, see tables.py.
    validation: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)


def write_page(
    runs: Sequence[RunData],
    path: epath.Path,
    size: int = PAGE_BYTES,
    episodes: int = EPISODES,
    x: str = "step",
) -> dict[str, Any]:
    """Write the page of one or more runs; return its overview (all except the episodes).

    The page has at most `size` bytes and, over all runs, at most `episodes` episodes. Curves are
    plotted over `x`, one of X_AXES. ValueError if the curves alone exceed `size` (compare fewer
    runs), or the metrics have no number of tokens to draw over.
    """
    episodes_by_run = [
        choose_episodes(run.workdir, part)
        for run, part in zip(runs, shares_of(episodes, len(runs)), strict=True)
    ]
    template = _TEMPLATE.read_text("utf-8").replace("@STYLE@", STYLE.read_text("utf-8"))
    overview = make_overview(runs, episodes_by_run, x)
    first = _packed(overview)
    room = size - len(template.encode()) - len(first)
    if room < 0:
        raise ValueError(f"{path}: {len(first):,} bytes of curves are too many for the page")
    lines = [first, *_episode_lines(episodes_by_run, room)]
    write_lines(path, [template.replace(_DATA, "\n".join(lines))])
    return overview


# ---------------------------------------------------------------------------------------- Episodes


def _episode_lines(episodes_by_run: Sequence[Episodes], room: int) -> list[str]:
    """Encode the episodes and documents that fit into `room` bytes as lines; then their index."""
    every = [
        (run, episode)
        for run, run_episodes in enumerate(episodes_by_run)
        for episode in run_episodes.chosen_episodes
    ]
    texts = [episodes_by_run[run].documents.get(episode["cluster"], []) for run, episode in every]
    entries = [_entry(run, episode) for run, episode in every]  # entries of the index
    # Every prefix of this order is spread evenly over the episodes, in case the page gets full.
    order = sorted(range(len(every)), key=lambda i: i * _GOLDEN % 1)
    lines = _Lines(room)
    places: dict[str, tuple[int, int]] = {}  # text -> (line, index in the line)

    def add_episodes(keep_free: int) -> None:
        lines.start_pass(keep_free)
        for number in order:
            entry = entries[number]
            if not entry["at"]:
                extra = _index_bytes(entry) + _PLACE_BYTES * len(texts[number])
                entry["at"] = lines.add(every[number][1], extra)

    def add_documents() -> None:
        lines.start_pass(keep_free=0)
        for number in order:
            entry = entries[number]
            if not entry["at"] or entry["documents"]:
                continue
            new = [text for text in dict.fromkeys(texts[number]) if text not in places]
            if new and (line := lines.add(new)):
                places.update({text: (line, i) for i, text in enumerate(new)})
            if all(text in places for text in new):
                entry["documents"] = [places[text] for text in texts[number]]

    # Episodes get half of the room first and their documents the other half: otherwise episodes
    # would fill the page, and no answer could be checked. The second passes use what remains.
    add_episodes(keep_free=room // 2)
    add_documents()
    add_episodes(keep_free=0)
    add_documents()
    return [*lines.packed, _packed([entry for entry in entries if entry["at"]])]


def _entry(run: int, episode: Mapping[str, Any]) -> dict[str, Any]:
    """Make the index entry of an episode; "at" is its line number, None until it has a line."""
    filters = {name: episode[name] for name in ("step", "task", "outcome", "roles")}
    title = episode["question"][:_TITLE_CHARACTERS]
    return {"at": None, "run": run, "title": title, "documents": []} | filters


def _index_bytes(entry: Mapping[str, Any]) -> int:
    """Return an upper bound of an entry's bytes in the index: uncompressed JSON in base64."""
    # 8 characters for the number of the line, which is not known yet; base64 writes 3 bytes as 4.
    return (len(json.dumps(entry)) + 8) * 4 // 3


class _Lines:
    """Lines of the page after the overview, with at most `room` bytes."""

    def __init__(self, room: int):
        self.packed: list[str] = []
        self._room = room - _index_bytes({})
        self.start_pass(0)

    def start_pass(self, keep_free: int) -> None:
        """Start a pass over the episodes that leaves `keep_free` bytes for later passes."""
        self._keep_free, self._misses = keep_free, 0

    def add(self, value: Any, extra: int = 0) -> int | None:
        """Append a value with `extra` bytes elsewhere; return the line number, None if too big."""
        if self._misses == _MISSES:
            return None
        line = _packed(value)
        size = len(line) + 1 + extra
        if size > self._room - self._keep_free:
            self._misses += 1
            return None
        self._misses = 0
        self._room -= size
        self.packed.append(line)
        return len(self.packed)


# ---------------------------------------------------------------------------------------- Overview


def make_overview(
    runs: Sequence[RunData], episodes_by_run: Sequence[Episodes], x: str = "step"
) -> dict[str, Any]:
    places = [_places(run, x) for run in runs]
    configs = [read_config(run.workdir) for run in runs]
    groups = group_by_seed(configs)
    folders = [str(run.workdir) for run in runs]
    short = [run.workdir.name for run in runs]
    # Names of folders suffice unless two runs have the same name.
    labels = _labels(groups, configs, short if len(set(short)) == len(runs) else folders)
    records = [
        [*_first_validation(run), *_with_counted(run.records, episodes)]
        for run, episodes in zip(runs, episodes_by_run, strict=True)
    ]
    values: dict[str, set[float]] = {}
    for record in itertools.chain(*records):
        for name, value in record.items():
            if name != "step" and is_finite(value, LARGEST_FLOAT32):
                values.setdefault(name, set()).add(value)
    names = [name for name in values if is_plotted(name, values[name])]
    panels = choose_panels(names)
    shown = {name for panel in panels for name in panel.metrics.values()}
    return {
        "title": ", ".join(dict.fromkeys(short)),
        "runs": folders,
        "description": describe(
            groups, [run.workdir for run in runs], configs, [run.records for run in runs]
        ),
        "groups": [
            {
                "name": label,
                "runs": members,
                "series": _with_intervals(
                    _series([records[i] for i in members], names, [places[i] for i in members]),
                    [runs[i] for i in members],
                ),
                "mapping": _mapping(configs[members[0]]) if QUESTIONER in names else None,
                "points": _points([episodes_by_run[i] for i in members]),
            }
            for label, members in zip(labels, groups, strict=True)
        ],
        "x": x.replace("_", " "),
        "panels": [dataclasses.asdict(panel) for panel in panels],
        "others": other_panels(set(names) - shown),
        "zeros": sorted(values.keys() - set(names)),
        "evaluation": compare_tables(groups, [run.evaluation for run in runs]),
        "found": sum(episodes.readable_count for episodes in episodes_by_run),
        "total": sum(episodes.total for episodes in episodes_by_run),
    }


def group_by_seed(configs: Sequence[Mapping[str, Any] | None]) -> list[list[int]]:
    """Group runs' indices by config except the seed; a run without a config is alone."""
    groups: dict[str, list[int]] = {}  # key: config, or the index of a run without one
    for place, config in enumerate(configs):
        # A run without a config is alone: nothing shows that it repeats another run.
        seedless_config = (
            None if config is None else {k: v for k, v in config.items() if k != "seed"}
        )
        groups.setdefault(json.dumps(seedless_config or place, sort_keys=True), []).append(place)
    return list(groups.values())


def _labels(
    groups: Sequence[Sequence[int]],
    configs: Sequence[Mapping[str, Any] | None],
    names: Sequence[str],
) -> list[str]:
    """Return the groups' labels: the config fields that differ, or names if there are too many."""
    fields = [dict(flat(configs[members[0]] or {})) for members in groups]
    differing = differing_fields(fields)
    labels = []
    for members, group_fields in zip(groups, fields, strict=True):
        label = ", ".join(f"{name}={group_fields.get(name)}" for name in differing)
        if not 0 < len(differing) <= _LABEL_FIELDS or not all(fields):
            label = names[members[0]]
        labels.append(label)
    return labels


def _first_validation(run: RunData) -> list[dict[str, Any]]:
    """Return the validation before training as a line of metrics, of step 0; [] without one."""
    numbers = {name: mean for name, (mean, _) in run.validation.items()}
    return [{"step": 0, **numbers}] if numbers else []


def _with_intervals(
    series: dict[str, list[list[float]]], runs: Sequence[RunData]
) -> dict[str, list[list[float]]]:
    """Extend curves of shares by the ends of their Wilson intervals, if a single run has them."""
    # Several runs have bands from the smallest to the largest value.
    for name, (_, questions) in runs[0].validation.items() if len(runs) == 1 else ():
        if name in series and questions:
            means = series[name][1]
            # A user's own evaluation may write what is no share.
            if all(0 <= mean <= 1 for mean in means):
                ends = [intervals.wilson(mean, questions)[1:] for mean in means]
                series[name] += [
                    [six_digits(end) for end in side] for side in zip(*ends, strict=True)
                ]
    return series


def _with_counted(records: Sequence[Mapping[str, Any]], episodes: Episodes) -> list[dict[str, Any]]:
    """Extend each step's line of metrics by the metrics computed from the step's episodes."""
    lines = []
    for record in records:
        line = {**record, **episodes.counted.get(record["step"], {})}
        for role in ROLES:
            tokens = line.get(f"rollout/answer_tokens/{role}")
            answers = line.pop(f"episodes/answers/{role}", None)
            # The metric is a mean length. A step's cost by role is the sum.
            if is_finite(tokens, LARGEST_FLOAT32) and answers is not None:
                line[f"episodes/tokens/{role}"] = tokens * answers
        lines.append(line)
    return lines


def check_axis(run: RunData, x: str) -> None:
    """Raise ValueError if a run has no values for the axis `x`, one of X_AXES."""
    if x == "sampled_tokens" and not any(TOKENS in record for record in run.records):
        raise ValueError(f"x = {x!r}: {run.workdir} has no {TOKENS} in its metrics")


def _places(run: RunData, x: str) -> dict[int, float]:
    """Map each step to its place on the x axis: the step, or the tokens sampled until its end.

    A count of tokens that is no finite number, as in a damaged line, counts as 0.
    """
    check_axis(run, x)
    places, tokens = {0: 0.0}, 0.0  # the validation before training
    for record in run.records:
        count = record.get(TOKENS, 0.0)
        tokens += count if is_finite(count, LARGEST_FLOAT32) else 0.0
        places[record["step"]] = record["step"] if x == "step" else tokens
    return places


def _series(
    runs: Sequence[Sequence[Mapping[str, Any]]],
    names: Iterable[str],
    places: Sequence[Mapping[int, float]],
) -> dict[str, list[list[float]]]:
    """Map each metric to [places, means], and also [minima, maxima] if there are several runs.

    Runs are averaged step by step, and so are their places on the x axis.
    """
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for records in runs:
        for record in records:
            by_step.setdefault(record["step"], []).append(record)
    series = {}
    for name in names:
        values_by_step = {
            step: [r[name] for r in by_step[step] if is_finite(r.get(name), LARGEST_FLOAT32)]
            for step in sorted(by_step)
        }
        # A metric such as validation has values at few steps: its own steps are thinned, not the
        # run's.
        steps_with_values = [step for step, values in values_by_step.items() if values]
        steps = spread_with_ends(steps_with_values, POINTS)
        if not steps:
            continue
        values = [values_by_step[step] for step in steps]
        reductions = [statistics.fmean] if len(runs) == 1 else [statistics.fmean, min, max]
        series[name] = [
            [six_digits(statistics.fmean(p[s] for p in places if s in p)) for s in steps],
            *([six_digits(reduce(step_values)) for step_values in values] for reduce in reductions),
        ]
    return series


def _mapping(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Compute the questioner's reward as a curve over the mean answer reward, from the config."""
    try:
        questioner = (config or {})["algorithm"]["questioner"]
        name, mu, sigma = (questioner[key] for key in ("mapping", "mu", "sigma"))
        means = [i / 100 for i in range(101)]
        curve = [[x, six_digits(rewards.questioner_reward(x, name, mu, sigma))] for x in means]
    # Another algorithm or an edited config: the page has no curve then, but all its plots.
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    if not all(is_finite(y) for _, y in curve):
        return None
    return {"name": name, "curve": curve}


def _points(episodes_by_run: Sequence[Episodes]) -> list[list[float]]:
    points = sum((episodes.points for episodes in episodes_by_run), collections.Counter())
    return [[x, y, count] for (x, y), count in sorted(points.items())]


# ----------------------------------------------------------------------------------------- Helpers


def _packed(value: Any) -> str:
    """Encode a value as JSON, gzip and base64, deterministically."""
    # allow_nan=False: the browser's JSON parser would refuse NaN, and with it the whole page.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    # No time in gzip's header: the same run gives the same bytes.
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
