"""Retrieval in long contexts: OpenAI's MRCR and three tasks of HELMET (the paper's Table 8).

    name                              rows  metric
    mrcr_2needle, _4needle, _8needle   800  ratio of difflib's SequenceMatcher, after a prefix
    helmet_nq, _trivia, _pop           600  a reference is part of the reply (RAG)
    helmet_hotpot                      300  a reference is part of the reply (RAG)
    helmet_trec_coarse, ...            500  the label (ICL)
    helmet_infbench_sum                100  ROUGE-L F1 (summarization)
    helmet_multi_lexsum                100  ROUGE-L F1 (summarization)

1. MRCR is a conversation that makes the same request several times. The model must repeat one of
   the replies after a random string. Here the conversation is one user turn; each message is headed
   "User:" or "Assistant:", as in MRCR's own examples.
2. HELMET samples 100 questions (500 for ICL) and the examples in prompts with the random numbers of
   its libraries. Here they are sampled with a seed of our own, the same in every run.
3. Prompts of HELMET's tasks have our own wording. Scores compare between our models. They compare
   with published scores only up to the different sample and wording.
4. HELMET sets a length in tokens by the number of passages or examples; `LENGTHS` are its lengths.
   Books and court files are not truncated here: the caller truncates prompts to the model's limit.

Layouts: docs/evaluation.md.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from spell_jax.evaluation.benchmarks import helmet_labels, published
from spell_jax.evaluation.benchmarks.base import Benchmark, Item
from spell_jax.evaluation.benchmarks.published import Folder, Row
from spell_jax.selfplay.rules import normalize_answer, visible_text

T = TypeVar("T")

MAX_TOKENS = 4096  # paper Appendix F.3
LENGTHS = (8192, 16384, 32768, 65536, 131072)
PAPER_LENGTH = 16384
SEED = 42

MRCR_ROWS = 800
_SPEAKERS = {"user": "User", "assistant": "Assistant", "system": "System"}

# Length -> number of passages; HELMET's configs/rag_short.yaml and rag.yaml.
_PASSAGES: dict[int, int] = dict(zip(LENGTHS, (50, 105, 220, 440, 1000), strict=True))
# Task -> (file of questions, file of examples, number of positions of the gold passage).
_RAG = {
    "nq": ("nq-dev-multikilt_1000_k{}_dep6", "nq-train-multikilt_1000_k3_dep6", 6),
    "trivia": ("triviaqa-dev-multikilt_1000_k{}_dep6", "triviaqa-train-multikilt_1000_k3_dep6", 6),
    "hotpot": ("hotpotqa-dev-multikilt_1000_k{}_dep3", "hotpotqa-train-multikilt_1000_k3_dep3", 3),
    "pop": ("popqa_test_1000_k{}_dep6", "popqa_test_1000_k3_dep6", 6),
}
_POPULARITY = 3.0  # log10; PopQA questions are about pages with fewer than 10^3 views a month
_RAG_QUESTIONS = 100
_SUMMARIES = 100
_EXAMPLES = 2  # in each prompt of RAG and summaries

_ANSWER = re.compile(r"answer:([^\n]*)", re.IGNORECASE)
_LABEL = re.compile(r"label:([^\n]*)", re.IGNORECASE)
_SUMMARY = re.compile(r"summary:", re.IGNORECASE)
_WORD = re.compile(r"[a-z0-9]+")

_RAG_PROMPT = (
    "Answer the question at the end from the documents. The answer is short, a few words. Write it "
    "in this form:\nAnswer: [answer]\n\n{examples}{documents}\n\nQuestion: {question}"
)
_ICL_PROMPT = (
    "Each text below has a label, a number. Learn from them which label a text gets, and give the "
    'label of the last text. Write only "label: [number]".\n\n{examples}\n\n{question}\nlabel:'
)
_BOOK_PROMPT = (
    "Summarize the book below in 1000 to 1200 words. Tell the plot and who takes part in it, and "
    "leave out themes, background and opinions.\n\n{examples}{text}\n\nNow write the summary, "
    'behind the word "Summary:".'
)
_LAW_PROMPT = (
    "Below are the documents of a civil rights lawsuit. Summarize the case in one paragraph of 200 "
    "to 250 words: background, parties, outcomes.\n\n{examples}Documents of the case:\n{text}\n\n"
    'Now write the summary, behind the word "Summary:".'
)


# ------------------------------------------------------------------------------------------ MRCR


def load_mrcr(needles: int, folder: Folder, limit: int | None = None) -> Benchmark:
    """Load MRCR with 2, 4 or 8 needles.

    The files are `Nneedle/Nneedle_0.parquet` and `Nneedle/Nneedle_1.parquet`, formerly one file,
    `Nneedle.parquet`. Source: huggingface.co/datasets/openai/mrcr.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published; see `published.read`.
    """
    name = f"{needles}needle"
    layouts = [[f"{name}/{name}_0.parquet", f"{name}/{name}_1.parquet"], [f"{name}.parquet"]]
    rows = published.read(folder, layouts, MRCR_ROWS, limit)
    items = tuple(_mrcr_item(number, row) for number, row in enumerate(rows))
    title = f"MRCR-{name}"
    return Benchmark(f"mrcr_{name}", title, items, _extract_all, score_mrcr, False, MAX_TOKENS)


def score_mrcr(text: str, item: Item) -> float:
    """SequenceMatcher's ratio of reply and reference after the prefix; 0.0 without the prefix.

    The score is that of the dataset's own grader, except that thinking and surrounding blanks are
    removed first. SequenceMatcher takes more than linear time. Therefore at most twice the
    reference's length plus 1000 characters of a reply are matched; the rest counts as not matching.
    Shorter replies get exactly the grader's score.
    """
    prefix, answer = item.fields["prefix"], item.references[0]
    visible = visible_text(text) or ""
    if not visible.startswith(prefix):
        return 0.0
    reply, wanted = visible.removeprefix(prefix), answer.removeprefix(prefix)
    if reply == wanted:
        return 1.0
    most = 2 * len(wanted) + 1000
    # Keep the matched characters of a truncated reply, but normalize by its full length.
    ratio = difflib.SequenceMatcher(None, reply[:most], wanted).ratio()
    return ratio * (len(reply[:most]) + len(wanted)) / (len(reply) + len(wanted))


def _mrcr_item(number: int, row: Row) -> Item:
    try:
        messages = json.loads(row.text("prompt"))
        texts = [(_SPEAKERS[turn["role"]], turn["content"]) for turn in messages]
        prompt = "\n\n".join(f"{speaker}: {content}" for speaker, content in texts)
        question = str(texts[-1][1])
    except (ValueError, TypeError, LookupError) as error:
        wanted = "a JSON list of messages with role and content"
        raise row.wrong("prompt", f"{wanted} ({error})") from error
    prefix, answer = row.text("random_string_to_prepend"), row.text("answer")
    if not answer.startswith(prefix):
        raise row.wrong("answer", f"a text that begins with random_string_to_prepend, {prefix!r}")
    names = ("n_needles", "desired_msg_index", "total_messages", "n_chars")
    fields = {name: row.get(name, int, "a number") for name in names}
    return Item(str(number), prompt, question, (answer,), fields | {"prefix": prefix})


# ------------------------------------------------------------------------------------------- RAG


def load_rag(
    task: str, folder: Folder, limit: int | None = None, *, length: int = PAPER_LENGTH
) -> Benchmark:
    """Load questions asked after passages of Wikipedia, from HELMET's `data/kilt/`.

    100 questions are sampled. Each is asked 6 times (HotpotQA: 3), once per position of its gold
    passage. Source: huggingface.co/datasets/princeton-nlp/HELMET.

    Args:
      task: "nq", "trivia", "hotpot" or "pop".
      folder: folder of HELMET's unpacked data.tar.gz, or the `data` or `data/kilt` folder in it.
      limit: maximum number of items, in file order; None loads all.
      length: prompt length in tokens, one of `LENGTHS`.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published.
    """
    published.check_limit(limit)
    questions, examples, places = _RAG[task]
    path = _kilt_file(folder, questions.format(_PASSAGES[length]))
    rows = published.rows_of(_kilt_file(folder, examples))
    shown = {_rag_name(row): row for row in rows if _is_rare(task, row)}
    # The file has gigabytes. Reading it twice keeps only the sampled rows in memory.
    names = Counter(_rag_name(row) for row in published.rows_of(path) if _is_rare(task, row))
    kept = set(_choose(sorted(names), _RAG_QUESTIONS))
    if limit is None:
        whole = sum(names[name] == places for name in kept)
        what = f"{path}, questions that stand there {places} times, once for each place"
        published.check_count(what, whole, _RAG_QUESTIONS, limit)
    items: list[Item] = []
    for number, row in enumerate(published.rows_of(path)):
        if len(items) == limit:
            break
        if _is_rare(task, row) and _rag_name(row) in kept:
            items.append(_rag_item(number, row, shown))
    published.check_count(str(path), len(items), places * _RAG_QUESTIONS, limit)
    name = _with_length(f"helmet_{task}", length)
    title = f"HELMET {task}"
    return Benchmark(name, title, tuple(items), _extract_answer, score_rag, False, MAX_TOKENS)


def score_rag(text: str, item: Item) -> float:
    """1.0 if the normalized reply contains a normalized reference, else 0.0 (HELMET's sub-EM)."""
    reply = normalize_answer(visible_text(text) or "")
    wanted = map(normalize_answer, item.references)
    return float(any(reference and reference in reply for reference in wanted))


def _kilt_file(folder: Folder, name: str) -> Path:
    layouts = [[f"{place}{name}.jsonl"] for place in ("data/kilt/", "kilt/", "")]
    return published.locate(folder, layouts)[0]


def _is_rare(task: str, row: Row) -> bool:
    if task != "pop":
        return True
    seen = row.get("s_pop", (int, float), "how often a page is seen")
    return seen > 0 and math.log10(seen) < _POPULARITY


def _rag_name(row: Row) -> str:
    """Name of a question: its id, else its text, because NQ has no ids, as HELMET says."""
    return str(row.values["id"]) if "id" in row.values else row.text("question")


def _rag_item(number: int, row: Row, shown: Mapping[str, Row]) -> Item:
    """Build an item; `shown` maps names to example rows (for PopQA, its own test questions)."""
    question = row.text("question")
    others = sorted(name for name in shown if name != _rag_name(row))
    chosen = [shown[name] for name in _rng(question).sample(others, min(_EXAMPLES, len(others)))]
    examples = "".join(
        f"{_passages(other)}\n\nQuestion: {other.text('question')}\n"
        f"Answer: {_answers(other)[0]}\n\n"
        for other in chosen
    )
    prompt = _RAG_PROMPT.format(examples=examples, documents=_passages(row), question=question)
    return Item(str(number), prompt, question, _answers(row), {"question_id": _rag_name(row)})


def _passages(row: Row) -> str:
    passages = row.rows("ctxs")
    return "\n\n".join(
        f"Document (Title: {passage.get('title', str, 'a text')}): {passage.text('text')}"
        for passage in passages
    )


def _answers(row: Row) -> tuple[str, ...]:
    """Correct answers; a list of lists is flattened, as in HELMET."""
    value = row.get("answers", list, "a list of texts")
    flat = [text for part in value for text in (part if isinstance(part, list) else [part])]
    if not flat or not all(isinstance(text, str) and text for text in flat):
        raise row.wrong("answers", "a list of at least one text")
    return tuple(flat)


# ------------------------------------------------------------------------------------------- ICL


def load_icl(
    task: str, folder: Folder, limit: int | None = None, *, length: int = PAPER_LENGTH
) -> Benchmark:
    """Load in-context classification: the labels must be inferred from examples in the prompt.

    Each question has its own examples, balanced over labels. Labels are shown as numbers, which are
    assigned at random for each question, so that no label is known beforehand.

    Args:
      task: key of `helmet_labels.TASKS`.
      folder: folder of the dataset, as its authors publish it.
      limit: maximum number of questions; None loads all 500.
      length: prompt length in tokens, one of `LENGTHS`.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published.
    """
    published.check_limit(limit)
    data = helmet_labels.read(task, folder, whole=limit is None)
    train = helmet_labels.by_label(data.train)
    shots = helmet_labels.TASKS[task].shots[LENGTHS.index(length)]
    numbers = _choose(range(len(data.test)), helmet_labels.QUESTIONS)[:limit]
    published.check_count(f"{folder}, {task}", len(numbers), helmet_labels.QUESTIONS, limit)
    items = tuple(_icl_item(number, *data.test[number], train, shots) for number in numbers)
    name = _with_length(f"helmet_{task}", length)
    title = f"HELMET {task}"
    return Benchmark(name, title, items, _extract_label, score_icl, False, MAX_TOKENS)


def score_icl(text: str, item: Item) -> float:
    """1.0 if the stated label is correct, else 0.0."""
    found = _extract_label(text, item)
    return float(found is not None and normalize_answer(found) == item.references[0])


def _icl_item(
    number: int, text: str, label: str, train: Mapping[str, Sequence[str]], shots: int
) -> Item:
    rng = _rng(text)
    order = list(range(len(train)))
    rng.shuffle(order)
    written = dict(zip(train, map(str, order), strict=True))
    examples = helmet_labels.balanced(train, shots, rng)
    shown = "\n\n".join(f"{example}\nlabel: {written[kind]}" for example, kind in examples)
    prompt = _ICL_PROMPT.format(examples=shown, question=text)
    return Item(str(number), prompt, text, (written[label],), {"label": label})


# ------------------------------------------------------------------------------------- summaries


def load_infbench_sum(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load summaries of novels, 100 sampled of 103, from InfiniteBench's `longbook_sum_eng.jsonl`.

    Source: huggingface.co/datasets/xinrongzhang2022/InfiniteBench.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published.
    """
    published.check_limit(limit)
    name = "longbook_sum_eng.jsonl"
    (path,) = published.locate(folder, [[name], [f"data/{name}"]])
    rows = list(published.rows_of(path))
    numbers = _choose_summaries(str(path), len(rows), 103, limit)
    summaries = [row.texts("answer") for row in rows]
    items = []
    for number in numbers:
        others = [answers[0] for i, answers in enumerate(summaries) if i != number]
        examples = _summary_examples(others, str(number))
        prompt = _BOOK_PROMPT.format(examples=examples, text=rows[number].text("context"))
        items.append(Item(str(number), prompt, "Summarize the book.", tuple(summaries[number])))
    return _summary_benchmark("helmet_infbench_sum", "HELMET InfBench Sum", items)


def load_multi_lexsum(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load short summaries of lawsuits, from Multi-LexSum v20230518: 100 sampled of 312 (dev set).

    `sources.json` (2.2 GB) is held in memory while it is read.
    Source: huggingface.co/datasets/allenai/multi_lexsum.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published.
    """
    published.check_limit(limit)
    names = ["dev.json", "train.json", "sources.json"]
    layouts = [[f"{place}{name}" for name in names] for place in ("releases/v20230518/", "")]
    cases, others, documents = published.locate(folder, layouts)
    # dev.json and train.json contain JSON Lines in spite of their names.
    rows = [row for row in published.lines_of(cases) if row.values.get("summary/short")]
    numbers = _choose_summaries(f"{cases}, with summary/short", len(rows), 312, limit)
    shown = [
        row.text("summary/short")
        for row in published.lines_of(others)
        if row.values.get("summary/short")
    ]
    texts = _case_texts([rows[number] for number in numbers], documents)
    items = []
    for number, text in zip(numbers, texts, strict=True):
        row = rows[number]
        name = str(row.get("case_id", (str, int), "an id"))
        prompt = _LAW_PROMPT.format(examples=_summary_examples(shown, name), text=text)
        reference = row.text("summary/short")
        items.append(Item(name, prompt, "Summarize the case.", (reference,)))
    return _summary_benchmark("helmet_multi_lexsum", "HELMET Multi-LexSum", items)


def score_summary(text: str, item: Item) -> float:
    """ROUGE-L F1 of the text after the last "Summary:", for the best reference."""
    summary = _extract_summary(text, item) or ""
    return max(rouge_l(summary, reference) for reference in item.references)


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, in [0, 1].

    Words are runs of a-z and 0-9 in lower case, as in the package rouge-score, without stemming.
    The length of the subsequence comes from a bit-parallel algorithm (Hyyro 2004) with one bit per
    word of the reference. Memory is linear. For a given reference, time is linear in the text.
    """
    ours, theirs = _WORD.findall(text.lower()), _WORD.findall(reference.lower())
    if not ours or not theirs:
        return 0.0
    places: dict[str, int] = {}
    for place, word in enumerate(theirs):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(theirs)) - 1
    open_places = full
    for word in ours:
        matched = open_places & places.get(word, 0)
        open_places = ((open_places + matched) | (open_places - matched)) & full
    common = len(theirs) - open_places.bit_count()
    return 2 * common / (len(ours) + len(theirs))


def _choose_summaries(what: str, rows: int, of: int, limit: int | None) -> list[int]:
    """Indices of the texts to summarize among `rows`; `of` is the published number of rows."""
    if limit is None:
        published.check_count(what, rows, of, limit)
    numbers = _choose(range(rows), _SUMMARIES)[:limit]
    published.check_count(what, len(numbers), _SUMMARIES, limit)
    return numbers


def _case_texts(rows: Sequence[Row], path: Path) -> Iterator[str]:
    sources = Row(str(path), published.json_value(path, dict))
    for row in rows:
        documents = []
        for name in row.texts("case_documents"):
            document = sources.get(name, dict, f"the document of {row.where}")
            documents.append(Row(f"{path}, {name}", document).get("doc_text", str, "a text"))
        yield "\n\n".join(documents)


def _summary_examples(summaries: Sequence[str], key: str) -> str:
    chosen = _rng(key).sample(summaries, min(_EXAMPLES, len(summaries)))
    shown = "\n\n".join(f"Summary: {summary}" for summary in chosen)
    return f"Summaries of other texts, to show what they look like:\n\n{shown}\n\n" if shown else ""


def _summary_benchmark(name: str, title: str, items: Sequence[Item]) -> Benchmark:
    unique = published.unique(items, name)
    return Benchmark(name, title, unique, _extract_summary, score_summary, False, MAX_TOKENS)


# ---------------------------------------------------------------------------------------- shared


def _extract_all(text: str, item: Item) -> str | None:
    return visible_text(text) or None


def _extract_answer(text: str, item: Item) -> str | None:
    return _text_after(_ANSWER, text)


def _extract_label(text: str, item: Item) -> str | None:
    return _text_after(_LABEL, text)


def _extract_summary(text: str, item: Item) -> str | None:
    visible = visible_text(text) or ""
    *_, last = _SUMMARY.split(visible)
    return last.strip() or None


def _text_after(pattern: re.Pattern[str], text: str) -> str | None:
    """Text captured by the first match, else the first line (HELMET's parse_output)."""
    visible = visible_text(text) or ""
    found = pattern.search(visible)
    stated = found[1] if found else visible.partition("\n")[0]
    return stated.strip() or None


def _choose(choices: Sequence[T], count: int) -> list[T]:
    """Sample up to `count` of the choices; they keep their order and are the same in every run."""
    rng = random.Random(SEED)
    places = rng.sample(range(len(choices)), min(count, len(choices)))
    return [choices[place] for place in sorted(places)]


def _rng(key: str) -> random.Random:
    """Random generator that depends on the key and `SEED` alone."""
    return random.Random(int.from_bytes(hashlib.sha256(f"{SEED} {key}".encode()).digest()[:8]))


def _with_length(name: str, length: int) -> str:
    return name if length == PAPER_LENGTH else f"{name}_{length // 1024}k"


def _loaders() -> dict[str, published.Loader]:
    loaders: dict[str, published.Loader] = {
        f"mrcr_{needles}needle": functools.partial(load_mrcr, needles) for needles in (2, 4, 8)
    }
    for length in LENGTHS:
        for task in _RAG:
            name = _with_length(f"helmet_{task}", length)
            loaders[name] = functools.partial(load_rag, task, length=length)
        for task in helmet_labels.TASKS:
            name = _with_length(f"helmet_{task}", length)
            loaders[name] = functools.partial(load_icl, task, length=length)
    loaders["helmet_infbench_sum"] = load_infbench_sum
    loaders["helmet_multi_lexsum"] = load_multi_lexsum
    return loaders


LOADERS = _loaders()
