"""Operations and bytes of the jitted programs, counted on shapes: the input of step_time.py.

1. `ProgramCounts` of a policy on a mesh: one prefill call, one decode pass, one micro-batch of the
   update, one application of its gradients. All numbers are for one chip.
2. Operations of products with weights are counted in the traced programs, with what the backward
   pass recomputes, and scale with tokens and answer slots (Products).
3. Attention is counted in pairs of a query and a key, because its kernels skip blocks by the data,
   which a trace does not know. tests/launch/test_work.py compares all with XLA's cost analysis.
4. Memory traffic counts weights, keys, logits, gradients, optimizer state, and the activations
   between products. A trace has no bytes: XLA fuses most of its arrays away, and _TOUCHED says how
   often one between products is read or written.
5. The interconnect has the bytes that a chip receives, and the ring hops of collectives that
   nothing can hide. Shardings are propagated by the compiler, so a trace has no collectives.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from spell_jax.launch import aot
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import sampling

# Arrays as large as a product's input or result that a layer reads or writes, for each product:
# its input and its result once (XLA fuses norms, biases, RoPE and activations into neighbors).
_TOUCHED = 2
# Passes of the sampling over float32 logits and their exponentials [N, V], which no cache holds:
# two arrays in each bisection of top-p, and about ten elsewhere (sampler/sampling.py).
_LOGIT_PASSES = 2 * sampling.BISECTIONS + 10
# Products of queries and keys or values: two forward; backward, the scores again, two gradients of
# weights and scores, and gradients of q, k and v. splash.py has two backward kernels, which both
# compute scores and gradients of weights.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS, SPLASH_BACKWARD_PRODUCTS = 2, 5, 7
# Collectives of a layer in a decode pass with weights split by width, one after the other: sums of
# squares of two norms, q k v, attention's result and its two layouts, gate and up, the layer's sum
# (aot.collectives of the compiled program).
_DECODE_COLLECTIVES = 8


class Work(NamedTuple):
    """Operations and bytes of a program on one chip."""

    products: float = 0.0  # operations of products with weights
    attention: float = 0.0  # operations of products of queries with keys, and of weights and values
    memory: float = 0.0  # bytes read from and written to the chip's memory
    link: float = 0.0  # bytes received from other chips
    hops: float = 0.0  # ring steps of the collectives that nothing hides

    def __add__(self, other: Work) -> Work:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Work:
        return Work(*(value * factor for value in self))


class Products(NamedTuple):
    """Operations of products with weights on all chips: 2 per multiplied weight and row."""

    layers: float  # of the scan over the layers; for one token after `per`
    head: float  # of the LM head; for one answer slot after `per`

    def __add__(self, other: Products) -> Products:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Products(self.layers + other.layers, self.head + other.head)

    def times(self, factor: float) -> Products:
        return Products(self.layers * factor, self.head * factor)

    def per(self, tokens: int, answers: int) -> Products:
        """Return the operations for one token and for one answer slot."""
        return Products(self.layers / tokens, self.head / answers)


def count_products(jaxpr: Any, experts: int = 1) -> Products:
    """Count the products with weights in a traced program; a loop without a length runs once.

    `experts` is the size of the mesh axis over which experts are split.
    """
    return _count(jaxpr, experts)[0]


def _count(jaxpr: Any, experts: int) -> tuple[Products, bool]:
    """Return the products of an inner program too, and whether it contains attention."""
    total, has_attention = Products(0.0, 0.0), False
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            operations = _product_operations(equation)
            total += Products(0.0, operations)
            has_attention |= not operations
        elif name.startswith("ragged_dot"):
            # A chip multiplies the rows of its own experts.
            rows, result = equation.invars[0].aval, equation.outvars[0].aval
            total += Products(0.0, 2.0 * rows.size * result.shape[-1] / experts)
        elif name == "pallas_call":
            has_attention = True
        else:
            inner, is_attending = _count_inner(name, parameters, experts)
            # The scan over the layers is the loop with attention; the head's has none.
            is_layers = name == "scan" and is_attending
            total += Products(sum(inner), 0.0) if is_layers else inner
            has_attention |= is_attending
    return total, has_attention


def _count_inner(name: str, parameters: Any, experts: int) -> tuple[Products, bool]:
    """Count the inner programs of an equation, as often as they run on all chips."""
    programs = [getattr(part, "jaxpr", part) for part in jaxprs_in_params(parameters)]
    counted = [_count(program, experts) for program in programs]
    has_attention = any(is_attending for _, is_attending in counted)
    parts = [products for products, _ in counted]
    if name == "cond":  # one branch runs: the same on another platform, or nothing
        parts = [max(parts, key=sum)]
    times = parameters["length"] if name == "scan" else 1
    if name == "shard_map":
        times = parameters["mesh"].size
    return sum(parts, Products(0.0, 0.0)).times(times), has_attention


def _product_operations(equation: Any) -> float:
    """Count the operations of a dot_general; 0 for attention, the product of two batches."""
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    factor, result = equation.invars[0].aval, equation.outvars[0].aval
    depth = math.prod(factor.shape[axis] for axis in contracted)
    return 0.0 if batched else 2.0 * result.size * depth


class ProgramCounts:
    """Counts of a run's programs on a mesh, which may be abstract.

    Attributes:
      sampling: counts on the mesh of prefill and decode; of all other programs, this object's.
    """

    def __init__(
        self,
        programs: aot.RunPrograms,
        splash: bool = False,
        dimensions: int = 1,
        mesh: Any = None,
    ):
        """Count for a run; nothing is traced yet.

        `splash` says whether attention's backward pass is splash.py's (TPU), `dimensions` counts
        the physical axes of the slice, which a collective crosses one after the other. `mesh` is by
        default the training mesh.
        """
        self.policy, self.mesh = programs.policy, mesh or programs.mesh
        self.itemsize = programs.learner.compute_dtype.itemsize
        self.splash, self.dimensions = splash, dimensions
        self.programs = programs
        # int8 weights, of the base or of a copy for sampling, are one byte beside their scales.
        self.weight_bytes = _mean_bytes(programs.rollout_params)
        self.sampled_bytes = _mean_bytes(programs.sampler.abstract_params(programs.rollout_params))
        cache = programs.sampler.config.cache_dtype
        scaled = 1 + 4 / self.policy.head_size  # a float32 scale for each token and head
        self.cached_bytes = scaled if cache == "int8" else self.itemsize
        self._products: dict[str, Products] = {}
        rollout = programs.meshes.rollout
        is_both = mesh is not None or rollout is None
        self.sampling = self if is_both else ProgramCounts(programs, splash, dimensions, rollout)

    def products(self, name: str) -> Products:
        """Return the products of a program of aot.PROGRAMS for one token and one answer slot."""
        if name not in self._products:
            program = self.programs.program(name)
            experts = self.mesh.shape[meshes.EXPERT]
            counted = count_products(program.trace().jaxpr.jaxpr, experts)
            tokens = math.prod(program.tokens)
            # A decode pass samples from every row; rows of training have slots for answers.
            bucket = self.programs.bucket
            slots = tokens if name == "decode" else tokens // bucket.length * bucket.answers
            self._products[name] = counted.per(tokens, max(1, slots))
        return self._products[name]

    # ---------------------------------------------------------------------------------- Sizes

    @property
    def chips(self) -> int:
        return self.mesh.size

    @property
    def width_shards(self) -> int:
        """Chips that share the width of a weight; a layer's weights are gathered from them."""
        return self.mesh.shape["fsdp"] * self.mesh.shape[meshes.CONTEXT]

    @property
    def attention_weights(self) -> int:
        """Weights of q, k, v and o in a layer."""
        c = self.policy
        return 2 * c.width * c.head_size * (c.heads + c.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Weights of a layer's SwiGLU, or of one expert."""
        return 3 * self.policy.width * self.policy.feed_forward

    @property
    def _held(self) -> float:
        """Part of the weights of a layer that a chip multiplies with: a tensor and expert shard."""
        c, experts = self.policy, self.mesh.shape[meshes.EXPERT]
        mlp = self.mlp_weights * (c.experts or 1) / (experts if c.experts else 1)
        return c.layers * (self.attention_weights + mlp) / self.mesh.shape[meshes.TENSOR]

    def _received_keys(self, tokens: float) -> float:
        """Count the bytes of keys and values that a chip receives in rows of `tokens` tokens."""
        c, context = self.policy, self.mesh.shape[meshes.CONTEXT]
        if context == 1:
            return 0.0
        # Of a layer with a window, only the ends of the chunks travel: two chunks on each chip.
        row = self.programs.bucket.length
        shares = [min(1.0, 2 * context * window / row) for window in c.layer_windows]
        keys = 2 * c.kv_heads * c.head_size * sum(shares) / self.mesh.shape[meshes.TENSOR]
        return self._received(tokens * keys, context)

    def _received(self, numbers: float, chips: int, itemsize: float | None = None) -> float:
        """Count bytes a chip receives in an all-gather or reduce-scatter of `numbers` numbers."""
        return numbers * (self.itemsize if itemsize is None else itemsize) * (chips - 1) / chips

    # ------------------------------------------------------------------------------- Programs

    def _pairs(self, pairs: float, products: int) -> float:
        """Count operations of `products` products over (query, key) pairs, in all layers."""
        c = self.policy
        return 2.0 * products * c.layers * c.heads * c.head_size * pairs / self.chips

    @property
    def _activations(self) -> float:
        """Activation elements read or written per token in a forward pass, over all layers."""
        c = self.policy
        queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
        mlp = 3 * (c.width + c.feed_forward) * (c.experts_per_token or 1)
        products = 2 * c.width + 2 * (queries + keys) + mlp  # inputs and results of all products
        return _TOUCHED * c.layers * products

    def prefill(self, call_tokens: int, pairs: float, keys: float) -> Work:
        """Count a prefill call's work: `call_tokens` tokens of all row shards, padding included.

        `pairs` counts (token, key) pairs; `keys` counts keys read, once for each page of queries.
        """
        c, shape, n = self.policy, self.mesh.shape, self.width_shards
        chip_tokens = call_tokens / self.chips
        cached = 2 * c.kv_heads * c.head_size * c.layers * self.cached_bytes
        gathered = self._held * self.sampled_bytes
        memory = gathered * (2 if n > 1 else 1)  # written by the gather, read by the products
        memory += chip_tokens * self._activations * self.itemsize
        memory += (keys / self.chips + chip_tokens) * cached
        link = self._received(self._held, n, self.sampled_bytes) + self._exchanged(chip_tokens)
        if (context := shape[meshes.CONTEXT]) > 1:  # queries are gathered, float32 sums scattered
            heads = c.layers * c.heads * c.head_size / shape[meshes.TENSOR]
            link += self._received(chip_tokens * context * heads, context)
            link += self._received(chip_tokens * context * heads, context, 4)
        products = self.products("prefill").layers * chip_tokens
        return Work(products, self._pairs(pairs, FORWARD_PRODUCTS), memory, link)

    def _exchanged(self, chip_tokens: float) -> float:
        """Count the bytes of activations that a chip of `chip_tokens` receives in a forward pass.

        With `tensor`, two all-reduces a layer; with `expert`, tokens are gathered and sums are
        scattered.
        """
        c, link = self.policy, 0.0
        tensor, expert = self.mesh.shape[meshes.TENSOR], self.mesh.shape[meshes.EXPERT]
        # Rows are not split over `tensor`: its chips share the tokens of one part.
        if tensor > 1:
            link += 4 * self._received(chip_tokens * tensor * c.width, tensor) * c.layers
        if expert > 1:
            link += 2 * self._received(chip_tokens * tensor * expert * c.width, expert) * c.layers
        return link

    def decode_pass(self, slots: int) -> Work:
        """Count the work of a decode pass of all slots, without attention to keys (`decode_keys`).

        Weights stay in place: chips multiply all rows of their part of `data` by their shards.
        """
        c, shape, n = self.policy, self.mesh.shape, self.width_shards
        rows, tensor, expert = slots / shape["data"], shape[meshes.TENSOR], shape[meshes.EXPERT]
        attention = c.layers * (self.attention_weights + c.width * c.experts)
        mlp, head = c.layers * self.mlp_weights, c.vocab_size * c.width
        read = mlp
        # An expert is read if any row selects it. All experts are assumed equally likely.
        if c.experts:
            read *= c.experts * (1 - (1 - c.experts_per_token / c.experts) ** rows)
        products = sum(self.products("decode")) * slots / self.chips
        memory = (attention + head + read / expert) * self.sampled_bytes / (n * tensor)
        memory += slots / self.chips * c.vocab_size * 4 * _LOGIT_PASSES
        link, hops, group = 0.0, 0.0, n * tensor * expert
        if group > 1:
            queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
            # Sums of products over shards of the width (float32 for experts), and gathers.
            summed = queries + 2 * keys + 2 * c.feed_forward * (2 * c.experts_per_token or 1)
            gathered = queries + 2 * c.width * tensor
            link = c.layers * rows / tensor * self._received(2 * summed + gathered, n)
            link += 4 * c.layers * rows / n * self._received(c.width, tensor)
            link += 2 * c.layers * rows / n * self._received(c.width, expert)
            link += self._received(rows / expert * c.vocab_size / tensor, n, 4)
            # Both ways around the ring of each physical axis.
            ring = self.dimensions * group ** (1 / self.dimensions) / 2
            hops = _DECODE_COLLECTIVES * c.layers * ring
        return Work(products, 0.0, memory, link, hops)

    def decode_keys(self, pairs: float, keys: float) -> Work:
        """Count the attention of decode passes, from (token, key) pairs and keys read."""
        c = self.policy
        memory = keys * 2 * c.kv_heads * c.head_size * c.layers * self.cached_bytes / self.chips
        return Work(attention=self._pairs(pairs, FORWARD_PRODUCTS), memory=memory)

    def forward(self, tokens: int, answers: int, pairs: float) -> Work:
        """Count the work of a micro-batch's logprobs: `tokens` tokens, `answers` answer slots, with
        padding; `pairs` counts pairs of a token and a key that the token attends to.
        """
        return self._forward_traffic(tokens, answers)._replace(
            products=self._training_products("logprob", tokens, answers),
            attention=self._pairs(pairs, FORWARD_PRODUCTS),
        )

    def _training_products(self, name: str, tokens: int, answers: int) -> float:
        products = self.products(name)
        return (products.layers * tokens + products.head * answers) / self.chips

    def _forward_traffic(self, tokens: int, answers: int) -> Work:
        """Count the bytes of a forward pass, without operations."""
        c, chip_tokens = self.policy, tokens / self.chips
        gathered = self._held + c.vocab_size * c.width / self.mesh.shape[meshes.TENSOR]
        n, row_tokens = self.width_shards, chip_tokens * self.mesh.shape[meshes.CONTEXT]
        link = self._received_keys(row_tokens) + self._exchanged(chip_tokens)
        link += self._received(gathered, n, self.weight_bytes)
        memory = gathered * self.weight_bytes * (2 if n > 1 else 1)
        memory += (
            chip_tokens * self._activations * self.itemsize
            + answers / self.chips * c.vocab_size * 8
        )
        return Work(memory=memory, link=link)

    def micro_batch(self, tokens: int, answers: int, pairs: float) -> Work:
        """Count the work of a micro-batch's gradient and its sum; arguments as in `forward`."""
        c, forward = self.policy, self._forward_traffic(tokens, answers)
        trained = not c.lora
        recomputes = c.remat not in ("none", "dots")
        pair_products = BACKWARD_PRODUCTS if not self.splash else SPLASH_BACKWARD_PRODUCTS
        # "none" and "attention" keep the scores' result.
        pair_products += FORWARD_PRODUCTS * (1 + (c.remat not in ("none", "attention")))
        # Weights and keys are gathered once more, and gradients are summed in float32.
        head = c.vocab_size * c.width / self.mesh.shape[meshes.TENSOR]
        gathered, n = self._held + head, self.width_shards
        link, shape = 2 * forward.link, self.mesh.shape
        if trained:
            # Chips of `data` have copies of all weights, chips of `expert` of all but the experts.
            # A sum over copies is an all-reduce, twice the bytes of a reduce-scatter.
            experts = c.layers * self.mlp_weights * c.experts
            experts /= shape[meshes.TENSOR] * shape[meshes.EXPERT]
            link += self._received(gathered, n, 4)
            link += 2 * self._received(gathered / n, shape["data"], 4)
            link += 2 * self._received((gathered - experts) / n, shape[meshes.EXPERT], 4)
        # Three or four passes over activations; the accumulated gradient is read and written.
        memory = (4 if recomputes else 3) * forward.memory + trained * 3 * gathered * 4 / n
        products = self._training_products("accumulate", tokens, answers)
        return Work(products, self._pairs(pairs, pair_products), memory, link)

    def apply(self) -> Work:
        """Count the memory traffic of one AdamW step, all float32."""
        # It reads the gradient twice (norm, update), and reads and writes weights and both moments.
        return Work(memory=self._share(4 * (2 + 2 + 4)))

    def cast(self) -> Work:
        """Count the bytes of casting the trained float32 weights to the compute dtype."""
        return Work(memory=self._share(4 + self.itemsize))

    def _share(self, numbers: float) -> float:
        """Count bytes on one of the chips that split the trained weights, `numbers` a weight."""
        weights = sum(leaf.size for leaf in jax.tree.leaves(self.programs.trained))
        return numbers * weights * self.mesh.shape["data"] / self.chips


def _mean_bytes(params: Any) -> float:
    """Return the mean bytes of a parameter."""
    leaves = jax.tree.leaves(params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / sum(x.size for x in leaves)
