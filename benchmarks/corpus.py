"""Benchmark of a data build from real documents with planted copies and contamination.

1. The sources of configs/data/mixed.py are read once. Edited copies of a share of their documents
   are planted as another source, at Jaccard similarities from 0.85 to 0.95.
2. Contamination is planted too: edited copies of the benchmark's documents, and documents with one
   of the benchmark's questions inserted.
3. Everything is built. A copy counts as found if it or its original was removed. A contaminated
   text counts as found if it was removed.
4. All other removed near duplicates are listed with their similarity to the text that caused the
   removal, and all other removed contaminated documents with the benchmark item that caused it.
5. Clusters are compared with random clusters of the same sizes and pools: cosine similarity of the
   documents, years between speeches, and how often two filings are from the same company.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import COPIES, edited_copy, memory
from configs.data import base, mixed
from data_pipeline import build, decontaminate, signatures, sources
from data_pipeline.dedup import DedupConfig
from data_pipeline.records import digest, is_sized, order
from data_pipeline.stages import Stages

SHORTEST, LONGEST = 300, 20_000  # characters of a document that is copied or edited
Key = tuple[str, str, int]  # (source, place, part)
Records = Sequence[Mapping[str, Any]]


def bench_corpus(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark and return its measurements; the seconds exclude planting.

    Args:
      options: parsed options of "corpus".

    Returns:
      The measurements, JSON-able.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = mixed.get_config(options.source)
        plan, stages = build.make_plan(config), Stages(f"{folder}/plain")
        listed = [f for n, source in plan.sources.items() for f in sources.list_files(n, source)]
        build.read(plan, stages, listed)
        documents = sorted(stages.read("read/documents"), key=lambda d: order(d))  # pyright: ignore
        items = decontaminate.read_benchmarks(plan.benchmarks)
        copies = _plant_copies(documents, options.planted, Path(folder, "copies"))
        _plant_items(items, documents, options.contaminated, Path(folder, "contaminated"))
        for name in ("copies", "contaminated"):
            planted = base.source(f"{folder}/{name}", mixed.GENERAL, max_characters=mixed.LONG)
            config.sources[name] = planted
        clock = time.monotonic()
        manifest = build.build(config, f"{folder}/out")
        seconds, peak = time.monotonic() - clock, memory("VmHWM")
        stages = Stages(f"{folder}/out/stages")
        found = _found(stages, documents, copies)
        alike = _alike(stages, config.seed)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, stage in manifest["counts"].items():
        for count in stage:
            if not is_sized(count["what"]):
                counts[name][count["what"]] += count["number"]
    clusters = manifest["clusters"]
    head = {"bench": "corpus", "seconds": seconds, "peak_bytes": peak, "clusters": clusters}
    return head | found | alike | {"counts": counts}


# --------------------------------------------------------------------------------------- planting


def _plant_copies(documents: Records, share: float, folder: Path) -> dict[str, Key]:
    """Write edited copies of a share of the documents; return file name -> original document."""
    folder.mkdir()
    usable = [d for d in documents if SHORTEST <= len(d["text"]) <= LONGEST]
    usable.sort(key=lambda d: digest("copy", d["id"]))
    copies = {}
    for number, document in enumerate(usable[: round(share * len(documents))]):
        name = f"{number:05d}.txt"
        text = edited_copy(document["text"], *COPIES, seed=number)
        (folder / name).write_text(text, encoding="utf-8")
        copies[name] = _key(document)
    return copies


def _plant_items(items: Iterable[Any], documents: Records, number: int, folder: Path) -> None:
    """Write up to `number` files document-*.txt and as many question-*.txt."""
    folder.mkdir()
    chosen = sorted(items, key=lambda item: digest("item", item.id))
    texts = [i.text for i in chosen if i.kind == "document" and SHORTEST <= len(i.text) <= LONGEST]
    for n, text in enumerate(texts[:number]):
        copy = edited_copy(text, *COPIES, seed=n)
        (folder / f"document-{n:05d}.txt").write_text(copy, encoding="utf-8")
    asked = [i.text for i in chosen if i.kind == "question"]
    least = decontaminate.SHORTEST_QUESTION
    asked = [text for text in asked if len(signatures.tokens(text)) >= least]
    hosts = [d["text"] for d in documents if SHORTEST <= len(d["text"]) <= LONGEST]
    for n, question in enumerate(asked[:number]):
        words = hosts[n * len(hosts) // number].split(" ")
        words[len(words) // 2 : len(words) // 2] = [question]
        (folder / f"question-{n:05d}.txt").write_text(" ".join(words), encoding="utf-8")


# ----------------------------------------------------------------------------------------- finding


def _found(stages: Stages, documents: Records, copies: Mapping[str, Key]) -> dict[str, Any]:
    columns = ["source", "place", "part"]
    left = {_key(d) for d in stages.read("dedup/documents", columns)}
    clean = {_key(d) for d in stages.read("decontaminate/documents", columns)}
    read = {_key(d) for d in stages.read("read/documents", columns)}
    caught = sum(not {("copies", name, 0), of} <= left for name, of in copies.items())
    planted = [key for key in read if key[0] == "contaminated"]
    line: dict[str, Any] = {
        "planted_copies": len(copies),
        "planted_recall": caught / max(1, len(copies)),
    }
    for kind in ("document", "question"):
        some = [key for key in planted if key[1].startswith(kind)]
        line[f"contaminated_{kind}s"] = len(some)
        line[f"contaminated_{kind}s_recall"] = sum(k not in clean for k in some) / max(1, len(some))
    by_place = defaultdict(list)
    for document in stages.read("read/documents"):
        by_place[f"{document['source']}:{document['place']}"].append(document)
    line["other_near_duplicates"] = [
        f"{_name(r)} of {r['because']}, {_nearest(r, by_place):.3f}"
        for r in sorted(stages.read("dedup/removed"), key=_key)
        if r["reason"] == "near duplicate" and not _is_planted(r)
    ]
    line["other_contaminated"] = [
        f"{_name(r)} by {r['because']}"
        for r in sorted(stages.read("decontaminate/removed"), key=_key)
        if r["source"] not in ("copies", "contaminated")
    ]
    return line


def _is_planted(removed: Mapping[str, Any]) -> bool:
    kinds = ("copies", "contaminated")
    return removed["source"] in kinds or removed["because"].partition(":")[0] in kinds


def _nearest(removed: Mapping[str, Any], by_place: Mapping[str, Records]) -> float:
    """Jaccard similarity of a removed text to the one that caused its removal.

    The recorded cause does not name a part, so this is the maximum over all parts of that place.
    """
    words = DedupConfig().shingle_words
    mine = by_place[f"{removed['source']}:{removed['place']}"]
    (text,) = [d["text"] for d in mine if d["part"] == removed["part"]]
    own = signatures.shingles(text, words)
    others = [d for d in by_place[removed["because"]] if d["text"] != text]
    found = [signatures.jaccard(own, signatures.shingles(d["text"], words)) for d in others]
    return max(found, default=0.0)


def _name(removed: Mapping[str, Any]) -> str:
    return f"{removed['source']}:{removed['place']} part {removed['part']}"


def _key(record: Mapping[str, Any]) -> Key:
    return record["source"], record["place"], record["part"]


# ---------------------------------------------------------------------------------------- clusters


def _alike(stages: Stages, seed: int) -> dict[str, Any]:
    """Similarity of documents in the same cluster, for the made clusters and for random ones."""
    vectors = {
        d["id"]: np.frombuffer(d["vector"], np.float32)
        for d in stages.read("embed/documents", ["id", "vector"])
    }
    pools = defaultdict(list)
    for cluster in sorted(stages.read("cluster/clusters"), key=lambda c: c["id"]):
        pools[cluster["pool"]].append(cluster["documents"])
    made = [cluster for pool in sorted(pools) for cluster in pools[pool]]
    rng, mixed_up = np.random.default_rng(seed), []
    for pool in sorted(pools):
        whole = [d for cluster in pools[pool] for d in cluster]
        shuffled = iter([whole[i] for i in rng.permutation(len(whole))])
        mixed_up += [list(itertools.islice(shuffled, len(cluster))) for cluster in pools[pool]]

    def cosine(a: Any, b: Any) -> float:
        return float(vectors[a["id"]] @ vectors[b["id"]])

    def years(a: Any, b: Any) -> float | None:
        both = a["source"] == b["source"] == "speeches" and a["place"] != b["place"]
        return abs(_year(a) - _year(b)) if both else None

    def same_company(a: Any, b: Any) -> float | None:
        return _company(a) == _company(b) if a["source"] == b["source"] == "filings" else None

    line = {}
    for name, measure in {
        "cosine": cosine,
        "years_between_speeches": years,
        "filings_of_one_company": same_company,
    }.items():
        line[name] = _mean_of_pairs(made, measure)
        line[f"{name}_at_random"] = _mean_of_pairs(mixed_up, measure)
    return line


def _mean_of_pairs(clusters: Iterable[Records], measure: Callable[[Any, Any], Any]) -> float:
    """Mean over all pairs of documents in the same cluster for which the measure is not None."""
    values = [measure(a, b) for cluster in clusters for a, b in itertools.combinations(cluster, 2)]
    return float(np.mean([value for value in values if value is not None]))


def _year(speech: Mapping[str, Any]) -> int:
    found = re.search(r"\d{4}", speech["place"])
    assert found, speech["place"]
    return int(found[0])


def _company(filing: Mapping[str, Any]) -> str:
    return Path(filing["place"]).name.partition("-")[0]
