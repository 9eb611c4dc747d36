"""Tests of whole builds: output, complete accounting, interruptions, other runners."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from apache_beam.io.gcp import gcsio

from benchmarks.data import edited_copy
from data_pipeline import build, cluster, dedup, output, summary
from data_pipeline.stages import DONE, Stages
from spell_jax.configs.data import base, folder, mixed, paper
from spell_jax.data import built, stream
from spell_jax.data.clusters import PAPER_TASKS

TOPICS = 8
STAGES = ["read", "dedup", "decontaminate", "cut", "embed", "cluster-points", "cluster-members"]
STAGES += ["cluster", "tasks"]


def text(topic: int, number: int, words: int = 120) -> str:
    rng = np.random.default_rng([topic, number])
    return " ".join(f"word{w}" for w in 50 * topic + rng.integers(0, 50, words))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Write 160 texts of 8 topics in two sources, 6 copies, contaminated texts, unusable files."""
    root = tmp_path_factory.mktemp("texts")
    for name, topics in (("web", range(6)), ("filings", range(6, TOPICS))):
        (root / name).mkdir()
        rows = [(topic, number) for topic in topics for number in range(20)]
        for topic, number in rows:
            (root / name / f"{topic}-{number:02d}.txt").write_text(text(topic, number))
    for number in range(6):
        copy = edited_copy(text(number, 0), 0.9, 0.95, seed=number)
        (root / "web" / f"copy-{number}.txt").write_text(copy)
    (root / "web" / "short.txt").write_text("Short.")
    (root / "web" / "odd.bin").write_bytes(b"\0")
    long = "\n\n".join(text(0, number) for number in range(1000, 1010))
    (root / "web" / "long.txt").write_text(long)
    benchmark = [{"context": text(1, 7) + " and more", "question": text(2, 99, 12)}]
    (root / "benchmark.jsonl").write_text("".join(json.dumps(row) + "\n" for row in benchmark))
    (root / "web" / "asks.txt").write_text(
        f"{text(3, 50)} {benchmark[0]['question']} {text(3, 51)}"
    )
    config = base.get_config()
    config.sources.web = base.source(str(root / "web"), mixed.GENERAL)
    config.sources.filings = base.source(str(root / "filings"), ("financial_math",))
    config.filter.languages = ()
    benchmark = base.benchmark(str(root / "benchmark.jsonl"), ("context",), ("question",))
    config.decontaminate.benchmarks.exam = benchmark
    config.cut.max_document_tokens = 500
    config.embed.dimensions = 32
    config.cluster.documents_per_cluster = 8
    config.cluster.min_documents = 3
    config.cluster.max_cluster_tokens = 2000
    config.output.shards = 3
    return config


@pytest.fixture(scope="module")
def finished_build(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "out"
    return build.build(config, str(out)), out


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


@pytest.mark.slow
def test_every_input_file_is_accounted_for(finished_build):
    """Every file ends up in a cluster, whole or cut, or is listed or counted as removed."""
    manifest, out = finished_build
    counts = {name: Counter() for name in manifest["counts"]}
    for name, stage in manifest["counts"].items():
        for count in stage:
            counts[name][count["what"]] += count["number"]
    assert counts["read"]["files read"] == 169 and counts["read"]["documents kept"] == 168
    assert counts["read"]["files skipped: of another type"] == 1
    assert counts["read"]["documents removed: too short"] == 1
    assert counts["dedup"]["documents removed: near duplicate"] == 6
    assert counts["decontaminate"]["documents removed: contaminated by exam"] == 2
    assert counts["cut"]["documents cut"] == 1 and counts["cut"]["pieces"] == 160 - 1 + 3
    assert counts["cluster"]["documents clustered"] == 162
    used = counts["tasks"]["documents"]
    assert used + counts["tasks"]["documents removed: left over"] == 162
    clusters = built.BuiltClusters(out)
    assert used == sum(len(c.documents) for c in clusters.read(list(clusters.tasks)))
    skipped = list(Stages(str(out / "stages")).read_records("read/removed"))
    assert [(r["reason"], r["source"], r["place"]) for r in skipped] == [
        ("of another type", "web", "odd.bin")
    ]
    assert manifest["sources"]["web"].keys() >= {"copy-0.txt", "short.txt", "long.txt"}


@pytest.mark.slow
def test_console_names_skipped_files_and_counts_removals_by_reason(finished_build):
    manifest, out = finished_build
    skipped = Stages(str(out / "stages")).read_records("read/removed")
    lines = summary.summary_lines(manifest["counts"], skipped, manifest["clusters"])
    clusters = built.BuiltClusters(out)
    used = sum(len(cluster.documents) for cluster in clusters.read(list(clusters.tasks)))
    assert [line.strip() for line in lines[:7]] == [
        "files      169 read, 1 skipped",
        "1 of another type: web:odd.bin",
        "documents  169 read, 160 kept",
        "2 contaminated by exam",
        "6 near duplicate",
        "1 too short",
        f"pieces     162 made, {used} in clusters",
    ]


@pytest.mark.slow
def test_duplicates_and_contaminated_texts_are_removed(finished_build):
    clusters = built.BuiltClusters(finished_build[1])
    texts = [t for c in clusters.read(list(clusters.tasks)) for t in c.documents]
    assert len(set(texts)) == len(texts)
    fallen = list(Stages(str(finished_build[1] / "stages")).read_records("decontaminate/removed"))
    assert sorted((r["place"], r["because"]) for r in fallen) == [
        ("1-07.txt", "exam:document"),
        ("asks.txt", "exam:question"),
    ]


@pytest.mark.slow
def test_clusters_share_a_topic_and_tasks_have_equal_counts(finished_build):
    manifest, out = finished_build
    assert len(set(manifest["clusters"].values())) == 1 and len(manifest["clusters"]) == 3
    clusters = built.BuiltClusters(out)
    assert Counter(task for (task,) in clusters.tasks.values()) == manifest["clusters"]
    for task_cluster in clusters.read(list(clusters.tasks)):
        topics = Counter(int(t.split()[0][4:]) // 50 for t in task_cluster.documents)
        assert topics.most_common(1)[0][1] >= 0.8 * len(task_cluster.documents)
        assert (max(topics) >= 6) == (task_cluster.tasks == ("financial_math",))


@pytest.mark.slow
def test_trainer_streams_batches_from_the_build(finished_build):
    source = built.open_source(
        finished_build[1],
        count_tokens=lambda t: len(t.split()),
        max_document_tokens=64,
        documents_per_cluster=1,
        grouping="order",
    )
    dealt = stream.TaskStream(source, ("general_qa", "financial_math"), (1.0, 1.0), seed=0)
    batch = dealt.next(4)
    assert Counter(task for task, _ in batch) == {"general_qa": 2, "financial_math": 2}
    assert all(len(t.split()) <= 64 for _, task_cluster in batch for t in task_cluster.documents)


@pytest.mark.slow
def test_report_lists_removals_and_has_seven_plots(finished_build):
    page = (finished_build[1] / "report.html").read_text()
    for part in ("of another type", "odd.bin", "exam:question", "1-07.txt", "near duplicate"):
        assert part in page
    assert page.count("<svg") == 7
    assert "characters read" not in page and "cluster size" not in page


@pytest.mark.slow
def test_build_is_bit_identical_with_two_processes(config, finished_build, tmp_path):
    options = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    build.build(config, str(tmp_path / "out"), options)
    assert files_of(tmp_path / "out") == files_of(finished_build[1])


def _killing(function, marker):
    """Return a function that kills its worker and executor at the first call in any worker."""

    def call(*arguments):
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return function(*arguments)
        daemon = os.getppid()
        stat = Path(f"/proc/{daemon}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    return call


@pytest.mark.long
def test_build_on_spark_is_bit_identical_after_workers_were_killed(
    config, finished_build, tmp_path, monkeypatch
):
    """One of two executors is killed amid dedup, and one amid clustering."""
    markers = [tmp_path / name for name in ("dedup", "cluster")]
    monkeypatch.setattr(dedup, "_edge", _killing(dedup._edge, markers[0]))
    monkeypatch.setattr(cluster, "_leaves", _killing(cluster._leaves, markers[1]))
    flags = ["--runner=PySparkRunner", "--pyspark_partitions=2"]
    build.build(config, str(tmp_path / "out"), [*flags, "--pyspark_master=local-cluster[2,1,1024]"])
    assert all(marker.exists() for marker in markers)
    assert files_of(tmp_path / "out") == files_of(finished_build[1])


@pytest.mark.slow
def test_graphs_do_not_grow_with_files_and_benchmark_texts(config, tmp_path, monkeypatch):
    """169 files become one, and the benchmark gets a text of 100 KB that hardly compresses."""
    sizes: list[dict[str, int]] = []

    def measure(self, pipeline, name):
        sizes[-1][name] = pipeline.to_runner_api().ByteSize()

    monkeypatch.setattr(Stages, "check_graph", measure)
    changed_config = config.copy_and_resolve_references()
    for name in ("web", "filings"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text(text(0, 0))
        changed_config.sources[name].path = str(tmp_path / name)
    row = {"context": np.random.default_rng(0).bytes(50_000).hex(), "question": text(2, 99, 12)}
    (tmp_path / "benchmark.jsonl").write_text(json.dumps(row))
    changed_config.decontaminate.benchmarks.exam.path = str(tmp_path / "benchmark.jsonl")
    for checked_config in (config, changed_config):
        sizes.append({})
        build.check_build(checked_config, str(tmp_path / "out"))
    assert sizes[0].keys() == sizes[1].keys() >= {"read", "decontaminate", "output"}
    for name, size in sizes[0].items():
        assert abs(size - sizes[1][name]) < 2000, name  # compressed settings, such as paths, differ


@pytest.mark.slow
def test_interrupted_build_resumes_bit_identically(config, finished_build, tmp_path, monkeypatch):
    """The build stops before each stage is marked as done, then at each file of the output."""
    out, stopped = tmp_path / "out", []
    create, store = build.FileSystems.create, output.store

    def stop(name: str) -> None:
        if name not in stopped:
            stopped.append(name)
            raise KeyboardInterrupt(name)

    def stopping_create(path, *args, **kwargs):
        if path.endswith(DONE):
            stop(Path(path).parent.name)
        return create(path, *args, **kwargs)

    def stopping_store(folder, name, data):
        stop(name)
        store(folder, name, data)

    monkeypatch.setattr(build.FileSystems, "create", stopping_create)
    monkeypatch.setattr(output, "store", stopping_store)
    shards = [output.shard_name(number, 3) for number in range(3)]
    files = [output.FEATURES, output.INFO, output.INDEX, output.MANIFEST]
    # Shards are written in any order, so the build stops at one shard only.
    for name in [*STAGES, "clusters-train", *files]:
        # Inside a pipeline the runner raises another error instead.
        with pytest.raises((KeyboardInterrupt, RuntimeError), match=name):
            build.build(config, str(out))
        assert stopped[-1].startswith(name)
        if name == "clusters-train":
            stopped += shards
        assert not (out / output.MANIFEST).exists()
        if built.is_built(out):
            with pytest.raises(FileNotFoundError, match="build is unfinished"):
                built.BuiltClusters(out)
    build.build(config, str(out))
    assert files_of(out) == files_of(finished_build[1])


@pytest.mark.slow
def test_finished_build_is_not_rerun(config, finished_build, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in finished_build[1].glob("clusters-*")}
    monkeypatch.setattr(Stages, "pipeline", lambda *_: pytest.fail("ran again"))
    assert build.build(config, str(finished_build[1])) == finished_build[0]
    assert {
        path: path.stat().st_mtime_ns for path in finished_build[1].glob("clusters-*")
    } == before


@pytest.mark.slow
def test_changed_and_new_files_are_read_again(tmp_path):
    changing = tmp_path / "texts"
    changing.mkdir()
    (changing / "a.txt").write_text(text(0, 0))
    config = folder.get_config(str(changing))
    plan, stages = build.make_plan(config), Stages(str(tmp_path / "stages"))

    def read():
        build.run_read_stage(plan, stages, build.list_sources(plan, stages))
        return sorted(d["text"] for d in stages.read_records("read/documents"))

    assert read() == [text(0, 0)]
    (changing / "a.txt").write_text(text(0, 1))
    (changing / "b.txt").write_text(text(0, 2))
    assert read() == sorted([text(0, 1), text(0, 2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["FlinkRunner", "--flink_master=localhost:8081"], marks=pytest.mark.long),
        pytest.param(["SparkRunner"], marks=pytest.mark.long),
        [
            "DataflowRunner",
            "--project=my-project",
            "--region=us-central1",
            "--temp_location=gs://bucket/temp",
            "--staging_location=gs://bucket/staging",
        ],
    ],
    ids=lambda flags: flags[0],
)
def test_check_constructs_graphs_for_other_runners(config, tmp_path, flags, caplog, monkeypatch):
    # Beam asks whether Dataflow's buckets keep deleted files: minutes without a network.
    monkeypatch.setattr(gcsio.GcsIO, "is_soft_delete_enabled", lambda self, path: False)
    monkeypatch.setattr(gcsio, "create_storage_client", lambda *arguments: None)
    caplog.set_level("INFO", "data_pipeline")
    build.check_build(config, str(tmp_path / "out"), [f"--runner={flags[0]}", *flags[1:]])
    step_messages = [message for message in caplog.messages if f"steps for {flags[0]}" in message]
    levels = ["cluster-fit-1", "cluster-level-1"]
    assert [m.split(":")[0] for m in step_messages] == [*STAGES[:6], *levels, *STAGES[6:], "output"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_command_line_passes_unknown_flags_to_beam(config, tmp_path):
    """Unknown flags go to Beam; an unknown field of the config is an error."""
    path = config.sources.filings.path
    command = [sys.executable, "-m", "data_pipeline.build", f"--out={tmp_path / 'out'}"]
    command += [f"--config=configs/data/folder.py:{path}", "--runner=FlinkRunner", "--check"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0 and "output: 6 steps for FlinkRunner" in process.stderr
    assert "apitools" not in process.stderr  # of BigQuery, which no stage needs
    process = subprocess.run([*command, "--config.seeds=1"], capture_output=True, text=True)
    assert process.returncode != 0 and "seeds" in process.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filter.min_characters": 0}, "filter.min_characters = 0"),
        ({"dedup.bands": 7}, "dedup.bands = 7"),
        ({"sources.web.layout": "x"}, "sources.web.layout = 'x'"),
        ({"sources.web.text": 1}, "^sources.web.text = 1"),
        ({"sources.web.max_report_tokens": -1}, "sources.web.max_report_tokens = -1"),
        (
            {"sources.web.max_report_tokens": 9, "sources.web.split": "chapters"},
            "sources.web.split = 'chapters': must be ''",
        ),
        ({"decontaminate.benchmarks.exam.path": ""}, "benchmarks.exam.path = ''"),
        ({"sources.web.path": "/nowhere"}, "sources.web.path = '/nowhere'"),
        ({"cluster.max_cluster_tokens": 499}, "cut.max_document_tokens = 500"),
        ({"decontaminate.question_threshold": 2.0}, "question_threshold = 2.0"),
        ({"output.shards": 0}, "output.shards = 0"),
        ({"embed.method": "word2vec"}, "embed.method = 'word2vec'"),
        ({"tasks.clusters_per_task": -1}, "tasks.clusters_per_task = -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_errors_are_raised_before_anything_is_written(config, tmp_path, change, message):
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(change)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build.build(changed, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_tasks_are_those_that_the_sources_name(config):
    """The folder's config names two of the paper's tasks, so no warning may name the third."""
    plan = build.make_plan(folder.get_config("somewhere"))
    assert plan.tasks.tasks == ("general_qa", "multiple_choice")
    assert build.make_plan(config).tasks.tasks == PAPER_TASKS
    changed = config.copy_and_resolve_references()
    changed.tasks.tasks = ("financial_math",)
    assert build.make_plan(changed).tasks.tasks == ("financial_math",)


@pytest.mark.slow
def test_shipped_configs_are_valid():
    configs = folder.get_config("somewhere"), mixed.get_config("somewhere"), paper.get_config()
    for config in configs:
        for input_config in (*config.sources.values(), *config.decontaminate.benchmarks.values()):
            input_config.path = input_config.path or "somewhere"
        if config.embed.method == "policy":
            config.embed.folder = "somewhere"
        assert build.make_plan(config).dedup == build.DedupConfig()
    reports = build.make_plan(configs[2]).sources["reports"]
    assert (reports.max_report_tokens, reports.layout) == (16_384, "docmath")
    with pytest.raises(ValueError, match="at least one source"):
        build.make_plan(base.get_config())


@pytest.mark.parametrize("run", [build.build, build.check_build])
def test_folder_in_which_beam_finds_no_file_is_refused(config, tmp_path, run):
    with pytest.raises(ValueError, match=r"^out = .*\[b\]': has '\['"):
        run(config, str(tmp_path / "[b]"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_during_the_imports_ends_the_build_with_one_line(number, code):
    """The imports take seconds; Ctrl-C ended in a traceback, and SIGTERM in status -15."""
    command = [sys.executable, "-X", "importtime", "-m", "data_pipeline.build"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.endswith(" data_pipeline.dedup\n"):  # after Beam, and before matplotlib
            process.send_signal(number)
            break
    error = process.stderr.read()
    assert process.wait() == code
    assert "Traceback" not in error
