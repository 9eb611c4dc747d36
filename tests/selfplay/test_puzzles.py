"""Tests of puzzles: removed paragraphs restore the text; rewards equal brute force."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spell_jax.data.clusters import count_words
from spell_jax.selfplay import puzzles
from spell_jax.selfplay.puzzles import LABELS, Order, Puzzle

MANY = 4000


def make(
    text: str, options: int = 2, low: int = 1, high: int = 10**6, seed: int = 0, adjacent=True
) -> tuple[Puzzle | None, str]:
    return puzzles.make_puzzle(np.random.default_rng(seed), text, options, low, high, adjacent)


def valid_puzzle(text: str, *args: int, **named: int) -> Puzzle:
    puzzle, reason = make(text, *args, **named)
    assert puzzle is not None, reason
    return puzzle


def filled(puzzle: Puzzle, letters: Sequence[str]) -> str:
    """Return the puzzle's document with these options in its gaps, in order."""
    for number, letter in enumerate(letters, 1):
        before, _, after = puzzle.document.partition(f"<gap {number}>")
        puzzle = Puzzle(before + puzzle.options[letter] + after, puzzle.options, (), ())
    return puzzle.document


def a_document(seed: int) -> str:
    """Make paragraphs in any script with any white space between them; some occur twice."""
    rng = random.Random(seed)
    signs = "ab c\tdé中文🎉İß\u00a0\u2028.,(A)<gap>{}\\$\x00"
    words = ["".join(rng.choices(signs, k=rng.randint(1, 30))).strip() for _ in range(12)]
    paragraphs = [rng.choice(words) + "\n" * rng.randint(0, 1) + word for word in words]
    paragraphs += rng.choices(paragraphs, k=rng.randint(0, 2))
    rng.shuffle(paragraphs)
    borders = ("\n\n", "\n \t\n", "\r\n\r\n", "\n\n\n\n\n", "\n\u3000\n")
    around = rng.choice(("", " ", "\n\n"))
    return around + "".join(p + rng.choice(borders) for p in paragraphs) + around


# ---------------------------------------------------------------------------------- From a document


@pytest.mark.parametrize("part", range(4))
def test_correct_options_restore_the_document(part):
    puzzle_count = 0
    for seed in range(part * MANY // 4, (part + 1) * MANY // 4):
        text, options = a_document(seed), 2 + seed % 7
        puzzle, reason = make(text, options, seed=seed)
        if puzzle is None:
            assert reason in (puzzles.FEW_OPTIONS, puzzles.FEW_PARAGRAPHS)
            continue
        puzzle_count += 1
        assert filled(puzzle, puzzle.truth) == text
        assert sorted(puzzle.truth) == list(puzzle.options) == list(LABELS[:options])
        assert [text[slice(*span)] for span in puzzle.spans] == [
            puzzle.options[letter] for letter in puzzle.truth
        ]
        words = [" ".join(option.split()) for option in puzzle.options.values()]
        remaining = [" ".join(p.split()) for p in re.split(r"\n\s*\n", puzzle.document)]
        assert len({*words}) == options and not {*words} & {*remaining}
        if options < 4:  # no other order makes the same document
            orders = itertools.permutations(puzzle.truth)
            assert sum(filled(puzzle, order) == text for order in orders) == 1
    assert puzzle_count > 0.9 * MANY / 4


TEXT = "\n\n".join(f"Paragraph {letter}." for letter in "abcdefg")


def test_puzzle_is_determined_by_the_seed():
    assert valid_puzzle(TEXT, 3) == valid_puzzle(TEXT, 3)
    assert len({valid_puzzle(TEXT, 3, seed=seed).document for seed in range(40)}) > 20


def test_orders_and_paragraphs_are_sampled_uniformly():
    sampled = [valid_puzzle(TEXT, 3, seed=seed) for seed in range(3000)]
    orders = Counter(puzzle.truth for puzzle in sampled)
    assert len(orders) == 6 and min(orders.values()) > 400
    start_counts = Counter(first for puzzle in sampled for first, _ in puzzle.spans)
    assert len(start_counts) == 7 and min(start_counts.values()) > 1150  # of 9000 / 7
    neighbors = sum(
        any(b[0] - a[1] == 2 for a, b in itertools.pairwise(puzzle.spans)) for puzzle in sampled
    )
    assert neighbors == pytest.approx(3000 * 25 / 35, rel=0.05)  # 10 of 35 triples have none


def test_gaps_are_not_adjacent_unless_allowed():
    sampled = [valid_puzzle(TEXT, 3, seed=seed, adjacent=False) for seed in range(1000)]
    places = Counter(tuple(first // 14 for first, _ in puzzle.spans) for puzzle in sampled)
    even = {(0, 2, 4), (0, 2, 6), (0, 4, 6), (2, 4, 6)}
    assert places.keys() == even | {(1, 3, 5)}
    assert places[1, 3, 5] == pytest.approx(500, rel=0.1)  # either parity as often
    assert all(filled(puzzle, puzzle.truth) == TEXT for puzzle in sampled)
    # Of seven paragraphs, four are even and three odd.
    apart = [valid_puzzle(TEXT, 4, seed=seed, adjacent=False) for seed in range(20)]
    assert {len(puzzle.spans) for puzzle in apart} == {4}
    assert make(TEXT, 5, adjacent=False) == (None, puzzles.FEW_OPTIONS)


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("", 2, puzzles.FEW_PARAGRAPHS),
        ("one\n\ntwo", 2, puzzles.FEW_PARAGRAPHS),  # nothing would remain
        ("one\n\none\n\none", 2, puzzles.FEW_OPTIONS),
        ("one\n\ntwo \t a\n\ntwo\na", 2, puzzles.FEW_OPTIONS),  # equal but for white space
        (TEXT + "\n\nSee <gap 3> above", 2, puzzles.HAS_GAPS),
        (TEXT, 7, puzzles.FEW_PARAGRAPHS),
    ],
)
def test_unsuitable_text_gives_a_reason_and_no_puzzle(text, options, reason):
    assert make(text, options) == (None, reason)


def test_text_that_resembles_a_gap_is_kept():
    text = TEXT + "\n\n<gap> <gap one> <Gap 1> <gap1>"
    assert filled(valid_puzzle(text, 6), valid_puzzle(text, 6).truth) == text


def test_option_lengths_stay_within_limits():
    text = "\n\n".join("x" * n + str(n % 10) for n in range(1, 40))
    for seed in range(50):
        puzzle = valid_puzzle(text, 8, 11, 20, seed=seed)
        assert all(11 <= len(option) <= 20 for option in puzzle.options.values())
    assert make(text, 8, 11, 17) == (None, puzzles.FEW_OPTIONS)
    assert make(text, 8, 11, 18)[0] is not None


def test_lines_are_paragraphs_if_no_line_is_blank():
    assert puzzles.split_paragraphs(" a b\nc\n\t\n d \n") == [(1, 6), (10, 11)]
    assert puzzles.split_paragraphs(" a b\nc \n d ") == [(1, 4), (5, 6), (9, 10)]
    assert puzzles.split_paragraphs(" \n\n ") == []
    text = "def f():\n    return 1\nprint(f())\nprint(2)\n"
    assert filled(valid_puzzle(text, 3), valid_puzzle(text, 3).truth) == text


# ------------------------------------------------------------------------------------ Under the cap


def windows(text: str, limit: int) -> set[str]:
    window_texts = set()
    for seed in range(60):
        first, last = puzzles.cut_window(np.random.default_rng(seed), text, count_words, limit)
        window_texts.add(text[first:last])
    return window_texts


def test_text_that_fits_is_not_truncated():
    for text in (TEXT, f" {TEXT}\n\n", " one\n two"):
        assert windows(text, count_words(text)) == {text}


def test_window_holds_as_many_adjacent_paragraphs_as_fit():
    window_texts = windows(TEXT, 7)  # three of two words each
    paragraphs = TEXT.split("\n\n")
    assert window_texts == {"\n\n".join(paragraphs[i : i + 3]) for i in range(5)}
    assert windows(TEXT, 1) == windows("", 9) == {""}
    # The first paragraph that does not fit ends the window; room may remain before it.
    assert windows("a b\n\nc d e f g h\n\ni", 3) == {"a b", "i", ""}


def test_only_paragraphs_near_the_window_are_tokenized():
    text, counted = "\n\n".join(f"{i} words here" for i in range(10_000)), []

    def count(piece: str) -> int:
        counted.append(piece)
        return count_words(piece)

    puzzles.cut_window(np.random.default_rng(1), text, count, 30)
    assert len(counted) <= 12


def ask(document: str, options) -> str:
    return " ".join(["Question:", document, *(f"({k}) {text}" for k, text in options.items())])


def pose(
    text: str, cap: int, options: int = 3, seed: int = 0, count=count_words, cut: bool = True
) -> puzzles.PromptedPuzzle:
    rng = np.random.default_rng(seed)
    prompts = SimpleNamespace(reconstruction=ask, gap=puzzles.gap_marker)
    return puzzles.pose(rng, text, options, (1, 1000), True, prompts, count, cap, cut)


def test_prompts_stay_within_the_token_limit():
    text = "\n\n".join(f"{i} and more" for i in range(100))
    for seed in range(100):
        posed = pose(text, 60, seed=seed)
        assert posed.cut and posed.puzzle and posed.truth == posed.puzzle.truth
        assert 50 < count_words(posed.prompt) <= 60
        assert posed.prompt == ask(posed.puzzle.document, posed.puzzle.options)
        assert filled(posed.puzzle, posed.truth) == text[slice(*posed.window)]
    full_puzzle = pose(text, 1000)
    assert full_puzzle.puzzle and not full_puzzle.cut and full_puzzle.window == (0, len(text))
    exact = pose(text, count_words(full_puzzle.prompt))
    assert exact == full_puzzle and pose(text, count_words(full_puzzle.prompt) - 1).cut
    uncut = pose(text, 1000, cut=False)
    exact = pose(text, count_words(uncut.prompt), cut=False)
    assert exact == uncut and uncut.window == (0, len(text)) and not uncut.cut
    short = pose(text, count_words(uncut.prompt) - 1, cut=False)
    assert short == puzzles.PromptedPuzzle(reason=puzzles.OVERLONG)


def test_unsuitable_text_gives_a_reason_and_no_prompt():
    assert pose(TEXT, 7) == puzzles.PromptedPuzzle(reason=puzzles.FEW_PARAGRAPHS)
    assert pose(TEXT, 2) == puzzles.PromptedPuzzle(reason=puzzles.OVERLONG)
    assert pose("x " * 100, 20) == puzzles.PromptedPuzzle(reason=puzzles.OVERLONG)
    assert pose("a\n\na\n\nb\n\nc", 50) == puzzles.PromptedPuzzle(reason=puzzles.FEW_OPTIONS)
    assert pose("", 50).reason == puzzles.OVERLONG
    # A counter by which shorter prompts have no fewer tokens.
    grown = itertools.count(1000)
    none = pose(TEXT, 900, count=lambda text: next(grown) if "Question: P" in text else 0)
    assert none.reason == puzzles.OVERLONG and none.truth == ()


# ----------------------------------------------------------------------------------- From an answer


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        (r"\boxed{B, A}", "BA"),
        (r"\boxed{B,A}", "BA"),
        ("\\boxed{ B\n A }", "BA"),
        (r"\boxed{B A,}", "BA"),
        (r"\boxed{**B, A**}", "BA"),
        (r"First \boxed{A, B}, no: \boxed{B, A}.", "BA"),
        (r"\boxed{\boxed{B, A}}", "BA"),
        (r"<think>\boxed{A, B}</think>\boxed{B, A}", "BA"),
        (r"<think>\boxed{B, A}</think>A, B", ""),
        (r"<think>\boxed{B, A}", ""),
        (r"\boxed{b, a}", ""),
        (r"\boxed{BA}", ""),
        (r"\boxed{\text{B, A}}", ""),
        (r"\boxed{B, A", ""),
        (r"\boxed{B, A} \boxed{", ""),
        (r"\boxed{}", ""),
        (r"\boxed{B; A}", ""),
        (r"\boxed{B, Z}", ""),
        (r"\boxed{B, H}", "BH"),
        ("B, A", ""),
        ("", ""),
    ],
)
def test_parse_order_reads_boxed_letters(text, letters):
    order = puzzles.parse_order(text, 2)
    assert order == Order(tuple(letters), letters in ("BA", "AB"))


@functools.cache
def permutations_of(options: int) -> set[tuple[str, ...]]:
    return set(itertools.permutations("ABCDEFGH"[:options]))


def brute_force(text: str, truth: str) -> tuple[bool, float, float]:
    """Compute (valid, dense, sparse): spell out all permutations, read character by character."""
    visible = text.split("</think>")[-1]
    if "<think>" in text and "</think>" not in text:
        visible = ""
    stated = []
    if "\\boxed{" in visible:
        depth, inside = 1, ""
        for sign in visible[visible.rindex("\\boxed{") + len("\\boxed{") :]:
            depth += (sign == "{") - (sign == "}")
            if depth == 0:
                break
            inside += sign
        if depth == 0:
            stated = re.findall(r"[^,\s]+", inside)
    valid = tuple(stated) in permutations_of(len(truth))
    right = 0
    for i in range(len(truth)):
        if valid and stated[i] == truth[i]:
            right += 1
    if "".join(stated) == truth and valid:
        return valid, 1.0, 1.0
    return valid, (right / len(truth) if valid else 0.0), 0.0


def an_answer(rng: random.Random, truth: str) -> str:
    """Make a box, usually with a permutation, among other words and boxes."""
    letters = list(truth)
    match rng.randrange(8):
        case 0 | 1 | 2:
            rng.shuffle(letters)
        case 3:
            letters[rng.randrange(len(letters))] = rng.choice("ABCDEFGHIZa1")
        case 4:
            letters.append(rng.choice(letters))
        case 5:
            letters.pop()
        case 6:
            letters = [letter.lower() if rng.random() < 0.3 else letter for letter in letters]
    between = rng.choice((", ", ",", " ", "\n", " ,, ", "", ";"))
    box = "\\boxed{" + between.join(letters) + rng.choice(("}", "}", "}", "", "}}", ",}", "{}}"))
    places = ("{}", "<think>x</think>{}", "<think>{}", "\\boxed{{{}}}", "\\boxed{{A}} so {} then")
    text = rng.choice(places).replace("{{", "{").replace("}}", "}").replace("{}", box)
    return text + rng.choice(("", "", "", " .", " \\boxed{", " \\boxed{B, A}", "</think>"))


@pytest.mark.parametrize("options", range(2, 9))
def test_rewards_equal_brute_force(options):
    rng, reward_counts = random.Random(options), Counter()
    for _ in range(1500):
        truth = "".join(rng.sample("ABCDEFGH"[:options], options))
        text = an_answer(rng, truth)
        order = puzzles.parse_order(text, options)
        rewards = (
            order.is_permutation,
            puzzles.dense_reward(order, truth),
            puzzles.sparse_reward(order, truth),
        )
        assert rewards == brute_force(text, truth), (text, truth)
        reward_counts[rewards] += 1
    assert (
        len(reward_counts) >= 3
        and reward_counts[True, 1.0, 1.0] > 10
        and reward_counts[False, 0.0, 0.0] > 10
    )


@given(st.text("AB\\boxed{}, <think>/" + "b\n"), st.integers(2, 8))
@settings(max_examples=500, deadline=None)
def test_parse_order_accepts_any_text(text, options):
    order = puzzles.parse_order(text, options)
    assert all(letter in LABELS for letter in order.letters)
    assert order.is_permutation == (sorted(order.letters) == list("ABCDEFGH"[:options]))


@pytest.mark.parametrize("options", range(2, 8))
def test_chance_is_the_mean_reward_over_all_permutations(options):
    truth = LABELS[:options]
    orders = [Order(letters, True) for letters in itertools.permutations(truth)]
    assert len(orders) == math.factorial(options)
    for reward, mean in zip(
        (puzzles.dense_reward, puzzles.sparse_reward), puzzles.chance_rewards(options), strict=True
    ):
        assert sum(reward(o, truth) for o in orders) / len(orders) == pytest.approx(mean)


# -------------------------------------------------------------------------------- Number of options


def test_curriculum_sorts_the_mixture_by_number_of_options():
    total, options, weights = 1400, (8, 2, 6, 4), (5, 3, 3, 3)
    sampled = [puzzles.options_of((i + 0.5) / total, options, weights) for i in range(total)]
    assert sampled == sorted(sampled) == [2] * 300 + [4] * 300 + [6] * 300 + [8] * 500
    assert puzzles.options_of(7.0, options, weights) == 8  # after the run's end
    assert puzzles.options_of(0.5, (2, 4), (1, 1)) == 4  # a value below 0.5 is a 2
    assert puzzles.options_of(0.0, (5,), (0.1,)) == puzzles.options_of(1.0, (5,), (0.1,)) == 5


def test_uniform_shares_sample_the_mixture():
    rng = np.random.default_rng(0)
    sampled = Counter(puzzles.options_of(rng.random(), (2, 4), (1.0, 3.0)) for _ in range(4000))
    assert sampled[4] == pytest.approx(3000, rel=0.03)
