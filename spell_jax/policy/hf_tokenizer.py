"""Hugging Face tokenizers: tokenizer.json by the `tokenizers` package, with a chat template."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers as hf

from spell_jax.policy import chat as chats
from spell_jax.policy.tokenizer_base import Tokenizer

HF_FILE = "tokenizer.json"
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
GENERATION, ARCHITECTURE = "generation_config.json", "config.json"
# What makes up a tokenizer on disk; saved as it was read.
HF_FILES = (
    HF_FILE,
    CONFIG,
    TEMPLATE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    GENERATION,
)
NAMED = ("eos_token", "bos_token", "pad_token", "unk_token")  # of tokenizer_config.json


class HfTokenizer(Tokenizer):
    """A Hugging Face tokenizer and its chat template.

    Ids of `chat` are those of transformers' apply_chat_template, as long as no content says the
    text of an added token; if one does, it stays text (chat.py). Ids of `encode` are those of
    transformers with split_special_tokens, and no other added token matched either. (So a model
    that has added tokens for runs of white space reads these as its base vocabulary does.)
    """

    def __init__(
        self, files: Mapping[str, bytes], folder: pathlib.Path, thinking: bool | None = None
    ):
        """Builds it from the contents of its files.

        Args:
          files: name -> bytes, of HF_FILES and config.json those that there are.
          folder: where they are from, for messages of errors.
          thinking: what the template finds as enable_thinking; None: it is undefined.

        Raises:
          ValueError: a file is damaged, or they do not fit together, or the template does not know
            thinking; it names file and field.
        """
        self._files = {name: files[name] for name in HF_FILES if name in files}
        self._folder = folder
        self._place = folder / HF_FILE
        config = _read_object(files, CONFIG, folder)
        description = _read_object(files, HF_FILE, folder)
        self._all = _build(files[HF_FILE], description, self._place)
        names = _named_tokens(config, folder)
        named = _add_tokens(self._all, config, names, folder)
        self.vocab_size = max(self._all.get_vocab().values(), default=-1) + 1
        self._read_ends(files, named)
        self._prepare_text(description, named)
        self._template = self._make_template(config, names, thinking)

    def _read_ends(self, files: Mapping[str, bytes], named: Mapping[str, int]) -> None:
        ends = [named["eos_token"]] if "eos_token" in named else []
        ends += _read_end_ids(files, GENERATION, self._folder, self.vocab_size)
        ends = ends or _read_end_ids(files, ARCHITECTURE, self._folder, self.vocab_size)
        if not ends:
            raise ValueError(
                f"{self._folder}: no token ends a turn: {CONFIG} must have eos_token, or "
                f"{GENERATION} or {ARCHITECTURE} eos_token_id"
            )
        self.eos_id, *_ = self.stop_ids = tuple(dict.fromkeys(ends))
        self.pad_id = named.get("pad_token", self.eos_id)

    def _prepare_text(self, description: Mapping[str, Any], named: Mapping[str, int]) -> None:
        """Makes the tokenizers of texts: the same model, without added tokens and frames.

        Decoding is done by the one with everything.
        """
        added = self._all.get_added_tokens_decoder()
        # White space is text: no turn is made of it, and templates trim it.
        self._added = {i: t for i, t in added.items() if t.special or t.content.strip()}
        self._hidden = {i for i, token in added.items() if token.special}
        # Some models have added tokens in their vocabulary too, where plain pieces may reach them.
        self._reserved = {*self._added, *self.stop_ids}
        self._unknown = _unknown_id(description["model"], self._all)
        self._keeps_unknown = self._unknown not in (*self.stop_ids, named.get("bos_token"))
        splitter = description.get("pre_tokenizer")
        inside = _without_first(splitter)
        self._text = self._later = self._plain(self._all.pre_tokenizer)
        if inside != splitter:
            self._later = self._plain(_build_splitter(inside))
        byte_fallback = '"ByteFallback"' in json.dumps(description.get("decoder"))
        self._bytes = {i for t, i in self._all.get_vocab().items() if byte_fallback and _is_byte(t)}
        with _named_errors(self._place, "cannot encode"):
            self._text.encode("a", add_special_tokens=False)

    def _plain(self, splitter: Any) -> hf.Tokenizer:
        tokenizer = hf.Tokenizer(self._all.model)
        if self._all.normalizer:
            tokenizer.normalizer = self._all.normalizer
        if splitter:
            tokenizer.pre_tokenizer = splitter
        return tokenizer

    def _make_template(
        self, config: Mapping[str, Any], names: Mapping[str, str], thinking: bool | None
    ) -> chats.Template | None:
        source, place = _read_template(self._files, config, self._folder)
        if source is None:
            return None
        variables: dict[str, Any] = {**names}
        if thinking is not None:
            variables["enable_thinking"] = thinking
            if "enable_thinking" not in source:
                raise ValueError(
                    f"thinking = {thinking}: {place} reads no enable_thinking, must be None"
                )
        tokens = (
            chats.Token(i, token.content, token.lstrip, token.rstrip, token.single_word)
            for i, token in self._added.items()
        )
        return chats.Template(source, place, variables, tokens)

    def encode(self, text: str) -> list[int]:
        return self._encode(self._text, text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._all.decode([int(i) for i in ids if self.shows(i)])

    def chat(self, messages: chats.Messages) -> list[int]:
        if self._template is None:
            raise ValueError(f"{self._folder}: no chat template, in {TEMPLATE} or {CONFIG}")
        ids: list[int] = []
        for number, part in enumerate(self._template.parts(messages)):
            if isinstance(part, str):
                ids += self._encode(self._later if number else self._text, part)
            else:
                ids.append(part)
        return ids

    def save(self, folder: str | pathlib.Path) -> None:
        for name, content in self._files.items():
            (pathlib.Path(folder) / name).write_bytes(content)

    def shows(self, token_id: int) -> bool:
        return super().shows(token_id) and token_id not in self._hidden

    def waits(self, token_id: int) -> bool:
        # A run of byte tokens is one text if all of it is UTF-8, else one U+FFFD each.
        return token_id in self._bytes

    def _encode(self, tokenizer: hf.Tokenizer, text: str) -> list[int]:
        text.encode()  # lone surrogates have no ids
        with _named_errors(self._place, "cannot encode"):
            found = tokenizer.encode(text, add_special_tokens=False)
            if self._reserved.isdisjoint(found.ids):
                return found.ids
            ids = []
            for i, piece, (start, end) in zip(found.ids, found.tokens, found.offsets, strict=True):
                ids += self._spell(i, piece, text[start:end])
            return ids

    def _spell(self, token_id: int, piece: str, covered: str) -> list[int]:
        """Ids of a piece; one that is an added token is spelled out, character by character.

        Characters that the vocabulary lacks are the unknown token, or nothing where this token
        begins or ends turns as well.
        """
        unknown = [self._unknown] if self._unknown is not None and self._keeps_unknown else []
        if token_id not in self._reserved:
            return [token_id]
        if token_id == self._unknown:
            name = self._all.id_to_token(token_id) or ""
            # Most models name the unknown piece by its token; unigrams show what it stands for.
            piece = covered if piece == name else piece
            if name not in piece:
                return unknown
        letters = [found.id for letter in piece for found in self._all.model.tokenize(letter)]
        spelled = [[i] if i not in self._reserved else unknown for i in letters]
        return [i for ids in spelled for i in ids]


def read(folder: pathlib.Path, thinking: bool | None = None) -> HfTokenizer:
    """The tokenizer of a folder with tokenizer.json; see tokenizer.load."""
    paths = [folder / name for name in (*HF_FILES, ARCHITECTURE)]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    return HfTokenizer(files, folder, thinking)


@contextlib.contextmanager
def _named_errors(place: pathlib.Path, what: str) -> Iterator[None]:
    """Turns whatever the tokenizers package raises into a ValueError that names the file.

    It raises bare Exceptions, and Rust's panics arrive as a BaseException.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{place}: {what} ({error})") from error


def _read_object(files: Mapping[str, bytes], name: str, folder: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file, empty without the file."""
    if name not in files:
        return {}
    try:
        text = files[name].decode()
        value = json.loads(text)
        if "\\ud" in text.lower():  # escapes can smuggle in lone surrogates
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / name}: not a complete JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{folder / name}: must be a JSON object, is {type(value).__name__}")
    return value


def _build(content: bytes, description: Mapping[str, Any], place: pathlib.Path) -> hf.Tokenizer:
    """The tokenizer of a tokenizer.json, always the same on the same text."""
    with _named_errors(place, "not a tokenizer"):
        tokenizer = hf.Tokenizer.from_str(content.decode())
    with _named_errors(place, "added_tokens"):
        for entry in description.get("added_tokens") or ():
            _check_id(tokenizer, entry["content"], entry["id"])
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # leaves out merges at random, meant for training
    return tokenizer


def _check_id(tokenizer: hf.Tokenizer, text: str, wanted: int) -> None:
    """The package counts on where ids have a hole, and says nothing."""
    if (found := tokenizer.token_to_id(text)) != wanted:
        raise ValueError(f"{text!r} has id {wanted} there, but gets {found}")


def _named_tokens(config: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
    """Field -> text for eos_token and the like, those that there are."""
    names = {}
    for field, value in config.items():
        if not field.endswith("_token") or value is None:
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[field] = text
        elif field in NAMED:
            raise ValueError(f"{folder / CONFIG}: {field} = {value!r}: must be a token's text")
    return names


def _add_tokens(
    tokenizer: hf.Tokenizer,
    config: Mapping[str, Any],
    names: Mapping[str, str],
    folder: pathlib.Path,
) -> dict[str, int]:
    """Adds what tokenizer_config.json has over tokenizer.json, as transformers does.

    These are added tokens, each of the id that the file says; and eos and the like are special.

    Returns:
      Ids of eos and the like, by field.
    """
    with _named_errors(folder / CONFIG, "added_tokens_decoder"):
        decoder = config.get("added_tokens_decoder") or {}
        extra = {int(key): _added_token(entry) for key, entry in decoder.items()}
        for wanted, token in sorted(extra.items()):
            if token.special or tokenizer.token_to_id(token.content) is None:
                tokenizer.add_tokens([token])
            _check_id(tokenizer, token.content, wanted)
    named = {}
    for field in NAMED:
        if field not in names:
            continue
        found = tokenizer.token_to_id(names[field])
        if found is None:
            raise ValueError(f"{folder / CONFIG}: {field} = {names[field]!r} is not in {HF_FILE}")
        added = tokenizer.get_added_tokens_decoder().get(found)
        if added is None or not added.special:
            tokenizer.add_special_tokens([names[field]])
        named[field] = found
    return named


def _added_token(entry: Mapping[str, Any]) -> hf.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return hf.AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in flags})


def _read_end_ids(
    files: Mapping[str, bytes], name: str, folder: pathlib.Path, vocab_size: int
) -> list[int]:
    """eos_token_id of a file, which may be missing, one id or a list."""
    value = _read_object(files, name, folder).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ValueError(
            f"{folder / name}: eos_token_id = {value!r}: must be ids below {vocab_size}"
        )
    return ids


def _read_template(
    files: Mapping[str, bytes], config: Mapping[str, Any], folder: pathlib.Path
) -> tuple[str | None, str]:
    """The chat template, None if there is none, and where it is from."""
    if TEMPLATE in files:
        place = folder / TEMPLATE
        try:
            return files[TEMPLATE].decode(), str(place)
        except UnicodeDecodeError as error:
            raise ValueError(f"{place}: not UTF-8 ({error})") from error
    place = f"{folder / CONFIG}: chat_template"
    value = config.get("chat_template")
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{place}: must list names and templates ({error!r})") from error
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place} = {value!r}: must be a text or a list of named ones")
    return value, place


def _unknown_id(model: Mapping[str, Any], tokenizer: hf.Tokenizer) -> int | None:
    """The id that stands for text that the vocabulary lacks, if there is one."""
    text = model.get("unk_token")
    return tokenizer.token_to_id(text) if isinstance(text, str) else model.get("unk_id")


def _without_first(part: Any) -> Any:
    """A pre-tokenizer's description for segments that are not the first of a text.

    Metaspace may mark the beginning of a text only; transformers counts that over the whole chat.
    """
    if isinstance(part, list):
        return [_without_first(item) for item in part]
    if isinstance(part, dict):
        inside = {name: _without_first(value) for name, value in part.items()}
        first = inside.get("prepend_scheme") == "first"
        return inside | {"prepend_scheme": "never"} if first else inside
    return part


def _build_splitter(description: Any) -> Any:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    empty = {"model": model, "pre_tokenizer": description}
    return hf.Tokenizer.from_str(json.dumps(empty)).pre_tokenizer


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
