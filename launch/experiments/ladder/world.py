"""Generated documents with questions of any depth, and an oracle: the ladder world (data.source).

1. A document is one line, "- Arvo Oslo Bela Cato": a person, a city, a friend and a general (a
   superior). The friends of a cluster form one ring, and so do the generals. No two people share a
   city, so every answer is given by as many chains as any other.
2. A question is a chain of relations, "city of friend of general of Arvo". Its depth is the number
   of its relations, here 3. A question of one more hop has a relation more, at the front, and its
   answer is one look-up away from the answer of the shorter question.
3. The oracle walks a chain and knows its true answer. Only warm-start demonstrations, held-out
   evaluation and the analysis of finished runs use it, never self-play.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

from spell_jax.data.clusters import Cluster
from spell_jax.data.tiny_world import CITIES, NAMES

# Words that the shipped policy's tokenizer knows, in the order of a document line.
RELATIONS = ("city", "friend", "general")
PEOPLE = RELATIONS[1:]  # relations that a chain can continue from
MOST_DOCUMENTS = len(CITIES)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)  # of questions of the oracle
# The first relations of a new question. A questioner's prompt ends with one of the cues. All but
# the first relation lead to a person, because a city has no relations.
CUES = tuple(map(" ".join, itertools.product(RELATIONS, PEOPLE, PEOPLE, PEOPLE)))
_LINE = re.compile(r"- (\w+) (\w+) (\w+) (\w+)")
_CHAIN = re.compile(rf"(?:{'|'.join(RELATIONS)}) of (?:(?:{'|'.join(PEOPLE)}) of )*\w+")
_OF = " of "
_STREAM = 7  # separates the random stream of clusters from algorithms and other worlds


@dataclasses.dataclass(frozen=True)
class LadderQuestion:
    """A question with the lines that lead to its answer, in the order of the walk."""

    text: str
    evidence: tuple[str, ...]  # for each hop the relation and the person's line, without the dash
    answer: str


def make_documents(rng: np.random.Generator, count: int) -> tuple[str, ...]:
    """Generate documents about `count` people, 2 to MOST_DOCUMENTS; ValueError for others."""
    if not 2 <= count <= MOST_DOCUMENTS:
        raise ValueError(f"documents = {count}: must be 2 to {MOST_DOCUMENTS} (one city each)")
    # Without replacement: if two people shared a city, more chains would end there.
    people = [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]
    cities = [CITIES[i][0] for i in rng.permutation(len(CITIES))[:count]]
    friends, generals = _ring(rng, people), _ring(rng, people)
    return tuple(
        f"- {name} {city} {friends[name]} {generals[name]}"
        for name, city in zip(people, cities, strict=True)
    )


def _ring(rng: np.random.Generator, people: list[str]) -> dict[str, str]:
    """Map each person to the next person of a random ring."""
    # One ring, not several: a walk along one relation reaches everybody before it repeats a person.
    ring = [people[i] for i in rng.permutation(len(people))]
    return {name: ring[i - 1] for i, name in enumerate(ring)}


def make_clusters(
    seed: int, count: int, documents: Sequence[int], prefix: str = "ladder"
) -> list[Cluster]:
    """Generate seeded clusters; their sizes cycle through `documents`."""
    return [
        Cluster(
            f"{prefix}-{seed}-{index}",
            make_documents(np.random.default_rng([seed, index, _STREAM]), size),
        )
        for index, size in zip(range(count), itertools.cycle(documents), strict=False)
    ]


def read_facts(documents: Sequence[str]) -> dict[tuple[str, str], str]:
    """Parse documents into (name, relation) -> value."""
    return {
        (line[1], relation): value
        for text in documents
        for line in _LINE.finditer(text)
        for relation, value in zip(RELATIONS, line.groups()[1:], strict=True)
    }


def depth_of(question: str) -> int:
    """Return the number of relations of a question; 0 if it is not in the grammar."""
    return question.count(_OF) if _CHAIN.fullmatch(question) else 0


def sample_cue(rng: np.random.Generator, question: str, fixed: int) -> str:
    """Sample one of CUES that begins with the first `fixed` relations of a question."""
    first = question.split(_OF)[:-1][:fixed]
    fits = [cue for cue in CUES if all(map(str.__eq__, first, cue.split()))]
    return fits[rng.integers(len(fits))]


def walk(question: str, documents: Sequence[str]) -> LadderQuestion | None:
    """Return the question with its evidence and its true answer.

    None if it is not in the grammar or the documents do not answer it.
    """
    if not _CHAIN.fullmatch(question):
        return None
    facts, evidence = read_facts(documents), []
    *relations, value = question.split(_OF)
    for relation in reversed(relations):
        if (value, relation) not in facts:
            return None
        line = (value, *(facts[value, every] for every in RELATIONS))
        evidence.append(" ".join([relation, *line]))
        value = facts[value, relation]
    return LadderQuestion(question, tuple(evidence), value)


def oracle(question: str, documents: Sequence[str]) -> str | None:
    """Return the true answer of a question; None where `walk` gives None."""
    walked = walk(question, documents)
    return None if walked is None else walked.answer


def sample_question(
    rng: np.random.Generator, documents: Sequence[str], depth: int
) -> LadderQuestion:
    """Sample a question of the given depth, at least 1, that the documents answer."""
    # Sorted, because the order of a set differs between processes.
    names = sorted({name for name, _ in read_facts(documents)})
    relations = [RELATIONS[rng.integers(len(RELATIONS))]]
    relations += [PEOPLE[rng.integers(len(PEOPLE))] for _ in range(depth - 1)]
    question = walk(_OF.join([*relations, names[rng.integers(len(names))]]), documents)
    assert question is not None
    return question


def shorten(rng: np.random.Generator, question: str, documents: Sequence[str]) -> LadderQuestion:
    """Sample a question of one hop less, which a question of depth 2 or more continues.

    In one of three cases the shorter question asks for the city of the same person instead.
    """
    # A chain continues from a friend or a general. With the city in a third of the cases, all three
    # relations are equally frequent, as in sample_question.
    _, relation, *inner = question.split(_OF)
    relation = relation if rng.random() < 2 / 3 else "city"
    shorter = walk(_OF.join([relation, *inner]), documents)
    assert shorter is not None
    return shorter
