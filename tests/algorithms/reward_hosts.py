"""A reward function in one of two processes, which differs between them and fails in the end.

python -m tests.algorithms.reward_hosts PORT PROCESS        # prints rewards and an error as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from spell_jax.algorithms.own_reward import OwnReward, RewardInput
from tests.algorithms.test_own_reward import make_input
from tests.runtime.hosts.test_distributed import connect


def main() -> None:
    me = connect(*sys.argv[1:])
    calls: list[int] = []

    def reward(answers: Sequence[RewardInput]) -> list[float]:
        calls.append(len(answers))
        if len(calls) > 1:
            raise KeyError("no such key")
        return [me + answer.tokens / 3 for answer in answers]

    own_reward = OwnReward("rewards:reward", reward)
    inputs = [make_input(tokens=tokens) for tokens in (1, 2)]
    rewards, error = own_reward(inputs), ""
    try:
        own_reward(inputs)
    except RuntimeError as failure:
        error = str(failure)
    print(json.dumps({"rewards": rewards, "calls": len(calls), "error": error}))


if __name__ == "__main__":
    main()
