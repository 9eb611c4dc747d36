"""Sampler: two jitted programs, prefill and decode, for one policy on one mesh.

A request is a prompt and a number G of samples. `programs.prefill` reads the prompt once, page by
page; `programs.decode` samples its G answers against the shared KV cache. Every token has its own
PRNG key, folded from request, sample and token index, so answers do not depend on the slot, on
other requests, or on the time of submission.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spell_jax.attention.pages import Pages, empty_pages, stored_dtype
from spell_jax.data.samples import Sample
from spell_jax.policy import int8, transformer
from spell_jax.policy.config import UNLIMITED, PolicyConfig
from spell_jax.policy.tokenizer_base import Stream
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import batching, kv_cache, programs
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.page_groups import Kind, page_groups
from spell_jax.sampler.session import Session

# Compiler options of decoding on NVIDIA GPUs. A pass has few rows, so reading the weights takes
# most of its time. By default XLA first copies each layer's weights out of the stacked array, for
# its Triton products, or joins the weights of gate and up, for its dot merger. With these options
# cuBLAS reads a layer's weights where they are. On an H200 a pass of Qwen2.5-1.5B with 8 answers
# then takes 4.5 ms instead of 5.1. The copies took 24 % of a pass
# (launch/experiments/notebooks/h200.md).
_GPU_DECODE_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
}


class Sampler:
    """Jitted sampling of one policy architecture on one mesh."""

    def __init__(
        self,
        policy: PolicyConfig,
        config: SamplerConfig,
        stop_ids: Sequence[int],
        mesh: jax.sharding.Mesh,
        stream: Callable[[], Stream] | None = None,
        record_experts: bool = False,
        has_dropout: bool = False,
    ):
        """Build the jitted programs; nothing is compiled yet.

        Token ids `stop_ids` end an answer. Stop strings need `stream`, the constructor of a
        tokenizer's incremental decoder. With `record_experts`, for a mixture of experts, samples
        have the experts that processed their tokens. With `has_dropout`, requests may have
        vocabulary dropout (Options.dropout). ValueError if sizes do not fit.
        """
        self.policy = policy
        self.config = config
        self.mesh = mesh
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.stream = stream
        self.has_dropout = has_dropout
        self.shards = meshes.row_shards(mesh)
        self.groups = page_groups(policy)
        self.shape = config.shape(mesh, self._kinds(record_experts))
        replicated, lanes = meshes.replicated(mesh), len(self.shape.lanes)
        # An int8 pool has keys, values and the scales of both.
        arrays = 4 if config.cache_dtype == "int8" else 2
        pages = Pages(*(kv_cache.pages_sharding(mesh, policy),) * arrays)
        answer_shardings = (meshes.by_rows(mesh),) * lanes if config.speculative_tokens else ()
        # Hidden states, [R, D] and [N, D], are replicated: they are small beside pages and weights.
        self.shardings = shardings = programs.State(
            pages, replicated, (replicated,) * lanes, answer_shardings
        )
        kernel = config.attention
        self.prefill: jax.stages.Wrapped = jax.jit(
            functools.partial(
                batching.prefill,
                policy,
                kernel=kernel,
                record_experts=record_experts,
            ),
            donate_argnums=1,
            out_shardings=(shardings, replicated),
        )
        self.decode: jax.stages.Wrapped = jax.jit(
            functools.partial(
                batching.decode,
                policy,
                page_size=config.page_size,
                steps=config.decode_tokens,
                stop_ids=self.stop_ids,
                speculation=programs.Speculation(
                    config.speculative_tokens, config.speculative_ngram
                ),
                kernel=kernel,
                record_experts=record_experts,
            ),
            static_argnames="lane",
            donate_argnums=1,
            out_shardings=(shardings, replicated),
            compiler_options=self._decode_options(),
        )
        self._quantized = None
        # An int8 base of adapters is sampled from as it is trained on.
        if config.weights_dtype == "int8" and not policy.has_int8_base:
            int8.check_quantizable(policy, "sampler.weights_dtype")
            shapes, axes = transformer.abstract_params(policy)
            kernels = int8.kernels(meshes.shardings(mesh, axes, shapes))
            self._quantized = int8.int8_shardings(kernels)
            self._quantize = jax.jit(int8.quantize, out_shardings=self._quantized)
        self.init_state: jax.stages.Wrapped = jax.jit(
            self._init_state, static_argnums=0, out_shardings=shardings
        )

    def _kinds(self, record_experts: bool) -> tuple[Kind, ...]:
        """Return the kinds of page groups, as the scheduler is to release their pages."""
        kinds = self.groups.kinds
        if record_experts and kinds[0].window != UNLIMITED:
            # Experts of a prompt are stored by its pages, so one group at least keeps all of them.
            return (dataclasses.replace(kinds[0], window=UNLIMITED),)
        return kinds

    def _decode_options(self) -> dict[str, Any] | None:
        """Return the compiler options of decoding; None if the mesh is abstract or not of GPUs."""
        devices = [] if isinstance(self.mesh, jax.sharding.AbstractMesh) else self.mesh.devices.flat
        on_gpu = any(device.platform in ("gpu", "cuda") for device in devices)
        # int8 weights need XLA's Triton products, which cast as they read.
        has_int8 = self.config.weights_dtype == "int8" or self.policy.has_int8_base
        return _GPU_DECODE_OPTIONS if on_gpu and not has_int8 else None

    def _init_state(self, dtype: Any) -> programs.State:
        """Return a State with an empty pool, for weights of a compute dtype."""
        c, shape = self.policy, self.shape
        cached = jnp.int8 if self.config.cache_dtype == "int8" else stored_dtype(dtype, self.mesh)
        _, kv_heads = kv_cache.head_split(self.mesh, c.heads, c.kv_heads)
        pages = self.shards * (shape.pages + 1)  # page 0 of each shard is scratch
        slots = self.shards * shape.slots
        return programs.State(
            empty_pages(self.groups.size, pages, kv_heads, shape.page_size, c.head_size, cached),
            jnp.zeros((self.shards * shape.prompts, c.width), dtype),
            tuple(jnp.zeros((slots, c.width), dtype) for _ in shape.lanes),
            tuple(
                jnp.zeros((slots, self.config.max_tokens), jnp.int32)
                for _ in self.shardings.answers
            ),
        )

    def start_session(self, params: transformer.Params) -> Session:
        """Start a session with the given weights (in the compute dtype); allocate its page pool."""
        return Session(self, self.quantized(params))

    def quantized(self, params: transformer.Params) -> transformer.Params:
        """Return the weights that the programs read: with sampler.weights_dtype, kernels in int8.

        Weights that are int8 already are returned unchanged.
        """
        if self._quantized is None or params["layers"]["mlp"]["up_kernel"].dtype == jnp.int8:
            return params
        return int8.with_int8(params, self._quantize(int8.kernels(params)))

    def abstract_params(self, params: transformer.Params) -> transformer.Params:
        """Return shapes and shardings of the programs' weights, given abstract `params`."""
        if self._quantized is None:
            return params
        small = jax.eval_shape(int8.quantize, int8.kernels(params))
        return int8.with_int8(params, meshes.with_sharding(small, self._quantized))

    def sample(
        self,
        params: transformer.Params,
        prompts: Sequence[Sequence[int]],
        group: int,
        key: jax.Array,
        max_tokens: int | None = None,
        **overrides: Any,
    ) -> list[list[Sample] | None]:
        """Sample `group` answers for every prompt; None for a prompt above the cap.

        `params` are in the compute dtype. Sample g of request i uses fold_in(fold_in(key, i), g).
        `max_tokens` and `overrides`, fields of Options, replace the configured ones. ValueError if
        a prompt is empty, or `group` or an option is out of range; FloatingPointError if the
        policy's logits are not finite.
        """
        options = self.config.options(max_tokens, **overrides)
        return self.start_session(params).sample(prompts, group, key, options)

    def prompt_fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) <= self.config.max_prompt
