"""Masks of packed training rows, and random inputs of attention, for the two kernel sections."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def causal(time: int) -> np.ndarray:
    """Return last_query, int32 [T], of a row in which every token sees all tokens before it."""
    return np.full(time, time - 1, np.int32)


def tree(time: int, documents: int, question: int, questions: int = 4, group: int = 8):
    """Return last_query, int32 [T], of a tree: documents, then questions with their answers.

    The row is [documents | question | its answers | question | its answers | ...]. Answers have
    equal lengths and fill the row up to padding of fewer than `questions * group` tokens.
    """
    answer = (time - documents - questions * question) // (questions * group)
    end = documents + questions * (question + group * answer)
    last_query = np.full(time, -1, np.int32)
    last_query[:documents] = end - 1
    begin = documents
    for _ in range(questions):
        last_query[begin : begin + question] = begin + question + group * answer - 1
        begin += question
        for _ in range(group):
            last_query[begin : begin + answer] = begin + answer - 1
            begin += answer
    return last_query


def half_documents(time: int) -> np.ndarray:
    """Return last_query, int32 [T], of a tree of four questions; documents fill half of the row."""
    return tree(time, time // 2, max(1, time // 512))


def visible_pairs(last_query: np.ndarray) -> float:
    """Count the pairs of a query and a key that it sees."""
    index = np.arange(len(last_query), dtype=np.int64)  # 128K tokens have 2^33 pairs
    return float(np.sum(np.maximum(last_query - index + 1, 0)))


def tensors(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return random (q [B, T, N, H], k [B, T, K, H], v, d_out) for a shape (B, T, N, K, H)."""
    rows, time, heads, kv_heads, size = shape
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    return tuple(
        jax.random.normal(key, (rows, time, count, size), dtype)
        for key, count in zip(keys, counts, strict=True)
    )
