"""Questions that a training run of ours generated, to measure their difficulty for another policy.

1. A run's folder has its episodes (runtime/episodes.py), with documents for some clusters. Accepted
   questions whose documents are stored are asked. The others are counted and logged.
2. The answering policy is an external responder that reads all documents of the cluster. Its prompt
   is that of the run (algorithm.prompts in config.json; "full" if there is no config.json).
3. The task's rule scores the answer against the reference. A judge is asked except for letters.
4. Answers are averaged by training step. Difficulty is 1 - pass@1 (paper section 4.3, Figure 4).
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
PER_STEP = 64  # maximum number of questions per step
MAX_TOKENS = 4096  # per answer, as for the other questions about documents

log = logging.getLogger(__name__)


def load(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load the questions of a run, at most `PER_STEP` per step.

    Args:
      folder: workdir of the run, with episodes/.
      limit: maximum number of questions, spread evenly over the steps; None keeps all.

    Returns:
      The benchmark. Its items have the fields "step" and "task".

    Raises:
      ValueError: if no question can be asked, or config.json is not a run's config.
      FileNotFoundError: if there are no episodes, or the run's own prompt files no longer exist.
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
    """Choose at most `count` of the values, evenly spaced and in their order."""
    count = min(count, len(values))
    return [values[(2 * i + 1) * len(values) // (2 * count)] for i in range(count)]


def _askable(
    records: Sequence[dict[str, Any]], left_out: collections.Counter[str]
) -> list[tuple[int, dict[str, Any], list[str]]]:
    """(index in the step, record, documents) of each question of a step that can be asked."""
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
