"""Preference loss of a micro-batch (DPO): chosen and rejected answer of a group, in one row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from spell_jax.learner import packing
from spell_jax.learner.token_sums import sum_by_answer

SUMS = ("preference_loss", "preference_accuracy", "chosen_nll", "chosen_reward", "rejected_reward")


def preference_loss(
    logprobs: Float32[Array, "B A"],
    batch: packing.MicroBatch,
    beta: float,
    preference_weight: float = 1.0,
    nll_weight: float = 0.0,
    align_weight: float = 0.0,
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """Sum the DPO loss of a micro-batch's pairs and the negative log-likelihood of chosen answers.

    With the implicit reward r(y) = beta (log pi(y) - log pi_ref(y)), sums over the answer's tokens,
    a pair of chosen y_w and rejected y_l costs -log sigmoid(r(y_w) - r(y_l)) (Rafailov et al. 2023,
    arXiv 2305.18290, Eq. 7). pi_ref may read another prompt than pi: in LongPO (Chen et al. 2025,
    arXiv 2502.13922) it reads the short context, pi the long one.

    `batch.old_logprob` has the reference's logprobs and `batch.advantage` 1 for the tokens of
    chosen answers, -1 for rejected answers. A group's tokens share the group's margin. The weights
    of the tokens add up to the pair's weight, half for each answer (aggregation "sequence_mean").

    With align_weight, the short-to-long reward alignment of SoLoPO is added (Sun et al. 2025, arXiv
    2505.11166): |r(y_w | x_long) - r(y_w | x_short)|, the chosen answer after its group's prompt
    and after the aligned group's prompt. Tokens of the aligned group have advantage 0.
    """
    ratio = logprobs - batch.old_logprob
    # With signs +-1 in `advantage`, one sum over a group is r(y_w) - r(y_l), at each token.
    margin = beta * sum_by_answer(batch.advantage * ratio, batch.group)
    reward = beta * sum_by_answer(ratio, batch.answer)
    # An answer holds half of the pair's weight. Twice that is the mean over chosen answers alone.
    chosen_weight, rejected_weight = (
        2 * batch.weight * (sign * batch.advantage > 0) for sign in (1, -1)
    )
    # log_sigmoid stays finite where sigmoid itself rounds to 0.
    preferred = -jnp.sum(batch.weight * jax.nn.log_sigmoid(margin))
    nll = -jnp.sum(chosen_weight * logprobs)
    sums = {
        "preference_loss": preferred,
        "preference_accuracy": jnp.sum(batch.weight * (margin > 0)),
        "chosen_nll": nll,
        "chosen_reward": jnp.sum(chosen_weight * reward),
        "rejected_reward": jnp.sum(rejected_weight * reward),
    }
    value = preference_weight * preferred + nll_weight * nll
    if align_weight:
        # -1 at the chosen answer, +1 at its copy after the aligned prompt, 0 at the rejected
        # answer: the sum over the group is the difference between both rewards of y_w.
        sign = jnp.where(batch.advantage > 0, -1.0, 1.0 * (batch.advantage == 0))
        distance = jnp.abs(beta * sum_by_answer(sign * ratio, batch.group))
        sums["alignment"] = jnp.sum(chosen_weight * distance)
        value += align_weight * sums["alignment"]
    return value, sums
