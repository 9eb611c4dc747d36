"""Tests of the ladder experiment: its commands, its questions, its numbers and its figure."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import numpy as np
import pytest

from spell_jax.config import read
from spell_jax.data.questions import read_questions
from spell_jax.launch.experiments.ladder import __main__ as experiment
from spell_jax.launch.experiments.ladder import config as ladder
from spell_jax.launch.experiments.ladder import figure, world
from spell_jax.launch.experiments.ladder import rows as ladder_rows
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import TINY_POLICY
from spell_jax.runtime.files.jsonl import write_json, write_records
from spell_jax.selfplay import prompts
from tests.paths import ROOT

DEPTHS = 8


def test_commands_run_all_arms_of_all_seeds_after_their_questions():
    lines = experiment.commands("runs/x", (0, 3), [*ladder.ARMS])
    parsed = [shlex.split(line) for line in lines]
    workdirs = [re.findall(r"--workdir=(\S+) --config\.seed", line) for line in lines]
    trained = [paths[0] for paths in workdirs if paths]
    assert sorted(trained) == sorted(
        f"runs/x/{arm}/{seed}" for arm in ladder.ARMS for seed in (0, 3)
    )
    written = set()
    for line in parsed:
        flags = dict(flag.split("=", 1) for flag in line if "=" in flag and flag.startswith("--"))
        if "questions" in line:
            written.add(flags["--out"])
            assert flags.get("--run", "runs/x/full/0") in trained[: len(written) * len(ladder.ARMS)]
        elif "--config.data.questions" in flags:
            assert flags["--config.data.questions"] in written
    assert len(written) == 6, "uniform, shallow and yoked questions of two seeds"
    assert lines[-1].startswith("python -m launch.experiments.ladder figure")


def test_yoked_arms_have_the_same_questions_and_one_keeps_their_order():
    lines = experiment.commands("runs", (0,), ["full", "yoked", "yoked_shuffled"])
    used = [re.findall(r"data\.questions=(\S+)", line) for line in lines]
    assert [paths[0] for paths in used if paths] == ["runs/questions/yoked-0.jsonl"] * 2
    order = {arm: ladder.get_config(arm).data.shuffle for arm in ("yoked", "yoked_shuffled")}
    assert order == {"yoked": False, "yoked_shuffled": True}


def test_crossplay_asks_the_responder_of_every_kept_checkpoint():
    lines = experiment.commands("runs", (3, 4), ["full"])
    exported = [match[1] for line in lines if (match := re.search(r"export .*--step=(\d+)", line))]
    config = ladder.get_config()
    saved = range(config.checkpoint_every, config.steps + 1, config.checkpoint_every)
    assert [*map(int, exported)] == [*saved][-config.keep_checkpoints :]
    assert saved[-1] == config.steps and len(saved) > 1
    for line, step in zip(
        (command for command in lines if "evaluate" in command), exported, strict=True
    ):
        assert f"--policy=runs/full/3/crossplay/{step}/policy" in line


def test_stabilizers_run_with_two_seeds_and_change_the_full_arm_alone():
    lines = experiment.commands("runs/x", (0, 3, 5), ["full", *ladder.STABILIZERS])
    trained = [
        match[1] for line in lines if (match := re.search(r"--workdir=(\S+) --config", line))
    ]
    assert [f"runs/x/cluster/{seed}" in trained for seed in (0, 3, 5)] == [True, True, False]
    full = ladder.get_config()
    for name, fields in ladder.STABILIZERS.items():
        changed = ladder.get_config(name)
        assert changed != full
        changed.update_from_flattened_dict({field: _value(full, field) for field in fields})
        assert changed == full


def _value(config, field: str):
    for name in field.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize("arm", [*ladder.ARMS, *ladder.STABILIZERS])
def test_every_arm_is_a_valid_config(arm, tmp_path):
    config = ladder.get_config(arm)
    if arm in ladder.QUESTIONS:
        experiment.main(["questions", f"--out={tmp_path}/q.jsonl", "--depths=1,2", "--count=3"])
        config.data.questions = str(tmp_path / "q.jsonl")
    assert read(config).algorithm.name == ladder.ARMS.get(arm, {}).get("name", "spell")


def test_commands_of_an_unknown_arm_are_rejected():
    with pytest.raises(ValueError, match=r"^--arms = best,worst: must be of full, .*, dropout$"):
        experiment.main(["commands", "--arms=full,best,worst"])


def test_unknown_arm_is_rejected():
    with pytest.raises(ValueError, match=r"/ladder/config\.py:best: must be one of full, frozen"):
        ladder.get_config("best")


def test_prompts_and_answers_of_depth_8_fit_the_token_caps():
    config = ladder.get_config()
    tokenizer, rows = tokenizers.load(TINY_POLICY), prompts.load("compact")
    mixture = ladder_rows.LadderMixture(shallow=(8,), deeper=0.0)
    demonstrations = ladder_rows.demonstrations(rows, mixture=mixture, seed=5)
    (length, _), *_ = config.packing.buckets
    for row, _ in zip(demonstrations, range(200), strict=False):
        prompt, answer = tokenizer.chat(row.prompt), tokenizer.count(row.completion) + 1
        assert len(prompt) <= config.sampler.max_prompt, row
        assert answer <= config.sampler.max_tokens and len(prompt) + answer <= length, row


# --------------------------------------------------------------------------------------- Questions


def test_oracles_questions_have_equal_shares_of_depths_and_right_answers(tmp_path, capsys):
    out = tmp_path / "questions" / "uniform.jsonl"
    experiment.main(["questions", f"--out={out}", "--depths=1,3,8", "--count=12", "--seed=2"])
    assert capsys.readouterr().out == f"{out}: 12 questions\n"
    questions = read_questions(out, "data.questions")
    assert [world.depth_of(q.question) for q in questions] == [1, 3, 8] * 4
    assert all(world.oracle(q.question, q.documents) == q.answer for q in questions)
    assert len({q.documents for q in questions}) == 12


def episode(cluster: str, question: str, reference: str, scores=(0.0, 1.0), answered=True) -> dict:
    answers = ["answer is x"] * len(scores) if answered else []
    record = {"cluster": cluster, "question": question, "reference": reference, "answers": answers}
    return record | {"scores": list(scores) if answered else []}


def write_episodes(run: pathlib.Path, steps: list[list[dict]]) -> None:
    (run / "episodes").mkdir(parents=True)
    for step, episodes in enumerate(steps, 1):
        write_records(run / "episodes" / f"step_{step:06d}.jsonl.gz", episodes)


DOCUMENTS = ["- Arvo Oslo Bela Cato", "- Bela Paris Cato Arvo", "- Cato Rome Arvo Bela"]
OF_ARVO = {"documents": DOCUMENTS}


def test_runs_questions_keep_their_order_and_references(tmp_path):
    first = [
        episode("a", "friend of Arvo", "Bela") | OF_ARVO,
        episode("a", "bad", "", answered=False),
        episode("a", "city of Arvo", "Rome"),
    ]
    write_episodes(tmp_path / "run", [first, [episode("a", "city of Cato", "Rome") | OF_ARVO]])
    experiment.main(["questions", f"--out={tmp_path}/q.jsonl", f"--run={tmp_path}/run"])
    questions = read_questions(tmp_path / "q.jsonl", "data.questions")
    assert [(q.question, q.answer) for q in questions] == [
        ("friend of Arvo", "Bela"),
        ("city of Arvo", "Rome"),  # wrong, as the run had it
        ("city of Cato", "Rome"),
    ]
    assert {q.documents for q in questions} == {tuple(DOCUMENTS)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "must have either --run or --depths"),
        (["--run=x", "--depths=1"], "must have either --run or --depths"),
        (["--run=nowhere"], "--run = nowhere: has no answered question"),
    ],
)
def test_questions_need_one_source(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        experiment.main(["questions", f"--out={tmp_path}/q.jsonl", *arguments])


# ------------------------------------------------------------------------------------------ Figure


def write_run(run: pathlib.Path, accuracies: list[float], tokens: int = 1000) -> None:
    """Write a run with a validation per step; questions deeper than 4 are never answered right."""
    questions = [
        episode("a", "friend of Arvo", "Bela") | OF_ARVO,
        episode("a", "city of friend of Arvo", "Rome", scores=(1.0, 1.0)),
        episode("a", "not a chain", "", answered=False),
    ]
    elsewhere = episode("a", "friend of Udo", "Bela", scores=(1.0, 1.0))  # not in the documents
    write_episodes(run, [questions] * (len(accuracies) - 1) + [[*questions, elsewhere]])
    lines = []
    for step, accuracy in enumerate(accuracies, 1):
        depths = {f"eval/depth/{d}": accuracy if d <= 4 else 0.0 for d in range(1, DEPTHS + 1)}
        line = {"step": step, "rollout/sampled_tokens": tokens, "train/entropy/responder": 0.1}
        lines.append(line | depths | {"eval/verifier": 0.9})
    write_records(run / "metrics.jsonl", lines)


def test_area_is_the_mean_accuracy_over_the_tokens(tmp_path):
    write_run(tmp_path / "run", [0.4, 0.8, 0.8])
    run = figure.read_run(tmp_path / "run")
    assert run.tokens.tolist() == [1000, 2000, 3000]
    # .2 up to the first validation, a rise to .4 until the second, then .4.
    assert run.area(3000) == pytest.approx((0.2 + 0.3 + 0.4) / 3, abs=1e-3)
    assert run.area(1000) == pytest.approx(0.2)
    # A run that ends earlier keeps its last accuracy.
    assert run.area(6000) == pytest.approx((0.2 + 0.3 + 4 * 0.4) / 6, abs=1e-3)
    assert [run.final(tokens) for tokens in (1500, 6000)] == pytest.approx([0.3, 0.4])


DEEP = "city of friend of general of Arvo"
WALK = "general Arvo Oslo Bela Cato friend Cato Rome Arvo Bela city Arvo Oslo Bela Cato"


def test_walks_tell_misread_answers_from_wrong_walks_and_lucky_ones():
    answers = [f"<think> {WALK}</think>answer is Oslo", f"<think> {WALK}</think>answer is Rome"]
    answers += ["<think> city Arvo Oslo Bela Cato</think>answer is Oslo", "answer is Rome"]
    present = episode("a", DEEP, "Oslo", (1.0, 0.0, 1.0, 0.0)) | OF_ARVO | {"answers": answers}
    absent = episode("a", DEEP.replace("Arvo", "Udo"), "Oslo", (1.0, 0.0, 0.0))
    shallow = episode("a", "city of Arvo", "Oslo")
    assert figure._measure_walks([present, absent, shallow]) == (0.5, 0.5)
    assert figure._measure_walks([absent | OF_ARVO, shallow]) == (0.0, 0.0)


def test_most_frequent_chain_leaves_out_the_first_relation():
    episodes = [
        episode("a", "city of friend of friend of Arvo", "Rome", scores=(0.0, 1.0)),
        episode("a", "general of friend of friend of Bela", "Rome", scores=(1.0, 1.0)),
        episode("a", "friend of general of friend of Arvo", "Bela", scores=(0.0, 0.0)),
        episode("a", "friend of Arvo", "Bela", scores=(1.0, 1.0)),  # too shallow
        episode("a", "city of friend of friend of Bela", "", answered=False),
    ]
    chain = {"relations": "friend friend", "share": pytest.approx(2 / 3), "rate": 0.75}
    assert figure._find_chain(episodes) == chain


@pytest.mark.parametrize(
    ("accuracy", "depth"),
    [((1.0, 0.75, 0.25, 0.9), 2.5), ((0.9, 0.9), 2.0), ((0.0, 1.0), 0.5), ((1.0, 0.5, 0.0), 2.0)],
)
def test_crossing_is_interpolated(accuracy, depth):
    assert figure._crossing(np.array(accuracy)) == pytest.approx(depth)


def test_figure_has_the_numbers_of_all_arms_and_a_verdict(tmp_path, capsys):
    for seed, shift in enumerate((0.0, 0.01, 0.02, 0.03, 0.04)):
        write_run(tmp_path / "full" / str(seed), [0.7 + shift, 0.9 + shift])
        write_run(tmp_path / "frozen" / str(seed), [0.5 + shift, 0.6 + shift], tokens=800)
        write_run(tmp_path / "static" / str(seed), [0.4 + shift, 0.5 + shift])
    parts = [
        {"step": step, "questions": questions, "pass@1": {"mean": mean}}
        for step, questions, mean in ((1, 30, 0.25), (10, 10, 0.5), (11, 5, 1.0))
    ]
    answers = tmp_path / "full" / "0" / "crossplay" / "40" / "answers"
    answers.mkdir(parents=True)
    write_json(
        answers / "summary.json", {"rows": [{"benchmarks": {"own_questions": {"by": parts}}}]}
    )
    experiment.main(["figure", f"--runs={tmp_path}"])
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "ladder.json").read_text())
    assert numbers["tokens"] == 1600 and numbers["crossplay"] == {
        "40": {"10": pytest.approx((0.25 * 30 + 0.5 * 10) / 40), "20": 1.0}
    }
    verdict = numbers["verdict"]
    assert verdict.startswith("Self-play wins: full 0.3") and ", static 0.2" in verdict
    assert verdict in capsys.readouterr().out
    difference = numbers["full_minus"]["frozen"]
    assert difference["low"] == pytest.approx(difference["high"]), "the seeds are paired"
    of_full = numbers["arms"]["full"]
    assert of_full["references_right"] == {
        "1": {"share": 1.0, "questions": 10},
        "2": {"share": 0.0, "questions": 10},
    }
    assert of_full["mixed_first"]["mean"] == pytest.approx(48 * 2 / 7), "two of seven proposals"
    assert of_full["chains"] == [[{}, {}]] * 5, "no question of depth 3"
    assert of_full["unanswerable"]["mean"] == pytest.approx(1 / 5)


def test_arms_are_compared_seed_by_seed(tmp_path):
    seeds_of = {"full": (0, 1, 4), "frozen": (1, 4, 7), "yoked": (4,), "frozen_no_memory": (4, 7)}
    for arm, seeds in seeds_of.items():
        for seed in seeds:
            accuracy = 0.1 * seed + (0.2 if arm == "full" else 0.0)
            # The yoked arm ends earlier: this does not shorten the comparison of the other arms.
            write_run(tmp_path / arm / str(seed), [accuracy] * (1 if arm == "yoked" else 2))
    experiment.main(["figure", f"--runs={tmp_path}"])
    numbers = json.loads((tmp_path / "ladder.json").read_text())
    assert numbers["tokens"] == 2000
    differences = numbers["full_minus"]  # half of .2: the deeper half of the depths is never right
    assert [differences[arm]["mean"] for arm in ("frozen", "yoked")] == pytest.approx([0.1, 0.1])
    assert differences["frozen"]["low"] == pytest.approx(0.1), "seeds 1 and 4, that both arms have"
    assert [*numbers["pairs"]] == ["frozen_minus_frozen_no_memory"]
    assert numbers["pairs"]["frozen_minus_frozen_no_memory"]["mean"] == pytest.approx(0.0)
    assert numbers["finals"]["full"]["mean"] == pytest.approx((0.1 + 0.15 + 0.3) / 3)


def test_verdict_needs_the_interval_above_both_rivals():
    def area(low: float, high: float) -> dict[str, float]:
        return {"mean": (low + high) / 2, "low": low, "high": high}

    areas = {"full": area(0.5, 0.6), "frozen": area(0.3, 0.51), "static": area(0.1, 0.2)}
    runs = dict.fromkeys(areas, 5)
    tie = figure.verdict(areas, runs)
    assert tie.startswith("Self-play does not win: full 0.550 [0.500,")
    areas["frozen"] = area(0.3, 0.49)
    assert figure.verdict(areas, runs).startswith("Self-play wins")
    undecided = figure.verdict(areas, runs | {"frozen": 1})
    assert undecided.startswith("Not decided: fewer than 5 seeds (frozen 1): full 0.550 [0.500,")
    none = figure.verdict({"full": area(0, 1)}, {"full": 5})
    assert none == "Not decided: no run of frozen, static."


def test_figure_without_runs_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"has no run ARM/SEED"):
        experiment.main(["figure", f"--runs={tmp_path}"])


def test_page_states_the_threshold_and_notebook_names_all_arms():
    page = (ROOT / "docs" / "ladder.md").read_text()
    notebook = (ROOT / "launch/experiments/ladder/notebook.md").read_text()
    for text in (page, notebook):
        assert "lies above the frozen and the static arm's" in " ".join(text.split())
    assert all(f"`{arm}`" in notebook for arm in ladder.ARMS)
