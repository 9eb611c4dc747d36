"""From a config to what it names: policy folder, game, data, held-out evaluation."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from etils import epath

from spell_jax.data import built, clusters, stream, tiny_world
from spell_jax.data.clusters import TASKS
from spell_jax.data.questions import read_questions
from spell_jax.evaluation.held_out import Evaluation, HeldOutQuestions
from spell_jax.evaluation.tiny_world import TinyEvaluation
from spell_jax.games.game import Game
from spell_jax.games.rlvr import Rlvr, RlvrConfig
from spell_jax.games.spell import Spell
from spell_jax.games.spell_config import SpellConfig
from spell_jax.policy import weights
from spell_jax.policy.config import ATTENTION, REMAT_POLICIES, PolicyConfig
from spell_jax.policy.lora import LoraConfig
from spell_jax.policy.tokenizer import THINKING, Tokenizer
from spell_jax.runtime import boards, folders
from spell_jax.runtime.checkpoint import CHECKPOINTS_FOLDER
from spell_jax.runtime.settings import Config, build
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.judge import JUDGE_KEY, Endpoint, Judge, JudgeConfig

log = logging.getLogger(__name__)

TINY_POLICY = pathlib.Path(__file__).parent / "data" / "tiny_policy"
GAMES = ("spell", "rlvr")
# Values of config.policy's named choices.
POLICY_CHOICES = {
    "compute_dtype": ("float32", "bfloat16"),
    "remat": REMAT_POLICIES,
    "attention": ATTENTION,
    "thinking": tuple(THINKING),
    "stretch": ("", "linear", "yarn"),
}
_LEAST_OF_RUN = {
    "seed": 0,
    "steps": 1,
    "validate_every": 0,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "episode_characters": 0,
    "max_minutes": 0,
}
# Fields of config.game that are not SpellConfig's.
_OTHER_FIELDS = ("name", "prompts", "judge_url", "judge_model", "static_questions")


def check(config: Config) -> None:
    """Finds mistakes in the run's own fields and its game and data before any device is touched.

    Raises:
      ValueError: naming the field, its value and what would be right.
      ImportError: what a field asks for is not installed.
    """
    for field, least in _LEAST_OF_RUN.items():
        if not config[field] >= least:
            raise ValueError(f"{field} = {config[field]}: must be at least {least}")
    if config.staleness not in (0, 1):
        raise ValueError(f"staleness = {config.staleness}: must be 0 or 1")
    if config.staleness and config.loss.behaviour == "current":
        raise ValueError(
            'loss.behaviour = "current": must be "truncated" or "sampler" for staleness = 1, with '
            "which answers come from older weights"
        )
    if not _are_whole(config.profile_steps, 1):
        raise ValueError(f"profile_steps = {tuple(config.profile_steps)}: must be steps from 1 on")
    boards.check_wandb(config.wandb)
    if config.init_from:
        find_checkpoint(config.init_from)
    _check_policy(config.policy)
    _check_game(config.game)
    _check_data(config.data)
    _make_evaluation(config, prompt_sets.load(config.game.prompts), count_tokens=len)


def _check_policy(policy: Config) -> None:
    for field, choices in POLICY_CHOICES.items():
        if policy[field] not in choices:
            raise ValueError(f"policy.{field} = {policy[field]!r}: must be one of {choices}")
    if policy.stretch and not 1 < policy.stretch_factor < math.inf:
        raise ValueError(
            f"policy.stretch_factor = {policy.stretch_factor}: must be above 1, for "
            f"policy.stretch = {policy.stretch!r}"
        )
    if policy.lora_rank < 0:
        raise ValueError(f"policy.lora_rank = {policy.lora_rank}: must be 0 or more")


def _check_game(game: Config) -> None:
    build(SpellConfig, _spell_fields(game), "game")
    RlvrConfig(game.static_questions)
    if game.name not in GAMES:
        raise ValueError(f"game.name = {game.name!r}: must be one of {GAMES}")
    if game.rule == "judge":
        _check_judge(game)
    try:
        prompt_sets.load(game.prompts)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"game.prompts = {game.prompts!r}: {error}") from error


def _check_judge(game: Config) -> None:
    if not game.judge_url.startswith(("http://", "https://")):
        raise ValueError(
            f"game.judge_url = {game.judge_url!r}: must be the http(s) address of a "
            "chat-completions endpoint, for game.rule = 'judge'"
        )
    if not game.judge_model:
        raise ValueError("game.judge_model = '': must name a model, for game.rule = 'judge'")


def _check_data(data: Config) -> None:
    source = data.source
    if source != "tiny" and not (source and pathlib.Path(source).exists()):
        raise ValueError(
            f"data.source = {source!r}: must be 'tiny', a folder of .txt/.md files, a .jsonl, or a "
            "folder that data_pipeline built"
        )
    if not data.tasks or len(set(data.tasks)) != len(data.tasks) or set(data.tasks) - set(TASKS):
        raise ValueError(f"data.tasks = {tuple(data.tasks)}: must be one or more of {TASKS}")
    weights = tuple(data.task_weights)
    numbers = all(isinstance(w, int | float) and 0 < w < math.inf for w in weights)
    if len(weights) != len(data.tasks) or not numbers:
        raise ValueError(f"data.task_weights = {weights}: must be a positive number a task")
    if not 0 <= data.held_out < 1:
        raise ValueError(f"data.held_out = {data.held_out}: must be at least 0 and below 1")
    if data.grouping not in clusters.GROUPINGS:
        raise ValueError(f"data.grouping = {data.grouping!r}: must be one of {clusters.GROUPINGS}")
    least = {"documents_per_cluster": 1, "max_document_tokens": clusters.SMALLEST_LIMIT}
    for field, low in least.items():
        if data[field] < low:
            raise ValueError(f"data.{field} = {data[field]}: must be at least {low}")
    if source == "tiny":
        _check_tiny(data)


def _are_whole(values: Any, least: int, most: float = math.inf) -> bool:
    return all(type(value) is int and least <= value <= most for value in values)


def _check_tiny(data: Config) -> None:
    if data.validation:
        raise ValueError(
            f"data.validation = {data.validation!r}: must be '' for data.source = 'tiny', which "
            "makes its own questions"
        )
    if "tiny" not in data:
        raise ValueError("data.source = 'tiny': needs the fields of data.tiny, see configs/tiny.py")
    tiny = data.tiny
    if tiny.clusters < 1:
        raise ValueError(f"data.tiny.clusters = {tiny.clusters}: must be at least 1")
    most = len(tiny_world.NAMES)
    if not tiny.documents or not _are_whole(tiny.documents, 1, most):
        raise ValueError(f"data.tiny.documents = {tuple(tiny.documents)}: must be of 1 to {most}")


def find_policy(config: Config) -> pathlib.Path:
    """The folder named by config.policy.folder ("tiny": the one in the package).

    Raises:
      ValueError, FileNotFoundError: none is named, or it is not there.
    """
    folder = config.policy.folder
    if not folder:
        raise ValueError("policy.folder = '': must be a Hugging Face folder, or 'tiny'")
    path = TINY_POLICY if folder == "tiny" else pathlib.Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(
            f"policy.folder = {folder!r}: must be a Hugging Face folder, or 'tiny'; "
            "python -m spell_jax.sft --config=configs/folder_warm_start.py makes one for a folder "
            "of documents (its first lines say how)"
        )
    return path


def find_checkpoint(init_from: str) -> tuple[epath.Path, int | None]:
    """(a run's folder, the step that is named or None) of config.init_from.

    Raises:
      FileNotFoundError: it is no folder of a run.
    """
    path, step = folders.open_folder(init_from), None
    if path.parent.name == CHECKPOINTS_FOLDER and path.name.isdecimal():
        path, step = path.parent.parent, int(path.name)
    wanted = path / CHECKPOINTS_FOLDER / ("" if step is None else str(step))
    if not wanted.is_dir():
        raise FileNotFoundError(
            f"init_from = {init_from!r}: must be a run's folder, or RUN/{CHECKPOINTS_FOLDER}/STEP"
        )
    return path, step


def read_policy(config: Config, folder: pathlib.Path) -> tuple[PolicyConfig, Tokenizer]:
    """The folder's architecture, as config.policy changes it, and its tokenizer.

    Raises:
      ValueError, FileNotFoundError: the folder is damaged, or does not go with config.policy.
    """
    policy, tokenizer = weights.identify(folder, THINKING[config.policy.thinking])
    return shape_policy(config.policy, policy), tokenizer


def shape_policy(section: Config, policy: PolicyConfig) -> PolicyConfig:
    """An architecture as config.policy changes it: context, adapters, remat, kernel.

    Raises:
      ValueError: they do not go together.
    """
    if section.stretch:
        policy = policy.stretched(section.stretch, section.stretch_factor)
    lora = None
    if section.lora_rank:
        lora = LoraConfig(section.lora_rank, section.lora_alpha, section.lora_pattern)
    return dataclasses.replace(
        policy, remat=section.remat, attention=section.attention, ring=section.ring, lora=lora
    )


def make(config: Config, tokenizer: Tokenizer, prompt_cap: int) -> tuple[Game, Evaluation | None]:
    """The game and its evaluation (None where there is nothing held out to ask)."""
    prompts = prompt_sets.load(config.game.prompts)
    dealt = stream.TaskStream(
        open_clusters(config, tokenizer),
        tuple(config.data.tasks),
        tuple(config.data.task_weights),
        config.seed,
    )
    game: Any = Spell(
        build(SpellConfig, _spell_fields(config.game), "game"),
        prompts,
        dealt,
        tokenizer.count,
        prompt_cap - len(tokenizer.chat("")),
        config.seed,
        _make_judge(config, prompts),
    )
    if config.game.name == "rlvr":
        game = Rlvr(RlvrConfig(config.game.static_questions), game)
    return game, _make_evaluation(config, prompts, tokenizer.count)


def open_clusters(config: Config, tokenizer: Tokenizer) -> clusters.Source:
    """Training clusters of the configured source; hosts share the reading of a built one."""
    data = config.data
    if data.source == "tiny":
        made = tiny_world.make_clusters(
            config.seed, data.tiny.clusters, tuple(data.tiny.documents), "train"
        )
        return clusters.in_memory(made)
    source = built.open_source(
        data.source,
        count_tokens=tokenizer.count,
        max_document_tokens=data.max_document_tokens,
        documents_per_cluster=data.documents_per_cluster,
        grouping=data.grouping,
    )
    if built.is_built(data.source):
        source = built.share_reading(source)
    train, held_out = clusters.split_held_out(list(source.tasks), data.held_out)
    log.info("%d clusters to train on, %d held out", len(train), len(held_out))
    return source.only(train)


def _spell_fields(game: Config) -> dict[str, Any]:
    return {name: value for name, value in game.items() if name not in _OTHER_FIELDS}


def _make_judge(config: Config, prompts: prompt_sets.Prompts):
    if config.game.rule != "judge":
        return None
    key = os.environ.get(JUDGE_KEY)
    settings = JudgeConfig(config.game.judge_url, config.game.judge_model, key)
    return Judge(Endpoint(settings), prompts.judge, settings.model).judge


def _make_evaluation(
    config: Config, prompts: prompt_sets.Prompts, count_tokens: Callable[[str], int]
) -> Evaluation | None:
    if config.data.source == "tiny":
        return build(
            TinyEvaluation,
            config.data.tiny.evaluation,
            "data.tiny.evaluation",
            prompts=prompts,
            game=build(SpellConfig, _spell_fields(config.game), "game"),
            count_tokens=count_tokens,
        )
    if config.data.validation:
        if not pathlib.Path(config.data.validation).is_file():
            raise ValueError(
                f"data.validation = {config.data.validation!r}: must be a .jsonl of questions"
            )
        return HeldOutQuestions(prompts, read_questions(config.data.validation, "data.validation"))
    return None
