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

from spell_jax.config import SupervisedConfig, read_supervised, settle_dtypes
from spell_jax.data.samples import Sample
from spell_jax.learner import non_finite, packing, update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.chat import THOUGHT_BEGIN, THOUGHT_END
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import find_folder, read_model, shape_policy
from spell_jax.question_sets import tiny_world_rows
from spell_jax.question_sets.rows import Row
from spell_jax.runtime import hooks, paths, remote, workdir_lock
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.runtime.config import Config, plain, section
from spell_jax.runtime.jsonl import require_records
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import prompts
from spell_jax.trainer.run_files import RunFiles
from spell_jax.trainer.state import HostState, States, freeze_base, load_weights

log = logging.getLogger(__name__)


class MakeRows(Protocol):
    """A function that makes rows without a file; config.source may name the user's own."""

    def __call__(self, prompts: prompts.Prompts, /, *, seed: int, start: int) -> Iterator[Row]:
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
        tiny_world_rows.world_demonstrations, mixture=tiny_world_rows.DemonstrationMixture()
    ),
    "tiny_stories": functools.partial(
        tiny_world_rows.story_demonstrations, mixture=tiny_world_rows.StoryMixture()
    ),
}
# Rows that train a new tokenizer; enough to see every word of a small corpus.
TOKENIZER_ROWS = 20_000
TEXT = "text"  # role of rows that are texts


def read_rows(path: str | pathlib.Path) -> tuple[list[Row], int]:
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


def _parse_row(record: Any) -> Row:
    is_text = "text" in record and not {"prompt", "completion"} & record.keys()
    completion = record["text" if is_text else "completion"]
    # An empty prompt or completion is a mistake in the file, except for rows of texts.
    for text in (completion,) if is_text else (record["prompt"], completion):
        if not isinstance(text, str) or not text:
            raise ValueError("prompt and completion, or text, must be texts")
        text.encode()  # raises for lone surrogates, which no tokenizer encodes
    role, task = record.get("role", TEXT if is_text else "row"), record.get("task", "")
    return Row("" if is_text else record["prompt"], completion, str(role), str(task))


def row_stream(config: SupervisedConfig, start: int) -> Iterator[Row]:
    """Iterate over rows from number `start` on, the same whether or not a run was resumed.

    The prompt templates or the file of rows are read at once; errors name the field.
    """
    if config.source in GENERATED or hooks.is_hook(config.source):
        templates = prompts.load(config.prompts)
        make_rows = GENERATED.get(config.source) or hooks.load("source", config.source)
        return make_rows(templates, seed=config.seed, start=start)
    return _shuffled(read_rows(config.source)[0], config.seed, start)


def _shuffled(rows: Sequence[Row], seed: int, start: int) -> Iterator[Row]:
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
        tokenizer = tokenizers.train(texts, config.policy.vocab_size, tiny_world_rows.SYMBOLS)
    # A tokenizer may leave ids without a token; the head must give them no probability.
    policy = config.policy.architecture(tokenizer.vocab_size)
    policy = dataclasses.replace(policy, unused_ids=tokenizer.gaps)
    return shape_policy(config.policy, policy), tokenizer


def to_group(row: Row, tokenizer: tokenizers.Tokenizer) -> packing.TrainGroup:
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
        group_names=prompts.ROLES,  # a row's role names its group
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
        with RunFiles(config, plain(section(config)), workdir) as files:
            state = _tune(config, learner, base, tokenizer, files)
        weights.save(folder, *learner.export(state.params), tokenizer)
    return folder


def _tune(
    config: SupervisedConfig,
    learner: Learner,
    base: pathlib.Path | None,
    tokenizer: tokenizers.Tokenizer,
    files: RunFiles,
) -> update.TrainState:
    state, step, saved = _restore_or_init(config, learner, base, files.checkpoints)
    stream = row_stream(config, step * config.rows_per_step)
    files.begin(step, _states(state), saved)
    learner.compile(state)
    # Rows that fit no packed row are counted over the whole run and logged once, at the end.
    refused = 0.0
    while step < config.steps:
        files.logger.enter("tune", step)
        step += 1
        rows = itertools.islice(stream, config.rows_per_step)
        groups = [to_group(row, tokenizer) for row in rows]
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
        arrays, saved = checkpoints.restore(step, {"policy": learner.fns.abstract_state})
        return arrays["policy"], step, HostState.from_json(saved, f"checkpoint of step {step}")
    first = load_weights(base, learner) if base else jax.random.key(config.seed)
    return learner.init(first), 0, HostState()


def _states(state: update.TrainState) -> States:
    return States({"policy": state}, {})
