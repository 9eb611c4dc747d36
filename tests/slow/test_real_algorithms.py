"""Tests of every algorithm on real documents, for two updates: counts equal the records.

Policies have a real family's shape and tokenizer, and are random and narrow. Their answers are
never correct. Where rewards must differ, answers are replaced by texts made for the question, while
tokens, logprobs and updates stay those of the sampler.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
import pathlib
import re
import shutil
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from spell_jax.configs import eapo, paper, reconstruction, rlvr
from spell_jax.data.questions import Question, read_questions
from spell_jax.data.samples import Sample
from spell_jax.launch import random_policy
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.question_sets import padded
from spell_jax.question_sets.published import LAYOUTS, read_row
from spell_jax.rollout import worker as worker_module
from spell_jax.rollout.replies import Prompt
from spell_jax.rollout.worker import PendingCall, RolloutWorker
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.selfplay import prompts, rules
from spell_jax.trainer import loop
from tests import noise

pytestmark = pytest.mark.long  # takes minutes

Record = dict[str, Any]

# Narrow: nearly all of the weights are embeddings.
NARROW = (
    "hidden_size=64",
    "num_hidden_layers=2",
    "num_attention_heads=4",
    "num_key_value_heads=2",
    "intermediate_size=160",
    "tie_word_embeddings=true",
)
CAP = 4096  # tokens of a prompt
GROUP, MOST_TOKENS, MOST_VERDICT_TOKENS = 4, 8, 3  # answers to a prompt, tokens of each
ROWS = {  # of each published file, as many as are read
    "musique": ("multihop/musique_dev.dev100.jsonl", 10),
    "hotpotqa": ("multihop/hotpotqa_dev.dev100.jsonl", 10),
    "tatqa": ("tatqa/tatqa_dataset_dev.json", 20),
}
DOCUMENT = re.compile(r"\{documents\[(\d+)\]\}")


# ------------------------------------------------------------------------------ Policies and rows


@pytest.fixture(scope="module")
def qwen(spell_data, tmp_path_factory) -> pathlib.Path:
    """Make a random policy with Qwen2.5's parts and tokenizer."""
    words, real = tmp_path_factory.mktemp("words"), spell_data / "tokenizers" / "qwen2"
    packed = (real / "tokenizer.qwen2.5.rebuilt.json.gz").read_bytes()
    (words / "tokenizer.json").write_bytes(gzip.decompress(packed))
    shutil.copy(real / "tokenizer_config.qwen2.5.json", words / "tokenizer_config.json")
    return make_policy(spell_data, "Qwen2.5-7B-Instruct", words, NARROW)


@pytest.fixture(scope="module")
def llama(spell_data, tmp_path_factory) -> pathlib.Path:
    """Make a random model with Llama's parts and a small tokenizer of its own (minimind's)."""
    words = tmp_path_factory.mktemp("llama") / "words"
    shutil.copytree(spell_data / "tokenizers" / "minimind", words)
    return make_policy(spell_data, "Llama-3.1-8B", words, (*NARROW, "vocab_size=6400"))


def make_policy(
    spell_data: pathlib.Path, shape: str, words: pathlib.Path, changes: Sequence[str]
) -> pathlib.Path:
    out = words.parent / f"{words.name} policy"
    shape_file = spell_data / "hf_configs" / f"{shape}.json"
    random_policy.make(shape_file, words, out, changes, dtype="float32")
    return out


def rows_of(spell_data: pathlib.Path, layout: str) -> list[Any]:
    """Return the first rows of a published file."""
    name, count = ROWS[layout]
    text = (spell_data / name).read_text("utf-8")
    rows = json.loads(text) if name.endswith(".json") else map(json.loads, text.splitlines())
    return list(rows)[:count]


@pytest.fixture(scope="module")
def questions(spell_data, qwen, tmp_path_factory) -> pathlib.Path:
    """Write long questions over paragraphs, tables and prose to one file."""
    folder = tmp_path_factory.mktemp("questions")
    config = padded.LongConfig(min_tokens=2048, max_tokens=3400)
    count, all_questions = tokenizers.load(qwen).count, []
    for layout in ROWS:
        rows, out = folder / f"{layout} rows.jsonl", folder / f"{layout}.jsonl"
        write_records(rows, rows_of(spell_data, layout))
        summary = padded.build([str(rows)], layout, out, config, count)
        layout_questions = read_questions(out, layout)
        assert summary["bad_rows"] == 0 and sum(summary["written"].values()) == len(
            layout_questions
        )
        lengths = [sum(count(text + "\n") for text in q.documents) for q in layout_questions]
        assert (summary["tokens"]["min"], summary["tokens"]["max"]) == (min(lengths), max(lengths))
        assert min(lengths) >= 2048 and max(lengths) <= 3400
        all_questions += layout_questions
    write_records(folder / "all.jsonl", map(dataclasses.asdict, all_questions))
    return folder / "all.jsonl"


@pytest.fixture(scope="module")
def short_questions(spell_data, tmp_path_factory) -> pathlib.Path:
    """Write multi-hop questions as published, with only their own 10 or 20 paragraphs."""
    path = tmp_path_factory.mktemp("short") / "questions.jsonl"
    drafts = [
        draft
        for layout in ("musique", "hotpotqa")
        for row in rows_of(spell_data, layout)
        for draft in read_row(LAYOUTS[layout], row)
        if isinstance(draft, Question)
    ]
    multi_hop_questions = [
        Question(d.task, d.documents, d.question, d.answer, d.evidence) for d in drafts
    ]
    write_records(path, map(dataclasses.asdict, multi_hop_questions))
    return path


# ------------------------------------------------------------------------------------------- Runs


def config_of(config: ConfigDict, policy: pathlib.Path, **changes: Any) -> ConfigDict:
    """Change a config to two short steps of a real model."""
    settings = {
        "steps": 2,
        "validate_every": 0,
        "checkpoint_every": 2,
        "policy.folder": str(policy),
        "policy.compute_dtype": "float32",
        "policy.remat": "none",
        "policy.rope_scaling": "",
        "optimizer.warmup_steps": 0,
        "mesh.context": 1,
        "algorithm.truncated": "score",  # random text seldom ends
        "algorithm.group_size": GROUP,
        "sampler.max_prompt": CAP,
        "sampler.kv_cache_tokens": 8 * CAP,
        "sampler.slots": 16,
        "sampler.samples_per_prompt_batch": GROUP,
        "sampler.prefill_tokens": CAP,
        "sampler.decode_tokens": 8,
        "sampler.max_tokens": MOST_TOKENS,
        "packing.buckets": ((CAP + 64, 64),),
        "packing.token_budget": CAP + 64,
    }
    if "verifier" in config.algorithm:
        settings["algorithm.verifier.max_tokens"] = MOST_VERDICT_TOKENS
    return noise.with_fields(config, settings | changes)


def run(config: ConfigDict, workdir: pathlib.Path) -> list[tuple[Record, list[Record]]]:
    """Run two steps; return (line of metrics, episodes) of each step."""
    loop.train(config, workdir)
    lines, episodes = read_metrics(workdir), list(read_episodes(workdir))
    assert [line["step"] for line in lines] == [1, 2]
    step_records = [(line, [e for step, e in episodes if step == line["step"]]) for line in lines]
    for line, step_episodes in step_records:
        assert line["rollout/sampler/reused_prompt_tokens"] >= 0
        assert [e["number"] for e in step_episodes] == list(range(1, step_episodes[0]["of"] + 1))
    return step_records


def check_tokens(
    line: Record,
    agent_prompts: Sequence[str],
    agent: str,
    model: pathlib.Path,
    max_tokens: int = MOST_TOKENS,
) -> None:
    """Check a step's metrics of a model's prompt tokens (counted again) and answer tokens."""
    tokenizer = tokenizers.load(model)
    lengths = [len(tokenizer.chat(prompt)) for prompt in agent_prompts]
    assert max(lengths) <= CAP and line[f"rollout/refused/{agent}"] == 0
    assert line[f"rollout/prompt_tokens/{agent}"] == pytest.approx(np.mean(lengths))
    assert line[f"rollout/answer_tokens/{agent}"] <= max_tokens
    if line[f"rollout/truncated/{agent}"] == 1:
        assert line[f"rollout/answer_tokens/{agent}"] == max_tokens


def with_documents(record: Record) -> str:
    """Return a record's prompt with the document texts in place of their names."""
    return DOCUMENT.sub(lambda match: record["documents"][int(match[1])], record["prompt"])


def has_changed(before: pathlib.Path, after: pathlib.Path) -> bool:
    """Return whether any weight of two folders differs."""
    (_, old), (_, new) = weights.load(before), weights.load(after)
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), old, new)
    return not all(jax.tree.leaves(same))


# ------------------------------------------------------------------------- Document reconstruction


def reconstruction_config(qwen, documents: pathlib.Path, keep_equal: bool) -> ConfigDict:
    fields = {
        "evaluate": True,
        "data.source": str(documents),
        "data.held_out": 0.2,
        "algorithm.evaluation_puzzles": 1,
        "algorithm.validation_puzzles": 1,
        "algorithm.documents": 4,
        "algorithm.keep_equal": keep_equal,
        "algorithm.cut_documents": True,
    }
    return config_of(reconstruction.get_config(), qwen, **fields)


# K of eight puzzles in proportions 3:3:3:5, rising.
RISING = [[2, 2, 4, 6], [6, 8, 8, 8]]


@pytest.mark.parametrize(("source", "keep_equal"), [("books", True), ("edgar", False)])
def test_reconstruction_on_books_and_filings(
    spell_data, qwen, source, keep_equal, tmp_path, monkeypatch
) -> None:
    noise.use_one_device(monkeypatch)
    folder = spell_data / source / "dev"
    files = [path.read_text("utf-8-sig").strip() for path in sorted(folder.glob("*.txt"))]
    steps = run(reconstruction_config(qwen, folder, keep_equal), tmp_path / "run")
    for (line, episodes), ks in zip(steps, RISING, strict=True):
        posed = [e for e in episodes if e["status"] == "accepted"]
        assert [e["options"] for e in posed] == ks
        assert line["rollout/accepted"] == pytest.approx(len(posed) / len(episodes))
        reasons = Counter(e["reason"] for e in episodes if e["reason"])
        assert sum(reasons.values()) == len(episodes) - len(posed)
        shares = {n: v for n, v in line.items() if n.startswith("rollout/reason/")}
        expected_shares = {
            f"rollout/reason/{name}": n / len(episodes) for name, n in reasons.items()
        }
        assert shares == pytest.approx(expected_shares)
        check_tokens(line, [check_puzzle(e, files) for e in posed], "responder", qwen)
        assert line["rollout/options"] == np.mean(ks)
        assert line["rollout/dense_by_chance"] == pytest.approx(np.mean([1 / k for k in ks]))
        guesses = [1 / math.factorial(k) for k in ks]
        assert line["rollout/sparse_by_chance"] == pytest.approx(np.mean(guesses))
        assert (
            line["rollout/permutation"] == line["rollout/solve_rate"] == line["rollout/mixed"] == 0
        )
        # All rewards are equal; if such groups are kept, their update has no gradient.
        assert line["train/empty_update"] == (not keep_equal)
        assert line.get("train/rows/responder") == (4 * GROUP if keep_equal else None)
        if keep_equal:
            assert line["train/loss"] == line["train/gradient_norm"] == 0
            assert line["train/sampler_difference"] < 1e-4
        used = {e["used"]["responder"] for e in posed}
        assert used == {"used" if keep_equal else "equal_rewards"}
    results = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    for table in (results[when]["reconstruction, by number of options"] for when in results):
        columns = {"all", "2", "4", "6", "8"}
        assert table["dense reward"].keys() == table["sparse reward of a guess"].keys() == columns
        assert table["dense reward"]["all"][0] == table["permutation"]["all"][0] == 0
        assert table["sparse reward of a guess"]["8"][0] == pytest.approx(1 / math.factorial(8))
        assert table["dense reward of a guess"]["all"][0] == pytest.approx(
            np.mean([1 / 2, 1 / 4, 1 / 6, 1 / 8])
        )
    assert results.keys() == {"before", "after"}


def check_puzzle(record: Record, files: Sequence[str]) -> str:
    """Check that a puzzle is a real document with paragraphs taken out; return its prompt."""
    (document,) = record["documents"]
    assert document in files
    first, last = record["window"]
    text, spans = document[first:last], record["spans"]
    letters = record["reference"].split(", ")
    assert len(letters) == len(spans) == record["options"]
    assert sorted(letters) == list("ABCDEFGH"[: len(letters)])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    paragraphs = [text[slice(*span)] for span in spans]
    assert len(set(paragraphs)) == len(paragraphs) and all(80 <= len(t) <= 4000 for t in paragraphs)
    for letter, paragraph in zip(letters, paragraphs, strict=True):
        assert paragraph == paragraph.strip() and text.count(paragraph) == 1
        assert f"({letter}) {paragraph}\n" in record["prompt"]
    pieces, start = [], 0
    for number, (begin, end) in enumerate(spans, 1):
        pieces += [text[start:begin], f"<CHUNK_{number}>MISSING</CHUNK_{number}>"]
        start = end
    with_gaps = "".join([*pieces, text[start:]])
    assert all(paragraph not in with_gaps for paragraph in paragraphs)
    return record["prompt"].replace("{document}", with_gaps)


# -------------------------------------------------------------------------------------------- EAPO


def eapo_config(qwen, llama, questions: pathlib.Path) -> ConfigDict:
    fields = {
        "checkpoint_every": 1,
        "reward_model.folder": str(llama),
        "reward_model.compute_dtype": "float32",
        "reward_model.remat": "none",
        "data.questions": str(questions),
        "data.validation": "",
        "algorithm.questions": 4,
        "algorithm.refresh_every": 1,
        "algorithm.keep_equal": False,
    }
    return config_of(eapo.get_config(), qwen, **fields)


def test_eapo_with_only_malformed_answers_makes_no_update(
    qwen, llama, questions, tmp_path, monkeypatch
) -> None:
    noise.use_one_device(monkeypatch)
    by_text = {q.question: q for q in read_questions(questions, "data.questions")}
    for line, episodes in run(eapo_config(qwen, llama, questions), tmp_path):
        assert Counter(e["task"] for e in episodes) == {"general_qa": 2, "financial_math": 2}
        for e in episodes:
            question = by_text[e["question"]]
            assert tuple(e["documents"]) == question.documents and e["reference"] == question.answer
            measures = e["measures"]
            assert measures["well_formed"] == [False] * GROUP and e["scores"] == [0.0] * GROUP
            assert e["scoring"] is None and e["used"] == {"responder": "equal_rewards"}
        check_tokens(line, [with_documents(e) for e in episodes], "responder", qwen)
        for name in ("well_formed", "outcome_reward", "total_reward", "mixed", "kept_scorings"):
            assert line[f"rollout/{name}"] == 0
        assert "rollout/prompt_tokens/reward_model" not in line  # there was nothing to compare
        assert line["rollout/refreshed_scorings"] == 0
        assert line["train/empty_update"] and "train/reward_model/empty_update" not in line
    assert not has_changed(qwen, tmp_path / "policy")
    assert not has_changed(llama, tmp_path / "reward_model")


class Script:
    """Replace the models' answers by texts that earn different rewards.

    Of a question's four answers one is right, one quotes a text that no document has, one has no
    format and one quotes in part. Of scorings one is well-formed at once, the next after a retry,
    the next never, and so on.
    """

    def __init__(self, questions: Sequence[Question]):
        self._questions = questions
        # question -> number of times that its answers were scored
        self.scorings: dict[str, int] = {}
        self.prompts: list[str] = []  # of the reward model

    def write(self, model: str, prompt: str) -> list[str]:
        question = max(
            (q for q in self._questions if q.question in prompt), key=lambda q: len(q.question)
        )
        if model == "policy":
            return answers_to(question)
        self.prompts.append(prompt)
        tries = self.scorings.get(question.question, 0)
        self.scorings[question.question] = tries + 1
        place = list(self.scorings).index(question.question)
        return ['{"scores": [5, 1, 2]}' if tries >= place % 3 else "the first is best"]

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked_model, tokenizer = "", None
        real_answer, real_reply = RolloutWorker._answer, worker_module.make_reply

        def answer(worker: RolloutWorker, model: str, pending: deque[PendingCall]):
            nonlocal asked_model, tokenizer
            asked_model, tokenizer = model, worker._text_sampler_of(model).tokenizer
            yield from real_answer(worker, model, pending)

        def make_reply(prompt: Prompt, samples: Sequence[Sample], decode: Any, truncated: str):
            assert tokenizer is not None
            texts = self.write(asked_model, decode(prompt.ids))
            if asked_model == "reward_model":  # trained on the tokens of its scores
                ids = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
                samples = [Sample(np.array(answer, np.int32)) for answer in ids]
            written_texts = iter(texts)
            reply = real_reply(prompt, samples, lambda _: next(written_texts), truncated)
            return dataclasses.replace(reply, decode=decode)

        monkeypatch.setattr(RolloutWorker, "_answer", answer)
        monkeypatch.setattr(worker_module, "make_reply", make_reply)


def answers_to(question: Question) -> list[str]:
    """Return four answers to a question; the first is right."""
    wrong = "-123456.5" if question.task == "financial_math" else "nobody that is named here"
    quotes = [f'- "{quote}"' for quote in question.evidence or question.documents[:1]]
    invented = "- Of this the unwritten chapter tells."

    def answer(evidence: str, answer: str) -> str:
        return (
            f"<analysis>what is asked</analysis>\n<evidence>\n{evidence}\n</evidence>\n"
            f"<reasoning>it follows</reasoning>\n<answer>{answer}</answer>"
        )

    right = answer("\n".join(quotes), question.answer)
    partly = answer("\n".join([*quotes, invented]), wrong)
    return [right, answer(invented, wrong), right + " and more", partly]


def test_eapo_scores_retries_and_refreshes_the_reward_model(
    qwen, llama, questions, tmp_path, monkeypatch
) -> None:
    noise.use_one_device(monkeypatch)
    script = Script(read_questions(questions, "data.questions"))
    script.replace(monkeypatch)
    steps = run(eapo_config(qwen, llama, questions), tmp_path)
    assert len(script.scorings) == 8
    order, prompt_count = list(script.scorings), 0
    for line, episodes in steps:
        kinds = [order.index(e["question"]) % 3 for e in episodes]
        assert kinds.count(2) == 1  # neither try was well-formed
        for e, kind in zip(episodes, kinds, strict=True):
            measures = e["measures"]
            assert measures["well_formed"] == [True, True, False, True]
            assert e["rule"] == [1, 0, 0, 0]
            first, invented, nothing, partly = measures["verbatim"]
            assert (first, invented, nothing) == (1, 0, None) and 0 < partly < 1
            assert e["evidence_scores"] == (None if kind == 2 else [5, 1, 2])
            expected_flags = [None] * 4 if kind == 2 else [True, True, None, True]
            assert measures["consistent"] == expected_flags
            expected_scores = [0.85, 0.25, 0, 0.25] if kind == 2 else [1, 0.1, 0, 0.175]
            assert e["scores"] == pytest.approx(expected_scores)
            assert sum(e["advantages"]["responder"]) == pytest.approx(0, abs=1e-5)
        tries = sum(2 if kind else 1 for kind in kinds)
        prompts, prompt_count = (
            script.prompts[prompt_count : prompt_count + tries],
            prompt_count + tries,
        )
        assert len(prompts) == tries
        assert line["rollout/well_formed"] == 0.75 and line["rollout/outcome_reward"] == 0.25
        assert line["rollout/scoring_failed"] == 1 / 4 and line["rollout/scoring_consistent"] == 1
        assert line["rollout/scoring_retried"] == np.mean([kind > 0 for kind in kinds])
        assert (
            line["rollout/evidence_score_right"] == 5
            and line["rollout/evidence_score_wrong"] == 1.5
        )
        assert line["rollout/kept_scorings"] == 0 and line["rollout/refreshed_scorings"] == 3
        assert line["train/rows/responder"] == 4 * GROUP and line["train/rows/reward_model"] == 3
        assert not line["train/empty_update"] and not line["train/reward_model/empty_update"]
        assert line["train/reward_model/gradient_norm"] > 0
        assert line["train/sampler_difference"] < 1e-4
    assert prompt_count == len(script.prompts)
    assert has_changed(qwen, tmp_path / "policy") and has_changed(llama, tmp_path / "reward_model")


# ------------------------------------------------------------------------ Given questions and SPELL


def test_rlvr_on_long_questions(qwen, questions, tmp_path, monkeypatch) -> None:
    noise.use_one_device(monkeypatch)
    for line, _ in check_rlvr(qwen, questions, tmp_path):
        assert line["rollout/solve_rate"] == 0 and line["train/empty_update"]
    assert not has_changed(qwen, tmp_path / "policy")


def test_rlvr_on_published_questions(qwen, short_questions, tmp_path, monkeypatch) -> None:
    noise.use_one_device(monkeypatch)
    monkeypatch.setattr(rules, "score", lambda text, *_: zlib.crc32(text.encode()) % 2)
    for line, episodes in check_rlvr(qwen, short_questions, tmp_path):
        mixed = [e for e in episodes if len(set(e["scores"])) > 1]
        assert mixed and line["rollout/mixed"] == len(mixed) / len(episodes)
        assert line["train/rows/responder"] == GROUP * len(mixed)
        assert line["train/gradient_norm"] > 0 and line["train/sampler_difference"] < 1e-4
    assert has_changed(qwen, tmp_path / "policy")


def check_rlvr(
    qwen: pathlib.Path, path: pathlib.Path, workdir: pathlib.Path
) -> list[tuple[Record, list[Record]]]:
    """Run two steps on given questions; check that the episodes have the file's questions."""
    fields = {
        "data.questions": str(path),
        "algorithm.questions": 4,
        "algorithm.generation_batch": 4,
        "algorithm.max_generations": 1,
    }
    questions_by_text = {q.question: q for q in read_questions(path, "data.questions")}
    fill = prompts.load("full").responder
    steps = run(config_of(rlvr.get_config(), qwen, **fields), workdir)
    asked_questions = [e["question"] for _, episodes in steps for e in episodes]
    assert len(asked_questions) == len(set(asked_questions)) == 8  # no question twice in an epoch
    for line, episodes in steps:
        assert line["rollout/static_questions"] == len(questions_by_text)
        for e in episodes:
            assert e["reference"] == questions_by_text[e["question"]].answer
            assert tuple(e["documents"]) == questions_by_text[e["question"]].documents
        filled_prompts = [fill(e["task"], e["documents"], e["question"]) for e in episodes]
        check_tokens(line, filled_prompts, "responder", qwen)
        assert line["rollout/solve_rate"] == np.mean([np.mean(e["scores"]) for e in episodes])
        assert "rollout/prompt_tokens/questioner" not in line
    return steps


@pytest.mark.parametrize("layout", ROWS)
def test_rule_accepts_references_and_few_other_answers(spell_data, layout) -> None:
    """A right answer earns 1; one for another question earns 1 only by chance."""
    drafts = [d for row in rows_of(spell_data, layout) for d in read_row(LAYOUTS[layout], row)]
    drafts = [d for d in drafts if isinstance(d, Question)]
    statements = [f"The answer is {d.answer}" for d in drafts]
    assert all(
        rules.score(s, d.answer, d.task) == 1 for s, d in zip(statements, drafts, strict=True)
    )
    pairs = [
        (s, other_draft)
        for s, d, other_draft in zip(statements, drafts, drafts[1:], strict=False)
        if d.answer != other_draft.answer
    ]
    right = sum(rules.score(s, d.answer, d.task) for s, d in pairs)
    assert right <= 0.05 * len(pairs)


@pytest.mark.parametrize("meaning", [False, True], ids=["noise", "noise with a meaning"])
def test_spell_on_filings(spell_data, qwen, meaning, tmp_path, monkeypatch) -> None:
    noise.use_one_device(monkeypatch)
    if meaning:
        noise.give_meaning(monkeypatch)
    folder = spell_data / "edgar" / "dev"
    fields = {
        "data.source": str(folder),
        "data.grouping": "order",
        "data.documents_per_cluster": 3,
        "data.max_document_tokens": 1024,
        "data.held_out": 0.1,
        "algorithm.questions": 4,
        "algorithm.generation_batch": 6,
        "algorithm.max_generations": 1,
        "algorithm.verifier.group_size": GROUP,
        "algorithm.questioner.grounding_samples": 2,
        "algorithm.questioner.grounding_threshold": 2,
        "algorithm.questioner.documents": (2,),
        "algorithm.verifier.share": 1.0,  # an eighth of few rows, as in the paper, is none
    }
    steps = run(config_of(paper.get_config("qwen2.5-7b-instruct"), qwen, **fields), tmp_path)
    filings = "\n".join(path.read_text("utf-8-sig") for path in sorted(folder.glob("*.txt")))
    learned: Counter[str] = Counter()
    for line, episodes in steps:
        assert len(episodes) == 6
        statuses = Counter(e["status"] for e in episodes)
        for status in ("accepted", "bad_format", "declined", "ungrounded", "overlong"):
            assert line[f"rollout/{status}"] == pytest.approx(statuses[status] / 6)
        for e in episodes:
            assert all(text in filings for text in e["documents"])
            assert len(e["documents"]) == 3 and len(e["shown"]) == 2
        check_tokens(line, [with_documents(e) for e in episodes], "questioner", qwen)
        if not meaning:
            assert statuses == {"bad_format": 6} and line["train/empty_update"]
            continue
        rows = check_answers(line, episodes, qwen)
        learned += rows
        assert bool(line["train/empty_update"]) == (rows.total() == 0)
        if rows.total():
            assert line["train/sampler_difference"] < 1e-4 and line["train/gradient_norm"] > 0
    assert {role for role in learned if learned[role]} == ({*prompts.ROLES} if meaning else set())
    assert has_changed(qwen, tmp_path / "policy") == meaning


def check_answers(line: Record, episodes: Sequence[Record], qwen: pathlib.Path) -> Counter[str]:
    """Check the requests after the proposals, and their results; return the rows of each role."""
    fills = prompts.load("full")
    solved = [e for e in episodes if e["scores"]]
    filled_prompts = [fills.responder(e["task"], (), e["question"]) for e in episodes if e["blind"]]
    filled_prompts += [fills.responder(e["task"], e["documents"], e["question"]) for e in solved]
    check_tokens(line, filled_prompts, "responder", qwen)
    compared = [
        fills.verifier(e["question"], prediction, e["reference"])
        for e in solved
        for prediction in e["predictions"]
    ]
    check_tokens(line, compared, "verifier", qwen, MOST_VERDICT_TOKENS)
    for e in episodes:
        if e["blind"]:
            assert (e["blind"] == [e["reference"]] * 2) == (e["status"] == "ungrounded")
    mixed = [e for e in solved if len(set(e["scores"])) > 1]
    for e in solved:
        verdicts = [sum(votes) > GROUP / 2 for votes in e["votes"]]
        assert e["scores"] == [max(pair) for pair in zip(e["rule"], verdicts, strict=True)]
        off = np.mean(e["scores"]) - 0.5
        assert e["reward"] == pytest.approx(np.exp(-18 * off**2) if e in mixed else 0)
    assert line["rollout/solve_rate"] == pytest.approx(np.mean([e["scores"] for e in solved]))
    assert line["rollout/mixed"] == pytest.approx(len(mixed) / len(solved))
    used = [e["used"] for e in episodes]
    rows = {
        "questioner": sum(use["questioner"] == "used" for use in used),
        "responder": GROUP * sum(use["responder"] == "used" for use in used),
        "verifier": GROUP * sum(use["verifier"].count("used") for use in used),
    }
    assert rows["responder"] == GROUP * min(len(mixed), 4)
    for role, count in rows.items():
        assert line.get(f"train/rows/{role}", 0) == count
    return Counter(rows)
