"""Tests of the Python interface: spell_jax.train, load, evaluate and their kin, in one process."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import threading

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import spell_jax
from spell_jax import api
from spell_jax.configs import tiny
from spell_jax.evaluation import generation, runner
from spell_jax.rollout import text_model
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime.config import ConfigError
from spell_jax.runtime.files import paths
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.sampler.requests import Options
from tests import evaluating, noise
from tests.paths import ROOT

PROMPTS = ["city of Anna", "sales of Bert or costs of Carl"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise", max_positions=320)


@pytest.fixture(autouse=True)
def _one_device(monkeypatch):
    noise.use_one_device(monkeypatch)


def test_import_is_light_and_names_everything():
    heavy = "{'jax', 'numpy', 'absl', 'ml_collections'} & set(sys.modules)"
    program = f"import sys, spell_jax; print({heavy} or 'light', *sorted(dir(spell_jax)))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    light, *names = printed.stdout.split()
    assert light == "light" and set(spell_jax.__all__) <= set(names), printed
    for name in spell_jax.__all__:
        assert getattr(spell_jax, name) is not None
    with pytest.raises(AttributeError, match="module 'spell_jax' has no attribute 'trane'"):
        spell_jax.trane  # noqa: B018


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_an_imported_command_does_not_hide_the_function(name, monkeypatch):
    """Each attribute is a function before and after the first import of its module."""
    module = f"spell_jax.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert getattr(spell_jax, name) is getattr(api, name)
    command = importlib.import_module(module)
    assert command is sys.modules[module] and callable(command.main)
    assert getattr(spell_jax, name) is getattr(api, name)


def test_other_attributes_of_the_package_can_be_set(monkeypatch):
    monkeypatch.setattr(spell_jax, "load", print)
    assert spell_jax.load is print


def test_get_config_loads_what_the_flag_loads():
    config = spell_jax.get_config("tiny:rlvr", steps=3, **{"data.tiny.clusters": 7})
    expected = tiny.get_config("rlvr")
    expected.steps, expected.data.tiny.clusters = 3, 7
    assert config == expected and config.is_locked
    assert spell_jax.get_config(str(ROOT / "configs" / "tiny.py")) == tiny.get_config()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tinny", {}, r"^config = 'tinny': no such file; did you mean tiny\?"),
        ("tiny:rlvrr", {}, r"^config=.*: must be one of spell"),
        ("tiny", {"stepz": 1}, r"^stepz: no such field; did you mean steps\?$"),
        ("tiny", {"data.sourc": 1}, r"^data\.sourc: no such field; did you mean data\.source\?$"),
        ("tiny", {"steps": "many"}, r"^steps = 'many': must be int$"),
        ("tiny", {"steps": None}, r"^steps = None: must be int$"),
        ("tiny", {"steps": True}, r"^steps = True: must be int$"),
        ("tiny", {"policy.folder": None}, r"^policy\.folder = None: must be str$"),
        ("", {}, r"^config = '': no such file; must be a file or one of .*tiny"),
        (":", {}, r"^config = ':': no such file; must be a file or one of .*tiny"),
    ],
)
def test_get_config_names_a_mistake_with_its_remedy(name, fields, message):
    with pytest.raises(ValueError, match=message):
        spell_jax.get_config(name, **fields)


def test_ask_gives_the_answers_of_generate(folder):
    policy = spell_jax.load(folder, sizes=evaluating.SIZES)
    options = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 5}
    replies = policy.ask(PROMPTS, 3, seed=4, **options)
    records = [{"prompt": text} for text in PROMPTS]
    rows = generation.answer(
        TextModel(folder, sizes=evaluating.SIZES), records, PROMPTS, 3, options, 4
    )
    assert [list(reply.texts) for reply in replies] == [row["answers"] for row in rows]
    logprobs = [[sample.logprob for sample in reply.samples] for reply in replies]
    assert logprobs == [row["logprobs"] for row in rows]
    # The template is applied, once.
    assert list(replies[0].prompt) == list(policy.model.encode(PROMPTS[0]).ids)


def test_ask_takes_one_text_and_all_options(folder, monkeypatch):
    calls = []

    def ask(prompts, n, options, keys):
        calls.append((prompts, n, options, keys.tolist()))
        return ((i, f"reply {i}") for i in reversed(range(len(prompts))))

    policy = spell_jax.load(folder)
    monkeypatch.setattr(policy.model, "ask", ask)
    assert policy.ask(PROMPTS, seed=1) == ["reply 0", "reply 1"]
    options = {"temperature": 0.5, "top_p": 0.8, "max_tokens": 3}
    assert policy.ask(PROMPTS[0], 2, stop=["END"], **options) == ["reply 0"]
    assert policy.ask(PROMPTS[0], 2, stop="END", **options) == ["reply 0"]
    assert policy.ask([]) == []
    encoded = [policy.model.encode(text) for text in PROMPTS]
    defaults = Options(temperature=0.7, top_p=0.95, max_tokens=256)
    changed = Options(temperature=0.5, top_p=0.8, max_tokens=3, stop_strings=("END",))
    expected = [(encoded, 1, defaults), *[(encoded[:1], 2, changed)] * 2]
    assert [call[:3] for call in calls[:3]] == expected
    keys = [key for call in calls for key in call[3]]
    assert len({*map(tuple, keys)}) == 3  # keys depend on the place and on the seed


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("x", {"n": 0}, "^n = 0: must be at least 1"),
        ("x", {"temperature": -1.0}, "^temperature = -1.0: must be at least 0"),
        ("x", {"seed": -1}, "^seed = -1: must be a whole number from 0"),
        (["x", 3], {}, r"^prompts\[1\] = 3: must be UTF-8 text$"),
        ("\ud800", {}, r"^prompts\[0\] = '\\ud800': must be UTF-8 text$"),
        (b"hi", {}, "^prompts = b'hi': must be a text, or texts$"),
        (["x", "a b c " * 199], {}, r"^prompts\[1\]: has \d+ tokens, must have at most 256, which"),
        (
            "a b c " * 199,
            {"max_tokens": 320},
            r"^prompts\[0\]: has \d+ tokens, must have at most 0,",
        ),
        ("x", {"n": 1.5}, "^n = 1.5: must be int$"),
        ("x", {"n": True}, "^n = True: must be int$"),
        ("x", {"max_tokens": 1.5}, "^max_tokens = 1.5: must be int$"),
        ("x", {"temperature": "hot"}, "^temperature = 'hot': must be float$"),
        ("x", {"seed": 1.5}, "^seed = 1.5: must be int$"),
        ("x", {"stop": None}, "^stop = None: must be a text, or texts$"),
        ("x", {"stop": ""}, "^stop = '': must be a text, or texts, that are not empty$"),
    ],
)
def test_ask_names_a_mistake(folder, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        spell_jax.load(folder).ask(prompts, **{"max_tokens": 64} | options)


def test_ask_names_the_largest_max_tokens(folder, monkeypatch):
    policy = spell_jax.load(folder)
    with pytest.raises(ValueError, match=r"^max_tokens = 1000000000: must be at most ") as raised:
        policy.ask("x", max_tokens=10**9)
    largest = int(re.findall(r"at most (\d+)", str(raised.value))[0])
    monkeypatch.setattr(policy.model, "ask", lambda *arguments: [(0, "reply")])
    assert policy.ask("x", max_tokens=largest) == ["reply"]
    with pytest.raises(ValueError, match=r"^prompts"):
        policy.ask("x", max_tokens=largest + 1)


def test_ask_takes_numbers_of_numpy(folder, monkeypatch):
    calls = []
    policy = spell_jax.load(folder)
    monkeypatch.setattr(policy.model, "ask", lambda *arguments: calls.append(arguments) or [])
    numbers = {"temperature": np.float32(0.5), "max_tokens": np.int64(3), "seed": np.uint32(4)}
    policy.ask("x", np.int32(2), **numbers)
    ((_, n, options, _),) = calls
    assert (n, options) == (2, Options(0.5, 0.95, max_tokens=3))


def test_load_names_a_mistake(folder, tmp_path):
    for options, message in [({"dtype": "f4"}, "dtype = 'f4'"), ({"thinking": "no"}, "thinking =")]:
        with pytest.raises(ValueError, match=f"^{message}.*: must be one of '"):
            spell_jax.load(folder, **options)
    with pytest.raises(FileNotFoundError, match="policy = 'nowhere': no such folder"):
        spell_jax.load("nowhere")
    with pytest.raises(ValueError, match=r"^folder = None: must name a folder"):
        spell_jax.load(None)  # type: ignore[arg-type]
    for name in ("config.json", paths.RUN_FILE):
        (tmp_path / name).write_text("{}")
    message = f"^policy = '{tmp_path}': is a run's workdir; must be {tmp_path}/policy"
    with pytest.raises(ValueError, match=f"{message}$"):
        spell_jax.load(tmp_path)
    for name in ("policy", "best"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{message} or {tmp_path}/best$"):
        spell_jax.load(tmp_path)


def test_evaluate_runs_the_commands_evaluation(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.registry, "load", evaluating.load)
    fields = {"max_input": evaluating.LIMITS, "samples": 2, "max_tokens": 4, "seed": 1}
    fields["sizes"] = evaluating.SIZES
    summary = spell_jax.evaluate(folder, ["text", "number"], tmp_path / "out", **fields)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["policy"], summary["samples"], summary["seed"]) == ("noise", 2, 1)
    # The same evaluation is done, and nothing is sampled.
    monkeypatch.setattr(text_model, "Sampler", None)
    resumed = spell_jax.evaluate(str(folder), ["text", "number"], str(tmp_path / "out"), **fields)
    assert resumed == summary
    with pytest.raises(ValueError, match=r"^sample: no such field, must be one of answer_format, "):
        spell_jax.evaluate(folder, "text", tmp_path / "other", sample=3)


def test_evaluate_takes_no_endpoint_beside_a_policy(folder, tmp_path):
    with pytest.raises(ValueError, match=r"^endpoint: no such field"):
        spell_jax.evaluate(folder, "text", tmp_path, endpoint="http://x/v1", model="m")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": "2"}, "^samples = '2': must be int$"),
        ({"temperature": "hot"}, "^temperature = 'hot': must be float$"),
        ({"max_input": None}, r"^max_input\[0\] = None: must be int$"),
        ({"data": 3}, "^data = 3: must be str$"),
        ({"dtype": "f4"}, "^dtype = 'f4': must be one of "),
        ({"thinking": "no"}, "^thinking = 'no': must be one of "),
        ({"benchmarks": None}, "^benchmarks = None: must be a text, or texts$"),
        ({"policy": None}, "^policy = None: must name a folder$"),
        ({"out": None}, "^out = None: must name a folder$"),
    ],
)
def test_evaluate_names_a_mistake(fields, message, folder, tmp_path):
    fields = {"policy": folder, "benchmarks": "text", "out": tmp_path} | fields
    with pytest.raises(ValueError, match=message):
        spell_jax.evaluate(**fields)


@pytest.mark.parametrize(
    ("config", "workdir", "message"),
    [
        ("tiny", None, "^workdir = None: must name a folder$"),
        ("tiny", "x\0y", r"^workdir = 'x\\x00y': must name a folder$"),
        ("tiny", "s3://x/y", "^workdir = 's3://x/y': must be a local folder, or gs://BUCKET/PATH$"),
        (None, "run", "^config = None: must be a config of get_config, or its name$"),
    ],
)
def test_a_run_names_a_wrong_argument(config, workdir, message):
    for function in (spell_jax.train, spell_jax.fine_tune):
        with pytest.raises(ValueError, match=message):
            function(config, workdir)


def test_relative_folders_stay_when_the_current_folder_changes(folder, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(api.loop, "train", lambda config, workdir: workdir)
    monkeypatch.setattr(api.supervised, "fine_tune", lambda config, workdir: workdir)
    monkeypatch.setattr(api.runner, "evaluate", lambda config, out, **_: calls.append(out))
    monkeypatch.chdir(tmp_path)
    for function in (spell_jax.train, spell_jax.fine_tune):
        assert str(function("tiny", "run")) == f"{tmp_path}/run"
    spell_jax.evaluate(folder, "text", "out")
    assert calls == [f"{tmp_path}/out"]
    monkeypatch.chdir(folder.parent)
    policy = spell_jax.load(folder.name)
    monkeypatch.chdir(tmp_path)
    assert policy.model.fingerprint()  # reads the weights


def test_empty_folder_is_refused(folder):
    with pytest.raises(ValueError, match=r"^workdir = '': must name a folder"):
        spell_jax.train("tiny", "")
    with pytest.raises(ValueError, match=r"^out = ' ': must name a folder"):
        spell_jax.evaluate(folder, "text", " ")


def test_config_mistakes_are_one_exception(tmp_path):
    config = spell_jax.get_config("tiny")
    config.steps, config.sampler.top_p = 0, 2.0
    with pytest.raises(ConfigError) as error:
        spell_jax.train(config, tmp_path / "run")
    assert str(error.value).splitlines() == list(error.value.mistakes)
    assert len(error.value.mistakes) == 2 and not (tmp_path / "run").exists()


def test_a_run_outside_of_the_main_thread_is_refused(tmp_path):
    errors = []

    def train() -> None:
        try:
            spell_jax.train("tiny", tmp_path)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert errors == ["a run must be started in the main thread, which handles SIGTERM"]


@pytest.mark.slow
def test_train_resumes_and_leaves_no_signal_handler(folder, tmp_path, monkeypatch):
    """Run two steps in two calls; then the policy of the run answers."""
    noise.give_meaning(monkeypatch)
    noise.skip_plots(monkeypatch)

    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    before = handlers()
    for steps in (1, 2):
        config = noise.small_config(folder, steps=steps, validate_every=0, checkpoint_every=1)
        workdir = spell_jax.train(config, tmp_path / "run")
        assert workdir == paths.open_folder(tmp_path / "run") and handlers() == before
        assert [line["step"] for line in read_metrics(workdir)] == list(range(1, steps + 1))
    policy = spell_jax.load(workdir / "policy", sizes=evaluating.SIZES)
    [reply] = policy.ask("city of Anna", n=2, max_tokens=4)
    assert len(reply.texts) == 2


@pytest.mark.slow
def test_fine_tune_returns_the_policys_folder(tmp_path):
    fields = {"steps": 1, "rows_per_step": 4, "source": "tiny", "optimizer.warmup_steps": 0}
    config = spell_jax.get_config("tiny_eapo_policy", **fields)
    policy = spell_jax.fine_tune(config, tmp_path / "run")
    assert policy == paths.open_folder(tmp_path / "run" / "policy")
    assert spell_jax.load(policy).model.config.layers > 0


@pytest.mark.slow
def test_python_of_the_page_on_fine_tuning_runs(tmp_path, monkeypatch):
    """The page's Python, on the rows of its table; tests/slow/test_doc_blocks.py runs the shell."""
    text = (ROOT / "docs" / "howto" / "fine_tune.md").read_text()
    [cell], [rows] = (
        re.findall(rf"```{name}\n(.*?)```", text, re.S) for name in ("python", "json")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows)
    names: dict = {}
    exec(cell, names)  # of this repository
    assert json.loads((tmp_path / "runs/tuned_again/config.json").read_text())["steps"] == 1
    assert names["policy"].model.config.layers > 0


@pytest.mark.slow
def test_cell_of_the_quickstart_runs_in_a_notebook(tmp_path, monkeypatch):
    """The page's cell in a kernel of Jupyter, with fewer questions, shows progress and answers."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    [cell] = re.findall(r"```python\n(.*?)```", text, re.S)
    assert cell.count("\n") <= 10
    small = {"questions": 4, "generation_batch": 4, "group_size": 2}
    lines = [f"config.algorithm.{name} = {value}" for name, value in small.items()]
    lines += ["config.evaluate, config.validate_every, config.sampler.slots = False, 0, 16"]
    smaller = cell.replace("steps=20", "steps=1").replace("n=8", "n=2")
    smaller = smaller.replace("workdir = ", "\n".join([*lines, "workdir = "]))
    assert smaller.count("steps=1") == smaller.count("n=2") == 1
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(smaller)])
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as in a notebook
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    shown = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    assert "step 0/1" in shown and "policy    " in shown and shown.rstrip().endswith("]"), shown
