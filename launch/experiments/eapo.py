"""Tables and figures of the EAPO paper."""

from __future__ import annotations

from collections.abc import Mapping

from launch.experiments.experiment import (
    BENCHMARKS,
    DATA,
    MODELS,
    Column,
    EvaluationCommand,
    Experiment,
    PaperRun,
    Right,
    Score,
    TableRow,
    first_and_last,
    numbers,
)
from spell_jax.configs import eapo

_CONFIGS = {row.folder: f"configs/eapo.py:{name}" for name, row in eapo.MODELS.items()}
_14B = "Qwen3-14B"
_30B = "Qwen3-30B-A3B-Instruct-2507"
_THINKING = "Qwen3-30B-A3B-Thinking-2507"
_MAX_INPUT = 122_880
_JUDGE = (
    "--judge_template=grades",
    "--judge_url=$JUDGE_URL",
    "--judge_model=gpt-4o-2024-11-20",
)
_FORM = ("--answer_format=sections", "--columns=separate")
# Column of Table 1 -> benchmark.
_BENCHMARKS = {
    "Seal-0": "seal_0",
    "Seal-hard": "seal_hard",
    "Musique": "musique",
    "Hotpotqa": "hotpotqa",
    "2wiki": "2wikimqa",
    "SDQ": "longbench_v2_sdq",
    "MDQ": "longbench_v2_mdq",
    "LSA": "longbench_v2_lsa",
}


# -------------------------------------------------------------------------------------------- Runs


def _run(variant: str, policy: str = _THINKING, **fields: str) -> PaperRun:
    inputs = {
        "policy.folder": f"{MODELS}/{policy}",
        "reward_model.folder": f"{MODELS}/{_THINKING}",
        "data.questions": f"{DATA}/long_questions.jsonl",
    }
    changes = {f"algorithm.{field}": value for field, value in fields.items()}
    return PaperRun(f"{variant}-{policy.lower()}", _CONFIGS[policy], inputs, changes, "v5p-16")


def _grpo(policy: str = _THINKING) -> PaperRun:
    """Make a run of GRPO by outcome alone; the reward model's scores are only logged."""
    return _run("grpo", policy, reward_model="logged")


def _weighted(evidence: str, outcome: str) -> PaperRun:
    return _run(f"eapo-beta-{evidence}", evidence_weight=evidence, outcome_weight=outcome)


# -------------------------------------------------------------------------------------- Evaluation


def _evaluation(
    name: str, policy: str, run: PaperRun | None, benchmarks: str, *flags: str
) -> EvaluationCommand:
    whose = "--workdir={folder}" if run else f"--policy={{inputs}}/{MODELS}/{policy}"
    benchmark_flags = (f"--data={{inputs}}/{BENCHMARKS}", f"--benchmarks={benchmarks}")
    return EvaluationCommand(
        name, (whose, *benchmark_flags, f"--out={{folder}}/{name}", "--dtype=bfloat16", *flags)
    )


def _long(policy: str, run: PaperRun | None) -> EvaluationCommand:
    yarn = ("--rope_scaling=yarn", "--rope_factor=4") if policy == _14B and not run else ()
    limits = (f"--max_input={_MAX_INPUT}", "--max_tokens=8192")
    benchmarks = ",".join(_BENCHMARKS.values())
    return _evaluation("long_120k", policy, run, benchmarks, *limits, *_FORM, *_JUDGE, *yarn)


def _score(name: str) -> Score:
    return Score("long_120k", name, _MAX_INPUT)


_COLUMNS = (
    *(Column(title, _score(benchmark)) for title, benchmark in _BENCHMARKS.items()),
    Column("AVG", _score("average")),
)

_CLOSED = {
    "GPT-4o": "19.8 39.4 60.0 78.0 79.5 47.0 50.0 44.4 52.3",
    "Gemini-2.0-Flash": "24.3 36.6 52.5 75.0 84.5 43.1 44.1 48.2 51.0",
    "Qwen3-Plus": "24.3 32.3 56.5 71.5 80.0 50.3 44.1 55.6 51.8",
    "Claude-Sonnet-4": "42.3 56.3 60.5 81.5 81.0 50.3 48.0 66.7 60.8",
}
# Policy -> its name in the paper; before, with GRPO, with EAPO.
_OURS = {
    _14B: (
        "Qwen3-14B",
        "35.1 49.6 56.0 79.5 83.5 40.4 42.2 38.9 53.2",
        "35.1 51.0 57.0 80.0 83.0 40.7 42.4 40.9 53.8",
        "36.0 52.5 57.0 81.0 83.5 43.0 44.1 42.9 55.0",
    ),
    _30B: (
        "Qwen3-30B-A3B-Instruct",
        "23.4 30.3 45.0 73.0 75.0 39.7 43.1 55.6 48.1",
        "31.5 40.2 51.5 75.5 85.5 41.1 43.6 55.6 53.1",
        "33.0 44.1 59.5 77.5 87.5 42.4 45.1 55.6 55.6",
    ),
    _THINKING: (
        "Qwen3-30B-A3B-Thinking",
        "33.3 55.5 60.0 79.0 84.5 47.0 45.1 59.3 58.0",
        "40.4 53.8 60.5 78.5 85.0 49.7 43.1 63.0 59.2",
        "44.1 57.9 65.0 80.0 86.5 51.7 49.0 70.4 63.1",
    ),
}


def _row(name: str, text: str, run: PaperRun | None, policy: str = _THINKING) -> TableRow:
    return TableRow(name, numbers(text), run, policy, (_long(policy, run),))


def _main_rows() -> tuple[TableRow, ...]:
    rows = [
        TableRow(name, numbers(text), reason="a closed model") for name, text in _CLOSED.items()
    ]
    oss = "39.6 55.5 64.0 80.0 87.5 45.7 46.1 63.0 60.2"
    rows.append(TableRow("GPT-OSS-120B", numbers(oss), reason="its family is not supported"))
    qwenlong = "40.5 56.7 64.5 77.5 84.5 49.0 52.9 37.0 57.8"
    rows.append(_row("QwenLong-32B", qwenlong, None, "QwenLong-L1-32B"))
    for policy, (name, *texts) in _OURS.items():
        runs = {"": None, "+ GRPO": _grpo(policy), "+ EAPO": _run("eapo", policy)}
        for (suffix, run), text in zip(runs.items(), texts, strict=True):
            rows.append(_row(f"{name} {suffix}".strip(), text, run, policy))
    return tuple(rows)


# --------------------------------------------------------------------------------- Tree of evidence


def _tree(name: str, text: str, evidence_by: str, reasoning_by: str, *flags: str) -> TableRow:
    folder = "tree-" + name.lower().replace(" + ", "-").replace(" ", "-")
    tree_flags = (
        f"--policy={{inputs}}/{MODELS}/{_30B}",
        "--mode=evidence_tree",
        f"--prompts={{inputs}}/{DATA}/musique_questions.jsonl",
        "--out={folder}/tree.jsonl",
        "--width=3",
        f"--evidence_by={evidence_by}",
        f"--reasoning_by={reasoning_by}",
        "--max_tokens=8192",
        "--dtype=bfloat16",
        *flags,
    )
    evaluation = EvaluationCommand("tree.jsonl", tree_flags, "spell_jax.generate")
    return TableRow(name, numbers(text), folder=folder, evaluations=(evaluation,))


def _direct() -> TableRow:
    limits = (f"--max_input={_MAX_INPUT}", "--max_tokens=8192")
    evaluation = _evaluation("musique", _30B, None, "musique", *limits, *_JUDGE)
    return TableRow("Direct Reasoning", (None, None), folder=_30B, evaluations=(evaluation,))


_RERANKED = ("reranker", "none", f"--reranker={{inputs}}/{MODELS}/Qwen3-Reranker-8B")
_TREES = (
    _direct(),
    _tree("EAR", "- -", "none", "none"),
    _tree("EAR + SSA", "- 5.5", *_RERANKED),
    _tree("EAR + LLM-R", "- -", "none", "judge"),
    _tree("EAR + LLM-E", "- 9.0", "judge", "none"),
    _tree("EAR + LLM-E + LLM-R", "- -", "judge", "judge"),
    _tree(
        "EAR + LLM-E gpt-oss-120B",
        "- 11.0",
        "judge",
        "none",
        "--judge_url=$JUDGE_URL",
        "--judge_model=gpt-oss-120b",
    ),
    _tree("EAR + oracle", "- -", "oracle", "none"),
    TableRow("Evidence-Grounded", numbers("63.0 -"), reason="evidence of a closed model"),
)
_DIVERSITY = {
    "EAR + LLM-E": "24.0 76.0",
    "EAR + LLM-R": "3.5 96.5",
    "EAR + LLM-E + LLM-R": "4.5 95.5",
}

# ----------------------------------------------------------------------------------------- Figures

_MUSIQUE = Column("Musique", _score("musique"))
_EVIDENCE = (
    *first_and_last("evidence score", "rollout/evidence_score"),
    *first_and_last("recall, %", "rollout/evidence_recall", 100),
)
_BEST = (
    *first_and_last("best of 6, %", "rollout/scoring_best", 100),
    *first_and_last("order of pairs, %", "rollout/scoring_order", 100),
)
_VARIANTS = {
    "GRPO": _grpo(),
    "EAPO w/o RM Co-Evolution": _run("eapo-static", reward_model="static"),
    "EAPO": _run("eapo"),
}
_DEMO = "[algorithms.md](algorithms.md#eapo)"


def _variants(width: int, texts: Mapping[str, str], evaluate: bool = False) -> tuple[TableRow, ...]:
    """Make the rows of Figures 5 to 7, of `width` columns; `texts` has some rows' paper numbers."""
    rows = []
    for name, run in _VARIANTS.items():
        paper = numbers(texts.get(name, "- " * width))
        rows.append(
            TableRow(name, paper, run, evaluations=(_long(_THINKING, run),) if evaluate else ())
        )
    return tuple(rows)


def _needle(name: str, text: str, run: PaperRun | None) -> TableRow:
    evaluation = _evaluation(
        "needle", _THINKING, run, "needle", "--max_input=131072", "--max_tokens=8192"
    )
    return TableRow(name, numbers(text), run, _THINKING, (evaluation,))


_FIGURES = (
    Experiment("eapo-figure-1", "Failures of reasoning over long contexts", note="A drawing."),
    Experiment("eapo-figure-2", "Tree of evidence", note="A drawing; the code is Figure 3's."),
    Experiment(
        "eapo-figure-3",
        "Qwen3-30B-A3B-Instruct with a tree of evidence, on MuSiQue",
        (Column("accuracy", Right("tree.jsonl")), Column("gain over EAR")),
        _TREES,
        paper="63.0 with given evidence; gains over EAR: similarity 5.5, judge 9.0, better judge "
        "11.0",
        note="The other heights of the bars are not in the text. The oracle, ours, takes the "
        "sampled evidence nearest to the known one. The questions are rows of MuSiQue, padded "
        "(`data_pipeline.long_questions`), where the paper has LongBench's; direct reasoning is "
        "evaluated on LongBench's, see FOLDER/musique/table.md.",
    ),
    Experiment("eapo-figure-4", "The method", note="A drawing."),
    Experiment(
        "eapo-figure-5",
        "Accuracy on MuSiQue during training",
        (_MUSIQUE,),
        _variants(1, {"GRPO": "60.5", "EAPO": "65.0"}, evaluate=True),
        paper="EAPO rises faster and further; without co-evolution it saturates after step 50",
        tiny=f"accuracy .86; static .87, outcome alone .87 ({_DEMO})",
        note="Numbers are those of Table 1, after training. A curve needs a run with "
        "`--config.data.validation`, which logs `eval/all` every `validate_every` steps.",
    ),
    Experiment(
        "eapo-figure-6",
        "Quality of the evidence during training",
        _EVIDENCE,
        _variants(len(_EVIDENCE), {}),
        curves=("rollout/evidence_score", "rollout/evidence_recall"),
        paper="EAPO's scores stay above those of GRPO",
        tiny=f"recall .82; static .82, outcome alone .81 ({_DEMO})",
        note="GRPO's reward model scores without rewarding. Recall needs questions with evidence.",
    ),
    Experiment(
        "eapo-figure-7",
        "Selection of the best of six by the reward model",
        _BEST,
        _variants(len(_BEST), {"EAPO": "69.0 74.0 - -"})[1:],
        curves=("rollout/scoring_best", "rollout/scoring_order"),
        paper="69.0, after 60 steps 74.0",
        tiny=f"order of pairs .69, then .51; static .69, .53 ({_DEMO})",
        note="The best of the six is the one with the highest ROUGE-L recall of the evidence that "
        "the questions come with; the answers are those of the step.",
    ),
    Experiment(
        "eapo-figure-8",
        "Weight of the evidence",
        _COLUMNS,
        (
            _row("beta = 0.0", "- - - - - - - - -", _grpo()),
            _row("beta = 0.1", "- - - - - - - - -", _weighted("0.1", "0.8")),
            _row("beta = 0.3", "- - - - - - - - 63.1", _run("eapo")),
            _row("beta = 0.5", "- - - - - - - - 59.2", _weighted("0.5", "0.4")),
        ),
        paper="Overall: 63.1 at .3, 59.2 at .5",
        note="0.1 is our choice: the text names 0.0, 0.3 and 0.5. At 0.0 scores are only logged.",
    ),
    Experiment(
        "eapo-figure-9",
        "Errors on LongBench v2",
        (Column("evidence errors"), Column("reasoning errors")),
        (
            TableRow("GRPO", numbers("17.7 20.7"), reason="errors were classified by reading them"),
            TableRow("EAPO", numbers("13.5 15.4"), reason="errors were classified by reading them"),
        ),
        paper="Evidence errors 17.7, with EAPO 13.5; reasoning errors 20.7, 15.4",
        note="No command: answers are classified by reading them. `samples.jsonl` of Table 1's "
        "evaluations has them.",
    ),
    Experiment(
        "eapo-figure-10",
        "Needle in a haystack",
        (Column("retrieved", Score("needle", "needle", 131_072)),),
        (
            _needle("Base Model", "-", None),
            _needle("GRPO", "-", _grpo()),
            _needle("EAPO", "100", _run("eapo")),
        ),
        paper="100 with EAPO; the others miss a few needles",
        note="The heat map is FOLDER/needle/plots/needle.png.",
    ),
)

EXPERIMENTS = (
    Experiment(
        "eapo-table-1",
        "Three models on eight benchmarks, at 120K tokens",
        _COLUMNS,
        _main_rows(),
        paper="Average of Qwen3-14B: 53.2 before, 53.8 with GRPO, 55.0 with EAPO; "
        "Qwen3-30B-A3B-Instruct: 48.1, 53.1, 55.6; Thinking: 58.0, 59.2, 63.1",
        tiny=f"accuracy .59 before, .86 after, by outcome alone .87 ({_DEMO})",
    ),
    Experiment(
        "eapo-table-2",
        "Diversity of reasonings",
        (Column("Semantically Diverse"), Column("Semantically Consistent")),
        tuple(
            TableRow(name, numbers(text), reason="no command compares reasonings")
            for name, text in _DIVERSITY.items()
        ),
        paper="Consistent: 76.0 with LLM-E, 96.5 with LLM-R, 95.5 with both",
        note="No command: a judge compares sampled reasonings, which tree.jsonl of Figure 3 has.",
    ),
    *_FIGURES,
)
