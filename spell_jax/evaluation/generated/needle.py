"""Needle in a haystack: one sentence hidden in prose, over a grid of depths and lengths.

The grid follows Kamradt 2023, "Needle In A Haystack - pressure testing LLMs". The needle is like
that of RULER's niah_single_2 (Hsieh et al. 2024, section 3.1): no training data has the answer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.generated import haystack, ruler
from spell_jax.evaluation.generated.haystack import Draft, Source
from spell_jax.evaluation.generated.names import Names

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
DEPTHS = tuple(round(0.1 * step, 1) for step in range(11))


def needle(
    seed: int,
    count_tokens: Callable[[str], int],
    text: str,
    *,
    count_prompt: Callable[[str], int] | None = None,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    items: int | None = None,
) -> Benchmark:
    """Build the grid: one item per length and depth, with lengths in the outer loop.

    Args:
      seed: seed of the names and of the start of each haystack in the text.
      count_tokens: text -> number of tokens.
      text: prose, repeated if it is shorter than a haystack.
      count_prompt: see `ruler`.
      lengths: maximum numbers of tokens in a prompt, without the answer; a prompt has at least 0.95
        of them.
      depths: fractions of the haystack's tokens before the needle, in [0, 1]. The needle is placed
        at the nearest end of a sentence before that point.
      items: number of items; more than one grid repeats it. None makes one grid.

    Returns:
      The benchmark. Its items have the requested "depth" and "length", which are the fields of its
      breakdown, and the actual number of "tokens" in the prompt.

    Raises:
      ValueError: if there are no items, a depth is not in [0, 1], the text is empty, or a length is
        too short for the question.
    """
    cells = list(itertools.product(lengths, enumerate(depths)))
    items = len(cells) if items is None else items
    if not cells or items < 1 or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(
            f"lengths = {lengths}, depths = {depths}, items = {items}: must be at least one each, "
            "depths from 0 to 1"
        )
    shared, made = Source.of(max(lengths), count_tokens, count_prompt, text), []
    for number in range(items):
        again, place = divmod(number, len(cells))
        length, (row, depth) = cells[place]
        source = dataclasses.replace(shared, length=length)  # shares the token counts of sentences
        rng = np.random.default_rng([seed, length, row, again])
        draft, tokens = haystack.fit(_hide(source, rng, depth), source)
        fields = {"depth": depth, "length": length, "tokens": tokens}
        made.append(draft.item(f"needle-{length}-{depth}-{again}", **fields))
    return Benchmark(
        name="needle",
        title="needle in a haystack",
        items=tuple(made),
        extract=haystack.extract,
        score=haystack.match_all,
        judged=False,
        max_tokens=128,
        by=("length", "depth"),
    )


def _hide(source: Source, rng: np.random.Generator, depth: float) -> Callable[[int], Draft]:
    names, pile = Names(rng, source.text), source.prose(rng)
    key, value = names.draw("word"), names.draw("number")
    question = ruler.secret_question("number", [key])

    def make(budget: int) -> Draft:
        hay = haystack.bury(pile.take(budget), [ruler.secret("number", key, value)], [depth])
        return Draft(ruler.secret_prompt("number", " ".join(hay), question), question, (value,))

    return make
