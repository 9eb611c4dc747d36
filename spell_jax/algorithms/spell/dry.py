"""Texts of SPELL's three roles in a dry run, and of other algorithms with SPELL's prompts."""

from __future__ import annotations

import json

from spell_jax.algorithms.dry import RIGHT, WRONG, DryCall, DryReplies, in_letters
from spell_jax.algorithms.spell.config import QuestionsConfig
from spell_jax.algorithms.spell.sections import READER

_QUESTION_WORDS = 30  # about 64 tokens of a dry run, which has 4 bytes a token


def write_replies(config: QuestionsConfig, call: DryCall) -> DryReplies:
    """Write a proposal, answers or verdicts. A question that shall not pass is ungrounded."""
    if call.agent == "questioner":
        # Without the filter, nothing but a bad format rejects a question.
        if not (call.passes or config.questioner.grounding_samples):
            return DryReplies(["no question"] * call.count)
        # No two questions have words in common: they would be duplicates.
        name = in_letters(call.number)
        words = " ".join(f"{name}x{in_letters(i)}" for i in range(_QUESTION_WORDS))
        record = json.dumps({"question": words, "answer": RIGHT})
        return DryReplies([f"```json\n{record}\n```"] * call.count)
    if call.agent == "verifier":
        votes = ["[[NO]]" if WRONG in call.prompt else "[[YES]]"] * call.count
        # One vote differs from the majority, so that the votes can be trained on.
        if call.count > 1:
            votes[-1] = "[[YES]]" if votes[0] == "[[NO]]" else "[[NO]]"
        return DryReplies(votes, is_verdict=True)
    answers = call.answers
    if call.agent == READER:
        answers = [RIGHT] * call.count
    elif RIGHT not in call.prompt:  # without documents
        answers = [WRONG if call.passes else RIGHT] * call.count
    # The name differs: equal answers would be no preference pair.
    name = in_letters(call.number)
    return DryReplies([f"{name}. The correct answer is {answer}." for answer in answers])
