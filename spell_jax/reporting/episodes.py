"""Selection of a run's episodes for the report page, and statistics over all episodes."""

from __future__ import annotations

import collections
import itertools
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from spell_jax.data.clusters import PAPER_TASKS, TASKS
from spell_jax.runtime.files.episodes import EPISODES_FOLDER, episode_files, read_episodes
from spell_jax.runtime.finite import LARGEST_FLOAT32, finite_or_none, is_finite
from spell_jax.selfplay.prompts import ROLES

log = logging.getLogger(__name__)

# Fields of an episode's line that the page uses, with their defaults.
_TEXTS = ("task", "cluster", "status", "reason", "question", "reference", "own_reference", "prompt")
_LISTS = (
    *("shown", "known", "blind", "answers", "predictions", "rule", "judge", "votes", "scores"),
    *("window", "spans", "truncated"),
)
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(_TEXTS, ""),
    **dict.fromkeys(("proposal", "reward")),
    **dict.fromkeys(("number", "of"), 0),
    **{name: [] for name in _LISTS},
    **{name: {} for name in ("advantages", "used", "measures")},
}


@dataclass
class Episodes:
    # Episodes for the page, ordered by step, with "step", "outcome" and "roles" added.
    chosen_episodes: list[dict[str, Any]] = field(default_factory=list)
    # Cluster -> texts, for chosen episodes with documents on disk.
    documents: dict[str, list[str]] = field(default_factory=dict)
    # Step -> metrics computed from its episodes (episodes/...).
    counted: dict[int, dict[str, float]] = field(default_factory=dict)
    # (Mean score, questioner's reward) -> number of episodes.
    points: collections.Counter[tuple[float, float]] = field(default_factory=collections.Counter)
    total: int = 0  # episodes in the steps on disk, including episodes that the run did not store
    readable_count: int = 0  # readable episodes on disk


def choose_episodes(workdir: epath.Path, limit: int) -> Episodes:
    """Read all of WORKDIR/episodes, one step at a time, and keep at most `limit` episodes."""
    result = Episodes()
    try:
        steps = spread_with_ends(list(episode_files(workdir)), limit)
    except OSError as error:  # such as a file in place of the folder
        log.warning("%s: no episodes (%s)", workdir / EPISODES_FOLDER, error.strerror or error)
        return result
    shares = dict(zip(steps, shares_of(limit, len(steps)), strict=True))
    step_of, chosen_counts = operator.itemgetter(0), collections.Counter()
    # A step at a time: memory holds one step and the chosen episodes, however long the run was.
    for step, pairs in itertools.groupby(read_episodes(workdir, _episode), step_of):
        episodes = [episode for _, episode in pairs]
        texts = {e["cluster"]: e["documents"] for e in episodes if e["documents"]}
        result.readable_count += len(episodes)
        # `of` also counts episodes that did not fit into the file. It is 0 in a line that lacks it.
        result.total += max(len(episodes), episodes[0]["of"])
        result.counted[step] = _counted(episodes)
        for e in episodes:
            if e["scores"] and e["reward"] is not None:
                mean = sum(e["scores"]) / len(e["scores"])
                # Rounded, so that equal scores of different sums count as one point.
                result.points[round(mean, 4), round(e["reward"], 4)] += 1
        for index in choose_indices(episodes, shares.get(step, 0), set(texts), chosen_counts):
            episode = episodes[index] | {"step": step}
            del episode["documents"]
            result.chosen_episodes.append(episode)
            if episode["cluster"] in texts:
                result.documents.setdefault(episode["cluster"], texts[episode["cluster"]])
    return result


def choose_indices(
    episodes: Sequence[Mapping[str, Any]],
    count: int,
    stored_clusters: set[str],
    chosen_counts: collections.Counter[tuple[str, str]],
) -> list[int]:
    """Choose at most `count` episodes of a step; return their indices, ascending.

    Each choice takes the (task, outcome) that was taken least often so far, as counted in
    `chosen_counts`; episodes of `stored_clusters` (with documents on disk) come first.
    """
    queues: dict[tuple[str, str], collections.deque[int]] = collections.defaultdict(
        collections.deque
    )
    # A reader can check an answer only against its documents, so episodes with documents come
    # first.
    for index in sorted(
        range(len(episodes)), key=lambda i: episodes[i]["cluster"] not in stored_clusters
    ):
        queues[episodes[index]["task"], episodes[index]["outcome"]].append(index)
    indices = []
    while len(indices) < count and any(queues.values()):
        # Over the whole page, not the step: in most runs one outcome of one task is most of a step.
        rarest = min((kind for kind in queues if queues[kind]), key=lambda k: (chosen_counts[k], k))
        indices.append(queues[rarest].popleft())
        chosen_counts[rarest] += 1
    return sorted(indices)


def outcome(scores: Sequence[float], status: str) -> str:
    """Return "solved", "half solved", "mixed" or "unsolved"; without scores, the `status`."""
    if not scores:
        return status
    if len(set(scores)) > 1:
        return "mixed"
    return "unsolved" if scores[0] <= 0 else "solved" if scores[0] >= 1 else "half solved"


def _episode(line: Any) -> dict[str, Any]:
    """Check and convert a line for the page; TypeError for a value of another type."""
    if not isinstance(line, dict):
        raise TypeError("not an object")
    # The page's data must be strict JSON, which has no NaN.
    if finite_or_none(line)[1]:
        raise ValueError("a number is not finite")
    episode = {name: line.get(name, default) for name, default in _FIELDS.items()}
    for name, default in _FIELDS.items():
        if default is not None and not isinstance(episode[name], type(default)):
            raise TypeError(f"{name} is {type(episode[name]).__name__}")
    for score in (*episode["scores"], episode["reward"]):
        if score is not None and not is_finite(score, LARGEST_FLOAT32):
            raise TypeError(f"a score or reward is {score!r:.80}, not a number of float32")
    if not all(isinstance(votes, list) for votes in episode["votes"]):
        raise TypeError("votes are not lists of texts")
    scores = [float(score) for score in episode["scores"]]
    outputs = (episode["proposal"], episode["answers"], any(episode["votes"]))
    documents = line.get("documents") or []
    if not isinstance(documents, list) or not all(
        isinstance(text, str) for text in (*documents, *episode["answers"])
    ):
        raise TypeError("documents and answers are not all texts")
    return episode | {
        "scores": scores,
        "reward": None if episode["reward"] is None else float(episode["reward"]),
        "outcome": outcome(scores, episode["status"]),
        "roles": [role for role, output in zip(ROLES, outputs, strict=True) if output],
        "documents": documents,
    }


def _counted(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute task shares of questions with mixed rewards, and the number of answers per role."""
    tasks = [e["task"] for e in episodes if e["outcome"] == "mixed"]
    mixed = collections.Counter(task for task in tasks if task in TASKS)
    # Runs without cloze questions have no curve of their share.
    named = [task for task in TASKS if mixed and (mixed[task] or task in PAPER_TASKS)]
    counted = {f"mixed/{task}": mixed[task] / mixed.total() for task in named}
    counted["answers/questioner"] = sum(e["proposal"] is not None for e in episodes)
    counted["answers/responder"] = sum(len(e["answers"]) + len(e["blind"]) for e in episodes)
    counted["answers/verifier"] = sum(len(v) for e in episodes for v in e["votes"])
    return {f"episodes/{name}": value for name, value in counted.items()}


def shares_of(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` whole numbers that are as even as possible."""
    # Differences of rounded-down multiples add up to `total`, and no two parts differ by more than
    # 1.
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def spread_with_ends(items: Sequence[int], limit: int) -> list[int]:
    """Choose at most `limit` items, evenly spaced, with the first and the last item."""
    if len(items) <= limit:
        return list(items)
    return [items[i * (len(items) - 1) // max(limit - 1, 1)] for i in range(limit)]
