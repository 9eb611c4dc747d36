"""Generated documents for the demo: small registers of facts, and an oracle for evaluation.

1. A document is one line of a register, "- Arvo Oslo 34 12 Bela": a person's name, city, sales,
   costs and friend. A cluster is n documents, and all friends in it are people of the cluster.
2. Questions are of four kinds: look-up ("city of Arvo"), two-hop ("city of friend of Arvo"), sums
   ("sales of Arvo plus costs of Bela") and four-way choices of a friend. The sum "sales of Arvo
   versus costs of Bela" asks for the absolute difference, because its author does not know yet
   which figure is larger.
3. Values have several surface forms. A city has two names (documents use either), and names and
   figures may be decorated ("Mr Bela", "34 dollars"). A string comparison misses some matches.
4. The oracle parses documents and questions by their grammar and knows every true answer. Only
   warm-start demonstrations and held-out evaluation use it, never self-play.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

from spell_jax.data.clusters import LETTERS, Cluster

_NAMES = """
Arvo Bela Cato Dina Edda Faro Gita Hugo Ines Jaro Kuno Lida Mika Nilo Odra Pavo Quin Rufa Sami
Tova Udo Vera Wim Xena
"""
# The two names of each city. Neither contains the other, so the string rule cannot match them.
_CITIES = """
Oslo/Fjordton Paris/Seinham Rome/Sevenhills Cairo/Nileport Lima/Pacifica Quito/Andesby
Delhi/Yamuna Tokyo/Edoville Seoul/Hanyang Perth/Swanside
"""
# Few names, cities and figures: each must be seen often before a policy learns to look it up.
NAMES = tuple(_NAMES.split())
CITIES = tuple(tuple(pair.split("/")) for pair in _CITIES.split())
ATTRIBUTES = ("city", "sales", "costs", "friend")  # in the order of a document line
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

_CANONICAL = {form.lower(): city for city, *aliases in CITIES for form in (city, *aliases)}
_ALIAS = {pair[i]: pair[1 - i] for pair in CITIES for i in (0, 1)}
_LINE = re.compile(r"(\w+) (\w+) (\d+) (\d+) (\w+)")
_LOOKUP = re.compile(r"(city|friend|sales|costs) of ((?:friend of )*)(\w+)")
_MATH = re.compile(r"(sales|costs) of (\w+) (plus|versus) (sales|costs) of (\w+)")

Facts = dict[tuple[str, str], str]


@dataclasses.dataclass(frozen=True)
class TinyWorldQuestion:
    """A question of the world's grammar with its evidence and its true answer.

    Attributes:
      kind: one of KINDS.
      text: text of the question, without choices.
      evidence: lines that lead to the answer; for a sum, also the sum itself.
      answer: answer as the documents state it; a number for "math".
    """

    kind: str
    text: str
    evidence: tuple[str, ...]
    answer: str


def make_documents(rng: np.random.Generator, count: int) -> tuple[str, ...]:
    """Generate documents about `count` people (1 to len(NAMES)), each with a friend among them."""
    if not 1 <= count <= len(NAMES):
        raise ValueError(f"documents = {count}: must be 1 to {len(NAMES)} (one name each)")
    people = [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]
    documents = []
    for name in people:
        candidates = [person for person in people if person != name]
        # A cluster of one document has a friend without a document.
        candidates = candidates or [NAMES[(NAMES.index(name) + 1) % len(NAMES)]]
        city = CITIES[rng.integers(len(CITIES))][int(rng.random() < 0.3)]
        friend = candidates[rng.integers(len(candidates))]
        documents.append(f"- {name} {city} {_sample_figure(rng)} {_sample_figure(rng)} {friend}")
    return tuple(documents)


def _sample_figure(rng: np.random.Generator) -> int:
    return int(rng.integers(FIGURES.start, FIGURES.stop))


def make_clusters(
    seed: int, count: int, documents: Sequence[int], prefix: str = "tiny"
) -> list[Cluster]:
    """Generate seeded clusters; their sizes cycle through `documents`."""
    clusters = []
    for index, size in zip(range(count), itertools.cycle(documents), strict=False):
        # The 4 separates this random stream from an algorithm's. numpy treats [seed, index]
        # like [seed, index, 0], which an algorithm uses in step `index`.
        texts = make_documents(np.random.default_rng([seed, index, 4]), size)
        clusters.append(Cluster(f"{prefix}-{seed}-{index}", texts))
    return clusters


def read_facts(documents: Sequence[str]) -> Facts:
    """Parse documents into (name, attribute) -> value as stated."""
    return {
        (line[1], attribute): value
        for text in documents
        for line in _LINE.finditer(text)
        for attribute, value in zip(ATTRIBUTES, line.groups()[1:], strict=True)
    }


def line_of(facts: Facts, name: str) -> str:
    return " ".join([name, *(facts[name, attribute] for attribute in ATTRIBUTES)])


def sample_question(
    rng: np.random.Generator, documents: Sequence[str], kind: str
) -> TinyWorldQuestion:
    """Sample a question of the given kind that the documents answer.

    A two-hop question needs a friend with a document. Without such a friend, a look-up is sampled
    instead.
    """
    facts = read_facts(documents)
    names = sorted({name for name, _ in facts})
    name = names[rng.integers(len(names))]
    if kind == "math":
        return _sample_sum_question(rng, facts, names)
    # A choice asks for a friend: a small model learns to match names first, and needs no more to
    # find the option's letter.
    if kind == "choice":
        return TinyWorldQuestion(
            kind, f"friend of {name}", (line_of(facts, name),), facts[name, "friend"]
        )
    with_friend = [person for person in names if (facts[person, "friend"], "city") in facts]
    two_hop = kind == "two_hop" and with_friend
    if two_hop:
        name = with_friend[rng.integers(len(with_friend))]
    attribute = ATTRIBUTES[rng.integers(len(ATTRIBUTES))]
    if two_hop:
        friend = facts[name, "friend"]
        evidence = (line_of(facts, name), line_of(facts, friend))
        text = f"{attribute} of friend of {name}"
        return TinyWorldQuestion(kind, text, evidence, facts[friend, attribute])
    value = facts[name, attribute]
    return TinyWorldQuestion("lookup", f"{attribute} of {name}", (line_of(facts, name),), value)


def _sample_sum_question(
    rng: np.random.Generator, facts: Facts, names: list[str]
) -> TinyWorldQuestion:
    people = rng.choice(names, size=2, replace=len(names) < 2)  # distinct: two documents to find
    a, b = ((str(name), ("sales", "costs")[rng.integers(2)]) for name in people)
    word = SUMS[rng.integers(len(SUMS))]
    x, y = int(facts[a]), int(facts[b])
    if x == y:
        word = "plus"  # the parser rejects questions with the answer zero
    text = f"{a[1]} of {a[0]} {word} {b[1]} of {b[0]}"
    # Each line once: in a cluster of one document, both figures belong to one person.
    lines = dict.fromkeys((line_of(facts, a[0]), line_of(facts, b[0])))
    return TinyWorldQuestion(
        "math", text, (*lines, _write_sum(x, word, y)), str(add_up(x, word, y))
    )


def add_up(x: int, word: str, y: int) -> int:
    return x + y if word == "plus" else abs(x - y)


def _write_sum(x: int, word: str, y: int) -> str:
    return f"{x} {word} {y} is {add_up(x, word, y)}"


def sample_sum(rng: np.random.Generator, word: str) -> str:
    """Sample a sum of two figures with a word of SUMS, worded as in evidence."""
    return _write_sum(_sample_figure(rng), word, _sample_figure(rng))


def sample_options(rng: np.random.Generator, answer: str, letter: str) -> dict[str, str]:
    """Sample four distinct options of the answer's type, with the answer at `letter`."""
    # Wrong options come from the whole world. The documents hold few values, so a small policy that
    # writes options from the documents alone would nearly always repeat an option.
    if answer.isdigit():
        world = [str(n) for n in FIGURES]
    else:
        world = [c for c, _ in CITIES] if canonical(answer) in _ALIAS else list(NAMES)
    wrong_values = [value for value in world if canonical(value) != canonical(answer)]
    wrong = [wrong_values[i] for i in rng.permutation(len(wrong_values))[:3]]
    wrong.insert(LETTERS.index(letter), answer)
    return dict(zip(LETTERS, wrong, strict=True))


def surface_forms(value: str) -> tuple[str, ...]:
    """Return the ways to write a value, the plain one first."""
    if value.isdigit():
        return value, f"{value} {UNIT}"
    if value in _ALIAS:
        return value, f"{value} {TOWN}", _ALIAS[value]
    return value, f"{TITLE} {value}"


def canonical(text: str) -> str:
    """Map all surface forms of a value to one spelling; unknown text is only lower-cased."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    plain = " ".join(w for w in words if w not in (TOWN, TITLE.lower(), UNIT))
    return _CANONICAL.get(plain, plain)


def oracle(question: str, documents: Sequence[str]) -> str | None:
    """Return the true canonical answer of a question, without regard to its choices.

    Return None if the question is not in the grammar or the documents do not answer it.
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
    name = match[3]
    for _ in range(match[2].count("friend of")):
        name = facts.get((name, "friend"), "")
    value = facts.get((name, match[1]))
    return None if value is None else canonical(value)


def oracle_choice(question: str, documents: Sequence[str]) -> str | None:
    """Return the letter of the only option that holds the true answer, else None."""
    # Two options with the true answer have no single right letter.
    truth = oracle(question, documents)
    options = re.findall(r"\(([A-D])\) *([^\n]*)", question)
    if len(options) > 4:
        return None
    right = [letter for letter, text in options if canonical(text) == truth]
    return right[0] if len(right) == 1 else None


def question_kind(question: str) -> str:
    """Return the kind of a question text; "other" if it is not in the grammar."""
    if "(A)" in question:
        return "choice"
    if _MATH.search(question):
        return "math"
    match = _LOOKUP.search(question)
    if match is None:
        return "other"
    return "two_hop" if match[2] else "lookup"
