"""Helpers for tests of document reconstruction: a context of stories and answers to puzzles."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.reconstruction.algorithm import Reconstruction, ReconstructionConfig
from spell_jax.data.clusters import TASKS, Cluster, count_words, in_memory
from spell_jax.data.stream import TaskStream
from spell_jax.data.tiny_stories import SHORTEST_LINE, make_stories
from spell_jax.selfplay import prompts

PROMPTS = prompts.load("compact")
STORIES = make_stories(1, 24, (9, 12, 15))


def context(
    clusters: Sequence[Cluster] = STORIES,
    held_out: Sequence[Cluster] = (),
    steps: int = 10,
    cap: int = 10_000,
    seed: int = 0,
) -> AlgorithmContext:
    return AlgorithmContext(
        PROMPTS,
        count_words,
        cap,
        seed,
        steps,
        clusters=lambda: in_memory(clusters),
        held_out=lambda: in_memory(held_out),
        deal=lambda source: TaskStream(source, TASKS[:1], (1.0,), seed),
        questions=lambda: (),
    )


def config(**options: Any) -> ReconstructionConfig:
    defaults: dict[str, Any] = {"documents": 6, "group_size": 4, "min_paragraph": SHORTEST_LINE}
    defaults |= {"adjacent_gaps": True, "cut_documents": True, "keep_equal": False}
    return ReconstructionConfig(**(defaults | options))


def make_algorithm(clusters: Sequence[Cluster] = STORIES, **options: Any) -> Reconstruction:
    context_options = {
        name: options.pop(name) for name in ("steps", "cap", "seed") if name in options
    }
    return Reconstruction(config(**options), context(clusters, **context_options))


def solution(prompt: str) -> str:
    """Return the letters of a story's puzzle in the right order, found by reading the story."""
    options = {
        giver: (letter, taker)
        for letter, giver, taker in re.findall(r"^\((\w)\) (\w+) to (\w+)$", prompt, re.MULTILINE)
    }
    letters, last = [], ""
    for line in prompt.split("\n(A)")[0].splitlines():
        if "<gap" in line:
            letter, last = options.get(last, ("?", ""))
            letters.append(letter)
        elif line:
            last = line.split()[-1]
    return ", ".join(letters)


def perfect(role: str, prompt: str, sibling: int, model: str) -> str | None:
    return f"so \\boxed{{{solution(prompt)}}}"


def silent(role: str, prompt: str, sibling: int, model: str) -> str | None:
    return "I cannot tell."


def guessing(role: str, prompt: str, sibling: int, model: str) -> str | None:
    letters = sorted(solution(prompt).split(", "))
    random.Random(f"{prompt}{sibling}").shuffle(letters)
    return f"\\boxed{{{','.join(letters)}}}"


def improving(role: str, prompt: str, sibling: int, model: str) -> str | None:
    """Answer a puzzle: the first answer is right, the second no permutation, the others guesses."""
    if sibling == 1:
        return "\\boxed{A, A}"
    return (guessing if sibling else perfect)(role, prompt, sibling, model)
