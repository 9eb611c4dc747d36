"""The judge that the command line selects: a chat endpoint or a policy of our own."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
from absl import app, flags

from spell_jax.evaluation.policy_sampler import Policy, PolicyJudge, Sizes
from spell_jax.policy import weights
from spell_jax.selfplay import prompts as prompt_sets
from spell_jax.selfplay.judge import JUDGE_KEY, Endpoint, Judge, JudgeConfig

REPLIES = "judge.jsonl"


def make_judge(given: Any, out: pathlib.Path, sizes: Sizes) -> Judge | None:
    """Build the judge that the flags select; its replies are kept in OUT/judge.jsonl.

    Args:
      given: parsed flags; see `define_flags`.
      out: output folder.
      sizes: sampler sizes, used if the judge is a policy.

    Returns:
      The judge, or None if the flags select none.

    Raises:
      UsageError: if only one of --judge_url and --judge_model is set, or an endpoint and a policy.
      FileNotFoundError, ValueError: see JudgeConfig and weights.identify.
    """
    if bool(given.judge_url) != bool(given.judge_model) or (given.judge_url and given.judge_policy):
        raise app.UsageError("--judge_url and --judge_model go together, without --judge_policy")
    if not (given.judge_url or given.judge_policy):
        return None
    # Only process 0 writes the file of replies.
    kept = out / REPLIES if jax.process_index() == 0 else None
    if given.judge_policy:
        policy = Policy(given.judge_policy, given.dtype, sizes=sizes)
        ask = PolicyJudge(policy, given.judge_max_tokens)
        model = f"{policy.folder.name} {policy.fingerprint()}"
    else:
        model = given.judge_model
        ask = Endpoint(
            JudgeConfig(
                given.judge_url,
                model,
                os.environ.get(JUDGE_KEY),
                max_tokens=given.judge_max_tokens,
                timeout_s=600.0,  # a reasoning judge may write thousands of tokens
                attempts=8,  # two minutes of back-off, enough for a server restart
                workers=given.judge_workers,
                requests_per_s=given.judge_rate,
            )
        )
    return Judge(ask, prompt_sets.load("full").judge, model, cache_file=kept)


def read_sizes(given: Any) -> Sizes:
    """Sampler sizes from the flags."""
    return Sizes(given.kv_cache_tokens, given.slots, given.prefill_tokens)


def define_flags() -> None:
    """Define the flags of the judge and of the policies that are sampled."""
    flags.DEFINE_string("judge_url", "", "A chat-completions address.")
    flags.DEFINE_string("judge_model", "", "The model's name there.")
    flags.DEFINE_string("judge_policy", "", "A policy's folder, for the judge.")
    flags.DEFINE_integer("judge_max_tokens", 8192, "Cap of a judge's reply.")
    flags.DEFINE_integer("judge_workers", 16, "Requests to the judge under way at once.")
    flags.DEFINE_float("judge_rate", 0.0, "Requests to the judge a second; 0: any.")
    flags.DEFINE_enum("dtype", "float32", list(weights.DTYPES), "Of policies' weights.")
    flags.DEFINE_integer(
        "kv_cache_tokens", Sizes.kv_cache_tokens, "Of the pool, a part of the mesh."
    )
    flags.DEFINE_integer("slots", Sizes.slots, "Answers sampled at once.")
    flags.DEFINE_integer("prefill_tokens", Sizes.prefill_tokens, "Of prompts read at once.")
