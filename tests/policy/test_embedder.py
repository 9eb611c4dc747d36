"""Tests of text embeddings: the values of transformers, for any batch and mesh."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from spell_jax.policy import embedder as module
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.embedder import Embedder
from spell_jax.runtime import mesh as meshes
from tests import tiny
from tests.policy import families, hf_folders

END = "<|endoftext|>"
POLICY = dataclasses.replace(tiny.POLICY, vocab_size=300, qkv_bias=False, qk_norm=True)
SENTENCE = "the fox saw a bar of rather old silver; she said: Ämter, 東京.\n"
WORDS = SENTENCE.split(" ")


def tokenizer(*before: str) -> dict:
    """Return a tokenizer like Qwen3-Embedding's: a byte-level BPE that puts END after a text."""
    plain = hf_folders.byte_level()
    ids = {token["content"]: token["id"] for token in plain["added_tokens"]}
    tokens = {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (*before, END)}
    frame = [{"SpecialToken": {"id": t, "type_id": 0}} for t in tokens]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pair = {"Sequence": {"id": "B", "type_id": 0}}
    single = [*frame[:-1], text, frame[-1]]
    template = {"single": single, "pair": [*single, pair], "special_tokens": tokens}
    return plain | {"post_processor": {"type": "TemplateProcessing"} | template}


def save_folder(folder: Path, policy=POLICY) -> Path:
    """Write a random policy with the tokenizer above."""
    weights.save(folder, policy, tiny.weights(policy))
    return hf_folders.write(folder, tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_folder(tmp_path_factory.mktemp("policies") / "embedding")


def make(folder: Path, mesh: dict | None = None, **changes) -> Embedder:
    """Create an embedder in float32, on one device if no mesh is given."""
    devices = jax.devices()[: 8 if mesh else 1]
    settings = {"max_tokens": 256, "token_budget": 1024, "dtype": "float32"} | changes
    return Embedder(folder, meshes.make_mesh(mesh, devices), **settings)


def texts(count: int, longest: int = 40) -> list[str]:
    """Generate random texts of 1 to `longest` words; a word has about four tokens."""
    rng = np.random.default_rng(0)
    lengths = 1 + rng.integers(longest, size=count)
    return [" ".join(rng.choice(WORDS, size)) for size in lengths]


def vectors(embedder: Embedder, passages: list[str]) -> np.ndarray:
    return embedder.embed([embedder.encode(text)[0] for text in passages])


@pytest.mark.slow
@pytest.mark.parametrize("bare", [True, False], ids=["bare names", "names with model."])
def test_embeddings_equal_transformers(bare: bool, tmp_path) -> None:
    torch = pytest.importorskip("torch", reason=families.REASON)
    transformers = pytest.importorskip("transformers", reason=families.REASON)
    fields = families._COMMON | {"vocab_size": 300, "head_dim": 16, "max_position_embeddings": 256}
    fields["tie_word_embeddings"] = True
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    (model.model if bare else model).save_pretrained(tmp_path)
    hf_folders.write(tmp_path, tokenizer())
    embedder = make(tmp_path, max_tokens=200)
    passages = [*texts(6, longest=30), " ".join(WORDS * 20), ""]
    encoded = [embedder.encode(text) for text in passages]
    assert [cut for _, cut in encoded] == [False] * 6 + [True, False]
    embeddings = embedder.embed([ids for ids, _ in encoded])
    for text, (ids, _), vector in zip(passages, encoded, embeddings, strict=True):
        expected_ids = hf_folders.theirs(tmp_path)(text, truncation=True, max_length=200).input_ids
        assert ids == expected_ids
        with torch.no_grad():
            last = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        expected_embedding = torch.nn.functional.normalize(last, dim=0).numpy()
        np.testing.assert_allclose(vector, expected_embedding, atol=1e-5)
    assert np.abs(embeddings[0] - embeddings[1]).max() > 0.05


@pytest.mark.slow
def test_embedding_does_not_depend_on_the_other_texts(folder) -> None:
    embedder, passages = make(folder), texts(20)
    embeddings = vectors(embedder, passages)
    assert embeddings.dtype == np.float32 and embeddings.shape == (20, embedder.width)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    single_embeddings = np.concatenate([vectors(embedder, [text]) for text in passages])
    np.testing.assert_allclose(embeddings, single_embeddings, atol=1e-6)
    backward_embeddings = vectors(embedder, passages[::-1] + texts(3, longest=9))[19::-1]
    np.testing.assert_allclose(embeddings, backward_embeddings, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "context": 2}], ids=str
)
def test_embeddings_on_eight_devices_equal_one_device(folder, mesh: dict) -> None:
    passages = texts(11)
    expected_embeddings = vectors(make(folder), passages)
    np.testing.assert_allclose(
        vectors(make(folder, mesh), passages), expected_embeddings, atol=1e-5
    )


@pytest.mark.slow
def test_each_bucket_is_compiled_once_within_the_token_budget(folder, monkeypatch) -> None:
    traced = []
    original = module.transformer.embed

    def embed(config, params, tokens, lengths):
        traced.append(tokens.shape)
        return original(config, params, tokens, lengths)

    monkeypatch.setattr(module.transformer, "embed", embed)
    monkeypatch.setattr(module, "SMALLEST", 50)
    embedder = make(folder, max_tokens=201, token_budget=500)
    assert embedder.buckets == (51, 101, 201)
    for count in (1, 30, 7, 30):
        vectors(embedder, texts(count))
    assert sorted(traced, key=lambda shape: shape[1]) == [(9, 51), (4, 101), (2, 201)]


def test_rows_and_lengths_are_multiples_of_their_mesh_axes(folder) -> None:
    embedder = make(folder, {"fsdp": 4, "context": 2}, max_tokens=255, token_budget=1)
    assert embedder.buckets == (256,)
    assert embedder._rows(256) == 4


def test_text_is_truncated_and_cannot_write_the_end_token(folder) -> None:
    embedder = make(folder, max_tokens=10)
    end = hf_folders.ids_of(tokenizers.load(folder), END)
    ids, is_cut = embedder.encode(f"{END} {END}")
    assert is_cut and len(ids) == 10 and ids[-1:] == end and end[0] not in ids[:-1]
    assert embedder.encode("") == (end, False)
    fitting, is_cut = embedder.encode("x" * 9)
    assert len(fitting) == 10 and not is_cut
    assert embedder.encode("x" * 10) == (fitting, True)
    assert embedder.embed([]).shape == (0, embedder.width)


@pytest.mark.slow
def test_tokens_around_a_text_come_from_the_tokenizer(folder, tmp_path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    hf_folders.write(copy, tokenizer("<|im_start|>"))
    start, stop, end = hf_folders.ids_of(tokenizers.load(copy), "<|im_start|>", "<|im_end|>", END)
    plain = tokenizers.load(copy).encode("a fox")
    assert make(copy).encode("a fox") == ([start, *plain, end], False)
    hf_folders.write(copy, hf_folders.byte_level())
    assert make(copy).encode("a fox") == ([*plain, stop], False)
    for path in copy.glob("tokenizer*"):
        path.unlink()
    pieces = tokenizers.train(texts(20), vocab_size=300)
    (copy / "tokenizer.model").write_bytes(pieces.model)
    assert make(copy).encode("a fox") == ([*pieces.encode("a fox"), pieces.eos_id], False)


@pytest.mark.slow
def test_bfloat16_embeddings_are_near_float32(folder) -> None:
    passages = texts(5)
    embeddings = vectors(make(folder, dtype="bfloat16"), passages)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    cosines = (embeddings * vectors(make(folder), passages)).sum(1)
    assert cosines.min() > 0.995 and cosines.max() < 1 - 1e-6


@pytest.mark.parametrize("tokens", [1, 257])
def test_max_tokens_out_of_range_is_rejected(folder, tokens: int) -> None:
    message = rf"embed\.max_tokens = {tokens}: must be from 2 to .*max_position_embeddings = 256"
    with pytest.raises(ValueError, match=message):
        make(folder, max_tokens=tokens)
