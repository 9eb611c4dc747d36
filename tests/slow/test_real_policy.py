"""Test of SPELL with a real model's tokenizer, chat template and shape, and random weights.

It covers rollout, update, counting, checkpoint, resumption and export.
"""

from __future__ import annotations

import gzip
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from spell_jax.configs import paper
from spell_jax.evaluation import generation
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.rope import RopeConfig
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.trainer import loop
from spell_jax.trainer.export import export
from tests import noise
from tests.policy import families

# Qwen2.5-7B-Instruct, but narrow: 9.8 million weights, nearly all in embeddings.
SHAPE = PolicyConfig(
    vocab_size=152_064,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=16,
    feed_forward=160,
    rope=RopeConfig(1e6),
    max_positions=32_768,
)
STATUSES = ("accepted", "bad_format", "declined", "ungrounded", "overlong", "too_small")
EXPORTED = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def data() -> pathlib.Path:
    if not os.environ.get("SPELL_DATA"):
        pytest.skip("SPELL_DATA is not set: it names the folder of real documents")
    return pathlib.Path(os.environ["SPELL_DATA"])


@pytest.fixture(scope="module")
def policy(data, tmp_path_factory) -> pathlib.Path:
    """Make a folder in the Hub's layout, with random weights."""
    source, folder = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("policy")
    real = data / "tokenizers" / "qwen2"
    packed = (real / "tokenizer.qwen2.5.rebuilt.json.gz").read_bytes()
    (source / "tokenizer.json").write_bytes(gzip.decompress(packed))
    shutil.copy(real / "tokenizer_config.qwen2.5.json", source / "tokenizer_config.json")
    params = transformer.init(SHAPE, jax.random.key(0))
    weights.save(folder / "hub", SHAPE, params, tokenizers.load(source))
    return folder / "hub"


@pytest.fixture(scope="module")
def documents(data, tmp_path_factory) -> pathlib.Path:
    """Write two real filings and three speeches, cut at 20,000 characters, to a folder."""
    folder = tmp_path_factory.mktemp("documents")
    filings = sorted((data / "edgar" / "dev").glob("*.txt"))[:2]
    speeches = sorted((data / "gov_speeches").rglob("*.txt"))[:3]
    assert len(filings) == 2 and len(speeches) == 3
    for path in filings + speeches:
        (folder / path.name).write_text(path.read_text()[:20_000])
    return folder


def config_of(policy: pathlib.Path, documents: pathlib.Path, **changes):
    """Return configs/paper.py:qwen2.5-7b-instruct with few short documents, questions, answers."""
    config = paper.get_config("qwen2.5-7b-instruct")
    settings = {
        "steps": 2,
        "validate_every": 0,
        "checkpoint_every": 1,
        "policy.folder": str(policy),
        "policy.compute_dtype": "float32",
        "data.source": str(documents),
        "data.grouping": "order",
        "data.documents_per_cluster": 3,
        "data.max_document_tokens": 128,
        "data.held_out": 0.0,
        "algorithm.truncated": "score",  # random text seldom ends
        "algorithm.questions": 4,
        # by chance all answers to four questions get equal rewards
        "algorithm.generation_batch": 8,
        "algorithm.max_generations": 1,
        "algorithm.group_size": 4,
        "algorithm.verifier.group_size": 4,
        "algorithm.questioner.grounding_samples": 2,  # random answers: often right
        "algorithm.questioner.grounding_threshold": 2,
        "algorithm.questioner.documents": (2,),
        "sampler.max_prompt": 1536,
        "sampler.kv_cache_tokens": 32_768,
        "sampler.slots": 16,
        "sampler.samples_per_prompt_batch": 4,
        "sampler.prefill_tokens": 2048,
        "sampler.decode_tokens": 8,
        "sampler.max_tokens": 6,
        "algorithm.verifier.max_tokens": 3,
        "packing.buckets": ((1664, 64),),
        "packing.token_budget": 3328,
    }
    return noise.with_fields(config, settings | changes)


def test_rollout_update_resume_and_export(policy, documents, tmp_path, monkeypatch) -> None:
    noise.use_one_device(monkeypatch)
    noise.give_meaning(monkeypatch)
    run = tmp_path / "run"
    loop.train(config_of(policy, documents, steps=1), run)
    loop.train(config_of(policy, documents), run)
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert sum(line[f"rollout/{status}"] for status in STATUSES) == pytest.approx(1)
        # Real prompts: the full templates with two documents, in the chat layout.
        assert 500 < line["rollout/prompt_tokens/questioner"] < 1536
        assert line["rollout/accepted"] > 0 and not line["train/empty_update"]
        assert line["train/sampler_difference"] < 1e-4
        assert line["train/gradient_norm"] > 0
    _, before = weights.load(policy)
    written = train_and_export(run, tmp_path / "exported")
    assert written == EXPORTED
    config, after = weights.load(tmp_path / "exported")
    assert config == SHAPE
    changed = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, after)
    assert max(jax.tree.leaves(changed)) > 0
    check_with_transformers(tmp_path / "exported")


def train_and_export(run: pathlib.Path, out: pathlib.Path) -> set[str]:
    assert export(run, out, dtype="float32") == 2
    jax.tree.map(
        np.testing.assert_array_equal, weights.load(out)[1], weights.load(run / "policy")[1]
    )
    return {path.name for path in out.iterdir()}


def check_with_transformers(folder: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers", reason=families.REASON)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 151_645
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who signed?"}], add_generation_prompt=True
    )["input_ids"]
    assert ids == tokenizers.load(folder).chat("Who signed?")


def test_generation_from_a_hub_folder_is_deterministic(policy, tmp_path) -> None:
    """Greedy answers do not depend on the seed; an overlong prompt gets no answers."""
    records = [{"prompt": "Who signed the report?"}, {"prompt": "word " * 40_000}]
    sampling = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 4}
    texts = [record["prompt"] for record in records]
    answers = generation.answer(TextModel(policy), records, texts, 1, sampling, seed=0)
    assert answers == generation.answer(TextModel(policy), records, texts, 1, sampling, seed=1)
    assert len(answers[0]["answers"]) == 1 and answers[0]["tokens"] == [4]
    assert answers[1]["answers"] == []
