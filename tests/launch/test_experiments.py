"""Tests of the papers' tables and figures: their runs, commands, numbers and page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

from docs.tools import commands, site
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.configs import eapo, paper, reconstruction, rlvr
from spell_jax.data import clusters
from spell_jax.evaluation import judgments, lengths, protocol
from spell_jax.evaluation.benchmarks import registry as benchmarks
from spell_jax.evaluation.generated import ruler
from spell_jax.evaluation.runner import SUMMARY
from spell_jax.launch import topologies, xmanager
from spell_jax.launch.experiments import __main__ as command
from spell_jax.launch.experiments import printer, registry
from spell_jax.launch.experiments.experiment import (
    Column,
    EvaluationCommand,
    Experiment,
    FirstOf,
    Mean,
    MetricMean,
    PaperRun,
    Score,
    TableRow,
    VerdictShare,
)
from spell_jax.launch.memory_plan import MemoryPlan
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.runtime.config import build
from tests import metric_names
from tests.algorithms.scripted import Rollout
from tests.launch.test_xmanager import make_flags
from tests.paths import ROOT

PAGE = ROOT / "docs" / "experiments.md"
ALL = list(registry.experiments().values())
TRAINED = [experiment.name for experiment in ALL if experiment.runs]
RUNS = {run.name: run for experiment in ALL for run in experiment.runs}
JUDGE_URL = "http://localhost:1/v1"  # of the rows with an external judge

_7B = PolicyConfig(
    152_064, 3584, 28, 28, 4, 128, 18_944, tied_embeddings=False, max_positions=2**20
)
_14B = dataclasses.replace(_7B, width=5120, layers=48, heads=40, kv_heads=8, feed_forward=13_824)
_LLAMA = dataclasses.replace(
    _7B, vocab_size=128_256, width=4096, layers=32, heads=32, kv_heads=8, feed_forward=14_336
)
_4B = dataclasses.replace(
    _7B,
    vocab_size=151_936,
    width=2560,
    layers=36,
    heads=32,
    kv_heads=8,
    feed_forward=9728,
    qk_norm=True,
    qkv_bias=False,
    tied_embeddings=True,
)
_30B = dataclasses.replace(
    _4B,
    width=2048,
    layers=48,
    kv_heads=4,
    feed_forward=768,
    experts=128,
    experts_per_token=8,
    tied_embeddings=False,
)
# Part of a folder's name -> shape, the first that fits.
SHAPES = {
    "Qwen3-30B": _30B,
    "Qwen3-14B": dataclasses.replace(
        _4B, width=5120, layers=40, heads=40, feed_forward=17_408, tied_embeddings=False
    ),
    "Qwen3-4B": _4B,
    "Llama": dataclasses.replace(_LLAMA, qkv_bias=False),
    "32B": dataclasses.replace(_14B, layers=64, feed_forward=27_648),
    "14B": _14B,
    "7B": _7B,
}


# -------------------------------------------------------------------------------------------- Rows


def test_every_table_and_figure_of_the_papers_is_there():
    counts = {"spell": (9, 8), "eapo": (2, 10), "reconstruction": (3, 9)}
    assert sorted(registry.experiments()) == sorted(
        f"{paper}-{kind}-{number}"
        for paper, kind_counts in counts.items()
        for kind, count in zip(("table", "figure"), kind_counts, strict=True)
        for number in range(1, count + 1)
    )
    with pytest.raises(ValueError, match=r"experiment = 'spell-table-10': must be one of spell-"):
        registry.find("spell-table-10")


@pytest.mark.parametrize("experiment", ALL, ids=lambda experiment: experiment.name)
def test_rows_have_numbers_commands_or_a_reason(experiment: Experiment):
    assert experiment.rows or experiment.note
    assert len({row.name for row in experiment.rows}) == len(experiment.rows)
    for row in experiment.rows:
        assert len(row.paper) == len(experiment.columns)
        assert bool(row.reason) != bool(row.run or row.evaluations), row.name
        assert row.reason or row.place
    stated = {value for row in experiment.rows for value in row.paper}
    main = {float(text) for text in re.findall(r"\d\d\.\d+", experiment.paper)}
    assert main <= stated or not experiment.rows


def test_runs_of_one_name_are_equal_and_different_ones_have_other_names():
    names: dict[Any, str] = {}
    for experiment in ALL:
        for run in (row.run for row in experiment.rows if row.run):
            content = (run.config, *sorted({**run.inputs, **run.fields}.items()))
            assert names.setdefault(content, run.name) == run.name
            assert run == RUNS[run.name]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("spell-table-1", (slice(0, 5), slice(5, 10))),
        *((f"spell-table-{n}", (slice(None),)) for n in (3, 4, 7, 8, 9)),
        ("eapo-table-1", (slice(None),)),
        ("reconstruction-table-3", (slice(0, 6), slice(6, 12), slice(12, 18))),
    ],
)
def test_averages_of_the_papers_tables_follow_from_their_rows(name, groups):
    for row in registry.find(name).rows:
        for group in groups:
            *values, average = row.paper[group]
            if (name, row.name, group.start) == ("reconstruction-table-3", "Qwen, ours", 12):
                continue  # the paper prints 65.65, but its tasks have the mean 66.93
            assert statistics.fmean(map(float, values)) == pytest.approx(average, abs=0.11), row


def test_numbers_of_the_papers_are_percentages():
    for experiment in ALL:
        for value in (value for row in experiment.rows for value in row.paper):
            assert value is None or 0 < value <= 100, experiment.name


# -------------------------------------------------------------------------------------------- Runs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create stand-ins for all models and data, with the names that the runs expect."""
    folder = tmp_path_factory.mktemp("inputs")
    question = {"task": "general_qa", "documents": ["A"], "question": "B?", "answer": "C"}
    for run in RUNS.values():
        for field, name in run.inputs.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if field.endswith("folder") and not path.exists():
                path.symlink_to(TINY_POLICY)
            elif field in ("data.questions", "data.validation"):
                path.write_text(json.dumps(question))
            elif field == "data.source" and path.suffix:
                path.write_text(json.dumps({"id": "a", "documents": ["A text."]}))
            elif field == "data.source":
                path.mkdir(exist_ok=True)
                (path / "a.txt").write_text("A text of one's own.\n")
    return str(folder)


@pytest.mark.parametrize("name", TRAINED)
def test_every_run_of_an_experiment_is_checked(name, inputs, monkeypatch):
    monkeypatch.setenv("JUDGE_URL", JUDGE_URL)
    flags = make_flags(config=None, sweep=[], experiment=name, inputs=inputs)
    units, _ = xmanager.plan_units(flags, [])
    assert [unit.name for unit in units] == [run.name for run in registry.find(name).runs]
    for unit, run in zip(units, registry.find(name).runs, strict=True):
        config = xmanager.read_config(unit)
        for field, path in run.inputs.items():
            section, _, last = field.partition(".")
            assert config[section][last] == f"{inputs}/{path}"


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.name)
def test_run_fits_its_slice(run: PaperRun):
    config = xmanager.read_config(xmanager.WorkUnit("", tuple(run.flags("w", "."))))
    folder = config.policy.folder
    shape = next(shape for name, shape in SHAPES.items() if name in folder)
    shape = dataclasses.replace(shape, remat=config.policy.remat, ring=config.policy.ring)
    slices = [
        topology for topology in topologies.TOPOLOGIES.values() if topology.name.startswith("v5p-")
    ]
    for topology in slices:
        try:
            fits = MemoryPlan(config, shape, topology, config.sampler.max_prompt).fits
        except ValueError:  # the mesh needs more devices
            fits = False
        if fits:
            break
    assert topology.name == run.topology


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.name)
def test_run_trains_the_model_of_its_config(run: PaperRun):
    file, _, name = run.config.partition(":")
    if name:
        models = {"eapo": eapo, "reconstruction": reconstruction}.get(Path(file).stem, paper).MODELS
        assert run.inputs["policy.folder"] == f"models/{models[name].folder}"


def _measured_rows(name: str, models: Any) -> list[Any]:
    """Return (row, model of the config) of an experiment's rows."""
    by_folder = {model.folder: model for model in models.values()}
    rows = [row for row in registry.find(name).rows if row.folder in by_folder]
    return [pytest.param(row, by_folder[row.folder], id=row.name) for row in rows]


@pytest.mark.parametrize(("row", "model"), _measured_rows("spell-table-1", paper.MODELS))
def test_spell_models_have_room_for_their_answers(row: TableRow, model: paper.SpellModel):
    for evaluation in row.evaluations:
        flags = dict(flag.split("=", 1) for flag in evaluation.flags)
        factor = model.yarn if evaluation.name == "long_100k" else 1
        assert flags.get("--max_tokens", "4096") == str(model.max_tokens)
        assert flags.get("--rope_factor", "1") == f"{factor:g}"
        assert flags.get("--rope_scaling", "") == ("yarn" if factor > 1 else "")


@pytest.mark.parametrize(("row", "model"), _measured_rows("eapo-table-1", eapo.MODELS))
def test_eapo_models_have_positions_for_their_prompts(row: TableRow, model: eapo.EapoModel):
    (evaluation,) = row.evaluations
    flags = dict(flag.split("=", 1) for flag in evaluation.flags)
    factor = 1 if row.run else model.yarn  # a run's config has the scaling
    assert flags.get("--rope_factor", "1") == f"{factor:g}"
    assert flags.get("--rope_scaling", "") == ("yarn" if factor > 1 else "")


@pytest.mark.parametrize("name", TRAINED)
def test_every_run_of_an_experiment_is_checked_for_vertex(name, monkeypatch):
    monkeypatch.setenv("JUDGE_URL", JUDGE_URL)
    flags = make_flags(
        executor="vertex", workdir="/gcs/b/w", config=None, sweep=[], inputs="/gcs/b"
    )
    flags.experiment = name
    units, _ = xmanager.plan_units(flags, [])
    assert len(units) == len(registry.find(name).runs)


def test_verifier_without_majority_voting_votes_once_and_is_not_trained():
    rows = {row.name: row for row in registry.find("spell-table-2").rows}
    run = rows["w/o Majority Voting"].run
    assert run
    config = xmanager.read_config(xmanager.WorkUnit("", tuple(run.flags("w", "."))))
    algorithm = build(SpellConfig, config.algorithm, "algorithm")
    (verdicts,) = (budget for budget in algorithm.budgets() if budget.role == "verifier")
    assert (verdicts.replies, verdicts.trained) == (1, 0)
    full = build(SpellConfig, paper.get_config().algorithm, "algorithm")
    verifier = dataclasses.replace(full.verifier, group_size=1, train=False)
    assert algorithm == dataclasses.replace(full, verifier=verifier)


def test_epochs_of_the_baselines_are_on_the_page():
    """Table 9's runs and the page's table say the same; RLVR and LongPO have their papers' data."""
    page = (ROOT / "docs" / "algorithms.md").read_text()
    section = page.split("## Training of the baselines")[1].split("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"][2:]
    runs = {run.name.partition("-")[0]: run for run in registry.find("spell-table-9").runs}
    del runs["spell"]
    assert {name.lower().partition("-")[0] for name, *_ in table} == runs.keys()
    for name, questions, epochs, sizes, rate, schedule, _ in table:
        run = runs[name.lower().partition("-")[0]]
        assert run.inputs["data.questions"] == "data/questions/questions.jsonl"
        config = xmanager.read_config(xmanager.WorkUnit("", tuple(run.flags("w", "."))))
        batch, optimizer = config.algorithm.generation_batch, config.optimizer
        assert questions == f"{rlvr.QUESTIONS:,}"
        assert epochs == f"{config.steps * batch / rlvr.QUESTIONS:.1f}"
        assert sizes == f"{config.steps} × {batch}"
        assert float(rate) == optimizer.learning_rate
        warm_up = f", {optimizer.warmup_steps} warm-up steps" if optimizer.warmup_steps else ""
        rmsprop = ", RMSprop" if optimizer.name == "rmsprop" else ""
        assert schedule == optimizer.schedule + warm_up + rmsprop
        if "questions" not in config.algorithm:  # a step trains on all of its questions
            assert config.steps * batch == pytest.approx(rlvr.QUESTIONS, abs=batch - 1)
        else:
            trained = config.steps * config.algorithm.questions / rlvr.QUESTIONS
            assert f"128 questions of\nit, {trained:.1f} epochs" in section


RECONSTRUCTION_RUNS = [run for run in RUNS.values() if run.name.startswith("reconstruction-")]


@pytest.mark.parametrize("run", RECONSTRUCTION_RUNS, ids=lambda run: run.name)
def test_reconstruction_validates_on_its_500_held_out_documents(run: PaperRun):
    """The page's quotas of a run's documents leave the paper's number to train on."""
    page = PAGE.read_text()
    main = re.findall(r"--domain=\w+:(\d+)", page)
    (of_each,) = re.findall(r"with ([\d,]+) documents of each domain", page)
    is_larger = "30000" in run.inputs["data.source"]
    quotas = [int(of_each.replace(",", ""))] * 3 if is_larger else [int(quota) for quota in main]
    config = xmanager.read_config(xmanager.WorkUnit("", tuple(run.flags("w", "."))))
    ids = [str(number) for number in range(sum(quotas))]
    training, held_out = clusters.split_held_out(ids, config.data.held_out)
    assert len(held_out) == 500
    assert len(training) == (30_001 if is_larger else 14_000)
    assert config.algorithm.validation_puzzles * len(config.algorithm.options) == 500
    documents = config.algorithm.most_documents or len(training)
    assert config.steps == documents // config.algorithm.documents  # one epoch


EAPO_RUNS = [run for run in RUNS.values() if run.config.startswith("configs/eapo.py")]


@pytest.mark.parametrize("run", EAPO_RUNS, ids=lambda run: run.name)
def test_outcome_of_eapo_is_rewarded_by_a_judge(run: PaperRun, monkeypatch):
    monkeypatch.setenv("JUDGE_URL", JUDGE_URL)
    flags = tuple(run.with_variables().flags("w", "."))
    algorithm = xmanager.read_config(xmanager.WorkUnit("", flags)).algorithm
    assert (algorithm.rule, algorithm.judge_template) == ("judge", "grades")
    assert (algorithm.judge_url, algorithm.judge_model) == (JUDGE_URL, "gpt-4o-2024-11-20")


def test_every_row_of_eapo_that_trains_is_among_those_runs():
    assert len(EAPO_RUNS) == 9
    rows = [row for e in ALL if e.name.startswith("eapo-") for row in e.rows if row.run]
    assert {row.run.name for row in rows} == {run.name for run in EAPO_RUNS}


def test_run_without_address_of_its_judge_starts_nothing(inputs, monkeypatch, capsys):
    monkeypatch.delenv("JUDGE_URL", raising=False)
    monkeypatch.setattr(xmanager, "run_units", lambda *_: pytest.fail("a process starts"))
    fields = {"config": None, "sweep": [], "experiment": "eapo-table-1", "inputs": inputs}
    flags = make_flags(**fields, base_image="")
    with monkeypatch.context() as patched:
        patched.setattr(xmanager.flags, "FLAGS", flags)
        with pytest.raises(ValueError, match="must have a value") as error:
            xmanager.main(["launch.xmanager"])
    assert str(error.value) == (
        "algorithm.judge_url = '$JUDGE_URL': must have a value, for grpo-qwen3-14b; export "
        "JUDGE_URL=http://HOST/v1, or give --config.algorithm.judge_url"
    )
    override = f"--config.algorithm.judge_url={JUDGE_URL}"
    units, _ = xmanager.plan_units(flags, [override])
    assert all(xmanager.read_config(unit).algorithm.judge_url == JUDGE_URL for unit in units)
    # The printed commands name the variable, and a command that runs without it ends at once.
    monkeypatch.setattr("sys.argv", ["launch.experiments", "eapo-table-1", "--commands"])
    command.main()
    printed = capsys.readouterr()
    assert printed.err == (
        "JUDGE_URL: has no value; export JUDGE_URL=http://HOST/v1 before the first command\n"
        "API_URL: has no value; export API_URL=http://HOST/v1 before the first command\n"
    )
    assert printed.out.count("--config.algorithm.judge_url=$JUDGE_URL") == len(units)
    (unit, *_) = units
    empty = unit._replace(flags=(*unit.flags, "--config.algorithm.judge_url="))
    with pytest.raises(ValueError, match=r"algorithm\.judge_url = '': must be the http"):
        xmanager.check_config(xmanager.read_config(empty), "local")


def test_experiment_units_have_the_flags_of_their_runs():
    units = xmanager.experiment_units("spell-table-3", "w/", "/gcs/b", ["--config.seed=1"])
    assert [unit.name for unit in units[:2]] == ["spell-qwen2.5-7b-instruct", "spell-sigma-6"]
    assert units[1].flags == (
        "--config=configs/paper.py:qwen2.5-7b-instruct",
        "--workdir=w/spell-sigma-6",
        "--config.policy.folder=/gcs/b/models/Qwen2.5-7B-Instruct",
        "--config.data.source=/gcs/b/data/clusters",
        "--config.algorithm.questioner.sigma=0.08333333333333333",
        "--config.seed=1",
    )


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"experiment": "table-2"}, [], r"experiment = 'table-2': must be one of"),
        ({"experiment": "spell-figure-2"}, [], r"'spell-figure-2': must have runs; A drawing"),
        ({"experiment": "spell-table-3", "sweep": ["seed=0"]}, [], r"sweep = .* must not be given"),
        ({"experiment": "spell-table-3", "config": "c.py"}, [], r"config = 'c.py': must not be"),
        ({}, [], r"config = None: must be a config file, or give an experiment"),
        (
            {"experiment": "spell-table-3"},
            ["--config.algorithm.questioner.sigma=0.1"],
            r"--config\.algorithm\.questioner\.sigma=0\.1: .*sigma is set by spell-sigma-6",
        ),
        (
            {"experiment": "spell-table-3"},
            ["--config.data.source=x"],
            r"--config\.data\.source=x: must not be given",
        ),
    ],
)
def test_mistakes_about_experiments_are_named(changes, overrides, message):
    with pytest.raises(ValueError, match=message):
        xmanager.plan_units(make_flags(**{"config": None, "sweep": []} | changes), overrides)


# ---------------------------------------------------------------------------------------- Commands


DEFINED = {name: {flag.name for flag in command.flags} for name, command in commands.find().items()}


@pytest.mark.parametrize("experiment", ALL, ids=lambda experiment: experiment.name)
def test_evaluations_have_known_flags_and_benchmarks(experiment: Experiment):
    for row in experiment.rows:
        for evaluation in row.evaluations:
            flags = dict(flag.removeprefix("--").split("=", 1) for flag in evaluation.flags)
            assert set(flags) <= DEFINED[evaluation.module]
            assert flags["out"] == f"{{folder}}/{evaluation.name}"
            for name in filter(None, flags.get("benchmarks", "").split(",")):
                task = name.removeprefix("ruler_").rpartition("_")[0]
                assert name in benchmarks.LOADERS or task in ruler.TASKS or name == "needle"


def _sources(source: Any) -> list[Any]:
    return (
        [leaf for part in source.sources for leaf in _sources(part)]
        if isinstance(source, Mean | FirstOf)
        else [source]
    )


@pytest.mark.parametrize("experiment", ALL, ids=lambda experiment: experiment.name)
def test_columns_read_what_the_rows_write(experiment: Experiment):
    sources = [
        source
        for column in experiment.columns
        if column.source
        for source in _sources(column.source)
    ]
    metrics = [source.metric for source in sources if isinstance(source, MetricMean)]
    assert not metric_names.compare([*metrics, *experiment.curves])[0]
    limits: dict[str, dict[str, str]] = {}
    for evaluation in (evaluation for row in experiment.rows for evaluation in row.evaluations):
        limits[evaluation.name] = dict(flag.split("=", 1) for flag in evaluation.flags)
    for source in (source for source in sources if isinstance(source, VerdictShare)):
        judgment = limits[source.evaluation]["--judgment"]
        assert source.verdict in judgments.VERDICTS[judgment]
    for source in (source for source in sources if isinstance(source, Score)):
        flags = limits[source.evaluation]
        assert str(source.max_input) in flags["--max_input"].split(",")
        benchmark_names = flags["--benchmarks"].split(",")
        assert set(benchmarks.COLUMNS.get(source.name, (source.name,))) <= {
            *benchmark_names,
            "average",
        }


def test_commands_train_each_run_once_and_quote_for_a_shell():
    lines = printer.commands(registry.find("reconstruction-table-2"), "w", "i")
    assert len(set(lines)) == len(lines)
    trained = [line for line in lines if line.startswith("python -m spell_jax.train ")]
    assert len(trained) == 8
    assert '"--config.algorithm.options=(2,)"' in trained[0]
    assert "--config.policy.folder=i/models/Qwen2.5-7B-Instruct-1M" in trained[0]
    assert any("--policy=i/models/Qwen2.5-7B-Instruct-1M --data=i/benchmarks" in x for x in lines)
    lines = printer.commands(registry.find("spell-figure-5"), "w", "i")
    names = ("qwen2.5-7b-instruct", "azr", "r-zero")
    assert lines[-1] == "python -m spell_jax.report --workdir=" + ",".join(
        f"w/spell-{name}" for name in names
    )


# ----------------------------------------------------------------------------------------- Results


def _write_summary(
    folder: Path,
    max_input: int,
    scores: dict[str, float],
    unjudged: dict[str, int] | None = None,
    left_out: dict[str, int] | None = None,
) -> None:
    values = {"tokens_in": 1, "tokens_out": 1, "prediction": "", "truncated": False}
    values |= {"max_input": max_input, "rule": 0.0, "judge": None, "stopped": True}
    rows = [
        values | {"benchmark": name, "final": score, "unjudged": at < (unjudged or {}).get(name, 0)}
        for name, score in scores.items()
        for at in range(4)
    ]
    keys = [(max_input, name, str(at)) for name, n in (left_out or {}).items() for at in range(n)]
    summaries = protocol.summarize(
        rows, list(scores), [max_input], 2, benchmarks.COLUMNS, 0, left_out=keys
    )
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"rows": summaries}))


def _write_judgment(folder: Path, shares: dict[str, float], unanswered: int = 0) -> None:
    folder.mkdir(parents=True)
    result = {"shares": shares, "malformed": 0, "unanswered": unanswered}
    (folder / judgments.RESULT).write_text(json.dumps(result))


def test_table_has_measured_numbers_beside_those_of_the_paper(tmp_path):
    names = ("docmath", "frames", "2wikimqa", "hotpotqa", "musique", "longbench_v2")
    scores = dict(zip(names, (0.5, 0.25, 0.1, 0.2, 0.6, 0.75), strict=True))
    _write_summary(tmp_path / "spell-no-verifier" / "long_16k", 16_384, scores)
    lines = printer.table(registry.find("spell-table-2"), str(tmp_path)).splitlines()
    assert lines[0] == "| paper / here | DocMath | Frames | LB-MQA | LB-V2 | Average |"
    assert "| SPELL | 45.8 / | 46.7 / | 63.1 / | 33.2 / | 47.2 / |" in lines
    assert "| w/o Verifier | 39.4 / 50 | 46.6 / 25 | 60.4 / 30 | 29.4 / 75 | 44.0 / 45 |" in lines


def test_distribution_of_tasks_counts_the_solvable_questions(tmp_path):
    """Figure 8(a): of 8 accepted questions of two tasks, the 4 with different rewards count."""
    scores = {"financial_math": [(1, 0)] * 3 + [(1, 1)], "general_qa": [(0, 1)] + [(0, 0)] * 3}
    rollout = Rollout()
    episodes = [
        dataclasses.replace(rollout.episodes[0], task=task, scores=pair)
        for task, pairs in scores.items()
        for pair in pairs
    ]
    means = rollout.algorithm.metrics(episodes).means()
    line = {"step": 1} | {f"rollout/{name}": value for name, value in means.items()}
    folder = tmp_path / "spell-qwen2.5-7b-instruct"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    numbers = {
        column.title: column.source.read(epath.Path(folder))
        for column in registry.find("spell-figure-8").columns
        if column.source
    }
    shares = {title: number.value for title, number in numbers.items() if number}
    assert shares["solvable, financial_math, first"] == 75
    assert shares["solvable, general_qa, first"] == shares["solvable, general_qa, last"] == 25


def test_mean_over_lengths_needs_all_evaluations(tmp_path):
    tasks = {
        f"ruler_{task}_{n}": 0.5 for task in ("vt", "cwe", "fwe") for n in (32_768, 65_536, 128_000)
    }
    qa_tasks = {f"ruler_qa_{n}": 1.0 for n in (32_768, 65_536, 128_000)}
    folder = tmp_path / "reconstruction-shuffled-qwen"
    experiment = registry.find("reconstruction-table-1")
    _write_summary(folder / "ruler", 128_000, tasks)
    _write_summary(folder / "qa_1", 128_000, qa_tasks)
    assert "| Qwen, shuffled | 69.82 / |" in printer.table(experiment, str(tmp_path))
    _write_summary(folder / "qa_2", 128_000, qa_tasks)
    assert "| Qwen, shuffled | 69.82 / 70 |" in printer.table(experiment, str(tmp_path))


def test_curves_are_read_from_the_first_and_last_steps_of_a_run(tmp_path):
    folder = tmp_path / "reconstruction-dense-qwen"
    folder.mkdir()
    lines = [{"step": n, "eval/dense_reward": n / 100} for n in range(1, 41)]
    lines += [{"step": 41}, *({"step": 42, "eval/dense_reward": x} for x in ("a", [1], math.nan))]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    table = printer.table(registry.find("reconstruction-figure-8"), str(tmp_path))
    assert "| Qwen, ours | / | / | / 0.055 | / 0.355 | / | / |" in table


def test_tree_of_evidence_is_scored_where_the_answer_is_known(tmp_path):
    shares = {"right": 0.5, "wrong": 0.5}
    _write_judgment(tmp_path / "tree-ear-llm-e" / "tree_outcome", shares)
    _write_judgment(tmp_path / "tree-ear" / "tree_outcome", shares, unanswered=2)
    direct = tmp_path / "Qwen3-30B-A3B-Instruct-2507" / "musique"
    _write_summary(direct, 122_880, {"musique": 0.25})
    table = printer.table(registry.find("eapo-figure-3"), str(tmp_path))
    assert "| Direct Reasoning | / 25 | / |" in table
    assert "| EAR + LLM-E | / 50 | 9.0 / |" in table
    assert "| EAR | / 50* | / |" in table  # not all answers have a verdict
    assert "\\* answers without a judge's verdict: the evaluation's folder says" in table
    assert "| Evidence-Grounded (evidence of a closed model) | 63.0 / | / |" in table


def test_verdicts_fill_the_cells_of_diversity_and_errors(tmp_path):
    shares = {"consistent": 0.755, "diverse": 0.245}
    _write_judgment(tmp_path / "tree-ear-llm-e" / "tree_diversity", shares)
    _write_judgment(tmp_path / "tree-ear-llm-r" / "tree_diversity", {}, unanswered=5)
    table = printer.table(registry.find("eapo-table-2"), str(tmp_path))
    assert "| EAR + LLM-E | 24.0 / 24.5 | 76.0 / 75.5 |" in table
    assert "| EAR + LLM-R | 3.5 / | 96.5 / |" in table
    folder = tmp_path / "eapo-qwen3-30b-a3b-thinking-2507"
    _write_judgment(folder / "errors", {"evidence": 0.125, "reasoning": 0.25, "other": 0.0})
    table = printer.table(registry.find("eapo-figure-9"), str(tmp_path))
    assert "| EAPO | 13.5 / 12.5 | 15.4 / 25 |" in table
    path = folder / "errors" / judgments.RESULT
    path.write_text('{"shares": 1}')
    with pytest.raises(ValueError, match=f"{path}: not the result of a judgment"):
        printer.table(registry.find("eapo-figure-9"), str(tmp_path))


def test_lengths_of_prompts_fill_the_cells_of_figure_6(tmp_path):
    folder = tmp_path / "Qwen2.5-7B-Instruct" / "lengths"
    folder.mkdir(parents=True)
    names = ("docmath", "frames", "2wikimqa", "hotpotqa", "musique", "longbench_v2")
    result = {name: {"median": 100 * number} for number, name in enumerate(names, 1)}
    (folder / lengths.RESULT).write_text(json.dumps(result))
    table = printer.table(registry.find("spell-figure-6"), str(tmp_path))
    assert "| Qwen2's tokenizer | / 100 | / 200 | / 300 | / 400 | / 500 | / 600 |" in table
    (folder / lengths.RESULT).write_text("{}")
    with pytest.raises(ValueError, match="not lengths of prompts"):
        printer.table(registry.find("spell-figure-6"), str(tmp_path))


def test_scores_without_all_verdicts_have_a_star(tmp_path):
    folder = tmp_path / "eapo-qwen3-14b" / "long_120k"
    names = ("seal_0", "musique", "hotpotqa")
    _write_summary(folder, 122_880, dict.fromkeys(names, 0.5), {"musique": 3})
    table = printer.table(registry.find("eapo-table-1"), str(tmp_path))
    (row,) = (line for line in table.splitlines() if line.startswith("| Qwen3-14B + EAPO |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "36.0 / 50" and cells[3] == "57.0 / 50*" and cells[-1] == "55.0 / 50*"
    assert "left out" not in table


def test_scores_without_all_questions_have_a_dagger(tmp_path):
    names = ("docmath", "frames")
    _write_summary(
        tmp_path / "long", 16_384, dict.fromkeys(names, 0.5), {"docmath": 1}, {"docmath": 2}
    )
    columns = [Column(name, Score("long", name, 16_384)) for name in (*names, "average")]
    columns.append(Column("mean", Mean(tuple(Score("long", name, 16_384) for name in names))))
    row = TableRow("a", (None,) * 4, folder=".", evaluations=(EvaluationCommand("long", ()),))
    table = printer.table(Experiment("e", "t", tuple(columns), (row,)), str(tmp_path))
    marked = "/ 50*\N{DAGGER}"
    assert f"| a | {marked} | / 50 | {marked} | {marked} |" in table
    assert "\n\n\\* answers" in table and "\n\n\N{DAGGER} questions without a reply" in table


def test_benchmark_of_a_shared_column_counts_its_own_answers(tmp_path):
    """A judge missed answers about musique and frames, none about hotpotqa."""
    scores = dict.fromkeys(("frames", "2wikimqa", "hotpotqa", "musique"), 0.5)
    missing = {"frames": 3, "musique": 2}
    _write_summary(tmp_path / "long", 16_384, scores, missing, missing)
    names = ("hotpotqa", "musique", "frames", "LB-MQA", "average")
    numbers = {name: Score("long", name, 16_384).read(epath.Path(tmp_path)) for name in names}
    counts = {name: number and number[1:] for name, number in numbers.items()}
    assert counts == {
        "hotpotqa": (0, 0),
        "musique": (2, 2),
        "frames": (3, 3),
        "LB-MQA": (2, 2),
        "average": (5, 5),
    }


def test_validations_are_the_curve_of_figure_5(tmp_path):
    folder = tmp_path / "eapo-qwen3-30b-a3b-thinking-2507"
    folder.mkdir()
    lines = [{"step": n} | ({} if n % 10 else {"eval/all": n / 100}) for n in range(1, 74)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    table = printer.table(registry.find("eapo-figure-5"), str(tmp_path))
    assert "| EAPO | / 10 | / 70 | 65.0 / |" in table
    assert all("data.validation" in run.inputs for run in registry.find("eapo-figure-5").runs)


# -------------------------------------------------------------------------------------------- Page


def test_site_appends_the_overviews_to_their_page():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="experiments.md"))
    config = SimpleNamespace(repo_url="")
    markdown = site.on_page_markdown(PAGE.read_text(), page, config)
    overviews = printer.overviews().replace("](../launch/experiments/", "](")
    assert overviews in markdown and not re.search(r"\]\([./]*launch/", markdown)
    page.file.src_uri = "results.md"
    assert overviews not in site.on_page_markdown(PAGE.read_text(), page, config)


def test_page_is_prose_that_names_the_files_of_the_tables():
    text = PAGE.read_text()
    for name in registry.FILES:
        assert f"](../launch/experiments/papers/{name})" in text
    assert len(text.split()) <= 900
    assert "docs/experiments.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "experiment",
    [experiment for experiment in ALL if experiment.tiny],
    ids=lambda experiment: experiment.name,
)
def test_tiny_numbers_are_those_of_the_linked_page(experiment: Experiment):
    (link,) = re.findall(r"\]\(([\w./]+\.md)", experiment.tiny)
    tiny_numbers = set(re.findall(r"(?<!\d)\.\d\d\b", experiment.tiny))
    assert tiny_numbers
    assert tiny_numbers <= set(re.findall(r"(?<!\d)\.\d\d\b", (PAGE.parent / link).read_text()))


def test_links_of_the_overview_exist():
    for file, anchor in set(re.findall(r"\]\(([\w./]+\.md)(?:#([\w-]+))?\)", printer.overviews())):
        text = (PAGE.parent / file).read_text()
        heads = {
            re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")
            for head in re.findall(r"^#+ (.*)$", text, re.M)
        }
        assert not anchor or anchor in heads


def test_experiment_without_rows_prints_its_reason(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["launch.experiments", "spell-figure-2"])
    command.main()
    assert capsys.readouterr().out == "The loop of rollout and update\n\nA drawing.\n"


@pytest.mark.parametrize("summary", ["{}", '{"rows": 1}', '{"rows": [{}]}', '{"rows": [1]}'])
def test_an_odd_summary_is_named(tmp_path, summary):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / SUMMARY
    path.write_text(summary)
    with pytest.raises(ValueError, match=f"{path}: not a summary of an evaluation"):
        Score("a", "average", 1).read(epath.Path(tmp_path))
