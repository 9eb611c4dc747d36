"""Tests of damaged tokenizer files: an error that names the file, or no harm."""

import functools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spell_jax.policy import tokenizer as tokenizers
from tests.policy.hf_folders import (
    CONFIG,
    MARKERS,
    added_token,
    byte_fallback,
    byte_level,
    unigram,
    write,
)

REAL_DAMAGE = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("tokenizer.json", "", "not a complete JSON file"),
        ("tokenizer.json", "[]", "must be a JSON object, is list"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", b"\xff", "not a complete JSON file"),
        ("tokenizer.json", "[" * 10**5, "not a complete JSON file"),
        ("tokenizer_config.json", '{"eos_token": "<|im', "not a complete JSON file"),
        ("tokenizer_config.json", '"a"', "must be a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "not a complete JSON file"),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', "eos_token = '</s>' is not in"),
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token = 5: must be"),
        ("tokenizer_config.json", '{"eos_token": {"content": 5}}', "eos_token = .*must be"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<think>", "pad_token": "pp"}',
            "pad_token = 'pp'",
        ),
        ("tokenizer_config.json", '{"eos_token": "a", "chat_template": 1}', "chat_template = 1"),
        (
            "tokenizer_config.json",
            '{"eos_token": "a", "chat_template": [1]}',
            "chat_template: must",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "a", "chat_template": "{{"}',
            "chat_template: not",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", "{}", "must have eos_token"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("chat_template.jinja", "{% for %}", "not a chat template"),
        ("generation_config.json", '{"eos_token_id": "a"}', "eos_token_id = 'a'"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id = \\[True\\]"),
        ("generation_config.json", '{"eos_token_id": 9999}', "eos_token_id = 9999.*below 264"),
        ("generation_config.json", "{", "not a complete JSON file"),
    ],
)
def test_damaged_tokenizer_files_are_reported(
    small, name: str, content: str | bytes, words: str
) -> None:
    (small / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=rf"{name}.*{words}"):
        tokenizers.load(small)


def test_gap_in_token_ids_is_rejected(small) -> None:
    tokenizer = byte_level()
    tokenizer["added_tokens"][-1]["id"] += 1
    write(small, tokenizer)
    with pytest.raises(ValueError, match=r"tokenizer.json: added_tokens.*'</think>' has id 264"):
        tokenizers.load(small)


def test_folder_without_a_tokenizer_is_reported(tmp_path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"needs tokenizer.json or tokenizer.model"):
        tokenizers.load(tmp_path)


def test_lone_surrogates_are_rejected(small) -> None:
    words = tokenizers.load(small)
    for ask in (words.encode, words.chat, words.count):
        with pytest.raises(ValueError, match="surrogates"):
            ask("a\ud800")


JUNK = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats()
JUNK |= st.lists(JUNK, max_size=2) | st.dictionaries(st.sampled_from("ab<"), JUNK, max_size=2)
FILES = ("tokenizer", "tokenizer_config", "generation_config")


def places(value, path=()):
    """Yield the paths of the first six values of each object and list in a JSON document."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for number, (key, item) in enumerate(inside):
        if number < 6:
            yield (*path, key)
            yield from places(item, (*path, key))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [byte_level, byte_fallback, unigram])
@REAL_DAMAGE
@given(data=st.data())
def test_random_damage_is_reported_or_harmless(tmp_path, kind, data) -> None:
    texts = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}"}
    config = CONFIG if kind is byte_level else texts | {"bos_token": None}
    decoder = (
        {str(len(kind()["model"]["vocab"])): added_token(0, MARKERS[0])}
        if kind is byte_level
        else {}
    )
    files = dict(zip(FILES, (kind(), config | {"added_tokens_decoder": decoder}, {}), strict=True))
    files["generation_config"] = {"eos_token_id": [1, 2]}
    files = json.loads(json.dumps(files))  # a copy to damage
    folder = write(tmp_path, **files)
    tokenizers.load(folder)
    name = data.draw(st.sampled_from(FILES))
    if data.draw(st.booleans()):
        text = json.dumps(files[name])
        damaged = text[: data.draw(st.integers(0, len(text) - 1))]
    else:
        *path, last = data.draw(st.sampled_from(list(places(files[name]))))
        inner = functools.reduce(lambda value, key: value[key], path, files[name])
        if data.draw(st.booleans()):
            inner[last] = data.draw(JUNK)
        else:
            del inner[last]
        damaged = json.dumps(files[name])
    (folder / f"{name}.json").write_text(damaged)
    try:
        words = tokenizers.load(folder)
    except ValueError as error:
        assert any(f"{file}.json" in str(error) for file in FILES)
        return
    with_text = "a</s><|im_end|>"
    try:
        assert words.eos_id not in words.encode(with_text)
        words.chat(with_text)
    except ValueError as error:
        assert (
            "cannot encode" in str(error)
            or "no chat template" in str(error)
            or "fails" in str(error)
        )
