"""Tests of the checks of requests: every mistake names its field, value and remedy."""

import json
import re

import pytest

from spell_jax.sampler.requests import Options
from spell_jax.serving.protocol import Call, ProtocolError, parse_json, read_call

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
PLAIN = {"model": "m", "prompt": "a"}


def read(content: dict, **changes) -> Call:
    body = json.dumps(content | changes).encode()
    return read_call(parse_json(body), "messages" in content)


def error_of(content: dict, **changes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        read(content, **changes)
    return caught.value


def test_defaults_are_those_of_the_protocol():
    sampling = {
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"stop_strings": (), "stop_ids": ()},
    }
    chat = read(CHAT)
    assert chat == Call(True, "m", (CHAT["messages"],), sampling=sampling)
    assert read(PLAIN) == Call(False, "m", ("a",), sampling=sampling, max_tokens=16)
    assert Options(**sampling) == Options()


def test_all_fields_are_read():
    call = read(
        PLAIN,
        prompt=["a", [1, 2]],
        **{"n": 2, "best_of": 2, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
        **{"stop": ["x", "y", "x"], "stop_token_ids": [3], "seed": -1, "max_tokens": 5.0},
        **{"logprobs": 3, "echo": True, "suffix": None, "user": "u"},
    )
    assert call.prompts == ("a", [1, 2]) and call.n == 2 and call.seed == -1
    assert call.max_tokens == 5 and call.logprobs and call.alternatives == 3 and call.echo
    assert call.sampling["stop_strings"] == ("x", "y") and call.sampling["stop_ids"] == (3,)
    assert call.needs_scores and not call.stream
    stream = read(CHAT, stream=True, stream_options={"include_usage": True}, logprobs=True)
    assert stream.stream and stream.include_usage and stream.logprobs and not stream.needs_scores
    assert read(CHAT, max_completion_tokens=4, max_tokens=4).max_tokens == 4


def test_neutral_values_and_labels_are_accepted():
    read(
        CHAT,
        **{"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": []},
        **{"response_format": {"type": "text"}, "tool_choice": "auto", "user": "u", "store": True},
        **{"metadata": {"a": "b"}, "parallel_tool_calls": True, "top_k": -1, "stop": None},
    )


def test_messages_may_have_parts_and_null_fields():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts, "tool_calls": None},
        {"role": "assistant", "content": "c", "reasoning_content": "d", "tool_calls": []},
    ]
    assert read(CHAT, messages=messages).prompts[0] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "d"},
    ]


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (CHAT, {"temprature": 1}, "temprature: unknown field, did you mean temperature?"),
        (CHAT, {"guided_json": {}}, "guided_json: unknown field, must not be given"),
        (CHAT, {"temperature": -1}, "temperature = -1: must be a number from 0, finite"),
        (CHAT, {"temperature": float("nan")}, "temperature = NaN: must be a number"),
        (CHAT, {"temperature": float("inf")}, "temperature = Infinity: must be a number"),
        (CHAT, {"temperature": 10**400}, "temperature = 1000"),
        (CHAT, {"temperature": True}, "temperature = true: must be a number"),
        (CHAT, {"temperature": "1"}, 'temperature = "1": must be a number'),
        (CHAT, {"top_p": 0}, "top_p = 0: must be above 0"),
        (CHAT, {"top_p": 1.1}, "top_p = 1.1: must be a number from 0 to 1"),
        (CHAT, {"min_p": 2}, "min_p = 2: must be a number from 0 to 1"),
        (CHAT, {"top_k": -2}, "top_k = -2: must be an integer"),
        (CHAT, {"n": 0}, "n = 0: must be an integer from 1 to 128"),
        (CHAT, {"n": 1.5}, "n = 1.5: must be an integer"),
        (CHAT, {"n": True}, "n = true: must be an integer"),
        (CHAT, {"max_tokens": 0}, "max_tokens = 0: must be an integer from 1"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens = 1 and max_completion_"),
        (CHAT, {"seed": 2**63}, "seed = 9223372036854775808: must be an integer"),
        (CHAT, {"stop": ""}, 'stop = "": must be texts of 1 to 1000'),
        (CHAT, {"stop": ["a"] * 17}, "stop = .*: must be a text, or at most 16 texts"),
        (CHAT, {"stop_token_ids": [-1]}, r"stop_token_ids = \[-1\]: must be at most 16 token ids"),
        (CHAT, {"stream": 1}, "stream = 1: must be true or false"),
        (CHAT, {"stream_options": {}}, "stream_options: needs stream = true"),
        (CHAT, {"stream": True, "stream_options": {"x": 1}}, r"stream_options\.x: unknown field"),
        (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty = 0.5: not supported, must be 0"),
        (CHAT, {"frequency_penalty": False}, "frequency_penalty = false: not supported"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias = .*: not supported, must be \\{\\}"),
        (CHAT, {"tools": [{}]}, r"tools = \[\{\}\]: not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format = .*: not supported"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs = 2: needs logprobs = true"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs = 21: must be an integer"),
        (
            CHAT,
            {"logprobs": True, "top_logprobs": 1, "stream": True},
            "stream and top_logprobs = 1",
        ),
        (CHAT, {"messages": []}, r"messages = \[\]: must be a list of one message or more"),
        (CHAT, {"messages": "a"}, 'messages = "a": must be a list'),
        (CHAT, {"messages": [3]}, r"messages\[0\] = 3: must be an object"),
        (CHAT, {"messages": [{"role": "x", "content": "a"}]}, r'messages\[0\].role = "x": must be'),
        (CHAT, {"messages": [{"role": "user"}]}, r"messages\[0\].content = null: must be a text"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content = 3"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\].content\[0\] = .*: the model reads text alone",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", "name": "b"}]},
            r"messages\[0\].name: not supported",
        ),
        (PLAIN, {"model": None}, "model = null: must be a text"),
        (PLAIN, {"prompt": None}, "prompt = null: must be a text, a list"),
        (PLAIN, {"prompt": []}, r"prompt = \[\]: must be a text"),
        (PLAIN, {"prompt": [[]]}, r"prompt = \[\[\]\]: must be"),
        (PLAIN, {"prompt": [True]}, r"prompt = \[true\]: must be"),
        (PLAIN, {"best_of": 3}, "best_of = 3: must be n = 1"),
        (PLAIN, {"suffix": "b"}, 'suffix = "b": not supported'),
        (PLAIN, {"logprobs": True}, "logprobs = true: must be an integer from 0 to 20"),
        (PLAIN, {"max_tokens": 0}, "max_tokens = 0: must be at least 1 without echo"),
        (PLAIN, {"echo": True, "stream": True}, "stream and echo: must not both be true"),
        (PLAIN, {"logprobs": 1, "stream": True}, "stream and logprobs = 1: alternatives"),
        (PLAIN, {"messages": []}, "messages: unknown field"),
    ],
)
def test_mistakes_are_refused_with_the_field(content, changes, message):
    error = error_of(content, **changes)
    assert error.status == 400 and re.match(message, error.message), error.message
    assert error.field and error.field.split(".")[0].split("[")[0] in {*changes, "stream"}
    assert error.body()["error"]["type"] == "invalid_request_error"


def test_long_values_are_cut():
    error = error_of(PLAIN, prompt={"a": "b" * 10_000})
    assert len(error.message) < 250


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"[1]", "the body is a list, must be a JSON object"),
        (b"\xff\xff", "the body is not JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    ],
)
def test_broken_bodies_are_refused(body, message):
    with pytest.raises(ProtocolError, match=message):
        parse_json(body)
