"""Writes the policy of a run's checkpoint as a Hugging Face folder.

    python -m spell_jax.export --workdir=W --out=DIR [--step=N] [--dtype=float32] [--adapters]

1. W is the workdir of train.py. The folder that the run started from (W/config.json names it) has
   the architecture and the tokenizer.
2. The weights are those of the newest intact checkpoint, or of --step; optimizer state is not read.
3. DIR gets config.json, safetensors in shards, tokenizer files and generation_config.json, whole or
   not at all. Adapters are merged into their base, or, with --adapters, written alone in PEFT's
   format.
"""

from __future__ import annotations

import json

from absl import app, flags
from etils import epath
from ml_collections import ConfigDict

from spell_jax.policy import lora, weights
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import paths
from spell_jax.runtime import setup as start
from spell_jax.runtime.config import Config
from spell_jax.trainer import build as catalogue
from spell_jax.trainer.state import read_weights


def export(
    workdir: epath.Path,
    out: epath.Path,
    step: int | None = None,
    dtype: str = "bfloat16",
    adapters: bool = False,
) -> int:
    """Writes the folder; returns the step that it is of.

    Raises:
      FileNotFoundError: the workdir has no config or no complete checkpoint, or the policy's
        folder is gone.
      ValueError: the checkpoint does not fit the folder, there are no adapters, or `out` is there
        already.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"out = {str(out)!r}: is there already; must be a new folder")
    config = read_config(workdir)
    folder = catalogue.find_policy(config)
    policy, tokenizer = catalogue.read_policy(config, folder)
    if adapters and policy.lora is None:
        raise ValueError(f"policy.lora_rank = 0: the run of {workdir} has no adapters to write")
    mesh = meshes.make_mesh()
    step, params = read_weights(epath.Path(workdir), policy, mesh, step)
    if adapters:
        lora.save(out, policy, params, str(folder))
        return step
    if policy.lora:
        params = lora.join(params, weights.load(folder, mesh, config.policy.compute_dtype)[1])
    weights.save(out, *lora.merge(policy, params), tokenizer, dtype)
    return step


def read_config(workdir: epath.Path) -> Config:
    """The config that the run has written.

    Raises:
      FileNotFoundError, ValueError: there is none, or it is of another entry than train.py.
    """
    path = workdir / start.CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; --workdir must be the folder of a run")
    config = json.loads(path.read_text())
    if "algorithm" not in config:
        raise ValueError(f"{path}: not the config of train.py; sft.py writes a folder at its end")
    return ConfigDict(config)


def main(_) -> None:
    start.setup()
    given = flags.FLAGS
    workdir, out = map(paths.open_folder, (given.workdir, given.out))
    step = export(workdir, out, given.step, given.dtype, given.adapters)
    print(f"{out}: the policy after step {step}")


if __name__ == "__main__":
    # Defined here, so that one process may import several entries.
    flags.DEFINE_string("workdir", None, "A run's folder.", required=True)
    flags.DEFINE_string("out", None, "The folder to write.", required=True)
    flags.DEFINE_integer("step", None, "Of which checkpoint; the latest by default.")
    flags.DEFINE_enum("dtype", "bfloat16", list(weights.DTYPES), "Of the written weights.")
    flags.DEFINE_bool("adapters", False, "Write the adapters alone, in PEFT's format.")
    app.run(main)
