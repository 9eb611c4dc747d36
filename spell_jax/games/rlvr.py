"""RLVR on a static set of questions: the baseline that self-play is held against.

1. The first step lets the starting policy write questions as in SPELL, once: those that pass its
   filters are the set, references included (anchored ones, if the game has anchored references).
2. Every step draws from the set, answers, rewards and trains the responder as SPELL does, with the
   reward that is configured ("rule" is plain RLVR; "max" with a verifier is the matched control).
3. Nobody writes new questions, and no question is trained on as a questioner's row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from spell_jax.data.clusters import Cluster
from spell_jax.games.game import Models
from spell_jax.games.spell import Spell
from spell_jax.games.spell_episode import Episode
from spell_jax.learner.packing import Group
from spell_jax.runtime.metrics import Metrics


@dataclasses.dataclass(frozen=True)
class RlvrConfig:
    """static_questions: proposals made for the set; those that pass the filters stay."""

    static_questions: int = 960

    def __post_init__(self):
        if self.static_questions < 1:
            raise ValueError(f"game.static_questions = {self.static_questions}: must be at least 1")


class Rlvr:
    """The game; everything but the questions' origin is SPELL's."""

    trained = ()

    def __init__(self, config: RlvrConfig, spell: Spell):
        self.config = config
        self.models = spell.models
        self._spell = spell
        self._questions: list[dict[str, Any]] = []

    def play(self, models: Models, step: int) -> list[Episode]:
        """Answers to questions of the set; the first step writes the set."""
        self._spell.begin(step)
        if not self._questions:
            self._questions = self._write(models)
        if not self._questions:
            return []
        spell = self._spell
        rng = np.random.default_rng([spell.seed, step, 3])  # 0 to 2 are spell's own draws
        order = rng.permutation(len(self._questions))[: spell.config.generation_batch]
        questions = [self._questions[i] for i in order]
        clusters = spell.stream.read([question["cluster"] for question in questions])
        episodes = [_episode(*pair) for pair in zip(questions, clusters, strict=True)]
        models.together(spell.solve, episodes)
        spell.ask_judge(episodes)
        spell.reward(episodes)
        return episodes

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
        metrics.add("static_questions", len(self._questions))
        return metrics

    def record(self, episode: Episode) -> dict[str, Any]:
        return self._spell.record(episode)

    def cluster(self, episode: Episode) -> Cluster:
        return episode.cluster

    def state_dict(self) -> dict[str, Any]:
        return {"spell": self._spell.state_dict(), "questions": self._questions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spell.load_state_dict(state["spell"])
        self._questions = list(state["questions"])


def _episode(question: dict[str, Any], cluster: Cluster) -> Episode:
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
