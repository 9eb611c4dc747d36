"""Supervised fine-tuning on (prompt, completion) rows: the learner's update with advantage 1.

Rows come from a JSONL file or from the demonstrations of a generated world. The tokenizer comes
with the policy folder; a policy with random weights gets one trained on the rows. Each step packs
`rows_per_step` rows and takes one update on the tokens of their completions. Rows of texts instead
are trained on as they are, with the next-token loss (continual pretraining). WORKDIR/policy is the
result, a Hugging Face folder that the trainer starts from.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath

from spell_jax.config import SupervisedConfig, read_supervised
from spell_jax.data.samples import Sample
from spell_jax.learner import non_finite, packing, update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.chat import THOUGHT_BEGIN, THOUGHT_END
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import find_folder, read_model, shape_policy
from spell_jax.runtime import entry, hooks, paths, peers, remote, setup, workdir_lock
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.runtime.config import Config, plain, section
from spell_jax.runtime.jsonl import require_records
from spell_jax.runtime.metrics import Metrics
from spell_jax.runtime.preemption import Preemption
from spell_jax.runtime.run_logger import RunLogger
from spell_jax.selfplay import prompts
from spell_jax.trainer import saver
from spell_jax.trainer.state import load_weights, settle_dtypes
from spell_jax.warm_start import demonstrations

log = logging.getLogger(__name__)


class MakeRows(Protocol):
    """A function that makes rows without a file; config.source may name the user's own."""

    def __call__(
        self, prompts: prompts.Prompts, /, *, seed: int, start: int
    ) -> Iterator[demonstrations.Row]:
        """Yield endless rows from number `start` on; row i depends on (seed, i) alone.

        Args:
          prompts: templates of the prompts, config.prompts.
          seed: config.seed.
          start: number of the first row; a resumed run starts after the rows of its finished steps.
        """
        ...


# Rows that config.source names with one word.
GENERATED: Mapping[str, MakeRows] = {
    "tiny": functools.partial(
        demonstrations.world_demonstrations, mixture=demonstrations.DemonstrationMixture()
    ),
    "tiny_stories": functools.partial(
        demonstrations.story_demonstrations, mixture=demonstrations.StoryMixture()
    ),
}
# Rows that train a new tokenizer; enough to see every word of a small corpus.
TOKENIZER_ROWS = 20_000
TEXT = "text"  # role of rows that are texts


def read_rows(path: str | pathlib.Path) -> tuple[list[demonstrations.Row], int]:
    """Read rows of a JSONL file: "prompt", "completion" and, optionally, "role" and "task".

    A row may also have only a "text". The text becomes the completion of an empty prompt.
    Returns (rows, number of skipped lines, each logged with file and line). FileNotFoundError
    without the file, ValueError if no line of it is a row.
    """
    # Bad lines are skipped and logged; require_records raises only if no line is a row.
    file = remote.fetch(path)
    if not file.is_file():
        names = ", ".join(map(repr, GENERATED))
        raise FileNotFoundError(
            f"source = {str(path)!r}: must be {names}, {hooks.FORM} or a .jsonl of rows"
        )
    rows, skipped = require_records(file, _parse_row, f"source = {path}", "a row")
    if skipped:
        log.warning("%s: %d rows, %d lines skipped", path, len(rows), skipped)
    return rows, skipped


def _parse_row(record: Any) -> demonstrations.Row:
    is_text = "text" in record and not {"prompt", "completion"} & record.keys()
    completion = record["text" if is_text else "completion"]
    # An empty prompt or completion is a mistake in the file, except for rows of texts.
    for text in (completion,) if is_text else (record["prompt"], completion):
        if not isinstance(text, str) or not text:
            raise ValueError("prompt and completion, or text, must be texts")
        text.encode()  # raises for lone surrogates, which no tokenizer encodes
    role, task = record.get("role", TEXT if is_text else "row"), record.get("task", "")
    return demonstrations.Row("" if is_text else record["prompt"], completion, str(role), str(task))


def row_stream(config: SupervisedConfig, start: int) -> Iterator[demonstrations.Row]:
    """Iterate over rows from number `start` on, the same whether or not a run was resumed.

    The prompt templates or the file of rows are read at once; errors name the field.
    """
    if config.source in GENERATED or hooks.is_hook(config.source):
        templates = prompts.load(config.prompts)
        make_rows = GENERATED.get(config.source) or hooks.load("source", config.source)
        return make_rows(templates, seed=config.seed, start=start)
    return _shuffled(read_rows(config.source)[0], config.seed, start)


def _shuffled(
    rows: Sequence[demonstrations.Row], seed: int, start: int
) -> Iterator[demonstrations.Row]:
    """Yield rows in another order in every epoch, from number `start` on."""
    # The order of an epoch is a function of seed and epoch: a resumed run jumps to any row.
    epoch, order = -1, np.arange(0)
    for index in itertools.count(start):
        if index // len(rows) != epoch:
            epoch = index // len(rows)
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        yield rows[order[index % len(rows)]]


def find_base(config: SupervisedConfig) -> pathlib.Path | None:
    """Find the folder of the initial policy; None for random weights. Errors as in find_folder."""
    return find_folder(config.policy.folder) if config.policy.folder else None


def make_policy(
    config: SupervisedConfig, base: pathlib.Path | None
) -> tuple[PolicyConfig, tokenizers.Tokenizer]:
    """Make architecture and tokenizer of the initial policy; `base` is the folder of find_base.

    Errors name the field and remedy.
    """
    if base:
        return read_model(config.policy, base)
    if config.policy.tokenizer:
        tokenizer = tokenizers.load(config.policy.tokenizer)
    else:
        rows = itertools.islice(row_stream(config, 0), TOKENIZER_ROWS)
        texts = (row.prompt + row.completion for row in rows)
        tokenizer = tokenizers.train(texts, config.policy.vocab_size, demonstrations.SYMBOLS)
    # A tokenizer may leave ids without a token; the head must give them no probability.
    policy = config.policy.architecture(tokenizer.vocab_size)
    policy = dataclasses.replace(policy, unused_ids=tokenizer.gaps)
    return shape_policy(config.policy, policy), tokenizer


def to_group(row: demonstrations.Row, tokenizer: tokenizers.Tokenizer) -> packing.TrainGroup:
    """Turn a row into a training group of one answer with advantage 1.

    A text without a prompt gets no chat layout and no stop token: each token follows from earlier
    tokens. The first token is only context, unless the tokenizer begins texts with a token.
    """
    if not row.prompt:
        tokens = [*tokenizer.start_ids, *tokenizer.encode(row.completion)]
        if len(tokens) < 2:
            raise ValueError(f"source: text {row.completion!r}: must have at least 2 tokens")
        continuation = Sample(np.array(tokens[1:], np.int32), stopped=False)
        return packing.TrainGroup(tokens[:1], [continuation], [1.0], row.role)
    completion = row.completion
    if thought := tokenizer.open_thought(row.prompt):
        completion = continue_thought(thought, completion)
    answer = [*tokenizer.encode_answer(completion), tokenizer.turn_end_id]
    sample = Sample(np.array(answer, np.int32))
    return packing.TrainGroup(tokenizer.chat(row.prompt), [sample], [1.0], row.role)


def continue_thought(thought: str, completion: str) -> str:
    """Return what follows `thought`, the start of a thought that the prompt already holds.

    A completion that thinks loses its own start of the thought. Any other completion closes the
    thought before it answers: otherwise the policy would learn to answer inside the thought.
    """
    # The chat template of a reasoning model may end a prompt with the start of a thought.
    begun = completion.lstrip()
    if not begun.startswith(THOUGHT_BEGIN):
        return completion if THOUGHT_END in completion else f"{THOUGHT_END}\n\n{completion}"
    thinking = begun.removeprefix(THOUGHT_BEGIN)
    space = thought.removeprefix(THOUGHT_BEGIN)
    return thinking.removeprefix(space) if space else thinking


def make_learner(config: SupervisedConfig, policy: PolicyConfig) -> Learner:
    return Learner(
        policy,
        config.optimizer,
        LossConfig(),
        config.packing,
        meshes.make_mesh(dataclasses.asdict(config.mesh)),
        compute_dtype=config.policy.compute_dtype,
    )


def fine_tune(config: Config, workdir: epath.Path) -> epath.Path:
    """Fine-tune a policy, resuming from the last checkpoint; return the policy's folder.

    Errors are the same as in trainer.loop.train.
    """
    config = settle_dtypes(read_supervised(config), workdir)
    base = find_base(config)
    policy, tokenizer = make_policy(config, base)
    learner = make_learner(config, policy)
    paths.make_workdir(workdir)
    folder = workdir / "policy"
    with workdir_lock.locked(workdir):
        with (
            Preemption(config.preemption_limit_s) as preemption,
            Checkpoints(workdir, keep=1, every=config.checkpoint_every) as checkpoints,
            peers.announced(),
        ):
            state = _steps(config, learner, base, tokenizer, workdir, checkpoints, preemption)
        weights.save(folder, *learner.export(state.params), tokenizer)
    return folder


def _steps(
    config: SupervisedConfig,
    learner: Learner,
    base: pathlib.Path | None,
    tokenizer: tokenizers.Tokenizer,
    workdir: epath.Path,
    checkpoints: Checkpoints,
    preemption: Preemption,
) -> update.TrainState:
    saved = plain(section(config))
    if jax.process_index() == 0:
        setup.write_config(saved, workdir)
    finished_steps, host_state = checkpoints.newest_intact() or 0, {}
    if finished_steps:
        if base and learner.policy.lora:  # the checkpoint has the adapters only
            learner.freeze(load_weights(base, learner))
        states, host_state = checkpoints.restore(
            finished_steps, {"policy": learner.fns.abstract_state}
        )
        state = states["policy"]
    elif base:
        state = learner.init(load_weights(base, learner))
    else:
        state = learner.init(jax.random.key(config.seed))
    stream = row_stream(config, finished_steps * config.rows_per_step)
    entry.setup_done()  # from here on an error is a crash, not a mistake of the user
    learner.compile(state)
    # Rows that fit no packed row are counted over the whole run and logged once, at the end.
    refused = 0.0
    options = {"wandb": config.wandb, "config": saved}
    with RunLogger(workdir, config.steps, finished_steps, host_state, **options) as logger:

        def save(force: bool) -> None:
            # The closure reads `step` and `state` when it is called, so it saves the newest of
            # both.
            is_due = step % config.checkpoint_every == 0
            if force or is_due:
                logger.enter("save", step)
            states = {"policy": state}
            saver.save_step(logger, checkpoints, step, states, {}, is_due=is_due, force=force)

        for step in range(finished_steps + 1, config.steps + 1):
            logger.enter("tune", step - 1)
            rows = itertools.islice(stream, config.rows_per_step)
            groups = [to_group(row, tokenizer) for row in rows]
            with non_finite.rows_written(workdir, step, tokenizer.decode):
                state, numbers = learner.update(state, groups)
            refused += numbers["refused_answers"]
            logger.enter("write", step, {"logprob": numbers.get("mean_logprob", 0.0)})
            if step % config.log_every == 0 or step == config.steps:
                metrics = Metrics()
                metrics.merge({name: (value, 1.0) for name, value in numbers.items()}, "train/")
                metrics.add("process/update_programs", len(learner.programs))
                with saver.saving_on_disk_errors(save, step):
                    logger.write(step, metrics)
            # All hosts ask at the same step, so that all save the same checkpoint.
            must_stop = preemption.should_stop()
            save(force=must_stop or step == config.steps)
            if must_stop:
                preemption.stop()
    if refused:
        log.warning("%d rows were longer than packing's longest row and not trained on", refused)
    return state
