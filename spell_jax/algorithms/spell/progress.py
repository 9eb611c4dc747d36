"""The questioner's reward by the responder's progress on probes (mapping = "progress")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.data.stream import TaskStream
from spell_jax.rollout.replies import Ask, AskModels, Reply
from spell_jax.selfplay import cloze
from spell_jax.selfplay.probes import Probe, ProbeSet
from spell_jax.selfplay.prompts import Prompts


def measure_probes(
    config: SpellConfig, probes: ProbeSet, ask: AskModels, prompts: Prompts, stream: TaskStream
) -> None:
    """Ask all probes again, group_size times each; a prompt over the cap counts as unsolved."""

    # Before the step's questions, so that their reward has the rise since a probe was first
    # answered.
    async def ask_probe(ask: Ask, probe: Probe) -> float:
        (cluster,) = stream.read([probe.cluster])
        documents = cloze.hide(cluster.documents, [probe.hidden])
        text = prompts.responder(probe.task, config.as_read(documents), probe.question)
        (reply,) = await ask("responder", [text], config.group_size)
        return _solve_rate(config, reply, probe.reference, probe.task)

    probes.measure(ask.run_all(ask_probe, probes.probes))


def push_probes(
    config: SpellConfig,
    probes: ProbeSet,
    episodes: Sequence[SpellEpisode],
    rng: np.random.Generator,
) -> None:
    """Turn some of a step's answered questions into probes."""
    new_probes = []
    for e in episodes:
        if e.response is not None:
            # The question's own answers are the probe's first measurement, at no further cost.
            rate = _solve_rate(config, e.response, e.reference, e.task)
            new_probes.append(
                Probe(e.task, e.cluster.id, e.question, e.reference, rate, rate, e.hidden)
            )
    probes.push(new_probes, rng)


def _solve_rate(config: SpellConfig, reply: Reply | None, reference: str, task: str) -> float:
    """Return the share of right answers by the rule alone, whatever else the rewards depend on."""
    # Not the rewards: with a verifier in them, progress would also measure the verifier's drift.
    answers = config.read_answers(() if reply is None else reply.scored_texts, task)
    return float(np.mean(config.score_answers(answers, reference, task) or [0.0]))
