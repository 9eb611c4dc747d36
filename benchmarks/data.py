"""Benchmarks of the data pipeline: filter and dedup, and a build on two engines."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.base import BenchmarkCommand
from benchmarks.sides.contract import peak_bytes
from data_pipeline import build, signatures
from data_pipeline.dedup import DedupConfig, make_dedup
from data_pipeline.filter import FilterConfig, filter_documents
from data_pipeline.records import SCHEMAS, make_document
from data_pipeline.stages import Stages
from spell_jax.configs.data import folder as folder_config
from spell_jax.runtime.log.run_logger import resident_bytes

VOCABULARY = 50_000
COPY_EVERY, COPY_OF = 20, 10  # document 20 n + 19 is a copy of document 20 n + 9
# Limits of a copy's Jaccard similarity to its original: above dedup's threshold of .8, so that one
# of both must be removed, and below 1, so that an exact hash does not suffice.
COPIES = (0.85, 0.95)
CHUNK = 10_000  # documents written at once, to bound memory


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
    # One word at a time: an edit that lowers the similarity below `low` is undone.
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
    """Speed and memory of filter and dedup for synthetic documents, on Beam's local runner.

    The documents have 80 to 120 words sampled by Zipf's law; one in twenty is an edited copy of
    another. The filter ignores the language, because the words belong to none. The seconds cover
    both stages, including reading and writing Parquet. "peak_bytes" is the peak resident memory of
    the process, and "added_bytes" is that peak minus the memory before the stages. "planted_recall"
    is the share of copies for which exactly one of copy and original was removed because of the
    other. "false_removals" counts all other documents removed as near duplicates.
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
            filtered = stages.run_stage("filter", {}, filters, documents="read/documents")
            dedup = functools.partial(make_dedup, config=DedupConfig())
            dedup_stage = stages.run_stage(
                "dedup", {}, dedup, [filtered], documents="filter/documents"
            )
            peak = peak_bytes()
            removed = list(stages.read_records("dedup/removed"))
        near_removals = {
            (r["place"], r["because"]) for r in removed if r["reason"] == "near duplicate"
        }
        copies = range(COPY_EVERY - 1, number, COPY_EVERY)
        pairs = [
            ((str(i), f"bench:{i - COPY_OF}"), (str(i - COPY_OF), f"bench:{i}")) for i in copies
        ]
        # Dedup may keep either of two near duplicates. If both are removed because of each other, a
        # document is lost.
        removed_copies = sum(
            (removal in near_removals) != (reverse_removal in near_removals)
            for removal, reverse_removal in pairs
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
            "false_removals": len(near_removals) - removed_copies,
        }


def write_documents(folder: Path, number: int) -> None:
    """Write a table "documents" of `number` texts in chunks, to bound memory."""
    folder.mkdir(parents=True)
    # Zipf's law, as in natural text: uniform words would share hardly any shingles, and the band
    # groups would be too small.
    weights = 1 / np.arange(1, VOCABULARY + 1)
    zipf = np.cumsum(weights / weights.sum())

    def words(i: int) -> str:
        rng = np.random.default_rng(i)  # by document, so that a copy can remake its original
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


# ----------------------------------------------------------------------------------------- Engine


@dataclasses.dataclass
class Engine(BenchmarkCommand):
    """Seconds and bytes of one corpus, built with Beam's local runner and with PySparkRunner.

    The corpus is `documents` synthetic texts; 5 % are edited copies. "equal" compares all
    files of the result.
    """

    documents: Annotated[int, "synthetic documents of about 100 words"] = 2000
    master: Annotated[str, "Spark master"] = "local-cluster[2,1,1024]"

    def run(self) -> dict[str, Any]:
        line: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as scratch:
            write_documents(Path(scratch, "texts"), self.documents)
            config = folder_config.get_config(f"{scratch}/texts")
            contents = {}
            for name, options in (("local", ()), ("spark", _spark_flags(self.master))):
                clock = time.monotonic()
                manifest = build.build(config, f"{scratch}/{name}", options)
                line[f"{name}_s"] = time.monotonic() - clock
                line["clusters"] = manifest["clusters"]
                files = sorted(path for path in Path(scratch, name).iterdir() if path.is_file())
                contents[name] = {path.name: path.read_bytes() for path in files}
        return line | {
            "files": len(contents["local"]),
            "equal": contents["local"] == contents["spark"],
        }


def _spark_flags(master: str) -> tuple[str, ...]:
    return ("--runner=PySparkRunner", f"--pyspark_master={master}", "--pyspark_partitions=4")
