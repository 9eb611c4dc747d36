"""Trains a policy by self-play or another algorithm, as a config says.

    python -m spell_jax.train --config=configs/tiny.py --workdir=DIR [--config.steps=9 ...]

Started again on the same workdir, the run resumes from its last checkpoint: trainer/loop.py.
"""

from __future__ import annotations

from absl import flags

from spell_jax.runtime import entry
from spell_jax.trainer import flags as train_flags


def main(_) -> None:
    # Imported here, so that --help and a mistake in a flag are answered at once.
    from spell_jax.runtime import setup
    from spell_jax.runtime.files import paths
    from spell_jax.trainer.loop import train

    setup.setup()
    train(flags.FLAGS.config, paths.open_workdir(flags.FLAGS.workdir))


if __name__ == "__main__":
    # Defined here, so that one process may import several entry points.
    train_flags.define_flags()
    entry.run_main(main, describe_config=train_flags.describe_config)
