"""Questions that a training run of ours generated, to measure their difficulty for another policy.

1. Accepted questions in a run's episodes (runtime/files/episodes.py) are asked if their documents
   are stored. All other questions are counted and logged.
2. The answering policy is an external responder that reads all documents of the cluster, with the
   prompt of the run (algorithm.prompts in config.json; "full" if there is no config.json).
3. The task's rule scores the answer, read leniently. A judge is asked except for letters.
   Questions with a reference that can never score are left out; the log names them.
4. Answers are averaged by training step and task, because the mix of tasks changes while a policy
   trains. Difficulty is 1 - pass@1 (paper section 4.3, Figure 4: a line for each task).
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from etils import epath

from spell_jax.data.clusters import SURROGATE, TASKS
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.evaluation.benchmarks.published import HELP, Folder
from spell_jax.runtime.files.episodes import episode_files, read_episodes
from spell_jax.runtime.files.jsonl import read_json
from spell_jax.runtime.files.paths import CONFIG_FILE
from spell_jax.selfplay import cloze, given_questions, prompts, rules

T = TypeVar("T")

NAME = "own_questions"
EXTRACT = "lenient"
# Maximum number of questions per step: pass@1 then has a standard error of at most 0.5 / sqrt(64) =
# 0.06 from the choice of questions.
PER_STEP = 64

log = logging.getLogger(__name__)


def load(folder: Folder, limit: int | None = None) -> Benchmark:
    """Load the questions of a run, at most `PER_STEP` per step, with the fields "step" and "task".

    A limit spreads the questions evenly over the steps. Raises ValueError if no question can be
    asked, or config.json is not a run's config; FileNotFoundError if there are no episodes, or the
    run's own prompt files no longer exist.
    """
    if not episode_files(folder):
        raise FileNotFoundError(f"{folder}: must have episodes/ of a run. {HELP}")
    wording = _load_prompts(epath.Path(folder) / CONFIG_FILE)
    left_out: Counter[str] = Counter()
    items: list[BenchmarkItem] = []
    for step, episodes in itertools.groupby(read_episodes(folder), key=operator.itemgetter(0)):
        step_items = list(_items(step, [record for _, record in episodes], wording, left_out))
        chosen_items = spread_inside(step_items, PER_STEP)
        left_out[f"over {PER_STEP} a step"] += len(step_items) - len(chosen_items)
        items += chosen_items
    counts = f"left out: {dict(+left_out)}"
    log.info("%s: %d questions; %s", folder, len(items), counts)
    if not items:
        raise ValueError(
            f"{folder}: no accepted question with its documents in episodes/; {counts}. A run "
            "keeps documents up to config.episode_characters characters a step"
        )
    return Benchmark(
        name=NAME,
        title="own questions",
        items=tuple(items if limit is None else spread_inside(items, limit)),
        extract=lambda text, item: rules.extract_answer(text, item.fields["task"], EXTRACT),
        score=lambda text, item: rules.score(
            text, item.references[0], item.fields["task"], extract=EXTRACT
        ),
        judged=True,
        state=lambda text, item: rules.stated_answer(text, item.fields["task"], EXTRACT),
        by=("step", "task"),
    )


def _load_prompts(config: epath.Path) -> prompts.Prompts:
    if not config.exists():
        return prompts.load("full")
    try:
        name = read_json(config)["algorithm"]["prompts"]
    except (ValueError, KeyError, TypeError) as error:
        message = f"{config}: must be a run's, with algorithm.prompts ({error!r})"
        raise ValueError(message) from error
    return prompts.load(name)


def spread_inside(values: Sequence[T], count: int) -> list[T]:
    """Choose at most `count` of the values, evenly spaced and in their order."""
    count = min(count, len(values))
    # The middle of each of `count` equal parts, so that neither end is preferred.
    return [values[(2 * i + 1) * len(values) // (2 * count)] for i in range(count)]


def _items(
    step: int,
    records: Sequence[dict[str, Any]],
    wording: prompts.Prompts,
    left_out: Counter[str],
) -> Iterator[BenchmarkItem]:
    """Yield a step's questions that can be asked; count in `left_out` why others cannot."""
    # Not every episode of a cluster has its documents; one is enough.
    texts = {str(r.get("cluster")): r["documents"] for r in records if r.get("documents")}
    for i, record in enumerate(records):
        documents = texts.get(str(record.get("cluster")))
        if record.get("status") != "accepted":
            left_out["not accepted"] += 1
        elif documents is None:
            left_out["without documents"] += 1
        elif not _is_complete(record, documents):
            left_out["damaged"] += 1
        elif reason := given_questions.unscorable(record["reference"], record["task"], EXTRACT):
            left_out["can never score"] += 1
            place, reference = f"step {step}, episode {i + 1}", record["reference"]
            log.warning("%s: left out (reference = %.100r %s)", place, reference, reason)
        else:
            task, question = record["task"], record["question"]
            # The sentence with the gap answers its own question.
            documents = cloze.hide(documents, [record.get("hidden", "")])
            prompt = wording.responder(task, documents, question)
            judged, fields = task != "multiple_choice", {"step": step, "task": task}
            yield BenchmarkItem(
                f"{step}-{i}", prompt, question, (record["reference"],), fields, judged
            )


def _is_complete(record: dict[str, Any], documents: Any) -> bool:
    if not isinstance(documents, list) or record.get("task") not in TASKS:
        return False
    texts = (record.get("question"), record.get("reference"), record.get("hidden", "x"), *documents)
    return all(isinstance(t, str) and t and not SURROGATE.search(t) for t in texts)
