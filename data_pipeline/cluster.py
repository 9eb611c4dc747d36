"""Hierarchical clustering of documents by their vectors.

1. A pool is the set of documents that serve the same tasks; clusters never mix pools. Each pool is
   the root node of a tree, and so is each document of a source with `one_document_per_cluster`.
   A report is one cluster.
2. A level splits every node with more than `node_documents` documents: one stage fits centroids to
   a sample of the node, a second stage moves each point to its nearest centroid.
3. The driver stops when no node is too large, or after `levels` levels. One worker then clusters
   each node in memory (kmeans.make_leaves), and the clusters are joined with their texts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import AsDict

from data_pipeline import kmeans
from data_pipeline.balance import LostRowsError
from data_pipeline.kmeans import ClusterConfig
from data_pipeline.records import (
    Centroids,
    ClusterRecord,
    Document,
    Member,
    Point,
    digest,
    event,
    order,
    remove,
    sized,
)
from data_pipeline.stages import Done, Stages

# Children per node: 64 x 4096 dimensions (Qwen3-Embedding-8B) are 1 MB of centroids, which a level
# sends to every worker. Names of children have two digits.
MAX_CHILDREN = 64
# Allowed deviation of a vector's length from 1: more than the rounding of bfloat16, 2^-9.
LENGTH_ERROR = 0.01
IN_NODE = "documents in node"
SPLIT = "nodes split"
# Marks in the name of a node that holds the pieces of one document, or the paragraphs of one
# report. The names of other nodes have digits after the slash.
PIECES = "/of "
REPORT = "/report "
# Every document is a point of a node or removed, and every point is in one cluster.
POINTS_BALANCES = ("in:documents = out:points + documents without a node",)
FIT_BALANCES = (
    "in:points = points read",
    "points sampled = points fitted",
    f"{SPLIT} = out:centroids",
)
LEVEL_BALANCES = ("in:points = out:points",)
MEMBERS_BALANCES = ("in:points = out:members",)
BALANCES = (
    "in:documents = documents clustered + out:removed",
    "in:members = documents clustered",
    "clusters = out:clusters",
    "documents removed: * = out:removed",
)
log = logging.getLogger(__name__)


def cluster(
    stages: Stages,
    documents: str,
    after: Sequence[Done],
    config: ClusterConfig,
    pools: Mapping[str, str],
    one_document_sources: Sequence[str] = (),
    reports: Sequence[str] = (),
) -> Done:
    """Run all clustering stages; the last one, "cluster", writes "clusters" and "removed".

    `documents` is a "STAGE/TABLE" of Documents with vectors, each id once, made by the stages
    `after`. `pools` maps a source to the sorted names of its tasks, joined by "+".
    `one_document_sources` names the sources with `one_document_per_cluster`, `reports` the sources
    of reports. The returned stage has the seconds of all stages, and counts. By pool: "clusters",
    "cluster size = N", "small clusters" (below min_documents) and "nodes over the limit" (still
    over node_documents when they were clustered). By source: "documents clustered" and "documents
    removed: REASON".
    """
    # Levels move points (id, tokens, vector) and never texts; the texts are joined once, at the
    # end. Each stage's fingerprint has only the settings that it reads.
    shared_settings = {"pools": dict(pools), "max_cluster_tokens": config.max_cluster_tokens}
    marks = {
        **dict.fromkeys(sorted(one_document_sources), PIECES),
        **dict.fromkeys(sorted(reports), REPORT),
    }
    settings: dict[str, Any] = shared_settings | {"marks": marks}
    make = functools.partial(make_points, **settings)
    first = stages.run_stage(
        "cluster-points", settings, make, after, POINTS_BALANCES, documents=documents
    )
    level_stages = _split_levels(stages, first, config, pools)
    last = level_stages[-1]
    for node, number in large_nodes(last, config).items():
        log.warning("node %s has %d documents after %d levels", node, number, config.levels)
    make = functools.partial(make_members, config=config)
    fields, points = dataclasses.asdict(config), f"{last.name}/points"
    leaves = stages.run_stage(
        "cluster-members", fields, make, [last], MEMBERS_BALANCES, points=points
    )
    settings = shared_settings | {"min_documents": config.min_documents}
    inputs = {"documents": documents, "members": "cluster-members/members"}
    make = functools.partial(make_clusters, **settings)
    joined = stages.run_stage("cluster", settings, make, [*after, leaves], BALANCES, **inputs)
    counts = sorted(leaves.counts + joined.counts, key=lambda c: (c["what"], c["source"]))
    seconds = sum(stage.seconds for stage in [*level_stages, leaves, joined])
    return dataclasses.replace(joined, counts=tuple(counts), seconds=seconds)


def _split_levels(
    stages: Stages, first: Done, config: ClusterConfig, pools: Mapping[str, str]
) -> list[Done]:
    """Split large nodes level by level; return `first` and all stages of the levels."""
    # `levels` is left out: one more level must not repeat the levels before it.
    names = ("node_documents", "fit_documents", "min_documents", "seed")
    fit_settings = {name: getattr(config, name) for name in names}
    level_stages = [first]
    for level in range(1, config.levels + 1):
        last = level_stages[-1]
        large = large_nodes(last, config)
        # Without data no node is large. The graphs of all levels are alike, so one is checked.
        if stages.only_check and level == 1:
            large = dict.fromkeys(pools.values(), 1)
        if not large:
            break
        points, fit = f"{last.name}/points", f"cluster-fit-{level}"
        make = functools.partial(make_centroids, large=large, config=config)
        level_stages.append(
            stages.run_stage(fit, fit_settings, make, [last], FIT_BALANCES, points=points)
        )
        name, centroids = f"cluster-level-{level}", f"{fit}/centroids"
        inputs = {"points": points, "centroids": centroids}
        make = functools.partial(make_level, nodes=level_stages[-1].count(SPLIT))
        level_stages.append(
            stages.run_stage(name, {}, make, [last, level_stages[-1]], LEVEL_BALANCES, **inputs)
        )
        log.info("level %d: split %d nodes", level, len(large))
    return level_stages


def large_nodes(stage: Done, config: ClusterConfig) -> dict[str, int]:
    """Return node -> document count of nodes over `node_documents`, from the counts of a stage."""
    return {
        count["source"]: count["number"]
        for count in stage.counts
        if count["what"] == IN_NODE and count["number"] > config.node_documents
    }


def make_points(
    documents: beam.PCollection,
    pools: Mapping[str, str],
    marks: Mapping[str, str],
    max_cluster_tokens: int,
) -> dict[str, beam.PCollection]:
    """Make a point in a root node for every document that a cluster can hold.

    `marks` maps a source in which each document has a node to the mark of its name. Documents
    without a point are removed by make_clusters. Nodes of one document's pieces are not counted.
    """
    place = beam.FlatMap(_point, dict(pools), dict(marks), max_cluster_tokens)
    placed: Any = documents | "place at root" >> place.with_outputs("counts", main="points")
    points = placed.points
    counts = (placed.counts, points | "count by node" >> beam.FlatMap(_in_node))
    return {"points": points, "counts": counts | "all counts" >> beam.Flatten()}


def make_centroids(
    points: beam.PCollection, large: Mapping[str, int], config: ClusterConfig
) -> dict[str, beam.PCollection]:
    """Fit the centroids of the children of `large`, node -> documents; count split nodes."""
    take: Any = beam.FlatMap(_sample, dict(large), config.fit_documents)
    sample: Any = points | "take sample" >> take.with_outputs("counts", main="vectors")
    fitted: Any = (
        sample.vectors
        | "group sample" >> beam.GroupByKey()
        | "fit centroids"
        >> beam.FlatMap(_fit, dict(large), config).with_outputs("counts", main="centroids")
    )
    counts = (sample.counts, fitted.counts) | "all counts" >> beam.Flatten()
    return {"centroids": fitted.centroids, "counts": counts}


def make_level(
    points: beam.PCollection, centroids: beam.PCollection, nodes: int
) -> dict[str, beam.PCollection]:
    """Move points to the nearest child, if their node is one of the `nodes` with centroids.

    Counts the points by node.
    """
    by_node: Any = centroids | "key by node" >> beam.Map(lambda c: (c["node"], c["vectors"]))
    moved: Any = points | "move to child" >> beam.Map(_move, AsDict(by_node), nodes)
    return {"points": moved, "counts": moved | "count by node" >> beam.FlatMap(_in_node)}


def make_members(points: beam.PCollection, config: ClusterConfig) -> dict[str, beam.PCollection]:
    """Cluster each node in memory into (document, cluster) ids; count nodes over the limit."""
    leaves: Any = (
        points
        | "key by node" >> beam.Map(lambda point: (point["node"], point))
        | "group node" >> beam.GroupByKey()
        | "make leaves" >> beam.FlatMap(_leaves, config).with_outputs("counts", main="members")
    )
    return {"members": leaves.members, "counts": leaves.counts}


def make_clusters(
    documents: beam.PCollection,
    members: beam.PCollection,
    pools: Mapping[str, str],
    max_cluster_tokens: int,
    min_documents: int,
) -> dict[str, beam.PCollection]:
    """Join clusters with their documents: "clusters", "removed" and events as in `cluster`."""
    joined: Any = (
        {
            "documents": documents | "document by id" >> beam.Map(lambda d: (d["id"], d)),
            "clusters": members | "cluster by id" >> beam.Map(lambda m: (m["id"], m["cluster"])),
        }
        | "join texts" >> beam.CoGroupByKey()
        | "key by cluster"
        >> beam.FlatMap(_by_cluster, dict(pools), max_cluster_tokens).with_outputs(
            "removed", "counts", main="documents"
        )
    )
    cluster_tables: Any = (
        joined.documents
        | "group cluster" >> beam.GroupByKey()
        | "make cluster"
        >> beam.FlatMap(_cluster, dict(pools), min_documents).with_outputs(
            "counts", main="clusters"
        )
    )
    counts = (joined.counts, cluster_tables.counts) | "all counts" >> beam.Flatten()
    return {"clusters": cluster_tables.clusters, "removed": joined.removed, "counts": counts}


def pool_of(node: str) -> str:
    """Return the pool of a node."""
    return node.partition("/")[0]


def rejection_reason(document: Document, pools: Mapping[str, str], max_cluster_tokens: int) -> str:
    """Return the reason why no cluster can hold a document, or "" if one can."""
    if document["source"] not in pools:
        return "source without tasks"
    data = document["vector"]
    length = np.linalg.norm(np.frombuffer(data, np.float32)) if len(data) % 4 == 0 else math.nan
    if not abs(length - 1) <= LENGTH_ERROR:  # written this way so that NaN fails too
        return "no vector of length 1"
    if document["tokens"] > max_cluster_tokens:
        return "more tokens than a cluster may have"
    return ""


def _point(
    document: Document, pools: Mapping[str, str], marks: Mapping[str, str], max_cluster_tokens: int
) -> Iterator[Any]:
    source = document["source"]
    if rejection_reason(document, pools, max_cluster_tokens):
        yield event("documents without a node", source)
        return
    node = pools[source]
    if source in marks:
        node += marks[source] + digest(source, document["place"])
    values = {name: document[name] for name in ("id", "tokens", "vector")}
    # The place, not the id, names the node: all pieces of a document have its place.
    yield cast(Point, values | {"node": node})


def _in_node(point: Point) -> Iterator[tuple[str, str]]:
    # Nodes of one document are small and numerous: they never need a split.
    if PIECES not in point["node"] and REPORT not in point["node"]:
        yield IN_NODE, point["node"]


def _sample(point: Point, large: Mapping[str, int], fit_documents: int) -> Iterator[Any]:
    """Yield (node, (id, vector)) if a point belongs to the sample of a large node."""
    yield event("points read")
    number = large.get(point["node"])
    # Ids are uniformly distributed hashes. A threshold on their first 64 bits gives fit_documents
    # to within about its square root, and needs no shuffle, unlike a search for the smallest ids.
    # Integers compare exactly.
    if number and int(point["id"][:16], 16) * number < fit_documents << 64:
        yield event("points sampled")
        yield point["node"], (point["id"], point["vector"])


def _fit(
    group: tuple[str, Iterable[tuple[str, bytes]]],
    large: Mapping[str, int],
    config: ClusterConfig,
) -> Iterator[Any]:
    """Fit the centroids of one node to its sample; drop children below min_documents."""
    node, sample = group[0], sorted(group[1])
    for _ in sample:
        yield event("points fitted")
    # Twice the children that would suffice at equal sizes: k-means makes unequal ones, and a child
    # over the limit costs another level.
    k = min(MAX_CHILDREN, math.ceil(2 * large[node] / config.node_documents))
    vectors = _stack(vector for _, vector in sample)
    centroids = kmeans.fit_centroids(vectors, k, _seed(config, node), config.min_documents)
    yield Centroids(node=node, vectors=centroids.tobytes())
    yield event(SPLIT, pool_of(node))


def _move(point: Any, centroids: Mapping[str, bytes], nodes: int) -> Point:
    # A runner that loses a side input would leave points in their nodes, which looks like a node
    # that needs no split.
    if len(centroids) != nodes:
        raise LostRowsError(
            f"stage cluster-level: centroids of {len(centroids)} nodes, not {nodes}"
        )
    if point["node"] not in centroids:
        return point
    vector = np.frombuffer(point["vector"], np.float32)[None]
    rows = np.frombuffer(centroids[point["node"]], np.float32).reshape(-1, vector.shape[1])
    child = int(kmeans.assign(vector, rows)[0])
    return point | {"node": f"{point['node']}/{child:02d}"}


def _leaves(group: tuple[str, Iterable[Point]], config: ClusterConfig) -> Iterator[Any]:
    node, points = group
    # k-means depends on the order of its rows, and the runner delivers points in any order.
    members = sorted(points, key=lambda point: point["id"])
    if REPORT in node:
        # A report is never split or merged: its paragraphs are the documents of its cluster.
        ids = [point["id"] for point in members]
        yield from (Member(id=name, cluster=digest(*ids)) for name in ids)
        return
    if len(members) > config.node_documents:
        yield event("nodes over the limit", pool_of(node))
    vectors = _stack(point["vector"] for point in members)
    tokens = np.array([point["tokens"] for point in members], np.int64)
    for leaf in kmeans.make_leaves(vectors, tokens, config, _seed(config, node)):
        ids = [members[index]["id"] for index in leaf]  # ascending, because `members` is sorted
        for name in ids:
            yield Member(id=name, cluster=digest(*ids))


def _by_cluster(
    group: tuple[str, Mapping[str, Iterable[Any]]],
    pools: Mapping[str, str],
    max_cluster_tokens: int,
) -> Iterator[Any]:
    clusters = list(group[1]["clusters"])
    for document in group[1]["documents"]:
        if clusters:
            yield clusters[0], document
        else:
            yield from remove(document, rejection_reason(document, pools, max_cluster_tokens))


def _cluster(
    group: tuple[str, Iterable[Document]], pools: Mapping[str, str], min_documents: int
) -> Iterator[Any]:
    name, documents = group
    members = sorted(documents, key=order)
    pool = pools[members[0]["source"]]
    vectors = _stack(document["vector"] for document in members)
    yield ClusterRecord(
        id=name,
        pool=pool,
        # 4096 float32 values are 16 KB, about as much as the text; later only the mean is used.
        documents=[cast(Document, document | {"vector": b""}) for document in members],
        tokens=sum(document["tokens"] for document in members),
        vector=vectors.mean(axis=0, dtype=np.float64).astype(np.float32).tobytes(),
    )
    yield event("clusters", pool)
    yield event(sized("cluster size", len(members)), pool)
    if len(members) < min_documents:
        yield event("small clusters", pool)
    for document in members:
        yield event("documents clustered", document["source"])


def _stack(vectors: Iterable[bytes]) -> np.ndarray:
    return np.stack([np.frombuffer(vector, np.float32) for vector in vectors])


def _seed(config: ClusterConfig, node: str) -> int:
    # A function of the node's name, so that a node's clusters do not depend on the other nodes.
    return int(digest(str(config.seed), node)[:8], 16)
