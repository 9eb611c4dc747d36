"""The judge that the command line selects: a chat endpoint or a policy of our own."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import app

from spell_jax.evaluation.policy_flags import SIZES
from spell_jax.evaluation.policy_sampler import Policy, check_room
from spell_jax.runtime import distributed
from spell_jax.runtime.endpoint import Endpoint, EndpointConfig
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.requests import Options
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.judge import JUDGE_KEY, JUDGE_TEMPLATES, Judge, Template

REPLIES = "judge.jsonl"


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
        """Yield (index of the prompt, reply); None if the prompt does not fit. See judge.Ask."""
        # Only process 0 has rows to judge, but all devices take part in sampling.
        prompts = distributed.broadcast(lambda: list(prompts))
        keys = np.zeros((len(prompts), 2), np.uint32)  # unused: decoding is greedy
        options = Options(temperature=0.0, max_tokens=self.max_tokens)
        yield from self.policy.reply(prompts, keys, options)


def make_judge(
    flag_values: Any, out: pathlib.Path, sizes: SamplerConfig, template: Template | None = None
) -> Judge | None:
    """Build the judge that the flags (policy_flags.py) select, if any.

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
