"""Tokenizer files of a Hugging Face folder, from the fields of a GGUF file.

`tokenizer.ggml.model` names the algorithm. "gpt2" is byte-level BPE with merges;
`tokenizer.ggml.pre` then names the way to split a text into words. "llama" is a SentencePiece BPE
with scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spell_jax.policy.formats import hf_tokenizer
from spell_jax.policy.formats.gguf_reader import GgufFile

# Types of tokens in tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# Patterns of words, from the models' own tokenizer.json files.
_GPT4_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _GPT4_LETTERS % r"\p{N}{1,3}", _GPT4_LETTERS % r"\p{N}"
_PATTERNS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_GPT2_WORDS = ("default", "gpt-2")  # the byte-level splitter's own pattern
# The same pattern after each digit was split off. transformers ignores this step of SmolLM2, and
# reads a blank line before a digit as two tokens instead of one (docs/models.md).
_SINGLE_DIGITS = ("smollm",)
PRE_TOKENIZERS = (*_GPT2_WORDS, *_SINGLE_DIGITS, *_PATTERNS)

# Field of tokenizer_config.json -> id in the file.
_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_SPACE = "▁"  # SentencePiece's space
# Most characters of a SentencePiece token: `_merges` looks up all cuts of a token in quadratic time
# (a token of a million characters would take a day). Published tokens have up to 64.
_LONGEST = 512
# Ends of a turn and of a message.
_MORE_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def hf_files(file: GgufFile) -> dict[str, str]:
    """Build tokenizer.json, tokenizer_config.json and generation_config.json: name -> content.

    Raises ValueError if a field is missing or damaged, or the tokenizer is not implemented.
    """
    tokens = _tokens(file)
    # A dictionary of texts to ids would silently keep the last of two equal tokens.
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens: a token is there twice")
    description = _description(file, tokens)
    named = {name: tokens[i] for name, i in _named_ids(file).items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
    }
    template = file.fields.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = _checked_text(file, "tokenizer.chat_template", template)
    ids = special_ids(file)
    generation: dict[str, Any] = {
        name: ids[name] for name in ("bos_token_id", "pad_token_id") if name in ids
    }
    if ends := _ends(file):
        generation["eos_token_id"] = ends
    contents = {
        hf_tokenizer.HF_FILE: description,
        hf_tokenizer.CONFIG: config,
        hf_tokenizer.GENERATION: generation,
    }
    return {name: json.dumps(value, ensure_ascii=False) for name, value in contents.items()}


def special_ids(file: GgufFile) -> dict[str, int]:
    """Return bos_token_id, eos_token_id, pad_token_id of config.json, where the file has them."""
    return {f"{name}_id": i for name, i in _named_ids(file).items() if name != "unk_token"}


def _named_ids(file: GgufFile) -> dict[str, int]:
    return {name: _token_id(file, field) for name, field in _NAMED.items() if field in file.fields}


def _ends(file: GgufFile) -> list[int]:
    fields = (_NAMED["eos_token"], *_MORE_ENDS)
    return list(dict.fromkeys(_token_id(file, name) for name in fields if name in file.fields))


def _token_id(file: GgufFile, name: str) -> int:
    value, count = file.fields[name], len(_texts(file, "tokenizer.ggml.tokens"))
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"{file.path}: {name} = {value!r}: must be an id below {count}")
    return value


def _texts(file: GgufFile, name: str) -> list[str]:
    value = file.fields.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{file.path}: {name}: must be a list of texts, with at least one")
    return value


def _tokens(file: GgufFile) -> list[str]:
    """Return the tokens; SentencePiece's tokens of spaces alone as U+2581, as its texts have them.

    Files write Gemma's tokens for runs of spaces with spaces.
    """
    tokens = _texts(file, "tokenizer.ggml.tokens")
    if file.fields.get("tokenizer.ggml.model") != "llama":
        return tokens
    return [token if token.strip(" ") else _SPACE * len(token) for token in tokens]


def _checked_text(file: GgufFile, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{file.path}: {name} = {value!r}: must be a text")
    return value


def _numbers(file: GgufFile, name: str, count: int) -> list[Any]:
    value = file.fields.get(name)
    if value is None or isinstance(value, (str, list)) or getattr(value, "shape", ()) != (count,):
        raise ValueError(f"{file.path}: {name}: must be {count} numbers, one for each token")
    return value.tolist()


def _description(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Build the content of tokenizer.json."""
    kind = file.fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(file, tokens)
    elif kind == "llama":
        parts = _sentencepiece(file, tokens)
    else:
        raise ValueError(f"{file.path}: tokenizer.ggml.model = {kind!r}: must be 'gpt2' or 'llama'")
    return {
        "version": "1.0",
        "added_tokens": list(_added_tokens(file, tokens)),
        **parts,
        "post_processor": _post_processor(file, tokens, default=kind == "llama"),
    }


def _added_tokens(file: GgufFile, tokens: list[str]) -> Iterator[dict[str, Any]]:
    kinds = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": i, "content": token, **flags, "special": kind != _USER_DEFINED}


def _post_processor(file: GgufFile, tokens: list[str], default: bool) -> dict[str, Any] | None:
    """Build the post-processor that begins a text with bos in transformers; `encode` adds none."""
    adds = file.fields.get("tokenizer.ggml.add_bos_token", default)
    begin = _named_ids(file).get("bos_token")
    if not adds or begin is None:
        return None
    mark = {"SpecialToken": {"id": tokens[begin], "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            mark,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
        ],
        "special_tokens": {
            tokens[begin]: {"id": tokens[begin], "ids": [begin], "tokens": [tokens[begin]]}
        },
    }


def _byte_level(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    merges = [merge.split(" ") for merge in _texts(file, "tokenizer.ggml.merges")]
    if not all(len(pair) == 2 for pair in merges):
        raise ValueError(f"{file.path}: tokenizer.ggml.merges: each must be two texts and a space")
    pre = file.fields.get("tokenizer.ggml.pre", _GPT2_WORDS[0])
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre = {pre!r}: must be one of {PRE_TOKENIZERS}"
        )
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = []
    if pre in _PATTERNS:
        pattern = {"Regex": _PATTERNS[pre]}
        steps = [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}]
    elif pre in _SINGLE_DIGITS:
        steps = [{"type": "Digits", "individual_digits": True}]
    steps.append(to_bytes | {"use_regex": pre not in _PATTERNS})
    return {
        # Qwen2's own tokenizer.json composes characters first.
        "normalizer": {"type": "NFC"} if _PATTERNS.get(pre) == _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": to_bytes | {"use_regex": True},
        "model": _bpe(_vocabulary(file, tokens, merges), merges),
    }


def _sentencepiece(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    scores = _numbers(file, "tokenizer.ggml.scores", len(tokens))
    kinds = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    # SentencePiece finds user-defined tokens before it joins any pair; their scores mean nothing.
    # Published tokenizer.json files join them first, in order of their ids.
    best = max(scores) + len(tokens)
    ranks = [
        best - i if kind == _USER_DEFINED else score
        for i, (score, kind) in enumerate(zip(scores, kinds, strict=True))
    ]
    vocabulary = _vocabulary(file, tokens)
    unknown = _named_ids(file).get("unk_token")
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    back = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    # llama.cpp's default for SentencePiece is a space before the text, which decoding strips again.
    if file.fields.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(vocabulary, _merges(vocabulary, ranks, file.path))
    options = {"unk_token": None if unknown is None else tokens[unknown], "fuse_unk": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": model | options | {"byte_fallback": True},
    }


def _vocabulary(
    file: GgufFile, tokens: list[str], merges: Iterable[list[str]] = ()
) -> dict[str, int]:
    """Map tokens to ids, without padding of the table: unused tokens that nothing refers to."""
    # llama.cpp names each row beyond the tokenizer, such as [PAD151665]. Such rows must stay ids
    # without a token, which have probability 0.
    kinds = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    named = {*_named_ids(file).values(), *_ends(file)}
    parts = {part for pair in merges for part in (*pair, "".join(pair))}
    return {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != _UNUSED or i in named or token in parts
    }


def _merges(vocabulary: Mapping[str, int], scores: list[float], path: Any) -> list[list[str]]:
    """Return the merges of a SentencePiece BPE: splits of tokens into two, by the token's score."""
    # SentencePiece has no list of merges: it joins the pair of pieces with the best score first.
    # tokenizer.json needs the list, best score first; ids break ties.
    scored_merges = []
    for token, i in vocabulary.items():
        if len(token) > _LONGEST:
            raise ValueError(
                f"{path}: tokenizer.ggml.tokens: token {i} has {len(token)} characters; must have "
                f"at most {_LONGEST}"
            )
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                scored_merges.append((-scores[i], left, right, [token[:cut], token[cut:]]))
    return [pair for *_, pair in sorted(scored_merges, key=lambda merge: merge[:3])]


def _bpe(vocabulary: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }
