"""Asks a trained policy in any of its roles.

    python -m spell_jax.generate --workdir=DIR --prompts=FILE.jsonl --out=FILE.jsonl

1. A line of the input is a JSON object that holds what the role needs:
   {"role": "questioner", "task", "documents"}, with "letter" for multiple choice, and "history" (a
   list of {"question", "answer"}, oldest first) if wanted; {"role": "responder", "task",
   "documents", "question"}; {"role": "verifier", "question", "answer", "reference"}; or
   {"prompt": "..."}, used as it is. Bad lines are counted, logged with their place, and skipped.
2. The policy is DIR/policy, or the folder that --policy names. The prompts' wording is that of the
   run (DIR/config.json) unless --prompt_set says otherwise.
3. A line of the output is the input's plus "answers" (texts; none, if the prompt is too long for
   the policy's context), "logprobs" (sum over an answer's tokens, in nats, at the sampling
   temperature), "tokens" (counts) and "stopped" (false: cut off at --max_tokens). One entry an
   answer there are also: a questioner's "parsed", a responder's "predictions" (the extracted
   answers), a verifier's "verdicts" (1 yes, 0 no, -1 malformed).

With --mode=evidence_tree a line holds {"documents", "question"}, "task" if it is not general_qa,
and "answer" if it is known. The policy draws --width sets of evidence, --evidence_by chooses one,
and it reasons from that (evidence_tree.py). "judge" is the policy itself, another one
(--judge_policy) or a chat endpoint (--judge_url and --judge_model, its key in $SPELL_JUDGE_KEY). A
line of the output has "branches" and "reasonings", the whole tree, "prediction", and "right" where
the answer is known.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from spell_jax.algorithms.eapo import evidence_tree
from spell_jax.data.clusters import ROLES
from spell_jax.evaluation.policy_sampler import Policy, PolicyJudge
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.policy.embedder import Embedder
from spell_jax.runtime import distributed
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import setup as start
from spell_jax.runtime.jsonl import read_records, write_records
from spell_jax.sampler.requests import Options, Sample
from spell_jax.sampler.session import request_keys
from spell_jax.selfplay import memory, parsing, rules
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.judge import JUDGE_KEY, Ask, Endpoint, JudgeConfig
from spell_jax.selfplay.prompts import Prompts

log = logging.getLogger("spell_jax.generate")  # __name__ is __main__ when this is the entry

Record = dict[str, Any]
MODES = ("roles", "evidence_tree")
EMBED_TOKENS = 8192  # of a batch of texts whose vectors are asked for


def make_prompt(record: Record, prompts: Prompts) -> str:
    """The text of one request.

    Raises:
      ValueError: naming the field that is missing, unknown or of the wrong type.
    """
    if "prompt" in record:
        return _text(record, "prompt")
    role = record.get("role")
    if role not in ROLES:
        raise ValueError(f"role = {role!r}: must be one of {ROLES}, or give a prompt")
    if role == "verifier":
        fields = (_text(record, name) for name in ("question", "answer", "reference"))
        return prompts.verifier(*fields)
    task, documents = _text(record, "task"), record.get("documents")
    if not isinstance(documents, list) or not all(isinstance(text, str) for text in documents):
        raise ValueError(f"documents = {documents!r}: must be a list of texts")
    if role == "responder":
        return prompts.responder(task, documents, _text(record, "question"))
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(past, dict) for past in history):
        raise ValueError(f"history = {history!r}: must be a list of questions with answers")
    known = [memory.Entry((), _text(past, "question"), _text(past, "answer")) for past in history]
    return prompts.questioner(task, documents, known, record.get("letter"))


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} = {value!r}: must be a text")
    return value


def read_requests(
    path: str | pathlib.Path,
    prompts: Prompts,
    make: Callable[[Record, Prompts], str] = make_prompt,
) -> tuple[list[Record], list[str]]:
    """The good lines of a file as (records, prompts by `make`); the others are logged and skipped.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: no line of it is a request.
    """

    def parse(record: Any) -> tuple[Record, str]:
        if not isinstance(record, dict):
            raise ValueError("must be a JSON object")
        text = make(record, prompts)
        text.encode()  # lone surrogates cannot be asked
        return record, text

    requests, skipped = read_records(path, parse)
    if not requests:
        raise ValueError(f"prompts = {path}: none of its {skipped} lines is a request")
    level = logging.WARNING if skipped else logging.INFO
    log.log(level, "%s: %d requests, %d lines skipped", path, len(requests), skipped)
    records, texts = map(list, zip(*requests, strict=True))
    return records, texts


def answer(
    policy_folder: str | pathlib.Path,
    records: Sequence[Record],
    prompts: Sequence[str],
    samples: int,
    sampling: Record,
    seed: int,
    dtype: str = "float32",
    thinking: bool | None = None,
) -> list[Record]:
    """The output's lines: every prompt (the text of a record) is answered `samples` times [G].

    `sampling` holds temperature (0: greedy), top_p and max_tokens, as in Options; `dtype` is
    the policy's, and `thinking` goes to chat templates that know it.
    Raises FileNotFoundError or ValueError: no policy there, or an option out of range.
    """
    policy = Policy(policy_folder, dtype, thinking)
    ids = [policy.tokenizer.chat(prompt) for prompt in prompts]
    cap = policy.config.max_positions - sampling["max_tokens"]
    fitting = [i for i, prompt in enumerate(ids) if len(prompt) <= cap]
    if not fitting:
        policy.config.check_length(min(map(len, ids)) + sampling["max_tokens"])
    if len(fitting) < len(ids):
        refused = len(ids) - len(fitting)
        log.warning("%d prompts are longer than %d tokens and were not answered", refused, cap)
    keys = request_keys(jax.random.key(seed), len(ids))[fitting]
    asked = [np.array(ids[i], np.int32) for i in fitting]
    drawn = policy.draw(asked, samples, keys, [Options(**sampling)] * len(asked))
    found = {fitting[place]: group for place, group in drawn}
    return [
        describe(record, found.get(i, []), policy.tokenizer) for i, record in enumerate(records)
    ]


def describe(record: Record, samples: Sequence[Sample], tokenizer: tokenizers.Tokenizer) -> Record:
    """The output's line of one request."""
    texts = [tokenizer.decode(sample.content) for sample in samples]
    result = record | {
        "answers": texts,
        "logprobs": [math.fsum(map(float, sample.logprobs)) for sample in samples],
        "tokens": [len(sample.tokens) for sample in samples],
        "stopped": [sample.stopped for sample in samples],
    }
    if "prompt" in record:
        return result
    if record["role"] == "verifier":
        return result | {"verdicts": [parsing.parse_verdict(text) for text in texts]}
    task = record["task"]
    if record["role"] == "responder":
        return result | {"predictions": [rules.extract_answer(text, task) for text in texts]}
    parsed = [parsing.parse_question(text, task, tokenizer.count) for text in texts]
    return result | {"parsed": [dataclasses.asdict(one) for one in parsed]}


def find_prompt_set(workdir: pathlib.Path | None) -> str:
    """The prompts of the run that config.json of its workdir describes; "full" without one."""
    path = workdir / start.CONFIG_FILE if workdir else None
    config = json.loads(path.read_text()) if path and path.exists() else {}
    return config.get("algorithm", config).get("prompts", "full")


def make_tree(
    given: Any,
    folder: str | pathlib.Path,
    prompts: Prompts,
    sampling: Record,
    thinking: bool | None,
) -> evidence_tree.Tree:
    """The tree that the command line asks for.

    Raises:
      ValueError, FileNotFoundError: an option is out of range, or a folder is missing or damaged.
    """
    config = evidence_tree.TreeConfig(given.width, given.evidence_by, given.reasoning_by)
    policy = Policy(folder, given.dtype, thinking)
    by = config.evidence_by, config.reasoning_by
    judge = make_judge(given, policy) if "judge" in by else None
    embed = make_embed(given) if "similarity" in by else None
    return evidence_tree.Tree(policy, config, prompts, sampling, judge, embed)


def make_judge(given: Any, policy: Policy) -> Ask:
    """Whom the command line names to score branches; the policy itself, if nobody is named."""
    if bool(given.judge_url) != bool(given.judge_model) or (given.judge_url and given.judge_policy):
        raise app.UsageError("--judge_url and --judge_model go together, without --judge_policy")
    if not given.judge_url:
        if given.judge_policy:
            policy = Policy(given.judge_policy, given.dtype)
        return PolicyJudge(policy, given.judge_max_tokens)
    key, cap = os.environ.get(JUDGE_KEY), given.judge_max_tokens
    endpoint = Endpoint(JudgeConfig(given.judge_url, given.judge_model, key, max_tokens=cap))
    # Of several hosts one asks, and all are told: they go on with the same branch.
    return lambda texts: distributed.broadcast(lambda: list(endpoint(texts)))


def make_embed(given: Any) -> evidence_tree.Embed:
    """Vectors by the folder that the command line names.

    Raises:
      UsageError: it names none.
    """
    if not given.embedder:
        raise app.UsageError("--embedder: must be a Hugging Face folder, for similarity")
    mesh, most = meshes.make_mesh(), given.embed_max_tokens
    embedder = Embedder(given.embedder, mesh, most, EMBED_TOKENS, given.dtype)
    return lambda texts: embedder.embed([embedder.encode(text)[0] for text in texts])


def main(_) -> None:
    start.setup()
    given = flags.FLAGS
    workdir = pathlib.Path(given.workdir) if given.workdir else None
    folder = given.policy or (workdir and workdir / "policy")
    if not folder:
        raise app.UsageError("--workdir or --policy: one of them must say which policy is asked")
    prompts = prompt_sets.load(given.prompt_set or find_prompt_set(workdir))
    temperature = 0.0 if given.greedy else given.temperature
    sampling = {"temperature": temperature, "top_p": given.top_p, "max_tokens": given.max_tokens}
    thinking = tokenizers.THINKING[given.thinking]
    if given.mode == "evidence_tree":
        tree = make_tree(given, folder, prompts, sampling, thinking)
        records, texts = read_requests(given.prompts, prompts, evidence_tree.make_prompt)
        results = tree.answer(records, texts, given.seed)
    else:
        records, texts = read_requests(given.prompts, prompts)
        results = answer(
            folder, records, texts, given.samples, sampling, given.seed, given.dtype, thinking
        )
    if jax.process_index() == 0:
        write_records(pathlib.Path(given.out), results)


if __name__ == "__main__":
    # Defined here, so that one process may import several entries.
    flags.DEFINE_string("workdir", None, "A run's folder; its policy/ is asked.")
    flags.DEFINE_string("policy", None, "A policy's folder, instead of the run's.")
    flags.DEFINE_string("prompts", None, "JSONL of requests.", required=True)
    flags.DEFINE_string("out", None, "JSONL to write.", required=True)
    flags.DEFINE_integer("samples", 1, "Answers to each request.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.7, "Of sampling; 0: greedy.")
    flags.DEFINE_float("top_p", 0.95, "Mass of the nucleus.")
    flags.DEFINE_bool("greedy", False, "The most likely token each time.")
    flags.DEFINE_integer("max_tokens", 256, "Cap of an answer, in tokens.")
    flags.DEFINE_string("prompt_set", None, "compact, full or a folder of templates.")
    flags.DEFINE_integer("seed", 0, "Seed of all draws.")
    flags.DEFINE_enum("dtype", "float32", list(weights.DTYPES), "The policy's weights.")
    flags.DEFINE_enum("thinking", "", list(tokenizers.THINKING), "For chat templates that know it.")
    flags.DEFINE_enum("mode", "roles", MODES, "What is asked: a role, or a tree of evidence.")
    flags.DEFINE_integer("width", 3, "Branches of a tree, where something chooses among them.")
    flags.DEFINE_enum("evidence_by", "judge", evidence_tree.EVIDENCE_BY, "What chooses evidence.")
    flags.DEFINE_enum(
        "reasoning_by", "none", evidence_tree.REASONING_BY, "What chooses the reasoning."
    )
    flags.DEFINE_string("judge_url", "", "A chat-completions address.")
    flags.DEFINE_string("judge_model", "", "The model's name there.")
    flags.DEFINE_string("judge_policy", "", "A policy's folder, for the judge.")
    flags.DEFINE_integer("judge_max_tokens", 1024, "Cap of a judge's reply.")
    flags.DEFINE_string("embedder", "", "An embedding model's folder, for similarity.")
    flags.DEFINE_integer("embed_max_tokens", 1024, "Of a text whose vector is asked for.")
    app.run(main)
