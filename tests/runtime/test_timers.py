from __future__ import annotations

from spell_jax.runtime.timers import PhaseTimer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_second_is_counted_in_one_phase():
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now += 1
    timer.enter("rollout")
    clock.now += 10
    timer.reassign({"questioner": 4.0, "responder": 3.0})
    timer.enter("update")
    clock.now += 20
    timer.reassign({"responder": 5.0, "rollout": 2.0})  # rollout meanwhile
    assert timer.take() == {
        "start": 1.0,
        "rollout": 5.0,
        "questioner": 4.0,
        "responder": 8.0,
        "update": 13.0,
    }
    clock.now += 2
    timer.enter("rollout")
    clock.now += 1
    timer.enter("update")
    assert timer.take() == {"update": 2.0, "rollout": 1.0}


def test_seconds_reassigned_to_the_current_phase_change_nothing():
    clock = Clock()
    timer = PhaseTimer(clock)
    timer.enter("rollout")
    clock.now += 3
    timer.reassign({"rollout": 2.0})
    assert timer.take() == {"start": 0.0, "rollout": 3.0}
