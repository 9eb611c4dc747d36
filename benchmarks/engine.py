"""Benchmarks of the data pipeline on a distributed engine: equal bytes, and inputs of any size."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa

from benchmarks.base import BenchmarkCommand
from benchmarks.data import write_documents
from data_pipeline import build
from data_pipeline.stages import Stages
from spell_jax.configs.data import folder as folder_config

FILES_PER_FOLDER = 1000
ROW_CHARACTERS = 30_000  # of a document in the large file
BLOCK_ROWS = 1000  # rows of a compressed block, which the file repeats
SAMPLE_S = 0.2


@dataclasses.dataclass
class Engine(BenchmarkCommand):
    """Builds one corpus with Beam's local runner and with PySparkRunner, and compares all bytes.

    The corpus is `documents` synthetic texts, 5 % of them edited copies. "equal" compares every
    file of the result.
    """

    documents: Annotated[int, "synthetic documents of about 100 words"] = 2000
    master: Annotated[str, "Spark master"] = "local-cluster[2,1,1024]"

    def run(self) -> dict[str, Any]:
        line: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as scratch:
            write_documents(Path(scratch, "texts"), self.documents)
            config = folder_config.get_config(f"{scratch}/texts")
            contents = {}
            for name, options in (("local", ()), ("spark", spark_flags(self.master))):
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


@dataclasses.dataclass
class InputsBenchmark(BenchmarkCommand):
    """Lists and reads many small files, then one large file: seconds and peak memory.

    Each part is run at a tenth of its size, then at the whole size: memory must not grow with it.
    The large file is a .jsonl.zst that repeats one small compressed block. It takes next to no disk
    and has its full size only when it is decompressed. Peaks are resident bytes, sampled every
    0.2 s: "driver" of this process, "worker" of the largest Python process below it, "java" of the
    largest Java process (Spark limits its heap).
    """

    files: Annotated[int, "small files"] = 100_000
    gigabytes: Annotated[float, "size of the large file, decompressed, in 10^9 bytes"] = 2.0
    master: Annotated[str, "Spark master; '' for Beam's local runner"] = "local-cluster[2,1,1024]"

    def run(self) -> dict[str, Any]:
        line: dict[str, Any] = {}
        # Spark keeps its workers, so the part that needs less memory comes first.
        for name, write, size in (
            ("files", _write_small_files, self.files),
            ("large", _write_large_file, self.gigabytes),
        ):
            for share, suffix in ((0.1, "_tenth"), (1.0, "")):
                with tempfile.TemporaryDirectory() as scratch:
                    number = write(Path(scratch, "in"), size * share)
                    line |= self._read(scratch, f"{name}{suffix}", number)
        return line

    def _read(self, scratch: str, name: str, number: int) -> dict[str, Any]:
        """Run listing and reading; check that `number` documents came."""
        config = folder_config.get_config(f"{scratch}/in")
        stages = Stages(f"{scratch}/stages", spark_flags(self.master) if self.master else ())
        plan, clock = build.make_plan(config), time.monotonic()
        with _Peaks() as peaks:
            read_stage = build.read(plan, stages, build.list_sources(plan, stages))
        seconds = time.monotonic() - clock
        if read_stage.count("documents kept") != number:
            raise RuntimeError(
                f"{name}: {read_stage.count('documents kept')} documents, not {number}"
            )
        process_peaks = {f"{name}_{process}_bytes": size for process, size in peaks.found.items()}
        line = {f"{name}_s": seconds, f"{name}_documents": number, **process_peaks}
        print(json.dumps(line), file=sys.stderr, flush=True)  # the next part may take an hour
        return line


def spark_flags(master: str) -> tuple[str, ...]:
    return ("--runner=PySparkRunner", f"--pyspark_master={master}", "--pyspark_partitions=4")


def _write_small_files(folder: Path, number: float) -> int:
    """Write about `number` files; return their number."""
    for i in range(round(number)):
        if i % FILES_PER_FOLDER == 0:
            (folder / f"{i // FILES_PER_FOLDER:06d}").mkdir(parents=True)
        path = folder / f"{i // FILES_PER_FOLDER:06d}" / f"{i:09d}.txt"
        path.write_text(f"This is the small text number {i} of many. " * 4)
    return round(number)


def _write_large_file(folder: Path, gigabytes: float) -> int:
    """Write a file of rows; return their number."""
    folder.mkdir(parents=True)
    row = json.dumps({"text": "All work and no play. " * (ROW_CHARACTERS // 22)}) + "\n"
    block = row.encode() * BLOCK_ROWS
    repeats = max(1, round(gigabytes * 1e9 / len(block)))
    packed: Any = pa.compress(block, codec="zstd", asbytes=True)
    with open(folder / "large.jsonl.zst", "wb") as file:
        for _ in range(repeats):
            file.write(packed)
    return repeats * BLOCK_ROWS


class _Peaks:
    """Context that samples the resident memory of this process and of those below it."""

    def __enter__(self) -> _Peaks:
        self.found = {"driver": 0, "worker": 0, "java": 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for kind, size in _memory():
                self.found[kind] = max(self.found[kind], size)


def _memory() -> list[tuple[str, int]]:
    """Return (kind, resident bytes) of this process and of those below it, from /proc."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
        except OSError:  # it ended
            continue
        fields = tail.split()
        size = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        processes[int(path.parent.name)] = head.partition("(")[2], int(fields[1]), size
    mine, process_sizes = os.getpid(), []
    for process, (name, parent, size) in processes.items():
        while parent != mine and parent in processes:
            parent = processes[parent][1]
        if process == mine:
            process_sizes.append(("driver", size))
        elif parent == mine:
            process_sizes.append(("java" if name.startswith("java") else "worker", size))
    return process_sizes
