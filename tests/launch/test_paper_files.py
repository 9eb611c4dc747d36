"""Tests of the reader of launch/experiments/papers: a broken file names its place."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.tools import measurements
from spell_jax.launch.experiments import registry, typed_toml

TEXTS = {name: (registry.FOLDER / name).read_text() for name in registry.FILES}
SMALL = """
title = "A"
[values]
judge = ""
[models]
small = {repository = "Small-1B"}
[runs]
"a-{model}" = {config = "configs/tiny.py", inputs = {"policy.folder" = "models/{repository}"}}
"b-{model}" = {like = "a-{model}", fields = {steps = 2, "loss.x" = 0.5, "y" = false}}
[evaluations]
long = "python -m spell_jax.evaluate {policy} --out={folder}/long {judge}"
[columns]
Score = {score = "average", evaluation = "long", max_input = 4}
Twice = {mean = ["Score", "Score"], title = "Mean"}
[experiments]
a-figure-1 = {subject = "A drawing", note = "Nothing."}
[experiments.a-table-1]
subject = "Two  rows"
tiny = "0.5"
model = "small"
columns = ["Score", "Twice"]
evaluations = ["long"]
rows = [
  {name = "before", values = {judge = "--judge_url=$URL --x=1"}},
  {name = "after", run = "b-{model}", paper = "1 - "},
]
"""


def read(text: str, folder: Path) -> dict[str, Any]:
    """Read a file with this content; return its experiments by name."""
    path = folder / "a.toml"
    path.write_text(text)
    return {experiment.name: experiment for experiment in registry.read_paper(path)[1]}


def message(text: str, folder: Path) -> str:
    """Return the error of a file without the file's path; "" if the file can be read."""
    try:
        read(text, folder)
    except ValueError as error:
        path = str(folder / "a.toml")
        assert str(error).startswith(f"{path}: ") and len(str(error).splitlines()) == 1
        return str(error).removeprefix(f"{path}: ")
    return ""


def test_file_is_read_with_defaults_and_inherited_runs(tmp_path):
    experiments = read(SMALL, tmp_path)
    assert list(experiments) == ["a-table-1", "a-figure-1"]
    table = experiments["a-table-1"]
    assert (table.title, table.tiny) == ("Two rows", "0.5")
    assert [column.title for column in table.columns] == ["Score", "Mean"]
    before, after = table.rows
    assert (before.paper, after.paper) == ((None, None), (1.0, None))
    assert before.evaluations[0].flags == (
        *("--policy={inputs}/models/Small-1B", "--out={folder}/long", "--judge_url=$URL", "--x=1"),
    )
    assert after.evaluations[0].flags == ("--workdir={folder}", "--out={folder}/long")
    assert (after.run.name, after.run.config) == ("b-small", "configs/tiny.py")
    assert after.run.inputs == {"policy.folder": "models/Small-1B"}
    assert after.run.fields == {"steps": "2", "loss.x": "0.5", "y": "False"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('title = "A"', "title = ", r"Invalid value \(at line 2, column 9\)"),
        ('title = "A"', "", r"title: is missing"),
        ('title = "A"', "title = 1", r"title = 1: must be a text"),
        ('title = "A"', 'titel = "A"', r"titel = 'A': no such key, must be one of title, values"),
        ("repository", "folder", r"models\.small\.folder = 'Small-1B': no such key, must be one"),
        ('like = "a-{', 'like = "c-{', r'runs\."b-{model}"\.like = \'c-{model}\': must be one of'),
        ('config = "configs/tiny.py", ', "", r'runs\."a-{model}"\.config: is missing'),
        (
            "models/{repository}",
            "{x}",
            r'runs\."a-{model}"\.inputs\."policy\.folder" = \'{x}\': {x}',
        ),
        ("steps = 2", "steps = [2]", r'runs\."b-{model}"\.fields\.steps = \[2\]: must be a text'),
        (
            '"a-{model}" = {config',
            '"a-{x}" = {config',
            r'runs\."a-{x}"\.name = \'a-{x}\': {x} must be one of {model}, {repository}, {judge}',
        ),
        ('judge = ""', 'judge = "{x}"', r"values\.judge = '{x}': {x} must be one of {inputs}, {fo"),
        (
            'repository = "Small-1B"',
            'repository = "S", values = {x = ""}',
            r"models\.small\.values\.x = '': must be one of \[values\]: judge",
        ),
        (
            'values = {judge = "',
            'values = {judge = "{x}',
            r"experiments\.a-table-1\.rows\[0\]\.values\.judge = '{x}--judge.*: {x} must be",
        ),
        (
            'title = "A"',
            f'title = ["{200 * "a"}"]',
            r"title = \['a{95}\.\.\.: must be a text$",
        ),
        ("{judge}", "{jugde}", r"evaluations\.long = 'python.*: {jugde} must be one of {policy},"),
        ("python -m spell_jax", "spell_jax", r"evaluations\.long = 'spell_jax.*: must be python"),
        ('evaluation = "long", ', "", r"columns\.Score\.evaluation = '': must be one of long"),
        ("max_input = 4", 'max_input = "4"', r"columns\.Score\.max_input = '4': must be an integ"),
        ("max_input = 4", "max_input = true", r"columns\.Score\.max_input = True: must be an int"),
        ("max_input = 4", 'metric = "a"', r"columns\.Score: must have one of score, metric"),
        (
            'score = "average"',
            'metric = "a", steps = "middle"',
            r"columns\.Score\.steps = 'middle': must be one of first, last",
        ),
        ("max_input = 4", "scale = true", r"columns\.Score\.scale = True: must be a number"),
        ('["Score", "Score"]', '["Mean"]', r"columns\.Twice\.mean = 'Mean': must be one of Score"),
        ('score = "average", ', "", r"columns\.Twice\.mean = \[.*: must be columns that are meas"),
        (', note = "Nothing."', "", r"experiments\.a-figure-1: must have rows, or a note"),
        ("a-figure-1", "a-drawing", r"experiments\.a-drawing: must be PAPER-table-N or PAPER-fi"),
        ('"Score", "Twice"]', '"Scor"]', r"experiments\.a-table-1\.columns = 'Scor': must be one"),
        ('paper = "1 - "', 'paper = "1"', r"experiments\.a-table-1\.rows\[1\]\.paper = '1': must"),
        ('paper = "1 - "', 'paper = "1 x"', r"experiments\.a-table-1\.rows\[1\]\.paper = '1 x': "),
        ('run = "b-{', 'run = "c-{', r"experiments\.a-table-1\.rows\[1\]\.run = 'c-{model}': must"),
        ('model = "small"', "", r"experiments\.a-table-1\.rows\[0\]\.model = '': must be one of s"),
        (
            'values = {judge = "',
            'values = {x = "',
            r"experiments\.a-table-1\.rows\[0\]\.values\.x = .* must be one of \[values\]: judge",
        ),
        ('evaluations = ["long"]', "", r"experiments\.a-table-1\.rows\[0\]: must have a run, eval"),
    ],
)
def test_mistake_is_named_with_its_place(old, new, expected, tmp_path):
    assert SMALL.count(old) >= 1
    assert re.match(expected, message(SMALL.replace(old, new, 1), tmp_path))


def _leaves(value: Any, place: str = "", path: tuple = ()) -> Iterator[tuple[str, tuple]]:
    """Yield the place of each value of a file as errors write it, and its keys and indices."""
    if path:
        yield place, path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, typed_toml.join(place, key), (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]", (*path, number))


@pytest.mark.parametrize("name", registry.FILES)
def test_value_of_the_wrong_type_is_named(name):
    """A date is the type of TOML that no key has; 50 places of each file."""
    content = tomllib.loads(TEXTS[name])
    places = list(_leaves(content))
    for number in np.random.default_rng(0).choice(len(places), 50, replace=False):
        place, (*path, last) = places[number]
        table = content
        for key in path:
            table = table[key]
        value, table[last] = table[last], datetime.date(2025, 1, 1)
        with pytest.raises(ValueError, match=f"^{re.escape(place)} = datetime") as error:
            typed_toml.convert(registry.PaperFile, content)
        assert ": must be " in str(error.value)
        table[last] = value


@pytest.mark.parametrize("name", registry.FILES)
def test_damaged_text_is_read_or_is_an_error_of_one_line(name, tmp_path):
    random = np.random.default_rng(0)
    text, failures = TEXTS[name], 0
    for _ in range(20):
        start = int(random.integers(len(text)))
        end = start + int(random.integers(1, 20))
        insert = "".join(random.choice(list('"[]{}=.,\n1a-'), int(random.integers(3))))
        failures += bool(message(text[:start] + insert + text[end:], tmp_path))
    assert failures > 5


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    (tmp_path / "a.toml").write_bytes(b'title = "\xff"')
    with pytest.raises(ValueError, match=r"a\.toml: 'utf-8' codec"):
        registry.read_paper(tmp_path / "a.toml")


def test_measured_numbers_of_the_files_are_checked():
    names = {f"launch/experiments/papers/{name}.toml" for name in ("eapo", "reconstruction")}
    assert names <= measurements.read_templates().keys()
