"""The question memory: the last solvable questions of every cluster (paper section 3.1, spec 3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spell_jax.selfplay.rules import normalize_answer


@dataclass(frozen=True)
class Entry:
    """One remembered question.

    `documents`: indices, in the cluster, of the documents that go with the question: all that the
    questioner was shown, or the new ones among them (algorithm.memory_documents).
    `question`: as the responder saw it; `answer`: the reference.
    """

    documents: tuple[int, ...]
    question: str
    answer: str


class QuestionMemory:
    """The last `capacity` questions of each (task, cluster), oldest first; 0 remembers nothing.

    A question enters when its mean responder reward lies in [low, high] and the cluster does not
    hold it already, compared by normalized text. By default fully solved questions are stored and
    never solved ones are not (spec 12, row 2). The trainer reads it at the start of a step and
    pushes at the end of it (spec 14).
    """

    def __init__(self, capacity: int, low: float = 0.01, high: float = 1.0):
        """Raises ValueError for a negative capacity or bounds in the wrong order."""
        if capacity < 0:
            raise ValueError(f"capacity: {capacity} is negative; 0 switches the memory off")
        if low > high:
            raise ValueError(f"low: {low} is above high, {high}; it must not be")
        self.capacity = capacity
        self.low = low
        self.high = high
        self._entries: dict[tuple[str, str], list[Entry]] = {}

    def __len__(self) -> int:
        """The number of entries in all clusters."""
        return sum(map(len, self._entries.values()))

    def push(self, task: str, cluster: str, entry: Entry, mean_reward: float) -> bool:
        """Remembers `entry`, the oldest of a full cluster goes; returns whether it was stored."""
        if self.capacity == 0 or not self.low <= mean_reward <= self.high:
            return False
        entries = self._entries.get((task, cluster), [])
        if any(_same_text(entry.question, known.question) for known in entries):
            return False
        self._entries[task, cluster] = [*entries, entry][-self.capacity :]
        return True

    def get(self, task: str, cluster: str) -> tuple[Entry, ...]:
        """The entries of a cluster, oldest first."""
        return tuple(self._entries.get((task, cluster), ()))

    def state_dict(self) -> dict[str, Any]:
        """The whole content as plain JSON data."""
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
        """Replaces the content; of longer histories the newest `capacity` entries are kept.

        Raises ValueError, and changes nothing, when `state` is not what `state_dict` returns.
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
                f"question memory: {error!r} while reading it; it must be what state_dict() returns"
            ) from error
        kept = {key: entries[-self.capacity :] for key, entries in loaded.items()}
        self._entries = kept if self.capacity else {}


def _same_text(first: str, second: str) -> bool:
    # Questions of punctuation alone normalize to nothing: compare those as they are.
    return (normalize_answer(first) or first) == (normalize_answer(second) or second)
