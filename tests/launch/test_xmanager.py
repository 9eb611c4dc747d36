"""Tests of sweeps as XManager experiments: work units, checks, and the calls to XManager.

Where XManager is installed (extra "xmanager"), its results are checked: the local executor trains
for real, and the requests of Vertex AI's client are recorded. Elsewhere a stand-in records the
calls. No image is built and nothing is sent to a cloud.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from absl import app, flags

from spell_jax.launch import xmanager
from spell_jax.launch.xmanager import WorkUnit
from spell_jax.runtime.log.metrics import read_metrics

TINY = "configs/tiny.py"

# ------------------------------------------------------------------------------------------- Sweep


def test_sweep_texts_are_parsed_into_fields_and_values():
    texts = [
        "seed=0,1,2",
        "algorithm.questioner.documents=(2,),(2,3)",
        "packing.buckets=((320,224),(640,448)),1",
    ]
    assert xmanager.parse_sweep(texts) == {
        "seed": ["0", "1", "2"],
        "algorithm.questioner.documents": ["(2,)", "(2,3)"],
        "packing.buckets": ["((320,224),(640,448))", "1"],
    }


@pytest.mark.parametrize(
    "texts, message",
    [
        (["seed"], "must be FIELD=VALUE"),
        (["=1"], "must be FIELD=VALUE"),
        (["--config.seed=1"], "must be FIELD=VALUE"),
        (["seed=0,1,0"], "distinct values"),
        (["seed="], "none of them empty"),
        (["seed=0", "seed=1"], "all values of seed at once"),
    ],
)
def test_invalid_sweep_is_rejected(texts, message):
    with pytest.raises(ValueError, match=message):
        xmanager.parse_sweep(texts)


def test_work_units_are_the_product_of_the_sweep_values():
    sweep = {"seed": ["0", "1"], "optimizer.learning_rate": ["1e-6", "2e-6", "3e-6"]}
    units = xmanager.work_units(TINY, "/gcs/b/w/", sweep, ["--config.steps=9"])
    assert len(units) == 6
    assert units[1] == WorkUnit(
        "001-seed=0-optimizer.learning_rate=2e-6",
        (
            "--config=configs/tiny.py",
            "--workdir=/gcs/b/w/001-seed=0-optimizer.learning_rate=2e-6",
            "--config.steps=9",
            "--config.seed=0",
            "--config.optimizer.learning_rate=2e-6",
        ),
    )
    assert units[5].flags[-2:] == ("--config.seed=1", "--config.optimizer.learning_rate=3e-6")
    assert len({unit.flags[1] for unit in units}) == 6


def test_empty_sweep_gives_one_work_unit():
    [unit] = xmanager.work_units(TINY, "w", {}, [])
    assert unit == WorkUnit("000", ("--config=configs/tiny.py", "--workdir=w/000"))


def test_work_unit_names_are_valid_folder_names():
    sweep = {
        "data.source": ["/a b/../c"],
        "algorithm.questioner.documents": ["(2,3)"],
        "x": ["y" * 300],
    }
    [unit] = xmanager.work_units(TINY, "w", sweep, [])
    assert unit.name.startswith(
        "000-data.source=_a_b_.._c-algorithm.questioner.documents=_2_3_-x=yyy"
    )
    assert len(unit.name) == 120
    assert "--config.data.source=/a b/../c" in unit.flags


@pytest.mark.parametrize("override", ["--config.seed=3", "runs", "--config.steps", "--steps=3"])
def test_override_of_swept_field_or_malformed_flag_is_rejected(override):
    with pytest.raises(ValueError, match=override):
        xmanager.work_units(TINY, "w", {"seed": ["0", "1"]}, [override])


# ------------------------------------------------------------------------------------------ Checks


def one_unit(*overrides: str, config: str = TINY) -> WorkUnit:
    [unit] = xmanager.work_units(
        config, "w", {}, [f"--config.{override}" for override in overrides]
    )
    return unit


def test_work_unit_config_reflects_its_flags():
    unit = one_unit(
        "algorithm.questioner.documents=(2,3)", "optimizer.learning_rate=3e-6", "policy.folder=x"
    )
    config = xmanager.read_config(unit)
    assert (
        config.algorithm.questioner.documents == (2, 3) and config.optimizer.learning_rate == 3e-6
    )
    assert config.policy.folder == "x" and config.steps == 120


@pytest.mark.parametrize(
    "override, message",
    [
        ("optimizer.lr=3", r"--config\.optimizer\.lr: no such field.*learning_rate"),
        ("optimiser.b1=3", r"--config\.optimiser\.b1: no such field.*optimizer"),
        ("seed.x=3", r"--config\.seed\.x: no such field"),
        ("steps=many", r"--config\.steps = 'many': must be a whole number"),
    ],
)
def test_unknown_field_or_wrong_type_is_reported(override, message):
    with pytest.raises((ValueError, app.UsageError), match=message):
        xmanager.read_config(one_unit(override))


def test_config_file_may_take_an_argument():
    config = xmanager.read_config(one_unit("seed=3", config="configs/paper.py:qwen3-4b-thinking"))
    assert (config.seed, config.sampler.max_tokens) == (3, 20_480)


def test_missing_config_file_is_reported():
    with pytest.raises(ValueError, match=r"configs/no\.py"):
        xmanager.read_config(one_unit(config="configs/no.py"))


@pytest.mark.parametrize("executor", xmanager.EXECUTORS)
@pytest.mark.parametrize(
    "override",
    [
        "steps=0",
        "optimizer.schedule=never",
        "sampler.top_p=3.",
        "loss.aggregation=sum",
        "packing.token_budget=0",
        "algorithm.group_size=0",
        "data.tasks=('essay',)",
    ],
)
def test_invalid_value_in_any_section_is_rejected(executor, override):
    with pytest.raises(ValueError, match=override.split("=")[0].replace(".", r"\.")):
        xmanager.check_config(xmanager.read_config(one_unit(override)), executor)


def test_warm_start_config_is_rejected():
    config = xmanager.read_config(one_unit(config="configs/tiny_warm_start.py"))
    with pytest.raises(ValueError, match="algorithm: is missing"):
        xmanager.check_config(config, "local")


def test_folders_must_be_reachable_from_the_executor():
    here = xmanager.read_config(one_unit("policy.folder=no/such"))
    with pytest.raises(FileNotFoundError, match=r"policy\.folder = 'no/such'"):
        xmanager.check_config(here, "local")
    in_bucket = ("policy.folder=/gcs/b/policy", "data.source=/gcs/b/documents")
    xmanager.check_config(
        xmanager.read_config(one_unit(*in_bucket, config="configs/folder.py")), "vertex"
    )
    for override in ("policy.folder=models/x", "data.source=docs", "data.validation=q.jsonl"):
        config = xmanager.read_config(one_unit(override))
        with pytest.raises(ValueError, match=r"must be below /gcs/, for executor = 'vertex'"):
            xmanager.check_config(config, "vertex")
    prepared_set = (in_bucket[0], "data.source=tfds:news")
    in_bucket = (*prepared_set, "data.tfds_data_dir=/gcs/b/sets")
    xmanager.check_config(
        xmanager.read_config(one_unit(*in_bucket, config="configs/folder.py")), "vertex"
    )
    with pytest.raises(ValueError, match=r"^data\.tfds_data_dir = '~/.*': must be below /gcs/"):
        xmanager.check_config(xmanager.read_config(one_unit(*prepared_set)), "vertex")
    wrong_task = xmanager.read_config(one_unit(*in_bucket, "data.tasks=('essay',)"))
    with pytest.raises(ValueError, match=r"^data\.tasks = \('essay',\)"):  # despite the bucket
        xmanager.check_config(wrong_task, "vertex")
    for override in ("policy.folder=", "data.source="):
        with pytest.raises(ValueError, match=override[:-1] + " = ''"):
            xmanager.check_config(xmanager.read_config(one_unit(override)), "vertex")


def test_requirements_use_xmanager_names():
    assert xmanager.requirements("local", "", 0, 0) == {}
    assert xmanager.requirements("vertex", "a100=8", 12, 30) == {
        "cpu": 12,
        "ram": 30 * 2**30,
        "a100": 8,
    }


@pytest.mark.parametrize("accelerator", ["a100", "a100=0", "a100=x", "h100=8", "tpu_v5e=4"])
def test_unsupported_accelerator_is_rejected(accelerator):
    with pytest.raises(ValueError, match=f"accelerator = '{accelerator}'"):
        xmanager.requirements("vertex", accelerator, 0, 0)


@pytest.mark.parametrize("hardware", [("a100=8", 0, 0), ("", 4, 0), ("", 0, 8)])
def test_local_executor_rejects_hardware_requirements(hardware):
    with pytest.raises(ValueError, match="must not be given for executor = 'local'"):
        xmanager.requirements("local", *hardware)


def make_flags(**changes: Any) -> SimpleNamespace:
    """Return flags of the launcher, with `changes`."""
    values = {"executor": "local", "config": TINY, "workdir": "w", "sweep": ["seed=0,1"]}
    values |= {"accelerator": "", "cpu": 0, "ram_gib": 0, "experiment": "", "inputs": "."}
    return SimpleNamespace(**values | changes)


def test_plan_checks_every_work_unit():
    units, requirements = xmanager.plan_units(make_flags(), ["--config.steps=3"])
    assert [unit.name for unit in units] == ["000-seed=0", "001-seed=1"] and requirements == {}
    with pytest.raises(ValueError, match=r"steps = 0"):  # of the last unit
        xmanager.plan_units(make_flags(sweep=["steps=2,1,0"]), [])
    with pytest.raises(ValueError, match=r"workdir = 'w': must be below /gcs/"):
        xmanager.plan_units(make_flags(executor="vertex"), [])


# ------------------------------------------------------------------------------- With a stand-in


class Experiment:
    """Stand-in that records packaged and added units; a unit whose flags hold `failing` fails."""

    def __init__(self, failing: str = "none"):
        self.failing = failing
        self.packaged: list[Any] = []
        self.files: set[str] = set()
        self.jobs: list[Any] = []
        self.events: list[tuple[str, int]] = []

    async def __aenter__(self) -> Experiment:
        return self

    async def __aexit__(self, *_: Any) -> None:
        if any(self.failing in job.args for job in self.jobs):
            raise RuntimeError("exit status 1")  # once more, as XManager does

    def package(self, packageables: list[Any]) -> list[str]:
        self.packaged += packageables
        path = Path(packageables[0].executable_spec.path)
        if path.is_dir():
            self.files = {str(file.relative_to(path)) for file in path.rglob("*")}
        return ["packaged"]

    async def add(self, job: Any) -> Any:
        number = len(self.jobs)
        self.jobs.append(job)
        self.events.append(("began", number))

        async def wait_until_complete() -> None:
            self.events.append(("ended", number))
            if self.failing in job.args:
                raise RuntimeError("exit status 1")

        return SimpleNamespace(wait_until_complete=wait_until_complete)


def maker(kind: str) -> Any:
    return lambda *args, **fields: SimpleNamespace(kind=kind, positional=args, **fields)


@pytest.fixture
def stand_in(monkeypatch) -> Experiment:
    """Replace the part of XManager's modules that the launcher calls; return the experiment."""
    experiment = Experiment()
    names = ("Packageable", "Binary", "PythonContainer", "CommandList", "Job", "JobRequirements")
    xm = SimpleNamespace(**{name: maker(name) for name in names})
    executors = {name: maker(name) for name in ("Local", "Vertex")}
    for name, executor in executors.items():
        executor.Spec = maker(f"{name}.Spec")
    xm_local = SimpleNamespace(create_experiment=lambda experiment_title: experiment, **executors)
    monkeypatch.setitem(sys.modules, "xmanager.xm", xm)
    monkeypatch.setitem(sys.modules, "xmanager.xm_local", xm_local)
    return experiment


def launch(
    executor: str, requirements: dict[str, int], **sweep: list[str]
) -> list[tuple[str, str]]:
    units = xmanager.work_units(TINY, "w", sweep, [])
    return asyncio.run(xmanager.run_units("title", executor, units, requirements, "python:3.12"))


def test_local_units_run_sequentially_despite_failures(stand_in):
    stand_in.failing = "--config.seed=1"
    assert launch("local", {}, seed=["0", "1", "2"]) == [("001-seed=1", "exit status 1")]
    event_names = ("began", "ended")
    assert stand_in.events == [(event, number) for number in range(3) for event in event_names]
    [packageable] = stand_in.packaged
    assert (packageable.executable_spec.kind, packageable.executable_spec.path) == (
        "Binary",
        sys.executable,
    )
    assert (
        packageable.args == ["-m", "spell_jax.train"]
        and packageable.executor_spec.kind == "Local.Spec"
    )
    job = stand_in.jobs[2]
    assert (job.executable, job.executor.kind) == ("packaged", "Local")
    assert job.args == ["--config=configs/tiny.py", "--workdir=w/002-seed=2", "--config.seed=2"]


def test_packaging_errors_are_raised(stand_in, monkeypatch):
    monkeypatch.setattr(Experiment, "package", lambda self, packageables: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch("local", {}, seed=["0"])


def test_vertex_image_has_tracked_files_and_launch_does_not_wait(stand_in):
    assert launch("vertex", {"cpu": 8, "tpu_v3": 8}, seed=["0", "1"]) == []
    assert stand_in.events == [("began", 0), ("began", 1)]
    [packageable] = stand_in.packaged
    assert {"configs/tiny.py", "spell_jax/train.py", "setup.py", "launch"} <= stand_in.files
    assert not {".git", ".venv", "runs", ".cache"} & stand_in.files
    spec = packageable.executable_spec
    assert (spec.kind, spec.base_image) == ("PythonContainer", "python:3.12")
    assert not Path(spec.path).exists()  # the copy is deleted
    copied, inside, installed = spec.docker_instructions
    assert copied == "COPY spell_jax_checkout/ /spell_jax_checkout"
    assert inside == "WORKDIR /spell_jax_checkout"
    assert installed == "RUN python -m pip install -e '.[tpu]'"
    assert spec.entrypoint.positional == (['python -m spell_jax.train "$@"'],)
    executor = stand_in.jobs[1].executor
    requirements = executor.positional[0]
    assert (executor.kind, requirements.cpu, requirements.tpu_v3) == ("Vertex", 8, 8)


@pytest.mark.parametrize("requirements, package", [({}, "."), ({"t4": 1, "cpu": 4}, ".[gpu]")])
def test_vertex_image_installs_the_accelerator_extra(stand_in, requirements, package):
    launch("vertex", requirements)
    [packageable] = stand_in.packaged
    assert packageable.executable_spec.docker_instructions[-1].endswith(f" -e '{package}'")


@pytest.mark.slow
def test_missing_xmanager_error_names_the_extra():
    program = (
        "import runpy, sys; sys.modules['xmanager'] = None; "
        "runpy.run_module('launch.xmanager', run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 2 and process.stderr.startswith("error: XManager is not installed")
    assert "pip install -e '.[xmanager]'" in process.stderr


# ----------------------------------------------------------------------------------- With XManager

needs_xmanager = pytest.mark.skipif(
    importlib.util.find_spec("xmanager") is None, reason="XManager is not installed"
)


@pytest.mark.long
@needs_xmanager
def test_local_executor_trains_and_continues_after_a_failure(tmp_path):
    workdir = tmp_path / "sweep"
    workdir.mkdir()
    (workdir / "000-seed=0-algorithm.questioner.documents=_1_").write_text(
        "a file where a folder shall be"
    )
    command = [sys.executable, "-m", "launch.xmanager", "--executor=local", f"--config={TINY}"]
    sweep = (
        "--sweep=seed=0,1",
        "--sweep=algorithm.questioner.documents=(1,)",
        f"--workdir={workdir}",
    )
    small = ("steps=1", "evaluate=False", "validate_every=0", "data.tiny.clusters=9")
    small += ("algorithm.questions=3", "algorithm.generation_batch=3")
    command += [*sweep, *(f"--config.{override}" for override in small)]
    # XManager keeps a database of experiments in the home folder.
    environment = os.environ | {"XLA_FLAGS": "", "HOME": str(tmp_path)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 1, process.stdout + process.stderr
    assert "000-seed=0-algorithm.questioner.documents=_1_ failed: " in process.stderr
    assert "1 of 2 work units are done" in process.stdout
    trained = workdir / "001-seed=1-algorithm.questioner.documents=_1_"
    config = json.loads((trained / "config.json").read_text())
    assert (config["seed"], config["algorithm"]["questioner"]["documents"]) == (1, [1])
    assert [record["step"] for record in read_metrics(trained)] == [1]


@pytest.mark.slow
@needs_xmanager
@pytest.mark.parametrize(
    "accelerator, machine, kind, count",
    [
        ("a100=8", "a2-highgpu-8g", "NVIDIA_TESLA_A100", 8),
        ("t4=1", "n1-standard-8", "NVIDIA_TESLA_T4", 1),
        ("l4_24th=1", "g2-standard-8", "NVIDIA_L4", 1),
        ("tpu_v3=8", "cloud-tpu", "TPU_V3", 8),
    ],
)
def test_vertex_jobs_request_the_matching_machine(
    accelerator, machine, kind, count, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    vertex = importlib.import_module("xmanager.cloud.vertex")
    executables = importlib.import_module("xmanager.xm_local.executables")
    core = importlib.import_module("xmanager.xm.core")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["pytest"])
    sent: list[dict[str, Any]] = []

    class CustomJob:
        resource_name = "job"

        def __init__(self, **fields: Any):
            sent.append(fields)

        def submit(self, **_: Any) -> None:
            pass

        def _dashboard_uri(self) -> str:
            return ""

    monkeypatch.setattr(vertex.aiplatform, "CustomJob", CustomJob)
    monkeypatch.setattr(vertex.auth, "get_bucket", lambda: "bucket")
    monkeypatch.setattr(vertex.auth, "get_service_account", lambda: "account")
    monkeypatch.setattr(vertex, "_default_client", vertex.Client(project="p"))
    image = executables.GoogleContainerRegistryImage("name", "gcr.io/p/image")
    monkeypatch.setattr(core.Experiment, "package", classmethod(lambda cls, packageables: [image]))
    requirements = xmanager.requirements("vertex", accelerator, 8, 30)
    assert launch("vertex", requirements, seed=["0", "1"]) == []
    assert len(sent) == 2
    [pool] = sent[1]["worker_pool_specs"]
    spec = pool.machine_spec
    requested_machine = (spec.machine_type, spec.accelerator_type.name, spec.accelerator_count)
    assert requested_machine == (machine, kind, count)
    assert pool.container_spec.image_uri == "gcr.io/p/image"
    assert list(pool.container_spec.args) == [
        "--config=configs/tiny.py",
        "--workdir=w/001-seed=1",
        "--config.seed=1",
    ]
