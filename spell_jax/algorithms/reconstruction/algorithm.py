"""Document reconstruction: a model puts removed paragraphs of a document back in order.

1. pose: K paragraphs of a document, never two neighbors, are removed and shown as shuffled options.
   K rises over the run (curriculum). A document over the cap is dropped and replaced.
2. answer: the policy answers each puzzle G times with the order of the options.
3. reward: the share of options in their right places (dense, 1), or whether all are (sparse, 2).
4. groups: all groups are trained on, with advantages over the group (GRPO), which are 0 where all
   rewards are equal.

The paper ("Document Reconstruction Unlocks Scalable Long-Context RLVR"; numbers in parentheses are
its equations) uses 128 documents per step, prompts of up to 65,536 tokens and answers of
4096. Its 14,000 documents are the longest of three domains. Where its text is silent, the defaults
follow its code (github.com/XYaoooo/reconstruction_long).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext, Annotation, Key
from spell_jax.algorithms.config import AlgorithmConfig, RolloutBudget
from spell_jax.algorithms.episode import (
    QuestionEpisode,
    count_reasons,
    recorded,
    responder_groups,
)
from spell_jax.data import clusters
from spell_jax.data.clusters import Cluster
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import AskModels, Reply
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.selfplay import puzzles
from spell_jax.selfplay.puzzles import FEWEST_OPTIONS, MOST_OPTIONS, OVERLONG, Order, PromptedPuzzle

NO_PUZZLE = "no_puzzle"  # status of an episode with an unsuitable document
REWARDS = {"dense": puzzles.dense_reward, "sparse": puzzles.sparse_reward}
# A bound, because a source of unsuitable documents would never fill a step. Our choice: the paper
# does not say what replaces such a document.
ROUNDS = 4  # most rounds of taking documents, where some yield no puzzle


@dataclass(frozen=True)
class ReconstructionConfig(AlgorithmConfig):
    """Fields of config.algorithm for document reconstruction. The defaults are the paper's.

    Attributes:
      documents: documents per step, one puzzle each [paper: prompt batch size].
      group_size: G, answers to a puzzle.
      order_reward: reward of an order of the options, "dense" (1) or "sparse" (2).
      options: possible values of K, the number of options.
      option_weights: proportion of each value over the run. The paper prints 3:3:5 for four
        values; its 14,000 documents and section 5.3 suggest 3:3:3:5.
      curriculum: whether K rises from step to step, with these proportions over the whole run;
        otherwise K is sampled for each puzzle (the shuffled variant, section 5.6).
      most_documents: number of clusters that are used; 0: all.
      selection: which clusters, by characters: the "longest", "shortest" or "random" ones (section
        5.4).
      min_paragraph: fewest characters of an option. The paper names no limit; a shorter paragraph
        carries no information.
      max_paragraph: most characters of an option; a longer one leaves little of the document.
      adjacent_gaps: whether two neighboring paragraphs may be removed, which leaves their order to
        the options alone. Otherwise only every other paragraph is taken (the paper's code).
      cut_documents: whether a document with a prompt over the cap is cut to a window of
        neighboring paragraphs. Otherwise it is dropped and counted, and another one is taken (the
        paper's code).
      keep_equal: whether groups of equal rewards are trained on too (the paper's code). Their
        advantages are 0, but the loss is averaged over them as well.
      evaluation_puzzles: held-out puzzles of each K before and after a run.
      validation_puzzles: held-out puzzles of each K during the run [paper: 500 in all].
    """

    name: str = "reconstruction"
    documents: int = 128
    group_size: int = 8
    order_reward: str = "dense"
    options: tuple[int, ...] = (2, 4, 6, 8)
    # The paper prints three proportions for four values (docs/algorithms.md, "Mixture").
    option_weights: tuple[float, ...] = (3.0, 3.0, 3.0, 5.0)
    curriculum: bool = True
    most_documents: int = 0
    selection: str = "longest"
    min_paragraph: int = 80
    max_paragraph: int = 4000
    # Where the text is silent, this field, `cut_documents` and `keep_equal` follow the paper's code
    # at commit 2c5cfb4.
    adjacent_gaps: bool = False
    cut_documents: bool = False
    keep_equal: bool = True
    # The paper validates on 500 samples (section 4). Equal numbers of each K are our choice.
    evaluation_puzzles: int = 125
    validation_puzzles: int = 125

    def __post_init__(self):
        super().__post_init__()
        check_choice(self, "algorithm.", order_reward=tuple(REWARDS), selection=clusters.SELECTIONS)
        check_least(
            self, "algorithm.", documents=1, group_size=2, most_documents=0, min_paragraph=1
        )
        check_least(self, "algorithm.", evaluation_puzzles=1, validation_puzzles=1)
        ks, weights = self.options, self.option_weights
        are_options = all(FEWEST_OPTIONS <= k <= MOST_OPTIONS for k in ks)
        are_weights = len(weights) == len(ks) and all(0 < w < math.inf for w in weights)
        if not are_options or len({*ks}) != len(ks) or not ks:
            raise ValueError(
                f"algorithm.options = {ks}: must be different numbers from {FEWEST_OPTIONS} to "
                f"{MOST_OPTIONS}"
            )
        if not are_weights:
            raise ValueError(
                f"algorithm.option_weights = {weights}: must be a positive number for each of "
                f"algorithm.options = {ks}"
            )
        if self.max_paragraph < self.min_paragraph:
            raise ValueError(
                f"algorithm.max_paragraph = {self.max_paragraph}: must be at least "
                f"algorithm.min_paragraph = {self.min_paragraph}"
            )

    def budgets(self) -> list[RolloutBudget]:
        return [
            RolloutBudget("answers", "responder", self.documents, self.group_size, self.documents)
        ]


@dataclass(frozen=True)
class ReconstructionEpisode(QuestionEpisode):
    """A puzzle and its answers; the status is "accepted", OVERLONG (the prompt) or NO_PUZZLE."""

    options: int = field(metadata=recorded())  # K
    posed: PromptedPuzzle  # the puzzle, or why there is none
    # Without metadata, so not recorded: no judge is asked about an order.
    judge: tuple[int | None, ...] = field(default=(), kw_only=True)
    orders: tuple[Order, ...] = ()  # orders of the options that the answers state [G]

    def record(self) -> dict[str, Any]:
        """Return a line of the run's files; {document} in "prompt": the window, gaps at spans."""
        puzzle = self.posed.puzzle
        spans = [list(span) for span in puzzle.spans] if puzzle else []
        return super().record() | {"window": list(self.posed.window), "spans": spans}


def pose(
    rng: np.random.Generator,
    cluster: Cluster,
    options: int,
    config: ReconstructionConfig,
    context: AlgorithmContext,
) -> PromptedPuzzle:
    """Make a puzzle of K options from a cluster's joined documents, or say why there is none."""
    # Paragraphs end at blank lines, so no paragraph reaches across two documents.
    return puzzles.pose(
        rng,
        "\n\n".join(cluster.documents),
        options,
        (config.min_paragraph, config.max_paragraph),
        config.adjacent_gaps,
        context.prompts,
        context.count_tokens,
        context.prompt_cap,
        config.cut_documents,
    )


class Reconstruction:
    """The algorithm; see base.Algorithm."""

    model_names = ()
    trained = ()

    def __init__(self, config: ReconstructionConfig, context: AlgorithmContext):
        self.config = config
        self._context = context
        source = clusters.select(
            context.clusters(), config.selection, config.most_documents, context.seed
        )
        self.stream = context.deal(source)

    def rollout(self, ask: AskModels, key: Key, step: int) -> list[ReconstructionEpisode]:
        episodes = self.start_episodes(key, step)
        prompts = [e.posed.prompt for e in episodes if e.posed.puzzle]
        # A puzzle needs one call, so nothing is lost by waiting for all answers together.
        replies = ask("responder", prompts, self.config.group_size)
        pairs = iter(zip(replies, replies.dropped, strict=True))
        return [self._answered(e, *next(pairs)) if e.posed.puzzle else e for e in episodes]

    def start_episodes(self, key: Key, step: int) -> list[ReconstructionEpisode]:
        """Make a step's puzzles; replace documents without a puzzle, in at most ROUNDS rounds.

        The random numbers of a puzzle depend only on the key and on the puzzle's index.
        """
        episodes: list[ReconstructionEpisode] = []
        posed, quota = 0, self.config.documents
        for _ in range(ROUNDS):
            for _, cluster in self.stream.next(quota - posed) if posed < quota else ():
                rng = np.random.default_rng([*key, len(episodes)])
                # Only puzzles count: refused documents do not advance the curriculum.
                options = self._options(rng, (step - 1) * quota + posed)
                episodes.append(self._pose(rng, cluster, options))
                posed += episodes[-1].posed.puzzle is not None
        return episodes

    def _pose(
        self, rng: np.random.Generator, cluster: Cluster, options: int
    ) -> ReconstructionEpisode:
        posed = pose(rng, cluster, options, self.config, self._context)
        write = self._context.prompts.reconstruction
        is_overlong = posed.puzzle or posed.reason == OVERLONG  # unless the puzzle is answered
        return ReconstructionEpisode(
            "reconstruction",
            cluster,
            options,
            posed,
            template=write("{document}", posed.puzzle.options) if posed.puzzle else "",
            status=OVERLONG if is_overlong else NO_PUZZLE,
            reason=posed.reason,
            question=f"order of {options} paragraphs",
            reference=", ".join(posed.truth),
        )

    def _options(self, rng: np.random.Generator, number: int) -> int:
        """Return the number of options K of the run's puzzle `number`, from 0."""
        # Sampled with the curriculum too: then both variants remove the same paragraphs for equal
        # K.
        c, sampled = self.config, rng.random()
        # The middle of the puzzle's part of the run: first and last K get their full share.
        share = (number + 0.5) / (c.documents * self._context.steps)
        return puzzles.options_of(share if c.curriculum else sampled, c.options, c.option_weights)

    def _answered(
        self, episode: ReconstructionEpisode, reply: Reply | None, dropped: tuple[str, ...]
    ) -> ReconstructionEpisode:
        if reply is None:
            return replace(episode, dropped_texts=dropped)
        reward, truth = REWARDS[self.config.order_reward], episode.posed.truth
        orders = tuple(puzzles.parse_order(text, episode.options) for text in reply.scored_texts)
        scores = tuple(reward(order, truth) for order in orders)
        return replace(
            episode,
            status="accepted",
            response=reply,
            orders=orders,
            predictions=tuple(", ".join(order.letters) or None for order in orders),
            rule=scores,
            scores=scores,
        )

    def groups(
        self, episodes: Sequence[ReconstructionEpisode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        c = self.config
        return responder_groups(episodes, c.to_advantages, c.keep_equal)

    def metrics(self, episodes: Sequence[ReconstructionEpisode]) -> Metrics:
        """Return shares of statuses, rewards and the rewards of a guess, in total and by K."""
        metrics = Metrics()
        for e in episodes:
            e.count_unparsed(metrics)
            for status in ("accepted", NO_PUZZLE, OVERLONG):
                metrics.add(status, e.status == status)
            metrics.add("cut_documents", e.posed.cut, e.posed.puzzle is not None)
            if e.scores:
                metrics.add("options", e.options)
                metrics.add("unsolved", max(e.scores) <= 0)
                metrics.add("fully_solved", min(e.scores) >= 1)
                for suffix in ("", f"/{e.options}"):
                    _count(metrics, e, suffix)
        count_reasons(metrics, episodes)
        metrics.add("stream_repeats", self.stream.repeats)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])


def _count(metrics: Metrics, e: ReconstructionEpisode, suffix: str) -> None:
    metrics.add(f"solve_rate{suffix}", e.mean_score)
    metrics.add(f"mixed{suffix}", e.mixed)
    for order in e.orders:
        metrics.add(f"permutation{suffix}", order.is_permutation)
    # A guess earns less with more options, so under a curriculum a reward means little without it.
    for (name, reward), guess in zip(
        REWARDS.items(), puzzles.chance_rewards(e.options), strict=True
    ):
        metrics.add(f"{name}_by_chance{suffix}", guess)
        for order in e.orders:
            metrics.add(f"{name}_reward{suffix}", reward(order, e.posed.truth))
