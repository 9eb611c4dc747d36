"""All benchmarks by name.

Most are read from a local folder with the files of a published dataset (docs/evaluation.md). RULER
and the needle grid are generated for the policy's own tokenizer:

    ruler_TASK_LENGTH       one of RULER's tasks at one length, such as ruler_vt_16384
    needle_LENGTH_...       the needle grid at these lengths, such as needle_4096_16384_65536
    needle                  the needle grid at lengths from 4K to 128K

A length counts tokens of the policy, with its chat layout and the answer: --max_input=16384 does
not truncate a prompt of ruler_vt_16384, and a policy of 16,384 positions can answer it. Needles are
hidden in the texts of `prose`, else in the texts of the benchmark's folder, else in a novel.
ruler_qa_LENGTH asks the folder's questions, such as SQuAD's and HotpotQA's files. Other tasks need
no folder (generated/sources.py).
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections import Counter

from spell_jax.evaluation.benchmarks import long_documents, own_questions, retrieval, short
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.benchmarks.published import HELP, Folder, Loader
from spell_jax.evaluation.generated import ruler, sources
from spell_jax.evaluation.generated.haystack import HaystackSource
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime.files import paths, remote

log = logging.getLogger(__name__)

LOADERS: dict[str, Loader] = {
    **long_documents.LOADERS,
    **short.LOADERS,
    **retrieval.LOADERS,
    own_questions.NAME: own_questions.load,
}

# Columns of the paper's tables that are means of several benchmarks.
COLUMNS = {
    "LB-MQA": ("2wikimqa", "hotpotqa", "musique"),
    "Helmet-RAG": ("helmet_nq", "helmet_trivia", "helmet_hotpot", "helmet_pop"),
    "Helmet-ICL": (
        *("helmet_trec_coarse", "helmet_trec_fine", "helmet_banking77", "helmet_clinic150"),
        "helmet_nlu",
    ),
    "Helmet-Summ": ("helmet_infbench_sum", "helmet_multi_lexsum"),
}
COLUMN_CHOICES = {"shared": COLUMNS, "separate": {}}  # --columns of evaluate

ANSWER_FORMATS = ("plain", "sections")

FORMS = ("ruler_TASK_LENGTH", "needle_LENGTH_...")  # names of generated benchmarks


def find_folder(name: str, data: Folder) -> Folder:
    """Find the folder of a benchmark's files: DATA/NAME, else DATA/FAMILY if generated, else DATA.

    A URL of benchmark files is fetched; a URL of a run is read in place.
    """
    if not data:
        return ""
    # A run has weights and checkpoints, too: fetching its questions would copy them.
    top = paths.open_folder(data if name == own_questions.NAME else remote.fetch(data))
    folders = [top / name, *(top / family for family in _MAKERS if _is_of(name, family))]
    return str(next((folder for folder in folders if folder.is_dir()), top))


def _is_of(name: str, family: str) -> bool:
    return name.partition("_")[0] == family


def load(
    name: str,
    folder: Folder,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
    answer_format: str = "plain",
    prose: Folder = "",
) -> Benchmark:
    """Load a benchmark from a local folder with its files; nothing is downloaded.

    `name` is a key of `LOADERS`, or has one of the `FORMS`, with lengths in tokens of `tokenizer`.
    These forms hide needles in the texts of the folder `prose` ("": in `folder`, else a novel);
    only "qa" needs a `folder`. `limit`, at least 1, is the maximum number of questions; published
    files then need only as many rows. None loads all. `answer_format` is "plain", or "sections" to
    ask for EAPO's four sections and score the answer section (long_documents).

    Raises:
      ValueError: if the name is unknown, the files or their number of rows are not as published, a
        length is too short for its task, or the benchmark has no documents for "sections".
      FileNotFoundError: if the folder or a file in it is missing.
      ImportError: if a package that the benchmark needs is missing; the message names it.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: must be at least 1")
    if answer_format == "sections" and name not in long_documents.LOADERS:
        raise ValueError(
            f"answer_format = 'sections': must be 'plain' for {name!r}; only "
            f"{', '.join(long_documents.LOADERS)} have documents and a question"
        )
    for family, make in _MAKERS.items():
        if _is_of(name, family):
            if tokenizer is None:
                raise ValueError(f"benchmark {name!r}: its lengths need a tokenizer")
            try:
                return make(name, folder, limit, tokenizer, prose)
            except ValueError as error:
                raise ValueError(f"benchmark {name!r}: {error}") from error
    if name not in LOADERS:
        similar_names = difflib.get_close_matches(name, LOADERS, 3) or [*LOADERS][:3]
        raise ValueError(
            f"benchmarks = {name!r}: no such benchmark; must be one of docs/evaluation.md, such as "
            f"{', '.join(similar_names)}, or a generated one: {', '.join(FORMS)}"
        )
    if not folder:
        raise ValueError(f"data = '': must be the folder of the files of {name!r}. {HELP}")
    if answer_format == "sections":
        benchmark = long_documents.LOADERS[name](folder, limit, sections=True)
    else:
        benchmark = LOADERS[name](folder, limit)
    # Rows are resumed and compared by the id of a question.
    if twice := [id for id, n in Counter(item.id for item in benchmark.items).items() if n > 1]:
        raise ValueError(f"{name}: two rows have the id {twice[0]!r}. {HELP}")
    return benchmark


def _make_ruler(
    name: str, folder: Folder, limit: int | None, tokenizer: Tokenizer, prose: Folder
) -> Benchmark:
    task, _, length = name.removeprefix("ruler").removeprefix("_").rpartition("_")
    if task not in ruler.TASKS:
        tasks = ", ".join(ruler.TASKS)
        raise ValueError(f"must be ruler_TASK_LENGTH, such as ruler_vt_16384; TASK is {tasks}")
    text = _text(folder, prose) if task in ruler.PROSE_TASKS else ""
    source = _source(_number(length), tokenizer, text)
    if task == "qa" and not folder:
        raise ValueError(f"data = '': must be a folder with questions. {HELP}")
    rows = sources.read_questions(folder) if task == "qa" else ()
    return ruler.ruler(task, source, rows, limit or ruler.ITEMS)


def _make_needle(
    name: str, folder: Folder, limit: int | None, tokenizer: Tokenizer, prose: Folder
) -> Benchmark:
    lengths = sorted(map(_number, name.split("_")[1:])) or ruler.GRID_LENGTHS
    if len(set(lengths)) < len(lengths):
        raise ValueError("must have each length once")
    return ruler.needle(name, _source(0, tokenizer, _text(folder, prose)), lengths, limit)


def _text(folder: Folder, prose: Folder) -> str:
    """Return the text that hides needles; FileNotFoundError if `prose` is given and has none."""
    place = prose or folder
    if place and (text := sources.read_prose(place)):
        return text
    if prose:
        raise FileNotFoundError(f'prose = {prose}: must have *.txt files, or *.json with a "text"')
    log.info("needles are hidden in Moby-Dick; --prose=FOLDER takes other texts")
    return sources.default_prose()


def _source(length: int, tokenizer: Tokenizer, text: str) -> HaystackSource:
    # Sentences repeat in every prompt of a benchmark, so each is tokenized once.
    cost = functools.cache(tokenizer.count)
    return HaystackSource(length, lambda prompt: len(tokenizer.chat(prompt)), cost, text)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"length {text!r}: must be a number of tokens, such as 16384")
    return int(text)


_MAKERS = {"ruler": _make_ruler, "needle": _make_needle}
