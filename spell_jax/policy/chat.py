"""Chat templates of Hugging Face folders, rendered so that no content can write a token.

1. A template is a Jinja program that turns messages into one text; the texts of added tokens in it
   (`<|im_start|>`) stand for these tokens.
2. Before it runs, every place of a content at which the text of an added token begins is escaped:
   its first character becomes noncharacters of Unicode. The rest is as it was, so the template's
   own logic (trim, startswith, split) sees the true content but for the texts of tokens.
3. What the template wrote is cut at the added tokens: these are the template's own.
4. The segments between are unescaped. They are text, whatever they say, and the caller encodes
   them with all added tokens switched off.

So a template that looks for `</think>` in an assistant's content finds none where `</think>` is an
added token: the content is data and stays as it is, as text. Transformers cuts the reasoning out
there. Who wants this gives content and reasoning apart ({"content", "reasoning_content"}, which
Qwen3's template knows): the ids are those of transformers then.

What stays open: a template that deletes or rewrites parts inside a content could make a token's
text from its remains.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

Messages = str | Sequence[Mapping[str, str]]

# Templates paste roles into their markup (`<|` + role + `|>`), so roles are no free text.
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "reasoning_content")

# An escape is ESCAPE and a code point in six digits, of the sixteen noncharacters before it.
ESCAPE = "\ufde0"
DIGITS = "".join(map(chr, range(0xFDD0, 0xFDE0)))
_RESERVED = f"[{DIGITS[0]}-{ESCAPE}]"
_TO_DIGITS = str.maketrans("0123456789abcdef", DIGITS)
_FROM_DIGITS = str.maketrans(DIGITS, "0123456789abcdef")
_HEX = f"[{DIGITS[0]}-{DIGITS[15]}]"
_ESCAPED = re.compile(f"{ESCAPE}((?:{DIGITS[0]}{_HEX}|{DIGITS[1]}{DIGITS[0]}){_HEX}{{4}})")


@dataclasses.dataclass(frozen=True)
class Token:
    """An added token: where its text stands in a rendered template, its id is meant.

    lstrip and rstrip: it swallows the white space before or behind it. single_word: it is none
    where it touches a letter, digit or underscore.
    """

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def read_messages(messages: Messages) -> list[dict[str, str]]:
    """The messages of a chat; a text is one turn of the user.

    Raises:
      ValueError: a message has an unknown role or field, or one that is not a text; or there is no
        message.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not messages:
        raise ValueError("messages: there are none")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= {*message} <= {*FIELDS}:
            raise ValueError(f"message {message!r}: must have role, content and no field but those")
        if message["role"] not in ROLES:
            raise ValueError(f"role = {message['role']!r}: must be one of {ROLES}")
        if not all(isinstance(value, str) for value in message.values()):
            raise ValueError(f"message {message!r}: its fields must be texts")
    return [dict(message) for message in messages]


class Template:
    """A chat template together with the tokens that it may write."""

    def __init__(
        self, source: str, place: str, variables: Mapping[str, Any], tokens: Iterable[Token]
    ):
        """Compiles the template.

        Args:
          source: the Jinja text.
          place: the file it is from, for messages of errors.
          variables: what it may name besides the messages (bos_token, enable_thinking, ...).
          tokens: the added tokens whose text stands for them.

        Raises:
          ValueError: it is no template, or a token has the characters that escapes are made of.
        """
        self._place = place
        self._variables = dict(variables)
        self._cut = _Cut(tokens, place)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # besides syntax errors, whatever Python says of odd templates
            raise ValueError(f"{place}: not a chat template ({error})") from error

    def parts(self, messages: Messages) -> list[int | str]:
        """A chat up to where the assistant begins to answer: ids of tokens, and texts between.

        Raises:
          ValueError: the template refuses the messages or fails on them; or as read_messages.
        """
        chat = [
            {
                name: value if name == "role" else self._cut.escape(value)
                for name, value in message.items()
            }
            for message in read_messages(messages)
        ]
        try:
            text = self._template.render(
                messages=chat,
                add_generation_prompt=True,
                # As in transformers, where templates find both defined.
                tools=None,
                documents=None,
                **self._variables,
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"{self._place}: fails on these messages ({error})") from error
        return self._cut.split(text)


class _Cut:
    """Finds added tokens in texts: those to escape in contents, those that a template wrote."""

    def __init__(self, tokens: Iterable[Token], place: str):
        self._tokens = {token.text: token for token in tokens}
        texts = sorted(self._tokens, key=len, reverse=True)
        for text in texts:
            if re.search(_RESERVED, text):
                raise ValueError(
                    f"{place}: token {text!r} has characters that are used for escapes"
                )
        # The longest of the tokens that begin at one place, as the tokenizers package has it.
        self._any = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._begin = re.compile("|".join([_RESERVED, *_beginnings(texts)]))
        self._longest = len(texts[0]) if texts else 0
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[n:] for text in texts for n in range(1, len(text))}

    def escape(self, content: str) -> str:
        """The content without the text of any token; split() undoes it."""
        places = {match.start() for match in self._begin.finditer(content)} | self._edges(content)
        pieces, done = [], 0
        for place in sorted(places):
            code = f"{ord(content[place]):06x}".translate(_TO_DIGITS)
            pieces += [content[done:place], ESCAPE, code]
            done = place + 1
        return "".join([*pieces, content[done:]])

    def _edges(self, content: str) -> set[int]:
        """Places where a content could complete a token that the template's text begins or ends.

        A template that writes `<` + content + `>` is one.
        """
        body = content.strip()
        if not body:
            return set()
        start = len(content) - len(content.lstrip())
        end = start + len(body)
        lengths = range(1, min(self._longest, len(body) + 1))
        places = set()
        if any(body[:n] in self._tails for n in lengths) or any(
            body in text for text in self._tokens if len(body) < len(text)
        ):
            places.add(start)
        if any(body[-n:] in self._heads for n in lengths):
            places.add(end - 1)
        return places

    def split(self, text: str) -> list[int | str]:
        """Ids of the tokens in a rendered text, and the unescaped texts between (none is empty)."""
        parts: list[int | str] = []
        done = 0
        for match in self._any.finditer(text):
            token, (start, end) = self._tokens[match[0]], match.span()
            around = text[max(start - 1, 0) : start] + text[end : end + 1]
            if token.single_word and re.search(r"\w", around):
                continue
            while token.lstrip and start > done and text[start - 1].isspace():
                start -= 1
            while token.rstrip and text[end : end + 1].isspace():
                end += 1
            parts += [_unescape(text[done:start]), token.id]
            done = end
        parts.append(_unescape(text[done:]))
        return [part for part in parts if part != ""]


def _beginnings(texts: Sequence[str]) -> list[str]:
    """Patterns of one character each, where one of the texts begins; overlapping ones are found."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1].translate(_FROM_DIGITS), 16)), text)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which training tools mark what the assistant says: its body stands."""

    tags = {"generation"}  # noqa: RUF012 (so declared by Jinja)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> jinja2.Environment:
    """What chat templates are written for.

    There is no strftime_now, though some templates ask for it: a prompt must not depend on the day
    (they fall back to a fixed date). Nor is there Jinja's chance (random, lipsum).
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    del environment.globals["lipsum"], environment.filters["random"]
    return environment


def _to_json(value: Any, **options: Any) -> str:
    """JSON as it is; Jinja's own filter writes it for HTML."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
