"""RLVR on a static set of questions: the baseline of self-play.

1. The set is given (data/questions.py: any JSONL of documents, question, answer, task), or written:
   in the first step the starting policy writes questions as in SPELL, once. Those that pass SPELL's
   filters are the set, with their references (the frozen reader's, if it is configured).
2. Every step takes some questions of the set, and answers, rewards and trains the responder as
   SPELL does, with the configured reward. "rule" is plain RLVR (SPELL, Appendix E.5); "max" with a
   verifier is the matched control. Given questions are dealt by the weights of their tasks, epoch
   after epoch. Written ones are sampled at random.
3. No new questions are written afterwards, and no questioner group is trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import Annotation, Key, Models, RolloutBudget
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import Episode
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import Question
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime.config import check_least
from spell_jax.runtime.metrics import Metrics

_NOTHING_GIVEN: Mapping[str, Question] = {}


@dataclasses.dataclass(frozen=True)
class RlvrConfig(SpellConfig):
    """SPELL's fields; those of the questioner matter only if questions are written.

    Attributes:
      static_questions: number of proposals for the static set, of which those that pass the filters
        are kept. Unused with given questions.
    """

    name: str = "rlvr"
    static_questions: int = 960

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.", static_questions=1)

    def budgets(self) -> list[RolloutBudget]:
        """Upper bounds of a step after the set was written."""
        return self.round_budgets(writes=False)

    def budget_summary(self) -> str:
        """Words that introduce the budgets."""
        return (
            f"{self.generation_batch} of {self.static_questions} questions, written once (or of "
            "those given); a step asks for"
        )


class Rlvr:
    """The algorithm; see base.Algorithm. All but the origin of the questions is SPELL's."""

    trained = ()

    def __init__(
        self, config: RlvrConfig, spell: Spell, given: Mapping[str, Question] = _NOTHING_GIVEN
    ):
        """Makes the algorithm.

        Args:
          config: the config.
          spell: instance whose methods write, answer, reward and select. With given questions, its
            stream deals their documents (the source of questions.as_clusters); otherwise it deals
            the clusters that questions are written about.
          given: questions by cluster id (the mapping of questions.as_clusters). Their references
            are kept, whatever config.reference_source is.
        """
        self.config = config
        self.models = () if given else spell.models
        self._spell = spell
        self._given = given
        self._questions: list[dict[str, Any]] = []

    def rollout(self, models: Models, key: Key, step: int) -> list[Episode]:
        """Answers to questions of the set; if none are given, the first step writes the set."""
        rng = np.random.default_rng([*key])
        if self._given:
            episodes = self._deal()
        else:
            if not self._questions:
                self._questions = self._write(models, rng)
            episodes = self._sample(key)
        spell = self._spell
        episodes = spell.ask_judge(models.run_all(spell.solve, episodes))
        # No questioner took part in the step, so it gets no reward.
        return [dataclasses.replace(e, reward=None) for e in spell.reward(episodes, rng)]

    def _deal(self) -> list[Episode]:
        """The next given questions; none twice in a step."""
        stream = self._spell.stream
        dealt = stream.next(min(self._spell.config.generation_batch, len(stream)))
        return [_given_episode(self._given[cluster.id], cluster) for _, cluster in dealt]

    def _sample(self, key: Key) -> list[Episode]:
        """A random sample of the written questions."""
        if not self._questions:
            return []
        spell = self._spell
        rng = np.random.default_rng([*key, 3])  # Spell uses [*key], [*key, 1] and [*key, 2]
        order = rng.permutation(len(self._questions))[: spell.config.generation_batch]
        questions = [self._questions[i] for i in order]
        clusters = spell.stream.read([question["cluster"] for question in questions])
        return [_written_episode(*pair) for pair in zip(questions, clusters, strict=True)]

    def _write(self, models: Models, rng: np.random.Generator) -> list[dict[str, Any]]:
        """The static set, as `state_dict` stores it."""
        spell = self._spell
        questions: list[dict[str, Any]] = []
        for _ in range(-(-self.config.static_questions // spell.config.generation_batch)):
            questions += [
                {
                    "task": e.task,
                    "cluster": e.cluster.id,
                    "shown": list(e.shown),
                    "question": e.question,
                    "reference": e.reference,
                }
                for e in models.run_all(spell.write, spell.start_episodes(rng))
                if e.status == "accepted"
            ]
        return questions

    def groups(
        self, episodes: Sequence[Episode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """Responder (and verifier) groups; without proposals there are no questioner groups."""
        groups, annotations = self._spell.groups(episodes, key)
        return groups, [_without_questioner(annotation) for annotation in annotations]

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """SPELL's metrics and the size of the set."""
        metrics = self._spell.metrics(episodes)
        metrics.add("static_questions", len(self._spell.stream if self._given else self._questions))
        return metrics

    def record(self, episode: Episode, annotation: Annotation) -> dict[str, Any]:
        """See spell.episode.record."""
        return self._spell.record(episode, annotation)

    def cluster(self, episode: Episode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        """SPELL's state and the written questions."""
        return {"spell": self._spell.state_dict(), "questions": self._questions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spell.load_state_dict(state["spell"])
        self._questions = list(state["questions"])


def _without_questioner(annotation: Annotation) -> Annotation:
    used = {role: use for role, use in annotation.used.items() if role != "questioner"}
    return dataclasses.replace(annotation, used=used)


def _given_episode(question: Question, cluster: Cluster) -> Episode:
    return Episode(
        question.task,
        cluster,
        shown=(),  # no questioner read any document
        history=(),
        status="accepted",
        question=question.question,
        reference=question.answer,
        own_reference=question.answer,
    )


def _written_episode(question: dict[str, Any], cluster: Cluster) -> Episode:
    return Episode(
        question["task"],
        cluster,
        shown=tuple(question["shown"]),
        history=(),
        status="accepted",
        question=question["question"],
        reference=question["reference"],
        own_reference=question["reference"],
    )
