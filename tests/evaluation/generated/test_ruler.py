"""Tests of RULER's tasks and the needle grid, solved by regular expressions on the prompt."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from spell_jax.data.questions import Question
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.evaluation.generated import haystack
from spell_jax.evaluation.generated.haystack import ADJECTIVES, NOUNS, HaystackSource, Names
from spell_jax.evaluation.generated.ruler import (
    GRID_DEPTHS,
    PROSE_TASKS,
    TASKS,
    needle,
    ruler,
)
from spell_jax.evaluation.generated.sources import read_questions
from tests.policy import hf_folders

LENGTHS = (4096, 16_384, 131_072)
NEEDLE = re.compile(r"A secret (?:number|uuid) of (\S+) is (\S+?)\.")
NIAH = tuple(task for task in TASKS if task.startswith("niah"))


def words(text: str) -> int:
    return len(text.split())


@functools.cache
def prose(sentences: int = 3000) -> str:
    rng = np.random.default_rng(7)
    stems = [haystack.letters(rng, int(rng.integers(2, 9))) for _ in range(400)]
    lines = []
    for size in rng.integers(4, 30, sentences):
        lines.append(" ".join(stems[i] for i in rng.integers(0, 400, size)).capitalize() + ".")
    return "\n".join(lines)


@functools.cache
def qa_rows(count: int = 160) -> tuple[Question, ...]:
    """Generate rows of ten documents, each naming a town's mayor; a question is about one town."""
    rng, rows = np.random.default_rng(8), []
    filler = prose().replace("\n", " ").split()
    for index in range(count):
        documents = []
        for place in range(10):
            start = int(rng.integers(len(filler) - 150))
            filler_text = " ".join(filler[start : start + 100])
            documents.append(
                f"Town{index}x{place}\nIts mayor is Mayor{index}y{place}z. {filler_text}"
            )
        asked_place = int(rng.integers(10))
        question = f"Who is the mayor of Town{index}x{asked_place}?"
        mayor = f"Mayor{index}y{asked_place}z"
        answers = (mayor, "nobody else")
        rows.append(Question("general_qa", tuple(documents), question, mayor, answers=answers))
    return tuple(rows)


def make(task: str, length: int = 4096, seed: int = 0, items: int = 3, **changes) -> Benchmark:
    settings = {"count": words, "text": prose(), "rows": qa_rows()} | changes
    source = make_source(length, settings["count"], settings["text"])
    return ruler(task, source, settings["rows"], items, seed)


def make_source(length: int, count: Callable[[str], int] = words, text: str = "") -> HaystackSource:
    return HaystackSource(length, count, functools.cache(count), text)


def solve(task: str, prompt: str) -> str:
    """Return the right answer of a task, found from the prompt alone."""
    if task == "qa":
        town = re.findall(r"mayor of (\w+)\?", prompt)[-1]
        (mayor,) = re.findall(rf"^{town}\nIts mayor is (\w+)\.", prompt, re.MULTILINE)
        return mayor
    if task == "vt":
        return ", ".join(solve_variables(prompt.rpartition("Your turn:")[2]))
    body, _, question = prompt.rpartition("\n\n")
    if task == "cwe":
        return ", ".join(w for w, _ in listed_words(body).most_common(10))
    if task == "fwe":
        counts = Counter(body.split("\n\n")[1].split())
        del counts["..."]
        return ", ".join(word for word, _ in counts.most_common(3))
    asked_keys = re.split(r", | and ", re.findall(r" of (\S+(?:(?:,| and) \S+)*)\?", question)[0])
    return ", ".join(value for key, value in NEEDLE.findall(body) if key in asked_keys)


def solve_variables(prompt: str) -> list[str]:
    asked_value = re.findall(r"value (\d+)", prompt)[-1]
    values: dict[str, str] = {}
    for name, number, source_name in re.findall(r"^VAR (\w+) = (?:(\d+)|VAR (\w+))$", prompt, re.M):
        values[name] = number or values[source_name]  # KeyError: not in the order of the chain
    return [name for name, value in values.items() if value == asked_value]


def listed_words(body: str) -> Counter[str]:
    listed = re.findall(r"(\d+)\. (\S+)", body.rpartition("Your turn:")[2])
    assert [int(place) for place, _ in listed] == list(range(1, len(listed) + 1))
    return Counter(word for _, word in listed)


def hay_of(item: BenchmarkItem) -> str:
    return item.prompt.partition("\n\n")[2].rpartition("\n\n")[0]


def check_lengths(benchmark: Benchmark, length: int, count: Callable[[str], int]) -> None:
    for item in benchmark.items:
        room = length - benchmark.max_tokens  # the answer counts as well
        assert 0.95 * room <= count(item.prompt) <= room
        assert item.fields["tokens"] == count(item.prompt) and item.fields["length"] == length


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_solver_scores_1_and_blank_answers_score_0(task, length):
    benchmark = make(task, length, items=3 if length < 100_000 else 1)
    check_lengths(benchmark, length, words)
    for item in benchmark.items:
        answer = solve(task, item.prompt)
        assert benchmark.score(f"<think>Hm.</think> They are {answer}.", item) == 1.0
        if task != "qa":
            assert sorted(answer.split(", ")) == sorted(item.references)
        for blank in ("", "  ", "I do not know.", f"<think>{answer}</think>", f"<think>{answer}"):
            assert benchmark.score(blank, item) == 0.0
        assert item.prompt.endswith(item.question) and json.loads(json.dumps(dict(item.fields)))


@pytest.mark.slow
@pytest.mark.parametrize("length", [4096, 32_768])
def test_lengths_hold_in_tokens_of_qwen(length: int, spell_data: Path):
    tokenizer = hf_folders.load(hf_folders.real(spell_data, "qwen2.5"))
    text = max((path.read_text() for path in (spell_data / "books" / "dev").iterdir()), key=len)
    rows = read_questions(spell_data / "multihop")
    assert len(rows) == 300
    counted = []

    def count(text: str) -> int:
        counted.append(len(text))
        return tokenizer.count(text)

    for task in TASKS:
        counted.clear()
        benchmark = ruler(task, make_source(length, count, text), rows, items=1)
        (item,) = benchmark.items
        # The prompt's pieces, the prompt, its frame and sometimes the prompt again are tokenized.
        assert sum(counted) < (3.3 + 16_000 / length) * len(item.prompt), task
        check_lengths(benchmark, length, tokenizer.count)
        if task != "qa":
            assert benchmark.score(solve(task, item.prompt), item) == 1.0
        else:
            row = next(row for row in rows if row.question == item.question)
            assert all(document in item.prompt for document in row.documents)


@pytest.mark.parametrize(
    "count",
    [
        lambda text: len(text.split()) + 1,  # one more per piece than in the whole
        lambda text: len(text) // 4,  # the whole has more tokens than its pieces
        lambda text: 3 * len(text),
    ],
)
@pytest.mark.parametrize("task", TASKS)
def test_lengths_hold_for_token_counts_that_are_not_additive(task: str, count):
    length = 131_072 if count("a") == 3 else 8192
    check_lengths(make(task, length, items=2, count=count), length, count)


@pytest.mark.parametrize("task", TASKS)
def test_prompt_and_its_pieces_are_each_counted_once(task: str):
    counted: Counter[str] = Counter()

    def count(text: str) -> int:
        counted[text] += 1
        return words(text)

    benchmark = make(task, 8192, items=4, count=count)
    assert all(counted[item.prompt] == 1 for item in benchmark.items)
    assert sum(words(text) > 4000 for text in counted.elements()) <= 5
    assert max(counted.values()) == 1


@pytest.mark.parametrize("task", TASKS)
def test_items_are_a_function_of_the_seed(task: str):
    first = make(task)
    prompts = [item.prompt for item in first.items]
    assert [item.prompt for item in make(task).items] == prompts
    assert make(task).items == first.items
    other_benchmark = make(task, seed=1)
    assert not set(prompts) & {item.prompt for item in other_benchmark.items}
    assert len(set(prompts)) == 3 and len({item.id for item in first.items}) == 3
    assert [item.id for item in other_benchmark.items] == [item.id for item in first.items]
    assert (first.judged, first.name) == (False, f"ruler_{task}_4096")
    # With more items, the first ones stay and others follow.
    assert make(task, items=5).items[:3] == first.items


@pytest.mark.parametrize(
    ("task", "needles", "references"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multikey_2", None, 1),
        ("niah_multikey_3", None, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_are_unique_in_the_text(task: str, needles: int | None, references: int):
    for item in make(task, items=5).items:
        needle_pairs = NEEDLE.findall(hay_of(item))
        assert len(needle_pairs) == needles if needles else len(needle_pairs) > 300
        keys, values = [key for key, _ in needle_pairs], [value for _, value in needle_pairs]
        assert len(set(values)) == len(needle_pairs) and len(item.references) == references
        assert len(set(keys)) == (1 if task == "niah_multivalue" else len(needle_pairs))
        for name in {*keys, *item.references}:  # nothing else in the text contains it
            assert hay_of(item).count(name) == (
                4 if (task, name) == ("niah_multivalue", keys[0]) else 1
            )
        uuids = task in ("niah_single_3", "niah_multikey_3")
        shape = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if uuids else r"[1-9]\d{6}"
        assert all(re.fullmatch(shape, value) for value in values)


@pytest.mark.parametrize("task", NIAH)
def test_needles_are_at_their_depths(task: str):
    depth_quarters = set()
    for item in make(task, 1024, items=30).items:
        hay, total = hay_of(item), words(hay_of(item))
        places = {
            value: place for key, value in NEEDLE.findall(hay) for place in [hay.index(value)]
        }
        assert len(item.fields["depths"]) == len(item.references)
        for value, depth in zip(item.references, item.fields["depths"], strict=True):
            before = words(hay[: places[value]])
            # A sentence has at most 30 words and a needle 8, of which 7 precede its value.
            assert abs(before - depth * total) <= 30 + 4 * 8
            depth_quarters.add(round(depth * 4))
    assert depth_quarters == {0, 1, 2, 3, 4}


def test_variable_tracking_references_are_one_chain():
    for item in make("vt", items=5).items:
        example, _, turn = item.prompt.partition("Your turn:")
        assert tuple(solve_variables(turn)) == item.references and len(item.references) == 5
        assert len(re.findall(r"^VAR \w{5} = \d{5}$", turn, re.M)) == 1
        assert len(set(re.findall(r"^VAR (\w{5}) = ", turn, re.M))) == 5
        answer = example.strip().rpartition("\n")[2]
        assert ", ".join(solve_variables(example)) == answer
        assert re.fullmatch(r"\w{3}(, \w{3}){4}", answer)


def test_common_words_are_ten_times_as_frequent():
    for length, often in ((8192, 3), (16_384, 10)):
        (item,) = make("cwe", length, items=1).items
        counts = listed_words(item.prompt.rpartition("\n\n")[0])
        assert sorted(Counter(counts.values())) == [3, 30]
        assert {word for word, count in counts.items() if count == 30} == set(item.references)
        assert len(item.references) == 10
        example = item.prompt.partition("Your turn:")[0]
        answer = re.findall(r"\d+\. (\S+)", example.strip().rpartition("\n")[2])
        assert all(len(re.findall(rf" {word}\b", example)) == often + 1 for word in answer)
        assert len(answer) == 10 and not set(answer) & set(counts)
        shown = Counter(re.findall(r"\d+\. (\S+)", example.partition("\n\nWhich")[0]))
        assert sorted(set(shown.values())) == [often // 3, often]


def test_frequent_words_follow_the_zeta_distribution():
    (item,) = make("fwe", 16_384, items=1).items
    counts = [count for _, count in Counter(hay_of(item).split()).most_common()]
    shares = np.array([6 / np.pi**2 / k**2 for k in range(1, len(counts) + 1)])
    total = next(n for n in range(10_000, 40_000) if int(n * shares[0]) == counts[0])
    assert counts[:20] == pytest.approx(np.floor(total * shares[:20]), abs=1)
    assert counts[-1] == 1 and sum(counts) < total
    (short,) = make("fwe", 256, items=1).items
    with pytest.raises(ValueError, match="must be at least"):
        make("fwe", 192)  # too few words for the fourth to be more frequent than the fifth
    least = Counter(hay_of(short).split()).most_common(5)
    assert least[3][1] > least[4][1] and least[0][0] == "..."


def test_qa_documents_are_distinct_numbered_and_shuffled():
    benchmark = make("qa", items=160)
    assert len(benchmark.items) == 160 and len({item.question for item in benchmark.items}) == 160
    item = benchmark.items[0]
    row = next(row for row in qa_rows() if row.question == item.question)
    numbered_documents = re.findall(r"Document (\d+):\n(Town.*\n.*)\n", item.prompt)
    assert [int(number) for number, _ in numbered_documents] == list(
        range(1, len(numbered_documents) + 1)
    )
    documents = [document for _, document in numbered_documents]
    assert len(set(documents)) == len(documents) > 30 and set(row.documents) < set(documents)
    assert documents[:10] != list(row.documents)
    for other_item in benchmark.items:  # no document twice
        shown = re.findall(r"^Town\w+$", other_item.prompt, re.MULTILINE)
        assert len(set(shown)) == len(shown) > 30
    firsts = [re.findall(r"Document 1:\n(\w+)", i.prompt)[0] in i.question for i in benchmark.items]
    assert not all(firsts)


def test_score_is_the_share_of_references_found():
    benchmark = make("niah_multivalue")
    item = benchmark.items[0]
    first_reference, second_reference, *_ = item.references
    assert (
        benchmark.score(f"{first_reference}", item) == 0.25
        and benchmark.score(f"{first_reference} and {second_reference}", item) == 0.5
    )
    assert benchmark.extract("<think>x</think>  y ", item) == "y"
    assert benchmark.extract("<think>x", item) is None and benchmark.extract(" ", item) is None
    vt = make("vt").items[0]
    assert benchmark.score(" ".join(vt.references).lower(), vt) == 1.0
    qa = make("qa")
    assert qa.score("Nobody else!", qa.items[0]) == 1.0


def test_no_generated_name_is_part_of_another():
    assert len(set(ADJECTIVES)) == len(set(NOUNS)) == 256
    ends = [(a, b) for a in ADJECTIVES for b in ADJECTIVES if a != b and b.endswith(a)]
    beginnings = [(a, b) for a in NOUNS for b in NOUNS if a != b and b.startswith(a)]
    assert not ends and not beginnings


@pytest.mark.parametrize("kind", ["word", "number", "uuid", "code", "variable"])
def test_sampled_names_do_not_occur_in_the_text(kind: str):
    first = Names(np.random.default_rng(0)).sample(kind)
    names = Names(np.random.default_rng(0), f"there is {first} in it")
    sampled = [names.sample(kind) for _ in range(2000)]
    assert first not in sampled and len(set(sampled)) == 2000


def test_exhausted_names_raise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(haystack, "ADJECTIVES", ("red", "new"))
    monkeypatch.setattr(haystack, "NOUNS", ("car", "hat"))
    names = Names(np.random.default_rng(0))
    assert {names.sample("word") for _ in range(4)} == {"red-car", "red-hat", "new-car", "new-hat"}
    with pytest.raises(ValueError, match="needs more than the 4 names"):
        names.sample("word")


@pytest.mark.parametrize(
    "text",
    ["word " * 3000, "汉字" * 3000, "一二三四五六。" * 500, "A b. C d! E f?\n\nG-h i."],
)
def test_any_text_makes_a_haystack(text: str):
    benchmark = make("niah_single_2", 4096, text=text, count=lambda text: len(text) // 3)
    assert all(benchmark.score(solve("niah_single_2", i.prompt), i) == 1.0 for i in benchmark.items)
    assert max(map(len, haystack.split_sentences(text))) <= 400


def test_needles_are_inserted_between_pieces():
    pieces = [("a", 10), ("b", 30), ("c", 60)]
    for depth, at in ((0, 0), (0.09, 0), (0.1, 1), (0.39, 1), (0.4, 2), (0.99, 2), (1, 3)):
        assert haystack.insert_needles(pieces, ["x"], [depth]).index("x") == at
    assert haystack.insert_needles(pieces, ["y", "x", "z"], [0.5, 0.2, 0.5]) == list("axbyzc")


def grid(
    lengths: Sequence[int], items: int | None = None, seed: int = 3
) -> tuple[BenchmarkItem, ...]:
    return needle("grid", make_source(0, text=prose()), lengths, items, seed).items


def test_grid_has_a_needle_at_each_depth_and_length():
    lengths = (1024, 4096)
    items = grid(lengths, 44)
    cells = Counter((item.fields["length"], item.fields["depth"]) for item in items)
    assert cells == {(length, depth): 2 for length in lengths for depth in GRID_DEPTHS}
    for item in items:
        hay, length = hay_of(item), item.fields["length"]
        assert 0.95 * (length - 128) <= words(item.prompt) <= length - 128
        ((_, value),) = NEEDLE.findall(hay)
        assert item.references == (value,) and value not in item.question
        before = words(hay[: hay.index(value)]) - 7
        assert 0 <= item.fields["depth"] * (words(hay) - 8) - before <= 30
        answer = solve("niah", item.prompt)
        assert haystack.match_all(answer, item) == 1 and haystack.match_all("", item) == 0
    assert len({item.references for item in items}) == len({i.id for i in items}) == 44
    assert grid((1024,), 1) == items[:1] != grid((1024,), 1, seed=4)
    # One item per cell by default; fewer items take the first cells, more repeat them.
    once = grid(lengths)
    assert [i.id for i in once] == [f"needle-{n}-{d}-0" for n in lengths for d in GRID_DEPTHS]
    assert items[:22] == once and grid(lengths, 5) == once[:5]


@pytest.mark.parametrize("task", TASKS)
def test_too_short_length_is_rejected(task: str):
    with pytest.raises(ValueError, match=r"length = 30: must be at least \d+, for the prompt"):
        make(task, 30)


def test_missing_filler_text_is_rejected():
    for task in PROSE_TASKS:
        with pytest.raises(ValueError, match="text: has no words"):
            make(task, text=" \n")
    message = r"length = 131072: all the filling makes a prompt of only"
    with pytest.raises(ValueError, match=message):
        make("qa", 131_072, rows=qa_rows()[:20])
    assert set(PROSE_TASKS) < set(NIAH) and len(PROSE_TASKS) == 5
