"""Warm-start rows from a folder of real texts, made by rules without labels.

1. A fact is a number or a name together with its cue, the few words just before it in the same
   line. A fact counts only if its cue occurs once in the whole cluster.
2. Questions ask for facts: which number or name follows a cue (for multiple choice, other values of
   the cluster are the wrong options), or the difference of two numbers. Every question has passed
   the parser that self-play uses.
3. A questioner row quotes the fact and writes the question. A responder row quotes it and answers
   from the documents. A verifier row compares the reference with the same value, in the same or
   another form, or with another value.
4. A reciter row is not part of self-play. Its completion repeats the documents in another order.

    python -m spell_jax.question_sets.facts --source=FOLDER --out=DIR

writes DIR/rows.jsonl, one {"prompt", "completion", "role", "task"} per line; DIR/tokenizer.model,
trained on such rows; and DIR/questions.jsonl, questions with answers about held-out clusters.
train.py makes the same clusters of the folder, with that tokenizer and the same settings.
"""

import argparse
import dataclasses
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from spell_jax.data import tfds_sets
from spell_jax.data.clusters import LETTERS, PAPER_TASKS, Cluster, CountTokens, count_words
from spell_jax.data.config import DataConfig, open_clusters
from spell_jax.data.stream import batch_counts
from spell_jax.policy import tokenizer
from spell_jax.question_sets.rows import Row
from spell_jax.question_sets.tiny_world_rows import SYMBOLS
from spell_jax.runtime import entry
from spell_jax.runtime.config import check_least
from spell_jax.runtime.jsonl import write_records
from spell_jax.runtime.progress import Ticker
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.numbers import Number, parse_number, same_number
from spell_jax.selfplay.parsing import parse_question
from spell_jax.selfplay.prompts import Prompts

# Reciter rows teach a randomly initialized policy to find and copy text, faster than answers of a
# few tokens do.
ROLES = ("questioner", "responder", "verifier", "reciter")
ROWS_FILE, QUESTIONS_FILE = "rows.jsonl", "questions.jsonl"
VERDICT_SHARES = {"same": 0.25, "other form": 0.25, "different": 0.5}
CUE_WORDS = 4
LONGEST_CUE = 60  # characters
LONGEST_NAME = 3  # words
LARGEST_DIFFERENCE_TERM = 10_000
RECITE = "recite"  # last line of a reciter's prompt

WORD = re.compile(r"[^\s|]+")
NUMBER = re.compile(r"\$?(?:0(?=\.)|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)(?:\.\d+)?%?")
NAME = re.compile(r"[^\W\d_]{2,}(?:-[^\W\d_]+)*")
FORBIDDEN_IN_CUE = re.compile(r"[\"'\\{}<>*`]")

CLOSING = ".,;:!?"
TRIES = 4  # failures in a row after which a cluster is not tried again for a task
# Facts or documents of a cluster that one row chooses from. The bound keeps the time linear in the
# number of rows, whatever the size of a cluster.
MOST_CANDIDATES = 200
LONGEST_WORD = 16  # characters; before there is a tokenizer, a longer word counts as several
ROWS_PER_FACT = 10  # more are logged as a warning: they repeat the same few questions

# Flags that are fields of DataConfig and of RowConfig.
_DATA_FLAGS = ("source", "grouping", "documents_per_cluster", "max_document_tokens", "held_out")
_DATA_FLAGS += tuple(tfds_sets.FLAGS)
_ROW_FLAGS = ("tasks", "documents_shown", "documents_read", "history_share", "difference_share")

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class FactQuestion:
    """A question made from facts of one cluster."""

    completion: str  # of the questioner
    quote: str  # the evidence, as both roles quote it before they answer; of a choice, with letter
    documents: frozenset[int]  # indices of the documents that contain the evidence
    question: str  # as the responder sees it
    reference: str  # the answer as the parser returns it
    answer: str  # as the responder writes it
    wrong_answers: tuple[str, ...]  # values of the same kind in the cluster that differ in meaning


@dataclass(frozen=True)
class RowConfig:
    """Composition of the rows.

    Attributes:
      tasks: tasks, in equal shares.
      roles: role -> share, for each of ROLES; need not sum to 1.
      documents_shown: m, number of documents that a questioner without history sees, at least 1.
      documents_read: possible numbers of documents of a responder or reciter row, each at least 1;
        fewer than a cluster has leave self-play room to improve.
      history_share: share of questioner rows with one to three earlier questions.
      difference_share: share of the financial_math questions that ask for the difference of two
        numbers, where there are two.
    """

    tasks: tuple[str, ...] = PAPER_TASKS
    roles: Mapping[str, float] = field(
        default_factory=lambda: dict(zip(ROLES, (0.25, 0.25, 0.15, 0.35), strict=True))
    )
    documents_shown: int = 3
    documents_read: tuple[int, ...] = (1, 2, 3)
    history_share: float = 0.25
    difference_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.tasks or any(task not in PAPER_TASKS for task in self.tasks):
            raise ValueError(f"tasks = {self.tasks}: must be one or more of {PAPER_TASKS}")
        shares = self.roles.values()
        if {*self.roles} != {*ROLES} or min(shares) < 0 or not any(shares):
            raise ValueError(f"roles = {dict(self.roles)}: must give each of {ROLES} a share")
        check_least(self, "", documents_shown=1)
        if not self.documents_read or min(self.documents_read) < 1:
            raise ValueError(f"documents_read = {self.documents_read}: each must be at least 1")
        for name in ("history_share", "difference_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be from 0 to 1")


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


def _facts_by_task(documents: Sequence[str], tasks: Iterable[str]) -> dict[str, list[Fact]]:
    """Find a cluster's facts that each task may ask for: only numbers for financial_math."""
    facts = find_facts(documents)
    numbers = [fact for fact in facts if fact.kind == "number"]
    return {task: numbers if task == "financial_math" else facts for task in tasks}


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
        return ("number", bare) if _number(bare) else None
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


def _number(text: str) -> Number | None:
    return parse_number(text) if NUMBER.fullmatch(text) else None


def means_the_same(left: str, right: str) -> bool:
    """Return whether two values are too close to count as different in demonstrations.

    Numbers are the same within the rule's tolerance (spec 5.3), texts if one contains the other.
    """
    first, second = _number(left), _number(right)
    if first is not None and second is not None:
        return same_number(first, second) or same_number(second, first)
    left, right = left.casefold(), right.casefold()
    return left in right or right in left


def other_forms(value: str) -> list[str]:
    """Return other ways to write a letter, a number or a name with the same meaning."""
    if value in LETTERS:
        return [f"({value})", f"{value}."]
    if _number(value) is None:
        forms = [value.upper(), value.lower(), f"{value}."]
    else:
        unit = "%" if value.endswith("%") else ""
        plain = value.strip("$%").replace(",", "")
        integer, point, fraction = plain.partition(".")
        grouped = f"{int(integer):,}{point}{fraction}"
        padded = f"{plain}0" if point else f"{plain}.0"
        forms = [f"{form}{unit}" for form in (plain, grouped, padded, f"the number {plain}")]
    return [form for form in forms if form != value]


@dataclass
class FolderRowMaker:
    """Maker of rows from the facts of one cluster at a time.

    `counts` has "clusters", "facts", "rejected TASK: REASON" (questions that the parser rejected)
    and "skipped TASK" (tries in which a cluster's facts did not allow a question).
    """

    prompts: Prompts
    config: RowConfig
    rng: np.random.Generator
    count_tokens: CountTokens
    counts: Counter[str] = field(default_factory=Counter)

    def question(self, task: str, facts: Sequence[Fact], letter: str) -> FactQuestion | None:
        """Make a question about a cluster's facts for a task, with the correct option at `letter`.

        Returns None if the facts do not allow a question.
        """
        if not facts:
            return None
        facts = self._candidates(facts)
        fact = facts[int(self.rng.integers(len(facts)))]
        values = dict.fromkeys(
            candidate.value for candidate in facts if candidate.kind == fact.kind
        )
        used, text, answer = [fact], f"which {fact.kind} follows: {fact.cue}", fact.value
        is_difference = (
            task == "financial_math" and self.rng.random() < self.config.difference_share
        )
        if is_difference and (pair := self._sample_pair(facts)):
            used, answer = pair, str(pair[0].integer - pair[1].integer)
            text = f"number after: {pair[0].cue} minus number after: {pair[1].cue}"
        wrong_answers = [value for value in values if not means_the_same(value, answer)]
        quote = " ".join(f"{fact.cue} {fact.value}" for fact in used)
        # Values have a space in front, so that they have the same tokens as in the documents.
        record: dict[str, object] = {"question": text, "answer": f" {answer}"}
        if task == "multiple_choice":
            options = self._sample_options(answer, wrong_answers, letter)
            if options is None:
                return None
            record = {"question": text, "options": options, "answer": letter}
            answer, wrong_answers = f"({letter})", [label for label in LETTERS if label != letter]
            quote += answer  # the letter follows the value at the end of the quote
        written = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        completion = f"<think> {quote}</think>{written}"
        parsed = parse_question(completion, task, self.count_tokens)
        if parsed.status != "accepted":
            self.counts[f"rejected {task}: {parsed.reason}"] += 1
            return None
        documents = frozenset(fact.document for fact in used)
        texts = parsed.question, parsed.answer, answer
        return FactQuestion(completion, quote, documents, *texts, tuple(wrong_answers))

    def row(
        self, role: str, task: str, cluster: Cluster, facts: Sequence[Fact], letter: str
    ) -> Row | None:
        """Make a row of the role; return None if the cluster's facts do not allow a row."""
        if role == "reciter":
            shown = self._sample_documents(cluster, frozenset(), self._sample_count())
            recited = [shown[int(index)] for index in self.rng.permutation(len(shown))]
            return Row("\n".join([*shown, RECITE]), "\n".join(recited), role, task)
        item = self.question(task, facts, letter)
        if item is None:
            return None
        if role == "questioner":
            prompt = self._questioner_prompt(task, cluster, facts, letter, item)
            completion = item.completion
        elif role == "responder":
            shown = self._sample_documents(cluster, item.documents, self._sample_count())
            prompt = self.prompts.responder(task, shown, item.question)
            completion = f"<think> {item.quote}</think>answer is {item.answer}"
        else:
            answer, verdict = self._sample_comparison(item)
            prompt = self.prompts.verifier(item.question, answer, item.reference)
            completion = f"[[{verdict}]]"
        return Row(prompt, completion, role, task)

    def _questioner_prompt(
        self, task: str, cluster: Cluster, facts: Sequence[Fact], letter: str, item: FactQuestion
    ) -> str:
        items = [item]
        if self.rng.random() < self.config.history_share:
            for _ in range(self.rng.integers(1, 4)):
                past = self.question(task, facts, LETTERS[self.rng.integers(4)])
                if past and past.quote not in [question.quote for question in items]:
                    items.append(past)
        needed_documents = frozenset().union(*(question.documents for question in items))
        total = self.config.documents_shown + (len(needed_documents) if len(items) > 1 else 0)
        history = [Entry((), past.question, past.reference) for past in items[1:]]
        documents = self._sample_documents(cluster, needed_documents, total)
        return self.prompts.questioner(task, documents, history, letter)

    def _candidates(self, items: Sequence[T]) -> Sequence[T]:
        """Return all items, or a sample of MOST_CANDIDATES if there are more, in order."""
        if len(items) <= MOST_CANDIDATES:
            return items
        indices = self.rng.choice(len(items), MOST_CANDIDATES, replace=False)
        return [items[index] for index in sorted(indices.tolist())]

    def _sample_count(self) -> int:
        return int(self.rng.choice(self.config.documents_read))

    def _sample_documents(
        self, cluster: Cluster, needed_documents: frozenset[int], total: int
    ) -> list[str]:
        """Return the needed documents and sampled others, up to `total`, in corpus order."""
        candidates = self._candidates(range(len(cluster.documents)))
        other_documents = [index for index in candidates if index not in needed_documents]
        extra = self.rng.permutation(other_documents)[
            : max(0, total - len(needed_documents))
        ].tolist()
        return [cluster.documents[int(index)] for index in sorted([*needed_documents, *extra])]

    def _sample_options(
        self, value: str, wrong_values: Sequence[str], letter: str
    ) -> dict[str, str] | None:
        """Return four options that differ in meaning, `value` at `letter`; None if too few."""
        wrong: list[str] = []
        for index in map(int, self.rng.permutation(len(wrong_values))):
            if not any(means_the_same(wrong_values[index], option) for option in wrong):
                wrong.append(wrong_values[index])
            if len(wrong) == 3:
                wrong.insert(LETTERS.index(letter), value)
                return {name: f" {text}" for name, text in zip(LETTERS, wrong, strict=True)}
        return None

    def _sample_pair(self, facts: Sequence[Fact]) -> list[Fact] | None:
        """Return two facts with small whole numbers, the larger first; None if impossible."""
        small = [fact for fact in facts if 0 < fact.integer < LARGEST_DIFFERENCE_TERM]
        if len(small) < 2:
            return None
        first, second = (small[i] for i in self.rng.choice(len(small), 2, replace=False))
        if first.integer == second.integer:
            return None
        return [first, second] if first.integer > second.integer else [second, first]

    def _sample_comparison(self, item: FactQuestion) -> tuple[str, str]:
        """Sample (answer to compare with the reference, verdict)."""
        answer = item.reference.strip()
        kind = self.rng.choice(list(VERDICT_SHARES), p=list(VERDICT_SHARES.values()))
        if kind == "same":
            return answer, "YES"
        if kind == "different" and item.wrong_answers:
            return item.wrong_answers[self.rng.integers(len(item.wrong_answers))], "NO"
        forms = other_forms(answer)
        return forms[self.rng.integers(len(forms))], "YES"


class _Turns:
    """Clusters by index in shuffled rounds; one that fails TRIES times in a row is dropped."""

    def __init__(self, indices: Iterable[int], rng: np.random.Generator) -> None:
        self._tries, self._rng = dict.fromkeys(indices, TRIES), rng
        self._order: list[int] = []

    def make_row(self, attempt: Callable[[int], T | None]) -> T | None:
        """Call `attempt` on the next clusters; return the first result that is not None, if any."""
        while self._tries:
            self._order = self._order or self._rng.permutation([*self._tries]).tolist()
            index = self._order.pop()
            if index not in self._tries:
                continue
            if (row := attempt(index)) is not None:
                self._tries[index] = TRIES
                return row
            self._tries[index] -= 1
            if not self._tries[index]:
                del self._tries[index]
        return None


def make_rows(
    clusters: Sequence[Cluster],
    prompts: Prompts,
    rows: int,
    seed: int,
    config: RowConfig | None = None,
    count_tokens: CountTokens = count_words,
    ticker: Ticker | None = None,
) -> tuple[list[Row], Counter[str]]:
    """Make `rows` rows in shuffled order; return them with the counts of FolderRowMaker.

    Raises ValueError if rows is below 1, or no cluster has enough facts for one of the tasks.
    """
    if rows < 1:
        raise ValueError(f"rows = {rows}: must be at least 1")
    config, ticker = config or RowConfig(), ticker or Ticker()
    rng = np.random.default_rng(seed)
    maker = FolderRowMaker(prompts, config, rng, count_tokens)
    ticker.enter("finding facts")
    facts: list[dict[str, list[Fact]]] = []
    for cluster in clusters:
        facts.append(_facts_by_task(cluster.documents, PAPER_TASKS))
        ticker.tick("{:,} of {:,} clusters", len(facts), len(clusters))
    num_facts = sum(len(cluster_facts["general_qa"]) for cluster_facts in facts)
    maker.counts.update(clusters=len(clusters), facts=num_facts)
    indices = range(len(clusters))
    all_turns = _Turns(indices, rng)
    turns = {task: _Turns((i for i in indices if facts[i][task]), rng) for task in config.tasks}

    def make_row(role: str, task: str, letter: str) -> Row:
        def attempt(index: int) -> Row | None:
            row = maker.row(role, task, clusters[index], facts[index][task], letter)
            if row is None:
                maker.counts[f"skipped {task}"] += 1
            return row

        if row := (all_turns if role == "reciter" else turns[task]).make_row(attempt):
            return row
        raise ValueError(
            f"tasks: found no facts for {task} in {len(clusters)} clusters; leave it out or make "
            "the clusters larger"
        )

    ticker.enter("making rows")
    equal = dict.fromkeys(config.tasks, 1.0)
    made_rows: list[Row] = []
    for role, role_rows in batch_counts(rows, config.roles, dict.fromkeys(ROLES, rows)).items():
        shares = batch_counts(role_rows, equal, dict.fromkeys(equal, role_rows))
        for task, count in shares.items():
            for number in range(count):
                made_rows.append(make_row(role, task, LETTERS[number % len(LETTERS)]))
                ticker.tick("{:,} of {:,} rows from {:,} facts", len(made_rows), rows, num_facts)
    return [made_rows[i] for i in rng.permutation(len(made_rows))], maker.counts


def make_questions(
    clusters: Sequence[Cluster], prompts: Prompts, count: int, seed: int, tasks: Sequence[str]
) -> list[dict[str, object]]:
    """Make at most `count` records {"task", "documents", "question", "answer"} with known answers.

    Tasks alternate. Clusters come in shuffled order; clusters without suitable facts are skipped.
    """
    rng = np.random.default_rng(seed)
    maker = FolderRowMaker(prompts, RowConfig(tuple(tasks)), rng, count_words)
    order = rng.permutation(len(clusters)).tolist()
    facts: dict[int, dict[str, list[Fact]]] = {}  # by cluster, found once
    records: list[dict[str, object]] = []
    for number in range(TRIES * count):
        index, task = order[number % len(order)], tasks[number % len(tasks)]
        cluster = clusters[index]
        if index not in facts:
            facts[index] = _facts_by_task(cluster.documents, tasks)
        item = maker.question(task, facts[index][task], LETTERS[number % len(LETTERS)])
        if item is not None:
            texts = {"question": item.question, "answer": item.reference.strip()}
            records.append({"task": task, "documents": list(cluster.documents), **texts})
        if len(records) == count:
            break
    return records


def main(arguments: Sequence[str] | None = None) -> None:
    """Read a folder of texts; write rows, tokenizer and questions (command-line entry)."""
    flags = _flags().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out, prompts = Path(flags.out), prompt_sets.load(flags.prompts)
    out.mkdir(parents=True, exist_ok=True)
    data = DataConfig(**{name: getattr(flags, name) for name in _DATA_FLAGS})
    config = RowConfig(**{name: getattr(flags, name) for name in _ROW_FLAGS})

    ticker = Ticker()

    def read_clusters(count_tokens: CountTokens) -> list[list[Cluster]]:
        """Read training and held-out clusters."""
        measured = [0, 0]

        def count(text: str) -> int:
            measured[:] = measured[0] + 1, measured[1] + len(text)
            ticker.tick("{:,} texts of {:,} characters measured", *measured)
            return count_tokens(text)

        ticker.enter(f"reading {data.source}")
        sources = open_clusters(data, flags.seed, count)
        return [source.read(list(source.tasks)) for source in sources]

    def make_training_rows(clusters: Sequence[Cluster], count_tokens: CountTokens):
        return make_rows(clusters, prompts, flags.rows, flags.seed, config, count_tokens, ticker)

    if flags.tokenizer:
        words = tokenizer.load(flags.tokenizer)
    else:
        # No tokenizer yet: rough sizes are close enough for the texts that it is trained on.
        rows, _ = make_training_rows(read_clusters(_count_roughly)[0], _count_roughly)
        ticker.enter(f"training a tokenizer on {len(rows):,} rows")
        texts = (row.prompt + row.completion for row in rows)
        words = tokenizer.train(texts, flags.vocab_size, SYMBOLS)
    words.save(out)
    training, held_out = read_clusters(words.count)
    rows, counts = make_training_rows(training, words.count)
    write_records(out / ROWS_FILE, map(dataclasses.asdict, rows))
    _log_summary(out / ROWS_FILE, len(rows), counts)
    if held_out:
        ticker.enter(f"making questions about {len(held_out):,} clusters")
        questions = make_questions(held_out, prompts, flags.questions, flags.seed, flags.tasks)
        write_records(out / QUESTIONS_FILE, questions)
        log.info("%s: %d questions", out / QUESTIONS_FILE, len(questions))


def _count_roughly(text: str) -> int:
    """Count words, a long word as several: a text without spaces may be of any length."""
    return max(count_words(text), -(-len(text) // LONGEST_WORD))


def _log_summary(path: Path, rows: int, counts: Mapping[str, int]) -> None:
    facts, other_counts = counts["facts"], {k: n for k, n in counts.items() if k != "facts"}
    log.info("%s: %d rows from %d facts; %s", path, rows, facts, other_counts)
    if rows > ROWS_PER_FACT * facts:
        log.warning(
            "rows = %d: more than %g for each of the %d facts, so the rows repeat themselves; take "
            "fewer rows or more documents",
            *(rows, ROWS_PER_FACT, facts),
        )


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Warm-start rows from the texts of a folder.")
    add = parser.add_argument
    add("--source", required=True, help="folder of texts, JSONL of clusters, tfds:NAME, or build")
    for name, meaning in tfds_sets.FLAGS.items():
        add(f"--{name}", default="", help=meaning)
    add("--out", required=True, help="folder to write")
    add("--rows", type=int, default=12_000)
    add("--questions", type=int, default=200, help="maximum number about held-out clusters")
    add("--seed", type=int, default=0)
    add("--tasks", type=_split, default=PAPER_TASKS, help="comma-separated")
    add("--prompts", default="compact", help="full, compact, or a folder of templates")
    add("--tokenizer", default="", help="folder with tokenizer.model; empty: train one")
    add("--vocab_size", type=int, default=2048, help="pieces of the tokenizer to train")
    add("--max_document_tokens", type=int, default=64)
    add("--documents_per_cluster", type=int, default=4)
    add("--documents_shown", type=int, default=2, help="documents that the questioner sees")
    add(
        "--documents_read",
        type=lambda text: tuple(map(int, _split(text))),
        default=(1, 2, 3),
        help="possible numbers of documents that the responder reads, comma-separated",
    )
    add("--grouping", default="order", help="order or similarity")
    add("--history_share", type=float, default=0.25)
    add("--difference_share", type=float, default=0.0)
    add("--held_out", type=float, default=0.05, help="share of clusters for --questions")
    return parser


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    with entry.user_errors():
        main()
