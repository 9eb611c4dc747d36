"""Benchmarks of the data pipeline: filter and dedup, LSH bands, and a build from real documents."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.base import BenchmarkCommand, best_seconds
from benchmarks.sides.contract import peak_bytes
from data_pipeline import build, decontaminate, signatures
from data_pipeline.dedup import DedupConfig, make_dedup
from data_pipeline.filter import FilterConfig, filter_documents
from data_pipeline.records import SCHEMAS, digest, is_sized, make_document, order
from data_pipeline.stages import Stages
from spell_jax.configs.data import base, mixed
from spell_jax.runtime.run_logger import resident_bytes

VOCABULARY = 50_000
COPY_EVERY, COPY_OF = 20, 10  # document 20 n + 19 is a copy of document 20 n + 9
COPIES = (0.85, 0.95)  # limits of a copy's Jaccard similarity to its original
CHUNK = 10_000  # documents written at once, to bound memory
SHORTEST_PIECE = 300  # characters of the shortest piece of a file that counts as a text
SHORTEST, LONGEST = 300, 20_000  # characters of a document that is copied or edited
PLANTED = {"copies", "contaminated"}  # sources of Corpus
Key = tuple[str, str, int]  # (source, place, part)
Records = Sequence[Mapping[str, Any]]


def edited_copy(text: str, low: float, high: float, seed: int, shingle_words: int = 5) -> str:
    """Make a copy of a text with words replaced, deleted and inserted at random places.

    The copy's exact Jaccard similarity to the text is from `low` to `high`, by shingles of
    `shingle_words` tokens. A text without blanks is edited by characters.

    Raises:
      ValueError: if no such copy was found; in a short text every edit may change too much.
    """
    rng = random.Random(seed)
    blank = " " if " " in text else ""
    words = text.split(" ") if blank else list(text)
    aim = rng.uniform(low, high)
    text_shingles, similarity = signatures.shingles(text, shingle_words), 1.0
    for _ in range(1000):
        start = rng.randrange(len(words))
        dropped, put = rng.choice([(1, 1), (1, 0), (0, 1)])
        edited = [*words[:start], *rng.choices(words, k=put), *words[start + dropped :]]
        if not edited:
            continue
        now = signatures.jaccard(
            text_shingles, signatures.shingles(blank.join(edited), shingle_words)
        )
        if now >= low:
            words, similarity = edited, now
        if similarity <= aim:
            break
    if similarity > high:
        raise ValueError(f"similarity from {low} to {high}: no edit of {text[:80]!r} has it")
    return blank.join(words)


# ------------------------------------------------------------------------------------------ Dedup


@dataclasses.dataclass
class Dedup(BenchmarkCommand):
    """Filters and deduplicates synthetic documents on Beam's local runner.

    They have 80 to 120 words sampled by Zipf's law; one in twenty is an edited copy of another. The
    filter ignores the language, because the words belong to none. The seconds cover both stages,
    including reading and writing Parquet. "peak_bytes" is the peak resident memory of the process,
    and "added_bytes" is that peak minus the memory before the stages. "planted_recall" is the share
    of copies for which exactly one of copy and original was removed because of the other.
    "false_removals" counts all other documents removed as near duplicates.
    """

    documents: Annotated[int, "synthetic documents of about 100 words"] = 10_000

    def run(self) -> dict[str, Any]:
        number = self.documents
        with tempfile.TemporaryDirectory() as folder:
            stages = Stages(folder)
            write_documents(Path(folder, "read"), number)
            before = resident_bytes()
            configs = {"bench": FilterConfig(languages=())}
            filters = functools.partial(filter_documents, configs=configs)
            filtered = stages.run("filter", {}, filters, documents="read/documents")
            dedup = functools.partial(make_dedup, config=DedupConfig())
            dedup_stage = stages.run("dedup", {}, dedup, [filtered], documents="filter/documents")
            peak = peak_bytes()
            removed = stages.read("dedup/removed")
        near = {(r["place"], r["because"]) for r in removed if r["reason"] == "near duplicate"}
        copies = range(COPY_EVERY - 1, number, COPY_EVERY)
        pairs = [
            ((str(i), f"bench:{i - COPY_OF}"), (str(i - COPY_OF), f"bench:{i}")) for i in copies
        ]
        removed_copies = sum(
            (removal in near) != (reverse_removal in near) for removal, reverse_removal in pairs
        )
        seconds = filtered.seconds + dedup_stage.seconds
        return {
            "seconds": seconds,
            "documents_per_s": number / seconds,
            "filter_s": filtered.seconds,
            "dedup_s": dedup_stage.seconds,
            "peak_bytes": peak,
            "added_bytes": peak - before,
            "added_bytes_per_document": (peak - before) / number,
            "kept": dedup_stage.count("documents kept"),
            "planted": len(pairs),
            "planted_recall": removed_copies / max(1, len(pairs)),
            "false_removals": len(near) - removed_copies,
        }


def write_documents(folder: Path, number: int) -> None:
    """Write a table "documents" of `number` texts in chunks, to bound memory."""
    folder.mkdir(parents=True)
    weights = 1 / np.arange(1, VOCABULARY + 1)
    zipf = np.cumsum(weights / weights.sum())

    def words(i: int) -> str:
        rng = np.random.default_rng(i)
        ranks = np.searchsorted(zipf, rng.random(rng.integers(80, 121)))
        return " ".join(f"w{rank}" for rank in ranks)

    def text(i: int) -> str:
        if i % COPY_EVERY == COPY_EVERY - 1:
            return edited_copy(words(i - COPY_OF), *COPIES, seed=i)
        return words(i)

    schema = SCHEMAS["documents"]
    with pq.ParquetWriter(folder / "documents-0.parquet", schema) as writer:
        for first in range(0, number, CHUNK):
            chunk = range(first, min(first + CHUNK, number))
            documents = [make_document(text(i), "bench", str(i)) for i in chunk]
            writer.write_table(pa.Table.from_pylist(documents, schema=schema))


# -------------------------------------------------------------------------------------------- LSH


@dataclasses.dataclass
class Lsh(BenchmarkCommand):
    """Compares the pairs found by LSH bands with all near pairs of a folder's texts.

    If there are too few files, pieces between blank lines are used instead. A quarter of the texts
    are edited copies of others, with similarities from 0.7 to 0.95. "recall" is the share of pairs
    at or over the threshold that share a band, and "expected_recall" is the probability of that by
    the theory of bands. "precision" is measured on the pairs that pass the exact comparison,
    "candidate_precision" on all pairs that share a band.

    Raises:
      ValueError: if the source has too few texts.
    """

    source: Annotated[str, "a folder with .txt or .md files"] = ""
    documents: Annotated[int, "texts, edited copies included"] = 2000

    def run(self) -> dict[str, Any]:
        config, copies = DedupConfig(), self.documents // 4
        texts = _source_texts(Path(self.source), self.documents - copies)
        texts += [edited_copy(text, 0.7, 0.95, i) for i, text in enumerate(texts[:copies])]
        sets = [signatures.shingles(text, config.shingle_words) for text in texts]
        # Exact similarities of all pairs (i < j) that share a shingle; other pairs have 0.
        shared = Counter(_common_pairs(shingles.tolist() for shingles in sets))
        exact = {(i, j): n / (len(sets[i]) + len(sets[j]) - n) for (i, j), n in shared.items()}
        near = {
            pair: similarity for pair, similarity in exact.items() if similarity >= config.threshold
        }
        text_signatures = (
            signatures.signature(shingles, config.permutations, config.seed) for shingles in sets
        )
        bands = (
            signatures.band_keys(signature, config.bands).tolist() for signature in text_signatures
        )
        candidates = set(_common_pairs(bands))
        found_pairs = {pair for pair in candidates if exact.get(pair, 0.0) >= config.threshold}
        rows = config.permutations // config.bands
        expected = [1 - (1 - similarity**rows) ** config.bands for similarity in near.values()]
        return {
            "pairs": len(near),
            "candidates": len(candidates),
            "recall": len(found_pairs) / max(1, len(near)),
            "expected_recall": sum(expected) / max(1, len(near)),
            "precision": len(found_pairs & near.keys()) / max(1, len(found_pairs)),
            "candidate_precision": len(found_pairs) / max(1, len(candidates)),
        }


def _source_texts(folder: Path, number: int) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in paths]
    if len(texts) < number:
        pieces = (piece.strip() for text in texts for piece in re.split(r"\n\s*\n", text))
        texts = [piece for piece in pieces if len(piece) >= SHORTEST_PIECE]
    if len(texts) < number:
        raise ValueError(f"source = {str(folder)!r}: has {len(texts)} texts, must have {number}")
    return [texts[i * len(texts) // number] for i in range(number)]


def _common_pairs(keys: Iterable[Iterable[int]]) -> Iterable[tuple[int, int]]:
    """Yield the pairs (i < j) of texts that share a key, once for each common key."""
    holders = defaultdict(list)
    for i, text_keys in enumerate(keys):
        for key in text_keys:
            holders[key].append(i)
    return itertools.chain.from_iterable(itertools.combinations(h, 2) for h in holders.values())


# ----------------------------------------------------------------------------------------- Corpus


@dataclasses.dataclass
class Corpus(BenchmarkCommand):
    """Builds the sources of configs/data/mixed.py with planted copies and contamination.

    1. Edited copies of a share of the documents are planted as another source, at Jaccard
       similarities from 0.85 to 0.95. So are edited copies of the benchmark's documents, and
       documents with one of the benchmark's questions inserted.
    2. A copy counts as found if it or its original was removed, a contaminated text if it was
       removed. The seconds of the build exclude planting.
    3. All other removed near duplicates are listed with their similarity to the text that caused
       the removal, and all other removed contaminated documents with the benchmark's item.
    4. Clusters are compared with random clusters of the same sizes and pools: cosine similarity of
       the documents, years between speeches, and how often two filings are from the same company.
    """

    source: Annotated[str, "a folder as configs/data/mixed.py describes it"] = ""
    planted: Annotated[float, "edited copies, as a share of the documents"] = 0.05
    contaminated: Annotated[int, "planted texts of the benchmark, of each kind"] = 50

    def run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            config = mixed.get_config(self.source)
            plan, stages = build.make_plan(config), Stages(f"{folder}/plain")
            build.read(plan, stages, build.list_sources(plan, stages))
            documents = sorted(stages.read("read/documents"), key=lambda d: order(d))  # pyright: ignore
            items = decontaminate.read_benchmarks(plan.benchmarks)
            copies = _plant_copies(documents, self.planted, Path(folder, "copies"))
            _plant_items(items, documents, self.contaminated, Path(folder, "contaminated"))
            for name in sorted(PLANTED, reverse=True):
                planted = base.source(f"{folder}/{name}", mixed.GENERAL, max_characters=mixed.LONG)
                config.sources[name] = planted
            manifest = {}
            seconds = best_seconds(
                lambda: manifest.update(build.build(config, f"{folder}/out")), repeats=1
            )
            line = {"seconds": seconds, "peak_bytes": peak_bytes()}
            stages = Stages(f"{folder}/out/stages")
            line |= _find_planted(stages, copies) | _compare_clusters(stages, config.seed)
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for name, stage in manifest["counts"].items():
            for count in stage:
                if not is_sized(count["what"]):
                    counts[name][count["what"]] += count["number"]
        return line | {"clusters": manifest["clusters"], "counts": counts}


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
    ordered_items = sorted(items, key=lambda item: digest("item", item.id))
    texts = [
        i.text for i in ordered_items if i.kind == "document" and SHORTEST <= len(i.text) <= LONGEST
    ]
    for n, text in enumerate(texts[:number]):
        copy = edited_copy(text, *COPIES, seed=n)
        (folder / f"document-{n:05d}.txt").write_text(copy, encoding="utf-8")
    questions = [i.text for i in ordered_items if i.kind == "question"]
    least = decontaminate.SHORTEST_QUESTION
    questions = [text for text in questions if len(signatures.tokens(text)) >= least]
    hosts = [d["text"] for d in documents if SHORTEST <= len(d["text"]) <= LONGEST]
    for n, question in enumerate(questions[:number]):
        words = hosts[n * len(hosts) // number].split(" ")
        words[len(words) // 2 : len(words) // 2] = [question]
        (folder / f"question-{n:05d}.txt").write_text(" ".join(words), encoding="utf-8")


def _find_planted(stages: Stages, copies: Mapping[str, Key]) -> dict[str, Any]:
    """Return the shares of planted texts that were found, and list all other removed texts."""
    tables = {}
    for table in ("dedup", "decontaminate", "read"):
        documents = stages.read(f"{table}/documents", ["source", "place", "part"])
        tables[table] = {_key(d) for d in documents}
    caught = [not {("copies", name, 0), of} <= tables["dedup"] for name, of in copies.items()]
    line: dict[str, Any] = {"planted_copies": len(copies), "planted_recall": _mean(caught)}
    for kind in ("document", "question"):
        planted = [k for k in tables["read"] if k[0] == "contaminated" and k[1].startswith(kind)]
        removed = [key not in tables["decontaminate"] for key in planted]
        line[f"contaminated_{kind}s"] = len(planted)
        line[f"contaminated_{kind}s_recall"] = _mean(removed)
    by_place = defaultdict(list)
    for document in stages.read("read/documents"):
        by_place[f"{document['source']}:{document['place']}"].append(document)
    line["other_near_duplicates"] = [
        f"{_name(r)} of {r['because']}, {_nearest(r, by_place):.3f}"
        for r in sorted(stages.read("dedup/removed"), key=_key)
        if r["reason"] == "near duplicate"
        and not {r["source"], r["because"].partition(":")[0]} & PLANTED
    ]
    line["other_contaminated"] = [
        f"{_name(r)} by {r['because']}"
        for r in sorted(stages.read("decontaminate/removed"), key=_key)
        if r["source"] not in PLANTED
    ]
    return line


def _nearest(removed: Mapping[str, Any], by_place: Mapping[str, Records]) -> float:
    """Return the Jaccard similarity of a removed text to the text that caused its removal.

    The recorded cause does not name a part, so this is the maximum over all parts of that place.
    """
    mine = by_place[f"{removed['source']}:{removed['place']}"]
    (text,) = [d["text"] for d in mine if d["part"] == removed["part"]]
    other_texts = [d["text"] for d in by_place[removed["because"]] if d["text"] != text]
    text_shingles, *sets = (
        signatures.shingles(t, DedupConfig().shingle_words) for t in (text, *other_texts)
    )
    return max(
        (signatures.jaccard(text_shingles, other_shingles) for other_shingles in sets), default=0.0
    )


def _name(removed: Mapping[str, Any]) -> str:
    return f"{removed['source']}:{removed['place']} part {removed['part']}"


def _key(record: Mapping[str, Any]) -> Key:
    return record["source"], record["place"], record["part"]


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean of the values that are not None; 0 if there are none."""
    present_values = [value for value in values if value is not None]
    return float(np.mean(present_values)) if present_values else 0.0


def _compare_clusters(stages: Stages, seed: int) -> dict[str, Any]:
    """Measure similarity of documents within a cluster, for made clusters and for random ones."""
    vectors = {
        d["id"]: np.frombuffer(d["vector"], np.float32)
        for d in stages.read("embed/documents", ["id", "vector"])
    }
    pools = defaultdict(list)
    for cluster in sorted(stages.read("cluster/clusters"), key=lambda c: c["id"]):
        pools[cluster["pool"]].append(cluster["documents"])
    rng, made_clusters, mixed_up = np.random.default_rng(seed), [], []
    for _, clusters in sorted(pools.items()):
        pool = list(itertools.chain(*clusters))
        shuffled = iter([pool[i] for i in rng.permutation(len(pool))])
        made_clusters += clusters
        mixed_up += [list(itertools.islice(shuffled, len(cluster))) for cluster in clusters]

    def cosine(a: Any, b: Any) -> float:
        return float(vectors[a["id"]] @ vectors[b["id"]])

    def years(a: Any, b: Any) -> float | None:
        if not a["source"] == b["source"] == "speeches" or a["place"] == b["place"]:
            return None
        first, second = (int(re.findall(r"\d{4}", d["place"])[0]) for d in (a, b))
        return abs(first - second)

    def same_company(a: Any, b: Any) -> float | None:
        if not a["source"] == b["source"] == "filings":
            return None
        first, second = (Path(d["place"]).name.partition("-")[0] for d in (a, b))
        return first == second

    measures = {"cosine": cosine, "years_between_speeches": years}
    measures["filings_of_one_company"] = same_company
    return {
        f"{name}{suffix}": _mean(
            measure(a, b) for members in clusters for a, b in itertools.combinations(members, 2)
        )
        for name, measure in measures.items()
        for suffix, clusters in (("", made_clusters), ("_at_random", mixed_up))
    }
