"""Tests of held-out evaluation in the tiny world, with scripted models: perfect or wrong."""

from __future__ import annotations

import re

import pytest

from spell_jax.algorithms.held_out import HeldOut
from spell_jax.algorithms.spell import evaluation
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.evaluation import RoleExams, make_questions
from spell_jax.data import tiny_world as world
from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.data.config import TinyEvaluationConfig
from tests.algorithms.scripted import ScriptedModels, make_config, make_context
from tests.evaluation.oracle import documents_of, perfect, questioner

QA, MATH, CHOICE = PAPER_TASKS
GAME = make_config(
    SpellConfig,
    questioner__documents=(2,),
    questioner__max_answer_tokens=3,
    questioner__distinct_options=True,
)
SETTINGS = {"per_cell": 12, "documents": (2, 5), "quick_per_cell": 6, "quick_documents": (3,)}


def make(config: SpellConfig = GAME, **sizes) -> HeldOut:
    exams = RoleExams(config, make_context())
    return evaluation.evaluate_tiny_world(exams, TinyEvaluationConfig(**sizes))


SMALL = make(**SETTINGS)
RESPONDER = "responder accuracy, by documents"
VERIFIER = "verifier accuracy, by pair"
LETTERS = "multiple choice, share of each letter among answers"


def wrong(role: str, prompt: str, sibling: int, model: str) -> str:
    if role == "responder":
        right = perfect(role, prompt, sibling, model).split()[-1]
        return f"answer is {'ABCD'[('ABCD'.index(right) + 1) % 4] if '(A)' in prompt else '9999'}"
    if role == "verifier":
        return "[[NO]]" if "YES" in perfect(role, prompt, sibling, model) else "[[YES]]"
    return questioner(prompt, right=False)


def silent(role: str, prompt: str, sibling: int, model: str) -> None:
    return None


def shares(section: dict) -> set[float]:
    return {cell[0] for row in section.values() for cell in row.values()}


def test_perfect_model_scores_one_everywhere():
    report = SMALL.full(ScriptedModels(perfect)).report
    assert set(report) == {RESPONDER, VERIFIER, LETTERS, "questioner"}
    assert set(report[RESPONDER]) == {*world.KINDS, "all"}
    assert set(report[RESPONDER]["all"]) == {"2", "5"}
    assert shares(report[RESPONDER]) == shares(report[VERIFIER]) == {1.0}
    assert shares(report["questioner"]) == {1.0}
    assert set(report["questioner"]) == {
        *PAPER_TASKS,
        *(f"{task}, one known" for task in PAPER_TASKS),
    }


def test_wrong_model_has_zero_accuracy():
    report = SMALL.full(ScriptedModels(wrong)).report
    assert shares(report[RESPONDER]) == shares(report[VERIFIER]) == {0.0}
    for row in report["questioner"].values():
        assert row["accepted"][0] == row["answerable, of accepted"][0] == 1.0
        assert row["reference right, of answerable"][0] == 0.0


def test_prompts_over_the_cap_count_as_wrong():
    report = SMALL.full(ScriptedModels(silent)).report
    assert shares(report[RESPONDER]) == shares(report[VERIFIER]) == {0.0}
    assert {row["accepted"][0] for row in report["questioner"].values()} == {0.0}


def test_malformed_verdicts_count_as_wrong():
    report = SMALL.full(
        ScriptedModels(lambda role, *arguments: None if role != "verifier" else "maybe")
    ).report
    assert shares(report[VERIFIER]) == {0.0}


def test_quick_score_is_the_mean_over_question_kinds():
    score, numbers = SMALL.quick(ScriptedModels(perfect))
    assert score == numbers["responder"] == 1.0
    assert set(numbers) == {"lookup/3", "two_hop/3", "math/3", "choice/3", "responder"}

    def no_choices(role, prompt, sibling, model):
        return "pass" if "(A)" in prompt else perfect(role, prompt, sibling, model)

    assert SMALL.quick(ScriptedModels(no_choices))[0] == pytest.approx(0.75)


def test_surface_forms_count_as_right_answers():
    def worded(role, prompt, sibling, model):
        answer = perfect(role, prompt, sibling, model).split()[-1]
        if "(A)" in prompt:
            return f"answer is {answer}"
        forms = world.surface_forms(answer if answer.isdigit() else answer.title())
        return f"answer is {forms[-1]}"

    assert SMALL.quick(ScriptedModels(worded))[0] == 1.0


def test_answers_and_verdicts_are_greedy_and_questions_are_sampled():
    ask = ScriptedModels(perfect)
    SMALL.full(ask)
    temperatures = {(call.role, call.temperature) for call in ask.calls}
    assert temperatures == {("responder", 0.0), ("verifier", 0.0), ("questioner", None)}
    assert {call.group for call in ask.calls} == {1}
    assert {call.model for call in ask.calls} == {"policy"}


def test_questions_match_their_kind_and_are_reproducible():
    for kind in world.KINDS:
        questions = make_questions(4, kind, 20)
        assert questions == make_questions(4, kind, 30)[:20]
        assert len({question.documents for question in questions}) == 20
        for question in questions:
            assert kind == world.question_kind(question.question)
            assert question.task == world.TASK_OF_KIND[kind] and len(question.documents) == 4
            truth = world.oracle_choice if kind == "choice" else world.oracle
            assert truth(question.question, question.documents) == question.answer
    assert make_questions(2, "two_hop", 30)  # two documents suffice for a two-hop question


@pytest.mark.parametrize("seed", [0, TinyEvaluationConfig().seed])
def test_held_out_documents_differ_from_training_documents(seed):
    trained = world.make_clusters(seed, 300, (3, 8))
    training_texts = {text for cluster in trained for text in cluster.documents}
    held_out = {q.documents for kind in world.KINDS for q in make_questions(3, kind, 50)}
    alike = world.make_clusters(seed, 300, (3,))
    assert not held_out & {c.documents for c in alike}
    # Texts that are equal by chance.
    assert len({text for documents in held_out for text in documents} & training_texts) < 5


def test_letter_shares_reveal_a_model_that_always_answers_b():
    def always_b(role, prompt, sibling, model):
        return "answer is B"

    (row,) = SMALL.full(ScriptedModels(always_b)).report[LETTERS].values()
    assert {letter: cell[0] for letter, cell in row.items()} == {"A": 0, "B": 1, "C": 0, "D": 0}


def test_questions_about_unknown_names_are_not_answerable():
    def about_nobody(role, prompt, sibling, model):
        if role != "questioner":
            return perfect(role, prompt, sibling, model)
        return re.sub(r"of \w+", "of Nobody", questioner(prompt, right=True))

    for row in SMALL.full(ScriptedModels(about_nobody)).report["questioner"].values():
        assert row["accepted"][0] == 1.0 and row["answerable, of accepted"][0] == 0.0


def questioner_prompts(evaluation: HeldOut) -> list[str]:
    ask = ScriptedModels(perfect)
    evaluation.full(ask)
    (call,) = [call for call in ask.calls if call.role == "questioner"]
    return call.prompts


def test_questioner_sees_as_many_documents_as_in_training():
    fresh, follow_ups = 3 * 12, 3 * 12
    prompts = questioner_prompts(SMALL)
    assert [len(documents_of(p)) for p in prompts] == fresh * [2] + follow_ups * [4]
    for prompt in prompts[fresh:]:
        facts = world.read_facts(documents_of(prompt)[:2])
        assert [name for name, _ in facts if name in prompt.partition("known")[2]], prompt
    forgetful = make(
        make_config(SpellConfig, questioner__documents=(2,), questioner__memory=0), **SETTINGS
    )
    assert questioner_prompts(forgetful) == prompts[:fresh]


@pytest.mark.parametrize(
    "spoil, task",
    [
        (lambda text: re.sub(r'"answer": "(\D\w+)"', r'"answer": "\1 a b c"', text), "general_qa"),
        (lambda text: re.sub(r'"(A|B)": "[^"]*"', r'"\1": "Rome"', text), "multiple_choice"),
    ],
    ids=["a long reference", "two equal options"],
)
def test_proposals_rejected_in_training_are_not_accepted(spoil, task):
    def spoilt(role, prompt, sibling, model):
        text = perfect(role, prompt, sibling, model)
        return spoil(text) if role == "questioner" else text

    for row, cells in SMALL.full(ScriptedModels(spoilt)).report["questioner"].items():
        assert cells["accepted"][0] == (not row.startswith(task))


@pytest.mark.parametrize(
    ("prediction", "truth", "task", "right"),
    [
        ("Fjordton", world.canonical("Oslo"), QA, True),
        ("Mr Bela", world.canonical("Bela"), QA, True),
        ("34 dollars", "34", QA, True),
        ("Rome", world.canonical("Oslo"), QA, False),
        ("46.0", "46", MATH, True),
        ("$46", "46", MATH, True),
        ("4600", "46", MATH, False),  # the rule's tolerance in percent does not apply here
        ("-46", "46", MATH, False),
        ("B", "B", CHOICE, True),
        ("b", "B", CHOICE, False),
        (None, world.canonical("Oslo"), QA, False),
        ("", world.canonical("Oslo"), QA, False),
    ],
)
def test_is_true_compares_answers_by_task(prediction, truth, task, right):
    assert evaluation.is_true(prediction, truth, task) == right


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"per_cell": 0}, "per_cell"),
        ({"quick_per_cell": 0}, "quick_per_cell"),
        ({"documents": ()}, "documents"),
        ({"documents": (3, 1)}, "documents"),  # the two hops are never in one document
        ({"documents": (49,)}, "documents"),
        ({"quick_documents": (1,)}, "quick_documents"),
    ],
)
def test_invalid_setting_is_named_in_the_error(options, field):
    with pytest.raises(ValueError, match=rf"data\.tiny\.evaluation\.{field} = "):
        make(**options)


def test_more_documents_than_the_world_has_are_rejected():
    with pytest.raises(ValueError, match=r"algorithm\.questioner\.documents = \(2, 25\)"):
        make(make_config(SpellConfig, questioner__documents=(2, 25)))
