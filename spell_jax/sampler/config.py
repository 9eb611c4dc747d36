"""Sampling parameters and compiled shapes of a sampler."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from spell_jax.policy.config import UNLIMITED
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.sampler.page_groups import Kind
from spell_jax.sampler.requests import Options
from spell_jax.sampler.shard import ShardShape

_SIZES = (  # fields that must be at least 1
    *("max_tokens", "max_prompt", "page_size", "kv_cache_tokens", "slots"),
    *("samples_per_prompt_batch", "prefill_tokens", "decode_tokens", "speculative_ngram"),
)
_CHOICES = {
    "cache_dtype": ("compute", "int8"),
    "weights_dtype": ("compute", "int8"),
    "attention": ("auto", "xla"),
}


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Sampling parameters and compiled shapes. Sizes are totals over all devices.

    Attributes:
      temperature: softmax temperature; 0 is greedy (paper section 4.1: 0.7).
      top_p: nucleus mass, in (0, 1], applied after top_k (paper section 4.1: 0.95).
      top_k: number of most likely tokens to keep; 0 keeps all.
      min_p: least probability as a share of the most likely token's, in [0, 1], after top_p.
      max_tokens: maximum length S of an answer, in tokens; a request may have a smaller one.
      max_prompt: maximum length P of a prompt, in tokens.
      page_size: tokens of a page, C. Prompts share whole pages only.
      kv_cache_tokens: capacity of the page pool in tokens of all layers, for prompts and answers
        together. Layers with a window hold fewer tokens, and their pages serve other layers.
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
      cache_dtype: dtype of the pool, "compute" (the compute dtype of the weights) or "int8" with
        one scale per token and head.
      weights_dtype: dtype of the kernels used for sampling, "compute" or "int8" (policy/int8.py;
        not for mixtures of experts). The int8 copy is made when a session starts and is kept beside
        the weights in the compute dtype; with policy.base_dtype = "int8" there is nothing to copy.
      attention: kernel that reads the pool, "auto" (the platform's kernel) or "xla".
    """

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 4096
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
        check_least(self, "sampler.", **dict.fromkeys(_SIZES, 1), speculative_tokens=0)
        check_choice(self, "sampler.", **_CHOICES)
        try:
            # Options checks the sampling parameters, so a request and a config have equal limits.
            self.options()
        except ValueError as error:
            raise ValueError(f"sampler.{error}") from error

    @property
    def longest(self) -> int:
        """Maximum length of a prompt and its answer together, in tokens."""
        return self.max_prompt + self.max_tokens

    def options(self, max_tokens: int | None = None, **overrides: Any) -> Options:
        """Return the configured Options; `max_tokens` and `overrides` replace fields of them."""
        cap = self.max_tokens if max_tokens is None else max_tokens
        common = Options(self.temperature, self.top_p, self.top_k, self.min_p, cap)
        return dataclasses.replace(common, **overrides)

    def shape(self, mesh: jax.sharding.Mesh, kinds: tuple[Kind, ...] = (Kind(),)) -> ShardShape:
        """Return the sizes of one shard of the mesh's row axes. All devices have as many slots.

        `kinds` are those of the policy's page groups. ValueError if page_size is not a multiple of
        mesh.context, or if a shard of the pool cannot hold the longest prompt and answer.
        """
        shards, parts = meshes.row_shards(mesh), meshes.context_shards(mesh)
        if self.page_size % parts:
            raise ValueError(
                f"sampler.page_size = {self.page_size}: must be a multiple of "
                f"mesh.context = {parts}"
            )
        # A window as long as the longest prompt and answer never releases a page.
        kinds = tuple(
            dataclasses.replace(kind, window=UNLIMITED) if kind.window >= self.longest else kind
            for kind in kinds
        )
        # A token of all layers takes a place in one page of every group.
        pages = self.kv_cache_tokens // self.page_size // shards * sum(k.groups for k in kinds)
        # Rounded up, because lm_head.logits splits slots evenly over all devices.
        slots = -(-self.slots // mesh.size) * (mesh.size // shards)
        # Full groups would need slots / G rows. As sequences end, groups shrink, and new groups
        # need rows beside them: 4 times as many rows keep free slots usable.
        lanes = {1: slots}
        lanes[min(self.samples_per_prompt_batch, slots)] = min(
            slots, 4 * -(-slots // self.samples_per_prompt_batch)
        )
        shape = ShardShape(
            page_size=self.page_size,
            pages=pages,
            slots=slots,
            # Twice the slots: if every slot has a prompt of its own, as many more can be prefilled.
            prompts=2 * slots,
            lanes=tuple(sorted(lanes.items())),
            tasks=max(1, self.prefill_tokens // self.page_size // shards),
            kinds=kinds,
        )
        # Prompt and answer have no page in common, so each rounds up to whole pages.
        if shape.prompt_pages(self.max_prompt) + shape.answer_pages(self.max_tokens) > pages:
            raise ValueError(
                f"sampler.kv_cache_tokens = {self.kv_cache_tokens}: a prompt of "
                f"{self.max_prompt} tokens and an answer of {self.max_tokens} must fit on each "
                f"of {shards} parts of the mesh, which takes "
                f"{shards * (self.longest + 2 * self.page_size)}"
            )
        return shape
