"""Tests of random damage to a folder: the same weights, or an error that names the file."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from spell_jax.policy import weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import safetensors as files
from tests import tiny
from tests.policy.test_weights import assert_same_bits, read_tensors

pytestmark = pytest.mark.slow

POLICY = PolicyConfig(
    vocab_size=6,
    width=4,
    layers=2,
    heads=2,
    kv_heads=1,
    head_size=2,
    feed_forward=3,
    qkv_bias=False,
    qk_norm=True,
    tied_embeddings=False,
    experts=2,
    experts_per_token=1,
)
SHARD = 500
KINDS = ("one file", "shards")
many_examples = settings(max_examples=200)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Write an undamaged folder of each kind."""
    root = tmp_path_factory.mktemp("originals")
    for kind, size in zip(KINDS, (1 << 30, SHARD), strict=True):
        weights.save(root / kind, POLICY, tiny.weights(POLICY), shard_bytes=size)
    return {kind: root / kind for kind in KINDS}


def load_damaged(original: pathlib.Path, damage: Callable[[pathlib.Path], Any]) -> Any:
    """Load a damaged copy; return the parameters, or the message of the error."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "policy"
        shutil.copytree(original, folder)
        damage(folder)
        try:
            return weights.load(folder)[1]
        except (ValueError, FileNotFoundError) as error:
            return str(error)


def assert_same_or_named(outcome: Any, pattern: str) -> None:
    """Assert undamaged parameters, or an error that names a file of this pattern."""
    if isinstance(outcome, str):
        assert re.search(f"policy/({pattern}): ", outcome), outcome
    else:
        assert_same_bits(outcome, tiny.weights(POLICY))


def _pick(data: st.DataObject, original: pathlib.Path, pattern: str) -> pathlib.Path:
    paths = sorted(path.name for path in original.glob(pattern))
    return pathlib.Path(data.draw(st.sampled_from(paths)))


def _alter(data: st.DataObject, content: bytes, end: int) -> bytes:
    """Return the content with up to three of the first `end` bytes changed, lost or doubled."""
    altered = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        end = min(end, len(altered))
        place = data.draw(st.integers(0, end - 1))
        kind = data.draw(st.sampled_from(["bit", "byte", "digit", "lost", "doubled"]))
        if kind == "bit":
            altered[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "byte":
            altered[place] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            digits = [i for i in range(8, end) if chr(altered[i]).isdigit()] or [place]
            altered[data.draw(st.sampled_from(digits))] = data.draw(st.sampled_from(b"0123456789"))
        elif kind == "lost":
            del altered[place]
        else:
            altered.insert(place, altered[place])
    return bytes(altered)


@pytest.mark.parametrize("kind", KINDS)
@many_examples
@given(data=st.data())
def test_damaged_header_is_reported_or_harmless(kind: str, data, originals) -> None:
    name = _pick(data, originals[kind], "*.safetensors")
    content = (originals[kind] / name).read_bytes()
    altered = _alter(data, content, 8 + int.from_bytes(content[:8], "little"))
    outcome = load_damaged(originals[kind], lambda f: (f / name).write_bytes(altered))
    assert_same_or_named(outcome, str(name))


@pytest.mark.parametrize("kind", KINDS)
@many_examples
@given(data=st.data())
def test_truncated_or_longer_file_is_reported(kind: str, data, originals) -> None:
    name = _pick(data, originals[kind], "*.safetensors")
    content = (originals[kind] / name).read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    extra_bytes = data.draw(st.binary(min_size=1, max_size=9))
    altered = data.draw(st.sampled_from([content[:length], content + extra_bytes]))
    outcome = load_damaged(originals[kind], lambda f: (f / name).write_bytes(altered))
    assert isinstance(outcome, str) and f"policy/{name}: not a complete safetensors file" in outcome


@many_examples
@given(data=st.data())
def test_damaged_index_is_reported_or_harmless(data, originals) -> None:
    content = (originals["shards"] / files.INDEX).read_bytes()
    altered = _alter(data, content, len(content))
    outcome = load_damaged(originals["shards"], lambda f: (f / files.INDEX).write_bytes(altered))
    # The change may hit a file's name, or a tensor's name, which a file then has in addition.
    assert_same_or_named(outcome, rf"{files.INDEX}|[^/]*\.safetensors")


@many_examples
@given(data=st.data())
def test_damaged_config_is_reported_or_harmless(data, originals) -> None:
    content = (originals["one file"] / "config.json").read_bytes()
    altered = _alter(data, content, len(content))
    outcome = load_damaged(
        originals["one file"], lambda f: (f / "config.json").write_bytes(altered)
    )
    # If the config is valid but another one, the error is that the weights do not fit.
    assert_same_or_named(outcome, f"config.json|{files.SINGLE}")


@many_examples
@given(data=st.data())
def test_damaged_values_are_reported_if_not_finite(data, originals) -> None:
    content = (originals["one file"] / files.SINGLE).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    altered = bytearray(content)
    for _ in range(data.draw(st.integers(1, 20))):
        # The upper bytes have sign and exponent.
        place = 4 * data.draw(st.integers(start // 4, len(content) // 4 - 1)) + 3
        altered[place] = data.draw(st.sampled_from([0x7F, 0xFF, 0x3F, 0]))
        altered[place - 1] |= data.draw(st.sampled_from([0x80, 0]))
    path = files.SINGLE
    outcome = load_damaged(originals["one file"], lambda f: (f / path).write_bytes(bytes(altered)))
    values = np.frombuffer(altered, np.float32, offset=start)
    if np.isfinite(values).all():
        assert jax.tree.all(jax.tree.map(lambda leaf: bool(np.isfinite(leaf).all()), outcome))
        shapes = jax.tree.map(np.shape, tiny.weights(POLICY))
        assert jax.tree.map(np.shape, outcome) == shapes
    else:
        assert isinstance(outcome, str) and "has values that are not finite" in outcome
        assert f"policy/{files.SINGLE}: tensor model." in outcome or "tensor lm_head" in outcome


DTYPES = [np.int8, np.uint16, np.int64, np.float64, np.bool_, np.float16, ml_dtypes.bfloat16]


def _edit(data: st.DataObject, tensors: dict[str, np.ndarray]) -> tuple[str, str]:
    """Change one tensor; return its name and the kind of change."""
    name = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(["rename", "drop", "duplicate", "reshape", "retype", "swap"]))
    other_name = data.draw(st.sampled_from(sorted(tensors)))
    if kind == "rename":
        cut = data.draw(st.integers(0, len(name) - 1))
        tensors[name[:cut] + "é" + name[cut + 1 :]] = tensors.pop(name)
    elif kind == "drop":
        del tensors[name]
    elif kind == "duplicate":
        tensors[name + data.draw(st.sampled_from(["2", ".weight", " ", "\n"]))] = tensors[name]
    elif kind == "reshape":
        sizes = {"flat": -1, "axis": (1, *tensors[name].shape), "back": tensors[name].shape[::-1]}
        tensors[name] = tensors[name].reshape(data.draw(st.sampled_from(list(sizes.values()))))
    elif kind == "retype":
        tensors[name] = tensors[name].astype(data.draw(st.sampled_from(DTYPES)))
    else:
        tensors[name], tensors[other_name] = tensors[other_name], tensors[name]
    return name, kind


@pytest.mark.parametrize("kind", KINDS)
@many_examples
@given(data=st.data())
def test_edited_tensors_are_reported_if_detectable(kind: str, data, originals) -> None:
    tensors = read_tensors(originals[kind])
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    shard = _pick(data, originals[kind], "*.safetensors")
    edited = safetensors.numpy.load_file(originals[kind] / shard)
    name, change = _edit(data, edited)
    outcome = load_damaged(
        originals[kind], lambda f: safetensors.numpy.save_file(edited, f / shard, {"format": "pt"})
    )
    types = {"float32", "float16", "bfloat16"}
    fits = all(
        shapes.get(name) == tensor.shape and str(tensor.dtype) in types
        for name, tensor in edited.items()
    )
    if fits and change != "drop":  # a change of values that cannot be detected, or none
        assert change in ("swap", "retype", "reshape") and not isinstance(outcome, str)
        assert jax.tree.map(np.shape, outcome) == jax.tree.map(np.shape, tiny.weights(POLICY))
    else:
        assert isinstance(outcome, str)
        assert f"policy/{shard}: " in outcome or f"policy/{files.INDEX}: " in outcome
        assert "tensor " in outcome and (change in ("swap", "rename") or name in outcome)


@many_examples
@given(data=st.data())
def test_edited_weight_map_is_reported_or_harmless(data, originals) -> None:
    def edit(folder: pathlib.Path) -> None:
        content = json.loads((folder / files.INDEX).read_text())
        places = content["weight_map"]
        name = data.draw(st.sampled_from(sorted(places)))
        values = st.sampled_from(sorted(set(places.values()))) | st.text(max_size=9)
        values |= st.none() | st.integers() | st.just(f"../policy/{places[name]}") | st.just([])
        key = data.draw(st.sampled_from([name, name + "x"]))
        places[key] = data.draw(values)
        (folder / files.INDEX).write_text(json.dumps(content))

    outcome = load_damaged(originals["shards"], edit)
    assert_same_or_named(outcome, rf"{files.INDEX}|[^/]*\.safetensors")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@many_examples
@given(value=JSON, header=st.booleans())
def test_arbitrary_json_as_header_or_index_is_reported(value, header: bool, originals) -> None:
    text = json.dumps(value).encode()
    name = files.SINGLE if header else files.INDEX
    content = len(text).to_bytes(8, "little") + text if header else text
    original = originals["one file" if header else "shards"]
    outcome = load_damaged(original, lambda f: (f / name).write_bytes(content))
    assert isinstance(outcome, str) and f"policy/{name}: " in outcome
