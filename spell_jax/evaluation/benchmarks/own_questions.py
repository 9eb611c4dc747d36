"""The questions that a run of ours has asked itself: how difficult are they for another policy?

1. A run's folder has its episodes (runtime/episodes.py), those of some clusters with the documents.
   Accepted questions whose documents are there are asked; the others are counted.
2. The policy that answers is an external responder: it reads all documents of the cluster, in the
   words of the run (its algorithm.prompts; "full" where there is no config.json), and is scored by
   the task's rule against the reference. A judge is asked about all but letters.
3. Answers are averaged by step. Difficulty is 1 - pass@1 (paper section 4.3, Figure 4).
"""

from __future__ import annotations

import collections
import itertools
import json
import logging
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

from etils import epath

from spell_jax.data.clusters import SURROGATE, TASKS
from spell_jax.evaluation.benchmarks.base import Benchmark, Item
from spell_jax.evaluation.benchmarks.published import HELP, Folder, check_limit
from spell_jax.runtime.episodes import episode_files, read_episodes
from spell_jax.runtime.setup import CONFIG_FILE
from spell_jax.selfplay import prompts, rules

T = TypeVar("T")

NAME = "own_questions"
PER_STEP = 64  # questions of a step, at most
MAX_TOKENS = 4096  # as for the other questions about documents

log = logging.getLogger(__name__)


def load(folder: Folder, limit: int | None = None) -> Benchmark:
    """The questions of a run.

    Args:
      folder: the run's workdir, with episodes/.
      limit: how many, evenly over steps; None: all. Of a step there are at most `PER_STEP`.

    Returns:
      Items with the fields "step" and "task".

    Raises:
      ValueError: no question can be asked; config.json is not a run's.
      FileNotFoundError: there are no episodes, or the run had prompts of its own that are gone.
    """
    check_limit(limit)
    if not episode_files(folder):
        raise FileNotFoundError(f"{folder}: must have episodes/ of a run. {HELP}")
    words = _words(epath.Path(folder) / CONFIG_FILE)
    left_out: collections.Counter[str] = collections.Counter()
    items: list[Item] = []
    for step, some in itertools.groupby(read_episodes(folder), key=operator.itemgetter(0)):
        asked = _askable([record for _, record in some], left_out)
        chosen = evenly(asked, PER_STEP)
        left_out[f"over {PER_STEP} a step"] += len(asked) - len(chosen)
        items += [_item(step, *one, words) for one in chosen]
    told = f"left out: {dict(+left_out)}"
    log.info("%s: %d questions; %s", folder, len(items), told)
    if not items:
        raise ValueError(
            f"{folder}: no accepted question with its documents in episodes/; {told}. A run keeps "
            "documents up to config.episode_characters characters a step"
        )
    return Benchmark(
        name=NAME,
        title="own questions",
        items=tuple(items if limit is None else evenly(items, limit)),
        extract=lambda text, item: rules.extract_answer(text, item.fields["task"]),
        score=lambda text, item: rules.score(text, item.references[0], item.fields["task"]),
        judged=True,
        max_tokens=MAX_TOKENS,
        by=("step",),
    )


def _words(config: epath.Path) -> prompts.Prompts:
    if not config.exists():
        return prompts.load("full")
    try:
        name = json.loads(config.read_text())["algorithm"]["prompts"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{config}: must be a run's, with algorithm.prompts ({error!r})"
        ) from error
    return prompts.load(name)


def evenly(values: Sequence[T], count: int) -> list[T]:
    """At most so many of the values, evenly spread, in their order."""
    count = min(count, len(values))
    return [values[(2 * i + 1) * len(values) // (2 * count)] for i in range(count)]


def _askable(
    records: Sequence[dict[str, Any]], left_out: collections.Counter[str]
) -> list[tuple[int, dict[str, Any], list[str]]]:
    """(place in the step, record, documents) of a step's questions that can be asked."""
    texts: dict[str, list[str]] = {}
    for record in records:
        if record.get("documents"):
            texts[str(record.get("cluster"))] = record["documents"]
    found = []
    for place, record in enumerate(records):
        documents = texts.get(str(record.get("cluster")))
        if record.get("status") != "accepted":
            left_out["not accepted"] += 1
        elif documents is None:
            left_out["without documents"] += 1
        elif not _is_whole(record, documents):
            left_out["damaged"] += 1
        else:
            found.append((place, record, documents))
    return found


def _is_whole(record: dict[str, Any], documents: Any) -> bool:
    if not isinstance(documents, list) or record.get("task") not in TASKS:
        return False
    texts = (record.get("question"), record.get("reference"), *documents)
    return all(isinstance(t, str) and t and not SURROGATE.search(t) for t in texts)


def _item(
    step: int,
    place: int,
    record: dict[str, Any],
    documents: Sequence[str],
    words: prompts.Prompts,
) -> Item:
    task, question = record["task"], record["question"]
    return Item(
        f"{step}-{place}",
        words.responder(task, documents, question),
        question,
        (record["reference"],),
        {"step": step, "task": task},
        judged=task != "multiple_choice",
    )
