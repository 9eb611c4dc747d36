"""From a config to what it names: policy folder, data, and what its algorithm is made from."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from etils import epath

from spell_jax.algorithms import registry as registry
from spell_jax.algorithms.base import Algorithm, AlgorithmContext, JudgeFunction
from spell_jax.algorithms.held_out import Evaluation
from spell_jax.data import built, clusters, stream, tiny_stories, tiny_world
from spell_jax.data.clusters import TASKS
from spell_jax.data.questions import Question, read_questions
from spell_jax.policy import weights
from spell_jax.policy.config import ATTENTION, REMAT_POLICIES, PolicyConfig
from spell_jax.policy.lora import LoraConfig
from spell_jax.policy.tokenizer import THINKING, Tokenizer
from spell_jax.runtime import loggers, paths
from spell_jax.runtime.checkpoint import CHECKPOINTS_FOLDER
from spell_jax.runtime.config import Config
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.judge import JUDGE_KEY, Endpoint, Judge, JudgeConfig

log = logging.getLogger(__name__)

TINY_POLICY = pathlib.Path(__file__).parents[1] / "data" / "tiny_policy"
# Values of config.data.source that are no path: what makes clusters of a seed, their number and how
# many documents (or lines of a story) each has; and the most of these.
GENERATED = {
    "tiny": (tiny_world.make_clusters, len(tiny_world.NAMES)),
    "tiny_stories": (tiny_stories.make_stories, tiny_stories.MOST_LINES),
}
HELD_OUT_SEED = 10_000  # added to a run's for what training never sees of a generated world
# Values of config.policy's named choices.
POLICY_CHOICES = {
    "compute_dtype": ("float32", "bfloat16"),
    "remat": REMAT_POLICIES,
    "attention": ATTENTION,
    "thinking": tuple(THINKING),
    "rope_scaling": ("", "linear", "yarn"),
}
_LEAST_OF_RUN = {
    "seed": 0,
    "steps": 1,
    "validate_every": 0,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "minibatches": 1,
    "episode_characters": 0,
    "max_minutes": 0,
}


def check(config: Config) -> None:
    """Finds mistakes in the run's own fields and its algorithm and data before any device is
    touched.

    Raises:
      ValueError: naming the field, its value and what would be right.
      ImportError: what a field asks for is not installed.
    """
    for field, least in _LEAST_OF_RUN.items():
        if not config[field] >= least:
            raise ValueError(f"{field} = {config[field]}: must be at least {least}")
    if config.staleness not in (0, 1):
        raise ValueError(f"staleness = {config.staleness}: must be 0 or 1")
    if config.staleness and config.loss.old_logprobs != "rollout" and not config.loss.tis_cap:
        raise ValueError(
            f'loss.old_logprobs = "{config.loss.old_logprobs}": must be "rollout", or loss.tis_cap '
            "above 0, for staleness = 1: answers are sampled from older weights"
        )
    if config.minibatches > 1:
        _check_minibatches(config)
    if not _are_whole(config.profile_steps, 1):
        raise ValueError(f"profile_steps = {tuple(config.profile_steps)}: must be steps from 1 on")
    loggers.check_wandb(config.wandb)
    if config.init_from:
        find_checkpoint(config.init_from)
    for name in model_sections(config):
        _check_policy(config[name], name)
    kind, fields = check_algorithm(config.algorithm)
    check_data(config.data, kind)
    kind.evaluate(fields, _gather(config, len, config.sampler.max_prompt), config.data)


def model_sections(config: Config) -> list[str]:
    """Names of the sections that describe models: "policy", and what an algorithm has besides."""
    sections = ((name, value) for name, value in config.items() if hasattr(value, "items"))
    return [name for name, section in sections if "compute_dtype" in section]


def _check_minibatches(config: Config) -> None:
    if config.loss.old_logprobs == "on_policy" and not config.loss.tis_cap:
        raise ValueError(
            'loss.old_logprobs = "on_policy": must be "recompute" or "rollout", or loss.tis_cap '
            f"above 0, for minibatches = {config.minibatches}: only the first is on-policy"
        )
    if config.staleness:
        raise ValueError(f"staleness = 1: must be 0 for minibatches = {config.minibatches}")


def _check_policy(policy: Config, name: str) -> None:
    for field, choices in POLICY_CHOICES.items():
        if policy[field] not in choices:
            raise ValueError(f"{name}.{field} = {policy[field]!r}: must be one of {choices}")
    if policy.rope_scaling and not 1 < policy.rope_factor < math.inf:
        raise ValueError(
            f"{name}.rope_factor = {policy.rope_factor}: must be above 1, for "
            f"{name}.rope_scaling = {policy.rope_scaling!r}"
        )
    if policy.lora_rank < 0:
        raise ValueError(f"{name}.lora_rank = {policy.lora_rank}: must be 0 or more")


def check_algorithm(algorithm: Config) -> tuple[registry.AlgorithmSpec, Any]:
    """The algorithm's kind and its fields.

    Raises:
      ValueError: naming the field, its value and what would be right.
    """
    if algorithm.name not in registry.ALGORITHMS:
        raise ValueError(
            f"algorithm.name = {algorithm.name!r}: must be one of {tuple(registry.ALGORITHMS)}"
        )
    kind = registry.ALGORITHMS[algorithm.name]
    fields = kind.read(registry.own_fields(algorithm))
    if algorithm.get("rule") == "judge":
        _check_judge(algorithm)
    try:
        prompt_sets.load(algorithm.prompts)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"algorithm.prompts = {algorithm.prompts!r}: {error}") from error
    return kind, fields


def _check_judge(algorithm: Config) -> None:
    if not algorithm.judge_url.startswith(("http://", "https://")):
        raise ValueError(
            f"algorithm.judge_url = {algorithm.judge_url!r}: must be the http(s) address of a "
            "chat-completions endpoint, for algorithm.rule = 'judge'"
        )
    if not algorithm.judge_model:
        raise ValueError(
            "algorithm.judge_model = '': must name a model, for algorithm.rule = 'judge'"
        )


def check_data(data: Config, kind: registry.AlgorithmSpec) -> None:
    """Finds mistakes in the data of an algorithm of that kind.

    Raises:
      ValueError: naming the field, its value and what would be right.
    """
    for field in ("questions", "validation"):
        if data[field] and not pathlib.Path(data[field]).is_file():
            raise ValueError(f"data.{field} = {data[field]!r}: must be a .jsonl of questions")
    if data.questions and "questions" not in kind.plays:
        raise ValueError(f"data.questions = {data.questions!r}: must be '', for this algorithm")
    if not data.questions and "clusters" not in kind.plays:
        raise ValueError("data.questions = '': must be a .jsonl of questions, for this algorithm")
    _check_tasks(data)
    if not data.questions:
        _check_source(data)


def _check_source(data: Config) -> None:
    source = data.source
    if source not in GENERATED and not (source and pathlib.Path(source).exists()):
        raise ValueError(
            f"data.source = {source!r}: must be {', '.join(map(repr, GENERATED))}, a folder of "
            ".txt/.md files, a .jsonl, or a folder that data_pipeline built"
        )
    if not 0 <= data.held_out < 1:
        raise ValueError(f"data.held_out = {data.held_out}: must be at least 0 and below 1")
    if data.grouping not in clusters.GROUPINGS:
        raise ValueError(f"data.grouping = {data.grouping!r}: must be one of {clusters.GROUPINGS}")
    least = {"documents_per_cluster": 1, "max_document_tokens": clusters.SMALLEST_LIMIT}
    for field, low in least.items():
        if data[field] < low:
            raise ValueError(f"data.{field} = {data[field]}: must be at least {low}")
    if source in GENERATED:
        _check_tiny(data)


def _check_tasks(data: Config) -> None:
    if not data.tasks or len(set(data.tasks)) != len(data.tasks) or set(data.tasks) - set(TASKS):
        raise ValueError(f"data.tasks = {tuple(data.tasks)}: must be one or more of {TASKS}")
    weights = tuple(data.task_weights)
    numbers = all(isinstance(w, int | float) and 0 < w < math.inf for w in weights)
    if len(weights) != len(data.tasks) or not numbers:
        raise ValueError(f"data.task_weights = {weights}: must be a positive number a task")


def _are_whole(values: Any, least: int, most: float = math.inf) -> bool:
    return all(type(value) is int and least <= value <= most for value in values)


def _check_tiny(data: Config) -> None:
    if data.validation:
        raise ValueError(
            f"data.validation = {data.validation!r}: must be '' for data.source = {data.source!r}, "
            "which makes its own questions"
        )
    if "tiny" not in data:
        raise ValueError(
            f"data.source = {data.source!r}: needs the fields of data.tiny, see configs/tiny.py"
        )
    tiny = data.tiny
    if tiny.clusters < 1:
        raise ValueError(f"data.tiny.clusters = {tiny.clusters}: must be at least 1")
    most = GENERATED[data.source][1]
    if not tiny.documents or not _are_whole(tiny.documents, 1, most):
        raise ValueError(f"data.tiny.documents = {tuple(tiny.documents)}: must be of 1 to {most}")


def find_policy(config: Config, section: str = "policy") -> pathlib.Path:
    """The folder named by config.policy.folder ("tiny": the one in the package), or by that of
    another section.

    Raises:
      ValueError, FileNotFoundError: none is named, or it is not there.
    """
    folder = config[section].folder
    if not folder:
        raise ValueError(f"{section}.folder = '': must be a Hugging Face folder, or 'tiny'")
    path = TINY_POLICY if folder == "tiny" else pathlib.Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{section}.folder = {folder!r}: must be a Hugging Face folder, or 'tiny'; "
            "python -m spell_jax.sft --config=configs/folder_warm_start.py makes one for a folder "
            "of documents (its first lines say how)"
        )
    return path


def find_checkpoint(init_from: str) -> tuple[epath.Path, int | None]:
    """(a run's folder, the step that is named or None) of config.init_from.

    Raises:
      FileNotFoundError: it is no folder of a run.
    """
    path, step = paths.open_folder(init_from), None
    if path.parent.name == CHECKPOINTS_FOLDER and path.name.isdecimal():
        path, step = path.parent.parent, int(path.name)
    wanted = path / CHECKPOINTS_FOLDER / ("" if step is None else str(step))
    if not wanted.is_dir():
        raise FileNotFoundError(
            f"init_from = {init_from!r}: must be a run's folder, or RUN/{CHECKPOINTS_FOLDER}/STEP"
        )
    return path, step


def read_policy(
    config: Config, folder: pathlib.Path, section: str = "policy"
) -> tuple[PolicyConfig, Tokenizer]:
    """The folder's architecture, as config.policy or another section changes it, and its tokenizer.

    Raises:
      ValueError, FileNotFoundError: the folder is damaged, or does not go with the section.
    """
    policy, tokenizer = weights.identify(folder, THINKING[config[section].thinking])
    return shape_policy(config[section], policy), tokenizer


def shape_policy(section: Config, policy: PolicyConfig) -> PolicyConfig:
    """An architecture as config.policy changes it: context, adapters, remat, kernel.

    Raises:
      ValueError: they do not go together.
    """
    if section.rope_scaling:
        policy = policy.stretched(section.rope_scaling, section.rope_factor)
    lora = None
    if section.lora_rank:
        lora = LoraConfig(section.lora_rank, section.lora_alpha, section.lora_pattern)
    return dataclasses.replace(
        policy, remat=section.remat, attention=section.attention, ring=section.ring, lora=lora
    )


def make(
    config: Config, tokenizer: Tokenizer, prompt_cap: int
) -> tuple[Algorithm, Evaluation | None]:
    """The algorithm and its evaluation (None where there is nothing held out to ask)."""
    room = prompt_cap - len(tokenizer.chat(""))
    kind, materials = (
        registry.ALGORITHMS[config.algorithm.name],
        _gather(config, tokenizer.count, room),
    )
    fields = kind.read(registry.own_fields(config.algorithm))
    return kind.make(fields, materials), kind.evaluate(fields, materials, config.data)


def _gather(config: Config, count_tokens: Callable[[str], int], room: int) -> AlgorithmContext:
    """What the config's algorithm is made from; nothing is read yet but its prompts."""
    data, prompts = config.data, prompt_sets.load(config.algorithm.prompts)

    @functools.cache
    def opened() -> tuple[clusters.Source, clusters.Source]:
        return open_clusters(config, count_tokens)

    def deal(source: clusters.Source) -> stream.TaskStream:
        return stream.TaskStream(source, tuple(data.tasks), tuple(data.task_weights), config.seed)

    return AlgorithmContext(
        prompts=prompts,
        count_tokens=count_tokens,
        prompt_cap=room,
        seed=config.seed,
        steps=config.steps,
        clusters=lambda: opened()[0],
        held_out=lambda: opened()[1],
        deal=deal,
        questions=functools.cache(lambda: _read_given(data.questions)),
        judge=_make_judge(config.algorithm, prompts),
    )


def _read_given(path: str) -> tuple[Question, ...]:
    return read_questions(path, "data.questions") if path else ()


def open_clusters(
    config: Config, count_tokens: Callable[[str], int]
) -> tuple[clusters.Source, clusters.Source]:
    """Clusters of the configured source, to train on and held out; hosts share the reading of a
    built one."""
    data = config.data
    if data.source in GENERATED:
        make, counts = GENERATED[data.source][0], (data.tiny.clusters, tuple(data.tiny.documents))
        train, held_out = (
            clusters.in_memory(make(config.seed + apart, *counts, split))
            for apart, split in ((0, "train"), (HELD_OUT_SEED, "held_out"))
        )
        return train, held_out
    source = built.open_source(
        data.source,
        count_tokens=count_tokens,
        max_document_tokens=data.max_document_tokens,
        documents_per_cluster=data.documents_per_cluster,
        grouping=data.grouping,
    )
    if built.is_built(data.source):
        source = built.share_reading(source)
    train, held_out = clusters.split_held_out(list(source.tasks), data.held_out)
    log.info("%d clusters to train on, %d held out", len(train), len(held_out))
    return source.only(train), source.only(held_out)


def _make_judge(algorithm: Config, prompts: prompt_sets.Prompts) -> JudgeFunction | None:
    if algorithm.get("rule") != "judge":
        return None
    settings = JudgeConfig(algorithm.judge_url, algorithm.judge_model, os.environ.get(JUDGE_KEY))
    return Judge(Endpoint(settings), prompts.judge, settings.model).judge
