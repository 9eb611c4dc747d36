"""Warm-start rows from a folder of real texts, made by rules without labels.

1. A fact is a number or a name together with its cue, the few words just before it in the same
   line. A fact counts only if its cue occurs once in the whole cluster.
2. Questions ask for facts: which number or name follows a cue (general QA; for multiple choice,
   other values of the cluster are the wrong options), or the difference of two numbers.
3. A questioner row quotes the fact and writes the question. A responder row quotes it and answers
   from the documents. A verifier row compares the reference with itself, with another form of it,
   or with another value. Every question has passed the parser that self-play uses.
4. A reciter row is not part of self-play. Its completion repeats the documents of the prompt in
   another order. It teaches a randomly initialized policy to find and copy text, faster than the
   roles' short answers do.
5. Roles, tasks, letters and verdicts have given shares. All output is a function of the seed.
6. Values are written with a space in front, so that their tokens are those in the documents.

    python -m spell_jax.warm_start.folder_rows --source=FOLDER --out=DIR

writes DIR/rows.jsonl, one {"prompt", "completion", "role", "task"} per line for supervised
fine-tuning; DIR/tokenizer.model, trained on such rows; and DIR/questions.jsonl, questions with
answers about held-out clusters, for validation. Clusters are those that train.py makes of the same
folder with that tokenizer and the same settings.
"""

import argparse
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spell_jax.data.built import open_source
from spell_jax.data.clusters import (
    LETTERS,
    TASKS,
    Cluster,
    CountTokens,
    count_words,
    split_held_out,
)
from spell_jax.data.stream import batch_counts
from spell_jax.policy import tokenizer
from spell_jax.runtime import entry
from spell_jax.runtime.jsonl import write_records
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.numbers import Number, parse_number, same_number
from spell_jax.selfplay.parsing import parse_question
from spell_jax.selfplay.prompts import Prompts
from spell_jax.warm_start.demonstrations import SYMBOLS

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
TRIES = 4  # passes over the clusters before giving up on a task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fact:
    """A value in a document and the words that precede it.

    Attributes:
        document: index of the document in the cluster.
        kind: "number" or "name".
        cue: the CUE_WORDS words before the value, separated by single spaces; unique in the
            cluster.
        value: text of the value, without surrounding punctuation.
    """

    document: int
    kind: str
    cue: str
    value: str

    @property
    def quote(self) -> str:
        return f"{self.cue} {self.value}"


@dataclass(frozen=True)
class Question:
    """A question made from facts of one cluster.

    Attributes:
        completion: the questioner's completion.
        quote: the evidence, as both roles quote it before they answer; for a choice, with its
            letter.
        documents: indices of the documents that contain the evidence.
        question: the question as the responder sees it.
        answer: the reference as the parser returns it.
        written: the answer as the responder writes it.
        others: values of the same kind in the cluster that differ in meaning.
    """

    completion: str
    quote: str
    documents: frozenset[int]
    question: str
    answer: str
    written: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class RowConfig:
    """Composition of the rows.

    Attributes:
        tasks: tasks, in equal shares.
        roles: role -> share, for each of ROLES; need not sum to 1.
        documents_shown: m, number of documents that a questioner without history sees, at least 1.
        documents_read: possible numbers of documents of a responder or reciter row, each at least
            1; fewer than a cluster has leave self-play room to improve.
        history_share: share of questioner rows with one to three earlier questions.
        difference_share: share of the financial_math questions that ask for the difference of two
            numbers, where there are two.
    """

    tasks: tuple[str, ...] = TASKS
    roles: Mapping[str, float] = field(
        default_factory=lambda: dict(zip(ROLES, (0.25, 0.25, 0.15, 0.35), strict=True))
    )
    documents_shown: int = 3
    documents_read: tuple[int, ...] = (1, 2, 3)
    history_share: float = 0.25
    difference_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.tasks or any(task not in TASKS for task in self.tasks):
            raise ValueError(f"tasks={self.tasks}: must be one or more of {TASKS}")
        if (
            set(self.roles) != set(ROLES)
            or min(self.roles.values()) < 0
            or not any(self.roles.values())
        ):
            raise ValueError(f"roles={dict(self.roles)}: must give each of {ROLES} a share")
        if self.documents_shown < 1:
            raise ValueError(f"documents_shown={self.documents_shown}: must be at least 1")
        if not self.documents_read or min(self.documents_read) < 1:
            raise ValueError(f"documents_read={self.documents_read}: each must be at least 1")
        for name in ("history_share", "difference_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 0 to 1")


@dataclass
class RowsReport:
    """Counts of a run over clusters.

    Attributes:
        clusters: number of clusters.
        facts: number of facts found in them.
        refused: "task: reason" -> number of questions that the parser rejected.
        without: task -> number of attempts on a cluster whose facts did not allow a question.
    """

    clusters: int = 0
    facts: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    without: Counter[str] = field(default_factory=Counter)


# ------------------------------------------------------------------------------------------- facts


def find_facts(documents: Sequence[str]) -> list[Fact]:
    """Find all facts of a cluster, in text order; linear in the text's length."""
    words = [list(WORD.finditer(document)) for document in documents]
    cues = [_cues([word[0] for word in line]) for line in words]
    times = Counter(cue for document_cues in cues for cue in document_cues)
    facts = []
    for index, document in enumerate(documents):
        found = words[index]
        texts = [word[0] for word in found]
        for position, cue in enumerate(cues[index][:-1], CUE_WORDS):
            value = _value(texts, position)
            if value is None or times[cue] > 1 or not _is_cue(" ".join(cue)):
                continue
            last = position + value[1].count(" ")
            if "\n" not in document[found[position - CUE_WORDS].start() : found[last].end()]:
                facts.append(Fact(index, value[0], " ".join(cue), value[1]))
    return facts


def _cues(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all runs of CUE_WORDS words; run i ends just before word i + CUE_WORDS."""
    return [tuple(words[i : i + CUE_WORDS]) for i in range(len(words) - CUE_WORDS + 1)]


def _is_cue(cue: str) -> bool:
    return (
        len(cue) <= LONGEST_CUE
        and FORBIDDEN_IN_CUE.search(cue) is None
        and any(character.isalpha() for character in cue)
    )


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


def _integer(fact: Fact) -> int:
    """Return the fact's value if it has digits only, else 0."""
    return int(fact.value) if fact.value.isdecimal() else 0


def means_the_same(one: str, two: str) -> bool:
    """Return whether two values are too close to serve as different ones in demonstrations.

    Numbers are compared with the rule's tolerance (spec 5.3); texts if one contains the other.
    """
    first, second = _number(one), _number(two)
    if first is not None and second is not None:
        return same_number(first, second) or same_number(second, first)
    plain_one, plain_two = one.casefold(), two.casefold()
    return plain_one in plain_two or plain_two in plain_one


def other_forms(value: str) -> list[str]:
    """Return other ways to write a letter, a number or a name with the same meaning."""
    if value in LETTERS:
        return [f"({value})", f"{value}."]
    if _number(value) is None:
        return [form for form in (value.upper(), value.lower(), f"{value}.") if form != value]
    unit = "%" if value.endswith("%") else ""
    plain = value.strip("$%").replace(",", "")
    whole, point, fraction = plain.partition(".")
    grouped = f"{int(whole):,}{point}{fraction}"
    padded = f"{plain}0" if point else f"{plain}.0"
    forms = (plain, grouped, padded, f"the number {plain}")
    return [f"{form}{unit}" for form in forms if f"{form}{unit}" != value]


# -------------------------------------------------------------------------------------------- rows


class RowMaker:
    """Maker of rows from the facts of one cluster at a time.

    Attributes:
        report: counts of what was found and rejected so far.
    """

    def __init__(
        self,
        prompts: Prompts,
        settings: RowConfig,
        random: np.random.Generator,
        count_tokens: CountTokens = count_words,
    ):
        """Create a maker.

        Args:
            prompts: prompts of the rows.
            settings: composition of the rows.
            random: random generator of all choices.
            count_tokens: token counter of the question parser.
        """
        self.report = RowsReport()
        self._prompts = prompts
        self._settings = settings
        self._random = random
        self._count_tokens = count_tokens

    def question(self, task: str, facts: Sequence[Fact], letter: str) -> Question | None:
        """Make a question about one or two facts; None if these facts do not allow one.

        Args:
            task: one of TASKS.
            facts: facts of one cluster.
            letter: letter of the correct option, for multiple choice.
        """
        if task == "financial_math":
            facts = [fact for fact in facts if fact.kind == "number"]
        if not facts:
            return None
        fact = facts[int(self._random.integers(len(facts)))]
        values = dict.fromkeys(other.value for other in facts if other.kind == fact.kind)
        others = [value for value in values if not means_the_same(value, fact.value)]
        used, text, answer = [fact], f"which {fact.kind} follows: {fact.cue}", fact.value
        record: dict[str, object] = {"question": text, "answer": f" {answer}"}
        if task == "multiple_choice":
            options = self._options(fact.value, others, letter)
            if options is None:
                return None
            answer, others = f"({letter})", [other for other in LETTERS if other != letter]
            record = {"question": text, "options": options, "answer": letter}
        elif task == "financial_math" and self._random.random() < self._settings.difference_share:
            pair = self._pair(facts)
            if pair is not None:
                used, answer = pair, str(_integer(pair[0]) - _integer(pair[1]))
                text = f"number after: {pair[0].cue} minus number after: {pair[1].cue}"
                record = {"question": text, "answer": f" {answer}"}
                others = [value for value in values if not means_the_same(value, answer)]
        quote = " ".join(fact.quote for fact in used)
        if task == "multiple_choice":
            quote += answer  # the letter follows the value at the end of the quote
        written = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        completion = f"<think> {quote}</think>{written}"
        parsed = parse_question(completion, task, self._count_tokens)
        if parsed.status != "accepted":
            self.report.refused[f"{task}: {parsed.reason}"] += 1
            return None
        places = frozenset(fact.document for fact in used)
        return Question(
            completion, quote, places, parsed.question, parsed.answer, answer, tuple(others)
        )

    def row(
        self, role: str, task: str, cluster: Cluster, facts: Sequence[Fact], letter: str
    ) -> dict[str, str] | None:
        """Make a row of the role; None if the cluster's facts do not allow one."""
        if role == "reciter":
            return self._recital(task, cluster)
        item = self.question(task, facts, letter)
        if item is None:
            return None
        if role == "questioner":
            prompt = self._questioner_prompt(task, cluster, facts, letter, item)
            completion = item.completion
        elif role == "responder":
            shown = self._shown(cluster, item.documents, self._documents_read())
            prompt = self._prompts.responder(task, shown, item.question)
            completion = f"<think> {item.quote}</think>answer is {item.written}"
        else:
            answer, verdict = self._compared(item)
            prompt = self._prompts.verifier(item.question, answer, item.answer)
            completion = f"[[{verdict}]]"
        return {"prompt": prompt, "completion": completion, "role": role, "task": task}

    def _recital(self, task: str, cluster: Cluster) -> dict[str, str]:
        """Make a row whose prompt holds documents and whose completion permutes them."""
        shown = self._shown(cluster, frozenset(), self._documents_read())
        again = [shown[int(index)] for index in self._random.permutation(len(shown))]
        prompt = "\n".join([*shown, RECITE])
        return {
            "prompt": prompt,
            "completion": "\n".join(again),
            "role": "reciter",
            "task": task,
        }

    def _questioner_prompt(
        self, task: str, cluster: Cluster, facts: Sequence[Fact], letter: str, item: Question
    ) -> str:
        history: list[Question] = []
        if self._random.random() < self._settings.history_share:
            for _ in range(self._random.integers(1, 4)):
                past = self.question(task, facts, LETTERS[self._random.integers(4)])
                if past and past.quote not in [item.quote, *(known.quote for known in history)]:
                    history.append(past)
        seen = item.documents.union(*(past.documents for past in history))
        total = self._settings.documents_shown + (len(seen) if history else 0)
        return self._prompts.questioner(task, self._shown(cluster, seen, total), history, letter)

    def _documents_read(self) -> int:
        return int(self._random.choice(self._settings.documents_read))

    def _shown(self, cluster: Cluster, needed: frozenset[int], total: int) -> list[str]:
        """Return the needed documents and sampled others, up to `total`, in corpus order."""
        others = [index for index in range(len(cluster.documents)) if index not in needed]
        extra = self._random.permutation(others)[: max(0, total - len(needed))].tolist()
        return [cluster.documents[int(index)] for index in sorted([*needed, *extra])]

    def _options(self, value: str, others: Sequence[str], letter: str) -> dict[str, str] | None:
        """Return the value at its letter and three values that differ from it and each other."""
        chosen: list[str] = []
        for index in map(int, self._random.permutation(len(others))):
            if not any(means_the_same(others[index], other) for other in chosen):
                chosen.append(others[index])
            if len(chosen) == 3:
                rest = iter(chosen)
                return {name: f" {value if name == letter else next(rest)}" for name in LETTERS}
        return None

    def _pair(self, facts: Sequence[Fact]) -> list[Fact] | None:
        """Return two facts with small whole numbers, the larger first; None if impossible."""
        small = [fact for fact in facts if 0 < _integer(fact) < LARGEST_DIFFERENCE_TERM]
        if len(small) < 2:
            return None
        one, two = (small[i] for i in self._random.choice(len(small), 2, replace=False))
        pair = sorted([one, two], key=_integer, reverse=True)
        return pair if _integer(pair[0]) > _integer(pair[1]) else None

    def _compared(self, item: Question) -> tuple[str, str]:
        """Sample (answer to compare with the reference, verdict)."""
        answer = item.answer.strip()
        kind = self._random.choice(list(VERDICT_SHARES), p=list(VERDICT_SHARES.values()))
        if kind == "same":
            return answer, "YES"
        if kind == "different" and item.others:
            return item.others[self._random.integers(len(item.others))], "NO"
        forms = other_forms(answer)
        return forms[self._random.integers(len(forms))], "YES"


def make_rows(
    clusters: Sequence[Cluster],
    prompts: Prompts,
    rows: int,
    seed: int,
    settings: RowConfig | None = None,
    count_tokens: CountTokens = count_words,
) -> tuple[list[dict[str, str]], RowsReport]:
    """Make `rows` records {"prompt", "completion", "role", "task"}, in shuffled order.

    Raises:
        ValueError: if rows is below 1, or no cluster has enough facts for one of the tasks.
    """
    if rows < 1:
        raise ValueError(f"rows={rows}: must be at least 1")
    settings = settings or RowConfig()
    random = np.random.default_rng(seed)
    maker = RowMaker(prompts, settings, random, count_tokens)
    facts = [find_facts(cluster.documents) for cluster in clusters]
    maker.report.clusters, maker.report.facts = len(clusters), sum(map(len, facts))
    order: list[int] = []
    made = []
    for role, role_rows in batch_counts(rows, settings.roles, dict.fromkeys(ROLES, rows)).items():
        equal = dict.fromkeys(settings.tasks, 1.0)
        shares = batch_counts(role_rows, equal, dict.fromkeys(equal, role_rows))
        for task, count in shares.items():
            for number in range(count):
                letter = LETTERS[number % len(LETTERS)]
                row = None
                for _ in range(TRIES * len(clusters)):
                    order = order or random.permutation(len(clusters)).tolist()
                    index = order.pop()
                    row = maker.row(role, task, clusters[index], facts[index], letter)
                    if row is not None:
                        break
                    maker.report.without[task] += 1
                else:
                    raise ValueError(
                        f"tasks: {task} finds no facts in {len(clusters)} clusters; leave it out "
                        "or make the clusters larger"
                    )
                made.append(row)
    return [made[i] for i in random.permutation(len(made))], maker.report


def make_questions(
    clusters: Sequence[Cluster], prompts: Prompts, count: int, seed: int, tasks: Sequence[str]
) -> list[dict[str, object]]:
    """Make at most `count` records {"task", "documents", "question", "answer"} with known answers.

    Tasks alternate and clusters come in shuffled order. A cluster whose facts do not allow a
    question is skipped.
    """
    random = np.random.default_rng(seed)
    maker = RowMaker(prompts, RowConfig(tuple(tasks)), random)
    order = random.permutation(len(clusters)).tolist()
    made: list[dict[str, object]] = []
    for number in range(TRIES * count):
        cluster, task = clusters[order[number % len(order)]], tasks[number % len(tasks)]
        item = maker.question(task, find_facts(cluster.documents), LETTERS[number % len(LETTERS)])
        if item is not None:
            question = {"question": item.question, "answer": item.answer.strip()}
            made.append({"task": task, "documents": list(cluster.documents), **question})
        if len(made) == count:
            break
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Command-line entry: read a folder of texts, write rows, tokenizer and questions."""
    flags = _flags().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    if flags.tokenizer:
        words = tokenizer.load(flags.tokenizer)
    else:
        # No tokenizer yet: sizes in words are close enough for the texts that it is trained on.
        training, _ = _clusters(flags, count_words)
        rows, _ = _rows(flags, training, count_words)
        texts = (row["prompt"] + row["completion"] for row in rows)
        words = tokenizer.train(texts, flags.vocab_size, SYMBOLS)
    words.save(out)
    training, held_out = _clusters(flags, words.count)
    rows, report = _rows(flags, training, words.count)
    write_records(out / ROWS_FILE, rows)
    log.info(
        "%s: %d rows from %d facts in %d clusters; refused %s, clusters passed over %s",
        out / ROWS_FILE,
        len(rows),
        report.facts,
        report.clusters,
        dict(report.refused),
        dict(report.without),
    )
    if held_out:
        prompts, tasks = prompt_sets.load(flags.prompts), flags.tasks.split(",")
        questions = make_questions(held_out, prompts, flags.questions, flags.seed, tasks)
        write_records(out / QUESTIONS_FILE, questions)
        log.info("%s: %d from %d", out / QUESTIONS_FILE, len(questions), len(held_out))


def _clusters(
    flags: argparse.Namespace, count_tokens: CountTokens
) -> tuple[list[Cluster], list[Cluster]]:
    source = open_source(
        flags.source,
        count_tokens=count_tokens,
        max_document_tokens=flags.max_document_tokens,
        documents_per_cluster=flags.documents_per_cluster,
        grouping=flags.grouping,
    )
    training, held_out = split_held_out(list(source.tasks), flags.held_out)
    return source.read(training), source.read(held_out)


def _rows(
    flags: argparse.Namespace, clusters: Sequence[Cluster], count_tokens: CountTokens
) -> tuple[list[dict[str, str]], RowsReport]:
    settings = RowConfig(
        tuple(flags.tasks.split(",")),
        documents_shown=flags.documents_shown,
        documents_read=tuple(map(int, flags.documents_read.split(","))),
        history_share=flags.history_share,
        difference_share=flags.difference_share,
    )
    prompts = prompt_sets.load(flags.prompts)
    return make_rows(clusters, prompts, flags.rows, flags.seed, settings, count_tokens)


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Warm-start rows from the texts of a folder.")
    add = parser.add_argument
    add("--source", required=True, help="folder of texts, JSONL of clusters, or built folder")
    add("--out", required=True, help="folder to write")
    add("--rows", type=int, default=12_000)
    add("--questions", type=int, default=200, help="at most so many about held-out clusters")
    add("--seed", type=int, default=0)
    add("--tasks", default=",".join(TASKS), help="comma-separated")
    add("--prompts", default="compact", help="full, compact, or a folder of templates")
    add("--tokenizer", default="", help="folder with tokenizer.model; empty: one is trained")
    add("--vocab_size", type=int, default=2048, help="pieces of the tokenizer to train")
    add("--max_document_tokens", type=int, default=64)
    add("--documents_per_cluster", type=int, default=4)
    add("--documents_shown", type=int, default=2, help="by the questioner")
    add("--documents_read", default="1,2,3", help="by the responder: one of these numbers")
    add("--grouping", default="order", help="order or similarity")
    add("--history_share", type=float, default=0.25)
    add("--difference_share", type=float, default=0.0)
    add("--held_out", type=float, default=0.05, help="share of clusters for --questions")
    return parser


if __name__ == "__main__":
    with entry.user_errors():
        main()
