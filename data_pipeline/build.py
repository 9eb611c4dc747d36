"""Builds clusters of documents from raw text (Appendix E.1 of the paper), stage by stage.

    python -m data_pipeline.build --config=configs/data/NAME.py --out=DIR [Beam's own flags]

1. read           reads the files of all sources and filters documents by quality and length.
2. dedup          keeps one document of each set of equal or nearly equal ones.
3. decontaminate  removes documents that contain a text or a question of an evaluation benchmark.
4. cut            cuts long documents into pieces, reports into paragraphs, and counts tokens.
5. embed          computes one vector per document.
6. cluster        runs levels of k-means, then makes clusters within the token limit.
7. tasks          gives each task the same number of clusters.
8. output         writes report.html, ArrayRecord shards and, last, manifest.json.

A source is files or a prepared tensorflow-datasets set, tfds:NAME; --tfds_data_dir names the
directory of these sets. The same command resumes an interrupted build after its last finished stage
(stages.py). With --check nothing runs: sources and benchmarks are listed, and the graph of every
stage is built for the runner.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from spell_jax.runtime import entry

# One line for Ctrl-C, SIGTERM, or a missing extra "data": the imports take seconds.
with entry.user_errors():
    # Beam warns of a library that only BigQuery needs, which no stage reads or writes.
    logging.getLogger().addFilter(lambda record: "apitools not found" not in str(record.msg))
    import apache_beam as beam
    from apache_beam.io.filesystems import FileSystems

    from data_pipeline import (
        boilerplate,
        cluster,
        cut,
        decontaminate,
        dedup,
        embed,
        output,
        report,
        sources,
        summary,
        tasks,
    )
    from data_pipeline.cut import CutConfig
    from data_pipeline.decontaminate import BenchmarkConfig, DecontaminateConfig
    from data_pipeline.dedup import DedupConfig
    from data_pipeline.embed import EmbedConfig
    from data_pipeline.filter import FilterConfig
    from data_pipeline.kmeans import ClusterConfig
    from data_pipeline.output import OutputConfig
    from data_pipeline.sources import SourceConfig
    from data_pipeline.stages import Done, Stages
    from data_pipeline.tasks import TasksConfig
    from spell_jax.data import tfds_sets
    from spell_jax.data.clusters import TASKS
    from spell_jax.runtime import config as settings
    from spell_jax.runtime.config import Config
    from spell_jax.runtime.files import paths

# Packages with versions that may change the output: they decode, hash, embed, cluster or write.
PACKAGES = ("spell_jax", "apache-beam", "array-record", "datasketch", "jax", "numpy", "py3langid")
PACKAGES += ("pyarrow", "pypdf", "scikit-learn", "scipy", "tensorflow-datasets", "tokenizers")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """Validated config of a build; sections that use randomness hold a copy of the seed."""

    sources: Mapping[str, SourceConfig]
    filter: FilterConfig
    dedup: DedupConfig
    benchmarks: Mapping[str, BenchmarkConfig]
    decontaminate: DecontaminateConfig
    cut: CutConfig
    embed: EmbedConfig
    cluster: ClusterConfig
    tasks: TasksConfig
    output: OutputConfig

    @property
    def pools(self) -> dict[str, str]:
        """Source -> pool: its sorted task names, joined by "+"."""
        return {name: "+".join(sorted(source.tasks)) for name, source in self.sources.items()}


def make_plan(config: Config) -> BuildPlan:
    """Validate a config without reading files; ValueError names field, value and range."""
    if not config.sources:
        raise ValueError("sources = {}: must have at least one source; see configs/data/folder.py")
    checks = dict(config.decontaminate)
    benchmarks = checks.pop("benchmarks")
    seeded = {"seed": config.seed}
    plan = BuildPlan(
        sources=_build_all(SourceConfig, config.sources, "sources"),
        filter=settings.build(FilterConfig, config.filter, "filter"),
        dedup=settings.build(DedupConfig, config.dedup, "dedup"),
        benchmarks=_build_all(BenchmarkConfig, benchmarks, "decontaminate.benchmarks"),
        decontaminate=settings.build(DecontaminateConfig, checks, "decontaminate"),
        cut=settings.build(CutConfig, config.cut, "cut"),
        embed=settings.build(EmbedConfig, config.embed, "embed", **seeded),
        cluster=settings.build(ClusterConfig, config.cluster, "cluster", **seeded),
        tasks=settings.build(TasksConfig, config.tasks, "tasks", **seeded),
        output=settings.build(OutputConfig, config.output, "output"),
    )
    if not plan.tasks.tasks:
        named_tasks = {task for source in plan.sources.values() for task in source.tasks}
        in_order = tuple(task for task in TASKS if task in named_tasks)
        plan = dataclasses.replace(plan, tasks=dataclasses.replace(plan.tasks, tasks=in_order))
    for source in plan.sources.values():
        source.filter(plan.filter)
    # A document over this limit would fit no cluster, and be removed only after it was embedded.
    if plan.cut.max_document_tokens > plan.cluster.max_cluster_tokens:
        raise ValueError(
            f"cut.max_document_tokens = {plan.cut.max_document_tokens}: must be at most "
            f"cluster.max_cluster_tokens = {plan.cluster.max_cluster_tokens}"
        )
    return plan


def _build_all(cls: Any, section: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {name: settings.build(cls, section[name], f"{where}.{name}") for name in section}


def build(config: Config, out: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run all unfinished stages and return the manifest.

    `config` has the fields of configs/data/base.py; `out` is local or on any file system that Beam
    supports. Raises ValueError if a field is invalid, FileNotFoundError if a source has no files,
    EndedError if there are too few clusters for the tasks.
    """
    plan = make_plan(config)
    paths.check_characters("out", out)
    stages = Stages(FileSystems.join(out, "stages"), options)
    finished_stages, files = run_stages(plan, stages)
    clusters = "tasks/tasks"
    manifest = {
        "config": config.to_dict(),
        "versions": versions(),
        "sources": files,
        "counts": {stage.name: list(stage.counts) for stage in finished_stages},
    }
    report.write_report(stages, finished_stages, clusters, out, manifest)
    return output.write_output(stages, clusters, finished_stages, out, plan.output, manifest)


def check_build(config: Config, out: str, options: Sequence[str] = ()) -> None:
    """List the sources and build the graph of every stage for the runner.

    Raises the errors of `build`.
    """
    paths.check_characters("out", out)
    stages = Stages(FileSystems.join(out, "stages"), options, only_check=True)
    run_stages(make_plan(config), stages)
    with_shards = stages.pipeline("output")
    clusters = with_shards | "read clusters" >> beam.Create([])
    # The output is not a stage of Stages, because tfds names its files; its graph is built here.
    output.make_shards(clusters, [output.ClusterShard("", 0)], out)
    stages.check_graph(with_shards, "output")


def run_stages(plan: BuildPlan, stages: Stages) -> tuple[list[Done], dict[str, dict[str, str]]]:
    """Run all stages before the output; return them, and source -> file -> hash."""
    # Benchmarks and sources first: a missing file ends the build before any stage has run.
    items = decontaminate.read_benchmarks(plan.benchmarks)
    listed = list_sources(plan, stages)
    entry.setup_done()
    finished_stages = [run_read_stage(plan, stages, listed)]

    def run_module(stage: Any, config: Any, make: Any, documents: str, **extra: Any) -> str:
        """Run a module's stage on the documents of the stage before it; return its documents."""
        name, fields = stage.__name__.rpartition(".")[-1], dataclasses.asdict(config) | extra
        finished_stages.append(
            stages.run_stage(
                name, fields, make, finished_stages[-1:], stage.BALANCES, documents=documents
            )
        )
        return f"{name}/documents"

    make = functools.partial(dedup.make_dedup, config=plan.dedup)
    documents = run_module(dedup, plan.dedup, make, "read/documents")
    if items:
        stored_items = decontaminate.store_items(stages, items)
        arguments = {"stages": stages, "dedup": plan.dedup, "config": plan.decontaminate}
        make = functools.partial(decontaminate.make_decontaminate, **arguments)
        # The graph does not hold the texts; the fingerprint must know them.
        extra = {
            "items": stored_items.fingerprint,
            "dedup": dataclasses.asdict(plan.dedup),
            "boilerplate": boilerplate.VERSION,
        }
        documents = run_module(decontaminate, plan.decontaminate, make, documents, **extra)
    reports = {name: s.max_report_tokens for name, s in plan.sources.items() if s.max_report_tokens}
    make = functools.partial(cut.make_cut, config=plan.cut, reports=reports)
    documents = run_module(cut, plan.cut, make, documents, reports=reports)
    make = functools.partial(
        embed.make_embed, total=finished_stages[-1].count("pieces"), config=plan.embed
    )
    documents = run_module(embed, plan.embed, make, documents)
    one_document_sources = [
        name for name, source in plan.sources.items() if source.one_document_per_cluster
    ]
    arguments = {
        "pools": plan.pools,
        "one_document_sources": one_document_sources,
        "reports": sorted(reports),
    }
    finished_stages.append(
        cluster.cluster(stages, documents, finished_stages[-1:], plan.cluster, **arguments)
    )
    pools = {c["id"]: c["pool"] for c in stages.read_records("cluster/clusters", ["id", "pool"])}
    # The flow between pools and tasks needs all numbers at once, so the driver assigns the tasks.
    try:
        assignment = {} if stages.only_check else tasks.assign_tasks(pools, plan.tasks)
    except ValueError as error:  # of the data, which only the stages before could count
        raise entry.EndedError(f"{error}; give more documents, or fewer tasks") from error
    make = functools.partial(tasks.make_tasks, assignment=assignment)
    fields = dataclasses.asdict(plan.tasks)
    clusters = {"clusters": "cluster/clusters"}
    finished_stages.append(
        stages.run_stage("tasks", fields, make, finished_stages[-1:], tasks.BALANCES, **clusters)
    )
    hashes: dict[str, dict[str, str]] = {name: {} for name in plan.sources}
    for file in sorted(stages.read_records("read/files"), key=lambda file: file["place"]):
        hashes[file["source"]][file["place"]] = file["hash"]
    return finished_stages, hashes


def list_sources(plan: BuildPlan, stages: Stages) -> Done:
    """Write the list of all files, which the workers read. Raises the errors of `list_files`."""
    files = (sources.list_files(name, source) for name, source in plan.sources.items())
    return stages.store("list", "listed", itertools.chain.from_iterable(files))


def run_read_stage(plan: BuildPlan, stages: Stages, listed: Done) -> Done:
    """Run the read stage; it reruns when the size, time or name of a file changes."""
    # Versions count here and in no other stage: a new parser or language model changes documents,
    # and every later stage depends on this one.
    fields = {
        "sources": {name: dataclasses.asdict(source) for name, source in plan.sources.items()},
        "filter": dataclasses.asdict(plan.filter),
        "versions": versions(),
    }
    make = functools.partial(sources.make_read, sources=plan.sources, filter=plan.filter)
    files = {"listed": "list/listed"}
    return stages.run_stage("read", fields, make, [listed], sources.BALANCES, **files)


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES."""
    package_versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **package_versions}


def main(arguments: Sequence[str]) -> None:
    logging.getLogger("apache_beam").setLevel(logging.WARNING)
    logging.getLogger("data_pipeline").setLevel(logging.INFO)
    for source in flags.FLAGS.config.sources.values():
        if tfds_sets.is_tfds(source.path) and not source.tfds_data_dir:
            source.tfds_data_dir = flags.FLAGS.tfds_data_dir
    build_arguments = flags.FLAGS.config, flags.FLAGS.out, arguments[1:]
    if flags.FLAGS.check:
        check_build(*build_arguments)
        return
    manifest = build(*build_arguments)
    stages = Stages(FileSystems.join(flags.FLAGS.out, "stages"))
    skipped = stages.read_records("read/removed", ["reason", "source", "place", "part"])
    print("", *summary.summary_lines(manifest["counts"], skipped, manifest["clusters"]), sep="\n")
    print(f"read them with --config.data.source={flags.FLAGS.out}; more in report.html there")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The build's configuration.")
    flags.DEFINE_string("out", None, "The result's folder.")
    flags.DEFINE_string("tfds_data_dir", "", tfds_sets.FLAGS["tfds_data_dir"])
    flags.DEFINE_bool("check", False, "Build the graph of every stage, and run nothing.")
    flags.mark_flags_as_required(["config", "out"])
    # Unknown flags are passed on to Beam.
    entry.run_main(main, lambda argv: flags.FLAGS(argv, known_only=True))
