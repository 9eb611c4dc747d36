"""A small evaluation by one process, or as one of several (SPELL_COORDINATOR, ...).

python -m tests.evaluating POLICY OUT [JUDGE_POLICY]

There are two made-up benchmarks. Without JUDGE_POLICY, verdicts are by checksum, and only process 0
may give them.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import pytest
from absl import flags

from docs.tools import commands
from spell_jax.evaluation import runner
from spell_jax.evaluation.answering import EvaluationSampling
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.rollout import judge as judging
from spell_jax.rollout.judge import Judge
from spell_jax.rollout.repliers import PolicyReplier, Replier
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import setup as start
from spell_jax.sampler.config import SamplerConfig
from spell_jax.selfplay import prompts as prompt_sets

SIZES = SamplerConfig(kv_cache_tokens=512, slots=8, prefill_tokens=128, page_size=16)
LIMITS = (24, 40)
ITEMS = 3
SAMPLES = 2
FLAGS = tuple(flag.name for flag in commands.find()["spell_jax.evaluate"].flags)


def load(
    name: str,
    folder: Any,
    limit: int | None = None,
    tokenizer: Any = None,
    answer_format: str = "plain",
    prose: str = "",
) -> Benchmark:
    """Load a benchmark that scores noise: an answer's checksum decides the rule score."""
    prefix = {"plain": name, "sections": f"{name}!"}[answer_format]
    items = tuple(
        BenchmarkItem(
            f"{name}-{i}",
            f"{prefix} " + "Rome has hills. " * (2 + 4 * i),
            f"how many {i}?",
            ("3",),
            {"parity": ("even", "odd")[i % 2]},
        )
        for i in range(ITEMS)
    )
    return Benchmark(
        name,
        name.upper(),
        items[:limit],
        extract=lambda text, item: None if _sum(text) % 5 == 0 else text[:8] or None,
        score=lambda text, item: float(_sum(text) % 3 == 0),
        judged=name == "text",
        max_tokens={"text": 5, "number": 4}[name],
        by=("parity",) if name == "text" else (),
    )


def parse_flags(*arguments: str) -> flags.FlagValues:
    """Parse arguments by flags with the names of spell_jax.evaluate's flags; all are texts."""
    values = flags.FlagValues()
    for name in FLAGS:
        flags.DEFINE_string(name, "", "", flag_values=values)
    values(["evaluate", *arguments])
    return values


def _sum(text: str) -> int:
    return zlib.crc32(text.encode(errors="replace"))


class ScriptedReplier:
    """Replier by a function of the prompts, without words about its failures."""

    last_failure = ""

    def __init__(self, reply: Callable[[Sequence[str]], Iterable[tuple[int, str | None]]]):
        self._reply = reply

    def __call__(self, prompts: Sequence[str], numbers: Any = ()) -> Any:
        return self._reply(prompts)


def _reply(prompts: Sequence[str]) -> Iterator[tuple[int, str | None]]:
    """Yield verdicts of all kinds by checksum: yes, no, neither, none."""
    assert jax.process_index() == 0 or not prompts, "the judge is asked twice"
    for index, prompt in enumerate(prompts):
        yield index, ("[[YES]]", "[[NO]]", "perhaps", None)[_sum(prompt) % 4]


by_checksum = ScriptedReplier(_reply)


def policy_judge(folder: pathlib.Path) -> Replier:
    """Return a policy as the judge; only process 0 may have answers to judge."""
    judge = PolicyReplier(TextModel(folder, sizes=SIZES), 4)

    def ask(prompts: Sequence[str]) -> Iterator[tuple[int, str | None]]:
        assert jax.process_index() == 0 or not prompts, "the judge is asked twice"
        return judge(prompts)

    return ScriptedReplier(ask)


def write_episodes(workdir: pathlib.Path, steps: Mapping[int, Sequence[Any]]) -> pathlib.Path:
    """Write the files of a run's episodes from step -> records of the step."""
    (workdir / "episodes").mkdir(parents=True)
    for step, records in steps.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        path = workdir / "episodes" / f"step_{step:06d}.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode()))
    return workdir


def config(policy: pathlib.Path, **changes: Any) -> runner.EvaluationConfig:
    sampling = EvaluationSampling(SAMPLES, 1.0, 1.0)
    common = {"benchmarks": ("number", "text"), "data": "nowhere", "max_input": LIMITS}
    fields = {"policy": str(policy), "sampling": sampling} | common | changes
    return runner.EvaluationConfig(**fields)


def make_judge(out: pathlib.Path, ask: Replier = by_checksum) -> Judge:
    replies_file = out / judging.REPLIES if jax.process_index() == 0 else None
    return Judge(ask, prompt_sets.load("compact").judge, "checksum", cache_file=replies_file)


def run(
    policy: pathlib.Path, out: pathlib.Path, ask: Replier = by_checksum, **changes: Any
) -> dict:
    """Evaluate a policy under pytest's patches: see main."""
    judge = make_judge(out, ask)
    return runner.evaluate(config(policy, **changes), out, "noise", judge, SIZES)


def main() -> None:
    policy, out, *judge = map(pathlib.Path, sys.argv[1:])
    jax.config.update("jax_disable_most_optimizations", True)  # less to compile
    start.setup()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(runner.registry, "load", load)
        ask = policy_judge(judge[0]) if judge else by_checksum
        run(policy, out, ask)


if __name__ == "__main__":
    main()
