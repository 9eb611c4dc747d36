"""Bytes of single tokens, which may be parts of a character, from their names in the vocabulary."""

from __future__ import annotations

import re

from spell_jax.policy.formats.sentencepiece_json import SPACE
from spell_jax.policy.tokenizer_base import Tokenizer


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of a token's text, such as one byte of a character.

    A token without a text, such as a stop token, has the bytes of its name.
    """
    piece, text = tokenizer.piece(token_id), tokenizer.decode([token_id])
    # `decode` may drop the space at the beginning of a text, which this token need not begin.
    if SPACE in piece and tokenizer.shows(token_id):
        return piece.replace(SPACE, " ").encode()
    if text and "\ufffd" not in text:
        return text.encode()
    if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes([int(match[1], 16)])
    if all(sign in _BYTE_SIGNS for sign in piece):
        return bytes(_BYTE_SIGNS[sign] for sign in piece)
    return piece.encode()


def _byte_signs() -> dict[str, int]:
    """Return the characters that stand for bytes in GPT-2's vocabulary, and in those like it."""
    # Visible characters of Latin-1 stand for themselves. The other bytes follow from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    signs = {chr(byte): byte for byte in visible}
    return signs | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_SIGNS = _byte_signs()
