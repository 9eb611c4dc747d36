"""Command line of the benchmarks: python -m benchmarks NAME [--OPTION=VALUE ...].

A benchmark prints one JSON line: its options, the commit, the machine and its measurements.
NAME --help explains options and measurements. --save=docs/measurements/FILE.json writes the line
with its command, for the pages of the documentation (python -m docs.tools.measurements).

update   seconds of one optimizer update, with shared and with repeated prompts
sample   tokens/s of G answers to a prompt: shared, to G prompts, one by one, by transformers
refill   tokens/s with answers of many lengths: continuous batching against fixed batches
serve    load test of spell_jax.serve: throughput, waits, memory, a shared document
spell    seconds of one whole SPELL step, by phase; verdicts with and without a shared prefix
soak     growth of memory and compiled programs in a long run of the demo's config
peers    seconds and memory of a GRPO step, here and in TRL, Tunix or EasyDeL
plan     seconds of six programs, predicted by launch.plan's model and measured
curve    held-out accuracy of a run by step, and the figure of README.md
dedup    documents/s and memory of the data pipeline's filter and dedup (extra "data")
engine   corpus build on Beam's local runner and on Spark: seconds, equal bytes (extra "spark")
accelerator  kernels, update, decode and whole steps on this machine's GPU or TPU, in minutes
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax

try:
    from benchmarks.accelerator.command import Accelerator
    from benchmarks.base import BenchmarkCommand
    from spell_jax.runtime import code_version, entry
    from spell_jax.runtime import setup as start
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: {missing}; requirements/accelerator.txt has what an accelerator's image lacks"
    )

# Imported on demand: some need extras, such as Beam.
_CLASSES = {
    "update": "update.UpdateBenchmark",
    "sample": "rollout.SampleSpeed",
    "refill": "rollout.Refill",
    "serve": "serve.ServeLoad",
    "spell": "rollout.SpellBenchmark",
    "soak": "soak.Soak",
    "peers": "peers.PeersBenchmark",
    "plan": "plan.PlanBenchmark",
    "curve": "curve.CurveBenchmark",
    "dedup": "data.Dedup",
    "engine": "data.Engine",
    "accelerator": "accelerator.command.Accelerator",
}


def parse(arguments: Sequence[str]) -> tuple[str, BenchmarkCommand]:
    """Return a benchmark's name, and the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=_CLASSES, metavar="NAME")
    # The first word alone: the other options depend on the benchmark that it names.
    name = parser.parse_args(arguments[:1]).name
    module, _, class_name = _CLASSES[name].rpartition(".")
    benchmark = getattr(importlib.import_module(f"benchmarks.{module}"), class_name)
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # A field is a flag, and its annotation the help, so that no option is described twice.
    hints = typing.get_type_hints(benchmark, include_extras=True)
    for field in dataclasses.fields(benchmark):
        of_type, text = typing.get_args(hints[field.name])
        options: dict[str, Any] = {"default": field.default, "help": text}
        options |= {"action": "store_true"} if of_type is bool else {"type": of_type}
        parser.add_argument(f"--{field.name}", **options)
    return name, benchmark(**vars(parser.parse_args(arguments[1:])))


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark that name and flags select; return the fields of its line."""
    return _line(*parse(arguments))


def _line(name: str, benchmark: BenchmarkCommand) -> dict[str, Any]:
    measurements = benchmark.run()
    return {
        "bench": name,
        **dataclasses.asdict(benchmark),  # after the run, which fills in defaults
        "commit": code_version.head_commit(),
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
        "processors": os.cpu_count(),
        **measurements,
    }


def save(path: pathlib.Path, arguments: Sequence[str], line: Mapping[str, Any]) -> None:
    """Write a line as a file of docs/measurements (docs/tools/measurements.py)."""
    content = {
        "kind": "measured",
        "commit": line["commit"],
        "machine": f"{line['processors']} CPU cores, {line['devices']} x {line['device']}",
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "values": line,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _measure_accelerator(benchmark: Accelerator, path: pathlib.Path | None) -> int:
    """Play the sections of an accelerator measurement; return the exit status."""
    results, names = benchmark.play(), benchmark.names()
    if not benchmark.minutes:  # else each line was printed as its case ended
        print(*results.table(names), sep="\n")
    if path:
        # The folder may have been filled by several runs; --minutes says nothing of the numbers.
        content = results.measurement("python -m benchmarks accelerator")
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    failures = results.failures(names)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return int(bool(failures))


def main(arguments: Sequence[str]) -> int:
    save_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    save_parser.add_argument("--save", type=pathlib.Path)
    options, benchmark_arguments = save_parser.parse_known_args(arguments)
    name, benchmark = parse(benchmark_arguments)
    if isinstance(benchmark, Accelerator):
        return _measure_accelerator(benchmark, options.save)
    line = _line(name, benchmark)
    print(json.dumps(line))
    if options.save:
        save(options.save, benchmark_arguments, line)
    return 0


if __name__ == "__main__":
    start.setup()
    with entry.user_errors():
        status = main(sys.argv[1:])
    sys.exit(status)
