"""Command line of the benchmarks: python -m benchmarks NAME [--options] prints one JSON line.

update   seconds of one optimizer update, with shared and with repeated prompts
sample   tokens/s of sampling G answers to one prompt, and to G different prompts
refill   tokens/s with answers of many lengths: continuous batching against fixed batches
verify   verifier prompts/s, with and without a shared prefix
spell    seconds of one whole SPELL step, by phase
evaluate samples/s on a benchmark's questions: batched, and one request at a time
quality  int8 sampling against the compute dtype: KL, equal greedy tokens
report   seconds to write the report page of a long run, and to open it in a browser
soak     growth of memory and compiled programs in a long run of the demo's config
trl      seconds and memory of a GRPO step, here and in TRL (extra "test")
scoring  seconds to score 100,000 samples by the benchmarks' rules (extra "eval")
parsers  seconds of the parsers and rules on adversarial texts of up to 100 KB
dedup    documents/s and memory of the data pipeline's filter and dedup (extra "data")
lsh      near-duplicate pairs found by the LSH bands, against all near pairs of a folder's texts
corpus   build from real documents: time, memory, planted copies and contamination found, and
         similarity of the documents in a cluster
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks import (
    evaluate as bench_evaluate,
)
from benchmarks import (
    quality,
    rollout,
    scoring,
    soak,
    trl,
)
from benchmarks import (
    report as bench_report,
)
from benchmarks import (
    sample as bench_sample,
)
from launch import aot
from spell_jax.learner import loss, packing, statistics
from spell_jax.learner.learner import Learner
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import setup as start


def bench_update(options: argparse.Namespace) -> dict[str, Any]:
    """Time one update on the same groups, packed as [prompt | G answers] and as G separate rows.

    Both layouts get the same token budget and a bucket that fits them. Times are the best of
    `repeats` after compilation. Peak bytes are the compiler's for a micro-batch of one group,
    weights and gradient included. "mfu" is the model's FLOP/s (count_flops) in the shared layout
    divided by the bfloat16 peak of all devices; null if the peak is not in statistics.PEAKS.

    Args:
      options: parsed options of "update".

    Returns:
      The measurements, JSON-able.
    """
    policy = dataclasses.replace(
        _policy(options),
        remat=options.remat,
        attention=options.attention,
        lora=LoraConfig(options.lora) if options.lora else None,
    )
    answers = options.response * options.group
    shared = _measure(policy, options, packing.Bucket(options.prompt + answers, answers))
    alone = packing.Bucket(options.prompt + options.response, options.response)
    repeated = _measure(policy, options, alone)
    flops = count_flops(policy, options.prompt, options.response, options.group)
    per_second = flops["shared"] * options.groups / shared["seconds"]
    return {
        "bench": "update",
        "prompt": options.prompt,
        "response": options.response,
        "group": options.group,
        "groups": options.groups,
        "policy": options.policy,
        "layers": policy.layers,
        "width": policy.width,
        "dtype": options.dtype,
        "lora": options.lora,
        "remat": options.remat,
        "attention": options.attention,
        "shared_s": shared["seconds"],
        "repeated_s": repeated["seconds"],
        "ratio": repeated["seconds"] / shared["seconds"],
        "token_ratio": options.group
        * (options.prompt + options.response)
        / (options.prompt + answers),
        "flop_ratio": flops["repeated"] / flops["shared"],
        "shared_peak_bytes": shared["peak_bytes"],
        "repeated_peak_bytes": repeated["peak_bytes"],
        "gradient_norm_difference": abs(1 - repeated["norm"] / shared["norm"]),
        "tokens_per_s": options.groups * (options.prompt + answers) / shared["seconds"],
        "model_flops_per_s": per_second,
        "mfu": statistics.utilization(per_second, jax.devices()),
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
    }


def _policy(options: argparse.Namespace) -> PolicyConfig:
    """Architecture from a config.json if one is given, else from the options."""
    if options.policy:
        policy = PolicyConfig.from_hf(pathlib.Path(options.policy))
    else:
        policy = PolicyConfig(
            vocab_size=options.vocab,
            width=options.width,
            layers=3,
            heads=max(1, options.width // 64),
            kv_heads=max(1, options.width // 128),
            head_size=64,
            feed_forward=3 * options.width,
        )
    return dataclasses.replace(policy, layers=options.layers or policy.layers)


def count_flops(policy: PolicyConfig, prompt: int, response: int, group: int) -> dict[str, float]:
    """Count the floating-point operations of a group's update (statistics.operations).

    Args:
      policy: the architecture.
      prompt: prompt tokens P.
      response: tokens S of an answer.
      group: answers G of the prompt.

    Returns:
      Operations of "shared" rows (P + G S tokens) and "repeated" rows (G (P + S) tokens).
    """
    return {
        "shared": statistics.operations(policy, prompt, [response] * group),
        "repeated": group * statistics.operations(policy, prompt, [response]),
    }


def _random_groups(options: argparse.Namespace, vocab: int) -> list[packing.TrainGroup]:
    rng = np.random.default_rng(0)
    return [
        packing.TrainGroup(
            rng.integers(vocab, size=options.prompt),
            list(rng.integers(vocab, size=(options.group, options.response))),
            list(rng.normal(size=options.group)),
        )
        for _ in range(options.groups)
    ]


def _measure(
    policy: PolicyConfig, options: argparse.Namespace, bucket: packing.Bucket
) -> dict[str, float]:
    """Measure one layout: best seconds of an update, gradient norm, peak bytes of one group."""
    groups = _random_groups(options, policy.vocab_size)
    shared = bucket.answers > options.response
    rows = 1 if shared else options.group  # rows of one group

    def make_learner(budget: int) -> Learner:
        layout = packing.PackingConfig((bucket,), max(budget, bucket.length), shared)
        return Learner(
            policy,
            OptimizerConfig(),
            loss.LossConfig(),
            layout,
            meshes.make_mesh(),
            compute_dtype=options.dtype,
        )

    # Limit the budget to the data so that no row of a micro-batch is all padding.
    learner = make_learner(min(options.budget, bucket.length * rows * len(groups)))
    seconds, norms = [], []
    state = learner.init(jax.random.key(0))
    of_a_group = make_learner(bucket.length * rows)
    of_a_group.frozen = learner.frozen
    whole = of_a_group.lower(state, bucket).compile()
    first = groups[0]
    short = dataclasses.replace(
        first, prompt=first.prompt[:1], answers=[answer[:1] for answer in first.answers]
    )
    state, _ = learner.update(state, [short])  # compiles the programs of the updates below
    for _ in range(options.repeats):
        clock = time.perf_counter()
        state, numbers = learner.update(state, groups)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - clock)
        norms.append(numbers["gradient_norm"])
    memory = aot.memory_of(whole)
    # The compiler's own peak omits the temporaries of a CPU program.
    peak = memory["arguments"] + memory["temporaries"] + memory["outputs"] - memory["aliased"]
    return {"seconds": min(seconds), "norm": norms[0], "peak_bytes": peak}


@dataclasses.dataclass(frozen=True)
class _Option:
    name: str
    default: int | float | str
    help: str


_SHAPE = (
    _Option("group", 8, "answers to a prompt G"),
    _Option("policy", "", "a Hugging Face config.json, whose shape is taken"),
    _Option("layers", 0, "layers L; 0: 3, or the config.json's"),
    _Option("dtype", "float32", "of weights and activations"),
)
_SLOTS = (
    _Option("page_size", 128, "tokens of a page C"),
    _Option("prefill", 2048, "prompt tokens read in one call"),
    _Option(
        "cache", 0, "tokens of the pool on each part of the mesh; 0: no slot ever waits for it"
    ),
    _Option("seed", 0, "of prompts and lengths"),
)
_VERDICTS = (
    _Option("votes", 8, "verdicts on an answer G_v"),
    _Option("template", 192, "tokens that all verifier prompts begin with"),
    _Option("question", 64, "tokens of a question"),
    _Option("answer", 64, "tokens of the one answer that follows it in a verifier prompt"),
)
_OPTIONS = {
    "update": (
        *_SHAPE,
        _Option("prompt", 160, "prompt tokens P"),
        _Option("response", 20, "tokens of an answer S"),
        _Option("groups", 32, "prompts"),
        _Option("width", 128, "model width D"),
        _Option("vocab", 896, "vocabulary V"),
        _Option("lora", 0, "rank of adapters, which alone are trained; 0: all weights are"),
        _Option("budget", 8192, "tokens of a micro-batch"),
        _Option("repeats", 3, "timed updates"),
        _Option("remat", "none", "what the backward pass recomputes"),
        _Option("attention", "auto", "the attention's kernel"),
    ),
    "sample": (
        *_SHAPE,
        _Option("prompt", 1024, "prompt tokens P"),
        _Option("response", 128, "tokens of an answer S"),
        _Option("width", 512, "model width D"),
        _Option("vocab", 8192, "vocabulary V"),
        _Option("page_size", 128, "tokens of a page C"),
        _Option("prefill", 2048, "prompt tokens read in one call"),
        _Option("repeats", 2, "timed calls"),
        _Option("transformers", 0, "1: also by transformers' generate"),
    ),
    "refill": (
        *_SHAPE,
        *_SLOTS,
        _Option("requests", 32, "prompts; the paper's step has 128"),
        _Option("prompt", 128, "prompt tokens P, short: reading is not what is compared"),
        _Option("mean", 400, "mean of the geometric lengths of answers, in tokens"),
        _Option("cap", 4096, "cap of an answer, which plans reckon with"),
        _Option("slots", 32, "answers sampled at once, over all devices"),
        _Option("decode", 64, "tokens that a slot draws in one call, at most"),
        _Option("width", 64, "model width D, small: CPUs draw 200,000 tokens in minutes"),
        _Option("vocab", 896, "vocabulary V"),
    ),
    "verify": (
        *_SHAPE,
        *_SLOTS,
        *_VERDICTS,
        _Option("questions", 8, "questions, each with G answers to judge"),
        _Option("verdict", 32, "tokens of a verdict; about 60 at the paper's scale"),
        _Option("slots", 64, "verdicts sampled at once, over all devices"),
        _Option("decode", 64, "tokens that a slot draws in one call, at most"),
        _Option("width", 512, "model width D"),
        _Option("vocab", 8192, "vocabulary V"),
        _Option("repeats", 2, "timed runs of each kind"),
    ),
    "spell": (
        *_SHAPE,
        *_SLOTS,
        *_VERDICTS,
        _Option("questions", 2, "questions, all of them accepted; the paper's step has 128"),
        _Option("prompt", 2048, "tokens of a responder's prompt; 18,000 at the paper's scale"),
        _Option(
            "shown", 1024, "tokens of a questioner's prompt, which has a part of the documents"
        ),
        _Option(
            "about",
            1,
            "questions about the same documents; the algorithm has more than one in a "
            "step only where it proposes more than there are clusters",
        ),
        _Option("response", 64, "tokens of an answer S; about 400 at the paper's scale"),
        _Option("verdict", 16, "tokens of a verdict; about 60 at the paper's scale"),
        _Option("slots", 16, "answers sampled at once, over all devices: of the two questions"),
        _Option("decode", 64, "tokens that a slot draws in one call, at most"),
        _Option("width", 512, "model width D"),
        _Option("vocab", 8192, "vocabulary V"),
        _Option("budget", 8192, "tokens of a micro-batch"),
        _Option("remat", "none", "what the backward pass recomputes"),
    ),
    "evaluate": (
        *_SHAPE,
        _Option("questions", 8, "prompts"),
        _Option("prompt", 1024, "prompt tokens P; 16,384 or 100,000 at the paper's scale"),
        _Option("response", 64, "tokens of an answer S"),
        _Option("slots", 64, "answers sampled at once, over all devices"),
        _Option("width", 512, "model width D"),
        _Option("vocab", 8192, "vocabulary V"),
        _Option("page_size", 128, "tokens of a page C"),
        _Option("prefill", 2048, "prompt tokens read in one call"),
        _Option("repeats", 2, "timed runs of each kind"),
    ),
    "quality": (
        _Option("documents", 3, "documents of a question"),
        _Option("items", 64, "questions of each kind"),
        _Option("cache", "int8", 'the pool: "int8" or "compute"'),
        _Option("weights", "int8", 'the kernels: "int8" or "compute"'),
        _Option("guessed", 0, "tokens that are looked up and checked in one pass"),
    ),
    "report": (
        _Option("steps", 500, "of the run"),
        _Option("episodes", 6, "a step"),
        _Option("clusters", 500, "of the run"),
        _Option("documents", 20, "of a cluster"),
        _Option("document", 12_000, "characters of a document"),
        _Option("answer", 2000, "characters of an answer"),
        _Option("repeats", 5, "times that the page is opened, the fastest counts"),
    ),
    "soak": (
        _Option("steps", 520, "updates"),
        _Option("proposals", 16, "questions proposed for each; 48 in the demo"),
        _Option("workdir", "", "the run's folder, which is gone on with; empty: a temporary one"),
    ),
    "trl": (
        _Option("group", 8, "answers to a prompt G"),
        _Option("groups", 2, "prompts of a step"),
        _Option("micro", 1, "prompts of a micro-batch, on both sides"),
        _Option("prompt", 2048, "prompt tokens P"),
        _Option("response", 128, "tokens of an answer S"),
        _Option("policy", "", "a Hugging Face config.json, whose shape is taken"),
        _Option("layers", 8, "layers L; 0: the config.json's"),
        _Option("width", 512, "model width D"),
        _Option("vocab", 8192, "vocabulary V"),
        _Option("page_size", 128, "tokens of our pages C"),
        _Option("prefill", 2048, "prompt tokens that we read in one call"),
        _Option("steps", 3, "steps, the first of which is not timed"),
    ),
    "scoring": (
        _Option("samples", 100_000, "replies, over all benchmarks"),
        _Option("seed", 0, "of the replies"),
    ),
    "parsers": (_Option("repeats", 3, "timed calls of each, the fastest counts"),),
    "dedup": (_Option("documents", 10_000, "synthetic documents of about 100 words"),),
    "lsh": (
        _Option("source", "", "a folder with .txt or .md files"),
        _Option("documents", 2000, "texts of it, edited copies included"),
    ),
    "corpus": (
        _Option("source", "", "a folder as configs/data/mixed.py describes it"),
        _Option("planted", 0.05, "edited copies, as a share of the documents"),
        _Option("contaminated", 50, "planted texts of the benchmark, of each kind"),
    ),
}
_BENCHES = {
    "update": bench_update,
    "sample": lambda options: bench_sample.bench_sample(_policy(options), options),
    "refill": lambda options: rollout.bench_refill(_policy(options), options),
    "verify": lambda options: rollout.bench_verify(_policy(options), options),
    "spell": lambda options: rollout.bench_spell(_policy(options), options),
    "evaluate": lambda options: bench_evaluate.bench_evaluate(_policy(options), options),
    "quality": quality.bench_quality,
    "report": bench_report.bench_report,
    "soak": soak.bench_soak,
    "trl": lambda options: trl.bench_trl(_policy(options), options),
    "scoring": scoring.bench_scoring,
    "parsers": lambda options: importlib.import_module("benchmarks.parsers").bench_parsers(options),
    "dedup": lambda options: _data().bench_dedup(options),
    "lsh": lambda options: _data().bench_lsh(options),
    "corpus": lambda options: importlib.import_module("benchmarks.corpus").bench_corpus(options),
}


def _data() -> Any:
    """Import benchmarks.data on demand because it needs Beam, unlike the other benchmarks."""
    return importlib.import_module("benchmarks.data")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmarks, one JSON line a measure")
    commands = parser.add_subparsers(dest="name", required=True)
    for name, options in _OPTIONS.items():
        command = commands.add_parser(name)
        for option in options:
            command.add_argument(
                f"--{option.name}",
                type=type(option.default),
                default=option.default,
                help=option.help,
            )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark options.name and return its measurements, JSON-able."""
    return _BENCHES[options.name](options)


def main() -> None:
    start.setup()
    print(json.dumps(run(parse(sys.argv[1:]))))


if __name__ == "__main__":
    main()
