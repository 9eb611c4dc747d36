"""The questioner's reward by the responder's progress on probes (mapping = "progress")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.algorithms.spell.sections import PROGRESS
from spell_jax.data.stream import TaskStream
from spell_jax.rollout.replies import Ask, AskModels, Reply
from spell_jax.selfplay import cloze
from spell_jax.selfplay.probes import Probe, ProbeSet
from spell_jax.selfplay.prompts import Prompts


class ProbeProgress:
    """Probes of a run; with another mapping there are none, and its methods do nothing.

    Attributes:
      is_rewarded: whether the questioner is rewarded for progress.
      probes: questions of earlier steps that are answered again in each step.
    """

    def __init__(self, config: SpellConfig, prompts: Prompts, stream: TaskStream):
        self.is_rewarded = config.questioner.mapping == PROGRESS
        self.probes = ProbeSet(config.questioner.probes)
        self._config, self._prompts, self._stream = config, prompts, stream

    def measure(self, ask: AskModels) -> None:
        """Ask all probes again, group_size times each; a prompt over the cap is unsolved."""
        # Before the step's questions, so that their reward has the rise since a probe was first
        # answered.
        if self.is_rewarded:
            self.probes.measure(ask.run_all(self._ask_probe, self.probes.probes))

    async def _ask_probe(self, ask: Ask, probe: Probe) -> float:
        (cluster,) = self._stream.read([probe.cluster])
        documents = self._config.as_read(cloze.hide(cluster.documents, [probe.hidden]))
        text = self._prompts.responder(probe.task, documents, probe.question)
        (reply,) = await ask("responder", [text], self._config.group_size)
        return self._solve_rate(reply, probe.reference, probe.task)

    def reward(self, e: SpellEpisode) -> float:
        """Return the rise of the solve rate on the probes most like the question."""
        return self.probes.progress(e.task, e.question)

    def push(self, episodes: Sequence[SpellEpisode], rng: np.random.Generator) -> None:
        """Turn some of a step's answered questions into probes."""
        if not self.is_rewarded:
            return
        new_probes = []
        for e in episodes:
            if e.response is not None:
                # The question's own answers are the probe's first measurement, at no further cost.
                rate = self._solve_rate(e.response, e.reference, e.task)
                probe = Probe(e.task, e.cluster.id, e.question, e.reference, rate, rate, e.hidden)
                new_probes.append(probe)
        self.probes.push(new_probes, rng)

    def _solve_rate(self, reply: Reply | None, reference: str, task: str) -> float:
        """Return the share of right answers by the rule alone, whatever else rewards depend on."""
        # Not the rewards: with a verifier in them, progress would also measure the verifier's
        # drift.
        answers = self._config.read_answers(() if reply is None else reply.scored_texts, task)
        return float(np.mean(self._config.score_answers(answers, reference, task) or [0.0]))

    def state_dict(self) -> dict[str, Any]:
        return {"probes": self.probes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.probes.load_state_dict(state["probes"])
