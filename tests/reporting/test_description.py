"""Tests of what the report says that was run."""

import json

import pytest
from etils import epath

from spell_jax.reporting.description import describe, read_record

START = {
    "step": 0,
    "version": "1.2",
    "commit": "abc",
    "jax": "0.9",
    "device": "TPU v5 lite",
    "devices": 16,
    "hosts": 2,
}
SIZES = {"parameters": 1_000, "trained_parameters": 10, "layers": 2, "width": 8, "vocab_size": 9}
CONFIG = {
    "seed": 3,
    "steps": 9,
    "algorithm": {"name": "rlvr", "group_size": 4},
    "policy": {"folder": "a/policy"},
    "data": {"source": "texts", "questions": "", "validation": "held_out.jsonl"},
}


def write_record(workdir, *starts: dict, **changes) -> epath.Path:
    record = {"starts": [START, *starts], "policy": SIZES, "defaults": {"algorithm.group_size": 8}}
    (workdir / "run.json").write_text(json.dumps(record | changes))
    return epath.Path(workdir)


def lines(*seconds: float) -> list[dict]:
    return [{"step": n, "time/step_seconds": value} for n, value in enumerate(seconds, 1)]


def test_facts_name_algorithm_policy_data_code_and_devices(tmp_path):
    description = describe([[0]], [write_record(tmp_path)], [CONFIG], [lines(100, 50)])
    facts = {name: text for name, [text] in description["facts"]}
    assert facts == {
        "algorithm": "rlvr",
        "policy": "a/policy; 2 layers, width 8; 1,000 parameters; 10 of them trained",
        "data": "texts",
        "held out": "held_out.jsonl",
        "seed": "3",
        "steps": "2 of 9",
        "time": "2.5 minutes",
        "code": "spell_jax 1.2, commit abc",
        "device": "16 × TPU v5 lite on 2 hosts, jax 0.9",
        "folder": str(tmp_path),
    }
    assert description["defaults"] == [["algorithm.group_size", "8", ["4"]]]
    assert description["differing"] == []


def test_a_resumed_run_names_each_commit_with_its_first_step(tmp_path):
    later = [START | {"step": 4}, START | {"step": 6, "commit": "unknown"}]
    description = describe([[0]], [write_record(tmp_path, *later)], [CONFIG], [lines(1)])
    facts = dict(description["facts"])
    assert facts["code"] == ["spell_jax 1.2, commit abc; from step 7 on spell_jax 1.2"]
    assert facts["device"] == ["16 × TPU v5 lite on 2 hosts, jax 0.9"]


def test_compared_runs_list_the_fields_that_differ(tmp_path):
    workdirs = [epath.Path(tmp_path / name) for name in "abc"]
    changed_config = CONFIG | {"algorithm": {"name": "rlvr", "group_size": [2, 3]}, "wandb": ""}
    configs = [CONFIG, CONFIG | {"seed": 4}, changed_config]
    description = describe([[0, 1], [2]], workdirs, configs, [lines(60), lines(180), lines(2)])
    facts = dict(description["facts"])
    assert facts["seed"] == ["3, 4", "3"] and facts["time"] == ["2 minutes each", "2 seconds"]
    assert "code" not in facts  # runs without run.json
    assert description["differing"] == [
        ["algorithm.group_size", ["4", "(2, 3)"]], ["wandb", [None, '""']]
    ]  # fmt: skip


def test_supervised_tuning_names_its_rows(tmp_path):
    config = {"rows_per_step": 2, "source": "rows.jsonl", "policy": {"folder": ""}}
    facts = dict(describe([[0]], [epath.Path(tmp_path)], [config], [[]])["facts"])
    assert facts["algorithm"] == ["supervised tuning"] and facts["data"] == ["rows.jsonl"]


@pytest.mark.parametrize(
    "changes",
    [
        {"starts": []},
        {"starts": [START | {"step": "x"}]},
        {"starts": [START | {"commit": None}]},
        {"policy": {"layers": 1}},
        {"defaults": []},
    ],
)
def test_a_damaged_record_is_named_and_left_out(tmp_path, caplog, changes):
    assert read_record(write_record(tmp_path, **changes)) is None
    assert f"left out: {tmp_path}/run.json is no record of a run" in caplog.text
