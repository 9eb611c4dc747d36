"""A tiny policy of random weights, and an algorithm that gives meaning to its noise.

Random text counts as a question, an answer or a verdict by its checksum. So a run of a few small
steps has real updates of all roles, with question memory and references by a frozen reader.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from etils import epath
from ml_collections import ConfigDict

from spell_jax.algorithms import config as algorithm_config
from spell_jax.algorithms import registry as registry
from spell_jax.algorithms.eapo import algorithm as eapo
from spell_jax.algorithms.spell import answering, frozen_reader, questioner
from spell_jax.algorithms.spell import config as spell_config
from spell_jax.configs import tiny, tiny_eapo
from spell_jax.data.config import is_generated
from spell_jax.learner import update
from spell_jax.learner.learner import Learner
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.question_sets import evidence_rows
from spell_jax.reporting import run_report
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import mesh
from spell_jax.runtime.config import flat
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.runtime.files.paths import CHECKPOINTS_FOLDER
from spell_jax.sampler.engine import Sampler
from spell_jax.selfplay import evidence, parsing, rules
from spell_jax.trainer import build

_UNSTEADY = ("time/", "process/")


def steady(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics without times and memory, which differ between runs."""
    return {name: value for name, value in line.items() if not name.startswith(_UNSTEADY)}


def save_policy(
    folder: pathlib.Path, max_positions: int = 256, width: int = 32, **changes: Any
) -> pathlib.Path:
    """Write a folder with random weights (one layer) and the tiny world's tokenizer.

    `changes` are other fields of the policy.
    """
    tokenizer = tokenizers.load(TINY_POLICY)
    policy = PolicyConfig(
        vocab_size=tokenizer.vocab_size,
        width=width,
        layers=1,
        heads=4,
        kv_heads=2,
        head_size=8,
        feed_forward=48,
        max_positions=max_positions,
        **changes,
    )
    weights.save(folder, policy, transformer.init(policy, jax.random.key(3)), tokenizer)
    return folder


def small_config(folder: str | pathlib.Path, **overrides) -> ConfigDict:
    """Return configs/tiny.py with a few small questions per step, and overrides by dotted name."""
    name = overrides.get("algorithm.name")
    config = tiny.get_config(name if name in registry.ALGORITHMS else "spell")
    settings = {
        "steps": 3,
        "validate_every": 2,
        "checkpoint_every": 2,
        "max_minutes": 0.0,
        "evaluate": False,
        "policy.folder": str(folder),
        "policy.compute_dtype": "float32",  # the same on CPUs with and without bfloat16
        "data.tiny.clusters": 9,
        "data.tiny.documents": (2,),
        "data.tiny.evaluation": ConfigDict(
            {"per_cell": 1, "documents": (2,), "quick_per_cell": 1, "quick_documents": (2,)}
        ),
        "algorithm.truncated": "score",  # random text seldom ends
        "algorithm.questions": 3,
        "algorithm.generation_batch": 9,
        "algorithm.max_generations": 2,
        "algorithm.group_size": 4,
        "algorithm.verifier.group_size": 3,
        "algorithm.reader.samples": 4,
        "algorithm.questioner.grounding_samples": 2,  # coins: one of two is right too often
        "algorithm.questioner.grounding_threshold": 2,
        "algorithm.questioner.documents": (1,),
        "algorithm.verifier.balance": False,
        "algorithm.verifier.share": 2.0,
        "sampler.max_prompt": 128,
        "sampler.page_size": 32,
        "sampler.kv_cache_tokens": 4096,
        "sampler.slots": 16,
        "sampler.samples_per_prompt_batch": 4,
        "sampler.prefill_tokens": 512,
        "sampler.decode_tokens": 4,
        "sampler.max_tokens": 6,
        "algorithm.verifier.max_tokens": 3,
        "packing.buckets": ((160, 24),),
        "packing.token_budget": 640,
    }
    present = dict(flat(config.to_dict()))
    small = {n: v for n, v in settings.items() if n in present or not n.startswith("algorithm.")}
    return with_fields(config, small | overrides)


def small_eapo_config(folder: pathlib.Path, **overrides) -> ConfigDict:
    """Return configs/tiny_eapo.py with few questions per step, which are written to `folder`.

    The reward model is larger than the policy. `overrides` are by dotted name.
    """
    for name, count in (("train", 12), ("held_out", 3)):
        questions = evidence_rows.make_questions(count, count, (2, 3))
        write_records(folder / f"{name}.jsonl", map(dataclasses.asdict, questions))
    fields = {
        "checkpoint_every": 1,
        "policy.folder": str(save_policy(folder / "policy")),
        "reward_model.folder": str(save_policy(folder / "reward_model", width=48)),
        "data.questions": str(folder / "train.jsonl"),
        "data.validation": str(folder / "held_out.jsonl"),
        "algorithm.truncated": "score",  # random text seldom ends
        "algorithm.questions": 8,
        "algorithm.group_size": 3,
        "sampler.max_prompt": 128,
        "sampler.kv_cache_tokens": 4096,
        "sampler.slots": 16,
        "sampler.prefill_tokens": 512,
        "sampler.decode_tokens": 4,
        "sampler.max_tokens": 6,
        "packing.buckets": ((160, 24),),
        "packing.token_budget": 640,
    }
    return with_fields(tiny_eapo.get_config(), fields | overrides)


def with_fields(config: Any, fields: dict[str, Any]) -> Any:
    """Set fields of the config by their dotted names; return the config."""
    with config.unlocked():
        for name, value in fields.items():
            *path, field = name.split(".")
            section = config
            for part in path:
                section = section[part]
            section[field] = value
    return config


def give_data(config: Any, folder: pathlib.Path) -> None:
    """Give small data to a config's algorithm, where the user would have to name or make data."""
    for name, text in (("a", "A text of one's own."), ("b", "Another one, of the same kind.")):
        (folder / f"{name}.txt").write_text(f"{text}\n")
    question = {"task": "general_qa", "documents": ["A"], "question": "B?", "answer": "C"}
    (folder / "questions.jsonl").write_text(json.dumps(question))
    inputs, data = registry.ALGORITHMS[config.algorithm.name].inputs, config.data
    needs_questions = inputs == ("questions",) or data.questions
    if needs_questions and not pathlib.Path(data.questions).is_file():
        data.questions = str(folder / "questions.jsonl")
    if data.validation and not pathlib.Path(data.validation).is_file():
        data.validation = str(folder / "questions.jsonl")
    if "clusters" in inputs and not has_source(data):
        data.source = str(folder)


def has_source(data: Any) -> bool:
    """Return whether data.source is a generated world or exists."""
    return is_generated(data.source) or (bool(data.source) and pathlib.Path(data.source).exists())


def use_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run see one device, however many there are."""
    make_mesh = mesh.make_mesh
    one_device = jax.devices()[:1]
    monkeypatch.setattr(mesh, "make_mesh", lambda *shape_and_devices: make_mesh(None, one_device))


def skip_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs end without plots, which take half of their time."""
    monkeypatch.setattr(run_report, "plot_run", lambda workdir: ())


_cached_learner = functools.cache(Learner)


def _shared_learner(policy, optimizer, *arguments) -> Learner:
    if optimizer.schedule == "constant":  # for any number of steps
        optimizer = dataclasses.replace(optimizer, total_steps=0)
    return _cached_learner(policy, optimizer, *arguments)


@functools.cache
def _shared_sampler(policy, config, stop_ids, mesh, *switches: bool) -> Sampler:
    return Sampler(policy, config, stop_ids, mesh, None, *switches)


def share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run reuse the compiled programs of earlier runs of the same shape.

    Tracing them again takes half of the remaining time. Do not use this with adapters or stop
    strings, nor where a program is changed.
    """
    monkeypatch.setattr(build, "Learner", _shared_learner)
    monkeypatch.setattr(
        build,
        "Sampler",
        lambda policy, config, stop_ids, mesh, stream, *switches: _shared_sampler(
            policy, config, tuple(stop_ids), mesh, *switches
        ),
    )


def end_earlier(workdir: epath.Path, folder: epath.Path, step: int) -> epath.Path:
    """Copy a run as if it had been killed after a step.

    The copy has the later files, but not the later checkpoints.
    """
    shutil.copytree(workdir, folder)
    checkpoints = [path for path in (folder / CHECKPOINTS_FOLDER).iterdir() if path.name.isdigit()]
    later = [path for path in checkpoints if int(path.name) > step]
    assert 0 < len(later) < len(checkpoints)
    for path in later:
        shutil.rmtree(path)
    return folder


def lose_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of every update NaN."""
    apply = update.apply
    monkeypatch.setattr(
        update, "apply", lambda spec, s, g, loss: apply(spec, s, g, loss + float("nan"))
    )


def finish_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark the replies of judges and teachers as finished, because cut-off replies are not read."""
    sample = TextModel.sample

    def finished(*arguments, **options):
        for place, samples in sample(*arguments, **options):
            yield place, [dataclasses.replace(reply, stopped=True) for reply in samples]

    monkeypatch.setattr(TextModel, "sample", finished)


def give_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the algorithm read checksums instead of parsing."""

    def parse_question(text, task, count, limit, distinct, **options):
        if _sum(text) % 8 == 0:
            return parsing.Parsed("bad_format", reason="noise")
        return parsing.Parsed("accepted", f"Q{_sum(text) % 1000}", str(_sum(text) % 2))

    fake_parsing = SimpleNamespace(
        Parsed=parsing.Parsed,
        parse_question=parse_question,
        parse_verdict=lambda text: _sum(text) % 2,
    )
    fakes = {
        "extract_answer": lambda text, task, *_: str(_sum(text) % 2),
        "score_answer": lambda answer, reference, *_: float(answer == reference),
        "same_answer": lambda first, second, *_: first == second,
    }
    for module in (answering, questioner, spell_config):
        monkeypatch.setattr(module, "parsing", fake_parsing)
    for module in (algorithm_config, frozen_reader):
        monkeypatch.setattr(module, "rules", SimpleNamespace(**vars(rules) | fakes))


def give_evidence_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let EAPO read checksums instead of parsing; most of its scores contradict the outcomes."""

    def parse_answer(text: str) -> evidence.StructuredAnswer | None:
        answer = str(_sum(text) % 2)
        return evidence.StructuredAnswer("", f"E{answer}", "", answer) if _sum(text) % 8 else None

    def parse_scores(text: str, count: int) -> tuple[int, ...] | None:
        if _sum(text) % 6 == 0:
            return None
        return tuple(1 + _sum(f"{text} {place}") % 5 for place in range(count))

    def find_scores(text: str, scores: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(place, len(text) - 1) for place in range(len(scores)))

    fakes = {
        "parse_answer": parse_answer,
        "parse_scores": parse_scores,
        "find_scores": find_scores,
    }
    monkeypatch.setattr(eapo, "evidence", SimpleNamespace(**vars(evidence) | fakes))
    fakes = {
        "extract_answer": lambda text, task, *_: text[-1:],
        "score_answer": lambda answer, reference, *_: float(answer == str(_sum(reference) % 2)),
    }
    monkeypatch.setattr(algorithm_config, "rules", SimpleNamespace(**vars(rules) | fakes))


def _sum(text: str) -> int:
    return zlib.crc32(text.encode(errors="replace"))
