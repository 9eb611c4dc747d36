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
@example("\n")  # white space that completes a token with the template's text
@example("<x><x><x>")  # two tokens that overlap
@example(ESCAPE + DIGITS[0] * 4 + DIGITS[3] + DIGITS[12])  # the escape of "<", as a text
def test_content_never_becomes_a_token_and_is_unchanged(text: str) -> None:
    assert parts(CHATML, text) == [X, f"user\n{text}", END, X]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("end")
@example("|end|>")
@example("a <|")
@example("|")
def test_content_cannot_complete_a_token_of_the_template(text: str) -> None:
    for source in (
        "<{{ content }}>",
        "<|{{ content }}|>",
        "<|e{{ content }}",
        "{{ content }}end|>",
    ):
        frame = source.replace("{{ content }}", "\0").partition("\0")
        frame_parts = parts(source.replace("{{ content }}", "\0"), "")
        chat_parts = parts("{% set content = messages[0].content %}" + source, text)
        assert [i for i in chat_parts if isinstance(i, int)] == [
            i for i in frame_parts if isinstance(i, int)
        ]
        texts = {token.id: token.text for token in TOKENS}
        assert "".join(texts.get(p, p) for p in chat_parts) == frame[0] + text + frame[2]


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
        ("{{ strftime_now('%d %B %Y') }}", "", "01 July 2025"),
    ],
)
def test_jinja_features_of_common_chat_templates(source: str, content: str, expected: str) -> None:
    assert parts(source, content, tokens=[], mood="glad") == [expected]


def test_filters_apply_to_content_with_the_text_of_a_token() -> None:
    source = "{{ messages[0].content | trim | replace('a', 'b') }}"
    assert parts(source, "  a<|end|>a ") == ["b<|end|>b"]


@given(st.lists(st.sampled_from([*PIECES, "del"]), max_size=8).map("".join))
@example("<|edelnd|>")
@example("<del|end|>")
def test_content_of_which_a_template_deletes_parts_is_no_token(text: str) -> None:
    source = "<x>.{{ messages[0].content.replace('del', '') }}.<|end|>"
    ids = [part for part in parts(source, text) if isinstance(part, int)]
    assert ids == [X, END]


def test_longest_token_at_a_place_is_chosen() -> None:
    assert parts("<|e<x><x><x><|end|>", "") == [1, XX, X, END]


def test_strip_and_single_word_flags_of_tokens_are_respected() -> None:
    tokens = [
        Token(0, "<u>", rstrip=True),
        Token(1, "<s>", lstrip=True),
        Token(2, "w", False, False, True),
    ]
    source = "<u>\n{{ messages[0].content }}\n <s>. w aw wa"
    assert parts(source, " \thello ", tokens) == [0, "hello", 1, ". ", 2, " aw wa"]


def test_reasoning_content_is_a_separate_field() -> None:
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
def test_invalid_messages_are_rejected(messages, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parts(CHATML, messages)


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% nothing %}", "{{ " + "(" * 500])
def test_invalid_template_is_rejected_at_construction(source: str) -> None:
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
        ("{{ strftime_now is defined }}{{ strftime_now('%d') }}", "strftime_now"),
        ("{{ lipsum() }}", "lipsum"),
    ],
)
def test_template_that_fails_on_messages_is_reported(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"here: fails on these messages \(.*{words}"):
        parts(source, "a")


@given(st.text(string.punctuation + "messages content if for end" + string.digits, max_size=40))
def test_arbitrary_template_works_or_is_rejected(source: str) -> None:
    try:
        chat_parts = parts(source, "a")
    except ValueError as error:
        assert "here: " in str(error)
    else:
        assert "" not in chat_parts


def test_token_with_escape_characters_is_rejected() -> None:
    with pytest.raises(ValueError, match="used for escapes"):
        parts(CHATML, "", [Token(0, f"<{DIGITS[3]}>")])


THINKING = CHATML.removesuffix("<x>") + "{% if add_generation_prompt %}<x>a\n<think>\n{% endif %}"


@pytest.mark.parametrize(
    "source, thought",
    [
        (THINKING, "<think>\n"),
        (THINKING.replace("<think>\n", "<think>"), "<think>"),
        (THINKING.replace("<think>\n", "<think>\n\n</think>\n\n"), ""),
        (CHATML, ""),
        # The turn ends in another way where the assistant's is not opened.
        (THINKING.replace("{% endif %}", "{% else %}<|end|>{% endif %}"), "<think>\n"),
        (THINKING.replace("<think>", "").replace("{% endif %}", "{% else %}.{% endif %}"), ""),
        ("{{ messages[-1].content | trim }}|<think>", "<think>"),  # at the end of every chat
    ],
)
@pytest.mark.parametrize("content", ["Hi", "<think> a", "</think>", "", "<think>" * 3])
def test_template_tells_the_thought_that_it_opens(source: str, thought: str, content: str) -> None:
    template = Template(source, "here", {}, TOKENS)
    assert template.open_thought(content) == thought
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "<think>b</think>c"},
        {"role": "user", "content": content},
    ]
    assert template.open_thought(messages) == thought
