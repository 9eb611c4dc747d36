"""One evaluation of a model on public benchmarks: check, sample, score, judge, write.

The G samples of a question at a prompt limit are appended to samples.jsonl together, so a restarted
evaluation skips the question. config.json in the output folder describes the
evaluation; another one needs another folder.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from absl import app

from spell_jax.evaluation import answering, figures, protocol
from spell_jax.evaluation.answering import (
    KEY_FIELDS,
    EvaluationSampling,
    QuestionKey,
    Respondent,
    Row,
)
from spell_jax.evaluation.benchmarks import registry
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.endpoint_respondent import TRAFFIC, EndpointRespondent, Traffic
from spell_jax.policy.choices import DTYPES, THINKING
from spell_jax.policy.model import ModelConfig
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.rollout import flags as policy_flags
from spell_jax.rollout.judge import Judge
from spell_jax.rollout.text_model import SIZES, TextModel
from spell_jax.runtime import dataclass_flags, fault_injection, setup
from spell_jax.runtime.config import check_choice
from spell_jax.runtime.files import paths, remote
from spell_jax.runtime.files.jsonl import (
    append_records,
    read_json,
    write_json,
    write_lines,
    write_records,
)
from spell_jax.runtime.hosts import distributed
from spell_jax.sampler.config import SamplerConfig

log = logging.getLogger(__name__)

SAMPLES, SUMMARY, TABLE, PLOTS = "samples.jsonl", "summary.json", "table.md", "plots"
LEFT_OUT = "left_out.jsonl"  # questions that lack a reply of an endpoint
DEFAULT_LIMITS = (16_384, 100_000)  # the two limits of Table 1
UNCUT = (0,)  # of an endpoint without a tokenizer
ENDPOINT_FIELDS = ("endpoint", "model", "tokenizer")
POLICY_FIELDS = ("dtype", "thinking", "rope_scaling", "rope_factor")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Policy, questions and sampling of an evaluation; a field out of range is a ValueError.

    Attributes:
      policy: folder of the policy; "" for a model at an endpoint.
      benchmarks: names of registered benchmarks.
      data: folder with a subfolder NAME for each benchmark, or with their files themselves; "" if
        all benchmarks are generated.
      prose: folder of the texts that hide needles, as in registry.load.
      max_input: prompt limits in tokens; each is an evaluation of its own. UNCUT cuts nothing.
      limit: number of questions per benchmark, the first ones; 0 means all.
      answer_format: "plain", or "sections" for EAPO's four sections, as in registry.load.
      dtype: dtype of the policy's weights.
      thinking: "", "on" or "off", for chat templates with such a switch.
      rope_scaling: as in model.ModelConfig, for prompts beyond the policy's context.
      rope_factor: as in model.ModelConfig.
      sampling: sampling options.
      endpoint: URL of the OpenAI-compatible API of a model that is evaluated, without a policy.
      model: name of the model there.
      tokenizer: folder of the tokenizer that cuts prompts for an endpoint; "" cuts nothing.
    """

    policy: str
    benchmarks: tuple[str, ...]
    data: str = ""
    prose: str = ""
    max_input: tuple[int, ...] = DEFAULT_LIMITS
    limit: int = 0
    answer_format: str = "plain"
    dtype: str = "float32"
    thinking: str = ""
    rope_scaling: str = ""
    rope_factor: float = 1.0
    sampling: EvaluationSampling = dataclasses.field(default_factory=EvaluationSampling)
    endpoint: str = ""
    model: str = ""
    tokenizer: str = ""

    def __post_init__(self):
        for name in ("benchmarks", "max_input"):
            entries = getattr(self, name)
            if not entries or len(set(entries)) < len(entries):
                raise ValueError(f"{name} = {entries}: must have at least one entry, each once")
        check_choice(self, "", answer_format=registry.ANSWER_FORMATS, dtype=DTYPES)
        check_choice(self, "", thinking=tuple(THINKING))
        if self.limit < 0:
            raise ValueError(f"limit = {self.limit}: must be 0 (all) or more")
        if self.endpoint and not self.tokenizer and self.max_input != UNCUT:
            raise ValueError(
                f"max_input = {self.max_input}: needs --tokenizer=FOLDER with --endpoint, to count "
                "tokens; leave it out to cut nothing"
            )
        if min(self.max_input) < 1 and not (self.endpoint and not self.tokenizer):
            raise ValueError(f"max_input = {self.max_input}: must be at least 1")
        # Raises for a bad pair of values.
        ModelConfig(rope_scaling=self.rope_scaling, rope_factor=self.rope_factor)


def from_flags(flag_values: Any) -> EvaluationConfig:
    """Make the config from the flags of spell_jax/evaluate.py.

    Raises UsageError if not exactly one flag names the policy, a flag does not go with an endpoint,
    --max_input has no numbers, or --rule=judge has no judge; ValueError if a flag is out of range.
    """
    if flag_values.rule == "judge":
        policy_flags.check_model(flag_values, "judge", needed_for="--rule=judge")
    folder = "" if _has_endpoint(flag_values) else policy_folder(flag_values)
    if not all(map(str.isdecimal, flag_values.max_input or ())):
        raise app.UsageError(f"--max_input = {flag_values.max_input}: must be numbers of tokens")
    is_uncut = flag_values.endpoint and not flag_values.tokenizer
    limits = tuple(map(int, flag_values.max_input or ())) or (UNCUT if is_uncut else DEFAULT_LIMITS)
    fields = ("data", "prose", "limit", "answer_format", *POLICY_FIELDS, *ENDPOINT_FIELDS)
    return EvaluationConfig(
        folder,
        tuple(flag_values.benchmarks),
        max_input=limits,
        sampling=dataclass_flags.read(EvaluationSampling, flag_values),
        **{name: getattr(flag_values, name) for name in fields},
    )


def _has_endpoint(flag_values: Any) -> bool:
    """Return whether --endpoint names the model; UsageError if the other flags do not fit."""
    if bool(flag_values.endpoint) != bool(flag_values.model):
        raise app.UsageError("--endpoint and --model go together: a URL, and a model's name there")
    of_policies = ("workdir", "policy", "thinking", "rope_scaling")
    useless = [name for name in of_policies if flag_values.endpoint and getattr(flag_values, name)]
    if useless:
        raise app.UsageError(f"--{useless[0]}: has no effect with --endpoint, must not be given")
    if flag_values.tokenizer and not flag_values.endpoint:
        raise app.UsageError("--tokenizer: has no effect without --endpoint, must not be given")
    return bool(flag_values.endpoint)


def policy_folder(flag_values: Any) -> str:
    """Return the folder named by --policy or --workdir; UsageError unless exactly one is given."""
    if bool(flag_values.workdir) == bool(flag_values.policy):
        raise app.UsageError("--workdir or --policy: exactly one of them must name the policy")
    folder = flag_values.policy or paths.open_folder(flag_values.workdir) / "policy"
    return str(folder if paths.is_remote(folder) else pathlib.Path(folder))


def evaluate(
    config: EvaluationConfig,
    out: str | os.PathLike[str],
    name: str = "",
    judge: Judge | None = None,
    sizes: SamplerConfig = SIZES,
    compare: Sequence[str | os.PathLike[str]] = (),
    columns: protocol.Columns = registry.COLUMNS,
    rule: str = "match_or_judge",
    traffic: Traffic = TRAFFIC,
) -> dict[str, Any]:
    """Evaluate a model and return the content of summary.json; all processes call this together.

    `out` is a local output folder, made if missing; only process 0 reads and writes there. `name`
    is the model's name in the table, by default the respondent's. `rule` says which answers `judge`
    sees, and how its verdicts count (answering.ask_judge); without a judge the benchmark's rule
    counts. `compare` are output folders of other evaluations, for the table. `columns` are the
    table's columns of several benchmarks. `traffic` limits requests to an endpoint.

    Raises:
      FileNotFoundError: if a file of the policy, of a benchmark or of `compare` does not exist.
      ValueError: if a file is damaged, `out` holds another evaluation, or the context is too short.
    """
    out = pathlib.Path(out)
    respondent = _make_respondent(config, out, sizes, traffic)
    tokenizer = respondent.tokenizer
    benchmarks = [load_benchmark(config, title, tokenizer) for title in config.benchmarks]
    description = _describe(config, respondent, benchmarks)
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
    questions = respondent.read_questions(benchmarks, config.max_input)
    for limit in config.max_input:
        for key, new in respondent.answer(questions, limit, answered_keys):
            if jax.process_index() == 0:
                append_records(out / SAMPLES, new)
                rows[key] = new
                fault_injection.point("sampled")
    respondent.release()  # a local judge needs the memory
    keyed_questions = [
        (question, question.key(limit)) for limit in config.max_input for question in questions
    ]
    answered = [(question, row) for question, key in keyed_questions for row in rows.get(key, ())]
    distributed.broadcast(lambda: answering.score(answered, rule))
    answering.ask_judge(answered, judge, rule)

    def finish() -> dict[str, Any]:
        final, model = [row for _, row in answered], judge and (judge.model, rule)
        left_out = [key for _, key in keyed_questions if key not in rows]
        _list_left_out(out / LEFT_OUT, left_out)
        named = name or respondent.name
        summary = _summarize(config, named, benchmarks, final, model, columns, left_out)
        write_records(out / SAMPLES, final)
        write_json(out / SUMMARY, summary)
        write_lines(out / TABLE, [protocol.table([summary, *compared])])
        (out / PLOTS).mkdir(exist_ok=True)
        for suite in benchmarks:
            numbers = {r["max_input"]: r["benchmarks"][suite.name] for r in summary["rows"]}
            # A benchmark without any reply has no parts.
            if parts := {limit: part["by"] for limit, part in numbers.items() if "by" in part}:
                figures.plot_breakdown(out / PLOTS / f"{suite.name}.png", suite.title, parts)
        return summary

    return distributed.broadcast(finish)


def _make_respondent(
    config: EvaluationConfig, out: pathlib.Path, sizes: SamplerConfig, traffic: Traffic
) -> Respondent:
    if config.endpoint:
        names = config.endpoint, config.model, config.tokenizer
        return EndpointRespondent(*names, config.sampling, out, traffic)
    return answering.PolicyRespondent(make_policy(config, sizes), config.sampling)


def make_policy(options: Any, sizes: SamplerConfig) -> TextModel:
    """Make the policy of an EvaluationConfig or HarnessConfig; the errors of TextModel."""
    scaling = options.rope_scaling, options.rope_factor
    return TextModel(options.policy, options.dtype, THINKING[options.thinking], sizes, *scaling)


def _describe(
    config: EvaluationConfig, respondent: Respondent, benchmarks: Sequence[Benchmark]
) -> dict[str, Any]:
    """Return what must be the same when an evaluation resumes."""
    # Hashes, because a folder of the same name may hold other weights or a corrected data set.
    description = dataclasses.asdict(config) | {
        "weights": respondent.fingerprint(),
        "questions": {benchmark.name: answering.fingerprint(benchmark) for benchmark in benchmarks},
    }
    # Files of policies that earlier versions wrote have no such fields.
    unused = () if config.endpoint else ENDPOINT_FIELDS
    return {field: value for field, value in description.items() if field not in unused}


def _list_left_out(path: pathlib.Path, keys: Sequence[QuestionKey]) -> None:
    """Write the questions without all replies, and a warning; remove the file if there are none."""
    if not keys:
        path.unlink(missing_ok=True)
        return
    write_records(path, (dict(zip(KEY_FIELDS, key, strict=True)) for key in keys))
    log.warning(
        "%d questions lack a reply and are left out of the means; %s lists them, and the same "
        "command asks again",
        *(len(keys), path),
    )


def load_benchmark(options: Any, name: str, tokenizer: Tokenizer | None) -> Benchmark:
    """Load a benchmark by the fields of an EvaluationConfig, or the flags of the same names.

    Uses `data`, `limit`, `answer_format` and `prose`; raises the errors of registry.load.
    """
    folder, limit = registry.find_folder(name, options.data), options.limit or None
    layout = options.answer_format
    prose = remote.fetch(options.prose) if options.prose else ""
    return registry.load(name, folder, limit, tokenizer, layout, prose)


def _summarize(
    config: EvaluationConfig,
    name: str,
    benchmarks: Sequence[Benchmark],
    rows: Sequence[Row],
    judge: tuple[str, str] | None,
    columns: protocol.Columns,
    left_out: Sequence[QuestionKey],
) -> dict[str, Any]:
    """Summarize the rows; `judge` has the name of the judge's model and the rule."""
    names, sampling = [benchmark.name for benchmark in benchmarks], config.sampling
    return {
        "policy": name,
        "judge": judge[0] if judge else None,
        "judge_rule": judge[1] if judge else None,
        "limit": config.limit,
        **dataclasses.asdict(sampling),
        "titles": {benchmark.name: benchmark.title for benchmark in benchmarks},
        "rows": protocol.summarize(
            rows, names, config.max_input, sampling.samples, columns, sampling.seed, left_out
        ),
    }
