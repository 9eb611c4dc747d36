"""A policy of a few thousand weights, and random groups for it, for tests of every room."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence

import jax
import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.learner import packing
from spell_jax.learner.aggregation import weigh
from spell_jax.learner.packing import TrainGroup
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.sampler import sampling as sampling_ops


def _compile_quickly() -> None:
    """Lower XLA's optimization level.

    Tests spend their time in the compiler: this takes a third of it. It works only in this process,
    not in the programs that tests start, and only if no test has used a device before. An unknown
    flag would end the process.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version__.startswith("0.10."):
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"
        jax.devices()  # reads the flags
        os.environ["XLA_FLAGS"] = flags


_compile_quickly()

POLICY = PolicyConfig(
    vocab_size=64,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=8,
    feed_forward=48,
    max_positions=256,
    qkv_bias=True,
)


@functools.cache
def weights(policy: PolicyConfig = POLICY, seed: int = 0) -> transformer.Params:
    """Make random float32 numpy weights: biases and norms matter, and no logit is near 0."""
    shapes, _ = transformer.abstract_params(policy)
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    arrays = [(0.2 * rng.normal(size=leaf.shape)).astype(np.float32) for leaf in leaves]
    params = jax.tree.unflatten(tree, arrays)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + np.float32("scale" in jax.tree_util.keystr(path)), params
    )


def group(
    prompt: packing.Tokens,
    answers: Sequence[packing.Tokens],
    advantages: Sequence[float],
    name: str = "responder",
    logprobs: Sequence[packing.Array] | None = None,
    **fields,
) -> TrainGroup:
    """Make a group of answers [S_i], with the sampler's logprobs [S_i] or none."""
    samples = [Sample(np.asarray(answer, np.int32)) for answer in answers]
    group = TrainGroup(prompt, samples, advantages, name, **fields)
    return group if logprobs is None else group.with_logprobs(list(map(np.asarray, logprobs)))


def change_samples(group: TrainGroup, **rows: Sequence) -> TrainGroup:
    """Return the group with other fields of its samples, one value per sample."""
    samples = [
        dataclasses.replace(sample, **{name: values[i] for name, values in rows.items()})
        for i, sample in enumerate(group.samples)
    ]
    return dataclasses.replace(group, samples=samples)


def answers(group: TrainGroup) -> list[list[int]]:
    """Return the token ids of the group's answers."""
    return [np.asarray(sample.tokens).tolist() for sample in group.samples]


def logprobs(group: TrainGroup) -> list[packing.Array]:
    """Return the logprobs of the group's answers, each float32 [S_i] or None."""
    return [sample.logprobs for sample in group.samples]


def pack(
    groups: Sequence[TrainGroup],
    bucket: packing.Bucket,
    aggregation: str = "token_mean",
    sequence_tokens: int = 0,
    **options,
) -> list[packing.MicroBatch]:
    """Pack groups into micro-batches of one row of this shape."""
    weights = weigh(groups, aggregation, sequence_tokens)
    parts, _ = packing.split_groups(groups, bucket)
    return packing.pack(parts, weights, [bucket], bucket.length, **options)


def groups(
    count: int, seed: int = 0, prompt: int = 12, answer: int = 6, siblings: int = 4
) -> list[TrainGroup]:
    """Make random groups with limited numbers of prompt tokens, answer tokens and siblings."""
    rng = np.random.default_rng(seed)

    def ids(longest: int) -> np.ndarray:
        return rng.integers(3, POLICY.vocab_size, size=rng.integers(1, longest + 1))

    train_groups = []
    for index in range(count):
        answers = [ids(answer) for _ in range(rng.integers(1, siblings + 1))]
        train_groups.append(
            group(
                prompt=ids(prompt),
                answers=answers,
                advantages=list(rng.normal(size=len(answers))),
                name=("responder", "verifier")[index % 2],
                logprobs=[-rng.exponential(2.0, len(a)).astype(np.float32) for a in answers],
            )
        )
    return train_groups


def sampling(
    rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> sampling_ops.Sampling:
    """Make equal sampling options for all rows."""
    values = np.array([temperature, top_p, min_p], np.float32)
    temperatures, top_ps, min_ps = np.repeat(values[:, None], rows, axis=1)
    return sampling_ops.Sampling(temperatures, np.full(rows, top_k, np.int32), top_ps, min_ps)
