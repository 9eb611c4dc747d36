"""Benchmarks of the speed and accuracy of near-duplicate detection.

1. `bench_dedup` writes synthetic documents of 80 to 120 words sampled by Zipf's law. One in twenty
   is a randomly edited copy of another. It runs the filter and dedup stages as in a build, and
   measures time, memory, copies found and other documents removed.
2. `bench_lsh` takes documents from a folder and edited copies of them. It compares every pair that
   shares a shingle exactly. It measures the share of pairs at or over the threshold that share a
   band, and the share of pairs with a common band that reach the threshold.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline import signatures
from data_pipeline.dedup import DedupConfig, make_dedup
from data_pipeline.filter import FilterConfig, filter_documents
from data_pipeline.records import SCHEMAS, Document, make_document
from data_pipeline.stages import Stages

VOCABULARY = 50_000
COPY_EVERY, COPY_OF = 20, 10  # document 20 n + 19 is a copy of document 20 n + 9
COPIES = (0.85, 0.95)  # limits of a copy's Jaccard similarity to its original
CHUNK = 10_000  # documents written at once, to bound memory
SHORTEST_PIECE = 300  # characters of the shortest piece of a file that counts as a text


def bench_dedup(options: argparse.Namespace) -> dict[str, Any]:
    """Filter and deduplicate synthetic documents on Beam's local runner.

    The seconds cover both stages, including reading and writing Parquet. The filter ignores the
    language, because the words belong to none. "peak_bytes" is the peak resident memory of the
    process, and "added_bytes" is that peak minus the memory before the stages. "planted_recall" is
    the share of copies for which exactly one of copy and original was removed because of the other.
    "false_removals" counts all other documents removed as near duplicates.

    Args:
      options: parsed options of "dedup".

    Returns:
      The measurements, JSON-able.
    """
    with tempfile.TemporaryDirectory() as folder:
        stages = Stages(folder)
        _write_documents(f"{folder}/read", options.documents)
        before = memory("VmRSS")
        filters = functools.partial(filter_documents, configs={"bench": FilterConfig(languages=())})
        filtered = stages.run("filter", {}, filters, documents="read/documents")
        dedup = functools.partial(make_dedup, config=DedupConfig())
        done = stages.run("dedup", {}, dedup, [filtered], documents="filter/documents")
        peak = memory("VmHWM")
        removed = stages.read("dedup/removed")
    near = {(r["place"], r["because"]) for r in removed if r["reason"] == "near duplicate"}
    copies = range(COPY_EVERY - 1, options.documents, COPY_EVERY)
    planted = [((str(i), f"bench:{i - COPY_OF}"), (str(i - COPY_OF), f"bench:{i}")) for i in copies]
    found = sum((one in near) != (other in near) for one, other in planted)
    seconds = filtered.seconds + done.seconds
    return {
        "bench": "dedup",
        "documents": options.documents,
        "seconds": seconds,
        "documents_per_s": options.documents / seconds,
        "filter_s": filtered.seconds,
        "dedup_s": done.seconds,
        "peak_bytes": peak,
        "added_bytes": peak - before,
        "added_bytes_per_document": (peak - before) / options.documents,
        "kept": done.count("documents kept"),
        "planted": len(planted),
        "planted_recall": found / max(1, len(planted)),
        "false_removals": len(near) - found,
        "processors": os.cpu_count(),
    }


def bench_lsh(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the pairs found by LSH bands with all near pairs of a folder's texts.

    The source is a folder with .txt or .md files. If there are too few files, pieces between blank
    lines are used instead. A quarter of the texts are edited copies of others, with similarities
    from 0.7 to 0.95. "recall" is the share of pairs at or over the threshold that share a band, and
    "expected_recall" is the probability of that by the theory of bands. "precision" is measured on
    the pairs that pass the exact comparison, "candidate_precision" on all pairs that share a band.

    Args:
      options: parsed options of "lsh".

    Returns:
      The measurements, JSON-able.

    Raises:
      ValueError: if the source has too few texts.
    """
    config = DedupConfig()
    texts = _source_texts(Path(options.source), options.documents - options.documents // 4)
    copied = texts[: options.documents // 4]
    texts += [edited_copy(text, 0.7, 0.95, i) for i, text in enumerate(copied)]
    sets = [signatures.shingles(text, config.shingle_words) for text in texts]
    exact = _all_pairs(sets)
    near = {pair: found for pair, found in exact.items() if found >= config.threshold}
    candidates = _candidates(sets, config)
    found = {pair for pair in candidates if exact.get(pair, 0.0) >= config.threshold}
    rows = config.permutations // config.bands
    expected = [1 - (1 - similarity**rows) ** config.bands for similarity in near.values()]
    return {
        "bench": "lsh",
        "documents": len(texts),
        "pairs": len(near),
        "candidates": len(candidates),
        "recall": len(found) / max(1, len(near)),
        "expected_recall": sum(expected) / max(1, len(near)),
        "precision": len(found & near.keys()) / max(1, len(found)),
        "candidate_precision": len(found) / max(1, len(candidates)),
    }


def edited_copy(text: str, low: float, high: float, seed: int, shingle_words: int = 5) -> str:
    """Make a copy of a text with words replaced, deleted and inserted at random places.

    Args:
      text: original text. It is edited by words if it has a blank, else by characters.
      low: lower limit of the copy's exact Jaccard similarity to the text.
      high: upper limit of that similarity.
      seed: random seed; equal arguments give equal copies.
      shingle_words: number of tokens in a shingle.

    Returns:
      The edited text.

    Raises:
      ValueError: if no such copy was found; in a short text every edit may change too much.
    """
    rng = random.Random(seed)
    blank = " " if " " in text else ""
    words = text.split(" ") if blank else list(text)
    aim = rng.uniform(low, high)
    whole, similarity = signatures.shingles(text, shingle_words), 1.0
    for _ in range(1000):
        start = rng.randrange(len(words))
        dropped, put = rng.choice([(1, 1), (1, 0), (0, 1)])
        edited = [*words[:start], *rng.choices(words, k=put), *words[start + dropped :]]
        if not edited:
            continue
        now = signatures.jaccard(whole, signatures.shingles(blank.join(edited), shingle_words))
        if now >= low:
            words, similarity = edited, now
        if similarity <= aim:
            break
    if similarity > high:
        raise ValueError(f"similarity from {low} to {high}: no edit of {text[:80]!r} has it")
    return blank.join(words)


# --------------------------------------------------------------------------------------- synthetic


def _write_documents(folder: str, number: int) -> None:
    """Write a table "documents" of `number` texts in chunks, to bound memory."""
    os.makedirs(folder)
    schema = SCHEMAS["documents"]
    with pq.ParquetWriter(f"{folder}/documents-0.parquet", schema) as writer:
        for first in range(0, number, CHUNK):
            some = [_document(i) for i in range(first, min(first + CHUNK, number))]
            writer.write_table(pa.Table.from_pylist(some, schema=schema))


def _document(number: int) -> Document:
    if number % COPY_EVERY == COPY_EVERY - 1:
        text = edited_copy(_words(number - COPY_OF), *COPIES, seed=number)
    else:
        text = _words(number)
    return make_document(text, "bench", str(number))


def _words(number: int) -> str:
    rng = np.random.default_rng(number)
    ranks = np.searchsorted(_zipf(), rng.random(rng.integers(80, 121)))
    return " ".join(f"w{rank}" for rank in ranks)


@functools.cache
def _zipf() -> np.ndarray:
    """Cumulative probabilities of words by rank, float64 [VOCABULARY]."""
    weights = 1 / np.arange(1, VOCABULARY + 1)
    return np.cumsum(weights / weights.sum())


def memory(name: str) -> int:
    """Resident memory of this process in bytes: "VmRSS" is the current value, "VmHWM" the peak."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024


# -------------------------------------------------------------------------------------------- pairs


def _source_texts(folder: Path, number: int) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in paths]
    if len(texts) < number:
        pieces = (piece.strip() for text in texts for piece in re.split(r"\n\s*\n", text))
        texts = [piece for piece in pieces if len(piece) >= SHORTEST_PIECE]
    if len(texts) < number:
        raise ValueError(f"source = {str(folder)!r}: has {len(texts)} texts, must have {number}")
    return [texts[i * len(texts) // number] for i in range(number)]


def _all_pairs(sets: Sequence[np.ndarray]) -> dict[tuple[int, int], float]:
    """Exact Jaccard similarities of all pairs (i < j) that share a shingle."""
    holders = defaultdict(list)
    for i, found in enumerate(sets):
        for shingle in found.tolist():
            holders[shingle].append(i)
    shared = Counter(pair for some in holders.values() for pair in itertools.combinations(some, 2))
    return {(i, j): both / (len(sets[i]) + len(sets[j]) - both) for (i, j), both in shared.items()}


def _candidates(sets: Sequence[np.ndarray], config: DedupConfig) -> set[tuple[int, int]]:
    """Pairs (i < j) that share a band key."""
    groups = defaultdict(list)
    for i, found in enumerate(sets):
        made = signatures.signature(found, config.permutations, config.seed)
        for key in signatures.band_keys(made, config.bands).tolist():
            groups[key].append(i)
    return set(_pairs(groups.values()))


def _pairs(groups: Any) -> Iterator[tuple[int, int]]:
    for group in groups:
        yield from itertools.combinations(group, 2)
