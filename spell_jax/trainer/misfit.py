"""Reasons why a checkpoint does not fit a run: the fields that shape its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from spell_jax.config import model_sections
from spell_jax.runtime import setup
from spell_jax.runtime.config import changes
from spell_jax.runtime.files.checkpoint import MisfitError

# Fields that decide which tensors a checkpoint has, and their shapes. Those of a model's section:
_FOLDERS = ("folder", "tokenizer")
_SHAPES = (
    *("lora_rank", "lora_pattern", "base_dtype", "vocab_size", "width", "layers", "heads"),
    *("kv_heads", "head_size", "feed_forward"),
)
# Those that choose the rows of supervised tuning:
_ROWS = ("source", "prompts", "seed")
# All others: which models and optimizers there are.
_MODELS = (
    *("algorithm.name", "algorithm.reader.source", "optimizer.name", "loss.objective"),
    *("loss.kl_weight", "loss.distillation_weight", "loss.old_logprobs"),
)


@contextlib.contextmanager
def naming_changes(
    fields: Mapping[str, Any], workdir: epath.Path, resumes: bool = True
) -> Iterator[None]:
    """Name the fields of the config that make a checkpoint of `workdir` unfit, in a MisfitError.

    `fields` are the config as JSON values. A run that `resumes` reads all models of its workdir.
    Otherwise only the policy is read, from another run, which may have begun with another folder:
    folders are then named only if no other field differs. The first tensor that differs follows.
    Without such a field the error names tensors alone.
    """
    try:
        yield
    except MisfitError as error:
        lines = changes(fields, setup.saved_config(workdir))
        models = model_sections(fields) if resumes else ["policy"]
        shapes = [f"{model}.{field}" for model in models for field in _SHAPES]
        folders = [f"{model}.{field}" for model in models for field in _FOLDERS]
        if resumes:
            optimizers = [f"{model}.optimizer.name" for model in models]
            rows = _vocabulary_fields(fields)
            lines = _of_fields(lines, (*shapes, *folders, *rows, *_MODELS, *optimizers))
        else:
            lines = _of_fields(lines, shapes) or _of_fields(lines, folders)
        if not lines:
            raise
        raise MisfitError(
            f"{'; '.join(lines)} in the run of {workdir}, so its checkpoints do not fit; must be "
            "the same, or begin a new run in another workdir, without init_from "
            f"({error.first})",
            error.first,
        ) from error


def check_vocabulary(fields: Mapping[str, Any], workdir: epath.Path) -> None:
    """Raise MisfitError if a vocabulary is trained on other rows than in the run of `workdir`.

    A vocabulary of the same size gives tensors of the same shapes, whose rows are other tokens.
    """
    if _of_fields(changes(fields, setup.saved_config(workdir)), _vocabulary_fields(fields)):
        reason = "the vocabulary is trained on the rows"
        raise MisfitError(f"{workdir}: the checkpoints do not fit: {reason}", reason)


def _vocabulary_fields(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of the rows that a vocabulary is trained on; () if none is trained."""
    return () if any(fields["policy"].get(name) for name in _FOLDERS) else _ROWS


def _of_fields(lines: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Return the lines of `changes` about some fields."""
    return [line for line in lines if line.split(" = ")[0] in fields]
