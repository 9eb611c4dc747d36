"""Tests of document vectors: topics, and equal vectors for any number of workers."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline import embed
from data_pipeline.embed import EmbedConfig, MeshSizes
from data_pipeline.records import SCHEMAS, Document, make_document
from data_pipeline.stages import Done, Stages
from spell_jax.policy import embedder as embedders
from spell_jax.runtime import config as settings
from spell_jax.runtime import mesh as meshes
from tests.policy.test_embedder import save_folder

SEA = "ship sail harbour wave anchor captain tide deck island storm"
KITCHEN = "flour oven butter sugar bread salt pan recipe dough taste"
COURT = "judge law trial witness jury verdict appeal crime oath lawyer"
TOPICS = {"sea": SEA.split(), "kitchen": KITCHEN.split(), "court": COURT.split()}
FILLERS = ("the", "and", "of", "was", "in", "they", "with", "then", "after", "before")
TFIDF = EmbedConfig()
WORKERS = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
THREADS = ["--direct_num_workers=2", "--direct_running_mode=multi_threading"]


def documents(count: int, source: str = "") -> list[Document]:
    """Make documents of 25 words, a third about a topic; by default the source is the topic."""
    corpus, rng = [], random.Random(0)
    for number in range(count):
        topic = rng.choice(sorted(TOPICS))
        words = rng.choices(TOPICS[topic], k=8) + rng.choices(FILLERS, k=17)
        rng.shuffle(words)
        corpus.append(make_document(" ".join(words), source or topic, f"{number}.txt"))
    return corpus


def run(
    folder: Path, corpus: list[Document], config: EmbedConfig = TFIDF, options=()
) -> tuple[dict[str, np.ndarray], list[Document], Done]:
    """Run in a new folder; return (vectors by id, documents in their order, the stage)."""
    (folder / "given").mkdir(parents=True)
    table = pa.Table.from_pylist(corpus, SCHEMAS["documents"])
    pq.write_table(table, folder / "given" / "documents-0.parquet")
    stages = Stages(str(folder), options)
    make = functools.partial(embed.make_embed, total=len(corpus), config=config)
    stage = stages.run_stage("embed", {}, make, (), embed.BALANCES, documents="given/documents")
    embedded_documents: list = list(stages.read_records("embed/documents"))
    return (
        {d["id"]: np.frombuffer(d["vector"], np.float32) for d in embedded_documents},
        embedded_documents,
        stage,
    )


def without_vectors(corpus: list[Document]) -> list[tuple]:
    return sorted(tuple((d | {"vector": b""}).items()) for d in corpus)


def bits(vectors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: vector.tobytes() for name, vector in vectors.items()}


# ------------------------------------------------------------------------------------------- TF-IDF


def test_nearest_document_has_the_same_topic(tmp_path) -> None:
    corpus = documents(60)
    vectors, embedded_documents, stage = run(tmp_path, corpus)
    assert without_vectors(embedded_documents) == without_vectors(corpus)
    table = np.stack([vectors[d["id"]] for d in corpus])
    np.testing.assert_allclose(np.linalg.norm(table, axis=1), 1, atol=1e-6)
    topics = np.array([d["source"] for d in corpus])
    similar = table @ table.T - 2 * np.eye(len(table))
    assert (topics[similar.argmax(1)] == topics).all()
    expected_counts = [(embed.EMBEDDED, *item) for item in sorted(Counter(topics.tolist()).items())]
    expected_counts += [("documents fitted", "", 60), ("documents sampled", "", 60)]
    assert [tuple(c.values()) for c in stage.counts] == expected_counts


@pytest.mark.slow
def test_cosines_match_exact_tfidf(tmp_path) -> None:
    """The projection is lossless if it is fitted on all documents, with all directions."""
    corpus = documents(30)
    vectors, _, _ = run(tmp_path, corpus)
    texts = [re.findall(r"\w{2,}", d["text"]) for d in corpus]
    found_in = Counter(word for text in texts for word in set(text))
    telling = sorted(word for word, count in found_in.items() if 1 < count < len(texts))
    table = np.zeros((len(texts), len(telling)))
    for row, text in zip(table, texts, strict=True):
        for word, count in Counter(text).items():
            if word in telling:
                weight = np.log((1 + len(texts)) / (1 + found_in[word]))
                row[telling.index(word)] = (1 + np.log(count)) * weight
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    embeddings = np.stack([vectors[d["id"]] for d in corpus])
    assert embeddings.shape[1] <= len(telling) + 1
    np.testing.assert_allclose(embeddings @ embeddings.T, table @ table.T, atol=1e-5)


@pytest.mark.slow
def test_vectors_are_bit_identical_for_any_workers_and_order(tmp_path) -> None:
    corpus = documents(40)
    shuffled = random.Random(1).sample(corpus, len(corpus))
    alone = bits(run(tmp_path / "a", corpus)[0])
    assert bits(run(tmp_path / "b", shuffled, options=WORKERS)[0]) == alone


@pytest.mark.slow
def test_directions_are_fitted_on_documents_with_smallest_ids(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(embed, "BLOCK_BYTES", 100)  # two words per block
    corpus = sorted(documents(200), key=lambda d: d["id"])
    config = EmbedConfig(fit_documents=20)
    every = bits(run(tmp_path / "a", corpus, config)[0])
    subset_vectors = bits(run(tmp_path / "b", corpus[:20], config)[0])
    assert subset_vectors == {name: every[name] for name in subset_vectors} and len(every) == 200
    sampled = [d for d in corpus if list(embed._sample_words(d, 0.25, config.features))]
    assert 20 <= len(sampled) < 100


def test_dimensions_setting_limits_vector_size(tmp_path) -> None:
    vectors, _, _ = run(tmp_path, documents(20), EmbedConfig(dimensions=5))
    assert {vector.shape for vector in vectors.values()} == {(5,)}


def test_documents_without_informative_words_share_a_vector(tmp_path) -> None:
    odd = [make_document(text, "odd", text) for text in ("zzyzx quux", "...", "a b c")]
    vectors, _, stage = run(tmp_path, documents(20, "even") + odd)
    size = vectors[odd[0]["id"]].size
    for document in odd:
        np.testing.assert_array_equal(vectors.pop(document["id"]), np.eye(size)[-1])
    assert all(vector[-1] == 0 for vector in vectors.values())
    assert stage.count(embed.WORDLESS) == stage.count(embed.WORDLESS, "odd") == 3
    assert stage.count(embed.EMBEDDED) == 23


@pytest.mark.slow
@pytest.mark.parametrize("texts", [(), ("oven pan",), ("oven pan", "pan oven")], ids=len)
def test_zero_one_or_two_documents_are_embedded(texts: tuple[str, ...], tmp_path) -> None:
    corpus = [make_document(text, "s", text) for text in texts]
    vectors, _, stage = run(tmp_path, corpus)
    assert all(vector.tolist() == [1] for vector in vectors.values())
    assert len(vectors) == stage.count(embed.EMBEDDED) == stage.count(embed.WORDLESS) == len(texts)


def test_word_pattern_splits_mixed_scripts() -> None:
    text = "It's 7 o'clock in 東京とソウル서울 — naïve_x Straße, 𠮷野"
    assert re.findall(embed.WORD, text.lower()) == [
        *("it", "clock", "in", "東", "京", "と", "ソ", "ウ", "ル", "서울"),
        *("naïve_x", "straße", "𠮷", "野"),
    ]


# ------------------------------------------------------------------------------------------- Policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> EmbedConfig:
    folder = save_folder(tmp_path_factory.mktemp("policies") / "embedding")
    return EmbedConfig(
        method="policy",
        folder=str(folder),
        max_tokens=128,
        token_budget=1024,
        compute_dtype="float32",
        shards=3,
    )


@pytest.mark.slow
def test_policy_embeds_documents_and_truncations_are_counted(policy, tmp_path) -> None:
    corpus = documents(20, "short") + [
        make_document("salt " * 99 + str(n), "long", str(n)) for n in "ab"
    ]
    vectors, embedded_documents, stage = run(tmp_path, corpus, policy)
    assert without_vectors(embedded_documents) == without_vectors(corpus)
    embedder = embedders.Embedder(policy.folder, meshes.make_mesh(), 128, 1024, "float32")
    expected_vectors = embedder.embed([embedder.encode(d["text"])[0] for d in corpus])
    for document, vector in zip(corpus, expected_vectors, strict=True):
        np.testing.assert_allclose(vectors[document["id"]], vector, atol=1e-6)
    cut = Counter(d["source"] for d in corpus if embedder.encode(d["text"])[1])
    assert cut["long"] == 2
    assert {c["source"]: c["number"] for c in stage.counts if c["what"] == embed.TRUNCATED} == cut
    assert stage.count(embed.EMBEDDED, "short") == 20


@pytest.mark.slow
def test_policy_is_loaded_once_and_batches_are_deterministic(policy, tmp_path, monkeypatch) -> None:
    loaded, batches = [], []

    class Recorded(embedders.Embedder):
        def __init__(self, *arguments):
            loaded.append(arguments)
            super().__init__(*arguments)

        def embed(self, texts):
            batches.append([tuple(ids) for ids in texts])
            return super().embed(texts)

    monkeypatch.setattr(embedders, "Embedder", Recorded)
    monkeypatch.setattr(embed, "EMBED_AT_ONCE", 4)
    corpus = [d | {"tokens": len(d["text"]) % 7} for d in documents(30)]
    shuffled = random.Random(1).sample(corpus, len(corpus))
    alone = bits(run(tmp_path / "a", corpus, policy)[0])
    expected_batches = sorted(batches)
    batches.clear()
    assert bits(run(tmp_path / "b", shuffled, policy, THREADS)[0]) == alone
    assert sorted(batches) == expected_batches
    assert max(map(len, batches)) == 4 and len(batches) >= 8
    devices = meshes.make_mesh({"fsdp": jax.device_count()})
    assert loaded == [(policy.folder, devices, 128, 1024, "float32")] * 2


def test_policy_is_released_by_its_last_user(policy, monkeypatch) -> None:
    loaded = []
    monkeypatch.setattr(
        embedders, "Embedder", lambda *arguments: loaded.append(arguments) or object()
    )
    shared = embed._SharedEmbedder()
    shared.acquire(policy)
    shared.acquire(policy)
    shared.release()
    assert shared._embedder is not None and len(loaded) == 1
    shared.release()
    assert shared._embedder is None
    shared.acquire(policy)
    assert len(loaded) == 2


# ------------------------------------------------------------------------------------------- Config


def test_config_is_built_from_a_section() -> None:
    section = {"method": "policy", "folder": "x", "mesh": {"fsdp": 2, "data": -1}}
    built = settings.build(EmbedConfig, section, "embed")
    assert built.mesh == MeshSizes(fsdp=2, data=-1) and built.folder == "x"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"method": "bert"}, r"embed\.method = 'bert': must be one of \('tfidf', 'policy'\)"),
        ({"method": "policy"}, r"embed\.folder = '': .* must have a Hugging Face folder"),
        ({"features": 1}, r"embed\.features = 1: must be at least 2"),
        ({"features": 2**31}, r"embed\.features = 2147483648: must be .* to 2147483647"),
        ({"dimensions": 1}, r"embed\.dimensions = 1: must be at least 2"),
        ({"fit_documents": 0}, r"embed\.fit_documents = 0: must be at least 1"),
        ({"max_tokens": 1}, r"embed\.max_tokens = 1: must be at least 2"),
        ({"token_budget": 0}, r"embed\.token_budget = 0: must be at least 1"),
        ({"shards": 0}, r"embed\.shards = 0: must be at least 1"),
        ({"seed": -1}, r"embed\.seed = -1: must be a whole number from 0 to 4294967295"),
        ({"compute_dtype": "int8"}, r"embed\.compute_dtype = 'int8': must be one of"),
        ({"mesh": {"tensor": 0}}, r"embed\.mesh\.tensor = 0: must be at least 1, or -1"),
        ({"mesh": {"data": -1}}, r"embed\.mesh = .*: at most one axis must be -1"),
    ],
)
def test_error_names_invalid_config_field(section: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.build(EmbedConfig, section, "embed")
