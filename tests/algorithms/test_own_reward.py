"""Tests of algorithm.reward: a function of the user's in place of the responder's reward."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import spell_jax
from spell_jax.algorithms.own_reward import OwnReward, RewardInput
from spell_jax.algorithms.rlvr.algorithm import make_rlvr
from spell_jax.algorithms.rlvr.config import RlvrConfig
from spell_jax.algorithms.rlvr.qwenlong import QwenLongConfig, make_qwenlong
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.config import read
from spell_jax.configs import tiny
from spell_jax.data.questions import Question
from spell_jax.launch import check
from spell_jax.runtime.config import ConfigError
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.trainer import loop
from tests import noise
from tests.algorithms.preference import runs
from tests.algorithms.scripted import (
    CUT,
    QA,
    ROWS,
    SMALL,
    VERDICTS,
    Deck,
    Script,
    ScriptedModels,
    make_config,
    make_context,
    make_small_config,
    roll_out,
    to_groups,
    to_records,
)
from tests.paths import ROOT
from tests.runtime.hosts.test_distributed import run_two

HERE = "tests.algorithms.test_own_reward"
NAME = "rewards:reward"
GIVEN = tuple(Question(QA, ("d",), f"Q{i}", "right", answers=("right", "ok")) for i in range(3))


def make_input(**fields: Any) -> RewardInput:
    defaults: dict[str, Any] = {
        "question": "Q?",
        "task": QA,
        "documents": ("d",),
        "reference": "right",
        "references": ("right",),
        "text": "The answer is right",
        "prediction": "right",
        "rule_score": 1.0,
        "votes": (),
        "truncated": False,
        "tokens": 4,
        "prompt_tokens": 9,
    }
    return RewardInput(**(defaults | fields))


INPUTS = [make_input(question=f"Q{i}?", text=f"reply {i}", tokens=i) for i in range(4)]


def by_length(answers: Sequence[RewardInput]) -> list[float]:
    """Reward long texts, in [0, 1]; texts of random weights have several lengths."""
    return [len(answer.text) % 5 / 4 for answer in answers]


def fails(answers: Sequence[RewardInput]) -> list[float]:
    return [1 / len(answer.text[:0]) for answer in answers]


# ------------------------------------------------------------------------------ What it may return


async def wait(answers: Sequence[RewardInput]) -> list[float]:
    async def score(answer: RewardInput) -> float:
        # The last answer is rewarded first: the order of arrival does not count.
        await asyncio.sleep(0.001 * (len(answers) - answer.tokens))
        return answer.tokens / 2

    return list(await asyncio.gather(*map(score, answers)))


@pytest.mark.parametrize(
    "function",
    [
        lambda answers: [a.tokens / 2 for a in answers],
        lambda answers: tuple(np.float32(a.tokens / 2) for a in answers),
        lambda answers: np.array([a.tokens / 2 for a in answers]),
        lambda answers: jnp.array([a.tokens / 2 for a in answers]),
        lambda answers: [jnp.float32(a.tokens / 2) for a in answers],
        wait,
    ],
)
def test_numbers_of_any_kind_become_rewards_in_order(function):
    rewards = OwnReward(NAME, function)(INPUTS)
    assert rewards == [0.0, 0.5, 1.0, 1.5] and {*map(type, rewards)} == {float}


def test_async_function_runs_beside_the_event_loop_of_a_notebook():
    async def cell() -> list[float]:
        return OwnReward(NAME, wait)(INPUTS)

    assert asyncio.run(cell()) == [0.0, 0.5, 1.0, 1.5]


def test_function_that_ends_the_process_is_an_error():
    message = rf"^algorithm\.reward = '{NAME}': RuntimeError: sys\.exit\(0\) would end the run"
    with pytest.raises(RuntimeError, match=message):
        OwnReward(NAME, lambda answers: sys.exit(0))(INPUTS)


@pytest.mark.parametrize("change", ["sort", "clear", "pop", "reverse"])
def test_function_cannot_move_the_answers(change):
    """Rewards of a list that the function has sorted would go to other answers."""
    message = f"AttributeError: 'tuple' object has no attribute '{change}'"
    with pytest.raises(RuntimeError, match=message):
        OwnReward(NAME, lambda answers: getattr(answers, change)())(INPUTS)


def test_function_is_not_called_without_answers():
    assert OwnReward(NAME, fails)([]) == []


@pytest.mark.parametrize(
    ("function", "bounds", "message"),
    [
        (lambda a: [1.0] * 3, None, "returned 3 rewards, for 4 answers, the first to question 'Q0"),
        (lambda a: [], None, r"returned 0 rewards, .*'Q0\?'; must return one for each answer"),
        (lambda a: None, None, r"returned None, .*'Q0\?'; must return a list of 4 numbers"),
        (lambda a: 1.0, None, r"returned 1\.0, .*; must return a list of 4 numbers"),
        (lambda a: (1.0 for _ in a), None, r"returned <generator .*; must return a list of 4 numb"),
        (
            lambda a: [0.0, float("nan"), 1.0, 1.0],
            None,
            r"returned nan for the answer 'reply 1' to question 'Q1\?'; must be a finite number",
        ),
        (lambda a: [0, 0, 0, -np.inf], None, r"returned -inf for .* question 'Q3\?'"),
        (lambda a: [0, 1e39, 0, 0], None, r"returned 1e\+39 for .*'Q1\?'; .* from -1e\+18 to 1e"),
        (lambda a: [0, "1", 0, 0], None, r"returned '1' for .* question 'Q1\?'"),
        (lambda a: [0, 0, None, 0], None, r"returned None for .* question 'Q2\?'"),
        (lambda a: np.zeros((4, 2)), None, r"returned \[0.0, 0.0\] for .* question 'Q0\?'"),
        (lambda a: [0, 0, 1.5, 0], (0.0, 1.0), r"returned 1\.5 for .*'Q2\?'; .* from 0 to 1$"),
        (lambda a: [0, -0.1, 1, 0], (0.0, 1.0), r"returned -0\.1 for .*'Q1\?'; .* from 0 to 1$"),
    ],
)
def test_other_results_are_errors_with_the_question(function, bounds, message):
    own_reward = OwnReward(NAME, function, *([bounds] if bounds else []))
    with pytest.raises(ValueError, match=rf"^algorithm\.reward = '{NAME}': {message}"):
        own_reward(INPUTS)


async def fails_late(answers: Sequence[RewardInput]) -> list[float]:
    async def score(answer: RewardInput) -> float:
        await asyncio.sleep(0)
        return 1 / (answer.tokens - 2)

    return list(await asyncio.gather(*map(score, answers)))


def fails_in_a_loop(answers: Sequence[RewardInput]) -> list[float]:
    rewards = []
    for answer in answers:  # Python 3.12 forgets the variable of a comprehension that has failed
        rewards.append(1 / (answer.tokens - 2))
    return rewards


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (fails_in_a_loop, r"reading the answer 'reply 2' to question 'Q2\?'"),
        (fails_late, r"reading the answer 'reply 2' to question 'Q2\?'"),
        (lambda a: 1 / 0, r"for 4 answers, the first to question 'Q0\?'"),
    ],
)
def test_error_of_the_function_names_the_question_and_keeps_its_traceback(function, place):
    message = rf"^algorithm\.reward = '{NAME}': ZeroDivisionError: .*division by zero, {place}$"
    with pytest.raises(RuntimeError, match=message) as raised:
        OwnReward(NAME, function)(INPUTS)
    cause = raised.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert pathlib.Path(traceback.extract_tb(cause.__traceback__)[-1].filename).name == (
        pathlib.Path(__file__).name
    )


@pytest.mark.slow
def test_process_0_rewards_for_both_hosts():
    first, second = run_two("tests.algorithms.reward_hosts")
    assert first["rewards"] == second["rewards"] == [1 / 3, 2 / 3]
    assert (first["calls"], second["calls"]) == (2, 0)
    assert first["error"] == second["error"]
    assert "host 0: " in first["error"] and "KeyError" in first["error"]
    assert "to question 'Q?'" in first["error"]


# -------------------------------------------------------------------------------------- Algorithms


def recording(
    calls: list[Sequence[RewardInput]], reward: Callable[[RewardInput], float]
) -> OwnReward:
    def function(answers: Sequence[RewardInput]) -> list[float]:
        calls.append(answers)
        return [reward(answer) for answer in answers]

    return OwnReward(NAME, function)


def write(role: str, prompt: str, sibling: int, model: str) -> str:
    """Answer rightly, wrongly, not at all, and without an end."""
    if role == "verifier":
        return "[[YES]]"
    texts = ("The answer is right", "The answer is wrong", "I cannot tell", f"answer is ok {CUT}")
    return texts[sibling]


@pytest.mark.parametrize(
    ("config", "make", "has_verifier"),
    [
        (RlvrConfig, make_rlvr, True),
        (RlvrConfig, make_rlvr, False),
        (QwenLongConfig, make_qwenlong, True),
    ],
)
def test_function_gets_a_round_of_answers_and_its_rewards_train(config, make, has_verifier):
    calls: list[Sequence[RewardInput]] = []
    # Any finite numbers: groups compare them with their mean.
    own_reward = recording(calls, lambda a: -10.0 * len(a.text))
    responder_reward = "max" if has_verifier else "rule"
    fields = SMALL | {"generation_batch": 3, "responder__reward": responder_reward}
    context = make_context(questions=lambda: GIVEN, reward=own_reward)
    algorithm = make(make_config(config, reward=NAME, **fields), context)
    episodes = roll_out(algorithm, ScriptedModels(write), 1)
    (answers,) = calls
    assert len(answers) == 12 and len({answer.question for answer in answers}) == 3
    right, wrong, silent, cut = answers[:4]
    assert {answer.question for answer in answers[:4]} == {episodes[0].question}
    assert right == RewardInput(
        question=episodes[0].question,
        task=QA,
        documents=("d",),
        reference="right",
        references=("right", "ok"),
        text="The answer is right",
        prediction="right",
        rule_score=1.0,
        votes=(1,) * 4 if has_verifier else (),
        truncated=False,
        tokens=len("The answer is right"),  # tokens of scripted models are bytes
        prompt_tokens=len(episodes[0].response.prompt),
    )
    assert (wrong.prediction, wrong.rule_score) == ("wrong", 0.0)
    assert (silent.prediction, silent.votes) == (None, ())
    # algorithm.truncated = "zero": the rule reads nothing of the answer, the function all of it.
    assert cut.truncated and cut.prediction is None and cut.text == f"answer is ok {CUT}"
    for episode, record in zip(episodes, to_records(algorithm, episodes), strict=True):
        lengths = [-10.0 * len(text) for text in episode.response.texts]
        assert record["scores"] == lengths and record["rule"] == [1.0, 0.0, 0.0, 0.0]
    (group, *_) = [g for g in to_groups(algorithm, episodes) if g.name == "responder"]
    expected_advantages = (lengths - np.mean(lengths)) / np.std(lengths, ddof=1)
    np.testing.assert_allclose(group.advantages, expected_advantages, rtol=1e-5)
    means = algorithm.metrics(episodes).means()
    assert means["responder_reward"] == pytest.approx(np.mean(lengths))
    assert means["rule_reward"] == 0.25


def test_dropped_answers_do_not_reach_the_function():
    calls: list[Sequence[RewardInput]] = []
    config = make_config(
        RlvrConfig, reward=NAME, truncated="drop", **(SMALL | {"generation_batch": 3})
    )
    own_reward = recording(calls, lambda a: float(a.tokens))
    algorithm = make_rlvr(config, make_context(questions=lambda: GIVEN, reward=own_reward))
    roll_out(algorithm, ScriptedModels(write, "drop"), 1)
    assert len(calls[0]) == 9 and not any(answer.truncated for answer in calls[0])


def spell(own_reward: OwnReward | None, **fields: Any) -> Spell:
    deck: Any = Deck(ROWS)
    config = make_small_config(SpellConfig, generation_batch=len(ROWS), **fields)
    return Spell(config, make_context(deal=lambda _: deck, reward=own_reward))


def test_questioner_of_spell_is_rewarded_for_the_mean_of_the_functions_rewards():
    calls: list[Sequence[RewardInput]] = []
    ask = ScriptedModels(Script(ROWS, verdicts=VERDICTS))
    halved = spell(recording(calls, lambda a: a.rule_score / 2), reward=NAME)
    episodes = roll_out(halved, ask, 1)
    answered = [e for e in episodes if e.response is not None]
    assert answered and len(calls) == 1
    assert {answer.question for answer in calls[0]} == {e.question for e in answered}
    for e in answered:
        # The votes are cast and train the verifier, but they change no reward.
        assert e.votes and e.scores == tuple(score / 2 for score in e.rule)
        assert e.reward == halved.questioner.reward(e)
    names = {group.name for group in to_groups(halved, episodes)}
    assert names == {"responder", "questioner", "verifier"}
    unchanged = roll_out(spell(None), ScriptedModels(Script(ROWS, verdicts=VERDICTS)), 1)
    assert [e.rule for e in unchanged] == [e.rule for e in episodes]
    assert [e.scores for e in unchanged] != [e.scores for e in episodes]


def test_the_function_can_repeat_the_reward_of_the_paper():
    """max(rule, majority), written by the user, trains as responder.reward = "max" does."""

    def reward(answer: RewardInput) -> float:
        decisive = [vote for vote in (1, 0, -1) if answer.votes]
        counts = [answer.votes.count(vote) for vote in decisive]
        if not counts or counts[2] > max(counts[:2]):
            return answer.rule_score
        return max(answer.rule_score, float(counts[0] > len(answer.votes) / 2))

    runs_by_reward = []
    for own_reward in (None, recording([], reward)):
        algorithm = spell(own_reward, reward=NAME if own_reward else "")
        episodes = roll_out(algorithm, ScriptedModels(Script(ROWS, verdicts=VERDICTS)), 1)
        runs_by_reward.append(to_records(algorithm, episodes))
    assert runs_by_reward[0] == runs_by_reward[1]


# ------------------------------------------------------------------------------------------ Config


def own_config(reward: str = f"{HERE}:by_length", algorithm: str = "rlvr", **fields: Any) -> Any:
    return noise.with_fields(
        tiny.get_config(algorithm),
        {"algorithm.reward": reward} | {f"algorithm.{name}": v for name, v in fields.items()},
    )


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("length", "must be MODULE:FUNCTION$"),
        ("no_such.module:f", "No module named 'no_such'; must be a module on Python's path"),
        (f"{HERE}:no_such", f"{HERE} has no no_such; must name a function$"),
        (f"{HERE}:NAME", "is str; must name a function$"),
    ],
)
def test_missing_function_is_a_mistake_of_the_config(reward, message):
    with pytest.raises(ConfigError, match=rf"^algorithm\.reward = '{reward}': {message}") as raised:
        read(own_config(reward))
    assert len(raised.value.mistakes) == 1 and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("responder.reward", "mean"),
        ("responder.reward", "random"),
        ("responder.document_share", 0.1),
    ],
)
def test_field_that_the_function_replaces_is_refused(field, value):
    message = rf"^algorithm\.{re.escape(field)} = {value!r}: must be .* with algorithm\.reward"
    with pytest.raises(ConfigError, match=message):
        read(own_config(**{field: value}))


def test_rewards_of_spell_are_bounded_and_others_are_not():
    for name, is_bounded in (("spell", True), ("rlvr", False), ("qwenlong_l1", False)):
        own_reward = read(own_config(algorithm=name)).algorithm.load_reward()
        assert own_reward and (own_reward.bounds == (0.0, 1.0)) == is_bounded
    assert read(tiny.get_config("longpo")).algorithm.load_reward() is None


def test_questions_that_the_rule_cannot_score_are_left_to_the_function(tmp_path):
    line = {"task": "financial_math", "documents": ["d"], "question": "Q?", "answer": "a lot"}
    readable = {**line, "answer": "7"}
    path = str(tmp_path / "questions.jsonl")
    write_records(pathlib.Path(path), [line, readable])
    assert len(read(own_config()).algorithm.read_questions(path)) == 2
    assert len(read(own_config("")).algorithm.read_questions(path)) == 1


def test_check_describes_the_function():
    text = check.describe(check.check(own_config()))
    assert f"\nreward   algorithm.reward = '{HERE}:by_length' rewards the answers\n" in text


# -------------------------------------------------------------------------------------- Whole runs


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("rlvr", marks=pytest.mark.long), "spell"])
def test_run_records_the_rewards_of_the_function_and_resumes(name, policy, tmp_path):
    fields = {"algorithm.name": name, "algorithm.reward": f"{HERE}:by_length"}
    lines = runs.check_resumed(policy, tmp_path, **fields)
    assert all(line["train/empty_update"] == 0 for line in lines)
    records = [record for _, record in runs.read_episodes(tmp_path / "whole")]
    assert any(record["answers"] for record in records)
    for record in records:
        assert record["scores"] == [len(text) % 5 / 4 for text in record["answers"]]


@pytest.mark.slow
def test_error_of_the_function_ends_a_run_with_nothing_written(policy, tmp_path, monkeypatch):
    noise.use_one_device(monkeypatch)
    noise.give_meaning(monkeypatch)
    noise.share_programs(monkeypatch)
    fields = {"algorithm.name": "rlvr", "algorithm.reward": f"{HERE}:fails"}
    with pytest.raises(
        RuntimeError, match=r"ZeroDivisionError: .*, reading the answer .* question"
    ):
        loop.train(noise.small_config(policy, **fields), epath.Path(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def moves(answers: Sequence[RewardInput]) -> list[float]:
    """Change the current folder, as a function that runs the programs of answers may do."""
    os.chdir(os.environ["ELSEWHERE"])
    return by_length(answers)


@pytest.mark.slow
def test_function_that_changes_the_folder_leaves_the_run_in_its_workdir(
    policy, tmp_path, monkeypatch
):
    noise.use_one_device(monkeypatch)
    noise.give_meaning(monkeypatch)
    noise.share_programs(monkeypatch)
    for name in ("elsewhere", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path / "here")
    folder = os.path.relpath(policy)
    fields = {"algorithm.name": "rlvr", "algorithm.reward": f"{HERE}:moves"}
    spell_jax.train(noise.small_config(folder, **fields, steps=1), "run")
    assert os.getcwd() == f"{tmp_path}/elsewhere" and not os.listdir()
    assert os.listdir(tmp_path / "here") == ["run"]
    assert {"policy", "plots", "checkpoints"} <= {*os.listdir(tmp_path / "here" / "run")}


# ---------------------------------------------------------------------------------- The how-to page


def test_page_on_rewards_has_a_module_that_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "howto" / "own_reward.md").read_text()
    modules = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(modules[0])
    monkeypatch.syspath_prepend(tmp_path)
    (reward_names,) = {tuple(re.findall(r"^(?:async )?def (\w+)\(", modules[0], re.M))}
    assert reward_names == ("short", "formatted")
    for name in reward_names:
        assert f"my_rewards:{name}" in page
    answers = [
        make_input(tokens=24, text="<think>so</think>answer is B"),
        make_input(tokens=96, text="answer is B"),
        make_input(rule_score=0.0, text="<think>so</think>answer is unknown"),
    ]
    short, formatted = (
        read(own_config(f"my_rewards:{name}", "spell")).algorithm.load_reward()
        for name in reward_names
    )
    assert short and short(answers) == [0.75, 0.5, 0.0]
    assert formatted and formatted(answers) == pytest.approx([1.0, 0.0, 0.2])
