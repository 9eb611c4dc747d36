"""A policy on disk, asked by the project's own sampler: many prompts, each answered G times."""

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
from spell_jax.sampler.engine import Sampler, SamplerConfig
from spell_jax.sampler.requests import Options, Request, Sample

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the sampler, as far as a machine's memory sets them; see SamplerConfig.

    Attributes:
      kv_cache_tokens: of the pool of each part of the mesh, besides the longest prompt and answer.
      slots: answers drawn at once, over all devices.
      prefill_tokens: of prompts that are read in one call.
      page_size: tokens of a page.
    """

    kv_cache_tokens: int = 65_536
    slots: int = 512
    prefill_tokens: int = 8192
    page_size: int = 128


class Policy:
    """A policy's folder. Its weights are read when it is first asked, and held until `release`."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        dtype: str = "float32",
        thinking: bool | None = None,
        sizes: Sizes | None = None,
    ):
        """Raises FileNotFoundError or ValueError: see weights.identify."""
        self.folder = pathlib.Path(folder)
        self.config, self.tokenizer = weights.identify(folder, thinking)
        self.sizes = sizes or Sizes()
        self._dtype = dtype
        self._params: transformer.Params | None = None

    def fingerprint(self) -> str:
        """Tells its weights from others at the same place; read by process 0."""
        return distributed.broadcast(lambda: hashes.fingerprint(epath.Path(self.folder)))

    def release(self) -> None:
        """Lets go of the weights."""
        self._params = None

    def draw(
        self,
        prompts: Sequence[np.ndarray],
        group: int,
        keys: np.ndarray,
        options: Sequence[Options],
        wanted: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, list[Sample]]]:
        """(place, G samples) of prompts, as they are finished.

        Args:
          prompts: token ids int32 [P] of each.
          group: G.
          keys: uint32 [prompts, 2]; sibling and token are folded into them.
          options: of each.
          wanted: places of those to answer; all, if not given. The compiled shapes are those of
            all prompts whichever are wanted, so that answers do not depend on it.

        Raises:
          ValueError: the longest prompt and answer exceed the policy's context.
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
        session = sampler.begin(self._params)
        tickets = {
            session.submit(
                Request(cast(Any, prompts[place]), group, keys[place], options[place])
            ): place
            for place in places
        }
        for ticket, samples in session.results():
            yield tickets[ticket], samples

    def reply(
        self, prompts: Sequence[str], keys: np.ndarray, options: Options
    ) -> Iterator[tuple[int, str | None]]:
        """(place, reply) of prompts as texts, one to each, as they come; then releases the weights.

        A prompt that does not fit into the context has None. All processes call it with the same.

        Args:
          keys: uint32 [prompts, 2].
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
    """Raises ValueError where replies of so many tokens leave no room for a prompt; `name` is what
    the policy is asked as."""
    positions = policy.config.max_positions
    if not 0 < max_tokens < positions:
        raise ValueError(
            f"{name}_max_tokens = {max_tokens}: must leave room for a prompt in the "
            f"{name}'s max_position_embeddings = {positions}"
        )


@dataclasses.dataclass(frozen=True)
class PolicyJudge:
    """A policy of our own in the place of a judge's endpoint: greedy replies.

    All processes call it together; the prompts are those of process 0, and all get its replies.
    """

    policy: Policy
    max_tokens: int

    def __post_init__(self):
        check_room(self.policy, self.max_tokens, "judge")

    def __call__(self, prompts: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """See judge.Ask; a prompt that does not fit into the context has no reply."""
        prompts = distributed.broadcast(lambda: list(prompts))
        keys = np.zeros((len(prompts), 2), np.uint32)  # greedy: nothing is drawn
        options = Options(temperature=0.0, max_tokens=self.max_tokens)
        for place, reply in self.policy.reply(prompts, keys, options):
            yield prompts[place], reply
