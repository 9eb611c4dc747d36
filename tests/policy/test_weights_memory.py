"""Tests of the peak memory of a load and a save, measured in a new process (this file)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import pytest

from spell_jax.policy import tensor_table, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import safetensors as files
from spell_jax.policy.rope import RopeConfig
from spell_jax.runtime.files.jsonl import write_json
from tests.paths import ROOT

pytestmark = pytest.mark.slow

# Most of the weights are in the layers, or in the embedding.
DEEP = PolicyConfig(
    vocab_size=20_000,
    width=1_024,
    layers=12,
    heads=2,
    kv_heads=1,
    head_size=128,
    feed_forward=3_072,
    tied_embeddings=False,
)
BROAD = dataclasses.replace(
    DEEP, vocab_size=250_000, width=512, layers=1, feed_forward=512, tied_embeddings=True
)
TINY = dataclasses.replace(DEEP, vocab_size=64, width=32, head_size=8, feed_forward=48)
QWEN_7B = dataclasses.replace(
    DEEP,
    vocab_size=152_064,
    width=3_584,
    layers=28,
    heads=28,
    kv_heads=4,
    feed_forward=18_944,
    rope=RopeConfig(theta=1e6),
)
ON_LINUX = pathlib.Path("/proc/self/status").exists()
PATTERN = 8 << 20  # bytes after which random values repeat


def _shapes(config: PolicyConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    entries, sizes = tensor_table.table(config), tensor_table.sizes_of(config)
    for path, _, names in tensor_table.tensors_in_order(config):
        for name in names:
            yield name, entries[path].their_shape(sizes)


def write_random(folder: pathlib.Path, config: PolicyConfig, shard_bytes: int) -> None:
    """Write a folder of random bfloat16 weights of about 0.01, without holding it in memory."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, PATTERN // 2, dtype=np.uint16)
    pattern = memoryview((bits & 0x807F | 0x3C00).tobytes())
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = shard_bytes
    for name, shape in _shapes(config):
        size = 2 * math.prod(shape)
        if size > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = shape
        room -= size
    folder.mkdir()
    places = {}
    for number, shard in enumerate(shards, start=1):
        header, end = {}, 0
        for name, shape in shard.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, end, PATTERN):
                file.write(pattern[: min(PATTERN, end - start)])
        places |= dict.fromkeys(shard, name)
    write_json(folder / files.INDEX, {"metadata": {}, "weight_map": places})
    write_json(folder / "config.json", config.to_hf())


def _status(field: str) -> int:
    """Return the bytes that this process holds ("VmRSS") or has held at most ("VmHWM")."""
    # Not getrusage: its maximum is inherited from the process that started this one.
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def measure(tiny: str, folder: str, on_mesh: bool, shard_bytes: int) -> dict[str, float]:
    """Load a folder in bfloat16, and save it in shards unless their size is 0.

    Returns:
      kept: bytes of the weights; above: the most bytes held above that in the load; before: bytes
      held before the load; seconds: of the load; save: the most bytes held for the save.
    """
    import jax

    from spell_jax.runtime import mesh as meshes

    mesh = meshes.make_mesh({}) if on_mesh else None
    weights.save("saved", *weights.load(tiny, mesh, "bfloat16"))
    before = _status("VmRSS")
    clock = time.monotonic()
    config, params = weights.load(folder, mesh, "bfloat16")
    seconds = time.monotonic() - clock
    peak = _status("VmHWM") - before
    kept_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    measurements = {
        "kept": kept_bytes,
        "above": peak - kept_bytes,
        "before": before,
        "seconds": seconds,
        "save": 0,
    }
    if shard_bytes:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        weights.save("saved", config, params, dtype="bfloat16", shard_bytes=shard_bytes)
        measurements["save"] = _status("VmHWM") - before
    return measurements


def _measure_elsewhere(
    tmp_path: pathlib.Path, config: PolicyConfig, shard_bytes: int, on_mesh: bool, saves: bool
) -> None:
    """Run `measure` in a fresh process with one device; check the bounds."""
    write_random(tmp_path / "tiny", TINY, 10_000)
    write_random(tmp_path / "policy", config, shard_bytes)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    arguments = ["tiny", "policy", "mesh" * on_mesh, str(shard_bytes * saves)]
    root = ROOT
    process = subprocess.run(
        [sys.executable, __file__, *arguments],
        cwd=tmp_path,
        # Freed memory goes back to the system at once, if it is large.
        env=environment | {"PYTHONPATH": str(root), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        stdout=subprocess.PIPE,
        check=True,
    )
    measurements = json.loads(process.stdout)
    largest = 2 * max(math.prod(shape) for _, shape in _shapes(config))
    assert measurements["kept"] == 2 * sum(math.prod(shape) for _, shape in _shapes(config))
    print(f"{measurements} largest tensor {largest}: {measurements['above'] / largest:.2f} of it")
    assert measurements["above"] < 1.3 * largest
    assert measurements["save"] < shard_bytes + 1.3 * largest


@pytest.mark.skipif(not ON_LINUX, reason="reads /proc")
@pytest.mark.parametrize(
    ("config", "on_mesh"),
    [(DEEP, True), (DEEP, False), (BROAD, True)],
    ids=["deep, mesh", "deep, numpy", "broad, mesh"],
)
def test_peak_memory_of_load_and_save_is_bounded(
    config: PolicyConfig, on_mesh: bool, tmp_path
) -> None:
    _measure_elsewhere(tmp_path, config, 40 << 20, on_mesh, saves=config == DEEP)


@pytest.mark.long
@pytest.mark.skipif(not ON_LINUX, reason="reads /proc")
def test_peak_memory_of_loading_seven_billion_weights_is_bounded() -> None:
    """A folder as large as Qwen2.5-7B's: 15.2 GB in bfloat16; takes a few minutes."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 20e9 or memory < 18e9:
        pytest.skip(f"needs 20 GB of disk and 18 GB of memory, free are {free} and {memory}")
    with tempfile.TemporaryDirectory() as folder:
        _measure_elsewhere(pathlib.Path(folder), QWEN_7B, 2 << 30, on_mesh=True, saves=False)


if __name__ == "__main__":
    argv = sys.argv
    print(json.dumps(measure(argv[1], argv[2], argv[3] == "mesh", int(argv[4]))))
