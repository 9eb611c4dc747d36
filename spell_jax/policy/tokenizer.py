"""Tokenizers behind one small interface; here SentencePiece models with byte fallback."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Iterable, Sequence

import sentencepiece

MODEL_FILE = "tokenizer.model"
USER, ASSISTANT = "<|user|>", "<|assistant|>"


class Tokenizer:
    """A SentencePiece model and the chat layout `<|user|> text <|assistant|>`.

    The two turn markers are control symbols: encode() never produces them, whatever a document
    says, so no text can open or close a turn.
    """

    def __init__(self, model: bytes):
        self.model = model
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._pieces.vocab_size()
        self.eos_id: int = self._pieces.eos_id()
        self.pad_id: int = self._pieces.pad_id()
        self._user = self._pieces.piece_to_id(USER)
        self._assistant = self._pieces.piece_to_id(ASSISTANT)
        unknown = self._pieces.unk_id()
        if self.eos_id < 0 or self.pad_id < 0 or unknown in (self._user, self._assistant):
            raise ValueError(
                f"{MODEL_FILE}: needs eos, pad and the control symbols {USER} and {ASSISTANT}"
            )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        return self._pieces.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._pieces.decode([int(i) for i in ids])

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode(text))

    def chat(self, text: str) -> list[int]:
        """Ids of one user turn, ready for the assistant's answer."""
        return [self._user, *self.encode(text), self._assistant]

    def save(self, folder: str | pathlib.Path) -> None:
        (pathlib.Path(folder) / MODEL_FILE).write_bytes(self.model)


def load(folder: str | pathlib.Path) -> Tokenizer:
    """Reads FOLDER/tokenizer.model.

    Raises:
      FileNotFoundError: the folder has no such file.
      ValueError: the file is not a SentencePiece model, or not one of ours.
    """
    path = pathlib.Path(folder) / MODEL_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no SentencePiece model there")
    try:
        return Tokenizer(path.read_bytes())
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: not a tokenizer of this project ({error})") from error


def train(texts: Iterable[str], vocab_size: int, symbols: Sequence[str] = ()) -> Tokenizer:
    """Trains a BPE SentencePiece model with byte fallback.

    Lossless on any text, but for U+2581, which SentencePiece reads as a space.

    Args:
      texts: training sentences.
      vocab_size: pieces in all, an upper bound where the texts do not hold as many.
      symbols: strings that are always one piece, wherever they stand.
    """
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=out,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=0.9995,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=False,
        allow_whitespace_only_pieces=True,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        control_symbols=[USER, ASSISTANT],
        user_defined_symbols=list(dict.fromkeys(symbols)),
        max_sentence_length=1 << 16,
        num_threads=1,
        minloglevel=2,
    )
    return Tokenizer(out.getvalue())
