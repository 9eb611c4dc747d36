"""RLVR on a static set of questions: the baseline of self-play.

1. The set is given (data/questions.py), or written: in the first step the starting policy writes
   questions as in SPELL, once. Questions that pass SPELL's filters form the set.
2. Every step takes questions of the set in rounds, until enough have mixed rewards, and answers,
   rewards and trains the responder as SPELL does. The reward "rule" is plain RLVR (SPELL, Appendix
   E.5); "max" with a verifier is the matched control. Questions are dealt epoch after epoch, each
   at most once an epoch: given ones by the weights of their tasks, written ones with
   `questions_per_cluster` K about a cluster together. A step asks no question twice. No questioner
   group is trained on.
"""

from __future__ import annotations

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.rlvr.config import RlvrConfig
from spell_jax.algorithms.rlvr.question_sets import make_question_set
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.algorithms.spell.answering import VerifiedAnswering
from spell_jax.algorithms.spell.groups import role_groups
from spell_jax.algorithms.spell.metrics import count_questions


def make_rlvr(config: RlvrConfig, context: AlgorithmContext) -> StaticAlgorithm:
    """Make the algorithm from its parts: questions, answers, and groups of two roles."""
    answering = VerifiedAnswering(config, context)
    return StaticAlgorithm(
        make_question_set(config, context, short_contexts=config.responder.names_documents),
        answering.answer_batches,
        lambda episodes, key: role_groups(episodes, key, config, answering),
        lambda episodes: count_questions(episodes, config, config.verifier),
    )
