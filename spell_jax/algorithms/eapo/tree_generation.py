"""Trees of evidence for a file of questions: spell_jax.generate with --mode=evidence_tree."""

from __future__ import annotations

import os
from typing import Any

from absl import app

from spell_jax.algorithms.eapo import evidence_tree
from spell_jax.evaluation import generation
from spell_jax.evaluation.judge import PolicyJudge
from spell_jax.evaluation.policy_sampler import Policy
from spell_jax.policy.embedder import Embedder
from spell_jax.runtime import distributed, entry
from spell_jax.runtime import mesh as meshes
from spell_jax.selfplay.judge import JUDGE_KEY, Ask, Endpoint, JudgeConfig

EMBED_TOKENS = 8192  # tokens of a batch of texts to embed


def run(given: Any) -> None:
    """Answers the questions of --prompts with trees and writes --out.

    Raises:
      UsageError: if flags do not go together.
      FileNotFoundError, ValueError: if a file or folder is missing or damaged, or a flag is out of
        range.
    """
    policy, prompts, sampling = generation.load(given)
    config = evidence_tree.TreeConfig(given.width, given.evidence_by, given.reasoning_by)
    by = config.evidence_by, config.reasoning_by
    judge = make_judge(given, policy) if "judge" in by else None
    embed = make_embed(given) if "similarity" in by else None
    tree = evidence_tree.Tree(policy, config, prompts, sampling, judge, embed)
    requests = generation.read_requests(given.prompts, prompts, evidence_tree.make_prompt)
    entry.setup_done()
    generation.write(given, tree.answer(*requests, given.seed))


def make_judge(given: Any, policy: Policy) -> Ask:
    """Makes the judge of branches: an endpoint, another policy, or `policy` itself by default.

    Raises:
      UsageError: if only one of --judge_url and --judge_model is set, or an endpoint and a policy.
    """
    if bool(given.judge_url) != bool(given.judge_model) or (given.judge_url and given.judge_policy):
        raise app.UsageError("--judge_url and --judge_model go together, without --judge_policy")
    if not given.judge_url:
        if given.judge_policy:
            policy = Policy(given.judge_policy, given.dtype)
        return PolicyJudge(policy, given.judge_max_tokens)
    key, cap = os.environ.get(JUDGE_KEY), given.judge_max_tokens
    endpoint = Endpoint(JudgeConfig(given.judge_url, given.judge_model, key, max_tokens=cap))
    # One host asks and tells all the others, so that they continue from the same branch.
    return lambda texts: distributed.broadcast(lambda: list(endpoint(texts)))


def make_embed(given: Any) -> evidence_tree.Embed:
    """Makes the embedding function of --embedder, for --evidence_by=similarity.

    Raises:
      UsageError: if the flag is not set.
    """
    if not given.embedder:
        raise app.UsageError("--embedder: must be a Hugging Face folder, for similarity")
    mesh, most = meshes.make_mesh(), given.embed_max_tokens
    embedder = Embedder(given.embedder, mesh, most, EMBED_TOKENS, given.dtype)
    return lambda texts: embedder.embed([embedder.encode(text)[0] for text in texts])
