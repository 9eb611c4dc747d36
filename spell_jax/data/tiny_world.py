"""The generated world of the demo: small documents with facts, and an oracle for evaluation only.

1. A document is a line of a register, "- Arvo Oslo 34 12 Bela": a person's name, city, sales, costs
   and friend. A cluster is n documents whose friends are all inside the cluster.
2. Questions are of four kinds: look-up ("city of Arvo"), two-hop ("city of friend of Arvo"), sums
   ("sales of Arvo plus costs of Bela") and four-way choices of a friend.
   "sales of Arvo versus costs of Bela" asks how far apart they are: nobody who writes a question
   knows yet which figure is the larger.
3. Values have several surface forms: a city has two names (documents use either), names and
   figures may be decorated ("Mr Bela", "34 dollars"). A rule that compares strings misses some.
4. The oracle reads documents and question by their grammar and knows every truth. Self-play never
   calls it: it is for warm-start demonstrations (a labeled source) and for held-out evaluation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from spell_jax.data.clusters import LETTERS, Cluster

_NAMES = """
Arvo Bela Cato Dina Edda Faro Gita Hugo Ines Jaro Kuno Lida Mika Nilo Odra Pavo Quin Rufa Sami
Tova Udo Vera Wim Xena
"""
# The two names of each city; neither contains the other, so that a string rule cannot match them.
_CITIES = """
Oslo/Fjordton Paris/Seinham Rome/Sevenhills Cairo/Nileport Lima/Pacifica Quito/Andesby
Delhi/Yamuna Tokyo/Edoville Seoul/Hanyang Perth/Swanside
"""
# Few values, because look-up forms the later the more there are: each must be seen often.
NAMES = tuple(_NAMES.split())
CITIES = tuple(tuple(pair.split("/")) for pair in _CITIES.split())
ATTRIBUTES = ("city", "sales", "costs", "friend")  # in the order of a line
FIGURES = range(10, 25)
TOWN, TITLE, UNIT = "town", "Mr", "dollars"

SUMS = ("plus", "versus")
KINDS = ("lookup", "two_hop", "math", "choice")
TASK_OF_KIND = {
    "lookup": "general_qa",
    "two_hop": "general_qa",
    "math": "financial_math",
    "choice": "multiple_choice",
}

_CANONICAL = {form.lower(): city for city, *others in CITIES for form in (city, *others)}
_ALIAS = {pair[i]: pair[1 - i] for pair in CITIES for i in (0, 1)}
_LINE = re.compile(r"(\w+) (\w+) (\d+) (\d+) (\w+)")
_LOOKUP = re.compile(r"(city|friend|sales|costs) of ((?:friend of )*)(\w+)")
_MATH = re.compile(r"(sales|costs) of (\w+) (plus|versus) (sales|costs) of (\w+)")

Facts = dict[tuple[str, str], str]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of the world's grammar with its evidence and answer, as the oracle sees them.

    Attributes:
      kind: one of KINDS.
      text: the question, without choices.
      evidence: the lines that lead to the answer, and for a sum the sum itself.
      answer: the value as the documents state it (a number for "math").
    """

    kind: str
    text: str
    evidence: tuple[str, ...]
    answer: str


def make_documents(rng: np.random.Generator, count: int) -> tuple[str, ...]:
    """`count` documents about distinct people, each a friend of somebody in the cluster.

    Raises:
      ValueError: when there are not as many names.
    """
    if not 1 <= count <= len(NAMES):
        raise ValueError(f"documents = {count}: must be 1 to {len(NAMES)} (one name each)")
    people = [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]
    documents = []
    for index, name in enumerate(people):
        others = people[:index] + people[index + 1 :] or [
            NAMES[(NAMES.index(name) + 1) % len(NAMES)]
        ]
        city = CITIES[rng.integers(len(CITIES))][int(rng.random() < 0.3)]
        friend = others[rng.integers(len(others))]
        documents.append(f"- {name} {city} {_figure(rng)} {_figure(rng)} {friend}")
    return tuple(documents)


def _figure(rng: np.random.Generator) -> str:
    return str(rng.integers(FIGURES.start, FIGURES.stop))


def make_clusters(
    seed: int, count: int, documents: Sequence[int], prefix: str = "tiny"
) -> list[Cluster]:
    """Seeded clusters; their sizes cycle through `documents`."""
    clusters = []
    for index in range(count):
        # numpy reads [seed, index] as [seed, index, 0], which an algorithm draws from in step
        # `index`.
        rng = np.random.default_rng([seed, index, 4])
        texts = make_documents(rng, documents[index % len(documents)])
        clusters.append(Cluster(id=f"{prefix}-{seed}-{index}", documents=texts, tasks=None))
    return clusters


def read_facts(documents: Sequence[str]) -> Facts:
    """(name, attribute) -> value as stated."""
    return {
        (line[1], attribute): value
        for text in documents
        for line in _LINE.finditer(text)
        for attribute, value in zip(ATTRIBUTES, line.groups()[1:], strict=True)
    }


def line_of(facts: Facts, name: str) -> str:
    """What the documents say of a person, as they say it."""
    return " ".join([name, *(facts[name, attribute] for attribute in ATTRIBUTES)])


def draw_question(rng: np.random.Generator, documents: Sequence[str], kind: str) -> Question:
    """A random question of a kind that these documents answer.

    A choice asks for a friend: names are what a small model matches first, and matching is all that
    finding the option's letter takes. A two-hop question needs a friend whose document is there;
    where there is none, a look-up is drawn instead.
    """
    facts = read_facts(documents)
    names = sorted({name for name, _ in facts})
    name = names[rng.integers(len(names))]
    if kind == "math":
        return _draw_sum(rng, facts, names)
    if kind == "two_hop":
        pairs = [n for n in names if (facts[n, "friend"], "city") in facts]
        if pairs:
            name = pairs[rng.integers(len(pairs))]
            attribute = ATTRIBUTES[rng.integers(len(ATTRIBUTES))]
            friend = facts[name, "friend"]
            value = facts[friend, attribute]
            evidence = (line_of(facts, name), line_of(facts, friend))
            return Question(kind, f"{attribute} of friend of {name}", evidence, value)
    attribute = "friend" if kind == "choice" else ATTRIBUTES[rng.integers(len(ATTRIBUTES))]
    value = facts[name, attribute]
    kind = kind if kind == "choice" else "lookup"
    return Question(kind, f"{attribute} of {name}", (line_of(facts, name),), value)


def _draw_sum(rng: np.random.Generator, facts: Facts, names: list[str]) -> Question:
    people = rng.choice(names, size=2, replace=len(names) < 2)  # two documents to find
    a, b = ((str(name), ("sales", "costs")[rng.integers(2)]) for name in people)
    word = SUMS[rng.integers(len(SUMS))]
    x, y = int(facts[a]), int(facts[b])
    if x == y:
        word = "plus"  # a difference of zero is not a question that the parser accepts
    text = f"{a[1]} of {a[0]} {word} {b[1]} of {b[0]}"
    lines = dict.fromkeys((line_of(facts, a[0]), line_of(facts, b[0])))
    return Question("math", text, (*lines, _stated(x, word, y)), str(add_up(x, word, y)))


def add_up(x: int, word: str, y: int) -> int:
    """x plus y, or how far apart they are."""
    return x + y if word == "plus" else abs(x - y)


def _stated(x: int, word: str, y: int) -> str:
    return f"{x} {word} {y} is {add_up(x, word, y)}"


def draw_sum(rng: np.random.Generator, word: str) -> str:
    """A sum of two figures by one of SUMS, as evidence states it."""
    return _stated(int(_figure(rng)), word, int(_figure(rng)))


def draw_options(rng: np.random.Generator, answer: str, letter: str) -> dict[str, str]:
    """Four different options of the answer's sort, the right one under `letter`.

    Wrong options come from the whole world: among the few values of its documents, a small policy
    that writes questions would repeat some option nearly always.
    """
    if answer.isdigit():
        world = [str(n) for n in FIGURES]
    else:
        world = [c for c, _ in CITIES] if canonical(answer) in _ALIAS else list(NAMES)
    others = [value for value in world if canonical(value) != canonical(answer)]
    wrong = [others[i] for i in rng.permutation(len(others))[:3]]
    wrong.insert(LETTERS.index(letter), answer)
    return dict(zip(LETTERS, wrong, strict=True))


def surface_forms(value: str) -> tuple[str, ...]:
    """Ways to write a value, the plain one first."""
    if value.isdigit():
        return value, f"{value} {UNIT}"
    if value in _ALIAS:
        return value, f"{value} {TOWN}", _ALIAS[value]
    return value, f"{TITLE} {value}"


def canonical(text: str) -> str:
    """One spelling for all surface forms of a value; unknown text comes back lower-case."""
    words = [
        w for w in re.findall(r"[a-z0-9]+", text.lower()) if w not in ("town", "mr", "dollars")
    ]
    plain = " ".join(words)
    return _CANONICAL.get(plain, plain)


def oracle(question: str, documents: Sequence[str]) -> str | None:
    """The true canonical answer of a question in the grammar, or None.

    None means that the question is not of the grammar or that the documents do not answer it.
    Choices after the question are ignored (see oracle_choice).
    """
    facts = read_facts(documents)
    if match := _MATH.search(question):
        x, y = facts.get((match[2], match[1])), facts.get((match[5], match[4]))
        if x is None or y is None:
            return None
        return str(add_up(int(x), match[3], int(y)))
    match = _LOOKUP.search(question)
    if match is None:
        return None
    name: str | None = match[3]
    for _ in range(match[2].count("friend of")):
        name = facts.get((name or "", "friend"))
    value = facts.get((name or "", match[1]))
    return None if value is None else canonical(value)


def oracle_choice(question: str, documents: Sequence[str]) -> str | None:
    """The letter of the one option that holds the true answer; None if there is not just one, or
    more options than letters."""
    truth = oracle(question, documents)
    options = re.findall(r"\(([A-D])\) *([^\n]*)", question)
    if len(options) > 4:
        return None
    right = [letter for letter, text in options if canonical(text) == truth]
    return right[0] if len(right) == 1 else None


def question_kind(question: str) -> str:
    """The kind of a question text, "other" outside the grammar."""
    if "(A)" in question:
        return "choice"
    if _MATH.search(question):
        return "math"
    match = _LOOKUP.search(question)
    if match is None:
        return "other"
    return "two_hop" if match[2] else "lookup"
