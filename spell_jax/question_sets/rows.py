"""Rows of supervised tuning for all three roles, from questions with known answers.

    python -m spell_jax.question_sets.rows --questions=A.jsonl,B.jsonl --out=rows.jsonl

1. Input is the layout of data/questions.py. A general_qa question also gives a financial_math row
   if its answer is a number, and a multiple_choice row if it has three wrong answers. Questions of
   question_sets/cloze.py give rows with --tasks=cloze. The questioner of such a row quotes
   one of the question's evidence sentences, because its documents lack the sentence with the gap.
2. A questioner row writes the question with its answer as JSON. Its prompt has the question's own
   document (a document with the answer, if any has it) and one more. In a share of rows it also has
   other questions about these documents.
3. A responder row answers from one document to all.
4. A verifier row compares the answer with itself, with another right answer, or with a wrong one.

5. A reciter row is not part of self-play. Its completion repeats documents in another order. That
   teaches a policy with random weights to find and copy text, faster than answers of a few tokens.

With --thoughts, questioners and responders quote the evidence in a thought first, as policies need
that are tuned from random weights. The rows teach formats and are few; one question may give a row
to each role.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from absl import flags

from spell_jax.data.clusters import CLOZE, LETTERS, PAPER_TASKS, TASKS, count_words
from spell_jax.data.questions import Question
from spell_jax.data.stream import batch_counts
from spell_jax.question_sets.values import NUMBER, means_the_same, other_forms
from spell_jax.runtime import dataclass_flags, entry
from spell_jax.runtime.config import check_least
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.selfplay import cloze, evidence
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.given_questions import read_scorable, scores_itself
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.numbers import number_text, parse_number
from spell_jax.selfplay.parsing import format_choices, parse_question
from spell_jax.selfplay.prompts import Prompts

log = logging.getLogger("spell_jax.question_sets.rows")  # __name__ may be "__main__"
# Questions before and after a question in a file that may be its history. Files mostly keep
# questions about the same documents together: a search of the whole file would find few more.
HISTORY_REACH = 3
MOST_WRONG = 8  # numbers of the documents that may be wrong answers
ROLES = (*prompt_sets.ROLES, "reciter")
RECITE = "recite"  # last line of a reciter's prompt


@dataclasses.dataclass(frozen=True)
class Row:
    """One demonstration: prompt ("": a plain text), completion, role and task."""

    prompt: str
    completion: str
    role: str
    task: str


def seeded_rows(
    make_row: Callable[[np.random.Generator], Row], seed: int, start: int = 0, *stream: int
) -> Iterator[Row]:
    """Yield rows start, start + 1, ...; row i depends on (seed, i, *stream) alone."""
    for index in itertools.count(start):
        # A generator for each row: a resumed run starts at any row without making the earlier ones.
        yield make_row(np.random.default_rng([seed, index, *stream]))


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """Composition of the rows.

    Attributes:
      rows: number of rows.
      roles: shares of questioner, responder, verifier and, if there are four, reciter; they need
        not sum to 1.
      tasks: tasks, in equal shares.
      documents_read: most documents of a responder or reciter row; the number is uniform from 1.
      documents_shown: most documents of a questioner row without history.
      history_share: share of questioner rows with one or two earlier questions.
      computed: financial_math answers need not be stated in the documents.
      answer_first: whether questioner rows state the answer (algorithm.questioner.answer_first).
      numbered: documents of a responder row have numbers, and its answer begins with the number of
        the question's own document, as algorithm.responder.document_share rewards.
      thoughts: whether questioners and responders first quote the evidence in a thought. Answers
        in JSON then begin with a space, which gives them the same tokens as in the documents.
      seed: seed of all choices.
    """

    rows: int = 600
    roles: tuple[float, ...] = (0.4, 0.35, 0.25)
    tasks: tuple[str, ...] = PAPER_TASKS
    documents_read: int = 2
    documents_shown: int = 2
    history_share: float = 0.25
    computed: bool = True
    answer_first: bool = False
    numbered: bool = False
    thoughts: bool = False
    seed: int = 0

    def __post_init__(self):
        check_least(self, "", rows=1, documents_read=1, documents_shown=1, seed=0)
        if not self.tasks or any(task not in TASKS for task in self.tasks):
            raise ValueError(f"tasks = {self.tasks}: must be one or more of {TASKS}")
        if len(self.roles) not in (3, 4) or min(self.roles) < 0 or not any(self.roles):
            raise ValueError(f"roles = {self.roles}: must be 3 or 4 shares, of {ROLES}")
        if not 0 <= self.history_share <= 1:
            raise ValueError(f"history_share = {self.history_share}: must be from 0 to 1")


@dataclasses.dataclass(frozen=True)
class TaskQuestion:
    """A question as one of the tasks asks it.

    Attributes:
      documents: the question's own document first.
      record: the questioner's JSON object; {} if the questioner has none.
      question: text for responder and verifier, with the choices of a multiple-choice question.
      answer: the reference: a text, a number or a letter.
      right: other right answers, for the verifier.
      wrong: wrong answers, for the verifier.
      thought: evidence that questioner and responder quote before they answer; None: no thought.
      stated: answer as a responder writes it.
      needed_documents: number of documents, from the first one, that have the evidence.
    """

    task: str
    documents: tuple[str, ...]
    record: dict[str, object]
    question: str
    answer: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    thought: str | None = None
    stated: str = ""
    needed_documents: int = 1


def make_item(
    question: Question, task: str, letter: str, thoughts: bool = False
) -> TaskQuestion | None:
    """Adapt a question to a task, the right option at `letter`; None if the question is unfit.

    With `thoughts`, the item has a thought that quotes the question's evidence.
    """
    item = _adapt(question, task, letter)
    if item is None:
        return None
    stated = f"({item.answer})" if task == "multiple_choice" else item.answer
    item = dataclasses.replace(item, stated=stated)
    return _with_thought(item, question) if thoughts else item


def _with_thought(item: TaskQuestion, question: Question) -> TaskQuestion:
    needed_documents = tuple(question.documents[i] for i in question.shown) or item.documents[:1]
    spare_documents = tuple(text for text in item.documents if text not in needed_documents)
    record, thought, answer, stated = dict(item.record), " ".join(question.evidence), "", ""
    if item.task == "multiple_choice":
        options = dict(zip(LETTERS, _options(question, item.answer), strict=True))
        record["options"] = {name: f" {text}" for name, text in options.items()}
        # The letter follows the value at the end of the quote: a small model looks it up there.
        answer, stated, thought = item.answer, item.stated, thought + item.stated
    elif record:
        # As the documents write a number: a policy with random weights only learns to copy.
        stated = question.answer
        record["answer"] = f" {stated}"
        answer = item.answer if item.task == "financial_math" else f" {item.answer}"
    return dataclasses.replace(
        item,
        documents=(*needed_documents, *spare_documents),
        record=record,
        answer=answer or item.answer,
        thought=thought,
        stated=stated or item.stated,
        needed_documents=len(needed_documents),
    )


def _adapt(question: Question, task: str, letter: str) -> TaskQuestion | None:
    if task == "multiple_choice":
        return _choice_item(question, letter)
    answer, right, wrong = question.answer, question.right[1:], question.wrong
    if task == "financial_math":
        value = parse_number(answer) if NUMBER.fullmatch(answer) else None
        if value is None or isinstance(value, bool):
            return None
        answer = number_text(value)
        right, wrong = tuple(other_forms(answer)), _other_numbers(question)
    elif question.task != task:
        return None
    if task == CLOZE:
        return _cloze_item(question)
    record: dict[str, object] = {"question": question.question, "answer": answer}
    return TaskQuestion(task, _own_first(question), record, question.question, answer, right, wrong)


def _choice_item(question: Question, letter: str) -> TaskQuestion | None:
    if question.task != "general_qa" or len(question.wrong) < 3:
        return None
    options = _options(question, letter)
    choices = dict(zip(LETTERS, options, strict=True))
    record = {"question": question.question, "options": choices, "answer": letter}
    text = format_choices(question.question, options)
    wrong = tuple(label for label in LETTERS if label != letter)
    right = (f"({letter})",)
    return TaskQuestion("multiple_choice", _own_first(question), record, text, letter, right, wrong)


def _options(question: Question, letter: str) -> list[str]:
    options = [*question.wrong[:3]]
    options.insert(LETTERS.index(letter), question.answer)
    return options


def _cloze_item(question: Question) -> TaskQuestion:
    """Return the gap for the responder, and an evidence sentence for the questioner.

    The record is {} if the rules of self-play accept no evidence sentence.
    """
    record: dict[str, object] = {}
    documents = _own_first(question)
    for sentence in question.evidence:
        # The rules of self-play decide, for the same reason as for parsed questions: no row may
        # show what self-play refuses.
        if not cloze.check_span(sentence, question.answer, documents, documents)[1]:
            record = {"sentence": sentence, "answer": question.answer}
            # The questioner must be shown a document that has the sentence.
            documents = tuple(sorted(documents, key=lambda text: sentence not in text))
            break
    return TaskQuestion(
        CLOZE, documents, record, question.question, question.answer, question.right[1:], ()
    )


def _other_numbers(question: Question) -> tuple[str, ...]:
    """Return the documents' numbers of at least two digits that differ from the answer."""
    # A number in the documents is a plausible wrong answer: a verifier must read the question.
    longer = (number for number in _numbers(question) if len(number) > 1)
    wrong_numbers = (n for n in longer if not means_the_same(n, question.answer))
    return tuple(itertools.islice(wrong_numbers, MOST_WRONG))


def _is_stated(item: TaskQuestion, question: Question) -> bool:
    """Return whether the documents contain the answer, a number, in some way of writing it."""
    return any(means_the_same(number, item.answer) for number in _numbers(question))


def _numbers(question: Question) -> list[str]:
    numbers = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", " ".join(question.documents))
    return list(dict.fromkeys(numbers))


def _own_first(question: Question) -> tuple[str, ...]:
    """Return the documents, the question's own first (it contains the answer, if any does)."""
    candidates = [question.documents[i] for i in question.shown] or question.documents
    # A document without the answer would make the questioner row a guess.
    own_document = next((d for d in candidates if question.answer in d), candidates[0])
    return (own_document, *(text for text in question.documents if text != own_document))


class RowMaker:
    """Maker of rows; `counts` has the reasons for which questions gave no row."""

    def __init__(self, config: RowConfig, prompts: Prompts):
        self.config, self.prompts = config, prompts
        self.counts: Counter[str] = Counter()
        self._rng = np.random.default_rng(config.seed)

    def item(self, question: Question, task: str, letter: str) -> TaskQuestion | None:
        """Return the result of `make_item`; None if the config forbids its computed answer."""
        item = make_item(question, task, letter, self.config.thoughts)
        may_compute = self.config.computed or task != "financial_math"
        if item is None or may_compute or _is_stated(item, question):
            return item
        self.counts["financial_math: computed answer"] += 1
        return None

    def row(
        self, role: str, item: TaskQuestion, history_items: Sequence[TaskQuestion]
    ) -> Row | None:
        """Make a row of the role; a questioner's history is sampled from `history_items`."""
        if role == "questioner":
            return self._questioner_row(item, history_items)
        if role == "responder":
            return self._responder_row(item)
        return self._verifier_row(item) if role == "verifier" else self._reciter_row(item)

    def _questioner_row(
        self, item: TaskQuestion, history_items: Sequence[TaskQuestion]
    ) -> Row | None:
        if not item.record:
            self.counts["questioner: no sentence whose answer stands elsewhere too"] += 1
            return None
        completion = json.dumps(item.record, ensure_ascii=False)
        if item.thought is not None:
            record = json.dumps(item.record, ensure_ascii=False, separators=(",", ":"))
            completion = f"<think> {item.thought}</think>{record}"
        # The parser of self-play: a policy must not be tuned to write questions that self-play
        # refuses.
        parsed = parse_question(completion, item.task, count_words)
        if parsed.status != "accepted" or parsed.answer != item.answer:
            self.counts[f"questioner: {parsed.reason or 'another answer'}"] += 1
            return None
        past_items = []
        if history_items and self._rng.random() < self.config.history_share:
            count = int(self._rng.integers(1, 3))
            past_items = [
                history_items[i] for i in self._rng.permutation(len(history_items))[:count]
            ]
        own_documents = dict.fromkeys(
            text
            for question in (item, *past_items)
            for text in question.documents[: question.needed_documents]
        )
        shown = self._with_more(tuple(own_documents), item.documents, self.config.documents_shown)
        history = [Entry((), past.question, past.answer) for past in past_items]
        # A questioner of self-play is told the letter of the right option, too.
        letter = item.answer if item.task == "multiple_choice" else None
        cue = self.prompts.answer_first(item.answer) if self.config.answer_first else ""
        prompt = self.prompts.questioner(item.task, shown, history, letter, cue)
        return Row(prompt, completion, "questioner", item.task)

    def _responder_row(self, item: TaskQuestion) -> Row | None:
        needed_documents = item.documents[: item.needed_documents]
        shown = self._with_more(needed_documents, item.documents, self.config.documents_read)
        completion = f"The answer is {item.stated}"
        if item.thought is not None:
            completion = f"<think> {item.thought}</think>answer is {item.stated}"
        if self.config.numbered:
            completion = f"[{shown.index(item.documents[0]) + 1}] {completion}"
            shown = list(evidence.number_documents(shown))
        # The rule must score the completion 1, however a run extracts answers: otherwise the row
        # would teach a form that earns nothing.
        if not scores_itself(item.answer.strip(), item.task):
            self.counts["responder: the rule cannot score the answer"] += 1
            return None
        prompt = self.prompts.responder(item.task, shown, item.question)
        return Row(prompt, completion, "responder", item.task)

    def _verifier_row(self, item: TaskQuestion) -> Row:
        answer, verdict = item.answer.strip(), "YES"
        # Half of the answers are wrong, where wrong ones are known. Right answers in other words
        # show that a verdict is not a comparison of characters.
        kind = self._rng.random()
        if kind < 0.5 and item.wrong:
            answer, verdict = item.wrong[self._rng.integers(len(item.wrong))], "NO"
        elif kind < 0.75 and item.right:
            answer = item.right[self._rng.integers(len(item.right))]
        prompt = self.prompts.verifier(item.question, answer, item.answer)
        return Row(prompt, f"[[{verdict}]]", "verifier", item.task)

    def _reciter_row(self, item: TaskQuestion) -> Row:
        shown = self._with_more((), item.documents, self.config.documents_read)
        recited = [shown[i] for i in self._rng.permutation(len(shown))]
        return Row("\n".join([*shown, RECITE]), "\n".join(recited), "reciter", item.task)

    def _with_more(
        self, needed_documents: tuple[str, ...], documents: Sequence[str], max_documents: int
    ) -> list[str]:
        """Return the needed documents and others up to `max_documents` in total, shuffled."""
        other_documents = [text for text in documents if text not in needed_documents]
        # Fewer documents than a cluster has leave self-play room to improve.
        extra = max(0, int(self._rng.integers(1, max_documents + 1)) - len(needed_documents))
        shown_documents = [
            *needed_documents,
            *(other_documents[i] for i in self._rng.permutation(len(other_documents))[:extra]),
        ]
        # Shuffled: the place of a document must not give away that it has the answer.
        return [shown_documents[i] for i in self._rng.permutation(len(shown_documents))]


def make_rows(
    questions: Sequence[Question], config: RowConfig, prompts: Prompts
) -> tuple[list[Row], Counter[str]]:
    """Return (config.rows rows in shuffled order, counts of questions that gave no row).

    A task uses the questions in shuffled order, and again from the start if there are too few.
    ValueError if no question suits one of the tasks.
    """
    # A random stream of its own for orders, beside the maker's stream for rows.
    maker, rng = RowMaker(config, prompts), np.random.default_rng([config.seed, 1])
    roles: dict[str, float] = dict(zip(ROLES, config.roles, strict=False))  # 3 or 4 shares
    equal = dict.fromkeys(config.tasks, 1.0)
    made_rows: list[Row] = []
    for role, rows in batch_counts(config.rows, roles, dict.fromkeys(roles, config.rows)).items():
        for task, count in batch_counts(rows, equal, dict.fromkeys(equal, rows)).items():
            order = rng.permutation(len(questions)).tolist()
            candidate_rows = _rows_of(maker, role, task, questions, order)
            task_rows = list(itertools.islice(candidate_rows, count))
            if len(task_rows) < count:
                raise ValueError(f"tasks: no question gives a row of the {role} for {task}")
            made_rows += task_rows
    return [made_rows[i] for i in rng.permutation(len(made_rows))], maker.counts


def _rows_of(
    maker: RowMaker,
    role: str,
    task: str,
    questions: Sequence[Question],
    order: Sequence[int],
) -> Iterator[Row]:
    """Yield rows of a role and a task, over and over; end after a pass that gave no row."""
    for first in itertools.count(0, len(order)):
        has_row = False
        for number, index in enumerate(order, first):
            # Letters in turn: each is right equally often, so that a preference for a letter never
            # pays.
            letter, question = LETTERS[number % len(LETTERS)], questions[index]
            item = maker.item(question, task, letter)
            neighbors = questions[max(0, index - HISTORY_REACH) : index + HISTORY_REACH + 1]
            related = [
                q for q in neighbors if q is not question and {*q.documents} & {*question.documents}
            ]
            past_items = (make_item(q, task, letter, maker.config.thoughts) for q in related)
            history_items = [past for past in past_items if past]
            if item and (row := maker.row(role, item, history_items)):
                has_row = True
                yield row
        # Without this check a task that suits no question would be tried forever.
        if not has_row:
            return


def main(_) -> None:
    log.setLevel(logging.INFO)
    flag_values = flags.FLAGS
    config = dataclass_flags.read(RowConfig, flag_values)
    questions = [q for path in flag_values.questions for q in read_scorable(path, "--questions")]
    rows, counts = make_rows(questions, config, prompt_sets.load(flag_values.prompts))
    write_records(flag_values.out, map(dataclasses.asdict, rows))
    print(json.dumps({"rows": len(rows), "questions": len(questions), "left out": counts}))


if __name__ == "__main__":
    flags.DEFINE_list("questions", None, "JSONL files of questions.", required=True)
    flags.DEFINE_string("out", None, "JSONL of rows to write.", required=True)
    dataclass_flags.define(RowConfig)
    flags.DEFINE_string("prompts", "compact", "full, compact or a folder of templates.")
    entry.run_main(main)
