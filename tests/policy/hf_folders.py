"""Folders of Hugging Face tokenizers: small ones made here, and real ones in SPELL_DATA."""

import functools
import gzip
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import tokenizers as hf

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.selfplay import prompts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("<think>", "</think>")


def added_token(token_id: int, text: str, special: bool = True, **flags) -> dict:
    no_flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": special} | no_flags | flags


def byte_level(markers=MARKERS, words=WORDS, merges=(("a", "b"), ("Ċ", "Ċ"), ("r", "Ċ"))) -> dict:
    """Return a byte-level BPE with a few merges; markers are special, words only added tokens."""
    pieces = [*sorted(hf.pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokens = [(text, True) for text in markers] + [(text, False) for text in words]
    frame = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": [
            added_token(len(pieces) + i, text, special) for i, (text, special) in enumerate(tokens)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": r"\s*[\r\n]+|\s+|\w+|[^\s\w]+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                frame | {"use_regex": False},
            ],
        },
        "decoder": frame | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in merges],
        },
    }


def fallback_bpe(pieces: list[str], merges: list[list[str]]) -> dict:
    """Return the model of a BPE tokenizer.json that spells unknown characters in bytes."""
    return {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": {piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
        "merges": merges,
    }


def byte_fallback(scheme: str = "first") -> dict:
    """Return a BPE of characters with byte fallback, like the BPEs of Llama 2 and Mistral."""
    tokens = ["<unk>", "<s>", "</s>"]
    pieces = [*tokens, *(f"<0x{i:02X}>" for i in range(256)), *"▁abi<>/s[]INST", "▁a", "ab"]
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "version": "1.0",
        "added_tokens": [added_token(i, text) for i, text in enumerate(tokens)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
        },
        "model": fallback_bpe(pieces, [["▁", "a"], ["a", "b"]]),
    }


def unigram(unknown: int = 0) -> dict:
    """Return a unigram model. Every added token is a piece too, and likelier than any letter."""
    tokens = ["<unk>", "</s>", "<turn>"]
    letters = dict.fromkeys("▁ab<>/sturnk")
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "added_tokens": [added_token(i, text) for i, text in enumerate(tokens)],
        "pre_tokenizer": space,
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "byte_fallback": False,
            "vocab": [[text, 0.0] for text in tokens] + [[letter, -3.0] for letter in letters],
        },
    }


def word_piece() -> dict:
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "[SEP]", "a", "##b", "c", ".", "##."])}
    return {
        "version": "1.0",
        "added_tokens": [added_token(0, "[UNK]"), added_token(1, "[SEP]")],
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": {"content": "<|endoftext|>", "lstrip": False, "__type": "AddedToken"},
    "bos_token": None,
    "chat_template": CHATML,
}


def write(
    folder: Path, tokenizer: dict, tokenizer_config: dict | None = CONFIG, **other_files
) -> Path:
    """Write a folder with these files; the keywords of other_files are file names without .json."""
    folder.mkdir(exist_ok=True, parents=True)
    files = {"tokenizer": tokenizer, "tokenizer_config": tokenizer_config, **other_files}
    for name, value in files.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    """Return the ids of added tokens."""
    return [tokenizer._all.token_to_id(text) for text in texts]  # type: ignore[attr-defined]


def same_as_transformers(folder: Path, messages, thinking: bool | None = None) -> list[int]:
    """Assert that our ids equal the ids of apply_chat_template; return the ids."""
    ids = load(folder, thinking).chat(messages)
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    option = {} if thinking is None else {"enable_thinking": thinking}
    expected = theirs(folder).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False, **option
    )
    assert ids == expected
    return ids


load = functools.cache(tokenizers.load)
SCRATCH = tempfile.TemporaryDirectory(prefix="spell-tokenizers-")
REAL = ("qwen2.5", "qwen2.5-jinja", "qwen3", "minimind")


@functools.cache
def theirs(folder: Path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


@functools.cache
def real(data: Path, name: str) -> Path:
    """Return a folder in the Hub's layout; qwen2.5-jinja has its template in a separate file."""
    source, folder = data / "tokenizers", Path(SCRATCH.name) / name
    if name == "minimind":
        return source / name
    folder.mkdir()
    with gzip.open(source / "qwen2" / "tokenizer.qwen2.5.rebuilt.json.gz") as packed:
        (folder / "tokenizer.json").write_bytes(packed.read())
    version = name.removesuffix("-jinja")
    config = source / "qwen2" / f"tokenizer_config.{version}.json"
    shutil.copyfile(config, folder / "tokenizer_config.json")
    if name != version:
        template = source / "qwen2" / "Qwen2.5-7B-Instruct.jinja"
        shutil.copyfile(template, folder / "chat_template.jinja")
        plain = json.loads(config.read_text())
        del plain["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(plain))
    return folder


@functools.cache
def documents(data: Path) -> list[str]:
    speeches = sorted((data / "gov_speeches" / "inaugural").glob("*.txt"))[-3:]
    filing = data / "edgar" / "dev" / "aapl-10-q-2025-08-01.txt"
    return [path.read_text()[:8000] for path in (*speeches, filing)]


@functools.cache
def role_prompts(data: Path) -> list[str]:
    """Return prompts of the three roles about real documents."""
    words, texts = prompts.load("full"), documents(data)
    return [
        words.questioner("general_qa", texts[:2]),
        words.questioner("multiple_choice", texts[1:], letter="B"),
        words.responder("financial_math", texts, "What were net sales, in millions?"),
        words.verifier("Who spoke?", "the President\n", " The President."),
    ]


def vectors(data: Path) -> list[tuple[str, list[int]]]:
    stem = data / "tokenizers" / "llamacpp_vectors" / "ggml-vocab-qwen2.gguf"
    texts = stem.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = stem.with_suffix(".gguf.out").read_text().split("\n")
    ids = [[int(i) for i in line.split()] for line in lines]
    return list(zip(texts, ids, strict=True))


@functools.cache
def unigram_words(unknown: int = 0) -> Tokenizer:
    config = {"eos_token": "</s>", "chat_template": "<turn>{{ messages[0].content }}</s>"}
    folder = write(Path(SCRATCH.name) / f"unigram{unknown}", unigram(unknown), config)
    return tokenizers.load(folder)
