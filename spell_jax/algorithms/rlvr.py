"""RLVR on a static set of questions: the baseline that self-play is held against.

1. The set is given (data/questions.py: any JSONL of documents, question, answer, task), or else
   written: the first step lets the starting policy write questions as in SPELL, once; those that
   pass its filters are the set, references included (anchored ones, if the algorithm has such).
2. Every step takes some of the set, answers, rewards and trains the responder as SPELL does, with
   the reward that is configured ("rule" is plain RLVR, SPELL's Appendix E.5; "max" with a verifier
   is the matched control). Given questions are dealt by their tasks' weights, epoch after epoch; of
   written ones a step draws at random.
3. Nobody writes new questions, and no question is trained on as a questioner's row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import Models, RolloutBudget
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import Episode
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import Question
from spell_jax.learner.packing import Group
from spell_jax.runtime.config import check_least
from spell_jax.runtime.metrics import Metrics

_NOTHING_GIVEN: Mapping[str, Question] = {}


@dataclasses.dataclass(frozen=True)
class RlvrConfig(SpellConfig):
    """SPELL's fields, of which those of the questioner matter only where questions are written.

    Attributes:
      static_questions: proposals for the static set; those that pass the filters stay. Unused with
        given questions.
    """

    name: str = "rlvr"
    static_questions: int = 960

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.", static_questions=1)

    def budgets(self) -> list[RolloutBudget]:
        return self.round_budgets(writes=False)

    def budget_summary(self) -> str:
        return (
            f"{self.generation_batch} of {self.static_questions} questions, written once (or of "
            "those given); a step asks for"
        )


class Rlvr:
    """The algorithm; everything but the questions' origin is SPELL's."""

    trained = ()

    def __init__(
        self, config: RlvrConfig, spell: Spell, given: Mapping[str, Question] = _NOTHING_GIVEN
    ):
        """Args: with `given` questions, `spell.stream` deals their documents: it is made of the
        source that questions.as_clusters returns, and `given` is the mapping beside it. Without
        any it deals the clusters that questions are written about. References stay as given,
        whatever the algorithm's `reference`."""
        self.config = config
        self.models = () if given else spell.models
        self._spell = spell
        self._given = given
        self._questions: list[dict[str, Any]] = []

    def play(self, models: Models, step: int) -> list[Episode]:
        """Answers to questions of the set; if none are given, the first step writes the set."""
        self._spell.begin(step)
        episodes = self._deal() if self._given else self._draw(models, step)
        models.together(self._spell.solve, episodes)
        self._spell.ask_judge(episodes)
        self._spell.reward(episodes)
        for episode in episodes:
            episode.reward = None  # of a questioner: nobody asked in this step
        return episodes

    def _deal(self) -> list[Episode]:
        """The next of the given questions; none twice in a step."""
        stream = self._spell.stream
        dealt = stream.next(min(self._spell.config.generation_batch, len(stream)))
        return [_given_episode(self._given[cluster.id], cluster) for _, cluster in dealt]

    def _draw(self, models: Models, step: int) -> list[Episode]:
        """Some of the written questions."""
        if not self._questions:
            self._questions = self._write(models)
        if not self._questions:
            return []
        spell = self._spell
        rng = np.random.default_rng([spell.seed, step, 3])  # 0 to 2 are spell's own draws
        order = rng.permutation(len(self._questions))[: spell.config.generation_batch]
        questions = [self._questions[i] for i in order]
        clusters = spell.stream.read([question["cluster"] for question in questions])
        return [_written_episode(*pair) for pair in zip(questions, clusters, strict=True)]

    def _write(self, models: Models) -> list[dict[str, Any]]:
        spell = self._spell
        questions: list[dict[str, Any]] = []
        for _ in range(-(-self.config.static_questions // spell.config.generation_batch)):
            batch = spell.invite()
            models.together(spell.write, batch)
            questions += [
                {
                    "task": e.task,
                    "cluster": e.cluster.id,
                    "shown": list(e.shown),
                    "question": e.question,
                    "reference": e.reference,
                }
                for e in batch
                if e.status == "accepted"
            ]
        return questions

    def rows(self, episodes: Sequence[Episode]) -> list[Group]:
        """Responder (and verifier) groups; there are no questioner's rows without proposals."""
        return self._spell.rows(episodes)

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        metrics = self._spell.metrics(episodes)
        metrics.add("static_questions", len(self._spell.stream if self._given else self._questions))
        return metrics

    def record(self, episode: Episode) -> dict[str, Any]:
        found = self._spell.record(episode)
        del found["used"]["questioner"]
        return found

    def cluster(self, episode: Episode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        return {"spell": self._spell.state_dict(), "questions": self._questions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spell.load_state_dict(state["spell"])
        self._questions = list(state["questions"])


def _given_episode(question: Question, cluster: Cluster) -> Episode:
    return Episode(
        question.task,
        cluster,
        (),  # no questioner read any of them
        (),
        status="accepted",
        question=question.question,
        reference=question.answer,
        own_reference=question.answer,
    )


def _written_episode(question: dict[str, Any], cluster: Cluster) -> Episode:
    return Episode(
        question["task"],
        cluster,
        tuple(question["shown"]),
        (),
        status="accepted",
        question=question["question"],
        reference=question["reference"],
        own_reference=question["reference"],
    )
