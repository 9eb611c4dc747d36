"""Tests of questions about articles: documents, right and wrong answers, damaged files."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

from spell_jax.data import clusters
from spell_jax.data.questions import read_questions
from spell_jax.question_sets import articles
from spell_jax.question_sets.articles import ArticleConfig, make_clusters, make_questions

CITIES = ("Oslo", "Lima", "Rome", "Cairo", "Quito", "Delhi")


def qa(question: str, *answers: str) -> dict:
    return {
        "question": question,
        "answers": [{"text": text, "answer_start": 0} for text in answers],
    }


def paragraph(city: str, number: int) -> dict:
    context = f"{city} has {100 + number} bridges. Its river is the Blue {city} River."
    return {
        "context": context,
        "qas": [
            qa(f"How many bridges has {city}?", str(100 + number)),
            qa(f"Which river is in {city}?", f"Blue {city} River", f"the Blue {city} River"),
            qa("Unanswered?"),
        ],
    }


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    rows = [paragraph(city, number) for number, city in enumerate(CITIES)]
    articles = [{"title": "Cities", "paragraphs": rows}, {"title": "None"}]
    file = tmp_path / "articles.json"
    file.write_text(json.dumps({"version": "1.1", "data": articles}))
    return file


def read(path: pathlib.Path) -> tuple[list[articles.Article], Counter[str]]:
    counts: Counter[str] = Counter()
    return articles.read_articles(path, counts), counts


def test_unusable_questions_and_bad_articles_are_counted(path, caplog):
    articles, counts = read(path)
    assert [article.title for article in articles] == ["Cities"]
    assert counts == {"questions": 18, "unusable": 6, "bad_articles": 1}
    assert f"{path}, row 1: skipped" in caplog.text


def test_documents_hold_the_answer_and_come_from_the_article(path):
    (article,), _ = read(path)
    questions = list(make_questions(article, 0, ArticleConfig(paragraphs=3), Counter()))
    assert len(questions) == 12
    for question in questions:
        assert len(question.documents) == 3 and {*question.documents} <= {*article.paragraphs}
        assert any(question.answer in document for document in question.documents)
    rivers = [q for q in questions if "river" in q.question]
    assert all(len(q.right) == 2 for q in rivers)
    assert (
        len({q.documents.index(next(d for d in q.documents if q.answer in d)) for q in rivers}) > 1
    )


def test_questions_about_a_set_of_paragraphs_have_the_same_documents(path):
    (article,), _ = read(path)
    config = ArticleConfig(paragraphs=2, sets=2)
    questions = list(make_questions(article, 0, config, Counter()))
    sets = Counter(question.documents for question in questions)
    assert len(questions) == 8 and [*sets.values()] == [4, 4]  # two usable questions a paragraph
    first_documents, second_documents = sets
    assert len({*first_documents, *second_documents}) == 4  # the sets have no paragraph in common
    for question in questions:
        assert any(question.answer in document for document in question.documents)
    four_paragraph_questions = list(
        make_questions(article, 0, ArticleConfig(paragraphs=4, sets=9), Counter())
    )
    assert (
        len(four_paragraph_questions) == 8
        and len({question.documents for question in four_paragraph_questions}) == 1
    )


def test_wrong_answers_are_of_the_same_kind_and_documents(path):
    (article,), _ = read(path)
    for question in make_questions(article, 0, ArticleConfig(paragraphs=3), Counter()):
        text = " ".join(question.documents)
        assert all(wrong in text and wrong not in question.right for wrong in question.wrong)
        if question.answer.isdecimal():
            assert len(question.wrong) == 2 and all(w.isdecimal() for w in question.wrong)
        else:
            assert question.wrong == ()  # every river shares words with the right one


def test_questions_depend_only_on_seed_and_number(path):
    (article,), _ = read(path)

    def make(seed: int, per_article: int = 0) -> list:
        return list(
            make_questions(
                article,
                0,
                ArticleConfig(paragraphs=3, per_article=per_article, seed=seed),
                Counter(),
            )
        )

    assert make(0) == make(0) != make(1)
    assert len(make(0, 5)) == 5 and set(make(0, 5)) <= set(make(0))


def test_clusters_have_no_questions_and_are_read(path, tmp_path):
    (article,), _ = read(path)
    cluster_records = list(make_clusters(article, ArticleConfig(paragraphs=4)))
    assert [len(cluster["documents"]) for cluster in cluster_records] == [4]
    file = tmp_path / "clusters.jsonl"
    file.write_text("".join(json.dumps(cluster) + "\n" for cluster in cluster_records))
    loaded_clusters, _ = clusters.read_clusters(file)
    assert loaded_clusters[0].documents == tuple(article.paragraphs[:4])


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"data": 3}', "[" * 100_000])
def test_file_in_another_layout_is_rejected(content, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"bad\.json: (damaged|must be a JSON|not in SQuAD's)"):
        read(path)


@pytest.mark.parametrize("text", ["0-2", "3-2", "1-9", "x", "1-2-3"])
def test_bad_range_of_articles_is_rejected(text):
    with pytest.raises(ValueError, match=f"articles = '{text}'"):
        articles.parse_range(text, 8)
    assert articles.parse_range("8", 8) == range(7, 8)


@pytest.mark.slow
def test_command_writes_questions_and_clusters(path, tmp_path):
    out, clusters_out = tmp_path / "questions.jsonl", tmp_path / "clusters.jsonl"
    flags = [f"--rows={path}", "--articles=1", f"--out={out}", f"--clusters={clusters_out}"]
    command = [sys.executable, "-m", "spell_jax.question_sets.articles", *flags]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout.splitlines()[-1])
    assert counts["written"] == len(read_questions(out, "--out")) == 12
    assert counts["clusters"] == 1
