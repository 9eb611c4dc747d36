"""A stream of a built data set in one process, or in one of two that share the reading.

python -m tests.data.hosts PORT PROCESS FOLDER        # prints the clusters as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from spell_jax.data.built import open_source, share_reading
from spell_jax.data.clusters import TASKS, Cluster, ClusterSource, count_words
from spell_jax.data.stream import TaskStream
from tests.runtime.hosts.test_distributed import connect

OPEN = {
    "count_tokens": count_words,
    "max_document_tokens": 24,
    "documents_per_cluster": 4,
    "grouping": "order",
}


def make_batches(source: ClusterSource) -> list[list[Any]]:
    """Return [task, id, documents] of each cluster of three batches."""
    stream = TaskStream(source, TASKS[:2], [1, 1], seed=3)
    batches = [stream.next(count) for count in (7, 8, 30)]
    return [[[task, c.id, list(c.documents)] for task, c in batch] for batch in batches]


def main() -> None:
    port, process, path = sys.argv[1:]
    me = connect(port, process)
    source = open_source(path, **OPEN)
    read_ids: list[list[str]] = []

    def counted(ids: Sequence[str]) -> list[Cluster]:
        read_ids.append(list(ids))
        return source.read(ids)

    def damaged(ids: Sequence[str]) -> list[Cluster]:
        if me == 1:
            raise ValueError(f"{ids[0]} is damaged")
        return source.read(ids)

    batches = make_batches(share_reading(ClusterSource(source.tasks, counted)))
    try:
        share_reading(ClusterSource(source.tasks, damaged)).read(["id02", "id03", "id04"])
        error = ""
    except RuntimeError as failure:
        error = str(failure)
    print(json.dumps({"batches": batches, "read": read_ids, "error": error}))


if __name__ == "__main__":
    main()
