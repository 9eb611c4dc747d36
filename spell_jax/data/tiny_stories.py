"""Generated stories whose line order can be inferred: the demo of document reconstruction.

1. A letter passes from person to person. A story opens with its writer, "Arvo". Each line starts
   with the person that the previous line ended with: "Arvo to Bela", then "Bela to Dina".
2. A missing line therefore starts with the last person named before the gap. If two adjacent lines
   are missing, the first one must be found to know how the second one starts.
3. Names come from the tiny world. Its tokenizer has one token for each name with a space before it,
   so lines are indented.
4. No person gets the letter twice. There are no blank lines, so every line is a paragraph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from spell_jax.data.clusters import Cluster
from spell_jax.data.tiny_world import NAMES

MOST_LINES = len(NAMES) - 1  # without the opening; the last person has no line
# In characters. The opening is shorter, so it is never removed as an option.
SHORTEST_LINE = len("Udo to Wim")


def make_story(rng: np.random.Generator, lines: int) -> str:
    """Generate a story with N = `lines` lines after its opening.

    Raises:
      ValueError: if there are not enough names.
    """
    if not 1 <= lines <= MOST_LINES:
        raise ValueError(f"lines = {lines}: must be 1 to {MOST_LINES} (a name each, and a last)")
    people = [NAMES[i] for i in rng.permutation(len(NAMES))[: lines + 1]]
    handed_on = [f" {giver} to {taker}" for giver, taker in itertools.pairwise(people)]
    return "\n".join([f" {people[0]}", *handed_on])


def make_stories(
    seed: int, count: int, lines: Sequence[int], prefix: str = "story"
) -> list[Cluster]:
    """Generate seeded clusters of one story each; their lengths cycle through `lines`."""
    stories = []
    for index in range(count):
        # The 5 separates this random stream from those of algorithms and of tiny_world's clusters.
        rng = np.random.default_rng([seed, index, 5])
        text = make_story(rng, lines[index % len(lines)])
        stories.append(Cluster(f"{prefix}-{seed}-{index}", (text,)))
    return stories
