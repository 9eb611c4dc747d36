"""Tests of the probe questions that show what the responder makes progress on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spell_jax.selfplay.probes import LIFETIME, Probe, ProbeSet


def make(question: str, first: float = 0.25, now: float = 0.25, task: str = "general_qa") -> Probe:
    return Probe(task, "c", question, "answer", first, now)


def test_progress_is_that_of_the_most_alike_questions_of_the_task():
    probes = ProbeSet(16)
    deep, shallow = "city of friend of friend of", "city of"
    probe_list = [make(f"{deep} P{i}", 0.25, 0.75) for i in range(4)]
    probe_list += [make(f"{shallow} P{i}", 0.5, 0.5) for i in range(4)]
    probe_list += [make(f"{deep} P{i}", 0.0, 1.0, "financial_math") for i in range(4)]
    probes.probes = probe_list
    assert probes.progress("general_qa", f"{deep} Arvo") == 0.5
    assert probes.progress("general_qa", f"{shallow} Arvo") == 0.0
    assert probes.progress("financial_math", shallow) == 1.0
    assert probes.progress("multiple_choice", deep) == 0.0, "no probe of this task"


def test_regress_counts_as_no_progress():
    probes = ProbeSet(4)
    probes.probes = [make("a", 0.75, 0.25)]
    assert probes.progress("general_qa", "a") == 0.0


def test_measuring_keeps_the_first_rate():
    probes = ProbeSet(4)
    probes.probes = [make("a"), make("b")]
    probes.measure([1.0, 0.0])
    assert [(p.first, p.now) for p in probes.probes] == [(0.25, 1.0), (0.25, 0.0)]
    with pytest.raises(ValueError):
        probes.measure([1.0])


def test_each_step_replaces_a_share_of_the_probes():
    probes, rng = ProbeSet(8), np.random.default_rng(0)
    for step in range(LIFETIME + 2):
        probes.push([make(f"{step} {i}") for i in range(5)], rng)
    steps = [int(probe.question.split()[0]) for probe in probes.probes]
    assert steps == [2, 2, 3, 3, 4, 4, 5, 5]
    probes.push([], rng)
    assert len(probes.probes) == 8


def test_state_is_json_and_restores_the_probes():
    probes = ProbeSet(3)
    probes.push([make("a"), make("b", now=0.5)], np.random.default_rng(0))
    restored = ProbeSet(3)
    restored.load_state_dict(json.loads(json.dumps(probes.state_dict())))
    assert restored.probes == probes.probes != []
