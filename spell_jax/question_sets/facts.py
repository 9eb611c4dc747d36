"""Questions and rows from a folder of real texts, made by rules without labels.

1. A fact is a number or a name together with its cue, the few words just before it in the same
   line. A fact counts only if its cue occurs once in the whole cluster.
2. Questions ask for facts: which number or name follows a cue, or the difference of two numbers.
   Other values of the cluster are the wrong answers.
3. question_sets/rows.py makes the rows of all roles, with the fact as the quoted evidence.

    python -m spell_jax.question_sets.facts --source=FOLDER --out=DIR

writes DIR/rows.jsonl, one {"prompt", "completion", "role", "task"} per line; DIR/tokenizer.model,
trained on such rows; and DIR/questions.jsonl, questions with answers about held-out clusters. With
--training_questions, DIR/training_questions.jsonl has questions about the other clusters, for
data.questions; the rows ask other questions, as far as the facts suffice.
train.py makes the same clusters of the folder, with that tokenizer and the same settings.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from spell_jax.data import tfds_sets
from spell_jax.data.clusters import GROUPINGS, LETTERS, Cluster, CountTokens, count_words
from spell_jax.data.config import DataConfig, open_clusters
from spell_jax.data.questions import Question
from spell_jax.policy import tokenizer
from spell_jax.question_sets.rows import Row, RowConfig, make_item, make_rows
from spell_jax.question_sets.tiny_world_rows import SYMBOLS
from spell_jax.question_sets.values import NUMBER, means_the_same, other_forms, read_number
from spell_jax.runtime import dataclass_flags, entry
from spell_jax.runtime.files import durable
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.runtime.log.progress import Ticker
from spell_jax.selfplay import prompts as prompt_sets

ROWS_FILE, QUESTIONS_FILE = "rows.jsonl", "questions.jsonl"
TRAINING_QUESTIONS_FILE = "training_questions.jsonl"
CUE_WORDS = 4
LONGEST_CUE = 60  # characters
LONGEST_NAME = 3  # words
LARGEST_DIFFERENCE_TERM = 10_000

WORD = re.compile(r"[^\s|]+")
NAME = re.compile(r"[^\W\d_]{2,}(?:-[^\W\d_]+)*")
FORBIDDEN_IN_CUE = re.compile(r"[\"'\\{}<>*`]")

CLOSING = ".,;:!?"
# Facts of a cluster that its questions choose from. The bound keeps the time linear in the number
# of questions, whatever the size of a cluster.
MOST_CANDIDATES = 200
MOST_DOCUMENTS = 200  # of a question
PER_CLUSTER = 4  # questions of a cluster, at least: the history of a questioner row has up to two
MOST_WRONG = 3  # wrong answers of a question, one for each wrong option
LONGEST_WORD = 16  # characters; before there is a tokenizer, a longer word counts as several
ROWS_PER_QUESTION = 10  # more are logged as a warning: they repeat the same few questions

# Flags that are fields of DataConfig.
_DATA_FLAGS = ("source", "grouping", "documents_per_cluster", "max_document_tokens", "held_out")
_DATA_FLAGS += tuple(tfds_sets.FLAGS)

log = logging.getLogger("spell_jax.question_sets.facts")  # __name__ may be "__main__"


@dataclasses.dataclass(frozen=True)
class FactRowConfig(RowConfig):
    """Composition of the rows; the fields of RowConfig have other defaults.

    Attributes:
      difference_share: share of questions about numbers that ask for the difference of two.
    """

    rows: int = 12_000
    roles: tuple[float, ...] = (0.25, 0.25, 0.15, 0.35)
    documents_read: int = 3
    thoughts: bool = True
    difference_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.difference_share <= 1:
            raise ValueError(f"difference_share = {self.difference_share}: must be from 0 to 1")


@dataclasses.dataclass(frozen=True)
class Fact:
    """A value in a document and the words that precede it."""

    document: int  # index in the cluster
    kind: str  # "number" or "name"
    cue: str  # the CUE_WORDS words before the value, with single spaces; unique in the cluster
    value: str  # without surrounding punctuation

    @property
    def integer(self) -> int:
        """The value if it has digits only, else 0."""
        return int(self.value) if self.value.isdecimal() else 0


def find_facts(documents: Sequence[str]) -> list[Fact]:
    """Find all facts of a cluster, in text order; linear in the text's length."""
    words = [list(WORD.finditer(document)) for document in documents]
    cues = [_cues([word[0] for word in matches]) for matches in words]
    counts = Counter(cue for document_cues in cues for cue in document_cues)
    facts = []
    for index, (document, matches) in enumerate(zip(documents, words, strict=True)):
        texts = [word[0] for word in matches]
        for position, cue_words in enumerate(cues[index][:-1], CUE_WORDS):
            cue, value = " ".join(cue_words), _value(texts, position)
            if value is None or counts[cue_words] > 1 or not _is_cue(cue):
                continue
            last = position + value[1].count(" ")
            if "\n" not in document[matches[position - CUE_WORDS].start() : matches[last].end()]:
                facts.append(Fact(index, value[0], cue, value[1]))
    return facts


def _cues(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all runs of CUE_WORDS words; run i ends just before word i + CUE_WORDS."""
    return [tuple(words[i : i + CUE_WORDS]) for i in range(len(words) - CUE_WORDS + 1)]


def _is_cue(cue: str) -> bool:
    usable = len(cue) <= LONGEST_CUE and not FORBIDDEN_IN_CUE.search(cue)
    return usable and any(map(str.isalpha, cue))


def _value(words: Sequence[str], position: int) -> tuple[str, str] | None:
    """Return (kind, value) of the non-zero number or the name that starts at this word, if any."""
    bare = words[position].rstrip(CLOSING)
    if NUMBER.fullmatch(bare):
        return ("number", bare) if read_number(bare) else None
    # A capitalized word is a name only after a lower-case letter: any word may start a sentence.
    if not words[position - 1][-1].islower():
        return None
    parts: list[str] = []
    for word in words[position : position + LONGEST_NAME]:
        bare = word.rstrip(CLOSING)
        if not (NAME.fullmatch(bare) and bare[0].isupper()):
            break
        parts.append(bare)
        if bare != word:
            break
    return ("name", " ".join(parts)) if parts else None


def make_questions(
    clusters: Sequence[Cluster],
    tasks: Sequence[str],
    count: int,
    seed: int,
    difference_share: float = 0.0,
    ticker: Ticker | None = None,
) -> list[Question]:
    """Make questions with known answers, until `count` of them suit each of the tasks.

    They are fewer if the facts do not allow more. Clusters come in random order. Questions about
    the same cluster stay together, PER_CLUSTER of them or more if it has the facts.
    """
    ticker = ticker or Ticker()
    # Large clusters in parts: each row searches the documents of its question.
    parts = [
        cluster.documents[start : start + MOST_DOCUMENTS]
        for cluster in clusters
        for start in range(0, len(cluster.documents), MOST_DOCUMENTS)
    ]
    per_part = max(PER_CLUSTER, -(-count * len(tasks) // max(1, len(parts))))
    missing, questions = dict.fromkeys(tasks, count), []
    order = np.random.default_rng(seed).permutation(len(parts)).tolist()
    # A few questions about each cluster, and only then the rest: rows show all of the corpus.
    for first, last in ((0, per_part), (per_part, None)):
        for number, index in enumerate(order, 1):
            rng = np.random.default_rng([seed, index])
            all_questions = _questions(parts[index], difference_share, rng)
            for question in itertools.islice(all_questions, first, last):
                suited = [t for t in tasks if missing[t] and make_item(question, t, LETTERS[0])]
                questions += [question] if suited else []
                missing.update({task: missing[task] - 1 for task in suited})
            ticker.tick("{:,} questions about {:,} clusters", len(questions), number)
            if not any(missing.values()):
                return questions
    return questions


def _questions(
    documents: tuple[str, ...], difference_share: float, rng: np.random.Generator
) -> Iterator[Question]:
    """Yield questions about the facts of a cluster, in random order."""
    facts = find_facts(documents)
    if len(facts) > MOST_CANDIDATES:
        indices = rng.choice(len(facts), MOST_CANDIDATES, replace=False)
        facts = [facts[index] for index in sorted(indices.tolist())]
    order = [facts[index] for index in rng.permutation(len(facts))]
    numbers = [fact for fact in order if fact.kind == "number"]
    # In turn a number and any fact, because a third of the tasks asks for numbers alone.
    turns = itertools.chain.from_iterable(itertools.zip_longest(numbers, order))
    for fact in dict.fromkeys(fact for fact in turns if fact):
        values = [candidate.value for candidate in facts if candidate.kind == fact.kind]
        pair = None
        if fact.kind == "number" and rng.random() < difference_share:
            pair = _sample_pair(facts, rng)
        if pair:
            first, second = pair
            text = f"number after: {first.cue} minus number after: {second.cue}"
            answer = str(first.integer - second.integer)
            yield _question("financial_math", documents, pair, text, answer, values, rng)
        else:
            text = f"which {fact.kind} follows: {fact.cue}"
            yield _question("general_qa", documents, [fact], text, fact.value, values, rng)


def _question(
    task: str,
    documents: tuple[str, ...],
    facts: Sequence[Fact],
    text: str,
    answer: str,
    values: Sequence[str],
    rng: np.random.Generator,
) -> Question:
    return Question(
        task,
        documents,
        text,
        answer,
        evidence=tuple(f"{fact.cue} {fact.value}" for fact in facts),
        answers=(answer, *other_forms(answer)),
        wrong=tuple(_sample_wrong(list(dict.fromkeys(values)), answer, rng)),
        shown=tuple(sorted({fact.document for fact in facts})),
    )


def _sample_wrong(values: Sequence[str], answer: str, rng: np.random.Generator) -> list[str]:
    """Sample at most MOST_WRONG values that differ in meaning, from the answer and each other."""
    wrong: list[str] = []
    for index in map(int, rng.permutation(len(values))):
        if not any(means_the_same(values[index], text) for text in (answer, *wrong)):
            wrong.append(values[index])
        if len(wrong) == MOST_WRONG:
            break
    return wrong


def _sample_pair(facts: Sequence[Fact], rng: np.random.Generator) -> list[Fact] | None:
    """Return two facts with small whole numbers, the larger first; None if impossible."""
    small = [fact for fact in facts if 0 < fact.integer < LARGEST_DIFFERENCE_TERM]
    if len(small) < 2:
        return None
    first, second = (small[i] for i in rng.choice(len(small), 2, replace=False))
    if first.integer == second.integer:
        return None
    return [first, second] if first.integer > second.integer else [second, first]


def make_fact_rows(
    clusters: Sequence[Cluster],
    config: FactRowConfig,
    prompts: prompt_sets.Prompts,
    ticker: Ticker | None = None,
) -> tuple[list[Row], Counter[str]]:
    """Make rows about the clusters' facts; the counts have "questions", and reasons without a row.

    ValueError if the clusters have no facts for one of the tasks.
    """
    ticker = ticker or Ticker()
    ticker.enter("finding facts")
    # Rows of a role and a task have questions of their own, where there are enough facts.
    count = -(-config.rows // len(config.tasks))
    questions = make_questions(
        clusters, config.tasks, count, config.seed, config.difference_share, ticker
    )
    ticker.enter("making rows")
    try:
        rows, counts = make_rows(questions, config, prompts)
    except ValueError as error:
        raise ValueError(
            f"{error} in {len(clusters)} clusters; leave the task out or make the clusters larger"
        ) from error
    return rows, counts + Counter(questions=len(questions))


def asked_questions(
    clusters: Sequence[Cluster], config: FactRowConfig, count: int, seed: int
) -> list[Question]:
    """Make at most `count` questions of the tasks in turn, as a responder reads them."""
    per_task = -(-count // len(config.tasks))
    questions = make_questions(clusters, config.tasks, per_task, seed)

    def of_task(task: str) -> Iterator[Question]:
        for number, question in enumerate(questions):
            item = make_item(question, task, LETTERS[number % len(LETTERS)])
            if item is not None:
                yield Question(task, question.documents, item.question, item.answer)

    turns = itertools.zip_longest(*map(of_task, config.tasks))
    present = filter(None, itertools.chain.from_iterable(turns))
    return list(itertools.islice(present, count))


def write_files(flag_values: Any) -> list[str]:
    """Read a folder of texts; write rows, tokenizer and questions; return a line on each file."""
    out, prompts = Path(flag_values.out), prompt_sets.load(flag_values.prompts)
    durable.make_folder(out)
    data = DataConfig(**{name: getattr(flag_values, name) for name in _DATA_FLAGS})
    config = dataclass_flags.read(FactRowConfig, flag_values)
    ticker = Ticker()

    def read_clusters(count_tokens: CountTokens) -> list[list[Cluster]]:
        """Read training and held-out clusters."""
        measured = [0, 0]

        def count(text: str) -> int:
            measured[:] = measured[0] + 1, measured[1] + len(text)
            ticker.tick("{:,} texts of {:,} characters measured", *measured)
            return count_tokens(text)

        ticker.enter(f"reading {data.source}")
        sources = open_clusters(data, config.seed, count)
        return [source.read(list(source.tasks)) for source in sources]

    if flag_values.tokenizer:
        words = tokenizer.load(flag_values.tokenizer)
    else:
        # No tokenizer yet: rough sizes are close enough for the texts that it is trained on.
        rows, _ = make_fact_rows(read_clusters(_count_roughly)[0], config, prompts, ticker)
        ticker.enter(f"training a tokenizer on {len(rows):,} rows")
        texts = (row.prompt + row.completion for row in rows)
        words = tokenizer.train(texts, flag_values.vocab_size, SYMBOLS)
    words.save(out)
    training, held_out = read_clusters(words.count)
    rows, counts = make_fact_rows(training, config, prompts, ticker)
    write_records(out / ROWS_FILE, map(dataclasses.asdict, rows))
    _warn_of_repetition(len(rows), counts["questions"])
    written = [
        f"{out}: a tokenizer of {words.vocab_size:,} tokens",
        f"{out / ROWS_FILE}: {len(rows):,} rows; {dict(counts)}",
    ]
    for clusters, name, count, seed in (
        (held_out, QUESTIONS_FILE, flag_values.questions, config.seed),
        # The rows' seed would make the questions of the rows again.
        (training, TRAINING_QUESTIONS_FILE, flag_values.training_questions, config.seed + 1),
    ):
        if clusters and count:
            ticker.enter(f"making questions about {len(clusters):,} clusters")
            questions = asked_questions(clusters, config, count, seed)
            write_records(out / name, map(dataclasses.asdict, questions))
            written.append(f"{out / name}: {len(questions):,} questions")
    return written


def _count_roughly(text: str) -> int:
    """Count words, a long word as several: a text without spaces may be of any length."""
    return max(count_words(text), -(-len(text) // LONGEST_WORD))


def _warn_of_repetition(rows: int, questions: int) -> None:
    if rows > ROWS_PER_QUESTION * questions:
        log.warning(
            "rows = %d: more than %d for each of the %d questions about facts, so the rows repeat "
            "themselves; take fewer rows or more documents",
            *(rows, ROWS_PER_QUESTION, questions),
        )


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the flags of the command."""
    values: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_string("source", None, "Texts, as data.source takes them.", **values)
    flags.mark_flag_as_required("source", **values)
    tfds_sets.define_flags(flag_values)
    flags.DEFINE_string("out", None, "Folder to write.", **values)
    flags.mark_flag_as_required("out", **values)
    flags.DEFINE_enum("grouping", "order", GROUPINGS, "Grouping of a folder's documents.", **values)
    flags.DEFINE_integer("documents_per_cluster", 4, "Size of a folder's clusters.", **values)
    flags.DEFINE_integer("max_document_tokens", 64, "Longer documents are cut.", **values)
    flags.DEFINE_float("held_out", 0.05, "Share of clusters for --questions.", **values)
    flags.DEFINE_integer("questions", 200, "Most questions about held-out clusters.", **values)
    flags.DEFINE_integer("training_questions", 0, "Most about the other clusters.", **values)
    flags.DEFINE_string("prompts", "compact", "full, compact or a folder of templates.", **values)
    flags.DEFINE_string("tokenizer", "", "Folder of a tokenizer; empty: train one.", **values)
    flags.DEFINE_integer("vocab_size", 2048, "Pieces of the tokenizer to train.", **values)
    dataclass_flags.define(FactRowConfig, flag_values)


def main(_) -> None:
    logging.getLogger("spell_jax").setLevel(logging.INFO)
    print("\n".join(write_files(flags.FLAGS)))


if __name__ == "__main__":
    define_flags()
    entry.run_main(main)
