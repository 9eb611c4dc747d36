"""Questions about long documents: the benchmarks of the paper's Table 1.

    name                           rows  answer          rule
    longbench_v2                    503  a letter        the letter
    hotpotqa, 2wikimqa, musique     200  a phrase        cover exact match
    frames                          824  a phrase        cover exact match
    docmath                         800  a number        within 0.15 %, percent and scale words

Prompts are the responder's prompts in training (set "full"), rules are those of the reward. A judge
is asked if the rule score is below 1, except for letters (paper Appendix E.2). For LongBench, only
the first answer is the reference. Paragraphs (DocMath) or documents (Frames, each a title, a
newline and a text) are joined by newlines (spec section 11).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from spell_jax.data.clusters import LETTERS
from spell_jax.evaluation.benchmarks import published
from spell_jax.evaluation.benchmarks.base import Benchmark, Item
from spell_jax.evaluation.benchmarks.published import Folder, Loader, Row
from spell_jax.selfplay import prompts, rules
from spell_jax.selfplay.numbers import number_text
from spell_jax.selfplay.parsing import format_choices

LONGBENCH_TITLES = {"hotpotqa": "HotpotQA", "2wikimqa": "2WikiMQA", "musique": "MuSiQue"}
# Counts from evalscope's card of the dataset; the paper gives only their sum.
DOCMATH_ROWS = {
    "simpshort_testmini": 200,
    "simplong_testmini": 100,
    "compshort_testmini": 200,
    "complong_testmini": 300,
}


def load_longbench_v2(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load LongBench v2, 503 multiple-choice questions, from `data.json`."""
    rows = published.read(folder, [["data.json"]], 503, limit)
    items = map(_longbench_v2_item, rows)
    return _benchmark("longbench_v2", "LB-V2", items, "multiple_choice", ("difficulty", "length"))


def _longbench_v2_item(row: Row) -> Item:
    answer = row.text("answer")
    if answer not in LETTERS:
        raise row.wrong("answer", f"one of {', '.join(LETTERS)}")
    options = [row.text(f"choice_{letter}") for letter in LETTERS]
    question = format_choices(row.text("question"), options)
    fields = {name: row.text(name) for name in ("domain", "sub_domain", "difficulty", "length")}
    name, documents = row.text("_id"), [row.text("context")]
    return _item(row, name, "multiple_choice", documents, question, answer, **fields)


def load_longbench(task: str, folder: Folder, limit: int | None = None) -> Benchmark:
    """Load one of LongBench's multi-hop sets (`LONGBENCH_TITLES`), from `data/TASK.jsonl`."""
    rows = published.read(folder, [[f"data/{task}.jsonl"], [f"{task}.jsonl"]], 200, limit)
    items = []
    for row in rows:
        name, documents = row.text("_id"), [row.text("context")]
        question, reference = row.text("input"), row.texts("answers")[0]
        items.append(_item(row, name, "general_qa", documents, question, reference))
    return _benchmark(task, LONGBENCH_TITLES[task], items, "general_qa")


def load_frames(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load Frames, 824 questions, from `test.jsonl` of modelscope.cn/datasets/iic/frames."""
    # Google's own files have links to Wikipedia only, without the texts.
    rows = published.read(folder, [["test.jsonl"]], 824, limit)
    items = []
    for number, row in enumerate(rows):
        pages = row.rows("wiki_items")
        documents = [f"{page.text('title')}\n{page.get('text', str, 'a text')}" for page in pages]
        question, reference = row.text("Prompt"), row.text("Answer")
        items.append(_item(row, str(number), "general_qa", documents, question, reference))
    return _benchmark("frames", "Frames", items, "general_qa")


def load_docmath(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load DocMath-Eval's four testmini sets, 800 questions, in the order of `DOCMATH_ROWS`."""
    items: list[Item] = []
    for split, count in DOCMATH_ROWS.items():
        left = None if limit is None else limit - len(items)
        if left == 0:
            break
        layouts = [[f"data/{split}.json"], [f"{split}.json"]]
        rows = published.read(folder, layouts, count, left)
        items += [_docmath_item(row, split) for row in rows]
    return _benchmark("docmath", "DocMath", items, "financial_math", ("split",))


def _docmath_item(row: Row, split: str) -> Item:
    truth = row.get("ground_truth", (str, int, float), "a number or a truth value")
    reference = truth.strip() if isinstance(truth, str) else number_text(truth)
    name, question = row.text("question_id"), row.text("question")
    documents = row.texts("paragraphs")
    return _item(row, name, "financial_math", documents, question, reference, split=split)


def _item(
    row: Row,
    name: str,
    task: str,
    documents: Sequence[str],
    question: str,
    reference: str,
    **fields: str,
) -> Item:
    if not reference.strip():
        raise ValueError(f"{row.where}: the reference answer is empty. {published.HELP}")
    prompt = _prompts().responder(task, documents, question)
    return Item(name, prompt, question, (reference,), fields)


@functools.cache
def _prompts() -> prompts.Prompts:
    return prompts.load("full")


def _benchmark(
    name: str, title: str, items: Iterable[Item], task: str, by: tuple[str, ...] = ()
) -> Benchmark:
    return Benchmark(
        name,
        title,
        tuple(items),
        extract=lambda text, item: rules.extract_answer(text, task),
        score=functools.partial(score_rule, task),
        judged=task != "multiple_choice",
        by=by,
    )


def score_rule(task: str, text: str, item: Item) -> float:
    """Rule reward of a full reply against the item's reference: 0.0 or 1.0."""
    return rules.score(text, item.references[0], task)


LOADERS: dict[str, Loader] = {
    "longbench_v2": load_longbench_v2,
    "frames": load_frames,
    "docmath": load_docmath,
    **{task: functools.partial(load_longbench, task) for task in LONGBENCH_TITLES},
}
