"""Lengths of the benchmarks' prompts in tokens, for spell_jax.evaluate --lengths.

Needs the tokenizer of a policy, and no weights. OUT/lengths.json has a summary for each benchmark,
OUT/lengths.png the cumulative distributions (SPELL's Figure 6, right).
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from spell_jax.evaluation import figures, runner
from spell_jax.policy import weights
from spell_jax.policy.choices import THINKING
from spell_jax.policy.model import find_folder
from spell_jax.rollout import flags as policy_flags
from spell_jax.runtime import entry
from spell_jax.runtime.files.jsonl import write_json
from spell_jax.runtime.hosts import distributed

RESULT, PLOT = "lengths.json", "lengths.png"
USEFUL_FLAGS = (
    *("lengths", "out", "policy", "workdir", "benchmarks", "data", "prose", "limit"),
    *("answer_format", "thinking"),
)


def check_flags(flag_values: flags.FlagValues) -> None:
    """Raise UsageError if a flag has no effect with --lengths, or there are no benchmarks."""
    policy_flags.refuse_others(flag_values, USEFUL_FLAGS, "with --lengths")
    if not flag_values["benchmarks"].value:
        raise app.UsageError("--benchmarks: must be given with --lengths")


def measure(flag_values: Any, out: pathlib.Path) -> dict[str, Any]:
    """Measure the prompts of --benchmarks, write the files of `out`, and return lengths.json.

    Raises UsageError if the flags name no policy, and the errors of registry.load and of
    weights.read_config_and_tokenizer.
    """
    folder = find_folder(runner.policy_folder(flag_values), "policy", with_weights=False)
    _, tokenizer = weights.read_config_and_tokenizer(folder, THINKING[flag_values.thinking])
    lengths: dict[str, list[int]] = {}
    for name in flag_values.benchmarks:
        benchmark = runner.load_benchmark(flag_values, name, tokenizer)
        # The whole prompt, with its chat layout: no limit cuts it here.
        lengths[name] = sorted(len(tokenizer.chat(item.prompt)) for item in benchmark.items)
    entry.setup_done()  # until here an error is a mistake in the flags or a file
    result = {name: summarize(tokens) for name, tokens in lengths.items()}

    def write() -> None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / RESULT, result)
        figures.plot_lengths(out / PLOT, lengths)

    distributed.broadcast(write)
    return result


def summarize(tokens: Sequence[int]) -> Mapping[str, float]:
    """Return counts and means of prompt lengths, at least one."""
    mean, median = statistics.fmean(tokens), statistics.median(tokens)
    bounds = {"shortest": min(tokens), "longest": max(tokens)}
    return {"questions": len(tokens), "mean": mean, "median": median} | bounds


def describe(result: dict[str, Any]) -> str:
    """Format lengths.json, a line for each benchmark."""
    return "\n".join(
        f"{name}: {row['questions']} prompts, median {row['median']:,.0f} tokens "
        f"({row['shortest']:,} to {row['longest']:,})"
        for name, row in result.items()
    )
