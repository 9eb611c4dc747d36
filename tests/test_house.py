"""Tests of the house rules on small snippets, and on this checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import house_measures
from tests import house_rules as house
from tests.house_rules import Source
from tests.paths import ROOT


def violation_texts(path: str, text: str) -> list[str]:
    """Return the violations of one file, each as "line: rule: text"."""
    return [
        str(violation).split(":", 1)[1] for violation in house.check([Source.parse(path, text)], {})
    ]


def rules(path: str, text: str) -> list[tuple[int, str]]:
    """Return (line, rule) of the violations of one file."""
    return [
        (violation.line, violation.rule)
        for violation in house.check([Source.parse(path, text)], {})
    ]


def imported(**files: str) -> list[tuple[str, int, str]]:
    """Return (path, line, rule) of the violations of files, given by path with "__" for "/"."""
    sources = [Source.parse(f"{p.replace('__', '/')}.py", text) for p, text in files.items()]
    return [
        (violation.path, violation.line, violation.rule) for violation in house.check(sources, {})
    ]


# ------------------------------------------------------------------------------------------- Words


@pytest.mark.parametrize("word", sorted(house.OPENINGS))
def test_docstring_opening_with_a_relative_word_is_reported(word):
    text = f'"""{word} is here."""\n\n\nclass F:\n    """\n    {word} else.\n    """\n'
    assert rules("launch/a.py", text) == [(1, "opening"), (5, "opening")]


def test_other_docstring_openings_are_accepted():
    assert not violation_texts("launch/a.py", '"""Whatever is here."""\n\nx = """What?"""\n')
    assert not violation_texts("launch/a.py", 'class F:\n    """Offer of what."""\n')


@pytest.mark.parametrize("text", ["Returns x.", "The x.", "(x, y) of z.", "Reader of x."])
def test_docstrings_of_functions_that_are_not_imperative_are_reported(text):
    assert rules("launch/a.py", f'def f():\n    """{text}"""\n') == [(2, "mood")]
    method = f'class A:\n    """An x."""\n\n    async def f(self):\n        """{text}"""\n'
    assert rules("launch/a.py", method) == [(5, "mood")]


def test_imperative_docstrings_properties_and_tests_are_accepted():
    assert not violation_texts("launch/a.py", 'def f():\n    """Return x."""\n')
    for name in ("property", "functools.cached_property"):
        text = f'class A:\n    @{name}\n    def x(self):\n        """The x."""\n'
        assert not violation_texts("launch/a.py", text)
    assert not violation_texts("tests/a.py", 'def test_f():\n    """All x are y."""\n')


@pytest.mark.parametrize(
    "phrase",
    [
        "at most so many",
        "SO MANY",
        "is begun with",
        "are begun with",
        "drawn",
        "it drew one",
        "behind the prompt",
        "learned from",
        "learnt from",
        "of whom",
        "a game of two",
        "games",
        "anchored",
        "so\nmany",
        "is begun\n    with",
    ],
)
def test_phrases_in_docstrings_comments_and_markdown_are_reported(phrase):
    text = f'"""A module.\n\n{phrase}\n"""\n'
    assert rules("launch/a.py", text) == [(3, "phrase")]
    text = "x = 1\n" + "".join(f"# {line}\n" for line in phrase.split("\n"))
    assert rules("launch/a.py", text) == [(2, "phrase")]
    assert [
        violation.line for violation in house.check([], {"docs/a.md": f"# A\n\n{phrase}\n"})
    ] == [3]


def test_phrases_inside_words_and_code_are_accepted():
    text = '"""Withdrawn, gamers, so manyfold."""\nx = "drawn behind so many games"\n'
    assert not violation_texts("launch/a.py", text)


def test_allowed_quote_is_accepted_only_in_its_file(monkeypatch):
    monkeypatch.setattr(house, "ALLOWED", {"docs/a.md": ("behind a flag",), "": ("video game",)})
    text = "A video\ngame behind a\nflag, behind\n"
    assert [violation.line for violation in house.check([], {"docs/a.md": text})] == [3]
    assert [violation.line for violation in house.check([], {"docs/b.md": text})] == [2, 3]


@pytest.mark.parametrize(
    "code",
    [
        "drawn = 1",
        "x.drawn_tokens",
        "f(drawn=1)",
        "def f(*, drawn): ...",
        "def f(**drawn): ...",
        "def log_prob(): ...",
        "class LogProbs: ...",
        "LAST_READER = 1",
        "import numpy as drawn",
        "lambda drawn: 1",
        "[1 for drawn in x]",
    ],
)
def test_old_names_are_reported(code):
    assert rules("launch/a.py", f"{code}\n") == [(1, "name")]


@pytest.mark.parametrize(
    "code",
    [
        "found = f()",
        "_found = f()",
        "wanted: int = 1",
        "for one, b in x: pass",
        "with f() as given: pass",
        "def f(made): ...",
        "def f(*, rest): ...",
        "def f(*others): ...",
        "lambda some: 1",
        "[1 for known in x]",
        "if (whole := f()): pass",
        "class A:\n    kept: int",
        "try: pass\nexcept E as seen: pass",
        "match x:\n    case str(given): pass",
        "match x:\n    case [a, *rest]: pass",
        "def __add__(self, one): ...",
        "def found(): ...",
        "def _both(): ...",
        "async def asked(): ...",
        "class A:\n    def kept(self): ...",
        "def f():\n    def told(): ...",
        "@pytest.fixture\ndef chosen(): ...",
    ],
)
def test_names_by_pronouns_are_reported(code):
    assert [rule for _, rule in rules("launch/a.py", f"{code}\n")] == ["pronoun"]


def test_names_with_a_noun_and_operands_are_accepted():
    assert not violation_texts(
        "launch/a.py", "known_rows = 1\nf(found=1)\nx.made\nfounder = one.a\n"
    )
    assert not violation_texts("launch/a.py", "def found_rows(): ...\nfound()\nclass Done: ...\n")
    assert not violation_texts("launch/a.py", "class A:\n    def __add__(self, other): ...\n")
    assert not violation_texts("spell_jax/selfplay/selection.py", "def f(wanted): ...\n")
    assert rules("spell_jax/selfplay/selection.py", "def f(kept): ...\n") == [(1, "pronoun")]


def test_class_names_of_two_modules_are_reported_at_the_second():
    nested = "x = 1\n\n\ndef f():\n    class Tree(Base): ...\n"
    assert imported(spell_jax__data__b=nested, launch__a="class Tree: ...\n") == [
        ("spell_jax/data/b.py", 5, "class")
    ]
    sources = {f"benchmarks__{name}": "class _Call: ...\n" for name in "cab"}
    assert imported(**sources) == [(f"benchmarks/{name}.py", 1, "class") for name in "bc"]
    sources = [Source.parse(path, "class Row: ...\n") for path in ("launch/b.py", "launch/a.py")]
    (violation,) = house.unique_classes(sources)
    assert violation.text == "'Row' is a class of launch/a.py, too: say what this one is"


def test_class_names_of_one_module_and_of_tests_are_accepted():
    twice = "if x:\n    class Row: ...\nelse:\n    class Row: ...\n"
    tests = {f"tests__{name}": "class Row: ...\n" for name in "ab"}
    assert not imported(launch__a=twice, launch__b="class Rows: ...\nRow = int\n", **tests)


@pytest.mark.parametrize(
    "name",
    [
        "optimise",
        "Optimiser",
        "normalised",
        "tokenising",
        "INITIALISATION",
        "denormalise",
        "serialisable",
        "quantised",
        "summarise_all",
        "behaviour",
        "colours",
        "neighbours",
        "centre",
        "centred",
        "analyse",
        "labelled",
        "catalogue",
        "lossBehaviour",
    ],
)
def test_british_spelling_is_reported(name):
    assert rules("launch/a.py", f"x = 1\n{name} = 1\n") == [(2, "spelling")]
    assert rules("launch/a.py", f"x.{name}(1)\n") == [(1, "spelling")]
    if name.islower():
        assert rules(f"launch/{name}.py", "") == [(1, "spelling")]


@pytest.mark.parametrize(
    "name",
    [
        *("noise", "raised", "precise", "otherwise", "optimizer", "center", "centers", "metrics"),
        *("four", "hour", "labeled", "catalog", "logprob", "fired", "logs_probe", "readers"),
        *("analysis", "specialist", "redrawn", "parallelism", "realistic"),
    ],
)
def test_other_names_are_accepted(name):
    assert not violation_texts("launch/a.py", f"{name} = 1\n")


def test_name_is_reported_once_also_in_tests():
    assert rules("launch/a.py", "drawn = 1\ndrawn += drawn\n") == [(1, "name")]
    assert rules("tests/test_a.py", "def test_token_is_drawn(): ...\n") == [(1, "name")]


@pytest.mark.parametrize(
    "phrase",
    [
        *("that of", "those\nof", "the one", "The ones", "the latter", "the former", "whose"),
        *("of them", "of these", "those that", "the others"),
    ],
)
def test_words_that_stand_for_a_noun_are_reported_where_they_are_many(phrase):
    page = f"# A\n\n{phrase} {phrase} {phrase} " + 100 * "word "
    (first, second, _) = house.check([], {"docs/a.md": page})
    assert (first.path, first.line, first.rule) == ("docs/a.md", 3, "anaphor")
    assert second.line == 3 + phrase.count("\n") and "at most 2.5" in second.text
    assert not house.check([], {"docs/a.md": page + 1_200 * "word "})
    assert not house.check([], {"docs/a.md": f"# A\n\n{phrase} {phrase} word"})


def test_docstrings_and_comments_are_read_by_room_and_pages_alone():
    sources = [
        Source.parse("spell_jax/data/a.py", '"""A."""\n# Why.\n'),
        Source.parse("spell_jax/data/b.py", '"""B."""\n'),
        Source.parse("spell_jax/train.py", '"""C."""\n'),
        Source.parse("launch/experiments/d.py", '"""D."""\n'),
    ]
    groups = house.texts(sources, {"docs/a.md": "Text."})
    named_texts = {name: [text for _, _, text in blocks] for name, blocks in groups.items()}
    assert {name: texts for name, texts in named_texts.items() if texts} == {
        "docs/a.md": ["Text."],
        "docstrings of spell_jax/data": ["A.", "B."],
        "comments of spell_jax/data": ["Why."],
        "docstrings of spell_jax": ["C."],
        "docstrings of launch": ["D."],
    }


# ------------------------------------------------------------------------------------------- Faces


FACE = """Data.

Public names:
  a.f, a.CONSTANT: a function,
    and a number.
  b: a module.

Must not import: `policy` and rooms above.
"""


def face_violations(face: str, a: str = "CONSTANT: int = 1\ndef f(): ...\n") -> list[str]:
    """Return the violations of a room of two modules."""
    files = {"__init__": f'"""{face}"""\n' if face else "", "a": a, "b": ""}
    sources = [Source.parse(f"spell_jax/data/{name}.py", text) for name, text in files.items()]
    sources.append(Source.parse("spell_jax/runtime/mesh.py", ""))
    return [f"{violation.path}: {violation.text}" for violation in house.faces(sources)]


def test_face_of_a_room_is_accepted():
    assert not face_violations(FACE)
    assert not face_violations(FACE, "from x import y\nCONSTANT, z = 1, 2\nclass f: ...\n")


@pytest.mark.parametrize(
    ("face", "text"),
    [
        ("", "no docstring: say what the package is"),
        ("Data.", "a room without its interface: add 'Public names:' and 'Must not import:'"),
        (FACE.replace("Public", "Some"), "a room without its interface: add 'Public names:'"),
        (FACE.replace("Must not", "May"), "a room without its interface: add 'Public names:'"),
        (FACE.replace("CONSTANT", "LIMIT"), "'a.LIMIT': is not a name of the room"),
        (FACE.replace("b: a", "c: a"), "'c': is not a name of the room"),
        (FACE.replace("a.CONSTANT", "a.mesh"), "'a.mesh': is not a name of the room"),
        (FACE.replace("policy", "runtime"), "'runtime': the room does import it"),
        (FACE.replace("policy", "polcy"), "'polcy': is no room"),
    ],
)
def test_face_that_says_too_little_or_what_is_not_so_is_reported(face, text):
    code = "from spell_jax.runtime import mesh\nCONSTANT: int = mesh\ndef f(): ...\n"
    (violation,) = face_violations(face, code)
    assert violation.startswith(f"spell_jax/data/__init__.py: {text}")


def test_packages_within_rooms_and_beside_the_package_need_a_docstring_only():
    paths = ("launch/__init__.py", "launch/experiments/__init__.py")
    for path in (*paths, "spell_jax/algorithms/spell/__init__.py"):
        assert rules(path, "") == [(1, "face")]
        assert not rules(path, '"""SPELL."""\n')
    assert not rules("tests/learner/__init__.py", "")


# ----------------------------------------------------------------------------------------- Imports


def test_imports_may_only_go_to_lower_floors():
    below = {"spell_jax__policy__a": "", "spell_jax__runtime__a": "", "spell_jax__config": ""}
    down = "from spell_jax.policy import a\nfrom spell_jax.policy.a import b\n"
    assert not imported(**below, spell_jax__sampler__a=down)
    assert not imported(**below, spell_jax__train="from spell_jax import config\n")
    assert not imported(**below, spell_jax__policy__b="from spell_jax.policy import a\n")
    up = "import spell_jax.policy.a\n"
    assert imported(**below | {"spell_jax__runtime__a": up}) == [
        ("spell_jax/runtime/a.py", 1, "import")
    ]
    up = "x = 1\n\n\ndef f():\n    from spell_jax import config\n"
    assert imported(**below, spell_jax__algorithms__b=up) == [
        ("spell_jax/algorithms/b.py", 5, "import")
    ]


def test_sampler_and_learner_may_not_import_each_other():
    sources = {"spell_jax__sampler__a": "", "spell_jax__learner__a": ""}
    for here, there in (("sampler", "learner"), ("learner", "sampler")):
        importing_source = {f"spell_jax__{here}__b": f"from spell_jax.{there}.a import x\n"}
        assert imported(**sources, **importing_source) == [(f"spell_jax/{here}/b.py", 1, "import")]


def test_type_checking_and_relative_imports_are_checked():
    text = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ..policy.a import x\n"
    sources = {"spell_jax__policy__a": "", "spell_jax__data__a": text}
    assert imported(**sources) == [("spell_jax/data/a.py", 4, "import")]


@pytest.mark.parametrize("package", house.OUTSIDE)
def test_package_may_not_import_from_outside(package):
    text = f"import os\nfrom {package} import a\n"
    assert imported(spell_jax__train=text) == [("spell_jax/train.py", 2, "import")]
    assert not imported(launch__a=text.replace(package, "configs"))


def test_import_cycles_within_a_room_are_reported():
    first_text = "if 1:\n    from spell_jax.data import b\n"
    second_text = "def f():\n    from spell_jax.data.c import x\n"
    sources = {"spell_jax__data__a": first_text, "spell_jax__data__b": second_text}
    assert not imported(**sources, spell_jax__data__c="")
    back = "from spell_jax.data.a import y\n"
    assert imported(**sources, spell_jax__data__c=back) == [("spell_jax/data/a.py", 1, "circle")]
    assert imported(launch__a="from launch import b\n", launch__b="from launch.a import x\n") == [
        ("launch/a.py", 1, "circle")
    ]


def test_circles_are_components_with_several_nodes():
    edges = {"a": "b", "b": "ca", "c": "cd", "d": "ef", "e": "", "f": "d"}
    assert house.circles(edges) == [["a", "b"], ["d", "f"]]


# ------------------------------------------------------------------------------------ Code in data


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import cloudpickle as json",
        "from pickle import loads",
        "from multiprocessing import connection",
        "import multiprocessing.connection",
        "from jax.experimental import serialize_executable",
        "import importlib\nimportlib.import_module('dill')",
        "__import__('marshal')",
        "eval('1')",
        "def f(text):\n    exec(text)",
        "import torch\ntorch.load('a.pt', weights_only=True)",
        "from torch import load as read\nread('a.pt')",
        "import yaml\nyaml.load('a', Loader=yaml.SafeLoader)",
        "import pandas as pd\npd.read_pickle('a')",
        "import numpy as np\nnp.load('a.npz', allow_pickle=True)",
        "import numpy as np\ndef f(flag):\n    np.load('a.npz', allow_pickle=flag)",
        "import datasets\ndatasets.load_dataset('a', trust_remote_code=True)",
    ],
)
def test_readers_that_run_code_of_their_input_are_reported(text: str) -> None:
    for folder in ("spell_jax/runtime", "data_pipeline", "launch", "benchmarks"):
        (violation,) = violation_texts(f"{folder}/a.py", text)
        line = text.count("\n") + 1
        assert violation.startswith(f"{line}: code: ") and "use JSON, safetensors" in violation
    assert not violation_texts("tests/a.py", text)  # for attacks


def test_readers_that_run_no_code_are_accepted() -> None:
    text = """
import json, re
import numpy as np
import pickletools
import yaml
from spell_jax.runtime import pickled_page

def f(model, text):
    model.eval()
    yaml.safe_load(text)
    re.compile(text)
    np.load(text, allow_pickle=False)
    return json.loads(text)
"""
    assert not violation_texts("launch/a.py", text)


# ----------------------------------------------------------------------------------------- Lengths


def test_long_functions_and_modules_are_reported():
    def function(lines: int) -> str:
        return "@decorator\ndef f():\n" + "    x = 1\n" * (lines - 1)

    assert not violation_texts("launch/a.py", function(80))
    assert rules("launch/a.py", function(81)) == [(2, "length")]
    method = "class A:\n" + "".join(f"    {line}\n" for line in function(81).splitlines())
    assert rules("launch/a.py", method) == [(3, "length")]
    assert not violation_texts("launch/a.py", "x = 1\n" * 600)
    assert rules("launch/a.py", "x = 1\n" * 601) == [(1, "length")]
    assert not violation_texts("tests/a.py", "x = 1\n" * 601 + function(81))


# -------------------------------------------------------------------------------------------- Tree


@pytest.fixture(scope="module")
def checkout() -> tuple[list[Source], dict[str, str]]:
    """Return the Python files and the Markdown files of this checkout."""
    return house.read()


@pytest.fixture(scope="module")
def counts(checkout) -> dict[str, int | float]:
    """Return the measures of this checkout."""
    return house_measures.measure(*checkout)


def test_checkout_follows_the_house_rules(checkout):
    assert [str(violation) for violation in house.check(*checkout)] == []


def test_import_graph_stays_small(counts):
    # 14 folders, config.py, the entry points and api.py, which has 7 of the arrows: it calls what
    # the entry points call.
    assert counts["rooms"] <= 24 and counts["floors"] <= 10 and counts["arrows"] <= 100
    assert counts["circles between rooms"] == counts["circles between modules"] == 0


def test_comments_and_docs_keep_their_share(counts):
    assert counts["comments, percent of lines"] >= 4
    assert counts["words of docs"] <= 30_000


def test_reading_path_stays_short(counts):
    # SPELL's questioner, answers and groups have files of their own, because RLVR and preference
    # algorithms compose them: three files, with 110 lines of imports, constructors and docstrings.
    assert 20 <= counts["files of the reading path"] <= 28
    # 150 of these lines are names in `Attributes:` sections of public classes, which the API pages
    # show. Comments beside the fields would take fewer lines, but stay out of these pages. 60 lines
    # are switches between the paper's text and its public code. 50 lines of trainer/rollouts.py
    # name the place of a reward that is no number; they were a file beside the path.
    assert counts["lines of the reading path"] <= 5400


@pytest.mark.slow
def test_step_crosses_few_files_and_an_answer_few_classes():
    from tests import house_step

    record = house_step.record_step()
    files, classes = record.crossed_files(), record.classes_of_an_answer()
    parts = ("trainer/loop", "algorithms/spell/algorithm", "sampler/session", "learner/packing")
    assert {f"spell_jax/{part}.py" for part in parts} <= files.keys()
    assert "spell_jax/runtime/log/metrics.py" not in files
    assert {"Sample", "Reply", "SpellEpisode", "TrainGroup", "MicroBatch"} <= {*classes}
    # Three of these files are parts of SPELL that RLVR and preference algorithms compose too. Page
    # groups, for layers with a window, are a file of 94 lines, and 160 lines elsewhere. Sampling
    # meshes take 170 lines of these files; their thread and transfers are not crossed. Rewards by a
    # function of the user's take 45 lines, changed fields that make a checkpoint unfit 29, and the
    # validation before training 25.
    assert len(files) <= 74 and sum(files.values()) <= 14_650 and len(classes) <= 8


def test_floors_are_counted_along_the_longest_path():
    assert house_measures._floors({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3
    assert house_measures._floors({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == 2


def test_command_prints_violations_and_sets_the_exit_code(tmp_path):
    def run(*arguments: str, root: Path = ROOT) -> tuple[int, list[str]]:
        command = [sys.executable, "-m", "tests.house", *arguments]
        process = subprocess.run(command, cwd=root, capture_output=True, text=True)
        return process.returncode, process.stdout.splitlines()

    copy = tmp_path / "copy"
    (copy / "tests").mkdir(parents=True)
    for name in ("house.py", "house_measures.py", "house_rules.py", "paths.py"):
        (copy / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    (copy / "launch").mkdir()
    (copy / "launch" / "bad.py").write_text('"""Of nothing."""\n')
    (copy / "docs.md").write_text("Fine.\n\nSo many.\n")
    (copy / "CONTRIBUTING.md").write_text("Fine.\n")
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    assert run(root=copy) == (
        1,
        [
            "docs.md:3: phrase: 'So many': say N, at most N, every N",
            "launch/bad.py:1: opening: 'Of nothing.': begin with a noun or verb",
        ],
    )
    (copy / "docs.md").unlink()
    (copy / "launch" / "bad.py").unlink()
    assert run(root=copy) == (0, [])
    assert run("--other", root=copy)[0] == 2
    code, lines = run("--measure", root=copy)
    assert code == 0 and "       0  rooms" in lines
