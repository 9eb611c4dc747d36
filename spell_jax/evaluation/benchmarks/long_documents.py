"""Questions about long documents: the benchmarks of the paper's Table 1.

    name                           rows  answer          rule
    longbench_v2                    503  a letter        the letter
    hotpotqa, 2wikimqa, musique     200  a phrase        cover exact match
    frames                          824  a phrase        cover exact match
    docmath                         800  a number        within 0.15 %, percent and scale words

1. Prompts are the responder's prompts in training (set "full"). Rules are those of the reward.
2. A judge is asked if the rule score is below 1, except for letters (paper Appendix E.2).
3. LongBench: only the first answer is the reference.
4. DocMath: paragraphs are joined by newlines. Frames: documents are joined by newlines, and each is
   its title, a newline and its text (spec section 11).

Layouts: docs/evaluation.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from spell_jax.data.clusters import LETTERS
from spell_jax.evaluation.benchmarks import published
from spell_jax.evaluation.benchmarks.base import Benchmark, Item
from spell_jax.evaluation.benchmarks.published import Folder, Row
from spell_jax.selfplay import prompts, rules
from spell_jax.selfplay.numbers import number_text
from spell_jax.selfplay.parsing import format_choices

MAX_TOKENS = 4096  # per answer of non-thinking models (paper Appendix E.2)

LONGBENCH_TITLES = {"hotpotqa": "HotpotQA", "2wikimqa": "2WikiMQA", "musique": "MuSiQue"}
# Counts from evalscope's card of the dataset; the paper gives only their sum.
DOCMATH_ROWS = {
    "simpshort_testmini": 200,
    "simplong_testmini": 100,
    "compshort_testmini": 200,
    "complong_testmini": 300,
}


def load_longbench_v2(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load LongBench v2, 503 multiple-choice questions, from `data.json`.

    Source: huggingface.co/datasets/zai-org/LongBench-v2.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published; see `published.read`.
    """
    rows = published.read(folder, [["data.json"]], 503, limit)
    items = map(_longbench_v2_item, rows)
    return _benchmark("longbench_v2", "LB-V2", items, "multiple_choice", ("difficulty", "length"))


def load_longbench(task: str, folder: Folder, limit: int | None = None) -> Benchmark:
    """Load one of LongBench's multi-hop sets, 200 questions, from `data/TASK.jsonl`.

    Source: huggingface.co/datasets/zai-org/LongBench.

    Args:
      task: "hotpotqa", "2wikimqa" or "musique".
      folder: folder of the unpacked data.zip, or the `data` folder in it.
      limit: see `published.read`.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published; see `published.read`.
    """
    rows = published.read(folder, [[f"data/{task}.jsonl"], [f"{task}.jsonl"]], 200, limit)
    items = (
        _item(
            row.text("_id"),
            "general_qa",
            [row.text("context")],
            row.text("input"),
            row.texts("answers")[0],
            row,
        )
        for row in rows
    )
    return _benchmark(task, LONGBENCH_TITLES[task], items, "general_qa")


def load_frames(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load Frames with the texts of its Wikipedia pages, 824 questions, from `test.jsonl`.

    Google's own files have links only; modelscope.cn/datasets/iic/frames adds the texts.

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published; see `published.read`.
    """
    rows = published.read(folder, [["test.jsonl"]], 824, limit)
    items = []
    for number, row in enumerate(rows):
        pages = row.rows("wiki_items")
        documents = [f"{page.text('title')}\n{page.get('text', str, 'a text')}" for page in pages]
        item = _item(
            str(number), "general_qa", documents, row.text("Prompt"), row.text("Answer"), row
        )
        items.append(item)
    return _benchmark("frames", "Frames", items, "general_qa")


def load_docmath(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load DocMath-Eval's four testmini sets, 800 questions, from `data/SET_testmini.json`.

    `limit` takes the first questions of the sets in the order of `DOCMATH_ROWS`.
    Source: huggingface.co/datasets/yale-nlp/DocMath-Eval (access is granted on request).

    Raises:
      FileNotFoundError, ValueError: if the folder is not as published; see `published.read`.
    """
    published.check_limit(limit)
    items: list[Item] = []
    for split, count in DOCMATH_ROWS.items():
        left = None if limit is None else limit - len(items)
        if left == 0:
            break
        layouts = [[f"data/{split}.json"], [f"{split}.json"]]
        rows = published.read(folder, layouts, count, left)
        items += [_docmath_item(row, split) for row in rows]
    return _benchmark("docmath", "DocMath", items, "financial_math", ("split",))


def _longbench_v2_item(row: Row) -> Item:
    letter = row.text("answer")
    if letter not in LETTERS:
        raise row.wrong("answer", f"one of {', '.join(LETTERS)}")
    options = [row.text(f"choice_{letter}") for letter in LETTERS]
    question = format_choices(row.text("question"), options)
    fields = {name: row.text(name) for name in ("domain", "sub_domain", "difficulty", "length")}
    documents = [row.text("context")]
    return _item(row.text("_id"), "multiple_choice", documents, question, letter, row, fields)


def _docmath_item(row: Row, split: str) -> Item:
    truth = row.get("ground_truth", (str, int, float), "a number or a truth value")
    reference = truth.strip() if isinstance(truth, str) else number_text(truth)
    documents = row.texts("paragraphs")
    fields = {"split": split}
    name = row.text("question_id")
    return _item(name, "financial_math", documents, row.text("question"), reference, row, fields)


def _item(
    name: str,
    task: str,
    documents: list[str],
    question: str,
    reference: str,
    row: Row,
    fields: dict[str, str] | None = None,
) -> Item:
    if not reference.strip():
        raise ValueError(f"{row.where}: the reference answer is empty. {published.HELP}")
    prompt = _prompts().responder(task, documents, question)
    return Item(name, prompt, question, (reference,), fields or {})


def _benchmark(
    name: str, title: str, items: Iterable[Item], task: str, by: tuple[str, ...] = ()
) -> Benchmark:
    return Benchmark(
        name,
        title,
        published.unique(list(items), name),
        extract=functools.partial(_extract, task),
        score=functools.partial(score_rule, task),
        judged=task != "multiple_choice",
        max_tokens=MAX_TOKENS,
        by=by,
    )


def _extract(task: str, text: str, item: Item) -> str | None:
    return rules.extract_answer(text, task)


def score_rule(task: str, text: str, item: Item) -> float:
    """Rule reward of a full reply against the item's reference: 0.0 or 1.0."""
    return rules.score(text, item.references[0], task)


@functools.cache
def _prompts() -> prompts.Prompts:
    return prompts.load("full")
