"""A policy of random weights with a real model's shape and tokenizer: what a run needs but for
sense.

    python -m launch.random_policy --shape=CONFIG.json --tokenizer=FOLDER --out=DIR \
        [--set hidden_size=64 num_hidden_layers=2 ...]

CONFIG.json is a Hugging Face config; --set changes fields of it. Whether a config compiles and fits
a machine, how fast it is, and whether it counts, checkpoints and exports as it should, shows
without the model's download.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

import jax

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import setup as start


def make(
    shape: pathlib.Path,
    tokenizer: pathlib.Path,
    out: pathlib.Path,
    changes: Sequence[str] = (),
    dtype: str = "bfloat16",
    seed: int = 0,
) -> int:
    """Writes the folder; returns the number of parameters.

    Args:
      shape: a config.json.
      tokenizer: a folder with tokenizer files.
      out: a new folder.
      changes: FIELD=VALUE, with a JSON value.
      dtype: of the written weights.
      seed: of the weights.

    Raises:
      FileNotFoundError, ValueError: a file is missing or not understood, a change is not
        FIELD=VALUE with a field of the config, or `out` is there already.
    """
    if out.exists():
        raise ValueError(f"out = {str(out)!r}: is there already; must be a new folder")
    raw = json.loads(shape.read_text())
    for change in changes:
        field, _, value = change.partition("=")
        if field not in raw:
            raise ValueError(f"set = {change!r}: must be FIELD=VALUE with one of {sorted(raw)}")
        try:
            raw[field] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"set = {change!r}: its value is not JSON ({error})") from error
    policy, mesh = PolicyConfig.from_hf(raw), meshes.make_mesh()
    shapes, axes = transformer.abstract_params(policy)
    init = jax.jit(
        lambda key: transformer.init(policy, key),
        out_shardings=meshes.shardings(mesh, axes, shapes),
    )
    weights.save(out, policy, init(jax.random.key(seed)), tokenizers.load(tokenizer), dtype)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--set", nargs="*", default=(), metavar="FIELD=VALUE")
    parser.add_argument("--dtype", choices=list(weights.DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start.setup()
    shape, tokenizer = given.shape, given.tokenizer
    count = make(shape, tokenizer, given.out, given.set, given.dtype, given.seed)
    print(f"{given.out}: {count:,} random parameters")


if __name__ == "__main__":
    main()
