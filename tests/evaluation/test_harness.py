"""Tests of lm-evaluation-harness with a policy, against the harness's own transformers model."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absl import app, flags

from spell_jax.data.samples import Sample
from spell_jax.evaluation import harness, loglikelihood
from spell_jax.evaluation.harness import HarnessConfig
from spell_jax.policy.model import TINY_POLICY
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime.files.paths import CONFIG_FILE
from spell_jax.sampler.config import SamplerConfig
from tests import noise
from tests.policy import families, hf_folders

tasks = pytest.importorskip("lm_eval.tasks")

SIZES = SamplerConfig(kv_cache_tokens=1024, slots=8, prefill_tokens=1024, page_size=16)
POSITIONS = 128
FRAME = {  # <s> before every text
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
LLAMA = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content }}{% endif %}{% endfor %}",
}
ROWS = [
    {"question": "ab is", "choices": ["abba", "a long bab"], "answer": 0},
    {"question": "What is rain? ", "choices": ["wet", "dry", "is rain"], "answer": 1},
    {"question": "What falls on hills?", "choices": ["wet rain", "b"], "answer": 1},
    {"question": "a b " * 60, "choices": ["aab", "b"], "answer": 0},  # over the context
]


def write_policy(folder: pathlib.Path, tokenizer: dict, config: dict) -> pathlib.Path:
    vocab = tokenizer["model"]["vocab"]
    last = max(*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"]))
    sizes = {"vocab_size": last + 1, "max_position_embeddings": POSITIONS}
    families.make("llama tied", **sizes).save_pretrained(folder)
    return hf_folders.write(folder, tokenizer, config)


@pytest.fixture(scope="module", params=["chatml", "llama"])
def policy(request, tmp_path_factory) -> pathlib.Path:
    """Write a policy without a start token, or a policy that begins every text with one."""
    folder = tmp_path_factory.mktemp("policies") / request.param
    if request.param == "chatml":
        return write_policy(folder, hf_folders.byte_level(), hf_folders.CONFIG)
    return write_policy(folder, hf_folders.byte_fallback() | {"post_processor": FRAME}, LLAMA)


@pytest.fixture
def only_own_tasks(monkeypatch) -> None:
    """Leave out the harness's thousands of tasks, because indexing them takes seconds."""
    task_manager = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", task_manager)


def write_tasks(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a task for each kind of request, on the same rows; `changes` are fields of each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "rows.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1},
    }
    choice = {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    answer = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["b"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    }
    text = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question * 9}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    }
    for name, task in (("choice", choice), ("answer", answer), ("text", text)):
        full = common | {"task": f"tiny_{name}"} | task | changes
        (folder / f"{name}.yaml").write_text(json.dumps(full))  # JSON is YAML
    return folder


def config(policy: pathlib.Path, **changes: Any) -> HarnessConfig:
    tasks = ("tiny_choice", "tiny_answer", "tiny_text")
    return HarnessConfig(**({"policy": str(policy), "tasks": tasks} | changes))


# ------------------------------------------------------------------------------------------- Checks


def parse(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    of_benchmarks = ("data", "prose", "samples", "temperature", "judge_url", "answers")
    of_endpoints = ("endpoint", "endpoint_workers", "endpoint_rate")
    modes = ("benchmarks", "lm_eval")
    for name in (*modes, *harness.OWN_FLAGS, *of_benchmarks, *of_endpoints):
        flags.DEFINE_string(name, "default", "", flag_values=values)
    for name in ("benchmarks", "lm_eval", "data", "endpoint"):
        values[name].value = None
    values(["evaluate", *arguments])
    return values


def test_flags_of_the_other_mode_are_refused():
    harness.check_flags(parse("--lm_eval=a", "--lm_eval_tasks=b"))
    harness.check_flags(parse("--benchmarks=a", "--data=b", "--samples=8"))
    harness.check_flags(parse("--benchmarks=a", "--endpoint=b", "--endpoint_rate=1"))
    for arguments, message in (
        ((), "--benchmarks or --lm_eval: exactly one"),
        (("--lm_eval=a", "--benchmarks=b", "--data=c"), "--benchmarks or --lm_eval: exactly one"),
        (("--lm_eval=a", "--prose=b"), "--prose: has no effect with --lm_eval"),
        (("--lm_eval=a", "--data=b"), "--data: has no effect with --lm_eval"),
        (("--lm_eval=a", "--judge_url=b"), "--judge_url: has no effect with --lm_eval"),
        (("--lm_eval=a", "--temperature=default"), "--temperature: has no effect"),
        (("--benchmarks=a", "--data=b", "--lm_eval_chat=1"), "--lm_eval_chat: has no effect"),
        (("--benchmarks=a", "--endpoint_rate=1"), "--endpoint_rate: has no effect without --end"),
        (("--benchmarks=a", "--endpoint_workers=1"), "--endpoint_workers: has no effect without"),
    ):
        with pytest.raises(app.UsageError, match=message):
            harness.check_flags(parse(*arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ()}, "lm_eval = "),
        ({"tasks": ("a", "a")}, "lm_eval = "),
        ({"folder": "nowhere"}, "lm_eval_tasks = 'nowhere'"),
        ({"examples": -2}, "lm_eval_examples = -2"),
        ({"limit": -1}, "limit = -1"),
        ({"thinking": "on"}, "thinking = 'on': .* --lm_eval_chat"),
        ({"rope_scaling": "yarn"}, "rope_factor"),
    ],
)
def test_error_names_invalid_setting(changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        config(TINY_POLICY, **changes)


def test_missing_package_is_one_line_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'spell_jax\[lm_eval\]'"):
        harness.evaluate(config(TINY_POLICY), tmp_path)


def test_generation_options_are_those_of_the_harness():
    from spell_jax.evaluation.harness_model import read_options

    greedy = read_options({"until": "\n", "temperature": 0.5, "do_sample": False}, "<end>")
    assert (greedy.temperature, greedy.max_tokens) == (0.0, 256)
    assert greedy.stop_strings == ("\n", "<end>")
    generation_kwargs = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 5,
        "num_beams": 1,
    }
    sampled = read_options(generation_kwargs | {"max_new_tokens": 9, "until": ["", "a", "a"]})
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == (0.7, 0.95, 5)
    assert (sampled.max_tokens, sampled.stop_strings) == (9, ("a",))
    assert read_options({"temperature": 0.3}).temperature == 0.3  # the harness samples then too
    for name, value in (("num_beams", 4), ("repetition_penalty", 1.2), ("typical_p", 0.5)):
        with pytest.raises(ValueError, match=f"generation_kwargs.{name} = {value}"):
            read_options({name: value})
    with pytest.raises(ValueError, match="top_p = 2"):
        read_options({"do_sample": True, "temperature": 1.0, "top_p": 2})


def test_every_pair_is_packed_once_and_shares_its_prompt():
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(0, 50, length).tolist()) for length in (3, 40, 700, 2500)]
    pairs = [(p, tuple(random.integers(0, 50, n).tolist())) for p in prompts for n in (1, 5, 9)]
    pairs += [(prompts[0], pairs[0][1]), ((7,), tuple(range(300)))]
    chunks = list(loglikelihood._batches(pairs, 1024, 2))
    batches = [batch for chunk, _ in chunks for batch in chunk]
    packed_targets: dict[int, list[int]] = {}
    for batch, indices in ((batch, indices) for chunk, indices in chunks for batch in chunk):
        assert len(batch.tokens) % 2 == 0
        for row, target in zip(batch.answer_id, batch.target, strict=True):
            for number in np.unique(row[row >= 0]):
                assert indices[number] not in packed_targets
                packed_targets[int(indices[number])] = target[row == number].tolist()
    assert packed_targets == {index: list(answer) for index, (_, answer) in enumerate(pairs)}
    assert {b.tokens.shape[1] for b in batches} == {512, 2048, 2560}
    written = sum(int(np.sum(b.last_query >= 0)) for b in batches)
    assert written == sum(map(len, prompts)) + 1 + sum(len(answer) for _, answer in pairs)


@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_rendered_chats_are_those_of_transformers(name, tmp_path):
    if name == "chatml":
        folder = hf_folders.write(tmp_path / name, hf_folders.byte_level())
    else:
        tokenizer_fields = hf_folders.byte_fallback() | {"post_processor": FRAME}
        folder = hf_folders.write(tmp_path / name, tokenizer_fields, LLAMA)
    ours, theirs = hf_folders.load(folder), hf_folders.theirs(folder)
    user, assistant = {"role": "user", "content": "a b "}, {"role": "assistant", "content": "The "}
    for messages, open_turn in (([user], True), ([user, assistant], False)):
        text = ours.render(messages, open_turn)
        assert text == theirs.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=open_turn,
            continue_final_message=not open_turn,
        )
        for start in (False, True):
            expected = theirs.encode(text, add_special_tokens=start)
            assert ours.encode_rendered(text, start) == expected
    assert ours.encode_rendered(ours.render("ab"), False) == ours.chat("ab")
    assert ours.token_text(ours.eos_id) == theirs.eos_token
    assert ours.bos_id == theirs.bos_token_id and ours.chat_template == theirs.chat_template


def test_rendered_chat_of_the_tiny_policy_has_the_ids_of_its_chat():
    words = hf_folders.load(TINY_POLICY)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages = [*turns, {"role": "user", "content": "c d"}]
    text = words.render(messages)
    assert text == "<|user|>a<|assistant|>b</s><|user|>c d<|assistant|>"
    assert words.encode_rendered(text, True) == words.chat(messages)
    assert words.render(turns, open_turn=False) == "<|user|>a<|assistant|>b"


def test_template_without_the_continued_message_is_refused(tmp_path):
    tokenizer_config = {**hf_folders.CONFIG, "chat_template": "{{ messages[0].content }}"}
    words = hf_folders.load(
        hf_folders.write(tmp_path / "a", hf_folders.byte_level(), tokenizer_config)
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="leaves out the last message"):
        words.render(turns, open_turn=False)


class Scripted(TextModel):
    """A policy with a context of 20 tokens that gives the answer `text`, and records requests."""

    def __init__(self, text: str):
        self.tokenizer = hf_folders.load(TINY_POLICY)
        self.config = SimpleNamespace(max_positions=20)
        self.folder = TINY_POLICY
        self.requests: list[tuple] = []
        self._tokens = np.array(self.tokenizer.encode(text), np.int32)

    def sample(self, prompts, n, keys, options, prompt_indices):
        self.requests.append((prompts, options))
        for place in reversed(range(len(prompts))):
            yield place, [Sample(self._tokens, np.zeros(len(self._tokens)), False)]


def test_prompts_of_one_length_of_answer_are_sampled_together(caplog):
    """Prompts lose their beginning where answer and prompt exceed the context; one line counts."""
    from spell_jax.evaluation.harness_model import PolicyLM

    policy: Any = Scripted("one two three")
    long = "rain falls on the town " * 9
    arguments = [
        (long, {"max_gen_toks": 15}),
        ("rain", {"max_gen_toks": 4}),
        ("", {"max_gen_toks": 4}),
    ]
    arguments += [(long, {"max_gen_toks": 4, "until": ["two"]}), ("a", {"max_gen_toks": 4})]
    answers = PolicyLM(policy).generate_until(requests("generate_until", arguments))
    assert answers == [*["one two three"] * 3, "one ", "one two three"]
    words, (first, second) = policy.tokenizer, policy.requests
    assert [ids.tolist() for ids in first[0]] == [words.encode(long)[-5:]]
    second_prompts = [
        words.encode("rain"),
        [words.eos_id],
        words.encode(long)[-16:],
        words.encode("a"),
    ]
    assert [ids.tolist() for ids in second[0]] == second_prompts
    assert [options.stop_strings for options in second[1]] == [("</s>",)] * 2 + [
        ("two", "</s>"),
        ("</s>",),
    ]
    assert "1 of 1 prompts are over the context of 20" in caplog.text
    assert "1 of 4 prompts are over the context of 20" in caplog.text


@pytest.mark.parametrize(
    "context, text, answer",
    [
        ("ask", "one two", "one two"),
        ("ask", "<think>one two", ""),
        ("ask<think>\n", "one two", ""),
        ("ask<think>\n", "one</think> two", "two"),
        ("<think>ask", "one two", "one two"),
    ],
)
def test_cut_off_thought_is_no_answer(context: str, text: str, answer: str):
    from spell_jax.evaluation.harness_model import PolicyLM

    policy: Any = Scripted("")
    assert PolicyLM(policy, thinking=True)._read_answer(context, text, []) == answer
    # Qwen3-Thinking-2507 has no switch: its prompt, or the answer, says that a thought is open.
    assert PolicyLM(policy)._read_answer(context, text, []) == answer


def test_stop_strings_of_a_task_do_not_end_the_thinking():
    from spell_jax.evaluation.harness_model import PolicyLM

    policy: Any = Scripted("two by two</think>\n\none two three")
    task_requests = requests("generate_until", [("rain", {"max_gen_toks": 4, "until": "two"})])
    assert PolicyLM(policy, thinking=True).generate_until(task_requests) == ["one "]
    ((_, (options,)),) = policy.requests
    assert options.stop_strings == () and PolicyLM(policy).generate_until(task_requests) == [""]
    begun = requests("generate_until", [("rain<think>", {"max_gen_toks": 4, "until": "two"})])
    assert PolicyLM(policy).generate_until(begun) == ["one "]


def test_system_message_is_left_out_where_the_layout_has_none(caplog):
    from spell_jax.evaluation.harness_model import PolicyLM

    policy: Any = Scripted("")
    model = PolicyLM(policy)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert model.apply_chat_template(turns) == "<|user|>a<|assistant|>"
    assert "without its system message" in caplog.text
    with pytest.raises(ValueError, match="turns of user and assistant"):
        model.apply_chat_template([turns[1], turns[1]])
    assert model.tokenizer_name.endswith("data__tiny_policy")
    assert model.chat_template(True) == "" and model.chat_template(False) is None


# ------------------------------------------------------------------------------------ Against HFLM


def theirs(policy: pathlib.Path) -> Any:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    return huggingface.HFLM(pretrained=str(policy), device="cpu", dtype="float32", batch_size=1)


def ours(policy: pathlib.Path, **options: Any) -> Any:
    from spell_jax.evaluation.harness_model import PolicyLM

    return PolicyLM(TextModel(policy, sizes=SIZES), **options)


def requests(kind: Any, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [
        Instance(kind, {}, instance_arguments, index)
        for index, instance_arguments in enumerate(arguments)
    ]


PAIRS = [
    ("ab is", " abba"),
    ("ab is", " long abab"),
    ("ab is ", "b"),
    ("", "abab"),
    ("x " * 90, "yes it"),
    ("<s>ab", " ab"),
    ("<|im_start|>user\nab<|im_end|>\n", "ab<|im_end|>"),
]
TEXTS = [("ab and " * 60,), ("a",), ("rain",)]


@pytest.mark.slow
def test_loglikelihoods_match_transformers(policy, caplog):
    """On eight devices; greedy continuations are found to be greedy."""
    reference, model = theirs(policy), ours(policy)
    until = {"until": [], "max_gen_toks": 3}
    (greedy,) = reference.generate_until(requests("generate_until", [("ab is", until)]))
    pairs = [*PAIRS, ("ab is", greedy)]
    expected = reference.loglikelihood(requests("loglikelihood", pairs))
    loglikelihoods = model.loglikelihood(requests("loglikelihood", pairs))
    assert [flag for _, flag in loglikelihoods] == [flag for _, flag in expected]
    np.testing.assert_allclose([v for v, _ in loglikelihoods], [v for v, _ in expected], atol=1e-4)
    texts = requests("loglikelihood_rolling", TEXTS)
    expected = reference.loglikelihood_rolling(texts)
    np.testing.assert_allclose(model.loglikelihood_rolling(texts), expected, atol=1e-4, rtol=1e-6)
    assert caplog.text.count("1 of 8 prompts are over the context of 128 tokens") == 1
    with pytest.raises(ValueError, match=r"has 0 tokens, must have from 1 to .* 128"):
        model._loglikelihood_tokens([(("a", ""), [1], [])])


@pytest.mark.slow
def test_greedy_answers_match_transformers(policy, monkeypatch):
    noise.use_one_device(monkeypatch)
    arguments = [
        ("ab is", {"until": ["b"], "max_gen_toks": 12}),
        ("rain " * 40, {"until": [], "max_gen_toks": 16}),
        ("rain", {"until": ["  ", "C"], "max_gen_toks": 16, "do_sample": False}),
        ("rain", {"until": ["no such"], "max_gen_toks": 16}),
    ]
    expected = theirs(policy).generate_until(requests("generate_until", arguments))
    assert ours(policy).generate_until(requests("generate_until", arguments)) == expected
    assert len(set(expected)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_metrics_of_tasks_match_transformers(chat, policy, only_own_tasks, tmp_path, monkeypatch):
    from lm_eval import evaluator

    noise.use_one_device(monkeypatch)
    folder = write_tasks(tmp_path / "tasks")
    harness_config = config(policy, folder=str(folder), chat=chat, examples=1 if chat else -1)
    if chat:
        write_tasks(folder, fewshot_split="test", gen_prefix="So")
    harness_results = harness.evaluate(harness_config, tmp_path / "out", SIZES)
    expected: Any = evaluator.evaluate(
        theirs(policy),
        harness._load_tasks(harness_config),
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        log_samples=False,
    )
    assert set(harness_results["results"]) == set(harness_config.tasks)
    for task, metrics in expected["results"].items():
        assert set(harness_results["results"][task]) == set(metrics)
        for name, value in metrics.items():
            same = value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
            assert harness_results["results"][task][name] == same, (task, name)
    assert harness_results["n-shot"] == expected["n-shot"]
    assert {"acc,none", "acc_norm_stderr,none"} <= set(harness_results["results"]["tiny_choice"])
    written = json.loads((tmp_path / "out" / harness.RESULTS).read_text())
    assert written == harness_results
    assert written["config"]["weights"] == TextModel(policy).fingerprint()
    assert json.loads((tmp_path / "out" / CONFIG_FILE).read_text()) == written["config"]
    assert "|tiny_choice|" in harness.table(harness_results)
    lines = (tmp_path / "out" / harness.SAMPLES).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["task"] for row in rows] == [name for name in harness_config.tasks for _ in ROWS]
    for task, metric in (("tiny_choice", "acc"), ("tiny_answer", "exact_match")):
        values = [row[metric] for row in rows if row["task"] == task]
        assert np.mean(values) == harness_results["results"][task][f"{metric},none"]


@pytest.mark.slow
def test_samples_differ_by_repetition_and_seed_only(policy, monkeypatch):
    noise.use_one_device(monkeypatch)
    kwargs = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8, "until": []}
    first, second, other_seed = ("rain", kwargs), ("ab is", kwargs), {"seed": 1}
    answers = ours(policy).generate_until(requests("generate_until", [first, second, first]))
    assert len(set(answers)) == 3
    swapped = ours(policy).generate_until(requests("generate_until", [second, first, first]))
    assert swapped == [answers[1], answers[0], answers[2]]
    reseeded_answers = ours(policy, **other_seed).generate_until(
        requests("generate_until", [first] * 3)
    )
    assert not set(reseeded_answers) & set(answers)


@pytest.mark.slow
def test_groups_and_tags_give_their_tasks_once(only_own_tasks, tmp_path):
    folder = write_tasks(tmp_path / "tasks", tag=["tiny_tag"])
    inner = {"group": "inner", "task": ["tiny_answer"]}
    group = {"group": "tiny_group", "task": ["tiny_choice", inner]}
    (folder / "group.yaml").write_text(json.dumps(group))

    def load(*names: str, examples: int = -1) -> Any:
        harness_config = config(TINY_POLICY, tasks=names, folder=str(folder), examples=examples)
        return harness._load_tasks(harness_config)

    loaded_tasks = load("tiny_group", "tiny_text", examples=2)
    assert list(loaded_tasks["tasks"]) == ["tiny_choice", "tiny_answer", "tiny_text"]
    assert loaded_tasks["group_map"]["tiny_group"] == ["tiny_choice", "tiny_group::inner"]
    shots = [task.get_config("num_fewshot") for task in loaded_tasks["tasks"].values()]
    assert shots == [2, 2, 2]
    assert sorted(load("tiny_tag")["tasks"]) == ["tiny_answer", "tiny_choice", "tiny_text"]
    with pytest.raises(ValueError, match="Duplicate task 'tiny_choice'"):
        load("tiny_group", "tiny_choice")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"tasks": ("no_such",)}, "'no_such': no such task"),
        ({"dataset_kwargs": {"data_files": "x"}}, {}, "'tiny_choice': cannot be loaded: .*/x'"),
        ({"generation_kwargs": {"num_beams": 2}}, {}, "'tiny_answer': generation_kwargs.num_beams"),
        ({"generation_kwargs": {"max_gen_toks": 256}}, {}, "max_gen_toks = 256, must leave room"),
        ({"unsafe_code": True}, {}, "must neither run generated code"),
        ({}, {"chat": True, "thinking": "on"}, "thinking = 'on': .* 'tiny_choice'"),
    ],
)
def test_unusable_task_is_refused_before_sampling(
    changes, settings, message, only_own_tasks, tmp_path
):
    policy = write_policy(tmp_path / "a", hf_folders.byte_level(), hf_folders.CONFIG)
    folder = str(write_tasks(tmp_path / "tasks", **changes))
    with pytest.raises(ValueError, match=message):
        harness.evaluate(config(policy, folder=folder, **settings), tmp_path / "out", SIZES)
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------- Programs


def start(
    processes: int, policy: pathlib.Path, tasks_folder: pathlib.Path, out: pathlib.Path
) -> list:
    """Run a command on two devices; return (exit code, stdout, stderr) of each process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}"}
    if processes > 1:
        common |= {"SPELL_COORDINATOR": f"localhost:{port}", "SPELL_PROCESSES": str(processes)}
    command = [sys.executable, "-m", "spell_jax.evaluate", f"--policy={policy}", f"--out={out}"]
    command += ["--lm_eval=tiny_choice,tiny_answer,tiny_text", f"--lm_eval_tasks={tasks_folder}"]
    command += ["--kv_cache_tokens=1024", "--slots=8", "--prefill_tokens=1024"]
    running = []
    for index in range(processes):
        process_environment = {"SPELL_PROCESS": str(index)} if processes > 1 else {}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(
            subprocess.Popen(command, env=os.environ | common | process_environment, **pipes)
        )
    try:
        texts = [process.communicate(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(running, texts, strict=True)]


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_give_the_results_of_one(tmp_path):
    folder = write_policy(tmp_path / "a", hf_folders.byte_level(), hf_folders.CONFIG)
    tasks_folder = write_tasks(tmp_path / "tasks")
    ((code, printed, errors),) = start(1, folder, tasks_folder, tmp_path / "one")
    assert code == 0, errors[-3000:]
    assert "|tiny_choice|" in printed and "word_perplexity" in printed
    (first, second) = start(2, folder, tasks_folder, tmp_path / "two")
    assert first[0] == second[0] == 0, first[2][-3000:] + second[2][-3000:]
    assert first[1].endswith(printed) and "tiny_choice" not in second[1]
    results = [json.loads((tmp_path / n / harness.RESULTS).read_text()) for n in ("one", "two")]
    files = {CONFIG_FILE, harness.RESULTS, harness.SAMPLES}
    assert {path.name for path in (tmp_path / "two").iterdir()} == files
    for task, metrics in results[0]["results"].items():
        for name, value in metrics.items():
            same = value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
            assert results[1]["results"][task][name] == same


@pytest.mark.slow
def test_data_set_that_is_not_here_is_one_line(tmp_path):
    """Nothing asks the network for it: that would take half a minute of retries."""
    tasks_folder = write_tasks(tmp_path / "tasks", dataset_path="nobody/nothing")
    ((code, _, errors),) = start(1, TINY_POLICY, tasks_folder, tmp_path / "out")
    *_, last = errors.splitlines()
    assert code == 2 and last.startswith("error: lm_eval = 'tiny_choice': cannot be loaded: ")
    assert last.endswith("nothing is downloaded unless HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0")
    assert "Retrying" not in errors
