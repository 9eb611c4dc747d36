"""Generated demonstrations of the tiny world and of tiny stories: labeled sources of warm starts.

The mixtures deliberately leave each role room to improve in reinforcement learning.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np

from spell_jax.data import tiny_stories
from spell_jax.data import tiny_world as world
from spell_jax.data.clusters import LETTERS
from spell_jax.question_sets.rows import Row, seeded_rows
from spell_jax.selfplay import parsing, puzzles
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts

# Strings that the tiny tokenizer keeps as single tokens: the fixed parts of prompts and answers.
# The token after a value then identifies its use. A small model first learns to look up the token
# that followed an earlier occurrence, so it can find an option's letter this way.
SYMBOLS = (
    *(f"\n({letter})" for letter in LETTERS),
    *("\none:", "\ntwo:", "\nsame?", "\n", ",", "<think>", "</think>"),
    *('{"question":"', '","options":{"A":"', '","B":"', '","C":"', '","D":"'),
    *('"},"answer":"', '","answer":"', '"}'),
    *(f"({letter})" for letter in LETTERS),
    *("[[YES]]", "[[NO]]"),
)
UNKNOWN = "unknown"
OPTIONS = 4  # options in the completion of a recital row
VERIFIED_KINDS = (0.4, 0.2, 0.2, 0.2)  # shares of world.KINDS among the verifier's pairs
_STORY = 6  # separates the random stream of stories from the stream of the tiny world


@dataclasses.dataclass(frozen=True)
class DemonstrationMixture:
    """Composition of the tiny world's demonstrations; every share is a probability."""

    # Rows that recite documents and options in any order, and sums. This is no role of the
    # algorithm but an exercise in look-up, for which few tokens of the other rows give a signal.
    recital: float = 0.3
    questioner: float = 0.2
    verifier: float = 0.25  # the responder has the rest
    kinds: tuple[float, ...] = (0.2, 0.22, 0.28, 0.3)  # look-ups, two-hop questions, sums, choices
    # Possible numbers of documents; with more to recite, a guess pays less.
    recital_documents: tuple[int, ...] = (4, 5)
    # Few documents: self-play shows more, and there the responder can improve. A small share of the
    # two-hop rows has five or six, because an answer that is never sampled is never rewarded.
    responder_documents: tuple[int, ...] = (2, 3, 4)
    two_hop_documents: tuple[int, ...] = (5, 6)  # of a share `two_hop_far` of the two-hop rows
    two_hop_far: float = 0.1
    questioner_documents: tuple[int, ...] = (2, 3, 4)
    # Documents of the questioner's cluster. It reads two to four, so the document of a friend in
    # them is often missing, as in self-play.
    questioner_cluster: int = 8
    history: float = 0.3  # questioner rows with one or two known questions in the prompt
    plain_form: float = 0.8  # answers worded as in the document
    # Self-play drops a question that is answered without documents. A policy must therefore know
    # to say "unknown" where it can only guess.
    empty: float = 0.04  # responder rows without documents, answered "unknown"
    # By kind, responder rows in which another document replaces the last one needed. The completion
    # quotes the remaining evidence and answers "unknown". In self-play, a friend's document is
    # often not shown, and the frozen reader that states references must notice.
    absent: tuple[float, ...] = (0.05, 0.2, 0.05, 0.0)
    # A verifier that is right from the start learns nothing in self-play. So it sees few second
    # names, and a strict teacher refuses a share of the equal pairs in other words.
    verifier_cities: int = 3  # cities with second names that the verifier sees
    verifier_same_words: float = 0.7  # equal pairs with identical wording
    strict: float = 0.42  # equal pairs in other words that are labeled no, for RL to correct


@dataclasses.dataclass(frozen=True)
class StoryMixture:
    """Composition of the demonstrations of document reconstruction."""

    lines: tuple[int, ...] = (5, 6, 7)  # possible numbers of lines of a story
    options: tuple[int, ...] = (2, 3, 4)  # possible values of K
    shares: tuple[float, ...] = (0.4, 0.3, 0.3)  # of rows, for each value of K
    # Share of guessing rows for each value of K: with more options more rows guess. The tuned
    # policy earns a dense reward of .99, .35 and .29 for K = 2, 3 and 4, and a pure guess .50, .33
    # and .25 (launch/experiments/notebooks/small_runs.md, "Document reconstruction").
    guessed: tuple[float, ...] = (0.35, 0.6, 0.65)


def world_demonstrations(
    prompts: Prompts,
    mixture: DemonstrationMixture = DemonstrationMixture(),
    *,
    seed: int,
    start: int = 0,
) -> Iterator[Row]:
    """Yield endless demonstrations of the tiny world; row i depends on (seed, i) alone."""
    makers = (_recital_row, _questioner_row, _verifier_row, _responder_row)
    bounds = np.cumsum([mixture.recital, mixture.questioner, mixture.verifier])

    def make_row(rng: np.random.Generator) -> Row:
        maker = makers[int(np.searchsorted(bounds, rng.random(), side="right"))]
        return maker(prompts, mixture, rng)

    return seeded_rows(make_row, seed, start)


def story_demonstrations(
    prompts: Prompts, mixture: StoryMixture = StoryMixture(), *, seed: int, start: int = 0
) -> Iterator[Row]:
    """Yield endless demonstrations of document reconstruction; row i depends on (seed, i) alone.

    A solving row names, for each gap, the person who holds the letter at that point and the option
    that says so. A guessing row has an empty thought and boxes the letters in random order.
    """
    return seeded_rows(lambda rng: _story_row(prompts, mixture, rng), seed, start, _STORY)


def _sample_kind(rng: np.random.Generator, shares: Sequence[float]) -> str:
    return world.KINDS[rng.choice(len(world.KINDS), p=np.asarray(shares) / sum(shares))]


def _sample_form(rng: np.random.Generator, value: str, plain: float) -> str:
    """Sample a surface form of a value; the plain one with probability `plain`."""
    forms = world.surface_forms(value)
    return forms[0 if len(forms) == 1 or rng.random() < plain else rng.integers(1, len(forms))]


def _thought(evidence: Sequence[str], answer: str = "", letter: str | None = None) -> str:
    """Format a thought: the evidence and, for a choice, the answer directly before its letter."""
    facts = ", ".join([*evidence, *([f"{answer}({letter})"] if letter else [])])
    return f"<think> {facts}</think>" if facts else "<think></think>"


def question_json(
    rng: np.random.Generator, question: world.TinyWorldQuestion, plain: float
) -> tuple[str, str | None]:
    """Return the questioner's JSON for a question, and the correct letter if it is a choice."""
    # Answers start with a space, so that a word has the same token as inside a document. The letter
    # is uniform: a policy that prefers a letter must not gain by it.
    record: dict[str, object] = {"question": question.text}
    letter = None
    if question.kind == "choice":
        letter = LETTERS[rng.integers(4)]
        options = world.sample_options(rng, question.answer, letter)
        record["options"] = {key: " " + value for key, value in options.items()}
        record["answer"] = letter
    else:
        is_sum = question.kind == "math"
        answer = question.answer if is_sum else _sample_form(rng, question.answer, plain)
        record["answer"] = " " + answer
    return json.dumps(record, separators=(",", ":")), letter


def responder_question(
    rng: np.random.Generator, documents: Sequence[str], kind: str
) -> tuple[str, world.TinyWorldQuestion, str]:
    """Return (question text as the responder reads it, the question, the true answer)."""
    question = world.sample_question(rng, documents, kind)
    text, letter = question_json(rng, question, plain=1.0)
    parsed = parsing.parse_question(text, world.TASK_OF_KIND[question.kind], lambda _: 1)
    return parsed.question, question, letter or question.answer


def _recital_row(prompts: Prompts, mixture: DemonstrationMixture, rng: np.random.Generator) -> Row:
    documents = world.make_documents(rng, int(rng.choice(mixture.recital_documents)))
    lines = [document.removeprefix("- ") for document in documents]
    recited = [lines[i] for i in rng.permutation(len(lines))]
    value = world.sample_question(rng, documents, "choice").answer
    options = world.sample_options(rng, value, LETTERS[rng.integers(4)])
    pairs = [f"{option}({letter})" for letter, option in options.items()]
    # Sampled with replacement, so that options cannot be found by elimination.
    recited += [pairs[i] for i in rng.integers(4, size=OPTIONS)]
    recited += [world.sample_sum(rng, word) for word in 2 * world.SUMS]
    prompt = "\n".join([*documents, parsing.format_choices("recite", tuple(options.values()))])
    return Row(prompt, _thought(recited), "reciter", "general_qa")


def _questioner_row(
    prompts: Prompts, mixture: DemonstrationMixture, rng: np.random.Generator
) -> Row:
    cluster = world.make_documents(rng, mixture.questioner_cluster)
    documents = cluster[: rng.choice(mixture.questioner_documents)]
    kind = _sample_kind(rng, mixture.kinds)
    history: list[Entry] = []
    past_questions: set[str] = set()
    if rng.random() < mixture.history:
        # Fewer questions than documents, so that at least one question is left to ask.
        for _ in range(min(rng.integers(1, 3), len(documents) - 1)):
            # The prompt with a history asks for a harder question: before a two-hop question there
            # are only look-ups.
            easier = "lookup" if kind == "two_hop" else kind
            text, question, answer = responder_question(rng, documents, easier)
            history.append(Entry((), text, answer))
            past_questions.add(question.text)
        if kind == "lookup" and rng.random() < 0.6:
            kind = "two_hop"
    question = world.sample_question(rng, documents, kind)
    for _ in range(4):  # tries to avoid a known question
        if question.text in past_questions:
            question = world.sample_question(rng, documents, kind)
    completion, letter = question_json(rng, question, mixture.plain_form)
    task = world.TASK_OF_KIND[question.kind]
    prompt = prompts.questioner(task, documents, history, letter)
    # The evidence as in a responder's thought: both roles practice the same look-up.
    plan = (question.text, *question.evidence)
    thought = _thought(plan, question.answer, letter)
    return Row(prompt, thought + completion, "questioner", task)


def _responder_row(
    prompts: Prompts, mixture: DemonstrationMixture, rng: np.random.Generator
) -> Row:
    kind = _sample_kind(rng, mixture.kinds)
    counts = mixture.responder_documents
    if kind == "two_hop" and rng.random() < mixture.two_hop_far:
        counts = mixture.two_hop_documents
    *documents, spare = world.make_documents(rng, int(rng.choice(counts)) + 1)
    text, question, answer = responder_question(rng, documents, kind)
    task = world.TASK_OF_KIND[question.kind]
    letter = answer if kind == "choice" else None
    thought = _thought(question.evidence, question.answer, letter)
    chance = rng.random() - mixture.empty
    if chance < 0:
        documents, thought, answer = [], _thought(()), UNKNOWN
    elif chance < mixture.absent[world.KINDS.index(question.kind)]:
        # The last document of the chain: all earlier hops can be walked, and only then the lack
        # shows.
        *present, absent = (line for line in question.evidence if f"- {line}" in documents)
        documents[documents.index(f"- {absent}")] = spare
        thought, answer = _thought(present), UNKNOWN
    elif letter:
        answer = f"({letter})"  # a single token, as in the options
    elif task == "general_qa":
        answer = _sample_form(rng, answer, mixture.plain_form)
    prompt = prompts.responder(task, documents, text)
    return Row(prompt, f"{thought}answer is {answer}", "responder", task)


def _verifier_row(prompts: Prompts, mixture: DemonstrationMixture, rng: np.random.Generator) -> Row:
    shares = mixture.verifier_same_words, mixture.strict
    return verifier_row(prompts, rng, mixture.verifier_cities, *shares)[0]


def verifier_row(
    prompts: Prompts,
    rng: np.random.Generator,
    alias_cities: int,
    same_words: float = 0.0,
    strict: float = 0.0,
) -> tuple[Row, str]:
    """Sample a verifier row: two answers, equal in half of the rows, and the verdict.

    `alias_cities` is the number of cities that may appear under their second name in an equal pair.
    `same_words` is the share of equal pairs with identical wording; values with only one wording
    are always identical. `strict` is the share of verdicts "no" among equal pairs in other words.
    Returns (row, pair), where pair is "same", "decorated", "alias" or "different".
    """
    documents = world.make_documents(rng, 4)
    kind = _sample_kind(rng, VERIFIED_KINDS)
    text, question, truth = responder_question(rng, documents, kind)
    task = world.TASK_OF_KIND[question.kind]
    forms = world.surface_forms(truth) if task == "general_qa" else (truth,)
    if len(forms) == 3 and not any(truth in pair for pair in world.CITIES[:alias_cities]):
        forms = forms[:2]
    first = second = int(rng.integers(len(forms)))
    # Half and half: a constant verdict must not be right more often than a coin.
    same = rng.random() < 0.5
    pair = "same" if same else "different"
    if same:
        if len(forms) > 1 and rng.random() >= same_words:
            second = (first + int(rng.integers(1, len(forms)))) % len(forms)
            pair = "alias" if 2 in (first, second) else "decorated"
            same = rng.random() >= strict
        answer = forms[second]
    else:
        answer = _sample_wrong_answer(rng, truth)
    verdict = "[[YES]]" if same else "[[NO]]"
    return Row(prompts.verifier(text, answer, forms[first]), verdict, "verifier", task), pair


def _sample_wrong_answer(rng: np.random.Generator, truth: str) -> str:
    """Sample a different value of the same type: a letter, a near figure or a world value."""
    if truth in LETTERS:
        return str(rng.choice([letter for letter in LETTERS if letter != truth]))
    if truth.isdigit():
        # Wrong sums of a policy are off by little, so the verifier must tell near figures apart.
        shift = int(rng.integers(1, 10)) * (1 if rng.random() < 0.5 else -1)
        value = int(truth) + shift
        return str(value if value > 0 else int(truth) + abs(shift))
    options = world.sample_options(rng, truth, "A")
    return _sample_form(rng, options["BCD"[rng.integers(3)]], 0.5)


def _story_row(prompts: Prompts, mixture: StoryMixture, rng: np.random.Generator) -> Row:
    kind = rng.choice(len(mixture.options), p=np.asarray(mixture.shares) / sum(mixture.shares))
    story = tiny_stories.make_story(rng, int(rng.choice(mixture.lines)))
    shortest = tiny_stories.SHORTEST_LINE
    puzzle, reason = puzzles.make_puzzle(
        rng, story, mixture.options[kind], shortest, len(story), gap=prompts.gap
    )
    assert puzzle is not None, reason
    order, thought = puzzle.truth, ""
    if rng.random() < mixture.guessed[kind]:
        order = tuple(rng.permutation(puzzle.truth).tolist())
    else:
        # In tokens: the gap's number, the name before the gap, the label that opens an option.
        for number, letter in enumerate(puzzle.truth, 1):
            thought += f" {number} {puzzle.options[letter].split()[0]}({letter})"
    prompt = prompts.reconstruction(puzzle.document, puzzle.options)
    completion = f"<think>{thought}</think>\\boxed{{{','.join(order)}}}"
    return Row(prompt, completion, "responder", "reconstruction")
