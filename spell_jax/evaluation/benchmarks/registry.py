"""All benchmarks by name.

    benchmark = load("longbench_v2", "/data/LongBench-v2")

1. Most are read from a published data set; its files are in a local folder.
2. RULER and needles are made here, from any text (generated.py).
3. own_questions are those that a run of ours has asked itself (own_questions.py).

docs/evaluation.md lists the names, where each data set is published, and its files.
"""

from __future__ import annotations

import functools
import pathlib

from spell_jax.evaluation.benchmarks import long_documents, own_questions, retrieval, short
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.benchmarks.published import Folder, Loader
from spell_jax.evaluation.generated import registry as generated
from spell_jax.policy.tokenizer_base import Tokenizer

LOADERS: dict[str, Loader] = {
    "longbench_v2": long_documents.load_longbench_v2,
    "frames": long_documents.load_frames,
    "docmath": long_documents.load_docmath,
    **{
        task: functools.partial(long_documents.load_longbench, task)
        for task in long_documents.LONGBENCH_TITLES
    },
    **short.LOADERS,
    **retrieval.LOADERS,
    own_questions.NAME: own_questions.load,
}

# The columns of the paper's tables that are means of several benchmarks.
COLUMNS = {
    "LB-MQA": ("2wikimqa", "hotpotqa", "musique"),
    "Helmet-RAG": ("helmet_nq", "helmet_trivia", "helmet_hotpot", "helmet_pop"),
    "Helmet-ICL": (
        *("helmet_trec_coarse", "helmet_trec_fine", "helmet_banking77", "helmet_clinic150"),
        "helmet_nlu",
    ),
    "Helmet-Summ": ("helmet_infbench_sum", "helmet_multi_lexsum"),
}


def find_folder(name: str, data: Folder) -> pathlib.Path:
    """Where a benchmark's files lie: DATA/NAME, DATA/ruler for ruler_..., or DATA itself."""
    data = pathlib.Path(data)
    places = [data / name, *(data / one for one in [generated.family(name)] if one)]
    return next((place for place in places if place.is_dir()), data)


def load(
    name: str, folder: Folder, limit: int | None = None, tokenizer: Tokenizer | None = None
) -> Benchmark:
    """A benchmark from a local folder with its files; nothing is downloaded.

    Args:
      name: a key of `LOADERS`, or of one of the forms `generated.FORMS`.
      folder: where the files lie.
      limit: ask at most so many questions, the first; a part of the rows then suffices.
      tokenizer: of the policy that is asked; generated benchmarks have their length by it.

    Raises:
      ValueError: the name is unknown; the files are not as published, or not so many rows.
      FileNotFoundError: the folder, or a file of it, is not there.
      ImportError: a package is missing that this benchmark needs; it says which.
    """
    if generated.family(name):
        return generated.load(name, folder, limit, tokenizer)
    if name not in LOADERS:
        known = ", ".join((*LOADERS, *generated.FORMS))
        raise ValueError(f"benchmark {name!r} is unknown; there are {known}")
    return LOADERS[name](folder, limit)
