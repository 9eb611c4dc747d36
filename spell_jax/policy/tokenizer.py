"""Tokenizers with one interface (tokenizer_base.py): SentencePiece models, Hugging Face folders."""

from __future__ import annotations

import io
import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import sentencepiece

from spell_jax.policy import chat as chats
from spell_jax.policy.formats import hf_tokenizer, sentencepiece_json
from spell_jax.policy.tokenizer_base import Tokenizer, find_gaps
from spell_jax.runtime.files import durable, remote

MODEL_FILE = "tokenizer.model"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
LONGEST_TEXT = 1 << 16  # bytes of a text that trains a tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with the chat layout `<|user|> text <|assistant|>`.

    The turn markers are control symbols, which encode() never produces: no text can open or close a
    turn. An earlier assistant turn ends with eos. A model without these symbols has no chat.
    """

    def __init__(self, model: bytes):
        self.model = model
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._pieces.vocab_size()
        self.eos_id = self._pieces.eos_id()
        if self.eos_id < 0:
            raise ValueError("it has no end token")
        self.pad_id = self._pieces.pad_id() if self._pieces.pad_id() >= 0 else self.eos_id
        self.stop_ids = (self.eos_id,)
        self.turn_end_id = self.eos_id
        # Unused pieces keep their id, but are no tokens: no text contains them.
        unused = filter(self._pieces.is_unused, range(self.vocab_size))
        # With vocab_size itself as an id, a gap at the end is found too.
        self.gaps = find_gaps({*range(self.vocab_size + 1)} - {*unused})
        self.bos_id = self._pieces.bos_id() if self._pieces.bos_id() >= 0 else None
        self._user = self._pieces.piece_to_id(USER)
        self._assistant = self._pieces.piece_to_id(ASSISTANT)

    def add_ends(self, files: Mapping[str, bytes], folder: pathlib.Path) -> None:
        """Add the stop tokens of generation_config.json and config.json, files of `folder`."""
        size = self.vocab_size
        markers = {*filter(self._pieces.is_control, range(size))}
        self.stop_ids = hf_tokenizer.with_end_ids(self.stop_ids, files, folder, size, markers)

    def encode(self, text: str) -> list[int]:
        text.encode()  # raises ValueError for lone surrogates
        return self._pieces.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._pieces.decode([int(i) for i in ids if self.shows(i)])

    def chat(self, messages: chats.Messages) -> list[int]:
        return self._encode_parts(self._parts(messages))

    def render(self, messages: chats.Messages, open_turn: bool = True) -> str:
        turns, last = messages, ""
        if not open_turn:
            *turns, final = chats.read_messages(messages)
            last = final["content"]
        texts = (p if isinstance(p, str) else self.token_text(p) for p in self._parts(turns))
        return "".join(texts) + last

    def encode_rendered(self, text: str, start: bool) -> list[int]:
        markers = (self._user, self._assistant, self.eos_id)
        # Only control symbols: an ordinary piece with such a text is found by `encode`.
        ids = {self.token_text(i): i for i in markers if self._pieces.is_control(i)}
        parts = re.split(f"({'|'.join(map(re.escape, ids))})", text)
        begun = self.start_ids if start else ()
        return [*begun, *self._encode_parts([ids.get(part, part) for part in parts])]

    def token_text(self, token_id: int) -> str:
        return self.piece(token_id)

    def piece(self, token_id: int) -> str:
        return self._pieces.id_to_piece(token_id)

    def _encode_parts(self, parts: Iterable[int | str]) -> list[int]:
        read = ([part] if isinstance(part, int) else self.encode(part) for part in parts)
        return [i for ids in read for i in ids]

    def _parts(self, messages: chats.Messages) -> list[int | str]:
        """Return the markers and contents of a chat up to the start of the assistant's answer."""
        if not all(map(self._pieces.is_control, (self._user, self._assistant))):
            raise ValueError(
                f"{MODEL_FILE}: has no chat layout; needs the control symbols {USER} and "
                f"{ASSISTANT}, or {hf_tokenizer.HF_FILE} and a chat template beside it"
            )
        turns = chats.read_messages(messages)
        if [turn["role"] for turn in turns] != (["user", "assistant"] * len(turns))[: len(turns)]:
            raise ValueError(
                "messages: this layout has turns of user and assistant, in alternation"
            )
        if turns[-1]["role"] != "user" or any("reasoning_content" in turn for turn in turns):
            raise ValueError("messages: the last must be the user's, and none have reasoning apart")
        parts: list[int | str] = []
        for turn in turns:
            text, user = turn["content"], turn["role"] == "user"
            parts += [self._user, text, self._assistant] if user else [text, self.eos_id]
        return parts

    def save(self, folder: str | pathlib.Path) -> None:
        """Write tokenizer.model, which `load` reads, and the files that transformers reads."""
        durable.write_file(pathlib.Path(folder) / MODEL_FILE, self.model)
        if not all(map(self._pieces.is_control, (self._user, self._assistant))):
            return
        names = {"eos_token": self.eos_id, "pad_token": self.pad_id}
        texts = sentencepiece_json.convert(self.model, names) or {}
        for name, text in texts.items():
            durable.write_file(pathlib.Path(folder) / name, text.encode())


def load(folder: str | pathlib.Path, thinking: bool | None = None) -> Tokenizer:
    """Load the tokenizer of a folder or its URL; tokenizer.json is preferred to tokenizer.model.

    Where SentencePieceTokenizer.save wrote both, tokenizer.model is preferred: its `encode` takes
    no text for a control symbol.

    `thinking` says whether the assistant should think first, for chat templates with
    enable_thinking; None leaves the choice to the template.

    Raises:
      FileNotFoundError: if the folder has no tokenizer.
      ValueError: if a file is damaged, or the layout does not support `thinking`.
    """
    folder = remote.fetch(folder, with_weights=False)
    place = folder / MODEL_FILE
    is_ours = place.is_file() and sentencepiece_json.is_ours(folder)
    if (folder / hf_tokenizer.HF_FILE).is_file() and not is_ours:
        return hf_tokenizer.HfTokenizer(folder, thinking)
    if not place.is_file():
        raise FileNotFoundError(
            f"{folder}: no tokenizer there, needs {hf_tokenizer.HF_FILE} or {MODEL_FILE}"
        )
    if thinking is not None:
        raise ValueError(f"thinking = {thinking}: the layout of {place} has none, must be None")
    try:
        tokenizer = SentencePieceTokenizer(place.read_bytes())
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{place}: not a SentencePiece model of use ({error})") from error
    files = hf_tokenizer.read_files(folder, (hf_tokenizer.GENERATION, hf_tokenizer.ARCHITECTURE))
    tokenizer.add_ends(files, folder)
    return tokenizer


def train(
    texts: Iterable[str], vocab_size: int, symbols: Sequence[str] = ()
) -> SentencePieceTokenizer:
    """Train a BPE SentencePiece model with byte fallback and at most `vocab_size` pieces.

    Each of `symbols` is always a single piece, wherever it occurs. The model is lossless on any
    text, except that SentencePiece reads U+2581 as a space. Texts of more than LONGEST_TEXT bytes
    are skipped. ValueError if no text is left, or SentencePiece refuses the size or the texts.
    """
    texts, sizes = iter(texts), []
    # SentencePiece skips such texts too, but fails with a message about its own code if all are.
    for first in texts:
        sizes.append(len(first.encode()))
        if 0 < sizes[-1] <= LONGEST_TEXT:
            break
    else:
        raise ValueError(
            f"a new tokenizer is trained on texts of 1 to {LONGEST_TEXT} bytes, the shortest here "
            f"has {min(sizes, default=0)}; cut the texts, or name a tokenizer that exists"
        )
    # Lossless: no normalization, white space as it is, bytes for rare characters. One thread: equal
    # texts give equal models.
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain([first], texts),
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
            max_sentence_length=LONGEST_TEXT,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        text = f"no tokenizer of {vocab_size} pieces can be trained on the texts ({error}); choose "
        raise ValueError(f"{text}another size or other texts") from error
    return SentencePieceTokenizer(out.getvalue())
