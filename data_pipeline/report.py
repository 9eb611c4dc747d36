"""What a build did, as one HTML page that anybody can open: report.html.

1. The driver fills a `Content` with numbers, names and a few texts; nothing here reads a table or
   runs a pipeline.
2. Lengths, near-duplicates, cluster sizes and the map become SVG inside the page, so it is one
   file that needs no network and no scripts. Ink is the page's own color, for light and dark.
3. The words that tell a cluster from other documents are those of highest TF-IDF.
4. The map puts clusters with similar vectors close to each other: PCA, then t-SNE.
5. Every text is escaped, and what has no order is sorted: same content, same bytes.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import jinja2
import matplotlib.style
import numpy as np
from apache_beam.io.filesystems import FileSystems
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from data_pipeline.records import Cluster, Count, Removed

REPORT = "report.html"
MAP_POINTS = 2000  # clusters on the map: t-SNE of so many takes 7 s on one core
NAMES_SHOWN = 200  # of a reason or a benchmark; the others are only counted
EXAMPLE_DOCUMENTS = 3  # of a cluster
EXAMPLE_CHARACTERS = 200  # of a document

_TSNE_FROM = 50  # clusters; with fewer, neighborhoods are too small and PCA is shown
_PCA_SIZE = 50  # dimensions that t-SNE gets
_GREY = "C7"
# Of the labels on the map; those beyond them share gray.
_COLOURS = tuple(f"C{number}" for number in range(10) if f"C{number}" != _GREY)
_LABEL_CHARACTERS = 32  # of a name in a plot
_SMALL, _LARGE = (5.0, 3.1), (9.6, 6.4)  # inches; a small one is half the page wide
_INK = "#010203"  # becomes currentColor; a color that no plot has
_STYLE = {
    "svg.hashsalt": "spell",
    "svg.fonttype": "none",  # text stays text: small, and in the browser's fonts
    "text.parse_math": False,  # a "$" in a name is a "$"
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

# Marks are parts of words, though \w has none of them: accents, Hebrew, Arabic, Indic, Thai, Lao.
_LETTER = r"(?:[^\W\d_]|[\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0dff\u0e00-\u0eff])"
_WORD = re.compile(_LETTER + r"{2,}")
# Chinese characters and kana.
_SPACELESS = re.compile(
    r"([\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+)"
)
_LONGEST_WORD = 30  # letters; longer runs are sentences without spaces, or no words
# English stop words, and what an apostrophe leaves of others.
_STOP = ENGLISH_STOP_WORDS | {"ll", "ve", "don", "doesn", "didn", "isn", "wasn", "wouldn", "couldn"}


class Topic(NamedTuple):
    """What a cluster is about.

    Attributes:
      cluster: its id.
      task: or pool.
      sources: of its documents.
      documents: how many.
      terms: best first.
    """

    cluster: str
    task: str
    sources: Sequence[str]
    documents: int
    terms: Sequence[str]


@dataclass(frozen=True)
class Content:
    """What the page shows. An empty field is shown as such, or its plot is left out.

    Order matters in `stages`, `funnel`, `topics` and `examples` alone.

    Attributes:
      title: one line.
      config: JSON-able, nested.
      versions: package or file -> version or hash.
      seed: of the build.
      stages: (name, its counts); a table each, a line for each `what`, a column for each source.
        "documents read", "documents removed: ..." and "documents kept" come first.
      funnel: (what, documents): those read, then those left after each stage.
      lengths_before, lengths_after: characters -> how many documents that were read or kept have
        so many; may be rounded down to tenths of a decade, as below (records.rounded).
      document_tokens: tokens -> how many documents.
      components: size of a group of near-duplicates -> how many groups.
      cluster_sizes: pool -> int [clusters], documents.
      cluster_tokens: tokens -> how many clusters.
      clusters_by_task: task -> clusters that it may use.
      skipped: files (or documents) that were left out; listed by reason.
      contamination: benchmark -> names of the documents that fell to it.
      topics: a few clusters with their `top_terms`.
      map_ids: n ids of clusters, at most MAP_POINTS; those of `topics` are named on the map.
      map_labels: n names of what their color says: main source, or pool.
      map_vectors: float [n, D].
      examples: a few clusters; their first documents' beginnings are shown.
    """

    title: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    seed: int
    stages: Sequence[tuple[str, Sequence[Count]]]
    funnel: Sequence[tuple[str, int]]
    lengths_before: Mapping[int, int]
    lengths_after: Mapping[int, int]
    document_tokens: Mapping[int, int]
    components: Mapping[int, int]
    cluster_sizes: Mapping[str, np.ndarray]
    cluster_tokens: Mapping[int, int]
    clusters_by_task: Mapping[str, int]
    skipped: Sequence[Removed]
    contamination: Mapping[str, Sequence[str]]
    topics: Sequence[Topic]
    map_ids: Sequence[str]
    map_labels: Sequence[str]
    map_vectors: np.ndarray
    examples: Sequence[Cluster]


class Names(NamedTuple):
    """A line of a list that may be long.

    Attributes:
      what: a reason or a benchmark.
      number: of all names.
      shown: the first names, sorted.
    """

    what: str
    number: int
    shown: list[str]


def write_report(path_or_folder: str, content: Content) -> None:
    """Writes the page, in UTF-8.

    Args:
      path_or_folder: a path that ends in .html, or a folder, which gets report.html; local, or of
        any file system that Beam knows (gs://, s3://, ...).
    """
    path = path_or_folder
    if not path.endswith(".html"):
        path = FileSystems.join(path, REPORT)
    page = render(content).encode("utf-8", "replace")
    with FileSystems.create(path, mime_type="text/html") as file:
        file.write(page)


def render(content: Content) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = "{:,}".format
    template = environment.from_string(Path(__file__).with_name(REPORT).read_text("utf-8"))
    return template.render(
        content=content,
        plots=_plots(content),
        facts=_facts(content),
        tables=[(name, *_stage_table(counts)) for name, counts in content.stages],
        config=json.dumps(content.config, indent=2, ensure_ascii=False),
        skipped=_by_reason(content.skipped),
        contamination=[
            _names(what, names) for what, names in sorted(content.contamination.items())
        ],
        examples=[
            (c, [(d, _beginning(d["text"])) for d in c["documents"][:EXAMPLE_DOCUMENTS]])
            for c in content.examples
        ],
    )


def top_terms(
    clusters: Sequence[Sequence[str]], background: Sequence[str], count: int
) -> list[list[str]]:
    """The words that tell a cluster from other documents, by TF-IDF.

    A word is two letters or more, in lower case. English stop words, numbers and runs of over 30
    letters are none. Chinese characters and kana, which have no spaces, are taken in pairs.

    Args:
      clusters: the texts of each cluster.
      background: a sample of all texts; how rare a word is in these and in the clusters.
      count: terms a cluster, at most.

    Returns:
      Terms of each cluster, best first; equals in the order of the alphabet. A cluster without
      words has none.
    """
    grouped = [[word for text in texts for word in _words(text)] for texts in clusters]
    if not any(grouped):
        return [[] for _ in clusters]
    vectorizer = TfidfVectorizer(analyzer=cast(Any, list), sublinear_tf=True)
    vectorizer.fit([*map(_words, background), *grouped])
    vocabulary = vectorizer.get_feature_names_out()
    found = []
    for words in grouped:
        scores: Any = vectorizer.transform([words])
        scores = scores.tocoo()
        best = np.lexsort((scores.col, -scores.data))[:count]
        found.append([str(vocabulary[column]) for column in scores.col[best]])
    return found


def place_points(vectors: np.ndarray) -> np.ndarray:
    """A place in the plane for each vector, close where vectors are similar.

    From 50 vectors on by t-SNE, which starts from the PCA; fewer by PCA alone. One thread, so that
    sums have one order.

    Args:
      vectors: float [n, D], n and D from 0.

    Returns:
      float [n, 2].
    """
    if not np.size(vectors):
        return np.zeros((len(vectors), 2))
    with threadpool_limits(1):
        centred = np.asarray(vectors, np.float64) - np.mean(vectors, axis=0, keepdims=True)
        left, sizes, right = np.linalg.svd(centred, full_matrices=False)
        # An axis and its opposite are equally good; take the one whose largest part is positive.
        largest = np.abs(right).argmax(axis=1, keepdims=True)
        reduced = left * sizes * np.sign(np.take_along_axis(right, largest, axis=1)).T
        # scikit-learn's t-SNE crashes where all vectors are equal but for rounding.
        equal = sizes[0] <= 1e-6 * np.linalg.norm(vectors)
        if len(reduced) < _TSNE_FROM or len(sizes) < 2 or equal:
            return np.pad(reduced, ((0, 0), (0, 2)))[:, :2]
        perplexity = min(30, len(reduced) // 5)  # neighbors that count
        tsne = TSNE(init="pca", perplexity=perplexity, random_state=0)
        return tsne.fit_transform(reduced[:, :_PCA_SIZE])


def _words(text: str) -> list[str]:
    words = []
    for index, piece in enumerate(_SPACELESS.split(text.lower())):
        if index % 2:
            words += [piece[i : i + 2] for i in range(len(piece) - 1)]
        else:
            words += [w for w in _WORD.findall(piece) if len(w) <= _LONGEST_WORD]
    return [word for word in words if word not in _STOP]


def _facts(content: Content) -> list[tuple[str, int]]:
    """What stands first on the page."""
    return [
        ("documents read", sum(content.lengths_before.values())),
        ("documents kept", sum(content.lengths_after.values())),
        ("near-duplicate groups", sum(content.components.values())),
        ("clusters", sum(content.cluster_tokens.values())),
        ("tokens in clusters", sum(size * n for size, n in content.cluster_tokens.items())),
        ("skipped", len(content.skipped)),
    ]


def _stage_table(counts: Iterable[Count]) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """Sources, and for each `what` its number in each of them and in all; the source "" is part of
    all alone."""
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


def _by_reason(skipped: Iterable[Removed]) -> list[Names]:
    names = defaultdict(list)
    for removed in skipped:
        names[removed["reason"]].append(_name(removed))
    return [_names(reason, found) for reason, found in sorted(names.items())]


def _name(removed: Removed) -> str:
    part = f", part {removed['part']}" if removed["part"] else ""
    because = f" ({_cut(removed['because'], EXAMPLE_CHARACTERS)})" if removed["because"] else ""
    return f"{removed['source']}:{removed['place']}{part}{because}"


def _names(what: str, names: Sequence[str]) -> Names:
    return Names(what, len(names), sorted(names)[:NAMES_SHOWN])


def _beginning(text: str) -> str:
    """On one line; a few times the length is looked at, as white space may be long."""
    return _cut(" ".join(text[: 5 * EXAMPLE_CHARACTERS].split()), EXAMPLE_CHARACTERS)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _plots(content: Content) -> dict[str, Markup]:
    """Name -> SVG, of what there is to draw."""
    before, after = content.lengths_before, content.lengths_after
    plots: dict[str, Callable[[Axes], None]] = {}
    if content.funnel:
        plots["funnel"] = lambda axes: _draw_funnel(axes, content.funnel)
    if before or after:
        lengths = {"read": before, "kept": after}
        plots["characters"] = lambda axes: _draw_log(axes, lengths, "characters", "documents")
    if content.document_tokens:
        tokens = {"tokens": content.document_tokens}
        plots["tokens"] = lambda axes: _draw_log(axes, tokens, "tokens", "documents")
    if content.components:
        plots["components"] = lambda axes: _draw_components(axes, content.components)
    if any(map(len, content.cluster_sizes.values())):
        plots["sizes"] = lambda axes: _draw_sizes(axes, content.cluster_sizes)
    if content.cluster_tokens:
        sums = {"tokens": content.cluster_tokens}
        plots["sums"] = lambda axes: _draw_log(axes, sums, "tokens", "clusters")
    if len(content.map_ids):
        plots["map"] = lambda axes: _draw_map(axes, content)
    return {
        name: _svg(draw, _LARGE if name == "map" else _SMALL, name) for name, draw in plots.items()
    }


def _svg(draw: Callable[[Axes], None], size: tuple[float, float], name: str) -> Markup:
    """A picture as an <svg> element without a size of its own; the same wherever it is drawn."""
    buffer = io.StringIO()
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # Text is measured in DejaVu Sans, which lacks some letters that the browser's fonts have.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue().replace(_INK, "currentColor")
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # the same in every picture, and of no use
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
    """Histograms over whole decades, ten bins each; zeros count as 1."""
    found = {name: numbers for name, numbers in series.items() if numbers}
    values = {name: np.maximum(list(numbers), 1) for name, numbers in found.items()}
    first = int(np.floor(np.log10(min(numbers.min() for numbers in values.values()))))
    last = int(np.floor(np.log10(max(numbers.max() for numbers in values.values())))) + 1
    bins = np.logspace(first, last, 10 * (last - first) + 1).tolist()
    for index, (name, numbers) in enumerate(values.items()):
        weights = list(found[name].values())
        axes.hist(numbers, bins, weights=weights, color=f"C{index}", alpha=0.6, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(x)
    _count_axis(axes, y)
    _legend(axes, len(values))


def _draw_components(axes: Axes, components: Mapping[int, int]) -> None:
    """Bars for sizes of 1, 2, 3 to 4, 5 to 8 and so on; heights on a log axis."""
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


def _draw_sizes(axes: Axes, cluster_sizes: Mapping[str, np.ndarray]) -> None:
    """A bar a size, or 30 bars over wide ranges; pools upon each other."""
    pools = sorted(pool for pool, sizes in cluster_sizes.items() if len(sizes))
    sizes = [np.asarray(cluster_sizes[pool]) for pool in pools]
    first, last = min(s.min() for s in sizes), max(s.max() for s in sizes)
    step = max(1, -(-(last - first + 1) // 30))
    bins = np.arange(first, last + step + 1, step) - 0.5
    names = [_cut(pool, _LABEL_CHARACTERS) for pool in pools]
    axes.hist(sizes, bins, stacked=True, label=names, alpha=0.8, rwidth=0.9)
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
    """Below the plot, where it hides nothing; one name needs none."""
    if names > 1 and axes.figure is not None:
        axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def _draw_map(axes: Axes, content: Content) -> None:
    """A point a cluster; the commonest labels first, with colors, the others gray."""
    rows = sorted(range(len(content.map_ids)), key=lambda row: content.map_ids[row])
    ids = [content.map_ids[row] for row in rows]
    labels = np.asarray([content.map_labels[row] for row in rows])
    points = place_points(np.asarray(content.map_vectors)[rows])
    counted = Counter(labels.tolist())
    common = sorted(counted, key=lambda label: (-counted[label], label))[: len(_COLOURS)]
    groups = [(label, labels == label) for label in common]
    if rest := len(counted) - len(common):
        groups.append((f"{rest} others", ~np.isin(labels, common)))
    for (name, mask), color in zip(groups, (*_COLOURS, _GREY), strict=False):
        legend = f"{_cut(name, _LABEL_CHARACTERS)} ({mask.sum():,})"
        axes.plot(*points[mask].T, ".", color=color, alpha=0.8, markersize=7, mew=0, label=legend)
    _name_points(axes, ids, points, content.topics)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.06)
    axes.spines[:].set_visible(False)
    if axes.figure is not None:
        axes.figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)


def _name_points(
    axes: Axes, ids: Sequence[str], points: np.ndarray, topics: Sequence[Topic]
) -> None:
    """Rings around the points of topics, with their first terms; from the top, each term is moved
    down until it is a line below those beside it."""
    terms = {topic.cluster: topic.terms[0] for topic in topics if topic.terms}
    width, line = np.ptp(points, axis=0) * (0.16, 0.032)
    named = [(points[row], terms[id]) for row, id in enumerate(ids) if id in terms]
    placed: list[tuple[float, float]] = []
    for (x, y), term in sorted(named, key=lambda pair: (-pair[0][1], pair[0][0])):
        height = y
        for beside, taken in sorted(placed, key=lambda place: -place[1]):
            if abs(x - beside) < width and abs(height - taken) < line:
                height = taken - line
        placed.append((x, height))
        axes.plot(x, y, "o", markersize=8, markerfacecolor="none", color=_INK, mew=0.8)
        axes.annotate(
            _cut(term, _LABEL_CHARACTERS),
            (x, y),
            (x + width / 12, height + line / 3),
            fontsize=10,
            arrowprops={"arrowstyle": "-", "color": _INK, "linewidth": 0.5},
        )
