"""The sampler: requests in, answers out, in a few compiled shapes.

1. A request is a prompt; all requests of a call ask for the same number of siblings G.
2. Requests go into the smallest prompt bucket that holds them; a longer one is refused (None).
3. A bucket's requests are cut into batches whose prompt tokens and siblings are bounded; each batch
   is prefilled once and decoded in one while_loop.
4. Answers come back in request order, and do not depend on which batch a request fell into.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import numpy as np

from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import decode


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Sampling parameters and compiled shapes.

    Attributes:
      temperature, top_p: see nucleus.draw (paper section 4.1: 0.7 and 0.95).
      prompt_buckets: prompt lengths that are compiled, ascending, in tokens [P]; the last is the
        cap of a prompt.
      token_budget: prompt tokens of one batch.
      max_streams: siblings decoded at once.
      max_tokens: cap of a question or an answer, in tokens [S].
      max_verdict_tokens: cap of a verdict.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    prompt_buckets: tuple[int, ...] = (18_000,)
    token_budget: int = 65_536
    max_streams: int = 512
    max_tokens: int = 4096
    max_verdict_tokens: int = 4096

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"sampler.temperature = {self.temperature}: must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampler.top_p = {self.top_p}: must be in (0, 1]")
        buckets = self.prompt_buckets
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise ValueError(f"sampler.prompt_buckets = {buckets}: must be ascending lengths")
        for field in ("token_budget", "max_streams", "max_tokens", "max_verdict_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"sampler.{field} = {getattr(self, field)}: must be at least 1")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest answer together."""
        return self.prompt_buckets[-1] + max(self.max_tokens, self.max_verdict_tokens)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
      tokens: int32 [S], stop token included.
      log_probs: float32 [S], at the sampling temperature.
      stopped: whether it ended by itself rather than at the cap.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    stopped: bool

    @property
    def content(self) -> list[int]:
        """The tokens without the stop token."""
        return self.tokens[: len(self.tokens) - self.stopped].tolist()


class Sampler:
    """Jitted sampling of one policy architecture on one mesh."""

    def __init__(
        self,
        policy: PolicyConfig,
        config: SamplerConfig,
        stop_ids: Sequence[int],
        mesh: jax.sharding.Mesh,
    ):
        self.policy = policy
        self.config = config
        self.mesh = mesh
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.prefill = jax.jit(functools.partial(decode.prefill, policy))
        self.decode = jax.jit(
            functools.partial(decode.decode, policy),
            static_argnames=("group", "max_tokens", "stop_ids", "temperature", "top_p"),
        )

    def sample(
        self,
        params: transformer.Params,
        prompts: Sequence[Sequence[int]],
        group: int,
        key: jax.Array,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> list[list[Sample] | None]:
        """Answers every prompt `group` times.

        Args:
          params: parameters in the compute dtype.
          prompts: token ids.
          group: G.
          key: PRNG key; request i and sibling g use fold_in(fold_in(key, i), g).
          max_tokens, temperature, top_p: instead of the configured ones.

        Returns:
          For each prompt its G samples, or None where the prompt is over the cap.

        Raises:
          ValueError: an empty prompt; group or max_tokens below 1.
          FloatingPointError: the policy's logits are not numbers.
        """
        c = self.config
        options = {
            "group": group,
            "max_tokens": c.max_tokens if max_tokens is None else max_tokens,
            "stop_ids": self.stop_ids,
            "temperature": c.temperature if temperature is None else temperature,
            "top_p": c.top_p if top_p is None else top_p,
        }
        for name in ("group", "max_tokens"):
            if options[name] < 1:
                raise ValueError(f"{name} = {options[name]}: must be at least 1")
        answers: list[list[Sample] | None] = [None] * len(prompts)
        for bucket, requests in self._by_bucket(prompts).items():
            rows = self.rows(bucket, group)
            for start in range(0, len(requests), rows):
                batch = requests[start : start + rows]
                result = self._run(params, prompts, batch, bucket, rows, key, options)
                for row, request in enumerate(batch):
                    answers[request] = _unpack(result, row)
        return answers

    def rows(self, bucket: int, group: int) -> int:
        """Prompts decoded at once: fixed for a compiled shape, a multiple of the row shards."""
        shards = meshes.row_shards(self.mesh)
        fitting = min(self.config.token_budget // bucket, self.config.max_streams // group)
        return max(1, fitting // shards) * shards

    def _by_bucket(self, prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        requests: dict[int, list[int]] = {bucket: [] for bucket in self.config.prompt_buckets}
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"request {index}: the prompt is empty")
            bucket = next((b for b in requests if len(prompt) <= b), None)
            if bucket is not None:
                requests[bucket].append(index)
        return requests

    def _run(self, params, prompts, batch, bucket: int, rows: int, key, options) -> decode.Answers:
        tokens = np.zeros((rows, bucket), np.int32)
        lengths = np.zeros(rows, np.int32)
        requests = np.zeros(rows, np.int32)
        for row, index in enumerate(batch):
            lengths[row] = len(prompts[index])
            tokens[row, : lengths[row]] = prompts[index]
            requests[row] = index
        place = functools.partial(jax.device_put, device=meshes.by_rows(self.mesh))
        with jax.set_mesh(self.mesh):
            with nn.logical_axis_rules(meshes.RULES):
                prompt, logits = self.prefill(params, place(tokens), place(np.maximum(lengths, 1)))
            with nn.logical_axis_rules(meshes.DECODE_RULES):
                result = self.decode(
                    params, prompt, logits, place(lengths), place(requests), key, **options
                )
        result = jax.device_get(result)
        if not np.isfinite(result.log_probs).all():
            row = int(np.argwhere(~np.isfinite(result.log_probs))[0, 0])
            raise FloatingPointError(f"request {requests[row]}: the policy's logits are not finite")
        return result


def _unpack(result: decode.Answers, row: int) -> list[Sample]:
    samples = []
    for sibling, length in enumerate(result.lengths[row]):
        samples.append(
            Sample(
                tokens=np.array(result.tokens[row, sibling, :length]),
                log_probs=np.array(result.log_probs[row, sibling, :length]),
                stopped=bool(result.stopped[row, sibling]),
            )
        )
    return samples
