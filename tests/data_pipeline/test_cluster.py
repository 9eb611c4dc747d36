"""Tests of clustering through all stages: content of clusters, and reproducibility."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import apache_beam as beam
import numpy as np
import pytest

from data_pipeline import cluster as cluster_module
from data_pipeline.cluster import cluster
from data_pipeline.kmeans import ClusterConfig
from data_pipeline.records import digest, make_document, order
from data_pipeline.stages import DONE, Stages

# 400 documents in nodes of 48: two levels.
CONFIG = ClusterConfig(
    documents_per_cluster=10,
    min_documents=3,
    max_cluster_tokens=2_000,
    node_documents=48,
    fit_documents=150,
)
POOLS = {"news": "general_qa", "blogs": "general_qa", "tables": "financial_math+general_qa"}
THREADS = ("--direct_num_workers=2", "--direct_running_mode=multi_threading")
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def corpus(topics=40, each=10, dimensions=32, noise=0.08):
    """Make documents of topics; a topic comes from "news" and "blogs", or from "tables"."""
    random = np.random.default_rng(0)
    centers = unit(random.normal(size=(topics, dimensions)))
    documents = []
    for number in range(topics * each):
        topic = number % topics
        source = "tables" if topic % 4 == 0 else ("news", "blogs")[random.integers(2)]
        document = make_document(f"topic {topic} text {number}", source, f"{number:04d}.txt")
        vector = unit(centers[topic] + noise * random.normal(size=dimensions))
        tokens = int(random.integers(20, 300))
        documents.append(document | {"vector": vector.tobytes(), "tokens": tokens})
    return documents


def run(folder, documents, config=CONFIG, options=(), alone=()):
    """Run the stage; return (clusters sorted by id, removed, Done, Stages)."""

    def write(pipeline):
        # A few elements per bundle, so that workers share the work.
        shuffled_documents = pipeline | beam.Create(documents) | beam.Reshuffle()
        return {
            "documents": shuffled_documents,
            "counts": shuffled_documents | beam.Map(lambda d: ("made", "s")),
        }

    stages = Stages(str(folder), options)
    first = stages.run_stage("embed", {}, write)
    stage = cluster(stages, "embed/documents", [first], config, POOLS, alone)
    clusters = sorted(stages.read_records("cluster/clusters"), key=lambda c: c["id"])
    removed = sorted(
        stages.read_records("cluster/removed"), key=lambda r: (r["source"], r["place"])
    )
    return clusters, removed, stage, stages


@pytest.fixture(scope="module")
def documents():
    return corpus()


@pytest.fixture(scope="module")
def clustering(documents, tmp_path_factory):
    return run(tmp_path_factory.mktemp("made"), documents)


def test_every_document_is_in_one_cluster(documents, clustering):
    clusters, removed, stage, _ = clustering
    inside = [document for c in clusters for document in c["documents"]]
    without = [document | {"vector": b""} for document in documents]
    assert sorted(inside, key=order) == sorted(without, key=order)
    assert removed == []
    assert stage.count("documents clustered") == 400
    sources = Counter(document["source"] for document in documents)
    for source, number in sources.items():
        assert stage.count("documents clustered", source) == number


@pytest.fixture(scope="module")
def vectors(documents):
    return {d["id"]: np.frombuffer(d["vector"], np.float32) for d in documents}


def test_cluster_records_match_their_documents(clustering, vectors):
    for c in clustering[0]:
        assert c["id"] == digest(*sorted(document["id"] for document in c["documents"]))
        assert c["documents"] == sorted(c["documents"], key=order)
        assert c["tokens"] == sum(document["tokens"] for document in c["documents"])
        mean = np.mean([vectors[document["id"]] for document in c["documents"]], axis=0)
        np.testing.assert_allclose(np.frombuffer(c["vector"], np.float32), mean, atol=1e-6)
        assert {POOLS[document["source"]] for document in c["documents"]} == {c["pool"]}


def test_clusters_keep_limits_and_sizes_are_counted(clustering):
    clusters, _, stage, _ = clustering
    assert max(c["tokens"] for c in clusters) <= CONFIG.max_cluster_tokens
    assert max(len(c["documents"]) for c in clusters) <= CONFIG.max_documents
    sizes = Counter((len(c["documents"]), c["pool"]) for c in clusters)
    for pool in set(POOLS.values()):
        assert stage.count("clusters", pool) == sum(c["pool"] == pool for c in clusters)
        numbers = {size: n for (size, its), n in sizes.items() if its == pool}
        assert stage.histogram("cluster size", pool) == numbers
        small = sum(n for (size, its), n in sizes.items() if size < 3 and its == pool)
        assert stage.count("small clusters", pool) == small


@pytest.mark.slow
def test_pieces_cluster_only_with_their_own_document(documents, tmp_path):
    """Clusters of source "tables" have pieces of one document; other sources still mix."""
    pieces = [
        d | {"place": f"{i % 9}.txt", "part": i} if d["source"] == "tables" else d
        for i, d in enumerate(documents)
    ]
    clusters, removed, stage, _ = run(tmp_path, pieces, alone=("tables",))
    assert removed == [] and stage.count("documents clustered") == len(documents)
    table_clusters = [c for c in clusters if c["pool"] == POOLS["tables"]]
    assert all(len({d["place"] for d in c["documents"]}) == 1 for c in table_clusters)
    assert (
        len(table_clusters) > 9
        and max(c["tokens"] for c in table_clusters) <= CONFIG.max_cluster_tokens
    )
    other_clusters = [c for c in clusters if c["pool"] != POOLS["tables"]]
    assert any(len({d["place"] for d in c["documents"]}) > 1 for c in other_clusters)
    for name in ("cluster-points", "cluster-level-1"):
        counts = json.loads((tmp_path / name / DONE).read_text())["counts"]
        assert not any("/of " in count["source"] for count in counts)


def test_report_is_one_cluster_whatever_its_size(documents):
    """Its 30 paragraphs are more than max_documents, and a lone one is fewer than min_documents."""
    for number in (30, 1):
        paragraphs = [d | {"source": "tables", "place": "a", "part": 0} for d in documents[:number]]
        marks_and_limit = {"tables": cluster_module.REPORT}, CONFIG.max_cluster_tokens
        points = [p for d in paragraphs for p in cluster_module._point(d, POOLS, *marks_and_limit)]
        (node,) = {point["node"] for point in points}
        assert cluster_module.pool_of(node) == POOLS["tables"]
        assert not any(list(cluster_module._in_node(point)) for point in points)
        members = list(cluster_module._leaves((node, points), CONFIG))
        assert [m["id"] for m in members] == sorted(d["id"] for d in paragraphs)
        assert len({m["cluster"] for m in members}) == 1


def test_clusters_are_mostly_of_one_topic(documents, clustering):
    clusters = clustering[0]
    topic = {d["id"]: int(d["text"].split()[1]) for d in documents}
    pure = 0
    for c in clusters:
        pure += Counter(topic[d["id"]] for d in c["documents"]).most_common(1)[0][1]
    assert pure / len(documents) > 0.8


def test_clusters_are_tighter_than_random_groups(documents, clustering, vectors):
    def cosine(groups):
        """Return the mean cosine of pairs, weighted by size, from lengths of sums."""
        total = 0.0
        for group in groups:
            n = len(group)
            if n > 1:
                pairs = (np.linalg.norm(np.sum(group, axis=0)) ** 2 - n) / (n * (n - 1))
                total += n * pairs
        return total / len(documents)

    groups = [np.stack([vectors[d["id"]] for d in c["documents"]]) for c in clustering[0]]
    mixed = np.random.default_rng(0).permutation(np.concatenate(groups))
    ends = np.cumsum([len(group) for group in groups])[:-1]
    assert cosine(groups) > 0.7
    assert cosine(np.split(mixed, ends)) < 0.1


def test_nodes_are_split_until_below_the_limit(clustering):
    _, _, stage, stages = clustering
    nodes = Counter(
        point["node"] for point in stages.read_records("cluster-level-1/points", ["node"])
    )
    assert all(node.startswith(("general_qa/", "financial_math+general_qa/")) for node in nodes)
    assert min(nodes.values()) >= CONFIG.min_documents
    last = max(path.name for path in Path(stages.folder).glob("cluster-level-*"))
    nodes = Counter(point["node"] for point in stages.read_records(f"{last}/points", ["node"]))
    over = sum(number > CONFIG.node_documents for number in nodes.values())
    assert stage.count("nodes over the limit") == over == 0
    assert len(nodes) > 8


def is_sampled(point, large, fit_documents):
    read, *sampled = cluster_module._sample(point, large, fit_documents)
    assert read.value == ("points read", "") and len(sampled) in (0, 2)
    return bool(sampled)


def test_sample_takes_documents_with_the_smallest_ids():
    ids = [digest(str(number)) for number in range(4000)]
    point = {"vector": b"", "tokens": 1}
    large = {"a": 4000}
    sampled_ids = {
        name for name in ids if is_sampled(point | {"id": name, "node": "a"}, large, 1000)
    }
    assert abs(len(sampled_ids) - 1000) < 100
    assert sampled_ids == set(sorted(ids)[: len(sampled_ids)])
    assert not is_sampled(point | {"id": min(ids), "node": "b"}, large, 1000)
    for name in ids:  # the node is not larger than the sample: all are taken
        assert is_sampled(point | {"id": name, "node": "a"}, large, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("options", [THREADS, pytest.param(PROCESSES, marks=pytest.mark.long)])
def test_clusters_do_not_depend_on_workers_or_order(documents, clustering, tmp_path, options):
    clusters, _, stage, _ = run(tmp_path, documents[::-1], options=options)
    assert clusters == clustering[0]
    assert stage.counts == clustering[2].counts


def test_centroids_depend_on_seed_and_node_but_not_on_order(documents):
    sample = [(d["id"], d["vector"]) for d in documents]

    def fit(seed, node, sample=sample):
        config = dataclasses.replace(CONFIG, seed=seed)
        *fitted, centroids, split = cluster_module._fit((node, sample), {node: 400}, config)
        assert len(fitted) == len(sample) and split.value == ("nodes split", node)
        return centroids["vectors"]

    assert fit(0, "a") == fit(0, "a", sample[::-1])
    assert len({fit(0, "a"), fit(0, "b"), fit(1, "a")}) == 3


@pytest.mark.slow
def test_changed_cluster_size_reruns_only_the_last_stages(documents, clustering, monkeypatch):
    stages = clustering[3]
    ran = []
    construct = Stages.construct

    def watch(self, pipeline, name, *arguments):
        ran.append(name)
        return construct(self, pipeline, name, *arguments)

    monkeypatch.setattr(Stages, "construct", watch)
    first = stages.run_stage("embed", {}, lambda pipeline: pytest.fail("ran again"))
    repeated_stage = cluster(stages, "embed/documents", [first], CONFIG, POOLS)
    assert ran == [] and repeated_stage.counts == clustering[2].counts
    assert repeated_stage.fingerprint == clustering[2].fingerprint
    cluster(
        stages,
        "embed/documents",
        [first],
        dataclasses.replace(CONFIG, documents_per_cluster=12),
        POOLS,
    )
    assert ran == ["cluster-members", "cluster"]


@pytest.fixture(scope="module")
def unsplit(documents, tmp_path_factory):
    """Run without levels, and with some documents that fit into no cluster."""
    good = documents[0]
    nan = np.full(32, np.nan, np.float32).tobytes()
    bad = [
        good | {"id": digest("a"), "place": "a", "vector": b""},
        good | {"id": digest("b"), "place": "b", "vector": nan},
        good | {"id": digest("c"), "place": "c", "vector": good["vector"] + b"1"},
        good | {"id": digest("d"), "place": "d", "tokens": 2001},
        good | {"id": digest("e"), "place": "e", "source": "unknown"},
    ]
    config = dataclasses.replace(CONFIG, levels=0)
    return run(tmp_path_factory.mktemp("unsplit"), documents + bad, config)


def test_nodes_over_the_limit_are_clustered_and_counted(unsplit):
    clusters, _, stage, _ = unsplit
    assert sum(len(c["documents"]) for c in clusters) == 400
    assert stage.count("nodes over the limit", "general_qa") == 1
    assert stage.count("nodes over the limit", "financial_math+general_qa") == 1


def test_documents_that_fit_in_no_cluster_are_removed(documents, unsplit):
    _, removed, stage, _ = unsplit
    source = documents[0]["source"]
    assert [(r["reason"], r["source"], r["place"]) for r in removed] == [
        ("no vector of length 1", source, "a"),
        ("no vector of length 1", source, "b"),
        ("no vector of length 1", source, "c"),
        ("more tokens than a cluster may have", source, "d"),
        ("source without tasks", "unknown", "e"),
    ]
    assert stage.count("documents removed: no vector of length 1", source) == 3


@pytest.mark.slow
def test_empty_input_gives_no_clusters(tmp_path):
    clusters, removed, stage, _ = run(tmp_path, [])
    assert clusters == removed == [] and stage.counts == ()
