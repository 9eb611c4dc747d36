"""Generated stories for document reconstruction: the order of their lines can be inferred.

A letter passes from person to person; none gets it twice. A story opens with its writer, "Arvo".
Each line starts with the person that the previous line ended with: "Arvo to Bela", then "Bela to
Dina". A missing line therefore starts with the last person named before the gap. There are no blank
lines, so every line is a paragraph.
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
    """Generate a story of `lines` lines after its opening; ValueError if names run out."""
    if not 1 <= lines <= MOST_LINES:
        raise ValueError(f"lines = {lines}: must be 1 to {MOST_LINES} (one name each, and a last)")
    people = [NAMES[i] for i in rng.permutation(len(NAMES))[: lines + 1]]
    # Indented, because the tiny world's tokenizer has one token for a name with a space before it.
    handovers = [f" {giver} to {taker}" for giver, taker in itertools.pairwise(people)]
    return "\n".join([f" {people[0]}", *handovers])


def make_stories(
    seed: int, count: int, lines: Sequence[int], prefix: str = "story"
) -> list[Cluster]:
    """Generate seeded clusters of one story each; their lengths cycle through `lines`."""
    stories = []
    for index, size in zip(range(count), itertools.cycle(lines), strict=False):
        # The 5 separates this random stream from algorithms and from tiny_world's clusters.
        text = make_story(np.random.default_rng([seed, index, 5]), size)
        stories.append(Cluster(f"{prefix}-{seed}-{index}", (text,)))
    return stories
