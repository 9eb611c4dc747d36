import errno
import json
import os
import subprocess
import sys

import pytest
from etils import epath

from spell_jax import report as report_command
from spell_jax.reporting.episodes import Episodes
from spell_jax.reporting.page import make_overview, write_page
from spell_jax.reporting.panels import other_panels
from spell_jax.reporting.plots import draw_others
from spell_jax.reporting.run_report import plot_run, read_run, report_runs
from spell_jax.reporting.tables import before_after_table, read_evaluation
from spell_jax.runtime.files import paths
from spell_jax.runtime.log.metrics import MetricsWriter

BEFORE = {
    "responder": {"general_qa": {"3 docs": [0.875, 0.83, 0.91], "12 docs": [0.11, 0.08, 0.16]}},
    "verifier": {"accuracy": {"all": [0.8, 0.74, 0.84]}},
}
AFTER = {
    "responder": {
        "general_qa": {"3 docs": [0.87, 0.83, 0.91], "12 docs": [0.44, 0.38, 0.5]},
        "multiple_choice": {"3 docs": [0.5, 0.4, 0.6]},
    },
    "verifier": {"accuracy": {"all": [0.9, 0.86, 0.93]}},
}


def write_run(workdir, evaluation=None):
    writer = MetricsWriter(workdir)
    for step in range(1, 5):
        writer.write(
            step,
            {
                "rollout/solve_rate": step / 10,
                "rollout/share/accepted": 0.8,
                "rollout/share/declined": 0.2,
                "train/grad_norm": float("nan") if step == 2 else 1.0,
                "train/entropy": 1.0,
                "rollout/truncated/responder": 0.0,  # not plotted
                **({"eval/responder/general_qa/8": 0.5} if step % 2 else {}),
            },
        )
    writer.close()
    if evaluation is not None:
        (workdir / "evaluation.json").write_text(json.dumps(evaluation))


@pytest.mark.slow
def test_one_plot_per_panel_and_table_of_the_evaluation(tmp_path):
    write_run(tmp_path, {"before": BEFORE, "after": AFTER})
    paths = plot_run(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "plots/evaluation_responder.png",
        "plots/evaluation_verifier.png",
        "plots/solve_rate.png",
        "plots/entropy_of_the_policy.png",
    ]
    for path in paths:
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_only_measured_metrics_are_plotted(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"train/loss": 1.0, "train/entropy": 1.0})
    writer.close()
    assert [path.name for path in plot_run(tmp_path)] == ["entropy_of_the_policy.png"]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400", "1" + "0" * 400, "-1e308", '"a"'])
def test_a_report_leaves_out_values_that_are_no_finite_numbers(value, tmp_path):
    """Lines of metrics hold NaN after a step with an update that was not finite."""
    lines = [{"step": step, "train/loss": 1.0 + step, "train/other": "VALUE"} for step in (1, 2, 3)]
    lines[1]["train/loss"] = "VALUE"
    text = "".join(json.dumps(line) + "\n" for line in lines).replace('"VALUE"', value)
    (tmp_path / "metrics.jsonl").write_text(text)
    overview = make_overview([read_run(tmp_path)], [Episodes()])
    text = json.dumps(overview, allow_nan=False)
    assert "train/loss" in text and "train/other" not in text
    assert [path.name for path in draw_others(overview, tmp_path / "other")] == ["train_loss.png"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400"])
def test_an_evaluation_that_is_not_finite_is_named(value, tmp_path):
    cell = {"role": {"task": {"all": [0.5, 0.1, 0.9]}}}
    text = json.dumps({"before": cell, "after": cell}).replace("0.1", value, 1)
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(ValueError, match=r"evaluation.json: before/role/task/all: want \[mean"):
        read_evaluation(tmp_path)


def test_metric_names_become_panels_and_series():
    shares = {name: f"rollout/share/{name}" for name in ("accepted", "declined")}
    names = ["rollout/solve_rate", *shares.values(), "eval/role/task/8", "non_finite"]
    names.append("time/seconds/tune")
    panels = {panel["title"]: (panel["unit"], panel["metrics"]) for panel in other_panels(names)}
    assert panels == {
        "eval/role/task": ("share of questions", {"8": "eval/role/task/8"}),
        "non_finite": ("non_finite", {"non_finite": "non_finite"}),
        "rollout/share": ("share", shares),
        "rollout/solve_rate": ("solve_rate", {"solve_rate": "rollout/solve_rate"}),
        "time/seconds": ("seconds", {"tune": "time/seconds/tune"}),
    }


def test_before_after_table_is_aligned():
    assert before_after_table(BEFORE, AFTER).splitlines() == [
        "responder",
        "                                            before                       after",
        "  general_qa       3 docs   0.875 (0.830 to 0.910)  ->  0.870 (0.830 to 0.910)  -0.005",
        "  general_qa       12 docs  0.110 (0.080 to 0.160)  ->  0.440 (0.380 to 0.500)  +0.330",
        "  multiple_choice  3 docs                        -  ->  0.500 (0.400 to 0.600)",
        "",
        "verifier",
        "                                 before                       after",
        "  accuracy  all  0.800 (0.740 to 0.840)  ->  0.900 (0.860 to 0.930)  +0.100",
    ]


def test_means_of_equal_values_have_no_interval_in_the_table():
    before, after = ({"task": {"all": {"F1": cell}}} for cell in ([0.0] * 3, [0.5, 0.25, 0.75]))
    (_, _, line) = before_after_table(before, after).splitlines()
    assert " ".join(line.split()) == "all F1 0.000 -> 0.500 (0.250 to 0.750) +0.500"


def report(workdir) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "spell_jax.report", f"--workdir={workdir}"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_command_line_prints_table_and_paths(tmp_path):
    write_run(tmp_path, {"before": BEFORE, "after": AFTER})
    result = report(tmp_path)
    assert result.returncode == 0, result.stderr
    assert before_after_table(BEFORE, AFTER) in result.stdout
    *_, plots, page = result.stdout.splitlines()
    assert plots.endswith(f" plots of the page in {tmp_path}/plots")
    assert page == f"{tmp_path}/report.html"
    assert all((tmp_path / name).is_file() for name in ("plots/solve_rate.png", "report.html"))


@pytest.mark.parametrize("workdirs", ["A,,B", "A,", " ,A"])
def test_an_empty_name_is_no_workdir(workdirs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report", f"--workdir={workdirs}"])
    with pytest.raises(ValueError, match=f"^--workdir = '{workdirs}': must be folders, none"):
        report_command.main()


@pytest.mark.slow
def test_run_without_metrics_raises_a_clear_error(tmp_path):
    result = report(tmp_path)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("no metrics there; is this the folder of a training run?")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="no line yet"):
        plot_run(tmp_path)
    assert not (tmp_path / "plots").exists()


def test_damaged_lines_of_metrics_are_named_and_not_plotted(tmp_path, caplog):
    lines = [
        b'{"step": 1, "train/loss": 2.0}',
        bytes(30),
        b"\xff",
        b'{"step": 4, "train/loss": 1.0}',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert [line["step"] for line in read_run(tmp_path).records] == [1, 4]
    assert "metrics.jsonl:2: skipped" in caplog.text and "metrics.jsonl:3: skipped" in caplog.text
    assert "metrics.jsonl: 2 of 4 lines skipped" in caplog.text


@pytest.mark.parametrize(
    "evaluation, message",
    [
        ([], "must be a JSON dict, is a list"),
        ({"before": {}, "after": {"s": {"r": 3}}}, "after/s/r: want an object, got 3"),
        (
            {"before": {"s": {"r": {"c": [1]}}}, "after": {}},
            r"before/s/r/c: want \[mean, low, high\] with low <= mean <= high, got \[1\]",
        ),
        ({"before": {"s": {"r": {"c": [1, 2, 3]}}}, "after": {}}, r"got \[1, 2, 3\]"),
        ({"before": {"s": {"r": {"c": [1, -1]}}}, "after": {}}, r"got \[1, -1\]"),
    ],
)
def test_error_names_malformed_part_of_the_evaluation(tmp_path, evaluation, message):
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    with pytest.raises(ValueError, match=message):
        read_evaluation(tmp_path)


def test_missing_or_partial_evaluation_is_none(tmp_path):
    assert read_evaluation(tmp_path) is None
    (tmp_path / "evaluation.json").write_text(json.dumps({"before": {}}))
    assert read_evaluation(tmp_path) is None


@pytest.mark.parametrize(
    "name", ["k" * 10_000, "a\0b", "\ud800", "\x1b[31m", "a\nb", "../../x", ""]
)
def test_any_metric_name_makes_a_picture_in_the_folder(tmp_path, name):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, f"{name}/x": 1.0}) + "\n")
    overview = make_overview([read_run(tmp_path)], [Episodes()])
    (picture,) = draw_others(overview, epath.Path(tmp_path / "plots"))
    assert picture.parent == tmp_path / "plots" and picture.suffix == ".png"
    assert len(picture.name) < 100 and picture.name.isascii() and picture.name.isprintable()


@pytest.mark.parametrize("value", ["1" + "0" * 400, "NaN", '"text"', "null", "[1]", '{"a": 1}'])
def test_odd_counts_of_tokens_and_odd_configs_do_not_stop_a_report(tmp_path, value):
    names = "rollout/sampled_tokens", "rollout/answer_tokens/responder", "rollout/questioner_reward"
    odd = ", ".join(f'"{name}": {value}' for name in names)
    lines = ['{"step": 1, "rollout/sampled_tokens": 5, "eval/x": 1}', f'{{"step": 2, {odd}}}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.json").write_text(
        f'{{"algorithm": {{"questioner": {{"mapping": "gaussian", "mu": {value}, "sigma": 1}}}}}}'
    )
    (tmp_path / "episodes").write_text("a file")
    run = read_run(tmp_path)
    for x in ("step", "sampled_tokens"):
        overview = write_page([run], epath.Path(tmp_path / "page.html"), x=x)
        (group,) = overview["groups"]
        assert group["series"]["eval/x"][1] == [1.0]
        assert group["mapping"] is None


def test_a_missing_axis_is_a_mistake_of_the_user(tmp_path):
    write_run(tmp_path)
    with pytest.raises(ValueError, match="has no rollout/sampled_tokens"):
        report_runs([epath.Path(tmp_path)], "sampled_tokens")
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluation.json"])
def test_a_pipe_in_place_of_a_file_is_an_error(tmp_path, name):
    write_run(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=rf"a pipe, a socket or a device.*{name}"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"), [("plots", "folder"), ("plots/comparison", "folder"), ("report.html", "file")]
)
def test_what_cannot_be_written_is_a_mistake_of_the_user_before_the_work(tmp_path, name, kind):
    write_run(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "folder":
        path.write_text("a file")
    else:
        path.mkdir()
    workdirs = [epath.Path(tmp_path)] * (2 if "comparison" in name else 1)
    with pytest.raises(ValueError, match=rf"{name}: is a \w+, must be a {kind}; move or remove it"):
        report_runs(workdirs)
    assert not list(tmp_path.rglob("*.png"))


def test_a_report_in_a_folder_of_another_user_names_the_folder(tmp_path, monkeypatch):
    write_run(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match=rf"^{tmp_path}: permission denied; must be a folder"):
        report_runs([epath.Path(tmp_path)])
    assert not (tmp_path / "plots").exists()


def test_metrics_that_may_not_be_read_are_not_called_missing(tmp_path, monkeypatch):
    """A folder without permission looks empty to `exists`."""
    write_run(tmp_path)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(paths, "open_file", refuse)
    monkeypatch.setattr(type(epath.Path(tmp_path)), "exists", lambda path: False)
    with pytest.raises(PermissionError, match=r"metrics\.jsonl"):
        read_run(tmp_path)
