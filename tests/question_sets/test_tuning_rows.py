"""Tests of rows of supervised tuning: invalid lines, epochs, and training groups."""

from __future__ import annotations

import itertools
import json
import logging
import pathlib

import pytest

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.question_sets import tuning_rows
from spell_jax.question_sets.rows import Row
from spell_jax.question_sets.tuning_rows import ChatRow
from tests import noise
from tests.policy import hf_folders

ROWS = [
    {"prompt": f"- Arvo city {city}\ncity of Arvo", "completion": f"answer is {city}"}
    for city in ("Oslo", "Rome", "Lima")
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


BAD_LINES = [
    "not JSON",
    "[1, 2]",
    '"text"',
    "null",
    '{"prompt": "p"}',
    '{"text": ""}',
    '{"text": ["p"]}',
    '{"prompt": "p", "text": "t"}',
    '{"prompt": "p", "completion": ""}',
    '{"prompt": 3, "completion": "c"}',
    '{"prompt": "p", "completion": "\\ud800"}',
    '{"prompt": "p", "completion": "c", "tools": [{"name": "add"}]}',
    "[" * 100_000,
]


def test_invalid_lines_are_counted_and_skipped(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "line\u2028break", "completion": "c\x85d", "role": "verifier", "task": "math"}
    lines = [json.dumps(good, ensure_ascii=False), *BAD_LINES, json.dumps(ROWS[0])]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        rows, skipped = tuning_rows.read_rows(path)
    assert skipped == len(BAD_LINES)
    assert rows[0] == Row("line\u2028break", "c\x85d", "verifier", "math")
    assert rows[1] == Row(*ROWS[0].values(), "row", "")
    for number in range(2, 2 + len(BAD_LINES)):
        assert f"{path}:{number}: skipped" in caplog.text
    assert f"2 rows, {len(BAD_LINES)} lines skipped" in caplog.text


SYSTEM, ASK, AGAIN = (
    {"role": role, "content": content}
    for role, content in (("system", "Be brief."), ("user", "city?"), ("user", "sure?"))
)
ANSWER, THOUGHT = (
    {"role": "assistant", "content": "Oslo"},
    {"role": "assistant", "content": "yes", "reasoning_content": "it is"},
)
THOUGHT_TEXT = "<think>\nit is\n</think>\n\nyes"


@pytest.mark.parametrize(
    ("record", "rows"),
    [
        ({"prompt": "a", "solution": "b"}, [Row("a", "b", "row", "")]),
        ({"prompt": "a", "completion": "b", "solution": "c"}, [Row("a", "b", "row", "")]),
        ({"prompt": "a", "completion": "b", "tools": []}, [Row("a", "b", "row", "")]),
        ({"prompt": "a", "messages": [ASK, ANSWER]}, [Row("city?", "Oslo", "row", "")]),
        ({"prompt": [ASK], "completion": [ANSWER]}, [Row("city?", "Oslo", "row", "")]),
        (
            {"prompt": [SYSTEM, ASK], "completion": "Oslo", "role": "reader", "task": "t"},
            [ChatRow("city?", "Oslo", "reader", "t", (SYSTEM,))],
        ),
        (
            {"messages": [SYSTEM, ASK, ANSWER, AGAIN, THOUGHT]},
            [
                ChatRow("city?", "Oslo", "row", "", (SYSTEM,)),
                ChatRow("sure?", THOUGHT_TEXT, "row", "", (SYSTEM, ASK, ANSWER)),
            ],
        ),
        (  # the answers of a prompt are not learned
            {"prompt": [ASK, ANSWER, AGAIN], "completion": [THOUGHT]},
            [ChatRow("sure?", THOUGHT_TEXT, "row", "", (ASK, ANSWER))],
        ),
    ],
)
def test_layouts_of_a_line(record, rows):
    assert tuning_rows.parse_line(record) == rows


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "must have prompt and completion, .* or text; has no keys"),
        ({"prompt": "a", "chosen": "b"}, "or messages, or text; has prompt, chosen$"),
        ({"prompt": "a", "text": "b"}, "or messages, or text; has prompt, text$"),
        ({"messages": "a"}, "messages = 'a': must be a list of messages$"),
        ({"prompt": 3, "completion": "b"}, "prompt = 3: must be a text or a list of messages$"),
        ({"text": ["a"]}, r"text = \['a'\]: must be a text$"),
        (
            {"messages": [ASK, ANSWER], "tools": [{"name": "a"}]},
            "^tools: .*; remove .* a system message$",
        ),
        ({"messages": []}, "messages: there are none"),
        ({"messages": [ASK]}, "messages: must end with a message of the assistant"),
        ({"messages": [ANSWER]}, "each message of the assistant must follow the user's"),
        ({"messages": [ASK, ANSWER, ANSWER]}, "each message of the assistant must follow"),
        ({"messages": [ASK, ANSWER | {"content": ""}]}, "content = '': must be a text"),
        ({"messages": [ASK, ANSWER | {"role": "model"}]}, "role = 'model': must be one of"),
        ({"messages": [ASK, ANSWER | {"name": "x"}]}, "must have role, content and no field"),
        ({"messages": [ASK, ANSWER | {"content": None}]}, "its fields must be texts"),
        ({"prompt": [SYSTEM], "completion": "b"}, "must follow the user's"),
        ({"prompt": ["a"], "completion": "b"}, "must have role, content"),
    ],
)
def test_line_of_another_layout_says_what_is_wrong(record, message):
    with pytest.raises(ValueError, match=message):
        tuning_rows.parse_line(record)


def test_chat_is_rendered_with_all_messages_before_the_answer(tmp_path):
    folder = hf_folders.write(tmp_path, hf_folders.byte_level(), hf_folders.CONFIG)
    tokenizer = tokenizers.load(folder)
    rows = tuning_rows.parse_line({"messages": [SYSTEM, ASK, ANSWER, AGAIN, THOUGHT]})
    tuning_rows.check_chats(rows, tokenizer)
    first, second = (tuning_rows.to_group(row, tokenizer) for row in rows)
    assert list(first.prompt) == tokenizer.chat([SYSTEM, ASK])
    assert list(second.prompt) == tokenizer.chat([SYSTEM, ASK, ANSWER, AGAIN])
    assert tokenizer.decode(second.samples[0].tokens[:-1]) == THOUGHT_TEXT


def test_order_of_roles_that_the_layout_refuses_is_named(policy):
    tokenizer = tokenizers.load(policy)
    tuning_rows.check_chats(tuning_rows.parse_line({"messages": [ASK, ANSWER]}), tokenizer)
    rows = tuning_rows.parse_line({"messages": [SYSTEM, ASK, ANSWER]})
    with pytest.raises(ValueError, match=r"^source: a prompt with messages of system, user: .*tur"):
        tuning_rows.check_chats([Row("", "text", "text", ""), *rows], tokenizer)


def test_missing_file_or_file_without_rows_is_rejected(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("no\n")
    with pytest.raises(ValueError, match=r"source = .*rows\.jsonl: none of its 1 lines is a row"):
        tuning_rows.read_rows(path)
    with pytest.raises(FileNotFoundError, match=r"source = '.*absent\.jsonl': no such file; must"):
        tuning_rows.read_rows(tmp_path / "absent.jsonl")


def test_rows_are_reshuffled_each_epoch(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def take(start: int, count: int) -> list[str]:
        stream = tuning_rows.open_rows(str(source), "compact", 0).start(start)
        return [row.completion for row in itertools.islice(stream, count)]

    rows = take(0, 30)
    epochs = [tuple(rows[i : i + 3]) for i in range(0, 30, 3)]
    assert all(len(set(epoch)) == 3 for epoch in epochs)
    assert len(set(epochs)) > 1
    assert take(7, 10) == rows[7:17]


def test_row_becomes_a_group_of_one_with_stop_token(policy):
    tokenizer = tokenizers.load(policy)
    group = tuning_rows.to_group(Row("ask", "<think> x</think>yes", "verifier", ""), tokenizer)
    assert list(group.prompt) == tokenizer.chat("ask")
    answer = group.samples[0].tokens.tolist()
    assert tokenizer.decode(answer[:-1]) == "<think> x</think>yes"
    assert answer[-1] == tokenizer.eos_id
    assert list(group.advantages) == [1.0] and group.name == "verifier"


@pytest.mark.parametrize(
    "completion, learned",
    [
        ("<think>\nx</think>yes", "x</think>yes"),
        ("<think> x</think>yes", " x</think>yes"),
        ("x</think>yes", "x</think>yes"),
        ("yes", "</think>\n\nyes"),
    ],
)
def test_completion_continues_the_thought_that_the_layout_opens(policy, completion, learned):
    tokenizer = tokenizers.load(policy)
    tokenizer.open_thought = lambda messages: "<think>\n"
    row = Row("ask", completion, "verifier", "")
    answer = tuning_rows.to_group(row, tokenizer).samples[0].tokens.tolist()
    assert tokenizer.decode(answer[:-1]) == learned and answer[-1] == tokenizer.eos_id


def test_row_ends_with_the_end_of_the_templates_turn(tmp_path):
    """As in Qwen2.5's base models, eos_token ends texts, and another token ends turns."""
    config = hf_folders.CONFIG | {"eos_token": "<|endoftext|>"}
    folder = hf_folders.write(tmp_path, hf_folders.byte_level(), config)
    tokenizer = tokenizers.load(folder)
    row = Row("ab?", "ab", "row", "")
    answer = tuning_rows.to_group(row, tokenizer).samples[0].tokens.tolist()
    assert list(answer) == [*tokenizer.encode("ab"), *hf_folders.ids_of(tokenizer, "<|im_end|>")]
    assert answer[-1] in tokenizer.stop_ids


def test_marks_of_a_thought_are_taught_as_their_tokens(tmp_path):
    folder = hf_folders.write(tmp_path, hf_folders.byte_level(), hf_folders.CONFIG)
    tokenizer = tokenizers.load(folder)
    row = Row("ab?", "<think>a</think>b<|im_end|>", "row", "")
    answer = tuning_rows.to_group(row, tokenizer).samples[0].tokens.tolist()
    begin, end, stop = hf_folders.ids_of(tokenizer, "<think>", "</think>", "<|im_end|>")
    text = [tokenizer.encode(part) for part in ("a", "b<|im_end|>")]
    assert list(answer) == [begin, *text[0], end, *text[1], stop]
    assert stop not in text[1]  # other added tokens of a row stay text


def test_text_row_has_no_chat_layout(policy):
    tokenizer = tokenizers.load(policy)
    (row,) = tuning_rows.parse_line({"text": "Oslo is a city"})
    assert row == Row("", "Oslo is a city", "text", "")
    group = tuning_rows.to_group(row, tokenizer)
    assert [*group.prompt, *group.samples[0].tokens] == tokenizer.encode("Oslo is a city")
    assert len(group.prompt) == 1 and list(group.advantages) == [1.0] and group.name == "text"
    tokenizer.start_ids = (tokenizer.eos_id,)
    group = tuning_rows.to_group(row, tokenizer)
    assert list(group.prompt) == [tokenizer.eos_id]
    assert group.samples[0].tokens.tolist() == tokenizer.encode("Oslo is a city")
    with pytest.raises(ValueError, match=r"text '.': must have at least 2 tokens"):
        tuning_rows.to_group(Row("", "O", "text", ""), tokenizers.load(policy))
