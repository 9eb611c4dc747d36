"""MinHash: shingles, signatures and band keys, which find near-equal texts.

1. A text is lower-cased and cut into tokens: runs of letters, digits and "_". Each Han, kana or
   Hangul character is a token of its own, because such texts have no spaces.
2. Its shingles are the 64-bit hashes of all runs of W consecutive tokens. The similarity of two
   texts is the Jaccard similarity J of their sets of shingles.
3. A signature holds the minimum of the set under each of P random permutations (datasketch). Two
   signatures agree at a position with probability J.
4. A signature is cut into B bands of R = P / B values. Two signatures share a band with probability
   1 - (1 - J^R)^B: 0.99 for 16 bands of 8 values at J = 0.85. Such pairs are compared exactly.
"""

from __future__ import annotations

import functools
import hashlib
import re

import numpy as np
from datasketch import MinHash

_CJK = (
    "\u1100-\u11ff\u3005-\u3007\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U00020000-\U000323af"
)
_TOKEN = re.compile(rf"[^\W{_CJK}]+|(?=\w)[{_CJK}]")
# Odd numbers with as many one bits as zero bits. Multiplication by them mixes low bits into high
# bits.
_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_SHIFT = np.uint64(32)
# A signature's intermediate array is [shingles, permutations]: 512 KiB at 128 permutations.
_CHUNK = 1024


def tokens(text: str) -> list[str]:
    """Return the lower-cased tokens of a text, in order."""
    return _TOKEN.findall(text.lower())


def shingles(text: str, words: int) -> np.ndarray:
    """Return the shingles of `words` tokens of a text: uint64 [n], sorted and distinct, n >= 1.

    A shorter text has one shingle of all its tokens, or of its characters if it has no tokens.
    """
    hashes = np.array([_hash(token) for token in tokens(text) or [text]], np.uint64)
    width = min(words, len(hashes))
    count = len(hashes) - width + 1
    # A rolling mix over arrays: step i adds the i-th token of all shingles at once, so that Python
    # loops over `words` and not over the text.
    mixed = np.zeros(count, np.uint64)
    for first in range(width):
        mixed = _step(mixed, hashes[first : first + count])
    return np.unique(mixed)


def signature(shingles: np.ndarray, permutations: int, seed: int) -> np.ndarray:
    """Return the MinHash signature of shingles' upper 32 bits: uint32 [permutations]."""
    minhash = MinHash(
        permutations,
        seed,
        hashfunc=int,
        permutations=_permutations(permutations, seed),
        scheme="affine32",
    )
    # The scheme "affine32" permutes 32-bit values. The upper half is the better mixed half, because
    # the last operation of `_step` is a multiplication.
    values = (shingles >> _SHIFT).tolist()
    for first in range(0, len(values), _CHUNK):
        minhash.update_batch(values[first : first + _CHUNK])
    return minhash.hashvalues


def band_keys(signature: np.ndarray, bands: int) -> np.ndarray:
    """Hash each of `bands` equal parts of a signature with its number: uint64 [bands]."""
    rows = signature.reshape(bands, -1).astype(np.uint64)
    # The number of the band starts the hash: equal values in two different bands must not meet in
    # one group.
    mixed = np.arange(bands, dtype=np.uint64)
    for column in rows.T:
        mixed = _step(mixed, column)
    return mixed


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the Jaccard similarity of two sets: arrays [n] and [m] of distinct values."""
    # `shingles` returns distinct values, so the slower search for repeats can be left out.
    shared_count = len(np.intersect1d(a, b, assume_unique=True))
    return shared_count / (len(a) + len(b) - shared_count)


def _step(mixed: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mix one more value into each hash; one-to-one in either argument."""
    mixed = (mixed ^ values) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX[1]
    return (mixed ^ (mixed >> _SHIFT)) * _MIX[2]


# A few thousand words make up most of any text (Zipf's law), so this cache answers most calls.
# Python's own hash() differs between processes.
@functools.lru_cache(maxsize=1 << 16)
def _hash(token: str) -> int:
    # Lone surrogates, which some JSON files contain, have no UTF-8 of their own.
    data = token.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=8)
def _permutations(number: int, seed: int) -> np.ndarray:
    return np.asarray(MinHash(number, seed, scheme="affine32").permutations)
