"""All benchmarks by name.

    benchmark = load("longbench_v2", "/data/LongBench-v2")

1. Most are read from a local folder with the files of a published dataset.
2. RULER and the needle grid are generated from any text (evaluation/generated/).
3. own_questions are the questions that a training run of ours generated (own_questions.py).

docs/evaluation.md lists the names, the source of each dataset, and its files.
"""

from __future__ import annotations

import pathlib
from collections import Counter

from spell_jax.evaluation.benchmarks import long_documents, own_questions, retrieval, short
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.benchmarks.published import HELP, Folder, Loader
from spell_jax.evaluation.generated import registry as generated
from spell_jax.policy.tokenizer_base import Tokenizer

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


def find_folder(name: str, data: Folder) -> pathlib.Path:
    """Folder of a benchmark's files: DATA/NAME, else DATA/FAMILY if generated, else DATA."""
    data = pathlib.Path(data)
    places = [data / name, *(data / one for one in [generated.family(name)] if one)]
    return next((place for place in places if place.is_dir()), data)


def load(
    name: str, folder: Folder, limit: int | None = None, tokenizer: Tokenizer | None = None
) -> Benchmark:
    """Load a benchmark from a local folder with its files; nothing is downloaded.

    Args:
      name: key of `LOADERS`, or a name in one of the forms `generated.FORMS`.
      folder: folder of the files.
      limit: maximum number of questions, at least 1; None loads all. Published files then need only
        as many rows as the limit takes.
      tokenizer: tokenizer of the policy; generated benchmarks measure their length in its tokens.

    Raises:
      ValueError: if the name is unknown, or the files or their number of rows are not as published.
      FileNotFoundError: if the folder or a file in it is missing.
      ImportError: if a package that the benchmark needs is missing; the message names it.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: must be at least 1")
    if generated.family(name):
        return generated.load(name, folder, limit, tokenizer)
    if name not in LOADERS:
        known = ", ".join((*LOADERS, *generated.FORMS))
        raise ValueError(f"benchmark {name!r} is unknown; there are {known}")
    benchmark = LOADERS[name](folder, limit)
    if twice := [id for id, n in Counter(item.id for item in benchmark.items).items() if n > 1]:
        raise ValueError(f"{name}: two rows have the id {twice[0]!r}. {HELP}")
    return benchmark
