"""Cloze questions about clusters of documents: no labels, and references that hold.

    python -m spell_jax.question_sets.cloze --clusters=clusters.jsonl --out=questions.jsonl

A set of --per_set questions about a cluster has the same documents, which the sampler reads and the
learner packs once. --form says what a question is:

- gap: a sentence with a gap (spell_jax/selfplay/cloze.py). The documents are the cluster's without
  the sentences of the set. "shown" are the documents with another sentence that contains the
  answer. Each answer of a cluster is asked for once.
- question: a sentence with a question word (spell_jax/selfplay/wh_questions.py). The documents are
  the cluster's, and "shown" is the sentence's. Each answer of a set is asked for once.

A cluster gives at most --sets sets, which are in random order and stay together. --clusters is what
data.source takes. Random choices depend only on the seed and the cluster's id. The last line
printed has all counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags

from spell_jax.data import built, tfds_sets
from spell_jax.data.clusters import CLOZE, Cluster, count_words
from spell_jax.data.config import DataConfig, origin
from spell_jax.data.questions import Question
from spell_jax.runtime import dataclass_flags, entry
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.selfplay import cloze, wh_questions
from spell_jax.selfplay.cloze import Cloze
from spell_jax.selfplay.given_questions import scores_itself

FORMS = ("gap", "question")


@dataclasses.dataclass(frozen=True)
class ClozeConfig:
    """Selection of the questions.

    Attributes:
      form: what a question is: "gap" or "question".
      per_set: questions that share their documents.
      sets: most sets of a cluster.
      shared_words: words that the sentence with the gap has in common with another one that
        contains the answer; of the form "gap".
      seed: seed of the selection.
    """

    form: str = "gap"
    per_set: int = 4
    sets: int = 4
    shared_words: int = 2
    seed: int = 0

    def __post_init__(self):
        check_choice(self, "", form=FORMS)
        check_least(self, "", per_set=1, sets=1, shared_words=0, seed=0)


def make_sets(
    cluster: Cluster, config: ClozeConfig, counts: Counter[str]
) -> Iterator[list[Question]]:
    """Yield the full sets of questions about a cluster; `counts` gets "written"."""
    # The id, not the position: a cluster keeps its questions if other clusters are added.
    rng = np.random.default_rng([config.seed, zlib.crc32(cluster.id.encode())])
    sets = (
        _gap_sets(cluster, config, rng) if config.form == "gap" else _wh_sets(cluster, config, rng)
    )
    for questions in itertools.islice(sets, config.sets):
        # Only full sets: reading the documents of a set then pays for per_set questions.
        if len(questions) < config.per_set:
            break
        counts["written"] += len(questions)
        yield questions


def _wh_sets(
    cluster: Cluster, config: ClozeConfig, rng: np.random.Generator
) -> Iterator[list[Question]]:
    """Yield sets of questions with a question word, the last one maybe not full."""
    questions = {
        question: Question(
            "general_qa", cluster.documents, question, answer, answers=(answer,), shown=(number,)
        )
        for number, document in enumerate(cluster.documents)
        for sentence in cloze.split_sentences(document)
        for question, answer in wh_questions.ask_sentence(sentence)
        if scores_itself(answer, "general_qa")
    }
    unused = [list(questions.values())[i] for i in rng.permutation(len(questions))]
    while unused:
        by_answer: dict[str, Question] = {}
        left = []
        for question in unused:
            if question.answer.lower() in by_answer or len(by_answer) == config.per_set:
                left.append(question)
            else:
                by_answer[question.answer.lower()] = question
        unused = left
        yield list(by_answer.values())


def _gap_sets(
    cluster: Cluster, config: ClozeConfig, rng: np.random.Generator
) -> Iterator[list[Question]]:
    """Yield sets of sentences with a gap, some maybe not full."""
    clozes = list(cloze.find_clozes(cluster.documents, config.shared_words))
    unused = [clozes[i] for i in rng.permutation(len(clozes))]
    answers: set[str] = set()
    while True:
        gaps = _choose(unused, config.per_set, answers)
        answers |= {gap.span.lower() for gap in gaps}
        hidden = {gap.sentence for gap in gaps}
        documents = cloze.hide(cluster.documents, sorted(hidden))
        yield [_gap_question(gap, hidden, documents) for gap in gaps]


def _choose(clozes: Sequence[Cloze], limit: int, answers: set[str]) -> list[Cloze]:
    """Choose questions with different answers, each of which stands in a sentence that stays."""
    gaps: list[Cloze] = []
    for candidate in clozes:
        together = [*gaps, candidate]
        hidden = {gap.sentence for gap in together}
        spans = {gap.span.lower() for gap in together}
        if (
            len(gaps) < limit
            and len(hidden) == len(spans) == len(together)
            and candidate.span.lower() not in answers
            and scores_itself(candidate.span, CLOZE)
            # A later gap may hide the sentence that answers an earlier one, so all are checked
            # again.
            and all(any(text not in hidden for _, text in gap.elsewhere) for gap in together)
        ):
            gaps = together
    return gaps


def _gap_question(gap: Cloze, hidden: set[str], documents: tuple[str, ...]) -> Question:
    evidence = [(number, text) for number, text in gap.elsewhere if text not in hidden]
    return Question(
        CLOZE,
        documents,
        gap.question,
        gap.span,
        evidence=tuple(text for _, text in evidence),
        shown=tuple(sorted({number for number, _ in evidence})),
    )


def main(_) -> None:
    values = flags.FLAGS
    config = dataclass_flags.read(ClozeConfig, values)
    data = DataConfig(source=values.clusters, **tfds_sets.read_flags(values))
    source = built.open_source(
        origin(data), count_tokens=count_words, max_document_tokens=sys.maxsize
    )
    counts: Counter[str] = Counter()
    clusters = source.read(sorted(source.tasks))
    sets = [questions for cluster in clusters for questions in make_sets(cluster, config, counts)]
    order = np.random.default_rng(config.seed).permutation(len(sets))
    write_records(values.out, (dataclasses.asdict(q) for i in order for q in sets[i]))
    print(json.dumps(counts | {"clusters": len(clusters)}))


if __name__ == "__main__":
    flags.DEFINE_string("clusters", None, "Clusters, as data.source takes them.", required=True)
    tfds_sets.define_flags()
    flags.DEFINE_string("out", None, "JSONL of questions to write.", required=True)
    dataclass_flags.define(ClozeConfig)
    entry.run_main(main)
