"""Sampler: two jitted programs, prefill and decode, for one policy on one mesh.

1. A request is a prompt and a number G of samples. `programs.prefill` reads the prompt once, page
   by page; `programs.decode` samples its G answers against the shared KV cache.
2. A Session (session.py) serves requests with fixed weights. The scheduler (scheduler.py) assigns
   pages and decode slots.
3. Answers do not depend on the slot, on other requests, or on the time of submission: every token
   has its own PRNG key, folded from request, sample and token index.
4. A prompt above `max_prompt` is refused. Logits that are not finite end the run with an error that
   names the request.
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
    """Sampling parameters and compiled shapes; sizes are totals over all devices.

    Attributes:
      temperature: softmax temperature, see Options (paper section 4.1: 0.7).
      top_p: nucleus mass, see Options (paper section 4.1: 0.95).
      top_k: number of most likely tokens to keep, see Options.
      min_p: least probability relative to the most likely token, see Options.
      max_tokens: maximum length S of a question or an answer, in tokens.
      max_verdict_tokens: maximum length of a verdict, in tokens.
      max_prompt: maximum length P of a prompt, in tokens.
      page_size: tokens of a page, C. Prompts share whole pages only.
      kv_cache_tokens: capacity of the page pool in tokens, for prompts and answers together.
      slots: number of sequences decoded at once.
      samples_per_prompt_batch: number G of samples of one prompt that attend to it in one matrix
        product. Requests for a single answer use a second compiled shape.
      prefill_tokens: prompt tokens read by one prefill call.
      decode_tokens: maximum number of tokens that a decode call samples per slot. Free slots are
        filled between calls.
      speculative_tokens: number of tokens proposed per decode pass by prompt lookup
        (speculative.py); 0 disables it. Answers are unchanged (with an int8 pool up to rounding).
        Decoding is faster where answers quote the prompt.
      speculative_ngram: number of trailing tokens that must match at the place of a proposal.
      cache_dtype: dtype of the pool: "compute" (the compute dtype of the weights) or "int8" with
        one scale per token and head.
      weights_dtype: dtype of the kernels used for sampling: "compute" or "int8" (policy/int8.py;
        not for mixtures of experts). The int8 copy is made when a session starts and is kept beside
        the weights in the compute dtype.
      attention: kernel that reads the pool: "auto" (the platform's kernel) or "xla".
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
        """Maximum length of an answer in tokens, over all kinds of requests."""
        return max(self.max_tokens, self.max_verdict_tokens)

    @property
    def longest(self) -> int:
        """Maximum length of a prompt and its answer together, in tokens."""
        return self.max_prompt + self.longest_answer

    def options(self, max_tokens: int, **others: Any) -> Options:
        """Configured Options, for answers of at most `max_tokens` tokens."""
        common = Options(self.temperature, self.top_p, self.top_k, self.min_p)
        return dataclasses.replace(common, max_tokens=max_tokens, **others)

    def shape(self, mesh: jax.sharding.Mesh) -> Shape:
        """Sizes of one shard of the mesh's row axes.

        The number of slots is rounded up to a multiple of the number of devices, because each
        device samples for an equal share of them.

        Raises:
          ValueError: if page_size is not a multiple of mesh.context, or if a shard of the pool
            cannot hold the longest prompt and answer.
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
        """Builds the jitted programs; nothing is compiled yet.

        Args:
          policy: architecture of the policy.
          config: sampling parameters and sizes.
          stop_ids: token ids that end an answer.
          mesh: device mesh.
          stream: constructor of a tokenizer's incremental decoder. Requests with stop strings need
            it.

        Raises:
          ValueError: if the sizes of the config do not fit together or do not fit the policy.
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
        """Initial state of a session, with an empty pool.

        Also used under `eval_shape`. `dtype` is the compute dtype.
        """
        c, shape = self.policy, self.shape
        cached = jnp.int8 if self.config.cache_dtype == "int8" else dtype
        _, kv_heads = kv_cache.head_split(self.mesh, c.heads, c.kv_heads)
        pages = self.shards * (shape.pages + 1)  # page 0 of each shard is scratch
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
        """Session with the given weights (in the compute dtype); allocates its pool."""
        if self._quantized is not None:
            params = int8.joined(params, self._quantize(int8.kernels(params)))
        return Session(self, params)

    def abstract_params(self, params: transformer.Params) -> transformer.Params:
        """Shapes and shardings of the weights that the programs receive.

        Args:
          params: shapes with shardings of the weights that `begin` receives.
        """
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
        """Samples `group` answers for every prompt.

        Args:
          params: parameters in the compute dtype.
          prompts: token ids of each prompt.
          group: number of samples per prompt, G.
          key: PRNG key; sample g of request i uses fold_in(fold_in(key, i), g).
          max_tokens: maximum length of an answer; by default the configured one.
          **others: fields of Options that replace the configured ones.

        Returns:
          For each prompt its G samples, or None if the prompt is above the cap.

        Raises:
          ValueError: if a prompt is empty, or `group` or an option is out of range.
          FloatingPointError: if the policy's logits are not finite.
        """
        cap = self.config.max_tokens if max_tokens is None else max_tokens
        options = self.config.options(cap, **others)
        return self.begin(params).sample(prompts, group, key, options)

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is within the cap `max_prompt`."""
        return len(prompt) <= self.config.max_prompt
