"""Tests of the limits of a tokenizer's steps: growth, number, and patterns that never end."""

import base64
import json
from typing import Any

import pytest

from spell_jax.policy.formats import gguf_tokenizer, hf_tokenizer
from spell_jax.policy.formats.hf_tokenizer import HfTokenizer
from spell_jax.policy.formats.tokenizer_limits import check_steps
from tests.policy.hf_folders import byte_level, write

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = [
    *(GPT2, CL100K, O200K, DEEPSEEK, *gguf_tokenizer._PATTERNS.values()),
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # BLOOM
    r"(?=(\d{3})+(?!\d))",  # digits in threes from the right
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"[\p{Han}]+|[\p{Lu}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?",
    r"<\|startoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",  # CLIP
    r"(?:\r\n|\n)+(?!\S)",
    r"(?>a+)+$",
]
ENDLESS = [
    *(r"(a+)+$", r"(a|aa)+$", r"(.*)*x", r"(a|a)*c", r"([a-z]+)*\d", r"\p{N}{1,3}+x", r"(.|\n)*x"),
    *(r"(?=(a+)+$)", r"(?:(?:a+)b?)+c", r"((a+))+$", r"(x+x+)+y", r"(?:a{0,5000})+b", r"(a+)+?$"),
    *(r"a*a*c", r"a{1,999}a{1,999}c", r"(?:aa|a){1,99}c", r"(?:a{0,30}){0,30}c"),
    *(r"(a*)\1", r"(?<x>a\g<x>?b)", "(" * 50 + ")" * 50, "a" * 20_000),
]


def replace(pattern: str, content: str = "", kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_are_accepted(pattern: str) -> None:
    check_steps({"normalizer": replace(pattern), "pre_tokenizer": split(pattern)})


@pytest.mark.parametrize("pattern", ENDLESS)
def test_pattern_that_may_never_end_is_refused_with_its_field(pattern: str) -> None:
    steps = {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, split(pattern)]}
    with pytest.raises(ValueError, match=r"^pre_tokenizer.pretokenizers\[1\].pattern.Regex = "):
        check_steps({"pre_tokenizer": steps})
    with pytest.raises(ValueError, match=r"^normalizer.pattern.Regex = "):
        check_steps({"normalizer": replace(pattern)})
    with pytest.raises(ValueError, match=r"^decoder.pattern.Regex = "):
        check_steps({"decoder": replace(pattern)})


@pytest.mark.parametrize(
    "steps, words",
    [
        ([replace("a", "aa", "String")] * 5, r"normalizers\[4\]: .* 32 times as long"),
        ([replace("a", "a" * 17, "String")], "17 times"),
        ([replace("", "a" * 16, "String")], "17 times"),
        ([replace(".", "a" * 17)], "17 times"),
        ([{"type": "Prepend", "prepend": "a" * 99}] * 42, r"normalizers\[41\]: .*4158 char"),
        ([replace("a", "b", "String")] * 1000, "more than 64 steps"),
    ],
)
@pytest.mark.parametrize("field", ["normalizer", "decoder"])
def test_steps_that_multiply_a_text_are_refused(field: str, steps: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}.*{words}"):
        check_steps({field: {"type": "Sequence", "normalizers": steps}})


def test_common_steps_are_accepted() -> None:
    spaces = [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁", "String"), {"type": "NFKC"}]
    check_steps({"normalizer": {"type": "Sequence", "normalizers": spaces}, "decoder": None})
    doubled = [replace("``", '"', "String"), replace("''", '"', "String"), replace("-", " - ")]
    check_steps({"normalizer": {"type": "Sequence", "normalizers": doubled}})


def test_nested_sequences_are_bounded() -> None:
    steps: Any = {"type": "Lowercase"}
    for _ in range(100):
        steps = {"type": "Sequence", "normalizers": [steps]}
    with pytest.raises(ValueError, match="nested more than"):
        check_steps({"normalizer": steps})


TEXT, TOKEN = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}


def frame(single: list[Any], ids: int = 1) -> dict[str, Any]:
    tokens = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}}
    return {"type": "TemplateProcessing", "single": single, "special_tokens": tokens}


@pytest.mark.parametrize("single, ids", [([TEXT] * 2, 1), ([TOKEN] * 100, 1), ([TEXT], 10**5)])
def test_frame_that_repeats_the_text_is_refused(single: list[Any], ids: int) -> None:
    check_steps({"post_processor": frame([TOKEN, TEXT, TOKEN])})
    processors = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, frame(single, ids)]}
    with pytest.raises(ValueError, match=r"post_processor\.processors\[1\]\.single: has the text"):
        check_steps({"post_processor": processors})


@pytest.mark.parametrize("field", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_long_additions_to_words_are_refused(field: str) -> None:
    check_steps({"model": {field: "</w>", "max_input_chars_per_word": 100}})
    with pytest.raises(ValueError, match=rf"model\.{field}: has 5000 characters"):
        check_steps({"model": {field: "x" * 5000}})
    with pytest.raises(ValueError, match=r"max_input_chars_per_word = 1000000000: must"):
        check_steps({"model": {"max_input_chars_per_word": 10**9}})


def test_table_with_a_long_replacement_is_refused() -> None:
    def table(text: bytes) -> dict[str, Any]:
        data = (8).to_bytes(4, "little") + bytes(8) + text + b"\0b\0"
        return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}

    check_steps({"normalizer": table(b"a" * 64)})
    with pytest.raises(ValueError, match="replaces characters by 65 bytes"):
        check_steps({"normalizer": table(b"a" * 65)})


def test_message_names_the_file(tmp_path) -> None:
    folder = write(tmp_path, byte_level())
    path = folder / hf_tokenizer.HF_FILE
    description = json.loads(path.read_text())
    path.write_text(json.dumps(description | {"normalizer": replace("(a+)+$")}))
    with pytest.raises(ValueError, match=r"tokenizer.json: normalizer.pattern.Regex = '\(a\+\)\+"):
        HfTokenizer(folder)
