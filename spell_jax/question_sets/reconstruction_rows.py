"""Format rows of document reconstruction: puzzles from real texts, answered in random order.

    python -m spell_jax.question_sets.reconstruction_rows --source=BOOKS --out=rows.jsonl

A completion is a box with the letters of all options in random order. The rows use the texts in
shuffled order: each a whole text, or a window of a text that fits --prompt_words.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
from absl import flags

from spell_jax.data import tfds_sets
from spell_jax.data.clusters import count_words
from spell_jax.data.config import DataConfig, open_clusters
from spell_jax.question_sets.rows import Row
from spell_jax.runtime import dataclass_flags, entry
from spell_jax.runtime.config import check_least
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay import puzzles
from spell_jax.selfplay.prompts import Prompts
from spell_jax.selfplay.puzzles import FEWEST_OPTIONS, MOST_OPTIONS, PromptedPuzzle

TRIES = 10  # passes over all texts without a puzzle after which the command gives up


@dataclasses.dataclass(frozen=True)
class ReconstructionRowConfig:
    """Composition of the rows.

    Attributes:
      rows: number of rows.
      options: values of K, the number of options, in turn.
      prompt_words: most words of a prompt.
      min_paragraph: fewest characters of an option.
      max_paragraph: most characters of an option.
      seed: seed of all choices.
    """

    rows: int = 200
    options: tuple[int, ...] = (3, 4)
    prompt_words: int = 600
    min_paragraph: int = 80
    max_paragraph: int = 1000
    seed: int = 0

    def __post_init__(self):
        check_least(self, "", rows=1, prompt_words=1, min_paragraph=1, seed=0)
        check_least(self, "", max_paragraph=self.min_paragraph)
        if not self.options or not all(FEWEST_OPTIONS <= k <= MOST_OPTIONS for k in self.options):
            raise ValueError(
                f"options = {self.options}: each must be {FEWEST_OPTIONS} to {MOST_OPTIONS}"
            )


def make_rows(
    texts: Sequence[str], config: ReconstructionRowConfig, prompts: Prompts
) -> tuple[list[Row], Counter[str]]:
    """Make config.rows rows, and count the reasons why texts gave none.

    ValueError if no text gives a row.
    """
    rng = np.random.default_rng(config.seed)
    rows: list[Row] = []
    counts: Counter[str] = Counter()
    order: list[int] = []  # texts to come of this pass
    failures = 0
    while len(rows) < config.rows:
        order = order or rng.permutation(len(texts)).tolist()
        # In turn, so that all values of K have equally many rows, up to one.
        options = config.options[len(rows) % len(config.options)]
        # As the algorithm does by default, without neighboring gaps.
        lengths, text = (config.min_paragraph, config.max_paragraph), texts[order.pop()]
        posed = puzzles.pose(
            rng, text, options, lengths, False, prompts, count_words, config.prompt_words
        )
        failures = 0 if posed.puzzle else failures + 1
        if posed.puzzle:
            rows.append(_row(rng, posed))
        else:
            counts[posed.reason] += 1
        # A window is sampled anew in each pass, so one pass without a puzzle proves little.
        if failures >= TRIES * len(texts):
            raise ValueError(f"source: no text gives a puzzle of {options} options: {dict(counts)}")
    return rows, counts


def _row(rng: np.random.Generator, posed: PromptedPuzzle) -> Row:
    # Random, so that rows teach how an order is written and nothing about which order is right: the
    # right order is what reinforcement learning is measured by.
    letters = ", ".join(rng.permutation(posed.truth).tolist())
    return Row(posed.prompt, f"\\boxed{{{letters}}}", "responder", "reconstruction")


def main(_) -> None:
    values = flags.FLAGS
    config = dataclass_flags.read(ReconstructionRowConfig, values)
    # Whole texts, one in each cluster: make_puzzle chooses windows by words, before there is any
    # tokenizer to count tokens with.
    data = DataConfig(
        source=values.source,
        documents_per_cluster=1,
        max_document_tokens=sys.maxsize,
        **tfds_sets.read_flags(values),
    )
    source, _ = open_clusters(data, values.seed, count_words)
    texts = ["\n\n".join(cluster.documents) for cluster in source.read(sorted(source.tasks))]
    rows, counts = make_rows(texts, config, prompt_sets.load(values.prompts))
    write_records(values.out, map(dataclasses.asdict, rows))
    print(json.dumps({"rows": len(rows), "texts": len(texts), "left out": counts}))


if __name__ == "__main__":
    flags.DEFINE_string("source", None, "Texts, as data.source takes them.", required=True)
    tfds_sets.define_flags()
    flags.DEFINE_string("out", None, "JSONL of rows to write.", required=True)
    dataclass_flags.define(ReconstructionRowConfig)
    flags.DEFINE_string("prompts", "compact", "full, compact or a folder of templates.")
    entry.run_main(main)
