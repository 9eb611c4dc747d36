"""Texts of EAPO's policy and reward model in a dry run."""

from __future__ import annotations

import json

from spell_jax.algorithms.dry import RIGHT, DryCall, DryReplies
from spell_jax.algorithms.eapo.config import REWARD_MODEL, EapoConfig
from spell_jax.selfplay import evidence


def write_replies(config: EapoConfig, call: DryCall) -> DryReplies:
    """Write well-formed answers with evidence, or scores of them that the outcomes confirm."""
    if call.agent == REWARD_MODEL:
        answers = DryCall("responder", "", config.group_size).answers
        scores = [4 if answer == RIGHT else 2 for answer in answers]
        reply = json.dumps({"reason": "as it is", "scores": scores})
        return DryReplies([reply] * call.count, is_verdict=True)
    answers = [evidence.StructuredAnswer("none", "[1] none", "none", a) for a in call.answers]
    return DryReplies([evidence.write_answer(answer) for answer in answers])
