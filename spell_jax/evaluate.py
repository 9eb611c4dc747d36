"""Evaluates a model: public benchmarks with the paper's protocol (section 4.1), or other tasks.

    python -m spell_jax.evaluate --policy=DIR | --workdir=RUN --benchmarks=docmath,frames,...
        [--data=FOLDER] --out=DIR [--prose=FOLDER] [--max_input=16384,100000] [--samples=8]
        [--rope_scaling=yarn --rope_factor=4] [--answer_format=sections]
        [--judge_url=URL --judge_model=NAME | --judge_policy=DIR] [--judge_template=grades]
        [--rule=judge]
        [--compare=OTHER_OUT,...] [--columns=separate]
    python -m spell_jax.evaluate --endpoint=URL --model=NAME [--tokenizer=FOLDER] --benchmarks=...
        [--data=FOLDER] --out=DIR ...
    python -m spell_jax.evaluate --policy=DIR | --workdir=RUN --lm_eval=TASK1,TASK2 --out=DIR
        [--lm_eval_tasks=FOLDER] [--lm_eval_examples=5] [--lm_eval_chat] [--limit=N]
    python -m spell_jax.evaluate --judgment=outcome|diversity --answers=TREE.jsonl --out=DIR
    python -m spell_jax.evaluate --judgment=errors --answers=OTHER_OUT --data=FOLDER
        --benchmarks=longbench_v2_sdq,... [--max_input=ONE] --out=DIR
    python -m spell_jax.evaluate --lengths --policy=DIR --benchmarks=... --data=FOLDER --out=DIR

The first command:

1. Prompts over --max_input tokens, chat layout included, lose their middle. Each is answered
   --samples times at temperature 0.7 and top-p 0.95, with at most --max_tokens tokens: by default
   4096 or a benchmark's own limit; reasoning models have 20480 in the paper. The sampling key of an
   answer depends on the benchmark, the question, the limit and the sample only. --rope_scaling
   extends a context that is too short for --max_input and an answer, at all limits.
   --answer_format=sections asks for EAPO's four sections; the answer section is then the answer.
2. The rule scores every answer. If a benchmark is judged and the rule gives less than 1, the judge
   is asked whether the stated answer agrees with the reference; the higher score counts. Without a
   judge the rule alone counts. With --rule=judge the judge scores all stated answers to free text
   alone, as EAPO's evaluation does. Where its verdict is missing, the rule's score stands, with a
   star in the table and a note that counts such answers. The API key of an endpoint is read from
   $SPELL_JUDGE_KEY. --judge_template=grades asks for EAPO's three grades, of which only "correct"
   counts.
3. OUT/samples.jsonl has a row per sample, OUT/summary.json means with 95 % intervals (over
   questions; Wilson's for shares of right answers), OUT/table.md the table, next to the tables of
   other evaluations (--compare). --columns=separate gives each benchmark a column of its own, as
   in EAPO's Table 1. Benchmarks with a breakdown, for example by the depth of a needle, have
   OUT/plots/NAME.png.
4. Policies and data may be URLs (docs/launching.md, "Data and weights from a bucket").
5. A restarted evaluation resumes: samples.jsonl keeps each question with complete samples, and
   judge.jsonl each reply. The final files equal the files of an uninterrupted evaluation.
   OUT/config.json describes the evaluation; another evaluation needs another OUT.

The second asks a model at an OpenAI-compatible API, in the same words, with a seed for each sample.
Its key is read from $SPELL_ENDPOINT_KEY. Prompts are cut in tokens of --tokenizer, and not at all
without it. OUT/replies.jsonl keeps each reply, so a restart sends only requests without one. A
question that lacks a reply is left out of the means: the table counts such questions, and
OUT/left_out.jsonl lists them.

The third runs tasks of lm-evaluation-harness (extra "lm_eval"), which define their own prompts,
sampling and metrics. FOLDER has task files of your own. OUT/lm_eval.json has the harness's results,
and its table is printed. Nothing is downloaded unless HF_HUB_OFFLINE and HF_DATASETS_OFFLINE are 0.

With --judgment a judge (--judge_url and --judge_model, or --judge_policy) reads answers that are on
disk already: evaluation/judgments.py says which. OUT/judgments.json has the shares of the verdicts.
With --lengths the prompts are measured in tokens, and nothing is sampled (evaluation/lengths.py).
"""

from __future__ import annotations

import pathlib

from absl import flags

from spell_jax.evaluation.benchmarks import registry
from spell_jax.policy.choices import ROPE_SCALINGS, THINKING
from spell_jax.rollout import flags as policy_flags
from spell_jax.runtime import entry
from spell_jax.selfplay.verdicts import JUDGE_RULES


def main(_) -> None:
    # Imported here, so that --help and a mistake in a flag are answered at once.
    import jax

    from spell_jax.evaluation import harness, judgments, lengths, runner
    from spell_jax.evaluation.endpoint_respondent import Traffic
    from spell_jax.rollout import judge as judging
    from spell_jax.runtime import setup
    from spell_jax.runtime.files import paths

    setup.setup()
    flag_values = flags.FLAGS
    out, sizes = pathlib.Path(paths.expand_home(flag_values.out)), judging.read_sizes(flag_values)
    if flag_values.judgment:
        judgments.check_flags(flag_values)
        text = judgments.describe(judgments.judge_answers(flag_values, out, sizes))
        if jax.process_index() == 0:
            print(text)
        return
    if flag_values.lengths:
        lengths.check_flags(flag_values)
        text = lengths.describe(lengths.measure(flag_values, out))
        if jax.process_index() == 0:
            print(text)
        return
    harness.check_flags(flag_values)
    if flag_values.lm_eval:
        results = harness.evaluate(harness.from_flags(flag_values), out, sizes)
        if jax.process_index() == 0:
            print(harness.table(results), end="")
        return
    config = runner.from_flags(flag_values)
    # The judge is made before sampling, so that a mistake in its flags costs no answers.
    judge = judging.judge_of_flags(flag_values, out, sizes)
    # The folder WORKDIR/policy would name every run "policy".
    workdir = flag_values.workdir and pathlib.Path(flag_values.workdir).resolve()
    name = flag_values.name or (workdir.name if workdir else "")
    columns = registry.COLUMN_CHOICES[flag_values.columns]
    traffic = Traffic(flag_values.endpoint_workers, flag_values.endpoint_rate)
    table = flag_values.compare, columns
    runner.evaluate(config, out, name, judge, sizes, *table, flag_values.rule, traffic)
    if jax.process_index() == 0:
        print((out / runner.TABLE).read_text(), end="")


if __name__ == "__main__":
    # Defined here, so that one process may import several entry points.
    flags.DEFINE_string("policy", None, "Folder of a policy.")
    flags.DEFINE_string("workdir", None, "Workdir of a run, whose policy/ is evaluated.")
    flags.DEFINE_string("endpoint", "", "URL of the OpenAI-compatible API of an evaluated model.")
    flags.DEFINE_string("model", "", "Model name at --endpoint.")
    flags.DEFINE_string("tokenizer", "", "Folder of a tokenizer, to cut prompts for --endpoint.")
    flags.DEFINE_integer("endpoint_workers", 16, "Maximum number of concurrent requests.")
    flags.DEFINE_float("endpoint_rate", 0.0, "Maximum requests per second; 0: no limit.")
    flags.DEFINE_list("benchmarks", None, "Names of benchmarks, separated by commas.")
    flags.DEFINE_string("data", "", "Folder of the benchmark files; generated ones need none.")
    flags.DEFINE_string(
        "prose", "", "Folder of the texts that hide needles; empty: those of --data, else a novel."
    )
    flags.DEFINE_string("out", None, "Folder of the results.", required=True)
    flags.DEFINE_list(
        "max_input",
        None,
        "Prompt limits in tokens; default: 16384,100000, but none for --endpoint without "
        "--tokenizer.",
    )
    flags.DEFINE_integer("samples", 8, "Number of answers per question.")
    flags.DEFINE_float("temperature", 0.7, "Sampling temperature; 0: greedy.")
    flags.DEFINE_float("top_p", 0.95, "Probability mass of the nucleus.")
    flags.DEFINE_integer(
        "max_tokens",
        0,
        "Maximum answer length; 0: each benchmark's own, 4096 for the paper's. Reasoning models "
        "need 20480, as in the paper.",
    )
    flags.DEFINE_integer("limit", 0, "Number of questions per benchmark, the first ones; 0: all.")
    flags.DEFINE_integer("seed", 0, "Seed of sampling and of bootstrap intervals.")
    flags.DEFINE_enum(
        "thinking", "", list(THINKING), "Thinking mode of chat templates that have one."
    )
    flags.DEFINE_enum(
        "rope_scaling", "", list(ROPE_SCALINGS), "RoPE scaling; empty: the policy's own."
    )
    flags.DEFINE_float(
        "rope_factor", 1.0, "Context length over the policy's, above 1, with --rope_scaling."
    )
    flags.DEFINE_string("name", "", "Name in the table; default: the name of folder or model.")
    flags.DEFINE_list("compare", [], "Output folders of other evaluations to add to the table.")
    flags.DEFINE_enum(
        "columns",
        "shared",
        list(registry.COLUMN_CHOICES),
        "Whether benchmarks share columns of the table.",
    )
    flags.DEFINE_enum(
        "answer_format", "plain", registry.ANSWER_FORMATS, "What answers are asked for."
    )
    flags.DEFINE_list("lm_eval", None, "Tasks of lm-evaluation-harness, instead of --benchmarks.")
    flags.DEFINE_string("lm_eval_tasks", "", "Folder of own task files (yaml), with --lm_eval.")
    flags.DEFINE_integer(
        "lm_eval_examples", -1, "Number of examples in a prompt; -1: the task's own."
    )
    flags.DEFINE_bool("lm_eval_chat", False, "Whether tasks are asked in the chat layout.")
    flags.DEFINE_bool("lengths", False, "Measure the prompts in tokens, and sample nothing.")
    flags.DEFINE_enum(
        "judgment",
        "",
        ["", *policy_flags.JUDGMENTS],
        "Judge answers that are on disk: outcome, diversity of reasonings or kinds of errors.",
    )
    flags.DEFINE_string("answers", "", "File or folder of answers, with --judgment.")
    flags.DEFINE_enum(
        "rule",
        "match_or_judge",
        JUDGE_RULES,
        "Score of judged answers: the judge alone, or the larger of the rule and the judge.",
    )
    policy_flags.define_flags()
    entry.run_main(main)
