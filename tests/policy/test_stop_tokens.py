"""Tests of the tokens that end an answer, and of ids that have no token."""

import json
from pathlib import Path

import pytest

from spell_jax.policy import chat as chats
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.tokenizer_base import Tokenizer, find_gaps
from tests import tiny
from tests.policy import hf_folders
from tests.policy.hf_folders import CHATML, byte_level, ids_of, write

# Name -> chat template, the tokens that end its turns, and all further tokens that it writes.
LAYOUTS = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        ["<|im_end|>"],
        ["<|im_start|>", "<think>"],
    ),
    "chatml, always open": (CHATML, ["<|im_end|>"], ["<|im_start|>", "<think>", "</think>"]),
    "llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
        "\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        "{% endif %}",
        ["<|eot_id|>"],
        ["<|start_header_id|>", "<|end_header_id|>"],
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n"
        "{% endif %}",
        ["<end_of_turn>"],
        ["<start_of_turn>"],
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
        "[/INST]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
        ["<eos>"],
        ["[INST]", "[/INST]"],
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        ["<｜end▁of▁sentence｜>"],
        ["<｜User｜>", "<｜Assistant｜>", "<think>"],
    ),
    "phi 3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ["<|end|>", "<eos>"],
        ["<|user|>", "<|assistant|>"],
    ),
    "glm": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ["<|user|>"],
        ["<|assistant|>"],
    ),
    "end by position": (
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        "{% if loop.last %}<|last|>{% else %}<|im_end|>{% endif %}{% endfor %}",
        ["<|last|>", "<|im_end|>"],
        ["<|im_start|>"],
    ),
    "no marks": ("{% for m in messages %}{{ m.content }}{% endfor %}", [], []),
    "one message": ("<turn>{{ messages[0].content }}</turn>", [], ["<turn>", "</turn>"]),
    "no assistant": (
        "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}<turn>",
        [],
        ["<turn>"],
    ),
}


def make(folder: Path, template: str, tokens: list[str], **files: dict) -> Tokenizer:
    words = byte_level(markers=("<eos>", "<bos>", *tokens), words=())
    config = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": template}
    return tokenizers.load(write(folder, words, config, **files))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_after_an_answer_end_it(layout: str, tmp_path: Path) -> None:
    template, ends, more_tokens = LAYOUTS[layout]
    words = make(tmp_path, template, [end for end in ends if end != "<eos>"] + more_tokens)
    assert {*words.stop_ids} == {words.eos_id, *ids_of(words, *ends)}
    assert words.eos_id == words.stop_ids[0] == ids_of(words, "<eos>")[0]
    assert words.turn_end_id == (ids_of(words, ends[0])[0] if ends else words.eos_id)


def test_base_model_of_qwen_ends_at_its_turn_end(spell_data, tmp_path: Path) -> None:
    """Its files name <|endoftext|> only; the template writes <|im_end|> after each turn."""
    source = hf_folders.real(spell_data, "qwen2.5")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["eos_token"] = "<|endoftext|>"
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 151643}')
    words = tokenizers.load(tmp_path)
    assert words.stop_ids == (151_643, 151_645)
    assert (words.eos_id, words.turn_end_id, words.vocab_size) == (151_643, 151_645, 151_665)
    assert words.unused_ids(152_064) == ((151_665, 152_064),)


@pytest.mark.parametrize("name", hf_folders.REAL)
def test_real_instruct_models_end_at_their_turn_end(spell_data, name: str) -> None:
    words = hf_folders.load(hf_folders.real(spell_data, name))
    assert words.turn_end_id == words.eos_id
    assert words.gaps == ()


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_older_folder_names_tokens_in_the_tokens_map(eos, tmp_path: Path) -> None:
    plain = {"chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    folder = write(
        tmp_path,
        byte_level(),
        plain,
        special_tokens_map={"eos_token": eos, "bos_token": "<|im_start|>"},
        config={"eos_token_id": byte_level()["added_tokens"][0]["id"]},
    )
    words = tokenizers.load(folder)
    end, start, text_end = ids_of(words, "<|im_end|>", "<|im_start|>", "<|endoftext|>")
    assert words.stop_ids == (end, text_end)
    assert (words.eos_id, words.bos_id) == (end, start)
    assert words.chat("a")[0] == start
    assert words.chat("a") == hf_folders.theirs(folder).apply_chat_template(
        [{"role": "user", "content": "a"}], return_dict=False
    )


@pytest.mark.parametrize("is_old", [True, False])
def test_both_files_name_ends(is_old: bool, tmp_path: Path) -> None:
    config = {"eos_token": "<|endoftext|>"} | ({} if is_old else {"added_tokens_decoder": {}})
    tokens_map = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    words = tokenizers.load(write(tmp_path, byte_level(), config, special_tokens_map=tokens_map))
    in_order = ids_of(words, "<|im_end|>", "<|endoftext|>")
    assert list(words.stop_ids) == (in_order if is_old else in_order[::-1])
    assert (words.bos_id is None) != is_old


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"eos_token": "<none>"}, r"special_tokens_map\.json: eos_token = '<none>' is not in"),
        ({"eos_token": 3}, r"special_tokens_map\.json: eos_token = 3: must be a token's text"),
        ([], r"special_tokens_map\.json: must be a JSON object"),
    ],
)
def test_wrong_tokens_map_is_one_error(value, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizers.load(write(tmp_path, byte_level(), special_tokens_map=value))


def test_ordinary_token_of_config_json_ends_nothing_if_there_is_an_end(tmp_path: Path) -> None:
    """LlamaConfig writes eos_token_id 2, which is "#" in a byte-level vocabulary."""
    words = make(
        tmp_path, CHATML, [*hf_folders.MARKERS, *hf_folders.WORDS], config={"eos_token_id": 2}
    )
    assert 2 not in words.stop_ids


def test_sentencepiece_folder_has_the_ends_of_its_files(tmp_path: Path) -> None:
    words = tokenizers.train(["ab abc " * 20], 280)
    words.save(tmp_path)
    pad = words.pad_id
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 1]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [pad, 8]}))
    assert tokenizers.load(tmp_path).stop_ids == (words.eos_id, 9, pad)


def test_layout_that_repeats_an_answer_has_its_last_end() -> None:
    tokens = [chats.Token(7, "<e>"), chats.Token(8, "<s>")]
    template = "{% for m in messages %}<s>{{ m.content }}{{ m.content }}<e>{% endfor %}"
    assert chats.Template(template, "t", {}, tokens).turn_ends() == (7,)


# ------------------------------------------------------------------------------ Ids without a token


def test_gaps_of_ids() -> None:
    assert find_gaps([]) == find_gaps([0]) == find_gaps({2, 0, 1}) == ()
    assert find_gaps({1, 2, 5, 7}) == ((0, 1), (3, 5), (6, 7))


def test_gap_in_a_vocabulary_is_no_token(tmp_path: Path) -> None:
    """The vocabulary of a WordPiece model skips ids 3 to 5 and 9."""
    words = hf_folders.word_piece()
    vocab = {"[UNK]": 0, "[SEP]": 1, "a": 2, "##b": 6, "c": 7, ".": 8, "##.": 10}
    words["model"]["vocab"] = vocab
    read = tokenizers.load(write(tmp_path, words, {"eos_token": "[SEP]"}))
    assert (read.vocab_size, read.gaps) == (11, ((3, 6), (9, 10)))
    assert read.unused_ids(11) == ((3, 6), (9, 10))
    assert read.unused_ids(16) == ((3, 6), (9, 10), (11, 16))


def test_architecture_of_a_folder_knows_the_rows_without_a_token(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), config=tiny.POLICY.to_hf() | {"vocab_size": 300})
    config, words = weights.read_config_and_tokenizer(folder)
    assert words.vocab_size == 264
    assert config.unused_ids == ((264, 300),)
    assert config.to_hf()["vocab_size"] == 300


# ------------------------------------------------------------------------------------------- Export


@pytest.mark.parametrize(
    "generation", [None, {"eos_token_id": 259, "temperature": 0.7}, {"do_sample": True}]
)
def test_saved_generation_config_has_every_stop_token(generation, tmp_path: Path) -> None:
    config = hf_folders.CONFIG | {"eos_token": "<|endoftext|>"}
    words = tokenizers.load(
        write(tmp_path / "a", byte_level(), config, generation_config=generation)
    )
    policy = tiny.POLICY
    weights.save(tmp_path / "b", policy, tiny.weights(policy), words)
    saved = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == list(words.stop_ids) == [259, 261]
    assert (generation or {}).items() - {("eos_token_id", 259)} <= saved.items()
    assert tokenizers.load(tmp_path / "b").stop_ids == words.stop_ids


def test_complete_generation_config_is_saved_byte_for_byte(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", byte_level())
    (folder / "generation_config.json").write_text('{"eos_token_id":  [259, 261, 260]}')
    weights.save(tmp_path / "b", tiny.POLICY, tiny.weights(), tokenizers.load(folder))
    copy = tmp_path / "b" / "generation_config.json"
    assert copy.read_text() == '{"eos_token_id":  [259, 261, 260]}'
