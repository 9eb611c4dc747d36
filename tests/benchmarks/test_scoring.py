"""Tests of the scoring benchmark: its report, and scores of right and wrong replies."""

import statistics

import pytest

from benchmarks import scoring
from benchmarks.__main__ import run
from spell_jax.evaluation.benchmarks import own_questions
from spell_jax.evaluation.benchmarks.registry import LOADERS
from spell_jax.evaluation.benchmarks.retrieval import LENGTHS


def test_scoring_benchmark_reports_every_benchmark() -> None:
    line = run(["scoring", "--samples=300"])
    parts = line["benchmarks"]
    assert line["bench"] == "scoring" and line["limit_s"] == 60
    assert line["samples"] == sum(part["samples"] for part in parts.values())
    assert line["seconds"] == pytest.approx(sum(part["seconds"] for part in parts.values()))
    assert line["processor_s"] > 0.2  # the start of a worker alone
    assert line["samples_per_s"] == pytest.approx(line["samples"] / line["seconds"])
    longer = tuple(f"_{length // 1024}k" for length in LENGTHS)
    # A run's own questions are scored by the rules of docmath, frames and longbench_v2.
    short = {name for name in LOADERS if not name.endswith(longer)}
    assert short - {own_questions.NAME} <= set(parts)
    # Shares are those of the questions.
    assert 0.35 < parts["mmlu_pro"]["samples"] / line["samples"] < 0.45


@pytest.fixture(scope="module")
def writer() -> scoring.TextWriter:
    return scoring.TextWriter(3)


@pytest.mark.slow
@pytest.mark.parametrize("name", scoring.KINDS)
def test_right_replies_score_one_and_wrong_replies_less(
    name: str, writer: scoring.TextWriter
) -> None:
    kind = scoring.KINDS[name]
    scores = {
        right: [kind.score(*kind.make(writer, right)) for _ in range(20)] for right in (True, False)
    }
    if name != "summary":  # a summary is never fully right
        assert scores[True] == [1.0] * 20
    assert statistics.mean(scores[False]) < 0.6
