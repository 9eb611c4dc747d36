"""Logprobs of sequences that are already there, with the likeliest tokens beside each token.

A sequence is read by one forward pass of the program that scores lm-evaluation-harness's answers
(evaluation/loglikelihood.py). There is one compiled shape for each class of lengths.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import linen as nn

from spell_jax.data.samples import Sample
from spell_jax.evaluation import loglikelihood
from spell_jax.learner import packing
from spell_jax.learner.aggregation import equal_weights
from spell_jax.learner.packing import Bucket, MicroBatch, TrainGroup
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.serving.protocol import MOST_ALTERNATIVES

# A group that fits every row, by which programs are compiled.
_SHORTEST = TrainGroup([0], [Sample(np.zeros(1, np.int32))], [1.0], "answers")


class AnswerScores(NamedTuple):
    """Scores of the S tokens of an answer.

    Attributes:
      logprobs: logprobs of the tokens, float32 [S].
      top_ids: the K likeliest tokens of each place in descending order, int32 [S, K].
      top_logprobs: logprobs of these tokens, float32 [S, K].
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class Scorer:
    """Scores of sequences by one policy on one mesh."""

    def __init__(
        self,
        config: PolicyConfig,
        params: transformer.Params,
        mesh: jax.sharding.Mesh,
        longest: int,
    ):
        """Prepare for sequences of up to `longest` tokens; nothing is compiled yet."""
        self._params, self._mesh = params, mesh
        alternatives = min(MOST_ALTERNATIVES, config.vocab_size)
        self._run = loglikelihood.compile_scores(config, mesh, alternatives)
        self._lengths = loglikelihood.length_classes(longest)
        self._compiled: dict[int, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def prepare(self, shortest: int, longest: int) -> None:
        """Compile the programs for sequences of as many tokens, unless an earlier call did.

        Any thread may call this, so that a thread which serves other requests need not.
        """
        first, last = self._length_of(shortest), self._length_of(longest)
        with self._lock:
            for length in self._lengths:
                if length in self._compiled or not first <= length <= last:
                    continue
                (batch,) = self._pack(_SHORTEST, length)
                with jax.set_mesh(self._mesh), nn.logical_axis_rules(meshes.RULES):
                    lowered = self._run.lower(self._params, self._place(batch), np.float32(1))
                    self._compiled[length] = lowered.compile()

    def score(
        self, prompt: Sequence[int], answers: Sequence[np.ndarray], temperature: float
    ) -> list[AnswerScores]:
        """Score the tokens of answers to one prompt at a temperature above 0.

        Prompt and answers, each int32 [S], have at least one token. Raises FloatingPointError if a
        logprob is not finite.
        """
        samples = [Sample(np.asarray(answer, np.int32)) for answer in answers]
        group = TrainGroup(prompt, samples, [1.0] * len(samples), "answers")
        longest = len(prompt) + max(len(answer) for answer in answers)
        length = self._length_of(longest)
        if length not in self._compiled:  # without the lock, which a compilation may hold for long
            self.prepare(longest, longest)
        results: dict[int, AnswerScores] = {}
        for batch in self._pack(group, length):
            scores = jax.device_get(
                self._compiled[length](self._params, self._place(batch), np.float32(temperature))
            )
            for number in np.unique(batch.answer_id[batch.answer_id >= 0]).tolist():
                # Slots of an answer are in the order of its tokens.
                at = batch.answer_id == number
                results[number] = AnswerScores(
                    scores.logprob[at], scores.top_ids[at], scores.top_logprobs[at]
                )
        if not all(np.isfinite(scores.logprobs).all() for scores in results.values()):
            raise FloatingPointError("the policy's logits are not finite")
        return [results[number] for number in range(len(answers))]

    def _length_of(self, tokens: int) -> int:
        return next(length for length in self._lengths if tokens <= length)

    def _pack(self, group: TrainGroup, length: int) -> list[MicroBatch]:
        """Pack a group into batches of one row for each row shard."""
        bucket, rows = Bucket(length, length), meshes.row_shards(self._mesh)
        parts, _ = packing.split_groups([group], bucket)
        return packing.pack(parts, equal_weights([group]), [bucket], rows * length, rows)

    def _place(self, batch: MicroBatch) -> MicroBatch:
        sharding = meshes.by_rows_and_time(self._mesh)
        return meshes.device_put(batch, jax.tree.map(lambda _: sharding, batch))
