"""Held-out evaluation of document reconstruction: greedy answers, by number of options.

Measures as in the paper's validation (appendix A.2): the share of answers that are permutations of
the options, the dense and the sparse reward, also of a random guess.
"""

from __future__ import annotations

import functools

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.held_out import Evaluated, by_row, share
from spell_jax.algorithms.reconstruction.algorithm import REWARDS, ReconstructionConfig, pose
from spell_jax.rollout.replies import AskModels
from spell_jax.selfplay import puzzles
from spell_jax.selfplay.puzzles import PromptedPuzzle

MEASURES = ("permutation", "dense reward", "sparse reward")
TRIES = 4  # most documents tried per wanted puzzle: some yield none
# Not the run's seed: all runs are evaluated on the same puzzles.
SEED = 10_000


class PuzzleEvaluation:
    """Held-out puzzles, made once with a seed of their own.

    The puzzles of each K are about documents of their own, unless there are too few documents.
    """

    def __init__(self, config: ReconstructionConfig, context: AlgorithmContext):
        self._config, self._context = config, context
        self._puzzles = functools.cache(self.make_puzzles)

    def full(self, ask: AskModels) -> Evaluated:
        """Report the means of all measures and of a guess's rewards, by K and over all puzzles."""
        outcomes = self._outcomes(ask, self._config.evaluation_puzzles)
        table = {
            name: {column: share(measures[name]) for column, measures in outcomes.items()}
            for name in MEASURES
        }
        for place, name in enumerate(MEASURES[1:]):
            guesses = {k: puzzles.chance_rewards(int(k))[place] for k in outcomes if k != "all"}
            over_all = [guess for k, guess in guesses.items() for _ in outcomes[k][name]]
            # The expectation of a guess is exact: its interval has no width.
            columns = {k: (guess, 0.0) for k, guess in guesses.items()}
            table[f"{name} of a guess"] = columns | {"all": (sum(over_all) / len(over_all), 0.0)}
        return Evaluated({"reconstruction, by number of options": table})

    def quick(self, ask: AskModels) -> tuple[float, dict[str, float]]:
        outcomes = self._outcomes(ask, self._config.validation_puzzles)
        numbers = {
            name.replace(" ", "_") + ("" if column == "all" else f"/{column}"): share(values[name])[
                0
            ]
            for name in MEASURES
            for column, values in outcomes.items()
        }
        return numbers["dense_reward"], numbers

    def _outcomes(self, ask: AskModels, count: int) -> dict[str, dict[str, list[float]]]:
        """Return the value of each of MEASURES for each answer, by K and under "all"."""
        posed = [(k, p) for k in sorted(self._config.options) for p in self._puzzles(k, count)]
        if not posed:
            raise ValueError("held-out documents: none gives a puzzle; see algorithm.min_paragraph")
        replies = ask("responder", [p.prompt for _, p in posed], temperature=0.0)

        def measure(options: int, posed: PromptedPuzzle, text: str) -> dict[str, float]:
            order = puzzles.parse_order(text, options)
            rewards = [reward(order, posed.truth) for reward in REWARDS.values()]
            return dict(zip(MEASURES, (float(order.is_permutation), *rewards), strict=True))

        return by_row(
            (str(k), measure(k, p, "" if reply is None else reply.texts[0]))
            for (k, p), reply in zip(posed, replies, strict=True)
        )

    def make_puzzles(self, options: int, count: int) -> tuple[PromptedPuzzle, ...]:
        """Make at most `count` puzzles of K options, the same puzzles every time."""
        source = self._context.held_out()
        # Sorted before the shuffle: the order of ids may depend on how a source was read.
        ids = sorted(source.tasks)
        ids = [ids[i] for i in np.random.default_rng([SEED]).permutation(len(ids))]
        # Not `count` each: the puzzles of the smaller evaluation are some of the larger one's.
        each = max(self._config.evaluation_puzzles, self._config.validation_puzzles)
        first = sorted(self._config.options).index(options) * each
        posed_puzzles: list[PromptedPuzzle] = []
        for number in range(TRIES * count if ids else 0):
            if len(posed_puzzles) == count:
                break
            (cluster,) = source.read([ids[(first + number) % len(ids)]])
            rng = np.random.default_rng([SEED, options, number])
            posed = pose(rng, cluster, options, self._config, self._context)
            if posed.puzzle:
                posed_puzzles.append(posed)
        return tuple(posed_puzzles)
