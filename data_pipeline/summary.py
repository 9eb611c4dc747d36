"""Fills the report from finished stages: their counts, and the texts of a few clusters.

1. Tables, funnel and distributions come from the counts, so that no large table is read.
2. The clusters on the map are those with the smallest ids. Ids are hashes, so this is a uniform
   sample.
3. The first few clusters of each task are shown with their terms and the beginnings of their texts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_pipeline import output
from data_pipeline.records import Cluster, Removed
from data_pipeline.report import MAP_POINTS, Content, Topic, top_terms, write_report
from data_pipeline.stages import Done, Stages

TOPICS = 8  # clusters per task that are shown with their terms
BACKGROUND = 200  # other clusters, in which document frequencies of words are counted
TERMS = 8


def write(
    stages: Stages, done: Sequence[Done], clusters: str, out: str, manifest: Mapping[str, Any]
) -> None:
    """Write OUT/report.html.

    Args:
      stages: Stages with all finished tables.
      done: All stages that made the clusters, in order.
      clusters: "STAGE/TABLE" of Cluster with "task".
      out: Output folder of the build.
      manifest: Manifest of the build, with "config" and "versions".
    """
    by_name = {stage.name: stage for stage in done}
    index = output.read_index(stages, clusters)
    topics, examples = _topics(stages, clusters, index)
    columns = ["id", "vector", "documents.list.element.source"]
    shown = [record["id"] for record in index[:MAP_POINTS]]
    points = sorted(stages.read(clusters, columns, set(shown)), key=lambda point: point["id"])
    content = Content(
        title="Clusters of documents",
        config=manifest["config"],
        versions=manifest["versions"],
        seed=manifest["config"]["seed"],
        stages=[(stage.name, stage.plain_counts) for stage in done],
        funnel=_funnel(by_name),
        lengths_before=by_name["read"].histogram("characters read"),
        lengths_after=by_name["read"].histogram("characters kept"),
        document_tokens=by_name["cut"].histogram("tokens"),
        components=by_name["dedup"].histogram("component size"),
        cluster_sizes=_sizes(by_name["cluster"]),
        cluster_tokens=Counter(record["tokens"] for record in index),
        clusters_by_task=dict(sorted(Counter(record["task"] for record in index).items())),
        skipped=[_removed(record) for record in stages.read("read/removed")],
        contamination=_contamination(stages, by_name),
        topics=topics,
        map_ids=[point["id"] for point in points],
        map_labels=[_main_source(point) for point in points],
        map_vectors=np.stack([np.frombuffer(point["vector"], np.float32) for point in points]),
        examples=examples,
    )
    write_report(out, content)


def _topics(
    stages: Stages, clusters: str, index: Sequence[Mapping[str, Any]]
) -> tuple[list[Topic], list[Cluster]]:
    """Return the first clusters of each task by id: their topics, and the clusters themselves."""
    chosen: dict[str, list[str]] = defaultdict(list)
    for record in index:
        if len(chosen[record["task"]]) < TOPICS:
            chosen[record["task"]].append(record["id"])
    ids = [name for task in sorted(chosen) for name in chosen[task]]
    others = [record["id"] for record in index if record["id"] not in ids][:BACKGROUND]
    texts = {record["id"]: record for record in stages.read(clusters, ids={*ids, *others})}
    background = [d["text"] for name in others for d in texts[name]["documents"]]
    found = [texts[name] for name in ids]
    terms = top_terms([[d["text"] for d in c["documents"]] for c in found], background, TERMS)
    topics = [
        Topic(
            cluster=c["id"],
            task=c["task"],
            sources=sorted({d["source"] for d in c["documents"]}),
            documents=len(c["documents"]),
            terms=words,
        )
        for c, words in zip(found, terms, strict=True)
    ]
    return topics, [Cluster(**{name: c[name] for name in Cluster.__annotations__}) for c in found]


def _funnel(done: Mapping[str, Done]) -> list[tuple[str, int]]:
    steps = [("read", done["read"].count("documents read"))]
    steps += [("filter", done["read"].count("documents kept"))]
    for name in ("dedup", "decontaminate"):
        if name in done:
            steps.append((name, done[name].count("documents kept")))
    steps.append(("cut", done["cut"].count("pieces")))
    steps.append(("cluster", done["cluster"].count("documents clustered")))
    return [*steps, ("tasks", done["tasks"].count("documents"))]


def _sizes(clustered: Done) -> dict[str, np.ndarray]:
    pools = sorted({c["source"] for c in clustered.counts if c["what"] == "clusters"})
    sizes = {pool: clustered.histogram("cluster size", pool) for pool in pools}
    return {pool: np.repeat(list(found), list(found.values())) for pool, found in sizes.items()}


def _contamination(stages: Stages, done: Mapping[str, Done]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = defaultdict(list)
    if "decontaminate" in done:
        for record in stages.read("decontaminate/removed"):
            part = f", part {record['part']}" if record["part"] else ""
            names[record["because"]].append(f"{record['source']}:{record['place']}{part}")
    return dict(names)


def _main_source(point: Mapping[str, Any]) -> str:
    """Return the source of most documents of a cluster; the first by name on ties."""
    counts = Counter(document["source"] for document in point["documents"])
    return min(counts, key=lambda source: (-counts[source], source))


def _removed(record: Mapping[str, Any]) -> Removed:
    return Removed(**{name: record[name] for name in Removed.__annotations__})
