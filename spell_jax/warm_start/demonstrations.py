"""Demonstrations of the three roles in the tiny world: the labeled source of the warm start.

Each role must have something left to learn, and what it is comes from the mixture alone:
the responder sees few documents (and two-hop plans at a few more, so that they are at least
sampled later), the verifier never sees some surface forms, the questioner reads short contexts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np

from spell_jax.data import tiny_world as world
from spell_jax.data.clusters import LETTERS
from spell_jax.selfplay import parsing
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts

# Strings that the tiny tokenizer keeps in one piece: the frames of the roles' answers and prompts.
# What follows a value is then one token that says where the value stood, an option or an answer to
# compare: "what followed this token before?" is what a small model learns to ask first.
SYMBOLS = (
    "\n(A)",
    "\n(B)",
    "\n(C)",
    "\n(D)",
    "\none:",
    "\ntwo:",
    "\nsame?",
    "\n",
    ",",
    "<think>",
    "</think>",
    '{"question":"',
    '","options":{"A":"',
    '","B":"',
    '","C":"',
    '","D":"',
    '"},"answer":"',
    '","answer":"',
    '"}',
    "(A)",
    "(B)",
    "(C)",
    "(D)",
    "[[YES]]",
    "[[NO]]",
)
UNKNOWN = "unknown"
OPTIONS = 4  # in a recital
VERIFIED_KINDS = (0.4, 0.2, 0.2, 0.2)  # shares of world.KINDS among the verifier's pairs


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What the demonstrations hold; every share is a probability.

    Attributes:
      recital: share of rows that recite documents and options in any order, and sums: no role of
        the algorithm, but the exercise by which look-up forms. Of the other rows' tokens few tell
        of it.
      questioner, verifier: shares of these roles; the responder has the rest.
      kinds: shares of look-ups, two-hop questions, sums and choices.
      recital_documents: a recital is of one of these numbers of documents; the more there are,
        the less it pays to guess among them.
      responder_documents: the responder reads one of these numbers of documents.
      two_hop_documents: two-hop questions are also shown at these numbers...
      two_hop_far: ...in this share of them.
      questioner_documents: the questioner reads one of these numbers...
      questioner_cluster: ...of a cluster of this many, so that friends may be out of its sight.
      history: share of questioner rows with one or two known questions in the prompt.
      plain_form: share of answers that are worded as the document words them.
      empty: share of responder rows without documents, answered "unknown".
      absent: share of responder rows, for each kind, in which another document stands in the place
        of the last one needed: what there is is quoted, then "unknown" answered. Friends are often
        out of sight in the algorithm, and the reader that states references must notice.
      verifier_cities: the verifier sees the second names of this many cities only.
      verifier_same_words: share of the verifier's equal pairs that are in the same words.
      strict: share of its equal pairs in different words that are answered no because of them: what
        self-play can still teach it.
    """

    recital: float = 0.3
    questioner: float = 0.2
    verifier: float = 0.25
    kinds: tuple[float, ...] = (0.2, 0.22, 0.28, 0.3)
    recital_documents: tuple[int, ...] = (4, 5)
    responder_documents: tuple[int, ...] = (2, 3, 4)
    two_hop_documents: tuple[int, ...] = (5, 6)
    two_hop_far: float = 0.1
    questioner_documents: tuple[int, ...] = (2, 3, 4)
    questioner_cluster: int = 8
    history: float = 0.3
    plain_form: float = 0.8
    empty: float = 0.04
    absent: tuple[float, ...] = (0.05, 0.2, 0.05, 0.0)
    verifier_cities: int = 3
    verifier_same_words: float = 0.7
    strict: float = 0.42


@dataclasses.dataclass(frozen=True)
class Row:
    """One demonstration: texts, and the role and task that they belong to."""

    prompt: str
    completion: str
    role: str
    task: str


def rows(prompts: Prompts, mixture: Mixture, seed: int, start: int = 0) -> Iterator[Row]:
    """An endless stream of demonstrations; row i depends on (seed, i) alone."""
    index = start
    while True:
        rng = np.random.default_rng([seed, index])
        roles = ("recital", "questioner", "verifier")
        bounds = np.cumsum([getattr(mixture, role) for role in roles])
        match int(np.searchsorted(bounds, rng.random(), side="right")):
            case 0:
                yield _recital_row(mixture, rng)
            case 1:
                yield _questioner_row(prompts, mixture, rng)
            case 2:
                shares = mixture.verifier_same_words, mixture.strict
                yield verifier_row(prompts, rng, mixture.verifier_cities, *shares)[0]
            case _:
                yield _responder_row(prompts, mixture, rng)
        index += 1


def _kind(rng: np.random.Generator, shares: Sequence[float]) -> str:
    return world.KINDS[rng.choice(len(world.KINDS), p=np.asarray(shares) / sum(shares))]


def _worded(rng: np.random.Generator, value: str, plain: float) -> str:
    forms = world.surface_forms(value)
    return forms[0 if len(forms) == 1 or rng.random() < plain else rng.integers(1, len(forms))]


def _thought(evidence: Sequence[str], answer: str = "", letter: str | None = None) -> str:
    """The evidence quoted, and for a choice the answer with its letter.

    The letter follows the answer at once: what stands before the same token in the options.
    """
    chosen = [f"{answer}({letter})"] if letter else []
    facts = ", ".join([*evidence, *chosen])
    return f"<think> {facts}</think>" if facts else "<think></think>"


def question_json(
    rng: np.random.Generator, question: world.Question, plain: float
) -> tuple[str, str | None]:
    """The questioner's JSON for a question, and the letter of the right option if it is a choice.

    Answers open with a space, so that a word has the same token here as inside a document.
    """
    text = question.text
    if question.kind != "choice":
        answer = question.answer
        if question.kind != "math":
            answer = _worded(rng, answer, plain)
        return _compact({"question": text, "answer": " " + answer}), None
    letter = LETTERS[rng.integers(4)]
    options = world.draw_options(rng, question.answer, letter)
    options = {key: " " + value for key, value in options.items()}
    return _compact({"question": text, "options": options, "answer": letter}), letter


def _compact(value: dict) -> str:
    return json.dumps(value, separators=(",", ":"))


def _recital_row(mixture: Mixture, rng: np.random.Generator) -> Row:
    documents = world.make_documents(rng, int(rng.choice(mixture.recital_documents)))
    lines = [document.removeprefix("- ") for document in documents]
    chosen = [lines[i] for i in rng.permutation(len(lines))]
    value = world.draw_question(rng, documents, "choice").answer
    options = world.draw_options(rng, value, LETTERS[rng.integers(4)])
    pairs = [f"{option}({letter})" for letter, option in options.items()]
    chosen += [pairs[i] for i in rng.integers(4, size=OPTIONS)]  # not one of each: no elimination
    chosen += [world.draw_sum(rng, word) for word in 2 * world.SUMS]
    prompt = "\n".join([*documents, parsing.format_choices("recite", tuple(options.values()))])
    return Row(prompt, _thought(chosen), "reciter", "general_qa")


def _questioner_row(prompts: Prompts, mixture: Mixture, rng: np.random.Generator) -> Row:
    cluster = world.make_documents(rng, mixture.questioner_cluster)
    documents = cluster[: rng.choice(mixture.questioner_documents)]
    kind = _kind(rng, mixture.kinds)
    history: list[Entry] = []
    known: set[str] = set()
    if rng.random() < mixture.history:
        for _ in range(min(rng.integers(1, 3), len(documents) - 1)):  # one is left to ask
            easier = "lookup" if kind == "two_hop" else kind
            text, question, answer = responder_question(rng, documents, easier)
            history.append(Entry((), text, answer))
            known.add(question.text)
        if kind == "lookup" and rng.random() < 0.6:
            kind = "two_hop"  # what "harder" asks for
    question = world.draw_question(rng, documents, kind)
    for _ in range(4):  # a known question is not asked again
        if question.text in known:
            question = world.draw_question(rng, documents, kind)
    completion, letter = question_json(rng, question, mixture.plain_form)
    task = world.TASK_OF_KIND[question.kind]
    prompt = prompts.questioner(task, documents, history, letter)
    plan = (question.text, *question.evidence)  # what follows the plan is a responder's thought
    thought = _thought(plan, question.answer, letter)
    return Row(prompt, thought + completion, "questioner", task)


def responder_question(
    rng: np.random.Generator, documents: Sequence[str], kind: str
) -> tuple[str, world.Question, str]:
    """(question as the responder reads it, the question, the true answer)."""
    question = world.draw_question(rng, documents, kind)
    text, letter = question_json(rng, question, plain=1.0)
    parsed = parsing.parse_question(text, world.TASK_OF_KIND[question.kind], lambda _: 1)
    return parsed.question, question, letter or question.answer


def _responder_row(prompts: Prompts, mixture: Mixture, rng: np.random.Generator) -> Row:
    kind = _kind(rng, mixture.kinds)
    counts = mixture.responder_documents
    if kind == "two_hop" and rng.random() < mixture.two_hop_far:
        counts = mixture.two_hop_documents
    *documents, spare = world.make_documents(rng, int(rng.choice(counts)) + 1)
    text, question, answer = responder_question(rng, documents, kind)
    task = world.TASK_OF_KIND[question.kind]
    letter = answer if kind == "choice" else None
    thought = _thought(question.evidence, question.answer, letter)
    draw = rng.random() - mixture.empty
    if draw < 0:
        documents, thought, answer = [], _thought(()), UNKNOWN
    elif draw < mixture.absent[world.KINDS.index(question.kind)]:
        *found, missing = (line for line in question.evidence if f"- {line}" in documents)
        documents[documents.index(f"- {missing}")] = spare
        thought, answer = _thought(found), UNKNOWN
    elif letter:
        answer = f"({letter})"  # one token, as in the options
    elif task == "general_qa":
        answer = _worded(rng, answer, mixture.plain_form)
    prompt = prompts.responder(task, documents, text)
    return Row(prompt, f"{thought}answer is {answer}", "responder", task)


def verifier_row(
    prompts: Prompts,
    rng: np.random.Generator,
    alias_cities: int,
    same_words: float = 0.0,
    strict: float = 0.0,
) -> tuple[Row, str, str]:
    """A pair of answers, equal in half of the rows, with its verdict.

    Args:
      prompts: the prompt set.
      rng: random draws.
      alias_cities: how many cities may appear under their second name in an equal pair.
      same_words: share of the equal pairs that are in the same words; so are values that can be
        worded in one way only.
      strict: share of the equal pairs in different words whose verdict is no.

    Returns:
      (row, the kind of pair: "same", "decorated", "alias" or "different", its verdict).
    """
    documents = world.make_documents(rng, 4)
    kind = _kind(rng, VERIFIED_KINDS)
    text, question, truth = responder_question(rng, documents, kind)
    task = world.TASK_OF_KIND[question.kind]
    forms = world.surface_forms(truth) if task == "general_qa" else (truth,)
    known = {name for pair in world.CITIES[:alias_cities] for name in pair}
    if len(forms) == 3 and truth not in known:
        forms = forms[:2]
    first = second = int(rng.integers(len(forms)))
    same = rng.random() < 0.5
    pair = "same" if same else "different"
    if same:
        if len(forms) > 1 and rng.random() >= same_words:
            second = (first + int(rng.integers(1, len(forms)))) % len(forms)
            pair = "alias" if 2 in (first, second) else "decorated"
            same = rng.random() >= strict
        answer = forms[second]
    else:
        answer = _wrong_answer(rng, truth)
    verdict = "[[YES]]" if same else "[[NO]]"
    prompt = prompts.verifier(text, answer, forms[first])
    return Row(prompt, verdict, "verifier", task), pair, verdict


def _wrong_answer(rng: np.random.Generator, truth: str) -> str:
    """A different value of the same sort: a letter, a near figure, or a value of the world."""
    if truth in LETTERS:
        return str(rng.choice([letter for letter in LETTERS if letter != truth]))
    if truth.isdigit():
        shift = int(rng.integers(1, 10)) * (1 if rng.random() < 0.5 else -1)
        value = int(truth) + shift
        return str(value if value > 0 else int(truth) + abs(shift))
    options = world.draw_options(rng, truth, "A")
    return _worded(rng, options["BCD"[rng.integers(3)]], 0.5)
