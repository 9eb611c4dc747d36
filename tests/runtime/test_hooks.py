"""Tests of hooks: functions that data.source, algorithm.evaluation and source of sft name."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from spell_jax.algorithms import registry
from spell_jax.algorithms.held_out import HeldOut
from spell_jax.config import default_supervised_config, read, read_supervised
from spell_jax.configs import tiny
from spell_jax.data.config import HELD_OUT_SEED, open_clusters
from spell_jax.question_sets.tuning_rows import open_rows
from spell_jax.runtime import entry, hooks
from spell_jax.runtime.config import ConfigError
from tests import hook_module
from tests.algorithms.scripted import make_context
from tests.paths import ROOT

HERE = "tests.hook_module"


def make_clusters(hook: str) -> Any:
    config = tiny.get_config()
    config.data.source = hook
    config.data.tiny.update(clusters=2, documents=(3,))
    return open_clusters(read(config).data, 5, len)


def make_evaluation(hook: str) -> Any:
    config = tiny.get_config()
    config.algorithm.evaluation = hook
    config.data.tiny.clusters = 7
    run = read(config)
    return registry.find_evaluation(run.algorithm)(run.algorithm, make_context(), run.data)


def make_rows(hook: str) -> Any:
    config = default_supervised_config()
    config.source = hook
    config = read_supervised(config)
    return open_rows(config.source, config.prompts, config.seed).start(4)


FIELDS: dict[str, Callable[[str], Any]] = {
    "data.source": make_clusters,
    "algorithm.evaluation": make_evaluation,
    "source": make_rows,
}


def test_function_makes_the_clusters_of_both_splits():
    train, held_out = make_clusters(f"{HERE}:clusters")
    assert [*train.tasks] == ["train-5-0", "train-5-1"]
    assert [*held_out.tasks] == [f"held_out-{5 + HELD_OUT_SEED}-{index}" for index in (0, 1)]
    assert train.read(["train-5-1"])[0].documents == ("text",) * 3


def test_function_makes_the_evaluation_in_place_of_the_algorithms():
    assert isinstance(make_evaluation(""), HeldOut)
    evaluation = make_evaluation(f"{HERE}:evaluation")
    assert isinstance(evaluation, hook_module.ConstantEvaluation) and evaluation.score == 7


def test_function_makes_the_rows_from_any_number_on():
    rows = itertools.islice(make_rows(f"{HERE}:rows"), 2)
    assert [row.completion for row in rows] == ["0 4", "0 5"]


def test_example_of_the_documentation_makes_clusters(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "howto" / "your_documents.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "rooms.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    train, held_out = make_clusters("rooms:make_clusters")
    texts = {cluster.documents[0] for cluster in train.read([*train.tasks])}
    assert texts.isdisjoint(held_out.read([*held_out.tasks])[0].documents)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("no_such.module:rows", r"No module named 'no_such'; must be a module on Python's path"),
        (f"{HERE}:no_such", rf"{HERE} has no no_such; must name a function$"),
        (f"{HERE}:NUMBER", r"is int; must name a function$"),
        (f"{HERE}:refuses", r"no texts; must mount the disk$"),
    ],
)
def test_mistake_is_one_line_with_the_field(field, hook, message):
    with pytest.raises(ValueError, match=rf"^{field} = '{hook}': {message}") as raised:
        FIELDS[field](hook)
    assert "\n" not in str(raised.value)
    is_found_by_read = isinstance(raised.value, ConfigError)
    assert is_found_by_read == ("refuses" not in hook), "read imports a function, but calls none"


@pytest.mark.parametrize("make", FIELDS.values())
def test_bug_in_a_function_keeps_its_traceback(make):
    with pytest.raises(KeyError, match="a bug"):
        make(f"{HERE}:breaks")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise ValueError('mine')", "ValueError: mine"),
        ("open('no_such_file')", "FileNotFoundError: .*no_such_file"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("from spell_jax import no_such_name", "ImportError: cannot import name 'no_such_name'"),
        ("raise SystemExit", r"RuntimeError: sys\.exit\(\) would end the run; must return"),
    ],
)
def test_bug_in_a_module_keeps_its_traceback(tmp_path, monkeypatch, line, message):
    """The error is none that the commands show as one line, as they show the user's mistakes."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_hooks.py").write_text(f"{line}\n")
    text = rf"^source = 'broken_hooks:rows': importing broken_hooks: {message}"
    with pytest.raises(RuntimeError, match=text) as raised:
        make_rows("broken_hooks:rows")
    cause = raised.value.__cause__
    assert cause and traceback.extract_tb(cause.__traceback__)[-1].line
    assert not isinstance(raised.value, entry.USER_ERRORS)


@pytest.mark.parametrize("field", FIELDS)
def test_function_that_ends_the_process_is_an_error(field):
    """The status of sys.exit() would be success, and other hosts would wait for this one."""
    message = rf"^{field} = '{HERE}:leaves': sys\.exit\(0\) would end the run; must return or raise"
    with pytest.raises(RuntimeError, match=message):
        FIELDS[field](f"{HERE}:leaves")


def test_evaluation_that_is_no_name_is_refused():
    with pytest.raises(
        ConfigError, match=r"^algorithm\.evaluation = 'tiny': must be MODULE:FUNCTION$"
    ):
        make_evaluation("tiny")


@pytest.mark.parametrize(
    "value",
    ["", "tiny", "a", ":a", "a:", "a.:b", "a b:c", "gs://a/b", "http://a:80", "a/b:c", "a:b.c"],
)
def test_other_values_are_no_hooks(value):
    assert not hooks.is_hook(value)
    assert hooks.is_hook("a.b_1:c2") and hooks.is_hook("a:b")


def test_set_of_tfds_is_no_hook():
    config = tiny.get_config()
    config.data.source = "tfds:no_such_set"
    with pytest.raises(ConfigError, match=r"^data\.source = 'tfds:no_such_set': no_such_set is"):
        read(config)
