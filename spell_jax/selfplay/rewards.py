"""Rewards of the three roles, from votes and rule scores (paper section 3.2, Eq. 4 to 7).

Votes are 1 (yes), 0 (no) or -1 (malformed), one for each of the G_v verifier samples of an answer.
"""

import math
from collections.abc import Sequence

BAD_FORMAT = -1.0  # questioner: the output could not be parsed
# Questioner: answerable without documents, or the frozen reader's answers do not agree.
UNGROUNDED = -0.5

MAPPINGS = ("gaussian", "azr", "r_zero")


def majority(votes: Sequence[int]) -> int:
    """Return the verdict of G_v votes: 1 if more than half are yes, else 0 (Eq. 4, spec 12).

    -1, to ignore the verifier, if there are no votes, or strictly more malformed votes than yes
    votes and than no votes.
    """
    yes, no, malformed = (list(votes).count(value) for value in (1, 0, -1))
    if not votes or malformed > max(yes, no):
        return -1
    return int(yes > len(votes) / 2)


def verifier_rewards(votes: Sequence[int], malformed: float = -1.0) -> list[float]:
    """Return the reward of each vote: 1 if it equals the majority verdict, else 0 (Eq. 5).

    A malformed vote earns `malformed`.
    """
    # Below 0 by default, as in the public code, so that the policy does not unlearn the format.
    verdict = majority(votes)
    return [malformed if vote == -1 else float(vote == verdict) for vote in votes]


def combine(rule: float, vote: int) -> float:
    """Return the responder's reward: max(rule, vote); a vote of -1 is ignored (Eq. 6)."""
    return max(rule, float(vote)) if vote in (0, 1) else rule


def questioner_reward(
    mean_reward: float, mapping: str = "gaussian", mu: float = 0.5, sigma: float = 0.5 / 3
) -> float:
    """Return the questioner's reward for a mean responder reward r (Eq. 7, paper section 4.4).

    For every mapping, r <= 0 is returned unchanged, and r = 1 gives 0. Otherwise "gaussian" gives
    exp(-(r - mu)^2 / (2 sigma^2)), "r_zero" 1 - 2 |r - 1/2| and "azr" 1 - r. Another
    mapping is a ValueError.
    """
    # Unchanged, so that penalties pass through.
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
