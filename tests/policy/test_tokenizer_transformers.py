"""Tests of an exported policy in transformers: the same ids, chats, logits and answers."""

from __future__ import annotations

import pathlib
import random

import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import transformer, weights
from spell_jax.policy.model import TINY_POLICY
from tests.policy import families

transformers = pytest.importorskip("transformers", reason=families.REASON)
torch = pytest.importorskip("torch", reason=families.REASON)
pytestmark = pytest.mark.slow

WORDS = tokenizers.load(TINY_POLICY)
PARTS = [
    *("a", "aa", "aaa", "the", "of", "Ada", "lives", "in", "Paris", ",", ",,", ".", "(A)"),
    *("[[YES]]", "<think>", "</think>", "<0x41>"),
    *(" ", "  ", "\t", "\n", "\none:", "\r\n", "\u2028", "\ufffd", "\x00", '{"question":"', '"}'),
    *("é", "e\u0301", "ü", "漢字", "🎉", "\u200b", "\ufb01", "\\boxed{7}", "12.5%"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("exported") / "policy"
    weights.save(path, *weights.load(TINY_POLICY), WORDS)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "trust_remote_code"])
def theirs(folder, request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        modules = str(tmp_path_factory.mktemp("modules"))
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        yield transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=request.param)


def test_ids_and_texts_are_the_same(theirs) -> None:
    rng = random.Random(0)
    letters = "aeiou nrstlcdpm  ,.\n"
    texts = ["", *PARTS]
    texts += ["".join(rng.choices(PARTS, k=rng.randint(1, 30))) for _ in range(1000)]
    texts += ["".join(rng.choices(letters, k=rng.randint(1, 80))) for _ in range(1000)]
    for text in texts:
        ids = WORDS.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids, repr(text)
        assert theirs.decode(ids) == WORDS.decode(ids), repr(text)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (WORDS.eos_id, WORDS.pad_id)
    assert len(theirs) == WORDS.vocab_size


def test_chats_are_the_same(theirs) -> None:
    chat = [{"role": "user", "content": "Who lives\n in Oslo? "}]
    assert theirs.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    ) == WORDS.chat(chat)
    chat += [{"role": "assistant", "content": "Bela"}, {"role": "user", "content": "Sure?"}]
    text = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == WORDS.render(chat)
    assert theirs.encode(text) == WORDS.encode_rendered(text, start=False) == WORDS.chat(chat)
    with pytest.raises(Exception, match="the turns must be of user and assistant"):
        theirs.apply_chat_template(chat[1:])


def test_logits_are_the_same_and_generate_stops(folder, theirs) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config, params = weights.load(TINY_POLICY)
    ids = np.array([WORDS.chat("Where does Ada live?\nAda lives in Oslo.")])
    logits = transformer.logits(config, params, jnp.asarray(ids))
    with torch.no_grad():
        expected_logits = model(torch.tensor(ids)).logits.numpy()
        answer = model.generate(torch.tensor(ids), max_new_tokens=40, do_sample=False)[0]
    np.testing.assert_allclose(np.asarray(logits), expected_logits, atol=1e-3)
    assert answer[-1] == WORDS.eos_id or len(answer) == ids.shape[1] + 40
    assert theirs.decode(answer, skip_special_tokens=True)
