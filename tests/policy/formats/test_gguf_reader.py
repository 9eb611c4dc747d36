"""Tests of the GGUF reader: values, damaged headers, hostile counts."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from spell_jax.policy.formats import gguf_reader
from tests.policy.formats import gguf_files
from tests.policy.formats.gguf_files import Quantization

FIELDS = {
    "llama.block_count": 2,
    "llama.scale": 0.5,
    "llama.flag": True,
    "llama.name": "Zwölf",
    "llama.words": ["a", "bc", ""],
    "llama.numbers": [3, 1, 2],
}
RANDOM = np.random.default_rng(0)
TENSORS = {
    "first": RANDOM.normal(size=(3, 64)).astype(np.float32),
    "second": RANDOM.normal(size=(5,)).astype(np.float32),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return gguf_files.write(tmp_path / "small.gguf", "llama", FIELDS, TENSORS)


def test_fields_and_tensors_of_every_kind_are_read(small: Path) -> None:
    file = gguf_reader.read(small)
    fields = {name: file.fields[name] for name in FIELDS}
    fields["llama.numbers"] = fields["llama.numbers"].tolist()
    assert fields == FIELDS
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        "first": (3, 64),
        "second": (5,),
    }
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(file.tensors[name].read(), values)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_values_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    values, quantization = TENSORS["first"], Quantization[kind]
    path = gguf_files.write(tmp_path / "q.gguf", "llama", {}, {"w": (values, quantization)})
    tensor = gguf_reader.read(path).tensors["w"]
    assert (tensor.type, tensor.shape) == (kind, values.shape)
    expected_values = gguf.quants.dequantize(
        gguf.quants.quantize(values, quantization), quantization
    )
    np.testing.assert_array_equal(tensor.read(), expected_values)
    np.testing.assert_allclose(tensor.read(), values, atol=0.3)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quantized_values_equal_transformers(kind: str, tmp_path: Path) -> None:
    """The package cannot write these types, so the blocks are random bytes with small scales."""
    torch = pytest.importorskip("torch")
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    number, _, size = gguf_reader.TYPES[kind]
    blocks = RANDOM.integers(0, 256, size=(4, 2 * size), dtype=np.uint8)
    scales = slice(-2, None) if kind == "Q6_K" else slice(0, 4)  # one float16, or two
    for block in blocks.reshape(-1, size):
        count = len(block[scales]) // 2
        block[scales] = RANDOM.uniform(0.01, 0.1, count).astype(np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", blocks, raw_dtype=Quantization(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf_reader.read(tmp_path / "k.gguf").tensors["w"]
    assert tensor.shape == (4, 512)
    expected_values = dequant.dequantize(torch.from_numpy(blocks.reshape(-1, size)), number)
    np.testing.assert_allclose(
        tensor.read(), expected_values.numpy().reshape(4, 512), rtol=1e-6, atol=1e-6
    )


def test_truncated_file_is_rejected(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    last = gguf_reader.read(small).tensors["second"]
    for length in range(0, last.offset + last.nbytes, 11):
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf: "):
            gguf_reader.read(cut)


def test_random_damage_is_read_or_rejected(small: Path, tmp_path: Path) -> None:
    data, rng = small.read_bytes(), np.random.default_rng(1)
    end = min(tensor.offset for tensor in gguf_reader.read(small).tensors.values())
    damaged, rejected = tmp_path / "damaged.gguf", 0
    for _ in range(150):
        damaged_bytes = bytearray(data)
        for at in rng.integers(0, end, size=rng.integers(1, 4)):
            damaged_bytes[at] = rng.integers(0, 256)
        damaged.write_bytes(damaged_bytes)
        try:
            gguf_reader.read(damaged)
        except ValueError as error:
            assert "damaged.gguf: " in str(error)
            rejected += 1
    assert 30 < rejected < 150


HUGE = struct.pack("<Q", 1 << 60)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _file(tensors: bytes = b"", fields: bytes = b"", counts: tuple[int, int] = (0, 0)) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + fields + tensors


def _tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return _text(name) + axes + struct.pack("<IQ", kind, offset)


HOSTILE = {
    "not GGUF": (b"GGML" + bytes(64), "does not begin with"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version = 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    "fields": (_file(counts=(0, 1 << 60)) + bytes(64), "1152921504606846976 fields"),
    "tensors": (_file(counts=(1 << 60, 0)) + bytes(64), "1152921504606846976 tensors"),
    "name": (_file(fields=HUGE + bytes(64), counts=(0, 1)), "bytes in the name of a field"),
    "text": (
        _file(fields=_text("k") + struct.pack("<I", 8) + HUGE + bytes(64), counts=(0, 1)),
        "bytes in k",
    ),
    "array of texts": (
        _file(fields=_text("k") + struct.pack("<II", 9, 8) + HUGE + bytes(64), counts=(0, 1)),
        "texts in k",
    ),
    "array of numbers": (
        _file(fields=_text("k") + struct.pack("<II", 9, 4) + HUGE + bytes(64), counts=(0, 1)),
        "items in k",
    ),
    "array of arrays": (
        _file(fields=_text("k") + struct.pack("<II", 9, 9) + bytes(64), counts=(0, 1)),
        "unknown type 9 of items",
    ),
    "type of a field": (
        _file(fields=_text("k") + struct.pack("<I", 77) + bytes(64), counts=(0, 1)),
        "unknown type 77",
    ),
    "field twice": (
        _file(fields=2 * (_text("k") + struct.pack("<IB", 0, 1)) + bytes(64), counts=(0, 2)),
        "field k is there twice",
    ),
    "not UTF-8": (
        _file(fields=struct.pack("<Q", 1) + b"\xff" + bytes(64), counts=(0, 1)),
        "not UTF-8",
    ),
    "axes": (_file(_tensor("w", [1] * 9) + bytes(64), counts=(1, 0)), "has 9 axes"),
    "huge axes": (
        _file(_text("w") + struct.pack("<I", 1 << 31) + bytes(64), counts=(1, 0)),
        "has 2147483648 axes",
    ),
    "huge sizes": (
        _file(_tensor("w", [1 << 40, 1 << 40]) + bytes(64), counts=(1, 0)),
        "ends at byte",
    ),
    "empty": (_file(_tensor("w", [0]) + bytes(64), counts=(1, 0)), "not whole blocks"),
    "part of a block": (_file(_tensor("w", [33], 2) + bytes(64), counts=(1, 0)), "not whole"),
    "offset": (_file(_tensor("w", [4], 0, 1 << 62) + bytes(64), counts=(1, 0)), "ends at byte"),
    "type": (_file(_tensor("w", [4], 99) + bytes(64), counts=(1, 0)), "has type 99"),
    "tensor twice": (_file(2 * _tensor("w", [4]) + bytes(64), counts=(2, 0)), "w is there twice"),
    "overlap": (
        _file(_tensor("w", [4]) + _tensor("v", [4], 0, 8) + bytes(128), counts=(2, 0)),
        "overlap",
    ),
    "alignment": (
        _file(
            fields=_text("general.alignment") + struct.pack("<II", 4, 3) + bytes(64), counts=(0, 1)
        ),
        "power of two",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_rejected(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            gguf_reader.read(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not there"):
        gguf_reader.read(tmp_path / "none.gguf")
