"""A policy on disk with the project's own sampler: many prompts, G answers to each."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from etils import epath

from spell_jax.policy import transformer, weights
from spell_jax.runtime import distributed, hashes
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, Sample, SampleRequest

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sampler sizes that depend on the machine's memory; see SamplerConfig.

    Attributes:
      kv_cache_tokens: tokens in the KV cache pool of each row shard of the mesh, in addition to the
        longest prompt and answer.
      slots: maximum number of answers decoded at once, over all devices.
      prefill_tokens: maximum number of prompt tokens in one prefill call.
      page_size: tokens per page of the KV cache.
    """

    kv_cache_tokens: int = 65_536
    slots: int = 512
    prefill_tokens: int = 8192
    page_size: int = 128


class Policy:
    """A policy folder. The weights are loaded at the first use and kept until `release`."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        dtype: str = "float32",
        thinking: bool | None = None,
        sizes: Sizes | None = None,
    ):
        """Read the architecture and the tokenizer, but not the weights.

        Args:
          folder: Hugging Face folder of the policy.
          dtype: dtype of the weights.
          thinking: thinking mode of the chat template; see `tokenizer.load`.
          sizes: sampler sizes; None uses the defaults.

        Raises:
          FileNotFoundError, ValueError: see weights.identify.
        """
        self.folder = pathlib.Path(folder)
        self.config, self.tokenizer = weights.identify(folder, thinking)
        self.sizes = sizes or Sizes()
        self._dtype = dtype
        self._params: transformer.Params | None = None

    def fingerprint(self) -> str:
        """Hash that identifies the weights in the folder; process 0 reads and broadcasts it."""
        return distributed.broadcast(lambda: hashes.fingerprint(epath.Path(self.folder)))

    def release(self) -> None:
        """Free the weights."""
        self._params = None

    def draw(
        self,
        prompts: Sequence[np.ndarray],
        group: int,
        keys: np.ndarray,
        options: Sequence[Options],
        wanted: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, list[Sample]]]:
        """Sample G answers to each prompt.

        Args:
          prompts: token ids of each prompt, int32 [P].
          group: samples per prompt, G.
          keys: key data of each prompt, uint32 [prompts, 2]; the sampler folds in the sample and
            token indices.
          options: sampling options of each prompt.
          wanted: indices of the prompts to answer; None answers all. The compiled shapes follow
            from all prompts, so that an answer does not depend on `wanted`.

        Yields:
          (index of the prompt, its G samples), in order of completion.

        Raises:
          ValueError: if the longest prompt and answer exceed the policy's context.
        """
        places = range(len(prompts)) if wanted is None else wanted
        if not places:
            return
        mesh, sizes = meshes.make_mesh(), self.sizes
        shards, lengths = meshes.row_shards(mesh), [len(prompt) for prompt in prompts]
        longest, cap = max(lengths), max(one.max_tokens for one in options)
        self.config.check_length(longest + cap)
        room = longest + cap + 2 * sizes.page_size
        config = SamplerConfig(
            max_tokens=cap,
            max_verdict_tokens=1,
            max_prompt=longest,
            page_size=sizes.page_size,
            kv_cache_tokens=shards * (sizes.kv_cache_tokens + room),
            slots=min(sizes.slots, group * len(prompts)),
            samples_per_prompt_batch=min(8, group),
            prefill_tokens=min(sizes.prefill_tokens, shards * sum(lengths)),
        )
        stream = self.tokenizer.stream
        sampler = Sampler(self.config, config, self.tokenizer.stop_ids, mesh, stream)
        if self._params is None:
            _, self._params = weights.load(self.folder, mesh, self._dtype)
        session = sampler.start_session(self._params)
        tickets = {
            session.submit(
                SampleRequest(cast(Any, prompts[place]), group, keys[place], options[place])
            ): place
            for place in places
        }
        for ticket, samples in session.results():
            yield tickets[ticket], samples

    def reply(
        self, prompts: Sequence[str], keys: np.ndarray, options: Options
    ) -> Iterator[tuple[int, str | None]]:
        """Sample one reply to each prompt, then release the weights.

        All processes must call this with the same arguments.

        Args:
          prompts: user turns as texts.
          keys: key data of each prompt, uint32 [prompts, 2].
          options: sampling options of all prompts.

        Yields:
          (index of the prompt, reply text), in order of completion. The reply is None if the prompt
          does not fit into the context.
        """
        room = self.config.max_positions - options.max_tokens
        ids = [np.array(self.tokenizer.chat(prompt), np.int32) for prompt in prompts]
        fitting = [place for place, one in enumerate(ids) if len(one) <= room]
        for place in sorted(set(range(len(ids))) - set(fitting)):
            yield place, None
        asked = [ids[place] for place in fitting]
        for at, (sample,) in self.draw(asked, 1, keys[fitting], [options] * len(asked)):
            yield fitting[at], self.tokenizer.decode(sample.content)
        self.release()


def check_room(policy: Policy, max_tokens: int, name: str) -> None:
    """Check that replies of `max_tokens` leave room for a prompt in the policy's context.

    Args:
      policy: policy that replies.
      max_tokens: maximum reply length in tokens.
      name: role of the policy, for the error message.

    Raises:
      ValueError: if they leave no room.
    """
    positions = policy.config.max_positions
    if not 0 < max_tokens < positions:
        raise ValueError(
            f"{name}_max_tokens = {max_tokens}: must leave room for a prompt in the "
            f"{name}'s max_position_embeddings = {positions}"
        )


@dataclasses.dataclass(frozen=True)
class PolicyJudge:
    """A policy of our own as the judge, with greedy replies.

    All processes must call it together. The prompts of process 0 count, and every process gets the
    replies.

    Attributes:
      policy: policy that replies.
      max_tokens: maximum reply length in tokens.
    """

    policy: Policy
    max_tokens: int

    def __post_init__(self):
        check_room(self.policy, self.max_tokens, "judge")

    def __call__(self, prompts: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """Yield (prompt, reply); the reply is None if the prompt does not fit. See judge.Ask."""
        prompts = distributed.broadcast(lambda: list(prompts))
        keys = np.zeros((len(prompts), 2), np.uint32)  # unused: decoding is greedy
        options = Options(temperature=0.0, max_tokens=self.max_tokens)
        for place, reply in self.policy.reply(prompts, keys, options):
            yield prompts[place], reply
