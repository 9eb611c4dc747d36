"""HTML report of a build: report.html, one self-contained page.

Plots are inline SVG in the page's text color, so the page needs no network and no scripts. The map
places clusters with similar vectors near each other, by PCA and then t-SNE. It shows the clusters
with the smallest ids; ids are hashes, so this is a uniform sample, and the same in every build. All
text is escaped, and equal content gives equal bytes.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple, cast

import jinja2
import matplotlib.style
import numpy as np
from apache_beam.io.filesystems import FileSystems
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from data_pipeline import output, summary
from data_pipeline.records import AssignedCluster, Count, Removed, place_name
from data_pipeline.stages import Done, Stages
from spell_jax import reporting

REPORT = "report.html"
# Clusters on the map: t-SNE of 2000 points takes 7 s on one core.
MAP_POINTS = 2000
# Names listed per reason or benchmark; further names are only counted.
NAMES_SHOWN = 200
# Clusters per task that are shown with their terms, and terms shown.
TOPICS, TERMS = 8, 8
# Other clusters, for the document frequencies of words: the shown clusters alone are too few.
BACKGROUND = 200
EXAMPLE_DOCUMENTS = 3  # documents shown per example cluster
EXAMPLE_CHARACTERS = 200  # characters shown per document

# Clusters. With fewer, neighborhoods are too small for t-SNE and PCA is shown.
_TSNE_FROM = 50
# Input dimensions of t-SNE, after PCA: fewer dimensions take less time and carry less noise.
_PCA_SIZE = 50
_GRAY = "C7"
# Colors of the most frequent labels on the map; all other labels share gray.
_COLORS = tuple(f"C{number}" for number in range(10) if f"C{number}" != _GRAY)
_LABEL_CHARACTERS = 32  # largest length of a name in a plot
_SMALL, _LARGE = (5.0, 3.1), (9.6, 6.4)  # inches; a small plot is half as wide as the page
# Color of text and lines, replaced by currentColor so that a dark page works. No plot may use it.
_INK = "#010203"
_STYLE = {
    "svg.hashsalt": "spell",
    "svg.fonttype": "none",  # keeps text as text: small files, and the browser's fonts
    "text.parse_math": False,  # a "$" in a name does not start a formula
    "font.size": 9,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
}

# Combining marks are parts of words, but \w does not match them: accents, Hebrew, Arabic, Indic,
# Thai, Lao.
_LETTER = r"(?:[^\W\d_]|[\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0dff\u0e00-\u0eff])"
_WORD = re.compile(_LETTER + r"{2,}")
# Chinese characters and kana.
_SPACELESS = re.compile(
    r"([\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+)"
)
_LONGEST_WORD = 30  # letters; longer runs are sentences without spaces, or not words
# English stop words, and the fragments that an apostrophe leaves of contractions.
_STOP = ENGLISH_STOP_WORDS | {"ll", "ve", "don", "doesn", "didn", "isn", "wasn", "wouldn", "couldn"}


class Topic(NamedTuple):
    """Cluster with its most characteristic words, best first."""

    cluster: AssignedCluster
    terms: Sequence[str]


@dataclass(frozen=True)
class Content:
    """Content of the page. An empty field is shown as empty, or its plot is left out.

    Histograms map a value, possibly rounded down to a tenth of a decade (records.rounded), to its
    number. Only `stages`, `funnel`, `topics` and the map are ordered.
    """

    config: Mapping[str, Any]  # nested and JSON-serializable, with the seed
    versions: Mapping[str, str]  # package or file -> version or hash
    stages: Sequence[tuple[str, Sequence[Count]]]
    funnel: Sequence[tuple[str, int]]  # documents read, then those left after each stage
    lengths_before: Mapping[int, int]  # histogram of characters of the documents read
    lengths_after: Mapping[int, int]  # histogram of characters, kept by the filter
    document_tokens: Mapping[int, int]  # histogram
    components: Mapping[int, int]  # histogram of sizes of near-duplicate groups
    cluster_sizes: Mapping[str, Mapping[int, int]]  # pool -> histogram of documents per cluster
    cluster_tokens: Mapping[int, int]  # histogram
    clusters_by_task: Mapping[str, int]
    skipped: Sequence[Removed]  # listed by reason
    contamination: Mapping[str, Sequence[str]]  # benchmark -> names of the documents that match
    topics: Sequence[Topic]  # the beginnings of their first documents are shown
    map_ids: Sequence[str]  # n <= MAP_POINTS clusters; clusters in `topics` are labeled
    map_labels: Sequence[str]  # names of the n colors: main source, or pool
    map_vectors: np.ndarray  # float [n, D]


def write_report(
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
    shown = {record["id"] for record in index[:MAP_POINTS]}
    points = sorted(stages.read_records(clusters, columns, shown), key=lambda point: point["id"])
    pools = {c["source"] for c in by_name["cluster"].counts if c["what"] == "clusters"}
    content = Content(
        config=manifest["config"],
        versions=manifest["versions"],
        stages=[(stage.name, stage.plain_counts) for stage in finished_stages],
        funnel=_funnel(by_name),
        lengths_before=by_name["read"].histogram("characters read"),
        lengths_after=by_name["read"].histogram("characters kept"),
        document_tokens=by_name["cut"].histogram("tokens"),
        components=by_name["dedup"].histogram("component size"),
        cluster_sizes={pool: by_name["cluster"].histogram("cluster size", pool) for pool in pools},
        cluster_tokens=Counter(record["tokens"] for record in index),
        clusters_by_task=Counter(record["task"] for record in index),
        skipped=cast(Any, list(stages.read_records("read/removed"))),
        contamination=_contamination(stages, by_name),
        topics=_topics(stages, clusters, index),
        map_ids=[point["id"] for point in points],
        map_labels=[_main_source(point) for point in points],
        map_vectors=np.stack([np.frombuffer(point["vector"], np.float32) for point in points]),
    )
    write_page(out, content)


def _funnel(stages_by_name: Mapping[str, Done]) -> list[tuple[str, int]]:
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
    stages = {**stages_by_name, "filter": stages_by_name["read"]}
    return [(name, stages[name].count(what)) for name, what in events.items() if name in stages]


def _contamination(stages: Stages, stages_by_name: Mapping[str, Done]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = defaultdict(list)
    if "decontaminate" in stages_by_name:
        for record in stages.read_records("decontaminate/removed"):
            names[record["because"]].append(place_name(record))
    return names


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


def _main_source(point: Mapping[str, Any]) -> str:
    """Return the source of most documents of a cluster; the first by name on ties."""
    counts = Counter(document["source"] for document in point["documents"])
    return min(counts, key=lambda source: (-counts[source], source))


def write_page(folder: str, content: Content) -> None:
    """Write report.html into a folder on any file system that Beam supports."""
    with FileSystems.create(FileSystems.join(folder, REPORT), mime_type="text/html") as file:
        file.write(render(content).encode("utf-8", "replace"))


def render(content: Content) -> str:
    """Render the page as HTML."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = "{:,}".format
    template = (resources.files("data_pipeline") / REPORT).read_text("utf-8")
    return environment.from_string(template).render(
        content=content,
        style=Markup((resources.files(reporting) / "style.css").read_text("utf-8")),
        plots=_plots(content),
        facts=_facts(content),
        tables=[(name, *_stage_table(counts)) for name, counts in content.stages],
        config=json.dumps(content.config, indent=2, ensure_ascii=False),
        skipped=_by_reason(content.skipped),
        contamination=content.contamination,
        names_shown=NAMES_SHOWN,
        topics=[(topic, _beginnings(topic.cluster)) for topic in content.topics],
    )


def top_terms(
    clusters: Sequence[Sequence[str]], background: Sequence[str], count: int
) -> list[list[str]]:
    """Find the words that distinguish each cluster from other documents by TF-IDF, best first.

    A word has at least two letters and is lower-cased. English stop words, numbers and runs of over
    30 letters are ignored. Chinese characters and kana, which have no spaces, are taken in pairs.
    `clusters` has the texts of each cluster, `background` a sample of all texts; a cluster gets at
    most `count` terms, ties in alphabetical order.
    """
    grouped = [[word for text in texts for word in _words(text)] for texts in clusters]
    if not any(grouped):
        return [[] for _ in clusters]
    # A cluster counts as one document, or a word that all its texts share would look common.
    vectorizer = TfidfVectorizer(analyzer=cast(Any, list), sublinear_tf=True)
    vectorizer.fit([*map(_words, background), *grouped])
    vocabulary = vectorizer.get_feature_names_out()
    terms = []
    for words in grouped:
        scores: Any = vectorizer.transform([words])
        scores = scores.tocoo()
        # Columns are in alphabetical order, which decides ties.
        best = np.lexsort((scores.col, -scores.data))[:count]
        terms.append([str(vocabulary[column]) for column in scores.col[best]])
    return terms


def place_points(vectors: np.ndarray) -> np.ndarray:
    """Project float [n, D] to float [n, 2] so that similar vectors are close; n and D may be 0.

    Uses t-SNE, initialized with PCA, for at least 50 vectors, and PCA alone for fewer. Runs in one
    thread, so that sums have a fixed order.
    """
    if len(vectors) < 2 or not np.size(vectors):
        return np.zeros((len(vectors), 2))
    # The division by a variance of 0, of equal vectors, is not used.
    with threadpool_limits(1), np.errstate(invalid="ignore"):
        pca = PCA(svd_solver="full")
        reduced = pca.fit_transform(np.asarray(vectors, np.float64))
        # scikit-learn's t-SNE crashes if all vectors are equal up to rounding.
        sizes = pca.singular_values_
        equal = sizes[0] <= 1e-6 * np.linalg.norm(vectors)
        if len(reduced) < _TSNE_FROM or len(sizes) < 2 or equal:
            return np.pad(reduced, ((0, 0), (0, 2)))[:, :2]
        perplexity = min(30, len(reduced) // 5)  # effective number of neighbors
        tsne = TSNE(init="pca", perplexity=perplexity, random_state=0)
        return tsne.fit_transform(reduced[:, :_PCA_SIZE])


def _words(text: str) -> list[str]:
    words = []
    for index, piece in enumerate(_SPACELESS.split(text.lower())):
        if index % 2:
            # Pairs of characters: most Chinese words have two.
            words += [piece[i : i + 2] for i in range(len(piece) - 1)]
        else:
            words += [w for w in _WORD.findall(piece) if len(w) <= _LONGEST_WORD]
    return [word for word in words if word not in _STOP]


def _facts(content: Content) -> list[tuple[str, int]]:
    """Return the key figures at the top of the page."""
    counts = dict(content.stages)
    return [
        ("documents read", sum(content.lengths_before.values())),
        ("documents kept", summary.kept_documents(counts)),
        ("near-duplicate groups", sum(content.components.values())),
        ("clusters", sum(content.cluster_tokens.values())),
        ("tokens in clusters", sum(size * n for size, n in content.cluster_tokens.items())),
        ("files skipped", summary.skipped_files(counts)),
    ]


def _stage_table(counts: Iterable[Count]) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """Return a stage's sources, and (event, number per source and in total) in display order."""
    numbers: dict[str, Counter[str]] = defaultdict(Counter)
    for count in counts:
        numbers[count["what"]][count["source"]] += count["number"]
    sources = sorted({source for row in numbers.values() for source in row if source})
    rows = [
        (what, [*(numbers[what][source] for source in sources), numbers[what].total()])
        for what in sorted(numbers, key=_stage_order)
    ]
    return sources, rows


def _stage_order(what: str) -> tuple[int, str]:
    firsts = ("documents read", "documents removed", "documents kept", "")
    return next(i for i, first in enumerate(firsts) if what.startswith(first)), what


def _by_reason(skipped: Iterable[Removed]) -> dict[str, list[str]]:
    names = defaultdict(list)
    for removed in skipped:
        because = removed["because"] and f" ({_cut(removed['because'], EXAMPLE_CHARACTERS)})"
        names[removed["reason"]].append(place_name(removed) + because)
    return names


def _beginnings(cluster: AssignedCluster) -> list[tuple[str, str]]:
    """Return name and beginning, on one line, of the first documents of a cluster."""
    beginnings = []
    for document in cluster["documents"][:EXAMPLE_DOCUMENTS]:
        # Five times the characters shown, because runs of white space shrink.
        text = " ".join(document["text"][: 5 * EXAMPLE_CHARACTERS].split())
        beginnings.append((place_name(document), _cut(text, EXAMPLE_CHARACTERS)))
    return beginnings


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _plots(content: Content) -> dict[str, Markup]:
    """Return name -> SVG for the plots that have data."""
    lengths = {"read": content.lengths_before, "kept by the filter": content.lengths_after}
    plots: dict[str, tuple[Callable[..., None], Any, *tuple[Any, ...]]] = {
        "funnel": (_draw_funnel, content.funnel),
        "characters": (_draw_log, _filled(lengths), "characters", "documents"),
        "tokens": (_draw_log, _filled({"tokens": content.document_tokens}), "tokens", "documents"),
        "components": (_draw_components, content.components),
        "sizes": (_draw_sizes, _filled(content.cluster_sizes)),
        "sums": (_draw_log, _filled({"tokens": content.cluster_tokens}), "tokens", "clusters"),
        "map": (_draw_map, content.map_ids, content),
    }
    return {name: _svg(name, *plot) for name, plot in plots.items() if len(plot[1])}


def _filled(histograms: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
    return {name: dict(sorted(counts.items())) for name, counts in histograms.items() if counts}


def _svg(name: str, draw: Callable[..., None], *data: Any) -> Markup:
    """Draw a plot as an <svg> element without a fixed size; equal data gives equal bytes."""
    size = _LARGE if name == "map" else _SMALL
    buffer = io.StringIO()
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # matplotlib measures text in DejaVu Sans, which lacks some letters of the browser's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot(), *data)
        # Without the date and version that matplotlib writes.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue().replace(_INK, "currentColor")
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # ids would repeat between the plots of the page
    view = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {view and view[0]} role="img"'
    body = svg[svg.index(">", svg.index("<svg")) :]
    return Markup(f'{head} aria-label="{name}"{body}')


def _draw_funnel(axes: Axes, funnel: Sequence[tuple[str, int]]) -> None:
    names = [_cut(name, _LABEL_CHARACTERS) for name, _ in funnel]
    bars = axes.barh(range(len(names)), [number for _, number in funnel], color="C0", alpha=0.8)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("documents")


def _draw_log(axes: Axes, series: Mapping[str, Mapping[int, int]], x: str, y: str) -> None:
    """Draw histograms with log bins, ten per decade over whole decades; zeros count as 1."""
    values = {name: np.maximum(list(numbers), 1) for name, numbers in series.items()}
    first = int(np.floor(np.log10(min(numbers.min() for numbers in values.values()))))
    last = int(np.floor(np.log10(max(numbers.max() for numbers in values.values())))) + 1
    bins = np.logspace(first, last, 10 * (last - first) + 1).tolist()
    for index, (name, numbers) in enumerate(values.items()):
        weights = list(series[name].values())
        axes.hist(numbers, bins, weights=weights, color=f"C{index}", alpha=0.6, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(x)
    _count_axis(axes, y)
    _legend(axes, len(values))


def _draw_components(axes: Axes, components: Mapping[int, int]) -> None:
    """Draw bars for sizes 1, 2, 3 to 4, 5 to 8 and so on, with heights on a log axis."""
    heights: Counter[int] = Counter()
    for size, number in components.items():
        heights[(size - 1).bit_length()] += number
    powers = range(min(heights), max(heights) + 1)
    names = [str(2**p) if p < 2 else f"{2 ** (p - 1) + 1}–{2**p}" for p in powers]
    bars = axes.bar(powers, [heights[p] for p in powers], color="C0", alpha=0.8)
    axes.bar_label(bars, [f"{heights[p]:,}" if heights[p] else "" for p in powers], fontsize=8)
    crowded = len(names) > 7
    axes.set_xticks(
        powers, names, rotation=45 if crowded else 0, ha="right" if crowded else "center"
    )
    axes.set_yscale("log")
    axes.set_ylim(0.5, 3 * max(heights.values()))
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("documents in the group")
    axes.set_ylabel("groups")


def _draw_sizes(axes: Axes, cluster_sizes: Mapping[str, Mapping[int, int]]) -> None:
    """Draw one bar per size, or at most 30 bars for wide ranges, with the pools stacked."""
    pools = sorted(cluster_sizes)
    sizes = [list(cluster_sizes[pool]) for pool in pools]
    weights = [list(cluster_sizes[pool].values()) for pool in pools]
    first, last = min(map(min, sizes)), max(map(max, sizes))
    step = max(1, -(-(last - first + 1) // 30))
    bins = [edge - 0.5 for edge in range(first, last + step + 1, step)]
    names = [_cut(pool, _LABEL_CHARACTERS) for pool in pools]
    axes.hist(sizes, bins, weights=weights, stacked=True, label=names, alpha=0.8, rwidth=0.9)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("documents in the cluster")
    _count_axis(axes, "clusters")
    _legend(axes, len(pools))


def _count_axis(axes: Axes, name: str) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel(name)


def _legend(axes: Axes, names: int) -> None:
    """Add a legend below the plot, where it hides nothing, if there are several names."""
    if names > 1 and axes.figure is not None:
        axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def _draw_map(axes: Axes, map_ids: Sequence[str], content: Content) -> None:
    """Draw one point per cluster; the most common labels get colors, other labels are gray."""
    labels = np.asarray(content.map_labels)
    points = place_points(content.map_vectors)
    counted = Counter(labels.tolist())
    common = sorted(counted, key=lambda label: (-counted[label], label))[: len(_COLORS)]
    groups = [(label, labels == label) for label in common]
    if other_count := len(counted) - len(common):
        groups.append((f"{other_count} others", ~np.isin(labels, common)))
    for (name, mask), color in zip(groups, (*_COLORS, _GRAY), strict=False):
        legend = f"{_cut(name, _LABEL_CHARACTERS)} ({mask.sum():,})"
        axes.plot(*points[mask].T, ".", color=color, alpha=0.8, markersize=7, mew=0, label=legend)
    _name_points(axes, map_ids, points, content.topics)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.06)
    axes.spines[:].set_visible(False)
    if axes.figure is not None:
        axes.figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)


def _name_points(
    axes: Axes, ids: Sequence[str], points: np.ndarray, topics: Sequence[Topic]
) -> None:
    """Circle the points of topics and label them; labels move down until none overlap."""
    terms = {topic.cluster["id"]: topic.terms[0] for topic in topics if topic.terms}
    width, line = np.ptp(points, axis=0) * (0.16, 0.032)
    named = [(points[row], terms[id]) for row, id in enumerate(ids) if id in terms]
    placed: list[tuple[float, float]] = []
    for (x, y), term in sorted(named, key=lambda pair: (-pair[0][1], pair[0][0])):
        height = y
        for beside, taken_height in sorted(placed, key=lambda place: -place[1]):
            if abs(x - beside) < width and abs(height - taken_height) < line:
                height = taken_height - line
        placed.append((x, height))
        axes.plot(x, y, "o", markersize=8, markerfacecolor="none", color=_INK, mew=0.8)
        axes.annotate(
            _cut(term, _LABEL_CHARACTERS),
            (x, y),
            (x + width / 12, height + line / 3),
            fontsize=10,
            arrowprops={"arrowstyle": "-", "color": _INK, "linewidth": 0.5},
        )
