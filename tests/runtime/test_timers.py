from __future__ import annotations

from spell_jax.runtime.timers import Stopwatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_is_spent_on_one_thing():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1
    watch.enter("play")
    clock.now += 10
    watch.spend({"questioner": 4.0, "responder": 3.0})
    watch.enter("update")
    clock.now += 20
    watch.spend({"responder": 5.0, "play": 2.0})  # rollout meanwhile
    assert watch.take() == {
        "start": 1.0,
        "play": 5.0,
        "questioner": 4.0,
        "responder": 8.0,
        "update": 13.0,
    }
    clock.now += 2
    watch.enter("play")
    clock.now += 1
    watch.enter("update")
    assert watch.take() == {"update": 2.0, "play": 1.0}


def test_what_is_spent_on_what_goes_on_changes_nothing():
    clock = Clock()
    watch = Stopwatch(clock)
    watch.enter("play")
    clock.now += 3
    watch.spend({"play": 2.0})
    assert watch.take() == {"start": 0.0, "play": 3.0}
