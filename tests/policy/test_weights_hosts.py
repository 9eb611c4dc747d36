"""Weights that two hosts hold together are saved by one, layer by layer, as one host saves them.

python -m tests.policy.test_weights_hosts PORT PROCESS FOLDER        # prints what became of it
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

from spell_jax.policy import weights
from tests.runtime.test_hosts import connect, run_two

SHARD_BYTES = 20_000
SHAPE = {"fsdp": 2, "expert": 2}


def make_policy(experts: int) -> tuple[Any, Any]:
    """A small policy and its weights on the host."""
    import dataclasses

    from tests import tiny  # touches devices

    policy = tiny.POLICY
    if experts:
        sparse: dict[str, Any] = {"experts": experts, "experts_per_token": 2, "qk_norm": True}
        policy = dataclasses.replace(policy, qkv_bias=False, **sparse)
    return policy, tiny.weights(policy)


@pytest.mark.parametrize("experts", [0, 4])
def test_one_of_two_hosts_saves_what_both_hold(experts: int, tmp_path: pathlib.Path) -> None:
    first, second = run_two("tests.policy.test_weights_hosts", str(tmp_path), str(experts))
    policy, params = make_policy(experts)
    weights.save(tmp_path / "alone", policy, params, shard_bytes=SHARD_BYTES)
    alone = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    saved = {path.name: path.read_bytes() for path in (tmp_path / "host_0").iterdir()}
    assert saved == alone and len(alone) > 4
    # A folder of its own is written by the first alone.
    assert not (tmp_path / "host_1").exists()
    # No more than a layer, or the embedding, is gathered at once.
    largest = max(params["embedding"].size, *(leaf[0].size for leaf in _leaves(params["layers"])))
    assert first["largest"] == second["largest"] == largest
    for told in (first, second):
        assert told["spanning"] and told["after"] == 2
        assert told["error"].startswith("host 0: FileExistsError")


def _leaves(tree: Any) -> list[np.ndarray]:
    import jax

    return jax.tree.leaves(tree)


def main() -> None:
    port, process, path, experts = sys.argv[1:]
    me, folder = connect(port, process), pathlib.Path(path)
    import jax

    from spell_jax.policy import transformer
    from spell_jax.runtime import hosts
    from spell_jax.runtime import mesh as meshes

    policy, params = make_policy(int(experts))
    shapes, axes = transformer.abstract_params(policy)
    places = meshes.shardings(meshes.make_mesh(SHAPE), axes, shapes)
    params = meshes.put(params, places)
    sizes, whole = [], hosts.whole
    hosts.whole = lambda array: (sizes.append(array.size), whole(array))[1]
    weights.save(folder / f"host_{me}", policy, params, shard_bytes=SHARD_BYTES)
    (folder / "file").touch()
    error = ""
    try:
        weights.save(folder / "file" / "below", policy, params)
    except RuntimeError as failure:
        error = str(failure)
    told = {
        "spanning": any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(params)),
        "largest": max(sizes),
        "error": error,
        "after": len(hosts.gather_bytes([b"still in step"])),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
