"""Log-likelihoods of given answers by a policy, and whether greedy decoding gives them.

1. Answers to one prompt are a group. Groups are sorted by length into classes, each with one
   compiled shape, and packed as in training (learner/packing.py): an answer is read after its
   prompt, and prompts that begin alike, as with the examples of a task, are read once.
2. The forward pass is the same as in training. The head computes logits of a few answer tokens at a
   time, so that the logits of all tokens never exist.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from spell_jax.attention import attend
from spell_jax.data.samples import Sample
from spell_jax.learner import packing
from spell_jax.learner.aggregation import equal_weights
from spell_jax.learner.packing import Bucket, MicroBatch, TrainGroup
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import lm_head

log = logging.getLogger(__name__)

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a prompt and of an answer
# Tokens of a row: few shapes to compile. The longest class has its own length.
_LENGTHS = (512, 2048, 8192, 32_768)
# Groups packed at once: the time to pack grows with their square.
_GROUPS = 1024
# Most float32 logits of a slice of the head: 256 MiB. A vocabulary of 150,000 leaves 447 tokens.
_LOGITS = 2**26


def score(model: TextModel, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    """Return each answer's summed logprob at temperature 1, and whether all tokens are likeliest.

    All processes must call this with the same arguments. Prompts and answers have at least one
    token; together they may have one token more than the policy's context, because the last token
    predicts nothing. Raises FloatingPointError if the policy's logits are not finite.
    """
    mesh = meshes.make_mesh()
    totals, greedy = np.zeros(len(pairs)), np.ones(len(pairs), bool)
    params, run = model.load(mesh), compile_scores(model.config, mesh)
    sharding, scored_count = meshes.by_rows_and_time(mesh), 0
    for batches, indices in _batches(pairs, model.sizes.prefill_tokens, meshes.row_shards(mesh)):
        with jax.set_mesh(mesh), nn.logical_axis_rules(meshes.RULES):
            placed = (
                meshes.device_put(batch, jax.tree.map(lambda _: sharding, batch))
                for batch in batches
            )
            results = jax.device_get([run(params, batch, np.float32(1)) for batch in placed])
        for batch, scores in zip(batches, results, strict=True):
            logprobs, likeliest = scores.logprob, scores.likeliest
            real = batch.answer_id >= 0
            scored = indices[batch.answer_id[real]]
            # add.at, because an answer has many tokens: indices repeat. Sums are float64.
            np.add.at(totals, scored, logprobs[real])
            np.logical_and.at(greedy, scored, likeliest[real])
            scored_count += len(np.unique(scored))
        log.info("log-likelihoods: %d of %d", scored_count, len(pairs))
    # A NaN would lose every comparison, and the accuracy would look valid.
    if not np.isfinite(totals).all():
        raise FloatingPointError("log-likelihoods: the policy's logits are not finite")
    return list(zip(totals.tolist(), greedy.tolist(), strict=True))


def length_classes(longest: int) -> list[int]:
    """Return the row lengths of all classes, in ascending order, for up to `longest` tokens."""
    # Whole blocks of 128 tokens, as the attention kernels need.
    last = -(-longest // 128) * 128
    return [length for length in _LENGTHS if length < last] + [last]


def _batches(
    pairs: Sequence[Pair], token_budget: int, row_multiple: int
) -> Iterator[tuple[list[MicroBatch], np.ndarray]]:
    """Yield (micro-batches, indices of the pairs that their answers are), by class of length."""
    # The options of a multiple-choice question share its prompt, which is then read once.
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, (prompt, _) in enumerate(pairs):
        by_prompt.setdefault(prompt, []).append(index)
    longest = max((len(prompt) + len(answer) for prompt, answer in pairs), default=0)
    lengths = length_classes(longest)
    last = lengths[-1]
    classes: dict[int, list[TrainGroup]] = {length: [] for length in lengths}
    # Sorted, so that prompts with the same examples are neighbors and are packed as one tree.
    for prompt, indices in sorted(by_prompt.items()):
        samples = [Sample(np.array(pairs[i][1], np.int32)) for i in indices]
        group = TrainGroup(prompt, samples, [1.0] * len(samples), "continuations")
        classes[next((n for n in lengths if group.tokens <= n), last)].append(group)
    for length, groups in classes.items():
        # The head reads as many hidden states as a row has places for answer tokens.
        short = all(group.answer_tokens <= length // 4 for group in groups)
        bucket = Bucket(length, length // 4 if short else length)
        for start in range(0, len(groups), _GROUPS):
            packed = groups[start : start + _GROUPS]
            weights = equal_weights(packed)
            parts, _ = packing.split_groups(packed, bucket)
            needed_tokens = -(-sum(part.group.tokens for part in parts) // length) * length
            budget = min(token_budget, needed_tokens)
            indices = [i for group in packed for i in by_prompt[tuple(group.prompt)]]
            batches = packing.pack(parts, weights, [bucket], budget, row_multiple)
            yield batches, np.array(indices)


@flax.struct.dataclass
class TokenScores:
    """Scores of answer tokens by a policy at a temperature.

    Attributes:
      logprob: logprobs of the tokens, float32 [B, A].
      likeliest: whether each token is the likeliest one, bool [B, A].
      top_ids: the K likeliest tokens of each place in descending order, int32 [B, A, K].
      top_logprobs: logprobs of these tokens, float32 [B, A, K].
    """

    logprob: jax.Array
    likeliest: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@functools.cache
def compile_scores(
    config: PolicyConfig, mesh: jax.sharding.Mesh, alternatives: int = 0
) -> jax.stages.Wrapped:
    """Return the jitted (params, MicroBatch, temperature above 0) -> TokenScores.

    `alternatives` is the number K of likeliest tokens.
    """
    score_tokens = functools.partial(_score, config, alternatives)
    return jax.jit(score_tokens, out_shardings=meshes.replicated(mesh))


def _score(
    config: PolicyConfig,
    alternatives: int,
    params: transformer.Params,
    batch: MicroBatch,
    temperature: jax.Array,
) -> TokenScores:
    """Score the answer tokens of a batch."""
    hidden, *_ = transformer.hidden_states(
        config,
        params,
        batch.tokens,
        batch.positions,
        attend.packed(config.attention, config.ring),
        context={"index": batch.index, "last_query": batch.last_query},
    )
    rows, answers = batch.target.shape

    def one_slice(slots):
        source, target = slots
        picked = jnp.take_along_axis(hidden, source[..., None], axis=1)
        logits = lm_head.logits(config, params, picked.reshape(-1, picked.shape[-1])) / temperature
        target, log_sum = target.reshape(-1), jax.nn.logsumexp(logits, axis=-1)
        target_logits = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        likeliest = jnp.argmax(logits, axis=-1) == target
        top_logits, top_ids = jax.lax.top_k(logits, alternatives)
        scores = TokenScores(
            target_logits - log_sum, likeliest, top_ids, top_logits - log_sum[:, None]
        )
        return jax.tree.map(lambda x: x.reshape(*source.shape, *x.shape[1:]), scores)

    # The largest divisor of the answer tokens within the limit: slices of lax.map have equal sizes.
    max_size = max(1, _LOGITS // (rows * config.vocab_size))
    size = next(size for size in range(min(max_size, answers), 0, -1) if answers % size == 0)
    slots = (batch.source, batch.target)
    slices = jax.tree.map(lambda x: x.reshape(rows, -1, size).swapaxes(0, 1), slots)
    scored_slices = jax.lax.map(one_slice, slices)
    return jax.tree.map(
        lambda x: x.swapaxes(0, 1).reshape(rows, answers, *x.shape[3:]), scored_slices
    )
