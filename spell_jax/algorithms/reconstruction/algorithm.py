"""Document reconstruction: paragraphs go back to where they were (one prompt, G answers, a rule).

1. pose    K paragraphs of a document are taken out, and shown as options in mixed order. K rises
           over the run (curriculum). Of a document over the cap, neighboring paragraphs are taken.
2. answer  the policy answers each puzzle G times with the order of the options.
3. reward  the share of right places, or whether all are right: dense and sparse (1, 2).
4. rows    groups whose rewards differ are trained on, with advantages over the group (GRPO).

Nobody labels anything: any document with enough paragraphs will do. The paper takes 128 documents a
step and contexts of 64K tokens, 4096 of them for an answer; its 14,000 documents are the longest of
three domains, which sources of the data pipeline are weighted for. Numbers in parentheses are
equations of "Document Reconstruction Unlocks Scalable Long-Context RLVR", as are the sections.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import (
    AlgorithmConfig,
    AlgorithmContext,
    Models,
    Reply,
    RolloutBudget,
)
from spell_jax.data import clusters
from spell_jax.data.clusters import Cluster
from spell_jax.learner.advantages import group_advantages
from spell_jax.learner.packing import Group
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import puzzles
from spell_jax.selfplay.puzzles import FEWEST_OPTIONS, MOST_OPTIONS, Order, Posed

REWARDS = {"dense": puzzles.dense_reward, "sparse": puzzles.sparse_reward}
ROUNDS = 4  # of drawing documents, at most, where some give no puzzle


@dataclasses.dataclass(frozen=True)
class ReconstructionConfig(AlgorithmConfig):
    """Every switch of the algorithm; the defaults are the paper's.

    Attributes:
      documents: of a step, one puzzle each [paper: prompt batch size].
      group_size: G, answers to a puzzle.
      reward: "dense" (1) or "sparse" (2).
      options, option_weights: K is one of these numbers, in these proportions. The paper prints
        3:3:5 for four values; its 14,000 documents and section 5.3 suggest 3:3:3:5.
      curriculum: K rises from step to step, the run as a whole having these proportions; False
        draws it for each puzzle (the shuffled variant, section 5.6).
      most_documents: clusters that are played; 0: all.
      selection: which, by characters: the "longest", "shortest" or "random" ones (section 5.4).
      min_paragraph, max_paragraph: characters of an option. The paper names none; a shorter
        paragraph says nothing, a longer one leaves little of the document.
      divide_by_deviation: whether advantages are in deviations of their group.
      keep_equal: whether groups of equal rewards stay among the rows: they teach nothing, but the
        loss is averaged over them as well.
      evaluation_puzzles, validation_puzzles: held-out ones of each K, before and after a run
        [paper: 500 in all], and during it.
    """

    name: str = "reconstruction"
    documents: int = 128
    group_size: int = 8
    reward: str = "dense"
    options: tuple[int, ...] = (2, 4, 6, 8)
    option_weights: tuple[float, ...] = (3.0, 3.0, 3.0, 5.0)
    curriculum: bool = True
    most_documents: int = 0
    selection: str = "longest"
    min_paragraph: int = 80
    max_paragraph: int = 4000
    divide_by_deviation: bool = True
    keep_equal: bool = False
    evaluation_puzzles: int = 125
    validation_puzzles: int = 32

    def __post_init__(self):
        super().__post_init__()
        check_choice(self, "algorithm.", reward=tuple(REWARDS), selection=clusters.SELECTIONS)
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
        """Of a step."""
        return [
            RolloutBudget("answers", "responder", self.documents, self.group_size, self.documents)
        ]


@dataclasses.dataclass
class Episode:
    """A puzzle of a cluster (its documents one after the other) and what became of it.

    Attributes:
      options: K.
      posed: the puzzle, or why there is none.
      reply: G answers, the orders that they state, and their rewards.
      advantages: of the answers, where they are trained on (`rows`).
    """

    cluster: Cluster
    options: int
    posed: Posed
    reply: Reply | None = None
    orders: list[Order] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    advantages: list[float] = dataclasses.field(default_factory=list)

    @property
    def status(self) -> str:
        if self.scores:
            return "accepted"
        fits = self.posed.puzzle is None and self.posed.reason != puzzles.OVERLONG
        return "skipped" if fits else puzzles.OVERLONG

    @property
    def mixed(self) -> bool:
        """Whether rewards differ, so that something can be learned from them."""
        return len(set(self.scores)) > 1


def pose(
    rng: np.random.Generator,
    cluster: Cluster,
    options: int,
    config: ReconstructionConfig,
    context: AlgorithmContext,
) -> Posed:
    """A puzzle of K options from a cluster's documents, or why there is none."""
    make = functools.partial(
        puzzles.make_puzzle,
        rng,
        options=options,
        min_paragraph=config.min_paragraph,
        max_paragraph=config.max_paragraph,
    )
    text = "\n\n".join(cluster.documents)
    ask, count = context.prompts.reconstruction, context.count_tokens
    return puzzles.pose(make, ask, rng, text, count, context.prompt_cap)


class Reconstruction:
    """The algorithm; `play` makes a step's episodes and `rows` its training groups."""

    models = ()
    trained = ()

    def __init__(self, config: ReconstructionConfig, context: AlgorithmContext):
        self.config = config
        self._materials = context
        self.stream = context.deal(
            clusters.select(
                context.clusters(), config.selection, config.most_documents, context.seed
            )
        )

    def play(self, models: Models, step: int) -> list[Episode]:
        """A step's puzzles, answered and rewarded."""
        episodes = self.invite(step)
        asked = [e for e in episodes if e.posed.puzzle]
        prompts = [e.posed.prompt for e in asked]
        replies = models("responder", prompts, self.config.group_size)
        for e, reply in zip(asked, replies, strict=True):
            if reply:
                e.reply = reply
                e.orders = [puzzles.parse_order(text, e.options) for text in reply.texts]
                e.scores = [REWARDS[self.config.reward](o, e.posed.truth) for o in e.orders]
        return episodes

    def invite(self, step: int) -> list[Episode]:
        """Puzzles from as many documents as a step has; in the place of those that give none others
        are drawn, some rounds long. A draw depends on seed, step and number alone."""
        episodes: list[Episode] = []
        posed, wanted = 0, self.config.documents
        for _ in range(ROUNDS):
            for _, cluster in self.stream.next(wanted - posed) if posed < wanted else ():
                rng = np.random.default_rng([self._materials.seed, step, len(episodes)])
                options = self._options(rng, (step - 1) * wanted + posed)
                found = pose(rng, cluster, options, self.config, self._materials)
                episodes.append(Episode(cluster, options, found))
                posed += found.puzzle is not None
        return episodes

    def _options(self, rng: np.random.Generator, number: int) -> int:
        """K of the run's puzzle of this number, from 0."""
        c, drawn = self.config, rng.random()
        share = (number + 0.5) / (c.documents * self._materials.steps)
        return puzzles.options_of(share if c.curriculum else drawn, c.options, c.option_weights)

    def rows(self, episodes: Sequence[Episode]) -> list[Group]:
        """The groups whose rewards differ (with keep_equal all), and their advantages."""
        groups = []
        for e in episodes:
            if e.reply and (e.mixed or self.config.keep_equal):
                divide = self.config.divide_by_deviation
                e.advantages = group_advantages(e.scores, divide_by_deviation=divide).tolist()
                groups.append(e.reply.group(e.advantages, "responder"))
        return groups

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """What became of puzzles, and rewards beside those of a guess, over all and by K."""
        metrics = Metrics()
        for e in episodes:
            for status in ("accepted", "skipped", puzzles.OVERLONG):
                metrics.add(status, e.status == status)
            metrics.add("cut_documents", e.posed.cut, e.posed.puzzle is not None)
            if e.scores:
                metrics.add("options", e.options)
                metrics.add("unsolved", max(e.scores) <= 0)
                metrics.add("fully_solved", min(e.scores) >= 1)
                for suffix in ("", f"/{e.options}"):
                    _count(metrics, e, suffix)
        for reason, count in Counter(e.posed.reason for e in episodes if e.posed.reason).items():
            metrics.add_sum(f"reason/{reason}", count, len(episodes))
        metrics.add("stream_repeats", self.stream.repeats)
        return metrics

    def record(self, episode: Episode) -> dict[str, Any]:
        """What a run's files hold; in "prompt", {document} stands for the window of the text with
        gaps, which are at the spans of the window."""
        e, puzzle = episode, episode.posed.puzzle
        ask = self._materials.prompts.reconstruction
        unused = "equal_rewards" if e.scores else e.status
        return {
            "task": "reconstruction",
            "cluster": e.cluster.id,
            "status": e.status,
            "reason": e.posed.reason,
            "options": e.options,
            "window": list(e.posed.window),
            "prompt": ask("{document}", puzzle.options) if puzzle else "",
            "question": f"order of {e.options} paragraphs",
            "reference": ", ".join(puzzle.truth) if puzzle else "",
            "spans": [list(span) for span in puzzle.spans] if puzzle else [],
            "answers": list(e.reply.texts) if e.reply else [],
            "predictions": [", ".join(order.letters) or None for order in e.orders],
            "rule": e.scores,
            "scores": e.scores,
            "advantages": {"responder": e.advantages} if e.advantages else {},
            "used": {"responder": "used" if e.advantages else unused},
        }

    def cluster(self, episode: Episode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])


def _count(metrics: Metrics, e: Episode, suffix: str) -> None:
    """Adds what the answers to a puzzle came to; names end in `suffix`."""
    metrics.add(f"solve_rate{suffix}", sum(e.scores) / len(e.scores))
    metrics.add(f"mixed{suffix}", e.mixed)
    for order in e.orders:
        metrics.add(f"permutation{suffix}", order.is_permutation)
    for (name, reward), guess in zip(REWARDS.items(), puzzles.chance(e.options), strict=True):
        metrics.add(f"{name}_by_chance{suffix}", guess)
        for order in e.orders:
            metrics.add(f"{name}_reward{suffix}", reward(order, e.posed.truth))
