"""A policy folder with the project's own sampler: many prompts, G answers to each."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from etils import epath

from spell_jax.data.samples import Sample
from spell_jax.policy import transformer, weights
from spell_jax.policy.model import find_folder
from spell_jax.rollout import flags as policy_flags
from spell_jax.runtime import distributed, hashes
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, SampleRequest

log = logging.getLogger(__name__)

# Sizes that depend on the machine's memory. Here kv_cache_tokens counts the tokens per row shard of
# the mesh, in addition to the longest prompt and answer. All lengths follow from the prompts.
SIZES = SamplerConfig(**policy_flags.SIZES)


class Policy:
    """A policy folder. The weights are loaded at the first use and kept until `release`."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        dtype: str = "float32",
        thinking: bool | None = None,
        sizes: SamplerConfig = SIZES,
        rope_scaling: str = "",
        rope_factor: float = 1.0,
    ):
        """Read the architecture, the tokenizer and the headers of the weights, but no weights.

        `folder` is as in model.find_folder, `thinking` as in tokenizer.load, `rope_scaling` and
        `rope_factor` as in model.ModelConfig. Raises the errors of these functions, of
        weights.check_headers and of weights.read_config_and_tokenizer.
        """
        self.folder = find_folder(str(folder), "policy")
        self.config, self.tokenizer = weights.read_config_and_tokenizer(self.folder, thinking)
        weights.check_headers(
            self.folder
        )  # a damaged file is a mistake of the user, told before the work
        if rope_scaling:
            self.config = self.config.with_rope_scaling(rope_scaling, rope_factor)
        self.sizes = sizes
        self._dtype = dtype
        self._params: transformer.Params | None = None

    def fingerprint(self) -> str:
        """Return a hash that identifies the folder's weights, equal on all processes."""
        # Only process 0 reads: the weights may lie on a shared disk, and all hosts would read them.
        return distributed.broadcast(lambda: hashes.fingerprint(epath.Path(self.folder)))

    def load(self, mesh: jax.sharding.Mesh) -> transformer.Params:
        """Return the weights on the mesh; the first call loads them."""
        if self._params is None:
            _, self._params = weights.load(self.folder, mesh, self._dtype)
        return self._params

    def release(self) -> None:
        self._params = None

    def sample(
        self,
        prompts: Sequence[np.ndarray],
        group: int,
        keys: np.ndarray,
        options: Sequence[Options],
        prompt_indices: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, list[Sample]]]:
        """Sample G = `group` answers to each prompt, token ids int32 [P].

        `keys` is the key data of each prompt, uint32 [prompts, 2]; the sampler folds in the sample
        and token indices. Only the prompts at `prompt_indices` are answered; None answers all.
        The compiled shapes follow from all prompts, so that an answer does not depend on
        `prompt_indices`. Yields (index of the prompt, its G samples), in order of completion.
        Raises ValueError if the longest prompt and answer exceed the policy's context.
        """
        indices = range(len(prompts)) if prompt_indices is None else prompt_indices
        if not indices:
            return
        mesh, sizes = meshes.make_mesh(), self.sizes
        shards, lengths = meshes.row_shards(mesh), [len(prompt) for prompt in prompts]
        longest, cap = max(lengths), max(option.max_tokens for option in options)
        self.config.check_length(longest + cap)
        # At least one prompt and one answer fit, whatever --kv_cache_tokens is. Prompt and answer
        # may each end inside a page, hence two more pages.
        room = longest + cap + 2 * sizes.page_size
        config = dataclasses.replace(
            sizes,
            max_tokens=cap,
            # No verdicts are sampled; 1 is the smallest value.
            max_verdict_tokens=1,
            max_prompt=longest,
            kv_cache_tokens=shards * (sizes.kv_cache_tokens + room),
            # A small set compiles small programs: unused slots would be decoded as well.
            slots=min(sizes.slots, group * len(prompts)),
            samples_per_prompt_batch=min(sizes.samples_per_prompt_batch, group),
            prefill_tokens=min(sizes.prefill_tokens, shards * sum(lengths)),
        )
        stream = self.tokenizer.stream
        sampler = Sampler(self.config, config, self.tokenizer.stop_ids, mesh, stream)
        session = sampler.start_session(self.load(mesh))
        tickets = {
            session.submit(SampleRequest(cast(Any, prompts[i]), group, keys[i], options[i])): i
            for i in indices
        }
        for ticket, samples in session.results():
            yield tickets[ticket], samples

    def reply(
        self, prompts: Sequence[str], keys: np.ndarray, options: Options
    ) -> Iterator[tuple[int, str | None]]:
        """Sample one reply to each user turn, then release the weights.

        All processes must call this method with equal arguments; `keys` are as in `sample`. Yields
        (index of the prompt, reply text): first None for every prompt that does not fit into the
        context, then the replies in order of completion. If the layout opened a thought, the reply
        begins with the start of this thought. A reply that `max_tokens` cut off is "".
        """
        ids, fitting = self.fit(prompts, options.max_tokens)
        cut = 0
        for place in sorted(set(range(len(prompts))) - set(fitting)):
            yield place, None
        for at, (sample,) in self.sample(ids, 1, keys[fitting], [options] * len(ids)):
            place = fitting[at]
            thought = self.tokenizer.open_thought(prompts[place])
            cut += not sample.stopped
            # An interrupted judge or teacher states nothing: its "yes" may have been half of a
            # thought.
            yield place, thought + self.tokenizer.decode(sample.content) if sample.stopped else ""
        if cut:
            cap = options.max_tokens
            log.warning("%d of %d replies were cut off at %d tokens: not read", cut, len(ids), cap)
        self.release()

    def fit(self, prompts: Sequence[str], max_tokens: int) -> tuple[list[np.ndarray], list[int]]:
        """Return token ids, int32 [P], and indices of prompts that leave room for `max_tokens`."""
        room = self.config.max_positions - max_tokens
        ids = enumerate(np.array(self.tokenizer.chat(prompt), np.int32) for prompt in prompts)
        fitting = {place: prompt_ids for place, prompt_ids in ids if len(prompt_ids) <= room}
        return list(fitting.values()), list(fitting)


def check_room(policy: Policy, max_tokens: int, name: str) -> None:
    """Raise ValueError if replies of `max_tokens` by the role `name` leave no room for a prompt."""
    positions = policy.config.max_positions
    if not 0 < max_tokens < positions:
        raise ValueError(
            f"{name}_max_tokens = {max_tokens}: must leave room for a prompt in the "
            f"{name}'s max_position_embeddings = {positions}"
        )
