"""Role-specific dynamic sampling: which groups and rows an update is made of (paper section 3.3).

1. `split_groups`: responder groups whose rewards differ, the first N in request order; the rest of
   them is surplus. Their questions are the questioner's good rows.
2. `questioner_negatives`: as many bad questioner rows, drawn task by task.
3. `eligible_verifier_group`, `verifier_groups`: judged answers whose votes teach something, few of
   them, drawn uniformly.

Spec sections 6 and 7. Everything is plain data in request order in, positions in that data out;
random draws come from the generator that is handed in, so a step can be repeated exactly.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from spell_jax.selfplay.rewards import majority


def split_groups(
    group_rewards: Sequence[Sequence[float]], wanted: int
) -> tuple[list[int], list[int]]:
    """Positions of the responder groups to train on, and of the surplus (spec 7.1 and 7.2).

    A group is usable when its G final rewards are not all equal. The first `wanted` usable groups
    are kept; those behind them are surplus. Groups without spread are in neither list.
    """
    usable = [at for at, rewards in enumerate(group_rewards) if len(set(rewards)) > 1]
    return usable[:wanted], usable[wanted:]


def questioner_negatives(
    good_tasks: Sequence[str], bad_tasks: Sequence[str], ratio: float, rng: np.random.Generator
) -> list[int]:
    """Positions in the bad pool of the rows to train on, ascending (spec 7.4).

    `good_tasks`: the task of each good questioner row. `bad_tasks`: the task of each row of the
    pool (bad format, ungrounded, no reward spread). Tasks are served from the most frequent good
    one down (ties: the one seen first): int(ratio * good rows) plus what earlier tasks lacked,
    drawn without replacement. What is missing at the end stays missing, and a task without good
    rows gets none.
    """
    pool: dict[str, list[int]] = {}
    for at, task in enumerate(bad_tasks):
        pool.setdefault(task, []).append(at)
    drawn: list[int] = []
    shortfall = 0
    for task, good in Counter(good_tasks).most_common():
        wanted = int(ratio * good) + shortfall
        drawn += _draw(pool.get(task, []), wanted, rng)
        shortfall = max(0, wanted - len(pool.get(task, [])))
    return sorted(drawn)


def eligible_verifier_group(
    votes: Sequence[int],
    rule_score: float,
    *,
    low: float = 0.51,
    high: float = 0.99,
    consistency: bool = True,
) -> bool:
    """Whether the G_v votes on one answer may be trained on (spec section 6).

    The verdict must not be "ignore"; its share of the well-formed votes lies in [low, high], which
    leaves out unanimous votes and ties; with the `consistency` gate, it equals the rule's score.
    """
    verdict = majority(votes)
    if verdict == -1 or (consistency and verdict != rule_score):
        return False
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
    """Positions of the eligible verifier groups to train on, ascending (spec sections 6 and 14).

    `verdicts`: the majority, 1 or 0, of each eligible group. int(responder_rows * ratio /
    group_size) groups are drawn uniformly; of fewer eligible ones all are used. `balance` draws as
    many yes as no groups, and so no more than twice the scarcer kind: one-sided verdicts teach a
    verifier to stop looking.
    """
    wanted = int(responder_rows * ratio / group_size)
    if not balance:
        return sorted(_draw(range(len(verdicts)), wanted, rng))
    sides = [[at for at, verdict in enumerate(verdicts) if verdict == side] for side in (1, 0)]
    each = min(wanted // 2, *map(len, sides))
    return sorted(at for side in sides for at in _draw(side, each, rng))


def _draw(positions: Sequence[int], wanted: int, rng: np.random.Generator) -> list[int]:
    """`wanted` of the positions without replacement; all of them if there are fewer."""
    chosen = rng.permutation(len(positions))[:wanted]
    return [positions[at] for at in chosen]
