"""A SentencePiece model as tokenizer.json and tokenizer_config.json, which transformers loads.

Only models as `tokenizer.train` makes them have an equal there: byte-pair encoding with byte
fallback, without normalization and without a space before the text. Pieces become the vocabulary,
symbols of the user become added tokens, and each way to join two pieces into a third becomes a
merge. The text of a control symbol, which SentencePiece reads as text, is that symbol in
transformers, which needs it to tokenize a rendered chat.
"""

from __future__ import annotations

import enum
import json
import pathlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spell_jax.policy.formats import hf_tokenizer

# transformers 5 has a list of model types, qwen2 among them, of which it ignores tokenizer_class:
# AutoTokenizer would rebuild the tokenizer as Qwen2's. A folder with a class of its own in auto_map
# is left alone, whether or not trust_remote_code lets AutoTokenizer import the class.
MODULE = "tokenization_sentencepiece_bpe.py"
MODULE_TEXT = '''"""The tokenizer of tokenizer.json, as it is."""

from transformers import PreTrainedTokenizerFast


class Tokenizer(PreTrainedTokenizerFast):
    pass
'''
# The chat layout for transformers. The comment marks files that SentencePieceTokenizer.save wrote.
_MARK = "{#- written by spell_jax for tokenizer.model -#}"
_TEMPLATE = _MARK + (
    "{%- for message in messages -%}"
    "{%- if message['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}"
    "{{- raise_exception('the turns must be of user and assistant, in alternation') -}}"
    "{%- endif -%}"
    "{{- '<|user|>' + message['content'] if message['role'] == 'user'"
    " else '<|assistant|>' + message['content'] + eos_token -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
SPACE = "▁"  # U+2581, SentencePiece's sign of a space
_BPE = 2  # of TrainerSpec.model_type
# Field numbers of sentencepiece_model.proto, whose generated module wants a newer protobuf than
# other packages allow.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_CHARACTER_MAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5


class PieceType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class VocabularyPiece(NamedTuple):
    """An entry of the vocabulary; its id is its place."""

    text: str
    score: float = 0.0
    kind: int = PieceType.NORMAL


def is_ours(folder: pathlib.Path) -> bool:
    """Return whether SentencePieceTokenizer.save wrote the folder's tokenizer_config.json."""
    config = folder / hf_tokenizer.CONFIG
    return config.is_file() and _MARK.encode() in config.read_bytes()


def convert(model: bytes, names: Mapping[str, int]) -> dict[str, str] | None:
    """Return file name -> text for a SentencePiece model; None if no such files equal it.

    Args:
      model: bytes of tokenizer.model.
      names: field of tokenizer_config.json, such as "eos_token" -> id of its token.
    """
    pieces = _read_pieces(model)
    if pieces is None:
        return None
    added_types = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)
    added_tokens = [
        {
            "id": i,
            "content": piece.text.replace(SPACE, " "),
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            "special": piece.kind != PieceType.USER_DEFINED,
        }
        for i, piece in enumerate(pieces)
        if piece.kind in added_types
    ]
    unknown = next(piece.text for piece in pieces if piece.kind == PieceType.UNKNOWN)
    space_to_sign = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    sign_to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [sign_to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": space_to_sign,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.text: i for i, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in _merges(pieces)],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": [None, f"{MODULE.removesuffix('.py')}.Tokenizer"]},
        "clean_up_tokenization_spaces": False,
        **{field: pieces[i].text for field, i in names.items()},
        "unk_token": unknown,
        "chat_template": _TEMPLATE,
    }
    contents = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    texts = {
        name: json.dumps(content, ensure_ascii=False, indent=1)
        for name, content in contents.items()
    }
    return texts | {MODULE: MODULE_TEXT}


def _merges(pieces: Sequence[VocabularyPiece]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of pieces that join into a piece, in the order in which they are joined."""
    # SentencePiece joins the pair whose result has the highest score, and tokenizers the pair that
    # comes first in this list.
    normal = [piece for piece in pieces if piece.kind == PieceType.NORMAL]
    texts = {piece.text for piece in normal}
    for piece in sorted(normal, key=lambda piece: -piece.score):
        for place in range(1, len(piece.text)):
            left, right = piece.text[:place], piece.text[place:]
            if left in texts and right in texts:
                yield left, right


def _read_pieces(model: bytes) -> list[VocabularyPiece] | None:
    """Return the pieces of a model that tokenizer.json can express; None for another model."""
    pieces: list[VocabularyPiece] = []
    trainer: dict[int, Any] = {}
    # The defaults of the proto, for fields that are not written.
    normalizer: dict[int, Any] = {_DUMMY_PREFIX: 1, _REMOVE_SPACES: 1, _ESCAPE_SPACES: 1}
    for number, value in _fields(model):
        if number == _PIECES:
            fields = dict(_fields(value))
            (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
            pieces.append(
                VocabularyPiece(fields[1].decode(), score, fields.get(3, PieceType.NORMAL))
            )
        elif number == _TRAINER:
            trainer |= dict(_fields(value))
        elif number == _NORMALIZER:
            normalizer |= dict(_fields(value))
    is_plain = not (
        normalizer.get(_CHARACTER_MAP) or normalizer[_DUMMY_PREFIX] or normalizer[_REMOVE_SPACES]
    )
    kinds = {piece.kind for piece in pieces}
    is_expressible = (
        trainer.get(_MODEL_TYPE) == _BPE
        and trainer.get(_BYTE_FALLBACK)
        and is_plain
        and normalizer[_ESCAPE_SPACES]
        and PieceType.UNKNOWN in kinds
        and PieceType.UNUSED not in kinds
    )
    return pieces if is_expressible else None


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a protobuf message: an int, or the bytes of other types."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, at = _read_varint(message, at)
        else:
            length = {1: 8, 5: 4}.get(wire_type)
            if length is None:
                length, at = _read_varint(message, at)
            value, at = message[at : at + length], at + length
        yield number, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place of a message, and the place after the number."""
    value = shift = 0
    while True:
        byte = message[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
        shift += 7
