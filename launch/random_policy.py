"""Write a policy of random weights with a real model's architecture and tokenizer.

    python -m launch.random_policy --shape=CONFIG.json --tokenizer=FOLDER --out=DIR \\
        [--set hidden_size=64 num_hidden_layers=2 ...]

CONFIG.json is a Hugging Face config; --set changes its fields. Such a policy can test a config
without downloading the model: whether it compiles and fits a machine, how fast it is, and whether
metrics, checkpoints and export work.
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
from spell_jax.runtime import entry
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
    """Write a new policy folder `out` of random weights; return the number of parameters.

    `shape` is a Hugging Face config.json; `changes` are FIELD=VALUE with a JSON value.
    """
    if out.exists():
        raise ValueError(f"out = {str(out)!r}: exists already; must be a new folder")
    raw = json.loads(shape.read_text())
    for change in changes:
        field, _, value = change.partition("=")
        if field not in raw:
            raise ValueError(f"set = {change!r}: must be FIELD=VALUE with one of {sorted(raw)}")
        try:
            raw[field] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"set = {change!r}: its value is not JSON ({error})") from error
    # Mistakes in the arguments show before this line; making the mesh opens the devices.
    policy, mesh = PolicyConfig.from_hf(raw), meshes.make_mesh()
    words = tokenizers.load(tokenizer)
    entry.setup_done()
    shapes, axes = transformer.abstract_params(policy)
    # Jitted with output shardings, so that no device ever holds the whole policy.
    init = jax.jit(
        lambda key: transformer.init(policy, key),
        out_shardings=meshes.shardings(mesh, axes, shapes),
    )
    weights.save(out, policy, init(jax.random.key(seed)), words, dtype)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m launch.random_policy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", type=pathlib.Path, required=True, help="Hugging Face config.json")
    add("--tokenizer", type=pathlib.Path, required=True, help="folder of the tokenizer")
    add("--out", type=pathlib.Path, required=True, help="new folder to write")
    add("--set", nargs="*", default=(), metavar="FIELD=VALUE", help="changes of the config")
    add("--dtype", choices=list(weights.DTYPES), default="bfloat16", help="of the weights")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    start.setup()
    shape, tokenizer = options.shape, options.tokenizer
    count = make(shape, tokenizer, options.out, options.set, options.dtype, options.seed)
    print(f"{options.out}: {count:,} random parameters")


if __name__ == "__main__":
    with entry.user_errors():
        main()
