"""RULER and the needle grid: synthetic tasks of any length that measure the use of long contexts.

Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?",
section 3 and appendix B. The constants are theirs, the wording is ours. Four families of tasks:

1. niah_*: needles ("a secret number of KEY is VALUE") in noise, in prose or among other needles.
2. vt: variables that get a value through a chain of assignments (multi-hop tracing).
3. cwe, fwe: the most common words of a list (aggregation).
4. qa: questions about documents that are mixed with the documents of other questions.

The model writes its whole turn; the original's prompt begins the answer for it ("... are:"). The
grid has one needle in prose, like niah_single_2, for each depth and length (Kamradt 2023, "Needle
In A Haystack - pressure testing LLMs"). No training data has the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.data.questions import Question
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.evaluation.generated import haystack
from spell_jax.evaluation.generated.haystack import HaystackSource, Make, Names, Pile, letters

ITEMS = 500  # questions per task and length, as in the paper
# Tokens of an answer. The original has 30 to 128, after a beginning of the answer that the prompt
# supplies; as there, they count as a part of the length.
_ANSWER, _LISTED_ANSWER = 128, 256

# (source, generator of the item) -> (tokens of filling -> question). The first call samples the
# question, so that it stays the same for every amount of filling.
Task = Callable[[HaystackSource, np.random.Generator], Make]

# Depths of needles in prose, as fractions of its tokens: 40 values, evenly spaced in [0, 1]. In
# noise and among other needles, a needle can have any depth.
_DEPTHS = np.round(np.linspace(0, 1, 40), 2)

# Variables of "vt" after the first one.
_HOPS = 4

GRID_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
GRID_DEPTHS = tuple(round(0.1 * step, 1) for step in range(11))


def ruler(
    task: str,
    source: HaystackSource,
    rows: Sequence[Question] = (),
    items: int = ITEMS,
    seed: int = 0,
) -> Benchmark:
    """Build one task of `TASKS` at the length of `source`; the same arguments give the same items.

    Each of `rows`, the questions of "qa", is asked once, so there are at most as many items. Items
    have the fields "length" (the maximum) and "tokens" (of the prompt), and for niah_* "depths"
    (fractions of the haystack before the needles asked for). Raises ValueError if the prose
    (`PROSE_TASKS`) or the rows are missing or too short, or the length is too short for the
    question.
    """
    # A prompt of 128K tokens takes 0.3 to 0.6 s on one core with Qwen's tokenizer. Counting the
    # whole prompt takes 0.3 s of this time, and guarantees the length.
    answer = _LISTED_ANSWER if task == "cwe" else _ANSWER
    base = [seed, zlib.crc32(task.encode()), source.length]
    if task == "qa":
        order = np.random.default_rng(base).permutation(len(rows))[:items]
        pool = tuple(dict.fromkeys(itertools.chain(*(row.documents for row in rows))))
        tasks: list[Task] = [functools.partial(_qa, row=rows[i], pool=pool) for i in order]
    else:
        tasks = [_GENERATED[task]] * items
    fitted_items = []
    for index, build_task in enumerate(tasks):
        # A generator per item: item i is the same for every number of items.
        make = build_task(source, np.random.default_rng([*base, index]))
        fitted_items.append(haystack.fit(make, source, f"{task}-{source.length}-{index}", answer))
    return Benchmark(
        name=f"ruler_{task}_{source.length}",
        title=f"RULER {task}, {source.length:,} tokens",
        items=tuple(fitted_items),
        extract=haystack.extract,
        score=haystack.match_part if task == "qa" else haystack.match_all,
        max_tokens=answer,
    )


def needle(
    name: str,
    source: HaystackSource,
    lengths: Sequence[int],
    items: int | None = None,
    seed: int = 0,
) -> Benchmark:
    """Build the needle grid: one item per length and depth, with lengths in the outer loop.

    A needle is placed at the nearest end of a sentence before its depth. `lengths` are maximum
    numbers of tokens in a prompt and its answer; the length of `source` does not count. More
    `items` than one grid repeat it; None makes one grid. Items have the requested "depth" and
    "length", which are the fields of the breakdown, and the actual number of "tokens". Raises
    ValueError if there is no prose, or a length is too short for the question.
    """
    cells = list(itertools.product(lengths, enumerate(GRID_DEPTHS)))
    fitted_items = []
    for number in range(items or len(cells)):
        repeat, cell = divmod(number, len(cells))
        length, (row, depth) = cells[cell]
        source = dataclasses.replace(source, length=length)  # keeps the token counts of sentences
        make = _grid_needle(source, np.random.default_rng([seed, length, row, repeat]), depth)
        fitted_items.append(
            haystack.fit(make, source, f"needle-{length}-{depth}-{repeat}", _ANSWER, depth=depth)
        )
    return Benchmark(
        name=name,
        title="needle in a haystack",
        items=tuple(fitted_items),
        extract=haystack.extract,
        score=haystack.match_all,
        max_tokens=_ANSWER,
        by=("length", "depth"),
    )


def _grid_needle(source: HaystackSource, rng: np.random.Generator, depth: float) -> Make:
    names, pile = Names(rng, source.text), source.prose(rng)
    key, value = names.sample("word"), names.sample("number")
    question = _secret_question("number", [key])

    def make_item(budget: int) -> BenchmarkItem:
        needles = [_secret("number", key, value)]
        hay = haystack.insert_needles(pile.take(budget), needles, [depth])
        return BenchmarkItem(
            "", _secret_prompt("number", " ".join(hay), question), question, (value,)
        )

    return make_item


def _niah(
    source: HaystackSource,
    rng: np.random.Generator,
    *,
    hay: str = "prose",
    key: str = "word",
    value: str = "number",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Make:
    """Ask for needles in a haystack (paper section 3.1).

    `hay` is the filling: "noise", "prose" or "needles". `keys` keys have `values` needles each;
    `queries` of the keys are asked for. `key` and `value` are kinds of `Names`.
    """
    names = Names(rng, source.text if hay == "prose" else "")
    hidden = {names.sample(key): [names.sample(value) for _ in range(values)] for _ in range(keys)}
    needles = [(k, v) for k, key_values in hidden.items() for v in key_values]
    if hay == "prose":
        depths = rng.choice(_DEPTHS, len(needles), replace=False).tolist()
        pile = source.prose(rng)
    else:
        depths = rng.random(len(needles)).round(4).tolist()
        other_needles = (
            _secret(value, names.sample(key), names.sample(value)) for _ in itertools.count()
        )
        pile = source.noise() if hay == "noise" else source.pile(other_needles, after="\n")
    asked_keys = list(hidden)[:queries]  # keys are random, so the first ones are as well
    question = _secret_question(value, asked_keys, values)
    answers = [(v, depth) for (k, v), depth in zip(needles, depths, strict=True) if k in asked_keys]
    texts = [_secret(value, *pair) for pair in needles]

    def make_item(budget: int) -> BenchmarkItem:
        lines = haystack.insert_needles(pile.take(budget), texts, depths)
        prompt = _secret_prompt(value, (" " if hay == "prose" else "\n").join(lines), question)
        references = tuple(v for v, _ in answers)
        return BenchmarkItem(
            "", prompt, question, references, {"depths": [depth for _, depth in answers]}
        )

    return make_item


def _secret(kind: str, key: str, value: str) -> str:
    return f"A secret {kind} of {key} is {value}."


def _secret_question(kind: str, keys: Sequence[str], values: int = 1) -> str:
    listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
    if len(keys) * values == 1:
        return f"What is the secret {kind} of {listed}? Answer with the {kind} alone."
    return f"What are all the secret {kind}s of {listed}? Answer with the {kind}s alone."


def _secret_prompt(kind: str, hay: str, question: str) -> str:
    return (
        f"Somewhere in the text below, secret {kind}s are told. Keep them in mind: there is a "
        f"question about them at the end.\n\n{hay}\n\n{question}"
    )


def _variable_tracking(source: HaystackSource, rng: np.random.Generator) -> Make:
    """Ask which variables have a value, directly or through other variables (paper section 3.2)."""
    names, pile = Names(rng), source.noise()
    number, shown_number = (rng.choice(90_000, 2, replace=False) + 10_000).tolist()
    chain = [names.sample("variable") for _ in range(_HOPS + 1)]
    shown: list[str] = []
    while len(shown) < _HOPS + 1:
        if (name := letters(rng, 3).upper()) not in shown:
            shown.append(name)
    depths, shown_depths = np.sort(rng.random((2, _HOPS + 1)), axis=1).tolist()
    example_prompt, _ = _chain_prompt([(haystack.NOISE, 1)] * 5, shown, shown_number, shown_depths)
    example = f"Example:\n\n{example_prompt}\n{', '.join(shown)}\n\nYour turn:\n\n"

    def make_item(budget: int) -> BenchmarkItem:
        prompt, question = _chain_prompt(pile.take(budget), chain, number, depths)
        return BenchmarkItem("", example + prompt, question, tuple(chain))

    return make_item


def _chain_prompt(
    pieces: Sequence[tuple[str, int]], chain: Sequence[str], number: int, depths: Sequence[float]
) -> tuple[str, str]:
    """Return (prompt, question); `depths` ascend."""
    values = [str(number), *(f"VAR {name}" for name in chain[:-1])]
    statements = [f"VAR {name} = {value}" for name, value in zip(chain, values, strict=True)]
    lines = haystack.insert_needles(pieces, statements, depths)
    question = (
        f"Which {len(chain)} variables have the value {number}, assigned to them or "
        "passed on by another variable? Answer with their names alone."
    )
    head = "Follow the assignments of variables that are scattered over the text below."
    return "\n".join((head, "", *lines, "", question)), question


# The list has 10 common words 30 times each and other words 3 times each (paper section 3.3). The
# example has 40 words in total: common ones 10 times, others 3 times. Up to 8K tokens it has 20
# words: common ones 3 times, others once. The original uses this small example below 4K only. Our
# words are pairs, so that they never run out; they have 4 tokens, the original's have 1 or 2.
_COMMON, _OFTEN, _SELDOM = 10, 30, 3
_SMALL_EXAMPLE, _EXAMPLE = (20, 3, 1), (40, 10, 3)


def _common_words(source: HaystackSource, rng: np.random.Generator) -> Make:
    """Ask for the ten most common words of a numbered list (paper section 3.3)."""
    names, order = Names(rng), int(rng.integers(2**32))
    words, often, seldom = _SMALL_EXAMPLE if source.length <= 8192 else _EXAMPLE
    shown = [names.sample("word") for _ in range(words)]
    common = [names.sample("word") for _ in range(_COMMON)]
    question = f"Which {_COMMON} words are the most common in the list? Answer with them alone."
    example_prompt = _words_prompt(shown[:_COMMON], shown[_COMMON:], often, seldom, question, order)
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(shown[:_COMMON], start=1))
    example = f"Example:\n\n{example_prompt}\n{answer}\n\nYour turn:\n\n"

    def uncommon() -> Iterator[tuple[str, int]]:
        for start in itertools.count(_COMMON * _OFTEN + 1, _SELDOM):
            word = names.sample("word")
            # The numbers cost tokens, too. Which numbers a word gets does not matter: the list has
            # all numbers up to its length.
            numbers = (source.cost(f" {number}.") for number in range(start, start + _SELDOM))
            yield word, _SELDOM * source.cost(f" {word}") + sum(numbers)

    pile = Pile(uncommon())

    def make_item(budget: int) -> BenchmarkItem:
        uncommon_words = [word for word, _ in pile.take(budget)]
        prompt = _words_prompt(common, uncommon_words, _OFTEN, _SELDOM, question, order)
        return BenchmarkItem("", example + prompt, question, tuple(common))

    return make_item


def _words_prompt(
    common: list[str], uncommon: list[str], often: int, seldom: int, question: str, order: int
) -> str:
    words = _shuffled(common * often + uncommon * seldom, order)
    listed = " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))
    head = "Some words of this numbered list come again more often than the others."
    return f"{head}\n\n{listed}\n\n{question}"


def _shuffled(texts: list[str], seed: int) -> list[str]:
    return [texts[i] for i in np.random.default_rng(seed).permutation(len(texts)).tolist()]


def _frequent_words(source: HaystackSource, rng: np.random.Generator) -> Make:
    """Ask for the three most frequent made-up words of a text (paper section 3.3).

    In a text of N words, the k-th most frequent word occurs floor(N k^-2 / zeta(2)) times. The
    first one is "...", which the question excludes. The next three are the answer.
    """
    # From this N on, the fourth word is always more frequent than the fifth.
    min_words = 64
    max_words = min_words + 2 * source.length  # upper bound; the sum of floors is less than N
    names, order = Names(rng), int(rng.integers(2**32))
    # Only ranks that occur: k^2 <= N / zeta(2) < N.
    words = ["...", *(names.sample("code") for _ in range(math.isqrt(max_words)))]
    costs = np.array([source.cost(f" {word}") for word in words])
    shares = np.arange(1, len(words) + 1) ** -2.0
    shares /= math.pi**2 / 6  # zeta(2)
    question = (
        'Which three words are the most frequent in the text, not counting the dots "..."? '
        "Answer with the three words alone."
    )

    def make_item(budget: int) -> BenchmarkItem:
        base = np.floor(min_words * shares) @ costs
        # Bisection works, because the cost of a text rises with N.
        low, high = min_words, max_words  # the largest N that the budget allows
        while low < high:
            middle = (low + high + 1) // 2
            fits = np.floor(middle * shares) @ costs - base <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        repeats = np.repeat(words, np.floor(low * shares).astype(int)).tolist()
        coded = " ".join(_shuffled(repeats, order))
        head = "Keep track of how often each word of this made-up language comes in the text."
        return BenchmarkItem("", f"{head}\n\n{coded}\n\n{question}", question, tuple(words[1:4]))

    return make_item


def _qa(
    source: HaystackSource, rng: np.random.Generator, *, row: Question, pool: Sequence[str]
) -> Make:
    """Ask a question after its own and other questions' documents, shuffled (paper section 3.4)."""
    question_documents, order = tuple(dict.fromkeys(row.documents)), int(rng.integers(2**32))
    pool_documents = (pool[int(index)] for index in rng.permutation(len(pool)))
    pile = source.pile(
        (text for text in pool_documents if text not in question_documents),
        "Document 100:\n",
        "\n\n",
    )
    head = "Answer the question from the documents below. Answer with a few words alone."
    question = f"Question: {row.question}"

    def make_item(budget: int) -> BenchmarkItem:
        documents = _shuffled(
            [*question_documents, *(text for text, _ in pile.take(budget))], order
        )
        numbered = [f"Document {i}:\n{text}\n" for i, text in enumerate(documents, start=1)]
        prompt = "\n".join((head, "", *numbered, head, question))
        return BenchmarkItem("", prompt, row.question, row.right)

    return make_item


_NIAH: Mapping[str, Mapping[str, Any]] = {
    "niah_single_1": {"hay": "noise"},
    "niah_single_2": {},
    "niah_single_3": {"value": "uuid"},
    "niah_multikey_1": {"keys": 4},
    "niah_multikey_2": {"hay": "needles"},
    "niah_multikey_3": {"hay": "needles", "key": "uuid", "value": "uuid"},
    "niah_multivalue": {"values": 4},
    "niah_multiquery": {"keys": 4, "queries": 4},
}
PROSE_TASKS = tuple(name for name, options in _NIAH.items() if "hay" not in options)
_GENERATED: Mapping[str, Task] = {
    **{name: functools.partial(_niah, **options) for name, options in _NIAH.items()},
    "cwe": _common_words,
    "fwe": _frequent_words,
    "vt": _variable_tracking,
}
TASKS = (*_GENERATED, "qa")
