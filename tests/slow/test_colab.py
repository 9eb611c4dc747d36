"""Tests of docs/colab.ipynb: stored without outputs, and every cell runs."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import types
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from spell_jax.launch import random_policy
from spell_jax.policy.model import find_folder
from spell_jax.runtime.log.metrics import read_metrics
from tests.paths import ROOT

NOTEBOOK = ROOT / "docs" / "colab.ipynb"
UPDATES = 2
SMALL = ("hidden_size=64", "num_hidden_layers=2", "intermediate_size=128", "head_dim=16")
# The real policy's part, of the size that a test can afford: SmolLM2's tokenizer, and few random
# weights. Its own weights would take four minutes; test_smollm2.py has them.
REAL = """
REAL_ROWS = 8
REAL_WRITTEN = 3
REAL_UPDATES = 1
REAL_QUESTIONS = 1
REAL_FLAGS = [
    "--config.algorithm.generation_batch=3",
    "--config.algorithm.questioner.questions_per_cluster=1",
    "--config.algorithm.group_size=2",
    "--config.sampler.max_tokens=24",
]
SQUAD_ADDRESS = ""
"""


def read() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_notebook_is_valid_and_stored_without_outputs():
    notebook = read()
    nbformat.validate(notebook)
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    for cell in code_cells(notebook):
        assert not cell.outputs and cell.execution_count is None, cell.id
    for cell in notebook.cells:
        assert not re.search(r"(?<![\w./:}])/\w", cell.source), f"{cell.id}: an absolute path"


def test_install_cell_finds_something_to_install(tmp_path, monkeypatch):
    """A repository or a wheel that is named, lies beside the notebook, or is uploaded in Colab."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    cell: dict[str, Any] = {}
    exec(code_cells(read())[0].source, cell)
    find = cell["find_source"]
    with pytest.raises(ValueError, match="SOURCE = '': must be the address"):
        find()
    files = types.SimpleNamespace(upload=lambda: {"spell_jax-1.whl": b""})
    monkeypatch.setitem(sys.modules, "google.colab", types.SimpleNamespace(files=files))
    assert find() == "spell_jax-1.whl"
    (tmp_path / "spell_jax-2.whl").write_text("")
    assert find() == str(tmp_path / "spell_jax-2.whl")
    for source, installed in (("a/x.whl", "a/x.whl"), ("https://x/y", "git+https://x/y")):
        cell["SOURCE"] = source
        assert find() == installed


@pytest.fixture(scope="module")
def executed(tmp_path_factory, spell_data):
    """Execute the notebook with smaller parameters; return (executed notebook, run folder)."""
    workdir = tmp_path_factory.mktemp("colab")
    notebook = copy.deepcopy(read())
    [index] = [
        i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())
    ]
    squad = spell_data / "published" / "squad11" / "dev-v1.1.first24.json"
    smollm2 = find_folder("smollm2")
    small = tmp_path_factory.mktemp("policy") / "small"
    random_policy.make(smollm2 / "config.json", smollm2, small, SMALL)
    smaller = f"UPDATES = {UPDATES}\nQUESTIONS = 2\nWORKDIR = {str(workdir)!r}{REAL}"
    smaller += f"REAL_POLICY = {str(small)!r}\nSQUAD = {str(squad)!r}"
    assert names(smaller) == names(notebook.cells[index].source)
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(smaller))
    client = NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": NOTEBOOK.parent}}
    )
    with pytest.MonkeyPatch.context() as patch:
        # One device, as in a notebook; the kernel is a process of its own.
        patch.setenv("XLA_FLAGS", "")
        client.execute()
    return notebook, workdir


def names(source: str) -> set[str]:
    """Return the variables that are assigned at the beginning of a line."""
    return set(re.findall(r"^(\w+) = ", source, re.MULTILINE))


def outputs_of(notebook: nbformat.NotebookNode, words: str) -> dict[str, str]:
    """Return the output of the only cell with these words: printed text, the rest by MIME type."""
    [cell] = [cell for cell in code_cells(notebook) if words in cell.source]
    outputs = {"printed": ""}
    for output in cell.outputs:
        if output.output_type == "stream":
            outputs["printed"] += output.text
        else:
            outputs |= output.data
    return outputs


@pytest.mark.long
def test_notebook_shows_the_cluster_and_every_roles_prompt(executed):
    documents = outputs_of(executed[0], "make_clusters(")["printed"].splitlines()
    assert len(documents) == 8 and all(re.match(r"- \w+ \w+ \d+ \d+ \w+$", d) for d in documents)
    printed = outputs_of(executed[0], "prompts.verifier(")["printed"]
    of_role = dict(
        zip(*[iter(re.split(r"^--- (\w+)\n", printed, flags=re.M)[1:])] * 2, strict=True)
    )
    assert list(of_role) == ["questioner", "responder", "verifier"]
    shown = [sum(text in of_role[role] for text in documents) for role in of_role]
    assert shown == [2, 8, 0]
    assert "Oslo" in of_role["verifier"] and "Fjordton" in of_role["verifier"]


@pytest.mark.long
def test_notebook_trains_the_policy(executed):
    notebook, workdir = executed
    printed = outputs_of(notebook, '"--config=configs/tiny.py"')["printed"]
    assert f"step {UPDATES}/{UPDATES}" in printed and str(workdir / "policy") in printed
    records = read_metrics(workdir)
    assert [record["step"] for record in records] == list(range(1, UPDATES + 1))
    assert all(record["train/empty_update"] == 0 for record in records)
    assert all("eval/responder" in record for record in records)


@pytest.mark.long
def test_notebook_plots_the_metrics(executed):
    assert outputs_of(executed[0], "plt.show()")["image/png"]


@pytest.mark.long
def test_notebook_shows_accuracies_before_and_after(executed):
    rows = rows_of(outputs_of(executed[0], "responder accuracy, by documents")["text/markdown"])
    assert [row[0] for row in rows] == ["3", "8", "12", "16"]
    for _, before, after, gain in rows:
        difference = float(after.split()[0]) - float(before.split()[0])
        assert abs(difference - float(gain)) < 0.015  # numbers are rounded to two digits


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of each row below the head of a Markdown table."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


@pytest.mark.long
def test_notebook_shows_answers_of_both_policies(executed):
    output = outputs_of(executed[0], "answers_before, answers_after, strict")
    rows = rows_of(output["text/markdown"])
    assert len(rows) == 8 and all(len(row) == 4 and all(row) for row in rows)
    answers = {answer for row in rows for answer in row[2:]}
    assert len(answers) > 4  # answers differ between questions


@pytest.mark.long
def test_notebook_shows_questioner_and_verifier_outputs(executed):
    printed = outputs_of(executed[0], "proposal, verdict = ask(")["printed"]
    assert re.search(r'^questioner: .*\{"question":"', printed, re.MULTILINE)
    assert re.search(r"^verifier: .*\[\[(YES|NO)\]\]", printed, re.MULTILINE)


@pytest.mark.long
def test_notebook_trains_a_real_policy(executed):
    """A format stage and self-distillation, of one update each, on articles of SQuAD."""
    notebook, workdir = executed
    for part in ("start", "distillation"):
        assert [record["step"] for record in read_metrics(workdir / "real" / part)] == [1]
        assert (workdir / "real" / part / "policy" / "model.safetensors").exists()
    assert "| question |" in outputs_of(notebook, "read_episodes")["text/markdown"]
    rows = rows_of(outputs_of(notebook, '"| measure |')["text/markdown"])
    assert [row[0] for row in rows] == ["exact match", "cover match", "F1"]
    assert all(re.fullmatch(r"\d\.\d\d ± \d\.\d\d", cell) for row in rows for cell in row[1:])


def test_failing_command_fails_its_notebook_cell(tmp_path):
    """A wrong field stops the notebook at its cell, instead of three cells later."""
    [cell] = [cell for cell in code_cells(read()) if "def run(" in cell.source]
    of_cell: dict[str, Any] = {"sys": sys, "subprocess": subprocess}
    exec(cell.source.split("\n\n\n")[0], of_cell)
    with pytest.raises(subprocess.CalledProcessError):
        of_cell["run"]("train", "--config=configs/no.py", f"--workdir={tmp_path}")
