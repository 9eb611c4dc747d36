"""Question memory: the last solvable questions of each cluster (paper section 3.1, spec 3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spell_jax.selfplay.rules import normalize_answer


@dataclass(frozen=True)
class Entry:
    """One remembered question, as the responder saw it, and its reference answer.

    Attributes:
      documents: indices, in the cluster, of the new documents, or of all documents shown to the
        questioner (QuestionerConfig.memory_documents).
      question: text of the question.
      answer: reference answer.
    """

    documents: tuple[int, ...]
    question: str
    answer: str


class QuestionMemory:
    """The last `capacity` questions of each (task, cluster), oldest first; 0 disables the memory.

    A question is stored unless the cluster has it already, by normalized text. The algorithm pushes
    solvable questions only (Algorithm 1; spec 3). It reads the memory at the start of a step and
    writes to it at the end (spec 12).
    """

    def __init__(self, capacity: int):
        if capacity < 0:
            raise ValueError(
                f"capacity = {capacity}: must be at least 0, which disables the memory"
            )
        self.capacity = capacity
        self._entries: dict[tuple[str, str], list[Entry]] = {}

    def __len__(self) -> int:
        """Return the number of entries in all clusters."""
        return sum(map(len, self._entries.values()))

    def push(self, task: str, cluster: str, entry: Entry) -> bool:
        """Store `entry`; a full cluster evicts its oldest entry. Return whether it was stored."""
        if self.capacity == 0:
            return False
        entries = self._entries.get((task, cluster), [])
        # A repeated question would evict a different question, and the prompt would show it twice.
        if any(_same_text(entry.question, stored_entry.question) for stored_entry in entries):
            return False
        self._entries[task, cluster] = [*entries, entry][-self.capacity :]
        return True

    def get(self, task: str, cluster: str) -> tuple[Entry, ...]:
        return tuple(self._entries.get((task, cluster), ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole content as plain JSON data."""
        return {
            "clusters": [
                {
                    "task": task,
                    "cluster": cluster,
                    "entries": [[list(e.documents), e.question, e.answer] for e in entries],
                }
                for (task, cluster), entries in self._entries.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content; keep only the newest `capacity` entries of each cluster.

        Raises ValueError if `state` is not from `state_dict`. The content is then unchanged.
        """
        try:
            loaded = {
                (row["task"], row["cluster"]): [
                    Entry(tuple(documents), question, answer)
                    for documents, question, answer in row["entries"]
                ]
                for row in state["clusters"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"question memory: cannot read the state ({error!r}); must be from state_dict()"
            ) from error
        newest_entries = {key: entries[-self.capacity :] for key, entries in loaded.items()}
        self._entries = newest_entries if self.capacity else {}


def _same_text(first: str, second: str) -> bool:
    # A question of punctuation only normalizes to an empty string, so compare the raw texts.
    return (normalize_answer(first) or first) == (normalize_answer(second) or second)
