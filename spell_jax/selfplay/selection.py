"""Role-specific dynamic sampling: the groups and rows of an update (paper section 3.3).

The questions of the kept responder groups are the questioner's good rows. Spec sections 6 and 7.
Inputs are plain data in request order; outputs are positions in them. All randomness comes from the
generator argument, so a step can be repeated exactly.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from spell_jax.selfplay.rewards import majority
from spell_jax.selfplay.rules import normalize_answer

ANY, WELL_FORMED = "any", "well_formed"  # votes that conflict
CONFLICTS = (ANY, WELL_FORMED)


def split_groups(
    group_rewards: Sequence[Sequence[float]], wanted: int
) -> tuple[list[int], list[int]]:
    """Return the positions of the responder groups to train on and of the surplus (spec 7.1, 7.2).

    The first `wanted` usable groups are kept, further usable groups are surplus.
    """
    # Usable means not all equal: otherwise all advantages of the group are 0.
    usable = [at for at, rewards in enumerate(group_rewards) if len(set(rewards)) > 1]
    return usable[:wanted], usable[wanted:]


def duplicates(asked: Sequence[tuple[str, str]]) -> list[int]:
    """Return the positions of (cluster, question) that repeat an earlier question of the cluster.

    Two questions are the same if at least 9 of 10 of their different words are in both.
    """
    words_by_cluster: dict[str, list[set[str]]] = {}
    repeats = []
    for at, (cluster, question) in enumerate(asked):
        words = set(normalize_answer(question).split()) or {question}
        earlier = words_by_cluster.setdefault(cluster, [])
        if any(10 * len(words & past) >= 9 * len(words | past) for past in earlier):
            repeats.append(at)
        else:
            earlier.append(words)
    return repeats


def questioner_negatives(
    good_tasks: Sequence[str],
    bad_tasks: Sequence[str],
    ratio: float,
    rng: np.random.Generator,
    *,
    by_task: bool = True,
) -> list[int]:
    """Sample bad questioner rows to train on (spec 7.4): positions in `bad_tasks`, ascending.

    `good_tasks` and `bad_tasks` are the tasks of the good rows and of the bad ones (bad format,
    ungrounded, or equal rewards). Tasks go in descending order of good rows. Each task asks for
    int(ratio * good rows) plus the shortfall of the earlier tasks, sampled without replacement. A
    shortfall after the last task is not filled. A task without good rows gets none. Without
    `by_task`, int(ratio * good rows) are sampled from the bad rows of all tasks together.
    """
    if not by_task:
        return sorted(_sample(range(len(bad_tasks)), int(ratio * len(good_tasks)), rng))
    negatives: list[int] = []
    shortfall = 0
    for task, good in Counter(good_tasks).most_common():
        bad = [at for at, bad_task in enumerate(bad_tasks) if bad_task == task]
        sample_size = int(ratio * good) + shortfall
        negatives += _sample(bad, sample_size, rng)
        shortfall = max(0, sample_size - len(bad))
    return sorted(negatives)


def eligible_verifier_group(
    votes: Sequence[int],
    rule_score: float,
    *,
    low: float = 0.51,
    high: float = 0.99,
    consistency: bool = True,
    conflict: str = WELL_FORMED,
) -> bool:
    """Return whether the G_v votes on one answer may be trained on (spec section 6).

    The verdict must not be -1 (ignore). With the `consistency` gate, it must also equal the rule
    score. `conflict` is one of CONFLICTS. ANY (the paper's section 3.3): some votes equal the
    verdict, and some, which may be malformed, do not. WELL_FORMED (its code): the verdict's share
    of the well-formed votes lies in [low, high], which excludes ties, and groups in which only
    malformed votes differ.
    """
    verdict = majority(votes)
    if verdict == -1 or (consistency and verdict != rule_score):
        return False
    if conflict == ANY:
        return 0 < list(votes).count(verdict) < len(votes)
    well_formed = [vote for vote in votes if vote != -1]
    return low <= well_formed.count(verdict) / len(well_formed) <= high


def verifier_groups(
    verdicts: Sequence[int],
    responder_rows: int,
    group_size: int,
    ratio: float,
    rng: np.random.Generator,
    *,
    balance: bool = False,
) -> list[int]:
    """Sample int(responder_rows * ratio / group_size) eligible verifier groups to train on.

    Uniform; all groups if there are fewer (spec sections 6 and 12). `verdicts` holds the majority
    verdict of each eligible group, 1 or 0, `ratio` is verifier rows per responder row. `balance`
    samples as many yes as no groups. Return positions in `verdicts`, ascending.
    """
    group_count = int(responder_rows * ratio / group_size)
    if not balance:
        return sorted(_sample(range(len(verdicts)), group_count, rng))
    sides = [[at for at, verdict in enumerate(verdicts) if verdict == side] for side in (1, 0)]
    # The rarer verdict decides. One-sided verdicts would teach a verifier to ignore the answers.
    each = min(group_count // 2, *map(len, sides))
    return sorted(at for side in sides for at in _sample(side, each, rng))


def _sample(positions: Sequence[int], wanted: int, rng: np.random.Generator) -> list[int]:
    """Sample `wanted` positions without replacement; all positions if there are fewer."""
    sampled_indices = rng.permutation(len(positions))[:wanted]
    return [positions[at] for at in sampled_indices]
