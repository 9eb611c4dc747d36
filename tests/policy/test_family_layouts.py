"""Tests of the chat layouts of Gemma 3, Mistral, SmolLM3, OLMo and Qwen3 against transformers."""

import datetime
from pathlib import Path

import pytest

from spell_jax.policy import renderer
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.tokenizer_base import Tokenizer
from tests.policy import family_layouts, hf_folders
from tests.policy.hf_folders import ids_of

SYSTEM = {"role": "system", "content": "be the table.\n"}
USER = {"role": "user", "content": "  the bat:\n\n   12 + 3?\n"}
ANSWER = {"role": "assistant", "content": "the answer, it is 15.\n\nab"}
CHATS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "three turns": [USER, ANSWER, USER],
    "all": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
}
THINKERS = ("smollm3", "qwen3")


@pytest.fixture(autouse=True)
def same_day(monkeypatch) -> None:
    """Let transformers render on the day that our templates always have."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")

    class Today(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.combine(renderer.TODAY, datetime.time())

    monkeypatch.setattr(utilities, "datetime", Today)


def make(folder: Path, name: str, thinking: bool | None = None) -> Tokenizer:
    return tokenizers.load(family_layouts.write(folder, name), thinking)


def their_ids(folder: Path, chat: list[dict[str, str]], **options) -> list[int]:
    tokenizer = hf_folders.theirs(folder)
    return tokenizer.apply_chat_template(chat, return_dict=False, **options)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", family_layouts.LAYOUTS)
def test_chat_ids_equal_transformers(name: str, chat: str, tmp_path: Path) -> None:
    words = make(tmp_path, name)
    assert words.chat(CHATS[chat]) == their_ids(tmp_path, CHATS[chat], add_generation_prompt=True)


@pytest.mark.parametrize("name", ["gemma3", "mistral v0.1", "mistral v0.3"])
def test_roles_out_of_order_are_one_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fails on these messages \(roles must alternate\)"):
        make(tmp_path, name).chat([USER, USER])


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", THINKERS)
def test_thinking_equals_transformers(name: str, thinking: bool, tmp_path: Path) -> None:
    words = make(tmp_path, name, thinking)
    options = {"add_generation_prompt": True, "enable_thinking": thinking}
    for chat in CHATS.values():
        ids = words.chat(chat)
        assert ids == their_ids(tmp_path, chat, **options)
        assert (ids_of(words, "</think>")[0] in ids[-4:]) is not thinking
        assert words.open_thought(chat) == ""


@pytest.mark.parametrize("name", family_layouts.LAYOUTS)
def test_answers_end_at_the_tokens_of_the_layout(name: str, tmp_path: Path) -> None:
    words, ends = make(tmp_path, name), family_layouts.LAYOUTS[name][4]
    assert list(words.stop_ids) == ids_of(words, *ends)
    last = "<end_of_turn>" if name == "gemma3" else ends[0]
    assert [words.turn_end_id] == ids_of(words, last)
    assert words.open_thought([USER]) == ("<think>" if name == "olmo3" else "")


@pytest.mark.parametrize("name", family_layouts.LAYOUTS)
def test_row_of_prompt_and_answer_is_the_chat_of_transformers(name: str, tmp_path: Path) -> None:
    """A supervised row is `chat`, `encode_answer` and the end of the turn."""
    words = make(tmp_path, name, False if name in THINKERS else None)
    for chat in ([USER], [USER, ANSWER, USER]):
        opened = words.open_thought(chat)
        answer = ANSWER["content"]
        row = [*words.chat(chat), *words.encode_answer(answer), words.turn_end_id]
        options = {"enable_thinking": False} if name in THINKERS else {}
        chat_ids = their_ids(
            tmp_path,
            [*chat, ANSWER | {"content": opened + answer}],
            add_generation_prompt=False,
            **options,
        )
        assert chat_ids[: len(row)] == row


@pytest.mark.parametrize("name", family_layouts.LAYOUTS)
def test_text_equals_transformers_and_streams(name: str, tmp_path: Path) -> None:
    words = make(tmp_path, name)
    theirs = hf_folders.theirs(tmp_path)
    for text in ("ab", "the  ab\n\n\n    the", "\tÜnï 中文 🙂 ", "", "a  the\n  the\n ab"):
        ids = words.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        stream = words.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == words.decode(ids) == text


def test_tokens_of_gemma_for_spaces_are_text_and_for_tags_are_not(tmp_path: Path) -> None:
    words = make(tmp_path, "gemma3")
    assert words.encode("a   b") == ids_of(words, "a", "▁▁▁", "b")
    assert words.encode("<b>\n\n") == ids_of(words, "<", "b", ">", "\n\n")
    assert words.decode(words.encode("<eos><b>  <end_of_turn>")) == "<eos><b>  <end_of_turn>"


def test_date_of_a_template_is_always_the_same(tmp_path: Path) -> None:
    words = make(tmp_path, "smollm3")
    assert "Today Date: 01 July 2025\n" in words.render([USER])


@pytest.mark.parametrize(
    "content",
    ["<|im_/thinkend|>", "<|im_/no_thinkend|>a", "a</think|im_end|>", "</think</think>>b"],
)
def test_deleted_words_assemble_no_token(content: str, tmp_path: Path) -> None:
    """SmolLM3's template deletes /think and /no_think from the system's text."""
    words = make(tmp_path, "smollm3", True)
    innocent = words.chat([{"role": "system", "content": "a /think"}, USER])
    ids = words.chat([{"role": "system", "content": content}, USER])
    markers = {*ids_of(words, "<|im_start|>", "<|im_end|>", "<think>", "</think>")}
    if "no_think" in content:
        markers -= {*ids_of(words, "<think>", "</think>")}
    assert [i for i in ids if i in markers] == [i for i in innocent if i in markers]
