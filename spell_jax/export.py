"""Writes the policy of a run's checkpoint as a Hugging Face folder.

    python -m spell_jax.export --workdir=W --out=DIR [--step=N] [--dtype=float32] [--adapters]

1. W is the workdir of train.py. The folder that the run started from (W/config.json names it)
   supplies the architecture and the tokenizer.
2. The weights are those of the newest intact checkpoint, or of --step. Optimizer state is not read.
3. DIR gets config.json, sharded safetensors, tokenizer files and generation_config.json, or, after
   an error, nothing. Adapters are merged into their base; --adapters writes them alone, in PEFT's
   format.
"""

from __future__ import annotations

from absl import flags

from spell_jax.policy import weights
from spell_jax.runtime import entry, paths, setup
from spell_jax.trainer.export import export


def main(_) -> None:
    setup.setup()
    given = flags.FLAGS
    workdir, out = map(paths.open_folder, (given.workdir, given.out))
    step = export(workdir, out, given.step, given.dtype, given.adapters)
    print(f"{out}: the policy after step {step}")


if __name__ == "__main__":
    # Defined here, so that one process may import several entry points.
    flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    flags.DEFINE_string("out", None, "New folder to write.", required=True)
    flags.DEFINE_integer("step", None, "Step of the checkpoint; the latest by default.")
    flags.DEFINE_enum("dtype", "bfloat16", list(weights.DTYPES), "Dtype of the written weights.")
    flags.DEFINE_bool("adapters", False, "Write the adapters alone, in PEFT's format.")
    entry.run_main(main)
