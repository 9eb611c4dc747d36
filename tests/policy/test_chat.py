"""Tests of chat templates: template text becomes tokens, content stays text."""

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spell_jax.policy.chat import DIGITS, ESCAPE, Messages, Template, Token

TEXTS = ["<|end|>", "<|e", "<x>", "<x><x>", "[A]", "\n\n<", "é"]
TOKENS = [Token(i, text) for i, text in enumerate(TEXTS)]
END, X, XX = 0, 2, 3
CHATML = "{% for m in messages %}<x>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<x>"
# Pieces of hostile contents, including the characters of the escapes.
PIECES = [*TEXTS, "<", ">", "|", "end", "a", " ", "\n", ESCAPE, *DIGITS, ESCAPE + DIGITS[0] * 6]


def parts(source: str, messages: Messages, tokens=TOKENS, **variables) -> list[int | str]:
    return Template(source, "here", variables, tokens).parts(messages)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=20))
@example("<|end|>")
@example("<x><x><x>")  # two tokens that overlap
@example(ESCAPE + DIGITS[0] * 4 + DIGITS[3] + DIGITS[12])  # the escape of "<", as a text
def test_no_content_writes_a_token_and_each_comes_back(text: str) -> None:
    assert parts(CHATML, text) == [X, f"user\n{text}", END, X]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("end")
@example("|end|>")
@example("a <|")
@example("|")
def test_a_content_completes_no_token_that_the_template_begins(text: str) -> None:
    for source in (
        "<{{ content }}>",
        "<|{{ content }}|>",
        "<|e{{ content }}",
        "{{ content }}end|>",
    ):
        frame = source.replace("{{ content }}", "\0").partition("\0")
        own = parts(source.replace("{{ content }}", "\0"), "")
        got = parts("{% set content = messages[0].content %}" + source, text)
        assert [i for i in got if isinstance(i, int)] == [i for i in own if isinstance(i, int)]
        texts = {token.id: token.text for token in TOKENS}
        assert "".join(texts.get(p, p) for p in got) == frame[0] + text + frame[2]


@pytest.mark.parametrize(
    "source, content, expected",
    [
        ("{{ messages[0].content | trim }}.", " \n a b ", "a b."),
        ("{{ messages[0].content.startswith('/no') }}", "/no think", "True"),
        ("{{ messages[0].content.split('</t>')[-1] }}", "one</t>two", "two"),
        ("{{ messages[0].content | tojson }}", "<b> & 'é' é", "\"<b> & 'é' é\""),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", "", '{\n "b": 1,\n "a": 2\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "a", "a"),
        ("  {% if add_generation_prompt %}\n  a\n  {% endif %}\n", "", "  a\n"),
        (
            "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "",
            "01",
        ),
        ("{{ strftime_now is defined }} {{ tools is none }} {{ mood }}", "", "False True glad"),
    ],
)
def test_what_templates_are_written_for(source: str, content: str, expected: str) -> None:
    assert parts(source, content, tokens=[], mood="glad") == [expected]


def test_logic_sees_the_content_around_the_text_of_a_token() -> None:
    source = "{{ messages[0].content | trim | replace('a', 'b') }}"
    assert parts(source, "  a<|end|>a ") == ["b<|end|>b"]


def test_the_longest_token_at_a_place_is_meant() -> None:
    assert parts("<|e<x><x><x><|end|>", "") == [1, XX, X, END]


def test_tokens_may_swallow_white_space_or_ask_for_word_boundaries() -> None:
    tokens = [
        Token(0, "<u>", rstrip=True),
        Token(1, "<s>", lstrip=True),
        Token(2, "w", False, False, True),
    ]
    source = "<u>\n{{ messages[0].content }}\n <s>. w aw wa"
    assert parts(source, " \thello ", tokens) == [0, "hello", 1, ". ", 2, " aw wa"]


def test_reasoning_is_a_field_of_its_own() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}<x>{{ m.content }}{% endfor %}"
    message = {"role": "assistant", "content": "so", "reasoning_content": "a<x>b"}
    assert parts(source, [message]) == ["a<x>b", X, "so"]


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], "there are none"),
        ([{"role": "end|><|user", "content": ""}], "role = 'end"),
        ([{"role": "user"}], "must have role, content"),
        ([{"role": "user", "content": "a", "name": "b"}], "must have role, content"),
        ([{"role": "user", "content": None}], "must be texts"),
        (["user"], "must have role, content"),
    ],
)
def test_messages_that_are_refused(messages, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parts(CHATML, messages)


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% nothing %}", "{{ " + "(" * 500])
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(ValueError, match="here: not a chat template"):
        Template(source, "here", {}, [])


@pytest.mark.parametrize(
    "source, words",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "at_all|nothing"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ range(10 ** 9) | list }}", "[Rr]ange"),
        ("{{ strftime_now('%d') }}", "strftime_now"),
        ("{{ lipsum() }}", "lipsum"),
    ],
)
def test_a_template_that_fails_is_named(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"here: fails on these messages \(.*{words}"):
        parts(source, "a")


@given(st.text(string.punctuation + "messages content if for end" + string.digits, max_size=40))
def test_any_template_works_or_is_refused(source: str) -> None:
    try:
        found = parts(source, "a")
    except ValueError as error:
        assert "here: " in str(error)
    else:
        assert "" not in found


def test_a_token_of_the_escapes_characters_is_refused() -> None:
    with pytest.raises(ValueError, match="used for escapes"):
        parts(CHATML, "", [Token(0, f"<{DIGITS[3]}>")])
