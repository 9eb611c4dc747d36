"""Tests of document reconstruction: puzzles, rewards, training rows, metrics, records, resume."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter

import numpy as np
import pytest
from etils import epath

from spell_jax.algorithms.base import records
from spell_jax.algorithms.reconstruction.algorithm import (
    ROUNDS,
    Reconstruction,
    ReconstructionConfig,
)
from spell_jax.data.clusters import Cluster
from spell_jax.data.tiny_stories import make_stories
from spell_jax.learner.advantages import group_advantages
from spell_jax.reporting.episodes import choose_episodes
from spell_jax.reporting.page import RunData, write_page
from spell_jax.runtime.files.episodes import EpisodeWriter
from spell_jax.runtime.log.metrics import MetricsWriter, read_metrics
from spell_jax.selfplay import puzzles
from tests.algorithms.posing import (
    STORIES,
    config,
    guessing,
    improving,
    make_algorithm,
    perfect,
    silent,
    solution,
)
from tests.algorithms.scripted import CUT, ScriptedModels, read, roll_out, to_groups, to_records

SHORT = Cluster("short", ("a line\nand another",))


def run(write=improving, step: int = 1, **options):
    """Run a step; return (algorithm, models, episodes)."""
    algorithm, ask = make_algorithm(**options), ScriptedModels(write)
    return algorithm, ask, roll_out(algorithm, ask, step)


def start(algorithm: Reconstruction, step: int, seed: int = 0):
    return algorithm.start_episodes((seed, step), step)


# ------------------------------------------------------------------------------------------ Puzzles


def test_step_sends_all_puzzles_in_one_call():
    _, ask, episodes = run()
    (call,) = ask.calls
    assert (call.role, call.group, call.model, call.temperature) == ("responder", 4, "policy", None)
    assert list(call.prompts) == [e.posed.prompt for e in episodes] and len(episodes) == 6
    assert len({e.cluster.id for e in episodes}) == 6
    for e in episodes:
        assert e.posed.puzzle and len(e.posed.truth) == e.options
        assert ", ".join(e.posed.truth) == solution(e.posed.prompt)  # the order is in the text
        assert e.status == "accepted"


def test_curriculum_increases_option_counts_over_the_run():
    algorithm = make_algorithm(
        documents=7, steps=20, options=(2, 4, 6, 8), option_weights=(3, 3, 3, 5)
    )
    by_step = [[e.options for e in start(algorithm, step)] for step in range(1, 21)]
    everything = [k for ks in by_step for k in ks]
    assert everything == [2] * 30 + [4] * 30 + [6] * 30 + [8] * 50
    assert {e.options for e in start(algorithm, 21)} == {8}  # the same run with more steps


def test_without_curriculum_every_step_mixes_option_counts():
    algorithm = make_algorithm(documents=24, steps=20, curriculum=False)
    parts = [Counter(e.options for e in start(algorithm, step)) for step in range(1, 21)]
    assert all(len(part) > 2 for part in parts)
    everything = sum(parts, Counter())
    assert everything[8] == pytest.approx(480 * 5 / 14, rel=0.15)
    assert everything[2] == pytest.approx(480 * 3 / 14, rel=0.2)


def test_puzzles_depend_only_on_seed_and_step():
    first, second, other_seed_algorithm = (make_algorithm(seed=seed) for seed in (3, 3, 4))
    prompts = [e.posed.prompt for e in start(first, 1, seed=3)]
    assert prompts == [e.posed.prompt for e in start(second, 1, seed=3)]
    assert prompts != [e.posed.prompt for e in start(other_seed_algorithm, 1, seed=4)]
    start(second, 2, seed=3)
    later_prompts = {e.posed.prompt for step in range(2, 9) for e in start(first, step, seed=3)}
    assert len(later_prompts) == 7 * 6 and not later_prompts & {*prompts}


def test_documents_without_a_puzzle_are_replaced():
    short_clusters = [dataclasses.replace(SHORT, id=f"short {i}") for i in range(12)]
    algorithm, ask, episodes = run(clusters=[*STORIES[:12], *short_clusters], steps=1)
    posed = [e for e in episodes if e.posed.puzzle]
    refused = [e for e in episodes if not e.posed.puzzle]
    assert len(posed) == len(ask.calls[0].prompts) == 6 < len(episodes)
    assert sorted(e.options for e in posed) == [2, 4, 4, 6, 8, 8]  # the mixture of a run
    assert {(e.status, e.posed.reason) for e in refused} == {("no_puzzle", puzzles.FEW_PARAGRAPHS)}
    means = algorithm.metrics(episodes).means()
    assert means["reason/few_paragraphs"] == means["no_puzzle"] == len(refused) / len(episodes)
    assert means["accepted"] == 6 / len(episodes) and "cut_documents" in means


def test_puzzle_search_ends_when_no_document_gives_a_puzzle():
    algorithm, ask, episodes = run(clusters=[SHORT])
    assert len(episodes) == ROUNDS * 6 and to_groups(algorithm, episodes) == []
    assert ask.calls[0].prompts == () and algorithm.metrics(episodes).means()["no_puzzle"] == 1
    assert algorithm.metrics(episodes).means()["stream_repeats"] > 0


def test_long_documents_are_truncated_at_paragraph_boundaries():
    stories = make_stories(2, 12, (23,))
    algorithm, _, episodes = run(clusters=stories, cap=60, options=(3,), option_weights=(1,))
    for e in episodes:
        (text,) = e.cluster.documents
        assert e.posed.cut and len(e.posed.prompt.split()) <= 60
        first, last = e.posed.window
        assert {text[:first][-1:], text[last:][:1]} <= {"\n", " ", ""}
    assert algorithm.metrics(episodes).means()["cut_documents"] == 1
    assert len({e.posed.window for e in episodes}) > 1


def test_documents_over_the_cap_are_dropped_and_counted():
    stories = [*make_stories(2, 6, (23,)), *make_stories(3, 12, (5,))]
    stories = [dataclasses.replace(story, id=str(i)) for i, story in enumerate(stories)]
    options = {"cap": 60, "options": (3,), "option_weights": (1,), "cut_documents": False}
    algorithm, _, episodes = run(clusters=stories, documents=9, **options)
    posed = [e for e in episodes if e.posed.puzzle]
    dropped = [e for e in episodes if not e.posed.puzzle]
    assert len(posed) == 9 and dropped and not any(e.posed.cut for e in posed)
    assert all(e.posed.window == (0, len(e.cluster.documents[0])) for e in posed)
    assert {(e.status, e.reason) for e in dropped} == {("overlong", puzzles.OVERLONG)}
    assert {int(e.cluster.id) < 6 for e in dropped} == {True}
    means = algorithm.metrics(episodes).means()
    assert means["overlong"] == means["reason/overlong"] == len(dropped) / len(episodes)
    assert means["cut_documents"] == 0


def test_gaps_are_adjacent_only_on_request():
    def neighbors(adjacent_gaps: bool) -> bool:
        options = {"options": (4,), "option_weights": (1,), "adjacent_gaps": adjacent_gaps}
        algorithm = make_algorithm(documents=24, **options)
        documents = [e.posed.puzzle.document for e in start(algorithm, 1) if e.posed.puzzle]
        assert len(documents) == 24
        return any(re.search(r"<gap \d>\s*<gap", document) for document in documents)

    assert neighbors(True) and not neighbors(False)


def test_documents_of_a_cluster_are_concatenated():
    (first_document,), (second_document,) = (story.documents for story in make_stories(5, 2, (4,)))
    _, _, episodes = run(
        clusters=[Cluster("both", (first_document, second_document))],
        documents=1,
        options=(2,),
        option_weights=(1,),
    )
    # a blank line separates two paragraphs
    assert episodes[0].posed.reason == puzzles.FEW_PARAGRAPHS
    _, _, episodes = run(
        clusters=[
            Cluster(
                "both",
                (first_document.replace("\n", "\n\n"), second_document.replace("\n", "\n\n")),
            )
        ],
        documents=1,
        options=(8,),
        option_weights=(1,),
    )
    assert episodes[0].posed.window[1] == len(first_document) + len(second_document) + 4 + 4 + 2


def test_prompts_over_the_sampler_cap_are_counted_as_overlong():
    algorithm, _, episodes = run(lambda *_: None)
    assert {e.status for e in episodes} == {"overlong"} and to_groups(algorithm, episodes) == []
    means = algorithm.metrics(episodes).means()
    assert means["overlong"] == 1 and means["accepted"] == 0 and "dense_reward" not in means
    record = to_records(algorithm, episodes)[0]
    assert record["answers"] == [] and record["used"] == {"responder": "overlong"}
    assert record["reference"] and record["status"] == "overlong"


def test_documents_are_selected_by_length():
    longest = make_algorithm(most_documents=8, selection="longest")
    shortest = make_algorithm(most_documents=8, selection="shortest")
    sizes = {c.id: len(c.documents[0]) for c in STORIES}
    used = [
        {e.cluster.id for step in range(1, 13) for e in start(algorithm, step)}
        for algorithm in (longest, shortest)
    ]
    assert all(len(ids) == 8 for ids in used)
    assert min(sizes[i] for i in used[0]) > max(sizes[i] for i in used[1])


# ------------------------------------------------------------------------------- Rewards and rows


@pytest.mark.parametrize("reward", ["dense", "sparse"])
def test_rewards_and_training_groups_match_the_parsed_orders(reward):
    algorithm, _, episodes = run(order_reward=reward, documents=24, steps=1)
    rows = {read(group)[0]: (group, read(group)) for group in to_groups(algorithm, episodes)}
    partly = 0
    for e in episodes:
        assert e.response
        orders = [puzzles.parse_order(text, e.options) for text in e.response.texts]
        right = [
            sum(a == b for a, b in zip(o.letters, e.posed.truth, strict=False))
            if o.is_permutation
            else 0
            for o in orders
        ]
        dense = [n / e.options for n in right]
        assert list(e.scores) == (dense if reward == "dense" else [float(n == 1) for n in dense])
        assert e.scores[:2] == (1, 0)
        partly += any(0 < s < 1 for s in e.scores)
        group, (prompt, answers, advantages) = rows[e.posed.prompt]
        assert (prompt, answers) == (e.posed.prompt, tuple(e.response.texts))
        assert advantages == tuple(np.round(group_advantages(e.scores).astype(float), 4).tolist())
        assert group.name == "responder" and group.model == "policy"
    assert bool(partly) == (reward == "dense")


def test_equal_reward_groups_are_dropped_unless_keep_equal():
    for write in (perfect, silent):
        algorithm, _, episodes = run(write)
        groups, annotations = algorithm.groups(episodes, (0, 1))
        assert groups == [] and not any(a.advantages for a in annotations)
        assert {a.used["responder"] for a in annotations} == {"equal_rewards"}
        algorithm, _, episodes = run(write, keep_equal=True)
        rows = to_groups(algorithm, episodes)
        assert len(rows) == 6 and not any(any(read(group)[2]) for group in rows)


def test_advantages_without_deviation_are_centered_rewards():
    algorithm, _, episodes = run(divide_by_deviation=False)
    for group, e in zip(to_groups(algorithm, episodes), episodes, strict=True):
        mean = sum(e.scores) / len(e.scores)
        assert list(group.advantages) == pytest.approx([s - mean for s in e.scores], abs=1e-6)


def test_advantages_have_the_chosen_deviation():
    algorithm, _, episodes = run(deviation="population")
    for group, e in zip(to_groups(algorithm, episodes), episodes, strict=True):
        expected_advantages = (np.array(e.scores) - np.mean(e.scores)) / np.std(e.scores)
        assert list(group.advantages) == pytest.approx(expected_advantages, abs=1e-4)


# ------------------------------------------------------------------------------------------ Records


def test_metrics_of_perfect_and_silent_policies():
    chances = {"dense_by_chance": 0.5, "sparse_by_chance": 0.5}
    algorithm, _, episodes = run(perfect, options=(2,), option_weights=(1,))
    means = algorithm.metrics(episodes).means()
    everything = ("permutation", "dense_reward", "sparse_reward", "solve_rate", "fully_solved")
    assert {means[name] for name in everything} == {1.0} and means["options"] == 2
    assert means["unsolved"] == means["mixed"] == means["cut_documents"] == 0
    assert {name: means[name] for name in chances} == chances
    assert {name: means[f"{name}/2"] for name in chances} == chances
    algorithm, _, episodes = run(silent)
    means = algorithm.metrics(episodes).means()
    assert {means[name] for name in everything} == {0.0} and means["unsolved"] == 1
    algorithm, _, episodes = run(improving)
    assert algorithm.metrics(episodes).means()["permutation"] == 0.75  # one of four answers A, A


def test_guessing_policy_earns_chance_level_rewards():
    algorithm, _, episodes = run(
        guessing,
        documents=24,
        group_size=60,
        steps=1,
        order_reward="sparse",
        option_weights=(1,) * 4,
    )
    means = algorithm.metrics(episodes).means()
    for k in (2, 4, 6, 8):
        assert means[f"dense_reward/{k}"] == pytest.approx(1 / k, abs=0.05)
        assert means[f"sparse_reward/{k}"] == pytest.approx(puzzles.chance_rewards(k)[1], abs=0.06)
        assert means[f"permutation/{k}"] == 1
        assert means[f"solve_rate/{k}"] == means[f"sparse_reward/{k}"]
        assert means[f"dense_by_chance/{k}"] == pytest.approx(1 / k)
    assert means["dense_by_chance"] == pytest.approx(sum(1 / k for k in (2, 4, 6, 8)) / 4)


@pytest.mark.parametrize(
    ("truncated", "scores"), [("score", [1, 0, 1]), ("zero", [0, 0, 1]), ("drop", [0, 1])]
)
def test_cut_off_order_counts_as_the_config_says(truncated, scores):
    def write(role, prompt, sibling, model):
        """Answer right, then with no permutation, then right; cut off the first answer."""
        answer = (improving if sibling == 1 else perfect)(role, prompt, sibling, model)
        return f"{CUT}{answer}" if sibling == 0 else answer

    algorithm = make_algorithm(documents=2, steps=1, group_size=3, truncated=truncated)
    episodes = roll_out(algorithm, ScriptedModels(write, truncated), 1)
    assert [list(e.scores) for e in episodes] == [scores] * 2
    for group in to_groups(algorithm, episodes):
        assert len(group.samples) == len(scores)
    for record in to_records(algorithm, episodes):
        assert len(record["dropped"]) == (truncated == "drop")
        assert record["truncated"] == [truncated != "drop", False, False][: len(scores)]


def test_one_order_that_is_left_is_no_group():
    """It has no mean to be compared with: its reward would be its advantage."""

    def write(role, prompt, sibling, model):
        return perfect(role, prompt, sibling, model) + CUT * (sibling > 0)

    algorithm = make_algorithm(
        documents=2, steps=1, group_size=3, truncated="drop", keep_equal=True
    )
    episodes = roll_out(algorithm, ScriptedModels(write, "drop"), 1)
    assert [e.scores for e in episodes] == [(1.0,)] * 2
    assert not to_groups(algorithm, episodes)


def test_orders_that_are_all_cut_off_are_in_the_record():
    def write(role, prompt, sibling, model):
        return perfect(role, prompt, sibling, model) + CUT

    algorithm = make_algorithm(documents=2, steps=1, group_size=3, truncated="drop")
    episodes = roll_out(algorithm, ScriptedModels(write, "drop"), 1)
    assert [len(record["dropped"]) for record in to_records(algorithm, episodes)] == [3, 3]


def test_records_hold_documents_predictions_and_advantages():
    algorithm, _, episodes = run()
    groups, annotations = algorithm.groups(episodes, (0, 1))
    episode_records = records(episodes, annotations)
    for e, group, record in zip(episodes, groups, episode_records, strict=True):
        assert json.loads(json.dumps(record)) == record
        assert record["documents"] == list(e.cluster.documents)
        assert record["predictions"][:2] == [record["reference"], "A, A"]
        assert record["used"] == {"responder": "used"}
        assert record["advantages"] == {"responder": list(group.advantages)}


def prompt_again(record) -> str:
    """Rebuild the prompt of a record that includes the documents."""
    first, last = record["window"]
    text = "\n\n".join(record["documents"])[first:last]
    for number, (start, end) in reversed([*enumerate(record["spans"], 1)]):
        text = text[:start] + puzzles.gap_marker(number) + text[end:]
    return record["prompt"].replace("{document}", text)


@pytest.mark.parametrize("cap", [50, 1000])
def test_prompts_can_be_rebuilt_from_records(cap):
    algorithm, _, episodes = run(clusters=make_stories(2, 12, (23,)), cap=cap)
    assert all(e.posed.cut == (cap == 50) for e in episodes)
    episode_records = records(episodes, algorithm.groups(episodes, (0, 1))[1])
    for e, record in zip(episodes, episode_records, strict=True):
        assert prompt_again(record) == e.posed.prompt != record["prompt"]


def test_solved_book_puzzles_restore_the_original_text(spell_data):
    paths = sorted((spell_data / "books" / "dev").glob("*.txt"))
    books = [Cluster(path.name, (path.read_text(encoding="utf-8"),)) for path in paths]
    algorithm = make_algorithm(books, documents=16, steps=2, cap=12_000, min_paragraph=80)
    for step in (1, 2):
        posed = [e for e in start(algorithm, step) if e.posed.puzzle]
        assert len(posed) == 16 and any(e.posed.cut for e in posed)
        for e in posed:
            assert e.posed.puzzle and len(e.posed.prompt.split()) <= 12_000
            text = e.posed.puzzle.document
            for number, letter in enumerate(e.posed.truth, 1):
                text = text.replace(puzzles.gap_marker(number), e.posed.puzzle.options[letter])
            assert text == e.cluster.documents[0][slice(*e.posed.window)]


def test_report_page_shows_puzzles(tmp_path):
    algorithm = make_algorithm([*STORIES, SHORT], documents=24, steps=2)
    writer, measured = EpisodeWriter(tmp_path, 10**6), MetricsWriter(tmp_path)
    for step, write in ((1, improving), (2, perfect)):
        episodes = roll_out(algorithm, ScriptedModels(write), step)
        _, annotations = algorithm.groups(episodes, (0, step))
        writer.write(step, records(episodes, annotations))
        measured.write(step, algorithm.metrics(episodes))
    page = choose_episodes(tmp_path, 50)
    assert {e["outcome"] for e in page.chosen_episodes} >= {"mixed", "solved", "no_puzzle"}
    assert {e["task"] for e in page.chosen_episodes} == {"reconstruction"}
    folder = epath.Path(tmp_path)
    write_page([RunData(folder, read_metrics(folder), None)], folder / "page.html")
    assert "order of 2 paragraphs" in {e["question"] for e in page.chosen_episodes}
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_algorithm_resumes_from_state_dict():
    algorithm = make_algorithm()
    roll_out(algorithm, ScriptedModels(guessing), 1)
    state = json.loads(json.dumps(algorithm.state_dict()))
    resumed_algorithm = make_algorithm()
    resumed_algorithm.load_state_dict(state)
    for step in (2, 3):
        expected_episodes = roll_out(algorithm, ScriptedModels(guessing), step)
        episodes = roll_out(resumed_algorithm, ScriptedModels(guessing), step)
        assert to_records(algorithm, expected_episodes, step) == to_records(
            resumed_algorithm, episodes, step
        )
        assert [e.cluster for e in expected_episodes] == [e.cluster for e in episodes]


# ------------------------------------------------------------------------------------------ Config


@pytest.mark.parametrize(
    ("field", "value", "requirement"),
    [
        ("documents", 0, "at least 1"),
        ("group_size", 1, "at least 2"),
        ("order_reward", "thick", r"one of \('dense', 'sparse'\)"),
        ("options", (), "different numbers from 2 to 8"),
        ("options", (1, 2, 3, 4), "different numbers from 2 to 8"),
        ("options", (2, 4, 6, 9), "different numbers from 2 to 8"),
        ("options", (2, 4, 4, 8), "different numbers from 2 to 8"),
        ("option_weights", (3.0, 3.0, 5.0), "a positive number for each"),
        ("option_weights", (3.0, 3.0, 0.0, 5.0), "a positive number for each"),
        ("option_weights", (3.0, 3.0, float("nan"), 5.0), "a positive number for each"),
        ("most_documents", -1, "at least 0"),
        ("selection", "best", r"one of \('longest', 'random', 'shortest'\)"),
        ("min_paragraph", 0, "at least 1"),
        ("max_paragraph", 79, "at least algorithm.min_paragraph = 80"),
    ],
)
def test_invalid_config_field_is_named_in_the_error(field, value, requirement):
    with pytest.raises(ValueError, match=rf"algorithm\.{field} = .*: must be {requirement}"):
        ReconstructionConfig(**{field: value})


def test_defaults_match_the_paper():
    paper = ReconstructionConfig()
    assert (paper.documents, paper.group_size, paper.order_reward) == (128, 8, "dense")
    assert dict(zip(paper.options, paper.option_weights, strict=True)) == {2: 3, 4: 3, 6: 3, 8: 5}
    assert paper.curriculum and paper.selection == "longest" and config().documents == 6
    assert paper.validation_puzzles * len(paper.options) == 500
    assert paper.keep_equal and not (paper.adjacent_gaps or paper.cut_documents)
