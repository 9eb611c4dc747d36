"""Reader of GGUF files (llama.cpp) that trusts nothing in them.

`read` checks the whole header before any tensor is read: counts, lengths and offsets must lie
inside the file, so that memory stays below a few times the header's bytes. The `gguf` package
dequantizes. Its own reader is not used: if an array claims more items than the file has bytes, that
reader appends empty items without end.

Format: magic "GGUF", u32 version, u64 number of tensors, u64 number of fields; fields of (name,
u32 type, value); tensors of (name, u32 axes, u64 sizes, u32 type, u64 offset); padding; data. All
numbers are little-endian, texts are u64 bytes and UTF-8, and sizes begin with the fastest axis.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

MAGIC = b"GGUF"
# Version 1 counts in u32, so that its header has another layout.
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes; the field general.alignment changes it
MOST_AXES = 4
# Name of a tensor type -> (its number, values in a block, bytes of a block).
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
_TYPE_NAMES = {number: name for name, (number, _, _) in TYPES.items()}
_KNOWN_TYPES = ", ".join(f"{number} ({name})" for number, name in _TYPE_NAMES.items())
# Number of a field's type -> format of a single value.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Lower bounds of an item's bytes, so that a count can be checked before its items are read.
_SMALLEST_FIELD = 8 + 4 + 1  # bytes of a field with an empty name and one byte
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of a tensor with an empty name and one axis


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
      path: the file.
      name: name in the file, such as blk.0.attn_q.weight.
      type: one of TYPES.
      shape: sizes in numpy's order: the fastest axis is the last.
      offset: first byte in the file.
      nbytes: bytes in the file.
    """

    path: pathlib.Path
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> np.ndarray:
        """Dequantize the values to float32 of `shape`; ImportError without the gguf package."""
        quants = import_gguf().quants
        data = np.fromfile(self.path, np.uint8, self.nbytes, offset=self.offset)
        number, values, size = TYPES[self.type]
        rows = data.reshape(*self.shape[:-1], self.shape[-1] // values * size)
        kind = import_gguf().GGMLQuantizationType(number)
        return np.asarray(quants.dequantize(rows, kind), np.float32).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Header of a file: fields by name, tensors by name in the file's order.

    Values of fields are int, float, bool, str, lists of str, or numpy arrays of numbers.
    """

    path: pathlib.Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def import_gguf() -> Any:
    """Import and return the gguf package; ImportError says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install gguf") from error
    return gguf


def read(path: pathlib.Path) -> GgufFile:
    """Read and check the header of a file; no tensor is read.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if the file is no GGUF file of VERSIONS, is truncated, has a count, length, size
        or offset beyond its end, overlapping or repeated tensors, a repeated field, or a type that
        is not implemented; the message names file and place.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there")
    size = path.stat().st_size
    if size < len(MAGIC):
        raise ValueError(f"{path}: not a GGUF file, has {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(path, data).file()


class _Cursor:
    """A position in the header, which never leaves the file."""

    def __init__(self, path: pathlib.Path, data: mmap.mmap):
        self._path, self._data, self._at = path, data, 0

    def file(self) -> GgufFile:
        if self._take(len(MAGIC)) != MAGIC:
            raise ValueError(f"{self._path}: not a GGUF file, does not begin with {MAGIC!r}")
        version = self._number("I")
        if version not in VERSIONS:
            # Version 3 in the other byte order has zeros in its two low bytes.
            big_endian = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise ValueError(
                f"{self._path}: version = {version}{big_endian}: must be one of {VERSIONS}"
            )
        tensor_count = self._count("tensors", _SMALLEST_TENSOR)
        field_count = self._count("fields", _SMALLEST_FIELD)
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = self._text("the name of a field")
            if name in fields:
                raise ValueError(f"{self._path}: field {name} is there twice")
            fields[name] = self._value(name)
        tables = [self._tensor() for _ in range(tensor_count)]
        return GgufFile(self._path, fields, self._place(tables, self._data_start(fields)))

    def _take(self, count: int) -> bytes:
        left = len(self._data) - self._at
        if count > left:
            raise ValueError(
                f"{self._path}: truncated: needs {count} bytes at byte {self._at}, {left} are left"
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self._take(struct.calcsize("<" + kind)))[0]

    def _count(self, what: str, smallest: int) -> int:
        """Read a number of items, each at least `smallest` bytes, which must fit into the file."""
        count = self._number("Q")
        if count * smallest > len(self._data) - self._at:
            raise ValueError(f"{self._path}: {count} {what}: more than the rest of the file holds")
        return count

    def _text(self, what: str) -> str:
        data = self._take(self._count(f"bytes in {what}", 1))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path}: {what} is not UTF-8 ({error})") from error

    def _value(self, name: str) -> Any:
        kind = self._number("I")
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text(name)
        if kind != _ARRAY:
            raise ValueError(f"{self._path}: field {name}: unknown type {kind}")
        kind = self._number("I")
        if kind == _STRING:
            return [self._text(name) for _ in range(self._count(f"texts in {name}", 8))]
        if kind not in _SCALARS:
            raise ValueError(f"{self._path}: field {name}: unknown type {kind} of items")
        item = np.dtype("<" + _SCALARS[kind])
        count = self._count(f"items in {name}", item.itemsize)
        # An array of numbers is one copy; a list of Python numbers would take several times the
        # file's bytes.
        return np.frombuffer(self._take(count * item.itemsize), item)

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        """Read the next tensor's name, shape, type and offset in the data."""
        name = self._text("the name of a tensor")
        axes = self._number("I")
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(
                f"{self._path}: tensor {name} has {axes} axes, must have 1 to {MOST_AXES}"
            )
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in _TYPE_NAMES:
            raise ValueError(
                f"{self._path}: tensor {name} has type {number}: must be one of {_KNOWN_TYPES}"
            )
        return name, shape, _TYPE_NAMES[number], offset

    def _data_start(self, fields: dict[str, Any]) -> int:
        alignment = fields.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(
                f"{self._path}: general.alignment = {alignment!r}: must be a power of two"
            )
        # Offsets of tensors count from the first aligned byte after the header.
        return -(-self._at // alignment) * alignment

    def _place(
        self, tables: list[tuple[str, tuple[int, ...], str, int]], start: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in tables:
            where, (_, values, size) = f"{self._path}: tensor {name}", TYPES[kind]
            if name in tensors:
                raise ValueError(f"{where} is there twice")
            # Blocks lie along the fastest axis and never cross a row.
            if min(shape) < 1 or shape[-1] % values:
                raise ValueError(f"{where} of type {kind} has shape {shape}: not whole blocks")
            nbytes = math.prod(shape) // values * size
            if start + offset + nbytes > len(self._data):
                raise ValueError(
                    f"{where} of shape {shape} ends at byte {start + offset + nbytes}, the file at "
                    f"byte {len(self._data)}"
                )
            tensors[name] = GgufTensor(self._path, name, kind, shape, start + offset, nbytes)
        # An overlap would make two tensors share bytes: one of the offsets is damaged.
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise ValueError(f"{self._path}: tensors {before.name} and {after.name} overlap")
        return tensors
