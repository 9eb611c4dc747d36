"""The Python interface: the package's public functions (`spell_jax.train`, ...), for notebooks.

They do what the commands do, in the caller's process: mistakes are exceptions (ValueError, with the
same line), no signal handler stays installed, and each function may be called many times.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from etils import epath
from ml_collections import ConfigDict

from spell_jax.config import RunConfig
from spell_jax.evaluation import runner
from spell_jax.evaluation.answering import EvaluationSampling
from spell_jax.evaluation.runner import EvaluationConfig
from spell_jax.policy.choices import DTYPES, THINKING
from spell_jax.rollout.replies import Prompt, Reply
from spell_jax.rollout.text_model import SIZES, TextModel
from spell_jax.runtime import entry, setup
from spell_jax.runtime.config import Config, build, check_text, coerce, flat
from spell_jax.runtime.files import paths
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.keys import fold_keys, seed_key
from spell_jax.sampler.requests import Options
from spell_jax.trainer import loop, supervised

Folder = str | os.PathLike[str]


def get_config(name: str, **fields: Any) -> Config:
    """Load a config by its name ("tiny", "tiny:rlvr") or file, and change fields.

    A field of a section is named with dots: get_config("tiny", **{"data.source": "docs"}). The
    fields can be changed afterwards, too: config.data.source = "docs". ValueError if there is no
    such config or field, or a value has another type than the field.
    """
    try:
        config = entry.load_config([f"--config={name}"])
    except (ValueError, app.UsageError, flags.Error) as error:
        raise ValueError(str(error).removeprefix("--")) from error
    names = [field for field, _ in flat(config.to_dict())]
    for field, value in fields.items():
        if field not in names:
            close_names = difflib.get_close_matches(field, names, 1)
            remedy = f"did you mean {close_names[0]}?" if close_names else f"{name} has {names}"
            raise ValueError(f"{field}: no such field; {remedy}")
        kind = type(dict(flat(config.to_dict()))[field])
        try:
            # A ConfigDict takes None for every type, and True for a number.
            if value is None or (isinstance(value, bool) and kind in (int, float)):
                raise TypeError
            config.update_from_flattened_dict({field: value})
        except TypeError as error:
            raise ValueError(f"{field} = {value!r}: must be {kind.__name__}") from error
    return config


def train(config: ConfigDict | RunConfig | str, workdir: Folder) -> epath.Path:
    """Train as `python -m spell_jax.train` does, and return the workdir.

    WORKDIR/policy is the last policy, for `load`. Called again with the same workdir, also after
    Ctrl-C or in another process, the run goes on from its last checkpoint.

    Args:
      config: a config, such as get_config returns, or its name.
      workdir: folder of the run.

    Raises:
      The errors of trainer.loop.train; RuntimeError outside of the main thread.
    """
    return _run(loop.train, config, workdir)


def fine_tune(config: ConfigDict | str, workdir: Folder) -> epath.Path:
    """Fine-tune on rows as `python -m spell_jax.sft` does, and return the folder of the policy.

    The folder is WORKDIR/policy, for `load`. Called again with the same workdir, the run goes on
    from its last checkpoint.

    Args:
      config: a config of spell_jax.sft, such as get_config("fine_tune") returns, or its name; its
        `source` names the rows (docs/howto/fine_tune.md).
      workdir: folder of the run.

    Raises:
      The errors of trainer.supervised.fine_tune; RuntimeError outside of the main thread.
    """
    return _run(supervised.fine_tune, config, workdir)


def _run(function: Any, config: Any, workdir: Folder) -> epath.Path:
    # Python lets only the main thread handle SIGTERM, on which a run saves and ends.
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a run must be started in the main thread, which handles SIGTERM")
    entry.check_folder("workdir", workdir)
    if not isinstance(config, ConfigDict | RunConfig | str):
        raise ValueError(f"config = {config!r:.80}: must be a config of get_config, or its name")
    _set_up()
    config = get_config(config) if isinstance(config, str) else config
    return function(config, paths.open_workdir(workdir))


def load(
    folder: Folder, *, dtype: str = "float32", thinking: str = "", sizes: SamplerConfig = SIZES
) -> Policy:
    """Load a policy to ask: a Hugging Face folder, its URL, "tiny" or "smollm2".

    The weights are read with the first question.

    Args:
      folder: the folder; a run's are WORKDIR/policy and WORKDIR/best.
      dtype: dtype of the weights, "float32" or "bfloat16".
      thinking: "on" or "off" for chat templates that know it; "": the template's default.
      sizes: sampler's slots, KV cache and prefill, which depend on the device's memory.

    Raises:
      FileNotFoundError, ValueError: if there is no such policy, or a file of it is damaged.
    """
    for name, value, allowed in (("dtype", dtype, DTYPES), ("thinking", thinking, THINKING)):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(map(repr, allowed))}")
    entry.check_folder("folder", folder)
    _set_up()
    model = TextModel(os.fspath(folder), dtype, THINKING[thinking], sizes)
    # The weights are read later, when the current folder may be another one.
    model.folder = model.folder.absolute()
    return Policy(model)


class Policy:
    """A policy that answers texts; `load` makes it.

    Attributes:
      model: the policy as a TextModel, with its tokenizer and its architecture.
    """

    def __init__(self, model: TextModel):
        self.model = model

    def __repr__(self) -> str:
        return f"Policy({str(self.model.folder)!r})"

    def ask(
        self,
        prompts: str | Sequence[str],
        n: int = 1,
        *,
        temperature: float = 0.7,
        top_p: float = 0.95,
        max_tokens: int = 256,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> list[Reply]:
        """Sample n answers to each prompt; return a Reply for each, in order.

        `reply.texts` are the answers [n], `reply.samples` the same as tokens with logprobs. The
        answers are equal for equal prompts, options and seed, and equal to the answers of
        `python -m spell_jax.generate`.

        Args:
          prompts: user turns, which are written in the policy's chat layout; a text is one prompt.
          n: number of answers to a prompt, G.
          temperature: sampling temperature; 0 takes the most likely token each time.
          top_p: probability mass of the nucleus.
          max_tokens: maximum length of an answer in tokens.
          seed: seed of sampling.
          stop: text, or texts, that end an answer.

        Raises:
          ValueError: if an option is out of range, or a prompt leaves no room for `max_tokens`
            tokens in the policy's context.
        """
        texts, stop_strings = _read_texts(prompts, "prompts"), _read_texts(stop, "stop")
        if "" in stop_strings:
            raise ValueError(f"stop = {stop!r}: must be a text, or texts, that are not empty")
        n, seed = coerce(_plain(n), int, "n"), coerce(_plain(seed), int, "seed")
        if n < 1:
            raise ValueError(f"n = {n}: must be at least 1")
        fields = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        plain_fields = {name: _plain(value) for name, value in fields.items()}
        options = build(Options, plain_fields, "", stop_strings=stop_strings)
        encoded = [self._encode(i, text, options.max_tokens) for i, text in enumerate(texts)]
        keys = fold_keys(seed_key(seed), [(i,) for i in range(len(texts))])
        replies = dict(self.model.ask(encoded, n, options, keys))
        return [reply for _, reply in sorted(replies.items()) if reply is not None]

    def _encode(self, i: int, text: str, max_tokens: int) -> Prompt:
        prompt, room, context = self.model.encode(text), *map(self.model.room, (max_tokens, 0))
        length = len(prompt.ids)
        if room < 1 and length < context:
            raise ValueError(
                f"max_tokens = {max_tokens}: must be at most {context - length}, which "
                f"prompts[{i}] leaves of the policy's context of {context}"
            )
        if length > room:
            raise ValueError(
                f"prompts[{i}]: has {length} tokens, must have at most {max(room, 0)}, which "
                f"max_tokens = {max_tokens} leaves of the policy's context of {context}"
            )
        return prompt


def evaluate(
    policy: Folder,
    benchmarks: str | Sequence[str],
    out: Folder,
    *,
    sizes: SamplerConfig = SIZES,
    **fields: Any,
) -> dict[str, Any]:
    """Evaluate a policy as `python -m spell_jax.evaluate` does; return OUT/summary.json.

    Called again with the same arguments, an interrupted evaluation goes on.

    Args:
      policy: folder of the policy, as in `load`.
      benchmarks: name of a benchmark, or names.
      out: folder of the results: samples.jsonl, summary.json, table.md, plots/.
      sizes: as in `load`.
      fields: fields of EvaluationConfig (data, max_input, limit, ...) and of its EvaluationSampling
        (samples, temperature, top_p, max_tokens, seed).

    Raises:
      The errors of runner.evaluate; ValueError for a field that does not exist.
    """
    sampling_names = {field.name for field in dataclasses.fields(EvaluationSampling)}
    names = {field.name for field in dataclasses.fields(EvaluationConfig)} | sampling_names
    # The fields of an endpoint would leave `policy` without effect.
    names -= {"policy", "benchmarks", "sampling", "endpoint", "model", "tokenizer"}
    if unknown := sorted(fields.keys() - names):
        raise ValueError(f"{unknown[0]}: no such field, must be one of {', '.join(sorted(names))}")
    entry.check_folder("policy", policy)
    entry.check_folder("out", out)
    _set_up()
    if "max_input" in fields:
        fields["max_input"] = tuple(np.atleast_1d(fields["max_input"]).tolist())
    fields = {name: _plain(value) for name, value in fields.items()}
    sampling = {name: fields.pop(name) for name in sampling_names & fields.keys()}
    fields["benchmarks"] = _read_texts(benchmarks, "benchmarks")
    config = build(
        EvaluationConfig,
        fields,
        "",
        policy=os.fspath(policy),
        sampling=build(EvaluationSampling, sampling, ""),
    )
    return runner.evaluate(config, paths.absolute(paths.expand_home(out)), sizes=sizes)


def _read_texts(texts: Any, name: str) -> tuple[str, ...]:
    """Return a text, or several, as a tuple; ValueError if they are none, or no UTF-8."""
    if isinstance(texts, str):
        texts = (texts,)
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise ValueError(f"{name} = {texts!r:.80}: must be a text, or texts")
    texts = tuple(texts)
    for i, text in enumerate(texts):
        check_text(text, f"{name}[{i}]")
    return texts


def _plain(value: Any) -> Any:
    """Return a number of numpy, or a path, as Python's int, float or str."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return value.item() if isinstance(value, np.generic) else value


@functools.cache
def _set_up() -> None:
    """Set up logs and hosts once in the process, and show log lines if nothing else shows them."""
    setup.setup()
    log = logging.getLogger("spell_jax")
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
