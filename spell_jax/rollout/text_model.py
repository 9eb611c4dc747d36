"""Text models: the place where texts become requests and samples become replies.

1. `encode` writes a text in the chat layout; `make_reply` (replies.py) decodes the samples.
2. `TextSampler` has both beside the sampler of a run, which the rollout worker asks.
3. `TextModel` is a policy folder: `ask` compiles a sampler for its prompts, and loads the weights.
"""

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
from spell_jax.policy.tokenizer import Tokenizer
from spell_jax.rollout import flags
from spell_jax.rollout.replies import Prompt, Reply, make_reply
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files import hashes, paths
from spell_jax.runtime.hosts import distributed
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, SampleRequest

log = logging.getLogger(__name__)

# Sizes that depend on the machine's memory. Here kv_cache_tokens counts the tokens per row shard of
# the mesh, in addition to the longest prompt and answer. All lengths follow from the prompts.
SIZES = SamplerConfig(**flags.SIZES)


def encode(tokenizer: Tokenizer, text: str) -> Prompt:
    """Write a user turn in the chat layout; ValueError if the layout rejects the text."""
    return Prompt(tokenizer.chat(text), tokenizer.open_thought(text))


@dataclasses.dataclass(frozen=True)
class TextSampler:
    """A sampler and the tokenizer of its policy, for weights that change with each step."""

    sampler: Sampler
    tokenizer: Tokenizer


class TextModel:
    """A policy folder that answers texts: weights, tokenizer and sampler.

    The weights are loaded at the first use and kept until `release`.
    """

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
        # The folder of a model of the Hub has the name of a commit.
        named = pathlib.PurePosixPath(folder) if paths.is_remote(folder) else self.folder.resolve()
        self.name = named.name
        self.config, self.tokenizer = weights.read_config_and_tokenizer(self.folder, thinking)
        # A damaged file is a mistake of the user, told before the work.
        weights.check_headers(self.folder)
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

    def encode(self, text: str) -> Prompt:
        """Write a user turn in the chat layout; ValueError if the layout rejects the text."""
        return encode(self.tokenizer, text)

    def room(self, max_tokens: int) -> int:
        """Return the most tokens of a prompt beside an answer of `max_tokens` tokens."""
        return self.config.max_positions - max_tokens

    def ask(
        self,
        prompts: Sequence[str | Prompt],
        n: int,
        options: Options | Sequence[Options],
        keys: np.ndarray,
        *,
        truncated: str = "score",
        prompt_indices: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, Reply | None]]:
        """Sample `n` answers to each prompt: yield (index of the prompt, reply) as they complete.

        Prompts that leave no room for the longest answer in the policy's context come first, with
        None. All processes must call this method with equal arguments.

        Args:
          prompts: user turns, or prompts as tokens.
          n: number of answers to a prompt, G.
          options: sampling options of all answers, or of the answers to each prompt.
          keys: key data of each prompt, uint32 [prompts, 2]; the sampler folds in the sample and
            token indices.
          truncated: treatment of answers that their cap cut off, as AlgorithmConfig.truncated.
          prompt_indices: indices of the prompts to answer; None answers all. The compiled shapes
            follow from all prompts, so that an answer does not depend on `prompt_indices`.
        """
        if isinstance(options, Options):
            options = [options] * len(prompts)
        encoded = [p if isinstance(p, Prompt) else self.encode(p) for p in prompts]
        room = self.room(max((option.max_tokens for option in options), default=0))
        fitting = [i for i, prompt in enumerate(encoded) if len(prompt.ids) <= room]
        for i in sorted(set(range(len(prompts))) - set(fitting)):
            yield i, None
        places = None
        if prompt_indices is not None:
            place_of = {i: place for place, i in enumerate(fitting)}
            places = [place_of[i] for i in prompt_indices if i in place_of]
        ids = [np.asarray(encoded[i].ids, np.int32) for i in fitting]
        fitting_options = [options[i] for i in fitting]
        for place, samples in self.sample(ids, n, keys[fitting], fitting_options, places):
            i = fitting[place]
            yield i, make_reply(encoded[i], samples, self.tokenizer.decode, truncated)

    def sample(
        self,
        prompts: Sequence[np.ndarray],
        n: int,
        keys: np.ndarray,
        options: Sequence[Options],
        prompt_indices: Sequence[int] | None,
    ) -> Iterator[tuple[int, list[Sample]]]:
        """Sample as `ask`, from token ids int32 [P]: yield (index of the prompt, its G samples).

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
            max_prompt=longest,
            kv_cache_tokens=shards * (sizes.kv_cache_tokens + room),
            # A small set compiles small programs: unused slots would be decoded as well.
            slots=min(sizes.slots, n * len(prompts)),
            samples_per_prompt_batch=min(sizes.samples_per_prompt_batch, n),
            prefill_tokens=min(sizes.prefill_tokens, shards * sum(lengths)),
        )
        stream = self.tokenizer.stream
        sampler = Sampler(self.config, config, self.tokenizer.stop_ids, mesh, stream)
        session = sampler.start_session(self.load(mesh))
        tickets = {
            session.submit(SampleRequest(cast(Any, prompts[i]), n, keys[i], options[i])): i
            for i in indices
        }
        for ticket, samples in session.results():
            yield tickets[ticket], samples
