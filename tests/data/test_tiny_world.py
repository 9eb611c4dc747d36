"""Tests of the generated world: its grammar, its oracle, the surface forms of its values."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from spell_jax.data import tiny_world as world
from spell_jax.data.clusters import LETTERS

ALL_FORMS = [form for value in world.NAMES for form in world.surface_forms(value)] + [
    form for pair in world.CITIES for value in pair for form in world.surface_forms(value)
]


def documents(seed: int, count: int) -> tuple[str, ...]:
    return world.make_documents(np.random.default_rng(seed), count)


@pytest.mark.parametrize("count", [1, 2, 8, len(world.NAMES)])
def test_documents_are_about_distinct_people_with_friends(count):
    for seed in range(5):
        texts = documents(seed, count)
        facts = world.read_facts(texts)
        names = {name for name, _ in facts}
        assert len(texts) == len(names) == count
        assert len(facts) == 4 * count
        for name, attribute in facts:
            value = facts[name, attribute]
            if attribute == "friend":
                assert value != name and (value in names or count == 1)
            elif attribute == "city":
                assert any(value in pair for pair in world.CITIES)
            else:
                assert int(value) in world.FIGURES


@pytest.mark.parametrize("count", [0, len(world.NAMES) + 1])
def test_document_count_out_of_range_is_rejected(count):
    with pytest.raises(ValueError, match=rf"documents = {count}: must be 1 to"):
        documents(0, count)


def test_clusters_are_a_function_of_the_seed():
    first = world.make_clusters(0, 6, (2, 5))
    assert [len(cluster.documents) for cluster in first] == [2, 5] * 3
    assert len({cluster.id for cluster in first}) == 6
    assert first == world.make_clusters(0, 6, (2, 5)) == world.make_clusters(0, 9, (2, 5))[:6]
    other_clusters = world.make_clusters(1, 6, (2, 5))
    assert not {c.id for c in first} & {c.id for c in other_clusters}
    assert not {c.documents for c in first} & {c.documents for c in other_clusters}


def test_no_name_or_city_contains_another():
    """So a rule that searches for substrings cannot confuse two values."""
    words = [w.lower() for w in (*world.NAMES, *itertools.chain(*world.CITIES))]
    assert len(set(words)) == len(words)
    for word, other_word in itertools.permutations(words, 2):
        assert word not in other_word


def test_surface_forms_share_one_canonical_spelling():
    for value in (*world.NAMES, *itertools.chain(*world.CITIES), "34"):
        forms = world.surface_forms(value)
        assert forms[0] == value and len(set(forms)) == len(forms) >= 2
        assert len({world.canonical(form) for form in forms}) == 1
        assert world.canonical(f" {forms[1].upper()}.") == world.canonical(value)
    assert len({world.canonical(form) for form in ALL_FORMS}) == len(world.NAMES) + len(
        world.CITIES
    )
    assert world.canonical("No Such Thing!") == "no such thing"


@pytest.mark.parametrize("kind", world.KINDS)
@pytest.mark.parametrize("count", [2, 8])
def test_oracle_agrees_with_generated_answers(kind, count):
    rng = np.random.default_rng(count)
    for _ in range(100):
        texts = world.make_documents(rng, count)
        question = world.sample_question(rng, texts, kind)
        assert question.kind == kind
        truth = world.oracle(question.text, texts)
        assert truth == world.canonical(question.answer)
        assert kind == "choice" or world.question_kind(question.text) == kind
        # The documents state the evidence, and it leads to the answer.
        facts = world.read_facts(texts)
        lines = [line for line in question.evidence if " is " not in line]
        assert {f"- {line}" for line in lines} <= set(texts)
        if kind == "math":
            match = re.fullmatch(r"(\w+) of (\w+) (plus|versus) (\w+) of (\w+)", question.text)
            assert match is not None
            x, y = int(facts[match[2], match[1]]), int(facts[match[5], match[4]])
            assert int(question.answer) == (x + y if match[3] == "plus" else abs(x - y)) > 0
            assert question.evidence[-1] == f"{x} {match[3]} {y} is {question.answer}"
            assert [line.split()[0] for line in lines] == list(match.group(2, 5))
            assert match[2] != match[5]
        else:
            assert len(lines) == (2 if kind == "two_hop" else 1)
            assert question.answer in lines[-1].split()[1:]


def test_two_hop_without_friend_document_becomes_lookup():
    texts = documents(0, 1)
    question = world.sample_question(np.random.default_rng(0), texts, "two_hop")
    assert question.kind == "lookup"


def test_oracle_returns_none_without_an_answer():
    texts = ("- Arvo Oslo 34 12 Bela",)
    assert world.oracle("city of Arvo", texts) == world.canonical("Oslo")
    assert world.oracle("please tell: sales of Arvo versus costs of Arvo", texts) == "22"
    assert world.oracle("city of friend of Arvo", texts) is None  # Bela has no document
    assert world.oracle("sales of Arvo plus sales of Bela", texts) is None
    assert world.oracle("city of Bela", texts) is None
    assert world.oracle("What is the weather like?", texts) is None
    assert world.oracle("", texts) is None
    assert world.question_kind("What is the weather like?") == "other"


def test_oracle_follows_hops_to_any_depth():
    texts = ("- Arvo Oslo 34 12 Bela", "- Bela Rome 10 11 Arvo")
    assert world.oracle("city of friend of Arvo", texts) == world.canonical("Rome")
    assert world.oracle("city of friend of friend of Arvo", texts) == world.canonical("Oslo")
    assert world.oracle("friend of friend of Arvo", texts) == world.canonical("Arvo")


@pytest.mark.parametrize("count", [1, 3])
def test_exactly_one_sampled_option_is_correct(count):
    rng = np.random.default_rng(count)
    for index in range(200):
        texts = world.make_documents(rng, count)
        question = world.sample_question(rng, texts, "choice")
        letter = LETTERS[index % 4]
        options = world.sample_options(rng, question.answer, letter)
        assert list(options) == list("ABCD") and options[letter] == question.answer
        assert len({world.canonical(option) for option in options.values()}) == 4
        sort = [option.isdigit() for option in options.values()]
        assert len(set(sort)) == 1
        choices = "".join(f"({name}) {text}\n" for name, text in options.items())
        text = f"{question.text}\n{choices}"
        assert world.oracle_choice(text, texts) == letter
        assert world.question_kind(text) == "choice"


def test_oracle_choice_requires_exactly_one_correct_option():
    texts = ("- Arvo Oslo 34 12 Bela",)
    assert world.oracle_choice("city of Arvo\n(A) Rome\n(B) Fjordton\n", texts) == "B"
    assert world.oracle_choice("city of Arvo\n(A) Oslo\n(B) Fjordton\n", texts) is None
    five = "(A) Rome\n(B) Fjordton\n(C) Lima\n(D) Bonn\n(A) Bonn\n"
    assert world.oracle_choice("city of Arvo\n" + five, texts) is None
    assert world.oracle_choice("city of Arvo\n(A) Rome\n(B) Lima\n", texts) is None
    assert world.oracle_choice("city of Arvo", texts) is None
    assert world.oracle_choice("(A) (B) (C)", texts) is None


@pytest.mark.parametrize("answer", ["Arvo", "Oslo", "Fjordton", "12"])
def test_wrong_options_cover_all_values_of_the_same_kind(answer):
    rng = np.random.default_rng(0)
    options = {v for _ in range(400) for v in world.sample_options(rng, answer, "C").values()}
    sort = next(
        values
        for values in (world.NAMES, [c for c, _ in world.CITIES], [str(n) for n in world.FIGURES])
        if world.canonical(answer) in map(world.canonical, values)
    )
    assert {world.canonical(v) for v in options} == {world.canonical(v) for v in sort}


def test_sales_and_costs_stay_within_figures():
    texts = documents(1, len(world.NAMES))
    values = [int(v) for (_, a), v in world.read_facts(texts).items() if a in ("sales", "costs")]
    assert set(values) <= set(world.FIGURES) and len(set(values)) > 10
