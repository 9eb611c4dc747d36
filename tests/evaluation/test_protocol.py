"""Tests of the paper's protocol: truncation, pass@k, intervals, columns, tables."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.evaluation import protocol
from spell_jax.runtime import intervals
from tests.paths import REFERENCE_CASES

SHARED = {"LB-MQA": ("2wikimqa", "hotpotqa", "musique")}
PAPER = ("docmath", "frames", "2wikimqa", "hotpotqa", "musique", "longbench_v2")


def cases(name: str) -> list[dict]:
    return json.loads((REFERENCE_CASES / name).read_text())["cases"]


def test_truncation_matches_the_reference():
    for case in cases("truncate_eval.json"):
        count, limit = case["in"]["n"], case["in"]["max_len"]
        assert protocol.truncate(np.arange(count), limit).tolist() == case["out"], case


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 60))
def test_truncating_twice_equals_truncating_to_the_smaller_limit(count, first, second):
    large, small = max(first, second), min(first, second)
    ids = np.arange(count)
    twice = protocol.truncate(protocol.truncate(ids, large), small)
    assert twice.tolist() == protocol.truncate(ids, small).tolist()
    assert len(twice) == min(count, small)


def test_pass_at_k_matches_equation_11():
    """The reference's own bootstrap samples with replacement and is too low."""
    checked = 0
    for case in cases("pass_at_k.json"):
        n, c, k = (case["in"][name] for name in "nck")
        best_score = protocol.best_of([1.0] * c + [0.0] * (n - c), k)
        assert best_score == pytest.approx(case["paper_eq11_exact"], abs=1e-12), case
        checked += best_score > case["with_replacement_closed_form"] + 0.01
    assert checked > 5


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7), st.data())
def test_best_of_is_the_mean_over_all_subsets(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    best = [max(subset) for subset in itertools.combinations(scores, k)]
    assert protocol.best_of(scores, k) == pytest.approx(sum(best) / len(best))


@pytest.mark.parametrize("k", [0, 3])
def test_k_out_of_range_is_rejected(k):
    with pytest.raises(ValueError, match=f"k = {k}: must be between 1 and the 2"):
        protocol.best_of([1.0, 0.0], k)


def test_means_match_the_reference():
    """Means of each task and over all tasks; best@k differs on purpose, see above."""
    for case in cases("eval_aggregation.json"):
        scores: dict[str, list] = {}
        task_scores = zip(case["in"]["tasks"], case["in"]["infos"]["total_score"], strict=True)
        for task, finals in task_scores:
            scores.setdefault(task, []).append(finals)
        summary = protocol.aggregate(scores, {}, 0)
        for task, expected_scores in case["out"].items():
            part = summary["task_mean"] if task == "overall" else summary["benchmarks"][task]
            (value,) = (
                v for k, v in expected_scores["total_score"].items() if k.startswith("mean@")
            )
            assert part["pass@1"]["mean"] == pytest.approx(value), (task, case["in"])


def test_average_is_over_the_four_columns_of_table_1():
    """Qwen2.5-7B + SPELL at 16K, with a spread of 3 within LB-MQA: 40.6, not the 44.0 of six."""
    values = dict(zip(PAPER, (40.0, 39.2, 53.9, 50.9, 47.9, 32.3), strict=True))
    scores = {name: [[value / 100]] for name, value in values.items()}
    summary = protocol.aggregate(scores, SHARED, 0)
    assert list(summary["columns"]) == ["docmath", "frames", "LB-MQA", "longbench_v2"]
    assert summary["columns"]["LB-MQA"]["pass@1"]["mean"] == pytest.approx(0.509)
    assert summary["average"]["pass@1"]["mean"] == pytest.approx(0.406)
    assert summary["task_mean"]["pass@1"]["mean"] == pytest.approx(sum(values.values()) / 600)
    assert list(summary["average"]) == ["pass@1"]  # there is one sample


def test_shared_column_requires_all_of_its_benchmarks():
    assert protocol.columns(["musique", "a", "2wikimqa"], SHARED) == {
        "musique": ("musique",),
        "a": ("a",),
        "2wikimqa": ("2wikimqa",),
    }
    columns = protocol.columns(["musique", "a", "2wikimqa", "hotpotqa"], SHARED)
    assert list(columns) == ["LB-MQA", "a"]


def test_intervals_count_questions_and_resample_scores_between_0_and_1():
    """Four equal answers per question say no more than one; F1 has a bootstrap interval."""
    right = [[1.0] * 4] * 60 + [[0.0] * 4] * 140
    frames = protocol.estimate_best(right, 1, "frames", 0)
    assert frames == intervals.wilson(0.3, 200)
    # Half of each question's answers are right: the interval is still of 200 questions.
    assert protocol.estimate_best([[1.0, 0.0]] * 200, 1, "a", 0) == intervals.wilson(0.5, 200)
    f1 = [[score] for score in np.random.default_rng(0).random(200)]
    first = protocol.estimate_best(f1, 1, "frames", 0)
    assert first == protocol.estimate_best(f1, 1, "frames", 0)
    assert first != protocol.estimate_best(f1, 1, "frames", 1)
    assert first != protocol.estimate_best(f1, 1, "docmath", 0)


def test_estimate_of_no_questions_is_rejected():
    with pytest.raises(ValueError, match="frames: has no questions"):
        protocol.estimate_best([], 1, "frames", 0)


def test_benchmark_without_a_reply_has_an_empty_column_and_leaves_the_means_empty():
    """An endpoint may refuse all prompts of a benchmark; the shared column of Table 1 needs all."""
    names = ["2wikimqa", "hotpotqa", "musique", "frames"]
    rows = [sample(name, 16384, 1) for name in (*names[:2], "frames")]
    left_out = [(16384, "musique", "a"), (16384, "musique", "b")]
    (row,) = protocol.summarize(rows, names, [16384], 1, SHARED, 0, left_out)
    assert list(row["columns"]) == ["LB-MQA", "frames"] and row["columns"]["LB-MQA"] == {}
    assert row["average"] == row["task_mean"] == {} and row["left_out"] == {"LB-MQA": 2}
    assert (row["benchmarks"]["musique"]["questions"], row["benchmarks"]["musique"]["rule"]) == (
        0,
        None,
    )
    assert row["benchmarks"]["hotpotqa"]["pass@1"]["mean"] == 1
    summary = {"policy": "p", "titles": dict(zip(names, names, strict=True)), "rows": [row]}
    *_, line, _, note = protocol.table([summary]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["16K", "p", "†", "100.0 (20.7 to 100.0)", "†", "†"]
    assert note == "† p, 16K: no reply to 2 questions of LB-MQA, which the means leave out."


def test_table_abbreviates_input_limits():
    """Without a shared column there is one mean."""
    row = protocol.aggregate({"frames": [[1.0]]}, SHARED, 0)
    limits = (16384, 100000, 128000, 1048576, 40)
    rows = [{"max_input": limit} | row for limit in limits]
    summary = {"policy": "a", "titles": {"frames": "Frames"}, "rows": rows}
    _, _, heads, _, *lines = protocol.table([summary]).splitlines()
    assert heads == "| Max input | Model | Frames | Avg. |"
    shown = [line.split("|")[1].strip() for line in lines]
    assert shown == ["40", "16K", "100K", "128K", "1024K"]


def sample(name: str, limit: int, final: float, **extra_fields) -> dict:
    row = {"benchmark": name, "max_input": limit, "rule": 0.0, "judge": None, "prediction": "x"}
    row |= {"truncated": False, "stopped": True, "tokens_in": 8, "tokens_out": 2}
    return row | {"final": final} | extra_fields


def test_summary_separates_limits_and_questions():
    rows = [sample("frames", 10, value) for value in (1, 1, 0, 1)]
    rows[1] |= {"judge": 1}
    rows[2] |= {"judge": "malformed", "prediction": None, "tokens_in": 4}
    rows += [sample("frames", 20, 0, judge=0, truncated=True, stopped=False)] * 3
    rows += [sample("frames", 20, 0, judge="unanswered", truncated=True, stopped=False)]
    first, second = protocol.summarize(rows, ["frames"], [10, 20], 2, {}, 0)
    assert (first["max_input"], second["max_input"]) == (10, 20)
    metrics = first["benchmarks"]["frames"]
    assert metrics["pass@1"]["mean"] == 0.75 and metrics["pass@2"]["mean"] == 1.0
    assert (metrics["questions"], metrics["judged"], metrics["malformed"]) == (2, 2, 1)
    assert (metrics["no_prediction"], metrics["tokens_in"], metrics["truncated"]) == (0.25, 7, 0)
    metrics = second["benchmarks"]["frames"]
    assert (
        metrics["pass@2"]["mean"] == 0 and metrics["truncated"] == metrics["answers_truncated"] == 1
    )
    assert (metrics["judged"], metrics["malformed"], metrics["unanswered"]) == (4, 0, 1)


def test_breakdown_groups_questions_by_two_fields():
    """Cells are sorted by both fields; the questions of a cell are not adjacent rows."""
    cells = [(2, "b"), (1, "b"), (2, "a"), (2, "b")]
    finals = [(1, 0), (0, 0), (1, 1), (0, 0)]
    rows = [
        sample("needle", 10, final, by={"length": cell[0], "kind": cell[1]})
        for cell, pair in zip(cells, finals, strict=True)
        for final in pair
    ]
    rows += [sample("frames", 10, 1)] * 2
    ((summary),) = protocol.summarize(rows, ["needle", "frames"], [10], 2, {}, 0)
    assert "by" not in summary["benchmarks"]["frames"]
    parts = summary["benchmarks"]["needle"]["by"]
    assert [(p["length"], p["kind"], p["questions"]) for p in parts] == [
        (1, "b", 1),
        (2, "a", 1),
        (2, "b", 2),
    ]
    assert [p["pass@1"]["mean"] for p in parts] == [0.0, 1.0, 0.25]
    assert [p["pass@2"]["mean"] for p in parts] == [0.0, 1.0, 0.5]
    assert parts[2]["pass@1"] == intervals.wilson(0.25, 2)._asdict()
    assert list(parts[0]) == ["length", "kind", "questions", "pass@1", "pass@2"]


def test_table_has_the_layout_of_table_1():
    def summary(policy: str, value: float) -> dict:
        # Not only 0 and 1, so that one question has an interval without width.
        scores = {name: [[value, 0.9]] for name in PAPER}
        rows = [{"max_input": n} | protocol.aggregate(scores, SHARED, 0) for n in (16384, 100000)]
        titles = dict(
            zip(PAPER, ("DocMath", "Frames", "2Wiki", "Hot", "MuS", "LB-V2"), strict=True)
        )
        return {"policy": policy, "titles": titles, "rows": rows}

    lines = protocol.table([summary("base", 0.1), summary("SPELL", 0.6)]).splitlines()
    assert lines[0] == "## pass@1, percent (95 % interval)"
    heads = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert heads[:7] == ["Max input", "Model", "DocMath", "Frames", "LB-MQA", "LB-V2", "Avg."]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:8]]
    assert [row[:2] for row in rows] == [
        ["16K", "base"],
        ["16K", "SPELL"],
        ["100K", "base"],
        ["100K", "SPELL"],
    ]
    assert rows[0][2:] == ["50.0 (50.0 to 50.0)"] * 6
    assert rows[1][6] == "75.0 (75.0 to 75.0)"
    assert "## pass@2, percent (95 % interval)" in lines and "## pass@4" not in "".join(lines)
    partial_summary = summary("less", 0.1)
    for row in partial_summary["rows"]:
        del row["columns"]["frames"]
    assert "| 16K | less | 50.0 (50.0 to 50.0) |  | 50.0" in protocol.table(
        [summary("a", 0.1), partial_summary]
    )


def test_means_without_all_verdicts_are_marked_and_counted():
    """LB-MQA averages two benchmarks, one of which has missing verdicts."""
    names = ["2wikimqa", "hotpotqa", "musique", "frames"]
    rows = [sample(name, 16384, 1) for name in names]
    rows[0] |= {"judge": "unanswered", "unjudged": True}
    rows[2] |= {"judge": "malformed", "unjudged": True}
    rows[3] |= {"judge": 1, "unjudged": False}
    (limit_summary,) = protocol.summarize(rows, names, [16384], 1, SHARED, 0)
    assert limit_summary["unjudged"] == {"LB-MQA": 2}
    assert [limit_summary["benchmarks"][name]["unjudged"] for name in names] == [1, 0, 1, 0]
    summary = {
        "policy": "p",
        "titles": dict(zip(names, names, strict=True)),
        "rows": [limit_summary],
    }
    *_, line, _, note = protocol.table([summary]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # A benchmark has one question, LB-MQA three.
    of_one, of_three = "(20.7 to 100.0)", "(54.2 to 100.0)"
    columns = [f"100.0* {of_three}", f"100.0 {of_one}"]
    assert cells[2:] == [*columns, "100.0* (54.2 to 100.0)", "100.0* (60.3 to 100.0)"]
    assert note == (
        "\\* p, 16K: no verdict of a judge on 2 answers of LB-MQA; the rule's scores stand."
    )
    (limit_summary,) = protocol.summarize(rows[3:], ["frames"], [16384], 1, SHARED, 0)
    assert "unjudged" not in limit_summary
    assert "*" not in protocol.table([summary | {"rows": [limit_summary]}])
