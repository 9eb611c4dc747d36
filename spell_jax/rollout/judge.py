"""External judge: verdicts in place of the rule or beside it (paper section 4.6, spec 11).

1. A template turns each (question, prediction, reference) into one prompt: a question of yes or no,
   or one of three grades (EAPO). An `Endpoint` or a local policy replies to new prompts.
2. A reply is parsed as 1, 0 or MALFORMED. Without a reply, the verdict is UNANSWERED.
3. Replies may be appended to a file as they arrive: a restarted judge sends only the other prompts.
4. Missing replies are counted and logged, never raised.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import app

from spell_jax.rollout.flags import SIZES
from spell_jax.rollout.text_model import Policy, check_room
from spell_jax.runtime import distributed, fault_injection
from spell_jax.runtime.endpoint import Endpoint, EndpointConfig
from spell_jax.runtime.jsonl import append_records, read_records
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.requests import Options
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.verdicts import (
    JUDGE_TEMPLATES,
    MALFORMED,
    UNANSWERED,
    Parse,
    Template,
    parse_judgement,
)

log = logging.getLogger(__name__)

# Environment variable of a judge's key. Configs are written to disk, keys are not.
JUDGE_KEY = "SPELL_JUDGE_KEY"

Item = tuple[Any, ...]  # fields of a prompt, such as question, prediction and reference
# (question, prediction, reference) triples -> 1 (right), 0 (wrong) or -1 (no verdict).
JudgeFunction = Callable[[Sequence[tuple[str, str, str]]], Sequence[int]]
# Prompts -> (index of a prompt, reply) in order of arrival; a reply of None is a failure.
Ask = Callable[[Sequence[str]], Iterable[tuple[int, str | None]]]
REPLIES = "judge.jsonl"


class Judge:
    """Cached verdicts on answers.

    `counts` are totals since the start: "asked" (prompts sent), "cached" (items answered from the
    cache), "failed" (prompts without a reply), "malformed" (replies without a verdict).
    """

    def __init__(
        self,
        ask: Ask,
        write_prompt: Callable[..., str],
        model: str = "",
        parse: Parse = parse_judgement,
        cache_size: int = 100_000,
        cache_file: str | os.PathLike[str] | None = None,
    ):
        """Load the cache file if there is one.

        `write_prompt` makes the prompt of an Item, `parse` the verdict of a reply. `model`, the
        name of the model that replies, is part of the cache key. The `cache_size` >= 1 most
        recently used verdicts stay in memory. `cache_file` is a JSONL file of all replies, which
        several models may share.
        """
        if cache_size < 1:
            raise ValueError(f"cache_size = {cache_size}: must be at least 1")
        self.counts = {"asked": 0, "cached": 0, "failed": 0, "malformed": 0}
        self.model = model
        self._ask = ask
        self._write_prompt = write_prompt
        self._parse = parse
        self._cache_size = cache_size
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._file = pathlib.Path(cache_file) if cache_file else None
        if self._file and self._file.exists():
            # Replies are stored, not verdicts, so a changed parser reads old files anew.
            verdicts, _ = read_records(
                self._file, lambda line: (str(line["key"]), parse(line["reply"]))
            )
            self._cache.update(verdicts)

    def judge(self, items: Sequence[Item]) -> list[int]:
        """Return one verdict per item, in order; MALFORMED and UNANSWERED are negative."""
        prompts = [self._write_prompt(*item) for item in items]
        keys = [self._key(prompt) for prompt in prompts]
        # Equal items, such as equal answers of a group, are asked once.
        prompt_of = dict(zip(keys, prompts, strict=True))
        verdicts = {key: self._cache[key] for key in prompt_of if key in self._cache}
        unknown = [prompt for key, prompt in prompt_of.items() if key not in verdicts]
        self.counts["cached"] += len(prompts) - len(unknown)
        self.counts["asked"] += len(unknown)
        for index, reply in self._ask(unknown):
            # A local policy replies on all processes, to the prompts of process 0.
            if index < len(unknown):
                verdicts[self._key(unknown[index])] = self._record(unknown[index], reply)
        if failed := [*verdicts.values()].count(UNANSWERED):
            self.counts["failed"] += failed
            log.warning(
                "%s: no reply to %d of %d prompts; the rule's scores stand where there is a rule",
                *(self.model, failed, len(unknown)),
            )
        for key in prompt_of:  # the order of use must not depend on the order of arrival
            if key in self._cache:
                self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return [verdicts[key] for key in keys]

    def _key(self, prompt: str) -> str:
        # A digest, because prompts are long. JSON keeps model and prompt apart.
        content = json.dumps([self.model, prompt]).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def _record(self, prompt: str, reply: str | None) -> int:
        """Return the verdict of a reply and cache it; a missing reply is not cached."""
        if reply is None:
            return UNANSWERED
        verdict, key = self._parse(reply), self._key(prompt)
        self.counts["malformed"] += verdict == MALFORMED
        self._cache[key] = verdict
        # An empty reply was cut off. It is not stored, so a restart asks again, maybe with more
        # tokens.
        if self._file and reply:
            append_records(self._file, [{"key": key, "model": self.model, "reply": reply}])
        fault_injection.point("judged")
        return verdict


@dataclasses.dataclass(frozen=True)
class PolicyJudge:
    """A policy of our own as the judge, with greedy replies of at most `max_tokens` tokens.

    All processes must call a judge together. The prompts of process 0 count, and all processes get
    the replies.
    """

    policy: Policy
    max_tokens: int

    def __post_init__(self):
        check_room(self.policy, self.max_tokens, "judge")

    def __call__(self, prompts: Sequence[str]) -> Iterator[tuple[int, str | None]]:
        """Yield (index of the prompt, reply); None if the prompt does not fit. See Ask."""
        # Only process 0 has rows to judge, but all devices take part in sampling.
        prompts = distributed.broadcast(lambda: list(prompts))
        keys = np.zeros((len(prompts), 2), np.uint32)  # unused: decoding is greedy
        options = Options(temperature=0.0, max_tokens=self.max_tokens)
        yield from self.policy.reply(prompts, keys, options)


def make_judge(
    flag_values: Any, out: pathlib.Path, sizes: SamplerConfig, template: Template | None = None
) -> Judge | None:
    """Build the judge that the flags (flags.py) select, if any.

    `template` replaces --judge_template's. The replies are kept in OUT/judge.jsonl. `sizes` are the
    sampler sizes of a judging policy.
    Raises UsageError if only one of --judge_url and --judge_model is set, or an endpoint and a
    policy; and the errors of EndpointConfig and weights.read_config_and_tokenizer.
    """
    if bool(flag_values.judge_url) != bool(flag_values.judge_model) or (
        flag_values.judge_url and flag_values.judge_policy
    ):
        raise app.UsageError("--judge_url and --judge_model go together, without --judge_policy")
    if not (flag_values.judge_url or flag_values.judge_policy):
        return None
    cache_file = out / REPLIES if jax.process_index() == 0 else None
    if flag_values.judge_policy:
        policy = Policy(flag_values.judge_policy, flag_values.dtype, sizes=sizes)
        ask = PolicyJudge(policy, flag_values.judge_max_tokens)
        # The cache of replies is keyed by this name: other weights must not reuse replies.
        model = f"{policy.folder.name} {policy.fingerprint()}"
    else:
        model = flag_values.judge_model
        ask = Endpoint(
            EndpointConfig(
                flag_values.judge_url,
                model,
                os.environ.get(JUDGE_KEY),
                key_name=JUDGE_KEY,
                max_tokens=flag_values.judge_max_tokens,
                # A reasoning judge may write thousands of tokens.
                timeout_s=600.0,
                # Two minutes of back-off, enough for a server restart.
                attempts=8,
                workers=flag_values.judge_workers,
                requests_per_s=flag_values.judge_rate,
            )
        )
    write, parse = template or JUDGE_TEMPLATES[flag_values.judge_template]
    write_prompt = functools.partial(write, prompt_sets.load("full"))
    return Judge(ask, write_prompt, model, parse, cache_file=cache_file)


def read_sizes(flag_values: Any) -> SamplerConfig:
    return SamplerConfig(**{name: getattr(flag_values, name) for name in SIZES})
