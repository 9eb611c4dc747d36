"""Supervised warm start: the same update as self-play, with advantage 1.

    python -m spell_jax.sft --config=configs/tiny_warm_start.py --workdir=DIR
    python -m spell_jax.sft --config=configs/folder_warm_start.py --workdir=DIR \
        --config.source=ROWS.jsonl

1. Rows are (prompt, completion) texts: a JSONL file, or demonstrations of a generated world.
2. The tokenizer comes with the policy folder; a policy from random weights gets one trained on the
   rows.
3. Each step packs `rows_per_step` rows and takes one update on the completions' tokens.
4. DIR/policy is the result: a Hugging Face folder that train.py and generate.py start from.
5. Started again on the same DIR, it goes on where the last checkpoint stands; a machine that is
   taken away ends it with the code of runtime/preemption.py, as train.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import app, flags
from etils import epath
from ml_collections import config_flags

from spell_jax.learner import loss, non_finite, packing, update
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import paths
from spell_jax.runtime import setup as start
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.runtime.config import Config, build, plain
from spell_jax.runtime.jsonl import read_records
from spell_jax.runtime.metrics import Metrics
from spell_jax.runtime.preemption import Preempted, Preemption
from spell_jax.runtime.run_logger import Recorder
from spell_jax.selfplay import prompts
from spell_jax.warm_start import demonstrations, story_rows

log = logging.getLogger("spell_jax.sft")  # __name__ is __main__ when this is the entry

# Values of config.source that are no path: prompts, seed, first row -> endless rows.
GENERATED = {
    "tiny": lambda prompts, *at: demonstrations.rows(prompts, demonstrations.Mixture(), *at),
    "tiny_stories": lambda prompts, *at: story_rows.rows(prompts, story_rows.StoryMixture(), *at),
}
# Rows from which a new tokenizer is trained: enough to see every word of a small corpus.
TOKENIZER_ROWS = 20_000


def read_rows(path: str | pathlib.Path) -> tuple[list[demonstrations.Row], int]:
    """Rows of a JSONL file with "prompt" and "completion" ("role" and "task" are optional).

    Returns:
      (rows, number of lines that were skipped; each is logged with file and line).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: no line of it is a row.
    """
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"source = {str(path)!r}: must be 'tiny' or a .jsonl of rows")
    rows, skipped = read_records(path, _parse_row)
    if not rows:
        raise ValueError(f"source = {path}: none of its {skipped} lines is a row")
    if skipped:
        log.warning("%s: %d rows, %d lines skipped", path, len(rows), skipped)
    return rows, skipped


def _parse_row(record: Any) -> demonstrations.Row:
    texts = record["prompt"], record["completion"]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("prompt and completion must be texts")
    "".join(texts).encode()  # lone surrogates cannot be learned
    return demonstrations.Row(*texts, str(record.get("role", "row")), str(record.get("task", "")))


def row_stream(config: Config, start: int) -> Iterator[demonstrations.Row]:
    """Rows from the `start`-th on; the same ones whether a run was resumed or not."""
    if config.source in GENERATED:
        yield from GENERATED[config.source](prompts.load(config.prompts), config.seed, start)
    rows, _ = read_rows(config.source)
    epoch, order = -1, np.arange(0)
    for index in itertools.count(start):
        if index // len(rows) != epoch:
            epoch = index // len(rows)
            order = np.random.default_rng([config.seed, epoch]).permutation(len(rows))
        yield rows[order[index % len(rows)]]


def make_policy(config: Config) -> tuple[PolicyConfig, tokenizers.Tokenizer]:
    """Architecture and tokenizer of the policy to start from.

    Raises:
      ValueError, FileNotFoundError: naming the field, its value and what would be right.
    """
    section = dict(config.policy)
    folder, given = section.pop("folder"), section.pop("tokenizer")
    section.pop("compute_dtype")
    if folder:
        if not pathlib.Path(folder).is_dir():
            raise FileNotFoundError(f"policy.folder = {folder!r}: must be a Hugging Face folder")
        policy, tokenizer = weights.identify(folder)
        return dataclasses.replace(policy, remat=section["remat"]), tokenizer
    if given:
        tokenizer = tokenizers.load(given)
    else:
        rows = itertools.islice(row_stream(config, 0), TOKENIZER_ROWS)
        texts = (row.prompt + row.completion for row in rows)
        tokenizer = tokenizers.train(texts, section["vocab_size"], demonstrations.SYMBOLS)
    section["vocab_size"] = tokenizer.vocab_size
    return build(PolicyConfig, section, "policy"), tokenizer


def to_group(row: demonstrations.Row, tokenizer: tokenizers.Tokenizer) -> packing.Group:
    """A row as a group of one answer with advantage 1."""
    answer = [*tokenizer.encode(row.completion), tokenizer.eos_id]
    return packing.Group(tokenizer.chat(row.prompt), [answer], [1.0], row.role)


def make_learner(config: Config, policy: PolicyConfig) -> update.Learner:
    return update.Learner(
        policy,
        build(update.OptimizerConfig, config.optimizer, "optimizer", total_steps=config.steps),
        loss.LossConfig(),
        build(packing.PackingConfig, config.packing, "packing"),
        meshes.make_mesh(config.mesh),
        compute_dtype=config.policy.compute_dtype,
    )


def run(config: Config, workdir: epath.Path) -> epath.Path:
    """Tunes and returns the folder of the resulting policy.

    Raises:
      ValueError, FileNotFoundError: naming the field, its value and what would be right.
      Preempted, NonFinite: as train.train.
    """
    for field in ("steps", "rows_per_step", "log_every", "checkpoint_every"):
        if config[field] < 1:
            raise ValueError(f"{field} = {config[field]}: must be at least 1")
    policy, tokenizer = make_policy(config)
    learner = make_learner(config, policy)
    workdir.mkdir(parents=True, exist_ok=True)
    with (
        Preemption(config.preemption_limit_s) as preemption,
        Checkpoints(workdir, keep=1, every=config.checkpoint_every) as checkpoints,
    ):
        state = _run(config, learner, tokenizer, workdir, checkpoints, preemption)
    folder = workdir / "policy"
    weights.save(folder, policy, state.params, tokenizer)
    return folder


def _run(
    config: Config,
    learner: update.Learner,
    tokenizer: tokenizers.Tokenizer,
    workdir: epath.Path,
    checkpoints: Checkpoints,
    preemption: Preemption,
) -> update.TrainState:
    """All steps; the state behind the last one."""
    if jax.process_index() == 0:
        start.write_config(plain(config), workdir)
    done = checkpoints.newest_intact() or 0
    if done:
        state, _ = checkpoints.restore(done, learner.abstract_state())
    elif config.policy.folder:
        state = learner.init(weights.load(config.policy.folder, learner.mesh)[1])
    else:
        state = learner.init(jax.random.key(config.seed))
    learner.compile(state)
    stream = row_stream(config, done * config.rows_per_step)
    refused = 0.0
    options = {"wandb": config.wandb, "config": plain(config)}
    with Recorder(workdir, config.steps, done, **options) as recorder:
        for step in range(done + 1, config.steps + 1):
            recorder.enter("tune", step - 1)
            rows = itertools.islice(stream, config.rows_per_step)
            groups = [to_group(row, tokenizer) for row in rows]
            with non_finite.rows_written(workdir, step, tokenizer.decode):
                state, numbers = learner.update(state, groups)
            refused += numbers["refused_answers"]
            recorder.enter("write", step, {"logprob": numbers.get("mean_logprob", 0.0)})
            if step % config.log_every == 0 or step == config.steps:
                metrics = Metrics()
                metrics.merge({name: (value, 1.0) for name, value in numbers.items()}, "train/")
                recorder.write(step, metrics)
            must_stop = preemption.should_stop()
            force = must_stop or step == config.steps
            if force or step % config.checkpoint_every == 0:
                recorder.enter("save", step)
                recorder.flush()
            checkpoints.save(step, state, {}, force=force)
            if must_stop:
                raise Preempted(preemption.why)
    if refused:
        log.warning("%d rows were longer than the largest bucket and not learned", refused)
    return state


def main(_) -> None:
    start.setup()
    print(run(flags.FLAGS.config, paths.open_folder(flags.FLAGS.workdir)))


if __name__ == "__main__":
    # Defined here, so that one process may import several entries.
    config_flags.DEFINE_config_file("config", None, "The run's configuration.")
    flags.DEFINE_string("workdir", None, "The run's folder.")
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
