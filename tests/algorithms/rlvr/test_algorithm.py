"""Tests of RLVR on a static set of questions, written once or given."""

from __future__ import annotations

import json
from typing import Any

import pytest
from etils import epath

from spell_jax.algorithms.base import records
from spell_jax.algorithms.rlvr.algorithm import make_rlvr
from spell_jax.algorithms.rlvr.config import RlvrConfig
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.data.questions import Question
from spell_jax.data.stream import TaskStream
from spell_jax.reporting.episodes import choose_episodes
from tests.algorithms.scripted import (
    MATH,
    PROMPTS,
    QA,
    ROWS,
    SMALL,
    VERDICTS,
    Deck,
    Row,
    Script,
    ScriptedModels,
    by_role,
    make_config,
    make_context,
    read,
    roll_out,
    to_groups,
    to_records,
)
from tests.evaluating import write_episodes

ACCEPTED = ["Q00", "Q01", "Q02", "Q10", "Q11", "Q12", "Q13", "Q14", "Q15", "Q16", "Q17"]


def new_algorithm(rows=ROWS, static: int = len(ROWS), **options) -> StaticAlgorithm:
    """Make an algorithm that writes its questions about the rows' clusters."""
    judge = options.pop("judge", None)
    deck: Any = Deck(rows)
    fields = SMALL | {"generation_batch": len(rows), "verifier__share": 1.0} | options
    config = make_config(RlvrConfig, static_questions=static, **fields)
    return make_rlvr(config, make_context(deal=lambda _: deck, judge=judge))


def new_ask(rows=ROWS, **options) -> ScriptedModels:
    return ScriptedModels(Script(rows, verdicts=VERDICTS, **options))


def stems(episodes) -> list[str]:
    return sorted("Q" + e.question.split("Q")[1][:2] for e in episodes)


def run_steps(algorithm, ask, steps):
    """Return the records and the groups of each step."""
    trace = []
    for step in steps:
        episodes = roll_out(algorithm, ask, step)
        trace.append(to_records(algorithm, episodes, step))
        trace.append([read(group) for group in to_groups(algorithm, episodes, step)])
    return trace


def test_static_questions_are_written_once():
    algorithm, ask = new_algorithm(), new_ask()
    first = roll_out(algorithm, ask, 1)
    assert [c.role for c in ask.calls] == ["questioner", "responder", "responder", "verifier"]
    assert stems(first) == ACCEPTED  # questions that passed parsing and the filter
    ask.calls.clear()
    second = roll_out(algorithm, ask, 2)
    assert [c.role for c in ask.calls] == ["responder", "verifier"]
    assert stems(second) == ACCEPTED
    assert [e.question for e in first] != [e.question for e in second]  # in another order
    assert algorithm.metrics(second).means()["static_questions"] == 11


def test_the_set_is_written_at_a_temperature_of_its_own():
    algorithm = new_algorithm(static_temperature=0.4, reader__source="frozen_reader")
    ask = new_ask()
    roll_out(algorithm, ask, 1)
    writing = [c for c in ask.calls if c.temperature is not None]
    assert {c.temperature for c in writing} == {0.4}
    assert [(c.role, c.model) for c in writing] == [
        ("questioner", "policy"),
        ("responder", "policy"),
        ("responder", "reference_reader"),
    ]
    ask.calls.clear()
    roll_out(algorithm, ask, 2)
    assert ask.calls and {c.temperature for c in ask.calls} == {None}


def test_external_judge_filters_the_static_questions():
    """Row 8 is answered right without documents by the rule, and wrong by the judge."""
    right = {"Q00"}
    judge = lambda items: [int(q[:3] in right) for q, *_ in items]  # noqa: E731
    question_stems = stems(roll_out(new_algorithm(rule="judge", judge=judge), new_ask(), 1))
    # Choices without a letter are no predictions: nothing is compared.
    assert question_stems == sorted({*ACCEPTED, "Q08", "Q09"} - right)


def test_static_questions_are_proposed_in_whole_rounds():
    algorithm, ask = new_algorithm(static=40), new_ask()
    roll_out(algorithm, ask, 1)
    proposed = [len(c.prompts) for c in ask.calls if c.role == "questioner"]
    assert proposed == [54]  # whole rounds, at least 40 in all


def test_step_samples_one_generation_batch_of_questions():
    algorithm, ask = new_algorithm(static=54, generation_batch=5), new_ask()
    steps = [roll_out(algorithm, ask, step) for step in range(1, 5)]
    assert [len(episodes) for episodes in steps] == [5] * 4
    assert len({e.question for episodes in steps for e in episodes}) > 5


def test_step_takes_rounds_of_written_questions_until_enough_have_mixed_rewards():
    options = {"static": 54, "generation_batch": 5, "max_generations": 9}
    algorithm, ask = new_algorithm(questions=4, **options), new_ask()
    for step in (1, 2):
        episodes = roll_out(algorithm, ask, step)
        before = episodes[: -5 if len(episodes) % 5 == 0 else -(len(episodes) % 5)]
        assert sum(e.mixed for e in episodes) >= 4 > sum(e.mixed for e in before)
        assert len(by_role(to_groups(algorithm, episodes, step))["responder"]) == 4
    exhaustive_algorithm, ask = new_algorithm(questions=100, **options), new_ask()
    (size,) = {len(roll_out(exhaustive_algorithm, ask, step)) for step in (1, 2)}
    # Each question once.
    assert size == exhaustive_algorithm.metrics([]).means()["static_questions"]
    capped, ask = new_algorithm(questions=100, **(options | {"max_generations": 2})), new_ask()
    assert len(roll_out(capped, ask, 1)) == 10


def test_budgets_are_those_of_all_rounds():
    config = make_config(
        RlvrConfig, **SMALL | {"questions": 30, "generation_batch": 9, "max_generations": 3}
    )
    answers, verdicts = config.budgets()
    assert (answers.prompts, answers.replies, answers.trained) == (9, 4, 27)
    assert (verdicts.prompts, verdicts.trained) == (36, 6)
    assert config.budget_summary().startswith("up to 3 rounds of 9 of 960 questions")
    assert "until 30 have mixed rewards" in config.budget_summary()


def test_only_responder_and_verifier_are_trained():
    algorithm, ask = new_algorithm(), new_ask()
    groups = by_role(to_groups(algorithm, roll_out(algorithm, ask, 1)))
    assert len(groups["responder"]) == 6 and len(groups["verifier"]) == 6
    assert groups["questioner"] == []
    prompt, answers, _ = read(groups["responder"][0])
    assert "d" in prompt.split(".")[0] and len(answers) == 4
    plain, ask = new_algorithm(responder__reward="rule"), new_ask()
    groups = by_role(to_groups(plain, roll_out(plain, ask, 1)))
    assert groups["responder"] and groups["verifier"] == []
    assert "verifier" not in {c.role for c in ask.calls}


def test_static_questions_keep_frozen_reader_references():
    rows = [Row(QA, "ok", 0, 2, 1, 4), Row(MATH, "ok", 0, 2, 1, 4), Row(QA, "ok", 0, 1, 1, 1)]
    algorithm = new_algorithm(rows, static=3, reader__source="frozen_reader")
    ask = new_ask(rows, reader={0: ("beta0",), 1: ("1", "2", "3", "4")})
    first = roll_out(algorithm, ask, 1)
    assert algorithm.model_names == ("reference_reader",)
    references = {e.question[:3]: e.reference for e in first}
    assert references == {"Q00": "beta0", "Q02": "alpha2"}
    roll_out(algorithm, ask, 2)
    assert (
        sum(c.model == "reference_reader" for c in ask.calls) == 1
    )  # prompts for the set are not repeated


@pytest.mark.parametrize("reward", ["max", "random"])
def test_algorithm_resumes_from_state_dict(reward):
    options = {"responder__reward": reward, "generation_batch": 5, "verifier__share": 0.5}
    options |= {"questions": 4, "max_generations": 3}
    uninterrupted = new_algorithm(**options)
    uninterrupted_trace = run_steps(uninterrupted, new_ask(), range(1, 5))
    algorithm = new_algorithm(**options)
    run_steps(algorithm, new_ask(), (1, 2))
    state = json.loads(json.dumps(algorithm.state_dict()))
    resumed, ask = new_algorithm(**options), new_ask()
    resumed.load_state_dict(state)
    assert run_steps(resumed, ask, (3, 4)) == uninterrupted_trace[4:]
    assert "questioner" not in {c.role for c in ask.calls}
    assert resumed.state_dict() == uninterrupted.state_dict()


def test_written_questions_of_a_cluster_are_asked_together():
    options = {"questioner__questions_per_cluster": 4, "generation_batch": 4, "max_generations": 1}
    algorithm = new_algorithm([Row(QA, "ok", 0, 1, 1, 1)], static=4, **options)
    questions = [f"Q00.{i} what?" for i in range(4)]
    algorithm.questions._written = [
        {"task": QA, "cluster": name, "shown": [0], "question": text, "reference": "x"}
        for name in ("d0", "d1", "d2")
        for text in questions
    ]
    orders = [
        [algorithm.questions._written[i] for _ in range(3) for i in algorithm.questions._deal()]
        for _ in range(9)
    ]
    for order in orders:
        blocks = [order[at : at + 4] for at in range(0, 12, 4)]
        assert all(len({q["cluster"] for q in block}) == 1 for block in blocks)
        assert sorted(q["question"] for q in blocks[0]) == questions
    assert len({tuple(q["cluster"] for q in order) for order in orders}) > 1


@pytest.mark.parametrize("together", [1, 4])
def test_every_written_question_is_asked_once_an_epoch(together: int) -> None:
    algorithm = new_algorithm(questioner__questions_per_cluster=together, generation_batch=4)
    # One cluster has more questions than all other clusters together.
    clusters = ["d0"] * 9 + ["d1"] * 2 + ["d2"]
    algorithm.questions._written = [{"cluster": name} for name in clusters]
    for _ in range(4):
        assert sorted(i for _ in range(3) for i in algorithm.questions._deal()) == [*range(12)]
    algorithm.questions._written.append({"cluster": "d2"})  # batches of 4 leave one of 13 out
    epochs = [[i for _ in range(3) for i in algorithm.questions._deal()] for _ in range(20)]
    assert all(len(epoch) == len({*epoch}) == 12 for epoch in epochs)
    assert len({*range(13)} - set.intersection(*map(set, epochs))) > 5  # other ones every epoch


def test_step_without_questions_is_empty():
    rows = [Row(QA, "bad_json", 0, 0, 0, 0)]
    algorithm, ask = new_algorithm(rows, static=2), new_ask(rows)
    assert roll_out(algorithm, ask, 1) == []
    assert to_groups(algorithm, []) == []
    assert algorithm.metrics([]).means()["static_questions"] == 0


def test_episodes_keep_the_documents_shown_to_the_questioner():
    algorithm, ask = new_algorithm(), new_ask()
    episode = next(e for e in roll_out(algorithm, ask, 1) if e.question == "Q00 what?")
    assert len(episode.shown) == 2 and episode.cluster.id == "d0" and episode.task == QA
    responder = [c for c in ask.calls if c.role == "responder"][-1]
    assert PROMPTS.responder(QA, episode.cluster.documents, "Q00 what?") in responder.prompts


def test_invalid_setting_is_named_in_the_error():
    with pytest.raises(ValueError, match=r"algorithm\.static_questions = 0"):
        make_config(RlvrConfig, static_questions=0)


# A given set of questions.

GIVEN = tuple(
    Question(
        row.task, (f"d{i}.0 text", f"d{i}.1 text"), f"Q{i:02d} what?", Script(ROWS).reference(i)
    )
    for i, row in enumerate(ROWS)
)


def given_algorithm(
    given_questions=GIVEN, tasks=PAPER_TASKS, weights=(1.0, 1.0, 1.0), **options
) -> StaticAlgorithm:
    """Make an algorithm with given questions."""
    context = make_context(
        deal=lambda source: TaskStream(source, tasks, weights, seed=0),
        questions=lambda: given_questions,
        judge=options.pop("judge", None),
    )
    config = make_config(RlvrConfig, **(SMALL | {"generation_batch": len(ROWS)} | options))
    return make_rlvr(config, context)


def test_given_questions_are_answered_from_their_documents():
    algorithm, ask = given_algorithm(), new_ask()
    episodes = roll_out(algorithm, ask, 1)
    assert stems(episodes) == [q.question[:3] for q in GIVEN]
    assert {c.role for c in ask.calls} == {"responder", "verifier"}  # no questioner, no filter
    assert (
        given_algorithm(reader__source="frozen_reader").model_names == ()
    )  # references stay as given
    prompts = {p for c in ask.calls if c.role == "responder" for p in c.prompts}
    assert prompts == {PROMPTS.responder(q.task, q.documents, q.question) for q in GIVEN}
    by_question = {e.question: e for e in episodes}
    for question, row in zip(GIVEN, ROWS, strict=True):
        episode = by_question[question.question]
        assert episode.cluster.documents == question.documents
        assert (episode.task, episode.reference) == (question.task, question.answer)
        assert episode.own_reference == question.answer
        assert sum(episode.rule) == row.right
    means = algorithm.metrics(episodes).means()
    assert means["static_questions"] == len(GIVEN)
    assert not any(name.startswith("questioner_reward") for name in means)


def test_given_questions_give_responder_groups_as_in_spell():
    algorithm, ask = given_algorithm(responder__reward="rule"), new_ask()
    groups = by_role(to_groups(algorithm, roll_out(algorithm, ask, 1)))
    assert groups["questioner"] == groups["verifier"] == []
    assert len(groups["responder"]) == 6
    for _, answers, advantages in map(read, groups["responder"]):
        right = [answer.startswith("answer is") and "beta" not in answer for answer in answers]
        assert len({*advantages}) == 2 and abs(sum(advantages)) < 1e-3
        assert advantages[0] > 0 and right[0]  # a script's first answers are the right ones


def test_given_questions_are_sampled_by_task_weight_and_epoch():
    algorithm, ask = given_algorithm(weights=(2.0, 1.0, 1.0), generation_batch=4), new_ask()
    steps = [roll_out(algorithm, ask, step) for step in range(1, 5)]
    tasks = [[e.task for e in episodes].count(QA) for episodes in steps]
    assert tasks == [2, 2, 2, 2]
    asked_questions = [e.question for episodes in steps for e in episodes if e.task == QA]
    assert len({*asked_questions}) == 8  # of nine: none repeats before all others were asked
    exhaustive_algorithm = given_algorithm(generation_batch=100)
    # None twice in a step.
    assert stems(roll_out(exhaustive_algorithm, ask, 1)) == [q.question[:3] for q in GIVEN]
    assert exhaustive_algorithm.metrics([]).means()["stream_repeats"] == 0


def test_given_questions_fill_the_batch_in_rounds():
    options = {"generation_batch": 5, "max_generations": 9, "responder__reward": "rule"}
    algorithm, ask = given_algorithm(questions=3, **options), new_ask()
    for step in range(1, 6):
        ask.calls.clear()
        episodes = roll_out(algorithm, ask, step)
        rounds = [len(call.prompts) for call in ask.calls]
        assert sum(e.mixed for e in episodes) >= 3 and len(rounds) == -(-len(episodes) // 5)
        assert sum(e.mixed for e in episodes[: -rounds[-1]]) < 3
        assert len({e.question for e in episodes}) == len(episodes)  # none twice in a step
    exhaustive_algorithm = given_algorithm(questions=100, **options)
    assert stems(roll_out(exhaustive_algorithm, new_ask(), 1)) == [q.question[:3] for q in GIVEN]
    skewed = given_algorithm(questions=100, weights=(4.0, 1.0, 1.0), **options)
    question_stems = stems(roll_out(skewed, new_ask(), 1))
    assert len({*question_stems}) == len(question_stems) > 5


def test_given_questions_of_other_tasks_are_left_out(caplog):
    algorithm, ask = given_algorithm(tasks=(MATH,), weights=(1.0,)), new_ask()
    episodes = roll_out(algorithm, ask, 1)
    assert {e.task for e in episodes} == {MATH} and len(episodes) == 6
    assert "12 clusters serve none of the tasks" in caplog.text
    assert algorithm.metrics(episodes).means()["static_questions"] == 6


def test_algorithm_with_given_questions_resumes_from_state_dict():
    options = {"responder__reward": "random", "generation_batch": 5, "max_generations": 3}
    uninterrupted_trace = run_steps(given_algorithm(**options), new_ask(), range(1, 6))
    algorithm = given_algorithm(**options)
    run_steps(algorithm, new_ask(), (1, 2))
    resumed = given_algorithm(**options)
    resumed.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    assert run_steps(resumed, new_ask(), (3, 4, 5)) == uninterrupted_trace[4:]
    smaller_algorithm = given_algorithm(GIVEN[:-1], **options)
    with pytest.raises(ValueError, match="than these 17"):
        smaller_algorithm.load_state_dict(algorithm.state_dict())


def test_given_question_over_the_cap_is_counted():
    over = lambda role, prompt, model: "Q00" in prompt  # noqa: E731
    algorithm, ask = given_algorithm(), new_ask(over=over)
    episodes = roll_out(algorithm, ask, 1)
    first = next(e for e in episodes if e.question.startswith("Q00"))
    assert (first.status, first.reason, first.scores) == ("overlong", "no_responder_reply", ())
    means = algorithm.metrics(episodes).means()
    assert means["reason/no_responder_reply"] == means["overlong"] == 1 / len(GIVEN)
    (record,) = to_records(algorithm, [first])
    assert record["used"]["responder"] == "overlong"


def test_records_of_given_questions_are_readable_by_the_report(tmp_path):
    algorithm, ask = given_algorithm(), new_ask()
    episodes = roll_out(algorithm, ask, 1)
    groups, annotations = algorithm.groups(episodes, (0, 1))
    write_episodes(tmp_path, {1: records(episodes, annotations)})
    page = choose_episodes(epath.Path(tmp_path), 100)
    assert page.readable_count == len(GIVEN) == len(page.documents)
    assert {e["cluster"]: e["question"] for e in page.chosen_episodes} == {
        e.cluster.id: e.question for e in episodes
    }
    assert page.chosen_episodes[0]["roles"] == ["responder", "verifier"]
    record = next(e for e in page.chosen_episodes if e["question"].startswith("Q00"))
    assert record["shown"] == [] and record["proposal"] is None and record["prompt"] == ""
    assert {e["reward"] for e in page.chosen_episodes} == {None} and not page.points
    assert all(
        "questioner" not in e["used"] for e in page.chosen_episodes
    )  # as without a questioner
    used = [e for e in page.chosen_episodes if e["used"]["responder"] == "used"]
    assert len(used) == len(by_role(groups)["responder"])


def test_judge_can_replace_the_rule_on_given_questions():
    judged_items = []

    def judge(items):
        judged_items.extend(items)
        return [1] * len(items)

    algorithm, ask = given_algorithm(rule="judge", judge=judge, responder__reward="rule"), new_ask()
    episodes = roll_out(algorithm, ask, 1)
    scored_answers = lambda e: zip(e.rule, e.stated, strict=True)  # noqa: E731
    answered = [words for e in episodes for words in e.stated if words is not None]
    assert len(judged_items) == len(answered) > 0
    assert all(r == (p is not None) for e in episodes for r, p in scored_answers(e))
