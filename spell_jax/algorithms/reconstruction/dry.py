"""Texts of the policy of document reconstruction in a dry run."""

from __future__ import annotations

import re

from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.dry import DryCall, DryReplies

_OPTION = re.compile(r"^\(([A-H])\) ", re.MULTILINE)


def write_replies(config: AlgorithmConfig, call: DryCall) -> DryReplies:
    """Write orders of the options in the prompt, which differ if rewards shall be mixed."""
    letters = sorted({*_OPTION.findall(call.prompt)})
    turns = [i % len(letters) if call.mixed else 0 for i in range(call.count)]
    orders = [", ".join(letters[turn:] + letters[:turn]) for turn in turns]
    return DryReplies([rf"\boxed{{{order}}}" for order in orders])
