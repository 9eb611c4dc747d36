"""Held-out evaluation of document reconstruction: greedy answers, by number of options.

Measures as in the paper's validation (appendix A.2): the share of answers that are permutations of
the options, the dense and the sparse reward, also of a random guess.
"""

from __future__ import annotations

import functools

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.held_out import (
    Exam,
    ExamPrompt,
    HeldOut,
    Report,
    Tables,
    estimate_outcome,
    mean_outcome,
)
from spell_jax.algorithms.reconstruction.algorithm import REWARDS, ReconstructionConfig, pose
from spell_jax.runtime.intervals import Estimate
from spell_jax.selfplay import puzzles
from spell_jax.selfplay.puzzles import PromptedPuzzle

MEASURES = ("permutation", "dense reward", "sparse reward")
SECTION = "reconstruction, by number of options"
TRIES = 4  # most documents tried per wanted puzzle: some yield none
# Not the run's seed: all runs are evaluated on the same puzzles.
SEED = 10_000


def held_out_puzzles(config: ReconstructionConfig, context: AlgorithmContext) -> HeldOut:
    """Make the evaluation; its puzzles are made once, at the first use.

    The puzzles of each K are about documents of their own, unless there are too few documents.
    """
    cached_puzzles = functools.cache(functools.partial(make_puzzles, config, context))

    def make_exams(is_quick: bool) -> list[Exam]:
        count = config.validation_puzzles if is_quick else config.evaluation_puzzles
        exam_prompts = [
            ExamPrompt(("all", str(k)), posed.prompt, functools.partial(_measure, posed.truth))
            for k in sorted(config.options)
            for posed in cached_puzzles(k, count)
        ]
        if not exam_prompts:
            raise ValueError("held-out documents: none gives a puzzle; see algorithm.min_paragraph")
        return [Exam(SECTION, exam_prompts)]

    return HeldOut(make_exams, _report, _summarize)


def _measure(truth: tuple[str, ...], text: str) -> dict[str, bool | float]:
    order = puzzles.parse_order(text, len(truth))
    dense, sparse = (REWARDS[name](order, truth) for name in ("dense", "sparse"))
    return dict(zip(MEASURES, (order.is_permutation, dense, sparse == 1), strict=True))


def _report(tables: Tables) -> Report:
    """Report the means of all measures and of a guess's rewards, by K and over all puzzles."""
    outcomes = tables[SECTION]
    table = {
        name: {column: estimate_outcome(measures[name]) for column, measures in outcomes.items()}
        for name in MEASURES
    }
    for place, name in enumerate(MEASURES[1:]):
        guesses = {k: puzzles.chance_rewards(int(k))[place] for k in outcomes if k != "all"}
        over_all = [guess for k, guess in guesses.items() for _ in outcomes[k][name]]
        # The expectation of a guess is exact: its interval has no width.
        columns = guesses | {"all": sum(over_all) / len(over_all)}
        table[f"{name} of a guess"] = {k: Estimate(*[mean] * 3) for k, mean in columns.items()}
    return {SECTION: table}


def _summarize(tables: Tables) -> tuple[float, dict[str, float]]:
    """Return (dense reward, means of all measures, over all puzzles and by K)."""
    numbers = {
        name.replace(" ", "_") + ("" if k == "all" else f"/{k}"): mean_outcome(measures[name])
        for name in MEASURES
        for k, measures in tables[SECTION].items()
    }
    return numbers["dense_reward"], numbers


def make_puzzles(
    config: ReconstructionConfig, context: AlgorithmContext, options: int, count: int
) -> tuple[PromptedPuzzle, ...]:
    """Make at most `count` puzzles of K options, the same puzzles every time."""
    source = context.held_out()
    # Sorted before the shuffle: the order of ids may depend on how a source was read.
    ids = sorted(source.tasks)
    ids = [ids[i] for i in np.random.default_rng([SEED]).permutation(len(ids))]
    # Not `count` each: the puzzles of the smaller evaluation are some of the larger one's.
    each = max(config.evaluation_puzzles, config.validation_puzzles)
    first = sorted(config.options).index(options) * each
    posed_puzzles: list[PromptedPuzzle] = []
    for number in range(TRIES * count if ids else 0):
        if len(posed_puzzles) == count:
            break
        (cluster,) = source.read([ids[(first + number) % len(ids)]])
        rng = np.random.default_rng([SEED, options, number])
        posed = pose(rng, cluster, options, config, context)
        if posed.puzzle:
            posed_puzzles.append(posed)
    return tuple(posed_puzzles)
