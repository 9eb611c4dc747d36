"""Tests of rule-based rows of a folder: true, unique facts that the algorithm's parsers accept."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from spell_jax.data.clusters import (
    LETTERS,
    PAPER_TASKS,
    Cluster,
    count_words,
    read_clusters,
    split_held_out,
)
from spell_jax.data.questions import read_questions
from spell_jax.policy import tokenizer
from spell_jax.question_sets import facts, values
from spell_jax.question_sets.facts import (
    FactRowConfig,
    asked_questions,
    find_facts,
    make_fact_rows,
    make_questions,
)
from spell_jax.question_sets.rows import Row
from spell_jax.question_sets.values import means_the_same, other_forms
from spell_jax.selfplay import prompts
from spell_jax.selfplay.parsing import parse_question, parse_verdict
from spell_jax.selfplay.rules import score

PLACES = ("Avalon", "Brobdingnag", "Camelot", "Dunsinane", "Elsinore", "Florin", "Gondor", "Hyrule")


def make_cluster(name: str, first: int) -> Cluster:
    documents = []
    for i, place in enumerate(PLACES):
        documents.append(
            f"In that time the harbour number {first + i} was built near {place}.\n"
            f"The yearly trade of port {place.lower()} came to ${(first + i) * 1111:,} in silver, "
            f"while the wool of {place.lower()} sheep weighed {first * 3 + i * 7} stone."
        )
    return Cluster(name, tuple(documents))


CLUSTERS = [make_cluster(f"c{i}", 11 + 100 * i) for i in range(3)]
COMPACT = prompts.load("compact")


def write_files(*arguments: str) -> list[str]:
    """Run the command in this process; return the lines that the command prints."""
    flag_values = flags.FlagValues()
    facts.define_flags(flag_values)
    flag_values(["facts", *arguments])
    return facts.write_files(flag_values)


def make(clusters: list[Cluster], rows: int, **fields: Any) -> list[Row]:
    return make_fact_rows(clusters, FactRowConfig(rows=rows, **fields), COMPACT)[0]


def test_facts_follow_a_unique_cue() -> None:
    facts = find_facts(
        [
            "The total cost of repairs was $1,250.50 this year. We met Jane Doe, Mayor of York.",
            "It is said that he saw Rome. It is said that he saw Paris.",
            "A line that ends in\n42 is no cue, nor are few 7, nor a cost of exactly 0.",
        ]
    )
    fact_fields = {(fact.document, fact.kind, fact.cue, fact.value) for fact in facts}
    assert (0, "number", "cost of repairs was", "$1,250.50") in fact_fields
    assert (0, "name", "this year. We met", "Jane Doe") in fact_fields
    assert not any(fact.value in ("Rome", "Paris", "42", "0", "We") for fact in facts)
    assert (2, "number", "cue, nor are few", "7") in fact_fields


def test_means_the_same_accepts_equivalent_values() -> None:
    assert means_the_same("$5,000", "5000.0")
    assert means_the_same("5", "500%")
    assert means_the_same("New York", "york")
    assert not means_the_same("5000", "5100")
    assert not means_the_same("York", "Bath")


@pytest.mark.parametrize("value", ["5000", "$1,250.50", "3%", "Jane Doe", "B", "1945"])
def test_other_forms_differ_in_text_and_mean_the_same(value: str) -> None:
    forms = other_forms(value)
    assert forms
    assert value not in forms
    for form in forms:
        bare = form.removeprefix("the number ").strip("().")
        assert means_the_same(bare, value.lstrip("$")), form


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make(CLUSTERS, 960, difference_share=0.3)


def test_rows_follow_the_role_and_task_shares(rows: list[Row]) -> None:
    counts = Counter(row.role for row in rows)
    assert counts == {"questioner": 240, "responder": 240, "verifier": 144, "reciter": 336}
    counts = Counter((row.role, row.task) for row in rows)
    assert all(counts["questioner", task] == 80 for task in PAPER_TASKS)


def test_questioner_rows_are_accepted_and_quote_shown_documents(
    rows: list[Row],
) -> None:
    letters: Counter[str] = Counter()
    harder = 0
    for row in rows:
        if row.role != "questioner":
            continue
        parsed = parse_question(row.completion, row.task, count_words)
        assert parsed.status == "accepted", parsed.reason
        assert row.completion.startswith("<think>")
        assert "\n" not in row.completion
        harder += "\nask harder " in row.prompt
        if row.task == "multiple_choice":
            letters[parsed.answer] += 1
            assert row.prompt.endswith(f"choice ({parsed.answer})")
            assert len(set(parsed.options)) == 4
        if " minus " not in parsed.question:
            quote = row.completion.removeprefix("<think> ").partition("</think>")[0]
            assert quote.removesuffix(f"({parsed.answer})") in row.prompt
    assert {*letters} == {*LETTERS}
    assert 30 <= harder <= 90


def test_responder_rows_show_the_evidence_and_earn_the_rule_reward() -> None:
    questions = make_questions(CLUSTERS[:1], PAPER_TASKS, 300, seed=0)
    answers = {question.question: question.answer for question in questions}
    scores = []
    for row in make(CLUSTERS[:1], 300, documents_read=2, history_share=0.0):
        if row.role == "responder":
            documents = [d for d in CLUSTERS[0].documents if d in row.prompt]
            assert len(documents) in (1, 2)
            quote = row.completion.removeprefix("<think> ").partition("</think>")[0]
            evidence = quote[:-3] if row.task == "multiple_choice" else quote  # without "(A)"
            assert evidence in "\n".join(documents)
            if row.task != "multiple_choice":
                answer = answers[row.prompt.rpartition("\n")[2]]
                scores.append(score(row.completion, answer, row.task))
    assert len(scores) == 50 and {*scores} == {1.0}


def test_multiple_choice_answers_name_the_quoted_option(
    rows: list[Row],
) -> None:
    choice_rows = [r for r in rows if r.role == "responder" and r.task == "multiple_choice"]
    for row in choice_rows:
        quote, _, letter = row.completion.partition("</think>answer is ")
        option = row.prompt.rpartition(f"\n{letter} ")[2].partition("\n")[0]
        assert quote.endswith(f" {option}{letter}")
    assert {row.completion[-2] for row in choice_rows} == {*LETTERS}


def test_verifier_rows_are_balanced_and_correct(rows: list[Row]) -> None:
    verdicts: Counter[int] = Counter()
    for row in rows:
        if row.role != "verifier":
            continue
        verdict = parse_verdict(row.completion)
        verdicts[verdict] += 1
        first_answer, second_answer = (
            row.prompt.split(f"\n{name}: ")[1].split("\n")[0] for name in ("one", "two")
        )
        bare = first_answer.removeprefix("the number ").strip("().")
        assert means_the_same(bare, second_answer.strip()) == bool(verdict), (
            first_answer,
            second_answer,
        )
    assert verdicts[-1] == 0
    assert 48 <= verdicts[1] <= 96


def test_equal_values_in_other_forms_are_never_judged_different() -> None:
    documents = ("All of us paid 5,000 and all of them paid 5000 or, less often, 5000.0 coins.",)
    clusters = [Cluster("a", documents)]
    verifier_rows = make(clusters, 40, tasks=("general_qa",), roles=(0, 0, 1))
    assert {row.completion for row in verifier_rows} == {"[[YES]]"}


def test_difference_answers_are_correct(rows: list[Row]) -> None:
    checked = 0
    for row in rows:
        if row.role == "responder" and " minus number after: " in row.prompt:
            question = row.prompt.rpartition("\nnumber after: ")[2]
            larger, smaller = (
                int(row.prompt.split(f"{cue} ")[1].split()[0])
                for cue in question.split(" minus number after: ")
            )
            assert row.completion.endswith(f"answer is {larger - smaller}")
            checked += 1
    assert checked > 5


def test_rows_depend_on_the_seed_only(rows: list[Row]) -> None:
    assert make(CLUSTERS, 960, difference_share=0.3) == rows
    assert make(CLUSTERS, 960, difference_share=0.3, seed=1) != rows


def test_reciter_rows_repeat_their_documents(rows: list[Row]) -> None:
    reordered = 0
    for row in rows:
        if row.role == "reciter":
            shown_documents = [d for c in CLUSTERS for d in c.documents if d in row.prompt]
            assert len(row.prompt) == len("\n".join([*shown_documents, "recite"]))
            assert 1 <= len(shown_documents) <= 3
            recited_lines = row.completion.split("\n")
            assert sorted(recited_lines) == sorted("\n".join(shown_documents).split("\n"))
            reordered += row.prompt != f"{row.completion}\nrecite"
    assert reordered > 50


# ------------------------------------------------------------------------------------ Linear time


def line(size: int) -> str:
    """Make a text of one line with spaces and a fact in every sixth word."""
    parts, words = [], ("harbour", "of", "grain", "near", "silver")
    for number in range(size // 34):
        parts += ["was", "built", f"{words[number % 5]}{number}", "with", "stones", str(number + 2)]
    return " ".join(parts)


def nuls(size: int) -> str:
    return "\0" * size


def solid(size: int) -> str:
    return "".join(map(str, range(size // 3)))[:size]


class Counted:
    """A pattern that counts the characters that it is given."""

    def __init__(self, pattern: re.Pattern[str], counts: Counter[str]):
        self._pattern, self._counts = pattern, counts

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        self._counts["scanned"] += len(text)
        return self._pattern.finditer(text)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        self._counts["scanned"] += len(text)
        return self._pattern.fullmatch(text)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the characters scanned by patterns, and the calls of functions that cost more."""
    counts: Counter[str] = Counter()
    for owner, name in ((facts, "WORD"), (facts, "NUMBER"), (values, "NUMBER"), (facts, "NAME")):
        monkeypatch.setattr(owner, name, Counted(getattr(owner, name), counts))

    def count(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    for name in ("means_the_same", "find_facts"):
        count(facts, name)
    return counts


@pytest.mark.parametrize("size", [40_000, pytest.param(5_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "one cluster"])
@pytest.mark.parametrize("make", [line, nuls, solid])
def test_work_is_linear_in_the_text(
    make: Callable[[int], str], as_folder: bool, size: int, tmp_path: Path, work: Counter[str]
) -> None:
    text, rows = make(size), 40
    if as_folder:
        (tmp_path / "text.txt").write_text(text)
        (tmp_path / "facts.txt").write_text("\n\n".join(CLUSTERS[0].documents))
        source = tmp_path
    else:
        source = tmp_path / "clusters.jsonl"
        records = {"id": "a", "documents": [*CLUSTERS[0].documents, text]}
        source.write_text(json.dumps(records))
    counted = 0

    def count(piece: str) -> int:
        nonlocal counted
        counted += len(piece)
        return facts._count_roughly(piece)

    clusters, report = read_clusters(
        source, count_tokens=count, max_document_tokens=64, documents_per_cluster=4
    )
    is_read = not (as_folder and make is nuls)
    assert is_read == ("binary" not in report.skipped)
    total = sum(len(d) for c in clusters for d in c.documents)
    assert is_read == (total > 0.8 * size)
    assert max(len(d) for c in clusters for d in c.documents) <= 64 * facts.LONGEST_WORD
    config = FactRowConfig(rows=rows, history_share=0.0)
    cluster_rows, counts = make_fact_rows(clusters, config, COMPACT)
    assert counted <= 7 * total
    assert counts["questions"] >= 14
    comparisons = 4 * facts.MOST_CANDIDATES  # of a value with the answer and three wrong ones
    assert work["means_the_same"] <= comparisons * rows
    assert work["scanned"] <= 8 * total + 4 * 20 * comparisons * rows
    assert sum(len(row.prompt + row.completion) for row in cluster_rows) <= 10_000 * rows
    assert work["find_facts"] <= 2 * (len(clusters) + total / facts.MOST_DOCUMENTS)


def test_tokenizer_is_trained_on_short_rows_of_a_text_without_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(solid(100_000))
    (tmp_path / "facts.txt").write_text("\n\n".join(CLUSTERS[0].documents))
    train_texts: list[str] = []

    def train(texts: Iterator[str], *_: Any) -> None:
        train_texts.extend(texts)
        raise InterruptedError

    monkeypatch.setattr(tokenizer, "train", train)
    with pytest.raises(InterruptedError):
        arguments = [f"--source={tmp_path}", f"--out={tmp_path / 'out'}", "--held_out=0"]
        write_files(*arguments, "--rows=80")
    assert len(train_texts) == 80 and max(map(len, train_texts)) < 10_000


def test_many_rows_of_few_questions_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    facts._warn_of_repetition(1260, 126)
    assert not caplog.messages
    facts._warn_of_repetition(12_000, 126)
    assert caplog.messages == [
        "rows = 12000: more than 10 for each of the 126 questions about facts, so the rows repeat "
        "themselves; take fewer rows or more documents"
    ]


def test_held_out_questions_have_answers_in_their_documents() -> None:
    questions = asked_questions(CLUSTERS, FactRowConfig(), 30, 0)
    assert Counter(item.task for item in questions) == dict.fromkeys(PAPER_TASKS, 10)
    for item in questions:
        text, answer = "\n".join(item.documents), item.answer
        if item.task == "multiple_choice":
            answer = item.question.partition(f"\n({answer}) ")[2].partition("\n")[0]
        assert answer and answer.replace(",", "") in text.replace(",", "")


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="difference_share = 2"):
        FactRowConfig(difference_share=2)
    with pytest.raises(ValueError, match="for financial_math in 1 clusters; leave the task out"):
        make([Cluster("a", ("We all once met Jane.",))], 9)


def test_command_line_writes_rows_tokenizer_and_questions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = tmp_path / "documents", tmp_path / "rows"
    source.mkdir()
    for cluster in CLUSTERS:
        (source / f"{cluster.id}.txt").write_text("\n\n".join(cluster.documents))
    sizes = ["--documents_per_cluster=4", "--max_document_tokens=48", "--vocab_size=400"]
    sizes += ["--rows=40", "--training_questions=6"]
    caplog.set_level(logging.INFO, "spell_jax")
    written = write_files(f"--source={source}", f"--out={out}", "--held_out=0.2", *sizes)
    phases = ["reading", "finding facts", "making rows", "training a tokenizer on 40 rows"]
    phases += ["making questions"]
    for phase in phases:
        assert any(message.startswith(phase) for message in caplog.messages), phase
    assert [line.split(": ")[0] for line in written] == [
        *map(str, (out, out / "rows.jsonl", out / "questions.jsonl")),
        str(out / "training_questions.jsonl"),
    ]
    assert written[1].startswith(f"{out / 'rows.jsonl'}: 40 rows; ")
    lines = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert len(lines) == 40
    assert set(lines[0]) == {"prompt", "completion", "role", "task"}
    # Training with this tokenizer makes the same clusters and holds out the same ones.
    words = tokenizer.load(out)
    clusters, report = read_clusters(
        source, count_tokens=words.count, max_document_tokens=48, documents_per_cluster=4
    )
    training, unseen_ids = split_held_out([cluster.id for cluster in clusters], 0.2)
    held_out = [cluster for cluster in clusters if cluster.id in unseen_ids]
    assert max(report.lengths) <= 48
    questions = read_questions(out / "questions.jsonl", "data.validation")
    assert {question.documents for question in questions} <= {c.documents for c in held_out}
    trained = [cluster for cluster in clusters if cluster.id in training]
    training_questions = read_questions(out / "training_questions.jsonl", "data.questions")
    assert len(training_questions) == 6
    assert {question.documents for question in training_questions} <= {c.documents for c in trained}
    unseen = [document for cluster in held_out for document in cluster.documents]
    assert not any(
        document in line["prompt"] + line["completion"] for line in lines for document in unseen
    )
    second_out = tmp_path / "other"
    arguments = [f"--source={source}", f"--tokenizer={out}", "--held_out=0", *sizes]
    write_files(*arguments, f"--out={second_out}")
    assert tokenizer.load(second_out).model == words.model
    assert not (second_out / "questions.jsonl").exists()


@pytest.mark.slow
def test_questioner_rows_of_real_filings_are_accepted(spell_data: Path, tmp_path: Path) -> None:
    write_files(f"--source={spell_data / 'edgar' / 'dev'}", f"--out={tmp_path}", "--rows=300")
    for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = Row(**json.loads(line))
        if row.role == "questioner":
            assert parse_question(row.completion, row.task, count_words).status == "accepted"
