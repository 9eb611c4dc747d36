"""A checkpoint's policy as a Hugging Face folder: the body of spell_jax/export.py."""

from __future__ import annotations

import logging
import pathlib

from etils import epath
from ml_collections import ConfigDict

from spell_jax.config import read_supervised
from spell_jax.policy import lora, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import find_folder, read_model
from spell_jax.policy.products import resolve_dtype
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime import entry
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config, ConfigError
from spell_jax.runtime.files import hub, paths
from spell_jax.runtime.files.jsonl import read_json
from spell_jax.runtime.files.paths import CONFIG_FILE
from spell_jax.trainer import supervised
from spell_jax.trainer.state import read_weights

log = logging.getLogger(__name__)


def export(
    workdir: epath.Path,
    out: epath.Path,
    step: int | None = None,
    dtype: str = "bfloat16",
    adapters: bool = False,
) -> int:
    """Write the policy of a checkpoint as a Hugging Face folder; return the checkpoint's step.

    `step` defaults to the newest intact checkpoint; `dtype` applies to the written weights. With
    `adapters` only the LoRA adapters are written, in PEFT's format; otherwise they are merged into
    their base. FileNotFoundError if the workdir has no config or no complete checkpoint, or the
    policy's folder is gone. ValueError if the checkpoint does not fit the folder, there are no
    adapters to write, or `out` holds files.
    """
    # Before any weight is read: a full folder or a missing config is told at once.
    check_new(out)
    config = read_config(workdir)
    try:
        folder, policy, tokenizer = _make_policy(config)
    except (AttributeError, ConfigError, KeyError, TypeError) as error:  # damaged or of another run
        message = f"{workdir / CONFIG_FILE}: not the config of a run ({error})"
        raise ValueError(message) from error
    if adapters and policy.lora is None:
        raise ValueError(f"policy.lora_rank = 0: the run of {workdir} has no adapters to write")
    # The mesh of this machine, not of the run: a checkpoint is restored into any sharding.
    mesh = meshes.make_mesh()
    step, params = read_weights(epath.Path(workdir), policy, mesh, step)
    if policy.lora and not adapters:
        # The checkpoint has the adapters only. The base is read in the dtype that the run trained
        # with.
        assert folder is not None  # random weights have no adapters (policy.lora_rank)
        base_dtype = resolve_dtype(config.policy.compute_dtype, mesh)
        frozen = weights.load(folder, mesh, base_dtype, policy.has_int8_base)[1]
        params = lora.join(params, frozen)
        log.info(
            "the adapters are merged in float32 and rounded to %s (docs/models.md, Adapters, has "
            "the cost); --adapters writes them unmerged",
            dtype,
        )
    entry.setup_done()
    if adapters:
        assert folder is not None
        base, revision = _name_base(config.policy.folder, folder)
        base_type = read_json(folder / CONFIG_FILE)["model_type"]
        if policy.has_int8_base:
            log.info(
                "the adapters were trained over %s rounded to int8; over its own weights their "
                "logits differ (docs/models.md, An int8 base); without --adapters they do not",
                base,
            )
        lora.save(out, policy, params, base, base_type, revision)
    else:
        weights.save(out, policy, params, tokenizer, dtype)
    return step


def _name_base(base: str, folder: pathlib.Path) -> tuple[str, str]:
    """Return the base of adapters as PEFT's config names it: (name or path, revision).

    `base` is policy.folder of the run's config, `folder` its local path. The name of a model of the
    Hub is OWNER/NAME. All other URLs stay, and so does that of a folder in a repository, for which
    PEFT's config has no field.
    """
    if not paths.is_remote(base):
        return str(folder), ""
    if hub.is_model(base) and not (repository := hub.Repository.parse(base)).path:
        return repository.name, repository.revision
    return base, ""


def check_new(out: epath.Path) -> None:
    """Raise ValueError if a folder to be written exists and is not empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"out = {str(out)!r}: is there already; must be a new folder")


def read_config(workdir: epath.Path) -> Config:
    """Read WORKDIR/config.json as a ConfigDict.

    FileNotFoundError without the file, ValueError if it is damaged, or neither train.py nor sft.py
    wrote it.
    """
    path = workdir / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; --workdir must be the folder of a run")
    config = read_json(path)
    if "algorithm" not in config and "rows_per_step" not in config:
        raise ValueError(f"{path}: not the config of train.py or sft.py")
    return ConfigDict(config)


def _make_policy(config: Config) -> tuple[pathlib.Path | None, PolicyConfig, Tokenizer]:
    """Return (folder, architecture, tokenizer) of the config of train.py or sft.py.

    A policy that sft.py trained from random weights has no folder.
    """
    if "algorithm" in config:
        folder = find_folder(config.policy.folder)
        return folder, *read_model(config.policy, folder)
    return supervised.make_policy(read_supervised(config))
