import itertools
import random
from collections import Counter, defaultdict
from functools import partial

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from benchmarks.data import edited_copy
from data_pipeline import dedup, signatures
from data_pipeline.dedup import DedupConfig, connect, make_dedup, node_of
from data_pipeline.records import SCHEMAS, Document, digest, make_document, order
from data_pipeline.stages import Stages


def some_text(seed: int, words: int = 100) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(words))


def document(text: str, place: str, quality: float | None = None, source: str = "s") -> Document:
    return make_document(text, source, place, quality=quality)


def run(folder, documents, config=None, files=1, options=()):
    """Run the stage with few rounds, to save time; return sorted documents, removed, counts."""
    (folder / "read").mkdir(parents=True)
    for i in range(files):
        table = pa.Table.from_pylist(documents[i::files], schema=SCHEMAS["documents"])
        pq.write_table(table, folder / "read" / f"documents-{i}.parquet")
    stages = Stages(str(folder), options)
    make = partial(make_dedup, config=config or DedupConfig(rounds=3))
    stage = stages.run_stage("dedup", {}, make, (), dedup.BALANCES, documents="read/documents")
    kept_documents = sorted(stages.read_records("dedup/documents"), key=order)
    removed = sorted(stages.read_records("dedup/removed"), key=lambda r: (r["source"], r["place"]))
    return kept_documents, removed, {(c["what"], c["source"]): c["number"] for c in stage.counts}


def gone(removed) -> dict[str, tuple[str, str]]:
    return {r["place"]: (r["reason"], r["because"]) for r in removed}


def components(edges) -> dict[bytes, set[bytes]]:
    """Return smallest node -> larger nodes of its component, by a union-find of smaller roots."""
    root = {node: node for edge in edges for node in edge}

    def find(node):
        while root[node] != node:
            node = root[node]
        return node

    for a, b in edges:
        first, second = sorted([find(a), find(b)])
        root[second] = first
    children = defaultdict(set)
    for node in root:
        if find(node) != node:
            children[find(node)].add(node)
    return children


def check_stars(edges, rounds, children, events):
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        stars = connect(pipeline | beam.Create(edges), rounds)
        assert_that(stars.children, equal_to(children), label="check children")
        assert_that(stars.counts, equal_to(events), label="check events")


def names(number: int, prefix: str, seed: int = 0) -> list[bytes]:
    """Return nodes in an order that does not depend on their numbers."""
    return [f"{prefix}{digest(str(i), str(seed))}".encode() for i in range(number)]


# -------------------------------------------------------------------------------------------- Stage


def few_documents() -> list[Document]:
    texts = [some_text(i) for i in range(30)]
    documents = [document(text, f"{i:02d}") for i, text in enumerate(texts)]
    return [
        *documents,
        document(texts[3], "03 again", 0.5, "t"),
        document(edited_copy(texts[7], 0.85, 0.95, 1) + " longer by a few words", "07 longer"),
        document(edited_copy(texts[8], 0.5, 0.7, 1), "08 other"),
        document(edited_copy(texts[9], 0.85, 0.95, 1), "09 better", -0.5),
    ]


def families() -> list[Document]:
    documents = []
    for i in range(40):
        text = some_text(100 + i)
        documents.append(document(text, f"{i:02d}", source="families"))
        for n in range(i % 4):
            copy = edited_copy(text, 0.75, 0.97, n)
            documents.append(document(copy, f"{i:02d} {n}", source="families"))
    return documents


def copies_of_a_copy() -> list[Document]:
    text = some_text(200)
    copy = edited_copy(text, 0.85, 0.95, 1)
    return [
        document(text, "a", 2.0, "copies"),
        document(copy, "b", None, "copies"),
        document(copy, "c", 1.0, "copies"),
        document(copy, "d", None, "copies"),
        document(text, "e", None, "copies"),
    ]


def equal_texts() -> list[Document]:
    text = some_text(201)
    return [
        {**document(text, "x", source=source), "part": part}
        for source in ("equal b", "equal a")
        for part in (1, 0)
    ]


def texts_of_few_tokens() -> list[Document]:
    texts = ["", "...", "!!!", "one", "ONE.", "two", "one two", "天地", "天地。", "地天"]
    return [document(text, str(i), source="few") for i, text in enumerate(texts)]


def chinese_texts() -> list[Document]:
    rng = random.Random(1)
    text = "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(200))
    copy = edited_copy(text, 0.85, 0.95, 3) + "。。。。。。。。。。"
    return [
        document(t, place, source="zh")
        for t, place in ((text, "a"), (copy, "b"), (text[::-1], "c"))
    ]


def print_versions() -> list[Document]:
    """Return an article, its print version, which is longer, and one with half of the additions."""
    lines = [some_text(300 + i, 12) for i in range(20)]
    article = "\n".join(lines)
    footer = "Copyright The Daily River. All rights reserved."
    header = "Print version\nShare this page\n"
    texts = {"article": article, "both": f"{header}{article}\n{footer}", "one": header + article}
    return [document(text, place, source="prints") for place, text in texts.items()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Run once for all tests; return (documents read, kept, removed, counts)."""
    makers = (few_documents, families, copies_of_a_copy, equal_texts, texts_of_few_tokens)
    documents = [d for make in (*makers, chinese_texts, print_versions) for d in make()]
    return documents, *run(tmp_path_factory.mktemp("corpus"), documents)


def removed_of(corpus, *sources):
    return gone([r for r in corpus[2] if r["source"] in sources])


def test_removes_exact_and_near_duplicates(corpus):
    documents, kept_documents, _, counts = corpus
    assert removed_of(corpus, "s", "t") == {
        "03": ("exact duplicate", "t:03 again"),
        "07": ("near duplicate", "s:07 longer"),
        "09": ("near duplicate", "s:09 better"),
    }
    stay = [d for d in documents if d["source"] in "st" and d["place"] not in ("03", "07", "09")]
    assert [d for d in kept_documents if d["source"] in "st"] == sorted(stay, key=order)
    assert {what: n for (what, source), n in counts.items() if source == "s"} == {
        "documents read": 33,
        "documents kept": 30,
        "documents removed: exact duplicate": 1,
        "documents removed: near duplicate": 2,
    }
    assert counts["documents kept", "t"] == counts["documents read", "t"] == 1


def test_near_duplicate_with_the_least_boilerplate_is_kept(corpus):
    assert removed_of(corpus, "prints") == {
        "both": ("near duplicate", "prints:article"),
        "one": ("near duplicate", "prints:article"),
    }


def test_every_document_is_kept_or_listed_as_removed(corpus):
    documents, kept_documents, removed, counts = corpus
    places = Counter((r["source"], r["place"], r["part"]) for r in [*kept_documents, *removed])
    assert places == Counter((d["source"], d["place"], d["part"]) for d in documents)
    for source in {d["source"] for d in documents}:
        read, *outcome_counts = (
            sum(n for (what, of), n in counts.items() if of == source and what.startswith(begin))
            for begin in ("documents read", "documents kept", "documents removed: ")
        )
        assert read == sum(outcome_counts) == sum(d["source"] == source for d in documents)


def test_near_duplicates_match_comparison_of_all_pairs(corpus):
    documents, _, _, counts = corpus
    sets = {node_of(d): signatures.shingles(d["text"], 5) for d in documents}
    # Documents with equal texts are one node, even if their qualities differ.
    best = {min(node for node in sets if node[8:] == other_node[8:]) for other_node in sets}
    edges = [
        (a, b)
        for a, b in itertools.combinations(sorted(best), 2)
        if signatures.jaccard(sets[a], sets[b]) >= 0.8
    ]
    # Every copy shares a band with its near duplicates here, so nothing is missed.
    assert counts["pairs above the threshold", ""] == len(edges) > 40
    assert len(edges) <= counts["candidate pairs", ""] < 3 * len(edges)
    expected = components(edges)
    names_of = {node_of(d): f"{d['source']}:{d['place']}" for d in documents}
    assert {
        (f"{r['source']}:{r['place']}", r["because"])
        for r in corpus[2]
        if r["reason"] == "near duplicate"
    } == {
        (names_of[child], names_of[first])
        for first, children in expected.items()
        for child in children
    }
    sizes = Counter(f"component size = {len(children) + 1}" for children in expected.values())
    assert {what: n for (what, _), n in counts.items() if "component" in what} == sizes
    assert len(sizes) > 1


def test_exact_copies_of_near_duplicates_are_removed(corpus):
    assert removed_of(corpus, "copies") == {
        "b": ("exact duplicate", "copies:c"),
        "c": ("near duplicate", "copies:a"),
        "d": ("exact duplicate", "copies:c"),
        "e": ("exact duplicate", "copies:a"),
    }


def test_equal_texts_of_equal_rank_keep_the_first_in_order(corpus):
    _, kept_documents, removed, _ = corpus
    assert [(d["source"], d["part"]) for d in kept_documents if "equal" in d["source"]] == [
        ("equal a", 0)
    ]
    removed_copies = [r for r in removed if "equal" in r["source"]]
    assert sorted((r["source"], r["part"]) for r in removed_copies) == [
        ("equal a", 1),
        ("equal b", 0),
        ("equal b", 1),
    ]
    assert {r["because"] for r in removed_copies} == {"equal a:x"}


def test_texts_of_few_tokens_are_deduplicated(corpus):
    assert removed_of(corpus, "few") == {
        "3": ("near duplicate", "few:4"),
        "7": ("near duplicate", "few:8"),
    }


def test_chinese_texts_are_deduplicated(corpus):
    assert removed_of(corpus, "zh") == {"a": ("near duplicate", "zh:b")}


@pytest.mark.slow
def test_result_does_not_depend_on_order_or_workers(tmp_path, monkeypatch):
    documents = [document(some_text(i), str(i)) for i in range(60)]
    copies = [document(edited_copy(d["text"], 0.85, 0.9, 1), "c" + d["place"]) for d in documents]
    documents += copies + [{**d, "place": "e" + d["place"], "quality": 1.0} for d in copies[:20]]
    config = DedupConfig(largest_group=2, rounds=2)
    one_file_tables = run(tmp_path / "one", documents, config)
    random.Random(1).shuffle(documents)
    monkeypatch.setattr(dedup, "PACKED", 7)  # several packed values per bundle
    options = ["--direct_num_workers=3", "--direct_running_mode=multi_threading"]
    five_file_tables = run(tmp_path / "many", documents, config, files=5, options=options)
    assert one_file_tables == five_file_tables
    assert len(one_file_tables[1]) > 50


@pytest.mark.slow
def test_large_groups_are_capped_and_counted(tmp_path):
    """100 texts with equal shingles share every band: 10 are paired, 90 only with the first."""
    words = some_text(1)
    documents = [document(words + "!" * i, f"{i:03d}") for i in range(100)]
    kept_documents, removed, counts = run(
        tmp_path, documents, DedupConfig(largest_group=10, rounds=3)
    )
    assert [d["place"] for d in kept_documents] == ["099"]
    assert len(removed) == 99
    assert counts["groups capped", ""] == 16
    assert counts["documents beyond the cap", ""] == 16 * 90
    assert counts["candidate pairs", ""] == 45 + 90
    assert counts["component size = 100", ""] == 1


@pytest.mark.slow
def test_single_document_is_kept(tmp_path):
    kept_documents, removed, counts = run(tmp_path, [document(some_text(1), "a")])
    assert [d["place"] for d in kept_documents] == ["a"] and not removed
    assert counts == {("documents read", "s"): 1, ("documents kept", "s"): 1}


def test_nodes_sort_by_quality_then_worth():
    texts = [some_text(1, 99), some_text(1, 100)]
    ranked = [
        document(texts[0], "", 1e300),
        document(texts[0], "", 3.5),
        document(texts[1], "", 0.25),
        document(texts[0], "", 0.25),
        document(texts[1], "", -0.0),
        document(texts[0], "", 0.0),
        document(texts[0], "", -0.25),
        document(texts[0], "", -7.0),
        document(texts[1], ""),
        document(texts[0], "", float("nan")),
        document("Subscribe\nto our newsletter", ""),
    ]
    nodes = [node_of(d) for d in ranked]
    assert nodes == sorted(nodes) and len(set(nodes)) == 11
    assert {len(node) for node in nodes} == {dedup.NODE}
    assert node_of(document("a b", "")) != node_of(document("a c", ""))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bands", 15, r"dedup.bands = 15: must divide permutations = 128"),
        ("bands", 0, r"dedup.bands = 0: must be at least 1"),
        ("permutations", 0, r"dedup.permutations = 0: must be at least 1"),
        ("shingle_words", 0, r"dedup.shingle_words = 0: must be at least 1"),
        ("rounds", 0, r"dedup.rounds = 0: must be at least 1"),
        ("threshold", 0.0, r"dedup.threshold = 0.0: must be above 0 and at most 1"),
        ("threshold", 1.5, r"dedup.threshold = 1.5: must be above 0 and at most 1"),
        ("largest_group", 1, r"dedup.largest_group = 1: must be at least 2"),
        ("seed", -1, r"dedup.seed = -1: must be at least 0 and below 2\^32"),
    ],
)
def test_error_names_invalid_setting(field, value, message):
    with pytest.raises(ValueError, match=message):
        DedupConfig(**{field: value})


# --------------------------------------------------------------------------------------- Components


@pytest.mark.slow
def test_components_match_union_find():
    """One graph consists of chains, stars, a cycle, a clique and random graphs."""
    edges = []
    for length in (2, 3, 17, 200):
        chain = names(length, f"chain{length}-")
        edges += list(itertools.pairwise(chain))
    sorted_chain = sorted(names(100, "sorted-"))
    edges += list(itertools.pairwise(sorted_chain))
    for number in range(3):
        star = names(40, f"star{number}-")
        edges += [(star[0], child) for child in star[1:]]
    cycle = names(60, "cycle-")
    edges += list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    clique = names(8, "clique-")
    edges += [(a, b) for a in clique for b in clique if a < b]
    rng = random.Random(3)
    for number in range(40):
        nodes = names(rng.randrange(2, 40), f"random{number}-", number)
        for _ in range(rng.randrange(1, 50)):
            a, b = rng.choice(nodes), rng.choice(nodes)
            edges += [(a, b)] if a != b else []
    expected = components(edges)
    assert len(expected) > 60
    rng.shuffle(edges)
    children = [(first, child) for first, members in expected.items() for child in members]
    check_stars(edges, 8, children, [])


@pytest.mark.slow
def test_unconverged_nodes_are_counted():
    """After one round node n of a chain points to node n-2, and not yet to the first node."""
    chain = [bytes([i]) for i in range(9)]
    edges = list(itertools.pairwise(chain))
    # Large stars: node n's larger neighbor n+1 moves to n-1. Small stars: so do n+1 and n-1.
    children = [(chain[max(0, i - 2)], chain[i]) for i in range(1, 9)]
    event = ("components unconverged", "")
    check_stars(edges, 1, children, [event] * 6)
    check_stars(edges, 4, [(chain[0], node) for node in chain[1:]], [])


def test_node_in_two_stars_is_counted_as_unconverged():
    """The zigzag 0-3-2-4-1: after a round 2 belongs to the stars of 0 and of 1."""
    nodes = [bytes([i]) for i in range(5)]
    edges = [(nodes[a], nodes[b]) for a, b in ((0, 3), (2, 3), (2, 4), (1, 4))]
    children = [(nodes[a], nodes[b]) for a, b in ((0, 2), (0, 3), (1, 4))]
    check_stars(edges, 1, children, [("components unconverged", "")])


@pytest.mark.slow
def test_unconverged_components_are_counted_without_losses(tmp_path):
    """Windows of a long text, each near its neighbors only: a chain of 30 documents."""
    words = some_text(1, 400).split()
    documents = [document(" ".join(words[6 * i : 6 * i + 100]), f"{i:02d}") for i in range(30)]
    kept_documents, removed, counts = run(tmp_path / "1", documents, DedupConfig(rounds=1))
    assert counts["components unconverged", ""] > 0
    assert len(kept_documents) + len(removed) == 30
    first = min(documents, key=node_of)["place"]
    assert first in {d["place"] for d in kept_documents}
    kept_documents, removed, counts = run(tmp_path / "2", documents, DedupConfig())
    assert [d["place"] for d in kept_documents] == [first]
    assert ("components unconverged", "") not in counts
    assert counts["component size = 30", ""] == 1
    assert {r["because"] for r in removed} == {f"s:{first}"}
