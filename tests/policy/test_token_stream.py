"""Tests that ids decoded one by one give the same text as decode of all ids."""

import functools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.tokenizer_base import Tokenizer
from tests.policy.hf_folders import (
    CONFIG,
    SCRATCH,
    byte_fallback,
    byte_level,
    documents,
    ids_of,
    load,
    real,
    unigram_words,
    word_piece,
    write,
)


@functools.cache
def streamed(kind: str) -> Tokenizer:
    if kind == "sentencepiece":
        return tokenizers.train(["The report of Harbour 7."] * 20, 320)
    if kind == "unigram":
        return unigram_words()
    descriptions = {
        "byte level": (byte_level(), CONFIG),
        "byte fallback": (byte_fallback(), {"eos_token": "</s>"}),
        "word piece": (word_piece(), {"eos_token": "[SEP]"}),
    }
    return tokenizers.load(write(Path(SCRATCH.name) / kind, *descriptions[kind]))


KINDS = ("sentencepiece", "unigram", "byte level", "byte fallback", "word piece")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_streamed_text_equals_decode(kind: str, data) -> None:
    words = streamed(kind)
    token_id = st.integers(-1, words.vocab_size)
    text = st.text(max_size=10).map(words.encode)
    runs = data.draw(st.lists(text | st.lists(token_id, max_size=20), max_size=8))
    ids = [i for run in runs for i in run]
    stream = words.stream()
    for _ in range(2):  # finish() resets it
        assert "".join([*map(stream.push, ids), stream.finish()]) == words.decode(ids)


@pytest.mark.parametrize("kind", KINDS[2:4])
@pytest.mark.parametrize("byte", ["F0", "9F", "FF"])
def test_streamed_invalid_bytes_equal_decode(kind: str, byte: str) -> None:
    words = streamed(kind)
    letter = {"F0": "ð", "9F": "Ł", "FF": "ÿ"}[byte] if kind == "byte level" else f"<0x{byte}>"
    ids = ids_of(words, letter) * 50 + words.encode("a🙂b")
    stream = words.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == words.decode(ids)


def test_stream_holds_partial_characters_across_markers() -> None:
    words = streamed("sentencepiece")
    half, marker = words.encode("€")[0], words.chat("")[0]
    ids = [half] * 3 + [marker] * 20 + words.encode("a")
    stream = words.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == words.decode(ids)


def test_stream_waits_only_for_whole_characters() -> None:
    words = streamed("byte level")
    stream = words.stream()
    assert [stream.push(i) for i in words.encode("a🙂b")] == ["a", "", "", "", "🙂", "b"]
    assert [stream.push(i) for i in words.encode("é")[:1]] == [""]
    assert stream.finish() == "\ufffd"


def test_stream_decodes_a_bounded_window(monkeypatch) -> None:
    words = streamed("byte level")
    sizes = []
    decode = words.decode
    monkeypatch.setattr(words, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    stream = words.stream()
    for i in words.encode("a é\n" * 200) + ids_of(words, "ÿ", "<|im_end|>") * 200:
        stream.push(i)
    assert max(sizes) < 20 and len(sizes) > 1000


@pytest.mark.slow
def test_stream_of_a_real_tokenizer_equals_decode(spell_data) -> None:
    words = load(real(spell_data, "qwen3"))
    ids = words.encode(documents(spell_data)[0] + "🙂你好" * 9) + words.chat("é")
    stream = words.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == words.decode(ids)
