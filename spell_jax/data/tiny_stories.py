"""Generated stories whose order can be told: the demo of document reconstruction.

1. A letter goes from hand to hand. A story opens with who wrote it, "Arvo"; each line goes on with
   the person that the line before it ended with: "Arvo to Bela", then "Bela to Dina".
2. A missing line is thus about who was named last before the gap. Where two neighbors are missing,
   the option for the first one must be found to know whom the second one is about.
3. Names are the tiny world's, so that its tokenizer has a token for each, with a space before it;
   therefore lines are indented. Nobody has the letter twice. There are no blank lines, so that
   every line is a paragraph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from spell_jax.data.clusters import Cluster
from spell_jax.data.tiny_world import NAMES

MOST_LINES = len(NAMES) - 1  # besides the opening; whom the last one names has no line
# Characters of a line. The opening is shorter: it is no option, and always stays.
SHORTEST_LINE = len("Udo to Wim")


def make_story(rng: np.random.Generator, lines: int) -> str:
    """A story of so many lines behind its opening.

    Raises:
      ValueError: there are not as many names.
    """
    if not 1 <= lines <= MOST_LINES:
        raise ValueError(f"lines = {lines}: must be 1 to {MOST_LINES} (a name each, and a last)")
    people = [NAMES[i] for i in rng.permutation(len(NAMES))[: lines + 1]]
    handed_on = [f" {giver} to {taker}" for giver, taker in itertools.pairwise(people)]
    return "\n".join([f" {people[0]}", *handed_on])


def make_stories(
    seed: int, count: int, lines: Sequence[int], prefix: str = "story"
) -> list[Cluster]:
    """Seeded clusters of one story each; their lengths cycle through `lines`."""
    stories = []
    for index in range(count):
        # The 5 tells these draws from those of an algorithm and of the tiny world's clusters.
        rng = np.random.default_rng([seed, index, 5])
        text = make_story(rng, lines[index % len(lines)])
        stories.append(Cluster(f"{prefix}-{seed}-{index}", (text,)))
    return stories
