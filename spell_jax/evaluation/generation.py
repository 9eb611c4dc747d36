"""Answers of a policy to a prompt or a file of requests: the body of spell_jax/generate.py.

A line of the file becomes a prompt (`make_prompt`). The policy samples answers to all prompts that
fit into its context (`answer`). Each answer is parsed as its role in self-play requires
(`describe_answers`).
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app
from etils import epath

from spell_jax.policy.choices import THINKING
from spell_jax.rollout.replies import Reply
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import entry
from spell_jax.runtime.config import check_text
from spell_jax.runtime.files import paths, remote
from spell_jax.runtime.files.jsonl import read_json, require_records, write_records
from spell_jax.runtime.files.paths import CONFIG_FILE
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options
from spell_jax.selfplay import memory, parsing, rules
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.prompts import ROLES, Prompts
from spell_jax.selfplay.rules import TASKS

log = logging.getLogger(__name__)

Record = dict[str, Any]
# Fields of a request; the labels "id" and "note" are only copied to the output.
FIELDS = ("prompt", "role", "task", "documents", "question", "answer", "reference", "history")
FIELDS += ("letter", "id", "note")
# Request and wording -> prompt; raises ValueError for a bad request.
MakePrompt = Callable[[Record, Prompts], str]


def check_flags(flag_values: Any) -> None:
    """Raise UsageError unless the flags have either --prompt, or --prompts and --out.

    ValueError if --prompt is no text in UTF-8.
    """
    if flag_values.prompt is None:
        if not flag_values.prompts or not flag_values.out:
            raise app.UsageError("--prompt, or both --prompts and --out: must be given")
        return
    if not flag_values.prompt:
        raise app.UsageError("--prompt = '': must be a text")
    check_text(flag_values.prompt, "--prompt")
    for name in ("prompts", "out"):
        if getattr(flag_values, name):
            raise app.UsageError(f"--{name}: has no effect with --prompt, must not be given")
    if flag_values.mode != "roles":
        raise app.UsageError(f"--mode = {flag_values.mode!r}: needs --prompts, a file of requests")


def answer_prompt(flag_values: Any) -> None:
    """Answer --prompt and print the answers.

    All processes call this together; errors as in `answer_requests`.
    """
    model, _, sampling = load(flag_values)
    records, samples = [{"prompt": flag_values.prompt}], flag_values.samples
    (result,) = answer(model, records, [flag_values.prompt], samples, sampling, flag_values.seed)
    print_answers(result)


def answer_requests(flag_values: Any) -> None:
    """Answer the requests of --prompts and write --out.

    All processes call this together. Raises UsageError if the flags name no policy,
    FileNotFoundError or ValueError if a file is missing or damaged, or a flag is out of range.
    """
    # Before any sampling: a folder at --out would cost all answers.
    paths.require(flag_values.out, "a file")
    model, prompts, sampling = load(flag_values)
    records, texts = read_requests(flag_values.prompts, prompts)
    workdir = paths.open_folder(flag_values.workdir) if flag_values.workdir else None
    extract = flag_values.extract or find_field(workdir, "extract", "lenient")
    write_answers(
        flag_values,
        answer(model, records, texts, flag_values.samples, sampling, flag_values.seed, extract),
    )


def load(flag_values: Any) -> tuple[TextModel, Prompts, Record]:
    """Return the policy, the wording of its prompts and the sampling options.

    Raises the errors of `answer_requests`.
    """
    workdir = paths.open_folder(flag_values.workdir) if flag_values.workdir else None
    folder = flag_values.policy or (workdir and workdir / "policy")
    if not folder:
        raise app.UsageError("--workdir or --policy: one of them must name the policy")
    # A policy is asked in the words that it was trained with.
    prompts = prompt_sets.load(flag_values.prompt_set or find_field(workdir, "prompts", "full"))
    temperature = 0.0 if flag_values.greedy else flag_values.temperature
    sampling = {
        "temperature": temperature,
        "top_p": flag_values.top_p,
        "max_tokens": flag_values.max_tokens,
    }
    Options(**sampling)  # checks the values before the weights are read
    return (
        TextModel(str(folder), flag_values.dtype, THINKING[flag_values.thinking]),
        prompts,
        sampling,
    )


def print_answers(result: Record) -> None:
    """Print the answers of an output line, on process 0 only; several answers get a number."""
    if jax.process_index() != 0:
        return
    count = len(result["answers"])
    for number, (text, stopped) in enumerate(
        zip(result["answers"], result["stopped"], strict=True), start=1
    ):
        end = "" if stopped else ", cut off at --max_tokens"
        if count > 1 or end:
            # On stderr, so that a single answer on stdout is the bare text.
            print(f"answer {number} of {count}{end}:", file=sys.stderr, flush=True)
        print(text, flush=True)


def write_answers(flag_values: Any, results: Sequence[Record]) -> None:
    """Write the lines of --out, on process 0 only."""
    if jax.process_index() == 0:
        write_records(flag_values.out, results)


def find_field(workdir: epath.Path | None, name: str, default: str) -> str:
    """Return a field of the section `algorithm` in config.json of a run's workdir.

    Returns `default` without a workdir, file or field. Raises ValueError if the file is damaged, or
    not the config of a run.
    """
    path = workdir / CONFIG_FILE if workdir else None
    config = read_json(path) if path and path.exists() else {}
    section = config.get("algorithm", config)
    value = section.get(name, default) if isinstance(section, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{path}: not the config of a run; give another --workdir, or the flag")
    return value


def make_prompt(record: Record, prompts: Prompts) -> str:
    """Make the prompt of a request; raise a ValueError that names a bad or missing field."""
    for name in record:
        _check_field(name)
    if "prompt" in record:
        return _text(record, "prompt")
    role = record.get("role")
    if role not in ROLES:
        raise ValueError(f"role = {role!r}: must be one of {ROLES}, or give a prompt")
    if role == "verifier":
        fields = (_text(record, name) for name in ("question", "answer", "reference"))
        return prompts.verifier(*fields)
    task, documents = record.get("task"), record.get("documents")
    if task not in TASKS:
        raise ValueError(f"task = {task!r}: must be one of {', '.join(TASKS)}")
    if not isinstance(documents, list) or not all(isinstance(text, str) for text in documents):
        raise ValueError(f"documents = {documents!r}: must be a list of texts")
    if role == "responder":
        return prompts.responder(task, documents, _text(record, "question"))
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(past, dict) for past in history):
        raise ValueError(f"history = {history!r}: must be a list of questions with answers")
    # The prompt shows the questions and answers of past entries, and not their documents.
    entries = [memory.Entry((), _text(past, "question"), _text(past, "answer")) for past in history]
    return prompts.questioner(task, documents, entries, record.get("letter"))


def _check_field(name: str) -> None:
    if name not in FIELDS:
        close_names = difflib.get_close_matches(name, FIELDS, 1)
        hint = f"did you mean {close_names[0]}? It " if close_names else ""
        raise ValueError(
            f"{name[:50]}: unknown field; {hint}must be one of {', '.join(FIELDS)}; options of "
            "sampling are flags"
        )


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} = {value!r}: must be a text")
    return value


def read_requests(
    path: str | pathlib.Path, prompts: Prompts, make: MakePrompt = make_prompt
) -> tuple[list[Record], list[str]]:
    """Return the requests of a JSONL file and their prompts; log and skip bad lines.

    Raises FileNotFoundError if there is no file, ValueError if no line is a request.
    """

    def parse(record: Any) -> tuple[Record, str]:
        if not isinstance(record, dict):
            raise ValueError("must be a JSON object")
        text = make(record, prompts)
        text.encode()  # no tokenizer takes lone surrogates
        return record, text

    where = f"prompts = {path}"
    requests, skipped = require_records(remote.fetch(path), parse, where, "a request")
    level = logging.WARNING if skipped else logging.INFO
    log.log(level, "%s: %d requests, %d lines skipped", path, len(requests), skipped)
    records, texts = map(list, zip(*requests, strict=True))
    return records, texts


def answer(
    model: TextModel,
    records: Sequence[Record],
    prompts: Sequence[str],
    samples: int,
    sampling: Record,
    seed: int,
    extract: str = "lenient",
) -> list[Record]:
    """Sample G = `samples` answers to all prompts that fit into the policy's context.

    `sampling` has temperature (0 is greedy), top_p and max_tokens, as in Options. `extract`, one of
    rules.EXTRACTS, says how answers are read. Returns a line of the output for each request; a
    prompt that does not fit has no answers. Raises ValueError if no prompt fits, or a sampling
    option is out of range.
    """
    options = Options(**sampling)
    encoded, room = [model.encode(prompt) for prompt in prompts], model.room(options.max_tokens)
    refused = sum(len(prompt.ids) > room for prompt in encoded)
    if refused == len(prompts):
        raise ValueError(
            f"max_tokens = {options.max_tokens}: leaves {room} of the policy's "
            "max_position_embeddings, and every prompt is longer"
        )
    entry.setup_done()
    if refused:
        log.warning("%d prompts are longer than %d tokens and were not answered", refused, room)
    # Keys by the place among all requests: a prompt that no longer fits must not change the answers
    # to the prompts after it.
    keys = request_keys(jax.random.key(seed), len(prompts))
    replies = dict(model.ask(encoded, samples, options, keys))
    count_tokens = model.tokenizer.count
    return [
        describe_answers(record, replies[i], count_tokens, extract)
        for i, record in enumerate(records)
    ]


def describe_answers(
    record: Record,
    reply: Reply | None,
    count_tokens: Callable[[str], int],
    extract: str = "lenient",
) -> Record:
    """Return the output line of one request: its fields, the answers and the parsed answers."""
    texts, samples = (reply.texts, reply.samples) if reply else ((), ())
    result = record | {
        "answers": list(texts),
        "logprobs": [sample.logprob for sample in samples],
        "tokens": [len(sample.tokens) for sample in samples],
        "stopped": [sample.stopped for sample in samples],
    }
    if "prompt" in record:
        return result
    if record["role"] == "verifier":
        return result | {"verdicts": [parsing.parse_verdict(text) for text in texts]}
    task = record["task"]
    if record["role"] == "responder":
        return result | {
            "predictions": [rules.extract_answer(text, task, extract) for text in texts]
        }
    parsed = [parsing.parse_question(text, task, count_tokens, extract=extract) for text in texts]
    return result | {"parsed": [dataclasses.asdict(proposal) for proposal in parsed]}
