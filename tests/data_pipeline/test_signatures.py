import itertools
import random

import numpy as np
import pytest

from benchmarks.data import edited_copy
from data_pipeline import signatures


def some_text(seed: int, words: int = 120, vocabulary: int = 5000) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(vocabulary)}" for _ in range(words))


def overlapping_sets(shared: int, alone: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample two sets of random 64-bit values with `shared` common values."""
    rng = np.random.default_rng(shared)
    values = rng.integers(2**64, size=shared + 2 * alone, dtype=np.uint64)
    shared_values, first, second = np.split(values, [shared, shared + alone])
    return np.unique(np.append(shared_values, first)), np.unique(np.append(shared_values, second))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, WÖRLD_1!", ["don", "t", "stop", "wörld_1"]),
        ("中文。カタカナ・한국 abc中x", [*"中文カタカナ한국", "abc", "中", "x"]),
        ("々〇ー𠀀", list("々〇ー𠀀")),
        ("... !?", []),
    ],
)
def test_tokens_are_words_and_cjk_characters(text, expected):
    assert signatures.tokens(text) == expected


def test_shingles_are_the_set_of_windows():
    text = "one two three one two three one two four"
    windows = {tuple(text.split()[i : i + 3]) for i in range(7)}
    shingles = signatures.shingles(text, 3)
    assert shingles.dtype == np.uint64 and len(shingles) == len(windows) == 4
    assert (np.diff(shingles.astype(object)) > 0).all()
    # A window has the same shingle alone as in the text.
    alone = {int(signatures.shingles(" ".join(window), 3)[0]) for window in windows}
    assert alone == set(shingles.tolist())


def test_shingles_ignore_case_and_punctuation():
    a = signatures.shingles("A b, C d E f.", 5)
    assert (a == signatures.shingles("a B c -- d e F", 5)).all()


def test_short_texts_have_one_shingle():
    shingles = signatures.shingles("two words", 5)
    assert len(shingles) == 1
    assert shingles != signatures.shingles("words two", 5)
    assert shingles != signatures.shingles("two words two", 5)
    assert signatures.shingles("two words six", 3).shape == (1,)
    for text in ("", "...", "!?", "\ud800"):
        assert len(signatures.shingles(text, 5)) == 1
    assert signatures.shingles("...", 5) != signatures.shingles("!?", 5)


def test_chinese_shingles_are_windows_of_characters():
    shingles = signatures.shingles("天地玄黄，宇宙洪荒。", 5)
    assert len(shingles) == 4
    assert (shingles == signatures.shingles("天 地 玄 黄 宇 宙 洪 荒", 5)).all()


@pytest.mark.slow
def test_distinct_shingles_do_not_collide():
    """6^5 windows over six tokens, which are the hardest, and 200,000 random windows."""
    windows = [" ".join(window) for window in itertools.product("abcdef", repeat=5)]
    shingles = np.concatenate([signatures.shingles(window, 5) for window in windows])
    assert len(np.unique(shingles)) == 6**5
    # 200,000 hashes of 64 bits collide with a probability of 1e-9, of 32 bits with one of 0.99.
    random_shingles = signatures.shingles(some_text(1, 200_004, 10**6), 5)
    assert len(random_shingles) == 200_000
    # Each bit is set in half of the hashes, with a standard deviation of 0.0011.
    for bit in range(64):
        share = np.mean((random_shingles >> np.uint64(bit)) & np.uint64(1))
        assert abs(share - 0.5) < 0.006


@pytest.mark.parametrize(("shared", "alone"), [(0, 100), (50, 50), (400, 50), (1900, 50)])
def test_signature_estimates_jaccard(shared, alone):
    a, b = overlapping_sets(shared, alone)
    exact = shared / (shared + 2 * alone)
    assert signatures.jaccard(a, b) == pytest.approx(exact)
    equal = []
    for seed in range(20):
        first, second = (signatures.signature(values, 128, seed) for values in (a, b))
        assert first.dtype == np.uint32 and first.shape == (128,)
        equal.append(np.mean(first == second))
    error = (exact * (1 - exact) / (20 * 128)) ** 0.5
    assert abs(np.mean(equal) - exact) <= 4 * error


def test_signature_depends_on_seed_and_is_minimum_over_parts():
    a, b = overlapping_sets(0, 1500)
    first, repeated_signature, other_signature = (
        signatures.signature(a, 128, seed) for seed in (1, 1, 2)
    )
    assert (first == repeated_signature).all() and not (first == other_signature).any()
    union_signature = signatures.signature(np.union1d(a, b), 128, 1)
    assert (union_signature == np.minimum(first, signatures.signature(b, 128, 1))).all()


def test_band_keys_depend_on_rows_their_order_and_band():
    signature = np.arange(128, dtype=np.uint32)
    keys = signatures.band_keys(signature, 16)
    assert keys.dtype == np.uint64 and len(set(keys.tolist())) == 16
    changed = signature.copy()
    changed[8] = 1000  # the first row of the second band
    assert (signatures.band_keys(changed, 16) != keys).nonzero()[0].tolist() == [1]
    swapped = signature.copy()
    swapped[[8, 9]] = swapped[[9, 8]]
    assert signatures.band_keys(swapped, 16)[1] != keys[1]
    # Equal rows have different keys in different bands.
    assert len(set(signatures.band_keys(np.zeros(128, np.uint32), 16).tolist())) == 16


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.85, 0.95])
def test_band_collision_rate_matches_theory(similarity):
    rng = np.random.default_rng(5)
    number, size = 300, 200
    collisions = 0
    for _ in range(number):
        shared = round(size * similarity)
        alone = rng.integers(2**64, size=(2, (size - shared) // 2), dtype=np.uint64)
        shared_values = rng.integers(2**64, size=shared, dtype=np.uint64)
        keys = [
            signatures.band_keys(signatures.signature(np.append(shared_values, part), 128, 1), 16)
            for part in alone
        ]
        collisions += bool((keys[0] == keys[1]).any())
    expected = 1 - (1 - similarity**8) ** 16
    error = (expected * (1 - expected) / number) ** 0.5
    assert abs(collisions / number - expected) <= 4 * error + 1e-3
    if similarity >= 0.85:
        assert collisions >= 0.98 * number


@pytest.mark.slow
def test_bands_find_edited_texts():
    collisions = 0
    for seed in range(150):
        text = some_text(seed)
        copy = edited_copy(text, 0.85, 0.95, seed)
        sets = [signatures.shingles(t, 5) for t in (text, copy)]
        assert 0.85 <= signatures.jaccard(*sets) <= 0.95
        keys = [signatures.band_keys(signatures.signature(s, 128, 1), 16) for s in sets]
        collisions += bool((keys[0] == keys[1]).any())
    assert collisions >= 147


def test_edited_copy_is_deterministic_and_raises_if_impossible():
    text = some_text(3)
    assert edited_copy(text, 0.7, 0.9, 1) == edited_copy(text, 0.7, 0.9, 1)
    assert edited_copy(text, 0.7, 0.9, 1) != edited_copy(text, 0.7, 0.9, 2)
    chinese = "".join(chr(0x4E00 + i) for i in range(200))
    assert edited_copy(chinese, 0.7, 0.9, 1) != chinese
    with pytest.raises(ValueError, match=r"from 0.9 to 0.95: no edit of 'a few words'"):
        edited_copy("a few words", 0.9, 0.95, 1)


def test_jaccard_matches_brute_force():
    rng = np.random.default_rng(2)
    for _ in range(200):
        a, b = (np.unique(rng.integers(12, size=rng.integers(1, 12))) for _ in range(2))
        a, b = a.astype(np.uint64), b.astype(np.uint64)
        first, second = set(a.tolist()), set(b.tolist())
        assert signatures.jaccard(a, b) == len(first & second) / len(first | second)
