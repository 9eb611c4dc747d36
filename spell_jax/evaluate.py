"""Asks a policy the questions of public benchmarks, and scores it as the paper does (section 4.1).

    python -m spell_jax.evaluate --policy=DIR | --workdir=RUN --benchmarks=docmath,frames,...
        --data=FOLDER --out=DIR [--max_input=16384,100000] [--samples=8]
        [--judge_url=URL --judge_model=NAME | --judge_policy=DIR] [--compare=OTHER_OUT,...]

1. A prompt over --max_input tokens, chat layout included, loses its middle; each is answered
   --samples times at temperature 0.7 and top-p 0.95. Its draws have a key of their own by
   benchmark, question, limit and sample.
2. The rule scores every answer. Where a benchmark is judged and the rule gives less than 1, a judge
   is asked whether the stated answer holds the reference; the score is the better of the two.
   Without a judge the rule alone counts. An endpoint's key is in $SPELL_JUDGE_KEY.
3. OUT/samples.jsonl has a row a sample, OUT/summary.json means with 95 % intervals (bootstrap over
   questions), OUT/table.md the table, beside those of other evaluations (--compare). Benchmarks
   that tell their questions apart, as by a needle's depth, have OUT/plots/NAME.png.
4. Stopped and started again, it goes on: a question's samples are in samples.jsonl as soon as all
   are drawn, a judge's replies in judge.jsonl as they come. The final files are those of a run that
   nothing stopped. OUT/config.json says what is evaluated; another evaluation needs another OUT.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import app, flags

from spell_jax.evaluation import answering, figures, protocol
from spell_jax.evaluation import judge as judging
from spell_jax.evaluation.answering import Place, Row, Sampling
from spell_jax.evaluation.benchmarks import registry
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.policy_sampler import Policy, Sizes
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime import distributed, fault_injection
from spell_jax.runtime import setup as start
from spell_jax.runtime.jsonl import append_records, write_json, write_lines, write_records
from spell_jax.selfplay.judge import Judge

SAMPLES, SUMMARY, TABLE = "samples.jsonl", "summary.json", "table.md"
PLOTS = "plots"
log = logging.getLogger("spell_jax.evaluate")  # __name__ is __main__ when this is the entry


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is evaluated, and how. Mistakes raise ValueError.

    Attributes:
      policy: a policy's folder.
      benchmarks: names of registered benchmarks.
      data: a folder that holds a folder NAME for each of them, or their files themselves.
      max_input: limits of a prompt, in tokens; each is an evaluation of its own.
      limit: questions of a benchmark, the first ones; 0: all.
      dtype: of the policy's weights.
      thinking: for chat templates that know it: "", "on" or "off".
      sampling: how answers are drawn.
    """

    policy: str
    benchmarks: tuple[str, ...]
    data: str
    max_input: tuple[int, ...] = (16_384, 100_000)
    limit: int = 0
    dtype: str = "float32"
    thinking: str = ""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)

    def __post_init__(self):
        for name in ("benchmarks", "max_input"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ValueError(f"{name} = {given}: must name one at least, and each once")
        if self.limit < 0:
            raise ValueError(f"limit = {self.limit}: must be 0 (all) or more")
        if min(self.max_input) < 1:
            raise ValueError(f"max_input = {self.max_input}: must be at least 1")

    def load(self, tokenizer: Tokenizer) -> list[Benchmark]:
        """The benchmarks, for a policy with this tokenizer; of several processes each reads them.

        Raises:
          FileNotFoundError, ValueError: see registry.load; a question's id is not its own.
        """
        found = []
        for name in self.benchmarks:
            folder = registry.find_folder(name, self.data)
            found.append(registry.load(name, folder, self.limit or None, tokenizer))
            ids = [item.id for item in found[-1].items]
            if not ids or len(set(ids)) < len(ids):
                raise ValueError(f"{name}: must have questions, and each an id of its own")
        return found


def run(
    settings: Settings,
    out: str | os.PathLike[str],
    name: str,
    judge: Judge | None = None,
    sizes: Sizes | None = None,
    compare: Sequence[str | os.PathLike[str]] = (),
) -> dict[str, Any]:
    """Evaluates a policy; the summary, as in its file.

    Args:
      settings: what is evaluated.
      out: a local folder, which is made. Process 0 alone reads and writes there.
      name: of the policy, in the table.
      judge: for answers that the rule gives less than 1.
      sizes: of the sampler.
      compare: folders of other evaluations, whose rows the table has too.

    Raises:
      FileNotFoundError, ValueError: see weights.identify and Settings.load; there is no evaluation
        to compare with, `out` holds another one, or the policy's context is too short.
    """
    out = pathlib.Path(out)
    policy = Policy(settings.policy, settings.dtype, tokenizers.THINKING[settings.thinking], sizes)
    benchmarks = settings.load(policy.tokenizer)
    wanted = dataclasses.asdict(settings) | {
        "weights": policy.fingerprint(),
        "questions": {one.name: answering.fingerprint(one) for one in benchmarks},
    }
    rows: dict[Place, list[Row]] = {}  # on process 0

    def begin() -> list[Place]:
        for folder in compare:
            json.loads((pathlib.Path(folder) / SUMMARY).read_text())  # not found out after hours
        out.mkdir(parents=True, exist_ok=True)
        start.check_same(out / start.CONFIG_FILE, wanted, "an evaluation")
        rows.update(answering.read_finished(out / SAMPLES, settings.sampling.samples))
        return list(rows)

    done = {tuple(place) for place in distributed.broadcast(begin)}
    questions = answering.tokenize(policy, benchmarks, max(settings.max_input))
    answering.check_context(settings.sampling, policy, questions)
    for limit in settings.max_input:
        for place, new in answering.draw(settings.sampling, policy, questions, limit, done):
            if jax.process_index() == 0:
                append_records(out / SAMPLES, new)
                rows[place] = new
                fault_injection.point("sampled")
    policy.release()

    def score() -> None:
        for limit in settings.max_input:
            for one in questions:
                for row in rows.get((limit, one.benchmark.name, one.item.id), ()):
                    ordered.append((one, row))
                    answering.score(one, row)

    ordered: list[tuple[answering.Question, Row]] = []
    distributed.broadcast(score)
    answering.ask_judge(ordered, judge)
    finals = [row for _, row in ordered]

    def finish() -> dict[str, Any]:
        summary = _summarize(settings, name, benchmarks, finals, judge.model if judge else None)
        others = [json.loads((pathlib.Path(one) / SUMMARY).read_text()) for one in compare]
        write_records(out / SAMPLES, finals)
        write_json(out / SUMMARY, summary)
        write_lines(out / TABLE, [protocol.table([summary, *others])])
        _draw(out / PLOTS, benchmarks, summary)
        return summary

    return distributed.broadcast(finish)


def _draw(folder: pathlib.Path, benchmarks: Sequence[Benchmark], summary: Mapping) -> None:
    """The pictures of benchmarks that tell their questions apart."""
    folder.mkdir(exist_ok=True)
    for one in benchmarks:
        if one.by:
            found = {row["max_input"]: row["benchmarks"][one.name]["by"] for row in summary["rows"]}
            figures.draw(folder / f"{one.name}.png", one.title, found)


def _summarize(
    settings: Settings,
    name: str,
    benchmarks: Sequence[Benchmark],
    rows: Sequence[Row],
    judge: str | None,
) -> dict[str, Any]:
    """What summary.json holds."""
    names, samples = [one.name for one in benchmarks], settings.sampling.samples
    return {
        "policy": name,
        "judge": judge,
        "limit": settings.limit,
        **dataclasses.asdict(settings.sampling),
        "titles": {one.name: one.title for one in benchmarks},
        "rows": protocol.summarize(
            rows, names, settings.max_input, samples, registry.COLUMNS, settings.sampling.seed
        ),
    }


def main(_) -> None:
    start.setup()
    given = flags.FLAGS
    if bool(given.workdir) == bool(given.policy):
        raise app.UsageError("--workdir or --policy: one of them must say which policy is asked")
    folder = pathlib.Path(given.policy or pathlib.Path(given.workdir) / "policy")
    sizes = judging.read_sizes(given)
    if not all(map(str.isdecimal, given.max_input)):
        raise app.UsageError(f"--max_input = {given.max_input}: must be numbers of tokens")
    limits = tuple(map(int, given.max_input))
    settings = Settings(
        str(folder),
        tuple(given.benchmarks),
        given.data,
        limits,
        given.limit,
        given.dtype,
        given.thinking,
        Sampling(given.samples, given.temperature, given.top_p, given.max_tokens, given.seed),
    )
    out = pathlib.Path(given.out)
    judge = judging.make_judge(given, out, sizes)
    name = given.name or pathlib.Path(given.workdir or given.policy).resolve().name
    run(settings, out, name, judge, sizes, given.compare)
    if jax.process_index() == 0:
        print((out / TABLE).read_text(), end="")


def define_flags() -> None:
    flags.DEFINE_string("policy", None, "A policy's folder.")
    flags.DEFINE_string("workdir", None, "A run's folder; its policy/ is asked.")
    flags.DEFINE_list("benchmarks", None, "Names, with commas.", required=True)
    flags.DEFINE_string("data", None, "The folder of the benchmarks' files.", required=True)
    flags.DEFINE_string("out", None, "The folder of the results.", required=True)
    flags.DEFINE_list("max_input", ["16384", "100000"], "Limits of a prompt, in tokens.")
    flags.DEFINE_integer("samples", 8, "Answers to each question.")
    flags.DEFINE_float("temperature", 0.7, "Of sampling; 0: greedy.")
    flags.DEFINE_float("top_p", 0.95, "Mass of the nucleus.")
    flags.DEFINE_integer("max_tokens", 0, "Cap of an answer; 0: each benchmark's own.")
    flags.DEFINE_integer("limit", 0, "First questions of each benchmark; 0: all.")
    flags.DEFINE_integer("seed", 0, "Seed of all draws.")
    flags.DEFINE_enum("thinking", "", list(tokenizers.THINKING), "For chat templates that know it.")
    flags.DEFINE_string("name", "", "The policy's name in the table; its folder's, if not given.")
    flags.DEFINE_list("compare", [], "Folders of other evaluations, for the table.")
    judging.define_flags()


if __name__ == "__main__":
    define_flags()  # here, so that one process may import several entries
    app.run(main)
