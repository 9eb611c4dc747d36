"""Tests of the report's page: selection of episodes, packing, rendering in a browser."""

from __future__ import annotations

import base64
import collections
import gzip
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from etils import epath

from spell_jax.reporting import page as report_page
from spell_jax.reporting.episodes import Episodes, choose_episodes, choose_indices, outcome
from spell_jax.reporting.page import RunData, group_by_seed, write_page
from spell_jax.reporting.panels import choose_panels
from spell_jax.runtime import intervals
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.files.jsonl import write_records
from tests.reporting import browser
from tests.reporting.synthetic_runs import CONFIG, TASKS, RunSizes, RunWriter, measured, write_run

# Bytes of a page without any content.
TEMPLATE_BYTES = report_page._TEMPLATE.stat().st_size + report_page.STYLE.stat().st_size
HOSTILE = "</script><script>document.title='out'</script><!--\u2028\u2029<b id=in>&amp;\ud83d${`"


def path_of(workdir, step: int):
    return workdir / "episodes" / f"step_{step:06d}.jsonl.gz"


def data_of(page) -> list[str]:
    match = re.search(r'id="data">\n(.*?)\n</script>', page.read_text(), re.DOTALL)
    assert match
    return match[1].split("\n")


def unpack(line: str):
    return json.loads(gzip.decompress(base64.b64decode(line, validate=True)))


# ---------------------------------------------------------------------------------------- Selection


def kinds_of(episodes) -> collections.Counter:
    return collections.Counter((e["task"], e["outcome"]) for e in episodes)


def test_rare_outcomes_are_chosen_as_often_as_frequent_ones():
    episodes = [{"task": "a", "outcome": "solved", "cluster": str(n)} for n in range(50)]
    episodes[40]["outcome"] = episodes[45]["outcome"] = "mixed"
    episodes[49]["task"] = "b"
    kind_counts = collections.Counter()
    assert choose_indices(episodes, 7, {"3", "45"}, kind_counts) == [0, 1, 2, 3, 40, 45, 49]
    assert kind_counts == {("a", "solved"): 4, ("a", "mixed"): 2, ("b", "solved"): 1}
    # Episodes with documents come first.
    assert choose_indices(episodes, 3, {"3", "45"}, collections.Counter()) == [3, 45, 49]
    assert choose_indices(episodes, 99, set(), collections.Counter()) == list(range(50))
    # Kinds that were frequent in earlier steps come later.
    assert choose_indices(episodes, 2, set(), collections.Counter({("a", "mixed"): 1})) == [0, 49]


def test_episodes_are_chosen_evenly_over_steps(tmp_path):
    workdir = write_run(tmp_path / "run", steps=7, episodes=30)
    read = choose_episodes(workdir, 72)
    assert collections.Counter(e["step"] for e in read.chosen_episodes) == {
        1: 10, 2: 10, 3: 10, 4: 11, 5: 10, 6: 10, 7: 11
    }  # fmt: skip
    assert read.readable_count == 210 and len(kinds_of(read.chosen_episodes)) >= 11
    assert max(kinds_of(read.chosen_episodes).values()) < 12
    assert choose_episodes(workdir, 72) == read
    kinds = kinds_of(choose_episodes(workdir, 21).chosen_episodes)
    # Each step has only three of the 21.
    assert len(kinds) >= 11 and max(kinds.values()) <= 2
    selection = choose_episodes(workdir, 3)
    assert [e["step"] for e in selection.chosen_episodes] == [1, 4, 7]
    assert selection.readable_count == selection.total == 210 and set(selection.counted) == set(
        range(1, 8)
    )


@pytest.mark.parametrize(
    "scores, expected_outcome",
    [
        ([], "declined"),
        ([0.0, 1.0], "mixed"),
        ([0.0, 0.0], "unsolved"),
        ([1.0, 1.0], "solved"),
        ([0.5, 0.5], "half solved"),
    ],
)
def test_outcome_follows_from_the_scores(scores, expected_outcome):
    assert outcome(scores, "declined") == expected_outcome


def test_metrics_are_computed_from_episodes(tmp_path):
    workdir = write_run(tmp_path / "run", steps=1, episodes=0)
    make = RunWriter().episode
    four_answers = {
        "scores": [1.0, 0.0, 0.0, 0.0],
        "reward": 0.25,
        "status": "accepted",
        "answers": ["a"] * 4,
        "votes": [[1, 0]] * 4,
    }
    lines = [make(n, task=TASKS[n > 0], **four_answers) for n in range(4)]
    lines += [
        make(5, **four_answers, proposal=None) | {"scores": [1.0] * 4, "reward": None, "of": 9}
    ]
    wrong = [{"scores": ["x"]}, {"documents": [1]}, {"answers": [1]}, {"votes": 1}, {"used": []}]
    write_records(path_of(workdir, 1), [{"of": 9} | lines[0], *lines[1:], "no object", *wrong])
    read = choose_episodes(workdir, 100)
    assert read.readable_count == 5 and read.total == 9 and read.points == {(0.25, 0.25): 4}
    assert read.counted[1] == {
        "episodes/mixed/general_qa": 0.25,
        "episodes/mixed/financial_math": 0.75,
        "episodes/mixed/multiple_choice": 0.0,
        "episodes/answers/questioner": 4,
        "episodes/answers/responder": 25,
        "episodes/answers/verifier": 40,
    }


def test_runs_differing_only_in_seed_are_one_group():
    changed_config = CONFIG | {"steps": 5}
    configs = [CONFIG, None, CONFIG | {"seed": 3}, changed_config, None]
    assert group_by_seed(configs) == [[0, 2], [1], [3], [4]]


def test_panels_show_the_measured_metrics():
    names = [
        *(
            "rollout/solve_rate",
            "rollout/solve_rate/10",
            "rollout/solve_rate/2",
            "rollout/dense_reward",
        ),
        *("rollout/dense_reward/2", "rollout/dense_by_chance", "rollout/questioner_reward"),
        *("rollout/scoring_failed", "rollout/evidence_score", "rollout/evidence_score_right"),
        *("rollout/answer_tokens/responder", "rollout/answer_tokens/reward_model"),
        *("rollout/form/phrase", "rollout/form/boxed", "rollout/unparsed/responder"),
        *("time/seconds/reward_model", "time/seconds/start"),
        *("eval/accuracy", "eval/accuracy/2", "train/loss"),
    ]
    panels = {panel.title.partition(":")[0]: panel.metrics for panel in choose_panels(names)}
    labels = {t: [label for label, n in m.items() if n in names] for t, m in panels.items()}
    assert labels == {
        "Solve rate": ["all", "2", "10"],
        "Rewards": ["dense_by_chance", "dense_reward"],
        "Forms in which answers are stated": ["boxed", "phrase"],
        "Outputs that could not be parsed": ["responder"],
        "Scores of evidence": ["evidence_score", "evidence_score_right"],
        "Scorings": ["failed"],
        "Answer length": ["responder", "reward_model"],
        "Questioner's reward": ["all"],
        "Held-out accuracy": ["accuracy"],
        "Seconds a step, by phase": ["reward_model"],
    }
    assert list(panels["Solve rate"])[:4] == [
        "all",
        *TASKS,
    ]  # every plot has the same colors for tasks
    assert choose_panels(["train/loss"]) == []


def test_unknown_tasks_and_missing_rewards_are_not_plotted(tmp_path):
    workdir = write_run(tmp_path / "run", steps=1, episodes=0)
    four_answers = {
        "scores": [1.0, 0.0, 0.0, 0.0],
        "answers": ["a"] * 4,
        "votes": [],
        "reward": None,
    }
    lines = [RunWriter().episode(n, task="own", **four_answers) for n in range(2)]
    write_records(path_of(workdir, 1), [{"of": 2} | lines[0], lines[1]])
    assert [n for n in choose_episodes(workdir, 9).counted[1] if "mixed" in n] == []
    records = [{"step": 1, "rollout/solve_rate": 0.25}]
    write_page([RunData(workdir, records, None)], epath.Path(tmp_path / "page.html"))
    overview = unpack(data_of(tmp_path / "page.html")[0])
    assert [group["mapping"] for group in overview["groups"]] == [None]


# ------------------------------------------------------------------------------------------ Packing


def test_page_holds_each_document_once_and_is_reproducible(tmp_path, monkeypatch):
    clock = itertools.count(1_000_000_000, 1_000_000)
    monkeypatch.setattr("time.time", lambda: next(clock))
    workdir = write_run(tmp_path / "run", steps=3, episodes=5)
    path_of(workdir, 3).write_bytes(path_of(workdir, 1).read_bytes())  # clusters repeat
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for page in pages:
        write_page([measured(workdir)], epath.Path(page))
    assert pages[0].read_bytes() == pages[1].read_bytes()
    overview, *lines, index = map(unpack, data_of(pages[0]))
    assert overview["found"] == len(index) == 15
    texts = [text for line in lines if isinstance(line, list) for text in line]
    assert len(texts) == len(set(texts)) == 40
    places = {(e["step"], e["title"]): e["documents"] for e in index}
    for (step, title), document_places in places.items():
        assert step != 3 or document_places == places[1, title]
    by_line = dict(enumerate(lines, 1))
    for entry in index:
        episode = by_line[entry["at"]]
        assert episode["question"] == entry["title"] and episode["step"] == entry["step"]
        documents = [by_line[line][place] for line, place in entry["documents"]]
        name = episode["cluster"].removeprefix("c")
        assert [text.split(". ")[0] for text in documents] == [
            f"Document {n} of {name}" for n in range(4)
        ]


def test_full_page_leaves_out_episodes_evenly_over_steps(tmp_path):
    workdir = write_run(tmp_path / "run", steps=10, episodes=10)
    path = epath.Path(tmp_path / "page.html")
    counts = {}
    for room in (5_192, 17_032, 77_032, 967_032):
        size = TEMPLATE_BYTES + room
        write_page([measured(workdir)], path, size)
        assert path.stat().length <= size
        overview, *_, index = map(unpack, data_of(tmp_path / "page.html"))
        assert overview["found"] == 100
        counts[room] = len(index), sum(bool(entry["documents"]) for entry in index)
        if room == 77_032:
            assert path.stat().length > TEMPLATE_BYTES + 62_032
            assert {e["step"] for e in index} == set(range(1, 11))
    assert counts[967_032] == (100, 100)
    episodes, complete = counts[77_032]
    assert 30 < episodes < 80 and episodes / 3 < complete < episodes
    with pytest.raises(ValueError, match="bytes of curves are too many"):
        write_page([measured(workdir)], path, TEMPLATE_BYTES)


def test_episodes_without_documents_may_fill_the_page(tmp_path):
    workdir = write_run(tmp_path / "run", steps=10, episodes=10)
    for step in range(1, 11):
        episodes = [e | {"documents": None} for n, e in read_episodes(workdir) if n == step]
        write_records(path_of(workdir, step), episodes)
    path = epath.Path(tmp_path / "page.html")
    write_page([measured(workdir)], path, TEMPLATE_BYTES + 56_632)
    # With half of the room it would be about 29,000.
    assert 39_632 < path.stat().length - TEMPLATE_BYTES <= 56_632


def test_curves_of_held_out_shares_begin_before_training_with_intervals(tmp_path):
    workdir = write_run(tmp_path / "run", steps=2, episodes=0)
    records = [{"step": step, "eval/all": 0.5, "eval/F1": 0.75} for step in (1, 2)]
    first = {"eval/all": (1.0, 3), "eval/F1": (0.5, 0)}
    overview = report_page.make_overview([RunData(workdir, records, None, first)], [Episodes()])
    (group,) = overview["groups"]
    low = intervals.wilson(0.5, 3).low
    steps, means, lows, highs = group["series"]["eval/all"]
    assert (steps, means) == ([0, 1, 2], [1.0, 0.5, 0.5])
    assert lows == pytest.approx([intervals.wilson(1, 3).low, low, low], rel=1e-5)
    assert highs == pytest.approx([1.0, 1 - low, 1 - low], rel=1e-5)
    # F1 is no share of questions, and several seeds have a band of their own.
    assert group["series"]["eval/F1"] == [[0, 1, 2], [0.5, 0.75, 0.75]]
    assert [panel["section"] for panel in overview["panels"]] == ["Held out"] * 2
    runs = [RunData(workdir, records, None, first)] * 2
    (group,) = report_page.make_overview(runs, [Episodes()] * 2)["groups"]
    assert group["series"]["eval/all"][2:] == [[1.0, 0.5, 0.5]] * 2


def test_metrics_that_are_0_in_all_steps_are_listed_and_not_plotted(tmp_path):
    zeros = {"eval/all": 0.0, "rollout/solve_rate": 0.0, "rollout/leaked": 0.0}
    zeros |= {"rollout/truncated/responder": 0.0, "rollout/mixed": 0.0}
    records = [{"step": step, **zeros, "rollout/unsolved": 1.0} for step in (1, 2)]
    run = RunData(epath.Path(tmp_path), records, None)
    overview = report_page.make_overview([run], [Episodes()])
    # An accuracy of 0 is a result.
    titles = [panel["title"] for panel in overview["panels"]]
    assert titles == ["Held-out accuracy", "Solve rate", "Groups of answers: unsolved"]
    assert overview["zeros"] == ["rollout/leaked", "rollout/mixed", "rollout/truncated/responder"]
    assert overview["groups"][0]["series"].keys().isdisjoint(overview["zeros"])


def test_seeds_become_bands_and_other_configs_curves(tmp_path):
    runs = [write_run(tmp_path / name, 3, 2, seed) for name, seed in (("a", 0), ("b", 1))]
    runs.append(write_run(tmp_path / "c", 3, 2, 0, questioner={"mapping": "azr"}))
    write_page(list(map(measured, runs)), epath.Path(tmp_path / "page.html"))
    overview = unpack(data_of(tmp_path / "page.html")[0])
    band, alone = overview["groups"]
    assert [group["name"] for group in (band, alone)] == [
        "algorithm.questioner.mapping=gaussian", "algorithm.questioner.mapping=azr"
    ]  # fmt: skip
    values = [[line["train/loss"] for line in measured(run).records] for run in runs[:2]]
    steps, *band_series = band["series"]["train/loss"]
    assert steps == [1, 2, 3]
    for kind, series in zip((lambda pair: sum(pair) / 2, min, max), band_series, strict=True):
        assert series == pytest.approx(list(map(kind, zip(*values, strict=True))), rel=1e-5)
    assert len(alone["series"]["train/loss"]) == 2
    assert alone["mapping"]["curve"][25] == [0.25, 0.75]
    (table,) = overview["evaluation"]
    assert table["rows"] == [
        {
            "name": ["lookup", "3"],
            "cells": [
                [[0.5, 0.45, 0.56, 2], [0.8, 0.7, 0.89, 2]],
                [[0.5, 0.45, 0.56, 1], [0.75, 0.7, 0.79, 1]],
            ],
        }
    ]


def test_documents_already_on_a_full_page_cost_no_space(tmp_path):
    workdir = write_run(tmp_path / "run", 10, 10, sizes=RunSizes(document=4000, clusters=20))
    write_page(
        [measured(workdir)], epath.Path(tmp_path / "page.html"), size=TEMPLATE_BYTES + 228_400
    )
    *lines, index = map(unpack, data_of(tmp_path / "page.html"))
    clusters = {tuple(map(tuple, entry["documents"])) for entry in index} - {()}
    assert [] not in lines
    complete = sum(bool(entry["documents"]) for entry in index)
    assert len(index) == 100 and 1 < len(clusters) < 20 and complete == 5 * len(clusters)


def test_page_counts_as_full_after_twenty_misses_in_a_row():
    large, small = [str(n) for n in range(99)], "x"
    size = len(report_page._packed(small)) + 1
    lines = report_page._Lines(report_page._index_bytes({}) + 3 * size + 10)
    for misses in (19, 19):
        assert [lines.add(large, 0) for _ in range(misses)] == [None] * misses
        assert lines.add(small, 0)  # fewer than twenty misses in a row
    assert lines.packed == [report_page._packed(small)] * 2
    assert [lines.add(large, 0) for _ in range(20)] == [None] * 20
    assert lines.add(small, 0) is None
    lines.start_pass(keep_free=11)
    assert lines.add(small, 0) is None
    lines.start_pass(keep_free=10)
    assert lines.add(small, 1) is None and lines.add(small, 0) == 3


def test_index_has_the_first_100_characters_of_a_question(tmp_path):
    workdir = write_run(tmp_path / "run", steps=1, episodes=0)
    write_records(path_of(workdir, 1), [RunWriter().episode(1, question="q" * 300)])
    write_page([measured(workdir)], epath.Path(tmp_path / "page.html"))
    *_, (entry,) = map(unpack, data_of(tmp_path / "page.html"))
    assert entry["title"] == "q" * 100


def test_groups_differing_in_many_fields_are_labeled_by_folder():
    similar_configs = [{"a": 1, "b": {"c": 2}, "seed": 1}, {"a": 1, "b": {"c": 3}, "seed": 2}]
    assert report_page._labels([[0], [1]], similar_configs, ["x", "y"]) == ["b.c=2", "b.c=3"]
    different_configs = [dict.fromkeys("abcd", n) for n in range(2)]
    assert report_page._labels([[0], [1]], different_configs, ["x", "y"]) == ["x", "y"]
    assert report_page._labels([[0], [1]], [similar_configs[0], None], ["x", "y"]) == ["x", "y"]


def test_runs_are_called_by_the_names_of_their_folders_if_these_differ():
    def called(*folders: str) -> list[str]:
        runs = [RunData(epath.Path(folder), [{"step": 1}], None) for folder in folders]
        overview = report_page.make_overview(runs, [Episodes() for _ in runs])
        return [group["name"] for group in overview["groups"]]

    assert called("a/x", "b/y") == ["x", "y"]
    assert called("a/x", "b/x") == ["a/x", "b/x"]


def test_a_curve_has_a_bounded_number_of_points(monkeypatch):
    monkeypatch.setattr(report_page, "POINTS", 3)
    records = [{"step": n, "a": float(n)} for n in range(1, 12)]
    places = {n: n for n in range(1, 12)}
    series = report_page._series([records], {"a": None}, [places])
    assert series == {"a": [[1, 6, 11], [1.0, 6.0, 11.0]]}


def test_curves_over_sampled_tokens_average_the_places_of_the_seeds(tmp_path):
    def run(name: str, tokens: int) -> RunData:
        lines = [{"step": n, "rollout/sampled_tokens": tokens, "eval/all": n} for n in (1, 2)]
        workdir = epath.Path(tmp_path / name)
        workdir.mkdir()
        (workdir / "config.json").write_text(json.dumps({"seed": tokens, "steps": 2}))
        return RunData(workdir, lines, None)

    runs, path = [run("a", 100), run("b", 300)], epath.Path(tmp_path / "page.html")
    overview = write_page(runs, path, x="sampled_tokens")
    (group,) = overview["groups"]
    assert overview["x"] == "sampled tokens"
    assert group["series"]["eval/all"][:2] == [[200, 400], [1, 2]]
    (group,) = write_page(runs, path)["groups"]
    assert group["series"]["eval/all"][0] == [1, 2]
    unknown = RunData(runs[0].workdir, [{"step": 1, "eval/all": 1}], None)
    with pytest.raises(ValueError, match="has no rollout/sampled_tokens in its metrics"):
        write_page([unknown], path, x="sampled_tokens")


ODD_EPISODES = (
    *('{"scores": [NaN]}', '{"scores": [1e999]}', '{"scores": ["x"]}', '{"scores": [null, 1]}'),
    *('{"reward": "inf"}', '{"reward": 1%s}' % ("0" * 400), '{"scores": [1%s]}' % ("0" * 400)),
    *('{"votes": [1]}', '{"votes": [null]}', '{"votes": ["yes"]}', '{"documents": "text"}'),
    *('{"measures": {"a": [NaN]}}', '{"documents": {"a": 1}}', "[]", "null"),
)


@pytest.mark.parametrize("line", ODD_EPISODES)
def test_an_odd_episode_is_named_and_skipped(tmp_path, caplog, line):
    file = path_of(tmp_path, 1)
    file.parent.mkdir()
    file.write_bytes(gzip.compress(f'{line}\n{{"question": "kept"}}\n'.encode()))
    path_of(tmp_path, 2).mkdir()  # a folder in place of a file
    os.mkfifo(path_of(tmp_path, 3))
    run = RunData(epath.Path(tmp_path), [{"step": 1, "a": 1.0}], None)
    assert write_page([run], epath.Path(tmp_path / "page.html"))["found"] == 1
    assert f"{file}:1: skipped" in caplog.text
    assert f"{path_of(tmp_path, 2)}: skipped (Is a directory)" in caplog.text
    assert f"{path_of(tmp_path, 3)}: skipped (a pipe, a socket or a device)" in caplog.text


@pytest.mark.slow
def test_command_line_compares_runs(tmp_path):
    first_run, second_run = (write_run(tmp_path / str(seed), 2, 2, seed) for seed in (0, 1))
    command = [sys.executable, "-m", "spell_jax.report", f"--workdir={first_run},{second_run}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *_, plots, page = result.stdout.splitlines()
    assert page == f"{first_run}/comparison.html"
    assert plots.endswith(f" plots of the page in {first_run}/plots/comparison")
    assert (first_run / "plots" / "comparison" / "solve_rate.png").is_file()
    assert unpack(data_of(first_run / "comparison.html")[0])["runs"] == [
        str(first_run),
        str(second_run),
    ]


# ------------------------------------------------------------------------------------- In a browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Open a browser window."""
    if browser.PROGRAM is None:
        pytest.skip(browser.MISSING)
    opened = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> epath.Path:
    """Write the page of a run of 500 steps and 2,000 episodes."""
    workdir = write_run(tmp_path_factory.mktemp("large") / "run", steps=500, episodes=4)
    write_page([measured(workdir)], workdir / "report.html")
    return workdir / "report.html"


def state(page) -> str:
    return page.value("location.hash")


def select(page, name: str, value: str) -> None:
    """Set a filter as a user does."""
    page.value(
        f"(() => {{ const field = document.forms[0].elements['{name}']; field.value = '{value}';"
        " field.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def entries(page) -> list[str]:
    return page.value("[...document.querySelectorAll('#list button')].map(b => b.textContent)")


@pytest.mark.slow
def test_large_page_opens_without_browser_errors(page, large):
    page.open(large)
    assert page.problems == []
    assert page.value("document.title") == "run"
    assert len(entries(page)) == 2000
    assert page.value("document.querySelectorAll('figure svg path.curve').length") > 15
    titles = page.value("[...document.querySelectorAll('figcaption')].map(c => c.textContent)")
    for title_part in (
        "Solve rate",
        "Task mix",
        "share that disagrees",
        "Entropy",
        "length",
        "by mean reward",
    ):
        assert any(title_part in title for title in titles), title_part
    assert "0.500 (0.450 to 0.560)0.750 (0.700 to 0.790)+0.250" in page.value(
        "document.querySelector('.tables table').textContent"
    )


def test_filters_select_episodes(page, large):
    page.open(large)
    for name, value, what in (
        ("task", "financial_math", "financial math"),
        ("outcome", "mixed", "mixed"),
    ):
        select(page, name, value)
        entry_texts = entries(page)
        assert 0 < len(entry_texts) < 2000 and all(what in text for text in entry_texts)
    select(page, "from", "7")
    select(page, "to", "60")
    steps = {int(re.findall(r"\d+", text)[0]) for text in entries(page)}
    assert steps and min(steps) >= 7 and max(steps) <= 60
    assert re.fullmatch(r"#task=financial_math&outcome=mixed&from=7&to=60&episode=\d+", state(page))
    select(page, "task", "")
    select(page, "outcome", "")
    steps = {int(re.findall(r"\d+", text)[0]) for text in entries(page)}
    assert steps == set(range(7, 61))
    select(page, "outcome", "bad_format")
    select(page, "role", "responder")
    assert entries(page) == [] and page.value("document.getElementById('count').textContent") == (
        "0 of 0"
    )
    select(page, "role", "questioner")
    assert entries(page)
    assert page.problems == []


def test_episode_marks_its_evidence_and_keys_navigate(page, large):
    page.open(large, "#outcome=mixed&task=general_qa&episode=0")
    page.wait("document.querySelector('#episode mark')")
    marked = "[...document.querySelectorAll('#episode .text mark')].map(m => m.textContent)"
    marks = page.value(marked)
    title = page.value("document.querySelector('#episode .text').textContent")
    port = re.findall(r"\d+", title)[0]
    assert marks == [f"The lighthouse of Port {port} was first lit in", str(1800 + int(port))]
    text = page.value("document.getElementById('episode').textContent")
    assert "rule 1" in text and "2 yes" in text and "1 malformed" in text
    assert "document 2 · read by the questioner · 2 marked" in text
    first = state(page)
    page.press("j")
    second = state(page)
    page.press("ArrowRight")
    third = state(page)
    assert len({first, second, third}) == 3
    page.press("k")
    page.press("ArrowLeft")
    assert state(page) == first
    page.press("ArrowLeft")  # there is no earlier episode
    assert state(page) == first and page.problems == []
    page.open(large, third)  # the address opens the same episode
    assert state(page) == third


def test_curves_have_the_expected_axes_colors_and_areas(page, large):
    page.open(large)

    def plotted(panel: dict, *groups: dict, what: str = "path", of: str = "d") -> list[str]:
        chart_arguments = ", ".join(map(json.dumps, ({"title": ""} | panel, groups)))
        elements = f"[...chart({chart_arguments}).querySelector('svg').querySelectorAll('{what}')]"
        return page.value(f"{elements}.map(e => '{of}' ? e.getAttribute('{of}') : e.textContent)")

    group = {"name": "g", "series": {"x": [[1, 2], [0.03, 0.37]], "y": [[1, 2], [0.1, 0.35]]}}
    metrics = {"all": "x", "b": "y"}
    # An axis begins and ends at a tick; a task's color does not depend on the curve of all tasks.
    labels = plotted({"metrics": metrics}, group, what="text", of="")
    assert labels[:5] == ["0", "0.1", "0.2", "0.3", "0.4"]
    colors = plotted({"metrics": metrics}, group, of="style")
    assert colors == ["stroke:var(--ink)", "stroke:var(--c0)"]
    assert plotted({"metrics": {"b": "y"}}, group, of="style") == ["stroke:var(--c0)"]
    # A comparison plots only the metric of all tasks.
    assert plotted({"metrics": metrics}, group, group, of="style") == [
        "stroke:var(--c0)", "stroke:var(--c1)"
    ]  # fmt: skip
    # Stacked metrics are areas on top of each other: 0 is at the bottom, 2 at the top.
    same = {"name": "g", "series": {name: [[1, 2], [1.0, 1.0]] for name in "xy"}}
    lower, upper = plotted({"metrics": {"a": "x", "b": "y"}, "stacked": True}, same)
    assert lower == "M46.0 102.0L410.0 102.0L410.0 196.0L46.0 196.0Z"
    assert upper == "M46.0 8.0L410.0 8.0L410.0 102.0L46.0 102.0Z"
    # With many steps, a smoothed curve is in front of the values; a band has only that one.
    steps, values = list(range(120)), [float(n % 2) for n in range(120)]
    raw, smooth = plotted({"metrics": {"a": "x"}}, group | {"series": {"x": [steps, values]}})
    assert " 8.0L" in raw and " 8.0L" not in smooth
    seeds = group | {"series": {"x": [steps, values, values, values]}}
    band, mean = plotted({"metrics": {"a": "x"}}, seeds)
    assert mean == smooth and " 8.0L" not in band


def test_only_differences_beyond_the_errors_are_colored(page, large):
    page.open(large)
    before = [0.5, 0.4, 0.7, 1]
    after = [[0.81, 0.71, 0.9, 1], [0.79, 0.69, 0.9, 1], [0.29, 0.2, 0.39, 1], None]
    rows = [{"name": ["", str(n)], "cells": [[before, cell]]} for n, cell in enumerate(after)]
    page.value(f"evaluation({json.dumps([{'title': 't', 'rows': rows}])}, [{{}}])")
    table = "[...[...document.querySelectorAll('table')].at(-1).querySelectorAll('td:last-child')]"
    assert page.value(f"{table}.map(cell => cell.className + cell.textContent)") == [
        "n good+0.310", "n +0.290", "n bad−0.210", "n "
    ]  # fmt: skip


def test_slow_episode_does_not_replace_a_later_one(page, large):
    page.open(large)
    question = page.value(
        "(async () => {"
        " const real = unpack;"
        " const wait = () => new Promise(go => setTimeout(go, 300));"
        " window.unpack = async at => { await wait(); return real(at); };"
        " const first = open(shown[1]);"
        " window.unpack = real;"
        " await Promise.all([first, open(shown[2])]);"
        " return document.querySelector('#episode .text').textContent; })()"
    )
    assert [question in text for text in entries(page)[:3]] == [False, False, True]


def test_missing_documents_are_explained_on_the_page(page, tmp_path):
    workdir = write_run(tmp_path / "run", steps=2, episodes=3)
    lines = [e | {"documents": [], "of": 5} for step, e in read_episodes(workdir) if step == 2]
    write_records(path_of(workdir, 2), lines)
    write_page([measured(workdir)], epath.Path(tmp_path / "page.html"))
    page.open(tmp_path / "page.html", "#from=2")
    page.wait("document.querySelector('#episode .text')")
    assert "of room in the run's files (config.episode_characters)" in (
        page.value("document.getElementById('episode').textContent")
    )
    count_text = page.value("document.getElementById('of').textContent")
    assert (
        "6 of 6 on disk" in count_text
        and "; 3 with their documents. 2 more did not fit" in count_text
    )
    select(page, "documents", "here")
    assert entries(page) == []
    select(page, "from", "")
    assert len(entries(page)) == 3 and page.problems == []


def test_quotations_and_references_are_marked(page, large):
    page.open(large)

    def marks(document: str, *answers: str, **fields: str) -> list:
        episode = {"task": "", "question": "", "reference": "", "answers": answers} | fields
        call = f"marked({json.dumps(document)}, evidence({json.dumps(episode)})).parts"
        parts = page.value(f"{call}.map(part => part.className ?? '') ")
        texts = page.value(f"{call}.map(part => part.textContent ?? part)")
        assert "".join(texts) == document
        return [pair for pair in zip(parts, texts, strict=True) if pair[0]]

    text = "One two three, FOUR (five) six seven."
    assert marks(text, "he says: two three four five SIX!") == [("quote", text[4:-7])]
    assert marks(text, "two three four five", "three four five six") == []
    assert marks(text, "one two three four five", "three four five six seven") == [
        ("quote", text[:-1])
    ]
    assert marks(text, "one two three four five", reference="Three") == [
        ("quote", "One two"), ("reference", "three"), ("quote", "FOUR (five")
    ]  # fmt: skip
    assert marks("七月十日に点灯した灯台", "灯台は七月十日に") == [("quote", "七月十日に")]
    options = {"task": "multiple_choice", "question": "Which?\n(A) two\n(B) three four"}
    assert marks(text, **options, reference="B") == [("reference", "three, FOUR")]
    assert marks(text, **options, reference="two") == []


def test_first_mark_of_a_long_document_is_in_view(page, tmp_path):
    sizes = RunSizes(document=20_000)
    workdir = write_run(tmp_path / "run", steps=1, episodes=8, sizes=sizes)
    write_page([measured(workdir)], epath.Path(tmp_path / "page.html"))
    page.open(tmp_path / "page.html", "#outcome=mixed")
    page.wait("document.querySelector('.card mark')?.closest('.text').scrollTop > 0")
    assert page.value(
        "(() => { const mark = document.querySelector('.card mark'), box = mark.closest('.text'),"
        " [a, b] = [mark, box].map(e => e.getBoundingClientRect());"
        " return a.top >= b.top && a.bottom <= b.bottom; })()"
    )
    assert "In the update: questioner used, advantage +0.5 · responder used · verdicts 4 × not" in (
        page.value("document.getElementById('episode').textContent")
    )
    assert "reward 1 · advantage +0.5 · rule 1 · votes 2 yes 1 malformed " in (
        page.value("document.querySelector('#episode .card summary').textContent")
    )
    details = "document.querySelectorAll('#episode details')"
    assert "{documents[1]}" in page.value(f"[...{details}].map(d => d.textContent).join()")


def test_hostile_model_text_is_shown_as_plain_text(page, tmp_path):
    workdir = write_run(tmp_path / HOSTILE.replace("/", "⁄")[:40], steps=2, episodes=0)
    make = RunWriter().episode
    names = ("task", "cluster", "reason", "proposal", "prompt", "question", "reference")
    hostile: dict = dict.fromkeys(names, HOSTILE) | {"own_reference": HOSTILE + "2"}
    hostile |= {"known": [HOSTILE], "blind": [HOSTILE, None]}
    lists = {"answers": [HOSTILE] * 4, "predictions": [HOSTILE] * 4, "documents": [HOSTILE] * 2}
    accepted = {"status": "accepted", "scores": [0.0, 1.0, 0.0, 1.0], "rule": [0.0] * 4}
    accepted["used"] = dict.fromkeys(("questioner", "responder"), HOSTILE) | {"verifier": [HOSTILE]}
    lines = [make(1, **(hostile | lists | accepted))]
    lines.append(make(2, **hostile, status=HOSTILE) | {"answers": [], "scores": []})
    write_records(path_of(workdir, 1), lines)
    lines_of_metrics = [
        {"step": 1, f"rollout/{HOSTILE}/x": 1.0, HOSTILE: 2.0, "train/entropy": 1.0}
    ]
    config = {HOSTILE: HOSTILE, "algorithm": {"questioner": {"mapping": HOSTILE}}}
    (workdir / "config.json").write_text(json.dumps(config))
    table = {HOSTILE: {HOSTILE: {HOSTILE: [0.5, 0.4, 0.6]}}}
    run = RunData(workdir, lines_of_metrics, (table, table))
    write_page([run], epath.Path(tmp_path / "page.html"))
    form = (tmp_path / "page.html").read_text()
    assert form.count("</script>") == 2 and "\u2028" not in form
    page.open(tmp_path / "page.html")
    page.wait("document.querySelector('#episode .text')")
    page.value("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for _ in lines:
        assert page.value("document.querySelectorAll('#in, #episode script, body > b').length") == 0
        assert "<b id=in>&amp;" in page.value("document.getElementById('episode').textContent")
        page.press("j")
        page.wait("document.querySelector('#episode .text')")
    assert page.value("document.querySelectorAll('script').length") == 2
    assert page.value("document.title") == workdir.name
    assert page.problems == []


def test_page_supports_algorithms_without_a_questioner(page, tmp_path):
    episode = {
        "task": "own",
        "cluster": "c",
        "status": "accepted",
        "shown": [0],
        "prompt": "{documents[0]} and what?",
        "question": "what?",
        "reference": "this",
        "answers": ["this", "that"],
        "predictions": ["this", None],
        "rule": [1.0, 0.0],
        "scores": [0.9, 0.0],
        "used": {"responder": "used"},
        "measures": {"well_formed": [True, False], "verbatim": [0.25, None], "<b>": "odd"},
        "documents": ["this is it"],
        "of": 1,
    }
    workdir = write_run(tmp_path / "run", steps=1, episodes=0)
    write_records(path_of(workdir, 1), [episode])
    write_page([measured(workdir)], epath.Path(tmp_path / "page.html"))
    page.open(tmp_path / "page.html")
    page.wait("document.querySelector('#episode .text')")
    episode_text = page.value("document.getElementById('episode').textContent")
    assert "reward 0.9 · rule 1 · well formed yes · verbatim 0.25 · <b> – · this" in episode_text
    assert (
        "reward 0 · rule 0 · well formed no · verbatim – · <b> – · no answer found" in episode_text
    )
    assert "what the policy was asked; {documents[0]} is document 1" in episode_text
    assert "uestioner" not in episode_text and "votes" not in episode_text
    assert not page.value("'role' in document.forms[0].elements") and page.problems == []
    select(page, "task", "own")
    assert len(entries(page)) == 1


def test_reconstruction_gaps_are_marked_in_documents(page, tmp_path):
    documents = [
        "One b, a \U0001f600\U0001f600.\n\nIt begins.",
        "Then a A b <b>B</b>.\n\nIt ends here. Or not.",
    ]
    full_text = "\n\n".join(documents)
    gap_texts, first = ["It begins.", "Then a A b <b>B</b>."], full_text.index("\U0001f600")
    places = [full_text.index(text) - first for text in gap_texts]
    episode = {
        "task": "reconstruction",
        "cluster": "c",
        "status": "accepted",
        "window": [first, len(full_text)],
        "spans": [[at, at + len(text)] for at, text in zip(places, gap_texts, strict=True)],
        "reference": "B, A",
        "answers": ["One it begins. Then a A b B it", "it ends here, or not"],
        "scores": [0.0, 1.0],
        "rule": [0.0, 1.0],
        "documents": documents,
        "of": 1,
    }
    workdir = write_run(tmp_path / "run", steps=1, episodes=0)
    write_records(path_of(workdir, 1), [episode])
    write_page([measured(workdir)], epath.Path(tmp_path / "page.html"))
    page.open(tmp_path / "page.html")
    page.wait("document.querySelector('.card .text mark')")
    marks = "[...document.querySelectorAll('.card .text mark')]"
    assert page.value(f"{marks}.map(m => [m.className, m.title, m.textContent])") == [
        ["taken", "gap 1", gap_texts[0]],
        ["taken", "gap 2", gap_texts[1]],
        ["quote", "", "It ends here. Or not"],
    ]
    cards = page.value(
        "[...document.querySelectorAll('.card')].filter(c => /^document/.test(c.textContent))"
        ".map(c => c.querySelector('.text').textContent)"
    )
    assert cards == documents
    episode_text = page.value("document.getElementById('episode').textContent")
    assert "Marked: what was taken out, and what answers quote" in episode_text
    assert "the reference" not in episode_text and page.problems == []


def test_page_compares_runs_and_filters_by_run(page, tmp_path):
    runs = [
        write_run(tmp_path / str(n), 5, 3, n % 2, questioner={"sigma": n // 2 + 1})
        for n in range(4)
    ]
    write_page(list(map(measured, runs)), epath.Path(tmp_path / "page.html"))
    page.open(tmp_path / "page.html")
    assert page.problems == []
    assert page.value("document.querySelectorAll('path.band').length") > 20
    run = page.value("document.querySelector('#run').textContent")
    assert "seed0, 1" in run and "steps5 of 4" in run
    assert "1 fields differ between the runs" in run and "algorithm.questioner.sigma" in run
    assert len(entries(page)) == 60
    select(page, "run", "3")
    assert len(entries(page)) == 15
    legend = page.value("document.querySelector('figure .legend').textContent")
    assert re.fullmatch(
        r"step 5algorithm\.questioner\.sigma=1 [\d.]+algorithm\.questioner\.sigma=2 [\d.]+", legend
    )
    assert "algorithm.questioner.sigma=2 (2 seeds)" in page.value(
        "document.querySelector('.run').textContent"
    )
    page.value("document.querySelector('#sections details').open = true")
    page.wait("document.querySelector('#sections details svg')")
    assert page.problems == []
