"""Tests of EAPO with scripted models: prompts, rewards, data of the reward model, records."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from etils import epath

from spell_jax.algorithms.base import AlgorithmContext, make_record, records
from spell_jax.algorithms.eapo.algorithm import Eapo, is_consistent
from spell_jax.algorithms.eapo.config import EapoConfig
from spell_jax.algorithms.eapo.episode import EapoEpisode, Scoring
from spell_jax.data.clusters import TASKS, Cluster, in_memory
from spell_jax.data.questions import Question
from spell_jax.data.samples import Sample
from spell_jax.data.stream import TaskStream
from spell_jax.learner.advantages import group_advantages
from spell_jax.learner.packing import TrainGroup
from spell_jax.reporting import episodes as report_episodes
from spell_jax.rollout.replies import Reply
from spell_jax.runtime.files.episodes import EpisodeWriter
from spell_jax.selfplay.evidence import StructuredAnswer, write_answer
from tests.algorithms.scripted import (
    CUT,
    MATH,
    PROMPTS,
    QA,
    ScriptedModels,
    read,
    roll_out,
    to_groups,
    to_records,
)

Plan = Sequence[tuple[bool, bool]]  # (well-formed, right) of each sibling


def ask_about(at: int, task: str = QA) -> Question:
    answer = f"alpha{at}" if task == QA else str(10 + at)
    return Question(task, (f"d{at}.0 text", f"d{at}.1 text"), f"Q{at:02d} what?", answer)


def make_algorithm(
    given_questions: Sequence[Question], judge=None, seed: int = 0, **options: Any
) -> Eapo:
    fields: dict[str, Any] = {"questions": len(given_questions), "group_size": 4} | options
    config = EapoConfig(**fields)
    context = AlgorithmContext(
        PROMPTS,
        len,
        10_000,
        seed,
        100,
        lambda: in_memory([]),
        lambda: in_memory([]),
        lambda source: TaskStream(source, TASKS, (1.0,) * len(TASKS), seed),
        lambda: tuple(given_questions),
        judge,
    )
    return Eapo(config, context)


@dataclasses.dataclass
class Script:
    """Script that writes answers by plan, and the reward model's replies, one text per try.

    Attributes:
      questions, plans: question texts and answer plans, by question number.
      scorings: question number -> replies of the reward model; the last one repeats.
      over: roles whose prompts are over the cap.
    """

    questions: Sequence[Question]
    plans: dict[int, Plan]
    scorings: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict)
    over: tuple[str, ...] = ()
    tries: dict[int, int] = dataclasses.field(default_factory=dict)

    def __call__(self, role: str, prompt: str, sibling: int, model: str) -> str | None:
        if role in self.over:
            return None
        at = int(prompt.split("Q")[1][:2])
        if model == "reward_model":
            assert role == "reward_model"
            replies = self.scorings[at]
            self.tries[at] = self.tries.get(at, 0) + 1
            return replies[min(self.tries[at], len(replies)) - 1]
        assert (role, model) == ("responder", "policy")
        well_formed, right = self.plans[at][sibling]
        answer = self.questions[at].answer if right else "999"
        text = write_answer(StructuredAnswer("a", f"d{at}.0 text\nset {sibling}", "r", answer))
        return text if well_formed else text.replace("</evidence>", "")


def labeled(scores: Sequence[int]) -> str:
    return "\n".join(f"{i} {score}" for i, score in enumerate(scores, 1))


HALF = ((True, True), (True, False), (False, True), (True, True))


def run_question(
    plan: Plan = HALF, scorings: Sequence[str] = ("1 5\n2 1\n3 3",), step: int = 1, **options
):
    """Run a step with one question; return (algorithm, models, episode)."""
    questions = [dataclasses.replace(ask_about(0), evidence=options.pop("supporting", ()))]
    judge, over = options.pop("judge", None), options.pop("over", ())
    algorithm = make_algorithm(questions, judge, **({"group_size": len(plan)} | options))
    models = ScriptedModels(Script(questions, {0: plan}, {0: scorings}, over))
    (episode,) = roll_out(algorithm, models, step)
    return algorithm, models, episode


# -------------------------------------------------------------------------- Prompts of each model


def test_policy_gets_questions_and_reward_model_gets_evidence():
    algorithm, models, episode = run_question()
    first, second = models.calls
    assert (first.role, first.model, first.group) == ("responder", "policy", 4)
    assert first.prompts == ("d0.0 text\nd0.1 text\nQ00 what?\nquote",)
    assert (second.role, second.model, second.group) == ("reward_model", "reward_model", 1)
    assert second.temperature == 1.0
    question_line = "Q00 what?\n"
    sets = "".join(f"{i}\n{question_line}d0.0 text\nset {n}\n" for i, n in enumerate((0, 1, 3), 1))
    assert second.prompts == (f"{sets}{question_line}scores",)  # of the well-formed siblings only
    assert episode.evidence_scores == (5, 1, 3)
    assert episode.evidence == (1.0, 0.0, None, 0.5)
    assert episode.scores == pytest.approx([1.0, 0.1, 0.0, 0.85])
    assert episode.verbatim == (pytest.approx(9 / 14), pytest.approx(9 / 14), None, 9 / 14)
    assert episode.predictions == ("alpha0", "999", None, "alpha0")
    (group,) = to_groups(algorithm, [episode])
    assert group.name == "responder" and group.model == "policy"
    expected_advantages = tuple(round(float(a), 4) for a in group_advantages(episode.scores))
    assert read(group)[2] == expected_advantages
    assert read(group)[1] == tuple(episode.response.texts if episode.response else ())


def test_malformed_scoring_is_retried_then_neutral():
    algorithm, models, episode = run_question(scorings=("what?", "1 5\n2 1\n3 3"))
    assert episode.evidence_scores == (5, 1, 3) and episode.scoring_calls == 2
    means = algorithm.metrics([episode]).means()
    assert (means["scoring_retried"], means["scoring_failed"]) == (1, 0)
    algorithm, models, episode = run_question(scorings=("what?", "1 5\n2 6\n3 3", "1 5\n2 1\n3 3"))
    assert episode.evidence_scores is None and episode.scoring_calls == 2
    assert episode.evidence == (0.5, 0.5, None, 0.5)
    assert episode.scores == pytest.approx([0.85, 0.25, 0.0, 0.85])
    assert algorithm.metrics([episode]).means()["scoring_failed"] == 1
    assert episode.consistent == ()
    _, models, _ = run_question(scorings=("what?",), scoring_temperature=0.0)
    assert [call.temperature for call in models.calls[1:]] == [0.0, 1.0]
    _, models, _ = run_question(scorings=("what?",), retries=3, scoring_temperature=0.7)
    assert [call.temperature for call in models.calls[1:]] == [0.7] * 4
    _, models, _ = run_question(scorings=("what?",), retries=0)
    assert len(models.calls) == 2


def test_evidence_and_scores_are_compared_to_supporting_sentences():
    algorithm, _, episode = run_question(
        scorings=("1 3\n2 1\n3 1",), supporting=("set 0", "d0.0 text")
    )
    halves = pytest.approx((9 / 14, 0.5))
    assert episode.supported == ((1.0, 1.0), halves, None, halves)
    assert episode.ordered_by_evidence() == [1.0, 1.0]  # the other two are equal
    means = algorithm.metrics([episode]).means()
    assert means["evidence_recall"] == pytest.approx(2 / 3)
    assert means["evidence_precision"] == pytest.approx((1 + 18 / 14) / 3)
    assert means["scoring_order"] == means[f"scoring_order/{QA}"] == 1.0
    rescored_episode = dataclasses.replace(episode, evidence_scores=(2, 2, 5))
    assert rescored_episode.ordered_by_evidence() == [0.5, 0.0]
    assert dataclasses.replace(episode, evidence_scores=None).ordered_by_evidence() == []
    algorithm, _, episode = run_question()  # a question without its evidence
    assert episode.supported == (None,) * 4 and episode.ordered_by_evidence() == []
    assert not {"evidence_recall", "scoring_order"} & algorithm.metrics([episode]).means().keys()


def test_highest_score_is_compared_to_the_rouge_oracle():
    """The evidence of sibling n is "d0.0 text" and "set n"; sibling 2 has no format."""
    supporting_sentences = ("d0.0 text", "set 3")
    algorithm, _, episode = run_question(
        scorings=("1 3\n2 1\n3 5",), supporting=supporting_sentences
    )
    assert episode.rouge_l == (0.8, 0.8, None, 1.0)  # of the words d0, 0, text, set, 3
    assert episode.best_chosen() == 1.0
    means = algorithm.metrics([episode]).means()
    assert means["scoring_best"] == means[f"scoring_best/{QA}"] == 1.0
    assert means["evidence_rouge_l"] == pytest.approx(2.6 / 3)
    for scores, share in (((5, 1, 3), 0.0), ((5, 1, 5), 0.5), ((2, 2, 2), 1 / 3)):
        rescored_episode = dataclasses.replace(episode, evidence_scores=scores)
        assert rescored_episode.best_chosen() == pytest.approx(share)
    assert dataclasses.replace(episode, evidence_scores=None).best_chosen() is None
    algorithm, _, same = run_question(scorings=("1 3\n2 1\n3 5",), supporting=("d0.0 text",))
    assert same.rouge_l == (1.0, 1.0, None, 1.0) and same.best_chosen() is None
    assert "scoring_best" not in algorithm.metrics([same]).means()
    _, _, unknown = run_question()
    assert unknown.rouge_l == (None,) * 4 and unknown.best_chosen() is None


def test_scores_are_compared_to_outcomes():
    """The first and the fourth answer are right, the second is wrong, the third has no format."""
    algorithm, _, episode = run_question(scorings=("1 4\n2 3\n3 3",))
    assert episode.ordered_by_outcome() == [1.0, 0.5]
    means = algorithm.metrics([episode]).means()
    assert means["scoring_accuracy"] == means[f"scoring_accuracy/{QA}"] == 0.75
    failed = dataclasses.replace(episode, evidence_scores=None)
    assert failed.ordered_by_outcome() == []


def test_single_well_formed_answer_is_not_scored():
    _, models, episode = run_question(plan=((True, True), (False, True), (False, False)))
    assert [call.role for call in models.calls] == ["responder"]
    assert episode.scores == pytest.approx([0.85, 0, 0]) and episode.scoring_calls == 0
    _, models, episode = run_question(plan=((False, True),) * 3)
    assert len(models.calls) == 1 and episode.scores == (0, 0, 0) and not episode.mixed


def test_overlong_prompts_are_dropped_or_scored_neutrally():
    algorithm, models, episode = run_question(over=("responder",))
    assert episode.status == "overlong" and to_groups(algorithm, [episode]) == []
    assert len(models.calls) == 1 and algorithm.metrics([episode]).means()["overlong"] == 1
    _, models, episode = run_question(over=("reward_model",))
    assert len(models.calls) == 2  # the same prompt would be rejected again
    assert episode.evidence == (0.5, 0.5, None, 0.5) and episode.scoring is None


def test_scoring_that_is_cut_off_and_dropped_is_asked_again():
    questions = [ask_about(0)]
    scorings = ("1 5\n2" + CUT, "1 5\n2 1\n3 3")
    for truncated, call_count in (("drop", 2), ("zero", 2), ("score", 2)):
        algorithm = make_algorithm(questions, None, group_size=4, truncated=truncated)
        models = ScriptedModels(Script(questions, {0: HALF}, {0: scorings}), truncated)
        (episode,) = roll_out(algorithm, models, 1)
        assert (episode.scoring_calls, episode.evidence_scores) == (call_count, (5, 1, 3)), (
            truncated
        )


def test_overlong_scoring_is_not_asked_again_where_cut_off_ones_are_dropped():
    questions = [ask_about(0)]
    algorithm = make_algorithm(questions, None, group_size=4, truncated="drop")
    script = Script(questions, {0: HALF}, over=("reward_model",))
    (episode,) = roll_out(algorithm, ScriptedModels(script, "drop"), 1)
    assert episode.scoring_calls == 1 and episode.evidence == (0.5, 0.5, None, 0.5)


@pytest.mark.parametrize(
    ("how", "models", "trained"),
    [
        ("co_evolving", ("reward_model",), ("reward_model",)),
        ("static", ("reward_model",), ()),
        ("logged", ("reward_model",), ()),
        ("none", (), ()),
    ],
)
def test_reward_model_setting_selects_the_models(how, models, trained):
    options = {"reward_model": how, "refresh_every": 1}
    plan = ((True, True), (True, False))
    algorithm, scripted_models, episode = run_question(plan, ("1 5\n2 1",), **options)
    assert (algorithm.model_names, algorithm.trained) == (models, trained)
    assert any(call.model == "reward_model" for call in scripted_models.calls) == bool(models)
    roles = [(group.name, group.model) for group in to_groups(algorithm, [episode])]
    learned = [("reward_model", "reward_model")] if trained else []
    assert roles == [("responder", "policy"), *learned]
    assert episode.consistent == ((True, True) if models else ())
    assert len(algorithm.state_dict()["kept"]) == 0
    means = algorithm.metrics([episode]).means()
    if how in ("logged", "none"):  # by the outcome only; its weight is .6 + .3
        assert episode.scores == pytest.approx([1.0, 0.1])
    assert means.get("evidence_score") == (3 if models else None)
    assert ("scoring_failed" in means) == bool(models)


@pytest.mark.parametrize(("rule", "scores"), [("match", (1, 0, 0, 1)), ("exact", (0, 0, 0, 0))])
def test_rule_of_the_config_scores_answers(rule, scores):
    question = ask_about(0)  # the policy says alpha0
    shorter = dataclasses.replace(question, answer="alpha")
    algorithm = make_algorithm([shorter], None, group_size=len(HALF), rule=rule)
    models = ScriptedModels(Script([question], {0: HALF}, {0: ("1 5\n2 1\n3 3",)}, ()))
    (episode,) = roll_out(algorithm, models, 1)
    assert "alpha0" in episode.predictions and episode.rule == scores


def test_judge_replaces_the_rule_for_well_formed_answers():
    judged_items = []

    def judge(items):
        judged_items.extend(items)
        return [0, 1, -1][: len(items)]

    algorithm, _, episode = run_question(judge=judge, rule="judge")
    assert judged_items == [
        ("Q00 what?", prediction, "alpha0") for prediction in ("alpha0", "999", "alpha0")
    ]
    assert episode.rule == (0, 1, 0, 1)  # without a verdict, the rule's reward stays
    assert algorithm.metrics([episode]).means()["judge_failed"] == pytest.approx(1 / 3)


# ---------------------------------------------------------------------------------------- Rewards


def brute_force(
    formed: Sequence[bool], scores: Sequence[int] | None, right: Sequence[bool]
) -> list[Fraction]:
    """Compute total rewards as exact fractions by the formula; `scores` are of all siblings."""
    total_rewards = []
    for i, is_formed in enumerate(formed):
        if not is_formed:
            total_rewards.append(Fraction(0))
            continue
        share = Fraction(1, 2)
        if scores is not None:
            group = sorted(s for s, f in zip(scores, formed, strict=True) if f)
            if group[0] != group[-1]:
                share = Fraction(scores[i] - group[0], group[-1] - group[0])
        total_rewards.append(
            Fraction(1, 10) + Fraction(3, 10) * share + Fraction(6, 10) * int(right[i])
        )
    return total_rewards


def rewarded(algorithm: Eapo, formed, scores, right) -> list[float]:
    answer = StructuredAnswer("a", "e", "r", "x")
    episode = EapoEpisode(
        QA,
        Cluster("c", ("d",)),
        answers=tuple(answer if f else None for f in formed),
        rule=tuple(float(r and f) for r, f in zip(right, formed, strict=True)),
        evidence_scores=scores and tuple(s for s, f in zip(scores, formed, strict=True) if f),
    )
    return list(algorithm.reward(episode).scores)


def test_rewards_match_brute_force_for_up_to_four_siblings():
    algorithm, cases = make_algorithm([ask_about(0)]), 0
    for size in (2, 3, 4):
        flags = list(itertools.product((False, True), repeat=size))
        vectors = [None, *itertools.product(range(1, 6), repeat=size)]
        for formed, scores in itertools.product(flags, vectors):
            if scores and any(s > 1 and not f for s, f in zip(scores, formed, strict=True)):
                continue  # a malformed answer has no score to vary
            for right in flags:
                expected = [float(x) for x in brute_force(formed, scores, right)]
                assert rewarded(algorithm, formed, scores, right) == pytest.approx(expected), (
                    formed,
                    scores,
                    right,
                )
                cases += 1
    assert cases == sum((6**n + 2**n) * 2**n for n in (2, 3, 4))


def test_rewards_match_brute_force_for_random_groups():
    algorithm, rng = make_algorithm([ask_about(0)]), np.random.default_rng(0)
    for _ in range(3000):
        size = int(rng.integers(2, 9))
        formed, right = (rng.random((2, size)) < rng.random((2, 1))).tolist()
        scores = None if rng.random() < 0.1 else rng.integers(1, 6, size).tolist()
        expected_rewards = [float(x) for x in brute_force(formed, scores, right)]
        rewards = rewarded(algorithm, formed, scores, right)
        assert rewards == pytest.approx(expected_rewards), (formed, scores, right)
        assert all(total == 0 for total, f in zip(rewards, formed, strict=True) if not f)


def test_groups_with_equal_rewards_are_not_trained_on():
    algorithm, _, episode = run_question(plan=((True, True),) * 3, scorings=("1 4\n2 4\n3 4",))
    assert episode.scores == (episode.scores[0],) * 3 and to_groups(algorithm, [episode]) == []
    (record,) = to_records(algorithm, [episode])
    assert record["used"] == {"responder": "equal_rewards"}
    algorithm, _, episode = run_question(((True, True),) * 3, ("1 4\n2 4\n3 4",), keep_equal=True)
    (group,) = to_groups(algorithm, [episode])
    assert group.name == "responder" and list(group.advantages) == [0.0] * 3
    algorithm, _, episode = run_question(divide_by_deviation=False)
    (group,) = to_groups(algorithm, [episode])
    centered = np.array(episode.scores) - np.mean(episode.scores)
    assert np.asarray(group.advantages) == pytest.approx(centered, abs=1e-6)
    for deviation, ddof in (("sample", 1), ("population", 0)):
        algorithm, _, episode = run_question(deviation=deviation)
        (group,) = to_groups(algorithm, [episode])
        expected_advantages = centered / np.std(episode.scores, ddof=ddof)
        assert np.asarray(group.advantages) == pytest.approx(expected_advantages, abs=1e-4)


# ------------------------------------------------------------------------------------ Co-evolution


def test_consistency_of_every_score_and_outcome():
    confirmed = {(s, o) for s in range(1, 6) for o in (0.0, 0.5, 1.0) if is_consistent(s, o)}
    assert confirmed == {(1, 0.0), (2, 0.0), (4, 1.0), (5, 1.0)}


def trained_text(group: TrainGroup) -> str:
    """Return the answer of a scripted row, with "_" for each token without an advantage."""
    (sample,), (advantage,) = group.samples, group.advantages
    assert group.token_advantages is not None
    (terms,) = group.token_advantages
    pairs = zip(sample.tokens.tolist(), advantage + terms, strict=True)
    assert set(advantage + terms) <= {0.0, 1.0}
    return "".join(chr(token) if advantage else "_" for token, advantage in pairs)


DRAFT = "<think>1 5\n2 5\n3 5</think>"


@pytest.mark.parametrize(
    ("scoring", "trained"),
    [
        ("1 5\n2 1\n3 4", "__5___1___4"),
        ("1 5\n2 4\n3 3", "__5________"),  # 4 is contradicted, 3 says nothing
        ("1 2\n2 2\n3 1", "______2____"),
        (f"{DRAFT}1 5\n2 2\n3 2", "_" * len(DRAFT) + "__5___2____"),
        ('{"scores": [1, 2, 5]}', "_" * 15 + "2__5__"),
        ('{"reason": "2, 5", "scores": [4,4,4]}', "_" * 30 + "4___4__"),
    ],
)
def test_kept_trajectories_train_on_confirmed_scores_alone(scoring, trained):
    algorithm, _, episode = run_question(HALF, (scoring,), refresh_every=1)
    (group,) = (group for group in to_groups(algorithm, [episode]) if group.model == "reward_model")
    assert trained_text(group) == trained
    (sample,) = group.samples
    assert bytes(sample.tokens.tolist()).decode() == scoring  # the whole reply is context


def test_reply_without_confirmed_scores_is_not_kept():
    for scoring in ("1 3\n2 3\n3 3", "1 1\n2 5\n3 2", "no scores"):
        algorithm, _, _ = run_question(HALF, (scoring,))
        assert algorithm.state_dict()["kept"] == []


def test_token_of_two_scores_needs_both_confirmed():
    tokens = (b"[", b"5,1", b",", b"4]")
    ids = np.arange(len(tokens), dtype=np.int32)

    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode()

    for start in ("", "<think>"):  # which the prompt wrote
        reply = Reply([7], [Sample(ids, stopped=False)], [start + "[5,1,4]"], decode=decode)
        places = [len(start) + place for place in (1, 3, 5)]
        for consistent, confirmed in (
            ((True, True, True), (1, 3)),
            ((True, False, True), (3,)),
            ((False, True, False), ()),
        ):
            assert Scoring.of(reply, places, consistent).confirmed == confirmed


def campaign(steps: Sequence[int], algorithm: Eapo | None = None, **options: Any):
    """Run steps of four questions each; return (algorithm, groups of each step).

    In even steps no outcome confirms a score of question 1.
    """
    questions = [ask_about(i) for i in range(3)] + [ask_about(3, MATH)]
    plan = ((True, True), (True, False), (True, True))
    algorithm = algorithm or make_algorithm(questions, group_size=3, **({"questions": 4} | options))
    groups_by_step = []
    for step in steps:
        middle = (1, 5, 3) if step % 2 == 0 else (4, 2, 3)
        scores = {0: (5, 1, 4), 1: middle, 2: (3, 3, 5), 3: (5, 2, 5 - step % 2)}
        scorings = {i: [labeled(question_scores)] for i, question_scores in scores.items()}
        models = ScriptedModels(Script(questions, dict.fromkeys(range(4), plan), scorings))
        groups_by_step.append([*map(read, to_groups(algorithm, roll_out(algorithm, models, step)))])
    return algorithm, groups_by_step


def refreshes(groups_by_step) -> list[int]:
    """Count the reward model rows of each step."""
    return [sum(prompt.endswith("scores") for prompt, *_ in step) for step in groups_by_step]


def test_reward_model_trains_on_consistent_scorings_every_20_steps():
    algorithm, groups_by_step = campaign(range(1, 46))
    # Of four scorings per step three have a confirmed score, and question 1's in odd steps.
    assert refreshes(groups_by_step) == [0] * 19 + [70] + [0] * 19 + [70] + [0] * 5
    assert len(algorithm.state_dict()["kept"]) == 18
    learned = [row for row in groups_by_step[19] if row[0].endswith("scores")]
    assert {advantages for _, _, advantages in learned} == {(1.0,)}
    assert [answers for prompt, answers, _ in learned if "Q01" in prompt] == [
        ("1 4\n2 2\n3 3",)
    ] * 10


def test_building_groups_twice_gives_the_same_groups():
    questions = [ask_about(0)]
    algorithm = make_algorithm(questions, group_size=2, refresh_every=1)
    plan = ((True, True), (True, False))
    models = ScriptedModels(Script(questions, {0: plan}, {0: ["1 5\n2 1"]}))
    episodes = roll_out(algorithm, models, 1)
    first, second = ([*map(read, to_groups(algorithm, episodes))] for _ in range(2))
    assert first == second and len(first) == 2
    (group,) = (group for group in to_groups(algorithm, episodes) if group.model == "reward_model")
    assert group.samples[0].logprobs is None  # kept scorings have no logprobs of the sampler


def test_oldest_scorings_are_dropped_first():
    algorithm, groups_by_step = campaign(range(1, 8), most_rollouts=5, refresh_every=7)
    assert refreshes(groups_by_step)[-1] == 5
    newest = [row for row in groups_by_step[-1] if row[0].endswith("scores")]
    *_, last = (row[1] for row in newest if "Q03" in row[0])
    assert last == ("1 5\n2 2\n3 4",)  # of step 7
    assert algorithm.state_dict()["kept"] == []


def test_state_of_whole_replies_is_refused():
    algorithm, _ = campaign(range(1, 3))
    state = algorithm.state_dict()
    for scoring in state["kept"]:
        del scoring["confirmed"]
    after, _ = campaign(())
    with pytest.raises(
        ValueError, match=r"EAPO state: \['confirmed'\] missing .*; start a new run"
    ):
        after.load_state_dict(state)
    after.load_state_dict(state | {"kept": []})


@pytest.mark.parametrize("stop", [3, 7, 8])
def test_resumed_run_gives_the_same_rows(stop):
    options: dict[str, Any] = {"refresh_every": 8, "seed": 3, "questions": 2}
    _, uninterrupted_groups = campaign(range(1, 17), **options)
    before, first = campaign(range(1, stop + 1), **options)
    state = json.loads(json.dumps(before.state_dict()))
    after, _ = campaign((), **options)
    after.load_state_dict(state)
    assert after.state_dict() == before.state_dict()
    _, resumed_groups = campaign(range(stop + 1, 17), after)
    assert first + resumed_groups == uninterrupted_groups
    assert sum(map(bool, refreshes(uninterrupted_groups))) == 2


# ------------------------------------------------------------------------------------- On disk


def test_record_is_json_and_readable_by_the_report(tmp_path):
    questions = [ask_about(0), ask_about(1), ask_about(2, MATH)]
    algorithm = make_algorithm(questions)
    plans = {0: HALF, 1: ((False, False),) * 4, 2: ((True, True),) * 4}
    scorings: dict[int, Sequence[str]] = {0: ["no"], 2: ["1 5\n2 5\n3 5\n4 5"]}
    episodes = roll_out(algorithm, ScriptedModels(Script(questions, plans, scorings)), 1)
    episodes.append(run_question(over=("responder",))[2])
    _, annotations = algorithm.groups(episodes, (0, 1))
    episode_records = [make_record(*pair) for pair in zip(episodes, annotations, strict=True)]
    for record in episode_records:
        assert json.loads(json.dumps(record)) == record
    by_task = {record["question"][:3]: record for record in episode_records[:3]}
    assert by_task["Q00"]["prompt"] == "{documents[0]}\n{documents[1]}\nQ00 what?\nquote"
    assert by_task["Q00"]["used"]["responder"] == "used"
    assert by_task["Q00"]["scoring"] == "no" and by_task["Q00"]["evidence_scores"] is None
    EpisodeWriter(tmp_path, 10_000).write(1, records(episodes, annotations))
    page = report_episodes.choose_episodes(epath.Path(tmp_path), 10)
    assert page.readable_count == 4 and len(page.chosen_episodes) == 4
    outcomes = {e["question"][:3]: e["outcome"] for e in page.chosen_episodes if e["answers"]}
    assert outcomes == {"Q00": "mixed", "Q01": "unsolved", "Q02": "half solved"}
    assert page.documents


def test_record_has_every_measure_for_each_answer():
    scorings = ("1 5\n2 1\n3 4",)
    algorithm, _, episode = run_question(
        scorings=scorings, rule="judge", judge=lambda items: [1, 0, -1][: len(items)]
    )
    (record,) = to_records(algorithm, [episode])
    assert record["judge"] == [1, 0, None, -1]  # the third answer is malformed
    assert record["measures"] == {
        "well_formed": [True, True, False, True],
        "evidence_score": [5, 1, None, 4],
        "consistent": [True, True, None, True],
        "evidence_reward": [1.0, 0.0, None, 0.75],
        "verbatim": list(episode.verbatim),
        "evidence_precision": [None] * 4,  # the question lacks its evidence
        "evidence_recall": [None] * 4,
        "evidence_rouge_l": [None] * 4,
    }
    failed, _, episode = run_question(scorings=("no",))
    (record,) = to_records(failed, [episode])
    assert record["measures"]["evidence_score"] == [None] * 4
    assert record["measures"]["consistent"] == [None] * 4


def test_metrics_of_a_step():
    algorithm, _, episode = run_question(scorings=("1 5\n2 1\n3 4",))
    means = algorithm.metrics([episode]).means()
    assert means["solve_rate"] == means["outcome_reward"] == 0.5
    assert means["well_formed"] == 0.75
    assert means["total_reward"] == pytest.approx(np.mean(episode.scores))
    assert means["evidence_reward"] == pytest.approx((1 + 0 + 0.75) / 3)
    assert means["evidence_score"] == pytest.approx(10 / 3)
    assert (means["evidence_score_right"], means["evidence_score_wrong"]) == (4.5, 1)
    assert means["verbatim"] == pytest.approx(9 / 14)
    assert means["mixed"] == means["scoring_consistent"] == means["kept_scorings"] == 1
    algorithm, _, episode = run_question(scorings=("1 5\n2 4\n3 3",))
    means = algorithm.metrics([episode]).means()
    assert means["scoring_consistent"] == pytest.approx(1 / 3) and means["kept_scorings"] == 1
    assert means["refreshed_scorings"] == 0
    assert means[f"solve_rate/{QA}"] == 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("questions", 0),
        ("group_size", 1),
        ("format_weight", -0.1),
        ("evidence_weight", float("nan")),
        ("reward_model", "frozen"),
        ("refresh_every", 0),
        ("most_rollouts", 0),
        ("scoring_temperature", -1.0),
        ("retries", -1),
        ("rule", "both"),
        ("judge_template", "stars"),
    ],
)
def test_invalid_field_is_named_in_the_error(field, value):
    with pytest.raises(ValueError, match=rf"algorithm\.{field} = "):
        EapoConfig(**{field: value})
