"""Tests of a build's report page: content, escaping, no external files, reproducible bytes."""

import dataclasses
import warnings

import matplotlib
import numpy as np
import pytest
from bs4 import BeautifulSoup
from sklearn.decomposition import PCA

from data_pipeline import report
from data_pipeline.records import AssignedCluster, Count, Removed, digest, make_document
from data_pipeline.report import Content, Topic, place_points, render, top_terms, write_page

EVIL = """<script>a("1")</script>&'$x$"""

EMPTY = Content(
    config={"seed": 0},
    versions={},
    stages=[],
    funnel=[],
    lengths_before={},
    lengths_after={},
    document_tokens={},
    components={},
    cluster_sizes={"general_qa": {}},
    cluster_tokens={},
    clusters_by_task={},
    skipped=[],
    contamination={},
    topics=[],
    map_ids=[],
    map_labels=[],
    map_vectors=np.zeros((0, 8), np.float32),
)


def make_cluster(name: str, texts: list[str]) -> AssignedCluster:
    documents = [
        make_document(text, "books", f"{name}.txt", part) for part, text in enumerate(texts)
    ]
    return AssignedCluster(
        id=digest(name),
        pool="general_qa+multiple_choice",
        task="general_qa",
        documents=documents,
        tokens=1234,
        vector=b"",
    )


def removed(reason: str, place: str, because: str = "") -> Removed:
    return Removed(reason=reason, source="books", place=place, part=0, because=because)


@pytest.fixture(scope="module")
def content() -> Content:
    clusters = [make_cluster(f"c{number}", ["One text.", "Two"]) for number in range(12)]
    clusters[0]["documents"][1]["source"] = "web"
    return Content(
        config={"seed": 7, "dedup": {"bands": 16}},
        versions={"jax": "0.1"},
        stages=[
            (
                "read",
                [
                    Count(what="files skipped: binary", source="books", number=1),
                    Count(what="files skipped: empty", source="books", number=2),
                    Count(what="documents kept", source="books", number=1200),
                    Count(what="documents kept", source="web", number=34),
                    Count(what="documents read", source="books", number=1500),
                    Count(what="documents removed: empty", source="books", number=300),
                    Count(what="candidate pairs", source="", number=5),
                ],
            ),
            ("dedup", [Count(what="documents kept", source="books", number=1230)]),
            ("embed", []),
        ],
        funnel=[("read", 54321), ("after filter", 1234)],
        lengths_before={0: 1, 10: 1, 5000: 1, 70000: 1},
        lengths_after={10: 1, 5000: 1},
        document_tokens={3: 1, 1200: 1, 900: 1},
        components={2: 40, 3: 5, 4: 6, 100: 1},
        cluster_sizes={"general_qa": {2: 1, 3: 2}, "financial_math": {5: 1}},
        cluster_tokens={4000: 1, 5000: 1, 6000: 1},
        clusters_by_task={"general_qa": 3, "financial_math": 1},
        skipped=[removed("empty", "b.txt"), removed("empty", "a.txt"), removed("binary", "c")],
        contamination={"musique": ["books:z", "books:y"], "frames": []},
        topics=[
            Topic(clusters[0], ["whale", "ship"]),
            Topic(make_cluster("elsewhere", ["Three"]), ["turtle"]),
        ],
        map_ids=[cluster["id"] for cluster in clusters],
        map_labels=["books"] * 8 + ["web"] * 4,
        map_vectors=np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32),
    )


@pytest.fixture(scope="module")
def text(content: Content) -> str:
    return render(content)


@pytest.fixture(scope="module")
def page(text: str) -> BeautifulSoup:
    return BeautifulSoup(text, "html.parser")


def picture(page: BeautifulSoup, name: str) -> list[str]:
    """Return the texts in a plot."""
    (svg,) = page.select(f"svg[aria-label={name}]")
    return [text.get_text() for text in svg.select("text")]


def rows(page: BeautifulSoup) -> list[list[str]]:
    return [[cell.get_text() for cell in row.select("th, td")] for row in page.select("tr")]


def test_stage_counts_are_tabulated_by_source(page):
    table_rows = rows(page)
    start = table_rows.index(["", "books", "web", "all"])
    assert table_rows[start + 1 : start + 5] == [
        ["documents read", "1,500", "0", "1,500"],
        ["documents removed: empty", "300", "0", "300"],
        ["documents kept", "1,200", "34", "1,234"],
        ["candidate pairs", "0", "0", "5"],
    ]


def test_key_figures_count_what_the_last_stage_of_documents_kept(page):
    facts = {dt.get_text(): dt.find_next_sibling("dd").get_text() for dt in page.select("dl dt")}
    assert facts["documents kept"] == "1,230" and facts["files skipped"] == "3"


def test_plots_show_the_numbers(page):
    names = [svg["aria-label"] for svg in page.select("svg")]
    assert names == ["funnel", "characters", "tokens", "components", "sizes", "sums", "map"]
    assert {"read", "54,321", "after filter", "1,234"} <= set(picture(page, "funnel"))
    assert {"read", "kept by the filter", "10k"} <= set(picture(page, "characters"))
    # Groups of 3 and of 4 share a bar; sizes between 5 and 64 have empty bars.
    assert {"2", "40", "3–4", "11", "5–8", "65–128", "1"} <= set(picture(page, "components"))
    assert {"general_qa", "financial_math"} <= set(picture(page, "sizes"))


def test_map_names_only_topics_on_the_map(page):
    assert sorted(picture(page, "map")) == ["books (8)", "web (4)", "whale"]


def test_map_shows_nine_labels_and_merges_the_others(content):
    labels = [f"s{number:02}" for number in range(11)] + ["s00"]
    labeled_content = dataclasses.replace(
        EMPTY, map_ids=content.map_ids, map_labels=labels, map_vectors=content.map_vectors
    )
    shown = picture(BeautifulSoup(render(labeled_content), "html.parser"), "map")
    assert {"s00 (2)", "s08 (1)", "2 others (2)"} <= set(shown)
    assert "s09 (1)" not in shown


def test_topics_examples_and_settings_are_shown(page, content):
    first = content.topics[0].cluster["id"][:8]
    assert [first, "general_qa", "books, web", "2", "whale, ship"] in rows(page)
    assert ["financial_math", "1"] in rows(page)
    assert ["jax", "0.1"] in rows(page)
    assert '"bands": 16' in page.select_one("pre").get_text()
    assert "Seed 7." in page.get_text()
    (example, _) = page.select(".example")
    assert "2 documents, 1,234 tokens" in example.get_text()
    assert "web:c0.txt, part 1\nTwo" in example.get_text()


def test_long_examples_are_truncated():
    cluster = make_cluster("long", ["one  \n two " + "x" * 900, "b", "c", "not shown"])
    cut = dataclasses.replace(EMPTY, topics=[Topic(cluster, [])])
    (example,) = BeautifulSoup(render(cut), "html.parser").select(".example")
    assert [span.get_text() for span in example.select("p span[dir]")] == [
        "one two " + "x" * 191 + "…",
        "b",
        "c",
    ]
    assert "4 documents" in example.get_text()


def lists(page: BeautifulSoup) -> dict[str, list[str]]:
    return {
        group.summary.get_text(): [item.get_text() for item in group.select("li")]
        for group in page.select("details:has(ul)")
    }


def test_removed_files_are_listed_by_reason_and_benchmark(page):
    assert lists(page) == {
        "binary: 1": ["books:c"],
        "empty: 2": ["books:a.txt", "books:b.txt"],
        "frames: 0": [],
        "musique: 2": ["books:y", "books:z"],
    }


def test_long_lists_are_truncated_and_the_rest_is_counted():
    names = [f"{number:04}" for number in range(1300)]
    skipped = [removed("not UTF-8", name, "invalid byte") for name in reversed(names)]
    long_content = dataclasses.replace(
        EMPTY, skipped=skipped, contamination={"musique": names[:201]}
    )
    page_lists = lists(BeautifulSoup(render(long_content), "html.parser"))
    reasons = page_lists["not UTF-8: 1,300"]
    assert reasons[0] == "books:0000 (invalid byte)"
    assert reasons[199:] == ["books:0199 (invalid byte)", "and 1,100 more"]
    assert page_lists["musique: 201"][199:] == ["0199", "and 1 more"]


@pytest.mark.slow
def test_every_text_is_escaped(content):
    document = make_document(EVIL + "text", EVIL + "source", EVIL + "place")
    cluster = AssignedCluster(
        id=content.map_ids[0],
        pool=EVIL + "pool",
        task=EVIL + "task",
        documents=[document],
        tokens=1,
        vector=b"",
    )
    reason = Removed(
        reason=EVIL + "reason",
        source=EVIL + "source",
        place=EVIL + "file",
        part=1,
        because=EVIL + "because",
    )
    evil = dataclasses.replace(
        content,
        config={"seed": 0, EVIL + "key": EVIL + "value"},
        versions={EVIL + "package": EVIL + "version"},
        stages=[(EVIL + "stage", [Count(what=EVIL + "what", source=EVIL + "by", number=1)])],
        funnel=[(EVIL + "f", 1)],
        cluster_sizes={EVIL + "p": {2: 1}, "other": {2: 1}},
        clusters_by_task={EVIL + "task": 1},
        skipped=[reason],
        contamination={EVIL + "benchmark": [EVIL + "fell"]},
        topics=[Topic(cluster, [EVIL + "t"])],
        map_labels=[EVIL + "l"] * 12,
    )
    text = render(evil)
    assert "<script" not in text
    page = BeautifulSoup(text, "html.parser")
    shown = page.get_text().replace('\\"', '"')  # in JSON a quote has a backslash
    words = "key value package version stage what by task reason file because benchmark fell"
    for word in (words + " pool source place text").split():
        assert EVIL + word in shown, word
    # The same holds in plots, where "$" does not begin a formula.
    assert EVIL + "f" in picture(page, "funnel")
    assert EVIL + "p" in picture(page, "sizes")
    assert {EVIL + "t", EVIL + "l (12)"} <= set(picture(page, "map"))


def test_page_is_self_contained(text, page):
    assert "@import" not in text
    assert report._INK not in text  # plots use the page's own ink
    assert text.count("url(") == text.count("url(#")
    assert not page.select("script, link, img, iframe, object, [src], [onload]")
    links = [tag["xlink:href"] for tag in page.select("use")]
    links += [f"#{part.split(')')[0]}" for part in text.split("url(#")[1:]]
    assert len(links) > 12
    assert {link[1:] for link in links} <= {tag["id"] for tag in page.select("[id]")}
    assert not page.select("[href]")


@pytest.mark.slow
def test_same_content_renders_bit_identically(content, text):
    shuffled = dataclasses.replace(
        content,
        skipped=content.skipped[::-1],
        contamination={name: content.contamination[name][::-1] for name in ("frames", "musique")},
        components=dict(reversed(content.components.items())),
        cluster_sizes=dict(reversed(content.cluster_sizes.items())),
        lengths_before=dict(reversed(content.lengths_before.items())),
    )
    import matplotlib.pyplot as plt

    outside = {"svg.hashsalt": "other", "svg.fonttype": "path", "font.size": 20, "axes.grid": False}
    with plt.style.context(["dark_background", outside]), warnings.catch_warnings():
        plt.plot([1, 2])
        before = dict(matplotlib.rcParams)
        assert render(shuffled) == text
        assert dict(matplotlib.rcParams) == before
        assert len(plt.get_fignums()) == 1
        plt.close()


def test_empty_content_renders_without_plots():
    page = BeautifulSoup(render(EMPTY), "html.parser")
    assert not page.select("svg")
    assert page.get_text().count("None.") == 3


@pytest.mark.slow
def test_single_and_extreme_values_are_plotted(content):
    odd = dataclasses.replace(
        content,
        funnel=[("read", 0)],
        lengths_before={0: 1},
        lengths_after={},
        document_tokens={10**7: 1},
        components={1: 1, 10**6: 3},
        cluster_sizes={"general_qa": {1: 1, 5000: 1}},
        cluster_tokens={1: 1},
        topics=[Topic(content.topics[0].cluster, ["电视"])],
        map_ids=content.map_ids[:1],
        map_labels=["网"],
        map_vectors=content.map_vectors[:1],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = BeautifulSoup(render(odd), "html.parser")
    assert len(page.select("svg")) == 7
    assert picture(page, "map") == ["电视", "网 (1)"]
    assert "524289–1048576" in picture(page, "components")


def test_report_is_written_in_utf8(tmp_path):
    odd = dataclasses.replace(EMPTY, versions={"broken \ud800": "1"})
    write_page(str(tmp_path / "folder"), odd)
    text = (tmp_path / "folder" / "report.html").read_text("utf-8")
    assert text == render(odd).replace("\ud800", "?")
    assert "<td>broken ?</td>" in text


def test_top_terms_distinguish_clusters():
    background = ["the whale and the ship sailed", "a stock price", "ship price", "other words"]
    clusters = [
        ["The whale, the WHALE! 1851 and the ship.", "whale 3rd"],
        ["The price of the stock; the stock's dividend in Q3 2020 was dividend dividend"],
        ["", "12 34 the and don't"],
    ]
    whale, stock, nothing = top_terms(clusters, background, 3)
    assert whale == ["whale", "rd", "ship"]
    assert stock == ["dividend", "stock", "price"]
    assert nothing == []
    assert top_terms([["zebra apple mango"]], [], 2) == [["apple", "mango"]]
    assert top_terms([["common rare"]], ["common", "thing common"], 1) == [["rare"]]
    assert top_terms([["1 2"], []], ["3"], 3) == [[], []]


def test_top_terms_of_scripts_without_spaces_are_short():
    chinese = "飓风杰克逊维尔。" * 3 + "飓风"
    korean, hindi = "한국어 문서 한국어", "हिन्दी में हिन्दी"
    thai = "ประเทศไทย" * 30  # one long run of letters without spaces
    terms = top_terms([[chinese], [korean], [hindi], [thai]], ["飓 text"], 20)
    assert terms[0][0] == "飓风"
    assert {len(term) for term in terms[0]} == {2}
    assert terms[1] == ["한국어", "문서"]
    assert terms[2] == ["हिन्दी", "में"]
    assert terms[3] == []


def test_few_points_are_placed_by_pca():
    vectors = np.random.default_rng(1).normal(size=(49, 7))
    expected = PCA(2, svd_solver="full").fit_transform(vectors)
    places = place_points(vectors)
    np.testing.assert_allclose(np.abs(places), np.abs(expected), atol=1e-9)
    # Signs are fixed: the largest component of each axis is positive.
    for seed in range(6):
        vectors = np.random.default_rng(seed).normal(size=(20, 5))
        parts = (vectors - vectors.mean(axis=0)).T @ place_points(vectors)
        largest = np.abs(parts).argmax(axis=0)
        assert (parts[largest, [0, 1]] > 0).all()


def test_many_points_are_placed_by_neighborhood():
    generator = np.random.default_rng(2)
    group = np.arange(60) % 10
    # Ten groups in ten directions: no plane separates them.
    vectors = 5 * np.eye(10)[group] + 0.3 * generator.normal(size=(60, 10))
    places = place_points(vectors)
    assert np.array_equal(places, place_points(vectors))
    pca = PCA(2, svd_solver="full").fit_transform(vectors)
    shares = []
    for points in (places, pca):
        distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
        np.fill_diagonal(distance, np.inf)
        nearest = distance.argsort(axis=1)[:, :5]
        shares.append((group[nearest] == group[:, None]).mean())
    assert shares[0] > 0.99
    assert shares[1] < 0.9


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 4), (2, 1), (60, 1), (60, 3)])
def test_degenerate_points_are_placed_at_the_origin(shape):
    for value in (0.0, 1.0, 0.1):  # the mean of 60 times 0.1 is another number
        places = place_points(np.full(shape, value))
        assert places.shape == (shape[0], 2)
        np.testing.assert_allclose(places, 0, atol=1e-12)
