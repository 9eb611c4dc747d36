"""Sampling inside a caller's jitted program: fixed shapes, no scheduler, no refilled slots.

Shapes: R prompts of P tokens, K replies each of S tokens, N = R K decode slots, D width. The
scheduler's sessions (session.py) sample prompts of any length and refill slots; this function is
for programs that sample and train in one call, such as examples/jitted_step.py.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from spell_jax.attention import pages
from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import kv_cache, page_groups, programs
from spell_jax.sampler.sampling import Sampling

Array = Any  # NumPy outside of the program, JAX inside


class PaddedPrompts(NamedTuple):
    """R prompts of at most P tokens.

    Attributes:
      tokens: token ids, int32 [R, P], padded at the end.
      length: number of tokens, int32 [R]; 0: the prompt gets no reply.
    """

    tokens: Array
    length: Array


class PaddedReplies(NamedTuple):
    """K replies to each of R prompts, of at most S tokens.

    Attributes:
      tokens: token ids, int32 [R K, S], undefined after the end.
      logprobs: logprobs of the tokens as they were sampled, float32 [R K, S].
      length: number of tokens with the stop token, int32 [R K].
      stopped: whether the last token is a stop token, bool [R K]. False where S tokens were not
        enough, and where the prompt gets no reply.
    """

    tokens: Array
    logprobs: Array
    length: Array
    stopped: Array


def sample(
    policy: PolicyConfig,
    params: transformer.Params,
    mesh: jax.sharding.Mesh,
    prompts: PaddedPrompts,
    key: jax.Array,
    *,
    replies: int,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float = 1.0,
) -> PaddedReplies:
    """Sample K = `replies` replies of at most S = `max_tokens` tokens to each prompt.

    R must be a multiple of the mesh's row shards, and S at most P. `params` are in the compute
    dtype. A temperature of 0 is greedy.
    """
    (R, P), S, D = prompts.tokens.shape, max_tokens, policy.width
    N, shards = R * replies, meshes.row_shards(mesh)
    if S > P:
        raise ValueError(f"max_tokens = {S}: must be at most {P}, the tokens of a padded prompt")
    if R % shards:
        raise ValueError(f"prompts: {R}; must be a multiple of {shards}, the mesh's row shards")
    # A shard counts its prompts, slots and pages from 0. Its first page is scratch, for writes of
    # idle slots. A page has P tokens, so in each page group a reply fits into one page, and K
    # replies share their prompt's page.
    prompt, slot = jnp.arange(R) % (R // shards), jnp.arange(N) % (N // shards)
    groups = page_groups.page_groups(policy)
    first_page = 1 + jnp.arange(groups.count) * ((R + N) // shards)
    prompt_page = first_page + prompt[:, None]
    slot_page = first_page + R // shards + slot[:, None]
    _, kv_heads = kv_cache.head_split(mesh, policy.heads, policy.kv_heads)
    dtype = params["final_norm"]["scale"].dtype  # other weights may be int8
    pool = groups.size, shards + (R + N) * groups.count, kv_heads, P, policy.head_size, dtype
    empty = jnp.zeros((R, D), dtype), (jnp.zeros((N, D), dtype),)
    state = programs.State(pages.empty_pages(*pool), *empty, ())
    prompt_pages = programs.PromptPages(
        tokens=prompts.tokens,
        start=jnp.zeros(R, jnp.int32),
        length=prompts.length,
        page=prompt_page,
        table=prompt_page[..., None],
        prefilled=jnp.arange(R),
    )
    slots = programs.Slots(
        prefilled=jnp.arange(R).repeat(replies),
        prompt_length=prompts.length.repeat(replies),
        count=jnp.zeros(N, jnp.int32),
        limit=jnp.where(prompts.length > 0, S, 0).repeat(replies),  # 0: the slot is idle
        key=jax.random.key_data(jax.random.split(key, R)).repeat(replies, axis=0),
        sample_index=jnp.arange(N) % replies,
        row=prompt.repeat(replies),
        cell=jnp.arange(N) % replies,
        slot=slot.reshape(R, replies),
        prompt_table=prompt_page[..., None],
        prompt_visible=prompts.length[:, None].repeat(replies, axis=1),
        suffix_table=slot_page[..., None],
        sampling=Sampling(*(jnp.full(N, x) for x in (temperature, 0, 1.0, 0.0))),
        most_idle=jnp.full(1, N * S),  # go on until every reply has ended
    )
    with nn.logical_axis_rules(meshes.RULES):  # many tokens at once: weights move to them
        state, _ = programs.prefill(policy, params, state, prompt_pages)
    with nn.logical_axis_rules(meshes.DECODE_RULES):  # few tokens: they move to the weights
        decode = functools.partial(programs.decode, lane=0, page_size=P, steps=S)
        _, sampled = decode(policy, params, state, slots, stop_ids=stop_ids)
    tokens = sampled.tokens
    return PaddedReplies(tokens.id, tokens.logprob, sampled.new, sampled.stopped)
