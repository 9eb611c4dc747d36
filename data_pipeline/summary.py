"""Fills the report from finished stages: their counts, and the texts of a few clusters.

The clusters on the map have the smallest ids; ids are hashes, so this is a uniform sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from data_pipeline import output
from data_pipeline.report import MAP_POINTS, Content, Topic, place_name, top_terms, write_report
from data_pipeline.stages import Done, Stages

# Clusters per task that are shown with their terms.
TOPICS = 8
# Other clusters, for the document frequencies of words: the shown clusters alone are too few.
BACKGROUND = 200
TERMS = 8


def write(
    stages: Stages,
    finished_stages: Sequence[Done],
    clusters: str,
    out: str,
    manifest: Mapping[str, Any],
) -> None:
    """Write OUT/report.html; `finished_stages` are all, `clusters` a table of AssignedCluster."""
    by_name = {stage.name: stage for stage in finished_stages}
    index = output.read_index(stages, clusters)
    columns = ["id", "vector", "documents.list.element.source"]
    # The smallest ids: ids are hashes, so this is a uniform sample, and the same in every build.
    shown = [record["id"] for record in index[:MAP_POINTS]]
    points = sorted(
        stages.read_records(clusters, columns, set(shown)), key=lambda point: point["id"]
    )
    pools = {c["source"] for c in by_name["cluster"].counts if c["what"] == "clusters"}
    content = Content(
        title="Clusters of documents",
        config=manifest["config"],
        versions=manifest["versions"],
        seed=manifest["config"]["seed"],
        stages=[(stage.name, stage.plain_counts) for stage in finished_stages],
        funnel=_funnel(by_name),
        lengths_before=by_name["read"].histogram("characters read"),
        lengths_after=by_name["read"].histogram("characters kept"),
        document_tokens=by_name["cut"].histogram("tokens"),
        components=by_name["dedup"].histogram("component size"),
        cluster_sizes={pool: by_name["cluster"].histogram("cluster size", pool) for pool in pools},
        cluster_tokens=Counter(record["tokens"] for record in index),
        clusters_by_task=dict(sorted(Counter(record["task"] for record in index).items())),
        skipped=cast(Any, stages.read_records("read/removed")),
        contamination=_contamination(stages, by_name),
        topics=_topics(stages, clusters, index),
        map_ids=[point["id"] for point in points],
        map_labels=[_main_source(point) for point in points],
        map_vectors=np.stack([np.frombuffer(point["vector"], np.float32) for point in points]),
    )
    write_report(out, content)


def _topics(stages: Stages, clusters: str, index: Sequence[Mapping[str, Any]]) -> list[Topic]:
    """Return the first clusters of each task by id, with their terms."""
    ids_by_task: dict[str, list[str]] = defaultdict(list)
    for record in index:
        if len(ids_by_task[record["task"]]) < TOPICS:
            ids_by_task[record["task"]].append(record["id"])
    ids = [name for task in sorted(ids_by_task) for name in ids_by_task[task]]
    background_ids = [record["id"] for record in index if record["id"] not in ids][:BACKGROUND]
    clusters_by_id: dict[str, Any] = {
        c["id"]: c for c in stages.read_records(clusters, ids={*ids, *background_ids})
    }
    texts = {name: [d["text"] for d in c["documents"]] for name, c in clusters_by_id.items()}
    background = [text for name in background_ids for text in texts[name]]
    terms = top_terms([texts[name] for name in ids], background, TERMS)
    return [Topic(clusters_by_id[name], words) for name, words in zip(ids, terms, strict=True)]


def _funnel(stages_by_name: dict[str, Done]) -> list[tuple[str, int]]:
    events = {
        "read": "documents read",
        "filter": "documents kept",
        "dedup": "documents kept",
        "decontaminate": "documents kept",
        "cut": "pieces",
        "cluster": "documents clustered",
        "tasks": "documents",
    }
    # Reading and filtering are one stage, so that rejected documents are never written.
    stages = stages_by_name | {"filter": stages_by_name["read"]}
    return [(name, stages[name].count(what)) for name, what in events.items() if name in stages]


def _contamination(stages: Stages, stages_by_name: Mapping[str, Done]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = defaultdict(list)
    if "decontaminate" in stages_by_name:
        for record in stages.read_records("decontaminate/removed"):
            names[record["because"]].append(place_name(record))
    return dict(names)


def _main_source(point: Mapping[str, Any]) -> str:
    """Return the source of most documents of a cluster; the first by name on ties."""
    counts = Counter(document["source"] for document in point["documents"])
    return min(counts, key=lambda source: (-counts[source], source))
