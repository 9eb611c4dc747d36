"""The sampler: requests in, answers out, by two programs.

1. A request is a prompt with G siblings. Its prompt is read once, page by page (steps.prefill), and
   all siblings decode behind it (steps.decode).
2. A session (session.py) answers requests with the same weights; how pages and slots are given out
   says schedule.py.
3. Answers do not depend on which slots or neighbors their requests had, nor on when they came in:
   every draw has its key by request, sibling and token.
4. A prompt over the cap is refused; logits that are no numbers end the run, by request.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spell_jax.attention import paged
from spell_jax.policy import int8, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.tokenizer_base import Stream
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.sampler import kv_cache, programs
from spell_jax.sampler.requests import Options, Sample
from spell_jax.sampler.scheduler import Shape
from spell_jax.sampler.session import Session

_CHOICES = {
    "cache_dtype": ("compute", "int8"),
    "weights_dtype": ("compute", "int8"),
    "attention": ("auto", "xla"),
}


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Sampling parameters and compiled shapes; sizes are over all devices.

    Attributes:
      temperature, top_p, top_k, min_p: see Options (paper section 4.1: 0.7 and 0.95).
      max_tokens: cap of a question or an answer, in tokens [S].
      max_verdict_tokens: cap of a verdict.
      max_prompt: cap of a prompt, in tokens [P].
      page_size: C, tokens of a page; prompts share whole pages.
      kv_cache_tokens: tokens of the pool, of prompts and answers.
      slots: siblings decoded at once.
      samples_per_prompt_batch: G, siblings of a prompt that meet it in one product; requests for
        one answer have a compiled shape of their own.
      prefill_tokens: of prompts read in one call.
      decode_tokens: that a slot draws in one call, at most; freed slots are filled between calls.
      speculative_tokens: that are looked up in the prompt and checked in one pass with the next; 0:
        none. Answers are the same (with an int8 pool up to its rounding), and sooner there where
        they quote.
      speculative_ngram: how many last tokens must stand where a guess is looked up.
      cache_dtype: of the pool: "compute", the weights' when they are played with, or "int8", with a
        scale for each token and head.
      weights_dtype: of the kernels that answers are sampled with: "compute" or "int8" (int8.py; not
        for mixtures of experts), made when a session begins, beside those in the compute dtype.
      attention: the kernel that reads the pool: "auto", the platform's, or "xla".
    """

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 4096
    max_verdict_tokens: int = 4096
    max_prompt: int = 18_000
    page_size: int = 128
    kv_cache_tokens: int = 1_048_576
    slots: int = 512
    samples_per_prompt_batch: int = 8
    prefill_tokens: int = 8192
    decode_tokens: int = 64
    speculative_tokens: int = 0
    speculative_ngram: int = 2
    cache_dtype: str = "compute"
    weights_dtype: str = "compute"
    attention: str = "auto"

    def __post_init__(self):
        sizes = ("max_tokens", "max_verdict_tokens", "max_prompt", "page_size", "kv_cache_tokens")
        sizes += (
            "slots",
            "samples_per_prompt_batch",
            "prefill_tokens",
            "decode_tokens",
            "speculative_ngram",
        )
        check_least(self, "sampler.", **dict.fromkeys(sizes, 1))
        if self.speculative_tokens < 0:
            raise ValueError(
                f"sampler.speculative_tokens = {self.speculative_tokens}: must be 0 or more"
            )
        check_choice(self, "sampler.", **_CHOICES)
        try:
            self.options(1)
        except ValueError as error:
            raise ValueError(f"sampler.{error}") from error

    @property
    def longest_answer(self) -> int:
        """Tokens that an answer may have, whatever a request says."""
        return max(self.max_tokens, self.max_verdict_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest answer together."""
        return self.max_prompt + self.longest_answer

    def options(self, max_tokens: int, **others: Any) -> Options:
        """The configured ones, for answers of at most so many tokens."""
        common = Options(self.temperature, self.top_p, self.top_k, self.min_p)
        return dataclasses.replace(common, max_tokens=max_tokens, **others)

    def shape(self, mesh: jax.sharding.Mesh) -> Shape:
        """Sizes of one part of the mesh's row axes.

        Slots are rounded up to a multiple of the devices, each of which draws for as many.

        Raises:
          ValueError: they cannot be split so, or the pool does not hold the longest prompt and
            answer.
        """
        shards, parts = meshes.row_shards(mesh), meshes.context_shards(mesh)
        if self.page_size % parts:
            raise ValueError(
                f"sampler.page_size = {self.page_size}: must be a multiple of "
                f"mesh.context = {parts}"
            )
        pages = self.kv_cache_tokens // self.page_size // shards
        slots = -(-self.slots // mesh.size) * (mesh.size // shards)
        lanes = {1: slots}
        lanes[min(self.samples_per_prompt_batch, slots)] = min(
            slots, 4 * -(-slots // self.samples_per_prompt_batch)
        )
        made = Shape(
            page_size=self.page_size,
            pages=pages,
            slots=slots,
            prompts=2 * slots,
            lanes=tuple(sorted(lanes.items())),
            tasks=max(1, self.prefill_tokens // self.page_size // shards),
        )
        longest = self.longest_answer
        if made.pages_of(self.max_prompt) + made.pages_of(longest) > pages:
            raise ValueError(
                f"sampler.kv_cache_tokens = {self.kv_cache_tokens}: a prompt of "
                f"{self.max_prompt} tokens and an answer of {longest} must fit on each of {shards} "
                f"parts of the mesh, which takes {shards * (self.longest + 2 * self.page_size)}"
            )
        return made


class Sampler:
    """Jitted sampling of one policy architecture on one mesh."""

    def __init__(
        self,
        policy: PolicyConfig,
        config: SamplerConfig,
        stop_ids: Sequence[int],
        mesh: jax.sharding.Mesh,
        stream: Callable[[], Stream] | None = None,
    ):
        """Args: `stream` is a tokenizer's; requests with stop strings need it.

        Raises:
          ValueError: the config's sizes do not go together, or not with the policy.
        """
        self.policy = policy
        self.config = config
        self.mesh = mesh
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.stream = stream
        self.shards = meshes.row_shards(mesh)
        self.shape = config.shape(mesh)
        kept = meshes.replicated(mesh)
        where = kv_cache.pages_sharding(mesh, policy)
        pages = paged.Pages(where, where)
        if config.cache_dtype == "int8":
            pages = paged.Pages(where, where, where, where)
        lanes = (kept,) * len(self.shape.lanes)
        own = (meshes.by_rows(mesh),) * len(lanes) if config.speculative_tokens else ()
        self.shardings = shardings = programs.State(pages, kept, lanes, own)
        kernel = config.attention
        self.prefill = jax.jit(
            functools.partial(programs.prefill, policy, kernel=kernel),
            donate_argnums=1,
            out_shardings=shardings,
        )
        self.decode = jax.jit(
            functools.partial(
                programs.decode,
                policy,
                page_size=config.page_size,
                steps=config.decode_tokens,
                stop_ids=self.stop_ids,
                speculation=programs.Speculation(
                    config.speculative_tokens, config.speculative_ngram
                ),
                kernel=kernel,
            ),
            static_argnames="lane",
            donate_argnums=1,
            out_shardings=(shardings, kept),
        )
        self._quantized = None
        if config.weights_dtype == "int8":
            int8.check(policy)
            shapes, axes = transformer.abstract_params(policy)
            whole = int8.kernels(meshes.shardings(mesh, axes, shapes))
            self._quantized = int8.placements(whole)
            self._quantize = jax.jit(int8.small_kernels, out_shardings=self._quantized)
        self.empty = jax.jit(self.make_empty, static_argnums=0, out_shardings=shardings)

    def make_empty(self, dtype: Any) -> programs.State:
        """What a session begins with, for `empty` and for shapes; `dtype` is the compute dtype."""
        c, shape = self.policy, self.shape
        cached = jnp.int8 if self.config.cache_dtype == "int8" else dtype
        _, kv_heads = kv_cache.head_split(self.mesh, c.heads, c.kv_heads)
        pages = self.shards * (shape.pages + 1)  # and nobody's
        slots = self.shards * shape.slots
        return programs.State(
            paged.empty(c.layers, pages, kv_heads, shape.page_size, c.head_size, cached),
            jnp.zeros((self.shards * shape.prompts, c.width), dtype),
            tuple(jnp.zeros((slots, c.width), dtype) for _ in shape.lanes),
            tuple(
                jnp.zeros((slots, self.config.longest_answer), jnp.int32)
                for _ in self.shardings.own
            ),
        )

    def begin(self, params: transformer.Params) -> Session:
        """A session with these weights (in the compute dtype); its pool is made now."""
        if self._quantized is not None:
            params = int8.joined(params, self._quantize(int8.kernels(params)))
        return Session(self, params)

    def abstract_params(self, params: transformer.Params) -> transformer.Params:
        """Placed shapes of the weights that programs are given, for those that `begin` is given."""
        if self._quantized is None:
            return params
        small = jax.eval_shape(int8.small_kernels, int8.kernels(params))
        return int8.joined(params, meshes.with_sharding(small, self._quantized))

    def sample(
        self,
        params: transformer.Params,
        prompts: Sequence[Sequence[int]],
        group: int,
        key: jax.Array,
        max_tokens: int | None = None,
        **others: Any,
    ) -> list[list[Sample] | None]:
        """Answers every prompt `group` times.

        Args:
          params: parameters in the compute dtype.
          prompts: token ids.
          group: G.
          key: PRNG key; request i and sibling g use fold_in(fold_in(key, i), g).
          max_tokens: instead of the configured cap.
          **others: of Options, instead of the configured ones.

        Returns:
          For each prompt its G samples, or None where the prompt is over the cap.

        Raises:
          ValueError: an empty prompt; group or an option out of range.
          FloatingPointError: the policy's logits are not numbers.
        """
        cap = self.config.max_tokens if max_tokens is None else max_tokens
        options = self.config.options(cap, **others)
        return self.begin(params).sample(prompts, group, key, options)

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is not over the cap."""
        return len(prompt) <= self.config.max_prompt
