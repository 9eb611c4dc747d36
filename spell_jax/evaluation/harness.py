"""Tasks of lm-evaluation-harness with a policy: check, run, write.

The package lm_eval is imported when it is used, because it is optional (extra "lm_eval") and must
see the variables that keep it from downloading.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import random
from typing import Any

import numpy as np
from absl import app, flags

from spell_jax.evaluation.runner import POLICY_FIELDS, make_policy, policy_folder
from spell_jax.policy.model import ModelConfig
from spell_jax.rollout import flags as policy_flags
from spell_jax.rollout.text_model import SIZES, TextModel
from spell_jax.runtime import entry, setup
from spell_jax.runtime.config import check_least
from spell_jax.runtime.files import paths, remote
from spell_jax.runtime.files.jsonl import write_json, write_records
from spell_jax.runtime.hosts import distributed
from spell_jax.sampler.config import SamplerConfig

log = logging.getLogger(__name__)

RESULTS, SAMPLES = "lm_eval.json", "lm_eval_samples.jsonl"
OWN_FLAGS = ("lm_eval_tasks", "lm_eval_examples", "lm_eval_chat")
# Flags with an effect: a task of the harness has its own prompts, sampling and metrics.
USEFUL_FLAGS = (
    *("lm_eval", *OWN_FLAGS, "out", "policy", "workdir", "limit", "seed", "dtype", "thinking"),
    *("rope_scaling", "rope_factor", *policy_flags.SIZES),
)
# A download would depend on the day; both libraries read these when they are imported.
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
# Resamples for the standard errors of metrics that are no means.
_BOOTSTRAPS = 1000


@dataclasses.dataclass(frozen=True)
class HarnessConfig:
    """Policy, tasks and options of an evaluation; a field out of range is a ValueError.

    Attributes:
      policy: folder of the policy.
      tasks: names of tasks, groups or tags of the harness.
      folder: folder of own task files, or "".
      examples: number of examples in a prompt; -1 means the task's own.
      chat: whether prompts are in the policy's chat layout.
      limit: number of questions per task, the first ones; 0 means all.
      seed: seed of the examples and of sampling.
      dtype: dtype of the policy's weights.
      thinking: "", "on" or "off", for chat templates with such a switch.
      rope_scaling: as in model.ModelConfig.
      rope_factor: as in model.ModelConfig.
    """

    policy: str
    tasks: tuple[str, ...]
    folder: str = ""
    examples: int = -1
    chat: bool = False
    limit: int = 0
    seed: int = 0
    dtype: str = "float32"
    thinking: str = ""
    rope_scaling: str = ""
    rope_factor: float = 1.0

    def __post_init__(self):
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"lm_eval = {self.tasks}: must have at least one task, each once")
        check_least(self, "", limit=0, seed=0)
        check_least(self, "lm_eval_", examples=-1)
        if self.folder and not remote.fetch(self.folder).is_dir():
            raise FileNotFoundError(f"lm_eval_tasks = {self.folder!r}: must be a folder")
        if self.thinking and not self.chat:
            raise ValueError(f"thinking = {self.thinking!r}: must be '' without --lm_eval_chat")
        ModelConfig(rope_scaling=self.rope_scaling, rope_factor=self.rope_factor)  # checks them


def check_flags(flag_values: flags.FlagValues) -> None:
    """Raise UsageError unless one of --benchmarks and --lm_eval is given, with flags of its own."""
    if bool(flag_values.benchmarks) == bool(flag_values.lm_eval):
        raise app.UsageError("--benchmarks or --lm_eval: exactly one of them must be given")
    if flag_values.lm_eval:
        policy_flags.refuse_others(flag_values, USEFUL_FLAGS, "with --lm_eval")
        return
    policy_flags.refuse(flag_values, (*OWN_FLAGS, "answers"), "with --benchmarks")
    if not flag_values.endpoint:
        limits = ("endpoint_workers", "endpoint_rate")
        policy_flags.refuse(flag_values, limits, "without --endpoint")


def from_flags(flag_values: Any) -> HarnessConfig:
    """Make the config from flags of spell_jax/evaluate.py; may raise UsageError or ValueError."""
    return HarnessConfig(
        policy_folder(flag_values),
        tuple(flag_values.lm_eval),
        flag_values.lm_eval_tasks,
        flag_values.lm_eval_examples,
        flag_values.lm_eval_chat,
        flag_values.limit,
        flag_values.seed,
        *(getattr(flag_values, name) for name in POLICY_FIELDS),
    )


def evaluate(
    config: HarnessConfig, out: str | os.PathLike[str], sizes: SamplerConfig = SIZES
) -> dict[str, Any]:
    """Evaluate a policy and return the content of OUT/lm_eval.json; all processes call this.

    Every process loads the tasks; only process 0 writes. Raises ImportError without the package
    lm_eval. Raises ValueError if a task does not exist, cannot be loaded, or does not fit the
    policy, or if `out` holds another evaluation.
    """
    _check_installed()
    for name in OFFLINE:
        os.environ.setdefault(name, "1")
    # Its pool of processes for standard errors would fork JAX's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    # After the variables are set: lm_eval and datasets read them when they are imported.
    from lm_eval import evaluator

    from spell_jax.evaluation.harness_model import PolicyLM

    out, policy = pathlib.Path(out), make_policy(config, sizes)
    tasks = _load_tasks(config)
    _check_tasks(config, policy, tasks["tasks"])
    description = dataclasses.asdict(config) | {"weights": policy.fingerprint()}

    def start() -> None:
        out.mkdir(parents=True, exist_ok=True)
        setup.check_same(out / paths.CONFIG_FILE, description)

    distributed.broadcast(start)
    entry.setup_done()
    # Tasks may shuffle choices with the global generators; the examples have their own seed.
    random.seed(config.seed)
    np.random.seed(config.seed)
    results: Any = evaluator.evaluate(
        PolicyLM(policy, config.seed, config.thinking == "on"),
        tasks,
        limit=config.limit or None,
        bootstrap_iters=_BOOTSTRAPS,
        apply_chat_template=config.chat,
        fewshot_as_multiturn=config.chat,
    )
    policy.release()
    return distributed.broadcast(lambda: _write_results(results, description, out))


def table(results: dict[str, Any]) -> str:
    """Format the harness's own table of the tasks, and of the groups if there are any."""
    from lm_eval.utils import make_table

    columns = [column for column in ("results", "groups") if column in results]
    return "\n".join(make_table(results, column) for column in columns)


def _check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("--lm_eval needs lm-evaluation-harness: pip install 'spell_jax[lm_eval]'")


def _load_tasks(config: HarnessConfig) -> Any:
    """Load tasks and groups by name, with the evaluation's number of examples and seed."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(remote.fetch(config.folder)) if config.folder else None)
    loaded = []
    for name in config.tasks:
        if name not in manager.all_tasks:
            raise ValueError(
                f"lm_eval = {name!r}: no such task; lm_eval ls tasks prints the names, and "
                "--lm_eval_tasks names a folder of others"
            )
        try:
            named_tasks: Any = manager.load(name)
        except Exception as error:  # tasks are programs, and read data sets in many ways
            text = " ".join(str(error).split()) or type(error).__name__
            if "OfflineMode" in text:
                text += "; nothing is downloaded unless HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0"
            raise ValueError(f"lm_eval = {name!r}: cannot be loaded: {text}") from error
        # A member of a group is loaded with its group, and must not be loaded again.
        members = {member for group in named_tasks["group_map"].values() for member in group}
        parts = named_tasks["groups"] | named_tasks["tasks"]
        loaded += [part for part_name, part in parts.items() if part_name not in members]
    tasks: Any = manager.load(loaded)
    for task in tasks["tasks"].values():
        task_examples = task.get_config("num_fewshot")
        # A task that sets 0 has a prompt that examples would break.
        if task_examples is None or (config.examples >= 0 and task_examples != 0):
            task.set_config(key="num_fewshot", value=max(config.examples, 0))
        task.set_fewshot_seed(seed=config.seed)
    return tasks


def _check_tasks(config: HarnessConfig, policy: TextModel, tasks: dict[str, Any]) -> None:
    """Raise ValueError, before any sampling, for a task that this policy cannot do."""
    from spell_jax.evaluation.harness_model import read_options

    positions = policy.config.max_positions
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise ValueError(f"lm_eval = {name!r}: must neither run generated code nor show images")
        if task.OUTPUT_TYPE == "generate_until":
            try:
                options = read_options(task.get_config("generation_kwargs") or {})
            except ValueError as error:
                raise ValueError(f"lm_eval = {name!r}: {error}") from error
            if options.max_tokens >= positions:
                raise ValueError(
                    f"lm_eval = {name!r}: generates max_gen_toks = {options.max_tokens}, must "
                    f"leave room for a prompt in the policy's context of {positions}"
                )
        elif config.thinking == "on":
            raise ValueError(
                f"thinking = 'on': must be '' or 'off' for {name!r}, which scores given answers"
            )
    if config.chat:
        policy.tokenizer.render([{"role": "user", "content": "a"}])


def _write_results(results: Any, description: dict[str, Any], out: pathlib.Path) -> dict[str, Any]:
    """Write the results, and a row for each question; return the results."""
    from lm_eval.utils import handle_non_serializable

    full = {"config": description, "lm_eval": importlib.metadata.version("lm_eval"), **results}
    plain = json.loads(json.dumps(full, default=handle_non_serializable))
    samples = plain.pop("samples")
    write_records(
        out / SAMPLES, ({"task": n, **row} for n, rows in samples.items() for row in rows)
    )
    write_json(out / RESULTS, plain)
    return plain
