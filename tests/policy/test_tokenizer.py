"""Tests of the tokenizer: lossless, and no text can open or close a turn."""

import functools

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.formats import sentencepiece_json
from spell_jax.policy.formats.hf_tokenizer import HfTokenizer
from spell_jax.policy.formats.token_bytes import token_bytes
from spell_jax.policy.tokenizer import ASSISTANT, MODEL_FILE, USER, SentencePieceTokenizer

TEXTS = ["The report of Harbour 7 counts 1250 crates.", "Question: who signed?\nAnswer: Mia"] * 20


@functools.cache
def tokenizer() -> SentencePieceTokenizer:
    return tokenizers.train(TEXTS, 400, symbols=["[[YES]]", "\n", "[[YES]]"])


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
@example("two  spaces, a\ttab,\r\n newlines\n\n and a trailing one ")
@example("naïve 你好 🙂 \x00\x07")
def test_any_text_survives_encode_and_decode(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_lone_surrogates_are_rejected() -> None:
    for ask in (tokenizer().encode, tokenizer().chat, tokenizer().count):
        with pytest.raises(ValueError, match="surrogates"):
            ask("a\ud800")


def test_sentencepiece_space_symbol_decodes_to_a_space() -> None:
    assert tokenizer().decode(tokenizer().encode("a\u2581b")) == "a b"


@pytest.mark.parametrize("text", [USER, ASSISTANT, f"x{ASSISTANT}y", "</s>", "<s>", "<pad>"])
def test_text_never_encodes_to_a_control_token(text: str) -> None:
    t = tokenizer()
    turn = t.chat("")
    assert not {t.eos_id, t.pad_id, *turn} & set(t.encode(text))
    assert t.decode(t.encode(text)) == text


def test_chat_layout_of_one_turn() -> None:
    t = tokenizer()
    user, *inside, assistant = t.chat("Who signed?")
    assert inside == t.encode("Who signed?")
    assert len({user, assistant, t.eos_id, t.pad_id}) == 4
    assert t.decode([user, *inside, assistant, t.eos_id]) == "Who signed?"
    assert t.stop_ids == (t.eos_id,)


def test_chat_layout_of_several_turns() -> None:
    t = tokenizer()
    turns = [("user", "Who signed?"), ("assistant", "Mia"), ("user", "When?")]
    chat = [{"role": role, "content": text} for role, text in turns]
    assert t.chat(chat) == [*t.chat("Who signed?"), *t.encode("Mia"), t.eos_id, *t.chat("When?")]
    assert t.chat(chat[:1]) == t.chat("Who signed?")
    system = {"role": "system", "content": "Be brief."}
    for wrong in ([], chat[:2], chat[1:], [system, *chat], [chat[0] | {"reasoning_content": "a"}]):
        with pytest.raises(ValueError, match="messages: "):
            t.chat(wrong)


def test_decode_skips_ids_that_have_no_token() -> None:
    t = tokenizer()
    assert t.decode([-1, *t.encode("Mia"), t.vocab_size, 10**30]) == "Mia"


def test_thinking_is_rejected_for_a_sentencepiece_folder(tmp_path) -> None:
    tokenizer().save(tmp_path)
    with pytest.raises(ValueError, match=r"thinking = False: .*tokenizer\.model has none"):
        tokenizers.load(tmp_path, thinking=False)


def test_symbols_are_one_token_in_any_position() -> None:
    t = tokenizer()
    assert t.count("[[YES]]") == t.count("\n") == 1
    assert t.count("a[[YES]]b\n") == t.count("a") + 1 + t.count("b") + 1


def test_training_is_deterministic() -> None:
    second_tokenizer = tokenizers.train(TEXTS, 400, symbols=["[[YES]]", "\n"])
    assert second_tokenizer.encode(TEXTS[0]) == tokenizer().encode(TEXTS[0])
    assert second_tokenizer.vocab_size == tokenizer().vocab_size <= 400


def test_save_and_load(tmp_path) -> None:
    tokenizer().save(tmp_path)
    assert tokenizers.load(tmp_path).encode(TEXTS[1]) == tokenizer().encode(TEXTS[1])


def test_own_folder_with_files_for_transformers_is_read_from_the_model(tmp_path) -> None:
    tokenizer().save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(MODEL_FILE, "tokenizer.json", "tokenizer_config.json", sentencepiece_json.MODULE)
    }
    assert isinstance(tokenizers.load(tmp_path), SentencePieceTokenizer)
    # Another tool's tokenizer.json is preferred to tokenizer.model.
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert isinstance(tokenizers.load(tmp_path), HfTokenizer)


def test_models_without_an_equal_get_no_tokenizer_json(tmp_path) -> None:
    plain: dict[str, object] = {
        **{"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True},
        **dict.fromkeys(
            ("add_dummy_prefix", "remove_extra_whitespaces", "hard_vocab_limit"), False
        ),
    }
    changes: list[dict[str, object]] = [
        *({"byte_fallback": False}, {"normalization_rule_name": "nmt_nfkc"}),
        *({"add_dummy_prefix": True}, {"remove_extra_whitespaces": True}),
    ]
    for options in ({}, {"model_type": "unigram", "byte_fallback": False}, *changes):
        model = trained(tmp_path, vocab_size=320, **plain | options).model
        assert (sentencepiece_json.convert(model, {}) is None) == bool(options), options


def test_bytes_of_tokens_make_the_bytes_of_a_text() -> None:
    t, text = tokenizer(), "naïve 你好 🙂\ufffd Mia\x00"
    ids = t.encode(text)
    assert b"".join(token_bytes(t, i) for i in ids) == text.encode()
    assert any(len(token_bytes(t, i)) == 1 and token_bytes(t, i)[0] > 127 for i in ids)
    assert token_bytes(t, t.eos_id) == b"</s>"


def test_missing_or_damaged_model_file_is_reported(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=f"needs tokenizer.json or {MODEL_FILE}"):
        tokenizers.load(tmp_path)
    for damaged in (b"", b"no model", tokenizer().model[:500]):
        (tmp_path / MODEL_FILE).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{MODEL_FILE}: not a SentencePiece model"):
            tokenizers.load(tmp_path)


def trained(tmp_path, **options) -> SentencePieceTokenizer:
    prefix = tmp_path / "plain"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(prefix), minloglevel=2, **options
    )
    return SentencePieceTokenizer(prefix.with_suffix(".model").read_bytes())


def test_model_without_turn_markers_has_no_chat(tmp_path) -> None:
    plain = trained(tmp_path, vocab_size=35)
    assert plain.decode(plain.encode("Mia signed")) == "Mia signed"
    assert plain.pad_id == plain.eos_id == 2
    with pytest.raises(ValueError, match=r"tokenizer\.model: has no chat layout; needs"):
        plain.chat("Who signed?")


def test_turn_markers_writable_by_text_give_no_chat_layout(tmp_path) -> None:
    open_ = trained(tmp_path, vocab_size=40, pad_id=3, user_defined_symbols=[USER, ASSISTANT])
    with pytest.raises(ValueError, match="has no chat layout"):
        open_.chat("Who signed?")


def test_model_without_an_end_token_is_rejected(tmp_path) -> None:
    with pytest.raises(ValueError, match="no end token"):
        trained(tmp_path, vocab_size=35, eos_id=-1)


@pytest.mark.parametrize(
    ("name", "size"), [("mistral-v1.model", 32_000), ("sp_test_model.model", 1000)]
)
def test_third_party_models_match_sentencepiece(spell_data, tmp_path, name: str, size: int) -> None:
    """Compare with the sentencepiece package."""
    path = spell_data / "tokenizers" / "sentencepiece" / name
    (tmp_path / MODEL_FILE).write_bytes(path.read_bytes())
    our_tokenizer = tokenizers.load(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(str(path))
    assert (our_tokenizer.vocab_size, our_tokenizer.eos_id) == (size, processor.eos_id())
    text = "The report of 2024 </s> counts 1,250 crates."
    assert our_tokenizer.encode(text) == processor.encode(text)
    assert our_tokenizer.eos_id not in our_tokenizer.encode(text)
    assert our_tokenizer.decode(our_tokenizer.encode(text)) == processor.decode(
        processor.encode(text)
    )
    our_tokenizer.save(tmp_path)
    assert (tmp_path / MODEL_FILE).read_bytes() == path.read_bytes()
