"""From a config to the game that it names, with its data and its held-out evaluation."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

from spell_jax.data import clusters, stream, tiny_world
from spell_jax.evaluation.held_out import Evaluation, HeldOutQuestions, read_questions
from spell_jax.evaluation.tiny_world import TinyEvaluation
from spell_jax.games.game import Game
from spell_jax.games.rlvr import Rlvr, RlvrConfig
from spell_jax.games.spell import Spell, SpellConfig
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.runtime.settings import Config, build
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.judge import Judge, JudgeConfig

log = logging.getLogger(__name__)

GAMES = ("spell", "rlvr")
# Fields of config.game that are not SpellConfig's.
_OTHER_FIELDS = ("name", "prompts", "judge_url", "judge_model", "static_questions")


def check(config: Config) -> None:
    """Finds mistakes in the data and game sections before any file or device is touched."""
    _spell_config(config)
    if config.game.name not in GAMES:
        raise ValueError(f"game.name = {config.game.name!r}: must be one of {GAMES}")
    source = config.data.source
    if source != "tiny" and not (source and pathlib.Path(source).exists()):
        raise ValueError(
            f"data.source = {source!r}: must be 'tiny', a folder of .txt/.md files, or a .jsonl"
        )


def make(config: Config, tokenizer: Tokenizer, prompt_cap: int) -> tuple[Game, Evaluation | None]:
    """The game and its evaluation (None where there is nothing held out to ask)."""
    prompts = prompt_sets.load(config.game.prompts)
    dealt = stream.TaskStream(
        make_clusters(config, tokenizer),
        tuple(config.data.tasks),
        tuple(config.data.task_weights),
        config.seed,
    )
    game: Any = Spell(
        _spell_config(config),
        prompts,
        dealt,
        tokenizer.count,
        prompt_cap,
        config.seed,
        _make_judge(config, prompts),
    )
    if config.game.name == "rlvr":
        game = Rlvr(RlvrConfig(config.game.static_questions), game)
    return game, _make_evaluation(config, prompts)


def make_clusters(config: Config, tokenizer: Tokenizer) -> list[clusters.Cluster]:
    """Training clusters of the configured source."""
    data = config.data
    if data.source == "tiny":
        return tiny_world.make_clusters(
            config.seed, data.tiny.clusters, tuple(data.tiny.documents), "train"
        )
    found, report = clusters.read_clusters(
        data.source,
        count_tokens=tokenizer.count,
        max_document_tokens=data.max_document_tokens,
        documents_per_cluster=data.documents_per_cluster,
        grouping=data.grouping,
    )
    log.info("%s: %s", data.source, report.summary())
    train, held_out = clusters.split_held_out(found, data.held_out)
    log.info("%d clusters to train on, %d held out", len(train), len(held_out))
    return train


def _spell_config(config: Config) -> SpellConfig:
    section = {k: v for k, v in config.game.items() if k not in _OTHER_FIELDS}
    return build(SpellConfig, section, "game")


def _make_judge(config: Config, prompts: prompt_sets.Prompts):
    if config.game.rule != "judge":
        return None
    settings = JudgeConfig(config.game.judge_url, config.game.judge_model)
    return Judge(settings, prompts.judge).judge


def _make_evaluation(config: Config, prompts: prompt_sets.Prompts) -> Evaluation | None:
    if config.data.source == "tiny":
        section = config.data.tiny.evaluation
        return build(TinyEvaluation, section, "data.tiny.evaluation", prompts=prompts)
    if config.data.validation:
        return HeldOutQuestions(prompts, read_questions(config.data.validation))
    return None
