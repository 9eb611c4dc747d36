"""Tests of the paper's text and public code as configs, and of the page that compares them."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from typing import Any

import pytest

from spell_jax.config import default_config
from spell_jax.configs import paper, paper_code, rlvr, tiny
from spell_jax.runtime.config import flat, plain
from tests.algorithms.scripted import CHOICE, MATH, QA, Rollout, Row, Script, number, read
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "algorithm.md").read_text()
CONFIGS = {
    "text": dict(flat(plain(paper.get_config()))),
    "code": dict(flat(plain(paper_code.get_config()))),
    "default": dict(flat(plain(default_config()))),
}
TEXT = {
    name.removeprefix("algorithm.").replace(".", "__"): value
    for name, value in CONFIGS["text"].items()
    if name.startswith("algorithm.") and value != CONFIGS["default"][name]
}


def rows_of_the_page() -> list[list[str]]:
    """Read the cells of the table of text, code and defaults."""
    section = PAGE.partition("## Text, code and defaults\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def compared_fields() -> dict[str, list[Any]]:
    """Return the page's values of each field: the text's, the code's, the default."""
    fields = [row for row in rows_of_the_page() if re.fullmatch(r"`\w+(\.\w+)+`", row[0])]
    return {
        name.strip("`"): [ast.literal_eval(re.findall("^`(.+?)`", cell)[0]) for cell in cells]
        for name, *cells in fields
    }


@pytest.mark.parametrize("name", compared_fields())
def test_page_has_the_values_of_the_configs(name: str) -> None:
    assert compared_fields()[name] == [config[name] for config in CONFIGS.values()]


def test_page_has_every_field_in_which_the_configs_differ() -> None:
    names = set().union(*(config.keys() for config in CONFIGS.values()))
    differing = {
        name for name in names if len({repr(config.get(name)) for config in CONFIGS.values()}) > 1
    }
    fields = compared_fields()
    assert len(fields) == 17 and differing <= fields.keys()
    # Equal in all three: the text is read in one of two ways (VerifierConfig.share).
    assert fields.keys() - differing == {"algorithm.verifier.share"}


def test_every_value_of_the_text_has_its_place_in_the_paper() -> None:
    places = [text for field, text, *_ in rows_of_the_page() if field.startswith("`")]
    assert all(re.search(r"\((Eq\. \d|Alg\. 1|Appendix [A-G]|[34]\.\d)", text) for text in places)


@pytest.mark.parametrize("model", ["", "qwen2.5-7b"])
def test_values_that_text_and_code_share_are_section_4_1s(model: str) -> None:
    for config in (paper.get_config(model), paper_code.get_config(model)):
        assert (config.sampler.temperature, config.sampler.top_p) == (0.7, 0.95)
        assert config.sampler.max_tokens == 4096 and config.algorithm.verifier.max_tokens == 0
        algorithm = config.algorithm
        assert (algorithm.group_size, algorithm.verifier.group_size) == (8, 8)
        assert (
            algorithm.questions,
            algorithm.questioner.memory,
            algorithm.questioner.documents,
        ) == (128, 3, (5,))
        assert (algorithm.questioner.mu, algorithm.questioner.sigma) == (0.5, 0.5 / 3)
        assert (config.optimizer.learning_rate, config.optimizer.schedule) == (2e-6, "constant")
        assert (config.loss.kl_weight, config.minibatches) == (0, 1)


def test_rlvr_divides_by_the_deviation_of_the_text() -> None:
    assert rlvr.get_config().algorithm.deviation == paper.get_config().algorithm.deviation


def test_the_demo_keeps_the_defaults_that_depart_from_the_text() -> None:
    """Its numbers on the pages were measured with these."""
    algorithm, data = tiny.get_config().algorithm, tiny.get_config().data
    assert (algorithm.deviation, algorithm.questioner.negatives_by_task) == ("sample", True)
    assert (algorithm.verifier.malformed_penalty, algorithm.questioner.decline_penalty) == (
        True,
        False,
    )
    assert data.task_choice == "shares"


# ----------------------------------------------------------------------------- By hand, of the text


def of_text(rows: list[Row], script: Script | None = None, **options: Any) -> Rollout:
    """Run a step of the scripted questions with the choices of the paper's text."""
    # A long answer of the script has 41 words, more than 20 and 40.
    return Rollout(rows, script=script, **(TEXT | options))


def test_every_error_of_format_earns_minus_one() -> None:
    """Eq. 7: also a zero, a word for a number, an over-long answer, an unfinished thought."""
    errors = [
        *(Row(MATH, written, 0, 0, 0, 0) for written in ("zero", "word")),
        *(Row(QA, written, 0, 0, 0, 0) for written in ("long", "think", "bad_json")),
        Row(CHOICE, "noopt", 0, 0, 0, 0),
    ]
    rows = [*(Row(QA, "ok", 0, 2, 0, 0) for _ in errors), *errors]
    rollout = of_text(rows)
    assert [rollout.of(at).reward for at in range(6, 12)] == [-1.0] * 6
    # As many negatives as positives: all six, of which the code's choices train on two.
    assert len(rollout.groups["questioner"]) == 12
    code = {name: CONFIGS["code"][f"algorithm.{name.replace('__', '.')}"] for name in TEXT}
    assert len(Rollout(rows, **code).groups["questioner"]) == 6 + 1
    # Eq. 9: six rewards of 1 (half of the answers are right) and six of -1: mean 0, deviation 1.
    advantages = [read(group)[2][0] for group in rollout.groups["questioner"]]
    assert advantages == pytest.approx([1.0] * 6 + [-1.0] * 6, abs=1e-5)


def test_malformed_votes_earn_nothing_and_deviations_are_plain() -> None:
    """Eq. 5 and 8: votes yes, yes, yes, no, ? earn 1, 1, 1, 0, 0: mean 3/5, variance 6/25."""
    rows = [Row(QA, "ok", 0, 1, 1, 0)]
    script = Script(rows, verdicts={0: ("[[YES]]", "[[YES]]", "[[YES]]", "[[NO]]", "?")})
    rollout = of_text(rows, script, verifier__group_size=5, verifier__share=9.0)
    assert rollout.of(0).votes[0] == (1, 1, 1, 0, -1)
    high, low = 2 / math.sqrt(6), -3 / math.sqrt(6)
    expected_advantages = [high] * 3 + [low] * 2
    advantages = read(rollout.groups["verifier"][0])[2]
    assert advantages == pytest.approx(expected_advantages, abs=1e-4)


def test_responder_advantages_have_the_plain_deviation() -> None:
    """Eq. 3: rewards 1, 0, 0, 0 have mean 1/4 and deviation sqrt(3)/4."""
    rollout = of_text([Row(QA, "ok", 0, 1, 0, 0)])
    expected_advantages = [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    assert read(rollout.groups["responder"][0])[2] == pytest.approx(expected_advantages, abs=1e-4)


def test_negatives_may_be_of_tasks_without_positives() -> None:
    """Section 3.3: as many negatives as positives, of any task."""
    rows = [
        *(Row(QA, "ok", 0, 2, 0, 0) for _ in range(3)),
        *(Row(MATH, "ok", 0, 0, 0, 0) for _ in range(5)),
    ]
    written = {e.proposal.texts[0]: e for e in of_text(rows).episodes if e.proposal}
    trained = [written[read(group)[1][0]] for group in of_text(rows).groups["questioner"]]
    assert Counter(e.task for e in trained) == {QA: 3, MATH: 3}
    assert len({number(e) for e in trained}) == 6
    assert len(of_text(rows, questioner__negatives_by_task=True).groups["questioner"]) == 3
