"""Tests of saving weights that two hosts hold: layer by layer, with the files of one host.

python -m tests.policy.test_weights_hosts PORT PROCESS FOLDER        # prints the results
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

from spell_jax.policy import lora, transformer, weights
from spell_jax.policy.config import LoraConfig
from tests.runtime.hosts.test_distributed import connect, run_two

pytestmark = pytest.mark.slow

SHARD_BYTES = 20_000
SHAPE = {"fsdp": 2, "expert": 2}


def make_policy(experts: int) -> tuple[Any, Any]:
    """Create a small policy and its weights on the host."""
    import dataclasses

    from tests import tiny  # touches devices

    policy = tiny.POLICY
    if experts:
        sparse: dict[str, Any] = {"experts": experts, "experts_per_token": 2, "qk_norm": True}
        policy = dataclasses.replace(policy, qkv_bias=False, **sparse)
    return policy, tiny.weights(policy)


@pytest.mark.parametrize("experts", [0, 4])
def test_first_of_two_hosts_saves_the_weights_of_both(experts: int, tmp_path: pathlib.Path) -> None:
    first, second = run_two("tests.policy.test_weights_hosts", str(tmp_path), str(experts))
    policy, params = make_policy(experts)
    weights.save(tmp_path / "alone", policy, params, shard_bytes=SHARD_BYTES)
    expected_files = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    saved_files = {path.name: path.read_bytes() for path in (tmp_path / "host_0").iterdir()}
    assert saved_files == expected_files and len(expected_files) > 4
    # A folder on the host's own disk is written by the first host only.
    assert not (tmp_path / "host_1").exists()
    # Never more than a layer, or the embedding, is gathered at once.
    largest = max(params["embedding"].size, *(leaf[0].size for leaf in _leaves(params["layers"])))
    assert first["largest"] == second["largest"] == largest
    for report in (first, second):
        assert report["spanning"] and report["after"] == 2
        assert report["error"].startswith("host 0: FileExistsError")


def test_first_of_two_hosts_saves_the_adapters_of_both(tmp_path: pathlib.Path) -> None:
    reports = run_two("tests.policy.test_weights_hosts", str(tmp_path), "adapters")
    assert all(report["spanning"] for report in reports)
    lora.save(tmp_path / "alone", *make_adapters())
    for path in (tmp_path / "alone").iterdir():
        assert (tmp_path / "host_0" / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "host_1").exists()


def make_adapters() -> tuple[Any, Any]:
    """Create a small policy with adapters, and random weights and adapters on the host."""
    import dataclasses

    import jax

    from tests import tiny  # touches devices

    policy = dataclasses.replace(tiny.POLICY, lora=LoraConfig(2, 4.0, "_proj"))
    rng = np.random.default_rng(1)
    shapes, _ = transformer.abstract_params(policy)

    def draw(leaf):
        return rng.normal(size=leaf.shape).astype(np.float32)

    return policy, jax.tree.map(draw, shapes)


def _leaves(tree: Any) -> list[np.ndarray]:
    import jax

    return jax.tree.leaves(tree)


def main() -> None:
    port, process, path, experts = sys.argv[1:]
    me, folder = connect(port, process), pathlib.Path(path)
    import jax

    from spell_jax.runtime import mesh as meshes
    from spell_jax.runtime.hosts import distributed

    adapters = experts == "adapters"
    policy, params = make_adapters() if adapters else make_policy(int(experts))
    shapes, axes = transformer.abstract_params(policy)
    places = meshes.shardings(meshes.make_mesh(SHAPE), axes, shapes)
    params = meshes.device_put(params, places)
    if adapters:
        lora.save(folder / f"host_{me}", policy, params)
        split = lora.split(policy, params)[0]
        print(json.dumps({"spanning": not jax.tree.leaves(split)[0].is_fully_addressable}))
        return
    sizes, fetch_global = [], distributed.fetch_global
    distributed.fetch_global = lambda array: (sizes.append(array.size), fetch_global(array))[1]
    weights.save(folder / f"host_{me}", policy, params, shard_bytes=SHARD_BYTES)
    (folder / "file").touch()
    error = ""
    try:
        weights.save(folder / "file" / "below", policy, params)
    except RuntimeError as failure:
        error = str(failure)
    report = {
        "spanning": any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(params)),
        "largest": max(sizes),
        "error": error,
        "after": len(distributed.gather_bytes([b"still in step"])),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
