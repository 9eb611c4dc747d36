"""What runs did, as one HTML page that needs no network: curves, evaluation, episodes to browse.

1. Runs whose configs differ in nothing but the seed are one group: a curve of its means, and a band
   from the smallest value to the largest.
2. Episodes are chosen evenly over steps, tasks and outcomes, of the same files always the same. One
   comes with the documents that it was about, if the run kept them; a text that several share is
   stored once. Of a page that gets full, half is kept free for documents; what then stays out is
   spread evenly, too, and the page says how much that is.
3. All that a run wrote is data. It goes into report.html as lines of base64, in which nothing can
   end a script: line 0 is the overview, the last one the index of episodes, and between them are
   episodes and documents, each unpacked when it is looked at. A line is JSON, compressed by gzip.
4. report.html draws it; text gets into its elements as textContent only.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import gzip
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from spell_jax.data.clusters import ROLES
from spell_jax.reporting.episodes import Episodes, choose_episodes, evenly, shares_of
from spell_jax.reporting.panels import choose_panels
from spell_jax.runtime.config import flat
from spell_jax.runtime.jsonl import write_lines
from spell_jax.runtime.setup import CONFIG_FILE
from spell_jax.selfplay import rewards

PAGE = "report.html"
COMPARISON = "comparison.html"  # of several runs, in the folder of the first
EPISODES = 2000  # on a page, of all runs
POINTS = 1000  # steps of a curve; of more, as many evenly
PAGE_BYTES = 50_000_000

_FORM = pathlib.Path(__file__).with_name(PAGE)
_DATA = "@DATA@"
_PLACE_BYTES = 24  # of a document in the index, at most
_MISSES = 20  # so many things in a row that do not fit: the page is full
_TITLE_CHARACTERS = 100  # of a question in the index
_LABEL_FIELDS = 3  # a group that more fields than these tell apart goes by its folder
_GOLDEN = (5**0.5 - 1) / 2
QUESTIONER = "rollout/questioner_reward"  # of runs in which somebody asks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What the page is told of a run.

    Attributes:
      workdir: its folder.
      records: the lines of its metrics.
      evaluation: (before, after) tables {section: {row: {column: [mean, half_width]}}}, if any.
    """

    workdir: epath.Path
    records: Sequence[Mapping[str, Any]]
    evaluation: tuple[Mapping, Mapping] | None


def write_page(
    runs: Sequence[Measured], path: epath.Path, size: int = PAGE_BYTES, episodes: int = EPISODES
) -> dict[str, Any]:
    """Writes the page of some runs, with at most so many episodes and bytes.

    Returns:
      All that is on it but the episodes.

    Raises:
      ValueError: the curves alone are more than so many bytes; compare fewer runs.
    """
    read = [
        choose_episodes(run.workdir, part)
        for run, part in zip(runs, shares_of(episodes, len(runs)), strict=True)
    ]
    form = _FORM.read_text(encoding="utf-8")
    overview = _overview(runs, read)
    first = _packed(overview)
    room = size - len(form.encode()) - len(first)
    if room < 0:
        raise ValueError(f"{path}: {len(first):,} bytes of curves are too many for the page")
    lines = [first, *_episode_lines(read, room)]
    write_lines(path, [form.replace(_DATA, "\n".join(lines))])
    return overview


# ---------------------------------------------------------------------------------------- Episodes


def _episode_lines(read: Sequence[Episodes], room: int) -> list[str]:
    """Lines of episodes and documents while there is room, and the index of those."""
    every = [(run, episode) for run, some in enumerate(read) for episode in some.chosen]
    texts = [read[run].documents.get(episode["cluster"], []) for run, episode in every]
    entries = [_entry(run, episode) for run, episode in every]  # of the index
    # The beginning of this order is spread evenly, for the case that the page gets full.
    order = sorted(range(len(every)), key=lambda i: i * _GOLDEN % 1)
    lines = _Lines(room)
    places: dict[str, tuple[int, int]] = {}  # a text -> its line, and where in it

    def add_episodes(keep_free: int) -> None:
        lines.begin(keep_free)
        for number in order:
            entry = entries[number]
            if not entry["at"]:
                extra = _index_bytes(entry) + _PLACE_BYTES * len(texts[number])
                entry["at"] = lines.add(every[number][1], extra)

    def add_documents() -> None:
        lines.begin(keep_free=0)
        for number in order:
            entry = entries[number]
            if not entry["at"] or entry["documents"]:
                continue
            new = [text for text in dict.fromkeys(texts[number]) if text not in places]
            if new and (line := lines.add(new)):
                places.update({text: (line, i) for i, text in enumerate(new)})
            if all(text in places for text in new):
                entry["documents"] = [places[text] for text in texts[number]]

    add_episodes(keep_free=room // 2)
    add_documents()
    add_episodes(keep_free=0)
    add_documents()
    return [*lines.packed, _packed([entry for entry in entries if entry["at"]])]


def _entry(run: int, episode: Mapping[str, Any]) -> dict[str, Any]:
    """What the index says of an episode; "at" is its line, None until it has one."""
    kinds = {name: episode[name] for name in ("step", "task", "outcome", "roles")}
    title = episode["question"][:_TITLE_CHARACTERS]
    return {"at": None, "run": run, "title": title, "documents": []} | kinds


def _index_bytes(entry: Mapping[str, Any]) -> int:
    """So much of the index is an entry at most: its JSON, not compressed, in base64."""
    return (len(json.dumps(entry)) + 8) * 4 // 3


class _Lines:
    """The page's lines behind the overview, while there is room for so many bytes."""

    def __init__(self, room: int):
        self.packed: list[str] = []
        self._room = room - _index_bytes({})
        self.begin(0)

    def begin(self, keep_free: int) -> None:
        """From now on so many bytes are left for what comes later."""
        self._keep_free, self._misses = keep_free, 0

    def add(self, value: Any, extra: int = 0) -> int | None:
        """Takes the room of a value's line and of so many bytes elsewhere; returns the number of
        the line, or None where that does not fit."""
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


def _overview(runs: Sequence[Measured], read: Sequence[Episodes]) -> dict[str, Any]:
    """All that is drawn without looking at an episode."""
    configs = [_config(run.workdir) for run in runs]
    groups = group_by_seed(configs)
    labels = _labels(groups, configs, [str(run.workdir) for run in runs])
    records = [_with_counted(run.records, some) for run, some in zip(runs, read, strict=True)]
    names = {
        name: None
        for record in (record for some in records for record in some)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float)
    }
    panels = choose_panels(names)
    used = {name for panel in panels for name in panel.metrics.values()}
    return {
        "title": ", ".join(dict.fromkeys(run.workdir.name for run in runs)),
        "runs": [str(run.workdir) for run in runs],
        "groups": [
            {
                "name": label,
                "runs": members,
                "series": _series([records[i] for i in members], names),
                "mapping": _mapping(configs[members[0]]) if QUESTIONER in names else None,
                "points": _points([read[i] for i in members]),
            }
            for label, members in zip(labels, groups, strict=True)
        ],
        "panels": [dataclasses.asdict(panel) for panel in panels],
        "others": sorted(name for name in names if name not in used),
        "evaluation": _evaluation(groups, [run.evaluation for run in runs]),
        "found": sum(some.found for some in read),
        "played": sum(some.played for some in read),
    }


def group_by_seed(configs: Sequence[Mapping[str, Any] | None]) -> list[list[int]]:
    """Places of runs whose configs are alike but for the seed; one without a config is alone."""
    groups: dict[str, list[int]] = {}  # by the config, or the place of one without
    for place, config in enumerate(configs):
        rest = None if config is None else {k: v for k, v in config.items() if k != "seed"}
        groups.setdefault(json.dumps(rest or place, sort_keys=True), []).append(place)
    return list(groups.values())


def _labels(
    groups: Sequence[Sequence[int]],
    configs: Sequence[Mapping[str, Any] | None],
    names: Sequence[str],
) -> list[str]:
    """What tells groups apart: a few fields of their configs, else their folders."""
    fields = [dict(flat(configs[members[0]] or {})) for members in groups]
    all_names = dict.fromkeys(name for some in fields for name in some if name != "seed")
    differing = [n for n in all_names if len({json.dumps(some.get(n)) for some in fields}) > 1]
    labels = []
    for members, some in zip(groups, fields, strict=True):
        label = ", ".join(f"{name}={some.get(name)}" for name in differing)
        if not 0 < len(differing) <= _LABEL_FIELDS or not all(fields):
            label = names[members[0]]
        labels.append(label)
    return labels


def _config(workdir: epath.Path) -> dict[str, Any] | None:
    path = workdir / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s: left out (%s)", path, error)
        return None
    return config if isinstance(config, dict) else None


def _with_counted(records: Sequence[Mapping[str, Any]], episodes: Episodes) -> list[dict[str, Any]]:
    """The lines of metrics with what was counted in the step's episodes."""
    lines = []
    for record in records:
        line = {**record, **episodes.counted.get(record["step"], {})}
        for role in ROLES:
            tokens = line.get(f"rollout/answer_tokens/{role}")
            answers = line.pop(f"episodes/answers/{role}", None)
            if tokens is not None and answers is not None:
                line[f"episodes/tokens/{role}"] = tokens * answers
        lines.append(line)
    return lines


def _series(
    runs: Sequence[Sequence[Mapping[str, Any]]], names: Mapping[str, Any]
) -> dict[str, list[list[float]]]:
    """Metric -> [steps, means], and for several runs [..., smallest, largest values], too."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for records in runs:
        for record in records:
            by_step.setdefault(record["step"], []).append(record)
    series = {}
    for name in names:
        found = {
            step: [v for r in by_step[step] if isinstance(v := r.get(name), int | float)]
            for step in sorted(by_step)
        }
        steps = evenly([step for step, values in found.items() if values], POINTS)
        if not steps:
            continue
        values = [found[step] for step in steps]
        kinds = [_mean] if len(runs) == 1 else [_mean, min, max]
        series[name] = [steps, *([_short(kind(some)) for some in values] for kind in kinds)]
    return series


def _mapping(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The questioner's reward over the mean reward of answers, as the config has it."""
    algorithm = (config or {}).get("algorithm", {})
    try:
        name, mu, sigma = (algorithm[key] for key in ("mapping", "mu", "sigma"))
        means = [i / 100 for i in range(101)]
        curve = [[x, _short(rewards.questioner_reward(x, name, mu, sigma))] for x in means]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return {"name": name, "curve": curve}


def _points(read: Sequence[Episodes]) -> list[list[float]]:
    """[mean score, questioner's reward, how many episodes]."""
    points: collections.Counter[tuple[float, float]] = collections.Counter()
    for episodes in read:
        points.update(episodes.points)
    return [[x, y, count] for (x, y), count in sorted(points.items())]


def _evaluation(
    groups: Sequence[Sequence[int]], tables: Sequence[tuple[Mapping, Mapping] | None]
) -> list[dict[str, Any]]:
    """Sections of rows {"name", "cells"}, with [before, after] a group: [mean, half_width, runs] or
    None. The half-width of several runs is half the way from the smallest mean to the largest."""
    sections: dict[str, dict[tuple[str, str], None]] = {}
    for table in (table for pair in tables if pair for table in pair):
        for section, rows in table.items():
            for row, columns in rows.items():
                for column in columns:
                    sections.setdefault(section, {})[row, column] = None

    def cell(members: Sequence[int], when: int, section: str, row: str, column: str) -> Any:
        pairs = [pair for i in members if (pair := tables[i])]
        found = [p[when].get(section, {}).get(row, {}).get(column) for p in pairs]
        found = [value for value in found if value is not None]
        if not found:
            return None
        means = [mean for mean, _ in found]
        half = found[0][1] if len(found) == 1 else (max(means) - min(means)) / 2
        return [_short(_mean(means)), _short(half), len(found)]

    return [
        {
            "title": section,
            "rows": [
                {
                    "name": [row, column],
                    "cells": [
                        [cell(members, when, section, row, column) for when in (0, 1)]
                        for members in groups
                    ],
                }
                for row, column in rows
            ],
        }
        for section, rows in sections.items()
    ]


# ------------------------------------------------------------------------------------------- Small


def _packed(value: Any) -> str:
    """JSON, compressed, in base64; the same for the same value."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
