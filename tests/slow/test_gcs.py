"""Tests of workdirs, data and weights in a bucket: runs and evaluations equal local ones.

gcsfs (our files), TensorStore (arrays of checkpoints) and google-cloud-storage (TensorBoard) use
HTTP with a server of this process, which implements all their requests except for the conditions of
a write (ifGenerationMatch) and for the generation of a downloaded object, which is added here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import tensorstore
from etils import epath
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server
from tensorboardX.record_writer import GCSRecordWriter

from data_pipeline import sources
from data_pipeline.sources import SourceConfig, list_files
from spell_jax import export, sft
from spell_jax.configs import tiny_warm_start
from spell_jax.data.config import DataConfig, open_clusters
from spell_jax.evaluation import generation, runner
from spell_jax.evaluation.benchmarks import own_questions, registry
from spell_jax.learner import non_finite
from spell_jax.policy.formats import safetensors as files
from spell_jax.policy.model import find_folder
from spell_jax.reporting import tables as evaluation
from spell_jax.runtime import setup as start
from spell_jax.runtime.files import paths
from spell_jax.runtime.files import remote as remote_files
from spell_jax.runtime.files.episodes import EpisodeWriter, read_episodes
from spell_jax.runtime.files.jsonl import write_json, write_records
from spell_jax.runtime.files.workdir_lock import FILE, STALE_S, Holder, WorkdirLock, locked
from spell_jax.runtime.log.metrics import MetricsWriter, read_metrics
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.trainer import export as trainer_export
from spell_jax.trainer import loop
from tests import evaluating, noise, tiny
from tests.data.prepared_sets import TEXT, prepare

train = importlib.import_module("spell_jax.train")  # the command, not spell_jax.train()
RANDOM = ("checkpoints/", "tensorboard/")  # folders with random names and times in names
SETTINGS = {"checkpoint_every": 1, "validate_every": 1, "evaluate": True}


@pytest.fixture(scope="module", autouse=True)
def _server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{port}")
        # No other request is sent: neither for credentials nor for the kind of bucket.
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        # It uploads once more when the process ends, and tries for minutes to reach the server.
        del GCSRecordWriter.__del__
        monkeypatch.setattr(objects, "download", download_with_generation)
        with create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"):
            yield


def download_with_generation(request, response, storage, *arguments, download=objects.download):
    """Send the generation with an object, as Google does; the emulator's download leaves it out."""
    names = request.params["bucket_name"], request.params["object_id"]
    with contextlib.suppress(NotFound):
        response["x-goog-generation"] = storage.get_file_obj(*names)["generation"]
    return download(request, response, storage, *arguments)


def call_main(entry, config, workdir: str | pathlib.Path) -> None:
    """Call an entry point's main as `python -m ENTRY --config --workdir` does, on one device."""
    flags_stand_in = SimpleNamespace(FLAGS=SimpleNamespace(config=config, workdir=str(workdir)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.give_meaning(monkeypatch)
        monkeypatch.setattr(start, "setup", lambda: None)
        monkeypatch.setattr(entry, "flags", flags_stand_in)
        entry.main(None)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def local(policy, tmp_path_factory) -> pathlib.Path:
    """Run two uninterrupted steps in a local workdir; return the workdir."""
    workdir = tmp_path_factory.mktemp("local")
    call_main(train, noise.small_config(policy, steps=2, **SETTINGS), workdir)
    return workdir


@pytest.fixture(scope="module")
def remote(policy) -> epath.Path:
    """Run one step and a resumed second step in the bucket; copy the metrics of the first step."""
    workdir = paths.open_folder("gs://bucket/run")
    call_main(train, noise.small_config(policy, steps=1, **SETTINGS), "gs://bucket/run")
    (workdir / "metrics.jsonl").copy(paths.open_folder("gs://bucket/first.jsonl"))
    call_main(train, noise.small_config(policy, steps=2, **SETTINGS), "gs://bucket/run")
    return workdir


def names(folder: epath.Path | pathlib.Path) -> set[str]:
    """Return the paths of all files below a folder of the bucket, or below a local folder."""
    if isinstance(folder, pathlib.Path):
        return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    top = str(folder).removeprefix("gs://") + "/"
    return {name.removeprefix(top) for name in fsspec.filesystem("gcs").find(top)}


def test_run_in_a_bucket_has_the_files_of_a_local_run(local, remote):
    local_names, remote_names = names(local), names(remote)
    assert {n for n in local_names if not n.startswith(RANDOM)} == {
        n for n in remote_names if not n.startswith(RANDOM)
    }
    assert {name.split("/")[1] for name in remote_names if name.startswith("checkpoints/")} == {
        "1",
        "2",
    }
    events = [name for name in remote_names if name.startswith("tensorboard/")]
    assert len(events) == 2  # one per start
    assert all(b"train/" in (remote / name).read_bytes() for name in events)
    pictures = [name for name in remote_names if name.startswith("plots/")]
    assert len(pictures) > 6
    assert all((remote / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_resumed_run_in_a_bucket_equals_uninterrupted_local_run(local, remote):
    same = {n for n in names(local) if n.split("/")[0] in ("policy", "best", "episodes")}
    assert same >= {"policy/model.safetensors", "best/config.json", "episodes/step_000002.jsonl.gz"}
    for name in same:
        assert (remote / name).read_bytes() == (local / name).read_bytes(), name
    assert read_evaluation(remote) == read_evaluation(local)
    lines = [list(map(noise.steady, read_metrics(workdir))) for workdir in (local, remote)]
    assert lines[0] == lines[1] and len(lines[0]) == 2
    # Its times show that the first step was run once.
    first = paths.open_folder("gs://bucket/first.jsonl").read_text()
    assert (remote / "metrics.jsonl").read_text().startswith(first)


def read_evaluation(workdir):
    tables = evaluation.read_evaluation(workdir)
    assert tables is not None
    return tables


def test_export_and_report_work_with_buckets(remote, tmp_path):
    command = [sys.executable, "-m", "spell_jax.report", f"--workdir={remote}"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "plots of the page in gs://bucket/run/plots\n" in process.stdout
    assert (remote / "plots" / "seconds_a_step_by_phase.png").exists()
    for out in (str(tmp_path / "out"), "gs://bucket/exported"):
        flag_values = {"workdir": str(remote), "out": out, "step": None, "adapters": False}
        flag_values["push"] = None
        with pytest.MonkeyPatch.context() as monkeypatch:
            noise.use_one_device(monkeypatch)
            monkeypatch.setattr(start, "setup", lambda: None)
            flags = SimpleNamespace(
                FLAGS=SimpleNamespace(**flag_values, gguf=None, dtype="float32")
            )
            monkeypatch.setattr(export, "flags", flags)
            export.main(None)
        for name in names(remote / "policy"):
            written = (paths.open_folder(out) / name).read_bytes()
            assert written == (remote / "policy" / name).read_bytes()
    with pytest.raises(ValueError, match="'gs://bucket/exported': is there already"):
        trainer_export.export(remote, paths.open_folder("gs://bucket/exported"))


def test_supervised_fine_tuning_resumes_in_a_bucket(policy, tmp_path):
    source, workdir = tmp_path / "rows.jsonl", paths.open_folder("gs://bucket/tuned")
    write_records(source, [{"prompt": f"city {n}", "completion": f"is {n}"} for n in range(3)])
    for steps in (1, 2):
        config = tiny_warm_start.get_config()
        config.policy.folder, config.source = str(policy), str(source)
        config.steps, config.rows_per_step, config.checkpoint_every = steps, 2, 1
        config.optimizer.schedule, config.log_every = "constant", 1
        config.packing.buckets, config.packing.token_budget = ((64, 24),), 128
        call_main(sft, config, str(workdir))
        assert [line["step"] for line in read_metrics(workdir)] == list(range(1, steps + 1))
        assert names(workdir / "policy") == {path.name for path in policy.iterdir()}


@pytest.fixture
def inputs(policy, tmp_path, monkeypatch) -> list[str]:
    """Write the same policy, clusters, questions and benchmark to a local folder and the bucket."""
    folder, url = tmp_path / "inputs", "gs://bucket/inputs"
    shutil.copytree(policy, folder / "policy")
    clusters = [{"id": f"{n}", "documents": [f"City {n}.", f"Town {n}."]} for n in range(3)]
    write_records(folder / "clusters.jsonl", clusters)
    question = {"task": "general_qa", "documents": ["City 1."], "question": "Q?", "answer": "1"}
    write_records(folder / "questions.jsonl", [question])
    problems = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(2)]
    write_records(folder / "data" / "gsm8k" / "test.jsonl", problems)
    for name in names(folder):
        (paths.open_folder(url) / name).write_bytes((folder / name).read_bytes())
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    remote_files.cached_copy.cache_clear()
    return [str(folder), url]


def test_run_on_inputs_in_a_bucket_equals_one_on_local_inputs(inputs, tmp_path, monkeypatch):
    noise.share_programs(monkeypatch)
    noise.skip_plots(monkeypatch)
    for number, top in enumerate(inputs):
        fields = {"source": f"{top}/clusters.jsonl", "validation": f"{top}/questions.jsonl"}
        data = {f"data.{name}": value for name, value in fields.items()}
        config = noise.small_config(f"{top}/policy", steps=1, **SETTINGS, **data)
        call_main(train, config, tmp_path / str(number))
    local, fetched = tmp_path / "0", tmp_path / "1"
    assert json.loads((fetched / "config.json").read_text())["data"]["source"].startswith("gs://")
    (line,) = map(noise.steady, read_metrics(local))
    assert "train/loss" in line and any(name.startswith("eval/") for name in line)
    assert list(map(noise.steady, read_metrics(fetched))) == [line]
    for name in (n for n in names(local) if n.split("/")[0] in ("policy", "episodes")):
        assert (fetched / name).read_bytes() == (local / name).read_bytes(), name
    assert read_evaluation(fetched) == read_evaluation(local)


def test_evaluation_of_inputs_in_a_bucket_equals_a_local_one(inputs, tmp_path, monkeypatch):
    noise.use_one_device(monkeypatch)
    for number, top in enumerate(inputs):
        flag_values = dict.fromkeys(("prose", "thinking", "rope_scaling", "policy"), "")
        flag_values |= dict.fromkeys(("endpoint", "model", "tokenizer"), "")
        flag_values |= {"workdir": top, "data": f"{top}/data", "benchmarks": ["gsm8k"], "limit": 2}
        flag_values |= {"max_input": ["32"], "answer_format": "plain", "dtype": "float32"}
        flag_values |= {"rule": "match_or_judge", "endpoint_workers": 16, "endpoint_rate": 0.0}
        flag_values |= {"samples": 2, "temperature": 0.7, "top_p": 0.95, "max_tokens": 4, "seed": 0}
        config = runner.from_flags(SimpleNamespace(**flag_values, rope_factor=1.0))
        runner.evaluate(config, tmp_path / str(number), "noise", None, evaluating.SIZES)
    for name in (runner.SAMPLES, runner.SUMMARY, runner.TABLE):
        local, fetched = ((tmp_path / number / name).read_bytes() for number in "01")
        assert fetched == local and local


def test_questions_of_a_run_in_a_bucket_are_read_in_place(local, remote, tmp_path, monkeypatch):
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path))
    run_benchmarks = [
        registry.load(own_questions.NAME, registry.find_folder(own_questions.NAME, str(workdir)))
        for workdir in (local, remote)
    ]
    assert run_benchmarks[0].items == run_benchmarks[1].items != ()
    assert list(tmp_path.iterdir()) == []


def test_generate_finds_policy_and_prompts_of_a_run_in_a_bucket(remote, tmp_path, monkeypatch):
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path))
    flag_values = {"workdir": str(remote), "policy": None, "prompt_set": None, "greedy": True}
    flag_values |= {"top_p": 1.0, "max_tokens": 4, "dtype": "float32", "thinking": ""}
    policy, prompts, _ = generation.load(SimpleNamespace(**flag_values))
    assert {path.name: path.read_bytes() for path in policy.folder.iterdir()} == {
        path.name: path.read_bytes() for path in (remote / "policy").iterdir()
    }
    assert prompts == prompt_sets.load("compact")


def test_what_is_not_in_a_bucket_is_named(inputs):
    top = inputs[1]
    for url in ("gs://no-such-bucket/policy", f"{top}/none"):
        with pytest.raises(remote_files.FetchError, match=f"^{url}: there is no such file"):
            find_folder(url)


def test_resume_of_an_older_step_removes_later_files():
    workdir = paths.open_folder("gs://bucket/older")
    metrics, episodes = MetricsWriter(workdir), EpisodeWriter(workdir, 1000)
    for step in (1, 2, 3):
        metrics.write(step, {"a": float(step)})
        episodes.write(step, [{"text": "\ud83d"}])
    metrics.close()
    tail = metrics.tail()
    (workdir / "metrics.jsonl").unlink()
    MetricsWriter(workdir, resume_step=2, tail=tail).close()
    EpisodeWriter(workdir, 1000, resume_step=2)
    assert read_metrics(workdir) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]
    left = {"step_000001.jsonl.gz", "step_000002.jsonl.gz"}
    assert names(workdir / "episodes") == left
    record = {"number": 1, "of": 1, "text": "\ud83d"}
    assert list(read_episodes(workdir)) == [(1, record), (2, record)]


def test_workdir_in_a_bucket_is_locked_for_one_run():
    workdir = paths.open_folder("gs://bucket/locked")
    with locked(workdir):
        assert names(workdir) == {FILE}
        pattern = r"^workdir = gs://bucket/locked: is in use by pid \d+ on host"
        with pytest.raises(ValueError, match=pattern), locked(workdir):
            pass
        lock = WorkdirLock(workdir)
        assert "is in use by pid" in lock.take()
        lock.release()
        assert names(workdir) == {FILE}
    assert names(workdir) == set()


def test_stale_lock_in_a_bucket_is_taken_over():
    workdir, now = paths.open_folder("gs://bucket/left"), time.time()
    for age, looks in ((STALE_S, 0), (STALE_S - 60, 1)):
        holder = Holder("far", "another boot", 12, "345", "token", now - 7200, now - age)
        write_json(workdir / FILE, dataclasses.asdict(holder))
        slept: list[float] = []
        lock = WorkdirLock(workdir, lambda seconds, slept=slept: slept.append(seconds))
        assert lock.take() == "" and len(slept) >= looks
        lock.renew()
        renewed_holder = Holder.parse((workdir / FILE).read_bytes())
        assert (
            renewed_holder is not None
            and renewed_holder.is_local
            and renewed_holder.seen > renewed_holder.since
        )
        lock.release()
        assert names(workdir) == set()


def test_files_written_by_other_clients_are_listed():
    folder = paths.open_folder("gs://bucket/shared")
    (folder / "ours").write_text("")
    assert [path.name for path in paths.entries(folder)] == ["ours"]
    tensorstore.KvStore.open("gs://bucket/shared/").result().write("theirs", b"x").result()
    assert {path.name for path in paths.entries(folder)} == {"ours", "theirs"}
    assert paths.entries(folder / "not_there") == []


def test_non_finite_rows_are_written_to_a_bucket():
    group = tiny.group([1], [[2]], [np.inf], "verifier")
    error = non_finite.NonFinite(1, [(group, [1.0])], [], True)
    path = non_finite.write_rows(error, paths.open_folder("gs://bucket/bad"), 7, str)
    assert str(path) == "gs://bucket/bad/non_finite/7.jsonl"
    assert json.loads(path.read_text())["advantage"] == "inf"


def test_failed_write_keeps_the_old_object():
    path = paths.open_folder("gs://bucket/value.json")
    write_json(path, {"a": 1})

    def records():
        yield {"b": 2}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(path, records())
    assert json.loads(path.read_text()) == {"a": 1}


def test_policy_folder_is_replaced_as_a_whole(monkeypatch):
    """A failure before the copy changes nothing; a crash while copying leaves no config."""
    folder = paths.open_folder("gs://bucket/policy")
    for content in ("1", "2"):
        with files.replacing(folder) as scratch:
            (scratch / "config.json").write_text(content)
            (scratch / f"old_{content}").write_text(content)
            (scratch / "tokenizer").write_text(content)
    assert names(folder) == {"config.json", "old_2", "tokenizer"}
    with pytest.raises(RuntimeError), files.replacing(folder) as scratch:
        (scratch / "config.json").write_text("3")
        raise RuntimeError
    assert names(folder) == {"config.json", "old_2", "tokenizer"}
    assert (folder / "config.json").read_text() == "2"

    copy, copied = type(folder).copy, []

    def dies(path, target, **options):
        copied.append(path.name)
        if len(copied) == 2:
            raise KeyboardInterrupt
        return copy(path, target, **options)

    monkeypatch.setattr(type(folder), "copy", dies)
    with pytest.raises(KeyboardInterrupt), files.replacing(folder) as scratch:
        for name in ("a_config", "config.json", "tokenizer"):
            (scratch / name).write_text("4")
    assert copied == ["a_config", "tokenizer"] and names(folder) == {"a_config"}


@pytest.mark.parametrize("workdir", ["gs://bucket/run", "/data/run", "runs/mine"])
def test_workdir_paths_are_passed_on_as_absolute_paths(monkeypatch, workdir, tmp_path):
    """Check the path that train gets; test_checkpoint.py tests that Checkpoints passes it on."""
    monkeypatch.chdir(tmp_path)
    absolute = str(tmp_path / workdir) if workdir == "runs/mine" else workdir
    workdirs = []
    monkeypatch.setattr(loop, "train", lambda config, workdir: workdirs.append(workdir))
    call_main(train, None, workdir)
    assert isinstance(workdirs[0], epath.Path) and str(workdirs[0]) == absolute
    assert str(workdirs[0] / "checkpoints") == f"{absolute}/checkpoints"


def test_bucket_without_gcsfs_raises_import_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^gs://b/run: .* pip install 'spell_jax\[gcs\]'$"):
        paths.open_folder("gs://b/run")
    assert str(paths.open_folder("runs/mine")) == "runs/mine"


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_tfds_sets_are_read_from_a_bucket(tmp_path, file_format):
    name, data_dir = f"set_{file_format}", "gs://bucket/sets"
    rows = {split: [{"text": f"{split} {i}"} for i in range(3)] for split in ("train", "test")}
    folder = prepare(tmp_path, name, {"text": TEXT}, rows, file_format)
    fsspec.filesystem("gcs").put(str(folder), f"bucket/sets/{name}/1.0.0", recursive=True)
    data = DataConfig(f"tfds:{name}", data_dir, tfds_split="test", grouping="order")
    data.check()
    source, _ = open_clusters(data, 0, len)
    (cluster,) = source.read(list(source.tasks))
    assert cluster.documents == ("test 0", "test 1", "test 2")

    config = SourceConfig(data.source, "folder", ("general_qa",), tfds_data_dir=data_dir)
    for listed in list_files("web", config):
        records = sources._read_piece({"file": listed, "columns": []}, {"web": config})
        texts = [record["text"] for record in records if isinstance(record, dict)]
        split = "test" if "-test." in listed["place"] else "train"
        assert texts == [f"{split} {i}" for i in range(3)]
    with pytest.raises(ValueError, match="not prepared in gs://bucket/sets, which has set_"):
        DataConfig("tfds:none", data_dir).check()
