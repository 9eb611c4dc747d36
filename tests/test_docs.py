"""Tests of the documentation: every command parses, links lead somewhere, numbers are as measured.

Commands are not run: their modules and flags must exist, and their configs must pass the checks
that need no device. A file that a command names need not exist.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from benchmarks import __main__ as benchmarks
from docs.tools import commands, measurements, reference
from spell_jax.algorithms import registry
from spell_jax.config import ExtraModelConfig, RunConfig, SupervisedConfig, read, read_supervised
from spell_jax.runtime import entry
from tests import doc_commands
from tests.paths import ROOT

PAGES = measurements.pages()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TEMPLATES = measurements.read_templates()
MODULES = commands.find()
EXTERNAL = frozenset(["pip", "python3", "python3.11", "zcat", "jq", "mkdir", "cp", "cat", "echo"])
RUNS = ("spell_jax.train", "spell_jax.sft")  # modules whose configs are checked whole
# Fields that may name a file, a folder or a module that is not there.
FILES = r"folder|source|questions|validation|tokenizer|init_from|algorithm\.reward"
ABSENT = re.compile(rf"[\w.]*({FILES}) = '.+?'")


def read_config(arguments: list[str]) -> object:
    """Read the config of --config and its overrides, as the entry points parse them."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=["x", *arguments])
    entry.parse_flags(["x", *arguments], values, values)
    return values["config"].value


def check_run(module: str, config) -> None:
    """Check a whole config; files that the config names may be missing."""
    try:
        (read if module == "spell_jax.train" else read_supervised)(config)
    except (FileNotFoundError, ValueError) as error:
        if not ABSENT.match(str(error)):
            raise


def check_flags(module: str, words: list[str]) -> None:
    """Check the flags of a command of the repository."""
    words = words[: words.index("--")] if "--" in words else words
    flag_words = [word for word in words if word.startswith("--")]
    if module == "benchmarks":
        flag_words = [word for word in flag_words if not word.startswith(("--save=", "--policy="))]
        flag_words = [re.sub(r"=[A-Z]+$", "=1", word) for word in flag_words]  # a number, N
        benchmarks.parse([words[0], *flag_words])
        return
    flag_names = {flag.name for flag in MODULES[module].flags}
    for word in flag_words:
        name = word[2:].partition("=")[0]
        assert name.startswith("config.") or name in flag_names, f"{module} has no flag --{name}"
    config_flags = [word for word in flag_words if word.startswith("--config")]
    if "config" in flag_names and any(
        re.match(r"--config=(configs|launch/experiments/\w+)/[a-z]", word) for word in config_flags
    ):
        config = read_config(config_flags)
        if module in RUNS:
            check_run(module, config)


def check(words: tuple[str, ...]) -> None:
    """Check one command; a wrong command raises AssertionError or the error of its parser."""
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        for target in words[1:]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target
    elif program == "python" and words[1] == "-m":
        # [--flag] is an optional flag, "..." stands for flags that a page has shown before.
        arguments = [
            word.strip("[]").replace("=URL", "=http://localhost/v1").replace("gs://", "gs/")
            for word in words[3:]
        ]
        arguments = [word for word in arguments if word not in ("--config...", "...")]
        if words[2] not in ("pytest", "pip"):
            assert words[2] in MODULES, f"no such command: python -m {words[2]}"
            # Options of Apache Beam's runners go through.
            is_beam = words[2] == "data_pipeline.build" and any(
                "--runner" in argument for argument in arguments
            )
            if not is_beam and not any(argument.endswith("...") for argument in arguments):
                check_flags(words[2], arguments)
    elif program.startswith("spell-"):
        modules = {f"spell_jax.{program[6:]}", f"launch.{program[6:]}"}
        assert modules & MODULES.keys(), program
    else:
        assert program in EXTERNAL, f"unknown program: {program}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_parse(page: pathlib.Path):
    for command in doc_commands.find(page):
        try:
            check(command.words)
        except (Exception, SystemExit) as error:
            pytest.fail(
                f"{command.page}: {' '.join(command.words)}\n{type(error).__name__}: {error}"
            )


def test_compared_evaluations_have_the_same_settings():
    """Rows of one table differ in the policy alone: not in benchmarks, limits, context or judge."""
    compared = 0
    for page in PAGES:
        settings: dict[str, set[str]] = {}  # output folder -> all other flags
        for command in doc_commands.find(page):
            if command.words[1:3] != ("-m", "spell_jax.evaluate") or not command.in_block:
                continue
            flags = dict(word.split("=", 1) for word in command.words[3:] if "=" in word)
            same = {
                f"{name}={value}"
                for name, value in flags.items()
                if name not in ("--policy", "--workdir", "--name", "--out", "--compare")
            }
            for folder in filter(None, flags.get("--compare", "").split(",")):
                assert same == settings[folder], page
                compared += 1
            settings[flags.get("--out", "")] = same
    assert compared


NEEDS = frozenset(
    [
        *("minutes", "data", "a model", "a model and documents", "installation", "a config"),
        *("an accelerator", "an endpoint", "a cluster of machines"),
    ]
)


def test_every_block_is_run_or_says_what_it_needs():
    """tests/slow/test_doc_blocks.py runs those that need nothing."""
    needs = [need for page in PAGES for _, need in doc_commands.marked_blocks(page.read_text())]
    assert set(needs) == NEEDS | {""} and needs.count("") >= 10
    for page in PAGES[1:]:
        text = page.read_text()
        marks = re.findall(r"<!-- needs: (.*) -->", text)
        needs = [need for _, need in doc_commands.marked_blocks(text) if need]
        assert marks == needs, f"{page}: a mark is not before a block"


def test_readme_has_no_comments():
    """README.md is read as text, too: on GitHub's front page, on PyPI, in an editor."""
    text = PAGES[0].read_text()
    assert PAGES[0].name == "README.md" and "<!--" not in text
    needs = [need for _, need in doc_commands.marked_blocks(text)]
    assert sorted(filter(None, needs)) == sorted(doc_commands.README_NEEDS.values())


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_in_blocks(page: pathlib.Path):
    plain = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert not re.findall(r"^(?:python -m|pip install|make) .*", plain, re.M)


def test_wrong_commands_are_found():
    """The check fails for a wrong module, flag, field and value."""
    train = ("python", "-m", "spell_jax.train", "--config=configs/tiny.py")
    for words in (
        ("python", "-m", "spell_jax.trian"),
        (*train, "--wrokdir=x"),
        (*train, "--config.algorithm.group_sice=4"),
        (*train, "--config.algorithm.group_size=1"),
        ("python", "-m", "benchmarks", "update", "--promt=1"),
        ("make", "dmeo"),
    ):
        with pytest.raises((AssertionError, ValueError, SystemExit, flags.Error)):
            check(words)


def test_commands_of_earlier_commits_are_not_checked():
    text = "`python -m x` of that\ncommit, `python -m y` of commit 3a12152 and `python -m z`"
    assert doc_commands.INLINE.findall(text) == ["python -m z"]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=[*NAMES, "CONTRIBUTING.md"]
)
def test_links_lead_somewhere(page: pathlib.Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.is_file(), f"{target}: link to a source file; the site links to the reference"
        assert not anchor or anchor in anchors(path.read_text()), target


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f"{page.relative_to(ROOT / 'docs')}\n" in text, page


def test_howto_pages_begin_with_a_command():
    for page in (ROOT / "docs" / "howto").glob("*.md"):
        opening = page.read_text().split("\n", 2)[2].strip()
        assert re.match(r"(Run|Open) ", opening), page.name


# ----------------------------------------------------------------------------------------- Numbers


@pytest.mark.parametrize("name", TEMPLATES)
def test_numbers_are_as_measured(name: str):
    text = (ROOT / name).read_text()
    refreshed = measurements.refresh(text, TEMPLATES[name], measurements.read())
    assert refreshed == text, "python -m docs.tools.measurements"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_numbers_have_no_comments(page: pathlib.Path):
    assert not re.search(r"\d<!--", page.read_text()), "list the text in pages.toml"


def test_every_measurement_is_on_a_page():
    texts = [text for name in NAMES for text in TEMPLATES.get(name, ())]
    used = {name.split(".")[0] for name in measurements.names(texts)}
    unused = {name for name in measurements.read() if not name.startswith("curve_")} - used
    assert not unused


@pytest.mark.parametrize(
    ("page", "template", "expected"),
    [
        ("It is .68.", "is {a.x}.", "It is .71."),
        ("+1 and\n3.20", "{a.n} and {a.x}", "+12 and\n0.71"),
        ("from -.1, to", "from {a.y.z},", "from -.2, to"),
        ("| 1,024 |\n| 1,024 | m |", "| {a.m} | m |", "| 1,024 |\n| 2,048 | m |"),
    ],
)
def test_numbers_keep_their_format(page, template, expected):
    values = {"x": 0.71, "n": 12, "y": {"z": -0.2}, "m": 2048}
    assert measurements.refresh(page, [template], {"a": {"values": values}}) == expected


@pytest.mark.parametrize(
    ("page", "template", "message"),
    [
        ("It is .5.", "is {a.z}", r"a\.z: no such number"),
        ("It was .5.", "is {a.x}", "'is {a.x}' is 0 times in the page, must be once"),
        ("Is .5 is .6.", "s {a.x}", "is 2 times in the page"),
        ("It is .5.", "is {a.n}", r"a\.n: no such number"),
        ("It is .5.", "is {a.b}", r"a\.b: no such number"),
        ("It is .5.", "is {a}", r"'is {a}' has no number, must have a {FILE\.KEY}"),
    ],
)
def test_texts_are_in_the_page_once(page, template, message):
    with pytest.raises(ValueError, match=message):
        values = {"x": 0.5, "n": float("nan"), "b": True}
        measurements.refresh(page, [template], {"a": {"values": values}})


MEASUREMENT = (
    '{"kind": "measured", "commit": "", "machine": "", "command": "", "values": {"x": 0.5}}'
)
PAGES_TOML = '"docs/a.md" = ["is {a.x}"]'


def write_pages(root: pathlib.Path, page: str, measurement: str, toml: str) -> pathlib.Path:
    """Write a page, its measurement and the list of its numbers; return the page's path."""
    folder = root / "docs" / "measurements"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(measurement)
    (folder / "pages.toml").write_text(toml)
    (root / "docs" / "a.md").write_text(page)
    return root / "docs" / "a.md"


def test_numbers_are_written_into_pages_or_only_compared(tmp_path, capsys):
    page = write_pages(tmp_path, "It\nis .6.\n", MEASUREMENT, PAGES_TOML)
    assert not measurements.refresh_pages(tmp_path, is_check=True)
    assert page.read_text() == "It\nis .6.\n"
    assert measurements.refresh_pages(tmp_path, is_check=False)
    assert page.read_text() == "It\nis .5.\n"
    assert capsys.readouterr().out == 2 * "docs/a.md: 'is .6.' -> 'is .5.'\n"
    assert measurements.refresh_pages(tmp_path, is_check=True)


@pytest.mark.parametrize(
    ("measurement", "toml", "line"),
    [
        ("{", PAGES_TOML, r".*/a\.json: Expecting .*, must be JSON"),
        ("[]", PAGES_TOML, r".*/a\.json: must have the fields \['command', "),
        (MEASUREMENT.replace("measured", "guess"), PAGES_TOML, r".*/a\.json: .*, kind of \('mea"),
        (MEASUREMENT, '"docs/a.md" = [', r".*/pages\.toml: Invalid value"),
        (MEASUREMENT, '"docs/a.md" = "is {a.x}"', r'.*/pages\.toml: "docs/a\.md" = .*an array'),
        (MEASUREMENT, '"docs/b.md" = ["is {a.x}"]', r"docs/b\.md: .*No such file or directory"),
    ],
)
def test_mistakes_in_the_files_of_numbers_are_one_line(measurement, toml, line, tmp_path, capsys):
    write_pages(tmp_path, "It is .5.", measurement, toml)
    assert not measurements.refresh_pages(tmp_path, is_check=False)
    assert re.fullmatch(f"{line}.*\n", capsys.readouterr().out)


def test_reference_has_every_field():
    """The page of the config shows the `Attributes:` of the dataclasses, one field an entry."""
    page = reference.config_page()
    sections = list(reference.config_sections().values())
    for algorithm in registry.ALGORITHMS.values():
        assert algorithm.config in sections
    for config in (RunConfig, SupervisedConfig, ExtraModelConfig):
        assert config in sections
    nested = {type(field.default) for field in dataclasses.fields(RunConfig)}
    assert {kind for kind in nested if dataclasses.is_dataclass(kind)} <= {*sections}
    for section in sections:
        assert f"::: {section.__module__}.{section.__qualname__}\n" in page
        texts = [inspect.cleandoc(base.__doc__ or "") for base in section.__mro__[:-1]]
        entries = re.findall(r"^  (\w+): ", "\n".join(texts), re.M)
        missing = {field.name for field in dataclasses.fields(section)} - set(entries)
        assert not missing, section.__name__


def test_reference_has_every_flag():
    page = reference.commands_page()
    assert "\n| `--lm_eval_tasks` |" in page
    assert "\n| `--slots` | `512` |" in page and "\n| `--seeds` | `0,1,2,3,4` |" in page


def test_reference_has_the_public_names_of_each_room():
    pages = reference.room_pages()
    rooms = {path.parent.name for path in (ROOT / "spell_jax").glob("*/__init__.py")}
    assert pages.keys() == rooms - {"configs"}
    assert "::: spell_jax.trainer.loop.train\n" in pages["trainer"]
    assert "- `advantages.group_advantages`: rewards" in pages["learner"]
    assert "::: spell_jax.learner.packing.pack\n" in pages["learner"]  # second name of an entry
    assert "::: spell_jax.question_sets.facts\n" in pages["question_sets"]  # a whole module
    assert "LossConfig" not in pages["learner"].partition(":::")[2], "is on the page of the config"


@pytest.mark.slow
def test_site_builds(tmp_path):
    """Strict: mkdocs fails for a dead link, a missing anchor, a page outside the navigation."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}"]
    address = "https://example.org/lab/spell_jax"
    environment = {**os.environ, "REPOSITORY_URL": address}
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "sampler.kv_cache_tokens" in (tmp_path / "long_context.html").read_text()
    config = (tmp_path / "reference" / "config.html").read_text()
    assert 'id="spell_jax.config.read"' in config
    assert "<code>kv_cache_tokens</code>" in config and "<code>clip_high</code>" in config
    learner = (tmp_path / "reference" / "api" / "learner.html").read_text()
    assert 'id="spell_jax.learner.learner.Update.advance"' in learner
    assert "<code>eapo-figure-10</code>" in (tmp_path / "experiments.html").read_text()
    # Equations are MathML; none is left as source.
    equations = {}
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        equations[page.stem] = text.count("<math ")
        assert "$$" not in text and "$`" not in text and "language-math" not in text, page
    sources = (ROOT / "docs" / "algorithm.md").read_text()
    assert equations["algorithm"] == sources.count("```math\n") + sources.count("`$") >= 8
    # The repository's address.
    assert f"{address}/blob/main/LICENSE" in (tmp_path / "index.html").read_text()
    assert f"{address}/edit/main/CONTRIBUTING.md" in (tmp_path / "contributing.html").read_text()
    assert address in (tmp_path / "colab.ipynb").read_text()


def test_readme_is_short():
    text, citation, _ = (ROOT / "README.md").read_text().partition("## Citation")
    assert citation and len(text.split()) <= 1000


def test_lower_bounds_are_the_oldest_tested_versions():
    """The constraints of `make test-oldest` are the lower bounds of setup.py."""
    setup = (ROOT / "setup.py").read_text()
    setup = setup.replace("{JAX_RANGE}", re.findall(r'JAX_RANGE = "(.*)"', setup)[0])
    required = setup[setup.index("install_requires") : setup.index("extras_require")]
    required += "".join(re.findall(r"^(?:JUDGE|TFDS) = .*", setup, re.M))
    bounds = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', required))
    text = (ROOT / "requirements" / "oldest.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.M))
    assert pins.pop("jaxlib") == pins["jax"] and pins == bounds
