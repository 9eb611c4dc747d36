"""Tests with the clients that people use: openai, lm-evaluation-harness, our judge, `generate`."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import openai
import pytest

from spell_jax.evaluation import loglikelihood
from spell_jax.policy import transformer
from spell_jax.rollout.judge import make_judge
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options
from spell_jax.selfplay import prompts as prompt_sets
from tests.serving.running import CHAT, NAME, RunningServer, demo_model, one_device

QUESTIONS = [
    "city of Bela",
    "- Arvo Oslo 24 12 Bela\n- Bela Rome 21 15 Arvo\ncity of Bela",
    "sales of Udo",
    "- Cato Bern 7 3 Dina\nleader of Cato",
]


@pytest.fixture
def client(demo: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


# ------------------------------------------------------------------------------------------ openai


def test_openai_client_chats(client):
    assert [model.id for model in client.models.list()] == [NAME]
    ask = functools.partial(client.chat.completions.create, model=NAME, messages=CHAT)  # type: ignore
    reply = ask(max_completion_tokens=30, temperature=0, n=2, logprobs=True, top_logprobs=3)
    first, second = reply.choices
    assert first.message.content == second.message.content and first.finish_reason == "stop"
    assert reply.usage.completion_tokens == 2 * len(first.logprobs.content)
    for entry in first.logprobs.content:
        # Greedy: the sampled token is the likeliest, with the sampler's logprob.
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert [t.logprob for t in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    stream = ask(max_completion_tokens=30, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == first.message.content


def test_openai_client_completes_with_seeds_and_stops(client):
    ask = functools.partial(client.completions.create, model=NAME, prompt=QUESTIONS, max_tokens=20)
    texts = [choice.text for choice in ask(seed=7).choices]
    assert len(texts) == len(QUESTIONS)
    assert [choice.text for choice in ask(seed=7).choices] == texts
    assert [choice.text for choice in ask(seed=8).choices] != texts
    assert [choice.text for choice in ask().choices] != [choice.text for choice in ask().choices]
    stops = [texts[0][3:6], "never"]
    (choice, *_) = ask(seed=7, stop=stops).choices
    assert choice.text == texts[0][: texts[0].index(stops[0])] and choice.finish_reason == "stop"


def test_openai_client_raises_the_errors_of_the_protocol(client):
    with pytest.raises(openai.BadRequestError, match="temperature = -1"):
        client.completions.create(model=NAME, prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="x", prompt="a")


# ---------------------------------------------------------------------------------------- generate


def generated(n: int, seed: int, monkeypatch, **sampling: Any) -> list[list[str]]:
    """Return the texts of spell_jax.generate's answers to QUESTIONS."""
    monkeypatch.setattr(meshes, "make_mesh", one_device)
    keys = request_keys(jax.random.key(seed), len(QUESTIONS))
    replies = dict(demo_model().ask(QUESTIONS, n, Options(**sampling), keys))
    return [list(replies[i].texts) for i in range(len(QUESTIONS))]


@pytest.mark.slow
def test_answers_equal_those_of_generate(demo, client, monkeypatch):
    for sampling in ({"temperature": 0.0}, {"temperature": 1.1, "top_p": 0.95}):
        expected = generated(2, 11, monkeypatch, max_tokens=24, **sampling)
        ids = [demo.model.tokenizer.chat(question) for question in QUESTIONS]
        reply = client.completions.create(
            model=NAME, prompt=ids, n=2, max_tokens=24, seed=11, **sampling
        )
        texts = [choice.text for choice in reply.choices]
        thought = demo.model.tokenizer.open_thought(QUESTIONS[0])
        assert [thought + text for text in texts] == [*itertools.chain(*expected)]
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        reply = client.chat.completions.create(
            model=NAME, messages=messages, n=2, max_tokens=24, seed=11, **sampling
        )
        assert [choice.message.content for choice in reply.choices] == expected[0]


def test_seeded_answers_do_not_depend_on_other_requests(demo):
    """The answer alone equals the answer beside 20 companions, in another order of arrival."""
    fields = {"max_tokens": 40, "temperature": 1.3, "seed": 3, "n": 2, "logprobs": True}
    alone = demo.chat(**fields).json()["choices"]
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        companions = [threads.submit(demo.chat, **fields | {"seed": 50 + i}) for i in range(10)]
        beside = threads.submit(demo.chat, **fields)
        companions += [threads.submit(demo.complete, prompt="a " * 9 * i) for i in range(1, 11)]
        assert all(companion.result().is_success for companion in companions)
        choices = beside.result().json()["choices"]
    for choice, expected in zip(choices, alone, strict=True):
        assert choice["message"] == expected["message"]
        values, expected_values = (
            [entry["logprob"] for entry in each["logprobs"]["content"]]
            for each in (choice, expected)
        )
        np.testing.assert_allclose(values, expected_values, atol=1e-5)


# --------------------------------------------------------------------------------------- Logprobs


def logprobs_of(ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Return the policy's logprobs of all tokens after each token, float32 [T, V]."""
    model = demo_model()
    logits = transformer.logits(model.config, model.load(one_device()), np.array([ids]))[0]
    return np.asarray(jax.nn.log_softmax(logits / temperature, axis=-1))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_echoed_logprobs_are_the_policys(demo, temperature):
    ids = demo.model.tokenizer.encode(QUESTIONS[1])
    fields = {"prompt": [ids], "echo": True, "logprobs": 5, "seed": 1, "temperature": temperature}
    (choice,) = demo.complete(max_tokens=3, **fields).json()["choices"]
    assert choice["text"].startswith(QUESTIONS[1])
    numbers = choice["logprobs"]
    assert numbers["token_logprobs"][0] is None and numbers["top_logprobs"][0] is None
    assert len(numbers["tokens"]) == len(ids) + 3
    joined = [numbers["text_offset"][i] for i in range(len(ids) + 3)]
    for start, token in zip(joined, numbers["tokens"], strict=True):
        assert choice["text"][start:].startswith(token) or token.startswith("<")
    expected = logprobs_of(ids, temperature or 1.0)[:-1]
    values = expected[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(numbers["token_logprobs"][1 : len(ids)], values, atol=1e-4)
    best = [max(top.values()) for top in numbers["top_logprobs"][1 : len(ids)]]
    np.testing.assert_allclose(best, expected.max(axis=-1), atol=1e-4)
    # Scored without an answer, the numbers are the same.
    (scored,) = demo.complete(max_tokens=0, **fields).json()["choices"]
    assert scored["text"] == demo.model.tokenizer.decode(ids)
    assert scored["logprobs"]["token_logprobs"] == numbers["token_logprobs"][: len(ids)]


# ------------------------------------------------------------------------------------------ lm-eval


def harness_model(demo: RunningServer, name: str, path: str, **options: Any) -> Any:
    """Make a model of lm-evaluation-harness that asks the server."""
    pytest.importorskip("lm_eval", reason="needs the extra 'lm_eval'")
    registry = pytest.importorskip("lm_eval.api.registry")
    pytest.importorskip("lm_eval.models.openai_completions")
    fields = {"model": NAME, "base_url": f"{demo.url}{path}", "tokenizer_backend": None}
    return registry.get_model(name)(**fields | options)


def instance(*arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance("generate_until", {}, arguments, 0)


@pytest.mark.slow
def test_lm_eval_scores_as_our_own_adapter(demo, monkeypatch):
    """local-completions sends echo and logprobs with prompts as token ids, several in a batch."""
    monkeypatch.setattr(meshes, "make_mesh", one_device)
    options = {"batch_size": 3, "eos_string": "</s>"}
    model = harness_model(demo, "local-completions", "/v1/completions", **options)
    # The harness wants a tokenizer of transformers; the ids below need none.
    model.tokenizer, model.tokenizer_backend = demo.model.tokenizer, "huggingface"
    model.tokenized_requests = True
    encode = demo.model.tokenizer.encode
    eos = demo.model.tokenizer.eos_id
    pairs = [(encode(q), encode(" Rome is 5")) for q in QUESTIONS]
    # After this prompt, the likeliest token ends the answer: the end token counts as a token.
    reply = demo.chat(temperature=0, max_tokens=30, logprobs=True).json()["choices"][0]
    assert reply["finish_reason"] == "stop"
    prompt = demo.model.tokenizer.chat(CHAT)
    answer = encode(reply["message"]["content"])
    pairs += [(prompt, answer), (prompt, [*answer, eos])]
    requests = [(("", ""), list(context), list(ids)) for context, ids in pairs]
    scores = model._loglikelihood_tokens(requests)
    expected = loglikelihood.score(demo.model, [(tuple(a), tuple(b)) for a, b in pairs])
    for (value, is_greedy), (expected_value, is_expected) in zip(scores, expected, strict=True):
        assert value == pytest.approx(expected_value, abs=1e-3) and is_greedy == is_expected
    assert any(is_expected for _, is_expected in expected)


@pytest.mark.slow
def test_lm_eval_generates(demo):
    arguments = {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0}
    model = harness_model(demo, "local-completions", "/v1/completions", tokenized_requests=False)
    (text,) = model.generate_until([instance(QUESTIONS[0], dict(arguments))], disable_tqdm=True)
    assert text == demo.complete(temperature=0, max_tokens=12).json()["choices"][0]["text"]
    chat_model = harness_model(demo, "local-chat-completions", "/v1/chat/completions")
    request = instance(chat_model.apply_chat_template(CHAT), dict(arguments))
    (text,) = chat_model.generate_until([request], disable_tqdm=True)
    expected = demo.chat(temperature=0, max_tokens=12).json()["choices"][0]["message"]["content"]
    assert text == expected


# ------------------------------------------------------------------------------------------- Judge


def test_our_judge_asks_the_server(demo):
    judge = make_judge(
        prompt_sets.load("compact"),
        url=f"{demo.url}/v1",
        model=NAME,
        attempts=1,
    )
    items = [("city of Bela", "Oslo", "Oslo"), ("city of Bela", "Rome", "Oslo")]
    verdicts = judge.judge(items)
    assert judge.counts["asked"] == 2 and judge.counts["failed"] == 0
    assert all(verdict in (-1, 0, 1) for verdict in verdicts)
