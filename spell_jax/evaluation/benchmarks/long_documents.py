"""Questions about long documents: the benchmarks of the paper's Table 1, and of EAPO's.

    name                           rows  answer          rule
    longbench_v2                    503  a letter        the letter
    longbench_v2_sdq, _mdq, _lsa    333  a letter        the letter (EAPO: three kinds of question)
    hotpotqa, 2wikimqa, musique     200  a phrase        cover exact match
    frames                          824  a phrase        cover exact match
    docmath                         800  a number        within 0.15 %, percent and scale words
    seal_0, seal_hard          111, 254  a phrase        cover exact match (EAPO)

Prompts are the responder's prompts in training (set "full"), and the rules are the rules of the
reward. A judge is asked if the rule score is below 1, except for letters (paper Appendix E.2).
Paragraphs (DocMath) or documents (Frames, each a title, a newline and a text; SEAL, each a page)
are joined by newlines (spec section 11).

With `sections` the prompt asks for EAPO's four sections, and the answer section is scored in place
of the reply.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from spell_jax.data.clusters import LETTERS
from spell_jax.evaluation.benchmarks import published
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.evaluation.benchmarks.published import Folder, PublishedRow
from spell_jax.selfplay import evidence, prompts, rules
from spell_jax.selfplay.numbers import number_text
from spell_jax.selfplay.parsing import format_choices

log = logging.getLogger(__name__)

LONGBENCH_TITLES = {"hotpotqa": "HotpotQA", "2wikimqa": "2WikiMQA", "musique": "MuSiQue"}
# Counts from evalscope's card of the dataset; the paper gives only their sum.
DOCMATH_ROWS = {
    "simpshort_testmini": 200,
    "simplong_testmini": 100,
    "compshort_testmini": 200,
    "complong_testmini": 300,
}
# Kind -> (title, value of the field "domain", rows): EAPO's columns of LongBench v2.
LONGBENCH_V2_KINDS = {
    "sdq": ("SDQ", "Single-Document QA", 175),
    "mdq": ("MDQ", "Multi-Document QA", 125),
    "lsa": ("LSA", "Long Structured Data Understanding", 33),
}
LONGBENCH_V2_LAYOUTS = [["data"], *published.hub("train")]
SEAL_SETS = {"seal_0": ("Seal-0", "seal-0", 111)}
SEAL_SETS |= {"seal_hard": ("Seal-Hard", "seal-hard", 254)}
SEAL_PAGES = "pages.jsonl"


class DocumentLoader(Protocol):
    """A published.Loader that can also ask for EAPO's four sections."""

    def __call__(
        self, folder: Folder, limit: int | None = None, *, sections: bool = False
    ) -> Benchmark: ...


def load_longbench_v2(
    folder: Folder, limit: int | None = None, *, sections: bool = False
) -> Benchmark:
    """Load LongBench v2, 503 multiple-choice questions, from `data.json`."""
    rows = published.read_rows(folder, LONGBENCH_V2_LAYOUTS, 503, limit)
    return _longbench_v2("longbench_v2", "LB-V2", rows, sections)


def load_longbench_v2_kind(
    kind: str, folder: Folder, limit: int | None = None, *, sections: bool = False
) -> Benchmark:
    """Load the questions of LongBench v2 of one kind (`LONGBENCH_V2_KINDS`)."""
    title, domain, count = LONGBENCH_V2_KINDS[kind]
    paths = published.locate(folder, LONGBENCH_V2_LAYOUTS)
    rows = itertools.chain.from_iterable(map(published.rows_of, paths))
    # Only the rows of the kind are counted, and a limit stops the reading early.
    of_kind = (row for row in rows if row.text("domain") == domain)
    rows = list(itertools.islice(of_kind, limit))
    published.check_count(f"{paths[0]}, domain {domain}", len(rows), count, limit)
    return _longbench_v2(f"longbench_v2_{kind}", title, rows, sections)


def _longbench_v2(name: str, title: str, rows: Iterable[PublishedRow], sections: bool) -> Benchmark:
    items = (_longbench_v2_item(row, sections) for row in rows)
    by = ("difficulty", "length")
    return _benchmark(name, title, items, "multiple_choice", sections, by)


def _longbench_v2_item(row: PublishedRow, sections: bool) -> BenchmarkItem:
    answer = row.text("answer")
    if answer not in LETTERS:
        raise row.wrong("answer", f"one of {', '.join(LETTERS)}")
    options = [row.text(f"choice_{letter}") for letter in LETTERS]
    question = format_choices(row.text("question"), options)
    fields = {name: row.text(name) for name in ("domain", "sub_domain", "difficulty", "length")}
    name, documents = row.text("_id"), [row.text("context")]
    return _item(row, name, "multiple_choice", documents, question, answer, sections, **fields)


def load_longbench(
    task: str, folder: Folder, limit: int | None = None, *, sections: bool = False
) -> Benchmark:
    """Load one of LongBench's multi-hop sets (`LONGBENCH_TITLES`), from `data/TASK.jsonl`."""
    rows = published.read_rows(folder, [[f"data/{task}"], [task], [f"{task}/test"]], 200, limit)
    items = []
    for row in rows:
        name, documents = row.text("_id"), [row.text("context")]
        # The paper's code takes the first of several listed answers as the only reference.
        question, reference = row.text("input"), row.texts("answers")[0]
        items.append(_item(row, name, "general_qa", documents, question, reference, sections))
    return _benchmark(task, LONGBENCH_TITLES[task], items, "general_qa", sections)


def load_frames(folder: Folder, limit: int | None = None, *, sections: bool = False) -> Benchmark:
    """Load Frames, 824 questions, from `test.jsonl` of modelscope.cn/datasets/iic/frames.

    A page without a text is its title alone; how many there are is logged.
    """
    # Google's own files have links to Wikipedia only, without the texts.
    rows = published.read_rows(folder, published.hub("test"), 824, limit)
    items, untold = [], []
    for number, row in enumerate(rows):
        pages = row.rows("wiki_items")
        # An error would refuse the published file; the log names the pages.
        untold += [page.where for page in pages if not page.values.get("text")]
        documents = [_frames_page(page) for page in pages]
        question, reference = row.text("Prompt"), row.text("Answer")
        name = str(number)
        items.append(_item(row, name, "general_qa", documents, question, reference, sections))
    if untold:
        log.warning("%d pages have no text, only a title: first %s", len(untold), untold[0])
    return _benchmark("frames", "Frames", items, "general_qa", sections)


def _frames_page(page: PublishedRow) -> str:
    text = page.text("text") if page.values.get("text") else ""
    return f"{page.text('title')}\n{text}"


def load_seal(
    name: str, folder: Folder, limit: int | None = None, *, sections: bool = False
) -> Benchmark:
    """Load SEAL-0 or SEAL-Hard, with the pages that its rows point to.

    The published rows have addresses ("urls") and no texts. The folder's `pages.jsonl` has a line
    {"url", "text"} for each address (EAPO extracts the pages with Jina's reader).
    """
    title, file, count = SEAL_SETS[name]
    rows = published.read_rows(folder, [[file], [f"{name}/test"]], count, limit)
    (path,) = published.locate(folder, [[SEAL_PAGES]])
    pages = {page.text("url"): page.text("text") for page in published.rows_of(path)}
    items = []
    for number, row in enumerate(rows):
        urls = row.texts("urls")
        if missing := [url for url in urls if url not in pages]:
            raise ValueError(f"{path}: no page {missing[0]!r}, of {row.where}. {published.HELP}")
        documents, id = [pages[url] for url in urls], str(number)
        question, reference = row.text("question"), row.text("answer")
        items.append(_item(row, id, "general_qa", documents, question, reference, sections))
    return _benchmark(name, title, items, "general_qa", sections)


def load_docmath(folder: Folder, limit: int | None = None, *, sections: bool = False) -> Benchmark:
    """Load DocMath-Eval's four testmini sets, 800 questions, in the order of `DOCMATH_ROWS`."""
    items: list[BenchmarkItem] = []
    for split, count in DOCMATH_ROWS.items():
        left = None if limit is None else limit - len(items)
        if left == 0:
            break
        rows = published.read_rows(folder, published.hub(split), count, left)
        items += [_docmath_item(row, split, sections) for row in rows]
    return _benchmark("docmath", "DocMath", items, "financial_math", sections, ("split",))


def _docmath_item(row: PublishedRow, split: str, sections: bool) -> BenchmarkItem:
    truth = row.get("ground_truth", (str, int, float), "a number or a truth value")
    reference = truth.strip() if isinstance(truth, str) else number_text(truth)
    name, question = row.text("question_id"), row.text("question")
    documents = row.texts("paragraphs")
    task = "financial_math"
    return _item(row, name, task, documents, question, reference, sections, split=split)


def _item(
    row: PublishedRow,
    name: str,
    task: str,
    documents: Sequence[str],
    question: str,
    reference: str,
    sections: bool,
    **fields: str,
) -> BenchmarkItem:
    # The rule scores nothing against an empty text, so every answer would be wrong.
    if not reference.strip():
        raise ValueError(f"{row.where}: the reference answer is empty. {published.HELP}")
    if sections:
        prompt = _prompts().evidence(documents, question)
    else:
        prompt = _prompts().responder(task, documents, question)
    return BenchmarkItem(name, prompt, question, (reference,), fields)


@functools.cache
def _prompts() -> prompts.Prompts:
    return prompts.load("full")


def _benchmark(
    name: str,
    title: str,
    items: Iterable[BenchmarkItem],
    task: str,
    sections: bool,
    by: tuple[str, ...] = (),
) -> Benchmark:
    def stated(text: str) -> str:
        return state_section(task, text) if sections else text

    return Benchmark(
        name,
        title,
        tuple(items),
        extract=lambda text, item: rules.extract_answer(stated(text), task),
        score=lambda text, item: score_rule(task, stated(text), item),
        # A letter is right or wrong: there is nothing to judge.
        judged=task != "multiple_choice",
        state=lambda text, item: rules.stated_answer(stated(text), task),
        by=by,
    )


def score_rule(task: str, text: str, item: BenchmarkItem) -> float:
    """Return the rule reward of a full reply against the item's reference: 0.0 or 1.0."""
    return rules.score(text, item.references[0], task)


def state_section(task: str, text: str) -> str:
    """Return a reply's answer section, in words that the task's rule reads; "" without one."""
    # The section may stand in a reply of otherwise bad format: a policy that was not trained on the
    # format is measured by its answers, too.
    answer = evidence.answer_section(text)
    return evidence.with_answer_phrase(answer, task) if answer else ""


LOADERS: dict[str, DocumentLoader] = {
    "longbench_v2": load_longbench_v2,
    "frames": load_frames,
    "docmath": load_docmath,
    **{task: functools.partial(load_longbench, task) for task in LONGBENCH_TITLES},
    **{
        f"longbench_v2_{kind}": functools.partial(load_longbench_v2_kind, kind)
        for kind in LONGBENCH_V2_KINDS
    },
    **{name: functools.partial(load_seal, name) for name in SEAL_SETS},
}
