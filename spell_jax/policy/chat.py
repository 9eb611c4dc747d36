"""Chat templates of Hugging Face folders, rendered so that message content cannot inject tokens.

1. A template is a Jinja program that turns messages into one text, in which the text of an added
   token (`<|im_start|>`) stands for that token.
2. Wherever the text of an added token starts in a content, its first character is replaced by
   Unicode noncharacters before rendering. The template's own logic (trim, startswith, split) sees
   the true contents, except for token texts.
3. The rendered text is split at added tokens, which the template itself wrote. The segments in
   between are unescaped, and the caller encodes them with added tokens disabled.

A template that looks for `</think>` in an assistant's content therefore does not find that token,
and does not cut out the reasoning as in transformers. Pass content and reasoning separately to get
the same ids ({"content", "reasoning_content"}, which Qwen3's template supports).

A template with `replace` may delete parts inside a content (SmolLM3's deletes `/think`), and so
assemble the text of a token from the remains: `<|im_/thinkend|>`. For such a template, step 2 is
done wherever the first character of an added token stands. Known gap: a template that deletes parts
in another way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spell_jax.policy import renderer

Messages = str | Sequence[Mapping[str, str]]

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"  # marks around an assistant's reasoning

# Templates paste roles into their markup (`<|` + role + `|>`), so roles must not be free text.
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "reasoning_content")

# An escape is ESCAPE and a code point in six digits. The digits are the 16 noncharacters before it.
ESCAPE = "\ufde0"
DIGITS = "".join(map(chr, range(0xFDD0, 0xFDE0)))
_RESERVED = f"[{DIGITS[0]}-{ESCAPE}]"
_TO_DIGITS = str.maketrans("0123456789abcdef", DIGITS)
_FROM_DIGITS = str.maketrans(DIGITS, "0123456789abcdef")
_END = f"{ESCAPE} "  # marks the end of a message that is to be continued
_HEX = f"[{DIGITS[0]}-{DIGITS[15]}]"
# Only code points that exist, up to 10ffff: a template that cuts an escape leaves text, not an
# error.
_ESCAPED = re.compile(f"{ESCAPE}((?:{DIGITS[0]}{_HEX}|{DIGITS[1]}{DIGITS[0]}){_HEX}{{4}})")


# Kind of a RenderError -> fault of the file in a message.
_FAULTS = {
    "syntax": "not a chat template",
    "refused": "fails on these messages",
    "limit": "a chat template without bounds",
}
# Chats that a template renders when it is loaded: a template without bounds is refused at once.
_PROBES = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "a " * 1000},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
)


@dataclasses.dataclass(frozen=True)
class Token:
    """An added token; its text in a rendered template stands for its id."""

    id: int
    text: str
    lstrip: bool = False  # whether it absorbs white space before it
    rstrip: bool = False  # whether it absorbs white space after it
    single_word: bool = False  # whether it is plain text next to a letter, digit or underscore


def read_messages(messages: Messages) -> list[dict[str, str]]:
    """Validate the messages of a chat; a string becomes one user message.

    Raises ValueError if there is no message, or one has an unknown role or field, or a field that
    is not a string.
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
    """A chat template and the tokens it may write."""

    def __init__(
        self, source: str, path: str, variables: Mapping[str, Any], tokens: Iterable[Token]
    ):
        """Compile Jinja `source` of the file `path`, which error messages name.

        `variables` come with the messages (bos_token, enable_thinking, ...); the template may write
        `tokens` as text. Raises ValueError if the source does not compile or exceeds a limit of
        renderer.py, or the text of a token contains a character used for escapes.
        """
        self._path = path
        self._source = source
        self._variables = dict(variables)
        self._may_open_thought = THOUGHT_BEGIN in source
        self._escaper = _TokenEscaper(tokens, path, "replace" in source)
        for chat in _PROBES:
            try:
                self._render(chat, True)
            except renderer.RenderError as error:
                if error.kind != "refused":
                    raise

    def parts(self, messages: Messages) -> list[int | str]:
        """Render a chat up to the start of the assistant's answer, as ids and the texts between.

        Raises ValueError if the template refuses the messages, fails on them or exceeds a limit,
        or as read_messages.
        """
        return self._escaper.split(self._render(self._escaped(messages), True))

    def open_thought(self, messages: Messages) -> str:
        """Return the start of a thought that begins the assistant's answer; see Tokenizer."""
        if not self._may_open_thought:
            return ""
        chat = self._escaped(messages)
        # Only text that the generation prompt adds counts: a message cannot open a thought.
        with_prompt, without_prompt = self._render(chat, True), self._render(chat, False)
        if with_prompt != without_prompt and with_prompt.startswith(without_prompt):
            opened = with_prompt[len(without_prompt) :]
        else:  # the template ends every chat alike, or closes turns in another way
            chat[-1]["content"] += _END
            opened = self._render(chat, True).rpartition(_END.strip())[2]
        _, mark, thought = opened.rpartition(THOUGHT_BEGIN)
        return mark + thought if mark and THOUGHT_END not in thought else ""

    def _escaped(self, messages: Messages) -> list[dict[str, str]]:
        return [
            {
                name: value if name == "role" else self._escaper.escape(value)
                for name, value in message.items()
            }
            for message in read_messages(messages)
        ]

    def text(self, messages: Messages, open_turn: bool = True) -> str:
        """Render a chat with its contents as they are, as Tokenizer.render; errors as `parts`."""
        chat = read_messages(messages)
        if open_turn:
            return self._render(chat, True)
        chat[-1]["content"] += _END
        rendered = self._render(chat, False)
        content, end, suffix = rendered.rpartition(_END.strip())
        if not end:
            raise ValueError(f"{self._path}: leaves out the last message, which is to be continued")
        # A template that trims contents has lost the space of the mark.
        return content if suffix.startswith(" ") else content.rstrip()

    def turn_ends(self) -> tuple[int, ...]:
        """Return the tokens that the template writes after an assistant's content, in order.

        The result has all tokens after a last message, and the first token before a next message.
        It is empty if the template refuses the chat or leaves out its content.
        """
        # GLM's template writes no token after a turn, and its model ends turns with `<|user|>`.
        user = {"role": "user", "content": "a"}
        chat = [user, {"role": "assistant", "content": f"a{ESCAPE}"}]
        last = self._tokens_after_mark(chat, False)
        opened = self._tokens_after_mark(chat, True)
        followed = self._tokens_after_mark([*chat, user], False)
        # Equal renderings: the template opens the assistant's next turn even unasked, and what
        # follows the first token belongs to that turn.
        ends = last[:1] if last == opened else last
        return tuple(dict.fromkeys((*ends, *followed[:1])))

    def _tokens_after_mark(self, chat: list[dict[str, str]], open_turn: bool) -> list[int]:
        """Return the tokens after the last ESCAPE in a rendered chat."""
        try:
            _, mark, after = self._render(chat, open_turn).rpartition(ESCAPE)
        except ValueError:  # the template has no turns of an assistant
            return []
        return [part for part in self._escaper.split(after) if mark and isinstance(part, int)]

    def _render(self, chat: list[dict[str, str]], open_turn: bool) -> str:
        # Transformers defines tools and documents, so templates may expect them.
        defined = {"add_generation_prompt": open_turn, "tools": None, "documents": None}
        try:
            return renderer.render(self._source, chat, defined | self._variables)
        except renderer.RenderError as error:
            fault = _FAULTS[error.kind]
            raise renderer.RenderError(error.kind, f"{self._path}: {fault} ({error})") from error


class _TokenEscaper:
    """Escapes the text of added tokens in contents, and finds the tokens a template wrote."""

    def __init__(self, tokens: Iterable[Token], path: str, is_rewritten: bool):
        """Prepare for `tokens`; `is_rewritten`: the template deletes parts of contents."""
        self._tokens = {token.text: token for token in tokens}
        texts = sorted(self._tokens, key=len, reverse=True)
        for text in texts:
            if re.search(_RESERVED, text):
                raise ValueError(f"{path}: token {text!r} has characters that are used for escapes")
        # The longest of the tokens that start at a position matches, as in the tokenizers package.
        self._token = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        # Matches one character, so that tokens that overlap are found.
        rests: dict[str, list[str]] = {}
        for text in texts:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        starts = (
            re.escape(first) + ("" if is_rewritten else f"(?={'|'.join(endings)})")
            for first, endings in rests.items()
        )
        self._start = re.compile("|".join([_RESERVED, *starts]))
        self._longest = len(texts[0]) if texts else 0
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[n:] for text in texts for n in range(1, len(text))}

    def escape(self, content: str) -> str:
        """Escape the text of every token in a content; split() reverts it."""
        chars = list(content)
        starts = {match.start() for match in self._start.finditer(content)}
        # Reserved characters of the content are escaped too, so that `split` restores every text
        # exactly.
        for i in starts | self._edges(content):
            # One character is enough to hide a token, and `startswith` or `trim` of a template
            # still see the rest of the content.
            chars[i] = ESCAPE + f"{ord(chars[i]):06x}".translate(_TO_DIGITS)
        return "".join(chars)

    def _edges(self, content: str) -> set[int]:
        """Return positions where a content may complete a token with the template's adjacent text.

        Example: a template that writes `<` + content + `>`. Templates may trim a content, so the
        positions are at the ends of the stripped text, unless the content is white space only.
        """
        body = content.strip() or content
        if not body:
            return set()
        start = content.index(body)
        lengths = range(1, min(self._longest, len(body) + 1))
        edges = set()
        inside_token = any(body in text for text in self._tokens if len(body) < len(text))
        if inside_token or any(body[:n] in self._tails for n in lengths):
            edges.add(start)
        if any(body[-n:] in self._heads for n in lengths):
            edges.add(start + len(body) - 1)
        return edges

    def split(self, text: str) -> list[int | str]:
        """Split a rendered text into token ids and the (non-empty, unescaped) texts between."""
        parts: list[int | str] = []
        last_end = 0
        for match in self._token.finditer(text):
            token, (start, end) = self._tokens[match[0]], match.span()
            around = text[max(start - 1, 0) : start] + text[end : end + 1]
            # The token's flags are applied as the tokenizers package applies them to a whole text.
            if token.single_word and re.search(r"\w", around):
                continue
            while token.lstrip and start > last_end and text[start - 1].isspace():
                start -= 1
            while token.rstrip and text[end : end + 1].isspace():
                end += 1
            parts += [_unescape(text[last_end:start]), token.id]
            last_end = end
        parts.append(_unescape(text[last_end:]))
        return [part for part in parts if part != ""]


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1].translate(_FROM_DIGITS), 16)), text)
