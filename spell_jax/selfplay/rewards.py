"""Rewards of the three roles, from votes and rule scores (paper section 3.2, Eq. 4 to 7).

Votes are 1 (yes), 0 (no) or -1 (malformed), one for each of the G_v verifier samples of one answer.
"""

import math
from collections.abc import Sequence

BAD_FORMAT = -1.0  # questioner: the output could not be parsed
UNGROUNDED = -0.5  # questioner: answered without documents, or (anchored) without agreement

MAPPINGS = ("gaussian", "azr", "r_zero")


def majority(votes: Sequence[int]) -> int:
    """The verdict of G_v votes: 1, 0, or -1 when the verifier is to be ignored (Eq. 4, spec 14).

    -1 if malformed votes strictly outnumber both yes and no, or there are no votes; else 1 if more
    than half of all votes say yes; else 0.
    """
    yes, no, malformed = (list(votes).count(value) for value in (1, 0, -1))
    if not votes or malformed > max(yes, no):
        return -1
    return int(yes > len(votes) / 2)


def verifier_rewards(votes: Sequence[int], malformed: float = -1.0) -> list[float]:
    """Reward of each vote: 1 if it is the majority's, else 0 (Eq. 5).

    A malformed one earns `malformed`, below 0 so that the format stays alive (spec section 12).
    """
    verdict = majority(votes)
    return [malformed if vote == -1 else float(vote == verdict) for vote in votes]


def combine(rule: float, vote: int) -> float:
    """The responder's reward: the better of rule and majority; a vote of -1 is ignored (Eq. 6)."""
    return max(rule, float(vote)) if vote in (0, 1) else rule


def questioner_reward(
    mean_reward: float, mapping: str = "gaussian", mu: float = 0.5, sigma: float = 0.5 / 3
) -> float:
    """The questioner's reward for a mean responder reward of r (Eq. 7, paper section 4.4).

    gaussian: exp(-(r - mu)^2 / (2 sigma^2)); azr: 1 - r; r_zero: 1 - 2 |r - 1/2|.
    In all three r <= 0 comes back as it is, so that penalties pass through, and r = 1 earns 0.
    Raises ValueError for an unknown mapping where one is needed.
    """
    if mean_reward <= 0:
        return mean_reward
    if mean_reward == 1:
        return 0.0
    match mapping:
        case "gaussian":
            return math.exp(-((mean_reward - mu) ** 2) / (2 * sigma**2))
        case "azr":
            return 1.0 - mean_reward
        case "r_zero":
            return 1.0 - 2.0 * abs(mean_reward - 0.5)
    raise ValueError(f"mapping: {mapping!r} is unknown; it must be one of {', '.join(MAPPINGS)}")
