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
2. HELMET samples 100 questions (500 for ICL) and the examples in prompts. Here the seed is our own,
   the same in every run, and the prompts have our own wording. Scores compare between our models;
   with published scores they compare only up to this difference.
3. HELMET sets a length in tokens by the number of passages or examples; `LENGTHS` are its lengths.
   Books and court files are not truncated here: the caller truncates prompts to the model's limit.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from spell_jax.evaluation.benchmarks import helmet_labels, published
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.evaluation.benchmarks.published import Folder, Loader, PublishedRow
from spell_jax.evaluation.generated.haystack import extract
from spell_jax.selfplay.rouge import rouge_l
from spell_jax.selfplay.rules import normalize_answer, visible_text

T = TypeVar("T")

LENGTHS = (8192, 16384, 32768, 65536, 131072)
PAPER_LENGTH = 16384
# Seeds the choice of questions and examples, the same in every run.
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
_QUESTIONS = 100  # sampled from a set of RAG or summaries
_EXAMPLES = 2  # in each prompt of RAG and summaries

_SUMMARY = re.compile(r"summary:", re.IGNORECASE)

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
    """Load MRCR with 2, 4 or 8 needles, from its two files or from the earlier single file."""
    name = f"{needles}needle"
    layouts = [[f"{name}/{name}_0", f"{name}/{name}_1"], [name]]
    rows = published.read_rows(folder, layouts, MRCR_ROWS, limit)
    items = tuple(_mrcr_item(str(number), row) for number, row in enumerate(rows))
    return Benchmark(f"mrcr_{name}", f"MRCR-{name}", items, extract, score_mrcr)


def score_mrcr(text: str, item: BenchmarkItem) -> float:
    """Return SequenceMatcher's ratio of reply and reference after the prefix; 0.0 without it.

    This is the dataset's own grader, after removing thinking and surrounding blanks. Of a long
    reply, only twice the reference's length plus 1000 characters are matched.
    """
    prefix, answer = item.fields["prefix"], item.references[0]
    visible = visible_text(text) or ""
    if not visible.startswith(prefix):
        return 0.0
    reply, expected = visible.removeprefix(prefix), answer.removeprefix(prefix)
    if reply == expected:
        return 1.0
    # SequenceMatcher takes more than linear time. Characters beyond the limit count as not
    # matching, and a correct reply is never longer.
    max_characters = 2 * len(expected) + 1000
    # Keep the matched characters of a truncated reply, but normalize by its full length.
    ratio = difflib.SequenceMatcher(None, reply[:max_characters], expected).ratio()
    return ratio * (len(reply[:max_characters]) + len(expected)) / (len(reply) + len(expected))


def _mrcr_item(id: str, row: PublishedRow) -> BenchmarkItem:
    try:
        messages = json.loads(row.text("prompt"))
        texts = [(_SPEAKERS[turn["role"]], turn["content"]) for turn in messages]
        prompt = "\n\n".join(f"{speaker}: {content}" for speaker, content in texts)
        question = str(texts[-1][1])
    except (ValueError, TypeError, LookupError) as error:
        requirement = "a JSON list of messages with role and content"
        raise row.wrong("prompt", f"{requirement} ({error})") from error
    # The random string shows that the reply is copied on request, and not guessed from the style.
    prefix, answer = row.text("random_string_to_prepend"), row.text("answer")
    if not answer.startswith(prefix):
        raise row.wrong("answer", f"a text that begins with random_string_to_prepend, {prefix!r}")
    names = ("n_needles", "desired_msg_index", "total_messages", "n_chars")
    fields = {name: row.get(name, int, "a number") for name in names}
    return BenchmarkItem(id, prompt, question, (answer,), fields | {"prefix": prefix})


# ------------------------------------------------------------------------------------------- RAG


def load_rag(
    task: str, folder: Folder, limit: int | None = None, *, length: int = PAPER_LENGTH
) -> Benchmark:
    """Load questions asked after passages of Wikipedia, from HELMET's `data/kilt/`.

    100 questions are sampled. Each is asked 6 times (HotpotQA: 3), once per position of its gold
    passage. The folder is HELMET's unpacked data.tar.gz, or `data` or `data/kilt` in it.
    The limit takes the first items in file order. `length` is in tokens, one of `LENGTHS`.
    """
    question_file, example_file, positions = _RAG[task]
    path, examples = (
        published.locate(folder, [[f"{at}{name}"] for at in ("data/kilt/", "kilt/", "")])[0]
        for name in (question_file.format(_PASSAGES[length]), example_file)
    )
    example_of = {_rag_name(row): row for row in published.rows_of(examples) if _is_rare(task, row)}
    # The file has gigabytes. Reading it twice keeps only the sampled rows in memory.
    names = Counter(_rag_name(row) for row in published.rows_of(path) if _is_rare(task, row))
    chosen_names = set(_choose(sorted(names), _QUESTIONS))
    if limit is None:
        complete = sum(names[name] == positions for name in chosen_names)
        what = f"{path}, questions that occur {positions} times, once per position"
        published.check_count(what, complete, _QUESTIONS, limit)
    rows = enumerate(published.rows_of(path))
    chosen_rows = (
        (i, row) for i, row in rows if _is_rare(task, row) and _rag_name(row) in chosen_names
    )
    items = tuple(
        _rag_item(str(i), row, example_of) for i, row in itertools.islice(chosen_rows, limit)
    )
    published.check_count(str(path), len(items), positions * _QUESTIONS, limit)
    name = _with_length(f"helmet_{task}", length)
    return Benchmark(name, f"HELMET {task}", items, _extractor("answer"), score_rag)


def score_rag(text: str, item: BenchmarkItem) -> float:
    """Return 1.0 if a normalized reference is in the normalized reply, else 0.0 (HELMET sub-EM)."""
    reply = normalize_answer(visible_text(text) or "")
    references = map(normalize_answer, item.references)
    return float(any(reference and reference in reply for reference in references))


def _is_rare(task: str, row: PublishedRow) -> bool:
    if task != "pop":
        return True
    views = row.get("s_pop", (int, float), "how often a page is seen")
    return views > 0 and math.log10(views) < _POPULARITY


def _rag_name(row: PublishedRow) -> str:
    """Return a question's name: its id, else its text."""
    # NQ's file has no ids.
    return str(row.values["id"]) if "id" in row.values else row.text("question")


def _rag_item(id: str, row: PublishedRow, example_of: Mapping[str, PublishedRow]) -> BenchmarkItem:
    """Build an item; PopQA's examples are its own test questions, except the item's question."""
    name, question = _rag_name(row), row.text("question")
    other_names = sorted(other_name for other_name in example_of if other_name != name)
    # Seeded by the question: the 6 items of a question, one per position, have the same examples.
    chosen_names = _rng(question).sample(other_names, min(_EXAMPLES, len(other_names)))
    examples = "".join(
        f"{_passages(example)}\n\nQuestion: {example.text('question')}\n"
        f"Answer: {_answers(example)[0]}\n\n"
        for example in map(example_of.__getitem__, chosen_names)
    )
    prompt = _RAG_PROMPT.format(examples=examples, documents=_passages(row), question=question)
    return BenchmarkItem(id, prompt, question, _answers(row), {"question_id": name})


def _passages(row: PublishedRow) -> str:
    passages = row.rows("ctxs")
    return "\n\n".join(
        f"Document (Title: {passage.get('title', str, 'a text')}): {passage.text('text')}"
        for passage in passages
    )


def _answers(row: PublishedRow) -> tuple[str, ...]:
    """Return the correct answers; a list of lists is flattened, as in HELMET."""
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

    Each question has its own examples, balanced over labels. Labels are shown as numbers, assigned
    at random for each question, so that no label is known beforehand.
    """
    train, test = helmet_labels.read_pairs(task, folder, complete=limit is None)
    by_label = helmet_labels.by_label(train)
    shots = helmet_labels.TASKS[task].shots[LENGTHS.index(length)]
    numbers = _choose(range(len(test)), helmet_labels.QUESTIONS)[:limit]
    published.check_count(f"{folder}, {task}", len(numbers), helmet_labels.QUESTIONS, limit)
    items = tuple(_icl_item(str(number), *test[number], by_label, shots) for number in numbers)
    name = _with_length(f"helmet_{task}", length)
    return Benchmark(name, f"HELMET {task}", items, _extractor("label"), score_icl)


def score_icl(text: str, item: BenchmarkItem) -> float:
    """Return 1.0 if the stated label is correct, else 0.0."""
    label = _extractor("label")(text, item)
    return float(label is not None and normalize_answer(label) == item.references[0])


def _icl_item(
    id: str, text: str, label: str, train: Mapping[str, Sequence[str]], shots: int
) -> BenchmarkItem:
    rng = _rng(text)
    # Numbers hide the meaning of labels, which a policy may know from its training.
    numbers = list(map(str, range(len(train))))
    rng.shuffle(numbers)
    number_of = dict(zip(train, numbers, strict=True))
    examples = helmet_labels.balanced(train, shots, rng)
    shown = "\n\n".join(f"{example}\nlabel: {number_of[kind]}" for example, kind in examples)
    prompt = _ICL_PROMPT.format(examples=shown, question=text)
    return BenchmarkItem(id, prompt, text, (number_of[label],), {"label": label})


# ------------------------------------------------------------------------------------- summaries


def load_infbench_sum(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load summaries of novels from InfiniteBench's `longbook_sum_eng.jsonl`: 100 of 103."""
    (path,) = published.locate(folder, published.hub("longbook_sum_eng"))
    rows = list(published.rows_of(path))
    summaries = [row.texts("answer") for row in rows]
    items = []
    for i in _choose_summaries(str(path), len(rows), 103, limit):
        # The only set is also the source of examples; the book's own summary must not be one.
        other_summaries = [answers[0] for j, answers in enumerate(summaries) if j != i]
        examples = _summary_examples(other_summaries, str(i))
        prompt = _BOOK_PROMPT.format(examples=examples, text=rows[i].text("context"))
        items.append(BenchmarkItem(str(i), prompt, "Summarize the book.", tuple(summaries[i])))
    name, title = "helmet_infbench_sum", "HELMET InfBench Sum"
    return Benchmark(name, title, tuple(items), _extract_summary, score_summary)


def load_multi_lexsum(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load short summaries of lawsuits, Multi-LexSum v20230518: 100 sampled of 312 (dev set)."""
    names = ["dev", "train", "sources.json"]
    layouts = [[f"{at}{name}" for name in names] for at in ("releases/v20230518/", "")]
    cases, train_cases, documents = published.locate(folder, layouts)
    rows, examples = (
        [row for row in published.rows_of(path) if row.values.get("summary/short")]
        for path in (cases, train_cases)
    )
    numbers = _choose_summaries(f"{cases}, with summary/short", len(rows), 312, limit)
    shown = [row.text("summary/short") for row in examples]
    sources = PublishedRow(str(documents), published.json_value(documents, dict))  # 2.2 GB
    items = []
    for row in (rows[number] for number in numbers):
        name = str(row.get("case_id", (str, int), "an id"))
        text = "\n\n".join(_case_documents(row, sources))
        prompt = _LAW_PROMPT.format(examples=_summary_examples(shown, name), text=text)
        items.append(
            BenchmarkItem(name, prompt, "Summarize the case.", (row.text("summary/short"),))
        )
    name, title = "helmet_multi_lexsum", "HELMET Multi-LexSum"
    return Benchmark(name, title, tuple(items), _extract_summary, score_summary)


def score_summary(text: str, item: BenchmarkItem) -> float:
    """Return the ROUGE-L F1 of the text after the last "Summary:", for the best reference."""
    summary = _extract_summary(text, item) or ""
    return max(rouge_l(summary, reference) for reference in item.references)


def _choose_summaries(what: str, rows: int, of: int, limit: int | None) -> list[int]:
    """Choose indices of texts to summarize among `rows`; `of` is the published number of rows."""
    if limit is None:
        published.check_count(what, rows, of, limit)
    # All 100 are chosen before the limit: the first questions are the same for every limit.
    numbers = _choose(range(rows), _QUESTIONS)[:limit]
    published.check_count(what, len(numbers), _QUESTIONS, limit)
    return numbers


def _case_documents(row: PublishedRow, sources: PublishedRow) -> Iterator[str]:
    for name in row.texts("case_documents"):
        document = sources.get(name, dict, f"the document of {row.where}")
        yield PublishedRow(f"{sources.where}, {name}", document).get("doc_text", str, "a text")


def _summary_examples(summaries: Sequence[str], key: str) -> str:
    sampled_summaries = _rng(key).sample(summaries, min(_EXAMPLES, len(summaries)))
    shown = "\n\n".join(f"Summary: {summary}" for summary in sampled_summaries)
    return f"Summaries of other texts, to show what they look like:\n\n{shown}\n\n" if shown else ""


def _extract_summary(text: str, item: BenchmarkItem) -> str | None:
    # A reply may plan "Summary:" before it writes one.
    *_, last = _SUMMARY.split(visible_text(text) or "")
    return last.strip() or None


# ---------------------------------------------------------------------------------------- shared


@functools.cache
def _extractor(word: str) -> Callable[[str, BenchmarkItem], str | None]:
    """Return a reader of the text after "WORD:", else of the first line (HELMET's parse_output)."""
    pattern = re.compile(rf"{word}:([^\n]*)", re.IGNORECASE)

    def extract_stated(text: str, item: BenchmarkItem) -> str | None:
        visible = visible_text(text) or ""
        match = pattern.search(visible)
        stated = match[1] if match else visible.partition("\n")[0]
        return stated.strip() or None

    return extract_stated


def _choose(choices: Sequence[T], count: int) -> list[T]:
    """Sample up to `count` of the choices; they keep their order and are the same in every run."""
    indices = random.Random(SEED).sample(range(len(choices)), min(count, len(choices)))
    return [choices[i] for i in sorted(indices)]


def _rng(key: str) -> random.Random:
    return random.Random(int.from_bytes(hashlib.sha256(f"{SEED} {key}".encode()).digest()[:8]))


def _with_length(name: str, length: int) -> str:
    return name if length == PAPER_LENGTH else f"{name}_{length // 1024}k"


LOADERS: dict[str, Loader] = {
    **{f"mrcr_{needles}needle": functools.partial(load_mrcr, needles) for needles in (2, 4, 8)},
    **{
        _with_length(f"helmet_{task}", length): functools.partial(load, task, length=length)
        for length in LENGTHS
        for load, tasks in ((load_rag, _RAG), (load_icl, helmet_labels.TASKS))
        for task in tasks
    },
    "helmet_infbench_sum": load_infbench_sum,
    "helmet_multi_lexsum": load_multi_lexsum,
}
