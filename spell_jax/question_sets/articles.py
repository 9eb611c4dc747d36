"""Questions that people asked about articles, with several paragraphs of the article as documents.

    python -m spell_jax.question_sets.articles --rows=dev-v1.1.json --articles=17-24 --paragraphs=4
        --per_article=25 --out=questions.jsonl

reads files in SQuAD's layout (Rajpurkar et al. 2016) and writes the layout of
spell_jax/data/questions.py:

1. The documents of a question are its own paragraph and others of its article, sampled and then
   shuffled. An article with fewer paragraphs gives all it has. With --sets=N, N sets of paragraphs
   are sampled per article instead, and a set is the documents of all questions about it. Prompts
   with the same documents are read once by the sampler.
2. `answers` are the answers of all annotators without repeats, the first one first.
3. `wrong` are answers to other questions about the same documents, of the same kind (numbers, or
   texts) and without a word in common with the right ones.

With --clusters=FILE the paragraphs go, without any question, to a JSONL of document clusters, one
per --paragraphs paragraphs in the article's order.

With --block=B the questions are in random order, B with the same documents after one another, so
that a training step reads and packs documents once for B questions.

Random choices depend only on the seed and on the number of the article and of the question. Bad
articles and unusable questions are logged or counted, and skipped; the last line printed has all
counts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from spell_jax.data.questions import Question, in_blocks, require_text, squad_questions
from spell_jax.runtime import dataclass_flags, entry
from spell_jax.runtime.config import check_least
from spell_jax.runtime.files.jsonl import parse_rows, read_json, write_records
from spell_jax.selfplay import rules
from spell_jax.selfplay.given_questions import scores_itself

MOST_WRONG = 8  # answers kept per question


@dataclasses.dataclass(frozen=True)
class ArticleConfig:
    """Selection and size of the questions.

    Attributes:
      paragraphs: documents of a question, and of a cluster.
      per_article: most questions of an article; 0: all.
      sets: most sets of paragraphs of an article, without a common paragraph, each for all
        questions about it; 0: paragraphs of its own for each question.
      block: questions with the same documents that stay together in random order; 0: the order of
        the file.
      seed: seed of the selection, of the other paragraphs and of the order.
    """

    paragraphs: int = 4
    per_article: int = 0
    sets: int = 0
    block: int = 0
    seed: int = 0

    def __post_init__(self):
        check_least(self, "", paragraphs=1, per_article=0, sets=0, block=0, seed=0)


@dataclasses.dataclass(frozen=True)
class ArticleQuestion:
    """A human question: index of its paragraph, text, and answers of all annotators."""

    paragraph: int
    question: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Article:
    """Paragraphs of an article and the usable questions about them."""

    title: str
    paragraphs: tuple[str, ...]
    questions: tuple[ArticleQuestion, ...]


def read_articles(path: pathlib.Path, counts: Counter[str]) -> list[Article]:
    """Read the articles of a file {"data": [{"title", "paragraphs": [{"context", "qas"}]}]}.

    Counts "questions", "unusable" (without an answer that the reward's rule can score) and
    "bad_articles". Raises ValueError if the file is not in this layout.
    """
    if not isinstance(rows := read_json(path).get("data"), list):
        raise ValueError(f"{path}: not in SQuAD's layout; data must be a list of articles")
    articles, counts["bad_articles"] = parse_rows(path, rows, functools.partial(_article, counts))
    return articles


def _article(counts: Counter[str], row: Mapping[str, Any]) -> Article:
    paragraphs = tuple(require_text(p["context"]).strip() for p in row["paragraphs"])
    questions = []
    for index, question, annotated in squad_questions(row):
        counts["questions"] += 1
        answers = dict.fromkeys(answer.strip() for answer in annotated)
        # A reference that the rule scores below 1 against itself can never be rewarded.
        usable_answers = tuple(text for text in answers if scores_itself(text, "general_qa"))
        if usable_answers and (words := question.split()):
            questions.append(ArticleQuestion(index, " ".join(words), usable_answers))
        else:
            counts["unusable"] += 1
    return Article(require_text(row["title"]), paragraphs, tuple(questions))


def make_questions(
    article: Article, number: int, config: ArticleConfig, counts: Counter[str]
) -> Iterator[Question]:
    """Yield the questions of article `number`, each with its documents."""
    sets = _paragraph_sets(article, number, config)
    set_of = {paragraph: shown for shown in sets for paragraph in shown}
    indices = [
        index
        for index, human_question in enumerate(article.questions)
        if not config.sets or human_question.paragraph in set_of
    ]
    # Selected at random, then in the order of the article.
    order = np.random.default_rng([config.seed, number]).permutation(len(indices))
    kept_indices = sorted(indices[i] for i in order[: config.per_article or len(indices)])
    for index in kept_indices:
        human_question = article.questions[index]
        # One generator a question: --per_article and the other questions do not change its
        # documents.
        rng = np.random.default_rng([config.seed, number, index])
        if config.sets:
            shown = set_of[human_question.paragraph]
        else:
            other_paragraphs = [
                i for i in range(len(article.paragraphs)) if i != human_question.paragraph
            ]
            shown = [
                human_question.paragraph,
                *rng.permutation(other_paragraphs)[: config.paragraphs - 1].tolist(),
            ]
            # Shuffled, or the first document would always have the answer.
            shown = rng.permutation(shown).tolist()
        counts["written"] += 1
        counts["fewer_paragraphs"] += len(shown) < config.paragraphs
        yield Question(
            "general_qa",
            tuple(article.paragraphs[i] for i in shown),
            human_question.question,
            human_question.answers[0],
            answers=human_question.answers,
            wrong=tuple(_wrong(article.questions, human_question, set(shown), rng)),
            shown=(shown.index(human_question.paragraph),),
        )


def _paragraph_sets(article: Article, number: int, config: ArticleConfig) -> list[list[int]]:
    """Return at most config.sets disjoint sets of paragraphs; only the first may be smaller."""
    count, size = len(article.paragraphs), config.paragraphs
    order = np.random.default_rng([config.seed, number, count]).permutation(count).tolist()
    set_count = min(config.sets, max(1, count // size))
    return [order[size * i : size * (i + 1)] for i in range(set_count)]


def _wrong(
    questions: Sequence[ArticleQuestion],
    about: ArticleQuestion,
    shown: set[int],
    rng: np.random.Generator,
) -> list[str]:
    """Return at most MOST_WRONG answers to other questions that are wrong for `about`.

    These questions are about the paragraphs `shown`, so a wrong answer is in the documents.
    """
    right_words = set().union(*map(_words, about.answers))
    wrong_answers = []
    for i in rng.permutation(len(questions)).tolist():
        answer = questions[i].answers[0]
        # A name as the wrong answer to "how many" would be rejected by its kind alone.
        alike = _has_digit(answer) == _has_digit(about.answers[0])
        if questions[i].paragraph in shown and alike and right_words.isdisjoint(_words(answer)):
            wrong_answers.append(answer)
    return list(dict.fromkeys(wrong_answers))[:MOST_WRONG]


def _words(text: str) -> set[str]:
    return set(rules.normalize_answer(text).split())


def _has_digit(text: str) -> bool:
    return re.search(r"\d", text) is not None


def make_clusters(article: Article, config: ArticleConfig) -> Iterator[dict[str, Any]]:
    """Yield full clusters of consecutive paragraphs of an article; a shorter rest is left out."""
    size = config.paragraphs
    for start in range(0, len(article.paragraphs) - size + 1, size):
        documents = list(article.paragraphs[start : start + size])
        yield {"id": f"{article.title}/{start // size}", "documents": documents}


def parse_range(text: str, count: int) -> range:
    """Parse "17-24" or "3" (numbers from 1, both included), at most `count`, as indices."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= count:
        raise ValueError(f"articles = {text!r}: must be like 17-24, within the {count} articles")
    return range(first - 1, last)


def main(_) -> None:
    flag_values = flags.FLAGS
    if not flag_values.out and not flag_values.clusters:
        raise flags.ValidationError("must give --out, --clusters or both")
    config = dataclass_flags.read(ArticleConfig, flag_values)
    counts: Counter[str] = Counter()
    articles = read_articles(pathlib.Path(flag_values.rows), counts)
    article_numbers = (
        parse_range(flag_values.articles, len(articles))
        if flag_values.articles
        else range(len(articles))
    )
    if flag_values.out:
        questions = (
            q for n in article_numbers for q in make_questions(articles[n], n, config, counts)
        )
        if config.block:
            rng = np.random.default_rng([config.seed, config.block])
            questions = in_blocks(list(questions), lambda q: q.documents, config.block, rng)
        write_records(flag_values.out, map(dataclasses.asdict, questions))
    if flag_values.clusters:
        clusters = [c for n in article_numbers for c in make_clusters(articles[n], config)]
        write_records(flag_values.clusters, clusters)
        counts["clusters"] = len(clusters)
    print(json.dumps(counts))


if __name__ == "__main__":
    flags.DEFINE_string("rows", None, "File in SQuAD's layout.", required=True)
    flags.DEFINE_string("articles", "", "Articles to use, such as 17-24; all by default.")
    dataclass_flags.define(ArticleConfig)
    flags.DEFINE_string("out", "", "JSONL of questions to write.")
    flags.DEFINE_string("clusters", "", "JSONL of clusters to write, without questions.")
    entry.run_main(main)
