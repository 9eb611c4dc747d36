"""Hugging Face tokenizers: tokenizer.json, run by the `tokenizers` package, and a chat template."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import tokenizers as hf

from spell_jax.policy import chat as chats
from spell_jax.policy.formats import tokenizer_limits
from spell_jax.policy.tokenizer_base import Tokenizer, find_gaps
from spell_jax.runtime.files import durable

HF_FILE = "tokenizer.json"
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
GENERATION, ARCHITECTURE = "generation_config.json", "config.json"
TOKENS_MAP = "special_tokens_map.json"
# Files of a tokenizer; saved byte for byte.
HF_FILES = (
    HF_FILE,
    CONFIG,
    TEMPLATE,
    TOKENS_MAP,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    GENERATION,
)
NAMED = ("eos_token", "bos_token", "pad_token", "unk_token")  # fields of tokenizer_config.json


class HfTokenizer(Tokenizer):
    """A Hugging Face tokenizer and its chat template.

    `chat` returns the ids of transformers' apply_chat_template, unless a content contains the text
    of an added token, which stays text (chat.py). `encode` returns transformers' ids with
    split_special_tokens, but matches no ordinary added token either: runs of white space, for which
    some models have added tokens, get the ids of the base vocabulary.
    """

    def __init__(self, folder: pathlib.Path, thinking: bool | None = None):
        """Load a folder with tokenizer.json; `thinking` sets enable_thinking unless it is None.

        Raises ValueError, which names file and field, if a file is damaged, the files contradict
        each other, or the template does not support `thinking`.
        """
        files = read_files(folder, (*HF_FILES, ARCHITECTURE))
        self._files = {name: files[name] for name in HF_FILES if name in files}
        self._folder = folder
        self._path = folder / HF_FILE
        config = _read_object(files, CONFIG, folder)
        description = _read_object(files, HF_FILE, folder)
        self._all = _build_tokenizer(files[HF_FILE], description, self._path)
        _add_tokens(self._all, config, folder)
        names, named, ends = self._name_tokens(files, config)
        ids = self._all.get_vocab().values()
        self.vocab_size, self.gaps = max(ids, default=-1) + 1, find_gaps(ids)
        markers = self._all.get_added_tokens_decoder()
        self.stop_ids = with_end_ids(ends, files, folder, self.vocab_size, markers)
        self.bos_id = named.get("bos_token")
        self._prepare_text(description, named)
        self._template = self._make_template(config, names, thinking)
        self._add_turn_ends(named)

    def _name_tokens(
        self, files: Mapping[str, bytes], config: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, int], list[int]]:
        """Return texts and ids of the named tokens by field, and the ids of every eos_token."""
        # As in transformers, special_tokens_map.json overrides tokenizer_config.json in older
        # folders, where tokenizer_config.json describes no added tokens. In newer folders only the
        # eos_token of special_tokens_map.json counts, as one more end of answers.
        folder = self._folder
        names = _named_tokens(config, folder / CONFIG)
        old = _named_tokens(_read_object(files, TOKENS_MAP, folder), folder / TOKENS_MAP)
        is_old = "added_tokens_decoder" not in config
        if not is_old:
            old = {field: text for field, text in old.items() if field == "eos_token"}
        named = _mark_special(self._all, names, folder / CONFIG)
        old_named = _mark_special(self._all, old, folder / TOKENS_MAP)
        in_order = (old_named, named) if is_old else (named, old_named)
        ends = [ids["eos_token"] for ids in in_order if "eos_token" in ids]
        return (names | old, named | old_named, ends) if is_old else (names, named, ends)

    def _add_turn_ends(self, named: Mapping[str, int]) -> None:
        """Add the tokens that the chat template writes after an answer to the stop tokens."""
        turn_ends = self._template.turn_ends() if self._template else ()
        self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *turn_ends)))
        if not self.stop_ids:
            raise ValueError(
                f"{self._folder}: no token ends a turn: {CONFIG} must have eos_token, or "
                f"{GENERATION} or {ARCHITECTURE} eos_token_id"
            )
        self.eos_id = self.stop_ids[0]
        self.turn_end_id = turn_ends[0] if turn_ends else self.eos_id
        self.pad_id = named.get("pad_token", self.eos_id)

    def _prepare_text(self, description: Mapping[str, Any], named: Mapping[str, int]) -> None:
        """Build tokenizers for plain text, without added tokens and frames; decoding uses _all."""
        added_tokens = self._all.get_added_tokens_decoder()
        # White space is text: it marks no turns, and templates trim it. Gemma writes it as U+2581.
        self._added = {
            i: t
            for i, t in added_tokens.items()
            if t.special or t.content.replace("▁", " ").strip()
        }
        # The marks of a thought are text even where they are special: without the end of a thought,
        # the thought would pass for the answer.
        marks = (chats.THOUGHT_BEGIN, chats.THOUGHT_END)
        self._hidden = {i for i, t in added_tokens.items() if t.special and t.content not in marks}
        self.thought_ids = {t.content: i for i, t in added_tokens.items() if t.content in marks}
        # Some models also have added tokens in their vocabulary, where plain text can produce them.
        self._reserved = {*self._added, *self.stop_ids}
        unknown = description["model"].get("unk_token")
        if isinstance(unknown, str):
            self._unknown = self._all.token_to_id(unknown)
        else:
            self._unknown = description["model"].get("unk_id")
        self._keeps_unknown = self._unknown not in (*self.stop_ids, named.get("bos_token"))
        splitter = description.get("pre_tokenizer")
        inside = _without_first(splitter)
        self._text = self._later = self._plain(self._all.pre_tokenizer)
        # A splitter can only be built from a whole tokenizer.json, here with an empty model.
        if inside != splitter:
            model = {"type": "BPE", "vocab": {}, "merges": []}
            empty = json.dumps({"model": model, "pre_tokenizer": inside})
            self._later = self._plain(hf.Tokenizer.from_str(empty).pre_tokenizer)
        self._bytes = set()
        if '"ByteFallback"' in json.dumps(description.get("decoder")):
            vocabulary = self._all.get_vocab().items()
            self._bytes = {i for piece, i in vocabulary if re.fullmatch("<0x.{2}>", piece)}
        with _named_errors(self._path, "cannot encode"):
            # A tokenizer that cannot encode a letter fails here, not in the middle of a run.
            self._text.encode("a", add_special_tokens=False)
            framed = self._all.encode("a")
        pairs = zip(framed.ids, framed.special_tokens_mask, strict=True)
        begun = itertools.takewhile(lambda pair: pair[1], pairs)
        self.start_ids = tuple(token for token, _ in begun)

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
        source, path = _read_template(self._files, config, self._folder)
        if source is None:
            return None
        self.chat_template = source
        variables: dict[str, Any] = {**names}
        if thinking is not None:
            variables["enable_thinking"] = thinking
            if "enable_thinking" not in source:
                raise ValueError(
                    f"thinking = {thinking}: {path} reads no enable_thinking, must be None"
                )
        tokens = (
            chats.Token(i, token.content, token.lstrip, token.rstrip, token.single_word)
            for i, token in self._added.items()
        )
        return chats.Template(source, path, variables, tokens)

    def encode(self, text: str) -> list[int]:
        return self._encode(self._text, text)

    def decode(self, ids: Sequence[int]) -> str:
        shown = [int(i) for i in ids if self.shows(i)]
        return self._all.decode(shown, skip_special_tokens=False)

    def chat(self, messages: chats.Messages) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self._layout().parts(messages)):
            if isinstance(part, str):
                ids += self._encode(self._later if number else self._text, part)
            else:
                ids.append(part)
        return ids

    def open_thought(self, messages: chats.Messages) -> str:
        return self._layout().open_thought(messages)

    def render(self, messages: chats.Messages, open_turn: bool = True) -> str:
        return self._layout().text(messages, open_turn)

    def encode_rendered(self, text: str, start: bool) -> list[int]:
        with _named_errors(self._path, "cannot encode"):
            return self._all.encode(text, add_special_tokens=start).ids

    def token_text(self, token_id: int) -> str:
        return self._all.decode([token_id], skip_special_tokens=False)

    def piece(self, token_id: int) -> str:
        return self._all.id_to_token(token_id) or ""  # of a gap

    def save(self, folder: str | pathlib.Path) -> None:
        for name, content in self._files.items():
            durable.write_file(pathlib.Path(folder) / name, content)

    def shows(self, token_id: int) -> bool:
        return super().shows(token_id) and token_id not in self._hidden

    def waits(self, token_id: int) -> bool:
        # A run of byte tokens decodes to text if the whole run is UTF-8, else to one U+FFFD each.
        return token_id in self._bytes

    def _layout(self) -> chats.Template:
        if self._template is None:
            raise ValueError(
                f"{self._folder}: no chat template, in {TEMPLATE} or {CONFIG}; an instruct model "
                f"of the family has one, and a copy of its {TEMPLATE} suffices"
            )
        return self._template

    def _encode(self, tokenizer: hf.Tokenizer, text: str) -> list[int]:
        text.encode()  # raises ValueError for lone surrogates
        with _named_errors(self._path, "cannot encode"):
            encoding = tokenizer.encode(text, add_special_tokens=False)
            # Almost every text: pieces need offsets only where an added token occurred.
            if self._reserved.isdisjoint(encoding.ids):
                return encoding.ids
            ids = []
            for i, piece, (start, end) in zip(
                encoding.ids, encoding.tokens, encoding.offsets, strict=True
            ):
                ids += self._spell(i, piece, text[start:end])
            return ids

    def _spell(self, token_id: int, piece: str, covered: str) -> list[int]:
        """Return the ids of a piece, character by character if the piece is an added token.

        Missing characters become the unknown token, or nothing if that token also begins or ends
        turns.
        """
        # Plain text must never produce a token that ends an answer or begins a text.
        unknown = [self._unknown] if self._unknown is not None and self._keeps_unknown else []
        if token_id not in self._reserved:
            return [token_id]
        if token_id == self._unknown:
            name = self._all.id_to_token(token_id) or ""
            # Most models name the unknown piece by its token; unigram models give the covered text.
            piece = covered if piece == name else piece
            if name not in piece:
                return unknown
        letters = [token.id for letter in piece for token in self._all.model.tokenize(letter)]
        spelled = [[i] if i not in self._reserved else unknown for i in letters]
        return [i for ids in spelled for i in ids]


@contextlib.contextmanager
def _named_errors(path: pathlib.Path, what: str) -> Iterator[None]:
    """Convert anything the tokenizers package raises to a ValueError that names the file."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # bare Exceptions, and panics of its Rust code
        raise ValueError(f"{path}: {what} ({error})") from error


def _read_object(files: Mapping[str, bytes], name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Read the JSON object of a file; return {} if there is no such file."""
    if name not in files:
        return {}
    try:
        text = files[name].decode()
        value = json.loads(text)
        if "\\ud" in text.lower():  # escapes can contain lone surrogates
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / name}: not a complete JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{folder / name}: must be a JSON object, is {type(value).__name__}")
    return value


def _build_tokenizer(
    content: bytes, description: Mapping[str, Any], path: pathlib.Path
) -> hf.Tokenizer:
    """Build the tokenizer of a tokenizer.json, without dropout of merges, padding or truncation."""
    try:
        tokenizer_limits.check_steps(description)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with _named_errors(path, "not a tokenizer"):
        tokenizer = hf.Tokenizer.from_str(content.decode())
    with _named_errors(path, "added_tokens"):
        for entry in description.get("added_tokens") or ():
            _check_id(tokenizer, entry["content"], entry["id"])
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # skips merges at random, for training
    # Saved settings for batches would pad a prompt or cut it.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _check_id(tokenizer: hf.Tokenizer, text: str, token_id: int) -> None:
    """Raise ValueError if a token has another id than the file says."""
    # The package renumbers tokens without a word if their ids have gaps.
    if (actual_id := tokenizer.token_to_id(text)) != token_id:
        raise ValueError(f"{text!r} has id {token_id} there, but gets {actual_id}")


def _named_tokens(config: Mapping[str, Any], path: pathlib.Path) -> dict[str, str]:
    """Return the texts of the named tokens (eos_token and others) of a file, by field."""
    names = {}
    for field, value in config.items():
        if not field.endswith("_token") or value is None:
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[field] = text
        elif field in NAMED:
            raise ValueError(f"{path}: {field} = {value!r}: must be a token's text")
    return names


def _add_tokens(tokenizer: hf.Tokenizer, config: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Add what tokenizer_config.json defines beyond tokenizer.json, as transformers does."""
    with _named_errors(folder / CONFIG, "added_tokens_decoder"):
        decoder = config.get("added_tokens_decoder") or {}
        extra = {int(key): _added_token(entry) for key, entry in decoder.items()}
        for token_id, token in sorted(extra.items()):
            if token.special or tokenizer.token_to_id(token.content) is None:
                tokenizer.add_tokens([token])
            _check_id(tokenizer, token.content, token_id)


def _mark_special(
    tokenizer: hf.Tokenizer, names: Mapping[str, str], path: pathlib.Path
) -> dict[str, int]:
    """Make the named tokens (eos_token and others) of a file special; return ids by field."""
    named = {}
    for field in NAMED:
        if field not in names:
            continue
        token_id = tokenizer.token_to_id(names[field])
        if token_id is None:
            raise ValueError(f"{path}: {field} = {names[field]!r} is not in {HF_FILE}")
        added_token = tokenizer.get_added_tokens_decoder().get(token_id)
        if added_token is None or not added_token.special:
            tokenizer.add_special_tokens([names[field]])
        named[field] = token_id
    return named


def _added_token(entry: Mapping[str, Any]) -> hf.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return hf.AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in flags})


def with_end_ids(
    ends: Sequence[int],
    files: Mapping[str, bytes],
    folder: pathlib.Path,
    vocab_size: int,
    markers: Container[int],
) -> tuple[int, ...]:
    """Add eos_token_id of generation_config.json and config.json to the ends of a tokenizer.

    `markers` has the ids of all tokens that are no ordinary text.
    """
    # transformers writes a default into config.json if the author gave no end (2 for Llama), so an
    # ordinary token of config.json counts only if no other file names an end.
    ends = [*ends, *_read_end_ids(files, GENERATION, folder, vocab_size)]
    config_ends = _read_end_ids(files, ARCHITECTURE, folder, vocab_size)
    return tuple(dict.fromkeys([*ends, *(i for i in config_ends if i in markers or not ends)]))


def read_files(folder: pathlib.Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read the files of a folder that exist, by name."""
    paths = [folder / name for name in names]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _read_end_ids(
    files: Mapping[str, bytes], name: str, folder: pathlib.Path, vocab_size: int
) -> list[int]:
    """Read eos_token_id (an id or a list) of a file; return [] if there is none."""
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
    """Return the chat template (None if there is none) and its location, for error messages."""
    if TEMPLATE in files:
        try:
            return files[TEMPLATE].decode(), str(folder / TEMPLATE)
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / TEMPLATE}: not UTF-8 ({error})") from error
    place = f"{folder / CONFIG}: chat_template"
    value = config.get("chat_template")
    # Models with several templates call the template for chats "default".
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{place}: must list names and templates ({error!r})") from error
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place} = {value!r}: must be a text or a list of named ones")
    return value, place


def _without_first(part: Any) -> Any:
    """Return a pre-tokenizer's description for segments that are not the first of a text."""
    # Metaspace may mark only the start of a text, and transformers treats a whole chat as one text.
    if isinstance(part, list):
        return [_without_first(item) for item in part]
    if isinstance(part, dict):
        inside = {name: _without_first(value) for name, value in part.items()}
        first = inside.get("prepend_scheme") == "first"
        return inside | {"prepend_scheme": "never"} if first else inside
    return part
