"""Tests of one SPELL step with scripted models: prompts, token caps, judge, memory, state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from spell_jax.algorithms.base import make_record
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.frozen_reader import most_frequent
from spell_jax.data.clusters import PAPER_TASKS, Cluster, in_memory
from spell_jax.data.stream import TaskStream
from spell_jax.selfplay import parsing
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.rewards import verifier_rewards
from tests.algorithms.scripted import (
    CHOICE,
    CUT,
    MATH,
    PROMPTS,
    QA,
    ROWS,
    VERDICTS,
    Rollout,
    Row,
    Script,
    ScriptedModels,
    make_algorithm,
    number,
    read,
    roll_out,
    to_records,
)

# ------------------------------------------------------------------------------- Prompts and memory


def test_each_role_sees_the_right_documents():
    rollout = Rollout()
    questioner, blind, responder, verifier = rollout.ask.calls
    assert [c.role for c in rollout.ask.calls] == [
        "questioner",
        "responder",
        "responder",
        "verifier",
    ]
    assert [c.group for c in rollout.ask.calls] == [1, 1, 4, 4]
    assert {c.model for c in rollout.ask.calls} == {"policy"}
    assert {c.temperature for c in rollout.ask.calls} == {None}
    for text, episode in zip(questioner.prompts, rollout.episodes, strict=True):
        assert len(episode.shown) == 2 and list(episode.shown) == sorted(episode.shown)
        for index, document in enumerate(episode.cluster.documents):
            assert (document in text) == (index in episode.shown)
    assert all(text.startswith("Empty\n") for text in blind.prompts)
    assert len(blind.prompts) == 13 and len(responder.prompts) == 11
    for text in responder.prompts:
        assert [f".{n} text" in text for n in range(3)] == [True] * 3
    assert not any("text" in text for text in verifier.prompts)  # no documents


def test_questions_and_verdicts_have_options_of_their_own():
    rollout = Rollout(
        verifier__max_tokens=2, questioner__vocabulary_dropout=0.3, questioner__dropout_penalty=1.5
    )
    options = {call.role: dict(call.options) for call in rollout.ask.calls}
    assert options["questioner"] == {"dropout": 0.3, "dropout_penalty": 1.5}
    assert options["verifier"] == {"max_tokens": 2} and options["responder"] == {}


@pytest.mark.parametrize(
    ("cluster", "unread", "shown"), [(5, 1, 4), (2, 1, 1), (1, 1, 0), (7, 1, 5), (5, 0, 5)]
)
def test_first_question_leaves_documents_of_a_small_cluster_unread(cluster, unread, shown):
    options = {
        "questioner__documents": (5,),
        "questioner__unread_documents": unread,
        "cluster": cluster,
    }
    rollout = Rollout([Row(QA, "ok", 0, 2, 0, 0)] * 2, **options)
    assert [len(e.shown) for e in rollout.episodes] == [shown, shown]
    assert [e.status for e in rollout.episodes] == ["accepted" if shown else "too_small"] * 2
    means = rollout.algorithm.metrics(rollout.episodes).means()
    assert means["too_small"] == means["too_small/general_qa"] == (shown == 0)
    assert means.get("reduced_m") == (None if not shown else cluster - unread < 5)
    assert means.get("documents_shown") == (shown or None)
    if not shown:
        assert not rollout.ask.calls and means["reason/too_few_documents"] == 1
        assert [r["used"]["questioner"] for r in rollout.records()] == ["no_proposal"] * 2


def test_later_questions_may_read_a_small_cluster_to_its_end():
    rollout = Rollout([Row(QA, "ok", 0, 2, 0, 0)], cluster=3, questioner__documents=(5,))
    (second,) = roll_out(rollout.algorithm, rollout.ask, 2)
    assert [len(rollout.episodes[0].shown), len(second.shown)] == [2, 3] and second.reduced


def test_requested_answer_letters_are_balanced():
    rollout = Rollout([Row(CHOICE, "ok", 0, 1, 0, 0)] * 400)
    letters = [text[-2] for text in rollout.ask.calls[0].prompts]
    counts = [letters.count(letter) for letter in "ABCD"]
    assert sum(counts) == 400 and all(abs(c - 100) < 40 for c in counts)


def test_rounds_repeat_until_enough_questions_are_mixed():
    rows = [Row(QA, "ok", 0, int(i % 3 == 0), 0, 0) for i in range(30)]  # every third one is mixed
    for question_count, rounds in ((1, 1), (3, 2), (4, 2), (5, 3), (50, 5)):
        rollout = Rollout(rows, generation_batch=6, questions=question_count, max_generations=5)
        assert sum(c.role == "questioner" for c in rollout.ask.calls) == rounds
        assert len(rollout.episodes) == 6 * rounds
        assert len(rollout.groups["responder"]) == min(question_count, 2 * rounds)


def test_step_reads_memory_as_of_its_start():
    rows = [Row(QA, "ok", 0, 2, 0, 0), Row(MATH, "ok", 0, 0, 0, 0)]
    options = {"generation_batch": 4, "max_generations": 2, "questions": 9}
    rollout = Rollout(rows, cluster=9, questioner__memory_documents="shown", **options)
    assert [len(e.history) for e in rollout.episodes] == [
        0
    ] * 8  # although cluster 0 came up 4 times
    second = roll_out(rollout.algorithm, rollout.ask, 2)
    assert [len(e.history) for e in second] == [1, 0] * 4
    episode = rollout.of(0)
    assert second[0].history == (Entry(episode.shown, episode.question, episode.reference),)
    assert set(episode.shown) < set(second[0].shown)  # all documents seen so far, and two new ones
    assert len(second[0].shown) == 4
    prompt = rollout.ask.calls[-1 - sum(c.role != "questioner" for c in rollout.ask.calls[-3:])]
    assert "known: Q00 what? answer: alpha0" in prompt.prompts[0]


@pytest.mark.parametrize(
    ("memory_documents", "shown"),
    [("shown", [2, 4, 6, 7, 7]), ("new", [2, 4, 6, 6, 6])],  # until all shown; at most m (L + 1)
)
def test_memory_holds_the_last_questions_and_their_documents(memory_documents, shown):
    serial = iter(range(1000))

    def write(role, prompt, sibling, model):
        if role == "questioner":
            return json.dumps({"question": f"Q{next(serial)} what?", "answer": "alpha"})
        if role == "verifier":
            return "[[NO]]"
        return f"answer is {'alpha' if sibling == 0 and 'Empty' not in prompt else 'beta'}"

    algorithm = make_algorithm(
        [Row(QA, "ok", 0, 0, 0, 0)],
        cluster=7,
        questioner__memory=2,
        questioner__memory_documents=memory_documents,
    )
    ask = ScriptedModels(write)
    steps = [roll_out(algorithm, ask, step)[0] for step in range(1, 6)]
    assert [len(e.history) for e in steps] == [0, 1, 2, 2, 2]
    assert [len(e.shown) for e in steps] == shown
    assert steps[2].new == tuple(sorted(set(steps[2].shown) - set(steps[1].shown)))
    assert [entry.question for entry in steps[4].history] == ["Q2 what?", "Q3 what?"]


@pytest.mark.parametrize("solved", [False, True])
def test_memory_holds_questions_with_a_positive_reward_or_all_solvable_ones(solved):
    """Algorithm 1: r_que > 0. The paper's code also remembers fully solved questions."""
    rollout = Rollout(questioner__memory_solved=solved)
    stored = {
        row["cluster"] for row in rollout.algorithm.questioner.memory.state_dict()["clusters"]
    }
    answered = [e for e in rollout.episodes if e.response]
    assert {e.mean_score for e in answered} >= {0.0, 1.0}
    remembered_episodes = [e for e in answered if e.reward > 0 or (solved and e.mean_score == 1)]
    assert stored == {e.cluster.id for e in remembered_episodes}


# ------------------------------------------------------------------------------ Overlong prompts


def over(role: str, at: str, model: str = "policy"):
    return lambda r, prompt, m: r == role and at in prompt and m == model


def test_overlong_questioner_prompt_is_only_counted():
    rollout = Rollout(script=Script(ROWS, over=over("questioner", "d0.")))
    episode = rollout.of(0)
    assert (episode.status, episode.reason) == ("overlong", "no_questioner_reply")
    assert episode.reward is None and episode.response is None
    assert len(rollout.ask.calls[1].prompts) == 12
    assert rollout.algorithm.metrics(rollout.episodes).means()["overlong"] == pytest.approx(1 / 18)


def test_overlong_responder_prompt_is_only_counted():
    script = Script(ROWS, over=lambda role, prompt, _: role == "responder" and "d10." in prompt)
    rollout = Rollout(script=script, questioner__negatives=9)
    assert (rollout.of(10).status, rollout.of(10).reason) == ("overlong", "no_responder_reply")
    assert rollout.of(10).reward is None
    texts = [read(group)[1][0] for group in rollout.groups["questioner"]]
    assert rollout.of(10).proposal.texts[0] not in texts
    assert rollout.of(11).proposal.texts[0] in texts  # like all other bad ones
    clusters = [
        row["cluster"] for row in rollout.algorithm.questioner.memory.state_dict()["clusters"]
    ]
    assert "d10" not in clusters and "d13" in clusters


def test_answer_with_overlong_verdict_prompt_is_judged_by_the_rule():
    plain = Rollout()
    rollout = Rollout(script=Script(ROWS, over=over("verifier", "alpha0"), verdicts=VERDICTS))
    assert rollout.of(0).votes == ((), (), (), ())  # the reference is in all of its prompts
    assert rollout.of(0).scores == (1, 1, 0, 0) != plain.of(0).scores
    means = rollout.algorithm.metrics(rollout.episodes).means()
    assert means["unjudged"] == pytest.approx(3 / 44)
    assert plain.algorithm.metrics(plain.episodes).means()["unjudged"] == 0


def test_question_with_overlong_grounding_prompt_passes_the_filter():
    script = Script(ROWS, over=lambda role, prompt, _: prompt.startswith("Empty\nQ09"))
    rollout = Rollout(script=script)
    assert rollout.of(9).status == "accepted" and rollout.of(8).status == "ungrounded"


def test_overlong_prompts_drop_new_documents_then_oldest_history():
    def shown(cap: int):
        algorithm = make_algorithm(
            [Row(QA, "ok", 0, 1, 0, 0)], cluster=9, questioner__documents=(4,), cap=cap
        )
        algorithm.questioner.memory.push(QA, "d0", Entry((0, 1), "old", "a"))
        algorithm.questioner.memory.push(QA, "d0", Entry((1, 2), "new", "b"))
        ask = ScriptedModels(lambda *_: "no JSON")
        (episode,) = roll_out(algorithm, ask, 1)
        count = len(ask.calls[0].prompts[0].split())
        assert count <= cap or (len(episode.shown) == 1 and not episode.history)
        return len(episode.shown), [e.question for e in episode.history], episode.dropped

    # Words: 2 per document, 4 per known question, 3 of the template (2 without known questions).
    assert shown(100) == (7, ["old", "new"], 0)
    assert shown(25) == (7, ["old", "new"], 0)
    assert shown(24) == (6, ["old", "new"], 1)
    assert shown(17) == (3, ["old", "new"], 4)
    assert shown(16) == (2, ["new"], 5)
    assert shown(10) == (1, [], 6)
    assert shown(1) == (1, [], 6)  # nothing is left to drop: the sampler rejects it


# -------------------------------------------------------------------------- Judge and frozen reader


def test_external_judge_replaces_the_rule():
    judged_items = []

    def judge(items):
        judged_items.extend(items)
        return [{"alpha0": 0, "beta0": 1}.get(prediction, -1) for _, prediction, _ in items]

    rollout = Rollout(rule="judge", judge=judge)
    assert rollout.of(0).rule == (0.0, 0.0, 1.0, 0.0)
    assert rollout.of(1).rule == (1.0, 0.0, 0.0, 0.0)  # no verdict: the rule's reward stays
    assert ("Q00 what?", "beta0", "alpha0") in judged_items
    stated = [words for e in rollout.episodes for words in e.stated if words is not None]
    blind = [words for e in rollout.episodes for words in e.blind_stated if words is not None]
    assert len(judged_items) == len(stated) + len(blind)
    failed = sum(words not in ("alpha0", "beta0") for words in stated) / len(stated)
    assert rollout.algorithm.metrics(rollout.episodes).means()["judge_failed"] == pytest.approx(
        failed
    )
    assert Rollout(rule="judge", judge=judge, responder__reward="rule").of(0).scores == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("verdict", "known_rows"),
    [(1, {0, 1, 9}), (0, set()), (-1, {1})],
    ids=["right", "wrong", "none"],
)
def test_external_judge_scores_the_answers_of_the_grounding_filter(verdict, known_rows):
    """Row 1 is answered right by the rule, row 0 in other words; its verdicts are all equal."""
    rows = [Row(QA, "ok", 0, 2, 0, 0), Row(QA, "ok", 1, 2, 0, 0), *ROWS[2:9], ROWS[0]]
    blind = []

    def judge(items):
        blind.append([prediction for _, prediction, _ in items])
        # The first call is about answers without documents.
        at = ("Q00", "Q01", "Q09")
        return [verdict if len(blind) == 1 and q[:3] in at else 0 for q, *_ in items]

    options = {"rule": "judge", "judge": judge, "responder__reward": "rule"}
    rollout = Rollout(rows, **options)
    ungrounded_rows = {number(e) for e in rollout.episodes if e.status == "ungrounded"} & {0, 1, 9}
    assert ungrounded_rows == known_rows
    assert len(blind) == 2 and blind[0][:2] == ["unknown", "alpha1"]
    for at in known_rows:
        episode = rollout.of(at)
        assert (episode.reason, episode.reward) == ("known_without_documents", -0.5)
        assert episode.response is None and episode.blind_scores == (1.0,)


def test_external_judge_compares_answers_without_documents_with_the_frozen_readers():
    judged_batches = []

    def judge(items):
        judged_batches.append(items)
        return [int(prediction == "unknown" and ref == "beta0") for _, prediction, ref in items]

    options = {"rule": "judge", "judge": judge, "reader__source": "frozen_reader"}
    script = Script(ROWS[:3], reader={0: ("beta0",)})
    rollout = Rollout(ROWS[:3], script=script, **options)
    assert judged_batches[0][0] == ("Q00 what?", "unknown", "beta0")
    assert [e.status for e in rollout.episodes] == ["ungrounded", "accepted", "accepted"]


class Dollars(Script):
    """Models whose responder states numbers in words."""

    TEXTS = ("The answer is $3.5 million", "The answer is -$5", "Five million dollars.", "")

    def __call__(self, role: str, prompt: str, sibling: int, model: str) -> str | None:
        text = super().__call__(role, prompt, sibling, model)
        return self.TEXTS[sibling] if role == "responder" else text


@pytest.mark.parametrize("extract", ["paper", "lenient"])
def test_external_judge_reads_the_sentence_of_a_number_and_the_verifier_its_figure(extract):
    judged_answers = []

    def judge(items):
        judged_answers.extend(answer for _, answer, _ in items)
        return [int(answer == "$3.5 million") for _, answer, _ in items]

    rows = [Row(MATH, "ok", 0, 2, 0, 0)]
    options = {"rule": "match_or_judge", "judge": judge, "extract": extract}
    (episode,) = Rollout(rows, script=Dollars(rows), **options).episodes
    assert episode.status == "ungrounded" and judged_answers == ["$3.5 million"]
    rollout = Rollout(rows, script=Dollars(rows), questioner__grounding_samples=0, **options)
    (episode,) = rollout.episodes
    assert judged_answers[1:] == ["$3.5 million", "-$5", "Five million dollars"]
    assert episode.rule == (1.0, 0.0, 0.0, 0.0)
    assert episode.judge == (1, 0, 0, None)
    figures = [p for p in episode.predictions if p is not None]
    assert figures == (["$3.5"] if extract == "paper" else ["3500000", "-5", "5000000"])
    verifier_prompts = rollout.ask.calls[-1].prompts
    assert len(verifier_prompts) == len(figures)
    assert all(p in prompt for p, prompt in zip(figures, verifier_prompts, strict=True))


def test_judge_can_raise_the_scores_of_the_rule():
    judged_answers = []

    def judge(items):
        judged_answers.extend(prediction for _, prediction, _ in items)
        return [{"beta0": 1}.get(prediction, 0) for _, prediction, _ in items]

    rollout = Rollout(rule="match_or_judge", judge=judge, questioner__grounding_samples=0)
    first, second = rollout.of(0), rollout.of(1)
    assert first.predictions[0] == "alpha0" and "alpha0" not in judged_answers  # right by the rule
    assert first.rule == (1.0, 1.0, 1.0, 0.0) and first.judge == (None, None, 1, None)
    assert second.rule[0] == 1.0 and second.judge[0] is None and 0 in second.judge
    plain = Rollout(questioner__grounding_samples=0)
    wrong = [
        words
        for e in plain.episodes
        for words, score in zip(e.stated, e.rule, strict=True)
        if words is not None and score < 1
    ]
    assert sorted(judged_answers) == sorted(wrong)
    (record,) = to_records(rollout.algorithm, [first])
    assert record["judge"] == [None, None, 1, None]  # in the places of the answers


class Wordy(Script):
    """Models whose responder adds words to each answer."""

    def __call__(self, role: str, prompt: str, sibling: int, model: str) -> str | None:
        text = super().__call__(role, prompt, sibling, model)
        return f"{text} and more" if role == "responder" else text


@pytest.mark.parametrize(
    ("rule", "status", "rate"), [("match", "ungrounded", 1.0), ("exact", "accepted", 0.0)]
)
def test_rule_of_the_config_scores_answers_blind_answers_and_probes(rule, status, rate):
    rows = [Row(QA, "ok", 1, 4, 0, 0), Row(QA, "ok", 0, 4, 0, 0)]
    algorithm = make_algorithm(
        rows, rule=rule, questioner__mapping="progress", questioner__probes=4
    )
    episodes = sorted(roll_out(algorithm, ScriptedModels(Wordy(rows)), 1), key=number)
    assert [e.status for e in episodes] == [status, "accepted"]
    assert episodes[1].rule == (rate,) * 4
    assert {probe.first for probe in algorithm.progress.probes.probes} == {rate}


def frozen_reader(reader, rows=ROWS, **options) -> Rollout:
    script = Script(rows, reader=reader, verdicts=VERDICTS, over=options.pop("over", never))
    return Rollout(rows, script=script, reader__source="frozen_reader", **options)


def never(role: str, prompt: str, model: str) -> bool:
    return False


def test_frozen_reader_sees_the_questioners_documents():
    rollout = frozen_reader({})
    assert (
        rollout.algorithm.model_names == ("reference_reader",)
        and Rollout().algorithm.model_names == ()
    )
    (call,) = [c for c in rollout.ask.calls if c.model == "reference_reader"]
    assert (call.role, call.group) == ("responder", 4)
    accepted = [e for e in rollout.episodes if e.response is not None]
    assert len(call.prompts) == len(accepted) == 11
    for text, episode in zip(call.prompts, accepted, strict=True):
        documents = [episode.cluster.documents[i] for i in episode.shown]
        assert text == PROMPTS.responder(episode.task, documents, episode.question)
    # If the frozen reader agrees with the questioner, nothing else changes.
    plain, facts = Rollout().facts(), rollout.facts()
    assert {fact for fact in plain if plain[fact] != facts[fact]} == {"calls"}


def test_most_frequent_frozen_reader_answer_is_the_reference():
    rollout = frozen_reader({0: ("Beta0.", "alpha0", "beta0", "beta0")})
    episode = rollout.of(0)
    assert (episode.own_reference, episode.reference) == ("alpha0", "Beta0")
    assert episode.rule == (0.0, 0.0, 1.0, 0.0)
    verifier = next(c for c in rollout.ask.calls if c.role == "verifier")
    assert "two: Beta0" in verifier.prompts[0]
    assert rollout.algorithm.questioner.memory.get(QA, "d0")[0].answer == "Beta0"
    means = rollout.algorithm.metrics(rollout.episodes).means()
    assert means["reference_replaced"] == pytest.approx(1 / 11)


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        (("x", "x", "x", "y"), "accepted"),
        (("x", "y", "x", "y"), "ungrounded"),  # two of four are not more than half
        (("x", "y", "z", "v"), "ungrounded"),
        (("", "", "", ""), "ungrounded"),  # a missing answer does not count
    ],
)
def test_question_is_ungrounded_without_a_frozen_reader_majority(answers, status):
    episode = frozen_reader({0: answers}).of(0)
    assert episode.status == status
    if status == "ungrounded":
        assert (episode.reason, episode.reward) == ("reader_disagrees", -0.5)
        assert episode.response is None


@pytest.mark.parametrize(
    ("answers", "unanimous", "status"),
    [
        (("alpha0", "Alpha0.", "the alpha0", "alpha0"), True, "accepted"),
        (("alpha0", "alpha0", "alpha0", "x"), False, "accepted"),
        (("alpha0", "alpha0", "alpha0", "x"), True, "ungrounded"),
        (("beta0",) * 4, True, "ungrounded"),  # the reader is sure, of another answer
    ],
)
def test_reader_confirms_the_questioners_reference(answers, unanimous, status):
    options = {"reader__source": "confirmed", "reader__unanimous": unanimous}
    script = Script(ROWS, reader={0: answers}, verdicts=VERDICTS)
    rollout = Rollout(ROWS, script=script, **options)
    episode = rollout.of(0)
    assert rollout.algorithm.model_names == ("reference_reader",)
    assert (episode.status, episode.reference) == (status, "alpha0")
    assert (episode.reason == "reader_disagrees") == (status == "ungrounded")


def test_answer_known_without_documents_makes_question_ungrounded():
    blind = ("Unknown.", "unknown", "unknown", "x")
    episode = frozen_reader({0: blind}).of(0)
    assert (episode.status, episode.reason) == ("ungrounded", "known_without_documents")
    assert (episode.blind, episode.reward) == (("unknown",), -0.5)
    allowed = frozen_reader(
        {0: blind}, questioner__grounding_samples=2, questioner__grounding_threshold=2
    )
    assert allowed.of(0).status == "ungrounded"  # both agree
    assert frozen_reader({0: blind}, questioner__grounding_samples=0).of(0).status == "accepted"


def test_reader_agreement_needs_two_equal_answers():
    rows = [Row(QA, "ok", 0, 2, 0, 0)]
    assert frozen_reader({0: ("x", "y")}, rows, reader__samples=2).of(0).status == "ungrounded"
    assert frozen_reader({0: ("x", "y", "x")}, rows, reader__samples=3).of(0).status == "accepted"


def test_overlong_reader_prompt_gives_no_reward():
    rollout = frozen_reader(
        {}, over=lambda r, prompt, model: model == "reference_reader" and "Q00" in prompt
    )
    episode = rollout.of(0)
    assert (episode.status, episode.reason) == ("overlong", "no_reader_reply")
    assert episode.reward is None


def test_most_frequent_returns_the_answer_and_its_count():
    assert most_frequent(["x", None, "The X.", "y"], QA) == ("x", 2)
    assert most_frequent(["12", "12.0", "3"], MATH) == ("12", 2)
    assert most_frequent(["A", "B", "B"], CHOICE) == ("B", 2)
    assert most_frequent(["one", "two"], QA) == ("one", 1)
    assert most_frequent([None, None], QA) == (None, 0)
    assert most_frequent([], QA) == (None, 0)
    assert most_frequent(["plenty", "plenty"], MATH) == (None, 0)  # not a number


# --------------------------------------------------------------------------------- Seed and state


def real_stream(seed: int = 0) -> TaskStream:
    clusters = [
        Cluster(f"d{i}", tuple(f"d{i}.{n} text" for n in range(6))) for i in range(len(MANY))
    ]
    return TaskStream(in_memory(clusters), PAPER_TASKS, (1.0, 1.0, 1.0), seed)


MANY = tuple(Row(QA, "ok", 0, i % 4, 1, i % 5) for i in range(24))


def write_anything(role: str, prompt: str, sibling: int, model: str) -> str:
    """Write a text that depends only on prompt and sibling and is valid for every task."""
    at = sum(prompt.encode()) + sibling
    if role == "questioner":
        options = {letter: f"{letter}{at % 7}" for letter in "ABCD"}
        answer = "ABCD"[at % 4] if "choice" in prompt else str(1 + at % 9)
        return json.dumps({"question": f"Q{at} what?", "answer": answer, "options": options})
    if role == "verifier":
        return ("[[YES]]", "[[NO]]")[at % 3 == 0]
    return f"answer is {'ABCD'[at % 4]}" if "(A)" in prompt else f"answer is {1 + at % 9}"


def run_steps(algorithm: Spell, steps, seed: int = 0) -> list[Any]:
    """Return the records, groups and metrics of each step."""
    ask, trace = ScriptedModels(write_anything), []
    for step in steps:
        episodes = algorithm.rollout(ask, (seed, step), step)
        groups, annotations = algorithm.groups(episodes, (seed, step))
        trace.append([make_record(*pair) for pair in zip(episodes, annotations, strict=True)])
        trace.append([read(group) for group in groups])
        trace.append(algorithm.metrics(episodes).means())
    return trace


def new_algorithm(seed: int = 0, **options) -> Spell:
    return make_algorithm(
        MANY,
        stream=real_stream(seed),
        generation_batch=9,
        questions=4,
        questioner__documents=(1, 2, 3),
        max_generations=3,
        **options,
    )


def test_step_results_depend_only_on_seed_and_step_number():
    first = run_steps(new_algorithm(), (1, 2, 3))
    assert first == run_steps(new_algorithm(), (1, 2, 3))
    assert first != run_steps(new_algorithm(seed=1), (1, 2, 3), seed=1)
    assert run_steps(new_algorithm(), (1,))[0] != run_steps(new_algorithm(), (2,))[0]
    assert any(rows for rows in first[1::3])


@pytest.mark.parametrize("reward", ["max", "random"])
def test_algorithm_resumes_from_state_dict(reward):
    uninterrupted_trace = run_steps(new_algorithm(responder__reward=reward), range(1, 7))
    algorithm = new_algorithm(responder__reward=reward)
    run_steps(algorithm, range(1, 4))
    state = json.loads(json.dumps(algorithm.state_dict()))
    resumed = new_algorithm(responder__reward=reward)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == algorithm.state_dict()
    assert run_steps(resumed, range(4, 7)) == uninterrupted_trace[9:]
    assert len(resumed.questioner.memory) > 0


def test_records_are_json_and_hold_the_episode():
    rollout = Rollout()
    records = [json.loads(json.dumps(record)) for record in rollout.records()]
    assert records[0]["answers"][0] == "answer is alpha0"
    assert records[0]["scores"] == [1, 1, 1, 0] and records[0]["votes"][3] == []
    assert records[3]["proposal"] == "Q03 but no JSON" and records[3]["answers"] == []


def test_metrics_are_shares_and_means_over_episodes():
    rollout = Rollout()
    means = rollout.algorithm.metrics(rollout.episodes).means()
    expected = {
        "accepted": 11 / 18,
        "bad_format": 2 / 18,
        "declined": 3 / 18,
        "ungrounded": 2 / 18,
        "overlong": 0,
        "mixed": 8 / 11,
        "unsolved": 1 / 11,
        "fully_solved": 2 / 11,
        "solvable_share/general_qa": 3 / 8,
        "solvable_share/financial_math": 4 / 8,
        "solvable_share/multiple_choice": 1 / 8,
        "accepted/general_qa": 5 / 8,
        "documents_shown": 2,
        "history": 0,
        "reason/no_json": 1 / 18,
        "reason/bad_options": 1 / 18,
        "reason/zero_answer": 1 / 18,
        "reason/long_answer": 1 / 18,
        "reason/unfinished_thought": 1 / 18,
        "reason/known_without_documents": 2 / 18,
        "solve_rate": np.mean([e.mean_score for e in rollout.episodes if e.scores]),
        "no_answer": np.mean([p is None for e in rollout.episodes for p in e.predictions]),
        "memory_entries": 0,
        "stream_repeats": 0,
    }
    expected["responder_reward"] = np.mean([s for e in rollout.episodes for s in e.scores])
    votes = [(rule, v) for e in rollout.episodes for rule, v in zip(e.rule, e.votes, strict=True)]
    rewarded = [r for _, v in votes for r in verifier_rewards(v)]
    assert {-1.0, 0.0, 1.0} == set(rewarded)
    expected["verifier_reward"] = np.mean(rewarded)
    judged = [(rule, v) for rule, v in votes if v]
    expected["malformed_votes"] = np.mean([v.count(-1) / 4 for _, v in judged])
    expected["verdict_ignored"] = 3 / len(judged)
    clear = [(rule, v.count(1) > 2) for rule, v in judged if v.count(-1) < 3]
    expected["verdict_differs_from_rule"] = np.mean([rule != yes for rule, yes in clear])
    for name, value in expected.items():
        if name != "memory_entries":
            assert means[name] == pytest.approx(value), name
    assert means["memory_entries"] == len(rollout.algorithm.questioner.memory) == 8
    mild = Rollout(verifier__malformed_penalty=False)
    reward = mild.algorithm.metrics(mild.episodes).means()["verifier_reward"]
    assert reward == pytest.approx(np.mean([max(r, 0.0) for r in rewarded]))


def test_grounding_threshold_counts_right_blind_answers():
    rows = [Row(QA, "ok", 0, 2, 0, 0)]

    def write(role, prompt, sibling, model):
        if prompt.startswith("Empty"):
            return f"answer is {'alpha0' if sibling < 2 else 'unknown'}"
        return Script(rows)(role, prompt, sibling, model)

    for threshold, status in ((2, "ungrounded"), (3, "accepted")):
        algorithm = make_algorithm(
            rows, questioner__grounding_samples=4, questioner__grounding_threshold=threshold
        )
        assert roll_out(algorithm, ScriptedModels(write), 1)[0].status == status


def test_questions_are_parsed_with_the_configured_limits(monkeypatch):
    parse_options = []

    def parse(text, task, count, limit, distinct, extract):
        parse_options.append((limit, distinct, extract))
        return parsing.Parsed("declined")

    monkeypatch.setattr("spell_jax.algorithms.spell.config.parsing.parse_question", parse)
    fields = {
        "questioner__max_answer_tokens": 7,
        "questioner__distinct_options": True,
        "extract": "paper",
    }
    Rollout([Row(QA, "ok", 0, 1, 0, 0)], **fields)
    assert parse_options == [(7, True, "paper")]


# ------------------------------------------------------------------- Replies cut off at the cap


class Cutting(Script):
    """The script of two questions, in which the token cap cuts replies of one role off."""

    role = ""

    def __call__(self, role: str, prompt: str, sibling: int, model: str) -> str | None:
        text = super().__call__(role, prompt, sibling, model)
        is_cut = role == self.role and "Empty" not in prompt and sibling % 2 == 0
        return f"{CUT}\n{text}" if is_cut and text is not None else text


def cut(role: str, truncated: str, **options: Any) -> Rollout:
    """Roll out two questions: answers 0 and 1 are right, 2 is a paraphrase, 3 states nothing."""
    rows = [Row(QA, "ok", 0, 2, 1, 3)] * 2
    script = Cutting(rows)
    script.role = role
    return Rollout(rows, script=script, truncated=truncated, **options)


def test_cut_off_answer_scores_by_the_config():
    for truncated, rule, votes in (
        ("score", (1, 1, 0, 0), 3),
        ("zero", (0, 1, 0, 0), 1),
        ("drop", (1, 0), 1),
    ):
        rollout = cut("responder", truncated)
        episode = rollout.of(0)
        assert episode.rule == rule
        assert sum(map(bool, episode.votes)) == votes
        record = rollout.records()[0]
        assert len(record["answers"]) == len(record["truncated"]) == len(rule)
        assert record["truncated"] == ([False] * 2 if truncated == "drop" else [True, False] * 2)
        assert len(record["dropped"]) == (2 if truncated == "drop" else 0)
        assert all(len(row["scores"]) == len(rule) for row in rollout.records())
        means = rollout.algorithm.metrics(rollout.episodes).means()
        assert (
            means["unparsed/responder"] == {"score": 1 / 4, "zero": 3 / 4, "drop": 1 / 2}[truncated]
        )
        groups = rollout.groups["responder"]
        assert {len(group.samples) for group in groups} == {len(rule)}


def test_one_answer_that_is_left_rewards_nobody():
    """Its question could not have mixed rewards, so the questioner is not trained on it either."""

    class OneLeft(Script):
        def __call__(self, role: str, prompt: str, sibling: int, model: str) -> str | None:
            text = super().__call__(role, prompt, sibling, model)
            is_cut = role == "responder" and "Empty" not in prompt and sibling > 0
            return f"{text}{CUT}" if is_cut else text

    rows = [Row(QA, "ok", 0, 2, 1, 3)]
    rollout = Rollout(rows, script=OneLeft(rows), truncated="drop")
    (episode,) = rollout.episodes
    assert (episode.scores, episode.reward) == ((1.0,), None)
    assert not any(rollout.groups.values())
    (record,) = rollout.records()
    assert record["used"]["questioner"] == "no_reward" and len(record["dropped"]) == 3


@pytest.mark.parametrize("role, count", [("questioner", 1), ("responder", 4), ("reader", 4)])
def test_texts_of_a_prompt_without_a_reply_left_are_in_the_record(role, count):
    class AllCut(Script):
        def __call__(self, called_role: str, prompt: str, sibling: int, model: str) -> str | None:
            text = super().__call__(called_role, prompt, sibling, model)
            called_role = "reader" if model == "reference_reader" else called_role
            return f"{text}{CUT}" if called_role == role and "Empty" not in prompt else text

    rows = [Row(QA, "ok", 0, 2, 1, 3)]
    options = {"reader__source": "frozen_reader"} if role == "reader" else {}
    (record,) = Rollout(rows, script=AllCut(rows), truncated="drop", **options).records()
    assert (record["status"], record["reason"]) == ("overlong", f"no_{role}_reply")
    assert len(record["dropped"]) == count and all(CUT in text for text in record["dropped"])


def test_cut_off_verdict_is_malformed_or_dropped():
    for truncated, votes in (
        ("score", (1, 1, 1, 0)),
        ("zero", (-1, 1, -1, 0)),
        ("drop", (1, 0)),
    ):
        rollout = cut("verifier", truncated)
        assert rollout.of(0).votes[2] == votes
        means = rollout.algorithm.metrics(rollout.episodes).means()
        assert means["unparsed/verifier"] == (truncated == "zero") / 2


def test_cut_off_proposal_is_of_bad_format_or_dropped():
    for truncated, status, reason in (
        ("score", "accepted", ""),
        ("zero", "bad_format", "truncated"),
        ("drop", "overlong", "no_questioner_reply"),
    ):
        rollout = cut("questioner", truncated)
        episode = rollout.of(0)
        assert (episode.status, episode.reason) == (status, reason)
        assert (episode.reward == -1) == (truncated == "zero")
        assert (episode.reward is None) == (truncated == "drop")
        means = rollout.algorithm.metrics(rollout.episodes).means()
        assert means.get("unparsed/questioner") == {"score": 0, "zero": 1}.get(truncated)


def test_unfinished_thought_of_the_questioner_stays_declined():
    rows = [Row(QA, "think", 0, 0, 0, 0)]
    script = Cutting(rows)
    script.role = "questioner"
    rollout = Rollout(rows, script=script)
    assert (rollout.of(0).status, rollout.of(0).reason) == ("declined", "unfinished_thought")
