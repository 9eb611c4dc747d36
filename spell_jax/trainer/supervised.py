"""Supervised fine-tuning on (prompt, completion) rows: the learner's update with advantage 1.

Rows come from a JSONL file (question_sets/tuning_rows.py has its layouts) or from the
demonstrations of a generated world. The tokenizer comes with the policy folder; a policy with
random weights gets one trained on the rows. Each step packs `rows_per_step` rows and takes one
update on the tokens of their completions; `epochs` of a file's rows make as many steps as they
need. Rows of texts instead are trained on as they are, with
the next-token loss (continual pretraining). WORKDIR/policy is the result, a Hugging Face folder
that the trainer starts from.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import pathlib

import jax
from etils import epath

from spell_jax.config import SupervisedConfig, read_supervised, settle_dtypes
from spell_jax.learner import non_finite, update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.trees import TokenCounts
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import find_folder, read_model, shape_policy
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.question_sets import tiny_world_rows, tuning_rows
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config, plain, section
from spell_jax.runtime.files import paths, workdir_lock
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.selfplay.prompts import ROLES
from spell_jax.trainer import commits
from spell_jax.trainer.misfit import check_vocabulary, naming_changes
from spell_jax.trainer.run_files import RunFiles
from spell_jax.trainer.state import HostState, States, freeze_base, load_weights

log = logging.getLogger(__name__)
# Rows that train a new tokenizer; enough to see every word of a small corpus.
TOKENIZER_ROWS = 20_000
# A warm-up takes at most this share of the steps that `epochs` make: few rows make few steps.
WARMUP_SHARE = 0.1
# Fine-tuning commonly takes 1 to 5 epochs; more than MOST_EPOCHS are likely a mistake.
MOST_EPOCHS = 50


def make_policy(
    config: SupervisedConfig, rows: tuning_rows.RowStream | None = None
) -> tuple[pathlib.Path | None, PolicyConfig, Tokenizer]:
    """Return (folder, architecture, tokenizer) of the initial policy; no folder: random weights.

    `rows`, on which a new tokenizer is trained, are opened if they are needed and not passed.
    Errors name the field and remedy.
    """
    if config.policy.folder:
        base = find_folder(config.policy.folder)
        return base, *read_model(config.policy, base)
    if config.policy.tokenizer:
        tokenizer = tokenizers.load(config.policy.tokenizer)
    else:
        rows = rows or tuning_rows.open_rows(config.source, config.prompts, config.seed)
        first_rows = itertools.islice(rows.start(0), TOKENIZER_ROWS)
        texts = (row.prompt + row.completion for row in first_rows)
        try:
            tokenizer = tokenizers.train(texts, config.policy.vocab_size, tiny_world_rows.SYMBOLS)
        except ValueError as error:
            fields = f"source = {config.source!r}, policy.vocab_size = {config.policy.vocab_size}"
            raise ValueError(f"{fields}: {error}") from error
    # A tokenizer may leave ids without a token; the head must give them no probability.
    policy = config.policy.architecture(tokenizer.vocab_size)
    policy = dataclasses.replace(policy, unused_ids=tokenizer.gaps)
    return None, shape_policy(config.policy, policy), tokenizer


def settle_steps(config: SupervisedConfig, rows: tuning_rows.RowStream) -> SupervisedConfig:
    """Return the config with the steps, and the schedule, that `epochs` of a file's rows make.

    Log a warning if the steps train more than MOST_EPOCHS times on each row of a file. ValueError
    if `epochs` are of rows without end, or `steps` are set too.
    """
    count = len(rows.file_rows)
    if config.epochs:
        if not count:
            raise ValueError(
                f"epochs = {config.epochs}: must be 0 for source = {config.source!r}, whose rows "
                "have no end; set steps"
            )
        if config.steps != SupervisedConfig.steps:
            raise ValueError(
                f"steps = {config.steps}: has no effect with epochs = {config.epochs}; leave it "
                "out, or set epochs = 0"
            )
        # Rounded, because .1 * 30 is more than 3 in floating point.
        steps = max(1, math.ceil(round(config.epochs * count / config.rows_per_step, 6)))
        warmup = min(config.optimizer.warmup_steps, int(WARMUP_SHARE * steps))
        optimizer = dataclasses.replace(config.optimizer, total_steps=steps, warmup_steps=warmup)
        config = dataclasses.replace(config, steps=steps, optimizer=optimizer)
        log.info(
            "epochs = %g of %d rows: %d steps, of which %d warm up",
            *(config.epochs, count, steps, warmup),
        )
    if count and (repeats := config.steps * config.rows_per_step / count) > MOST_EPOCHS:
        log.warning(
            "steps = %d of %d rows train %.0f times on each of the %d rows of %s, which a policy "
            "then knows by heart; set epochs (1 to 5 are common)",
            *(config.steps, config.rows_per_step, repeats, count, config.source),
        )
    return config


def make_learner(config: SupervisedConfig, policy: PolicyConfig) -> Learner:
    mesh, dtype = config.mesh.make(), config.policy.compute_dtype
    return Learner(
        policy,
        config.optimizer,
        LossConfig(),
        config.packing,
        mesh,
        compute_dtype=dtype,
        group_names=ROLES,  # a row's role names its group
    )


def fine_tune(config: Config, workdir: epath.Path) -> epath.Path:
    """Fine-tune a policy, resuming from the last checkpoint; return the policy's folder.

    Errors are the same as in trainer.loop.train.
    """
    config = read_supervised(config)
    # Before the model is looked for: a wrong file of rows is told at once.
    rows = tuning_rows.open_rows(config.source, config.prompts, config.seed)
    config = settle_steps(config, rows)
    config = commits.pin(settle_dtypes(config, workdir), workdir)
    base, policy, tokenizer = make_policy(config, rows)
    tuning_rows.check_chats(rows.file_rows, tokenizer)
    learner = make_learner(config, policy)
    _check_fit(config, rows, learner, tokenizer)
    paths.make_workdir(workdir)
    folder = workdir / "policy"
    with workdir_lock.locked(workdir):
        with RunFiles(config, plain(section(config)), workdir) as files:
            state = _tune(config, rows, learner, base, tokenizer, files)
        weights.save(folder, *learner.export(state.params), tokenizer)
    return folder


def _check_fit(
    config: SupervisedConfig, rows: tuning_rows.RowStream, learner: Learner, tokenizer: Tokenizer
) -> None:
    """Raise ValueError if no row of the run fits a packed row: nothing would be trained."""
    largest = config.packing.largest(meshes.context_shards(learner.mesh)).size
    num_rows = config.steps * config.rows_per_step
    # Each row of a file comes once in the first epoch.
    num_rows = min(num_rows, len(rows.file_rows) or num_rows)
    sizes: list[TokenCounts] = []
    for row in itertools.islice(rows.start(0), num_rows):
        sizes.append(tuning_rows.to_group(row, tokenizer).size)
        if sizes[-1].fits(largest):
            return
    shortest = min(sizes, key=lambda size: (size.tokens, size.answers))
    budget = f"packing.token_budget = {config.packing.token_budget}"
    raise ValueError(
        f"{'packing.buckets' if config.packing.listed else budget}: no row of source = "
        f"{config.source!r} fits; a row may have {largest.tokens} tokens, {largest.answers} of "
        f"them of its completion, and the shortest has {shortest.tokens}, {shortest.answers} of "
        "them of its completion"
    )


def _tune(
    config: SupervisedConfig,
    rows: tuning_rows.RowStream,
    learner: Learner,
    base: pathlib.Path | None,
    tokenizer: Tokenizer,
    files: RunFiles,
) -> update.TrainState:
    state, step, saved = _restore_or_init(config, learner, base, files.checkpoints)
    stream = rows.start(step * config.rows_per_step)
    files.begin(step, _states(state), saved, learner.policy)
    learner.compile(state)
    # Rows that fit no packed row are counted over the whole run and logged once, at the end.
    refused = 0.0
    while step < config.steps:
        files.logger.enter("tune", step)
        step += 1
        step_rows = itertools.islice(stream, config.rows_per_step)
        groups = [tuning_rows.to_group(row, tokenizer) for row in step_rows]
        with non_finite.rows_written(files.workdir, step, tokenizer.decode):
            state, numbers = learner.update(state, groups)
        refused += numbers["refused_answers"]
        files.logger.enter("write", step, {"logprob": numbers.get("mean_logprob", 0.0)})
        metrics = None
        if step % config.log_every == 0 or step == config.steps:
            metrics = Metrics()
            metrics.merge({name: (value, 1.0) for name, value in numbers.items()}, "train/")
            metrics.add("process/update_programs", len(learner.programs))
        files.write(step, _states(state), metrics=metrics)
    files.save(step, _states(state), force=True)
    if refused:
        log.warning("%d rows were longer than packing's longest row and not trained on", refused)
    if rows.skipped:
        log.warning(
            "%s: %d lines were skipped, as logged at the start", config.source, rows.skipped
        )
    return state


def _restore_or_init(
    config: SupervisedConfig,
    learner: Learner,
    base: pathlib.Path | None,
    checkpoints: Checkpoints,
) -> tuple[update.TrainState, int, HostState]:
    """Return (state, steps done, host state) of the newest intact checkpoint, or the first ones."""
    step = checkpoints.newest_intact()
    if step:
        if base:
            freeze_base(learner, base)
        fields = plain(section(config))
        with naming_changes(fields, checkpoints.workdir):
            check_vocabulary(fields, checkpoints.workdir)
            arrays, saved = checkpoints.restore(step, {"policy": learner.fns.abstract_state})
        return arrays["policy"], step, HostState.from_json(saved, f"checkpoint of step {step}")
    if not base:
        return learner.init(jax.random.key(config.seed)), 0, HostState()
    log.info("begins with the weights of %s", base)
    return learner.init(load_weights(base, learner)), 0, HostState()


def _states(state: update.TrainState) -> States:
    return States({"policy": state}, {})
