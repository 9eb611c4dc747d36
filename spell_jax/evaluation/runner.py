"""One evaluation of a policy on public benchmarks: check, sample, score, judge, write.

The G samples of a question at a prompt limit are appended to samples.jsonl together, so a restarted
evaluation skips the question. config.json in the output folder describes the
evaluation; another one needs another folder.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from absl import app

from spell_jax.evaluation import answering, figures, protocol
from spell_jax.evaluation.answering import EvaluationSampling, QuestionKey, Row
from spell_jax.evaluation.benchmarks import registry
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.policy_sampler import SIZES, Policy
from spell_jax.policy.choices import THINKING
from spell_jax.policy.model import ModelConfig
from spell_jax.runtime import distributed, entry, fault_injection, paths, remote, setup
from spell_jax.runtime.config import check_choice
from spell_jax.runtime.jsonl import (
    append_records,
    read_json,
    write_json,
    write_lines,
    write_records,
)
from spell_jax.sampler.config import SamplerConfig
from spell_jax.selfplay.judge import Judge

SAMPLES, SUMMARY, TABLE, PLOTS = "samples.jsonl", "summary.json", "table.md", "plots"


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Policy, questions and sampling of an evaluation; a field out of range is a ValueError.

    Attributes:
      policy: folder of the policy.
      benchmarks: names of registered benchmarks.
      data: folder with a subfolder NAME for each benchmark, or with their files themselves; "" if
        all benchmarks are generated.
      prose: folder of the texts that hide needles, as in registry.load.
      max_input: prompt limits in tokens; each is an evaluation of its own.
      limit: number of questions per benchmark, the first ones; 0 means all.
      answer_format: "plain", or "sections" for EAPO's four sections, as in registry.load.
      dtype: dtype of the policy's weights.
      thinking: "", "on" or "off", for chat templates with such a switch.
      rope_scaling: as in model.ModelConfig, for prompts beyond the policy's context.
      rope_factor: as in model.ModelConfig.
      sampling: sampling options.
    """

    policy: str
    benchmarks: tuple[str, ...]
    data: str = ""
    prose: str = ""
    # The two limits of Table 1.
    max_input: tuple[int, ...] = (16_384, 100_000)
    limit: int = 0
    answer_format: str = "plain"
    dtype: str = "float32"
    thinking: str = ""
    rope_scaling: str = ""
    rope_factor: float = 1.0
    sampling: EvaluationSampling = dataclasses.field(default_factory=EvaluationSampling)

    def __post_init__(self):
        for name in ("benchmarks", "max_input"):
            entries = getattr(self, name)
            if not entries or len(set(entries)) < len(entries):
                raise ValueError(f"{name} = {entries}: must have at least one entry, each once")
        check_choice(self, "", answer_format=registry.ANSWER_FORMATS)
        if self.limit < 0:
            raise ValueError(f"limit = {self.limit}: must be 0 (all) or more")
        if min(self.max_input) < 1:
            raise ValueError(f"max_input = {self.max_input}: must be at least 1")
        # Raises for a bad pair of values.
        ModelConfig(rope_scaling=self.rope_scaling, rope_factor=self.rope_factor)


def from_flags(flag_values: Any) -> EvaluationConfig:
    """Make the config from the flags of spell_jax/evaluate.py.

    Raises UsageError if not exactly one flag names the policy, or --max_input has no numbers;
    ValueError if a flag is out of range.
    """
    folder = policy_folder(flag_values)
    if not all(map(str.isdecimal, flag_values.max_input)):
        raise app.UsageError(f"--max_input = {flag_values.max_input}: must be numbers of tokens")
    return EvaluationConfig(
        folder,
        tuple(flag_values.benchmarks),
        flag_values.data,
        flag_values.prose,
        tuple(map(int, flag_values.max_input)),
        flag_values.limit,
        flag_values.answer_format,
        flag_values.dtype,
        flag_values.thinking,
        flag_values.rope_scaling,
        flag_values.rope_factor,
        EvaluationSampling(
            flag_values.samples,
            flag_values.temperature,
            flag_values.top_p,
            flag_values.max_tokens,
            flag_values.seed,
        ),
    )


def policy_folder(flag_values: Any) -> str:
    """Return the folder named by --policy or --workdir; UsageError unless exactly one is given."""
    if bool(flag_values.workdir) == bool(flag_values.policy):
        raise app.UsageError("--workdir or --policy: exactly one of them must name the policy")
    folder = flag_values.policy or paths.open_folder(flag_values.workdir) / "policy"
    return str(folder if paths.is_remote(folder) else pathlib.Path(folder))


def evaluate(
    config: EvaluationConfig,
    out: str | os.PathLike[str],
    name: str,
    judge: Judge | None = None,
    sizes: SamplerConfig = SIZES,
    compare: Sequence[str | os.PathLike[str]] = (),
    columns: protocol.Columns = registry.COLUMNS,
    rule: str = "match_or_judge",
) -> dict[str, Any]:
    """Evaluate a policy and return the content of summary.json; all processes call this together.

    `out` is a local output folder, made if missing; only process 0 reads and writes there. `name`
    is the policy's name in the table. `rule` says which answers `judge` sees, and how its verdicts
    count (answering.ask_judge); without a judge the benchmark's rule counts. `compare` are output
    folders of other evaluations, for the table. `columns` are its columns of several benchmarks.

    Raises:
      FileNotFoundError: if a file of the policy, of a benchmark or of `compare` does not exist.
      ValueError: if a file is damaged, `out` holds another evaluation, or the context is too short.
    """
    out = pathlib.Path(out)
    policy = Policy(
        config.policy,
        config.dtype,
        THINKING[config.thinking],
        sizes,
        config.rope_scaling,
        config.rope_factor,
    )
    benchmarks = [_load(config, benchmark_name, policy) for benchmark_name in config.benchmarks]
    # Hashes, because a folder of the same name may hold other weights or a corrected data set.
    description = dataclasses.asdict(config) | {
        "weights": policy.fingerprint(),
        "questions": {benchmark.name: answering.fingerprint(benchmark) for benchmark in benchmarks},
    }
    rows: dict[QuestionKey, list[Row]] = {}  # like `compared`, on process 0 only
    compared: list[dict[str, Any]] = []

    def resume() -> list[QuestionKey]:
        files = (remote.fetch(os.path.join(folder, SUMMARY)) for folder in compare)
        compared.extend(map(read_json, files))
        out.mkdir(parents=True, exist_ok=True)
        setup.check_same(out / paths.CONFIG_FILE, description)
        rows.update(answering.read_finished(out / SAMPLES, config.sampling.samples))
        return list(rows)

    answered_keys = {tuple(key) for key in distributed.broadcast(resume)}
    questions = answering.tokenize(policy, benchmarks, max(config.max_input))
    answering.check_context(config.sampling, policy, questions)
    entry.setup_done()
    for limit in config.max_input:
        sampled = answering.sample_answers(config.sampling, policy, questions, limit, answered_keys)
        for key, new in sampled:
            if jax.process_index() == 0:
                append_records(out / SAMPLES, new)
                rows[key] = new
                fault_injection.point("sampled")
    policy.release()  # a local judge needs the memory
    keyed_questions = [
        (question, question.key(limit)) for limit in config.max_input for question in questions
    ]
    answered = [(question, row) for question, key in keyed_questions for row in rows.get(key, ())]
    distributed.broadcast(lambda: answering.score(answered, rule))
    answering.ask_judge(answered, judge, rule)

    def finish() -> dict[str, Any]:
        final, model = [row for _, row in answered], judge and (judge.model, rule)
        summary = _summarize(config, name, benchmarks, final, model, columns)
        write_records(out / SAMPLES, final)
        write_json(out / SUMMARY, summary)
        write_lines(out / TABLE, [protocol.table([summary, *compared])])
        (out / PLOTS).mkdir(exist_ok=True)
        for suite in benchmarks:
            if suite.by:
                parts = {r["max_input"]: r["benchmarks"][suite.name]["by"] for r in summary["rows"]}
                figures.plot_breakdown(out / PLOTS / f"{suite.name}.png", suite.title, parts)
        return summary

    return distributed.broadcast(finish)


def _load(config: EvaluationConfig, name: str, policy: Policy) -> Benchmark:
    folder, limit = registry.find_folder(name, config.data), config.limit or None
    tokenizer, layout = policy.tokenizer, config.answer_format
    prose = remote.fetch(config.prose) if config.prose else ""
    return registry.load(name, folder, limit, tokenizer, layout, prose)


def _summarize(
    config: EvaluationConfig,
    name: str,
    benchmarks: Sequence[Benchmark],
    rows: Sequence[Row],
    judge: tuple[str, str] | None,
    columns: protocol.Columns,
) -> dict[str, Any]:
    """Summarize the rows; `judge` has the name of the judge's model and the rule."""
    names, sampling = [benchmark.name for benchmark in benchmarks], config.sampling
    return {
        "policy": name,
        "judge": judge[0] if judge else None,
        "rule": judge[1] if judge else None,
        "limit": config.limit,
        **dataclasses.asdict(sampling),
        "titles": {benchmark.name: benchmark.title for benchmark in benchmarks},
        "rows": protocol.summarize(
            rows, names, config.max_input, sampling.samples, columns, sampling.seed
        ),
    }
