"""Supervised fine-tuning, on your own rows or as a warm start for self-play.

    python -m spell_jax.sft --config=configs/fine_tune.py --workdir=DIR \\
        --config.policy.folder=FOLDER --config.source=ROWS.jsonl
    python -m spell_jax.sft --config=configs/tiny_warm_start.py --workdir=DIR

A line of ROWS.jsonl has one of these layouts:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}  (both texts or both lists of messages)
    {"prompt": "...", "solution": "..."}  (likewise)
    {"text": "..."}  (no chat layout, a loss on every token)

DIR/policy is the result, a Hugging Face folder that spell_jax.train and spell_jax.generate start
from. Started again on the same DIR, the run resumes from its last checkpoint; it handles preemption
as spell_jax.train does. docs/howto/fine_tune.md has more.
"""

from __future__ import annotations

import functools

from absl import flags

from spell_jax.runtime import entry
from spell_jax.trainer import flags as train_flags


def main(_) -> None:
    # Imported here, so that --help and a mistake in a flag are answered at once.
    from spell_jax.runtime import setup
    from spell_jax.runtime.files import paths
    from spell_jax.trainer.supervised import fine_tune

    setup.setup()
    print(fine_tune(flags.FLAGS.config, paths.open_workdir(flags.FLAGS.workdir)))


if __name__ == "__main__":
    # Defined here, so that one process may import several entry points.
    train_flags.define_flags()
    describe_config = functools.partial(train_flags.describe_config, is_run=False)
    entry.run_main(main, describe_config=describe_config)
