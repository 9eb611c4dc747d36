"""Import and export of Hugging Face folders, by one table per model family (tensor_table.py).

`load` checks all names, shapes and dtypes before it reads data, and puts each layer directly into
its final place: memory stays close to the size of the parameters. On a mesh each host reads only
the parts that its devices hold. `save` converts back, one shard at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from spell_jax.policy import int8, lora, transformer
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import safetensors as files
from spell_jax.policy.tensor_table import (
    UNEMBEDDING,
    TensorEntry,
    sizes_of,
    table,
    tensors_in_order,
)
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files.jsonl import write_json
from spell_jax.runtime.hosts import distributed

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# Name -> (numpy dtype, unsigned integer type of the same size, mask of the exponent bits, which are
# all set in infinities and NaN).
DTYPES = {  # names as in choices.DTYPES
    "float32": (np.dtype(np.float32), np.uint32, 0x7F80_0000),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.uint16, 0x7F80),
}
READ_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes that files may have, and their bytes
# Prefixes of tensors of a text model beside a model of images (Gemma 3), old and new, and the
# prefixes in a folder of the text model alone.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.")
BLOCK_BYTES = 8 << 20  # bytes per read
# Transposing in strips two cache lines wide is five times faster than all at once.
STRIP_ROWS = 64

Index = tuple[slice, ...]


# ----------------------------------------------------------------------------------------- Reading


def read_config_and_tokenizer(
    folder: str | pathlib.Path, thinking: bool | None = None
) -> tuple[PolicyConfig, tokenizers.Tokenizer]:
    """Read the architecture and the tokenizer (see `tokenizer.load`) of a Hugging Face folder.

    unused_ids of the architecture has the tokenizer's gaps and all rows beyond the tokenizer.

    Raises:
      FileNotFoundError: if there is no config.json or no tokenizer.
      ValueError: if a file is damaged or not supported, or if the tokenizer has more tokens than
        the embedding has rows.
    """
    folder = pathlib.Path(folder)
    config = _read_config(folder)
    tokenizer = tokenizers.load(folder, thinking)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but config.json says "
            f"vocab_size = {config.vocab_size}"
        )
    unused_ids = tokenizer.unused_ids(config.vocab_size)
    return dataclasses.replace(config, unused_ids=unused_ids), tokenizer


def load(
    folder: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    dtype: str = "float32",
    int8_base: bool = False,
) -> tuple[PolicyConfig, transformer.Params]:
    """Read config.json and the weights (F32, F16 or BF16) of a Hugging Face folder.

    Tensor names may lack the prefix "model.", as in Qwen3-Embedding, which may also lack an output
    projection. Every process of the mesh must call this.

    Returns:
      The architecture, and the parameters in `dtype` (one of DTYPES): numpy arrays without a mesh,
      else jax arrays sharded by meshes.shardings. With `int8_base`, which needs a mesh, weights
      are quantized (int8.quantize_base) from their float32 values, layer by layer.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is damaged; if a tensor is unknown, missing, duplicated, or has a wrong
        shape or dtype (all checked before any data is read); or if a value is not finite.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: must be one of {tuple(DTYPES)}")
    source = _open(pathlib.Path(folder), dtype)
    config = source.config
    source.check_tied()
    shardings: dict[str, Any] = {}
    if mesh is not None:
        shapes, axes = transformer.abstract_params(config)
        shardings = flatten_dict(meshes.shardings(mesh, axes, shapes), sep="/")
    # Largest pieces first, while little else is in memory.
    paths = sorted(source.entries, key=source.piece_size, reverse=True)
    if mesh is None:
        flat = {path: _read_parameter(source, path) for path in paths}
        return config, unflatten_dict(flat, sep="/")
    quantized = int8.base_weights(unflatten_dict(shardings, sep="/")) if int8_base else {}
    flat = {}
    for path in paths:
        flat |= _read_onto_mesh(source, path, shardings[path], path in quantized)
    return config, unflatten_dict(flat, sep="/")


def check_headers(folder: str | pathlib.Path) -> None:
    """Check the names, shapes and types of all tensors, without their values; raises as `load`."""
    _open(pathlib.Path(folder), "float32")


def _open(folder: pathlib.Path, dtype: str) -> _Source:
    config = _read_config(folder)
    path, tensors = files.scan(folder)
    tensors = _text_tensors(folder, tensors)
    if _lacks_prefix(tensors) and UNEMBEDDING not in tensors:
        # Qwen3-Embedding has no output projection, whatever its config says.
        config = dataclasses.replace(config, tied_embeddings=True)
    return _Source(config, *match(config, path, tensors), dtype)


def _read_config(folder: pathlib.Path) -> PolicyConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        hint = ""
        if (folder / lora.CONFIG_FILE).is_file():
            hint = "; the folder has adapters alone, and must be their base or the merged policy"
        raise FileNotFoundError(f"{path}: not there{hint}")
    return PolicyConfig.from_hf(path)


def _text_tensors(
    folder: pathlib.Path, tensors: dict[str, files.Tensor]
) -> dict[str, files.Tensor]:
    """Return a text model's tensors by their names in a folder of the text model alone."""
    if not any(name.startswith(tuple(_TEXT_PREFIXES)) for name in tensors):
        return tensors
    result: dict[str, files.Tensor] = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_IMAGE_PREFIXES):
            continue
        prefix = next((old for old in _TEXT_PREFIXES if name.startswith(old)), "")
        renamed = _TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        if renamed in result:
            raise ValueError(f"{tensor} is also there as {result[renamed].name}")
        result[renamed] = tensor
    skipped = len(tensors) - len(result)
    log.info("%s: left out %d tensors of the model of images", folder, skipped)
    return result


def _lacks_prefix(names: Iterable[str]) -> bool:
    """Return whether tensor names lack the prefix "model."."""
    return not any(name.startswith("model.") for name in names)


def match(
    config: PolicyConfig, source: pathlib.Path, tensors: dict[str, files.Tensor]
) -> tuple[dict[str, files.Tensor], files.Tensor | None]:
    """Match the tensors of a folder to the names of the table.

    Returns the tensors by the table's names, and the output projection if a tied policy has one
    anyway. Raises ValueError if a tensor is missing, unknown, or of a wrong shape or dtype.
    """
    entries, sizes = table(config), sizes_of(config)
    # Old Llama files contain the rotary frequencies, which follow from the config.
    left = {name: t for name, t in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    lacks_prefix = _lacks_prefix(left)
    matched = {}
    for path, _, names in tensors_in_order(config):
        for name in names:
            spelled = name.removeprefix("model.") if lacks_prefix else name
            if spelled not in left:
                raise ValueError(f"{source}: tensor {spelled} is missing")
            matched[name] = _checked(left.pop(spelled), entries[path].their_shape(sizes))
    # Some files of tied models contain the output projection as well.
    copy = left.pop(UNEMBEDDING, None) if config.tied_embeddings else None
    if left:
        tensor = left[min(left)]
        raise ValueError(f"{tensor.path}: unknown tensor {tensor.name}")
    return matched, copy and _checked(copy, entries["embedding"].their_shape(sizes))


def _checked(tensor: files.Tensor, shape: tuple[int, ...]) -> files.Tensor:
    if tensor.dtype not in READ_DTYPES:
        raise ValueError(f"{tensor} has type {tensor.dtype}, needs one of {tuple(READ_DTYPES)}")
    if tensor.shape != shape:
        raise ValueError(f"{tensor} has shape {tensor.shape}, needs {shape}")
    return tensor


@dataclasses.dataclass(frozen=True)
class _Source:
    """Parameters of a folder with checked headers."""

    config: PolicyConfig
    tensors: dict[str, files.Tensor]  # by the table's names
    copy: files.Tensor | None  # second copy of a tied policy's embedding
    dtype: str  # of the returned arrays, one of DTYPES

    @functools.cached_property
    def entries(self) -> dict[str, TensorEntry]:
        return table(self.config)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        return sizes_of(self.config)

    def shape(self, path: str) -> tuple[int, ...]:
        return self.entries[path].our_shape(self.sizes)

    def piece_size(self, path: str) -> int:
        """Return the maximum number of values that `fill` reads: one layer of a parameter."""
        return math.prod(self.shape(path)[self.entries[path].layered :])

    def check_tied(self) -> None:
        """Raise ValueError if the second copy of the embedding differs in any bit."""
        if self.copy is None:
            return
        embedding = self.tensors[self.entries["embedding"].name]
        message = f"{self.copy} differs from {embedding.name}, but the embeddings are tied"
        if self.copy.dtype != embedding.dtype:
            raise ValueError(message)
        rows, columns = embedding.shape
        step = max(1, BLOCK_BYTES // (columns * READ_DTYPES[embedding.dtype]))
        for start in range(0, rows, step):
            index = slice(start, min(start + step, rows)), slice(0, columns)
            # Bits, not values: any difference says that the embeddings were trained apart.
            if self.copy.read(index).tobytes() != embedding.read(index).tobytes():
                raise ValueError(message)

    def fill(self, out: np.ndarray, path: str, layer: int, index: Index) -> None:
        """Read a part of one layer of a parameter into `out`, which has its axes except L.

        `layer` is ignored for parameters without layers. `index` has a start and a stop for each
        axis.
        """
        entry = self.entries[path]
        if not entry.expertwise:
            self._fill_from_tensor(out, entry, entry.name.format(layer=layer), index)
            return
        experts, *inner_index = index
        for part, expert in zip(out, range(experts.start, experts.stop), strict=True):
            name = entry.name.format(layer=layer, expert=expert)
            self._fill_from_tensor(part, entry, name, tuple(inner_index))

    def _fill_from_tensor(
        self, out: np.ndarray, entry: TensorEntry, name: str, index: Index
    ) -> None:
        """Do `fill` from one tensor, in blocks of rows."""
        tensor = self.tensors[name]
        parts = dict(zip(entry.ours or entry.letters, index, strict=True))
        # The first axis of a flattened word (N of NH) is sliced while reading; one step along it is
        # the product of the other sizes in the file. The other axes are read whole and sliced
        # afterwards.
        words = entry.theirs.split()
        steps = [math.prod(self.sizes[axis] for axis in word[1:]) for word in words]
        spans = [
            slice(parts[word[0]].start * step, parts[word[0]].stop * step)
            for word, step in zip(words, steps, strict=True)
        ]
        shape, block_index = [], []
        for axis in entry.letters:
            is_sliced = any(word[0] == axis for word in words)
            shape.append(_length(parts[axis]) if is_sliced else self.sizes[axis])
            block_index.append(slice(None) if is_sliced else parts[axis])
        step_bytes = steps[0] * math.prod(map(_length, spans[1:])) * READ_DTYPES[tensor.dtype]
        max_rows = max(1, BLOCK_BYTES // step_bytes)
        target = entry.in_their_order(out)
        for start in range(0, shape[0], max_rows):
            count = min(max_rows, shape[0] - start)
            first = spans[0].start + start * steps[0]
            block = tensor.read((slice(first, first + count * steps[0]), *spans[1:]))
            block = self._converted(block, tensor).reshape(count, *shape[1:])
            _copy_strips(target[start : start + count], block[tuple(block_index)])

    def _converted(self, block: np.ndarray, tensor: files.Tensor) -> np.ndarray:
        dtype, bits, exponent = DTYPES[self.dtype]
        # A float32 that overflows bfloat16 becomes infinite, which the next check reports.
        with np.errstate(over="ignore", invalid="ignore"):
            block = block.astype(dtype, copy=False)
        if np.any(block.view(bits) & bits(exponent) == exponent):
            raise ValueError(f"{tensor} has values that are not finite in {self.dtype}")
        return block


def _length(part: slice) -> int:
    return part.stop - part.start


def _copy_strips(target: np.ndarray, source: np.ndarray) -> None:
    """Copy source to target in strips of axis 0 (the tensor's rows); one array is transposed."""
    step = max(1, STRIP_ROWS // math.prod(source.shape[1:-1]))
    for start in range(0, len(source), step):
        target[start : start + step] = source[start : start + step]


def _read_parameter(source: _Source, path: str) -> np.ndarray:
    """Read a whole parameter into a numpy array."""
    shape, layered = source.shape(path), source.entries[path].layered
    out = np.empty(shape, DTYPES[source.dtype][0])
    full_index = tuple(slice(0, size) for size in shape[layered:])
    for layer, part in enumerate(out if layered else [out]):
        source.fill(part, path, layer, full_index)
    return out


def _read_onto_mesh(
    source: _Source, path: str, sharding: NamedSharding, quantized: bool
) -> dict[str, jax.Array]:
    """Read a parameter, and its scales if quantized, by path; each host reads its own parts."""
    shardings = {path: sharding}
    if quantized:
        # Not the compute dtype: every run and machine shall quantize to the same bits.
        source = dataclasses.replace(source, dtype="float32")
        shardings = int8.int8_shardings(shardings)
    shape, dtype = source.shape(path), DTYPES[source.dtype][0]

    def finish(weight: Any) -> dict[str, Any]:
        return int8.quantize({path: weight}) if quantized else {path: weight}

    if not source.entries[path].layered:
        piece = _piece(source, path, 0, shape, sharding)
        return jax.jit(finish, out_shardings=shardings)(piece) if quantized else {path: piece}
    # Layers go into donated stacks one by one: jnp.stack would hold all layers twice.
    empty = jax.eval_shape(finish, jax.ShapeDtypeStruct(shape, dtype))
    stacks = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty), out_shardings=shardings
    )()

    def insert(stacks: Any, piece: jax.Array, layer: jax.Array) -> Any:
        def update(stack: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(stack, part, layer, 0)

        return jax.tree.map(update, stacks, finish(piece[None]))

    insert_layer = jax.jit(insert, donate_argnums=0, out_shardings=shardings)
    sharding_of_layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    for layer in range(shape[0]):
        piece = _piece(source, path, layer, shape[1:], sharding_of_layer)
        # Block, so that pieces do not pile up in memory.
        stacks = jax.block_until_ready(insert_layer(stacks, piece, np.int32(layer)))
    return stacks


def _piece(
    source: _Source, path: str, layer: int, shape: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """Read one layer of a parameter onto its devices."""
    dtype = DTYPES[source.dtype][0]
    loaded_parts: dict[tuple, np.ndarray] = {}  # devices with the same part share one read

    def read_part(index: Any) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        if bounds not in loaded_parts:
            out = np.empty([stop - start for start, stop in bounds], dtype)
            source.fill(out, path, layer, tuple(itertools.starmap(slice, bounds)))
            loaded_parts[bounds] = out
        return loaded_parts[bounds]

    return jax.make_array_from_callback(shape, sharding, read_part, dtype=dtype)


# ----------------------------------------------------------------------------------------- Writing


def save(
    folder: str | os.PathLike[str],
    config: PolicyConfig,
    params: transformer.Params,
    tokenizer: tokenizers.Tokenizer | None = None,
    dtype: str = "float32",
    shard_bytes: int = 2 << 30,
) -> None:
    """Write a Hugging Face folder: config.json, weights and tokenizer files.

    An existing folder is replaced; see safetensors.replacing. With several hosts, every process
    must call this with its shards of the parameters (numpy or jax arrays); process 0 writes. The
    files have `dtype`, one of DTYPES, and at most `shard_bytes` bytes unless a single tensor is
    larger; that is also about the memory needed. Adapters are merged into their kernels, and an
    int8 base is dequantized (lora.merge), one layer at a time. The tokenizer's eos and padding ids
    go into the configs.

    Raises:
      ValueError: if no Hugging Face architecture has these parts, or the parameters do not match
        the architecture. Nothing is written.
      RuntimeError: on every host, if there are several and writing failed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: must be one of {tuple(DTYPES)}")
    fields = config.to_hf() | {"torch_dtype": dtype}
    flat = flatten_dict(params, sep="/")
    _check_params(config, flat)
    if tokenizer is not None:
        fields |= {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    entries, sizes = table(config), sizes_of(config)
    nbytes = {
        name: math.prod(entries[path].their_shape(sizes)) * DTYPES[dtype][0].itemsize
        for path, _, names in tensors_in_order(config)
        for name in names
    }
    tensors = _their_tensors(config, flat, dtype)
    with distributed.fail_together():
        try:
            if jax.process_index() == 0:
                with files.replacing(folder) as scratch:
                    files.write_tensors(scratch, nbytes, tensors, shard_bytes)
                    _write_others(scratch, fields, tokenizer)
        finally:
            if jax.process_count() > 1:
                for _ in tensors:  # every process must take part in every gather
                    pass


def _write_others(
    folder: pathlib.Path, fields: dict[str, Any], tokenizer: tokenizers.Tokenizer | None
) -> None:
    """Write config.json with these fields, and the tokenizer's files."""
    write_json(folder / CONFIG_FILE, fields, indent=2)
    if tokenizer is None:
        return
    tokenizer.save(folder)
    write_ends(folder, tokenizer)


def write_ends(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Write all stop tokens into a folder's generation_config.json, unless the file has them."""
    # Other programs (vLLM, transformers) read no chat template to find the token that ends a turn.
    path = folder / GENERATION_FILE
    fields: dict[str, Any] = {"pad_token_id": tokenizer.pad_id}
    if path.exists():
        fields = json.loads(path.read_bytes())
    ids = fields.get("eos_token_id")
    # A file of the model's authors stays as it is if it is complete.
    if {*(ids if isinstance(ids, list) else [ids])} >= {*tokenizer.stop_ids}:
        return
    ends = list(tokenizer.stop_ids)
    fields["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    write_json(path, fields, indent=2)


def _check_params(config: PolicyConfig, flat: Mapping[str, Any]) -> None:
    shapes: dict[str, Any] = flatten_dict(transformer.abstract_params(config)[0], sep="/")
    if differing := set(flat) ^ set(shapes):
        path = min(differing)
        raise ValueError(f"parameter {path} is {'unknown' if path in flat else 'missing'}")
    for path, expected in shapes.items():
        if flat[path].shape != expected.shape:
            raise ValueError(
                f"parameter {path} has shape {flat[path].shape}, needs {expected.shape}"
            )


def _their_tensors(
    config: PolicyConfig, flat: Mapping[str, Any], dtype: str
) -> Iterator[np.ndarray]:
    """Yield the Hugging Face tensors in file order, each built when it is needed."""
    entries, sizes = table(config), sizes_of(config)
    for path, layer, _ in tensors_in_order(config):
        entry = entries[path]
        # One layer at a time, because a whole stack of kernels may not fit a host.
        value = distributed.fetch_global(lora.merged_part(config, flat, path, layer))
        for part in value if entry.expertwise else [value]:
            part = entry.in_their_order(part)
            out = np.empty(part.shape, DTYPES[dtype][0])
            _copy_strips(out, part)  # and cast
            yield out.reshape(entry.their_shape(sizes))
