"""RLVR on a static set: written once, kept in the state, no questioner's rows."""

from __future__ import annotations

import json

import pytest

from spell_jax.games.rlvr import Rlvr, RlvrConfig
from tests.games.scripted import (
    MATH,
    PROMPTS,
    QA,
    ROWS,
    VERDICTS,
    Row,
    Script,
    ScriptedModels,
    by_role,
    make_game,
    read,
)

ACCEPTED = ["Q00", "Q01", "Q02", "Q10", "Q11", "Q12", "Q13", "Q14", "Q15", "Q16", "Q17"]


def new_game(rows=ROWS, static: int = len(ROWS), **options) -> Rlvr:
    return Rlvr(RlvrConfig(static), make_game(rows, **({"verifier_share": 1.0} | options)))


def new_ask(rows=ROWS, **options) -> ScriptedModels:
    return ScriptedModels(Script(rows, verdicts=VERDICTS, **options))


def stems(episodes) -> list[str]:
    return sorted("Q" + e.question.split("Q")[1][:2] for e in episodes)


def test_the_set_is_written_once():
    game, ask = new_game(), new_ask()
    first = game.play(ask, 1)
    assert [c.role for c in ask.calls] == ["questioner", "responder", "responder", "verifier"]
    assert stems(first) == ACCEPTED  # what passed parsing and the filter
    ask.calls.clear()
    second = game.play(ask, 2)
    assert [c.role for c in ask.calls] == ["responder", "verifier"]
    assert stems(second) == ACCEPTED
    assert [e.question for e in first] != [e.question for e in second]  # in another order
    assert game.metrics(second).means()["static_questions"] == 11
    assert not game._spell.memory  # nothing is remembered: nobody asks


def test_all_proposals_asked_for_are_made():
    game, ask = new_game(static=40), new_ask()
    game.play(ask, 1)
    proposed = [len(c.prompts) for c in ask.calls if c.role == "questioner"]
    assert proposed == [18, 18, 18]  # whole rounds, at least 40 in all


def test_a_step_draws_as_many_questions_as_a_round_has():
    game, ask = new_game(static=54, generation_batch=5), new_ask()
    steps = [game.play(ask, step) for step in range(1, 5)]
    assert [len(episodes) for episodes in steps] == [5] * 4
    assert len({e.question for episodes in steps for e in episodes}) > 5


def test_rows_are_the_responders_and_the_verifiers():
    game, ask = new_game(), new_ask()
    groups = by_role(game.rows(game.play(ask, 1)))
    assert len(groups["responder"]) == 6 and len(groups["verifier"]) == 6
    assert groups["questioner"] == []
    prompt, answers, _ = read(groups["responder"][0])
    assert "d" in prompt.split(".")[0] and len(answers) == 4
    plain, ask = new_game(responder_reward="rule"), new_ask()
    groups = by_role(plain.rows(plain.play(ask, 1)))
    assert groups["responder"] and groups["verifier"] == []
    assert "verifier" not in {c.role for c in ask.calls}


def test_anchored_references_are_part_of_the_set():
    rows = [Row(QA, "ok", 0, 2, 1, 4), Row(MATH, "ok", 0, 2, 1, 4), Row(QA, "ok", 0, 1, 1, 1)]
    game = new_game(rows, static=3, reference="anchored")
    ask = new_ask(rows, anchors={0: ("beta0",), 1: ("1", "2", "3", "4")})
    first = game.play(ask, 1)
    assert game.models == ("anchor",)
    references = {e.question[:3]: e.reference for e in first}
    assert references == {"Q00": "beta0", "Q02": "alpha2"}
    game.play(ask, 2)
    assert sum(c.model == "anchor" for c in ask.calls) == 1  # asked for the set, not again


@pytest.mark.parametrize("reward", ["max", "random"])
def test_a_game_goes_on_from_its_state(reward):
    def told(game, ask, steps):
        found = []
        for step in steps:
            episodes = game.play(ask, step)
            found.append([game.record(e) for e in episodes])
            found.append([read(g) for g in game.rows(episodes)])
        return found

    options = {"responder_reward": reward, "generation_batch": 9, "verifier_share": 0.5}
    whole = told(new_game(**options), new_ask(), range(1, 5))
    game = new_game(**options)
    told(game, new_ask(), (1, 2))
    state = json.loads(json.dumps(game.state_dict()))
    resumed, ask = new_game(**options), new_ask()
    resumed.load_state_dict(state)
    assert told(resumed, ask, (3, 4)) == whole[4:]
    assert "questioner" not in {c.role for c in ask.calls}
    assert resumed.state_dict() == game.state_dict()


def test_nothing_to_ask_is_an_empty_step():
    rows = [Row(QA, "bad_json", 0, 0, 0, 0)]
    game, ask = new_game(rows, static=2), new_ask(rows)
    assert game.play(ask, 1) == []
    assert game.rows([]) == []
    assert game.metrics([]).means()["static_questions"] == 0


def test_episodes_keep_what_the_questioner_read():
    game, ask = new_game(), new_ask()
    episode = next(e for e in game.play(ask, 1) if e.question == "Q00 what?")
    assert len(episode.shown) == 2 and episode.cluster.id == "d0" and episode.task == QA
    responder = [c for c in ask.calls if c.role == "responder"][-1]
    assert PROMPTS.responder(QA, episode.cluster.documents, "Q00 what?") in responder.prompts


def test_a_bad_setting_is_named():
    with pytest.raises(ValueError, match=r"game\.static_questions = 0"):
        RlvrConfig(0)
